// The step protocol: begin, end, commit, abort.
#include <algorithm>
#include <optional>
#include <cstring>

#include "arith/fold.h"
#include "base/handles.h"
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
        if (schedule) records_[step].prepare_scheduled = true;
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
        StepRecord& record = records_[step];
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
        for (Ready& r : handovers) {
          Vector<Handover>& ranks = r.to->ranks;
          auto at = std::find_if(ranks.begin(), ranks.end(),
                                 [&](const Handover& o) { return o.rank > t.rank; });
          ranks.insert(at, std::move(r.push->tail.empty() ? r.push->first : r.joined));
        }
        for (CreatedRows& c : t.created) record.created.push_back(std::move(c));
        if (flags & FRUGAL_STEP_SKIP) record.skip = true;
        if (t.gpu) landed = t.gpu->take_flight();
        if (landed && !landed->landed.load()) {
          // Sums of runs are of no use any more, but kernels may still be writing them.
          for (auto& [raw, push] : t.pushes)
            if (push.runs) landed->pinned.push_back(std::move(push.runs));
          record.flights.push_back(std::move(landed));
          flying_.fetch_add(1);
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
  if (flying_.load()) workers_.wake();  // one of them looks when it has landed
  // The rank has ended the step. A commit that there is no memory for is owed: who waits, or has memory, makes it.
  const Status s = commit_ready();
  return s == FRUGAL_ERR_OUT_OF_MEMORY && health() == FRUGAL_OK ? FRUGAL_OK : s;
}

// --- Commit --------------------------------------------------------------------------------------

Status Engine::commit_ready() {
  Status status = FRUGAL_OK;
  std::unique_lock<std::mutex> lock(mu_);
  // Whoever commits looks again afterwards, so a step that becomes ready meanwhile is not lost.
  if (phase_.is(Phase::kCommit)) return FRUGAL_OK;
  while (commit_one(lock, &status)) {
  }
  return status;
}

// A commit that there was no memory for is tried again.
Status Engine::commit_owed() { return owed_.load() ? commit_ready() : FRUGAL_OK; }

bool Engine::commit_one(std::unique_lock<std::mutex>& lock, Status* status) {
  const uint64_t step = ranks_.to_commit();
  if (step == kNoStep || phase_.is(Phase::kAbort) || closed_.load() || health() != FRUGAL_OK) return false;
  bool present;
  if (!ranks_.ended(step, &present)) return false;
  auto at = records_.find(step);
  // Ranks that ended the step and left count too: their record is there, and nobody aborted it. It may be
  // empty: later ones wait behind it, and rows may be staged for it.
  if (!present && at == records_.end()) return false;
  bool begun = false;
  try {
    if (at == records_.end()) at = records_.emplace(step, StepRecord{}).first;
    if (!at->second.flights.empty()) return false;  // land() comes back
    phase_.begin(Phase::kCommit);
    begun = true;
    commit_step(lock, step, at->second, status);
    if (health() == FRUGAL_OK && owed_.exchange(false)) workers_.progress();
    return true;
  } catch (const std::bad_alloc&) {
    // Nothing is committed: what there is of it is gone on from, by the next who has time and memory.
    *status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to commit step %llu; call again",
                   static_cast<unsigned long long>(step));
    if (!lock.owns_lock()) lock.lock();
    if (begun) phase_.end(Phase::kCommit);
    const bool news = !owed_.exchange(true);
    // What has not even begun has changed nothing for who waits.
    if (begun || news) workers_.progress();
    if (news) workers_.wake();  // once: they try again after a while
    return false;
  }
}

void Engine::commit_step(std::unique_lock<std::mutex>& lock, uint64_t step, StepRecord& record,
                         Status* status) {
  TraceSpan span(trace_, SpanKind::kCommit);
  span.step(step);
  for (auto& [raw, of] : record.handovers)
    for (const Handover& h : of.ranks) span.more(h.rows());
  auto prepared = [&] {
    for (auto& [raw, p] : record.prepared)
      if (!p.ready) return false;
    return true;
  };
  while (!prepared()) {
    lock.unlock();
    bool helped = flusher_.write(UINT64_MAX);
    lock.lock();
    if (!helped) workers_.settle(lock, prepared);
  }
  auto give_up = [&] {
    *status = health();
    phase_.end(Phase::kCommit);
    // Who waits for commits to end has no time-out, and nothing else may happen any more.
    workers_.progress();
  };
  if (health() != FRUGAL_OK) return give_up();
  if (record.commits.empty()) begin_commit(record);
  const bool alone = record.small && !record.deferred;
  lock.unlock();
  memory_.end_step();  // of the steps before
  {
    std::lock_guard<std::mutex> boundary(cache_mu_);
    // First all that may want memory: after a failure it goes on from there.
    for (Commit& c : record.commits) {
      const Status s = prepare_commit(step, record, &c);
      if (s == FRUGAL_OK) continue;
      if (s == FRUGAL_ERR_OUT_OF_MEMORY) throw std::bad_alloc();
      workers_.fail(s);
      lock.lock();
      return give_up();
    }
    const Vector<Declarations::Held> served = declarations_.begin_retiring(step);
    // From here on the step is committed for whoever reads the tables out, and before no row of it is written.
    if (ledger_) ledger_->commit(step);
    for (Commit& c : record.commits) publish_commit(step, record, c);
    settle_young(step, record);
    for (const Declarations::Held& h : served) h.part->let_go(h.table->rows);
    lock.lock();
    ranks_.commit(step);
    // Windows that were opened meanwhile, of new tables too, began at the step that has passed.
    tables_.each_window([&](Window& w) {
      if (w.base() <= step) w.commit(nullptr, step);
    });
    counters_.steps_committed.fetch_add(1, std::memory_order_relaxed);
    (record.deferred ? counters_.modes_deferred : counters_.modes_at_once)
        .fetch_add(1, std::memory_order_relaxed);
    uint64_t created = 0;
    for (const CreatedRows& c : record.created) created += c.slots.size();
    counters_.rows_created.fetch_add(created, std::memory_order_relaxed);
    retire(step);
    records_.erase(step);
  }
  pending_.committed();
  if (pacing_.committed(ledger_ && !memory_.pinner->any(), [&] { return measured(); })) workers_.wake();
  phase_.end(Phase::kCommit);
  workers_.progress();
  // Behind a small step there is nothing for them, unless declarations can be linked now.
  if (alone && !need_links()) return;
  workers_.wake();
}

// What it is to be of is decided once. With mu_ held.
void Engine::begin_commit(StepRecord& record) {
  const bool any_pending = tables_.any_pending();
  Vector<Commit> commits(tables_.size());
  for (size_t i = 0; i < commits.size(); ++i) commits[i].table = tables_[i];
  record.commits = std::move(commits);
  // Updates of a row go in step order: while older ones are pending, new ones queue behind them.
  record.deferred = pacing_.deferred() || any_pending;
  uint64_t bytes = 0;
  for (const auto& [raw, of] : record.handovers)
    for (const Handover& h : of.ranks) bytes += h.rows() * of.table->rows.layout().bytes();
  record.small = pacing_.small(bytes);
  pacing_.step(bytes);
  if (!pacing_.deferred() && any_pending) pending_.drain();
  record.prepare_scheduled = false;
}

// All that a commit needs memory for, of a table. After a failure it is called again, and goes on.
Status Engine::prepare_commit(uint64_t step, StepRecord& record, Commit* commit) {
  const TableRef& table = commit->table;
  Window& window = table->window;
  UpdateRef& update = commit->update;
  const bool deferred = record.deferred;
  if (!commit->taken) {
    auto h = record.handovers.find(table.get());
    Vector<Handover>* ranks = h == record.handovers.end() || record.skip ? nullptr : &h->second.ranks;
    const bool any = ranks && !ranks->empty();
    auto prepared = record.prepared.find(table.get());
    bool staged = false;
    if (prepared != record.prepared.end()) {
      // Was pushed exactly what was declared?
      update = prepared->second.update;
      staged = deferred && any && ranks->size() == update->ranks.size();
      for (size_t r = 0; staged && r < ranks->size(); ++r)
        staged = (*ranks)[r].whole && (*ranks)[r].part == update->ranks[r].part;
    }
    // Before anything changes.
    UpdateRef made;
    if (any && !staged) made = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
    if (staged) {
      // All but the part, which is the same and may be being read.
      for (size_t r = 0; r < ranks->size(); ++r) {
        Handover &to = update->ranks[r], &from = (*ranks)[r];
        to.whole = from.whole;
        to.sums = std::move(from.sums);
        to.stride = from.stride;
        to.lent = std::move(from.lent);
        to.source = from.source;
      }
      commit->added = commit->staged = true;
    } else if (update) {
      window.unstage(update);
      if (deferred && !record.skip) table->predict_pause = 16;
    } else if (table->predict_pause) {
      --table->predict_pause;
    }
    if (prepared != record.prepared.end()) record.prepared.erase(prepared);
    if (!staged) update = std::move(made);
    commit->taken = true;
    if (update) {
      if (!staged) {
        update->step = step;
        update->ranks = std::move(*ranks);
      }
      for (const Handover& of : update->ranks) update->bytes += of.bytes();
      pending_.add(update.get());
    }
  }
  if (!update) return FRUGAL_OK;
  table->has_state.store(true);
  {
    std::lock_guard<std::mutex> lock(mu_);
    update->scalars = arith::step_scalars(table->optimizer_at(step), step, config_.world_size,
                                          table->config.nan_policy, table->rows.layout().dim);
    ranks_.expect_backlog(record.commits.size());
  }
  Vector<uint64_t> bounds;
  if (!deferred) {
    if (!commit->job.empty()) return FRUGAL_OK;
    update->cut(kChunkRows, &bounds);
  } else if (!commit->staged) {
    FRUGAL_TRY(tables_.open_window(*table));
    Timed timed(counters_.entry_ns);
    bool declared = true;
    {
      std::lock_guard<std::mutex> lock(mu_);
      for (const Handover& h : update->ranks) declared &= h.whole && h.part->linked;
    }
    try {
      update->make_list();
      window.add(update);
      commit->added = true;
      window.stage(*update, declared, SIZE_MAX, Window::Urgency::kUrgent);
    } catch (const std::bad_alloc&) {
      window.unstage(update);
      commit->added = false;
      throw;
    }
    commit->staged = true;
  }
  if (deferred) window.make_room(*update);
  if (table->ledger && !update->record)
    FRUGAL_TRY(table->ledger->add(*update, deferred ? nullptr : &bounds, &update->record));
  if (deferred) return FRUGAL_OK;
  commit->job.push_back(flusher_.job(table, update, std::move(bounds)));
  return FRUGAL_OK;
}

void Engine::publish_commit(uint64_t step, const StepRecord& record, Commit& commit) {
  Window& window = commit.table->window;
  if (commit.update && ranks_.caches_exist()) {
    std::lock_guard<std::mutex> lock(mu_);
    ranks_.add_backlog(commit.update, commit.table);
  }
  Timed timed(counters_.entry_ns, commit.staged);
  if (window.opened()) window.commit(commit.staged ? commit.update.get() : nullptr, step);
  if (commit.job.empty()) return;
  record.small ? workers_.run_alone(commit.job.front()) : workers_.publish(std::move(commit.job));
}

// What the step has created is there for good.
void Engine::settle_young(uint64_t step, const StepRecord& record) {
  for (const CreatedRows& c : record.created)
    for (const Vector<uint32_t>* rows : {&c.slots, &c.earlier}) c.table->rows.settle(rows->data(), rows->size(), step);
}

// What was declared for steps up to `step` has served.
void Engine::retire(uint64_t step) {  // with mu_ held
  for (Vector<BatchRef> gone; declarations_.retire_one(step, &gone);)
    for (const BatchRef& b : gone)
      if (b->handle) handle_remove(HandleKind::kBatch, b->handle);
  declarations_.end_retiring();
  for (const TableRef& t : tables_) recount(*t);
}

// A call's hold of places of a table has ended; there may be a call that waits for them.
void Engine::end_holding(Table& table) {
  --table.calls;
  recount(table);
  if (table.tight.load()) workers_.progress();
}

// Rows have been undone or deleted, or somebody has done with finding some: who holds places?
void Engine::recount(Table& table) {
  if (!table.rows.unsure()) return;
  Lock declared(declarations_.mutex());
  declarations_.recount(table);
}

Pacing::Measured Engine::measured() const {
  Pacing::Measured m;
  m.wall = now_ns();
  m.cpu = process_cpu_ns() + remote_cpu_ns_.load(std::memory_order_relaxed);
  m.apply = counters_.apply_ns.load();
  m.calls = counters_.lookup_ns.load() + counters_.push_ns.load() + counters_.step_begin_ns.load() +
            counters_.step_end_ns.load() + counters_.prefetch_ns.load();
  return m;
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
  for (CreatedRows& c : created)
    for (const Vector<uint32_t>* rows : {&c.slots, &c.earlier}) c.table->rows.undo(rows->data(), rows->size());
  for (CreatedRows& c : created) recount(*c.table);
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
      for (auto& [step, record] : records_)
        for (const FlightRef& f : record.flights) left |= f->rank == by.rank;
      if (!left) return FRUGAL_OK;
    } else if (!by.in_step && why != Undo::kLost) {
      if (leaving) return FRUGAL_OK;
      return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
    }
    auto may_abort = [&] { return phase_.may(Phase::kAbort); };
    workers_.settle(lock, may_abort);
    // A step that all ranks have ended is not undone for want of memory.
    Status lacking = FRUGAL_OK;
    while (owed_.load() && commit_one(lock, &lacking)) workers_.settle(lock, may_abort);
    if (owed_.load() && lacking == FRUGAL_ERR_OUT_OF_MEMORY) return lacking;
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
    workers_.settle(lock, [&] {
      for (auto& [step, record] : records_)
        for (auto& [raw, p] : record.prepared)
          if (!p.ready) return false;
      return true;
    });
    records.swap(records_);
    owed_.store(false);
    for (auto& [step, record] : records)
      flying_.fetch_sub(static_cast<uint32_t>(record.flights.size()));
    workers_.progress();
  }
  for (auto& [step, record] : records) {
    for (auto& [raw, p] : record.prepared) p.table->window.unstage(p.update);
    for (Commit& c : record.commits)
      if (c.added) c.table->window.unstage(c.update);
    for (const FlightRef& f : record.flights)
      while (!f->ask(1000000)) {
      }
    record.flights.clear();
  }
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
