// The engine's mutex, and the control state that it guards: ranks, step records, tables, what runs
// beside what, and parts of trainers and tables.
//
// These lie in many classes, most of which do not see the mutex. So what it guards is said to be
// guarded by `control`, in whichever object it is: no code knows two engines at once.
#pragma once
#include <mutex>

#include "base/sync.h"

namespace frugal {

class CAPABILITY("mutex") Control {};
inline constexpr Control control;

class ControlMutex : public Mutex {
 public:
  void assert_held() const ASSERT_CAPABILITY(control) {}
};

class SCOPED_CAPABILITY ControlLock : public std::unique_lock<Mutex> {
  using Base = std::unique_lock<Mutex>;

 public:
  explicit ControlLock(ControlMutex& mu) ACQUIRE(control) : Base(mu) {}
  ~ControlLock() RELEASE() {}
  void lock() ACQUIRE() { Base::lock(); }
  void unlock() RELEASE() { Base::unlock(); }
};

// The mutex is let go of, until its end or again().
class SCOPED_CAPABILITY ControlFree {
 public:
  explicit ControlFree(ControlMutex& mu) RELEASE(control) : lock_(mu, std::adopt_lock) {
    lock_.unlock();
  }
  ~ControlFree() RELEASE() {
    if (!lock_.owns_lock()) lock_.lock();
    lock_.release();
  }
  void again() RELEASE() { lock_.lock(); }

 private:
  std::unique_lock<Mutex> lock_;
};

}  // namespace frugal
