#include "window/window.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <type_traits>

#include "base/assert.h"
#include "base/os.h"

namespace frugal {

namespace {

// Of a part and of an update.
[[maybe_unused]] bool ascending(const uint32_t* slots, size_t n) {
  return std::adjacent_find(slots, slots + n, std::greater_equal<>()) == slots + n;
}

}  // namespace

// A lock of the window. A background pass steps back while an urgent thread waits: a plain mutex
// would let the pass take it again and again. Locks are held for tens of microseconds, a chunk of
// rows; to sleep and to be woken costs as much, so threads look again for a while first.
class SCOPED_CAPABILITY Window::Lock {
 public:
  Lock(Mutex& mu, std::atomic<int>& urgent, Urgency urgency) ACQUIRE(mu) NO_THREAD_SAFETY_ANALYSIS : mu_(mu) {
    if (urgency == Urgency::kUrgent) {
      if (mu_.try_lock()) return;
      urgent.fetch_add(1, std::memory_order_relaxed);
      if (!spin([&] { return mu_.try_lock(); })) mu_.lock();
      urgent.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    if (urgent.load(std::memory_order_relaxed) != 0)
      spin([&] { return urgent.load(std::memory_order_relaxed) == 0; });
    if (!spin([&] { return mu_.try_lock(); })) mu_.lock();
  }
  Lock(Window& w, Urgency urgency) ACQUIRE(w.mu_) : Lock(w.mu_, w.urgent_, urgency) {
    nodes_of_ = &w;
  }
  ~Lock() RELEASE() NO_THREAD_SAFETY_ANALYSIS {
    if (nodes_of_) nodes_of_->note_soonest();
    mu_.unlock();
  }

 private:
  Mutex& mu_;
  Window* nodes_of_ = nullptr;  // if it is the lock of a window's nodes
};

class SCOPED_CAPABILITY Window::BothLocks {
 public:
  BothLocks(Window& w, Urgency urgency) ACQUIRE(w.links_mu_, w.mu_)
      : links_(w.links_mu_, w.links_urgent_, urgency), nodes_(w, urgency) {}
  ~BothLocks() RELEASE() {}

 private:
  Lock links_, nodes_;
};

Window::~Window() { os_release(&word_map_); }

Status Window::open(const Config& config, uint64_t base) {
  BothLocks lock(*this, Urgency::kUrgent);
  if (opened()) return FRUGAL_OK;
  config_ = config;
  // Beyond what words hold, nothing is urgent.
  config_.staleness = std::min<uint64_t>(config.staleness, kRing);
  words_only_ = config.staleness != 0;
  base_ = base;
  queue_.reset(config.tree_heap ? make_tree_heap() : make_two_level_queue());
  queue_->set_base(base);
  // Addresses only: pages come with use, and are zero then, as nobody's row should be. Last, so that an
  // open that fails holds none.
  FRUGAL_TRY(os_reserve(config.rows * sizeof(Word), false, &word_map_));
  words_ = reinterpret_cast<Word*>(word_map_.base);
  opened_.store(true, std::memory_order_release);
  return FRUGAL_OK;
}

uint64_t Window::base() {
  Lock lock(*this, Urgency::kUrgent);
  return base_;
}

void Window::set_base(uint64_t base) {
  BothLocks lock(*this, Urgency::kUrgent);
  base_ = base;
  queue_->set_base(base);
}

// --- Words ---------------------------------------------------------------------------------------

// The word with its stamp at `base`.
inline Window::Word Window::aged(Word w, uint64_t base) {
  uint64_t passed = std::min<uint64_t>((base - (w >> kStampAt)) & kStamp, 63);
  Word reads = (w & kReads) >> passed;
  // What the owner has read is of the past like all else.
  Word owner = (w >> kOwnerAt & kOwner) << kPast >> passed;
  return reads | (owner & kPassed) | owner >> kPast << kOwnerAt | (w & kCached) |
         (base & kStamp) << kStampAt;
}

// Steps from the stamp on whose reads count.
inline uint64_t Window::effective_reads(Word aged) {
  uint64_t owner = aged & kCached ? 0 : aged >> kOwnerAt & kOwner;
  return (aged & kReads) >> kPast | owner;
}

// Of an update of `step` to the row: the first declared step that has to see it.
inline uint8_t Window::deadline(Word aged, uint64_t step) const {
  uint64_t first = step + 1 + config_.staleness;
  uint64_t skip = std::min<uint64_t>(first > base_ ? first - base_ : 0, 63);
  uint64_t reads = effective_reads(aged) >> skip;
  if (reads == 0) return kInfinity;
  return static_cast<uint8_t>((base_ + skip + static_cast<uint64_t>(std::countr_zero(reads))) &
                              (kRing - 1));
}

// Bits of `reads` that stand for unwritten updates. `ancient`: there are some of older steps, too.
uint64_t Window::written_mask(bool* ancient) const {
  uint64_t mask = 0;
  *ancient = false;
  for (const UpdateRef& u : updates_) {
    if (u->step + kPast < base_)
      *ancient = true;
    else
      mask |= uint64_t{1} << (u->step + kPast - base_);
  }
  return mask;
}

StepUpdate* Window::find_update(uint32_t seq) const {
  for (const UpdateRef& u : updates_)
    if (u->seq == seq) return u.get();
  return nullptr;
}

Window::Node Window::find_node(StepUpdate& u, uint32_t slot) {
  uint32_t row;
  if (u.ranks.size() == 1 && u.ranks[0].part->finder.built()) {
    row = RowFinder::find(u.slots, u.ranks[0].part->finder.near(slot), slot);
    if (row == UINT32_MAX) return {};
  } else {
    const uint32_t* at = std::lower_bound(u.slots, u.slots + u.n, slot);
    if (at == u.slots + u.n || *at != slot) return {};
    row = static_cast<uint32_t>(at - u.slots);
  }
  return {&u, row, node_id(u, row)};
}

// The row's oldest unwritten update.
Window::Node Window::pending(Word aged, uint32_t slot) {
  for (const UpdateRef& u : updates_) {
    // Of old steps words know nothing.
    if (u->step + kPast >= base_ && !(aged >> (u->step + kPast - base_) & 1)) continue;
    Node node = find_node(*u, slot);
    if (!node.update) continue;
    uint8_t state = state_[node.id];
    if (state != kDone && state != kBlocked) return node;
  }
  return {};
}

// The row is read in declared step `step`, and next with priority `prio`.
void Window::learn_next(uint64_t step, uint32_t slot, uint8_t prio) {
  for (const PartRef& p : parts_[step & (kRing - 1)]) {
    if (!p->finder.built()) continue;
    uint32_t row = RowFinder::find(p->row_slots(), p->finder.near(slot), slot);
    if (row != UINT32_MAX) p->next.as<uint8_t>()[row] = prio;
  }
}

void Window::reprioritize(const Node& node, uint8_t prio) noexcept {
  uint8_t state = state_[node.id], old = state & ~kClaimed;
  FRUGAL_ASSERT(old <= kInfinity);
  if (old == prio) return;
  // The queue first: it may want memory. Where there is none the row stays where it is.
  try {
    if (!node.update->committed)
      queue_->stage(&node.id, 1, prio);
    else if (!(state & kClaimed))
      queue_->move(node.id, prio);
  } catch (const std::bad_alloc&) {
    (node.update->committed ? astray_ : node.update->astray) = true;
    return;
  }
  if (!node.update->committed) {
    --node.update->staged[old];
    ++node.update->staged[prio];
  } else {
    if (!(state & kClaimed)) {
      --queued_[old];
      ++queued_[prio];
    }
    prio_rank(prio, base_) < prio_rank(old, base_) ? ++stats_.rises : ++stats_.falls;
    --count_[old];
    ++count_[prio];
  }
  state_[node.id] = static_cast<uint8_t>(prio | (state & kClaimed));
}

// A row that waited for nothing but its turn becomes pending.
void Window::enqueue(uint32_t id, uint8_t prio) noexcept {
  FRUGAL_ASSERT(state_[id] == kBlocked);
  state_[id] = prio;
  ++count_[prio];
  ++queued_[prio];
  try {
    queue_->push(id, prio);
  } catch (const std::bad_alloc&) {
    astray_ = true;
  }
}

bool Window::link(const PartRef& ref, size_t from, size_t n, bool owned, Urgency urgency) {
  constexpr size_t kChunk = std::extent_v<decltype(found_)>, kAhead = 96;
  Part& part = *ref;
  const uint32_t* slots = part.row_slots();
  uint8_t* next = part.next.as<uint8_t>();
  FRUGAL_ASSERT(from != 0 || ascending(slots, part.distinct));
  part.owner_apart = owned;
  const size_t end = std::min(part.distinct, from + n);
  for (size_t at = from; at < std::max<size_t>(end, from + 1); at += kChunk) {
    Lock lock(links_mu_, links_urgent_, urgency);
    if (part.step < base_ || part.step - base_ >= kHorizon) return false;
    if (at == 0) parts_[part.step & (kRing - 1)].push_back(ref);
    if (owned) words_only_ = true;
    const uint64_t base = base_, own = part.step - base, bit = uint64_t{1} << own;
    const uint8_t prio = static_cast<uint8_t>(part.step & (kRing - 1));
    uint64_t written;
    bool ancient;
    {
      Lock nodes(*this, urgency);
      written = written_mask(&ancient);  // who takes an update in holds both locks, so no bit is missing
    }
    // Earlier steps that will read, or that have an unwritten update.
    const uint64_t matters = ((bit << kPast) - 1) & (~kPassed | written);
    Found* const found = found_;
    size_t stop = std::min(end, at + kChunk), finds = 0;
    for (size_t i = at; i < std::min(stop, at + kAhead); ++i)
      __builtin_prefetch(&words_[slots[i]], 1);
    for (size_t i = at; i < stop; ++i) {
      if (i + kAhead < stop) __builtin_prefetch(&words_[slots[i + kAhead]], 1);
      Word w = aged(words_[slots[i]], base);
      bool apart = owned && config_.placement.may_cache(part.rank, slots[i]);
      Word linked = w | (apart ? bit << kOwnerAt : bit << kPast);
      words_[slots[i]] = linked;
      if (words_only_) {
        if ((w & written) || ancient) found[finds++] = {slots[i], -1, 0};
        continue;
      }
      next[i] = deadline(w, part.step);
      if ((w & matters) == 0 && !ancient) continue;
      uint64_t earlier = w & ((bit << kPast) - 1) & kReads;
      found[finds++] = {slots[i], static_cast<int>(std::bit_width(earlier)) - 1 - static_cast<int>(kPast), 0};
    }
    // In two passes, so that the lists' cache lines come meanwhile.
    for (size_t f = 0; f < finds; ++f) {
      if (found[f].step < 0) continue;
      const Vector<PartRef>& there = parts_[(base + static_cast<uint64_t>(found[f].step)) & (kRing - 1)];
      if (there.size() != 1 || !there[0]->finder.built()) continue;
      found[f].from = there[0]->finder.near(found[f].slot);
      __builtin_prefetch(there[0]->row_slots() + found[f].from);
      __builtin_prefetch(there[0]->next.as<uint8_t>() + found[f].from, 1);
    }
    size_t kept = 0;
    for (size_t f = 0; f < finds; ++f) {
      uint32_t slot = found[f].slot;
      if (found[f].step >= 0) {
        uint64_t step = base + static_cast<uint64_t>(found[f].step);
        const Vector<PartRef>& there = parts_[step & (kRing - 1)];
        if (there.size() == 1) {
          uint32_t row = RowFinder::find(there[0]->row_slots(), found[f].from, slot);
          if (row != UINT32_MAX) there[0]->next.as<uint8_t>()[row] = prio;
        } else {
          learn_next(step, slot, prio);
        }
      }
      // Its update may be there already.
      // (Whatever the step before seems to be, if the update is so old that the stamp may have wrapped.)
      if (ancient || (found[f].step <= 0 && (words_[slot] & written))) found[kept++] = found[f];
    }
    if (kept == 0) continue;
    Lock nodes(*this, urgency);
    for (size_t f = 0; f < kept; ++f) {
      Word w = words_[found[f].slot];
      if (Node node = pending(w, found[f].slot); node.update)
        reprioritize(node, deadline(w, node.update->step));
    }
  }
  return true;
}

void Window::unlink(const PartRef& part) {
  BothLocks lock(*this, Urgency::kUrgent);
  if (part->step < base_) return;
  Vector<PartRef>& here = parts_[part->step & (kRing - 1)];
  here.erase(std::remove(here.begin(), here.end(), part), here.end());
  const uint64_t own = part->step - base_, bit = uint64_t{1} << own;
  auto set = [&](const Part& p, bool on) REQUIRES(links_mu_) {
    for (size_t i = 0; i < p.distinct; ++i) {
      uint32_t slot = p.row_slots()[i];
      Word& w = words_[slot];
      bool apart = p.owner_apart && config_.placement.may_cache(p.rank, slot);
      Word mask = apart ? bit << kOwnerAt : bit << kPast;
      w = on ? aged(w, base_) | mask : aged(w, base_) & ~mask;
    }
  };
  set(*part, false);
  // Others may read the same rows in the same step: their bits come back.
  for (const PartRef& p : here) set(*p, true);
  for (size_t i = 0; i < part->distinct; ++i) {
    uint32_t slot = part->row_slots()[i];
    Word w = words_[slot];
    if (!(w & bit << kPast)) {
      uint64_t earlier = (w & kReads) >> kPast & (bit - 1);
      if (earlier) {
        uint64_t step = base_ + static_cast<uint64_t>(std::bit_width(earlier)) - 1;
        learn_next(step, slot, deadline(w, part->step));
      }
    }
    if (Node node = pending(w, slot); node.update) reprioritize(node, deadline(w, node.update->step));
  }
}

// --- Updates -------------------------------------------------------------------------------------

void Window::add(const UpdateRef& update) {
  BothLocks lock(*this, Urgency::kUrgent);
  FRUGAL_ASSERT(update->pages.empty() && update->staged_rows == 0);
  FRUGAL_ASSERT(updates_.empty() || updates_.back()->step < update->step);
  FRUGAL_ASSERT(ascending(update->slots, update->n));
  // First all that may want memory.
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

bool Window::stage(StepUpdate& u, bool declared, size_t most, Urgency urgency) {
  constexpr size_t kAhead = 48;
  uint32_t ids[kPage];
  uint8_t prio[kPage];
  uint16_t read[kPage];
  uint32_t start[kRing + 1], next[kRing];
  static_assert(kPiece % kPage == 0);
  FRUGAL_ASSERT(!u.committed);
  const size_t end = std::min(u.n, u.staged_rows + std::min(most, u.n));
  for (size_t at = u.staged_rows; at < end; at += kPage) {
    BothLocks lock(*this, urgency);
    const size_t n = std::min<size_t>(kPage, u.n - at);
    const uint32_t* slots = u.slots + at;
    const uint32_t first = u.pages[at / kPage] * kPage;
    uint8_t* state = state_.data() + first;
    if (declared && !words_only_) {
      // All ranks have passed the gate of the step: the rows that it reads have nothing unwritten.
      if (u.ranks.size() == 1) {
        std::copy_n(u.ranks[0].part->next.as<uint8_t>() + at, n, prio);
      } else {
        for (size_t i = 0; i < n; ++i) {
          uint32_t term = u.term_start[at + i];
          prio[i] = u.ranks[u.term_rank[term]].part->next.as<uint8_t>()[u.term_index[term]];
        }
      }
      std::copy_n(prio, n, state);
    } else {
      const uint64_t own = u.step + kPast - base_;
      bool ancient;
      const uint64_t written = written_mask(&ancient) & ~(uint64_t{1} << own);
      if ((written || ancient) && u.late.capacity() < u.late.size() + n) u.late.reserve(2 * u.late.size() + n);
      for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&words_[slots[i]], 1);
      for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) __builtin_prefetch(&words_[slots[i + kAhead]], 1);
        Word w = aged(words_[slots[i]], base_);
        words_[slots[i]] = w | uint64_t{1} << own;
        if (((w & written) || ancient) && pending(w, slots[i]).update) {
          state[i] = prio[i] = kBlocked;
          u.late.push_back(static_cast<uint32_t>(at + i));
          continue;
        }
        state[i] = prio[i] = deadline(w, u.step);
      }
    }
    // By priority, so that a bag gets its rows at once. Most have none.
    size_t reads = 0, unread = 0;
    for (size_t i = 0; i < n; ++i) {
      ids[unread] = first + static_cast<uint32_t>(i);
      unread += prio[i] == kInfinity;
      read[reads] = static_cast<uint16_t>(i);
      reads += prio[i] < kInfinity;
    }
    u.staged[kInfinity] += unread;
    queue_->stage(ids, unread, kInfinity);
    std::fill_n(start, kRing + 1, 0);
    for (size_t i = 0; i < reads; ++i) ++start[prio[read[i]] + 1];
    for (uint32_t p = 0; p < kRing; ++p) {
      u.staged[p] += start[p + 1];
      start[p + 1] += start[p];
    }
    std::copy_n(start, kRing, next);
    for (size_t i = 0; i < reads; ++i) ids[next[prio[read[i]]]++] = first + read[i];
    for (uint32_t p = 0; p < kRing; ++p)
      if (start[p + 1] != start[p])
        queue_->stage(ids + start[p], start[p + 1] - start[p], static_cast<uint8_t>(p));
    u.staged_rows = at + n;
  }
  return u.staged_rows == u.n;
}

void Window::release(StepUpdate& u) {
  FRUGAL_ASSERT(!u.committed || u.remaining == 0);
  for (uint32_t page : u.pages) {
    FRUGAL_ASSERT(pages_[page].update == &u);
    pages_[page] = {};
    free_pages_.push_back(page);
  }
  u.pages.clear();
  u.staged_rows = 0;
  for (auto at = updates_.begin(); at != updates_.end(); ++at)
    if (at->get() == &u) {
      updates_.erase(at);
      break;
    }
  live_.store(static_cast<uint32_t>(updates_.size()), std::memory_order_relaxed);
}

void Window::staged_for_next(const StepUpdate& u, Vector<uint32_t>* slots) {
  const uint8_t prio = static_cast<uint8_t>((u.step + 1) & (kRing - 1));
  for (size_t at = 0; at < u.n; at += kPage) {
    Lock lock(*this, Urgency::kBackground);
    if (at == 0) slots->reserve(u.staged[prio]);
    const uint8_t* state = state_.data() + u.pages[at / kPage] * kPage;
    const size_t n = std::min<size_t>(kPage, u.n - at);
    for (size_t i = 0; i < n; ++i)
      if (state[i] == prio) slots->push_back(u.slots[at + i]);
  }
}

void Window::unstage(const UpdateRef& update) {
  StepUpdate& u = *update;
  Lock lock(*this, Urgency::kUrgent);
  FRUGAL_ASSERT(!u.committed);
  queue_->drop_stage();
  // (Of a piece that memory ran short for some rows are in.)
  for (uint32_t page : u.pages) std::fill_n(state_.begin() + page * kPage, kPage, kDone);
  std::fill_n(u.staged, kRing + 1, 0);
  u.late.clear();
  u.astray = false;
  release(u);
}

void Window::make_room(const StepUpdate& update) {
  if (update.late.empty()) return;
  Lock lock(*this, Urgency::kUrgent);
  for (const UpdateRef& older : updates_)
    if (older->committed) older->next.reserve(older->n);
}

void Window::commit(StepUpdate* u, uint64_t step) {
  Vector<PartRef> served;
  BothLocks lock(*this, Urgency::kUrgent);
  FRUGAL_ASSERT(step >= base_);
  FRUGAL_ASSERT(!u || (u->step == step && !u->committed && u->staged_rows == u->n));
  uint8_t passed = static_cast<uint8_t>(step & (kRing - 1));
  served.swap(parts_[passed]);
  base_ = step + 1;
  queue_->set_base(base_);
  // Normally nobody is left at the committed step's own priority. A waiter that gave up on rows
  // that it had forced can leave some: they must not seem to be 64 steps away.
  if (count_[passed])
    for (const UpdateRef& other : updates_) {
      if (!other->committed) continue;
      for (uint32_t row = 0; row < other->n; ++row) {
        Node node{other.get(), row, node_id(*other, row)};
        if ((state_[node.id] & ~kClaimed) != passed) continue;
        reprioritize(node, deadline(aged(words_[other->slots[row]], base_), other->step));
      }
    }
  if (!u) return;
  u->committed = true;
  u->remaining = u->n;
  astray_ |= u->astray;
  uint64_t pending_rows = 0;
  for (uint32_t p = 0; p <= kRing; ++p) {
    count_[p] += u->staged[p];
    queued_[p] += u->staged[p];
    pending_rows += u->staged[p];
  }
  queue_->commit_stage();
  for (uint32_t row : u->late) {
    uint32_t slot = u->slots[row];
    Word w = aged(words_[slot], base_);
    if (Node node = pending(w, slot); node.update) {
      // Behind the older ones, so that updates of a row are applied in step order.
      StepUpdate* last = node.update;
      uint32_t last_row = node.row;
      while (!last->next.empty() && last->next[last_row]) {
        uint64_t link = last->next[last_row] - 1;
        last = find_update(static_cast<uint32_t>(link >> 32));
        last_row = static_cast<uint32_t>(link);
      }
      FRUGAL_ASSERT(last->committed && last->step < u->step);
      if (last->next.empty()) last->next.resize(last->n, 0);
      last->next[last_row] = (uint64_t{u->seq} << 32 | row) + 1;
      continue;
    }
    // The older update was written meanwhile.
    enqueue(node_id(*u, row), deadline(w, u->step));
    ++pending_rows;
  }
  u->late.clear();
  stats_.enqueued += u->n;
  schedule_point();
  pending_total_.fetch_add(pending_rows, std::memory_order_acq_rel);
}

// --- Asking --------------------------------------------------------------------------------------

bool Window::force(const uint32_t* slots, size_t n, uint64_t before) {
  constexpr size_t kChunk = 512;
  bool any = false;
  for (size_t at = 0; at < n; at += kChunk) {
    BothLocks lock(*this, Urgency::kUrgent);
    for (size_t i = at; i < std::min(n, at + kChunk); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      Node node = pending(aged(words_[slots[i]], base_), slots[i]);
      if (!node.update || !node.update->committed || node.update->step >= before) continue;
      any = true;
      reprioritize(node, static_cast<uint8_t>(base_ & (kRing - 1)));
    }
  }
  return any;
}

uint32_t Window::limit_rank(uint64_t step) const {
  if (step == UINT64_MAX || astray_) return kRing;
  return step < base_ ? 0 : static_cast<uint32_t>(std::min<uint64_t>(step - base_, kRing - 1));
}

// What pending_until() asks, once a section: gates look at many tables again and again.
void Window::note_soonest() {
  uint64_t soonest = astray_ ? 0 : UINT64_MAX;
  for (uint32_t r = 0; r < kRing && soonest == UINT64_MAX; ++r)
    if (count_[(base_ + r) & (kRing - 1)]) soonest = r ? base_ + r : 0;
  if (soonest != soonest_.load(std::memory_order_relaxed))
    soonest_.store(soonest, std::memory_order_release);
}

bool Window::pending_until(uint64_t step) const {
  return any_pending() && soonest_.load(std::memory_order_acquire) <= step;
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
  c->reserve(max);
  Lock lock(*this, Urgency::kUrgent);
  pop(step, max, c);
  return !c->ids.empty();
}

void Window::pop(uint64_t step, size_t max, Claim* c) {
  c->ids.resize(max);
  c->rows.resize(max);
  // Neighbours are mostly of one page and one priority: what holds for them is looked up once.
  uint32_t kept = 0, first_id = 0, first_row = 0, same = 0;
  StepUpdate* u = nullptr;
  uint8_t last = 0;
  constexpr size_t kAhead = 32;
  for (bool more = true; more && kept < max;) {
    uint32_t* const ids = c->ids.data() + kept;
    uint8_t lowest = 0;
    const size_t n =
        astray_ ? search(ids, max) : queue_->pop(base_, limit_rank(step), ids, max - kept, &lowest);
    more = n != 0 && !astray_;
    for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&state_[ids[i]], 1);
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&state_[ids[i + kAhead]], 1);
      const uint32_t id = ids[i];
      const uint8_t prio = state_[id];
      if (prio != lowest && !astray_) continue;  // a stale place
      if (!u || id / kPage != first_id / kPage) {
        const Page& page = pages_[id / kPage];
        FRUGAL_ASSERT(page.update);
        if (!page.update->committed) continue;  // stale, too: the row is staged for the same priority
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

// Pending rows, wherever the queue has them.
size_t Window::search(uint32_t* ids, size_t max) {
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

void Window::finish(Claim& c) {
  {
    Lock lock(*this, Urgency::kUrgent);
    bool chained = false;
    for (const Claim::Run& run : c.runs) chained |= !run.update->next.empty();
    if (!chained) {
      for (Claim::Run& run : c.runs) {
        written(c, run);
        wrote(run.end - run.begin);
        settle(run);
      }
      return;
    }
  }
  // What waits behind these rows gets its priority from the words.
  BothLocks lock(*this, Urgency::kUrgent);
  uint64_t done = 0;
  for (Claim::Run& run : c.runs) {
    StepUpdate* u = run.update;
    written(c, run);
    for (uint32_t i = run.begin; i < run.end; ++i) {
      uint64_t link = u->next.empty() ? 0 : u->next[c.rows[i]];
      if (!link) {
        ++done;
        continue;
      }
      StepUpdate* after = find_update(static_cast<uint32_t>((link - 1) >> 32));
      uint32_t row = static_cast<uint32_t>(link - 1);
      enqueue(node_id(*after, row), deadline(aged(words_[after->slots[row]], base_), after->step));
    }
    settle(run);
  }
  wrote(done);
}

void Window::wrote(uint64_t rows) {
  FRUGAL_ASSERT(pending_total_.load() >= rows);
  schedule_point();
  if (pending_total_.fetch_sub(rows, std::memory_order_acq_rel) == rows) astray_ = false;
  // Each pending row counts under one priority, claimed ones too.
  for (uint32_t p = 0; p <= kRing; ++p) FRUGAL_ASSERT(queued_[p] <= count_[p]);
  FRUGAL_ASSERT(std::accumulate(count_, count_ + kRing + 1, uint64_t{0}) == pending_total_.load());
}

// The nodes of a run are done.
void Window::written(const Claim& c, const Claim::Run& run) {
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

void Window::settle(Claim::Run& run) {
  StepUpdate* u = run.update;
  FRUGAL_ASSERT(u->committed && u->remaining >= run.end - run.begin);
  if ((u->remaining -= run.end - run.begin) != 0) return;
  u->written();
  for (const UpdateRef& ref : updates_)
    if (ref.get() == u) run.finished = ref;
  release(*u);
}

// --- Caches --------------------------------------------------------------------------------------

namespace {

constexpr size_t kRowsAhead = 16;  // words on their way from memory
constexpr size_t kLockedRows = 2048;

}  // namespace

void Window::set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty, Urgency urgency) {
  for (size_t from = 0; from < n; from += kLockedRows) {
    BothLocks lock(*this, urgency);
    words_only_ = true;
    const size_t end = std::min(n, from + kLockedRows);
    for (size_t i = from; i < end; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(&words_[slots[i + kRowsAhead]], 1);
      Word& w = words_[slots[i]];
      w = aged(w, base_);
      w = cached ? w | kCached : w & ~kCached;
      Node node = pending(w, slots[i]);
      if (!node.update) continue;
      if (dirty && !cached && node.update->committed) ++*dirty;
      reprioritize(node, deadline(w, node.update->step));
    }
  }
}

void Window::next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next,
                              Urgency urgency) {
  for (size_t from = 0; from < n; from += kLockedRows) {
    Lock lock(links_mu_, links_urgent_, urgency);
    const size_t end = std::min(n, from + kLockedRows);
    for (size_t i = from; i < end; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(&words_[slots[i + kRowsAhead]]);
      next[i] = UINT64_MAX;
      uint64_t skip = after >= base_ ? std::min<uint64_t>(after + 1 - base_, 63) : 0;
      uint64_t ahead = (aged(words_[slots[i]], base_) >> kOwnerAt & kOwner) >> skip << skip;
      if (ahead) next[i] = base_ + static_cast<uint64_t>(std::countr_zero(ahead));
    }
  }
}

size_t Window::collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out) {
  if (!any_pending()) return 0;
  size_t found = 0;
  BothLocks lock(*this, Urgency::kUrgent);
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    Node node = pending(aged(words_[slots[i]], base_), slots[i]);
    if (!node.update || !node.update->committed) continue;
    ++found;
    if (out) out->push_back(slots[i]);
  }
  return found;
}

WindowStats Window::stats() {
  Lock lock(*this, Urgency::kBackground);
  WindowStats s = stats_;
  s.pending = s.active = pending_total_.load(std::memory_order_relaxed);
  return s;
}

}  // namespace frugal
