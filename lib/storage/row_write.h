// The one way to write rows, but for Rows::take_state: notify watchers, write, notify them again.
//
// RowMemory gives const pointers. To write rows, a thread makes a RowWrite of them, writes through
// it, and destroys it. An object that must see every write is a RowWatcher of the table. It is
// notified before the first row of a list changes and after the last one has changed. It may also
// let the kernels save each row's former content and mark the row as written (device::Undo). A
// table without watchers pays nothing for them.
//
// Where rows may be read concurrently (staleness), a row is computed elsewhere and stored under its
// version word (row_versions.h).
#pragma once
#include "device/undo.h"
#include "storage/row_versions.h"

namespace frugal {

class RowMemory;
class RowWrite;

// A watcher's record of a committed update. It lives until all rows of the update are written.
class UpdateRecord {
 public:
  virtual ~UpdateRecord() = default;
};

class RowWatcher {
 public:
  // before() precedes the write of the rows. If it sets undo->slot, the kernels report each row
  // through *undo; at most one watcher of a table may set it. after() receives what before()
  // returned.
  virtual uint32_t before(const RowWrite& write, device::Undo* undo) noexcept = 0;
  virtual void after(const RowWrite& write, uint32_t token) noexcept = 0;
  // All rows have the state of new rows, with perhaps another number of columns. No thread is
  // inside a step.
  virtual void new_state() noexcept = 0;
  // Lists of rows outside of steps are cut into pieces of at most so many.
  virtual size_t most_outside() const { return SIZE_MAX; }

  // These are called with the rows' lock held.
  // Rows [first, first + n) are about to have memory. The same rows may be named again.
  virtual Status expect(uint64_t first, uint64_t n) {
    (void)first, (void)n;
    return FRUGAL_OK;
  }
  // A row of a hashed table exists for good: it is created outside steps, or its step is committed.
  virtual void created(uint32_t slot) noexcept { (void)slot; }
  // A row that exists for good is about to be deleted.
  virtual void deleting(uint32_t slot) noexcept { (void)slot; }
  // Memory for so many of these calls. Without the rows' lock, between steps.
  virtual Status expect_deletions(size_t n) {
    (void)n;
    return FRUGAL_OK;
  }

 protected:
  ~RowWatcher() = default;
};

// Used by one thread, for a list of distinct rows. No other thread writes these rows meanwhile.
class RowWrite {
 public:
  enum class What {
    kUpdate,   // rows of a committed update
    kOutside,  // rows outside of steps, without concurrent reads. They may occur twice
    kNew,      // rows that no thread has seen yet
  };
  struct Purpose {
    What what;
    // Of an update: the watcher's record, or null, and which of its rows these are. They are
    // entries of its list or, if `entries` is null, rows of a chunk. Its step.
    const UpdateRecord* record = nullptr;
    const uint32_t* entries = nullptr;
    size_t chunk = 0;
    uint64_t step = 0;
  };
  static constexpr size_t kMostWatchers = 4;  // of a table

  // Rows slots[i], or slots[index[i]], for i in 0 .. n - 1. Without slots: all rows of a table that
  // no thread has seen yet.
  RowWrite(RowMemory& rows, const uint32_t* slots, size_t n, const Purpose& purpose,
           const uint32_t* index = nullptr) noexcept;
  // Copies of rows, to which only the caller has access.
  explicit RowWrite(const device::RowsRef& copies) noexcept : to_(&copies), purpose_{What::kNew} {
    undo_.slot = nullptr;
  }
  ~RowWrite();
  RowWrite(const RowWrite&) = delete;
  RowWrite& operator=(const RowWrite&) = delete;

  // The rows, by slot, for kernels that get undo(). Not for updates of rows that may be read
  // concurrently.
  const device::RowsRef& in_place() const;
  const device::Undo* undo() const { return undo_.slot ? &undo_ : nullptr; }
  // Stores a row that was computed elsewhere as row i of the list. `values` are as wide as the row,
  // which may be read concurrently.
  void store(size_t i, const device::Element* values, const device::Element* state);
  // The rows of this RowWrite complete the purpose's chunk.
  void chunk_done() { chunk_done_ = true; }

  // For watchers.
  const Purpose& purpose() const { return purpose_; }
  size_t size() const { return n_; }
  uint32_t slot(size_t i) const { return slots_[index_ ? index_[i] : i]; }
  device::RowsView rows() const { return *to_; }
  bool is_chunk_done() const { return chunk_done_; }

 private:
  void tell_before() noexcept;
  void tell_after() noexcept;
  RowMemory* table_ = nullptr;
  const device::RowsRef* to_;
  const uint32_t *slots_ = nullptr, *index_ = nullptr;
  size_t n_ = 0;
  Purpose purpose_;
  bool chunk_done_ = false;
  device::Undo undo_;  // without watchers only `slot` is set
  uint32_t tokens_[kMostWatchers];
};

}  // namespace frugal
