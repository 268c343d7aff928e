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
#include "storage/idle_places.h"
#include "storage/places.h"
#include "storage/storage_tier.h"

namespace frugal {

class StoredRows : public HeapObject {
 public:
  StoredRows(Places& places, RowMemory& memory, Tier behind)
      : places_(places),
        memory_(memory),
        store_(std::move(behind.store)),
        room_(std::move(behind.room)) {}
  Status open(MemoryBudget* budget) {
    Lock lock(places_.mu);
    return idle_.open(places_.capacity(), budget);
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
  Status find_places(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised = nullptr);
  void promise_no_more(uint64_t rows);
  // What a row becomes that has no place, for which, if it is new, there is room promised; and that
  // it is none any more. Where it has a place by now (*placed) nothing is done.
  Status put(uint64_t key, const device::RowsView& row, bool* placed, bool* created);
  void forget(uint64_t key, bool* placed, bool* was);

  // For the table's Rows, whose places these are. The row here is there for good; or was, and its
  // place is reserved.
  void committed(Places& places, uint32_t slot) REQUIRES(places.mu);
  void removed(Places& places, uint32_t slot) REQUIRES(places.mu);
  // Rows that are far, those that are loading included; records, of rows that are here.
  uint64_t stored(Places& places) const REQUIRES(places.mu);
  uint64_t being_written(Places& places) const REQUIRES(places.mu);
  uint64_t memory_bytes(Places& places) const REQUIRES(places.mu);
  // As Rows::enumerate(), which takes the lock.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  StorageTier& store() const { return *store_; }

 private:
  void are_mine(const Places& places) const ASSERT_CAPABILITY(places_.mu) {
    FRUGAL_ASSERT(&places == &places_);
  }
  Status take_places(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t could,
                     uint32_t* slots, uint64_t* lacking);
  void give_back(uint32_t* slots, size_t n, uint64_t could) REQUIRES(places_.mu);
  Status add(uint64_t key, uint32_t* slot) REQUIRES(places_.mu);
  Status leave(uint64_t places, uint64_t* gone);
  void skip_loaded() REQUIRES(places_.mu);
  void hold_place(uint32_t slot) REQUIRES(places_.mu);
  void release(uint32_t slot, uint64_t times) REQUIRES(places_.mu);
  void become_idle(uint32_t slot) REQUIRES(places_.mu);
  void tell_room() REQUIRES(places_.mu);
  uint64_t free() const REQUIRES(places_.mu) {
    return places_.capacity() - places_.index().size();
  }
  // Rows of the table, and places for which there may be one.
  uint64_t taken() const REQUIRES(places_.mu) {
    return places_.existing() + stored_ + places_.reserved() - loading_ + promised_;
  }

  Places& places_;
  RowMemory& memory_;
  Mutex admit_;  // one call at a time looks for places; before the places' lock
  const std::unique_ptr<StorageTier> store_;
  const std::function<void()> room_;
  // Places that nobody has begun to load, from load_at_ on.
  Vector<uint32_t> to_load_ GUARDED_BY(places_.mu);
  size_t load_at_ GUARDED_BY(places_.mu) = 0;
  std::atomic<uint64_t> loading_{0};               // places; changed with the lock held
  uint64_t stored_ GUARDED_BY(places_.mu) = 0;
  uint64_t leaving_ GUARDED_BY(places_.mu) = 0;    // whose records are being written
  uint64_t promised_ GUARDED_BY(places_.mu) = 0;   // rows that puts are about to make
  IdlePlaces idle_ GUARDED_BY(places_.mu);         // of rows that are here, and that nobody holds
  std::atomic<bool> lacking_{false};  // room_ is to be called; changed with the lock held
};

}  // namespace frugal
