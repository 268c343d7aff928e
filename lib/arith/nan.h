// The one NaN that rows, optimizer state and pooled outputs hold: 0x7fc00000.
//
// What: which NaN an operation gives (sign and payload) differs between instruction sets and with
// the order of operands. So it is replaced wherever a value is stored.
// Callers: the optimizer bodies, the kernels, everything that copies a caller's floats into rows.
#ifndef FRUGAL_ARITH_NAN_H_
#define FRUGAL_ARITH_NAN_H_

#include "arith/hd.h"

namespace frugal::arith {

inline constexpr uint32_t kCanonicalNanBits =
    0x7fc00000u;  // sign clear, quiet bit set, payload zero

FRUGAL_HD float canonical_nan() { return float_of_bits(kCanonicalNanBits); }

// x, or the canonical NaN for any NaN. T is float or a vector of floats.
template <class T>
FRUGAL_HD T canonical(T x) {
  return x == x ? x : Lane<T>::splat(canonical_nan());
}

}  // namespace frugal::arith

#endif  // FRUGAL_ARITH_NAN_H_
