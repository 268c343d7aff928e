// The host rows of one table: values, optimizer state, and which row is whose.
//
// A row is known by its slot, a 32-bit number below the capacity; slot i's values lie i pitches
// behind those of slot 0, its state beside it in a parallel array, so that values keep their
// alignment. Dense tables: slot = id. Hashed tables: slots come from a free list, an index maps
// key -> slot, and a flag byte says whether the row exists or is only reserved by a declaration.
// Everything that maps keys to slots goes through resolve(): the one seam for later tiers.
//
// A place of a hashed table has one life: free; reserved, which lasts while somebody holds it
// (storage/holders.h); here, from when the row exists. A row that exists no longer is reserved
// again, or its place free at once. Where rows have a store behind the memory (far_store.h), a
// place is loading before it is here, where the row comes from there, and leaving behind it; and
// who holds a place is counted in each of these states.
//
// Threads: values and state of a row are written through a RowWrite, by whoever applies its update
// (the engine sees to it that this is one thread at a time and nobody reads meanwhile). The key
// mapping is guarded by this class's own mutex.
#pragma once
#include <algorithm>
#include <cstdint>

#include "arith/init.h"
#include "base/heap.h"
#include "base/sync.h"
#include "device/kernels.h"
#include "storage/far_store.h"
#include "storage/holders.h"
#include "storage/key_index.h"
#include "storage/row_write.h"
#include "storage/slab.h"

namespace frugal {

constexpr uint32_t kNoSlot = device::kPaddingSlot;       // padding: no row at all
constexpr uint32_t kMissingSlot = device::kMissingSlot;  // a key without a row

// Fails with KEY_OUT_OF_RANGE naming the first id that is not below `capacity`, nor *padding.
Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity);
// The same, and their slots, which a failure leaves in any state: kNoSlot for *padding, if that is
// not null.
Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                   uint32_t* slots);

// How a row lies in memory, in bytes: only this, device::RowsRef and the kernels know what an
// element is.
struct RowLayout {
  uint32_t dim = 0;
  uint32_t state_columns = 0;  // of dim floats each; row-wise Adagrad: 0 and state_floats 1
  uint32_t state_floats = 0;   // as exported
  size_t value_pitch = 0;      // bytes from row to row
  size_t state_pitch = 0;
  size_t sums_stride = 0;      // floats from row to row: of sums, which are padded as values are
  static RowLayout of(uint32_t dim, int32_t optimizer);
  // Rows that lie so at `values` and `state`.
  device::RowsRef at(void* values, void* state) const;
  // Of one row: as it lies here, and as it is exported.
  size_t bytes() const { return value_pitch + state_pitch; }
  size_t value_bytes() const { return dim * sizeof(device::Element); }
  size_t sums_bytes() const { return sums_stride * sizeof(float); }
  size_t exported_bytes(bool with_state) const {
    return (dim + (with_state ? state_floats : 0)) * sizeof(float);
  }
  // A row's state as it is exported, and back: columns of dim floats.
  void export_state(const device::Element* state, float* out) const;
  void import_state(const float* in, device::Element* state) const;
  // A row's state as it begins.
  void new_state(const arith::InitSpec& init, device::Element* state) const;
};

class Rows : public HeapObject {
 public:
  struct Config {
    uint64_t capacity = 0;
    bool hashed = false;
    bool lazy = false;
    bool shared = false;
    std::shared_ptr<Pinner> pinner;  // of values and state
    RowLayout layout;
    arith::InitSpec init;
  };
  // What resolve() may do with keys that have no row.
  enum class Missing { kLeave, kReserve, kCreate };

  // `far`: of a hashed table, what is behind the memory; capacity() is that in places then.
  Status open(const Config& config, MemoryBudget* budget, FarRows far = {});
  // Another slab of values or state that is committed becomes visible to devices (*any: there was
  // one), or none is so any more; what is committed later is, if there is a device. Not beside
  // initialize_range.
  Status pin_next(bool* any);
  void unpin();
  // Eager dense tables: commits and initializes rows [first, first + n); chunks may run in
  // parallel if they do not share a slab (chunk_rows() rows and its multiples do not).
  Status initialize_range(uint64_t first, uint64_t n);
  uint64_t chunk_rows() const;

  // Another optimizer's state, in which all rows are new. In turn: open_state; of eager dense
  // tables fill_state of all rows, under the rules of initialize_range; take_state, beside which
  // nobody reads or writes state. A failure changes nothing.
  struct State {
    RowLayout layout;
    arith::InitSpec init;
    SlabArray array;
  };
  Status open_state(State* state) const;
  Status fill_state(State* state, uint64_t first, uint64_t n) const;
  Status take_state(State* state);
  // For who looks beside take_state.
  device::RowsView ref_now() {
    Lock lock(mu_);
    return ref_;
  }
  uint32_t state_floats() {
    Lock lock(mu_);
    return layout_.state_floats;
  }

  // Slots of n keys; keys equal to *padding (if not null) get kNoSlot. Dense: dense_slots, then
  // begin_rows. Hashed, kLeave: kMissingSlot where missing. kReserve: missing rows are reserved,
  // and each place is held as often as its key is named: let_go() is to follow. (Of rows that exist
  // nobody counts that.) kCreate: all exist afterwards, and none is held; newly existing slots are
  // appended to `created`. After a failure nothing is held, and nothing exists that did not.
  Status resolve(const uint64_t* keys, size_t n, const uint64_t* padding, Missing missing,
                 uint32_t* slots, Vector<uint32_t>* created);
  // The places of `slots` are held once less; with `start`, that of slots[i] start[i + 1] -
  // start[i] times. Those that are reserved only and that nobody holds any more are free. kNoSlot
  // and kMissingSlot are no places.
  void let_go(const uint32_t* slots, size_t n, const uint32_t* start = nullptr);
  // Initializes rows of a lazy dense table that have not been used before; those of other tables
  // are there.
  Status begin_rows(const uint32_t* slots, size_t n);

  // --- Rows that may be far (rows_far.cpp): where far() is not null. resolve() differs so: places
  // are held whether their rows exist or not, and with kLeave, too. A row that is far gets a place
  // that is loading, and with kLeave none. BUSY: there are not so many places now; room() will
  // tell.
  FarStore* far() const { return far_.get(); }
  // These are held once more. Throws where there is no memory, and none is then.
  void hold(const uint32_t* slots, size_t n) {
    if (far_) hold_far(slots, n);
  }
  void unhold(const uint32_t* slots, size_t n) {
    if (far_) let_go(slots, n);
  }
  // Is any place loading? The first of slots[from, n) that is; n: none.
  bool loading() const { return loading_.load() != 0; }
  size_t first_loading(const uint32_t* slots, size_t from, size_t n);
  // Brings some rows in whose places are loading. *any: there were some. What fails, or throws
  // where there is no memory, is to be done again.
  Status load_some(bool* any);
  // For a key whose row had no place. A copy of its row, if it has one.
  Status read_far(uint64_t key, const device::RowsRef& out, bool* there);
  // Outside steps. Keys that have a place, all at one moment, are held, and others get
  // kMissingSlot. With `promised`, there is to be room for new rows of all that have neither a
  // place nor a record, so many: put_far() uses it up, and what is left promise_no_more() takes
  // back. Throws where there is no memory. After a failure nothing is held.
  Status find_places(const uint64_t* keys, size_t n, uint32_t* slots, uint64_t* promised = nullptr);
  void promise_no_more(uint64_t rows);
  // What a row becomes that has no place, for which, if it is new, there is room promised; and that
  // it is none any more. Where it has a place by now (*placed) nothing is done.
  Status put_far(uint64_t key, const device::RowsView& row, bool* placed, bool* created);
  void forget_far(uint64_t key, bool* placed, bool* was);
  // Somebody has found no places, and nobody has let go of any since.
  bool lacking() const { return lacking_.load(); }

  // check_dense_ids, for a dense table.
  Status check_ids(const uint64_t* keys, size_t n, const uint64_t* padding) const;
  // Turns reserved rows among `slots` into existing ones.
  void create_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* created);
  // The same by an uncommitted step, of which `base` is the first: they bear its mark, in their
  // flag byte, for who reads that without us, too. Such rows are *young*. Those of a later step
  // bear the mark of this one from now on, for its undoing takes them back: they are appended to
  // `earlier`. Uncommitted steps are less than kMarks. Throws where there is no memory, and changes
  // nothing then.
  void use(const uint32_t* slots, size_t n, uint64_t step, uint64_t base, Vector<uint32_t>* created,
           Vector<uint32_t>* earlier);
  // The step is committed: rows that bear its mark are there for good.
  void settle(const uint32_t* slots, size_t n, uint64_t step);
  // Uncommitted steps are undone: those of `slots` that are young exist no longer.
  void undo(const uint32_t* slots, size_t n);
  static constexpr uint32_t kMarks = 63;
  static uint8_t mark_of(uint64_t step) { return static_cast<uint8_t>(1 + step % kMarks); }
  // Of a row's flag byte: whether the row exists, and its mark.
  static bool flag_exists(uint8_t flag) { return flag & kExists; }
  static uint8_t flag_mark(uint8_t flag) { return flag >> kMarkAt; }
  // Deleted rows (which get initial values again), or others, exist no longer: they are reserved,
  // and whether somebody holds them is unknown until recount(). Returns how many existed.
  uint64_t uncreate(const uint32_t* slots, size_t n, bool reinitialize);
  bool exists(uint32_t slot);
  // Are there reserved rows of which nobody knows who holds them? (Sequentially consistent, as is
  // the count of calls: whoever ends a call sees that there are, or who has made them so sees that
  // no call is left.)
  bool unsure() const { return any_unsure_.load(); }
  // Finds out: each(visit) is to call visit(slots, n, start) for every holder, with ascending
  // slots, as let_go() has them. Throws where there is no memory, and does nothing then; nor if
  // quiet() is false, which is asked with the rows' lock held: somebody else may be about to find
  // rows, or to let go.
  template <class Quiet, class Each>
  void recount(Quiet quiet, Each each);
  bool has_reserved() const { return reserved_.load(std::memory_order_relaxed) != 0; }
  // Those of `slots` that are reserved only, and those that are young: at one moment of each row's.
  void collect_new(const uint32_t* slots, size_t n, Vector<uint32_t>* reserved,
                   Vector<uint32_t>* young);
  bool any_reserved(const uint32_t* slots, size_t n);  // of `slots`

  uint64_t key_of(uint32_t slot) const {
    return hashed_ ? keys()[slot] : slot;
  }
  uint64_t count();
  // Keys of existing rows from slot *cursor on.
  size_t enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity);

  // To be read. RowWrite alone gives what can be written to.
  device::RowsView ref() const { return ref_; }
  const device::Element* values(uint32_t slot) const { return ref_.row(slot); }
  const device::Element* state(uint32_t slot) const { return ref_.state_row(slot); }
  const RowLayout& layout() const { return layout_; }
  void export_state(uint32_t slot, float* out) const { layout_.export_state(state(slot), out); }

  // Who hears of each write from now on; while nobody writes. There may be kMostWatchers.
  void watch(RowWatcher* watcher);
  // Rows that exist are read while they are written, from now on: under the words (kVersionWords)
  // that they share with other tables' rows, as the number tells.
  void read_beside(VersionWord* words, uint64_t number);
  bool versioned() const { return words_; }
  VersionWord* version(uint32_t slot) const {
    return words_ ? words_ + version_of(number_, slot) : nullptr;
  }
  // Writes rows outside of steps, in pieces: make(write, from, to) the rows from .. to - 1 of the
  // list.
  template <class Make>
  void write_outside(const uint32_t* slots, size_t n, Make make) {
    size_t most = n;
    for (uint32_t i = 0; i < watcher_count_; ++i)
      most = std::min(most, watchers_[i]->most_outside());
    for (size_t from = 0, to; from < n; from = to) {
      to = std::min(n, from + most);
      RowWrite write(*this, slots + from, to - from, {RowWrite::What::kOutside});
      make(write, from, to);
    }
  }
  uint64_t capacity() const { return capacity_; }  // places in memory
  uint64_t most_rows() const { return far_ ? most_rows_ : capacity_; }
  // Which slot has a key: its own number; else resolve() finds it, and the place may become another
  // row's.
  bool keys_are_slots() const { return !hashed_; }
  // Which keys may there be: any, whose rows come into being; else those below the capacity, which
  // all exist.
  bool any_key() const { return hashed_; }
  bool lazy() const { return lazy_; }
  const arith::InitSpec& init() const { return init_; }
  // Where else it is told how many slots have been handed out, of a hashed table; or null.
  void tell_slots(std::atomic<uint64_t>* elsewhere);
  uint64_t memory_bytes();
  // Descriptors of the arrays that there are, in the order of kArrays, if they are in shared
  // memory. Returns a bit for each.
  enum Arrays { kValues, kState, kKeys, kFlags, kArrays };
  uint32_t mappings(Vector<int>* descriptors) const;

 private:
  friend class RowWrite;
  Status ensure_memory(uint64_t first, uint64_t n);
  void initialize_slot(uint32_t slot, uint64_t key) REQUIRES(mu_);
  Status add_key(uint64_t key, uint32_t* slot) REQUIRES(mu_);
  void begin_place(uint32_t slot, uint64_t key) REQUIRES(mu_);
  void free_place(uint32_t slot) REQUIRES(mu_);
  void remove(uint32_t slot) REQUIRES(mu_);
  static void count_holds(const Vector<uint32_t>& of, const uint32_t* slots, size_t n,
                          const uint32_t* start, Vector<uint64_t>* counts);
  void list_unsure() REQUIRES(mu_);
  void settle_unsure(const Vector<uint64_t>& counts) REQUIRES(mu_);
  void create(uint32_t slot, uint8_t mark) REQUIRES(mu_);
  Status resolve_far(const uint64_t* keys, size_t n, const uint64_t* padding, bool leaves,
                     uint32_t* slots);
  Status take_places(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t could,
                     uint32_t* slots, uint64_t* lacking);
  void give_back(uint32_t* slots, size_t n, uint64_t could) REQUIRES(mu_);
  uint64_t within_reach() const REQUIRES(mu_) { return idle_ + capacity_ - index_.size(); }
  // Rows of the table, and places for which there may be one.
  uint64_t taken() const REQUIRES(mu_) {
    return existing_ + away_ + reserved_ - loading_ + promised_;
  }
  Status leave(uint64_t places, uint64_t* gone);
  void expect_to_load() REQUIRES(mu_);
  void skip_loaded() REQUIRES(mu_);
  size_t enumerate_far(uint64_t* cursor, uint64_t* keys, size_t capacity);
  void hold_far(const uint32_t* slots, size_t n);
  void hold_place(uint32_t slot) REQUIRES(mu_);
  void release(uint32_t slot, uint64_t times) REQUIRES(mu_);
  void become_idle() REQUIRES(mu_);
  void tell_room() REQUIRES(mu_);
  uint64_t* keys() const { return reinterpret_cast<uint64_t*>(keys_.base()); }
  uint8_t* flags() const { return reinterpret_cast<uint8_t*>(flags_.base()); }

  // A place that is leaving has a row that exists. One that is loading has none as yet; its mark is
  // no step's.
  static constexpr uint8_t kExists = 1, kReserved = 2, kLeaving = kExists | kReserved;
  static constexpr int kMarkAt = 2;
  static constexpr uint8_t kLoading = kReserved | 1 << kMarkAt;

  Mutex mu_;  // index, flags, holders, free list
  uint64_t capacity_ = 0;
  bool hashed_ = false, lazy_ = false;
  RowLayout layout_;
  arith::InitSpec init_;
  device::RowsRef ref_{};
  RowWatcher* watchers_[RowWrite::kMostWatchers] = {};
  uint32_t watcher_count_ = 0;
  VersionWord* words_ = nullptr;  // or null
  uint64_t number_ = 0;
  SlabArray values_, state_, keys_, flags_;
  MemoryBudget* budget_ = nullptr;
  std::shared_ptr<Pinner> pinner_;
  KeyIndex index_ GUARDED_BY(mu_);
  Holders holders_ GUARDED_BY(mu_);
  Vector<uint32_t> unsure_ GUARDED_BY(mu_);  // slots that recount() is to look at
  uint64_t unlisted_ GUARDED_BY(mu_) = 0;    // so many others, for which there was no memory
  std::atomic<bool> any_unsure_{false};      // either; changed with mu_ held
  // The place that became free last. In place of its key stands the one before.
  uint32_t free_ GUARDED_BY(mu_) = kNoSlot;
  uint64_t next_slot_ GUARDED_BY(mu_) = 0;
  std::atomic<uint64_t>* slots_told_ GUARDED_BY(mu_) = nullptr;
  uint64_t existing_ GUARDED_BY(mu_) = 0;
  uint64_t young_ GUARDED_BY(mu_) = 0;
  std::atomic<uint64_t> reserved_{0};  // changed with mu_ held
  // --- Of rows that may be far
  Mutex admit_;  // one call at a time looks for places; before mu_
  std::unique_ptr<FarStore> far_;
  std::function<void()> room_;
  uint64_t most_rows_ = 0;
  // Places that nobody has begun to load, from load_at_ on.
  Vector<uint32_t> to_load_ GUARDED_BY(mu_);
  size_t load_at_ GUARDED_BY(mu_) = 0;
  std::atomic<uint64_t> loading_{0};          // places; changed with mu_ held
  uint64_t away_ GUARDED_BY(mu_) = 0;         // rows that are far, those that are loading included
  uint64_t leaving_ GUARDED_BY(mu_) = 0;      // whose records are being written
  uint64_t promised_ GUARDED_BY(mu_) = 0;     // rows that puts are about to make
  uint64_t idle_ GUARDED_BY(mu_) = 0;         // rows that are here, and that nobody holds
  uint32_t hand_ GUARDED_BY(mu_) = 0;         // where the next that leaves is looked for
  std::atomic<bool> lacking_{false};          // room() is to be told; changed with mu_ held
};

template <class Quiet, class Each>
void Rows::recount(Quiet quiet, Each each) {
  Lock lock(mu_);
  if (!unsure() || !quiet()) return;
  list_unsure();
  Vector<uint64_t> counts(unsure_.size());
  each([&](const uint32_t* slots, size_t n, const uint32_t* start) {
    mu_.assert_held();
    count_holds(unsure_, slots, n, start, &counts);
  });
  settle_unsure(counts);
}

// (In line: lists of rows may be short.)
inline RowWrite::RowWrite(Rows& rows, const uint32_t* slots, size_t n, const Purpose& purpose,
                          const uint32_t* index) noexcept
    : table_(&rows), to_(&rows.ref_), slots_(slots), index_(index), n_(n), purpose_(purpose) {
  undo_.slot = nullptr;
  if (rows.watcher_count_) tell_before();
}

inline RowWrite::~RowWrite() {
  if (table_ && table_->watcher_count_) tell_after();
}

}  // namespace frugal
