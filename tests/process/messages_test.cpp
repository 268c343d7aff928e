// Every status of the header is provoked; each message names the wrong thing or value, and what
// would work.
//
// A table lists calls with their status and words of the message, for an own engine and for an
// attached one. The test reads the statuses from include/frugal.h. It fails on a status that no
// call here provokes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/handles.h"
#include "engine/engine.h"
#include "format/manifest.h"
#include "frugal.h"
#include "opened.h"

// What no call of the interface does: an engine whose background has failed, and one that leaves
// its memory in disorder.
namespace frugal {
void FailBackground(Engine& engine, Status status);
LedgerRoot*& RootOf(Ledger& ledger);
template <Workers Engine::*kMember>
struct BackgroundOf {
  friend void FailBackground(Engine& engine, Status status) { (engine.*kMember).fail(status); }
};
template struct BackgroundOf<&Engine::workers_>;
template <LedgerRoot* Ledger::*kMember>
struct LedgerOf {
  friend LedgerRoot*& RootOf(Ledger& ledger) { return ledger.*kMember; }
};
template struct LedgerOf<&Ledger::root_>;
}  // namespace frugal

namespace {

std::set<int32_t> g_provoked;

frugal_error Last() {
  frugal_error e;
  frugal_last_error(&e);
  return e;
}

void Says(const char* call, int32_t answer, int32_t status, const std::vector<std::string>& words) {
  const std::string said = answer ? Error() : "";
  EXPECT_EQ(frugal_status_name(status), std::string(frugal_status_name(answer)))
      << call << ": " << said;
  if (answer != status) return;
  EXPECT_EQ(status, Last().status) << call;
  g_provoked.insert(status);
  for (const std::string& word : words)
    EXPECT_NE(said.find(word), std::string::npos) << call << ": no '" << word << "' in: " << said;
  // What is wrong has a name or a value, and something is said of what would do.
  static const std::regex name(
      "[0-9]|/|'|_|NULL|\\b(rank|engine|controller|trainer|batch|trace)\\b");
  static const std::regex advice(
      "\\b(must|gives?|needs?|call|use|ask|choose|close|open|opened|create|raise|drop|stop|end|"
      "begin|join|"
      "declare|knows|at most|is its|may|cancel|remove|restore|outside)\\b|\\.\\.");
  EXPECT_TRUE(std::regex_search(said, name)) << call << ": no name and no value in: " << said;
  EXPECT_TRUE(std::regex_search(said, advice)) << call << ": nothing of what would do in: " << said;
  EXPECT_EQ(said.find("(null)"), std::string::npos) << call << ": " << said;
}
#define SAYS(call, status, ...) Says(#call, (call), FRUGAL_ERR_##status, {__VA_ARGS__})

constexpr uint32_t kDim = Opened::kDim;

class Messages : public testing::TestWithParam<bool>, protected Opened {
 protected:
  bool attached() const { return GetParam(); }
  void Open(uint32_t world, const std::function<void(frugal_config*)>& change = nullptr) {
    frugal_config c = Config(world);
    if (change) change(&c);
    OK(frugal_open(&c, &engine));
  }
  frugal_config Config(uint32_t world) { return Opened::Config(world, attached()); }
  frugal_table* Table(const char* name, int32_t key_space = FRUGAL_DENSE, uint64_t rows = 100) {
    const frugal_table_config c = TableConfig(name, key_space, rows);
    frugal_table* t = nullptr;
    EXPECT_EQ(FRUGAL_OK, frugal_table_create(engine, &c, &t)) << Error();
    return t;
  }
  frugal_trainer* Join(uint32_t rank) {
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = rank;
    frugal_trainer* t = nullptr;
    EXPECT_EQ(FRUGAL_OK, frugal_trainer_create(engine, &c, &t)) << Error();
    return t;
  }
  void TearDown() override {
    if (!engine) return;
    EXPECT_EQ(FRUGAL_OK, frugal_close(engine)) << Error();
  }

  frugal_engine* engine = nullptr;
  float rows[64] = {};
};

#ifdef FRUGAL_CONTROLLER
constexpr bool kKinds[] = {false, true};
#else
constexpr bool kKinds[] = {false};
#endif
INSTANTIATE_TEST_SUITE_P(Kinds, Messages, testing::ValuesIn(kKinds),
                         [](const auto& info) { return info.param ? "Attached" : "Here"; });

TEST_P(Messages, OfOpening) {
  frugal_engine* e = nullptr;
  auto open = [&](const std::function<void(frugal_config*)>& change) {
    frugal_config c = Config(1);
    change(&c);
    return frugal_open(&c, &e);
  };
  SAYS(frugal_open(nullptr, nullptr), INVALID_ARGUMENT, "engine_out", "NULL");
  SAYS(open([](auto* c) { c->struct_size = 8; }), STRUCT_SIZE, "frugal_config.struct_size is 8",
       "INIT");
  SAYS(open([](auto* c) { c->world_size = 0; }), INVALID_ARGUMENT, "world_size is 0", "1..4096");
  SAYS(open([](auto* c) { c->world_size = 5000; }), INVALID_ARGUMENT, "world_size is 5000",
       "1..4096");
  SAYS(open([](auto* c) { c->lookahead = 41; }), INVALID_ARGUMENT, "lookahead is 41", "0..40");
  SAYS(open([](auto* c) { c->flush_threads = 257; }), INVALID_ARGUMENT, "flush_threads is 257",
       "0..256");
  SAYS(open([](auto* c) { c->flush_mode = 9; }), INVALID_ARGUMENT, "flush_mode is 9",
       "FRUGAL_FLUSH_");
  SAYS(open([](auto* c) { c->flush_mode = -1; }), INVALID_ARGUMENT, "flush_mode is -1",
       "FRUGAL_FLUSH_");
  SAYS(open([](auto* c) { c->backing = 2; }), INVALID_ARGUMENT, "backing is 2", "FRUGAL_BACKING_");
  SAYS(open([](auto* c) { c->timeout_ms = -7; }), INVALID_ARGUMENT, "timeout_ms is -7",
       "0 or more");
  SAYS(open([](auto* c) { c->flags = 6; }), INVALID_ARGUMENT, "flags 0x6", "frugal_config.flags");
  if (attached()) {
    SAYS(open([](auto* c) { c->flags = FRUGAL_OBSERVE; }), NOT_FOUND, "no engine");
    Open(2);
    SAYS(open([](auto* c) { c->world_size = 3; }), INVALID_ARGUMENT, "world_size 2", "asks for 3",
         "same");
  } else {
    SAYS(open([](auto* c) { c->flags = FRUGAL_OBSERVE; }), INVALID_ARGUMENT, "FRUGAL_OBSERVE",
         "service is NULL");
  }
}

TEST_P(Messages, OfHandles) {
  Open(1);
  frugal_table* table = Table("t");
  frugal_trainer* trainer = Join(0);
  OK(frugal_table_drop(Table("dropped")));
  auto* invented = reinterpret_cast<frugal_table*>(uintptr_t{0x123456});
  uint64_t n = 0;
  SAYS(frugal_table_count(nullptr, &n), BAD_HANDLE, "table", "NULL");
  SAYS(frugal_table_count(invented, &n), BAD_HANDLE, "table", "0x123456",
       "closed, or never was one");
  SAYS(frugal_flush(reinterpret_cast<frugal_engine*>(table), 0), BAD_HANDLE, "engine");
  SAYS(frugal_step_begin(reinterpret_cast<frugal_trainer*>(engine), 0, 0), BAD_HANDLE, "trainer");
  SAYS(frugal_prefetch_cancel(trainer, nullptr), BAD_HANDLE, "batch", "NULL");
  const uint64_t key = 1;
  frugal_op ops[2] = {Op(table, &key, 1, rows), Op(invented, &key, 1, rows)};
  OK(frugal_step_begin(trainer, 0, 20000));
  SAYS(frugal_lookup(trainer, ops, 2), BAD_HANDLE, "op 1 of 2", "frugal_op.table", "no open table");
  ops[1] = Op(nullptr, &key, 1, rows);
  SAYS(frugal_lookup(trainer, ops, 2), BAD_HANDLE, "op 1 of 2", "frugal_op.table is NULL");
  ops[1] = Op(table, nullptr, 0, rows);
  ops[1].batch = reinterpret_cast<frugal_batch*>(table);
  SAYS(frugal_lookup(trainer, ops, 2), BAD_HANDLE, "op 1 of 2", "'t'", "frugal_op.batch");
  SAYS(frugal_table_count(table, nullptr), INVALID_ARGUMENT, "'t'", "count_out", "NULL");
  SAYS(frugal_flush(engine, -7), INVALID_ARGUMENT, "timeout_ms -7", "FRUGAL_TIMEOUT_");
  OK(frugal_step_end(trainer, 0, 0));
}

// One that another process of the job has dropped.
TEST_P(Messages, OfADroppedTable) {
  if (!attached()) return;
  Open(1);
  frugal_table* table = Table("t");
  frugal_table* dropped = Table("dropped");
  frugal_trainer* trainer = Join(0);
  frugal_config c = Config(1);
  frugal_engine* other = nullptr;
  OK(frugal_open(&c, &other));
  frugal_table* there = nullptr;
  OK(frugal_table_find(other, "dropped", &there));
  OK(frugal_table_drop(there));
  OK(frugal_close(other));

  const std::vector<std::string> words = {"'dropped'", "another process", "drop this handle"};
  auto gone = [&](const char* call, int32_t s) { Says(call, s, FRUGAL_ERR_BAD_HANDLE, words); };
  const uint64_t key = 1;
  uint64_t n = 0;
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  gone("count", frugal_table_count(dropped, &n));
  gone("get", frugal_get(dropped, &key, 1, 0, rows, 0, nullptr));
  gone("put", frugal_put(dropped, &key, 1, 0, rows, 0));
  gone("delete", frugal_delete(dropped, &key, 1, nullptr));
  gone("set_optimizer", frugal_table_set_optimizer(dropped, 0, &o));
  const frugal_op ops[3] = {Op(table, &key, 1, rows), Op(table, &key, 1, rows),
                            Op(dropped, &key, 1, rows)};
  SAYS(frugal_prefetch(trainer, 0, ops, 3, nullptr), BAD_HANDLE, "op 2 of 3", "another process");
  SAYS(frugal_read(engine, nullptr, ops, 3, 20000), BAD_HANDLE, "op 2 of 3", "another process");
  OK(frugal_table_drop(dropped));
}

// The same in both kinds of engines, and no reason for a controller to end the channel.
TEST_P(Messages, OfTooManyOps) {
  Open(1);
  frugal_trainer* t = Join(0);
  const uint64_t key = 1;
  const std::vector<frugal_op> ops((size_t{1} << 20) + 1, Op(Table("t"), &key, 1, rows));
  const size_t n = ops.size();
  const std::vector<std::string> words = {"1048577 ops", "at most 2^20"};
  auto refused = [&](const char* call, int32_t s) {
    Says(call, s, FRUGAL_ERR_INVALID_ARGUMENT, words);
  };
  refused("prefetch", frugal_prefetch(t, 0, ops.data(), n, nullptr));
  refused("read", frugal_read(engine, nullptr, ops.data(), n, -1));
  OK(frugal_step_begin(t, 0, 20000));
  refused("lookup", frugal_lookup(t, ops.data(), n));
  refused("push_grad", frugal_push_grad(t, ops.data(), n));
  refused("read of a trainer", frugal_read(engine, t, ops.data(), n, -1));
  OK(frugal_lookup(t, ops.data(), 1));
  OK(frugal_step_end(t, 0, 0));
}

TEST_P(Messages, OfTables) {
  Open(1);
  frugal_table* table = Table("t");
  frugal_table* t = nullptr;
  auto create = [&](const std::function<void(frugal_table_config*)>& change) {
    frugal_table_config c = TableConfig("other");
    change(&c);
    return frugal_table_create(engine, &c, &t);
  };
  const std::string longest(256, 'n');
  SAYS(create([](auto* c) { c->struct_size = 4; }), STRUCT_SIZE,
       "frugal_table_config.struct_size is 4");
  SAYS(create([](auto* c) { c->name = nullptr; }), INVALID_ARGUMENT, "name is NULL", "1..255");
  SAYS(create([](auto* c) { c->name = ""; }), INVALID_ARGUMENT, "name is ''", "1..255");
  SAYS(create([&](auto* c) { c->name = longest.c_str(); }), INVALID_ARGUMENT, "255 bytes", "nnnn");
  SAYS(create([](auto* c) { c->name = "t"; }), EXISTS, "'t'", "another name");
  SAYS(create([](auto* c) { c->rows = 0; }), INVALID_ARGUMENT, "rows is 0", "1..2^32-2");
  SAYS(create([](auto* c) { c->rows = uint64_t{1} << 32; }), INVALID_ARGUMENT, "'other'",
       "rows is 4294967296");
  SAYS(create([](auto* c) { c->rows = ~uint64_t{0}; }), INVALID_ARGUMENT, "'other'",
       "rows is -1 (unsigned 18446744073709551615)");
  SAYS(create([](auto* c) { c->dim = 0; }), INVALID_ARGUMENT, "'other'", "dim is 0", "1..65536");
  SAYS(create([](auto* c) { c->key_space = 5; }), INVALID_ARGUMENT, "'other'", "key_space is 5",
       "FRUGAL_HASHED");
  SAYS(create([](auto* c) { c->dtype = 3; }), INVALID_ARGUMENT, "'other'", "dtype is 3",
       "FRUGAL_F32");
  SAYS(create([](auto* c) { c->init = 17; }), INVALID_ARGUMENT, "'other'", "init is 17",
       "FRUGAL_INIT_");
  SAYS(create([](auto* c) { c->nan_policy = 4; }), INVALID_ARGUMENT, "'other'", "nan_policy is 4",
       "FRUGAL_NAN_");
  SAYS(create([](auto* c) { c->flags = 2; }), INVALID_ARGUMENT, "'other'", "flags 0x2");
  SAYS(create([](auto* c) { c->key_space = FRUGAL_HASHED, c->flags = FRUGAL_TABLE_LAZY; }),
       INVALID_ARGUMENT, "'other'", "FRUGAL_TABLE_LAZY", "dense");
  SAYS(create([](auto* c) { c->optimizer.kind = 7; }), INVALID_ARGUMENT, "'other'",
       "optimizer.kind is 7");
  SAYS(create([](auto* c) { c->optimizer.flags = 16; }), INVALID_ARGUMENT, "'other'", "0x10",
       "optimizer.flags");
  SAYS(create([](auto* c) { c->optimizer.lr = -0.5f; }), INVALID_ARGUMENT, "'other'",
       "optimizer.lr is -0.5", "0 or more");
  SAYS(create([](auto* c) { c->optimizer.eps = NAN; }), INVALID_ARGUMENT, "'other'",
       "optimizer.eps is ", "finite");
  SAYS(frugal_table_find(engine, "nowhere", &t), NOT_FOUND, "'nowhere'", "create");
  SAYS(frugal_table_find(engine, nullptr, &t), INVALID_ARGUMENT, "name", "NULL");
  uint64_t cursor = 0;
  size_t size = 0;
  SAYS(frugal_table_next(engine, &cursor, nullptr, 0, &size), OVERFLOW, "table '", "capacity is 0",
       "256");
  frugal_table_info info;
  info.struct_size = 3;
  SAYS(frugal_table_describe(table, &info), STRUCT_SIZE, "'t'",
       "frugal_table_info.struct_size is 3");

  frugal_trainer* trainer = Join(0);
  OK(frugal_step_begin(trainer, 5, 20000));
  SAYS(create([](auto*) {}), BUSY, "'other'", "rank 0", "step 5", "outside steps");
  uint64_t n = 0;
  SAYS(frugal_table_count(table, &n), BUSY, "'t'", "rank 0", "step 5");
  SAYS(frugal_table_drop(table), BUSY, "'t'", "rank 0", "step 5");
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  o.kind = FRUGAL_ADAM;
  SAYS(frugal_table_set_optimizer(table, 9, &o), BUSY, "'t'", "rank 0", "step 5");
  const uint64_t key = 1;
  const frugal_op op = Op(table, &key, 1, rows);
  OK(frugal_push_grad(trainer, &op, 1));
  OK(frugal_step_end(trainer, 5, 0));
  SAYS(frugal_table_set_optimizer(table, 4, &o), STEP_RANGE, "'t'", "first_step 4", "6");
  SAYS(frugal_table_set_optimizer(table, 9, &o), INVALID_ARGUMENT, "optimizer.kind is 4", "'t'",
       "fixed");
  o.struct_size = 1;
  SAYS(frugal_table_set_optimizer(table, 9, &o), STRUCT_SIZE, "'t'",
       "frugal_optimizer.struct_size is 1");

  const uint64_t keys[2] = {3, ~uint64_t{0}};
  SAYS(frugal_get(table, keys, 2, 0, rows, 0, nullptr), KEY_OUT_OF_RANGE, "'t'", "id -1",
       "position 1", "0..99");
  SAYS(frugal_put(table, keys, 2, 0, rows, 0), KEY_OUT_OF_RANGE, "'t'", "id -1", "position 1",
       "0..99");
  SAYS(frugal_delete(table, keys, 2, nullptr), KEY_OUT_OF_RANGE, "'t'", "id -1", "position 1",
       "0..99");
  SAYS(frugal_get(table, keys, 1, 8, rows, 0, nullptr), INVALID_ARGUMENT, "'t'", "flags 0x8",
       "FRUGAL_WITH_STATE");
  SAYS(frugal_get(table, nullptr, 1, 0, rows, 0, nullptr), INVALID_ARGUMENT, "'t'", "keys", "NULL");
  SAYS(frugal_get(table, keys, 1, 0, rows, 8, nullptr), INVALID_ARGUMENT, "'t'", "row_stride 8",
       "16");
  SAYS(frugal_put(table, keys, 1, 0, rows, 18), INVALID_ARGUMENT, "'t'", "row_stride 18",
       "multiple of 4");
  SAYS(frugal_put(table, keys, 2, 0, rows, size_t{1} << 60), INVALID_ARGUMENT, "'t'", "row_stride",
       "2 rows", "address space");
  SAYS(frugal_get(table, keys, ~size_t{0}, 0, rows, 0, nullptr), INVALID_ARGUMENT, "'t'",
       "18446744073709551615 keys", "2^32 - 2");
  frugal_table* small = Table("small", FRUGAL_HASHED, 2);
  const uint64_t three[3] = {7, ~uint64_t{1}, 9};
  SAYS(frugal_put(small, three, 3, 0, rows, 0), TABLE_FULL, "'small'", "key ", "2 rows",
       "more rows");
}

TEST_P(Messages, OfTrainers) {
  Open(2);
  frugal_trainer *first = Join(0), *t = nullptr;
  auto join = [&](const std::function<void(frugal_trainer_config*)>& change) {
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = 1;
    change(&c);
    return frugal_trainer_create(engine, &c, &t);
  };
  SAYS(join([](auto* c) { c->struct_size = 1; }), STRUCT_SIZE,
       "frugal_trainer_config.struct_size is 1");
  SAYS(join([](auto* c) { c->rank = 2; }), INVALID_ARGUMENT, "rank 2", "0..1");
  SAYS(join([](auto* c) { c->rank = 0; }), EXISTS, "rank 0", "trainer");
  SAYS(join([](auto* c) { c->cache_ratio = 1.5; }), INVALID_ARGUMENT, "cache_ratio is 1.5", "0..1");
  SAYS(join([](auto* c) { c->cache_ratio = NAN; }), INVALID_ARGUMENT, "cache_ratio", "0..1");
  SAYS(join([](auto* c) { c->flags = 4; }), INVALID_ARGUMENT, "flags 0x4");
  SAYS(join([](auto* c) { c->device = "tpu:0"; }), INVALID_ARGUMENT, "'tpu:0'", "cuda:N");
  SAYS(join([](auto* c) { c->device = "cuda:777"; }), DEVICE, "cuda:777");
  if (!attached())
    SAYS(join([](auto* c) { c->flags = FRUGAL_TRAINER_REPLACE; }), UNSUPPORTED,
         "FRUGAL_TRAINER_REPLACE", "service");
  SAYS(frugal_set_stream(first, rows), UNSUPPORTED, "rank 0", "cpu", "no streams");
  // A trainer joins again between steps.
  OK(join([](auto*) {}));
  OK(frugal_step_begin(first, 0, 20000));
  OK(frugal_step_begin(t, 0, 20000));
  OK(frugal_step_end(t, 0, 0));
  OK(frugal_trainer_close(t));
  SAYS(join([](auto*) {}), BUSY, "rank 1", "rank 0 is inside step 0", "between steps");
}

TEST_P(Messages, OfSteps) {
  Open(2);
  frugal_table* table = Table("t");
  frugal_trainer *t = Join(0), *other = Join(1);
  const uint64_t keys[4] = {0, 1, 2, 3}, wrong[2] = {3, ~uint64_t{4}};
  frugal_op op = Op(table, keys, 4, rows);
  SAYS(frugal_step_begin(t, ~uint64_t{0}, 0), INVALID_ARGUMENT, "step 18446744073709551615",
       "up to");
  SAYS(frugal_lookup(t, &op, 1), NOT_IN_STEP, "rank 0", "step_begin");
  SAYS(frugal_push_grad(t, &op, 1), NOT_IN_STEP, "rank 0", "step_begin");
  SAYS(frugal_step_end(t, 0, 0), NOT_IN_STEP, "rank 0", "step_begin");
  SAYS(frugal_step_abort(t), NOT_IN_STEP, "rank 0", "step_begin");
  void* memory = nullptr;
  SAYS(frugal_borrow(t, 64, &memory), NOT_IN_STEP, "rank 0", "step_begin");
  frugal_batch *batch = nullptr, *later = nullptr;
  OK(frugal_prefetch(t, 0, &op, 1, &batch));
  OK(frugal_prefetch(t, 1, &op, 1, &later));
  SAYS(frugal_prefetch(t, 100, &op, 1, nullptr), STEP_RANGE, "100", "lookahead 10");
  SAYS(frugal_prefetch(t, 0, nullptr, 1, nullptr), INVALID_ARGUMENT, "ops", "NULL");
  OK(frugal_step_begin(t, 0, 20000));
  SAYS(frugal_step_begin(t, 1, 20000), STEP_ORDER, "rank 0", "inside step 0", "end or abort");
  SAYS(frugal_step_end(t, 3, 0), STEP_ORDER, "rank 0", "step 0", "not 3");
  SAYS(frugal_step_end(t, 0, 4), INVALID_ARGUMENT, "flags 0x4", "FRUGAL_STEP_SKIP");
  SAYS(frugal_prefetch(t, 0, &op, 1, nullptr), STEP_RANGE, "rank 0", "step 0", "step 1 or later");
  SAYS(frugal_prefetch(t, 11, &op, 1, nullptr), STEP_RANGE, "step 11", "is 10", "lookahead 10");
  SAYS(frugal_prefetch_cancel(t, batch), STEP_RANGE, "step 0 has begun");
  SAYS(frugal_prefetch_cancel(other, later), INVALID_ARGUMENT, "rank 1");

  frugal_op ops[3] = {op, op, op};
  auto changed = [&](const std::function<void(frugal_op*)>& change) {
    ops[1] = op;
    change(&ops[1]);
    return frugal_lookup(t, ops, 3);
  };
  const uint64_t offsets[5] = {0, 1, 2, 3, 4}, down[5] = {0, 3, 2, 3, 4}, late[5] = {1, 1, 2, 3, 4},
                 few[5] = {0, 1, 2, 3, 3};
  const char* at = "op 1 of 3";
  SAYS(changed([](auto* o) { o->struct_size = 9; }), STRUCT_SIZE, at, "frugal_op.struct_size is 9",
       "INIT");
  SAYS(changed([](auto* o) { o->flags = 4; }), INVALID_ARGUMENT, at, "'t'", "flags 0x4",
       "FRUGAL_OP_PADDING");
  SAYS(changed([](auto* o) { o->reserved = 3; }), INVALID_ARGUMENT, at, "'t'", "reserved is 3");
  SAYS(changed([](auto* o) { o->keys = nullptr; }), INVALID_ARGUMENT, at, "'t'", "keys is NULL",
       "count 4");
  SAYS(changed([](auto* o) { o->count = ~size_t{0}; }), INVALID_ARGUMENT, at,
       "18446744073709551615 keys", "2^32 - 2");
  SAYS(changed([](auto* o) { o->pooling = 8; }), INVALID_ARGUMENT, at, "'t'", "pooling 8",
       "FRUGAL_POOL_");
  SAYS(changed([](auto* o) { o->pooling = 1; }), INVALID_ARGUMENT, at, "'t'", "offsets is NULL");
  SAYS(changed([](auto* o) { o->rows_out = nullptr; }), INVALID_ARGUMENT, at, "'t'",
       "rows_out is NULL", "4 rows");
  SAYS(changed([](auto* o) { o->row_stride = 8; }), INVALID_ARGUMENT, at, "'t'", "row_stride 8",
       "from 16");
  SAYS(changed([](auto* o) { o->row_stride = size_t{1} << 62; }), INVALID_ARGUMENT, at, "'t'",
       "row_stride 4611686018427387904", "4 rows");
  SAYS(changed([&](auto* o) { o->weights = rows; }), INVALID_ARGUMENT, at, "'t'", "weights",
       "FRUGAL_POOL_SUM");
  SAYS(changed([&](auto* o) { o->weight_grads_out = rows; }), INVALID_ARGUMENT, at, "'t'",
       "weight_grads_out");
  auto pooled = [&](const uint64_t* from) {
    return changed([&](auto* o) { o->pooling = FRUGAL_POOL_SUM, o->bags = 4, o->offsets = from; });
  };
  OK(pooled(offsets));
  SAYS(pooled(down), INVALID_ARGUMENT, at, "'t'", "offsets[2] is 2 after 3");
  SAYS(pooled(late), INVALID_ARGUMENT, at, "'t'", "offsets[0] is 1", "0");
  SAYS(pooled(few), INVALID_ARGUMENT, at, "'t'", "offsets is 3", "must be 4");
  SAYS(changed([](auto* o) { o->pooling = 1, o->bags = ~size_t{0}, o->offsets = o->keys; }),
       INVALID_ARGUMENT, at, "18446744073709551615 bags");
  SAYS(changed([&](auto* o) { o->keys = wrong, o->count = 2; }), KEY_OUT_OF_RANGE, at, "'t'",
       "id -5", "position 1", "0..99");
  SAYS(changed([&](auto* o) { o->batch = later; }), INVALID_ARGUMENT, at, "'t'", "step 1",
       "step 0");
  SAYS(changed([&](auto* o) { o->batch = batch, o->part = 7; }), INVALID_ARGUMENT, at, "'t'",
       "part 7", "1 parts");
  SAYS(changed([&](auto* o) { o->batch = batch, o->keys = nullptr, o->flags = 1; }),
       INVALID_ARGUMENT, at, "padding key");
  ops[1] = Op(table, wrong, 2, rows);
  SAYS(frugal_prefetch(t, 2, ops, 3, nullptr), KEY_OUT_OF_RANGE, at, "'t'", "id -5", "position 1");
  SAYS(frugal_read(engine, t, ops, 3, 20000), KEY_OUT_OF_RANGE, at, "'t'", "id -5", "position 1");
  SAYS(frugal_push_grad(t, ops, 3), KEY_OUT_OF_RANGE, at, "'t'", "id -5", "position 1");
  ops[1] = op;
  ops[1].batch = batch;
  SAYS(frugal_read(engine, t, ops, 3, 20000), INVALID_ARGUMENT, at, "'t'", "batch must be NULL");
  ops[1] = op;
  ops[1].grads = nullptr;
  SAYS(frugal_push_grad(t, ops, 3), INVALID_ARGUMENT, at, "'t'", "grads is NULL", "4 rows");
  float nan[16];
  std::fill(std::begin(nan), std::end(nan), NAN);
  ops[1].grads = nan;
  SAYS(frugal_push_grad(t, ops, 3), NAN, at, "'t'", "NaN", "nan_policy", "step 0",
       "row 0, column 0");
  frugal_table* small = nullptr;
  OK(frugal_step_abort(t));
  small = Table("small", FRUGAL_HASHED, 2);
  SAYS(frugal_step_begin(other, 0, 0), STEP_ABORTED, "step 0", "begin");
  OK(frugal_step_begin(t, 0, 20000));
  const uint64_t three[3] = {1, ~uint64_t{1}, 3};
  ops[1] = Op(small, three, 3, rows);
  SAYS(frugal_lookup(t, ops, 3), TABLE_FULL, at, "'small'", "key ", "2 rows", "more rows");
  // An attached trainer asks the controller for the last only.
  frugal_op last[2] = {op, ops[1]};
  last[0].batch = batch;
  SAYS(frugal_lookup(t, last, 2), TABLE_FULL, "op 1 of 2", "'small'", "2 rows");
  SAYS(frugal_push_grad(t, last, 2), TABLE_FULL, "op 1 of 2", "'small'", "2 rows");
  OK(frugal_step_end(t, 0, 0));
  SAYS(frugal_step_begin(t, 1, 30), TIMEOUT, "step 1", "rank 1", "call again");
  SAYS(frugal_step_begin(t, 4, 30), STEP_ORDER, "rank 0", "step 1", "not 4");
  SAYS(frugal_read(engine, t, &op, 1, 30), TIMEOUT, "step 0", "call again");
  SAYS(frugal_step_begin(t, 1, -9), INVALID_ARGUMENT, "timeout_ms -9");
  uint64_t n = 0;
  SAYS(frugal_table_count(table, &n), BUSY, "'t'", "step 0", "call when");
}

TEST_P(Messages, OfObservation) {
  Open(1);
  size_t size = 0;
  char text[4];
  SAYS(frugal_metrics(engine, text, sizeof text, &size), OVERFLOW, " bytes", "capacity is 4",
       "more");
  SAYS(frugal_metrics(engine, nullptr, 4, &size), INVALID_ARGUMENT, "text_out", "NULL");
  frugal_stats stats;
  stats.struct_size = 7;
  SAYS(frugal_get_stats(engine, &stats), STRUCT_SIZE, "frugal_stats.struct_size is 7");
  SAYS(frugal_trace_stop(engine, nullptr), NOT_FOUND, "no trace", "frugal_trace_start");
  SAYS(frugal_trace_start(engine, 0), INVALID_ARGUMENT, "events is 0", "1..");
  OK(frugal_trace_start(engine, 16));
  SAYS(frugal_trace_start(engine, 16), EXISTS, "trace", "stop it");
  SAYS(frugal_trace_stop(engine, "/nowhere/at/all"), INVALID_ARGUMENT, "'/nowhere/at/all",
       "No such file");
  if (!attached()) {  // else the controller writes the file
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit limit{16, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    SAYS(frugal_trace_stop(engine, "/tmp/frugal_messages_trace"), NO_SPACE,
         "'/tmp/frugal_messages_trace' cannot be written", "ulimit -f");
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  }
  OK(frugal_trace_stop(engine, nullptr));
  if (attached()) {
    SAYS(frugal_serve(engine, "x"), UNSUPPORTED, "another process");
  } else {
    SAYS(frugal_serve(engine, nullptr), INVALID_ARGUMENT, "address", "NULL");
#ifdef FRUGAL_CONTROLLER
    SAYS(frugal_serve(engine, "x"), INVALID_ARGUMENT, "FRUGAL_BACKING_SHM");
#endif
  }
}

TEST_P(Messages, OfCheckpoints) {
  Open(1);
  const Folder folder;
  const std::string path = folder.path();
  uint64_t number = 0;
  frugal_checkpoint_info info{};
  info.struct_size = 1;
  SAYS(frugal_checkpoint_wait(engine, 1, 0, &info), STRUCT_SIZE,
       "frugal_checkpoint_info.struct_size is 1");
  info.struct_size = sizeof info;
  frugal_folder_config folder_config = FRUGAL_FOLDER_CONFIG_INIT;
  folder_config.keep = 0;
  SAYS(frugal_folder_open(engine, path.c_str(), &folder_config), INVALID_ARGUMENT, "keep is 0",
       "1 or more");
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  config.name = "a/b";
  SAYS(frugal_checkpoint(engine, &config, &number), INVALID_ARGUMENT, "'a/b'", "no slash");
  config.name = nullptr;
  config.blob_size = 3;
  SAYS(frugal_checkpoint(engine, &config, &number), INVALID_ARGUMENT, "blob_size is 3", "NULL");
  config.blob = "abc";
  config.blob_rank = 1;
  SAYS(frugal_checkpoint(engine, &config, &number), INVALID_ARGUMENT, "blob_rank is 1",
       "world_size 1");
  config.blob_rank = 0;
  config.step = 7;
  SAYS(frugal_checkpoint(engine, &config, &number), INVALID_ARGUMENT, "step 7",
       "frugal_checkpoint_blob");
  config.step = FRUGAL_NO_STEP;
  frugal_trainer* const trainer = Join(0);
  OK(frugal_step_begin(trainer, 0, -1));
  if (attached()) {
    bool due;
    SAYS(frugal_folder_open(engine, path.c_str(), nullptr), UNSUPPORTED, "another process");
    SAYS(frugal_folder_close(engine), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint(engine, nullptr, &number), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint_wait(engine, 1, 0, &info), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint_cancel(engine, 1), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint_delete(engine, 1), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint_due(trainer, &due), UNSUPPORTED, "another process");
    SAYS(frugal_checkpoint_blob(trainer, "", 0), UNSUPPORTED, "another process");
    SAYS(frugal_restore(engine, nullptr, &info), UNSUPPORTED, "another process");
    return;
  }
  SAYS(frugal_folder_open(engine, path.c_str(), nullptr), BUSY, "rank 0", "step 0");
  OK(frugal_step_end(trainer, 0, 0));
  SAYS(frugal_checkpoint_blob(trainer, "", 0), NOT_IN_STEP, "rank 0", "step_begin");
  SAYS(frugal_checkpoint(engine, nullptr, &number), NOT_FOUND, "no folder", "open one");
  SAYS(frugal_restore(engine, nullptr, &info), NOT_FOUND, "no folder", "name one");
  OK(frugal_folder_open(engine, path.c_str(), nullptr));
  SAYS(frugal_checkpoint_wait(engine, 0, 0, &info), NOT_FOUND, "no checkpoint was begun");
  SAYS(frugal_restore(engine, nullptr, &info), NOT_FOUND, path, "no checkpoint");
  SAYS(frugal_folder_open(engine, path.c_str(), nullptr), EXISTS, path, "close that");
  config.step = 0;
  config.blob = nullptr;
  config.blob_size = 0;
  SAYS(frugal_checkpoint(engine, &config, &number), STEP_RANGE, "step 0", "later");
  config.step = 3;
  OK(frugal_checkpoint(engine, &config, &number));
  SAYS(frugal_checkpoint(engine, &config, &number), BUSY, "checkpoint 1", "cancel");
  SAYS(frugal_folder_close(engine), BUSY, "checkpoint 1", "cancel");
  SAYS(frugal_checkpoint_wait(engine, 1, 0, &info), TIMEOUT, "checkpoint 1", "call again");
  SAYS(frugal_checkpoint_wait(engine, 2, 0, &info), NOT_FOUND, "checkpoint 2");
  OK(frugal_checkpoint_cancel(engine, 1));
  SAYS(frugal_checkpoint_wait(engine, 1, 0, &info), CLOSED, "cancelled");
  SAYS(frugal_checkpoint_cancel(engine, 1), NOT_FOUND, "checkpoint 1");
  SAYS(frugal_checkpoint_delete(engine, 1), NOT_FOUND, "1.checkpoint");
  OK(frugal_checkpoint(engine, nullptr, &number));
  OK(frugal_checkpoint_wait(engine, number, -1, nullptr));
  SAYS(frugal_restore(engine, nullptr, &info), BUSY, "steps have begun");
  char bytes[1];
  SAYS(frugal_checkpoint_read_blob(path.c_str(), number, 0, bytes, 1, nullptr), NOT_FOUND, "rank 0",
       "no blob");
  SAYS(frugal_checkpoint_copy(path.c_str(), number, path.c_str()), BUSY, path);
  SAYS(frugal_checkpoint_copy("/nowhere", number, path.c_str()), NOT_FOUND, "/nowhere");
}

TEST_P(Messages, OfMemory) {
  Open(1, [](frugal_config* c) { c->host_bytes = uint64_t{24} << 20; });
  frugal_table* t = nullptr;
  frugal_table_config c = TableConfig("large", FRUGAL_DENSE, 10'000'000);
  SAYS(frugal_table_create(engine, &c, &t), OUT_OF_MEMORY, "'large'", "10000000 rows of 4",
       "host_bytes", "25165824 bytes", "smaller");
  c.rows = 0xfffffffe;
  c.dim = 65536;
  SAYS(frugal_table_create(engine, &c, &t), OUT_OF_MEMORY, "'large'", "bytes", "");
  // One that grows: the call that is too much names its table.
  frugal_table* hashed = Table("grows", FRUGAL_HASHED, 10'000'000);
  std::vector<uint64_t> keys(2'000'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 77;
  std::vector<float> values(keys.size() * kDim);
  SAYS(frugal_put(hashed, keys.data(), keys.size(), 0, values.data(), 0), OUT_OF_MEMORY, "'grows'",
       "host_bytes", "of 25165824 bytes", "raise the limit");
}

// What belongs to another engine, or is done already.
TEST_P(Messages, OfOthers) {
  Open(1);
  frugal_table* table = Table("t");
  frugal_trainer* trainer = Join(0);
  frugal_config c = FRUGAL_CONFIG_INIT;
  frugal_engine* other = nullptr;
  OK(frugal_open(&c, &other));
  const frugal_table_config tc = TableConfig("of another");
  frugal_table* foreign = nullptr;
  OK(frugal_table_create(other, &tc, &foreign));
  const frugal_trainer_config rank = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* stranger = nullptr;
  OK(frugal_trainer_create(other, &rank, &stranger));
  const uint64_t key = 1;
  frugal_op ops[2] = {Op(table, &key, 1, rows), Op(foreign, &key, 1, rows)};
  SAYS(frugal_prefetch(trainer, 0, ops, 2, nullptr), BAD_HANDLE, "op 1 of 2", "'of another'",
       "another engine", "give one of this");
  frugal_batch *batch = nullptr, *theirs = nullptr;
  OK(frugal_prefetch(trainer, 0, ops, 1, &batch));
  OK(frugal_prefetch(stranger, 0, &ops[1], 1, &theirs));
  SAYS(frugal_prefetch_cancel(trainer, theirs), BAD_HANDLE, "another engine", "cancel it there");
  OK(frugal_step_begin(trainer, 0, 20000));
  frugal_table* second = nullptr;
  ops[0].batch = batch;
  ops[0].part = 1;
  SAYS(frugal_lookup(trainer, ops, 1), INVALID_ARGUMENT, "'t'", "part 1", "has 1 parts");
  OK(frugal_step_abort(trainer));
  OK(frugal_table_drop(table));
  SAYS(frugal_table_drop(table), BAD_HANDLE, "table", "closed");
  SAYS(frugal_table_find(engine, "t", &second), NOT_FOUND, "'t'", "create");
  SAYS(frugal_table_find(engine, "", &second), NOT_FOUND, "''", "1..255");
  SAYS(frugal_table_find(engine, std::string(300, 'n').c_str(), &second), NOT_FOUND, "nnnn",
       "1..255");
  OK(frugal_trainer_close(trainer));
  SAYS(frugal_trainer_close(trainer), BAD_HANDLE, "trainer", "closed");
  OK(frugal_close(other));
}

TEST_P(Messages, OfAChildOfFork) {
  Open(1);
  const pid_t child = fork();
  if (child == 0) {
    SAYS(frugal_flush(engine, 0), FORKED, "process that opened it", "after fork()");
    _exit(HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(child, waitpid(child, &status, 0));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  g_provoked.insert(FRUGAL_ERR_FORKED);  // in the child
}

TEST_P(Messages, OfWhatIsClosed) {
  Open(2);
  frugal_trainer *t = Join(0), *other = Join(1);
  for (frugal_trainer* each : {t, other}) OK(frugal_step_begin(each, 0, 20000));
  OK(frugal_step_end(t, 0, 0));
  frugal_stats stats;
  stats.struct_size = sizeof stats;
  OK(frugal_get_stats(engine, &stats));
  const uint64_t before = stats.gate_waits;
  std::thread waits([&] { SAYS(frugal_step_begin(t, 1, 60000), CLOSED, "closed"); });
  do {
    OK(frugal_get_stats(engine, &stats));
  } while (stats.gate_waits == before);
  OK(frugal_close(engine));
  waits.join();
  engine = nullptr;
}

TEST(Background, Failed) {
  frugal_engine* e = nullptr;
  OK(frugal_open(nullptr, &e));
  auto engine = frugal::object_of<frugal::Session>(e)->here();
  FailBackground(*engine, FRUGAL_ERR_OUT_OF_MEMORY);
  engine.reset();
  SAYS(frugal_health(e), OUT_OF_MEMORY, "background", "close the engine");
  SAYS(frugal_flush(e, 0), UNHEALTHY, "FRUGAL_ERR_OUT_OF_MEMORY", "close it", "restore");
  OK(frugal_close(e));
}

#ifdef FRUGAL_CONTROLLER

TEST(Checkpoints, OfABadFolder) {
  const Folder folder;
  frugal_engine* e = nullptr;
  OK(frugal_open(nullptr, &e));
  const auto restore = [&] {
    frugal_restore_config config = FRUGAL_RESTORE_CONFIG_INIT;
    const std::string path = folder.path();
    config.folder = path.c_str();
    config.number = 1;
    return frugal_restore(e, &config, nullptr);
  };
  SAYS(restore(), NOT_FOUND, folder.path(), "1.checkpoint");
  frugal::Manifest manifest;
  manifest.sequence = 1;
  frugal::Vector<uint64_t> words;
  OK(frugal::encode_manifest(manifest, &words));
  const auto write = [&] {
    std::ofstream(folder.path() + "/1.checkpoint", std::ios::binary)
        .write(reinterpret_cast<const char*>(words.data()),
               static_cast<std::streamsize>(words.size() * sizeof(uint64_t)));
  };
  auto* envelope = reinterpret_cast<frugal::ManifestEnvelope*>(words.data());
  envelope->version = 2;
  write();
  SAYS(restore(), DAMAGED, folder.path(), "1.checkpoint", "checksum", "restore");
  envelope->envelope_sum =
      frugal::checksum(envelope, offsetof(frugal::ManifestEnvelope, envelope_sum), 0);
  write();
  SAYS(restore(), TOO_NEW, folder.path(), "version 2", "version 1", "use a later one");
  OK(frugal_close(e));
}

TEST(Peers, ThatCannotBeServed) {
  const Folder folder;
  frugal_config c = FRUGAL_CONFIG_INIT;
  c.backing = FRUGAL_BACKING_SHM;
  frugal_engine *e = nullptr, *other = nullptr;
  OK(frugal_open(&c, &e));
  OK(frugal_open(&c, &other));
  const std::string nowhere = folder.path() + "/none/service", address = folder.address();
  SAYS(frugal_serve(e, ""), INVALID_ARGUMENT, "address", "path");
  SAYS(frugal_serve(e, nowhere.c_str()), INVALID_ARGUMENT, nowhere, "folder");
  std::ofstream(address) << "a file";
  SAYS(frugal_serve(e, address.c_str()), EXISTS, address, "no socket", "choose");
  c.service = address.c_str();
  frugal_engine* attached = nullptr;
  SAYS(frugal_open(&c, &attached), INVALID_ARGUMENT, address, "no socket");
  unlink(address.c_str());
  OK(frugal_serve(e, address.c_str()));
  SAYS(frugal_serve(e, address.c_str()), EXISTS, "served already", "close it");
  SAYS(frugal_serve(other, address.c_str()), EXISTS, address, "choose");
  OK(frugal_close(e));
  OK(frugal_close(other));
}

TEST(Peers, ThatAreNotThere) {
  const Folder folder;
  frugal_config c = FRUGAL_CONFIG_INIT;
  const std::string address = folder.address();
  c.service = address.c_str();
  c.timeout_ms = 20;
  frugal_engine* e = nullptr;
  SAYS(frugal_open(&c, &e), PEER_LOST, address, "20 ms", "timeout_ms");
  const std::string far = "/" + std::string(200, 'x');
  c.service = far.c_str();
  SAYS(frugal_open(&c, &e), INVALID_ARGUMENT, "201 bytes", "107");
}

// A declaration whose controller says nothing, while its trainer or its engine is closed.
TEST(Peers, ThatAreSlowBesideAClose) {
  for (bool whole : {false, true}) {
    const Folder folder;
    const std::string address = folder.address();
    ControllerProgram controller(address);
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.service = address.c_str();
    c.timeout_ms = 2000;
    frugal_engine* e = nullptr;
    OK(frugal_open(&c, &e));
    const frugal_table_config tc = Opened::TableConfig("t");
    frugal_table* table = nullptr;
    OK(frugal_table_create(e, &tc, &table));
    const frugal_trainer_config rank = FRUGAL_TRAINER_CONFIG_INIT;
    frugal_trainer* t = nullptr;
    OK(frugal_trainer_create(e, &rank, &t));
    controller.stop();
    std::thread declares([&] {
      const uint64_t key = 1;
      const frugal_op op = Opened::Op(table, &key, 1, nullptr);
      SAYS(frugal_prefetch(t, 0, &op, 1, nullptr), CLOSED, "was closed");
    });
    usleep(200000);  // by then it waits, as a rule
    if (!whole) (void)frugal_trainer_close(t);
    OK(frugal_close(e));
    declares.join();
  }
}

// A host that dies, whole or in disorder.
TEST(Peers, ThatEnd) {
  for (bool whole : {true, false}) {
    const Folder folder;
    const std::string address = folder.address();
    int up[2], down[2];
    ASSERT_EQ(0, pipe(up));
    ASSERT_EQ(0, pipe(down));
    const pid_t host = fork();
    if (host == 0) {
      close(up[1]);
      frugal_config c = FRUGAL_CONFIG_INIT;
      c.backing = FRUGAL_BACKING_SHM;
      frugal_engine* e = nullptr;
      if (frugal_open(&c, &e) || frugal_serve(e, address.c_str())) _exit(1);
      char byte = 0;
      if (write(down[1], &byte, 1) != 1) _exit(2);
      if (read(up[0], &byte, 1) != 1) _exit(3);
      auto engine = frugal::object_of<frugal::Session>(e)->here();
      if (!whole) RootOf(*engine->ledger())->magic = 0;
      _exit(0);
    }
    close(up[0]);
    close(down[1]);
    char byte = 1;
    ASSERT_EQ(1, read(down[0], &byte, 1));
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.service = address.c_str();
    frugal_engine* e = nullptr;
    OK(frugal_open(&c, &e));
    ASSERT_EQ(1, write(up[1], &byte, 1));
    int status = 0;
    ASSERT_EQ(host, waitpid(host, &status, 0));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    uint64_t step = 0;
    if (whole) {
      OK(frugal_committed_step(e, &step));
      SAYS(frugal_flush(e, 1000), PEER_LOST, "controller", "open the engine again");
    } else {
      SAYS(frugal_committed_step(e, &step), INTERNAL, "cannot be read out", "its ledger");
    }
    OK(frugal_close(e));
    close(up[1]);
    close(down[0]);
  }
}

#endif

// Of the header. Those that this program's build cannot meet are left out.
int EachStatus() {
  std::ifstream header(FRUGAL_HEADER);
  const std::string text((std::istreambuf_iterator<char>(header)),
                         std::istreambuf_iterator<char>());
  const std::regex one("(FRUGAL_ERR_\\w+) = (-\\d+)");
  int missing = 0, all = 0;
  for (auto at = std::sregex_iterator(text.begin(), text.end(), one); at != std::sregex_iterator();
       ++at) {
    ++all;
    const int32_t status = std::stoi((*at)[2]);
    if (g_provoked.count(status)) continue;
    // Only a broken disk has it: file_test and trace_test have its messages.
    if (status == FRUGAL_ERR_IO) continue;
#ifndef FRUGAL_CONTROLLER
    if (status == FRUGAL_ERR_PEER_LOST || status == FRUGAL_ERR_INTERNAL ||
        status == FRUGAL_ERR_DAMAGED || status == FRUGAL_ERR_TOO_NEW)
      continue;
#endif
    std::printf("%s is provoked by no call here\n", (*at)[1].str().c_str());
    ++missing;
  }
  if (all < 20) std::printf("only %d statuses in %s\n", all, FRUGAL_HEADER);
  return missing == 0 && all >= 20 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const bool whole = testing::GTEST_FLAG(filter) == "*";
  const int failed = RUN_ALL_TESTS();
  return failed ? failed : whole ? EachStatus() : 0;
}
