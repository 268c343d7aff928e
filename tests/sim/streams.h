// The streams and events of a device of the host implementation: which there are, and what they
// were given.
//
// What: handles; the default stream, made when first needed; the order of what is given to a
// stream, and what an event stands for; captures. Streams that were destroyed end their work.
// Threads: any. Threads that call are ordered by the lock only where ThreadSanitizer does not see.
// Callers: sim.cpp.
#pragma once

#include <stdint.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/stream.h"

namespace frugal::device::sim {

// The codes that CUDA has for it.
enum Code : int32_t {
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidConfiguration = 9,
  kInvalidDeviceFunction = 98,
  kNoSuchDevice = 101,
  kInvalidHandle = 400,
  kLaunchFailure = 719,
  kAlreadyRegistered = 712,
  kCaptureUnsupported = 900,
};

inline Result misuse(const char* call, int32_t code, const char* text) {
  return {ErrorKind::kMisuse, code, call, text};
}

class Streams {
 public:
  using MarkRef = std::shared_ptr<Mark>;
  static constexpr char kCopy[] = "copy", kFill[] = "fill";

  explicit Streams(std::shared_ptr<Health> health) : health_(std::move(health)) {}
  ~Streams();
  // Waits until all have done what they have to do. They are given no more.
  void end();

  // Throw what a thread throws, and for lack of memory.
  void create(Priority priority, Stream* out);
  void create(Event* out);
  // False: there is none.
  bool destroy(Stream s);
  bool destroy(Event e);
  // With an event, its record: the operation's mark becomes what the event stands for.
  Result enqueue(const char* call, Stream s, std::unique_ptr<Operation> operation,
                 const Event* event);
  // What was recorded last; null: nothing.
  Result mark_of(const char* call, Event e, MarkRef* out);
  Result capturing(Stream s, bool* out);

  void set_seed(uint64_t seed);
  void set_delays(const Delays& delays);
  void set_capturing(Stream s, bool capturing);
  uint64_t capture_violations() const;
  void count(Live* live) const;
  std::vector<std::string> launched() const;
  std::vector<Priority> priorities(const char* of) const;

 private:
  using StreamRef = std::shared_ptr<StreamThread>;
  StreamRef make();
  void retire(const StreamRef& stream);
  StreamRef find(Stream s);
  void need_default();

  const std::shared_ptr<Health> health_;
  mutable std::mutex mutex_;  // what follows
  std::unordered_map<void*, StreamRef> streams_;
  std::unordered_map<void*, MarkRef> events_;  // and their last records
  std::vector<StreamRef> retired_;             // destroyed, may still work
  StreamRef default_;
  uint64_t seed_ = 1, created_ = 0, violations_ = 0;
  Delays delays_;
  uint64_t streams_ever_ = 0, events_ever_ = 0;
  // Names, static: of kernels, kCopy, kFill; and the priorities of the streams that were given
  // them.
  std::set<std::pair<const char*, Priority>> given_;
};

}  // namespace frugal::device::sim
