// Batches of reads, writes and syncs of files, carried out by threads of their own.
//
// A thread fills a batch, submits it, goes on, and waits for it later. The requests of a batch are
// carried out in any order, several at once: a sync that must follow writes is in a later batch.
// The threads exist while the queue does.
#pragma once
#include "base/condition.h"
#include "base/thread.h"
#include "files/file.h"

namespace frugal {

struct IoRequest {
  enum class Kind { kRead, kWrite, kSync };
  Kind kind;
  File* file;
  uint64_t at = 0;
  char* bytes = nullptr;  // of a write it is only read
  size_t size = 0;
};

// The requests and their memory are the caller's, unchanged while the batch is submitted. A batch
// that is done can be used again.
class IoBatch {
 public:
  Vector<IoRequest> requests;

 private:
  friend class IoQueue;
  // Guarded by the queue's mutex.
  size_t next_ = 0;  // the first request that no thread has begun
  size_t left_ = 0;  // requests that are not done
  CallError error_;  // of the first request that failed
};

class IoQueue {
 public:
  IoQueue() = default;
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  Status open(uint32_t threads);
  // Throws if there is no memory; the batch is not submitted then.
  void submit(IoBatch* batch);
  // Waits until the batch is done. After a failure the requests that no thread had begun are left
  // out. Returns the first failure.
  Status wait(IoBatch* batch);
  bool is_done(const IoBatch* batch);
  // Leaves out the requests that no thread has begun; wait() returns CLOSED then.
  void cancel(IoBatch* batch);

 private:
  void run() noexcept;
  void give_up(IoBatch* batch) REQUIRES(mu_);

  Mutex mu_;
  Condition work_, ended_;
  List<IoBatch*> batches_ GUARDED_BY(mu_);  // with requests that no thread has begun
  bool closing_ GUARDED_BY(mu_) = false;
  Vector<Thread> threads_;
};

}  // namespace frugal
