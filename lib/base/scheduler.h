// The interface by which a test decides which of its threads runs next (tests/support/schedule.h).
//
// The library's locks, waits, clocks and polling loops call it (base/sync.h, base/condition.h,
// base/futex.h, base/os.h), and so do some atomics, by schedule_point(). A build without
// FRUGAL_SCHEDULES has none of it. FRUGAL_ASSERTS, which is also for tests alone, turns it on.
// There a thread that belongs to no schedule pays for the read of a pointer.
#pragma once
#include <cstdint>

#if defined(FRUGAL_ASSERTS) && !defined(FRUGAL_SCHEDULES)
#define FRUGAL_SCHEDULES 1
#endif

namespace frugal {

#ifdef FRUGAL_SCHEDULES

class Scheduler {
 public:
  // Other threads may run here.
  virtual void point() = 0;
  // Other threads run here if they can: the calling thread polls.
  virtual void pause() = 0;
  // Returns when the calling thread has the mutex.
  virtual void lock(const void* mutex) = 0;
  virtual bool try_lock(const void* mutex) = 0;
  virtual void unlock(const void* mutex) = 0;
  // Releases the mutex until the condition is notified or now() is `until` (UINT64_MAX: never). It
  // may also return early.
  virtual void wait(const void* condition, const void* mutex, uint64_t until) = 0;
  virtual void notify(const void* condition, bool all) = 0;
  virtual uint64_t now() = 0;
  virtual void sleep(uint64_t ns) = 0;

 protected:
  ~Scheduler() = default;
};

// The calling thread's scheduler; null: the system schedules the thread.
inline constinit thread_local Scheduler* this_scheduler = nullptr;

inline void schedule_point() {
  if (Scheduler* s = this_scheduler) s->point();
}

#else

inline void schedule_point() {}

#endif

}  // namespace frugal
