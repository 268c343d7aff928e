#include "engine/abort.h"

#include "base/assert.h"
#include "base/os.h"
#include "base/retry.h"

namespace frugal {

Status Aborter::tell(Trainer& t) {
  if (t.undo_pending.load()) undo_part(t);
  String again;
  {
    ControlLock lock(mu_);
    again = ranks_.step_again();
    t.abort_notice.fetch_sub(1);
  }
  // The rank has the whole time-out to begin the step again.
  if (t.process.heard.load()) t.process.heard.store(now_ns());
  t.lent.clear();  // not earlier: until this report the rank may be writing its gradients
  const uint32_t lost = t.lost_peer.load();
  if (t.closing.load() && lost != t.rank)
    return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (lost != kNoRank)
    return fail(FRUGAL_ERR_PEER_LOST,
                "the process of rank %u is gone or does not respond: the step is undone on all "
                "ranks; begin %s, which waits until a trainer has joined as that rank",
                lost, again.c_str());
  return fail(FRUGAL_ERR_STEP_ABORTED,
              "another rank aborted the step: it is undone on all ranks; begin %s", again.c_str());
}

void Aborter::undo_part(Trainer& t) {
  if (t.gpu) t.gpu->take_device_work();  // waits until the device has finished it
  t.parts.clear();
  t.pushes.clear();
  t.blob.reset();
  ranks_.undo(t);
  t.undo_pending.store(false);
}

void Aborter::await_undone(Trainer& t) {
  while (t.undo_pending.load()) {
    if (t.call_mu.try_lock()) {
      if (t.undo_pending.load()) undo_part(t);
      t.call_mu.unlock();
      break;
    }
    // The trainer is inside a call, which will see the notice.
    sleep_ns(20'000);
  }
}

void Aborter::undo_rows(Vector<CreatedRows>& created) {
  for (const CreatedRows& c : created) c.undo();
  for (const CreatedRows& c : created) declarations_.recount_unknown(*c.table);
  created.clear();
}

// Marks all ranks, and from then on no rank begins a step and no step commits. Unless it sets
// *begun, it has changed nothing.
Status Aborter::begin(Trainer& by, Why why, Map<uint64_t, StepRecord>* records, bool* begun) {
  const bool leaving = why == Why::kLeaving || why == Why::kLost;
  ControlLock lock(mu_);
  if (by.abort_notice.load() && why == Why::kCall) {
    lock.unlock();
    Lock call(by.call_mu);
    return tell(by);
  }
  // The rank has left: what it had submitted is complete, or undone.
  if (why == Why::kFailed && ranks_[by.rank].get() != &by) return FRUGAL_OK;
  // Another abort, or the trainer's closing, was first. Other ranks may have begun the step again,
  // and this call must not undo that.
  if (why == Why::kFailed) {
    // The others receive a notice in any case, since they may wait for this rank. They receive no
    // second one if its closing was first and left nothing that never completes.
    bool left = by.in_step || !by.closing.load();
    records_.each_device_work([&](const DeviceWorkRef& f) { left |= f->rank == by.rank; });
    if (!left) return FRUGAL_OK;
  } else if (!by.in_step && why != Why::kLost) {
    if (leaving) return FRUGAL_OK;
    return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
  }
  phase_.await(lock, Phase::kAbort);
  // A lack of memory must not undo a step that all ranks have ended: commit it first.
  Status lacking = FRUGAL_OK;
  while (committer_.stalled() && committer_.one(&lacking)) phase_.await(lock, Phase::kAbort);
  if (committer_.stalled() && lacking == FRUGAL_ERR_OUT_OF_MEMORY) return lacking;
  phase_.begin(Phase::kAbort);
  for (const TrainerRef& t : ranks_)
    if (t && t.get() != &by) {
      t->undo_pending.store(true);
      t->lost_peer.store(why == Why::kLost ? by.rank : kNoRank);
      t->abort_notice.fetch_add(1);
      if (auto* attached = t->process.notices.load()) attached->fetch_add(1);
      others_.push_back(t);
    }
  if (!leaving) by.undo_pending.store(true);
  workers_.await(lock, [&]() REQUIRES(control) { return records_.all_prepared(); });
  *records = records_.take();
  committer_.forget_stalled();
  workers_.progress();
  *begun = true;
  return FRUGAL_OK;
}

Status Aborter::undo(Trainer& by, Why why) {
  TraceSpan span(meters_.trace, SpanKind::kAbort);
  span.rank(by.rank);
  const bool leaving = why == Why::kLeaving || why == Why::kLost;
  Lock one(one_);
  struct Clear {
    Vector<TrainerRef>& of;
    ~Clear() { of.clear(); }
  } clear{others_};
  Map<uint64_t, StepRecord> records;
  bool begun = false;
  const Status s = begin(by, why, &records, &begun);
  if (!begun) return s;
  for (auto& [step, record] : records) record.undo();
  if (!leaving) await_undone(by);
  // Not after a device failure: until the rank is closed it may be writing its gradients.
  if (why != Why::kFailed) {
    Lock call(by.call_mu);
    by.lent.clear();
  }
  for (const TrainerRef& t : others_) await_undone(*t);
  if (leaving) {
    // No call of the rank runs or begins, but the engine may be closing.
    Lock call(by.call_mu);
    undo_part(by);
  }
  // No call from before the abort reads rows any more, and no rank is inside a step. So slots of
  // rows may go to other keys. A rank's list belongs to this thread until the rank may begin a
  // step.
  for (auto& [step, record] : records) undo_rows(record.created);
  undo_rows(by.created);
  for (const TrainerRef& t : others_) undo_rows(t->created);
  meters_.counters.steps_aborted.fetch_add(1, std::memory_order_relaxed);
  ControlLock lock(mu_);
  FRUGAL_ASSERT(records_.end() == 0);
  for (const TrainerRef& t : ranks_) FRUGAL_ASSERT(!t || (!t->in_step && !t->undo_pending));
  ranks_.undone();
  phase_.end(Phase::kAbort);
  return FRUGAL_OK;
}

Status Aborter::undo_surely(Trainer& by, Why why) {
  return retry_for_memory([&] { return undo(by, why); }, [this](int) { return !retries_.load(); });
}

}  // namespace frugal
