// The kernels for x86-64 machines with AVX-512.
#if defined(__x86_64__)
#define KGE_LANES 16
#define KGE_ROWS 8
#define KGE_NAME kAvx512Kernels
#define KGE_TEXT "AVX-512"
#include "kernels_body.h"
#endif
