// Locks that state what they guard (base/annotations.h), and that a test can schedule
// (base/scheduler.h).
#pragma once
#include <chrono>
#include <mutex>
#include <thread>

#include "base/annotations.h"
#include "base/os.h"
#include "base/scheduler.h"

namespace frugal {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() {
#ifdef FRUGAL_SCHEDULES
    if (Scheduler* s = this_scheduler) s->lock(this);
#endif
    mu_.lock();
  }
  bool try_lock() TRY_ACQUIRE(true) {
#ifdef FRUGAL_SCHEDULES
    if (Scheduler* s = this_scheduler; s && !s->try_lock(this)) return false;
#endif
    return mu_.try_lock();
  }
  void unlock() RELEASE() {
    mu_.unlock();
#ifdef FRUGAL_SCHEDULES
    if (Scheduler* s = this_scheduler) s->unlock(this);
#endif
  }
  // For code of which clang cannot see that the mutex is held.
  void assert_held() const ASSERT_CAPABILITY(this) {}
  std::mutex::native_handle_type native_handle() { return mu_.native_handle(); }

 private:
  friend class Condition;
  std::mutex mu_;
};

class SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mu) ACQUIRE(mu) : mu_(mu) { mu_.lock(); }
  ~Lock() RELEASE() { mu_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mu_;
};

// A lock that can be released before its end, and with which a Condition can wait.
class SCOPED_CAPABILITY UniqueLock : public std::unique_lock<Mutex> {
  using Base = std::unique_lock<Mutex>;

 public:
  explicit UniqueLock(Mutex& mu) ACQUIRE(mu) : Base(mu) {}
  UniqueLock(Mutex& mu, std::defer_lock_t how) EXCLUDES(mu) : Base(mu, how) {}
  UniqueLock(Mutex& mu, std::try_to_lock_t how) TRY_ACQUIRE(true, mu) : Base(mu, how) {}
  UniqueLock(Mutex& mu, std::adopt_lock_t how) REQUIRES(mu) : Base(mu, how) {}
  ~UniqueLock() RELEASE() {}
  UniqueLock(const UniqueLock&) = delete;
  UniqueLock& operator=(const UniqueLock&) = delete;
  void lock() ACQUIRE() { Base::lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return Base::try_lock(); }
  void unlock() RELEASE() { Base::unlock(); }
};

inline void yield_thread() {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) return s->pause();
#endif
  sched_yield();
}

inline void sleep_ns(uint64_t ns) {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) return s->sleep(ns);
#endif
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
}

// Polls for a moment: the awaited event is often nearer than a sleep and a wake-up.
template <class Done>
bool spin(Done done) {
  int rounds = 64, pauses = 16;
#ifdef FRUGAL_SCHEDULES
  if (this_scheduler) rounds = pauses = 1;
#endif
  for (int round = 0; round < rounds; ++round) {
    if (done()) return true;
    for (int i = 0; i < pauses; ++i) cpu_relax();
  }
  return done();
}

}  // namespace frugal
