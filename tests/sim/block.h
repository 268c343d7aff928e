// Runs kernels: every thread of a block is a fiber.
//
// What: the blocks of a kernel run one after the other, in random order, on the thread of their
// stream; within a block, the thread that goes on after a meeting is random. simt.h's functions end
// here. A thread runs until it meets others or returns, so a block's threads interleave at meetings
// only; that races do not stay hidden for it is ThreadSanitizer's part, to which each fiber is a
// thread of its own and nothing but sync() orders two of them, in a block or in two. Invariants: a
// fault ends the kernel: all its threads leave their bodies by an exception, which no body catches.
// Nothing is allocated for a block once a block of that size has run. Threads: a BlockRunner
// belongs to one thread. Callers: stream.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <vector>

#include "device/runtime.h"
#include "device/simt.h"
#include "sim/fiber.h"
#include "sim/memory.h"
#include "sim/random.h"
#include "sim/sim.h"

namespace frugal::device::sim {

inline constexpr uint32_t kMaxThreads = 1024;
inline constexpr uint32_t kMaxShared = 48 << 10;  // what needs no opting in on any GPU
inline constexpr size_t kMaxArguments = 4096;
inline constexpr size_t kFaultText = 400;

class BlockRunner {
 public:
  explicit BlockRunner(int32_t device) : device_(device) {}
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;

  // False: a fault, whose text is in `fault`, an array of kFaultText bytes; or no memory for the
  // fibers.
  bool run(const KernelEntry& kernel, const Shape& shape, const void* arguments, Random* random,
           char* fault);

  // For simt.h's functions, of the running fiber.
  struct Thread;
  void meet_block(Thread* thread);
  // In `state`, which names the kind of meeting: the ballot, or the value of lane `from`.
  uint64_t meet_warp(Thread* thread, uint32_t state, uint64_t value, uint32_t from);
  void* access(Thread* thread, uint64_t address, size_t bytes, Access access);
  char* shared() const { return shared_; }

 private:
  struct Warp;
  bool grow(const Shape& shape);
  void forget_block();
  void run_block(uint32_t block);
  static void enter();
  void body();
  [[noreturn]] void leave(Thread* thread);
  Thread* thread_of(uint32_t index);
  void release(Thread* thread);
  void release_block();
  Thread* pick();
  void wait(Thread* thread);
  bool is_doomed() const;
  void doom();
  void diverged();
  void fail(const Thread* thread, const char* text);
  [[noreturn]] void fail_access(Thread* thread, uint64_t address, size_t bytes, Access access);

  const int32_t device_;
  Section section_;
  Fiber main_;
  Thread* threads_ = nullptr;  // kMaxThreads of them, mapped with the first kernel
  Warp* warps_ = nullptr;
  uint32_t* ready_ = nullptr;  // threads that can go on
  char* arguments_ = nullptr;
  char* shared_ = nullptr;
  char* memory_ = nullptr;  // of all these
  size_t memory_bytes_ = 0;
  std::unique_ptr<FiberSet> fibers_;

  const KernelEntry* kernel_ = nullptr;
  Shape shape_;
  Random* random_ = nullptr;
  char* fault_ = nullptr;
  std::vector<uint32_t> order_;
  uint32_t ready_count_ = 0, arrived_ = 0, returned_ = 0;
  uint32_t rotation_ = 0, half_ = 0;  // which fibers the block's threads are
  bool in_order_ = false;
  bool doomed_ = false;
  char* met_ = nullptr;         // the order of the block's sync()
  char began_ = 0, ended_ = 0;  // orders: the start and the end of a kernel
};

}  // namespace frugal::device::sim
