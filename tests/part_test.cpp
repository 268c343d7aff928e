// The keys of a declaration: ids become slots, and those of another process are looked at when they are copied.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "window/part.h"

namespace frugal {
namespace {

#define ASSERT_OK(call) ASSERT_EQ((call), FRUGAL_OK)

constexpr uint64_t kCapacity = 1000;

struct PartTest : testing::Test {
  void SetUp() override {
    for (Rows* rows : {&dense, &hashed}) {
      Rows::Config c;
      c.capacity = kCapacity;
      c.hashed = rows == &hashed;
      c.layout = RowLayout::of(4, FRUGAL_SGD);
      c.init = arith::init_spec(FRUGAL_INIT_CONSTANT, 0, 0, kCapacity, 4, 1, FRUGAL_SGD, 0);
      ASSERT_OK(rows->open(c, &budget));
    }
    ASSERT_OK(dense.initialize_range(0, kCapacity));
  }
  MemoryBudget budget;
  Rows dense, hashed;
  BufferPool pool;
};

struct Lender : Buffer::Owner {
  void give_back(char*, size_t) noexcept override { ++given_back; }
  int given_back = 0;
};

TEST_F(PartTest, SlotsOfIds) {
  std::mt19937_64 random(7);
  for (size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{7}, size_t{64}, size_t{1001}}) {
    for (const uint64_t capacity : {uint64_t{1}, uint64_t{1000}, (uint64_t{1} << 32) - 3}) {
      std::vector<uint64_t> ids(n);
      for (uint64_t& id : ids) id = random() % capacity;
      const uint64_t last = capacity - 1;
      if (n) ids[n / 2] = last;
      std::vector<uint32_t> slots(n);
      ASSERT_OK(dense_slots(ids.data(), n, nullptr, capacity, slots.data()));
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(slots[i], ids[i]);
      if (n == 0) continue;
      const size_t at = random() % n;
      const uint64_t kept = ids[at];
      for (const uint64_t bad : {capacity, capacity + 1, (uint64_t{1} << 32) + kept, uint64_t{1} << 63,
                                 (uint64_t{1} << 63) - 1, (uint64_t{1} << 63) + kept, UINT64_MAX}) {
        ids[at] = bad;
        begin_call();
        ASSERT_EQ(end_call(dense_slots(ids.data(), n, nullptr, capacity, slots.data())), FRUGAL_ERR_KEY_OUT_OF_RANGE);
        frugal_error error;
        last_error(&error);
        ASSERT_EQ(check_dense_ids(ids.data(), n, nullptr, capacity), FRUGAL_ERR_KEY_OUT_OF_RANGE);
        const std::string position = "at position " + std::to_string(at) + ":";
        ASSERT_NE(std::strstr(error.message, position.c_str()), nullptr) << error.message;
        // No id at all where it is the padding.
        ASSERT_OK(dense_slots(ids.data(), n, &bad, capacity, slots.data()));
        ASSERT_OK(check_dense_ids(ids.data(), n, &bad, capacity));
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(slots[i], ids[i] == bad ? kNoSlot : ids[i]);
        const uint64_t another = bad - 1;
        if (another >= capacity) {
          ASSERT_EQ(dense_slots(ids.data(), n, &another, capacity, slots.data()), FRUGAL_ERR_KEY_OUT_OF_RANGE);
        }
      }
    }
  }
}

TEST_F(PartTest, SlotsOfAnotherProcess) {
  const auto adopt = [&](std::vector<uint32_t> slots, bool padded) -> Status {
    Buffer copy;
    if (pool.get(slots.size() * sizeof(uint32_t), &copy) != FRUGAL_OK) return FRUGAL_ERR_OUT_OF_MEMORY;
    std::memcpy(copy.data(), slots.data(), slots.size() * sizeof(uint32_t));
    PartRef part = make_part();
    const Status s = part->adopt_keys(dense, std::move(copy), slots.size(), padded, 3);
    // Nothing is left that somebody could take for an array's index.
    EXPECT_EQ(static_cast<bool>(part->slots), s == FRUGAL_OK);
    return s;
  };
  EXPECT_EQ(adopt({0, 999, 5}, false), FRUGAL_OK);
  EXPECT_EQ(adopt({0, 1000, 5}, false), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(adopt({0, kMissingSlot}, false), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(adopt({kNoSlot, 1}, false), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(adopt({kNoSlot, 1}, true), FRUGAL_OK);
  EXPECT_EQ(adopt({kNoSlot, 1000}, true), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(adopt({kNoSlot, kMissingSlot}, true), FRUGAL_ERR_KEY_OUT_OF_RANGE);
}

TEST_F(PartTest, LentSlotsAreLookedAtWhenTheyAreCopied) {
  Lender lender;
  uint32_t theirs[4] = {7, 1, 7, 2};
  PartRef part = make_part();
  ASSERT_OK(part->adopt_keys(dense, Buffer::lent(theirs, sizeof theirs, &lender), 4, false, 0));
  theirs[3] = kCapacity;  // after the declaration
  EXPECT_EQ(part->resolve(pool, dense, Rows::Missing::kReserve, nullptr), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_FALSE(part->slots);
  EXPECT_FALSE(part->resolved());
  EXPECT_EQ(lender.given_back, 0);
  theirs[3] = 999;
  ASSERT_OK(part->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
  EXPECT_EQ(lender.given_back, 1);
  theirs[0] = kCapacity;  // nobody looks there any more
  const uint64_t keys[] = {7, 1, 7, 999};
  EXPECT_TRUE(part->resolved() && part->same_keys(keys, 4));
  EXPECT_EQ(part->distinct, 3u);
  EXPECT_EQ(part->row_slots()[2], 999u);
}

TEST_F(PartTest, LentKeysAreCopiedOnce) {
  Lender lender;
  uint64_t theirs[3] = {70, UINT64_MAX, 70};
  const uint64_t keys[] = {70, UINT64_MAX, 70};
  PartRef part = make_part();
  ASSERT_OK(part->adopt_keys(hashed, Buffer::lent(theirs, sizeof theirs, &lender), 3, false, 0));
  ASSERT_OK(part->take_lent(pool, hashed));
  EXPECT_EQ(lender.given_back, 1);
  theirs[0] = theirs[1] = 5;
  // A declaration that was not resolved: whoever uses it takes the keys from it.
  PartRef other = make_part();
  ASSERT_OK(other->take_keys(pool, *part));
  for (PartRef p : {part, other}) {
    ASSERT_OK(p->resolve(pool, hashed, Rows::Missing::kReserve, nullptr));
    EXPECT_EQ(p->distinct, 2u);
    EXPECT_TRUE(p->same_keys(keys, 3));
  }
  EXPECT_EQ(part->slots.as<uint32_t>()[1], other->slots.as<uint32_t>()[1]);
  // Who never resolves gives back, too.
  {
    PartRef dropped = make_part();
    ASSERT_OK(dropped->adopt_keys(hashed, Buffer::lent(theirs, sizeof theirs, &lender), 3, false, 0));
  }
  EXPECT_EQ(lender.given_back, 2);
}

}  // namespace
}  // namespace frugal
