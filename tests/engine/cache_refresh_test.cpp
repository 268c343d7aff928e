// When a cache refresh may be planned, and planned again, and what beginning, undone and unserved
// steps and removed rows do to a plan.
//
// One thread has the caches at a time. A violation ends the process.
#include "engine/cache_refresh.h"

#include <gtest/gtest.h>

namespace frugal::cache_refresh_test {

struct CacheRefreshTest : testing::Test {
  void pass(uint64_t step) {
    refresh.stop_plans();
    refresh.begin_refresh();
    refresh.end_refresh(step);
  }
  void plan(uint64_t step) {
    refresh.begin_plan(step);
    refresh.end_plan();
  }
  CacheRefresh refresh;
};

TEST_F(CacheRefreshTest, EachBoundaryIsPlannedOnceBehindTheOneBefore) {
  EXPECT_FALSE(refresh.may_plan(0) || refresh.may_plan(1) || refresh.may_plan(kNoStep));
  for (uint64_t step : {0, 1, 2, 7}) {
    pass(step);
    EXPECT_FALSE(refresh.may_plan(step) || refresh.may_plan(step + 2));
    ASSERT_TRUE(refresh.may_plan(step + 1));
    refresh.begin_plan(step + 1);
    EXPECT_TRUE(refresh.planning());
    EXPECT_FALSE(refresh.free() || refresh.may_plan(step + 1));
    refresh.end_plan();
    EXPECT_TRUE(refresh.free());
    EXPECT_FALSE(refresh.planning() || refresh.may_plan(step + 1) || refresh.may_plan(step + 2));
  }
}

TEST_F(CacheRefreshTest, ADeclarationForThePlannedStepAsksForThePlanAgain) {
  pass(3);
  refresh.declared(4);
  plan(4);
  refresh.declared(3);
  refresh.declared(5);
  EXPECT_FALSE(refresh.may_plan(4));
  refresh.declared(4);
  EXPECT_TRUE(refresh.may_plan(4));
  refresh.begin_plan(4);
  refresh.declared(4);
  EXPECT_FALSE(refresh.may_plan(4)) << "not while one is made";
  refresh.end_plan();
  EXPECT_TRUE(refresh.may_plan(4));
  plan(4);
  EXPECT_FALSE(refresh.may_plan(4));
}

TEST_F(CacheRefreshTest, LinesThatAreTakenAwayTakeThePlanAlong) {
  pass(3);
  plan(4);
  refresh.begin_plan(kNoStep);
  EXPECT_TRUE(refresh.planning());
  refresh.end_plan();
  EXPECT_TRUE(refresh.may_plan(4));
  plan(4);
  refresh.forget_plan();
  EXPECT_TRUE(refresh.may_plan(4));
}

TEST_F(CacheRefreshTest, AStepThatBeginsWaitsForThePlanAndHasTheCaches) {
  pass(3);
  refresh.begin_plan(4);
  refresh.stop_plans();
  EXPECT_TRUE(refresh.planning()) << "it is waited for";
  refresh.end_plan();
  EXPECT_FALSE(refresh.may_plan(4));
  refresh.begin_refresh();
  EXPECT_FALSE(refresh.free() || refresh.planning() || refresh.may_plan(4));
  plan(kNoStep);
  refresh.forget_plan();
  EXPECT_FALSE(refresh.free()) << "they are the trainer's still";
  refresh.end_refresh(4);
  EXPECT_TRUE(refresh.free() && refresh.may_plan(5));
}

TEST_F(CacheRefreshTest, BehindAStepThatIsUndoneOrDoesNotBeginNothingIsPlanned) {
  pass(3);
  plan(4);
  refresh.stop_plans();
  EXPECT_FALSE(refresh.may_plan(4) || refresh.may_plan(3) || refresh.may_plan(0));
  pass(3);
  EXPECT_TRUE(refresh.may_plan(4)) << "the plan is not of that step any more";
  pass(kNoStep);
  EXPECT_TRUE(refresh.free());
  EXPECT_FALSE(refresh.may_plan(4) || refresh.may_plan(5) || refresh.may_plan(0));
}

TEST_F(CacheRefreshTest, NothingIsPlannedBeforeTheFirstStepThatIsServed) {
  for (uint64_t step : {3, 5, 4}) refresh.serve_from(step);
  EXPECT_EQ(refresh.from(), 5u);
  pass(3);
  EXPECT_FALSE(refresh.may_plan(4));
  pass(4);
  EXPECT_TRUE(refresh.may_plan(5));
}

using CacheRefreshDeathTest = CacheRefreshTest;

TEST_F(CacheRefreshDeathTest, OneHasTheCachesAtATime) {
  EXPECT_DEATH(refresh.begin_plan(4), "may_plan") << "nothing has been passed";
  EXPECT_DEATH(refresh.end_plan(), "planning_");
  EXPECT_DEATH(refresh.end_refresh(3), "refreshing_");
  pass(3);
  EXPECT_DEATH(refresh.begin_plan(5), "may_plan");
  EXPECT_DEATH(refresh.begin_refresh(), "passed_") << "plans may begin";
  EXPECT_DEATH(refresh.serve_from(9), "passed_");
  refresh.begin_plan(4);
  EXPECT_DEATH(refresh.begin_plan(kNoStep), "planning_");
  EXPECT_DEATH(refresh.forget_plan(), "planning_");
  refresh.stop_plans();
  EXPECT_DEATH(refresh.begin_refresh(), "free");
  refresh.end_plan();
  refresh.begin_refresh();
  EXPECT_DEATH(refresh.begin_refresh(), "free");
  EXPECT_DEATH(refresh.begin_plan(4), "may_plan") << "the refresh is the trainer's";
  refresh.begin_plan(kNoStep);
  EXPECT_DEATH(refresh.end_refresh(4), "planning_");
}

}  // namespace frugal::cache_refresh_test
