// Counts the holders of a hashed table's slots. No other count of holders exists.
//
// A declaration or a call holds a slot once for each time that it names the row's key. It holds the
// slot from the lookup that finds it until the declaration or call ends. A held slot keeps its row.
// A slot whose row exists is not counted, because its row keeps it. When the row ceases to exist,
// the count is unknown until all holders are counted again. With a storage tier (stored_rows.h),
// slots are taken away from existing rows. There holders are always counted, and no count is
// unknown.
//
// A count has 15 bits, which suffice for nearly all slots. Larger counts carry pieces of `kPiece`
// into a map, so a count has no largest value: 4,096 ranks may declare one key a million times
// each. The map is used once for `kPiece` namings of one slot.
//
// Callers serialize all calls (`SlotMap::mu`).
#pragma once
#include <cstdint>

#include "base/assert.h"
#include "base/heap.h"
#include "storage/slab.h"

namespace frugal {

class Holders {
 public:
  static constexpr size_t kSlotBytes = 2;
  static constexpr uint64_t kPiece = uint64_t{1} << 14;

  Status open(uint64_t slots, MemoryBudget* budget) {
    return counts_.reserve(slots, kSlotBytes, false, budget);
  }
  // Must precede the first hold of these slots.
  Status ensure(uint64_t first, uint64_t n) { return counts_.ensure(first, n); }
  // Throws when a large count finds no memory; the slot is not held then. A first hold never
  // throws.
  void hold(uint32_t slot) {
    Count& c = at(slot);
    if (c == kUnknown) return;
    if ((c & kMost) == kMost - 1) carry(slot);
    ++c;
  }
  // The slot must be held at least `times` times. Returns whether a holder remains.
  bool release_hold(uint32_t slot, uint64_t times) {
    Count& c = at(slot);
    if (c == kUnknown) return true;
    if (times > static_cast<uint64_t>(c & kMost))
      release_more(slot, times);
    else
      c = static_cast<Count>(c - times);
    return c != 0;
  }
  bool held(uint32_t slot) const { return at(slot) != 0; }
  uint64_t count(uint32_t slot) const;
  // `clear` sets the count to none, `forget` to unknown.
  void clear(uint32_t slot) {
    Count& c = at(slot);
    if (c & kMore && c != kUnknown) more_.erase(slot);
    c = 0;
  }
  void forget(uint32_t slot) {
    clear(slot);
    at(slot) = kUnknown;
  }
  bool unknown(uint32_t slot) const { return at(slot) == kUnknown; }
  // Holds a slot without holders `times` times. Throws as the other overload does.
  void hold(uint32_t slot, uint64_t times);
  uint64_t memory_bytes() const { return counts_.committed_bytes(); }

 private:
  using Count = uint16_t;
  static_assert(sizeof(Count) == kSlotBytes);
  static constexpr Count kMore = 0x8000, kMost = 0x7fff;  // kMore: there is more in the map
  static constexpr Count kUnknown = kMore | kMost;        // no count reaches it
  Count& at(uint32_t slot) const { return reinterpret_cast<Count*>(counts_.base())[slot]; }
  void carry(uint32_t slot);
  void release_more(uint32_t slot, uint64_t times);

  SlabArray counts_;
  Map<uint32_t, uint64_t> more_;  // counts of `kPiece`
};

}  // namespace frugal
