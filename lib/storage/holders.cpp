#include "storage/holders.h"

namespace frugal {

void Holders::carry(uint32_t place) {
  more_[place] += 1;
  at(place) = static_cast<Count>(kMore | (kMost - kPiece));
}

void Holders::let_go_more(uint32_t place, uint64_t times) {
  FRUGAL_ASSERT(times <= count(place));
  const uint64_t left = count(place) - times;
  if (left <= kMost) {
    more_.erase(place);
    at(place) = static_cast<Count>(left);
    return;
  }
  // A piece stays here, so that the map is not asked again at once.
  more_[place] = left / kPiece - 1;
  at(place) = static_cast<Count>(kMore | (left % kPiece + kPiece));
}

uint64_t Holders::count(uint32_t place) const {
  const Count c = at(place);
  return (c & kMost) + (c & kMore ? more_.at(place) * kPiece : 0);
}

}  // namespace frugal
