// Threads that nobody waits for.
#pragma once
#include <unistd.h>

#include "base/thread.h"

namespace frugal {

// Makes a call that nobody else will make, again when it throws: it is memory that is short, mostly for a moment.
// False: for a second.
template <class Call>
bool insist(const Call& call) noexcept {
  for (int tries = 0; tries < 100; ++tries) {
    try {
      call();
      return true;
    } catch (...) {
      usleep(10000);
    }
  }
  return false;
}

}  // namespace frugal
