// Which edges and which negatives a rank has in a step.
//
// A step takes `world * batch` edges of a random order that changes every epoch; rank r has the
// r-th part. The part is cut into chunks, and the edges of a chunk share `negatives` entities drawn
// uniformly, for corrupted heads and corrupted tails alike; the other heads (tails) of the chunk
// can serve as well (Lerer et al. 2019, PyTorch-BigGraph, section 4.3). All of it is a function of
// (seed, rank, step): that is what lets a trainer declare the keys of later steps.
#ifndef FRUGAL_EXAMPLES_KGE_SAMPLER_H_
#define FRUGAL_EXAMPLES_KGE_SAMPLER_H_

#include <cstdint>
#include <vector>

#include "graph.h"
#include "options.h"

namespace kge {

// The entity rows of a chunk lie as [heads | negatives | tails], so that the candidates for either
// end are one run of rows.
struct Chunk {
  size_t first_row;   // of the chunk in the step's entity rows
  size_t first_edge;  // in the step's edges
  size_t edges;
};

struct Batch {
  uint64_t step = 0;
  size_t edges = 0;
  size_t negatives = 0;  // of each chunk
  std::vector<Chunk> chunks;
  std::vector<uint64_t> entities;   // keys
  std::vector<uint64_t> relations;  // keys, one for each edge; reciprocal ones follow
};

class Sampler {
 public:
  Sampler(const Graph& graph, const Options& options);

  // Threads: any number at once.
  void Fill(uint32_t rank, uint64_t step, Batch* batch) const;

  uint64_t steps_per_epoch() const { return steps_per_epoch_; }
  uint64_t edges_per_epoch() const { return graph_.train.size(); }

 private:
  const Graph& graph_;
  const Options& options_;
  uint64_t steps_per_epoch_;
};

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_SAMPLER_H_
