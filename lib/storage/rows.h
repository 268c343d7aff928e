// The rows of one table: the map from keys to slots (slot_map.h), the rows' memory (row_memory.h),
// and the storage tier, if there is one (stored_rows.h).
//
// A row is known by its slot, a 32-bit number below the capacity. Dense tables: slot = id. Hashed
// tables: slots come from a free list, and an index maps key -> slot. A flag byte says whether the
// row exists or is only reserved by a declaration. Every mapping of keys to slots goes through
// resolve().
//
// Threads: `SlotMap::mu` guards the key mapping. It is the rows' lock.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/heap.h"
#include "storage/row_memory.h"
#include "storage/slot_map.h"
#include "storage/stored_rows.h"

namespace frugal {

// Fails with KEY_OUT_OF_RANGE, which names the first id that is neither below `capacity` nor
// *padding.
Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity);
// The same check, and the slots: kNoSlot for *padding, if `padding` is not null. After a failure
// `slots` has any content.
Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                   uint32_t* slots);

class Rows : public RowMemory {
 public:
  // What resolve() does with keys that have no row.
  enum class Missing { kLeave, kReserve, kCreate, kCreateBlank };

  // `tier`: the storage tier of a hashed table. With one, capacity() is the number of slots in
  // memory.
  Status open(const Config& config, MemoryBudget* budget, Tier tier = {});
  // pin_next makes one more committed slab of values or state visible to devices (*any: there was
  // one). unpin hides all of them. Slabs that are committed later become visible if there is a
  // device. Neither may run concurrently with initialize_range.
  Status pin_next(bool* any);
  void unpin();

  // Changes to another optimizer's state. The caller calls open_state; for eager dense tables
  // fill_state of all rows, under the rules of initialize_range; then take_state. No thread may
  // read or write state during take_state. A failure changes nothing.
  Status take_state(State* state);
  // For reads that may run concurrently with take_state.
  device::RowsView ref_now() {
    Lock lock(slots_.mu);
    return ref();
  }
  uint32_t state_floats() {
    Lock lock(slots_.mu);
    return layout().state_floats;
  }
  size_t exported_bytes(bool with_state) {
    Lock lock(slots_.mu);
    return layout().exported_bytes(with_state);
  }

  // Finds the slots of n keys. Keys equal to *padding (if not null) get kNoSlot. Dense tables:
  // dense_slots, then begin_rows. Hashed tables, by `missing`:
  // - kLeave: a missing key gets kMissingSlot.
  // - kReserve: missing rows are reserved. Each slot is held as often as its key is named, and
  //   release_hold() must follow. Holds of existing rows are not counted.
  // - kCreate: all rows exist afterwards, and none is held. Slots that are new are appended to
  //   `created`.
  // - kCreateBlank: the same, and the caller writes all values and state of the rows.
  //
  // After a failure no slot is held, and no row exists that did not exist before.
  Status resolve(const uint64_t* keys, size_t n, const uint64_t* padding, Missing missing,
                 uint32_t* slots, Vector<uint32_t>* created);
  // Memory for the keys of `n` more rows of a hashed table.
  Status expect_keys(uint64_t n);
  // Releases one hold of each of `slots`; with `start`, start[i + 1] - start[i] holds of slots[i].
  // Reserved slots without holders become free. kNoSlot and kMissingSlot are ignored.
  void release_hold(const uint32_t* slots, size_t n, const uint32_t* start = nullptr);
  // Initializes rows of a lazy dense table at their first use. Rows of other tables are there
  // already.
  Status begin_rows(const uint32_t* slots, size_t n);

  // The storage tier, or null. With one, it does the work of resolve() and release_hold().
  StoredRows* tier() const { return tier_.get(); }
  // With a storage tier: one more hold, or one less, of each of `slots`. hold() throws when memory
  // is lacking, and then holds none.
  void hold(const uint32_t* slots, size_t n) {
    if (tier_) tier_->hold(slots, n);
  }
  void unhold_backed(const uint32_t* slots, size_t n) {
    if (tier_) tier_->release_hold(slots, n);
  }

  // check_dense_ids, for a dense table.
  Status check_ids(const uint64_t* keys, size_t n, const uint64_t* padding) const;
  // Turns reserved rows among `slots` into existing ones.
  void create_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* created);
  // The same by an uncommitted step; `next_commit` is the first uncommitted one. The rows' flag
  // bytes bear the step's mark, also for readers in other processes. Such rows are *uncommitted*.
  //
  // Rows that bear the mark of a later step get the mark of this one, because its undo removes them
  // too. They are appended to `earlier`. There are fewer uncommitted steps than SlotMap::kMarks.
  // Throws when memory is lacking, and changes nothing then.
  void use(const uint32_t* slots, size_t n, uint64_t step, uint64_t next_commit,
           Vector<uint32_t>* created, Vector<uint32_t>* earlier);
  // The step is committed: rows that bear its mark become permanent.
  void commit(const uint32_t* slots, size_t n, uint64_t step);
  // Uncommitted steps are undone: the uncommitted rows among `slots` cease to exist.
  void undo(const uint32_t* slots, size_t n);
  // The rows cease to exist. With `reinitialize` (a deletion) they get initial values again. Their
  // slots are reserved, and their holders are unknown until recount(). Returns how many rows
  // existed.
  uint64_t uncreate(const uint32_t* slots, size_t n, bool reinitialize);
  bool exists(uint32_t slot);
  // Returns whether any reserved slots have unknown holders. The load is sequentially consistent,
  // as is the count of calls. So either the thread that ends a call sees such slots, or the thread
  // that made them sees that no call is left.
  bool holders_unknown() const { return any_unknown_.load(); }
  // Counts the unknown holders. each(visit) must call visit(slots, n, start) for every holder, with
  // ascending slots and `start` as in release_hold(). Throws when memory is lacking, and does
  // nothing then.
  //
  // Does nothing if quiet() is false. quiet() is called with the rows' lock held: another thread
  // may be about to find rows or to release them.
  template <class Quiet, class Each>
  void recount(Quiet quiet, Each each);
  bool has_reserved() const { return slots_.reserved() != 0; }
  // Lists the slots among `slots` that are reserved only, and those that are uncommitted. Each row
  // is seen at one moment.
  void collect_new(const uint32_t* slots, size_t n, Vector<uint32_t>* reserved,
                   Vector<uint32_t>* uncommitted);
  bool any_reserved(const uint32_t* slots, size_t n);  // of `slots`

  uint64_t key_of(uint32_t slot) const { return hashed_ ? slots_.key_of(slot) : slot; }
  uint64_t count();
  // Returns keys of existing rows from slot *cursor on.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  // Adds a watcher that is notified of each write from now on. No thread may write meanwhile. There
  // may be kMostWatchers. `former` (or null) is removed.
  void watch(RowWatcher* watcher, RowWatcher* former = nullptr);
  // Adds a watcher, and calls visit(first, n, exist) for all rows that have memory, then for those
  // that exist, with the rows' lock held. A false result ends that, and the watcher is not added.
  template <class Visit>
  bool watch_all(RowWatcher* watcher, Visit visit);
  void unwatch(RowWatcher* watcher);  // no thread may write meanwhile
  // Calls of() with the rows' lock held: no row is created or deleted meanwhile.
  template <class Of>
  void locked(Of of) {
    Lock lock(slots_.mu);
    of();
  }
  uint64_t capacity() const { return slots_.capacity(); }  // slots in memory
  // Whether a key's slot is its own number. Otherwise resolve() finds the slot, which another key
  // may get later.
  bool keys_are_slots() const { return !hashed_; }
  // Whether any key is valid, and its row is created at use. Otherwise keys are below the capacity,
  // and all rows exist.
  bool any_key() const { return hashed_; }
  bool lazy() const { return lazy_; }
  // Where the number of used slots of a hashed table is also stored; or null.
  void tell_slots(std::atomic<uint64_t>* count);
  uint64_t memory_bytes();
  // Appends the descriptors of the existing arrays, in the order of kArrays, if they are in shared
  // memory. Returns a bit for each.
  enum Arrays { kValues, kState, kKeys, kFlags, kArrays };
  uint32_t mappings(Vector<int>* descriptors) const;

 private:
  void remove(uint32_t slot) REQUIRES(slots_.mu);
  static void count_holds(const Vector<uint32_t>& of, const uint32_t* slots, size_t n,
                          const uint32_t* start, Vector<uint64_t>* counts);
  void list_unknown() REQUIRES(slots_.mu);
  void free_unheld(const Vector<uint64_t>& counts) REQUIRES(slots_.mu);
  void create(uint32_t slot, uint8_t mark) REQUIRES(slots_.mu);

  bool hashed_ = false, lazy_ = false;
  SlotMap slots_{*this};
  std::unique_ptr<StoredRows> tier_;                        // or null
  Vector<uint32_t> holders_unknown_ GUARDED_BY(slots_.mu);  // slots that recount() must count
  uint64_t unlisted_ GUARDED_BY(slots_.mu) = 0;  // further ones, not listed for lack of memory
  std::atomic<bool> any_unknown_{false};         // either of the two; changed with the lock held
};

template <class Visit>
bool Rows::watch_all(RowWatcher* watcher, Visit visit) {
  Lock lock(slots_.mu);
  if (!lazy_) {
    if (!visit(0, static_cast<uint32_t>(capacity()), true)) return false;
  } else {
    const uint64_t end = hashed_ ? slots_.handed_out() : capacity();
    if (hashed_ && end && !visit(0, static_cast<uint32_t>(end), false)) return false;
    for (uint64_t i = 0; i < end; ++i)
      if (!slots_.flag_slabs().committed(i))
        i |= SlabArray::kSlab - 1;  // a flag is a byte: the next slab
      else if (slots_.exists(static_cast<uint32_t>(i)) && !visit(static_cast<uint32_t>(i), 1, true))
        return false;
  }
  RowMemory::watch(watcher, nullptr);
  return true;
}

template <class Quiet, class Each>
void Rows::recount(Quiet quiet, Each each) {
  Lock lock(slots_.mu);
  if (!holders_unknown() || !quiet()) return;
  list_unknown();
  Vector<uint64_t> counts(holders_unknown_.size());
  each([&](const uint32_t* slots, size_t n, const uint32_t* start) {
    slots_.mu.assert_held();
    count_holds(holders_unknown_, slots, n, start, &counts);
  });
  free_unheld(counts);
}

}  // namespace frugal
