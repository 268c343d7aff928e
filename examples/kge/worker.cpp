#include "worker.h"

#include <algorithm>

namespace kge {

double Worker::Compute(const Batch& batch, const float* entities, const float* relations,
                       float* entity_grads, float* relation_grads) {
  const size_t dim = options_.dim;
  std::fill_n(relation_grads, batch.relations.size() * dim, 0.0f);
  double loss = 0;
  for (const Chunk& chunk : batch.chunks) {
    const size_t rows = 2 * chunk.edges + batch.negatives;
    std::fill_n(entity_grads + chunk.first_row * dim, rows * dim, 0.0f);
    for (const Side side : {Side::kTail, Side::kHead}) {
      loss += OneSide(batch, chunk, side, entities, relations, entity_grads, relation_grads);
    }
    if (options_.regularization > 0) {
      const size_t heads = chunk.first_row * dim;
      const size_t tails = (chunk.first_row + chunk.edges + batch.negatives) * dim;
      for (const size_t at : {heads, tails}) {
        RegularizerGradients(options_.model, chunk.edges, dim, options_.regularization,
                             entities + at, entity_grads + at);
      }
    }
  }
  if (options_.regularization > 0) {
    RegularizerGradients(options_.model, batch.relations.size(), dim, options_.regularization,
                         relations, relation_grads);
  }
  return loss;
}

double Worker::OneSide(const Batch& batch, const Chunk& chunk, Side side, const float* entities,
                       const float* relations, float* entity_grads, float* relation_grads) {
  const size_t dim = options_.dim;
  const size_t count = chunk.edges;
  const size_t padded = Padded(count);
  const size_t head_row = chunk.first_row;
  const size_t negative_row = head_row + count;
  const size_t tail_row = negative_row + batch.negatives;
  const bool tail_side = side == Side::kTail;
  const size_t known_row = tail_side ? head_row : tail_row;
  const size_t target_row = tail_side ? tail_row : head_row;
  const bool reversed = !tail_side && options_.reciprocal;
  const size_t relation_row = chunk.first_edge + (reversed ? batch.edges : 0);
  const Side form = reversed ? Side::kTail : side;
  const size_t shared = options_.batch_negatives ? count : 0;
  const size_t candidates = batch.negatives + shared;
  const size_t candidate_row = tail_side || shared == 0 ? negative_row : head_row;

  const float* known = entities + known_row * dim;
  const float* target = entities + target_row * dim;
  const float* relation = relations + relation_row * dim;
  const float* candidate = entities + candidate_row * dim;

  queries_.resize(count * dim);
  query_grads_.assign(count * dim, 0.0f);
  weights_.resize(candidates * padded);
  positive_.assign(padded, 0.0f);
  positive_grads_.resize(padded);
  losses_.resize(padded);
  places_.resize(candidates);

  MakeQueries(options_.model, form, count, dim, known, relation, queries_.data());
  scorer_.Scores(candidates, candidate, count, queries_.data(), weights_.data());
  scorer_.PairScores(count, queries_.data(), target, positive_.data());
  if (scorer_.needs_scores()) scores_ = weights_;

  // A candidate that is the edge's own target is no negative.
  constexpr float kNever = -1e30f;
  const uint64_t* ids = batch.entities.data() + candidate_row;
  for (size_t i = 0; i < count; ++i) {
    const size_t found =
        Best().find(ids, candidates, batch.entities[target_row + i], places_.data());
    for (size_t f = 0; f < found; ++f) weights_[places_[f] * padded + i] = kNever;
  }

  const LossArguments arguments{candidates,       padded,
                                positive_.data(), weights_.data(),
                                positive_grads_.data(), losses_.data(),
                                options_.margin,  options_.temperature};
  switch (options_.loss) {
    case Loss::kSoftmax: Best().softmax(arguments); break;
    case Loss::kLogSigmoid: Best().logsigmoid(arguments); break;
    case Loss::kSelfAdversarial: Best().self_adversarial(arguments); break;
  }

  scorer_.Gradients(candidates, candidate, count, queries_.data(), scores_.data(),
                    weights_.data(), entity_grads + candidate_row * dim, query_grads_.data());
  scorer_.PairGradients(count, queries_.data(), target, positive_.data(), positive_grads_.data(),
                        entity_grads + target_row * dim, query_grads_.data());
  QueryGradients(options_.model, form, count, dim, known, relation, query_grads_.data(),
                 entity_grads + known_row * dim, relation_grads + relation_row * dim);
  double loss = 0;
  for (size_t i = 0; i < count; ++i) loss += losses_[i];
  return loss;
}

}  // namespace kge
