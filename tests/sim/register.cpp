// Makes "sim:N" known to the library that this is linked with, before main() or as that is loaded.
#include "device/runtime.h"
#include "sim/memory.h"
#include "sim/sim.h"

namespace frugal::device::sim {
namespace {

constexpr DeviceKind kKind = {"sim", open_sim, any_on_devices, on_a_device};

[[gnu::constructor]] void make_known() { register_devices(&kKind); }

}  // namespace
}  // namespace frugal::device::sim
