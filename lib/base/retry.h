// Repeats calls that no later call would make up for.
#pragma once
#include <type_traits>

#include "base/status.h"
#include "base/sync.h"

namespace frugal {

// Repeats a call that throws or returns OUT_OF_MEMORY: memory is short, mostly for a moment. After
// each try without success stop(tries) may end the loop.
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
