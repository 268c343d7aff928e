#include "window/window.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <type_traits>

#include "base/assert.h"

namespace frugal {

namespace {

[[maybe_unused]] bool ascending(const uint32_t* slots, size_t n) {
  return std::adjacent_find(slots, slots + n, std::greater_equal<>()) == slots + n;
}

}  // namespace

class SCOPED_CAPABILITY Window::Both {
 public:
  Both(Window& w, Urgency urgency) ACQUIRE(w.links_mu_, w.pending_.mu)
      : links_(w.links_mu_, urgency), pending_(w.pending_, urgency) {}
  ~Both() RELEASE() {}

 private:
  UrgentLock links_;
  PendingUpdates::Section pending_;
};

Status Window::open(const Config& config, uint64_t next_commit) {
  Both lock(*this, Urgency::kUrgent);
  if (opened()) return FRUGAL_OK;
  config_ = config;
  // Beyond what read sets hold, nothing is urgent.
  config_.staleness = std::min<uint64_t>(config.staleness, kRing);
  read_sets_only_ = config.staleness != 0;
  next_commit_ = next_commit;
  pending_.open(config.tree_heap, next_commit, config.pending_rows);
  // Last, so that an open that fails holds none.
  FRUGAL_TRY(read_sets_.open(config.rows));
  opened_.store(true, std::memory_order_release);
  return FRUGAL_OK;
}

uint64_t Window::next_commit() {
  PendingUpdates::Section lock(pending_, Urgency::kUrgent);
  return pending_.next_commit();
}

void Window::set_next_commit(uint64_t next_commit) {
  Both lock(*this, Urgency::kUrgent);
  next_commit_ = next_commit;
  pending_.set_next_commit(next_commit);
}

// --- Read sets ----------------------------------------------------------------------------------

// Returns the first declared step that must see an update of `step` to the row.
inline uint8_t Window::deadline(ReadSet current, uint64_t step) const {
  return ReadSets::next_read(current, next_commit_, step + 1 + config_.staleness);
}

// Declared step `step` reads the row, and the next read has priority `prio`.
void Window::learn_next(uint64_t step, uint32_t slot, uint8_t prio) {
  for (const PartRef& p : parts_[step & (kRing - 1)]) {
    if (!p->finder.built()) continue;
    uint32_t row = RowFinder::find(p->row_slots(), p->finder.near(slot), slot);
    if (row != UINT32_MAX) p->next.as<uint8_t>()[row] = prio;
  }
}

// Three passes over one chunk, under one lock: each pass brings the next one's cache lines.
bool Window::link(const PartRef& ref, size_t from, size_t n, bool owned, Urgency urgency) {
  constexpr size_t kChunk = std::extent_v<decltype(found_)>, kAhead = 96;
  Part& part = *ref;
  const uint32_t* slots = part.row_slots();
  uint8_t* next = part.next.as<uint8_t>();
  FRUGAL_ASSERT(from != 0 || ascending(slots, part.distinct));
  part.owner_apart = owned;
  const size_t end = std::min(part.distinct, from + n);
  for (size_t at = from; at < std::max<size_t>(end, from + 1); at += kChunk) {
    UrgentLock lock(links_mu_, urgency);
    if (part.step < next_commit_ || part.step - next_commit_ >= kHorizon) return false;
    if (at == 0) parts_[part.step & (kRing - 1)].push_back(ref);
    if (owned) read_sets_only_ = true;
    const uint64_t next_commit = next_commit_, own = part.step - next_commit,
                   bit = uint64_t{1} << own;
    const uint8_t prio = static_cast<uint8_t>(part.step & (kRing - 1));
    uint64_t written;
    bool ancient;
    {
      PendingUpdates::Section section(pending_, urgency);
      written = pending_.unwritten_reads(
          &ancient);  // a preparing thread holds both locks, so no bit is missing
    }
    // Earlier steps that will read the row, or that have an unwritten update of it.
    const uint64_t matters = ((bit << kPast) - 1) & (~ReadSets::kPassed | written);
    Found* const found = found_;
    size_t stop = std::min(end, at + kChunk), finds = 0;
    for (size_t i = at; i < std::min(stop, at + kAhead); ++i)
      __builtin_prefetch(&read_sets_[slots[i]], 1);
    for (size_t i = at; i < stop; ++i) {
      if (i + kAhead < stop) __builtin_prefetch(&read_sets_[slots[i + kAhead]], 1);
      ReadSet w = ReadSets::at_step(read_sets_[slots[i]], next_commit);
      bool apart = owned && config_.placement.may_cache(part.rank, slots[i]);
      ReadSet linked = w | (apart ? bit << ReadSets::kOwnerAt : bit << kPast);
      read_sets_[slots[i]] = linked;
      if (read_sets_only_) {
        if ((w & written) || ancient) found[finds++] = {slots[i], -1, 0};
        continue;
      }
      next[i] = deadline(w, part.step);
      if ((w & matters) == 0 && !ancient) continue;
      uint64_t earlier = w & ((bit << kPast) - 1) & ReadSets::kReads;
      found[finds++] = {slots[i],
                        static_cast<int>(std::bit_width(earlier)) - 1 - static_cast<int>(kPast), 0};
    }
    // In two passes, so that the lists' cache lines come meanwhile.
    for (size_t f = 0; f < finds; ++f) {
      if (found[f].step < 0) continue;
      const Vector<PartRef>& there =
          parts_[(next_commit + static_cast<uint64_t>(found[f].step)) & (kRing - 1)];
      if (there.size() != 1 || !there[0]->finder.built()) continue;
      found[f].from = there[0]->finder.near(found[f].slot);
      __builtin_prefetch(there[0]->row_slots() + found[f].from);
      __builtin_prefetch(there[0]->next.as<uint8_t>() + found[f].from, 1);
    }
    size_t kept = 0;
    for (size_t f = 0; f < finds; ++f) {
      uint32_t slot = found[f].slot;
      if (found[f].step >= 0) {
        uint64_t step = next_commit + static_cast<uint64_t>(found[f].step);
        const Vector<PartRef>& there = parts_[step & (kRing - 1)];
        if (there.size() == 1) {
          uint32_t row = RowFinder::find(there[0]->row_slots(), found[f].from, slot);
          if (row != UINT32_MAX) there[0]->next.as<uint8_t>()[row] = prio;
        } else {
          learn_next(step, slot, prio);
        }
      }
      // Its update may exist already. (This holds whatever the previous step appears to be: the
      // update may be so old that the stamp has wrapped.)
      if (ancient || (found[f].step <= 0 && (read_sets_[slot] & written))) found[kept++] = found[f];
    }
    if (kept == 0) continue;
    PendingUpdates::Section section(pending_, urgency);
    for (size_t f = 0; f < kept; ++f) {
      ReadSet w = read_sets_[found[f].slot];
      if (Entry entry = pending_.oldest(w, found[f].slot); entry.update)
        pending_.reprioritize(entry, deadline(w, entry.update->step));
    }
  }
  return true;
}

void Window::unlink(const PartRef& part) {
  Both lock(*this, Urgency::kUrgent);
  if (part->step < next_commit_) return;
  Vector<PartRef>& here = parts_[part->step & (kRing - 1)];
  here.erase(std::remove(here.begin(), here.end(), part), here.end());
  const uint64_t own = part->step - next_commit_, bit = uint64_t{1} << own;
  auto set = [&](const Part& p, bool on) REQUIRES(links_mu_) {
    for (size_t i = 0; i < p.distinct; ++i) {
      uint32_t slot = p.row_slots()[i];
      ReadSet& w = read_sets_[slot];
      bool apart = p.owner_apart && config_.placement.may_cache(p.rank, slot);
      ReadSet mask = apart ? bit << ReadSets::kOwnerAt : bit << kPast;
      w = on ? ReadSets::at_step(w, next_commit_) | mask
             : ReadSets::at_step(w, next_commit_) & ~mask;
    }
  };
  set(*part, false);
  // Other ranks may read the same rows in the same step: their bits are set again.
  for (const PartRef& p : here) set(*p, true);
  for (size_t i = 0; i < part->distinct; ++i) {
    uint32_t slot = part->row_slots()[i];
    ReadSet w = read_sets_[slot];
    if (!(w & bit << kPast)) {
      uint64_t earlier = (w & ReadSets::kReads) >> kPast & (bit - 1);
      if (earlier) {
        uint64_t step = next_commit_ + static_cast<uint64_t>(std::bit_width(earlier)) - 1;
        learn_next(step, slot, deadline(w, part->step));
      }
    }
    if (Entry entry = pending_.oldest(w, slot); entry.update)
      pending_.reprioritize(entry, deadline(w, entry.update->step));
  }
}

// --- Updates -------------------------------------------------------------------------------------

void Window::add(const UpdateRef& update) {
  Both lock(*this, Urgency::kUrgent);
  pending_.add(update);
}

bool Window::prepare(StepUpdate& u, bool declared, size_t most, Urgency urgency) {
  uint8_t prio[PendingUpdates::kPage];
  static_assert(kPiece % PendingUpdates::kPage == 0);
  FRUGAL_ASSERT(!u.committed);
  for (const size_t end = std::min(u.n, u.prepared_rows + std::min(most, u.n));
       u.prepared_rows < end;) {
    Both lock(*this, urgency);
    const size_t at = u.prepared_rows;
    pending_.prepare(
        u, declared && !read_sets_only_ ? next_of(u, at, prio) : next_from_read_sets(u, at, prio),
        prio);
  }
  return u.prepared_rows == u.n;
}

// Finds the priorities of a page of the update's rows. All ranks have passed the gate of the step,
// so the rows that it reads have no unwritten updates.
size_t Window::next_of(const StepUpdate& u, size_t at, uint8_t* prio) const {
  const size_t n = std::min<size_t>(PendingUpdates::kPage, u.n - at);
  if (u.ranks.size() == 1) {
    std::copy_n(u.ranks[0].part->next.as<uint8_t>() + at, n, prio);
    return n;
  }
  for (size_t i = 0; i < n; ++i) {
    uint32_t term = u.term_start[at + i];
    prio[i] = u.ranks[u.term_rank[term]].part->next.as<uint8_t>()[u.term_index[term]];
  }
  return n;
}

// The same, from the read sets.
size_t Window::next_from_read_sets(StepUpdate& u, size_t at, uint8_t* prio) {
  constexpr size_t kAhead = 48;
  const size_t n = std::min<size_t>(PendingUpdates::kPage, u.n - at);
  const uint32_t* slots = u.slots + at;
  const uint64_t own = u.step + kPast - next_commit_;
  bool ancient;
  const uint64_t written = pending_.unwritten_reads(&ancient) & ~(uint64_t{1} << own);
  if ((written || ancient) && u.blocked_at_prepare.capacity() < u.blocked_at_prepare.size() + n)
    u.blocked_at_prepare.reserve(2 * u.blocked_at_prepare.size() + n);
  for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&read_sets_[slots[i]], 1);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&read_sets_[slots[i + kAhead]], 1);
    ReadSet w = ReadSets::at_step(read_sets_[slots[i]], next_commit_);
    read_sets_[slots[i]] = w | uint64_t{1} << own;
    if (((w & written) || ancient) && pending_.oldest(w, slots[i]).update) {
      prio[i] = PendingUpdates::kBlocked;
      u.blocked_at_prepare.push_back(static_cast<uint32_t>(at + i));
      continue;
    }
    prio[i] = deadline(w, u.step);
  }
  return n;
}

void Window::prepared_for_next(const StepUpdate& u, Vector<uint32_t>* slots) {
  const uint8_t prio = static_cast<uint8_t>((u.step + 1) & (kRing - 1));
  for (size_t page = 0; page * PendingUpdates::kPage < u.n; ++page) {
    PendingUpdates::Section lock(pending_, Urgency::kBackground);
    pending_.prepared_for(prio, u, page, slots);
  }
}

void Window::withdraw(const UpdateRef& update) {
  PendingUpdates::Section lock(pending_, Urgency::kUrgent);
  pending_.withdraw(*update);
}

void Window::make_room(const StepUpdate& update) {
  if (update.blocked_at_prepare.empty()) return;
  PendingUpdates::Section lock(pending_, Urgency::kUrgent);
  pending_.make_room();
}

void Window::commit(StepUpdate* u, uint64_t step) {
  Vector<PartRef> served;
  Both lock(*this, Urgency::kUrgent);
  FRUGAL_ASSERT(step >= next_commit_);
  FRUGAL_ASSERT(!u || (u->step == step && !u->committed && u->prepared_rows == u->n));
  uint8_t passed = static_cast<uint8_t>(step & (kRing - 1));
  served.swap(parts_[passed]);
  next_commit_ = step + 1;
  pending_.set_next_commit(next_commit_);
  // Normally no row is left at the committed step's own priority. A waiter that gave up on rows
  // that it had forced can leave some. They must not appear to be 64 steps away.
  pending_.each_of(passed, [&](const Entry& entry) {
    links_mu_.assert_held();
    pending_.mu.assert_held();
    const uint32_t slot = entry.update->slots[entry.row];
    pending_.reprioritize(
        entry, deadline(ReadSets::at_step(read_sets_[slot], next_commit_), entry.update->step));
  });
  if (!u) return;
  uint64_t rows = pending_.commit(*u);
  for (uint32_t row : u->blocked_at_prepare) {
    uint32_t slot = u->slots[row];
    ReadSet w = ReadSets::at_step(read_sets_[slot], next_commit_);
    if (Entry entry = pending_.oldest(w, slot); entry.update) {
      pending_.chain(*u, row, entry);
      continue;
    }
    // The older update has been written meanwhile.
    pending_.enqueue(pending_.id_of(*u, row), deadline(w, u->step));
    ++rows;
  }
  u->blocked_at_prepare.clear();
  pending_.now_pending(rows);
}

// --- Queries -------------------------------------------------------------------------------------

bool Window::force(const uint32_t* slots, size_t n, uint64_t before) {
  constexpr size_t kChunk = 512;
  bool any = false;
  for (size_t at = 0; at < n; at += kChunk) {
    Both lock(*this, Urgency::kUrgent);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      Entry entry =
          pending_.oldest(ReadSets::at_step(read_sets_[slots[i]], next_commit_), slots[i]);
      if (!entry.update || !entry.update->committed || entry.update->step >= before) continue;
      any = true;
      pending_.reprioritize(entry, static_cast<uint8_t>(next_commit_ & (kRing - 1)));
    }
  }
  return any;
}

bool Window::in_flight_until(uint64_t step) {
  if (!any_pending()) return false;
  PendingUpdates::Section lock(pending_, Urgency::kUrgent);
  return pending_.in_flight_until(step);
}

bool Window::claim(uint64_t step, size_t max, Claim* c) {
  c->ids.clear();
  c->rows.clear();
  c->runs.clear();
  if (!any_pending()) return false;
  c->reserve(max);
  PendingUpdates::Section lock(pending_, Urgency::kUrgent);
  pending_.pop(step, max, c);
  return !c->ids.empty();
}

bool Window::unwritten_before(uint64_t step) {
  PendingUpdates::Section lock(pending_, Urgency::kBackground);
  return pending_.unwritten_before(step);
}

void Window::finish(Claim& c) {
  {
    PendingUpdates::Section lock(pending_, Urgency::kUrgent);
    if (pending_.finish(c)) return;
  }
  // Entries that are blocked after these rows get their priority from the read sets.
  Both lock(*this, Urgency::kUrgent);
  pending_.finish_chained(c, [&](const StepUpdate& after, uint32_t row) {
    links_mu_.assert_held();
    return deadline(ReadSets::at_step(read_sets_[after.slots[row]], next_commit_), after.step);
  });
}

// --- Caches --------------------------------------------------------------------------------------

namespace {

constexpr size_t kRowsAhead = 16;  // read sets that are being fetched from memory
constexpr size_t kLockedRows = 2048;

}  // namespace

void Window::set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty,
                        Urgency urgency) {
  for (size_t from = 0; from < n; from += kLockedRows) {
    Both lock(*this, urgency);
    read_sets_only_ = true;
    const size_t end = std::min(n, from + kLockedRows);
    for (size_t i = from; i < end; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(&read_sets_[slots[i + kRowsAhead]], 1);
      ReadSet& w = read_sets_[slots[i]];
      w = ReadSets::at_step(w, next_commit_);
      w = cached ? w | ReadSets::kCached : w & ~ReadSets::kCached;
      Entry entry = pending_.oldest(w, slots[i]);
      if (!entry.update) continue;
      if (dirty && !cached && entry.update->committed) ++*dirty;
      pending_.reprioritize(entry, deadline(w, entry.update->step));
    }
  }
}

void Window::next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next,
                              Urgency urgency) {
  for (size_t from = 0; from < n; from += kLockedRows) {
    UrgentLock lock(links_mu_, urgency);
    const size_t end = std::min(n, from + kLockedRows);
    for (size_t i = from; i < end; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(&read_sets_[slots[i + kRowsAhead]]);
      next[i] = UINT64_MAX;
      uint64_t skip = after >= next_commit_ ? std::min<uint64_t>(after + 1 - next_commit_, 63) : 0;
      uint64_t ahead =
          (ReadSets::at_step(read_sets_[slots[i]], next_commit_) >> ReadSets::kOwnerAt &
           ReadSets::kOwner) >>
          skip << skip;
      if (ahead) next[i] = next_commit_ + static_cast<uint64_t>(std::countr_zero(ahead));
    }
  }
}

size_t Window::collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out) {
  if (!any_pending()) return 0;
  size_t found = 0;
  Both lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    Entry entry = pending_.oldest(ReadSets::at_step(read_sets_[slots[i]], next_commit_), slots[i]);
    if (!entry.update || !entry.update->committed) continue;
    ++found;
    if (out) out->push_back(slots[i]);
  }
  return found;
}

WindowStats Window::stats() {
  PendingUpdates::Section lock(pending_, Urgency::kBackground);
  return pending_.stats();
}

}  // namespace frugal
