// The private cache of one trainer for one table (contract: cached rows; FRUGAL section 3.2).
//
// Holds copies of rows, values and optimizer state, of which this trainer is the owner; only the
// owner may cache a row. A step's update is applied twice, to the host row by the flush threads and
// to the cached row by the owner at its next step boundary, before anyone reads it: bit equality
// makes the two the same, a trainer's death loses nothing, and eviction writes nothing back. What
// the cache saves is the wait: the owner's own reads no longer make an update of the row urgent.
//
// Admission and eviction look ahead: of the rows that a step reads, those come in whose next read
// by the owner is near, and the row whose next read is farthest goes out (Belady's rule within the
// window; of rows that nobody has declared, the one that has been so for longest). Index: open
// addressing, slot -> line, 2 to 4 places of 8 bytes a line. Bytes per line: values + state + 76 .. 92.
//
// A boundary is worked out before it is carried out: turn_over() changes the index, find() and
// touched() tell what that means for the lookups and the update of the steps around it (a
// CachePlan), and apply() and fill() move bytes. So all but the last can be done ahead.
//
// Threads: one at a time; who that is the engine knows.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/assert.h"
#include "base/buffer.h"
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

// The lines that a step's update touches, those first that the next step reads. Line i has the rank sums
// terms[start[i]] .. terms[start[i + 1] - 1], in ascending rank order.
struct LineUpdate {
  struct Term {
    uint32_t rank, row;  // which of the update's hand-overs, and which row of it
  };
  Vector<uint32_t> lines, start;
  Vector<Term> terms;
  size_t urgent = 0;  // lines that the next step reads
};

// A cache's boundary, at the beginning of a step.
struct CachePlan {
  Vector<PartRef> parts;      // what the owner has declared for the step; their `lines` are set
  Vector<uint32_t> admitted;  // slots that come in,
  Vector<uint32_t> to;        // and their lines
  // The update of the step before, if what is pushed is what was declared (by rank, ascending).
  Vector<PartRef> pushed;
  LineUpdate update;
};

class RowCache : public HeapObject {
  struct Line {
    uint32_t slot;  // kNone: free
    uint8_t marks;  // of the last boundary
    uint64_t next_read;
  };
  static constexpr uint8_t kRead = 1, kNew = 2;  // the step reads it; it came in for that
  struct Pinned {
    uint32_t line;
    uint64_t next_read;
  };
  struct Place {
    uint32_t slot, line;  // line kNone: empty
  };

 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  // Lines in memory of `pool`, or (null) elsewhere: then who calls fills and updates them.
  Status open(const Rows& rows, uint64_t lines, BufferPool* pool);
  uint64_t lines() const { return lines_; }
  uint64_t size() const { return size_; }
  // At most, beside the rounding of the two arrays; bytes_for counts exactly.
  static uint64_t line_bytes(const RowLayout& layout) {
    return layout.bytes() + sizeof(Line) + sizeof(Pinned) +
           (1 + kListed) * sizeof(uint32_t) + 4 * sizeof(Place);
  }
  static uint64_t bytes_for(const RowLayout& layout, uint64_t lines);

  uint32_t find(uint32_t slot) const;  // line or kNone
  void find(const uint32_t* slots, size_t n, uint32_t* lines) const;
  float* values(uint32_t line) const { return ref_.row(line); }

  // The boundary of step `step`. `slots` are the distinct rows that the owner reads in it and
  // owns; next[i] is the owner's next declared read after `step` (UINT64_MAX: none). Tells which
  // rows come, to which lines, and which go. `next_of(slot)` asks again for a row that is a
  // candidate to go. `more`: further rows of the boundary that was turned over last. Memory is wanted
  // before anything of it is changed.
  template <class NextOf>
  void turn_over(bool more, uint64_t step, const uint32_t* slots, const uint64_t* next, size_t n,
                 NextOf next_of, Vector<uint32_t>* admitted, Vector<uint32_t>* lines,
                 Vector<uint32_t>* evicted);
  // What an update of the step before that boundary means for the lines: new ones have it already. Of
  // the parts, one a rank, all rows are updated.
  void touched(const Vector<PartRef>& ranks, LineUpdate* out) const;
  // Applies it.
  void apply(const LineUpdate& touched, const StepUpdate& update, TermList* scratch);
  // Copies of host rows, which are up to date, into lines.
  void fill(const Rows& host, const Vector<uint32_t>& slots, const Vector<uint32_t>& lines);

  void drop(uint32_t slot) noexcept;
  // Takes up to `most` rows out, of lines from *line on; tells how many. 0: it is empty, and as if it were new.
  size_t drop_some(uint32_t* line, uint32_t* slots, size_t most) noexcept;

 private:
  // Lines by next read: step mod 64, then "never". What a list says of a line may be out of date: it
  // is in the list of its next_read, and perhaps still in others.
  static constexpr uint32_t kNever = 64, kLists = 65;
  struct List {
    Vector<uint32_t> lines;
    size_t first = 0;  // from here on; those before are gone
    bool empty() const { return first == lines.size(); }
    void forget() {
      lines.clear();
      first = 0;
    }
  };
  // Of a line: where it is, up to two more in the last list, room to grow.
  static constexpr uint32_t kListed = 6;
  static uint32_t list_of(uint64_t next_read) {
    return next_read == UINT64_MAX ? kNever : static_cast<uint32_t>(next_read & 63);
  }

  template <class NextOf>
  uint32_t take_line(uint64_t step, uint64_t next_read, NextOf next_of,
                     Vector<uint32_t>* evicted);
  void begin_turn(uint64_t step);
  void list_line(uint32_t line, uint64_t next_read) noexcept;
  bool listed(uint32_t line, uint32_t list) const {
    const Line& l = line_[line];
    return l.slot != kNone && !(l.marks & kRead) && list_of(l.next_read) == list;
  }
  void index_insert(uint32_t slot, uint32_t line);
  void index_erase(uint32_t slot);
  uint64_t place(uint32_t slot) const {
    return ((slot + 1) * 0x9e3779b97f4a7c15ull) >> shift_;
  }
  void remove(uint32_t line);
  static uint64_t places_for(uint64_t lines);

  uint64_t lines_ = 0, size_ = 0;
  device::RowsRef ref_{};
  Buffer values_, state_;
  Vector<Line> line_;
  Vector<Pinned> pinned_;
  Vector<uint32_t> free_, found_;
  Vector<Place> index_;
  int shift_ = 63;
  List lists_[kLists];
  bool unlisted_ = false;   // a line is in no list, for want of memory
  uint32_t asked_ = kNone;  // a line whose next read is known to be what it says
};

template <class NextOf>
void RowCache::turn_over(bool more, uint64_t step, const uint32_t* slots, const uint64_t* next, size_t n,
                         NextOf next_of, Vector<uint32_t>* admitted, Vector<uint32_t>* lines,
                         Vector<uint32_t>* evicted) {
  const size_t most = std::min<size_t>(n, lines_);
  found_.reserve(n);
  for (Vector<uint32_t>* v : {admitted, lines, evicted}) v->reserve(v->size() + most);
  if (!more) begin_turn(step);
  asked_ = kNone;
  const size_t pinned_before = pinned_.size();
  found_.resize(n);
  find(slots, n, found_.data());
  // Lines that are read in this step are pinned: none of them goes. (The host row of a line may have
  // updates pending that count on the line being here.)
  for (size_t i = 0; i < n; ++i) {
    constexpr size_t kAhead = 16;
    if (i + kAhead < n && found_[i + kAhead] != kNone) __builtin_prefetch(&line_[found_[i + kAhead]], 1);
    if (found_[i] == kNone || (line_[found_[i]].marks & kRead)) continue;
    line_[found_[i]].marks = kRead;
    pinned_.push_back({found_[i], next[i]});
  }
  for (size_t i = 0; i < n && pinned_.size() < lines_; ++i) {
    if (found_[i] != kNone) continue;
    const uint32_t line = take_line(step, next[i], next_of, evicted);
    if (line == kNone) continue;
    FRUGAL_ASSERT(line_[line].slot == kNone && find(slots[i]) == kNone);
    line_[line].slot = slots[i];
    line_[line].marks = kRead | kNew;
    index_insert(slots[i], line);
    ++size_;
    admitted->push_back(slots[i]);
    lines->push_back(line);
    pinned_.push_back({line, next[i]});
  }
  for (size_t i = pinned_before; i < pinned_.size(); ++i) list_line(pinned_[i].line, pinned_[i].next_read);
  FRUGAL_ASSERT(pinned_.size() <= lines_ && size_ + free_.size() == lines_);
}

// A free line, or that of a row whose next read is later than `next_read`: first rows that nobody
// has declared, then the farthest. What a list says may be out of date, since declarations came or
// were taken back; then the line goes to its list and we look again.
template <class NextOf>
uint32_t RowCache::take_line(uint64_t step, uint64_t next_read, NextOf next_of,
                             Vector<uint32_t>* evicted) {
  if (!free_.empty()) {
    uint32_t line = free_.back();
    free_.pop_back();
    return line;
  }
  if (next_read == UINT64_MAX) return kNone;  // no line is read later
  for (;;) {
    uint32_t at = kNever;
    for (uint32_t d = 63; lists_[at].empty() && d >= 1; --d)
      at = static_cast<uint32_t>((step + d) & 63);
    List& list = lists_[at];
    if (list.empty()) return kNone;
    const uint32_t candidate = list.lines[list.first];
    if (!listed(candidate, at)) {
      ++list.first;
      continue;
    }
    if (candidate != asked_) {
      const uint64_t now = next_of(line_[candidate].slot);
      if (now != line_[candidate].next_read) {
        ++list.first;
        list_line(candidate, now);
        continue;
      }
      asked_ = candidate;
    }
    // A row that is read no sooner than the one that would go stays out.
    if (line_[candidate].next_read <= next_read) return kNone;
    asked_ = kNone;
    ++list.first;
    evicted->push_back(line_[candidate].slot);
    remove(candidate);
    return candidate;
  }
}

}  // namespace frugal
