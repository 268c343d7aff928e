#include "engine/workers.h"

#include "base/assert.h"

namespace frugal {
namespace {

constexpr uint64_t kHoldNs = 50'000;     // between two checks whether the calls have ended
constexpr uint64_t kIdleNs = 1'000'000;  // until work that no thread needs is checked again
constexpr uint64_t kEndingNs = 100'000;  // between two checks whether calls have noticed the end

// What a chunk throws is kept as a status: the thread that runs it may not be the one that waits.
Status status_of(void (*run)(void*, size_t), void* context, size_t chunk) noexcept {
  try {
    run(context, chunk);
    return FRUGAL_OK;
  } catch (const std::bad_alloc&) {
    return FRUGAL_ERR_OUT_OF_MEMORY;
  } catch (...) {
    return FRUGAL_ERR_INTERNAL;
  }
}

}  // namespace

void Workers::start() {
  threads_.reserve(threads_wanted_);
  for (uint32_t i = 0; i < threads_wanted_; ++i)
    threads_.push_back(quiet_thread([this, i] { main(i); }));
}

void Workers::stop() {
  stopping_.store(true);
  progress();
  work_.fetch_add(1);
  { Lock lock(mu_); }
  cv_work_.notify_all();
  for (Thread& t : threads_) t.join();
  threads_.clear();
  FRUGAL_ASSERT(sleepers_.load() == 0);
}

void Workers::progress() {
  progress_.fetch_add(1);
  if (waiters_.load() == 0) return;
  { Lock lock(mu_); }
  cv_progress_.notify_all();
}

void Workers::wake() {
  work_.fetch_add(1);
  if (sleepers_.load() == 0 || callers_work()) return;
  { Lock lock(mu_); }
  cv_work_.notify_all();
}

void Workers::fail(Status status) {
  Status none = FRUGAL_OK;
  health_.compare_exchange_strong(none, status);
  rules_.failed();
  progress();
}

void Workers::sleep(uint64_t seen, uint64_t until) {
  UniqueLock lock(mu_);
  auto moved = [&] { return progress_.load() != seen; };
  if (until == UINT64_MAX)
    cv_progress_.wait(lock, moved);
  else
    cv_progress_.wait_until(lock, until, moved);
}

void Workers::await_nobody() {
  while (waiters_.load() != 0) {
    progress();
    sleep_ns(kEndingNs);
  }
}

void Workers::main(uint32_t number) {
  trace_thread(number);
  // A thread that wakes a flush thread is on its way through a call: it keeps its processor.
  os_batch_thread();
  Outcome last = Outcome::kNothing;
  for (;;) {
    const uint64_t seen = work_.load();
    if (stopping_.load()) return;
    Outcome outcome = Outcome::kNothing;
    try {
      outcome = one();
    } catch (...) {
      fail(FRUGAL_ERR_INTERNAL);
    }
    // Polls for a while before sleeping. When work begins to be held, the thread polls for longer,
    // once, since a call may want help soon.
    const bool first = outcome != last;
    last = outcome;
    if (outcome == Outcome::kWork) continue;
    const uint64_t spin = outcome == Outcome::kNothing ? kSpinNs / 4 : first ? kSpinNs : 0;
    if (moves(work_, seen, spin)) continue;
    Counted sleeping(sleepers_);
    UniqueLock lock(mu_);
    auto called = [&] { return work_.load() != seen || stopping_.load(); };
    if (outcome == Outcome::kNothing)
      cv_work_.wait(lock, called);
    else
      cv_work_.wait_until(lock, now_ns() + (outcome == Outcome::kHeld ? kHoldNs : kIdleNs), called);
  }
}

// Does one unit of the most urgent work that there is. Work that lacks memory is passed over: less
// urgent work may give some back.
Workers::Outcome Workers::one() {
  if (health() != FRUGAL_OK || callers_work()) return Outcome::kNothing;
  Outcome found = Outcome::kNothing;
  bool lacking = false;
  for (const Work& w : works_) {
    if (w.urgency != Urgency::kSoon && !lacking && rules_.hold()) return Outcome::kHeld;
    if (w.urgency == Urgency::kFavour && lacking) break;
    try {
      const Outcome outcome = w.one();
      if (outcome == Outcome::kWork) return outcome;
      found = std::min(found, outcome);
    } catch (const std::bad_alloc&) {
      lacking = true;
    }
  }
  return lacking ? Outcome::kLater : found;
}

// --- Jobs ----------------------------------------------------------------------------------------

void Workers::publish(List<JobRef>&& job) noexcept {
  FRUGAL_ASSERT(job.size() == 1 && job.front()->chunks != 0);  // one without chunks would never end
  {
    Lock lock(mu_);
    if (job.front()->apply) apply_jobs_.fetch_add(1);
    job_count_.fetch_add(1);
    jobs_.splice(jobs_.end(), job);
  }
  wake();
}

void Workers::run_alone(const JobRef& job) {
  FRUGAL_ASSERT(job->chunks != 0);
  if (job->apply) apply_jobs_.fetch_add(1);
  for (size_t i = 0; i < job->chunks; ++i) run_chunk(job, i);
}

void Workers::run_chunk(const JobRef& job, size_t chunk) {
  if (Status s = status_of(job->run, job->context, chunk)) {
    Status none = FRUGAL_OK;
    job->status.compare_exchange_strong(none, s);
    // Some rows of the step are written, others are not, so the engine cannot go on. This is
    // reported before the job counts as done, so that no gate opens on it.
    if (job->apply) fail(s);
  }
  const size_t done = job->done.fetch_add(1, std::memory_order_acq_rel) + 1;
  FRUGAL_ASSERT(chunk < job->chunks && done <= job->chunks);
  if (done != job->chunks) return;
  {
    Lock lock(mu_);
    auto at = std::find(jobs_.begin(), jobs_.end(), job);
    if (at != jobs_.end()) {
      jobs_.erase(at);
      job_count_.fetch_sub(1);
    }
  }
  if (job->finished_hook) job->finished_hook(job->context);
  job->keep.reset();
  if (job->apply) {
    [[maybe_unused]] const uint32_t before = apply_jobs_.fetch_sub(1);
    FRUGAL_ASSERT(before != 0);
  }
  progress();
}

bool Workers::help(bool apply_only) {
  if (job_count_.load() == 0) return false;
  if (apply_only && rules_.threads_apply && !callers_work() && !stopping_.load()) return false;
  JobRef job;
  {
    Lock lock(mu_);
    auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const JobRef& j) {
      return !j->exhausted() && (j->apply || !apply_only);
    });
    if (at == jobs_.end()) return false;
    job = *at;
  }
  TraceSpan span(*trace_, SpanKind::kHelp);
  if (job->apply) span.drop();  // its chunks have spans of their own
  bool any = false;
  for (size_t i; job->take(&i); any = true) {
    run_chunk(job, i);
    span.more(1);
  }
  if (!any) span.drop();
  return any;
}

Status Workers::parallel(size_t chunks, void (*run)(void*, size_t), void* context) {
  auto told = [](Status s) -> Status {
    if (s == FRUGAL_OK) return s;
    return frugal::fail(
        s, "no memory for the work of the call; nothing was taken: free some and call again");
  };
  // No thread to share with: this one does it all.
  if (chunks < 2 || callers_work()) {
    Status status = FRUGAL_OK;
    for (size_t i = 0; i < chunks && status == FRUGAL_OK; ++i) status = status_of(run, context, i);
    return told(status);
  }
  JobRef job = std::allocate_shared<Job>(HeapAllocator<Job>());
  job->run = run;
  job->context = context;
  job->chunks = chunks;
  publish({job});
  for (size_t i; job->take(&i);) run_chunk(job, i);
  // Chunks that other threads have taken end soon. The context is on this thread's stack, so it
  // cannot return before.
  for (int spin = 0; spin < 2000 && !job->finished(); ++spin) cpu_relax();
  Counted waiting(waiters_);
  for (uint64_t seen; seen = progress_.load(), !job->finished();) sleep(seen, UINT64_MAX);
  return told(job->status.load());
}

void Workers::forget_jobs() {
  FRUGAL_ASSERT(threads_.empty());
  List<JobRef> jobs;
  Lock lock(mu_);
  jobs.swap(jobs_);
}

}  // namespace frugal
