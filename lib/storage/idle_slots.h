// Slots of rows without holders, in the order of their release. The oldest is the first row to
// leave memory (stored_rows.h), so it needs no search. Only tables with a storage tier have them.
//
// A ring of slots, linked in both directions. The last link belongs to no slot. Callers serialize
// all calls (`SlotMap::mu`).
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
  // Must precede the first add() of this slot.
  Status ensure(uint32_t slot) { return links_.ensure(slot, 1); }
  // The slot has lost its last holder: it becomes the newest.
  void add(uint32_t slot) {
    const uint32_t newest = at(end_).before;
    at(slot) = {newest, end_};
    at(newest).after = slot;
    at(end_).before = slot;
    ++size_;
  }
  // The slot has a holder again.
  void remove(uint32_t slot) {
    const Link link = at(slot);
    FRUGAL_ASSERT(at(link.before).after == slot && at(link.after).before == slot);
    at(link.before).after = link.after;
    at(link.after).before = link.before;
    --size_;
  }
  // The oldest slot in the ring. The ring must not be empty.
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
