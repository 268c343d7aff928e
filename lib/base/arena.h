// Memory for buffers in one range of addresses: another process is told where they are by shared
// addresses.
//
// Pieces are cut from segments: shared memory of its own each, which goes back to the system when
// nobody has a piece of it. (No part of it can: it is sealed against all other writers, base/os.h.)
// Large pieces have segments of their own as long as there are not too many, and those for small
// ones, which live long, have no large ones. Each is a region that other processes are told of
// (base/region_publisher.h) before a piece of it is given out. An arena may also be a part of
// somebody else's mapping, whose memory stays. Thread-safe.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>

#include "base/heap.h"
#include "base/os.h"
#include "base/region_publisher.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

struct MemoryBudget;

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  // Shared memory of its own, of at most `bytes`.
  Status open(size_t bytes);
  // [first, first + bytes) of a mapping that lives longer; both are multiples of 2 MiB.
  void over(const Mapping& mapping, size_t first, size_t bytes);
  bool opened() const { return mapping_.base != nullptr; }
  // Committed memory, aligned to 2 MiB; `bytes` is rounded up to that.
  Status take(size_t bytes, char** out);
  void put_back(char* taken, size_t bytes) noexcept;
  const Mapping& mapping() const { return mapping_; }
  bool holds(const void* p) const {
    return p >= mapping_.base && p < mapping_.base + mapping_.bytes;
  }
  uint64_t offset(const void* p) const {
    return static_cast<uint64_t>(static_cast<const char*>(p) - mapping_.base);
  }
  // Memory that there is. Of a mapping of somebody else's it does not become less.
  size_t bytes_held() const { return held_.load(); }
  size_t bytes_idle() const {
    const size_t used = used_.load(), held = held_.load();
    return held - std::min(held, used);  // either may change meanwhile
  }
  bool gives_back() const { return own_; }
  // From now on what there is and nobody has counts, whatever the limit says: its memory is there.
  void count_in(MemoryBudget* budget);
  // What who reads in another process is told, and knows a byte of a piece by. Of an arena's own
  // memory.
  const std::shared_ptr<RegionPublisher>& region_publisher() const { return region_publisher_; }
  uint64_t shm_address(const void* p) const {
    return shm_addresses_[offset(p) / kHugePage] + offset(p) % kHugePage;
  }

 private:
  struct Range {
    size_t first, end;
    bool large;
  };
  struct Segment {
    size_t first, end, committed;  // up to there is memory
    int fd;
    bool large;
  };
  Status add_segment(size_t bytes) REQUIRES(mu_);
  Segment& segment_of(size_t at) REQUIRES(mu_);
  size_t room(size_t from, size_t bytes) const REQUIRES(mu_);
  void count() noexcept REQUIRES(mu_);

  Mutex mu_;
  Mapping mapping_;
  bool own_ = false;
  Vector<Segment> segments_ GUARDED_BY(mu_);  // ascending; of an own one none next to another
  Vector<Range> free_ GUARDED_BY(mu_);        // of segments, ascending, none next to another
  size_t taken_ GUARDED_BY(mu_) = 0;          // pieces: there can be as many ranges between them
  size_t next_ GUARDED_BY(mu_) = 0;           // a segment's shared address: none is used again soon
  size_t counted_ GUARDED_BY(mu_) = 0;
  std::atomic<size_t> held_{0}, used_{0};     // bytes; changed with mu_
  MemoryBudget* budget_ GUARDED_BY(mu_) = nullptr;
  // Of each 2 MiB. Not guarded: who has a piece has its own, which stay.
  Vector<uint64_t> shm_addresses_;
  std::shared_ptr<RegionPublisher> region_publisher_;
};

}  // namespace frugal
