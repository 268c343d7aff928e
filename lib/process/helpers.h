// Threads of a trainer process that share its loops over chunks. They sleep while there are none.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/thread.h"

namespace frugal {

class Helpers {
 public:
  ~Helpers() { stop(); }
  Status start(uint32_t threads);
  void stop();
  // Runs chunks 0 .. chunks - 1, the caller and idle helpers together. Of several callers at once
  // those that come later run theirs alone.
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context);

 private:
  struct Loop {
    void (*run)(void*, size_t) = nullptr;
    void* context = nullptr;
    size_t chunks = 0;
    std::atomic<size_t> next{0};
    std::atomic<Status> status{FRUGAL_OK};
    void work() noexcept;
  };
  void main();

  std::mutex mu_, one_;       // one_: the loop that has helpers, or they begin or end
  std::condition_variable wake_, done_;
  Loop* loop_ = nullptr;      // under way; mu_
  std::atomic<uint32_t> inside_{0};  // helpers that work on it; written under mu_
  bool waits_ = false;        // the caller, for them; mu_
  std::atomic<uint64_t> loops_{0};
  bool stopping_ = false;
  Vector<Thread> threads_;
  Processors processors_;     // of who has started them
  int kept_off_ = -1;         // the processor; one_
};

}  // namespace frugal
