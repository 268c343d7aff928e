#include "engine/pinned_tables.h"

#include <utility>

namespace frugal {

void PinnedTables::join(Trainer& t, std::shared_ptr<device::Runtime> runtime) {
  {
    Lock joins(joins_mu_);
    pinner_.add(std::move(runtime));
  }
  t.pinning.store(true);
  t.pins.store(Trainer::kToPin);
  waiting_.fetch_add(1);
}

void PinnedTables::leave(Trainer& t) noexcept {
  if (t.pins.exchange(Trainer::kPinned) == Trainer::kToPin) waiting_.fetch_sub(1);
  if (t.pinning.exchange(false)) pinner_.remove(&t.gpu->runtime());
}

void PinnedTables::unpin() {
  Lock joins(joins_mu_);
  if (pinner_.any()) return;
  for (const TableRef& table : tables_.now()) table->rows.unpin();
}

Status PinnedTables::next(bool* any) {
  *any = false;
  const Vector<TableRef> tables = tables_.now();
  for (size_t i = 0; i < tables.size() && !*any; ++i) FRUGAL_TRY(tables[i]->rows.pin_next(any));
  return FRUGAL_OK;
}

bool PinnedTables::one(bool* changed) {
  *changed = false;
  if (waiting_.load() == 0) return false;
  // Only these trainers can be marked as pinned below, and not ones that join from here on.
  const Vector<TrainerRef> waiting = ranks_.those([this](const Trainer& t) { return waits(t); });
  if (waiting.empty()) return false;
  bool any;
  const Status status = next(&any);
  if (status == FRUGAL_OK && any) return true;
  for (const TrainerRef& t : waiting) {
    uint32_t now = Trainer::kToPin;
    if (t->pins.compare_exchange_strong(
            now, status == FRUGAL_OK ? Trainer::kPinned : Trainer::kPinFailed))
      waiting_.fetch_sub(1);
  }
  *changed = true;
  return true;
}

Status PinnedTables::again(Trainer& t) {
  for (bool any = true; any;) FRUGAL_TRY(next(&any));
  t.pins.store(Trainer::kPinned);
  return FRUGAL_OK;
}

}  // namespace frugal
