// The seam under which a test decides which of its threads goes on (tests/support/schedule.h).
//
// Locks, waits, clocks and spinning of the library come here (base/sync.h, base/condition.h,
// base/futex.h, base/os.h), and so do some atomics, by schedule_point(). In a build without
// FRUGAL_SCHEDULES nothing of it is compiled. FRUGAL_ASSERTS, which is for tests alone, too, turns
// it on; a thread of no schedule pays a look at a pointer there.
#pragma once
#include <cstdint>

#if defined(FRUGAL_ASSERTS) && !defined(FRUGAL_SCHEDULES)
#define FRUGAL_SCHEDULES 1
#endif

namespace frugal {

#ifdef FRUGAL_SCHEDULES

class Scheduler {
 public:
  // Others may go on here.
  virtual void point() = 0;
  // Others go on here if they can: the thread looks at the same thing again and again.
  virtual void pause() = 0;
  // Returns when nobody holds the mutex; it is the calling thread's from then on.
  virtual void lock(const void* mutex) = 0;
  virtual bool try_lock(const void* mutex) = 0;
  virtual void unlock(const void* mutex) = 0;
  // Gives the mutex up until the condition is told or now() is `until` (UINT64_MAX: never), or for
  // no reason.
  virtual void wait(const void* condition, const void* mutex, uint64_t until) = 0;
  virtual void notify(const void* condition, bool all) = 0;
  virtual uint64_t now() = 0;
  virtual void sleep(uint64_t ns) = 0;

 protected:
  ~Scheduler() = default;
};

// Of the calling thread; null: it runs as the system lets it.
inline constinit thread_local Scheduler* this_scheduler = nullptr;

inline void schedule_point() {
  if (Scheduler* s = this_scheduler) s->point();
}

#else

inline void schedule_point() {}

#endif

}  // namespace frugal
