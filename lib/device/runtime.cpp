#include "device/runtime.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <utility>

#include "base/forked.h"
#include "base/heap.h"
#include "base/immortal.h"
#include "base/sync.h"
#if FRUGAL_WITH_CUDA
#include "device/cuda/cuda.h"
#endif

namespace frugal::device {
namespace {

constexpr char kCuda[] = "cuda";

constinit std::atomic<const DeviceKind*> g_registered{nullptr};

struct OpenRuntimes {
  Mutex mutex;  // held while a device is opened, so that it is opened once
  Vector<std::pair<String, std::weak_ptr<Runtime>>> all GUARDED_BY(mutex);
};

Immortal<OpenRuntimes> g_open;

// A child has none of its parent's devices. Another thread of the parent may have been opening one:
// what it held is left as it is.
constinit AtFork g_runtimes_at_fork{nullptr, nullptr, [] { std::construct_at(&g_open.object); }};
[[gnu::constructor]] void register_runtimes() { g_runtimes_at_fork.at_load(); }

bool has_kind(const char* name, const char* kind) {
  const size_t length = strlen(kind);
  return strncmp(name, kind, length) == 0 && name[length] == ':';
}

// Reads "cuda:17": true if `name` is `kind`, a colon and a number below 2^16 without leading zeros,
// so that a device has one name.
bool parse(const char* name, const char* kind, uint32_t* index) {
  if (!has_kind(name, kind)) return false;
  const char* digit = name + strlen(kind) + 1;
  if (*digit == '\0' || (*digit == '0' && digit[1] != '\0')) return false;
  uint32_t value = 0;
  for (; *digit != '\0'; ++digit) {
    if (*digit < '0' || *digit > '9') return false;
    value = value * 10 + static_cast<uint32_t>(*digit - '0');
    if (value > 0xffff) return false;
  }
  *index = value;
  return true;
}

Result no_device(const char* text) { return {ErrorKind::kNoDevice, 0, "open", text}; }

Result open_new(const char* name, std::shared_ptr<Runtime>* out) {
  uint32_t index = 0;
  if (parse(name, kCuda, &index)) {
#if FRUGAL_WITH_CUDA
    return open_cuda(index, out);
#else
    return no_device("this build has no CUDA");
#endif
  }
  const DeviceKind* const other = registered_devices();
  if (other && parse(name, other->name, &index)) return other->open(index, out);
  return no_device("the name of a device is cuda:N");
}

}  // namespace

void register_devices(const DeviceKind* kind) { g_registered.store(kind); }
const DeviceKind* registered_devices() { return g_registered.load(std::memory_order_acquire); }

bool names_device(const char* name) {
  const DeviceKind* const other = registered_devices();
  return has_kind(name, kCuda) || (other && has_kind(name, other->name));
}

Result open_runtime(const char* name, std::shared_ptr<Runtime>* out) {
  out->reset();
  try {
    g_runtimes_at_fork.ensure();
    OpenRuntimes& open = *g_open;
    const Lock lock(open.mutex);
    auto at = std::find_if(open.all.begin(), open.all.end(),
                           [&](const auto& each) { return each.first == name; });
    if (at != open.all.end()) {
      *out = at->second.lock();
      if (*out) return {};
    }
    std::shared_ptr<Runtime> made;
    const Result result = open_new(name, &made);
    if (!result.ok()) return result;
    if (at == open.all.end()) at = open.all.insert(at, {String(name), {}});
    at->second = made;
    *out = std::move(made);
    return {};
  } catch (const std::bad_alloc&) {
    return {ErrorKind::kOutOfMemory, 0, "open", "no host memory"};
  }
}

}  // namespace frugal::device
