// Ranks: joining, leaving, declaring.
#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "device/pointers.h"
#include "engine/wait.h"

namespace frugal {

constexpr uint64_t kFewKeys = 512;  // of a declaration

Status Engine::create_trainer(const frugal_trainer_config& config, AnyTrainerRef* out) {
  if (config.flags & FRUGAL_TRAINER_REPLACE)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "FRUGAL_TRAINER_REPLACE has a meaning with a service only: close the rank's "
                "trainer instead");
  TrainerRef trainer;
  FRUGAL_TRY(create_trainer(config, &trainer, false));
  *out = std::move(trainer);
  return FRUGAL_OK;
}

Status Engine::create_trainer(const frugal_trainer_config& config, TrainerRef* out, bool attached) {
  FRUGAL_TRY(check());
  auto t = std::allocate_shared<Trainer>(HeapAllocator<Trainer>());
  t->session = shared_from_this();
  t->rank = config.rank;
  t->cache_bytes = config.cache_bytes;
  t->cache_ratio = config.cache_ratio;
  bool cached = t->cache_bytes || t->cache_ratio > 0;
  if (config.device && std::strcmp(config.device, "cpu") != 0) {
    if (attached)
      t->remote_cached_rows.exist = true;
    else
      FRUGAL_TRY(join_gpu(config.device, *t));
    // With staleness the host gathers rows and checks their versions: it would not read a device's
    // cached rows.
    if (stale()) {
      t->cache_bytes = 0;
      t->cache_ratio = 0;
      cached = false;
    }
  }
  // If the trainer does not join after all.
  struct Joining {
    Engine& engine;
    Trainer* t;
    ~Joining() {
      if (t) engine.pins_.leave(*t);
    }
  } joining{*this, t.get()};
  // Ended steps whose device work is not complete would make the ranks look apart.
  FRUGAL_TRY(await_device_work(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  ControlLock lock(mu_);
  // A rank that has joined before joins again between steps, so that it misses none. Nothing is
  // decided before this wait: another thread may take the rank meanwhile.
  if (ranks_.joined(config.rank) && !ranks_[config.rank]) phase_.await(lock, Phase::kJoin);
  if (closed()) return engine_closed();
  if (ranks_[config.rank])
    return fail(FRUGAL_ERR_EXISTS, "rank %u has a trainer already; close it first", config.rank);
  if (ranks_.joined(config.rank)) {
    String why;
    if (!records_.between(&why))
      return fail(FRUGAL_ERR_BUSY, "rank %u can join again between steps only: %s", config.rank,
                  why.c_str());
  }
  t->next_step = ranks_.next_commit();
  t->has_cache.store(cached);
  t->handle = handle_of<AnyTrainer>(t);
  if (!t->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  declarations_.joined(t->rank, t->next_step == kNoStep ? 0 : t->next_step);
  ranks_.join(t, records_.end());
  workers_.progress();
  joining.t = nullptr;
  lock.unlock();
  if (t->gpu) workers_.wake();
  *out = t;
  return FRUGAL_OK;
}

Status Engine::close_trainer(const AnyTrainerRef& t, bool) {
  FRUGAL_TRY(may_close(own(*t)));
  if (!handle_remove(HandleKind::kTrainer, t->handle)) return closes_already();
  return close_trainer(std::static_pointer_cast<Trainer>(t));
}

// A commit comes before the undoing of the step that the rank is inside of. Once the trainer is
// being closed, no call could try again.
Status Engine::may_close(const Trainer& t) {
  if (!t.in_step.load() || !committer_.stalled()) return FRUGAL_OK;
  const Status s = committer_.ready();
  return s == FRUGAL_ERR_OUT_OF_MEMORY ? s : Status(FRUGAL_OK);
}

// Takes no memory, except for a commit that comes first: no rank is to wait for one that is
// leaving. OUT_OF_MEMORY: the engine is about to be closed, and the rank stays, so that no step is
// committed without it.
Status Engine::close_trainer(const TrainerRef& t) {
  t->closing.store(true);
  workers_.progress();
  UniqueLock call(t->call_mu);
  bool inside;
  {
    ControlLock lock(mu_);
    if (closed() || ranks_[t->rank] != t) return FRUGAL_OK;
    inside = t->in_step;
  }
  if (t->undo_pending.load()) {
    aborter_.undo_part(*t);
    inside = false;
  }
  if (inside) {
    call.unlock();
    FRUGAL_TRY(aborter_.undo_surely(*t, Aborter::Why::kLeaving));
    call.lock();
  }
  if (t->gpu) {
    call.unlock();
    FRUGAL_TRY(end_device_work(*t));
    call.lock();
  }
  // What it has read in a step that the others have not ended yet stays declared.
  auto mine = [&] {
    ControlLock lock(mu_);
    return declarations_.any_of(t->rank, t->next_step == kNoStep ? 0 : t->next_step);
  };
  while (const BatchRef b = mine()) drop_batches(b->step, b->rank, nullptr);
  decltype(t->caches) caches;
  {
    ControlLock lock(mu_);
    // An operation outside steps, or a thread that plans, may be using the caches.
    workers_.await(lock, [&]() REQUIRES(control) {
      return phase_.may(Phase::kLeave) && !t->refresh.planning();
    });
    caches.swap(t->caches);
  }
  t->lent.clear();
  const bool pins_failed = pins_.failed(*t);
  pins_.leave(*t);
  if (pins_failed) pins_.unpin();
  // Rows that it cached lose their flags; its own reads have gone with its declarations. This comes
  // before the rank leaves: the rank's next trainer may declare these rows, and its gate must wait
  // for them.
  for (auto& [raw, of] : caches) of.forget();
  ranks_.leave(*t);
  workers_.progress();
  call.unlock();
  memory_.pool.rest();
  // Other ranks may have waited for this one alone. (A commit that lacks memory now is theirs to
  // make.)
  const Status s = committer_.ready();
  return s == FRUGAL_ERR_OUT_OF_MEMORY ? FRUGAL_OK : s;
}

// --- Declarations --------------------------------------------------------------------------------

// Is the step among those that the rank can declare now?
Status Engine::may_declare(const Trainer& t, uint64_t step, bool late) {
  const uint64_t at = t.next_step != kNoStep ? t.next_step : ranks_.next_commit();
  const uint64_t lookahead = config_.lookahead;
  if (at == kNoStep) {
    // The first step is not known yet; what is declared must fit into one window.
    uint64_t least = step, most = step;
    if (declarations_.range(&least, &most)) {
      least = std::min(least, step);
      most = std::max(most, step);
    }
    if (most - least <= lookahead) return FRUGAL_OK;
    return fail(FRUGAL_ERR_STEP_RANGE,
                "steps %llu and %llu do not fit into one window of lookahead %u: begin the "
                "first before",
                static_cast<unsigned long long>(least), static_cast<unsigned long long>(most),
                config_.lookahead);
  }
  // Inside step s the next is s + 1, but the window is that of s.
  uint64_t last = (t.in_step ? t.step : at) + lookahead;
  // A step that it was inside of may be undone by now, with those that were not committed.
  if (late && last < kNoStep - 2 * kRing) last += kRing;
  if (step < at)
    return fail(FRUGAL_ERR_STEP_RANGE,
                "rank %u has begun step %llu already: declare step %llu or later", t.rank,
                static_cast<unsigned long long>(step), static_cast<unsigned long long>(at));
  if (step > last)
    return fail(FRUGAL_ERR_STEP_RANGE,
                "step %llu lies beyond the ring: the last that rank %u can declare now is %llu "
                "(lookahead %u)",
                static_cast<unsigned long long>(step), t.rank,
                static_cast<unsigned long long>(last), config_.lookahead);
  return FRUGAL_OK;
}

// Long for its order: all that can fail comes before the batch is entered. A failed call waits at
// the end for keys that are on their way to the host.
Status Engine::prefetch(Trainer& t, uint64_t step, const frugal_op* ops, size_t n, bool want_handle,
                        uint64_t* batch_out, Buffer* copies, bool late) {
  Timed timed(meters_.counters.prefetch_ns, !late);
  TraceSpan span(meters_.trace, SpanKind::kPrefetch);
  span.step(step).rank(t.rank);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t, !late));
  auto batch = std::allocate_shared<Batch>(HeapAllocator<Batch>());
  batch->step = step;
  batch->rank = t.rank;
  batch->session = this;
  uint64_t keys = 0;
  Vector<PartRef> downloading;
  FRUGAL_TRY(check_ops(*this, ops, n, Use::kDeclare));
  if (t.gpu) {
    FRUGAL_TRY(t.gpu->ready());
  } else {
    device::look_for_devices();
    FRUGAL_TRY(host_memory(ops, n));
  }
  // A failed call gives back memory to which keys are still being copied.
  struct Coming {
    Gpu* gpu = nullptr;
    ~Coming() {
      if (gpu) gpu->drain();
    }
  } coming_keys;
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = ops[i];
    TableRef table;
    FRUGAL_TRY(in_op(op_table(op, &table), i, n, table));
    bool padded = op.flags & FRUGAL_OP_PADDING, on_device = false;
    if (t.gpu && op.count)
      FRUGAL_TRY(t.gpu->on_device(op.keys, sizeof(uint64_t), "frugal_op.keys", &on_device));
    PartRef part = make_part();
    part->step = step;
    part->rank = t.rank;
    if (on_device) {
      FRUGAL_TRY(part->expect_keys(op.count, padded, op.padding_key));
      coming_keys.gpu = t.gpu.get();
      FRUGAL_TRY(t.gpu->copy_in(op.keys, op.count * sizeof(uint64_t), &part->keys));
      downloading.push_back(part);
    } else {
      FRUGAL_TRY(in_op(copies ? part->adopt_keys(table->rows, std::move(copies[i]), op.count,
                                                 padded, op.padding_key)
                              : part->take_keys(memory_.pool, table->rows, op.keys, op.count,
                                                padded, op.padding_key),
                       i, n, table));
    }
    batch->parts.push_back(std::move(part));
    batch->tables.push_back(std::move(table));
    keys += op.count;
  }
  batch->index();
  std::shared_ptr<KeyDownload> download;
  bool alone;
  if (!downloading.empty()) FRUGAL_TRY(t.gpu->begin_download(std::move(downloading), &download));
  {
    ControlLock lock(mu_);
    // The thread that closes the engine has taken the batches away already.
    if (closed()) return engine_closed();
    for (const TableRef& table : batch->tables)
      if (table->dropped.load())
        return fail(FRUGAL_ERR_BAD_HANDLE, "table '%s' was dropped: declare without it",
                    table->name.c_str());
    FRUGAL_TRY(may_declare(t, step, late));
    FRUGAL_TRY(check_step(step));
    FRUGAL_TRY(declarations_.add(batch, want_handle, std::move(download), &alone));
    coming_keys.gpu = nullptr;
    if (want_handle) *batch_out = batch->handle;
    t.refresh.declared(step);
  }
  meters_.counters.keys_declared.fetch_add(keys, std::memory_order_relaxed);
  span.count(keys);
  // A few keys are resolved sooner than a thread is woken, unless other declarations wait, too.
  if (!workers_.callers_work() && (!alone || need_links() || t.gpu || keys > kFewKeys)) {
    workers_.wake();
  } else {
    try {
      while (resolve_one(step)) {
      }
      if (need_links())
        while (link_one(step)) {
        }
    } catch (const std::bad_alloc&) {
      // The keys are declared all the same: the gate of the step resolves them.
    }
  }
  return FRUGAL_OK;
}

// A call needs slots of a full table that declarations have reserved. Declarations for steps that
// their ranks have not begun give up theirs: no call uses these yet, and the calls of the step
// resolve again. Until the caller takes `reserving_paused` back, no declaration reserves a row of
// the table.
void Engine::give_up_reserved(Table& table) {
  ControlLock lock(mu_);
  const Declarations::Which of_table{.table = &table};
  // Nor may a thread be finding rows, which it would hold until afterwards. The declarations' lock
  // is held for this check and for what follows: a thread that waits for that lock begins to link.
  auto idle = [&] {
    declarations_.mutex().assert_held();
    bool none = declarations_.quiet(table);
    declarations_.each(of_table,
                       [&](const Batch& b, size_t i) { none = none && !b.parts[i]->linking; });
    return none;
  };
  workers_.await(lock, [&]() REQUIRES(control) {
    if (closed() || health() != FRUGAL_OK) return true;
    Lock declared(declarations_.mutex());
    if (!idle()) return false;
    declarations_.each(of_table, [&](Batch& b, size_t i) {
      mu_.assert_held();
      declarations_.mutex().assert_held();
      const TrainerRef& t = ranks_[b.rank];
      // The step has begun: in use. So was what a rank that has left declared.
      if (!t || (t->next_step != kNoStep && b.step < t->next_step)) return;
      declarations_.never_resolve(b, i, Part::kStale);
      // It would give up nothing if its rows exist.
      const Part& p = *b.parts[i];
      if (p.resolved() && table.rows.any_reserved(p.row_slots(), p.distinct))
        declarations_.give_up(b, i);
    });
    declarations_.recount(table);
    return true;
  });
}

// Takes out of the window what a rank has declared for a step: one batch, or (null) all.
void Engine::drop_batches(uint64_t step, uint32_t rank, const Batch* one) {
  const Declarations::Share share{step, rank, one};
  if (!declarations_.close(share)) return;
  ControlLock lock(mu_);
  workers_.await(lock, [&]() REQUIRES(control) {
    // The thread that prepares a step uses its declarations.
    const StepRecord* record = records_.find(step);
    return (!record || record->all_prepared()) && declarations_.take_out(share);
  });
  Lock declared(declarations_.mutex());
  for (const TableRef& t : one ? one->tables : tables_.all()) declarations_.recount(*t);
  workers_.progress();
}

Status Engine::cancel(AnyTrainer& any, const AnyBatchRef& batch) {
  Trainer& t = own(any);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  if (batch->session != this)
    return fail(FRUGAL_ERR_BAD_HANDLE, "the batch belongs to another engine: cancel it there");
  if (batch->rank != t.rank)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the batch was declared by rank %u, not rank %u: give one of its own", batch->rank,
                t.rank);
  {
    ControlLock lock(mu_);
    if (t.next_step != kNoStep && batch->step < t.next_step)
      return fail(FRUGAL_ERR_STEP_RANGE,
                  "step %llu has begun: its declaration stays until that ends; cancel before",
                  static_cast<unsigned long long>(batch->step));
  }
  drop_batches(batch->step, batch->rank, static_cast<const Batch*>(batch.get()));
  return FRUGAL_OK;
}

}  // namespace frugal
