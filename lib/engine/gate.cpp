// How a call waits at the gate of a step.
#include <optional>

#include "engine/wait.h"

namespace frugal {

Status Engine::gate(Trainer* t, uint64_t step, Deadline deadline) {
  TraceSpan span(meters_.trace, SpanKind::kGate);
  span.step(step);
  if (t) span.rank(t->rank);
  Gate::Pass pass;
  pass.step = step;
  auto open = [&] {
    ControlLock lock(mu_);
    return gate_.open(&pass);
  };
  if (open()) return FRUGAL_OK;
  meters_.counters.gate_waits.fetch_add(1, std::memory_order_relaxed);
  Timed timed(meters_.counters.gate_wait_ns);
  std::optional<Timed> its;
  if (t) its.emplace(t->counts.gate_wait_ns);
  if (pacing_.over_budget()) meters_.counters.back_pressure.fetch_add(1, std::memory_order_relaxed);
  Status s = wait_for_ranks(deadline, t, open,
                            [&] { return gate_.help(pass) || (t && give_up_own_cached_rows(*t)); });
  span.waited(pass.waited);
  if (pass.waited & waited_for(WaitedFor::kCopies))
    meters_.counters.checkpoint_waits.fetch_add(1, std::memory_order_relaxed);
  if (pass.in_flight) meters_.counters.gate_in_flight.fetch_add(1, std::memory_order_relaxed);
  if (s == FRUGAL_ERR_TIMEOUT) {
    ControlLock lock(mu_);
    gate_.open(&pass);
    // Not PEER_LOST: an abort has reported the lost rank, and a caller that waits in slices must go
    // on waiting. (An abort may itself be what the gate found closed first.)
    if (const uint32_t lost = ranks_.lost(); lost != kNoRank)
      return fail(s,
                  "step %llu waited for a trainer to join as rank %u, whose process is gone or "
                  "does not respond; call again",
                  static_cast<unsigned long long>(step), lost);
    return fail(s, "step %llu waited for %s; call again", static_cast<unsigned long long>(step),
                gate_.what(pass).c_str());
  }
  return s;
}

// Checks the gate again, in the same section in which the step begins. Since the gate opened, parts
// of the step may have released their slots.
bool Engine::open_still(uint64_t step) {
  if (tiered_tables_.load(std::memory_order_relaxed) == 0) return true;
  Gate::Pass pass;
  pass.step = step;
  return gate_.open(&pass);
}

}  // namespace frugal
