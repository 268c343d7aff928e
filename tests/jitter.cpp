// Shifts threads against each other: loaded before everything else (LD_PRELOAD), it now and then
// lets a thread sleep, or yield, around a call on a mutex, a condition variable or the clock. Code
// that is right only while no thread is interrupted between two sections then goes wrong within
// seconds, not once a month.
//
//   FRUGAL_JITTER_SEED=7 FRUGAL_JITTER_ONE_IN=128 FRUGAL_JITTER_US=300
//   LD_PRELOAD=libfrugal_jitter.so PROGRAM
//
// One call in ONE_IN is delayed before it and one after, half of these by a sleep of up to US
// microseconds, half by a yield. The seed repeats each thread's delays, though not what they meet.
// It is called from wherever locks are: before main, within malloc, in threads that end. So nothing
// here allocates or locks.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#include "support/mix.h"

namespace {

std::atomic<uint64_t> seed{1}, one_in{128}, most_us{300}, threads{0};

// The next definition of a name after this library's, found once.
void* find(std::atomic<void*>& slot, const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  slot.store(found, std::memory_order_release);
  return found;
}

uint64_t number(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

__attribute__((constructor)) void configure() {
  seed = number("FRUGAL_JITTER_SEED", 1);
  one_in = number("FRUGAL_JITTER_ONE_IN", 128);
  most_us = number("FRUGAL_JITTER_US", 300);
}

uint64_t random_number() {
  static __thread uint64_t state __attribute__((tls_model("initial-exec")));
  if (state == 0)
    state = (seed.load(std::memory_order_relaxed) + threads.fetch_add(1) + 1) * 0xd1342543de82ef95u;
  const uint64_t n = mix(state);
  state += kMixStep;
  return n;
}

void jitter() {
  const uint64_t n = one_in.load(std::memory_order_relaxed);
  const uint64_t r = random_number();
  if (n == 0 || (r >> 32) % n != 0) return;
  const int kept = errno;
  if (r & 1) {
    sched_yield();
  } else {
    const uint64_t us = (r >> 1) % (most_us.load(std::memory_order_relaxed) + 1);
    timespec time{static_cast<time_t>(us / 1000000), static_cast<long>(us % 1000000 * 1000)};
    nanosleep(&time, nullptr);
  }
  errno = kept;
}

}  // namespace

extern "C" {

#define JITTERED(function, parameters, arguments)                           \
  __attribute__((visibility("default"))) int function parameters noexcept(  \
      noexcept(function arguments)) {                                       \
    static constinit std::atomic<void*> slot{nullptr};                      \
    void* next = slot.load(std::memory_order_acquire);                      \
    if (!next) next = find(slot, #function);                                \
    jitter();                                                               \
    const int answer = reinterpret_cast<int(*) parameters>(next) arguments; \
    jitter();                                                               \
    return answer;                                                          \
  }

// After a lock, and after a wait, the thread sleeps with the mutex held: others come upon it.
JITTERED(pthread_mutex_lock, (pthread_mutex_t * m), (m))
JITTERED(pthread_mutex_trylock, (pthread_mutex_t * m), (m))
JITTERED(pthread_mutex_unlock, (pthread_mutex_t * m), (m))
JITTERED(pthread_cond_wait, (pthread_cond_t * c, pthread_mutex_t* m), (c, m))
JITTERED(pthread_cond_timedwait, (pthread_cond_t * c, pthread_mutex_t* m, const timespec* t),
         (c, m, t))
JITTERED(pthread_cond_clockwait,
         (pthread_cond_t * c, pthread_mutex_t* m, clockid_t clock, const timespec* t),
         (c, m, clock, t))
JITTERED(pthread_cond_signal, (pthread_cond_t * c), (c))
JITTERED(pthread_cond_broadcast, (pthread_cond_t * c), (c))
// The engine reads the clock where it begins and ends what it counts: between two locks.
JITTERED(clock_gettime, (clockid_t clock, timespec* t), (clock, t))

}  // extern "C"
