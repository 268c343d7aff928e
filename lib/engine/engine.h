// The engine: the step protocol, and which thread does which work.
//
// Commits, aborts, ranks and the writing of rows have classes of their own, with their own state
// (docs/architecture.md, "Classes"). This class is what calls do with them. One mutex guards the
// control state: ranks, tables, step records, the phase. Declared batches have a lock of their own
// (declarations.h), and so have jobs and waiting threads (workers.h).
//
// Work per key runs outside both. The window's lock guards a table's read sets and pending updates,
// and the rows' lock the mapping of keys. Updates of rows need no lock, since one thread at a time
// has claimed a row. Three rare operations visit keys under the declarations' lock, so that no
// batch comes or goes meanwhile. They take linked parts back (drop_batches), make room in a full
// table (give_up_reserved), and count holders of deleted rows' slots (recount). With a storage
// tier, revoking a part and planning a refresh do so too.
//
// A step: step_begin waits at the gate; lookup gathers; push sums a rank's gradients; step_end
// leaves them in the step's record; the last rank's step_end commits. A commit at once publishes a
// job, whose chunks workers and gates take. A deferred commit makes the updates pending in the
// tables' windows, from which workers and gates take the most urgent.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/buffer.h"
#include "base/condition.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/trace.h"
#include "cache/row_cache.h"
#include "engine/abort.h"
#include "engine/checkpoints.h"
#include "engine/commit.h"
#include "engine/counters.h"
#include "engine/data_path.h"
#include "engine/declarations.h"
#include "engine/flusher.h"
#include "engine/gpu.h"
#include "engine/ledger.h"
#include "engine/memory.h"
#include "engine/op_check.h"
#include "engine/pacing.h"
#include "engine/phase.h"
#include "engine/pinned_tables.h"
#include "engine/ranks.h"
#include "engine/row_path.h"
#include "engine/session.h"
#include "engine/step_gate.h"
#include "engine/step_records.h"
#include "engine/table.h"
#include "engine/tables.h"
#include "engine/workers.h"
#include "storage/row_versions.h"
#include "storage/rows.h"
#include "window/window.h"

namespace frugal {

// Resolved keys, as a trainer in another process uses them.
struct RemotePart {
  uint64_t batch = 0;  // the declaration, if it is one: its handle, then the trainer's number
  uint32_t index = 0;  // of the part in the batch
  TableRef table;
  PartRef part;
  bool whole = false;  // a whole declaration, resolved
  bool used = false;   // its rows exist: the trainer may submit sums for them
  // The rows are up to date. If not, the trainer asks for them as if they were undeclared.
  bool up_to_date = false;
  bool cached = false;                             // the trainer caches rows of the table
  uint64_t stale = 0;                              // keys of rows with pending updates
  bool in_cached_rows = false;                     // some rows of the part are cached
  const device::Element* cached_values = nullptr;  // of cache slot 0; null: on the trainer's device
};

// The sums of a trainer in another process for one table in a step.
struct RemotePush {
  TableRef table;
  PartRef part;
  bool whole = false;
  Buffer sums;
};

struct RemoteCounts {
  uint64_t keys_looked_up = 0, keys_pushed = 0, cache_hits = 0, cache_misses = 0, lookup_ns = 0,
           push_ns = 0, prefetch_ns = 0, step_begin_ns = 0, step_end_ns = 0, cpu_ns = 0,
           stale_reads = 0;
};

class Engine final : public Session, private DataPath {
 public:
  explicit Engine(const frugal_config& config);
  ~Engine();
  Status start();
  std::shared_ptr<Engine> here() override {
    return std::static_pointer_cast<Engine>(shared_from_this());
  }
  void close_ranks() override;
  void shutdown() override;

  // --- tables.cpp
  Status create_table(const frugal_table_config& config, AnyTableRef* out) override;
  // `here`: this process creates it, which it may do once; else another process. EXISTS with *out
  // set: that table exists and is the same.
  // `number`: the table's in the folder of checkpoints; 0: a new one. `blank`: the rows of an eager
  // dense table have no memory yet. The caller commits it and writes all of them.
  Status create_table(const frugal_table_config& config, TableRef* out, bool here,
                      uint64_t number = 0, bool blank = false);
  Status open_table(const frugal_table_config& config, bool here, bool blank, TableRef* out);
  Status op_table(const frugal_op& op, TableRef* out) const;
  // The table that has this handle in another process.
  Status table_of(uint64_t handle, TableRef* out) const;
  Status drop_table(const AnyTableRef& table) override;
  Status remove_table(const TableRef& table);  // between steps, when all is written
  Status find_table(const char* name, AnyTableRef* out) override;
  TableRef find_table(const char* name) {  // null: there is none
    ControlLock lock(mu_);
    return tables_.find(name);
  }
  Status next_table(uint64_t* cursor, String* name) override;
  Status describe(AnyTable& table, frugal_table_info* out) override;
  Status set_optimizer(AnyTable& table, uint64_t first_step,
                       const frugal_optimizer& optimizer) override;
  // --- outside.cpp: rows outside steps
  Status count(AnyTable& table, uint64_t* out) override;
  Status keys(AnyTable& table, uint64_t* cursor, uint64_t* out, size_t capacity,
              size_t* n) override;
  Status get(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, float* out,
             size_t stride, uint8_t* found) override;
  Status put(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, const float* in,
             size_t stride) override;
  Status remove(AnyTable& table, const uint64_t* keys, size_t n, uint64_t* deleted) override;
  Status flush(Deadline deadline) override;
  Status read(AnyTrainer* trainer, const frugal_op* ops, size_t n, Deadline deadline) override;
  static std::atomic<uint64_t>& cache_bytes(Trainer& t) {
    return t.gpu || t.remote_cached_rows.exist ? t.counts.hbm_cache_bytes
                                               : t.counts.host_cache_bytes;
  }
  // --- folder.cpp: checkpoints
  Checkpoints& checkpoints() { return checkpoints_; }
  Status open_folder(const char* path, const frugal_folder_config& config) override;
  Status close_folder() override;
  Status checkpoint(const frugal_checkpoint_config& config, uint64_t* number) override;
  Status await_checkpoint(uint64_t number, Deadline deadline,
                          frugal_checkpoint_info* info) override;
  Status cancel_checkpoint(uint64_t number) override;
  Status delete_checkpoint(uint64_t number) override;
  Status checkpoint_due(AnyTrainer& t, bool* due) override;
  Status give_blob(AnyTrainer& t, const void* bytes, size_t size) override;
  // --- restore.cpp
  // Creates tables of a checkpoint: all that are asked for, or none.
  Status restore(const frugal_restore_config& config, frugal_checkpoint_info* info) override;
  // --- trainers.cpp
  Status create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) override;
  // `attached`: the device is another process's, and the engine does not use it.
  Status create_trainer(const frugal_trainer_config& config, TrainerRef* out, bool attached);
  Status close_trainer(const AnyTrainerRef& trainer, bool abandoned) override;
  Status close_trainer(const TrainerRef& trainer);  // its handle is gone
  Status prefetch(AnyTrainer& t, uint64_t step, const frugal_op* ops, size_t n, bool want_handle,
                  uint64_t* batch_out) override {
    return prefetch(own(t), step, ops, n, want_handle, batch_out, nullptr, false);
  }
  // `copies`: the keys of each op (of dense tables their slots), which the parts take over; or
  // null. `late`: the trainer has gone on since; its next call reports what has undone its step.
  Status prefetch(Trainer& t, uint64_t step, const frugal_op* ops, size_t n, bool want_handle,
                  uint64_t* batch_out, Buffer* copies, bool late);
  Status cancel(AnyTrainer& t, const AnyBatchRef& batch) override;
  Status set_stream(AnyTrainer& t, void* stream) override;
  // --- steps.cpp
  Status step_begin(AnyTrainer& t, uint64_t step, Deadline deadline) override;
  Status step_end(AnyTrainer& t, uint64_t step, uint32_t flags) override;
  Status abort_call(AnyTrainer& t) override;
  // --- access.cpp
  Status lookup(AnyTrainer& t, const frugal_op* ops, size_t n) override;
  Status push(AnyTrainer& t, const frugal_op* ops, size_t n) override;
  Status borrow(AnyTrainer& t, size_t bytes, void** out) override;
  // --- remote.cpp: trainers in other processes
  Status declared_parts(Trainer& t, Vector<RemotePart>* out);
  Status access_rows(Trainer& t, const frugal_op* ops, const OpNumbers& numbers,
                     Vector<RemotePart>* out);
  Status use_parts(Trainer& t, const Vector<RemotePart>& used);
  void use_marked(Trainer& t, const Vector<RemotePart>& used);
  Status submit_gradients(Trainer& t, Vector<RemotePush>* pushes);
  Status remote_failed(Trainer& t);
  void count_remote(Trainer& t, const RemoteCounts& counts);
  bool tracing() const { return meters_.trace.on(); }
  void trace_remote(const TraceEvent& event) { meters_.trace.keep(event); }
  Status inside_step(Trainer& t);
  bool is_inside(const Trainer& t, uint64_t step);
  // Called before step_begin. The trainer has carried out the refreshes up to `number`, and had no
  // device memory for `table` (0: none).
  Status carried_out(Trainer& t, uint64_t number, uint64_t table);
  void take_refresh(Trainer& t, RemoteRefresh* out);
  Status lose_trainer(const TrainerRef& trainer);
  // OUT_OF_MEMORY: not now; nothing has been done.
  Status may_close(const Trainer& t);
  // The engine is about to be closed: threads that wait for memory to undo steps (undo_surely) give
  // up.
  void stop_retrying() { aborter_.stop_retrying(); }
  // Sets the callback for unresponsive trainers in other processes: those not heard of for the
  // whole time-out while a gate waited for them. It runs under the engine's mutex, so it passes the
  // trainer to another thread, which declares it lost. Null: no callback.
  void on_unresponsive(std::function<void(const TrainerRef&)> callback) {
    ranks_.on_unresponsive(std::move(callback));
  }
  // Keeps the ledger from now on. Between steps only.
  Status keep_ledger();
  const std::shared_ptr<Ledger>& ledger() const { return tables_.ledger; }
  bool closed() const { return phase_.closed(); }
  // The shared address of memory that other processes map; kNoShmAddress for other memory.
  uint64_t shm_address(const void* p) const { return memory_.shm_address(p); }
  Arena& arena() { return memory_.arena; }
  uint64_t versions_address() const { return shm_address(memory_.versions()); }

  Status told(AnyTrainer& t, Status status) override {
    if (status == FRUGAL_ERR_DEVICE && t.gpu) {
      t.gpu->look();
      if (t.gpu->sticky()) device_failed(t.rank, *t.gpu);
    }
    return status;
  }
  Status health() override { return workers_.health(); }
  Status check() const;  // health and closing
  Status stats(frugal_stats* out) override;
  // --- metrics.cpp
  Status metrics(String* out) override;
  Status start_trace(size_t events) override { return start_trace(events, nullptr); }
  // `id`: of this recording.
  Status start_trace(size_t events, uint64_t* id);
  void forget_trace(uint64_t id) { meters_.trace.forget(id); }
  Status stop_trace(const char* path) override { return meters_.trace.stop(path); }
  Status committed(uint64_t* step) override;
  BufferPool& pool() { return memory_.pool; }
  // For memory that no other process reads in place.
  BufferPool& own_pool() { return memory_.unread(); }
  Counters& counters() { return meters_.counters; }

 private:
  friend class OutsideScope;
  friend class CommittedScope;
  // The objects that calls and the classes above pass are this engine's own.
  static Table& own(AnyTable& t) { return static_cast<Table&>(t); }
  static Trainer& own(AnyTrainer& t) { return static_cast<Trainer&>(t); }
  // --- work.cpp: work of flush threads, which waiting threads help with
  void list_work();
  bool resolve_one(uint64_t up_to, bool gate = false);
  // `worker`: between two pieces it helps with a published job.
  bool link_one(uint64_t up_to, bool worker = false);
  bool predict_update(StepRecord* record, TableRef* table, UpdateRef* update) REQUIRES(control);
  bool prepare_one();
  Workers::Outcome warm_one();
  void add_rewarm(StepRecord* record, const TableRef& table, Vector<uint32_t>&& slots)
      REQUIRES(control);
  [[nodiscard]] Status parallel(size_t chunks, void (*run)(void*, size_t), void* context) override {
    return workers_.parallel(chunks, run, context);
  }
  template <class Ready, class Help>
  Status wait(Deadline deadline, Trainer* trainer, Ready ready, Help help);
  void log(int level, const char* text);

  // --- device_work.cpp: device work in flight
  Status join_gpu(const char* device, Trainer& t);
  bool pin_one();  // one slab of memory from before the first GPU
  Status await_pins(Trainer& t, Deadline deadline) REQUIRES(t.call_mu);
  bool poll_device_work();                      // takes in what has completed since the last poll
  Status await_device_work(Deadline deadline);  // waits for all that is in flight
  Status end_device_work(Trainer& leaving);
  Status end_device_work(Trainer& t, DeviceWork::Found* found) REQUIRES(t.call_mu);
  void device_failed(uint32_t rank, const Gpu& gpu);

  // --- refresh.cpp: refreshes of caches
  using PartsByTable = Map<const Table*, Vector<PartRef>>;
  TableCache& cache_of(Trainer& t, const TableRef& table);
  Status open_cached_rows(Trainer& t, const TableRef& table, uint64_t cache_slots,
                          std::unique_ptr<CachedRows>* out);
  static TableCache* cache_in(Trainer& t, const Table& table);
  bool plan_one();
  bool to_plan(const Trainer& t) const REQUIRES(control);
  void begin_plan(Trainer& t, uint64_t step) REQUIRES(control);
  void end_plan(Trainer& t);
  void allow_planning(Trainer& t, uint64_t step);
  void forbid_planning(Trainer& t);
  bool declared_by(const Trainer& t, uint64_t step, PartsByTable* parts) REQUIRES(control);
  Status refresh_caches(Trainer& t, uint64_t step);
  Status refresh_or_forget(Trainer& t, uint64_t step);
  void forget_sources(const Trainer& t, uint64_t step) noexcept;
  void drop_cached(Table& table, const uint32_t* slots, size_t n);
  void drop_cache(Trainer& t, const Table& table) noexcept;

  // --- restore.cpp
  Status may_restore(const Manifest& m);
  Status make_restored(const Manifest& m, const ManifestTable& t, bool own, Vector<TableRef>* made);
  Status load(Folder& folder, const Manifest& m, bool own, Vector<TableRef>* made, BlobsRef* blobs);

  // --- gate.cpp
  Status gate(Trainer* t, uint64_t step, Deadline deadline);
  bool open_still(uint64_t step) REQUIRES(control);

  // --- steps.cpp
  void take_parts(Trainer& t, uint64_t step) REQUIRES(control, t.call_mu);
  void schedule_prepare(const Trainer& t, uint64_t step);
  struct Submitted {  // a rank's gradients for a table at the end of the step
    PushState* push;
    RankGradients joined;
    StepRecord::TableGradients* to;
  };
  Status join_rank_gradients(Trainer& t, Vector<Submitted>* rank_gradients) REQUIRES(t.call_mu);
  DeviceWorkRef submit(Trainer& t, StepRecord& record, Vector<Submitted>& rank_gradients,
                       uint32_t flags) REQUIRES(control, t.call_mu);
  void end_holding(Table& table);
  // By default it also reports what has undone the step.
  Status begin_call(Trainer& t, bool tells = true) REQUIRES(t.call_mu);
  bool describe_cached_rows(Trainer& t, RemotePart* part);
  Status give_up_cached_rows(Trainer& t);
  // Waits until the other ranks end steps, and also finds unresponsive ranks.
  template <class Ready, class Help>
  Status wait_for_ranks(Deadline deadline, Trainer* trainer, Ready ready, Help help);
  bool find_unresponsive();  // returns whether there was one
  bool need_links() const { return pacing_.deferred() || ranks_.caches_exist(); }
  Status first_step_allowed(uint64_t first_step) const REQUIRES(control);
  Status change_kind(Table& table, const frugal_optimizer& optimizer);
  Status may_declare(const Trainer& t, uint64_t step, bool late) REQUIRES(control);
  void drop_batches(uint64_t step, uint32_t rank, const Batch* one);
  void give_up_reserved(Table& table);
  // Makes a call. If rows that are only reserved fill one of its tables, frees those and repeats
  // the call.
  template <class Call>
  Status with_room(const frugal_op* ops, size_t n, Call call);
  // --- stored_rows.cpp: tables with a storage tier
  bool load_one();
  bool free_slots(Table& table, uint64_t step);
  bool revoke_later(Table& table, uint64_t step);
  template <class Choose>
  bool give_up_cache(Choose choose);
  bool give_up_cached_rows_of(Table& table);
  bool give_up_own_cached_rows(const Trainer& t);
  bool loading_until(uint64_t step) REQUIRES(control);
  Status await_loading(Table& table, const uint32_t* slots, size_t n);
  // make(i, row) changes the row of keys[i], which has its old values or zeros.
  Status put_stored(Table& table, const uint64_t* keys, size_t n,
                    const std::function<void(size_t, const device::RowsRef&)>& make,
                    uint64_t* created);
  Status remove_stored(Table& table, Vector<uint64_t> keys, uint64_t* deleted);
  template <class Call>
  Status with_slots(Trainer& t, const Vector<Access>& accesses, Call call) REQUIRES(t.call_mu);
  Status await_loaded(Trainer& t, const Vector<Access>& accesses) REQUIRES(t.call_mu);
  std::atomic<uint32_t> tiered_tables_{0};  // ever created
  // --- access.cpp
  class CallHold;
  class LocalStep;
  Status resolve_access(Trainer& t, const frugal_op& op, Access* access, bool sorted);
  void create_rows(Trainer& t, const Vector<Access>& accesses);
  void create_used(Trainer& t, const Vector<RemotePart>& used);
  void tell_used(const Trainer& by);
  Status wait_written(Trainer* t, Table& table, const uint32_t* slots, size_t n, uint64_t step,
                      Deadline deadline);
  // One poll while other threads write a row. The deadline begins with the first poll.
  Status row_awaited(Deadline* until) const;
  // The source of rows outside steps, which is no cache.
  void host_rows(const Table& table, RowSource* from) const;
  TableCache* cache_for(Trainer& t, const Access& access);
  Status wait_written_access(Trainer& t, const Access& access);
  size_t stale_keys(Table& table, const uint32_t* slots, size_t n) {
    return stale() && table.window.opened() ? table.window.collect_pending(slots, n, nullptr) : 0;
  }
  // Copies of stored rows: the copy of keys[i] is row at[i]; kMissingSlot: keys[i] has none.
  struct StoredCopies {
    Buffer rows;
    device::RowsView ref{};
    Vector<uint32_t> at;
    bool has(size_t i) const { return !at.empty() && at[i] != kMissingSlot; }
  };
  // `reading`: keeps the rows unchanged while it lives.
  Status await_readable(Trainer& t, Deadline deadline, uint64_t* step,
                        std::optional<Phase::During>* reading) REQUIRES(t.call_mu);
  // gpu: set if the rows go to memory of a device.
  Status read_op(Trainer* trainer, Table& table, const frugal_op& op, const GpuOp* gpu,
                 uint64_t step, Deadline deadline);
  Status read_rows(Table& table, const uint32_t* slots, size_t n, const frugal_op& op,
                   const StoredCopies& stored);
  Status read_to_device(Trainer& t, Table& table, const uint32_t* slots, size_t n, const GpuOp& op,
                        const StoredCopies& stored);
  Status read_stored(Table& table, const uint64_t* keys, size_t n, const uint32_t* slots,
                     StoredCopies* out);

  const uint64_t opened_ns_ = now_ns();
  EngineMemory memory_;
  Meters meters_;
  std::atomic<uint32_t> calls_{0};  // lookups and pushes under way
  Workers workers_;

  const Liveness liveness_ = Liveness::of(config_.timeout_ms);
  // Guards ranks, step records, tables and the phase.
  ControlMutex mu_;
  Pacing pacing_;  // outlives all updates
  Ranks ranks_;
  Tables tables_;
  Phase phase_;
  StepRecords records_;
  Flusher flusher_;
  TimedMutex outside_mu_;
  Declarations declarations_;
  StepGate gate_{{config_, phase_, ranks_, workers_, declarations_, pacing_, tables_, flusher_},
                 {[this](uint64_t step) {
                    return resolve_one(step, true) || (need_links() && link_one(step));
                  },
                  [this](uint64_t step) REQUIRES(control) { return loading_until(step); },
                  [this] { return load_one(); }, [this] { return checkpoints_.within_budget(); }}};
  PinnedTables pins_;
  bool in_flight() const { return records_.has_device_work() || declarations_.downloading(); }
  Vector<Thread> reapers_;  // undo steps of ranks whose GPU has failed
  bool stale() const { return config_.staleness != 0; }
  Committer committer_;
  Aborter aborter_;
  Checkpoints checkpoints_;
};

// No step begins during an operation outside steps.
class OutsideScope {
 public:
  OutsideScope(Engine& engine, Deadline deadline);
  Status status() const { return status_; }

 private:
  std::unique_lock<TimedMutex> order_;
  std::optional<Phase::During> outside_;
  Status status_ = FRUGAL_OK;
};

// Holds off commits and aborts, also while ranks are inside steps.
class CommittedScope {
 public:
  explicit CommittedScope(Engine& engine);
  ~CommittedScope();
  Status status() const { return status_; }

 private:
  Engine& engine_;
  std::optional<Phase::During> reads_;
  Status status_ = FRUGAL_OK;
};

}  // namespace frugal
