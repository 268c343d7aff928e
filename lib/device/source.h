// Where a rank reads a row, in one word. Cache refreshes write it, and Gpu for staged rows. Lookups
// read it: on the CPU, in attached processes and on GPUs.
//
//   bits 31, 30   the other bits
//
//       0         a host row. Of a key: its slot. Of a distinct row: 0; the part has its slot
//
//       1   0     a cache slot, of the rank's own cache
//
//       1   1     the number of a staged row: copied for this op
//
// 0 1 is free for a cached row of another rank, once the slots of keys are below 2^30. The word of
// a key can also be kPaddingSlot or kMissingSlot, which are no rows. (Slots of keys from 2^31 on do
// not fit: such rows are staged.)
#ifndef FRUGAL_DEVICE_SOURCE_H_
#define FRUGAL_DEVICE_SOURCE_H_

#include "device/kernels.h"

namespace frugal::device {

struct Source {
  uint32_t word = 0;

  static constexpr uint32_t kOwn = 0x80000000u, kStaged = 0x40000000u, kIndex = kStaged - 1;
  // The most cache slots, or staged rows: the word of none is padding or missing.
  static constexpr uint32_t kMost = kIndex - 1;
  static FRUGAL_HD constexpr Source host(uint32_t slot) { return {slot}; }
  static FRUGAL_HD constexpr Source cache_slot(uint32_t index) { return {kOwn | index}; }
  static FRUGAL_HD constexpr Source staged(uint32_t index) { return {kOwn | kStaged | index}; }

  FRUGAL_HD constexpr bool is_own() const { return word & kOwn; }        // a cached or a staged row
  FRUGAL_HD constexpr bool is_staged() const { return word & kStaged; }  // if it is own
  FRUGAL_HD constexpr uint32_t index() const { return word & kIndex; }   // if it is own
  FRUGAL_HD constexpr bool is_padding() const { return word == kPaddingSlot; }
  FRUGAL_HD constexpr bool is_missing() const { return word == kMissingSlot; }
};

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_SOURCE_H_
