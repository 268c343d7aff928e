// The work of the engine that flush threads and waiting calls do.
#include <algorithm>
#include <cstring>

#include "engine/wait.h"

namespace frugal {
namespace {

constexpr uint64_t kNearSteps = 3;      // steps whose declarations do not wait for idle time
constexpr uint64_t kLaterNs = 1000000;  // until rows are warmed again
constexpr uint32_t kWarmRounds = 32;
constexpr size_t kWarmBytes = size_t{16} << 20;  // of a step's rows: more would evict each other
constexpr size_t kWarmRows = 2048;

}  // namespace

void Engine::log(int level, const char* text) {
  if (!config_.log) return;
  try {
    config_.log(config_.log_context, level, text);
  } catch (...) {
    // An exception of the hook itself cannot be reported.
  }
}

// The engine's background work, in the order of urgency.
void Engine::list_work() {
  using Outcome = Workers::Outcome;
  using Urgency = Workers::Urgency;
  auto add = [&](Urgency urgency, auto one) {
    workers_.add(urgency, [one] { return one() ? Outcome::kWork : Outcome::kNothing; });
  };
  auto declared = [this](uint64_t up_to) {
    return resolve_one(up_to) || (need_links() && link_one(up_to, true));
  };
  // Device work is polled from time to time.
  workers_.add(Urgency::kSoon, [this] {
    return poll_device_work() ? Outcome::kWork : in_flight() ? Outcome::kHeld : Outcome::kNothing;
  });
  add(Urgency::kSoon, [this] { return workers_.help(false); });
  add(Urgency::kSoon, [this] { return pin_one(); });
  add(Urgency::kSoon, [this] { return flusher_.write(ranks_.soonest()); });
  add(Urgency::kSoon, [=, this] { return declared(ranks_.soonest() + kNearSteps); });
  add(Urgency::kSoon, [this] { return load_one(); });
  add(Urgency::kSoon, [this] { return pacing_.deferred() && prepare_one(); });
  add(Urgency::kSoon, [this] { return plan_one(); });
  add(Urgency::kIdle, [this] { return flusher_.write(ranks_.soonest() + 1); });
  add(Urgency::kIdle,
      [this] { return pacing_.pending() > pacing_.limit() / 2 && flusher_.write(UINT64_MAX); });
  add(Urgency::kIdle, [=] { return declared(UINT64_MAX); });
  add(Urgency::kIdle, [this] { return flusher_.write(UINT64_MAX); });
  workers_.add(Urgency::kFavour, [this] { return warm_one(); });
}

// --- Declarations --------------------------------------------------------------------------------

// `gate`: a gate waits for a step up to `up_to`, and slots may be freed for it.
bool Engine::resolve_one(uint64_t up_to, bool gate) {
  Declarations::Item item;
  bool gave_up;
  const bool found = declarations_.next_to_resolve(up_to, &item, &gave_up);
  if (gave_up) workers_.progress();  // a gate may have waited for one
  if (!found) return gate && item.batch && free_slots(*item.table(), item.batch->step);
  const PartRef& part = item.part();
  const TableRef& table = item.table();
  TrainerRef trainer;
  if (memory_.pinner->any()) trainer = ranks_.at(part->rank);
  TraceSpan span(meters_.trace, SpanKind::kResolve);
  span.step(part->step).rank(part->rank).table(table->number).count(part->n);
  // If the table is full, or memory is short, the calls of the step resolve again and report it.
  bool resolved = false, expected = false;
  Status status = FRUGAL_OK;
  try {
    if (table->rows.tier()) {
      table->loading_parts.make_room(part->step);
      expected = true;
    }
    // Those calls also report ids from a device that the table does not have.
    status = part->resolve(memory_.pool, table->rows, Rows::Missing::kReserve, nullptr);
    resolved = status == FRUGAL_OK;
    if (status == FRUGAL_ERR_BUSY) table->loading_parts.lacks(part);
  } catch (const std::bad_alloc&) {
  }
  if (expected) table->loading_parts.add(part->step, resolved ? part : nullptr);
  if (status == FRUGAL_ERR_BUSY) {
    span.drop();
    part->slots.reset();
    declarations_.put_back(item);
    workers_.progress();
    return true;
  }
  declarations_.resolved(item, resolved);
  workers_.progress();
  if (expected) workers_.wake();  // later declarations were held up
  // The part's arrays go to the rank's GPU ahead of the lookup, which uploads them itself if this
  // fails.
  if (resolved && trainer && trainer->gpu && !stale() && !trainer->gpu->sticky()) {
    PartOnDevice* ignored;
    try {
      (void)trainer->gpu->upload(*part, &ignored);
    } catch (const std::bad_alloc&) {
    }
  }
  return true;
}

bool Engine::link_one(uint64_t up_to, bool worker) {
  const uint64_t next_commit = ranks_.next_commit();
  if (next_commit == kNoStep) return false;
  Declarations::Item item;
  const uint64_t end =
      std::min(next_commit + Window::kHorizon, up_to == UINT64_MAX ? up_to : up_to + 1);
  if (!declarations_.next_to_link(next_commit, end, &item)) return false;
  const PartRef& part = item.part();
  const TableRef& table = item.table();
  const bool owned = ranks_.has_cache(part->rank);
  TraceSpan span(meters_.trace, SpanKind::kLink);
  span.step(part->step).rank(part->rank).table(table->number).count(part->distinct);
  bool done = false, memory = true;
  // Whatever fails, linked() follows: a thread that cancels or leaves waits until no thread is
  // linking.
  try {
    memory = tables_.open_window(*table) == FRUGAL_OK &&
             memory_.pool.get(part->distinct, &part->next) == FRUGAL_OK;
    // (With unlimited staleness nothing is urgent, and a gate does not wait for links.)
    if (memory && config_.staleness < kRing)
      memory = part->finder.build(memory_.pool, part->row_slots(), part->distinct) == FRUGAL_OK;
    for (size_t at = 0; memory;) {
      {
        Timed timed(meters_.counters.entry_ns);
        done = table->window.link(part, at, Window::kPiece, owned, Window::Urgency::kBackground);
      }
      at += Window::kPiece;
      if (worker) workers_.help(false);
      if (!done || at >= part->distinct) break;
    }
  } catch (const std::bad_alloc&) {
    memory = false;  // before anything of it was linked
  }
  declarations_.linked(item, done);
  workers_.progress();
  if (!memory) throw std::bad_alloc();
  return true;
}

// Finds the next table of the step whose update can be predicted, and the update, without its sums.
// Each table is checked once: all that is declared for the step has passed its gate.
bool Engine::predict_update(StepRecord* record, TableRef* table, UpdateRef* update) {
  const uint64_t step = ranks_.next_commit();
  Lock declared(declarations_.mutex());
  for (; record->prepare_at < tables_.size() && !*table; ++record->prepare_at) {
    const TableRef& t = tables_[record->prepare_at];
    if (record->prepared.count(t.get()) || t->dropped.load()) continue;
    if (t->predict_pause) continue;
    Vector<PartRef> parts(ranks_.size());
    bool any = false, simple = true;
    declarations_.each({step, step, kNoRank, t.get()}, [&](const Batch& b, size_t i) {
      const PartRef& p = b.parts[i];
      if (!p->resolved() || !p->linked || parts[b.rank]) simple = false;
      parts[b.rank] = p;
      any = true;
    });
    if (!any || !simple) continue;
    *update = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
    (*update)->step = step;
    for (uint32_t r = 0; r < parts.size(); ++r)
      if (parts[r] && parts[r]->distinct) {
        (*update)->ranks.emplace_back();
        (*update)->ranks.back().rank = r;
        (*update)->ranks.back().part = parts[r];
      }
    if ((*update)->ranks.empty()) continue;
    record->prepared[t.get()] = {t, *update, false};
    *table = t;
  }
  return *table != nullptr;
}

// Prepares a step's update of one table while the step is still being computed. Declarations say
// which rows will be pushed. If the push is what was declared, the commit has only to publish the
// update.
bool Engine::prepare_one() {
  StepRecord* record = nullptr;
  TableRef table;
  UpdateRef update;
  {
    ControlLock lock(mu_);
    if (!phase_.may(Phase::kPrepare)) return false;
    record = records_.scheduled();
    if (!record) return false;
    if (!predict_update(record, &table, &update)) {
      record->prepare_scheduled = false;
      return false;
    }
  }
  TraceSpan span(meters_.trace, SpanKind::kPrepare);
  span.step(update->step).table(table->number);
  for (const RankGradients& h : update->ranks) span.more(h.part->distinct);
  Vector<uint32_t> rewarm;
  bool prepared = true;
  try {
    {
      Timed timed(meters_.counters.entry_ns);
      update->make_list();
      table->window.add(update);
    }
    for (bool done = false; !done;) {
      workers_.help(false);  // lookups come first
      Timed timed(meters_.counters.entry_ns);
      done = table->window.prepare(*update, true, Window::kPiece, Window::Urgency::kBackground);
    }
  } catch (const std::bad_alloc&) {
    prepared = false;  // the commit does it
    table->window.withdraw(update);
  }
  try {
    if (prepared) table->window.prepared_for_next(*update, &rewarm);
  } catch (const std::bad_alloc&) {
    rewarm.clear();  // as add_rewarm
  }
  {
    // The record is still there: a commit or an abort waits until its updates are ready.
    ControlLock lock(mu_);
    if (prepared) {
      record->prepared[table.get()].ready = true;
    } else {
      record->prepared.erase(table.get());
      table->predict_pause = 1;
    }
    if (!rewarm.empty()) add_rewarm(record, table, std::move(rewarm));
  }
  workers_.progress();
  return true;
}

// This is optional: without memory these rows are not warmed.
void Engine::add_rewarm(StepRecord* record, const TableRef& table, Vector<uint32_t>&& slots) {
  const size_t bytes = table->rows.layout().bytes();
  try {
    if (!record->rewarm)
      record->rewarm = std::allocate_shared<RewarmRows>(HeapAllocator<RewarmRows>());
    RewarmRows& rewarm = *record->rewarm;
    slots.resize(std::min(slots.size(), (kWarmBytes - rewarm.bytes) / bytes));
    if (slots.empty()) return;
    rewarm.tables.push_back({table, std::move(slots)});
    rewarm.bytes += rewarm.tables.back().slots.size() * bytes;
  } catch (const std::bad_alloc&) {
  }
}

// Brings rows that the next step reads into the processor's caches. There its gate, which writes
// some of them, and its lookup find them: what both wait for is memory. Warming changes no row, so
// other threads may write it meanwhile, and it need not be wanted any more.
//
// Warming runs only while a device computes, that is, where updates are deferred and until
// gradients are pushed. Gradients should stay in these caches, and the thread is needed then.
//
// The caches lose rows, since other programs use them as well. The rows that the gate will write
// are few, and are brought in again and again, for as long as a step usually takes.
Workers::Outcome Engine::warm_one() {
  using Outcome = Workers::Outcome;
  const uint64_t next = ranks_.begun();
  if (!pacing_.deferred() || ranks_.pushed() == next) return Outcome::kNothing;
  Declarations::Item item;
  std::shared_ptr<RewarmRows> rewarm;
  TableRef table;
  const uint32_t* slots = nullptr;
  size_t from = 0, end = 0;
  // A call under way needs the memory's bandwidth itself.
  const bool held = calls_.load() != 0;
  if (declarations_.next_to_warm(next, kWarmBytes, kWarmRows, !held, &item, &from, &end)) {
    if (held) return Outcome::kHeld;
    table = item.table();
    slots = item.part()->row_slots();
  } else {
    ControlLock lock(mu_);
    if (const StepRecord* record = records_.find(next - 1)) rewarm = record->rewarm;
    if (!rewarm || rewarm->tables.empty() || rewarm->rounds == kWarmRounds)
      return Outcome::kNothing;
    if (rewarm->rounds && rewarm->table == 0 && rewarm->row == 0 &&
        now_ns() - rewarm->since < kLaterNs)
      return Outcome::kLater;
    if (held) return Outcome::kHeld;
    const RewarmRows::OfTable& of = rewarm->tables[rewarm->table];
    table = of.table;
    slots = of.slots.data();
    from = rewarm->row;
    end = std::min(of.slots.size(), from + kWarmRows);
    rewarm->row = end;
    if (end == of.slots.size()) {
      rewarm->row = 0;
      if (++rewarm->table == rewarm->tables.size()) {
        rewarm->table = 0;
        ++rewarm->rounds;
        rewarm->since = now_ns();
      }
    }
  }
  TraceSpan span(meters_.trace, SpanKind::kWarm);
  span.step(next).table(table->number).count(end - from);
  const uint64_t begun = now_ns();
  const device::RowsView rows = table->rows.ref_now();
  // A thread that shares out a job meanwhile needs this thread at once.
  for (size_t i = from; i < end && !workers_.sharing(); ++i)
    prefetch_row(rows, slots[i], rewarm != nullptr);
  pacing_.spared(now_ns() - begun);
  return Outcome::kWork;
}

}  // namespace frugal
