// Commits the steps that all ranks have ended, one after the other.
//
// A commit first reserves all its memory, table by table, and then publishes the step, which needs
// no memory. If memory runs short before that, the commit is stalled, and nothing of the step has
// touched a row. The next thread that has time and memory continues it where it stopped.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "engine/checkpoints.h"
#include "engine/counters.h"
#include "engine/declarations.h"
#include "engine/flusher.h"
#include "engine/memory.h"
#include "engine/pacing.h"
#include "engine/phase.h"
#include "engine/ranks.h"
#include "engine/step_records.h"
#include "engine/tables.h"
#include "engine/workers.h"

namespace frugal {

class Committer {
 public:
  Committer(ControlMutex& mu, Phase& phase, StepRecords& records, Ranks& ranks, Pacing& pacing,
            Tables& tables, Declarations& declarations, Flusher& flusher, Workers& workers,
            EngineMemory& memory, Meters& meters, Checkpoints& checkpoints)
      : mu_(mu),
        phase_(phase),
        records_(records),
        ranks_(ranks),
        pacing_(pacing),
        tables_(tables),
        declarations_(declarations),
        flusher_(flusher),
        workers_(workers),
        memory_(memory),
        meters_(meters),
        checkpoints_(checkpoints) {}

  // Commits all complete steps. OUT_OF_MEMORY: the next one is stalled.
  Status ready();
  // Commits one step. Releases the engine's mutex meanwhile. False: no step is complete, or there
  // is no memory.
  bool one(Status* status) REQUIRES(control);
  // A commit lacked memory. A waiting thread, or one that has memory, continues it.
  bool stalled() const { return stalled_.load(); }
  void forget_stalled() REQUIRES(control) { stalled_.store(false); }  // its step is undone
  // While it is held no step commits. Taken before the engine's mutex.
  Mutex& refresh_mu() { return refresh_mu_; }

 private:
  void commit(uint64_t step, StepRecord& record, Status* status) REQUIRES(control);
  void begin(StepRecord& record) REQUIRES(control);
  void take(uint64_t step, StepRecord& record, Commit* commit);
  Status reserve_memory(uint64_t step, StepRecord& record, Commit* commit);
  void prepare(Commit* commit);
  void publish(uint64_t step, const StepRecord& record, Commit& commit);
  Pacing::Measured measured() const;

  ControlMutex& mu_;
  Phase& phase_;
  StepRecords& records_;
  Ranks& ranks_;
  Pacing& pacing_;
  Tables& tables_;
  Declarations& declarations_;
  Flusher& flusher_;
  Workers& workers_;
  EngineMemory& memory_;
  Meters& meters_;
  Checkpoints& checkpoints_;
  std::atomic<bool> stalled_{false};
  Mutex refresh_mu_;  // refreshes of caches hold it
};

}  // namespace frugal
