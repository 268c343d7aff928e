#include "base/futex.h"

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace frugal {

void futex_wait(const uint32_t* word, uint32_t seen, uint64_t ns) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(ns / 1000000000u);
  time.tv_nsec = static_cast<long>(ns % 1000000000u);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, ns == UINT64_MAX ? nullptr : &time, nullptr, 0);
}

void futex_wake(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace frugal
