// Buffers that are kept for later: what they are used again for, and how much of them stays.
#include "base/buffer.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/arena.h"
#include "support/inside.h"

namespace frugal {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Sizes of which each is wanted once: a few a power of two, as of reads of ever other numbers of
// rows.
std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (double bytes = 64.0 * kMiB; bytes > 1000; bytes *= 0.82)
    sizes.push_back(static_cast<size_t>(bytes));
  return sizes;
}

size_t Blocks(int fd) {
  struct stat info {};
  EXPECT_EQ(fstat(fd, &info), 0);
  return static_cast<size_t>(info.st_blocks) * 512;
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
      for (int round = 0; round < 12; ++round) {
        size_t all = 0;
        for (size_t bytes : sizes) {
          Buffer b;
          ASSERT_EQ(pool.get(bytes, &b), FRUGAL_OK);
          std::memset(b.data(), 1, 1);
          all += b.capacity();
        }
        EXPECT_GT(all, 330 * kMiB);
        EXPECT_LE(pool.bytes_held(), 64 * kMiB + 2 * 64 * kMiB + 6 * kMiB);  // and small ones
        // Shared memory does not go back to the system. Pieces of other sizes are cut from it, so
        // it is bounded, too.
        if (shared) {
          EXPECT_LE(Blocks(arena.mapping().fd), 2 * (64 * kMiB + 2 * 64 * kMiB));
        }
      }
      pool.keep(0);
      EXPECT_LE(pool.bytes_held(), shared ? 12 * kMiB : 0);
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

// An arena's memory stays: no table gets it, and the limit cannot forbid it.
TEST(Buffers, OfAnArenaCountOnceAndMakeNoRoom) {
  MemoryBudget budget;
  budget.limit = 64 * kMiB;
  Arena arena;
  ASSERT_EQ(arena.open(size_t{1} << 30), FRUGAL_OK);
  arena.count_in(&budget);
  BufferPool own, pool;
  own.count_in(&budget);
  pool.cut_from(&arena);
  pool.count_in(&budget);
  {
    Buffer a, b;
    ASSERT_EQ(pool.get(32 * kMiB, &a), FRUGAL_OK);
    ASSERT_EQ(own.get(16 * kMiB, &b), FRUGAL_OK);
    EXPECT_EQ(budget.used.load(), 0u) << "what is in use does not count";
  }
  EXPECT_EQ(budget.used.load(), 48 * kMiB);
  EXPECT_TRUE(budget.take(30 * kMiB)) << "private memory gives way";
  EXPECT_EQ(own.bytes_held(), 0u);
  EXPECT_EQ(pool.bytes_kept(), 32 * kMiB);
  EXPECT_FALSE(budget.take(4 * kMiB));
  pool.keep(0);
  EXPECT_EQ(pool.bytes_held(), 0u);
  EXPECT_EQ(budget.used.load(), 62 * kMiB) << "the arena has it now";
  {
    Buffer a;
    ASSERT_EQ(pool.get(40 * kMiB, &a), FRUGAL_OK);
    EXPECT_EQ(budget.used.load(), 30 * kMiB);
  }
  EXPECT_EQ(pool.bytes_held(), 0u) << "there is no room to keep it";
  EXPECT_EQ(budget.used.load(), 70 * kMiB) << "beyond the limit, for it is there";
  budget.give(30 * kMiB);
}

// Lists of the pool's own, and of its arena's, want memory, too: that is told as all else is.
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

// Processes that are attached look at it when the engine is gone.
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

// Nor is looked again whether the machine has as much to spare.
TEST(Arenas, WhatHasMemoryWantsNoMore) {
  Arena arena;
  ASSERT_EQ(arena.open(128 * kMiB), FRUGAL_OK);
  char *a = nullptr, *b = nullptr, *c = nullptr;
  ASSERT_EQ(arena.take(16 * kMiB, &a), FRUGAL_OK);
  ASSERT_EQ(arena.take(16 * kMiB, &b), FRUGAL_OK);
  arena.put_back(a, 16 * kMiB);
  os_test_fail_after(-1);  // no more can be had
  EXPECT_EQ(arena.take(10 * kMiB, &a), FRUGAL_OK);
  EXPECT_EQ(arena.take(6 * kMiB, &c), FRUGAL_OK);
  arena.put_back(b, 16 * kMiB);  // the last one
  EXPECT_EQ(arena.take(16 * kMiB, &b), FRUGAL_OK);
  std::memset(b, 1, 16 * kMiB);
  arena.put_back(b, 16 * kMiB);
  EXPECT_EQ(arena.take(18 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  EXPECT_EQ(arena.take(18 * kMiB, &b), FRUGAL_OK);
  std::memset(b, 1, 18 * kMiB);
}

TEST(Arenas, WhatIsPutBackCounts) {
  MemoryBudget budget;
  budget.limit = 20 * kMiB;
  Arena arena;
  ASSERT_EQ(arena.open(128 * kMiB), FRUGAL_OK);
  arena.count_in(&budget);
  char *a = nullptr, *b = nullptr, *c = nullptr;
  ASSERT_EQ(arena.take(16 * kMiB, &a), FRUGAL_OK);
  ASSERT_EQ(arena.take(15 * kMiB, &b), FRUGAL_OK);  // takes 16
  EXPECT_EQ(budget.used.load(), 0u);
  arena.put_back(a, 16 * kMiB);
  EXPECT_EQ(budget.used.load(), 16 * kMiB);
  EXPECT_FALSE(budget.take(5 * kMiB));
  ASSERT_EQ(arena.take(10 * kMiB, &a), FRUGAL_OK);  // between others
  EXPECT_EQ(budget.used.load(), 6 * kMiB);
  arena.put_back(b, 15 * kMiB);  // the last one
  EXPECT_EQ(budget.used.load(), 22 * kMiB);
  ASSERT_EQ(arena.take(40 * kMiB, &c), FRUGAL_OK);  // all of that, and new memory
  EXPECT_EQ(budget.used.load(), 0u);
  os_test_fail_after(-1);
  EXPECT_EQ(arena.take(2 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  EXPECT_EQ(budget.used.load(), 0u);
  arena.put_back(c, 40 * kMiB);
  arena.put_back(a, 10 * kMiB);
  EXPECT_EQ(budget.used.load(), 50 * kMiB);
}

TEST(Arenas, PiecesNeitherOverlapNorGetLost) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr size_t kPages = 48;
  Arena arena;
  ASSERT_EQ(arena.open(kPages * kHugePage), FRUGAL_OK);
  struct Piece {
    char* data;
    size_t pages;
  };
  std::vector<Piece> pieces;
  bool used[kPages] = {};
  for (int i = 0; i < 3000; ++i) {
    if (random() % 2 == 0 || pieces.empty()) {
      const size_t pages = random() % 6 + 1;
      char* data = nullptr;
      if (arena.take(pages * kHugePage - random() % 1000, &data) != FRUGAL_OK) continue;
      const size_t first = arena.offset(data) / kHugePage;
      ASSERT_LE(first + pages, kPages);
      for (size_t p = first; p < first + pages; ++p) {
        ASSERT_FALSE(used[p]);
        used[p] = true;
        arena.mapping().base[p * kHugePage] = 1;
      }
      pieces.push_back({data, pages});
    } else {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const Piece gone = pieces.back();
      pieces.pop_back();
      arena.put_back(gone.data, gone.pages * kHugePage);
      for (size_t p = 0; p < gone.pages; ++p) used[arena.offset(gone.data) / kHugePage + p] = false;
    }
  }
  for (const Piece& p : pieces) arena.put_back(p.data, p.pages * kHugePage);
  char* all = nullptr;
  EXPECT_EQ(arena.take(kPages * kHugePage, &all), FRUGAL_OK);
}

}  // namespace
}  // namespace frugal
