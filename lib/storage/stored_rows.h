// Rows of a table with a storage tier (storage_tier.h): how rows get slots in memory, and which
// rows leave memory.
//
// A call gets slots for all of its keys or for none, so no call holds some slots and waits for
// more. It holds the slots that it finds before the first row leaves. A row is loaded only when all
// rows of its call have slots. So two calls cannot evict each other's rows without end.
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

  // As Rows::resolve(), with two differences. Slots are held whether their rows exist or not, also
  // where missing rows stay missing (`leaves`). A stored row gets a loading slot, or none. BUSY:
  // there are too few slots now; Tier::room will be called.
  Status resolve(const uint64_t* keys, size_t n, const uint64_t* padding, bool leaves,
                 uint32_t* slots);
  // Adds one hold of each slot. Throws when memory is lacking, and then holds none.
  void hold(const uint32_t* slots, size_t n);
  // As Rows::release_hold().
  void release_hold(const uint32_t* slots, size_t n, const uint32_t* start = nullptr);
  // loading() returns whether any slot is loading. first_loading() returns the position of the
  // first of slots[from, n) that is; n: none.
  bool loading() const { return loading_.load() != 0; }
  size_t first_loading(const uint32_t* slots, size_t from, size_t n);
  // Loads some rows whose slots are loading. *any: there were some. Rows that fail, also by a throw
  // for lack of memory, stay to be loaded.
  Status load_some(bool* any);
  // A call has found too few slots, and no slot has been released since.
  bool lacking() const { return lacking_.load(); }

  // Outside steps. Copies the row of a key without a slot, if the key has a row.
  Status read(uint64_t key, const device::RowsRef& out, bool* there);
  // Finds and holds the slots of keys, all at one moment; keys without a slot get kMissingSlot.
  // With `promised`, room is reserved for as many new rows as there are keys with neither a slot
  // nor a record. put() uses the room up, and promise_no_more() gives back the rest. Throws when
  // memory is lacking. After a failure no slot is held.
  Status find_slots(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised = nullptr);
  void promise_no_more(uint64_t rows);
  // put() writes the row of a key without a slot. A new row needs promised room. forget() removes
  // such a row. If the key has a slot by now (*placed), neither does anything.
  Status put(uint64_t key, const device::RowsView& row, bool* placed, bool* created);
  void forget(uint64_t key, bool* placed, bool* was);

  // For the table's Rows, which owns the slots. created(): a row begins to exist that was not
  // stored. committed(): the present row has become permanent.
  // removed(): the row was permanent, and its slot is reserved now.
  void created(SlotMap& slots) REQUIRES(slots.mu);
  void committed(SlotMap& slots, uint32_t slot) REQUIRES(slots.mu);
  void removed(SlotMap& slots, uint32_t slot) REQUIRES(slots.mu);
  // stored(): stored rows, including loading ones. being_written(): records that are being written
  // of rows in memory.
  uint64_t stored(SlotMap& slots) const REQUIRES(slots.mu);
  uint64_t being_written(SlotMap& slots) const REQUIRES(slots.mu);
  uint64_t memory_bytes(SlotMap& slots) const REQUIRES(slots.mu);
  // As Rows::enumerate(). No row is created or deleted meanwhile.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  StorageTier& store() const { return *store_; }

 private:
  // Keys in the order of key + 1: all for which that is at least `from`.
  struct KeyList {
    uint64_t from = 0;
    Vector<uint64_t> keys;
  };
  std::shared_ptr<const KeyList> list_from(uint64_t cursor);
  // The key has a row. `slot`: its slot, or none.
  bool is_row(uint64_t key, uint32_t slot) REQUIRES(slots_.mu);

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
  uint64_t free() const REQUIRES(slots_.mu) { return slots_.capacity() - slots_.index().size(); }
  // Rows of the table, and rows that its reserved slots and promises may add.
  uint64_t taken() const REQUIRES(slots_.mu) {
    return slots_.existing() + stored_ + slots_.reserved() - loading_ + promised_;
  }

  SlotMap& slots_;
  RowMemory& memory_;
  Mutex admit_;  // one call at a time searches for slots; taken before `SlotMap::mu`
  const std::unique_ptr<StorageTier> store_;
  const std::function<void()> room_;
  // Loading slots whose load no thread has begun, from load_at_ on.
  Vector<uint32_t> to_load_ GUARDED_BY(slots_.mu);
  size_t load_at_ GUARDED_BY(slots_.mu) = 0;
  std::atomic<uint64_t> loading_{0};  // slots; changed with the lock held
  uint64_t stored_ GUARDED_BY(slots_.mu) = 0;
  uint64_t leaving_ GUARDED_BY(slots_.mu) = 0;   // slots whose records are being written
  uint64_t promised_ GUARDED_BY(slots_.mu) = 0;  // rows that put() may still create
  IdleSlots idle_ GUARDED_BY(slots_.mu);         // present rows without holders
  // The last enumeration's; null: none, or a row was created since. creations_ counts those.
  std::shared_ptr<const KeyList> list_ GUARDED_BY(slots_.mu);
  uint64_t creations_ GUARDED_BY(slots_.mu) = 0;
  std::atomic<bool> lacking_{false};  // room_ must be called; changed with the lock held
};

}  // namespace frugal
