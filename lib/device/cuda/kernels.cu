// Launchers: each kernel of ops/kernels.h is its body and nothing else.
#include "device/cuda/kernels.h"
#include "device/ops/kernels.h"

namespace frugal::device {

// C names, so that tools and the checks of the fat binary know kernels by the names of the list.
// The arguments are no __grid_constant__: with that nvcc 13.0 compiles some of the bodies forever
// (its code generators before sm_100). And it saves nothing once a body is inlined.
extern "C" {
#define X(name, Arguments) \
  __global__ void frugal_##name(Arguments arguments) { name##_body(arguments); }
FRUGAL_KERNELS(X)
#undef X
}

CudaKernels cuda_kernels() {
#define X(name, Arguments)                                                             \
  static_assert(sizeof(Arguments) <= 4096, "arguments of a kernel are at most 4 KiB"); \
  static_assert(__is_trivially_copyable(Arguments), "arguments are copied byte by byte");
  FRUGAL_KERNELS(X)
#undef X
#define X(name, Arguments) \
  {#name, reinterpret_cast<const void*>(&frugal_##name), sizeof(Arguments)},
  static const CudaKernel all[] = {FRUGAL_KERNELS(X)};
#undef X
  static_assert(sizeof(all) / sizeof(all[0]) == static_cast<size_t>(Kernel::kCount));
  return {all, static_cast<uint32_t>(Kernel::kCount)};
}

}  // namespace frugal::device
