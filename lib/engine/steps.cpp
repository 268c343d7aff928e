// The step protocol: begin, end, abort.
#include <algorithm>
#include <cstring>

#include "arith/fold.h"
#include "base/insist.h"
#include "device/pointers.h"
#include "engine/wait.h"

namespace frugal {

// --- Entering a call of a trainer ----------------------------------------------------------------

// Called with call_mu held, first thing in every call of the step protocol.
Status Engine::enter(Trainer& t, bool tells) {
  FRUGAL_TRY(check());
  if (t.closing.load() && t.lost_peer.load() == t.rank)
    return fail(FRUGAL_ERR_PEER_LOST,
                "rank %u did not answer while others waited for it, and has lost its place: close "
                "it and join again", t.rank);
  if (t.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (t.gpu && t.gpu->sticky()) {
    device_failed(t.rank, *t.gpu);
    return t.gpu->ready();
  }
  if (tells && t.abort_notice.load()) return aborted(t);
  return FRUGAL_OK;
}

Status Engine::aborted(Trainer& t) {
  if (t.undo_pending.load()) undo_local(t);
  String again;
  {
    std::lock_guard<std::mutex> lock(mu_);
    again = ranks_.step_again();
    t.abort_notice.fetch_sub(1);
  }
  if (t.heard.load()) t.heard.store(now_ns());  // it has the whole time-out to begin the step again
  t.lent.clear();  // not before: until it is told, a rank may be writing its gradients
  const uint32_t lost = t.lost_peer.load();
  if (t.closing.load() && lost != t.rank) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (lost != kNoRank)
    return fail(FRUGAL_ERR_PEER_LOST,
                "the process of rank %u is gone or does not answer: the step is undone on all ranks; begin %s, which "
                "waits until somebody has joined as that rank",
                lost, again.c_str());
  return fail(FRUGAL_ERR_STEP_ABORTED, "another rank aborted the step: it is undone on all ranks; begin %s",
              again.c_str());
}

// --- Beginning a step ----------------------------------------------------------------------------

Status Engine::step_begin(AnyTrainer& any, uint64_t step, Deadline deadline) {
  Trainer& t = own(any);
  Timed timed(counters_.step_begin_ns);
  TraceSpan span(trace_, SpanKind::kStepBegin);
  span.step(step).rank(t.rank);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  if (t.gpu)
    FRUGAL_TRY(t.gpu->ready());
  else
    device::look_for_devices();
  FRUGAL_TRY(check_step(step));
  {
    std::lock_guard<std::mutex> lock(mu_);
    FRUGAL_TRY(ranks_.may_begin(t, step));
    if (ranks_.to_commit() == kNoStep) {
      ranks_.start(step);
      tables_.each_window([&](Window& w) { w.set_base(step); });
    }
    if (ranks_.others_behind(t, step)) counters_.ranks_apart.fetch_add(1, std::memory_order_relaxed);
  }
  if (t.gpu) FRUGAL_TRY(await_pins(t, deadline));
  if (t.has_cache.load()) end_planning(t);
  for (;;) {
    bool again = false;
    Status s = gate(&t, step, deadline);
    if (s == FRUGAL_ERR_STEP_ABORTED) return aborted(t);
    if (s != FRUGAL_OK) return s;
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!t.abort_notice.load() && !t.closing.load() && !closed_.load() && health() == FRUGAL_OK &&
          phase_.may(Phase::kStep)) {
        // None is declared for it any more, and what is stays as the gate has found it.
        t.parts.clear();
        t.next_part = 0;
        {
          Lock declared(declarations_.mutex());
          declarations_.each({step, step, t.rank}, [&](const Batch& b, size_t i) {
            StepPart p;
            p.batch = b.id;
            p.index = static_cast<uint32_t>(i);
            p.table = b.tables[i];
            p.part = b.parts[i];
            p.whole = p.fresh = p.part->resolved();
            t.parts.push_back(std::move(p));
          });
        }
        ranks_.begin(t, step);
        if (t.boundaries_done == t.boundaries) break;
        again = true;
      }
    }
    // Lines in another process are not what the index says: rows are read in host memory, where the gate has not
    // seen to those.
    if (again) {
      FRUGAL_TRY(give_up_lines(t));
      continue;
    }
    // A gate that is open at once asks neither after the trainer nor after the engine: who closes
    // one of them waits for this call.
    FRUGAL_TRY(enter(t));
  }
  if (t.cache_bytes || t.cache_ratio > 0) {
    Status s;
    try {
      s = turn_caches(t, step);
    } catch (const std::bad_alloc&) {
      s = fail(FRUGAL_ERR_OUT_OF_MEMORY,
               "no memory to bring the cache of rank %u up to date; call again", t.rank);
    }
    if (s != FRUGAL_OK) {
      // A cache that there is no memory for is empty, and the step does without: updates may be lost to it.
      for (auto& [raw, of] : t.caches) forget_lines(of);
      forget_places(t, step);
      if (t.gpu) t.gpu->take_flight();  // waits until the device has done with what it has taken
      t.boundary = {};
      std::lock_guard<std::mutex> lock(mu_);
      t.backlog.clear();
      t.backlog_tables.clear();
      if (t.gpu || t.lines_elsewhere) {
        ranks_.begin_again(t);
        return s;
      }
    }
  }
  if (t.has_cache.load()) begin_planning(t, step);
  if (pacing_.deferred() && config_.flush_threads) {
    bool schedule = false;
    try {
      std::lock_guard<std::mutex> lock(mu_);
      // After an abort, of which this rank is not told yet, all begin the step again: it may be
      // declared for meanwhile, and what is staged must have passed the gates.
      if (step == ranks_.to_commit() && !phase_.is(Phase::kAbort) && !t.abort_notice.load()) {
        schedule = ranks_.all_begun(step);
        if (schedule) records_.of(step).prepare_scheduled = true;
      }
    } catch (const std::bad_alloc&) {
      schedule = false;  // staging is a favour
    }
    if (schedule) workers_.wake();
  }
  return FRUGAL_OK;
}

// --- Ending a step -------------------------------------------------------------------------------

Status Engine::step_end(AnyTrainer& any, uint64_t step, uint32_t flags) {
  Trainer& t = own(any);
  Timed timed(counters_.step_end_ns);
  TraceSpan span(trace_, SpanKind::kStepEnd);
  span.step(step).rank(t.rank);
  FlightRef landed;  // ends when no lock is held
  {
    std::unique_lock<std::mutex> call(t.call_mu);
    FRUGAL_TRY(enter(t));
    if (flags & ~FRUGAL_STEP_SKIP)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x in step_end: give 0 or FRUGAL_STEP_SKIP", flags);
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (!t.in_step) return ranks_.not_inside(t);
      if (t.step != step)
        return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu, not %llu: end that",
                    t.rank, static_cast<unsigned long long>(t.step),
                    static_cast<unsigned long long>(step));
    }
    struct Ready {
      PushState* push;
      Handover joined;
      StepRecord::TableHandovers* to;
    };
    Flight::Found found = Flight::Found::kNothing;
    if (t.gpu) FRUGAL_TRY(end_flight(t, &found));
    if (found != Flight::Found::kNothing) {
      call.unlock();
      FRUGAL_TRY(undo(t, Undo::kCall));
      return found_in_step(found, step);
    }
    Vector<Ready> handovers;
    for (auto& [raw, push] : t.pushes) {
      if (push.table->dropped.load()) continue;
      Ready r{&push, {}, nullptr};
      if (!push.tail.empty()) FRUGAL_TRY(join_pushes(push, push.table->dim, t.rank, memory_.pool, memory_.sums(), &r.joined));
      Handover& h = push.tail.empty() ? push.first : r.joined;
      if (h.rows()) handovers.push_back(std::move(r));
    }
    bool taken = false;
    {
      std::lock_guard<std::mutex> lock(mu_);
      // Who closes the engine has taken the records away already.
      if (closed_.load()) return engine_closed();
      if (!t.abort_notice.load()) {
        // First all that may want memory; then the hand-over, which cannot fail.
        StepRecord& record = records_.of(step);
        for (Ready& r : handovers) {
          const TableRef table = std::static_pointer_cast<Table>(r.push->table);
          r.to = &record.handovers[table.get()];
          r.to->table = table;
          r.to->ranks.reserve(r.to->ranks.size() + 1);
        }
        record.created.reserve(record.created.size() + t.created.size());
        if (t.gpu) {
          record.flights.reserve(record.flights.size() + 1);
          if (Flight* f = t.gpu->current_flight()) f->pinned.reserve(f->pinned.size() + t.pushes.size());
        }
        for (Ready& r : handovers) r.to->add(std::move(r.push->tail.empty() ? r.push->first : r.joined));
        for (CreatedRows& c : t.created) record.created.push_back(std::move(c));
        if (flags & FRUGAL_STEP_SKIP) record.skip = true;
        if (t.gpu) landed = t.gpu->take_flight();
        if (landed && !landed->landed.load()) {
          // Sums of runs are of no use any more, but kernels may still be writing them.
          for (auto& [raw, push] : t.pushes)
            if (push.runs) landed->pinned.push_back(std::move(push.runs));
          records_.fly(&record, std::move(landed));
        }
        t.in_step = false;
        t.parts.clear();
        t.pushes.clear();
        t.created.clear();
        t.lent.clear();
        taken = true;
      }
    }
    // An abort that comes after the hand-over is for the next call to tell: this step may have been
    // committed before it.
    if (!taken) return aborted(t);
  }
  if (records_.flying()) workers_.wake();  // one of them looks when it has landed
  // The rank has ended the step. A commit that there is no memory for is owed: who waits, or has memory, makes it.
  const Status s = committer_.ready();
  return s == FRUGAL_ERR_OUT_OF_MEMORY && health() == FRUGAL_OK ? FRUGAL_OK : s;
}

// A call's hold of places of a table has ended; there may be a call that waits for them.
void Engine::end_holding(Table& table) {
  --table.calls;
  declarations_.recount_unsure(table);
  if (table.tight.load()) workers_.progress();
}

// --- Abort ---------------------------------------------------------------------------------------

Status Engine::abort_call(AnyTrainer& any) {
  Trainer& t = own(any);
  {
    std::lock_guard<std::mutex> call(t.call_mu);
    FRUGAL_TRY(enter(t));
    std::lock_guard<std::mutex> lock(mu_);
    if (!t.in_step) return ranks_.not_inside(t);
  }
  return undo(t, Undo::kCall);
}

// Undoes this rank's part of uncommitted steps, but for its created rows, which the abort takes back when
// nobody reads them any more. With call_mu held.
void Engine::undo_local(Trainer& t) {
  if (t.gpu) t.gpu->take_flight();  // waits until the device has done with it
  t.parts.clear();
  t.pushes.clear();
  {
    std::lock_guard<std::mutex> lock(mu_);
    ranks_.undo(t);
  }
  t.undo_pending.store(false);
}

// Rows that a step created exist no longer; their places stay theirs while somebody holds them.
void Engine::undo_rows(Vector<CreatedRows>& created) {
  for (const CreatedRows& c : created) c.undo();
  for (const CreatedRows& c : created) declarations_.recount_unsure(*c.table);
  created.clear();
}

// Undoes every uncommitted step. A trainer that is inside a call undoes its own part when the call
// notices; the others' parts are undone here. Nobody begins a step before all is done. Takes no
// memory, but for a commit that comes first: without that it has done nothing.
Status Engine::undo(Trainer& by, Undo why) {
  TraceSpan span(trace_, SpanKind::kAbort);
  span.rank(by.rank);
  const bool leaving = why == Undo::kLeaving || why == Undo::kLost;
  std::lock_guard<std::mutex> one(abort_mu_);
  Vector<TrainerRef>& others = undone_;  // has room: nothing here wants memory
  struct Clear {
    Vector<TrainerRef>& of;
    ~Clear() { of.clear(); }
  } clear{others};
  Map<uint64_t, StepRecord> records;
  {
    std::unique_lock<std::mutex> lock(mu_);
    if (by.abort_notice.load() && why == Undo::kCall) {
      lock.unlock();
      std::lock_guard<std::mutex> call(by.call_mu);
      return aborted(by);
    }
    // What a rank that has left had ended is whole, or undone.
    if (why == Undo::kFailed && ranks_[by.rank].get() != &by) return FRUGAL_OK;
    // Another abort, or the trainer's closing, was first: others may have begun the step again, and
    // that is not to be undone.
    if (why == Undo::kFailed) {
      // The others are told in any case, for they may be waiting for this rank; but not twice, if its
      // closing was first and has left nothing that will never be complete.
      bool left = by.in_step || !by.closing.load();
      records_.each_flight([&](const FlightRef& f) { left |= f->rank == by.rank; });
      if (!left) return FRUGAL_OK;
    } else if (!by.in_step && why != Undo::kLost) {
      if (leaving) return FRUGAL_OK;
      return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
    }
    auto may_abort = [&] { return phase_.may(Phase::kAbort); };
    workers_.settle(lock, may_abort);
    // A step that all ranks have ended is not undone for want of memory.
    Status lacking = FRUGAL_OK;
    while (committer_.owed() && committer_.one(lock, &lacking)) workers_.settle(lock, may_abort);
    if (committer_.owed() && lacking == FRUGAL_ERR_OUT_OF_MEMORY) return lacking;
    phase_.begin(Phase::kAbort);
    for (const TrainerRef& t : ranks_)
      if (t && t.get() != &by) {
        t->undo_pending.store(true);
        t->lost_peer.store(why == Undo::kLost ? by.rank : kNoRank);
        t->abort_notice.fetch_add(1);
        if (auto* elsewhere = t->told_elsewhere.load()) elsewhere->fetch_add(1);
        others.push_back(t);
      }
    if (!leaving) by.undo_pending.store(true);
    workers_.settle(lock, [&] { return records_.staged(); });
    records = records_.take();
    committer_.forget_owed();
    workers_.progress();
  }
  for (auto& [step, record] : records) record.undo();
  auto undo_part = [&](Trainer& t) {
    while (t.undo_pending.load()) {
      if (t.call_mu.try_lock()) {
        if (t.undo_pending.load()) undo_local(t);
        t.call_mu.unlock();
        break;
      }
      // Inside a call, which will notice.
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  };
  if (!leaving) undo_part(by);
  // Of a rank whose device has failed not before it is closed: it may be writing its gradients.
  if (why != Undo::kFailed) {
    std::lock_guard<std::mutex> call(by.call_mu);
    by.lent.clear();
  }
  for (const TrainerRef& t : others) undo_part(*t);
  if (leaving) {
    // No call of its is under way or gets in, but the engine may be being closed.
    std::lock_guard<std::mutex> call(by.call_mu);
    undo_local(by);
  }
  // No call that began before the abort reads rows any more, and nobody is inside a step: places of rows
  // may become others'. A rank's list is ours until it may begin a step again.
  for (auto& [step, record] : records) undo_rows(record.created);
  undo_rows(by.created);
  for (const TrainerRef& t : others) undo_rows(t->created);
  {
    std::lock_guard<std::mutex> lock(mu_);
    phase_.end(Phase::kAbort);
    ranks_.undone();
  }
  counters_.steps_aborted.fetch_add(1, std::memory_order_relaxed);
  workers_.progress();
  return FRUGAL_OK;
}

// The same for whoever could not be told that there was no memory: until there is, or the engine is
// closed.
Status Engine::undo_surely(Trainer& by, Undo why) {
  return insist([&] { return undo(by, why); }, [this](int) { return !insists_.load(); });
}

}  // namespace frugal
