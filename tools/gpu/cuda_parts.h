// What the benchmark needs of CUDA beside the run-time seam. Without CUDA: cuda_parts_none.cpp.
#ifndef FRUGAL_TOOLS_GPU_CUDA_PARTS_H_
#define FRUGAL_TOOLS_GPU_CUDA_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpu_tools {

// The opponent of lookups in device memory: out row i = table row index[i], rows of `vectors` times 16
// bytes, one behind the other.
struct BareArgs {
  uint64_t table, index, out;  // addresses
  uint32_t rows, vectors;
};

// Each answers with the CUDA error's text, or with nothing. Device `index` becomes the calling
// thread's current one.
std::string CudaUse(uint32_t index);
std::string CudaBareGather(const BareArgs& args, void* stream);
std::string CudaManaged(size_t bytes, void** out);
void CudaFreeManaged(void* p);

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_CUDA_PARTS_H_
