#include "sim/block.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "sim/order.h"

namespace frugal::device::sim {

enum : uint32_t { kRuns, kInSync, kInBallot, kInShuffle, kReturned };

struct BlockRunner::Thread {
  Fiber* fiber;
  Position position;
  BlockRunner* runner;
  uint32_t state;
  uint32_t from;   // lane
  uint64_t value;  // brought to a meeting, and taken from it
};

struct BlockRunner::Warp {
  uint32_t arrived;
  uint32_t state;  // of the thread that arrived first
};

namespace {

// What threads leave their bodies with when their kernel has failed.
struct Ended {};

// After sync() all threads of a block know of each other's accesses, and so would the next block's,
// were they the same to ThreadSanitizer: blocks take the one half of the fibers or the other, by
// chance.
#if defined(FRUGAL_TSAN)
constexpr uint32_t kHalves = 2;
#else
constexpr uint32_t kHalves = 1;
#endif
constexpr size_t kCanary = 64;
constexpr uint64_t kCanaryWord = 0xa5a5a5a5a5a5a5a5u;

// The thread of a block that runs on this thread of the process. A fiber stays on its thread.
constinit thread_local BlockRunner::Thread* g_running = nullptr;
FRUGAL_UNSEEN BlockRunner::Thread* running() { return g_running; }
FRUGAL_UNSEEN void set_running(BlockRunner::Thread* thread) { g_running = thread; }

const char* doing(uint32_t state) {
  switch (state) {
    case kInSync:
      return "waits in sync";
    case kInBallot:
      return "waits in ballot";
    case kInShuffle:
      return "waits in shuffle";
    default:
      return "has returned";
  }
}

// Volatile, or the loop becomes a call of memset, which ThreadSanitizer sees.
FRUGAL_UNSEEN void fill_bytes(char* memory, size_t bytes, uint64_t word) {
  size_t i = 0;
  if (reinterpret_cast<uint64_t>(memory) % 8 == 0)
    for (; i + 8 <= bytes; i += 8) *reinterpret_cast<volatile uint64_t*>(memory + i) = word;
  for (; i < bytes; ++i)
    *static_cast<volatile char*>(memory + i) = static_cast<char>(word >> (i % 8 * 8));
}

}  // namespace

BlockRunner::~BlockRunner() {
  if (fibers_) FiberSet::give(std::move(fibers_));
  if (memory_) munmap(memory_, memory_bytes_);
  delete met_;
}

// Mapped and not allocated, so that ThreadSanitizer knows of no access by an earlier owner of the
// memory.
bool BlockRunner::grow(const Shape& shape) {
  if (!memory_) {
    const size_t threads = kHalves * kMaxThreads * sizeof(Thread);
    const size_t warps = kMaxThreads / kWarp * sizeof(Warp);
    const size_t ready = kMaxThreads * sizeof(uint32_t);
    const size_t bytes = threads + warps + ready + kMaxArguments + kMaxShared + kCanary;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    memory_ = static_cast<char*>(memory);
    memory_bytes_ = bytes;
    char* at = memory_;
    shared_ = at, at += kMaxShared + kCanary;  // first: it has to be aligned
    arguments_ = at, at += kMaxArguments;
    threads_ = reinterpret_cast<Thread*>(at), at += threads;
    warps_ = reinterpret_cast<Warp*>(at), at += warps;
    ready_ = reinterpret_cast<uint32_t*>(at);
  }
  if (!fibers_) fibers_ = FiberSet::take();
  const uint32_t count = kHalves * shape.threads;
  if (!fibers_->grow(count)) return false;
  for (uint32_t i = 0; i < count; ++i) {
    threads_[i].fiber = fibers_->at(i);
    threads_[i].runner = this;
  }
  return true;
}

bool BlockRunner::run(const KernelEntry& kernel, const Shape& shape, const void* arguments,
                      Random* random, char* fault) {
  {
    Unseen unseen;
    if (!grow(shape)) {
      snprintf(fault, kFaultText, "%s: no memory for the stacks of its threads", kernel.name);
      return false;
    }
    memcpy(arguments_, arguments, kernel.bytes);
    order_.resize(shape.blocks);
    for (uint32_t i = 0; i < shape.blocks; ++i) order_[i] = i;
    for (uint32_t i = shape.blocks; i > 1; --i) std::swap(order_[i - 1], order_[random->below(i)]);
  }
  kernel_ = &kernel;
  shape_ = shape;
  random_ = random;
  fault_ = fault;
  doomed_ = false;
  adopt_thread(&main_);
  release_order(&began_);
  for (uint32_t i = 0; i < shape.blocks && !is_doomed(); ++i) {
    forget_block();
    run_block(order_[i]);
  }
  acquire_order(&ended_);
  return !is_doomed();
}

// What ThreadSanitizer knows of the last block's sync() and shared memory is not the next one's.
void BlockRunner::forget_block() {
#if defined(FRUGAL_TSAN)
  Unseen unseen;
  delete met_;
  met_ = new char;
  if (shape_.shared_bytes > 0)
    mmap(shared_, kMaxShared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
         0);
#endif
}

FRUGAL_UNSEEN bool BlockRunner::is_doomed() const { return doomed_; }

FRUGAL_UNSEEN BlockRunner::Thread* BlockRunner::thread_of(uint32_t index) {
  uint32_t fiber = index + rotation_;
  if (fiber >= shape_.threads) fiber -= shape_.threads;
  return &threads_[fiber * kHalves + half_];
}

FRUGAL_UNSEEN void BlockRunner::run_block(uint32_t block) {
  const uint32_t n = shape_.threads;
  // Which fiber is which thread changes, or equal threads of two blocks would be one thread to
  // ThreadSanitizer.
  rotation_ = random_->below(n);
  half_ = random_->below(kHalves);
  in_order_ = random_->below(4) == 0;
  ready_count_ = arrived_ = returned_ = 0;
  for (uint32_t i = n; i-- > 0;) {
    Thread* thread = thread_of(i);
    thread->position.thread = i;
    thread->position.threads = n;
    thread->position.block = block;
    thread->position.blocks = shape_.blocks;
    prepare_fiber(thread->fiber, &BlockRunner::enter);
    release(thread);
  }
  for (uint32_t w = 0; w < n / kWarp; ++w) warps_[w].arrived = 0;
  fill_bytes(shared_, shape_.shared_bytes, random_->next());
  fill_bytes(shared_ + shape_.shared_bytes, kCanary, kCanaryWord);
  section_.begin();
  set_running(pick());
  switch_fiber(&main_, running()->fiber);
  set_running(nullptr);
  section_.end();
  for (uint32_t i = 0; i < kCanary && !doomed_; ++i) {
    if (shared_[shape_.shared_bytes + i] == static_cast<char>(kCanaryWord)) continue;
    fail(nullptr, "a write after the end of its shared memory");
    doomed_ = true;
  }
}

FRUGAL_UNSEEN void BlockRunner::release(Thread* thread) {
  thread->state = kRuns;
  ready_[ready_count_++] = static_cast<uint32_t>(thread - threads_);
}

FRUGAL_UNSEEN BlockRunner::Thread* BlockRunner::pick() {
  if (ready_count_ == 0) return nullptr;
  const uint32_t last = --ready_count_;
  const uint32_t at = in_order_ ? last : random_->below(last + 1);
  const uint32_t picked = ready_[at];
  ready_[at] = ready_[last];
  return &threads_[picked];
}

// What a fiber runs. It does not return, so ThreadSanitizer must not count its call.
FRUGAL_UNSEEN void BlockRunner::enter() {
  Thread* thread = running();
  entered_fiber(&thread->runner->main_);
  thread->runner->body();
  thread->runner->leave(thread);
}

void BlockRunner::body() {
  acquire_order(&began_);
  if (!is_doomed()) {
    try {
      kernel_->run(arguments_);
    } catch (const Ended&) {
    }
  }
  release_order(&ended_);
}

FRUGAL_UNSEEN void BlockRunner::leave(Thread* thread) {
  thread->state = kReturned;
  ++returned_;
  if (arrived_ > 0 && arrived_ + returned_ == shape_.threads) release_block();
  Thread* next = pick();
  if (!next && returned_ < shape_.threads) {
    diverged();
    next = pick();
  }
  set_running(next);
  leave_fiber(thread->fiber, next ? next->fiber : &main_);
  __builtin_unreachable();
}

// Lets others go on until the thread is released.
FRUGAL_UNSEEN void BlockRunner::wait(Thread* thread) {
  Thread* next = pick();
  if (!next) {
    diverged();
    next = pick();
  }
  if (next == thread) return;
  set_running(next);
  switch_fiber(thread->fiber, next->fiber);
}

FRUGAL_UNSEEN void BlockRunner::release_block() {
  arrived_ = 0;
  for (uint32_t i = shape_.threads; i-- > 0;) {
    Thread* thread = thread_of(i);
    if (thread->state == kInSync) release(thread);
  }
}

FRUGAL_UNSEEN void BlockRunner::meet_block(Thread* thread) {
  if (doomed_) throw Ended();
  release_order(met_);
  thread->state = kInSync;
  if (++arrived_ + returned_ == shape_.threads) release_block();
  wait(thread);
  if (doomed_) throw Ended();
  acquire_order(met_);
}

// As in CUDA, values are exchanged and nothing else: memory is not ordered by it.
FRUGAL_UNSEEN uint64_t BlockRunner::meet_warp(Thread* thread, uint32_t state, uint64_t value,
                                              uint32_t from) {
  if (doomed_) throw Ended();
  const uint32_t first = thread->position.thread / kWarp * kWarp;
  Warp* warp = &warps_[first / kWarp];
  thread->state = state;
  thread->value = value;
  thread->from = from;
  if (warp->arrived++ == 0) warp->state = state;
  if (warp->state != state) {
    diverged();
    wait(thread);
    throw Ended();
  }
  if (warp->arrived == kWarp) {
    warp->arrived = 0;
    uint64_t values[kWarp];
    uint64_t bits = 0;
    for (uint32_t i = 0; i < kWarp; ++i) {
      values[i] = thread_of(first + i)->value;
      if (values[i] != 0) bits |= uint64_t{1} << i;
    }
    for (uint32_t i = kWarp; i-- > 0;) {
      Thread* lane = thread_of(first + i);
      lane->value = state == kInBallot ? bits : values[lane->from % kWarp];
      release(lane);
    }
  }
  wait(thread);
  if (doomed_) throw Ended();
  return thread->value;
}

FRUGAL_UNSEEN void* BlockRunner::access(Thread* thread, uint64_t address, size_t bytes,
                                        Access access) {
  if ((address & (bytes - 1)) == 0) {
    const Range* range = section_.find(address, bytes);
    if (range && range->allows(device_, access))
      return reinterpret_cast<void*>(address + range->offset);
  }
  fail_access(thread, address, bytes, access);
}

void BlockRunner::fail_access(Thread* thread, uint64_t address, size_t bytes, Access access) {
  {
    Unseen unseen;
    const char* what = access == Access::kRead    ? "read"
                       : access == Access::kWrite ? "write"
                                                  : "add";
    const std::string why =
        address % bytes != 0 ? "misaligned" : why_not(device_, address, bytes, access);
    char text[300];
    snprintf(text, sizeof text, "%s of %zu bytes at 0x%llx: %s", what, bytes,
             static_cast<unsigned long long>(address), why.c_str());
    fail(thread, text);
    doom();
  }
  throw Ended();
}

// Only the kernel's first fault is reported.
void BlockRunner::fail(const Thread* thread, const char* text) {
  Unseen unseen;
  if (is_doomed()) return;
  const Position& at = (thread ? thread : thread_of(0))->position;
  if (thread)
    snprintf(fault_, kFaultText, "%s, block %u, thread %u: %s", kernel_->name, at.block, at.thread,
             text);
  else
    snprintf(fault_, kFaultText, "%s, block %u: %s", kernel_->name, at.block, text);
}

// Ends the kernel: waiting threads go on, to leave their bodies.
FRUGAL_UNSEEN void BlockRunner::doom() {
  doomed_ = true;
  for (uint32_t i = 0; i < shape_.threads; ++i) {
    Thread* thread = thread_of(i);
    if (thread->state != kRuns && thread->state != kReturned) release(thread);
  }
}

// No thread can go on. The fault names a thread that waits in a warp's meeting: others in sync()
// wait for it, too.
void BlockRunner::diverged() {
  Unseen unseen;
  const Thread* waiting = nullptr;
  for (uint32_t i = 0; i < shape_.threads && !waiting; ++i) {
    const Thread* thread = thread_of(i);
    if (thread->state == kInBallot || thread->state == kInShuffle) waiting = thread;
  }
  const uint32_t first = waiting->position.thread / kWarp * kWarp;
  const Thread* other = waiting;
  for (uint32_t i = first; i < first + kWarp; ++i)
    if (thread_of(i)->state != waiting->state) other = thread_of(i);
  char text[200];
  snprintf(text, sizeof text, "divergence: it %s, thread %u of its warp %s", doing(waiting->state),
           other->position.thread, doing(other->state));
  fail(waiting, text);
  doom();
}

// --- What is read --------------------------------------------------------------------------------

namespace {

std::atomic<const ReadCounts*> g_counts{nullptr};

}  // namespace

ReadCounts::ReadCounts(const void* begin, size_t piece, size_t pieces)
    : begin_(reinterpret_cast<uint64_t>(begin)), piece_(piece), counts_(pieces) {
  g_counts.store(this);
}

ReadCounts::~ReadCounts() { g_counts.store(nullptr); }

void ReadCounts::add(uint64_t address, size_t bytes) const {
  for (size_t i = 0; i < bytes; ++i) {
    const uint64_t at = (address + i - begin_) / piece_;
    if (at < counts_.size()) counts_[at].fetch_add(1, std::memory_order_relaxed);
  }
}

std::vector<uint64_t> ReadCounts::now() const { return {counts_.begin(), counts_.end()}; }

// --- simt.h -------------------------------------------------------------------------------------

const Position& position() { return running()->position; }
void meet_block() { running()->runner->meet_block(running()); }
uint32_t meet_ballot(bool p) {
  return static_cast<uint32_t>(running()->runner->meet_warp(running(), kInBallot, p, 0));
}
uint64_t meet_exchange(uint64_t v, uint32_t from) {
  return running()->runner->meet_warp(running(), kInShuffle, v, from);
}
char* block_memory() { return running()->runner->shared(); }
const void* readable(uint64_t address, size_t bytes) {
  if (const ReadCounts* counts = g_counts.load(std::memory_order_relaxed))
    counts->add(address, bytes);
  return running()->runner->access(running(), address, bytes, Access::kRead);
}
void* writable(uint64_t address, size_t bytes) {
  return running()->runner->access(running(), address, bytes, Access::kWrite);
}
uint32_t add_device(uint64_t address, uint32_t v) {
  void* at = running()->runner->access(running(), address, sizeof v, Access::kAdd);
  return __atomic_fetch_add(static_cast<uint32_t*>(at), v, __ATOMIC_RELAXED);
}

}  // namespace frugal::device::sim
