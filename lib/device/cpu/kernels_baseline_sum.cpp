#define FRUGAL_ISA_NS baseline
#include "device/cpu/kernels_sum.inc"
