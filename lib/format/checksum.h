// Checksums of bytes on disk: XXH3 with 64 bits, the same on every processor.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arith/init.h"

namespace frugal {

// False in a build without xxhash.h. Checkpoints are UNSUPPORTED then, since nothing below may be
// called.
bool checksums_are_built();
uint64_t checksum(const void* bytes, size_t size, uint64_t seed) noexcept;

// What has a checksum. The numbers are part of the formats.
enum class ChecksumKind : uint64_t { kHeader = 1, kRecord = 2, kColumn = 3, kBlob = 4 };

// The seed of a checksum: unlike for each place of a file, for each file, and for each kind of
// bytes. So bytes that were moved there from elsewhere are found.
class ChecksumSeeds {
 public:
  ChecksumSeeds() = default;
  ChecksumSeeds(ChecksumKind kind, uint64_t table, uint64_t file)
      : mixed_(arith::mix(arith::mix(arith::mix(static_cast<uint64_t>(kind)) ^ table) ^ file)) {}
  uint64_t at(uint64_t place) const { return arith::mix(mixed_ ^ place); }

 private:
  uint64_t mixed_ = 0;
};

// checksum() of bytes that come in pieces.
class RunningChecksum {
 public:
  explicit RunningChecksum(uint64_t seed);
  void add(const void* bytes, size_t size) noexcept;
  uint64_t value() const noexcept;

 private:
  alignas(64) char state_[640];
};

}  // namespace frugal
