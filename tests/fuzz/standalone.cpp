// Runs a fuzz target without a fuzzer. `standalone COUNT [FIRST [CORPUS]]` tries random inputs of
// seeds from FIRST, and then those of a corpus. `standalone FILE...` tries these inputs. A corpus
// has an input a line, in hexadecimal digits. A line that ends with '+' goes on in the next one.
// The program prints the seed or the line before it tries an input, so the last one is the guilty.
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "support/mix.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

bool try_corpus(const char* path) {
  std::ifstream file(path);
  size_t lines = 0, inputs = 0;
  std::vector<uint8_t> bytes;
  for (std::string line; std::getline(file, line);) {
    ++lines;
    for (size_t i = 0; i + 1 < line.size(); i += 2)
      bytes.push_back(static_cast<uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
    if (line.ends_with('+')) continue;
    std::printf("\rline %zu", lines);
    std::fflush(stdout);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    bytes.clear();
    ++inputs;
  }
  std::printf("\r%zu inputs of %s\n", inputs, path);
  return inputs > 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s COUNT [FIRST [CORPUS]] | FILE...\n", argv[0]);
    return 2;
  }
  if (!std::isdigit(static_cast<unsigned char>(argv[1][0]))) {
    for (int i = 1; i < argc; ++i) {
      std::FILE* f = std::fopen(argv[i], "rb");
      if (f == nullptr) {
        std::perror(argv[i]);
        return 2;
      }
      std::vector<uint8_t> bytes;
      for (int c; (c = std::fgetc(f)) != EOF;) bytes.push_back(static_cast<uint8_t>(c));
      std::fclose(f);
      std::printf("%s\n", argv[i]);
      std::fflush(stdout);
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    return 0;
  }
  const uint64_t count = std::strtoull(argv[1], nullptr, 10);
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  uint64_t used = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    std::printf("\r%llu", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    uint64_t state = seed;
    const auto random = [&state] {
      const uint64_t x = mix(state);
      state += kMixStep;
      return x;
    };
    std::vector<uint8_t> bytes(random() % 2000);
    // Small numbers and zeros are what reaches furthest.
    const uint64_t zeros = random() % 4;
    for (uint8_t& b : bytes) b = random() % 4 < zeros ? 0 : static_cast<uint8_t>(random());
    used += LLVMFuzzerTestOneInput(bytes.data(), bytes.size()) == 0;
  }
  std::printf("\r%llu inputs, %llu of them taken\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(used));
  if (used == 0) return 1;  // nothing was tested
  return argc > 3 && !try_corpus(argv[3]) ? 2 : 0;
}
