// The CPU kernels compiled for the instructions that every machine of the architecture has.
#include "device/cpu/tables.h"

#define FRUGAL_ISA_NS baseline
#define FRUGAL_ISA_NAME "baseline"
#include "device/cpu/kernels_table.inc"

namespace frugal::device {

const Kernels* baseline_kernels() { return &baseline::kTable; }

}  // namespace frugal::device
