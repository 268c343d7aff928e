// Who holds the places of a hashed table: how often each is held. The only count of that.
//
// A declaration or a call holds a place once for each time that it names the row's key, from the
// look that finds the place until it has served. A place that is held stays its row's. Where the
// row exists nobody counts, for nobody takes the place away. When it exists no longer the count is
// unknown, until the holders have been gone over. (Where rows have a store behind the memory,
// stored_rows.h, places are taken away from rows that exist: so they are counted there, too, and
// the count is never unknown.)
//
// 15 bits a place do for nearly all. What is beyond goes to a map in pieces of 2^14, so that counts
// have no largest value: 4,096 ranks may declare one key a million times each. The map is asked
// once for 2^14 times that one place is named.
//
// Callers serialize all calls (the places' mutex).
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
  // Before the first hold of these places.
  Status ensure(uint64_t first, uint64_t n) { return counts_.ensure(first, n); }
  // Throws where there is no memory for a large count, and holds nothing then. The first hold never
  // does.
  void hold(uint32_t slot) {
    Count& c = at(slot);
    if (c == kUnknown) return;
    if ((c & kMost) == kMost - 1) carry(slot);
    ++c;
  }
  // It was held so often at least. Does anybody hold it still?
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
  // Nobody is known to hold it; or nobody knows whether.
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
  // As often, from nobody on. Throws as the other does.
  void hold(uint32_t slot, uint64_t times);
  uint64_t memory_bytes() const { return counts_.committed_bytes(); }

 private:
  using Count = uint16_t;
  static_assert(sizeof(Count) == kSlotBytes);
  static constexpr Count kMore = 0x8000, kMost = 0x7fff;  // kMore: there is more in the map
  static constexpr Count kUnknown = kMore | kMost;        // which no count reaches
  Count& at(uint32_t slot) const { return reinterpret_cast<Count*>(counts_.base())[slot]; }
  void carry(uint32_t slot);
  void release_more(uint32_t slot, uint64_t times);

  SlabArray counts_;
  Map<uint32_t, uint64_t> more_;  // pieces
};

}  // namespace frugal
