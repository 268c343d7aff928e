#include "base/handles.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {
namespace {

constexpr uint32_t kIndexBits = 20;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;

struct Slot {
  HandleKind kind = HandleKind::kFree;
  uint64_t generation = 1;
  std::shared_ptr<void> object;
};

struct Registry : HeapObject {
  Mutex mu;
  Vector<Slot> slots GUARDED_BY(mu);
  Vector<uint32_t> free GUARDED_BY(mu);
};

std::atomic<uint32_t> g_generation{1};

// Never destroyed: handles may be used, wrongly but safely, while the process exits.
Registry& registry() {
  static Registry* r = [] {
    auto made = std::make_unique<Registry>();
    // The child gets an unlocked registry and a generation of its own. Without that it would take
    // its parent's handles for its own.
    os_at_fork([]() NO_THREAD_SAFETY_ANALYSIS { registry().mu.lock(); },
               []() NO_THREAD_SAFETY_ANALYSIS { registry().mu.unlock(); },
               []() NO_THREAD_SAFETY_ANALYSIS {
                 registry().mu.unlock();
                 g_generation.fetch_add(1);
               });
    return made.release();
  }();
  return *r;
}

Slot* locate(Registry& r, HandleKind kind, uint64_t handle) REQUIRES(r.mu) {
  uint64_t index = handle & kIndexMask;
  if (index == 0 || index > r.slots.size()) return nullptr;
  Slot& s = r.slots[index - 1];
  return s.kind == kind && s.generation == handle >> kIndexBits ? &s : nullptr;
}

}  // namespace

uint64_t handle_add(HandleKind kind, std::shared_ptr<void> object) {
  Registry& r = registry();
  Lock lock(r.mu);
  uint32_t index;
  if (!r.free.empty()) {
    index = r.free.back();
    r.free.pop_back();
  } else {
    if (r.slots.size() == kIndexMask) {
      fail(FRUGAL_ERR_OUT_OF_MEMORY,
           "a million handles are open: close some, or end steps that keep many batches");
      return 0;
    }
    index = static_cast<uint32_t>(r.slots.size());
    // Removing a handle must not want memory: what it names would stay, out of reach.
    if (r.free.capacity() <= index) r.free.reserve(std::max<size_t>(64, size_t{index} * 2));
    r.slots.emplace_back();
  }
  Slot& s = r.slots[index];
  s.kind = kind;
  s.object = std::move(object);
  return s.generation << kIndexBits | (index + 1);
}

std::shared_ptr<void> handle_get(HandleKind kind, uint64_t handle) {
  Registry& r = registry();
  Lock lock(r.mu);
  Slot* s = locate(r, kind, handle);
  return s ? s->object : nullptr;
}

std::shared_ptr<void> handle_remove(HandleKind kind, uint64_t handle) {
  Registry& r = registry();
  Lock lock(r.mu);
  Slot* s = locate(r, kind, handle);
  if (!s) return nullptr;
  s->kind = HandleKind::kFree;
  ++s->generation;
  r.free.push_back(static_cast<uint32_t>(handle & kIndexMask) - 1);
  return std::move(s->object);
}

uint32_t process_generation() {
  registry();  // from its making on forks are counted
  return g_generation.load(std::memory_order_relaxed);
}

}  // namespace frugal
