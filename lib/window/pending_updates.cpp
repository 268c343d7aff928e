#include "window/pending_updates.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/assert.h"

namespace frugal {

void PendingUpdates::open(bool tree_heap, uint64_t next_commit,
                          std::atomic<uint64_t>* pending_rows) {
  pending_of_all_ = pending_rows;
  queue_.reset(tree_heap ? make_tree_heap() : make_two_level_queue());
  set_next_commit(next_commit);
}

void PendingUpdates::set_next_commit(uint64_t next_commit) {
  next_commit_ = next_commit;
  queue_->set_next_commit(next_commit);
}

// --- Whose entries ------------------------------------------------------------------------------

uint64_t PendingUpdates::unwritten_reads(bool* ancient) const {
  uint64_t mask = 0;
  *ancient = false;
  for (const UpdateRef& u : updates_) {
    if (u->step + ReadSets::kPast < next_commit_)
      *ancient = true;
    else
      mask |= uint64_t{1} << (u->step + ReadSets::kPast - next_commit_);
  }
  return mask;
}

StepUpdate* PendingUpdates::find_update(uint32_t seq) const {
  for (const UpdateRef& u : updates_)
    if (u->seq == seq) return u.get();
  return nullptr;
}

PendingUpdates::Entry PendingUpdates::find_pending(StepUpdate& u, uint32_t slot) {
  uint32_t row;
  if (u.ranks.size() == 1 && u.ranks[0].part->finder.built()) {
    row = RowFinder::find(u.slots, u.ranks[0].part->finder.near(slot), slot);
    if (row == UINT32_MAX) return {};
  } else {
    const uint32_t* at = std::lower_bound(u.slots, u.slots + u.n, slot);
    if (at == u.slots + u.n || *at != slot) return {};
    row = static_cast<uint32_t>(at - u.slots);
  }
  return {&u, row, id_of(u, row)};
}

PendingUpdates::Entry PendingUpdates::oldest(ReadSet current, uint32_t slot) {
  for (const UpdateRef& u : updates_) {
    // Read sets have no bits of old steps.
    if (u->step + ReadSets::kPast >= next_commit_ &&
        !(current >> (u->step + ReadSets::kPast - next_commit_) & 1))
      continue;
    Entry entry = find_pending(*u, slot);
    if (!entry.update) continue;
    uint8_t state = state_[entry.id];
    if (state != kDone && state != kBlocked) return entry;
  }
  return {};
}

void PendingUpdates::reprioritize(const Entry& entry, uint8_t prio) noexcept {
  uint8_t state = state_[entry.id], old = state & ~kClaimed;
  FRUGAL_ASSERT(old <= kInfinity);
  if (old == prio) return;
  // The queue comes first, because it may need memory. Without memory the row keeps its position.
  try {
    if (!entry.update->committed)
      queue_->prepare(&entry.id, 1, prio);
    else if (!(state & kClaimed))
      queue_->move(entry.id, prio);
  } catch (const std::bad_alloc&) {
    (entry.update->committed ? unqueued_ : entry.update->unqueued) = true;
    return;
  }
  if (!entry.update->committed) {
    --entry.update->prepared[old];
    ++entry.update->prepared[prio];
  } else {
    if (!(state & kClaimed)) {
      --queued_[old];
      ++queued_[prio];
    }
    prio_distance(prio, next_commit_) < prio_distance(old, next_commit_) ? ++stats_.rises
                                                                         : ++stats_.falls;
    --count_[old];
    ++count_[prio];
  }
  state_[entry.id] = static_cast<uint8_t>(prio | (state & kClaimed));
}

// --- Updates come and go -------------------------------------------------------------------------

void PendingUpdates::add(const UpdateRef& update) {
  FRUGAL_ASSERT(update->pages.empty() && update->prepared_rows == 0);
  FRUGAL_ASSERT(updates_.empty() || updates_.back()->step < update->step);
  FRUGAL_ASSERT(std::adjacent_find(update->slots, update->slots + update->n,
                                   std::greater_equal<>()) == update->slots + update->n);
  // All that may need memory comes first.
  const size_t wanted = (update->n + kPage - 1) / kPage;
  while (free_pages_.size() < wanted) {
    const size_t before = pages_.size(), pages = std::max<size_t>(4, before * 2);
    state_.resize(pages * kPage, kDone);
    queue_->reserve_ids(state_.data(), static_cast<uint32_t>(pages * kPage));
    free_pages_.reserve(pages);
    pages_.resize(pages);
    for (size_t p = pages; p > before; --p) free_pages_.push_back(static_cast<uint32_t>(p - 1));
  }
  update->pages.reserve(wanted);
  updates_.reserve(updates_.size() + 1);
  while (update->pages.size() < wanted) {
    pages_[free_pages_.back()] = {update.get(),
                                  static_cast<uint32_t>(update->pages.size() * kPage)};
    update->pages.push_back(free_pages_.back());
    free_pages_.pop_back();
  }
  update->seq = next_seq_++;
  updates_.push_back(update);
  live_.store(static_cast<uint32_t>(updates_.size()), std::memory_order_relaxed);
}

// Ordered by priority, so that a bag gets its rows at once. Most rows have priority infinity.
void PendingUpdates::prepare(StepUpdate& u, size_t n, const uint8_t* prio) {
  uint32_t ids[kPage];
  uint16_t read[kPage];
  uint32_t start[kRing + 1], next[kRing];
  const uint32_t first = u.pages[u.prepared_rows / kPage] * kPage;
  std::copy_n(prio, n, state_.data() + first);
  size_t reads = 0, unread = 0;
  for (size_t i = 0; i < n; ++i) {
    ids[unread] = first + static_cast<uint32_t>(i);
    unread += prio[i] == kInfinity;
    read[reads] = static_cast<uint16_t>(i);
    reads += prio[i] < kInfinity;
  }
  u.prepared[kInfinity] += unread;
  if (unread != 0) queue_->prepare(ids, unread, kInfinity);
  std::fill_n(start, kRing + 1, 0);
  for (size_t i = 0; i < reads; ++i) ++start[prio[read[i]] + 1];
  for (uint32_t p = 0; p < kRing; ++p) {
    u.prepared[p] += start[p + 1];
    start[p + 1] += start[p];
  }
  std::copy_n(start, kRing, next);
  for (size_t i = 0; i < reads; ++i) ids[next[prio[read[i]]]++] = first + read[i];
  for (uint32_t p = 0; p < kRing; ++p)
    if (start[p + 1] != start[p])
      queue_->prepare(ids + start[p], start[p + 1] - start[p], static_cast<uint8_t>(p));
  u.prepared_rows += n;
}

void PendingUpdates::prepared_for(uint8_t prio, const StepUpdate& u, size_t page,
                                  Vector<uint32_t>* slots) {
  if (page == 0) slots->reserve(u.prepared[prio]);
  const uint8_t* state = state_.data() + u.pages[page] * kPage;
  const size_t at = page * kPage, n = std::min<size_t>(kPage, u.n - at);
  for (size_t i = 0; i < n; ++i)
    if (state[i] == prio) slots->push_back(u.slots[at + i]);
}

void PendingUpdates::withdraw(StepUpdate& u) {
  FRUGAL_ASSERT(!u.committed);
  queue_->drop_prepared();
  // (If memory ran out during a piece, some of its rows are prepared.)
  for (uint32_t page : u.pages) std::fill_n(state_.begin() + page * kPage, kPage, kDone);
  std::fill_n(u.prepared, kRing + 1, 0);
  u.blocked_at_prepare.clear();
  u.unqueued = false;
  release(u);
}

void PendingUpdates::make_room() {
  for (const UpdateRef& older : updates_)
    if (older->committed) older->next.reserve(older->n);
}

uint64_t PendingUpdates::commit(StepUpdate& u) {
  u.committed = true;
  u.remaining = u.n;
  unqueued_ |= u.unqueued;
  uint64_t rows = 0;
  for (uint32_t p = 0; p <= kRing; ++p) {
    count_[p] += u.prepared[p];
    queued_[p] += u.prepared[p];
    rows += u.prepared[p];
  }
  queue_->commit_prepared();
  stats_.enqueued += u.n;
  return rows;
}

// After the older ones, so that updates of a row are applied in step order.
void PendingUpdates::chain(StepUpdate& u, uint32_t row, const Entry& before) {
  StepUpdate* last = before.update;
  uint32_t last_row = before.row;
  while (!last->next.empty() && last->next[last_row]) {
    uint64_t link = last->next[last_row] - 1;
    last = find_update(static_cast<uint32_t>(link >> 32));
    last_row = static_cast<uint32_t>(link);
  }
  FRUGAL_ASSERT(last->committed && last->step < u.step);
  if (last->next.empty()) last->next.resize(last->n, 0);
  last->next[last_row] = (uint64_t{u.seq} << 32 | row) + 1;
}

// A row whose only obstacle was the older update becomes pending.
void PendingUpdates::enqueue(uint32_t id, uint8_t prio) noexcept {
  FRUGAL_ASSERT(state_[id] == kBlocked);
  state_[id] = prio;
  ++count_[prio];
  ++queued_[prio];
  try {
    queue_->push(id, prio);
  } catch (const std::bad_alloc&) {
    unqueued_ = true;
  }
}

void PendingUpdates::now_pending(uint64_t rows) {
  schedule_point();
  if (pending_of_all_) pending_of_all_->fetch_add(rows, std::memory_order_acq_rel);
  pending_total_.fetch_add(rows, std::memory_order_acq_rel);
}

void PendingUpdates::release(StepUpdate& u) {
  FRUGAL_ASSERT(!u.committed || u.remaining == 0);
  for (uint32_t page : u.pages) {
    FRUGAL_ASSERT(pages_[page].update == &u);
    pages_[page] = {};
    free_pages_.push_back(page);
  }
  u.pages.clear();
  u.prepared_rows = 0;
  for (auto at = updates_.begin(); at != updates_.end(); ++at)
    if (at->get() == &u) {
      updates_.erase(at);
      break;
    }
  live_.store(static_cast<uint32_t>(updates_.size()), std::memory_order_relaxed);
}

// --- Taking rows ---------------------------------------------------------------------------------

uint32_t PendingUpdates::limit_distance(uint64_t step) const {
  if (step == UINT64_MAX || unqueued_) return kRing;
  return step < next_commit_
             ? 0
             : static_cast<uint32_t>(std::min<uint64_t>(step - next_commit_, kRing - 1));
}

// The result of pending_until(), computed once a section: gates poll many tables.
void PendingUpdates::note_soonest() {
  uint64_t soonest = unqueued_ ? 0 : UINT64_MAX;
  for (uint32_t r = 0; r < kRing && soonest == UINT64_MAX; ++r)
    if (count_[(next_commit_ + r) & (kRing - 1)]) soonest = r ? next_commit_ + r : 0;
  if (soonest != soonest_.load(std::memory_order_relaxed))
    soonest_.store(soonest, std::memory_order_release);
}

bool PendingUpdates::in_flight_until(uint64_t step) const {
  uint32_t limit = limit_distance(step);
  for (uint32_t r = 0; r <= std::min(limit, kRing - 1); ++r) {
    uint32_t p = (next_commit_ + r) & (kRing - 1);
    if (count_[p] != queued_[p]) return true;
  }
  return limit == kRing && count_[kInfinity] != queued_[kInfinity];
}

void PendingUpdates::pop(uint64_t step, size_t max, Claim* c) {
  c->ids.resize(max);
  c->rows.resize(max);
  // Adjacent rows are mostly of one page and one priority, so their data are looked up once.
  uint32_t kept = 0, first_id = 0, first_row = 0, same = 0;
  StepUpdate* u = nullptr;
  uint8_t last = 0;
  constexpr size_t kAhead = 32;
  for (bool more = true; more && kept < max;) {
    uint32_t* const ids = c->ids.data() + kept;
    uint8_t lowest = 0;
    const size_t n =
        unqueued_ ? search(ids, max)
                  : queue_->pop(next_commit_, limit_distance(step), ids, max - kept, &lowest);
    more = n != 0 && !unqueued_;
    for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&state_[ids[i]], 1);
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&state_[ids[i + kAhead]], 1);
      const uint32_t id = ids[i];
      const uint8_t prio = state_[id];
      if (prio != lowest && !unqueued_) continue;  // a stale queue entry
      if (!u || id / kPage != first_id / kPage) {
        const Page& page = pages_[id / kPage];
        FRUGAL_ASSERT(page.update);
        if (!page.update->committed)
          continue;  // stale, too: the row is prepared for the same priority
        first_id = id / kPage * kPage;
        first_row = page.first_row;
        if (page.update != u) {
          u = page.update;
          if (!c->runs.empty()) c->runs.back().end = kept;
          c->runs.push_back({u, kept, kept, nullptr});
        }
      }
      FRUGAL_ASSERT(prio <= kInfinity);
      if (prio != last) {
        FRUGAL_ASSERT(queued_[last] >= same);
        queued_[last] -= same;
        last = prio;
        same = 0;
      }
      ++same;
      state_[id] = prio | kClaimed;
      c->ids[kept] = id;
      c->rows[kept++] = first_row + (id - first_id);
    }
  }
  FRUGAL_ASSERT(queued_[last] >= same);
  queued_[last] -= same;
  if (!c->runs.empty()) c->runs.back().end = kept;
  c->ids.resize(kept);
  c->rows.resize(kept);
  stats_.dequeued += kept;
}

// Searches pending rows independently of the queue.
size_t PendingUpdates::search(uint32_t* ids, size_t max) {
  size_t n = 0;
  for (size_t p = 0; p < pages_.size(); ++p) {
    if (!pages_[p].update || !pages_[p].update->committed) continue;
    for (uint32_t id = static_cast<uint32_t>(p * kPage), end = id + kPage; id < end; ++id) {
      if (state_[id] > kInfinity) continue;
      if (n == max) return n;
      ids[n++] = id;
    }
  }
  return n;
}

bool PendingUpdates::finish(Claim& c) {
  bool chained = false;
  for (const Claim::Run& run : c.runs) chained |= !run.update->next.empty();
  if (chained) return false;
  for (Claim::Run& run : c.runs) {
    written(c, run);
    wrote(run.end - run.begin);
    release_if_done(run);
  }
  return true;
}

void PendingUpdates::wrote(uint64_t rows) {
  FRUGAL_ASSERT(pending_total_.load() >= rows);
  schedule_point();
  if (pending_total_.fetch_sub(rows, std::memory_order_acq_rel) == rows) unqueued_ = false;
  if (pending_of_all_) pending_of_all_->fetch_sub(rows, std::memory_order_acq_rel);
  // Each pending row counts under one priority, claimed ones too.
  for (uint32_t p = 0; p <= kRing; ++p) FRUGAL_ASSERT(queued_[p] <= count_[p]);
  FRUGAL_ASSERT(std::accumulate(count_, count_ + kRing + 1, uint64_t{0}) == pending_total_.load());
}

// The entries of a run are done.
void PendingUpdates::written(const Claim& c, const Claim::Run& run) {
  uint64_t same = 0;
  uint8_t last = 0;
  for (uint32_t i = run.begin; i < run.end; ++i) {
    uint8_t& state = state_[c.ids[i]];
    FRUGAL_ASSERT(state & kClaimed);
    uint8_t prio = state & static_cast<uint8_t>(~kClaimed);
    if (prio != last) {
      FRUGAL_ASSERT(count_[last] >= same);
      count_[last] -= same;
      last = prio;
      same = 0;
    }
    ++same;
    state = kDone;
  }
  FRUGAL_ASSERT(count_[last] >= same);
  count_[last] -= same;
}

void PendingUpdates::release_if_done(Claim::Run& run) {
  StepUpdate* u = run.update;
  FRUGAL_ASSERT(u->committed && u->remaining >= run.end - run.begin);
  if ((u->remaining -= run.end - run.begin) != 0) return;
  u->release_bytes();
  for (const UpdateRef& ref : updates_)
    if (ref.get() == u) run.finished = ref;
  release(*u);
}

WindowStats PendingUpdates::stats() const {
  WindowStats s = stats_;
  s.pending = s.active = pending_total_.load(std::memory_order_relaxed);
  return s;
}

}  // namespace frugal
