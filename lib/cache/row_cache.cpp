#include "cache/row_cache.h"

#include <algorithm>
#include <bit>

namespace frugal {

uint64_t RowCache::places_for(uint64_t cache_slots) { return std::bit_ceil(cache_slots * 2 + 2); }

uint64_t RowCache::bytes_for(const RowLayout& l, uint64_t cache_slots) {
  if (cache_slots == 0) return 0;
  return BufferPool::capacity_for(cache_slots * l.value_pitch) +
         BufferPool::capacity_for(cache_slots * l.state_pitch) +
         cache_slots * (sizeof(CachedRow) + sizeof(Pinned) + (1 + kListed) * sizeof(uint32_t)) +
         places_for(cache_slots) * sizeof(Place);
}

void RowCache::open(uint64_t cache_slots) {
  cache_slots_ = cache_slots;
  cached_row_.resize(cache_slots, CachedRow{kNone, 0, UINT64_MAX});
  free_.reserve(cache_slots);
  pinned_.reserve(cache_slots);
  for (uint64_t i = cache_slots; i-- > 0;) free_.push_back(static_cast<uint32_t>(i));
  uint64_t places = places_for(cache_slots);
  index_.resize(places, Place{0, kNone});
  shift_ = 64 - std::countr_zero(places);
}

uint32_t RowCache::find(uint32_t slot) const {
  uint64_t mask = index_.size() - 1;
  for (uint64_t p = place(slot);; p = (p + 1) & mask) {
    if (index_[p].cache_slot == kNone) return kNone;
    if (index_[p].slot == slot) return index_[p].cache_slot;
  }
}

void RowCache::find(const uint32_t* slots, size_t n, uint32_t* cache_slots) const {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&index_[place(slots[i + kAhead])]);
    cache_slots[i] = find(slots[i]);
  }
}

void RowCache::sources(const uint32_t* slots, size_t n, device::Source* out) const {
  static_assert(sizeof(device::Source) == sizeof(uint32_t));
  auto* cache_slot = reinterpret_cast<uint32_t*>(out);
  find(slots, n, cache_slot);
  for (size_t i = 0; i < n; ++i)
    out[i] = cache_slot[i] == kNone ? device::Source{} : device::Source::cache_slot(cache_slot[i]);
}

void RowCache::index_insert(uint32_t slot, uint32_t cache_slot) {
  uint64_t mask = index_.size() - 1, p = place(slot);
  while (index_[p].cache_slot != kNone) p = (p + 1) & mask;
  index_[p] = {slot, cache_slot};
}

void RowCache::index_erase(uint32_t slot) {
  uint64_t mask = index_.size() - 1, p = place(slot);
  while (index_[p].slot != slot || index_[p].cache_slot == kNone) p = (p + 1) & mask;
  // Backward shift keeps every chain unbroken without tombstones.
  for (uint64_t hole = p;;) {
    p = (p + 1) & mask;
    if (index_[p].cache_slot == kNone) {
      index_[hole].cache_slot = kNone;
      return;
    }
    uint64_t home = place(index_[p].slot);
    if (((p - home) & mask) >= ((p - hole) & mask)) {
      index_[hole] = index_[p];
      hole = p;
    }
  }
}

void RowCache::begin_refresh(uint64_t step) {
  step_before_ = step_;
  step_ = step;
  if (++number_ == 1u << 31) {
    for (CachedRow& cached_row : cached_row_) cached_row.mark = 0;
    number_ = 1;
  }
  pinned_.clear();
  const uint32_t passing = list_of(step);
  List& passed = lists_[passing];
  passed.cache_slots.erase(passed.cache_slots.begin(),
                           passed.cache_slots.begin() + static_cast<ptrdiff_t>(passed.first));
  passed.first = 0;
  passed_ = std::move(passed.cache_slots);
  if (unlisted_) {
    unlisted_ = false;
    passed_.clear();
    for (List& list : lists_) list.forget();
    for (uint32_t cache_slot = 0; cache_slot < cached_row_.size(); ++cache_slot) {
      if (cached_row_[cache_slot].slot == kNone) continue;
      const uint64_t next_read = cached_row_[cache_slot].next_read;
      list_cache_slot(cache_slot, list_of(next_read) == passing ? UINT64_MAX : next_read);
    }
  }
  List& never = lists_[kNever];
  if (never.cache_slots.size() < 2 * cache_slots_ + 64) return;  // else most of it is out of date
  size_t kept = 0;
  for (size_t i = never.first; i < never.cache_slots.size(); ++i) {
    const uint32_t cache_slot = never.cache_slots[i];
    if (!listed(cache_slot, kNever)) continue;
    cached_row_[cache_slot].mark = number_ << 1;  // so that it is kept once
    never.cache_slots[kept++] = cache_slot;
  }
  never.cache_slots.resize(kept);
  never.first = 0;
  for (uint32_t cache_slot : never.cache_slots) cached_row_[cache_slot].mark = 0;
}

// A cached row whose step has come, and that this step does not read any more, has no known next
// read.
void RowCache::end_refresh(uint64_t step) {
  const uint32_t passing = list_of(step);
  for (size_t i = 0; i < passed_.size(); ++i) {
    if (i + kAhead < passed_.size()) __builtin_prefetch(&cached_row_[passed_[i + kAhead]]);
    if (listed(passed_[i], passing)) list_cache_slot(passed_[i], UINT64_MAX);
  }
  passed_.clear();
  if (passed_.capacity() > spare_.capacity()) spare_.swap(passed_);
}

void RowCache::list_cache_slot(uint32_t cache_slot, uint64_t next_read) noexcept {
  cached_row_[cache_slot].next_read = next_read;
  Vector<uint32_t>& list = lists_[list_of(next_read)].cache_slots;
  // As one list ends, another begins: as many lists have memory as steps are declared.
  if (list.capacity() == 0) list.swap(spare_);
  try {
    list.push_back(cache_slot);
  } catch (const std::bad_alloc&) {
    unlisted_ = true;  // it stays cached until lists are rebuilt
  }
}

void RowCache::remove(uint32_t cache_slot) {
  FRUGAL_ASSERT(cached_row_[cache_slot].slot != kNone &&
                find(cached_row_[cache_slot].slot) == cache_slot);
  index_erase(cached_row_[cache_slot].slot);
  cached_row_[cache_slot].slot = kNone;
  cached_row_[cache_slot].mark = 0;
  --size_;
}

void RowCache::drop(uint32_t slot) noexcept {
  uint32_t cache_slot = find(slot);
  if (cache_slot == kNone) return;
  remove(cache_slot);
  free_.push_back(cache_slot);
}

size_t RowCache::drop_some(uint32_t* cache_slot, uint32_t* slots, size_t most) noexcept {
  size_t n = 0;
  for (; *cache_slot < cached_row_.size() && n < most; ++*cache_slot) {
    if (cached_row_[*cache_slot].slot == kNone) continue;
    slots[n++] = cached_row_[*cache_slot].slot;
    remove(*cache_slot);
    free_.push_back(*cache_slot);
  }
  if (n) return n;
  pinned_.clear();
  for (List& list : lists_) list.forget();
  return 0;
}

void RowCache::touched(const Vector<PartRef>& ranks, uint32_t owner, CachedRowUpdate* out) {
  hits_.clear();
  for (uint32_t r = 0; r < ranks.size() && size_; ++r) {
    const Part& part = *ranks[r];
    const uint32_t* slots = part.row_slots();
    const size_t n = part.distinct, before = hits_.size();
    const device::Source* from;
    if (part.rank == owner && part.step == step_before_ && part.sources) {
      // The sources at its step: rows that were evicted since have left their cache slots, and
      // admitted rows are new.
      from = part.sources.as<device::Source>();
    } else {
      hit_sources_.resize(n);
      sources(slots, n, hit_sources_.data());
      from = hit_sources_.data();
    }
    for (uint32_t i = 0; i < n; ++i) {
      if (i + kAhead < n && from[i + kAhead].is_own())
        __builtin_prefetch(&cached_row_[from[i + kAhead].index()]);
      if (!from[i].is_own()) continue;
      const uint32_t at = from[i].index();
      const CachedRow& cached_row = cached_row_[at];
      if (cached_row.slot == slots[i] && !is_new(cached_row))
        hits_.push_back({slots[i], at, {r, i}, read_now(cached_row)});
    }
    std::inplace_merge(hits_.begin(), hits_.begin() + static_cast<ptrdiff_t>(before), hits_.end(),
                       [](const Hit& a, const Hit& b) { return a.slot < b.slot; });
  }
  out->clear();
  for (const bool urgent : {true, false}) {
    for (size_t i = 0; i < hits_.size();) {
      const uint32_t cache_slot = hits_[i].cache_slot;
      const bool take = hits_[i].urgent == urgent;
      if (take) {
        out->cache_slots.push_back(cache_slot);
        out->start.push_back(static_cast<uint32_t>(out->terms.size()));
      }
      for (; i < hits_.size() && hits_[i].cache_slot == cache_slot; ++i)
        if (take) out->terms.push_back(hits_[i].term);
    }
    if (urgent) out->urgent = out->cache_slots.size();
  }
  out->start.push_back(static_cast<uint32_t>(out->terms.size()));
}

}  // namespace frugal
