// The keys of a declaration become slots, sorted pairs and distinct rows; without memory no part is
// resolved and no slot held.
//
// Keys are at the edges of a table or arbitrary. Keys that another process holds and may change are
// checked when they are copied.
#include "window/part.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "base/arena.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"

namespace frugal::part_test {

constexpr uint64_t kCapacity = 1000;

struct PartTest : testing::Test {
  void SetUp() override {
    for (Rows* rows : {&dense, &hashed})
      ASSERT_OK(rows->open(rows_config(kCapacity, 4, FRUGAL_SGD, rows == &hashed), &budget));
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
      for (const uint64_t bad :
           {capacity, capacity + 1, (uint64_t{1} << 32) + kept, uint64_t{1} << 63,
            (uint64_t{1} << 63) - 1, (uint64_t{1} << 63) + kept, UINT64_MAX}) {
        ids[at] = bad;
        begin_call();
        ASSERT_EQ(end_call(dense_slots(ids.data(), n, nullptr, capacity, slots.data())),
                  FRUGAL_ERR_KEY_OUT_OF_RANGE);
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
          ASSERT_EQ(dense_slots(ids.data(), n, &another, capacity, slots.data()),
                    FRUGAL_ERR_KEY_OUT_OF_RANGE);
        }
      }
    }
  }
}

TEST_F(PartTest, SlotsOfAnotherProcess) {
  const auto adopt = [&](std::vector<uint32_t> slots, bool padded) -> Status {
    Buffer copy;
    if (pool.get(slots.size() * sizeof(uint32_t), &copy) != FRUGAL_OK)
      return FRUGAL_ERR_OUT_OF_MEMORY;
    std::memcpy(copy.data(), slots.data(), slots.size() * sizeof(uint32_t));
    PartRef part = make_part();
    const Status s = part->adopt_keys(dense, std::move(copy), slots.size(), padded, 3);
    // Nothing is left that a caller could take for an array's index.
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
  EXPECT_EQ(part->resolve(pool, dense, Rows::Missing::kReserve, nullptr),
            FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_FALSE(part->slots);
  EXPECT_FALSE(part->resolved());
  EXPECT_EQ(lender.given_back, 0);
  theirs[3] = 999;
  ASSERT_OK(part->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
  EXPECT_EQ(lender.given_back, 1);
  theirs[0] = kCapacity;  // the part reads there no more
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
  // A declaration that was not resolved: the call that uses it takes the keys from it.
  PartRef other = make_part();
  ASSERT_OK(other->take_keys(pool, *part));
  for (PartRef p : {part, other}) {
    ASSERT_OK(p->resolve(pool, hashed, Rows::Missing::kReserve, nullptr));
    EXPECT_EQ(p->distinct, 2u);
    EXPECT_TRUE(p->same_keys(keys, 3));
  }
  EXPECT_EQ(part->slots.as<uint32_t>()[1], other->slots.as<uint32_t>()[1]);
  // A part that is never resolved gives its keys back, too.
  {
    PartRef dropped = make_part();
    ASSERT_OK(
        dropped->adopt_keys(hashed, Buffer::lent(theirs, sizeof theirs, &lender), 3, false, 0));
  }
  EXPECT_EQ(lender.given_back, 2);
}

// The pairs of a part are its positions, each row's ascending, the rows ascending; padding is no
// row.
TEST_F(PartTest, PairsAndRows) {
  Random random(test_seed());
  for (const size_t n : {size_t{0}, size_t{1}, size_t{3}, size_t{64}, size_t{700}, size_t{5000}})
    for (const bool by_key : {false, true})
      for (const bool padded : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << n << " keys, by_key " << by_key << ", padded " << padded);
        const uint64_t padding = by_key ? UINT64_MAX : 7, few = n % 2 ? kCapacity : 50;
        std::vector<uint64_t> ids(n);
        for (uint64_t& id : ids) id = random.one_in(10) ? padding : random.below(few);
        if (!padded)
          for (uint64_t& id : ids) id = id == UINT64_MAX ? 0 : id;
        Rows& table = by_key ? hashed : dense;
        PartRef part = make_part();
        ASSERT_OK(part->take_keys(pool, table, ids.data(), n, padded, padding));
        Vector<uint32_t> created;
        ASSERT_OK(part->resolve(pool, table, Rows::Missing::kCreate, &created));
        ASSERT_TRUE(part->resolved());
        std::map<uint32_t, std::vector<uint32_t>> rows;
        for (size_t i = 0; i < n; ++i) {
          const uint32_t slot = part->slots.as<uint32_t>()[i];
          if (padded && ids[i] == padding) {
            ASSERT_EQ(slot, kNoSlot);
            continue;
          }
          ASSERT_EQ(table.key_of(slot), ids[i]);
          rows[slot].push_back(static_cast<uint32_t>(i));
        }
        ASSERT_EQ(part->distinct, rows.size());
        size_t row = 0, at = 0;
        for (auto& [slot, positions] : rows) {
          ASSERT_EQ(part->row_slots()[row], slot);
          ASSERT_EQ(part->row_start()[row++], at);
          for (uint32_t p : positions)
            ASSERT_EQ(part->pairs.as<uint64_t>()[at++], uint64_t{slot} << 32 | p);
        }
        ASSERT_EQ(part->occurrences, at);
        ASSERT_EQ(part->row_start()[row], at);
        for (uint32_t i = 0; i < RowFinder::kPadding; ++i)
          ASSERT_EQ(part->row_slots()[row + i], UINT32_MAX);
        for (uint32_t slot = 0; slot < kCapacity + 5; ++slot)
          ASSERT_EQ(part->contains(slot), rows.count(slot) == 1);
        // Ids are their slots: the part does not keep them twice.
        EXPECT_EQ(static_cast<bool>(part->keys), by_key && n != 0);
        EXPECT_TRUE(part->same_keys(ids.data(), n));
        EXPECT_FALSE(part->same_keys(ids.data(), n + 1));
        if (n == 0) continue;
        EXPECT_FALSE(part->same_keys(ids.data(), n - 1));
        const size_t other = random.below(n);
        ids[other] ^= uint64_t{1} << (random.one_in(2) ? 40 : 0);
        EXPECT_FALSE(part->same_keys(ids.data(), n)) << other;
      }
}

TEST_F(PartTest, AdoptedKeysAreThePartsAtOnce) {
  const uint64_t keys[] = {5, 6, 5};
  Buffer copy;
  ASSERT_OK(pool.get(sizeof keys, &copy));
  std::memcpy(copy.data(), keys, sizeof keys);
  const char* there = copy.data();
  PartRef part = make_part();
  ASSERT_OK(part->adopt_keys(hashed, std::move(copy), 3, false, 0));
  EXPECT_EQ(part->keys.data(), there);
  EXPECT_TRUE(part->same_keys(keys, 3));
  EXPECT_EQ(part->state.load(), Part::kDeclared);
}

TEST_F(PartTest, KeysOfAnotherPart) {
  const uint64_t ids[] = {5, 999, 5, 3};
  PartRef part = make_part(), other = make_part(), none = make_part(), empty = make_part();
  ASSERT_OK(part->take_keys(pool, dense, ids, 4, true, 3));
  ASSERT_OK(other->take_keys(pool, *part));
  EXPECT_TRUE(other->has_padding && other->padding == 3);
  ASSERT_OK(other->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
  EXPECT_EQ(other->distinct, 2u);
  EXPECT_TRUE(other->same_keys(ids, 4));
  ASSERT_OK(none->take_keys(pool, dense, ids, 0, false, 0));
  ASSERT_OK(empty->take_keys(pool, *none));
  EXPECT_TRUE(empty->same_keys(ids, 0));
}

TEST_F(PartTest, KeysThatArriveLater) {
  PartRef part = make_part();
  ASSERT_OK(part->expect_keys(2, false, 0));
  EXPECT_EQ(part->state.load(), Part::kDownloading);
  EXPECT_EQ(part->expect_keys(UINT32_MAX, false, 0), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(part->take_keys(pool, dense, nullptr, size_t{1} << 32, false, 0),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(part->adopt_keys(dense, Buffer(), UINT32_MAX, false, 0), FRUGAL_ERR_INVALID_ARGUMENT);
  // Ids that come from a device are checked when they are there.
  PartRef ids = make_part();
  ASSERT_OK(ids->expect_keys(2, false, 0));
  ASSERT_OK(pool.get(2 * sizeof(uint64_t), &ids->keys));
  ids->keys.as<uint64_t>()[0] = 1;
  ids->keys.as<uint64_t>()[1] = kCapacity;
  EXPECT_EQ(ids->resolve(pool, dense, Rows::Missing::kReserve, nullptr),
            FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_FALSE(ids->resolved());
  ids->slots.reset();
  ids->keys.as<uint64_t>()[1] = 0;
  ASSERT_OK(ids->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
  EXPECT_EQ(ids->distinct, 2u);
  EXPECT_FALSE(ids->keys);
}

// A bad id leaves nothing usable, and a full table leaves no row.
TEST_F(PartTest, KeysThatCannotBe) {
  const uint64_t bad[] = {1, kCapacity};
  PartRef part = make_part();
  EXPECT_EQ(part->take_keys(pool, dense, bad, 2, false, 0), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  std::vector<uint64_t> many(kCapacity + 1);
  for (size_t i = 0; i < many.size(); ++i) many[i] = i * 3;
  PartRef full = make_part();
  ASSERT_OK(full->take_keys(pool, hashed, many.data(), many.size(), false, 0));
  Vector<uint32_t> created;
  EXPECT_EQ(full->resolve(pool, hashed, Rows::Missing::kCreate, &created), FRUGAL_ERR_TABLE_FULL);
  EXPECT_FALSE(full->resolved());
  EXPECT_TRUE(created.empty());
  EXPECT_EQ(hashed.count(), 0u);
}

TEST_F(PartTest, WithoutMemoryNothingIsResolved) {
  std::vector<uint64_t> ids(3 * kCapacity);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i % 900;
  WithoutMemory without;
  while (without.next()) {
    BufferPool fresh;
    PartRef part = make_part();
    const Status s = without([&] {
      FRUGAL_TRY(part->take_keys(fresh, dense, ids.data(), ids.size(), false, 0));
      return part->resolve(fresh, dense, Rows::Missing::kReserve, nullptr);
    });
    ASSERT_EQ(part->resolved(), s == FRUGAL_OK) << without.rounds();
    // A second request gets it.
    if (s != FRUGAL_OK && part->slots) {
      ASSERT_OK(part->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
    }
  }
  EXPECT_GT(without.rounds(), 4);
}

// Nor is a slot held for what was not resolved. Where buffers are cut from an arena, its lists need
// memory, too: those of so many keys are pieces of their own.
TEST_F(PartTest, WithoutMemoryNoPlaceIsHeld) {
  std::vector<uint64_t> keys(kHugePage / sizeof(uint32_t) + 1);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 900;
  for (const bool shared : {false, true}) {
    Arena arena;
    ASSERT_OK(arena.open(64 * kHugePage));
    WithoutMemory without;
    while (without.next()) {
      BufferPool fresh;
      if (shared) fresh.cut_from(&arena);
      PartRef part = make_part();
      ASSERT_OK(part->take_keys(pool, hashed, keys.data(), keys.size(), false, 0));
      const Status s =
          without([&] { return part->resolve(fresh, hashed, Rows::Missing::kReserve, nullptr); });
      ASSERT_EQ(part->resolved(), s == FRUGAL_OK) << without.rounds();
      ASSERT_EQ(hashed.has_reserved(), s == FRUGAL_OK) << without.rounds();
      if (s == FRUGAL_OK) part->release_hold(hashed);
      ASSERT_FALSE(hashed.has_reserved());
    }
    EXPECT_GT(without.rounds(), 3);
  }
}

// Each row of a list is found, and no other.
TEST_F(PartTest, RowsAreFound) {
  Random random(test_seed());
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{15}, size_t{16}, size_t{17},
                         size_t{100}, size_t{3000}})
    for (const uint64_t most : {uint64_t{n + 1}, uint64_t{100000}, uint64_t{UINT32_MAX} - 2}) {
      SCOPED_TRACE(testing::Message() << n << " rows below " << most);
      if (most <= n) continue;
      std::set<uint32_t> chosen;
      // Crowds, as of ids that are handed out in turn, and lonely ones.
      while (chosen.size() < n) {
        const uint64_t from = random.below(most), crowd = 1 + random.below(40);
        for (uint64_t i = 0; i < crowd && chosen.size() < n; ++i)
          chosen.insert(static_cast<uint32_t>((from + i) % most));
      }
      const PartRef part = resolved_part(pool, 0, 0, Slots(chosen.begin(), chosen.end()));
      const RowFinder& finder = part->finder;
      ASSERT_EQ(finder.built(), n != 0);
      if (n == 0) continue;
      uint32_t row = 0;
      for (uint32_t slot : chosen)
        ASSERT_EQ(RowFinder::find(part->row_slots(), finder.near(slot), slot), row++);
      for (int i = 0; i < 1000; ++i) {
        const auto slot = static_cast<uint32_t>(random.below(most));
        if (chosen.count(slot)) continue;
        ASSERT_EQ(RowFinder::find(part->row_slots(), finder.near(slot), slot), UINT32_MAX) << slot;
      }
      ASSERT_EQ(RowFinder::find(part->row_slots(), finder.near(UINT32_MAX - 1), UINT32_MAX - 1),
                UINT32_MAX);
    }
}

}  // namespace frugal::part_test
