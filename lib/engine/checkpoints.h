// Checkpoints of an engine: the folder that it writes, the snapshot of a step, and the thread that
// writes a checkpoint while training goes on (docs/checkpoints.md).
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>

#include "base/condition.h"
#include "checkpoint/blobs.h"
#include "checkpoint/kept_checkpoints.h"
#include "engine/counters.h"
#include "engine/flusher.h"
#include "engine/memory.h"
#include "engine/pacing.h"
#include "engine/phase.h"
#include "engine/ranks.h"
#include "engine/tables.h"
#include "engine/workers.h"

namespace frugal {

// Test hook: the thread that saves rows sleeps so long after each piece. 0: not at all.
void checkpoint_test_pause(uint64_t ns);
// Test hook: so many bytes of copies of rows may wait for the disk before gates wait.
void checkpoint_test_budget(uint64_t bytes);

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
    Pacing& pacing;
    EngineMemory& memory;
    Meters& meters;
    std::function<void(int, const char*)> log;
  };
  explicit Checkpoints(const Parts& parts) : of_(parts) {
    buffers_.on_within([this] { of_.workers.progress(); });
  }
  ~Checkpoints();

  // --- Between steps, and when all updates are written
  // Writes the folder from now on.
  Status open(const char* path, const frugal_folder_config& config);
  Status close();
  // Each opening of a folder has a number. 0: none is open.
  uint64_t opening() const { return opening_.load(); }
  bool opened() const { return opening() != 0; }
  // Null: none is open.
  const std::shared_ptr<Folder>& folder() const { return to_.folder; }
  // The tables are those of this checkpoint of the folder.
  Status based_on(const Manifest& manifest) { return kept_.based_on(manifest); }
  // The blobs of the last committed step, which was restored.
  void restored(BlobsRef blobs);

  // --- Any thread
  // The changes of a table that no other thread knows yet count from now on, if a folder is open.
  // `kind`: of its optimizer. `number`: the table's in the folder; 0: a new one. Another call may
  // close the folder meanwhile. Before the table is used, opening() must still be `*opening`.
  Status track_new(Table& table, int32_t kind, uint64_t number, uint64_t* opening);
  // Begins a checkpoint, and returns its number. BUSY: one is being written.
  Status request(const frugal_checkpoint_config& config, uint64_t* number);
  // OK: it is on disk. `number` 0: the one that was begun last.
  Status wait(uint64_t number, uint64_t until, frugal_checkpoint_info* info);
  Status cancel(uint64_t number);  // 0: likewise
  Status remove(uint64_t number);
  // The step's commit takes a snapshot.
  bool due(uint64_t step) const { return wanted_.load(std::memory_order_relaxed) == step; }
  Status await_idle(uint64_t until);  // no snapshot is being written
  // Copies of rows that wait for the disk are within their budget. (Each table has one buffer that
  // fills. They do not count: no write would give them back.)
  bool within_budget();
  // Returns when they are. For calls between steps, of which no gate takes account.
  void await_room() noexcept;
  // The first rank is about to begin the step.
  void beginning(uint64_t step) noexcept REQUIRES(control);
  // A step was committed; no later one is. `*blobs`: those of its ranks, or null. It gets what the
  // caller is to release.
  void committed(uint64_t step, BlobsRef* blobs) noexcept REQUIRES(control);
  void stop() noexcept;  // the engine is being closed: nothing is acknowledged any more

 private:
  static constexpr uint64_t kResults = 64;  // that are known
  enum class State { kIdle, kRequested, kTaken };
  struct Result {
    uint64_t number = 0;
    CallError error;
    frugal_checkpoint_info info{};
  };
  // When a checkpoint is due by itself.
  struct Schedule {
    uint64_t every_steps = 0, every_ns = 0;  // 0: never
    uint64_t next_step = kNoStep;            // the first that the last checkpoint does not have
    uint64_t since = 0;                      // now_ns() of its snapshot
    bool due(uint64_t step) const;
  };
  // `unchanged`: the table is as it was created.
  Status track(Table& table, int32_t kind, bool unchanged, uint64_t number);
  Status may_displace() const REQUIRES(mu_);
  void begin(uint64_t step, const char* name, bool by_itself) REQUIRES(mu_);
  void end(const CallError& error) REQUIRES(mu_);
  void take(BlobsRef blobs) noexcept REQUIRES(control, mu_);
  void main();
  Status write(const Vector<TableRef>& tables, const BlobsRef& blobs, Manifest* manifest);
  Status await_written(const Vector<TableRef>& tables, uint64_t next_step);
  Status save_rows(const Vector<TableRef>& tables, Table& table);
  Status collect(const Vector<TableRef>& tables);
  Status going_on();
  void count_time() noexcept;
  uint64_t count(const Vector<TableRef>& tables, const Manifest& manifest, bool kept);

  const Parts of_;
  std::atomic<uint64_t> opening_{0};
  uint64_t openings_ = 0;  // how many folders were opened
  FolderWriter to_;
  KeptCheckpoints kept_;
  RecordBuffers buffers_{size_t{8} << 20};
  std::unique_ptr<IoQueue> queue_;
  Thread thread_;
  uint64_t cpu_ns_ = 0;  // of the thread, that pacing knows
  std::atomic<uint64_t> next_table_{1};
  std::atomic<uint64_t> wanted_{kNoStep};  // the step whose commit takes the snapshot
  std::atomic<bool> scheduled_{false}, has_blobs_{false};
  std::atomic<bool> stopping_{false}, cancelled_{false};

  Mutex mu_;
  Condition changed_;
  bool accepting_ GUARDED_BY(mu_) = false;  // a folder is open, and no call opens or closes it
  State state_ GUARDED_BY(mu_) = State::kIdle;
  bool by_itself_ GUARDED_BY(mu_) = false;  // the present one; no call has asked for it
  uint64_t number_ GUARDED_BY(mu_) = 0;     // of the present checkpoint, or the last one
  uint64_t next_number_ GUARDED_BY(mu_) = 1;
  String name_ GUARDED_BY(mu_);  // of the present one
  Schedule schedule_ GUARDED_BY(mu_);
  BlobsRef blobs_ GUARDED_BY(mu_);     // of the last committed step
  Manifest manifest_ GUARDED_BY(mu_);  // of the snapshot
  Vector<TableRef> snapshot_ GUARDED_BY(mu_);
  BlobsRef snapshot_blobs_ GUARDED_BY(mu_);
  std::array<Result, kResults> results_ GUARDED_BY(mu_);  // by number
};

}  // namespace frugal
