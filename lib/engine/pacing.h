// How an engine works: whether updates are deferred, and whether flush threads rest. In mode AUTO
// that is decided by measurement (docs/architecture.md, section 10).
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "frugal.h"

namespace frugal {

// In mode AUTO a step whose rows have fewer bytes is written by the call that commits it. Tests
// change it.
extern std::atomic<uint64_t> g_small_step;

class Pacing {
 public:
  // Since the engine was opened, in ns.
  struct Measured {
    uint64_t wall = 0;
    uint64_t cpu = 0;    // of this process
    uint64_t apply = 0;  // spent on writing rows
    uint64_t calls = 0;  // spent by all ranks in calls
  };
  // A finite staleness, or an endless one, always defers.
  Pacing(const frugal_config& config, uint32_t cpus);

  bool deferred() const { return deferred_.load(std::memory_order_relaxed); }
  bool resting() const { return resting_.load(); }
  uint32_t cpus() const { return cpus_; }
  bool small(uint64_t bytes) const {
    return mode_ == FRUGAL_FLUSH_AUTO && bytes < g_small_step.load(std::memory_order_relaxed);
  }
  // So long somebody has brought rows into the caches, having nothing else to do.
  void warmed(uint64_t ns) { warm_ns_.fetch_add(ns, std::memory_order_relaxed); }
  // So long trainers in other processes have had processors.
  void trained_elsewhere(uint64_t cpu_ns) {
    elsewhere_ns_.fetch_add(cpu_ns, std::memory_order_relaxed);
  }
  // A step begins to be committed: what its rows have of bytes. One at a time.
  void step(uint64_t bytes) {
    most_ = std::max(most_, bytes);
    bytes_ += bytes;
  }
  // It has been. `may_rest`: trainers in other processes could do what flush threads do. Whether
  // these rest no more. One at a time.
  template <class Measure>
  bool committed(bool may_rest, Measure measure) {
    if (mode_ != FRUGAL_FLUSH_AUTO || ++steps_ % kSteps != 0) return false;
    Measured now = measure();
    now.cpu += elsewhere_ns_.load(std::memory_order_relaxed);
    return decide(may_rest, now);
  }

 private:
  static constexpr uint64_t kSteps = 16;
  static constexpr uint32_t kMinPause = 8, kMaxPause = 64;  // decisions
  bool decide(bool may_rest, const Measured& now);
  bool gains(double cost);

  const int32_t mode_;
  const bool always_;  // defers
  const uint32_t flush_threads_, world_size_, cpus_;
  std::atomic<bool> deferred_, resting_{false};
  std::atomic<uint64_t> warm_ns_{0}, elsewhere_ns_{0};
  uint64_t steps_ = 1, most_ = 0, bytes_ = 0, warm_ = 0;
  Measured last_;
  bool paid_ = false;
  // What a byte of a step's rows costs trainers in calls while nothing is deferred: of late, and
  // the least of the last two.
  double last_cost_ = 0, cost_at_once_ = 0;
  uint32_t tried_ = 0;               // decisions since deferring began
  uint32_t pause_ = 0, paused_ = 0;  // after the last failure, and what is left of it
};

}  // namespace frugal
