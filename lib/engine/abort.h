// Undoes the steps that are not committed. Each rank receives an abort notice, which its next call
// reports once.
#pragma once
#include <atomic>

#include "engine/commit.h"

namespace frugal {

class Aborter {
 public:
  enum class Why {
    kCall,     // a call of the rank aborts the step
    kLeaving,  // the rank leaves inside a step
    kFailed,   // the rank's device has failed
    kLost,     // the rank's process is gone
  };

  Aborter(ControlMutex& mu, Phase& phase, StepRecords& records, Ranks& ranks, Committer& committer,
          Declarations& declarations, Workers& workers, Meters& meters)
      : mu_(mu),
        phase_(phase),
        records_(records),
        ranks_(ranks),
        committer_(committer),
        declarations_(declarations),
        workers_(workers),
        meters_(meters) {
    others_.reserve(ranks.size());
  }

  // Undoes every uncommitted step. A trainer inside a call undoes its own share when the call sees
  // the notice; this call undoes the other shares. No rank begins a step before all shares are
  // undone. Needs no memory, except for a stalled commit that comes first. If that fails, nothing
  // is undone.
  Status undo(Trainer& by, Why why);
  // The same for callers that cannot report a lack of memory. Retries until there is memory or the
  // engine is about to be closed.
  Status undo_surely(Trainer& by, Why why);
  void stop_retrying() { retries_.store(false); }

  // Calls of the rank use the next two, with its call_mu held.
  // Undoes its share of uncommitted steps. The rows it created stay: the abort takes them back when
  // no call reads them.
  void undo_part(Trainer& t) REQUIRES(t.call_mu);
  // The status of a call, once for each abort notice of the rank.
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
  Mutex one_;  // One abort at a time. Taken before all other locks.
  // All ranks but the aborting one. Its capacity is reserved: an abort needs no memory.
  Vector<TrainerRef> others_ GUARDED_BY(one_);
  std::atomic<bool> retries_{true};
};

}  // namespace frugal
