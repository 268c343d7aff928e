// The values and optimizer state of a table's rows, by slot.
//
// The values of slot i start i pitches after those of slot 0. Its state is in a parallel array, so
// values keep their alignment. Rows are read through const pointers. A thread that writes rows
// makes a RowWrite.
//
// Threads: the thread that applies a row's update writes its values and state. The engine ensures
// that this is one thread at a time and that no thread reads meanwhile. The caller (Rows)
// serializes the calls that commit, pin or take over memory, except initialize_range and
// fill_state.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "arith/init.h"
#include "base/heap.h"
#include "device/kernels.h"
#include "storage/row_write.h"
#include "storage/slab.h"

namespace frugal {

// The layout of a row in memory, in bytes. Elements are defined in device/element.h.
struct RowLayout {
  uint32_t dim = 0;
  uint32_t state_columns = 0;  // of dim floats each; row-wise Adagrad: 0 and state_floats 1
  uint32_t state_floats = 0;   // as exported
  size_t value_pitch = 0;      // bytes from row to row
  size_t state_pitch = 0;
  size_t sums_stride = 0;  // floats from row to row of sums, which are padded as values are
  static RowLayout of(uint32_t dim, int32_t optimizer);
  // Copies the members that depend on the optimizer from a layout of the same dim. Nothing else is
  // written.
  void take_state(const RowLayout& of) {
    state_columns = of.state_columns;
    state_floats = of.state_floats;
    state_pitch = of.state_pitch;
  }
  // Rows of this layout at `values` and `state`.
  device::RowsRef at(void* values, void* state) const;
  // Bytes of one row, in memory and exported.
  size_t bytes() const { return value_pitch + state_pitch; }
  size_t value_bytes() const { return dim * sizeof(device::Element); }
  size_t sums_bytes() const { return sums_stride * sizeof(float); }
  size_t exported_bytes(bool with_state) const {
    return (dim + (with_state ? state_floats : 0)) * sizeof(float);
  }
  // Conversions between a row in memory and the exported form, which has columns of dim floats. In
  // export_row `state` may be null.
  void export_row(const device::Element* values, const device::Element* state, float* out) const;
  void export_state(const device::Element* state, float* out) const;
  void import_state(const float* in, device::Element* state) const;
  // Writes the initial state of a row.
  void new_state(const arith::InitSpec& init, device::Element* state) const;
};

// The row's lines are to be in the processor's cache.
inline void prefetch_row(const device::RowsView& rows, uint32_t slot, bool with_state) {
  const char* row = reinterpret_cast<const char*>(rows.row(slot));
  for (size_t o = 0; o < rows.value_pitch; o += 64) __builtin_prefetch(row + o, 0, 2);
  if (!with_state) return;
  const char* state = reinterpret_cast<const char*>(rows.state_row(slot));
  for (size_t o = 0; o < rows.state_pitch; o += 64) __builtin_prefetch(state + o, 0, 2);
}

class RowMemory : public HeapObject {
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
  // State of another optimizer, initial in all rows.
  struct State {
    RowLayout layout;
    arith::InitSpec init;
    SlabArray array;
  };

  // Eager dense tables: commits and initializes rows [first, first + n); chunks may run in
  // parallel if they do not share a slab (chunk_rows() rows and its multiples do not).
  Status initialize_range(uint64_t first, uint64_t n);
  // The two halves of it, where rows are written in between: memory, under the same rules, and rows
  // that were not written.
  Status commit_range(uint64_t first, uint64_t n) { return ensure(first, n); }
  void initialize_rows(uint64_t first, uint64_t n);
  uint64_t chunk_rows() const;
  Status open_state(State* state) const;
  Status fill_state(State* state, uint64_t first, uint64_t n) const;

  // Read access. Only RowWrite gives write access.
  device::RowsView ref() const { return ref_; }
  const device::Element* values(uint32_t slot) const { return ref_.row(slot); }
  const device::Element* state(uint32_t slot) const { return ref_.state_row(slot); }
  const RowLayout& layout() const { return layout_; }
  const arith::InitSpec& init() const { return init_; }
  void export_state(uint32_t slot, float* out) const { layout_.export_state(state(slot), out); }
  // Called before rows are deleted. A failure changes nothing.
  Status expect_deletions(size_t n) {
    for (uint32_t i = 0; i < watcher_count_; ++i) FRUGAL_TRY(watchers_[i]->expect_deletions(n));
    return FRUGAL_OK;
  }
  uint64_t most_rows() const { return most_rows_; }  // for which addresses are reserved

  // From now on, existing rows may be read concurrently with their writes. Rows share the version
  // words (kVersionWords) with rows of other tables; `number` selects a row's word.
  void read_beside(VersionWord* words, uint64_t number);
  bool versioned() const { return words_; }
  VersionWord* version(uint32_t slot) const {
    return words_ ? words_ + version_of(number_, slot) : nullptr;
  }
  // Writes rows outside of steps, in pieces. make(write, from, to) must write the rows from .. to -
  // 1 of the list.
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

 protected:
  Status open(const Config& config, MemoryBudget* budget);
  void watch(RowWatcher* watcher, RowWatcher* former);
  void unwatch(RowWatcher* watcher);
  void tell_created(uint32_t slot) noexcept {
    for (uint32_t i = 0; i < watcher_count_; ++i) watchers_[i]->created(slot);
  }
  void tell_deleting(uint32_t slot) noexcept {
    for (uint32_t i = 0; i < watcher_count_; ++i) watchers_[i]->deleting(slot);
  }
  Status pin_next(bool* any);
  void unpin();
  Status take_state(State* state);
  const SlabArray& value_slabs() const { return values_; }
  const SlabArray& state_slabs() const { return state_; }
  // Commits memory for rows [first, first + n). Requires the rows' lock.
  Status ensure(uint64_t first, uint64_t n);
  // Makes the slot's row a new one of this key. All of its bytes are new.
  void initialize(uint32_t slot, uint64_t key);

 private:
  friend class SlotMap;
  friend class RowWrite;
  uint64_t most_rows_ = 0;
  RowLayout layout_;
  arith::InitSpec init_;
  device::RowsRef ref_{};
  RowWatcher* watchers_[RowWrite::kMostWatchers] = {};
  uint32_t watcher_count_ = 0;
  VersionWord* words_ = nullptr;  // or null
  uint64_t number_ = 0;
  SlabArray values_, state_;
  MemoryBudget* budget_ = nullptr;
  std::shared_ptr<Pinner> pinner_;
};

// Inline, because lists of rows may be short.
inline RowWrite::RowWrite(RowMemory& rows, const uint32_t* slots, size_t n, const Purpose& purpose,
                          const uint32_t* index) noexcept
    : table_(&rows), to_(&rows.ref_), slots_(slots), index_(index), n_(n), purpose_(purpose) {
  undo_.slot = nullptr;
  if (rows.watcher_count_) tell_before();
}

inline RowWrite::~RowWrite() {
  if (table_ && table_->watcher_count_) tell_after();
}

}  // namespace frugal
