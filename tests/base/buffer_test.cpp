// Buffers kept for reuse: which request reuses one, how many stay, which limit counts them, and the
// status without memory.
#include "base/buffer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/arena.h"
#include "support/inside.h"

namespace frugal::buffer_test {

constexpr size_t kMiB = size_t{1} << 20;

// Sizes of which each is wanted once: a few a power of two, as of reads of ever other numbers of
// rows.
std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (double bytes = 64.0 * kMiB; bytes > 1000; bytes *= 0.82)
    sizes.push_back(static_cast<size_t>(bytes));
  return sizes;
}

TEST(Buffers, OfSizesThatAreWantedOnceAFewStay) {
  for (const bool ascending : {false, true})
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(testing::Message() << "ascending " << ascending << ", shared " << shared);
      Arena arena;
      BufferPool pool;
      if (shared) {
        ASSERT_EQ(arena.open(size_t{4} << 30), FRUGAL_OK);
        pool.cut_from(&arena);
      }
      std::vector<size_t> sizes = Sizes();
      if (ascending) std::reverse(sizes.begin(), sizes.end());
      // Parts of pieces are kept in addition, one of each size.
      size_t small = 0, last = 0;
      for (size_t bytes : sizes) {
        const size_t capacity = BufferPool::capacity_for(bytes);
        if (shared && capacity < kHugePage && capacity != last) small += last = capacity;
      }
      for (int round = 0; round < 12; ++round) {
        size_t all = 0;
        for (size_t bytes : sizes) {
          Buffer b;
          ASSERT_EQ(pool.get(bytes, &b), FRUGAL_OK);
          std::memset(b.data(), 1, 1);
          all += b.capacity();
        }
        EXPECT_GT(all, 330 * kMiB);
        EXPECT_LE(pool.bytes_kept(), 64 * kMiB + 2 * 64 * kMiB);
        EXPECT_LE(pool.bytes_held(), 64 * kMiB + 2 * 64 * kMiB + small);
        // Pieces of other sizes are cut from an arena's, so it is bounded, too.
        EXPECT_LE(arena.bytes_held(), 2 * (64 * kMiB + 2 * 64 * kMiB));
      }
      pool.keep(0);
      EXPECT_LE(pool.bytes_held(), small);
    }
}

// What is large and not wanted any more goes, while small ones are used.
TEST(Buffers, WhatNobodyWantsAnyMoreGoesBack) {
  BufferPool pool;
  {
    Buffer large[4];
    for (Buffer& b : large) ASSERT_EQ(pool.get(48 * kMiB, &b), FRUGAL_OK);
  }
  EXPECT_EQ(pool.bytes_held(), 4 * 48 * kMiB);
  for (int i = 0; i < 8000 && pool.bytes_held() > 66 * kMiB; ++i) {
    Buffer b;
    ASSERT_EQ(pool.get(2 * kMiB, &b), FRUGAL_OK);
  }
  EXPECT_LE(pool.bytes_held(), 68 * kMiB);
}

// A buffer that was large once goes when later steps did without it, or when its user has left.
TEST(Buffers, WhatTheLastStepsDidNotUseGoesBack) {
  for (const bool shared : {false, true})
    for (const bool steps : {false, true}) {
      SCOPED_TRACE(testing::Message() << "shared " << shared << ", steps " << steps);
      MemoryBudget budget;
      Arena arena;
      BufferPool pool;
      pool.count_in(&budget);
      if (shared) {
        ASSERT_EQ(arena.open(size_t{4} << 30), FRUGAL_OK);
        arena.count_in(&budget);
        pool.cut_from(&arena);
      }
      Buffer used[3];
      for (Buffer& b : used) ASSERT_EQ(pool.get(100 * kMiB, &b), FRUGAL_OK);
      EXPECT_EQ(budget.used.load(), 0u);
      for (Buffer& b : used) b.reset();
      EXPECT_GE(pool.bytes_kept(), 300 * kMiB) << "the next step may want it";
      EXPECT_EQ(budget.used.load(), pool.bytes_kept());
      if (!steps) pool.rest();
      for (int step = 0; steps && step < 48; ++step) {
        Buffer b;
        ASSERT_EQ(pool.get(3 * kMiB, &b), FRUGAL_OK);
        pool.end_step();
      }
      EXPECT_LE(pool.bytes_held(), 70 * kMiB);
      EXPECT_LE(arena.bytes_held(), 70 * kMiB);
      EXPECT_EQ(budget.used.load(), pool.bytes_kept());
    }
}

// All of a segment is there as long as a buffer in it is in use. Later it goes.
TEST(Buffers, WhatWasInTheWayGoesBackLater) {
  Arena arena;
  BufferPool pool;
  ASSERT_EQ(arena.open(size_t{4} << 30), FRUGAL_OK);
  pool.cut_from(&arena);
  Buffer used[64];
  for (Buffer& b : used) ASSERT_EQ(pool.get(8 * kMiB, &b), FRUGAL_OK);
  Buffer& last = used[63];  // its segment has a quarter of what there was
  for (Buffer& b : used)
    if (&b != &last) b.reset();
  auto steps = [&] {
    for (int i = 0; i < 64; ++i) pool.end_step();
  };
  steps();
  EXPECT_EQ(pool.bytes_held(), 8 * kMiB);
  EXPECT_GT(arena.bytes_held(), 48 * kMiB);
  last.reset();
  EXPECT_EQ(pool.bytes_held(), 8 * kMiB) << "it is kept";
  steps();
  EXPECT_EQ(arena.bytes_held(), 0u);
}

// A job whose steps use much every now and then, and always the same, takes nothing new.
TEST(Buffers, WhatStepsUseAgainStays) {
  Arena arena;
  BufferPool pool;
  ASSERT_EQ(arena.open(size_t{4} << 30), FRUGAL_OK);
  pool.cut_from(&arena);
  size_t before = 0;
  for (int step = 0; step < 200; ++step) {
    Buffer b[4];
    for (size_t i = 0; i < 4 && step % 12 == 0; ++i)
      ASSERT_EQ(pool.get((20 + 9 * i) * kMiB, &b[i]), FRUGAL_OK);
    pool.end_step();
    if (step == 0) before = arena.bytes_held();
    ASSERT_EQ(arena.bytes_held(), before) << step;
  }
  EXPECT_GE(before, (20 + 29 + 38 + 47) * kMiB);
}

TEST(Buffers, EachPoolMakesRoom) {
  MemoryBudget budget;
  budget.limit = 64 * kMiB;
  BufferPool first, second;
  for (BufferPool* pool : {&first, &second}) {
    pool->count_in(&budget);
    Buffer b;
    ASSERT_EQ(pool->get(20 * kMiB, &b), FRUGAL_OK);
  }
  EXPECT_EQ(budget.used.load(), 40 * kMiB);
  EXPECT_TRUE(budget.take(60 * kMiB));
  EXPECT_EQ(first.bytes_held() + second.bytes_held(), 0u);
}

// All memory of an arena that is not in use counts, also between buffers in use.
TEST(Buffers, WhatAnArenaHasLeftCountsAgainstTheBudget) {
  MemoryBudget budget;
  budget.limit = 64 * kMiB;
  Arena arena;
  BufferPool pool;
  pool.count_in(&budget);
  ASSERT_EQ(arena.open(size_t{1} << 30), FRUGAL_OK);
  arena.count_in(&budget);
  pool.cut_from(&arena);
  {
    Buffer small[8];
    for (Buffer& b : small) ASSERT_EQ(pool.get(4 * kMiB, &b), FRUGAL_OK);
    for (int i = 0; i < 7; ++i) small[i].reset();
    EXPECT_EQ(budget.used.load(), 28 * kMiB);
    pool.keep(0);
    EXPECT_EQ(pool.bytes_held(), 4 * kMiB);
    EXPECT_EQ(arena.bytes_held(), 32 * kMiB);
    EXPECT_EQ(budget.used.load(), 28 * kMiB);
    // It gives way to nothing as long as one of them is in use, and that is said as the limit.
    EXPECT_FALSE(budget.take(40 * kMiB));
    EXPECT_EQ(budget.left_text(), "37748736 of 67108864 bytes (idle shared buffers have 29360128)");
    EXPECT_TRUE(budget.take(36 * kMiB));
  }
  // Where the budget has no room nothing is kept, and the last one gives all of it back.
  EXPECT_EQ(pool.bytes_held(), 0u);
  EXPECT_EQ(arena.bytes_held(), 0u);
  EXPECT_EQ(budget.used.load(), 36 * kMiB);
}

TEST(Buffers, AStepTakesNothingNew) {
  BufferPool pool;
  std::mt19937_64 random(1);
  std::vector<size_t> sizes;
  for (int i = 0; i < 60; ++i) sizes.push_back(random() % (3 * kMiB) + 1);
  size_t held = 0;
  for (int step = 0; step < 200; ++step) {
    std::shuffle(sizes.begin(), sizes.end(), random);
    std::vector<Buffer> of_step(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) ASSERT_EQ(pool.get(sizes[i], &of_step[i]), FRUGAL_OK);
    if (step == 0) held = pool.bytes_held();
    ASSERT_EQ(pool.bytes_held(), held) << "step " << step;
  }
  EXPECT_EQ(pool.bytes_kept(), held);
}

TEST(Buffers, CountAgainstABudget) {
  MemoryBudget budget;
  budget.limit = 40 * kMiB;
  BufferPool pool;
  pool.count_in(&budget);
  {
    Buffer a, b;
    ASSERT_EQ(pool.get(32 * kMiB, &a), FRUGAL_OK);
    ASSERT_EQ(pool.get(16 * kMiB, &b), FRUGAL_OK);
    EXPECT_EQ(budget.used.load(), 0u) << "what is in use does not count";
  }
  EXPECT_EQ(budget.used.load(), pool.bytes_kept());
  EXPECT_EQ(pool.bytes_held(), pool.bytes_kept());
  EXPECT_LE(budget.used.load(), budget.limit);
  EXPECT_GE(budget.used.load(), 16 * kMiB);
  // A table comes first.
  EXPECT_TRUE(budget.take(40 * kMiB));
  EXPECT_EQ(pool.bytes_held(), 0u);
  EXPECT_FALSE(budget.take(1));
  {
    Buffer a;
    ASSERT_EQ(pool.get(kMiB, &a), FRUGAL_OK);
  }
  EXPECT_EQ(pool.bytes_held(), 0u);
  budget.give(40 * kMiB);
  EXPECT_EQ(budget.used.load(), 0u);
}

// Lists of the pool, and of its arena, need memory, too: a lack of it is reported like any other.
TEST(Buffers, WithoutMemoryThereIsAStatus) {
  for (const bool shared : {false, true})
    for (const size_t bytes : {size_t{100}, 3 * kMiB}) {
      SCOPED_TRACE(testing::Message() << bytes << " bytes, shared " << shared);
      Arena arena;
      ASSERT_EQ(arena.open(size_t{64} << 20), FRUGAL_OK);
      WithoutMemory without;
      while (without.next()) {
        BufferPool pool;
        if (shared) pool.cut_from(&arena);
        Buffer b;
        Status s = FRUGAL_OK;
        ASSERT_EQ(without([&] { return s = pool.get(bytes, &b); }), s);
        EXPECT_EQ(static_cast<bool>(b), s == FRUGAL_OK);
        if (s != FRUGAL_OK) {
          EXPECT_NE(LastMessage().find("bytes"), std::string::npos) << LastMessage();
          EXPECT_EQ(pool.bytes_held(), 0u);
          ASSERT_EQ(pool.get(bytes, &b), FRUGAL_OK);
        }
      }
      EXPECT_GT(without.rounds(), 1);
    }
}

// Attached processes read it when the engine is gone.
TEST(Buffers, WhatIsLeftStays) {
  Arena arena;
  ASSERT_EQ(arena.open(size_t{1} << 30), FRUGAL_OK);
  const char* there;
  {
    BufferPool pool;
    pool.cut_from(&arena);
    Buffer b;
    ASSERT_EQ(pool.get(8 * kMiB, &b), FRUGAL_OK);
    std::memset(b.data(), 7, 8 * kMiB);
    there = b.data();
    pool.leave();
    b.reset();
    pool.keep(0);
  }
  EXPECT_EQ(there[0], 7);
  EXPECT_EQ(there[8 * kMiB - 1], 7);
}

}  // namespace frugal::buffer_test
