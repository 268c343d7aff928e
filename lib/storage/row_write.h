// The one way to write rows of a table: before the rows, the rows, after the rows.
//
// RowMemory gives const pointers. Who writes rows makes a RowWrite of them, writes through it, and
// lets it go. Who has to know of each write is a RowWatcher of the table: it hears of a list of
// rows before the first of them changes, and when the last has changed. It may also let the kernels
// keep each row as it was and tell when the row is written (device::Undo). Where nobody watches, a
// list of rows costs nothing more.
//
// A row that may be read meanwhile (staleness) is made elsewhere and stored under its version word
// (row_versions.h).
#pragma once
#include "device/undo.h"
#include "storage/row_versions.h"

namespace frugal {

class RowMemory;
class RowWrite;

// What a watcher keeps of a committed update until all of its rows are written.
class UpdateRecord {
 public:
  virtual ~UpdateRecord() = default;
};

class RowWatcher {
 public:
  // Rows are about to be written. If undo->slot is set, the kernels tell of each row by *undo; one
  // watcher of a table may do that. What it answers comes back in after().
  virtual uint32_t before(const RowWrite& write, device::Undo* undo) noexcept = 0;
  virtual void after(const RowWrite& write, uint32_t token) noexcept = 0;
  // All rows have the state of new rows, of which there may be more or fewer columns. Nobody is
  // inside a step.
  virtual void new_state() noexcept = 0;
  // Lists of rows outside of steps are cut into pieces of so many.
  virtual size_t most_outside() const = 0;

 protected:
  ~RowWatcher() = default;
};

// By one thread, for a list of distinct rows, which no other thread writes meanwhile.
class RowWrite {
 public:
  enum class What {
    kUpdate,   // rows of a committed update
    kOutside,  // rows outside of steps: nobody reads them meanwhile. They may be named twice
    kNew,      // rows that exist for nobody yet
  };
  struct Purpose {
    What what;
    // Of an update: what the watcher keeps of it, or null; and which of its rows these are: entries
    // of its list, or, if that is null, rows of a chunk.
    const UpdateRecord* record = nullptr;
    const uint32_t* entries = nullptr;
    size_t chunk = 0;
  };
  static constexpr size_t kMostWatchers = 4;  // of a table

  // Rows slots[i], or slots[index[i]], for i in 0 .. n - 1. No slots: all rows of a table that
  // nobody has seen yet.
  RowWrite(RowMemory& rows, const uint32_t* slots, size_t n, const Purpose& purpose,
           const uint32_t* index = nullptr) noexcept;
  // Copies of rows, which are the caller's alone.
  explicit RowWrite(const device::RowsRef& copies) noexcept : to_(&copies), purpose_{What::kNew} {
    undo_.slot = nullptr;
  }
  ~RowWrite();
  RowWrite(const RowWrite&) = delete;
  RowWrite& operator=(const RowWrite&) = delete;

  // The rows, by slot, for kernels that get undo(). Not for updates of rows that may be read
  // meanwhile.
  const device::RowsRef& in_place() const;
  const device::Undo* undo() const { return undo_.slot ? &undo_ : nullptr; }
  // Row i of the list becomes what was made elsewhere: values as wide as the row, in which it may
  // be read meanwhile, and state.
  void store(size_t i, const device::Element* values, const device::Element* state);
  // All rows of the purpose's chunk are written, these the last.
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
  device::Undo undo_;  // of it only the slot is set where nobody watches
  uint32_t tokens_[kMostWatchers];
};

}  // namespace frugal
