// Training through the engine.
#include <numeric>
#include <stdexcept>

#include "backend.h"

namespace kge {
namespace {

void Check(int32_t status, const char* call) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw std::runtime_error(std::string(call) + ": " + frugal_status_name(status) + ": " +
                           error.message);
}

class FrugalBackend : public Backend {
 public:
  FrugalBackend(const Graph& graph, const Options& options)
      : options_(options),
        trainers_(options.world),
        batches_(options.world, std::vector<frugal_batch*>(options.lookahead + 1)) {
    frugal_config config;
    frugal_config_init(&config);
    config.world_size = options.world;
    config.lookahead = options.lookahead;
    config.flush_threads = options.flush_threads;
    config.flush_mode = options.flush;
    config.staleness = options.staleness;
    config.seed = options.seed;
    Check(frugal_open(&config, &engine_), "frugal_open");
    if (!options.checkpoint.empty()) OpenFolder();
    for (const Table table : {Table::kEntity, Table::kRelation}) {
      const TableShape shape = ShapeOf(table, graph, options);
      frugal_table_config table_config;
      frugal_table_config_init(&table_config);
      table_config.name = shape.name;
      table_config.rows = shape.rows;
      table_config.dim = options.dim;
      table_config.init = FRUGAL_INIT_UNIFORM;
      table_config.init_a = -shape.init;
      table_config.init_b = shape.init;
      table_config.optimizer = OptimizerOf(options);
      Check(frugal_table_create(engine_, &table_config, &tables_[static_cast<int>(table)]),
            "frugal_table_create");
    }
    for (uint32_t rank = 0; rank < options.world; ++rank) {
      frugal_trainer_config trainer_config;
      frugal_trainer_config_init(&trainer_config);
      trainer_config.rank = rank;
      trainer_config.cache_ratio = options.cache;
      Check(frugal_trainer_create(engine_, &trainer_config, &trainers_[rank]),
            "frugal_trainer_create");
    }
  }

  ~FrugalBackend() override { frugal_close(engine_); }

  bool threaded() const override { return true; }

  void Declare(uint32_t rank, const Batch& batch) override {
    frugal_op ops[2];
    for (const Table table : {Table::kEntity, Table::kRelation}) {
      frugal_op& op = ops[static_cast<int>(table)];
      frugal_op_init(&op);
      const auto& keys = table == Table::kEntity ? batch.entities : batch.relations;
      op.table = tables_[static_cast<int>(table)];
      op.keys = keys.data();
      op.count = keys.size();
    }
    Check(frugal_prefetch(trainers_[rank], batch.step, ops, 2, &Declared(rank, batch)),
          "frugal_prefetch");
  }

  void Begin(uint32_t rank, const Batch& batch) override {
    Check(frugal_step_begin(trainers_[rank], batch.step, FRUGAL_TIMEOUT_DEFAULT),
          "frugal_step_begin");
  }

  void Lookup(uint32_t rank, const Batch& batch, float* entities, float* relations) override {
    frugal_op ops[2];
    DeclaredOps(rank, batch, ops);
    ops[0].rows_out = entities;
    ops[1].rows_out = relations;
    Check(frugal_lookup(trainers_[rank], ops, 2), "frugal_lookup");
  }

  float* GradientMemory(uint32_t rank, size_t floats) override {
    void* memory = nullptr;
    Check(frugal_borrow(trainers_[rank], floats * sizeof(float), &memory), "frugal_borrow");
    return static_cast<float*>(memory);
  }

  void Push(uint32_t rank, const Batch& batch, const float* entity_grads,
            const float* relation_grads) override {
    frugal_op ops[2];
    DeclaredOps(rank, batch, ops);
    ops[0].grads = entity_grads;
    ops[1].grads = relation_grads;
    Check(frugal_push_grad(trainers_[rank], ops, 2), "frugal_push_grad");
  }

  void Keep(uint32_t rank, uint64_t edges) override {
    if (options_.checkpoint.empty()) return;
    // So little that it need not ask frugal_checkpoint_due first.
    Check(frugal_checkpoint_blob(trainers_[rank], &edges, sizeof edges), "frugal_checkpoint_blob");
  }

  void End(uint32_t rank, const Batch& batch) override {
    Check(frugal_step_end(trainers_[rank], batch.step, 0), "frugal_step_end");
  }

  void Leave(uint32_t rank) override {
    frugal_trainer_close(trainers_[rank]);
    trainers_[rank] = nullptr;
  }

  std::vector<float> Rows(Table table, bool with_state) override {
    const frugal_table* handle = tables_[static_cast<int>(table)];
    uint64_t rows = 0;
    Check(frugal_table_count(handle, &rows), "frugal_table_count");
    std::vector<uint64_t> keys(rows);
    std::iota(keys.begin(), keys.end(), uint64_t{0});
    const size_t floats = options_.dim + (with_state ? StateFloats(options_) : 0);
    std::vector<float> values(rows * floats);
    Check(frugal_get(handle, keys.data(), rows, with_state ? FRUGAL_WITH_STATE : 0, values.data(),
                     0, nullptr),
          "frugal_get");
    return values;
  }

  uint64_t FirstStep() const override { return first_step_; }
  uint64_t FirstEdges() const override { return first_edges_; }

  void Save() override {
    if (options_.checkpoint.empty()) return;
    // One that was due by itself may be being written. If it fails, this one may not.
    frugal_checkpoint_wait(engine_, 0, FRUGAL_TIMEOUT_INFINITE, nullptr);
    uint64_t number = 0;
    Check(frugal_checkpoint(engine_, nullptr, &number), "frugal_checkpoint");
    Check(frugal_checkpoint_wait(engine_, number, FRUGAL_TIMEOUT_INFINITE, nullptr),
          "frugal_checkpoint_wait");
  }

  bool Stats(frugal_stats* stats) override {
    stats->struct_size = sizeof *stats;
    Check(frugal_get_stats(engine_, stats), "frugal_get_stats");
    return true;
  }

 private:
  void OpenFolder() {
    frugal_folder_config config;
    frugal_folder_config_init(&config);
    config.every_steps = options_.every;
    Check(frugal_folder_open(engine_, options_.checkpoint.c_str(), &config), "frugal_folder_open");
    if (!options_.resume) return;
    frugal_checkpoint_info info{};
    info.struct_size = sizeof info;
    const int32_t status = frugal_restore(engine_, nullptr, &info);
    if (status == FRUGAL_ERR_NOT_FOUND) return;  // the first start of the program
    Check(status, "frugal_restore");
    first_step_ = info.step == FRUGAL_NO_STEP ? 0 : info.step + 1;
    for (uint32_t rank = 0; rank < info.world_size && info.blobs > 0; ++rank) {
      uint64_t edges = 0;
      Check(frugal_checkpoint_read_blob(options_.checkpoint.c_str(), info.number, rank, &edges,
                                        sizeof edges, nullptr),
            "frugal_checkpoint_read_blob");
      first_edges_ += edges;
    }
  }

  frugal_batch*& Declared(uint32_t rank, const Batch& batch) {
    return batches_[rank][batch.step % batches_[rank].size()];
  }

  // Exactly the declared keys of both tables: the handle stands for them.
  void DeclaredOps(uint32_t rank, const Batch& batch, frugal_op* ops) {
    for (uint32_t part = 0; part < 2; ++part) {
      frugal_op_init(&ops[part]);
      ops[part].table = tables_[part];
      ops[part].batch = Declared(rank, batch);
      ops[part].part = part;
    }
  }

  const Options& options_;
  frugal_engine* engine_ = nullptr;
  frugal_table* tables_[2] = {};
  std::vector<frugal_trainer*> trainers_;
  std::vector<std::vector<frugal_batch*>> batches_;  // by rank, then step modulo the window
  uint64_t first_step_ = 0, first_edges_ = 0;
};

}  // namespace

std::unique_ptr<Backend> MakeFrugalBackend(const Graph& graph, const Options& options) {
  return std::make_unique<FrugalBackend>(graph, options);
}

}  // namespace kge
