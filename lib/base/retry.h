// Calls that nobody else will make.
#pragma once
#include <type_traits>

#include "base/status.h"
#include "base/sync.h"

namespace frugal {

// Makes a call again where it throws or answers OUT_OF_MEMORY: it is memory that is short, mostly
// for a moment. After each try in vain stop(tries) may end that.
template <class Call, class Stop>
Status retry_for_memory(const Call& call, const Stop& stop) noexcept {
  for (int tries = 1;; ++tries) {
    Status s = FRUGAL_ERR_OUT_OF_MEMORY;
    try {
      if constexpr (std::is_void_v<decltype(call())>) {
        call();
        s = FRUGAL_OK;
      } else {
        s = call();
      }
    } catch (...) {
    }
    if (s != FRUGAL_ERR_OUT_OF_MEMORY || stop(tries)) return s;
    sleep_ns(10'000'000);
  }
}

constexpr int kForASecond = 100;  // tries

template <class Call>
Status retry_for_memory(const Call& call) noexcept {
  return retry_for_memory(call, [](int tries) { return tries >= kForASecond; });
}

}  // namespace frugal
