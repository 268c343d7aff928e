// The counters of an engine.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/heap.h"
#include "base/stopwatch.h"
#include "base/trace.h"
#include "engine/stats.h"

namespace frugal {

struct Counters {
#define X(name, kind, help) std::atomic<uint64_t> name{0};
#define SKIP(name, kind, help)
  FRUGAL_STATS(X, SKIP, SKIP)
#undef X
};

// Counters of one rank's lookups and pushes. With small batches, ranks would contend for the
// engine's counters.
struct RankCounters {
#define X(name, kind, help) std::atomic<uint64_t> name{0};
  FRUGAL_STATS(SKIP, X, SKIP)
#undef X
#undef SKIP
  char apart[8];  // 64 bytes, so that at most two ranks share a cache line
};

// Adds to a counter that no other thread adds to at the same time.
inline void add_own(std::atomic<uint64_t>& counter, uint64_t n) {
  if (n) counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

class CountersOfRanks {
 public:
  explicit CountersOfRanks(size_t ranks) : all_(ranks) {}
  // Threads: the holder of the call_mu of the rank's trainer adds, others read.
  RankCounters& operator[](uint32_t rank) { return all_[rank]; }
  uint64_t sum(std::atomic<uint64_t> RankCounters::*of) const {
    uint64_t sum = 0;
    for (const RankCounters& rank : all_) sum += (rank.*of).load(std::memory_order_relaxed);
    return sum;
  }

 private:
  Vector<RankCounters> all_;
};

// The measurements of an engine.
struct Meters {
  explicit Meters(size_t ranks) : of_ranks(ranks) {}
  Counters counters;
  CountersOfRanks of_ranks;
  Trace trace;
};

class Stopwatch {
 public:
  explicit Stopwatch(bool runs = true) : start_(runs ? stopwatch_ns() : 0) {}
  void start() {
    if (!start_) start_ = stopwatch_ns();
  }
  bool runs() const { return start_ != 0; }
  uint64_t passed() const {
    if (!start_) return 0;
    const uint64_t now = stopwatch_ns();  // another processor's clock may be a little slow
    return now > start_ ? now - start_ : 0;
  }

 private:
  uint64_t start_;
};

// Wall time of a scope, added to a counter.
class Timed {
 public:
  explicit Timed(std::atomic<uint64_t>& counter, bool counts = true)
      : counter_(counter), watch_(counts) {}
  ~Timed() {
    if (const uint64_t ns = watch_.passed()) counter_.fetch_add(ns, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t>& counter_;
  const Stopwatch watch_;
};

// The same for a counter that no other thread adds to in the scope.
class TimedOwn {
 public:
  explicit TimedOwn(std::atomic<uint64_t>& counter) : counter_(counter) {}
  ~TimedOwn() { add_own(counter_, watch_.passed()); }

 private:
  std::atomic<uint64_t>& counter_;
  const Stopwatch watch_;
};

// Of a trainer: was its last lookup large, and how many small ones since then were not timed?
struct LookupTimes {
  static constexpr uint32_t kUntimed = 16;
  bool large = true;
  uint32_t untimed = 0;
};

// The same for a lookup. Two readings of the clock are long compared with a small lookup. So one in
// kUntimed + 1 is timed, and counts for the untimed ones before it. A lookup after a large one is
// timed for itself.
class TimedLookup {
 public:
  TimedLookup(LookupTimes& of, std::atomic<uint64_t>& counter)
      : of_(of), counter_(counter), watch_(of.large || of.untimed >= LookupTimes::kUntimed) {}
  ~TimedLookup() {
    of_.large = !small_;
    if (!watch_.runs()) {
      ++of_.untimed;
      return;
    }
    uint64_t calls = 1;
    if (small_ && of_.untimed >= LookupTimes::kUntimed) calls += std::exchange(of_.untimed, 0);
    add_own(counter_, calls * watch_.passed());
  }
  // Called once the size is known.
  void is(bool small) {
    small_ = small;
    if (!small) watch_.start();
  }

 private:
  LookupTimes& of_;
  std::atomic<uint64_t>& counter_;
  Stopwatch watch_;
  bool small_ = false;
};

}  // namespace frugal
