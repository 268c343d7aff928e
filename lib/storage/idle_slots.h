// Places of rows that nobody holds, in the order in which they were let go: which row leaves memory
// first (stored_rows.h) is looked up, and not searched for. Only where rows have a store behind the
// memory.
//
// A ring of places, linked in both directions; the last link is that of no place. Callers serialize
// all calls (the places' mutex).
#pragma once
#include <cstdint>

#include "base/assert.h"
#include "storage/slab.h"

namespace frugal {

class IdleSlots {
 public:
  Status open(uint64_t slots, MemoryBudget* budget) {
    FRUGAL_TRY(links_.reserve(slots + 1, sizeof(Link), false, budget));
    end_ = static_cast<uint32_t>(slots);
    FRUGAL_TRY(links_.ensure(end_, 1));
    at(end_) = {end_, end_};
    return FRUGAL_OK;
  }
  // Before the first add() of this place.
  Status ensure(uint32_t slot) { return links_.ensure(slot, 1); }
  // Nobody holds it any more: it is the newest.
  void add(uint32_t slot) {
    const uint32_t newest = at(end_).before;
    at(slot) = {newest, end_};
    at(newest).after = slot;
    at(end_).before = slot;
    ++size_;
  }
  // Somebody holds it.
  void remove(uint32_t slot) {
    const Link link = at(slot);
    FRUGAL_ASSERT(at(link.before).after == slot && at(link.after).before == slot);
    at(link.before).after = link.after;
    at(link.after).before = link.before;
    --size_;
  }
  // Of all that were added and not removed since, the first; not of none.
  uint32_t oldest() const { return at(end_).after; }
  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const { return links_.committed_bytes(); }

 private:
  struct Link {
    uint32_t before, after;
  };
  Link& at(uint32_t slot) const { return reinterpret_cast<Link*>(links_.base())[slot]; }

  SlabArray links_;
  uint32_t end_ = 0;
  uint64_t size_ = 0;
};

}  // namespace frugal
