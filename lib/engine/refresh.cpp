// Refreshes of trainers' caches: planned ahead, and carried out when a step begins (docs/cuda.md,
// "Cache").
//
// Declarations determine what a refresh does. So a background thread plans it while the step before
// is computed: which rows are evicted and admitted, where the rows of the step are read, and which
// cached rows the update of the step before touches. step_begin then only moves bytes.
//
// Invariants:
// - At most one refresh is planned: the next.
// - A row that a plan evicts counts as a host row from then on. The cached row is intact until the
//   refresh. But the row's pending updates become urgent at once, so that the gate of the step
//   waits for them.
// - An admitted row does not count as a cached row before it is one.
// - Keys that were not declared are never read from cached rows: their host rows are up to date.
//
// Threads: the thread that plans (`CacheRefresh`), the trainer's step_begin, or an operation
// outside steps has the trainer's caches.
#include <algorithm>

#include "engine/wait.h"

namespace frugal {

TableCache& Engine::cache_of(Trainer& t, const TableRef& table) {
  if (TableCache* of = cache_in(t, *table)) return *of;
  // On a GPU the device has the bytes, and the host has the index.
  auto row_bytes = [&](const RowLayout& layout) {
    return t.gpu || t.remote_cached_rows.exist ? layout.bytes() : RowCache::row_bytes(layout);
  };
  const uint64_t per_row = row_bytes(table->rows.layout());
  uint64_t cache_slots =
      static_cast<uint64_t>(t.cache_ratio * static_cast<double>(table->rows.capacity()));
  if (t.cache_bytes) {
    // Tables share the bytes in proportion to their size.
    long double all = 0, mine = static_cast<long double>(per_row) * table->rows.capacity();
    ControlLock lock(mu_);
    for (const TableRef& o : tables_)
      all += static_cast<long double>(row_bytes(o->rows.layout())) * o->rows.capacity();
    cache_slots = std::max<uint64_t>(cache_slots,
                                     static_cast<uint64_t>(t.cache_bytes * (mine / all) / per_row));
  }
  cache_slots = std::min<uint64_t>({cache_slots, table->rows.capacity(), device::Source::kMost});
  TableCache& of =
      t.caches.try_emplace(table.get(), t, table, memory_.pool, meters_.counters, stale())
          .first->second;
  // Without memory for a cache the trainer works without one.
  try {
    std::unique_ptr<CachedRows> made;
    if (cache_slots && open_cached_rows(t, table, cache_slots, &made) == FRUGAL_OK)
      of.open(cache_slots, std::move(made), cache_slots * per_row);
  } catch (const std::bad_alloc&) {
  }
  cache_bytes(t).fetch_add(of.bytes());
  return of;
}

Status Engine::open_cached_rows(Trainer& t, const TableRef& table, uint64_t cache_slots,
                                std::unique_ptr<CachedRows>* out) {
  if (t.remote_cached_rows.exist) {
    RemoteRefresh* const refresh = &t.remote_cached_rows.refresh;
    *out =
        std::make_unique<AttachedCachedRows>(table, cache_slots, memory_.pool, *ledger(), refresh);
    return FRUGAL_OK;
  }
  const Status s = t.gpu ? DeviceCachedRows::open(*t.gpu, table->rows.ref(), cache_slots, out)
                         : HostCachedRows::open(table->rows, cache_slots, memory_.pool, out);
  if (s != FRUGAL_OK)
    log(1, text("rank %u: no memory of %s for %llu cached rows of table '%s': it has no cache",
                t.rank, t.gpu ? t.gpu->runtime().name() : "the host",
                static_cast<unsigned long long>(cache_slots), table->name.c_str())
               .c_str());
  return s;
}

TableCache* Engine::cache_in(Trainer& t, const Table& table) {
  auto at = t.caches.find(&table);
  return at == t.caches.end() ? nullptr : &at->second;
}

// --- Planning ------------------------------------------------------------------------------------

// The resolved parts that a rank has declared for a step. Returns false if more may follow soon.
bool Engine::declared_by(const Trainer& t, uint64_t step, PartsByTable* parts) {
  bool all = true;
  Lock declared(declarations_.mutex());
  declarations_.each({step, step, t.rank}, [&](const Batch& b, size_t i) {
    const PartRef& p = b.parts[i];
    const uint32_t state = p->state.load(std::memory_order_acquire);
    if (state == Part::kStale || state == Part::kDropped) return;
    if (state != Part::kResolved || !p->linked) all = false;
    if (state == Part::kResolved) (*parts)[b.tables[i].get()].push_back(p);
  });
  return all && !parts->empty();
}

bool Engine::to_plan(const Trainer& t) const {
  return t.has_cache.load() && t.refresh.may_plan(t.next_step) && !t.closing.load() &&
         !t.abort_notice.load() && !t.undo_pending.load();
}

bool Engine::plan_one() {
  if (!ranks_.caches_exist() || stale()) return false;
  TrainerRef t;
  uint64_t step = 0;
  PartsByTable parts, pushed;
  // Holds the rows of the parts in use, where rows may be stored: a part may be revoked meanwhile.
  struct Hold {
    Vector<Declarations::Held> of;
    ~Hold() {
      for (const Declarations::Held& h : of)
        h.table->rows.unhold_backed(h.part->row_slots(), h.part->distinct);
    }
  } hold;
  {
    ControlLock lock(mu_);
    if (!phase_.may(Phase::kPlan)) return false;
    for (const TrainerRef& r : ranks_) {
      if (!r || !to_plan(*r)) continue;
      parts.clear();
      if (!declared_by(*r, r->next_step, &parts)) continue;
      t = r;
      break;
    }
    if (!t) return false;
    step = t->next_step;
    for (auto& [raw, list] : parts)
      if (TableCache* of = raw->rows.tier() ? cache_in(*t, *raw) : nullptr)
        for (const PartRef& p : list) {
          hold.of.reserve(hold.of.size() + 1);
          of->table()->rows.hold(p->row_slots(), p->distinct);
          hold.of.push_back({of->table(), p});
        }
    // What the ranks push in the step before, by rank, if they push what they declared.
    {
      Lock declared(declarations_.mutex());
      declarations_.each({step - 1, step - 1}, [&](const Batch& b, size_t i) {
        const PartRef& p = b.parts[i];
        if (p->resolved() && p->distinct) pushed[b.tables[i].get()].push_back(p);
      });
    }
    for (auto& [raw, list] : pushed)
      std::sort(list.begin(), list.end(),
                [](const PartRef& a, const PartRef& b) { return a->rank < b->rank; });
    begin_plan(*t, step);
  }
  TraceSpan span(meters_.trace, SpanKind::kPlan);
  span.step(step).rank(t->rank);
  for (auto& [raw, of] : t->caches) {
    if (!of.there() || t->closing.load()) continue;
    // The refresh does what fails here, and can report it. A missing or partial plan is correct.
    try {
      if (tables_.open_window(*of.table()) != FRUGAL_OK || !of.plan_ahead(step, parts[raw]))
        continue;
      workers_.help(false);  // lookups that run meanwhile are helped
      of.expect(pushed[raw]);
    } catch (const std::bad_alloc&) {
    }
  }
  end_plan(*t);
  return true;
}

// Between begin_plan() and end_plan() the calling thread has the trainer's caches.
void Engine::begin_plan(Trainer& t, uint64_t step) {
  t.refresh.begin_plan(step);
  phase_.begin(Phase::kPlan);
}

void Engine::end_plan(Trainer& t) {
  ControlLock lock(mu_);
  t.refresh.end_plan();
  phase_.end(Phase::kPlan);
}

// From here on the calling thread has the caches.
void Engine::forbid_planning(Trainer& t) {
  ControlLock lock(mu_);
  t.refresh.stop_plans();
  workers_.await(lock, [&]() REQUIRES(control) { return !t.refresh.planning(); });
  t.refresh.begin_refresh();
}

// The refresh of `step` has been carried out: that of the next step may be planned.
void Engine::allow_planning(Trainer& t, uint64_t step) {
  {
    ControlLock lock(mu_);
    t.refresh.end_refresh(!t.abort_notice.load() && t.in_step && t.step == step ? step : kNoStep);
  }
  if (config_.flush_threads) workers_.wake();
}

// --- The refresh --------------------------------------------------------------------------------

Status Engine::refresh_caches(Trainer& t, uint64_t step) {
  TraceSpan span(meters_.trace, SpanKind::kRefresh);
  span.step(step).rank(t.rank);
  // No commit while rows are copied: with staleness other ranks may end steps now.
  Lock lock_refresh(committer_.refresh_mu());
  Vector<Trainer::Late> backlog;
  Vector<TableRef> tables;
  PartsByTable parts;
  {
    ControlLock lock(mu_);
    backlog.swap(t.backlog);
    tables = tables_.all();
    if (ranks_.next_commit() >= t.refresh.from()) declared_by(t, step, &parts);
    for (auto& [raw, of] : t.caches) of.check_plan(step, parts[raw]);
  }
  DeviceWork* device_work = t.gpu ? &t.gpu->device_work(t.rank, step) : nullptr;
  t.remote_cached_rows.refresh = {};
  if (t.remote_cached_rows.exist)
    t.remote_cached_rows.refresh.number = ++t.remote_cached_rows.refreshes;
  Vector<TableCache*> refreshed;
  Map<const Table*, Vector<UpdateRef>> committed;
  for (const Trainer::Late& late : backlog) committed[late.table.get()].push_back(late.update);
  for (const TableRef& table : tables) {
    const Vector<PartRef>& declared = parts[table.get()];
    TableCache* const of = declared.empty() ? cache_in(t, *table) : &cache_of(t, table);
    if (!of || !of->there()) continue;
    FRUGAL_TRY(tables_.open_window(*table));
    FRUGAL_TRY(of->refresh(step, declared, committed[table.get()]));
    // Where no thread plans ahead, nothing else does this while the step is computed.
    if (stale() || !config_.flush_threads) of->flag(Window::Urgency::kUrgent);
    refreshed.push_back(of);
  }
  if (t.gpu) FRUGAL_TRY(t.gpu->end_refresh(*device_work));
  for (TableCache* of : refreshed) FRUGAL_TRY(of->finish());
  return t.gpu ? device_work->mark() : FRUGAL_OK;
}

// Without memory for a refresh the cache becomes empty, and the step does without it: the cache may
// have missed updates. If the cached rows are a device's, the step is to be begun again.
Status Engine::refresh_or_forget(Trainer& t, uint64_t step) {
  Status s;
  try {
    s = refresh_caches(t, step);
  } catch (const std::bad_alloc&) {
    s = fail(FRUGAL_ERR_OUT_OF_MEMORY,
             "no memory to bring the cache of rank %u up to date; call again", t.rank);
  }
  if (s == FRUGAL_OK) return s;
  for (auto& [raw, of] : t.caches) of.forget();
  forget_sources(t, step);
  if (t.gpu) t.gpu->take_device_work();  // waits until the device has done with what it has taken
  t.remote_cached_rows.refresh = {};
  ControlLock lock(mu_);
  t.backlog.clear();
  if (!t.gpu && !t.remote_cached_rows.exist) return FRUGAL_OK;
  ranks_.begin_again(t);
  return s;
}

// What the trainer has declared for the step is then read from host rows, once they are up to date.
void Engine::forget_sources(const Trainer& t, uint64_t step) noexcept {
  Lock declared(declarations_.mutex());
  declarations_.each({step, step, t.rank}, [](const Batch& b, size_t i) {
    b.parts[i]->sources = {};
    b.parts[i]->cached = 0;
  });
}

// No rank is inside a step, and none can begin one: the calling thread has the caches.
void Engine::drop_cached(Table& table, const uint32_t* slots, size_t n) {
  if (!ranks_.caches_exist()) return;
  const auto cached = [](const Trainer& t) { return t.has_cache.load(); };
  const Vector<TrainerRef> trainers = ranks_.those(cached);
  Vector<uint32_t> dropped;
  dropped.reserve(n);  // a row has one owner: from here on nothing needs memory
  for (const TrainerRef& t : trainers) {
    TableCache* of = cache_in(*t, table);
    if (!of || !of->there()) continue;
    of->drop(slots, n, &dropped);
    ControlLock lock(mu_);
    t->refresh.forget_plan();
  }
  if (table.window.opened())
    table.window.set_cached(dropped.data(), dropped.size(), false, nullptr,
                            Window::Urgency::kUrgent);
}

// The same, for a whole table. The next refresh that needs the cache makes it anew.
void Engine::drop_cache(Trainer& t, const Table& table) noexcept {
  TableCache* of = cache_in(t, table);
  if (!of) return;
  of->forget();
  cache_bytes(t).fetch_sub(of->bytes());
  t.caches.erase(&table);
  ControlLock lock(mu_);
  t.refresh.forget_plan();
}

}  // namespace frugal
