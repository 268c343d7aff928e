// Memory of rows: an array of fixed-size records in reserved address space. A slab is committed
// before a record in it is used. Only this file handles huge pages, shared memory and pinning; all
// other code sees base + index * stride.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "base/os.h"
#include "base/pin.h"

namespace frugal {

class SlabArray {
 public:
  SlabArray() = default;
  ~SlabArray();
  SlabArray(const SlabArray&) = delete;
  // Reserves room for `count` records of `stride` bytes. stride 0: an empty array. With a pinner
  // slabs are pinned when they are committed, if there is a device.
  Status reserve(uint64_t count, size_t stride, bool shared, MemoryBudget* budget,
                 std::shared_ptr<Pinner> pinner = nullptr);
  // Commits the slabs under records [first, first + n). Idempotent; callers serialize calls that
  // may share a slab.
  Status ensure(uint64_t first, uint64_t n);
  bool committed(uint64_t record) const {
    return done_ && (done_[record * stride_ / slab_] & kCommitted);
  }
  void swap(SlabArray& other) noexcept;
  // pin_next pins one more slab that was committed while there was no device (*any: there was one).
  // unpin removes all pins. Callers serialize both with ensure().
  Status pin_next(bool* any);
  void unpin();
  char* base() const { return mapping_.base; }
  int fd() const { return mapping_.fd; }
  size_t stride() const { return stride_; }
  uint64_t committed_bytes() const { return committed_.load(std::memory_order_relaxed); }
  // Bytes of a slab, the unit of commitment.
  static constexpr size_t kSlab = size_t{8} << 20;
  static size_t slab_bytes(uint64_t count, size_t stride);

 private:
  Mapping mapping_;
  size_t stride_ = 0;
  size_t slab_ = kSlab;
  uint64_t slabs_ = 0;
  static constexpr uint8_t kCommitted = 1, kPinned = 2, kTaken = 4;  // kTaken: its memory is there
  uint8_t* done_ = nullptr;                                          // of each slab
  std::shared_ptr<Pinner> pinner_;
  MemoryBudget* budget_ = nullptr;
  std::atomic<uint64_t> committed_{0};
};

}  // namespace frugal
