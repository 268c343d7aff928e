#include "files/io_queue.h"

#include <algorithm>

#include "base/assert.h"

namespace frugal {
namespace {

Status carry_out(const IoRequest& request) {
  switch (request.kind) {
    case IoRequest::Kind::kRead:
      return request.file->read(request.at, request.bytes, request.size);
    case IoRequest::Kind::kWrite:
      return request.file->write(request.at, request.bytes, request.size);
    case IoRequest::Kind::kSync:
      return request.file->sync();
  }
  return FRUGAL_ERR_INTERNAL;
}

}  // namespace

Status IoQueue::open(uint32_t threads) try {
  threads_.reserve(threads);
  while (threads_.size() < threads) threads_.push_back(quiet_thread([this] { run(); }));
  return FRUGAL_OK;
} catch (const std::system_error& e) {
  return no_thread("threads that read and write files", e.code().value());
}

IoQueue::~IoQueue() {
  {
    Lock lock(mu_);
    FRUGAL_ASSERT(batches_.empty());
    closing_ = true;
  }
  work_.notify_all();
  for (Thread& thread : threads_) thread.join();
}

void IoQueue::submit(IoBatch* batch) {
  Lock lock(mu_);
  FRUGAL_ASSERT(batch->left_ == 0);
  if (!batch->requests.empty()) batches_.push_back(batch);
  batch->next_ = 0;
  batch->left_ = batch->requests.size();
  batch->error_ = {};
  work_.notify_all();
}

void IoQueue::give_up(IoBatch* batch) {
  const size_t unbegun = batch->requests.size() - batch->next_;
  if (unbegun == 0) return;
  batches_.remove(batch);
  batch->next_ += unbegun;
  batch->left_ -= unbegun;
}

Status IoQueue::wait(IoBatch* batch) {
  UniqueLock lock(mu_);
  ended_.wait(lock, [&]() REQUIRES(mu_) { return batch->left_ == 0; });
  return batch->error_.status ? fail_as(batch->error_) : FRUGAL_OK;
}

bool IoQueue::is_done(const IoBatch* batch) {
  Lock lock(mu_);
  return batch->left_ == 0;
}

void IoQueue::cancel(IoBatch* batch) {
  Lock lock(mu_);
  if (batch->left_ == 0) return;
  if (batch->error_.status == FRUGAL_OK) {
    fail(FRUGAL_ERR_CLOSED, "reads or writes of files were canceled");
    batch->error_ = recorded_error();
  }
  give_up(batch);
  ended_.notify_all();
}

void IoQueue::run() noexcept {
  UniqueLock lock(mu_);
  for (;;) {
    work_.wait(lock, [&]() REQUIRES(mu_) { return closing_ || !batches_.empty(); });
    if (batches_.empty()) return;
    IoBatch* const batch = batches_.front();
    const IoRequest& request = batch->requests[batch->next_++];
    if (batch->next_ == batch->requests.size()) batches_.pop_front();
    lock.unlock();
    const Status status = carry_out(request);
    lock.lock();
    --batch->left_;
    if (status && batch->error_.status == FRUGAL_OK) {
      batch->error_ = recorded_error();
      give_up(batch);
    }
    if (batch->left_ == 0) ended_.notify_all();
  }
}

}  // namespace frugal
