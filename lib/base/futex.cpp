#include "base/futex.h"

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "base/os.h"
#include "base/scheduler.h"

namespace frugal {

void futex_wait(const uint32_t* word, uint32_t seen, uint64_t ns) {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) {  // its threads take turns: check and wait are one step
    if (__atomic_load_n(word, __ATOMIC_RELAXED) != seen) return;
    const char none = 0;  // stands for the mutex that a Scheduler's wait needs
    s->wait(word, &none, ns < uint64_t{1} << 60 ? s->now() + ns : UINT64_MAX);  // centuries: never
    return s->unlock(&none);
  }
#endif
  timespec time{};
  time.tv_sec = static_cast<time_t>(ns / 1000000000u);
  time.tv_nsec = static_cast<long>(ns % 1000000000u);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, ns == UINT64_MAX ? nullptr : &time, nullptr, 0);
}

WaitTime WaitTime::until(uint64_t at) {
  const uint64_t now = now_ns();
  return WaitTime(at > now ? at - now : 0);
}

void futex_wait(const uint32_t* word, uint32_t seen, WaitTime* time) {
  const uint64_t began = now_ns();
  futex_wait(word, seen, time->slice());
  time->slept(now_ns() - began);
}

void futex_wake(const uint32_t* word) {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) return s->notify(word, true);
#endif
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace frugal
