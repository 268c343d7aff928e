#include "format/checksum.h"

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

#else

bool checksums_are_built() { return true; }
uint64_t checksum(const void* bytes, size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes, size, seed);
}

#endif

}  // namespace frugal
