// In chosen interleavings, a step begins with exactly the rows of the committed steps, and nothing
// of an undone step remains.
//
// Two ranks pass the real gate, submit gradients, commit and abort, concurrently with a flush
// thread (support/schedule.h). AddressSanitizer's build has this test.
#include "engine/step_gate.h"
#include "support/engine_parts.h"
#include "support/schedule.h"

namespace frugal {
namespace {

constexpr uint32_t kRanks = 2, kRows = 6;
constexpr uint64_t kSteps = 4;
#ifdef __SANITIZE_ADDRESS__
constexpr uint64_t kRounds = 100000;  // of which explore() runs a tenth
#else
constexpr uint64_t kRounds = 10000;
#endif

struct World {
  explicit World(Schedule& s)
      : schedule(s),
        parts(kRanks, s.random().below(2) ? FRUGAL_FLUSH_DEFERRED : FRUGAL_FLUSH_AT_ONCE),
        table(parts.add_table(kRows)) {
    parts.config.staleness = s.random().below(2);
    parts.ranks.start(0);
    for (uint32_t r = 0; r < kRanks; ++r) trainers[r] = parts.join(r);
  }

  bool all_committed() const { return parts.ranks.committed() == kSteps - 1; }
  Status told(Trainer& t) const {
    return t.abort_notice.load() ? FRUGAL_ERR_STEP_ABORTED : FRUGAL_OK;
  }
  template <class Ready, class Help>
  Status wait(Trainer& t, Ready ready, Help help) {
    return parts.workers.wait(
        UINT64_MAX, [&] { return told(t); }, ready, help, [] { return false; });
  }

  // False: the step was undone.
  bool begin(Trainer& t, uint64_t step) {
    Lock call(t.call_mu);
    for (;;) {
      Gate::Pass pass;
      pass.step = step;
      const auto open = [&] {
        Lock lock(parts.mu);
        return gate.open(&pass);
      };
      if (wait(t, open, [&] { return gate.help(pass); }) != FRUGAL_OK) return tell(t);
      Lock lock(parts.mu);
      if (t.abort_notice.load() || !parts.phase.may(Phase::kStep)) continue;
      HOLDS(schedule, parts.ranks.may_begin(t, step) == FRUGAL_OK);
      parts.ranks.begin(t, step);
      return true;
    }
  }
  bool tell(Trainer& t) {
    HOLDS(schedule, parts.aborter.tell(t) == FRUGAL_ERR_STEP_ABORTED);
    return false;
  }
  // No thread commits the step while this rank is inside it. Pending updates are written first.
  // With staleness 1 rows may be those of the step before, too: there the last rows are checked.
  bool read(Trainer& t, uint64_t step) {
    if (parts.config.staleness != 0) return true;
    Lock call(t.call_mu);
    const auto written = [&] {
      Lock lock(parts.mu);
      return !parts.tables.any_pending() && !parts.workers.applying();
    };
    const auto write = [&] { return parts.workers.help(true) || parts.flusher.write(UINT64_MAX); };
    if (wait(t, written, write) != FRUGAL_OK) return tell(t);
    HOLDS(schedule, parts.ranks.committed() + 1 == step);
    expect_rows(step);
    return true;
  }
  void expect_rows(uint64_t steps) const {
    int expected[kRows] = {};
    for (uint64_t s = 0; s < steps; ++s)
      for (const Slots& slots : handed[s])
        for (uint32_t slot : slots) ++expected[slot];
    for (uint32_t slot = 0; slot < kRows; ++slot)
      HOLDS(schedule, EngineParts::times(table, slot) == expected[slot]);
  }
  // The same step hands other rows over when it is begun again.
  bool end(Trainer& t, uint64_t step) {
    Slots slots;
    for (uint32_t slot = 0; slot < kRows; ++slot)
      if (schedule.random().one_in(3)) slots.push_back(slot);
    if (slots.empty()) slots.push_back(t.rank);
    {
      Lock call(t.call_mu);
      RankGradients pushed = parts.gradients(table, step, t.rank, slots);
      bool undone;
      {
        Lock lock(parts.mu);
        undone = t.abort_notice.load() != 0;
        if (!undone) {
          handed[step][t.rank] = slots;
          StepRecord::TableGradients& to = parts.records.of(step).rank_gradients[table.get()];
          to.table = table;
          to.add(std::move(pushed));
          parts.ranks.end(t);
        }
      }
      if (undone) return tell(t);
    }
    parts.workers.progress();
    HOLDS(schedule, parts.committer.ready() == FRUGAL_OK);
    return true;
  }
  void train(Trainer& t) {
    while (!all_committed()) {
      const uint64_t step = t.next_step;
      if (step == kSteps) {
        const Status s = wait(
            t, [&] { return all_committed(); }, [&] { return parts.workers.help(true); });
        Lock call(t.call_mu);
        if (s != FRUGAL_OK) tell(t);
        continue;
      }
      if (!begin(t, step)) continue;
      if (aborts != 0 && schedule.random().one_in(4)) {
        --aborts;
        const Status s = parts.aborter.undo(t, Aborter::Why::kCall);
        HOLDS(schedule, s == FRUGAL_OK || s == FRUGAL_ERR_STEP_ABORTED);
        continue;
      }
      if (read(t, step)) end(t, step);
    }
  }
  void flush() {
    const auto over = [&] {
      Lock lock(parts.mu);
      return all_committed() && !parts.tables.any_pending() && !parts.workers.applying();
    };
    HOLDS(schedule,
          parts.workers.wait(
              UINT64_MAX, []() -> Status { return FRUGAL_OK; }, over,
              [&] { return parts.workers.help(false) || parts.flusher.write(UINT64_MAX); },
              [] { return false; }) == FRUGAL_OK);
  }

  Schedule& schedule;
  CommitParts parts;
  StepGate gate{{parts.config, parts.phase, parts.ranks, parts.workers, parts.declarations,
                 parts.pacing, parts.tables, parts.flusher},
                {[](uint64_t) { return false; }, [](uint64_t) { return false; },
                 [] { return false; }, [] { return true; }}};
  const TableRef table;
  TrainerRef trainers[kRanks];
  Slots handed[kSteps][kRanks];
  uint32_t aborts = 2;
};

TEST(StepsSchedules, StepsBeginWithWhatIsCommitted) {
  explore("steps", kRounds, [](Schedule& s) {
    World world(s);
    s.thread("rank 0", [&] { world.train(*world.trainers[0]); });
    s.thread("rank 1", [&] { world.train(*world.trainers[1]); });
    s.thread("flush thread", [&] { world.flush(); });
    s.run();
    world.expect_rows(kSteps);
    HOLDS(s, world.parts.records.end() == 0);
    for (Phase::Act act : {Phase::kCommit, Phase::kAbort}) HOLDS(s, !world.parts.phase.is(act));
    HOLDS(s, world.parts.pacing.pending() == 0);
  });
}

}  // namespace
}  // namespace frugal
