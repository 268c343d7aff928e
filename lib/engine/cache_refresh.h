// Where the caches of a trainer are between the refreshes of its steps, and whose they are.
//
// A refresh that has been passed lets that of the next step be planned, until a step is about to
// begin or is undone. One has the caches at a time: who plans, or the trainer that begins a step,
// which while it waits may itself take lines away as one who plans.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/assert.h"
#include "flush/queue.h"

namespace frugal {

class CacheRefresh {
 public:
  // The trainer joins: nothing is cached before this step is to be committed, since steps before
  // were begun while there was no cache. The latest that is given holds.
  void serve_from(uint64_t step) {
    FRUGAL_ASSERT(passed_ == kNoStep);
    from_ = std::max(from_, step);
  }
  uint64_t from() const { return from_; }

  bool planning() const { return planning_; }
  bool free() const { return !planning_ && !refreshing_; }  // nobody has the caches
  // `next` is what the trainer is to begin next.
  bool may_plan(uint64_t next) const {
    return !planning_ && passed_ != kNoStep && next == passed_ + 1 && planned_ != next &&
           next >= from_;
  }
  // kNoStep: nothing is planned, but lines are taken away, and what was planned with them.
  void begin_plan(uint64_t step) {
    FRUGAL_ASSERT(!planning_ && (step == kNoStep || may_plan(step)));
    planning_ = true;
    planned_ = step;
  }
  void end_plan() {
    FRUGAL_ASSERT(planning_);
    planning_ = false;
  }
  // Something is declared for the step. A plan of it is added to, also one that is being made.
  void declared(uint64_t step) {
    if (step == planned_) planned_ = kNoStep;
  }
  // Rows are taken out of the caches outside of steps, where a trainer may be waiting to begin one.
  void forget_plan() {
    FRUGAL_ASSERT(!planning_);
    planned_ = kNoStep;
  }

  // A step is about to begin, or is undone: no plan begins any more. One may be under way.
  void stop_plans() { passed_ = planned_ = kNoStep; }
  // The trainer has the caches, for the step that it begins.
  void begin_refresh() {
    FRUGAL_ASSERT(free() && passed_ == kNoStep);
    refreshing_ = true;
  }
  // It has passed the step's refresh. kNoStep: it has not, or the step is undone.
  void end_refresh(uint64_t passed) {
    FRUGAL_ASSERT(refreshing_ && !planning_);
    passed_ = passed;
    refreshing_ = false;
  }

 private:
  uint64_t passed_ = kNoStep;   // the refresh that was passed last: the next can be planned
  uint64_t planned_ = kNoStep;  // what is planned, or being planned, with all that was declared
  uint64_t from_ = 0;
  bool planning_ = false;
  bool refreshing_ = false;
};

}  // namespace frugal
