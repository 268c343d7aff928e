// Fibers: functions with stacks of their own that hand the thread to each other.
//
// What: a context is a saved stack; switch_fiber leaves one and goes on with another.
// Every switch is reported to AddressSanitizer and ThreadSanitizer. Invariants: a fiber runs on one
// operating-system thread from prepare() to its end. Its function does not return: it ends by a
// switch that says so. Stacks end at a guard page. Cost: some nanoseconds a switch on x86-64 and
// AArch64; elsewhere ucontext's two system calls. Callers: block.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define FRUGAL_UCONTEXT 1
#endif
#if defined(FRUGAL_UCONTEXT)
#include <ucontext.h>
#endif

namespace frugal::device::sim {

struct Fiber {
  char* stack = nullptr;  // its lowest byte above the guard; null: the thread's own stack
  size_t stack_bytes = 0;
#if defined(FRUGAL_UCONTEXT)
  ucontext_t context;
#else
  void* top = nullptr;  // of the saved stack
#endif
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* thread = nullptr;      // that ThreadSanitizer takes it for
};

// Fibers with their stacks; they are many, so that streams that end leave them to others.
class FiberSet {
 public:
  // Throws std::bad_alloc.
  static std::unique_ptr<FiberSet> take();
  static void give(std::unique_ptr<FiberSet> set);
  ~FiberSet();
  // Makes fibers below `count` usable. False: no memory.
  bool grow(uint32_t count);
  Fiber* at(uint32_t i) { return &fibers_[i]; }

 private:
  FiberSet() = default;
  // ThreadSanitizer's threads are dear (a millisecond each, and every order costs time for each),
  // so fibers share some, not in a pattern. Two fibers that share one are ordered, as far as it
  // knows.
  static constexpr uint32_t kThreads = 16;
  std::vector<Fiber> fibers_;
  [[maybe_unused]] void* threads_[kThreads] = {};
};

// The next switch to the fiber calls `function`.
void prepare_fiber(Fiber* fiber, void (*function)());
// For the context of the running thread, before its first switch.
void adopt_thread(Fiber* fiber);

void switch_fiber(Fiber* from, Fiber* to);
// The same; `from` is not switched to again before prepare_fiber.
void leave_fiber(Fiber* from, Fiber* to);
// What a prepared function calls first; `from` is the context that the thread came from, if that is
// the thread's own.
void entered_fiber(Fiber* thread_context);

}  // namespace frugal::device::sim
