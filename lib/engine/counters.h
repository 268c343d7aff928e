// What an engine counts.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/stopwatch.h"
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
      : counter_(counter), start_(counts ? stopwatch_ns() : 0) {}
  ~Timed() {
    if (!start_) return;
    const uint64_t now = stopwatch_ns();  // of another processor it may be a little behind
    if (now > start_) counter_.fetch_add(now - start_, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t>& counter_;
  uint64_t start_;
};

}  // namespace frugal
