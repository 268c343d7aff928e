#include "format/checksum.h"

// The functions are part of this file: the library neither exports them nor loads another's.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace frugal {

uint64_t checksum(const void* bytes, size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes, size, seed);
}

}  // namespace frugal
