// How an engine paces its work: whether updates are deferred, how many bytes may be pending, and
// whether flush threads rest. In mode AUTO measurement decides that (docs/architecture.md,
// "Walk of a gradient").
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "frugal.h"
#include "window/step_update.h"

namespace frugal {

// In mode AUTO the committing call writes a step whose rows have fewer bytes. Tests change it.
extern std::atomic<uint64_t> g_small_step;

// Whether deferring gains. Idle time does not show what deferring costs calls: a lookup waits for a
// queued row, and queueing is work. So the engine tries it, and continues while a byte costs
// trainers less time in calls than before. After each failure it waits longer for the next try.
class Trial {
 public:
  // Makes a decision. `cost`: the time in calls for each byte since the last one. `unsteady`:
  // something else also changed how long calls took.
  bool gains(double cost, bool deferred, bool unsteady);

 private:
  static constexpr uint32_t kMinPause = 8, kMaxPause = 64;  // decisions
  // While nothing is deferred: the cost at the last decision, and the least of the last two.
  struct AtOnce {
    double last = 0, least = 0;
  };
  AtOnce at_once_[2];                // of steady decisions, and of others
  uint32_t tried_ = 0;               // decisions since deferring began
  uint32_t pause_ = 0, paused_ = 0;  // after the last failure, and what is left of it
};

class Pacing {
 public:
  // Since the engine was opened, in ns.
  struct Measured {
    uint64_t wall = 0;
    uint64_t cpu = 0;    // of this process
    uint64_t apply = 0;  // spent on writing rows
    uint64_t calls = 0;  // spent by all ranks in calls
  };
  // A staleness other than 0 always defers. `peak`: the most bytes that have been pending.
  Pacing(const frugal_config& config, uint32_t cpus, std::atomic<uint64_t>* peak);

  bool deferred() const { return deferred_.load(std::memory_order_relaxed); }
  bool resting() const { return resting_.load(); }
  // While updates are deferred, work that no gate needs soon waits if enough calls gather or sum.
  // They need this machine's processors and memory bandwidth.
  bool calls_first(uint32_t calls) const {
    return deferred() && pending() <= limit() && calls * 2 >= cpus_;
  }
  bool small(uint64_t bytes) const {
    return mode_ == FRUGAL_FLUSH_AUTO && bytes < g_small_step.load(std::memory_order_relaxed);
  }
  // A thread has used a processor for `ns`, and would have left it to a thread that writes rows.
  void spared(uint64_t ns) { spare_ns_.fetch_add(ns, std::memory_order_relaxed); }
  // A snapshot is being saved, or no longer. What a step costs then varies. The first steps copy
  // the most rows before they write them, so their cost does not count.
  void saving(bool on) {
    (on ? begun_ : saved_).store(true);
    saving_.store(on);
  }
  // Trainers in other processes have used processors for `cpu_ns`.
  void trained_attached(uint64_t cpu_ns) {
    attached_ns_.fetch_add(cpu_ns, std::memory_order_relaxed);
  }

  // --- A step is committed, by one thread at a time
  struct How {
    bool deferred;
    bool small;  // or the committing thread applies it alone
  };
  // A commit begins; the step's rows have `bytes`. Updates of a row go in step order: while older
  // ones are pending, new ones queue after them.
  How begin(uint64_t bytes, bool any_pending) {
    if (begun_.load() && begun_.exchange(false)) first_steps_ = true;
    most_ = std::max(most_, bytes);
    bytes_ += bytes;
    if (!deferred() && any_pending) drains_.store(true);
    return {deferred() || any_pending, small(bytes)};
  }
  // The update is one of the step's: its sums are pending until it is written.
  void add(StepUpdate* update) {
    committing_ += update->bytes;
    update->account(&pending_, peak_);
  }
  // The commit has ended. `may_rest`: trainers in other processes could do the work of flush
  // threads. Returns whether flush threads have stopped resting.
  template <class Measure>
  bool committed(bool may_rest, Measure measure) {
    last_step_.store(std::exchange(committing_, 0), std::memory_order_relaxed);
    if (mode_ != FRUGAL_FLUSH_AUTO || ++steps_ % kSteps != 0) return false;
    Measured now = measure();
    now.cpu += attached_ns_.load(std::memory_order_relaxed);
    return decide(may_rest, now);
  }

  // --- Pending bytes: the sums of committed updates that are not written
  uint64_t pending() const { return pending_.load(); }
  bool over_budget() const { return pending() > budget_; }
  // Gates write when more than this is pending. It is the budget, or less if a backlog of several
  // steps shows that flushing does not keep up. A longer backlog would only leave the processor's
  // caches.
  uint64_t limit() const {
    return std::min(budget_, std::max(last_step_.load(std::memory_order_relaxed) * 5 / 4, kLeast));
  }
  // Gates wait for all updates, until nothing is pending: without deferring, declarations are no
  // longer linked.
  bool drains() const { return drains_.load() || !deferred() || pending() > limit(); }
  void drained() { drains_.store(false); }

 private:
  static constexpr uint64_t kLeast = uint64_t{4} << 20;  // the smallest limit
  static constexpr uint64_t kSteps = 16;
  bool decide(bool may_rest, const Measured& now);

  const int32_t mode_;
  const bool always_;  // defers
  const uint32_t flush_threads_, world_size_, cpus_;
  std::atomic<bool> deferred_, resting_{false}, drains_{false};
  const uint64_t budget_;
  std::atomic<uint64_t>* const peak_;
  std::atomic<uint64_t> pending_{0};
  std::atomic<uint64_t> last_step_{0};  // sums of the last committed step
  uint64_t committing_ = 0;
  std::atomic<uint64_t> spare_ns_{0}, attached_ns_{0};
  // A snapshot is being saved; one was begun since the last commit began; one was saved since the
  // last decision.
  std::atomic<bool> saving_{false}, begun_{false}, saved_{false};
  bool first_steps_ = false;  // of a snapshot are among those since the last decision
  uint64_t steps_ = 1, most_ = 0, bytes_ = 0, spare_ = 0;
  Measured last_;
  bool paid_ = false;
  Trial trial_;
};

}  // namespace frugal
