// Waiting with a time-out by the steady clock: by the system's clock a wait takes as much longer as that is set back
// meanwhile. (The standard library's waits use that one where the C library has no better, and do not tell.)
#pragma once
#include <pthread.h>
#include <time.h>

#include <mutex>
#include <utility>

#include "base/os.h"

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

  void notify_one() { pthread_cond_signal(&cond_); }
  void notify_all() { pthread_cond_broadcast(&cond_); }
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, Done done) {
    while (!done()) pthread_cond_wait(&cond_, lock.mutex()->native_handle());
  }
  // Until it is done, or now_ns() is `at`. Returns whether it is done.
  template <class Done>
  bool wait_until(std::unique_lock<std::mutex>& lock, uint64_t at, Done done) {
    while (!done()) {
      if (now_ns() >= at) return false;
      // (A time beyond what the system can wait for is far enough away.)
      const uint64_t ns = at < uint64_t{1} << 62 ? at : uint64_t{1} << 62;
      const timespec until{static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
      pthread_cond_timedwait(&cond_, lock.mutex()->native_handle(), &until);
    }
    return true;
  }

 private:
  pthread_cond_t cond_;
};

// For std::unique_lock.
class TimedMutex {
 public:
  bool try_lock() {
    std::lock_guard<std::mutex> lock(mu_);
    return !std::exchange(held_, true);
  }
  bool try_lock_until(uint64_t at) {
    std::unique_lock<std::mutex> lock(mu_);
    return free_.wait_until(lock, at, [&] { return !held_; }) && (held_ = true);
  }
  void unlock() {
    std::lock_guard<std::mutex> lock(mu_);
    held_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mu_;
  Condition free_;
  bool held_ = false;
};

}  // namespace frugal
