#include "device/pointers.h"

#include <dlfcn.h>
#include <link.h>
#include <stdint.h>

#include <atomic>
#include <mutex>

#include "base/forked.h"
#include "device/runtime.h"

namespace frugal::device {
namespace {

// cuPointerGetAttribute of the driver, which is called only if the program has loaded the driver:
// before that no pointer is one of the driver's. (Not by its header, which builds without CUDA
// lack.)
using PointerGetAttribute = int (*)(void* data, int attribute, unsigned long long pointer);
constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_...
constexpr uint32_t kTypeDevice = 2;             // CU_MEMORYTYPE_DEVICE

std::atomic<PointerGetAttribute> g_attribute{nullptr};
std::atomic<uint64_t> g_loads{0};  // libraries that the process had ever loaded at the last check

// dl_iterate_phdr takes a lock of the loader, which glibc does not release in a child that was
// forked meanwhile. The child's next dlopen or check would wait for ever. So no fork happens
// meanwhile.
constinit std::mutex g_asking;
constinit AtFork g_asking_at_fork{[] { g_asking.lock(); }, [] { g_asking.unlock(); },
                                  [] { g_asking.unlock(); }};
[[gnu::constructor]] void register_asking() { g_asking_at_fork.at_load(); }

// Asking for a library that is not loaded takes 50 us; asking whether any was loaded since takes a
// tenth of a microsecond.
uint64_t loads() {
  uint64_t adds = 0;
  g_asking_at_fork.ensure();
  std::lock_guard<std::mutex> lock(g_asking);
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uint64_t*>(out) = info->dlpi_adds;
        return 1;
      },
      &adds);
  return adds;
}

}  // namespace

void look_for_devices() {
  if (g_attribute.load(std::memory_order_relaxed)) return;
  const uint64_t now = loads();
  if (g_loads.load(std::memory_order_relaxed) == now) return;
  g_loads.store(now, std::memory_order_relaxed);
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return;  // never closed: it stays in the process
  g_attribute.store(reinterpret_cast<PointerGetAttribute>(dlsym(driver, "cuPointerGetAttribute")));
}

bool any_only_on_device() {
  const DeviceKind* const other = registered_devices();
  return (other && other->any_memory()) || g_attribute.load(std::memory_order_relaxed);
}

bool only_on_device(const void* p) {
  if (!p) return false;
  const DeviceKind* const other = registered_devices();
  if (other && other->is_memory(reinterpret_cast<uint64_t>(p))) return true;
  const PointerGetAttribute attribute = g_attribute.load(std::memory_order_relaxed);
  if (!attribute) return false;
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(p));
  uint32_t type = 0, managed = 0;
  if (attribute(&type, kMemoryType, address) != 0 || type != kTypeDevice) return false;
  return attribute(&managed, kIsManaged, address) != 0 || managed == 0;
}

}  // namespace frugal::device
