// The embedding models. Each turns a known end of an edge and its relation into a query row, so
// that the score of any entity at the other end is one operation between the query and that
// entity's row: a product (DistMult, ComplEx, SimplE) or a distance (TransE).
//
//   model      score of (h, r, t)                        query for a tail      query for a head
//   TransE     -|h + r - t| (L1 or L2)                   h + r                 t - r
//   DistMult   sum h r t                                 h r                   t r
//   ComplEx    Re sum h r conj(t)                        h r                   t conj(r)
//   SimplE     1/2 (sum h1 r1 t2 + sum t1 r2 h2)         1/2 [r2 h2, r1 h1]    1/2 [r1 t2, r2 t1]
//
// Sources: Bordes et al. 2013, Yang et al. 2015, Trouillon et al. 2016, Kazemi and Poole 2018.
// ComplEx keeps the real parts in the first half of a row and the imaginary ones in the second.
// With reciprocal relations (Lacroix et al. 2018) a head is the tail of the reversed edge, whose
// relation has a row of its own.
#ifndef FRUGAL_EXAMPLES_KGE_MODEL_H_
#define FRUGAL_EXAMPLES_KGE_MODEL_H_

#include <cstddef>
#include <vector>

#include "kernels.h"

namespace kge {

enum class Model { kTransEL1, kTransEL2, kDistMult, kComplEx, kSimplE };

// Which end of the edge is asked for.
enum class Side { kTail, kHead };

// Rows of `x` (the known ends) and `r` to rows of `q`; all `count` x `dim`, packed.
void MakeQueries(Model model, Side side, size_t count, size_t dim, const float* x, const float* r,
                 float* q);

// From gradients of the queries adds those of x and r.
void QueryGradients(Model model, Side side, size_t count, size_t dim, const float* x,
                    const float* r, const float* q_grads, float* x_grads, float* r_grads);

// Adds the gradient of the N3 regularizer, coefficient * sum |x|^3 (Lacroix et al. 2018); |x| is
// the modulus of a complex element in ComplEx.
void RegularizerGradients(Model model, size_t count, size_t dim, float coefficient,
                          const float* rows, float* grads);

// Scores of queries against candidates, with the memory that this takes. Not for two threads.
class Scorer {
 public:
  Scorer(Model model, size_t dim) : model_(model), dim_(dim) {}

  // scores (candidates x Padded(queries)). The score of a pair depends on its two rows alone.
  void Scores(size_t candidates, const float* candidate_rows, size_t queries,
              const float* query_rows, float* scores);

  // The scores of query i and row i of `rows`.
  void PairScores(size_t count, const float* query_rows, const float* rows, float* scores);

  // From the derivatives `weights` by the scores (candidates x Padded(queries); `scores` are the
  // scores themselves) adds the gradients of both sides. Overwrites `weights`.
  void Gradients(size_t candidates, const float* candidate_rows, size_t queries,
                 const float* query_rows, const float* scores, float* weights,
                 float* candidate_grads, float* query_grads);

  // The same for PairScores.
  void PairGradients(size_t count, const float* query_rows, const float* rows,
                     const float* scores, const float* weights, float* row_grads,
                     float* query_grads);

  // Whether Gradients needs the scores, too.
  bool needs_scores() const { return model_ == Model::kTransEL2; }

 private:
  float* Scratch(size_t floats);

  Model model_;
  size_t dim_;
  const Kernels& kernels_ = Best();
  std::vector<float> scratch_;
  std::vector<float> query_norms_;
  std::vector<float> candidate_norms_;
};

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_MODEL_H_
