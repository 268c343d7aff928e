// FRUGAL_HD: marks the operation bodies that the host kernels and the device kernels share. And the
// few functions that differ between the two.
//
// What: on the host a body is always inlined, for speed and for correctness. The CPU kernels are
// compiled several times with different instruction sets. If one of them emitted an inline
// function, the linker could pick it for the others.
// Invariants: bodies use no containers, no libm and no static data; floating-point code in them
// is compiled without contraction (-ffp-contract=off, nvcc --fmad=false).
// Callers: everything in lib/arith, lib/device.
#ifndef FRUGAL_ARITH_HD_H_
#define FRUGAL_ARITH_HD_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define FRUGAL_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__) || defined(__clang__)
#define FRUGAL_HD inline __attribute__((always_inline))
#else
#define FRUGAL_HD inline
#endif

namespace frugal::arith {

// What a body needs to know of its operand type. A body is written once for T = float. It works for
// a vector of floats as well (GCC and clang vector extensions: + - * / < ?: apply to each lane). A
// vector type specializes this template for what the operators cannot say.
template <class T>
struct Lane;

template <>
struct Lane<float> {
  static FRUGAL_HD float splat(float x) { return x; }
  static FRUGAL_HD float root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
  }
};

// The correctly rounded square root of a double.
FRUGAL_HD double root_double(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

FRUGAL_HD float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

}  // namespace frugal::arith

#endif  // FRUGAL_ARITH_HD_H_
