// Records of uncommitted steps: rank gradients, completeness, scheduled and finished preparation,
// completed device work, and what an abort removes.
#include "engine/step_records.h"

#include "support/engine_parts.h"

namespace frugal::step_records_test {

DeviceWorkRef device_work(uint32_t rank, bool completed, bool failed = false) {
  DeviceWorkRef f = std::allocate_shared<DeviceWork>(HeapAllocator<DeviceWork>());
  f->rank = rank;
  f->completed = completed;
  f->failed = failed;
  return f;
}

TEST(StepRecords, HandoversAreByRank) {
  EngineParts parts(4);
  const TableRef table = parts.add_table(8);
  StepRecord record;
  StepRecord::TableGradients& to = record.rank_gradients[table.get()];
  to.table = table;
  const std::vector<Slots> slots{{5}, {1, 2, 2}, {0, 3, 7}, {}};
  for (const uint32_t rank : {2, 0, 3, 1}) to.add(parts.gradients(table, 0, rank, slots[rank]));
  for (uint32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(to.in_order()[rank].rank, rank);
  EXPECT_EQ(record.row_bytes(), 6 * table->rows.layout().bytes());
}

TEST(StepRecords, AStepIsCompleteWhenAllRanksHaveEndedItAndNothingIsInFlight) {
  CommitParts parts(2, FRUGAL_FLUSH_DEFERRED);
  const TableRef table = parts.add_table(8);
  const TrainerRef a = parts.join(0), b = parts.join(1);
  StepRecords& records = parts.records;
  EXPECT_EQ(records.complete(), nullptr) << "no step has begun";
  for (const TrainerRef& t : {a, b}) parts.begin(t, 4);
  parts.end(a, table, {1});
  EXPECT_EQ(records.complete(), nullptr);
  parts.ranks.end(*b);
  EXPECT_EQ(records.complete(), &records.of(4));
  records.add_device_work(&records.of(4), device_work(1, false));
  EXPECT_EQ(records.complete(), nullptr);
  records.of(4).device_work[0]->completed = true;
  records.done(records.forget_completed());
  // A rank that has ended it and left counts, too, if its record still exists.
  for (const TrainerRef& t : {a, b}) parts.ranks.leave(*t);
  EXPECT_EQ(records.complete(), records.find(4));
  records.erase(4);
  EXPECT_EQ(records.complete(), nullptr);
  EXPECT_EQ(records.find(4), nullptr);
}

TEST(StepRecords, ItIsBetweenStepsWhenAllThatIsEndedIsCommitted) {
  CommitParts parts(2, FRUGAL_FLUSH_DEFERRED);
  const TableRef table = parts.add_table(8);
  const TrainerRef a = parts.join(0), b = parts.join(1);
  StepRecords& records = parts.records;
  String why;
  EXPECT_TRUE(records.between(&why));
  EXPECT_EQ(records.end(), 0u);
  parts.begin(a, 4);
  EXPECT_FALSE(records.between(&why));
  EXPECT_EQ(why, "rank 0 is inside step 4");
  parts.end(a, table, {1});
  EXPECT_FALSE(records.between(&why));
  EXPECT_EQ(why, "step 4 is ended by some ranks, and not by rank 1");
  EXPECT_EQ(records.end(), 5u);
  // The first step of which a record contains anything counts, although its ranks have left.
  for (const TrainerRef& t : {a, b}) parts.ranks.leave(*t);
  records.of(2);
  for (int what = 0; what < 3; ++what) {
    if (what == 0)
      records.of(3).skip = true;
    else if (what == 1)
      records.of(3).created.emplace_back();
    else
      records.of(3).rank_gradients[table.get()].table = table;
    EXPECT_FALSE(records.between(&why));
    EXPECT_EQ(why, "step 3 is not committed yet");
    records.erase(3);
  }
  records.erase(4);
  EXPECT_TRUE(records.between(&why)) << "no rank has reported anything of step 2";
  EXPECT_EQ(records.end(), 3u);
}

// Once all ranks have begun the step that is to be committed next.
TEST(StepRecords, WhenStagingIsScheduled) {
  CommitParts parts(2, FRUGAL_FLUSH_DEFERRED);
  const TrainerRef a = parts.join(0), b = parts.join(1);
  StepRecords& records = parts.records;
  EXPECT_EQ(records.scheduled(), nullptr);
  parts.begin(a, 0);
  EXPECT_FALSE(records.schedule(0));
  parts.begin(b, 0);
  EXPECT_FALSE(records.schedule(1));
  EXPECT_EQ(records.end(), 0u);
  EXPECT_EQ(records.scheduled(), nullptr);
  EXPECT_TRUE(records.schedule(0));
  EXPECT_EQ(records.scheduled(), &records.of(0));
  parts.ranks.end(*a);
  parts.begin(a, 1);
  EXPECT_FALSE(records.schedule(1)) << "another is committed before";
  records.of(0).prepare_scheduled = false;
  EXPECT_EQ(records.scheduled(), nullptr) << "all of it is taken in";
}

TEST(StepRecords, WhatIsTakenInAhead) {
  EngineParts parts;
  const TableRef table = parts.add_table(8), other = parts.add_table(8);
  StepRecords& records = parts.records;
  Lock lock(parts.mu);
  EXPECT_TRUE(records.all_prepared());
  records.of(1).prepared[table.get()] = {table, nullptr, true};
  PreparedUpdate& late = records.of(2).prepared[other.get()];
  EXPECT_FALSE(records.all_prepared());
  EXPECT_TRUE(records.find(1)->all_prepared());
  EXPECT_FALSE(records.find(2)->all_prepared());
  late.ready = true;
  EXPECT_TRUE(records.all_prepared());
}

// Device work counts until what follows from its completion is done. Failed work stays, for the
// rank that is to learn of it.
TEST(StepRecords, Flights) {
  EngineParts parts;
  StepRecords& records = parts.records;
  EXPECT_FALSE(records.has_device_work());
  records.add_device_work(&records.of(1), device_work(0, true));
  records.add_device_work(&records.of(1), device_work(1, false));
  records.add_device_work(&records.of(2), device_work(0, true, true));
  std::vector<uint32_t> ranks;
  records.each_device_work([&](const DeviceWorkRef& f) { ranks.push_back(f->rank); });
  EXPECT_EQ(ranks, (std::vector<uint32_t>{0, 1, 0}));
  EXPECT_EQ(records.device_work().size(), 3u);
  EXPECT_EQ(records.device_work()[1], records.find(1)->device_work[1]);
  EXPECT_EQ(records.forget_completed(), 1u);
  EXPECT_EQ(records.find(1)->device_work.size(), 1u);
  EXPECT_EQ(records.find(2)->device_work.size(), 1u) << "it has failed";
  EXPECT_EQ(records.forget_completed(), 0u);
  records.done(1);
  EXPECT_TRUE(records.has_device_work());
  const Map<uint64_t, StepRecord> taken = records.take();
  EXPECT_EQ(taken.size(), 2u);
  EXPECT_FALSE(records.has_device_work()) << "they are the taker's to wait for";
  EXPECT_EQ(records.end(), 0u);
}

// The window forgets what was prepared of the step: the next update begins as if there had been
// none.
TEST(StepRecords, AnUndoneStep) {
  CommitParts parts(1, FRUGAL_FLUSH_DEFERRED);
  const TableRef table = parts.add_table(8);
  const TrainerRef t = parts.join(0);
  parts.begin(t, 0);
  parts.prepare(table, 0, {resolved_part(parts.pool, 0, 0, {1, 2})});
  Map<uint64_t, StepRecord> taken;
  {
    Lock lock(parts.mu);
    parts.records.add_device_work(&parts.records.of(0), device_work(0, true));
    EXPECT_TRUE(parts.records.all_prepared());
    taken = parts.records.take();
  }
  taken.at(0).undo();
  EXPECT_TRUE(taken.at(0).device_work.empty());
  const UpdateRef again = parts.prepare(table, 0, {resolved_part(parts.pool, 0, 0, {2, 3})});
  EXPECT_EQ(again->prepared_rows, 2u);
  EXPECT_FALSE(table->window.any_pending());
}

}  // namespace frugal::step_records_test
