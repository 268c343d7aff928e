#if defined(__AVX2__)
#define FRUGAL_ISA_NS avx2
#include "device/cpu/kernels_sum.inc"
#endif
