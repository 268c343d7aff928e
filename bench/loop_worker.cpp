// The sides `loop` (bench gather) and `stages` (bench train): plain arrays and loops.
//
// prepare  side=loop|stages rows dim batch opt threads keys_file window
// run      seconds=S          one repetition, about S seconds long
// check    rows dim batch steps opt keys_file grads_file out_file init
//          trains a small table and writes its rows, to compare them with another side's
// copy     bandwidth of a plain copy, bytes read + bytes written a second, by threads=1|2
// free     gives the memory back
#include <algorithm>
#include <cmath>

#include "harness.h"
#include "stage_kernels.h"

namespace bench {
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace generic {
extern const Kernels kKernels;
}

Kernels GetKernels() {
#if defined(BENCH_X86)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
    return avx512::kKernels;
  }
  if (__builtin_cpu_supports("avx2")) return avx2::kKernels;
#endif
  return generic::kKernels;
}

void SortPairs(const uint64_t* keys, size_t n, Pair* scratch, Pair* out) {
  constexpr uint32_t kBits = 12, kMask = (1u << kBits) - 1;
  uint32_t low[kMask + 1] = {}, high[kMask + 1] = {};
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = static_cast<uint32_t>(keys[i]);
    ++low[row & kMask];
    ++high[row >> kBits & kMask];
  }
  uint32_t at_low = 0, at_high = 0;
  for (uint32_t b = 0; b <= kMask; ++b) {
    at_low += std::exchange(low[b], at_low);
    at_high += std::exchange(high[b], at_high);
  }
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = static_cast<uint32_t>(keys[i]);
    scratch[low[row & kMask]++] = {row, static_cast<uint32_t>(i)};
  }
  for (size_t i = 0; i < n; ++i) out[high[scratch[i].row >> kBits & kMask]++] = scratch[i];
}

namespace {

Opt ParseOpt(const std::string& name) {
  if (name == "sgd" || name.empty()) return Opt::kSgd;
  if (name == "rowwise_adagrad") return Opt::kRowwiseAdagrad;
  if (name == "adagrad") return Opt::kAdagrad;
  if (name == "adam") return Opt::kAdam;
  throw std::runtime_error("unknown optimizer " + name);
}

// docs/arithmetic.md: alpha of Adam at step s.
float AdamAlpha(const Hyper& h, uint64_t step) {
  const auto power = [](double x, uint64_t t) {
    double r = 1;
    for (; t != 0; t >>= 1, x = x * x) {
      if (t & 1) r = r * x;
    }
    return r;
  };
  const double b1 = power(h.beta1, step + 1), b2 = power(h.beta2, step + 1);
  return static_cast<float>((double{h.lr} * std::sqrt(1 - b2)) / (1 - b1));
}

struct Table {
  Table(Opt opt, size_t rows, uint32_t dim, float init) : opt(opt), rows(rows), dim(dim) {
    const size_t state0 = opt == Opt::kSgd ? 0 : opt == Opt::kRowwiseAdagrad ? rows : rows * dim;
    const size_t state1 = opt == Opt::kAdam ? rows * dim : 0;
    values = HugeArray<float>(rows * dim);
    std::fill_n(values.data(), rows * dim, init);
    a = HugeArray<float>(state0);
    b = HugeArray<float>(state1);
    std::fill_n(a.data(), state0, 0.0f);
    std::fill_n(b.data(), state1, 0.0f);
  }
  TableView View() const { return {values.data(), a.data(), b.data()}; }
  Opt opt;
  size_t rows;
  uint32_t dim;
  HugeArray<float> values, a, b;
};

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "prepare") return Prepare(p);
    if (command == "run") return stages_ ? RunStages(p) : RunLoop(p);
    if (command == "check") return Check(p);
    if (command == "copy") return CopyBandwidth(p);
    if (command == "free") {
      table_.reset();
      return {};
    }
    throw std::runtime_error("unknown command " + command);
  }

 private:
  // The number of batches with sorted pairs: so many steps ahead are their keys known.
  static constexpr size_t kWindow = 12;

  Metrics Prepare(const Params& p) {
    stages_ = p.Str("side") == "stages";
    const Opt opt = ParseOpt(p.Str("opt"));
    const size_t rows = p.Int("rows", 0);
    const uint32_t dim = static_cast<uint32_t>(p.Int("dim", 32));
    if (dim != 32 && dim != 128) throw std::runtime_error("the loop knows dim 32 and 128");
    if (rows > 1u << 24) throw std::runtime_error("the sort has 24 bits");
    batch_ = p.Int("batch", 65536);
    threads_ = static_cast<int>(p.Int("threads", 2));
    if (!table_ || table_->rows != rows || table_->dim != dim || table_->opt != opt) {
      table_.reset();
      table_ = std::make_unique<Table>(opt, rows, dim, 0.01f);
    }
    batches_ = Batches(p.Str("keys_file"), batch_, false);
    out_ = HugeArray<float>(batch_ * dim);
    grads_ = HugeArray<float>(batch_ * dim);
    gradients_ = std::make_unique<Gradients>(dim);
    gradients_->Fill(0, 0, batch_, grads_.data());
    pairs_ = HugeArray<Pair>(batch_ * kWindow);
    scratch_ = HugeArray<Pair>(batch_ * 2);
    next_ = 0;
    return {};
  }

  // Runs body(thread, batch index) for each of `count` batches, all threads in each batch, and
  // returns keys a second.
  template <typename Body>
  double Rate(size_t count, const Body& body) {
    SpinBarrier barrier(threads_);
    std::atomic<int64_t> start{0}, end{0};
    Parallel(threads_, [&](int thread) {
      barrier.Wait();
      if (thread == 0) start = NowNs();
      barrier.Wait();
      for (size_t b = 0; b < count; ++b) {
        body(thread, b);
        barrier.Wait();
      }
      if (thread == 0) end = NowNs();
    });
    return static_cast<double>(count * batch_) * 1e9 / static_cast<double>(end - start);
  }

  std::pair<size_t, size_t> Part(int thread) const {
    return {batch_ * thread / threads_, batch_ * (thread + 1) / threads_};
  }

  double Gather(size_t count) {
    return Rate(count, [&](int thread, size_t b) {
      const auto [begin, end] = Part(thread);
      kernels_.gather(table_->values.data(), table_->dim, batches_.Get(next_ + b), begin, end,
                      out_.data());
    });
  }

  // Each thread sorts every other batch of the window: this is work ahead of time.
  double Sort() {
    const double batches_a_second = Rate(kWindow / threads_, [&](int thread, size_t b) {
      const size_t at = b * threads_ + thread;
      SortPairs(batches_.Get(next_ + at), batch_, &scratch_[batch_ * thread], &pairs_[batch_ * at]);
    });
    return batches_a_second * threads_;
  }

  double Update(const Hyper& base) {
    constexpr size_t kChunk = 1024;
    std::vector<std::atomic<size_t>> counters(kWindow);
    return Rate(kWindow, [&](int, size_t b) {
      Hyper hyper = base;
      hyper.alpha = AdamAlpha(hyper, next_ + b);
      for (;;) {
        const size_t begin = counters[b].fetch_add(kChunk);
        if (begin >= batch_) break;
        kernels_.update(table_->opt, hyper, table_->View(), table_->dim, &pairs_[batch_ * b],
                        batch_, begin, std::min(begin + kChunk, batch_), grads_.data());
      }
    });
  }

  double Fill() {
    return Rate(kWindow, [&](int thread, size_t b) {
      const auto [begin, end] = Part(thread);
      gradients_->Fill(next_ + b, begin, end, grads_.data());
    });
  }

  Metrics RunLoop(const Params& p) {
    const int64_t until = NowNs() + static_cast<int64_t>(p.Num("seconds", 0.3) * 1e9);
    Gather(kWindow);  // the first touches after another side's turn
    next_ += kWindow;
    double keys = 0, seconds = 0;
    do {
      const double rate = Gather(kWindow);
      next_ += kWindow;
      keys += static_cast<double>(kWindow * batch_);
      seconds += static_cast<double>(kWindow * batch_) / rate;
    } while (NowNs() < until);
    return {{"throughput", keys / seconds}};
  }

  Metrics RunStages(const Params& p) {
    const int64_t until = NowNs() + static_cast<int64_t>(p.Num("seconds", 0.3) * 1e9);
    const Hyper hyper;
    double gather = 0, sort = 0, update = 0, fill = 0, rounds = 0;
    for (bool warm = false;; warm = true) {
      const double g = Gather(kWindow), s = Sort(), f = Fill(), u = Update(hyper);
      next_ += kWindow;
      if (!warm) continue;
      gather += 1 / g;
      sort += 1 / s;
      update += 1 / u;
      fill += 1 / f;
      ++rounds;
      if (NowNs() >= until) break;
    }
    return {{"throughput", rounds / (gather + sort + update + fill)},
            {"throughput_without_fill", rounds / (gather + sort + update)},
            {"gather", rounds / gather},
            {"sort", rounds / sort},
            {"update", rounds / update},
            {"fill", rounds / fill}};
  }

  Metrics Check(const Params& p) {
    const size_t batch = p.Int("batch", 0), steps = p.Int("steps", 0);
    Table table(ParseOpt(p.Str("opt")), p.Int("rows", 0), static_cast<uint32_t>(p.Int("dim", 0)),
                static_cast<float>(p.Num("init", 0)));
    const auto keys = ReadFile<uint64_t>(p.Str("keys_file"));
    const auto grads = ReadFile<float>(p.Str("grads_file"));
    std::vector<Pair> pairs(batch), scratch(batch);
    const HugeArray<float> out(batch * table.dim);
    for (size_t s = 0; s < steps; ++s) {
      Hyper hyper;
      hyper.alpha = AdamAlpha(hyper, s);
      kernels_.gather(table.values.data(), table.dim, &keys[s * batch], 0, batch, out.data());
      SortPairs(&keys[s * batch], batch, scratch.data(), pairs.data());
      for (size_t i = 0; i < batch; i += 1000) {
        kernels_.update(table.opt, hyper, table.View(), table.dim, pairs.data(), batch, i,
                        std::min(i + 1000, batch), &grads[s * batch * table.dim]);
      }
    }
    WriteFile(p.Str("out_file"), table.values.data(), table.rows * table.dim * sizeof(float));
    return {};
  }

  Metrics CopyBandwidth(const Params& p) {
    threads_ = static_cast<int>(p.Int("threads", 1));
    constexpr size_t kBytes = size_t{256} << 20;
    HugeArray<float> from(kBytes / sizeof(float) + 2048), to(kBytes / sizeof(float));
    std::fill_n(from.data(), from.size(), 1.0f);
    std::fill_n(to.data(), to.size(), 1.0f);
    batch_ = kBytes / 4096;
    double best = 0;
    for (int i = 0; i < 7; ++i) {
      const double rate = Rate(1, [&](int thread, size_t) {
        const auto [begin, end] = Part(thread);
        kernels_.copy(from.data() + begin * 1024, to.data() + begin * 1024, (end - begin) * 4096);
      });
      best = std::max(best, rate * 4096 * 2);
    }
    return {{"bandwidth", best}};
  }

  const Kernels kernels_ = GetKernels();
  std::unique_ptr<Table> table_;
  Batches batches_;
  bool stages_ = false;
  size_t batch_ = 0;
  int threads_ = 1;
  uint64_t next_ = 0;
  HugeArray<float> out_, grads_;
  std::unique_ptr<Gradients> gradients_;
  HugeArray<Pair> pairs_, scratch_;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    return worker.Handle(command, params);
  });
}
