#include "sim/streams.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "sim/order.h"

namespace frugal::device::sim {
namespace {

constexpr size_t kMaxNames = 256;  // of kernels

// Of streams and events, over all devices; none is used twice.
void* new_handle() {
  static std::atomic<uintptr_t> last{0x51000000};
  return reinterpret_cast<void*>(++last);
}

}  // namespace

Streams::~Streams() {
  Unseen unseen;
  events_.clear();
  streams_.clear();
  retired_.clear();
  default_.reset();
}

void Streams::end() {
  {
    Unseen unseen;
    for (auto& [handle, stream] : streams_) retired_.push_back(stream);
    if (default_) retired_.push_back(default_);
    for (const StreamRef& stream : retired_) stream->close();
  }
  for (const StreamRef& stream : retired_) stream->join();
}

// What a thread runs is seen, the table of streams is not.
Streams::StreamRef Streams::make() {
  uint64_t seed;
  Delays delays;
  {
    Unseen unseen;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto ended = [](const StreamRef& stream) {
      if (!stream->ended()) return false;
      stream->join();
      return true;
    };
    retired_.erase(std::remove_if(retired_.begin(), retired_.end(), ended), retired_.end());
    seed = mix(seed_ + mix(++created_));
    delays = delays_;
  }
  auto stream = std::make_shared<StreamThread>(health_, seed, delays);
  stream->start();
  return stream;
}

// `mutex_` is held.
void Streams::retire(const StreamRef& stream) {
  retired_.push_back(stream);
  stream->close();
}

void Streams::create(Priority priority, Stream* out) {
  StreamRef stream = make();
  stream->priority = priority;
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  out->handle = new_handle();
  streams_.emplace(out->handle, std::move(stream));
  ++streams_ever_;
}

// As in CUDA it returns at once, and what the stream still has to do is done.
bool Streams::destroy(Stream s) {
  Unseen unseen;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto at = streams_.find(s.handle);
  if (at == streams_.end()) return false;
  retire(at->second);
  streams_.erase(at);
  return true;
}

void Streams::create(Event* out) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  out->handle = new_handle();
  events_.emplace(out->handle, nullptr);
  ++events_ever_;
}

bool Streams::destroy(Event e) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  return events_.erase(e.handle) != 0;
}

// Null: no such stream. The lock is held.
Streams::StreamRef Streams::find(Stream s) {
  if (!s.handle) return default_;
  const auto at = streams_.find(s.handle);
  return at == streams_.end() ? nullptr : at->second;
}

void Streams::need_default() {
  {
    Unseen unseen;
    std::lock_guard<std::mutex> lock(mutex_);
    if (default_) return;
  }
  StreamRef stream = make();
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  if (default_)
    retire(stream);
  else
    default_ = std::move(stream);
}

Result Streams::enqueue(const char* call, Stream s, std::unique_ptr<Operation> operation,
                        const Event* event) {
  if (!s.handle) need_default();
  release_order(operation.get());
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  const StreamRef stream = find(s);
  if (!stream) return misuse(call, kInvalidHandle, "no such stream");
  if (stream->capturing) {
    ++violations_;
    return misuse(call, kCaptureUnsupported, "the stream is being captured");
  }
  if (!event) {
    if (operation->kind != Operation::Kind::kWait)
      given_.emplace(operation->kind == Operation::Kind::kKernel ? operation->kernel->name : call,
                     stream->priority);
    stream->add(std::move(operation));
    return {};
  }
  const auto at = events_.find(event->handle);
  if (at == events_.end()) return misuse(call, kInvalidHandle, "no such event");
  const MarkRef mark = operation->mark;
  mark->stream = stream;
  mark->position = stream->add(std::move(operation));
  at->second = mark;
  return {};
}

Result Streams::mark_of(const char* call, Event e, MarkRef* out) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = events_.find(e.handle);
  if (at == events_.end()) return misuse(call, kInvalidHandle, "no such event");
  *out = at->second;
  return {};
}

Result Streams::capturing(Stream s, bool* out) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  const StreamRef stream = find(s);
  if (s.handle && !stream) return misuse("capturing", kInvalidHandle, "no such stream");
  *out = stream && stream->capturing;
  return {};
}

void Streams::set_seed(uint64_t seed) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  seed_ = seed;
  created_ = 0;
}

void Streams::set_delays(const Delays& delays) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  delays_ = delays;
  for (auto& [handle, stream] : streams_) stream->set_delays(delays);
  if (default_) default_->set_delays(delays);
}

void Streams::set_capturing(Stream s, bool capturing) {
  if (!s.handle) need_default();
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  if (const StreamRef stream = find(s)) stream->capturing = capturing;
}

uint64_t Streams::capture_violations() const {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  return violations_;
}

void Streams::count(Live* live) const {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  live->streams = streams_.size();
  live->events = events_.size();
  live->streams_ever = streams_ever_;
  live->events_ever = events_ever_;
}

std::vector<std::string> Streams::launched() const {
  std::vector<const char*> names(kMaxNames, nullptr);
  {
    Unseen unseen;
    std::lock_guard<std::mutex> lock(mutex_);
    size_t n = 0;
    for (const auto& [name, priority] : given_)
      if (name != kCopy && name != kFill && n < kMaxNames && (n == 0 || names[n - 1] != name))
        names[n++] = name;
  }
  std::vector<std::string> out;
  for (const char* name : names)
    if (name) out.push_back(name);
  return out;
}

std::vector<Priority> Streams::priorities(const char* of) const {
  constexpr Priority kAll[] = {Priority::kLow, Priority::kNormal, Priority::kHigh};
  bool found[std::size(kAll)] = {};
  {
    Unseen unseen;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [name, priority] : given_)
      if (strcmp(name, of) == 0) found[static_cast<int32_t>(priority)] = true;
  }
  std::vector<Priority> out;
  for (const Priority p : kAll)
    if (found[static_cast<int32_t>(p)]) out.push_back(p);
  return out;
}

}  // namespace frugal::device::sim
