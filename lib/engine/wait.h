// How a call of the engine waits: look, help, sleep; and how it makes room. Included by the engine's
// sources only.
#pragma once
#include "base/handles.h"
#include "engine/engine.h"

namespace frugal {

constexpr uint64_t kSpinNs = 50000;  // of a waiting call; about what a sleep and a wake-up cost
constexpr uint64_t kToldNs = 1'000'000'000;  // for a loss to be told
constexpr uint64_t kLandNs = 5000;   // between two looks at what is in flight, while spinning

// Looks for up to `ns` whether the count has moved on from `seen`.
inline bool moves(const std::atomic<uint64_t>& count, uint64_t seen, uint64_t ns) {
  for (uint64_t until = now_ns() + ns; now_ns() < until;)
    for (int i = 0; i < 16; ++i) {
      cpu_relax();
      if (count.load(std::memory_order_relaxed) != seen) return true;
    }
  return false;
}

// Sleeps on `cv` until done(), or for a second.
template <class Done>
void sleep_slice(Condition& cv, std::unique_lock<std::mutex>& lock, uint64_t until, Done done) {
  cv.wait_until(lock, std::min(until, now_ns() + 1000000000u), done);
}

struct Counted {
  std::atomic<uint32_t>& n;
  explicit Counted(std::atomic<uint32_t>& c) : n(c) { n.fetch_add(1); }
  ~Counted() { n.fetch_sub(1); }
};

// Waits for control state that is guarded by mu_, held in `lock`: for background work that is under
// way and ends soon by itself.
template <class Done>
void Engine::settle(std::unique_lock<std::mutex>& lock, Done done) {
  Counted waiting(waiters_);
  cv_progress_.wait(lock, done);
}

// Waits until ready(). help() does one unit of the work that ready() needs and tells whether there
// was any. FRUGAL_ERR_TIMEOUT and FRUGAL_ERR_STEP_ABORTED are given without a message: the caller
// knows what it waited for.
template <class Ready, class Help>
Status Engine::wait(Deadline deadline, Trainer* trainer, Ready ready, Help help) {
  Counted waiting(waiters_);
  auto healthy = [&] {
    Status s = health();
    return s == FRUGAL_OK ? s : fail(FRUGAL_ERR_UNHEALTHY, "a background failure (%s) stopped the engine",
                                     status_name(s));
  };
  uint64_t spun = 0;
  for (;;) {
    // The count is read before the condition: whoever makes the condition true counts afterwards.
    uint64_t seen = progress_.load();
    if (closed_.load() || (trainer && trainer->closing.load()))
      return fail(FRUGAL_ERR_CLOSED, "the %s was closed while a call waited",
                  closed_.load() ? "engine" : "trainer");
    FRUGAL_TRY(healthy());
    if (trainer && trainer->abort_notice.load()) return FRUGAL_ERR_STEP_ABORTED;
    if (trainer && trainer->gpu) FRUGAL_TRY(trainer->gpu->sticky() ? trainer->gpu->ready() : FRUGAL_OK);
    // A job that has failed counts as done, too, after health has told.
    if (ready()) return healthy();
    // What there is no memory for may become possible by the rest: updates that are written give theirs back.
    bool did = false, lacking = false;
    try {
      did = land();
    } catch (const std::bad_alloc&) {
      lacking = true;
    }
    try {
      did = did || help();
    } catch (const std::bad_alloc&) {
      lacking = true;
    }
    if (did) {
      spun = 0;
      continue;
    }
    if (lacking)
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for work of the engine that the call waits for; call again");
    if (deadline.passed()) return FRUGAL_ERR_TIMEOUT;
    // A short spin: what is waited for is often some microseconds away, a sleep costs more.
    const bool flying = in_flight();  // nobody tells when that has landed
    if (moves(progress_, seen, flying ? kLandNs : kSpinNs)) continue;
    if (flying && (spun += kLandNs) < kSpinNs) continue;
    std::unique_lock<std::mutex> lock(mu_);
    sleep_slice(cv_progress_, lock, flying ? std::min(deadline.at, now_ns() + kSpinNs) : deadline.at,
                [&] { return progress_.load() != seen; });
  }
}

template <class Ready, class Help>
Status Engine::wait_for_ranks(Deadline deadline, Trainer* trainer, Ready ready, Help help) {
  bool found = false;
  Status s = wait(
      deadline, trainer,
      [&] {
        if (ready()) return true;
        found = find_silent() || found;
        return false;
      },
      help);
  // As a rule that is at the end of the time-out. The abort that tells of it is on its way.
  if (s == FRUGAL_ERR_TIMEOUT && found && trainer)
    s = wait({now_ns() + kToldNs}, trainer, [] { return false; }, [] { return false; });
  return s;
}

template <class Call>
Status Engine::with_room(const frugal_op* ops, size_t n, Call call) {
  Status s = call();
  if (s != FRUGAL_ERR_TABLE_FULL) return s;
  struct Tight {
    Vector<TableRef> tables;
    ~Tight() {
      for (const TableRef& t : tables) --t->tight;
    }
  } tight{{}};
  tight.tables.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const TableRef table = std::static_pointer_cast<Table>(object_of<AnyTable>(ops[i].table));
    if (!table || table->rows.keys_are_slots()) continue;
    // (Also where nothing is reserved by now: a declaration that found no room had taken some for a moment.)
    ++table->tight;
    tight.tables.push_back(table);
    give_up_reserved(*table);
  }
  return tight.tables.empty() ? s : call();
}

}  // namespace frugal
