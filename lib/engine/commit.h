// Commits steps that all ranks have ended, one after the other.
//
// A commit first takes all memory that it wants, table by table, and then lets go of the step,
// which wants none. Where memory runs short between, the commit is owed: who has time and memory
// next goes on where it stopped, and nothing of the step touches a row before.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "base/trace.h"
#include "engine/control.h"
#include "engine/counters.h"
#include "engine/declarations.h"
#include "engine/flusher.h"
#include "engine/ledger.h"
#include "engine/memory.h"
#include "engine/pacing.h"
#include "engine/pending.h"
#include "engine/phase.h"
#include "engine/step_records.h"
#include "engine/workers.h"

namespace frugal {

class Committer {
 public:
  // `mu` guards ranks, records, phase and tables. Once it is `closed`, no step is committed.
  Committer(ControlMutex& mu, Ranks& ranks, StepRecords& records, Phase& phase, Tables& tables,
            Declarations& declarations, PendingBytes& pending, Flusher& flusher, Workers& workers,
            Pacing& pacing, EngineMemory& memory, const std::shared_ptr<Ledger>& ledger,
            const std::atomic<bool>& closed, Counters& counters, Trace& trace)
      : mu_(mu), ranks_(ranks), records_(records), phase_(phase), tables_(tables),
        declarations_(declarations), pending_(pending), flusher_(flusher), workers_(workers),
        pacing_(pacing), memory_(memory), ledger_(ledger), closed_(closed), counters_(counters),
        trace_(trace) {}

  // Commits all that may be. OUT_OF_MEMORY: the next is owed.
  Status ready();
  // One step; it lets go of `mu` meanwhile. False: there is none, or no memory.
  bool one(Status* status) REQUIRES(control);
  // A commit that there was no memory for: whoever waits, or has memory, makes it.
  bool owed() const { return owed_.load(); }
  void forget_owed() REQUIRES(control) { owed_.store(false); }  // its step is undone
  // While it is held no step is committed. Before `mu`.
  Mutex& boundary() { return boundary_; }

 private:
  void commit(uint64_t step, StepRecord& record, Status* status) REQUIRES(control);
  void begin(StepRecord& record) REQUIRES(control);
  void take(uint64_t step, StepRecord& record, Commit* commit);
  Status prepare(uint64_t step, StepRecord& record, Commit* commit);
  void stage(Commit* commit);
  void publish(uint64_t step, const StepRecord& record, Commit& commit);
  Pacing::Measured measured() const;

  ControlMutex& mu_;
  Ranks& ranks_;
  StepRecords& records_;
  Phase& phase_;
  Tables& tables_;
  Declarations& declarations_;
  PendingBytes& pending_;
  Flusher& flusher_;
  Workers& workers_;
  Pacing& pacing_;
  EngineMemory& memory_;
  const std::shared_ptr<Ledger>& ledger_;
  const std::atomic<bool>& closed_;
  Counters& counters_;
  Trace& trace_;
  std::atomic<bool> owed_{false};
  Mutex boundary_;  // of caches
};

}  // namespace frugal
