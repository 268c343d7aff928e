// Streams: each a thread that runs its operations in order, at random moments.
//
// What: operations start after random delays; some are held until a thread waits for them or for
// what follows, or for some time at most, so that nothing ever waits for ever. A Mark is one record
// of an event. When the device has failed, operations are passed over, and marks still pass.
// Threads: any. All waiting is for the streams' own progress, never for the caller's. Callers:
// runtime.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "base/condition.h"
#include "base/thread.h"
#include "device/runtime.h"
#include "sim/block.h"
#include "sim/memory.h"
#include "sim/random.h"
#include "sim/sim.h"

namespace frugal::device::sim {

// What streams share with their device.
class Health {
 public:
  explicit Health(int32_t device_in) : device(device_in) {}
  // The first fault stays. `text` is at most kFaultText bytes.
  void fail(const char* text);
  bool failed() const { return state_.load() == 2; }
  // For failed(): waits until nothing runs any more, and nothing will. ThreadSanitizer sees what
  // ran as before what follows. No event says so, and without it the memory could never be used
  // again.
  const char* await_idle();
  // Around an operation that accesses memory. False: it must not run.
  bool enter();
  void leave();
  const int32_t device;

 private:
  std::atomic<uint32_t> state_{0};  // 1: the text is being written, 2: failed
  std::atomic<uint32_t> running_{0};
  char text_[kFaultText] = {};
};

class StreamThread;

struct Mark {
  std::shared_ptr<StreamThread> stream;
  uint64_t position = 0;  // of its operation in the stream
  uint32_t queries = 0;
  bool passed = false;  // under the stream's lock
};

struct Operation {
  enum class Kind { kKernel, kCopy, kFill, kRecord, kWait } kind = Kind::kKernel;
  const KernelEntry* kernel = nullptr;
  Shape shape;
  std::vector<char> arguments;
  uint64_t to = 0, from = 0;
  size_t bytes = 0;
  int value = 0;
  std::shared_ptr<Mark> mark;
};

class StreamThread : public std::enable_shared_from_this<StreamThread> {
 public:
  StreamThread(std::shared_ptr<Health> health, uint64_t seed, const Delays& delays);
  ~StreamThread();
  // Throws what Thread throws.
  void start();
  // Runs what is there, then ends. Returns at once.
  void close();
  bool ended();
  // After close(), from another thread.
  void join();

  // From the next operation on.
  void set_delays(const Delays& delays);
  // Returns its position. Callers have reported the operation's order, and are unseen now.
  uint64_t add(std::unique_ptr<Operation> operation);
  // Waits until the mark has passed; false: timeout_ns are over. 0: asks.
  static bool wait(const std::shared_ptr<Mark>& mark, uint64_t timeout_ns);

  std::atomic<bool> capturing{false};
  Priority priority = Priority::kNormal;  // is recorded, and changes nothing

 private:
  void loop();
  Operation* next(uint64_t* position);
  void delay(uint64_t position);
  void run(Operation* operation);
  void copy(const Operation& operation);
  char* resolve(const char* call, uint64_t address, size_t bytes, Access access);
  void demand(uint64_t position);  // the lock is held

  const std::shared_ptr<Health> health_;
  Random random_;
  BlockRunner runner_;
  Section section_;
  bool yields_ = false;  // of the operation that runs
  Thread thread_;

  std::mutex mutex_;
  Condition work_;    // the stream's thread waits: for operations, or held
  Condition passed_;  // others wait for marks
  std::deque<Operation*> queue_;
  uint64_t added_ = 0, taken_ = 0, demanded_ = 0;
  bool closing_ = false, ended_ = false;
  Delays delays_;
};

}  // namespace frugal::device::sim
