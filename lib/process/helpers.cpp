#include "process/helpers.h"

#include "base/assert.h"
#include "base/os.h"

namespace frugal {
namespace {

constexpr uint64_t kHelperSpinNs = 10000;  // before a helper sleeps: a step's calls follow closely
constexpr uint64_t kLastNs = 50000;        // before the caller sleeps: the last chunks are running

}  // namespace

Status Helpers::start(uint32_t threads) {
  processors_ = Processors::mine();
  try {
    threads_.reserve(threads);
    for (uint32_t i = 0; i < threads; ++i) threads_.push_back(quiet_thread([this] { main(); }));
  } catch (...) {
    stop();
    return no_threads(threads);
  }
  return FRUGAL_OK;
}

void Helpers::stop() {
  {
    Lock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_all();
  Lock mine(one_);
  for (Thread& t : threads_) t.join();
  threads_.clear();
}

void Helpers::Loop::work() noexcept {
  for (;;) {
    const size_t i = next.fetch_add(1, std::memory_order_relaxed);
    if (i >= chunks) return;
    Status s = FRUGAL_OK;
    try {
      run(context, i);
    } catch (const std::bad_alloc&) {
      s = FRUGAL_ERR_OUT_OF_MEMORY;
    } catch (...) {
      s = FRUGAL_ERR_INTERNAL;
    }
    Status none = FRUGAL_OK;
    if (s != FRUGAL_OK) status.compare_exchange_strong(none, s);
  }
}

void Helpers::main() {
  os_brief_thread();
  uint64_t seen = 0;
  UniqueLock lock(mu_);
  for (;;) {
    if (!loop_) {
      const uint64_t count = loops_.load();
      if (count == seen && !stopping_) {
        lock.unlock();
        for (uint64_t until = now_ns() + kHelperSpinNs;
             loops_.load(std::memory_order_relaxed) == seen && now_ns() < until;)
          cpu_relax();
        lock.lock();
      }
      if (!loop_) wake_.wait(lock, [&]() REQUIRES(mu_) { return loop_ || stopping_; });
    }
    if (stopping_) return;
    seen = loops_.load();
    Loop* loop = loop_;
    inside_.fetch_add(1);
    lock.unlock();
    loop->work();
    lock.lock();
    if (loop_ == loop) loop_ = nullptr;  // all chunks are taken
    if (inside_.fetch_sub(1) == 1 && waits_) done_.notify_all();
  }
}

Status Helpers::parallel(size_t chunks, void (*run)(void*, size_t), void* context) {
  Loop loop;
  loop.run = run;
  loop.context = context;
  loop.chunks = chunks;
  UniqueLock mine(one_, std::defer_lock);
  const bool shared = chunks > 1 && mine.try_lock() && !threads_.empty();
  if (shared) {
    one_.assert_held();
    // The system may take an idle processor for a busy one, as in a virtual machine, and let a
    // helper wait for the caller's processor.
    if (const int on = os_processor(); on != kept_off_) {
      for (Thread& t : threads_) processors_.but(on).bind(&t);
      kept_off_ = on;
    }
    {
      Lock lock(mu_);
      FRUGAL_ASSERT(!loop_ && inside_.load() == 0);
      loop_ = &loop;
      loops_.fetch_add(1);
    }
    wake_.notify_all();
  }
  loop.work();
  if (shared) {
    UniqueLock lock(mu_);
    // No further helper comes in; those inside work on chunks that they have taken.
    loop_ = nullptr;
    lock.unlock();
    for (uint64_t until = now_ns() + kLastNs; inside_.load() != 0 && now_ns() < until;) cpu_relax();
    lock.lock();
    waits_ = true;
    done_.wait(lock, [&] { return inside_.load() == 0; });
    waits_ = false;
    FRUGAL_ASSERT(loop.next.load() >= chunks);
  }
  const Status s = loop.status.load();
  return s == FRUGAL_OK ? s
                        : fail(s,
                               "no memory for the work of the call; nothing was taken: free some "
                               "and call again");
}

}  // namespace frugal
