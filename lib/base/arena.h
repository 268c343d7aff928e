// Memory for buffers in one range of addresses. Other processes find a byte by its shared address.
//
// Pieces are cut from segments. Each segment is shared memory of its own, which goes back to the
// system when no piece of it is in use. (A range of it cannot: it is sealed against all other
// writers, base/os.h.) Large pieces have segments of their own as long as there are not too many.
// Segments for small pieces, which live long, have no large ones. Each segment is a region, which
// other processes receive (base/region_publisher.h) before a piece of it is handed out. An arena
// may also be a range of another owner's mapping, whose memory stays. Thread-safe.
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
  // Reserves a range of its own, for at most `bytes` of shared memory.
  Status open(size_t bytes);
  // Uses [first, first + bytes) of a mapping that lives longer; both are multiples of kHugePage.
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
  // Committed memory. It never shrinks after over().
  size_t bytes_held() const { return held_.load(); }
  size_t bytes_idle() const {
    const size_t used = used_.load(), held = held_.load();
    return held - std::min(held, used);  // either may change meanwhile
  }
  bool gives_back() const { return own_; }
  // From now on committed memory that is not in use counts, even beyond the budget's limit: it
  // exists.
  void count_in(MemoryBudget* budget);
  // Publishes the segments to other processes, which name a byte of a piece by its shared address.
  // Only after open().
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
  Vector<Segment> segments_ GUARDED_BY(mu_);  // ascending; after open() no two are adjacent
  Vector<Range> free_ GUARDED_BY(mu_);        // ranges of segments, ascending, no two adjacent
  size_t taken_ GUARDED_BY(mu_) = 0;  // pieces: there can be as many free ranges between them
  size_t next_ GUARDED_BY(mu_) = 0;   // where a segment is tried first: addresses are reused late
  size_t counted_ GUARDED_BY(mu_) = 0;
  std::atomic<size_t> held_{0}, used_{0};  // bytes; changed with mu_
  MemoryBudget* budget_ GUARDED_BY(mu_) = nullptr;
  // Shared address of each 2 MiB. Not guarded: entries of a piece in use do not change.
  Vector<uint64_t> shm_addresses_;
  std::shared_ptr<RegionPublisher> region_publisher_;
};

}  // namespace frugal
