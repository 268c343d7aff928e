// The key index agrees with a map: keys that share a bucket, the table's end, growth, deletion, and
// memory that is refused.
#include "storage/key_index.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "support/inside.h"

namespace frugal::key_index_test {

using Keys = std::vector<uint64_t>;

constexpr uint64_t kAtFirst =
    (uint64_t{2} << 20) / 64 * 4;  // keys that a new index of any larger capacity holds

// The key whose hash is `hash`: the steps of KeyIndex::hash, backwards. Buckets are in the order of
// hashes.
uint64_t key_of_hash(uint64_t hash) {
  const auto inverse = [](uint64_t odd) {
    uint64_t x = odd;
    for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
    return x;
  };
  hash ^= hash >> 33;
  hash *= inverse(0xc4ceb9fe1a85ec53ull);
  hash ^= hash >> 33;
  hash *= inverse(0xff51afd7ed558ccdull);
  return hash ^ (hash >> 33);
}

struct KeyIndexTest : testing::Test {
  void insert(uint64_t key, uint32_t slot) {
    ASSERT_OK(index.make_room(1));
    index.insert(key, slot);
    model[key] = slot;
  }
  void erase(uint64_t key) {
    index.erase(key);
    model.erase(key);
  }
  void check(const Keys& absent) {
    ASSERT_EQ(index.size(), model.size());
    Keys keys = absent;
    for (auto& [key, slot] : model) keys.push_back(key);
    std::shuffle(keys.begin(), keys.end(), random.engine);
    std::vector<uint32_t> slots(keys.size() + 1, 12345);
    index.find(keys.data(), keys.size(), slots.data());
    for (size_t i = 0; i < keys.size(); ++i) {
      auto at = model.find(keys[i]);
      ASSERT_EQ(slots[i], at == model.end() ? KeyIndex::kNone : at->second)
          << "key " << keys[i] << " of many";
      if (i % 7 == 0) {
        ASSERT_EQ(index.find(keys[i]), slots[i]) << "key " << keys[i];
      }
    }
    ASSERT_EQ(slots.back(), 12345u);
  }
  MemoryBudget budget;
  KeyIndex index;
  std::unordered_map<uint64_t, uint32_t> model;
  Random random{test_seed()};
};

TEST_F(KeyIndexTest, AnyKeyIsAKey) {
  ASSERT_OK(index.open(1000, &budget));
  EXPECT_EQ(index.find(0), KeyIndex::kNone);
  const Keys keys = {0, 1, UINT64_MAX, UINT64_MAX - 1, uint64_t{1} << 63};
  check(keys);
  uint32_t slot = 0;
  for (uint64_t key : keys) insert(key, slot++);
  check({2, 3});
  // The last slot that a table may have.
  insert(77, UINT32_MAX - 2);
  check({});
  for (uint64_t key : keys) erase(key);
  check(keys);
  index.find(nullptr, 0, nullptr);
}

// Keys with one home bucket: five are in it, and the others pass it. Erasing keys between them
// hides no key.
TEST_F(KeyIndexTest, KeysOfOneBucket) {
  ASSERT_OK(index.open(100000, &budget));
  const uint64_t last = ~uint64_t{0};
  // One in the middle of the table, and its last bucket, from which they go on at the beginning.
  for (const uint64_t first : {uint64_t{1} << 63, last - 399}) {
    Keys keys;
    for (uint64_t i = 0; i < 400; ++i) keys.push_back(key_of_hash(first + i));
    for (size_t n : {size_t{1}, size_t{5}, size_t{6}, size_t{40}, size_t{200}}) {
      while (model.size() < n) insert(keys[model.size()], static_cast<uint32_t>(model.size()));
      check(keys);
    }
    for (int i = 0; i < 3000; ++i) {
      const uint64_t key = keys[random.below(keys.size())];
      if (model.count(key))
        erase(key);
      else
        insert(key, static_cast<uint32_t>(random.below(1000)));
      if (i % 100 == 0) check(keys);
    }
    while (!model.empty()) erase(model.begin()->first);
    check(keys);
  }
}

TEST_F(KeyIndexTest, RandomKeys) {
  ASSERT_OK(index.open(4 * kAtFirst, &budget));
  Keys gone;
  uint32_t slot = 0;
  while (model.size() < kAtFirst + 1000) {
    const uint64_t key = random();
    if (!model.count(key)) insert(key, slot++);
    if (slot % 3 == 0) {
      auto at = model.begin();
      gone.push_back(at->first);
      erase(gone.back());
    }
  }
  EXPECT_GT(index.memory_bytes(), uint64_t{2} << 20) << "it has grown";
  check(gone);
  EXPECT_EQ(budget.used.load(), index.memory_bytes());
}

// Grows to its capacity, and never takes more than it says, both copies counted.
TEST_F(KeyIndexTest, GrowsWithinItsBytes) {
  for (const uint64_t capacity : {uint64_t{0}, uint64_t{1}, kAtFirst, kAtFirst + 1, 3 * kAtFirst}) {
    SCOPED_TRACE(capacity);
    const uint64_t most = KeyIndex::peak_bytes(capacity);
    MemoryBudget limit;
    limit.limit = most;
    {
      KeyIndex full;
      ASSERT_OK(full.open(capacity, &limit));
      for (uint64_t i = 0; i < capacity; ++i) {
        ASSERT_OK(full.make_room(1));
        full.insert(i * 0x9e3779b97f4a7c15ull, static_cast<uint32_t>(i));
      }
      for (uint64_t i = 0; i < capacity; i += 97)
        ASSERT_EQ(full.find(i * 0x9e3779b97f4a7c15ull), i);
      EXPECT_EQ(full.size(), capacity);
      EXPECT_EQ(limit.used.load(), full.memory_bytes());
    }
    EXPECT_EQ(limit.used.load(), 0u);
    if (capacity <= kAtFirst) continue;
    MemoryBudget less;
    less.limit = most - 1;
    KeyIndex refused;
    ASSERT_OK(refused.open(capacity, &less));
    Status s = FRUGAL_OK;
    uint64_t held = 0;
    for (uint64_t i = 0; i < capacity && s == FRUGAL_OK; ++i) {
      s = refused.make_room(1);
      if (s == FRUGAL_OK) refused.insert(i, static_cast<uint32_t>(i)), ++held;
    }
    EXPECT_EQ(s, FRUGAL_ERR_OUT_OF_MEMORY) << "the bytes that it says are the least";
    EXPECT_NE(LastMessage().find("key index"), std::string::npos) << LastMessage();
    EXPECT_EQ(refused.size(), held);
    EXPECT_EQ(less.used.load(), refused.memory_bytes());
    for (uint64_t i = 0; i < held; i += 97) ASSERT_EQ(refused.find(i), i);
  }
}

// Room for many at once, and a system that refuses it: then the index is as it was.
TEST_F(KeyIndexTest, GrowthThatTheSystemRefuses) {
  ASSERT_OK(index.open(8 * kAtFirst, &budget));
  for (uint64_t i = 0; i < 100; ++i) insert(i, static_cast<uint32_t>(i));
  const uint64_t before = index.memory_bytes();
  for (int64_t n = 1; n <= 2; ++n) {  // its addresses, its memory
    SystemFails fails(n);
    EXPECT_EQ(index.make_room(2 * kAtFirst), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_EQ(index.memory_bytes(), before);
    EXPECT_EQ(budget.used.load(), before);
    check({100, 101});
  }
  ASSERT_OK(index.make_room(2 * kAtFirst));
  const uint64_t after = index.memory_bytes();
  EXPECT_GT(after, before);
  SystemFails fails(1);
  for (uint64_t i = 100; i < 2 * kAtFirst; ++i) insert(i, static_cast<uint32_t>(i));
  EXPECT_EQ(index.memory_bytes(), after);
  EXPECT_EQ(index.find(2 * kAtFirst - 1), 2 * kAtFirst - 1);
  KeyIndex other;
  EXPECT_EQ(other.open(10, nullptr), FRUGAL_ERR_OUT_OF_MEMORY);
}

// An index without a budget counts nothing.
TEST_F(KeyIndexTest, WithoutABudget) {
  ASSERT_OK(index.open(2 * kAtFirst, nullptr));
  for (uint64_t i = 0; i < kAtFirst + 1; ++i) insert(i, static_cast<uint32_t>(i));
  check({UINT64_MAX});
}

}  // namespace frugal::key_index_test
