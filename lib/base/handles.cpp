#include "base/handles.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>

#include "base/forked.h"
#include "base/heap.h"
#include "base/immortal.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {
namespace {

constexpr uint32_t kIndexBits = 20;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;

// Each slot has its own lock, held for a few instructions. So calls of different trainers do not
// contend for one lock.
class Slot {
 public:
  std::shared_ptr<void> get(HandleKind kind, uint64_t generation) {
    const Held held(*this);
    return kind_ == kind && generation_ == generation ? object_ : nullptr;
  }
  uint64_t put(HandleKind kind, std::shared_ptr<void> object) {
    const Held held(*this);
    kind_ = kind;
    object_ = std::move(object);
    return generation_;
  }
  std::shared_ptr<void> take(HandleKind kind, uint64_t generation) {
    const Held held(*this);
    if (kind_ != kind || generation_ != generation) return nullptr;
    kind_ = HandleKind::kFree;
    ++generation_;
    return std::move(object_);
  }
  // In a forked child, where no thread holds it.
  void reset_lock() { locked_.store(false, std::memory_order_relaxed); }

 private:
  class Held {
   public:
    explicit Held(Slot& slot) : slot_(slot) {
      while (slot.locked_.exchange(true, std::memory_order_acquire))
        while (slot.locked_.load(std::memory_order_relaxed)) yield_thread();
    }
    ~Held() { slot_.locked_.store(false, std::memory_order_release); }

   private:
    Slot& slot_;
  };

  std::atomic<bool> locked_{false};
  HandleKind kind_ = HandleKind::kFree;
  uint64_t generation_ = 1;
  std::shared_ptr<void> object_;
};

// Slots never move: they are in blocks, which are allocated one after the other.
constexpr size_t kBlock = 1024;
struct Registry {
  std::array<std::atomic<Slot*>, (kIndexMask + kBlock) / kBlock> blocks{};
  Mutex mu;
  size_t slots GUARDED_BY(mu) = 0;
  Vector<uint32_t> free GUARDED_BY(mu);

  Slot& slot(size_t index) {
    return blocks[index / kBlock].load(std::memory_order_acquire)[index % kBlock];
  }
  // The slot of a handle; null: no handle ever had this number.
  Slot* of(uint64_t handle) {
    const uint64_t number = handle & kIndexMask;
    if (number == 0 || !blocks[(number - 1) / kBlock].load(std::memory_order_acquire))
      return nullptr;
    return &slot(number - 1);
  }
};

std::atomic<uint32_t> g_generation{1};

// Handles may be used, wrongly but safely, while the process exits.
Immortal<Registry> g_registry;

// The child gets an unlocked registry and a generation of its own. Without that it would take its
// parent's handles for its own.
void renew() NO_THREAD_SAFETY_ANALYSIS {
  for (size_t i = 0; i < g_registry->slots; ++i) g_registry->slot(i).reset_lock();
  g_registry->mu.unlock();
  g_generation.fetch_add(1);
}

constinit AtFork g_handles_at_fork{[]() NO_THREAD_SAFETY_ANALYSIS { g_registry->mu.lock(); },
                                   []() NO_THREAD_SAFETY_ANALYSIS { g_registry->mu.unlock(); },
                                   renew};
[[gnu::constructor]] void register_handles() { g_handles_at_fork.at_load(); }

}  // namespace

uint64_t handle_add(HandleKind kind, std::shared_ptr<void> object) {
  g_handles_at_fork.ensure();
  Registry& r = *g_registry;
  Lock lock(r.mu);
  size_t index;
  if (!r.free.empty()) {
    index = r.free.back();
    r.free.pop_back();
  } else {
    if (r.slots == kIndexMask) {
      fail(FRUGAL_ERR_OUT_OF_MEMORY,
           "a million handles are open: close some, or end steps that keep many batches");
      return 0;
    }
    index = r.slots;
    // handle_remove() must not allocate: if it failed, the object would stay, out of reach.
    if (r.free.capacity() <= index) r.free.reserve(std::max<size_t>(64, index * 2));
    if (index % kBlock == 0) {
      auto* made = static_cast<Slot*>(heap_alloc(kBlock * sizeof(Slot)));
      std::uninitialized_default_construct_n(made, kBlock);
      r.blocks[index / kBlock].store(made, std::memory_order_release);
    }
    ++r.slots;
  }
  return r.slot(index).put(kind, std::move(object)) << kIndexBits | (index + 1);
}

std::shared_ptr<void> handle_get(HandleKind kind, uint64_t handle) {
  Slot* s = g_registry->of(handle);
  return s ? s->get(kind, handle >> kIndexBits) : nullptr;
}

std::shared_ptr<void> handle_remove(HandleKind kind, uint64_t handle) {
  Registry& r = *g_registry;
  Slot* s = r.of(handle);
  std::shared_ptr<void> object = s ? s->take(kind, handle >> kIndexBits) : nullptr;
  if (!object) return nullptr;
  Lock lock(r.mu);
  r.free.push_back(static_cast<uint32_t>(handle & kIndexMask) - 1);
  return object;
}

uint32_t process_generation() {
  g_handles_at_fork.ensure();
  return g_generation.load(std::memory_order_relaxed);
}

}  // namespace frugal
