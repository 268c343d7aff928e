// The engine as a benchmark uses it, through its C ABI.
#ifndef FRUGAL_TOOLS_GPU_ENGINE_H_
#define FRUGAL_TOOLS_GPU_ENGINE_H_

#include "common.h"
#include "frugal.h"

namespace gpu_tools {

inline void CheckStatus(int32_t status, const char* call) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw std::runtime_error(std::string(call) + ": " + frugal_status_name(status) + ": " +
                           error.message);
}
#define CHECK_OK(call) CheckStatus((call), #call)

struct EngineShape {
  uint64_t rows = 0;
  uint32_t dim = 0;
  int32_t optimizer = FRUGAL_SGD;
  int32_t flush = FRUGAL_FLUSH_AUTO;
  double cache = 0;
  int32_t nan = FRUGAL_NAN_ACCEPT;  // as torch does
  bool operator==(const EngineShape&) const = default;
};

inline constexpr uint32_t kWindow = 10;  // steps that are declared ahead

// One table, one trainer on the device. Rows are uniform random.
class Engine {
 public:
  Engine(const std::string& device, const EngineShape& shape, Stream stream) : shape_(shape) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.lookahead = kWindow;
    config.flush_mode = shape.flush;
    config.flush_threads = std::clamp(Cores(), 2u, 9u) - 1;
    CHECK_OK(frugal_open(&config, &engine_));
    try {
      frugal_table_config table = FRUGAL_TABLE_CONFIG_INIT;
      table.name = "bench";
      table.rows = shape.rows;
      table.dim = shape.dim;
      table.init = FRUGAL_INIT_UNIFORM;
      table.init_a = -1;
      table.init_b = 1;
      table.nan_policy = shape.nan;
      table.optimizer.kind = shape.optimizer;
      CHECK_OK(frugal_table_create(engine_, &table, &table_));
      frugal_trainer_config trainer = FRUGAL_TRAINER_CONFIG_INIT;
      trainer.device = device.c_str();
      trainer.cache_ratio = shape.cache;
      CHECK_OK(frugal_trainer_create(engine_, &trainer, &trainer_));
      CHECK_OK(frugal_set_stream(trainer_, stream.handle));
    } catch (...) {
      frugal_close(engine_);
      throw;
    }
  }
  ~Engine() { frugal_close(engine_); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const EngineShape& shape() const { return shape_; }
  frugal_trainer* trainer() const { return trainer_; }
  uint64_t step() const { return step_; }
  uint64_t trained() const { return trained_; }  // steps with a push

  frugal_op Op() const {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table_;
    return op;
  }
  frugal_batch* Declare(uint64_t step, const std::vector<uint64_t>& keys) {
    frugal_op op = Op();
    op.keys = keys.data();
    op.count = keys.size();
    frugal_batch* batch = nullptr;
    CHECK_OK(frugal_prefetch(trainer_, step, &op, 1, &batch));
    return batch;
  }
  void Cancel(frugal_batch* batch) { CHECK_OK(frugal_prefetch_cancel(trainer_, batch)); }
  void Begin() { CHECK_OK(frugal_step_begin(trainer_, step_, 120000)); }
  void Lookup(frugal_batch* batch, Ptr<float> out) {
    frugal_op op = Op();
    op.batch = batch;
    op.rows_out = reinterpret_cast<float*>(out.address);
    CHECK_OK(frugal_lookup(trainer_, &op, 1));
  }
  void Push(frugal_batch* batch, Ptr<float> grads) {
    frugal_op op = Op();
    op.batch = batch;
    op.grads = reinterpret_cast<const float*>(grads.address);
    CHECK_OK(frugal_push_grad(trainer_, &op, 1));
    ++trained_;
  }
  void End() { CHECK_OK(frugal_step_end(trainer_, step_++, 0)); }
  void Flush() { CHECK_OK(frugal_flush(engine_, 120000)); }
  void Get(const uint64_t* keys, size_t n, float* out) {
    CHECK_OK(frugal_get(table_, keys, n, 0, out, 0, nullptr));
  }
  frugal_stats Stats() const {
    frugal_stats stats = {};
    stats.struct_size = sizeof stats;
    CHECK_OK(frugal_get_stats(engine_, &stats));
    return stats;
  }

 private:
  EngineShape shape_;
  frugal_engine* engine_ = nullptr;
  frugal_table* table_ = nullptr;
  frugal_trainer* trainer_ = nullptr;
  uint64_t step_ = 0, trained_ = 0;
};

#undef CHECK_OK

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_ENGINE_H_
