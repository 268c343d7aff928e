// Wrong calls, and calls at a bad moment, return the same from an own engine and from an attached
// one.
//
// Ranks are on the CPU and on a simulated GPU. Cases: pointers, counts and strides that lead
// nowhere, options that only make NaNs, steps that have no number. Threads are cancelled while they
// wait; a controller dies while a step is open. Random calls print their seed, and FRUGAL_TEST_SEED
// in the environment replays one.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "frugal.h"
#include "opened.h"

namespace {

constexpr uint32_t kDim = Opened::kDim;
constexpr size_t kRowBytes = kDim * sizeof(float);

// `answer` is `status`, and the message contains all of `words`.
testing::AssertionResult Refused(int32_t answer, int32_t status,
                                 std::initializer_list<const char*> words = {}) {
  if (answer != status)
    return testing::AssertionFailure()
           << frugal_status_name(answer) << ", not " << frugal_status_name(status) << ": "
           << (answer ? Error() : "");
  for (const char* word : words)
    if (Error().find(word) == std::string::npos)
      return testing::AssertionFailure() << "no '" << word << "' in: " << Error();
  return testing::AssertionSuccess();
}

struct Kind {
  const char* name;
  bool attached;
  const char* device;
};

class Calls : public testing::TestWithParam<Kind>, protected Opened {
 protected:
  void Open(uint32_t world = 1, const std::function<void(frugal_config*)>& change = nullptr) {
#ifdef FRUGAL_CONTROLLER
    controller_.reset();  // each engine has its own
#endif
    frugal_config c = Config(world, GetParam().attached);
    if (change) change(&c);
    OK(frugal_open(&c, &engine_));
    table_ = Table("rows", FRUGAL_DENSE);
    hashed_ = Table("keys", FRUGAL_HASHED);
    for (uint32_t r = 0; r < world; ++r) {
      frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
      t.rank = r;
      t.device = GetParam().device;
      trainers_.push_back(nullptr);
      OK(frugal_trainer_create(engine_, &t, &trainers_.back()));
    }
  }
  frugal_table* Table(const char* name, int32_t key_space,
                      const std::function<void(frugal_table_config*)>& change = nullptr) {
    frugal_table_config c = TableConfig(name, key_space);
    c.optimizer.lr = 1;
    if (change) change(&c);
    frugal_table* t = nullptr;
    EXPECT_EQ(FRUGAL_OK, frugal_table_create(engine_, &c, &t)) << Error();
    return t;
  }
  void TearDown() override {
    if (!engine_) return;
    EXPECT_EQ(FRUGAL_OK, frugal_close(engine_)) << Error();
  }

  frugal_engine* engine_ = nullptr;
  frugal_table *table_ = nullptr, *hashed_ = nullptr;
  std::vector<frugal_trainer*> trainers_;
};

constexpr Kind kKinds[] = {
    {"Here", false, "cpu"},
    {"HereSim", false, "sim:0"},
#ifdef FRUGAL_CONTROLLER
    {"Attached", true, "cpu"},
    {"AttachedSim", true, "sim:0"},
#endif
};
INSTANTIATE_TEST_SUITE_P(Kinds, Calls, testing::ValuesIn(kKinds),
                         [](const auto& info) { return info.param.name; });

// --- Ops -----------------------------------------------------------------------------------------

// A count without keys, equal to the declared count. Only reading keys could show whether they are
// the declared ones.
TEST_P(Calls, NoKeysAndACount) {
  Open();
  const uint64_t keys[4] = {1, 2, 3, 4}, offsets[3] = {0, 2, 4};
  uint64_t step = 0;
  for (frugal_table* table : {table_, hashed_}) {
    float rows[16] = {};
    frugal_op op = Op(table, keys, 4, rows);
    frugal_batch* batch = nullptr;
    OK(frugal_prefetch(trainers_[0], step, &op, 1, &batch));
    OK(frugal_step_begin(trainers_[0], step, 20000));
    frugal_op bad = Op(table, nullptr, 4, rows);
    for (bool pooled : {false, true}) {
      if (pooled) {
        bad.pooling = FRUGAL_POOL_SUM;
        bad.offsets = offsets;
        bad.bags = 2;
      }
      EXPECT_TRUE(Refused(frugal_lookup(trainers_[0], &bad, 1), FRUGAL_ERR_INVALID_ARGUMENT,
                          {"keys is NULL", "count 4"}));
      EXPECT_TRUE(Refused(frugal_push_grad(trainers_[0], &bad, 1), FRUGAL_ERR_INVALID_ARGUMENT,
                          {"keys is NULL"}));
      EXPECT_TRUE(Refused(frugal_read(engine_, trainers_[0], &bad, 1, 20000),
                          FRUGAL_ERR_INVALID_ARGUMENT, {"keys is NULL"}));
      EXPECT_TRUE(Refused(frugal_prefetch(trainers_[0], step + 1, &bad, 1, nullptr),
                          FRUGAL_ERR_INVALID_ARGUMENT, {"keys is NULL"}));
      // In their place of several, with a good op before.
      const frugal_op both[2] = {op, bad};
      EXPECT_TRUE(Refused(frugal_lookup(trainers_[0], both, 2), FRUGAL_ERR_INVALID_ARGUMENT,
                          {"op 1 of 2", "keys is NULL"}));
      EXPECT_TRUE(Refused(frugal_push_grad(trainers_[0], both, 2), FRUGAL_ERR_INVALID_ARGUMENT,
                          {"op 1 of 2"}));
    }
    op.batch = batch;
    op.keys = nullptr;
    OK(frugal_lookup(trainers_[0], &op, 1));
    OK(frugal_step_end(trainers_[0], step, 0));
    ++step;
  }
}

// Rows so far apart that their addresses go round, or beyond all that there are.
TEST_P(Calls, Strides) {
  Open();
  const uint64_t keys[4] = {1, 2, 3, 4}, offsets[5] = {0, 1, 2, 3, 4};
  std::vector<float> memory(64, -7.0f);
  float* rows = memory.data() + 24;  // 16 of them
  OK(frugal_step_begin(trainers_[0], 0, 20000));
  OK(frugal_step_end(trainers_[0], 0, 0));
  for (const size_t stride :
       {size_t{1} << 63, ~size_t{3}, ~size_t{15}, size_t{1} << 62, size_t{1} << 56,
        (size_t{1} << 62) + 16, kRowBytes - 4, kRowBytes + 2, size_t{4}, size_t{1}}) {
    for (frugal_table* table : {table_, hashed_}) {
      const auto what = {"row_stride", table == table_ ? "'rows'" : "'keys'"};
      const size_t n = stride < 100 ? 1 : 4;
      EXPECT_TRUE(Refused(frugal_get(table, keys, n, 0, rows, stride, nullptr),
                          FRUGAL_ERR_INVALID_ARGUMENT, what))
          << stride;
      EXPECT_TRUE(
          Refused(frugal_put(table, keys, n, 0, rows, stride), FRUGAL_ERR_INVALID_ARGUMENT, what))
          << stride;
      frugal_op op = Op(table, keys, n, rows);
      op.row_stride = stride;
      for (int pooled = 0; pooled < 2; ++pooled) {
        EXPECT_TRUE(Refused(frugal_read(engine_, nullptr, &op, 1, 20000),
                            FRUGAL_ERR_INVALID_ARGUMENT, what))
            << stride;
        EXPECT_TRUE(Refused(frugal_read(engine_, trainers_[0], &op, 1, 20000),
                            FRUGAL_ERR_INVALID_ARGUMENT, what))
            << stride;
        op.pooling = FRUGAL_POOL_SUM;
        op.offsets = offsets;
        op.bags = n;
      }
    }
  }
  OK(frugal_step_begin(trainers_[0], 1, 20000));
  for (const size_t stride : {size_t{1} << 63, ~size_t{3}, size_t{1} << 62, kRowBytes - 4}) {
    frugal_op op = Op(hashed_, keys, 4, rows);
    op.row_stride = stride;
    EXPECT_TRUE(Refused(frugal_lookup(trainers_[0], &op, 1), FRUGAL_ERR_INVALID_ARGUMENT,
                        {"row_stride", "'keys'"}));
    EXPECT_TRUE(Refused(frugal_push_grad(trainers_[0], &op, 1), FRUGAL_ERR_INVALID_ARGUMENT,
                        {"row_stride", "'keys'"}));
  }
  OK(frugal_step_end(trainers_[0], 1, 0));
  uint64_t count = 1;
  OK(frugal_table_count(hashed_, &count));
  EXPECT_EQ(0u, count);
  EXPECT_TRUE(std::all_of(memory.begin(), memory.end(), [](float x) { return x == -7.0f; }));
}

// A count that no array has.
TEST_P(Calls, KeysWithoutEnd) {
  Open();
  OK(frugal_step_begin(trainers_[0], 0, 20000));
  OK(frugal_step_end(trainers_[0], 0, 0));
  for (const size_t capacity : {~size_t{0}, size_t{1} << 61, size_t{1} << 63}) {
    std::vector<uint64_t> keys(100, 7);
    uint64_t cursor = 0;
    size_t n = 0;
    OK(frugal_table_keys(table_, &cursor, keys.data(), capacity, &n));
    EXPECT_EQ(100u, n);
  }
}

// Whatever fields an op has, the call returns a status.
TEST_P(Calls, RandomOps) {
  Open();
  const char* given = std::getenv("FRUGAL_TEST_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("FRUGAL_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  auto one_of = [&](auto... all) {
    const std::common_type_t<decltype(all)...> choices[] = {
        static_cast<std::common_type_t<decltype(all)...>>(all)...};
    return choices[random() % sizeof...(all)];
  };
  uint64_t keys[2][16], offsets[2][17];
  for (size_t i = 0; i < 16; ++i) {
    keys[0][i] = i;
    keys[1][i] = i == 3 ? ~uint64_t{0} : 99 - i;
  }
  for (size_t i = 0; i < 17; ++i) {
    offsets[0][i] = i;
    offsets[1][i] = i == 5 ? random() : i;
  }
  std::vector<float> rows(16 * 16, 1.0f), weights(16, 1.0f), weight_grads(16);
  std::vector<uint8_t> found(16);
  constexpr size_t kMany = size_t{1} << 33, kAll = ~size_t{0}, kMost = (size_t{1} << 32) - 1;
  std::vector<int> answers(64);
  for (uint64_t step = 0; step < 60; ++step) {
    frugal_batch* batch = nullptr;
    frugal_op declared[2] = {Op(table_, keys[0], 4, nullptr), Op(hashed_, keys[1], 16, nullptr)};
    OK(frugal_prefetch(trainers_[0], step, declared, 2, &batch));
    frugal_batch* other = nullptr;
    OK(frugal_prefetch(trainers_[0], step + 1, declared, 1, &other));
    OK(frugal_step_begin(trainers_[0], step, 20000));
    for (int call = 0; call < 40; ++call) {
      frugal_op ops[3];
      const size_t n = 1 + random() % 3;
      for (size_t i = 0; i < n; ++i) {
        frugal_op& op = ops[i] = FRUGAL_OP_INIT;
        if (random() % 50 == 0) op.struct_size = one_of(0, 8, kAll);
        op.table = one_of(table_, table_, hashed_, hashed_, hashed_, nullptr);
        if (random() % 3 == 0) op.batch = one_of(batch, batch, batch, other);
        op.part = one_of(0u, 0u, 1u, 1u, 2u, ~0u);
        op.pooling = one_of(0, 0, 0, 1, 1, 2, 3, -1);
        op.keys = one_of(keys[0], keys[0], keys[1], static_cast<uint64_t*>(nullptr));
        op.count = one_of(size_t{0}, size_t{1}, size_t{4}, size_t{4}, size_t{16}, size_t{16}, kMost,
                          kMany, kAll);
        op.offsets =
            one_of(offsets[0], offsets[0], offsets[0], offsets[1], static_cast<uint64_t*>(nullptr));
        op.bags =
            one_of(size_t{0}, size_t{1}, size_t{4}, size_t{4}, size_t{16}, size_t{16}, kMost, kAll);
        op.weights =
            one_of(static_cast<float*>(nullptr), static_cast<float*>(nullptr), weights.data());
        op.weight_grads_out =
            one_of(static_cast<float*>(nullptr), static_cast<float*>(nullptr), weight_grads.data());
        op.rows_out = one_of(rows.data(), rows.data(), rows.data(), rows.data(),
                             static_cast<float*>(nullptr));
        op.grads = op.rows_out;
        op.row_stride =
            one_of(size_t{0}, size_t{0}, size_t{0}, kRowBytes, 2 * kRowBytes, kRowBytes + 1,
                   size_t{4}, size_t{1} << 63, size_t{1} << 60, kAll - 3);
        op.found_out = one_of(static_cast<uint8_t*>(nullptr), found.data());
        op.padding_key = one_of(0, 3, 99);
        op.flags = one_of(0u, 0u, 0u, 1u, 1u, 2u, ~0u);
        if (random() % 50 == 0) op.reserved = 1;
      }
      int32_t s = 0;
      switch (random() % 4) {
        case 0:
          s = frugal_lookup(trainers_[0], ops, n);
          break;
        case 1:
          s = frugal_push_grad(trainers_[0], ops, n);
          break;
        case 2:
          s = frugal_prefetch(trainers_[0], step + 1 + random() % 3, ops, n, nullptr);
          break;
        default:
          s = frugal_read(engine_, trainers_[0], ops, n, 20000);
      }
      ++answers[static_cast<size_t>(-s)];
      ASSERT_TRUE(s == FRUGAL_OK || s == FRUGAL_ERR_INVALID_ARGUMENT ||
                  s == FRUGAL_ERR_BAD_HANDLE || s == FRUGAL_ERR_STRUCT_SIZE ||
                  s == FRUGAL_ERR_KEY_OUT_OF_RANGE || s == FRUGAL_ERR_NAN)
          << frugal_status_name(s) << ": " << Error();
    }
    OK(frugal_step_end(trainers_[0], step, 0));
  }
  EXPECT_GT(answers[0], 20);
  EXPECT_GT(answers[-FRUGAL_ERR_INVALID_ARGUMENT], 500);
}

// --- Options -------------------------------------------------------------------------------------

TEST_P(Calls, OptionsThatOnlyMakeNonsense) {
  Open();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinite = std::numeric_limits<float>::infinity();
  using O = frugal_optimizer;
  const struct {
    int32_t kind;
    const char* name;
    float O::*field;
    float value;
    bool good;
  } options[] = {
      {FRUGAL_SGD, "lr", &O::lr, -0.1f, false},
      {FRUGAL_SGD, "lr", &O::lr, 0, true},
      {FRUGAL_SGD, "lr", &O::lr, kNan, false},
      {FRUGAL_SGD, "weight_decay", &O::weight_decay, -0.1f, false},
      {FRUGAL_SGD, "weight_decay_l2", &O::weight_decay_l2, -0.1f, false},
      {FRUGAL_SGD, "weight_decay_l2", &O::weight_decay_l2, kInfinite, false},
      {FRUGAL_SGD, "clip_value", &O::clip_value, -1, false},
      {FRUGAL_SGD, "clip_norm", &O::clip_norm, -1, false},
      {FRUGAL_SGD, "weight_bound", &O::weight_bound, -1, false},
      {FRUGAL_SGD, "grad_scale", &O::grad_scale, kNan, false},
      {FRUGAL_SGD, "grad_scale", &O::grad_scale, -1, true},
      {FRUGAL_MOMENTUM, "momentum", &O::momentum, -0.1f, false},
      {FRUGAL_MOMENTUM, "momentum", &O::momentum, 1, true},
      {FRUGAL_MOMENTUM, "dampening", &O::dampening, 1.5f, false},
      {FRUGAL_MOMENTUM, "dampening", &O::dampening, -0.5f, false},
      {FRUGAL_MOMENTUM, "dampening", &O::dampening, 1, true},
      {FRUGAL_ADAGRAD, "eps", &O::eps, -1e-8f, false},
      {FRUGAL_ADAGRAD, "initial_accumulator", &O::initial_accumulator, -1, false},
      {FRUGAL_ROWWISE_ADAGRAD, "eps", &O::eps, -1, false},
      {FRUGAL_ADAGRAD, "eps", &O::eps, 0, false},
      {FRUGAL_ROWWISE_ADAGRAD, "eps", &O::eps, 0, false},
      {FRUGAL_ADAM, "eps", &O::eps, 0, false},
      {FRUGAL_RMSPROP, "eps", &O::eps, 0, false},
      {FRUGAL_FTRL, "eps", &O::eps, 0, true},
      {FRUGAL_ADAM, "beta1", &O::beta1, 1, false},
      {FRUGAL_ADAM, "beta2", &O::beta2, -0.5f, false},
      {FRUGAL_ADAM, "beta2", &O::beta2, 0, true},
      {FRUGAL_RMSPROP, "rho", &O::rho, 1.5f, false},
      {FRUGAL_RMSPROP, "rho", &O::rho, -0.5f, false},
      {FRUGAL_RMSPROP, "rho", &O::rho, 1, true},
      {FRUGAL_FTRL, "lr", &O::lr, 0, false},
      {FRUGAL_FTRL, "ftrl_lambda1", &O::ftrl_lambda1, -1, false},
      {FRUGAL_FTRL, "ftrl_lambda2", &O::ftrl_lambda2, -1, false},
      {FRUGAL_FTRL, "ftrl_beta", &O::ftrl_beta, -1, false},
      // An option that a kind does not read may be anything finite.
      {FRUGAL_SGD, "rho", &O::rho, 7, true},
      {FRUGAL_ADAM, "momentum", &O::momentum, -7, true},
  };
  int number = 0;
  for (const auto& o : options) {
    const std::string name = "o" + std::to_string(number++);
    frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
    c.name = name.c_str();
    c.rows = 10;
    c.dim = kDim;
    c.optimizer.kind = o.kind;
    frugal_table* t = nullptr;
    frugal_table_config wrong = c;
    wrong.optimizer.*o.field = o.value;
    char value[32];
    std::snprintf(value, sizeof value, std::isfinite(o.value) ? "is %.10g" : "is ",
                  double{o.value});
    if (o.good) {
      OK(frugal_table_create(engine_, &wrong, &t));
      continue;
    }
    EXPECT_TRUE(Refused(frugal_table_create(engine_, &wrong, &t), FRUGAL_ERR_INVALID_ARGUMENT,
                        {o.name, value, "must be"}));
    OK(frugal_table_create(engine_, &c, &t));
    EXPECT_TRUE(Refused(frugal_table_set_optimizer(t, 5, &wrong.optimizer),
                        FRUGAL_ERR_INVALID_ARGUMENT, {o.name, value, "must be"}));
  }
  const struct {
    int32_t init;
    float a, b;
    const char* word;  // null: it is meant
  } inits[] = {
      {FRUGAL_INIT_UNIFORM, 1, -1, "init_a"},
      {FRUGAL_INIT_UNIFORM, 1, 1, nullptr},
      {FRUGAL_INIT_NORMAL, 0, -1, "init_b"},
      {FRUGAL_INIT_NORMAL, -3, 0, nullptr},
      {FRUGAL_INIT_TRUNCATED_NORMAL, 0, -1, "init_b"},
      {FRUGAL_INIT_XAVIER, 1, -4, "init_b"},
      {FRUGAL_INIT_XAVIER, 1, -10, "init_b"},
      {FRUGAL_INIT_XAVIER, -1, 0, "init_a"},
      {FRUGAL_INIT_XAVIER, 1, 0, nullptr},
      {FRUGAL_INIT_CONSTANT, -1, -1, nullptr},
      // Rows that would not be finite.
      {FRUGAL_INIT_UNIFORM, -FLT_MAX, FLT_MAX, nullptr},
      {FRUGAL_INIT_UNIFORM, -FLT_MAX, kInfinite, "init_b"},
      {FRUGAL_INIT_NORMAL, 0, FLT_MAX, "init_b is 3.40282347e+38"},
      {FRUGAL_INIT_NORMAL, FLT_MAX, 1e37f, "init_a is 3.40282347e+38"},
      {FRUGAL_INIT_NORMAL, 0, kNan, "init_b"},
      {FRUGAL_INIT_NORMAL, 0, FLT_MAX / 10, nullptr},
      {FRUGAL_INIT_TRUNCATED_NORMAL, -FLT_MAX / 2, FLT_MAX / 2, "at most 3.40282347e+38"},
      {FRUGAL_INIT_TRUNCATED_NORMAL, -FLT_MAX / 2, FLT_MAX / 4, nullptr},
      {FRUGAL_INIT_XAVIER, FLT_MAX, 0.5f, "at most 3.40282347e+38"},
      {FRUGAL_INIT_XAVIER, FLT_MAX, 6, nullptr},
      {FRUGAL_INIT_CONSTANT, -FLT_MAX, 0, nullptr},
      {FRUGAL_INIT_CONSTANT, kNan, 0, "init_a"},
      {FRUGAL_INIT_CONSTANT, 0, kInfinite, "init_b"},
  };
  for (const auto& i : inits) {
    const std::string name = "i" + std::to_string(number++);
    frugal_table* t = nullptr;
    frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
    c.name = name.c_str();
    c.rows = 10;
    c.dim = kDim;
    c.init = i.init;
    c.init_a = i.a;
    c.init_b = i.b;
    if (i.word) {
      EXPECT_TRUE(Refused(frugal_table_create(engine_, &c, &t), FRUGAL_ERR_INVALID_ARGUMENT,
                          {("table '" + name + "': init_").c_str(), i.word, "must be"}));
      continue;
    }
    OK(frugal_table_create(engine_, &c, &t));
    uint64_t ids[10];
    float rows[10 * kDim];
    std::iota(std::begin(ids), std::end(ids), 0);
    OK(frugal_get(t, ids, 10, 0, rows, 0, nullptr));
    for (const float value : rows) ASSERT_TRUE(std::isfinite(value)) << name;
  }
}

// Hyper-parameters hold from a step on, in whatever order they are given.
TEST_P(Calls, OptimizersOutOfOrder) {
  Open();
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  auto set = [&](uint64_t step, float lr) {
    o.lr = lr;
    OK(frugal_table_set_optimizer(table_, step, &o));
  };
  set(4, 1000);
  set(2, 100);
  set(3, 7);
  set(3, 10);  // of two for a step the later call
  const float rates[] = {1, 1, 100, 10, 1000, 1000};
  const uint64_t key = 5;
  float row[kDim], before = 0;
  for (uint64_t step = 0; step < 6; ++step) {
    OK(frugal_step_begin(trainers_[0], step, 20000));
    float grads[kDim] = {-1, -1, -1, -1};
    frugal_op op = Op(table_, &key, 1, grads);
    OK(frugal_push_grad(trainers_[0], &op, 1));
    OK(frugal_step_end(trainers_[0], step, 0));
    OK(frugal_get(table_, &key, 1, 0, row, 0, nullptr));
    EXPECT_EQ(before + rates[step], row[0]) << "step " << step;
    before = row[0];
  }
}

// --- Steps ---------------------------------------------------------------------------------------

TEST_P(Calls, StepsWithoutANumber) {
  Open();
  const uint64_t key = 1;
  float row[kDim];
  const frugal_op op = Op(table_, &key, 1, row);
  constexpr uint64_t kLast = ~uint64_t{0} - 65;
  for (uint64_t step = kLast + 1; step != 0; ++step) {
    EXPECT_TRUE(Refused(frugal_step_begin(trainers_[0], step, 0), FRUGAL_ERR_INVALID_ARGUMENT,
                        {std::to_string(step).c_str(), "up to 18446744073709551550"}));
    EXPECT_TRUE(Refused(frugal_prefetch(trainers_[0], step, &op, 1, nullptr),
                        FRUGAL_ERR_INVALID_ARGUMENT,
                        {std::to_string(step).c_str(), "up to 18446744073709551550"}));
  }
  OK(frugal_prefetch(trainers_[0], kLast, &op, 1, nullptr));
  for (uint64_t step = kLast - 1; step <= kLast; ++step) {
    OK(frugal_step_begin(trainers_[0], step, 20000));
    OK(frugal_lookup(trainers_[0], &op, 1));
    OK(frugal_push_grad(trainers_[0], &op, 1));
    OK(frugal_step_end(trainers_[0], step, 0));
  }
  EXPECT_TRUE(Refused(frugal_step_begin(trainers_[0], kLast + 1, 0), FRUGAL_ERR_INVALID_ARGUMENT,
                      {"up to"}));
  uint64_t committed = 0;
  OK(frugal_committed_step(engine_, &committed));
  EXPECT_EQ(kLast, committed);
}

// Rows that were read with an update pending.
TEST_P(Calls, StaleReads) {
  Open(1, [](frugal_config* c) {
    c->staleness = 4;
    c->flush_threads = 0;
    c->flush_mode = FRUGAL_FLUSH_DEFERRED;
  });
  const uint64_t keys[6] = {1, 2, 3, 4, 5, 1};
  float rows[6 * kDim], grads[6 * kDim];
  std::fill(std::begin(grads), std::end(grads), 1.0f);
  for (uint64_t step = 0; step < 20; ++step) {
    const frugal_op op = Op(table_, keys, 6, rows);
    if (step % 2) {
      OK(frugal_prefetch(trainers_[0], step, &op, 1, nullptr));
    }
    OK(frugal_step_begin(trainers_[0], step, 20000));
    OK(frugal_lookup(trainers_[0], &op, 1));
    frugal_op push = Op(table_, keys, 6, grads);
    OK(frugal_push_grad(trainers_[0], &push, 1));
    OK(frugal_step_end(trainers_[0], step, 0));
  }
  frugal_stats stats;
  stats.struct_size = sizeof stats;
  OK(frugal_get_stats(engine_, &stats));
  // Each lookup but the first finds the update of the step before: no thread writes meanwhile.
  EXPECT_EQ(19u * 6, stats.stale_reads);
}

// A missing row is a term of zeros, and counts.
TEST_P(Calls, MissingRowsInAPool) {
  Open();
  const float four[kDim] = {4, 4, 4, 4};
  const uint64_t keys[4] = {1, 77, 1, 5}, offsets[2] = {0, 4};
  OK(frugal_put(hashed_, keys, 1, 0, four, 0));
  float out[kDim];
  uint8_t found[4];
  frugal_op op = Op(hashed_, keys, 4, out);
  op.offsets = offsets;
  op.bags = 1;
  op.found_out = found;
  op.padding_key = 5;
  for (int32_t pooling : {FRUGAL_POOL_SUM, FRUGAL_POOL_MEAN})
    for (uint32_t flags : {0u, FRUGAL_OP_PADDING}) {
      op.pooling = pooling;
      op.flags = flags;
      OK(frugal_read(engine_, nullptr, &op, 1, 20000));
      EXPECT_EQ(pooling == FRUGAL_POOL_SUM ? 8.0f : 8.0f / (flags ? 3 : 4), out[3])
          << pooling << " " << flags;
      EXPECT_EQ(0, found[1]);
    }
}

// --- Threads that are cancelled ------------------------------------------------------------------

struct Canceled {
  std::function<int32_t()> call;
  std::atomic<int32_t> answer{-1000};
  pthread_t thread{};
  static void* Run(void* self) {
    auto* c = static_cast<Canceled*>(self);
    c->answer = c->call();
    for (;;) pthread_testcancel();  // from here on it is
  }
  void Start() { ASSERT_EQ(0, pthread_create(&thread, nullptr, Run, this)); }
  void Cancel() { ASSERT_EQ(0, pthread_cancel(thread)); }
  void Join() {
    void* result = nullptr;
    ASSERT_EQ(0, pthread_join(thread, &result));
    EXPECT_EQ(PTHREAD_CANCELED, result);
  }
};

// Until a call waits at a gate: `gates` have waited before.
uint64_t Gates(frugal_engine* e) {
  frugal_stats stats;
  stats.struct_size = sizeof stats;
  EXPECT_EQ(FRUGAL_OK, frugal_get_stats(e, &stats)) << Error();
  return stats.gate_waits;
}

TEST_P(Calls, CanceledThreads) {
  Open(2);
  const uint64_t key = 1;
  float row[kDim];
  const frugal_op op = Op(table_, &key, 1, row);
  for (frugal_trainer* t : trainers_) OK(frugal_step_begin(t, 0, 20000));
  OK(frugal_step_end(trainers_[0], 0, 0));
  // Waits for the other rank's end.
  const uint64_t before = Gates(engine_);
  Canceled begin{[&] { return frugal_step_begin(trainers_[0], 1, FRUGAL_TIMEOUT_INFINITE); }};
  begin.Start();
  while (Gates(engine_) == before) sched_yield();
  begin.Cancel();
  OK(frugal_step_end(trainers_[1], 0, 0));
  begin.Join();
  EXPECT_EQ(FRUGAL_OK, begin.answer.load());
  // One that has a cancellation waiting when it begins, and ends by its time-out.
  std::atomic<bool> ready{false}, go{false};
  Canceled read{[&] {
    ready = true;
    while (!go) {
    }
    return frugal_step_begin(trainers_[1], 1, 20000) ? -1 : frugal_lookup(trainers_[1], &op, 1);
  }};
  read.Start();
  while (!ready) sched_yield();
  read.Cancel();
  go = true;
  read.Join();
  EXPECT_EQ(FRUGAL_OK, read.answer.load());
  Canceled again{[&] {
    go = false;
    ready = false;
    ready = true;
    while (!go) {
    }
    const int32_t s = frugal_step_end(trainers_[0], 1, 0);
    return s ? s : frugal_read(engine_, trainers_[0], &op, 1, 50);
  }};
  again.Start();
  while (!ready || go) sched_yield();
  again.Cancel();
  go = true;
  again.Join();
  EXPECT_EQ(FRUGAL_ERR_TIMEOUT, again.answer.load());
  // All goes on.
  OK(frugal_step_end(trainers_[1], 1, 0));
  for (frugal_trainer* t : trainers_) OK(frugal_step_begin(t, 2, 20000));
  for (frugal_trainer* t : trainers_) OK(frugal_step_end(t, 2, 0));
  int state = 0;
  ASSERT_EQ(0, pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state));
  EXPECT_EQ(PTHREAD_CANCEL_ENABLE, state);
  ASSERT_EQ(0, pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state));
  OK(frugal_flush(engine_, 20000));
  ASSERT_EQ(0, pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state));
  EXPECT_EQ(PTHREAD_CANCEL_DISABLE, state);  // as the caller had it
}

#ifdef FRUGAL_CONTROLLER

TEST(Attaching, CanceledThreads) {
  const Folder folder;
  const std::string address = folder.address();
  std::atomic<bool> ready{false};
  Canceled open{[&] {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.service = address.c_str();
    c.timeout_ms = 300;
    frugal_engine* e = nullptr;
    ready = true;
    return frugal_open(&c, &e);
  }};
  open.Start();
  while (!ready) sched_yield();
  open.Cancel();
  open.Join();
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, open.answer.load());
}

// --- The end of a controller ---------------------------------------------------------------------

class Ends : public Calls {};
INSTANTIATE_TEST_SUITE_P(Kinds, Ends, testing::ValuesIn(kKinds + 2, kKinds + 4),
                         [](const auto& info) { return info.param.name; });

// What a trainer has done since the last committed step is gone with the controller: no call
// reports it as present.
TEST_P(Ends, ReadsOfATrainer) {
  for (const char* moment : {"before", "inside", "ended", "committed", "undone", "waiting"}) {
    SCOPED_TRACE(moment);
    trainers_.clear();
    Open(2);
    const uint64_t keys[2] = {1, 2};
    float rows[2 * kDim], grads[2 * kDim] = {};
    uint8_t found[2];
    frugal_op op = Op(hashed_, keys, 2, rows);
    op.found_out = found;
    frugal_op push = Op(hashed_, keys, 2, grads);
    auto step = [&](size_t rank, uint64_t s, bool end) {
      OK(frugal_step_begin(trainers_[rank], s, 20000));
      OK(frugal_lookup(trainers_[rank], &op, 1));
      OK(frugal_push_grad(trainers_[rank], &push, 1));
      if (!end) return;
      OK(frugal_step_end(trainers_[rank], s, 0));
    };
    const std::string at = moment;
    bool lost = false;
    if (at != "before") {
      for (size_t r = 0; r < 2; ++r) step(r, 7, at != "inside");
      lost = at == "inside";
      if (at == "ended") {
        step(0, 8, true);
        lost = true;
      } else if (at == "undone") {
        step(0, 8, false);
        OK(frugal_step_abort(trainers_[0]));
        EXPECT_EQ(FRUGAL_ERR_STEP_ABORTED, frugal_step_begin(trainers_[1], 8, 0));
      } else if (at == "waiting") {
        step(0, 8, true);
        step(1, 8, true);
        for (size_t r = 0; r < 2; ++r)
          EXPECT_EQ(FRUGAL_OK, frugal_step_begin(trainers_[r], 9, 20000));
        OK(frugal_step_end(trainers_[0], 9, 0));
        EXPECT_EQ(FRUGAL_ERR_TIMEOUT, frugal_step_begin(trainers_[0], 10, 0));
        lost = true;
      }
    }
    controller_->end(SIGKILL);
    for (frugal_trainer* t : trainers_) {
      const bool here = lost && (t == trainers_[0] || at == "inside" || at == "waiting");
      const int32_t s = frugal_read(engine_, t, &op, 1, 20000);
      if (here) {
        EXPECT_TRUE(
            Refused(s, FRUGAL_ERR_PEER_LOST, {"was not committed", "read without a trainer"}));
      } else {
        EXPECT_EQ(FRUGAL_OK, s) << Error();
      }
    }
    OK(frugal_read(engine_, nullptr, &op, 1, 20000));
    EXPECT_EQ(at != "before" && at != "inside", found[0]);
    OK(frugal_close(engine_));
    engine_ = nullptr;
  }
}

#endif

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
