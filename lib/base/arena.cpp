#include "base/arena.h"

namespace frugal {

Arena::~Arena() {
  if (own_) os_release(&mapping_);
}

Status Arena::open(size_t bytes) {
  FRUGAL_TRY(os_reserve(bytes, true, &mapping_));
  own_ = true;
  end_ = mapping_.bytes;
  return FRUGAL_OK;
}

void Arena::over(const Mapping& mapping, size_t first, size_t bytes) {
  mapping_ = mapping;
  first_ = used_ = first;
  end_ = first + bytes;
}

Status Arena::take(size_t bytes, char** out) {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::lock_guard<std::mutex> lock(mu_);
  if (bytes > end_ - used_)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "%zu bytes more than the %zu bytes of shared memory for buffers",
                bytes - (end_ - used_), end_ - first_);
  FRUGAL_TRY(os_commit(mapping_, used_, bytes));
  *out = mapping_.base + used_;
  used_ += bytes;
  return FRUGAL_OK;
}

void Arena::put_back(char* last, size_t bytes) noexcept {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::lock_guard<std::mutex> lock(mu_);
  if (offset(last) + bytes != used_) return;
  used_ -= bytes;  // the next who takes it has its memory, which does not go back to the system
}

}  // namespace frugal
