#include "process/staging.h"

#include "base/assert.h"

namespace frugal {

Buffer Staging::lend(uint64_t offset, uint64_t bytes) {
  const char* data = offset % 64 == 0 ? channel_->staging_at(offset, bytes) : nullptr;
  if (!data || bytes == 0) return {};
  if (lent_.fetch_add(bytes) + bytes > channel_->staging_bytes()) {
    lent_.fetch_sub(bytes);
    return {};
  }
  users_.fetch_add(1);
  return Buffer::lent(data, bytes, this);
}

void Staging::give_back(char* data, size_t bytes) noexcept {
  FRUGAL_ASSERT(lent_.load() >= bytes && channel_->staging_at(0, 0) <= data);
  lent_.fetch_sub(bytes);  // the trainer may lend it again as soon as it is notified
  channel_->release(static_cast<uint64_t>(data - channel_->staging_at(0, 0)));
  drop_reference();
}

}  // namespace frugal
