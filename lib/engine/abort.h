// Undoes the steps that are not committed, and tells each rank of that once.
#pragma once
#include <atomic>

#include "engine/commit.h"

namespace frugal {

class Aborter {
 public:
  enum class Why {
    kCall,     // the rank wants it
    kLeaving,  // it is inside a step, and leaves
    kFailed,   // its device has failed
    kLost,     // its process is gone
  };

  Aborter(ControlMutex& mu, Phase& phase, StepRecords& records, Ranks& ranks, Committer& committer,
          Declarations& declarations, Workers& workers, Meters& meters)
      : mu_(mu), phase_(phase), records_(records), ranks_(ranks), committer_(committer),
        declarations_(declarations), workers_(workers), meters_(meters) {
    others_.reserve(ranks.size());
  }

  // Undoes every uncommitted step. A trainer that is inside a call undoes its own part when the
  // call notices; the others' parts are undone here. Nobody begins a step before all is done. Takes
  // no memory, but for a commit that comes first: without that it has done nothing.
  Status undo(Trainer& by, Why why);
  // The same for whoever could not be told that there was no memory: until there is, or the engine
  // is about to be closed.
  Status undo_surely(Trainer& by, Why why);
  void stop_retrying() { retries_.store(false); }

  // The next two are for calls of the rank, with its call_mu held.
  // Undoes its part of uncommitted steps, but for its created rows, which the abort takes back when
  // nobody reads them any more.
  void undo_part(Trainer& t) REQUIRES(t.call_mu);
  // What a call answers, once for each abort of which the rank has a notice.
  Status tell(Trainer& t) REQUIRES(t.call_mu);

 private:
  Status begin(Trainer& by, Why why, Map<uint64_t, StepRecord>* records, bool* begun)
      REQUIRES(one_);
  void await_undone(Trainer& t);
  void undo_rows(Vector<CreatedRows>& created);

  ControlMutex& mu_;
  Phase& phase_;
  StepRecords& records_;
  Ranks& ranks_;
  Committer& committer_;
  Declarations& declarations_;
  Workers& workers_;
  Meters& meters_;
  Mutex one_;             // abort at a time. Before all other locks
  // The ranks beside that which aborts. Has room: nothing wants memory.
  Vector<TrainerRef> others_ GUARDED_BY(one_);
  std::atomic<bool> retries_{true};
};

}  // namespace frugal
