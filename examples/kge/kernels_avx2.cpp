// The kernels for x86-64 machines with AVX2 and FMA.
#if defined(__x86_64__)
#define KGE_LANES 8
#define KGE_ROWS 4
#define KGE_NAME kAvx2Kernels
#define KGE_TEXT "AVX2"
#include "kernels_body.h"
#endif
