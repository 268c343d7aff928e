#include "format/checksum.h"

#include <new>

#ifdef FRUGAL_NO_XXHASH
#include "base/assert.h"
#else
// The functions are part of this file: the library neither exports them nor loads another's.
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace frugal {

#ifdef FRUGAL_NO_XXHASH

bool checksums_are_built() { return false; }
uint64_t checksum(const void*, size_t, uint64_t) noexcept {
  FRUGAL_ASSERT(false);
  return 0;
}

RunningChecksum::RunningChecksum(uint64_t) { FRUGAL_ASSERT(false); }
void RunningChecksum::add(const void*, size_t) noexcept {}
uint64_t RunningChecksum::value() const noexcept { return 0; }

#else

bool checksums_are_built() { return true; }
uint64_t checksum(const void* bytes, size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes, size, seed);
}

RunningChecksum::RunningChecksum(uint64_t seed) {
  static_assert(sizeof(XXH3_state_t) <= sizeof state_ && alignof(XXH3_state_t) <= 64);
  XXH3_INITSTATE(new (state_) XXH3_state_t);
  XXH3_64bits_reset_withSeed(reinterpret_cast<XXH3_state_t*>(state_), seed);
}

void RunningChecksum::add(const void* bytes, size_t size) noexcept {
  XXH3_64bits_update(reinterpret_cast<XXH3_state_t*>(state_), bytes, size);
}

uint64_t RunningChecksum::value() const noexcept {
  return XXH3_64bits_digest(reinterpret_cast<const XXH3_state_t*>(state_));
}

#endif

}  // namespace frugal
