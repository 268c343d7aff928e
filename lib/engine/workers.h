// Who does the engine's work: flush threads, and callers that wait or share a loop out.
//
// Background work is a list, the most urgent first. A flush thread begins at the front again after
// each unit. Waiting: a count of events; who waits looks at its condition, helps with what the
// condition needs, and sleeps until the count moves. The count is read before the condition, and
// moved on after it became true, so no wake-up is lost.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <new>

#include "base/condition.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/trace.h"

namespace frugal {

constexpr uint64_t kSpinNs = 50000;  // of a waiting call; about what a sleep and a wake-up cost
constexpr uint64_t kLandNs = 5000;   // between two looks at what is in flight, while spinning
constexpr uint64_t kSliceNs = 1'000'000'000;  // a call that waits wakes now and then

struct Counted {
  std::atomic<uint32_t>& n;
  explicit Counted(std::atomic<uint32_t>& c) : n(c) { n.fetch_add(1); }
  ~Counted() { n.fetch_sub(1); }
};

// A parallel loop that flush threads and waiting trainers share.
struct Job : HeapObject {
  void (*run)(void* context, size_t chunk) = nullptr;
  void (*finished_hook)(void* context) = nullptr;  // once, after the last chunk
  void* context = nullptr;
  size_t chunks = 0;
  std::atomic<size_t> next{0};
  std::atomic<size_t> done{0};
  std::atomic<Status> status{FRUGAL_OK};  // of the first chunk that failed
  std::shared_ptr<void> keep;  // what the context needs to live
  bool apply = false;          // a committed step's update: gates wait for it
  // The next chunk. False: all are taken.
  bool take(size_t* chunk) {
    return (*chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;
  }
  bool exhausted() const { return next.load(std::memory_order_relaxed) >= chunks; }
  bool finished() const { return done.load(std::memory_order_acquire) == chunks; }
};
using JobRef = std::shared_ptr<Job>;

class Workers {
 public:
  // What a look at one work came to. kHeld: there may be some, but not now; kLater: nor soon.
  enum class Did { kWork, kHeld, kLater, kNothing };
  enum class Urgency {
    kSoon,    // a gate waits for it, or is about to
    kIdle,    // waits while calls want the processors
    kFavour,  // not while there is no memory for the rest, either
  };
  // What its owner decides.
  struct Rules {
    std::function<bool()> resting;  // flush threads do nothing now: callers do the work
    std::function<bool()> hold;     // what is kIdle is to wait
    std::function<void()> failed;   // after a failure, which has been noted
    // Calls that wait leave the updates of committed steps to the flush threads (FRUGAL-SYNC).
    bool threads_apply = false;
  };

  Workers(uint32_t threads, Rules rules, Trace* trace)
      : threads_wanted_(threads), rules_(std::move(rules)), trace_(trace) {}

  // Before start(); in the order of urgency. `one` does a unit of the work. What throws bad_alloc
  // has begun nothing that is not as it was.
  void add(Urgency urgency, std::function<Did()> one) {
    works_.push_back({urgency, std::move(one)});
  }
  void start();
  // Ends the threads. Waits go on.
  void stop();
  bool running() const { return !threads_.empty(); }
  // Nobody is woken for work of the engine: callers do it.
  bool callers_work() const { return threads_wanted_ == 0 || rules_.resting(); }

  // --- Events
  void progress();  // that may end a wait
  void wake();      // that give flush threads something to do
  void fail(Status status);
  Status health() const { return health_.load(std::memory_order_acquire); }
  // The same, with a message for who waits.
  Status healthy() const {
    const Status s = health();
    if (s == FRUGAL_OK) return s;
    return frugal::fail(FRUGAL_ERR_UNHEALTHY, "a background failure (%s) stopped the engine",
                        status_name(s));
  }

  // --- Waiting
  // Until done(), which is control state that `lock` guards, and which background work that is
  // under way brings about by itself. done() is called with the lock held.
  template <class AnyLock, class Done>
  void settle(AnyLock& lock, Done done) NO_THREAD_SAFETY_ANALYSIS {
    Counted waiting(waiters_);
    for (;;) {
      const uint64_t seen = progress_.load();
      if (done()) return;
      lock.unlock();
      sleep(seen, UINT64_MAX);
      lock.lock();
    }
  }
  // Until ready(). Before each look ended() may end the wait by a status. help() does one unit of
  // the work that ready() needs, and tells whether there was any. Where something is in flight(),
  // nobody tells when it has landed: help() looks. FRUGAL_ERR_TIMEOUT has no message.
  template <class Ended, class Ready, class Help, class Flight>
  Status wait(uint64_t until, Ended ended, Ready ready, Help help, Flight in_flight);
  // Tells all who wait, again and again, until nobody does any more.
  void await_nobody();

  // --- Jobs
  void publish(List<JobRef>&& job) noexcept;
  // All of it in this thread, without anybody's help.
  void run_alone(const JobRef& job);
  // Chunks of one job, if there is any. `apply_only`: a call that waits for these.
  bool help(bool apply_only);
  // A chunk that fails does not stop the others; the status is that of the first to fail.
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context);
  bool sharing() const { return job_count_.load(std::memory_order_relaxed) != 0; }
  bool applying() const { return apply_jobs_.load() != 0; }
  void forget_jobs();

 private:
  struct Work {
    Urgency urgency;
    std::function<Did()> one;
  };
  void main(uint32_t number);
  Did one();
  // Until progress_ is not `seen` any more, or the time has come.
  void sleep(uint64_t seen, uint64_t until);
  void run_chunk(const JobRef& job, size_t chunk);
  static bool moves(const std::atomic<uint64_t>& count, uint64_t seen, uint64_t ns);

  const uint32_t threads_wanted_;
  const Rules rules_;
  Trace* const trace_;
  Vector<Work> works_;  // not changed once threads run
  Vector<Thread> threads_;
  std::atomic<bool> stopping_{false};
  std::atomic<Status> health_{FRUGAL_OK};
  std::atomic<uint64_t> progress_{0}, work_{0};
  std::atomic<uint32_t> waiters_{0}, sleepers_{0};
  std::atomic<uint32_t> job_count_{0}, apply_jobs_{0};
  Mutex mu_;
  Condition cv_progress_, cv_work_;
  List<JobRef> jobs_ GUARDED_BY(mu_);
};

// Looks for up to `ns` whether the count has moved on from `seen`.
inline bool Workers::moves(const std::atomic<uint64_t>& count, uint64_t seen, uint64_t ns) {
#ifdef FRUGAL_SCHEDULES
  if (this_scheduler) return count.load() != seen;  // whose sleeps cost nothing
#endif
  for (uint64_t until = now_ns() + ns; now_ns() < until;)
    for (int i = 0; i < 16; ++i) {
      cpu_relax();
      if (count.load(std::memory_order_relaxed) != seen) return true;
    }
  return false;
}

template <class Ended, class Ready, class Help, class Flight>
Status Workers::wait(uint64_t until, Ended ended, Ready ready, Help help, Flight in_flight) {
  Counted waiting(waiters_);
  uint64_t spun = 0;
  for (;;) {
    const uint64_t seen = progress_.load();
    FRUGAL_TRY(ended());
    // A job that has failed counts as done, too, after health has told.
    if (ready()) return healthy();
    bool did;
    try {
      did = help();
    } catch (const std::bad_alloc&) {
      return frugal::fail(FRUGAL_ERR_OUT_OF_MEMORY,
                          "no memory for work of the engine that the call waits for; call again");
    }
    if (did) {
      spun = 0;
      continue;
    }
    if (now_ns() >= until) return FRUGAL_ERR_TIMEOUT;
    // A short spin: what is waited for is often some microseconds away, a sleep costs more.
    const bool flying = in_flight();
    if (moves(progress_, seen, flying ? kLandNs : kSpinNs)) continue;
    if (flying && (spun += kLandNs) < kSpinNs) continue;
    sleep(seen, std::min(until, now_ns() + (flying ? kSpinNs : kSliceNs)));
  }
}

}  // namespace frugal
