// The launch table of the host implementation: every kernel of ops/kernels.h.
#include "device/ops/kernels.h"

#include "device/sim/sim.h"

namespace frugal::device::sim {
namespace {

template <class Arguments, class Body>
constexpr KernelEntry entry(const char* name, Body) {
  if constexpr (requires(Body body, const Arguments& a) { body(a); }) {
    return {name, sizeof(Arguments),
            [](const void* a) { Body()(*static_cast<const Arguments*>(a)); }};
  } else {
    return {name, sizeof(Arguments), nullptr};
  }
}

constexpr KernelEntry kEntries[] = {
#define X(name, Arguments) \
  entry<Arguments>(#name, [](const auto& a) requires requires { name##_body(a); } { name##_body(a); }),
    FRUGAL_KERNELS(X)
#undef X
};

}  // namespace

const KernelEntry* kernel_entry(uint32_t number) {
  return number < static_cast<uint32_t>(Kernel::kCount) ? &kEntries[number] : nullptr;
}

}  // namespace frugal::device::sim
