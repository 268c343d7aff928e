#include "storage/row_write.h"

#include <cstring>

#include "base/assert.h"
#include "storage/row_memory.h"

namespace frugal {
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
  if (undo_.slot)
    undo_.keep(to, slot, i, [&] {
      std::memcpy(undo_.values, to.row(slot), to.dim * sizeof(device::Element));
      if (to.state_pitch) std::memcpy(undo_.state, to.state_row(slot), to.state_pitch);
    });
  if (VersionWord* word = table_->version(slot)) {
    begin_write(*word);
    store_shared(to.row(slot), values, to.dim);
    end_write(*word);
  } else {
    std::memcpy(to.row(slot), values, to.dim * sizeof(device::Element));
  }
  if (to.state_pitch) std::memcpy(to.state_row(slot), state, to.state_pitch);
  if (undo_.slot) undo_.tell(to, slot, i);
}

}  // namespace frugal
