// A hashed table's slots agree with models: free, reserved while held, present; their holders are
// counted without a limit.
//
// Declarations, calls and deletions come and go.
#include "storage/holders.h"

#include <array>
#include <map>
#include <set>
#include <vector>

#include "storage/rows.h"
#include "support/inside.h"

namespace frugal::holders_test {

using Missing = Rows::Missing;

constexpr uint64_t kPiece = Holders::kPiece;

struct HoldersTest : testing::Test {
  void SetUp() override {
    ASSERT_OK(holders.open(100, nullptr));
    ASSERT_OK(holders.ensure(0, 100));
  }
  void hold(uint32_t slot, uint64_t times) {
    for (uint64_t i = 0; i < times; ++i) holders.hold(slot);
  }
  Holders holders;
};

// 4,096 ranks that declare 41 steps ahead, 8 times a step, and one key in each of these.
TEST_F(HoldersTest, CountsHaveNoLargestValue) {
  constexpr uint64_t kAll = uint64_t{4096} * 41 * 8;
  hold(6, 3);
  for (uint64_t i = 1; i <= kAll; ++i) {
    holders.hold(7);
    if (i % 4099 == 0) {
      ASSERT_EQ(holders.count(7), i);
    }
  }
  EXPECT_EQ(holders.count(7), kAll);
  EXPECT_EQ(holders.count(6), 3u) << "of another slot";
  for (uint64_t left = kAll; left-- > 0;) {
    ASSERT_EQ(holders.release_hold(7, 1), left != 0);
    if (left % 4099 == 0) {
      ASSERT_EQ(holders.count(7), left);
    }
  }
  EXPECT_FALSE(holders.held(7));
  EXPECT_TRUE(holders.release_hold(6, 2));
  EXPECT_FALSE(holders.release_hold(6, 1));
}

// At the borders of what lies where, each number of times at once.
TEST_F(HoldersTest, ManyAtOnce) {
  for (uint64_t all = kPiece; all < 6 * kPiece; all += kPiece / 2)
    for (const uint64_t off : {-1, 0, 1})
      for (uint64_t back :
           {uint64_t{1}, kPiece - 1, kPiece, 2 * kPiece - 1, 2 * kPiece, 3 * kPiece, all + off}) {
        back = std::min(back, all + off);
        hold(3, all + off);
        ASSERT_EQ(holders.release_hold(3, back), back != all + off);
        ASSERT_EQ(holders.count(3), all + off - back);
        if (back != all + off) {
          ASSERT_FALSE(holders.release_hold(3, all + off - back));
        }
        ASSERT_FALSE(holders.held(3));
      }
}

TEST_F(HoldersTest, RandomOperations) {
  Random random(test_seed());
  std::array<uint64_t, 4> model{};
  for (int i = 0; i < 2000; ++i) {
    const uint32_t slot = static_cast<uint32_t>(random.below(model.size()));
    uint64_t& count = model[slot];
    if (random.one_in(2)) {
      const uint64_t times = random.below(random.one_in(4) ? 20000 : 5);
      hold(slot, times);
      count += times;
    } else if (count) {
      const uint64_t times =
          random.one_in(4) ? count : 1 + random.below(std::min<uint64_t>(count, 30000));
      count -= times;
      ASSERT_EQ(holders.release_hold(slot, times), count != 0);
    }
    for (uint32_t p = 0; p < model.size(); ++p) {
      ASSERT_EQ(holders.count(p), model[p]);
      ASSERT_EQ(holders.held(p), model[p] != 0);
    }
  }
}

// A large count wants memory: without it nothing is held that was not.
TEST_F(HoldersTest, WithoutMemory) {
  hold(5, 2 * kPiece - 2);
  {
    HeapFails fails(1);
    EXPECT_THROW(holders.hold(5), std::bad_alloc);
    holders.hold(6);
  }
  EXPECT_EQ(holders.count(5), 2 * kPiece - 2);
  holders.hold(5);
  EXPECT_EQ(holders.count(5), 2 * kPiece - 1);
}

// A slot with unknown holders is not released by any of them.
TEST_F(HoldersTest, Unknown) {
  for (const uint64_t before : {uint64_t{0}, uint64_t{5}, 3 * kPiece}) {
    hold(1, before);
    holders.forget(1);
    EXPECT_TRUE(holders.unknown(1) && holders.held(1));
    EXPECT_TRUE(holders.release_hold(1, 10));
    holders.hold(1);
    EXPECT_TRUE(holders.unknown(1));
    for (const uint64_t known :
         {uint64_t{1}, 2 * kPiece - 2, 2 * kPiece - 1, 2 * kPiece, 3 * kPiece - 1, 100 * kPiece}) {
      holders.clear(1);
      EXPECT_FALSE(holders.held(1));
      holders.hold(1, known);
      EXPECT_EQ(holders.count(1), known);
      EXPECT_FALSE(holders.unknown(1));
      EXPECT_FALSE(holders.release_hold(1, known));
    }
  }
}

// --- Places of a table ---------------------------------------------------------------------------

constexpr uint64_t kPadding = 999;

struct SlotMapTest : testing::Test {
  void open(uint64_t capacity) {
    Rows::Config c;
    c.capacity = capacity;
    c.hashed = true;
    c.layout = RowLayout::of(3, FRUGAL_ADAGRAD);
    c.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, capacity, 3, 42, FRUGAL_ADAGRAD, 0.5f);
    ASSERT_OK(rows.open(c, nullptr));
  }
  Status resolve(const std::vector<uint64_t>& keys, Missing missing, std::vector<uint32_t>* slots) {
    slots->assign(keys.size(), 12345);
    return rows.resolve(keys.data(), keys.size(), &kPadding, missing, slots->data(), nullptr);
  }
  float first_value(uint64_t key) const {
    return arith::initial_value(rows.init(),
                                arith::column_bits(arith::row_hash(rows.init().table, key), 0));
  }
  Rows rows;
};

// A key that a call names often holds its place as often; part by part, or row by row.
TEST_F(SlotMapTest, HeldAsOftenAsNamed) {
  open(2);
  std::vector<uint32_t> slots, other;
  ASSERT_OK(resolve({1, kPadding, 1, 2, 1}, Missing::kReserve, &slots));
  const uint32_t distinct[] = {slots[0], slots[3]}, start[] = {0, 2, 3};
  rows.release_hold(distinct, 2, start);
  EXPECT_TRUE(rows.any_reserved(&slots[0], 1));
  EXPECT_FALSE(rows.any_reserved(&slots[3], 1));
  ASSERT_OK(resolve({3}, Missing::kReserve, &other));
  EXPECT_EQ(other[0], slots[3]);
  EXPECT_EQ(resolve({4}, Missing::kReserve, &other), FRUGAL_ERR_TABLE_FULL);
  rows.release_hold(slots.data(), 2);
  ASSERT_OK(resolve({4}, Missing::kReserve, &other));
  EXPECT_EQ(other[0], slots[0]);
}

// Who lets go while another holds takes nothing away.
TEST_F(SlotMapTest, HeldByTwo) {
  open(1);
  std::vector<uint32_t> a, b, none;
  ASSERT_OK(resolve({1}, Missing::kReserve, &a));
  ASSERT_OK(resolve({1}, Missing::kReserve, &b));
  rows.release_hold(a.data(), 1);
  EXPECT_EQ(resolve({2}, Missing::kReserve, &none), FRUGAL_ERR_TABLE_FULL);
  rows.create_reserved(b.data(), 1, nullptr);
  // Undone, or deleted: its place stays while it is held.
  EXPECT_EQ(rows.uncreate(b.data(), 1, true), 1u);
  EXPECT_EQ(resolve({2}, Missing::kReserve, &none), FRUGAL_ERR_TABLE_FULL);
  const uint32_t start[] = {0, 1};
  rows.recount([] { return true; }, [&](auto visit) { visit(b.data(), 1, start); });
  EXPECT_EQ(resolve({2}, Missing::kReserve, &none), FRUGAL_ERR_TABLE_FULL);
  EXPECT_EQ(rows.key_of(b[0]), 1u);
  rows.release_hold(b.data(), 1);
  EXPECT_OK(resolve({2}, Missing::kReserve, &none));
}

// Places become free and others' in any order, whatever memory there is for it.
TEST_F(SlotMapTest, FreeingTakesNoMemory) {
  open(1000);
  std::vector<uint64_t> keys(1000);
  for (uint64_t i = 0; i < keys.size(); ++i) keys[i] = i * 7;
  std::vector<uint32_t> slots;
  ASSERT_OK(resolve(keys, Missing::kReserve, &slots));
  {
    HeapFails fails(-1);
    SystemFails system(-1);
    rows.release_hold(slots.data(), slots.size());
  }
  EXPECT_FALSE(rows.has_reserved());
  for (uint64_t& key : keys) key += 1;
  std::vector<uint32_t> again;
  ASSERT_OK(resolve(keys, Missing::kReserve, &again));
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(again[i], slots[slots.size() - 1 - i]) << "the last one first";
    ASSERT_EQ(rows.key_of(again[i]), keys[i]);
  }
}

// Declarations, calls, undone and deleted rows in any order, against a model of each of them.
TEST_F(SlotMapTest, RandomLives) {
  Random random(test_seed());
  constexpr uint64_t kCapacity = 30, kKeys = 60;
  open(kCapacity);
  struct Holder {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> slots;
  };
  std::vector<Holder> holders;
  std::map<uint64_t, bool> here;  // keys of places that are not free: does the row exist?
  std::map<uint64_t, uint32_t> slot_of;
  uint64_t full = 0, freed = 0;
  auto holds = [&](uint64_t key) {
    for (const Holder& h : holders)
      for (uint64_t k : h.keys)
        if (k == key) return true;
    return false;
  };
  auto look = [&](uint64_t key) {
    auto at = here.find(key);
    if (at == here.end() || at->second || holds(key)) return;
    here.erase(at);
    slot_of.erase(key);
    ++freed;
  };
  for (int i = 0; i < 6000; ++i) {
    const uint64_t what = random.below(8);
    if (what < 3 && holders.size() < 6) {
      Holder h;
      for (uint64_t n = 1 + random.below(9); n-- > 0;)
        h.keys.push_back(random.one_in(9) ? kPadding : random.below(kKeys));
      std::set<uint64_t> wanted;
      for (uint64_t k : h.keys)
        if (k != kPadding && !here.count(k)) wanted.insert(k);
      const Status s = resolve(h.keys, Missing::kReserve, &h.slots);
      if (here.size() + wanted.size() > kCapacity) {
        ASSERT_EQ(s, FRUGAL_ERR_TABLE_FULL);
        ++full;
      } else {
        ASSERT_OK(s);
        for (size_t k = 0; k < h.keys.size(); ++k) {
          if (h.keys[k] == kPadding) {
            ASSERT_EQ(h.slots[k], kNoSlot);
            continue;
          }
          here.emplace(h.keys[k], false);
          const uint32_t slot = slot_of.emplace(h.keys[k], h.slots[k]).first->second;
          ASSERT_EQ(h.slots[k], slot);
        }
        for (auto& [k, slot] : slot_of)
          for (auto& [other, theirs] : slot_of) ASSERT_TRUE(k == other || slot != theirs);
        holders.push_back(std::move(h));
      }
    } else if (what < 5 && !holders.empty()) {
      const size_t n = random.below(holders.size());
      const Holder h = std::move(holders[n]);
      holders.erase(holders.begin() + static_cast<long>(n));
      rows.release_hold(h.slots.data(), h.slots.size());
      for (uint64_t k : h.keys) look(k);
    } else if (what < 7 && !holders.empty()) {
      const Holder& h = holders[random.below(holders.size())];
      const uint64_t step = 100 + random.below(60);
      Vector<uint32_t> created, earlier;
      if (random.one_in(3))
        rows.create_reserved(h.slots.data(), h.slots.size(), nullptr);
      else
        rows.use(h.slots.data(), h.slots.size(), step, 100, &created, &earlier);
      for (uint64_t k : h.keys)
        if (k != kPadding) here[k] = true;
    } else if (!here.empty()) {
      auto at = here.begin();
      std::advance(at, static_cast<long>(random.below(here.size())));
      const uint64_t key = at->first;
      ASSERT_EQ(rows.uncreate(&slot_of[key], 1, random.one_in(2)), at->second);
      const bool existed = at->second;
      at->second = false;
      if (existed) {
        rows.recount([] { return false; }, [](auto) { FAIL(); });
        rows.recount([] { return true; },
                     [&](auto visit) {
                       for (const Holder& h : holders) {
                         std::map<uint32_t, uint32_t> times;
                         for (uint32_t slot : h.slots)
                           if (slot != kNoSlot) ++times[slot];
                         std::vector<uint32_t> distinct, start = {0};
                         for (auto& [slot, n] : times) {
                           distinct.push_back(slot);
                           start.push_back(start.back() + n);
                         }
                         visit(distinct.data(), distinct.size(), start.data());
                       }
                     });
        look(key);
      }
    }
    uint64_t existing = 0;
    for (auto& [key, exists] : here) {
      existing += exists;
      ASSERT_EQ(rows.key_of(slot_of[key]), key);
      ASSERT_EQ(rows.exists(slot_of[key]), exists);
      ASSERT_EQ(rows.values(slot_of[key])[0], first_value(key));
    }
    ASSERT_EQ(rows.count(), existing);
    ASSERT_EQ(rows.has_reserved(), existing != here.size());
  }
  EXPECT_GT(full, 100u);
  EXPECT_GT(freed, 100u);
}

}  // namespace frugal::holders_test
