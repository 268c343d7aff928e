// The element type in which rows are stored, and its only conversions from and to fp32.
//
// What: values and state of rows are Elements. Optimizers compute with fp32. Gradients, their sums,
// and callers' inputs and outputs are fp32, whatever an Element is. If that is fp32 too, a
// conversion is a copy of the same bits, or nothing. Code that moves rows as they are copies bytes.
//
// Callers: the kernels, and the code that exports and imports rows.
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

// Whether numbers of this type are fp32 in memory.
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

// Convert n elements.
inline void load_elements(const Element* from, float* to, size_t n) {
  if constexpr (kIsFloat<Element>)
    memcpy(to, from, n * sizeof(float));
  else
    for (size_t i = 0; i < n; ++i) to[i] = as_float(from[i]);
}
inline void store_elements(const float* from, Element* to, size_t n) {
  if constexpr (kIsFloat<Element>)
    memcpy(to, from, n * sizeof(float));
  else
    for (size_t i = 0; i < n; ++i) to[i] = stored_as<Element>(from[i]);
}
// Converts n floats that were made of elements back to elements, at the same address.
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
