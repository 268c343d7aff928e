// A small random generator whose sequence is the same everywhere, so that a seed repeats a run.
#ifndef FRUGAL_TESTS_ORACLE_RANDOM_H_
#define FRUGAL_TESTS_ORACLE_RANDOM_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "support/mix.h"

namespace frugal_oracle {

class Random {
 public:
  // Mixed once, or neighbouring seeds would give the same sequence a step apart.
  explicit Random(uint64_t seed) : state_(seed ^ 0x1234567u) { state_ = Next(); }

  uint64_t Next() {
    const uint64_t next = mix(state_);
    state_ += kMixStep;
    return next;
  }
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : Next() % n; }
  uint64_t Between(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Unit() < p; }
  float Float(float low, float high) {
    return low + (high - low) * (static_cast<float>(Next() >> 40) * 0x1p-24f);
  }
  // 10^low .. 10^high, evenly over the exponents.
  float PowerOfTen(double low, double high) {
    return static_cast<float>(std::pow(10.0, low + (high - low) * Unit()));
  }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return *(values.begin() + Below(values.size()));
  }
  // An index, drawn in proportion to its weight.
  size_t Weighted(std::initializer_list<int> weights) {
    int sum = 0;
    for (int w : weights) sum += w;
    int left = static_cast<int>(Below(static_cast<uint64_t>(sum)));
    size_t i = 0;
    for (int w : weights) {
      if (left < w) return i;
      left -= w;
      ++i;
    }
    return 0;
  }
  template <typename T>
  void Shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i) {
      using std::swap;
      swap((*values)[i - 1], (*values)[Below(i)]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_RANDOM_H_
