// Random numbers of tests, of any library: mixed ones, generators, and values that break kernels.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "support/mix.h"

namespace frugal {

struct Random {
  explicit Random(uint64_t seed) : engine(seed) {}
  uint64_t operator()() { return engine(); }
  uint64_t below(uint64_t n) { return engine() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  std::mt19937_64 engine;
};

// What kernels are given.
struct RandomValues : Random {
  explicit RandomValues(uint64_t seed) : Random(seed * 0x9e3779b97f4a7c15u) {}
  uint64_t from(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return static_cast<double>(engine() >> 11) * 0x1p-53 < p; }
  template <class T, size_t n>
  T one_of(const T (&choices)[n]) {
    return choices[below(n)];
  }
  template <class T>
  void shuffle(std::vector<T>& v) {
    std::shuffle(v.begin(), v.end(), engine);
  }
  // Mostly ordinary numbers; with `special` also what breaks careless code; NaNs only with `nans`.
  float value(double special, bool nans = true) {
    if (special > 0 && chance(special)) {
      switch (below(nans ? 8 : 7)) {
        case 0:
          return -0.0f;
        case 1:
          return 0.0f;
        case 2:
          return std::bit_cast<float>(static_cast<uint32_t>(below(0x7fffff)));  // denormal
        case 3:
          return -std::bit_cast<float>(static_cast<uint32_t>(below(0x7fffff)));
        case 4:
          return std::numeric_limits<float>::infinity();
        case 5:
          return -std::numeric_limits<float>::infinity();
        case 6:
          return 3e38f;
        default:
          return std::bit_cast<float>(0x7f800001u + static_cast<uint32_t>(below(0x7ffffe)) +
                                      (chance(0.5) ? 0x80000000u : 0));
      }
    }
    // A bell of deviation 0.3, without a logarithm: three numbers of 21 bits. The product rounds,
    // so the last bits of values are drawn, too.
    const uint64_t bits = engine();
    constexpr uint64_t kMask = (uint64_t{1} << 21) - 1;
    const auto sum =
        static_cast<int32_t>((bits & kMask) + (bits >> 21 & kMask) + (bits >> 42 & kMask));
    return static_cast<float>(sum - 3 * (1 << 20)) * (0.3f / (1 << 20));
  }
};

// The first of a test's seeds, the same ones in each run. FRUGAL_TEST_SEED repeats one.
inline uint64_t first_seed() {
  const char* s = std::getenv("FRUGAL_TEST_SEED");
  return s != nullptr ? std::strtoull(s, nullptr, 10) : 1;
}

}  // namespace frugal
