// The gate of a step: contract, point 6. (a) Every rank's steps < step - staleness are ended and
// taken in, (b) every declaration for a step <= `step` is resolved and linked, (c) no update that
// `step` must see is queued, claimed but unwritten, or in a job.
#include <optional>

#include "engine/wait.h"

namespace frugal {

// How far is it from the step to be committed?
bool Engine::ranks_near(uint64_t step) const {
  const uint64_t needed = ranks_.to_commit();
  const bool near = config_.staleness >= step || step - config_.staleness <= needed;
  return near && (step <= needed || step - needed <= most_ahead());
}

// Conditions are looked at with mu_ held, all at each look: between two looks an operation outside
// steps may have dropped a table, or cached rows.
void Engine::list_gate() {
  using Pass = Gate::Pass;
  using Help = std::function<bool(const Pass&)>;
  auto add = [this](WaitedFor what, auto open, auto text, Help help = nullptr) {
    gate_.add({waited_for(what), open, text, std::move(help)});
  };
  add(WaitedFor::kOutside, [this](Pass& p) {
        p.everything = false;
        return !phase_.is(Phase::kOutside);
      },
      [](const Pass&) { return String("an operation outside steps"); });
  add(WaitedFor::kAborting, [this](Pass&) { return phase_.may(Phase::kStep); },
      [](const Pass&) { return String("an abort"); });
  gate_.add({0, [this](Pass&) { return ranks_.lost() == kNoRank; },
             [this](const Pass&) {
               return text("somebody to join in place of rank %u, whose process is gone or "
                           "does not answer",
                           ranks_.lost());
             },
             nullptr});
  add(WaitedFor::kRanks, [this](Pass& p) {
        const bool near = ranks_near(p.step);
        if (!near) ranks_.note_awaited(ranks_.to_commit());
        return near;
      },
      [this](const Pass&) {
        return text("rank %s to end step %llu", ranks_.late_ranks(ranks_.to_commit()).c_str(),
                    static_cast<unsigned long long>(ranks_.to_commit()));
      });
  add(WaitedFor::kJobs, [this](Pass&) { return !workers_.applying(); },
      [](const Pass&) { return String("the updates of the last step to be applied"); },
      [this](const Pass&) { return workers_.help(true); });
  add(WaitedFor::kDeclared, [this](Pass& p) {
        // With unlimited staleness nothing is urgent, so links do not matter to a gate.
        const bool links = need_links() && config_.staleness < kRing;
        p.declared = declarations_.unready(p.step, links ? ranks_.to_commit() : kNoStep);
        return p.declared == kNoStep;
      },
      [](const Pass& p) {
        return text("the keys declared for step %llu", static_cast<unsigned long long>(p.declared));
      },
      [this](const Pass& p) { return resolve_one(p.step) || (need_links() && link_one(p.step)); });
  add(WaitedFor::kAllPending, [this](Pass& p) {
        // Out of deferred mode, declarations are no longer linked: what is pending must go first.
        const bool any = pending_.drains() || !pacing_.deferred() || pending_.now() > pending_.limit();
        p.table = tables_.first([&](Window& w) { return w.any_pending() && (any || w.crowded()); });
        p.everything = p.table != tables_.size();
        if (any && !p.everything) pending_.drained();
        return !p.everything;
      },
      [](const Pass&) { return String("pending updates to be written"); },
      [this](const Pass& p) { return p.everything && flusher_.write(UINT64_MAX); });
  add(WaitedFor::kPending, [this](Pass& p) {
        p.table = tables_.first([&](Window& w) { return w.pending_until(p.step); });
        const bool none = p.table == tables_.size();
        if (!none && !p.in_flight) p.in_flight = tables_[p.table]->window.in_flight_until(p.step);
        return none;
      },
      [this](const Pass& p) {
        const TableRef& t = tables_[p.table];
        return text("pending updates of table '%s' that step %llu reads (%llu rows pending)",
                    t->name.c_str(), static_cast<unsigned long long>(p.step),
                    static_cast<unsigned long long>(t->window.pending_rows()));
      },
      [this](const Pass& p) { return flusher_.write(p.step); });
}

Status Engine::gate(Trainer* t, uint64_t step, Deadline deadline) {
  TraceSpan span(trace_, SpanKind::kGate);
  span.step(step);
  if (t) span.rank(t->rank);
  Gate::Pass pass;
  pass.step = step;
  auto open = [&] {
    std::lock_guard<std::mutex> lock(mu_);
    return gate_.open(&pass);
  };
  if (open()) return FRUGAL_OK;
  counters_.gate_waits.fetch_add(1, std::memory_order_relaxed);
  Timed timed(counters_.gate_wait_ns);
  std::optional<Timed> its;
  if (t) its.emplace(t->counts.gate_wait_ns);
  if (pending_.over_budget())
    counters_.back_pressure.fetch_add(1, std::memory_order_relaxed);
  Status s = wait_for_ranks(deadline, t, open, [&] { return gate_.help(pass); });
  span.waited(pass.waited);
  if (pass.in_flight) counters_.gate_in_flight.fetch_add(1, std::memory_order_relaxed);
  if (s == FRUGAL_ERR_TIMEOUT) {
    std::lock_guard<std::mutex> lock(mu_);
    gate_.open(&pass);
    // No PEER_LOST: that was told when the rank was lost, and who waits in slices is to go on
    // waiting. (An abort, which is for that, may be what the gate has met first.)
    if (const uint32_t lost = ranks_.lost(); lost != kNoRank)
      return fail(s,
                  "step %llu waited for somebody to join in place of rank %u, whose process is "
                  "gone or does not answer; call again",
                  static_cast<unsigned long long>(step), lost);
    return fail(s, "step %llu waited for %s; call again", static_cast<unsigned long long>(step),
                gate_.what(pass).c_str());
  }
  return s;
}

}  // namespace frugal
