// Which rows of a table, mapped read-only, devices of this process can see.
//
// Rows are pinned in the slabs in which the controller takes memory for them: a slab is there as a whole before a
// row in it is anybody's, and what is not there is not touched.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/heap.h"
#include "base/os.h"
#include "engine/gpu.h"

namespace frugal {

class PinnedRows {
 public:
  // `count` rows of `row_bytes` each at `mapping`, which lives longer.
  void over(const Mapping& mapping, uint64_t count, size_t row_bytes);
  // From now on kernels may read these rows, in ascending order; or all, which are there.
  Status pin(DevicePinner& pinner, const uint32_t* slots, size_t n);
  Status pin_all(DevicePinner& pinner);
  // No kernel reads them any more. Before the memory is unmapped.
  void unpin(DevicePinner& pinner) noexcept;

 private:
  Status pin_slab(DevicePinner& pinner, uint64_t slab);  // with mu_ held

  std::mutex mu_;
  char* base_ = nullptr;
  size_t row_bytes_ = 0, slab_ = 0;
  Vector<uint8_t> pinned_;  // of each slab
  std::atomic<bool> all_{false};
};

}  // namespace frugal
