// Moves and sums rows for a trainer: gathers of resolved keys, sums of pushed gradients.
//
// It knows no tables, steps or locks: the caller passes rows, parts and buffers. An engine does
// this for its own trainers. A trainer in another process does it itself, on memory that it shares
// with the engine.
#pragma once
#include "base/buffer.h"
#include "device/ops/reduce.h"
#include "frugal.h"
#include "window/step_update.h"

namespace frugal {

// What one rank has pushed for one table in its current step.
struct PushSums {
  RankGradients first;
  // Rows with more than kFoldRun occurrences, and the offset of their first run in `runs`. Later
  // pushes may have to continue fold32 of the first push from their run sums.
  Vector<device::FrequentRow> frequent_list;
  Buffer runs;  // all run sums, and as much scratch space again
  uint32_t all_runs = 0;
  // Later pushes, expanded to a gradient for each key.
  struct Tail {
    PartRef part;
    Buffer grads;
  };
  Vector<Tail> tail;
};

// Rows of a part with more occurrences than one run of fold32, ascending. Returns the number of
// their runs.
uint32_t frequent_rows(const Part& part, Vector<device::FrequentRow>* out);

// Where the gradient of each key of an op is. Bags and divisors are buffers of `pool`.
struct PushSource {
  device::GradSource grads{};
  Buffer bag, divisor;
  Status of(const frugal_op& op, const Part& part, uint32_t dim, BufferPool& pool);
};

// Joins several pushes of a table into one RankGradients. It continues fold32 where the first push
// ended. The pushes stay unchanged, so a step's end that runs out of memory can be repeated. The
// list of rows comes from `rows`, the sums from `sums`.
Status join_pushes(const PushSums& pushes, uint32_t dim, uint32_t rank, BufferPool& rows,
                   BufferPool& sums, RankGradients* out);

// Gets memory for the sums of rank gradients, and for the run sums of frequent rows.
Status room_for_sums(PushSums* push, uint32_t dim, BufferPool& pool);

// The row that a key without a row reads. As long as the longest row.
const device::Element* row_of_zeros();

// Bytes of rows or gradients. With less than this the caller works alone: sharing the work, and
// waking a thread, would cost more.
constexpr size_t kParallelBytes = 256 << 10;

class DataPath {
 public:
  // Copies rows to the op's output: row i is *pointers[i], or slots[i] if `pointers` is null.
  [[nodiscard]] Status gather(const device::RowsView& rows, const device::Element* const* pointers,
                              const uint32_t* slots, size_t n, const frugal_op& op);
  // Sums the first push of a table in a step. `streaming`: the sums bypass the processor's caches,
  // which is right if they are read much later.
  [[nodiscard]] Status sum_first(PushSums* push, uint32_t dim, const device::GradSource& source,
                                 BufferPool& pool, bool streaming, bool* nan);
  // Adds a later push. With `reject`, a NaN in a gradient sets *nan, and nothing is added.
  [[nodiscard]] Status add_tail(PushSums* push, const PartRef& part, uint32_t dim,
                                const device::GradSource& source, BufferPool& pool, bool reject,
                                bool* nan);
  // Sets *nan if a gradient is a NaN.
  [[nodiscard]] Status find_nan(const device::GradSource& source, size_t n, uint32_t dim,
                                bool* nan);

 protected:
  ~DataPath() = default;
  // Runs the chunks of a loop on all threads that may help.
  [[nodiscard]] virtual Status parallel(size_t chunks, void (*run)(void*, size_t),
                                        void* context) = 0;
};

}  // namespace frugal
