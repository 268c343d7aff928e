// The memory that the controller has published to this process (base/region_publisher.h), mapped
// here.
//
// A region stays mapped as long as something has it, gone or not: a call that reads, a part of a
// step, a kernel under way. If the controller gives memory back, no reader here finds zeros, or
// nothing, in its place.
#pragma once
#include <memory>

#include "base/heap.h"
#include "base/os.h"
#include "base/region_publisher.h"
#include "base/sync.h"
#include "engine/gpu.h"
#include "process/pinned_slabs.h"

namespace frugal {

class Region : public HeapObject {
 public:
  Region(uint64_t shm_address, const Mapping& memory, std::shared_ptr<Pins> pins)
      : shm_address_(shm_address), memory_(memory), pinned_(std::move(pins)) {
    pinned_.over_buffers(memory_);
  }
  ~Region() {
    pinned_.unpin();
    os_release(&memory_);
  }
  Region(const Region&) = delete;
  bool has(uint64_t shm_address, uint64_t bytes) const {
    const uint64_t at = shm_address - shm_address_;
    return shm_address >= shm_address_ && at < memory_.bytes && bytes <= memory_.bytes - at;
  }
  const char* at(uint64_t shm_address) const { return memory_.base + (shm_address - shm_address_); }
  uint64_t shm_address() const { return shm_address_; }
  // From now on kernels may read there, if they hold the region.
  Status pin(uint64_t shm_address, uint64_t bytes) {
    return pinned_.pin_bytes(shm_address - shm_address_, bytes);
  }

 private:
  const uint64_t shm_address_;
  Mapping memory_;
  PinnedSlabs pinned_;
};
using RegionRef = std::shared_ptr<Region>;

// Regions that a call or a step reads.
using RegionRefs = Vector<RegionRef>;

// Threads: any.
class Regions {
 public:
  explicit Regions(std::shared_ptr<Pins> pins = nullptr) : pins_(std::move(pins)) {}
  ~Regions() { close(); }
  // The other end of the socket is the publisher's. This object owns `socket` from now on.
  void open(int socket) { socket_ = socket; }
  int socket() const { return socket_; }
  // Receives what was published. After a failure the next call continues from there. CLOSED: as
  // find().
  Status look();
  // Where a shared address is mapped; its region is added to `reads`. INTERNAL: the address is
  // impossible. PEER_LOST: it may be valid, but this process receives nothing any more. CLOSED:
  // close() was called before.
  Status find(uint64_t shm_address, uint64_t bytes, RegionRefs* reads, const char** out);
  // From now on calls of other threads find nothing.
  void close() noexcept;

 private:
  Status take_in(RegionRefs* gone) REQUIRES(mu_);
  RegionRef of(uint64_t shm_address, uint64_t bytes) const REQUIRES(mu_);

  const std::shared_ptr<Pins> pins_;
  Mutex mu_;
  int socket_ = -1;
  RegionRefs there_ GUARDED_BY(mu_);
  uint64_t told_ GUARDED_BY(mu_) = 0;  // shared addresses below this are known, or gone
  bool ended_ GUARDED_BY(mu_) = false, closed_ GUARDED_BY(mu_) = false;
};

}  // namespace frugal
