// A step is committed whole, once and in order, when all ranks have ended it; without memory the
// commit stalls and continues later.
//
// Updates are written at once or deferred. A prepared update is published only if it equals what
// the ranks pushed. Updates queue after pending ones.
#include "engine/commit.h"

#include "support/engine_parts.h"

namespace frugal::commit_test {

struct CommitTest : testing::TestWithParam<int32_t> {
  CommitParts parts{2, GetParam()};
  const TrainerRef a = parts.join(0), b = parts.join(1);
  // All ranks begin the step and end it, having pushed that.
  void all_end(uint64_t step, const TableRef& table, const Slots& slots) {
    for (const TrainerRef& t : parts.ranks) {
      parts.begin(t, step);
      parts.end(t, table, slots);
    }
  }
  bool deferred() const { return GetParam() == FRUGAL_FLUSH_DEFERRED; }
  uint64_t committed() const { return parts.ranks.committed(); }
  bool open() { return parts.records.find(parts.ranks.next_commit()) != nullptr; }
};

INSTANTIATE_TEST_SUITE_P(Modes, CommitTest,
                         testing::Values(FRUGAL_FLUSH_AT_ONCE, FRUGAL_FLUSH_DEFERRED,
                                         FRUGAL_FLUSH_AUTO));

TEST_P(CommitTest, WaitsForAllRanksAndHasWhatAllHavePushed) {
  const TableRef one = parts.add_table(100), other = parts.add_table(50);
  parts.optimizer.lr = 3;
  one->schedule[6] = parts.optimizer;  // from the next step on
  ASSERT_OK(parts.committer.ready());
  for (const TrainerRef& t : {a, b}) parts.begin(t, 5);
  // (The later rank first: sums are added in the order of ranks all the same.)
  parts.end(b, one, {2, 3});
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), kNoStep);
  EXPECT_TRUE(open());
  parts.end(a, one, {1, 2});
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 5u);
  EXPECT_FALSE(open());
  EXPECT_FALSE(parts.phase.is(Phase::kCommit));
  EXPECT_EQ(parts.counters.steps_committed.load(), 1u);
  EXPECT_EQ(parts.counters.modes_deferred.load(), deferred() ? 1u : 0u);
  EXPECT_EQ(parts.tables.any_pending(), deferred());
  EXPECT_EQ(parts.tables.pending_rows(), deferred() ? 3u : 0u);
  // A small step is written by the call that commits it.
  EXPECT_EQ(parts.times(one, 2), GetParam() == FRUGAL_FLUSH_AUTO ? 2 : 0);
  parts.write_all();
  for (uint32_t slot : {1, 3}) EXPECT_EQ(parts.times(one, slot), 1);
  EXPECT_EQ(parts.times(one, 2), 2);
  EXPECT_EQ(parts.times(one, 0), 0);
  EXPECT_EQ(parts.times(other, 2), 0);
  EXPECT_EQ(parts.pacing.pending(), 0u);
  // Steps with few gradients, or none, too.
  for (uint64_t step : {6, 7}) {
    for (const TrainerRef& t : {a, b}) parts.begin(t, step);
    if (step == 6)
      parts.end(a, one, {1, 5});
    else
      parts.ranks.end(*a);
    parts.ranks.end(*b);
    ASSERT_OK(parts.committer.ready());
    EXPECT_EQ(committed(), step);
  }
  parts.write_all();
  EXPECT_EQ(parts.times(one, 1), 4);
  EXPECT_EQ(parts.times(one, 5), 3);
  EXPECT_EQ(one->window.opened() ? one->window.next_commit() : 8, 8u);
}

TEST_P(CommitTest, AStepThatIsSkippedChangesNothing) {
  const TableRef table = parts.add_table(100);
  all_end(0, table, {1});
  parts.records.of(0).skip = true;
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 0u);
  parts.write_all();
  EXPECT_EQ(parts.times(table, 1), 0);
}

// A step that ranks have ended before they left is committed. After that none is, until a trainer
// joins.
TEST_P(CommitTest, WhatThoseHaveEndedWhoHaveLeftCounts) {
  const TableRef table = parts.add_table(100);
  all_end(0, table, {1});
  for (const TrainerRef& t : {a, b}) parts.ranks.leave(*t);
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 0u);
  parts.write_all();
  EXPECT_EQ(parts.times(table, 1), 2);
}

TEST_P(CommitTest, NothingIsCommittedBesideAnAbortOrOnceClosed) {
  const TableRef table = parts.add_table(100);
  all_end(0, table, {1});
  parts.phase.begin(Phase::kAbort);
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), kNoStep);
  parts.phase.end(Phase::kAbort);
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 0u);
  all_end(1, table, {1});
  parts.phase.close();
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 0u);
}

// While older updates of a table are pending, a step is not applied at once: a row's updates stay
// in order. Gates write all of it then.
TEST_P(CommitTest, UpdatesQueueBehindThoseThatArePending) {
  const TableRef table = parts.add_table(100);
  ASSERT_OK(parts.tables.open_window(*table));
  const UpdateRef older = parts.update(table, 0, {{1, 2}});
  older->make_list();
  table->window.add(older);
  EXPECT_TRUE(table->window.prepare(*older, false, SIZE_MAX, Window::Urgency::kUrgent));
  table->window.commit(older.get(), 0);
  all_end(1, table, {2});
  ASSERT_OK(parts.committer.ready());
  EXPECT_EQ(committed(), 1u);
  EXPECT_EQ(parts.counters.modes_deferred.load(), 1u);
  EXPECT_EQ(parts.pacing.drains(), !deferred());
  EXPECT_EQ(parts.times(table, 2), 0);
  parts.write_all();
  EXPECT_EQ(parts.times(table, 1), 1);
  EXPECT_EQ(parts.times(table, 2), 3);
}

TEST_P(CommitTest, WhatWasStagedAheadIsPublishedIfItIsWhatWasPushed) {
  const TableRef table = parts.add_table(100);
  parts.ranks.start(0);
  for (uint64_t step = 0; step < 3; ++step) {
    const std::vector<PartRef> declared = {resolved_part(parts.pool, step, 0, {1, 2}),
                                           resolved_part(parts.pool, step, 1, {2, 3})};
    const UpdateRef prepared = parts.prepare(table, step, declared);
    for (const TrainerRef& t : {a, b}) parts.begin(t, step);
    RankGradients first = parts.gradients(table, declared[0]);
    RankGradients second = parts.gradients(table, declared[1]);
    first.whole = second.whole = true;
    // At step 1 a rank pushes other rows than it has declared, at step 2 nothing.
    if (step == 1) second = parts.gradients(table, step, 1, {3, 4});
    parts.submit_gradients(a, table, std::move(first));
    if (step == 2)
      parts.ranks.end(*b);
    else
      parts.submit_gradients(b, table, std::move(second));
    ASSERT_OK(parts.committer.ready());
    EXPECT_EQ(committed(), step);
    EXPECT_EQ(prepared->committed, deferred() && step == 0);
    EXPECT_EQ(table->predict_pause, deferred() && step != 0 ? 16u : 0u);
    parts.write_all();
  }
  EXPECT_EQ(parts.times(table, 1), 3);
  EXPECT_EQ(parts.times(table, 2), 4);
  EXPECT_EQ(parts.times(table, 3), 2);
  EXPECT_EQ(parts.times(table, 4), 1);
  EXPECT_EQ(parts.pacing.pending(), 0u);
  EXPECT_FALSE(parts.tables.any_pending());
}

// Whatever request for memory fails: nothing of the step is written, and the next try goes on.
TEST_P(CommitTest, WithoutMemoryItIsOwed) {
  const TrainerRef cached = parts.join(0, true);
  const TableRef one = parts.add_table(2000), other = parts.add_table(100);
  all_end(0, other, {7});
  parts.records.of(0).rank_gradients[one.get()].table = one;
  Slots many;
  for (uint32_t i = 0; i < 2000; ++i) many.push_back(i);
  parts.records.of(0).rank_gradients[one.get()].add(parts.gradients(one, 0, 0, many));
  WithoutMemory without;
  while (without.next()) {
    const Status s = without([&] { return parts.committer.ready(); });
    EXPECT_FALSE(parts.phase.is(Phase::kCommit));
    EXPECT_EQ(parts.committer.stalled(), s != FRUGAL_OK);
    if (s == FRUGAL_OK) break;
    ASSERT_EQ(committed(), kNoStep);
    EXPECT_FALSE(parts.workers.help(true) || parts.flusher.write(UINT64_MAX));
    EXPECT_EQ(parts.times(other, 7), 0);
  }
  EXPECT_GT(without.rounds(), 3);
  EXPECT_EQ(committed(), 0u);
  EXPECT_EQ(cached->backlog.size(), 2u);
  parts.write_all();
  EXPECT_EQ(parts.times(other, 7), 2);
  for (uint32_t slot : {0, 1999}) EXPECT_EQ(parts.times(one, slot), 1);
  cached->backlog.clear();
  EXPECT_EQ(parts.pacing.pending(), 0u);
}

}  // namespace frugal::commit_test
