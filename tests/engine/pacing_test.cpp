// On invented times, mode AUTO decides when updates are deferred, when flush threads rest, and how
// much may stay unwritten.
//
// Unwritten updates are compared with their budget: until when an update counts, how much a gate
// leaves, and when gates and calls wait for all.
#include "engine/pacing.h"

#include "support/inside.h"

namespace frugal::pacing_test {

constexpr uint64_t kMs = 1'000'000, kMiB = uint64_t{1} << 20, kLarge = 64 * kMiB;

struct PacingTest : testing::Test {
  frugal_config config = FRUGAL_CONFIG_INIT;
  std::atomic<uint64_t> peak{0};
  std::unique_ptr<Pacing> pacing;
  Pacing::Measured now;
  bool may_rest = false;

  void open(int32_t mode, uint32_t cpus = 4) {
    config.flush_mode = mode;
    pacing = std::make_unique<Pacing>(config, cpus, &peak);
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
      pacing->begin(bytes, false);
      woken |= pacing->committed(may_rest, [&] { return now; });
    }
    return woken;
  }
  // An update of the step that is being committed.
  UpdateRef add(uint64_t bytes) {
    UpdateRef u = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
    u->bytes = bytes;
    pacing->add(u.get());
    return u;
  }
  void commit() {
    pacing->committed(false, [&] { return now; });
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

TEST_F(PacingTest, WhileASnapshotIsSavedLessOfTheWorkMustFit) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 2; ++i) steps(20, 100, 30);
  pacing->saving(true);
  steps(10, 390, 30);
  EXPECT_TRUE(pacing->deferred()) << "more than a quarter fits";
  steps(10, 393, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, WhileASnapshotIsSavedCallsMayTakeTwiceAsLong) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 2; ++i) steps(20, 100, 30);
  steps(10, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  pacing->saving(true);
  steps(90, 100, 30);
  EXPECT_TRUE(pacing->deferred()) << "its first steps do not count";
  for (int i = 0; i < 3; ++i) steps(39, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  pacing->saving(false);
  steps(39, 100, 30);
  EXPECT_TRUE(pacing->deferred()) << "one was saved in some of these steps";
  steps(19, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(39, 100, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, FirstStepsOfASnapshotThatBeginsWithADecisionDoNotCount) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 2; ++i) steps(20, 100, 30);
  steps(10, 100, 30, 15);
  now.wall += 100 * kMs;
  pacing->begin(kLarge, false);
  pacing->saving(true);  // the commit takes the snapshot, and then decides
  commit();
  EXPECT_TRUE(pacing->deferred());
  steps(90, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(90, 100, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, WhatCallsCostDuringASnapshotSaysNothingOfOtherTimes) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 2; ++i) steps(20, 380, 30);
  pacing->saving(true);
  for (int i = 0; i < 2; ++i) steps(60, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(50, 100, 30);
  pacing->saving(false);
  steps(50, 100, 30);
  EXPECT_TRUE(pacing->deferred());
  steps(21, 100, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, TimeInsideOfCallsIsNotHiddenBehind) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) steps(95, 100, 30);
  EXPECT_FALSE(pacing->deferred());
}

TEST_F(PacingTest, TimeOfThreadsThatCouldWaitIsIdle) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) {
    pacing->spared(100 * kMs);
    steps(20, 400, 30);
  }
  EXPECT_TRUE(pacing->deferred());
}

TEST_F(PacingTest, TrainersInOtherProcessesHaveProcessorsToo) {
  open(FRUGAL_FLUSH_AUTO);
  for (int i = 0; i < 3; ++i) {
    pacing->trained_attached(300 * kMs);
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
  EXPECT_TRUE(steps(20, 100, 30)) << "threads that rested are woken";
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

TEST_F(PacingTest, UpdatesArePendingUntilTheyAreWritten) {
  config.pending_bytes = 3 * kMiB;
  open(FRUGAL_FLUSH_DEFERRED);
  UpdateRef a = add(kMiB), b = add(2 * kMiB);
  EXPECT_EQ(pacing->pending(), 3 * kMiB);
  EXPECT_FALSE(pacing->over_budget());
  const UpdateRef c = add(1);
  EXPECT_TRUE(pacing->over_budget());
  a->release_bytes();
  EXPECT_EQ(pacing->pending(), 2 * kMiB + 1);
  b.reset();
  EXPECT_EQ(pacing->pending(), 1u);
  EXPECT_EQ(peak.load(), 3 * kMiB + 1);
}

// A backlog of more than a step and a quarter only leaves the caches; a small one is let be.
TEST_F(PacingTest, TheLimitFollowsTheLastStep) {
  config.pending_bytes = 100 * kMiB;
  open(FRUGAL_FLUSH_DEFERRED);
  EXPECT_EQ(pacing->limit(), 4 * kMiB);
  const UpdateRef a = add(10 * kMiB);
  EXPECT_EQ(pacing->limit(), 4 * kMiB) << "it is not committed";
  EXPECT_TRUE(pacing->drains()) << "more is pending";
  EXPECT_FALSE(pacing->calls_first(4)) << "it is written concurrently with any calls";
  const UpdateRef b = add(30 * kMiB);
  commit();
  EXPECT_EQ(pacing->limit(), 50 * kMiB);
  EXPECT_FALSE(pacing->drains());
  EXPECT_TRUE(pacing->calls_first(2)) << "of 4 processors a call has two";
  EXPECT_FALSE(pacing->calls_first(1));
  const UpdateRef c = add(kMiB);
  commit();
  EXPECT_EQ(pacing->limit(), 4 * kMiB);
  const UpdateRef d = add(90 * kMiB);
  commit();
  EXPECT_EQ(pacing->limit(), 100 * kMiB) << "never more than the budget";
}

TEST_F(PacingTest, ABudgetOfNothingIsTheLimit) {
  config.pending_bytes = 0;
  open(FRUGAL_FLUSH_DEFERRED);
  EXPECT_EQ(pacing->limit(), 0u);
}

// Where nothing is deferred, nor once it is again before all is written.
TEST_F(PacingTest, GatesWaitForEverythingUntilAllIsWritten) {
  open(FRUGAL_FLUSH_AUTO);
  EXPECT_TRUE(pacing->drains());
  EXPECT_FALSE(pacing->calls_first(4));
  EXPECT_FALSE(pacing->begin(kLarge, false).deferred);
  EXPECT_TRUE(pacing->begin(kLarge, true).deferred) << "after updates that are pending";
  for (int i = 0; i < 2; ++i) steps(20, 100, 30);
  ASSERT_TRUE(pacing->deferred());
  EXPECT_TRUE(pacing->drains());
  pacing->drained();
  EXPECT_FALSE(pacing->drains());
  EXPECT_TRUE(pacing->begin(kLarge, true).deferred);
  EXPECT_FALSE(pacing->drains());
}

}  // namespace frugal::pacing_test
