#include <cuda_runtime_api.h>

#include "cuda_parts.h"

namespace gpu_tools {
namespace {

// The plainest gather: a thread for each 16 bytes, all of them at once. The compiler and the
// hardware do the rest.
__global__ void gpu_bench_bare_gather(const float4* __restrict__ table,
                                      const uint32_t* __restrict__ index, float4* __restrict__ out,
                                      uint32_t count, uint32_t vectors) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t row = i / vectors, vector = i % vectors;
  out[i] = table[uint64_t{index[row]} * vectors + vector];
}

std::string Text(cudaError_t code) { return code == cudaSuccess ? "" : cudaGetErrorString(code); }

}  // namespace

std::string CudaUse(uint32_t index) { return Text(cudaSetDevice(static_cast<int>(index))); }

std::string CudaBareGather(const BareArgs& a, void* stream) {
  const uint32_t count = a.rows * a.vectors;
  constexpr uint32_t kThreads = 256;
  gpu_bench_bare_gather<<<(count + kThreads - 1) / kThreads, kThreads, 0,
                          static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const float4*>(a.table), reinterpret_cast<const uint32_t*>(a.index),
      reinterpret_cast<float4*>(a.out), count, a.vectors);
  return Text(cudaGetLastError());
}

std::string CudaManaged(size_t bytes, void** out) {
  return Text(cudaMallocManaged(out, bytes, cudaMemAttachGlobal));
}

void CudaFreeManaged(void* p) { cudaFree(p); }

}  // namespace gpu_tools
