// An abort undoes all uncommitted steps on all ranks, with their rows and prepared updates, and
// notifies each rank once.
//
// The call that a rank is in returns the notice, or its next call does. A step that all ranks have
// ended is committed first, or nothing is undone.
#include "engine/abort.h"

#include <atomic>
#include <thread>

#include "support/engine_parts.h"

namespace frugal::abort_test {

using Why = Aborter::Why;

struct AbortTest : testing::Test {
  CommitParts parts{2, FRUGAL_FLUSH_DEFERRED};
  TrainerRef a = parts.join(0), b = parts.join(1);
  TableRef table = parts.add_table(100);

  void begin(uint64_t step) {
    for (const TrainerRef& t : {a, b}) parts.begin(t, step);
  }
  Status undo(const TrainerRef& by, Why why = Why::kCall) { return parts.aborter.undo(*by, why); }
  Status tell(const TrainerRef& t) {
    Lock call(t->call_mu);
    return parts.aborter.tell(*t);
  }
  // The step that ranks are to begin, and that they are inside of none.
  void expect_undone(uint64_t next) {
    for (const TrainerRef& t : {a, b}) {
      EXPECT_FALSE(t->in_step.load() || t->undo_pending.load());
      EXPECT_EQ(t->next_step, next);
      EXPECT_TRUE(t->parts.empty() && t->pushes.empty() && t->created.empty());
    }
    EXPECT_EQ(parts.records.end(), 0u);
    EXPECT_EQ(parts.ranks.begun(), parts.ranks.committed() == kNoStep ? 0 : next);
    EXPECT_TRUE(parts.phase.may(Phase::kStep) && parts.phase.may(Phase::kCommit));
  }
  // It is committed as if nothing had been.
  void expect_trains(uint64_t step, int before = 0) {
    begin(step);
    for (const TrainerRef& t : {a, b}) parts.end(t, table, {1});
    ASSERT_OK(parts.committer.ready());
    EXPECT_EQ(parts.ranks.committed(), step);
    parts.write_all();
    EXPECT_EQ(parts.times(table, 1), before + 2);
  }
};

TEST_F(AbortTest, TheStepIsUndoneOnAllRanksAndBegunAgain) {
  std::atomic<uint32_t> attached{0};
  a->process.notices.store(&attached);
  begin(3);
  for (const TrainerRef& t : {a, b}) t->pushes[table.get()].table = table;
  parts.end(a, table, {1, 2});
  a->pushes.clear();
  ASSERT_OK(undo(b));
  expect_undone(3);
  EXPECT_EQ(parts.counters.steps_aborted.load(), 1u);
  EXPECT_EQ(b->abort_notice.load(), 0u);
  EXPECT_EQ(a->abort_notice.load(), 1u);
  EXPECT_EQ(attached.load(), 1u);
  EXPECT_EQ(tell(a), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(LastMessage(),
            "another rank aborted the step: it is undone on all ranks; begin step 3 again");
  EXPECT_EQ(a->abort_notice.load(), 0u);
  expect_trains(3);
}

TEST_F(AbortTest, WhoWantsAnAbortAtTheSameTimeIsToldOfTheOther) {
  begin(0);
  ASSERT_OK(undo(b));
  begin(0);
  EXPECT_EQ(undo(a), FRUGAL_ERR_STEP_ABORTED) << "of the first";
  EXPECT_TRUE(b->in_step.load()) << "the step that has begun again is not undone";
  EXPECT_EQ(a->abort_notice.load() + b->abort_notice.load(), 0u);
  EXPECT_EQ(parts.counters.steps_aborted.load(), 1u);
}

TEST_F(AbortTest, WhoIsInsideNoStepUndoesNone) {
  begin(0);
  parts.ranks.end(*a);
  EXPECT_EQ(undo(a), FRUGAL_ERR_CLOSED);
  EXPECT_EQ(undo(a, Why::kLeaving), FRUGAL_OK);
  a->closing = true;
  EXPECT_EQ(undo(a, Why::kFailed), FRUGAL_OK);
  EXPECT_TRUE(b->in_step.load());
  EXPECT_EQ(b->abort_notice.load(), 0u);
  // No rank waits for a failed trainer, be it inside a step or not.
  a->closing = false;
  EXPECT_EQ(undo(a, Why::kFailed), FRUGAL_OK);
  EXPECT_EQ(b->abort_notice.load(), 1u);
  expect_undone(0);
}

TEST_F(AbortTest, WhatWasStagedIsWithdrawn) {
  parts.ranks.start(0);
  const PartRef declared = resolved_part(parts.pool, 0, 0, {1, 5});
  const UpdateRef prepared = parts.prepare(table, 0, {declared});
  EXPECT_EQ(prepared->prepared_rows, 2u);
  begin(0);
  ASSERT_OK(undo(a));
  EXPECT_FALSE(prepared->committed);
  EXPECT_EQ(tell(b), FRUGAL_ERR_STEP_ABORTED);
  expect_trains(0);
  EXPECT_EQ(parts.times(table, 5), 0);
  EXPECT_FALSE(table->window.any_pending());
}

// Those of an ended rank's record, and those of a rank that is inside the step.
TEST_F(AbortTest, RowsThatTheStepHasMadeExistNoLonger) {
  const TableRef hashed = parts.add_table(100, 4, true);
  Rows& rows = hashed->rows;
  begin(0);
  uint64_t key = 70;
  for (Vector<CreatedRows>* to : {&parts.records.of(0).created, &a->created, &b->created}) {
    uint32_t slot;
    ASSERT_OK(rows.resolve(&key, 1, nullptr, Rows::Missing::kReserve, &slot, nullptr));
    CreatedRows made;
    made.table = hashed;
    rows.use(&slot, 1, 0, 0, &made.slots, &made.earlier);
    rows.release_hold(&slot, 1);
    to->push_back(std::move(made));
    ++key;
  }
  EXPECT_EQ(rows.count(), 3u);
  ASSERT_OK(undo(a));
  EXPECT_EQ(rows.count(), 0u);
  EXPECT_FALSE(rows.has_reserved()) << "their slots have no holder";
  expect_undone(0);
}

TEST_F(AbortTest, WhoIsInsideACallUndoesItsPartWhenTheCallNotices) {
  begin(0);
  std::atomic<bool> inside{false};
  std::thread call([&] {
    Lock of(a->call_mu);
    inside = true;
    while (!a->abort_notice.load()) std::this_thread::yield();
    EXPECT_TRUE(a->in_step.load());
    EXPECT_FALSE([&] {
      Lock lock(parts.mu);
      return parts.phase.may(Phase::kStep);
    }()) << "not before all is undone";
    EXPECT_EQ(parts.aborter.tell(*a), FRUGAL_ERR_STEP_ABORTED);
    EXPECT_FALSE(a->in_step.load());
  });
  while (!inside) std::this_thread::yield();
  ASSERT_OK(undo(b));
  call.join();
  expect_undone(0);
}

TEST_F(AbortTest, TheOthersAreToldWhoseProcessIsGone) {
  begin(4);
  parts.ranks.lose(1);
  ASSERT_OK(undo(b, Why::kLost));
  EXPECT_EQ(b->abort_notice.load(), 0u);
  EXPECT_FALSE(b->in_step.load());
  EXPECT_EQ(tell(a), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(LastMessage(),
            "the process of rank 1 is gone or does not respond: the step is undone on all ranks; "
            "begin step 4 again, which waits until a trainer has joined as that rank");
  EXPECT_EQ(parts.ranks.check_inside(*a), FRUGAL_ERR_PEER_LOST);
}

// All ranks have ended the step, so it is committed before later steps are undone. Without memory
// for that, no step is undone.
TEST_F(AbortTest, AStepThatIsOwedIsCommittedFirst) {
  const auto owe = [&](uint64_t step) {
    begin(step);
    for (const TrainerRef& t : {a, b}) parts.end(t, table, {1});
    HeapFails heap(1);
    EXPECT_EQ(parts.committer.ready(), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_TRUE(parts.committer.stalled());
  };
  owe(0);
  begin(1);
  {
    HeapFails heap(1);
    EXPECT_EQ(undo(a), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  EXPECT_TRUE(a->in_step.load() && b->in_step.load());
  EXPECT_EQ(b->abort_notice.load(), 0u);
  EXPECT_TRUE(parts.phase.may(Phase::kStep));
  ASSERT_OK(undo(a));
  EXPECT_EQ(parts.ranks.committed(), 0u);
  EXPECT_FALSE(parts.committer.stalled());
  expect_undone(1);
  EXPECT_EQ(tell(b), FRUGAL_ERR_STEP_ABORTED);
  parts.write_all();
  EXPECT_EQ(parts.times(table, 1), 2);
  expect_trains(1, 2);
  // An undo that cannot set its notices is tried again until there is memory, or the engine is
  // about to be closed.
  owe(2);
  begin(3);
  parts.aborter.stop_retrying();
  {
    HeapFails heap(1);
    EXPECT_EQ(parts.aborter.undo_surely(*a, Why::kLeaving), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  EXPECT_EQ(parts.ranks.committed(), 1u);
  ASSERT_OK(parts.aborter.undo_surely(*a, Why::kLeaving));
  EXPECT_EQ(parts.ranks.committed(), 2u);
  EXPECT_EQ(b->abort_notice.load(), 1u);
}

}  // namespace frugal::abort_test
