#include "engine/declarations.h"

#include <utility>

#include "base/handles.h"

namespace frugal {

// Adds `by` to the step's counts for the part, and moves cursors back if it adds work.
void Declarations::count(Step& s, Batch& b, size_t i, uint32_t by) {
  const Part& p = *b.parts[i];
  const uint32_t state = p.state.load();
  auto missing = [&](uint32_t* parts, size_t* of_step, uint32_t* of_batch) {
    *parts += by;
    if (by != 1) return;
    *of_step = std::min<size_t>(*of_step, b.at);
    *of_batch = std::min(*of_batch, static_cast<uint32_t>(i));
  };
  if (state == Part::kDeclared) {
    missing(&s.declared, &s.resolve_at, &b.to_resolve);
    declared_ += by;
  }
  if (state < Part::kResolved) s.unresolved += by;
  if (p.linking) s.linking += by;
  if (state != Part::kResolved || p.linked.load()) return;
  s.unlinked += by;
  if (!p.linking) missing(&s.linkable, &s.link_at, &b.to_link);
}

template <class Change>
void Declarations::change(Batch& b, size_t i, Change change) {
  Part& p = *b.parts[i];
  if (!b.entered) return change(p);
  Step& s = steps_.find(b.step)->second;
  count(s, b, i, -1u);
  change(p);
  count(s, b, i, 1);
}

void Declarations::set_state(Batch& b, size_t i, Part::State state) {
  change(b, i, [&](Part& p) { p.state.store(state); });
}

// --- Coming and going ----------------------------------------------------------------------------

void Declarations::Step::add(const BatchRef& b) {
  OfRank& rank = of_rank[b->rank];
  b->at = static_cast<uint32_t>(batches.size());
  b->before = rank.last;
  (rank.last ? rank.last->after : rank.first) = b.get();
  rank.last = b.get();
  ++rank.own;
  b->entered = b->own = true;
  batches.push_back(b);
}

// The others move up once half are null, so each removal costs little on average.
void Declarations::Step::remove(Batch& b) {
  OfRank& rank = of_rank[b.rank];
  (b.before ? b.before->after : rank.first) = b.after;
  (b.after ? b.after->before : rank.last) = b.before;
  --(b.own ? rank.own : rank.former);
  b.entered = false;
  batches[b.at] = nullptr;
  if (2 * ++gone < batches.size()) return;
  std::erase(batches, nullptr);
  for (uint32_t k = 0; k < batches.size(); ++k) batches[k]->at = k;
  gone = resolve_at = link_at = warm_at = warm_part = warm_bytes = 0;
}

Status Declarations::add(const BatchRef& batch, bool want_handle,
                         std::shared_ptr<KeyDownload> download, bool* alone) {
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
  const Step::OfRank& of = s.of_rank[batch->rank];
  const bool own = of.own >= kMostBatches;
  if (own || of.own + of.former >= 2 * kMostBatches)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "rank %u%s has declared %u batches for step %llu: at most %u; declare more keys in "
                "a call",
                batch->rank, own ? "" : ", its former trainers included,",
                own ? of.own : of.own + of.former, static_cast<unsigned long long>(batch->step),
                own ? kMostBatches : 2 * kMostBatches);
  make_room(s.batches, 1);
  if (download) make_room(coming_, 1);
  if (want_handle) {
    batch->handle = handle_of<AnyBatch>(batch);
    if (!batch->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
    batch->id = batch->handle;
  }
  *alone = declared_ == 0;
  s.add(batch);
  for (size_t i = 0; i < batch->parts.size(); ++i) count(s, *batch, i, 1);
  if (download) {
    coming_.push_back({std::move(download), batch});
    downloading_.fetch_add(1);
  }
  return FRUGAL_OK;
}

void Declarations::joined(uint32_t rank, uint64_t from) {
  Lock lock(mu_);
  for (auto at = steps_.lower_bound(from); at != steps_.end(); ++at) {
    Step& s = at->second;
    if (rank < s.of_rank.size()) s.of_rank[rank].former += std::exchange(s.of_rank[rank].own, 0);
    s.each(rank, [](Batch& b) { b.own = false; });
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
    if (const Batch* b = at->second.first(rank)) return at->second.batches[b->at];
  return nullptr;
}

bool Declarations::close(const Share& share) {
  Lock lock(mu_);
  const auto at = steps_.find(share.step);
  if (at == steps_.end()) return false;
  bool any = false;
  at->second.each(share, [&](Batch& b) {
    mu_.assert_held();
    any = true;
    for (size_t i = 0; i < b.parts.size(); ++i) never_resolve(b, i, Part::kDropped);
  });
  return any;
}

bool Declarations::take_out(const Share& share) {
  Lock lock(mu_);
  const auto at = steps_.find(share.step);
  if (at == steps_.end()) return true;
  Step& s = at->second;
  if (s.linking) return false;
  bool busy = false;
  s.each(share, [&](const Batch& b) {
    for (const PartRef& p : b.parts) busy = busy || p->state.load() == Part::kResolving;
  });
  if (busy) return false;
  s.each(share, [&](Batch& b) {
    mu_.assert_held();
    for (size_t i = 0; i < b.parts.size(); ++i) {
      Part& p = *b.parts[i];
      count(s, b, i, -1u);
      unlink(b, i);
      // Under this lock: a recount finds each holder among the parts, or finds it released.
      if (p.resolved()) p.release_hold(b.tables[i]->rows);
      if (!p.resolved()) p.state.store(Part::kDropped);
    }
    if (b.handle) handle_remove(HandleKind::kBatch, b.handle);
    s.remove(b);
  });
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
  if (s.gone) std::erase(s.batches, nullptr);
  for (const BatchRef& b : s.batches) {
    for (size_t i = 0; i < b->parts.size(); ++i) {
      never_resolve(*b, i, Part::kDropped);
      count(s, *b, i, -1u);
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

void Declarations::recount_unknown(Table& table) {
  if (!table.rows.holders_unknown()) return;
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
  if (was == Part::kDownloading || was == Part::kDeclared) set_state(b, i, instead);
}

void Declarations::give_up(Batch& b, size_t i) {
  change(b, i, [&](Part& p) {
    unlink(b, i);
    p.release_hold(b.tables[i]->rows);
    p.state.store(Part::kStale);
  });
}

// Replaces a part by an unresolved one with the same keys.
bool Declarations::make_anew(Step& s, Batch& b, size_t i, BufferPool& pool) {
  const PartRef old = b.parts[i], part = make_part();
  part->step = old->step;
  part->rank = old->rank;
  if (part->take_keys(pool, *old) != FRUGAL_OK) return false;
  count(s, b, i, -1u);
  unlink(b, i);
  old->release_hold(b.tables[i]->rows);
  old->state.store(Part::kDropped);
  b.parts[i] = part;
  count(s, b, i, 1);
  s.warm_at = s.warm_part = s.warm_bytes = 0;
  return true;
}

bool Declarations::quiet(const Table& table) { return !retiring_ && table.calls.load() == 0; }

void Declarations::recount(Table& table) try {
  if (!table.rows.holders_unknown()) return;
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
  // No memory: the next call does it.
}

void Declarations::unlink(Batch& b, size_t i) {
  const PartRef& p = b.parts[i];
  if (p->linked.load() && !b.tables[i]->dropped.load()) b.tables[i]->window.unlink(p);
  p->linked.store(false);
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
      while (b && b->to_resolve < b->parts.size()) {
        const uint32_t i = b->to_resolve++;
        if (b->parts[i]->state.load() != Part::kDeclared) continue;
        Table& table = *b->tables[i];
        if (table.rows.tier() && table.loading_parts.held_up(*b->parts[i], *table.rows.tier())) {
          --b->to_resolve;
          *out = {b, i, nullptr};
          return false;
        }
        if (table.reserving_paused.load()) {  // no row may be reserved now
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
    if (done) item.part()->release_hold(item.table()->rows);
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
}

bool Declarations::next_to_link(uint64_t base, uint64_t end, Item* out) {
  Lock lock(mu_);
  for (auto at = steps_.lower_bound(base); at != steps_.end() && at->first < end; ++at) {
    Step& s = at->second;
    for (; s.linkable != 0; ++s.link_at) {
      FRUGAL_ASSERT(s.link_at < s.batches.size());
      const BatchRef& b = s.batches[s.link_at];
      while (b && b->to_link < b->parts.size()) {
        const uint32_t i = b->to_link++;
        const Part& p = *b->parts[i];
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
    for (; b && s.warm_part < b->parts.size(); ++s.warm_part) {
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

Vector<std::shared_ptr<KeyDownload>> Declarations::downloads() {
  Vector<std::shared_ptr<KeyDownload>> out;
  Lock lock(mu_);
  for (const Coming& c : coming_) out.push_back(c.download);
  return out;
}

// A thread that polls a download still has a reference: its memory is freed without the lock.
void Declarations::downloaded() {
  Lock lock(mu_);
  std::erase_if(coming_, [&](const Coming& c) {
    mu_.assert_held();
    if (!c.download->downloaded.load()) return false;
    const Part::State state = c.download->failed.load() ? Part::kStale : Part::kDeclared;
    for (size_t i = 0; i < c.batch->parts.size(); ++i)
      if (c.batch->parts[i]->state.load() == Part::kDownloading) set_state(*c.batch, i, state);
    downloading_.fetch_sub(1);
    return true;
  });
}

void Declarations::forget_downloads() {
  Vector<Coming> gone;
  Lock lock(mu_);
  gone.swap(coming_);
}

}  // namespace frugal
