#include "engine/table_cache.h"

#include <algorithm>

#include "base/assert.h"
#include "engine/gpu.h"

namespace frugal {

void TableCache::open(uint64_t cache_slots, std::unique_ptr<CachedRows> made, uint64_t bytes) {
  FRUGAL_ASSERT(cache_slots <= device::Source::kMost);
  RowCache index;
  index.open(cache_slots);
  index_ = std::move(index);
  cached_rows_ = std::move(made);
  bytes_ = bytes;
}

// --- Planning ------------------------------------------------------------------------------------

Vector<PartRef> TableCache::not_planned(const Vector<PartRef>& declared) const {
  const Vector<PartRef>& known = plan_.parts;
  Vector<PartRef> late;
  for (const PartRef& p : declared)
    if (std::find(known.begin(), known.end(), p) == known.end()) late.push_back(p);
  return late;
}

bool TableCache::plan_ahead(uint64_t step, const Vector<PartRef>& declared) {
  const Vector<PartRef> late = not_planned(declared);
  if (planned_ == step && late.empty()) return false;
  plan_.pushed.clear();  // what the update touches changes with it
  return plan(step, late, Window::Urgency::kBackground) == FRUGAL_OK;
}

void TableCache::expect(const Vector<PartRef>& pushed) {
  if (!pushed.empty()) index_.touched(pushed, owner_.rank, &plan_.update);
  plan_.pushed = pushed;
  cached_rows_->send(plan_);
}

// Plans what the refresh of `step` does for these parts, in addition to others if it is planned
// already.
Status TableCache::plan(uint64_t step, const Vector<PartRef>& parts, Window::Urgency urgency) {
  const bool more = planned_ == step;
  Window& window = table_->window;
  flag(urgency);
  if (!more) plan_.clear();
  cached_rows_->forget_plan();
  slots_.clear();
  evicted_.clear();
  slots_to_cache(parts, &slots_);
  next_.resize(slots_.size());
  plan_.parts.reserve(plan_.parts.size() + parts.size());
  window.next_owner_reads(slots_.data(), slots_.size(), step, next_.data(), urgency);
  const size_t before = plan_.admitted.size();
  index_.plan_refresh(
      more, step, slots_.data(), next_.data(), slots_.size(),
      [&](const uint32_t* of_slots, size_t n, uint64_t* reads) {
        window.next_owner_reads(of_slots, n, step, reads, urgency);
      },
      &plan_.admitted, &plan_.to, &evicted_);
  FRUGAL_ASSERT(plan_.admitted.size() == plan_.to.size());
  FRUGAL_ASSERT(index_.refreshed().size() == slots_.size());
  planned_ = step;
  const bool held = hold(before);
  uint64_t dirty = 0;
  window.set_cached(evicted_.data(), evicted_.size(), false, &dirty, urgency);
  table_->rows.unhold_backed(evicted_.data(), evicted_.size());
  counters_.cache_evicted.fetch_add(evicted_.size(), std::memory_order_relaxed);
  counters_.cache_evicted_dirty.fetch_add(dirty, std::memory_order_relaxed);
  if (!held) throw std::bad_alloc();
  for (const PartRef& p : parts) {
    FRUGAL_TRY(set_sources(*p));
    plan_.parts.push_back(p);
  }
  return FRUGAL_OK;
}

// Rows of the parts that the cache may have. Rows that do not exist yet have nothing to cache, and
// uncommitted ones may be undone. With staleness, rows with pending updates are not what the cache
// would have to hold.
void TableCache::slots_to_cache(const Vector<PartRef>& parts, Vector<uint32_t>* slots) {
  const Placement placement = table_->window.placement();
  for (const PartRef& p : parts)
    for (size_t i = 0; i < p->distinct; ++i)
      if (placement.may_cache(owner_.rank, p->row_slots()[i])) slots->push_back(p->row_slots()[i]);
  if (parts.size() > 1) {  // one part's rows are ascending
    std::sort(slots->begin(), slots->end());
    slots->erase(std::unique(slots->begin(), slots->end()), slots->end());
  }
  Vector<uint32_t> waiting, uncommitted;
  table_->rows.collect_new(slots->data(), slots->size(), &waiting, &uncommitted);
  auto has = [](const Vector<uint32_t>& list, uint32_t s) {
    return std::binary_search(list.begin(), list.end(), s);
  };
  auto waits = [&](uint32_t s) { return has(waiting, s) && index_.find(s) == RowCache::kNone; };
  if (!waiting.empty() || !uncommitted.empty())
    std::erase_if(*slots, [&](uint32_t s) { return has(uncommitted, s) || waits(s); });
  if (!stale_) return;
  waiting.clear();
  table_->window.collect_pending(slots->data(), slots->size(), &waiting);
  std::erase_if(*slots, waits);
}

// Where rows may be stored, cached rows hold their slots: from the plan that admits them to the
// plan that evicts them. Without memory new rows are not admitted.
bool TableCache::hold(size_t from) {
  try {
    table_->rows.hold(plan_.admitted.data() + from, plan_.admitted.size() - from);
    return true;
  } catch (const std::bad_alloc&) {
    for (size_t i = from; i < plan_.admitted.size(); ++i) index_.drop(plan_.admitted[i]);
    plan_.admitted.resize(from);
    plan_.to.resize(from);
    cancel_plan();
    return false;
  }
}

// Sets where the cache has the rows of a part, by what has been planned. The others are in no cache
// slot.
Status TableCache::set_sources(Part& part) {
  if (owner_.gpu) owner_.gpu->forget_sources(part);
  part.sources = {};
  part.cached = 0;
  Buffer sources;
  FRUGAL_TRY(pool_.get(part.distinct * sizeof(device::Source), &sources));
  const uint32_t *start = part.row_start(), *row = part.row_slots();
  const uint32_t *refreshed = index_.refreshed().data(), *slot = slots_.data();
  const uint32_t* const end = slot + slots_.size();
  auto* source = sources.as<device::Source>();
  for (size_t i = 0; i < part.distinct; ++i) {
    for (; slot != end && *slot < row[i]; ++slot) ++refreshed;  // both ascend
    const bool there = slot != end && *slot == row[i] && *refreshed != RowCache::kNone;
    source[i] = there ? device::Source::cache_slot(*refreshed) : device::Source{};
    if (there) part.cached += start[i + 1] - start[i];
  }
  part.sources = std::move(sources);
  return FRUGAL_OK;
}

void TableCache::check_plan(uint64_t step, const Vector<PartRef>& declared) {
  const auto stands = [&](const PartRef& p) {
    return p->linked && std::find(declared.begin(), declared.end(), p) != declared.end();
  };
  if (planned_ != step || !std::all_of(plan_.parts.begin(), plan_.parts.end(), stands))
    cancel_plan();
}

void TableCache::cancel_plan() {
  if (planned_ == kNoStep) return;
  for (uint32_t slot : plan_.admitted) index_.drop(slot);
  table_->rows.unhold_backed(plan_.admitted.data(), plan_.admitted.size());
  forget_plan();
}

void TableCache::forget_plan() noexcept {
  planned_ = kNoStep;
  plan_.clear();
  if (cached_rows_) cached_rows_->forget_plan();
}

// --- The refresh --------------------------------------------------------------------------------

Status TableCache::refresh(uint64_t step, const Vector<PartRef>& declared,
                           const Vector<UpdateRef>& committed) {
  counters_.cache_refreshes.fetch_add(1, std::memory_order_relaxed);
  bool all_now = committed.size() > 1;
  if (planned_ != step) {
    FRUGAL_TRY(plan(step, declared, Window::Urgency::kUrgent));
  } else if (const Vector<PartRef> late = not_planned(declared); !late.empty()) {
    // These parts may read cached rows that the plan has for later. Cache slots that they take from
    // it are filled anew.
    FRUGAL_TRY(plan(step, late, Window::Urgency::kUrgent));
    all_now = true;
  } else {
    counters_.cache_planned.fetch_add(1, std::memory_order_relaxed);
  }
  FRUGAL_ASSERT(planned_ == step && not_planned(declared).empty());
  Vector<DueUpdate> dues;
  for (const UpdateRef& update : committed) dues.push_back(due(update, all_now));
  FRUGAL_TRY(cached_rows_->refresh(plan_, dues));
  counters_.cache_admitted.fetch_add(plan_.admitted.size(), std::memory_order_relaxed);
  unflagged_.insert(unflagged_.end(), plan_.admitted.begin(), plan_.admitted.end());
  return FRUGAL_OK;
}

// What a committed update does to cached rows: as planned, if what was pushed is what was declared.
DueUpdate TableCache::due(const UpdateRef& update, bool all_now) {
  DueUpdate d{update, plan_.pushed.size() == update->ranks.size(), {}, 0};
  for (size_t r = 0; d.planned && r < update->ranks.size(); ++r)
    d.planned = update->ranks[r].part == plan_.pushed[r];
  if (!d.planned) {
    Vector<PartRef> pushed;
    for (const RankGradients& h : update->ranks) pushed.push_back(h.part);
    index_.touched(pushed, owner_.rank, &d.other);
  }
  const CachedRowUpdate& touched = d.touched(plan_);
  d.now = all_now ? touched.cache_slots.size() : touched.urgent;
  return d;
}

Status TableCache::finish() {
  FRUGAL_TRY(cached_rows_->finish());
  forget_plan();
  return FRUGAL_OK;
}

void TableCache::flag(Window::Urgency urgency) {
  for (uint32_t slot : unflagged_) FRUGAL_ASSERT(index_.find(slot) != RowCache::kNone);
  table_->window.set_cached(unflagged_.data(), unflagged_.size(), true, nullptr, urgency);
  unflagged_.clear();
}

void TableCache::drop(const uint32_t* slots, size_t n, Vector<uint32_t>* dropped) {
  flag(Window::Urgency::kUrgent);
  cancel_plan();
  for (size_t i = 0; i < n; ++i)
    if (slots[i] < kMissingSlot && index_.find(slots[i]) != RowCache::kNone) {
      index_.drop(slots[i]);
      dropped->push_back(slots[i]);
      table_->rows.unhold_backed(&slots[i], 1);
    }
}

void TableCache::forget() noexcept {
  if (!cached_rows_) return;
  unflagged_.clear();
  forget_plan();
  uint32_t cache_slot = 0, slots[512];
  while (const size_t n = index_.drop_some(&cache_slot, slots, 512)) {
    if (table_->window.opened())
      table_->window.set_cached(slots, n, false, nullptr, Window::Urgency::kUrgent);
    table_->rows.unhold_backed(slots, n);
  }
}

}  // namespace frugal
