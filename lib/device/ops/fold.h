// fold32 on a device: sums of runs, combined pairwise (docs/arithmetic.md).
//
// What: runs that come one after the other are combined by a binary counter of partial sums, as in
// arith/fold.h; its levels lie in shared memory, since an array that is indexed by a variable can
// not stay in registers. Invariants: a pairwise sum of runs, cut into pieces of a power of two runs
// each, is the pairwise sum of the sums of the pieces, of which the last may be shorter: so pieces
// are summed in parallel. Callers: reduce.h, pool.h.
#ifndef FRUGAL_DEVICE_OPS_FOLD_H_
#define FRUGAL_DEVICE_OPS_FOLD_H_

#include "device/ops/lanes.h"

namespace frugal::device {

// Levels that a counter of `n` sums needs.
FRUGAL_HD uint32_t fold_levels(uint64_t n) {
  uint32_t levels = 0;
  for (; n > 1; n = (n + 1) / 2) ++levels;
  return levels;
}

// The partial sums of one thread. Uses fold_levels(n) * threads() * sizeof(V) bytes of shared
// memory for `n` sums, the last of which goes to finish().
template <class V>
class PairwiseSum {
 public:
  FRUGAL_DEVICE void add(V sum) {
    uint32_t b = 0;
    for (; (count_ >> b) & 1; ++b) sum = level(b) + sum;
    level(b) = sum;
    ++count_;
  }
  FRUGAL_DEVICE V finish(V last) const {
    for (uint32_t b = 0; count_ >> b; ++b) {
      if ((count_ >> b) & 1) last = level(b) + last;
    }
    return last;
  }

 private:
  FRUGAL_DEVICE static V& level(uint32_t b) {
    return reinterpret_cast<V*>(shared())[b * threads() + thread()];
  }
  uint32_t count_ = 0;
};

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_FOLD_H_
