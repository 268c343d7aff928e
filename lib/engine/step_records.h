// What is known of steps that are not committed: what ranks have handed over, what devices have in
// flight, and what is taken in ahead.
//
// The engine's mutex guards which records there are; whose one is, what runs beside what says
// (engine/phase.h).
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

// Rows of a step's prepared updates that the very next step reads: its gate will have to write them.
struct RewarmRows : HeapObject {
  struct OfTable {
    TableRef table;
    Vector<uint32_t> slots;
  };
  Vector<OfTable> tables;  // never empty ones
  size_t bytes = 0;        // of all rows, with their state
  // All before this have been brought into the caches in this round.
  size_t table = 0, row = 0;
  uint32_t rounds = 0;     // that are over
  uint64_t since = 0;      // the end of the last one
};

// What a step does to a table: made first for all tables, in pieces where memory is short, and let
// loose when the step is committed.
struct Commit {
  TableRef table;
  UpdateRef update;         // null: nothing is pushed
  bool taken = false;       // it has what the ranks have pushed,
  bool held = false;        // and holds the places of these rows
  bool added = false;       // to the table's window,
  bool prepared = false;    // which has taken all of its rows in
  List<JobRef> job;         // where it is applied at once
};

struct StepRecord {
  bool skip = false;
  bool deferred = false;    // how it is committed;
  bool small = false;       // or by the committing thread alone
  Vector<Commit> commits;   // once its commit has begun
  struct TableGradients {
    TableRef table;
    Vector<RankGradients> ranks;  // as they came
    void add(RankGradients&& h);  // there is room for it
    Vector<RankGradients>& in_order();  // ascending: for the commit, when all have come
  };
  Map<const Table*, TableGradients> rank_gradients;
  Vector<CreatedRows> created;
  Map<const Table*, PreparedUpdate> prepared;
  std::shared_ptr<RewarmRows> rewarm GUARDED_BY(control);  // or null
  bool prepare_scheduled = false;
  size_t prepare_at = 0;  // tables before this have been looked at
  // of ranks that have ended it: hand-overs that are not complete yet
  Vector<DeviceWorkRef> device_work;

  bool all_prepared() const;  // all that is taken in ahead is
  uint64_t row_bytes() const;  // of rows that gradients were handed over for
  // It will not be: windows forget what they have taken in of it, and devices are waited for.
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
  // Null: not all ranks have ended the step that is to be committed next, or something of it is in
  // flight.
  StepRecord* complete() REQUIRES(control);
  // No rank is inside a step, and what they have ended is committed.
  bool between(String* why) const REQUIRES(control);
  bool all_prepared() const REQUIRES(control);  // of all steps what is taken in ahead
  // Of the step that is to be committed next something is to be taken in ahead. False: nothing as
  // yet, for some rank has not begun it.
  bool schedule(uint64_t step) REQUIRES(control);
  StepRecord* scheduled() REQUIRES(control);  // null: there is none
  // All of them; what they have in flight is the caller's to wait for.
  Map<uint64_t, StepRecord> take() REQUIRES(control);

  // --- Device work
  // Some are in flight, or have completed and what that allows is not committed yet.
  bool has_device_work() const { return device_work_in_flight_.load() != 0; }
  // there is room for it
  void add_device_work(StepRecord* record, DeviceWorkRef&& device_work) REQUIRES(control) {
    record->device_work.push_back(std::move(device_work));
    device_work_in_flight_.fetch_add(1);
  }
  template <class Visit>
  void each_device_work(Visit visit) const REQUIRES(control) {
    for (const auto& [step, record] : records_)
      for (const DeviceWorkRef& f : record.device_work) visit(f);
  }
  // These two take the mutex. Those that have completed are forgotten; their number is to be told
  // when what follows is done.
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
