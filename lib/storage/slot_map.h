// What the places of a table are: a flag byte each, and of hashed tables the key, the index
// key -> slot, and who holds it.
//
// A place of a hashed table has one life: free; reserved, which lasts while somebody holds it
// (storage/holders.h); here, from when the row exists. A row that exists no longer is reserved
// again, or its place free at once. Where rows have a store behind the memory (stored_rows.h), a
// place is loading before it is here, where the row comes from there, and leaving behind it; and
// who holds a place is counted in each of these states.
//
// The functions of this class are the steps of that life, and they alone write flags and keys. When
// to take one is for who calls. Of a lazy dense table a place is free until its row is first used.
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
  // Keys under one lock: other threads get their turn in between.
  static constexpr size_t kAtOnce = 8192;
  // A flag byte. A place that is leaving has a row that exists. One that is loading has none as
  // yet; its mark is no step's.
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

  Mutex mu;  // of the key mapping and of the places, and of the memory that is committed for them
  Holders holders GUARDED_BY(mu);

  uint64_t capacity() const { return capacity_; }
  uint8_t flag(uint32_t slot) const { return flags()[slot]; }
  bool exists(uint32_t slot) const { return flag_exists(flag(slot)); }
  uint64_t key_of(uint32_t slot) const { return keys()[slot]; }
  const KeyIndex& index() const REQUIRES(mu) { return index_; }
  // Slots that have been handed out: those below.
  uint64_t handed_out() const REQUIRES(mu) { return next_slot_; }
  uint64_t existing() const REQUIRES(mu) { return existing_; }
  uint64_t uncommitted() const REQUIRES(mu) { return uncommitted_; }  // of them, that bear a mark
  uint64_t reserved() const { return reserved_.load(std::memory_order_relaxed); }  // or loading

  // A row of a lazy dense table is there.
  Status begin_dense(uint32_t slot) REQUIRES(mu);
  // A free place is reserved for the key, which has none. TABLE_FULL: there is none.
  Status add(uint64_t key, uint32_t* slot) REQUIRES(mu);
  // One that is reserved, and that nobody holds, is free. Takes no memory.
  void free(uint32_t slot) REQUIRES(mu);
  // One that is reserved, or loading, is here. 0: without a mark.
  void create(uint32_t slot, uint8_t mark) REQUIRES(mu);
  // One that is here bears this mark, or none; and it does not leave.
  void mark(uint32_t slot, uint8_t mark) REQUIRES(mu);
  // One that is here is reserved.
  void remove(uint32_t slot) REQUIRES(mu);
  // One that is reserved is loading.
  void load(uint32_t slot) REQUIRES(mu);
  // One that is here, and bears no mark, is leaving.
  void leave(uint32_t slot) REQUIRES(mu);

  // Where else it is told how many slots have been handed out; or null.
  void tell_slots(std::atomic<uint64_t>* count) REQUIRES(mu);
  const SlabArray& key_slabs() const { return keys_; }
  const SlabArray& flag_slabs() const { return flags_; }
  uint64_t memory_bytes() const REQUIRES(mu) {
    return keys_.committed_bytes() + flags_.committed_bytes() + holders.memory_bytes() +
           index_.memory_bytes();
  }

 private:
  void begin_slot(uint32_t slot, uint64_t key) REQUIRES(mu);
  uint64_t* keys() const { return reinterpret_cast<uint64_t*>(keys_.base()); }
  uint8_t* flags() const { return reinterpret_cast<uint8_t*>(flags_.base()); }

  RowMemory& memory_;
  uint64_t capacity_ = 0;
  SlabArray keys_, flags_;
  KeyIndex index_ GUARDED_BY(mu);
  // The place that became free last. In place of its key stands the one before.
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
