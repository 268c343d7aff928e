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
    open_cache(t, *table, lines, &made);
  } catch (const std::bad_alloc&) {
    made = {};
    made.table = table;
  }
  TrainerTable& of = t.caches[table.get()] = std::move(made);
  if (of.cache()) of.bytes = lines * per_line;
  cache_bytes(t).fetch_add(of.bytes);
  return of;
}

void Engine::open_cache(Trainer& t, const Table& table, uint64_t lines, TrainerTable* made) {
  if (lines && t.gpu) {
    if (t.gpu->open_lines(table.rows.ref(), lines, &made->lines) != FRUGAL_OK ||
        made->lines->index.open(table.rows, lines, nullptr) != FRUGAL_OK) {
      made->lines.reset();
      log(1, text("rank %u: no memory of %s for %llu cached rows of table '%s': it has no cache", t.rank,
                  t.gpu->runtime().name(), static_cast<unsigned long long>(lines), table.name.c_str()).c_str());
    }
  } else if (lines && t.lines_elsewhere) {
    made->elsewhere = std::make_unique<RowCache>();
    if (made->elsewhere->open(table.rows, lines, nullptr) != FRUGAL_OK) made->elsewhere.reset();
  } else if (lines) {
    made->host = std::make_unique<RowCache>();
    if (made->host->open(table.rows, lines, &memory_.pool) != FRUGAL_OK) made->host.reset();
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
      of.cache()->touched(before->second, t->rank, &of.plan.update);
      of.plan.pushed = before->second;
    }
    // Ahead of the boundary.
    if (!of.lines || t->gpu->sticky()) return;
    for (const PartRef& p : of.plan.parts) (void)t->gpu->place(*p);
    (void)t->gpu->send_plan(of.plan, of.lines.get());
  };
  for (auto& [raw, of] : t->caches) {
    if (!of.cache() || t->closing.load()) continue;
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
  RowCache& cache = *of.cache();
  Table& table = *of.table;
  FRUGAL_TRY(tables_.open_window(table));
  const bool more = of.planned == step;
  flag_lines(of, urgency);
  if (!more) of.plan.clear();
  if (of.lines) of.lines->plan.reset();
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
  const uint32_t *turned = of.cache()->turned().data(), *slot = of.slots.data(), *end = slot + of.slots.size();
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
  for (uint32_t slot : of.plan.admitted) of.cache()->drop(slot);
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
  struct Turn {
    TrainerTable* of;
    Vector<UpdateRef> updates;
    Vector<std::shared_ptr<LinesOnDevice>> later;  // lines that the step does not read
  };
  Vector<Turn> turns;
  for (const TableRef& table : tables) {
    auto declared = parts.find(table.get());
    const bool named = declared != parts.end() && !declared->second.empty();
    TrainerTable* of = named ? &cache_of(t, table) : cache_in(t, *table);
    if (!of || !of->cache()) continue;
    Turn turn{of, {}, {}};
    for (const Trainer::Late& late : backlog)
      if (late.table == table) turn.updates.push_back(late.update);
    turns.push_back(std::move(turn));
  }
  TermList scratch;
  for (Turn& turn : turns) {
    TrainerTable& of = *turn.of;
    const Vector<PartRef>& declared = parts[of.table.get()];
    counters_.cache_turns.fetch_add(1, std::memory_order_relaxed);
    bool all_now = turn.updates.size() > 1;
    if (of.planned != step) {
      FRUGAL_TRY(plan_table(t, of, step, declared, Window::Urgency::kUrgent));
    } else if (const Vector<PartRef> late = not_planned(of, declared); !late.empty()) {
      // These may read lines that the plan has for later; lines that they take from it are filled anew.
      FRUGAL_TRY(plan_table(t, of, step, late, Window::Urgency::kUrgent));
      all_now = true;
    } else {
      counters_.cache_planned.fetch_add(1, std::memory_order_relaxed);
    }
    if (of.lines) FRUGAL_TRY(t.gpu->send_plan(of.plan, of.lines.get()));
    RemoteBoundary::OfTable* there = nullptr;
    if (of.elsewhere) {
      there = &t.boundary.tables.emplace_back();
      FRUGAL_TRY(describe_boundary(of, there));
    }
    for (const UpdateRef& update : turn.updates) {
      LineUpdate other;
      const Vector<Handover>& ranks = update->ranks;
      bool expected = of.plan.pushed.size() == ranks.size();
      for (size_t r = 0; expected && r < ranks.size(); ++r) expected = ranks[r].part == of.plan.pushed[r];
      if (!expected) {
        Vector<PartRef> pushed;
        for (const Handover& h : ranks) pushed.push_back(h.part);
        of.cache()->touched(pushed, t.rank, &other);
      }
      const LineUpdate& touched = expected ? of.plan.update : other;
      if (of.host) {
        of.host->apply(touched, *update, &scratch);
        continue;
      }
      const size_t now = all_now ? touched.lines.size() : touched.urgent;
      if (there) {
        FRUGAL_TRY(describe_update(update, touched, now, there));
        continue;
      }
      std::shared_ptr<LinesOnDevice> lists;
      if (expected)
        lists = of.lines->plan->update;
      else
        FRUGAL_TRY(t.gpu->send_lines(other, &lists));
      FRUGAL_TRY(t.gpu->apply_lines(*flight, *of.lines, update, lists, 0, now));
      if (!all_now) turn.later.push_back(std::move(lists));
    }
    if (of.host) {
      of.host->fill(of.table->rows, of.plan.admitted, of.plan.to);
    } else if (of.lines) {
      FRUGAL_TRY(t.gpu->fill_lines(*flight, *of.lines, of.table->rows.ref()));
    }
    counters_.cache_admitted.fetch_add(of.plan.admitted.size(), std::memory_order_relaxed);
    of.unflagged.insert(of.unflagged.end(), of.plan.admitted.begin(), of.plan.admitted.end());
    // Where nobody plans ahead, nobody else would do it while the step is computed.
    if (stale() || !config_.flush_threads) flag_lines(of, Window::Urgency::kUrgent);
  }
  if (t.gpu) FRUGAL_TRY(t.gpu->end_boundary(*flight));
  for (Turn& turn : turns) {
    // What the step does not read is brought up to date while it is computed.
    for (size_t i = 0; i < turn.later.size(); ++i)
      FRUGAL_TRY(t.gpu->apply_lines(*flight, *turn.of->lines, turn.updates[i], turn.later[i],
                                    turn.later[i]->urgent, turn.later[i]->count));
    turn.of->forget_plan();
  }
  return t.gpu ? flight->mark() : FRUGAL_OK;
}

// After a boundary that has not been carried out whole, no line is what the index says. Host rows are, or
// will be: updates go there in any case.
void Engine::forget_lines(TrainerTable& of) noexcept {
  if (!of.cache()) return;
  of.unflagged.clear();
  of.forget_plan();
  uint32_t line = 0, slots[512];
  while (const size_t n = of.cache()->drop_some(&line, slots, 512))
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
    if (!of || !of->cache()) continue;
    flag_lines(*of, Window::Urgency::kUrgent);
    cancel_plan(*of);
    {
      std::lock_guard<std::mutex> lock(mu_);
      t->planned = kNoStep;
    }
    for (size_t i = 0; i < n; ++i)
      if (slots[i] < kMissingSlot && of->cache()->find(slots[i]) != RowCache::kNone) {
        of->cache()->drop(slots[i]);
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
