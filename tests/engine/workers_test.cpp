// Flush threads take the most urgent work; jobs run each chunk once; waits help, time out and fail;
// no wake-up is lost.
//
// Flush threads pass over work that lacks memory, and rest. The test needs no engine. A part of it
// runs in chosen interleavings (support/schedule.h).
#include "engine/workers.h"

#include <mutex>
#include <stdexcept>
#include <vector>

#include "support/schedule.h"

namespace frugal {
namespace {

using Outcome = Workers::Outcome;
using Urgency = Workers::Urgency;

struct WorkersTest : testing::Test {
  Trace trace;
  std::atomic<bool> resting{false}, hold{false};
  std::atomic<uint32_t> failures{0};
  bool threads_apply = false;
  std::unique_ptr<Workers> workers;

  void make(uint32_t threads) {
    workers = std::make_unique<Workers>(
        threads,
        Workers::Rules{[this] { return resting.load(); }, [this] { return hold.load(); },
                       [this] { ++failures; }, threads_apply},
        &trace);
  }
  void TearDown() override {
    if (workers) workers->stop();
  }
  // Of a work that has been done so often as there is of it.
  static std::function<Outcome()> of(
      std::atomic<int>& left, std::function<void()> doing = [] {}) {
    return [&left, doing] {
      if (left.load() <= 0) return Outcome::kNothing;
      doing();
      --left;
      return Outcome::kWork;
    };
  }
  void until(std::function<bool()> done) {
    while (!done()) std::this_thread::yield();
  }
};

TEST_F(WorkersTest, TheMostUrgentIsDoneFirst) {
  make(1);
  std::mutex mu;
  std::vector<int> order;
  std::atomic<int> left[3] = {3, 2, 1};
  for (int i = 0; i < 3; ++i)
    workers->add(static_cast<Urgency>(i), of(left[i], [&, i] {
                   std::lock_guard<std::mutex> lock(mu);
                   order.push_back(i);
                 }));
  workers->start();
  until([&] { return left[2] == 0; });
  EXPECT_EQ(order, (std::vector<int>{0, 0, 0, 1, 1, 2}));
}

TEST_F(WorkersTest, WhatIsNotUrgentWaits) {
  make(1);
  hold = true;
  std::atomic<int> urgent{1}, idle{1}, favour{1};
  workers->add(Urgency::kSoon, of(urgent));
  workers->add(Urgency::kIdle, of(idle, [&] { EXPECT_FALSE(hold.load()); }));
  workers->add(Urgency::kFavour, of(favour, [&] { EXPECT_FALSE(hold.load()); }));
  workers->start();
  until([&] { return urgent == 0; });
  hold = false;  // no thread is woken: a held thread checks again
  until([&] { return idle == 0 && favour == 0; });
}

TEST_F(WorkersTest, WorkThatLacksMemoryIsPassedOver) {
  make(1);
  std::atomic<int> lacks{3}, idle{1}, favour{1};
  hold = true;  // what is not urgent gives memory back
  workers->add(Urgency::kSoon, [&]() -> Outcome {
    if (lacks > 0 && idle == 0) --lacks;
    if (lacks > 0) throw std::bad_alloc();
    return Outcome::kNothing;
  });
  workers->add(Urgency::kIdle, of(idle));
  workers->add(Urgency::kFavour, of(favour, [&] { EXPECT_EQ(lacks.load(), 0); }));
  workers->start();
  until([&] { return lacks == 0; });
  hold = false;
  until([&] { return favour == 0; });
  EXPECT_EQ(failures, 0u);
  EXPECT_EQ(workers->health(), FRUGAL_OK);
}

TEST_F(WorkersTest, RestingThreadsAreNotWokenAndDoNothing) {
  make(1);
  resting = true;
  std::atomic<int> left{1};
  workers->add(Urgency::kSoon, of(left));
  workers->start();
  EXPECT_TRUE(workers->callers_work());
  workers->wake();
  EXPECT_EQ(left, 1);
  resting = false;
  workers->wake();
  until([&] { return left == 0; });
}

TEST_F(WorkersTest, AFailureIsKeptAndEndsWaits) {
  make(1);
  workers->add(Urgency::kSoon, []() -> Outcome { throw std::runtime_error("a fault"); });
  workers->start();
  auto never = [] { return false; };
  const Status s = workers->wait(
      UINT64_MAX, [&] { return workers->healthy(); }, never, never, never);
  EXPECT_EQ(s, FRUGAL_ERR_UNHEALTHY);
  EXPECT_EQ(workers->health(), FRUGAL_ERR_INTERNAL);
  workers->fail(FRUGAL_ERR_DEVICE);
  EXPECT_EQ(workers->health(), FRUGAL_ERR_INTERNAL);  // the first
  EXPECT_EQ(failures, 2u);
}

TEST_F(WorkersTest, AWaitHelpsUntilItIsOver) {
  make(0);
  int left = 3;
  auto never = [] { return false; };
  auto ok = []() -> Status { return FRUGAL_OK; };
  auto help = [&] { return --left >= 0; };
  EXPECT_EQ(workers->wait(
                UINT64_MAX, ok, [&] { return left == 0; }, help, never),
            FRUGAL_OK);
  EXPECT_EQ(workers->wait(now_ns() + 1000000, ok, never, never, never), FRUGAL_ERR_TIMEOUT);
  auto closed = []() -> Status { return FRUGAL_ERR_CLOSED; };
  auto always = [] { return true; };
  EXPECT_EQ(workers->wait(0, closed, always, never, never), FRUGAL_ERR_CLOSED);
  EXPECT_EQ(workers->wait(
                UINT64_MAX, ok, never, []() -> bool { throw std::bad_alloc(); }, never),
            FRUGAL_ERR_OUT_OF_MEMORY);
  // Device work in flight is polled again and again: nothing notifies the waiting thread.
  int looks = 0;
  auto look = [&] { return ++looks < 0; };
  EXPECT_EQ(workers->wait(
                UINT64_MAX, ok, [&] { return looks > 20; }, look, always),
            FRUGAL_OK);
}

struct Loop {
  std::vector<std::atomic<int>> runs;
  size_t lacks = SIZE_MAX, faulty = SIZE_MAX;
  explicit Loop(size_t n) : runs(n) {}
  static void run(void* context, size_t chunk) {
    auto* l = static_cast<Loop*>(context);
    ++l->runs[chunk];
    if (chunk == l->lacks) throw std::bad_alloc();
    if (chunk == l->faulty) throw std::runtime_error("a fault");
  }
  bool each_once() const {
    return std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; });
  }
};

TEST_F(WorkersTest, EachChunkRunsOnceWhoeverRunsIt) {
  for (uint32_t threads : {0, 1, 3}) {
    make(threads);
    workers->add(Urgency::kSoon,
                 [this] { return workers->help(false) ? Outcome::kWork : Outcome::kNothing; });
    workers->start();
    for (size_t chunks : {1, 2, 7, 300}) {
      Loop loop(chunks);
      EXPECT_EQ(workers->parallel(chunks, Loop::run, &loop), FRUGAL_OK);
      EXPECT_TRUE(loop.each_once()) << chunks;
    }
    Loop lacking(9);
    lacking.lacks = 4;
    EXPECT_EQ(workers->parallel(9, Loop::run, &lacking), FRUGAL_ERR_OUT_OF_MEMORY);
    Loop faulty(9);
    faulty.faulty = 8;
    EXPECT_EQ(workers->parallel(9, Loop::run, &faulty), FRUGAL_ERR_INTERNAL);
    EXPECT_TRUE(threads == 0 || (lacking.each_once() && faulty.each_once()));
    workers->stop();
    EXPECT_FALSE(workers->sharing());
  }
}

JobRef apply_job(Loop& loop, std::atomic<int>* finished) {
  JobRef job = std::allocate_shared<Job>(HeapAllocator<Job>());
  using Both = std::pair<Loop*, std::atomic<int>*>;
  job->run = [](void* context, size_t chunk) {
    Loop::run(static_cast<Both*>(context)->first, chunk);
  };
  job->finished_hook = [](void* context) { ++*static_cast<Both*>(context)->second; };
  auto both = std::make_shared<Both>(&loop, finished);
  job->context = both.get();
  job->keep = both;
  job->chunks = loop.runs.size();
  job->apply = true;
  return job;
}

TEST_F(WorkersTest, GatesWaitForUpdates) {
  make(0);
  std::atomic<int> finished{0};
  Loop one(3), two(5);
  workers->publish({apply_job(one, &finished)});
  EXPECT_TRUE(workers->applying() && workers->sharing());
  EXPECT_TRUE(workers->help(true));
  EXPECT_FALSE(workers->help(true));
  EXPECT_FALSE(workers->applying() || workers->sharing());
  workers->run_alone(apply_job(two, &finished));
  EXPECT_FALSE(workers->applying());
  EXPECT_EQ(finished, 2);
  EXPECT_TRUE(one.each_once() && two.each_once());
  // A failed loop counts as done after health has reported it.
  Loop three(4);
  three.lacks = 2;
  workers->publish({apply_job(three, &finished)});
  EXPECT_TRUE(workers->help(false));
  EXPECT_FALSE(workers->applying());
  EXPECT_EQ(workers->health(), FRUGAL_ERR_OUT_OF_MEMORY);
}

// A call that waits helps with nothing, although a chunk is left; without flush threads, and after
// their end, it does all.
TEST_F(WorkersTest, UpdatesMayBeLeftToFlushThreads) {
  threads_apply = true;
  for (uint32_t threads : {1, 0}) {
    make(threads);
    std::atomic<bool> may{false};
    std::atomic<int> finished{0};
    workers->add(Urgency::kSoon,
                 [&] { return may && workers->help(false) ? Outcome::kWork : Outcome::kNothing; });
    workers->start();
    Loop loop(3), last(2);
    workers->publish({apply_job(loop, &finished)});
    EXPECT_EQ(workers->help(true), threads == 0);
    EXPECT_EQ(workers->applying(), threads != 0);
    may = true;
    workers->wake();
    until([&] { return !workers->applying(); });
    may = false;
    workers->stop();
    workers->publish({apply_job(last, &finished)});
    EXPECT_TRUE(workers->help(true));
    EXPECT_TRUE(loop.each_once() && last.each_once());
    EXPECT_EQ(finished, 2);
  }
}

// --- Chosen interleavings ------------------------------------------------------------------------

// Threads wait for control state, in await() or in wait(), while two others change it, one
// after the other. await() never wakes by itself, so a lost wake-up is a deadlock.
TEST(WorkersSchedules, NoWakeUpIsLost) {
  explore("workers.wait", 10000, [](Schedule& s) {
    Trace trace;
    Workers workers(0, {[] { return false; }, [] { return false; }, [] {}}, &trace);
    Mutex mu;
    uint32_t reached = 0;
    for (uint32_t r : {0, 1}) {
      s.thread(r ? "awaits 2" : "awaits 1", [&, r] {
        UniqueLock lock(mu);
        workers.await(lock, [&] { return reached >= 1 + r; });
      });
      s.thread(r ? "waits for 2" : "waits for 1", [&, r] {
        const Status status = workers.wait(
            UINT64_MAX, []() -> Status { return FRUGAL_OK; },
            [&] {
              Lock lock(mu);
              return reached >= 1 + r;
            },
            [] { return false; }, [] { return false; });
        HOLDS(s, status == FRUGAL_OK);
      });
      s.thread(r ? "second" : "first", [&, r] {
        for (bool done = false; !done;) {
          {
            Lock lock(mu);
            if (reached == r) reached = r + 1, done = true;
          }
          done ? workers.progress() : yield_thread();
        }
      });
    }
    s.run();
  });
}

// Two loops are shared by their callers and a third thread, which ends with them.
TEST(WorkersSchedules, LoopsThatAreShared) {
  explore("workers.loops", 10000, [](Schedule& s) {
    Trace trace;
    Workers workers(1, {[] { return false; }, [] { return false; }, [] {}}, &trace);
    Mutex mu;
    uint32_t ended = 0;
    for (const char* name : {"one", "other"})
      s.thread(name, [&] {
        struct Of {
          Schedule* s;
          uint32_t runs[4] = {};
        } of{&s};
        const Status status = workers.parallel(
            4,
            [](void* context, size_t i) {
              auto* o = static_cast<Of*>(context);
              schedule_point();
              ++o->runs[i];
            },
            &of);
        HOLDS(s, status == FRUGAL_OK);
        for (uint32_t n : of.runs) HOLDS(s, n == 1);
        Lock lock(mu);
        ++ended;
      });
    s.thread("helper", [&] {
      for (bool over = false; !over;) {
        if (workers.help(false)) continue;
        yield_thread();
        Lock lock(mu);
        over = ended == 2;
      }
    });
    s.run();
    HOLDS(s, !workers.sharing());
  });
}

}  // namespace
}  // namespace frugal
