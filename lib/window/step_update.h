// The update of one table by one step: what all ranks pushed, and which rows are still unwritten.
//
// What a rank submits is the sum of its gradients for each distinct row, in row order. It owns its
// bytes. The update of a row is the serial sum of its ranks' sums in ascending rank order, then the
// optimizer.
//
// With one rank, the list of its rows is the update's list. With several, lists are merged over
// ranges of slots: in parallel where the update is applied at once, and into arrays where rows
// become pending one by one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "arith/optimizer.h"
#include "device/kernels.h"
#include "flush/queue.h"
#include "storage/row_write.h"
#include "window/part.h"

namespace frugal {

// What one rank submits for one table in one step.
struct RankGradients {
  uint32_t rank = 0;
  PartRef part;        // its distinct rows
  bool whole = false;  // `part` was declared and pushed exactly
  Buffer sums;         // distinct x stride floats, row order; empty if `lent`
  size_t stride = 0;   // floats
  // Gradients in memory that the engine lent and that no thread writes any more, or copies of
  // gradients of bags. They are summed when the rows are written. Only for an update of one rank
  // (`ranks` has no other), without caches.
  std::shared_ptr<Buffer> lent;
  device::GradSource source{};
  size_t bytes() const { return lent ? lent->capacity() : rows() * stride * sizeof(float); }
  const uint32_t* slots() const { return part->row_slots(); }
  size_t rows() const { return part->distinct; }
};

// Rows and their rank sums, ready for Kernels::apply_terms.
struct TermList {
  struct Cursor {
    const uint32_t *at, *end, *base;
    size_t rank;  // index
  };
  Vector<uint32_t> slots;
  Vector<const float*> terms;  // room: `count` are used
  size_t count = 0;
  Vector<uint32_t> start;
  Vector<Cursor> cursors;  // of lists that are being merged
  // Reserves room for `rows` rows at a time, or for as many as have so many terms. No row has more
  // than `ranks` terms.
  void reserve(size_t rows, size_t ranks) {
    slots.reserve(rows);
    start.reserve(rows + 1);
    terms.resize(std::max(4 * rows, ranks));
    cursors.reserve(ranks);
  }
  // Returns whether there is no room for one more row, of at most `ranks` terms.
  bool full(size_t ranks) const {
    return slots.size() == slots.capacity() || terms.size() - count < ranks;
  }
  void clear() {
    slots.clear();
    count = 0;
    start.clear();
  }
  void close() { start.push_back(static_cast<uint32_t>(count)); }
  void begin_row(uint32_t slot) {
    close();
    slots.push_back(slot);
  }
  void add(const float* term) {
    if (count == terms.size()) terms.resize(2 * count + 16);
    terms[count++] = term;
  }
};

struct StepUpdate : HeapObject {
  uint64_t step = 0;
  uint32_t seq = 0;  // its number in the window
  arith::StepScalars scalars{};
  Vector<RankGradients> ranks;  // ascending; ranks without gradients are not here
  size_t bytes = 0;             // of the sums: counted against the budget

  // Rows as a list, which is filled when the rows become pending one by one (deferred). With one
  // rank, `slots` is its own list, and a row's one term is the sum of the same index.
  const uint32_t* slots = nullptr;
  size_t n = 0;
  Vector<uint32_t> merged_slots;
  Vector<uint32_t> term_start, term_rank, term_index;
  // The window's, guarded by its locks.
  Vector<uint32_t> pages;               // of entries
  Vector<uint32_t> blocked_at_prepare;  // rows that had older pending updates
  Vector<uint64_t> next;  // of a row: seq << 32 | row of the next pending update + 1, or 0
  uint64_t prepared[kRing + 1] = {};
  size_t prepared_rows = 0;  // rows prepared so far
  bool committed = false;
  bool unqueued = false;  // a row of it is more urgent than its queue entry says
  size_t remaining = 0;   // rows not yet in the host rows

  // The record that the table's watcher keeps until the update is written; or null.
  std::shared_ptr<UpdateRecord> record;

  ~StepUpdate() { release_bytes(); }
  // Called when all rows are in the host rows (a cache may still have to apply them). Gives the
  // bytes back.
  void release_bytes() {
    record.reset();
    if (accounted_) accounted_->fetch_sub(bytes, std::memory_order_relaxed);
    accounted_ = nullptr;
  }
  // Counts `bytes` against a budget until they are given back.
  void account(std::atomic<uint64_t>* total, std::atomic<uint64_t>* peak) {
    accounted_ = total;
    uint64_t now = total->fetch_add(bytes, std::memory_order_relaxed) + bytes;
    if (now > peak->load(std::memory_order_relaxed)) peak->store(now, std::memory_order_relaxed);
  }

  void make_list();  // merges the ranks; fills slots, n and the terms
  void add_terms(size_t row, TermList* out) const;
  // Merges the rows with slots in [low, high) of all ranks. take(last) uses them whenever `out` is
  // full and at the end. Allocates nothing.
  template <class Take>
  void merge_range(uint64_t low, uint64_t high, TermList* out, Take take) const;
  // Returns slot values that cut the rows into chunks of about `rows` rows.
  void cut(size_t rows, Vector<uint64_t>* bounds) const;

 private:
  std::atomic<uint64_t>* accounted_ = nullptr;
};

// Walks the union of several ascending lists. It calls visit(slot) for each distinct slot. Then it
// calls term(has, rank index, row), in rank order, for each list that is not at its end: whether
// the list has the slot, and the row if so. (Whether lists share slots is unpredictable, so no
// branch depends on it.) `cursors` has room for one cursor a rank, or allocates it.
template <class Visit, class Term>
void merge(const Vector<RankGradients>& ranks, uint64_t low, uint64_t high,
           Vector<TermList::Cursor>* cursors, Visit visit, Term term) {
  cursors->clear();
  for (size_t r = 0; r < ranks.size(); ++r) {
    const uint32_t* s = ranks[r].slots();
    const uint32_t* e = s + ranks[r].rows();
    const uint32_t* from = low == 0 ? s : std::lower_bound(s, e, low);
    const uint32_t* to = high > UINT32_MAX ? e : std::lower_bound(from, e, high);
    if (from != to) cursors->push_back({from, to, s, r});
  }
  TermList::Cursor* const all = cursors->data();
  for (size_t n = cursors->size(); n > 0;) {
    uint32_t least = *all[0].at;
    for (size_t i = 1; i < n; ++i) least = std::min(least, *all[i].at);
    visit(least);
    bool ended = false;
    for (size_t i = 0; i < n; ++i) {
      TermList::Cursor& c = all[i];
      const bool has = *c.at == least;
      term(has, c.rank, static_cast<uint32_t>(c.at - c.base));
      c.at += has;
      ended |= c.at == c.end;
    }
    if (!ended) continue;
    auto is_at_end = [](const TermList::Cursor& c) { return c.at == c.end; };
    n = static_cast<size_t>(std::remove_if(all, all + n, is_at_end) - all);
  }
}

template <class Take>
void StepUpdate::merge_range(uint64_t low, uint64_t high, TermList* out, Take take) const {
  out->clear();
  auto taken = [&](bool last) {
    out->close();
    take(last);
    out->clear();
  };
  const float** const terms = out->terms.data();
  merge(
      ranks, low, high, &out->cursors,
      [&](uint32_t slot) {
        if (out->full(ranks.size())) taken(false);
        out->begin_row(slot);
      },
      [&](bool has, size_t r, uint32_t row) {
        terms[out->count] = ranks[r].sums.as<float>() + size_t{row} * ranks[r].stride;
        out->count += has;
      });
  if (!out->slots.empty()) taken(true);
}

// Combines `n` run sums of fold32, one after the other in `runs`, pairwise into the first.
void combine_runs(float* runs, size_t n, uint32_t dim);

using UpdateRef = std::shared_ptr<StepUpdate>;

}  // namespace frugal
