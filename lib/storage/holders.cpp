#include "storage/holders.h"

namespace frugal {

void Holders::carry(uint32_t place) {
  more_[place] += 1;
  at(place) = static_cast<Count>(kMore | (kMost - 1 - kPiece));
}

// (Where the map has the place this takes no memory.)
void Holders::hold(uint32_t place, uint64_t times) {
  if (times >= kMost) more_[place] = times / kPiece;
  at(place) = static_cast<Count>(times < kMost ? times : kMore | times % kPiece);
}

void Holders::release_more(uint32_t place, uint64_t times) {
  FRUGAL_ASSERT(times <= count(place));
  const uint64_t left = count(place) - times;
  if (left < kMost) more_.erase(place);
  hold(place, left);
}

uint64_t Holders::count(uint32_t place) const {
  const Count c = at(place);
  return (c & kMost) + (c & kMore ? more_.at(place) * kPiece : 0);
}

}  // namespace frugal
