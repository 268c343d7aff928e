// Calls that only trainers in other processes need. These trainers gather rows and sum gradients
// themselves, in shared memory.
#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "engine/local_step.h"

namespace frugal {

Status Engine::keep_ledger() {
  if (tables_.ledger) return FRUGAL_OK;
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  std::shared_ptr<Ledger> ledger;
  ControlLock lock(mu_);
  if (tables_.ledger) return FRUGAL_OK;
  FRUGAL_TRY(Ledger::open(memory_.pool, memory_.arena, ranks_.committed(), &ledger));
  Vector<std::shared_ptr<TableLedger>> of(tables_.size());
  for (size_t i = 0; i < of.size(); ++i) {
    const Rows& rows = tables_[i]->rows;
    FRUGAL_TRY(ledger->add_table(tables_[i]->handle, rows.layout(), rows.init(), &of[i]));
  }
  for (size_t i = 0; i < of.size(); ++i) {
    tables_[i]->ledger = std::move(of[i]);
    tables_[i]->ledger->watch(tables_[i]->rows);
  }
  tables_.ledger = std::move(ledger);
  return FRUGAL_OK;
}

// The parts of the step that the rank is inside of.
Status Engine::declared_parts(Trainer& t, Vector<RemotePart>* out) {
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  if (!t.in_step) return FRUGAL_OK;
  for (const StepPart& of : t.parts) {
    RemotePart p;
    p.batch = of.batch;
    p.index = of.index;
    p.table = std::static_pointer_cast<Table>(of.table);
    p.part = of.part;
    p.whole = of.whole;
    p.used = !p.table->any_key;
    if (p.whole) p.up_to_date = describe_cached_rows(t, &p);
    if (p.whole) p.stale = stale_keys(*p.table, p.part->slots.as<uint32_t>(), p.part->n);
    out->push_back(std::move(p));
  }
  return FRUGAL_OK;
}

// Describes where the trainer's cache has rows of a part. Returns whether the gate has waited for
// the updates of all others.
bool Engine::describe_cached_rows(Trainer& t, RemotePart* p) {
  TableCache* of = t.has_cache.load() ? cache_in(t, *p->table) : nullptr;
  if (!of || !of->there()) return true;
  p->cached = true;
  if (!p->part->sources) return p->part->distinct == 0;
  p->in_cached_rows = true;
  p->cached_values = of->at().host;
  return true;
}

// --- Cached rows in another process --------------------------------------------------------------

Status AttachedCachedRows::refresh(const CachePlan& plan, const Vector<DueUpdate>& due) {
  auto to_arena = [&](const void* data, size_t bytes, Buffer* out) -> Status {
    if (bytes == 0) return FRUGAL_OK;
    FRUGAL_TRY(pool_.get(bytes, out));
    std::memcpy(out->data(), data, bytes);
    return FRUGAL_OK;
  };
  RemoteRefresh::OfTable& out = out_->tables.emplace_back();
  out.table = table_;
  out.cache_slots = cache_slots_;
  out.count = plan.admitted.size();
  FRUGAL_TRY(to_arena(plan.admitted.data(), out.count * sizeof(uint32_t), &out.admitted));
  FRUGAL_TRY(to_arena(plan.to.data(), out.count * sizeof(uint32_t), &out.to));
  for (const DueUpdate& d : due) {
    const CachedRowUpdate& touched = d.touched(plan);
    if (touched.cache_slots.empty()) continue;
    RemoteRefresh::Update& u = out.updates.emplace_back();
    u.update = d.update;
    u.count = touched.cache_slots.size();
    u.term_count = touched.terms.size();
    u.now = d.now;
    FRUGAL_TRY(to_arena(touched.cache_slots.data(), u.count * sizeof(uint32_t), &u.cache_slots));
    FRUGAL_TRY(to_arena(touched.start.data(), (u.count + 1) * sizeof(uint32_t), &u.start));
    FRUGAL_TRY(
        to_arena(touched.terms.data(), u.term_count * sizeof(CachedRowUpdate::Term), &u.terms));
    for (const RankGradients& h : d.update->ranks) {
      RemoteRefresh::Sums s{kNoShmAddress, h.rows() * h.stride * sizeof(float)};
      if (s.bytes) s.shm_address = ledger_.find(h.sums.data());
      if (s.bytes && s.shm_address == kNoShmAddress) {  // in memory that no other process sees
        Buffer copy;
        FRUGAL_TRY(to_arena(h.sums.data(), s.bytes, &copy));
        s.shm_address = ledger_.find(copy.data());
        u.copies.push_back(std::move(copy));
      }
      u.sums.push_back(s);
    }
  }
  return FRUGAL_OK;
}

Status Engine::carried_out(Trainer& t, uint64_t number, uint64_t table) {
  Lock call(t.call_mu);
  RemoteCachedRows& there = t.remote_cached_rows;
  if (number > there.refreshes)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "there was no such refresh of a cache");
  there.done = number;
  if (number == there.refreshes) return FRUGAL_OK;
  if (table && !there.has_refused(table) && there.refused.size() < t.caches.size())
    there.refused.push_back(table);
  ControlLock lock(mu_);
  if (!t.in_step) return FRUGAL_OK;
  // The trainer is inside the step whose refresh it has not carried out. It has read nothing in
  // that step, and begins it anew.
  ranks_.begin_again(t);
  return FRUGAL_OK;
}

void Engine::take_refresh(Trainer& t, RemoteRefresh* out) {
  Lock call(t.call_mu);
  *out = std::move(t.remote_cached_rows.refresh);
  t.remote_cached_rows.refresh = {};
}

// Called inside the step that is about to begin. The trainer passes its gate again.
Status Engine::give_up_cached_rows(Trainer& t) {
  for (auto& [raw, of] : t.caches) of.forget();
  for (auto& [raw, of] : t.caches)
    if (t.remote_cached_rows.has_refused(of.table()->handle)) of.close();
  t.remote_cached_rows.done = t.remote_cached_rows.refreshes;
  ControlLock lock(mu_);
  ranks_.begin_again(t);
  // Updates that were committed for the cached rows are in host rows, too.
  t.backlog.clear();
  return health();
}

// --- Undeclared keys -----------------------------------------------------------------------------

// Keys that were not declared, or not as they are used. Resolves them, creates their rows, and
// waits until these are up to date.
Status Engine::access_rows(Trainer& t, const frugal_op* ops, const OpNumbers& numbers,
                           Vector<RemotePart>* out) {
  const size_t n = numbers.at.size();
  Lock call(t.call_mu);
  LocalStep step(*this, t, nullptr, nullptr, &numbers);
  FRUGAL_TRY(step.begin(Use::kDeclare));
  FRUGAL_TRY(check_ops(*this, ops, n, Use::kLookup));
  step.accesses.resize(n);
  for (size_t i = 0; i < n; ++i) {
    Access& a = step.accesses[i];
    const Status found = RowPath(step).find(ops[i], Use::kLookup, nullptr, &a);
    FRUGAL_TRY(in_op(found, numbers.at[i], numbers.of, a.table));
  }
  FRUGAL_TRY(step.resolve(ops, nullptr, Use::kPush));
  FRUGAL_TRY(step.create());
  Vector<RemotePart> parts(n);
  for (size_t i = 0; i < n; ++i) {
    const Access& a = step.accesses[i];
    FRUGAL_TRY(in_op(wait_written_access(t, a), numbers.at[i], numbers.of, a.table));
    parts[i].table = std::static_pointer_cast<Table>(a.table);
    parts[i].part = a.part;
    parts[i].whole = a.whole;
    parts[i].up_to_date = parts[i].used = true;
    parts[i].stale = stale_keys(*parts[i].table, a.part->slots.as<uint32_t>(), a.part->n);
    if (a.whole) describe_cached_rows(t, &parts[i]);
  }
  FRUGAL_TRY(step.end(false));
  out->swap(parts);
  return FRUGAL_OK;
}

// Creates rows of declared parts that the trainer has looked up or pushed gradients of.
Status Engine::use_parts(Trainer& t, const Vector<RemotePart>& used) {
  Lock call(t.call_mu);
  FRUGAL_TRY(check());
  // A call of the trainer itself reports what has undone the step.
  if (t.closing.load() || t.abort_notice.load()) return FRUGAL_ERR_NOT_IN_STEP;
  FRUGAL_TRY(ranks_.check_inside(t));
  create_used(t, used);
  return FRUGAL_OK;
}

void Engine::create_used(Trainer& t, const Vector<RemotePart>& used) {
  Vector<Access> accesses(used.size());
  for (size_t i = 0; i < used.size(); ++i) {
    accesses[i].table = used[i].table;
    accesses[i].part = used[i].part;
    accesses[i].whole = used[i].whole;
  }
  create_rows(t, accesses);
}

// The same for another caller, which needs to know which rows exist. Notices to the trainer stay
// for its own calls.
void Engine::use_marked(Trainer& t, const Vector<RemotePart>& used) {
  if (!t.in_step.load()) return;
  // Does not wait for a call of the trainer that waits for other ranks: that call has ended its
  // step.
  while (!t.call_mu.try_lock()) {
    if (!t.in_step.load()) return;
    sleep_ns(20'000);
  }
  const UniqueLock call(t.call_mu, std::adopt_lock);
  if (t.in_step.load() && !t.closing.load() && !t.abort_notice.load() && !closed() &&
      health() == FRUGAL_OK)
    create_used(t, used);
}

// Before a call of `by`: other attached trainers report rows that they have created and the engine
// does not know yet.
void Engine::tell_used(const Trainer& by) {
  const auto attached = [&](const Trainer& t) { return &t != &by && t.process.heard.load(); };
  for (const TrainerRef& t : ranks_.those(attached)) {
    Lock lock(t->process.mu);
    if (t->process.used) t->process.used->tell();
  }
}

// Takes what the trainer has summed in this step, in place of all that it has submitted before.
Status Engine::submit_gradients(Trainer& t, Vector<RemotePush>* pushes) {
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(ranks_.check_inside(t));
  Map<const AnyTable*, PushState> states;
  // Kernels that update cached rows see pinned memory only.
  const bool for_kernels = memory_.pinner->any() && ranks_.caches_exist();
  for (RemotePush& p : *pushes) {
    if (for_kernels && p.sums) {
      Buffer seen;
      const size_t bytes = p.part->distinct * p.table->rows.layout().sums_bytes();
      const Status s = memory_.pinned.get(bytes, &seen);
      // If the device has failed, its own rank reports that.
      if (s != FRUGAL_OK && s != FRUGAL_ERR_DEVICE) return s;
      if (s == FRUGAL_OK) {
        std::memcpy(seen.data(), p.sums.data(), bytes);
        p.sums = std::move(seen);
      }
    }
    PushState& s = states[p.table.get()];
    s.table = p.table;
    s.first.rank = t.rank;
    s.first.part = std::move(p.part);
    s.first.whole = p.whole;
    s.first.stride = p.table->rows.layout().sums_stride;
    s.first.sums = std::move(p.sums);
  }
  t.pushes.swap(states);
  ranks_.note_push(t.step);
  return FRUGAL_OK;
}

// OK if the trainer is inside a step that no abort has undone.
Status Engine::inside_step(Trainer& t) {
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  return ranks_.check_inside(t);
}

// Has the trainer begun the step, and no abort undone it?
bool Engine::is_inside(const Trainer& t, uint64_t step) {
  ControlLock lock(mu_);
  return t.in_step && t.step == step && !t.abort_notice.load();
}

// The device of a trainer in another process has failed. What that trainer has not ended is undone
// on all ranks, and the others wait until it is closed.
Status Engine::remote_failed(Trainer& t) {
  if (t.reaped.exchange(true)) return FRUGAL_OK;
  const Status s = aborter_.undo(t, Aborter::Why::kFailed);
  if (s == FRUGAL_ERR_OUT_OF_MEMORY) t.reaped.store(false);  // the failure is reported again
  return s;
}

void Engine::count_remote(Trainer& t, const RemoteCounts& c) {
  const auto add = [](std::atomic<uint64_t>& counter, uint64_t n) {
    counter.fetch_add(n, std::memory_order_relaxed);
  };
  add(t.counts.keys_looked_up, c.keys_looked_up);
  add(t.counts.keys_pushed, c.keys_pushed);
  add(t.counts.cache_hits, c.cache_hits);
  add(t.counts.cache_misses, c.cache_misses);
  RankCounters& ranks = meters_.of_ranks[t.rank];
  add(ranks.keys_looked_up, c.keys_looked_up);
  add(ranks.keys_pushed, c.keys_pushed);
  add(ranks.cache_hits, c.cache_hits);
  add(ranks.cache_misses, c.cache_misses);
  add(ranks.stale_reads, c.stale_reads);
  add(ranks.lookup_ns, c.lookup_ns);
  add(ranks.push_ns, c.push_ns);
  add(meters_.counters.prefetch_ns, c.prefetch_ns);
  add(meters_.counters.step_begin_ns, c.step_begin_ns);
  add(meters_.counters.step_end_ns, c.step_end_ns);
  pacing_.trained_attached(c.cpu_ns);
}

// The process of a trainer is gone. Every uncommitted step is undone. No rank begins a step before
// another trainer has joined with the lost rank. OUT_OF_MEMORY: a commit comes first and lacks
// memory; call again.
Status Engine::lose_trainer(const TrainerRef& t) {
  t->closing.store(true);
  workers_.progress();
  {
    Lock call(t->call_mu);  // its waiting call ends
    ControlLock lock(mu_);
    if (closed() || ranks_[t->rank] != t) return FRUGAL_OK;
    ranks_.lose(t->rank);
  }
  FRUGAL_TRY(aborter_.undo(*t, Aborter::Why::kLost));
  return close_trainer(t);
}

bool Engine::find_unresponsive() {
  if (!ranks_.find_unresponsive(liveness_)) return false;
  workers_.progress();
  return true;
}

}  // namespace frugal
