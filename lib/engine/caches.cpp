// The boundaries of trainers' caches: worked out ahead, carried out when a step begins (docs/cuda.md,
// section 8).
//
// What a boundary does follows from the declarations, so a background thread works it out while the step
// before is being computed: which rows come and go, where the rows of the step are read, and which lines
// the update of the step before touches. step_begin then has bytes to move, and nothing else.
//
// Invariants: at most one boundary is planned, the next. Who goes out by a plan counts as a host row from
// that moment on: its line is intact until the boundary, but what waits for the row becomes urgent at once,
// so that the gate of the step has seen it. Who comes in counts as a line not before it is one. Keys that
// were not declared never go to lines: they are fresh in host memory.
// Threads: `planning` (of a trainer), or its step_begin, or an operation outside steps, has its caches.
#include <algorithm>

#include "engine/wait.h"

namespace frugal {

TrainerTable& Engine::cache_of(Trainer& t, const TableRef& table) {
  if (TrainerTable* of = cache_in(t, *table)) return *of;
  TrainerTable made;
  made.table = table;
  // On a GPU the bytes are the device's, where the index is not.
  auto line_bytes = [&](const RowLayout& layout) {
    return t.gpu || t.lines_elsewhere ? layout.bytes() : RowCache::line_bytes(layout);
  };
  const uint64_t per_line = line_bytes(table->rows.layout());
  uint64_t lines = static_cast<uint64_t>(t.cache_ratio * static_cast<double>(table->rows.capacity()));
  if (t.cache_bytes) {
    // Tables share the bytes in proportion to their size.
    long double all = 0, mine = static_cast<long double>(per_line) * table->rows.capacity();
    std::lock_guard<std::mutex> lock(mu_);
    for (const TableRef& o : tables_)
      all += static_cast<long double>(line_bytes(o->rows.layout())) * o->rows.capacity();
    lines = std::max<uint64_t>(lines, static_cast<uint64_t>(t.cache_bytes * (mine / all) / per_line));
  }
  lines = std::min<uint64_t>(lines, table->rows.capacity());
  if (t.gpu || t.lines_elsewhere) lines = std::min<uint64_t>(lines, device::Source::kMost);
  // No memory for a cache: the trainer works without one.
  try {
    open_cache(t, lines, &made);
  } catch (const std::bad_alloc&) {
    made = {};
    made.table = table;
  }
  TrainerTable& of = t.caches[table.get()] = std::move(made);
  if (of.lines) of.bytes = lines * per_line;
  cache_bytes(t).fetch_add(of.bytes);
  return of;
}

void Engine::open_cache(Trainer& t, uint64_t lines, TrainerTable* made) {
  if (lines == 0) return;
  const TableRef& table = made->table;
  made->index.open(lines);
  if (t.lines_elsewhere) {
    made->lines = std::make_unique<LinesElsewhere>(table, lines, memory_.pool, *ledger_, &t.boundary);
  } else if (!t.gpu) {
    (void)HostLines::open(table->rows, lines, memory_.pool, &made->lines);
  } else if (DeviceLines::open(*t.gpu, table->rows.ref(), lines, &made->lines) != FRUGAL_OK) {
    log(1, text("rank %u: no memory of %s for %llu cached rows of table '%s': it has no cache", t.rank,
                t.gpu->runtime().name(), static_cast<unsigned long long>(lines), table->name.c_str()).c_str());
  }
}

TrainerTable* Engine::cache_in(Trainer& t, const Table& table) {
  auto at = t.caches.find(&table);
  return at == t.caches.end() ? nullptr : &at->second;
}

// --- Planning ------------------------------------------------------------------------------------

// The resolved parts that a rank has declared for a step. With mu_ held. False: there may be more of
// them soon.
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

bool Engine::to_plan(const Trainer& t) const {  // with mu_ held
  return t.has_cache.load() && !t.planning && t.turned != kNoStep && t.next_step == t.turned + 1 &&
         (t.planned != t.next_step || t.plan_more) && t.next_step >= t.cache_from && !t.closing.load() &&
         !t.abort_notice.load() && !t.undo_pending.load();
}

Vector<PartRef> Engine::not_planned(const TrainerTable& of, const Vector<PartRef>& declared) {
  Vector<PartRef> late;
  for (const PartRef& p : declared)
    if (std::find(of.plan.parts.begin(), of.plan.parts.end(), p) == of.plan.parts.end()) late.push_back(p);
  return late;
}

bool Engine::plan_one() {
  if (!ranks_.caches_exist() || stale()) return false;
  TrainerRef t;
  uint64_t step = 0;
  PartsByTable parts, pushed;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!phase_.may(Phase::kPlan) || closed_.load()) return false;
    for (const TrainerRef& r : ranks_) {
      if (!r || !to_plan(*r)) continue;
      parts.clear();
      if (!declared_by(*r, r->next_step, &parts)) continue;
      t = r;
      break;
    }
    if (!t) return false;
    step = t->next_step;
    // What the ranks push in the step before, if that is what they declared, by rank.
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
    t->planning = true;
    t->plan_more = false;
    phase_.begin(Phase::kPlan);
  }
  TraceSpan span(trace_, SpanKind::kPlan);
  span.step(step).rank(t->rank);
  // What fails here is done at the boundary, which can tell: a plan that is not there, or not whole, is right.
  auto plan = [&](const Table* raw, TrainerTable& of) {
    const auto declared = parts.find(raw);
    const Vector<PartRef> late =
        declared == parts.end() ? Vector<PartRef>() : not_planned(of, declared->second);
    if (of.planned == step && late.empty()) return;
    of.plan.pushed.clear();  // what the update touches changes with it
    if (plan_table(*t, of, step, late, Window::Urgency::kBackground) != FRUGAL_OK) return;
    workers_.help(false);  // whoever looks rows up meanwhile is helped
    const auto before = pushed.find(raw);
    if (before != pushed.end()) {
      of.index.touched(before->second, t->rank, &of.plan.update);
      of.plan.pushed = before->second;
    }
    of.lines->send(of.plan);
  };
  for (auto& [raw, of] : t->caches) {
    if (!of.lines || t->closing.load()) continue;
    try {
      plan(raw, of);
    } catch (const std::bad_alloc&) {
    }
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    t->planning = false;
    t->planned = step;
    phase_.end(Phase::kPlan);
  }
  workers_.progress();
  return true;
}

// The caches are the caller's from here on.
void Engine::end_planning(Trainer& t) {
  std::unique_lock<std::mutex> lock(mu_);
  t.turned = kNoStep;
  workers_.settle(lock, [&] { return !t.planning; });
}

// The boundary of `step` is behind us: that of the next may be planned.
void Engine::begin_planning(Trainer& t, uint64_t step) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (!t.abort_notice.load() && t.in_step && t.step == step) t.turned = step;
    t.planned = kNoStep;
    t.plan_more = false;
  }
  if (config_.flush_threads) workers_.wake();
}

// What the boundary of `step` does to the cache of a table, for whose rows the rank has declared `parts`: those
// besides others, if it has been planned already.
Status Engine::plan_table(Trainer& t, TrainerTable& of, uint64_t step, const Vector<PartRef>& parts,
                          Window::Urgency urgency) {
  RowCache& cache = of.index;
  Table& table = *of.table;
  FRUGAL_TRY(tables_.open_window(table));
  const bool more = of.planned == step;
  flag_lines(of, urgency);
  if (!more) of.plan.clear();
  of.lines->forget_plan();
  Vector<uint32_t>&slots = of.slots, &evicted = of.evicted, waiting, young;
  slots.clear();
  evicted.clear();
  for (const PartRef& p : parts)
    for (size_t i = 0; i < p->distinct; ++i)
      if (table.window.placement().may_cache(t.rank, p->row_slots()[i])) slots.push_back(p->row_slots()[i]);
  if (parts.size() > 1) {  // one part's rows are ascending
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  }
  // Rows that do not exist yet have nothing to cache, young ones may be undone, rows with pending updates (staleness) are
  // not what the cache would have to hold.
  table.rows.collect_new(slots.data(), slots.size(), &waiting, &young);
  if (!waiting.empty() || !young.empty())
    std::erase_if(slots, [&](uint32_t s) {
      return std::binary_search(young.begin(), young.end(), s) ||
             (std::binary_search(waiting.begin(), waiting.end(), s) && cache.find(s) == RowCache::kNone);
    });
  if (stale()) {
    waiting.clear();
    table.window.collect_pending(slots.data(), slots.size(), &waiting);
    std::erase_if(slots, [&](uint32_t s) {
      return std::binary_search(waiting.begin(), waiting.end(), s) && cache.find(s) == RowCache::kNone;
    });
  }
  Vector<uint64_t>& next = of.next;
  next.resize(slots.size());
  of.plan.parts.reserve(of.plan.parts.size() + parts.size());
  table.window.next_owner_reads(slots.data(), slots.size(), step, next.data(), urgency);
  cache.turn_over(
      more, step, slots.data(), next.data(), slots.size(),
      [&](const uint32_t* of_lines, size_t n, uint64_t* reads) {
        table.window.next_owner_reads(of_lines, n, step, reads, urgency);
      },
      &of.plan.admitted, &of.plan.to, &evicted);
  of.planned = step;
  uint64_t dirty = 0;
  table.window.set_cached(evicted.data(), evicted.size(), false, &dirty, urgency);
  counters_.cache_evicted.fetch_add(evicted.size(), std::memory_order_relaxed);
  counters_.cache_evicted_dirty.fetch_add(dirty, std::memory_order_relaxed);
  for (const PartRef& p : parts) {
    FRUGAL_TRY(place_part(t, of, *p));
    of.plan.parts.push_back(p);
  }
  return FRUGAL_OK;
}

// Where the cache has the rows of a part, by what has been turned over: the others are in no line.
Status Engine::place_part(Trainer& t, TrainerTable& of, Part& part) {
  if (t.gpu) t.gpu->forget_places(part);
  part.sources = {};
  part.cached = 0;
  Buffer sources;
  FRUGAL_TRY(memory_.pool.get(part.distinct * sizeof(device::Source), &sources));
  const uint32_t *start = part.row_start(), *row = part.row_slots();
  const uint32_t *turned = of.index.turned().data(), *slot = of.slots.data(), *end = slot + of.slots.size();
  auto* source = sources.as<device::Source>();
  for (size_t i = 0; i < part.distinct; ++i) {
    for (; slot != end && *slot < row[i]; ++slot) ++turned;  // both ascend
    const bool there = slot != end && *slot == row[i] && *turned != RowCache::kNone;
    source[i] = there ? device::Source::line(*turned) : device::Source{};
    if (there) part.cached += start[i + 1] - start[i];
  }
  part.sources = std::move(sources);
  return FRUGAL_OK;
}

// The owner's own reads of rows that have come in wait for nothing any more.
void Engine::flag_lines(TrainerTable& of, Window::Urgency urgency) {
  of.table->window.set_cached(of.unflagged.data(), of.unflagged.size(), true, nullptr, urgency);
  of.unflagged.clear();
}

// The boundary will not be as planned. Rows that were to come in stay out; those that were to go have gone.
void Engine::cancel_plan(TrainerTable& of) {
  if (of.planned == kNoStep) return;
  for (uint32_t slot : of.plan.admitted) of.index.drop(slot);
  of.forget_plan();
}

// --- The boundary --------------------------------------------------------------------------------

Status Engine::turn_caches(Trainer& t, uint64_t step) {
  TraceSpan span(trace_, SpanKind::kTurn);
  span.step(step).rank(t.rank);
  // No commit while rows are copied: with staleness other ranks may end steps now.
  std::lock_guard<std::mutex> boundary(committer_.boundary());
  Vector<Trainer::Late> backlog;
  Vector<TableRef> tables;
  PartsByTable parts;
  auto as_planned = [&](const CachePlan& plan, const Vector<PartRef>& declared) {
    for (const PartRef& p : plan.parts)
      if (!p->linked || std::find(declared.begin(), declared.end(), p) == declared.end()) return false;
    return true;
  };
  {
    std::lock_guard<std::mutex> lock(mu_);
    backlog.swap(t.backlog);
    tables = tables_.all();
    if (ranks_.to_commit() >= t.cache_from) declared_by(t, step, &parts);
    for (auto& [raw, of] : t.caches)
      if (of.planned != kNoStep && (of.planned != step || !as_planned(of.plan, parts[raw]))) cancel_plan(of);
  }
  Flight* flight = t.gpu ? &t.gpu->flight(t.rank, step) : nullptr;
  t.boundary = {};
  if (t.lines_elsewhere) t.boundary.number = ++t.boundaries;
  Vector<TrainerTable*> turned;
  for (const TableRef& table : tables) {
    const Vector<PartRef>& declared = parts[table.get()];
    TrainerTable* const of = declared.empty() ? cache_in(t, *table) : &cache_of(t, table);
    if (!of || !of->lines) continue;
    turned.push_back(of);
    Vector<UpdateRef> updates;
    for (const Trainer::Late& late : backlog)
      if (late.table == table) updates.push_back(late.update);
    counters_.cache_turns.fetch_add(1, std::memory_order_relaxed);
    bool all_now = updates.size() > 1;
    if (of->planned != step) {
      FRUGAL_TRY(plan_table(t, *of, step, declared, Window::Urgency::kUrgent));
    } else if (const Vector<PartRef> late = not_planned(*of, declared); !late.empty()) {
      // These may read lines that the plan has for later; lines that they take from it are filled anew.
      FRUGAL_TRY(plan_table(t, *of, step, late, Window::Urgency::kUrgent));
      all_now = true;
    } else {
      counters_.cache_planned.fetch_add(1, std::memory_order_relaxed);
    }
    Vector<DueUpdate> due;
    for (const UpdateRef& update : updates) due.push_back(due_update(*of, t.rank, update, all_now));
    FRUGAL_TRY(of->lines->turn(of->plan, due));
    counters_.cache_admitted.fetch_add(of->plan.admitted.size(), std::memory_order_relaxed);
    of->unflagged.insert(of->unflagged.end(), of->plan.admitted.begin(), of->plan.admitted.end());
    // Where nobody plans ahead, nobody else would do it while the step is computed.
    if (stale() || !config_.flush_threads) flag_lines(*of, Window::Urgency::kUrgent);
  }
  if (t.gpu) FRUGAL_TRY(t.gpu->end_boundary(*flight));
  for (TrainerTable* of : turned) {
    FRUGAL_TRY(of->lines->finish());
    of->forget_plan();
  }
  return t.gpu ? flight->mark() : FRUGAL_OK;
}

// What a committed update does to the lines of a cache: as planned, if what was pushed is what was declared.
DueUpdate Engine::due_update(TrainerTable& of, uint32_t owner, const UpdateRef& update, bool all_now) {
  DueUpdate due{update, of.plan.pushed.size() == update->ranks.size(), {}, 0};
  for (size_t r = 0; due.planned && r < update->ranks.size(); ++r)
    due.planned = update->ranks[r].part == of.plan.pushed[r];
  if (!due.planned) {
    Vector<PartRef> pushed;
    for (const Handover& h : update->ranks) pushed.push_back(h.part);
    of.index.touched(pushed, owner, &due.other);
  }
  const LineUpdate& touched = due.touched(of.plan);
  due.now = all_now ? touched.lines.size() : touched.urgent;
  return due;
}

// After a boundary that has not been carried out whole, no line is what the index says. Host rows are, or
// will be: updates go there in any case.
void Engine::forget_lines(TrainerTable& of) noexcept {
  if (!of.lines) return;
  of.unflagged.clear();
  of.forget_plan();
  uint32_t line = 0, slots[512];
  while (const size_t n = of.index.drop_some(&line, slots, 512))
    if (of.table->window.opened())
      of.table->window.set_cached(slots, n, false, nullptr, Window::Urgency::kUrgent);
}

// So what the trainer has declared for the step is read there, when it is up to date.
void Engine::forget_places(const Trainer& t, uint64_t step) noexcept {
  Lock declared(declarations_.mutex());
  declarations_.each({step, step, t.rank}, [](const Batch& b, size_t i) {
    b.parts[i]->sources = {};
    b.parts[i]->cached = 0;
  });
}

// No rank is inside a step, and none can begin one: the caches are ours.
void Engine::drop_cached(Table& table, const uint32_t* slots, size_t n) {
  if (!ranks_.caches_exist()) return;
  Vector<TrainerRef> trainers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    trainers.assign(ranks_.begin(), ranks_.end());
  }
  Vector<uint32_t> dropped;
  dropped.reserve(n);  // a row has one owner: from here on nothing wants memory
  for (const TrainerRef& t : trainers) {
    TrainerTable* of = t ? cache_in(*t, table) : nullptr;
    if (!of || !of->lines) continue;
    flag_lines(*of, Window::Urgency::kUrgent);
    cancel_plan(*of);
    {
      std::lock_guard<std::mutex> lock(mu_);
      t->planned = kNoStep;
    }
    for (size_t i = 0; i < n; ++i)
      if (slots[i] < kMissingSlot && of->index.find(slots[i]) != RowCache::kNone) {
        of->index.drop(slots[i]);
        dropped.push_back(slots[i]);
      }
  }
  if (table.window.opened())
    table.window.set_cached(dropped.data(), dropped.size(), false, nullptr, Window::Urgency::kUrgent);
}

// The same, for a whole table. A boundary that wants a cache makes it anew.
void Engine::drop_cache(Trainer& t, const Table& table) noexcept {
  TrainerTable* of = cache_in(t, table);
  if (!of) return;
  forget_lines(*of);
  cache_bytes(t).fetch_sub(of->bytes);
  t.caches.erase(&table);
  std::lock_guard<std::mutex> lock(mu_);
  t.planned = kNoStep;
}

}  // namespace frugal
