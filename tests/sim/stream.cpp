#include "sim/stream.h"

#include <fenv.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <string>

#include "base/thread.h"
#include "sim/order.h"

namespace frugal::device::sim {
namespace {

void sleep_us(uint32_t us) {
  const timespec time = {us / 1'000'000, static_cast<long>(us % 1'000'000) * 1000};
  nanosleep(&time, nullptr);
}

}  // namespace

void Health::fail(const char* text) {
  uint32_t none = 0;
  if (!state_.compare_exchange_strong(none, 1)) return;
  snprintf(text_, sizeof text_, "%s", text);
  state_.store(2);
}

const char* Health::await_idle() {
  while (running_.load(std::memory_order_relaxed) > 0) sleep_us(20);
  acquire_order(&running_);
  return text_;
}

bool Health::enter() {
  Unseen unseen;
  ++running_;
  if (!failed()) return true;
  --running_;
  return false;
}

void Health::leave() {
  release_order(&running_);
  Unseen unseen;
  --running_;
}

StreamThread::StreamThread(std::shared_ptr<Health> health, uint64_t seed, const Delays& delays)
    : health_(std::move(health)), random_(seed), runner_(health_->device), delays_(delays) {}

StreamThread::~StreamThread() {
  for (Operation* operation : queue_) delete operation;
}

void StreamThread::start() {
  thread_ = quiet_thread([this] { loop(); });
}

void StreamThread::close() {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
  work_.notify_all();
}

bool StreamThread::ended() {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_;
}

void StreamThread::join() {
  if (thread_.joinable()) thread_.join();
}

void StreamThread::set_delays(const Delays& delays) {
  std::lock_guard<std::mutex> lock(mutex_);
  delays_ = delays;
}

uint64_t StreamThread::add(std::unique_ptr<Operation> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(operation.get());
  operation.release();
  work_.notify_all();
  return ++added_;
}

void StreamThread::demand(uint64_t position) {
  if (demanded_ >= position) return;
  demanded_ = position;
  work_.notify_all();
}

bool StreamThread::wait(const std::shared_ptr<Mark>& mark, uint64_t timeout_ns) {
  bool passed;
  {
    Unseen unseen;
    StreamThread& stream = *mark->stream;
    std::unique_lock<std::mutex> lock(stream.mutex_);
    // Repeated queries count as a wait, too.
    if (timeout_ns > 0 || ++mark->queries > 3) stream.demand(mark->position);
    if (timeout_ns > 0 && !mark->passed) {
      stream.passed_.wait_until(lock, now_ns() + std::min<uint64_t>(timeout_ns, uint64_t{1} << 60),
                                [&] { return mark->passed; });
    }
    passed = mark->passed;
  }
  if (passed) acquire_order(mark.get());
  return passed;
}

Operation* StreamThread::next(uint64_t* position) {
  Unseen unseen;
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait(lock, [&] { return !queue_.empty() || closing_; });
  if (queue_.empty()) {
    ended_ = true;
    return nullptr;
  }
  Operation* operation = queue_.front();
  queue_.pop_front();
  *position = ++taken_;
  return operation;
}

void StreamThread::delay(uint64_t position) {
  Unseen unseen;
  const uint32_t roll = random_.below(100);
  std::unique_lock<std::mutex> lock(mutex_);
  const Delays delays = delays_;
  yields_ = delays.yields > 0;
  if (roll < delays.holds) {
    work_.wait_until(lock, now_ns() + uint64_t{1000} * delays.hold_us,
                     [&] { return demanded_ >= position || closing_ || health_->failed(); });
    return;
  }
  lock.unlock();
  if (roll < delays.holds + delays.sleeps) {
    sleep_us(random_.below(delays.sleep_us + 1));
  } else if (roll < delays.holds + delays.sleeps + delays.yields) {
    for (uint32_t n = random_.below(8); n > 0; --n) sched_yield();
  }
}

void StreamThread::loop() {
  fesetenv(FE_DFL_ENV);
  uint64_t position = 0;
  while (Operation* operation = next(&position)) {
    delay(position);
    acquire_order(operation);
    run(operation);
    Unseen unseen;
    delete operation;
  }
}

void StreamThread::run(Operation* operation) {
  switch (operation->kind) {
    case Operation::Kind::kRecord: {
      Mark* mark = operation->mark.get();
      release_order(mark);
      Unseen unseen;
      std::lock_guard<std::mutex> lock(mutex_);
      mark->passed = true;
      passed_.notify_all();
      return;
    }
    case Operation::Kind::kWait:
      wait(operation->mark, UINT64_MAX);
      return;
    case Operation::Kind::kKernel:
      if (health_->enter()) {
        char fault[kFaultText];
        if (!runner_.run(*operation->kernel, operation->shape, operation->arguments.data(),
                         &random_, fault))
          health_->fail(fault);
        health_->leave();
      }
      return;
    case Operation::Kind::kCopy:
    case Operation::Kind::kFill:
      if (health_->enter()) {
        copy(*operation);
        health_->leave();
      }
      return;
  }
}

char* StreamThread::resolve(const char* call, uint64_t address, size_t bytes, Access access) {
  const Range* range = section_.find(address, bytes);
  if (range && range->allows(health_->device, access))
    return reinterpret_cast<char*>(address + range->offset);
  Unseen unseen;
  char text[kFaultText];
  snprintf(text, sizeof text, "%s: %s of %zu bytes at 0x%llx: %s", call,
           access == Access::kRead ? "read" : "write", bytes,
           static_cast<unsigned long long>(address),
           why_not(health_->device, address, bytes, access).c_str());
  health_->fail(text);
  return nullptr;
}

// In up to four pieces, in any order, as nothing orders the bytes of a copy.
void StreamThread::copy(const Operation& operation) {
  const bool fills = operation.kind == Operation::Kind::kFill;
  const char* call = fills ? "fill" : "copy";
  section_.begin();
  char* to = resolve(call, operation.to, operation.bytes, Access::kWrite);
  const char* from = nullptr;
  if (to && !fills) from = resolve(call, operation.from, operation.bytes, Access::kRead);
  if (to && (fills || from)) {
    const size_t pieces = operation.bytes < 64 ? 1 : 1 + random_.below(4);
    const size_t piece = (operation.bytes + pieces - 1) / pieces;
    const size_t first = random_.below(static_cast<uint32_t>(pieces));
    for (size_t i = 0; i < pieces; ++i) {
      const size_t at = (first + i) % pieces * piece;
      if (at >= operation.bytes) continue;
      const size_t bytes = std::min(piece, operation.bytes - at);
      if (fills)
        memset(to + at, operation.value, bytes);
      else
        memcpy(to + at, from + at, bytes);
      if (pieces > 1 && yields_) sched_yield();
    }
  }
  section_.end();
}

}  // namespace frugal::device::sim
