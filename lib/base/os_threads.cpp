// Clocks, threads and processors.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/os.h"
#include "base/scheduler.h"

namespace frugal {
namespace {

uint64_t clock_ns(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

uint64_t now_ns() {
#ifdef FRUGAL_SCHEDULES
  if (Scheduler* s = this_scheduler) return s->now();
#endif
  return clock_ns(CLOCK_MONOTONIC);
}
bool os_clock_is(const char* counter) {
  FILE* f = std::fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "re");
  if (!f) return false;
  char name[64] = {};
  const bool is = std::fscanf(f, "%63s", name) == 1 && std::strcmp(name, counter) == 0;
  std::fclose(f);
  return is;
}
uint64_t after_ns(uint64_t ns) {
  const uint64_t now = now_ns();
  return ns < UINT64_MAX - now ? now + ns : UINT64_MAX;
}
uint64_t process_cpu_ns() { return clock_ns(CLOCK_PROCESS_CPUTIME_ID); }
uint64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

uint32_t cpu_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    int n = CPU_COUNT(&set);
    if (n > 0) return static_cast<uint32_t>(n);
  }
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? static_cast<uint32_t>(n) : 1;
}

void os_background_thread() {
  // Linux has a priority of each thread. Another thread gets three times the time of this one, so
  // a thread that waits for this one does not wait long.
  const int lower = 5;
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  errno = 0;
  const int now = getpriority(PRIO_PROCESS, thread);
  if (errno == 0) setpriority(PRIO_PROCESS, thread, now + lower);  // a wish
}

void os_batch_thread() {
  sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);  // a wish: without it, the default holds
}

void os_brief_thread() {
  struct {  // sched_attr, for which the C library has no name yet
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } wish{};
  wish.size = sizeof wish;
  wish.policy = SCHED_OTHER;
  wish.runtime = 100'000;
  errno = 0;
  wish.nice = getpriority(PRIO_PROCESS, 0);
  if (errno == 0) syscall(SYS_sched_setattr, 0, &wish, 0);
}

int os_processor() { return sched_getcpu(); }

Processors Processors::mine() {
  Processors p;
  if (sched_getaffinity(0, sizeof p.set, &p.set) != 0) CPU_ZERO(&p.set);
  return p;
}

Processors Processors::only(int processor) {
  Processors p;
  CPU_ZERO(&p.set);
  if (processor >= 0 && processor < CPU_SETSIZE) CPU_SET(processor, &p.set);
  return p;
}

Processors Processors::but(int processor) const {
  if (!has(processor) || CPU_COUNT(&set) == 1) return *this;
  Processors p = *this;
  CPU_CLR(processor, &p.set);
  return p;
}

bool Processors::bind(Thread* thread) const {
  if (CPU_COUNT(&set) == 0) return false;
  return pthread_setaffinity_np(thread ? thread->native_handle() : pthread_self(), sizeof set,
                                &set) == 0;
}

}  // namespace frugal
