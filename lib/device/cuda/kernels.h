// The kernels as the CUDA run-time library takes them. nvcc compiles kernels.cu, which defines
// them; the host's compiler compiles runtime.cpp, which launches them.
#ifndef FRUGAL_DEVICE_CUDA_KERNELS_H_
#define FRUGAL_DEVICE_CUDA_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace frugal::device {

struct CudaKernel {
  const char* name;
  const void* function;  // for cudaLaunchKernel
  size_t argument_bytes;
};

struct CudaKernels {
  const CudaKernel* at;  // by the numbers of ops/kernels.h
  uint32_t count;
};

CudaKernels cuda_kernels();

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_CUDA_KERNELS_H_
