// From an update to rows: the rank sums of each row in order, the optimizer, the row.
//
// All rows that a step changes are written here: a chunk of an update that is applied at once, rows
// that were claimed from the window, and what a read-out works out when the engine's process is
// dead.
#pragma once
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

constexpr size_t kChunkRows = 1024;  // of an update that is cut

// What a thread works on while it writes rows. So applying takes no memory.
struct ApplyScratch {
  ApplyScratch(size_t ranks, size_t row_bytes) : row(row_bytes) {
    terms.reserve(kChunkRows, ranks);
  }
  TermList terms;
  Vector<char> row;  // staleness > 0: one, with its state, before others may see it
};

// What an update is applied to: a table's rows, or copies of some of them.
struct ApplyTo {
  explicit ApplyTo(Rows& rows) : table(&rows) {}
  // Row i of `rows` is the copy of slots[i]; slots ascend.
  ApplyTo(const device::RowsRef& rows, const Vector<uint32_t>& slots)
      : copies(rows), copied(&slots) {}
  Rows* table = nullptr;
  device::RowsRef copies{};
  const Vector<uint32_t>* copied = nullptr;
};

// Which rows of an update: those of a chunk, with the slots low .. high - 1, as cut(kChunkRows)
// makes them.
struct UpdateChunk {
  size_t number;
  uint64_t low, high;
};
// Or entries of its list, which make_list() has made.
struct UpdateEntries {
  const uint32_t* entries;
  size_t n;
};

// The update is one rank's, and no row may be read meanwhile: the kernels take the sums where they
// are, and apply() wants no scratch.
bool is_direct(const ApplyTo& to, const StepUpdate& update);

// Each returns the number of rows.
size_t apply(const ApplyTo& to, const StepUpdate& update, const UpdateChunk& chunk,
             ApplyScratch* scratch);
size_t apply(const ApplyTo& to, const StepUpdate& update, const UpdateEntries& which,
             ApplyScratch* scratch);

}  // namespace frugal
