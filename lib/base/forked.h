// Descriptors that a child made by fork() must not keep: close-on-exec does not help where nothing
// is executed. A child that kept a connection, a listening socket or a lock would make its dead
// parent look alive. They are closed in the child before fork() returns there.
//
// AtFork: what is called around each fork().
#pragma once
#include <atomic>

#include "base/sync.h"

namespace frugal {

// Functions that are called around each fork(): as a rule they take locks, so that a child gets
// them free. They are registered when the library is loaded, before a call can take such a lock.
//
//   constinit AtFork g_at_fork{before, in_parent, in_child};
//   [[gnu::constructor]] void at_load() { g_at_fork.at_load(); }
class AtFork {
 public:
  using Function = void (*)();
  constexpr AtFork(Function before, Function in_parent, Function in_child)
      : before_(before), in_parent_(in_parent), in_child_(in_child) {}
  void at_load() noexcept;
  // For calls that rely on it. Throws std::bad_alloc if the functions are not registered. If memory
  // was lacking at load, it tries again. No thread waits for one that tries: the latter may be a
  // thread of the parent.
  void ensure() {
    if (state_.load(std::memory_order_acquire) != kDone) register_now();
  }

 private:
  enum State { kNone, kTrying, kDone };
  void register_now();

  const Function before_, in_parent_, in_child_;
  std::atomic<int> state_{kNone};
};

class ForkedDescriptors {
 public:
  // make() returns a new descriptor, or -1. No fork happens until the descriptor is registered.
  template <class Make>
  static int open(Make make) {
    ensure();
    Lock lock(mutex());
    int fd = make();
    if (fd >= 0) add(fd);
    return fd;
  }
  // The same for two descriptors; make(fds) returns whether it made them.
  template <class Make>
  static bool open(int (&fds)[2], Make make) {
    ensure();
    Lock lock(mutex());
    if (!make(fds)) return false;
    for (int fd : fds)
      if (fd >= 0) add(fd);
    return true;
  }
  static void close(int fd) noexcept;  // also -1, or a descriptor that is not registered

 private:
  static void ensure();
  static Mutex& mutex();
  static void add(int fd) REQUIRES(mutex());
};

}  // namespace frugal
