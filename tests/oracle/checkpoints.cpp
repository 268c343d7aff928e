#include "oracle/checkpoints.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "oracle/random.h"
#include "support/temporary_folder.h"

namespace frugal_oracle {
namespace {

constexpr uint64_t kMostAhead = 3;  // steps from the call to the snapshot

// Another engine for the same tables.
frugal_config OtherConfig(const Script& script, uint64_t variant, uint32_t world_size) {
  Random random(script.seed * 331 + variant);
  frugal_config config = script.config;
  config.world_size = world_size;
  config.flush_mode = static_cast<int32_t>(random.Below(FRUGAL_FLUSH_TREE_HEAP + 1));
  config.flush_threads = static_cast<uint32_t>(random.Below(3));
  config.backing = random.Chance(0.3) ? FRUGAL_BACKING_SHM : FRUGAL_BACKING_PRIVATE;
  config.lookahead = std::min<uint32_t>(FRUGAL_MAX_LOOKAHEAD,
                                        config.lookahead + static_cast<uint32_t>(random.Below(4)));
  config.pending_bytes = random.OneOf<uint64_t>({uint64_t{1} << 30, 20000, 0});
  return config;
}

// The fewest ranks that can do steps [from, end): each step has a rank that commits it, and the
// ranks that are left out change no hyper-parameters.
uint32_t FewestRanks(const Script& script, size_t from, size_t end) {
  const auto all = static_cast<uint32_t>(script.ranks.size());
  uint32_t fewest = 1;
  for (size_t i = from; i < end; ++i) {
    uint32_t first = all;  // that commits the step
    for (uint32_t r = 0; r < all; ++r) {
      const RankStep& step = script.ranks[r].steps[i];
      if (step.in_final) first = std::min(first, r + 1);
      if (step.attempts.size() > 1) return all;  // an abort: which ranks see it is drawn
      for (const Attempt& attempt : step.attempts) {
        if (attempt.finish != Finish::kEnd) return all;
        for (const std::vector<Action>* actions : {&attempt.before, &attempt.inside})
          for (const Action& action : *actions)
            if (action.call == Call::kSetOptimizer) fewest = std::max(fewest, r + 1);
      }
    }
    fewest = std::max(fewest, first);
  }
  return fewest;
}

// Draws a world size for the steps between two engines. Ranks that it has not do nothing there.
uint32_t DrawWorld(Script* script, size_t from, size_t end, Random* random) {
  const auto all = static_cast<uint32_t>(script->ranks.size());
  const uint32_t fewest = FewestRanks(*script, from, end);
  const uint32_t world =
      random->Chance(0.3) ? all : static_cast<uint32_t>(random->Between(fewest, all));
  for (uint32_t r = world; r < all; ++r)
    for (size_t i = from; i < end; ++i) script->ranks[r].steps[i] = RankStep();
  // A rank rejoins the engine of the steps before.
  for (auto& [at, list] : script->boundaries)
    if (from < at && at <= end)
      std::erase_if(list, [&](const OutsideAction& action) {
        return action.what == Outside::kRejoin && action.rank >= world;
      });
  return world;
}

// The engines that go on have other world sizes.
void DrawWorlds(Script* script, Random* random) {
  size_t from = 0;
  OutsideAction* resume = nullptr;  // since when the present engine goes on
  const auto end = [&](size_t at) {
    const uint32_t world = DrawWorld(script, from, at, random);
    (resume ? resume->world_size : script->config.world_size) = world;
  };
  for (auto& [at, list] : script->boundaries) {
    OutsideAction* last = nullptr;
    const auto find = [&] {
      for (OutsideAction& action : list)
        if (action.what == Outside::kResume) {
          action.world_size = static_cast<uint32_t>(script->ranks.size());
          last = &action;
        }
    };
    find();
    if (last == nullptr) continue;
    end(at);
    find();  // the list may have become shorter
    resume = last;
    from = at;
  }
  end(script->steps);
}

}  // namespace

void AddCheckpoints(Script* script) {
  Random random(script->seed * 313 + 5);
  script->checkpoints = true;
  script->join_at_once = true;  // another engine is joined by all ranks at once
  for (uint64_t n = random.Below(6); n > 0; --n) {
    OutsideAction action;
    action.what = Outside::kCheckpoint;
    const size_t index = random.Below(script->steps);
    action.ahead = random.Chance(0.5) ? random.Below(kMostAhead + 1) : 0;
    action.ahead = std::min<size_t>(action.ahead, script->steps - index);
    action.variant = random.Next();
    std::vector<OutsideAction>& list = script->boundaries[index];
    list.insert(list.begin() + static_cast<ptrdiff_t>(random.Below(list.size() + 1)), action);
  }
  for (uint64_t n = random.Below(4); n > 0 && script->steps > 1; --n) {
    OutsideAction action;
    action.what = Outside::kResume;
    action.variant = random.Next();
    std::vector<OutsideAction>& list = script->boundaries[random.Between(1, script->steps - 1)];
    list.push_back(action);
  }
  DrawWorlds(script, &random);
}

Snapshot SnapshotOf(const frugal_reference::Reference& reference, size_t tables) {
  Snapshot snapshot(tables);
  for (size_t t = 0; t < tables; ++t)
    for (const uint64_t key : reference.Keys(t)) {
      std::vector<float> row;
      if (reference.Get(t, key, &row)) snapshot[t][key] = std::move(row);
    }
  return snapshot;
}

RunCheckpoints::RunCheckpoints(const Script& script, Fail fail)
    : script_(script),
      fail_(std::move(fail)),
      folder_(std::make_unique<TemporaryFolder>(script.seed % 2 == 0 ? "/tmp" : "/dev/shm")) {}

RunCheckpoints::~RunCheckpoints() = default;

bool RunCheckpoints::Expect(int32_t status, const char* call) {
  if (status == FRUGAL_OK) return true;
  frugal_error error;
  frugal_last_error(&error);
  fail_(std::string(call) + " returned " + frugal_status_name(status) + ": " + error.message);
  return false;
}

bool RunCheckpoints::Open(frugal_engine* engine) {
  frugal_folder_config config = FRUGAL_FOLDER_CONFIG_INIT;
  config.keep = 1 + static_cast<uint32_t>(script_.seed % 3);
  return Expect(frugal_folder_open(engine, folder_->path().c_str(), &config), "frugal_folder_open");
}

// The step after the last committed one.
uint64_t RunCheckpoints::Next(frugal_engine* engine) {
  uint64_t last = FRUGAL_NO_STEP;
  Expect(frugal_committed_step(engine, &last), "frugal_committed_step");
  return last == FRUGAL_NO_STEP ? script_.first_step : last + 1;
}

void RunCheckpoints::Deleted(frugal_engine* engine, size_t table, uint64_t rows) {
  if (number_ != 0 && Next(engine) >= end_) deleted_since_[table] += rows;
}

void RunCheckpoints::Begin(frugal_engine* engine, const OutsideAction& action) {
  const uint64_t next = Next(engine);
  if (number_ != 0 && next < end_) {  // it is of a step that is to come
    if (action.what != Outside::kResume) return;
    number_ = 0;
    if (!Expect(frugal_checkpoint_cancel(engine, 0), "frugal_checkpoint_cancel")) return;
  }
  Finish(engine);
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  end_ = next + action.ahead;
  if (action.ahead > 0) config.step = end_ - 1;
  if (!Expect(frugal_checkpoint(engine, &config, &number_), "frugal_checkpoint")) return;
  deleted_since_.assign(script_.tables.size(), 0);
  expected_ = &action.expected_tables;
  variant_ = action.variant;
}

void RunCheckpoints::Finish(frugal_engine* engine) {
  const uint64_t number = std::exchange(number_, 0);
  if (number == 0) return;
  if (!Expect(frugal_checkpoint_wait(engine, number, FRUGAL_TIMEOUT_INFINITE, nullptr),
              "frugal_checkpoint_wait"))
    return;
  for (size_t t = 0; t < script_.tables.size(); ++t) {
    frugal_table* table = nullptr;
    uint64_t rows = 0;
    if (!Expect(frugal_table_find(engine, script_.tables[t].name.c_str(), &table),
                "frugal_table_find") ||
        !Expect(frugal_table_count(table, &rows), "frugal_table_count"))
      return;
    deleted_ += deleted_since_[t];
    if (script_.tables[t].config.key_space == FRUGAL_DENSE) continue;  // all of its rows exist
    rows += deleted_since_[t];
    created_ += rows - std::min<uint64_t>(rows, (*expected_)[t].size());
  }
  const frugal_config config = OtherConfig(script_, variant_, 1 + variant_ % 8);
  frugal_engine* other = nullptr;
  if (!Expect(frugal_open(&config, &other), "frugal_open")) return;
  frugal_restore_config restore = FRUGAL_RESTORE_CONFIG_INIT;
  restore.folder = folder_->path().c_str();
  restore.number = number;
  if (Expect(frugal_restore(other, &restore, nullptr), "frugal_restore"))
    Compare(other, *expected_, "checkpoint " + std::to_string(number));
  Expect(frugal_close(other), "frugal_close");
}

frugal_engine* RunCheckpoints::Resume(frugal_engine* engine, const OutsideAction& action) {
  Begin(engine, action);
  if (number_ == 0) return nullptr;
  number_ = 0;
  if (!Expect(frugal_checkpoint_wait(engine, 0, FRUGAL_TIMEOUT_INFINITE, nullptr),
              "frugal_checkpoint_wait") ||
      !Expect(frugal_close(engine), "frugal_close"))
    return nullptr;
  const frugal_config config = OtherConfig(script_, action.variant, action.world_size);
  frugal_engine* other = nullptr;
  if (!Expect(frugal_open(&config, &other), "frugal_open")) return nullptr;
  if (Open(other) && Expect(frugal_restore(other, nullptr, nullptr), "frugal_restore"))
    Compare(other, action.expected_tables, "the engine that goes on");
  return other;
}

void RunCheckpoints::Compare(frugal_engine* engine, const Snapshot& expected,
                             const std::string& what) {
  for (size_t t = 0; t < script_.tables.size(); ++t) {
    frugal_table* table = nullptr;
    if (!Expect(frugal_table_find(engine, script_.tables[t].name.c_str(), &table),
                "frugal_table_find"))
      return;
    uint64_t count = 0;
    if (!Expect(frugal_table_count(table, &count), "frugal_table_count")) return;
    std::ostringstream wrong;
    wrong << what << ", table " << t;
    if (count != expected[t].size()) {
      wrong << " has " << count << " rows and not " << expected[t].size();
      return fail_(wrong.str());
    }
    for (const auto& [key, row] : expected[t]) {
      std::vector<float> got(row.size());
      uint8_t found = 0;
      if (!Expect(frugal_get(table, &key, 1, FRUGAL_WITH_STATE, got.data(), 0, &found),
                  "frugal_get"))
        return;
      if (found == 1 && std::memcmp(got.data(), row.data(), row.size() * sizeof(float)) == 0)
        continue;
      wrong << ", key " << key << (found ? ": other bits" : ": missing") << ", first "
            << (found ? got[0] : 0) << " and not " << row[0];
      return fail_(wrong.str());
    }
  }
}

}  // namespace frugal_oracle
