// The script of one random run: everything that every rank does in every step, drawn from a seed
// before anything runs. Trainers run at once, so whatever they do has to be known beforehand for
// the reference to do the same.
//
// An aborted step is an attempt of a step that does not commit. With staleness 0 the ranks agree
// on which attempt they are in, so each attempt has contents of its own. With a larger one it
// depends on timing which steps an abort undoes, so a step that is done again does the same.
#ifndef FRUGAL_TESTS_ORACLE_SCRIPT_H_
#define FRUGAL_TESTS_ORACLE_SCRIPT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "frugal.h"

namespace frugal_oracle {

struct Options {
  bool tau_only = false;
  bool exact_only = false;
  int flush_mode = -1;     // forced if >= 0
  int flush_threads = -1;  // forced if >= 0
  int max_ranks = 8;
  bool no_cache = false;
  std::string device;   // some ranks run on one of these: "sim:0,sim:1"; "" for none
  double scale = 1;     // of the amount of work in a run
  bool killed = false;  // Script::killed
  bool far = false;     // hashed tables have a storage tier for rows that no step wants
  bool record = false;  // nothing is compared: what comes back is hashed
  bool checkpoints = false;
};

enum class GradKind { kUniform, kWide, kTiny, kSparse };

// What a frugal_op is made of; handles and buffers come when it is called.
struct OpSpec {
  size_t table = 0;
  std::vector<uint64_t> keys;
  int declaration = -1;  // of this rank, if made through a declared batch
  uint32_t part = 0;
  bool keys_null = false;  // exactly the declared keys, which `keys` repeats
  int32_t pooling = FRUGAL_POOL_NONE;
  std::vector<uint64_t> offsets;
  std::vector<float> weights;  // empty: none
  bool want_weight_grads = false;
  bool padded = false;
  uint64_t padding_key = 0;
  size_t gap_floats = 0;  // between rows, beyond the packed ones
  bool want_found = false;
  uint64_t grad_seed = 0;
  GradKind grad_kind = GradKind::kUniform;
  bool specials = false;  // NaNs and infinities among the gradients

  size_t rows() const { return pooling == FRUGAL_POOL_NONE ? keys.size() : offsets.size() - 1; }
};

enum class Call {
  kSleep,
  kPrefetch,
  kCancel,
  kLookup,
  kPush,
  kRead,
  kSetOptimizer,
  kFlush,
  kQuery,   // statistics, health, last committed step
  kBadKey,  // a call with an id that a dense table does not have, and otherwise good ops
  kBusy,    // something that is only allowed outside steps
};

struct Action {
  Call call = Call::kSleep;
  std::vector<OpSpec> ops;
  uint32_t sleep_us = 0;
  int declaration = -1;  // prefetch, cancel
  size_t target = 0;     // prefetch: index of the step
  bool borrow = false;   // push: gradients in memory that the engine lends
  int poison_op = -1;    // push: first try it with a NaN in this op, which must be refused
  size_t poison_element = 0;
  size_t table = 0;  // set_optimizer
  uint64_t first_step = 0;
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  int variant = 0;  // of a bad or busy call
};

enum class Finish { kEnd, kAbort, kClose, kStay };  // kStay: the controller is killed meanwhile

struct Attempt {
  std::vector<Action> before;  // between the step before and step_begin
  std::vector<Action> inside;
  int begin_style = 0;  // 0: wait; 1: poll, then wait; 2: short time-outs, then wait
  Finish finish = Finish::kEnd;
  uint32_t end_flags = 0;
};

struct RankStep {
  // Empty: the rank is away. The last one is committed if in_final.
  std::vector<Attempt> attempts;
  bool in_final = false;
  bool leave_after = false;
  bool wait_before_leaving = false;  // until the step has committed, since it may be undone
};

struct RankSpec {
  uint64_t cache_bytes = 0;
  double cache_ratio = 0;
  std::string device;  // "": the cpu
  uint32_t window = 0;
  std::vector<RankStep> steps;
};

// kCheckpoint: one begins; what it has is compared later. kResume: the engine is closed after a
// checkpoint, and another one goes on.
enum class Outside {
  kGet,
  kPut,
  kDelete,
  kCount,
  kKeys,
  kRead,
  kFlush,
  kRejoin,
  kCheckpoint,
  kResume
};

// Of each table, the rows with their state by key.
using Snapshot = std::vector<std::map<uint64_t, std::vector<float>>>;

struct OutsideAction {
  Outside what = Outside::kGet;
  size_t table = 0;
  uint32_t rank = 0;  // rejoin
  std::vector<uint64_t> keys;
  bool with_state = false;
  size_t gap_floats = 0;
  std::vector<float> rows;  // put
  size_t ahead = 0;         // checkpoint: how many more steps it has
  uint64_t variant = 0;     // checkpoint, resume: of the other engine
  uint32_t world_size = 0;  // resume: likewise
  // Filled in by the reference:
  std::vector<std::vector<float>> expected_rows;  // empty row: missing
  uint64_t expected_count = 0;
  std::vector<uint64_t> expected_keys;
  Snapshot expected_tables;
};

struct TableSpec {
  std::string name;
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;  // its name is set when used
  std::vector<uint64_t> universe;                         // the keys that the run uses
  uint64_t places = 0;                                    // in memory; 0: for all rows
};

struct OptimizerChange {
  size_t table;
  uint64_t first_step;
  frugal_optimizer optimizer;
};

struct Script {
  uint64_t seed = 0;
  frugal_config config = FRUGAL_CONFIG_INIT;
  uint64_t first_step = 0;
  size_t steps = 0;
  bool one_thread = false;
  bool join_at_once = true;  // else each trainer joins when its thread comes to it
  bool close_trainers = true;
  // The controller is killed when all ranks have done their last calls. The last step is not
  // committed then: a rank at least is inside it.
  bool killed = false;
  bool checkpoints = false;  // there is a folder for them
  uint64_t aborts = 0;
  std::vector<TableSpec> tables;
  std::vector<RankSpec> ranks;
  std::vector<bool> skip;                                   // by step
  std::map<size_t, std::vector<OutsideAction>> boundaries;  // before that step; always at the end
  std::vector<OptimizerChange> changes;

  // Ranks that run on a device.
  size_t devices() const {
    size_t n = 0;
    for (const RankSpec& rank : ranks) n += rank.device.empty() ? 0 : 1;
    return n;
  }
  // Some rows are in memory only when they are wanted.
  bool far() const {
    for (const TableSpec& table : tables) {
      if (table.places != 0) return true;
    }
    return false;
  }
  uint64_t StepNumber(size_t index) const { return first_step + index; }
  std::string Describe() const;
  // A hash of all that was drawn.
  uint64_t Fingerprint() const;
};

Script MakeScript(uint64_t seed, const Options& options);

// The gradient rows of an op, packed: rows() * dim floats.
std::vector<float> MakeGrads(const OpSpec& op, size_t dim);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_SCRIPT_H_
