// Records of steps that are not committed: submitted rank gradients, device work, and prepared
// updates.
//
// The engine's mutex guards which records there are. The activities that may run concurrently
// determine which thread has a record (engine/phase.h).
#pragma once
#include <atomic>
#include <memory>

#include "base/assert.h"
#include "engine/control.h"
#include "engine/ranks.h"
#include "engine/trainer.h"
#include "engine/workers.h"

namespace frugal {

struct PreparedUpdate {
  TableRef table;
  UpdateRef update;
  bool ready = false;
};

// Rows of a step's prepared updates that the very next step reads: its gate will have to write
// them.
struct RewarmRows : HeapObject {
  struct OfTable {
    TableRef table;
    Vector<uint32_t> slots;
  };
  Vector<OfTable> tables;  // never empty ones
  size_t bytes = 0;        // of all rows, with their state
  // Rows before this have been brought into the processor's caches in this round.
  size_t table = 0, row = 0;
  uint32_t rounds = 0;  // that are over
  uint64_t since = 0;   // the end of the last one
};

// What a step does to a table. Commits are made for all tables first, in pieces if memory is short.
// They take effect when the step is committed.
struct Commit {
  TableRef table;
  UpdateRef update;       // null: nothing is pushed
  bool taken = false;     // it has the rank gradients
  bool held = false;      // the slots of these rows are held
  bool added = false;     // it is in the table's window
  bool prepared = false;  // the window has entered all of its rows
  List<JobRef> job;       // if it is applied at once
};

struct StepRecord {
  bool skip = false;
  bool deferred = false;   // its updates are queued, not applied at once
  bool small = false;      // at once, by the committing thread alone
  Vector<Commit> commits;  // once its commit has begun
  struct TableGradients {
    TableRef table;
    Vector<RankGradients> ranks;        // in order of submission
    void add(RankGradients&& h);        // there is room for it
    Vector<RankGradients>& in_order();  // by rank: for the commit, when all have come
  };
  Map<const Table*, TableGradients> rank_gradients;
  Vector<CreatedRows> created;
  BlobsRef blobs;  // of ranks that have given one; or null
  Map<const Table*, PreparedUpdate> prepared;
  std::shared_ptr<RewarmRows> rewarm GUARDED_BY(control);  // or null
  bool prepare_scheduled = false;
  size_t prepare_at = 0;  // tables before this have been checked
  // Of ranks that have ended the step: device work that is not complete yet.
  Vector<DeviceWorkRef> device_work;

  bool all_prepared() const;   // nothing is still being prepared
  uint64_t row_bytes() const;  // of rows that have submitted gradients
  // The step will not be committed: withdraws its updates from the windows, and waits for devices.
  void undo();
  void await_device_work() const;
};

class StepRecords {
 public:
  StepRecords(ControlMutex& mu, const Ranks& ranks) : mu_(mu), ranks_(ranks) {}

  StepRecord& of(uint64_t step) REQUIRES(control) { return records_[step]; }
  StepRecord* find(uint64_t step) REQUIRES(control) {  // null: there is none
    const auto at = records_.find(step);
    return at == records_.end() ? nullptr : &at->second;
  }
  void erase(uint64_t step) REQUIRES(control) { records_.erase(step); }
  uint64_t end() const REQUIRES(control) {
    return records_.empty() ? 0 : records_.rbegin()->first + 1;
  }
  // The record of the next commit. Null: not all ranks have ended that step, or it has device work
  // that is not complete.
  StepRecord* complete() REQUIRES(control);
  // No rank is inside a step, and what they have ended is committed.
  bool between(String* why) const REQUIRES(control);
  bool all_prepared() const REQUIRES(control);  // of all steps
  // If `step` is the next commit, its updates are to be prepared. Returns false if some rank has
  // not begun it yet.
  bool schedule(uint64_t step) REQUIRES(control);
  StepRecord* scheduled() REQUIRES(control);  // null: there is none
  // Takes all of them out. The caller waits for their device work.
  Map<uint64_t, StepRecord> take() REQUIRES(control);

  // --- Device work
  // Some device work is not complete, or what its completion allows is not committed yet.
  bool has_device_work() const { return device_work_in_flight_.load() != 0; }
  // There is room for it.
  void add_device_work(StepRecord* record, DeviceWorkRef&& device_work) REQUIRES(control) {
    record->device_work.push_back(std::move(device_work));
    device_work_in_flight_.fetch_add(1);
  }
  template <class Visit>
  void each_device_work(Visit visit) const REQUIRES(control) {
    for (const auto& [step, record] : records_)
      for (const DeviceWorkRef& f : record.device_work) visit(f);
  }
  // These two take the mutex. Completed device work is forgotten. The caller passes its number to
  // done() when what follows is done.
  Vector<DeviceWorkRef> device_work() const {
    Vector<DeviceWorkRef> all;
    ControlLock lock(mu_);
    each_device_work([&](const DeviceWorkRef& f) { all.push_back(f); });
    return all;
  }
  uint32_t forget_completed();
  void done(uint32_t completed) {
    FRUGAL_ASSERT(completed <= device_work_in_flight_.load());
    device_work_in_flight_.fetch_sub(completed);
  }

 private:
  ControlMutex& mu_;
  const Ranks& ranks_;
  Map<uint64_t, StepRecord> records_ GUARDED_BY(control);
  std::atomic<uint32_t> device_work_in_flight_{0};
};

}  // namespace frugal
