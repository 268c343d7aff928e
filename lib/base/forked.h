// Descriptors that a child made by fork() must not keep: close-on-exec does not help where nothing
// is executed. A child that kept a connection, a listening socket or a lock would make its dead
// parent look alive. They are closed in the child before fork() returns there.
#pragma once
#include "base/sync.h"

namespace frugal {

class ForkedDescriptors {
 public:
  // make() returns a new descriptor, or -1. No fork happens until the descriptor is registered.
  template <class Make>
  static int open(Make make) {
    Lock lock(mutex());
    int fd = make();
    if (fd >= 0) add(fd);
    return fd;
  }
  // The same for two descriptors; make(fds) returns whether it made them.
  template <class Make>
  static bool open(int (&fds)[2], Make make) {
    Lock lock(mutex());
    if (!make(fds)) return false;
    for (int fd : fds)
      if (fd >= 0) add(fd);
    return true;
  }
  static void close(int fd) noexcept;  // also -1, or a descriptor that is not registered

 private:
  static Mutex& mutex();
  static void add(int fd) REQUIRES(mutex());
};

}  // namespace frugal
