// What the writers of rows record before and after each write. Another process reads it if this one
// was killed between any two instructions (engine/ledger.h).
//
// In the order of the program: the row is copied (its before-image), and `slot` names the row. The
// row is written, and then the write is recorded. The compiler may move no store across any of
// that. The machine's own order does not matter: a killed thread has done what its program says up
// to some instruction.
//
// Callers: the kernels, and RowWrite::store for rows that no kernel writes. All is inline, since
// files of wide instruction sets include it (device/cpu/vectors.inc).
#ifndef FRUGAL_DEVICE_UNDO_H_
#define FRUGAL_DEVICE_UNDO_H_

#include "device/kernels.h"

namespace frugal::device {

struct Undo {
  Element* values;  // of one row, as in the table
  Element* state;   // the same, state_pitch bytes; or NULL
  uint32_t* slot;
  uint64_t* progress;  // becomes a written row's slot + 1; or NULL, and then ...
  uint8_t* marks;      // ... marks[rows[i]] becomes 1 for entry i of the call; or NULL, too
  const uint32_t* rows;
  // For tests: called instead of these stores, when entry i has been copied, and when it is
  // written. Then progress and marks are NULL. Else NULL.
  void (*instead)(const Undo& undo, const RowsRef& of, uint32_t slot, size_t i, bool written);
  void* context;  // of that

  // Called before entry i of a call, which is that row, is written. copy() copies the row to values
  // and state.
  template <class Copy>
  FRUGAL_HD void keep(const RowsRef& of, uint32_t row, size_t i, Copy copy) const {
    copy();
    program_order();
    if (__builtin_expect(instead == nullptr, 1))
      __atomic_store_n(slot, row, __ATOMIC_RELEASE);
    else
      instead(*this, of, row, i, false);
    program_order();
  }
  // Called after the write.
  FRUGAL_HD void tell(const RowsRef& of, uint32_t row, size_t i) const {
    program_order();
    if (progress != nullptr)
      __atomic_store_n(progress, row + uint64_t{1}, __ATOMIC_RELEASE);
    else if (marks != nullptr)
      __atomic_store_n(marks + rows[i], uint8_t{1}, __ATOMIC_RELEASE);
    else
      instead(*this, of, row, i, true);
    program_order();
  }

 private:
  static FRUGAL_HD void program_order() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
};

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_UNDO_H_
