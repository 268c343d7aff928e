// The cost of calls that move few bytes: steps of many tables, or of few keys.
//
// prepare  tables keys: of each table in a step; rows dim opt threads: flush threads;
//          backwards: gradients come from the last table to the first;
//          again: so many more lookups of the same rows in a step
// run      seconds=S
//
// All keys are declared ten steps ahead, and each step has other keys. Metrics: throughput, keys of
// whole steps (declared, looked up, pushed and ended) a second; lookup_time, the median
// microseconds of the first lookup call of a step. With `again` also again_time, of the other
// calls: these find rows, parts and code in the processor's caches, so they measure the call
// itself.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "harness.h"

namespace bench {
namespace {

constexpr uint64_t kAhead = 10, kOther = 64;  // steps; steps with other keys

class Worker {
 public:
  ~Worker() { Close(); }
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "prepare") return Prepare(p);
    if (command == "run") return Run(p.Num("seconds", 0.4));
    if (command == "free") {
      Close();
      return {};
    }
    throw std::runtime_error("unknown command " + command);
  }

 private:
  void Close() {
    if (engine_) frugal_close(engine_);
    engine_ = nullptr;
    step_ = 0;
  }

  Metrics Prepare(const Params& p) {
    Close();
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.lookahead = kAhead;
    config.flush_threads = static_cast<uint32_t>(p.Int("threads", 1));
    CHECK_OK(frugal_open(&config, &engine_));
    tables_.resize(p.Int("tables", 1));
    backwards_ = p.Int("backwards", 0) != 0;
    again_ = p.Int("again", 0);
    count_ = p.Int("keys", 64);
    dim_ = static_cast<uint32_t>(p.Int("dim", 32));
    const uint64_t rows = p.Int("rows", 10000);
    for (size_t i = 0; i < tables_.size(); ++i) {
      const std::string name = "t" + std::to_string(i);
      frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
      c.name = name.c_str();
      c.rows = rows;
      c.dim = dim_;
      c.optimizer.kind = FRUGAL_SGD;
      c.optimizer.lr = 0.01f;
      CHECK_OK(frugal_table_create(engine_, &c, &tables_[i]));
    }
    frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
    CHECK_OK(frugal_trainer_create(engine_, &t, &trainer_));
    const size_t n = tables_.size() * count_;
    keys_.resize(kOther * n);
    uint64_t x = 1;
    for (uint64_t& k : keys_) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      k = (x >> 33) % rows;
    }
    out_.assign(n * dim_, 0);
    grads_.assign(n * dim_, 1e-3f);
    ring_.assign((kAhead + 1) * tables_.size(), nullptr);
    Steps(3 * kAhead, nullptr, nullptr);
    return {};
  }

  frugal_op Op(size_t table) const {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = tables_[table];
    return op;
  }

  void Declare(uint64_t step) {
    ops_.resize(tables_.size());
    const uint64_t* keys = keys_.data() + step % kOther * tables_.size() * count_;
    for (size_t i = 0; i < tables_.size(); ++i) {
      ops_[i] = Op(i);
      ops_[i].keys = keys + i * count_;
      ops_[i].count = count_;
    }
    CHECK_OK(
        frugal_prefetch(trainer_, step, ops_.data(), ops_.size(), &ring_[step % ring_.size()]));
  }

  double TimeLookups(uint64_t n) {
    const int64_t from = NowNs();
    for (uint64_t i = 0; i < n; ++i) CHECK_OK(frugal_lookup(trainer_, ops_.data(), ops_.size()));
    return static_cast<double>(NowNs() - from) * 1e-3 / static_cast<double>(n);
  }

  void Steps(uint64_t n, std::vector<double>* lookups, std::vector<double>* others) {
    const uint64_t last = step_ + n;
    for (uint64_t s = step_; s < step_ + kAhead; ++s) Declare(s);
    for (; step_ < last; ++step_) {
      CHECK_OK(frugal_step_begin(trainer_, step_, FRUGAL_TIMEOUT_DEFAULT));
      if (step_ + kAhead < last) Declare(step_ + kAhead);
      ops_.resize(tables_.size());
      for (size_t i = 0; i < tables_.size(); ++i) {
        ops_[i] = Op(i);
        ops_[i].batch = ring_[step_ % ring_.size()];
        ops_[i].part = static_cast<uint32_t>(i);
        ops_[i].rows_out = out_.data() + i * count_ * dim_;
      }
      const double first = TimeLookups(1);
      if (lookups) lookups->push_back(first);
      if (others && again_) others->push_back(TimeLookups(again_));
      for (size_t i = 0; i < tables_.size(); ++i) {
        ops_[i].rows_out = nullptr;
        ops_[i].grads = grads_.data() + i * count_ * dim_;
      }
      if (backwards_) std::reverse(ops_.begin(), ops_.end());
      CHECK_OK(frugal_push_grad(trainer_, ops_.data(), ops_.size()));
      CHECK_OK(frugal_step_end(trainer_, step_, 0));
    }
    CHECK_OK(frugal_flush(engine_, FRUGAL_TIMEOUT_DEFAULT));
  }

  Metrics Run(double seconds) {
    std::vector<double> lookups, others;
    const int64_t begin = NowNs(), end = begin + static_cast<int64_t>(seconds * 1e9);
    uint64_t steps = 0;
    for (; NowNs() < end; steps += 50) Steps(50, &lookups, &others);
    const double took = static_cast<double>(NowNs() - begin) * 1e-9;
    Metrics metrics = {{"throughput", static_cast<double>(steps * tables_.size() * count_) / took},
                       {"lookup_time", Median(lookups)}};
    if (again_) metrics.emplace_back("again_time", Median(others));
    return metrics;
  }

  frugal_engine* engine_ = nullptr;
  frugal_trainer* trainer_ = nullptr;
  bool backwards_ = false;
  uint64_t again_ = 0;
  std::vector<frugal_table*> tables_;
  std::vector<frugal_batch*> ring_;
  std::vector<frugal_op> ops_;
  std::vector<uint64_t> keys_;
  std::vector<float> out_, grads_;
  size_t count_ = 0;
  uint32_t dim_ = 0;
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve(
      [&](const std::string& c, const bench::Params& p) { return worker.Handle(c, p); });
}
