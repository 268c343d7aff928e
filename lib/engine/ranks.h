// The ranks of an engine: which have joined, which step each is inside of, and which step all have
// ended.
//
// Atomic members may be read without the engine's mutex. A commit or the begin of a step may be
// about to change them. Functions that take the mutex say so.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>

#include "base/assert.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "engine/control.h"
#include "engine/trainer.h"

namespace frugal {

// When the process of an unresponsive rank is treated as lost: calls have waited for the rank for
// as long as a call waits.
//
// A waiting thread checks several times in that time, in one call or in many. If no thread has
// checked for `gap`, this process may have been stopped, with its whole machine. It cannot know
// then which rank was unresponsive: all ranks have the whole time again.
struct Liveness {
  uint64_t limit;  // ns; UINT64_MAX: never
  uint64_t gap;    // the longest time between checks
  uint64_t look() const { return gap / 3; }

  // A little less than the time-out: a call that waits all of it began a moment before the first
  // check.
  static Liveness of(int64_t timeout_ms) {
    const uint64_t ns = ns_of_ms(timeout_ms);
    const uint64_t limit = ns == UINT64_MAX ? ns : ns - std::min<uint64_t>(ns / 8, 100'000'000);
    return {limit, 3 * std::clamp<uint64_t>(limit / 8, 50'000'000, 1'000'000'000)};
  }
};

class Ranks {
 public:
  Ranks(uint32_t world_size, ControlMutex& mu)
      : mu_(mu),
        size_(world_size),
        trainers_(world_size),
        joined_(world_size, 0),
        lost_(world_size, 0) {
    counts_.awaited = world_size;
  }

  // --- Which ranks are there
  uint32_t size() const { return size_; }
  // Null: no trainer has the rank.
  const TrainerRef& operator[](uint32_t rank) const REQUIRES(control) { return trainers_[rank]; }
  auto begin() const REQUIRES(control) { return trainers_.begin(); }
  auto end() const REQUIRES(control) { return trainers_.end(); }
  // The next three take the mutex.
  TrainerRef at(uint32_t rank) const {
    ControlLock lock(mu_);
    return trainers_[rank];
  }
  // Calls visit(trainer) for one after the other. Holds no mutex in the call, and takes no memory.
  template <class Visit>
  void each(Visit visit) const {
    for (uint32_t r = 0; r < size_; ++r)
      if (const TrainerRef t = at(r)) visit(*t);
  }
  // Those for which holds(trainer) is true.
  template <class Holds>
  Vector<TrainerRef> those(Holds holds) const {
    Vector<TrainerRef> all;
    ControlLock lock(mu_);
    for (const TrainerRef& t : trainers_)
      if (t && holds(*t)) all.push_back(t);
    return all;
  }
  // A trainer has had the rank. If it has left, steps go on without it.
  bool joined(uint32_t rank) const REQUIRES(control) { return joined_[rank] != 0; }
  // `recorded`: ranks may have ended steps before this one.
  void join(const TrainerRef& t, uint64_t recorded) REQUIRES(control);
  void leave(Trainer& t);  // takes the mutex

  // --- Lost ranks
  // The rank's process is gone or unresponsive: no step begins before it is replaced.
  void lose(uint32_t rank) REQUIRES(control) {
    lost_[rank] = 1;
    first_lost_ = std::min(first_lost_, rank);
  }
  // The first such rank; kNoRank: there is none.
  uint32_t lost() const REQUIRES(control) { return first_lost_; }
  // Calls `callback`, with the mutex held, for each trainer in another process that is treated as
  // lost. Null removes it. This and find_unresponsive() take the mutex.
  void on_unresponsive(std::function<void(const TrainerRef&)> callback) {
    ControlLock lock(mu_);
    on_unresponsive_ = std::move(callback);
  }
  bool find_unresponsive(const Liveness& liveness);    // was there one?
  void note_awaited(uint64_t step) REQUIRES(control);  // a call waits for all ranks to end it

  // --- Steps of all
  // kNoStep: no step has begun, or none is committed.
  uint64_t next_commit() const {
    const uint64_t last = committed_.load();
    return last == kNoStep ? first_step_.load() : last + 1;
  }
  uint64_t committed() const { return committed_.load(); }
  uint64_t soonest() const {  // that may begin, or is under way
    const uint64_t next = next_commit();
    return next == kNoStep ? 0 : next;
  }
  uint64_t begun() const { return begun_.load(); }  // 1 + the latest step that some rank has begun
  void start(uint64_t first) REQUIRES(control) { first_step_ = first; }
  void commit(uint64_t step) REQUIRES(control) {
    FRUGAL_ASSERT(committed_ == kNoStep || step == committed_ + 1);
    FRUGAL_ASSERT(counts_ == counted());
    committed_ = step;
  }
  // The tables are as after this step, and no rank has begun one. Steps go on from there.
  void resume(uint64_t step) REQUIRES(control) {
    FRUGAL_ASSERT(next_commit() == kNoStep);
    first_step_ = begun_ = step + 1;
    committed_ = step;
  }
  // All steps that are not committed are undone.
  void undone() REQUIRES(control) { begun_ = committed_ == kNoStep ? 0 : committed_ + 1; }
  // Without the mutex: a rank pushes gradients of the step.
  void note_push(uint64_t step) { pushed_.store(step + 1, std::memory_order_relaxed); }
  uint64_t pushed() const { return pushed_.load(std::memory_order_relaxed); }  // 1 + the latest

  // --- A rank's steps
  Status may_begin(const Trainer& t, uint64_t step) const REQUIRES(control);
  void begin(Trainer& t, uint64_t step) REQUIRES(control);
  void end(Trainer& t) REQUIRES(control) { go(t, false, t.next_step); }
  void begin_again(Trainer& t) REQUIRES(control) {  // the step that it is inside of
    go(t, false, t.step);
  }
  void undo(Trainer& t);                        // takes the mutex
  Status check_inside(const Trainer& t) const;  // likewise, where it is not
  // The step to begin after an undo, as text. It has no number while no step has ever begun.
  String step_again() const;

  // --- How far ranks are
  String late_ranks(uint64_t step) const REQUIRES(control);  // that have not ended it
  // All ranks have ended it. `present`: one of them still has a trainer.
  bool ended(uint64_t step, bool* present) const REQUIRES(control) {
    *present = counts_.present != 0;
    return counts_.awaited == 0 && counts_.to_end.step > step;
  }
  bool all_begun(uint64_t step) const REQUIRES(control) {
    return counts_.awaited == 0 && counts_.to_begin.step > step;
  }
  // Some rank that has begun a step has not ended all steps before `step`.
  bool any_behind(uint64_t step) const REQUIRES(control) { return counts_.to_end.step < step; }
  // Some rank is inside a step, or two are at different steps.
  bool inside(String* why) const REQUIRES(control) { return apart(kNoStep, why); }
  // No rank is inside a step, and what they have ended is committed.
  bool between(String* why) const REQUIRES(control) { return !apart(next_commit(), why); }
  String some_ended(uint64_t step) const REQUIRES(control);  // text: some have ended it, others not

  // --- Caches
  bool caches_exist() const { return caches_.load(std::memory_order_relaxed) != 0; }
  // Takes the mutex, where there are any.
  bool has_cache(uint32_t rank) const {
    if (!caches_exist()) return false;
    ControlLock lock(mu_);
    return trainers_[rank] && trainers_[rank]->has_cache.load(std::memory_order_relaxed);
  }
  // Committed updates that caches have not applied. expect_backlog() makes room for `n` more.
  // add_backlog() then adds one without taking memory; it takes the mutex if there are caches.
  void expect_backlog(size_t n) REQUIRES(control);
  void add_backlog(const UpdateRef& update, const TableRef& table);

 private:
  // Some rank is inside a step, or has another one to begin than `next` (kNoStep: than other
  // ranks).
  bool apart(uint64_t next, String* why) const REQUIRES(control);
  // The first step that the rank has not ended; kNoStep: it has begun none.
  static uint64_t to_end(const Trainer& t) REQUIRES(control) {
    return t.in_step ? t.step : t.next_step;
  }
  // The rank has not ended the step.
  static bool late(const Trainer& t, uint64_t step) REQUIRES(control) {
    return to_end(t) == kNoStep || to_end(t) <= step;
  }
  bool late(uint32_t rank, uint64_t step) const REQUIRES(control) {
    return trainers_[rank] ? late(*trainers_[rank], step) : !joined(rank);
  }

  // What each rank's call asks about all ranks is counted where it changes. Ranks are counted anew
  // when the last one leaves the earliest step: about once a step.
  struct Counts {
    struct Least {  // the earliest step of some rank, and how many ranks have it
      uint64_t step = kNoStep;
      uint32_t ranks = 0;
      void count(uint64_t of, uint32_t by) {
        if (of < step) *this = {of, 0};
        if (of == step) ranks += by;
      }
      bool operator==(const Least&) const = default;
    };
    uint32_t awaited = 0;  // ranks that have had no trainer, or whose trainer has begun no step
    uint32_t present = 0;
    Least to_end, to_begin;
    bool operator==(const Counts&) const = default;
  };
  static void count(const Trainer& t, uint32_t by, Counts* to) REQUIRES(control);
  Counts counted() const REQUIRES(control);
  // Changes a rank's step, and the counts.
  void go(Trainer& t, bool in_step, uint64_t next_step) REQUIRES(control);
  void left_earliest() REQUIRES(control) {
    if (counts_.to_end.ranks == 0 || counts_.to_begin.ranks == 0) counts_ = counted();
  }

  ControlMutex& mu_;
  const uint32_t size_;
  Vector<TrainerRef> trainers_ GUARDED_BY(control);
  Vector<uint8_t> joined_ GUARDED_BY(control);
  Vector<uint8_t> lost_ GUARDED_BY(control);  // and no trainer has joined in its place
  uint32_t first_lost_ GUARDED_BY(control) = kNoRank;
  Counts counts_ GUARDED_BY(control);
  std::function<void(const TrainerRef&)> on_unresponsive_ GUARDED_BY(control);
  uint64_t awaited_step_ GUARDED_BY(control) = kNoStep, awaited_since_ GUARDED_BY(control) = 0;
  uint64_t looked_ GUARDED_BY(control) = 0, went_on_ GUARDED_BY(control) = 0;
  // Changed with the mutex held.
  std::atomic<uint64_t> first_step_{kNoStep}, committed_{kNoStep};
  std::atomic<uint64_t> begun_{0};
  std::atomic<uint64_t> pushed_{0};
  std::atomic<uint32_t> caches_{0};
};

}  // namespace frugal
