// Which parts of a mapping, which this process only reads, its devices can see.
//
// Memory is pinned in the slabs in which the controller takes it: a slab is there as a whole before anything in it
// is anybody's, and what is not there is not touched.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/heap.h"
#include "base/os.h"
#include "engine/gpu.h"

namespace frugal {

class PinnedSlabs {
 public:
  // A mapping, which lives longer: of `count` rows of `row_bytes` each, or of buffers.
  void over_rows(const Mapping& mapping, uint64_t count, size_t row_bytes);
  void over_buffers(const Mapping& mapping);
  // From now on kernels may read these rows, in ascending order; these bytes; or all, which are there.
  Status pin(DevicePinner& pinner, const uint32_t* slots, size_t n);
  Status pin_bytes(DevicePinner& pinner, uint64_t from, uint64_t bytes);
  Status pin_all(DevicePinner& pinner);
  // No kernel reads them any more. Before the memory is unmapped.
  void unpin(DevicePinner& pinner) noexcept;

 private:
  // With mu_ held.
  Status pin_slab(DevicePinner& pinner, uint64_t slab);

  std::mutex mu_;
  char* base_ = nullptr;
  size_t row_bytes_ = 0, slab_ = 0;
  Vector<uint8_t> pinned_;  // of each slab
  std::atomic<bool> all_{false};
};

}  // namespace frugal
