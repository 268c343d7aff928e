// The engine's mutex, and the control state that it guards: ranks, step records, tables, the phase,
// and some fields of trainers and tables.
//
// These are in many classes, most of which do not see the mutex. So thread-safety annotations name
// the global capability `control`, whichever object it is in: no code handles two engines at once.
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

// Releases the mutex, until the end of the scope or again().
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
