// The private cache of one trainer for one table (contract: cached rows; FRUGAL section 3.2): which
// rows it has, in which lines (cache/cached_rows.h), and who comes and who goes.
//
// It has copies of rows, values and optimizer state, that its trainer may cache
// (window/placement.h). A step's update is applied twice, to the host row by the flush threads and
// to the cached row by the owner at its next refresh, before anyone reads it: bit equality
// makes the two the same, a trainer's death loses nothing, and eviction writes nothing back. What
// the cache saves is the wait: the owner's own reads no longer make an update of the row urgent.
//
// Admission and eviction look ahead: of the rows that a step reads, those come in whose next read
// by the owner is near, and the row whose next read is farthest goes out (Belady's rule within the
// window; of rows that nobody has declared, the one that has been so for longest). Index: open
// addressing, slot -> line, 2 to 4 places of 8 bytes a line. Bytes per line: values + state + 76
// .. 92.
//
// A refresh is worked out before it is carried out: plan_refresh() changes the index, find() and
// touched() tell what that means for the lookups and the update of the steps around it (a
// CachePlan), by which CachedRows move bytes. So all but the last can be done ahead.
//
// Threads: one at a time; who that is the engine knows.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/assert.h"
#include "base/buffer.h"
#include "device/source.h"
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

// The lines that a step's update touches, those first that the next step reads. Line i has the rank
// sums terms[start[i]] .. terms[start[i + 1] - 1], in ascending rank order.
struct CachedRowUpdate {
  struct Term {
    uint32_t rank, row;  // which of the update's hand-overs, and which row of it
  };
  Vector<uint32_t> cache_slots, start;
  Vector<Term> terms;
  size_t urgent = 0;  // lines that the next step reads
  void clear() {
    cache_slots.clear();
    start.clear();
    terms.clear();
    urgent = 0;
  }
};

// A cache's refresh, at the beginning of a step.
struct CachePlan {
  Vector<PartRef> parts;      // what the owner has declared for the step; their `sources` are set
  Vector<uint32_t> admitted;  // slots that come in,
  Vector<uint32_t> to;        // and their lines
  // The update of the step before, if what is pushed is what was declared (by rank, ascending).
  Vector<PartRef> pushed;
  CachedRowUpdate update;
  // Its arrays keep their memory: each step has such a plan.
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
    uint32_t mark;  // the last turn whose step reads it, times two, and 1 if it came in for that
    uint64_t next_read;
  };
  struct Pinned {
    uint32_t cache_slot;
    uint64_t next_read;
  };
  struct Place {
    uint32_t slot, cache_slot;  // line kNone: empty
  };

 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  void open(uint64_t cache_slots);
  uint64_t cache_slots() const { return cache_slots_; }
  uint64_t size() const { return size_; }
  // With lines in host memory. At most, beside the rounding of the two arrays; bytes_for counts
  // exactly.
  static uint64_t row_bytes(const RowLayout& layout) {
    return layout.bytes() + sizeof(CachedRow) + sizeof(Pinned) + (1 + kListed) * sizeof(uint32_t) +
           4 * sizeof(Place);
  }
  static uint64_t bytes_for(const RowLayout& layout, uint64_t cache_slots);

  uint32_t find(uint32_t slot) const;  // line or kNone
  void find(const uint32_t* slots, size_t n, uint32_t* cache_slots) const;
  // Where the owner reads rows: the line, or the host row.
  void sources(const uint32_t* slots, size_t n, device::Source* out) const;

  // The refresh of step `step`. `slots` are the distinct rows that the owner reads in it and
  // owns, ascending; next[i] is the owner's next declared read after `step` (UINT64_MAX: none).
  // Tells which rows come, to which lines, and which go. `next_of(slots, n, next)` asks again for
  // rows that are candidates to go. `more`: further rows of the refresh that was planned last.
  // Memory is wanted before anything of it is changed.
  template <class NextOf>
  void plan_refresh(bool more, uint64_t step, const uint32_t* slots, const uint64_t* next, size_t n,
                    NextOf next_of, Vector<uint32_t>* admitted, Vector<uint32_t>* cache_slots,
                    Vector<uint32_t>* evicted);
  // The lines of the slots of the last call of plan_refresh(), or kNone.
  const Vector<uint32_t>& refreshed() const { return found_; }
  // What an update of the step before that refresh means for the lines: new ones have it already.
  // Of the parts, one a rank, all rows are updated. The owner's own part tells its lines
  // (Part::sources) where the refresh before this one was that of its step.
  void touched(const Vector<PartRef>& ranks, uint32_t owner, CachedRowUpdate* out);

  void drop(uint32_t slot) noexcept;
  // Takes up to `most` rows out, of lines from *line on; tells how many. 0: it is empty, and as if
  // it were new.
  size_t drop_some(uint32_t* cache_slot, uint32_t* slots, size_t most) noexcept;

 private:
  // Lines by next read: step mod 64, then "never". What a list says of a line may be out of date:
  // between turns it is in the list of its next_read, and perhaps still in others.
  static constexpr uint32_t kNever = 64, kLists = 65;
  struct List {
    Vector<uint32_t> cache_slots;
    size_t first = 0;  // from here on; those before are gone
    bool empty() const { return first == cache_slots.size(); }
    void forget() {
      cache_slots.clear();
      first = 0;
    }
  };
  // Of a line: where it is, up to two more in the last list, room to grow.
  static constexpr uint32_t kListed = 6;
  static uint32_t list_of(uint64_t next_read) {
    return next_read == UINT64_MAX ? kNever : static_cast<uint32_t>(next_read & 63);
  }

  static constexpr uint64_t kNoStep = UINT64_MAX;
  static constexpr size_t kAhead = 16;  // entries between the request of a line and its use

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
  uint64_t place(uint32_t slot) const {
    return ((slot + 1) * 0x9e3779b97f4a7c15ull) >> shift_;
  }
  void remove(uint32_t cache_slot);
  static uint64_t places_for(uint64_t cache_slots);

  uint64_t cache_slots_ = 0, size_ = 0;
  Vector<CachedRow> cached_row_;
  Vector<Pinned> pinned_;
  Vector<uint32_t> free_, found_;
  Vector<Place> index_;
  int shift_ = 63;
  List lists_[kLists];
  Vector<uint32_t> passed_;  // lines that were listed for the step of this turn
  Vector<uint32_t> spare_;   // memory of a list that is done with
  bool unlisted_ = false;  // a line is in no list, for want of memory
  bool skipped_ = false;   // what a list says of a line that the step reads is gone
  // Of this list the next reads of lines before place `asked_end_` are what they say.
  uint32_t asked_list_ = kLists;
  size_t asked_end_ = 0;
  uint32_t number_ = 0;
  uint64_t step_ = kNoStep,
           step_before_ = kNoStep;  // of the last two turns; kNoStep: one that was added to
  struct Hit {
    uint32_t slot, cache_slot;
    CachedRowUpdate::Term term;
    bool urgent;
  };
  Vector<Hit> hits_;             // touched()'s
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
  // Lines that are read in this step are pinned: none of them goes. (The host row of a line may
  // have updates pending that count on the line being here.)
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
  // Those of before are listed, unless that was passed over just now.
  for (size_t i = skipped_ ? 0 : pinned_before; i < pinned_.size(); ++i) {
    if (i + kAhead < pinned_.size())
      __builtin_prefetch(&cached_row_[pinned_[i + kAhead].cache_slot], 1);
    list_cache_slot(pinned_[i].cache_slot, pinned_[i].next_read);
  }
  if (!more) end_refresh(step);
  FRUGAL_ASSERT(pinned_.size() <= cache_slots_ && size_ + free_.size() == cache_slots_);
}

// A free line, or that of a row whose next read is later than `next_read`: first rows that nobody
// has declared, then the farthest. What a list says may be out of date, since declarations came or
// were taken back; then the line goes to its list and we look again.
template <class NextOf>
uint32_t RowCache::take_cache_slot(uint64_t step, uint64_t next_read, NextOf next_of,
                                   Vector<uint32_t>* evicted) {
  if (!free_.empty()) {
    uint32_t cache_slot = free_.back();
    free_.pop_back();
    return cache_slot;
  }
  if (next_read == UINT64_MAX) return kNone;  // no line is read later
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
    // A row that is read no sooner than the one that would go stays out.
    if (cached_row_[candidate].next_read <= next_read) return kNone;
    ++list.first;
    evicted->push_back(cached_row_[candidate].slot);
    remove(candidate);
    return candidate;
  }
}

// Asks for the next reads of the lines at the front of a list. Those that have another one go to
// its list.
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
    __builtin_prefetch(&index_[place(slots[i])], 1);  // most of them go
  next_of(slots, n, next);
  for (size_t i = 0; i < n; ++i)
    if (next[i] != cached_row_[cache_slot[i]].next_read) list_cache_slot(cache_slot[i], next[i]);
  asked_list_ = at;
  asked_end_ = end;
}

}  // namespace frugal
