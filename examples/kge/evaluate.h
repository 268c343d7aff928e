// Filtered link prediction: for each test edge and each end, the rank of the true entity among all
// entities, without those that give another known edge (of training, validation or test). Equal
// scores give the mean rank. A `Ranking` computes the scores: the model, or a baseline.
#ifndef FRUGAL_EXAMPLES_KGE_EVALUATE_H_
#define FRUGAL_EXAMPLES_KGE_EVALUATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "graph.h"
#include "options.h"

namespace kge {

// A question asks for the entity at `side` of an edge whose other end is `known`.
struct Question {
  Side side;
  uint32_t known;
  uint32_t relation;
  uint32_t answer;
  uint64_t number;  // among all questions, for the random baseline
};

struct Metrics {
  double mrr = 0;
  double hits1 = 0;
  double hits3 = 0;
  double hits10 = 0;
  uint64_t questions = 0;
};

// Scores for a block of questions. An object serves one thread.
class Ranking {
 public:
  virtual ~Ranking() = default;
  // Begins a block, and writes the scores of the true entities to answers_out[0..count-1].
  virtual void Start(const Question* questions, size_t count, float* answers_out) = 0;
  // Scores of entities first..first+entities-1, entities x Padded(count). The score of a true
  // entity must have the bits that Start wrote.
  virtual void Scores(uint32_t first, size_t entities, float* scores) = 0;
};

using MakeRanking = std::function<std::unique_ptr<Ranking>()>;

class Evaluator {
 public:
  explicit Evaluator(const Graph& graph);

  // Both questions of every edge, or of a random sample of `most` edges (0: all).
  Metrics Run(const std::vector<Edge>& edges, uint64_t most, uint64_t seed, size_t threads,
              const MakeRanking& make) const;

 private:
  const std::vector<uint32_t>& Known(const Question& question) const;

  const Graph& graph_;
  // The true entities, sorted, by (side, relation, known end).
  std::unordered_map<uint64_t, std::vector<uint32_t>> known_;
};

// By the model with these tables; they must outlive the rankings.
MakeRanking ModelRanking(const Graph& graph, const Options& options, const float* entities,
                         const float* relations);
// By the number of training edges that an entity has at this side of this relation.
MakeRanking PopularityRanking(const Graph& graph);
MakeRanking RandomRanking(uint64_t seed);

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_EVALUATE_H_
