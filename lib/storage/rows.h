// The rows of one table: which row is whose (places.h), in which memory (row_memory.h), and what
// lies behind it (stored_rows.h).
//
// A row is known by its slot, a 32-bit number below the capacity. Dense tables: slot = id. Hashed
// tables: slots come from a free list, an index maps key -> slot, and a flag byte says whether the
// row exists or is only reserved by a declaration. Everything that maps keys to slots goes through
// resolve().
//
// Threads: the key mapping is guarded by the places' mutex, which is the rows' lock.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/heap.h"
#include "storage/slot_map.h"
#include "storage/row_memory.h"
#include "storage/stored_rows.h"

namespace frugal {

// Fails with KEY_OUT_OF_RANGE naming the first id that is not below `capacity`, nor *padding.
Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity);
// The same, and their slots, which a failure leaves in any state: kNoSlot for *padding, if that is
// not null.
Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                   uint32_t* slots);

class Rows : public RowMemory {
 public:
  // What resolve() may do with keys that have no row.
  enum class Missing { kLeave, kReserve, kCreate };

  // `tier`: of a hashed table, what is behind the memory; capacity() is that in places then.
  Status open(const Config& config, MemoryBudget* budget, Tier tier = {});
  // Another slab of values or state that is committed becomes visible to devices (*any: there was
  // one), or none is so any more; what is committed later is, if there is a device. Not beside
  // initialize_range.
  Status pin_next(bool* any);
  void unpin();

  // Another optimizer's state. In turn: open_state; of eager dense tables fill_state of all rows,
  // under the rules of initialize_range; take_state, beside which nobody reads or writes state. A
  // failure changes nothing.
  Status take_state(State* state);
  // For who looks beside take_state.
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

  // Slots of n keys; keys equal to *padding (if not null) get kNoSlot. Dense: dense_slots, then
  // begin_rows. Hashed, kLeave: kMissingSlot where missing. kReserve: missing rows are reserved,
  // and each place is held as often as its key is named: release_hold() is to follow. (Of rows that
  // exist nobody counts that.) kCreate: all exist afterwards, and none is held; newly existing
  // slots are appended to `created`. After a failure nothing is held, and nothing exists that did
  // not.
  Status resolve(const uint64_t* keys, size_t n, const uint64_t* padding, Missing missing,
                 uint32_t* slots, Vector<uint32_t>* created);
  // The places of `slots` are held once less; with `start`, that of slots[i] start[i + 1] -
  // start[i] times. Those that are reserved only and that nobody holds any more are free. kNoSlot
  // and kMissingSlot are no places.
  void release_hold(const uint32_t* slots, size_t n, const uint32_t* start = nullptr);
  // Initializes rows of a lazy dense table that have not been used before; those of other tables
  // are there.
  Status begin_rows(const uint32_t* slots, size_t n);

  // What is behind the memory, or null. Where there is something, resolve() and release_hold() are
  // its.
  StoredRows* tier() const { return tier_.get(); }
  // These are held once more, or less, where there is something. Throws where there is no memory,
  // and none is then.
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
  // The same by an uncommitted step, of which `next_commit` is the first: they bear its mark, in
  // their flag byte, for who reads that without us, too. Such rows are *uncommitted*. Those of a
  // later step bear the mark of this one from now on, for its undoing takes them back: they are
  // appended to `earlier`. Uncommitted steps are less than Places::kMarks. Throws where there is no
  // memory, and changes nothing then.
  void use(const uint32_t* slots, size_t n, uint64_t step, uint64_t next_commit,
           Vector<uint32_t>* created, Vector<uint32_t>* earlier);
  // The step is committed: rows that bear its mark are there for good.
  void commit(const uint32_t* slots, size_t n, uint64_t step);
  // Uncommitted steps are undone: those of `slots` that are uncommitted exist no longer.
  void undo(const uint32_t* slots, size_t n);
  // Deleted rows (which get initial values again), or others, exist no longer: they are reserved,
  // and whether somebody holds them is unknown until recount(). Returns how many existed.
  uint64_t uncreate(const uint32_t* slots, size_t n, bool reinitialize);
  bool exists(uint32_t slot);
  // Are there reserved rows of which nobody knows who holds them? (Sequentially consistent, as is
  // the count of calls: whoever ends a call sees that there are, or who has made them so sees that
  // no call is left.)
  bool holders_unknown() const { return any_unknown_.load(); }
  // Finds out: each(visit) is to call visit(slots, n, start) for every holder, with ascending
  // slots, as release_hold() has them. Throws where there is no memory, and does nothing then; nor
  // if quiet() is false, which is asked with the rows' lock held: somebody else may be about to
  // find rows, or to let go.
  template <class Quiet, class Each>
  void recount(Quiet quiet, Each each);
  bool has_reserved() const { return slots_.reserved() != 0; }
  // Those of `slots` that are reserved only, and those that are uncommitted: at one moment of each
  // row's.
  void collect_new(const uint32_t* slots, size_t n, Vector<uint32_t>* reserved,
                   Vector<uint32_t>* uncommitted);
  bool any_reserved(const uint32_t* slots, size_t n);  // of `slots`

  uint64_t key_of(uint32_t slot) const { return hashed_ ? slots_.key_of(slot) : slot; }
  uint64_t count();
  // Keys of existing rows from slot *cursor on.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  // Who hears of each write from now on; while nobody writes. There may be kMostWatchers.
  // `former` (or null) hears of none any more.
  void watch(RowWatcher* watcher, RowWatcher* former = nullptr);
  uint64_t capacity() const { return slots_.capacity(); }  // places in memory
  // Which slot has a key: its own number; else resolve() finds it, and the place may become another
  // row's.
  bool keys_are_slots() const { return !hashed_; }
  // Which keys may there be: any, whose rows come into being; else those below the capacity, which
  // all exist.
  bool any_key() const { return hashed_; }
  bool lazy() const { return lazy_; }
  // Where else it is told how many slots have been handed out, of a hashed table; or null.
  void tell_slots(std::atomic<uint64_t>* count);
  uint64_t memory_bytes();
  // Descriptors of the arrays that there are, in the order of kArrays, if they are in shared
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
  std::unique_ptr<StoredRows> tier_;                // or null
  Vector<uint32_t> holders_unknown_ GUARDED_BY(slots_.mu);  // slots that recount() is to look at
  uint64_t unlisted_ GUARDED_BY(slots_.mu) = 0;    // so many others: there was no memory
  std::atomic<bool> any_unknown_{false};            // either; changed with the lock held
};

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
