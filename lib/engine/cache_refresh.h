// States of a trainer's caches between the refreshes of its steps, and which thread has them.
//
// After one step's refresh, the next step's may be planned, until a step is about to begin or is
// undone. One thread at a time has the caches: a planning thread, or the trainer that begins a
// step. While that trainer waits it may itself remove cached rows, as a planning thread.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/assert.h"
#include "flush/queue.h"

namespace frugal {

class CacheRefresh {
 public:
  // The trainer joins. Nothing is cached before `step` is the next commit, since earlier steps were
  // begun without a cache. The largest step given counts.
  void serve_from(uint64_t step) {
    FRUGAL_ASSERT(passed_ == kNoStep);
    from_ = std::max(from_, step);
  }
  uint64_t from() const { return from_; }

  bool planning() const { return planning_; }
  bool free() const { return !planning_ && !refreshing_; }  // no thread has the caches
  // `next` is the step that the trainer begins next.
  bool may_plan(uint64_t next) const {
    return !planning_ && passed_ != kNoStep && next == passed_ + 1 && planned_ != next &&
           next >= from_;
  }
  // kNoStep: rows are removed from the caches, and an existing plan with them.
  void begin_plan(uint64_t step) {
    FRUGAL_ASSERT(!planning_ && (step == kNoStep || may_plan(step)));
    planning_ = true;
    planned_ = step;
  }
  void end_plan() {
    FRUGAL_ASSERT(planning_);
    planning_ = false;
  }
  // More keys are declared for the step. A finished or running plan of it needs an addition.
  void declared(uint64_t step) {
    if (step == planned_) planned_ = kNoStep;
  }
  // An operation outside steps removes rows from the caches, while the trainer may be waiting to
  // begin a step.
  void forget_plan() {
    FRUGAL_ASSERT(!planning_);
    planned_ = kNoStep;
  }

  // A step is about to begin, or is undone: no plan begins any more. A running one may go on.
  void stop_plans() { passed_ = planned_ = kNoStep; }
  // The trainer has the caches, for the step that it begins.
  void begin_refresh() {
    FRUGAL_ASSERT(free() && passed_ == kNoStep);
    refreshing_ = true;
  }
  // The trainer's caches are refreshed for step `passed`. kNoStep: they are not, or the step is
  // undone.
  void end_refresh(uint64_t passed) {
    FRUGAL_ASSERT(refreshing_ && !planning_);
    passed_ = passed;
    refreshing_ = false;
  }

 private:
  uint64_t passed_ = kNoStep;   // step of the last refresh: the next one can be planned
  uint64_t planned_ = kNoStep;  // step whose plan, finished or running, has all declared keys
  uint64_t from_ = 0;
  bool planning_ = false;
  bool refreshing_ = false;
};

}  // namespace frugal
