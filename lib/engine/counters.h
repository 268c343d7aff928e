// What an engine counts.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/os.h"
#include "base/trace.h"
#include "engine/stats.h"

namespace frugal {

struct Counters {
#define X(name, kind, help) std::atomic<uint64_t> name{0};
#define SKIP(name, kind, help)
  FRUGAL_STATS(X, SKIP)
#undef X
#undef SKIP
};

// What tells how an engine is doing.
struct Meters {
  Counters counters;
  Trace trace;
};

// Wall time of a scope, added to a counter.
class Timed {
 public:
  explicit Timed(std::atomic<uint64_t>& counter, bool counts = true)
      : counter_(counter), start_(counts ? now_ns() : 0) {}
  ~Timed() {
    if (start_) counter_.fetch_add(now_ns() - start_, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t>& counter_;
  uint64_t start_;
};

}  // namespace frugal
