// Reports when processes end, and when sockets have something to read. One thread sleeps until
// then.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include "base/condition.h"
#include "base/heap.h"
#include "base/status.h"
#include "base/thread.h"

namespace frugal {

// Threads: any.
class Watch : public HeapObject {
 public:
  static Status open(std::unique_ptr<Watch>* out);
  // Waits for a running callback. Must not be called from one.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Calls `gone` once, on the thread of the watch, when the process has ended (as a zombie, too),
  // or soon if it has ended already. If `gone` throws, it is called again, for a second. On success
  // the watch owns the descriptor.
  Status add(int process_fd, std::function<void()> gone, uint64_t* id);
  // Calls `some`, which must not throw, whenever there is something to read, and once more when the
  // other end is closed. It is called again soon if it leaves something. On success the watch owns
  // the descriptor (ForkedDescriptors).
  Status follow(int socket, std::function<void()> some, uint64_t* id);
  // Afterwards the callback does not run any more. Waits while it runs, unless the caller is that
  // callback; only a callback of add() may be the caller.
  void remove(uint64_t id);

 private:
  struct Entry {
    int fd;
    std::function<void()> gone;  // or some
    bool stays;
  };
  Watch() = default;
  Status enter(int fd, std::function<void()> call, bool stays, uint64_t* id);
  void loop();

  int poll_ = -1, stop_ = -1;  // epoll, eventfd
  Mutex mutex_;
  Condition returned_;
  Map<uint64_t, Entry> entries_ GUARDED_BY(mutex_);
  uint64_t last_id_ GUARDED_BY(mutex_) = 0;
  uint64_t running_ GUARDED_BY(mutex_) = 0;  // the entry whose callback runs
  Thread thread_;
};

}  // namespace frugal
