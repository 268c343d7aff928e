// The rank that may cache a row, its owner, by a hash of the row's slot. A window keeps the owner's
// reads apart, and caches admit no other rows.
#pragma once
#include <cstdint>

namespace frugal {

class Placement {
 public:
  Placement(uint32_t ranks = 1) : ranks_(ranks) {}
  bool may_cache(uint32_t rank, uint32_t slot) const {
    uint64_t x = (slot + 1) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 32;
    return rank == static_cast<uint32_t>(((x & 0xffffffffu) * ranks_) >> 32);
  }

 private:
  uint64_t ranks_;
};

}  // namespace frugal
