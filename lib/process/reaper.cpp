#include "process/reaper.h"

#include <algorithm>

#include "base/assert.h"

namespace frugal {

Status Reaper::start() {
  try {
    thread_ = quiet_thread([this] { loop(); });
    return FRUGAL_OK;
  } catch (...) {
    return no_thread("a thread of the controller");
  }
}

void Reaper::reserve(size_t ranks) {
  Lock lock(mu_);
  silent_.reserve(ranks);  // one of a rank, until it is taken out
}

void Reaper::lose_async(const TrainerRef& trainer) {
  Lock lock(mu_);
  if (std::find(silent_.begin(), silent_.end(), trainer) == silent_.end()) {
    FRUGAL_ASSERT(silent_.size() < silent_.capacity());  // nothing wants memory
    silent_.push_back(trainer);
  }
  silence_.notify_one();
}

bool Reaper::has(uint32_t rank) {
  Lock lock(mu_);
  return std::any_of(silent_.begin(), silent_.end(),
                     [&](const TrainerRef& t) { return t->rank == rank; });
}

void Reaper::stop() {
  if (!thread_.joinable()) return;
  {
    Lock lock(mu_);
    stopping_ = true;
    silence_.notify_one();
  }
  thread_.join();
}

void Reaper::loop() {
  UniqueLock lock(mu_);
  for (;;) {
    silence_.wait(lock, [&]() REQUIRES(mu_) { return stopping_ || !silent_.empty(); });
    if (stopping_) return;
    const TrainerRef trainer = silent_.front();
    lock.unlock();
    owner_.reap(trainer);
    lock.lock();
    FRUGAL_ASSERT(silent_.front() == trainer);
    silent_.erase(silent_.begin());
    lock.unlock();
    owner_.reaped();
    lock.lock();
  }
}

}  // namespace frugal
