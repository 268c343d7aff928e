// Each condition under which a step may not begin: closed alone, reported in words, and opened by
// the event that it waits for.
#include "engine/step_gate.h"

#include "support/engine_parts.h"

namespace frugal::step_gate_test {

struct StepGateTest : testing::Test {
  void open(int32_t flush_mode = FRUGAL_FLUSH_DEFERRED, uint64_t staleness = 0) {
    parts = std::make_unique<CommitParts>(2, flush_mode);
    parts->config.staleness = staleness;
    a = parts->join(0);
    b = parts->join(1);
    gate = std::make_unique<StepGate>(
        StepGate::Parts{parts->config, parts->phase, parts->ranks, parts->workers,
                        parts->declarations, parts->pacing, parts->tables, parts->flusher},
        StepGate::Work{[this](uint64_t step) { return declare && declare(step); },
                       [this](uint64_t step) { return loads != 0 && step >= 3; },
                       [this] { return loads != 0 && loads-- != 0; },
                       [this] { return !copies_wait; }});
    table = parts->add_table(100);
    parts->ranks.start(0);
  }
  // Checks the gate of a step once, and returns what it waits for. Empty: for nothing.
  std::string look(uint64_t step) {
    pass = {};
    pass.step = step;
    return gate->open(&pass) ? "" : std::string(gate->what(pass).c_str());
  }
  // Bits of all that it has waited for at the last look.
  bool waited(WaitedFor what) const { return pass.waited == waited_for(what); }
  // Helps until there is nothing to do, and checks again.
  std::string help(uint64_t step) {
    look(step);
    while (gate->help(pass)) {
    }
    return look(step);
  }
  void end(const TrainerRef& t, uint64_t step, const Slots& slots = {}) {
    parts->begin(t, step);
    if (slots.empty())
      parts->ranks.end(*t);
    else
      parts->end(t, table, slots);
  }
  void commit(uint64_t step, const Slots& slots = {}) {
    for (const TrainerRef& t : {a, b}) end(t, step, slots);
    ASSERT_OK(parts->committer.ready());
    ASSERT_EQ(parts->ranks.committed(), step);
  }
  BatchRef declared(uint64_t step, const Slots& slots, Part::State state) {
    auto batch = std::allocate_shared<Batch>(HeapAllocator<Batch>());
    batch->step = step;
    batch->parts.push_back(resolved_part(parts->pool, step, 0, slots));
    batch->parts[0]->state.store(state);
    batch->tables.push_back(table);
    batch->index();
    bool alone;
    EXPECT_OK(parts->declarations.add(batch, false, nullptr, &alone));
    return batch;
  }

  std::unique_ptr<CommitParts> parts;
  TrainerRef a, b;
  TableRef table;
  std::function<bool(uint64_t)> declare;
  bool copies_wait = false;  // for the disk, and there are too many
  int loads = 0;             // until no row of step 3 is loading
  std::unique_ptr<StepGate> gate;
  Gate::Pass pass;
};

TEST_F(StepGateTest, OperationsOutsideStepsAndAborts) {
  open();
  EXPECT_EQ(look(0), "");
  parts->phase.begin(Phase::kOutside);
  EXPECT_EQ(look(0), "an operation outside steps");
  EXPECT_TRUE(waited(WaitedFor::kOutside));
  parts->phase.end(Phase::kOutside);
  parts->phase.begin(Phase::kAbort);
  EXPECT_EQ(look(0), "an abort");
  EXPECT_TRUE(waited(WaitedFor::kAborting));
  parts->phase.end(Phase::kAbort);
  EXPECT_EQ(look(0), "");
}

TEST_F(StepGateTest, ARankThatIsLost) {
  open();
  parts->ranks.lose(1);
  EXPECT_EQ(look(0), "a trainer to join as rank 1, whose process is gone or does not respond");
  EXPECT_EQ(pass.waited, 0u) << "that is no part of training";
}

TEST_F(StepGateTest, RanksThatHaveNotEndedTheStepsBefore) {
  open();
  end(a, 0);
  EXPECT_EQ(look(0), "");
  EXPECT_EQ(look(1), "rank 1 to end step 0");
  EXPECT_TRUE(waited(WaitedFor::kRanks));
  end(b, 0);
  ASSERT_OK(parts->committer.ready());
  EXPECT_EQ(look(1), "");
  EXPECT_NE(look(2), "");
  // With staleness this many steps may be open. With FRUGAL_STALENESS_ASYNC it is as many as can be
  // distinguished.
  for (const uint64_t staleness : {uint64_t{3}, uint64_t{FRUGAL_STALENESS_ASYNC}}) {
    open(FRUGAL_FLUSH_DEFERRED, staleness);
    end(a, 0);
    const uint64_t last = staleness == 3 ? 3 : most_ahead(parts->config);
    EXPECT_EQ(look(last), "");
    EXPECT_EQ(look(last + 1), "rank 1 to end step 0");
  }
}

// Not by the jobs that are queued, but by those that are done.
TEST_F(StepGateTest, JobsOfTheLastStep) {
  open(FRUGAL_FLUSH_AT_ONCE);
  commit(0, {1, 2});
  EXPECT_TRUE(parts->workers.applying());
  EXPECT_EQ(look(1), "the updates of the last step to be applied");
  EXPECT_TRUE(waited(WaitedFor::kJobs));
  EXPECT_EQ(parts->times(table, 1), 0);
  EXPECT_EQ(help(1), "");
  EXPECT_EQ(parts->times(table, 1), 2);
}

TEST_F(StepGateTest, DeclarationsThatAreNotResolvedOrLinked) {
  open();
  ASSERT_OK(parts->tables.open_window(*table));
  declared(2, {1}, Part::kDeclared);
  uint64_t asked = 0;
  Declarations::Item item;
  declare = [&](uint64_t step) {
    asked = step;
    bool stale;
    if (!parts->declarations.next_to_resolve(step, &item, &stale)) return false;
    parts->declarations.resolved(item, true);
    return true;
  };
  EXPECT_EQ(look(0), "");
  commit(0);
  commit(1);
  EXPECT_EQ(look(2), "the keys declared for step 2");
  EXPECT_TRUE(waited(WaitedFor::kDeclared));
  EXPECT_EQ(help(2), "the keys declared for step 2") << "they are resolved, and not linked";
  EXPECT_EQ(asked, 2u);
  ASSERT_TRUE(parts->declarations.next_to_link(2, 3, &item));
  EXPECT_TRUE(table->window.link(item.part(), 0, SIZE_MAX, false, Window::Urgency::kUrgent));
  EXPECT_NE(look(2), "");
  parts->declarations.linked(item, true);
  EXPECT_EQ(look(2), "");
}

TEST_F(StepGateTest, RowsThatAreLoading) {
  open();
  loads = 2;
  for (const uint64_t step : {uint64_t{0}, uint64_t{1}, uint64_t{2}}) {
    EXPECT_EQ(look(step), "");
    commit(step);
  }
  EXPECT_EQ(look(3), "rows to be loaded");
  EXPECT_TRUE(waited(WaitedFor::kLoading));
  EXPECT_EQ(help(3), "");
  EXPECT_EQ(loads, 0);
}

TEST_F(StepGateTest, CopiesThatWaitForTheDisk) {
  open();
  EXPECT_EQ(look(0), "");
  copies_wait = true;
  EXPECT_EQ(look(0), "rows of a checkpoint to be written to disk");
  copies_wait = false;
  EXPECT_EQ(look(0), "");
}

// Where steps are not written in the order of their next reads, nothing may be pending.
TEST_F(StepGateTest, AllThatIsPendingWhereNothingIsDeferred) {
  open(FRUGAL_FLUSH_AT_ONCE);
  ASSERT_OK(parts->tables.open_window(*table));
  const UpdateRef update = parts->update(table, 0, {{7}, {7}});
  update->make_list();
  table->window.add(update);
  ASSERT_TRUE(table->window.prepare(*update, false, SIZE_MAX, Window::Urgency::kUrgent));
  EXPECT_EQ(look(0), "") << "what is staged is not pending";
  table->window.commit(update.get(), 0);
  EXPECT_EQ(look(0), "pending updates to be written");
  EXPECT_TRUE(waited(WaitedFor::kAllPending));
  EXPECT_EQ(help(0), "");
  EXPECT_EQ(parts->times(table, 7), 2);
}

// Of a step that reads some of the rows, only those: queued ones, and those that another thread is
// writing.
TEST_F(StepGateTest, PendingRowsThatTheStepReads) {
  open();
  ASSERT_OK(parts->tables.open_window(*table));
  for (const uint64_t step : {uint64_t{1}, uint64_t{2}}) {
    declared(step, {step == 1 ? 5u : 6u}, Part::kResolved);
    Declarations::Item item;
    ASSERT_TRUE(parts->declarations.next_to_link(step, step + 1, &item));
    EXPECT_TRUE(table->window.link(item.part(), 0, SIZE_MAX, false, Window::Urgency::kUrgent));
    parts->declarations.linked(item, true);
  }
  commit(0, {4, 5, 6});
  EXPECT_EQ(look(1), "pending updates of table 't0' that step 1 reads (3 rows pending)");
  EXPECT_TRUE(waited(WaitedFor::kPending));
  EXPECT_FALSE(pass.in_flight);
  EXPECT_EQ(help(1), "");
  EXPECT_EQ(parts->times(table, 5), 2);
  for (uint32_t slot : {4, 6}) EXPECT_EQ(parts->times(table, slot), 0);
  commit(1);
  Claim claim;
  ASSERT_TRUE(table->window.claim(2, 1, &claim));
  EXPECT_NE(look(2), "");
  EXPECT_TRUE(pass.in_flight);
  table->window.finish(claim);
  EXPECT_EQ(look(2), "");
  EXPECT_EQ(parts->times(table, 4), 0);
}

}  // namespace frugal::step_gate_test
