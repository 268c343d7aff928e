// The interface that makes host memory visible to devices.
#pragma once
#include <cstddef>

#include "base/status.h"

namespace frugal {

class Pinner {
 public:
  virtual ~Pinner() = default;
  // Pins whole pages, which are committed. *pinned: whether it did; while there is no device it
  // does not. Fails with OUT_OF_MEMORY at the limit of pinned memory.
  virtual Status pin(void* p, size_t bytes, bool* pinned) = 0;
  // Called before the memory is unmapped.
  virtual void unpin(void* p) noexcept = 0;
};

}  // namespace frugal
