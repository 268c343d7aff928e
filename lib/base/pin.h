// The seam through which host memory becomes visible to devices.
#pragma once
#include <cstddef>

#include "base/status.h"

namespace frugal {

class Pinner {
 public:
  virtual ~Pinner() = default;
  // Pins whole pages, which are committed; *pinned tells whether: while there is no device it is
  // not done. Fails with OUT_OF_MEMORY where the limit is reached.
  virtual Status pin(void* p, size_t bytes, bool* pinned) = 0;
  // Before the memory is unmapped.
  virtual void unpin(void* p) noexcept = 0;
};

}  // namespace frugal
