// An engine with a storage tier and no flush threads: which slots gates and calls may take, and
// operations outside steps meanwhile.
//
// The kind of the optimizer cannot change while rows are stored.
#include <optional>
#include <thread>

#include "support/tier_engine.h"

namespace frugal::tier_test {

using TierTest = TierEngine;

TEST_F(TierTest, UpdatesThatAreNotWrittenHoldTheirRowsUntilAGateWantsThePlaces) {
  open(100, 4);
  const Keys first = {1, 2, 3, 4}, other = {5, 6, 7, 8};
  declare(0, first);
  step(0, first, 0);
  EXPECT_TRUE(table->window.any_pending());
  declare(1, other);
  EXPECT_TRUE(table->rows.tier()->lacking());
  EXPECT_TRUE(table->window.any_pending());
  EXPECT_EQ(left(), 0u);
  step(1, other, 0);
  EXPECT_EQ(left(), 4u);
  declare(2, first);
  step(2, first, 1);
}

TEST_F(TierTest, LaterStepsGiveWayToAGateAndToNobodyElse) {
  open(100, 4);
  step(0, {9}, 0);
  ASSERT_OK(frugal_flush(engine, FRUGAL_TIMEOUT_DEFAULT));
  const Keys soon = {4, 5}, later = {1, 2, 3}, last = {6};
  declare(2, later);
  declare(3, last);
  EXPECT_FALSE(table->rows.tier()->lacking());
  declare(1, soon);  // it finds none: the two steps stay
  EXPECT_TRUE(table->rows.tier()->lacking());
  step(1, soon, 0);
  step(2, later, 0);
  step(3, last, 0);
  for (const uint64_t key : {1, 2, 3, 4, 5, 6, 9}) EXPECT_EQ(get(key), 1);
}

TEST_F(TierTest, LaterStepsAndCachesGiveWayToACall) {
  open(100, 4, 0.5);
  step(0, {9}, 0);
  const Keys cached = {1, 2}, called = {3, 4, 5, 6}, later = {1, 7};
  declare(1, cached);
  declare(2, cached);
  step(1, cached, 0);
  step(2, cached, 1);
  declare(4, later);
  ASSERT_OK(begin(3));
  EXPECT_EQ(lookup({1, 2, 3, 4, 5}, 0), FRUGAL_ERR_TABLE_FULL);
  ASSERT_OK(lookup(called, 0));
  end(3, called);
  ASSERT_OK(begin(4, FRUGAL_TIMEOUT_DEFAULT));
  ASSERT_OK(lookup({1}, 2));
  ASSERT_OK(lookup({7}, 0));
  end(4, later);
}

// Not even to a call of an earlier step.
TEST_F(TierTest, AStepThatHasBegunGivesNothingUp) {
  timeout_ms = 50;  // which passes: no holder releases a slot
  open(100, 4, 0, 1, 2);
  const Keys first = {1, 2, 3}, more = {4, 5};
  ASSERT_OK(begin(0));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  declare(1, first);
  ASSERT_OK(begin(1));
  ASSERT_OK(frugal_step_begin(other, 0, 0));
  ASSERT_EQ(lookup(other, more, 0), FRUGAL_ERR_TIMEOUT);
  ASSERT_OK(lookup(first, 0));
  for (const uint64_t key : first) EXPECT_TRUE(here(key));
}

// Outside steps rows and caches are the operation's.
TEST_F(TierTest, NoCacheIsGivenUpBesideAnOperationOutsideSteps) {
  open(100, 4, 0.5);
  const Keys first = {6, 7, 8, 9}, cached = {1, 2}, wanted = {100, 101, 102};
  declare(0, first);
  step(0, first, 0);
  declare(1, cached);
  declare(2, cached);
  step(1, cached, 0);
  step(2, cached, 1);
  const TableCache& cache = cache_of(trainer);
  ASSERT_TRUE(cache.any());
  std::optional<uint64_t> tier;
  for (const uint64_t key : first)
    if (!here(key)) tier = key;
  ASSERT_TRUE(tier);
  declare(4, {*tier});
  ASSERT_TRUE(table->rows.tier()->loading());
  declare(3, wanted);
  ASSERT_TRUE(table->rows.tier()->lacking());
  bool looked = false;
  at_load = [&] {
    std::thread gate([&] {
      EXPECT_EQ(begin(3, 20), FRUGAL_ERR_TIMEOUT);
      EXPECT_TRUE(cache.any());
      looked = true;
    });
    gate.join();
  };
  ASSERT_OK(put({*tier}, 5));
  EXPECT_TRUE(looked);
  step(3, wanted, 0);
  EXPECT_FALSE(here(1) && here(2));
  ASSERT_OK(begin(4));
  ASSERT_OK(lookup({*tier}, 5));
  end(4, {*tier});
  EXPECT_EQ(get(1), 2);
}

// They are its own, also while it waits at its gate.
TEST_F(TierTest, NoGateTakesTheLinesOfARankThatBeginsAStep) {
  open(100, 8, 0.5, 0, 2);
  std::swap(trainer, other);  // rank 1 may have the rows in its cache that come first
  const Keys first = {11, 12, 13, 14, 15, 16, 17, 18}, cached = {1, 2, 3, 4},
             wanted = {101, 102, 103, 104, 105, 106, 107};
  const auto both = [&](uint64_t s, const Keys& keys) {
    ASSERT_OK(frugal_step_begin(other, s, FRUGAL_TIMEOUT_DEFAULT));
    ASSERT_OK(begin(s, FRUGAL_TIMEOUT_DEFAULT));
    end(s, keys);
    ASSERT_OK(frugal_step_end(other, s, 0));
  };
  declare(0, first);
  both(0, first);
  declare(1, cached);
  declare(2, cached);
  both(1, cached);
  both(2, cached);
  ASSERT_OK(frugal_flush(engine, FRUGAL_TIMEOUT_DEFAULT));
  const TableCache& cache = cache_of(trainer);
  ASSERT_TRUE(cache.any());
  std::optional<uint64_t> tier;
  for (const uint64_t key : first)
    if (!here(key)) tier = key;
  ASSERT_TRUE(tier);
  declare(3, {*tier});
  ASSERT_TRUE(table->rows.tier()->loading());
  declare(other, 3, wanted);
  ASSERT_TRUE(table->rows.tier()->lacking());
  bool looked = false;
  at_load = [&] {
    std::thread gate([&] {
      EXPECT_EQ(frugal_step_begin(other, 3, 20), FRUGAL_ERR_TIMEOUT);
      EXPECT_TRUE(cache.any());
      looked = true;
    });
    gate.join();
  };
  ASSERT_OK(begin(3, FRUGAL_TIMEOUT_DEFAULT));
  EXPECT_TRUE(looked);
  ASSERT_OK(frugal_step_begin(other, 3, FRUGAL_TIMEOUT_DEFAULT));
  ASSERT_OK(lookup(other, wanted, 0));
}

TEST_F(TierTest, APutIntoAFullTableChangesNothing) {
  open(4, 2);
  ASSERT_OK(put({1, 2, 3}, 1));
  EXPECT_EQ(put({1, 4, 5}, 2), FRUGAL_ERR_TABLE_FULL);
  EXPECT_EQ(get(1), 1);
  EXPECT_EQ(get(4), -1);
  // What is only declared gives way.
  declare(0, {6});
  ASSERT_OK(put({1, 4, 4}, 2));
  EXPECT_EQ(get(1), 2);
  EXPECT_EQ(get(4), 2);
  uint64_t count = 0, deleted = 0;
  ASSERT_OK(frugal_table_count(handle, &count));
  EXPECT_EQ(count, 4u);
  const uint64_t key = 2;
  ASSERT_OK(frugal_delete(handle, &key, 1, &deleted));
  EXPECT_EQ(deleted, 1u);
  step(0, {6}, 0);
  EXPECT_EQ(put({7}, 1), FRUGAL_ERR_TABLE_FULL);
}

TEST_F(TierTest, TheKindOfTheOptimizerStaysWhileRowsAreAway) {
  open(8, 2);
  frugal_optimizer adam = FRUGAL_OPTIMIZER_INIT;
  adam.kind = FRUGAL_ADAM;
  ASSERT_OK(put({1}, 1));
  EXPECT_EQ(frugal_table_set_optimizer(handle, 0, &adam), FRUGAL_ERR_UNSUPPORTED);
  declare(0, {1});
  step(0, {1}, 1);
  adam.flags = FRUGAL_OPT_NEW_STATE;
  ASSERT_OK(frugal_table_set_optimizer(handle, 1, &adam));
}

}  // namespace frugal::tier_test
