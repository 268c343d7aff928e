#include "base/stopwatch.h"

#include <atomic>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "base/os.h"
#include "base/scheduler.h"

namespace frugal {
namespace {

#if defined(__x86_64__)
constexpr const char* kSource = "tsc";
uint64_t ticks() { return __rdtsc(); }
#elif defined(__aarch64__)
constexpr const char* kSource = "arch_sys_counter";
uint64_t ticks() {
  uint64_t found;
  asm volatile("mrs %0, cntvct_el0" : "=r"(found));
  return found;
}
#else
constexpr const char* kSource = "none";
uint64_t ticks() { return 0; }
#endif

constexpr uint64_t kLongest = 2'000;        // ns between two clocks that count as read together
constexpr uint64_t kMeasured = 20'000'000;  // ns over which the counter's rate is measured

struct Both {
  uint64_t ns, ticks;
};
// False: the thread was interrupted in between.
bool read_both(Both* out) {
  out->ns = now_ns();
  out->ticks = ticks();
  return now_ns() - out->ns <= kLongest;
}

// The first thread that asks finds out whether the counter is usable. Until then other threads read
// the clock, and so does a forked child for ever, if the fork was in the middle of that. (With the
// lock of a static variable's initialization the child would wait for a thread that it has not.)
struct Counter {
  enum State { kUnknown, kAsking, kUsable, kUnusable };
  std::atomic<int> state{kUnknown};
  Both began{};
  std::atomic<double> ns_per_tick{0};  // 0: it is not known yet

  bool usable() {
    int now = state.load(std::memory_order_acquire);
    if (now == kUnknown && state.compare_exchange_strong(now, kAsking)) {
      now = os_clock_is(kSource) && read_both(&began) ? kUsable : kUnusable;
      state.store(now, std::memory_order_release);
    }
    return now == kUsable;
  }
  uint64_t measure() {
    Both now;
    if (read_both(&now) && now.ns - began.ns >= kMeasured)
      ns_per_tick.store(
          static_cast<double>(now.ns - began.ns) / static_cast<double>(now.ticks - began.ticks),
          std::memory_order_release);
    return now_ns();
  }
};
constinit Counter g_counter;

}  // namespace

uint64_t stopwatch_ns() {
#ifdef FRUGAL_SCHEDULES
  if (this_scheduler) return now_ns();
#endif
  const double rate = g_counter.ns_per_tick.load(std::memory_order_acquire);
  if (rate == 0) return g_counter.usable() ? g_counter.measure() : now_ns();
  return g_counter.began.ns +
         static_cast<uint64_t>(static_cast<double>(ticks() - g_counter.began.ticks) * rate);
}

}  // namespace frugal
