#include "engine/declarations.h"

#include "base/assert.h"
#include "base/handles.h"

namespace frugal {

void Declarations::count(Step& s, const Part& p, uint32_t by) {
  const uint32_t state = p.state.load();
  if (state == Part::kDeclared) {
    s.declared += by;
    declared_ += by;
  }
  if (state < Part::kResolved) s.unresolved += by;
  if (p.linking) s.linking += by;
  if (state != Part::kResolved || p.linked.load()) return;
  s.unlinked += by;
  if (!p.linking) s.linkable += by;
}

template <class Change>
void Declarations::change(Batch& b, size_t i, Change change) {
  Part& p = *b.parts[i];
  if (!b.entered) return change(p);
  Step& s = steps_.find(b.step)->second;
  count(s, p, -1u);
  change(p);
  count(s, p, 1);
}

void Declarations::set_state(Batch& b, size_t i, Part::State state) {
  change(b, i, [&](Part& p) { p.state.store(state); });
}

// --- Coming and going ----------------------------------------------------------------------------

Status Declarations::enter(const BatchRef& batch, bool want_handle,
                           std::shared_ptr<Arrival> arrival, bool* alone) {
  Lock lock(mu_);
  Step& s = steps_[batch->step];
  struct Empty {
    Steps& all;
    uint64_t step;
    ~Empty() {
      if (auto at = all.find(step); at->second.batches.empty()) all.erase(at);
    }
  } empty{steps_, batch->step};
  if (s.of_rank.size() <= batch->rank) s.of_rank.resize(batch->rank + 1);
  auto& [of_rank, former] = s.of_rank[batch->rank];
  const bool own = of_rank >= kMostBatches;
  if (own || of_rank + former >= 2 * kMostBatches)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "rank %u%s has declared %u batches for step %llu: at most %u; declare more keys in "
                "a call",
                batch->rank, own ? "" : ", its former trainers included,",
                own ? of_rank : of_rank + former, static_cast<unsigned long long>(batch->step),
                own ? kMostBatches : 2 * kMostBatches);
  if (s.batches.size() == s.batches.capacity()) s.batches.reserve(2 * s.batches.size() + 1);
  if (arrival && coming_.size() == coming_.capacity()) coming_.reserve(2 * coming_.size() + 1);
  if (want_handle) {
    batch->handle = handle_of<AnyBatch>(batch);
    if (!batch->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
    batch->id = batch->handle;
  }
  *alone = declared_ == 0;
  s.batches.push_back(batch);
  ++of_rank;
  batch->entered = batch->own = true;
  for (const PartRef& p : batch->parts) count(s, *p, 1);
  if (arrival) {
    coming_.push_back({std::move(arrival), batch});
    arriving_.fetch_add(1);
  }
  return FRUGAL_OK;
}

void Declarations::joined(uint32_t rank, uint64_t from) {
  Lock lock(mu_);
  for (auto at = steps_.lower_bound(from); at != steps_.end(); ++at) {
    Step& s = at->second;
    if (rank < s.of_rank.size())
      s.of_rank[rank] = {0, s.of_rank[rank].own + s.of_rank[rank].former};
    for (const BatchRef& b : s.batches)
      if (b->rank == rank) b->own = false;
  }
}

bool Declarations::range(uint64_t* first, uint64_t* last) {
  Lock lock(mu_);
  if (steps_.empty()) return false;
  *first = steps_.begin()->first;
  *last = steps_.rbegin()->first;
  return true;
}

BatchRef Declarations::any_of(uint32_t rank, uint64_t from) {
  Lock lock(mu_);
  for (auto at = steps_.lower_bound(from); at != steps_.end(); ++at)
    for (const BatchRef& b : at->second.batches)
      if (b->rank == rank) return b;
  return nullptr;
}

bool Declarations::close(const Share& share) {
  Lock lock(mu_);
  const auto at = steps_.find(share.step);
  if (at == steps_.end()) return false;
  bool any = false;
  for (const BatchRef& b : at->second.batches) {
    if (!share.has(*b)) continue;
    any = true;
    for (size_t i = 0; i < b->parts.size(); ++i) never_resolve(*b, i, Part::kDropped);
  }
  return any;
}

bool Declarations::take_out(const Share& share) {
  Lock lock(mu_);
  const auto at = steps_.find(share.step);
  if (at == steps_.end()) return true;
  Step& s = at->second;
  if (s.linking) return false;
  for (const BatchRef& b : s.batches)
    for (size_t i = 0; share.has(*b) && i < b->parts.size(); ++i)
      if (b->parts[i]->state.load() == Part::kResolving) return false;
  for (const BatchRef& b : s.batches) {
    if (!share.has(*b)) continue;
    for (size_t i = 0; i < b->parts.size(); ++i) {
      Part& p = *b->parts[i];
      unlink(*b, i);
      // In this section: who counts holders finds them among the parts, or has them let go.
      if (p.resolved()) p.let_go(b->tables[i]->rows);
      count(s, p, -1u);
      if (!p.resolved()) p.state.store(Part::kDropped);
    }
    b->entered = false;
    --(b->own ? s.of_rank[b->rank].own : s.of_rank[b->rank].former);
    if (b->handle) handle_remove(HandleKind::kBatch, b->handle);
  }
  std::erase_if(s.batches, [&](const BatchRef& b) { return share.has(*b); });
  s.resolve_at = s.link_at = s.warm_at = s.warm_part = s.warm_bytes = 0;
  if (s.batches.empty()) steps_.erase(at);
  return true;
}

Vector<Declarations::Held> Declarations::begin_retiring(uint64_t step) {
  Vector<Held> held;
  Lock lock(mu_);
  each({.last = step}, [&](const Batch& b, size_t i) {
    if (!b.tables[i]->keys_are_slots && b.parts[i]->resolved())
      held.push_back({b.tables[i], b.parts[i]});
  });
  retiring_ = true;
  retiring_to_ = step;
  return held;
}

void Declarations::end_retiring() {
  Lock lock(mu_);
  retiring_ = false;
}

bool Declarations::retire_one(uint64_t step, Vector<BatchRef>* out) {
  Lock lock(mu_);
  if (steps_.empty() || steps_.begin()->first > step) return false;
  Step& s = steps_.begin()->second;
  for (const BatchRef& b : s.batches) {
    for (size_t i = 0; i < b->parts.size(); ++i) {
      never_resolve(*b, i, Part::kDropped);
      count(s, *b->parts[i], -1u);
    }
    b->entered = false;
  }
  *out = std::move(s.batches);
  steps_.erase(steps_.begin());
  return true;
}

void Declarations::retire(uint64_t step) {
  for (Vector<BatchRef> gone; retire_one(step, &gone);)
    for (const BatchRef& b : gone)
      if (b->handle) handle_remove(HandleKind::kBatch, b->handle);
  end_retiring();
}

void Declarations::recount_unsure(Table& table) {
  if (!table.rows.unsure()) return;
  Lock lock(mu_);
  recount(table);
}

void Declarations::close_table(const Table& table) {
  Lock lock(mu_);
  each({.table = &table}, [&](Batch& b, size_t i) {
    mu_.assert_held();
    never_resolve(b, i, Part::kDropped);
  });
}

bool Declarations::drop_table(const Table& table) {
  Lock lock(mu_);
  if (resolving_ != 0 || linking_ != 0) return false;
  each({.table = &table}, [&](Batch& b, size_t i) {
    mu_.assert_held();
    set_state(b, i, Part::kDropped);
  });
  return true;
}

void Declarations::never_resolve(Batch& b, size_t i, Part::State instead) {
  const uint32_t was = b.parts[i]->state.load();
  if (was == Part::kArriving || was == Part::kDeclared) set_state(b, i, instead);
}

void Declarations::give_up(Batch& b, size_t i) {
  unlink(b, i);
  b.parts[i]->let_go(b.tables[i]->rows);
  set_state(b, i, Part::kStale);
}

// A part with the same keys, which nobody has resolved.
bool Declarations::make_anew(Step& s, Batch& b, size_t i, BufferPool& pool) {
  const PartRef old = b.parts[i], part = make_part();
  part->step = old->step;
  part->rank = old->rank;
  if (part->take_keys(pool, *old) != FRUGAL_OK) return false;
  unlink(b, i);
  old->let_go(b.tables[i]->rows);
  count(s, *old, -1u);
  old->state.store(Part::kDropped);
  b.parts[i] = part;
  count(s, *part, 1);
  b.to_resolve = std::min(b.to_resolve, static_cast<uint32_t>(i));
  b.to_link = std::min(b.to_link, static_cast<uint32_t>(i));
  s.resolve_at = s.link_at = s.warm_at = s.warm_part = s.warm_bytes = 0;
  return true;
}

bool Declarations::quiet(const Table& table) { return !retiring_ && table.calls.load() == 0; }

void Declarations::recount(Table& table) try {
  if (!table.rows.unsure()) return;
  auto still = [&] {
    mu_.assert_held();
    return quiet(table);
  };
  table.rows.recount(still, [&](auto visit) {
    mu_.assert_held();
    each({.table = &table}, [&](const Batch& b, size_t i) {
      const Part& p = *b.parts[i];
      if (p.resolved()) visit(p.row_slots(), p.distinct, p.row_start());
    });
  });
} catch (const std::bad_alloc&) {
  // Next time.
}

void Declarations::unlink(Batch& b, size_t i) {
  const PartRef& p = b.parts[i];
  if (p->linked.load() && !b.tables[i]->dropped.load()) b.tables[i]->window.unlink(p);
  change(b, i, [](Part& part) { part.linked.store(false); });
}

// --- Work ----------------------------------------------------------------------------------------

bool Declarations::next_to_resolve(uint64_t up_to, Item* out, bool* stale) {
  Lock lock(mu_);
  *stale = false;
  if (declared_ == 0) return false;
  for (auto& [step, s] : steps_) {
    if (step > up_to) break;
    for (; s.declared != 0; ++s.resolve_at) {
      FRUGAL_ASSERT(s.resolve_at < s.batches.size());
      const BatchRef& b = s.batches[s.resolve_at];
      while (b->to_resolve < b->parts.size()) {
        const uint32_t i = b->to_resolve++;
        if (b->parts[i]->state.load() != Part::kDeclared) continue;
        Table& table = *b->tables[i];
        if (table.rows.far() && table.arriving.held_up(*b->parts[i], *table.rows.far())) {
          --b->to_resolve;
          *out = {b, i, nullptr};
          return false;
        }
        if (table.tight.load()) {  // no row is to be reserved now
          set_state(*b, i, Part::kStale);
          *stale = true;
          continue;
        }
        set_state(*b, i, Part::kResolving);
        ++resolving_;
        ++table.calls;
        *out = {b, i, b->parts[i]};
        return true;
      }
    }
  }
  return false;
}

void Declarations::resolved(const Item& item, bool done) {
  Lock lock(mu_);
  --resolving_;
  --item.table()->calls;
  if (served(*item.batch)) {
    if (done) item.part()->let_go(item.table()->rows);
    set_state(*item.batch, item.index, Part::kDropped);
  } else {
    set_state(*item.batch, item.index, done ? Part::kResolved : Part::kStale);
  }
  recount(*item.table());
}

void Declarations::put_back(const Item& item) {
  Lock lock(mu_);
  --resolving_;
  --item.table()->calls;
  Batch& b = *item.batch;
  if (served(b)) return set_state(b, item.index, Part::kDropped);
  set_state(b, item.index, Part::kDeclared);
  b.to_resolve = std::min(b.to_resolve, item.index);
  steps_.find(b.step)->second.resolve_at = 0;
}

bool Declarations::next_to_link(uint64_t base, uint64_t end, Item* out) {
  Lock lock(mu_);
  for (auto at = steps_.lower_bound(base); at != steps_.end() && at->first < end; ++at) {
    Step& s = at->second;
    if (s.linkable == 0) continue;
    // Nothing is left to be done for what is before the cursors.
    auto passed = [](const Part& p) { return p.linked.load() || p.state.load() > Part::kResolved; };
    bool all = true;
    for (size_t k = s.link_at; k < s.batches.size(); ++k) {
      const BatchRef& b = s.batches[k];
      while (b->to_link < b->parts.size() && passed(*b->parts[b->to_link])) ++b->to_link;
      all = all && b->to_link == b->parts.size();
      if (all) s.link_at = k + 1;
      for (uint32_t i = b->to_link; i < b->parts.size(); ++i) {
        Part& p = *b->parts[i];
        if (p.state.load() != Part::kResolved || p.linked.load() || p.linking) continue;
        change(*b, i, [](Part& part) { part.linking = true; });
        ++linking_;
        *out = {b, i, b->parts[i]};
        return true;
      }
    }
  }
  return false;
}

void Declarations::linked(const Item& item, bool done) {
  Lock lock(mu_);
  --linking_;
  change(*item.batch, item.index, [&](Part& p) {
    p.linking = false;
    p.linked.store(done);
  });
}

bool Declarations::next_to_warm(uint64_t step, size_t most, size_t rows, bool take, Item* out,
                                size_t* from, size_t* end) {
  Lock lock(mu_);
  const auto at = steps_.find(step);
  if (at == steps_.end()) return false;
  Step& s = at->second;
  for (; s.warm_at < s.batches.size(); ++s.warm_at, s.warm_part = 0) {
    const BatchRef& b = s.batches[s.warm_at];
    for (; s.warm_part < b->parts.size(); ++s.warm_part) {
      Part& p = *b->parts[s.warm_part];
      const uint32_t state = p.state.load();
      if (state < Part::kResolved) return false;
      if (state > Part::kResolved) continue;
      const size_t bytes = b->tables[s.warm_part]->rows.layout().value_pitch;
      const size_t limit = std::min(p.distinct, (most - s.warm_bytes) / bytes);
      if (p.warmed < limit) {
        *from = p.warmed;
        *end = std::min(limit, p.warmed + rows);
        *out = {b, static_cast<uint32_t>(s.warm_part), b->parts[s.warm_part]};
        if (take) p.warmed = *end;
        return true;
      }
      s.warm_bytes += limit * bytes;
    }
  }
  return false;
}

uint64_t Declarations::unready(uint64_t step, uint64_t links) {
  Lock lock(mu_);
  for (const auto& [first, s] : steps_) {
    if (first > step) break;
    if (s.unresolved != 0 || (first >= links && s.unlinked != 0)) return first;
  }
  return kNoStep;
}

// --- Keys that devices send ----------------------------------------------------------------------

Vector<std::shared_ptr<Arrival>> Declarations::arrivals() {
  Vector<std::shared_ptr<Arrival>> out;
  Lock lock(mu_);
  for (const Coming& c : coming_) out.push_back(c.arrival);
  return out;
}

void Declarations::arrived() {
  for (Coming ended;;) {
    ended = {};  // its memory goes back without the lock
    Lock lock(mu_);
    const auto at = std::find_if(coming_.begin(), coming_.end(), [](const Coming& c) {
      return c.arrival->arrived.load();
    });
    if (at == coming_.end()) return;
    Batch& b = *at->batch;
    const Part::State state = at->arrival->failed.load() ? Part::kStale : Part::kDeclared;
    for (size_t i = 0; i < b.parts.size(); ++i)
      if (b.parts[i]->state.load() == Part::kArriving) set_state(b, i, state);
    b.to_resolve = 0;
    if (b.entered) steps_.find(b.step)->second.resolve_at = 0;
    arriving_.fetch_sub(1);
    ended = std::move(*at);
    coming_.erase(at);
  }
}

void Declarations::forget_arrivals() {
  Vector<Coming> gone;
  Lock lock(mu_);
  gone.swap(coming_);
}

}  // namespace frugal
