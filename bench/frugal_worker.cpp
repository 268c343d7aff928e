// The sides that are the engine itself, through the C ABI alone: frugal, write_through, tree_heap.
//
// prepare  bench=gather|train|flush opt rows dim batch keys=dense|hashed keys_file window
//          trainers threads flush=auto|at_once|deferred|write_through|tree_heap
//          grads=own|lent wait_ns: device time between lookup and push
//          settle_ns: bench flush, pause of the quiet run after each step, see below
// run      seconds=S          one repetition, about S seconds long
// cpu_work                    CPU time of a step in ns, all threads, without device time
// check    rows dim batch steps opt keys_file grads_file out_file init flush keys
// free     gives the memory back
//
// `batch` is the number of keys of a step over all trainers. What the clock covers:
// - train: from the first declaration of the first step to the end of frugal_flush after the
//   last; every step is declared, looked up, pushed and applied inside it, so the window's
//   filling and draining count too. The caller writes new gradients for each step inside it.
// - gather: the lookup calls alone, of declared batches.
// - flush: stall = wall time inside the calls of a step, less that of the same calls when
//   frugal_flush and a pause (not counted) follow each step_end. Then no update is pending, and all
//   declarations are resolved. Blocks of steps of either kind take turns within one run: the
//   difference is far smaller than the machine's changes of speed from second to second.
#include <algorithm>
#include <memory>

#include "check.h"
#include "harness.h"

namespace bench {
namespace {

int32_t ParseOpt(const std::string& name) {
  if (name == "sgd" || name.empty()) return FRUGAL_SGD;
  if (name == "rowwise_adagrad") return FRUGAL_ROWWISE_ADAGRAD;
  if (name == "adagrad") return FRUGAL_ADAGRAD;
  if (name == "adam") return FRUGAL_ADAM;
  throw std::runtime_error("unknown optimizer " + name);
}

int32_t ParseFlush(const std::string& name) {
  if (name == "auto" || name.empty()) return FRUGAL_FLUSH_AUTO;
  if (name == "at_once") return FRUGAL_FLUSH_AT_ONCE;
  if (name == "deferred") return FRUGAL_FLUSH_DEFERRED;
  if (name == "write_through") return FRUGAL_FLUSH_WRITE_THROUGH;
  if (name == "tree_heap") return FRUGAL_FLUSH_TREE_HEAP;
  throw std::runtime_error("unknown flush mode " + name);
}

// The properties of an engine; two cases with the same shape can share one.
struct Shape {
  int32_t opt = FRUGAL_SGD, flush = FRUGAL_FLUSH_AUTO;
  uint64_t rows = 0;
  uint32_t dim = 32, trainers = 1, flush_threads = 1, window = 10;
  bool hashed = false;
  float init = 0.01f;
  bool operator==(const Shape&) const = default;
};

class Engine {
 public:
  explicit Engine(const Shape& shape) : shape_(shape) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.world_size = shape.trainers;
    config.lookahead = shape.window;
    config.flush_threads = shape.flush_threads;
    config.flush_mode = shape.flush;
    CHECK_OK(frugal_open(&config, &engine_));
    frugal_table_config table = FRUGAL_TABLE_CONFIG_INIT;
    table.name = "bench";
    table.key_space = shape.hashed ? FRUGAL_HASHED : FRUGAL_DENSE;
    table.rows = shape.rows;
    table.dim = shape.dim;
    table.init_a = shape.init;
    table.optimizer.kind = shape.opt;
    CHECK_OK(frugal_table_create(engine_, &table, &table_));
    if (shape.hashed) CreateRows();
    for (uint32_t r = 0; r < shape.trainers; ++r) {
      frugal_trainer_config trainer = FRUGAL_TRAINER_CONFIG_INIT;
      trainer.rank = r;
      trainers_.push_back(nullptr);
      CHECK_OK(frugal_trainer_create(engine_, &trainer, &trainers_.back()));
    }
  }
  ~Engine() { frugal_close(engine_); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  frugal_engine* engine() const { return engine_; }
  frugal_table* table() const { return table_; }
  frugal_trainer* trainer(size_t rank) const { return trainers_[rank]; }
  const Shape& shape() const { return shape_; }

  frugal_stats Stats() const {
    frugal_stats stats = {};
    stats.struct_size = sizeof(stats);
    CHECK_OK(frugal_get_stats(engine_, &stats));
    return stats;
  }

 private:
  // All rows exist from the start: the benchmark measures training, not growth.
  void CreateRows() {
    constexpr size_t kPart = 65536;
    std::vector<uint64_t> keys(kPart);
    std::vector<float> rows(kPart * shape_.dim, shape_.init);
    for (uint64_t id = 0; id < shape_.rows;) {
      const size_t n = std::min<uint64_t>(kPart, shape_.rows - id);
      for (size_t i = 0; i < n; ++i) keys[i] = Batches::HashedKey(id + i);
      CHECK_OK(frugal_put(table_, keys.data(), n, 0, rows.data(), 0));
      id += n;
    }
  }

  Shape shape_;
  frugal_engine* engine_ = nullptr;
  frugal_table* table_ = nullptr;
  std::vector<frugal_trainer*> trainers_;
};

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "prepare") return Prepare(p);
    if (command == "run") {
      if (bench_ == "gather") return RunGather(p);
      if (bench_ == "flush") return RunFlush(p);
      return RunTrain(p);
    }
    if (command == "cpu_work") return CpuWork();
    if (command == "check") return CheckResult(p);
    if (command == "free") {
      engine_.reset();
      return {};
    }
    throw std::runtime_error("unknown command " + command);
  }

 private:
  // The memory of one trainer thread.
  struct Rank {
    std::vector<frugal_batch*> ring;  // declared batches by step
    HugeArray<float> out, grads;
  };

  // Figures of one run over some steps.
  struct Run {
    double seconds = 0;
    std::vector<double> call_us;  // wall time inside all calls of a step, rank 0
    frugal_stats before, after;
    double cpu_seconds = 0;
  };

  Metrics Prepare(const Params& p) {
    Shape shape;
    shape.opt = ParseOpt(p.Str("opt"));
    shape.flush = ParseFlush(p.Str("flush"));
    shape.rows = p.Int("rows", 0);
    shape.dim = static_cast<uint32_t>(p.Int("dim", 32));
    shape.trainers = static_cast<uint32_t>(p.Int("trainers", 1));
    const auto threads = static_cast<uint32_t>(p.Int("threads", 2));
    shape.flush_threads = threads > shape.trainers ? threads - shape.trainers : 0;
    shape.window = static_cast<uint32_t>(p.Int("window", 10));
    shape.hashed = p.Str("keys") == "hashed";
    bench_ = p.Str("bench");
    batch_ = p.Int("batch", 65536);
    lent_ = p.Str("grads") == "lent";
    wait_ns_ = p.Int("wait_ns", 0);
    settle_ns_ = p.Int("settle_ns", 0);
    per_run_ = 0;
    if (!engine_ || !(engine_->shape() == shape)) {
      ranks_.clear();
      engine_.reset();
      engine_ = std::make_unique<Engine>(shape);
      step_ = 0;
    }
    batches_ = Batches(p.Str("keys_file"), batch_, shape.hashed);
    gradients_ = std::make_unique<Gradients>(shape.dim);
    ranks_.clear();
    for (uint32_t r = 0; r < shape.trainers; ++r) {
      const auto [begin, end] = Part(r);
      Rank rank;
      rank.ring.resize(shape.window + 1);
      rank.out = HugeArray<float>((end - begin) * shape.dim);
      rank.grads = HugeArray<float>((end - begin) * shape.dim);
      gradients_->Fill(0, 0, end - begin, rank.grads.data());
      std::fill_n(rank.out.data(), rank.out.size(), 0.0f);
      ranks_.push_back(std::move(rank));
    }
    frugal_table_info info = {};
    info.struct_size = sizeof(info);
    CHECK_OK(frugal_table_describe(engine_->table(), &info));
    return {{"page_bytes", static_cast<double>(info.page_bytes)},
            {"memory_bytes", static_cast<double>(info.memory_bytes)}};
  }

  std::pair<size_t, size_t> Part(size_t rank) const {
    const size_t n = engine_->shape().trainers;
    return {batch_ * rank / n, batch_ * (rank + 1) / n};
  }

  frugal_op Op() const {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = engine_->table();
    return op;
  }

  void Declare(size_t r, uint64_t step) {
    const auto [begin, end] = Part(r);
    frugal_op op = Op();
    op.keys = batches_.Get(step) + begin;
    op.count = end - begin;
    Rank& rank = ranks_[r];
    CHECK_OK(
        frugal_prefetch(engine_->trainer(r), step, &op, 1, &rank.ring[step % rank.ring.size()]));
  }

  // Steps step_ .. step_ + count - 1 on every trainer, declared and drained inside the clock.
  // `block`: in every other block of so many steps, frugal_flush and a pause after each step,
  // outside the time of the calls. 0: never.
  Run Train(size_t count, size_t block = 0) {
    Run run;
    const Shape& shape = engine_->shape();
    run.before = engine_->Stats();
    std::vector<double> call_us(count);
    std::vector<std::string> errors(shape.trainers);
    SpinBarrier barrier(static_cast<int>(shape.trainers));
    std::atomic<int64_t> start{0};
    const int64_t cpu = CpuNs();
    Parallel(static_cast<int>(shape.trainers), [&](int r) {
      try {
        barrier.Wait();
        if (r == 0) start = NowNs();
        TrainRank(static_cast<size_t>(r), count, block, r == 0 ? &call_us : nullptr);
      } catch (const std::exception& e) {
        errors[r] = e.what();
      }
    });
    for (const std::string& e : errors) {
      if (!e.empty()) throw std::runtime_error(e);
    }
    CHECK_OK(frugal_flush(engine_->engine(), FRUGAL_TIMEOUT_DEFAULT));
    run.seconds = static_cast<double>(NowNs() - start) * 1e-9;
    run.cpu_seconds = static_cast<double>(CpuNs() - cpu) * 1e-9;
    run.after = engine_->Stats();
    run.call_us = std::move(call_us);
    step_ += count;
    return run;
  }

  void TrainRank(size_t r, size_t count, size_t block, std::vector<double>* call_us) {
    frugal_trainer* trainer = engine_->trainer(r);
    Rank& rank = ranks_[r];
    const auto [begin, end] = Part(r);
    const size_t n = end - begin;
    const uint64_t last = step_ + count, window = engine_->shape().window;
    for (uint64_t s = step_; s < last && s < step_ + window; ++s) Declare(r, s);
    for (uint64_t s = step_; s < last; ++s) {
      const int64_t t0 = NowNs();
      CHECK_OK(frugal_step_begin(trainer, s, FRUGAL_TIMEOUT_DEFAULT));
      frugal_op op = Op();
      op.batch = rank.ring[s % rank.ring.size()];
      op.rows_out = rank.out.data();
      CHECK_OK(frugal_lookup(trainer, &op, 1));
      // Declares far ahead after the device has got its work.
      if (s + window < last) Declare(r, s + window);
      int64_t inside = NowNs() - t0;
      const int64_t device_done = NowNs() + wait_ns_;
      float* grads = rank.grads.data();
      if (lent_) {
        void* memory = nullptr;
        CHECK_OK(frugal_borrow(trainer, n * engine_->shape().dim * sizeof(float), &memory));
        grads = static_cast<float*>(memory);
      }
      // With lent memory, and in bench flush, the device writes the gradients.
      const bool by_device = lent_ || bench_ == "flush";
      if (by_device) gradients_->Fill(s, 0, n, grads);
      WaitUntilNs(device_done);
      const int64_t t1 = NowNs();
      op.rows_out = nullptr;
      op.grads = grads;
      CHECK_OK(frugal_push_grad(trainer, &op, 1));
      inside += NowNs() - t1;
      // The buffer is the caller's again: the next step's gradients overwrite it at once.
      if (!by_device) gradients_->Fill(s + 1, 0, n, grads);
      const int64_t t2 = NowNs();
      CHECK_OK(frugal_step_end(trainer, s, 0));
      inside += NowNs() - t2;
      if (call_us != nullptr) (*call_us)[s - step_] = static_cast<double>(inside) * 1e-3;
      if (block && (s - step_) / block % 2) {
        CHECK_OK(frugal_flush(engine_->engine(), FRUGAL_TIMEOUT_DEFAULT));
        WaitUntilNs(NowNs() + settle_ns_);
      }
    }
  }

  // Steps that make a run of about `seconds`; measured once for a case.
  size_t StepsFor(double seconds) {
    if (per_run_ == 0) {
      Train(4);
      const Run trial = Train(16);
      const double step = trial.seconds / 16;
      per_run_ = std::clamp<size_t>(static_cast<size_t>(seconds / step),
                                    bench_ == "flush" ? 20 : 40, 20000);
    }
    return per_run_;
  }

  Metrics RunTrain(const Params& p) {
    const size_t steps = StepsFor(p.Num("seconds", 0.4));
    Train(4);  // the first touches after another side's turn
    const Run run = Train(steps);
    const double updated = Delta(run, &frugal_stats::rows_updated);
    const double n = static_cast<double>(steps);
    return {
        {"throughput", n * static_cast<double>(batch_) / run.seconds},
        {"deferred_share", updated > 0 ? Delta(run, &frugal_stats::rows_deferred) / updated : 0},
        {"cpu_per_step", run.cpu_seconds / n * 1e6},
        {"gate_wait", Delta(run, &frugal_stats::gate_wait_ns) / n * 1e-3},
        {"entry_time", Delta(run, &frugal_stats::entry_ns) / n * 1e-3},
        {"apply_time", Delta(run, &frugal_stats::apply_ns) / n * 1e-3},
        {"lookup_time", Delta(run, &frugal_stats::lookup_ns) / n * 1e-3},
        {"push_time", Delta(run, &frugal_stats::push_ns) / n * 1e-3},
        {"prefetch_time", Delta(run, &frugal_stats::prefetch_ns) / n * 1e-3},
        {"step_begin_time", Delta(run, &frugal_stats::step_begin_ns) / n * 1e-3},
        {"step_end_time", Delta(run, &frugal_stats::step_end_ns) / n * 1e-3}};
  }

  static double Delta(const Run& run, uint64_t frugal_stats::*field) {
    return static_cast<double>(run.after.*field - run.before.*field);
  }

  Metrics CpuWork() {
    const int64_t wait = std::exchange(wait_ns_, 0);
    Train(8);
    std::vector<double> work;
    for (int i = 0; i < 5; ++i) work.push_back(Train(16).cpu_seconds / 16 * 1e9);
    wait_ns_ = wait;
    return {{"cpu_ns", Median(work)}};
  }

  Metrics RunFlush(const Params& p) {
    const size_t steps = StepsFor(p.Num("seconds", 0.4));
    Train(4);
    const Run run = Train(steps);
    // At the start the window fills, and at the end nothing is left to declare. The block before
    // still affects the first steps of a block.
    constexpr size_t kBlock = 10, kSettle = 3;
    const size_t edge = engine_->shape().window + 2;
    const size_t turns = std::clamp<size_t>(steps / (2 * kBlock), 3, 40);
    const Run mixed = Train(edge + kBlock + turns * 2 * kBlock + edge, kBlock);
    std::vector<double> busy_us, quiet_us, stall_us;
    for (size_t turn = 0, at = (edge / kBlock + 1) * kBlock; turn < turns; ++turn) {
      std::vector<double> us[2];
      for (size_t half = 0; half < 2; ++half, at += kBlock) {
        std::vector<double>& mine = us[at / kBlock % 2];
        mine.assign(mixed.call_us.begin() + static_cast<ptrdiff_t>(at + kSettle),
                    mixed.call_us.begin() + static_cast<ptrdiff_t>(at + kBlock));
      }
      busy_us.insert(busy_us.end(), us[0].begin(), us[0].end());
      quiet_us.insert(quiet_us.end(), us[1].begin(), us[1].end());
      stall_us.push_back(Median(us[0]) - Median(us[1]));
    }
    const double updated = Delta(run, &frugal_stats::rows_updated);
    const double n = static_cast<double>(steps);
    return {
        {"stall", Median(stall_us)},
        {"stall_mean", Mean(busy_us) - Mean(quiet_us)},
        {"calls", Median(busy_us)},
        {"calls_nothing_pending", Median(quiet_us)},
        {"throughput", n * static_cast<double>(batch_) / run.seconds},
        {"entry_time", Delta(run, &frugal_stats::entry_ns) / n * 1e-3},
        {"lookup_time", Delta(run, &frugal_stats::lookup_ns) / n * 1e-3},
        {"push_time", Delta(run, &frugal_stats::push_ns) / n * 1e-3},
        {"prefetch_time", Delta(run, &frugal_stats::prefetch_ns) / n * 1e-3},
        {"step_begin_time", Delta(run, &frugal_stats::step_begin_ns) / n * 1e-3},
        {"step_end_time", Delta(run, &frugal_stats::step_end_ns) / n * 1e-3},
        {"deferred_share", updated > 0 ? Delta(run, &frugal_stats::rows_deferred) / updated : 0}};
  }

  // All trainers look up their parts of a declared batch at once; only the lookups are timed.
  Metrics RunGather(const Params& p) {
    const Shape& shape = engine_->shape();
    const int threads = static_cast<int>(shape.trainers);
    const int64_t budget = static_cast<int64_t>(p.Num("seconds", 0.3) * 1e9);
    std::vector<int64_t> ends(shape.trainers);
    SpinBarrier barrier(threads);
    std::atomic<int64_t> start{0}, total{0};
    std::atomic<uint64_t> steps{0};
    std::atomic<bool> more{true};
    const uint64_t first = step_;
    Parallel(threads, [&](int r) {
      try {
        frugal_trainer* trainer = engine_->trainer(r);
        Rank& rank = ranks_[r];
        uint64_t s = first;
        for (uint64_t ahead = 0; ahead < shape.window; ++ahead) Declare(r, s + ahead);
        for (;; ++s) {
          if (more) Declare(r, s + shape.window);
          CHECK_OK(frugal_step_begin(trainer, s, FRUGAL_TIMEOUT_DEFAULT));
          frugal_op op = Op();
          op.batch = rank.ring[s % rank.ring.size()];
          op.rows_out = rank.out.data();
          barrier.Wait();
          if (r == 0) start = NowNs();
          barrier.Wait();
          CHECK_OK(frugal_lookup(trainer, &op, 1));
          ends[r] = NowNs();
          CHECK_OK(frugal_step_end(trainer, s, 0));
          barrier.Wait();
          if (r == 0 && s >= first + 12) {  // the first ones touch cold buffers
            total += *std::max_element(ends.begin(), ends.end()) - start;
            ++steps;
            if (total >= budget) more = false;
          }
          barrier.Wait();
          if (!more) break;
        }
        // Declared steps are begun and ended, so that the next run starts with none.
        for (uint64_t end = s + shape.window, next = s + 1; next <= end; ++next) {
          CHECK_OK(frugal_step_begin(trainer, next, FRUGAL_TIMEOUT_DEFAULT));
          CHECK_OK(frugal_step_end(trainer, next, 0));
        }
        if (r == 0) step_ = s + shape.window + 1;
      } catch (const std::exception& e) {
        fprintf(stderr, "bench_frugal: %s\n", e.what());
        _exit(1);  // the other trainers wait at a barrier
      }
    });
    return {{"throughput",
             static_cast<double>(steps * batch_) * 1e9 / static_cast<double>(total.load())}};
  }

  Metrics CheckResult(const Params& p) {
    Shape shape;
    shape.opt = ParseOpt(p.Str("opt"));
    shape.flush = ParseFlush(p.Str("flush"));
    shape.rows = p.Int("rows", 0);
    shape.dim = static_cast<uint32_t>(p.Int("dim", 0));
    shape.hashed = p.Str("keys") == "hashed";
    shape.init = static_cast<float>(p.Num("init", 0));
    Engine engine(shape);
    const size_t batch = p.Int("batch", 0);
    const uint64_t steps = p.Int("steps", 0);
    const Batches batches(p.Str("keys_file"), batch, shape.hashed);
    const auto grads = ReadFile<float>(p.Str("grads_file"));
    std::vector<float> buffer(batch * shape.dim), out(batch * shape.dim);
    frugal_trainer* trainer = engine.trainer(0);
    std::vector<frugal_batch*> declared(steps);
    frugal_op op = FRUGAL_OP_INIT;
    op.table = engine.table();
    for (uint64_t s = 0; s < steps + shape.window; ++s) {
      if (s < steps) {
        op.batch = nullptr;
        op.keys = batches.Get(s);
        op.count = batch;
        CHECK_OK(frugal_prefetch(trainer, s, &op, 1, &declared[s]));
      }
      if (s < shape.window) continue;
      const uint64_t now = s - shape.window;
      CHECK_OK(frugal_step_begin(trainer, now, FRUGAL_TIMEOUT_DEFAULT));
      op.batch = declared[now];
      op.keys = nullptr;
      op.rows_out = out.data();
      CHECK_OK(frugal_lookup(trainer, &op, 1));
      memcpy(buffer.data(), &grads[now * buffer.size()], buffer.size() * sizeof(float));
      op.grads = buffer.data();
      CHECK_OK(frugal_push_grad(trainer, &op, 1));
      std::fill(buffer.begin(), buffer.end(), 1e30f);
      CHECK_OK(frugal_step_end(trainer, now, 0));
    }
    std::vector<uint64_t> keys(shape.rows);
    for (uint64_t i = 0; i < shape.rows; ++i) keys[i] = shape.hashed ? Batches::HashedKey(i) : i;
    std::vector<float> rows(shape.rows * shape.dim);
    CHECK_OK(frugal_get(engine.table(), keys.data(), keys.size(), 0, rows.data(), 0, nullptr));
    WriteFile(p.Str("out_file"), rows.data(), rows.size() * sizeof(float));
    return {};
  }

  std::unique_ptr<Engine> engine_;
  std::string bench_;
  Batches batches_;
  std::unique_ptr<Gradients> gradients_;
  std::vector<Rank> ranks_;
  size_t batch_ = 0, per_run_ = 0;
  bool lent_ = false;
  int64_t wait_ns_ = 0, settle_ns_ = 0;
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    return worker.Handle(command, params);
  });
}
