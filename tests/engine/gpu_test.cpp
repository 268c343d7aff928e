// Trainers on simulated GPUs through the C ABI when something goes wrong, as in no run of the
// oracle; every kernel is launched.
//
// Cases: NaNs, captured streams, wrong pointers, memory that cannot be pinned, and a caller's work
// after a step that does not end. Every call of the device interface fails once. Device memory runs
// out at any call, and is there again later. Devices fail at any call. Ranks leave and join on
// another device.
//
// With FRUGAL_TEST_CONTROLLER, the path of frugal-controller, the test attaches to controllers'
// engines. Then it also covers rows that cannot be pinned, a killed controller, and a rank that is
// replaced during device work.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/heap.h"
#include "device/ops/kernels.h"
#include "frugal.h"
#include "oracle/device.h"
#include "sim/sim.h"
#define FRUGAL_CONTROLLER std::getenv("FRUGAL_TEST_CONTROLLER")
#include "process/controller.h"
#include "support/engine.h"
#include "support/never.h"
#include "support/ok.h"
#include "support/slice.h"

namespace {

using frugal::device::ErrorKind;
using frugal::device::Runtime;
using frugal::device::sim::Sim;
using frugal_oracle::RankDevice;

constexpr int64_t kWait = FRUGAL_TIMEOUT_DEFAULT;

// The simulated device, kept open so that its settings last.
struct Device {
  explicit Device(uint32_t index = 0) : name("sim:" + std::to_string(index)) {
    EXPECT_TRUE(frugal::device::open_runtime(name.c_str(), &runtime).ok());
    sim = static_cast<Sim*>(runtime.get());
    memory = frugal_oracle::OpenDevice(name, 1);
  }
  std::string name;
  std::shared_ptr<Runtime> runtime;
  Sim* sim = nullptr;
  std::unique_ptr<RankDevice> memory;
};

// Memory of it, more than a RankDevice would give.
class DeviceBytes {
 public:
  DeviceBytes(const Device& device, size_t bytes) : runtime_(device.runtime) {
    EXPECT_TRUE(runtime_->alloc(bytes, &at_).ok());
    EXPECT_TRUE(runtime_->fill(at_, 0, bytes, {}).ok());
  }
  ~DeviceBytes() { runtime_->free(at_); }
  float* floats() const { return reinterpret_cast<float*>(at_.address); }

 private:
  std::shared_ptr<Runtime> runtime_;
  frugal::device::Ptr<char> at_;
};

bool Attached() { return FRUGAL_CONTROLLER != nullptr; }

// Where the test attaches to one: an engine's own controller, which ends when the engine is closed.
struct OwnController {
  explicit OwnController(bool wanted) {
    if (!wanted) return;
    controller = std::make_unique<ControllerProgram>(address);
    EXPECT_TRUE(controller->serves());
  }
  const Folder folder;
  const std::string address = folder.address();
  std::unique_ptr<ControllerProgram> controller;
};

struct Engine : OwnController, frugal_test::Engine {
  explicit Engine(uint32_t world = 1, const Change& change = {}, bool here = false)
      : OwnController(Attached() && !here), frugal_test::Engine(world, [&](frugal_config* config) {
          if (change) change(config);
          if (controller) config->service = address.c_str();
        }) {}
  frugal_table* Table(const char* name, int32_t key_space, uint64_t rows, uint32_t dim,
                      int32_t optimizer = FRUGAL_ADAGRAD, int32_t nan = FRUGAL_NAN_ACCEPT) {
    return frugal_test::Engine::Table(name, key_space, rows, dim, [&](frugal_table_config* config) {
      config->init = FRUGAL_INIT_UNIFORM;
      config->init_b = 1;
      config->nan_policy = nan;
      config->optimizer.kind = optimizer;
      config->optimizer.lr = 0.5f;
    });
  }
  frugal_trainer* Trainer(uint32_t rank, const char* device, double cache = 0) {
    return frugal_test::Engine::Trainer(rank, cache, device);
  }
  std::vector<float> Rows(frugal_table* table, uint64_t rows, uint32_t dim) {
    std::vector<uint64_t> keys(rows);
    for (uint64_t i = 0; i < rows; ++i) keys[i] = i;
    std::vector<float> out(rows * dim);
    EXPECT_OK(frugal_get(table, keys.data(), rows, 0, out.data(), 0, nullptr));
    return out;
  }
};

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Keys and gradients of a step, on the host.
struct Batch {
  Batch(uint64_t step, uint32_t rank, uint64_t rows, uint32_t dim, size_t n = 50) : dim(dim) {
    uint64_t x = step * 1000003 + rank * 7919 + 1;
    auto next = [&] { return x = x * 6364136223846793005u + 1442695040888963407u, x >> 33; };
    for (size_t i = 0; i < n; ++i) keys.push_back(next() % 3 ? next() % rows : next() % 3);
    // A plain loop: without optimization calls for each value are a third of a test's time.
    const std::unique_ptr<float[]> values(new float[n * dim]);
    float* const at = values.get();
    uint64_t y = x;
    for (size_t i = 0; i < n * dim; ++i) {
      y = y * 6364136223846793005u + 1442695040888963407u;
      at[i] = static_cast<float>((y >> 33) % 2001) / 1000 - 1;
    }
    grads.assign(at, at + n * dim);
  }
  uint32_t dim;
  std::vector<uint64_t> keys;
  std::vector<float> grads;
};

frugal_op OpOf(frugal_table* table, const Batch& b) {
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.keys = b.keys.data();
  op.count = b.keys.size();
  return op;
}

// One step of one rank with rows and gradients on the device. Returns the first status that is not
// OK.
int32_t DeviceStep(frugal_trainer* trainer, RankDevice& memory, frugal_table* table, uint64_t step,
                   const Batch& b, std::vector<float>* rows = nullptr, bool end = true) {
#define TRY(call) \
  if (int32_t s = (call)) return s
  TRY(frugal_step_begin(trainer, step, kWait));
  std::vector<float> out(b.keys.size() * b.dim, -7);
  frugal_op op = OpOf(table, b);
  op.rows_out = static_cast<float*>(memory.Send(out.data(), out.size() * 4, 4));
  TRY(frugal_lookup(trainer, &op, 1));
  if (rows) {
    memory.Fetch(out.data(), op.rows_out, out.size() * 4);
    memory.Collect();
    *rows = out;
  }
  op.rows_out = nullptr;
  op.grads = static_cast<float*>(memory.Send(b.grads.data(), b.grads.size() * 4, 4));
  TRY(frugal_push_grad(trainer, &op, 1));
  memory.Spoil(const_cast<float*>(op.grads), b.grads.size() * 4);
  return end ? frugal_step_end(trainer, step, 0) : FRUGAL_OK;
#undef TRY
}

int32_t HostStep(frugal_trainer* trainer, frugal_table* table, uint64_t step, const Batch& b) {
  if (int32_t s = frugal_step_begin(trainer, step, kWait)) return s;
  std::vector<float> out(b.keys.size() * b.dim);
  frugal_op op = OpOf(table, b);
  op.rows_out = out.data();
  if (int32_t s = frugal_lookup(trainer, &op, 1)) return s;
  op.grads = b.grads.data();
  if (int32_t s = frugal_push_grad(trainer, &op, 1)) return s;
  return frugal_step_end(trainer, step, 0);
}

// The step, as often as it is undone.
template <class... Arguments>
int32_t HostStepAgain(const Arguments&... arguments) {
  int32_t status;
  do status = HostStep(arguments...);
  while (status == FRUGAL_ERR_STEP_ABORTED);
  return status;
}

// The table after `steps` steps of ranks on the cpu device, which are threads.
std::vector<float> Reference(uint32_t world, uint64_t steps, uint64_t rows, uint32_t dim) {
  Engine engine(world, {}, true);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, rows, dim);
  std::vector<frugal_trainer*> ranks;
  for (uint32_t r = 0; r < world; ++r) ranks.push_back(engine.Trainer(r, "cpu"));
  for (uint64_t s = 0; s < steps; ++s)
    for (uint32_t r = 0; r < world; ++r)
      EXPECT_OK(HostStep(ranks[r], table, s, Batch(s, r, rows, dim)));
  return engine.Rows(table, rows, dim);
}

// --- Caches --------------------------------------------------------------------------------------

// A declaration that comes when its step's cache refresh has been planned. It reads cached rows
// that the plan leaves for later: the refresh brings them up to date all the same.
TEST(GpuCache, ADeclarationAfterThePlan) {
  constexpr uint32_t kRows = 100, kDim = 16;
  Device device(5);
  Engine engine(1, [](frugal_config*c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; }), host(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, kRows, kDim);
  frugal_table* same = host.Table("t", FRUGAL_DENSE, kRows, kDim);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 1.0);
  frugal_trainer* cpu = host.Trainer(0, "cpu");
  std::vector<uint64_t> keys(kRows);
  for (uint64_t i = 0; i < kRows; ++i) keys[i] = i;
  auto op_of = [&](frugal_table* of, size_t from, size_t n) {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = of;
    op.keys = keys.data() + from;
    op.count = n;
    return op;
  };
  const frugal_op all = op_of(table, 0, kRows), half = op_of(table, 0, 50),
                  late = op_of(table, 50, 50);
  std::vector<float> grads(kRows * kDim), out(50 * kDim), host_out = out;
  ASSERT_OK(frugal_prefetch(gpu, 0, &all, 1, nullptr));
  for (uint64_t s = 0; s < 80; ++s) {
    if (s % 2) {
      ASSERT_OK(frugal_prefetch(gpu, s, &late, 1, nullptr));
      // Time for the plan to be added to, or none.
      if (s % 4 == 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ASSERT_OK(frugal_step_begin(gpu, s, kWait));
    ASSERT_OK(frugal_step_begin(cpu, s, kWait));
    ASSERT_OK(frugal_prefetch(gpu, s + 1, s % 2 ? &all : &half, 1, nullptr));
    if (s % 2) {
      frugal_op there = late, here = op_of(same, 50, 50);
      there.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
      here.rows_out = host_out.data();
      ASSERT_OK(frugal_lookup(gpu, &there, 1));
      ASSERT_OK(frugal_lookup(cpu, &here, 1));
      device.memory->Fetch(out.data(), there.rows_out, out.size() * 4);
      device.memory->Collect();
      ASSERT_TRUE(Same(out, host_out)) << "step " << s;
      device.sim->set_delays({});
    } else {
      for (size_t i = 0; i < grads.size(); ++i)
        grads[i] = static_cast<float>((s * 31 + i * 7) % 101) / 50 - 1;
      frugal_op there = all, here = op_of(same, 0, kRows);
      there.grads = static_cast<float*>(device.memory->Send(grads.data(), grads.size() * 4, 4));
      here.grads = grads.data();
      ASSERT_OK(frugal_push_grad(gpu, &there, 1));
      ASSERT_OK(frugal_push_grad(cpu, &here, 1));
      device.memory->Collect();
      // So that the cache refresh is likely to be planned.
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      // What no thread waits for stays undone.
      device.sim->set_delays({0, 0, 100, 0, 30'000});
    }
    ASSERT_OK(frugal_step_end(gpu, s, 0));
    ASSERT_OK(frugal_step_end(cpu, s, 0));
  }
}

// Work ahead of a step has a stream of its own, apart from the cache refresh of another step.
TEST(GpuCache, PrioritiesOfStreams) {
  using frugal::device::Priority;
  Device device(5);
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.5);
  std::vector<Batch> batches;
  for (uint64_t s = 0; s < 10; ++s) batches.emplace_back(s, 0, 300, 16);
  for (uint64_t s = 0; s < batches.size(); ++s) {
    const frugal_op op = OpOf(table, batches[s]);
    ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, nullptr));
  }
  for (uint64_t s = 0; s < batches.size(); ++s)
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, batches[s]));
  device.memory->Collect();
  const std::vector<Priority> low = {Priority::kLow}, normal = {Priority::kNormal};
  for (const char* kernel : {"fill_lines", "sum_terms", "apply_adagrad"})
    EXPECT_EQ(device.sim->priorities(kernel), low) << kernel;
  for (const char* kernel : {"gather_rows", "reduce_runs"})
    EXPECT_EQ(device.sim->priorities(kernel), normal) << kernel;
  // Copies of the cache refresh, of the caller, and uploads.
  const std::vector<Priority> all = {Priority::kLow, Priority::kNormal, Priority::kHigh};
  EXPECT_EQ(device.sim->priorities("copy"), all);
}

// --- Steps ---------------------------------------------------------------------------------------

TEST(Gpu, TheBitsOfTheCpu) {
  Device device;
  const std::vector<float> expected = Reference(2, 12, 300, 20);
  for (double cache : {0.0, 0.1, 1.0}) {
    Engine engine(2);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 20);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), cache);
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    for (uint64_t s = 0; s < 12; ++s) {
      ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, Batch(s, 0, 300, 20)));
      ASSERT_OK(HostStep(cpu, table, s, Batch(s, 1, 300, 20)));
    }
    EXPECT_TRUE(Same(engine.Rows(table, 300, 20), expected)) << cache;
    EXPECT_EQ(engine.Committed(), 11u);
  }
  EXPECT_EQ(device.memory->Error(), "");
}

// With a handle and no keys, lookup and push of a declared batch give work to the stream and
// nothing else, and so does the end of the step. They return although nothing of the stream runs
// before a thread waits for it.
void DeclaredBatchesDoNotWait(double cache) {
  Device device;
  // No flush threads: one that polls for completed device work would wait for it.
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), cache);
  std::vector<frugal_batch*> batches;
  auto declare = [&](uint64_t step) {
    Batch b(step, 0, 300, 16);
    frugal_op op = OpOf(table, b);
    op.keys = static_cast<uint64_t*>(device.memory->Send(b.keys.data(), b.keys.size() * 8, 8));
    frugal_batch* batch = nullptr;
    ASSERT_OK(frugal_prefetch(gpu, step, &op, 1, &batch));
    batches.push_back(batch);
  };
  // Steps before, so that it reads cached rows.
  const uint64_t last = cache == 0 ? 0 : 20;
  for (uint64_t s = 0; s <= std::min<uint64_t>(last, 3); ++s) declare(s);
  for (uint64_t s = 0; s < last; ++s) {
    if (s + 4 <= last) declare(s + 4);
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, Batch(s, 0, 300, 16)));
    device.memory->Collect();
  }
  Batch b(last, 0, 300, 16);
  ASSERT_OK(frugal_step_begin(gpu, last, kWait));
  frugal_op use = FRUGAL_OP_INIT;
  use.table = table;
  use.batch = batches[last];
  std::vector<float> out(b.keys.size() * 16);
  use.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
  use.grads = static_cast<float*>(device.memory->Send(b.grads.data(), b.grads.size() * 4, 4));
  // Once before, so that nothing of the declaration is under way any more.
  ASSERT_OK(frugal_lookup(gpu, &use, 1));
  device.memory->Collect();
  const uint64_t hits_before = engine.Stats().cache_hits;
  constexpr uint32_t kHold = 60'000'000;
  device.sim->set_delays({0, 0, 100, 0, kHold});
  auto start = std::chrono::steady_clock::now();
  ASSERT_OK(frugal_lookup(gpu, &use, 1));
  frugal_op bags = use;
  bags.pooling = FRUGAL_POOL_SUM;
  const uint64_t offsets[] = {0, 20, b.keys.size()};
  bags.bags = 2;
  bags.offsets = offsets;
  ASSERT_OK(frugal_lookup(gpu, &bags, 1));
  ASSERT_OK(frugal_push_grad(gpu, &use, 1));
  ASSERT_OK(frugal_step_end(gpu, last, 0));
  // Not a measurement: what is held would take a minute.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::microseconds(kHold));
  EXPECT_EQ(engine.Committed(), last ? last - 1 : FRUGAL_NO_STEP)
      << "nothing has run, so nothing may be committed";
  EXPECT_EQ(engine.Stats().cache_hits > hits_before, cache != 0);
  device.memory->Fetch(out.data(), use.rows_out, out.size() * 4);
  device.memory->Collect();
  device.sim->set_delays({});
  ASSERT_OK(frugal_step_begin(gpu, last + 1, kWait));
  EXPECT_EQ(engine.Committed(), last);
}

TEST(Gpu, DeclaredBatchesDoNotWait) { DeclaredBatchesDoNotWait(0); }
TEST(GpuCache, DeclaredBatchesDoNotWait) { DeclaredBatchesDoNotWait(0.5); }

// Only kernels read the offsets of a declared batch. The end of the step reports what is wrong with
// them.
TEST(Gpu, OffsetsOnTheDevice) {
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  const std::vector<float> before = engine.Rows(table, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  Batch b(0, 0, 300, 16);
  const frugal_op keys = OpOf(table, b);
  const uint64_t n = b.keys.size();
  std::vector<float> out(3 * 16);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = table;
  op.bags = 3;
  // With the last offset too large, too small, and right: as lookup, and as push.
  for (const uint64_t last : {n + 7, n - 1, n}) {
    for (int push = 0; push < 2; ++push) {
      op.pooling = push ? FRUGAL_POOL_MEAN : FRUGAL_POOL_SUM;
      frugal_batch* batch = nullptr;
      uint64_t step = engine.Committed() == FRUGAL_NO_STEP ? 0 : engine.Committed() + 1;
      ASSERT_OK(frugal_prefetch(gpu, step, &keys, 1, &batch));
      op.batch = batch;
      const uint64_t offsets[] = {0, 20, 20, last};
      ASSERT_OK(frugal_step_begin(gpu, step, kWait));
      ASSERT_OK(frugal_step_begin(cpu, step, kWait));
      device.memory->Collect();
      op.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
      op.grads = static_cast<float*>(device.memory->Send(b.grads.data(), out.size() * 4, 4));
      op.offsets = static_cast<uint64_t*>(device.memory->Send(offsets, sizeof offsets, 8));
      // The call has no result to wait for: what is held would take a minute.
      device.sim->set_delays({0, 0, 100, 0, 60'000'000});
      auto start = std::chrono::steady_clock::now();
      if (push)
        ASSERT_OK(frugal_push_grad(gpu, &op, 1));
      else
        ASSERT_OK(frugal_lookup(gpu, &op, 1));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
      device.sim->set_delays({});
      if (last == n) {
        ASSERT_OK(frugal_step_end(gpu, step, 0));
        ASSERT_OK(frugal_step_end(cpu, step, 0));
        continue;
      }
      EXPECT_EQ(frugal_step_end(gpu, step, 0), FRUGAL_ERR_INVALID_ARGUMENT);
      EXPECT_NE(LastMessage().find("offsets"), std::string::npos) << LastMessage();
      EXPECT_EQ(frugal_step_end(cpu, step, 0), FRUGAL_ERR_STEP_ABORTED);
      EXPECT_TRUE(Same(engine.Rows(table, 300, 16), before));
      EXPECT_OK(frugal_prefetch_cancel(gpu, batch));
    }
  }
}

TEST(Gpu, OtherKeysThanTheDeclaredOnes) {
  Device device;
  for (int32_t space : {FRUGAL_DENSE, FRUGAL_HASHED}) {
    Engine engine(1);
    frugal_table* table = engine.Table("t", space, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    for (uint64_t s = 0; s < 6; ++s) {
      Batch declared(s, 0, 250, 16), used = declared;
      if (s % 2) used.keys[17] = 250 + s;
      frugal_op op = OpOf(table, declared);
      frugal_batch* batch = nullptr;
      ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, &batch));
      ASSERT_OK(frugal_step_begin(gpu, s, kWait));
      frugal_op use = OpOf(table, used);
      use.batch = batch;
      std::vector<float> out(used.keys.size() * 16), host = out;
      use.keys =
          static_cast<uint64_t*>(device.memory->Send(used.keys.data(), used.keys.size() * 8, 8));
      use.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
      ASSERT_OK(frugal_lookup(gpu, &use, 1));
      device.memory->Fetch(out.data(), use.rows_out, out.size() * 4);
      device.memory->Collect();
      frugal_op check = OpOf(table, used);
      check.rows_out = host.data();
      ASSERT_OK(frugal_lookup(gpu, &check, 1));
      EXPECT_TRUE(Same(out, host)) << s;
      ASSERT_OK(frugal_step_end(gpu, s, 0));
    }
  }
}

TEST(Gpu, ABadIdOnTheDevice) {
  Device device;
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  Batch b(0, 0, 300, 16);
  b.keys[7] = 300;
  frugal_op op = OpOf(table, b);
  op.keys = static_cast<uint64_t*>(device.memory->Send(b.keys.data(), b.keys.size() * 8, 8));
  frugal_batch* batch = nullptr;
  ASSERT_OK(frugal_prefetch(gpu, 0, &op, 1, &batch));  // no thread has read the keys yet
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  std::vector<float> out(b.keys.size() * 16);
  float* rows = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
  frugal_op use = FRUGAL_OP_INIT;
  use.table = table;
  use.batch = batch;
  use.rows_out = rows;
  EXPECT_EQ(frugal_lookup(gpu, &use, 1), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_NE(LastMessage().find("300"), std::string::npos) << LastMessage();
  op.rows_out = rows;
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
}

// step_end reports a NaN that the device finds, and the step is undone on every rank.
TEST(Gpu, NanOnTheDevice) {
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16, FRUGAL_ADAGRAD, FRUGAL_NAN_REJECT);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  const std::vector<float> before = engine.Rows(table, 300, 16);
  Batch bad(0, 0, 300, 16), good(0, 1, 300, 16);
  bad.grads[333] = std::nanf("");
  ASSERT_OK(HostStep(cpu, table, 0, good));
  EXPECT_EQ(DeviceStep(gpu, *device.memory, table, 0, bad), FRUGAL_ERR_NAN);
  EXPECT_EQ(engine.Committed(), FRUGAL_NO_STEP);
  EXPECT_EQ(frugal_step_begin(cpu, 1, kWait), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_TRUE(Same(engine.Rows(table, 300, 16), before));
  bad.grads[333] = 0.5f;
  ASSERT_OK(HostStep(cpu, table, 0, good));
  ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, bad));
  EXPECT_EQ(engine.Committed(), 0u);
  EXPECT_FALSE(Same(engine.Rows(table, 300, 16), before));
}

TEST(Gpu, ACapturingStreamIsLeftAlone) {
  Device device;
  frugal::device::Stream captured;
  ASSERT_TRUE(device.runtime->create_stream(frugal::device::Priority::kNormal, &captured).ok());
  {
    Engine engine(1);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    Batch b(0, 0, 300, 16);
    std::vector<float> out(b.keys.size() * 16);
    frugal_op op = OpOf(table, b);
    op.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
    op.grads = static_cast<float*>(device.memory->Send(b.grads.data(), b.grads.size() * 4, 4));
    device.memory->Collect();
    ASSERT_OK(frugal_set_stream(gpu, captured.handle));
    ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
    ASSERT_OK(frugal_lookup(gpu, &op, 1));
    device.sim->set_capturing(captured, true);
    const uint64_t before = device.sim->capture_violations();
    EXPECT_EQ(frugal_set_stream(gpu, captured.handle), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(frugal_prefetch(gpu, 1, &op, 1, nullptr), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(frugal_push_grad(gpu, &op, 1), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(frugal_read(engine.handle, gpu, &op, 1, kWait), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(frugal_step_end(gpu, 0, 0), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(device.sim->capture_violations(), before);
    device.sim->set_capturing(captured, false);
    EXPECT_OK(frugal_push_grad(gpu, &op, 1));
    EXPECT_OK(frugal_step_end(gpu, 0, 0));
    device.sim->set_capturing(captured, true);
    EXPECT_EQ(frugal_step_begin(gpu, 1, kWait), FRUGAL_ERR_UNSUPPORTED);
    EXPECT_EQ(device.sim->capture_violations(), before);
    device.sim->set_capturing(captured, false);
    EXPECT_OK(frugal_step_begin(gpu, 1, kWait));
  }
  device.runtime->destroy_stream(captured);
}

// The thread that undoes a step may not touch a stream that is being captured by then.
TEST(Gpu, UndoingBesideACapture) {
  Device device;
  for (const char* how : {"abort", "another's abort", "close", "close the engine"}) {
    SCOPED_TRACE(how);
    const std::string what = how;
    frugal::device::Stream captured;
    ASSERT_TRUE(device.runtime->create_stream(frugal::device::Priority::kNormal, &captured).ok());
    {
      Engine engine(2);
      frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
      frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.5);
      frugal_trainer* cpu = engine.Trainer(1, "cpu");
      Batch b(0, 0, 300, 16);
      frugal_op op = OpOf(table, b);
      op.grads = static_cast<float*>(device.memory->Send(b.grads.data(), b.grads.size() * 4, 4));
      device.memory->Collect();
      ASSERT_OK(frugal_set_stream(gpu, captured.handle));
      ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
      ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
      ASSERT_OK(frugal_push_grad(gpu, &op, 1));
      device.sim->set_capturing(captured, true);
      const uint64_t before = device.sim->capture_violations();
      if (what == "abort") {
        EXPECT_OK(frugal_step_abort(gpu));
      } else if (what == "another's abort") {
        EXPECT_OK(frugal_step_abort(cpu));
      } else if (what == "close") {
        EXPECT_OK(frugal_trainer_close(gpu));
      } else {
        EXPECT_OK(frugal_close(engine.handle));
        engine.handle = nullptr;
      }
      EXPECT_EQ(device.sim->capture_violations(), before);
      device.sim->set_capturing(captured, false);
      if (engine.handle) {
        EXPECT_OK(frugal_health(engine.handle));
      }
    }
    device.runtime->destroy_stream(captured);
  }
}

TEST(Gpu, PointersOfTheWrongDevice) {
  Device device(0), other(1);
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  Batch b(0, 0, 300, 16);
  std::vector<float> out(b.keys.size() * 16);
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  frugal_op op = OpOf(table, b);
  op.rows_out = static_cast<float*>(other.memory->Send(out.data(), out.size() * 4, 4));
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("another device"), std::string::npos) << LastMessage();
  uint8_t* found = static_cast<uint8_t*>(device.memory->Send(out.data(), b.keys.size(), 4));
  op.rows_out = out.data();
  op.found_out = found;
  EXPECT_EQ(frugal_read(engine.handle, gpu, &op, 1, kWait), FRUGAL_ERR_INVALID_ARGUMENT);
  op.found_out = nullptr;
  // Weights and rows on two sides.
  const uint64_t offsets[] = {0, b.keys.size()};
  std::vector<float> weights(b.keys.size(), 1.0f);
  op.rows_out = out.data();
  op.pooling = FRUGAL_POOL_SUM;
  op.offsets = offsets;
  op.bags = 1;
  op.weights = static_cast<float*>(device.memory->Send(weights.data(), weights.size() * 4, 4));
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
}

// With staleness the host reads the rows. In the first step no row can be stale.
TEST(Gpu, GradientsOfWeightsWithStaleness) {
  Device device;
  auto stale = [](frugal_config* c) { c->staleness = 2; };
  Engine engine(1, stale), host(1, stale);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 12);
  frugal_table* same = host.Table("t", FRUGAL_DENSE, 300, 12);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = host.Trainer(0, "cpu");
  Batch b(0, 0, 300, 12);
  const uint64_t offsets[] = {0, 7, 7, 40, b.keys.size()};
  std::vector<float> weights(b.keys.size(), 0.75f), grads(b.keys.size(), -7), host_grads = grads;
  frugal_op here = OpOf(same, b);
  here.pooling = FRUGAL_POOL_SUM;
  here.offsets = offsets;
  here.bags = 4;
  here.flags = FRUGAL_OP_PADDING;
  here.padding_key = b.keys[5];
  here.weights = weights.data();
  here.grads = b.grads.data();
  here.weight_grads_out = host_grads.data();
  frugal_op there = here;
  there.table = table;
  there.weights = static_cast<float*>(device.memory->Send(weights.data(), weights.size() * 4, 4));
  there.grads = static_cast<float*>(device.memory->Send(b.grads.data(), 4 * 12 * 4, 4));
  there.weight_grads_out =
      static_cast<float*>(device.memory->Send(grads.data(), grads.size() * 4, 4));
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
  ASSERT_OK(frugal_push_grad(gpu, &there, 1));
  ASSERT_OK(frugal_push_grad(cpu, &here, 1));
  device.memory->Fetch(grads.data(), there.weight_grads_out, grads.size() * 4);
  device.memory->Collect();
  EXPECT_TRUE(Same(grads, host_grads));
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
}

// A host access of these would be a crash.
TEST(Gpu, PointersOfADeviceForARankOnTheCpu) {
  Device device;
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* cpu = engine.Trainer(0, "cpu");
  Batch b(0, 0, 300, 16);
  std::vector<float> rows(b.keys.size() * 16);
  const size_t n = b.keys.size();
  void* there = device.memory->Send(rows.data(), rows.size() * 4, 8);
  frugal_op keys = OpOf(table, b);
  keys.keys = static_cast<uint64_t*>(there);
  EXPECT_EQ(frugal_prefetch(cpu, 0, &keys, 1, nullptr), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("frugal_op.keys is memory of a GPU"), std::string::npos)
      << LastMessage();
  EXPECT_EQ(frugal_get(table, keys.keys, n, 0, rows.data(), 0, nullptr),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_get(table, b.keys.data(), n, 0, static_cast<float*>(there), 0, nullptr),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_get(table, b.keys.data(), n, 0, rows.data(), 0, static_cast<uint8_t*>(there)),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_put(table, keys.keys, n, 0, rows.data(), 0), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_put(table, b.keys.data(), n, 0, static_cast<float*>(there), 0),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_delete(table, keys.keys, n, nullptr), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
  for (int at = 0; at < 7; ++at) {
    const uint64_t offsets[] = {0, n};
    frugal_op op = OpOf(table, b);
    op.rows_out = rows.data();
    op.grads = b.grads.data();
    op.pooling = FRUGAL_POOL_SUM;
    op.offsets = offsets;
    op.bags = 1;
    std::vector<float> weights(n), grads(n);
    op.weights = weights.data();
    op.weight_grads_out = grads.data();
    switch (at) {
      case 0:
        op.keys = static_cast<uint64_t*>(there);
        break;
      case 1:
        op.rows_out = static_cast<float*>(there);
        break;
      case 2:
        op.grads = static_cast<float*>(there);
        break;
      case 3:
        op.offsets = static_cast<uint64_t*>(there);
        break;
      case 4:
        op.weights = static_cast<float*>(there);
        break;
      case 5:
        op.weight_grads_out = static_cast<float*>(there);
        break;
      default:
        op.found_out = static_cast<uint8_t*>(there);
    }
    EXPECT_EQ(frugal_lookup(cpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT) << at;
    EXPECT_EQ(frugal_push_grad(cpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT) << at;
    EXPECT_EQ(frugal_read(engine.handle, cpu, &op, 1, kWait), FRUGAL_ERR_INVALID_ARGUMENT) << at;
  }
  EXPECT_OK(frugal_step_end(cpu, 0, 0));
}

TEST(Gpu, StreamsOfAnotherDevice) {
  Device device(0), other(1);
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal::device::Stream theirs;
  ASSERT_TRUE(other.runtime->create_stream(frugal::device::Priority::kNormal, &theirs).ok());
  EXPECT_EQ(frugal_set_stream(gpu, theirs.handle), FRUGAL_ERR_INVALID_ARGUMENT);
  // What is another stream in each thread; and the default one by its other name.
  EXPECT_EQ(frugal_set_stream(gpu, reinterpret_cast<void*>(2)), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_OK(frugal_set_stream(gpu, reinterpret_cast<void*>(1)));
  EXPECT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));  // the one before
  other.runtime->destroy_stream(theirs);
}

// A kernel's fault would end the device.
TEST(Gpu, PointersThatAreNotAligned) {
  Device device;
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  Batch b(0, 0, 300, 16);
  std::vector<float> out(b.keys.size() * 16 + 4);
  char* there = static_cast<char*>(device.memory->Send(out.data(), out.size() * 4, 8));
  frugal_op op = OpOf(table, b);
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  op.rows_out = reinterpret_cast<float*>(there + 2);
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("not aligned to 4 bytes"), std::string::npos) << LastMessage();
  op.grads = op.rows_out;
  EXPECT_EQ(frugal_push_grad(gpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT);
  op.rows_out = reinterpret_cast<float*>(there);
  op.keys = reinterpret_cast<uint64_t*>(there + 4);
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_INVALID_ARGUMENT);
  op.keys = b.keys.data();
  EXPECT_OK(frugal_lookup(gpu, &op, 1));
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
}

TEST(Gpu, StreamsAreForGpus) {
  Engine engine(1);
  frugal_trainer* cpu = engine.Trainer(0, "cpu");
  EXPECT_EQ(frugal_set_stream(cpu, nullptr), FRUGAL_ERR_UNSUPPORTED);
}

// Pooled with weights, several pushes to a table, all optimizers on cached rows: the names of what
// was launched go to a file, which is compared with the kernels that the CUDA build contains.
TEST(Gpu, EveryKernelIsLaunched) {
  Device device(4);
  for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
    Engine engine(1), host(1);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 60, 12, kind);
    frugal_table* same = host.Table("t", FRUGAL_DENSE, 60, 12, kind);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 1.0);
    frugal_trainer* cpu = host.Trainer(0, "cpu");
    for (uint64_t s = 0; s < 4; ++s) {
      Batch b(s, 0, 60, 12, 200);  // frequent rows among them
      frugal_op op = OpOf(table, b);
      frugal_batch* batch = nullptr;
      ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, &batch));
      ASSERT_OK(frugal_step_begin(gpu, s, kWait));
      ASSERT_OK(frugal_step_begin(cpu, s, kWait));
      const uint64_t offsets[] = {0, 3, 3, 150, 200};
      std::vector<float> weights(b.keys.size(), 0.25f), grads(b.keys.size(), 0), host_grads = grads;
      std::vector<float> out(4 * 12), host_out = out;
      auto pooled = [&](frugal_table* of, const frugal_batch* declared) {
        frugal_op p = OpOf(of, b);
        p.batch = declared;
        p.pooling = FRUGAL_POOL_SUM;
        p.offsets = offsets;
        p.bags = 4;
        return p;
      };
      frugal_op there = pooled(table, batch), here = pooled(same, nullptr);
      there.keys = static_cast<uint64_t*>(device.memory->Send(b.keys.data(), b.keys.size() * 8, 8));
      there.weights =
          static_cast<float*>(device.memory->Send(weights.data(), weights.size() * 4, 4));
      here.weights = weights.data();
      there.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
      here.rows_out = host_out.data();
      ASSERT_OK(frugal_lookup(gpu, &there, 1));
      ASSERT_OK(frugal_lookup(cpu, &here, 1));
      there.grads = static_cast<float*>(device.memory->Send(b.grads.data(), out.size() * 4, 4));
      here.grads = b.grads.data();
      there.weight_grads_out =
          static_cast<float*>(device.memory->Send(grads.data(), grads.size() * 4, 4));
      here.weight_grads_out = host_grads.data();
      ASSERT_OK(frugal_push_grad(gpu, &there, 1));
      ASSERT_OK(frugal_push_grad(cpu, &here, 1));
      device.memory->Fetch(out.data(), there.rows_out, out.size() * 4);
      device.memory->Fetch(grads.data(), there.weight_grads_out, grads.size() * 4);
      device.memory->Collect();
      EXPECT_TRUE(Same(out, host_out)) << kind << ' ' << s;
      EXPECT_TRUE(Same(grads, host_grads)) << kind << ' ' << s;
      // A second push, and a lookup of single rows.
      frugal_op more = OpOf(table, b), host_more = OpOf(same, b);
      more.grads = static_cast<float*>(device.memory->Send(b.grads.data(), b.grads.size() * 4, 4));
      host_more.grads = b.grads.data();
      if (s % 2) {
        ASSERT_OK(frugal_push_grad(gpu, &more, 1));
        ASSERT_OK(frugal_push_grad(cpu, &host_more, 1));
      }
      std::vector<float> rows(b.keys.size() * 12), host_rows = rows;
      more.rows_out = static_cast<float*>(device.memory->Send(rows.data(), rows.size() * 4, 4));
      host_more.rows_out = host_rows.data();
      ASSERT_OK(frugal_lookup(gpu, &more, 1));
      ASSERT_OK(frugal_lookup(cpu, &host_more, 1));
      device.memory->Fetch(rows.data(), more.rows_out, rows.size() * 4);
      device.memory->Collect();
      EXPECT_TRUE(Same(rows, host_rows)) << kind << ' ' << s;
      ASSERT_OK(frugal_step_end(gpu, s, 0));
      ASSERT_OK(frugal_step_end(cpu, s, 0));
    }
    EXPECT_TRUE(Same(engine.Rows(table, 60, 12), host.Rows(same, 60, 12))) << kind;
  }
  // Frequent rows are prepared where they are not cached.
  {
    Engine engine(1);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 60, 12);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 60, 12, 300)));
  }
  const std::vector<std::string> launched = device.sim->launched();
  const std::set<std::string> names(launched.begin(), launched.end());
  std::set<std::string> all;
#define X(name, Arguments) all.insert(#name);
  FRUGAL_KERNELS(X)
#undef X
  EXPECT_EQ(names, all);
  if (const char* path = std::getenv("FRUGAL_LAUNCHED_KERNELS")) {
    FILE* file = std::fopen(path, "w");
    ASSERT_NE(file, nullptr);
    for (const std::string& name : names) std::fprintf(file, "%s\n", name.c_str());
    ASSERT_EQ(std::fclose(file), 0);
  }
}

// --- Memory --------------------------------------------------------------------------------------

TEST(GpuMemory, ThatCannotBePinned) {
  Device device;
  Engine engine(1, [](frugal_config* c) { c->host_bytes = uint64_t{1} << 30; });
  frugal_table* small = engine.Table("small", FRUGAL_DENSE, 100, 16);
  frugal_table* hashed = engine.Table("hashed", FRUGAL_HASHED, 4'000'000, 16);
  frugal_table* large =
      engine.Table("large", FRUGAL_DENSE, 2'000'000, 16);  // 128 MB and as much state
  const uint64_t pinned = device.sim->live().pinned;
  frugal::device::sim::set_pinnable_bytes(uint64_t{64} << 20);
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.device = device.name.c_str();
  frugal_trainer* trainer = nullptr;
  ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainer));
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(frugal_step_begin(trainer, 0, kWait), FRUGAL_ERR_OUT_OF_MEMORY);
    frugal_error error;
    frugal_last_error(&error);
    EXPECT_NE(error.device_code, 0);
    EXPECT_NE(LastMessage().find("pinning host memory"), std::string::npos) << LastMessage();
  }
  EXPECT_OK(frugal_trainer_close(trainer));
  trainer = nullptr;
  // Memory is pinned only for trainers that have joined, and a rank on the cpu works as before.
  EXPECT_EQ(device.sim->live().pinned, pinned);
  {
    frugal_trainer* cpu = engine.Trainer(0, "cpu");
    frugal::device::sim::set_pinnable_bytes(0);
    EXPECT_OK(HostStep(cpu, small, 0, Batch(0, 0, 100, 16)));
    EXPECT_OK(frugal_trainer_close(cpu));
    frugal::device::sim::set_pinnable_bytes(uint64_t{64} << 20);
  }
  ASSERT_OK(frugal_table_drop(large));
  ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainer)) << LastMessage();
  // Grows until no slab can be pinned any more: the call that needs one is refused, and nothing
  // else.
  int32_t status = FRUGAL_OK;
  uint64_t step = 1;
  for (uint64_t from = 0; status == FRUGAL_OK && from < 4'000'000; from += 100'000) {
    std::vector<uint64_t> keys(100'000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = from + i;
    std::vector<float> rows(keys.size() * 16);
    frugal_op op = FRUGAL_OP_INIT;
    op.table = hashed;
    op.keys = keys.data();
    op.count = keys.size();
    op.rows_out = rows.data();
    ASSERT_OK(frugal_step_begin(trainer, step, kWait));
    status = frugal_lookup(trainer, &op, 1);
    ASSERT_OK(frugal_step_end(trainer, step++, 0));
  }
  EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_OK(frugal_health(engine.handle));
  ASSERT_OK(DeviceStep(trainer, *device.memory, small, step, Batch(step, 0, 100, 16)));
  ASSERT_OK(frugal_step_begin(trainer, step + 1, kWait));
  frugal::device::sim::set_pinnable_bytes(UINT64_MAX);
}

// After some steps all sizes of memory have occurred: nothing is allocated, pinned or created any
// more. With each step done before the next, so that how many buffers are in use at once is no
// matter of timing.
TEST(GpuMemory, StepsAllocateNothing) {
  Device device(2);
  Engine engine(1, [](frugal_config* c) {
    c->flush_mode = FRUGAL_FLUSH_DEFERRED;
    c->flush_threads = 0;
  });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 400, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.3);
  constexpr uint64_t kAhead = 4, kBatches = 10;
  auto batch = [&](uint64_t s) { return Batch(s % kBatches, 0, 400, 16, 200); };
  auto declare = [&](uint64_t s) {
    Batch b = batch(s);
    frugal_op op = OpOf(table, b);
    ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, nullptr));
  };
  for (uint64_t s = 0; s < kAhead; ++s) declare(s);
  auto step = [&](uint64_t s) {
    declare(s + kAhead);
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, batch(s)));
    device.memory->Collect();
    ASSERT_OK(frugal_flush(engine.handle, kWait));
  };
  for (uint64_t s = 0; s < 100; ++s) step(s);
  const auto before = device.sim->live();
  for (uint64_t s = 100; s < 300; ++s) step(s);
  const auto now = device.sim->live();
  EXPECT_EQ(now.allocations, before.allocations);
  EXPECT_EQ(now.bytes, before.bytes);
  EXPECT_EQ(now.pinned, before.pinned);
  EXPECT_EQ(now.events, before.events);
  EXPECT_EQ(now.streams, before.streams);
  EXPECT_EQ(now.allocations_ever, before.allocations_ever);
  EXPECT_EQ(now.pinned_ever, before.pinned_ever);
  EXPECT_EQ(now.events_ever, before.events_ever);
  EXPECT_EQ(now.streams_ever, before.streams_ever);
  const frugal_stats stats = engine.Stats();
  EXPECT_GT(stats.cache_hits, 0u);
}

// Batches of many sizes, each wanted once: what is kept for the next is bounded by what small steps
// want later.
TEST(GpuMemory, WhatNobodyWantsAnyMoreGoesBack) {
  Device device;
  constexpr uint64_t kRows = 800'000;
  constexpr uint32_t kDim = 4;
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, kRows, kDim);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  uint64_t step = 0;
  auto train = [&](size_t n) {
    Batch b(step, 0, kRows, kDim, n);
    frugal_op op = OpOf(table, b);
    ASSERT_OK(frugal_prefetch(gpu, step, &op, 1, nullptr));
    ASSERT_OK(HostStep(gpu, table, step++, b));
  };
  train(100);
  const uint64_t small = device.sim->live().bytes;
  uint64_t most = 0;
  for (size_t n = kRows; n > 300'000; n -= n / 8) {
    train(n);
    most = std::max(most, device.sim->live().bytes);
  }
  for (int i = 0; i < 600; ++i) train(100);
  const uint64_t kept = device.sim->live().bytes;
  EXPECT_GT(most, small + (uint64_t{20} << 20)) << "the test wants larger batches";
  EXPECT_LE(kept, small + (uint64_t{9} << 20)) << "of " << most;
}

TEST(GpuMemory, StepsInFlightKeepTheirMemory) {
  Device device(2);
  Engine engine(1, [](frugal_config* c) { c->flush_mode = FRUGAL_FLUSH_DEFERRED; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 400, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.3);
  constexpr uint64_t kAhead = 4;
  auto declare = [&](uint64_t s) {
    Batch b(s, 0, 400, 16, 200);
    frugal_op op = OpOf(table, b);
    ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, nullptr));
  };
  for (uint64_t s = 0; s < kAhead; ++s) declare(s);
  frugal::device::sim::Live most = {};
  auto step = [&](uint64_t s) {
    declare(s + kAhead);
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, Batch(s, 0, 400, 16, 200)));
    device.memory->Collect();
  };
  for (uint64_t s = 0; s < 200; ++s) step(s);
  most = device.sim->live();
  for (uint64_t s = 200; s < 600; ++s) step(s);
  // (How many are in use at once is a matter of timing: some buffers or events more are no leak.
  // One a step is.)
  const auto now = device.sim->live();
  EXPECT_LE(now.allocations, most.allocations + 100);
  EXPECT_LE(now.pinned, most.pinned + 100);
  EXPECT_LE(now.events, most.events + 100);
  EXPECT_EQ(now.streams, most.streams);
  const frugal_stats stats = engine.Stats();
  EXPECT_GT(stats.cache_hits, 0u);
  EXPECT_GT(stats.cache_planned, 0u);
}

// cache_bytes limit the device memory of the cached rows.
TEST(GpuMemory, ACacheTakesNoMoreThanItsBytes) {
  Device device(3);
  uint64_t bytes[2];
  for (const uint64_t cache : {uint64_t{0}, uint64_t{3} << 20}) {
    Engine engine(1);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200'000, 16);
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.device = device.name.c_str();
    config.cache_bytes = cache;
    frugal_trainer* gpu = nullptr;
    ASSERT_OK(frugal_trainer_create(engine.handle, &config, &gpu));
    Batch b(0, 0, 200'000, 16);
    frugal_op op = OpOf(table, b);
    ASSERT_OK(frugal_prefetch(gpu, 0, &op, 1, nullptr));
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, b));
    bytes[cache != 0] = device.sim->live().bytes;
    device.memory->Collect();
  }
  // The cache's bytes include the lists of a cache refresh.
  EXPECT_GT(bytes[1], bytes[0] + (uint64_t{5} << 19));
  EXPECT_LE(bytes[1], bytes[0] + (uint64_t{3} << 20) + (uint64_t{1} << 18));
}

TEST(GpuMemory, NothingIsLeftBehind) {
  Device device;
  const auto before = device.sim->live();
  {
    Engine engine(2);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 5000, 20);
    frugal_table* dropped = engine.Table("dropped", FRUGAL_DENSE, 5000, 20);
    frugal_trainer* a = engine.Trainer(0, device.name.c_str(), 0.3);
    frugal_trainer* b = engine.Trainer(1, device.name.c_str());
    Device second(0);
    for (uint64_t s = 0; s < 8; ++s) {
      ASSERT_OK(DeviceStep(a, *device.memory, table, s, Batch(s, 0, 5000, 20, 300)));
      ASSERT_OK(DeviceStep(b, *second.memory, table, s, Batch(s, 1, 5000, 20, 300)));
    }
    ASSERT_OK(frugal_table_drop(dropped));
    ASSERT_OK(frugal_trainer_close(b));
  }
  device.memory->Collect();
  const auto after = device.sim->live();
  // What the test itself has taken stays until it ends: some blocks, pinned and on the device.
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.events, before.events);
  EXPECT_LE(after.allocations, before.allocations + 2);
  EXPECT_LE(after.pinned, before.pinned + 2);
  // Memory that was unmapped before it was unpinned is a fault.
  EXPECT_EQ(device.memory->Error(), "");
}

// --- Failures ------------------------------------------------------------------------------------

// Two ranks train; the n-th call of the device interface fails once. A call that returns this error
// is made again. If that cannot be (the gradients may be lost), the step is aborted and done again.
// The bits are right at the end.
void FailOnce(uint64_t n, ErrorKind kind, const std::vector<float>& expected, bool* reached) {
  constexpr uint64_t kSteps = 4;
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
  // The test's own memory is there before.
  const float warm = 0;
  device.memory->Fetch(const_cast<float*>(&warm), device.memory->Send(&warm, 4, 4), 4);
  device.memory->Collect();
  device.sim->fail_after(n, kind, false);
  const uint64_t first = device.sim->calls();
  frugal_trainer* gpu = nullptr;
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.device = device.name.c_str();
  config.cache_ratio = 0.5;
  for (int tries = 0; !gpu && tries < 3; ++tries)
    (void)frugal_trainer_create(engine.handle, &config, &gpu);
  ASSERT_NE(gpu, nullptr) << n << ": " << LastMessage();
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  for (uint64_t step = 0; step < kSteps; ++step) {
    Batch mine(step, 0, 200, 12), other(step, 1, 200, 12);
    frugal_op op = OpOf(table, mine);
    // A declaration that fails declares nothing.
    (void)frugal_prefetch(gpu, step, &op, 1, nullptr);
    int32_t status = FRUGAL_OK;
    for (int tries = 0; tries < 3; ++tries) {
      status = DeviceStep(gpu, *device.memory, table, step, mine);
      // The test's own work on the device may be what failed, too: then what it pushed is not
      // right.
      const bool mine_failed = !device.memory->Error().empty();
      device.memory->Forgive();
      if (status == FRUGAL_OK && !mine_failed) break;
      // (Where the step has ended, there is nothing of it that could be done again.)
      if (status != FRUGAL_OK) (void)frugal_step_abort(gpu);
      if (status == FRUGAL_OK && mine_failed) {
        *reached = true;  // shows nothing
        device.sim->fail_after(0, kind, false);
        return;
      }
    }
    ASSERT_OK(status) << n;
    // Told of the aborts before, and nothing else.
    ASSERT_OK(HostStepAgain(cpu, table, step, other)) << n;
    ASSERT_OK(frugal_health(engine.handle)) << n;
  }
  *reached = device.sim->calls() - first >= n;
  device.sim->fail_after(0, kind, false);
  EXPECT_TRUE(Same(engine.Rows(table, 200, 12), expected)) << "call " << n;
}

// Which calls fail: each, of attached engines every `attached`-th (a controller for each takes its
// time). Under a sanitizer a slice of them.
struct Calls {
  explicit Calls(uint64_t attached) : step(Attached() ? attached : 1) {
    const frugal_test::Slice slice(step);
    first += slice.first;
    step = slice.step;
  }
  uint64_t first = 1, step;
};

TEST(GpuFailures, EachCallOnce) {
  const std::vector<float> expected = Reference(2, 4, 200, 12);
  bool reached;
  uint64_t n;
  for (const ErrorKind kind : {ErrorKind::kOutOfMemory, ErrorKind::kMisuse}) {
    SCOPED_TRACE(kind == ErrorKind::kMisuse ? "misuse" : "no memory");
    const Calls calls(kind == ErrorKind::kMisuse ? 4 : 1);
    for (n = calls.first, reached = true; reached && !testing::Test::HasFailure(); n += calls.step)
      FailOnce(n, kind, expected, &reached);
    EXPECT_GT(n, 60u) << "there are more calls than that";
  }
}

// From the n-th call of the device interface on, the device's memory is used up: calls of the rank
// are refused, its step can be undone, and the other rank goes on. When there is memory again, the
// rank goes on, too.
void NoMemoryFrom(uint64_t n, const std::vector<float>& expected, bool* reached) {
  constexpr uint64_t kSteps = 4;
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.5);
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  // The test's own memory is there before. Keys are the host's and the device's by turns.
  std::vector<Batch> batches;
  std::vector<frugal_op> ops;
  for (uint64_t step = 0; step < kSteps; ++step) batches.emplace_back(step, 0, 200, 12);
  for (const Batch& b : batches) {
    const std::vector<float> out(b.grads.size());
    frugal_op op = OpOf(table, b);
    if (ops.size() % 2)
      op.keys = static_cast<uint64_t*>(device.memory->Send(b.keys.data(), b.keys.size() * 8, 8));
    op.rows_out = static_cast<float*>(device.memory->Send(out.data(), out.size() * 4, 4));
    op.grads = static_cast<float*>(device.memory->Send(b.grads.data(), b.grads.size() * 4, 4));
    ops.push_back(op);
  }
  ASSERT_EQ(device.memory->Error(), "");
  device.sim->exhaust_after(n);
  const uint64_t first = device.sim->calls();
  for (uint64_t step = 0; step < kSteps; ++step) {
    const frugal_op& op = ops[step];
    auto train = [&] {
      if (int32_t s = frugal_step_begin(gpu, step, kWait)) return s;
      if (int32_t s = frugal_lookup(gpu, &op, 1)) return s;
      if (int32_t s = frugal_push_grad(gpu, &op, 1)) return s;
      return frugal_step_end(gpu, step, 0);
    };
    const int32_t declared = frugal_prefetch(gpu, step, &op, 1, nullptr);
    if (declared != FRUGAL_OK) {
      ASSERT_EQ(declared, FRUGAL_ERR_OUT_OF_MEMORY) << n << ": " << LastMessage();
    }
    int32_t status = train();
    if (status != FRUGAL_OK) {
      ASSERT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << n << ": " << LastMessage();
      (void)frugal_step_abort(gpu);
      ASSERT_OK(HostStepAgain(cpu, table, step, Batch(step, 1, 200, 12))) << n;
      device.sim->exhaust_after(0);
      ASSERT_OK(train()) << n;
    } else {
      ASSERT_OK(HostStepAgain(cpu, table, step, Batch(step, 1, 200, 12))) << n;
    }
    ASSERT_OK(frugal_health(engine.handle)) << n;
  }
  *reached = device.sim->calls() - first >= n;
  device.sim->exhaust_after(0);
  EXPECT_TRUE(Same(engine.Rows(table, 200, 12), expected)) << "call " << n;
  device.memory->Collect();
  EXPECT_EQ(device.memory->Error(), "") << n;
}

TEST(GpuFailures, NoMemoryForGood) {
  const std::vector<float> expected = Reference(2, 4, 200, 12);
  bool reached = true;
  uint64_t n;
  const Calls calls(4);
  for (n = calls.first; reached && !testing::Test::HasFailure(); n += calls.step)
    NoMemoryFrom(n, expected, &reached);
  EXPECT_GT(n, 60u) << "there are more calls than that";
}

// The device dies: the other rank is freed, tables are those of the last committed step, and after
// the rank has been closed another device goes on from there.
TEST(GpuFailures, ADeviceThatDies) {
  const std::vector<float> expected = Reference(2, 6, 200, 12);
  for (uint64_t n : {1, 2, 5, 9, 14, 20, 27, 35, 44, 54, 65, 77, 90}) {
    if (Attached() && n > 65) break;  // all steps may be over by then
    Device device(2), spare(3);
    Engine engine(2);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.5);
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    uint64_t step = 0;
    for (; step < 2; ++step) {
      ASSERT_OK(DeviceStep(gpu, *device.memory, table, step, Batch(step, 0, 200, 12)));
      ASSERT_OK(HostStep(cpu, table, step, Batch(step, 1, 200, 12)));
    }
    device.sim->fail_after(n, ErrorKind::kFault, false);
    std::atomic<bool> over{false};
    // The other rank trains on, and a call of it returns the abort.
    std::thread other([&] {
      uint64_t at = 2;
      int32_t status = FRUGAL_OK;
      while (status == FRUGAL_OK && at < 6) {
        status = HostStep(cpu, table, at, Batch(at, 1, 200, 12));
        ++at;
      }
      EXPECT_EQ(status, FRUGAL_ERR_STEP_ABORTED) << n << ": " << LastMessage();
      over = true;
    });
    int32_t status = FRUGAL_OK;
    for (uint64_t s = 2; s < 100 && status == FRUGAL_OK; ++s)
      status =
          DeviceStep(gpu, *device.memory, table, s, Batch(std::min<uint64_t>(s, 5), 0, 200, 12));
    // A rank whose own call was not the one that failed learns it from the next.
    if (status == FRUGAL_ERR_STEP_ABORTED) status = frugal_step_begin(gpu, 0, 0);
    EXPECT_EQ(status, FRUGAL_ERR_DEVICE) << n << ": " << LastMessage();
    other.join();
    EXPECT_TRUE(over);
    EXPECT_OK(frugal_health(engine.handle));
    ASSERT_OK(frugal_trainer_close(gpu));
    const uint64_t committed = engine.Committed();
    ASSERT_LT(committed, 6u);
    EXPECT_TRUE(Same(engine.Rows(table, 200, 12), Reference(2, committed + 1, 200, 12))) << n;
    gpu = engine.Trainer(0, spare.name.c_str(), 0.5);
    ASSERT_NE(gpu, nullptr);
    for (step = committed + 1; step < 6; ++step) {
      ASSERT_OK(DeviceStep(gpu, *spare.memory, table, step, Batch(step, 0, 200, 12)));
      ASSERT_OK(HostStep(cpu, table, step, Batch(step, 1, 200, 12)));
    }
    EXPECT_TRUE(Same(engine.Rows(table, 200, 12), expected)) << n;
  }
}

// A GPU that has failed pins nothing any more: other ranks' tables grow, on the cpu and on another
// GPU.
TEST(GpuFailures, ADeadDevicePinsForNobody) {
  Device dead(2), alive(3);
  Engine engine(3);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
  frugal_table* hashed = engine.Table("h", FRUGAL_HASHED, 4'000'000, 64);
  frugal_trainer* first = engine.Trainer(0, dead.name.c_str());
  frugal_trainer* second = engine.Trainer(1, alive.name.c_str(), 0.5);
  frugal_trainer* cpu = engine.Trainer(2, "cpu");
  ASSERT_OK(frugal_step_begin(first, 0, kWait));
  dead.sim->fail_after(1, ErrorKind::kFault, false);
  Batch b(0, 0, 200, 12);
  std::vector<float> out(b.keys.size() * 12);
  frugal_op op = OpOf(table, b);
  op.rows_out = out.data();
  EXPECT_EQ(frugal_lookup(first, &op, 1), FRUGAL_ERR_DEVICE);
  ASSERT_OK(frugal_trainer_close(first));
  // One abort, which each of the others receives.
  for (frugal_trainer* t : {second, cpu}) {
    EXPECT_EQ(frugal_step_begin(t, 0, kWait), FRUGAL_ERR_STEP_ABORTED);
    ASSERT_OK(frugal_step_begin(t, 0, kWait));
  }
  for (frugal_trainer* t : {second, cpu}) {
    std::vector<uint64_t> keys(60'000);  // 15 MB: new slabs
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i + (t == cpu ? 1'000'000 : 0);
    std::vector<float> rows(keys.size() * 64);
    frugal_op more = FRUGAL_OP_INIT;
    more.table = hashed;
    more.keys = keys.data();
    more.count = keys.size();
    more.rows_out = rows.data();
    EXPECT_OK(frugal_lookup(t, &more, 1));
    EXPECT_OK(frugal_step_end(t, 0, 0));
  }
  EXPECT_NE(engine.Table("new", FRUGAL_DENSE, 100'000, 64), nullptr);
  ASSERT_OK(DeviceStep(second, *alive.memory, table, 1, b));
  EXPECT_EQ(alive.memory->Error(), "");
}

// --- Concurrent ranks ----------------------------------------------------------------------------

// A rank leaves with a declaration that the others' step still needs, and comes back on another
// device.
TEST(GpuRanks, LeavesAndJoinsOnAnotherDevice) {
  Device first(0), second(1);
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, first.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  Batch b(0, 0, 300, 16);
  frugal_op op = OpOf(table, b);
  ASSERT_OK(frugal_prefetch(gpu, 0, &op, 1, nullptr));
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  std::vector<float> out(b.keys.size() * 16);
  op.rows_out = static_cast<float*>(first.memory->Send(out.data(), out.size() * 4, 4));
  ASSERT_OK(frugal_lookup(gpu, &op, 1));
  ASSERT_OK(frugal_step_end(gpu, 0, 0));
  ASSERT_OK(frugal_trainer_close(gpu));
  gpu = engine.Trainer(0, second.name.c_str());
  ASSERT_NE(gpu, nullptr);
  ASSERT_OK(DeviceStep(gpu, *second.memory, table, 0, b));
  ASSERT_OK(HostStep(cpu, table, 0, Batch(0, 1, 300, 16)));
  ASSERT_OK(frugal_step_begin(gpu, 1, kWait));
  EXPECT_EQ(engine.Committed(), 0u);
}

// What a rank has pushed before the first GPU came is memory that no device sees.
TEST(GpuRanks, ACachedOneJoinsInMidStep) {
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* cpu = engine.Trainer(1, "cpu", 0.5);
  frugal_trainer* gpu = nullptr;
  for (uint64_t s = 0; s < 4; ++s) {
    ASSERT_OK(HostStep(cpu, table, s, Batch(s, 1, 300, 16)));
    if (!gpu) gpu = engine.Trainer(0, device.name.c_str(), 1.0);
    ASSERT_NE(gpu, nullptr);
    Batch mine(s, 0, 300, 16);
    frugal_op op = OpOf(table, mine);
    ASSERT_OK(frugal_prefetch(gpu, s, &op, 1, nullptr));
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, mine));
  }
  EXPECT_TRUE(Same(engine.Rows(table, 300, 16), Reference(2, 4, 300, 16)));
}

// A table whose rows are being initialized when the first GPU joins is pinned, too.
TEST(GpuRanks, ATableIsCreatedWhileTheFirstJoins) {
  Device device;
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = nullptr;
  std::thread creator([&] { table = engine.Table("t", FRUGAL_DENSE, 1'000'000, 64); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // so that it is likely to be
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  creator.join();
  ASSERT_NE(table, nullptr);
  ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 64)));
  ASSERT_OK(frugal_step_begin(gpu, 1, kWait));
}

// What the push that failed has found on the device is not the step's.
TEST(Gpu, ANanInAPushThatFails) {
  Device device;
  Engine engine(1);
  frugal_table* first = engine.Table("a", FRUGAL_DENSE, 300, 16, FRUGAL_ADAGRAD, FRUGAL_NAN_REJECT);
  frugal_table* second =
      engine.Table("b", FRUGAL_DENSE, 300, 16, FRUGAL_ADAGRAD, FRUGAL_NAN_REJECT);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  Batch bad(0, 0, 300, 16), good(0, 0, 300, 16);
  bad.grads[333] = std::nanf("");
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  frugal_op ops[] = {OpOf(first, bad), OpOf(second, bad)};
  ops[0].grads =
      static_cast<float*>(device.memory->Send(bad.grads.data(), bad.grads.size() * 4, 4));
  ops[1].grads = bad.grads.data();
  EXPECT_EQ(frugal_push_grad(gpu, ops, 2), FRUGAL_ERR_NAN);
  ops[0].grads =
      static_cast<float*>(device.memory->Send(good.grads.data(), good.grads.size() * 4, 4));
  ops[1].grads = good.grads.data();
  ASSERT_OK(frugal_push_grad(gpu, ops, 2));
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
  EXPECT_OK(frugal_step_begin(gpu, 1, kWait));
  EXPECT_EQ(engine.Committed(), 0u);
}

// The stream waits for something that this thread does after step_end.
std::atomic<bool> g_open{false};
const frugal::device::sim::KernelEntry kHeld = {"held", 8, [](const void*) {
                                                  while (!g_open) std::this_thread::yield();
                                                }};

TEST(Gpu, AStepEndThatWaitsTooLong) {
  Device device;
  device.sim->set_test_kernels(&kHeld, 1);
  Engine engine(1, [](frugal_config* c) { c->timeout_ms = 50; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16, FRUGAL_ADAGRAD, FRUGAL_NAN_REJECT);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  // All memory is there before: new memory waits for kernels.
  int32_t status = DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16));
  while (status == FRUGAL_ERR_TIMEOUT) status = frugal_step_end(gpu, 0, 0);
  ASSERT_OK(status);
  device.memory->Collect();
  g_open = false;
  uint64_t argument = 0;
  ASSERT_TRUE(device.runtime->launch(Sim::kTestKernels, {1, 32, 0}, &argument, 8, {}).ok());
  EXPECT_EQ(DeviceStep(gpu, *device.memory, table, 1, Batch(0, 0, 300, 16)), FRUGAL_ERR_TIMEOUT);
  EXPECT_EQ(frugal_step_end(gpu, 1, 0), FRUGAL_ERR_TIMEOUT);
  g_open = true;
  do status = frugal_step_end(gpu, 1, 0);
  while (status == FRUGAL_ERR_TIMEOUT);
  ASSERT_OK(status);
  do status = frugal_step_begin(gpu, 2, kWait);
  while (status == FRUGAL_ERR_TIMEOUT);
  ASSERT_OK(status);
  EXPECT_EQ(engine.Committed(), 1u);
}

// step_begin does not wait for the caller's own work that follows the step in its stream and does
// not end.
TEST(Gpu, AStepBeginWaitsForTheStepAlone) {
  for (const double cache : {0.0, 0.5}) {
    Device device;
    device.sim->set_test_kernels(&kHeld, 1);
    Engine engine(1, [](frugal_config* c) {
      c->flush_mode = FRUGAL_FLUSH_DEFERRED;
      c->flush_threads = 0;
    });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), cache);
    const Batch b(0, 0, 300, 16);
    const frugal_op op = OpOf(table, b);
    // All memory is there before: new memory waits for kernels.
    constexpr uint64_t kSteps = 20;
    ASSERT_OK(frugal_prefetch(gpu, 0, &op, 1, nullptr));
    for (uint64_t s = 0; s < kSteps; ++s) {
      ASSERT_OK(frugal_prefetch(gpu, s + 1, &op, 1, nullptr));
      // The last one is there to be waited for: nothing of it runs before that.
      if (s + 1 == kSteps) device.sim->set_delays({0, 0, 100, 0, 60'000'000});
      ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, b));
      if (s + 1 < kSteps) device.memory->Collect();
    }
    g_open = false;
    uint64_t argument = 0;
    ASSERT_TRUE(device.runtime->launch(Sim::kTestKernels, {1, 32, 0}, &argument, 8, {}).ok());
    const int32_t status = frugal_step_begin(gpu, kSteps, kWait);
    EXPECT_OK(status);
    EXPECT_EQ(engine.Committed(), kSteps - 1);
    g_open = true;
    device.sim->set_delays({});
    if (status == FRUGAL_OK) {
      EXPECT_OK(frugal_step_end(gpu, kSteps, 0));
    }
  }
}

// A flush thread takes in completed device work although no call comes.
TEST(Gpu, StepsLandByThemselves) {
  Device device;
  Engine engine(1, [](frugal_config* c) { c->flush_threads = 1; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  Batch b(0, 0, 300, 16);
  ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, b, nullptr, false));
  device.memory->Collect();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the flush thread sleeps by now
  device.sim->set_delays({});
  ASSERT_OK(frugal_step_end(gpu, 0, 0));
  frugal_stats stats{};
  stats.struct_size = sizeof stats;
  for (int i = 0; i < 2000 && stats.steps_committed == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_OK(frugal_get_stats(engine.handle, &stats));
  }
  EXPECT_EQ(stats.steps_committed, 1u);
}

// A thread that polls for completed device work while the engine is closed holds that work: tables
// wait for it, too.
TEST(Gpu, ClosedBesideALook) {
  for (int i = 0; i < 10; ++i) {
    Device device;
    device.sim->set_delays({0, 100, 0, 20'000, 0});
    Engine engine(1, [](frugal_config* c) {
      c->timeout_ms = 0;  // so that device work in flight is not waited for at the beginning
      c->flush_threads = 0;
    });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
    std::atomic<bool> asks{false};
    std::thread other([&asks, handle = engine.handle] {
      uint64_t step;
      while (frugal_committed_step(handle, &step) == FRUGAL_OK) asks = true;
    });
    while (!asks) std::this_thread::yield();
    ASSERT_OK(frugal_close(engine.handle));
    engine.handle = nullptr;
    other.join();
    device.memory->Collect();
    EXPECT_EQ(device.memory->Error(), "") << i;
  }
}

// --- Devices that die ----------------------------------------------------------------------------

// The program resets the device: no call's error is one that stays, and all the same everything
// ends. Closing the rank undoes what is not whole, and the other one goes on.
TEST(GpuFailures, ADeviceThatIsReset) {
  constexpr uint64_t kSteps = 8;
  // The tables if the first rank has been there for so many steps.
  auto with_both_for = [](uint64_t steps) {
    Engine engine(2, {}, true);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
    frugal_trainer* first = engine.Trainer(0, "cpu");
    frugal_trainer* second = engine.Trainer(1, "cpu");
    for (uint64_t s = 0; s < kSteps; ++s) {
      if (s == steps) {
        EXPECT_OK(frugal_trainer_close(first));
      }
      if (s < steps) {
        EXPECT_OK(HostStep(first, table, s, Batch(s, 0, 200, 12)));
      }
      EXPECT_OK(HostStep(second, table, s, Batch(s, 1, 200, 12)));
    }
    return engine.Rows(table, 200, 12);
  };
  std::vector<std::vector<float>> right;
  for (uint64_t steps = 1; steps <= kSteps; ++steps) right.push_back(with_both_for(steps));
  for (uint64_t n : {1, 2, 3, 5, 9, 14, 20, 27, 35, 44, 54, 65}) {
    Device device(2);
    Engine engine(2);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 200, 12);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 0.5);
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    for (uint64_t s = 0; s < 2; ++s) {
      ASSERT_OK(DeviceStep(gpu, *device.memory, table, s, Batch(s, 0, 200, 12)));
      ASSERT_OK(HostStep(cpu, table, s, Batch(s, 1, 200, 12)));
    }
    device.sim->reset_after(n);
    std::thread other([&] {
      for (uint64_t s = 2; s < kSteps;) {
        const int32_t status = HostStep(cpu, table, s, Batch(s, 1, 200, 12));
        if (status == FRUGAL_ERR_STEP_ABORTED) {
          s = engine.Committed() + 1;
          continue;
        }
        ASSERT_OK(status) << n;
        ++s;
      }
    });
    int32_t status = FRUGAL_OK;
    for (uint64_t s = 2; s < kSteps && status == FRUGAL_OK; ++s)
      status = DeviceStep(gpu, *device.memory, table, s, Batch(s, 0, 200, 12));
    EXPECT_OK(frugal_trainer_close(gpu));
    other.join();
    EXPECT_EQ(engine.Committed(), kSteps - 1) << n;
    EXPECT_OK(frugal_health(engine.handle));
    const std::vector<float> rows = engine.Rows(table, 200, 12);
    EXPECT_TRUE(std::any_of(right.begin(), right.end(), [&](const auto& r) {
      return Same(rows, r);
    })) << n;
  }
}

// A rank at the gate finds out that another one's device has been reset. Its call returns the
// abort, and it goes on. The same is true where one request for memory fails meanwhile.
TEST(GpuReset, TheGateOfAnotherRank) {
  for (int64_t request = 0; request < 6; ++request) {
    SCOPED_TRACE(testing::Message() << "request " << request);
    Device device;
    Engine engine(2, [](frugal_config* c) { c->flush_threads = 0; });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    ASSERT_OK(HostStep(cpu, table, 0, Batch(0, 1, 300, 16)));
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
    device.sim->reset_after(1);
    frugal::heap_test_fail_after(request);
    int32_t told;
    while ((told = frugal_step_begin(cpu, 1, kWait)) == FRUGAL_ERR_OUT_OF_MEMORY) {
    }
    frugal::heap_test_fail_after(0);
    EXPECT_EQ(told, FRUGAL_ERR_STEP_ABORTED) << LastMessage();
    EXPECT_EQ(frugal_step_begin(gpu, 0, kWait), FRUGAL_ERR_DEVICE);
    EXPECT_NE(LastMessage().find("error 400"), std::string::npos) << LastMessage();
    ASSERT_OK(frugal_trainer_close(gpu));
    ASSERT_OK(HostStepAgain(cpu, table, 0, Batch(0, 1, 300, 16)));
    EXPECT_EQ(engine.Committed(), 0u);
    EXPECT_OK(frugal_health(engine.handle));
  }
}

// The engine is closed, with time to wait for device work in flight and without.
TEST(GpuReset, TheEngineIsClosed) {
  for (const int64_t timeout_ms : {0, 1000}) {
    Device device;
    Engine engine(2, [&](frugal_config* c) {
      c->timeout_ms = timeout_ms;
      c->flush_threads = 0;
    });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    engine.Trainer(1, "cpu");
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
    device.sim->reset_after(1);
    ASSERT_OK(frugal_close(engine.handle));
    engine.handle = nullptr;
  }
}

// A rank whose device has been reset is closed. What it has ended is to be undone, but a commit
// that comes first lacks memory until the engine is being closed: the rank stays, and closing
// commits the one step and undoes the other. It would wait for the other forever.
TEST(GpuReset, TheEngineIsClosedBesideAnOwedCommit) {
  int stalled = 0;
  bool fired = true;
  for (int64_t request = 1; fired && stalled < 3; ++request) {
    SCOPED_TRACE(testing::Message() << "request " << request);
    std::atomic<bool> lost{false};
    Device device;
    Engine engine(
        2,
        [&](frugal_config* c) {
          c->timeout_ms = FRUGAL_TIMEOUT_INFINITE;
          c->flush_threads = 0;
          c->flush_mode = FRUGAL_FLUSH_DEFERRED;
          c->staleness = 1;
          c->log_context = &lost;
          c->log = [](void* to, int32_t level, const char*) {
            if (level == 0) *static_cast<std::atomic<bool>*>(to) = true;
          };
        },
        true);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    const Batch b(0, 1, 300, 16);
    frugal_op op = OpOf(table, b);
    op.grads = b.grads.data();
    ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
    ASSERT_OK(frugal_push_grad(cpu, &op, 1));
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
    device.memory->Collect();
    EXPECT_EQ(engine.Committed(), FRUGAL_NO_STEP);  // takes in what has completed
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 1, Batch(1, 0, 300, 16)));
    frugal::heap_test_fail_after(request);
    const int32_t ended = frugal_step_end(cpu, 0, 0);
    fired = frugal::heap_test_fail_after(-1) <= 0;
    const bool owes = ended == FRUGAL_OK && engine.Committed() == FRUGAL_NO_STEP;
    frugal::heap_test_fail_after(0);
    if (!owes) continue;
    ++stalled;
    device.sim->reset_after(1);
    int32_t closed = FRUGAL_OK;
    std::thread closes([&] {
      EXPECT_OK(frugal_health(engine.handle));  // the first call of a thread needs memory
      frugal::heap_test_fail_after(-1);
      closed = frugal_trainer_close(gpu);
      frugal::heap_test_fail_after(0);
    });
    // A wrong call, until the trainer is being closed.
    while (frugal_step_end(gpu, 1, ~0u) == FRUGAL_ERR_INVALID_ARGUMENT) std::this_thread::yield();
    EXPECT_OK(frugal_close(engine.handle));
    engine.handle = nullptr;
    closes.join();
    // Closing does not wait for memory for long.
    if (!lost) {
      EXPECT_EQ(closed, FRUGAL_ERR_OUT_OF_MEMORY);
    }
  }
  EXPECT_GT(stalled, 0);
}

// Another rank aborts a step with device work in flight.
TEST(GpuReset, AnAbort) {
  Device device;
  Engine engine(2, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
  ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
  device.sim->reset_after(1);
  ASSERT_OK(frugal_step_abort(cpu));
  EXPECT_EQ(frugal_step_begin(gpu, 0, kWait), FRUGAL_ERR_DEVICE);
  ASSERT_OK(frugal_trainer_close(gpu));
  ASSERT_OK(HostStepAgain(cpu, table, 0, Batch(0, 1, 300, 16)));
  EXPECT_EQ(engine.Committed(), 0u);
}

// Closed before any call has found out: what it has ended is undone, and the others go on.
TEST(GpuFailures, ClosedWithAStepInFlight) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t threads = i % 2;
    const bool reset = i / 2;
    Device device(5 + threads);
    Engine engine(2, [&](frugal_config* c) { c->flush_threads = threads; });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* cpu = engine.Trainer(1, "cpu");
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16), nullptr, false));
    if (!reset) device.sim->fail_after(4, ErrorKind::kFault, false);
    const int32_t ended = frugal_step_end(gpu, 0, 0);
    // An attached rank waits for its device here, and finds out if that takes it as many calls.
    if (!Attached() || reset || ended != FRUGAL_ERR_DEVICE) {
      ASSERT_EQ(ended, FRUGAL_OK) << LastMessage();
    }
    if (reset) device.sim->reset_after(1);
    ASSERT_OK(frugal_trainer_close(gpu));
    for (uint64_t s = 0; s < 3; ++s) {
      ASSERT_OK(HostStepAgain(cpu, table, s, Batch(s, 1, 300, 16)));
    }
    EXPECT_EQ(engine.Committed(), 2u);
    EXPECT_OK(frugal_health(engine.handle));
  }
}

// Keys on their way when the device dies: the other rank receives the abort, and goes on.
void LosesKeys(bool reset) {
  Device device;
  Engine engine(2, [](frugal_config* c) { c->flush_threads = 0; });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  Batch b(0, 0, 300, 16);
  frugal_op op = OpOf(table, b);
  op.keys = static_cast<uint64_t*>(device.memory->Send(b.keys.data(), b.keys.size() * 8, 8));
  ASSERT_OK(frugal_prefetch(gpu, 0, &op, 1, nullptr));
  if (reset)
    device.sim->reset_after(1);
  else
    device.sim->fail_after(1, ErrorKind::kFault, false);
  int32_t status = FRUGAL_OK;
  for (uint64_t s = 0; status == FRUGAL_OK; ++s)
    status = HostStep(cpu, table, s, Batch(s, 1, 300, 16));
  EXPECT_EQ(status, FRUGAL_ERR_STEP_ABORTED) << LastMessage();
  EXPECT_EQ(frugal_step_begin(gpu, 0, kWait), FRUGAL_ERR_DEVICE);
  ASSERT_OK(frugal_trainer_close(gpu));
  ASSERT_OK(HostStepAgain(cpu, table, 0, Batch(0, 1, 300, 16)));
  EXPECT_EQ(engine.Committed(), 0u);
}

TEST(GpuFailures, KeysThatNeverArrive) {
  LosesKeys(false);
  LosesKeys(true);
}

// --- Attached: with a controller only ------------------------------------------------------------

class AttachedGpu : public testing::Test {
  void SetUp() override {
    if (!Attached()) GTEST_SKIP() << "wants FRUGAL_TEST_CONTROLLER";
  }
};

TEST_F(AttachedGpu, NoSuchDevice) {
  Engine engine(1);
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* trainer = nullptr;
  config.device = "sim:99";
  EXPECT_EQ(frugal_trainer_create(engine.handle, &config, &trainer), FRUGAL_ERR_DEVICE)
      << LastMessage();
  config.device = "sim:0";
  // The rank is still free.
  EXPECT_OK(frugal_trainer_create(engine.handle, &config, &trainer));
}

// Rows and staging memory that cannot be pinned: the call that needs them is refused, and can be
// made again.
TEST_F(AttachedGpu, MemoryThatCannotBePinned) {
  Device device;
  Engine engine(1);
  constexpr uint32_t kDim = 64;  // 15 MB: new slabs, and pieces of staging memory
  engine.Table("dense", FRUGAL_DENSE, 100'000, kDim);
  frugal_table* hashed = engine.Table("hashed", FRUGAL_HASHED, 4'000'000, kDim);
  const auto before = device.sim->live();
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal::device::sim::set_pinnable_bytes(uint64_t{16} << 20);
  EXPECT_EQ(frugal_step_begin(gpu, 0, kWait), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("pinning host memory"), std::string::npos) << LastMessage();
  frugal::device::sim::set_pinnable_bytes(UINT64_MAX);
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  frugal::device::sim::set_pinnable_bytes(device.sim->live().pinned_bytes + (uint64_t{3} << 20));
  constexpr size_t kKeys = 60'000;
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i * 7;
  frugal_op op = FRUGAL_OP_INIT;
  op.table = hashed;
  op.keys = keys.data();
  op.count = kKeys;
  DeviceBytes out(device, kKeys * kDim * sizeof(float));
  op.rows_out = out.floats();
  op.grads = out.floats();
  EXPECT_EQ(frugal_lookup(gpu, &op, 1), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(frugal_push_grad(gpu, &op, 1), FRUGAL_ERR_OUT_OF_MEMORY);
  frugal::device::sim::set_pinnable_bytes(UINT64_MAX);
  EXPECT_OK(frugal_lookup(gpu, &op, 1));
  EXPECT_OK(frugal_push_grad(gpu, &op, 1));
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
  // After the last rank on a device nothing of the tables is pinned.
  const auto with = device.sim->live();
  ASSERT_OK(frugal_trainer_close(gpu));
  EXPECT_LT(device.sim->live().pinned_bytes, with.pinned_bytes - (uint64_t{24} << 20));
  ASSERT_OK(frugal_close(engine.handle));
  engine.handle = nullptr;
  EXPECT_EQ(device.sim->live().pinned, before.pinned);
}

// Steps whose keys are declared: lookups, pushes, and what is cached is right.
void DeclaredSteps(frugal_trainer* trainer, Device& device, frugal_table* table, uint64_t rows,
                   uint64_t from, uint64_t end) {
  for (uint64_t s = from; s < end; ++s) {
    for (uint64_t ahead = s; ahead < s + 2; ++ahead) {
      const Batch batch(ahead, 0, rows, 16);
      const frugal_op op = OpOf(table, batch);
      if (ahead > s || s == from) {
        ASSERT_OK(frugal_prefetch(trainer, ahead, &op, 1, nullptr));
      }
    }
    ASSERT_OK(DeviceStep(trainer, *device.memory, table, s, Batch(s, 0, rows, 16)));
  }
}

// No device memory for cached rows: the trainer works without a cache of that table.
TEST_F(AttachedGpu, NoMemoryForLines) {
  Device device;
  Engine engine(1);
  constexpr uint64_t kRows = 200'000;  // 13 MB
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, kRows, 16);
  const uint64_t before = device.sim->live().bytes;
  device.sim->set_memory_bytes(before + (uint64_t{8} << 20));
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 1.0);
  ASSERT_NO_FATAL_FAILURE(DeclaredSteps(gpu, device, table, kRows, 0, 6));
  EXPECT_EQ(engine.Stats().cache_hits, 0u);
  EXPECT_TRUE(Same(engine.Rows(table, kRows, 16), Reference(1, 6, kRows, 16)));
}

// A cache refresh that cannot be carried out: the step has not begun, and begins the next time,
// with an empty cache.
TEST_F(AttachedGpu, ABoundaryThatFails) {
  Device device;
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str(), 1.0);
  ASSERT_NO_FATAL_FAILURE(DeclaredSteps(gpu, device, table, 300, 0, 4));
  const uint64_t hits = engine.Stats().cache_hits;
  EXPECT_GT(hits, 0u);
  const Batch batch(4, 0, 300, 16);
  for (const uint64_t launch : {0, 1, 2, 5}) {
    device.sim->fail_after(1 + launch, ErrorKind::kOutOfMemory, false);
    const int32_t status = frugal_step_begin(gpu, 4, kWait);
    device.sim->fail_after(0, ErrorKind::kOutOfMemory, false);
    if (status == FRUGAL_OK) {
      ASSERT_OK(frugal_step_abort(gpu));
      continue;
    }
    EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
    EXPECT_EQ(frugal_step_end(gpu, 4, 0), FRUGAL_ERR_NOT_IN_STEP);
  }
  ASSERT_OK(DeviceStep(gpu, *device.memory, table, 4, batch));
  ASSERT_NO_FATAL_FAILURE(DeclaredSteps(gpu, device, table, 300, 5, 9));
  EXPECT_GT(engine.Stats().cache_hits, hits);
  EXPECT_TRUE(Same(engine.Rows(table, 300, 16), Reference(1, 9, 300, 16)));
}

// The controller is killed while the device has work: calls report that, and closing frees all.
TEST_F(AttachedGpu, TheControllerEnds) {
  Device device;
  const auto before = device.sim->live();
  {
    Engine engine(1);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
    frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 0, Batch(0, 0, 300, 16)));
    ASSERT_OK(DeviceStep(gpu, *device.memory, table, 1, Batch(1, 0, 300, 16), nullptr, false));
    engine.controller->end(SIGKILL);
    EXPECT_EQ(frugal_step_end(gpu, 1, 0), FRUGAL_ERR_PEER_LOST);
    EXPECT_EQ(frugal_step_begin(gpu, 1, kWait), FRUGAL_ERR_PEER_LOST);
    // What is left is that of the last committed step.
    EXPECT_TRUE(Same(engine.Rows(table, 300, 16), Reference(1, 1, 300, 16)));
    EXPECT_OK(frugal_trainer_close(gpu));
  }
  device.memory->Collect();
  const auto after = device.sim->live();
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_LE(after.pinned, before.pinned + 2);
  EXPECT_EQ(device.memory->Error(), "");
}

// Rows that a step has created are other rows' when it has been undone: what was looked up before
// is right.
TEST_F(AttachedGpu, AnAbortBesideALookup) {
  constexpr size_t kKeys = 50;
  Device device;
  Engine engine(2);
  frugal_table* table = engine.Table("t", FRUGAL_HASHED, kKeys, 16);
  frugal_trainer* gpu = engine.Trainer(0, device.name.c_str());
  frugal_trainer* cpu = engine.Trainer(1, "cpu");
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> expected(kKeys * 16), got(kKeys * 16, -7), others(kKeys * 16);
  auto op_of = [&](uint64_t first, float* rows) {
    for (size_t i = 0; i < kKeys; ++i) keys[i] = first + i;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = kKeys;
    op.rows_out = rows;
    return op;
  };
  frugal_op op = op_of(1000, expected.data());
  ASSERT_OK(frugal_lookup(gpu, &op, 1));
  void* there = device.memory->Send(got.data(), got.size() * 4, 4);
  op.rows_out = static_cast<float*>(there);
  device.sim->set_delays({0, 0, 100, 0, 60'000'000});  // until a thread waits
  ASSERT_OK(frugal_lookup(gpu, &op, 1));
  ASSERT_OK(frugal_step_abort(cpu));
  ASSERT_OK(frugal_step_begin(cpu, 0, kWait));
  op = op_of(2000, others.data());
  ASSERT_OK(frugal_lookup(cpu, &op, 1));  // the table is full of these now
  device.memory->Fetch(got.data(), there, got.size() * 4);
  device.memory->Collect();
  device.sim->set_delays({});
  EXPECT_TRUE(Same(got, expected));
  EXPECT_EQ(frugal_step_end(gpu, 0, 0), FRUGAL_ERR_STEP_ABORTED);
  ASSERT_OK(frugal_step_begin(gpu, 0, kWait));
  EXPECT_OK(frugal_step_end(gpu, 0, 0));
  EXPECT_OK(frugal_step_end(cpu, 0, 0));
}

// A rank that is taken over in mid-step: the step is undone, and no rank sees what its device still
// does.
TEST_F(AttachedGpu, TakenOver) {
  Device device, spare(1);
  Engine engine(1);
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, 300, 16);
  frugal_trainer* first = engine.Trainer(0, device.name.c_str());
  ASSERT_OK(DeviceStep(first, *device.memory, table, 0, Batch(0, 0, 300, 16)));
  device.sim->set_delays({0, 100, 0, 20'000, 0});
  ASSERT_OK(DeviceStep(first, *device.memory, table, 1, Batch(7, 0, 300, 16), nullptr, false));
  frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
  config.device = spare.name.c_str();
  config.flags = FRUGAL_TRAINER_REPLACE;
  // Attached as another process would be.
  frugal_config other = FRUGAL_CONFIG_INIT;
  const std::string address = engine.folder.address();
  other.world_size = 1;
  other.service = address.c_str();
  frugal_engine* attached = nullptr;
  ASSERT_OK(frugal_open(&other, &attached));
  frugal_table* same = nullptr;
  ASSERT_OK(frugal_table_find(attached, "t", &same));
  frugal_trainer* second = nullptr;
  ASSERT_OK(frugal_trainer_create(attached, &config, &second));
  ASSERT_OK(DeviceStep(second, *spare.memory, same, 1, Batch(1, 0, 300, 16)));
  EXPECT_EQ(frugal_step_end(first, 1, 0), FRUGAL_ERR_PEER_LOST);
  EXPECT_OK(frugal_trainer_close(first));
  device.sim->set_delays({});
  ASSERT_OK(DeviceStep(second, *spare.memory, same, 2, Batch(2, 0, 300, 16)));
  ASSERT_OK(frugal_close(attached));
  EXPECT_TRUE(Same(engine.Rows(table, 300, 16), Reference(1, 3, 300, 16)));
}

}  // namespace
