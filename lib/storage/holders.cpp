#include "storage/holders.h"

namespace frugal {

void Holders::carry(uint32_t slot) {
  more_[slot] += 1;
  at(slot) = static_cast<Count>(kMore | (kMost - 1 - kPiece));
}

// (If the map has the slot, this takes no memory.)
void Holders::hold(uint32_t slot, uint64_t times) {
  if (times >= kMost) more_[slot] = times / kPiece;
  at(slot) = static_cast<Count>(times < kMost ? times : kMore | times % kPiece);
}

void Holders::release_more(uint32_t slot, uint64_t times) {
  FRUGAL_ASSERT(times <= count(slot));
  const uint64_t left = count(slot) - times;
  if (left < kMost) more_.erase(slot);
  hold(slot, left);
}

uint64_t Holders::count(uint32_t slot) const {
  const Count c = at(slot);
  return (c & kMost) + (c & kMore ? more_.at(slot) * kPiece : 0);
}

}  // namespace frugal
