// Threads of a trainer process that share its loops over chunks. They sleep while there are none.
#pragma once
#include <atomic>

#include "base/condition.h"
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
  // Runs chunks 0 .. chunks - 1 on the caller and idle helpers. While one caller has the helpers,
  // other callers run their chunks alone.
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

  Mutex one_ ACQUIRED_BEFORE(mu_), mu_;  // one_: a loop has the helpers, or they start or stop
  Condition wake_, done_;
  Loop* loop_ GUARDED_BY(mu_) = nullptr;  // under way
  std::atomic<uint32_t> inside_{0};       // helpers that work on it; written under mu_
  bool waits_ GUARDED_BY(mu_) = false;    // the caller waits for them
  std::atomic<uint64_t> loops_{0};
  bool stopping_ GUARDED_BY(mu_) = false;
  Vector<Thread> threads_;
  Processors processors_;               // of the thread that started them
  int kept_off_ GUARDED_BY(one_) = -1;  // the processor that helpers avoid
};

}  // namespace frugal
