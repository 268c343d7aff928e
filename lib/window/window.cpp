#include "window/window.h"

#include <sched.h>

#include <algorithm>
#include <bit>

#include "base/os.h"

namespace frugal {

// The lock of the window. A background pass steps back while an urgent thread waits: a plain mutex
// would let the pass take it again and again.
class Window::Lock {
 public:
  Lock(Window& w, Urgency urgency) : w_(w) {
    if (urgency == Urgency::kUrgent) {
      w_.urgent_.fetch_add(1, std::memory_order_relaxed);
      w_.mu_.lock();
      w_.urgent_.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    for (int spin = 0; w_.urgent_.load(std::memory_order_relaxed) != 0 && spin < 64; ++spin)
      sched_yield();
    w_.mu_.lock();
  }
  ~Lock() { w_.mu_.unlock(); }

 private:
  Window& w_;
};

Window::~Window() {
  os_release(&index_map_);
  os_release(&entry_map_);
  os_release(&owner_map_);
}

Status Window::open(const Config& config, uint64_t base) {
  std::lock_guard<std::mutex> lock(mu_);
  if (opened()) return FRUGAL_OK;
  config_ = config;
  base_ = base;
  // Addresses only: pages come with use, at most 4 + 32 (+ 8) bytes for each row.
  FRUGAL_TRY(os_reserve(config.rows * sizeof(uint32_t), false, &index_map_));
  FRUGAL_TRY(os_reserve((config.rows + 1) * sizeof(Entry), false, &entry_map_));
  FRUGAL_TRY(os_reserve((config.rows + 1) * sizeof(uint64_t), false, &owner_map_));
  index_ = reinterpret_cast<uint32_t*>(index_map_.base);
  entries_ = reinterpret_cast<Entry*>(entry_map_.base);
  owner_reads_ = reinterpret_cast<uint64_t*>(owner_map_.base);
  queue_.reset(config.tree_heap ? make_tree_heap() : make_two_level_queue());
  queue_->set_base(base);
  updates_.resize(64);
  opened_.store(true, std::memory_order_release);
  return FRUGAL_OK;
}

void Window::set_base(uint64_t base) {
  std::lock_guard<std::mutex> lock(mu_);
  base_ = base;
  queue_->set_base(base);
}

uint32_t Window::owner(uint32_t slot, uint32_t world_size) {
  uint64_t x = (slot + 1) * 0x9e3779b97f4a7c15ull;
  x ^= x >> 32;
  return static_cast<uint32_t>(((x & 0xffffffffu) * world_size) >> 32);
}

uint32_t Window::find(uint32_t slot) const {
  uint32_t id = index_[slot] - 1;  // kNone where the place was never written
  if (id == kNone || id >= entry_count_) return kNone;
  const Entry& e = entries_[id];
  return (e.flags & kLive) && e.slot == slot ? id : kNone;
}

uint32_t Window::find_or_add(uint32_t slot) {
  uint32_t id = find(slot);
  if (id != kNone) return id;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
  } else {
    id = entry_count_++;
    if (entry_count_ > queue_ids_) {
      queue_ids_ = std::max<uint32_t>(1024, queue_ids_ * 2);
      queue_->reserve_ids(queue_ids_);
    }
  }
  entries_[id] = {slot, static_cast<uint32_t>(base_), 0, kNone, 0, kAbsent, kLive, 0, 0};
  if (caches_) owner_reads_[id] = 0;
  index_[slot] = id + 1;
  ++stats_.active;
  return id;
}

void Window::age(Entry& e, uint32_t id) {
  uint32_t passed = static_cast<uint32_t>(base_) - e.touch;
  if (passed == 0) return;
  if (passed >= kRing) {
    e.reads = 0;
    if (caches_) owner_reads_[id] = 0;
  } else {
    uint64_t old = std::rotl((uint64_t{1} << passed) - 1, static_cast<int>(e.touch & (kRing - 1)));
    e.reads &= ~old;
    if (caches_) owner_reads_[id] &= ~old;
  }
  e.touch = static_cast<uint32_t>(base_);
}

uint64_t Window::effective_reads(const Entry& e, uint32_t id) const {
  return !caches_ || (e.flags & kCached) ? e.reads : e.reads | owner_reads_[id];
}

uint8_t Window::deadline(const Entry& e, uint64_t oldest, uint32_t id) const {
  if (e.flags & kForced) return static_cast<uint8_t>(base_ & (kRing - 1));
  uint64_t reads = effective_reads(e, id);
  if (reads == 0) return kInfinity;
  // First step that has to see the oldest update.
  if (config_.staleness >= kRing) return kInfinity;
  uint64_t first = oldest + 1 + config_.staleness;
  uint64_t ahead = std::rotr(reads, static_cast<int>(base_ & (kRing - 1)));
  if (first > base_) {
    uint64_t skip = first - base_;
    if (skip >= kRing) return kInfinity;
    ahead &= ~((uint64_t{1} << skip) - 1);
  }
  if (ahead == 0) return kInfinity;
  return static_cast<uint8_t>((base_ + static_cast<uint64_t>(std::countr_zero(ahead))) &
                              (kRing - 1));
}

void Window::reprioritize(Entry& e, uint32_t id) {
  if (e.seq == kNone) return;
  uint8_t now = deadline(e, update(e.seq)->step, id);
  if (now == e.prio) return;
  StepUpdate* u = update(e.seq);
  bool more_urgent = prio_rank(now, base_) < prio_rank(e.prio, base_);
  if (!u->committed) {
    --u->staged[e.prio];
    ++u->staged[now];
    queue_->adjust_staged(id, now);
  } else {
    more_urgent ? ++stats_.rises : ++stats_.falls;
    --count_[e.prio];
    ++count_[now];
    if (!(e.flags & kClaimed)) {
      --queued_[e.prio];
      ++queued_[now];
      queue_->adjust(id, now);
    }
  }
  e.prio = now;
}

void Window::maybe_free(Entry& e, uint32_t id) {
  if (e.seq != kNone || (e.flags & (kClaimed | kCached)) || e.reads) return;
  if (caches_ && owner_reads_[id]) return;
  e.flags = 0;
  free_.push_back(id);
  --stats_.active;
}

void Window::set_bit(Entry& e, uint32_t id, uint64_t bit, bool owned) {
  if (owned)
    owner_reads_[id] |= bit;
  else
    e.reads |= bit;
  if (e.seq != kNone) reprioritize(e, id);
}

size_t Window::link(Part& part, size_t from, size_t n, bool owned, Urgency urgency) {
  constexpr size_t kChunk = 2048, kAhead = 96;
  const uint32_t* slots = part.row_slots();
  uint32_t* ids = part.ids.as<uint32_t>();
  uint64_t bit = uint64_t{1} << (part.step & (kRing - 1));
  for (size_t at = from, end = from + n; at < end; at += kChunk) {
    Lock lock(*this, urgency);
    if (part.step < base_) return at - from;
    if (owned) use_caches();
    size_t stop = std::min(end, at + kChunk);
    for (size_t i = at; i < std::min(stop, at + kAhead); ++i)
      __builtin_prefetch(&index_[slots[i]], 1);
    for (size_t i = at; i < stop; ++i) {
      if (i + kAhead < stop) __builtin_prefetch(&index_[slots[i + kAhead]], 1);
      if (i + 24 < stop) {
        uint32_t next = index_[slots[i + 24]] - 1;
        if (next < entry_count_) __builtin_prefetch(&entries_[next], 1);
      }
      uint32_t id = find_or_add(slots[i]);
      ids[i] = id;
      Entry& e = entries_[id];
      age(e, id);
      set_bit(e, id, bit, owned && owned_by(slots[i], part.rank));
    }
  }
  return n;
}

void Window::unlink(Part& part, bool owned, const Vector<PartRef>& same_step,
                    const Vector<bool>& same_owned) {
  Lock lock(*this, Urgency::kUrgent);
  uint64_t bit = uint64_t{1} << (part.step & (kRing - 1));
  const uint32_t* ids = part.ids.as<uint32_t>();
  for (size_t i = 0; i < part.distinct; ++i) {
    Entry& e = entries_[ids[i]];
    age(e, ids[i]);
    if (owned && owned_by(e.slot, part.rank))
      owner_reads_[ids[i]] &= ~bit;
    else
      e.reads &= ~bit;
  }
  // Others may read the same rows in the same step: their bits come back.
  for (size_t p = 0; p < same_step.size(); ++p) {
    const Part& other = *same_step[p];
    const uint32_t* other_ids = other.ids.as<uint32_t>();
    for (size_t i = 0; i < other.distinct; ++i) {
      Entry& e = entries_[other_ids[i]];
      if (same_owned[p] && owned_by(e.slot, other.rank))
        owner_reads_[other_ids[i]] |= bit;
      else
        e.reads |= bit;
    }
  }
  for (size_t i = 0; i < part.distinct; ++i) {
    Entry& e = entries_[ids[i]];
    reprioritize(e, ids[i]);
    maybe_free(e, ids[i]);
  }
}

void Window::sweep(const Part& part, size_t from, size_t n) {
  constexpr size_t kChunk = 512;
  const uint32_t* slots = part.row_slots();
  const uint32_t* ids = part.ids.as<uint32_t>();
  for (size_t at = from, end = from + n; at < end; at += kChunk) {
    Lock lock(*this, Urgency::kBackground);
    for (size_t i = at; i < std::min(end, at + kChunk); ++i) {
      Entry& e = entries_[ids[i]];
      if (!(e.flags & kLive) || e.slot != slots[i]) continue;
      age(e, ids[i]);
      maybe_free(e, ids[i]);
    }
  }
}

void Window::add(const UpdateRef& update) {
  Lock lock(*this, Urgency::kUrgent);
  // The ring is indexed by seq; grow it when the place is still taken.
  while (updates_[next_seq_ & (updates_.size() - 1)]) {
    Vector<UpdateRef> bigger(updates_.size() * 2);
    for (UpdateRef& u : updates_)
      if (u) bigger[u->seq & (bigger.size() - 1)] = std::move(u);
    updates_ = std::move(bigger);
  }
  update->seq = next_seq_++;
  if (next_seq_ == kNone) next_seq_ = 0;
  updates_[update->seq & (updates_.size() - 1)] = update;
  update->prepared = 0;
  update->remaining = 0;
  std::fill_n(update->staged, kRing + 1, 0);
}

void Window::forget(StepUpdate& update) {
  Lock lock(*this, Urgency::kUrgent);
  updates_[update.seq & (updates_.size() - 1)].reset();
}

void Window::stage(StepUpdate& u, size_t from, size_t n, const uint32_t* known_ids, uint32_t* ids,
                   Urgency urgency) {
  constexpr size_t kChunk = 1024, kAhead = 24;
  uint32_t unread[kChunk];  // entries without a declared read: most of them
  for (size_t at = from, end = from + n; at < end; at += kChunk) {
    Lock lock(*this, urgency);
    size_t stop = std::min(end, at + kChunk), unreads = 0;
    for (size_t i = at; i < stop; ++i) {
      if (known_ids && i + kAhead < stop) __builtin_prefetch(&entries_[known_ids[i + kAhead]], 1);
      if (!known_ids && i + kAhead < stop) __builtin_prefetch(&index_[u.slots[i + kAhead]], 1);
      uint32_t id = known_ids ? known_ids[i] : find_or_add(u.slots[i]);
      if (ids) ids[i] = id;
      Entry& e = entries_[id];
      age(e, id);
      if (e.seq != kNone) {
        u.late.push_back(uint64_t{id} << 32 | i);
        continue;
      }
      e.seq = u.seq;
      e.row = static_cast<uint32_t>(i);
      e.prio = deadline(e, u.step, id);
      if (e.prio == kInfinity) {
        unread[unreads++] = id;
        continue;
      }
      ++u.staged[e.prio];
      queue_->stage(id, e.prio);
    }
    u.staged[kInfinity] += unreads;
    queue_->stage(unread, unreads, kInfinity);
    u.prepared = stop;
  }
}

void Window::unstage(StepUpdate& u) {
  Lock lock(*this, Urgency::kUrgent);
  queue_->drop_stage();
  for (size_t i = 0; i < u.prepared; ++i) {
    uint32_t id = u.ids[i];
    Entry& e = entries_[id];
    if (e.seq != u.seq) continue;  // a late one: it has older updates, or none any more
    e.seq = kNone;
    e.prio = kAbsent;
    age(e, id);
    maybe_free(e, id);
  }
  u.late.clear();
  u.prepared = 0;
  std::fill_n(u.staged, kRing + 1, 0);
}

void Window::commit(StepUpdate* u, uint64_t step) {
  Lock lock(*this, Urgency::kUrgent);
  uint8_t passed = static_cast<uint8_t>(step & (kRing - 1));
  base_ = step + 1;
  queue_->set_base(base_);
  // Normally nobody is left at the committed step's own priority. A waiter that gave up on rows
  // that it had forced can leave some: they must not seem to be 64 steps away.
  if (count_[passed]) {
    for (uint32_t id = 0; id < entry_count_; ++id) {
      Entry& e = entries_[id];
      if ((e.flags & kLive) && e.seq != kNone && e.prio == passed && update(e.seq)->committed) {
        age(e, id);
        reprioritize(e, id);
      }
    }
  }
  if (!u) return;
  u->committed = true;
  u->remaining = u->n;
  uint64_t pending = 0;
  for (uint32_t p = 0; p <= kRing; ++p) {
    count_[p] += u->staged[p];
    queued_[p] += u->staged[p];
    pending += u->staged[p];
  }
  queue_->commit_stage();
  for (uint64_t packed : u->late) {
    uint32_t id = static_cast<uint32_t>(packed >> 32), row = static_cast<uint32_t>(packed);
    if (!(entries_[id].flags & kLive) || entries_[id].slot != u->slots[row]) {
      // Its older update was written meanwhile and the entry given up.
      id = find_or_add(u->slots[row]);
      const_cast<uint32_t*>(u->ids)[row] = id;
    }
    Entry& e = entries_[id];
    age(e, id);
    if (e.seq != kNone) {
      // Behind the older ones, so that updates of a row are applied in step order.
      StepUpdate* last = update(e.seq);
      uint32_t last_row = e.row;
      while (!last->next.empty() && last->next[last_row]) {
        uint64_t link = last->next[last_row] - 1;
        last = update(static_cast<uint32_t>(link >> 32));
        last_row = static_cast<uint32_t>(link);
      }
      if (last->next.empty()) last->next.resize(last->n, 0);
      last->next[last_row] = (uint64_t{u->seq} << 32 | row) + 1;
    } else {
      e.seq = u->seq;
      e.row = row;
      e.prio = deadline(e, update(e.seq)->step, id);
      ++count_[e.prio];
      ++queued_[e.prio];
      ++pending;
      queue_->push(id, e.prio);
    }
  }
  u->late.clear();
  stats_.enqueued += u->n;
  pending_total_.fetch_add(pending, std::memory_order_acq_rel);
}

bool Window::force(const uint32_t* slots, size_t n, uint64_t before) {
  constexpr size_t kChunk = 512;
  bool any = false;
  for (size_t at = 0; at < n; at += kChunk) {
    Lock lock(*this, Urgency::kUrgent);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      uint32_t id = find(slots[i]);
      if (id == kNone) continue;
      Entry& e = entries_[id];
      if (e.seq == kNone) continue;
      StepUpdate* u = update(e.seq);
      if (!u->committed || u->step >= before) continue;
      any = true;
      e.flags |= kForced;
      age(e, id);
      reprioritize(e, id);
    }
  }
  return any;
}

uint32_t Window::limit_rank(uint64_t step) const {
  if (step == UINT64_MAX) return kRing;
  return step < base_ ? 0 : static_cast<uint32_t>(std::min<uint64_t>(step - base_, kRing - 1));
}

bool Window::pending_until(uint64_t step) {
  if (!any_pending()) return false;
  Lock lock(*this, Urgency::kUrgent);
  uint32_t limit = limit_rank(step);
  if (limit == kRing) return true;
  for (uint32_t r = 0; r <= limit; ++r)
    if (count_[(base_ + r) & (kRing - 1)]) return true;
  return false;
}

bool Window::in_flight_until(uint64_t step) {
  if (!any_pending()) return false;
  Lock lock(*this, Urgency::kUrgent);
  uint32_t limit = limit_rank(step);
  for (uint32_t r = 0; r <= std::min(limit, kRing - 1); ++r) {
    uint32_t p = (base_ + r) & (kRing - 1);
    if (count_[p] != queued_[p]) return true;
  }
  return limit == kRing && count_[kInfinity] != queued_[kInfinity];
}

bool Window::queued_until(uint64_t step) {
  if (!any_pending()) return false;
  Lock lock(*this, Urgency::kBackground);
  uint32_t limit = limit_rank(step);
  for (uint32_t r = 0; r <= std::min(limit, kRing - 1); ++r)
    if (queued_[(base_ + r) & (kRing - 1)]) return true;
  return limit == kRing && queued_[kInfinity];
}

bool Window::claim(uint64_t step, size_t max, Claim* c) {
  c->ids.clear();
  c->nodes.clear();
  c->flat.clear();
  c->chained = false;
  if (!any_pending()) return false;
  Lock lock(*this, Urgency::kUrgent);
  c->ids.resize(max);
  size_t n = queue_->pop(base_, limit_rank(step), c->ids.data(), max);
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t id = c->ids[i];
    if (i + 8 < n) __builtin_prefetch(&entries_[c->ids[i + 8]], 1);
    Entry& e = entries_[id];
    StepUpdate* u = update(e.seq);
    if (!u->committed) {
      queue_->restore_staged(id, e.prio);
      continue;
    }
    e.flags |= kClaimed;
    --queued_[e.prio];
    c->ids[kept++] = id;
    uint32_t nodes = 1;
    c->flat.push_back({u, e.row});
    for (uint32_t row = e.row; !u->next.empty() && u->next[row]; ++nodes) {
      uint64_t link = u->next[row] - 1;
      u = update(static_cast<uint32_t>(link >> 32));
      row = static_cast<uint32_t>(link);
      c->flat.push_back({u, row});
    }
    c->chained |= nodes > 1;
    c->nodes.push_back(nodes);
  }
  c->ids.resize(kept);
  stats_.dequeued += kept;
  return kept != 0;
}

void Window::finish(Claim* c, Vector<UpdateRef>* finished) {
  Lock lock(*this, Urgency::kUrgent);
  size_t at = 0;
  uint64_t done = 0;
  // Rows of one update come in runs: its count is settled once a run.
  StepUpdate* current = nullptr;
  size_t written = 0;
  auto settle = [&] {
    if (current && (current->remaining -= written) == 0) {
      current->written();
      UpdateRef& ref = updates_[current->seq & (updates_.size() - 1)];
      finished->push_back(std::move(ref));
      ref.reset();
    }
    written = 0;
  };
  for (size_t i = 0; i < c->ids.size(); ++i) {
    uint32_t id = c->ids[i];
    if (i + 16 < c->ids.size()) __builtin_prefetch(&entries_[c->ids[i + 16]], 1);
    Entry& e = entries_[id];
    for (uint32_t k = 0; k < c->nodes[i]; ++k, ++at) {
      StepUpdate* u = c->flat[at].update;
      uint32_t row = c->flat[at].row;
      uint64_t link = u->next.empty() ? 0 : u->next[row];
      if (link) {
        e.seq = static_cast<uint32_t>((link - 1) >> 32);
        e.row = static_cast<uint32_t>(link - 1);
      } else {
        e.seq = kNone;
      }
      if (u != current) {
        settle();
        current = u;
      }
      ++written;
    }
    --count_[e.prio];
    e.flags &= static_cast<uint8_t>(~kClaimed);
    e.prio = kAbsent;
    age(e, id);
    if (e.seq == kNone) {
      // Who forced the row waits for all its updates: the mark stays while one is left.
      e.flags &= static_cast<uint8_t>(~kForced);
      ++done;
      maybe_free(e, id);
    } else {
      // A later step updated the row while this claim was being written.
      e.prio = deadline(e, update(e.seq)->step, id);
      ++count_[e.prio];
      ++queued_[e.prio];
      queue_->push(id, e.prio);
    }
  }
  settle();
  pending_total_.fetch_sub(done, std::memory_order_acq_rel);
  c->ids.clear();
}

void Window::use_caches() {
  if (caches_) return;
  // Nobody looked at these words before: they may be of entries that came and went.
  std::fill_n(owner_reads_, entry_count_, 0);
  caches_ = true;
}

void Window::set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty) {
  Lock lock(*this, Urgency::kUrgent);
  if (n) use_caches();
  for (size_t i = 0; i < n; ++i) {
    uint32_t id = cached ? find_or_add(slots[i]) : find(slots[i]);
    if (id == kNone) continue;
    Entry& e = entries_[id];
    age(e, id);
    if (cached) {
      e.flags |= kCached;
    } else {
      e.flags &= static_cast<uint8_t>(~kCached);
      if (dirty && e.seq != kNone && update(e.seq)->committed) ++*dirty;
    }
    reprioritize(e, id);
    maybe_free(e, id);
  }
}

void Window::next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next) {
  Lock lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    next[i] = UINT64_MAX;
    uint32_t id = find(slots[i]);
    if (id == kNone || !caches_) continue;
    age(entries_[id], id);
    uint64_t ahead = std::rotr(owner_reads_[id], static_cast<int>(base_ & (kRing - 1)));
    if (after + 1 > base_) {
      uint64_t skip = after + 1 - base_;
      ahead = skip >= kRing ? 0 : ahead & ~((uint64_t{1} << skip) - 1);
    }
    if (ahead) next[i] = base_ + static_cast<uint64_t>(std::countr_zero(ahead));
  }
}

void Window::collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out) {
  if (!any_pending()) return;
  Lock lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    uint32_t id = find(slots[i]);
    if (id == kNone || entries_[id].seq == kNone) continue;
    if (update(entries_[id].seq)->committed) out->push_back(slots[i]);
  }
}

WindowStats Window::stats() {
  Lock lock(*this, Urgency::kBackground);
  WindowStats s = stats_;
  s.pending = pending_total_.load(std::memory_order_relaxed);
  return s;
}

}  // namespace frugal
