#include "storage/row_memory.h"

#include <cstring>

#include "base/assert.h"

namespace frugal {

Status RowMemory::open(const Config& c, MemoryBudget* budget) {
  most_rows_ = c.capacity;
  layout_ = c.layout;
  init_ = c.init;
  budget_ = budget;
  pinner_ = c.pinner;
  FRUGAL_TRY(values_.reserve(most_rows_, layout_.value_pitch, c.shared, budget, pinner_));
  FRUGAL_TRY(state_.reserve(most_rows_, layout_.state_pitch, c.shared, budget, pinner_));
  ref_ = layout_.at(values_.base(), state_.base());
  return FRUGAL_OK;
}

Status RowMemory::ensure(uint64_t first, uint64_t n) {
  FRUGAL_TRY(values_.ensure(first, n));
  FRUGAL_TRY(state_.ensure(first, n));
  for (uint32_t i = 0; i < watcher_count_; ++i) FRUGAL_TRY(watchers_[i]->expect(first, n));
  return FRUGAL_OK;
}

void RowMemory::initialize(uint32_t slot, uint64_t key) {
  const RowWrite write(*this, &slot, 1, {RowWrite::What::kNew});
  const device::RowsRef to = write.in_place();
  std::memset(to.row(slot), 0, layout_.value_pitch);
  if (layout_.state_pitch) std::memset(to.state_row(slot), 0, layout_.state_pitch);
  device::kernels().initialize(to, init_, &key, 0, &slot, 0, 1);
}

Status RowMemory::initialize_range(uint64_t first, uint64_t n) {
  FRUGAL_TRY(ensure(first, n));
  const RowWrite write(*this, nullptr, 0, {RowWrite::What::kNew});
  device::kernels().initialize(write.in_place(), init_, nullptr, first, nullptr,
                               static_cast<uint32_t>(first), n);
  return FRUGAL_OK;
}

void RowMemory::initialize_rows(uint64_t first, uint64_t n) {
  constexpr uint64_t kAtOnce = 256;
  uint32_t slots[kAtOnce];
  for (uint64_t at = first; at < first + n; at += kAtOnce) {
    const uint64_t count = std::min(kAtOnce, first + n - at);
    for (uint64_t i = 0; i < count; ++i) slots[i] = static_cast<uint32_t>(at + i);
    const RowWrite write(*this, slots, count, {RowWrite::What::kNew});
    device::kernels().initialize(write.in_place(), init_, nullptr, at, nullptr,
                                 static_cast<uint32_t>(at), count);
  }
}

uint64_t RowMemory::chunk_rows() const {
  // After so many rows both values and state are at the start of a slab: 2^21 records of a multiple
  // of 4 bytes are a multiple of 8 MiB.
  return uint64_t{1} << 21;
}

Status RowMemory::pin_next(bool* any) {
  FRUGAL_TRY(values_.pin_next(any));
  return *any ? FRUGAL_OK : state_.pin_next(any);
}

void RowMemory::unpin() {
  values_.unpin();
  state_.unpin();
}

Status RowMemory::open_state(State* s) const {
  return s->array.reserve(most_rows_, s->layout.state_pitch, values_.fd() >= 0, budget_, pinner_);
}

Status RowMemory::fill_state(State* s, uint64_t first, uint64_t n) const {
  FRUGAL_TRY(s->array.ensure(first, n));
  const device::RowsRef to = s->layout.at(nullptr, s->array.base());
  for (uint64_t i = first; i < first + n; ++i) s->layout.new_state(s->init, to.state_row(i));
  return FRUGAL_OK;
}

Status RowMemory::take_state(State* s) {
  // A trainer that joins on a GPU from here on finds it here.
  for (bool any = true; any;) FRUGAL_TRY(s->array.pin_next(&any));
  state_.swap(s->array);
  init_ = s->init;
  layout_.take_state(s->layout);
  const device::RowsRef to = layout_.at(values_.base(), state_.base());
  ref_.state = to.state;
  ref_.state_pitch = to.state_pitch;
  ref_.state_second = to.state_second;
  for (uint32_t i = 0; i < watcher_count_; ++i) watchers_[i]->new_state();
  return FRUGAL_OK;
}

void RowMemory::watch(RowWatcher* watcher, RowWatcher* former) {
  for (uint32_t i = 0; former && i < watcher_count_; ++i)
    if (watchers_[i] == former) {
      watchers_[i] = watcher;
      return;
    }
  FRUGAL_ASSERT(watcher_count_ < RowWrite::kMostWatchers);
  watchers_[watcher_count_++] = watcher;
}

void RowMemory::unwatch(RowWatcher* watcher) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < watcher_count_; ++i)
    if (watchers_[i] != watcher) watchers_[kept++] = watchers_[i];
  watcher_count_ = kept;
}

void RowMemory::read_beside(VersionWord* words, uint64_t number) {
  words_ = words;
  number_ = number;
}

}  // namespace frugal
