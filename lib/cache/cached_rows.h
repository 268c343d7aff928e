// The lines of a cache: values and state of the rows that it has. Which row is in which line its
// index knows (row_cache.h).
//
// At a refresh lines get what was committed since the last one, and the rows that come in, all as
// a CachePlan says. Who does that differs with where they are: in host memory the caller's thread
// (HostCachedRows), on a GPU its kernels (DeviceCachedRows, engine/gpu.h), on a GPU of another
// process that process, which is told (AttachedCachedRows, engine/trainer.h).
//
// Threads: as the cache's index.
#pragma once
#include "cache/row_cache.h"
#include "device/ops/rows.h"

namespace frugal {

// Where lines are read.
struct CachedRowsAt {
  const device::Element* host = nullptr;  // line 0, in memory of this process
  device::RowsPtr device{};     // on the trainer's GPU
  explicit operator bool() const { return host || device.values; }
};

// A committed update that a refresh brings to lines.
struct DueUpdate {
  UpdateRef update;
  bool planned = false;  // what it touches stands in the plan
  CachedRowUpdate other;  // else here
  size_t now = 0;        // so many lines before the step reads; others until the next refresh
  const CachedRowUpdate& touched(const CachePlan& plan) const {
    return planned ? plan.update : other;
  }
};

class CachedRows : public HeapObject {
 public:
  virtual ~CachedRows() = default;
  const CachedRowsAt& at() const { return at_; }
  // What can be done ahead of a planned refresh. forget_plan: it will not be as planned, or is
  // behind us.
  virtual void send(const CachePlan&) {}
  virtual void forget_plan() noexcept {}
  // The refresh: updates, and then the rows that come in, of which the host rows are up to date.
  virtual Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) = 0;
  // When those of all tables are behind us: what the step does not wait for.
  virtual Status finish() { return FRUGAL_OK; }

 protected:
  CachedRowsAt at_;
};

class HostCachedRows final : public CachedRows {
 public:
  // Of a table's rows.
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
