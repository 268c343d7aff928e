// Trainers in other processes: they gather rows and sum gradients for themselves, from what lies in shared
// memory. What they need of the engine beside the calls that all trainers make.
#include <cstring>

#include "base/fpenv.h"
#include "base/handles.h"
#include "engine/access_scope.h"
#include "engine/wait.h"

namespace frugal {

uint64_t Engine::place(const void* p) const { return p && arena_.holds(p) ? arena_.offset(p) : kNoPlace; }

Status Engine::keep_ledger() {
  if (ledger_) return FRUGAL_OK;
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  std::shared_ptr<Ledger> ledger;
  std::lock_guard<std::mutex> lock(mu_);
  if (ledger_) return FRUGAL_OK;
  FRUGAL_TRY(Ledger::open(pool_, arena_, committed_, &ledger));
  for (const TableRef& t : tables_) FRUGAL_TRY(ledger->add_table(t->handle, t->rows, &t->ledger));
  ledger_ = std::move(ledger);
  return FRUGAL_OK;
}

// The parts of the step that the rank is inside of.
Status Engine::declared_parts(Trainer& t, Vector<RemotePart>* out) {
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  std::lock_guard<std::mutex> lock(mu_);
  auto at = batches_.find(t.step);
  if (!t.in_step || at == batches_.end()) return FRUGAL_OK;
  for (const BatchRef& b : at->second) {
    if (b->rank != t.rank) continue;
    for (size_t i = 0; i < b->parts.size(); ++i) {
      RemotePart p;
      p.batch = b->handle;
      p.index = static_cast<uint32_t>(i);
      p.table = b->tables[i];
      p.part = b->parts[i];
      p.whole = p.part->resolved();
      if (p.whole) p.fresh = describe_lines(t, &p);
      out->push_back(std::move(p));
    }
  }
  return FRUGAL_OK;
}

// Where the trainer's cache has rows of a part. Returns whether the gate has seen to all others.
bool Engine::describe_lines(Trainer& t, RemotePart* p) {
  TrainerTable* of = t.has_cache.load() ? cache_in(t, *p->table) : nullptr;
  if (!of || !of->cache()) return true;
  p->cached = true;
  if (!p->part->lines) return p->part->distinct == 0;
  p->line_values = of->cache()->values(0);
  return true;
}

// Keys that were not declared, or not as they are used: resolved, created, and their rows up to date.
Status Engine::access_rows(Trainer& t, const frugal_op* ops, size_t n, Vector<RemotePart>* out) {
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FpEnvironment fp;
  FRUGAL_TRY(inside(t));
  return with_room(ops, n, [&]() -> Status {
    Vector<Access> accesses(n);
    for (size_t i = 0; i < n; ++i)
      FRUGAL_TRY(find_access(t, ops[i], Use::kLookup, nullptr, &accesses[i]));
    {
      AccessScope scope(*this, accesses);
      for (size_t i = 0; i < n; ++i) FRUGAL_TRY(resolve_access(t, ops[i], &accesses[i], true));
      create_rows(t, accesses);
    }
    Vector<RemotePart> parts(n);
    for (size_t i = 0; i < n; ++i) {
      FRUGAL_TRY(fresh_access(t, accesses[i]));
      parts[i].table = accesses[i].table;
      parts[i].part = accesses[i].part;
      parts[i].whole = accesses[i].whole;
      parts[i].fresh = true;
      if (accesses[i].whole) describe_lines(t, &parts[i]);
    }
    if (t.abort_notice.load()) return aborted(t);
    out->swap(parts);
    return FRUGAL_OK;
  });
}

// Rows of declared parts that the trainer has looked up or pushed gradients of.
Status Engine::use_parts(Trainer& t, const Vector<RemotePart>& used) {
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(check());
  // What has undone the step is told by a call of the trainer's own.
  if (t.closing.load() || t.abort_notice.load()) return FRUGAL_OK;
  FRUGAL_TRY(inside(t));
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
  AccessScope scope(*this, accesses);
  create_rows(t, accesses);
}

// The same on behalf of somebody else, who wants to know which rows exist. What the trainer is to be told of
// stays for itself.
void Engine::use_marked(Trainer& t, const Vector<RemotePart>& used) {
  auto inside = [&] {
    std::lock_guard<std::mutex> lock(mu_);
    return t.in_step;
  };
  if (!inside()) return;  // nor is a call of its waited for that waits for other ranks
  std::lock_guard<std::mutex> call(t.call_mu);
  if (inside() && !t.closing.load() && !t.abort_notice.load() && !closed_.load() && health() == FRUGAL_OK)
    create_used(t, used);
}

// Rows that the other ranks have made before this rank's call: those of processes may not be told of yet.
void Engine::tell_used(const Trainer& by) {
  Vector<TrainerRef> others;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const TrainerRef& t : ranks_)
      if (t && t.get() != &by && t->heard.load()) others.push_back(t);
  }
  for (const TrainerRef& t : others) {
    std::lock_guard<std::mutex> lock(t->elsewhere_mu);
    if (t->elsewhere) t->elsewhere->tell();
  }
}

// What the trainer has summed in this step, in place of all that it handed over before.
Status Engine::hand_over(Trainer& t, Vector<RemotePush>* pushes) {
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FRUGAL_TRY(inside(t));
  Map<const Table*, PushState> states;
  // Kernels that bring lines of caches up to date see pinned memory only.
  const bool for_kernels = pinner_->any() && caches_exist();
  for (RemotePush& p : *pushes) {
    if (for_kernels && p.sums) {
      Buffer seen;
      const size_t bytes = p.part->distinct * p.table->rows.layout().value_stride * sizeof(float);
      FRUGAL_TRY(pinned_.get(bytes, &seen));
      std::memcpy(seen.data(), p.sums.data(), bytes);
      p.sums = std::move(seen);
    }
    PushState& s = states[p.table.get()];
    s.table = p.table;
    s.first.rank = t.rank;
    s.first.part = std::move(p.part);
    s.first.whole = p.whole;
    s.first.stride = p.table->rows.layout().value_stride;
    s.first.sums = std::move(p.sums);
  }
  t.pushes.swap(states);
  pushed_.store(t.step + 1, std::memory_order_relaxed);
  return FRUGAL_OK;
}

// OK where the trainer is inside a step that nobody has undone.
Status Engine::inside_step(Trainer& t) {
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  return inside(t);
}

// The device of a trainer in another process has failed: what it has not ended is undone on all ranks, and the
// others wait for it to be closed.
Status Engine::remote_failed(Trainer& t) {
  return t.reaped.exchange(true) ? FRUGAL_OK : undo(t, Undo::kFailed);
}

void Engine::count_remote(const RemoteCounts& c) {
  counters_.keys_looked_up.fetch_add(c.keys_looked_up, std::memory_order_relaxed);
  counters_.keys_pushed.fetch_add(c.keys_pushed, std::memory_order_relaxed);
  counters_.cache_hits.fetch_add(c.cache_hits, std::memory_order_relaxed);
  counters_.cache_misses.fetch_add(c.cache_misses, std::memory_order_relaxed);
  counters_.lookup_ns.fetch_add(c.lookup_ns, std::memory_order_relaxed);
  counters_.push_ns.fetch_add(c.push_ns, std::memory_order_relaxed);
  counters_.prefetch_ns.fetch_add(c.prefetch_ns, std::memory_order_relaxed);
  counters_.step_begin_ns.fetch_add(c.step_begin_ns, std::memory_order_relaxed);
  counters_.step_end_ns.fetch_add(c.step_end_ns, std::memory_order_relaxed);
  remote_cpu_ns_.fetch_add(c.cpu_ns, std::memory_order_relaxed);
}

// The process of a trainer is gone. Every uncommitted step is undone; nobody goes on before somebody else
// has joined with its rank.
Status Engine::lose_trainer(const TrainerRef& t) try {
  t->closing.store(true);
  progress();
  {
    std::lock_guard<std::mutex> call(t->call_mu);  // a call of its that waits ends
    std::lock_guard<std::mutex> lock(mu_);
    if (closed_.load() || ranks_[t->rank] != t) return FRUGAL_OK;
    lost_[t->rank] = 1;
  }
  FRUGAL_TRY(undo(*t, Undo::kLost));
  return close_trainer(t);
} catch (const std::bad_alloc&) {
  fail_background(FRUGAL_ERR_OUT_OF_MEMORY);
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to take rank %u out of the engine", t->rank);
}

void Engine::on_silent(std::function<void(const TrainerRef&)> silent) {
  std::lock_guard<std::mutex> lock(mu_);
  silent_ = std::move(silent);
}

// Ranks for which gates have waited as long as a call waits, and whose processes do not say anything: as
// good as dead. Threads of this process are never taken for that.
void Engine::find_silent() {
  if (config_.timeout_ms < 0) return;
  // A little less: who waits for the whole time-out began a moment before the gate was looked at.
  const uint64_t ms = static_cast<uint64_t>(config_.timeout_ms), limit = (ms - std::min<uint64_t>(ms / 8, 100)) * 1000000;
  bool found = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const uint64_t step = to_commit(), now = now_ns();
    if (!silent_ || first_step_ == kNoStep || awaited_step_ != step || now - awaited_since_ < limit) return;
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      const TrainerRef& t = ranks_[r];
      if (!t || lost_[r] || t->closing.load() || !late(*t, step)) continue;
      const uint64_t heard = t->heard.load();
      if (heard == 0 || now < heard || now - heard < limit) continue;
      // Inside a call it is the engine that takes its time.
      if (!t->call_mu.try_lock()) continue;
      t->call_mu.unlock();
      silent_(t);
      lost_[r] = 1;
      t->lost_peer.store(r);  // what its own calls answer
      t->closing.store(true);
      found = true;
    }
  }
  if (found) progress();
}

// The first rank that is to be replaced; kNoRank if there is none. With mu_ held.
uint32_t Engine::lost_rank() const {
  for (uint32_t r = 0; r < lost_.size(); ++r)
    if (lost_[r]) return r;
  return kNoRank;
}

}  // namespace frugal
