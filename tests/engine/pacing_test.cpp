// When updates are deferred and flush threads rest, of times that a test makes up.
#include "engine/pacing.h"

#include "support/inside.h"

namespace frugal {
namespace {

constexpr uint64_t kMs = 1'000'000, kLarge = uint64_t{64} << 20;

struct PacingTest : testing::Test {
  frugal_config config = FRUGAL_CONFIG_INIT;
  std::unique_ptr<Pacing> pacing;
  Pacing::Measured now;
  bool may_rest = false;

  void open(int32_t mode, uint32_t cpus = 4) {
    config.flush_mode = mode;
    pacing = std::make_unique<Pacing>(config, cpus);
    now = {};
    now.wall = 7 * kMs;
    steps(0, 0, 0, 15);  // its first look
  }
  // Until the next decision: 16 steps that took 100 ms, of which so many were in calls; all
  // processors together were busy for `cpu` ms, and `apply` of these were spent on writing rows.
  bool steps(uint64_t calls, uint64_t cpu, uint64_t apply, int n = 16, uint64_t bytes = kLarge) {
    now.wall += 100 * kMs;
    now.calls += calls * kMs * config.world_size;
    now.cpu += cpu * kMs;
    now.apply += apply * kMs;
    bool woken = false;
    for (int i = 0; i < n; ++i) {
      pacing->step(bytes);
      woken |= pacing->committed(may_rest, [&] { return now; });
    }
    return woken;
  }
};

TEST_F(PacingTest, OtherModesAreWhatTheySay) {
  for (int32_t mode : {FRUGAL_FLUSH_DEFERRED, FRUGAL_FLUSH_TREE_HEAP, FRUGAL_FLUSH_AT_ONCE,
                       FRUGAL_FLUSH_WRITE_THROUGH}) {
    open(mode);
    const bool deferred = mode == FRUGAL_FLUSH_DEFERRED || mode == FRUGAL_FLUSH_TREE_HEAP;
    EXPECT_EQ(pacing->deferred(), deferred);
    EXPECT_FALSE(pacing->small(0));
    for (int i = 0; i < 3; ++i) steps(deferred ? 100 : 0, deferred ? 400 : 50, 20);
    EXPECT_EQ(pacing->deferred(), deferred);
  }
  config.staleness = 2;
  for (int32_t mode : {FRUGAL_FLUSH_AUTO, FRUGAL_FLUSH_AT_ONCE}) {
    open(mode);
    steps(100, 400, 20);
    EXPECT_TRUE(pacing->deferred());
  }
}

TEST_F(PacingTest, DefersWhereThereIsTimeToHideBehindTwiceInARow) {
  open(FRUGAL_FLUSH_AUTO);
  EXPECT_FALSE(pacing->deferred());
  steps(20, 100, 30);
  EXPECT_FALSE(pacing->deferred()) << "one pause says nothing";
  steps(100, 400, 30);
  steps(20, 100, 30);
  EXPECT_FALSE(pacing->deferred()) << "not in a row";
  steps(20, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(10, 380, 30);
  EXPECT_TRUE(pacing->deferred()) << "more than half of the work fits";
  steps(10, 390, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, DeferringIsGivenUpWhereCallsTakeLongerAndTriedAgainMoreAndMoreRarely) {
  open(FRUGAL_FLUSH_AUTO);
  const auto tried = [&] {  // how many decisions until it is
    int n = 0;
    for (; !pacing->deferred() && n < 500; ++n) steps(20, 100, 30);
    return n;
  };
  EXPECT_EQ(tried(), 2);
  steps(39, 100, 30);
  EXPECT_TRUE(pacing->deferred()) << "the first steps may cost up to twice as much";
  steps(20, 100, 30);
  EXPECT_FALSE(pacing->deferred()) << "nothing is gained";
  int pauses[4];
  for (int& pause : pauses) {
    pause = tried();
    steps(40, 100, 30);
    EXPECT_FALSE(pacing->deferred());
  }
  EXPECT_EQ(pauses[0], 10);
  EXPECT_EQ(pauses[1], 18);
  EXPECT_EQ(pauses[2], 34);
  EXPECT_EQ(pauses[3], 66);
  EXPECT_EQ(tried(), 66) << "the longest";
  for (int i = 0; i < 64; ++i) steps(19, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(20, 100, 30);
  EXPECT_EQ(tried(), 10) << "it had been worth it for long";
}

TEST_F(PacingTest, WhatCallsCostIsToldOfAByte) {
  open(FRUGAL_FLUSH_AUTO);
  steps(20, 100, 30, 16, kLarge);
  steps(10, 100, 30, 16, kLarge);  // the least of the last two counts
  EXPECT_TRUE(pacing->deferred());
  steps(10, 100, 30, 16, kLarge);
  steps(19, 100, 30, 16, 2 * kLarge);
  EXPECT_TRUE(pacing->deferred());
  steps(6, 100, 30, 16, kLarge / 2);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, TimeInsideOfCallsIsNotHiddenBehind) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) steps(95, 100, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, TimeSpentOnWarmingIsIdle) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) {
    pacing->warmed(100 * kMs);
    steps(20, 400, 30);
  }
  EXPECT_TRUE(pacing->deferred());
}

TEST_F(PacingTest, TrainersInOtherProcessesHaveProcessorsToo) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) {
    pacing->trained_elsewhere(300 * kMs);
    steps(20, 100, 30);
  }
  EXPECT_FALSE(pacing->deferred()) << "none is idle";
  for (int i = 0; i < 2; ++i) steps(20, 100, 30);
  EXPECT_TRUE(pacing->deferred());
}

TEST_F(PacingTest, SmallStepsAreNotDeferred) {
  open(FRUGAL_FLUSH_AUTO);
  const uint64_t small = g_small_step.load() - 1;
  EXPECT_TRUE(pacing->small(small) && !pacing->small(small + 1));
  for (int i = 0; i < 3; ++i) steps(20, 100, 30, 16, small);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, FlushThreadsRestWhileTrainersElsewhereHaveAllProcessors) {
  config.world_size = 4;
  open(FRUGAL_FLUSH_AUTO);
  steps(100, 400, 30);
  EXPECT_FALSE(pacing->resting()) << "they may not";
  may_rest = true;
  EXPECT_FALSE(steps(100, 400, 30));
  EXPECT_TRUE(pacing->resting());
  EXPECT_FALSE(steps(20, 100, 30));
  EXPECT_TRUE(pacing->resting()) << "updates are not deferred yet";
  EXPECT_TRUE(steps(20, 100, 30)) << "whoever rested is woken";
  EXPECT_FALSE(pacing->resting());
  steps(100, 400, 30);
  EXPECT_TRUE(pacing->resting());
  may_rest = false;
  EXPECT_TRUE(steps(100, 400, 30));
  EXPECT_FALSE(pacing->resting());
  config.world_size = 3;
  may_rest = true;
  open(FRUGAL_FLUSH_AUTO);
  steps(100, 400, 30);
  EXPECT_FALSE(pacing->resting()) << "one is left";
}

}  // namespace
}  // namespace frugal
