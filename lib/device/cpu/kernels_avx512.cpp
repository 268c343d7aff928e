// The CPU kernels compiled for AVX-512; the build gives this file the flags for it.
#include "device/cpu/tables.h"

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define FRUGAL_ISA_NS avx512
#define FRUGAL_ISA_NAME "avx512"
#include "device/cpu/kernels_table.inc"

namespace frugal::device {

const Kernels* avx512_kernels() { return &avx512::kTable; }

}  // namespace frugal::device
#else
namespace frugal::device {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace frugal::device
#endif
