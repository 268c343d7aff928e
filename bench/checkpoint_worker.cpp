// The sides of bench checkpoint that are the engine: steps while checkpoints are written, or not.
//
// prepare  opt rows dim batch keys_file window device_ns folder (of checkpoints; left out: none)
//          Trains until every row has its memory.
// run      seconds=S mode=none|frugal|stop: S seconds of steps
//          none: no checkpoint. frugal: the next checkpoint begins when one is on disk. stop: after
//          half of the time no step is made while everything is written.
// restore  folder=F: restores the newest checkpoint into another engine
// free     gives the memory back
//
// The time of a step is from one frugal_step_begin to the next, the caller's own work included.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "check.h"
#include "harness.h"

namespace bench {
namespace {

double Percentile(const std::vector<double>& ascending, double share) {
  if (ascending.empty()) return 0;
  return ascending[std::min(ascending.size() - 1,
                            static_cast<size_t>(share * static_cast<double>(ascending.size())))];
}

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  statm >> all >> resident;
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "prepare") return Prepare(p);
    if (command == "run") return Run(p);
    if (command == "restore") return Restore(p);
    if (command != "free") throw std::runtime_error("unknown command " + command);
    Free();
    return {};
  }
  ~Worker() { Free(); }

 private:
  void Free() {
    frugal_close(engine_);
    engine_ = nullptr;
    out_ = HugeArray<float>();
    grads_ = HugeArray<float>();
  }

  Metrics Prepare(const Params& p) {
    Free();
    dim_ = static_cast<uint32_t>(p.Int("dim", 32));
    rows_ = static_cast<uint64_t>(p.Int("rows", 0));
    batch_ = static_cast<size_t>(p.Int("batch", 65536));
    device_ns_ = p.Int("device_ns", 0);
    folder_ = p.Str("folder");
    adam_ = p.Str("opt") == "adam";
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.lookahead = window_ = static_cast<uint32_t>(p.Int("window", 10));
    CHECK_OK(frugal_open(&config, &engine_));
    frugal_table_config table = FRUGAL_TABLE_CONFIG_INIT;
    table.name = "bench";
    table.rows = rows_;
    table.dim = dim_;
    table.init_a = 0.01f;
    table.optimizer.kind = adam_ ? FRUGAL_ADAM : FRUGAL_ROWWISE_ADAGRAD;
    CHECK_OK(frugal_table_create(engine_, &table, &table_));
    const frugal_trainer_config trainer = FRUGAL_TRAINER_CONFIG_INIT;
    CHECK_OK(frugal_trainer_create(engine_, &trainer, &trainer_));
    const double before = ResidentBytes();
    if (!folder_.empty()) {
      std::filesystem::remove_all(folder_);
      CHECK_OK(frugal_folder_open(engine_, folder_.c_str(), nullptr));
    }
    batches_ = Batches(p.Str("keys_file"), batch_, false);
    gradients_ = std::make_unique<Gradients>(dim_);
    out_ = HugeArray<float>(batch_ * dim_);
    grads_ = HugeArray<float>(batch_ * dim_);
    ring_.assign(window_ + 1, nullptr);
    step_ = declared_ = 0;
    std::fill_n(out_.data(), out_.size(), 0.0f);
    for (int i = 0; i < 20; ++i) Step();
    return {{"resident_before", before}};
  }

  // Returns when it began, and how long its gate was closed.
  std::pair<int64_t, int64_t> Step() {
    for (; declared_ <= step_ + window_; ++declared_) {
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table_;
      op.keys = batches_.Get(declared_);
      op.count = batch_;
      CHECK_OK(frugal_prefetch(trainer_, declared_, &op, 1, &ring_[declared_ % ring_.size()]));
    }
    const int64_t start = NowNs();
    CHECK_OK(frugal_step_begin(trainer_, step_, FRUGAL_TIMEOUT_DEFAULT));
    const int64_t gate = NowNs() - start;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table_;
    op.batch = ring_[step_ % ring_.size()];
    op.rows_out = out_.data();
    CHECK_OK(frugal_lookup(trainer_, &op, 1));
    const int64_t device_done = NowNs() + device_ns_;
    gradients_->Fill(step_, 0, batch_, grads_.data());
    WaitUntilNs(device_done);
    op.rows_out = nullptr;
    op.grads = grads_.data();
    CHECK_OK(frugal_push_grad(trainer_, &op, 1));
    CHECK_OK(frugal_step_end(trainer_, step_, 0));
    ++step_;
    return {start, gate};
  }

  frugal_stats Stats() const {
    frugal_stats stats = {};
    stats.struct_size = sizeof stats;
    CHECK_OK(frugal_get_stats(engine_, &stats));
    return stats;
  }

  // Begins the next checkpoint if none is being written. Returns whether one is.
  bool Checkpoint() {
    const int32_t status = frugal_checkpoint_wait(engine_, 0, 0, nullptr);
    if (status == FRUGAL_ERR_TIMEOUT) return true;
    if (status != FRUGAL_ERR_NOT_FOUND) CHECK_OK(status);
    uint64_t number = 0;
    CHECK_OK(frugal_checkpoint(engine_, nullptr, &number));
    return true;
  }

  Metrics Run(const Params& p) {
    const std::string mode = p.Str("mode", "none");
    const auto limit = static_cast<int64_t>(p.Num("seconds", 5) * 1e9);
    for (int i = 0; i < 4; ++i) Step();  // the first touches after another side's turn
    const frugal_stats before = Stats();
    std::vector<double> step_us, gate_us;
    const int64_t start = NowNs();
    int64_t last = 0;
    bool stopped = false;
    while (NowNs() - start < limit) {
      if (mode == "frugal") Checkpoint();
      if (mode == "stop" && !stopped && NowNs() - start > limit / 2) {
        stopped = true;
        CHECK_OK(frugal_folder_close(engine_));  // so that everything is written
        std::filesystem::remove_all(folder_);
        CHECK_OK(frugal_folder_open(engine_, folder_.c_str(), nullptr));
        Checkpoint();
        CHECK_OK(frugal_checkpoint_wait(engine_, 0, FRUGAL_TIMEOUT_INFINITE, nullptr));
      }
      const auto [begun, gate] = Step();
      if (last) step_us.push_back(static_cast<double>(begun - last) * 1e-3);
      gate_us.push_back(static_cast<double>(gate) * 1e-3);
      last = begun;
    }
    const double seconds = static_cast<double>(NowNs() - start) * 1e-9;
    const frugal_stats after = Stats();
    if (mode == "frugal")
      CHECK_OK(frugal_checkpoint_wait(engine_, 0, FRUGAL_TIMEOUT_INFINITE, nullptr));
    std::sort(step_us.begin(), step_us.end());
    std::sort(gate_us.begin(), gate_us.end());
    // A row, a multiple of 8 bytes, with its checksum and its entry.
    const double record = dim_ * 4 * (adam_ ? 3 : 1) + (adam_ ? 0 : 8) + 8 + 16;
    const auto rows = static_cast<double>(after.checkpoint_rows - before.checkpoint_rows);
    return {{"step_p50", Percentile(step_us, 0.5)},
            {"step_p99", Percentile(step_us, 0.99)},
            {"step_p999", Percentile(step_us, 0.999)},
            {"step_mean", seconds * 1e6 / static_cast<double>(gate_us.size())},
            {"gate_p999", Percentile(gate_us, 0.999)},
            {"steps", static_cast<double>(gate_us.size())},
            {"checkpoints", static_cast<double>(after.checkpoints - before.checkpoints)},
            {"rows", rows},
            {"bytes", static_cast<double>(after.checkpoint_bytes - before.checkpoint_bytes)},
            {"record_bytes", record},
            {"copies", static_cast<double>(after.checkpoint_copies - before.checkpoint_copies)},
            {"waits", static_cast<double>(after.checkpoint_waits - before.checkpoint_waits)},
            {"resident", ResidentBytes()}};
  }

  Metrics Restore(const Params& p) {
    Free();
    const frugal_config config = FRUGAL_CONFIG_INIT;
    CHECK_OK(frugal_open(&config, &engine_));
    frugal_restore_config restore = FRUGAL_RESTORE_CONFIG_INIT;
    const std::string folder = p.Str("folder");
    restore.folder = folder.c_str();
    frugal_checkpoint_info info = {};
    info.struct_size = sizeof info;
    const int64_t start = NowNs();
    CHECK_OK(frugal_restore(engine_, &restore, &info));
    const double seconds = static_cast<double>(NowNs() - start) * 1e-9;
    return {{"seconds", seconds}, {"bytes", static_cast<double>(info.bytes)}};
  }

  uint64_t rows_ = 0;
  uint32_t dim_ = 0, window_ = 0;
  size_t batch_ = 0;
  int64_t device_ns_ = 0;
  bool adam_ = false;
  std::string folder_;
  frugal_engine* engine_ = nullptr;
  frugal_table* table_ = nullptr;
  frugal_trainer* trainer_ = nullptr;
  Batches batches_;
  std::unique_ptr<Gradients> gradients_;
  HugeArray<float> out_, grads_;
  std::vector<frugal_batch*> ring_;
  uint64_t step_ = 0, declared_ = 0;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    return worker.Handle(command, params);
  });
}
