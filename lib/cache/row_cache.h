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
// window). Index: open addressing, slot -> line, 2 to 4 places of 8 bytes a line. Bytes per line:
// values + state + 60 .. 76.
//
// Threads: the owning trainer's, except drop(), which is called outside steps.
#pragma once
#include <cstdint>

#include "base/buffer.h"
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

struct CacheStats {
  uint64_t hits = 0, misses = 0, admitted = 0, evicted = 0;
};

class RowCache : public HeapObject {
  struct Line {
    uint32_t slot;      // kNone: free
    uint32_t prev, next;  // list of its next-read class
    uint32_t list;
    uint64_t next_read;
  };
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
    return (layout.value_stride + layout.state_stride) * 4 + sizeof(Line) + sizeof(Pinned) +
           sizeof(uint32_t) + 4 * sizeof(Place);
  }
  static uint64_t bytes_for(const RowLayout& layout, uint64_t lines);

  uint32_t find(uint32_t slot) const;  // line or kNone
  float* values(uint32_t line) const { return ref_.values + line * ref_.value_stride; }
  const device::RowsRef& ref() const { return ref_; }

  // The lines that a committed step's update touches, as if they were slots, with their terms.
  void touched(const StepUpdate& update, TermList* out) const;
  // Applies it to them.
  void apply(const StepUpdate& update, TermList* scratch);

  // The boundary of step `step`. `slots` are the distinct rows that the owner reads in it and
  // owns, all up to date on the host; next[i] is the owner's next declared read after `step`
  // (UINT64_MAX: none). Fills in which rows came, to which lines, and which went. `next_of(slot)`
  // asks again for a row that is a candidate to go.
  template <class NextOf>
  void turn_over(const Rows& host, uint64_t step, const uint32_t* slots, const uint64_t* next,
                 size_t n, NextOf next_of, Vector<uint32_t>* admitted, Vector<uint32_t>* lines,
                 Vector<uint32_t>* evicted);

  void drop(uint32_t slot);
  void clear(Vector<uint32_t>* dropped);

 private:
  // Lists of lines by next read: step mod 64, then "never", then free lines.
  static constexpr uint32_t kNever = 64, kLists = 65;

  template <class NextOf>
  uint32_t take_line(uint64_t step, uint64_t next_read, NextOf next_of,
                     Vector<uint32_t>* evicted);
  void unlink_line(uint32_t line);
  void link_line(uint32_t line, uint64_t next_read);
  void index_insert(uint32_t slot, uint32_t line);
  void index_erase(uint32_t slot);
  uint64_t place(uint32_t slot) const {
    return ((slot + 1) * 0x9e3779b97f4a7c15ull) >> shift_;
  }
  void remove(uint32_t line);
  void copy_in(const Rows& host, uint32_t slot, uint32_t line);
  static uint64_t places_for(uint64_t lines);

  uint64_t lines_ = 0, size_ = 0;
  device::RowsRef ref_{};
  Buffer values_, state_;
  size_t value_floats_ = 0, state_floats_ = 0;
  Vector<Line> line_;
  Vector<Pinned> pinned_;
  Vector<uint32_t> free_;
  Vector<Place> index_;
  int shift_ = 63;
  uint32_t head_[kLists];
};

template <class NextOf>
void RowCache::turn_over(const Rows& host, uint64_t step, const uint32_t* slots,
                         const uint64_t* next, size_t n, NextOf next_of,
                         Vector<uint32_t>* admitted, Vector<uint32_t>* lines,
                         Vector<uint32_t>* evicted) {
  // Lines that are read in this step are pinned: out of the lists until the end, so that none of
  // them goes. (The host row of a line may have updates pending that count on the line being here.)
  pinned_.clear();
  for (size_t i = 0; i < n; ++i) {
    uint32_t line = find(slots[i]);
    if (line == kNone) continue;
    unlink_line(line);
    pinned_.push_back({line, next[i]});
  }
  size_t old_lines = pinned_.size();
  if (old_lines < n) {
    for (size_t i = 0; i < n; ++i) {
      if (find(slots[i]) != kNone) continue;
      uint32_t line = take_line(step, next[i], next_of, evicted);
      if (line == kNone) continue;
      line_[line].slot = slots[i];
      index_insert(slots[i], line);
      ++size_;
      if (values_) copy_in(host, slots[i], line);
      admitted->push_back(slots[i]);
      lines->push_back(line);
      pinned_.push_back({line, next[i]});
    }
  }
  for (const Pinned& p : pinned_) link_line(p.line, p.next_read);
}

// A free line, or that of a row whose next read is later than `next_read`: first rows that nobody
// has declared, then the farthest. What a list says may be out of date, since declarations came or
// were taken back; then the line moves to its list and we look again.
template <class NextOf>
uint32_t RowCache::take_line(uint64_t step, uint64_t next_read, NextOf next_of,
                             Vector<uint32_t>* evicted) {
  if (!free_.empty()) {
    uint32_t line = free_.back();
    free_.pop_back();
    return line;
  }
  for (;;) {
    uint32_t list = kNever;
    for (uint32_t d = 63; head_[list] == kNone && d >= 1; --d)
      if (head_[(step + d) & 63] != kNone) list = static_cast<uint32_t>((step + d) & 63);
    if (head_[list] == kNone) list = static_cast<uint32_t>(step & 63);
    uint32_t candidate = head_[list];
    if (candidate == kNone) return kNone;
    uint64_t now = next_of(line_[candidate].slot);
    if (now != line_[candidate].next_read) {
      unlink_line(candidate);
      link_line(candidate, now);
      continue;
    }
    // A row that is read no sooner than the one that would go stays out.
    if (now <= next_read) return kNone;
    evicted->push_back(line_[candidate].slot);
    remove(candidate);
    return candidate;
  }
}

}  // namespace frugal
