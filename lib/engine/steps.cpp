// The step protocol: begin and end.
#include <algorithm>
#include <cstring>

#include "arith/fold.h"
#include "device/pointers.h"
#include "engine/wait.h"

namespace frugal {

// --- Entering a call of a trainer ----------------------------------------------------------------

// Called with call_mu held, first thing in every call of the step protocol.
Status Engine::begin_call(Trainer& t, bool tells) {
  FRUGAL_TRY(check());
  if (t.closing.load() && t.lost_peer.load() == t.rank)
    return fail(
        FRUGAL_ERR_PEER_LOST,
        "rank %u did not respond while other ranks waited for it, and was removed: close its "
        "trainer and join again",
        t.rank);
  if (t.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (t.gpu && t.gpu->sticky()) {
    device_failed(t.rank, *t.gpu);
    return t.gpu->ready();
  }
  if (tells && t.abort_notice.load()) return aborter_.tell(t);
  return FRUGAL_OK;
}

// --- Beginning a step ----------------------------------------------------------------------------

Status Engine::step_begin(AnyTrainer& any, uint64_t step, Deadline deadline) {
  Trainer& t = own(any);
  Timed timed(meters_.counters.step_begin_ns);
  TraceSpan span(meters_.trace, SpanKind::kStepBegin);
  span.step(step).rank(t.rank);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  if (t.gpu)
    FRUGAL_TRY(t.gpu->ready());
  else
    device::look_for_devices();
  FRUGAL_TRY(check_step(step));
  {
    ControlLock lock(mu_);
    FRUGAL_TRY(ranks_.may_begin(t, step));
    if (ranks_.next_commit() == kNoStep) {
      ranks_.start(step);
      tables_.each_window([&](Window& w) { w.set_next_commit(step); });
    }
    if (ranks_.any_behind(step))
      meters_.counters.ranks_apart.fetch_add(1, std::memory_order_relaxed);
  }
  if (t.gpu) FRUGAL_TRY(await_pins(t, deadline));
  struct Refreshing {
    Engine& engine;
    Trainer* t = nullptr;  // null: allow_planning() has ended it
    ~Refreshing() {
      if (!t) return;
      ControlLock lock(engine.mu_);
      t->refresh.end_refresh(kNoStep);
    }
  } refreshing{*this};
  if (t.has_cache.load()) {
    forbid_planning(t);
    refreshing.t = &t;
  }
  for (;;) {
    bool again = false;
    Status s = gate(&t, step, deadline);
    if (s == FRUGAL_ERR_STEP_ABORTED) return aborter_.tell(t);
    if (s != FRUGAL_OK) return s;
    {
      ControlLock lock(mu_);
      if (!t.abort_notice.load() && !t.closing.load() && health() == FRUGAL_OK &&
          phase_.may(Phase::kStep) && open_still(step)) {
        take_parts(t, step);
        if (ranks_.begun() <= step) checkpoints_.beginning(step);
        ranks_.begin(t, step);
        if (t.remote_cached_rows.done == t.remote_cached_rows.refreshes) break;
        again = true;
      }
    }
    // Cached rows in the other process are not what the index says. Rows are then read in host
    // memory, and the gate has not waited for those.
    if (again) {
      FRUGAL_TRY(give_up_cached_rows(t));
      continue;
    }
    // A gate that is open at once checks neither the trainer nor the engine. A thread that closes
    // one of them waits for this call.
    FRUGAL_TRY(begin_call(t));
  }
  if (t.cache_bytes || t.cache_ratio > 0) FRUGAL_TRY(refresh_or_forget(t, step));
  if (t.has_cache.load()) {
    allow_planning(t, step);
    refreshing.t = nullptr;
  }
  if (pacing_.deferred() && config_.flush_threads) schedule_prepare(t, step);
  return FRUGAL_OK;
}

// No part can be declared for the step any more, and declared ones stay as the gate has found them.
void Engine::take_parts(Trainer& t, uint64_t step) {
  t.parts.clear();
  t.next_part = 0;
  Lock declared(declarations_.mutex());
  declarations_.each({step, step, t.rank}, [&](const Batch& b, size_t i) {
    t.call_mu.assert_held();
    StepPart p;
    p.batch = b.id;
    p.index = static_cast<uint32_t>(i);
    p.table = b.tables[i];
    p.part = b.parts[i];
    p.whole = p.up_to_date = p.part->resolved();
    t.parts.push_back(std::move(p));
  });
}

// Once all ranks have begun the step, what they push in it may be prepared ahead of its commit.
void Engine::schedule_prepare(const Trainer& t, uint64_t step) {
  bool schedule = false;
  try {
    ControlLock lock(mu_);
    // After an abort that this rank has not received yet, all ranks begin the step again. They may
    // declare for it meanwhile, and what is prepared must have passed the gates.
    schedule = phase_.may(Phase::kPrepare) && !t.abort_notice.load() && records_.schedule(step);
  } catch (const std::bad_alloc&) {
    schedule = false;  // preparing is optional
  }
  if (schedule) workers_.wake();
}

// --- Ending a step -------------------------------------------------------------------------------

Status Engine::step_end(AnyTrainer& any, uint64_t step, uint32_t flags) {
  Trainer& t = own(any);
  Timed timed(meters_.counters.step_end_ns);
  TraceSpan span(meters_.trace, SpanKind::kStepEnd);
  span.step(step).rank(t.rank);
  DeviceWorkRef work;  // ends when no lock is held
  {
    UniqueLock call(t.call_mu);
    FRUGAL_TRY(begin_call(t));
    if (flags & ~FRUGAL_STEP_SKIP)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "unknown flags 0x%x in step_end: give 0 or FRUGAL_STEP_SKIP", flags);
    FRUGAL_TRY(ranks_.check_inside(t));
    if (t.step != step)
      return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu, not %llu: end that", t.rank,
                  static_cast<unsigned long long>(t.step), static_cast<unsigned long long>(step));
    DeviceWork::Found found = DeviceWork::Found::kNothing;
    if (t.gpu) FRUGAL_TRY(end_device_work(t, &found));
    if (found != DeviceWork::Found::kNothing) {
      call.unlock();
      FRUGAL_TRY(aborter_.undo(t, Aborter::Why::kCall));
      return found_in_step(found, step);
    }
    Vector<Submitted> rank_gradients;
    FRUGAL_TRY(join_rank_gradients(t, &rank_gradients));
    bool taken = false;
    {
      ControlLock lock(mu_);
      // The thread that closes the engine has taken the records away already.
      if (closed()) return engine_closed();
      if (!t.abort_notice.load()) {
        work = submit(t, records_.of(step), rank_gradients, flags);
        taken = true;
      }
    }
    // The next call reports an abort that comes after submit(): this step may have been committed
    // before it.
    if (!taken) return aborter_.tell(t);
  }
  if (records_.has_device_work()) workers_.wake();  // one of them polls until it is complete
  // The rank has ended the step. A commit without memory is stalled: a waiting thread, or one that
  // has memory, makes it.
  const Status s = committer_.ready();
  return s == FRUGAL_ERR_OUT_OF_MEMORY && health() == FRUGAL_OK ? FRUGAL_OK : s;
}

// For each table that the rank has pushed to: one sum for each row.
Status Engine::join_rank_gradients(Trainer& t, Vector<Submitted>* rank_gradients) {
  for (auto& [raw, push] : t.pushes) {
    if (push.table->dropped.load()) continue;
    Submitted r{&push, {}, nullptr};
    if (!push.tail.empty())
      FRUGAL_TRY(
          join_pushes(push, push.table->dim, t.rank, memory_.pool, memory_.sums(), &r.joined));
    RankGradients& h = push.tail.empty() ? push.first : r.joined;
    if (h.rows()) rank_gradients->push_back(std::move(r));
  }
  return FRUGAL_OK;
}

// First comes all that may need memory, then the submission, which cannot fail. Returns device work
// that is complete: the caller releases it once no lock is held.
DeviceWorkRef Engine::submit(Trainer& t, StepRecord& record, Vector<Submitted>& rank_gradients,
                             uint32_t flags) {
  for (Submitted& r : rank_gradients) {
    const TableRef table = std::static_pointer_cast<Table>(r.push->table);
    r.to = &record.rank_gradients[table.get()];
    r.to->table = table;
    make_room(r.to->ranks, 1);
  }
  make_room(record.created, t.created.size());
  if (t.blob) {
    if (!record.blobs) record.blobs = std::allocate_shared<Blobs>(HeapAllocator<Blobs>());
    make_room(record.blobs->of_ranks, 1);
  }
  if (t.gpu) {
    make_room(record.device_work, 1);
    if (DeviceWork* f = t.gpu->current_device_work())
      f->pinned.reserve(f->pinned.size() + t.pushes.size());
  }
  for (Submitted& r : rank_gradients)
    r.to->add(std::move(r.push->tail.empty() ? r.push->first : r.joined));
  for (CreatedRows& c : t.created) record.created.push_back(std::move(c));
  if (t.blob) record.blobs->of_ranks.push_back(std::move(*t.blob));
  t.blob.reset();
  if (flags & FRUGAL_STEP_SKIP) record.skip = true;
  DeviceWorkRef work;
  if (t.gpu) work = t.gpu->take_device_work();
  if (work && !work->completed.load()) {
    // Sums of runs have no use any more, but kernels may still be writing them.
    for (auto& [raw, push] : t.pushes)
      if (push.runs) work->pinned.push_back(std::move(push.runs));
    records_.add_device_work(&record, std::move(work));
  }
  ranks_.end(t);
  t.parts.clear();
  t.pushes.clear();
  t.created.clear();
  t.lent.clear();
  return work;
}

// A call no longer holds slots of a table. Another call may be waiting for them.
void Engine::end_holding(Table& table) {
  --table.calls;
  declarations_.recount_unknown(table);
  if (table.reserving_paused.load()) workers_.progress();
}

// --- Abort ---------------------------------------------------------------------------------------

Status Engine::abort_call(AnyTrainer& any) {
  Trainer& t = own(any);
  {
    Lock call(t.call_mu);
    FRUGAL_TRY(begin_call(t));
    FRUGAL_TRY(ranks_.check_inside(t));
  }
  return aborter_.undo(t, Aborter::Why::kCall);
}

}  // namespace frugal
