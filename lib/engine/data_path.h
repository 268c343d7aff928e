// What moves and sums rows for a trainer: gathers of resolved keys, sums of pushed gradients.
//
// No tables, steps or locks: rows, parts and buffers are given. An engine does this for its own
// trainers; a trainer in another process does it for itself, on memory that it shares with the
// engine.
#pragma once
#include "base/buffer.h"
#include "device/ops/reduce.h"
#include "frugal.h"
#include "window/step_update.h"

namespace frugal {

// What one rank has pushed for one table in its current step.
struct PushSums {
  RankGradients first;
  // fold32 of the first push may have to go on in later pushes: run sums of rows with more than 32
  // occurrences (row index, offset of its first run in `runs`).
  Vector<device::FrequentRow> frequent_list;
  Buffer runs;          // all of them, and as much again to work in
  uint32_t all_runs = 0;
  // Later pushes, expanded to a gradient for each key.
  struct Tail {
    PartRef part;
    Buffer grads;
  };
  Vector<Tail> tail;
};

// Rows of a part with more occurrences than a run of fold32, ascending. Returns how many runs they
// have.
uint32_t frequent_rows(const Part& part, Vector<device::FrequentRow>* out);

// Where the gradient of each of an op's keys is. Bags and divisors are buffers of `pool`.
struct PushSource {
  device::GradSource grads{};
  Buffer bag, divisor;
  Status of(const frugal_op& op, const Part& part, uint32_t dim, BufferPool& pool);
};

// Joins several pushes of a table into one hand-over, going on with fold32 where the first push
// ended. The pushes stay as they are, so that a step's end that runs out of memory can be repeated.
// The list of rows comes from `rows`, the sums from `sums`.
Status join_pushes(const PushSums& pushes, uint32_t dim, uint32_t rank, BufferPool& rows,
                   BufferPool& sums, RankGradients* out);

// Memory for the sums of a hand-over, and for those of the runs of frequent rows.
Status room_for_sums(PushSums* push, uint32_t dim, BufferPool& pool);

// What a key without a row reads as, as long as the longest row.
const device::Element* row_of_zeros();

// Of rows or gradients: of less than this the caller sees to all. Sharing, and waking a thread,
// would cost more.
constexpr size_t kParallelBytes = 256 << 10;

class DataPath {
 public:
  // Rows to the places that an op names: row i is *pointers[i], or slots[i] if there are no
  // pointers.
  [[nodiscard]] Status gather(const device::RowsView& rows, const device::Element* const* pointers,
                              const uint32_t* slots, size_t n, const frugal_op& op);
  // Sums the first push of a table in a step. With `streaming` sums go past the caches: right where
  // they wait for their turn.
  [[nodiscard]] Status sum_first(PushSums* push, uint32_t dim, const device::GradSource& source,
                                 BufferPool& pool, bool streaming, bool* nan);
  // Takes a later one. With `reject` a NaN in a gradient is told, and then nothing is taken.
  [[nodiscard]] Status add_tail(PushSums* push, const PartRef& part, uint32_t dim,
                                const device::GradSource& source, BufferPool& pool, bool reject,
                                bool* nan);
  // Is a NaN among the gradients?
  [[nodiscard]] Status find_nan(const device::GradSource& source, size_t n, uint32_t dim,
                                bool* nan);

 protected:
  ~DataPath() = default;
  // Runs chunks of a loop, by all threads that may help.
  [[nodiscard]] virtual Status parallel(size_t chunks, void (*run)(void*, size_t),
                                        void* context) = 0;
};

}  // namespace frugal
