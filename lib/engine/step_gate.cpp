#include "engine/step_gate.h"

namespace frugal {

// The list of conditions, in the order in which they are checked.
StepGate::StepGate(const Parts& of, Work work) : of_(of), work_(std::move(work)) {
  add({waited_for(WaitedFor::kOutside),
       [this](Pass& p) REQUIRES(control) {
         p.everything = false;
         return !of_.phase.is(Phase::kOutside);
       },
       [](const Pass&) { return String("an operation outside steps"); }, nullptr});
  add({waited_for(WaitedFor::kAborting),
       [this](Pass&) REQUIRES(control) { return !of_.phase.is(Phase::kAbort); },
       [](const Pass&) { return String("an abort"); }, nullptr});
  add({0, [this](Pass&) REQUIRES(control) { return of_.ranks.lost() == kNoRank; },
       [this](const Pass&) REQUIRES(control) {
         return text("a trainer to join as rank %u, whose process is gone or does not respond",
                     of_.ranks.lost());
       },
       nullptr});
  add({waited_for(WaitedFor::kRanks),
       [this](Pass& p) REQUIRES(control) {
         const bool is_near = near(p.step);
         if (!is_near) of_.ranks.note_awaited(of_.ranks.next_commit());
         return is_near;
       },
       [this](const Pass&) REQUIRES(control) {
         const uint64_t step = of_.ranks.next_commit();
         return text("rank %s to end step %llu", of_.ranks.late_ranks(step).c_str(),
                     static_cast<unsigned long long>(step));
       },
       nullptr});
  add({waited_for(WaitedFor::kJobs), [this](Pass&) { return !of_.workers.applying(); },
       [](const Pass&) { return String("the updates of the last step to be applied"); },
       [this](const Pass&) { return of_.workers.help(true); }});
  add({waited_for(WaitedFor::kDeclared),
       [this](Pass& p) REQUIRES(control) {
         // With unlimited staleness nothing is urgent, so links do not matter to a gate.
         const bool links =
             (of_.pacing.deferred() || of_.ranks.caches_exist()) && of_.config.staleness < kRing;
         p.declared = of_.declarations.unready(p.step, links ? of_.ranks.next_commit() : kNoStep);
         return p.declared == kNoStep;
       },
       [](const Pass& p) {
         return text("the keys declared for step %llu",
                     static_cast<unsigned long long>(p.declared));
       },
       [this](const Pass& p) { return work_.declare(p.step); }});
  add({waited_for(WaitedFor::kLoading),
       [this](Pass& p) REQUIRES(control) { return !work_.loading(p.step); },
       [](const Pass&) { return String("rows to be loaded"); },
       [this](const Pass&) { return work_.load(); }});
  add({waited_for(WaitedFor::kCopies), [this](Pass&) { return work_.copies(); },
       [](const Pass&) { return String("rows of a checkpoint to be written to disk"); }, nullptr});
  add({waited_for(WaitedFor::kAllPending),
       [this](Pass& p) REQUIRES(control) {
         const bool any = of_.pacing.drains();
         p.table = of_.tables.first_pending(
             [&](Window& w) { return w.any_pending() && (any || w.backlogged()); });
         p.everything = p.table != of_.tables.size();
         if (any && !p.everything) of_.pacing.drained();
         return !p.everything;
       },
       [](const Pass&) { return String("pending updates to be written"); },
       [this](const Pass& p) { return p.everything && of_.flusher.write(UINT64_MAX); }});
  add({waited_for(WaitedFor::kPending),
       [this](Pass& p) REQUIRES(control) {
         p.table = of_.tables.first_pending([&](Window& w) { return w.pending_until(p.step); });
         const bool none = p.table == of_.tables.size();
         if (!none && !p.in_flight)
           p.in_flight = of_.tables[p.table]->window.in_flight_until(p.step);
         return none;
       },
       [this](const Pass& p) REQUIRES(control) {
         const TableRef& t = of_.tables[p.table];
         return text("pending updates of table '%s' that step %llu reads (%llu rows pending)",
                     t->name.c_str(), static_cast<unsigned long long>(p.step),
                     static_cast<unsigned long long>(t->window.pending_rows()));
       },
       [this](const Pass& p) { return of_.flusher.write(p.step); }});
}

// Is the step near enough to the next commit?
bool StepGate::near(uint64_t step) const {
  const uint64_t needed = of_.ranks.next_commit(), staleness = of_.config.staleness;
  const bool is_near = staleness >= step || step - staleness <= needed;
  return is_near && (step <= needed || step - needed <= most_ahead(of_.config));
}

}  // namespace frugal
