#include "engine/commit.h"

#include "arith/optimizer.h"
#include "base/assert.h"
#include "base/os.h"

namespace frugal {

Status Committer::ready() {
  Status status = FRUGAL_OK;
  ControlLock lock(mu_);
  // A committing thread checks again afterwards, so it misses no step that becomes complete
  // meanwhile.
  while (one(&status)) {
  }
  return status;
}

bool Committer::one(Status* status) {
  if (!phase_.may(Phase::kCommit) || workers_.health() != FRUGAL_OK) return false;
  const uint64_t step = ranks_.next_commit();
  bool begun = false;
  try {
    StepRecord* const record = records_.complete();
    if (!record) return false;  // with device work in flight, poll_device_work() calls again
    phase_.begin(Phase::kCommit);
    begun = true;
    commit(step, *record, status);
    if (workers_.health() == FRUGAL_OK && stalled_.exchange(false)) workers_.progress();
    return true;
  } catch (const std::bad_alloc&) {
    // Nothing is committed. The next thread that has time and memory continues from here.
    *status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to commit step %llu; call again",
                   static_cast<unsigned long long>(step));
    const bool news = !stalled_.exchange(true);
    // A commit that did not begin has changed nothing that a thread waits for.
    if (begun)
      phase_.end(Phase::kCommit);
    else if (news)
      workers_.progress();
    if (news) workers_.wake();  // once: waiting threads try again after a while
    return false;
  }
}

void Committer::commit(uint64_t step, StepRecord& record, Status* status) {
  TraceSpan span(meters_.trace, SpanKind::kCommit);
  span.step(step);
  for (auto& [raw, of] : record.rank_gradients)
    for (const RankGradients& h : of.ranks) span.more(h.rows());
  const auto prepared = [&] { return record.all_prepared(); };
  while (!prepared()) {
    bool helped;
    {
      ControlFree meanwhile(mu_);
      helped = flusher_.write(UINT64_MAX);
    }
    if (!helped) workers_.await(mu_, prepared);
  }
  auto give_up = [&]() REQUIRES(control) {
    *status = workers_.health();
    phase_.end(Phase::kCommit);
  };
  if (workers_.health() != FRUGAL_OK) return give_up();
  if (record.commits.empty()) begin(record);
  const bool alone = record.small && !record.deferred;
  {
    ControlFree meanwhile(mu_);
    memory_.end_step();  // of earlier steps
    Lock lock_refresh(refresh_mu_);
    // First everything that needs memory: after a failure a later call continues from there.
    for (Commit& c : record.commits) {
      const Status s = reserve_memory(step, record, &c);
      if (s == FRUGAL_OK) continue;
      if (s == FRUGAL_ERR_OUT_OF_MEMORY) throw std::bad_alloc();
      workers_.fail(s);
      meanwhile.again();
      return give_up();
    }
    const Vector<Declarations::Held> served = declarations_.begin_retiring(step);
    // From here on a process that reads the tables out sees the step as committed. No row of it is
    // written before.
    if (tables_.ledger) tables_.ledger->commit(step);
    for (Commit& c : record.commits) publish(step, record, c);
    for (const CreatedRows& c : record.created) c.commit(step);
    for (const Declarations::Held& h : served) h.part->release_hold(h.table->rows);
    meanwhile.again();
    ranks_.commit(step);
    // Windows opened meanwhile, also those of new tables, began at this step.
    tables_.each_window([&](Window& w) {
      if (w.next_commit() <= step) w.commit(nullptr, step);
    });
    meters_.counters.steps_committed.fetch_add(1, std::memory_order_relaxed);
    (record.deferred ? meters_.counters.modes_deferred : meters_.counters.modes_at_once)
        .fetch_add(1, std::memory_order_relaxed);
    uint64_t created = 0;
    for (const CreatedRows& c : record.created) created += c.slots.size();
    meters_.counters.rows_created.fetch_add(created, std::memory_order_relaxed);
    // Declarations for steps up to this one have served.
    declarations_.retire(step);
    for (const TableRef& t : tables_) declarations_.recount_unknown(*t);
    BlobsRef blobs = std::move(record.blobs);
    records_.erase(step);
    checkpoints_.committed(step, &blobs);
  }
  const bool may_rest = tables_.ledger && !memory_.pinner->any();
  if (pacing_.committed(may_rest, [&] { return measured(); })) workers_.wake();
  phase_.end(Phase::kCommit);
  // After a small step the workers have nothing to do, unless declarations can be linked now.
  if (alone && !pacing_.deferred() && !ranks_.caches_exist()) return;
  workers_.wake();
}

// Decides once how the step is committed.
void Committer::begin(StepRecord& record) {
  FRUGAL_ASSERT(record.device_work.empty());
  const bool any_pending = tables_.any_pending();
  Vector<Commit> commits(tables_.size());
  for (size_t i = 0; i < commits.size(); ++i) commits[i].table = tables_[i];
  record.commits = std::move(commits);
  const Pacing::How how = pacing_.begin(record.row_bytes(), any_pending);
  record.deferred = how.deferred;
  record.small = how.small;
  record.prepare_scheduled = false;
}

// Makes the update from the rank gradients. If they are exactly what was declared, they go into the
// update that was prepared ahead.
void Committer::take(uint64_t step, StepRecord& record, Commit* commit) {
  Table& table = *commit->table;
  UpdateRef& update = commit->update;
  auto h = record.rank_gradients.find(&table);
  const bool pushed = h != record.rank_gradients.end() && !record.skip;
  Vector<RankGradients>* ranks = pushed ? &h->second.in_order() : nullptr;
  const bool any = ranks && !ranks->empty();
  auto found = record.prepared.find(&table);
  bool prepared = false;
  if (found != record.prepared.end()) {
    // Did the ranks push exactly what they had declared?
    update = found->second.update;
    prepared = record.deferred && any && ranks->size() == update->ranks.size();
    for (size_t r = 0; prepared && r < ranks->size(); ++r)
      prepared = (*ranks)[r].whole && (*ranks)[r].part == update->ranks[r].part;
  }
  // Allocate before anything changes.
  UpdateRef made;
  if (any && !prepared) made = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
  if (prepared) {
    // All but the part: it is the same, and another thread may be reading it.
    for (size_t r = 0; r < ranks->size(); ++r) {
      RankGradients &to = update->ranks[r], &from = (*ranks)[r];
      to.whole = from.whole;
      to.sums = std::move(from.sums);
      to.stride = from.stride;
      to.lent = std::move(from.lent);
      to.source = from.source;
    }
    commit->added = commit->prepared = true;
  } else if (update) {
    table.window.withdraw(update);
    if (record.deferred && !record.skip) table.predict_pause = 16;
  } else if (table.predict_pause) {
    --table.predict_pause;
  }
  if (found != record.prepared.end()) record.prepared.erase(found);
  if (!prepared) update = std::move(made);
  commit->taken = true;
  if (!update) return;
  if (!prepared) {
    update->step = step;
    update->ranks = std::move(*ranks);
  }
  for (const RankGradients& of : update->ranks) update->bytes += of.bytes();
  pacing_.add(update.get());
}

// Reserves all memory that a commit needs for one table. After a failure, the next call continues.
Status Committer::reserve_memory(uint64_t step, StepRecord& record, Commit* commit) {
  if (!commit->taken) take(step, record, commit);
  UpdateRef& update = commit->update;
  if (!update) return FRUGAL_OK;
  Table& table = *commit->table;
  if (!commit->held) Flusher::hold(table, *update);
  commit->held = true;
  table.has_state.store(true);
  {
    ControlLock lock(mu_);
    update->scalars = arith::step_scalars(table.optimizer_at(step), step, ranks_.size(),
                                          table.config.nan_policy, table.rows.layout().dim);
    ranks_.expect_backlog(record.commits.size());
  }
  Vector<uint64_t> bounds;
  if (record.deferred) {
    if (!commit->prepared) {
      FRUGAL_TRY(tables_.open_window(table));
      prepare(commit);
    }
    table.window.make_room(*update);
  } else {
    if (!commit->job.empty()) return FRUGAL_OK;
    update->cut(kChunkRows, &bounds);
  }
  if (table.ledger && !update->record)
    FRUGAL_TRY(table.ledger->add(*update, record.deferred ? nullptr : &bounds, &update->record));
  if (!record.deferred)
    commit->job.push_back(flusher_.job(commit->table, update, std::move(bounds)));
  return FRUGAL_OK;
}

// Prepares an update that was not prepared ahead, or that differs from the prepared one.
void Committer::prepare(Commit* commit) {
  Timed timed(meters_.counters.entry_ns);
  const UpdateRef& update = commit->update;
  Window& window = commit->table->window;
  bool declared = true;
  {
    ControlLock lock(mu_);
    for (const RankGradients& h : update->ranks) declared &= h.whole && h.part->linked;
  }
  try {
    update->make_list();
    window.add(update);
    commit->added = true;
    window.prepare(*update, declared, SIZE_MAX, Window::Urgency::kUrgent);
  } catch (const std::bad_alloc&) {
    window.withdraw(update);
    commit->added = false;
    throw;
  }
  commit->prepared = true;
}

void Committer::publish(uint64_t step, const StepRecord& record, Commit& commit) {
  Window& window = commit.table->window;
  FRUGAL_ASSERT(commit.taken && (!commit.update || commit.held));
  FRUGAL_ASSERT(!commit.update || (record.deferred ? commit.prepared : commit.job.size() == 1));
  if (commit.update) ranks_.add_backlog(commit.update, commit.table);
  Timed timed(meters_.counters.entry_ns, commit.prepared);
  if (window.opened()) window.commit(commit.prepared ? commit.update.get() : nullptr, step);
  if (commit.job.empty()) return;
  record.small ? workers_.run_alone(commit.job.front()) : workers_.publish(std::move(commit.job));
}

Pacing::Measured Committer::measured() const {
  Pacing::Measured m;
  m.wall = now_ns();
  m.cpu = process_cpu_ns();
  const Counters& c = meters_.counters;
  m.apply = c.apply_ns.load();
  m.calls = meters_.of_ranks.sum(&RankCounters::lookup_ns) +
            meters_.of_ranks.sum(&RankCounters::push_ns) + c.step_begin_ns.load() +
            c.step_end_ns.load() + c.prefetch_ns.load();
  return m;
}

}  // namespace frugal
