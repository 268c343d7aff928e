// Compares the keys of a call with the declared ones: docs/cuda.md, "Lookup".
#ifndef FRUGAL_DEVICE_OPS_COMPARE_H_
#define FRUGAL_DEVICE_OPS_COMPARE_H_

#include "device/kernels.h"
#include "device/simt.h"

namespace frugal::device {

struct SameKeysArgs {
  Ptr<uint64_t> keys;      // of the call
  Ptr<uint64_t> declared;  // or null: then the keys are the slots (dense tables)
  Ptr<uint32_t> slots;     // one a key
  uint64_t padding;        // the key that kPaddingSlot stands for
  uint64_t count;
  Ptr<uint32_t> differ;  // a word that becomes 1 if a key differs, and is not written else
};

FRUGAL_DEVICE void same_keys_body(const SameKeysArgs& a) {
  bool differ = false;
  for (uint64_t i = uint64_t{block()} * threads() + thread(); i < a.count;
       i += uint64_t{blocks()} * threads()) {
    uint64_t declared;
    if (a.declared) {
      declared = load(a.declared + i);
    } else {
      const uint32_t slot = load(a.slots + i);
      declared = slot == kPaddingSlot ? a.padding : slot;
    }
    differ = differ || load(a.keys + i) != declared;
  }
  if (differ) raise(a.differ);
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_COMPARE_H_
