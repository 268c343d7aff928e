#include "cache/row_cache.h"

#include <bit>
#include <cstring>

namespace frugal {

uint64_t RowCache::places_for(uint64_t lines) { return std::bit_ceil(lines * 2 + 2); }

uint64_t RowCache::bytes_for(const RowLayout& l, uint64_t lines) {
  if (lines == 0) return 0;
  return BufferPool::capacity_for(lines * l.value_stride * sizeof(float)) +
         BufferPool::capacity_for(lines * l.state_stride * sizeof(float)) +
         lines * (sizeof(Line) + sizeof(Pinned) + sizeof(uint32_t)) +
         places_for(lines) * sizeof(Place);
}

Status RowCache::open(const Rows& rows, uint64_t lines, BufferPool* pool) {
  lines_ = lines;
  const device::RowsRef& host = rows.ref();
  value_floats_ = host.value_stride;
  state_floats_ = host.state_stride;
  if (pool) {
    FRUGAL_TRY(pool->get(lines * value_floats_ * sizeof(float), &values_));
    FRUGAL_TRY(pool->get(lines * state_floats_ * sizeof(float), &state_));
  }
  ref_ = host;
  ref_.values = values_.as<float>();
  ref_.state = state_.as<float>();
  line_.resize(lines, Line{kNone, kNone, kNone, kNone, 0});
  free_.reserve(lines);
  for (uint64_t i = lines; i-- > 0;) free_.push_back(static_cast<uint32_t>(i));
  uint64_t places = places_for(lines);
  index_.resize(places, Place{0, kNone});
  shift_ = 64 - std::countr_zero(places);
  for (uint32_t& h : head_) h = kNone;
  return FRUGAL_OK;
}

uint32_t RowCache::find(uint32_t slot) const {
  uint64_t mask = index_.size() - 1;
  for (uint64_t p = place(slot);; p = (p + 1) & mask) {
    if (index_[p].line == kNone) return kNone;
    if (index_[p].slot == slot) return index_[p].line;
  }
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

void RowCache::unlink_line(uint32_t line) {
  Line& l = line_[line];
  if (l.list == kNone) return;
  if (l.prev != kNone)
    line_[l.prev].next = l.next;
  else
    head_[l.list] = l.next;
  if (l.next != kNone) line_[l.next].prev = l.prev;
  l.list = kNone;
}

void RowCache::link_line(uint32_t line, uint64_t next_read) {
  Line& l = line_[line];
  l.next_read = next_read;
  l.list = next_read == UINT64_MAX ? kNever : static_cast<uint32_t>(next_read & 63);
  l.prev = kNone;
  l.next = head_[l.list];
  if (l.next != kNone) line_[l.next].prev = line;
  head_[l.list] = line;
}

void RowCache::remove(uint32_t line) {
  unlink_line(line);
  index_erase(line_[line].slot);
  line_[line].slot = kNone;
  --size_;
}

void RowCache::drop(uint32_t slot) {
  uint32_t line = find(slot);
  if (line == kNone) return;
  remove(line);
  free_.push_back(line);
}

void RowCache::clear(Vector<uint32_t>* dropped) {
  for (uint32_t i = 0; i < line_.size(); ++i) {
    if (line_[i].slot == kNone) continue;
    dropped->push_back(line_[i].slot);
    remove(i);
    free_.push_back(i);
  }
}

void RowCache::copy_in(const Rows& host, uint32_t slot, uint32_t line) {
  std::memcpy(values(line), host.values(slot), value_floats_ * sizeof(float));
  if (state_floats_)
    std::memcpy(ref_.state + line * ref_.state_stride, host.state(slot),
                state_floats_ * sizeof(float));
}

void RowCache::touched(const StepUpdate& update, TermList* t) const {
  t->clear();
  if (size_ == 0) {
    t->close();
    return;
  }
  TermList all;
  update.merge_range(0, UINT64_MAX, &all);
  all.close();
  for (size_t i = 0; i < all.slots.size(); ++i) {
    uint32_t line = find(all.slots[i]);
    if (line == kNone) continue;
    t->begin_row(line);
    for (uint32_t k = all.start[i]; k < all.start[i + 1]; ++k) t->terms.push_back(all.terms[k]);
  }
  t->close();
}

void RowCache::apply(const StepUpdate& update, TermList* t) {
  touched(update, t);
  device::kernels().apply_terms(ref_, update.scalars, t->slots.data(), t->slots.size(),
                                t->terms.data(), t->start.data());
}

}  // namespace frugal
