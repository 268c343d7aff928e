// Each request for memory fails once: the call returns a status, the repeated call gives the right
// bits, nothing hangs.
//
// The engine stays healthy. Closing an engine commits its stalled commit. The program is linked
// with the library's objects. Their hooks make memory calls fail under a sanitizer as well.
// tests/failing sweeps whole jobs and cannot run there.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/heap.h"
#include "base/os.h"
#include "frugal.h"
#include "support/engine.h"
#include "support/never.h"
#include "support/ok.h"
#include "support/slice.h"

namespace {

constexpr int64_t kWait = FRUGAL_TIMEOUT_DEFAULT;

struct Engine : frugal_test::Engine {
  explicit Engine(const Change& change)
      : frugal_test::Engine([&](frugal_config* config) {
          config->flush_mode = FRUGAL_FLUSH_AT_ONCE;
          // What the hook throws stays in the library.
          config->log = [](void*, int32_t, const char*) {
            throw std::runtime_error("from the hook");
          };
          change(config);
        }) {}
  frugal_table* Table(const char* name, int32_t key_space, uint64_t rows, uint32_t dim,
                      int32_t optimizer = FRUGAL_ADAGRAD) {
    return frugal_test::Engine::Table(name, key_space, rows, dim, [&](frugal_table_config* config) {
      config->init = FRUGAL_INIT_UNIFORM;
      config->init_b = 1;
      config->optimizer = FRUGAL_OPTIMIZER_INIT;
      config->optimizer.kind = optimizer;
    });
  }
};

// An engine that is served. The attached engine is in this process, too: the memory that fails may
// be either side's.
struct Served {
  explicit Served(const std::function<void(frugal_config*)>& change) {
    char name[] = "/tmp/frugal-test-XXXXXX";
    EXPECT_NE(mkdtemp(name), nullptr);
    folder = name;
    address = folder + "/service";
    engine = std::make_unique<Engine>([&](frugal_config* c) {
      change(c);
      c->backing = FRUGAL_BACKING_SHM;
    });
    EXPECT_OK(frugal_serve(engine->handle, address.c_str()));
  }
  ~Served() {
    engine.reset();
    rmdir(folder.c_str());
  }
  std::string folder, address;
  std::unique_ptr<Engine> engine;
};

// Whether this build has trainer processes.
bool CanServe() {
  Engine engine([](frugal_config* c) { c->backing = FRUGAL_BACKING_SHM; });
  return frugal_serve(engine.handle, "/no/such/folder/service") != FRUGAL_ERR_UNSUPPORTED;
}

struct Op {
  Op(frugal_table* table, std::vector<uint64_t> keys_in, size_t dim, float salt)
      : keys(std::move(keys_in)), rows(keys.size() * dim), grads(keys.size() * dim) {
    float* const at = grads.data();  // without optimization each access to a vector is a call
    for (size_t i = 0, n = grads.size(); i < n; ++i)
      at[i] = salt + static_cast<float>(i % 977) * 1e-3f;
    op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys.data();
    op.count = keys.size();
    op.rows_out = rows.data();
    op.grads = grads.data();
  }
  std::vector<uint64_t> keys;
  std::vector<float> rows, grads;
  frugal_op op;
};

std::vector<uint64_t> Range(uint64_t from, uint64_t n) {
  std::vector<uint64_t> keys(n);
  for (uint64_t i = 0; i < n; ++i) keys[i] = from + i;
  return keys;
}

std::vector<float> Rows(frugal_table* table, uint64_t n, uint32_t dim) {
  std::vector<float> rows(n * 2 * dim, -77.5f);
  const std::vector<uint64_t> keys = Range(0, n);
  EXPECT_OK(frugal_get(table, keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
  return rows;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

using Arm = int64_t (*)(int64_t);

// Makes the call with its 1st, 2nd, ... request for memory failing, until it succeeds. Returns how
// often it failed.
int Sweep(Arm arm, const std::function<int32_t()>& call) {
  for (int n = 1; n < 2000; ++n) {
    arm(n);
    const int32_t status = call();
    const std::string message = LastMessage();
    arm(0);
    if (status == FRUGAL_OK) return n - 1;
    EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << frugal_status_name(status) << message;
    if (status != FRUGAL_ERR_OUT_OF_MEMORY) return -1;
    EXPECT_GT(message.size(), 4u);
  }
  ADD_FAILURE() << "it never succeeded";
  return -1;
}

int Plain(const std::function<int32_t()>& call) {
  EXPECT_OK(call());
  return 1;
}

// Two ranks; rank 0 pushes once to one table and several times to another; rank 1 ends the step.
// `attached`: all calls are made through a controller.
std::vector<float> SeveralPushes(uint32_t threads, Arm arm, int* failures, bool attached = false) {
  const uint32_t dim = 32;
  const uint64_t n = 20'000;  // sums of more than 2 MiB, which are mapped
  const auto change = [&](frugal_config* c) {
    c->world_size = 2;
    c->flush_threads = threads;
  };
  std::unique_ptr<Served> controller;
  if (attached) controller = std::make_unique<Served>(change);
  Engine engine([&](frugal_config* c) {
    change(c);
    if (attached) c->service = controller->address.c_str();
  });
  frugal_table* tables[3];
  for (int t = 0; t < 3; ++t)
    tables[t] = engine.Table(std::to_string(t).c_str(), FRUGAL_DENSE, n, dim);
  frugal_trainer* trainers[2] = {engine.Trainer(0), engine.Trainer(1)};
  const auto sweep = [&](const std::function<int32_t()>& call) {
    const int failed = arm ? Sweep(arm, call) : Plain(call);
    // A thread of the controller may be the one that meets the failure, and do without.
    EXPECT_TRUE(attached || failed >= 1) << "no request for memory";
    *failures += failed;
  };
  if (attached && arm == frugal::heap_test_fail_after) {
    // The reply has the declared parts.
    Op declared(tables[2], Range(5, 100), dim, 0);
    EXPECT_OK(frugal_prefetch(trainers[0], 0, &declared.op, 1, nullptr));
    sweep([&] { return frugal_step_begin(trainers[0], 0, kWait); });
  } else {
    EXPECT_OK(frugal_step_begin(trainers[0], 0, kWait));
  }
  EXPECT_OK(frugal_step_begin(trainers[1], 0, kWait));
  // Some rows more often than a run of the fold holds.
  std::vector<uint64_t> hot = Range(0, n);
  for (size_t i = 0; i < 4000; ++i) hot[i] = i % 5;
  Op once(tables[0], hot, dim, 0.5f), first(tables[1], Range(0, n), dim, 0.25f),
      second(tables[1], hot, dim, -0.125f), last(tables[2], Range(5, 100), dim, 1.0f);
  sweep([&] { return frugal_push_grad(trainers[0], &first.op, 1); });
  frugal_op both[] = {once.op, second.op, last.op};
  sweep([&] { return frugal_push_grad(trainers[0], both, 3); });
  sweep([&] { return frugal_step_end(trainers[0], 0, 0); });
  EXPECT_OK(frugal_push_grad(trainers[1], &first.op, 1));
  EXPECT_OK(frugal_step_end(trainers[1], 0, 0));
  EXPECT_OK(frugal_step_begin(trainers[0], 1, kWait));
  EXPECT_OK(frugal_step_begin(trainers[1], 1, kWait));
  EXPECT_OK(frugal_step_end(trainers[0], 1, 0));
  EXPECT_OK(frugal_step_end(trainers[1], 1, 0));
  EXPECT_OK(frugal_health(engine.handle));
  std::vector<float> rows;
  for (frugal_table* t : tables) {
    const std::vector<float> more = Rows(t, n, dim);
    rows.insert(rows.end(), more.begin(), more.end());
  }
  return rows;
}

TEST(Memory, PushesAndStepEndCanBeRepeated) {
  int none = 0;
  const std::vector<float> expected = SeveralPushes(0, nullptr, &none);
  for (uint32_t threads : {0u, 1u})
    for (Arm arm : {frugal::os_test_fail_after, frugal::heap_test_fail_after}) {
      SCOPED_TRACE(std::to_string(threads) +
                   (arm == frugal::heap_test_fail_after ? " heap" : " os"));
      int failures = 0;
      EXPECT_TRUE(SameBits(SeveralPushes(threads, arm, &failures), expected));
      EXPECT_GE(failures, 6);
      if (HasFailure()) return;
    }
}

TEST(Memory, ThroughAController) {
  if (!CanServe()) GTEST_SKIP() << "a build without trainer processes";
  int failures = 0;
  const std::vector<float> expected = SeveralPushes(0, nullptr, &failures);
  for (Arm arm : {frugal::heap_test_fail_after, frugal::os_test_fail_after}) {
    SCOPED_TRACE(arm == frugal::heap_test_fail_after ? "heap" : "os");
    failures = 0;
    EXPECT_TRUE(SameBits(SeveralPushes(1, arm, &failures, true), expected));
    EXPECT_GE(failures, 3) << "no request for memory";
    if (HasFailure()) return;
  }
}

TEST(Memory, AnotherKindIsTakenWholeOrNotAtAll) {
  for (int32_t key_space : {FRUGAL_DENSE, FRUGAL_HASHED})
    for (Arm arm : {frugal::os_test_fail_after, frugal::heap_test_fail_after}) {
      const uint64_t n = 3000;
      const uint32_t dim = 32;
      std::vector<float> rows[2];
      for (bool later : {false, true}) {
        Engine engine([](frugal_config* c) { c->flush_threads = 0; });
        frugal_table* table =
            engine.Table("t", key_space, n, dim, later ? FRUGAL_ROWWISE_ADAGRAD : FRUGAL_ADAGRAD);
        frugal_trainer* trainer = engine.Trainer(0);
        Op op(table, Range(0, n), dim, 0.5f);
        EXPECT_OK(frugal_step_begin(trainer, 0, kWait));
        EXPECT_OK(frugal_lookup(trainer, &op.op, 1));
        EXPECT_OK(frugal_step_end(trainer, 0, 0));
        frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
        optimizer.kind = FRUGAL_ADAGRAD;
        const int failed =
            later ? Sweep(arm, [&] { return frugal_table_set_optimizer(table, 1, &optimizer); })
                  : 1;
        EXPECT_GE(failed, 1) << "no request for memory";
        EXPECT_OK(frugal_step_begin(trainer, 1, kWait));
        EXPECT_OK(frugal_push_grad(trainer, &op.op, 1));
        EXPECT_OK(frugal_step_end(trainer, 1, 0));
        rows[later] = Rows(table, n, dim);
      }
      EXPECT_TRUE(SameBits(rows[0], rows[1]));
    }
}

// Steps whose end meets a failure each, later and later, or `steps` undisturbed ones.
std::vector<float> EndSteps(int32_t mode, bool attached, bool failing, uint64_t* steps) {
  const uint32_t dim = 8;
  const uint64_t n = 3000;
  const auto change = [&](frugal_config* c) {
    c->flush_threads = 0;
    c->flush_mode = mode;
  };
  std::unique_ptr<Served> controller;
  if (attached) controller = std::make_unique<Served>(change);
  Engine engine([&](frugal_config* c) {
    change(c);
    if (attached) c->service = controller->address.c_str();
  });
  frugal_table* table = engine.Table("t", FRUGAL_DENSE, n, dim);
  frugal_trainer* trainer = engine.Trainer(0);
  Op op(table, Range(0, n), dim, 0.5f);
  int told = 0, stalled = 0, quiet = 0;
  uint64_t step = 0;
  for (; failing ? quiet < 3 && step < 300 : step < *steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    EXPECT_OK(frugal_step_begin(trainer, step, kWait));
    EXPECT_OK(frugal_push_grad(trainer, &op.op, 1));
    frugal::heap_test_fail_after(failing ? static_cast<int64_t>(step) + 1 : 0);
    const int32_t status = frugal_step_end(trainer, step, 0);
    const bool fired = frugal::heap_test_fail_after(0) <= 0;
    quiet = fired ? 0 : quiet + 1;
    if (status != FRUGAL_OK) {
      ++told;
      EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
      EXPECT_EQ(frugal_step_begin(trainer, step + 1, 0), FRUGAL_ERR_STEP_ORDER)
          << "it is still inside the step";
      EXPECT_OK(frugal_step_end(trainer, step, 0));
    } else {
      stalled += fired;
    }
    EXPECT_EQ(frugal_step_end(trainer, step, 0), FRUGAL_ERR_NOT_IN_STEP);
    uint64_t committed = 0;
    EXPECT_OK(frugal_committed_step(engine.handle, &committed));
    EXPECT_EQ(committed, step);
    if (testing::Test::HasFailure()) break;
  }
  if (failing) {
    std::printf("mode %d%s: %d ends fail, %d commits stall\n", mode, attached ? ", attached" : "",
                told, stalled);
    EXPECT_GT(told, 0);
    EXPECT_GT(stalled, 0);
    *steps = step;
  }
  return Rows(table, n, dim);
}

// Where the end of a step lacks memory, the rank is inside the step as before. Where its commit
// does, the end counts all the same, and the commit comes later. Both sides of a controller return
// the same.
TEST(Memory, AStepEndsOrIsTold) {
  for (const bool attached : {false, true})
    for (int32_t mode : {FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED}) {
      SCOPED_TRACE(testing::Message() << "mode " << mode << ", attached " << attached);
      if (attached && !CanServe()) continue;
      uint64_t steps = 0;
      const std::vector<float> rows = EndSteps(mode, attached, true, &steps);
      if (HasFailure()) return;
      EXPECT_TRUE(SameBits(rows, EndSteps(mode, attached, false, &steps)));
    }
}

// An undo does not undo a step that all ranks have ended, though its commit has lacked memory: it
// commits that step first. If even that lacks memory, a call can be made again. The thread that
// takes out a lost rank tries again by itself.
TEST(Memory, EndsBesideAnOwedCommit) {
  enum Way { kAbort, kClose, kCloseThere, kLose };  // the last two from another process
  const uint32_t dim = 8;
  const uint64_t n = 2000;
  const bool serves = CanServe();
  std::vector<float> expected;
  int committed_first[4] = {}, lacked[4] = {}, told_of[4] = {};
  bool fired = true;
  for (int64_t request = 0; request < 300 && fired; ++request)
    for (const Way way : {kAbort, kClose, kCloseThere, kLose})
      for (int64_t again = 0; again < 4; ++again) {
        const bool attached = way >= kCloseThere;
        // A controller takes its time: of each request one `again`. The other ways have all.
        if (attached && (!serves || again != request % (way == kCloseThere ? 2 : 4))) continue;
        SCOPED_TRACE(testing::Message()
                     << "request " << request << ", way " << way << ", again " << again);
        const auto change = [](frugal_config* c) {
          c->world_size = 2;
          c->flush_threads = 0;
          c->flush_mode = FRUGAL_FLUSH_DEFERRED;
          c->staleness = 1;  // a rank may be a step ahead
        };
        std::unique_ptr<Served> controller;
        if (attached) controller = std::make_unique<Served>(change);
        Engine engine([&](frugal_config* c) {
          change(c);
          if (controller) c->service = controller->address.c_str();
        });
        Engine& other = controller ? *controller->engine : engine;
        frugal_table *table = engine.Table("t", FRUGAL_DENSE, n, dim), *same = table;
        if (controller) {
          ASSERT_OK(frugal_table_find(other.handle, "t", &same));
        }
        frugal_trainer* trainers[2] = {engine.Trainer(0), other.Trainer(1)};
        Op op(table, Range(0, n), dim, 0.5f), op_of_other(same, Range(0, n), dim, 0.5f);
        for (frugal_trainer* t : trainers) {
          ASSERT_OK(frugal_step_begin(t, 0, kWait));
          ASSERT_OK(frugal_push_grad(t, t == trainers[0] ? &op.op : &op_of_other.op, 1));
        }
        ASSERT_OK(frugal_step_end(trainers[0], 0, 0));
        frugal::heap_test_fail_after(request);
        const int32_t ended = frugal_step_end(trainers[1], 0, 0);
        fired = frugal::heap_test_fail_after(0) <= 0;
        if (ended != FRUGAL_OK) continue;  // the rank is still inside
        ASSERT_OK(frugal_step_begin(trainers[0], 1, kWait));
        auto end = [&] {
          return way == kAbort  ? frugal_step_abort(trainers[0])
                 : way == kLose ? frugal_trainer_abandon(trainers[0])
                                : frugal_trainer_close(trainers[0]);
        };
        frugal::heap_test_fail_after(again);
        const int32_t told = end();
        const bool met = frugal::heap_test_fail_after(0) <= 0 && again > 0;
        EXPECT_OK(frugal_health(other.handle));
        if (told != FRUGAL_OK) {
          EXPECT_EQ(told, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
          EXPECT_TRUE(met);
          if (way == kCloseThere) {  // nothing has been done
            frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
            frugal_trainer* none = nullptr;
            EXPECT_EQ(frugal_trainer_create(other.handle, &config, &none), FRUGAL_ERR_EXISTS);
          }
          ++told_of[way];
          EXPECT_OK(end());
        }
        (met && request > 0 ? lacked : committed_first)[way] += request > 0;
        EXPECT_EQ(frugal_step_begin(trainers[1], 1, kWait),
                  way == kLose ? FRUGAL_ERR_PEER_LOST : FRUGAL_ERR_STEP_ABORTED);
        uint64_t committed = 0;
        EXPECT_OK(frugal_committed_step(other.handle, &committed));
        EXPECT_EQ(committed, 0u);
        if (way != kAbort) trainers[0] = engine.Trainer(0);
        const std::vector<float> rows = Rows(table, n, dim);
        if (expected.empty()) expected = rows;
        EXPECT_TRUE(SameBits(rows, expected));
        for (frugal_trainer* t : trainers) EXPECT_OK(frugal_step_begin(t, 1, kWait));
        for (frugal_trainer* t : trainers) EXPECT_OK(frugal_step_end(t, 1, 0));
        if (HasFailure()) return;
      }
  for (const Way way : {kAbort, kClose, kCloseThere, kLose}) {
    std::printf("way %d: %d commit first, %d lack memory once more, %d are notified\n", way,
                committed_first[way], lacked[way], told_of[way]);
    if (way >= kCloseThere && !serves) continue;
    EXPECT_GT(committed_first[way], 0);
    EXPECT_GT(lacked[way], 0);
    if (way != kLose) {
      EXPECT_GT(told_of[way], 0);
    }
  }
}

// --- A whole training, with one request for memory failing anywhere ---

struct Outcome {
  bool fired = false;  // the request was made
  int told = 0;        // calls that failed for it
  std::vector<float> rows;
};

// A call that returns OUT_OF_MEMORY is made again.
Outcome Training(int32_t mode, uint32_t threads, double cache_ratio, Arm arm, int64_t n) {
  const uint32_t dim = 4;
  const uint64_t keys = 600;
  Outcome out;
  Engine engine([&](frugal_config* c) {
    c->world_size = 2;
    c->flush_threads = threads;
    c->flush_mode = mode;
  });
  frugal_table* dense = engine.Table("dense", FRUGAL_DENSE, keys, dim);
  frugal_table* hashed = engine.Table("hashed", FRUGAL_HASHED, keys, dim);
  frugal_trainer* trainers[2];
  for (uint32_t r = 0; r < 2; ++r) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = r;
    config.cache_ratio = cache_ratio;
    EXPECT_OK(frugal_trainer_create(engine.handle, &config, &trainers[r]));
  }
  const auto repeat = [&](const char* what, const std::function<int32_t()>& call) {
    for (int attempt = 0; attempt < 4; ++attempt) {
      const int32_t status = call();
      if (status == FRUGAL_OK) return;
      ++out.told;
      EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << what << ": " << LastMessage();
    }
    ADD_FAILURE() << what << " never succeeded: " << LastMessage();
  };
  const auto key_list = [&](uint64_t s, uint32_t r) {
    std::vector<uint64_t> list(150);
    for (size_t i = 0; i < list.size(); ++i) list[i] = (s * 131 + r * 17 + i * (i + 3)) % keys;
    return list;
  };
  const auto declare = [&](uint64_t s) {
    for (uint32_t r = 0; r < 2; ++r) {
      Op a(dense, key_list(s, r), dim, 0), b(hashed, key_list(s + 1, r), dim, 0);
      frugal_op ops[] = {a.op, b.op};
      repeat("prefetch", [&] { return frugal_prefetch(trainers[r], s, ops, 2, nullptr); });
    }
  };
  const auto train = [&](uint64_t s) {
    declare(s + 2);
    for (uint32_t r = 0; r < 2; ++r)
      repeat("step_begin", [&] { return frugal_step_begin(trainers[r], s, kWait); });
    for (uint32_t r = 0; r < 2; ++r) {
      Op a(dense, key_list(s, r), dim, 0.5f), b(hashed, key_list(s + 1, r), dim, 0.25f);
      frugal_op ops[] = {a.op, b.op};
      repeat("lookup", [&] { return frugal_lookup(trainers[r], ops, 2); });
      repeat("push_grad", [&] { return frugal_push_grad(trainers[r], ops, 2); });
      if (s % 2) repeat("push_grad", [&] { return frugal_push_grad(trainers[r], ops, 1); });
    }
    for (uint32_t r = 0; r < 2; ++r)
      repeat("step_end", [&] { return frugal_step_end(trainers[r], s, 0); });
  };
  declare(0);
  declare(1);
  train(0);
  arm(n);
  train(1);
  train(2);
  repeat("flush", [&] { return frugal_flush(engine.handle, kWait); });
  out.fired = arm(0) <= 0;
  train(3);
  repeat("flush", [&] { return frugal_flush(engine.handle, kWait); });
  for (frugal_table* t : {dense, hashed}) {
    const std::vector<uint64_t> all = Range(0, keys);
    std::vector<float> rows(keys * 2 * dim, -77.5f);
    repeat("get", [&] {
      return frugal_get(t, all.data(), keys, FRUGAL_WITH_STATE, rows.data(), 0, nullptr);
    });
    out.rows.insert(out.rows.end(), rows.begin(), rows.end());
  }
  EXPECT_OK(frugal_health(engine.handle));
  return out;
}

void EveryPlace(int32_t mode, Arm arm, std::vector<uint32_t> flush_threads, double cache_ratio = 0,
                int apart = 1) {
  const frugal_test::Slice slice(static_cast<uint64_t>(apart));
  for (uint32_t threads : flush_threads) {
    const std::vector<float> expected = Training(mode, threads, cache_ratio, arm, 0).rows;
    int fired = 0, told = 0, quiet = 0;
    // Up to where nothing has failed for a while: the training makes no more requests.
    for (int64_t n = 1 + static_cast<int64_t>(slice.first); n < 4000 && quiet < 5;
         n += static_cast<int64_t>(slice.step)) {
      SCOPED_TRACE("mode " + std::to_string(mode) + ", threads " + std::to_string(threads) +
                   ", request " + std::to_string(n));
      const Outcome out = Training(mode, threads, cache_ratio, arm, n);
      fired += out.fired;
      told += out.told;
      quiet = out.fired ? 0 : quiet + 1;
      EXPECT_TRUE(SameBits(out.rows, expected));
      if (testing::Test::HasFailure()) return;
    }
    std::printf("mode %d, threads %u: %d requests failed, %d reported by calls\n", mode, threads,
                fired, told);
    EXPECT_GT(static_cast<uint64_t>(fired) * slice.sliced, 100u);
  }
}

TEST(Memory, ATrainingDeferred) {
  EveryPlace(FRUGAL_FLUSH_DEFERRED, frugal::heap_test_fail_after, {0, 1});
}

TEST(Memory, ATrainingAtOnce) {
  EveryPlace(FRUGAL_FLUSH_AT_ONCE, frugal::heap_test_fail_after, {0, 1});
}

TEST(Memory, ATrainingWithCaches) {
  EveryPlace(FRUGAL_FLUSH_DEFERRED, frugal::heap_test_fail_after, {0}, 0.2, 2);
}

// Memory runs out where the first step's keys are taken in, or where a rank leaves: it leaves.
TEST(Memory, Leaving) {
  for (int32_t mode : {FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_TREE_HEAP})
    for (bool closing : {false, true}) {
      int quiet = 0;
      for (int n = 1; n < 400 && quiet < 3; ++n) {
        SCOPED_TRACE(testing::Message()
                     << "mode " << mode << ", closing " << closing << ", request " << n);
        Engine engine([&](frugal_config* c) {
          c->flush_threads = 0;
          c->flush_mode = mode;
          c->world_size = 2;
        });
        frugal_table* table = engine.Table("t", FRUGAL_HASHED, 5000, 4);
        frugal_trainer* trainers[2] = {engine.Trainer(0), engine.Trainer(1)};
        Op op(table, Range(0, 3000), 4, 0.5f);
        if (!closing) frugal::heap_test_fail_after(n);
        for (uint64_t s = 0; s < 3; ++s) {
          for (int attempt = 0; attempt < 9; ++attempt)
            if (frugal_prefetch(trainers[0], s, &op.op, 1, nullptr) == FRUGAL_OK) break;
          if (s > 1) break;
          for (frugal_trainer* t : trainers)
            for (int attempt = 0; attempt < 9; ++attempt)
              if (frugal_step_begin(t, s, kWait) == FRUGAL_OK) break;
          for (int attempt = 0; attempt < 9; ++attempt)
            if (frugal_push_grad(trainers[0], &op.op, 1) == FRUGAL_OK) break;
          for (frugal_trainer* t : trainers)
            for (int attempt = 0; attempt < 9; ++attempt)
              if (frugal_step_end(t, s, 0) == FRUGAL_OK) break;
        }
        if (closing) frugal::heap_test_fail_after(n);
        int32_t left = frugal_trainer_close(trainers[0]);
        quiet = frugal::heap_test_fail_after(0) <= 0 ? 0 : quiet + 1;
        // The other one goes on.
        EXPECT_OK(frugal_health(engine.handle));
        EXPECT_EQ(left, FRUGAL_OK);
        uint64_t committed = 0;
        EXPECT_OK(frugal_committed_step(engine.handle, &committed));
        EXPECT_OK(frugal_step_begin(trainers[1], committed + 1, 5000));
        EXPECT_OK(frugal_step_end(trainers[1], committed + 1, 0));
        if (testing::Test::HasFailure()) return;
      }
    }
}

// --- What ends something ---

// A call that fails for want of memory has ended nothing, or can be made again until it has.
TEST(Memory, DropAndCloseCanBeRepeated) {
  for (bool caches : {false, true}) {
    SCOPED_TRACE(testing::Message() << "caches " << caches);
    Engine engine([](frugal_config* c) {
      c->flush_threads = 0;
      c->flush_mode = FRUGAL_FLUSH_DEFERRED;
      c->world_size = 2;
    });
    frugal_trainer* trainers[2];
    for (uint32_t r = 0; r < 2; ++r) {
      frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
      config.rank = r;
      config.cache_ratio = caches ? 0.5 : 0;
      ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainers[r]));
    }
    frugal_table *stays = engine.Table("stays", FRUGAL_HASHED, 3000, 4), *goes = nullptr;
    uint64_t step = 0;
    const auto train = [&](frugal_table* more) {
      Op a(stays, Range(step * 100, 1000), 4, 0.5f), b(more, Range(0, 1000), 4, 0.25f);
      frugal_op ops[] = {a.op, b.op};
      for (uint64_t s : {step, step + 1})
        for (frugal_trainer* t : trainers) ASSERT_OK(frugal_prefetch(t, s, ops, 2, nullptr));
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_begin(t, step, kWait));
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_push_grad(t, ops, 2));
      for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, step, 0));
      ++step;
    };
    for (int round = 0; round < 3; ++round) {
      goes = engine.Table("goes", FRUGAL_DENSE, 1000, 4);
      train(goes);
      train(goes);
      EXPECT_GE(Sweep(frugal::heap_test_fail_after, [&] { return frugal_table_drop(goes); }), 0);
      frugal_table* found = nullptr;
      EXPECT_EQ(frugal_table_find(engine.handle, "goes", &found), FRUGAL_ERR_NOT_FOUND);
    }
    Op again(stays, Range(0, 1000), 4, 0.5f);
    ASSERT_OK(frugal_prefetch(trainers[1], step + 1, &again.op, 1, nullptr));
    EXPECT_GE(
        Sweep(frugal::heap_test_fail_after, [&] { return frugal_trainer_close(trainers[1]); }), 0);
    trainers[1] = engine.Trainer(1);
    ASSERT_OK(frugal_health(engine.handle));
    goes = engine.Table("goes", FRUGAL_DENSE, 1000, 4);
    train(goes);
  }
}

// Closing an engine needs no memory, whatever is still to be written.
TEST(Memory, CloseNeedsNone) {
  // (The first request is the closing thread's own: no other thread is there to make it.)
  for (int n = 1; n < 40; ++n) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.flush_threads = n % 2 == 0;
    config.flush_mode = FRUGAL_FLUSH_DEFERRED;
    frugal_engine* engine = nullptr;
    ASSERT_OK(frugal_open(&config, &engine));
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "t";
    t.key_space = FRUGAL_HASHED;
    t.rows = 3000;
    t.dim = 4;
    frugal_table* table = nullptr;
    ASSERT_OK(frugal_table_create(engine, &t, &table));
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.cache_ratio = 0.5;
    frugal_trainer* trainer = nullptr;
    ASSERT_OK(frugal_trainer_create(engine, &c, &trainer));
    Op op(table, Range(0, 2000), 4, 0.5f);
    for (uint64_t s = 0; s < 2; ++s) {
      ASSERT_OK(frugal_prefetch(trainer, s + 1, &op.op, 1, nullptr));
      ASSERT_OK(frugal_step_begin(trainer, s, kWait));
      ASSERT_OK(frugal_push_grad(trainer, &op.op, 1));
      ASSERT_OK(frugal_step_end(trainer, s, 0));
    }
    frugal::heap_test_fail_after(n);
    EXPECT_OK(frugal_close(engine));
    frugal::heap_test_fail_after(0);
  }
}

// Closing commits what all ranks have ended, though the commit has lacked memory, and does once
// more. An attached process reads it.
TEST(Memory, CloseCommitsWhatIsOwed) {
  if (!CanServe()) GTEST_SKIP() << "a build without trainer processes";
  const uint32_t dim = 8;
  const uint64_t n = 2000;
  std::vector<float> expected;
  int stalled = 0, lacked = 0;
  bool fired = true;
  for (int64_t request = 0; request < 300 && fired; ++request)
    for (int64_t again = 0; again < 6; ++again) {
      SCOPED_TRACE(testing::Message() << "request " << request << ", again " << again);
      Served controller([](frugal_config* c) {
        c->flush_threads = 0;
        c->flush_mode = FRUGAL_FLUSH_DEFERRED;
      });
      frugal_table *table = controller.engine->Table("t", FRUGAL_DENSE, n, dim), *seen = nullptr;
      Engine observer([&](frugal_config* c) {
        c->service = controller.address.c_str();
        c->flags = FRUGAL_OBSERVE;
      });
      ASSERT_OK(frugal_table_find(observer.handle, "t", &seen));
      frugal_trainer* trainer = controller.engine->Trainer(0);
      Op op(table, Range(0, n), dim, 0.5f);
      ASSERT_OK(frugal_step_begin(trainer, 0, kWait));
      ASSERT_OK(frugal_push_grad(trainer, &op.op, 1));
      frugal::heap_test_fail_after(request);
      const int32_t ended = frugal_step_end(trainer, 0, 0);
      fired = frugal::heap_test_fail_after(0) <= 0;
      if (ended != FRUGAL_OK) break;  // the rank is still inside
      // This call makes the stalled commit, but without memory.
      uint64_t committed = 77;
      frugal::heap_test_fail_after(-1);
      EXPECT_OK(frugal_committed_step(controller.engine->handle, &committed));
      const bool owes = committed == FRUGAL_NO_STEP;
      frugal::heap_test_fail_after(again);
      controller.engine.reset();
      const bool met = frugal::heap_test_fail_after(0) <= 0 && again > 0;
      stalled += owes;
      lacked += owes && met;
      EXPECT_OK(frugal_committed_step(observer.handle, &committed));
      EXPECT_EQ(committed, 0u);
      const std::vector<float> rows = Rows(seen, n, dim);
      if (expected.empty()) expected = rows;
      EXPECT_TRUE(SameBits(rows, expected));
      if (HasFailure()) return;
    }
  std::printf("%d closings commit stalled steps, %d lack memory, too\n", stalled, lacked);
  EXPECT_GT(lacked, 0);
}

// --- Rows outside steps ---

// A put or delete that fails has changed no row, and one that succeeds no cache hides.
TEST(Memory, PutAndDeleteOfCachedRows) {
  const uint32_t dim = 4;
  const uint64_t keys = 40;
  for (int32_t key_space : {FRUGAL_DENSE, FRUGAL_HASHED})
    for (bool remove : {false, true}) {
      SCOPED_TRACE(testing::Message() << "key space " << key_space << ", delete " << remove);
      Engine engine([](frugal_config* c) { c->flush_threads = 0; });
      frugal_table* table = engine.Table("t", key_space, keys, dim);
      frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
      config.cache_ratio = 1;
      frugal_trainer* trainer = nullptr;
      ASSERT_OK(frugal_trainer_create(engine.handle, &config, &trainer));
      Op all(table, Range(0, keys), dim, 0.5f);
      uint64_t step = 0;
      const auto train = [&] {
        ASSERT_OK(frugal_prefetch(trainer, step, &all.op, 1, nullptr));
        ASSERT_OK(frugal_step_begin(trainer, step, kWait));
        ASSERT_OK(frugal_lookup(trainer, &all.op, 1));
        ASSERT_OK(frugal_push_grad(trainer, &all.op, 1));
        ASSERT_OK(frugal_step_end(trainer, step++, 0));
      };
      train();
      train();
      const std::vector<float> before = Rows(table, keys, dim);
      const std::vector<float> other(keys * dim, 3.25f);
      const int failures = Sweep(frugal::heap_test_fail_after, [&] {
        const int32_t status = remove
                                   ? frugal_delete(table, all.keys.data(), keys, nullptr)
                                   : frugal_put(table, all.keys.data(), keys, 0, other.data(), 0);
        frugal::heap_test_fail_after(0);
        if (status != FRUGAL_OK) {
          EXPECT_TRUE(SameBits(Rows(table, keys, dim), before));
        }
        return status;
      });
      EXPECT_GT(failures, 1);
      std::vector<float> now(keys * dim, 0.0f);
      if (!remove || key_space == FRUGAL_DENSE) {
        ASSERT_OK(frugal_get(table, all.keys.data(), keys, 0, now.data(), 0, nullptr));
      }
      train();
      if (!remove || key_space == FRUGAL_DENSE) {
        EXPECT_TRUE(SameBits(all.rows, now));
      }
    }
}

// --- Shared memory that is full ---

frugal_table_config Large(int32_t key_space, uint64_t rows, uint32_t dim) {
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = key_space == FRUGAL_DENSE ? "large" : "growing";
  config.key_space = key_space;
  config.rows = rows;
  config.dim = dim;
  return config;
}

// What goes on while no more shared memory can be had. Returns 0, or the line of what went wrong.
// The dense table does not fit; of the hashed one, at least `some` rows and not all do.
int UseFullSharedMemory(uint64_t rows, uint64_t some, const std::function<void(bool)>& full) {
#define CHECK_THAT(x)                                              \
  do {                                                             \
    if (!(x)) {                                                    \
      std::fprintf(stderr, "%s: %s\n", #x, LastMessage().c_str()); \
      return __LINE__;                                             \
    }                                                              \
  } while (0)
  frugal_config config = FRUGAL_CONFIG_INIT;
  config.backing = FRUGAL_BACKING_SHM;
  config.flush_threads = 0;
  config.flush_mode = FRUGAL_FLUSH_AT_ONCE;
  frugal_engine* engine = nullptr;
  CHECK_THAT(frugal_open(&config, &engine) == FRUGAL_OK);
  frugal_table_config dense = Large(FRUGAL_DENSE, 1000, 4), hashed = Large(FRUGAL_HASHED, rows, 16);
  dense.name = "small";
  frugal_table *small = nullptr, *growing = nullptr, *large = nullptr;
  CHECK_THAT(frugal_table_create(engine, &dense, &small) == FRUGAL_OK);
  CHECK_THAT(frugal_table_create(engine, &hashed, &growing) == FRUGAL_OK);
  const std::vector<uint64_t> keys = Range(1'000'000, rows);
  const std::vector<float> values(rows * 16, 2.5f);
  CHECK_THAT(frugal_put(growing, keys.data(), some, 0, values.data(), 0) == FRUGAL_OK);
  frugal_trainer_config t = FRUGAL_TRAINER_CONFIG_INIT;
  frugal_trainer* trainer = nullptr;
  CHECK_THAT(frugal_trainer_create(engine, &t, &trainer) == FRUGAL_OK);
  std::vector<float> out(rows * 16);
  frugal_op op = FRUGAL_OP_INIT;
  op.table = growing;
  op.keys = keys.data();
  op.rows_out = out.data();
  op.grads = values.data();
  // A step that fits: the buffers of the next ones are there.
  op.count = some;
  CHECK_THAT(frugal_step_begin(trainer, 0, kWait) == FRUGAL_OK);
  CHECK_THAT(frugal_lookup(trainer, &op, 1) == FRUGAL_OK);
  CHECK_THAT(frugal_push_grad(trainer, &op, 1) == FRUGAL_OK);
  CHECK_THAT(frugal_step_end(trainer, 0, 0) == FRUGAL_OK);
  full(true);
  // A table that does not fit.
  dense = Large(FRUGAL_DENSE, rows, 16);
  CHECK_THAT(frugal_table_create(engine, &dense, &large) == FRUGAL_ERR_OUT_OF_MEMORY);
  CHECK_THAT(LastMessage().find("large") != std::string::npos);
  CHECK_THAT(LastMessage().find("memory or host_bytes") != std::string::npos);
  CHECK_THAT(large == nullptr &&
             frugal_table_find(engine, "large", &large) == FRUGAL_ERR_NOT_FOUND);
  // Rows that do not fit, outside steps and in one.
  CHECK_THAT(frugal_put(growing, keys.data(), rows, 0, values.data(), 0) ==
             FRUGAL_ERR_OUT_OF_MEMORY);
  uint64_t count = 0;
  CHECK_THAT(frugal_table_count(growing, &count) == FRUGAL_OK && count == some);
  for (uint64_t s = 1; s < 4; ++s) {
    CHECK_THAT(frugal_step_begin(trainer, s, kWait) == FRUGAL_OK);
    op.count = rows;
    CHECK_THAT(frugal_lookup(trainer, &op, 1) == FRUGAL_ERR_OUT_OF_MEMORY);
    CHECK_THAT(frugal_push_grad(trainer, &op, 1) == FRUGAL_ERR_OUT_OF_MEMORY);
    op.count = some;
    CHECK_THAT(frugal_lookup(trainer, &op, 1) == FRUGAL_OK);
    CHECK_THAT(out[0] == 2.5f - 0.01f * 2.5f * static_cast<float>(s) || s > 1);
    CHECK_THAT(frugal_push_grad(trainer, &op, 1) == FRUGAL_OK);
    CHECK_THAT(frugal_step_end(trainer, s, 0) == FRUGAL_OK);
  }
  CHECK_THAT(frugal_table_count(growing, &count) == FRUGAL_OK && count == some);
  CHECK_THAT(frugal_health(engine) == FRUGAL_OK);
  // Room again: what failed goes on.
  CHECK_THAT(frugal_table_drop(small) == FRUGAL_OK);
  full(false);
  CHECK_THAT(frugal_put(growing, keys.data(), rows / 2, 0, values.data(), 0) == FRUGAL_OK);
  CHECK_THAT(frugal_table_count(growing, &count) == FRUGAL_OK && count == rows / 2);
  CHECK_THAT(frugal_close(engine) == FRUGAL_OK);
#undef CHECK_THAT
  return 0;
}

TEST(SharedMemory, NoMoreCanBeHad) {
  EXPECT_EQ(UseFullSharedMemory(400'000, 1000,
                                [](bool full) { frugal::os_test_fail_after(full ? -1 : 0); }),
            0);
  frugal::os_test_fail_after(0);
}

// In a child that mounts a /dev/shm of its own with no room at all, where the machine lets it:
// tables in shared memory do not lie there.
TEST(SharedMemory, NothingInDevShm) {
  constexpr int kCannot = 77;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string user = "0 " + std::to_string(getuid()) + " 1";
    const std::string group = "0 " + std::to_string(getgid()) + " 1";
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(kCannot);
    const auto tell = [](const char* file, const std::string& text) {
      std::FILE* f = std::fopen(file, "w");
      if (f == nullptr) return false;
      const bool written = std::fwrite(text.data(), 1, text.size(), f) == text.size();
      return (std::fclose(f) == 0) && written;
    };
    if (!tell("/proc/self/setgroups", "deny") || !tell("/proc/self/uid_map", user) ||
        !tell("/proc/self/gid_map", group))
      _exit(kCannot);
    if (mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4k,nr_inodes=1") != 0) _exit(kCannot);
    _exit(UseFullSharedMemory(400'000, 1000,
                              [](bool full) { frugal::os_test_fail_after(full ? -1 : 0); }) == 0
              ? 0
              : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == kCannot) GTEST_SKIP() << "no mount of its own is allowed here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Every commitment of memory that a table asks for fails once.
TEST(SharedMemory, EveryCommitmentOfATable) {
  for (int32_t key_space : {FRUGAL_DENSE, FRUGAL_HASHED}) {
    Engine engine([](frugal_config* c) { c->backing = FRUGAL_BACKING_SHM; });
    frugal_table_config config = Large(key_space, 200'000, 16);
    config.optimizer.kind = FRUGAL_ADAM;
    frugal_table* table = nullptr;
    int failed = Sweep(frugal::os_test_fail_after, [&] {
      const int32_t status = frugal_table_create(engine.handle, &config, &table);
      EXPECT_TRUE(status == FRUGAL_OK || table == nullptr);
      return status;
    });
    EXPECT_GE(failed, 4);
    const std::vector<uint64_t> keys = Range(0, 200'000);
    const std::vector<float> values(200'000 * 16, 2.5f);
    failed = Sweep(frugal::os_test_fail_after, [&] {
      const int32_t status = frugal_put(table, keys.data(), keys.size(), 0, values.data(), 0);
      uint64_t count = 0;
      EXPECT_OK(frugal_table_count(table, &count));
      EXPECT_EQ(count, status == FRUGAL_OK || key_space == FRUGAL_DENSE ? 200'000u : 0u);
      return status;
    });
    if (key_space == FRUGAL_HASHED) {
      EXPECT_GE(failed, 4);
    }
    float row[16];
    EXPECT_OK(frugal_get(table, &keys[199'999], 1, 0, row, 0, nullptr));
    EXPECT_EQ(row[15], 2.5f);
    EXPECT_OK(frugal_health(engine.handle));
  }
}

}  // namespace
