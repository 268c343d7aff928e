// A part: the keys of one table in one declaration (or in one undeclared call), resolved.
//
// Resolving maps keys to slots, sorts (slot, position) pairs, and lists the distinct rows. All
// later work on the batch (lookup, summing gradients, links, updates) uses these arrays, so nothing
// is resolved twice. Bytes per key: 4 slot + 8 pair + 8 (hashed: the key). Bytes per distinct row:
// 4 slot + 4 start + 1 next read + 1/2 to 1 finder.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/buffer.h"
#include "storage/rows.h"

namespace frugal {

// Finds rows in a sorted list that is followed by kPadding entries of UINT32_MAX. It stores where
// each of some equal ranges of slots begins.
class RowFinder {
 public:
  static constexpr uint32_t kPadding = 16;
  Status build(BufferPool& pool, const uint32_t* slots, size_t n);
  bool built() const { return ranges_ != 0; }
  // The position of `slot`, if the list has it, and of rows with other slots before and after it.
  uint32_t near(uint32_t slot) const {
    return starts_.as<uint32_t>()[std::min<uint64_t>(uint64_t{slot} >> shift_, ranges_)];
  }
  // The row of `slot`, with `from` = near(slot). UINT32_MAX if the list lacks it.
  static uint32_t find(const uint32_t* slots, uint32_t from, uint32_t slot) {
    for (;; from += kPadding) {
      uint32_t below = 0;
      for (uint32_t k = 0; k < kPadding; ++k) below += slots[from + k] < slot;
      if (below < kPadding) return slots[from + below] == slot ? from + below : UINT32_MAX;
    }
  }

 private:
  Buffer starts_;  // uint32_t[ranges + 1]
  uint32_t ranges_ = 0;
  int shift_ = 0;
};

struct Part : HeapObject {
  enum State : uint32_t {
    kDownloading,  // keys are being copied from a device
    kDeclared,     // only the keys are there
    kResolving,
    kResolved,
    kStale,   // could not be resolved ahead (table full): the calls resolve again
    kDropped  // cancelled, or its table is gone
  };

  uint64_t step = 0;
  uint32_t rank = 0;
  size_t n = 0;  // keys
  bool has_padding = false;
  uint64_t padding = 0;
  Buffer keys;   // uint64_t[n]; of a dense table only while ids from a device are not resolved
  Buffer slots;  // uint32_t[n]; else of a dense table from the beginning
  Buffer lent;   // either, in memory that another process may still write to: copied when they are
                 // resolved
  Buffer pairs;  // uint64_t[n]: slot << 32 | position, sorted, padding left out
  Buffer rows;   // uint32_t[distinct]
  Buffer start;  // uint32_t[distinct + 1]
  Buffer next;   // uint8_t[distinct]: priority of the row's next declared read, once linked
  RowFinder finder;   // of rows, once linked
  Buffer sources;     // device::Source[distinct]: where its rank reads the row in its step,
                      // cached row or host row; set by the step's refresh, if there is a cache
  size_t cached = 0;  // keys of cached rows
  size_t distinct = 0;
  size_t occurrences = 0;  // pairs: keys that are not padding
  std::atomic<uint32_t> state{kDeclared};
  std::atomic<bool> linked{false};
  bool linking = false;      // guarded by the declarations' lock (engine/declarations.h)
  size_t warmed = 0;         // guarded by it, too: rows [0, warmed) are in the processor's cache
  bool owner_apart = false;  // how it was linked: its rank has a cache
  std::shared_ptr<void>
      on_device;  // the engine's: these arrays on its rank's GPU; ends before them

  bool resolved() const { return state.load(std::memory_order_acquire) == kResolved; }
  const uint32_t* row_slots() const { return rows.as<uint32_t>(); }
  const uint32_t* row_start() const { return start.as<uint32_t>(); }

  // Copies `count` keys, or for a dense table their slots (dense_slots).
  Status take_keys(BufferPool& pool, const Rows& rows, const uint64_t* keys, size_t count,
                   bool has_padding, uint64_t padding);
  // The same for a copy of keys or slots that another process has made. The part takes the copy
  // over, at once or (lent memory) later.
  Status adopt_keys(const Rows& rows, Buffer&& copy, size_t count, bool has_padding,
                    uint64_t padding);
  // Copies lent memory, if there is any. After a failure it is still lent.
  Status take_lent(BufferPool& pool, const Rows& rows);
  // Takes the keys of a part that could not be resolved.
  Status take_keys(BufferPool& pool, const Part& from);
  // Prepares for keys that a device sends. Their ids are not checked yet.
  Status expect_keys(size_t count, bool has_padding, uint64_t padding);
  // Keys -> slots. With kReserve the slots are held from then on; after a failure none is held.
  Status find_slots(BufferPool& pool, Rows& rows, Rows::Missing missing, Vector<uint32_t>* created);
  // Keys -> slots -> sorted pairs -> distinct rows. Newly existing rows go to `created`. Holds as
  // find_slots does.
  Status resolve(BufferPool& pool, Rows& rows, Rows::Missing missing, Vector<uint32_t>* created);
  // Releases the slots of a part that holds them. The thread that takes the part out of use calls
  // this once.
  void release_hold(Rows& rows) const;
  // Returns whether these are exactly the declared keys.
  bool same_keys(const uint64_t* other, size_t count) const;
  // Returns whether the part has a row with this slot.
  bool contains(uint32_t slot) const;

 private:
  Status sort_rows(BufferPool& pool, const Rows& rows);
  // Checks and takes slots from another process, which may be any numbers.
  Status take_slots(const Rows& rows, Buffer&& copy);
};

using PartRef = std::shared_ptr<Part>;

inline PartRef make_part() { return std::allocate_shared<Part>(HeapAllocator<Part>()); }

}  // namespace frugal
