#include "device/pointers.h"

#include <dlfcn.h>
#include <link.h>
#include <stdint.h>

#include <atomic>
#include <mutex>

#include "base/os.h"
#include "device/runtime.h"

namespace frugal::device {
namespace {

// cuPointerGetAttribute of the driver, which is asked only if the program has loaded it: before
// that no pointer is one of its own. (Not by its header, which builds without CUDA do not have.)
using PointerGetAttribute = int (*)(void* data, int attribute, unsigned long long pointer);
constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_...
constexpr uint32_t kTypeDevice = 2;             // CU_MEMORYTYPE_DEVICE

std::atomic<PointerGetAttribute> g_attribute{nullptr};
std::atomic<uint64_t> g_loads{0};  // libraries that the process had ever loaded at the last look

// dl_iterate_phdr takes a lock of the loader's, which glibc does not give back in a child whose
// fork came in the middle: the child's next dlopen, or look, would wait for ever. So no fork comes
// in the middle.
std::mutex& asking() {
  static std::mutex& mutex = []() -> std::mutex& {
    static constinit std::mutex made;
    os_at_fork([] { asking().lock(); }, [] { asking().unlock(); }, [] { asking().unlock(); });
    return made;
  }();
  return mutex;
}

// To ask for one that is not there takes 50 us; to ask whether anything has come since, a tenth of
// one.
uint64_t loads() {
  uint64_t adds = 0;
  std::lock_guard<std::mutex> lock(asking());
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
