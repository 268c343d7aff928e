// Checkpoints of an engine: the folder that it writes, the snapshot of a step, and the thread that
// writes a checkpoint while training goes on (docs/checkpoints.md).
#pragma once
#include <atomic>
#include <memory>

#include "base/condition.h"
#include "engine/flusher.h"
#include "engine/memory.h"
#include "engine/phase.h"
#include "engine/ranks.h"
#include "engine/tables.h"
#include "engine/workers.h"

namespace frugal {

// Test hook: the thread that saves rows sleeps so long after each piece. 0: not at all.
void checkpoint_test_pause(uint64_t ns);

struct CheckpointConfig {
  uint64_t step = kNoStep;  // kNoStep: the last one that is committed; else a later one
  const char* name = "";    // a checkpoint with a name is kept
};

struct CheckpointInfo {
  uint64_t sequence = 0;
  uint64_t step = kNoStep;
  String name;
};

class Checkpoints {
 public:
  struct Parts {
    const frugal_config& config;
    ControlMutex& mu;
    Phase& phase;
    Ranks& ranks;
    Tables& tables;
    Flusher& flusher;
    Workers& workers;
    EngineMemory& memory;
  };
  explicit Checkpoints(const Parts& parts) : of_(parts) {}
  ~Checkpoints();

  // --- Between steps, and when all updates are written
  // Writes the folder from now on. `keep`: how many checkpoints without a name stay.
  Status open(const char* path, uint32_t keep);
  Status close();
  bool opened() const { return opened_.load(); }
  // From now on the table's changes count. `kind`: of its optimizer. `unchanged`: it is as it was
  // created. `number`: the table's in the folder; 0: a new one.
  Status track(Table& table, int32_t kind, bool unchanged, uint64_t number = 0);
  // The folder's checkpoints, of which a manifest can be read.
  const std::shared_ptr<Folder>& folder() const { return to_.folder; }

  // --- Any thread
  // Begins a checkpoint, and returns its number. BUSY: one is being written.
  Status request(const CheckpointConfig& config, uint64_t* sequence);
  // OK: it is on disk.
  Status wait(uint64_t sequence, uint64_t until, CheckpointInfo* info);
  Status cancel(uint64_t sequence);
  Status await_idle(uint64_t until);  // no snapshot is being written
  // Copies of rows that wait for the disk are within their budget. (Each table has one buffer that
  // fills. They do not count: no write would give them back.)
  bool within_budget() const { return buffers_.complete() <= kMostBytes; }
  // A step was committed; no later one is.
  void committed(uint64_t step) noexcept REQUIRES(control);
  void stop() noexcept;  // the engine is being closed: nothing is acknowledged any more

 private:
  static constexpr size_t kMostBytes = size_t{32} << 20;  // of copies
  enum class State { kIdle, kRequested, kTaken, kEnded };
  struct Kept {  // a checkpoint of the folder
    String name;
    Vector<uint64_t> files;
  };
  void take() noexcept REQUIRES(control, mu_);
  void main();
  Status write(const Vector<TableRef>& tables, Manifest* manifest);
  Status await_written(const Vector<TableRef>& tables, uint64_t next_step);
  Status save_rows(const Vector<TableRef>& tables, Table& table);
  Status collect(const Vector<TableRef>& tables);
  Status going_on();
  static Kept kept_of(const Manifest& manifest);
  Status look_at_folder();
  void remove_old() noexcept;

  const Parts of_;
  std::atomic<bool> opened_{false};
  FolderWriter to_;
  RecordBuffers buffers_{size_t{8} << 20};
  std::unique_ptr<IoQueue> queue_;
  Thread thread_;
  std::atomic<uint64_t> next_table_{1};
  uint32_t keep_ = 0;
  Map<uint64_t, Kept> kept_;
  Map<uint64_t, Kept> newest_;             // the one that is being written
  bool all_known_ = true;                  // each manifest of the folder is in kept_
  std::atomic<uint64_t> wanted_{kNoStep};  // the step whose commit takes the snapshot
  std::atomic<bool> stopping_{false}, cancelled_{false};

  Mutex mu_;
  Condition changed_;
  State state_ GUARDED_BY(mu_) = State::kIdle;
  uint64_t sequence_ GUARDED_BY(mu_) = 0;  // of the present checkpoint, or the last one
  uint64_t next_sequence_ GUARDED_BY(mu_) = 1;
  Manifest manifest_ GUARDED_BY(mu_);  // of the snapshot
  Vector<TableRef> snapshot_ GUARDED_BY(mu_);
  CallError result_ GUARDED_BY(mu_);  // of the last one
  CheckpointInfo last_ GUARDED_BY(mu_);
};

}  // namespace frugal
