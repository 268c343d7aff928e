// The loops that take the time: score matrices, their gradients, losses, counting of ranks.
//
// Score matrices are stored candidates x queries: the queries of a chunk lie side by side in a
// row, so that a loss or a rank works on as many queries at once as a vector has lanes and no sum
// runs across lanes. A row is padded to a multiple of kLanes; what the padding holds is never used.
//
// Each kernel exists for the widest vectors that the machine may have and is chosen at run time.
// For one machine the result of a kernel depends on its arguments alone: every sum has a fixed
// order. (Machines of different kinds may differ in the last bit; the engine's part does not.)
#ifndef FRUGAL_EXAMPLES_KGE_KERNELS_H_
#define FRUGAL_EXAMPLES_KGE_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace kge {

// Queries in a score matrix are padded to a multiple of this.
inline constexpr size_t kLanes = 16;
inline constexpr size_t Padded(size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

struct Matrix {
  const float* data;
  size_t row_step;     // floats from a row to the next
  size_t column_step;  // floats from a column to the next
};

struct LossArguments {
  size_t candidates;
  size_t queries;         // padded
  const float* positive;  // scores of the positive edges, one for each query
  float* scores;          // candidates x queries; becomes the derivative by each score
  float* positive_out;    // the derivative by the positive score
  float* loss_out;        // the loss of each query
  float margin;           // added to every score (gamma of the translation models)
  float temperature;      // alpha of the self-adversarial weights
};

struct Kernels {
  const char* name;

  // c (m x n, row step c_step) = a (m x k) * b (k x n), or += if `add`. `scratch` must hold
  // k * (n + 3 * kLanes) floats.
  void (*multiply)(size_t m, size_t n, size_t k, Matrix a, Matrix b, float* c, size_t c_step,
                   bool add, float* scratch);
  // The same shape with sums of abs(a - b) in place of products: L1 distances.
  void (*distance_l1)(size_t m, size_t n, size_t k, Matrix a, Matrix b, float* c, size_t c_step,
                      float* scratch);
  // For weights w (candidates x queries, row step w_step) of the scores -L1(query, candidate):
  // adds the gradients to query_grads (queries x dim) and candidate_grads (candidates x dim).
  // `scratch` must hold 64 * candidates floats.
  void (*gradient_l1)(size_t candidates, size_t queries, size_t dim, const float* w, size_t w_step,
                      const float* query_rows, const float* candidate_rows, float* query_grads,
                      float* candidate_grads, float* scratch);
  // scores = factor * scores
  void (*scale)(size_t count, float factor, float* scores);
  // From products to scores -L2(query, candidate): -sqrt(|q|^2 + |e|^2 - 2 q.e), not above -1e-4.
  void (*distance_l2)(size_t candidates, size_t queries, const float* query_norms,
                      const float* candidate_norms, float* scores);

  void (*softmax)(const LossArguments& arguments);
  void (*logsigmoid)(const LossArguments& arguments);
  void (*self_adversarial)(const LossArguments& arguments);

  // For each query adds the number of candidates whose score is below, and is equal to, the
  // target's. A NaN counts as neither: it is to lose, not to win.
  void (*count)(size_t candidates, size_t queries, const float* scores, const float* target,
                int32_t* below, int32_t* equal);
  // Writes the places of `value` in ids to places_out; returns how many there are.
  size_t (*find)(const uint64_t* ids, size_t count, uint64_t value, uint32_t* places_out);
};

// The best kernels for this machine.
const Kernels& Best();

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_KERNELS_H_
