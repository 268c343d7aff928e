// The stopwatch agrees with the clock that it replaces, and does not go back in a thread.
#include "base/stopwatch.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/os.h"

namespace frugal::stopwatch_test {

void pass(uint64_t ns) {
  const uint64_t until = now_ns() + ns;
  while (now_ns() < until) stopwatch_ns();
}

// Its rate is measured over 20 ms: what is read before that, beyond that, and after that.
TEST(Stopwatch, RunsAsTheClockDoes) {
  for (const uint64_t ns : {1'000'000, 40'000'000, 100'000'000}) {
    const uint64_t outer_begin = now_ns(), begin = stopwatch_ns(), inner_begin = now_ns();
    pass(ns);
    const uint64_t inner_end = now_ns(), end = stopwatch_ns(), outer_end = now_ns();
    const uint64_t found = end - begin, slack = ns / 1000 + 10'000;
    EXPECT_GE(found + slack, inner_end - inner_begin) << ns;
    EXPECT_LE(found, outer_end - outer_begin + slack) << ns;
  }
}

TEST(Stopwatch, DoesNotGoBackInAThread) {
  std::vector<std::thread> threads;
  std::vector<int> backwards(4, 0);
  for (int& count : backwards)
    threads.emplace_back([&count] {
      uint64_t before = stopwatch_ns();
      for (int i = 0; i < 200'000; ++i) {
        const uint64_t now = stopwatch_ns();
        count += now + 5'000 < before;  // the two clocks may differ by that when the rate is known
        before = now;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backwards, std::vector<int>(4, 0));
}

}  // namespace frugal::stopwatch_test
