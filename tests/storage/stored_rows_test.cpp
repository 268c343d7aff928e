// The life of one slot that loads and leaves, with a storage tier that counts its calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "support/inside.h"
#include "support/rows.h"
#include "support/slow_store.h"

namespace frugal::stored_rows_test {

using Missing = Rows::Missing;

// A store that does something, once, when it has written records, or before it reads some.
class Between final : public StorageTier {
 public:
  Between(std::function<void()>* written, std::function<void()>* before, int* listed)
      : written_(written), before_(before), listed_(listed) {}
  bool has(uint64_t key) override { return store_.has(key); }
  void forget(uint64_t key) noexcept override { store_.forget(key); }
  void keys(Vector<uint64_t>* out) override {
    ++*listed_;
    store_.keys(out);
  }
  Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
              const device::RowsRef& to) override {
    if (*before_) std::exchange(*before_, nullptr)();
    return store_.load(keys, slots, n, to);
  }
  Status store(const uint64_t* keys, size_t n, const device::RowsView& from) override {
    const Status s = store_.store(keys, n, from);
    if (*written_) std::exchange(*written_, nullptr)();
    return s;
  }

 private:
  SlowStore store_{1, 0};
  std::function<void()>* const written_;
  std::function<void()>* const before_;
  int* const listed_;
};

class StoredRowsTest : public ::testing::Test {
 protected:
  void open(uint64_t rows, uint64_t slots) {
    Tier tier;
    tier.store = std::make_unique<Between>(&written_, &before_, &listed_);
    tier.slots = slots;
    tier.room = [this] { ++told_; };
    ASSERT_OK(rows_.open(rows_config(rows, 3, FRUGAL_ADAM, true), nullptr, std::move(tier)));
  }
  Status resolve(std::vector<uint64_t> keys, std::vector<uint32_t>* slots,
                 Missing missing = Missing::kReserve) {
    slots->resize(keys.size());
    return rows_.resolve(keys.data(), keys.size(), nullptr, missing, slots->data(), nullptr);
  }
  void release_hold(const std::vector<uint32_t>& slots) {
    rows_.release_hold(slots.data(), slots.size());
  }
  void load() {
    for (bool any = true; any;) ASSERT_OK(rows_.tier()->load_some(&any));
  }
  // A row of the key, with this value and without holders.
  void make(uint64_t key, float value) {
    std::vector<uint32_t> slots;
    ASSERT_OK(resolve({key}, &slots));
    load();
    rows_.create_reserved(slots.data(), 1, nullptr);
    {
      const RowWrite write(rows_, slots.data(), 1, {RowWrite::What::kOutside});
      *write.in_place().row(slots[0]) = value;
      *write.in_place().state_row(slots[0]) = -value;
    }
    release_hold(slots);
  }
  void expect(uint64_t key, float value) {
    std::vector<uint32_t> slots;
    ASSERT_OK(resolve({key}, &slots));
    load();
    EXPECT_EQ(*rows_.values(slots[0]), value);
    EXPECT_EQ(*rows_.state(slots[0]), -value);
    release_hold(slots);
  }
  std::vector<uint64_t> keys() {
    std::vector<uint64_t> all;
    uint64_t cursor = 0, some[3];
    while (const size_t n = rows_.enumerate(&cursor, some, 3))
      all.insert(all.end(), some, some + n);
    return all;
  }

  std::function<void()> written_, before_;  // what the store does
  Rows rows_;
  int told_ = 0, listed_ = 0;  // calls of the tier's room, and of the store's keys()
};

TEST_F(StoredRowsTest, RowsLeaveAndComeBackWithTheirState) {
  open(100, 4);
  for (uint64_t key = 0; key < 20; ++key) make(key, static_cast<float>(key) + 1);
  EXPECT_EQ(rows_.count(), 20);
  EXPECT_EQ(rows_.capacity(), 4);
  EXPECT_EQ(rows_.tier()->store().left, 16);
  for (uint64_t key = 20; key-- > 0;) expect(key, static_cast<float>(key) + 1);
  EXPECT_EQ(rows_.count(), 20);
  std::vector<uint64_t> all(20);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(keys(), all);
}

TEST_F(StoredRowsTest, APlaceThatIsHeldStaysAndACallGetsAllItsPlacesOrNone) {
  open(100, 3);
  for (uint64_t key = 0; key < 5; ++key) make(key, 7);
  std::vector<uint32_t> held, more, other;
  ASSERT_OK(resolve({0, 1, 0}, &held));
  EXPECT_EQ(resolve({1, 2, 3}, &more), FRUGAL_ERR_BUSY);
  EXPECT_TRUE(rows_.tier()->lacking());
  EXPECT_EQ(rows_.tier()->store().refused, 1);
  // A call does not report the slots that it releases itself.
  EXPECT_EQ(told_, 0);
  ASSERT_OK(resolve({4}, &other));
  EXPECT_EQ(rows_.key_of(held[0]), 0);
  EXPECT_EQ(rows_.key_of(held[1]), 1);
  release_hold(other);
  load();
  EXPECT_EQ(told_, 1);
  EXPECT_FALSE(rows_.tier()->lacking());
  EXPECT_EQ(resolve({2, 3}, &more), FRUGAL_ERR_BUSY);
  rows_.release_hold(held.data(), 1);
  EXPECT_EQ(resolve({2, 3}, &more), FRUGAL_ERR_BUSY);  // key 0 was named twice
  rows_.release_hold(held.data() + 2, 1);
  EXPECT_EQ(told_, 2);
  ASSERT_OK(resolve({2, 3}, &more));
  load();
  release_hold(more);
  // More than there are places is never possible.
  EXPECT_EQ(resolve({1, 2, 3, 4}, &other), FRUGAL_ERR_TABLE_FULL);
}

TEST_F(StoredRowsTest, ARowThatIsLoadingExistsForNobody) {
  open(100, 2);
  for (uint64_t key = 0; key < 3; ++key) make(key, 5);
  std::vector<uint32_t> slots, seen;
  ASSERT_OK(resolve({0}, &slots));
  EXPECT_TRUE(rows_.tier()->loading());
  EXPECT_EQ(rows_.tier()->first_loading(slots.data(), 0, 1), 0);
  EXPECT_FALSE(rows_.exists(slots[0]));
  EXPECT_EQ(rows_.count(), 3);
  ASSERT_OK(resolve({0, 2, 9}, &seen, Missing::kLeave));
  EXPECT_EQ(seen[0], kMissingSlot);
  EXPECT_EQ(rows_.key_of(seen[1]), 2);
  EXPECT_EQ(seen[2], kMissingSlot);
  rows_.unhold_backed(seen.data(), 3);
  std::vector<float> copy(64);
  bool there;
  ASSERT_OK(rows_.tier()->read(0, rows_.layout().at(copy.data(), copy.data() + 16), &there));
  EXPECT_TRUE(there);
  EXPECT_EQ(copy[0], 5);
  load();
  EXPECT_TRUE(rows_.exists(slots[0]));
  EXPECT_EQ(rows_.tier()->first_loading(slots.data(), 0, 1), 1);
  release_hold(slots);
}

TEST_F(StoredRowsTest, YoungRowsStayUntilTheirStepIsSettledOrUndone) {
  open(100, 2);
  Vector<uint32_t> created, earlier;
  std::vector<uint32_t> slots, other;
  ASSERT_OK(resolve({1, 2}, &slots));
  rows_.use(slots.data(), 2, 10, 10, &created, &earlier);
  release_hold(slots);
  EXPECT_EQ(resolve({3}, &other), FRUGAL_ERR_BUSY);
  rows_.commit(created.data(), 1, 10);
  EXPECT_EQ(told_, 1);
  rows_.undo(created.data() + 1, 1);
  EXPECT_EQ(rows_.count(), 1);
  ASSERT_OK(resolve({3, 4}, &other));
  EXPECT_EQ(rows_.count(), 1);
  release_hold(other);
  EXPECT_EQ(keys(), std::vector<uint64_t>{1});
}

TEST_F(StoredRowsTest, PutsAndDeletionsWantNoPlace) {
  open(4, 2);
  make(0, 1);
  make(1, 1);
  make(2, 1);
  std::vector<float> copy(64, 9);
  const device::RowsRef row = rows_.layout().at(copy.data(), copy.data() + 16);
  bool placed, created = false, was;
  ASSERT_OK(rows_.tier()->put(2, row, &placed, &created));
  EXPECT_TRUE(placed);
  ASSERT_OK(rows_.tier()->put(0, row, &placed, &created));
  EXPECT_FALSE(placed || created);
  // There is room for one new row: for two of them there is none, and nothing is held.
  uint64_t promised = 7;
  uint32_t found[4];
  const uint64_t both[] = {2, 3, 5, 3}, one[] = {3, 0, 3};
  EXPECT_EQ(rows_.tier()->find_slots(both, 4, found, &promised), FRUGAL_ERR_TABLE_FULL);
  ASSERT_OK(rows_.tier()->find_slots(one, 3, found, &promised));
  EXPECT_EQ(promised, 1);
  ASSERT_OK(rows_.tier()->put(3, row, &placed, &created));
  EXPECT_TRUE(created);
  rows_.tier()->promise_no_more(0);
  EXPECT_EQ(rows_.tier()->find_slots(both, 4, found, &promised), FRUGAL_ERR_TABLE_FULL);
  rows_.tier()->forget(0, &placed, &was);
  EXPECT_TRUE(was);
  EXPECT_EQ(rows_.count(), 3);
  // What was deleted where it has a place has no record either.
  uint64_t key = 1;
  std::vector<uint32_t> slots(1);
  ASSERT_OK(rows_.tier()->find_slots(&key, 1, slots.data()));
  EXPECT_EQ(rows_.uncreate(slots.data(), 1, true), 1);
  rows_.unhold_backed(slots.data(), 1);
  EXPECT_EQ(keys(), (std::vector<uint64_t>{2, 3}));
  ASSERT_OK(resolve({1}, &slots));
  EXPECT_FALSE(rows_.tier()->loading());
  release_hold(slots);
  // Promised room is not available to other calls.
  const uint64_t fresh[] = {10, 11};
  ASSERT_OK(rows_.tier()->find_slots(fresh, 2, found, &promised));
  EXPECT_EQ(promised, 2);
  EXPECT_EQ(resolve({12}, &slots), FRUGAL_ERR_TABLE_FULL);
  rows_.tier()->promise_no_more(promised);
  ASSERT_OK(resolve({12}, &slots));
  release_hold(slots);
}

TEST_F(StoredRowsTest, WhatTheStoreHasNoMemoryForIsAsItWas) {
  open(9, 2);
  make(1, 5);
  make(2, 6);
  std::vector<uint32_t> slots, more;
  written_ = [] { throw std::bad_alloc(); };
  EXPECT_EQ(resolve({3}, &slots), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(rows_.tier()->store().left, 0);
  EXPECT_FALSE(rows_.has_reserved());
  EXPECT_EQ(rows_.count(), 2);
  make(3, 7);
  make(4, 8);
  // Two that load, of which one comes when the other is being loaded.
  ASSERT_OK(resolve({1}, &slots));
  before_ = [&] {
    ASSERT_OK(resolve({2}, &more));
    throw std::bad_alloc();
  };
  bool any;
  EXPECT_THROW(static_cast<void>(rows_.tier()->load_some(&any)), std::bad_alloc);
  EXPECT_TRUE(rows_.tier()->loading());
  load();
  EXPECT_FALSE(rows_.tier()->loading());
  release_hold(slots);
  release_hold(more);
  expect(1, 5);
  expect(2, 6);
  expect(3, 7);
}

TEST_F(StoredRowsTest, NothingIsHeldWhereThereIsNoMemoryToCountIt) {
  open(100, 2);
  make(1, 5);
  make(2, 6);
  const std::vector<uint64_t> often(40000, 1);
  std::vector<uint32_t> slots(often.size());
  for (const bool by_find : {false, true}) {
    for (WithoutMemory without; without.next();)
      without([&] {
        return by_find ? rows_.tier()->find_slots(often.data(), often.size(), slots.data())
                       : resolve(often, &slots);
      });
    release_hold(slots);
    // It has no holder.
    make(3, 7);
    make(4, 8);
    EXPECT_EQ(rows_.count(), 4);
    expect(1, 5);
    expect(2, 6);
  }
}

TEST_F(StoredRowsTest, StateOfAnotherKindIsNotTakenWhileRecordsAreWritten) {
  open(9, 1);
  Rows::State state;
  state.layout = RowLayout::of(3, FRUGAL_SGD);
  state.init = arith::init_spec(FRUGAL_INIT_CONSTANT, 0, 0, 9, 3, 1, FRUGAL_SGD, 0);
  ASSERT_OK(rows_.open_state(&state));
  make(7, 5);
  std::vector<uint32_t> slots;
  int asked = 0;
  written_ = [&] {
    asked += rows_.take_state(&state) == FRUGAL_ERR_UNSUPPORTED;
    ASSERT_OK(resolve({7}, &slots, Missing::kLeave));  // it stays
  };
  std::vector<uint32_t> other;
  EXPECT_EQ(resolve({8}, &other), FRUGAL_ERR_BUSY);
  EXPECT_EQ(asked, 1);
  release_hold(slots);
  ASSERT_OK(resolve({8}, &other));
  EXPECT_EQ(rows_.take_state(&state), FRUGAL_ERR_UNSUPPORTED);
  release_hold(other);
  expect(7, 5);
  ASSERT_OK(rows_.take_state(&state));
  EXPECT_EQ(rows_.state_floats(), 0);
}

TEST_F(StoredRowsTest, ManyRowsLeaveForOneCall) {
  open(1000, 300);
  std::vector<uint64_t> first(300), second(300);
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), 300);
  for (const uint64_t key : first) make(key, static_cast<float>(key));
  std::vector<uint32_t> slots;
  ASSERT_OK(resolve(second, &slots));
  EXPECT_EQ(rows_.tier()->store().left, 300);
  release_hold(slots);
  ASSERT_OK(resolve(first, &slots));
  load();
  for (size_t i = 0; i < first.size(); ++i)
    EXPECT_EQ(*rows_.values(slots[i]), static_cast<float>(first[i]));
  release_hold(slots);
}

TEST_F(StoredRowsTest, TheRowThatWasLetGoFirstLeavesFirst) {
  open(100, 3);
  for (const uint64_t key : {1, 2, 3}) make(key, static_cast<float>(key));
  expect(1, 1);  // so that 2 is the oldest
  std::vector<uint32_t> slots;
  ASSERT_OK(resolve({3, 4}, &slots));
  release_hold(slots);
  Vector<uint64_t> stored;
  rows_.tier()->store().keys(&stored);
  EXPECT_EQ(stored, Vector<uint64_t>{2});
}

TEST_F(StoredRowsTest, ARowThatIsDeletedWhileItLeavesIsGoneAtOnce) {
  open(9, 1);
  make(7, 5);
  std::vector<float> copy(64);
  const device::RowsRef row = rows_.layout().at(copy.data(), copy.data() + 16);
  bool there = true;
  written_ = [&] {
    const uint64_t key = 7;
    uint32_t slot;
    ASSERT_OK(rows_.tier()->find_slots(&key, 1, &slot));
    EXPECT_EQ(rows_.uncreate(&slot, 1, true), 1);
    rows_.unhold_backed(&slot, 1);
    EXPECT_OK(rows_.tier()->read(7, row, &there));
    EXPECT_FALSE(there);
    EXPECT_EQ(rows_.count(), 0);
  };
  std::vector<uint32_t> slots;
  ASSERT_OK(resolve({8}, &slots));
  EXPECT_FALSE(written_);
  ASSERT_OK(rows_.tier()->read(7, row, &there));
  EXPECT_FALSE(there);
  EXPECT_EQ(rows_.count(), 0);
  release_hold(slots);
  make(7, 6);
  // A row that gets a holder meanwhile stays.
  written_ = [&] {
    std::vector<uint32_t> again;
    ASSERT_OK(resolve({7}, &again, Missing::kLeave));
    EXPECT_EQ(rows_.key_of(again[0]), 7);
    EXPECT_EQ(*rows_.values(again[0]), 6);
    rows_.unhold_backed(again.data(), 1);
  };
  ASSERT_OK(resolve({8}, &slots));
  load();
  release_hold(slots);
  expect(7, 6);
}

// --- Enumeration ---------------------------------------------------------------------------------

class Enumeration : public StoredRowsTest {
 protected:
  void put(uint64_t key) {
    std::vector<float> values(64);
    uint64_t promised = 0;
    uint32_t slot = 0;
    bool placed = false, created = false;
    ASSERT_OK(rows_.tier()->find_slots(&key, 1, &slot, &promised));
    if (slot == kMissingSlot) {
      ASSERT_OK(rows_.tier()->put(key, rows_.layout().at(values.data(), values.data() + 16),
                                  &placed, &created));
      EXPECT_FALSE(placed);
    }
    rows_.unhold_backed(&slot, 1);
    if (promised != 0 && !created) rows_.tier()->promise_no_more(promised);
  }
  void forget(uint64_t key) {
    uint32_t slot = 0;
    bool placed = false, was = false;
    rows_.tier()->forget(key, &placed, &was);
    if (!placed) return;
    ASSERT_OK(rows_.tier()->find_slots(&key, 1, &slot));
    rows_.uncreate(&slot, 1, true);
    rows_.unhold_backed(&slot, 1);
  }
  // The next `most` keys are those of the model, in the order of key + 1.
  size_t expect_next(const std::set<uint64_t>& model, uint64_t* cursor, size_t most) {
    std::vector<uint64_t> expected, some(most);
    const auto take = [&](uint64_t key) {
      if (key + 1 >= *cursor && expected.size() < most) expected.push_back(key);
    };
    if (model.count(UINT64_MAX)) take(UINT64_MAX);
    for (const uint64_t key : model)
      if (key != UINT64_MAX) take(key);
    some.resize(rows_.enumerate(cursor, some.data(), most));
    EXPECT_EQ(some, expected);
    return some.size();
  }
};

TEST_F(Enumeration, OfManyPiecesListsTheKeysOnce) {
  open(1000, 10);
  std::set<uint64_t> model;
  for (uint64_t key = 0; key < 300; ++key) put(*model.insert(key * 0x9e3779b97f4a7c15u).first);
  for (uint64_t key = 1000; key < 1020; ++key) make(*model.insert(key).first, 1);
  const uint64_t before = rows_.memory_bytes();
  uint64_t cursor = 0;
  while (expect_next(model, &cursor, 3) != 0) EXPECT_EQ(listed_, 1);
  EXPECT_EQ(listed_, 1);
  EXPECT_EQ(rows_.memory_bytes(), before);
  EXPECT_EQ(expect_next(model, &cursor, 3), 0);
  EXPECT_EQ(listed_, 1);
  // One that ends in the middle keeps the list, which counts, until a row is created.
  cursor = 0;
  expect_next(model, &cursor, 100);
  EXPECT_EQ(listed_, 2);
  EXPECT_GT(rows_.memory_bytes(), before);
  put(*model.insert(7).first);
  EXPECT_EQ(rows_.memory_bytes(), before);
  expect_next(model, &cursor, 1000);
  EXPECT_EQ(listed_, 3);
}

TEST_F(Enumeration, OfRowsThatComeAndGoBetweenItsPieces) {
  open(10000, 6);
  uint64_t x = test_seed();
  const auto draw = [&](uint64_t n) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    return (x >> 33) % n;
  };
  std::set<uint64_t> model;
  uint64_t cursors[2] = {0, 0};
  const uint64_t special[] = {0, 1, UINT64_MAX, UINT64_MAX - 2};
  for (int i = 0; i < 20000 && !HasFailure(); ++i) {
    const uint64_t kind = draw(40);
    const uint64_t key = draw(8) ? draw(60) * (UINT64_MAX / 61) : special[draw(4)];
    if (kind == 0) {
      put(*model.insert(key).first);
    } else if (kind == 1) {
      make(*model.insert(key).first, 1);  // a row in memory; others leave
    } else if (kind < 6) {
      forget(key);
      model.erase(key);
    } else if (kind < 10 && model.count(key) != 0) {
      std::vector<uint32_t> slots;
      ASSERT_OK(resolve({key}, &slots));
      if (draw(2)) load();
      for (uint64_t& cursor : cursors)
        if (draw(2)) expect_next(model, &cursor, 1 + draw(9));
      load();
      release_hold(slots);
    } else {
      uint64_t& cursor = cursors[draw(2)];
      if (expect_next(model, &cursor, 1 + draw(9)) == 0) cursor = 0;
    }
  }
}

TEST_F(Enumeration, WithoutMemoryMovesNoCursor) {
  open(1000, 10);
  std::set<uint64_t> model;
  for (uint64_t key = 0; key < 50; ++key) put(*model.insert(key).first);
  bool failed = true;
  for (int64_t n = 1; failed; ++n) {
    put(*model.insert(100 + static_cast<uint64_t>(n)).first);
    uint64_t cursor = 10, some[200];
    size_t got = 0;
    heap_test_fail_after(n);
    try {
      got = rows_.enumerate(&cursor, some, 200);
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(cursor, 10u);
    }
    failed = heap_test_fail_after(0) == 0;
    if (got != 0) {
      EXPECT_EQ(got, model.size() - 9);
      EXPECT_EQ(cursor, some[got - 1] + 2);
    }
    EXPECT_EQ(expect_next(model, &cursor, 200), got != 0 ? 0 : model.size() - 9);
  }
}

}  // namespace frugal::stored_rows_test
