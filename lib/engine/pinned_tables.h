// The tables' memory as GPUs of this process see it: a step of a trainer on one begins when all
// slabs are pinned.
//
// Slabs that come while a device is there are pinned by who takes them (storage/slab.h); those that
// were there before, one after the other, by flush threads or by who waits. Threads: any. unpin(),
// one() and again() take the engine's mutex.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "engine/device_memory.h"
#include "engine/ranks.h"
#include "engine/tables.h"

namespace frugal {

class PinnedTables {
 public:
  PinnedTables(const Tables& tables, const Ranks& ranks, DevicePinner& pinner)
      : tables_(tables), ranks_(ranks), pinner_(pinner) {}
  // From here on new slabs are pinned, and tables that are being created look again when they are
  // there. Throws.
  void join(Trainer& t, std::shared_ptr<device::Runtime> runtime);
  // Nothing is pinned for this trainer any more. What is pinned stays so, for the next that joins.
  void leave(Trainer& t) noexcept;
  bool failed(const Trainer& t) const { return t.pins.load() == Trainer::kPinFailed; }
  // What was pinned in vain goes back, where nobody else uses it.
  void unpin();
  // Work: a slab for those who wait. `changed`: it is known of some that all is pinned, or that it
  // cannot be.
  bool one(bool* changed);
  bool waits(const Trainer& t) const { return t.pins.load() == Trainer::kToPin; }
  bool done(const Trainer& t) const { return t.pins.load() == Trainer::kPinned; }
  // Where it could not be: here again, to tell why, or to go on if it can by now.
  Status again(Trainer& t);

 private:
  Status next(bool* any);

  const Tables& tables_;
  const Ranks& ranks_;
  DevicePinner& pinner_;
  std::atomic<uint32_t> waiting_{0};  // trainers for which memory is being pinned
  Mutex joins_mu_;               // joins against taking all pins back
};

}  // namespace frugal
