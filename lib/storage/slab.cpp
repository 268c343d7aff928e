#include "storage/slab.h"

#include <algorithm>
#include <cstring>

#include "base/heap.h"

namespace frugal {

size_t SlabArray::slab_bytes(uint64_t count, size_t stride) {
  // A small array needs no 8 MiB; a page is the least. What fills half of a huge page has all of
  // it: rows of many tables are read at random, and small pages would cost more than the row does.
  uint64_t bytes = count * stride;
  if (bytes >= kSlab) return kSlab;
  if (bytes >= kHugePage / 2) return in_huge_pages(bytes);
  return std::max<uint64_t>(4096, (bytes + 4095) / 4096 * 4096);
}

SlabArray::~SlabArray() {
  unpin();
  os_release(&mapping_);
  if (budget_) budget_->give(committed_.load());
  if (done_) heap_free(done_);
}

Status SlabArray::reserve(uint64_t count, size_t stride, bool shared, MemoryBudget* budget,
                          std::shared_ptr<Pinner> pinner) {
  stride_ = stride;
  budget_ = budget;
  pinner_ = std::move(pinner);
  if (count == 0 || stride == 0) return FRUGAL_OK;
  if (count > (UINT64_MAX >> 2) / stride)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "%llu rows of %zu bytes exceed the address space: ask for fewer",
                static_cast<unsigned long long>(count), stride);
  slab_ = slab_bytes(count, stride);
  slabs_ = (count * stride + slab_ - 1) / slab_;
  FRUGAL_TRY(os_reserve(slabs_ * slab_, shared, &mapping_));
  done_ = static_cast<uint8_t*>(heap_alloc(slabs_));
  std::memset(done_, 0, slabs_);
  return FRUGAL_OK;
}

Status SlabArray::ensure(uint64_t first, uint64_t n) {
  if (n == 0 || stride_ == 0) return FRUGAL_OK;
  uint64_t a = first * stride_ / slab_, b = ((first + n) * stride_ - 1) / slab_;
  for (uint64_t i = a; i <= b; ++i) {
    if (done_[i] & kCommitted) continue;
    if (!(done_[i] & kTaken)) {
      if (budget_ && !budget_->take(slab_))
        return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                    "%zu bytes more for rows, and %s are left of the engine's host_bytes; raise "
                    "the limit or drop a table",
                    slab_, budget_->left_text().c_str());
      if (Status s = os_commit(mapping_, i * slab_, slab_)) {
        if (budget_) budget_->give(slab_);
        return s;
      }
      committed_.fetch_add(slab_, std::memory_order_relaxed);
      done_[i] = kTaken;
    }
    // If pinning fails, the memory stays for the next call: no part of a table is given back.
    bool pinned = false;
    if (pinner_) FRUGAL_TRY(pinner_->pin(mapping_.base + i * slab_, slab_, &pinned));
    done_[i] |= pinned ? kCommitted | kPinned : kCommitted;
  }
  return FRUGAL_OK;
}

void SlabArray::swap(SlabArray& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(stride_, other.stride_);
  std::swap(slab_, other.slab_);
  std::swap(slabs_, other.slabs_);
  std::swap(done_, other.done_);
  pinner_.swap(other.pinner_);
  std::swap(budget_, other.budget_);
  other.committed_.store(committed_.exchange(other.committed_.load()));
}

Status SlabArray::pin_next(bool* any) {
  *any = false;
  for (uint64_t i = 0; pinner_ && done_ && i < slabs_; ++i) {
    if (done_[i] != (kTaken | kCommitted)) continue;
    bool pinned = false;
    FRUGAL_TRY(pinner_->pin(mapping_.base + i * slab_, slab_, &pinned));
    if (!pinned) return FRUGAL_OK;  // there is no device any more
    done_[i] |= kPinned;
    *any = true;
    return FRUGAL_OK;
  }
  return FRUGAL_OK;
}

void SlabArray::unpin() {
  for (uint64_t i = 0; pinner_ && done_ && i < slabs_; ++i)
    if (done_[i] & kPinned) {
      pinner_->unpin(mapping_.base + i * slab_);
      done_[i] &= static_cast<uint8_t>(~kPinned);
    }
}

}  // namespace frugal
