#include "cuda_parts.h"

namespace gpu_tools {

std::string CudaUse(uint32_t) { return "this build has no CUDA"; }
std::string CudaBareGather(const BareArgs&, void*) { return "this build has no CUDA"; }
std::string CudaManaged(size_t, void**) { return "this build has no CUDA"; }
void CudaFreeManaged(void*) {}

}  // namespace gpu_tools
