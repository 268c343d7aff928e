// Writes the keys and gradients that all sides of a case read.
//
//   bench_keys ids DIST ROWS COUNT SEED FILE    COUNT ids of a table of ROWS rows, 8 bytes each
//   bench_keys grads COUNT SEED FILE            COUNT floats in (-0.1, 0.1)
//   bench_keys share FILE BATCH                 share of a batch's distinct rows that the very
//                                               next batch reads, and distinct rows of a batch
#include <algorithm>
#include <cstdio>
#include <unordered_set>

#include "zipf.h"

namespace {

int Run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "ids" && argc == 7) {
    const uint64_t rows = std::stoull(argv[3]);
    const size_t count = std::stoull(argv[4]);
    bench::Ids ids(argv[2], rows, std::stoull(argv[5]));
    std::vector<uint64_t> out(count);
    for (uint64_t& id : out) id = ids.Next();
    bench::WriteFile(argv[6], out.data(), count * sizeof(uint64_t));
    return 0;
  }
  if (what == "grads" && argc == 5) {
    const size_t count = std::stoull(argv[2]);
    bench::Random random(std::stoull(argv[3]));
    std::vector<float> out(count);
    for (float& g : out) g = static_cast<float>((random.Uniform() - 0.5) * 0.2);
    bench::WriteFile(argv[4], out.data(), count * sizeof(float));
    return 0;
  }
  if (what == "share" && argc == 4) {
    const auto keys = bench::ReadFile<uint64_t>(argv[2]);
    const size_t batch = std::stoull(argv[3]);
    const size_t batches = std::min<size_t>(keys.size() / batch, 12);
    std::unordered_set<uint64_t> last;
    double again = 0, distinct = 0, pairs = 0;
    for (size_t b = 0; b < batches; ++b) {
      std::unordered_set<uint64_t> now(&keys[b * batch], &keys[b * batch] + batch);
      if (b > 0) {
        size_t both = 0;
        for (const uint64_t key : last) both += now.count(key);
        again += static_cast<double>(both) / static_cast<double>(last.size());
        pairs += 1;
      }
      distinct += static_cast<double>(now.size());
      last = std::move(now);
    }
    printf("{\"next_step_share\": %.6f, \"distinct_rows\": %.1f}\n", pairs ? again / pairs : 0,
           distinct / static_cast<double>(batches));
    return 0;
  }
  fprintf(stderr, "see the head of bench/keys.cpp for the arguments\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& e) {
    fprintf(stderr, "bench_keys: %s\n", e.what());
    return 1;
  }
}
