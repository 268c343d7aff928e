// Parts whose rows load: which part gets slots first, what a gate waits for, and parts that find,
// release or outlive their slots.
//
// A part may find no slots, give them up to another, or belong to a step that is committed
// meanwhile.
#include "engine/loading_parts.h"

#include <vector>

#include "engine/declarations.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"
#include "support/slow_store.h"

namespace frugal::loading_parts_test {

// For a table with three slots.
struct ArrivingTest : testing::Test {
  MemoryBudget budget;
  BufferPool pool;
  Declarations all;
  TableRef of = std::allocate_shared<Table>(HeapAllocator<Table>());
  Rows& rows = of->rows;
  LoadingParts& loading_parts = of->loading_parts;

  void SetUp() override {
    of->keys_are_slots = false;
    of->any_key = true;
    Tier tier;
    tier.store = std::make_unique<SlowStore>(1, 0);
    tier.slots = 3;
    tier.room = [] {};
    ASSERT_OK(rows.open(rows_config(100, 4, FRUGAL_SGD, true), &budget, std::move(tier)));
  }
  BatchRef declare(uint64_t step, uint32_t rank, const std::vector<uint64_t>& keys) {
    auto b = std::allocate_shared<Batch>(HeapAllocator<Batch>());
    b->step = step;
    b->rank = rank;
    b->parts.push_back(make_part());
    b->parts[0]->step = step;
    b->parts[0]->rank = rank;
    b->tables.push_back(of);
    EXPECT_OK(b->parts[0]->take_keys(pool, rows, keys.data(), keys.size(), false, 0));
    b->index();
    bool alone;
    EXPECT_OK(all.add(b, false, nullptr, &alone));
    return b;
  }
  bool next(Declarations::Item* item) {
    bool stale;
    return all.next_to_resolve(UINT64_MAX, item, &stale);
  }
  // As the engine does it.
  Status find(const Declarations::Item& item) {
    loading_parts.make_room(item.part()->step);
    const Status s = item.part()->resolve(pool, rows, Rows::Missing::kReserve, nullptr);
    if (s == FRUGAL_ERR_BUSY) loading_parts.lacks(item.part());
    loading_parts.add(item.part()->step, s == FRUGAL_OK ? item.part() : nullptr);
    if (s != FRUGAL_ERR_BUSY) return s;
    item.part()->slots.reset();
    return s;
  }
  // Resolves the next part; BUSY if it has found no slots.
  Status resolve(BatchRef* which = nullptr) {
    Declarations::Item item;
    if (!next(&item)) return FRUGAL_ERR_NOT_FOUND;
    if (which) *which = item.batch;
    const Status s = find(item);
    s == FRUGAL_ERR_BUSY ? all.put_back(item) : all.resolved(item, s == FRUGAL_OK);
    return s;
  }
  // Rows that exist and have no holder.
  void make(const std::vector<uint64_t>& keys) {
    for (const uint64_t key : keys) {
      uint32_t slot;
      ASSERT_OK(rows.resolve(&key, 1, nullptr, Rows::Missing::kReserve, &slot, nullptr));
      rows.create_reserved(&slot, 1, nullptr);
      rows.release_hold(&slot, 1);
    }
  }
  void load() {
    for (bool any = true; any;) ASSERT_OK(rows.tier()->load_some(&any));
  }
  bool revoke(uint64_t step, const Batch* but = nullptr) {
    Lock lock(all.mutex());
    return all.revoke(*of, step, pool, [&](const Batch& b) { return &b != but; });
  }
  uint32_t state(const BatchRef& b) { return b->parts[0]->state.load(); }
};

TEST_F(ArrivingTest, AGateWaitsForRowsThatAreLoading) {
  make({0, 1, 2, 3, 4, 5});
  declare(5, 0, {0, 1});
  ASSERT_OK(resolve());
  EXPECT_FALSE(loading_parts.until(*rows.tier(), 4));
  EXPECT_TRUE(loading_parts.until(*rows.tier(), 5));
  EXPECT_TRUE(loading_parts.until(*rows.tier(), 6));
  load();
  EXPECT_FALSE(loading_parts.until(*rows.tier(), 6));
}

TEST_F(ArrivingTest, NobodyWaitsForRowsOfAPartThatHasGivenThemUp) {
  make({0, 1, 2, 3, 4, 5});
  const BatchRef later = declare(5, 0, {0, 1});
  ASSERT_OK(resolve());
  ASSERT_TRUE(loading_parts.until(*rows.tier(), 5));
  EXPECT_TRUE(revoke(4));
  EXPECT_EQ(state(later), Part::kDeclared);
  EXPECT_TRUE(rows.tier()->loading());
  EXPECT_FALSE(loading_parts.until(*rows.tier(), 5));
  // Once it has found them again, they are waited for.
  ASSERT_OK(resolve());
  EXPECT_TRUE(loading_parts.until(*rows.tier(), 5));
  load();
  EXPECT_FALSE(loading_parts.until(*rows.tier(), 5));
}

TEST_F(ArrivingTest, ThereIsRoomForAPartOnlyWhereThereWasMemory) {
  const PartRef part = make_part();
  for (uint64_t nth : {1, 2, 2}) {
    HeapFails fails(nth);
    EXPECT_THROW(loading_parts.make_room(3), std::bad_alloc) << nth;
  }
  loading_parts.make_room(3);
  loading_parts.make_room(4);
  loading_parts.make_room(3);
  HeapFails fails(1);
  loading_parts.add(3, part);
  loading_parts.add(4, part);
  loading_parts.add(3, part);
}

TEST_F(ArrivingTest, PlacesGoToPartsInTheOrderOfSteps) {
  const BatchRef later = declare(7, 0, {1, 2});
  ASSERT_OK(resolve());
  const BatchRef soon = declare(5, 0, {3, 4}), last = declare(9, 0, {5});
  BatchRef tried;
  EXPECT_EQ(resolve(&tried), FRUGAL_ERR_BUSY);
  EXPECT_EQ(tried, soon);
  EXPECT_EQ(state(soon), Part::kDeclared);
  EXPECT_EQ(all.unready(5, kNoStep), 5u);
  // It is not tried again before a holder is released, nor is any part after it.
  Declarations::Item item;
  EXPECT_FALSE(next(&item));
  EXPECT_EQ(item.batch, soon);
  EXPECT_TRUE(loading_parts.held_up(*soon->parts[0], *rows.tier()));
  EXPECT_TRUE(loading_parts.held_up(*last->parts[0], *rows.tier()));
  EXPECT_TRUE(loading_parts.lacking_until(5, *rows.tier()));
  EXPECT_FALSE(loading_parts.lacking_until(4, *rows.tier()));
  EXPECT_TRUE(revoke(5));
  EXPECT_EQ(state(later), Part::kDeclared);
  EXPECT_FALSE(loading_parts.held_up(*soon->parts[0], *rows.tier()));
  EXPECT_TRUE(loading_parts.held_up(*last->parts[0], *rows.tier()));
  ASSERT_OK(resolve(&tried));
  EXPECT_EQ(tried, soon);
  EXPECT_FALSE(loading_parts.lacking_until(9, *rows.tier()));
  // The one that has given way is a part like others.
  EXPECT_EQ(resolve(&tried), FRUGAL_ERR_BUSY);
  EXPECT_EQ(tried, later);
  ASSERT_TRUE(all.take_out({5, 0, soon.get()}));
  ASSERT_OK(resolve(&tried));
  EXPECT_EQ(tried, later);
  ASSERT_OK(resolve(&tried));
  EXPECT_EQ(tried, last);
}

TEST_F(ArrivingTest, ACallOfAStepComesBeforeDeclarationsOfLaterOnes) {
  const BatchRef same = declare(5, 0, {1}), later = declare(6, 0, {1});
  {
    const LoadingParts::Wanted one(loading_parts, 5), other(loading_parts, 5);
    EXPECT_FALSE(loading_parts.held_up(*same->parts[0], *rows.tier()));
    EXPECT_TRUE(loading_parts.held_up(*later->parts[0], *rows.tier()));
    EXPECT_TRUE(loading_parts.lacking_until(5, *rows.tier()));
    EXPECT_FALSE(loading_parts.lacking_until(4, *rows.tier()));
  }
  EXPECT_FALSE(loading_parts.lacking_until(5, *rows.tier()));
  EXPECT_FALSE(loading_parts.held_up(*later->parts[0], *rows.tier()));
}

TEST_F(ArrivingTest, ThoseOfTheLastStepGiveWayFirst) {
  const BatchRef a = declare(5, 0, {1}), b = declare(6, 0, {2}), c = declare(6, 1, {3});
  for (int i = 0; i < 3; ++i) ASSERT_OK(resolve());
  EXPECT_FALSE(revoke(6));
  // Not those that are in use.
  EXPECT_TRUE(revoke(4, b.get()));
  EXPECT_EQ(state(c), Part::kDeclared);
  EXPECT_EQ(state(b), Part::kResolved);
  EXPECT_TRUE(revoke(4, b.get()));
  EXPECT_EQ(state(a), Part::kDeclared);
  EXPECT_FALSE(revoke(4, b.get()));
  // Nor while their step retires: the thread that retires them releases their holds.
  const Vector<Declarations::Held> served = all.begin_retiring(6);
  EXPECT_EQ(served.size(), 1u);
  EXPECT_FALSE(revoke(4));
  for (const Declarations::Held& h : served) h.part->release_hold(rows);
  all.retire(6);
  EXPECT_FALSE(rows.has_reserved());
}

TEST_F(ArrivingTest, APartThatIsResolvedWhenItsStepIsCommittedHoldsNothing) {
  for (const bool between : {true, false}) {
    const BatchRef late = declare(5, 0, {1, 2});
    Declarations::Item item;
    ASSERT_TRUE(next(&item));
    ASSERT_OK(find(item));
    EXPECT_TRUE(rows.has_reserved());
    EXPECT_TRUE(all.begin_retiring(5).empty());
    if (!between) all.retire(5);
    all.resolved(item, true);
    if (between) all.retire(5);
    EXPECT_FALSE(rows.has_reserved()) << between;
    EXPECT_EQ(state(late), Part::kDropped);
    EXPECT_FALSE(loading_parts.until(*rows.tier(), 5));
  }
}

TEST_F(ArrivingTest, APartThatFindsNoPlacesWhenItsStepIsCommittedStopsNobody) {
  for (const bool between : {true, false}) {
    const uint64_t keys[] = {7, 8, 9};
    uint32_t slots[3];
    ASSERT_OK(rows.resolve(keys, 3, nullptr, Rows::Missing::kReserve, slots, nullptr));
    const BatchRef late = declare(5, 0, {1, 2});
    Declarations::Item item;
    ASSERT_TRUE(next(&item));
    ASSERT_EQ(find(item), FRUGAL_ERR_BUSY);
    EXPECT_TRUE(all.begin_retiring(5).empty());
    if (!between) all.retire(5);
    all.put_back(item);
    if (between) all.retire(5);
    EXPECT_EQ(state(late), Part::kDropped) << between;
    const BatchRef other = declare(6, 0, {7});
    ASSERT_OK(resolve());
    ASSERT_TRUE(all.take_out({6, 0, other.get()}));
    rows.release_hold(slots, 3);
    EXPECT_FALSE(rows.has_reserved());
  }
}

}  // namespace frugal::loading_parts_test
