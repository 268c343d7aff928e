#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define FRUGAL_ISA_NS avx512
#include "device/cpu/kernels_sum.inc"
#endif
