#include "engine/pacing.h"

#include <utility>

#include "engine/data_path.h"

namespace frugal {

std::atomic<uint64_t> g_small_step{kParallelBytes};

Pacing::Pacing(const frugal_config& config, uint32_t cpus, std::atomic<uint64_t>* peak)
    : mode_(config.flush_mode),
      always_(config.staleness != 0),
      flush_threads_(config.flush_threads),
      world_size_(config.world_size),
      cpus_(cpus),
      deferred_(always_ || mode_ == FRUGAL_FLUSH_DEFERRED || mode_ == FRUGAL_FLUSH_TREE_HEAP),
      budget_(config.pending_bytes),
      peak_(peak) {}

bool Trial::gains(double cost, bool deferred) {
  if (!deferred) {
    tried_ = 0;
    cost_at_once_ = std::min(cost, std::exchange(last_cost_, cost));
    if (paused_ == 0) return true;
    --paused_;
    return false;
  }
  // The first steps that are queued make the queue's memory: that much is allowed them.
  if (cost < (++tried_ == 1 ? 2 : 1) * cost_at_once_) {
    if (tried_ == kMaxPause) pause_ = 0;
    return true;
  }
  pause_ = std::clamp(2 * pause_, kMinPause, kMaxPause);
  paused_ = pause_;
  return false;
}

// Deferring pays if there is idle time of processors to write in; else it is only more work.
bool Pacing::decide(bool may_rest, const Measured& now) {
  const Measured last = std::exchange(last_, now);
  const uint64_t span = now.wall - last.wall, work = now.apply - last.apply;
  // Rows are warmed where there is nothing else to do: that time is idle, too.
  const uint64_t warm = warm_ns_.load(std::memory_order_relaxed);
  uint64_t busy = now.cpu - last.cpu;
  busy -= std::min(busy, warm - std::exchange(warm_, warm));
  const uint64_t most = std::exchange(most_, 0), bytes = std::exchange(bytes_, 0);
  if (last.wall == 0 || flush_threads_ == 0) return false;
  // Only time that trainers spend outside the engine can be hidden behind.
  const uint64_t inside = (now.calls - last.calls) / world_size_;
  const uint64_t all = span * cpus_, outside = span > inside ? span - inside : 0;
  const uint64_t idle = std::min(all > busy ? all - busy : 0, outside * cpus_);
  // Hysteresis: to defer, the idle time must hold the work with room to spare.
  // And queueing a small step is more work than writing it.
  const bool was = deferred();
  const bool fits = !small(most) && (was ? idle > work / 2 : idle > work * 3 / 2 + span / 10);
  const double cost = double(inside) / double(std::max<uint64_t>(bytes, 1));
  const bool pays = (always_ || trial_.gains(cost, was)) && fits;
  // One pause of the program says nothing: it has to pay twice in a row.
  const bool deferred = was ? pays : pays && paid_;
  paid_ = pays;
  // Where trainers in other processes have all processors, flush threads only take turns with them,
  // and the system leaves a processor idle while who could use it stands behind a flush thread on
  // another one.
  const bool rest = (resting() || !pays) && !deferred && may_rest && world_size_ >= cpus_;
  deferred_.store(deferred || always_, std::memory_order_relaxed);
  return resting_.exchange(rest) && !rest;
}

}  // namespace frugal
