// The C ABI from outside: each wrong call returns a named status with a message, changes nothing,
// and leaves other trainers able to continue.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "frugal.h"
#include "process/proc.h"
#include "reference/reference.h"
#include "support/engine.h"
#include "support/never.h"
#include "support/ok.h"

namespace {

using frugal_reference::Reference;
using frugal_test::Engine;

constexpr int64_t kWait = FRUGAL_TIMEOUT_DEFAULT;
constexpr float kUntouched = -77.5f;
const float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The call is refused with one of `statuses`, and the thread's last error says so in words.
testing::AssertionResult Refused(int32_t status, std::initializer_list<int32_t> statuses) {
  if (std::find(statuses.begin(), statuses.end(), status) == statuses.end()) {
    return testing::AssertionFailure() << "returned " << frugal_status_name(status) << " and not "
                                       << frugal_status_name(*statuses.begin());
  }
  frugal_error error;
  frugal_last_error(&error);
  if (error.status != status) {
    return testing::AssertionFailure()
           << "returned " << frugal_status_name(status) << ", but the last error is "
           << frugal_status_name(error.status);
  }
  if (error.message == nullptr || std::strlen(error.message) < 4) {
    return testing::AssertionFailure() << frugal_status_name(status) << " without a message";
  }
  return testing::AssertionSuccess();
}

#define EXPECT_REFUSED(call, ...) EXPECT_TRUE(Refused((call), {__VA_ARGS__})) << #call
// What a NULL handle is, the header leaves open: an argument that is null, or no handle.
#define EXPECT_NULL_REFUSED(call) \
  EXPECT_REFUSED(call, FRUGAL_ERR_INVALID_ARGUMENT, FRUGAL_ERR_BAD_HANDLE)

// An op on single rows with its buffers.
struct RowOp {
  RowOp(frugal_table* table, std::vector<uint64_t> keys_in, size_t dim)
      : keys(std::move(keys_in)),
        rows(keys.size() * dim, kUntouched),
        grads(keys.size() * dim, 1.0f) {
    op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = keys.size();
    op.rows_out = rows.data();
    op.grads = grads.data();
  }
  RowOp(const RowOp&) = delete;
  RowOp& operator=(const RowOp&) = delete;

  std::vector<uint64_t> keys;
  std::vector<float> rows;
  std::vector<float> grads;
  frugal_op op;
};

float GetOne(frugal_table* table, uint64_t key, uint8_t* found = nullptr) {
  float row[8] = {kUntouched};
  EXPECT_OK(frugal_get(table, &key, 1, 0, row, 0, found));
  return row[0];
}

uint64_t Count(frugal_table* table) {
  uint64_t count = 12345;
  EXPECT_OK(frugal_table_count(table, &count));
  return count;
}

std::set<uint64_t> Keys(frugal_table* table, size_t capacity = 3) {
  std::set<uint64_t> keys;
  std::vector<uint64_t> part(capacity);
  uint64_t cursor = 0;
  size_t count = 0;
  while (frugal_table_keys(table, &cursor, part.data(), capacity, &count) == FRUGAL_OK &&
         count > 0) {
    for (size_t i = 0; i < count; ++i) EXPECT_TRUE(keys.insert(part[i]).second) << part[i];
  }
  EXPECT_EQ(count, 0u);
  return keys;
}

// A whole step of one trainer that pushes 1 for each key of a table of dim 1.
void TrainStep(frugal_trainer* trainer, uint64_t step, frugal_table* table,
               std::vector<uint64_t> keys) {
  RowOp row(table, std::move(keys), 1);
  ASSERT_OK(frugal_step_begin(trainer, step, kWait));
  ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
  ASSERT_OK(frugal_step_end(trainer, step, 0));
}

// --- The library ---

TEST(Library, StatusNamesAreUnique) {
  std::set<std::string> names;
  for (int32_t status = FRUGAL_OK; status >= FRUGAL_ERR_TOO_NEW; --status) {
    const char* name = frugal_status_name(status);
    ASSERT_NE(name, nullptr);
    EXPECT_EQ(std::string(name).rfind("FRUGAL_", 0), 0u) << name;
    EXPECT_STRNE(name, "FRUGAL_UNKNOWN");
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_STREQ(frugal_status_name(FRUGAL_ERR_TIMEOUT), "FRUGAL_ERR_TIMEOUT");
  for (int32_t status : {1, -28, 1000, INT32_MIN, INT32_MAX}) {
    EXPECT_STREQ(frugal_status_name(status), "FRUGAL_UNKNOWN");
  }
}

TEST(Library, VersionIsTheHeaders) {
  char version[32];
  std::snprintf(version, sizeof(version), "%d.%d.%d", FRUGAL_VERSION_MAJOR, FRUGAL_VERSION_MINOR,
                FRUGAL_VERSION_PATCH);
  EXPECT_STREQ(frugal_version(), version);
}

TEST(Library, LastErrorIsTheThreadsOwn) {
  frugal_last_error(nullptr);
  EXPECT_NULL_REFUSED(frugal_health(nullptr));
  std::thread([] {
    frugal_error error;
    std::memset(&error, 0x5a, sizeof(error));
    frugal_last_error(&error);
    EXPECT_EQ(error.status, FRUGAL_OK);
    EXPECT_NE(error.message, nullptr);
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.struct_size = 1;
    frugal_engine* engine = nullptr;
    EXPECT_REFUSED(frugal_open(&config, &engine), FRUGAL_ERR_STRUCT_SIZE);
  }).join();
  frugal_error error;
  frugal_last_error(&error);
  EXPECT_NE(error.status, FRUGAL_ERR_STRUCT_SIZE);
  EXPECT_NE(error.status, FRUGAL_OK);
}

// A call that meets a failure on its way and ends well is not the last one that failed.
TEST(Library, LastErrorIsOfACallThatFailed) {
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 2, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_table* none = nullptr;
  EXPECT_REFUSED(frugal_table_find(engine, "nobody", &none), FRUGAL_ERR_NOT_FOUND);
  frugal_error before, after;
  frugal_last_error(&before);
  const std::string message = before.message;
  RowOp row(table, {1, 2, 3}, 1);
  ASSERT_OK(
      frugal_prefetch(trainer, 0, &row.op, 1, nullptr));  // resolves here: the table is too small
  frugal_last_error(&after);
  EXPECT_EQ(after.status, FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(message, before.message);
  EXPECT_EQ(message, after.message);
}

TEST(Library, InitFunctionsGiveTheSameBytesAsMacros) {
  const auto same = [](const void* a, const void* b, size_t n) {
    return std::memcmp(a, b, n) == 0;
  };
  // Without the padding after frugal_optimizer's last field.
  const size_t tail =
      sizeof(frugal_optimizer) - offsetof(frugal_optimizer, flags) - sizeof(uint32_t);
  {
    frugal_config a = FRUGAL_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
  {
    frugal_optimizer a = FRUGAL_OPTIMIZER_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_optimizer_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a) - tail));
  }
  {
    frugal_table_config a = FRUGAL_TABLE_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_table_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a) - tail));
  }
  {
    frugal_trainer_config a = FRUGAL_TRAINER_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_trainer_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
  {
    frugal_folder_config a = FRUGAL_FOLDER_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_folder_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
  {
    frugal_checkpoint_config a = FRUGAL_CHECKPOINT_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_checkpoint_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
  {
    frugal_restore_config a = FRUGAL_RESTORE_CONFIG_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_restore_config_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
  {
    frugal_op a = FRUGAL_OP_INIT, b;
    std::memset(&b, 0x5a, sizeof(b));
    frugal_op_init(&b);
    EXPECT_TRUE(same(&a, &b, sizeof(a)));
  }
}

// --- Opening ---

TEST(Open, DefaultsAndNullConfig) {
  frugal_engine* engine = nullptr;
  ASSERT_OK(frugal_open(nullptr, &engine));
  EXPECT_OK(frugal_health(engine));
  EXPECT_OK(frugal_flush(engine, 0));
  uint64_t step = 0;
  EXPECT_OK(frugal_committed_step(engine, &step));
  EXPECT_EQ(step, FRUGAL_NO_STEP);
  EXPECT_OK(frugal_close(engine));
  EXPECT_OK(frugal_close(nullptr));
  EXPECT_OK(frugal_trainer_close(nullptr));
  EXPECT_OK(frugal_table_drop(nullptr));
}

TEST(Open, RefusesBadConfigs) {
  frugal_engine* const untouched = reinterpret_cast<frugal_engine*>(uintptr_t{0x77});
  frugal_engine* engine = untouched;
  const auto refuses = [&](int32_t status, const std::function<void(frugal_config*)>& change) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    change(&config);
    EXPECT_REFUSED(frugal_open(&config, &engine), status);
    EXPECT_EQ(engine, untouched);
  };
  for (size_t size :
       {size_t{0}, size_t{8}, sizeof(frugal_config) - 8, sizeof(frugal_config) + 8, SIZE_MAX}) {
    refuses(FRUGAL_ERR_STRUCT_SIZE, [&](frugal_config* c) { c->struct_size = size; });
  }
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  refuses(invalid, [](frugal_config* c) { c->world_size = 0; });
  refuses(invalid, [](frugal_config* c) { c->world_size = 4097; });
  refuses(invalid, [](frugal_config* c) { c->lookahead = FRUGAL_MAX_LOOKAHEAD + 1; });
  refuses(invalid, [](frugal_config* c) { c->flush_threads = 257; });
  refuses(invalid, [](frugal_config* c) { c->flush_mode = 5; });
  refuses(invalid, [](frugal_config* c) { c->flush_mode = -1; });
  refuses(invalid, [](frugal_config* c) { c->backing = 2; });
  refuses(invalid, [](frugal_config* c) { c->flags = 1; });
  refuses(invalid, [](frugal_config* c) { c->flags = 0x80000000u; });
  refuses(invalid, [](frugal_config* c) { c->timeout_ms = -7; });
  const frugal_config config = FRUGAL_CONFIG_INIT;
  EXPECT_REFUSED(frugal_open(&config, nullptr), invalid);
}

// As long as there are no processes to attach: nothing is guessed, and the engine stays this
// process's own.
TEST(Open, ServicesThatAreNotThere) {
  frugal_config config = FRUGAL_CONFIG_INIT;
  EXPECT_EQ(config.service, nullptr);
  config.service = "/tmp/no such service";
  config.timeout_ms = 100;
  frugal_engine* none = nullptr;
  EXPECT_REFUSED(frugal_open(&config, &none), FRUGAL_ERR_PEER_LOST, FRUGAL_ERR_TIMEOUT,
                 FRUGAL_ERR_UNSUPPORTED);
  EXPECT_NE(LastMessage().find(config.service), std::string::npos);
  EXPECT_EQ(none, nullptr);
  config.service = nullptr;
  config.flags = FRUGAL_OBSERVE;
  EXPECT_REFUSED(frugal_open(&config, &none), FRUGAL_ERR_INVALID_ARGUMENT);
  Engine engine(1, [](frugal_config* c) { c->backing = FRUGAL_BACKING_SHM; });
  EXPECT_REFUSED(frugal_serve(engine, "/no such folder/service"), FRUGAL_ERR_INVALID_ARGUMENT,
                 FRUGAL_ERR_UNSUPPORTED);
  EXPECT_REFUSED(frugal_serve(Engine(), "/tmp/frugal_none"), FRUGAL_ERR_INVALID_ARGUMENT);
  TrainStep(engine.Trainer(0), 0, engine.Table("t", FRUGAL_DENSE, 10, 1), {1});
}

TEST(Open, ExtremesThatAreAllowed) {
  for (uint32_t threads : {0u, 8u}) {
    Engine engine(4096, [&](frugal_config* c) {
      c->lookahead = FRUGAL_MAX_LOOKAHEAD;
      c->flush_threads = threads;
      c->pending_bytes = 0;
    });
    EXPECT_OK(frugal_health(engine));
  }
  Engine engine(1, [](frugal_config* c) {
    c->lookahead = 0;
    c->staleness = FRUGAL_STALENESS_ASYNC;
    c->pending_bytes = UINT64_MAX;
    c->timeout_ms = FRUGAL_TIMEOUT_INFINITE;
    c->backing = FRUGAL_BACKING_SHM;
  });
  EXPECT_OK(frugal_health(engine));
}

// --- Handles ---

TEST(Handles, ClosedOnesAreRefusedEverywhere) {
  frugal_engine* engine = nullptr;
  ASSERT_OK(frugal_open(nullptr, &engine));
  frugal_table_config table_config = FRUGAL_TABLE_CONFIG_INIT;
  table_config.name = "t";
  table_config.rows = 10;
  table_config.dim = 1;
  frugal_table* table = nullptr;
  ASSERT_OK(frugal_table_create(engine, &table_config, &table));
  frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* trainer = nullptr;
  ASSERT_OK(frugal_trainer_create(engine, &trainer_config, &trainer));
  RowOp row(table, {1, 2}, 1);
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 3, &row.op, 1, &batch));
  ASSERT_OK(frugal_close(engine));

  const int32_t bad = FRUGAL_ERR_BAD_HANDLE;
  uint64_t number = 5;
  size_t size = 0;
  void* memory = nullptr;
  frugal_table* table_out = nullptr;
  frugal_trainer* trainer_out = nullptr;
  frugal_batch* batch_out = nullptr;
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  frugal_table_info info;
  info.struct_size = sizeof(info);
  frugal_stats stats;
  stats.struct_size = sizeof(stats);
  float x = 0;
  EXPECT_REFUSED(frugal_close(engine), bad);
  EXPECT_REFUSED(frugal_health(engine), bad);
  EXPECT_REFUSED(frugal_flush(engine, 0), bad);
  EXPECT_REFUSED(frugal_committed_step(engine, &number), bad);
  EXPECT_REFUSED(frugal_get_stats(engine, &stats), bad);
  EXPECT_REFUSED(frugal_metrics(engine, nullptr, 0, &size), bad);
  EXPECT_REFUSED(frugal_trace_start(engine, 10), bad);
  EXPECT_REFUSED(frugal_trace_stop(engine, nullptr), bad);
  EXPECT_REFUSED(frugal_serve(engine, "/tmp/none"), bad);
  frugal_checkpoint_info checkpoint = {};
  checkpoint.struct_size = sizeof checkpoint;
  bool due = false;
  EXPECT_REFUSED(frugal_folder_open(engine, "/tmp/none", nullptr), bad);
  EXPECT_REFUSED(frugal_folder_close(engine), bad);
  EXPECT_REFUSED(frugal_checkpoint(engine, nullptr, &number), bad);
  EXPECT_REFUSED(frugal_checkpoint_wait(engine, 1, 0, &checkpoint), bad);
  EXPECT_REFUSED(frugal_checkpoint_cancel(engine, 1), bad);
  EXPECT_REFUSED(frugal_checkpoint_delete(engine, 1), bad);
  EXPECT_REFUSED(frugal_restore(engine, nullptr, &checkpoint), bad);
  EXPECT_REFUSED(frugal_checkpoint_due(trainer, &due), bad);
  EXPECT_REFUSED(frugal_checkpoint_blob(trainer, "", 0), bad);
  EXPECT_REFUSED(frugal_table_create(engine, &table_config, &table_out), bad);
  EXPECT_REFUSED(frugal_table_find(engine, "t", &table_out), bad);
  EXPECT_REFUSED(frugal_table_next(engine, &number, nullptr, 0, &size), bad);
  EXPECT_REFUSED(frugal_trainer_create(engine, &trainer_config, &trainer_out), bad);
  EXPECT_REFUSED(frugal_read(engine, nullptr, &row.op, 1, 0), bad);
  EXPECT_REFUSED(frugal_table_drop(table), bad);
  EXPECT_REFUSED(frugal_table_describe(table, &info), bad);
  EXPECT_REFUSED(frugal_table_count(table, &number), bad);
  EXPECT_REFUSED(frugal_table_keys(table, &number, &number, 1, &size), bad);
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 0, &optimizer), bad);
  EXPECT_REFUSED(frugal_get(table, &number, 1, 0, &x, 0, nullptr), bad);
  EXPECT_REFUSED(frugal_put(table, &number, 1, 0, &x, 0), bad);
  EXPECT_REFUSED(frugal_delete(table, &number, 1, nullptr), bad);
  EXPECT_REFUSED(frugal_trainer_close(trainer), bad);
  EXPECT_REFUSED(frugal_prefetch(trainer, 0, &row.op, 1, &batch_out), bad);
  EXPECT_REFUSED(frugal_prefetch_cancel(trainer, batch), bad);
  EXPECT_REFUSED(frugal_step_begin(trainer, 0, 0), bad);
  EXPECT_REFUSED(frugal_lookup(trainer, &row.op, 1), bad);
  EXPECT_REFUSED(frugal_push_grad(trainer, &row.op, 1), bad);
  EXPECT_REFUSED(frugal_borrow(trainer, 64, &memory), bad);
  EXPECT_REFUSED(frugal_step_end(trainer, 0, 0), bad);
  EXPECT_REFUSED(frugal_step_abort(trainer), bad);
  EXPECT_EQ(number, 5u);
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(table_out, nullptr);
  EXPECT_EQ(trainer_out, nullptr);
  EXPECT_EQ(batch_out, nullptr);
}

TEST(Handles, NullOnesAreRefusedEverywhere) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1, 2}, 1);
  uint64_t number = 0;
  size_t size = 0;
  void* memory = nullptr;
  frugal_table* table_out = nullptr;
  frugal_trainer* trainer_out = nullptr;
  const frugal_table_config table_config = FRUGAL_TABLE_CONFIG_INIT;
  const frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
  const frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  frugal_table_info info;
  info.struct_size = sizeof(info);
  frugal_stats stats;
  stats.struct_size = sizeof(stats);
  float x = 0;
  EXPECT_NULL_REFUSED(frugal_health(nullptr));
  EXPECT_NULL_REFUSED(frugal_flush(nullptr, 0));
  EXPECT_NULL_REFUSED(frugal_committed_step(nullptr, &number));
  EXPECT_NULL_REFUSED(frugal_get_stats(nullptr, &stats));
  EXPECT_NULL_REFUSED(frugal_metrics(nullptr, nullptr, 0, &size));
  EXPECT_NULL_REFUSED(frugal_trace_start(nullptr, 10));
  EXPECT_NULL_REFUSED(frugal_trace_stop(nullptr, nullptr));
  EXPECT_NULL_REFUSED(frugal_serve(nullptr, "/tmp/none"));
  frugal_checkpoint_info checkpoint = {};
  checkpoint.struct_size = sizeof checkpoint;
  bool due = false;
  EXPECT_NULL_REFUSED(frugal_folder_open(nullptr, "/tmp/none", nullptr));
  EXPECT_NULL_REFUSED(frugal_folder_close(nullptr));
  EXPECT_NULL_REFUSED(frugal_checkpoint(nullptr, nullptr, &number));
  EXPECT_NULL_REFUSED(frugal_checkpoint_wait(nullptr, 1, 0, &checkpoint));
  EXPECT_NULL_REFUSED(frugal_checkpoint_cancel(nullptr, 1));
  EXPECT_NULL_REFUSED(frugal_checkpoint_delete(nullptr, 1));
  EXPECT_NULL_REFUSED(frugal_restore(nullptr, nullptr, &checkpoint));
  EXPECT_NULL_REFUSED(frugal_checkpoint_due(nullptr, &due));
  EXPECT_NULL_REFUSED(frugal_checkpoint_blob(nullptr, "", 0));
  EXPECT_NULL_REFUSED(frugal_table_create(nullptr, &table_config, &table_out));
  EXPECT_NULL_REFUSED(frugal_table_find(nullptr, "t", &table_out));
  EXPECT_NULL_REFUSED(frugal_table_next(nullptr, &number, nullptr, 0, &size));
  EXPECT_NULL_REFUSED(frugal_trainer_create(nullptr, &trainer_config, &trainer_out));
  EXPECT_NULL_REFUSED(frugal_read(nullptr, nullptr, &row.op, 1, 0));
  EXPECT_NULL_REFUSED(frugal_table_describe(nullptr, &info));
  EXPECT_NULL_REFUSED(frugal_table_count(nullptr, &number));
  EXPECT_NULL_REFUSED(frugal_table_keys(nullptr, &number, &number, 1, &size));
  EXPECT_NULL_REFUSED(frugal_table_set_optimizer(nullptr, 0, &optimizer));
  EXPECT_NULL_REFUSED(frugal_get(nullptr, &number, 1, 0, &x, 0, nullptr));
  EXPECT_NULL_REFUSED(frugal_put(nullptr, &number, 1, 0, &x, 0));
  EXPECT_NULL_REFUSED(frugal_delete(nullptr, &number, 1, nullptr));
  EXPECT_NULL_REFUSED(frugal_prefetch(nullptr, 0, &row.op, 1, nullptr));
  EXPECT_NULL_REFUSED(frugal_prefetch_cancel(nullptr, nullptr));
  EXPECT_NULL_REFUSED(frugal_prefetch_cancel(trainer, nullptr));
  EXPECT_NULL_REFUSED(frugal_step_begin(nullptr, 0, 0));
  EXPECT_NULL_REFUSED(frugal_lookup(nullptr, &row.op, 1));
  EXPECT_NULL_REFUSED(frugal_push_grad(nullptr, &row.op, 1));
  EXPECT_NULL_REFUSED(frugal_borrow(nullptr, 64, &memory));
  EXPECT_NULL_REFUSED(frugal_step_end(nullptr, 0, 0));
  EXPECT_NULL_REFUSED(frugal_step_abort(nullptr));

  // Outputs and inputs that are null, with good handles.
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  EXPECT_REFUSED(frugal_committed_step(engine, nullptr), invalid);
  EXPECT_REFUSED(frugal_get_stats(engine, nullptr), invalid);
  EXPECT_REFUSED(frugal_metrics(engine, nullptr, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_metrics(engine, nullptr, 1, &size), invalid);
  EXPECT_REFUSED(frugal_serve(engine, nullptr), invalid);
  EXPECT_REFUSED(frugal_folder_open(engine, nullptr, nullptr), invalid);
  EXPECT_REFUSED(frugal_checkpoint(engine, nullptr, nullptr), invalid);
  frugal_restore_config restore = FRUGAL_RESTORE_CONFIG_INIT;
  restore.table_count = 1;
  EXPECT_REFUSED(frugal_restore(engine, &restore, &checkpoint), invalid);
  const char* tables[1] = {nullptr};
  restore.tables = tables;
  EXPECT_REFUSED(frugal_restore(engine, &restore, &checkpoint), invalid);
  EXPECT_REFUSED(frugal_checkpoint_due(trainer, nullptr), invalid);
  EXPECT_REFUSED(frugal_checkpoint_blob(trainer, nullptr, 1), invalid);
  EXPECT_REFUSED(frugal_checkpoint_next(nullptr, &number, &checkpoint), invalid);
  EXPECT_REFUSED(frugal_checkpoint_next("/tmp", nullptr, &checkpoint), invalid);
  EXPECT_REFUSED(frugal_checkpoint_next("/tmp", &number, nullptr), invalid);
  EXPECT_REFUSED(frugal_checkpoint_read_blob(nullptr, 1, 0, nullptr, 0, &size), invalid);
  EXPECT_REFUSED(frugal_checkpoint_read_blob("/tmp", 1, 0, nullptr, 1, &size), invalid);
  EXPECT_REFUSED(frugal_checkpoint_copy(nullptr, 1, "/tmp"), invalid);
  EXPECT_REFUSED(frugal_checkpoint_copy("/tmp", 1, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_create(engine, nullptr, &table_out), invalid);
  EXPECT_REFUSED(frugal_table_create(engine, &table_config, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_find(engine, nullptr, &table_out), invalid);
  EXPECT_REFUSED(frugal_table_find(engine, "t", nullptr), invalid);
  EXPECT_REFUSED(frugal_table_next(engine, nullptr, nullptr, 0, &size), invalid);
  EXPECT_REFUSED(frugal_table_next(engine, &number, nullptr, 1, &size), invalid);
  EXPECT_REFUSED(frugal_table_next(engine, &number, nullptr, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_trainer_create(engine, nullptr, &trainer_out), invalid);
  EXPECT_REFUSED(frugal_trainer_create(engine, &trainer_config, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_describe(table, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_count(table, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_keys(table, nullptr, &number, 1, &size), invalid);
  EXPECT_REFUSED(frugal_table_keys(table, &number, nullptr, 1, &size), invalid);
  EXPECT_REFUSED(frugal_table_keys(table, &number, &number, 1, nullptr), invalid);
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_get(table, nullptr, 1, 0, &x, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_get(table, &number, 1, 0, nullptr, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_put(table, nullptr, 1, 0, &x, 0), invalid);
  EXPECT_REFUSED(frugal_put(table, &number, 1, 0, nullptr, 0), invalid);
  EXPECT_REFUSED(frugal_delete(table, nullptr, 1, nullptr), invalid);
  EXPECT_REFUSED(frugal_prefetch(trainer, 1, nullptr, 1, nullptr), invalid);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer, nullptr, 1), invalid);
  EXPECT_REFUSED(frugal_push_grad(trainer, nullptr, 1), invalid);
  EXPECT_REFUSED(frugal_read(engine, trainer, nullptr, 1, 0), invalid);
  EXPECT_REFUSED(frugal_borrow(trainer, 64, nullptr), invalid);
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  EXPECT_EQ(GetOne(table, 1), 0.0f);
}

TEST(Handles, OtherKindsAndInventedOnesAreRefused) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  uint64_t number = 0;
  int on_stack = 0;
  const int32_t bad = FRUGAL_ERR_BAD_HANDLE;
  void* const handles[] = {static_cast<frugal_engine*>(engine),
                           table,
                           trainer,
                           &on_stack,
                           reinterpret_cast<void*>(uintptr_t{0x1234}),
                           reinterpret_cast<void*>(UINTPTR_MAX),
                           reinterpret_cast<void*>(uintptr_t{1} << 63)};
  for (size_t i = 0; i < std::size(handles); ++i) {
    void* const h = handles[i];
    if (i != 0) {
      EXPECT_REFUSED(frugal_committed_step(static_cast<frugal_engine*>(h), &number), bad);
      EXPECT_REFUSED(frugal_close(static_cast<frugal_engine*>(h)), bad);
    }
    if (i != 1) {
      EXPECT_REFUSED(frugal_table_count(static_cast<frugal_table*>(h), &number), bad);
      EXPECT_REFUSED(frugal_table_drop(static_cast<frugal_table*>(h)), bad);
    }
    if (i != 2) {
      EXPECT_REFUSED(frugal_step_begin(static_cast<frugal_trainer*>(h), 0, 0), bad);
      EXPECT_REFUSED(frugal_trainer_close(static_cast<frugal_trainer*>(h)), bad);
    }
    EXPECT_REFUSED(frugal_prefetch_cancel(trainer, static_cast<frugal_batch*>(h)), bad);
  }
  TrainStep(trainer, 0, table, {1});
  EXPECT_EQ(GetOne(table, 1), -1.0f);
}

TEST(Handles, TrainerAndTableCloseOnce) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_table* other = engine.Table("u", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_trainer* gone = engine.Trainer(1);
  ASSERT_OK(frugal_trainer_close(gone));
  EXPECT_REFUSED(frugal_trainer_close(gone), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_REFUSED(frugal_step_begin(gone, 0, 0), FRUGAL_ERR_BAD_HANDLE);
  ASSERT_OK(frugal_table_drop(other));
  EXPECT_REFUSED(frugal_table_drop(other), FRUGAL_ERR_BAD_HANDLE);
  RowOp dropped(other, {1}, 1);
  RowOp good(table, {1}, 1);
  frugal_op ops[] = {good.op, dropped.op};
  EXPECT_REFUSED(frugal_prefetch(trainer, 0, ops, 2, nullptr), FRUGAL_ERR_BAD_HANDLE);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer, ops, 2), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_REFUSED(frugal_push_grad(trainer, ops, 2), FRUGAL_ERR_BAD_HANDLE);
  ops[1].table = nullptr;
  EXPECT_NULL_REFUSED(frugal_lookup(trainer, ops, 2));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  EXPECT_EQ(GetOne(table, 1), 0.0f);
}

TEST(Handles, TwoEnginesAtOnce) {
  Engine one(1, [](frugal_config* c) { c->seed = 1; });
  Engine two(1, [](frugal_config* c) { c->seed = 1; });
  const auto uniform = [](frugal_table_config* c) {
    c->init = FRUGAL_INIT_UNIFORM;
    c->init_b = 1;
  };
  frugal_table* a = one.Table("same", FRUGAL_DENSE, 10, 1, uniform);
  frugal_table* b = two.Table("same", FRUGAL_DENSE, 10, 1, uniform);
  EXPECT_NE(a, b);
  frugal_trainer* trainer_a = one.Trainer(0);
  frugal_trainer* trainer_b = two.Trainer(0);
  const float start = GetOne(a, 3);
  EXPECT_EQ(start, GetOne(b, 3));
  TrainStep(trainer_a, 5, a, {3});
  EXPECT_EQ(GetOne(a, 3), start - 1);
  EXPECT_EQ(GetOne(b, 3), start);
  EXPECT_EQ(one.Committed(), 5u);
  EXPECT_EQ(two.Committed(), FRUGAL_NO_STEP);
  // A table of the one is none of the other's.
  RowOp row(a, {1}, 1);
  ASSERT_OK(frugal_step_begin(trainer_b, 0, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer_b, &row.op, 1), FRUGAL_ERR_BAD_HANDLE,
                 FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_step_end(trainer_b, 0, 0));
  two.Close();
  TrainStep(trainer_a, 6, a, {3});
  EXPECT_EQ(GetOne(a, 3), start - 2);
}

// --- Tables ---

TEST(Tables, RefusesBadConfigs) {
  Engine engine;
  engine.Table("taken", FRUGAL_DENSE, 10, 1);
  frugal_table* table = nullptr;
  const auto refuses = [&](int32_t status,
                           const std::function<void(frugal_table_config*)>& change) {
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "t";
    config.rows = 10;
    config.dim = 4;
    change(&config);
    EXPECT_REFUSED(frugal_table_create(engine, &config, &table), status);
    EXPECT_EQ(table, nullptr);
  };
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  const int32_t size = FRUGAL_ERR_STRUCT_SIZE;
  for (size_t s : {size_t{0}, sizeof(frugal_table_config) - 8, sizeof(frugal_table_config) + 8}) {
    refuses(size, [&](frugal_table_config* c) { c->struct_size = s; });
  }
  refuses(size, [](frugal_table_config* c) { c->optimizer.struct_size += 8; });
  refuses(size, [](frugal_table_config* c) { c->optimizer.struct_size = 0; });
  const std::string long_name(256, 'n');
  refuses(invalid, [](frugal_table_config* c) { c->name = nullptr; });
  refuses(invalid, [](frugal_table_config* c) { c->name = ""; });
  refuses(invalid, [&](frugal_table_config* c) { c->name = long_name.c_str(); });
  refuses(FRUGAL_ERR_EXISTS, [](frugal_table_config* c) { c->name = "taken"; });
  refuses(invalid, [](frugal_table_config* c) { c->key_space = 2; });
  refuses(invalid, [](frugal_table_config* c) { c->dtype = 9; });
  refuses(invalid, [](frugal_table_config* c) { c->rows = 0; });
  refuses(invalid, [](frugal_table_config* c) { c->rows = (uint64_t{1} << 32) - 1; });
  refuses(invalid, [](frugal_table_config* c) { c->dim = 0; });
  refuses(invalid, [](frugal_table_config* c) { c->dim = 65537; });
  refuses(invalid, [](frugal_table_config* c) { c->init = 5; });
  refuses(invalid, [](frugal_table_config* c) { c->nan_policy = 3; });
  refuses(invalid, [](frugal_table_config* c) { c->flags = 2; });
  refuses(invalid, [](frugal_table_config* c) { c->optimizer.kind = 7; });
  refuses(invalid, [](frugal_table_config* c) { c->optimizer.kind = -1; });
  refuses(invalid, [](frugal_table_config* c) { c->optimizer.flags = 16; });
  EXPECT_REFUSED(frugal_table_find(engine, "t", &table), FRUGAL_ERR_NOT_FOUND);
  const std::string longest(255, 'n');
  EXPECT_NE(engine.Table(longest.c_str(), FRUGAL_HASHED, 1, 1), nullptr);
  EXPECT_OK(frugal_table_find(engine, longest.c_str(), &table));
}

TEST(Tables, FindDescribeCountAndKeys) {
  Engine engine;
  frugal_table* dense = engine.Table("dense", FRUGAL_DENSE, 10, 3, [](frugal_table_config* c) {
    c->optimizer.kind = FRUGAL_ADAM;
  });
  frugal_table* hashed = engine.Table("hashed", FRUGAL_HASHED, 10, 1);
  frugal_table* lazy = engine.Table("lazy", FRUGAL_DENSE, 10, 1,
                                    [](frugal_table_config* c) { c->flags = FRUGAL_TABLE_LAZY; });
  frugal_table* found = nullptr;
  EXPECT_OK(frugal_table_find(engine, "dense", &found));
  EXPECT_EQ(found, dense);
  EXPECT_REFUSED(frugal_table_find(engine, "dens", &found), FRUGAL_ERR_NOT_FOUND);
  // Names that no table can have.
  for (const std::string& name : {std::string(), std::string(256, 'n'), std::string(100000, 'n')}) {
    EXPECT_REFUSED(frugal_table_find(engine, name.c_str(), &found), FRUGAL_ERR_NOT_FOUND);
    EXPECT_NE(LastMessage().find("1..255"), std::string::npos) << LastMessage();
  }
  EXPECT_EQ(found, dense);

  frugal_table_info info;
  for (size_t size : {size_t{0}, sizeof(info) - 8, sizeof(info) + 8}) {
    info.struct_size = size;
    EXPECT_REFUSED(frugal_table_describe(dense, &info), FRUGAL_ERR_STRUCT_SIZE);
  }
  info.struct_size = sizeof(info);
  EXPECT_OK(frugal_table_describe(dense, &info));
  EXPECT_EQ(info.rows, 10u);
  EXPECT_EQ(info.capacity, 10u);
  EXPECT_EQ(info.value_bytes, 12u);
  EXPECT_EQ(info.state_floats, 6u);
  EXPECT_EQ(info.dim, 3u);
  EXPECT_EQ(info.key_space, FRUGAL_DENSE);
  EXPECT_EQ(info.optimizer, FRUGAL_ADAM);
  EXPECT_GT(info.memory_bytes, 0u);
  EXPECT_GE(info.page_bytes, 4096u);

  EXPECT_EQ(Count(dense), 10u);
  EXPECT_EQ(Count(lazy), 10u);
  EXPECT_EQ(Count(hashed), 0u);
  std::set<uint64_t> ids;
  for (uint64_t id = 0; id < 10; ++id) ids.insert(id);
  EXPECT_EQ(Keys(dense), ids);
  EXPECT_EQ(Keys(lazy), ids);
  EXPECT_TRUE(Keys(hashed).empty());
  const uint64_t keys[] = {0, UINT64_MAX, 1, uint64_t{1} << 63, 17};
  const float rows[] = {1, 2, 3, 4, 5};
  ASSERT_OK(frugal_put(hashed, keys, 5, 0, rows, 0));
  EXPECT_EQ(Count(hashed), 5u);
  for (size_t capacity : {1, 2, 5, 100}) {
    EXPECT_EQ(Keys(hashed, capacity), std::set<uint64_t>(keys, keys + 5));
  }
  info.struct_size = sizeof(info);
  EXPECT_OK(frugal_table_describe(hashed, &info));
  EXPECT_EQ(info.rows, 5u);
}

// The next table's name, or "" at the end. `capacity`: of what is offered first.
std::string Next(frugal_engine* engine, uint64_t* cursor, size_t capacity = 256) {
  std::vector<char> name(300, '?');
  size_t size = 999;
  const uint64_t before = *cursor;
  int32_t status =
      frugal_table_next(engine, cursor, capacity ? name.data() : nullptr, capacity, &size);
  if (status == FRUGAL_ERR_OVERFLOW) {
    EXPECT_GT(size, capacity);
    EXPECT_EQ(before, *cursor);
    EXPECT_EQ(std::string(300, '?'), std::string(name.data(), 300));
    status = frugal_table_next(engine, cursor, name.data(), size, &size);
  }
  EXPECT_OK(status);
  EXPECT_EQ(size == 0, *cursor == before);
  if (size == 0) return "";
  EXPECT_EQ('\0', name[size - 1]);
  EXPECT_EQ('?', name[size]);
  return std::string(name.data(), size - 1);
}

TEST(Tables, AllByName) {
  Engine engine;
  uint64_t cursor = 0;
  EXPECT_EQ("", Next(engine, &cursor));
  const std::string longest(255, 'n');
  frugal_table* a = engine.Table("a", FRUGAL_DENSE, 1, 1);
  frugal_table* long_one = engine.Table(longest.c_str(), FRUGAL_HASHED, 1, 1);
  engine.Table("c", FRUGAL_DENSE, 1, 1);
  for (const size_t capacity : {0, 1, 2, 255, 256}) {
    cursor = 0;
    EXPECT_EQ("a", Next(engine, &cursor, capacity));
    EXPECT_EQ(longest, Next(engine, &cursor, capacity));
    EXPECT_EQ("c", Next(engine, &cursor, capacity));
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ("", Next(engine, &cursor, capacity));
    }
  }
  // Tables that come and go meanwhile do not disturb the cursor: here the one that it has passed,
  // and the next one.
  cursor = 0;
  EXPECT_EQ("a", Next(engine, &cursor));
  ASSERT_OK(frugal_table_drop(a));
  ASSERT_OK(frugal_table_drop(long_one));
  engine.Table("a", FRUGAL_DENSE, 1, 1);
  EXPECT_EQ("c", Next(engine, &cursor));
  EXPECT_EQ("a", Next(engine, &cursor));
  EXPECT_EQ("", Next(engine, &cursor));
  for (cursor = uint64_t{1} << 32; cursor; cursor <<= 1) {  // numbers that no table has
    EXPECT_EQ("", Next(engine, &cursor));
  }
}

TEST(Tables, DropAndCreateAgain) {
  Engine engine;
  const auto normal = [](frugal_table_config* c) {
    c->init = FRUGAL_INIT_NORMAL;
    c->init_b = 1;
  };
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1, normal);
  frugal_table* other = engine.Table("u", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0, 0.5);
  const float start = GetOne(table, 3);
  RowOp in_both(table, {3}, 1);
  RowOp in_other(other, {3}, 1);
  frugal_op ops[] = {in_both.op, in_other.op};
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 1, ops, 2, &batch));
  TrainStep(trainer, 0, table, {3});
  ASSERT_OK(frugal_step_begin(trainer, 1, kWait));
  EXPECT_REFUSED(frugal_table_drop(table), FRUGAL_ERR_BUSY);
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = "v";
  config.rows = 1;
  config.dim = 1;
  frugal_table* created = nullptr;
  EXPECT_REFUSED(frugal_table_create(engine, &config, &created), FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_step_end(trainer, 1, 0));

  ASSERT_OK(frugal_prefetch(trainer, 2, ops, 2, &batch));
  ASSERT_OK(frugal_table_drop(table));
  frugal_table* found = nullptr;
  EXPECT_REFUSED(frugal_table_find(engine, "t", &found), FRUGAL_ERR_NOT_FOUND);
  frugal_table* again = engine.Table("t", FRUGAL_DENSE, 10, 1, normal);
  EXPECT_NE(again, table);
  EXPECT_REFUSED(frugal_table_drop(table), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_EQ(GetOne(again, 3), start);
  // The other part of the declaration is as it was.
  ASSERT_OK(frugal_step_begin(trainer, 2, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer, &in_both.op, 1), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_REFUSED(frugal_push_grad(trainer, &in_both.op, 1), FRUGAL_ERR_BAD_HANDLE);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = other;
  op.batch = batch;
  op.part = 1;
  float out = kUntouched;
  op.rows_out = &out;
  EXPECT_OK(frugal_lookup(trainer, &op, 1));
  EXPECT_EQ(out, 0.0f);
  ASSERT_OK(frugal_step_end(trainer, 2, 0));
  TrainStep(trainer, 3, again, {3});
  EXPECT_EQ(GetOne(again, 3), start - 1);
}

TEST(Tables, SetOptimizer) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1, [](frugal_table_config* c) {
    c->optimizer.kind = FRUGAL_ADAGRAD;
    c->optimizer.initial_accumulator = 0.25f;
    c->optimizer.eps = 0.5f;
  });
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_optimizer good = FRUGAL_OPTIMIZER_INIT;
  good.kind = FRUGAL_ADAGRAD;
  good.initial_accumulator = 0.25f;
  const auto refuses = [&](int32_t status, const std::function<void(frugal_optimizer*)>& change) {
    frugal_optimizer optimizer = good;
    change(&optimizer);
    EXPECT_REFUSED(frugal_table_set_optimizer(table, 100, &optimizer), status);
  };
  refuses(FRUGAL_ERR_STRUCT_SIZE, [](frugal_optimizer* o) { o->struct_size += 8; });
  refuses(FRUGAL_ERR_STRUCT_SIZE, [](frugal_optimizer* o) { o->struct_size = 0; });
  refuses(FRUGAL_ERR_INVALID_ARGUMENT, [](frugal_optimizer* o) { o->flags = 16; });
  TrainStep(trainer, 7, table, {1});
  refuses(FRUGAL_ERR_INVALID_ARGUMENT, [](frugal_optimizer* o) { o->kind = FRUGAL_SGD; });
  refuses(FRUGAL_ERR_INVALID_ARGUMENT, [](frugal_optimizer* o) { o->initial_accumulator = 0; });
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 7, &good), FRUGAL_ERR_STEP_RANGE);
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 0, &good), FRUGAL_ERR_STEP_RANGE);
  EXPECT_OK(frugal_table_set_optimizer(table, 8, &good));
  EXPECT_REFUSED(frugal_table_set_optimizer(table, UINT64_MAX - 64, &good),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_OK(frugal_table_set_optimizer(table, UINT64_MAX - 65, &good));  // the last step
}

// So many changes wait. Those of committed steps make room, and one that waits may be changed.
TEST(Tables, MostChangesOfTheOptimizer) {
  constexpr uint64_t kMost = 4096;
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  for (uint64_t step = 1; step <= kMost; ++step) {
    optimizer.lr = static_cast<float>(step);
    ASSERT_OK(frugal_table_set_optimizer(table, step, &optimizer));
  }
  EXPECT_REFUSED(frugal_table_set_optimizer(table, kMost + 1, &optimizer),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("4096"), std::string::npos) << LastMessage();
  optimizer.lr = 7;
  EXPECT_OK(frugal_table_set_optimizer(table, 2, &optimizer));
  for (uint64_t step : {0, 1, 2}) TrainStep(trainer, step, table, {1});
  EXPECT_EQ(GetOne(table, 1), -1.0f - 1 - 7);
  EXPECT_OK(frugal_table_set_optimizer(table, kMost + 1, &optimizer));
}

// The result of three steps on a table that is created with `kind`, or gets it after lookups, puts,
// and a skipped step.
std::vector<float> TrainedLater(bool later, int32_t kind, int32_t key_space, uint32_t flags,
                                int32_t backing, uint32_t flush_threads, double cache_ratio,
                                const char* device) {
  constexpr uint64_t kRows = 40;
  constexpr uint32_t kDim = 3;
  Engine engine(1, [&](frugal_config* c) {
    c->backing = backing;
    c->flush_threads = flush_threads;
    c->flush_mode = flush_threads ? FRUGAL_FLUSH_DEFERRED : FRUGAL_FLUSH_AT_ONCE;
  });
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  optimizer.kind = kind;
  optimizer.lr = 0.25f;
  optimizer.initial_accumulator = 0.5f;
  frugal_table* table = engine.Table("t", key_space, kRows, kDim, [&](frugal_table_config* c) {
    c->init = FRUGAL_INIT_UNIFORM;
    c->init_b = 1;
    c->flags = flags;
    if (!later) c->optimizer = optimizer;
  });
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.device = device;
  config.cache_ratio = cache_ratio;
  frugal_trainer* trainer = nullptr;
  EXPECT_OK(frugal_trainer_create(engine, &config, &trainer));
  RowOp some(table, {1, 2, 3, 30}, kDim), next(table, {2, 3, 5, 7}, kDim), put(table, {2, 9}, kDim);
  const auto step = [&](uint64_t s, RowOp& op, uint32_t end) {
    EXPECT_OK(frugal_step_begin(trainer, s, kWait));
    EXPECT_OK(frugal_lookup(trainer, &op.op, 1));
    EXPECT_OK(frugal_push_grad(trainer, &op.op, 1));
    if (later && s == 0) {
      frugal_optimizer same = FRUGAL_OPTIMIZER_INIT;
      same.lr = 0.125f;
      EXPECT_OK(frugal_table_set_optimizer(table, 0, &same));
      if (kind != FRUGAL_SGD) {
        EXPECT_REFUSED(frugal_table_set_optimizer(table, 0, &optimizer), FRUGAL_ERR_BUSY);
      }
    }
    EXPECT_OK(frugal_step_end(trainer, s, end));
  };
  EXPECT_OK(frugal_prefetch(trainer, 0, &some.op, 1, nullptr));
  EXPECT_OK(frugal_prefetch(trainer, 1, &next.op, 1, nullptr));
  step(0, some, FRUGAL_STEP_SKIP);
  std::fill(put.grads.begin(), put.grads.end(), 0.75f);
  EXPECT_OK(frugal_put(table, put.keys.data(), put.keys.size(), 0, put.grads.data(), 0));
  if (later) {
    for (int32_t other : {int32_t{FRUGAL_FTRL}, kind}) {  // twice
      optimizer.kind = other;
      EXPECT_OK(frugal_table_set_optimizer(table, 1, &optimizer));
    }
  }
  frugal_table_info info;
  info.struct_size = sizeof(info);
  EXPECT_OK(frugal_table_describe(table, &info));
  EXPECT_EQ(info.optimizer, kind);
  EXPECT_EQ(info.state_floats, frugal_reference::StateFloats(kind, kDim));
  EXPECT_OK(frugal_prefetch(trainer, 2, &some.op, 1, nullptr));
  step(1, next, 0);
  step(2, some, 0);
  step(3, next, 0);
  EXPECT_OK(frugal_table_set_optimizer(table, 4, &optimizer));
  optimizer.kind = (kind + 1) % 7;
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 4, &optimizer), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("fixed"), std::string::npos) << LastMessage();
  std::vector<uint64_t> keys(kRows);
  for (uint64_t k = 0; k < kRows; ++k) keys[k] = k;
  std::vector<float> rows(kRows * (kDim + info.state_floats), kUntouched);
  EXPECT_OK(frugal_get(table, keys.data(), kRows, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
  return rows;
}

// Two ways to train a table come to the same bits: for each kind and variant, dense, lazy and
// hashed in turn.
template <class Train>
void SameBothWays(uint32_t variants, Train train) {
  for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
    for (uint32_t variant = 0; variant < variants; ++variant) {
      SCOPED_TRACE("kind " + std::to_string(kind) + " variant " + std::to_string(variant));
      const int32_t space = variant % 3 == 2 ? FRUGAL_HASHED : FRUGAL_DENSE;
      const uint32_t flags = variant % 3 == 1 ? FRUGAL_TABLE_LAZY : 0;
      const std::vector<float> expected = train(false, kind, space, flags, variant);
      const std::vector<float> got = train(true, kind, space, flags, variant);
      ASSERT_EQ(expected.size(), got.size());
      ASSERT_EQ(0, std::memcmp(expected.data(), got.data(), got.size() * sizeof(float)));
    }
  }
}

TEST(Tables, TheKindMayComeUntilTheFirstUpdate) {
  SameBothWays(48, [](bool later, int32_t kind, int32_t space, uint32_t flags, uint32_t variant) {
    return TrainedLater(later, kind, space, flags,
                        variant & 1 ? FRUGAL_BACKING_SHM : FRUGAL_BACKING_PRIVATE, variant / 6 % 2,
                        variant / 12 % 2 * 0.5, variant < 24 ? "cpu" : "sim:0");
  });
}

// Two steps of Adagrad and two of `kind`, with new state; or the same rows in a table that is made
// anew.
std::vector<float> TrainedAnew(bool anew, int32_t kind, int32_t key_space, uint32_t flags,
                               uint32_t flush_threads, double cache_ratio) {
  constexpr uint64_t kRows = 40;
  constexpr uint32_t kDim = 3;
  Engine engine(1, [&](frugal_config* c) {
    c->flush_threads = flush_threads;
    c->flush_mode = flush_threads ? FRUGAL_FLUSH_DEFERRED : FRUGAL_FLUSH_AT_ONCE;
  });
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  optimizer.kind = FRUGAL_ADAGRAD;
  optimizer.lr = 0.25f;
  const auto make = [&] {
    return engine.Table("t", key_space, kRows, kDim, [&](frugal_table_config* c) {
      c->init = FRUGAL_INIT_UNIFORM;
      c->init_b = 1;
      c->flags = flags;
      c->optimizer = optimizer;
    });
  };
  frugal_table* table = make();
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.cache_ratio = cache_ratio;
  frugal_trainer* trainer = nullptr;
  EXPECT_OK(frugal_trainer_create(engine, &config, &trainer));
  std::vector<uint64_t> keys(kRows);
  for (uint64_t k = 0; k < kRows; ++k) keys[k] = k;
  for (uint64_t s = 0; s < 4; ++s) {
    if (s == 2) {
      optimizer.kind = kind;
      optimizer.lr = 0.125f;
      optimizer.initial_accumulator = 0.5f;
      if (kind != FRUGAL_ADAGRAD) {
        EXPECT_REFUSED(frugal_table_set_optimizer(table, s, &optimizer),
                       FRUGAL_ERR_INVALID_ARGUMENT);
      }
      if (anew) {
        frugal_optimizer with_new_state = optimizer;
        with_new_state.flags |= FRUGAL_OPT_NEW_STATE;
        EXPECT_OK(frugal_table_set_optimizer(table, s, &with_new_state));
      } else {
        std::vector<float> rows(kRows * kDim);
        uint8_t found[kRows] = {};
        EXPECT_OK(frugal_get(table, keys.data(), kRows, 0, rows.data(), 0, found));
        EXPECT_OK(frugal_table_drop(table));
        table = make();
        for (uint64_t k = 0; k < kRows; ++k) {
          if (found[k]) {
            EXPECT_OK(frugal_put(table, &keys[k], 1, 0, rows.data() + k * kDim, 0));
          }
        }
      }
    }
    RowOp op(table, s % 2 ? std::vector<uint64_t>{1, 2, 3, 30} : std::vector<uint64_t>{2, 3, 5, 7},
             kDim);
    EXPECT_OK(frugal_step_begin(trainer, s, kWait));
    EXPECT_OK(frugal_lookup(trainer, &op.op, 1));
    EXPECT_OK(frugal_push_grad(trainer, &op.op, 1));
    EXPECT_OK(frugal_step_end(trainer, s, 0));
  }
  std::vector<float> rows(kRows * (kDim + frugal_reference::StateFloats(kind, kDim)), kUntouched);
  EXPECT_OK(frugal_get(table, keys.data(), kRows, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
  return rows;
}

TEST(Tables, NewStateAtAnyTime) {
  SameBothWays(12, [](bool anew, int32_t kind, int32_t space, uint32_t flags, uint32_t variant) {
    return TrainedAnew(anew, kind, space, flags, variant / 3 % 2, variant / 6 * 0.5);
  });
}

// Places of rows that a declaration reserved and gave back have memory for the new state, too.
TEST(Tables, AnotherKindForPlacesThatAreFree) {
  constexpr uint32_t kDim = 65536;  // 32 rows are a slab of memory
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 80, kDim);
  frugal_trainer* trainer = engine.Trainer(0);
  std::vector<uint64_t> keys(40);
  for (uint64_t k = 0; k < keys.size(); ++k) keys[k] = 1000 + k;
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = keys.data();
  op.count = keys.size();
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 0, &op, 1, &batch));
  ASSERT_OK(frugal_prefetch_cancel(trainer, batch));
  frugal_optimizer momentum = FRUGAL_OPTIMIZER_INIT;
  momentum.kind = FRUGAL_MOMENTUM;
  ASSERT_OK(frugal_table_set_optimizer(table, 0, &momentum));
  frugal_table_info before, after;
  before.struct_size = after.struct_size = sizeof(before);
  ASSERT_OK(frugal_table_describe(table, &before));
  for (uint64_t key : keys) {
    RowOp row(table, {key}, kDim);
    ASSERT_OK(frugal_put(table, &key, 1, 0, row.grads.data(), 0));
  }
  ASSERT_OK(frugal_table_describe(table, &after));
  EXPECT_EQ(before.memory_bytes, after.memory_bytes);
  EXPECT_GE(after.memory_bytes, 2 * keys.size() * kDim * sizeof(float));
}

TEST(Tables, RowsWithStateFixTheKind) {
  Engine engine;
  frugal_optimizer adam = FRUGAL_OPTIMIZER_INIT, sgd = FRUGAL_OPTIMIZER_INIT;
  adam.kind = FRUGAL_ADAM;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  const uint64_t key = 3;
  const float row[3] = {1, 2, 3};
  EXPECT_OK(frugal_put(table, &key, 1, FRUGAL_WITH_STATE, row, 0));  // SGD has none
  EXPECT_OK(frugal_table_set_optimizer(table, 0, &adam));
  EXPECT_OK(frugal_put(table, &key, 1, 0, row, 0));
  EXPECT_OK(frugal_table_set_optimizer(table, 0, &sgd));
  EXPECT_OK(frugal_table_set_optimizer(table, 0, &adam));
  EXPECT_OK(frugal_put(table, &key, 1, FRUGAL_WITH_STATE, row, 0));
  EXPECT_REFUSED(frugal_table_set_optimizer(table, 0, &sgd), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_OK(frugal_table_set_optimizer(table, 0, &adam));
}

TEST(Tables, NoRoomForAnotherKind) {
  for (uint32_t flags : {0u, FRUGAL_TABLE_LAZY}) {
    Engine engine(1, [](frugal_config* c) { c->host_bytes = 12 << 20; });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 1 << 16, 32, [&](frugal_table_config* c) {
      c->flags = flags;
      c->optimizer.kind = FRUGAL_ROWWISE_ADAGRAD;
    });
    frugal_trainer* trainer = engine.Trainer(0);
    RowOp row(table, {1, 60'000}, 32);
    ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
    ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
    ASSERT_OK(frugal_step_end(trainer, 0, 0));
    frugal_optimizer adam = FRUGAL_OPTIMIZER_INIT;
    adam.kind = FRUGAL_ADAM;
    EXPECT_REFUSED(frugal_table_set_optimizer(table, 1, &adam), FRUGAL_ERR_OUT_OF_MEMORY);
    frugal_table_info info;
    info.struct_size = sizeof(info);
    ASSERT_OK(frugal_table_describe(table, &info));
    EXPECT_EQ(info.optimizer, FRUGAL_ROWWISE_ADAGRAD);
    EXPECT_EQ(info.state_floats, 1u);
    ASSERT_OK(frugal_step_begin(trainer, 1, kWait));
    ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
    ASSERT_OK(frugal_step_end(trainer, 1, 0));
    float out[33] = {};
    ASSERT_OK(frugal_get(table, row.keys.data(), 1, FRUGAL_WITH_STATE, out, 0, nullptr));
    EXPECT_EQ(out[0], -1.0f);  // lr * 1 / sqrt(1)
    EXPECT_EQ(out[32], 1.0f);
  }
}

TEST(Tables, HyperParametersBelongToAStep) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  optimizer.lr = 100;
  ASSERT_OK(frugal_table_set_optimizer(table, 4, &optimizer));
  optimizer.lr = 10;
  ASSERT_OK(frugal_table_set_optimizer(table, 2, &optimizer));
  ASSERT_OK(frugal_step_begin(trainer, 1, kWait));
  RowOp row(table, {0}, 1);
  ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
  optimizer.lr = 2;
  // Also in the step, as long as it is not committed.
  ASSERT_OK(frugal_table_set_optimizer(table, 1, &optimizer));
  ASSERT_OK(frugal_step_end(trainer, 1, 0));
  EXPECT_EQ(GetOne(table, 0), -2.0f);
  for (uint64_t step = 2; step <= 5; ++step) TrainStep(trainer, step, table, {0});
  EXPECT_EQ(GetOne(table, 0), -222.0f);  // 2, 10, 10, 100, 100
}

TEST(Tables, MemoryNeeded) {
  frugal_config engine_config = FRUGAL_CONFIG_INIT;
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = "t";
  config.rows = 100'000;
  config.dim = 32;
  config.optimizer.kind = FRUGAL_ADAGRAD;
  frugal_memory memory;
  ASSERT_OK(frugal_memory_needed(&engine_config, &config, 1000, &memory));
  EXPECT_GE(memory.values, 100'000u * 32 * 4);
  EXPECT_LE(memory.values, 100'000u * 32 * 4 + (4u << 20));
  EXPECT_GE(memory.state, 100'000u * 32 * 4);
  EXPECT_GE(memory.cache, 1000u * (64 * 4 + 44));
  EXPECT_EQ(memory.window, 100'000u * 8);
  EXPECT_EQ(memory.total,
            memory.values + memory.state + memory.index + memory.window + memory.cache);
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 100'000, 32, [](frugal_table_config* c) {
    c->optimizer.kind = FRUGAL_ADAGRAD;
  });
  frugal_table_info info;
  info.struct_size = sizeof(info);
  ASSERT_OK(frugal_table_describe(table, &info));
  EXPECT_GE(info.memory_bytes, memory.values);
  EXPECT_LE(info.memory_bytes, memory.total + (4u << 20));

  config.key_space = FRUGAL_HASHED;
  frugal_memory hashed;
  ASSERT_OK(frugal_memory_needed(&engine_config, &config, 0, &hashed));
  EXPECT_GE(hashed.index, 100'000u * (8 + 1 + 16));
  EXPECT_EQ(hashed.cache, 0u);
  // A window is opened where updates can be deferred.
  engine_config.flush_mode = FRUGAL_FLUSH_AT_ONCE;
  ASSERT_OK(frugal_memory_needed(&engine_config, &config, 0, &hashed));
  EXPECT_EQ(hashed.window, 0u);
  ASSERT_OK(frugal_memory_needed(&engine_config, &config, 1, &hashed));
  EXPECT_EQ(hashed.window, 100'000u * 8);
  engine_config.staleness = 1;
  ASSERT_OK(frugal_memory_needed(&engine_config, &config, 0, &hashed));
  EXPECT_EQ(hashed.window, 100'000u * 8);

  EXPECT_REFUSED(frugal_memory_needed(&engine_config, &config, 0, nullptr),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_REFUSED(frugal_memory_needed(&engine_config, nullptr, 0, &memory),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  config.dim = 0;
  EXPECT_REFUSED(frugal_memory_needed(&engine_config, &config, 0, &memory),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  config.struct_size = 4;
  EXPECT_REFUSED(frugal_memory_needed(&engine_config, &config, 0, &memory), FRUGAL_ERR_STRUCT_SIZE);
  engine_config.struct_size = 4;
  EXPECT_REFUSED(frugal_memory_needed(&engine_config, &config, 0, &memory), FRUGAL_ERR_STRUCT_SIZE);
}

TEST(Tables, MemoryThatIsNotThere) {
  for (int32_t backing : {FRUGAL_BACKING_PRIVATE, FRUGAL_BACKING_SHM}) {
    Engine engine(1, [&](frugal_config* c) {
      c->backing = backing;
      c->host_bytes = 16 << 20;
    });
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "large";
    config.rows = 1 << 20;
    config.dim = 32;
    frugal_table* table = nullptr;
    EXPECT_REFUSED(frugal_table_create(engine, &config, &table), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_EQ(table, nullptr);
    EXPECT_REFUSED(frugal_table_find(engine, "large", &table), FRUGAL_ERR_NOT_FOUND);
    frugal_table* small = engine.Table("large", FRUGAL_DENSE, 1000, 8);
    TrainStep(engine.Trainer(0), 0, engine.Table("u", FRUGAL_DENSE, 5, 1), {1});
    EXPECT_EQ(Count(small), 1000u);
  }
  // More than the machine can address.
  for (int32_t backing : {FRUGAL_BACKING_PRIVATE, FRUGAL_BACKING_SHM}) {
    Engine engine(1, [&](frugal_config* c) { c->backing = backing; });
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "huge";
    config.rows = (uint64_t{1} << 32) - 2;
    config.dim = 65536;
    frugal_table* table = nullptr;
    EXPECT_REFUSED(frugal_table_create(engine, &config, &table), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_NE(engine.Table("small", FRUGAL_DENSE, 10, 1), nullptr);
  }
}

// More than the machine has, but less than it can address: the call reports it before it touches
// any of it. Else an overcommitting kernel would end the process on the way.
TEST(Tables, MoreMemoryThanTheMachineHas) {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (meminfo >> word && word != "MemTotal:") {
  }
  meminfo >> kib;
  ASSERT_GT(kib, 0u);
  for (int32_t backing : {FRUGAL_BACKING_PRIVATE, FRUGAL_BACKING_SHM}) {
    Engine engine(1, [&](frugal_config* c) { c->backing = backing; });
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "large";
    config.dim = 8192;
    config.rows = kib * 1024 * 2 / (config.dim * sizeof(float));
    frugal_table* table = nullptr;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_REFUSED(frugal_table_create(engine, &config, &table), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_EQ(table, nullptr);
    EXPECT_NE(engine.Table("large", FRUGAL_DENSE, 10, 1), nullptr);
  }
}

// Memory that declared keys have had gives way to a table.
TEST(Tables, RoomThatDeclaredKeysHaveTaken) {
  for (int32_t backing : {FRUGAL_BACKING_PRIVATE, FRUGAL_BACKING_SHM}) {
    Engine engine(1, [&](frugal_config* c) {
      c->backing = backing;
      c->flush_threads = 0;
      c->host_bytes = 120 << 20;
    });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 2'000'000, 1);  // 32 MiB
    frugal_trainer* trainer = engine.Trainer(0);
    std::vector<uint64_t> keys(2'000'000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = keys.size();
    ASSERT_OK(frugal_prefetch(trainer, 0, &op, 1, nullptr));
    ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
    ASSERT_OK(frugal_step_end(trainer, 0, 0));
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "large";
    config.rows = 2'400'000;  // 80 MiB
    config.dim = 8;
    frugal_table* large = nullptr;
    EXPECT_OK(frugal_table_create(engine, &config, &large));
  }
}

// What frugal_memory_needed says is enough as host_bytes, and the index' growth needs it.
TEST(Tables, MemoryNeededIsEnough) {
  for (uint64_t rows : {1'000u, 131'072u, 131'073u, 300'000u, 700'000u}) {
    SCOPED_TRACE(rows);
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = "t";
    config.key_space = FRUGAL_HASHED;
    config.rows = rows;
    config.dim = 1;
    config.optimizer.kind = FRUGAL_ADAGRAD;
    frugal_memory memory;
    ASSERT_OK(frugal_memory_needed(nullptr, &config, 0, &memory));
    const uint64_t needed = memory.values + memory.state + memory.index;
    std::vector<uint64_t> keys(rows);
    for (size_t i = 0; i < rows; ++i) keys[i] = i * 0x9e3779b97f4a7c15ull;
    const std::vector<float> values(rows, 1.5f);
    for (const bool enough : {true, false}) {
      Engine engine(1, [&](frugal_config* c) { c->host_bytes = enough ? needed : needed - 1; });
      frugal_table* table = nullptr;
      const int32_t created = frugal_table_create(engine, &config, &table);
      if (enough) {
        ASSERT_OK(created);
        EXPECT_OK(frugal_put(table, keys.data(), rows, 0, values.data(), 0));
        EXPECT_EQ(Count(table), rows);
        frugal_table_info info;
        info.struct_size = sizeof(info);
        ASSERT_OK(frugal_table_describe(table, &info));
        EXPECT_LE(info.memory_bytes, needed);
        continue;
      }
      // Where rows fill one slab, the index alone needs more as they come: it is refused its
      // growth, the call as a whole, and the rest goes on.
      if (rows == 131'073 || rows == 300'000) {
        ASSERT_OK(created);
        ASSERT_OK(frugal_put(table, keys.data(), rows / 3, 0, values.data(), 0));
        EXPECT_REFUSED(frugal_put(table, keys.data(), rows, 0, values.data(), 0),
                       FRUGAL_ERR_OUT_OF_MEMORY);
        EXPECT_NE(LastMessage().find("host_bytes"), std::string::npos) << LastMessage();
        EXPECT_NE(LastMessage().find("index"), std::string::npos) << LastMessage();
        EXPECT_EQ(Count(table), rows / 3);
        TrainStep(engine.Trainer(0), 0, table, {keys[0], keys[1]});
        EXPECT_EQ(GetOne(table, keys[2]), 1.5f);
        EXPECT_OK(frugal_health(engine));
      }
    }
  }
}

TEST(Tables, SparseLazyBillionRows) {
  Engine engine(1, [](frugal_config* c) { c->seed = 11; });
  const auto resident = [] { return static_cast<uint64_t>(resident_kib(getpid())) * 1024; };
  const uint64_t before = resident();
  const auto change = [](frugal_table_config* c) {
    c->flags = FRUGAL_TABLE_LAZY;
    c->init = FRUGAL_INIT_NORMAL;
    c->init_b = 0.1f;
  };
  const uint64_t rows = 1'000'000'000;
  frugal_table* table = engine.Table("billion", FRUGAL_DENSE, rows, 32, change);
  ASSERT_NE(table, nullptr);
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = "billion";
  config.rows = rows;
  config.dim = 32;
  change(&config);
  std::vector<uint64_t> keys = {0, 1, rows - 1, rows / 2};
  std::mt19937_64 random(5);
  while (keys.size() < 40) keys.push_back(random() % rows);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, keys, 32);
  ASSERT_OK(frugal_prefetch(trainer, 1, &row.op, 1, nullptr));
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
    for (size_t i = 0; i < keys.size(); ++i) {
      for (size_t c = 0; c < 32; ++c) {
        float expected = frugal_reference::InitialValue(config, 11, keys[i], c);
        for (uint64_t s = 0; s < step; ++s) expected = expected - 1.0f;
        ASSERT_EQ(Bits(row.rows[i * 32 + c]), Bits(expected)) << step << ' ' << i << ' ' << c;
      }
    }
    ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
    ASSERT_OK(frugal_step_end(trainer, step, 0));
  }
  ASSERT_OK(frugal_flush(engine, kWait));
  EXPECT_EQ(Count(table), rows);
  uint64_t outside = rows;
  float out[32];
  EXPECT_REFUSED(frugal_get(table, &outside, 1, 0, out, 0, nullptr), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  // 128 GB of rows: a touched one may cost huge pages, in values and in each index, but no more.
  EXPECT_LT(resident() - before, uint64_t{1} << 30);
}

// Many tables of a few rows take small pages: a huge one for each array would be 400 MiB here.
TEST(Tables, SmallOnesTakeLittleMemory) {
  Engine engine(1);
  const long before = resident_kib(getpid());
  for (int i = 0; i < 100; ++i) {
    frugal_table* table =
        engine.Table(("t" + std::to_string(i)).c_str(), i % 2 ? FRUGAL_HASHED : FRUGAL_DENSE, 100,
                     8, [](frugal_table_config* c) { c->optimizer.kind = FRUGAL_ADAGRAD; });
    const uint64_t key = 7;
    const float row[8] = {};
    ASSERT_OK(frugal_put(table, &key, 1, 0, row, 0));
  }
  EXPECT_LT(resident_kib(getpid()) - before, 40 << 10);
}

// --- Arithmetic ---

// The calling thread rounds upwards, and flushes denormals where it can.
class OddEnvironment {
 public:
  explicit OddEnvironment(bool on) {
    std::fegetenv(&before_);
    if (!on) return;
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
  }
  ~OddEnvironment() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

// All that a training gives: rows looked up, and in the end rows with their state. The squares of
// some gradients are denormal.
std::vector<uint32_t> Trained(bool odd, int32_t kind, uint32_t flush_threads) {
  constexpr size_t kRows = 40, kDim = 8, kKeys = 25, kSteps = 12, kWorld = 2;
  std::mt19937 random(7);
  std::vector<std::vector<uint64_t>> keys(kSteps * kWorld, std::vector<uint64_t>(kKeys));
  std::vector<std::vector<float>> grads(kSteps * kWorld, std::vector<float>(kKeys * kDim));
  for (auto& of : keys)
    for (uint64_t& key : of) key = random() % kRows;
  for (auto& of : grads)
    for (float& g : of) {
      g = static_cast<float>(random()) - 2e9f;
      g *= random() % 2 ? 1e-9f : 1e-30f;
    }
  std::vector<uint32_t> bits;
  const OddEnvironment environment(odd);
  const int rounding = std::fegetround();
  Engine engine(kWorld, [&](frugal_config* c) { c->flush_threads = flush_threads; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, kRows, kDim, [&](frugal_table_config* c) {
    c->init = FRUGAL_INIT_NORMAL;
    c->optimizer.kind = kind;
    c->optimizer.lr = 0.1f;
  });
  frugal_trainer* ranks[] = {engine.Trainer(0), engine.Trainer(1)};
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (frugal_trainer* rank : ranks) EXPECT_OK(frugal_step_begin(rank, step, kWait));
    for (size_t r = 0; r < kWorld; ++r) {
      RowOp row(table, keys[step * kWorld + r], kDim);
      row.op.grads = grads[step * kWorld + r].data();
      EXPECT_OK(frugal_lookup(ranks[r], &row.op, 1));
      EXPECT_OK(frugal_push_grad(ranks[r], &row.op, 1));
      for (float x : row.rows) bits.push_back(Bits(x));
    }
    for (frugal_trainer* rank : ranks) EXPECT_OK(frugal_step_end(rank, step, 0));
  }
  for (uint64_t key = 0; key < kRows; ++key) {
    float row[3 * kDim] = {};
    EXPECT_OK(frugal_get(table, &key, 1, FRUGAL_WITH_STATE, row, 0, nullptr));
    for (float x : row) bits.push_back(Bits(x));
  }
  EXPECT_EQ(rounding, std::fegetround()) << "a call has left another rounding";
  return bits;
}

TEST(Arithmetic, IsTheLibrarysWhateverTheCallersIs) {
  for (int32_t kind : {FRUGAL_SGD, FRUGAL_ADAGRAD, FRUGAL_ADAM})
    for (uint32_t flush_threads : {0u, 2u}) {
      SCOPED_TRACE(testing::Message()
                   << "kind " << kind << ", " << flush_threads << " flush threads");
      EXPECT_EQ(Trained(false, kind, 0), Trained(true, kind, flush_threads));
    }
}

// --- Trainers ---

TEST(Trainers, RefusesBadConfigs) {
  Engine engine(2);
  engine.Trainer(0);
  frugal_trainer* trainer = nullptr;
  const auto refuses = [&](std::initializer_list<int32_t> statuses,
                           const std::function<void(frugal_trainer_config*)>& change) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = 1;
    change(&config);
    EXPECT_TRUE(Refused(frugal_trainer_create(engine, &config, &trainer), statuses));
    EXPECT_EQ(trainer, nullptr);
  };
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  refuses({FRUGAL_ERR_STRUCT_SIZE}, [](frugal_trainer_config* c) { c->struct_size -= 8; });
  refuses({FRUGAL_ERR_STRUCT_SIZE}, [](frugal_trainer_config* c) { c->struct_size += 8; });
  refuses({FRUGAL_ERR_STRUCT_SIZE}, [](frugal_trainer_config* c) { c->struct_size = 0; });
  refuses({invalid}, [](frugal_trainer_config* c) { c->rank = 2; });
  refuses({invalid}, [](frugal_trainer_config* c) { c->rank = UINT32_MAX; });
  EXPECT_NE(LastMessage().find("rank -1 (unsigned 4294967295)"), std::string::npos)
      << LastMessage();
  refuses({FRUGAL_ERR_EXISTS}, [](frugal_trainer_config* c) { c->rank = 0; });
  refuses({invalid}, [](frugal_trainer_config* c) { c->flags = 2; });
  refuses({invalid},
          [](frugal_trainer_config* c) { c->flags = 0x80000000u | FRUGAL_TRAINER_REPLACE; });
  refuses({FRUGAL_ERR_UNSUPPORTED},
          [](frugal_trainer_config* c) { c->flags = FRUGAL_TRAINER_REPLACE; });
  refuses({invalid}, [](frugal_trainer_config* c) { c->cache_ratio = -0.5; });
  refuses({invalid}, [](frugal_trainer_config* c) { c->cache_ratio = 1.5; });
  refuses({invalid}, [](frugal_trainer_config* c) {
    c->cache_ratio = std::numeric_limits<double>::quiet_NaN();
  });
  refuses({FRUGAL_ERR_DEVICE}, [](frugal_trainer_config* c) { c->device = "cuda:99"; });
  refuses({invalid, FRUGAL_ERR_UNSUPPORTED},
          [](frugal_trainer_config* c) { c->device = "abacus"; });
  const std::string device = "cuda:" + std::string(100000, '1');
  refuses({invalid}, [&](frugal_trainer_config* c) { c->device = device.c_str(); });
  EXPECT_NE(LastMessage().find("give \"cpu\""), std::string::npos) << LastMessage();
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.rank = 1;
  config.device = "cpu";
  EXPECT_OK(frugal_trainer_create(engine, &config, &trainer));
}

TEST(Trainers, AMissingOneIsNamedAndMayComeLater) {
  Engine engine(3);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* first = engine.Trainer(0);
  frugal_trainer* third = engine.Trainer(2);
  TrainStep(first, 0, table, {1});
  TrainStep(third, 0, table, {1});
  EXPECT_EQ(engine.Committed(), FRUGAL_NO_STEP);
  EXPECT_REFUSED(frugal_step_begin(first, 1, 20), FRUGAL_ERR_TIMEOUT);
  EXPECT_NE(LastMessage().find("rank 1"), std::string::npos) << LastMessage();
  frugal_trainer* second = engine.Trainer(1);
  TrainStep(second, 0, table, {2});
  EXPECT_EQ(engine.Committed(), 0u);
  EXPECT_OK(frugal_step_begin(first, 1, kWait));
  EXPECT_OK(frugal_step_end(first, 1, 0));
}

TEST(Trainers, NobodyWaitsForOneThatLeft) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* stays = engine.Trainer(0);
  frugal_trainer* leaves = engine.Trainer(1);
  TrainStep(stays, 0, table, {1});
  TrainStep(leaves, 0, table, {1});
  TrainStep(stays, 1, table, {1});
  EXPECT_EQ(engine.Committed(), 0u);
  ASSERT_OK(frugal_trainer_close(leaves));
  EXPECT_EQ(engine.Committed(), 1u);  // it was the last that step 1 waited for
  for (uint64_t step = 2; step < 5; ++step) TrainStep(stays, step, table, {1});
  EXPECT_EQ(GetOne(table, 1), -6.0f);
}

// Everybody has left: what was ended is committed, a step without gradients in between, too.
TEST(Trainers, LeavingCommitsWhatWasEnded) {
  Engine engine(2, [](frugal_config* config) { config->staleness = 5; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* ahead = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  TrainStep(ahead, 0, table, {1});
  ASSERT_OK(frugal_step_begin(ahead, 1, kWait));
  ASSERT_OK(frugal_step_end(ahead, 1, 0));
  TrainStep(ahead, 2, table, {1});
  ASSERT_OK(frugal_trainer_close(ahead));
  ASSERT_OK(frugal_trainer_close(other));
  EXPECT_EQ(engine.Committed(), 2u);
  EXPECT_EQ(GetOne(table, 1), -2.0f);
  ahead = engine.Trainer(0);
  TrainStep(ahead, 3, table, {1});
  EXPECT_EQ(GetOne(table, 1), -3.0f);
}

TEST(Trainers, MayJoinAgainOutsideSteps) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* stays = engine.Trainer(0);
  frugal_trainer* leaves = engine.Trainer(1);
  TrainStep(stays, 0, table, {1});
  TrainStep(leaves, 0, table, {1});
  ASSERT_OK(frugal_trainer_close(leaves));
  ASSERT_OK(frugal_step_begin(stays, 1, kWait));
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.rank = 1;
  frugal_trainer* again = nullptr;
  EXPECT_REFUSED(frugal_trainer_create(engine, &config, &again), FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_step_end(stays, 1, 0));
  ASSERT_OK(frugal_trainer_create(engine, &config, &again));
  EXPECT_REFUSED(frugal_step_begin(again, 1, 0), FRUGAL_ERR_STEP_ORDER);
  TrainStep(again, 2, table, {1});
  EXPECT_EQ(engine.Committed(), 1u);
  TrainStep(stays, 2, table, {1});
  EXPECT_EQ(engine.Committed(), 2u);
  EXPECT_EQ(GetOne(table, 1), -4.0f);
}

TEST(Trainers, ClosingWakesAWaitingCall) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* waits = engine.Trainer(0);
  engine.Trainer(1);
  TrainStep(waits, 0, table, {1});
  std::atomic<int32_t> status{1};
  std::thread thread([&] { status = frugal_step_begin(waits, 1, kWait); });
  while (engine.Stats().gate_waits == 0) std::this_thread::yield();
  EXPECT_EQ(status, 1);
  EXPECT_OK(frugal_trainer_close(waits));
  thread.join();
  EXPECT_EQ(status, FRUGAL_ERR_CLOSED);
}

TEST(Trainers, ClosingTheEngineWakesWaitingCalls) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* waits = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  TrainStep(waits, 0, table, {1});
  ASSERT_OK(frugal_step_begin(other, 0, kWait));
  std::atomic<int32_t> status{1};
  std::thread thread([&] { status = frugal_step_begin(waits, 1, FRUGAL_TIMEOUT_INFINITE); });
  while (engine.Stats().gate_waits == 0) std::this_thread::yield();
  engine.Close();
  thread.join();
  EXPECT_EQ(status, FRUGAL_ERR_CLOSED);
}

// A trainer may be closed in any moment of a step_begin, though the gate is open.
TEST(Trainers, ClosingBesideAnOpenGate) {
  for (int i = 0; i < 200; ++i) {
    Engine engine;
    frugal_trainer* trainer = engine.Trainer(0);
    std::atomic<int32_t> status{1};
    std::atomic<bool> go{false};
    std::thread thread([&] {
      go = true;
      status = frugal_step_begin(trainer, 0, kWait);
    });
    while (!go) {
    }
    if (i % 2) {
      engine.Close();
    } else {
      EXPECT_OK(frugal_trainer_close(trainer));
    }
    thread.join();
    EXPECT_TRUE(status == FRUGAL_OK || status == FRUGAL_ERR_CLOSED ||
                status == FRUGAL_ERR_BAD_HANDLE)
        << frugal_status_name(status);
  }
}

// Rows that a step has created before there were caches are not cached by the second one either: an
// abort takes them back, and their slots may become other rows.
TEST(Trainers, ASecondCacheJoinsBeforeAnAbort) {
  Engine engine(3, [](frugal_config* c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 64, 1, [](frugal_table_config* c) {
    c->init = FRUGAL_INIT_UNIFORM;
    c->init_b = 1;
  });
  std::vector<uint64_t> first, second;
  for (uint64_t i = 0; i < 32; ++i) {
    first.push_back(1000 + i);
    second.push_back(5000 + i);
  }
  RowOp before(table, first, 1);
  frugal_trainer* plain = engine.Trainer(0);
  ASSERT_OK(frugal_step_begin(plain, 0, kWait));
  ASSERT_OK(frugal_lookup(plain, &before.op, 1));
  frugal_trainer* cached = engine.Trainer(1, 1.0);
  frugal_trainer* too = engine.Trainer(2, 1.0);
  ASSERT_OK(frugal_prefetch(too, 0, &before.op, 1, nullptr));
  for (frugal_trainer* t : {cached, too}) ASSERT_OK(frugal_step_begin(t, 0, kWait));
  ASSERT_OK(frugal_step_abort(plain));
  for (frugal_trainer* t : {cached, too})
    EXPECT_REFUSED(frugal_step_end(t, 0, 0), FRUGAL_ERR_STEP_ABORTED);
  for (frugal_trainer* t : {plain, cached, too}) ASSERT_OK(frugal_step_begin(t, 0, kWait));
  for (frugal_trainer* t : {plain, cached, too}) ASSERT_OK(frugal_step_end(t, 0, 0));
  for (frugal_trainer* t : {plain, cached, too}) ASSERT_OK(frugal_step_begin(t, 1, kWait));
  RowOp rows(table, second, 1), same(table, second, 1);
  ASSERT_OK(frugal_lookup(plain, &rows.op, 1));
  ASSERT_OK(frugal_lookup(too, &same.op, 1));
  EXPECT_EQ(rows.rows, same.rows);
}

// --- Steps ---

// A step_begin whose gate is open, and that is closed before it has begun, ends, too: neither the
// caller nor the closing thread hangs.
TEST(Trainers, ClosingWhileStepsBegin) {
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    Engine engine;
    frugal_trainer* trainer = engine.Trainer(0);
    std::atomic<uint64_t> steps{0};
    std::thread training([&] {
      int32_t status = FRUGAL_OK;
      for (uint64_t s = 0; status == FRUGAL_OK; ++s) {
        status = frugal_step_begin(trainer, s, kWait);
        if (status == FRUGAL_OK) status = frugal_step_end(trainer, s, 0);
        steps = s + 1;
      }
      EXPECT_TRUE(status == FRUGAL_ERR_CLOSED || status == FRUGAL_ERR_BAD_HANDLE)
          << frugal_status_name(status);
    });
    while (steps < 3) std::this_thread::yield();
    if (round % 2) {
      EXPECT_OK(frugal_trainer_close(trainer));
    } else {
      engine.Close();
    }
    training.join();
  }
}

TEST(Steps, Order) {
  Engine engine(2);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  const int32_t order = FRUGAL_ERR_STEP_ORDER;
  const uint64_t first = (uint64_t{1} << 40) + 7;
  EXPECT_REFUSED(frugal_step_end(a, first, 0), FRUGAL_ERR_NOT_IN_STEP);
  ASSERT_OK(frugal_step_begin(a, first, kWait));
  EXPECT_REFUSED(frugal_step_begin(a, first, kWait), order);
  EXPECT_REFUSED(frugal_step_begin(a, first + 1, kWait), order);
  // The first step is the same on all ranks.
  EXPECT_REFUSED(frugal_step_begin(b, first + 1, kWait), order);
  EXPECT_REFUSED(frugal_step_begin(b, first - 1, kWait), order);
  EXPECT_REFUSED(frugal_step_begin(b, 0, kWait), order);
  ASSERT_OK(frugal_step_begin(b, first, kWait));
  EXPECT_REFUSED(frugal_step_end(a, first + 1, 0), FRUGAL_ERR_INVALID_ARGUMENT,
                 FRUGAL_ERR_NOT_IN_STEP, FRUGAL_ERR_STEP_ORDER);
  EXPECT_REFUSED(frugal_step_end(a, first, 2), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_REFUSED(frugal_step_end(a, first, 0x80000001u), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_step_end(a, first, 0));
  EXPECT_REFUSED(frugal_step_end(a, first, 0), FRUGAL_ERR_NOT_IN_STEP);
  EXPECT_EQ(engine.Committed(), FRUGAL_NO_STEP);
  ASSERT_OK(frugal_step_end(b, first, 0));
  EXPECT_EQ(engine.Committed(), first);
  EXPECT_REFUSED(frugal_step_begin(a, first, kWait), order);
  EXPECT_REFUSED(frugal_step_begin(a, first + 2, kWait), order);
  ASSERT_OK(frugal_step_begin(a, first + 1, kWait));
  ASSERT_OK(frugal_step_begin(b, first + 1, kWait));
  ASSERT_OK(frugal_step_end(b, first + 1, 0));
  ASSERT_OK(frugal_step_end(a, first + 1, 0));
  EXPECT_EQ(engine.Committed(), first + 1);
}

TEST(Steps, CallsThatBelongInAStep) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1}, 1);
  void* memory = nullptr;
  for (uint64_t step = 0; step < 2; ++step) {
    const int32_t out = FRUGAL_ERR_NOT_IN_STEP;
    EXPECT_REFUSED(frugal_lookup(trainer, &row.op, 1), out);
    EXPECT_REFUSED(frugal_push_grad(trainer, &row.op, 1), out);
    EXPECT_REFUSED(frugal_borrow(trainer, 64, &memory), out);
    EXPECT_REFUSED(frugal_step_end(trainer, step, 0), out);
    EXPECT_REFUSED(frugal_step_abort(trainer), out);
    EXPECT_EQ(Count(table), 0u);
    EXPECT_EQ(memory, nullptr);
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    ASSERT_OK(frugal_step_end(trainer, step, 0));
  }
}

TEST(Steps, CallsWithoutOps) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  const frugal_op op = FRUGAL_OP_INIT;
  for (const frugal_op* ops : {static_cast<const frugal_op*>(nullptr), &op}) {
    const uint64_t step = ops ? 1 : 0;
    EXPECT_OK(frugal_prefetch(trainer, step, ops, 0, nullptr));
    EXPECT_REFUSED(frugal_lookup(trainer, ops, 0), FRUGAL_ERR_NOT_IN_STEP);
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    EXPECT_OK(frugal_lookup(trainer, ops, 0));
    EXPECT_OK(frugal_push_grad(trainer, ops, 0));
    ASSERT_OK(frugal_step_end(trainer, step, 0));
    EXPECT_OK(frugal_read(engine, nullptr, ops, 0, kWait));
    EXPECT_EQ(engine.Committed(), step);
  }
  EXPECT_EQ(GetOne(table, 1), 0.0f);
}

TEST(Steps, TimeOuts) {
  Engine engine(2, [](frugal_config* c) { c->timeout_ms = 60; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  TrainStep(a, 0, table, {1});
  ASSERT_OK(frugal_step_begin(b, 0, kWait));
  const auto waited = [&](int64_t timeout) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_REFUSED(frugal_step_begin(a, 1, timeout), FRUGAL_ERR_TIMEOUT);
    EXPECT_NE(LastMessage().find("rank 1"), std::string::npos) << LastMessage();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  };
  EXPECT_LT(waited(0), 2000);
  const double short_wait = waited(20);
  EXPECT_GE(short_wait, 19);
  EXPECT_LT(short_wait, 5000);
  const double default_wait = waited(FRUGAL_TIMEOUT_DEFAULT);
  EXPECT_GE(default_wait, 59);
  EXPECT_LT(default_wait, 5000);
  // A call that timed out took nothing.
  ASSERT_OK(frugal_step_end(b, 0, 0));
  EXPECT_REFUSED(frugal_step_begin(a, 1, -7), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_step_begin(a, 1, kWait));
  ASSERT_OK(frugal_step_end(a, 1, 0));
  EXPECT_REFUSED(frugal_flush(engine, -7), FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST(Steps, OneThreadDrivesAllRanks) {
  for (uint32_t threads : {0u, 1u}) {
    Engine engine(3, [&](frugal_config* c) {
      c->flush_threads = threads;
      c->flush_mode = FRUGAL_FLUSH_DEFERRED;
    });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
    std::vector<frugal_trainer*> trainers;
    for (uint32_t r = 0; r < 3; ++r) trainers.push_back(engine.Trainer(r));
    for (uint64_t step = 0; step < 20; ++step) {
      RowOp row(table, {1, 2, 1}, 1);
      for (frugal_trainer* t : trainers) {
        ASSERT_OK(frugal_prefetch(t, step + 2, &row.op, 1, nullptr));
        ASSERT_OK(frugal_step_begin(t, step, kWait));
      }
      for (frugal_trainer* t : trainers) {
        ASSERT_OK(frugal_lookup(t, &row.op, 1));
        EXPECT_EQ(row.rows[0], -6.0f * static_cast<float>(step));
        EXPECT_EQ(row.rows[1], -3.0f * static_cast<float>(step));
        ASSERT_OK(frugal_push_grad(t, &row.op, 1));
      }
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, step, 0));
    }
    EXPECT_EQ(GetOne(table, 1), -120.0f);
  }
}

// A step whose rows were prepared ahead, by what was declared, has those that were pushed.
TEST(Steps, OtherRowsArePushedThanDeclared) {
  Engine engine(1, [](frugal_config* c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; });
  frugal_trainer* trainer = engine.Trainer(0);
  int ahead = 0;
  for (uint64_t step = 0; step < 5; ++step) {
    frugal_table* table = engine.Table(std::to_string(step).c_str(), FRUGAL_DENSE, 10, 1);
    RowOp declared(table, {1, 2}, 1), pushed(table, {2, 3}, 1);
    ASSERT_OK(frugal_prefetch(trainer, step, &declared.op, 1, nullptr));
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    // Nothing is pending and all is linked: what is counted from here on shows that preparing has
    // begun.
    const uint64_t before = engine.Stats().entry_ns;
    for (int look = 0; look < 2000 && engine.Stats().entry_ns == before; ++look)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ahead += engine.Stats().entry_ns != before;
    ASSERT_OK(frugal_push_grad(trainer, &pushed.op, 1));
    ASSERT_OK(frugal_step_end(trainer, step, 0));
    ASSERT_OK(frugal_flush(engine, kWait));
    EXPECT_EQ(GetOne(table, 1), 0.0f);
    EXPECT_EQ(GetOne(table, 2), -1.0f);
    EXPECT_EQ(GetOne(table, 3), -1.0f);
  }
  EXPECT_GT(ahead, 0) << "nothing was taken in ahead: the test shows nothing";
}

TEST(Steps, SkippedOnesCommitWithoutUpdates) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  RowOp row(table, {5}, 1);
  for (frugal_trainer* t : {a, b}) {
    ASSERT_OK(frugal_step_begin(t, 0, kWait));
    ASSERT_OK(frugal_push_grad(t, &row.op, 1));
  }
  ASSERT_OK(frugal_step_end(a, 0, FRUGAL_STEP_SKIP));
  ASSERT_OK(frugal_step_end(b, 0, 0));
  EXPECT_EQ(engine.Committed(), 0u);
  EXPECT_EQ(GetOne(table, 5), 0.0f);
  EXPECT_EQ(Count(table), 1u);  // the step committed, and the push made the row
}

// --- Aborts ---

TEST(Abort, UndoesTheStepOnAllRanks) {
  Engine engine(2, [](frugal_config* c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* a = engine.Trainer(0, 0.5);
  frugal_trainer* b = engine.Trainer(1);
  TrainStep(a, 10, table, {1});
  TrainStep(b, 10, table, {1});
  RowOp row(table, {1, 2}, 1);
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(a, 11, &row.op, 1, &batch));
  ASSERT_OK(frugal_step_begin(a, 11, kWait));
  ASSERT_OK(frugal_push_grad(a, &row.op, 1));
  ASSERT_OK(frugal_step_end(a, 11, 0));
  ASSERT_OK(frugal_step_begin(b, 11, kWait));
  ASSERT_OK(frugal_lookup(b, &row.op, 1));
  ASSERT_OK(frugal_step_abort(b));
  EXPECT_EQ(engine.Committed(), 10u);
  EXPECT_REFUSED(frugal_step_abort(b), FRUGAL_ERR_NOT_IN_STEP);
  EXPECT_REFUSED(frugal_step_begin(a, 12, kWait), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_NE(LastMessage().find("11"), std::string::npos) << LastMessage();
  EXPECT_REFUSED(frugal_step_begin(a, 12, kWait), FRUGAL_ERR_STEP_ORDER);  // reported once
  EXPECT_EQ(Count(table), 1u);
  EXPECT_EQ(GetOne(table, 1), -2.0f);

  // Declarations stay.
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.batch = batch;
  float out[2] = {kUntouched, kUntouched};
  op.rows_out = out;
  ASSERT_OK(frugal_step_begin(a, 11, kWait));
  EXPECT_OK(frugal_lookup(a, &op, 1));
  EXPECT_EQ(out[0], -2.0f);
  EXPECT_EQ(out[1], 0.0f);
  ASSERT_OK(frugal_step_end(a, 11, 0));
  TrainStep(b, 11, table, {1});
  EXPECT_EQ(engine.Committed(), 11u);
  EXPECT_EQ(GetOne(table, 1), -3.0f);
  EXPECT_EQ(engine.Stats().steps_committed, 2u);
  EXPECT_EQ(engine.Stats().steps_aborted, 1u);
}

TEST(Abort, OfTheFirstStep) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  RowOp row(table, {1}, 1);
  ASSERT_OK(frugal_step_begin(a, 3, kWait));
  ASSERT_OK(frugal_step_begin(b, 3, kWait));
  ASSERT_OK(frugal_push_grad(b, &row.op, 1));
  ASSERT_OK(frugal_step_abort(a));
  EXPECT_REFUSED(frugal_push_grad(b, &row.op, 1), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(engine.Committed(), FRUGAL_NO_STEP);
  EXPECT_EQ(Count(table), 0u);
  TrainStep(b, 3, table, {1});
  TrainStep(a, 3, table, {});
  EXPECT_EQ(GetOne(table, 1), -1.0f);
}

TEST(Abort, IsToldByWhateverCallComesNext) {
  for (int call = 0; call < 4; ++call) {
    Engine engine(2);
    frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
    frugal_trainer* a = engine.Trainer(0);
    frugal_trainer* b = engine.Trainer(1);
    ASSERT_OK(frugal_step_begin(a, 0, kWait));
    ASSERT_OK(frugal_step_begin(b, 0, kWait));
    ASSERT_OK(frugal_step_abort(a));
    RowOp row(table, {1}, 1);
    const int32_t aborted = FRUGAL_ERR_STEP_ABORTED;
    switch (call) {
      case 0:
        EXPECT_REFUSED(frugal_lookup(b, &row.op, 1), aborted);
        break;
      case 1:
        EXPECT_REFUSED(frugal_push_grad(b, &row.op, 1), aborted);
        break;
      case 2:
        EXPECT_REFUSED(frugal_step_end(b, 0, 0), aborted);
        break;
      default:
        EXPECT_REFUSED(frugal_step_begin(b, 0, kWait), aborted);
    }
    EXPECT_REFUSED(frugal_step_end(b, 0, 0), FRUGAL_ERR_NOT_IN_STEP);
    TrainStep(a, 0, table, {1});
    TrainStep(b, 0, table, {1});
    EXPECT_EQ(GetOne(table, 1), -2.0f);
  }
}

TEST(Abort, LeavesLentMemoryUntilTheRankIsTold) {
  constexpr size_t kDim = 1024, kRows = 64;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, kRows, kDim);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  ASSERT_OK(frugal_step_begin(a, 0, kWait));
  ASSERT_OK(frugal_step_begin(b, 0, kWait));
  void* lent = nullptr;
  ASSERT_OK(frugal_borrow(a, kRows * kDim * sizeof(float), &lent));
  ASSERT_OK(frugal_step_abort(b));
  // Rank 0 does not know yet, and goes on computing gradients into what it has borrowed.
  std::vector<uint64_t> keys(kRows);
  for (size_t i = 0; i < kRows; ++i) keys[i] = i;
  RowOp rows(table, keys, kDim);
  ASSERT_OK(frugal_step_begin(b, 0, kWait));
  ASSERT_OK(frugal_push_grad(b, &rows.op, 1));
  std::fill_n(static_cast<float*>(lent), kRows * kDim, 1000.0f);
  ASSERT_OK(frugal_step_end(b, 0, 0));
  EXPECT_REFUSED(frugal_step_end(a, 0, 0), FRUGAL_ERR_STEP_ABORTED);
  TrainStep(a, 0, table, {});
  std::vector<float> values(kRows * kDim);
  ASSERT_OK(frugal_get(table, keys.data(), kRows, 0, values.data(), 0, nullptr));
  for (float x : values) ASSERT_EQ(x, -1.0f);
}

TEST(Abort, WakesAWaitingGate) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  TrainStep(a, 0, table, {1});
  ASSERT_OK(frugal_step_begin(b, 0, kWait));
  std::atomic<int32_t> status{1};
  std::thread thread([&] { status = frugal_step_begin(a, 1, FRUGAL_TIMEOUT_INFINITE); });
  while (engine.Stats().gate_waits == 0) std::this_thread::yield();
  EXPECT_EQ(status, 1);
  ASSERT_OK(frugal_step_abort(b));
  thread.join();
  EXPECT_EQ(status, FRUGAL_ERR_STEP_ABORTED);
  TrainStep(a, 0, table, {2});
  TrainStep(b, 0, table, {2});
  EXPECT_EQ(GetOne(table, 1), 0.0f);
  EXPECT_EQ(GetOne(table, 2), -2.0f);
}

TEST(Abort, ByClosingATrainerInAStep) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* stays = engine.Trainer(0);
  frugal_trainer* leaves = engine.Trainer(1);
  TrainStep(stays, 0, table, {1});
  TrainStep(leaves, 0, table, {1});
  RowOp row(table, {1, 9}, 1);
  for (frugal_trainer* t : {stays, leaves}) {
    ASSERT_OK(frugal_step_begin(t, 1, kWait));
    ASSERT_OK(frugal_push_grad(t, &row.op, 1));
  }
  ASSERT_OK(frugal_trainer_close(leaves));
  EXPECT_REFUSED(frugal_step_end(stays, 1, 0), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(engine.Committed(), 0u);
  EXPECT_EQ(Count(table), 1u);
  EXPECT_EQ(GetOne(table, 1), -2.0f);
  TrainStep(stays, 1, table, {1});
  EXPECT_EQ(engine.Committed(), 1u);
  frugal_trainer* again = engine.Trainer(1);
  TrainStep(stays, 2, table, {1});
  TrainStep(again, 2, table, {1});
  EXPECT_EQ(GetOne(table, 1), -5.0f);
}

TEST(Abort, ByClosingTheEngineInAStep) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1}, 1);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
  engine.Close();
  EXPECT_REFUSED(frugal_step_end(trainer, 0, 0), FRUGAL_ERR_BAD_HANDLE);
}

// --- Declarations ---

TEST(Prefetch, Range) {
  Engine engine(1, [](frugal_config* c) { c->lookahead = 4; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1}, 1);
  const int32_t range = FRUGAL_ERR_STEP_RANGE;
  TrainStep(trainer, 20, table, {});
  frugal_batch* batch = nullptr;
  EXPECT_REFUSED(frugal_prefetch(trainer, 20, &row.op, 1, &batch), range);
  EXPECT_REFUSED(frugal_prefetch(trainer, 0, &row.op, 1, &batch), range);
  EXPECT_OK(frugal_prefetch(trainer, 21 + 4, &row.op, 1, nullptr));  // as in the protocol
  EXPECT_REFUSED(frugal_prefetch(trainer, 21 + 5, &row.op, 1, &batch), range);
  EXPECT_REFUSED(frugal_prefetch(trainer, UINT64_MAX, &row.op, 1, &batch), range);
  EXPECT_EQ(batch, nullptr);
  {  // Steps that can never be begun are not declared.
    Engine last;
    frugal_table* there = last.Table("t", FRUGAL_HASHED, 10, 1);
    frugal_trainer* rank = last.Trainer(0);
    RowOp its(there, {1}, 1);
    EXPECT_REFUSED(frugal_prefetch(rank, UINT64_MAX - 64, &its.op, 1, nullptr),
                   FRUGAL_ERR_INVALID_ARGUMENT);
    ASSERT_OK(frugal_step_begin(rank, UINT64_MAX - 65, kWait));
    EXPECT_REFUSED(frugal_prefetch(rank, UINT64_MAX - 64, &its.op, 1, nullptr),
                   FRUGAL_ERR_INVALID_ARGUMENT);
    ASSERT_OK(frugal_step_end(rank, UINT64_MAX - 65, 0));
  }
  ASSERT_OK(frugal_step_begin(trainer, 21, kWait));
  EXPECT_REFUSED(frugal_prefetch(trainer, 21, &row.op, 1, &batch), range);
  EXPECT_OK(frugal_prefetch(trainer, 22, &row.op, 1, nullptr));
  EXPECT_OK(frugal_prefetch(trainer, 25, &row.op, 1, nullptr));
  EXPECT_REFUSED(frugal_prefetch(trainer, 26, &row.op, 1, &batch), range);
  ASSERT_OK(frugal_step_end(trainer, 21, 0));
}

TEST(Prefetch, DefaultLookahead) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 4, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1}, 1);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_OK(frugal_prefetch(trainer, 10, &row.op, 1, nullptr));
  EXPECT_REFUSED(frugal_prefetch(trainer, 11, &row.op, 1, nullptr), FRUGAL_ERR_STEP_RANGE);
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
}

// With no flush threads keys are resolved in the call, and it still returns the same.
TEST(Prefetch, ATableThatIsTooSmallIsToldByTheStep) {
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 2, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1, 2, 3}, 1);
  EXPECT_OK(frugal_prefetch(trainer, 0, &row.op, 1, nullptr));
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer, &row.op, 1), FRUGAL_ERR_TABLE_FULL);
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
}

TEST(Prefetch, BeforeTheFirstStepInAnyOrder) {
  Engine engine(1, [](frugal_config* c) { c->lookahead = 4; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1}, 1);
  for (uint64_t step : {1002, 1004, 1000, 1003}) {
    EXPECT_OK(frugal_prefetch(trainer, step, &row.op, 1, nullptr));
  }
  for (uint64_t step = 1000; step < 1006; ++step) {
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
    EXPECT_EQ(row.rows[0], -static_cast<float>(step - 1000));
    ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
    ASSERT_OK(frugal_step_end(trainer, step, 0));
  }
}

TEST(Prefetch, RefusedOnesDeclareNothing) {
  Engine engine;
  frugal_table* dense = engine.Table("dense", FRUGAL_DENSE, 10, 1);
  frugal_table* hashed = engine.Table("hashed", FRUGAL_HASHED, 4, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp good(hashed, {1, 2, 3, 4}, 1);
  RowOp bad(dense, {3, 10}, 1);
  frugal_batch* batch = nullptr;
  frugal_op ops[] = {good.op, bad.op};
  EXPECT_REFUSED(frugal_prefetch(trainer, 0, ops, 2, &batch), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  const auto refuses = [&](int32_t status, const std::function<void(frugal_op*)>& change) {
    ops[1] = bad.op;
    ops[1].count = 1;
    change(&ops[1]);
    EXPECT_REFUSED(frugal_prefetch(trainer, 0, ops, 2, &batch), status);
  };
  refuses(FRUGAL_ERR_STRUCT_SIZE, [](frugal_op* op) { op->struct_size = 8; });
  refuses(FRUGAL_ERR_STRUCT_SIZE, [](frugal_op* op) { op->struct_size += 8; });
  refuses(FRUGAL_ERR_INVALID_ARGUMENT, [](frugal_op* op) { op->flags = 2; });
  refuses(FRUGAL_ERR_INVALID_ARGUMENT, [](frugal_op* op) { op->keys = nullptr; });
  EXPECT_EQ(batch, nullptr);
  EXPECT_EQ(engine.Stats().keys_declared, 0u);
  // Nothing is reserved: four other keys fit.
  TrainStep(trainer, 0, hashed, {11, 12, 13, 14});
  EXPECT_EQ(Count(hashed), 4u);
}

TEST(Prefetch, CreatesNoRows) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {1, 2}, 1);
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_OK(frugal_prefetch(trainer, step, &row.op, 1, nullptr));
  }
  ASSERT_OK(frugal_flush(engine, kWait));
  EXPECT_EQ(Count(table), 0u);
  uint8_t found = 9;
  GetOne(table, 1, &found);
  EXPECT_EQ(found, 0);
  for (uint64_t step = 0; step < 3; ++step) TrainStep(trainer, step, table, {7});
  EXPECT_EQ(Keys(table), std::set<uint64_t>{7});
}

TEST(Prefetch, Cancel) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  RowOp row(table, {1, 2}, 1);
  frugal_batch *first = nullptr, *second = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 0, &row.op, 1, &first));
  ASSERT_OK(frugal_prefetch(trainer, 0, &row.op, 1, &second));
  EXPECT_NE(first, second);
  EXPECT_REFUSED(frugal_prefetch_cancel(other, first), FRUGAL_ERR_BAD_HANDLE,
                 FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_OK(frugal_prefetch_cancel(trainer, first));
  EXPECT_REFUSED(frugal_prefetch_cancel(trainer, first), FRUGAL_ERR_BAD_HANDLE);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_REFUSED(frugal_prefetch_cancel(trainer, second), FRUGAL_ERR_STEP_RANGE);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.batch = second;
  float out[2] = {kUntouched, kUntouched};
  op.rows_out = out;
  EXPECT_OK(frugal_lookup(trainer, &op, 1));
  EXPECT_EQ(out[1], 0.0f);
  op.batch = first;
  EXPECT_REFUSED(frugal_lookup(trainer, &op, 1), FRUGAL_ERR_BAD_HANDLE, FRUGAL_ERR_NOT_FOUND);
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
}

// So many batches a rank may declare for a step. What is taken back, or of another rank or step,
// does not count.
TEST(Prefetch, MostBatches) {
  constexpr uint32_t kMost = 4096;
  Engine engine(2, [](frugal_config* c) { c->lookahead = 2; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  RowOp row(table, {1}, 1);
  frugal_batch *first = nullptr, *more = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 1, &row.op, 1, &first));
  for (uint32_t i = 1; i < kMost; ++i)
    ASSERT_OK(frugal_prefetch(trainer, 1, &row.op, i % 2, nullptr));
  for (size_t n : {0, 1}) {
    EXPECT_REFUSED(frugal_prefetch(trainer, 1, &row.op, n, &more), FRUGAL_ERR_INVALID_ARGUMENT);
    EXPECT_NE(LastMessage().find("4096"), std::string::npos) << LastMessage();
  }
  EXPECT_EQ(more, nullptr);
  EXPECT_OK(frugal_prefetch(other, 1, &row.op, 1, nullptr));
  EXPECT_OK(frugal_prefetch(trainer, 0, &row.op, 1, nullptr));
  ASSERT_OK(frugal_prefetch_cancel(trainer, first));
  ASSERT_OK(frugal_prefetch(trainer, 1, &row.op, 1, &first));
  EXPECT_REFUSED(frugal_prefetch(trainer, 1, &row.op, 1, nullptr), FRUGAL_ERR_INVALID_ARGUMENT);
  // They end with their trainer.
  ASSERT_OK(frugal_trainer_close(trainer));
  trainer = engine.Trainer(0);
  EXPECT_REFUSED(frugal_prefetch_cancel(trainer, first), FRUGAL_ERR_BAD_HANDLE);
  EXPECT_OK(frugal_prefetch(trainer, 1, &row.op, 1, nullptr));
  for (uint64_t step : {0, 1})
    for (frugal_trainer* t : {trainer, other}) TrainStep(t, step, table, {1});
  EXPECT_EQ(engine.Committed(), 1u);
}

// A trainer's batches end with it, except those of steps that others have not ended yet. If such a
// step is undone, the rank's next trainer begins it again: the batch has the keys that it named.
TEST(Prefetch, BatchesOfAFormerTrainer) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* former = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  const uint64_t keys[] = {1, 7};
  const float rows[] = {10, 70};
  ASSERT_OK(frugal_put(table, keys, 2, 0, rows, 0));
  RowOp first(table, {1}, 1), last(table, {7}, 1);
  frugal_batch *ended = nullptr, *later = nullptr, *own = nullptr, *own_later = nullptr;
  ASSERT_OK(frugal_prefetch(former, 0, &first.op, 1, &ended));
  ASSERT_OK(frugal_prefetch(former, 1, &first.op, 1, &later));
  ASSERT_OK(frugal_step_begin(former, 0, kWait));
  ASSERT_OK(frugal_step_begin(other, 0, kWait));
  ASSERT_OK(frugal_step_end(former, 0, 0));
  ASSERT_OK(frugal_trainer_close(former));
  ASSERT_OK(frugal_step_abort(other));
  frugal_trainer* now = engine.Trainer(0);
  ASSERT_OK(frugal_prefetch(now, 0, &last.op, 1, &own));
  ASSERT_OK(frugal_prefetch(now, 1, &last.op, 1, &own_later));
  const auto row_of = [&](frugal_batch* batch) {
    float out = kUntouched;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.batch = batch;
    op.rows_out = &out;
    const int32_t status = frugal_lookup(now, &op, 1);
    EXPECT_TRUE(status == FRUGAL_OK || status == FRUGAL_ERR_BAD_HANDLE) << LastMessage();
    EXPECT_EQ(status == FRUGAL_OK, out != kUntouched);
    return out;
  };
  for (const uint64_t step : {0, 1}) {
    ASSERT_OK(frugal_step_begin(now, step, kWait));
    ASSERT_OK(frugal_step_begin(other, step, kWait));
    EXPECT_EQ(row_of(step == 0 ? own : own_later), 70);
    EXPECT_EQ(row_of(step == 0 ? ended : later), step == 0 ? 10 : kUntouched);
    ASSERT_OK(frugal_step_end(now, step, 0));
    ASSERT_OK(frugal_step_end(other, step, 0));
  }
  EXPECT_REFUSED(frugal_prefetch_cancel(now, later), FRUGAL_ERR_BAD_HANDLE);
}

// Nor do these count as those of the rank's next trainer.
TEST(Prefetch, MostBatchesAfterAFormerTrainer) {
  constexpr uint32_t kMost = 4096;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* former = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  RowOp row(table, {1}, 1);
  for (uint32_t i = 0; i < kMost; ++i)
    ASSERT_OK(frugal_prefetch(former, 0, &row.op, i % 2, nullptr));
  ASSERT_OK(frugal_step_begin(former, 0, kWait));
  ASSERT_OK(frugal_step_begin(other, 0, kWait));
  ASSERT_OK(frugal_step_end(former, 0, 0));
  ASSERT_OK(frugal_trainer_close(former));
  ASSERT_OK(frugal_step_abort(other));
  for (int again = 0; again < 2; ++again) {
    frugal_trainer* now = engine.Trainer(0);
    for (uint32_t i = 0; i < kMost; ++i)
      ASSERT_OK(frugal_prefetch(now, 0, &row.op, i % 2, nullptr));
    EXPECT_REFUSED(frugal_prefetch(now, 0, &row.op, 1, nullptr), FRUGAL_ERR_INVALID_ARGUMENT);
    ASSERT_OK(frugal_trainer_close(now));
  }
  frugal_trainer* now = engine.Trainer(0);
  for (frugal_trainer* t : {now, other}) TrainStep(t, 0, table, {1});
  EXPECT_EQ(engine.Committed(), 0u);
}

TEST(Prefetch, BatchesThatAreWrong) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_table* second_table = engine.Table("u", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  frugal_trainer* other = engine.Trainer(1);
  RowOp row(table, {1, 2}, 1);
  frugal_batch *now = nullptr, *later = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 0, &row.op, 1, &now));
  ASSERT_OK(frugal_prefetch(trainer, 1, &row.op, 1, &later));
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  ASSERT_OK(frugal_step_begin(other, 0, kWait));
  float out[2];
  const auto status = [&](frugal_trainer* who, const std::function<void(frugal_op*)>& change) {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.batch = now;
    op.rows_out = out;
    change(&op);
    return frugal_lookup(who, &op, 1);
  };
  const auto nothing = [](frugal_op*) {};
  EXPECT_REFUSED(status(trainer, [](frugal_op* op) { op->part = 1; }), FRUGAL_ERR_INVALID_ARGUMENT,
                 FRUGAL_ERR_NOT_FOUND);
  EXPECT_REFUSED(status(trainer, [&](frugal_op* op) { op->table = second_table; }),
                 FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_REFUSED(status(trainer, [&](frugal_op* op) { op->batch = later; }),
                 FRUGAL_ERR_INVALID_ARGUMENT, FRUGAL_ERR_BAD_HANDLE, FRUGAL_ERR_NOT_FOUND,
                 FRUGAL_ERR_STEP_RANGE, FRUGAL_ERR_STEP_ORDER);
  EXPECT_REFUSED(status(other, nothing), FRUGAL_ERR_INVALID_ARGUMENT, FRUGAL_ERR_BAD_HANDLE,
                 FRUGAL_ERR_NOT_FOUND);
  EXPECT_OK(status(trainer, nothing));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  ASSERT_OK(frugal_step_end(other, 0, 0));
  EXPECT_EQ(Keys(table), (std::set<uint64_t>{1, 2}));
  EXPECT_EQ(Count(second_table), 0u);
  ASSERT_OK(frugal_step_begin(trainer, 1, kWait));
  EXPECT_REFUSED(status(trainer, nothing), FRUGAL_ERR_BAD_HANDLE, FRUGAL_ERR_NOT_FOUND);
  EXPECT_REFUSED(frugal_prefetch_cancel(trainer, now), FRUGAL_ERR_BAD_HANDLE);
  ASSERT_OK(frugal_step_end(trainer, 1, 0));
}

// --- Ops ---

class Ops : public testing::Test {
 protected:
  Ops() {
    dense_ = engine_.Table("dense", FRUGAL_DENSE, 10, 2);
    hashed_ = engine_.Table("hashed", FRUGAL_HASHED, 10, 2);
    trainer_ = engine_.Trainer(0);
  }
  // A pooled op on the dense table with two bags, of two keys and of one. It follows an op that
  // creates rows of the hashed table: those must not be there after a refusal.
  void Refuses(int32_t status, bool push, const std::function<void(frugal_op*)>& change) {
    RowOp creates(hashed_, {1, 2}, 2);
    frugal_op ops[] = {creates.op, creates.op};
    frugal_op& op = ops[1];
    op.table = dense_;
    op.pooling = FRUGAL_POOL_SUM;
    op.keys = keys_;
    op.count = 3;
    op.offsets = offsets_;
    op.bags = 2;
    op.rows_out = rows_;
    op.grads = grads_;
    change(&op);
    EXPECT_REFUSED(push ? frugal_push_grad(trainer_, ops, 2) : frugal_lookup(trainer_, ops, 2),
                   status)
        << (push ? "push" : "lookup");
  }

  Engine engine_;
  frugal_table* dense_;
  frugal_table* hashed_;
  frugal_trainer* trainer_;
  uint64_t keys_[3] = {3, 4, 5};
  uint64_t offsets_[3] = {0, 2, 3};
  float rows_[6] = {};
  float grads_[6] = {1, 1, 1, 1, 1, 1};
  float weights_[3] = {1, 1, 1};
};

TEST_F(Ops, BadOnesAreRefusedAndTakeNothing) {
  ASSERT_OK(frugal_step_begin(trainer_, 0, kWait));
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  const uint64_t outside[] = {3, 10, 5};
  const uint64_t late[] = {1, 2, 3}, falling[] = {0, 3, 2}, beyond[] = {0, 2, 4}, few[] = {0, 2, 2};
  float weight_grads[3] = {kUntouched, kUntouched, kUntouched};
  for (bool push : {false, true}) {
    Refuses(FRUGAL_ERR_KEY_OUT_OF_RANGE, push, [&](frugal_op* op) { op->keys = outside; });
    Refuses(FRUGAL_ERR_STRUCT_SIZE, push, [](frugal_op* op) { op->struct_size = 0; });
    Refuses(FRUGAL_ERR_STRUCT_SIZE, push, [](frugal_op* op) { op->struct_size += 8; });
    Refuses(invalid, push, [](frugal_op* op) { op->flags = 4; });
    Refuses(invalid, push, [](frugal_op* op) { op->pooling = 3; });
    Refuses(invalid, push, [](frugal_op* op) { op->pooling = -1; });
    Refuses(invalid, push, [](frugal_op* op) { op->keys = nullptr; });
    Refuses(invalid, push, [](frugal_op* op) { op->offsets = nullptr; });
    Refuses(invalid, push, [&](frugal_op* op) { op->offsets = late; });
    Refuses(invalid, push, [&](frugal_op* op) { op->offsets = falling; });
    Refuses(invalid, push, [&](frugal_op* op) { op->offsets = beyond; });
    Refuses(invalid, push, [&](frugal_op* op) { op->offsets = few; });
    Refuses(invalid, push, [&](frugal_op* op) {
      op->pooling = FRUGAL_POOL_MEAN;
      op->weights = weights_;
    });
    Refuses(invalid, push, [](frugal_op* op) { op->row_stride = 4; });  // shorter than a row
    Refuses(invalid, push, [](frugal_op* op) { op->row_stride = 9; });  // no multiple of 4
  }
  Refuses(invalid, false, [](frugal_op* op) { op->rows_out = nullptr; });
  Refuses(invalid, true, [](frugal_op* op) { op->grads = nullptr; });
  Refuses(invalid, true, [&](frugal_op* op) { op->weight_grads_out = weight_grads; });
  EXPECT_EQ(weight_grads[0], kUntouched);
  // A pushed bag has one gradient row; the third row here belongs to no bag.
  ASSERT_OK(frugal_step_end(trainer_, 0, 0));
  EXPECT_EQ(Count(hashed_), 0u);
  for (uint64_t key = 0; key < 10; ++key) EXPECT_EQ(GetOne(dense_, key), 0.0f);
  EXPECT_OK(frugal_health(engine_));
}

TEST_F(Ops, EmptyOnes) {
  frugal_op nothing = FRUGAL_OP_INIT;
  nothing.table = dense_;
  const uint64_t zero = 0;
  frugal_op no_bags = nothing;
  no_bags.pooling = FRUGAL_POOL_SUM;
  no_bags.offsets = &zero;
  ASSERT_OK(frugal_prefetch(trainer_, 0, nullptr, 0, nullptr));
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer_, 0, &nothing, 1, &batch));
  ASSERT_OK(frugal_step_begin(trainer_, 0, kWait));
  EXPECT_OK(frugal_lookup(trainer_, nullptr, 0));
  EXPECT_OK(frugal_push_grad(trainer_, nullptr, 0));
  for (frugal_op op : {nothing, no_bags}) {
    EXPECT_OK(frugal_lookup(trainer_, &op, 1));
    EXPECT_OK(frugal_push_grad(trainer_, &op, 1));
    EXPECT_OK(frugal_read(engine_, trainer_, &op, 1, kWait));
  }
  nothing.batch = batch;
  EXPECT_OK(frugal_lookup(trainer_, &nothing, 1));
  EXPECT_OK(frugal_push_grad(trainer_, &nothing, 1));

  // Bags without keys, and with nothing but padding, are zeros.
  const uint64_t keys[] = {7, 7, 1};
  const uint64_t offsets[] = {0, 0, 2, 3, 3};
  float rows[8];
  std::fill(std::begin(rows), std::end(rows), kUntouched);
  frugal_op bags = FRUGAL_OP_INIT;
  bags.table = hashed_;
  bags.keys = keys;
  bags.count = 3;
  bags.offsets = offsets;
  bags.bags = 4;
  bags.rows_out = rows;
  bags.grads = rows;
  bags.flags = FRUGAL_OP_PADDING;
  bags.padding_key = 7;
  for (int32_t pooling : {FRUGAL_POOL_SUM, FRUGAL_POOL_MEAN}) {
    bags.pooling = pooling;
    EXPECT_OK(frugal_lookup(trainer_, &bags, 1));
    for (float x : rows) EXPECT_EQ(Bits(x), 0u);
    std::fill(std::begin(rows), std::end(rows), 1.0f);
    EXPECT_OK(frugal_push_grad(trainer_, &bags, 1));
  }
  EXPECT_OK(frugal_step_end(trainer_, 0, 0));
  EXPECT_EQ(Keys(hashed_), std::set<uint64_t>{1});  // padding is never created
  EXPECT_EQ(GetOne(hashed_, 1), -2.0f);
  EXPECT_OK(frugal_get(dense_, nullptr, 0, 0, nullptr, 0, nullptr));
  EXPECT_OK(frugal_put(dense_, nullptr, 0, 0, nullptr, 0));
  EXPECT_OK(frugal_delete(dense_, nullptr, 0, nullptr));
  EXPECT_OK(frugal_read(engine_, nullptr, nullptr, 0, kWait));
}

TEST_F(Ops, PaddingOfADenseTableMayBeNoId) {
  RowOp row(dense_, {1, UINT64_MAX}, 2);
  row.op.flags = FRUGAL_OP_PADDING;
  row.op.padding_key = UINT64_MAX;
  ASSERT_OK(frugal_prefetch(trainer_, 0, &row.op, 1, nullptr));
  ASSERT_OK(frugal_step_begin(trainer_, 0, kWait));
  EXPECT_OK(frugal_lookup(trainer_, &row.op, 1));
  EXPECT_EQ(Bits(row.rows[2]), 0u);
  EXPECT_OK(frugal_push_grad(trainer_, &row.op, 1));
  ASSERT_OK(frugal_step_end(trainer_, 0, 0));
  EXPECT_EQ(GetOne(dense_, 1), -1.0f);
}

// Whatever the engine keeps of a pooled push (gradients of bags are fewer than rows here, or as
// many as keys), its rows get what the gradient of each key gives, and nothing points into the
// caller's memory.
TEST(Bags, UpdateRowsAsTheirKeysWould) {
  constexpr uint32_t kDim = 16;
  constexpr size_t kKeys = 600;
  for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED}) {
    Engine engine(1, [&](frugal_config* c) { c->flush_mode = mode; });
    const auto adagrad = [](frugal_table_config* c) { c->optimizer.kind = FRUGAL_ADAGRAD; };
    frugal_table* pooled = engine.Table("pooled", FRUGAL_DENSE, 400, kDim, adagrad);
    frugal_table* plain = engine.Table("plain", FRUGAL_DENSE, 400, kDim, adagrad);
    frugal_trainer* trainer = engine.Trainer(0);
    std::mt19937 random(7);
    std::uniform_real_distribution<float> number(-1, 1);
    for (uint64_t step = 0; step < 24; ++step) {
      const size_t bag_size = step % 2 ? 20 : 1, bags = kKeys / bag_size;
      const bool weighted = step % 3 == 1, mean = step % 3 == 2;
      std::vector<uint64_t> keys(kKeys), offsets(bags + 1);
      std::vector<float> grads(bags * kDim), weights(kKeys), of_keys(kKeys * kDim);
      for (uint64_t& k : keys) k = random() % 400;
      for (size_t b = 0; b <= bags; ++b) offsets[b] = b * bag_size;
      for (float& g : grads) g = number(random);
      for (float& w : weights) w = number(random);
      for (size_t k = 0; k < kKeys; ++k) {
        size_t terms = 0;
        for (size_t i = 0; i < bag_size; ++i) terms += keys[k / bag_size * bag_size + i] != 3;
        for (uint32_t d = 0; d < kDim; ++d) {
          float g = grads[k / bag_size * kDim + d];
          if (weighted) g = weights[k] * g;
          if (mean) g = g / static_cast<float>(terms);
          of_keys[k * kDim + d] = g;
        }
      }
      frugal_op op = FRUGAL_OP_INIT;
      op.table = plain;
      op.keys = keys.data();
      op.count = kKeys;
      op.flags = FRUGAL_OP_PADDING;
      op.padding_key = 3;
      op.grads = of_keys.data();
      if (step % 4 == 0) {
        ASSERT_OK(frugal_prefetch(trainer, step, &op, 1, nullptr));
      }
      ASSERT_OK(frugal_step_begin(trainer, step, kWait));
      const int pushes = step % 5 == 0 ? 2 : 1;
      for (int i = 0; i < pushes; ++i) ASSERT_OK(frugal_push_grad(trainer, &op, 1));
      op.table = pooled;
      op.pooling = mean ? FRUGAL_POOL_MEAN : FRUGAL_POOL_SUM;
      op.offsets = offsets.data();
      op.bags = bags;
      op.weights = weighted ? weights.data() : nullptr;
      op.grads = grads.data();
      for (int i = 0; i < pushes; ++i) ASSERT_OK(frugal_push_grad(trainer, &op, 1));
      std::vector<float> out(bags * kDim), rows(kKeys * kDim);
      if (bag_size == 1 && !weighted) {  // a bag of one is its row
        op.rows_out = out.data();
        ASSERT_OK(frugal_lookup(trainer, &op, 1));
        op.pooling = FRUGAL_POOL_NONE;
        op.rows_out = rows.data();
        ASSERT_OK(frugal_lookup(trainer, &op, 1));
        EXPECT_EQ(0, std::memcmp(out.data(), rows.data(), rows.size() * sizeof(float))) << step;
      }
      for (auto* v : {&grads, &weights, &of_keys}) std::fill(v->begin(), v->end(), kNan);
      std::fill(offsets.begin(), offsets.end(), UINT64_MAX);
      ASSERT_OK(frugal_step_end(trainer, step, 0));
    }
    std::vector<uint64_t> all(400);
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    std::vector<float> a(2 * kDim * all.size()), b(a.size());
    ASSERT_OK(frugal_get(pooled, all.data(), all.size(), FRUGAL_WITH_STATE, a.data(), 0, nullptr));
    ASSERT_OK(frugal_get(plain, all.data(), all.size(), FRUGAL_WITH_STATE, b.data(), 0, nullptr));
    EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float)))
        << "flush mode " << mode;
    EXPECT_NE(a[0], 0.0f);
  }
}

TEST_F(Ops, BorrowedMemory) {
  for (uint64_t step = 0; step < 30; ++step) {
    ASSERT_OK(frugal_step_begin(trainer_, step, kWait));
    void *one = nullptr, *two = nullptr;
    ASSERT_OK(frugal_borrow(trainer_, 16, &one));
    ASSERT_OK(frugal_borrow(trainer_, 1 << 20, &two));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(one) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(two) % 64, 0u);
    std::memset(two, 0x77, 1 << 20);
    RowOp row(dense_, {1, 2}, 2);
    std::fill_n(static_cast<float*>(one), 4, static_cast<float>(step));
    row.op.grads = static_cast<float*>(one);
    ASSERT_OK(frugal_push_grad(trainer_, &row.op, 1));
    std::memset(two, 0x55, 1 << 20);
    ASSERT_OK(frugal_step_end(trainer_, step, 0));
  }
  EXPECT_EQ(GetOne(dense_, 1), -435.0f);
  ASSERT_OK(frugal_step_begin(trainer_, 30, kWait));
  void* memory = nullptr;
  EXPECT_REFUSED(frugal_borrow(trainer_, SIZE_MAX - 100, &memory), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(memory, nullptr);
  ASSERT_OK(frugal_step_end(trainer_, 30, 0));
}

TEST(Nan, Policies) {
  Engine engine;
  const auto with = [](int32_t policy) {
    return [policy](frugal_table_config* c) { c->nan_policy = policy; };
  };
  frugal_table* reject = engine.Table("reject", FRUGAL_HASHED, 10, 2, with(FRUGAL_NAN_REJECT));
  frugal_table* skip = engine.Table("skip", FRUGAL_HASHED, 10, 2, with(FRUGAL_NAN_SKIP));
  frugal_table* accept = engine.Table("accept", FRUGAL_HASHED, 10, 2, with(FRUGAL_NAN_ACCEPT));
  frugal_trainer* trainer = engine.Trainer(0);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  RowOp rejected(reject, {1, 2}, 2), skipped(skip, {1, 2}, 2), accepted(accept, {1, 2}, 2);
  const float other_nan = -std::nanf("123");
  for (RowOp* op : {&rejected, &skipped, &accepted}) op->grads[3] = other_nan;
  frugal_op ops[] = {skipped.op, accepted.op, rejected.op};
  EXPECT_REFUSED(frugal_push_grad(trainer, ops, 3), FRUGAL_ERR_NAN);
  ASSERT_OK(frugal_push_grad(trainer, ops, 2));
  rejected.grads[3] = 1;
  ASSERT_OK(frugal_push_grad(trainer, &rejected.op, 1));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  const uint64_t keys[] = {1, 2};
  float rows[4];
  ASSERT_OK(frugal_get(reject, keys, 2, 0, rows, 0, nullptr));
  for (float x : rows) EXPECT_EQ(x, -1.0f);
  ASSERT_OK(frugal_get(skip, keys, 2, 0, rows, 0, nullptr));
  EXPECT_EQ(rows[0], -1.0f);
  EXPECT_EQ(rows[2], 0.0f);  // not touched, the other element neither
  EXPECT_EQ(rows[3], 0.0f);
  ASSERT_OK(frugal_get(accept, keys, 2, 0, rows, 0, nullptr));
  EXPECT_EQ(rows[2], -1.0f);
  EXPECT_EQ(Bits(rows[3]), 0x7fc00000u);
}

// Of terms, not of sums; and what weight_grads_out gives.
TEST(Nan, WhatRejectLooksAt) {
  const float inf = std::numeric_limits<float>::infinity();
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_table* skip = engine.Table(
      "s", FRUGAL_DENSE, 10, 1, [](frugal_table_config* c) { c->nan_policy = FRUGAL_NAN_SKIP; });
  frugal_trainer* trainer = engine.Trainer(0);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  for (frugal_table* t : {table, skip}) {
    // In one push, and over two.
    RowOp both(t, {1, 1, 2}, 1), other(t, {2, 3}, 1);
    both.grads = {inf, -inf, inf};
    both.op.grads = both.grads.data();
    other.grads = {-inf, 1};
    other.op.grads = other.grads.data();
    EXPECT_OK(frugal_push_grad(trainer, &both.op, 1));
    EXPECT_OK(frugal_push_grad(trainer, &other.op, 1));
  }
  // A NaN that belongs to padding is ignored.
  RowOp padded(table, {4, 7}, 1);
  padded.grads = {1, kNan};
  padded.op.grads = padded.grads.data();
  padded.op.flags = FRUGAL_OP_PADDING;
  padded.op.padding_key = 7;
  EXPECT_OK(frugal_push_grad(trainer, &padded.op, 1));
  // A weight makes a NaN of an infinity, in the first push of a table or later.
  const uint64_t keys[] = {5, 7}, offsets[] = {0, 2};
  const float weights[] = {0, 1};
  float gradient = inf, weight_grads[2] = {kUntouched, kUntouched};
  frugal_op bag = FRUGAL_OP_INIT;
  bag.table = table;
  bag.pooling = FRUGAL_POOL_SUM;
  bag.keys = keys;
  bag.count = 2;
  bag.offsets = offsets;
  bag.bags = 1;
  bag.weights = weights;
  bag.weight_grads_out = weight_grads;
  bag.grads = &gradient;
  bag.flags = FRUGAL_OP_PADDING;
  bag.padding_key = 7;
  EXPECT_REFUSED(frugal_push_grad(trainer, &bag, 1), FRUGAL_ERR_NAN);
  EXPECT_EQ(weight_grads[0], kUntouched);
  EXPECT_EQ(weight_grads[1], kUntouched);
  bag.table = skip;
  EXPECT_OK(frugal_push_grad(trainer, &bag, 1));
  EXPECT_EQ(Bits(weight_grads[0]), 0x7fc00000u);  // row 0 * inf
  EXPECT_EQ(Bits(weight_grads[1]), 0u);           // padding
  bag.table = table;
  gradient = 1;
  EXPECT_OK(frugal_push_grad(trainer, &bag, 1));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  for (uint64_t key : {1, 2}) {
    EXPECT_EQ(Bits(GetOne(table, key)), 0x7fc00000u) << key;
    EXPECT_EQ(GetOne(skip, key), 0.0f) << key;
  }
  EXPECT_EQ(GetOne(table, 3), -1.0f);
  EXPECT_EQ(GetOne(skip, 3), -1.0f);
  EXPECT_EQ(GetOne(table, 7), 0.0f);
}

TEST(Nan, ARejectedPushCreatesNothing) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_table* dense = engine.Table("u", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp good(table, {1, 2}, 1), bad(dense, {1}, 1);
  bad.grads[0] = kNan;
  frugal_op ops[] = {good.op, bad.op};
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  EXPECT_REFUSED(frugal_push_grad(trainer, ops, 2), FRUGAL_ERR_NAN);
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  EXPECT_EQ(Count(table), 0u);
  EXPECT_EQ(GetOne(dense, 1), 0.0f);
}

// --- Full tables ---

class Full : public testing::Test {
 protected:
  Full() {
    table_ = engine_.Table("t", FRUGAL_HASHED, 4, 1);
    other_ = engine_.Table("u", FRUGAL_HASHED, 100, 1);
    trainer_ = engine_.Trainer(0);
  }
  Engine engine_;
  frugal_table* table_;
  frugal_table* other_;
  frugal_trainer* trainer_;
};

TEST_F(Full, TheCallChangesNothing) {
  RowOp fits(other_, {1}, 1), too_many(table_, {1, 2, 3, 4, 5}, 1);
  frugal_op ops[] = {fits.op, too_many.op};
  const int32_t full = FRUGAL_ERR_TABLE_FULL;
  EXPECT_REFUSED(frugal_put(table_, too_many.keys.data(), 5, 0, too_many.grads.data(), 0), full);
  EXPECT_EQ(Count(table_), 0u);
  ASSERT_OK(frugal_step_begin(trainer_, 0, kWait));
  EXPECT_REFUSED(frugal_lookup(trainer_, ops, 2), full);
  EXPECT_REFUSED(frugal_push_grad(trainer_, ops, 2), full);
  // Four different keys fit, however often they come.
  RowOp just(table_, {1, 2, 3, 4, 1, 2, 3, 4}, 1);
  EXPECT_OK(frugal_lookup(trainer_, &just.op, 1));
  EXPECT_OK(frugal_push_grad(trainer_, &just.op, 1));
  RowOp one_more(table_, {1, 5}, 1);
  EXPECT_REFUSED(frugal_lookup(trainer_, &one_more.op, 1), full);
  EXPECT_REFUSED(frugal_push_grad(trainer_, &one_more.op, 1), full);
  ASSERT_OK(frugal_step_end(trainer_, 0, 0));
  EXPECT_EQ(Keys(table_), (std::set<uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(Count(other_), 0u);
  EXPECT_EQ(GetOne(table_, 1), -2.0f);
  const uint64_t five = 5;
  const float x = 1;
  EXPECT_REFUSED(frugal_put(table_, &five, 1, 0, &x, 0), full);
  EXPECT_OK(frugal_health(engine_));
}

TEST_F(Full, DeclaringTooMuchIsRefusedAtTheLatestByItsUse) {
  RowOp too_many(table_, {1, 2, 3, 4, 5}, 1), fits(table_, {11, 12, 13, 14}, 1);
  frugal_batch* batch = nullptr;
  // Keys are resolved in the background: a prefetch does not know yet.
  ASSERT_OK(frugal_prefetch(trainer_, 0, &too_many.op, 1, &batch));
  ASSERT_OK(frugal_step_begin(trainer_, 0, kWait));
  too_many.op.batch = batch;
  EXPECT_REFUSED(frugal_lookup(trainer_, &too_many.op, 1), FRUGAL_ERR_TABLE_FULL);
  EXPECT_REFUSED(frugal_push_grad(trainer_, &too_many.op, 1), FRUGAL_ERR_TABLE_FULL);
  ASSERT_OK(frugal_step_end(trainer_, 0, 0));
  EXPECT_EQ(Count(table_), 0u);
  EXPECT_OK(frugal_health(engine_));
  ASSERT_OK(frugal_step_begin(trainer_, 1, kWait));
  EXPECT_OK(frugal_push_grad(trainer_, &fits.op, 1));
  ASSERT_OK(frugal_step_end(trainer_, 1, 0));
  EXPECT_EQ(Count(table_), 4u);
}

TEST_F(Full, RoomComesBack) {
  const auto fill = [&](uint64_t step, uint64_t base) {
    TrainStep(trainer_, step, table_, {base, base + 1, base + 2, base + 3});
    EXPECT_EQ(Keys(table_), (std::set<uint64_t>{base, base + 1, base + 2, base + 3}));
  };
  const auto clear = [&] {
    const std::set<uint64_t> keys = Keys(table_);
    const std::vector<uint64_t> list(keys.begin(), keys.end());
    uint64_t deleted = 0;
    ASSERT_OK(frugal_delete(table_, list.data(), list.size(), &deleted));
    EXPECT_EQ(deleted, list.size());
    EXPECT_EQ(Count(table_), 0u);
  };
  fill(0, 100);
  clear();
  fill(1, 200);
  clear();
  // After an aborted step.
  RowOp four(table_, {301, 302, 303, 304}, 1);
  ASSERT_OK(frugal_step_begin(trainer_, 2, kWait));
  ASSERT_OK(frugal_push_grad(trainer_, &four.op, 1));
  ASSERT_OK(frugal_step_abort(trainer_));
  fill(2, 400);
  clear();
  // After a declaration that was not used.
  ASSERT_OK(frugal_prefetch(trainer_, 3, &four.op, 1, nullptr));
  ASSERT_OK(frugal_step_begin(trainer_, 3, kWait));
  ASSERT_OK(frugal_step_end(trainer_, 3, 0));
  fill(4, 500);
  clear();
  // After a declaration that was taken back.
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer_, 8, &four.op, 1, &batch));
  ASSERT_OK(frugal_prefetch_cancel(trainer_, batch));
  fill(5, 600);
  clear();
  // After the trainer that declared has left.
  ASSERT_OK(frugal_prefetch(trainer_, 8, &four.op, 1, &batch));
  ASSERT_OK(frugal_trainer_close(trainer_));
  trainer_ = engine_.Trainer(0);
  fill(6, 700);
}

// What is only declared, for steps that have not begun, makes way for what is wanted now.
TEST(Reserved, RowsMakeWay) {
  for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED})
    for (uint32_t threads : {0u, 1u}) {
      SCOPED_TRACE(std::to_string(mode) + " " + std::to_string(threads));
      Engine engine(2, [&](frugal_config* c) {
        c->flush_mode = mode;
        c->flush_threads = threads;
      });
      frugal_table* table = engine.Table("t", FRUGAL_HASHED, 6, 1);
      frugal_trainer* trainers[2] = {engine.Trainer(0), engine.Trainer(1)};
      RowOp later(table, {11, 12, 13}, 1), last(table, {13, 14, 15, 16}, 1), now(table, {1, 2}, 1),
          mine(table, {3}, 1), more(table, {4, 5, 1}, 1);
      frugal_batch *batch = nullptr, *own = nullptr;
      ASSERT_OK(frugal_prefetch(trainers[0], 0, &now.op, 1, nullptr));
      ASSERT_OK(frugal_prefetch(trainers[1], 0, &mine.op, 1, &own));
      ASSERT_OK(frugal_prefetch(trainers[0], 1, &later.op, 1, &batch));
      ASSERT_OK(frugal_prefetch(trainers[1], 2, &last.op, 1, nullptr));
      ASSERT_OK(frugal_step_begin(trainers[0], 0, kWait));
      ASSERT_OK(frugal_step_begin(trainers[1], 0, kWait));
      // By what rank, and whether in lookup or push, makes no difference; begun steps keep theirs.
      EXPECT_OK(frugal_lookup(trainers[0], &more.op, 1));
      EXPECT_OK(frugal_push_grad(trainers[0], &now.op, 1));
      mine.op.batch = own;
      EXPECT_OK(frugal_push_grad(trainers[1], &mine.op, 1));
      RowOp sixth(table, {6}, 1), seventh(table, {7}, 1);
      EXPECT_OK(frugal_push_grad(trainers[1], &sixth.op, 1));
      EXPECT_REFUSED(frugal_push_grad(trainers[1], &seventh.op, 1), FRUGAL_ERR_TABLE_FULL);
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, 0, 0));
      EXPECT_EQ(Keys(table), (std::set<uint64_t>{1, 2, 3, 4, 5, 6}));
      EXPECT_EQ(GetOne(table, 3), -1.0f);
      // The declaration has no effect: the step finds its rows, or does not.
      ASSERT_OK(frugal_step_begin(trainers[0], 1, kWait));
      ASSERT_OK(frugal_step_begin(trainers[1], 1, kWait));
      later.op.batch = batch;
      EXPECT_REFUSED(frugal_lookup(trainers[0], &later.op, 1), FRUGAL_ERR_TABLE_FULL);
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, 1, 0));
      const uint64_t gone[] = {1, 2, 3, 4};
      ASSERT_OK(frugal_delete(table, gone, 4, nullptr));
      // put, with step 2 declared again.
      ASSERT_OK(frugal_prefetch(trainers[0], 3, &last.op, 1, nullptr));
      const uint64_t put[] = {21, 22, 23, 24};
      const float x[] = {1, 2, 3, 4};
      EXPECT_OK(frugal_put(table, put, 4, 0, x, 0));
      EXPECT_EQ(Keys(table), (std::set<uint64_t>{5, 6, 21, 22, 23, 24}));
      ASSERT_OK(frugal_delete(table, put, 4, nullptr));
      for (uint64_t s = 2; s < 4; ++s) {
        for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_begin(t, s, kWait));
        EXPECT_OK(frugal_push_grad(trainers[s == 2], &last.op, 1));
        for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, s, 0));
      }
      EXPECT_EQ(Keys(table), (std::set<uint64_t>{5, 6, 13, 14, 15, 16}));
      EXPECT_EQ(GetOne(table, 13), -2.0f);
      EXPECT_OK(frugal_health(engine));
    }
}

// Also concurrently with another rank, which finds rows all the time.
TEST(Reserved, RowsMakeWayWhileOthersFindRows) {
  constexpr uint64_t kRows = 64;
  Engine engine(2, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_trainer* trainers[2] = {engine.Trainer(0), engine.Trainer(1)};
  std::vector<frugal_table*> tables;
  for (int t = 0; t < 40; ++t)
    tables.push_back(engine.Table(std::to_string(t).c_str(), FRUGAL_HASHED, kRows, 1));
  for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_begin(t, 0, kWait));
  std::atomic<frugal_table*> shared{nullptr};
  std::atomic<bool> over{false};
  std::thread finds([&] {
    RowOp there(nullptr, {0}, 1);
    while (!over.load()) {
      there.op.table = shared.load();
      if (!there.op.table) continue;
      EXPECT_OK(frugal_lookup(trainers[1], &there.op, 1));
    }
  });
  for (frugal_table* table : tables) {
    RowOp first(table, {0}, 1);
    EXPECT_OK(frugal_lookup(trainers[0], &first.op, 1));
    shared.store(table);
    // Whatever is free is reserved, and of that one row is wanted.
    for (uint64_t key = 1; key < kRows && !HasFailure(); ++key) {
      std::vector<uint64_t> rest(kRows - key);
      for (size_t i = 0; i < rest.size(); ++i) rest[i] = 1000 + i;
      RowOp reserved(table, rest, 1), wanted(table, {key}, 1);
      frugal_batch* batch = nullptr;
      EXPECT_OK(frugal_prefetch(trainers[0], 1, &reserved.op, 1, &batch));
      EXPECT_OK(frugal_lookup(trainers[0], &wanted.op, 1));
      EXPECT_OK(frugal_prefetch_cancel(trainers[0], batch));
    }
  }
  over.store(true);
  finds.join();
  for (frugal_trainer* t : trainers) EXPECT_OK(frugal_step_end(t, 0, 0));
  for (frugal_table* table : tables) EXPECT_EQ(Count(table), kRows);
}

// --- Rows outside steps ---

TEST(Outside, BusyInAStepAndWhileRanksAreApart) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  const uint64_t key = 1;
  float x = 5;
  uint64_t number = 0;
  size_t count = 0;
  RowOp row(table, {1}, 1);
  const auto expect = [&](int32_t status) {
    const auto check = [&](int32_t got, const char* call) {
      EXPECT_EQ(got, status) << call;
      if (status != FRUGAL_OK) {
        EXPECT_TRUE(Refused(got, {status})) << call;
      }
    };
    x = 5;
    check(frugal_put(table, &key, 1, 0, &x, 0), "put");
    check(frugal_get(table, &key, 1, 0, &x, 0, nullptr), "get");
    check(frugal_read(engine, nullptr, &row.op, 1, 0), "read");
    check(frugal_table_count(table, &number), "count");
    number = 0;
    uint64_t keys[20];
    check(frugal_table_keys(table, &number, keys, 20, &count), "keys");
    check(frugal_delete(table, &key, 1, nullptr), "delete");
  };
  expect(FRUGAL_OK);
  ASSERT_OK(frugal_step_begin(a, 0, kWait));
  expect(FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_step_end(a, 0, 0));
  expect(FRUGAL_ERR_BUSY);  // a has ended step 0, b nothing
  ASSERT_OK(frugal_step_begin(b, 0, kWait));
  expect(FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_step_end(b, 0, 0));
  expect(FRUGAL_OK);
  ASSERT_OK(frugal_step_begin(a, 1, kWait));
  ASSERT_OK(frugal_lookup(a, &row.op, 1));
  EXPECT_EQ(row.rows[0], 0.0f);
  ASSERT_OK(frugal_step_abort(a));
  expect(FRUGAL_OK);
}

// A rank can read what it has trained, state and all, whatever steps the others are inside of.
TEST(Outside, CommittedRowsAreReadInAStepAndWhileRanksAreApart) {
  Engine engine(2);
  frugal_table* table = engine.Table(
      "t", FRUGAL_DENSE, 10, 1, [](frugal_table_config* c) { c->optimizer.kind = FRUGAL_ADAGRAD; });
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  const uint64_t key = 1;
  const auto expect = [&](float state) {
    float row[2] = {kUntouched, kUntouched};
    ASSERT_OK(frugal_get(table, &key, 1, FRUGAL_WITH_STATE | FRUGAL_COMMITTED, row, 0, nullptr));
    EXPECT_EQ(row[1], state);
    ASSERT_OK(frugal_get(table, &key, 1, FRUGAL_COMMITTED, row + 1, 0, nullptr));
    EXPECT_EQ(row[1], row[0]);
  };
  expect(0);
  TrainStep(a, 0, table, {1});
  expect(0);  // not of b
  TrainStep(b, 0, table, {1});
  expect(4);
  TrainStep(b, 1, table, {1});
  expect(4);  // b is ahead, and stays there until a comes
  ASSERT_OK(frugal_step_begin(a, 1, kWait));
  RowOp row(table, {1}, 1);
  ASSERT_OK(frugal_push_grad(a, &row.op, 1));
  expect(4);
  ASSERT_OK(frugal_step_end(a, 1, 0));
  EXPECT_EQ(engine.Committed(), 1u);
  expect(8);
  float x = 0;
  EXPECT_REFUSED(frugal_put(table, &key, 1, FRUGAL_COMMITTED, &x, 0), FRUGAL_ERR_INVALID_ARGUMENT);
}

// No row is read with half of a step.
TEST(Outside, CommittedRowsAreNotTornBySteps) {
  constexpr uint64_t kSteps = 300;
  constexpr uint32_t kDim = 4096;
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 64, kDim, [](frugal_table_config* c) {
    c->optimizer.kind = FRUGAL_ADAGRAD;
  });
  frugal_trainer* trainer = engine.Trainer(0);
  std::vector<uint64_t> keys(64);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::atomic<bool> over{false};
  int torn = 0;
  std::thread reads([&] {
    std::vector<float> rows(64 * 2 * kDim);
    while (!over) {
      EXPECT_OK(frugal_get(table, keys.data(), 64, FRUGAL_WITH_STATE | FRUGAL_COMMITTED,
                           rows.data(), 0, nullptr));
      for (size_t i = 0; i < 64; ++i)  // each step adds 1 to the state of all
        torn += rows[2 * kDim * (i + 1) - 1] != rows[kDim];
    }
  });
  RowOp op(table, keys, kDim);
  for (uint64_t s = 0; s < kSteps; ++s) {
    ASSERT_OK(frugal_step_begin(trainer, s, kWait));
    ASSERT_OK(frugal_push_grad(trainer, &op.op, 1));
    ASSERT_OK(frugal_step_end(trainer, s, 0));
  }
  over = true;
  reads.join();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(engine.Committed(), kSteps - 1);
}

TEST(Outside, BadArguments) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 2);
  const uint64_t keys[] = {1, 10};
  float rows[4] = {kUntouched, kUntouched, kUntouched, kUntouched};
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  EXPECT_REFUSED(frugal_get(table, keys, 2, 0, rows, 0, nullptr), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_REFUSED(frugal_put(table, keys, 2, 0, rows, 0), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  uint64_t deleted = 77;
  EXPECT_REFUSED(frugal_delete(table, keys, 2, &deleted), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(deleted, 77u);
  EXPECT_REFUSED(frugal_get(table, keys, 1, 4, rows, 0, nullptr), invalid);
  EXPECT_REFUSED(frugal_put(table, keys, 1, 0x80, rows, 0), invalid);
  EXPECT_REFUSED(frugal_get(table, keys, 1, 0, rows, 4, nullptr), invalid);
  EXPECT_REFUSED(frugal_put(table, keys, 1, 0, rows, 7), invalid);
  for (float x : rows) EXPECT_EQ(x, kUntouched);
  EXPECT_EQ(GetOne(table, 1), 0.0f);
  RowOp row(table, {1, 10}, 2);
  EXPECT_REFUSED(frugal_read(engine, nullptr, &row.op, 1, 0), FRUGAL_ERR_KEY_OUT_OF_RANGE);
}

// Counts and strides beyond any memory are refused before any key or row is read.
TEST(Outside, CountsAndStridesBeyondMemory) {
  Engine engine;
  frugal_trainer* trainer = engine.Trainer(0);
  const int32_t invalid = FRUGAL_ERR_INVALID_ARGUMENT;
  for (int32_t key_space : {FRUGAL_DENSE, FRUGAL_HASHED}) {
    const std::string name = std::to_string(key_space);
    frugal_table* table = engine.Table(name.c_str(), key_space, 10, 1);
    const uint64_t keys[] = {1, 2};
    const float ones[] = {1, 1};
    ASSERT_OK(frugal_put(table, keys, 2, 0, ones, 0));
    float out[2] = {kUntouched, kUntouched};
    uint64_t deleted = 77;
    for (size_t count : {SIZE_MAX, size_t{1} << 62, size_t{UINT32_MAX}}) {
      EXPECT_REFUSED(frugal_get(table, keys, count, 0, out, 0, nullptr), invalid);
      EXPECT_REFUSED(frugal_put(table, keys, count, 0, out, 0), invalid);
      EXPECT_REFUSED(frugal_delete(table, keys, count, &deleted), invalid);
      RowOp row(table, {1}, 1);
      EXPECT_REFUSED(frugal_lookup(trainer, &row.op, count), invalid);
      EXPECT_REFUSED(frugal_push_grad(trainer, &row.op, count), invalid);
      EXPECT_REFUSED(frugal_prefetch(trainer, 0, &row.op, count, nullptr), invalid);
      EXPECT_REFUSED(frugal_read(engine, nullptr, &row.op, count, 0), invalid);
    }
    for (size_t stride : {SIZE_MAX - 3, SIZE_MAX / 4 * 3 + 1}) {  // as if rows lay backwards
      EXPECT_REFUSED(frugal_get(table, keys, 2, 0, out + 1, stride, nullptr), invalid);
      EXPECT_REFUSED(frugal_put(table, keys, 2, 0, out + 1, stride), invalid);
      RowOp row(table, {1, 2}, 1);
      row.op.row_stride = stride;
      EXPECT_REFUSED(frugal_read(engine, nullptr, &row.op, 1, 0), invalid);
    }
    for (float x : out) EXPECT_EQ(x, kUntouched);
    EXPECT_EQ(deleted, 77u);
    EXPECT_EQ(GetOne(table, 2), 1.0f);
  }
}

TEST(Outside, MissingRowsAreToldAndLeftAlone) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 2);
  const uint64_t keys[] = {1, 2, 3};
  float rows[9];
  std::fill(std::begin(rows), std::end(rows), kUntouched);
  const float two[] = {5, 6};
  ASSERT_OK(frugal_put(table, &keys[1], 1, 0, two, 0));
  uint8_t found[3] = {9, 9, 9};
  ASSERT_OK(frugal_get(table, keys, 3, 0, rows, 3 * sizeof(float), found));
  const float u = kUntouched;
  const float expected[] = {u, u, u, 5, 6, u, u, u, u};
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(rows[i], expected[i]) << i;
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(found[1], 1);
  EXPECT_EQ(found[2], 0);
  EXPECT_OK(frugal_get(table, keys, 3, 0, rows, 0, nullptr));

  // A read gives zeros for them, in a sum too.
  RowOp row(table, {1, 2, 3}, 2);
  row.op.found_out = found;
  ASSERT_OK(frugal_read(engine, nullptr, &row.op, 1, kWait));
  const float read[] = {0, 0, 5, 6, 0, 0};
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(row.rows[i], read[i]) << i;
  const uint64_t offsets[] = {0, 3};
  row.op.pooling = FRUGAL_POOL_SUM;
  row.op.offsets = offsets;
  row.op.bags = 1;
  ASSERT_OK(frugal_read(engine, nullptr, &row.op, 1, kWait));
  EXPECT_EQ(row.rows[0], 5.0f);
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(Count(table), 1u);
}

TEST(Outside, PutAndDelete) {
  Engine engine;
  const auto normal = [](frugal_table_config* c) {
    c->init = FRUGAL_INIT_NORMAL;
    c->init_b = 1;
  };
  frugal_table* hashed = engine.Table("h", FRUGAL_HASHED, 10, 1, normal);
  frugal_table* dense = engine.Table("d", FRUGAL_DENSE, 10, 1, normal);
  const uint64_t twice[] = {4, 5, 4};
  const float values[] = {1, -std::nanf("77"), 3};
  for (frugal_table* table : {hashed, dense}) {
    const float start = GetOne(dense, 4);
    ASSERT_OK(frugal_put(table, twice, 3, 0, values, 0));
    EXPECT_EQ(GetOne(table, 4), 3.0f);  // the last one stays
    EXPECT_EQ(Bits(GetOne(table, 5)), 0x7fc00000u);
    uint64_t deleted = 0;
    const uint64_t both[] = {4, 5};
    ASSERT_OK(frugal_delete(table, both, 2, &deleted));
    EXPECT_EQ(deleted, 2u);
    if (table == dense) {
      EXPECT_EQ(GetOne(table, 4), start);
    } else {
      EXPECT_EQ(Count(table), 0u);
      ASSERT_OK(frugal_delete(table, both, 2, &deleted));
      EXPECT_EQ(deleted, 0u);
      EXPECT_OK(frugal_delete(table, both, 2, nullptr));
    }
  }
}

TEST(Outside, PutAndDeleteOfDeclaredRows) {
  Engine engine(1, [](frugal_config* c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; });
  frugal_table* table =
      engine.Table("t", FRUGAL_HASHED, 10, 1, [](frugal_table_config* c) { c->init_a = 7; });
  frugal_trainer* trainer = engine.Trainer(0, 1.0);
  RowOp row(table, {1, 2, 3}, 1);
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(trainer, 2, &row.op, 1, &batch));
  TrainStep(trainer, 0, table, {1, 2});
  TrainStep(trainer, 1, table, {1, 2});
  const uint64_t one = 1, two = 2;
  ASSERT_OK(frugal_delete(table, &one, 1, nullptr));
  const float value = 50;
  ASSERT_OK(frugal_put(table, &two, 1, 0, &value, 0));
  EXPECT_EQ(Keys(table), std::set<uint64_t>{2});
  ASSERT_OK(frugal_step_begin(trainer, 2, kWait));
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.batch = batch;
  op.rows_out = row.rows.data();
  ASSERT_OK(frugal_lookup(trainer, &op, 1));
  EXPECT_EQ(row.rows[0], 7.0f);  // new again
  EXPECT_EQ(row.rows[1], 50.0f);
  EXPECT_EQ(row.rows[2], 7.0f);
  op.grads = row.grads.data();
  ASSERT_OK(frugal_push_grad(trainer, &op, 1));
  ASSERT_OK(frugal_step_end(trainer, 2, 0));
  EXPECT_EQ(GetOne(table, 1), 6.0f);
  EXPECT_EQ(GetOne(table, 2), 49.0f);
  EXPECT_EQ(Count(table), 3u);
}

TEST(Outside, StateTravels) {
  for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
    const uint32_t dim = 5;
    Engine engine(1, [](frugal_config* c) { c->seed = 3; });
    const auto with = [&](frugal_table_config* c) {
      c->init = FRUGAL_INIT_UNIFORM;
      c->init_a = -1;
      c->init_b = 1;
      c->optimizer.kind = kind;
      c->optimizer.lr = 0.1f;
      c->optimizer.initial_accumulator = 0.5f;
    };
    frugal_table* from = engine.Table("from", FRUGAL_HASHED, 10, dim, with);
    frugal_table* to = engine.Table("to", FRUGAL_DENSE, 10, dim, with);
    frugal_trainer* trainer = engine.Trainer(0);
    const auto train = [&](uint64_t step, frugal_table* table) {
      RowOp row(table, {1, 2}, dim);
      for (size_t i = 0; i < row.grads.size(); ++i) row.grads[i] = 0.1f * static_cast<float>(i);
      ASSERT_OK(frugal_step_begin(trainer, step, kWait));
      ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
      ASSERT_OK(frugal_step_end(trainer, step, 0));
    };
    train(0, from);
    train(1, from);
    const size_t floats = dim + frugal_reference::StateFloats(kind, dim);
    frugal_table_info info;
    info.struct_size = sizeof(info);
    ASSERT_OK(frugal_table_describe(from, &info));
    EXPECT_EQ(info.state_floats, floats - dim);
    const uint64_t keys[] = {1, 2};
    std::vector<float> rows(2 * floats), back(2 * floats, kUntouched);
    ASSERT_OK(frugal_get(from, keys, 2, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
    ASSERT_OK(frugal_put(to, keys, 2, FRUGAL_WITH_STATE, rows.data(), 0));
    ASSERT_OK(frugal_get(to, keys, 2, FRUGAL_WITH_STATE, back.data(), 0, nullptr));
    EXPECT_EQ(std::memcmp(rows.data(), back.data(), rows.size() * sizeof(float)), 0) << kind;
    // The copy goes on as the row would have.
    train(2, from);
    ASSERT_OK(frugal_get(from, keys, 2, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
    Engine second(1, [](frugal_config* c) { c->seed = 3; });
    frugal_table* copy = second.Table("to", FRUGAL_DENSE, 10, dim, with);
    frugal_trainer* other = second.Trainer(0);
    ASSERT_OK(frugal_put(copy, keys, 2, FRUGAL_WITH_STATE, back.data(), 0));
    RowOp row(copy, {1, 2}, dim);
    for (size_t i = 0; i < row.grads.size(); ++i) row.grads[i] = 0.1f * static_cast<float>(i);
    ASSERT_OK(frugal_step_begin(other, 2, kWait));
    ASSERT_OK(frugal_push_grad(other, &row.op, 1));
    ASSERT_OK(frugal_step_end(other, 2, 0));
    ASSERT_OK(frugal_get(copy, keys, 2, FRUGAL_WITH_STATE, back.data(), 0, nullptr));
    EXPECT_EQ(std::memcmp(rows.data(), back.data(), rows.size() * sizeof(float)), 0) << kind;

    // Without state it is reset to that of a new row.
    ASSERT_OK(frugal_put(copy, keys, 1, 0, back.data(), 0));
    std::vector<float> reset(floats);
    ASSERT_OK(frugal_get(copy, keys, 1, FRUGAL_WITH_STATE, reset.data(), 0, nullptr));
    EXPECT_EQ(std::memcmp(reset.data(), back.data(), dim * sizeof(float)), 0);
    for (size_t i = dim; i < floats; ++i) {
      const bool accumulator = kind == FRUGAL_ADAGRAD || kind == FRUGAL_ROWWISE_ADAGRAD ||
                               (kind == FRUGAL_FTRL && i >= 2 * dim);
      EXPECT_EQ(reset[i], accumulator ? 0.5f : 0.0f) << kind << ' ' << i;
    }
  }
}

TEST(Outside, SeesDeferredUpdatesAndDirtyCaches) {
  Engine engine(2, [](frugal_config* c) {
    c->flush_mode = FRUGAL_FLUSH_DEFERRED;
    c->flush_threads = 0;
  });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 100, 1);
  frugal_trainer* a = engine.Trainer(0, 1.0);
  frugal_trainer* b = engine.Trainer(1, 0.3);
  for (uint64_t step = 0; step < 10; ++step) {
    for (frugal_trainer* t : {a, b}) TrainStep(t, step, table, {1, 2, 99});
    EXPECT_EQ(GetOne(table, 99), -2.0f * static_cast<float>(step + 1));
  }
  EXPECT_OK(frugal_flush(engine, kWait));
  EXPECT_EQ(engine.Stats().pending_rows, 0u);
  EXPECT_EQ(engine.Stats().pending_bytes, 0u);
}

// --- Reading ---

TEST(Read, InAndBetweenSteps) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  TrainStep(a, 0, table, {1});
  RowOp row(table, {1, 2}, 1);
  uint8_t found[2] = {9, 9};
  row.op.found_out = found;
  // Between steps it waits for the others, like the next gate.
  EXPECT_REFUSED(frugal_read(engine, a, &row.op, 1, 20), FRUGAL_ERR_TIMEOUT);
  TrainStep(b, 0, table, {1});
  ASSERT_OK(frugal_read(engine, a, &row.op, 1, kWait));
  EXPECT_EQ(row.rows[0], -2.0f);
  EXPECT_EQ(row.rows[1], 0.0f);
  EXPECT_EQ(found[0], 1);
  EXPECT_EQ(found[1], 0);
  ASSERT_OK(frugal_step_begin(a, 1, kWait));
  ASSERT_OK(frugal_push_grad(a, &row.op, 1));  // makes row 2
  ASSERT_OK(frugal_read(engine, a, &row.op, 1, kWait));
  EXPECT_EQ(row.rows[0], -2.0f);
  EXPECT_EQ(row.rows[1], 0.0f);
  ASSERT_OK(frugal_step_end(a, 1, 0));
  TrainStep(b, 1, table, {});
  ASSERT_OK(frugal_read(engine, nullptr, &row.op, 1, kWait));
  EXPECT_EQ(row.rows[0], -3.0f);
  EXPECT_EQ(row.rows[1], -1.0f);
  EXPECT_EQ(Count(table), 2u);
}

// A trainer's read between steps and an operation outside steps are one after the other: a row is
// read as one put has written it.
TEST(Read, BetweenStepsIsNotTornByPuts) {
  constexpr uint32_t kDim = 65536;
  for (uint64_t steps : {0u, 1u}) {  // before the first step, too
    Engine engine;
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 3, kDim);
    frugal_trainer* trainer = engine.Trainer(0);
    for (uint64_t s = 0; s < steps; ++s) {
      ASSERT_OK(frugal_step_begin(trainer, s, kWait));
      ASSERT_OK(frugal_step_end(trainer, s, 0));
    }
    std::atomic<bool> stop{false};
    std::thread putter([&] {
      std::vector<float> values(kDim);
      const uint64_t key = 1;
      for (int i = 0; !stop; ++i) {
        std::fill(values.begin(), values.end(), static_cast<float>(i));
        EXPECT_OK(frugal_put(table, &key, 1, 0, values.data(), 0));
      }
    });
    RowOp row(table, {1}, kDim);
    int torn = 0;
    for (int i = 0; i < 500; ++i) {
      EXPECT_OK(frugal_read(engine, trainer, &row.op, 1, kWait));
      torn += row.rows.front() != row.rows.back();
    }
    stop = true;
    putter.join();
    EXPECT_EQ(torn, 0);
  }
}

// A rank that has received an abort reads none of the rows that others are still giving back.
TEST(Read, BesideTheRestOfAnAbort) {
  Engine engine(3);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 200'000, 1);
  frugal_trainer* aborts = engine.Trainer(0);
  frugal_trainer* reads = engine.Trainer(1);
  frugal_trainer* creates = engine.Trainer(2);
  std::vector<uint64_t> keys(100'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  RowOp all(table, keys, 1), last(table, {keys.size() - 1}, 1);
  uint8_t found = 0;
  last.op.found_out = &found;
  for (int round = 0; round < 5; ++round) {
    for (frugal_trainer* t : {aborts, reads, creates}) ASSERT_OK(frugal_step_begin(t, 0, kWait));
    ASSERT_OK(frugal_lookup(creates, &all.op, 1));
    std::thread abort([&] { EXPECT_OK(frugal_step_abort(aborts)); });
    while (frugal_read(engine, reads, &last.op, 1, kWait) != FRUGAL_ERR_STEP_ABORTED) {
    }
    EXPECT_OK(frugal_read(engine, reads, &last.op, 1, kWait));
    EXPECT_EQ(found, 0);
    abort.join();
    EXPECT_REFUSED(frugal_step_begin(creates, 0, 0), FRUGAL_ERR_STEP_ABORTED);
  }
}

// The call that ends a small step writes its updates, without other threads. AUTO does not defer
// them, however idle the processors are.
TEST(Steps, SmallOnesAreWrittenWhenTheyEnd) {
  for (uint32_t world : {1u, 2u}) {
    Engine engine(world, [](frugal_config* c) { c->flush_threads = 2; });
    frugal_table* tables[] = {engine.Table("dense", FRUGAL_DENSE, 1000, 8),
                              engine.Table("hashed", FRUGAL_HASHED, 1000, 8)};
    std::vector<frugal_trainer*> trainers;
    for (uint32_t r = 0; r < world; ++r) trainers.push_back(engine.Trainer(r));
    uint64_t updates = 0;
    for (uint64_t s = 0; s < 64; ++s) {
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_begin(t, s, kWait));
      for (frugal_trainer* t : trainers) {
        for (frugal_table* table : tables) {
          RowOp op(table, {s, s + 1, 7}, 8), next(table, {s + 1, s + 2, 7}, 8);
          ASSERT_OK(frugal_prefetch(t, s + 1, &next.op, 1, nullptr));
          ASSERT_OK(frugal_push_grad(t, &op.op, 1));
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      for (frugal_trainer* t : trainers) {
        EXPECT_EQ(engine.Stats().rows_updated, updates);
        ASSERT_OK(frugal_step_end(t, s, 0));
      }
      updates += 2 * std::set<uint64_t>{s, s + 1, 7}.size();
      EXPECT_EQ(engine.Stats().rows_updated, updates);
    }
    EXPECT_EQ(engine.Stats().modes_deferred, 0u);
  }
}

// The window keeps the low bits of the step in which a row was touched last. A row with a pending
// update, left alone until those bits have wrapped around, is read right.
TEST(Window, ARowLeftAloneFor500Steps) {
  constexpr uint64_t kLookahead = 15;
  for (uint64_t gap = 490; gap <= 560; ++gap) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.flush_threads = 0;
    config.flush_mode = FRUGAL_FLUSH_DEFERRED;
    config.lookahead = kLookahead;
    frugal_engine* engine;
    ASSERT_OK(frugal_open(&config, &engine));
    frugal_table_config table_config = FRUGAL_TABLE_CONFIG_INIT;
    table_config.name = "alone";
    table_config.rows = 10;
    table_config.dim = 1;
    frugal_table* table;
    ASSERT_OK(frugal_table_create(engine, &table_config, &table));
    frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
    frugal_trainer* trainer;
    ASSERT_OK(frugal_trainer_create(engine, &trainer_config, &trainer));
    const uint64_t key = 7, first = kLookahead, second = first + gap;
    float before = 0, after = 0;
    const float grad = 1;
    for (uint64_t step = 0; step <= second; ++step) {
      frugal_op op = FRUGAL_OP_INIT;
      op.table = table;
      op.keys = &key;
      op.count = 1;
      ASSERT_OK(frugal_step_begin(trainer, step, 1000));
      if (step + kLookahead == first || step + kLookahead == second) {
        ASSERT_OK(frugal_prefetch(trainer, step + kLookahead, &op, 1, nullptr));
      }
      if (step == first || step == second) {
        op.rows_out = step == first ? &before : &after;
        ASSERT_OK(frugal_lookup(trainer, &op, 1));
      }
      if (step == first) {
        op.grads = &grad;
        ASSERT_OK(frugal_push_grad(trainer, &op, 1));
      }
      ASSERT_OK(frugal_step_end(trainer, step, 0));
    }
    EXPECT_NE(before, after) << gap << " steps later";
    ASSERT_OK(frugal_close(engine));
  }
}

TEST(Stats, StructSizes) {
  Engine engine;
  frugal_stats stats;
  for (size_t size : {size_t{0}, sizeof(stats) - 8, sizeof(stats) + 8}) {
    stats.struct_size = size;
    EXPECT_REFUSED(frugal_get_stats(engine, &stats), FRUGAL_ERR_STRUCT_SIZE);
  }
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  TrainStep(trainer, 0, table, {1, 2, 1});
  stats = engine.Stats();
  EXPECT_EQ(stats.struct_size, sizeof(stats));
  EXPECT_EQ(stats.steps_committed, 1u);
  EXPECT_EQ(stats.keys_pushed, 3u);
  EXPECT_EQ(stats.keys_undeclared, 3u);
  EXPECT_EQ(stats.rows_created, 2u);
  ASSERT_OK(frugal_flush(engine, kWait));
  EXPECT_EQ(engine.Stats().rows_updated, 2u);
}

TEST(Stats, CountWhatRanksThatHaveLeftDid) {
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint64_t times = 1; times <= 2; ++times) {  // the second joins as the same rank
      frugal_trainer* trainer = engine.Trainer(rank);
      RowOp row(table, {3}, 1);
      const frugal_stats before = engine.Stats();
      ASSERT_OK(frugal_step_begin(trainer, 0, 0));
      ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
      const frugal_stats stats = engine.Stats();
      EXPECT_EQ(stats.keys_looked_up, 2 * rank + times);
      EXPECT_GT(stats.lookup_ns, before.lookup_ns);
      ASSERT_OK(frugal_step_abort(trainer));
      ASSERT_OK(frugal_trainer_close(trainer));
    }
  }
  EXPECT_EQ(engine.Stats().keys_looked_up, 4u);
}

TEST(Stats, OneInSeventeenSmallLookupsIsTimed) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp declared(table, {3, 4}, 1), other(table, {5}, 1);
  ASSERT_OK(frugal_prefetch(trainer, 0, &declared.op, 1, nullptr));
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  auto timed = [&](const RowOp& row) {
    const uint64_t before = engine.Stats().lookup_ns;
    EXPECT_OK(frugal_lookup(trainer, &row.op, 1));
    return engine.Stats().lookup_ns > before;
  };
  for (int i = 0; i <= 2 * 17; ++i) EXPECT_EQ(timed(declared), i % 17 == 0) << i;
  // Others are, each, and what follows them.
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(timed(other));
  EXPECT_TRUE(timed(declared));
  for (int i = 1; i <= 17; ++i) EXPECT_EQ(timed(declared), i == 17) << i;
}

// --- Another trainer is not hung by this one's mistakes ---

TEST(Mistakes, DoNotHangOthers) {
  Engine engine(2);
  frugal_table* dense = engine.Table("d", FRUGAL_DENSE, 10, 1);
  frugal_table* full = engine.Table("h", FRUGAL_HASHED, 2, 1);
  frugal_trainer* good = engine.Trainer(0);
  frugal_trainer* clumsy = engine.Trainer(1);
  std::jthread thread([&] {
    for (uint64_t step = 0; step < 50; ++step) TrainStep(good, step, dense, {1});
  });
  for (uint64_t step = 0; step < 50; ++step) {
    RowOp outside(dense, {1, 10}, 1), many(full, {1, 2, 3}, 1), nan(dense, {2}, 1);
    nan.grads[0] = kNan;
    // The very first step could be any.
    if (step > 0) {
      EXPECT_REFUSED(frugal_step_begin(clumsy, step + 3, kWait), FRUGAL_ERR_STEP_ORDER);
      EXPECT_REFUSED(frugal_prefetch(clumsy, step + 100, &nan.op, 1, nullptr),
                     FRUGAL_ERR_STEP_RANGE);
    }
    EXPECT_REFUSED(frugal_prefetch(clumsy, step + 1, &outside.op, 1, nullptr),
                   FRUGAL_ERR_KEY_OUT_OF_RANGE);
    ASSERT_OK(frugal_step_begin(clumsy, step, kWait));
    EXPECT_REFUSED(frugal_lookup(clumsy, &outside.op, 1), FRUGAL_ERR_KEY_OUT_OF_RANGE);
    EXPECT_REFUSED(frugal_lookup(clumsy, &many.op, 1), FRUGAL_ERR_TABLE_FULL);
    EXPECT_REFUSED(frugal_push_grad(clumsy, &nan.op, 1), FRUGAL_ERR_NAN);
    EXPECT_REFUSED(frugal_step_end(clumsy, step, 8), FRUGAL_ERR_INVALID_ARGUMENT);
    ASSERT_OK(frugal_step_end(clumsy, step, 0));
  }
  thread.join();
  EXPECT_EQ(GetOne(dense, 1), -50.0f);
  EXPECT_EQ(GetOne(dense, 2), 0.0f);
  EXPECT_EQ(Count(full), 0u);
  EXPECT_OK(frugal_health(engine));
}

// A first step that differs: the rank that came second is refused whatever the numbers are.
TEST(Mistakes, RanksWithDifferentFirstSteps) {
  Engine engine(2);
  frugal_trainer* a = engine.Trainer(0);
  frugal_trainer* b = engine.Trainer(1);
  ASSERT_OK(frugal_step_begin(a, 5, kWait));
  ASSERT_OK(frugal_step_end(a, 5, 0));
  EXPECT_REFUSED(frugal_step_begin(b, 6, 20), FRUGAL_ERR_STEP_ORDER);
  ASSERT_OK(frugal_step_begin(b, 5, kWait));
  ASSERT_OK(frugal_step_end(b, 5, 0));
  EXPECT_EQ(engine.Committed(), 5u);
}

// --- fork ---

TEST(Fork, TheChildIsRefusedAndTheParentGoesOn) {
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 2; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
  frugal_trainer* trainer = engine.Trainer(0);
  TrainStep(trainer, 0, table, {1});
  ASSERT_OK(frugal_step_begin(trainer, 1, kWait));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Counts the calls that do not return FRUGAL_ERR_FORKED. It uses nothing of the parent's.
    int wrong = 0;
    const auto check = [&](int32_t status) { wrong += status == FRUGAL_ERR_FORKED ? 0 : 1; };
    uint64_t number = 1;
    size_t count = 0;
    float x = 0;
    void* memory = nullptr;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = &number;
    op.count = 1;
    op.rows_out = &x;
    op.grads = &x;
    frugal_stats stats;
    stats.struct_size = sizeof(stats);
    frugal_table_info info;
    info.struct_size = sizeof(info);
    frugal_table* table_out = nullptr;
    frugal_trainer* trainer_out = nullptr;
    frugal_table_config table_config = FRUGAL_TABLE_CONFIG_INIT;
    table_config.name = "u";
    table_config.rows = 1;
    table_config.dim = 1;
    frugal_trainer_config trainer_config = FRUGAL_TRAINER_CONFIG_INIT;
    frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
    check(frugal_health(engine));
    check(frugal_flush(engine, 0));
    check(frugal_committed_step(engine, &number));
    check(frugal_get_stats(engine, &stats));
    check(frugal_table_create(engine, &table_config, &table_out));
    check(frugal_table_find(engine, "t", &table_out));
    check(frugal_table_next(engine, &number, nullptr, 0, &count));
    check(frugal_trainer_create(engine, &trainer_config, &trainer_out));
    check(frugal_read(engine, nullptr, &op, 1, 0));
    check(frugal_table_describe(table, &info));
    check(frugal_table_count(table, &number));
    check(frugal_table_keys(table, &number, &number, 1, &count));
    check(frugal_table_set_optimizer(table, 5, &optimizer));
    check(frugal_get(table, &number, 1, 0, &x, 0, nullptr));
    check(frugal_put(table, &number, 1, 0, &x, 0));
    check(frugal_delete(table, &number, 1, nullptr));
    check(frugal_prefetch(trainer, 3, &op, 1, nullptr));
    check(frugal_step_begin(trainer, 2, 0));
    check(frugal_lookup(trainer, &op, 1));
    check(frugal_push_grad(trainer, &op, 1));
    check(frugal_borrow(trainer, 64, &memory));
    check(frugal_step_end(trainer, 1, 0));
    check(frugal_step_abort(trainer));
    check(frugal_trainer_close(trainer));
    check(frugal_table_drop(table));
    check(frugal_close(engine));
    frugal_error error;
    frugal_last_error(&error);
    if (error.status != FRUGAL_ERR_FORKED || std::strlen(error.message) < 4) ++wrong;
    if (std::strcmp(frugal_status_name(0), "FRUGAL_OK") != 0) ++wrong;
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "calls that did not return FRUGAL_ERR_FORKED";
  RowOp row(table, {1}, 1);
  ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
  ASSERT_OK(frugal_step_end(trainer, 1, 0));
  EXPECT_EQ(GetOne(table, 1), -2.0f);
}

// --- Dimensions ---

TEST(Dims, EveryOptimizerAgainstTheReference) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> value(-1, 1);
  for (uint32_t dim : {1u, 3u, 100u, 1000u}) {
    for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
      Engine engine(1, [](frugal_config* c) { c->seed = 4; });
      const std::string name = "dim " + std::to_string(dim);
      frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
      config.name = name.c_str();
      config.rows = 20;
      config.dim = dim;
      config.init = FRUGAL_INIT_TRUNCATED_NORMAL;
      config.init_b = 0.5f;
      config.optimizer.kind = kind;
      config.optimizer.lr = 0.1f;
      config.optimizer.clip_norm = 3;
      config.optimizer.weight_decay_l2 = 0.01f;
      config.optimizer.weight_decay = 0.02f;
      frugal_table* table = nullptr;
      ASSERT_OK(frugal_table_create(engine, &config, &table));
      frugal_trainer* trainer = engine.Trainer(0);
      Reference reference(4, 1);
      reference.AddTable(config);
      for (uint64_t step = 0; step < 4; ++step) {
        std::vector<uint64_t> keys;
        for (int i = 0; i < 60; ++i) keys.push_back(random() % 20);
        RowOp row(table, keys, dim);
        for (float& g : row.grads) g = value(random);
        frugal_reference::Op op;
        op.keys = row.keys.data();
        op.count = keys.size();
        op.grads = row.grads.data();
        ASSERT_OK(frugal_step_begin(trainer, step, kWait));
        ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
        std::vector<float> expected(row.rows.size());
        reference.Lookup(step, op, expected.data());
        ASSERT_EQ(std::memcmp(row.rows.data(), expected.data(), expected.size() * sizeof(float)), 0)
            << "dim " << dim << " optimizer " << kind << " step " << step;
        ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
        ASSERT_EQ(reference.Push(0, step, {op}), FRUGAL_OK);
        ASSERT_OK(frugal_step_end(trainer, step, 0));
        reference.Commit(step, false);
      }
      const size_t floats = dim + frugal_reference::StateFloats(kind, dim);
      for (uint64_t key = 0; key < 20; ++key) {
        std::vector<float> row(floats), expected;
        ASSERT_OK(frugal_get(table, &key, 1, FRUGAL_WITH_STATE, row.data(), 0, nullptr));
        ASSERT_TRUE(reference.Get(0, key, &expected));
        ASSERT_EQ(std::memcmp(row.data(), expected.data(), floats * sizeof(float)), 0)
            << "dim " << dim << " optimizer " << kind << " key " << key;
      }
    }
  }
}

TEST(Steps, WhatSomebodyEndedIsCommittedWhenAllHaveLeft) {
  // With staleness an empty step can come before one with updates.
  Engine engine(2, [](frugal_config* c) { c->staleness = 3; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 4, 2);
  frugal_trainer* first = engine.Trainer(0);
  frugal_trainer* second = engine.Trainer(1);
  RowOp row(table, {1}, 2);
  ASSERT_OK(frugal_step_begin(first, 5, kWait));
  ASSERT_OK(frugal_step_end(first, 5, 0));
  ASSERT_OK(frugal_step_begin(first, 6, kWait));
  ASSERT_OK(frugal_push_grad(first, &row.op, 1));
  ASSERT_OK(frugal_step_end(first, 6, 0));
  ASSERT_OK(frugal_trainer_close(first));
  ASSERT_OK(frugal_trainer_close(second));
  EXPECT_EQ(engine.Committed(), 6u);
  EXPECT_EQ(GetOne(table, 1), -1.0f);
  EXPECT_NE(engine.Trainer(0), nullptr);
}

TEST(Dims, TheLargest) {
  Engine engine;
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, 3, 65536);
  frugal_trainer* trainer = engine.Trainer(0);
  RowOp row(table, {7}, 65536);
  ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
  ASSERT_OK(frugal_lookup(trainer, &row.op, 1));
  ASSERT_OK(frugal_push_grad(trainer, &row.op, 1));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  const uint64_t key = 7;
  ASSERT_OK(frugal_get(table, &key, 1, 0, row.rows.data(), 0, nullptr));
  EXPECT_EQ(row.rows[0], -1.0f);
  EXPECT_EQ(row.rows[65535], -1.0f);
}

}  // namespace
