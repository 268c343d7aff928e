#include "engine/ranks.h"

#include "base/os.h"

namespace frugal {

// --- Coming and going ----------------------------------------------------------------------------

void Ranks::join(const TrainerRef& t, uint64_t recorded) {
  if (t->has_cache.load()) {
    // Declarations of steps that began before the first cache came may not be linked. That holds
    // for later caches, too, and for steps that were ended by ranks that have left. Gradients that
    // were pushed in them before the first GPU came are in memory that no device sees.
    const bool first = caches_.fetch_add(1) == 0 || t->gpu;
    if (first) t->refresh.serve_from(recorded);
    for (const TrainerRef& o : trainers_)
      if (o && o->next_step != kNoStep)
        t->refresh.serve_from(first ? o->next_step : o->refresh.from());
  }
  trainers_[t->rank] = t;
  counts_.awaited -= !joined_[t->rank];
  joined_[t->rank] = 1;
  count(*t, 1, &counts_);
  lost_[t->rank] = 0;
  if (first_lost_ != t->rank) return;
  const auto next = std::find(lost_.begin() + t->rank, lost_.end(), 1);
  first_lost_ = next == lost_.end() ? kNoRank : static_cast<uint32_t>(next - lost_.begin());
}

void Ranks::leave(Trainer& t) {
  ControlLock lock(mu_);
  if (trainers_[t.rank].get() != &t) return;  // the thread that closes the engine was first
  // A lost rank does not count as one that left: no rank begins a step without it.
  if (lost_[t.rank]) {
    joined_[t.rank] = 0;
    ++counts_.awaited;
  }
  if (t.has_cache.load()) caches_.fetch_sub(1);
  t.backlog.clear();
  count(t, -1u, &counts_);
  trainers_[t.rank].reset();
  left_earliest();
}

void Ranks::note_awaited(uint64_t step) {
  if (awaited_step_ == step) return;
  awaited_step_ = step;
  awaited_since_ = now_ns();
}

// Threads of this process are never treated as lost.
bool Ranks::find_unresponsive(const Liveness& liveness) {
  if (liveness.limit == UINT64_MAX) return false;
  ControlLock lock(mu_);
  const uint64_t step = next_commit(), now = now_ns();
  if (now - std::exchange(looked_, now) > liveness.gap) went_on_ = now;
  if (!on_unresponsive_ || step == kNoStep || awaited_step_ != step) return false;
  if (now - std::max(awaited_since_, went_on_) < liveness.limit) return false;
  bool found = false;
  for (const TrainerRef& t : trainers_) {
    if (!t || lost_[t->rank] || t->closing.load() || !late(*t, step)) continue;
    const uint64_t heard = t->process.heard.load(), from = std::max(heard, went_on_);
    if (heard == 0 || now < from || now - from < liveness.limit) continue;
    // During a call the engine itself takes the time.
    if (!t->call_mu.try_lock()) continue;
    t->call_mu.unlock();
    on_unresponsive_(t);
    lose(t->rank);
    t->lost_peer.store(t->rank);  // its own calls report it
    t->closing.store(true);
    found = true;
  }
  return found;
}

// --- A rank's steps ------------------------------------------------------------------------------

Status Ranks::may_begin(const Trainer& t, uint64_t step) const {
  if (t.in_step)
    return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu: end or abort it first", t.rank,
                static_cast<unsigned long long>(t.step));
  const uint64_t expected = t.next_step != kNoStep ? t.next_step : next_commit();
  if (expected != kNoStep && step != expected)
    return fail(FRUGAL_ERR_STEP_ORDER, "rank %u must begin step %llu now, not %llu", t.rank,
                static_cast<unsigned long long>(expected), static_cast<unsigned long long>(step));
  return FRUGAL_OK;
}

void Ranks::begin(Trainer& t, uint64_t step) {
  t.step = step;
  go(t, true, step + 1);
  t.lost_peer.store(kNoRank);
  if (begun_.load(std::memory_order_relaxed) < step + 1) begun_.store(step + 1);
}

void Ranks::undo(Trainer& t) {
  ControlLock lock(mu_);
  t.refresh.stop_plans();
  go(t, false, t.next_step == kNoStep ? kNoStep : next_commit());
}

void Ranks::go(Trainer& t, bool in_step, uint64_t next_step) {
  const bool counts = trainers_[t.rank].get() == &t;
  if (counts) count(t, -1u, &counts_);
  t.in_step = in_step;
  t.next_step = next_step;
  if (!counts) return;
  count(t, 1, &counts_);
  left_earliest();
}

void Ranks::count(const Trainer& t, uint32_t by, Counts* to) {
  to->present += by;
  if (t.next_step == kNoStep) to->awaited += by;
  to->to_end.count(to_end(t), by);
  to->to_begin.count(t.next_step, by);
}

Ranks::Counts Ranks::counted() const {
  Counts all;
  for (uint32_t r = 0; r < size(); ++r) {
    if (trainers_[r])
      count(*trainers_[r], 1, &all);
    else
      all.awaited += !joined(r);
  }
  return all;
}

String Ranks::step_again() const {
  const uint64_t next = next_commit();
  return next == kNoStep ? text("the first step")
                         : text("step %llu again", static_cast<unsigned long long>(next));
}

Status Ranks::check_inside(const Trainer& t) const {
  if (t.in_step.load(std::memory_order_relaxed)) return FRUGAL_OK;
  ControlLock lock(mu_);
  if (uint32_t lost = t.lost_peer.load(); lost != kNoRank)
    return fail(FRUGAL_ERR_PEER_LOST,
                "the process of rank %u is gone and the step undone: begin %s", lost,
                step_again().c_str());
  return fail(FRUGAL_ERR_NOT_IN_STEP, "rank %u is not inside a step: call step_begin first",
              t.rank);
}

// --- How far ranks are ---------------------------------------------------------------------------

String Ranks::late_ranks(uint64_t step) const {
  String who;
  uint32_t more = 0;
  for (uint32_t r = 0; r < size(); ++r) {
    if (!late(r, step)) continue;
    if (who.size() > 80)
      ++more;
    else
      who += text("%s%u%s", who.empty() ? "" : ", ", r, joined(r) ? "" : " (not joined)");
  }
  if (more) who += text(" and %u more", more);
  return who;
}

bool Ranks::apart(uint64_t next, String* why) const {
  for (const TrainerRef& t : trainers_) {
    if (!t) continue;
    if (t->in_step) {
      *why = text("rank %u is inside step %llu", t->rank, static_cast<unsigned long long>(t->step));
      return true;
    }
    if (t->next_step == kNoStep) continue;
    if (next != kNoStep && t->next_step != next) {
      *why = some_ended(std::max(next, t->next_step) - 1);
      return true;
    }
    next = t->next_step;
  }
  return false;
}

String Ranks::some_ended(uint64_t step) const {
  const String who = late_ranks(step);
  return who.empty() ? text("step %llu is not committed yet", static_cast<unsigned long long>(step))
                     : text("step %llu is ended by some ranks, and not by rank %s",
                            static_cast<unsigned long long>(step), who.c_str());
}

// --- Caches --------------------------------------------------------------------------------------

void Ranks::expect_backlog(size_t n) {
  for (const TrainerRef& t : trainers_)
    if (t && t->has_cache.load()) t->backlog.reserve(t->backlog.size() + n);
}

void Ranks::add_backlog(const UpdateRef& update, const TableRef& table) {
  if (!caches_exist()) return;
  ControlLock lock(mu_);
  for (const TrainerRef& t : trainers_)
    // (A trainer that has joined since expect_backlog() has no cached rows.)
    if (t && t->has_cache.load() && t->backlog.size() < t->backlog.capacity())
      t->backlog.push_back({update, table});
}

}  // namespace frugal
