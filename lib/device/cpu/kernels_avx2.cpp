// The CPU kernels compiled for AVX2; the build gives this file the flags for it.
#include "device/cpu/tables.h"

#if defined(__AVX2__)
#define FRUGAL_ISA_NS avx2
#define FRUGAL_ISA_NAME "avx2"
#include "device/cpu/kernels_table.inc"

namespace frugal::device {

const Kernels* avx2_kernels() { return &avx2::kTable; }

}  // namespace frugal::device
#else
namespace frugal::device {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace frugal::device
#endif
