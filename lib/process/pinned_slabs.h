// Which parts of mappings, which this process only reads, its devices can see.
//
// Memory is pinned in the slabs in which the controller takes it. A slab exists as a whole before
// anything in it is used, and what does not exist is not touched.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/heap.h"
#include "base/os.h"
#include "base/sync.h"
#include "engine/gpu.h"

namespace frugal {

class PinnedSlabs;

// The devices of an attached process, and all that is pinned for them while there is one of them.
// Devices are added and removed under its lock.
class Pins {
 public:
  void add(std::shared_ptr<device::Runtime> runtime);
  // Removing the last device unpins what was pinned for all.
  void remove(const device::Runtime* runtime) noexcept;
  // The device has failed: nothing is to be pinned for it.
  void failed(const device::Runtime* runtime) noexcept { pinner_->remove(runtime); }
  // Called when no kernel reads any of it any more.
  void unpin() noexcept;
  const std::shared_ptr<DevicePinner>& pinner() const { return pinner_; }

 private:
  friend class PinnedSlabs;
  void unpin_all() noexcept REQUIRES(mu_);

  const std::shared_ptr<DevicePinner> pinner_ = std::make_shared<DevicePinner>();
  Mutex mu_;
  PinnedSlabs* first_ GUARDED_BY(mu_) = nullptr;  // all that there are
};

class PinnedSlabs {
 public:
  // `pins` null: nothing is ever pinned.
  explicit PinnedSlabs(std::shared_ptr<Pins> pins);
  ~PinnedSlabs();
  PinnedSlabs(const PinnedSlabs&) = delete;
  PinnedSlabs& operator=(const PinnedSlabs&) = delete;
  // Sets the mapping, which must live longer: of `count` rows of `row_bytes` each, or of buffers.
  void over_rows(const Mapping& mapping, uint64_t count, size_t row_bytes);
  void over_buffers(const Mapping& mapping);
  // From now on kernels may read these rows (in ascending order), these bytes, or all rows. The
  // memory must exist.
  Status pin(const uint32_t* slots, size_t n);
  Status pin_bytes(uint64_t from, uint64_t bytes);
  Status pin_all();
  // Called when no kernel reads them any more, before the memory is unmapped.
  void unpin() noexcept;

 private:
  friend class Pins;
  Status pin_slab(uint64_t slab) REQUIRES(mu_);

  const std::shared_ptr<Pins> pins_;
  PinnedSlabs *next_ = nullptr, **from_ = nullptr;  // in the list of `pins_`, under its lock
  Mutex mu_;
  char* base_ GUARDED_BY(mu_) = nullptr;
  size_t row_bytes_ GUARDED_BY(mu_) = 0, slab_ GUARDED_BY(mu_) = 0;
  Vector<uint8_t> pinned_ GUARDED_BY(mu_);  // of each slab
  std::atomic<bool> all_{false};
};

}  // namespace frugal
