// The record's part of the demo (examples/kge): its first 20 steps on a made-up graph, for some
// models, optimizers and engines. A line for each, as record.py has it: hashes of the keys, of both
// tables with their state, and of the rows that were looked up. The back end, which makes all calls
// to the library, is the demo's own.
#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "graph.h"
#include "options.h"
#include "oracle/digest.h"
#include "random.h"
#include "sampler.h"
#include "trainer.h"

namespace {

using frugal_oracle::Digest;

constexpr uint64_t kSteps = 20;

// Few entities are in most edges, as in real graphs.
kge::Graph MakeGraph() {
  kge::Graph graph;
  graph.title = "made up";
  graph.entities = 20'000;
  graph.relations = 20;
  const uint64_t stream = kge::Stream(1, 2, 3);
  uint64_t drawn = 0;
  auto draw = [&](uint64_t n) { return kge::Below(kge::Draw(stream, drawn++), n); };
  auto entity = [&] { return static_cast<uint32_t>(draw(draw(graph.entities) + 1)); };
  for (int i = 0; i < 100'000; ++i) {
    const uint32_t head = entity(), tail = entity();
    graph.train.push_back({head, tail, static_cast<uint32_t>(draw(graph.relations))});
  }
  return graph;
}

// The engine, with what goes in and comes out. Ranks come in any order, so their digests are added
// up.
class Recorder : public kge::Backend {
 public:
  explicit Recorder(std::unique_ptr<kge::Backend> engine) : engine_(std::move(engine)) {}

  bool threaded() const override { return engine_->threaded(); }
  void Declare(uint32_t rank, const kge::Batch& batch) override {
    if (batch.step < kSteps) {
      Digest digest = Of(rank, batch);
      digest.Add(batch.entities);
      digest.Add(batch.relations);
      keys += digest.value();
    }
    engine_->Declare(rank, batch);
  }
  void Begin(uint32_t rank, const kge::Batch& batch) override { engine_->Begin(rank, batch); }
  void Lookup(uint32_t rank, const kge::Batch& batch, float* entities, float* relations) override {
    engine_->Lookup(rank, batch, entities, relations);
    Digest digest = Of(rank, batch);
    digest.Add(entities, batch.entities.size() * dim * sizeof(float));
    digest.Add(relations, batch.relations.size() * dim * sizeof(float));
    lookups += digest.value();
  }
  float* GradientMemory(uint32_t rank, size_t floats) override {
    return engine_->GradientMemory(rank, floats);
  }
  void Push(uint32_t rank, const kge::Batch& batch, const float* entity_grads,
            const float* relation_grads) override {
    engine_->Push(rank, batch, entity_grads, relation_grads);
  }
  void Keep(uint32_t rank, uint64_t edges) override { engine_->Keep(rank, edges); }
  void End(uint32_t rank, const kge::Batch& batch) override { engine_->End(rank, batch); }
  void Leave(uint32_t rank) override { engine_->Leave(rank); }
  std::vector<float> Rows(kge::Table table, bool with_state) override {
    return engine_->Rows(table, with_state);
  }
  bool Stats(frugal_stats* stats) override { return engine_->Stats(stats); }

  size_t dim = 0;
  std::atomic<uint64_t> keys{0}, lookups{0};

 private:
  static Digest Of(uint32_t rank, const kge::Batch& batch) {
    Digest digest;
    digest.Add(rank);
    digest.Add(batch.step);
    return digest;
  }

  std::unique_ptr<kge::Backend> engine_;
};

void Record(const char* name, const kge::Graph& graph, const kge::Options& options) {
  const kge::Sampler sampler(graph, options);
  Recorder recorder(kge::MakeFrugalBackend(graph, options));
  recorder.dim = options.dim;
  kge::Trainer trainer(sampler, options, &recorder, /*quiet=*/true);
  trainer.Run(kSteps, 0, kSteps);
  Digest tables;
  for (const kge::Table table : {kge::Table::kEntity, kge::Table::kRelation})
    tables.Add(recorder.Rows(table, true));
  std::printf("demo %s %016llx %016llx - %016llx ranks=%u steps=%llu\n", name,
              static_cast<unsigned long long>(recorder.keys.load()),
              static_cast<unsigned long long>(tables.value()),
              static_cast<unsigned long long>(recorder.lookups.load()), options.world,
              static_cast<unsigned long long>(kSteps));
}

int Main() {
  const kge::Graph graph = MakeGraph();
  kge::Options options;  // the demo's own
  options.init = 0.1f;
  options.regularization = 0.05f;
  Record("complex", graph, options);

  options.batch = 200;
  options.negatives = 64;
  options.dim = 32;
  options.model = kge::Model::kSimplE;
  options.loss = kge::Loss::kLogSigmoid;
  options.optimizer = FRUGAL_ROWWISE_ADAGRAD;
  options.world = 1;
  options.flush_threads = 0;
  options.flush = FRUGAL_FLUSH_AT_ONCE;
  Record("simple", graph, options);

  options.model = kge::Model::kTransEL1;
  options.loss = kge::Loss::kSelfAdversarial;
  options.reciprocal = false;
  options.regularization = 0;
  options.margin = 9;
  options.init = 11.0f / 32;
  options.optimizer = FRUGAL_ADAM;
  options.lr = 0.01f;
  options.world = 3;
  options.flush_threads = 2;
  options.flush = FRUGAL_FLUSH_DEFERRED;
  options.cache = 0;
  Record("transe_l1", graph, options);

  options.model = kge::Model::kTransEL2;
  options.optimizer = FRUGAL_SGD;
  options.world = 2;
  options.lookahead = 1;
  options.flush = FRUGAL_FLUSH_TREE_HEAP;
  options.cache = 1;
  Record("transe_l2", graph, options);
  return 0;
}

}  // namespace

int main() {
  try {
    return Main();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "record_demo: %s\n", error.what());
    return 1;
  }
}
