// Memory that other processes read returns to the system after its last reader, stays in few
// segments, and counts against the limit meanwhile.
//
// Also: parts of another process's mapping.
#include "base/arena.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <vector>

#include "base/buffer.h"
#include "process/proc.h"
#include "support/inside.h"

namespace frugal::arena_test {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kRange = size_t{16} << 30;

TEST(Arenas, WhatNobodyHasGoesBack) {
  const long before = shared_kib(), files = descriptors_of(getpid());
  MemoryBudget budget;
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  arena.count_in(&budget);
  const std::vector<size_t> sizes = {2, 80, 160, 5, 80, 3, 20};
  for (int round = 0; round < 2; ++round) {
    std::vector<char*> taken;
    size_t all = 0;
    for (size_t mib : sizes) {
      char* data = nullptr;
      ASSERT_OK(arena.take(mib * kMiB, &data));
      EXPECT_EQ(data[mib * kMiB - 1], 0) << "it is new memory";
      std::memset(data, 1, mib * kMiB);
      taken.push_back(data);
      all += (mib + 1) / 2 * 2;
    }
    EXPECT_EQ(arena.bytes_held(), all * kMiB);
    EXPECT_EQ(budget.idle.load(), 0u);
    EXPECT_GE(shared_kib(), before + static_cast<long>(all << 10));
    // The large ones, while the small ones stay.
    for (size_t i : {size_t{1}, size_t{2}, size_t{4}, size_t{6}})
      arena.put_back(taken[i], sizes[i] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
    EXPECT_LE(shared_kib(), before + (14 << 10));
    // Small memory stays until none of it is in use, and counts meanwhile.
    arena.put_back(taken[3], sizes[3] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
    EXPECT_EQ(budget.idle.load(), 6 * kMiB);
    for (size_t i : {size_t{0}, size_t{5}}) arena.put_back(taken[i], sizes[i] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 0u);
    EXPECT_EQ(budget.idle.load(), 0u);
    EXPECT_LE(shared_kib(), before + (2 << 10));
    EXPECT_EQ(descriptors_of(getpid()), files);
  }
}

TEST(Arenas, ManyPiecesAreInFewSegments) {
  const long files = descriptors_of(getpid());
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  std::vector<std::pair<char*, size_t>> taken;
  for (int i = 0; i < 160; ++i) {
    taken.emplace_back(nullptr, (i % 2 ? 2 : 8) * kMiB);
    ASSERT_OK(arena.take(taken.back().second, &taken.back().first));
  }
  EXPECT_LE(descriptors_of(getpid()), files + 24);
  for (auto [data, bytes] : taken) arena.put_back(data, bytes);
  EXPECT_EQ(arena.bytes_held(), 0u);
  EXPECT_EQ(descriptors_of(getpid()), files);
}

// A thread that still has an address of released memory does not see what comes after it.
TEST(Arenas, AddressesAreNotUsedAgainSoon) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  std::map<const char*, int> seen;
  for (int i = 0; i < 50; ++i) {
    char* data = nullptr;
    ASSERT_OK(arena.take(16 * kMiB, &data));
    EXPECT_EQ(seen[data]++, 0);
    arena.put_back(data, 16 * kMiB);
  }
  // But where there are no others.
  Arena small;
  ASSERT_OK(small.open(40 * kMiB));
  for (int i = 0; i < 5; ++i) {
    char* data = nullptr;
    ASSERT_OK(small.take(24 * kMiB, &data));
    small.put_back(data, 24 * kMiB);
  }
  char* data = nullptr;
  EXPECT_EQ(small.take(48 * kMiB, &data), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("50331648 bytes more"), std::string::npos) << LastMessage();
}

// Nor is it checked again whether the machine has that much to spare.
TEST(Arenas, WhatHasMemoryWantsNoMore) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr, *c = nullptr;
  ASSERT_OK(arena.take(6 * kMiB, &a));
  ASSERT_OK(arena.take(6 * kMiB, &b));
  arena.put_back(a, 6 * kMiB);
  os_test_fail_after(-1);  // no more can be had
  EXPECT_EQ(arena.take(4 * kMiB, &a), FRUGAL_OK);
  EXPECT_EQ(arena.take(2 * kMiB, &c), FRUGAL_OK);
  std::memset(a, 1, 4 * kMiB);
  arena.put_back(b, 6 * kMiB);
  EXPECT_EQ(arena.take(6 * kMiB, &b), FRUGAL_OK);
  arena.put_back(b, 6 * kMiB);
  EXPECT_EQ(arena.take(7 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(arena.take(18 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
  EXPECT_EQ(arena.take(7 * kMiB, &b), FRUGAL_OK);
  std::memset(b, 1, 7 * kMiB);
}

// A part of another's mapping: its memory stays, and is used again by pieces of any size.
TEST(Arenas, OverAMapping) {
  Mapping m;
  ASSERT_OK(os_reserve(64 * kMiB, true, &m, true));
  Arena arena;
  arena.over(m, 8 * kMiB, 48 * kMiB);
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(32 * kMiB, &a));
  EXPECT_EQ(arena.offset(a), 8 * kMiB);
  std::memset(a, 1, 32 * kMiB);
  arena.put_back(a, 32 * kMiB);
  EXPECT_EQ(arena.bytes_held(), 32 * kMiB);
  ASSERT_OK(arena.take(2 * kMiB, &a));
  ASSERT_OK(arena.take(30 * kMiB, &b));
  EXPECT_EQ(b[0], 1);
  EXPECT_EQ(arena.bytes_held(), 32 * kMiB);
  EXPECT_EQ(arena.take(18 * kMiB, &a), FRUGAL_ERR_OUT_OF_MEMORY);
  ASSERT_OK(arena.take(16 * kMiB, &a));
  EXPECT_EQ(arena.offset(a), 40 * kMiB);
  os_release(&m);
}

}  // namespace frugal::arena_test
