// Operations outside steps, and calls that need slots, at each moment at which a beginning step
// holds only its call's lock.
//
// The program's own pthread_mutex_lock and pthread_mutex_unlock replace the C library's, also for
// the library. A sanitizer has its own definitions, so its builds lack this test.
#include <dlfcn.h>
#include <pthread.h>

#include <functional>
#include <semaphore>
#include <thread>

#include "support/engine.h"
#include "support/tier_engine.h"

namespace {

// For one thread: at its n-th moment with this many locks, `act` runs in another thread. The thread
// goes on after it.
struct Between {
  Between(int n, std::function<void()> act_in, int locks_in = 1)
      : left(n), locks(locks_in), act(std::move(act_in)) {
    mine = this;
  }
  ~Between() { mine = nullptr; }
  Between(const Between&) = delete;
  bool came() const { return left <= 0; }

  int left, held = 0;
  const int locks;
  std::function<void()> act;
  static thread_local Between* mine;
};
thread_local Between* Between::mine = nullptr;

}  // namespace

extern "C" {

#define NEXT(name) \
  static const auto next = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, #name))

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  NEXT(pthread_mutex_lock);
  const int r = next(mutex);
  if (Between* b = Between::mine) ++b->held;
  return r;
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  NEXT(pthread_mutex_trylock);
  const int r = next(mutex);
  if (Between* b = Between::mine) b->held += r == 0;
  return r;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  NEXT(pthread_mutex_unlock);
  const int r = next(mutex);
  Between* b = Between::mine;
  if (b && --b->held == b->locks && --b->left == 0) {
    Between::mine = nullptr;
    std::thread(b->act).join();
    Between::mine = b;
  }
  return r;
}

}  // extern "C"

namespace frugal {
namespace {

using BetweenTest = TierEngine;

// A call of an earlier step takes the slots of a step that is about to begin, or none of one that
// has begun.
TEST_F(BetweenTest, AStepBeginsWithThePlacesThatItsGateHasFound) {
  timeout_ms = 200;  // of a call that finds no slots
  const Keys first = {1, 2, 3}, more = {4, 5};
  int taken = 0, kept = 0;
  for (int n = 1;; ++n) {
    SCOPED_TRACE(n);
    open(100, 4, 0, 1, 2);
    ASSERT_OK(begin(0));
    ASSERT_OK(frugal_step_end(trainer, 0, 0));
    declare(1, first);
    ASSERT_OK(frugal_step_begin(other, 0, 0));
    int32_t called = 1, began;
    bool came;
    {
      Between between(n, [&] { called = lookup(other, more, 0); });
      began = begin(1);
      came = between.came();
    }
    if (!came) break;
    ASSERT_FALSE(called == FRUGAL_OK && began == FRUGAL_OK);
    taken += called == FRUGAL_OK;
    kept += began == FRUGAL_OK;
    ASSERT_OK(frugal_step_end(other, 0, 0));
    ASSERT_OK(began == FRUGAL_OK ? FRUGAL_OK : begin(1, kNeverMs));
    ASSERT_OK(lookup(first, 0));
    close();
  }
  EXPECT_GT(taken, 0);
  EXPECT_GT(kept, 0);
}

// A gate that lacks slots for its step, while other holders release some.
TEST_F(BetweenTest, LaterStepsStayWhereNobodyLacksPlacesAnyMore) {
  const Keys soon = {5, 6}, later = {1, 2}, others = {3, 4};
  int lacked = 0;
  for (int n = 1;; ++n) {
    SCOPED_TRACE(n);
    open(100, 4, 0, 1, 2);
    for (frugal_trainer* t : {trainer, other}) {
      ASSERT_OK(frugal_step_begin(t, 0, kNeverMs));
      ASSERT_OK(frugal_step_end(t, 0, 0));
    }
    declare(2, later);
    frugal_batch* batch = nullptr;
    const frugal_op o = op(others);
    ASSERT_OK(frugal_prefetch(other, 3, &o, 1, &batch));
    declare(1, soon);
    ASSERT_TRUE(table->rows.tier()->lacking());
    const auto full = [&] {
      const uint64_t key = 100;
      uint32_t slot;
      const Status s =
          table->rows.resolve(&key, 1, nullptr, Rows::Missing::kReserve, &slot, nullptr);
      if (s == FRUGAL_OK) table->rows.unhold_backed(&slot, 1);
      return s != FRUGAL_OK;
    };
    bool stays = false, came;
    {
      Between between(n, [&] {
        stays = full();
        EXPECT_OK(frugal_prefetch_cancel(other, batch));
        // Unless the first rank is about to resolve the part itself.
        stays = frugal_step_begin(other, 1, 20) == FRUGAL_OK && stays;
      });
      ASSERT_OK(begin(1, kNeverMs));
      came = between.came();
    }
    if (!came) break;
    ASSERT_TRUE(full() || !stays);
    lacked += stays;
    ASSERT_OK(lookup(soon, 0));
    close();
  }
  EXPECT_GT(lacked, 0);
}

// A put, held in its middle until it may end.
struct Operation {
  // Comes back at its n-th moment, or when it has ended before.
  void start(frugal_table* table, int n) {
    thread = std::thread([=, this] {
      {
        const auto middle = [this] {
          held = true;
          told.release();
          may_end.acquire();
        };
        Between between(n, middle, 0);
        const uint64_t key = 1;
        const float value = 5;
        said = frugal_put(table, &key, 1, 0, &value, 0);
      }
      if (!held) told.release();
    });
    told.acquire();
  }
  void end() {
    may_end.release();
    thread.join();
  }

  std::thread thread;
  std::binary_semaphore told{0}, may_end{0};
  bool held = false;
  int32_t said = 1;
};

// No step begins during an operation outside steps, and no such operation begins during a step.
TEST(Between, AStepOrAnOperationOutsideSteps) {
  const auto no_threads = [](frugal_config* c) { c->flush_threads = 0; };
  int moment = 0;  // the last of the operation's at which it is under way: no step begins
  for (int n = 1;; ++n) {
    frugal_test::Engine engine(no_threads);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
    frugal_trainer* trainer = engine.Trainer(0);
    Operation operation;
    operation.start(table, n);
    const int32_t began = frugal_step_begin(trainer, 0, 0);
    operation.end();
    if (!operation.held) break;
    if (began != FRUGAL_OK) moment = n;
  }
  ASSERT_GT(moment, 0);
  int beside = 0, refused = 0;
  for (int n = 1;; ++n) {
    SCOPED_TRACE(n);
    frugal_test::Engine engine(no_threads);
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
    frugal_trainer* trainer = engine.Trainer(0);
    Operation operation;
    int32_t began;
    bool came;
    {
      Between between(n, [&] { operation.start(table, moment); });
      began = frugal_step_begin(trainer, 0, 0);
      came = between.came();
    }
    if (!came) break;
    operation.end();
    EXPECT_EQ(began, operation.held ? FRUGAL_ERR_TIMEOUT : FRUGAL_OK);
    EXPECT_EQ(operation.said, operation.held ? FRUGAL_OK : FRUGAL_ERR_BUSY);
    beside += operation.held;
    refused += !operation.held;
  }
  EXPECT_GT(beside, 1);
  EXPECT_GT(refused, 0);
}

// A step that ends while committed rows are read is not committed before that, and then at once.
TEST(Between, AStepIsCommittedBehindAReadOfCommittedRows) {
  int held_off = 0;
  for (int n = 1;; ++n) {
    SCOPED_TRACE(n);
    frugal_test::Engine engine([](frugal_config* c) { c->flush_threads = 0; });
    frugal_table* table = engine.Table("t", FRUGAL_DENSE, 10, 1);
    frugal_trainer* trainer = engine.Trainer(0);
    ASSERT_OK(frugal_step_begin(trainer, 0, 0));
    const uint64_t key = 1;
    float value = 5, one = 1;
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = &key;
    op.count = 1;
    op.grads = &one;
    ASSERT_OK(frugal_push_grad(trainer, &op, 1));
    bool came, waits = false;
    {
      Between between(
          n,
          [&] {
            EXPECT_OK(frugal_step_end(trainer, 0, 0));
            waits = engine.Committed() == FRUGAL_NO_STEP;
          },
          0);
      ASSERT_OK(frugal_get(table, &key, 1, FRUGAL_COMMITTED, &value, 0, nullptr));
      came = between.came();
    }
    if (!came) break;
    EXPECT_EQ(engine.Committed(), 0u);
    if (waits) {
      EXPECT_EQ(value, 0);
    }
    held_off += waits;
  }
  EXPECT_GT(held_off, 0);
}

}  // namespace
}  // namespace frugal
