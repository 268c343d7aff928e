// What a rank's lookups and pushes do, once for both kinds of sessions: which declaration an op
// names, where its rows are read, and what becomes of its gradients.
//
// StepView is the interface to a rank's step. LocalStep (engine/local_step.h) implements it for a
// trainer that is a thread of the engine's process. The client implements it for a trainer of an
// attached process. Threads: with the trainer's call_mu held, for one call.
#pragma once
#include "base/assert.h"
#include "engine/gpu.h"
#include "engine/op_check.h"
#include "engine/session.h"
#include "storage/row_versions.h"

namespace frugal {

// Where an access's rows are read.
struct RowSource {
  device::RowsView rows{};
  CachedRowsAt cached_rows;               // of the trainer's cache, where it has some of them
  const VersionWord* versions = nullptr;  // staleness > 0: rows are written meanwhile
  uint64_t id = 0;                        // with the slot it chooses a row's version
  bool cached = false;                    // the trainer caches rows of the table
  uint64_t stale_keys = 0;                // keys of rows that have updates pending
};

// Where each of a part's rows is read: a cached row, the host row, or (staleness) a copy. Empty
// `pointers`: all are host rows.
template <class GoOn>
Status locate(const RowSource& from, const Part* part, const uint32_t* slots, size_t n,
              BufferPool& pool, Buffer* pointers, Buffer* copies, GoOn go_on) {
  FRUGAL_ASSERT(part || !from.cached_rows.host);
  if (!from.cached_rows.host && !from.versions) return FRUGAL_OK;
  FRUGAL_TRY(pool.get(n * sizeof(device::Element*), pointers));
  const auto** p = pointers->as<const device::Element*>();
  std::fill(p, p + n, nullptr);
  const size_t pitch = from.rows.value_pitch;
  if (from.cached_rows.host) {
    const uint32_t* start = part->row_start();
    const auto* source = part->sources.as<device::Source>();
    const uint64_t* pairs = part->pairs.as<uint64_t>();
    for (size_t i = 0; i < part->distinct; ++i) {
      if (!source[i].is_own()) continue;
      for (uint32_t k = start[i]; k < start[i + 1]; ++k)
        p[static_cast<uint32_t>(pairs[k])] =
            device::behind(from.cached_rows.host, source[i].index() * pitch);
    }
  }
  if (from.versions) FRUGAL_TRY(pool.get(n * pitch, copies));
  for (size_t i = 0; i < n; ++i) {
    const uint32_t s = slots[i];
    if (p[i] || s == kNoSlot) continue;
    if (s == kMissingSlot) {
      p[i] = row_of_zeros();
      continue;
    }
    p[i] = from.rows.row(s);
    if (!from.versions) continue;
    auto* copy = device::behind(copies->as<device::Element>(), i * pitch);
    FRUGAL_TRY(read_row(from.versions[version_of(from.id, s)], p[i], from.rows.dim, copy, go_on));
    p[i] = copy;
  }
  return FRUGAL_OK;
}

class StepView {
 public:
  // `handles`: the ids of the step's batches are their handles.
  StepView(Session& s, AnyTrainer& t, DataPath& d, BufferPool& p, BufferPool& pinned_memory,
           bool handles)
      : session(s),
        trainer(t),
        data(d),
        pool(p),
        pinned(pinned_memory),
        ids_are_handles(handles),
        accesses(t.accesses) {
    accesses.clear();
  }
  bool stale() const { return session.config().staleness != 0; }

  // First thing in a call: whether the rank is inside a step that no abort has undone.
  virtual Status begin(Use use) = 0;
  // Makes parts for the accesses that have none. These create no rows yet and may be given up, so
  // nothing of a failed call stays.
  virtual Status resolve(const frugal_op* ops, const GpuOp* gpu, Use use) = 0;
  // Rows of all accesses exist from now on.
  virtual Status create() = 0;
  // Where an access's rows are read; they are up to date then.
  virtual Status rows_of(const Access& access, RowSource* out) = 0;
  // Before kernels of the device work read rows of an access.
  virtual Status show_device(const Access& access, DeviceWork& device_work) = 0;
  // A row is being written, perhaps by a process that is gone: whether to wait for that.
  virtual Status row_awaited() = 0;
  // What the call has read is right: no abort has undone the step meanwhile. `on_device`: kernels
  // may still be reading.
  virtual Status end(bool on_device) = 0;
  // Memory for sums, which kernels of the trainer's device write if `on_device`.
  virtual BufferPool& sums(bool on_device) = 0;
  // Gradients may be kept as they are: no other rank has any, and nothing else reads them before
  // they are applied.
  virtual bool keeps_gradients() const = 0;
  virtual bool streams_sums() const = 0;  // past the caches
  struct Counts {
    uint64_t keys = 0, hits = 0, misses = 0, stale = 0;
  };
  virtual void count(Use use, const Counts& counts) = 0;

  Session& session;
  AnyTrainer& trainer;
  DataPath& data;
  BufferPool &pool, &pinned;
  const bool ids_are_handles;
  Vector<Access>& accesses;  // of the call, in memory of the trainer's

 protected:
  ~StepView() { accesses.clear(); }
};

class RowPath {
 public:
  explicit RowPath(StepView& step) : step_(step), t_(step.trainer) {}
  Status lookup(const frugal_op* ops, size_t n);
  Status push(const frugal_op* ops, size_t n);
  Status borrow(size_t bytes, void** out);
  // Finds the declaration that an op names by its batch, or by its keys. `gpu`: for a trainer on a
  // GPU, what take_ops made of the op; else null. `lends`: the step keeps a declared part, and
  // `out` only borrows it for the call.
  Status find(const frugal_op& op, Use use, const GpuOp* gpu, Access* out, bool lends = false);

 private:
  // `gpu`, here and below: for a trainer on a GPU, what take_ops made of the ops; else null.
  template <class Call>
  Status with_gpu_ops(const frugal_op* ops, size_t n, Use use, Call call);
  Status match_batch(frugal_op* op);
  Status table_of(const frugal_op& op, AnyTableRef* out) const;
  template <class Match>
  const StepPart* part_that(Match match) const;
  const StepPart* declared_part(uint64_t batch, uint32_t index) const;
  const StepPart* part_of_handle(const frugal_op& op) const;
  Status part_of_batch(const frugal_op& op, const AnyTable& table, const StepPart** out) const;
  Status accesses_of(const frugal_op* ops, size_t n, Use use, const GpuOp* gpu);
  Status lookup_rows(const frugal_op* ops, size_t n, const GpuOp* gpu);
  Status push_rows(const frugal_op* ops, size_t n, const GpuOp* gpu);
  Status gather(const Access& a, const RowSource& from, const frugal_op& op);
  Status gather_on_device(const Access& a, const RowSource& from, const GpuOp& op);
  Status bring_rows(const Access& a, const RowSource& from, const GpuOp& op);
  Status weight_grads(const Access& a, const device::GradSource& grads, float* out);
  void begin_rank_gradients(const Access& a, PushState* state);
  Status push_one(const frugal_op& op, const Access& a, PushState* state);
  Status push_on_device(const Access& a, const GpuOp& op, PushState* state, bool* reading);
  std::shared_ptr<Buffer> lent_for(const device::GradSource& source, const Part& part,
                                   uint32_t dim) const;
  Status keep_bags(size_t bags, bool reject, const device::GradSource& source, PushState* state);
  Status sum_lent(PushState* state);
  Status sum_push(PushState* state, const device::GradSource& source, bool* nan);

  StepView& step_;
  AnyTrainer& t_;
};

}  // namespace frugal
