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

namespace frugal {

void futex_wait(const uint32_t* word, uint32_t seen, uint64_t ns) {
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
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace frugal
