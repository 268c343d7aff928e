// Part of a sweep over all points at which something can fail.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace frugal_test {

// Each `apart`-th point; under a sanitizer one of three of those, others at each run: the optimized
// build has them all. The seed is printed, and FRUGAL_TEST_SLICE repeats it.
struct Slice {
  explicit Slice(uint64_t apart) : step(apart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    static const uint64_t seed = [] {
      const char* s = std::getenv("FRUGAL_TEST_SLICE");
      const uint64_t n = s != nullptr ? std::strtoull(s, nullptr, 10) : std::random_device{}();
      std::printf("one point of three; FRUGAL_TEST_SLICE=%llu repeats it\n",
                  static_cast<unsigned long long>(n));
      std::fflush(stdout);
      return n;
    }();
    sliced = 3;
    step *= sliced;
    first = seed % step;
#endif
  }
  uint64_t first = 0, step, sliced = 1;  // `step` is `apart` times `sliced`
};

}  // namespace frugal_test
