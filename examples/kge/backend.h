// Where the embedding tables live: in the engine, or in plain arrays that a loop updates.
//
// Two tables: entities and, with a row more for each reciprocal, relations. The calls are those of
// the step protocol of frugal.h. Calls for different ranks may come from different threads if
// `threaded()`; otherwise one thread serves the ranks in turn.
#ifndef FRUGAL_EXAMPLES_KGE_BACKEND_H_
#define FRUGAL_EXAMPLES_KGE_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "frugal.h"
#include "graph.h"
#include "options.h"
#include "sampler.h"

namespace kge {

enum class Table { kEntity, kRelation };

struct TableShape {
  const char* name;
  uint64_t rows;
  float init;  // rows begin uniform in +-init
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual bool threaded() const = 0;

  // Declares the keys of a later step. The batch must stay as it is until the step has ended.
  virtual void Declare(uint32_t rank, const Batch& batch) = 0;
  virtual void Begin(uint32_t rank, const Batch& batch) = 0;
  virtual void Lookup(uint32_t rank, const Batch& batch, float* entities, float* relations) = 0;
  // Memory for the gradients of this step, packed: entities, then relations.
  virtual float* GradientMemory(uint32_t rank, size_t floats) = 0;
  virtual void Push(uint32_t rank, const Batch& batch, const float* entity_grads,
                    const float* relation_grads) = 0;
  // What a rank wants to find again when a checkpoint of this step is resumed from: how many edges
  // it has trained.
  virtual void Keep(uint32_t rank, uint64_t edges) = 0;
  virtual void End(uint32_t rank, const Batch& batch) = 0;
  // Takes a rank out for good, so that no other rank waits for it. For errors.
  virtual void Leave(uint32_t rank) = 0;

  // All rows of a table, each followed by its optimizer state if `with_state`. Between steps.
  virtual std::vector<float> Rows(Table table, bool with_state) = 0;

  // Where a checkpoint was resumed from: the first step to make, and the edges of all earlier ones.
  virtual uint64_t FirstStep() const { return 0; }
  virtual uint64_t FirstEdges() const { return 0; }
  // Writes a checkpoint of the last step. Between steps.
  virtual void Save() {}

  // Statistics; false if there are none.
  virtual bool Stats(frugal_stats* stats) = 0;
};

// The shapes of both tables and the optimizer, as both back ends use them.
TableShape ShapeOf(Table table, const Graph& graph, const Options& options);
frugal_optimizer OptimizerOf(const Options& options);
// Floats of optimizer state in a row.
size_t StateFloats(const Options& options);

std::unique_ptr<Backend> MakeFrugalBackend(const Graph& graph, const Options& options);
std::unique_ptr<Backend> MakePlainBackend(const Graph& graph, const Options& options);

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_BACKEND_H_
