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
  unresponsive_.reserve(ranks);  // at most one for each rank, until it is removed
}

void Reaper::lose_async(const TrainerRef& trainer) {
  Lock lock(mu_);
  if (std::find(unresponsive_.begin(), unresponsive_.end(), trainer) == unresponsive_.end()) {
    FRUGAL_ASSERT(unresponsive_.size() < unresponsive_.capacity());  // this takes no memory
    unresponsive_.push_back(trainer);
  }
  wake_.notify_one();
}

bool Reaper::has(uint32_t rank) {
  Lock lock(mu_);
  return std::any_of(unresponsive_.begin(), unresponsive_.end(),
                     [&](const TrainerRef& t) { return t->rank == rank; });
}

void Reaper::stop() {
  if (!thread_.joinable()) return;
  {
    Lock lock(mu_);
    stopping_ = true;
    wake_.notify_one();
  }
  thread_.join();
}

void Reaper::loop() {
  UniqueLock lock(mu_);
  for (;;) {
    wake_.wait(lock, [&]() REQUIRES(mu_) { return stopping_ || !unresponsive_.empty(); });
    if (stopping_) return;
    const TrainerRef trainer = unresponsive_.front();
    lock.unlock();
    owner_.reap(trainer);
    lock.lock();
    FRUGAL_ASSERT(unresponsive_.front() == trainer);
    unresponsive_.erase(unresponsive_.begin());
    lock.unlock();
    owner_.reaped();
    lock.lock();
  }
}

}  // namespace frugal
