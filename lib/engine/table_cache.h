// A trainer's cache of a table: which rows it has (cache/row_cache.h), their lines
// (cache/cached_rows.h), and its next refresh.
//
// A refresh is planned in the step before, or when it is due, and carried out when its step
// begins. What the window is told: who goes out by a plan counts as a host row from that moment on;
// who comes in counts as a line not before it is one (`unflagged_`).
//
// Threads: one at a time: that which plans (CacheRefresh::planning), the trainer's step_begin, or
// an operation outside steps.
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
  // Without: there is no cache, and the trainer works with none.
  void open(uint64_t lines, std::unique_ptr<CachedRows> made, uint64_t bytes);
  bool there() const { return cached_rows_ != nullptr; }
  bool any() const { return cached_rows_ && index_.size() != 0; }  // rows
  const TableRef& table() const { return table_; }
  const CachedRowsAt& at() const { return cached_rows_->at(); }
  uint64_t bytes() const { return bytes_; }  // of the lines

  // Works out what the refresh of `step` does, for which its trainer has declared these parts:
  // those besides others, if it is planned already. The window is open. False: nothing was left to
  // plan, or there was no memory.
  bool plan_ahead(uint64_t step, const Vector<PartRef>& declared);
  // Behind that: what the ranks, ascending, push in the step before, if that is what they declared.
  void expect(const Vector<PartRef>& pushed);
  // A plan that is not for this step, or stands on declarations that have gone, is cancelled. Rows
  // that were to come in stay out; those that were to go have gone.
  void check_plan(uint64_t step, const Vector<PartRef>& declared);
  void cancel_plan();
  // The refresh of `step`: lines get the updates that were committed since the last one, and rows
  // come in. finish(): what the step does not wait for.
  Status refresh(uint64_t step, const Vector<PartRef>& declared,
                 const Vector<UpdateRef>& committed);
  Status finish();
  // The owner's own reads of rows that have come in wait for nothing any more.
  void flag(Window::Urgency urgency);

  // Outside steps: these rows go. The list has room for them.
  void drop(const uint32_t* slots, size_t n, Vector<uint32_t>* dropped);
  // After a refresh that has not been carried out whole, no line is what the index says. Host rows
  // are, or will be: updates go there in any case.
  void forget() noexcept;
  void close() noexcept { cached_rows_.reset(); }  // forgotten before

 private:
  Vector<PartRef> not_planned(const Vector<PartRef>& declared) const;
  Status plan(uint64_t step, const Vector<PartRef>& parts, Window::Urgency urgency);
  void slots_to_cache(const Vector<PartRef>& parts, Vector<uint32_t>* slots);
  bool hold(size_t from);
  Status place(Part& part);
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
  // The index is what it will be after the refresh of this step; the lines are not yet.
  uint64_t planned_ = kNoStep;
  CachePlan plan_;
  // Of who plans: the rows of the refresh, and their next reads; those that go.
  Vector<uint32_t> slots_, evicted_;
  Vector<uint64_t> next_;
  Vector<uint32_t> unflagged_;  // rows that have come in, which the window does not know yet
};

}  // namespace frugal
