// The tables of an engine. Its mutex guards which there are.
#pragma once
#include <algorithm>
#include <utility>

#include "engine/control.h"
#include "engine/ranks.h"
#include "engine/table.h"

namespace frugal {

class Tables {
 public:
  // `config` belongs to the engine, which may adjust it, and lives as long as this.
  Tables(const frugal_config& config, ControlMutex& mu, const Ranks& ranks)
      : config_(config), mu_(mu), ranks_(ranks) {}

  const Vector<TableRef>& all() const REQUIRES(control) { return all_; }
  auto begin() const REQUIRES(control) { return all_.begin(); }
  auto end() const REQUIRES(control) { return all_.end(); }
  size_t size() const REQUIRES(control) { return all_.size(); }
  const TableRef& operator[](size_t i) const REQUIRES(control) { return all_[i]; }
  TableRef find(const char* name) const REQUIRES(control) {  // null: there is none
    const auto named = [&](const TableRef& t) { return t->name == name; };
    const auto at = std::find_if(begin(), end(), named);
    return at == end() ? TableRef() : *at;
  }
  // Takes the mutex: the first whose number is not below `number`. Null: there is none.
  TableRef from(uint64_t number) const {
    ControlLock lock(mu_);
    const auto before = [](const TableRef& t, uint64_t n) { return t->number < n; };
    const auto at = std::lower_bound(begin(), end(), number, before);
    return at == end() ? TableRef() : *at;
  }
  // expect() makes room for one more; add() then takes no memory.
  void expect() REQUIRES(control) { all_.reserve(all_.size() + 1); }
  void add(const TableRef& table) REQUIRES(control) {
    table->number = numbers_++;
    all_.push_back(table);
  }
  bool has(const TableRef& table) const REQUIRES(control) {
    return std::find(begin(), end(), table) != end();
  }
  void remove(const TableRef& table) REQUIRES(control) {
    all_.erase(std::find(begin(), end(), table));
  }
  Vector<TableRef> take() REQUIRES(control) { return std::exchange(all_, {}); }
  // Takes the mutex: the present tables.
  Vector<TableRef> now() const {
    ControlLock lock(mu_);
    return all_;
  }

  // Null: no process is to read the tables out. Set between steps.
  std::shared_ptr<Ledger> ledger;

  // --- Windows
  // Opens the table's window if it is not open: from the next commit on. Takes the mutex, so that
  // no commit moves that on meanwhile.
  Status open_window(Table& table) {
    if (table.window.opened()) return FRUGAL_OK;
    Window::Config c;
    c.rows = table.rows.capacity();
    c.staleness = config_.staleness;
    c.placement = config_.world_size;
    c.tree_heap = config_.flush_mode == FRUGAL_FLUSH_TREE_HEAP;
    c.pending_rows = &pending_rows_;
    ControlLock lock(mu_);
    return table.window.open(c, ranks_.soonest());
  }
  // All that are opened.
  template <class Visit>
  void each_window(Visit visit) const REQUIRES(control) {
    for (const TableRef& t : all_)
      if (t->window.opened()) visit(t->window);
  }
  // The index of the first table that has a window with pending rows for which holds(window) is
  // true; size(): there is none.
  template <class Holds>
  size_t first_pending(Holds holds) const REQUIRES(control) {
    if (none_pending()) return size();
    const auto its = [&](const TableRef& t) { return t->window.opened() && holds(t->window); };
    return static_cast<size_t>(std::find_if(begin(), end(), its) - begin());
  }
  uint64_t pending_rows() const { return pending_rows_.load(std::memory_order_acquire); }
  bool any_pending() const REQUIRES(control) {
    return first_pending([](Window& w) { return w.any_pending(); }) != size();
  }
  // Takes the mutex: the next table that has rows to be written until a step; the tables take
  // turns. `*looked` counts checked tables. Null: none of the rest has such rows.
  TableRef next_pending(uint64_t step, size_t* looked) {
    if (none_pending()) return nullptr;
    ControlLock lock(mu_);
    while (*looked < all_.size()) {
      ++*looked;
      if (next_ >= all_.size()) next_ = 0;
      const TableRef& t = all_[next_++];
      if (t->window.opened() && t->window.pending_until(step)) return t;
    }
    return nullptr;
  }

 private:
  const frugal_config& config_;
  ControlMutex& mu_;
  const Ranks& ranks_;
  // So a check of many tables without pending rows is one load.
  bool none_pending() const { return pending_rows() == 0; }

  Vector<TableRef> all_ GUARDED_BY(control);  // by number
  std::atomic<uint64_t> pending_rows_{0};     // of all windows
  uint32_t numbers_ GUARDED_BY(control) = 0;
  size_t next_ GUARDED_BY(control) = 0;
};

}  // namespace frugal
