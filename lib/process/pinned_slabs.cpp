#include "process/pinned_slabs.h"

#include <algorithm>
#include <utility>

#include "storage/slab.h"

namespace frugal {

void Pins::add(std::shared_ptr<device::Runtime> runtime) {
  Lock lock(mu_);
  pinner_->add(std::move(runtime));
}

void Pins::remove(const device::Runtime* runtime) noexcept {
  Lock lock(mu_);
  pinner_->remove(runtime);
  if (!pinner_->any()) unpin_all();
}

void Pins::unpin() noexcept {
  Lock lock(mu_);
  unpin_all();
}

void Pins::unpin_all() noexcept {
  for (PinnedSlabs* s = first_; s; s = s->next_) s->unpin();
}

PinnedSlabs::PinnedSlabs(std::shared_ptr<Pins> pins) : pins_(std::move(pins)) {
  if (!pins_) return;
  Lock lock(pins_->mu_);
  next_ = pins_->first_;
  from_ = &pins_->first_;
  if (next_) next_->from_ = &next_;
  pins_->first_ = this;
}

PinnedSlabs::~PinnedSlabs() {
  if (!pins_) return;
  Lock lock(pins_->mu_);
  *from_ = next_;
  if (next_) next_->from_ = from_;
}

void PinnedSlabs::over_rows(const Mapping& mapping, uint64_t count, size_t row_bytes) {
  Lock lock(mu_);  // the last device may go just now
  base_ = mapping.base;
  row_bytes_ = row_bytes;
  slab_ = SlabArray::slab_bytes(count, row_bytes);
  pinned_.assign(std::min<uint64_t>((count * row_bytes + slab_ - 1) / slab_, mapping.bytes / slab_),
                 0);
}

void PinnedSlabs::over_buffers(const Mapping& mapping) {
  Lock lock(mu_);
  base_ = mapping.base;
  slab_ = kHugePage;  // as an Arena takes it
  pinned_.assign(mapping.bytes / slab_, 0);
}

Status PinnedSlabs::pin_slab(uint64_t slab) {
  if (slab >= pinned_.size())
    return fail(
        FRUGAL_ERR_INTERNAL,
        "the controller sent a row that its table does not have, or an address outside of its "
        "memory");
  if (pinned_[slab]) return FRUGAL_OK;
  bool pinned = false;
  FRUGAL_TRY(pins_->pinner()->pin_read_only(base_ + slab * slab_, slab_, &pinned));
  if (!pinned) return fail(FRUGAL_ERR_DEVICE, "no device is left that rows could be pinned for");
  pinned_[slab] = 1;
  return FRUGAL_OK;
}

Status PinnedSlabs::pin(const uint32_t* slots, size_t n) {
  if (all_.load(std::memory_order_acquire)) return FRUGAL_OK;
  Lock lock(mu_);
  for (const uint32_t *at = slots, *end = slots + n; at != end;) {
    const uint64_t from = *at * uint64_t{row_bytes_}, last = (from + row_bytes_ - 1) / slab_;
    for (uint64_t slab = from / slab_; slab <= last; ++slab) FRUGAL_TRY(pin_slab(slab));
    // Rows that end in these slabs are done.
    at = std::lower_bound(at + 1, end, (last + 1) * slab_ / row_bytes_);
  }
  return FRUGAL_OK;
}

Status PinnedSlabs::pin_bytes(uint64_t from, uint64_t bytes) {
  if (bytes == 0) return FRUGAL_OK;
  Lock lock(mu_);
  for (uint64_t slab = from / slab_; slab <= (from + bytes - 1) / slab_; ++slab)
    FRUGAL_TRY(pin_slab(slab));
  return FRUGAL_OK;
}

Status PinnedSlabs::pin_all() {
  if (all_.load(std::memory_order_acquire)) return FRUGAL_OK;
  Lock lock(mu_);
  for (uint64_t slab = 0; slab < pinned_.size(); ++slab) FRUGAL_TRY(pin_slab(slab));
  all_.store(true, std::memory_order_release);
  return FRUGAL_OK;
}

void PinnedSlabs::unpin() noexcept {
  Lock lock(mu_);
  all_.store(false);
  for (uint64_t slab = 0; slab < pinned_.size(); ++slab)
    if (std::exchange(pinned_[slab], uint8_t{0})) pins_->pinner()->unpin(base_ + slab * slab_);
}

}  // namespace frugal
