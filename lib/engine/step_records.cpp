#include "engine/step_records.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "engine/flusher.h"

namespace frugal {

void StepRecord::TableGradients::add(RankGradients&& h) {
  FRUGAL_ASSERT(std::none_of(ranks.begin(), ranks.end(),
                             [&](const RankGradients& o) { return o.rank == h.rank; }));
  ranks.push_back(std::move(h));
}

Vector<RankGradients>& StepRecord::TableGradients::in_order() {
  const auto before = [](const RankGradients& a, const RankGradients& b) {
    return a.rank < b.rank;
  };
  std::sort(ranks.begin(), ranks.end(), before);
  return ranks;
}

bool StepRecord::all_prepared() const {
  return std::all_of(prepared.begin(), prepared.end(),
                     [](const auto& of) { return of.second.ready; });
}

uint64_t StepRecord::row_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [raw, of] : rank_gradients)
    for (const RankGradients& h : of.ranks) bytes += h.rows() * of.table->rows.layout().bytes();
  return bytes;
}

void StepRecord::undo() {
  for (auto& [raw, p] : prepared) p.table->window.withdraw(p.update);
  for (Commit& c : commits) {
    if (c.added) c.table->window.withdraw(c.update);
    if (c.held) Flusher::release_hold(*c.table, *c.update);
  }
  await_device_work();
  device_work.clear();
}

void StepRecord::await_device_work() const {
  for (const DeviceWorkRef& f : device_work)
    while (!f->ask(1000000)) {
    }
}

StepRecord* StepRecords::complete() {
  const uint64_t step = ranks_.next_commit();
  bool present;
  if (step == kNoStep || !ranks_.ended(step, &present)) return nullptr;
  // Ranks that have ended the step and left count too: their record is there, and no abort has
  // removed it. It may be empty: later ones wait for it, and rows may be prepared for it.
  StepRecord* const record = present ? &of(step) : find(step);
  return record && record->device_work.empty() ? record : nullptr;
}

bool StepRecords::between(String* why) const {
  // What a rank has ended counts after it has left, too.
  for (const auto& [step, record] : records_) {
    if (record.rank_gradients.empty() && record.created.empty() && !record.skip) continue;
    *why = ranks_.some_ended(step);
    return false;
  }
  return ranks_.between(why);
}

bool StepRecords::schedule(uint64_t step) {
  if (step != ranks_.next_commit() || !ranks_.all_begun(step)) return false;
  return of(step).prepare_scheduled = true;
}

StepRecord* StepRecords::scheduled() {
  StepRecord* const record = find(ranks_.next_commit());
  return record && record->prepare_scheduled ? record : nullptr;
}

bool StepRecords::all_prepared() const {
  return std::all_of(records_.begin(), records_.end(),
                     [](const auto& of) { return of.second.all_prepared(); });
}

Map<uint64_t, StepRecord> StepRecords::take() {
  for (const auto& [step, record] : records_)
    done(static_cast<uint32_t>(record.device_work.size()));
  return std::exchange(records_, {});
}

uint32_t StepRecords::forget_completed() {
  ControlLock lock(mu_);
  const auto completed = [](const DeviceWorkRef& f) {
    return f->completed.load() && !f->failed.load();
  };
  size_t n = 0;
  for (auto& [step, record] : records_) n += std::erase_if(record.device_work, completed);
  return static_cast<uint32_t>(n);
}

}  // namespace frugal
