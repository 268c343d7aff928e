// The forward and backward pass of one rank's step: embedding rows in, gradients out. The same
// function serves the engine and the plain loop, so it is what both must agree on.
#ifndef FRUGAL_EXAMPLES_KGE_WORKER_H_
#define FRUGAL_EXAMPLES_KGE_WORKER_H_

#include <vector>

#include "model.h"
#include "options.h"
#include "sampler.h"

namespace kge {

class Worker {
 public:
  explicit Worker(const Options& options)
      : options_(options), scorer_(options.model, options.dim) {}

  // Rows and gradients are packed, in the order of the batch's keys; every gradient is written.
  // Returns: the sum of the losses of the edges, both directions. Threads: one at a time.
  double Compute(const Batch& batch, const float* entities, const float* relations,
                 float* entity_grads, float* relation_grads);

 private:
  double OneSide(const Batch& batch, const Chunk& chunk, Side side, const float* entities,
                 const float* relations, float* entity_grads, float* relation_grads);

  const Options& options_;
  Scorer scorer_;
  std::vector<float> queries_;
  std::vector<float> query_grads_;
  std::vector<float> scores_;
  std::vector<float> weights_;
  std::vector<float> positive_;
  std::vector<float> positive_grads_;
  std::vector<float> losses_;
  std::vector<uint32_t> places_;
};

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_WORKER_H_
