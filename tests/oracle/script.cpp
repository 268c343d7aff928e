#include "oracle/script.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "oracle/digest.h"
#include "oracle/random.h"
#include "support/never.h"

namespace frugal_oracle {
namespace {

// Keys of one table that a rank means to use in a step, and how it declared them.
struct Group {
  size_t table = 0;
  std::vector<uint64_t> keys;
  bool padded = false;
  uint64_t padding_key = 0;
  int declaration = -1;
  uint32_t part = 0;
};

class ScriptMaker {
 public:
  ScriptMaker(uint64_t seed, const Options& options) : random_(seed), options_(options) {
    script_.seed = seed;
  }

  Script Make() {
    MakeEngine();
    MakeTables();
    MakeHabits();
    MakeTimeline();
    MakeContents();
    MakeChanges();
    MakeBoundaryActions();
    FinishAttempts();
    if (options_.killed) LeaveUncommitted();
    if (options_.far) MakePlaces();
    return std::move(script_);
  }

 private:
  bool exact() const { return script_.config.staleness == 0; }

  void MakeEngine() {
    frugal_config& config = script_.config;
    pressure_ = random_.Chance(0.35);
    scarce_ = options_.far && Random(script_.seed * 277).Chance(0.45);
    const uint32_t most =
        std::min(static_cast<uint32_t>(std::max(1, options_.max_ranks)), options_.far ? 4u : 8u);
    config.world_size = random_.Chance(0.15) ? 1 : static_cast<uint32_t>(random_.Between(1, most));
    if (pressure_) config.world_size = static_cast<uint32_t>(random_.Between((most + 1) / 2, most));
    const bool stale = options_.tau_only || (!options_.exact_only && random_.Chance(0.15));
    if (stale) {
      config.staleness = random_.OneOf<uint64_t>({1, 1, 2, 2, 5, FRUGAL_STALENESS_ASYNC});
    }
    config.lookahead =
        static_cast<uint32_t>(random_.Chance(0.2) ? random_.Between(0, 3) : random_.Between(1, 20));
    if (random_.Chance(0.05)) config.lookahead = FRUGAL_MAX_LOOKAHEAD;
    const uint32_t threads[] = {0, 1, 2, 3, 4, 8};
    config.flush_threads = threads[random_.Weighted({25, 30, 20, 10, 10, 5})];
    const int32_t modes[] = {FRUGAL_FLUSH_AUTO, FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED,
                             FRUGAL_FLUSH_WRITE_THROUGH, FRUGAL_FLUSH_TREE_HEAP};
    config.flush_mode = modes[random_.Weighted({20, 10, 45, 8, 17})];
    if (pressure_) {
      config.lookahead = static_cast<uint32_t>(random_.Between(4, 20));
      config.flush_threads = static_cast<uint32_t>(random_.Between(1, 8));
      config.flush_mode = random_.Chance(0.7) ? FRUGAL_FLUSH_DEFERRED : FRUGAL_FLUSH_TREE_HEAP;
    }
    if (options_.flush_mode >= 0) config.flush_mode = options_.flush_mode;
    if (options_.flush_threads >= 0) {
      config.flush_threads = static_cast<uint32_t>(options_.flush_threads);
    }
    const uint64_t budgets[] = {0, 1 << 10, 64 << 10, uint64_t{1} << 30};
    config.pending_bytes = budgets[random_.Weighted({10, 20, 20, 50})];
    config.backing = random_.Chance(0.3) ? FRUGAL_BACKING_SHM : FRUGAL_BACKING_PRIVATE;
    config.seed = random_.Chance(0.2) ? 0 : random_.Next();
    config.timeout_ms = kNeverMs;

    switch (random_.Weighted({40, 40, 15, 5})) {
      case 0:
        script_.first_step = 0;
        break;
      case 1:
        script_.first_step = random_.Between(1, 5000);
        break;
      case 2:
        script_.first_step = (uint64_t{1} << 40) - random_.Below(50);
        break;
      default:
        script_.first_step = (uint64_t{1} << 62) + random_.Below(1000);
    }
    script_.steps = random_.Between(5, 40);
    script_.one_thread = random_.Chance(0.2);
    if (pressure_) {
      if (random_.Chance(0.8)) config.pending_bytes = budgets[random_.Weighted({0, 10, 30, 60})];
      script_.steps = random_.Between(40, 120);
      script_.one_thread = false;
    }
    script_.close_trainers = random_.Chance(0.5);
  }

  void MakeTables() {
    const size_t count = 1 + random_.Weighted({45, 30, 15, 10});
    double dims = 0;
    for (size_t t = 0; t < count; ++t) {
      TableSpec table;
      table.name = "table " + std::to_string(t) + (random_.Chance(0.2) ? " \xc3\xa9" : "");
      if (random_.Chance(0.05)) table.name.resize(255, 'x');
      frugal_table_config& config = table.config;
      config.dim = random_.Chance(0.6) ? random_.OneOf<uint32_t>({1, 2, 3, 4, 8, 16, 17, 32, 64})
                                       : static_cast<uint32_t>(random_.Between(1, 70));
      if (pressure_ && random_.Chance(0.7)) config.dim = random_.OneOf<uint32_t>({32, 64, 70});
      config.key_space = random_.Chance(0.5) ? FRUGAL_HASHED : FRUGAL_DENSE;
      uint64_t keys = random_.Chance(0.3) ? random_.Between(10, 60) : random_.Between(10, 2000);
      if (pressure_) keys = random_.Between(500, 6000);
      if (scarce_) keys = random_.Between(4000, 8000);
      MakeUniverse(keys, &table);
      config.rows = keys;
      // A table with no room to spare shows whether rows that are gone give theirs back.
      if (config.key_space == FRUGAL_HASHED && random_.Chance(0.5)) {
        config.rows += random_.Below(5000);
      }
      config.init = static_cast<int32_t>(random_.Below(5));
      config.init_a = random_.Float(-1, 1);
      config.init_b = random_.Float(0.1f, 2);
      if (config.init == FRUGAL_INIT_XAVIER && random_.Chance(0.5)) config.init_b = 0;
      if (config.init == FRUGAL_INIT_XAVIER) config.init_a = std::abs(config.init_a);
      if (config.init == FRUGAL_INIT_UNIFORM && config.init_a > config.init_b)
        std::swap(config.init_a, config.init_b);
      config.nan_policy = static_cast<int32_t>(random_.Weighted({50, 25, 25}));
      if (config.key_space == FRUGAL_DENSE && random_.Chance(0.3)) {
        config.flags = FRUGAL_TABLE_LAZY;
      }
      const int32_t kind = static_cast<int32_t>(random_.Below(7));
      const float accumulator = random_.Chance(0.5) ? 0.0f : random_.Float(0, 1);
      config.optimizer = MakeOptimizer(kind, accumulator);
      skew_.push_back(random_.OneOf<int>({1, 1, 2, 4, 8}));
      dims += config.dim;
      script_.tables.push_back(std::move(table));
    }
    mean_dim_ = dims / static_cast<double>(count);
  }

  void MakeUniverse(uint64_t count, TableSpec* table) {
    if (table->config.key_space == FRUGAL_DENSE) {
      for (uint64_t key = 0; key < count; ++key) table->universe.push_back(key);
    } else {
      std::set<uint64_t> keys = {0, UINT64_MAX};
      const bool small = random_.Chance(0.3);
      while (keys.size() < count) keys.insert(small ? random_.Below(count * 3) : random_.Next());
      table->universe.assign(keys.begin(), keys.end());
    }
    random_.Shuffle(&table->universe);
  }

  frugal_optimizer MakeOptimizer(int32_t kind, float accumulator) {
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = kind;
    o.initial_accumulator = accumulator;
    o.lr = random_.PowerOfTen(-3, 0);
    o.eps = random_.PowerOfTen(-10, -2);
    o.momentum = random_.Float(0, 0.99f);
    o.dampening = random_.Chance(0.5) ? 0.0f : random_.Float(0, 1);
    o.beta1 = random_.Float(0.5f, 0.99f);
    o.beta2 = random_.Float(0.9f, 0.9999f);
    o.rho = random_.Float(0.8f, 0.999f);
    o.ftrl_lambda1 = random_.Chance(0.5) ? 0.0f : random_.PowerOfTen(-3, 0);
    o.ftrl_lambda2 = random_.Chance(0.5) ? 0.0f : random_.PowerOfTen(-3, 0);
    o.ftrl_beta = random_.Float(0.1f, 2);
    if (random_.Chance(0.25)) o.weight_decay_l2 = random_.PowerOfTen(-4, -1);
    if (random_.Chance(0.25)) o.weight_decay = random_.PowerOfTen(-4, -1);
    if (random_.Chance(0.2)) o.clip_value = random_.PowerOfTen(-2, 1);
    if (random_.Chance(0.2)) o.clip_norm = random_.PowerOfTen(-2, 1);
    if (random_.Chance(0.2)) o.weight_bound = random_.PowerOfTen(-2, 1);
    if (random_.Chance(0.3)) o.grad_scale = random_.PowerOfTen(-3, 1);
    // One optimizer kind each reads these.
    if (random_.Chance(0.5)) o.flags |= FRUGAL_OPT_NESTEROV | FRUGAL_OPT_NO_BIAS_CORRECTION;
    if (random_.Chance(0.3)) o.flags |= FRUGAL_OPT_MEAN_RANKS;
    return o;
  }

  // One of a list with commas.
  static std::string OneOf(const std::string& list, Random* random) {
    const size_t n = 1 + static_cast<size_t>(std::count(list.begin(), list.end(), ','));
    size_t at = 0;
    for (uint64_t skip = random->Below(n); skip > 0; --skip) at = list.find(',', at) + 1;
    return list.substr(at, list.find(',', at) - at);
  }

  // What is typical of this run and of each of its ranks.
  void MakeHabits() {
    for (uint32_t r = 0; r < script_.config.world_size; ++r) {
      RankSpec rank;
      rank.steps.resize(script_.steps);
      if (!random_.Chance(0.2)) {
        rank.window =
            static_cast<uint32_t>(random_.Below(std::min(script_.config.lookahead, 20u) + 1));
      }
      if (pressure_) {
        rank.window = static_cast<uint32_t>(random_.Between(2, script_.config.lookahead));
      }
      size_t cache = pressure_ ? 1 : random_.Weighted({35, 20, 20, 10, 15});
      if (options_.no_cache || (pressure_ && random_.Chance(0.3))) cache = 0;
      switch (cache) {
        case 0:
          break;
        case 1:
          rank.cache_ratio = random_.Unit() * 0.1;
          break;
        case 2:
          rank.cache_ratio = random_.Unit();
          break;
        case 3:
          rank.cache_ratio = 1;
          break;
        default:
          rank.cache_bytes = random_.Between(1, 200'000);
      }
      // Drawn from another sequence: a seed does the same with and without a device.
      Random device(script_.seed * 131 + r);
      if (!options_.device.empty() && device.Chance(0.75)) {
        rank.device = OneOf(options_.device, &device);
      }
      script_.ranks.push_back(std::move(rank));
      idle_.push_back(random_.Chance(0.1));
    }
    groups_per_step_ = static_cast<int>(random_.Between(1, 4));
    const double budget = (pressure_ ? 8e7 : 2e6) * options_.scale;
    const double calls =
        static_cast<double>(script_.config.world_size * script_.steps) * groups_per_step_;
    const double affordable = budget / (calls * mean_dim_);
    max_keys_ = static_cast<size_t>(std::clamp(affordable, 4.0, pressure_ ? 1500.0 : 300.0));
    if (!pressure_ && random_.Chance(0.3)) max_keys_ = std::max<size_t>(4, max_keys_ / 10);
    if (scarce_) {
      groups_per_step_ = std::min(groups_per_step_, 2);
      max_keys_ = std::clamp<size_t>(
          80 / (script_.config.world_size * static_cast<size_t>(groups_per_step_)), 4, max_keys_);
    }
    const double sleeps[] = {0, 0.03, 0.2};
    sleep_chance_ = sleeps[random_.Weighted({30, 50, 20})];
    cancel_chance_ = random_.Chance(0.25) ? 0.5 : 0.06;
    abort_chance_ = random_.Chance(0.6) ? 0 : 0.08;
    leave_chance_ = random_.Chance(0.7) ? 0 : 0.05;
    late_chance_ = random_.Chance(0.3) ? 0.5 : 0.1;
  }

  // Which ranks are there in which step, what is aborted, where all meet.
  void MakeTimeline() {
    const size_t n = script_.steps;
    script_.boundaries[n];
    if (random_.Chance(0.3)) script_.boundaries[0];
    for (uint64_t b = random_.Weighted({30, 30, 20, 20}); b > 0; --b) {
      script_.boundaries[random_.Between(1, n)];
    }
    const uint32_t world = script_.config.world_size;
    std::vector<bool> present(world, true);
    bool may_abort = true;  // with staleness: once between two step boundaries
    for (size_t i = 0; i < n; ++i) {
      const bool boundary = script_.boundaries.count(i) != 0;
      if (boundary) {
        may_abort = true;
        for (uint32_t r = 0; r < world && i > 0; ++r) {
          if (present[r] || !random_.Chance(0.7)) continue;
          present[r] = true;
          OutsideAction rejoin;
          rejoin.what = Outside::kRejoin;
          rejoin.rank = r;
          script_.boundaries[i].push_back(rejoin);
        }
      }
      MakeAborts(i, boundary || i == 0, &present, &may_abort);
      for (uint32_t r = 0; r < world; ++r) {
        RankStep& step = script_.ranks[r].steps[i];
        if (!present[r]) continue;
        step.in_final = true;
        step.attempts.emplace_back();
        if (Present(present) >= 2 && random_.Chance(leave_chance_)) {
          step.leave_after = true;
          present[r] = false;
        }
      }
      script_.skip.push_back(random_.Chance(0.05));
    }
    if (script_.aborts == 0) script_.join_at_once = random_.Chance(0.5);
    for (RankSpec& rank : script_.ranks) {
      for (RankStep& step : rank.steps) {
        step.wait_before_leaving = !exact() && script_.aborts > 0;
      }
    }
  }

  static size_t Present(const std::vector<bool>& present) {
    return static_cast<size_t>(std::count(present.begin(), present.end(), true));
  }

  void MakeAborts(size_t i, bool nothing_before, std::vector<bool>* present, bool* may_abort) {
    const uint32_t world = script_.config.world_size;
    for (int attempt = 0; attempt < 3; ++attempt) {
      if (!*may_abort || !random_.Chance(abort_chance_)) return;
      const uint32_t aborter = static_cast<uint32_t>(random_.Below(world));
      if (!(*present)[aborter]) return;
      // With staleness a rank that leaves takes with it what it did in steps that are undone, and
      // which those are depends on timing - unless nothing before this step can be undone.
      const bool close =
          Present(*present) >= 2 && random_.Chance(0.3) && (exact() || nothing_before);
      ++script_.aborts;
      for (uint32_t r = 0; r < world; ++r) {
        if (!(*present)[r] || (!exact() && r != aborter)) continue;
        script_.ranks[r].steps[i].attempts.emplace_back();
      }
      script_.ranks[aborter].steps[i].attempts.back().finish =
          close ? Finish::kClose : Finish::kAbort;
      if (close) (*present)[aborter] = false;
      if (!exact()) *may_abort = false;
    }
  }

  void MakeContents() {
    for (size_t i = 0; i < script_.steps; ++i) {
      const bool empty_step = random_.Chance(0.04);
      for (uint32_t r = 0; r < script_.config.world_size; ++r) {
        RankStep& step = script_.ranks[r].steps[i];
        if (step.attempts.empty()) continue;
        const bool empty = empty_step || idle_[r] || random_.Chance(0.06);
        std::vector<Group> groups;
        if (!empty) {
          const uint64_t count = random_.Between(1, static_cast<uint64_t>(groups_per_step_));
          for (uint64_t g = 0; g < count; ++g) groups.push_back(MakeGroup());
        }
        Declare(r, i, &groups);
        for (size_t k = 0; k < step.attempts.size(); ++k) {
          Attempt& attempt = step.attempts[k];
          attempt.begin_style = static_cast<int>(random_.Weighted({70, 15, 15}));
          const bool last = k + 1 == step.attempts.size();
          if (!exact() && !last) continue;  // a truncated copy of the last: FinishAttempts
          if (!empty) FillAttempt(groups, last && step.in_final, &attempt);
        }
      }
    }
  }

  uint64_t DrawKey(size_t t) {
    const std::vector<uint64_t>& universe = script_.tables[t].universe;
    double u = random_.Unit();
    const double x = u;
    for (int k = 1; k < skew_[t]; ++k) u *= x;
    return universe[static_cast<size_t>(u * static_cast<double>(universe.size()))];
  }

  Group MakeGroup() {
    Group group;
    group.table = random_.Below(script_.tables.size());
    const TableSpec& table = script_.tables[group.table];
    size_t count = 0;
    double hot = 0;
    switch (random_.Weighted({4, 40, 46, 8, 2})) {
      case 0:
        break;
      case 1:
        count = random_.Between(1, std::max<size_t>(1, max_keys_ / 6));
        break;
      case 2:
        count = random_.Between(1, max_keys_);
        break;
      case 3:
        count = random_.Between(1, max_keys_);
        hot = 0.9;
        break;
      default:
        // Beyond 1000 occurrences of a row: several levels of the fold.
        count = table.config.dim <= 17 ? random_.Between(1000, 1600) : max_keys_;
        hot = 0.95;
    }
    const uint64_t hot_key = DrawKey(group.table);
    for (size_t i = 0; i < count; ++i) {
      group.keys.push_back(random_.Chance(hot) ? hot_key : DrawKey(group.table));
    }
    if (random_.Chance(0.15)) {
      group.padded = true;
      if (!group.keys.empty() && random_.Chance(0.7)) {
        group.padding_key = group.keys[random_.Below(group.keys.size())];
      } else {
        // As frameworks pad with -1: not an id of a dense table at all.
        group.padding_key = UINT64_MAX;
        for (uint64_t& key : group.keys) {
          if (random_.Chance(0.1)) key = UINT64_MAX;
        }
      }
    }
    return group;
  }

  // Declares most groups, in up to three declarations at various times before the step.
  void Declare(uint32_t r, size_t target, std::vector<Group>* groups) {
    RankSpec& rank = script_.ranks[r];
    if (rank.window == 0 && !random_.Chance(0.05)) return;
    const uint64_t parts = 1 + random_.Weighted({70, 20, 10});
    for (uint64_t p = 0; p < parts; ++p) {
      Action prefetch;
      prefetch.call = Call::kPrefetch;
      prefetch.target = target;
      const int id = next_declaration_++;
      prefetch.declaration = id;
      for (Group& group : *groups) {
        if (group.declaration >= 0 || random_.Below(parts - p) != 0 || random_.Chance(0.1)) {
          continue;
        }
        group.declaration = id;
        group.part = static_cast<uint32_t>(prefetch.ops.size());
        prefetch.ops.push_back(DeclaredOp(group));
      }
      if (random_.Chance(0.1)) prefetch.ops.push_back(DeclaredOp(MakeGroup()));  // never used
      if (prefetch.ops.empty() && !random_.Chance(0.05)) continue;

      const size_t most = std::min<size_t>(rank.window, target);
      size_t ahead = random_.Chance(late_chance_) ? random_.Below(most + 1) : most;
      const size_t when = target - ahead;
      const bool before = ahead == 0 || random_.Chance(0.7);
      if (!Insert(&rank.steps[when], before, std::move(prefetch))) {
        for (Group& group : *groups) {
          if (group.declaration == id) group.declaration = -1;
        }
        continue;
      }
      if (!random_.Chance(cancel_chance_)) continue;
      Action cancel;
      cancel.call = Call::kCancel;
      cancel.declaration = id;
      const size_t cancelled = when + random_.Below(ahead + 1);
      Insert(&rank.steps[cancelled], cancelled == target || random_.Chance(0.5), std::move(cancel));
    }
  }

  static OpSpec DeclaredOp(const Group& group) {
    OpSpec op;
    op.table = group.table;
    op.keys = group.keys;
    op.padded = group.padded;
    op.padding_key = group.padding_key;
    return op;
  }

  // Puts an action at a random position of a random attempt. Returns false if the rank is not
  // there.
  bool Insert(RankStep* step, bool before, Action action) {
    if (step->attempts.empty()) return false;
    Attempt& attempt = step->attempts[random_.Below(step->attempts.size())];
    std::vector<Action>& actions = before ? attempt.before : attempt.inside;
    actions.insert(actions.begin() + static_cast<ptrdiff_t>(random_.Below(actions.size() + 1)),
                   std::move(action));
    return true;
  }

  // One use of a group's keys, by whatever way there is.
  OpSpec UseGroup(const Group& group, bool push) {
    OpSpec op;
    op.table = group.table;
    op.padded = group.padded;
    op.padding_key = group.padding_key;
    const TableSpec& table = script_.tables[op.table];
    const size_t way =
        group.declaration < 0 ? 3 + random_.Below(2) : random_.Weighted({40, 15, 20, 15, 10});
    const bool subset = way == 2 || way == 4;
    if (subset && !group.keys.empty()) {
      const size_t count = random_.Below(group.keys.size() + 1);
      for (size_t i = 0; i < count; ++i) {
        op.keys.push_back(group.keys[random_.Below(group.keys.size())]);
      }
    } else {
      op.keys = group.keys;
    }
    if (way <= 2) {
      op.declaration = group.declaration;
      op.part = group.part;
      op.keys_null = way == 0;
    }
    if (random_.Chance(0.35) && (exact() || push)) MakeBags(&op, push);
    if (random_.Chance(0.2)) op.gap_floats = random_.Between(1, 5);
    op.want_found = random_.Chance(0.5);
    op.grad_seed = random_.Next();
    op.grad_kind = static_cast<GradKind>(random_.Weighted({60, 25, 5, 10}));
    op.specials = table.config.nan_policy != FRUGAL_NAN_REJECT && random_.Chance(0.3);
    return op;
  }

  void MakeBags(OpSpec* op, bool push) {
    op->pooling = random_.Chance(0.65) ? FRUGAL_POOL_SUM : FRUGAL_POOL_MEAN;
    op->offsets = {0};
    const size_t longest = random_.OneOf<size_t>({2, 8, 50, 2000});
    while (op->offsets.back() < op->keys.size()) {
      const uint64_t size = random_.Chance(0.1) ? 0 : random_.Between(1, longest);
      op->offsets.push_back(std::min<uint64_t>(op->offsets.back() + size, op->keys.size()));
    }
    if (random_.Chance(0.2)) op->offsets.push_back(op->keys.size());
    if (op->pooling == FRUGAL_POOL_SUM && random_.Chance(0.6)) {
      for (size_t i = 0; i < op->keys.size(); ++i) op->weights.push_back(random_.Float(-2, 2));
      // What a row is "in this step" is only one value without staleness.
      op->want_weight_grads = push && exact() && !op->weights.empty() && random_.Chance(0.6);
    }
  }

  void AddCalls(Call call, const std::vector<Group>& groups, std::vector<Action>* actions) {
    const bool push = call == Call::kPush;
    Action action;
    action.call = call;
    auto flush = [&] {
      if (action.ops.empty()) return;
      action.borrow = push && random_.Chance(0.2);
      if (push && random_.Chance(0.12)) Poison(&action);
      actions->push_back(std::move(action));
      action = Action();
      action.call = call;
    };
    for (const Group& group : groups) {
      uint64_t uses = random_.Weighted({12, 73, 12, 3});
      for (; uses > 0; --uses) {
        action.ops.push_back(UseGroup(group, push));
        if (random_.Chance(0.5)) flush();
      }
    }
    if (random_.Chance(0.25)) {
      Group undeclared = MakeGroup();
      action.ops.push_back(UseGroup(undeclared, push));
    }
    flush();
  }

  // Marks an element of the push to be a NaN at first, where that must be refused.
  void Poison(Action* action) {
    const size_t o = random_.Below(action->ops.size());
    const OpSpec& op = action->ops[o];
    const TableSpec& table = script_.tables[op.table];
    if (table.config.nan_policy != FRUGAL_NAN_REJECT) return;
    std::vector<size_t> rows;  // those that are the gradient of some key
    for (size_t row = 0; row < op.rows(); ++row) {
      const bool pooled = op.pooling != FRUGAL_POOL_NONE;
      const size_t begin = pooled ? op.offsets[row] : row;
      const size_t end = pooled ? op.offsets[row + 1] : row + 1;
      for (size_t i = begin; i < end; ++i) {
        if (op.padded && op.keys[i] == op.padding_key) continue;
        rows.push_back(row);
        break;
      }
    }
    if (rows.empty()) return;
    action->poison_op = static_cast<int>(o);
    action->poison_element =
        rows[random_.Below(rows.size())] * table.config.dim + random_.Below(table.config.dim);
  }

  void FillAttempt(const std::vector<Group>& groups, bool commits, Attempt* attempt) {
    std::vector<Action> lookups, pushes;
    const size_t kind = random_.Weighted({80, 8, 8, 4});
    if (kind == 0 || kind == 1) AddCalls(Call::kLookup, groups, &lookups);
    if (kind == 0 || kind == 2) AddCalls(Call::kPush, groups, &pushes);
    std::vector<Action> all = std::move(lookups);
    for (Action& push : pushes) all.push_back(std::move(push));
    if (random_.Chance(0.35)) random_.Shuffle(&all);

    // In a step that is being aborted, the results of these calls depend on timing.
    const bool steady = commits && (exact() || script_.aborts == 0);
    auto add = [&](Action action) {
      all.insert(all.begin() + static_cast<ptrdiff_t>(random_.Below(all.size() + 1)),
                 std::move(action));
    };
    if (steady && random_.Chance(0.1)) add(MakeRead());
    if (steady && random_.Chance(0.03)) {
      Action busy;
      busy.call = Call::kBusy;
      busy.variant = static_cast<int>(random_.Below(8));
      busy.table = random_.Below(script_.tables.size());
      add(std::move(busy));
    }
    if (random_.Chance(0.05)) {
      Action bad = MakeBadCall();
      if (!bad.ops.empty()) add(std::move(bad));
    }
    if (random_.Chance(0.02)) {
      Action flush;
      flush.call = Call::kFlush;
      add(std::move(flush));
    }
    if (random_.Chance(0.03)) {
      Action query;
      query.call = Call::kQuery;
      add(std::move(query));
    }
    // Between steps a read waits like a gate; no rank may undo the step before meanwhile.
    if (commits && script_.aborts == 0 && random_.Chance(0.04)) {
      attempt->before.push_back(MakeRead());
    }
    // Declarations that were put here before keep their random positions.
    std::vector<Action> inside = std::move(attempt->inside);
    for (Action& action : inside) add(std::move(action));
    attempt->inside = std::move(all);
  }

  Action MakeRead() {
    Action read;
    read.call = Call::kRead;
    for (uint64_t count = random_.Between(1, 2); count > 0; --count) {
      Group group = MakeGroup();
      OpSpec op = UseGroup(group, /*push=*/false);
      const bool hashed = script_.tables[op.table].config.key_space == FRUGAL_HASHED;
      if (hashed && op.pooling != FRUGAL_POOL_NONE) {
        // Whether a row exists may depend on timing, which only single rows can be checked for.
        op.pooling = FRUGAL_POOL_NONE;
        op.offsets.clear();
        op.weights.clear();
        op.want_weight_grads = false;
      }
      read.ops.push_back(std::move(op));
    }
    return read;
  }

  // Good ops around one with a bad id; new keys of hashed tables must not come to life.
  Action MakeBadCall() {
    Action action;
    action.call = Call::kBadKey;
    action.variant = static_cast<int>(random_.Below(3));
    std::vector<size_t> dense, hashed;
    for (size_t t = 0; t < script_.tables.size(); ++t) {
      const bool is_dense = script_.tables[t].config.key_space == FRUGAL_DENSE;
      (is_dense ? dense : hashed).push_back(t);
    }
    if (dense.empty()) return action;
    OpSpec bad;
    bad.table = dense[random_.Below(dense.size())];
    const uint64_t rows = script_.tables[bad.table].config.rows;
    bad.keys = {0, random_.OneOf<uint64_t>({rows, rows + 1, uint64_t{1} << 32, UINT64_MAX}), 1};
    bad.grad_seed = random_.Next();
    if (!hashed.empty()) {
      OpSpec good;
      good.table = hashed[random_.Below(hashed.size())];
      good.keys = {random_.Next(), random_.Next()};
      good.grad_seed = random_.Next();
      action.ops.push_back(std::move(good));
    }
    action.ops.insert(
        action.ops.begin() + static_cast<ptrdiff_t>(random_.Below(action.ops.size() + 1)),
        std::move(bad));
    return action;
  }

  // New hyper-parameters at random steps, set by a rank that is in an earlier or the same one.
  void MakeChanges() {
    const uint64_t count = random_.Weighted({30, 20, 20, 15, 15});
    std::set<std::pair<size_t, size_t>> used;
    for (uint64_t c = 0; c < count; ++c) {
      const size_t t = random_.Below(script_.tables.size());
      const size_t from = random_.Below(script_.steps);
      const size_t told = from - std::min(from, random_.Below(6));
      const size_t r = random_.Below(script_.ranks.size());
      RankStep& step = script_.ranks[r].steps[told];
      if (!step.in_final || !used.insert({t, from}).second) continue;
      const frugal_optimizer& first = script_.tables[t].config.optimizer;
      Action action;
      action.call = Call::kSetOptimizer;
      action.table = t;
      action.first_step = script_.StepNumber(from);
      action.optimizer = MakeOptimizer(first.kind, first.initial_accumulator);
      script_.changes.push_back({t, action.first_step, action.optimizer});
      // These points are passed whatever is aborted: no call before them can return an abort.
      std::vector<Action>& actions =
          random_.Chance(0.5) ? step.attempts[0].before : step.attempts.back().inside;
      const bool front = &actions == &step.attempts[0].before;
      const size_t place = front ? 0 : random_.Below(actions.size() + 1);
      actions.insert(actions.begin() + static_cast<ptrdiff_t>(place), std::move(action));
    }
  }

  void MakeBoundaryActions() {
    for (auto& [index, actions] : script_.boundaries) {
      const uint64_t count = random_.Below(6);
      for (uint64_t c = 0; c < count; ++c) {
        OutsideAction action;
        const Outside kinds[] = {Outside::kGet,  Outside::kPut,  Outside::kDelete, Outside::kCount,
                                 Outside::kKeys, Outside::kRead, Outside::kFlush};
        action.what = kinds[random_.Weighted({30, 25, 20, 5, 10, 10, 5})];
        action.table = random_.Below(script_.tables.size());
        const TableSpec& table = script_.tables[action.table];
        const uint64_t keys = random_.Below(std::min<uint64_t>(max_keys_ * 2, 400) + 1);
        for (uint64_t k = 0; k < keys; ++k) action.keys.push_back(DrawKey(action.table));
        action.with_state = random_.Chance(0.5);
        if (random_.Chance(0.3)) action.gap_floats = random_.Between(1, 3);
        if (action.what == Outside::kDelete) {
          std::set<uint64_t> once(action.keys.begin(), action.keys.end());
          action.keys.assign(once.begin(), once.end());
          random_.Shuffle(&action.keys);
        }
        if (action.what == Outside::kPut) {
          const size_t floats = RowFloats(table, action.with_state);
          for (size_t i = 0; i < keys * floats; ++i) {
            // Accumulators are never negative, so puts of state are not either.
            action.rows.push_back(random_.Float(action.with_state ? 0.0f : -1.0f, 1));
          }
          if (!action.rows.empty() && random_.Chance(0.1)) {
            action.rows[random_.Below(action.rows.size())] = -__builtin_nanf("5");
          }
        }
        actions.push_back(std::move(action));
      }
      random_.Shuffle(&actions);
    }
  }

  void FinishAttempts() {
    for (RankSpec& rank : script_.ranks) {
      for (RankStep& step : rank.steps) {
        if (!exact() && step.attempts.size() > 1) {
          // Here the aborted attempt is a part of what is done again afterwards.
          step.attempts[0].inside = step.attempts[1].inside;
        }
        for (Attempt& attempt : step.attempts) {
          if (attempt.finish != Finish::kEnd) {
            attempt.inside.resize(random_.Below(attempt.inside.size() + 1));
          }
          AddSleeps(&attempt.before);
          AddSleeps(&attempt.inside);
        }
      }
    }
    for (size_t i = 0; i < script_.steps; ++i) {
      if (!script_.skip[i]) continue;
      bool told = false;
      for (RankSpec& rank : script_.ranks) {
        RankStep& step = rank.steps[i];
        if (!step.in_final || (told && !random_.Chance(0.3))) continue;
        step.attempts.back().end_flags = FRUGAL_STEP_SKIP;
        told = true;
      }
      script_.skip[i] = told;
    }
  }

  static size_t RowFloats(const TableSpec& table, bool with_state) {
    const size_t dim = table.config.dim;
    if (!with_state) return dim;
    switch (table.config.optimizer.kind) {
      case FRUGAL_SGD:
        return dim;
      case FRUGAL_ROWWISE_ADAGRAD:
        return dim + 1;
      case FRUGAL_ADAM:
      case FRUGAL_FTRL:
        return 3 * dim;
      default:
        return 2 * dim;
    }
  }

  // The last step ends with the controller: some ranks have ended it by then, others are inside it.
  void LeaveUncommitted() {
    Random random(script_.seed * 139);  // another sequence, as for devices
    script_.killed = true;
    // In most of them no thread writes what no gate has asked for: it is read out while it waits.
    if (random.Chance(0.7)) {
      script_.config.flush_mode = FRUGAL_FLUSH_DEFERRED;
      script_.config.flush_threads = 0;
      script_.config.pending_bytes = uint64_t{1} << 30;
    }
    script_.boundaries.erase(script_.steps);
    // A rank that has made its last call receives no abort. With staleness an abort may come late,
    // so nothing is aborted there.
    if (!exact()) script_.boundaries[script_.steps - 1];
    std::vector<Attempt*> last;
    for (RankSpec& rank : script_.ranks) {
      RankStep& step = rank.steps.back();
      step.leave_after = false;
      if (!exact()) {
        const size_t kept = step.in_final ? 1 : 0;
        script_.aborts -= step.attempts.size() - kept;
        step.attempts.erase(step.attempts.begin(),
                            step.attempts.end() - static_cast<ptrdiff_t>(kept));
      }
      if (step.in_final) last.push_back(&step.attempts.back());
    }
    const size_t one = random.Below(last.size());
    for (size_t i = 0; i < last.size(); ++i) {
      if (i == one || random.Chance(0.5)) last[i]->finish = Finish::kStay;
    }
  }

  // At least as many slots as rows may be held at a time: those of one step, or of as many as ranks
  // can be inside of.
  void MakePlaces() {
    Random random(script_.seed * 281);
    const uint64_t apart = std::min<uint64_t>(script_.config.staleness, script_.steps);
    for (size_t t = 0; t < script_.tables.size(); ++t) {
      TableSpec& table = script_.tables[t];
      if (table.config.key_space != FRUGAL_HASHED) continue;
      std::vector<std::set<uint64_t>> of_step(script_.steps);
      for (const RankSpec& rank : script_.ranks) {
        for (size_t i = 0; i < rank.steps.size(); ++i) {
          for (const Attempt& attempt : rank.steps[i].attempts) {
            for (const std::vector<Action>* list : {&attempt.before, &attempt.inside}) {
              for (const Action& action : *list) {
                if (action.call == Call::kRead) continue;
                const size_t step = action.call == Call::kPrefetch ? action.target : i;
                for (const OpSpec& op : action.ops) {
                  if (op.table == t) of_step[step].insert(op.keys.begin(), op.keys.end());
                }
              }
            }
          }
        }
      }
      uint64_t least = 4;
      for (size_t i = 0; i < script_.steps; ++i) {
        std::set<uint64_t> at_once;
        for (size_t j = i; j <= i + apart && j < script_.steps; ++j)
          at_once.insert(of_step[j].begin(), of_step[j].end());
        least = std::max<uint64_t>(least, at_once.size());
      }
      const uint64_t rows = table.config.rows;
      table.places = random.Chance(0.6) ? least + random.Below(3) : least + random.Below(rows);
      table.places = std::min(table.places, rows);
    }
  }

  void AddSleeps(std::vector<Action>* actions) {
    for (size_t i = 0; i <= actions->size(); ++i) {
      if (!random_.Chance(sleep_chance_)) continue;
      Action sleep;
      sleep.sleep_us = static_cast<uint32_t>(random_.Below(201));
      actions->insert(actions->begin() + static_cast<ptrdiff_t>(i), std::move(sleep));
      ++i;
    }
  }

  Random random_;
  const Options options_;
  Script script_;
  std::vector<int> skew_;   // by table
  std::vector<bool> idle_;  // by rank: never any data
  double mean_dim_ = 1;
  int groups_per_step_ = 1;
  size_t max_keys_ = 4;
  // A run that makes the rare events likely: rows that come again within long windows, flush
  // threads at work, caches that are too small.
  bool pressure_ = false;
  bool scarce_ = false;  // rows that may be far: few of many are in memory
  double sleep_chance_ = 0;
  double cancel_chance_ = 0;
  double abort_chance_ = 0;
  double leave_chance_ = 0;
  double late_chance_ = 0;
  int next_declaration_ = 0;
};

const char* ModeName(int32_t mode) {
  switch (mode) {
    case FRUGAL_FLUSH_AUTO:
      return "auto";
    case FRUGAL_FLUSH_AT_ONCE:
      return "at once";
    case FRUGAL_FLUSH_DEFERRED:
      return "deferred";
    case FRUGAL_FLUSH_WRITE_THROUGH:
      return "write-through";
    default:
      return "tree heap";
  }
}

}  // namespace

std::string Script::Describe() const {
  std::ostringstream out;
  out << ranks.size() << " ranks" << (one_thread ? " in one thread" : "") << ", " << steps
      << " steps from " << first_step << ", staleness ";
  if (config.staleness == FRUGAL_STALENESS_ASYNC) {
    out << "async";
  } else {
    out << config.staleness;
  }
  out << ", " << ModeName(config.flush_mode) << ", " << config.flush_threads
      << " flush threads, lookahead " << config.lookahead << ", pending " << config.pending_bytes
      << " B, " << (config.backing == FRUGAL_BACKING_SHM ? "shm" : "private") << ", " << aborts
      << " aborts, " << boundaries.size() << " boundaries"
      << (killed ? ", the controller is killed" : "") << "; windows and caches";
  for (const RankSpec& rank : ranks) {
    out << ' ' << rank.window << '/';
    if (!rank.device.empty()) out << rank.device << ' ';
    if (rank.cache_bytes != 0) {
      out << rank.cache_bytes << 'B';
    } else {
      out << static_cast<int>(rank.cache_ratio * 100) << '%';
    }
  }
  out << "; tables";
  for (const TableSpec& table : tables) {
    out << (table.config.key_space == FRUGAL_HASHED ? " hashed " : " dense ") << table.config.rows
        << 'x' << table.config.dim << " opt " << table.config.optimizer.kind << " nan "
        << table.config.nan_policy;
    if (table.places != 0) out << " places " << table.places;
  }
  return out.str();
}

uint64_t Script::Fingerprint() const {
  Digest digest;
  auto add_optimizer = [&](const frugal_optimizer& o) {
    // From the kind to the flags there is no padding.
    static_assert(offsetof(frugal_optimizer, flags) - offsetof(frugal_optimizer, kind) ==
                  18 * sizeof(float));
    digest.Add(&o.kind, offsetof(frugal_optimizer, flags) - offsetof(frugal_optimizer, kind));
    digest.Add(o.flags);
  };
  auto add_actions = [&](const std::vector<Action>& actions) {
    for (const Action& action : actions) {
      digest.Add(action.call);
      digest.Add(action.declaration);
      digest.Add(uint64_t{action.target});
      digest.Add(action.borrow);
      digest.Add(action.poison_op);
      digest.Add(uint64_t{action.table});
      digest.Add(action.first_step);
      digest.Add(action.variant);
      if (action.call == Call::kSetOptimizer) add_optimizer(action.optimizer);
      for (const OpSpec& op : action.ops) {
        digest.Add(uint64_t{op.table});
        digest.Add(op.keys);
        digest.Add(op.declaration);
        digest.Add(op.part);
        digest.Add(op.keys_null);
        digest.Add(op.pooling);
        digest.Add(op.offsets);
        digest.Add(op.weights);
        digest.Add(op.want_weight_grads);
        digest.Add(op.padded);
        digest.Add(op.padding_key);
        if (action.call == Call::kPush) digest.Add(MakeGrads(op, 1));
      }
    }
  };
  digest.Add(Describe());
  digest.Add(config.seed);
  digest.Add(one_thread);
  digest.Add(join_at_once);
  digest.Add(close_trainers);
  digest.Add(killed);
  for (const TableSpec& table : tables) {
    digest.Add(table.name);
    digest.Add(table.universe);
    digest.Add(table.config.init);
    digest.Add(table.config.init_a);
    digest.Add(table.config.init_b);
    digest.Add(table.config.flags);
    add_optimizer(table.config.optimizer);
  }
  for (const RankSpec& rank : ranks) {
    for (const RankStep& step : rank.steps) {
      digest.Add(step.in_final);
      digest.Add(step.leave_after);
      for (const Attempt& attempt : step.attempts) {
        add_actions(attempt.before);
        add_actions(attempt.inside);
        digest.Add(attempt.finish);
        digest.Add(attempt.end_flags);
      }
    }
  }
  for (const auto& [index, actions] : boundaries) {
    digest.Add(uint64_t{index});
    for (const OutsideAction& action : actions) {
      digest.Add(action.what);
      digest.Add(uint64_t{action.table});
      digest.Add(action.rank);
      digest.Add(action.keys);
      digest.Add(action.with_state);
      digest.Add(action.rows);
    }
  }
  return digest.value();
}

Script MakeScript(uint64_t seed, const Options& options) {
  return ScriptMaker(seed, options).Make();
}

std::vector<float> MakeGrads(const OpSpec& op, size_t dim) {
  Random random(op.grad_seed);
  std::vector<float> grads(op.rows() * dim);
  for (float& g : grads) {
    switch (op.grad_kind) {
      case GradKind::kUniform:
        g = random.Float(-1, 1);
        break;
      case GradKind::kWide:
        g = random.Float(-1, 1) * static_cast<float>(uint64_t{1} << random.Below(20)) * 0x1p-10f;
        break;
      case GradKind::kTiny:  // denormals too
        g = random.Float(-1, 1) * 0x1p-120f * (random.Chance(0.5) ? 0x1p-10f : 1.0f);
        break;
      case GradKind::kSparse:
        g = random.Chance(0.7) ? (random.Chance(0.5) ? 0.0f : -0.0f) : random.Float(-1, 1);
        break;
    }
  }
  if (op.specials && !grads.empty()) {
    for (uint64_t count = random.Between(1, 3); count > 0; --count) {
      grads[random.Below(grads.size())] = random.OneOf<float>(
          {__builtin_nanf("7"), -__builtin_nanf("9"), __builtin_inff(), -__builtin_inff()});
    }
  }
  return grads;
}

}  // namespace frugal_oracle
