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

namespace {

// Row of `slot` in a sorted list, or n. `from`: a row that is not behind it, where to begin. Calls
// with ascending slots gallop.
size_t find_row(const uint32_t* slots, size_t n, size_t from, uint32_t slot) {
  size_t low = from, step = 1;
  while (low + step < n && slots[low + step] < slot) {
    low += step;
    step *= 2;
  }
  const uint32_t* end = slots + std::min(n, low + step + 1);
  const uint32_t* at = std::lower_bound(slots + low, end, slot);
  return at != end && *at == slot ? static_cast<size_t>(at - slots) : n;
}

}  // namespace

Window::~Window() { os_release(&word_map_); }

Status Window::open(const Config& config, uint64_t base) {
  std::lock_guard<std::mutex> lock(mu_);
  if (opened()) return FRUGAL_OK;
  config_ = config;
  base_ = base;
  // Addresses only: pages come with use, and are zero then, as nobody's row should be.
  FRUGAL_TRY(os_reserve(config.rows * sizeof(Word), false, &word_map_));
  words_ = reinterpret_cast<Word*>(word_map_.base);
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

// --- Words ---------------------------------------------------------------------------------------

void Window::age(Word& w) const {
  uint32_t passed = (static_cast<uint32_t>(base_) - w.stamp) & 511;
  if (passed == 0) return;
  w.reads = passed < kHorizon ? w.reads >> passed : 0;
  w.owner = passed < kHorizon ? w.owner >> passed : 0;
  w.stamp = base_ & 511;
}

uint64_t Window::effective_reads(const Word& w) const {
  return w.cached ? w.reads : w.reads | w.owner;
}

// Of an update of `step` to the row: the first declared step that has to see it. The word is aged.
uint8_t Window::deadline(const Word& w, uint64_t step) const {
  uint64_t reads = effective_reads(w);
  if (reads == 0 || config_.staleness >= kRing) return kInfinity;
  uint64_t first = step + 1 + config_.staleness;
  if (first > base_) reads = first - base_ < kHorizon ? reads >> (first - base_) << (first - base_) : 0;
  if (reads == 0) return kInfinity;
  return static_cast<uint8_t>((base_ + static_cast<uint64_t>(std::countr_zero(reads))) &
                              (kRing - 1));
}

StepUpdate* Window::live(uint32_t writer) const {
  StepUpdate* u = updates_[writer & (updates_.size() - 1)].get();
  return u && (u->seq & (kUpdates - 1)) == writer ? u : nullptr;
}

// The row's oldest unwritten update.
Window::Node Window::pending(const Word& w, uint32_t slot) {
  StepUpdate* u = live(w.writer);
  if (!u || u->staged_rows == 0) return {};
  if (u->cursor >= u->staged_rows || u->slots[u->cursor] > slot) u->cursor = 0;
  size_t row = find_row(u->slots, u->staged_rows, u->cursor, slot);
  if (row == u->staged_rows) return {};
  u->cursor = row;
  Node node{u, static_cast<uint32_t>(row), node_id(*u, static_cast<uint32_t>(row))};
  uint8_t state = state_[node.id];
  return state == kDone || state == kBlocked ? Node{} : node;
}

void Window::reprioritize(const Node& node, uint8_t prio) {
  uint8_t state = state_[node.id], old = state & ~kClaimed;
  if (old == prio) return;
  if (!node.update->committed) {
    --node.update->staged[old];
    ++node.update->staged[prio];
    queue_->adjust_staged(node.id, prio);
  } else {
    prio_rank(prio, base_) < prio_rank(old, base_) ? ++stats_.rises : ++stats_.falls;
    --count_[old];
    ++count_[prio];
    if (!(state & kClaimed)) {
      --queued_[old];
      ++queued_[prio];
      queue_->adjust(node.id, prio);
    }
  }
  state_[node.id] = static_cast<uint8_t>(prio | (state & kClaimed));
}

bool Window::link(Part& part, bool owned, Urgency urgency) {
  constexpr size_t kChunk = 2048, kAhead = 48;
  const uint32_t* slots = part.row_slots();
  part.owner_apart = owned;
  for (size_t at = 0; at < part.distinct; at += kChunk) {
    Lock lock(*this, urgency);
    if (part.step < base_) return false;
    uint64_t bit = uint64_t{1} << (part.step - base_);
    size_t stop = std::min(part.distinct, at + kChunk);
    for (size_t i = at; i < std::min(stop, at + kAhead); ++i)
      __builtin_prefetch(&words_[slots[i]], 1);
    for (size_t i = at; i < stop; ++i) {
      if (i + kAhead < stop) __builtin_prefetch(&words_[slots[i + kAhead]], 1);
      Word w = words_[slots[i]];
      age(w);
      uint64_t before = effective_reads(w);
      if (owned && owner(slots[i], config_.world_size) == part.rank)
        w.owner |= bit;
      else
        w.reads |= bit;
      words_[slots[i]] = w;
      // Only a first read makes a pending update more urgent, unless steps before do not count.
      // (Bit 0 may be the step of a staged update, which does not see itself.)
      if ((before & (bit - 1) & ~uint64_t{1}) && config_.staleness == 0) continue;
      if (before == effective_reads(w)) continue;
      if (Node node = pending(w, slots[i]); node.update)
        reprioritize(node, deadline(w, node.update->step));
    }
  }
  return true;
}

void Window::unlink(const Part& part, const Vector<PartRef>& same_step) {
  Lock lock(*this, Urgency::kUrgent);
  if (part.step < base_) return;
  uint64_t bit = uint64_t{1} << (part.step - base_);
  auto set = [&](const Part& p, bool on) {
    for (size_t i = 0; i < p.distinct; ++i) {
      uint32_t slot = p.row_slots()[i];
      Word& w = words_[slot];
      age(w);
      if (p.owner_apart && owner(slot, config_.world_size) == p.rank)
        w.owner = on ? w.owner | bit : w.owner & ~bit;
      else
        w.reads = on ? w.reads | bit : w.reads & ~bit;
    }
  };
  set(part, false);
  // Others may read the same rows in the same step: their bits come back.
  for (const PartRef& p : same_step) set(*p, true);
  for (size_t i = 0; i < part.distinct; ++i) {
    uint32_t slot = part.row_slots()[i];
    if (Node node = pending(words_[slot], slot); node.update)
      reprioritize(node, deadline(words_[slot], node.update->step));
  }
}

// --- Updates -------------------------------------------------------------------------------------

bool Window::add(const UpdateRef& update) {
  Lock lock(*this, Urgency::kUrgent);
  // The ring is indexed by number; it grows when the place is still taken.
  while (updates_[next_ & (updates_.size() - 1)]) {
    if (updates_.size() == kUpdates) return false;
    Vector<UpdateRef> bigger(updates_.size() * 2);
    for (UpdateRef& u : updates_)
      if (u) bigger[u->seq & (bigger.size() - 1)] = std::move(u);
    updates_ = std::move(bigger);
  }
  while (update->pages.size() * kPage < update->n) {
    if (free_pages_.empty()) {
      size_t pages = std::max<size_t>(4, pages_.size() * 2);
      state_.resize(pages * kPage, kDone);
      queue_->reserve_ids(static_cast<uint32_t>(pages * kPage));
      free_pages_.reserve(pages);
      for (size_t p = pages; p > pages_.size(); --p)
        free_pages_.push_back(static_cast<uint32_t>(p - 1));
      pages_.resize(pages);
    }
    pages_[free_pages_.back()] = {update.get(),
                                  static_cast<uint32_t>(update->pages.size() * kPage)};
    update->pages.push_back(free_pages_.back());
    free_pages_.pop_back();
  }
  update->seq = next_++;
  updates_[update->seq & (updates_.size() - 1)] = update;
  span_.store(next_ - oldest_, std::memory_order_relaxed);
  return true;
}

void Window::stage(StepUpdate& u, Urgency urgency) {
  constexpr size_t kAhead = 48;
  uint32_t ids[kPage];
  uint8_t prio[kPage];
  uint32_t start[kRing + 2];
  for (size_t at = 0; at < u.n; at += kPage) {
    Lock lock(*this, urgency);
    const size_t n = std::min<size_t>(kPage, u.n - at);
    const uint32_t* slots = u.slots + at;
    const uint32_t first = u.pages[at / kPage] * kPage;
    uint8_t* state = state_.data() + first;
    std::fill_n(start, kRing + 2, 0);
    for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&words_[slots[i]], 1);
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&words_[slots[i + kAhead]], 1);
      Word w = words_[slots[i]];
      age(w);
      // All ranks have passed the gate of the step: what it reads has nothing unwritten.
      bool clean = config_.staleness == 0 && u.step >= base_ && u.step - base_ < kHorizon &&
                   (w.reads >> (u.step - base_) & 1);
      if (!clean && pending(w, slots[i]).update) {
        state[i] = prio[i] = kBlocked;
        u.late.push_back(static_cast<uint32_t>(at + i));
      } else {
        w.writer = u.seq & (kUpdates - 1);
        state[i] = prio[i] = deadline(w, u.step);
        ++start[prio[i] + 1];
      }
      words_[slots[i]] = w;
    }
    // By priority, so that a bag gets its rows at once.
    for (uint32_t p = 0; p <= kRing; ++p) {
      u.staged[p] += start[p + 1];
      start[p + 1] += start[p];
    }
    uint32_t next[kRing + 1];
    std::copy_n(start, kRing + 1, next);
    for (size_t i = 0; i < n; ++i)
      if (prio[i] != kBlocked) ids[next[prio[i]]++] = first + static_cast<uint32_t>(i);
    for (uint32_t p = 0; p <= kRing; ++p)
      if (start[p + 1] != start[p])
        queue_->stage(ids + start[p], start[p + 1] - start[p], static_cast<uint8_t>(p));
    u.staged_rows = at + n;
  }
}

// The oldest numbers whose updates are gone need no place any more.
void Window::close_gap() {
  while (oldest_ != next_ && !updates_[oldest_ & (updates_.size() - 1)]) ++oldest_;
  span_.store(next_ - oldest_, std::memory_order_relaxed);
}

void Window::release(StepUpdate& u) {
  for (uint32_t page : u.pages) {
    pages_[page] = {};
    free_pages_.push_back(page);
  }
  u.pages.clear();
  u.staged_rows = 0;
  updates_[u.seq & (updates_.size() - 1)].reset();
  close_gap();
}

void Window::unstage(StepUpdate& u) {
  UpdateRef keep;
  Lock lock(*this, Urgency::kUrgent);
  keep = updates_[u.seq & (updates_.size() - 1)];
  queue_->drop_stage();
  for (size_t i = 0; i < u.staged_rows; ++i) state_[node_id(u, static_cast<uint32_t>(i))] = kDone;
  release(u);
}

void Window::commit(StepUpdate* u, uint64_t step) {
  Lock lock(*this, Urgency::kUrgent);
  uint8_t passed = static_cast<uint8_t>(step & (kRing - 1));
  base_ = step + 1;
  queue_->set_base(base_);
  // Normally nobody is left at the committed step's own priority. A waiter that gave up on rows
  // that it had forced can leave some: they must not seem to be 64 steps away.
  if (count_[passed])
    for (const UpdateRef& other : updates_) {
      if (!other || !other->committed) continue;
      for (uint32_t row = 0; row < other->n; ++row) {
        Node node{other.get(), row, node_id(*other, row)};
        if ((state_[node.id] & ~kClaimed) != passed) continue;
        Word& w = words_[other->slots[row]];
        age(w);
        reprioritize(node, deadline(w, other->step));
      }
    }
  if (!u) return;
  u->committed = true;
  u->remaining = u->n;
  uint64_t pending_rows = 0;
  for (uint32_t p = 0; p <= kRing; ++p) {
    count_[p] += u->staged[p];
    queued_[p] += u->staged[p];
    pending_rows += u->staged[p];
  }
  queue_->commit_stage();
  for (uint32_t row : u->late) {
    uint32_t slot = u->slots[row];
    Word& w = words_[slot];
    age(w);
    if (Node node = pending(w, slot); node.update) {
      // Behind the older ones, so that updates of a row are applied in step order.
      StepUpdate* last = node.update;
      uint32_t last_row = node.row;
      while (!last->next.empty() && last->next[last_row]) {
        uint64_t link = last->next[last_row] - 1;
        last = live(static_cast<uint32_t>(link >> 32) & (kUpdates - 1));
        last_row = static_cast<uint32_t>(link);
      }
      if (last->next.empty()) last->next.resize(last->n, 0);
      last->next[last_row] = (uint64_t{u->seq} << 32 | row) + 1;
      continue;
    }
    // The older update was written meanwhile.
    w.writer = u->seq & (kUpdates - 1);
    uint8_t prio = deadline(w, u->step);
    uint32_t id = node_id(*u, row);
    state_[id] = prio;
    ++count_[prio];
    ++queued_[prio];
    ++pending_rows;
    queue_->push(id, prio);
  }
  u->late.clear();
  stats_.enqueued += u->n;
  pending_total_.fetch_add(pending_rows, std::memory_order_acq_rel);
}

// --- Asking --------------------------------------------------------------------------------------

bool Window::force(const uint32_t* slots, size_t n, uint64_t before) {
  constexpr size_t kChunk = 512;
  bool any = false;
  for (size_t at = 0; at < n; at += kChunk) {
    Lock lock(*this, Urgency::kUrgent);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      Node node = pending(words_[slots[i]], slots[i]);
      if (!node.update || !node.update->committed || node.update->step >= before) continue;
      any = true;
      reprioritize(node, static_cast<uint8_t>(base_ & (kRing - 1)));
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

bool Window::claim(uint64_t step, size_t max, Claim* c) {
  c->ids.clear();
  c->rows.clear();
  c->runs.clear();
  if (!any_pending()) return false;
  Lock lock(*this, Urgency::kUrgent);
  c->ids.resize(max);
  size_t n = queue_->pop(base_, limit_rank(step), c->ids.data(), max);
  c->rows.resize(n);
  uint32_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t id = c->ids[i];
    const Page& page = pages_[id / kPage];
    StepUpdate* u = page.update;
    uint8_t prio = state_[id];
    if (!u->committed) {
      queue_->restore_staged(id, prio);
      continue;
    }
    state_[id] = prio | kClaimed;
    --queued_[prio];
    c->ids[kept] = id;
    c->rows[kept] = page.first_row + id % kPage;
    if (c->runs.empty() || c->runs.back().update != u) c->runs.push_back({u, kept, kept});
    c->runs.back().end = ++kept;
  }
  c->ids.resize(kept);
  c->rows.resize(kept);
  stats_.dequeued += kept;
  return kept != 0;
}

void Window::finish(const Claim& c, Vector<UpdateRef>* finished) {
  Lock lock(*this, Urgency::kUrgent);
  uint64_t done = 0;
  for (const Claim::Run& run : c.runs) {
    StepUpdate* u = run.update;
    for (uint32_t i = run.begin; i < run.end; ++i) {
      uint32_t id = c.ids[i];
      --count_[state_[id] & ~kClaimed];
      state_[id] = kDone;
    }
    if (u->next.empty()) {
      done += run.end - run.begin;
    } else {
      for (uint32_t i = run.begin; i < run.end; ++i) {
        uint64_t link = u->next[c.rows[i]];
        if (!link) {
          ++done;
          continue;
        }
        // A later step updated the row, too: that is its turn now.
        StepUpdate* after = live(static_cast<uint32_t>((link - 1) >> 32) & (kUpdates - 1));
        uint32_t row = static_cast<uint32_t>(link - 1), id = node_id(*after, row);
        Word& w = words_[after->slots[row]];
        age(w);
        w.writer = after->seq & (kUpdates - 1);
        uint8_t prio = deadline(w, after->step);
        state_[id] = prio;
        ++count_[prio];
        ++queued_[prio];
        queue_->push(id, prio);
      }
    }
    if ((u->remaining -= run.end - run.begin) == 0) {
      u->written();
      finished->push_back(updates_[u->seq & (updates_.size() - 1)]);
      release(*u);
    }
  }
  pending_total_.fetch_sub(done, std::memory_order_acq_rel);
}

// --- Caches --------------------------------------------------------------------------------------

void Window::set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty) {
  Lock lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    Word& w = words_[slots[i]];
    age(w);
    w.cached = cached;
    Node node = pending(w, slots[i]);
    if (!node.update) continue;
    if (dirty && !cached && node.update->committed) ++*dirty;
    reprioritize(node, deadline(w, node.update->step));
  }
}

void Window::next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next) {
  Lock lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    next[i] = UINT64_MAX;
    Word& w = words_[slots[i]];
    age(w);
    uint64_t ahead = w.owner;
    if (after >= base_) ahead = after + 1 - base_ < kHorizon ? ahead >> (after + 1 - base_) << (after + 1 - base_) : 0;
    if (ahead) next[i] = base_ + static_cast<uint64_t>(std::countr_zero(ahead));
  }
}

void Window::collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out) {
  if (!any_pending()) return;
  Lock lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    Node node = pending(words_[slots[i]], slots[i]);
    if (node.update && node.update->committed) out->push_back(slots[i]);
  }
}

WindowStats Window::stats() {
  Lock lock(*this, Urgency::kBackground);
  WindowStats s = stats_;
  s.pending = s.active = pending_total_.load(std::memory_order_relaxed);
  return s;
}

}  // namespace frugal
