// Makes an op script (docs/bindings.md) from a seed, and the result of the one-thread reference:
// PREFIX.jsonl and PREFIX.expected, or PREFIX.expected0, 1, … if the script is dealt to several
// processes. It uses nothing of the library except the structs of its header.
//
// One thread plays all ranks in turn, so the status and the outputs of every call are known
// beforehand. The order within a step is drawn call by call. Each drawn call is written and applied
// to the reference at once.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "frugal.h"
#include "json_line.h"
#include "oracle/random.h"
#include "reference/reference.h"

namespace opscript {
namespace {

using frugal_reference::Reference;

class Fnv {
 public:
  void Add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ p[i]) * 1099511628211u;
  }
  void Add(const std::vector<float>& x) { Add(x.data(), x.size() * sizeof(float)); }
  void Add(uint64_t x) { Add(&x, sizeof(x)); }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 14695981039346656037u;
};

// Keys of one table, as a declaration has them.
struct Part {
  size_t table = 0;
  std::vector<uint64_t> keys;
  bool padded = false;
  uint64_t padding_key = 0;
};

struct Declaration {
  int batch = -1;
  std::vector<Part> parts;
};

struct Op {
  Part part;               // its keys, also if the op itself does not have them
  int batch = -1;          // -1: none
  size_t number = 0;       // of the part in the batch
  bool keys_null = false;  // the keys are exactly the declared ones
  int32_t pooling = FRUGAL_POOL_NONE;
  std::vector<uint64_t> offsets;
  std::vector<float> weights;  // empty: none
  bool weight_grads = false;
  std::vector<float> grads;

  size_t rows() const {
    return pooling == FRUGAL_POOL_NONE ? part.keys.size() : offsets.size() - 1;
  }
  bool IsPadding(size_t i) const { return part.padded && part.keys[i] == part.padding_key; }

  frugal_reference::Op ForReference() const {
    frugal_reference::Op op;
    op.table = part.table;
    op.keys = part.keys.data();
    op.count = part.keys.size();
    op.pooling = pooling;
    if (pooling != FRUGAL_POOL_NONE) {
      op.offsets = offsets.data();
      op.bags = rows();
      op.weights = weights.empty() ? nullptr : weights.data();
    }
    op.grads = grads.data();
    op.padded = part.padded;
    op.padding_key = part.padding_key;
    return op;
  }
};

struct Table {
  std::string name;
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  std::vector<uint64_t> universe;  // the keys that the script uses
  bool reserving_paused = false;   // has room for only some of them; its keys are never declared
};

struct Rank {
  bool open = false;
  uint32_t window = 0;
  enum { kBefore, kInside, kEnded } phase = kBefore;
  int calls_left = 0;
  std::map<uint64_t, std::vector<Declaration>> declared;  // by step
  uint64_t declared_until = 0;                            // no step from here on is declared yet
};

enum class Use { kDeclare, kLookup, kPush, kRead };

class Maker {
 public:
  // `resumes`: engines are closed, and others go on from their checkpoints.
  Maker(uint64_t seed, size_t steps, const std::string& prefix, uint32_t ranks, uint32_t shares,
        bool resumes)
      : seed_(seed),
        steps_(steps),
        random_(seed),
        script_(prefix + ".jsonl"),
        reference_(EngineSeed(seed), ranks),
        ranks_(ranks),
        resumes_(resumes),
        outputs_(shares),
        dead_(shares) {
    for (uint32_t i = 0; i < shares; ++i)
      expected_.emplace_back(prefix + ".expected" + (shares > 1 ? std::to_string(i) : ""));
  }

  static uint32_t World(uint64_t seed) { return 1 + static_cast<uint32_t>(seed % 3); }

  bool Make() {
    Open();
    MakeTables();
    for (uint32_t r = 0; r < ranks_.size(); ++r) Join(r);
    for (size_t i = 0; i < steps_; ++i) {
      index_ = i;
      step_ = first_step_ + i;
      Boundary();
      while (!Attempt()) {
      }
    }
    ++index_;
    ++step_;
    Boundary();
    Hash();
    if (random_.Chance(0.5)) {
      for (uint32_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].open) Leave(r);
      }
      Hash();
    }
    Write(DoAll("close"), FRUGAL_OK);
    script_.close();
    bool good = script_.good();
    for (std::ofstream& expected : expected_) {
      expected.close();
      good &= expected.good();
    }
    return good;
  }

  // How often each call returned each status.
  const std::map<std::pair<std::string, int32_t>, size_t>& counts() const { return counts_; }

 private:
  static uint64_t EngineSeed(uint64_t seed) { return seed * 0x9e3779b97f4a7c15u; }

  // --- Writing -----------------------------------------------------------------------------------

  // A line for all processes.
  JsonObject DoAll(const char* what) {
    doing_ = what;
    return JsonObject().Text("do", what);
  }

  // A line for the process whose turn it is.
  JsonObject Do(const char* what) { return OfShare(what, turn_++ % outputs_.size()); }

  JsonObject OfRank(const char* what, uint32_t rank) {
    return OfShare(what, Share(rank)).Number("rank", rank);
  }

  JsonObject OfShare(const char* what, size_t share) {
    share_ = share;
    JsonObject line = DoAll(what);
    if (outputs_.size() > 1) line.Number("share", static_cast<int64_t>(share));
    return line;
  }

  size_t Share(uint32_t rank) const { return rank % outputs_.size(); }

  void Write(JsonObject line, int32_t status) {
    ++counts_[{doing_, status}];
    if (status != FRUGAL_OK) line.Text("status", StatusName(status));
    script_ << line.str() << '\n';
  }

  static const char* StatusName(int32_t status) {
    switch (status) {
      case FRUGAL_ERR_INVALID_ARGUMENT:
        return "FRUGAL_ERR_INVALID_ARGUMENT";
      case FRUGAL_ERR_BAD_HANDLE:
        return "FRUGAL_ERR_BAD_HANDLE";
      case FRUGAL_ERR_KEY_OUT_OF_RANGE:
        return "FRUGAL_ERR_KEY_OUT_OF_RANGE";
      case FRUGAL_ERR_TABLE_FULL:
        return "FRUGAL_ERR_TABLE_FULL";
      case FRUGAL_ERR_EXISTS:
        return "FRUGAL_ERR_EXISTS";
      case FRUGAL_ERR_STEP_ORDER:
        return "FRUGAL_ERR_STEP_ORDER";
      case FRUGAL_ERR_STEP_RANGE:
        return "FRUGAL_ERR_STEP_RANGE";
      case FRUGAL_ERR_NOT_IN_STEP:
        return "FRUGAL_ERR_NOT_IN_STEP";
      case FRUGAL_ERR_STEP_ABORTED:
        return "FRUGAL_ERR_STEP_ABORTED";
      case FRUGAL_ERR_BUSY:
        return "FRUGAL_ERR_BUSY";
      case FRUGAL_ERR_TIMEOUT:
        return "FRUGAL_ERR_TIMEOUT";
      case FRUGAL_ERR_NAN:
        return "FRUGAL_ERR_NAN";
      default:
        std::abort();
    }
  }

  static JsonObject OptimizerObject(const frugal_optimizer& o) {
    const frugal_optimizer unset = FRUGAL_OPTIMIZER_INIT;
    JsonObject json;
    json.Number("kind", o.kind);
    auto add = [&](const char* name, float frugal_optimizer::*field) {
      if (o.*field != unset.*field) json.Float(name, o.*field);
    };
    add("lr", &frugal_optimizer::lr);
    add("eps", &frugal_optimizer::eps);
    add("momentum", &frugal_optimizer::momentum);
    add("dampening", &frugal_optimizer::dampening);
    add("beta1", &frugal_optimizer::beta1);
    add("beta2", &frugal_optimizer::beta2);
    add("rho", &frugal_optimizer::rho);
    add("ftrl_lambda1", &frugal_optimizer::ftrl_lambda1);
    add("ftrl_lambda2", &frugal_optimizer::ftrl_lambda2);
    add("ftrl_beta", &frugal_optimizer::ftrl_beta);
    add("initial_accumulator", &frugal_optimizer::initial_accumulator);
    add("weight_decay_l2", &frugal_optimizer::weight_decay_l2);
    add("weight_decay", &frugal_optimizer::weight_decay);
    add("clip_value", &frugal_optimizer::clip_value);
    add("clip_norm", &frugal_optimizer::clip_norm);
    add("weight_bound", &frugal_optimizer::weight_bound);
    add("grad_scale", &frugal_optimizer::grad_scale);
    if (o.flags != 0) json.Number("flags", o.flags);
    return json;
  }

  static JsonObject OpObject(const Op& op) {
    JsonObject json;
    json.Number("table", static_cast<int64_t>(op.part.table));
    if (op.batch >= 0) json.Number("batch", op.batch);
    if (op.number > 0) json.Number("part", static_cast<int64_t>(op.number));
    if (!op.keys_null) json.Bigs("keys", op.part.keys);
    if (op.part.padded) json.Big("padding_key", op.part.padding_key);
    if (op.pooling != FRUGAL_POOL_NONE) {
      json.Number("pooling", op.pooling).Numbers("offsets", op.offsets);
    }
    if (!op.weights.empty()) json.Floats("weights", op.weights);
    if (op.weight_grads) json.True("weight_grads");
    if (!op.grads.empty()) json.Floats("grads", op.grads);
    return json;
  }

  static std::vector<JsonObject> OpObjects(const std::vector<Op>& ops) {
    std::vector<JsonObject> objects;
    for (const Op& op : ops) objects.push_back(OpObject(op));
    return objects;
  }

  // --- Engine, tables, ranks ---------------------------------------------------------------------

  void Open() {
    Write(EngineLine("open"), FRUGAL_OK);
    // The last needs all of its 64 bits.
    first_step_ = random_.OneOf<uint64_t>(
        {0, 0, random_.Between(1, 5000), (uint64_t{1} << 40) - 7, (uint64_t{1} << 62) + 3});
  }

  void Resume() {
    Write(EngineLine("resume"), FRUGAL_OK);
    for (uint32_t r = 0; r < ranks_.size(); ++r) Join(r);
  }

  JsonObject EngineLine(const char* what) {
    lookahead_ = static_cast<uint32_t>(random_.Between(2, 10));
    JsonObject line = DoAll(what);
    line.Number("world_size", static_cast<int64_t>(ranks_.size())).Number("lookahead", lookahead_);
    line.Number("flush_threads", static_cast<int64_t>(random_.Below(3)));
    line.Number("flush_mode", random_.OneOf<int32_t>({FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_DEFERRED,
                                                      FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_TREE_HEAP,
                                                      FRUGAL_FLUSH_AUTO, FRUGAL_FLUSH_AT_ONCE,
                                                      FRUGAL_FLUSH_WRITE_THROUGH}));
    if (random_.Chance(0.3)) line.Big("pending_bytes", random_.OneOf<uint64_t>({0, 4096}));
    line.Big("seed", EngineSeed(seed_));
    return line;
  }

  void MakeTables() {
    const size_t count = steps_ < 100 ? 4 + random_.Below(4) : 8;
    for (size_t t = 0; t < count; ++t) {
      Table table;
      table.name = "table " + std::to_string(t) + (random_.Chance(0.3) ? " \xc3\xa9" : "");
      frugal_table_config& config = table.config;
      config.key_space = t % 2 == 0 ? FRUGAL_DENSE : FRUGAL_HASHED;
      config.dim = random_.OneOf<uint32_t>({1, 2, 3, 4, 8, 8, 16, 17, 33});
      const size_t keys = random_.Between(5, 60);
      config.rows = keys;
      table.reserving_paused = t == 3;
      if (config.key_space == FRUGAL_DENSE) {
        for (uint64_t key = 0; key < keys; ++key) table.universe.push_back(key);
        if (random_.Chance(0.3)) config.flags = FRUGAL_TABLE_LAZY;
      } else {
        std::set<uint64_t> drawn = {0, UINT64_MAX};
        while (drawn.size() < keys) drawn.insert(random_.Next());
        table.universe.assign(drawn.begin(), drawn.end());
        if (table.reserving_paused) config.rows = (keys + 1) / 2;
      }
      random_.Shuffle(&table.universe);
      config.init = static_cast<int32_t>(random_.Below(5));
      config.init_a = random_.Float(-0.5f, 0.5f);
      config.init_b = random_.Float(0.1f, 1);
      if (config.init == FRUGAL_INIT_XAVIER) config.init_a = std::abs(config.init_a);
      if (config.init == FRUGAL_INIT_UNIFORM && config.init_a > config.init_b)
        std::swap(config.init_a, config.init_b);
      config.nan_policy = static_cast<int32_t>(random_.Weighted({60, 20, 20}));
      const int32_t kind = static_cast<int32_t>((seed_ + t) % 7);  // all of them, over few scripts
      config.optimizer = DrawOptimizer(kind, random_.Chance(0.5) ? 0.0f : random_.Float(0, 1));
      frugal_table_config named = config;
      named.name = table.name.c_str();
      reference_.AddTable(named);  // copies the name, too
      Write(TableLine(t, table), FRUGAL_OK);
      tables_.push_back(std::move(table));
    }
    Write(TableLine(count, tables_[random_.Below(count)]), FRUGAL_ERR_EXISTS);
  }

  JsonObject TableLine(size_t number, const Table& table) {
    const frugal_table_config& c = table.config;
    JsonObject line = DoAll("table");
    line.Number("table", static_cast<int64_t>(number)).Text("name", table.name);
    line.Number("key_space", c.key_space).Big("rows", c.rows).Number("dim", c.dim);
    line.Number("init", c.init).Float("init_a", c.init_a).Float("init_b", c.init_b);
    if (c.nan_policy != 0) line.Number("nan_policy", c.nan_policy);
    if (c.flags != 0) line.Number("flags", c.flags);
    line.Object("optimizer", OptimizerObject(c.optimizer));
    return line;
  }

  frugal_optimizer DrawOptimizer(int32_t kind, float accumulator) {
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = kind;
    o.initial_accumulator = accumulator;
    o.lr = random_.Float(0.005f, 0.2f);
    o.eps = random_.OneOf<float>({1e-8f, 1e-6f, 1e-3f});
    o.momentum = random_.Float(0.3f, 0.95f);
    if (random_.Chance(0.5)) o.dampening = random_.Float(0, 0.5f);
    o.beta1 = random_.Float(0.5f, 0.95f);
    o.beta2 = random_.Float(0.9f, 0.999f);
    o.rho = random_.Float(0.8f, 0.99f);
    if (random_.Chance(0.5)) o.ftrl_lambda1 = random_.Float(0, 0.1f);
    if (random_.Chance(0.5)) o.ftrl_lambda2 = random_.Float(0, 0.1f);
    o.ftrl_beta = random_.Float(0.5f, 1.5f);
    if (random_.Chance(0.2)) o.weight_decay_l2 = random_.Float(0, 0.05f);
    if (random_.Chance(0.2)) o.weight_decay = random_.Float(0, 0.05f);
    if (random_.Chance(0.2)) o.clip_value = random_.Float(0.1f, 1);
    if (random_.Chance(0.2)) o.clip_norm = random_.Float(0.1f, 2);
    if (random_.Chance(0.2)) o.weight_bound = random_.Float(0.5f, 2);
    if (random_.Chance(0.3)) o.grad_scale = random_.Float(0.1f, 2);
    // Each of these flags matters to one kind of optimizer.
    if (random_.Chance(0.5)) o.flags |= FRUGAL_OPT_NESTEROV | FRUGAL_OPT_NO_BIAS_CORRECTION;
    if (random_.Chance(0.3)) o.flags |= FRUGAL_OPT_MEAN_RANKS;
    return o;
  }

  void Join(uint32_t r) {
    JsonObject line = OfRank("trainer", r);
    if (random_.Chance(0.6)) {
      line.Float("cache_ratio", random_.Chance(0.3) ? 1.0f : random_.Float(0, 0.5f));
    }
    Write(line, FRUGAL_OK);
    Rank& rank = ranks_[r];
    rank = Rank();
    rank.open = true;
    rank.window = static_cast<uint32_t>(random_.Below(lookahead_ + 1));
    rank.declared_until = index_ == 0 ? first_step_ : step_;
    Write(OfRank("trainer", r), FRUGAL_ERR_EXISTS);
  }

  // Between steps, or inside one. Inside a step, the step is undone and begun again without this
  // rank.
  void Leave(uint32_t r) {
    Write(OfRank("close_trainer", r), FRUGAL_OK);
    ranks_[r].open = false;
  }

  size_t Present() const {
    return static_cast<size_t>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.open; }));
  }

  // --- Keys and ops ------------------------------------------------------------------------------

  // Few keys are frequent, so they come again while their updates are pending.
  uint64_t DrawKey(size_t t) {
    const std::vector<uint64_t>& universe = tables_[t].universe;
    const double u = random_.Unit();
    return universe[static_cast<size_t>(u * u * static_cast<double>(universe.size()))];
  }

  Part DrawPart(bool declared) {
    Part part;
    do {
      part.table = random_.Below(tables_.size());
    } while (declared && tables_[part.table].reserving_paused);
    const uint32_t dim = tables_[part.table].config.dim;
    size_t count = random_.Between(1, dim <= 8 ? 14 : 6);
    double hot = 0;
    switch (random_.Weighted({5, 80, 12, dim <= 2 ? 1 : 0})) {
      case 0:
        count = 0;
        break;
      case 1:
        break;
      case 2:  // more than one run of fold32
        count = dim <= 4 ? random_.Between(30, 90) : count;
        hot = 0.9;
        break;
      default:  // and several levels of fold32
        count = random_.Between(1000, 1200);
        hot = 0.95;
    }
    const uint64_t hot_key = DrawKey(part.table);
    for (size_t i = 0; i < count; ++i) {
      part.keys.push_back(random_.Chance(hot) ? hot_key : DrawKey(part.table));
    }
    if (random_.Chance(0.2)) {
      part.padded = true;
      // Frameworks pad with -1, which is no id of a dense table.
      part.padding_key = part.keys.empty() || random_.Chance(0.4) ? UINT64_MAX : part.keys[0];
      for (uint64_t& key : part.keys) {
        if (random_.Chance(0.15)) key = part.padding_key;
      }
    }
    return part;
  }

  // An op with some keys; mostly declared ones, if there are any.
  Op DrawOp(uint32_t r, Use use) {
    Op op;
    std::vector<Declaration>* declared = nullptr;
    if (use == Use::kLookup || use == Use::kPush) {
      const auto found = ranks_[r].declared.find(step_);
      if (found != ranks_[r].declared.end() && !found->second.empty()) declared = &found->second;
    }
    if (declared != nullptr && random_.Chance(0.85)) {
      const Declaration& declaration = (*declared)[random_.Below(declared->size())];
      const size_t number = random_.Below(declaration.parts.size());
      op.part = declaration.parts[number];
      switch (random_.Weighted({50, 15, 15, 10, 10})) {
        case 0:  // exactly what was declared
          op.keys_null = true;
          [[fallthrough]];
        case 1:
          op.batch = declaration.batch;
          op.number = number;
          break;
        case 2:
          op.batch = declaration.batch;
          op.number = number;
          [[fallthrough]];
        case 3:  // some of them, in another order
          random_.Shuffle(&op.part.keys);
          op.part.keys.resize(random_.Below(op.part.keys.size() + 1));
          break;
        default:  // found by its keys
          break;
      }
    } else {
      op.part = DrawPart(/*declared=*/false);
    }
    if (random_.Chance(0.4)) DrawBags(use == Use::kPush, &op);
    if (use == Use::kPush) DrawGrads(&op);
    return op;
  }

  void DrawBags(bool push, Op* op) {
    op->pooling = random_.Chance(0.6) ? FRUGAL_POOL_SUM : FRUGAL_POOL_MEAN;
    op->offsets = {0};
    const size_t longest = random_.OneOf<size_t>({2, 5, 2000});
    const size_t count = op->part.keys.size();
    while (op->offsets.back() < count) {
      const uint64_t size = random_.Chance(0.15) ? 0 : random_.Between(1, longest);
      op->offsets.push_back(std::min<uint64_t>(op->offsets.back() + size, count));
    }
    if (random_.Chance(0.2)) op->offsets.push_back(count);
    if (op->pooling == FRUGAL_POOL_SUM && count > 0 && random_.Chance(0.6)) {
      for (size_t i = 0; i < count; ++i) op->weights.push_back(random_.Float(-2, 2));
      // Where NaNs are accepted, the bits of a product's NaN depend on the machine.
      op->weight_grads = push && random_.Chance(0.6) &&
                         tables_[op->part.table].config.nan_policy == FRUGAL_NAN_REJECT;
    }
  }

  void DrawGrads(Op* op) {
    const frugal_table_config& config = tables_[op->part.table].config;
    op->grads.resize(op->rows() * config.dim);
    const size_t kind = random_.Weighted({70, 15, 5, 10});
    for (float& g : op->grads) {
      g = random_.Float(-1, 1);
      if (kind == 1) g = g * static_cast<float>(uint64_t{1} << random_.Below(12)) * 0x1p-10f;
      if (kind == 2) g = g * 0x1p-120f * (random_.Chance(0.5) ? 0x1p-10f : 1.0f);  // denormals too
      if (kind == 3 && random_.Chance(0.7)) g = random_.Chance(0.5) ? 0.0f : -0.0f;
    }
    if (config.nan_policy != FRUGAL_NAN_REJECT && !op->grads.empty() && random_.Chance(0.15)) {
      op->grads[random_.Below(op->grads.size())] =
          random_.OneOf<float>({__builtin_nanf("7"), -__builtin_nanf("9"), __builtin_inff()});
    }
  }

  // Whether a call that creates missing rows has room for them.
  bool HasRoom(const std::vector<Op>& ops) const {
    std::map<size_t, std::set<uint64_t>> fresh;
    for (const Op& op : ops) {
      const size_t t = op.part.table;
      if (!tables_[t].reserving_paused) continue;
      for (size_t i = 0; i < op.part.keys.size(); ++i) {
        std::vector<float> row;
        if (!op.IsPadding(i) && !reference_.Get(t, op.part.keys[i], &row)) {
          fresh[t].insert(op.part.keys[i]);
        }
      }
    }
    for (const auto& [t, keys] : fresh) {
      if (!keys.empty() && reference_.Keys(t).size() + keys.size() > tables_[t].config.rows) {
        return false;
      }
    }
    return true;
  }

  // A dense table, and an id that is out of its range.
  std::pair<size_t, uint64_t> DrawBadKey() {
    const size_t t = random_.Below((tables_.size() + 1) / 2) * 2;
    const uint64_t rows = tables_[t].config.rows;
    return {t, random_.OneOf<uint64_t>({rows, uint64_t{1} << 32, UINT64_MAX})};
  }

  // Ops of which the last has a bad id. The call must not apply the others.
  std::vector<Op> DrawBadOps(uint32_t r, Use use) {
    std::vector<Op> ops;
    if (use != Use::kDeclare) ops.push_back(DrawOp(r, use));
    Op bad;
    const auto [t, key] = DrawBadKey();
    bad.part.table = t;
    bad.part.keys = {0, key};
    if (use == Use::kPush) DrawGrads(&bad);
    ops.push_back(std::move(bad));
    return HasRoom(ops) ? ops : std::vector<Op>{ops.back()};
  }

  // --- Calls of a rank ---------------------------------------------------------------------------

  void Prefetch(uint32_t r, uint64_t step, int32_t status = FRUGAL_OK) {
    Declaration declaration;
    declaration.batch = next_batch_++;
    std::vector<Op> ops;
    for (uint64_t n = random_.Between(1, 3); n > 0; --n) {
      declaration.parts.push_back(DrawPart(/*declared=*/true));
      Op op;
      op.part = declaration.parts.back();
      ops.push_back(std::move(op));
    }
    if (status == FRUGAL_ERR_KEY_OUT_OF_RANGE) ops.push_back(DrawBadOps(r, Use::kDeclare)[0]);
    JsonObject line = OfRank("prefetch", r);
    line.Big("step", step).Number("batch", declaration.batch).Objects("ops", OpObjects(ops));
    Write(line, status);
    if (status == FRUGAL_OK) ranks_[r].declared[step].push_back(std::move(declaration));
  }

  // Declares up to the window's end. Some steps are declared later, or never.
  void DeclareAhead(uint32_t r) {
    Rank& rank = ranks_[r];
    if (rank.window == 0 && random_.Chance(0.9)) return;
    const uint64_t first = step_ + (rank.phase == Rank::kBefore ? 0 : 1);
    if (rank.declared_until < first) rank.declared_until = first;
    for (; rank.declared_until <= step_ + rank.window; ++rank.declared_until) {
      // The last steps of a script have no declarations, as in training.
      if (rank.declared_until >= first_step_ + steps_) return;
      if (!random_.Chance(0.1)) Prefetch(r, rank.declared_until);
    }
    if (first <= step_ + rank.window && random_.Chance(0.2)) {  // late, or another batch
      Prefetch(r, random_.Between(first, step_ + rank.window));
    }
  }

  void Cancel(uint32_t r, bool late) {
    Rank& rank = ranks_[r];
    const uint64_t first = late ? step_ : step_ + (rank.phase == Rank::kBefore ? 0 : 1);
    for (auto& [step, declarations] : rank.declared) {
      if (step < first || declarations.empty() || (!late && random_.Chance(0.5))) continue;
      if (late && step > step_) return;
      const size_t which = random_.Below(declarations.size());
      JsonObject line = OfRank("cancel", r);
      line.Number("batch", declarations[which].batch);
      Write(line, late ? FRUGAL_ERR_STEP_RANGE : FRUGAL_OK);
      if (!late) declarations.erase(declarations.begin() + static_cast<ptrdiff_t>(which));
      return;
    }
  }

  void Lookup(uint32_t r, int32_t status = FRUGAL_OK) {
    std::vector<Op> ops;
    if (status == FRUGAL_ERR_KEY_OUT_OF_RANGE) {
      ops = DrawBadOps(r, Use::kLookup);
    } else {
      for (uint64_t n = random_.Between(1, 3); n > 0; --n) ops.push_back(DrawOp(r, Use::kLookup));
    }
    if (status == FRUGAL_ERR_BAD_HANDLE) {
      ops[0] = Op();
      ops[0].batch = dead_[Share(r)].batch;
      ops[0].part = dead_[Share(r)].parts[0];
      ops[0].keys_null = true;
    }
    if (status == FRUGAL_OK && !HasRoom(ops)) status = FRUGAL_ERR_TABLE_FULL;
    JsonObject line = OfRank("lookup", r);
    line.Objects("ops", OpObjects(ops));
    Write(line, status);
    if (status != FRUGAL_OK) return;
    for (const Op& op : ops) reference_.Create(step_, op.ForReference());
    for (const Op& op : ops) {
      std::vector<float> rows(op.rows() * tables_[op.part.table].config.dim);
      reference_.Lookup(step_, op.ForReference(), rows.data());
      outputs_[share_].Add(rows);
    }
  }

  void Push(uint32_t r, int32_t status = FRUGAL_OK) {
    std::vector<Op> ops;
    if (status == FRUGAL_ERR_KEY_OUT_OF_RANGE) {
      ops = DrawBadOps(r, Use::kPush);
    } else {
      for (uint64_t n = random_.Between(1, 3); n > 0; --n) ops.push_back(DrawOp(r, Use::kPush));
    }
    if (status == FRUGAL_ERR_NAN && !Poison(&ops)) status = FRUGAL_OK;
    if (status == FRUGAL_OK && !HasRoom(ops)) status = FRUGAL_ERR_TABLE_FULL;
    JsonObject line = OfRank("push", r);
    line.Objects("ops", OpObjects(ops));
    Write(line, status);
    if (status != FRUGAL_OK) return;
    std::vector<frugal_reference::Op> for_reference;
    for (const Op& op : ops) for_reference.push_back(op.ForReference());
    if (reference_.Push(r, step_, for_reference) != FRUGAL_OK) std::abort();
    for (const Op& op : ops) {
      if (!op.weight_grads) continue;
      std::vector<float> grads(op.part.keys.size());
      reference_.WeightGrads(step_, op.ForReference(), grads.data());
      outputs_[share_].Add(grads);
    }
  }

  // A NaN in the gradient of some key of a table that rejects it; false if there is no such key.
  bool Poison(std::vector<Op>* ops) {
    if (!HasRoom(*ops)) return false;
    for (Op& op : *ops) {
      const frugal_table_config& config = tables_[op.part.table].config;
      if (config.nan_policy != FRUGAL_NAN_REJECT) continue;
      for (size_t row = 0; row < op.rows(); ++row) {
        const bool pooled = op.pooling != FRUGAL_POOL_NONE;
        const size_t end = pooled ? op.offsets[row + 1] : row + 1;
        for (size_t i = pooled ? op.offsets[row] : row; i < end; ++i) {
          if (op.IsPadding(i)) continue;
          op.grads[row * config.dim + random_.Below(config.dim)] = __builtin_nanf("3");
          return true;
        }
      }
    }
    return false;
  }

  // `r` -1: without a trainer, which is allowed only between steps.
  void Read(int r, int32_t status = FRUGAL_OK) {
    std::vector<Op> ops;
    for (uint64_t n = random_.Between(1, 2); n > 0; --n) ops.push_back(DrawOp(0, Use::kRead));
    if (status == FRUGAL_ERR_KEY_OUT_OF_RANGE) ops = DrawBadOps(0, Use::kRead);
    JsonObject line = r >= 0 ? OfRank("read", static_cast<uint32_t>(r)) : Do("read");
    line.Objects("ops", OpObjects(ops));
    Write(line, status);
    if (status != FRUGAL_OK) return;
    for (const Op& op : ops) ReadOp(op);
  }

  // A missing key reads as zeros, and counts as a key of its bag.
  void ReadOp(const Op& op) {
    const size_t t = op.part.table, dim = tables_[t].config.dim;
    std::vector<std::vector<float>> terms;
    for (size_t i = 0; i < op.part.keys.size(); ++i) {
      std::vector<float> row;
      const bool found = !op.IsPadding(i) && reference_.Get(t, op.part.keys[i], &row);
      const unsigned char byte = found ? 1 : 0;
      outputs_[share_].Add(&byte, 1);
      row = found ? reference_.RowAt(t, op.part.keys[i], step_) : std::vector<float>();
      row.resize(dim);
      terms.push_back(std::move(row));
    }
    if (op.pooling == FRUGAL_POOL_NONE) {
      for (const std::vector<float>& row : terms) outputs_[share_].Add(row);
      return;
    }
    for (size_t bag = 0; bag + 1 < op.offsets.size(); ++bag) {
      std::vector<std::vector<float>> kept;
      for (size_t i = op.offsets[bag]; i < op.offsets[bag + 1]; ++i) {
        if (op.IsPadding(i)) continue;
        kept.push_back(terms[i]);
        for (float& x : kept.back()) {
          if (!op.weights.empty()) x = op.weights[i] * x;
        }
      }
      std::vector<float> sum = frugal_reference::Fold32(kept);
      sum.resize(dim);
      for (float& x : sum) {
        if (op.pooling == FRUGAL_POOL_MEAN && !kept.empty()) {
          x = x / static_cast<float>(kept.size());
        }
        x = frugal_reference::Canonical(x);
      }
      outputs_[share_].Add(sum);
    }
  }

  void Begin(uint32_t r, uint64_t step, int32_t status, int64_t timeout_ms = -1) {
    JsonObject line = OfRank("begin", r);
    line.Big("step", step);
    if (timeout_ms >= 0) line.Number("timeout_ms", timeout_ms);
    Write(line, status);
  }

  void End(uint32_t r, uint64_t step, uint32_t flags, int32_t status) {
    JsonObject line = OfRank("end", r);
    line.Big("step", step);
    if (flags != 0) line.Number("flags", flags);
    Write(line, status);
  }

  void SetOptimizer(size_t t, uint64_t first_step, int32_t status = FRUGAL_OK) {
    const frugal_optimizer& first = tables_[t].config.optimizer;
    frugal_optimizer o = DrawOptimizer(first.kind, first.initial_accumulator);
    if (status == FRUGAL_ERR_INVALID_ARGUMENT) o.lr = -o.lr;
    JsonObject line = Do("set_optimizer");
    line.Number("table", static_cast<int64_t>(t)).Big("first_step", first_step);
    line.Object("optimizer", OptimizerObject(o));
    Write(line, status);
    if (status == FRUGAL_OK) reference_.SetOptimizer(t, first_step, o);
  }

  // --- A step ------------------------------------------------------------------------------------

  // Returns false if it was undone.
  bool Attempt() {
    for (Rank& rank : ranks_) rank.phase = Rank::kBefore;
    bool skip = false;
    // The rate of one table changes in each step, the others' now and then.
    SetOptimizer(step_ % tables_.size(), step_);
    for (;;) {
      std::vector<uint32_t> going, ended;
      for (uint32_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].open) (ranks_[r].phase == Rank::kEnded ? ended : going).push_back(r);
      }
      if (going.empty()) break;
      if (!ended.empty() && random_.Chance(0.3)) {
        AfterEnd(ended[random_.Below(ended.size())]);
        continue;
      }
      const uint32_t r = going[random_.Below(going.size())];
      Rank& rank = ranks_[r];
      if (rank.phase == Rank::kBefore) {
        BeforeBegin(r);
        if (Present() >= 2 && random_.Chance(0.01)) {
          Leave(r);
          continue;
        }
        Begin(r, step_, FRUGAL_OK);
        rank.phase = Rank::kInside;
        rank.calls_left = random_.Chance(0.08) ? 0 : static_cast<int>(random_.Between(1, 5));
      } else if (rank.calls_left-- > 0) {
        if (random_.Chance(0.015)) {
          Abort(r);
          return false;
        }
        Inside(r);
      } else {
        if (random_.Chance(0.1)) {
          End(r, step_ + 1, 0, FRUGAL_ERR_STEP_ORDER);
        }
        const bool skips = random_.Chance(0.03);
        skip |= skips;
        End(r, step_, skips ? FRUGAL_STEP_SKIP : 0, FRUGAL_OK);
        rank.phase = Rank::kEnded;
        if (Present() >= 2 && random_.Chance(0.01)) Leave(r);  // its gradients count
      }
    }
    reference_.Commit(step_, skip);
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      const auto found = rank.declared.find(step_);
      if (found == rank.declared.end()) continue;
      if (!found->second.empty()) dead_[Share(r)] = found->second[0];
      rank.declared.erase(found);
    }
    return true;
  }

  void BeforeBegin(uint32_t r) {
    if (random_.Chance(0.7)) DeclareAhead(r);
    if (random_.Chance(0.08)) Cancel(r, /*late=*/false);
    if (random_.Chance(0.05)) Read(static_cast<int>(r));
    if (index_ == 0) return;  // before its first step no order binds a rank
    switch (random_.Below(40)) {
      case 0:
        return Begin(r, step_ + 1, FRUGAL_ERR_STEP_ORDER);
      case 1:
        return Begin(r, step_ - 1, FRUGAL_ERR_STEP_ORDER);
      case 2:
        return Lookup(r, FRUGAL_ERR_NOT_IN_STEP);
      case 3:
        return Push(r, FRUGAL_ERR_NOT_IN_STEP);
      case 4:
        return End(r, step_, 0, FRUGAL_ERR_NOT_IN_STEP);
      case 5:
        return Write(OfRank("abort", r), FRUGAL_ERR_NOT_IN_STEP);
      default:
        return;
    }
  }

  void Inside(uint32_t r) {
    if (random_.Chance(0.3)) DeclareAhead(r);
    if (random_.Chance(0.15)) {
      // For this step or a later one; also for steps that have been declared already.
      // A variable fixes the order of the two draws; of arguments the compiler chooses the order.
      const uint64_t first_step = step_ + random_.Below(4);
      SetOptimizer(random_.Below(tables_.size()), first_step);
    }
    if (random_.Chance(0.2)) Probe(r);
    switch (random_.Weighted({46, 46, 8})) {
      case 0:
        return Lookup(r);
      case 1:
        return Push(r);
      default:
        return Read(static_cast<int>(r));
    }
  }

  // A call that is refused and changes nothing.
  void Probe(uint32_t r) {
    const size_t t = random_.Below(tables_.size());
    switch (random_.Below(17)) {
      case 0:
        return Lookup(r, FRUGAL_ERR_KEY_OUT_OF_RANGE);
      case 1:
        return Push(r, FRUGAL_ERR_KEY_OUT_OF_RANGE);
      case 2:
      case 3:
        return Push(r, FRUGAL_ERR_NAN);
      case 4:
        if (dead_[Share(r)].batch >= 0) Lookup(r, FRUGAL_ERR_BAD_HANDLE);
        return;
      case 5:
        return Begin(r, step_, FRUGAL_ERR_STEP_ORDER);
      case 6:
        return Prefetch(r, step_, FRUGAL_ERR_STEP_RANGE);
      case 7:
        return Prefetch(r, step_ + lookahead_ + 2, FRUGAL_ERR_STEP_RANGE);
      case 8:
        return Prefetch(r, step_ + 1, FRUGAL_ERR_KEY_OUT_OF_RANGE);
      case 9:
        return Cancel(r, /*late=*/true);
      case 10:
        if (index_ > 0) SetOptimizer(t, step_ - 1, FRUGAL_ERR_STEP_RANGE);
        return;
      case 11:
        return SetOptimizer(t, step_, FRUGAL_ERR_INVALID_ARGUMENT);
      case 12:
        return Get(t, FRUGAL_ERR_BUSY);
      case 13:
        return Put(t, FRUGAL_ERR_BUSY);
      case 14:
        return Delete(t, FRUGAL_ERR_BUSY);
      case 15:
        return Read(-1, FRUGAL_ERR_BUSY);
      default:
        for (uint32_t gone = 0; gone < ranks_.size(); ++gone) {
          if (!ranks_[gone].open) return Write(OfRank("trainer", gone), FRUGAL_ERR_BUSY);
        }
    }
  }

  // While other ranks are still in this step.
  void AfterEnd(uint32_t r) {
    switch (random_.Below(4)) {
      case 0:
      case 1:
        return Begin(r, step_ + 1, FRUGAL_ERR_TIMEOUT, random_.OneOf<int64_t>({0, 0, 3}));
      case 2:
        return DeclareAhead(r);
      default:
        return Lookup(r, FRUGAL_ERR_NOT_IN_STEP);
    }
  }

  // Aborts by a call, or by closing the trainer. Each other rank's next call returns the abort.
  void Abort(uint32_t r) {
    const bool leaves = Present() >= 2 && random_.Chance(0.3);
    if (leaves) {
      Leave(r);
    } else {
      Write(OfRank("abort", r), FRUGAL_OK);
    }
    reference_.Abort();
    for (Rank& rank : ranks_) rank.phase = Rank::kBefore;
    for (uint32_t other = 0; other < ranks_.size(); ++other) {
      if (other == r || !ranks_[other].open) continue;
      switch (random_.Below(6)) {
        case 0:
          Begin(other, step_, FRUGAL_ERR_STEP_ABORTED);
          break;
        case 1:
          Lookup(other, FRUGAL_ERR_STEP_ABORTED);
          break;
        case 2:
          Push(other, FRUGAL_ERR_STEP_ABORTED);
          break;
        case 3:
          End(other, step_, 0, FRUGAL_ERR_STEP_ABORTED);
          break;
        case 4:
          Write(OfRank("abort", other), FRUGAL_ERR_STEP_ABORTED);
          break;
        default:
          Prefetch(other, step_ + 1, FRUGAL_ERR_STEP_ABORTED);
      }
    }
  }

  // --- Between steps -----------------------------------------------------------------------------

  void Boundary() {
    for (Rank& rank : ranks_) rank.phase = Rank::kBefore;
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].open && random_.Chance(0.4)) Join(r);
    }
    if (resumes_ && index_ > 0 && Present() == ranks_.size() && random_.Chance(0.1)) Resume();
    if (random_.Chance(steps_ < 100 ? 0.3 : 0.06)) Hash();
    if (!random_.Chance(0.3)) return;
    for (uint64_t n = random_.Between(1, 5); n > 0; --n) {
      const size_t t = random_.Below(tables_.size());
      switch (random_.Weighted({30, 25, 15, 15, 10, 5})) {
        case 0:
          Get(t);
          break;
        case 1:
          Put(t);
          break;
        case 2:
          Delete(t);
          break;
        case 3:
          Read(-1, random_.Chance(0.1) ? FRUGAL_ERR_KEY_OUT_OF_RANGE : FRUGAL_OK);
          break;
        case 4:
          Write(Do("flush"), FRUGAL_OK);
          break;
        default: {
          const size_t dense = DrawBadKey().first;
          if (random_.Chance(0.5)) {
            Get(dense, FRUGAL_ERR_KEY_OUT_OF_RANGE);
          } else {
            Delete(dense, FRUGAL_ERR_KEY_OUT_OF_RANGE);
          }
        }
      }
    }
  }

  std::vector<uint64_t> DrawKeys(size_t t, int32_t status) {
    std::vector<uint64_t> keys;
    for (uint64_t n = random_.Below(12); n > 0; --n) keys.push_back(DrawKey(t));
    if (status == FRUGAL_ERR_KEY_OUT_OF_RANGE) keys.push_back(tables_[t].config.rows);
    return keys;
  }

  JsonObject OfKeys(const char* what, size_t t, const std::vector<uint64_t>& keys) {
    return Do(what).Number("table", static_cast<int64_t>(t)).Bigs("keys", keys);
  }

  void Get(size_t t, int32_t status = FRUGAL_OK) {
    const std::vector<uint64_t> keys = DrawKeys(t, status);
    const bool state = random_.Chance(0.5);
    JsonObject line = OfKeys("get", t, keys);
    if (state) line.Number("flags", FRUGAL_WITH_STATE);
    Write(line, status);
    if (status != FRUGAL_OK) return;
    std::vector<float> rows;
    for (uint64_t key : keys) {
      std::vector<float> row;
      const unsigned char found = reference_.Get(t, key, &row) ? 1 : 0;
      outputs_[share_].Add(&found, 1);
      if (!found) continue;
      rows.insert(rows.end(), row.begin(),
                  state ? row.end() : row.begin() + static_cast<ptrdiff_t>(tables_[t].config.dim));
    }
    outputs_[share_].Add(rows);
  }

  void Put(size_t t, int32_t status = FRUGAL_OK) {
    const std::vector<uint64_t> keys = DrawKeys(t, status);
    const bool state = random_.Chance(0.5);
    const size_t floats = reference_.dim(t) + (state ? reference_.state_floats(t) : 0);
    std::vector<float> rows(keys.size() * floats);
    // An accumulator is never negative.
    for (float& x : rows) x = random_.Float(state ? 0.0f : -1.0f, 1);
    if (status == FRUGAL_OK) {
      Op op;
      op.part.table = t;
      op.part.keys = keys;
      if (!HasRoom({op})) status = FRUGAL_ERR_TABLE_FULL;
    }
    JsonObject line = OfKeys("put", t, keys);
    if (state) line.Number("flags", FRUGAL_WITH_STATE);
    line.Floats("rows", rows);
    Write(line, status);
    if (status != FRUGAL_OK) return;
    for (size_t i = 0; i < keys.size(); ++i) {
      reference_.Put(t, step_, keys[i], state, rows.data() + i * floats);
    }
  }

  void Delete(size_t t, int32_t status = FRUGAL_OK) {
    const std::vector<uint64_t> keys = DrawKeys(t, status);
    Write(OfKeys("delete", t, keys), status);
    if (status != FRUGAL_OK) return;
    for (uint64_t key : keys) reference_.Delete(t, step_, key);
  }

  void Hash() {
    Fnv tables;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const std::vector<uint64_t> keys = reference_.Keys(t);
      tables.Add(keys.size());
      for (uint64_t key : keys) {
        std::vector<float> row;
        reference_.Get(t, key, &row);
        tables.Add(key);
        tables.Add(row);
      }
    }
    Write(DoAll("hash"), FRUGAL_OK);
    for (size_t i = 0; i < expected_.size(); ++i) {
      char line[64];
      std::snprintf(line, sizeof(line), "hash %zu %016llx %016llx\n", hashes_,
                    static_cast<unsigned long long>(outputs_[i].value()),
                    static_cast<unsigned long long>(tables.value()));
      expected_[i] << line;
    }
    ++hashes_;
  }

  const uint64_t seed_;
  const size_t steps_;
  frugal_oracle::Random random_;
  std::ofstream script_;
  std::vector<std::ofstream> expected_;  // of each share
  Reference reference_;
  std::vector<Table> tables_;
  std::vector<Rank> ranks_;
  const bool resumes_;
  std::vector<Fnv> outputs_;       // of each share
  std::vector<Declaration> dead_;  // of each share: a declaration of a step that has ended
  size_t share_ = 0, turn_ = 0;    // the share of the current line; that of lines without a rank
  uint32_t lookahead_ = 0;
  uint64_t first_step_ = 0;
  size_t index_ = 0;
  uint64_t step_ = 0;
  int next_batch_ = 0;
  size_t hashes_ = 0;
  const char* doing_ = "";
  std::map<std::pair<std::string, int32_t>, size_t> counts_;
};

int Main(int argc, char** argv) {
  const bool resumes = argc > 1 && std::string(argv[1]) == "--resumes";
  argc -= resumes;
  argv += resumes;
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const long ranks = argc == 6 ? std::strtol(argv[4], nullptr, 10) : Maker::World(seed);
  const long shares = argc == 6 ? std::strtol(argv[5], nullptr, 10) : 1;
  if ((argc != 4 && argc != 6) || ranks < 1 || ranks > 64 || shares < 1 || shares > ranks) {
    std::cerr << "usage: opscript_maker [--resumes] SEED STEPS PREFIX [RANKS SHARES]\n"
                 "writes PREFIX.jsonl and PREFIX.expected; if there are several shares, "
                 "PREFIX.expected0, 1, …\n";
    return 2;
  }
  Maker maker(seed, std::strtoull(argv[2], nullptr, 10), argv[3], static_cast<uint32_t>(ranks),
              static_cast<uint32_t>(shares), resumes);
  if (!maker.Make()) {
    std::cerr << "cannot write " << argv[3] << ".jsonl and .expected\n";
    return 1;
  }
  for (const auto& [what, count] : maker.counts()) {
    std::cout << what.first << ' ' << what.second << ' ' << count << '\n';
  }
  return 0;
}

}  // namespace
}  // namespace opscript

int main(int argc, char** argv) { return opscript::Main(argc, argv); }
