// A condition variable whose time-outs are on the monotonic clock. By the system's clock a wait
// takes longer if that clock is set back meanwhile. (The standard library's waits silently use the
// system's clock where the C library offers no other.)
#pragma once
#include <pthread.h>
#include <time.h>

#include <mutex>
#include <utility>

#include "base/os.h"
#include "base/sync.h"

namespace frugal {

class Condition {
 public:
  Condition() {
    pthread_condattr_t how;
    pthread_condattr_init(&how);
    pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
    pthread_cond_init(&cond_, &how);
    pthread_condattr_destroy(&how);
  }
  ~Condition() { pthread_cond_destroy(&cond_); }
  Condition(const Condition&) = delete;

  void notify_one() { notify(false); }
  void notify_all() { notify(true); }
  // `lock` is a UniqueLock, or a std::unique_lock.
  template <class AnyLock, class Done>
  void wait(AnyLock& lock, Done done) NO_THREAD_SAFETY_ANALYSIS {
    while (!done()) sleep(*lock.mutex());
  }
  // Waits until done() is true, or now_ns() is `at`. Returns whether done() is true.
  template <class AnyLock, class Done>
  bool wait_until(AnyLock& lock, uint64_t at, Done done) NO_THREAD_SAFETY_ANALYSIS {
    while (!done()) {
      if (now_ns() >= at) return false;
      if (scheduled(*lock.mutex(), at)) continue;
      // (A time beyond what the system can wait for is far enough away.)
      const uint64_t ns = at < uint64_t{1} << 62 ? at : uint64_t{1} << 62;
      const timespec until{static_cast<time_t>(ns / 1000000000u),
                           static_cast<long>(ns % 1000000000u)};
      pthread_cond_timedwait(&cond_, lock.mutex()->native_handle(), &until);
    }
    return true;
  }

 private:
  template <class AnyMutex>
  void sleep(AnyMutex& mu) {
    if (!scheduled(mu, UINT64_MAX)) pthread_cond_wait(&cond_, mu.native_handle());
  }
  void notify(bool all) {
#ifdef FRUGAL_SCHEDULES
    if (Scheduler* s = this_scheduler) s->notify(this, all);
#endif
    all ? pthread_cond_broadcast(&cond_) : pthread_cond_signal(&cond_);
  }
  // Waits by a test's scheduler. False: the thread has none.
  bool scheduled(Mutex& mu, uint64_t until) NO_THREAD_SAFETY_ANALYSIS {
#ifdef FRUGAL_SCHEDULES
    if (Scheduler* s = this_scheduler) {
      mu.mu_.unlock();
      s->wait(this, &mu, until);
      mu.mu_.lock();
      return true;
    }
#endif
    (void)mu, (void)until;
    return false;
  }
  bool scheduled(std::mutex&, uint64_t) { return false; }

  pthread_cond_t cond_;
};

// A mutex with a time-out, for std::unique_lock.
class CAPABILITY("mutex") TimedMutex {
 public:
  bool try_lock() TRY_ACQUIRE(true) {
    Lock lock(mu_);
    return !std::exchange(held_, true);
  }
  bool try_lock_until(uint64_t at) TRY_ACQUIRE(true) {
    UniqueLock lock(mu_);
    return free_.wait_until(lock, at, [&]() REQUIRES(mu_) { return !held_; }) && (held_ = true);
  }
  void unlock() RELEASE() {
    Lock lock(mu_);
    held_ = false;
    free_.notify_one();
  }

 private:
  Mutex mu_;
  Condition free_;
  bool held_ GUARDED_BY(mu_) = false;
};

}  // namespace frugal
