// What rows are stored as, and the one place where that becomes fp32 and fp32 becomes that.
//
// What: values and state of rows are Elements. What optimizers compute with, gradients, their sums,
// and what callers give and get are fp32 whatever an Element is. Where it is fp32, too, all of this
// is a copy of the same bits, or nothing. Who moves rows as they are copies bytes.
// Callers: the kernels, and who exports and imports rows.
#ifndef FRUGAL_DEVICE_ELEMENT_H_
#define FRUGAL_DEVICE_ELEMENT_H_

#include <stddef.h>
#include <string.h>

#include <type_traits>

#include "arith/hd.h"

namespace frugal::device {

#if defined(FRUGAL_ELEMENT_PROBE)
using Element = FRUGAL_ELEMENT_PROBE;  // tests/element.sh alone, which compiles and does not run
#else
using Element = float;
#endif

// Numbers in memory that are fp32 as they lie there.
template <class T>
inline constexpr bool kIsFloat = std::is_same_v<T, float>;

template <class T>
FRUGAL_HD float as_float(T x) {
  return static_cast<float>(x);
}
template <class T>
FRUGAL_HD T stored_as(float x) {
  return static_cast<T>(x);
}

// n of them.
inline void load_elements(const Element* from, float* to, size_t n) {
  if constexpr (kIsFloat<Element>) memcpy(to, from, n * sizeof(float));
  else
    for (size_t i = 0; i < n; ++i) to[i] = as_float(from[i]);
}
inline void store_elements(const float* from, Element* to, size_t n) {
  if constexpr (kIsFloat<Element>) memcpy(to, from, n * sizeof(float));
  else
    for (size_t i = 0; i < n; ++i) to[i] = stored_as<Element>(from[i]);
}
// n floats that were made of elements become those again, from where they lie on.
inline Element* stored_in_place(float* floats, size_t n) {
  Element* const to = reinterpret_cast<Element*>(floats);
  if constexpr (!kIsFloat<Element>)
    for (size_t i = 0; i < n; ++i) {
      const Element x = stored_as<Element>(floats[i]);
      memcpy(to + i, &x, sizeof x);
    }
  return to;
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_ELEMENT_H_
