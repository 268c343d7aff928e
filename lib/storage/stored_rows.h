// Rows of a table that has a store behind its memory (storage_tier.h): how places are found for
// rows that have none, and which rows leave theirs.
//
// A call gets places for all of its keys or for none, so nobody holds some and waits for the rest.
// What it finds here it holds before the first row leaves, and a row comes back only when all have
// their places: no two calls push each other's rows out without an end.
#pragma once
#include <functional>
#include <memory>

#include "base/assert.h"
#include "storage/idle_slots.h"
#include "storage/slot_map.h"
#include "storage/storage_tier.h"

namespace frugal {

class StoredRows : public HeapObject {
 public:
  StoredRows(SlotMap& slots, RowMemory& memory, Tier behind)
      : slots_(slots),
        memory_(memory),
        store_(std::move(behind.store)),
        room_(std::move(behind.room)) {}
  Status open(MemoryBudget* budget) {
    Lock lock(slots_.mu);
    return idle_.open(slots_.capacity(), budget);
  }

  // As Rows::resolve(), but that places are held whether their rows exist or not, and where rows
  // that are missing are left (`leaves`), too. A row that is far gets a place that is loading, or
  // none. BUSY: there are not so many places now; Tier::room will tell.
  Status resolve(const uint64_t* keys, size_t n, const uint64_t* padding, bool leaves,
                 uint32_t* slots);
  // These are held once more. Throws where there is no memory, and none is then.
  void hold(const uint32_t* slots, size_t n);
  // As Rows::release_hold().
  void release_hold(const uint32_t* slots, size_t n, const uint32_t* start = nullptr);
  // Is any place loading? The first of slots[from, n) that is; n: none.
  bool loading() const { return loading_.load() != 0; }
  size_t first_loading(const uint32_t* slots, size_t from, size_t n);
  // Brings some rows in whose places are loading. *any: there were some. What fails, or throws
  // where there is no memory, is to be done again.
  Status load_some(bool* any);
  // Somebody has found no places, and nobody has let go of any since.
  bool lacking() const { return lacking_.load(); }

  // Outside steps. For a key whose row had no place: a copy of its row, if it has one.
  Status read(uint64_t key, const device::RowsRef& out, bool* there);
  // Keys that have a place, all at one moment, are held, and others get kMissingSlot. With
  // `promised`, there is to be room for new rows of all that have neither a place nor a record, so
  // many: put() uses it up, and what is left promise_no_more() takes back. Throws where there is no
  // memory. After a failure nothing is held.
  Status find_slots(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised = nullptr);
  void promise_no_more(uint64_t rows);
  // What a row becomes that has no place, for which, if it is new, there is room promised; and that
  // it is none any more. Where it has a place by now (*placed) nothing is done.
  Status put(uint64_t key, const device::RowsView& row, bool* placed, bool* created);
  void forget(uint64_t key, bool* placed, bool* was);

  // For the table's Rows, whose places these are. The row here is there for good; or was, and its
  // place is reserved.
  void committed(SlotMap& slots, uint32_t slot) REQUIRES(slots.mu);
  void removed(SlotMap& slots, uint32_t slot) REQUIRES(slots.mu);
  // Rows that are far, those that are loading included; records, of rows that are here.
  uint64_t stored(SlotMap& slots) const REQUIRES(slots.mu);
  uint64_t being_written(SlotMap& slots) const REQUIRES(slots.mu);
  uint64_t memory_bytes(SlotMap& slots) const REQUIRES(slots.mu);
  // As Rows::enumerate(), which takes the lock.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  StorageTier& store() const { return *store_; }

 private:
  void are_mine(const SlotMap& slots) const ASSERT_CAPABILITY(slots_.mu) {
    FRUGAL_ASSERT(&slots == &slots_);
  }
  Status take_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t could,
                     uint32_t* slots, uint64_t* lacking);
  void give_back(uint32_t* slots, size_t n, uint64_t could) REQUIRES(slots_.mu);
  Status add(uint64_t key, uint32_t* slot) REQUIRES(slots_.mu);
  Status leave(uint64_t wanted, uint64_t* gone);
  void skip_loaded() REQUIRES(slots_.mu);
  void hold_slot(uint32_t slot) REQUIRES(slots_.mu);
  void release(uint32_t slot, uint64_t times) REQUIRES(slots_.mu);
  void become_idle(uint32_t slot) REQUIRES(slots_.mu);
  void tell_room() REQUIRES(slots_.mu);
  uint64_t free() const REQUIRES(slots_.mu) {
    return slots_.capacity() - slots_.index().size();
  }
  // Rows of the table, and places for which there may be one.
  uint64_t taken() const REQUIRES(slots_.mu) {
    return slots_.existing() + stored_ + slots_.reserved() - loading_ + promised_;
  }

  SlotMap& slots_;
  RowMemory& memory_;
  Mutex admit_;  // one call at a time looks for places; before the places' lock
  const std::unique_ptr<StorageTier> store_;
  const std::function<void()> room_;
  // Places that nobody has begun to load, from load_at_ on.
  Vector<uint32_t> to_load_ GUARDED_BY(slots_.mu);
  size_t load_at_ GUARDED_BY(slots_.mu) = 0;
  std::atomic<uint64_t> loading_{0};               // places; changed with the lock held
  uint64_t stored_ GUARDED_BY(slots_.mu) = 0;
  uint64_t leaving_ GUARDED_BY(slots_.mu) = 0;    // whose records are being written
  uint64_t promised_ GUARDED_BY(slots_.mu) = 0;   // rows that puts are about to make
  IdleSlots idle_ GUARDED_BY(slots_.mu);         // of rows that are here, and that nobody holds
  std::atomic<bool> lacking_{false};  // room_ is to be called; changed with the lock held
};

}  // namespace frugal
