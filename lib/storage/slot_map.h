// The slots of a table: a flag byte each. Slots of hashed tables also have the key, the index key
// -> slot, and the count of holders.
//
// A slot of a hashed table is free, reserved or present. It is reserved while it has holders
// (storage/holders.h), and present once its row exists. When the row ceases to exist, the slot
// becomes reserved again, or free at once. With a storage tier (stored_rows.h) there are two more
// states. A slot is loading before it is present, if its row comes from storage. It is leaving
// after it was present. There the holders are counted in every state.
//
// The functions of this class are the transitions between these states. Only they write flags and
// keys. Their callers decide when. A slot of a lazy dense table is free until its row's first use.
#pragma once
#include <atomic>
#include <cstdint>

#include "base/assert.h"
#include "base/sync.h"
#include "storage/holders.h"
#include "storage/key_index.h"
#include "storage/row_memory.h"

namespace frugal {

constexpr uint32_t kNoSlot = device::kPaddingSlot;       // padding: no row at all
constexpr uint32_t kMissingSlot = device::kMissingSlot;  // a key without a row

class SlotMap {
 public:
  // Keys per hold of the lock: other threads run in between.
  static constexpr size_t kAtOnce = 8192;
  // A flag byte. The row of a leaving slot exists. A loading slot has no row yet; its mark is no
  // step's.
  static constexpr uint8_t kExists = 1, kReserved = 2, kLeaving = kExists | kReserved;
  static constexpr int kMarkAt = 2;
  static constexpr uint8_t kLoading = kReserved | 1 << kMarkAt;
  static constexpr uint32_t kMarks = 63;
  static uint8_t mark_of(uint64_t step) { return static_cast<uint8_t>(1 + step % kMarks); }
  // Whether the row exists, and its mark.
  static bool flag_exists(uint8_t flag) { return flag & kExists; }
  static uint8_t flag_mark(uint8_t flag) { return flag >> kMarkAt; }

  explicit SlotMap(RowMemory& memory) : memory_(memory) {}
  Status open(const RowMemory::Config& config, uint64_t slots, MemoryBudget* budget);

  Mutex mu;  // the key mapping, the slots, and the memory that is committed for them
  Holders holders GUARDED_BY(mu);

  uint64_t capacity() const { return capacity_; }
  uint8_t flag(uint32_t slot) const { return flags()[slot]; }
  bool exists(uint32_t slot) const { return flag_exists(flag(slot)); }
  uint64_t key_of(uint32_t slot) const { return keys()[slot]; }
  const KeyIndex& index() const REQUIRES(mu) { return index_; }
  // Slots that have been used: those below.
  uint64_t handed_out() const REQUIRES(mu) { return next_slot_; }
  uint64_t existing() const REQUIRES(mu) { return existing_; }
  uint64_t uncommitted() const REQUIRES(mu) { return uncommitted_; }  // of them, that bear a mark
  uint64_t reserved() const { return reserved_.load(std::memory_order_relaxed); }  // or loading

  // The row of a lazy dense table becomes present.
  Status begin_dense(uint32_t slot) REQUIRES(mu);
  // Reserves a free slot for the key, which must have none. TABLE_FULL: no slot is free. `blank`:
  // the caller writes the whole row, but for what no row writes, between and after its columns.
  Status add(uint64_t key, uint32_t* slot, bool blank = false) REQUIRES(mu);
  // Memory for the keys of `n` more rows, where there is an index.
  Status expect(uint64_t n) REQUIRES(mu) { return index_.make_room(n); }
  // Reserved -> free. The slot must have no holder. Takes no memory.
  void free(uint32_t slot) REQUIRES(mu);
  // Reserved or loading -> present. Mark 0: no mark.
  void create(uint32_t slot, uint8_t mark) REQUIRES(mu);
  // Present or leaving -> present, with this mark or none.
  void mark(uint32_t slot, uint8_t mark) REQUIRES(mu);
  // Present -> reserved.
  void remove(uint32_t slot) REQUIRES(mu);
  // Reserved -> loading.
  void load(uint32_t slot) REQUIRES(mu);
  // Present, without a mark -> leaving.
  void leave(uint32_t slot) REQUIRES(mu);

  // Where the number of used slots is also stored; or null.
  void tell_slots(std::atomic<uint64_t>* count) REQUIRES(mu);
  const SlabArray& key_slabs() const { return keys_; }
  const SlabArray& flag_slabs() const { return flags_; }
  uint64_t memory_bytes() const REQUIRES(mu) {
    return keys_.committed_bytes() + flags_.committed_bytes() + holders.memory_bytes() +
           index_.memory_bytes();
  }

 private:
  void begin_slot(uint32_t slot, uint64_t key, bool blank) REQUIRES(mu);
  uint64_t* keys() const { return reinterpret_cast<uint64_t*>(keys_.base()); }
  uint8_t* flags() const { return reinterpret_cast<uint8_t*>(flags_.base()); }

  RowMemory& memory_;
  uint64_t capacity_ = 0;
  SlabArray keys_, flags_;
  KeyIndex index_ GUARDED_BY(mu);
  // The slot that became free last. Its key field has the slot that became free before it.
  uint32_t free_ GUARDED_BY(mu) = kNoSlot;
  uint64_t next_slot_ GUARDED_BY(mu) = 0;
  std::atomic<uint64_t>* slots_told_ GUARDED_BY(mu) = nullptr;
  uint64_t existing_ GUARDED_BY(mu) = 0;
  uint64_t uncommitted_ GUARDED_BY(mu) = 0;
  std::atomic<uint64_t> reserved_{0};  // changed with mu held
};

inline void SlotMap::create(uint32_t s, uint8_t mark) {
  FRUGAL_ASSERT(s < next_slot_ && !exists(s) && (flag(s) & kReserved) && mark <= kMarks);
  flags()[s] = static_cast<uint8_t>(kExists | mark << kMarkAt);
  ++existing_;
  uncommitted_ += mark != 0;
  reserved_.fetch_sub(1, std::memory_order_relaxed);
}

inline void SlotMap::mark(uint32_t s, uint8_t mark) {
  FRUGAL_ASSERT(exists(s));
  uncommitted_ = uncommitted_ + (mark != 0) - (flag_mark(flag(s)) != 0);
  flags()[s] = static_cast<uint8_t>(kExists | mark << kMarkAt);
}

inline void SlotMap::load(uint32_t s) {
  FRUGAL_ASSERT(flag(s) == kReserved);
  flags()[s] = kLoading;
}

inline void SlotMap::leave(uint32_t s) {
  FRUGAL_ASSERT(flag(s) == kExists);
  flags()[s] = kLeaving;
}

}  // namespace frugal
