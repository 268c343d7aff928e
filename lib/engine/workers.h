// The threads that do the engine's work: flush threads, and callers that wait or share out a loop.
//
// Background work is a list, the most urgent first. A flush thread begins at the front again after
// each unit.
//
// Waits use a count of events. A waiting thread checks its condition, helps with what the condition
// needs, and sleeps until the count moves. The thread reads the count before the condition. The
// count moves after the condition has become true, so no wake-up is lost.
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
constexpr uint64_t kPollNs = 5000;   // between two polls of device work, while spinning
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
  std::shared_ptr<void> keep;             // what the context needs to live
  bool apply = false;                     // a committed step's update: gates wait for it
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
  // What an attempt at one kind of work came to. kHeld: there may be some, but not now; kLater: nor
  // soon.
  enum class Outcome { kWork, kHeld, kLater, kNothing };
  enum class Urgency {
    kSoon,    // a gate waits for it, or is about to
    kIdle,    // waits while calls want the processors
    kFavour,  // not while there is no memory for the rest, either
  };
  // Decisions of the owner.
  struct Rules {
    std::function<bool()> resting;  // flush threads do nothing now: callers do the work
    std::function<bool()> hold;     // what is kIdle is to wait
    std::function<void()> failed;   // after a failure, which has been noted
    // Calls that wait leave the updates of committed steps to the flush threads (FRUGAL-SYNC).
    bool threads_apply = false;
  };

  Workers(uint32_t threads, Rules rules, Trace* trace)
      : threads_wanted_(threads), rules_(std::move(rules)), trace_(trace) {}

  // Before start(); in the order of urgency. `one` does a unit of the work. If it throws bad_alloc,
  // everything is as it was before.
  void add(Urgency urgency, std::function<Outcome()> one) {
    works_.push_back({urgency, std::move(one)});
  }
  void start();
  // Ends the threads. Waits go on.
  void stop();
  bool running() const { return !threads_.empty(); }
  // No thread is woken for the engine's work: callers do it.
  bool callers_work() const { return threads_wanted_ == 0 || rules_.resting(); }

  // --- Events
  void progress();  // that may end a wait
  void wake();      // that give flush threads something to do
  void fail(Status status);
  Status health() const { return health_.load(std::memory_order_acquire); }
  // The same, with a message for a waiting call.
  Status healthy() const {
    const Status s = health();
    if (s == FRUGAL_OK) return s;
    return frugal::fail(FRUGAL_ERR_UNHEALTHY, "a background failure (%s) stopped the engine",
                        status_name(s));
  }

  // --- Waiting
  // Waits until done(), which reads control state that `lock` guards. Background work that is under
  // way makes it true by itself. done() is called with the lock held.
  template <class AnyLock, class Done>
  void await(AnyLock& lock, Done done) NO_THREAD_SAFETY_ANALYSIS {
    Counted waiting(waiters_);
    for (;;) {
      const uint64_t seen = progress_.load();
      if (done()) return;
      lock.unlock();
      sleep(seen, UINT64_MAX);
      lock.lock();
    }
  }
  // Waits until ready(). Before each check ended() may end the wait by a status. help() does one
  // unit of the work that ready() needs, and returns whether there was any. While in_flight(), no
  // event reports completion: help() polls. FRUGAL_ERR_TIMEOUT has no message.
  template <class Ended, class Ready, class Help, class InFlight>
  Status wait(uint64_t until, Ended ended, Ready ready, Help help, InFlight in_flight);
  // Wakes all waiting threads, again and again, until no thread waits any more.
  void await_nobody();

  // --- Jobs
  void publish(List<JobRef>&& job) noexcept;
  // Runs all of it in this thread, without help.
  void run_alone(const JobRef& job);
  // Runs chunks of one job, if there is any. `apply_only`: only of jobs that gates wait for.
  bool help(bool apply_only);
  // A chunk that fails does not stop the others; the status is that of the first to fail.
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context);
  bool sharing() const { return job_count_.load(std::memory_order_relaxed) != 0; }
  bool applying() const { return apply_jobs_.load() != 0; }
  void forget_jobs();

 private:
  struct Work {
    Urgency urgency;
    std::function<Outcome()> one;
  };
  void main(uint32_t number);
  Outcome one();
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

// Polls for up to `ns` whether the count has moved on from `seen`.
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

template <class Ended, class Ready, class Help, class InFlight>
Status Workers::wait(uint64_t until, Ended ended, Ready ready, Help help, InFlight in_flight) {
  Counted waiting(waiters_);
  uint64_t spun = 0;
  for (;;) {
    const uint64_t seen = progress_.load();
    FRUGAL_TRY(ended());
    // A job that has failed counts as done, too, but health() reports it before.
    if (ready()) return healthy();
    bool worked;
    try {
      worked = help();
    } catch (const std::bad_alloc&) {
      return frugal::fail(FRUGAL_ERR_OUT_OF_MEMORY,
                          "no memory for work of the engine that the call waits for; call again");
    }
    if (worked) {
      spun = 0;
      continue;
    }
    if (now_ns() >= until) return FRUGAL_ERR_TIMEOUT;
    // A short spin: the event is often some microseconds away, and a sleep costs more.
    const bool in_flight_now = in_flight();
    if (moves(progress_, seen, in_flight_now ? kPollNs : kSpinNs)) continue;
    if (in_flight_now && (spun += kPollNs) < kSpinNs) continue;
    sleep(seen, std::min(until, now_ns() + (in_flight_now ? kSpinNs : kSliceNs)));
  }
}

}  // namespace frugal
