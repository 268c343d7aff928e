// Schedules find lost updates, lost wake-ups, deadlocks and livelocks, have their own time, and
// repeat a run by its seed.
#include "support/schedule.h"

#include <set>

#include "base/condition.h"

namespace frugal {
namespace {

constexpr uint64_t kHour = 3600ull * 1000000000;

// In how many of 2,000 schedules it goes wrong.
template <class Run>
uint64_t wrong(Run run) {
  uint64_t n = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    Schedule s(seed * 0x9e3779b97f4a7c15u);
    n += !run(s);
  }
  return n;
}

struct Counter {
  Mutex mu;
  Condition changed;
  uint64_t n = 0;
};

// What a thread has read is out of date when it writes.
TEST(Schedules, ALostUpdate) {
  auto count = [](bool locks) {
    return [locks](Schedule& s) {
      Counter c;
      for (const char* name : {"a", "b"})
        s.thread(name, [&c, locks] {
          std::unique_lock<Mutex> lock(c.mu, std::defer_lock);
          if (locks) lock.lock();
          const uint64_t seen = c.n;
          schedule_point();
          c.n = seen + 1;
        });
      s.run();
      return c.n == 2;
    };
  };
  EXPECT_GT(wrong(count(false)), 100u);
  EXPECT_EQ(wrong(count(true)), 0u);
}

// An order that needs another thread at two points of a long run.
TEST(Schedules, AnOrderOfThree) {
  auto run = [](Schedule& s) {
    uint64_t at = 0;
    bool seen = false;
    s.thread("goes on", [&] {
      for (uint64_t i = 0; i < 12; ++i) {
        at = i;
        schedule_point();
      }
    });
    s.thread("looks", [&] {
      const bool first = at == 3;
      schedule_point();
      seen = first && at >= 5 && at < 9;
    });
    s.run();
    return !seen;
  };
  EXPECT_GT(wrong(run), 2u);
}

// A thread waits after it has checked, and the notice came in between.
TEST(Schedules, ALostWakeUp) {
  auto run = [](bool locks) {
    return [locks](Schedule& s) {
      Counter c;
      bool in_time = true;
      s.thread("tells", [&c, locks] {
        std::unique_lock<Mutex> lock(c.mu, std::defer_lock);
        if (locks) lock.lock();
        c.n = 1;
        c.changed.notify_all();
      });
      s.thread("waits", [&] {
        bool there;
        {
          UniqueLock lock(c.mu);
          there = c.n != 0;
        }
        // (Without the lock the notice may come here.)
        UniqueLock lock(c.mu);
        const uint64_t until = now_ns() + kHour;
        bool looked = false;
        if (!there)
          c.changed.wait_until(lock, until,
                               [&] { return (locks && c.n != 0) || std::exchange(looked, true); });
        in_time = now_ns() < until;
      });
      s.run();
      return in_time;
    };
  };
  EXPECT_GT(wrong(run(false)), 50u);
  // (A wait may end at its time though others could go on.)
  EXPECT_LT(wrong(run(true)), wrong(run(false)));
}

TEST(Schedules, TimeIsTheirOwn) {
  Schedule s(7);
  uint64_t slept = 0, waited = 0;
  Counter c;
  s.thread("sleeps", [&] {
    const uint64_t begin = now_ns();
    sleep_ns(1000 * kHour);
    slept = now_ns() - begin;
  });
  s.thread("waits", [&] {
    UniqueLock lock(c.mu);
    const uint64_t begin = now_ns();
    EXPECT_FALSE(c.changed.wait_until(lock, begin + 500 * kHour, [] { return false; }));
    waited = now_ns() - begin;
  });
  s.run();
  EXPECT_GE(slept, 1000 * kHour);
  EXPECT_GE(waited, 500 * kHour);
}

TEST(Schedules, ASeedRepeatsARun) {
  auto run = [](uint64_t seed) {
    Schedule s(seed);
    Counter c;
    for (const char* name : {"a", "b", "c"})
      s.thread(name, [&] {
        for (int i = 0; i < 5; ++i) {
          Lock lock(c.mu);
          c.n += s.random().below(3);
          c.changed.notify_one();
        }
        UniqueLock lock(c.mu);
        c.changed.wait_until(lock, now_ns() + 1000, [&] { return c.n > 8; });
      });
    s.run();
    return s.choices();
  };
  std::set<uint64_t> different;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const uint64_t choices = run(seed);
    EXPECT_EQ(run(seed), choices);
    different.insert(choices);
  }
  EXPECT_GT(different.size(), 40u);
}

TEST(Schedules, OneOfThemAlone) {
  uint64_t runs = 0;
  auto one = [&](Schedule& s) {
    ++runs;
    s.thread("a", [] { schedule_point(); });
    s.run();
  };
  setenv("FRUGAL_SCHEDULE", "schedule_test.a:17", 1);
  explore("schedule_test.a", 100, one);
  EXPECT_EQ(runs, 1u);
  explore("schedule_test.b", 100, one);
  EXPECT_EQ(runs, 1u);
  unsetenv("FRUGAL_SCHEDULE");
  explore("schedule_test.b", 100, one);
  EXPECT_GT(runs, 10u);
}

// A failure that ends the process prints what it was.
struct Ends : testing::Test {
  Ends() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  static void run(std::function<void()> a, std::function<void()> b) {
    for (uint64_t seed = 1; seed <= 2000; ++seed) {
      Schedule s(seed);
      s.thread("a", a);
      s.thread("b", b);
      s.run();
    }
  }
};
using EndsDeathTest = Ends;

TEST_F(EndsDeathTest, ADeadlock) {
  static Mutex x, y;
  auto both = [](Mutex& first, Mutex& second) NO_THREAD_SAFETY_ANALYSIS {
    first.lock();
    second.lock();
    second.unlock();
    first.unlock();
  };
  EXPECT_EXIT(run([&] { both(x, y); }, [&] { both(y, x); }), testing::ExitedWithCode(1),
              "deadlock(.|\n)*which . has");
}

TEST_F(EndsDeathTest, ALivelock) {
  EXPECT_EXIT(run(
                  [] {
                    for (;;) cpu_relax();
                  },
                  [] {}),
              testing::ExitedWithCode(1), "livelock");
}

TEST_F(EndsDeathTest, AMutexThatIsKept) {
  static Mutex x;
  EXPECT_EXIT(run([]() NO_THREAD_SAFETY_ANALYSIS { x.lock(); }, [] {}), testing::ExitedWithCode(1),
              "with a mutex held");
}

TEST_F(EndsDeathTest, WhatDoesNotHold) {
  EXPECT_EXIT(
      {
        Schedule s(1);
        s.thread("a", [&] {
          s.note("n is %llu of %llu", 3, 4);
          HOLDS(s, LastMessage().size() == 12345);
        });
        s.run();
      },
      testing::ExitedWithCode(1), "does not hold: LastMessage(.|\n)*n is 3 of 4");
}

}  // namespace
}  // namespace frugal
