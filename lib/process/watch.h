// Tells when processes end. One thread sleeps until one does.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "base/heap.h"
#include "base/status.h"
#include "base/thread.h"

namespace frugal {

// Threads: any.
class Watch : public HeapObject {
 public:
  static Status open(std::unique_ptr<Watch>* out);
  // Waits for a callback that runs; not called from one.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Calls `gone` once, on the thread of the watch, when the process has ended (as a zombie, too); if it
  // has already, then soon. The descriptor is the watch's on success. `gone` is
  // called again when it throws, for a second.
  Status add(int process_fd, std::function<void()> gone, uint64_t* id);
  // Afterwards the callback does not run and will not: waits while it does, unless it is the caller.
  void remove(uint64_t id);

 private:
  struct Entry {
    int fd;
    std::function<void()> gone;
  };
  Watch() = default;
  void loop();

  int poll_ = -1, stop_ = -1;  // epoll, eventfd
  std::mutex mutex_;
  std::condition_variable returned_;
  Map<uint64_t, Entry> entries_;
  uint64_t last_id_ = 0;
  uint64_t running_ = 0;  // the entry whose callback runs
  Thread thread_;
};

}  // namespace frugal
