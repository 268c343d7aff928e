// A trainer's cache of a table: which rows it has (cache/row_cache.h), the cached rows
// (cache/cached_rows.h), and its next refresh.
//
// A refresh is planned in the step before, or when it is due, and carried out when its step begins.
// In the window, a row that a plan evicts counts as a host row from then on. An admitted row does
// not count as a cached row before it is one (`unflagged_`).
//
// Threads: one at a time. It is the one that plans (CacheRefresh::planning), the trainer's
// step_begin, or an operation outside steps.
#pragma once
#include "cache/cached_rows.h"
#include "engine/counters.h"
#include "engine/session.h"
#include "engine/table.h"

namespace frugal {

class TableCache {
 public:
  TableCache(const AnyTrainer& owner, TableRef table, BufferPool& pool, Counters& counters,
             bool stale)
      : owner_(owner), table_(std::move(table)), pool_(pool), counters_(counters), stale_(stale) {}
  // Without this call there is no cache, and the trainer works without one.
  void open(uint64_t cache_slots, std::unique_ptr<CachedRows> made, uint64_t bytes);
  bool there() const { return cached_rows_ != nullptr; }
  bool any() const { return cached_rows_ && index_.size() != 0; }  // rows
  const TableRef& table() const { return table_; }
  const CachedRowsAt& at() const { return cached_rows_->at(); }
  uint64_t bytes() const { return bytes_; }  // of the cached rows

  // Plans what the refresh of `step` does for these parts, which the cache's trainer has declared.
  // If the refresh is planned already, only parts that are new count. The window is open. Returns
  // false if nothing was left to plan, or there was no memory.
  bool plan_ahead(uint64_t step, const Vector<PartRef>& declared);
  // After plan_ahead(): what the ranks, ascending, push in the step before, if they push what they
  // declared.
  void expect(const Vector<PartRef>& pushed);
  // Cancels a plan that is not for this step, or depends on declarations that have gone. Rows that
  // were to be admitted stay out; those that were to be evicted have gone.
  void check_plan(uint64_t step, const Vector<PartRef>& declared);
  void cancel_plan();
  // The refresh of `step`: cached rows get the updates that were committed since the last one, and
  // admitted rows are copied. finish() does what the step does not wait for.
  Status refresh(uint64_t step, const Vector<PartRef>& declared,
                 const Vector<UpdateRef>& committed);
  Status finish();
  // From here on the owner's own reads of admitted rows wait for nothing.
  void flag(Window::Urgency urgency);

  // Outside steps: evicts these rows. The list has room for them.
  void drop(const uint32_t* slots, size_t n, Vector<uint32_t>* dropped);
  // After a refresh that has not been carried out whole, no cached row is what the index says. Host
  // rows are right, or will be: updates go there in any case.
  void forget() noexcept;
  void close() noexcept { cached_rows_.reset(); }  // after forget()

 private:
  Vector<PartRef> not_planned(const Vector<PartRef>& declared) const;
  Status plan(uint64_t step, const Vector<PartRef>& parts, Window::Urgency urgency);
  void slots_to_cache(const Vector<PartRef>& parts, Vector<uint32_t>* slots);
  bool hold(size_t from);
  Status set_sources(Part& part);
  DueUpdate due(const UpdateRef& update, bool all_now);
  void forget_plan() noexcept;

  const AnyTrainer& owner_;
  const TableRef table_;
  BufferPool& pool_;
  Counters& counters_;
  const bool stale_;
  RowCache index_;
  std::unique_ptr<CachedRows> cached_rows_;
  uint64_t bytes_ = 0;
  // The index is what it will be after the refresh of this step; the cached rows are not yet.
  uint64_t planned_ = kNoStep;
  CachePlan plan_;
  // Of the planning thread: the rows of the refresh, and their next reads; the evicted rows.
  Vector<uint32_t> slots_, evicted_;
  Vector<uint64_t> next_;
  Vector<uint32_t> unflagged_;  // admitted rows that the window does not know yet
};

}  // namespace frugal
