// The private cache of one trainer for one table (FRUGAL section 3.2): the index of its cached rows
// (cache/cached_rows.h), and admission and eviction.
//
// The cache has copies of rows, with values and optimizer state, that its trainer may cache
// (window/placement.h). A step's update is applied twice: to the host row by the flush threads, and
// to the cached row by the owner at its next refresh, before any read. Bit equality makes the two
// copies identical. A trainer's death loses nothing, and eviction writes nothing back. The cache
// saves waiting: the owner's own reads no longer make an update of the row urgent.
//
// Admission and eviction look ahead. A row that a step reads is admitted if the owner's next read
// of it is near. The row whose next read is farthest is evicted (Belady's rule within the window).
// Of undeclared rows, the one that has been undeclared for longest goes first.
//
// The index uses open addressing, slot -> cache slot, with 2 to 4 entries of 8 bytes for each cache
// slot. Bytes for each cache slot: values + state + 76 .. 92.
//
// A refresh is planned before it is carried out. plan_refresh() changes the index. find() and
// touched() report what that means for the lookups and the update of the adjacent steps (a
// CachePlan). CachedRows move bytes by this plan, so all but the last part can be done ahead.
//
// Threads: one at a time; the engine ensures this.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/assert.h"
#include "base/buffer.h"
#include "device/source.h"
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

// The cache slots that a step's update touches; those that the next step reads come first. Entry i
// has the rank sums terms[start[i]] .. terms[start[i + 1] - 1], in ascending rank order.
struct CachedRowUpdate {
  struct Term {
    uint32_t rank, row;  // which of the update's rank gradients, and which of their rows
  };
  Vector<uint32_t> cache_slots, start;
  Vector<Term> terms;
  size_t urgent = 0;  // entries that the next step reads
  void clear() {
    cache_slots.clear();
    start.clear();
    terms.clear();
    urgent = 0;
  }
};

// A cache's refresh, at the beginning of a step.
struct CachePlan {
  Vector<PartRef> parts;      // the owner's declared parts of the step; their `sources` are set
  Vector<uint32_t> admitted;  // slots that are admitted,
  Vector<uint32_t> to;        // and their cache slots
  // The parts of the previous step's update, if what is pushed is what was declared (ascending
  // ranks).
  Vector<PartRef> pushed;
  CachedRowUpdate update;
  // The arrays keep their memory for the next step's plan.
  void clear() {
    parts.clear();
    admitted.clear();
    to.clear();
    pushed.clear();
    update.clear();
  }
};

class RowCache : public HeapObject {
  struct CachedRow {
    uint32_t slot;  // kNone: free
    // twice the number of the last refresh whose step reads it, plus 1 if that refresh admitted it
    uint32_t mark;
    uint64_t next_read;
  };
  struct Pinned {
    uint32_t cache_slot;
    uint64_t next_read;
  };
  struct Place {
    uint32_t slot, cache_slot;  // cache_slot kNone: empty
  };

 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  void open(uint64_t cache_slots);
  uint64_t cache_slots() const { return cache_slots_; }
  uint64_t size() const { return size_; }
  // Bytes of a cache slot whose row is in host memory: an upper bound, except for the rounding of
  // the two arrays. bytes_for is exact.
  static uint64_t row_bytes(const RowLayout& layout) {
    return layout.bytes() + sizeof(CachedRow) + sizeof(Pinned) + (1 + kListed) * sizeof(uint32_t) +
           4 * sizeof(Place);
  }
  static uint64_t bytes_for(const RowLayout& layout, uint64_t cache_slots);

  uint32_t find(uint32_t slot) const;  // cache slot or kNone
  void find(const uint32_t* slots, size_t n, uint32_t* cache_slots) const;
  // Where the owner reads rows: the cached row or the host row.
  void sources(const uint32_t* slots, size_t n, device::Source* out) const;

  // Plans the refresh of step `step`. `slots` are the distinct rows that the owner reads in it and
  // owns, ascending. next[i] is the owner's next declared read after `step` (UINT64_MAX: none).
  //
  // Returns the admitted rows, their cache slots, and the evicted rows. `next_of(slots, n, next)`
  // finds the next reads of candidates for eviction again. `more`: further rows of the refresh that
  // was planned last. Memory is allocated before anything of the index changes.
  template <class NextOf>
  void plan_refresh(bool more, uint64_t step, const uint32_t* slots, const uint64_t* next, size_t n,
                    NextOf next_of, Vector<uint32_t>* admitted, Vector<uint32_t>* cache_slots,
                    Vector<uint32_t>* evicted);
  // The cache slots for the slots of the last call of plan_refresh(), or kNone.
  const Vector<uint32_t>& refreshed() const { return found_; }
  // Finds which cached rows an update of the step before that refresh touches; admitted rows have
  // it already. All rows of `ranks`, one part a rank, are updated. The owner's own part knows its
  // cached rows (Part::sources) if the previous refresh was that of its step.
  void touched(const Vector<PartRef>& ranks, uint32_t owner, CachedRowUpdate* out);

  void drop(uint32_t slot) noexcept;
  // Removes up to `most` rows, from cache slot *cache_slot on, and returns their number. 0: the
  // cache is empty and as new.
  size_t drop_some(uint32_t* cache_slot, uint32_t* slots, size_t most) noexcept;

 private:
  // Cache slots by next read: step mod 64, then "never". A list may be out of date: between
  // refreshes a cache slot is in the list of its next_read, and perhaps still in others.
  static constexpr uint32_t kNever = 64, kLists = 65;
  struct List {
    Vector<uint32_t> cache_slots;
    size_t first = 0;  // entries before it are gone
    bool empty() const { return first == cache_slots.size(); }
    void forget() {
      cache_slots.clear();
      first = 0;
    }
  };
  // Entries for each cache slot: its own, up to two more in the last list, and room to grow.
  static constexpr uint32_t kListed = 6;
  static uint32_t list_of(uint64_t next_read) {
    return next_read == UINT64_MAX ? kNever : static_cast<uint32_t>(next_read & 63);
  }

  static constexpr uint64_t kNoStep = UINT64_MAX;
  static constexpr size_t kAhead = 16;  // entries between the prefetch of a cached row and its use

  template <class NextOf>
  uint32_t take_cache_slot(uint64_t step, uint64_t next_read, NextOf next_of,
                           Vector<uint32_t>* evicted);
  template <class NextOf>
  void ask(uint32_t list, NextOf next_of);
  void begin_refresh(uint64_t step);
  void end_refresh(uint64_t step);
  void list_cache_slot(uint32_t cache_slot, uint64_t next_read) noexcept;
  bool read_now(const CachedRow& l) const { return l.mark >> 1 == number_; }
  bool is_new(const CachedRow& l) const { return l.mark == (number_ << 1 | 1); }
  bool listed(uint32_t cache_slot, uint32_t list) const {
    const CachedRow& l = cached_row_[cache_slot];
    return l.slot != kNone && !read_now(l) && list_of(l.next_read) == list;
  }
  void index_insert(uint32_t slot, uint32_t cache_slot);
  void index_erase(uint32_t slot);
  uint64_t place(uint32_t slot) const { return ((slot + 1) * 0x9e3779b97f4a7c15ull) >> shift_; }
  void remove(uint32_t cache_slot);
  static uint64_t places_for(uint64_t cache_slots);

  uint64_t cache_slots_ = 0, size_ = 0;
  Vector<CachedRow> cached_row_;
  Vector<Pinned> pinned_;
  Vector<uint32_t> free_, found_;
  Vector<Place> index_;
  int shift_ = 63;
  List lists_[kLists];
  Vector<uint32_t> passed_;  // cache slots that were listed for the step of this refresh
  Vector<uint32_t> spare_;   // memory of a used list
  bool unlisted_ = false;    // a cache slot is in no list, for lack of memory
  bool skipped_ = false;     // the list entry of a cache slot that the step reads was skipped
  // Next reads of this list's entries before position `asked_end_` are up to date.
  uint32_t asked_list_ = kLists;
  size_t asked_end_ = 0;
  uint32_t number_ = 0;
  uint64_t step_ = kNoStep,
           step_before_ = kNoStep;  // of the last two refreshes; kNoStep: one that was extended
  struct Hit {
    uint32_t slot, cache_slot;
    CachedRowUpdate::Term term;
    bool urgent;
  };
  Vector<Hit> hits_;  // used by touched()
  Vector<device::Source> hit_sources_;
};

template <class NextOf>
void RowCache::plan_refresh(bool more, uint64_t step, const uint32_t* slots, const uint64_t* next,
                            size_t n, NextOf next_of, Vector<uint32_t>* admitted,
                            Vector<uint32_t>* cache_slots, Vector<uint32_t>* evicted) {
  const size_t most = std::min<size_t>(n, cache_slots_);
  found_.reserve(n);
  for (Vector<uint32_t>* v : {admitted, cache_slots, evicted}) v->reserve(v->size() + most);
  if (more)
    step_ = kNoStep;
  else
    begin_refresh(step);
  asked_list_ = kLists;
  skipped_ = false;
  const size_t pinned_before = pinned_.size();
  found_.resize(n);
  find(slots, n, found_.data());
  // Cached rows that this step reads are pinned: none of them is evicted. (The host row of a cached
  // row may have pending updates that rely on the cached row.)
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n && found_[i + kAhead] != kNone)
      __builtin_prefetch(&cached_row_[found_[i + kAhead]], 1);
    if (found_[i] == kNone) continue;
    CachedRow& cached_row = cached_row_[found_[i]];
    if (read_now(cached_row)) continue;
    cached_row.mark = number_ << 1;
    pinned_.push_back({found_[i], next[i]});
  }
  for (size_t i = 0; i < n && pinned_.size() < cache_slots_; ++i) {
    if (i + kAhead < n && found_[i + kAhead] == kNone)
      __builtin_prefetch(&index_[place(slots[i + kAhead])], 1);
    if (found_[i] != kNone) continue;
    const uint32_t cache_slot = take_cache_slot(step, next[i], next_of, evicted);
    if (cache_slot == kNone) continue;
    FRUGAL_ASSERT(cached_row_[cache_slot].slot == kNone && find(slots[i]) == kNone);
    cached_row_[cache_slot].slot = slots[i];
    cached_row_[cache_slot].mark = number_ << 1 | 1;
    index_insert(slots[i], cache_slot);
    ++size_;
    found_[i] = cache_slot;
    admitted->push_back(slots[i]);
    cache_slots->push_back(cache_slot);
    pinned_.push_back({cache_slot, next[i]});
  }
  // Rows that were pinned before are listed already, unless their entry was skipped just now.
  for (size_t i = skipped_ ? 0 : pinned_before; i < pinned_.size(); ++i) {
    if (i + kAhead < pinned_.size())
      __builtin_prefetch(&cached_row_[pinned_[i + kAhead].cache_slot], 1);
    list_cache_slot(pinned_[i].cache_slot, pinned_[i].next_read);
  }
  if (!more) end_refresh(step);
  FRUGAL_ASSERT(pinned_.size() <= cache_slots_ && size_ + free_.size() == cache_slots_);
}

// Takes a free cache slot, or that of a row whose next read is later than `next_read`: first
// undeclared rows, then the farthest. A list may be out of date, because declarations were added or
// withdrawn. Then the cache slot moves to its list, and the search continues.
template <class NextOf>
uint32_t RowCache::take_cache_slot(uint64_t step, uint64_t next_read, NextOf next_of,
                                   Vector<uint32_t>* evicted) {
  if (!free_.empty()) {
    uint32_t cache_slot = free_.back();
    free_.pop_back();
    return cache_slot;
  }
  if (next_read == UINT64_MAX) return kNone;  // no cached row is read later
  for (;;) {
    uint32_t at = kNever;
    for (uint32_t d = 63; lists_[at].empty() && d >= 1; --d)
      at = static_cast<uint32_t>((step + d) & 63);
    List& list = lists_[at];
    if (list.empty()) return kNone;
    if (at != asked_list_ || list.first >= asked_end_) ask(at, next_of);
    const uint32_t candidate = list.cache_slots[list.first];
    if (!listed(candidate, at)) {
      skipped_ |= read_now(cached_row_[candidate]);
      ++list.first;
      continue;
    }
    // A row whose next read is no sooner than the candidate's is not admitted.
    if (cached_row_[candidate].next_read <= next_read) return kNone;
    ++list.first;
    evicted->push_back(cached_row_[candidate].slot);
    remove(candidate);
    return candidate;
  }
}

// Looks up the next reads of the cache slots at the front of a list, and moves those that have
// changed to their list.
template <class NextOf>
void RowCache::ask(uint32_t at, NextOf next_of) {
  constexpr size_t kAsked = 64;
  uint32_t cache_slot[kAsked], slots[kAsked];
  uint64_t next[kAsked];
  const List& list = lists_[at];
  const size_t end = std::min(list.cache_slots.size(), list.first + kAsked);
  for (size_t i = list.first; i < end; ++i)
    __builtin_prefetch(&cached_row_[list.cache_slots[i]], 1);
  size_t n = 0;
  for (size_t i = list.first; i < end; ++i) {
    if (!listed(list.cache_slots[i], at)) continue;
    cache_slot[n] = list.cache_slots[i];
    slots[n++] = cached_row_[list.cache_slots[i]].slot;
  }
  for (size_t i = 0; i < n; ++i)
    __builtin_prefetch(&index_[place(slots[i])], 1);  // most of them are evicted
  next_of(slots, n, next);
  for (size_t i = 0; i < n; ++i)
    if (next[i] != cached_row_[cache_slot[i]].next_read) list_cache_slot(cache_slot[i], next[i]);
  asked_list_ = at;
  asked_end_ = end;
}

}  // namespace frugal
