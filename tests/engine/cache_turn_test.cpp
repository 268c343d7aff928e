// When a cache refresh may be planned, and planned again, and what beginning, undone and unserved
// steps and removed rows do to a plan.
//
// One thread has the caches at a time. A violation ends the process.
#include "engine/cache_turn.h"

#include <gtest/gtest.h>

namespace frugal::cache_turn_test {

struct CacheTurnTest : testing::Test {
  void pass(uint64_t step) {
    turn.stop_plans();
    turn.begin_turn();
    turn.end_turn(step);
  }
  void plan(uint64_t step) {
    turn.begin_plan(step);
    turn.end_plan();
  }
  CacheTurn turn;
};

TEST_F(CacheTurnTest, EachBoundaryIsPlannedOnceBehindTheOneBefore) {
  EXPECT_FALSE(turn.may_plan(0) || turn.may_plan(1) || turn.may_plan(kNoStep));
  for (uint64_t step : {0, 1, 2, 7}) {
    pass(step);
    EXPECT_FALSE(turn.may_plan(step) || turn.may_plan(step + 2));
    ASSERT_TRUE(turn.may_plan(step + 1));
    turn.begin_plan(step + 1);
    EXPECT_TRUE(turn.planning());
    EXPECT_FALSE(turn.free() || turn.may_plan(step + 1));
    turn.end_plan();
    EXPECT_TRUE(turn.free());
    EXPECT_FALSE(turn.planning() || turn.may_plan(step + 1) || turn.may_plan(step + 2));
  }
}

TEST_F(CacheTurnTest, ADeclarationForThePlannedStepAsksForThePlanAgain) {
  pass(3);
  turn.declared(4);
  plan(4);
  turn.declared(3);
  turn.declared(5);
  EXPECT_FALSE(turn.may_plan(4));
  turn.declared(4);
  EXPECT_TRUE(turn.may_plan(4));
  turn.begin_plan(4);
  turn.declared(4);
  EXPECT_FALSE(turn.may_plan(4)) << "not while one is made";
  turn.end_plan();
  EXPECT_TRUE(turn.may_plan(4));
  plan(4);
  EXPECT_FALSE(turn.may_plan(4));
}

TEST_F(CacheTurnTest, LinesThatAreTakenAwayTakeThePlanAlong) {
  pass(3);
  plan(4);
  turn.begin_plan(kNoStep);
  EXPECT_TRUE(turn.planning());
  turn.end_plan();
  EXPECT_TRUE(turn.may_plan(4));
  plan(4);
  turn.forget_plan();
  EXPECT_TRUE(turn.may_plan(4));
}

TEST_F(CacheTurnTest, AStepThatBeginsWaitsForThePlanAndHasTheCaches) {
  pass(3);
  turn.begin_plan(4);
  turn.stop_plans();
  EXPECT_TRUE(turn.planning()) << "it is waited for";
  turn.end_plan();
  EXPECT_FALSE(turn.may_plan(4));
  turn.begin_turn();
  EXPECT_FALSE(turn.free() || turn.planning() || turn.may_plan(4));
  plan(kNoStep);
  turn.forget_plan();
  EXPECT_FALSE(turn.free()) << "they are the trainer's still";
  turn.end_turn(4);
  EXPECT_TRUE(turn.free() && turn.may_plan(5));
}

TEST_F(CacheTurnTest, BehindAStepThatIsUndoneOrDoesNotBeginNothingIsPlanned) {
  pass(3);
  plan(4);
  turn.stop_plans();
  EXPECT_FALSE(turn.may_plan(4) || turn.may_plan(3) || turn.may_plan(0));
  pass(3);
  EXPECT_TRUE(turn.may_plan(4)) << "the plan is not of that step any more";
  pass(kNoStep);
  EXPECT_TRUE(turn.free());
  EXPECT_FALSE(turn.may_plan(4) || turn.may_plan(5) || turn.may_plan(0));
}

TEST_F(CacheTurnTest, NothingIsPlannedBeforeTheFirstStepThatIsServed) {
  for (uint64_t step : {3, 5, 4}) turn.serve_from(step);
  EXPECT_EQ(turn.from(), 5u);
  pass(3);
  EXPECT_FALSE(turn.may_plan(4));
  pass(4);
  EXPECT_TRUE(turn.may_plan(5));
}

using CacheTurnDeathTest = CacheTurnTest;

TEST_F(CacheTurnDeathTest, OneHasTheCachesAtATime) {
  EXPECT_DEATH(turn.begin_plan(4), "may_plan") << "nothing has been passed";
  EXPECT_DEATH(turn.end_plan(), "planning_");
  EXPECT_DEATH(turn.end_turn(3), "turning_");
  pass(3);
  EXPECT_DEATH(turn.begin_plan(5), "may_plan");
  EXPECT_DEATH(turn.begin_turn(), "passed_") << "plans may begin";
  EXPECT_DEATH(turn.serve_from(9), "passed_");
  turn.begin_plan(4);
  EXPECT_DEATH(turn.begin_plan(kNoStep), "planning_");
  EXPECT_DEATH(turn.forget_plan(), "planning_");
  turn.stop_plans();
  EXPECT_DEATH(turn.begin_turn(), "free");
  turn.end_plan();
  turn.begin_turn();
  EXPECT_DEATH(turn.begin_turn(), "free");
  EXPECT_DEATH(turn.begin_plan(4), "may_plan") << "the boundary is the trainer's";
  turn.begin_plan(kNoStep);
  EXPECT_DEATH(turn.end_turn(4), "planning_");
}

}  // namespace frugal::cache_turn_test
