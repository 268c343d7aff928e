#include "oracle/driver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "oracle/checkpoints.h"
#include "oracle/device.h"
#include "oracle/digest.h"
#include "oracle/far.h"
#include "oracle/meeting.h"
#include "oracle/random.h"
#include "oracle/replay.h"

namespace frugal_oracle {
namespace {

using frugal_reference::Canonical;
using frugal_reference::Reference;

constexpr uint32_t kGarbageBits = 0xa5b6c7d8u;

float Garbage() {
  float x;
  std::memcpy(&x, &kGarbageBits, sizeof(x));
  return x;
}

bool IsGarbage(float x) { return std::memcmp(&x, &kGarbageBits, sizeof(x)) == 0; }

bool SameBits(const float* a, const float* b, size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

void SleepMicroseconds(uint32_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

std::string Row(const float* row, size_t n) {
  std::ostringstream out;
  out.precision(9);
  out << '[';
  for (size_t i = 0; i < std::min<size_t>(n, 6); ++i) out << (i == 0 ? "" : " ") << row[i];
  out << (n > 6 ? " ...]" : "]");
  return out.str();
}

std::string LastError() {
  frugal_error error;
  frugal_last_error(&error);
  return error.message == nullptr ? "(null message)" : error.message;
}

// The memory that one frugal_op points to. It is overwritten as soon as the call is back.
struct Buffers {
  std::vector<uint64_t> keys;
  std::vector<uint64_t> offsets;
  std::vector<float> weights;
  std::vector<float> weight_grads;
  std::vector<float> rows;  // rows_out or grads, with gaps
  std::vector<uint8_t> found;
  float* grads = nullptr;  // where the gradients are: `rows`, or memory that the engine lends
  size_t stride = 0;       // floats
  // On the device, if there: results, and what is written over when the call is back.
  void* device_rows = nullptr;
  void* device_weight_grads = nullptr;
  std::vector<std::pair<void*, size_t>> sent;

  void Spoil() {
    std::fill(keys.begin(), keys.end(), 0xfeedfacefeedfaceu);
    std::fill(offsets.begin(), offsets.end(), 0xfeedfacefeedfaceu);
    std::fill(weights.begin(), weights.end(), Garbage());
    std::fill(rows.begin(), rows.end(), Garbage());
  }
};

class RankDriver;

// What the ranks of a run share: those of this process the engine and its tables, all the meeting.
class Run {
 public:
  Run(const Script& script, const Reference& reference, const Party& party, Meeting* meeting,
      Progress* progress)
      : script_(script),
        reference_(reference),
        party_(party),
        meeting_(*meeting),
        progress_(progress),
        world_size_(script.config.world_size) {
    uint64_t arrivals = 0, actions = 0;
    for (const auto& [index, list] : script.boundaries) {
      arrivals += script.ranks.size();
      boundary_[index] = {arrivals, actions};
      actions += list.size();
    }
  }

  void Do();

  const Script& script() const { return script_; }
  const Reference& reference() const { return reference_; }
  frugal_engine* engine() const { return engine_; }
  frugal_table* table(size_t t) const { return tables_[t]; }
  Progress* progress() { return progress_; }
  bool exact() const { return script_.config.staleness == 0; }
  uint32_t world_size() const { return world_size_; }  // of the present engine
  bool recording() const { return meeting_.recording; }

  Meeting& meeting() { return meeting_; }
  void Fail(const std::string& message) { meeting_.Fail(message); }
  bool failed() const { return meeting_.failed(); }
  bool one_thread() const { return script_.one_thread && party_.processes == 1; }

  // The index of the step after the last committed one.
  size_t NextIndex() {
    uint64_t step = 0;
    const int32_t status = frugal_committed_step(engine_, &step);
    if (status != FRUGAL_OK) Fail("frugal_committed_step: " + LastError());
    return step == FRUGAL_NO_STEP ? 0 : static_cast<size_t>(step - script_.first_step) + 1;
  }

  // A rank has come to a step boundary, with everything before it committed.
  void Arrive() { ++meeting_.arrived; }
  // Whether all ranks have come to the step boundary before step `index`, and what the script wants
  // done there is done; some of it by this process, and then here.
  bool Open(size_t index) {
    // What another thread has done for this rank here came before its count, as that comes before
    // the last of another process. ThreadSanitizer does not see the other process, so both are
    // read.
    if (meeting_.boundaries_open >= static_cast<int64_t>(index) &&
        meeting_.outside_done != UINT64_MAX)
      return true;
    const Boundary& boundary = boundary_.at(index);
    if (meeting_.arrived < boundary.arrivals) return false;
    const std::lock_guard<std::mutex> lock(boundary_mutex_);
    if (meeting_.boundaries_open >= static_cast<int64_t>(index)) return true;
    progress_->Enter("outside steps");
    const std::vector<OutsideAction>& actions = script_.boundaries.at(index);
    // Read once a turn: other processes count on, up to the last.
    for (uint64_t number;
         (number = meeting_.outside_done) < boundary.actions + actions.size() && !failed();) {
      const OutsideAction& action = actions[number - boundary.actions];
      if (WhoDoes(action, number) != party_.process) return false;
      Digest digest;
      digest.Add(number);
      DoOutside(action, index, &digest);
      meeting_.outside += digest.value();
      ++meeting_.outside_done;
    }
    progress_->Enter("steps");
    meeting_.boundaries_open = static_cast<int64_t>(index);
    return true;
  }

  frugal_trainer* Join(uint32_t rank);

 private:
  bool Open();
  void Steps();
  void Drive(RankDriver* driver);
  bool Mine(uint32_t rank) const {
    return party_.processes == 1 || party_.process_of_rank[rank] == party_.process;
  }
  uint32_t WhoDoes(const OutsideAction& action, uint64_t number) const {
    if (party_.processes == 1) return 0;
    if (action.what == Outside::kRejoin) return party_.process_of_rank[action.rank];
    return static_cast<uint32_t>(Random(script_.seed * 211 + number).Below(party_.processes));
  }
  // Waits until `n` processes have come so far. Returns false if something has failed.
  bool Await(const std::atomic<uint32_t>& come, uint32_t n) const {
    while (come < n && !failed()) SleepMicroseconds(200);
    return !failed();
  }
  bool Meet(std::atomic<uint32_t>* come) {
    ++*come;
    return Await(*come, party_.processes);
  }
  // What comes back is compared, or with recording() added to `digest`.
  void DoOutside(const OutsideAction& action, size_t index, Digest* digest);
  void Resume(const OutsideAction& action, size_t index);
  void CompareRows(const OutsideAction& action, const std::vector<float>& rows, size_t floats,
                   const std::vector<uint8_t>& found, float missing, const char* call,
                   Digest* digest);
  std::vector<uint64_t> Enumerate(size_t table);
  void CheckFinal();
  bool Expect(int32_t status, int32_t expected, const char* call) {
    if (status == expected) return true;
    Fail(std::string(call) + " returned " + frugal_status_name(status) + " and not " +
         frugal_status_name(expected) + ": " + LastError());
    return false;
  }

  struct Boundary {
    uint64_t arrivals = 0;  // of ranks, with those at earlier ones
    uint64_t actions = 0;   // of earlier ones
  };

  const Script& script_;
  const Reference& reference_;
  const Party& party_;
  Meeting& meeting_;
  Progress* const progress_;
  uint32_t world_size_;
  frugal_engine* engine_ = nullptr;
  std::vector<frugal_table*> tables_;
  std::vector<std::unique_ptr<RankDriver>> ranks_;  // null: of another process
  std::map<size_t, Boundary> boundary_;
  std::mutex boundary_mutex_;
  std::unique_ptr<RunCheckpoints> checkpoints_;  // null: the run has none
  frugal_stats resumed_ = {};                    // of earlier engines
  size_t resumed_at_ = 0;                        // the first step of this engine
  uint64_t resumes_ = 0, other_worlds_ = 0;
};

// One rank: a machine that makes one call at a time, so that one thread can drive all ranks too.
class RankDriver {
 public:
  enum class Moved { kYes, kWaiting, kDone };

  RankDriver(Run* run, uint32_t rank)
      : run_(*run),
        script_(run->script()),
        spec_(run->script().ranks[rank]),
        rank_(rank),
        progress_(run->progress()->ranks[rank]),
        random_(run->script().seed * 31 + rank),
        attempt_(run->script().steps, 0) {}

  // Makes the next call, unless it would have to wait for another rank.
  Moved Advance();
  void Join() {
    trainer_ = run_.Join(rank_);
    if (!spec_.device.empty() && device_ == nullptr) {
      device_ = OpenDevice(spec_.device, script_.seed * 57 + rank_);
      if (device_ == nullptr && kDeviceMemory) run_.Fail("no device " + spec_.device);
    }
    aborts_told_ = run_.meeting().aborts;
  }
  // Another engine goes on from step `index`. A rank that has left joins it for a moment, since no
  // step commits before each has joined once.
  void Rejoin(size_t index) {
    const bool present =
        trainer_ != nullptr || (index < script_.steps && !spec_.steps[index].attempts.empty());
    trainer_ = nullptr;
    if (rank_ >= run_.world_size()) {
      batches_.clear();
      if (device_ != nullptr) device_->Collect();
      return;
    }
    Join();
    if (!present) return Close();
    const std::map<int, Batch> before = std::move(batches_);
    batches_.clear();
    for (const auto& [declaration, batch] : before) {
      declared_.erase(declaration);
      if (batch.target >= index) DoPrefetch(*batch.action);
    }
  }
  void Close() {
    if (trainer_ == nullptr) return;
    const int32_t status = frugal_trainer_close(trainer_);
    if (status != FRUGAL_OK && !run_.failed()) Unexpected(status, FRUGAL_OK, "trainer_close");
    trainer_ = nullptr;
    batches_.clear();
    if (device_ != nullptr) device_->Collect();
  }

 private:
  enum class Phase { kJoin, kBoundary, kBefore, kBegin, kInside, kFinish, kAwaitAbort, kLeave };
  enum class Result { kOk, kAborted, kFailed };
  enum class Use { kPrefetch, kLookup, kPush, kRead };
  struct Batch {
    frugal_batch* handle;
    size_t target;
    const Action* action;  // that has declared it
  };

  const RankStep& step() const { return spec_.steps[index_]; }
  const Attempt& attempt() const { return step().attempts[attempt_[index_]]; }
  bool IsLastAttempt() const { return attempt_[index_] + 1 == step().attempts.size(); }
  uint64_t step_number() const { return script_.StepNumber(index_); }
  bool AbortComing() const { return run_.meeting().aborts > aborts_told_; }
  // Whether step_begin can succeed without anything from another rank.
  bool GateOpen() {
    // The ring limits how far ranks run apart.
    const uint64_t staleness =
        std::min<uint64_t>(script_.config.staleness, 62 - script_.config.lookahead);
    return staleness >= index_ || run_.NextIndex() >= index_ - staleness;
  }

  void Unexpected(int32_t status, int32_t expected, const char* call) {
    std::ostringstream out;
    out << Where() << call << " returned " << frugal_status_name(status) << " and not "
        << frugal_status_name(expected) << ": " << LastError();
    run_.Fail(out.str());
  }
  std::string Where() const {
    std::ostringstream out;
    out << "rank " << rank_ << ", step " << index_;
    if (index_ < script_.steps && attempt_[index_] > 0) out << " attempt " << attempt_[index_];
    out << ": ";
    return out.str();
  }
  Result Check(int32_t status, int32_t expected, const char* call) {
    if (status == expected) return Result::kOk;
    if (status == FRUGAL_ERR_STEP_ABORTED && aborts_told_ < script_.aborts) {
      TakeAbort();
      return run_.failed() ? Result::kFailed : Result::kAborted;
    }
    Unexpected(status, expected, call);
    return Result::kFailed;
  }
  void TakeAbort();

  Moved AtBoundary();
  Moved Begin();
  Moved Finish();
  void Do(const Action& action);
  void DoPrefetch(const Action& action);
  void DoLookup(const Action& action);
  void DoPush(const Action& action);
  void DoRead(const Action& action);
  void DoBadKey(const Action& action);
  void DoBusy(const Action& action);

  std::vector<frugal_op> MakeOps(const Action& action, Use use);
  void SendOps(const Action& action, Use use, std::vector<frugal_op>* ops);
  void FetchOps(const Action& action, Use use);
  void FillGrads(const Action& action, bool poison);
  void CheckLookup(size_t op, const OpSpec& spec, const Buffers& buffers);
  void CheckRead(size_t op, const OpSpec& spec, const Buffers& buffers);
  // Adds what op number `op` of the call gave, `count` rows.
  void Record(size_t op, const float* rows, size_t count, size_t dim, size_t stride);
  void CheckGaps(const OpSpec& spec, const Buffers& buffers, const char* call);
  // Whether `row` is one of the versions of a row that may be seen at this step.
  bool Matches(const OpSpec& spec, uint64_t key, const float* row);
  void Mismatch(const char* call, const OpSpec& spec, size_t row, const float* got,
                const float* expected);
  std::string WhoseRow(const OpSpec& spec, uint64_t key, const float* got) const;

  Run& run_;
  const Script& script_;
  const RankSpec& spec_;
  const uint32_t rank_;
  Progress::Rank& progress_;
  Random random_;
  frugal_trainer* trainer_ = nullptr;
  std::unique_ptr<RankDevice> device_;

  Phase phase_ = Phase::kJoin;
  size_t index_ = 0;  // the step that this rank is in or before
  size_t action_ = 0;
  std::vector<size_t> attempt_;  // by step
  int64_t last_boundary_ = -1;
  bool arrived_ = false;
  uint64_t aborts_told_ = 0;
  std::map<int, Batch> batches_;
  std::set<int> declared_;  // declarations are made once, also when a step is done again
  std::vector<Buffers> buffers_;
};

// --- RankDriver: the protocol ---

RankDriver::Moved RankDriver::Advance() {
  progress_.step = index_;
  switch (phase_) {
    case Phase::kJoin:
      if (trainer_ == nullptr && rank_ < run_.world_size()) {
        progress_.doing = "joining";
        Join();
      }
      phase_ = Phase::kBoundary;
      return Moved::kYes;
    case Phase::kBoundary:
      return AtBoundary();
    case Phase::kBefore:
      if (action_ == attempt().before.size()) {
        phase_ = Phase::kBegin;
        return Moved::kYes;
      }
      // A read between steps is a gate.
      if (run_.one_thread() && attempt().before[action_].call == Call::kRead && !GateOpen()) {
        return Moved::kWaiting;
      }
      Do(attempt().before[action_++]);
      return Moved::kYes;
    case Phase::kBegin:
      return Begin();
    case Phase::kInside:
      if (action_ == attempt().inside.size()) {
        phase_ = Phase::kFinish;
        return Moved::kYes;
      }
      Do(attempt().inside[action_++]);
      return Moved::kYes;
    case Phase::kFinish:
      return Finish();
    case Phase::kAwaitAbort: {
      // This attempt is going to be undone: the next call says so.
      if (run_.one_thread() && !AbortComing()) return Moved::kWaiting;
      progress_.doing = "step_begin, to receive an abort";
      const int32_t status =
          frugal_step_begin(trainer_, script_.StepNumber(index_ + 1), FRUGAL_TIMEOUT_DEFAULT);
      if (Check(status, FRUGAL_ERR_STEP_ABORTED, "step_begin") == Result::kOk) TakeAbort();
      return Moved::kYes;
    }
    case Phase::kLeave:
      if (step().wait_before_leaving && run_.NextIndex() <= index_) {
        if (!AbortComing()) return Moved::kWaiting;
        progress_.doing = "step_begin before leaving";
        const int32_t status =
            frugal_step_begin(trainer_, script_.StepNumber(index_ + 1), FRUGAL_TIMEOUT_DEFAULT);
        if (Check(status, FRUGAL_ERR_STEP_ABORTED, "step_begin") == Result::kOk) TakeAbort();
        return Moved::kYes;
      }
      progress_.doing = "trainer_close";
      Close();
      ++index_;
      phase_ = Phase::kBoundary;
      return Moved::kYes;
  }
  return Moved::kDone;
}

RankDriver::Moved RankDriver::AtBoundary() {
  if (script_.boundaries.count(index_) != 0 && last_boundary_ < static_cast<int64_t>(index_)) {
    if (!arrived_) {
      progress_.doing = "waiting for the commit before a step boundary";
      if (trainer_ != nullptr && run_.NextIndex() < index_) {
        if (!AbortComing()) return Moved::kWaiting;
        progress_.doing = "step_begin before a step boundary";
        const int32_t status = frugal_step_begin(trainer_, step_number(), FRUGAL_TIMEOUT_DEFAULT);
        if (Check(status, FRUGAL_ERR_STEP_ABORTED, "step_begin") == Result::kOk) TakeAbort();
        return Moved::kYes;
      }
      arrived_ = true;
      progress_.doing = "at a step boundary";
      run_.Arrive();
      return Moved::kYes;
    }
    if (!run_.Open(index_)) return Moved::kWaiting;
    arrived_ = false;
    last_boundary_ = static_cast<int64_t>(index_);
  }
  if (index_ == script_.steps) return Moved::kDone;
  if (step().attempts.empty()) {
    ++index_;
    return Moved::kYes;
  }
  action_ = 0;
  phase_ = Phase::kBefore;
  return Moved::kYes;
}

RankDriver::Moved RankDriver::Begin() {
  progress_.doing = "step_begin";
  const uint64_t number = step_number();
  if (run_.one_thread() && !AbortComing() && !GateOpen()) {
    // No other rank can move meanwhile, so the gate has to stay closed, and polling costs nothing.
    // (Device work in flight may complete at any time.)
    if (script_.devices() == 0 && random_.Chance(0.2)) {
      const int32_t status = frugal_step_begin(trainer_, number, 0);
      if (status != FRUGAL_ERR_TIMEOUT) Unexpected(status, FRUGAL_ERR_TIMEOUT, "step_begin");
    }
    return Moved::kWaiting;
  }
  int32_t status = FRUGAL_ERR_TIMEOUT;
  const int style = attempt().begin_style;
  for (int poll = 0; style != 0 && poll < 5 && status == FRUGAL_ERR_TIMEOUT; ++poll) {
    status = frugal_step_begin(trainer_, number,
                               style == 1 ? 0 : static_cast<int64_t>(random_.Between(1, 3)));
  }
  if (status == FRUGAL_ERR_TIMEOUT) {
    status = frugal_step_begin(trainer_, number, FRUGAL_TIMEOUT_DEFAULT);
  }
  if (Check(status, FRUGAL_OK, "step_begin") == Result::kOk) {
    phase_ = Phase::kInside;
    action_ = 0;
  }
  return Moved::kYes;
}

RankDriver::Moved RankDriver::Finish() {
  const Attempt& now = attempt();
  if (now.finish == Finish::kStay) {
    index_ = script_.steps;
    phase_ = Phase::kBoundary;
    return Moved::kYes;
  }
  if (now.finish == Finish::kEnd) {
    progress_.doing = "step_end";
    const int32_t status = frugal_step_end(trainer_, step_number(), now.end_flags);
    if (Check(status, FRUGAL_OK, "step_end") != Result::kOk) return Moved::kYes;
    for (auto batch = batches_.begin(); batch != batches_.end();) {
      batch = batch->second.target == index_ ? batches_.erase(batch) : std::next(batch);
    }
    if (!IsLastAttempt()) {
      phase_ = Phase::kAwaitAbort;
    } else if (step().leave_after) {
      phase_ = Phase::kLeave;
    } else {
      ++index_;
      phase_ = Phase::kBoundary;
    }
    return Moved::kYes;
  }
  if (now.finish == Finish::kClose) {
    progress_.doing = "trainer_close in a step";
    Close();
    ++run_.meeting().aborts;
    ++index_;
    phase_ = Phase::kBoundary;
    return Moved::kYes;
  }
  progress_.doing = "step_abort";
  const int32_t status = frugal_step_abort(trainer_);
  if (status != FRUGAL_OK) {
    Unexpected(status, FRUGAL_OK, "step_abort");
    return Moved::kYes;
  }
  ++attempt_[index_];
  ++aborts_told_;
  index_ = run_.NextIndex();
  phase_ = Phase::kBoundary;
  ++run_.meeting().aborts;
  return Moved::kYes;
}

void RankDriver::TakeAbort() {
  ++aborts_told_;
  const size_t next = run_.NextIndex();
  const bool possible = run_.exact() ? next == index_ : next <= index_;
  if (!possible) {
    run_.Fail(Where() + "received an abort, after which step " + std::to_string(next) +
              " is the next");
    return;
  }
  index_ = next;
  if (run_.exact() && ++attempt_[index_] >= step().attempts.size()) {
    run_.Fail(Where() + "received an abort that no rank made");
    return;
  }
  phase_ = Phase::kBoundary;
}

// --- RankDriver: calls ---

void RankDriver::Do(const Action& action) {
  switch (action.call) {
    case Call::kSleep:
      SleepMicroseconds(run_.one_thread() ? action.sleep_us / 8 : action.sleep_us);
      break;
    case Call::kPrefetch:
      progress_.doing = "prefetch";
      DoPrefetch(action);
      break;
    case Call::kCancel: {
      progress_.doing = "prefetch_cancel";
      const auto found = batches_.find(action.declaration);
      if (found == batches_.end()) break;
      Check(frugal_prefetch_cancel(trainer_, found->second.handle), FRUGAL_OK, "prefetch_cancel");
      batches_.erase(action.declaration);
      break;
    }
    case Call::kLookup:
      progress_.doing = "lookup";
      DoLookup(action);
      break;
    case Call::kPush:
      progress_.doing = "push_grad";
      DoPush(action);
      break;
    case Call::kRead:
      progress_.doing = "read";
      DoRead(action);
      break;
    case Call::kSetOptimizer: {
      progress_.doing = "set_optimizer";
      frugal_optimizer optimizer = action.optimizer;
      Check(frugal_table_set_optimizer(run_.table(action.table), action.first_step, &optimizer),
            FRUGAL_OK, "table_set_optimizer");
      std::memset(&optimizer, 0xa5, sizeof(optimizer));
      break;
    }
    case Call::kFlush:
      progress_.doing = "flush";
      Check(frugal_flush(run_.engine(), FRUGAL_TIMEOUT_DEFAULT), FRUGAL_OK, "flush");
      break;
    case Call::kQuery: {
      progress_.doing = "get_stats";
      frugal_stats stats;
      stats.struct_size = sizeof(stats);
      Check(frugal_get_stats(run_.engine(), &stats), FRUGAL_OK, "get_stats");
      Check(frugal_health(run_.engine()), FRUGAL_OK, "health");
      break;
    }
    case Call::kBadKey:
      progress_.doing = "a call with a bad key";
      DoBadKey(action);
      break;
    case Call::kBusy:
      progress_.doing = "a call that is for outside steps";
      DoBusy(action);
      break;
  }
}

std::vector<frugal_op> RankDriver::MakeOps(const Action& action, Use use) {
  std::vector<frugal_op> ops;
  buffers_.assign(action.ops.size(), Buffers());
  for (size_t i = 0; i < action.ops.size(); ++i) {
    const OpSpec& spec = action.ops[i];
    Buffers& buffers = buffers_[i];
    frugal_op op = FRUGAL_OP_INIT;
    op.table = run_.table(spec.table);
    buffers.keys = spec.keys;
    // NULL keys would mean all declared ones, also where there are none.
    static const uint64_t none = 0;
    op.keys = buffers.keys.empty() ? &none : buffers.keys.data();
    op.count = buffers.keys.size();
    if (spec.padded) {
      op.padding_key = spec.padding_key;
      op.flags |= FRUGAL_OP_PADDING;
    }
    if (use != Use::kPrefetch) {
      const auto batch = batches_.find(spec.declaration);
      if (use != Use::kRead && spec.declaration >= 0 && batch != batches_.end()) {
        op.batch = batch->second.handle;
        op.part = spec.part;
        if (spec.keys_null) {
          op.keys = nullptr;
          op.count = 12345;  // said to be ignored
        }
      }
      op.pooling = spec.pooling;
      if (spec.pooling != FRUGAL_POOL_NONE) {
        buffers.offsets = spec.offsets;
        op.offsets = buffers.offsets.data();
        op.bags = spec.rows();
        if (!spec.weights.empty()) {
          buffers.weights = spec.weights;
          op.weights = buffers.weights.data();
        }
      }
      const size_t dim = run_.reference().dim(spec.table);
      buffers.stride = dim + spec.gap_floats;
      if (spec.gap_floats != 0) op.row_stride = buffers.stride * sizeof(float);
      buffers.rows.reserve(1);
      buffers.rows.assign(spec.rows() * buffers.stride, Garbage());
      if (use == Use::kPush) {
        op.grads = buffers.rows.data();
        if (spec.want_weight_grads) {
          buffers.weight_grads.assign(spec.keys.size(), Garbage());
          op.weight_grads_out = buffers.weight_grads.data();
        }
      } else {
        op.rows_out = buffers.rows.data();
      }
      if (use == Use::kRead && spec.want_found) {
        buffers.found.assign(spec.keys.size(), 77);
        op.found_out = buffers.found.data();
      }
    }
    ops.push_back(op);
  }
  return ops;
}

// Some of what a call reads and writes goes to the device.
void RankDriver::SendOps(const Action& action, Use use, std::vector<frugal_op>* ops) {
  if (device_ == nullptr) return;
  Check(frugal_set_stream(trainer_, device_->Stream()), FRUGAL_OK, "set_stream");
  for (size_t i = 0; i < ops->size(); ++i) {
    frugal_op& op = (*ops)[i];
    Buffers& buffers = buffers_[i];
    auto send = [&](const auto* host, size_t bytes) {
      void* const there = device_->Send(host, bytes, sizeof(*host));
      buffers.sent.emplace_back(there, bytes);
      return there;
    };
    if (op.keys != nullptr && !buffers.keys.empty() && random_.Chance(0.5)) {
      op.keys = static_cast<uint64_t*>(send(op.keys, op.count * sizeof(uint64_t)));
    }
    if (use == Use::kPrefetch) continue;
    if (op.offsets != nullptr && random_.Chance(0.5)) {
      op.offsets = static_cast<uint64_t*>(send(op.offsets, (op.bags + 1) * sizeof(uint64_t)));
    }
    // Memory that the engine lends is the host's.
    if (buffers.rows.empty() || action.borrow || random_.Chance(0.3)) continue;
    void* const rows = send(buffers.rows.data(), buffers.rows.size() * sizeof(float));
    if (use == Use::kPush) {
      op.grads = static_cast<float*>(rows);
    } else {
      op.rows_out = static_cast<float*>(rows);
      buffers.device_rows = rows;
    }
    // Weights of either side go with rows on the device.
    if (op.weights != nullptr && !buffers.weights.empty() && random_.Chance(0.5)) {
      op.weights = static_cast<float*>(send(op.weights, buffers.weights.size() * sizeof(float)));
    }
    if (op.weight_grads_out != nullptr && !buffers.weight_grads.empty()) {
      buffers.device_weight_grads =
          send(op.weight_grads_out, buffers.weight_grads.size() * sizeof(float));
      op.weight_grads_out = static_cast<float*>(buffers.device_weight_grads);
    }
  }
}

// Results come back; whatever else the call was given is written over in the stream.
void RankDriver::FetchOps(const Action&, Use use) {
  if (device_ == nullptr) return;
  bool wait = use != Use::kPush && use != Use::kPrefetch;
  for (Buffers& buffers : buffers_) {
    if (buffers.device_rows != nullptr) {
      device_->Fetch(buffers.rows.data(), buffers.device_rows, buffers.rows.size() * sizeof(float));
    }
    if (buffers.device_weight_grads != nullptr) {
      device_->Fetch(buffers.weight_grads.data(), buffers.device_weight_grads,
                     buffers.weight_grads.size() * sizeof(float));
      wait = true;
    }
    for (const auto& [there, bytes] : buffers.sent) device_->Spoil(there, bytes);
  }
  if (wait) device_->Collect();
  if (!device_->Error().empty()) run_.Fail(Where() + device_->Error());
}

void RankDriver::DoPrefetch(const Action& action) {
  if (!declared_.insert(action.declaration).second) return;
  std::vector<frugal_op> ops = MakeOps(action, Use::kPrefetch);
  SendOps(action, Use::kPrefetch, &ops);
  frugal_batch* batch = nullptr;
  const int32_t status =
      frugal_prefetch(trainer_, script_.StepNumber(action.target), ops.data(), ops.size(), &batch);
  FetchOps(action, Use::kPrefetch);
  for (Buffers& buffers : buffers_) buffers.Spoil();
  // With staleness, an abort that this rank has not received yet may have set it far back.
  if (status == FRUGAL_ERR_STEP_RANGE && !run_.exact() && script_.aborts > 0) return;
  if (Check(status, FRUGAL_OK, "prefetch") != Result::kOk) return;
  if (batch == nullptr) run_.Fail(Where() + "prefetch gave a null batch");
  batches_[action.declaration] = {batch, action.target, &action};
}

void RankDriver::DoLookup(const Action& action) {
  std::vector<frugal_op> ops = MakeOps(action, Use::kLookup);
  SendOps(action, Use::kLookup, &ops);
  const int32_t status = frugal_lookup(trainer_, ops.data(), ops.size());
  FetchOps(action, Use::kLookup);
  if (Check(status, FRUGAL_OK, "lookup") != Result::kOk) return;
  for (size_t i = 0; i < ops.size() && !run_.failed(); ++i) {
    CheckLookup(i, action.ops[i], buffers_[i]);
  }
  for (Buffers& buffers : buffers_) buffers.Spoil();
}

void RankDriver::FillGrads(const Action& action, bool poison) {
  for (size_t i = 0; i < action.ops.size(); ++i) {
    const OpSpec& spec = action.ops[i];
    const size_t dim = run_.reference().dim(spec.table);
    const size_t stride = buffers_[i].stride;
    std::vector<float> grads = MakeGrads(spec, dim);
    if (poison && action.poison_op == static_cast<int>(i)) {
      grads[action.poison_element] = __builtin_nanf("3");
    }
    for (size_t row = 0; row < spec.rows(); ++row) {
      std::copy_n(grads.begin() + static_cast<ptrdiff_t>(row * dim), dim,
                  buffers_[i].grads + row * stride);
    }
  }
}

void RankDriver::DoPush(const Action& action) {
  std::vector<frugal_op> ops = MakeOps(action, Use::kPush);
  void* lent = nullptr;
  if (action.borrow) {
    size_t bytes = 0;
    for (const Buffers& buffers : buffers_) bytes += buffers.rows.size() * sizeof(float);
    const int32_t status = frugal_borrow(trainer_, bytes, &lent);
    if (Check(status, FRUGAL_OK, "borrow") != Result::kOk) return;
    if (bytes > 0 && (lent == nullptr || reinterpret_cast<uintptr_t>(lent) % 64 != 0)) {
      run_.Fail(Where() + "borrow gave memory that is not aligned");
      return;
    }
  }
  float* next = static_cast<float*>(lent);
  for (size_t i = 0; i < ops.size(); ++i) {
    buffers_[i].grads = lent != nullptr ? next : buffers_[i].rows.data();
    if (lent != nullptr) next += buffers_[i].rows.size();
    ops[i].grads = buffers_[i].grads;
  }
  if (action.poison_op >= 0) {
    FillGrads(action, /*poison=*/true);
    const int32_t status = frugal_push_grad(trainer_, ops.data(), ops.size());
    if (Check(status, FRUGAL_ERR_NAN, "push_grad with a NaN") != Result::kOk) return;
  }
  FillGrads(action, /*poison=*/false);
  SendOps(action, Use::kPush, &ops);
  const int32_t status = frugal_push_grad(trainer_, ops.data(), ops.size());
  FetchOps(action, Use::kPush);
  for (Buffers& buffers : buffers_) buffers.Spoil();
  if (Check(status, FRUGAL_OK, "push_grad") != Result::kOk) return;
  for (size_t i = 0; i < ops.size(); ++i) {
    const OpSpec& spec = action.ops[i];
    if (buffers_[i].weight_grads.empty()) continue;
    if (run_.recording()) {
      for (float& x : buffers_[i].weight_grads) x = Canonical(x);
      Record(i, buffers_[i].weight_grads.data(), spec.keys.size(), 1, 1);
      continue;
    }
    const std::vector<float> grads = MakeGrads(spec, run_.reference().dim(spec.table));
    std::vector<float> expected(spec.keys.size());
    run_.reference().WeightGrads(step_number(), ReferenceOp(spec, grads), expected.data());
    for (size_t k = 0; k < expected.size(); ++k) {
      // Which NaN it is is only said of what is stored.
      const float x = Canonical(expected[k]), y = Canonical(buffers_[i].weight_grads[k]);
      if (SameBits(&x, &y, 1)) continue;
      Mismatch("gradient of a weight", spec, k, &y, &x);
      return;
    }
  }
}

void RankDriver::DoRead(const Action& action) {
  std::vector<frugal_op> ops = MakeOps(action, Use::kRead);
  SendOps(action, Use::kRead, &ops);
  const int32_t status =
      frugal_read(run_.engine(), trainer_, ops.data(), ops.size(), FRUGAL_TIMEOUT_DEFAULT);
  FetchOps(action, Use::kRead);
  if (Check(status, FRUGAL_OK, "read") != Result::kOk) return;
  for (size_t i = 0; i < ops.size() && !run_.failed(); ++i) {
    CheckRead(i, action.ops[i], buffers_[i]);
  }
}

void RankDriver::DoBadKey(const Action& action) {
  const bool ahead = script_.config.lookahead > 0;
  frugal_batch* const untouched = reinterpret_cast<frugal_batch*>(uintptr_t{0x55});
  frugal_batch* batch = untouched;
  int32_t status = FRUGAL_OK;
  if (action.variant == 0 && ahead) {
    const std::vector<frugal_op> ops = MakeOps(action, Use::kPrefetch);
    status =
        frugal_prefetch(trainer_, script_.StepNumber(index_ + 1), ops.data(), ops.size(), &batch);
  } else if (action.variant == 1) {
    std::vector<frugal_op> ops = MakeOps(action, Use::kPush);
    for (Buffers& buffers : buffers_) buffers.grads = buffers.rows.data();
    FillGrads(action, /*poison=*/false);
    SendOps(action, Use::kPush, &ops);
    status = frugal_push_grad(trainer_, ops.data(), ops.size());
    FetchOps(action, Use::kPush);
  } else {
    std::vector<frugal_op> ops = MakeOps(action, Use::kLookup);
    SendOps(action, Use::kLookup, &ops);
    status = frugal_lookup(trainer_, ops.data(), ops.size());
    FetchOps(action, Use::kLookup);
  }
  const Result result = Check(status, FRUGAL_ERR_KEY_OUT_OF_RANGE, "a call with a bad key");
  if (result == Result::kOk && batch != untouched) {
    run_.Fail(Where() + "a refused prefetch wrote its output");
  }
}

void RankDriver::DoBusy(const Action& action) {
  frugal_table* const table = run_.table(action.table);
  const uint64_t key = script_.tables[action.table].universe[0];
  std::vector<float> row(run_.reference().dim(action.table), 1.0f);
  uint64_t number = 0;
  size_t count = 0;
  frugal_op op = FRUGAL_OP_INIT;
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  frugal_table* created = nullptr;
  int32_t status = FRUGAL_OK;
  switch (action.variant) {
    case 0:
      status = frugal_get(table, &key, 1, 0, row.data(), 0, nullptr);
      break;
    case 1:
      status = frugal_put(table, &key, 1, 0, row.data(), 0);
      break;
    case 2:
      status = frugal_delete(table, &key, 1, &number);
      break;
    case 3:
      status = frugal_table_count(table, &number);
      break;
    case 4:
      status = frugal_table_keys(table, &number, &number, 1, &count);
      break;
    case 5:
      op.table = table;
      op.keys = &key;
      op.count = 1;
      op.rows_out = row.data();
      status = frugal_read(run_.engine(), nullptr, &op, 1, 0);
      break;
    case 6:
      config.name = "created inside a step";
      config.rows = 4;
      config.dim = 1;
      status = frugal_table_create(run_.engine(), &config, &created);
      break;
    default:
      status = frugal_table_drop(table);
  }
  Check(status, FRUGAL_ERR_BUSY, "a call that is for outside steps");
}

// --- RankDriver: comparing ---

void RankDriver::Mismatch(const char* call, const OpSpec& spec, size_t row, const float* got,
                          const float* expected) {
  const size_t dim = run_.reference().dim(spec.table);
  std::ostringstream out;
  out << Where() << call << " of table " << spec.table << ", row " << row << " of " << spec.rows();
  if (spec.pooling == FRUGAL_POOL_NONE) {
    out << " (key " << spec.keys[row] << ")";
  } else {
    out << " (pooling " << spec.pooling << (spec.weights.empty() ? ")" : ", weighted)");
  }
  out << (spec.declaration < 0 ? ", undeclared" : ", declared") << ": got " << Row(got, dim)
      << ", expected " << Row(expected, dim);
  if (spec.pooling == FRUGAL_POOL_NONE) out << WhoseRow(spec, spec.keys[row], got);
  run_.Fail(out.str());
}

// What a wrong row is, if it is anything: an older or newer one, another key's, or torn.
std::string RankDriver::WhoseRow(const OpSpec& spec, uint64_t key, const float* got) const {
  const size_t dim = run_.reference().dim(spec.table);
  for (uint64_t other : script_.tables[spec.table].universe) {
    const auto versions = run_.reference().VersionsAt(spec.table, other, UINT64_MAX, UINT64_MAX);
    for (size_t v = 0; v < versions.size(); ++v) {
      if (!SameBits(versions[v].data(), got, dim)) continue;
      return " (that is version " + std::to_string(versions.size() - 1 - v) + " of " +
             std::to_string(versions.size()) + (other == key ? " of this key)" : " of key ") +
             (other == key ? "" : std::to_string(other) + ")");
    }
  }
  const auto versions = run_.reference().VersionsAt(spec.table, key, UINT64_MAX, UINT64_MAX);
  size_t known = 0;
  for (size_t c = 0; c < dim; ++c) {
    for (const std::vector<float>& version : versions) {
      if (!SameBits(&version[c], got + c, 1)) continue;
      ++known;
      break;
    }
  }
  return " (" + std::to_string(known) + " of " + std::to_string(dim) +
         " elements are of some version of this key)";
}

void RankDriver::CheckGaps(const OpSpec& spec, const Buffers& buffers, const char* call) {
  const size_t dim = run_.reference().dim(spec.table);
  for (size_t row = 0; row < spec.rows() && spec.gap_floats > 0; ++row) {
    for (size_t i = dim; i < buffers.stride; ++i) {
      if (IsGarbage(buffers.rows[row * buffers.stride + i])) continue;
      run_.Fail(Where() + call + " wrote between its output rows");
      return;
    }
  }
}

bool RankDriver::Matches(const OpSpec& spec, uint64_t key, const float* row) {
  const size_t dim = run_.reference().dim(spec.table);
  const auto versions =
      run_.reference().VersionsAt(spec.table, key, step_number(), script_.config.staleness);
  for (size_t v = 0; v < versions.size(); ++v) {
    if (!SameBits(versions[v].data(), row, dim)) continue;
    if (v > 0) ++run_.meeting().older_rows;
    return true;
  }
  return false;
}

void RankDriver::Record(size_t op, const float* rows, size_t count, size_t dim, size_t stride) {
  // How far an attempt comes that is undone depends on timing, and so does what staleness lets a
  // lookup see.
  if (!run_.exact() || !IsLastAttempt() || !step().in_final) return;
  Digest digest;
  digest.Add(rank_);
  for (const uint64_t place : {index_, action_, op}) digest.Add(place);
  digest.Add(phase_);
  for (size_t row = 0; row < count; ++row) digest.Add(rows + row * stride, dim * sizeof(float));
  run_.meeting().lookups += digest.value();
}

void RankDriver::CheckLookup(size_t op, const OpSpec& spec, const Buffers& buffers) {
  const size_t dim = run_.reference().dim(spec.table);
  CheckGaps(spec, buffers, "lookup");
  run_.meeting().rows_checked += spec.rows();
  if (run_.recording()) return Record(op, buffers.rows.data(), spec.rows(), dim, buffers.stride);
  std::vector<float> expected(spec.rows() * dim);
  run_.reference().Lookup(step_number(), ReferenceOp(spec, {}), expected.data());
  for (size_t row = 0; row < spec.rows(); ++row) {
    const float* got = buffers.rows.data() + row * buffers.stride;
    if (SameBits(got, expected.data() + row * dim, dim)) continue;
    const bool padding =
        spec.padded && spec.pooling == FRUGAL_POOL_NONE && spec.keys[row] == spec.padding_key;
    if (!run_.exact() && !padding && Matches(spec, spec.keys[row], got)) continue;
    Mismatch("lookup", spec, row, got, expected.data() + row * dim);
    return;
  }
}

void RankDriver::CheckRead(size_t op, const OpSpec& spec, const Buffers& buffers) {
  using Existence = Reference::Existence;
  const size_t dim = run_.reference().dim(spec.table);
  const std::vector<float> zeros(dim, 0.0f);
  CheckGaps(spec, buffers, "read");
  if (run_.recording()) {
    // Whether a row of a hashed table is there may depend on timing.
    const bool hashed = script_.tables[spec.table].config.key_space == FRUGAL_HASHED;
    if (!hashed) Record(op, buffers.rows.data(), spec.rows(), dim, buffers.stride);
    return;
  }
  if (spec.pooling != FRUGAL_POOL_NONE) {  // dense and exact
    std::vector<float> expected(spec.rows() * dim);
    run_.reference().Lookup(step_number(), ReferenceOp(spec, {}), expected.data());
    for (size_t row = 0; row < spec.rows(); ++row) {
      const float* got = buffers.rows.data() + row * buffers.stride;
      if (SameBits(got, expected.data() + row * dim, dim)) continue;
      Mismatch("read", spec, row, got, expected.data() + row * dim);
      return;
    }
    return;
  }
  for (size_t i = 0; i < spec.keys.size(); ++i) {
    const float* got = buffers.rows.data() + i * buffers.stride;
    if (spec.padded && spec.keys[i] == spec.padding_key) {
      if (!SameBits(got, zeros.data(), dim)) Mismatch("read", spec, i, got, zeros.data());
      continue;
    }
    const Existence exists = run_.reference().ExistsAt(spec.table, spec.keys[i], step_number(),
                                                       script_.config.staleness);
    bool may_exist = exists != Existence::kNo;
    bool may_miss = exists != Existence::kYes;
    if (!buffers.found.empty()) {
      may_exist = may_exist && buffers.found[i] == 1;
      may_miss = may_miss && buffers.found[i] == 0;
    }
    if (may_miss && SameBits(got, zeros.data(), dim)) continue;
    if (may_exist && Matches(spec, spec.keys[i], got)) continue;
    const std::vector<float> row = run_.reference().RowAt(spec.table, spec.keys[i], step_number());
    Mismatch(buffers.found.empty()   ? "read"
             : buffers.found[i] == 1 ? "read (found)"
                                     : "read (missing)",
             spec, i, got, exists == Existence::kNo ? zeros.data() : row.data());
    return;
  }
}

// --- Run ---

bool Run::Open() {
  progress_->Enter("opening");
  TakeStepsAsSmall(script_.seed % 2 == 0);
  WaitForCopies(script_.seed % 3 != 0);
  frugal_config config = script_.config;
  std::string address = party_.address;
  const bool attach = !address.empty() && !party_.host;
  if (attach) {
    if (!Await(meeting_.serving, 1)) return false;
    config.service = address.c_str();
  } else if (!address.empty()) {
    config.backing = FRUGAL_BACKING_SHM;
  }
  if (!Expect(frugal_open(&config, &engine_), FRUGAL_OK, "frugal_open")) return false;
  std::memset(&config, 0xa5, sizeof(config));
  if (script_.checkpoints) {
    checkpoints_ = std::make_unique<RunCheckpoints>(
        script_, [this](const std::string& message) { Fail(message); });
    if (!checkpoints_->Open(engine_)) return false;
  }
  for (const TableSpec& spec : script_.tables) {
    std::string name = spec.name;
    frugal_table_config table_config = spec.config;
    table_config.name = name.c_str();
    // The kind may come after the table, where no other process asks for the table as it is to be.
    const bool kind_later = address.empty() && (script_.seed + tables_.size()) % 3 == 0;
    if (kind_later)
      table_config.optimizer.kind = static_cast<int32_t>((script_.seed / 3 + tables_.size()) % 7);
    frugal_table* table = nullptr;
    if (spec.places != 0) PlacesOfNextTable(spec.places, script_.seed);
    const int32_t created = frugal_table_create(engine_, &table_config, &table);
    if (spec.places != 0) PlacesOfNextTable(0, 0);
    if (!Expect(created, FRUGAL_OK, "frugal_table_create") ||
        (kind_later && !Expect(frugal_table_set_optimizer(table, 0, &spec.config.optimizer),
                               FRUGAL_OK, "frugal_table_set_optimizer"))) {
      return false;
    }
    std::fill(name.begin(), name.end(), '!');
    tables_.push_back(table);
  }
  // Its tables first: for the process that has the engine those of others would exist already.
  if (party_.host) {
    if (!Expect(frugal_serve(engine_, address.c_str()), FRUGAL_OK, "frugal_serve")) return false;
    meeting_.serving = 1;
  }
  std::fill(address.begin(), address.end(), '!');
  return true;
}

frugal_trainer* Run::Join(uint32_t rank) {
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.rank = rank;
  config.cache_bytes = script_.ranks[rank].cache_bytes;
  config.cache_ratio = script_.ranks[rank].cache_ratio;
  if (!script_.ranks[rank].device.empty()) config.device = script_.ranks[rank].device.c_str();
  frugal_trainer* trainer = nullptr;
  Expect(frugal_trainer_create(engine_, &config, &trainer), FRUGAL_OK, "frugal_trainer_create");
  return trainer;
}

void Run::Steps() {
  progress_->Enter("steps");
  for (uint32_t r = 0; r < script_.ranks.size(); ++r) {
    ranks_.push_back(Mine(r) ? std::make_unique<RankDriver>(this, r) : nullptr);
    if (script_.join_at_once && ranks_.back() && r < world_size_) ranks_.back()->Join();
  }
  if (script_.join_at_once && !Meet(&meeting_.joined)) return;
  using Moved = RankDriver::Moved;
  if (one_thread()) {
    Random random(script_.seed * 77);
    std::vector<RankDriver*> running;
    for (auto& rank : ranks_) running.push_back(rank.get());
    while (!running.empty() && !failed()) {
      const size_t first = random.Below(running.size());
      // Some ranks come far, some take turns.
      uint64_t turns = random.Between(1, random.Chance(0.5) ? 2 : 30);
      bool moved = false;
      for (size_t k = 0; k < running.size() && !moved; ++k) {
        const size_t which = (first + k) % running.size();
        Moved result = Moved::kYes;
        while (turns > 0 && !failed() && result == Moved::kYes) {
          result = running[which]->Advance();
          if (result != Moved::kWaiting) ++progress_->moves;
          moved = moved || result != Moved::kWaiting;
          --turns;
        }
        turns = 1;
        if (result == Moved::kDone) {
          running.erase(running.begin() + static_cast<ptrdiff_t>(which));
        }
      }
      if (!moved) SleepMicroseconds(20);
    }
    return;
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks_) {
    if (rank) threads.emplace_back([this, driver = rank.get()] { Drive(driver); });
  }
  // A process without a rank still does its share outside steps.
  for (const auto& [index, boundary] : boundary_) {
    if (!threads.empty()) break;
    while (!failed() && !Open(index)) SleepMicroseconds(200);
  }
  for (std::thread& thread : threads) thread.join();
}

void Run::Drive(RankDriver* driver) {
  using Moved = RankDriver::Moved;
  Moved moved = Moved::kYes;
  while (moved != Moved::kDone && !failed()) {
    moved = driver->Advance();
    if (moved != RankDriver::Moved::kWaiting) ++progress_->moves;
    // A query of the last commit is a message where the engine is another process's.
    if (moved == Moved::kWaiting) SleepMicroseconds(party_.processes == 1 ? 50 : 200);
  }
  if (failed()) driver->Close();  // so that the others do not wait for this rank
}

void Run::CompareRows(const OutsideAction& action, const std::vector<float>& rows, size_t floats,
                      const std::vector<uint8_t>& found, float missing, const char* call,
                      Digest* digest) {
  const size_t stride = floats + action.gap_floats;
  if (recording()) {
    digest->Add(action.keys);
    digest->Add(found);
    digest->Add(rows);
    return;
  }
  for (size_t i = 0; i < action.keys.size(); ++i) {
    const std::vector<float>& expected = action.expected_rows[i];
    const float* got = rows.data() + i * stride;
    bool same = found[i] == (expected.empty() ? 0 : 1);
    for (size_t c = 0; c < stride; ++c) {
      float right = Garbage();
      if (c < floats) right = expected.empty() ? missing : expected[c];
      same = same && SameBits(&right, got + c, 1);
    }
    if (same) continue;
    std::ostringstream out;
    out << call << " of table " << action.table << ", key " << action.keys[i]
        << (action.with_state ? " with state" : "") << ": got " << (found[i] ? "" : "missing ")
        << Row(got, floats) << ", expected "
        << (expected.empty() ? "missing" : Row(expected.data(), floats));
    Fail(out.str());
    return;
  }
}

std::vector<uint64_t> Run::Enumerate(size_t t) {
  std::vector<uint64_t> keys, part(37);
  uint64_t cursor = 0;
  while (true) {
    size_t count = 0;
    if (!Expect(frugal_table_keys(tables_[t], &cursor, part.data(), part.size(), &count), FRUGAL_OK,
                "frugal_table_keys")) {
      break;
    }
    if (count == 0) break;
    keys.insert(keys.end(), part.begin(), part.begin() + static_cast<ptrdiff_t>(count));
    if (keys.size() > (1 << 20)) break;
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

void Run::DoOutside(const OutsideAction& action, size_t index, Digest* digest) {
  const size_t dim = reference_.dim(action.table);
  const size_t floats = dim + (action.with_state ? reference_.state_floats(action.table) : 0);
  const size_t stride = floats + action.gap_floats;
  const size_t stride_bytes = action.gap_floats == 0 ? 0 : stride * sizeof(float);
  const uint32_t flags = action.with_state ? FRUGAL_WITH_STATE : 0;
  frugal_table* const table = tables_[action.table];
  std::vector<uint64_t> keys = action.keys;
  const std::string before = "before step " + std::to_string(index) + ": ";
  switch (action.what) {
    case Outside::kGet: {
      std::vector<float> rows(keys.size() * stride, Garbage());
      std::vector<uint8_t> found(keys.size(), 77);
      if (!Expect(frugal_get(table, keys.data(), keys.size(), flags, rows.data(), stride_bytes,
                             found.data()),
                  FRUGAL_OK, "frugal_get")) {
        return;
      }
      CompareRows(action, rows, floats, found, Garbage(), (before + "get").c_str(), digest);
      break;
    }
    case Outside::kRead: {
      std::vector<float> rows(keys.size() * (dim + action.gap_floats), Garbage());
      std::vector<uint8_t> found(keys.size(), 77);
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table;
      op.keys = keys.data();
      op.count = keys.size();
      op.rows_out = rows.data();
      op.found_out = found.data();
      if (action.gap_floats != 0) op.row_stride = (dim + action.gap_floats) * sizeof(float);
      if (!Expect(frugal_read(engine_, nullptr, &op, 1, FRUGAL_TIMEOUT_DEFAULT), FRUGAL_OK,
                  "frugal_read")) {
        return;
      }
      CompareRows(action, rows, dim, found, 0.0f, (before + "read").c_str(), digest);
      break;
    }
    case Outside::kPut: {
      std::vector<float> rows(keys.size() * stride, Garbage());
      for (size_t i = 0; i < keys.size(); ++i) {
        std::copy_n(action.rows.begin() + static_cast<ptrdiff_t>(i * floats), floats,
                    rows.begin() + static_cast<ptrdiff_t>(i * stride));
      }
      Expect(frugal_put(table, keys.data(), keys.size(), flags, rows.data(), stride_bytes),
             FRUGAL_OK, "frugal_put");
      break;
    }
    case Outside::kDelete: {
      uint64_t deleted = 0;
      if (Expect(frugal_delete(table, keys.data(), keys.size(), &deleted), FRUGAL_OK,
                 "frugal_delete") &&
          !recording() && deleted != action.expected_count) {
        Fail(before + "delete counted " + std::to_string(deleted) + " and not " +
             std::to_string(action.expected_count));
      }
      digest->Add(deleted);
      if (checkpoints_) checkpoints_->Deleted(engine_, action.table, deleted);
      break;
    }
    case Outside::kCount: {
      uint64_t count = 0;
      if (Expect(frugal_table_count(table, &count), FRUGAL_OK, "frugal_table_count") &&
          !recording() && count != action.expected_count) {
        Fail(before + "count is " + std::to_string(count) + " and not " +
             std::to_string(action.expected_count));
      }
      digest->Add(count);
      break;
    }
    case Outside::kKeys: {
      const std::vector<uint64_t> there = Enumerate(action.table);
      digest->Add(there);
      if (!recording() && there != action.expected_keys && !failed()) {
        Fail(before + "enumeration gives other keys");
      }
      break;
    }
    case Outside::kFlush:
      Expect(frugal_flush(engine_, FRUGAL_TIMEOUT_DEFAULT), FRUGAL_OK, "frugal_flush");
      break;
    case Outside::kRejoin:
      ranks_[action.rank]->Join();
      break;
    case Outside::kCheckpoint:
      checkpoints_->Begin(engine_, action);
      break;
    case Outside::kResume:
      Resume(action, index);
      break;
  }
  std::fill(keys.begin(), keys.end(), 0xfeedfacefeedfaceu);
}

// All ranks are between steps, and wait for this thread.
void Run::Resume(const OutsideAction& action, size_t index) {
  frugal_stats stats = {};
  stats.struct_size = sizeof(stats);
  Expect(frugal_get_stats(engine_, &stats), FRUGAL_OK, "frugal_get_stats");
  resumed_.checkpoint_rows += stats.checkpoint_rows;
  resumed_.checkpoint_copies += stats.checkpoint_copies;
  resumed_.checkpoint_waits += stats.checkpoint_waits;
  resumed_.checkpoints += stats.checkpoints;
  engine_ = checkpoints_->Resume(engine_, action);
  if (failed()) return;
  resumed_at_ = index;
  ++resumes_;
  if (std::exchange(world_size_, action.world_size) != action.world_size) ++other_worlds_;
  for (size_t t = 0; t < tables_.size(); ++t)
    if (!Expect(frugal_table_find(engine_, script_.tables[t].name.c_str(), &tables_[t]), FRUGAL_OK,
                "frugal_table_find"))
      return;
  for (auto& rank : ranks_) rank->Rejoin(index);
}

void Run::CheckFinal() {
  progress_->Enter("comparing the final tables");
  if (checkpoints_) checkpoints_->Finish(engine_);
  Random random(script_.seed * 99 + party_.process);
  if (script_.close_trainers && !script_.killed) {
    for (auto& rank : ranks_) {
      if (rank) rank->Close();
    }
  }
  if (!Meet(&meeting_.ended)) return;
  if (script_.killed) {
    ++meeting_.waiting_for_death;
    while (!meeting_.controller_dead && !failed()) SleepMicroseconds(200);
    if (failed()) return;
    if (NextIndex() != script_.steps - 1)
      Fail("what is read out is step " + std::to_string(NextIndex()));
  }
  // At least one party checks all tables; the seed chooses it.
  if (script_.seed % party_.processes != party_.process && random.Chance(0.5)) return;
  if (random.Chance(0.5) && !script_.killed) {
    Expect(frugal_flush(engine_, FRUGAL_TIMEOUT_DEFAULT), FRUGAL_OK, "frugal_flush");
    frugal_stats stats = {};
    stats.struct_size = sizeof(stats);
    Expect(frugal_get_stats(engine_, &stats), FRUGAL_OK, "frugal_get_stats");
    if (stats.pending_bytes != 0 || stats.pending_rows != 0) {
      Fail("after a flush " + std::to_string(stats.pending_rows) + " rows with " +
           std::to_string(stats.pending_bytes) + " bytes are pending");
    }
    if (stats.steps_committed != script_.steps - resumed_at_) {
      Fail("steps_committed is " + std::to_string(stats.steps_committed));
    }
  }
  Digest digest;
  for (size_t t = 0; t < script_.tables.size() && !failed(); ++t) {
    ++progress_->moves;
    OutsideAction action;
    action.table = t;
    action.with_state = true;
    action.keys = script_.tables[t].universe;
    action.keys.push_back(script_.tables[t].config.key_space == FRUGAL_DENSE ? 0 : 0x1234567);
    for (uint64_t key : action.keys) {
      std::vector<float> row;
      if (recording()) break;
      if (!reference_.Get(t, key, &row)) row.clear();
      action.expected_rows.push_back(std::move(row));
    }
    DoOutside(action, script_.steps, &digest);
    if (!recording()) action.expected_keys = reference_.Keys(t);
    action.expected_count = action.expected_keys.size();
    action.what = Outside::kCount;
    if (!failed()) DoOutside(action, script_.steps, &digest);
    action.what = Outside::kKeys;
    if (!failed()) DoOutside(action, script_.steps, &digest);
  }
  // Several processes may have looked.
  uint64_t before = 0;
  if (recording() && !meeting_.tables.compare_exchange_strong(before, digest.value()) &&
      before != digest.value()) {
    Fail("processes see different tables");
  }
}

void Run::Do() {
  if (Open()) Steps();
  if (!failed()) CheckFinal();
  if (!failed() && !script_.killed) Expect(frugal_health(engine_), FRUGAL_OK, "frugal_health");
  if (!failed() && !script_.killed && script_.seed % party_.processes == party_.process) {
    meeting_.stats.struct_size = sizeof(meeting_.stats);
    Expect(frugal_get_stats(engine_, &meeting_.stats), FRUGAL_OK, "frugal_get_stats");
    meeting_.stats.checkpoints += resumed_.checkpoints;
    meeting_.stats.checkpoint_rows += resumed_.checkpoint_rows;
    meeting_.stats.checkpoint_copies += resumed_.checkpoint_copies;
    meeting_.stats.checkpoint_waits += resumed_.checkpoint_waits;
    meeting_.resumes = resumes_;
    meeting_.other_worlds = other_worlds_;
    if (checkpoints_) {
      meeting_.created = checkpoints_->created();
      meeting_.deleted = checkpoints_->deleted();
    }
  }
  Meet(&meeting_.checked);
  progress_->Enter("closing");
  if (party_.host) Await(meeting_.closed, party_.processes - 1);
  if (engine_ != nullptr) {
    Expect(frugal_close(engine_), FRUGAL_OK, "frugal_close");
    Expect(frugal_flush(engine_, 0), FRUGAL_ERR_BAD_HANDLE, "frugal_flush after frugal_close");
  }
  if (party_.host) meeting_.far = CountFar();
  ++meeting_.closed;
  progress_->Enter("idle");
}

}  // namespace

Outcome OutcomeOf(const Meeting& meeting) {
  Outcome outcome;
  outcome.passed = !meeting.failed();
  outcome.message = meeting.message;
  outcome.stats = meeting.stats;
  outcome.far = meeting.far;
  outcome.resumes = meeting.resumes;
  outcome.other_worlds = meeting.other_worlds;
  outcome.created = meeting.created;
  outcome.deleted = meeting.deleted;
  outcome.rows_checked = meeting.rows_checked;
  outcome.older_rows = meeting.older_rows;
  outcome.lookups = meeting.lookups;
  outcome.outside = meeting.outside;
  outcome.tables = meeting.tables;
  return outcome;
}

Outcome RunScript(const Script& script, const Reference& reference, bool recorded,
                  Progress* progress) {
  for (Progress::Rank& rank : progress->ranks) {
    rank.step = 0;
    rank.doing = "nothing yet";
  }
  const auto meeting = std::make_unique<Meeting>();
  meeting->recording = recorded;
  Run(script, reference, Party(), meeting.get(), progress).Do();
  return OutcomeOf(*meeting);
}

void RunParty(const Script& script, const Reference& reference, const Party& party,
              Meeting* meeting) {
  Run(script, reference, party, meeting, &meeting->progress).Do();
}

}  // namespace frugal_oracle
