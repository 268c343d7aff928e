// The kernel tables of each instruction set, between the files that hold them and the dispatcher.
//
// What: each function returns its table, or NULL if the file was compiled without the instruction
// set: for another architecture, or in a build that gives the file no flags.
// Callers: kernels.cpp only.
#ifndef FRUGAL_DEVICE_CPU_TABLES_H_
#define FRUGAL_DEVICE_CPU_TABLES_H_

#include "device/kernels.h"

namespace frugal::device {

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_CPU_TABLES_H_
