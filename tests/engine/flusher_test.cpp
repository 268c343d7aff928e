// Rows of committed updates are written once: the most urgent first, tables in turn, or a whole
// update in chunks.
#include "engine/flusher.h"

#include <numeric>

#include "support/engine_parts.h"

namespace frugal::flusher_test {

struct FlusherTest : testing::Test {
  EngineParts parts{2};
  Slots range(uint32_t n) {
    Slots slots(n);
    std::iota(slots.begin(), slots.end(), 0);
    return slots;
  }
  // The update's rows wait to be written.
  void commit(const TableRef& table, const UpdateRef& update) {
    ASSERT_OK(parts.tables.open_window(*table));
    update->make_list();
    table->window.add(update);
    EXPECT_TRUE(table->window.prepare(*update, false, SIZE_MAX, Window::Urgency::kUrgent));
    table->window.make_room(*update);
    table->window.commit(update.get(), update->step);
  }
};

TEST_F(FlusherTest, TheRowsThatAreWantedFirstAreWrittenFirst) {
  parts.ranks.start(10);
  const TableRef table = parts.add_table(100);
  ASSERT_OK(parts.tables.open_window(*table));
  const PartRef read = resolved_part(parts.pool, 12, 0, {5});
  EXPECT_TRUE(table->window.link(read, 0, 1, false, Window::Urgency::kUrgent));
  commit(table, parts.update(table, 10, {{1, 5, 9}, {5}}));
  EXPECT_GT(parts.pacing.pending(), 0u);
  EXPECT_FALSE(parts.flusher.write(11));
  EXPECT_TRUE(parts.flusher.write(12));
  EXPECT_FALSE(parts.flusher.write(12));
  EXPECT_EQ(parts.times(table, 5), 2);
  EXPECT_EQ(parts.times(table, 1), 0);
  EXPECT_TRUE(parts.flusher.write(UINT64_MAX));
  EXPECT_FALSE(parts.flusher.write(UINT64_MAX));
  for (uint32_t slot : {1, 9}) EXPECT_EQ(parts.times(table, slot), 1);
  EXPECT_FALSE(table->window.any_pending());
  EXPECT_EQ(parts.pacing.pending(), 0u);
  EXPECT_EQ(parts.counters.rows_updated.load(), 3u);
}

// Also of updates whose rows are written in one go.
TEST_F(FlusherTest, EachUpdateHasTheHyperParametersOfItsStep) {
  parts.ranks.start(0);
  const TableRef table = parts.add_table(100);
  for (int step = 0; step < 3; ++step) {
    parts.optimizer.lr = static_cast<float>(1 + step);
    table->schedule[static_cast<uint64_t>(step)] = parts.optimizer;
  }
  for (uint32_t step = 0; step < 3; ++step) commit(table, parts.update(table, step, {{step, 9}}));
  while (parts.flusher.write(UINT64_MAX)) {
  }
  for (uint32_t step = 0; step < 3; ++step)
    EXPECT_EQ(parts.times(table, step), 1 + static_cast<int>(step));
  EXPECT_EQ(parts.times(table, 9), 6);
}

TEST_F(FlusherTest, TablesTakeTurns) {
  parts.ranks.start(0);
  TableRef tables[3];
  for (TableRef& t : tables) t = parts.add_table(300);
  for (const TableRef& t : tables) commit(t, parts.update(t, 0, {range(300)}));
  const auto written = [&](int i) { return parts.times(tables[i], 299) == 1; };
  EXPECT_TRUE(parts.flusher.write(UINT64_MAX));
  EXPECT_TRUE(written(0) && written(1) && !written(2));
  // Where it left off.
  for (int i : {0, 2}) commit(tables[i], parts.update(tables[i], 1, {range(300)}));
  EXPECT_TRUE(parts.flusher.write(UINT64_MAX));
  EXPECT_TRUE(written(2));
  while (parts.flusher.write(UINT64_MAX)) {
  }
  for (int i : {0, 2})
    for (uint32_t slot = 0; slot < 300; ++slot) EXPECT_EQ(parts.times(tables[i], slot), 2);
  EXPECT_FALSE(parts.tables.any_pending());
}

// Of what is written after a later step has begun a caller has not waited for.
TEST_F(FlusherTest, RowsThatHaveWaitedForAStepAreCounted) {
  const TrainerRef t = parts.join(0);
  const TableRef table = parts.add_table(100);
  parts.begin(t, 0);
  commit(table, parts.update(table, 0, {{1, 2}}));
  EXPECT_TRUE(parts.flusher.write(UINT64_MAX));
  EXPECT_EQ(parts.counters.rows_deferred.load(), 0u);
  commit(table, parts.update(table, 1, {{1, 2, 3}}));
  parts.ranks.end(*t);
  for (uint64_t step : {1, 2}) {
    parts.begin(t, step);
    parts.ranks.end(*t);
  }
  EXPECT_TRUE(parts.flusher.write(UINT64_MAX));
  EXPECT_EQ(parts.counters.rows_deferred.load(), 3u);
}

TEST_F(FlusherTest, AJobWritesAllOfAnUpdate) {
  const TableRef table = parts.add_table(3000);
  int expected = 0;
  for (size_t n : {1, 2}) {
    const UpdateRef update = parts.update(table, n, std::vector<Slots>(n, range(3000)));
    Vector<uint64_t> bounds;
    update->cut(kChunkRows, &bounds);
    EXPECT_GT(parts.pacing.pending(), 0u);
    const JobRef job = parts.flusher.job(table, update, std::move(bounds));
    EXPECT_GT(job->chunks, 1u);
    EXPECT_TRUE(job->apply);
    parts.workers.run_alone(job);
    EXPECT_TRUE(job->finished());
    expected += static_cast<int>(n);
    for (uint32_t slot = 0; slot < 3000; ++slot) ASSERT_EQ(parts.times(table, slot), expected);
    EXPECT_EQ(parts.pacing.pending(), 0u) << "it is written, though a reference to it is left";
    EXPECT_EQ(parts.counters.rows_updated.load(), n * 3000);
  }
}

}  // namespace frugal::flusher_test
