// What messages of the control plane may be. The largest that is sent is an answer with kMostNumbers
// numbers and kMostDescriptors descriptors.
#pragma once
#include <capnp/message.h>

#include "process/control.h"

namespace frugal {

constexpr size_t kMostMessageWords = 8192;  // 64 KiB
constexpr size_t kMostCallWords = 4 * kMostMessageWords;  // of a peer's calls that are not answered

inline capnp::ReaderOptions reader_options() {
  capnp::ReaderOptions options;
  // A message may be read more than once: by the RPC system, and by what it is for.
  options.traversalLimitInWords = 4 * kMostMessageWords;
  options.nestingLimit = 24;
  return options;
}

}  // namespace frugal
