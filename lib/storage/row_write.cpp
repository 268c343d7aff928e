#include "storage/row_write.h"

#include <atomic>
#include <cstring>

#include "base/assert.h"
#include "storage/row_memory.h"

namespace frugal {
namespace {

// What the kernels do with an Undo, for a row that none of them writes.
void keep(const device::Undo& undo, const device::RowsRef& of, uint32_t slot, size_t i) {
  std::memcpy(undo.values, of.row(slot), of.dim * sizeof(device::Element));
  if (of.state_pitch) std::memcpy(undo.state, of.state_row(slot), of.state_pitch);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (undo.instead) undo.instead(undo, of, slot, i, false);
  else std::atomic_ref(*undo.slot).store(slot, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void tell(const device::Undo& undo, const device::RowsRef& of, uint32_t slot, size_t i) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (undo.instead) undo.instead(undo, of, slot, i, true);
  else if (undo.progress)
    std::atomic_ref(*undo.progress).store(slot + uint64_t{1}, std::memory_order_release);
  else std::atomic_ref(undo.marks[undo.rows[i]]).store(1, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

}  // namespace

void RowWrite::tell_before() noexcept {
  FRUGAL_ASSERT(slots_);
  undo_ = {};
  for (uint32_t i = 0; i < table_->watcher_count_; ++i)
    tokens_[i] = table_->watchers_[i]->before(*this, &undo_);
}

void RowWrite::tell_after() noexcept {
  for (uint32_t i = table_->watcher_count_; i-- > 0;)
    table_->watchers_[i]->after(*this, tokens_[i]);
}

const device::RowsRef& RowWrite::in_place() const {
  FRUGAL_ASSERT(purpose_.what != What::kUpdate || !table_->versioned());
  return *to_;
}

void RowWrite::store(size_t i, const device::Element* values, const device::Element* state) {
  const uint32_t slot = this->slot(i);
  const device::RowsRef& to = *to_;
  if (undo_.slot) keep(undo_, to, slot, i);
  if (VersionWord* word = table_->version(slot)) {
    begin_write(*word);
    store_shared(to.row(slot), values, to.dim);
    end_write(*word);
  } else {
    std::memcpy(to.row(slot), values, to.dim * sizeof(device::Element));
  }
  if (to.state_pitch) std::memcpy(to.state_row(slot), state, to.state_pitch);
  if (undo_.slot) tell(undo_, to, slot, i);
}

}  // namespace frugal
