#include "sampler.h"

#include <algorithm>

#include "random.h"

namespace kge {

Sampler::Sampler(const Graph& graph, const Options& options) : graph_(graph), options_(options) {
  const uint64_t edges_per_step = uint64_t{options.world} * options.batch;
  steps_per_epoch_ = (graph.train.size() + edges_per_step - 1) / edges_per_step;
}

void Sampler::Fill(uint32_t rank, uint64_t step, Batch* batch) const {
  const uint64_t total = graph_.train.size();
  const uint64_t epoch = step / steps_per_epoch_;
  const uint64_t part = (step % steps_per_epoch_) * options_.world + rank;
  const uint64_t first = std::min(total, part * options_.batch);
  const uint64_t last = std::min(total, first + options_.batch);
  const Permutation order(total, Stream(options_.seed, 'e', epoch));
  const uint64_t negative_stream = Stream(options_.seed, step, rank);

  batch->step = step;
  batch->edges = last - first;
  batch->negatives = options_.negatives;
  batch->chunks.clear();
  batch->entities.clear();
  batch->relations.clear();
  std::vector<uint64_t> tails;
  for (uint64_t at = first; at < last; at += options_.chunk) {
    const uint64_t end = std::min<uint64_t>(last, at + options_.chunk);
    batch->chunks.push_back({batch->entities.size(), at - first, end - at});
    tails.clear();
    for (uint64_t i = at; i < end; ++i) {
      const Edge& edge = graph_.train[order(i)];
      batch->entities.push_back(edge.head);
      batch->relations.push_back(edge.relation);
      tails.push_back(edge.tail);
    }
    const uint64_t drawn = (at - first) / options_.chunk * options_.negatives;
    for (uint64_t j = 0; j < options_.negatives; ++j) {
      batch->entities.push_back(Below(Draw(negative_stream, drawn + j), graph_.entities));
    }
    batch->entities.insert(batch->entities.end(), tails.begin(), tails.end());
  }
  if (options_.reciprocal) {
    for (size_t i = 0; i < batch->edges; ++i) {
      batch->relations.push_back(batch->relations[i] + graph_.relations);
    }
  }
}

}  // namespace kge
