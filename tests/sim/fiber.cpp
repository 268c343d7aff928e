#include "sim/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "sim/order.h"
#include "sim/random.h"

#if defined(FRUGAL_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
#endif
#if defined(FRUGAL_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old,
                                     size_t* size_old);
}
#endif

#if defined(FRUGAL_UCONTEXT)

namespace {
FRUGAL_UNSEEN void switch_stacks(frugal::device::sim::Fiber* from, frugal::device::sim::Fiber* to) {
  swapcontext(&from->context, &to->context);
}
}  // namespace

#else

// void frugal_sim_switch(void** save, void* load): pushes what a callee has to keep, saves the
// stack pointer in *save, and goes on where `load` was saved.
extern "C" void frugal_sim_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
  .globl frugal_sim_switch
  .hidden frugal_sim_switch
  .type frugal_sim_switch, @function
frugal_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size frugal_sim_switch, . - frugal_sim_switch
)");
#else
asm(R"(
  .text
  .p2align 4
  .globl frugal_sim_switch
  .hidden frugal_sim_switch
  .type frugal_sim_switch, %function
frugal_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size frugal_sim_switch, . - frugal_sim_switch
)");
#endif

namespace {
// Unseen: a fiber that ends does not come back from it, and ThreadSanitizer would count calls for
// ever.
FRUGAL_UNSEEN void switch_stacks(frugal::device::sim::Fiber* from, frugal::device::sim::Fiber* to) {
  frugal_sim_switch(&from->top, to->top);
}
}  // namespace

#endif

namespace frugal::device::sim {
namespace {

#if defined(FRUGAL_TSAN) || defined(FRUGAL_ASAN)
constexpr size_t kStackBytes = 256 << 10;  // reports are made on it
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kPooled = 32;

size_t guard_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<FiberSet>> sets;
};

// Never destroyed: threads may outlive static objects.
Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

}  // namespace

std::unique_ptr<FiberSet> FiberSet::take() {
  Unseen unseen;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    if (!pool().sets.empty()) {
      std::unique_ptr<FiberSet> set = std::move(pool().sets.back());
      pool().sets.pop_back();
      return set;
    }
  }
  return std::unique_ptr<FiberSet>(new FiberSet);
}

void FiberSet::give(std::unique_ptr<FiberSet> set) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(pool().mutex);
  if (pool().sets.size() < kPooled) pool().sets.push_back(std::move(set));
}

FiberSet::~FiberSet() {
  Unseen unseen;
  for (Fiber& fiber : fibers_) munmap(fiber.stack - guard_bytes(), guard_bytes() + kStackBytes);
#if defined(FRUGAL_TSAN)
  for (void* thread : threads_)
    if (thread) __tsan_destroy_fiber(thread);
#endif
}

bool FiberSet::grow(uint32_t count) {
  Unseen unseen;
  const size_t guard = guard_bytes();
  fibers_.reserve(count);
  while (fibers_.size() < count) {
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (mprotect(memory, guard, PROT_NONE) != 0) {
      munmap(memory, guard + kStackBytes);
      return false;
    }
    Fiber fiber;
    fiber.stack = static_cast<char*>(memory) + guard;
    fiber.stack_bytes = kStackBytes;
#if defined(FRUGAL_TSAN)
    // Even and odd fibers share none.
    const uint64_t i = fibers_.size();
    void*& thread = threads_[mix(i / 2 + 1) % (kThreads / 2) * 2 + i % 2];
    if (!thread) thread = __tsan_create_fiber(0);
    fiber.thread = thread;
#endif
    fibers_.push_back(fiber);
  }
  return true;
}

FRUGAL_UNSEEN void prepare_fiber(Fiber* fiber, void (*function)()) {
  fiber->fake_stack = nullptr;
#if defined(FRUGAL_UCONTEXT)
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = fiber->stack_bytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, function, 0);
#else
  uint64_t* top = reinterpret_cast<uint64_t*>(fiber->stack + fiber->stack_bytes);
#if defined(__x86_64__)
  top -= 8;  // six registers, the function, and the 0 at which a backtrace ends
  for (int i = 0; i < 8; ++i) top[i] = 0;
  top[6] = reinterpret_cast<uint64_t>(function);
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<uint64_t>(function);  // x30
#endif
  fiber->top = top;
#endif
}

void adopt_thread([[maybe_unused]] Fiber* fiber) {
#if defined(FRUGAL_TSAN)
  fiber->thread = __tsan_get_current_fiber();
#endif
}

// Turns do not order the threads of a block. So the switches reported to ThreadSanitizer carry no
// order: barriers report theirs.
#if defined(FRUGAL_TSAN)
#define FRUGAL_SWITCH_THREAD(from, to) \
  if ((from)->thread != (to)->thread) __tsan_switch_to_fiber((to)->thread, 1)
#else
#define FRUGAL_SWITCH_THREAD(from, to)
#endif

FRUGAL_UNSEEN void switch_fiber(Fiber* from, Fiber* to) {
#if defined(FRUGAL_ASAN)
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
  FRUGAL_SWITCH_THREAD(from, to);
  switch_stacks(from, to);
#if defined(FRUGAL_ASAN)
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

FRUGAL_UNSEEN void leave_fiber(Fiber* from, Fiber* to) {
#if defined(FRUGAL_ASAN)
  __sanitizer_start_switch_fiber(nullptr, to->stack, to->stack_bytes);
#endif
  FRUGAL_SWITCH_THREAD(from, to);
  switch_stacks(from, to);
}

FRUGAL_UNSEEN void entered_fiber([[maybe_unused]] Fiber* thread_context) {
#if defined(FRUGAL_ASAN)
  // The first fiber that a thread enters comes from the thread's own stack, whose bounds are needed
  // to go back to it.
  const void* bottom = nullptr;
  size_t bytes = 0;
  const bool from_thread = thread_context->stack == nullptr;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (from_thread) {
    thread_context->stack = static_cast<char*>(const_cast<void*>(bottom));
    thread_context->stack_bytes = bytes;
  }
#endif
}

}  // namespace frugal::device::sim
