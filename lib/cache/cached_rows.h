// The cached rows of a cache: values and state, by cache slot. The index (row_cache.h) knows which
// row is in which cache slot.
//
// A refresh applies the updates that were committed since the last refresh, and fills the admitted
// rows, as a CachePlan says. The implementation depends on where cached rows are:
// - in host memory, the calling thread does it (HostCachedRows);
// - on a GPU, its kernels do it (DeviceCachedRows, engine/gpu.h);
// - on a GPU of another process, that process does it on request (AttachedCachedRows,
//   engine/trainer.h).
//
// Threads: as for the cache's index.
#pragma once
#include "cache/row_cache.h"
#include "device/ops/rows.h"

namespace frugal {

// Where cached rows are read.
struct CachedRowsAt {
  const device::Element* host = nullptr;  // cache slot 0, in memory of this process
  device::RowsPtr device{};               // on the trainer's GPU
  explicit operator bool() const { return host || device.values; }
};

// A committed update that a refresh applies to cached rows.
struct DueUpdate {
  UpdateRef update;
  bool planned = false;   // touched() is the plan's update
  CachedRowUpdate other;  // touched() otherwise
  // so many cached rows before the step reads; the others until the next refresh
  size_t now = 0;
  const CachedRowUpdate& touched(const CachePlan& plan) const {
    return planned ? plan.update : other;
  }
};

class CachedRows : public HeapObject {
 public:
  virtual ~CachedRows() = default;
  const CachedRowsAt& at() const { return at_; }
  // send() does what can precede a planned refresh. forget_plan() follows the refresh, or a change
  // of its plan.
  virtual void send(const CachePlan&) {}
  virtual void forget_plan() noexcept {}
  // Refreshes: applies the updates, then fills the admitted rows. Host rows of these are up to
  // date.
  virtual Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) = 0;
  // Called after the refreshes of all tables, for work that the step does not wait for.
  virtual Status finish() { return FRUGAL_OK; }

 protected:
  CachedRowsAt at_;
};

class HostCachedRows final : public CachedRows {
 public:
  // Opens the cached rows of a table.
  static Status open(const Rows& rows, uint64_t cache_slots, BufferPool& pool,
                     std::unique_ptr<CachedRows>* out);
  Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) override;

 private:
  void apply(const CachedRowUpdate& touched, const StepUpdate& update);
  void fill(const Vector<uint32_t>& slots, const Vector<uint32_t>& cache_slots);
  device::RowsView rows_{};
  device::RowsRef cached_rows_{};
  Buffer values_, state_;
};

}  // namespace frugal
