// Sums of committed updates until they are written, against the budget for them.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "window/step_update.h"

namespace frugal {

class PendingBytes {
 public:
  PendingBytes(uint64_t budget, std::atomic<uint64_t>* peak) : budget_(budget), peak_(peak) {}

  uint64_t now() const { return bytes_.load(); }
  // Gates write when more than this is pending: the budget, or less where a backlog of several
  // steps shows that flushing does not keep up. A longer one would only leave the caches.
  uint64_t limit() const {
    return std::min(budget_, std::max(last_.load(std::memory_order_relaxed) * 5 / 4, kLeast));
  }
  bool over_budget() const { return now() > budget_; }

  // The update is one of the step that is being committed: its sums count until it is written. By
  // one thread at a time.
  void add(StepUpdate* update) {
    committing_ += update->bytes;
    update->account(&bytes_, peak_);
  }
  void committed() { last_.store(std::exchange(committing_, 0), std::memory_order_relaxed); }

  // Gates wait for everything, until nothing is pending: the mode changes.
  void drain() { drains_.store(true); }
  bool drains() const { return drains_.load(); }
  void drained() { drains_.store(false); }

 private:
  static constexpr uint64_t kLeast = uint64_t{4} << 20;
  const uint64_t budget_;
  std::atomic<uint64_t>* const peak_;
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> last_{0};  // sums of the last committed step
  uint64_t committing_ = 0;
  std::atomic<bool> drains_{false};
};

}  // namespace frugal
