// A table of the engine, and a batch: the declared keys of some tables.
#pragma once
#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>

#include "base/heap.h"
#include "checkpoint/row_tracker.h"
#include "checkpoint/table_files.h"
#include "engine/control.h"
#include "engine/ledger.h"
#include "engine/loading_parts.h"
#include "engine/session.h"
#include "storage/rows.h"
#include "window/window.h"

namespace frugal {

// What a checkpoint needs of a table.
struct TrackedTable : HeapObject {
  RowTracker tracker;
  TableFiles files;
  // Rows that were copied since the last call, before they changed.
  uint64_t new_copies() {
    const uint64_t all = tracker.counts().before_write.load(std::memory_order_relaxed) +
                         tracker.counts().before_delete.load(std::memory_order_relaxed);
    return all - std::exchange(copies, all);
  }
  uint64_t copies = 0;
  // The table's rows are those of the files.
  void restored() {
    files.begin(0);
    tracker.begin(0);
    tracker.end(true);
    files.end(true);
  }
};

struct Table : AnyTable {
  uint32_t number = 0;  // of all that the engine has had: what a trace calls it by
  frugal_table_config config{};
  Rows rows;
  Window window;
  // First step -> hyper-parameters, all of one kind.
  Map<uint64_t, frugal_optimizer> schedule GUARDED_BY(control);
  std::atomic<bool> has_state{false};  // there is state that is not a new row's: the kind is fixed
  // Calls that hold slots, in addition to declarations. A thread that resolves a part counts as a
  // call.
  std::atomic<uint32_t> calls{0};
  // Calls that need every slot: nothing is reserved ahead.
  std::atomic<uint32_t> reserving_paused{0};
  const frugal_optimizer& optimizer_at(uint64_t step) const REQUIRES(control) {
    return std::prev(schedule.upper_bound(step))->second;
  }
  uint32_t predict_pause = 0;             // steps that are not prepared ahead
  std::shared_ptr<TableLedger> ledger;    // or null
  std::unique_ptr<TrackedTable> tracked;  // or null; changed between steps
  // Held while the table gets another kind of optimizer, and by a thread that describes the table
  // to another process.
  Mutex kind_mu;
  uint64_t kinds GUARDED_BY(kind_mu) = 0;  // how often the kind has changed
  LoadingParts loading_parts;              // where rows may be stored
};
using TableRef = std::shared_ptr<Table>;

struct Batch final : AnyBatch {
  Vector<PartRef> parts;
  Vector<TableRef> tables;
  size_t size() const override { return parts.size(); }
  const AnyTable& table(size_t part) const override { return *tables[part]; }

  // Called when all parts are there.
  void index() {
    auto before = [&](uint32_t a, uint32_t b) { return tables[a]->number < tables[b]->number; };
    by_table.resize(parts.size());
    for (uint32_t i = 0; i < by_table.size(); ++i) by_table[i] = i;
    std::stable_sort(by_table.begin(), by_table.end(), before);
  }
  // Visits its parts, or those of one table, in their order.
  template <class Visit>
  void each(const Table* of, Visit visit) {
    if (!of) {
      for (size_t i = 0; i < parts.size(); ++i) visit(*this, i);
      return;
    }
    auto before = [&](uint32_t i, uint32_t number) { return tables[i]->number < number; };
    auto at = std::lower_bound(by_table.begin(), by_table.end(), of->number, before);
    for (; at != by_table.end() && tables[*at].get() == of; ++at) visit(*this, size_t{*at});
  }

  Vector<uint32_t> by_table;  // parts, by the numbers of their tables
  // Guarded by the lock of Declarations. `entered`: the batch is entered. `own`: its rank's present
  // trainer has declared it. Before part `to_resolve` none is left to resolve, and before part
  // `to_link` none to link.
  bool entered = false, own = false;
  uint32_t to_resolve = 0, to_link = 0;
  uint32_t at = 0;                            // its index among those of its step
  Batch *before = nullptr, *after = nullptr;  // those of its rank next to it
};
using BatchRef = std::shared_ptr<Batch>;

constexpr uint32_t kNoRank = UINT32_MAX;

}  // namespace frugal
