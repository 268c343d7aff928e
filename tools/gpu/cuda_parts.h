// CUDA functions that the benchmark needs and lib/device/runtime.h does not have. Builds without
// CUDA have cuda_parts_none.cpp instead.
#ifndef FRUGAL_TOOLS_GPU_CUDA_PARTS_H_
#define FRUGAL_TOOLS_GPU_CUDA_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpu_tools {

// A bare gather, to compare with lookups in device memory: out row i = table row index[i]. Rows are
// contiguous and have `vectors` times 16 bytes.
struct BareArgs {
  uint64_t table, index, out;  // addresses
  uint32_t rows, vectors;
};

// Each returns the CUDA error's text, or "". CudaUse makes device `index` the calling thread's
// current one.
std::string CudaUse(uint32_t index);
std::string CudaBareGather(const BareArgs& args, void* stream);
std::string CudaManaged(size_t bytes, void** out);
void CudaFreeManaged(void* p);

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_CUDA_PARTS_H_
