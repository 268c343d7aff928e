// Applies an update to rows: the rank sums of each row in order, then the optimizer, then the row.
//
// All rows that a step changes are written here: chunks of an update that is applied at once, rows
// that were claimed from the window, and rows that a read-out computes after the death of the
// engine's process.
#pragma once
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

constexpr size_t kChunkRows = 1024;  // of an update that is cut into chunks

// A thread's memory for writing rows, so that applying allocates nothing.
struct ApplyScratch {
  ApplyScratch(size_t ranks, size_t row_bytes) : row(row_bytes) {
    terms.reserve(kChunkRows, ranks);
  }
  TermList terms;
  Vector<char> row;  // staleness > 0: one row, with its state, before other threads may read it
};

// The target of an update: a table's rows, or copies of some of them.
struct ApplyTo {
  explicit ApplyTo(Rows& rows) : table(&rows) {}
  // Row i of `rows` is the copy of slots[i]; slots ascend.
  ApplyTo(const device::RowsRef& rows, const Vector<uint32_t>& slots)
      : copies(rows), copied(&slots) {}
  Rows* table = nullptr;
  device::RowsRef copies{};
  const Vector<uint32_t>* copied = nullptr;
};

// The rows of a chunk of an update, with the slots low .. high - 1, as cut(kChunkRows) makes them.
struct UpdateChunk {
  size_t number;
  uint64_t low, high;
};
// Rows of an update's list, which make_list() has made.
struct UpdateEntries {
  const uint32_t* entries;
  size_t n;
};

// Whether the update has one rank and no row may be read concurrently. Then the kernels read the
// sums in place, and apply() needs no scratch.
bool is_direct(const ApplyTo& to, const StepUpdate& update);

// Each returns the number of rows.
size_t apply(const ApplyTo& to, const StepUpdate& update, const UpdateChunk& chunk,
             ApplyScratch* scratch);
size_t apply(const ApplyTo& to, const StepUpdate& update, const UpdateEntries& which,
             ApplyScratch* scratch);

}  // namespace frugal
