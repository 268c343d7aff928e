// The kernels for any machine, and the choice among all of them.
#define KGE_LANES 4
#define KGE_ROWS 4
#define KGE_NAME kBaseKernels
#define KGE_TEXT "128-bit vectors"
#include "kernels_body.h"

namespace kge {

#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

const Kernels& Best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return kAvx512Kernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2Kernels;
#endif
  return kBaseKernels;
}

}  // namespace kge
