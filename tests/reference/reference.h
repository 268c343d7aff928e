// The one-thread reference: what synchronous training means, as plain arrays and loops.
//
// Written from docs/arithmetic.md and the comments of frugal.h alone; it takes nothing from the
// library but the structs of its header, so that an error of the library cannot hide in here. It
// is not fast and does not try to be.
//
// Besides the rows as they are now it keeps every version that a row ever had, so that "the row
// after all updates of steps < t" can be asked for any t afterwards: the tests that let several
// trainers run at once build the whole history first and compare while the engine runs.
//
//     Reference ref(seed, world_size);
//     size_t t = ref.AddTable(config);
//     ref.Create(step, op);              // a lookup's effect on the key set
//     ref.Push(rank, step, {op});
//     ref.Commit(step, /*skip=*/false);
//     ref.Lookup(step + 1, op, out);
//
// Threads: const functions may run at once with each other, with nothing else.
#ifndef FRUGAL_TESTS_REFERENCE_H_
#define FRUGAL_TESTS_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "frugal.h"

namespace frugal_reference {

// The pieces of docs/arithmetic.md that have a name there.
std::vector<float> Fold32(const std::vector<std::vector<float>>& terms);
float Sum16(const std::vector<float>& x);
float Canonical(float x);  // a NaN as 0x7fc00000
double PowBySquaring(double x, uint64_t t);
double Ln(double x);
double NormalQuantile(double p);
float InitialValue(const frugal_table_config& config, uint64_t seed, uint64_t key, uint64_t column);
size_t StateFloats(int32_t optimizer_kind, size_t dim);

// Applies one gradient to one row (values, then state) as sections 3.1 to 3.9 say. Returns false
// if the NaN policy leaves the row alone.
bool ApplyUpdate(const frugal_optimizer& optimizer, int32_t nan_policy, uint32_t world_size,
                 uint64_t step, std::vector<float> gradient, size_t dim, float* row);

// A frugal_op with packed rows and a table's number in place of its handle.
struct Op {
  size_t table = 0;
  const uint64_t* keys = nullptr;
  size_t count = 0;
  int32_t pooling = FRUGAL_POOL_NONE;
  const uint64_t* offsets = nullptr;
  size_t bags = 0;
  const float* weights = nullptr;
  const float* grads = nullptr;
  bool padded = false;
  uint64_t padding_key = 0;
};

class Reference {
 public:
  Reference(uint64_t seed, uint32_t world_size) : seed_(seed), world_size_(world_size) {}
  // Of the steps from now on.
  void SetWorldSize(uint32_t world_size) { world_size_ = world_size; }

  size_t AddTable(const frugal_table_config& config);
  const frugal_table_config& config(size_t table) const { return tables_[table].config; }
  size_t dim(size_t table) const { return tables_[table].config.dim; }
  size_t state_floats(size_t table) const { return tables_[table].state_floats; }

  // Hyper-parameters from `first_step` on, until a change with a larger first step.
  void SetOptimizer(size_t table, uint64_t first_step, const frugal_optimizer& optimizer);
  const frugal_optimizer& OptimizerAt(size_t table, uint64_t step) const;

  // --- Steps ---

  // The effect of a lookup at `step` on the key set: rows that are missing come to life.
  void Create(uint64_t step, const Op& op);
  // What a lookup at `step` returns: rows after all updates of steps < `step`.
  void Lookup(uint64_t step, const Op& op, float* rows_out) const;
  // Takes the occurrences of one push call. Returns FRUGAL_OK, or FRUGAL_ERR_NAN and takes nothing.
  int32_t Push(uint32_t rank, uint64_t step, const std::vector<Op>& ops);
  // The gradient of each weight of a pooled sum.
  void WeightGrads(uint64_t step, const Op& op, float* out) const;
  // Folds and applies everything that was pushed for `step`.
  void Commit(uint64_t step, bool skip);
  // Drops everything that is not committed, rows that it created too.
  void Abort();

  // --- Outside steps; `step` is the next one, so that every step before it is committed ---

  // The row, `dim` floats and then its state. Returns whether it exists.
  bool Get(size_t table, uint64_t key, std::vector<float>* row_out) const;
  void Put(size_t table, uint64_t step, uint64_t key, bool with_state, const float* row);
  bool Delete(size_t table, uint64_t step, uint64_t key);
  std::vector<uint64_t> Keys(size_t table) const;  // ascending

  // --- History ---

  // The row (values and state) after all updates of steps < `step`; the initial one if missing.
  std::vector<float> RowAt(size_t table, uint64_t key, uint64_t step) const;
  // All different versions that a lookup at `step` may return if it may miss the updates of the
  // last `staleness` steps, the newest first. A row that was put or deleted has no version from
  // before that.
  std::vector<std::vector<float>> VersionsAt(size_t table, uint64_t key, uint64_t step,
                                             uint64_t staleness) const;
  enum class Existence { kNo, kYes, kMaybe };
  // Whether a trainer inside `step` sees the row: kMaybe if that depends on how far other ranks
  // have come. They may be `staleness` steps earlier or later.
  Existence ExistsAt(size_t table, uint64_t key, uint64_t step, uint64_t staleness) const;

 private:
  struct Version {
    uint64_t from = 0;       // holds for lookups at this step and later
    bool absolute = false;   // written by put or delete: nothing older is right any more
    std::vector<float> row;  // values, then state
  };
  struct Life {
    uint64_t from = 0;            // exists before this step begins, for certain
    uint64_t until = UINT64_MAX;  // deleted before this step
  };
  struct Row {
    bool alive = false;
    bool ever_touched = false;  // by a step that was aborted, too
    std::vector<Life> lives;
    std::vector<Version> versions;  // ascending `from`; empty: the initial row
  };
  // Occurrences of one row on one rank, in order.
  using Terms = std::vector<std::vector<float>>;
  struct Table {
    std::string name;
    frugal_table_config config;
    size_t state_floats = 0;
    std::map<uint64_t, frugal_optimizer> schedule;
    std::unordered_map<uint64_t, Row> rows;
  };
  struct PendingRow {
    std::map<uint32_t, Terms> by_rank;
  };
  struct PendingStep {
    std::vector<std::unordered_map<uint64_t, PendingRow>> by_table;
  };
  struct Birth {
    size_t table;
    uint64_t key;
    uint64_t step;
  };

  std::vector<float> InitialRow(const Table& table, uint64_t key) const;
  void CreateRow(uint64_t step, size_t table, uint64_t key);
  void AddVersion(Table* table, uint64_t key, uint64_t from, bool absolute, std::vector<float> row);

  const uint64_t seed_;
  uint32_t world_size_;
  std::vector<Table> tables_;
  std::map<uint64_t, PendingStep> pending_;
  std::vector<Birth> births_;  // of steps that are not committed
};

}  // namespace frugal_reference

#endif  // FRUGAL_TESTS_REFERENCE_H_
