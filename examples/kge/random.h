// Counter-based random numbers: a value is a function of the seed and of what it is for, so any
// rank can compute the batch of any later step without drawing those before it.
#ifndef FRUGAL_EXAMPLES_KGE_RANDOM_H_
#define FRUGAL_EXAMPLES_KGE_RANDOM_H_

#include <cstdint>

namespace kge {

// The finalizer of splitmix64.
inline uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A stream of its own for each (seed, a, b); `Draw` numbers the values within it.
inline uint64_t Stream(uint64_t seed, uint64_t a, uint64_t b) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return Mix(Mix(Mix(seed + kGolden) + a * kGolden) + b * kGolden + 1);
}

inline uint64_t Draw(uint64_t stream, uint64_t index) {
  return Mix(stream + (index + 1) * 0x9e3779b97f4a7c15u);
}

// Maps 64 random bits to 0..n-1.
inline uint64_t Below(uint64_t bits, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * n) >> 64);
}

// A random permutation of 0..n-1 that is computed element by element: a Feistel network on the next
// even power of two, walked until it lands inside.
class Permutation {
 public:
  Permutation(uint64_t n, uint64_t stream) : n_(n), stream_(stream) {
    while (half_bits_ < 31 && (uint64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
  }

  uint64_t operator()(uint64_t i) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    do {
      uint64_t left = i >> half_bits_;
      uint64_t right = i & mask;
      for (uint64_t round = 0; round < 4; ++round) {
        const uint64_t next = left ^ (Draw(stream_, (round << 32) | right) & mask);
        left = right;
        right = next;
      }
      i = (left << half_bits_) | right;
    } while (i >= n_);
    return i;
  }

 private:
  uint64_t n_;
  uint64_t stream_;
  unsigned half_bits_ = 1;
};

}  // namespace kge

#endif  // FRUGAL_EXAMPLES_KGE_RANDOM_H_
