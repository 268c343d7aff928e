// Pins the tables' memory for GPUs of this process. A step of a trainer on a GPU begins when all
// slabs are pinned.
//
// While there is a device, the thread that takes a slab pins it (storage/slab.h). Flush threads and
// waiting calls pin older slabs, one after the other. Threads: any. unpin(), one() and again() take
// the engine's mutex.
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
  // From here on new slabs are pinned, and a thread that creates a table checks again for slabs to
  // pin before it adds the table. Throws.
  void join(Trainer& t, std::shared_ptr<device::Runtime> runtime);
  // Nothing is pinned for this trainer any more. Pinned memory stays so, for the next that joins.
  void leave(Trainer& t) noexcept;
  bool failed(const Trainer& t) const { return t.pins.load() == Trainer::kPinFailed; }
  // After a failure: unpins all tables, unless another trainer uses a device.
  void unpin();
  // Pins one slab for the trainers that wait. `changed`: for some of them all is pinned by now, or
  // cannot be.
  bool one(bool* changed);
  bool waits(const Trainer& t) const { return t.pins.load() == Trainer::kToPin; }
  bool done(const Trainer& t) const { return t.pins.load() == Trainer::kPinned; }
  // After a failure: pins in this thread, to return the reason, or to go on if it succeeds by now.
  Status again(Trainer& t);

 private:
  Status next(bool* any);

  const Tables& tables_;
  const Ranks& ranks_;
  DevicePinner& pinner_;
  std::atomic<uint32_t> waiting_{0};  // trainers for which memory is being pinned
  Mutex joins_mu_;                    // excludes joins during unpin()
};

}  // namespace frugal
