// The two shapes of sums of docs/arithmetic.md, "Shapes of sums".
//
// What: fold32 adds the occurrences of a row, or the rows of a bag; sum16 adds over the elements
// of a row. Both are fixed down to the order of each addition.
// Invariants: no term is ever added to a zero that is not written in the definition: fold32 copies
// its first term (so -0.0 survives), sum16 starts its lanes at +0.
// Callers: the CPU and device kernels; tests use their own loops.
#ifndef FRUGAL_ARITH_FOLD_H_
#define FRUGAL_ARITH_FOLD_H_

#include "arith/hd.h"

namespace frugal::arith {

inline constexpr uint32_t kFoldRun = 32;     // terms of a run of fold32
inline constexpr uint32_t kFoldLevels = 35;  // fold32 takes n < 2^40 terms
inline constexpr uint32_t kSumLanes = 16;    // lanes of sum16

// fold32 of n >= 1 terms. `next` is called n times and returns the terms in order; T is anything
// with operator+ (a float, a vector, a block of vectors).
//
// Runs are combined by a binary counter: level[b] holds the sum of 2^b runs while bit b of the
// number of runs is set. An odd last run passes up by being added last, with what precedes it on
// the left.
template <class T, class Next>
FRUGAL_HD T fold32(uint64_t n, Next next) {
  T run = next();
  if (n <= kFoldRun) {
    for (uint64_t i = 1; i < n; ++i) run = run + next();
    return run;
  }
  T level[kFoldLevels];
  uint64_t runs = 0;
  uint64_t left = n;
  for (;;) {
    const uint64_t in_run = left < kFoldRun ? left : kFoldRun;
    for (uint64_t i = 1; i < in_run; ++i) run = run + next();
    left -= in_run;
    uint32_t b = 0;
    for (; (runs >> b) & 1; ++b) run = level[b] + run;
    level[b] = run;
    ++runs;
    if (left == 0) break;
    run = next();
  }
  uint32_t b = 0;
  while (!((runs >> b) & 1)) ++b;
  T total = level[b];
  for (++b; runs >> b; ++b) {
    if ((runs >> b) & 1) total = level[b] + total;
  }
  return total;
}

// The last step of sum16: combines the sixteen lanes in place and returns the sum.
FRUGAL_HD float sum16_finish(float* lane) {
  for (uint32_t half = kSumLanes / 2; half != 0; half /= 2) {
    for (uint32_t l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
  }
  return lane[0];
}

// sum16 of term(0), ..., term(n - 1).
template <class Term>
FRUGAL_HD float sum16(uint32_t n, Term term) {
  float lane[kSumLanes] = {};
  for (uint32_t i = 0; i < n; ++i) lane[i % kSumLanes] = lane[i % kSumLanes] + term(i);
  return sum16_finish(lane);
}

}  // namespace frugal::arith

#endif  // FRUGAL_ARITH_FOLD_H_
