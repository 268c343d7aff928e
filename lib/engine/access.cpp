// Lookups and pushes of this process's trainers: undeclared keys, creation of rows, and waits until
// rows are up to date. row_path.h has the rest.
#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "engine/local_step.h"

namespace frugal {
// --- Checking ------------------------------------------------------------------------------------

Status Engine::op_table(const frugal_op& op, TableRef* out) const {
  AnyTableRef table;
  FRUGAL_TRY(Session::op_table(op, &table));
  *out = std::static_pointer_cast<Table>(std::move(table));
  return FRUGAL_OK;
}

Status Engine::table_of(uint64_t handle, TableRef* out) const {
  const AnyTableRef table = object_of<AnyTable>(reinterpret_cast<const void*>(handle));
  if (!table || table->session.get() != this)
    return fail(FRUGAL_ERR_BAD_HANDLE,
                "another process of the job has dropped the table: drop this handle of it, too");
  *out = std::static_pointer_cast<Table>(table);
  return FRUGAL_OK;
}

// Finds the slots of keys that are not a whole declaration. It only reserves missing rows, so a
// call that fails later has created nothing. The part holds the slots of its rows. `sorted`: also
// sorts the keys and removes duplicates.
Status Engine::resolve_access(Trainer& t, const frugal_op& op, Access* a, bool sorted) {
  if (a->whole) return FRUGAL_OK;
  Rows& rows = own(*a->table).rows;
  PartRef part = make_part();
  part->step = t.step;
  part->rank = t.rank;
  // A declaration that could not be resolved ahead of its step.
  Part* declared = op.keys ? nullptr : a->declared.get();
  const size_t n = declared ? declared->n : op.count;
  const bool padded = op.flags & FRUGAL_OP_PADDING;
  meters_.counters.keys_undeclared.fetch_add(n, std::memory_order_relaxed);
  if (declared) {
    FRUGAL_TRY(declared->take_lent(memory_.pool, rows));
    FRUGAL_TRY(part->take_keys(memory_.pool, *declared));
  } else if (sorted) {
    FRUGAL_TRY(part->take_keys(memory_.pool, rows, op.keys, n, padded, op.padding_key));
  } else {
    part->n = n;
    FRUGAL_TRY(memory_.pool.get(n * sizeof(uint32_t), &part->slots));
    FRUGAL_TRY(rows.resolve(op.keys, n, padded ? &op.padding_key : nullptr, Rows::Missing::kReserve,
                            part->slots.as<uint32_t>(), nullptr));
  }
  if (sorted)
    FRUGAL_TRY(part->resolve(memory_.pool, rows, Rows::Missing::kReserve, nullptr));
  else if (declared)
    FRUGAL_TRY(part->find_slots(memory_.pool, rows, Rows::Missing::kReserve, nullptr));
  a->part = std::move(part);
  return FRUGAL_OK;
}

// Creates those rows of the accesses that are only reserved. Throws if there is no memory. The rows
// created until then are in the trainer's list of created rows, so undoing the step takes them
// back.
void Engine::create_rows(Trainer& t, const Vector<Access>& accesses) {
  t.created.reserve(t.created.size() + accesses.size());
  auto first_uncommitted = [&] {
    if (!stale()) return t.step;
    ControlLock lock(mu_);
    return ranks_.next_commit();
  };
  for (const Access& a : accesses) {
    if (!a.table->any_key) continue;
    CreatedRows& made = t.created.emplace_back();
    made.table = std::static_pointer_cast<Table>(a.table);
    for (uint64_t first = first_uncommitted(), now;; first = now) {
      made.table->rows.use(a.part->slots.as<uint32_t>(), a.part->n, t.step, first, &made.slots,
                           &made.earlier);
      // If other ranks have meanwhile advanced by several steps, a later step's mark may have
      // looked like an earlier one's.
      now = first_uncommitted();
      if (now - first < 2) break;
    }
    if (made.slots.empty() && made.earlier.empty()) t.created.pop_back();
  }
}

// Makes the pending updates of undeclared rows urgent, and waits for them.
Status Engine::wait_written(Trainer* t, Table& table, const uint32_t* slots, size_t n,
                            uint64_t step, Deadline deadline) {
  Status s = FRUGAL_OK;
  if (workers_.applying())
    s = wait(
        deadline, t, [&] { return !workers_.applying(); }, [&] { return workers_.help(true); });
  // A failed job also counts as done, after health() reports the failure.
  if (s == FRUGAL_OK) s = check();
  if (s == FRUGAL_OK && table.window.opened() && table.window.any_pending()) {
    uint64_t before = step;
    if (step != UINT64_MAX) before = config_.staleness >= step ? 0 : step - config_.staleness;
    bool waited = false;
    // One round for each unwritten update of a row.
    while (s == FRUGAL_OK && table.window.force(slots, n, before)) {
      if (!waited) meters_.counters.lookup_waits.fetch_add(1, std::memory_order_relaxed);
      waited = true;
      const uint64_t next_commit = ranks_.next_commit();
      s = wait(
          deadline, t, [&] { return !table.window.pending_until(next_commit); },
          [&] { return flusher_.write(next_commit); });
    }
  }
  if (s == FRUGAL_ERR_STEP_ABORTED && t) {
    t->call_mu.assert_held();
    return aborter_.tell(*t);
  }
  if (s == FRUGAL_ERR_TIMEOUT)
    return fail(s, "%zu keys that were not declared waited for their pending updates; call again",
                n);
  return s;
}

// --- Tables with a storage tier ------------------------------------------------------------------

// Repeats a call of a step that found no free slots until it finds some.
template <class Call>
Status Engine::with_slots(Trainer& t, const Vector<Access>& accesses, Call call) {
  struct Wake {
    Workers& workers;
    ~Wake() { workers.wake(); }
  } wake{workers_};  // declarations of later steps go on
  List<LoadingParts::Wanted> wanted;
  for (const Access& a : accesses)
    if (!a.whole && own(*a.table).rows.tier())
      wanted.emplace_back(own(*a.table).loading_parts, t.step);
  Status s = FRUGAL_ERR_BUSY;
  const auto help = [&] {
    return std::any_of(accesses.begin(), accesses.end(), [&](const Access& a) {
      return !a.whole && own(*a.table).rows.tier() && free_slots(own(*a.table), t.step);
    });
  };
  const Status waited = wait(
      deadline(FRUGAL_TIMEOUT_DEFAULT), &t, [&] { return (s = call()) != FRUGAL_ERR_BUSY; }, help);
  if (waited == FRUGAL_ERR_STEP_ABORTED) return aborter_.tell(t);
  if (waited == FRUGAL_ERR_TIMEOUT)
    return fail(waited, "rows that were not declared waited for slots; call again");
  return waited == FRUGAL_OK ? s : waited;
}

Status Engine::await_loaded(Trainer& t, const Vector<Access>& accesses) {
  const auto loaded = [&] {
    for (const Access& a : accesses) {
      Rows& rows = own(*a.table).rows;
      if (a.whole || !rows.tier()) continue;
      const uint32_t* const slots = a.part->slots.as<uint32_t>();
      if (rows.tier()->first_loading(slots, 0, a.part->n) != a.part->n) return false;
    }
    return true;
  };
  if (loaded()) return FRUGAL_OK;
  const Status s =
      wait(deadline(FRUGAL_TIMEOUT_DEFAULT), &t, loaded, [this] { return load_one(); });
  if (s == FRUGAL_ERR_STEP_ABORTED) return aborter_.tell(t);
  if (s != FRUGAL_ERR_TIMEOUT) return s;
  return fail(s, "rows that were not declared waited to be loaded; call again");
}

// --- Lookup --------------------------------------------------------------------------------------

// The trainer's cache, if it has rows of the access; else null. Undeclared rows have been written
// to host memory.
TableCache* Engine::cache_for(Trainer& t, const Access& a) {
  if (!a.whole || !a.part->sources || !t.has_cache.load()) return nullptr;
  TableCache* of = cache_in(t, own(*a.table));
  return of && of->there() ? of : nullptr;
}

// Waits for rows that the gate does not wait for.
Status Engine::wait_written_access(Trainer& t, const Access& a) {
  if (a.whole) {
    TableCache* of = t.has_cache.load() ? cache_in(t, own(*a.table)) : nullptr;
    if (!of || !of->there() || a.part->sources || a.part->distinct == 0) return FRUGAL_OK;
  }
  return wait_written(&t, own(*a.table), a.part->slots.as<uint32_t>(), a.part->n, t.step,
                      deadline(FRUGAL_TIMEOUT_DEFAULT));
}

Status Engine::row_awaited(Deadline* until) const {
  FRUGAL_TRY(check());
  if (!until->at) *until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  if (!until->passed()) return FRUGAL_OK;
  return fail(FRUGAL_ERR_TIMEOUT, "waited for rows to be written; nothing was taken: call again");
}

void Engine::host_rows(const Table& table, RowSource* from) const {
  from->rows = table.rows.ref();
  from->versions = memory_.versions();
  from->id = table.handle;
}

// --- A step's calls ------------------------------------------------------------------------------

Engine::LocalStep::LocalStep(Engine& engine, Trainer& t, TraceSpan* span, TimedLookup* timed,
                             const OpNumbers* numbers)
    : StepView(engine, t, engine, engine.memory_.pool, engine.memory_.pinned, true),
      engine_(engine),
      t_(t),
      span_(span),
      timed_(timed),
      numbers_(numbers) {}

Status Engine::LocalStep::begin(Use use) {
  t_.call_mu.assert_held();
  FRUGAL_TRY(engine_.begin_call(t_));
  FRUGAL_TRY(engine_.ranks_.check_inside(t_));
  if (span_) span_->step(t_.step);
  if (use == Use::kPush) {
    engine_.ranks_.note_push(t_.step);
    busy_.emplace(engine_.calls_);
  }
  return FRUGAL_OK;
}

// A lookup that does not wait, and that ends before another thread could make way for it.
bool Engine::LocalStep::is_small() const {
  if (stale() || t_.gpu || t_.has_cache.load()) return false;
  size_t bytes = 0;
  for (const Access& a : accesses) {
    if (!a.whole) return false;
    bytes += a.part->n * a.table->dim * sizeof(float);
  }
  return bytes <= kSmallBytes;
}

Status Engine::LocalStep::resolve(const frugal_op* ops, const GpuOp* gpu, Use use) {
  t_.call_mu.assert_held();
  const size_t n = accesses.size();
  if (use == Use::kLookup) {
    const bool small = is_small();
    timed_->is(small);
    if (small) return FRUGAL_OK;
    busy_.emplace(engine_.calls_);
  }
  if (std::all_of(accesses.begin(), accesses.end(), [](const Access& a) { return a.whole; }))
    return FRUGAL_OK;
  const auto find = [&]() -> Status {
    hold_.emplace(engine_, accesses);
    for (size_t i = 0; i < n; ++i) {
      // Kernels and sums need the rows in order.
      const bool sorted = use != Use::kLookup || (gpu && gpu[i].rows_on_device && !stale());
      const Status s = engine_.resolve_access(t_, ops[i], &accesses[i], sorted);
      if (s == FRUGAL_OK) continue;
      hold_.reset();
      for (Access& a : accesses)
        if (!a.whole) a.part = nullptr;
      const size_t of = numbers_ ? numbers_->of : n;
      return in_op(s, numbers_ ? numbers_->at[i] : i, of, accesses[i].table);
    }
    return FRUGAL_OK;
  };
  Status s = engine_.with_room(ops, n, find);
  if (s == FRUGAL_ERR_BUSY)
    s = engine_.with_slots(t_, accesses, [&] { return engine_.with_room(ops, n, find); });
  return s == FRUGAL_OK ? engine_.await_loaded(t_, accesses) : s;
}

Status Engine::LocalStep::create() {
  const auto any_key = [](const Access& a) { return a.table->any_key; };
  if (std::any_of(accesses.begin(), accesses.end(), any_key)) {
    // Reserve first: once rows exist, keep() must need no memory.
    const size_t kept = hold_ ? hold_->to_keep() : 0;
    if (kept) t_.created.reserve(t_.created.size() + accesses.size() + kept);
    engine_.create_rows(t_, accesses);
    if (kept) hold_->keep(&t_.created);
  }
  hold_.reset();
  return FRUGAL_OK;
}

Status Engine::LocalStep::rows_of(const Access& a, RowSource* out) {
  FRUGAL_TRY(engine_.wait_written_access(t_, a));
  Table& table = own(*a.table);
  engine_.host_rows(table, out);
  if (!t_.has_cache.load() && !stale()) return FRUGAL_OK;
  out->cached = cache_in(t_, table) != nullptr;
  if (const TableCache* of = engine_.cache_for(t_, a)) out->cached_rows = of->at();
  out->stale_keys = engine_.stale_keys(table, a.part->slots.as<uint32_t>(), a.part->n);
  return FRUGAL_OK;
}

Status Engine::LocalStep::end(bool) {
  t_.call_mu.assert_held();
  return t_.abort_notice.load() ? engine_.aborter_.tell(t_) : FRUGAL_OK;
}

bool Engine::LocalStep::keeps_gradients() const {
  return engine_.config_.world_size == 1 && !stale() && !engine_.ranks_.caches_exist() &&
         !engine_.ledger();
}

void Engine::LocalStep::count(Use use, const Counts& c) {
  t_.call_mu.assert_held();
  const bool push = use == Use::kPush;
  RankCounters& ranks = engine_.meters_.of_ranks[t_.rank];
  add_own(push ? ranks.keys_pushed : ranks.keys_looked_up, c.keys);
  add_own(push ? t_.counts.keys_pushed : t_.counts.keys_looked_up, c.keys);
  add_own(ranks.cache_hits, c.hits);
  add_own(ranks.cache_misses, c.misses);
  add_own(t_.counts.cache_hits, c.hits);
  add_own(t_.counts.cache_misses, c.misses);
  add_own(ranks.stale_reads, c.stale);
  if (span_) span_->count(c.keys);
}

Status Engine::lookup(AnyTrainer& any, const frugal_op* ops, size_t n) {
  Trainer& t = own(any);
  TraceSpan span(meters_.trace, SpanKind::kLookup);
  span.rank(t.rank);
  Lock call(t.call_mu);
  TimedLookup timed(t.lookups, meters_.of_ranks[t.rank].lookup_ns);
  LocalStep step(*this, t, &span, &timed, nullptr);
  return RowPath(step).lookup(ops, n);
}

Status Engine::push(AnyTrainer& any, const frugal_op* ops, size_t n) {
  TraceSpan span(meters_.trace, SpanKind::kPush);
  span.rank(any.rank);
  Lock call(any.call_mu);
  TimedOwn timed(meters_.of_ranks[any.rank].push_ns);
  LocalStep step(*this, own(any), &span, nullptr, nullptr);
  return RowPath(step).push(ops, n);
}

Status Engine::borrow(AnyTrainer& any, size_t bytes, void** out) {
  Lock call(any.call_mu);
  LocalStep step(*this, own(any), nullptr, nullptr, nullptr);
  return RowPath(step).borrow(bytes, out);
}

// --- Evaluation ----------------------------------------------------------------------------------

Status Engine::read_rows(Table& table, const uint32_t* slots, size_t n, const frugal_op& op,
                         const StoredCopies& stored) {
  RowSource from;
  host_rows(table, &from);
  Buffer pointers, copies;
  Deadline until;
  FRUGAL_TRY(locate(from, nullptr, slots, n, memory_.pool, &pointers, &copies,
                    [&] { return row_awaited(&until); }));
  if (!stored.at.empty()) {
    const bool all = !pointers;
    if (all) FRUGAL_TRY(memory_.pool.get(n * sizeof(device::Element*), &pointers));
    for (size_t i = 0; i < n; ++i) {
      const device::Element*& p = pointers.as<const device::Element*>()[i];
      if (stored.has(i))
        p = stored.ref.row(stored.at[i]);
      else if (!all)
        continue;
      else if (slots[i] == kNoSlot)
        p = nullptr;
      else
        p = slots[i] == kMissingSlot ? row_of_zeros() : from.rows.row(slots[i]);
    }
  }
  return gather(from.rows, pointers.as<const device::Element*>(), slots, n, op);
}

// Writes into device memory. The rows are complete when it returns, so no device work stays in
// flight.
Status Engine::read_to_device(Trainer& t, Table& table, const uint32_t* slots, size_t n,
                              const GpuOp& op, const StoredCopies& stored) {
  DeviceWork device_work;
  device_work.gpu = t.gpu;
  const RowLayout& layout = table.rows.layout();
  FRUGAL_TRY(t.gpu->send_rows(
      device_work, op, n, layout.dim, layout.sums_stride,
      [&](const frugal_op& host) { return read_rows(table, slots, n, host, stored); }));
  return t.gpu->wait_stream();
}

}  // namespace frugal
