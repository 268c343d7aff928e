// A lock that background passes yield while an urgent thread waits. With a plain mutex they could
// retake it again and again. It is held for tens of microseconds, a chunk of rows. Sleeping and
// waking cost as much, so a waiting thread spins for a while first.
#pragma once
#include <atomic>

#include "base/sync.h"

namespace frugal {

class CAPABILITY("mutex") UrgentMutex : public Mutex {
 public:
  enum class Urgency { kBackground, kUrgent };

  void lock(Urgency urgency) ACQUIRE() NO_THREAD_SAFETY_ANALYSIS {
    if (urgency == Urgency::kUrgent) {
      if (try_lock()) return;
      urgent_.fetch_add(1, std::memory_order_relaxed);
      if (!spin([&] { return try_lock(); })) Mutex::lock();
      urgent_.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    if (urgent_.load(std::memory_order_relaxed) != 0)
      spin([&] { return urgent_.load(std::memory_order_relaxed) == 0; });
    if (!spin([&] { return try_lock(); })) Mutex::lock();
  }

 private:
  std::atomic<int> urgent_{0};  // number of waiting urgent threads
};

class SCOPED_CAPABILITY UrgentLock {
 public:
  UrgentLock(UrgentMutex& mu, UrgentMutex::Urgency urgency) ACQUIRE(mu) : mu_(mu) {
    mu_.lock(urgency);
  }
  ~UrgentLock() RELEASE() { mu_.unlock(); }
  UrgentLock(const UrgentLock&) = delete;
  UrgentLock& operator=(const UrgentLock&) = delete;

 private:
  UrgentMutex& mu_;
};

}  // namespace frugal
