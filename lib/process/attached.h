// Processes that have attached to a controller.
#pragma once
#include <sys/types.h>

#include <algorithm>
#include <memory>

#include "base/sync.h"
#include "process/process_requests.h"
#include "process/trainer_requests.h"

namespace frugal {

// Which processes have large rings for calls outside steps.
class LargeRings {
 public:
  bool take(pid_t pid) {
    Lock lock(mu_);
    if (std::count(taken_.begin(), taken_.end(), pid) >= kLargeRings) return false;
    taken_.push_back(pid);
    return true;
  }
  void give(pid_t pid) noexcept {
    Lock lock(mu_);
    taken_.erase(std::find(taken_.begin(), taken_.end(), pid));
  }

 private:
  static constexpr ptrdiff_t kLargeRings = 2;  // of a process
  Mutex mu_;
  Vector<pid_t> taken_ GUARDED_BY(mu_);
};

// An attached process and what the controller keeps for it. Guarded by the server's lock.
struct Attached : HeapObject {
  Attached(std::shared_ptr<Engine> engine, LargeRings& rings, pid_t of, bool looks)
      : engine_(std::move(engine)),
        rings_(rings),
        pid_(of),
        observes(looks),
        large(!looks && rings.take(of)) {}
  const std::shared_ptr<Engine> engine_;
  uint64_t told = 0;     // its number in the arena's region publisher
  uint64_t watched = 0;  // its number in the watch; 0: none
  LargeRings& rings_;
  const pid_t pid_;
  const bool observes, large;                 // large: its rings are large
  bool gone = false;                          // it has ended, or its connection has
  std::unique_ptr<ProcessRequestLoop> calls;  // for calls outside steps
  Vector<std::unique_ptr<TrainerRequestLoop>> trainers;
  // Trainers that were cut off while the process lives. It may be suspended while it reads what
  // they hold.
  Vector<std::unique_ptr<TrainerRequestLoop>> replaced;
  Map<uint32_t, uint64_t> given_up;  // by rank: joins before this request are given up
  int pidfd = -1;
  ~Attached();
};

// The two ends of the socket on which a process receives regions, and a duplicate of its
// connection. This object closes those that it has not passed on.
struct Ends : HeapObject {
  int sockets[2] = {-1, -1}, connection = -1;
  std::shared_ptr<void> keep;
  Status open(int socket);
  ~Ends();
};

}  // namespace frugal
