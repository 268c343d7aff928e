// Threads share a trainer process's loops: each chunk runs once, concurrent callers do not wait for
// each other's helpers, the loop returns the first failure.
#include "process/helpers.h"

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "support/inside.h"

namespace frugal::helpers_test {

struct Chunks {
  explicit Chunks(size_t n) : times(n) {}
  static void run(void* context, size_t i) { ++static_cast<Chunks*>(context)->times[i]; }
  bool once() const {
    for (const auto& t : times)
      if (t.load() != 1) return false;
    return true;
  }
  std::vector<std::atomic<int>> times;
};

TEST(Helpers, EachChunkRunsOnce) {
  for (const uint32_t threads : {0, 1, 3}) {
    Helpers helpers;
    ASSERT_OK(helpers.start(threads));
    for (const size_t n : {0, 1, 2, 3, 100, 2, 1000}) {
      Chunks chunks(n);
      ASSERT_OK(helpers.parallel(n, Chunks::run, &chunks));
      EXPECT_TRUE(chunks.once()) << threads << " threads, " << n << " chunks";
    }
  }
}

TEST(Helpers, CallersAtOnce) {
  Helpers helpers;
  ASSERT_OK(helpers.start(2));
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        Chunks chunks(1 + static_cast<size_t>(round % 40));
        if (helpers.parallel(chunks.times.size(), Chunks::run, &chunks) != FRUGAL_OK) ++wrong;
        if (!chunks.once()) ++wrong;
      }
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

// A chunk that waits for another one's thread is with a helper.
TEST(Helpers, ChunksRunBesideEachOther) {
  Helpers helpers;
  ASSERT_OK(helpers.start(1));
  std::atomic<int> inside{0};
  ASSERT_OK(helpers.parallel(
      2,
      [](void* context, size_t) {
        auto* in = static_cast<std::atomic<int>*>(context);
        for (++*in; in->load() < 2;) std::this_thread::yield();
      },
      &inside));
  EXPECT_EQ(inside.load(), 2);
}

TEST(Helpers, AChunkThatFails) {
  Helpers helpers;
  ASSERT_OK(helpers.start(2));
  std::atomic<int> ran{0};
  const auto fails = [](void* context, size_t i) {
    ++*static_cast<std::atomic<int>*>(context);
    if (i == 7) throw std::bad_alloc();
  };
  EXPECT_EQ(helpers.parallel(20, fails, &ran), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(ran.load(), 20) << "the others run";
  EXPECT_NE(LastMessage().find("call again"), std::string::npos);
  const auto throws = [](void*, size_t) { throw 1; };
  EXPECT_EQ(helpers.parallel(2, throws, nullptr), FRUGAL_ERR_INTERNAL);
  ran = 0;
  ASSERT_OK(helpers.parallel(7, fails, &ran));
  EXPECT_EQ(ran.load(), 7);
}

TEST(Helpers, StoppedTheyAreGone) {
  Helpers helpers;
  ASSERT_OK(helpers.start(2));
  helpers.stop();
  helpers.stop();
  Chunks chunks(10);
  ASSERT_OK(helpers.parallel(10, Chunks::run, &chunks));
  EXPECT_TRUE(chunks.once()) << "by the caller";
}

}  // namespace frugal::helpers_test
