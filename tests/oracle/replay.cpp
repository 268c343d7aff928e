#include "oracle/replay.h"

#include "oracle/checkpoints.h"

namespace frugal_oracle {

using frugal_reference::Op;
using frugal_reference::Reference;

Op ReferenceOp(const OpSpec& spec, const std::vector<float>& grads) {
  Op op;
  op.table = spec.table;
  op.keys = spec.keys.data();
  op.count = spec.keys.size();
  op.pooling = spec.pooling;
  if (spec.pooling != FRUGAL_POOL_NONE) {
    op.offsets = spec.offsets.data();
    op.bags = spec.rows();
    op.weights = spec.weights.empty() ? nullptr : spec.weights.data();
  }
  op.grads = grads.data();
  op.padded = spec.padded;
  op.padding_key = spec.padding_key;
  return op;
}

namespace {

void ReplayAttempt(const Attempt& attempt, uint32_t rank, uint64_t step, Reference* reference) {
  for (const Action& action : attempt.inside) {
    if (action.call == Call::kLookup) {
      for (const OpSpec& spec : action.ops) reference->Create(step, ReferenceOp(spec, {}));
    } else if (action.call == Call::kPush) {
      std::vector<std::vector<float>> grads;
      std::vector<Op> ops;
      for (const OpSpec& spec : action.ops) {
        grads.push_back(MakeGrads(spec, reference->dim(spec.table)));
      }
      for (size_t i = 0; i < action.ops.size(); ++i) {
        ops.push_back(ReferenceOp(action.ops[i], grads[i]));
      }
      reference->Push(rank, step, ops);
    }
  }
}

void ReplayOutside(OutsideAction* action, uint64_t step, size_t tables, Reference* reference) {
  switch (action->what) {
    case Outside::kGet:
    case Outside::kRead:
      for (uint64_t key : action->keys) {
        std::vector<float> row;
        if (!reference->Get(action->table, key, &row)) row.clear();
        action->expected_rows.push_back(std::move(row));
      }
      break;
    case Outside::kPut: {
      const size_t floats = reference->dim(action->table) +
                            (action->with_state ? reference->state_floats(action->table) : 0);
      for (size_t i = 0; i < action->keys.size(); ++i) {
        reference->Put(action->table, step, action->keys[i], action->with_state,
                       action->rows.data() + i * floats);
      }
      break;
    }
    case Outside::kDelete:
      for (uint64_t key : action->keys) {
        action->expected_count += reference->Delete(action->table, step, key) ? 1 : 0;
      }
      break;
    case Outside::kCount:
    case Outside::kKeys:
      action->expected_keys = reference->Keys(action->table);
      action->expected_count = action->expected_keys.size();
      break;
    case Outside::kCheckpoint:
      if (action->ahead == 0) action->expected_tables = SnapshotOf(*reference, tables);
      break;
    case Outside::kResume:
      action->expected_tables = SnapshotOf(*reference, tables);
      reference->SetWorldSize(action->world_size);
      break;
    case Outside::kFlush:
    case Outside::kRejoin:
      break;
  }
}

// The step is committed: checkpoints that were begun for it have its state.
void TakeSnapshots(Script* script, size_t index, const Reference& reference) {
  for (auto& [at, list] : script->boundaries)
    for (OutsideAction& action : list)
      if (action.what == Outside::kCheckpoint && action.ahead > 0 && at + action.ahead == index + 1)
        action.expected_tables = SnapshotOf(reference, script->tables.size());
}

}  // namespace

void AddTables(const Script& script, Reference* reference) {
  for (const TableSpec& table : script.tables) {
    frugal_table_config config = table.config;
    config.name = table.name.c_str();
    reference->AddTable(config);
  }
}

void Replay(Script* script, Reference* reference) {
  AddTables(*script, reference);
  for (const OptimizerChange& change : script->changes) {
    reference->SetOptimizer(change.table, change.first_step, change.optimizer);
  }
  for (size_t i = 0; i <= script->steps; ++i) {
    const uint64_t step = script->StepNumber(i);
    const auto boundary = script->boundaries.find(i);
    if (boundary != script->boundaries.end()) {
      for (OutsideAction& action : boundary->second)
        ReplayOutside(&action, step, script->tables.size(), reference);
    }
    if (i == script->steps) break;
    for (uint32_t r = 0; r < script->ranks.size(); ++r) {
      const RankStep& rank_step = script->ranks[r].steps[i];
      for (size_t k = 0; k + (rank_step.in_final ? 1 : 0) < rank_step.attempts.size(); ++k) {
        ReplayAttempt(rank_step.attempts[k], r, step, reference);
      }
    }
    reference->Abort();
    if (script->killed && i + 1 == script->steps) break;
    for (uint32_t r = 0; r < script->ranks.size(); ++r) {
      const RankStep& rank_step = script->ranks[r].steps[i];
      if (rank_step.in_final) {
        ReplayAttempt(rank_step.attempts.back(), r, step, reference);
      }
    }
    reference->Commit(step, script->skip[i]);
    TakeSnapshots(script, i, *reference);
  }
}

}  // namespace frugal_oracle
