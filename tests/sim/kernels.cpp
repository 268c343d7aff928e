// The launch table of the host implementation: every kernel of ops/kernels.h.
#include "device/ops/kernels.h"

#include "sim/sim.h"

namespace frugal::device::sim {
namespace {

constexpr KernelEntry kEntries[] = {
#define X(name, Arguments)   \
  {#name, sizeof(Arguments), \
   [](const void* arguments) { name##_body(*static_cast<const Arguments*>(arguments)); }},
    FRUGAL_KERNELS(X)
#undef X
};

}  // namespace

const KernelEntry* kernel_entry(uint32_t number) {
  return number < static_cast<uint32_t>(Kernel::kCount) ? &kEntries[number] : nullptr;
}

}  // namespace frugal::device::sim
