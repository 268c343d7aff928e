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

bool Trial::gains(double cost, bool deferred, bool unsteady) {
  if (!deferred) {
    tried_ = 0;
    AtOnce& now = at_once_[unsteady];
    now.least = std::min(cost, std::exchange(now.last, cost));
    if (paused_ == 0) return true;
    --paused_;
    return false;
  }
  // The first queued steps also make the queue's memory, so the first decision allows twice the
  // cost. So does one that cannot be compared with those before.
  const double known = at_once_[unsteady].least;
  const double least = known > 0 ? known : at_once_[!unsteady].least;
  if (cost < (++tried_ == 1 || unsteady ? 2 : 1) * least) {
    if (tried_ == kMaxPause) pause_ = 0;
    return true;
  }
  pause_ = std::clamp(2 * pause_, kMinPause, kMaxPause);
  paused_ = pause_;
  return false;
}

// Deferring pays if processors have idle time to write in; else it is only more work.
bool Pacing::decide(bool may_rest, const Measured& now) {
  const Measured last = std::exchange(last_, now);
  const uint64_t span = now.wall - last.wall, work = now.apply - last.apply;
  // Time of threads that would leave their processor to others is idle, too.
  const uint64_t spare = spare_ns_.load(std::memory_order_relaxed);
  uint64_t busy = now.cpu - last.cpu;
  busy -= std::min(busy, spare - std::exchange(spare_, spare));
  const uint64_t most = std::exchange(most_, 0), bytes = std::exchange(bytes_, 0);
  if (last.wall == 0 || flush_threads_ == 0) return false;
  // Only while trainers are outside the engine does writing not delay them.
  const uint64_t inside = (now.calls - last.calls) / world_size_;
  const uint64_t all = span * cpus_, outside = span > inside ? span - inside : 0;
  const uint64_t idle = std::min(all > busy ? all - busy : 0, outside * cpus_);
  const bool was = deferred(), first = std::exchange(first_steps_, false);
  const bool saving = saving_.load();  // before saved_, which is set first
  const bool unsteady = saved_.exchange(false) || first || saving;
  // Hysteresis: to begin deferring, the idle time must exceed the work by a margin. Queueing a
  // small step is more work than writing it. While a snapshot is saved, the work of a step varies,
  // so a quarter of it is enough.
  const uint64_t share = unsteady ? 4 : 2;
  const bool fits = !small(most) && (was ? idle > work / share : idle > work * 3 / 2 + span / 10);
  const double cost = double(inside) / double(std::max<uint64_t>(bytes, 1));
  const bool gains = always_ || (was && first) || trial_.gains(cost, was, unsteady);
  const bool pays = gains && fits;
  // One pause of the program proves nothing: deferring has to pay twice in a row.
  const bool deferred = was ? pays : pays && paid_;
  paid_ = pays;
  // Where trainers in other processes use all processors, flush threads only compete with them. The
  // system also leaves a processor idle while a trainer waits for a flush thread on another one.
  const bool rest = (resting() || !pays) && !deferred && may_rest && world_size_ >= cpus_;
  deferred_.store(deferred || always_, std::memory_order_relaxed);
  return resting_.exchange(rest) && !rest;
}

}  // namespace frugal
