#include "cache/row_cache.h"

#include <algorithm>
#include <bit>

namespace frugal {

uint64_t RowCache::places_for(uint64_t lines) { return std::bit_ceil(lines * 2 + 2); }

uint64_t RowCache::bytes_for(const RowLayout& l, uint64_t lines) {
  if (lines == 0) return 0;
  return BufferPool::capacity_for(lines * l.value_pitch) +
         BufferPool::capacity_for(lines * l.state_pitch) +
         lines * (sizeof(Line) + sizeof(Pinned) + (1 + kListed) * sizeof(uint32_t)) +
         places_for(lines) * sizeof(Place);
}

void RowCache::open(uint64_t lines) {
  cache_slots_ = lines;
  line_.resize(lines, Line{kNone, 0, UINT64_MAX});
  free_.reserve(lines);
  pinned_.reserve(lines);
  for (uint64_t i = lines; i-- > 0;) free_.push_back(static_cast<uint32_t>(i));
  uint64_t places = places_for(lines);
  index_.resize(places, Place{0, kNone});
  shift_ = 64 - std::countr_zero(places);
}

uint32_t RowCache::find(uint32_t slot) const {
  uint64_t mask = index_.size() - 1;
  for (uint64_t p = place(slot);; p = (p + 1) & mask) {
    if (index_[p].line == kNone) return kNone;
    if (index_[p].slot == slot) return index_[p].line;
  }
}

void RowCache::find(const uint32_t* slots, size_t n, uint32_t* lines) const {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&index_[place(slots[i + kAhead])]);
    lines[i] = find(slots[i]);
  }
}

void RowCache::sources(const uint32_t* slots, size_t n, device::Source* out) const {
  static_assert(sizeof(device::Source) == sizeof(uint32_t));
  auto* line = reinterpret_cast<uint32_t*>(out);
  find(slots, n, line);
  for (size_t i = 0; i < n; ++i)
    out[i] = line[i] == kNone ? device::Source{} : device::Source::line(line[i]);
}

void RowCache::index_insert(uint32_t slot, uint32_t line) {
  uint64_t mask = index_.size() - 1, p = place(slot);
  while (index_[p].line != kNone) p = (p + 1) & mask;
  index_[p] = {slot, line};
}

void RowCache::index_erase(uint32_t slot) {
  uint64_t mask = index_.size() - 1, p = place(slot);
  while (index_[p].slot != slot || index_[p].line == kNone) p = (p + 1) & mask;
  // Backward shift keeps every chain unbroken without tombstones.
  for (uint64_t hole = p;;) {
    p = (p + 1) & mask;
    if (index_[p].line == kNone) {
      index_[hole].line = kNone;
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
    for (Line& line : line_) line.mark = 0;
    number_ = 1;
  }
  pinned_.clear();
  const uint32_t passing = list_of(step);
  List& passed = lists_[passing];
  passed.lines.erase(passed.lines.begin(),
                     passed.lines.begin() + static_cast<ptrdiff_t>(passed.first));
  passed.first = 0;
  passed_ = std::move(passed.lines);
  if (unlisted_) {
    unlisted_ = false;
    passed_.clear();
    for (List& list : lists_) list.forget();
    for (uint32_t line = 0; line < line_.size(); ++line) {
      if (line_[line].slot == kNone) continue;
      const uint64_t next_read = line_[line].next_read;
      list_line(line, list_of(next_read) == passing ? UINT64_MAX : next_read);
    }
  }
  List& never = lists_[kNever];
  if (never.lines.size() < 2 * cache_slots_ + 64) return;  // else most of it is out of date
  size_t kept = 0;
  for (size_t i = never.first; i < never.lines.size(); ++i) {
    const uint32_t line = never.lines[i];
    if (!listed(line, kNever)) continue;
    line_[line].mark = number_ << 1;  // so that it stays once
    never.lines[kept++] = line;
  }
  never.lines.resize(kept);
  never.first = 0;
  for (uint32_t line : never.lines) line_[line].mark = 0;
}

// Lines whose step has come and that nobody reads in it any more are never read, as far as we know.
void RowCache::end_refresh(uint64_t step) {
  const uint32_t passing = list_of(step);
  for (size_t i = 0; i < passed_.size(); ++i) {
    if (i + kAhead < passed_.size()) __builtin_prefetch(&line_[passed_[i + kAhead]]);
    if (listed(passed_[i], passing)) list_line(passed_[i], UINT64_MAX);
  }
  passed_.clear();
  if (passed_.capacity() > spare_.capacity()) spare_.swap(passed_);
}

void RowCache::list_line(uint32_t line, uint64_t next_read) noexcept {
  line_[line].next_read = next_read;
  Vector<uint32_t>& list = lists_[list_of(next_read)].lines;
  // One list is done with, another one begun: as many have memory as steps are declared.
  if (list.capacity() == 0) list.swap(spare_);
  try {
    list.push_back(line);
  } catch (const std::bad_alloc&) {
    unlisted_ = true;  // it stays, until lists are made anew
  }
}

void RowCache::remove(uint32_t line) {
  FRUGAL_ASSERT(line_[line].slot != kNone && find(line_[line].slot) == line);
  index_erase(line_[line].slot);
  line_[line].slot = kNone;
  line_[line].mark = 0;
  --size_;
}

void RowCache::drop(uint32_t slot) noexcept {
  uint32_t line = find(slot);
  if (line == kNone) return;
  remove(line);
  free_.push_back(line);
}

size_t RowCache::drop_some(uint32_t* line, uint32_t* slots, size_t most) noexcept {
  size_t n = 0;
  for (; *line < line_.size() && n < most; ++*line) {
    if (line_[*line].slot == kNone) continue;
    slots[n++] = line_[*line].slot;
    remove(*line);
    free_.push_back(*line);
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
      // Where its rows were: those that have gone since have left their lines, and those that have
      // come are new.
      from = part.sources.as<device::Source>();
    } else {
      hit_sources_.resize(n);
      sources(slots, n, hit_sources_.data());
      from = hit_sources_.data();
    }
    for (uint32_t i = 0; i < n; ++i) {
      if (i + kAhead < n && from[i + kAhead].is_own())
        __builtin_prefetch(&line_[from[i + kAhead].index()]);
      if (!from[i].is_own()) continue;
      const uint32_t at = from[i].index();
      const Line& line = line_[at];
      if (line.slot == slots[i] && !is_new(line))
        hits_.push_back({slots[i], at, {r, i}, read_now(line)});
    }
    std::inplace_merge(hits_.begin(), hits_.begin() + static_cast<ptrdiff_t>(before), hits_.end(),
                       [](const Hit& a, const Hit& b) { return a.slot < b.slot; });
  }
  out->clear();
  for (const bool urgent : {true, false}) {
    for (size_t i = 0; i < hits_.size();) {
      const uint32_t line = hits_[i].line;
      const bool take = hits_[i].urgent == urgent;
      if (take) {
        out->lines.push_back(line);
        out->start.push_back(static_cast<uint32_t>(out->terms.size()));
      }
      for (; i < hits_.size() && hits_[i].line == line; ++i)
        if (take) out->terms.push_back(hits_[i].term);
    }
    if (urgent) out->urgent = out->lines.size();
  }
  out->start.push_back(static_cast<uint32_t>(out->terms.size()));
}

}  // namespace frugal
