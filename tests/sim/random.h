// Random numbers of the host implementation: small, seeded, the same on every machine.
#pragma once

#include <stdint.h>

#include "sim/order.h"

namespace frugal::device::sim {

inline uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  FRUGAL_UNSEEN uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }
  // Below n, which is not 0.
  FRUGAL_UNSEEN uint32_t below(uint32_t n) {
    return static_cast<uint32_t>(((next() >> 32) * n) >> 32);
  }
  bool percent(uint32_t p) { return below(100) < p; }

 private:
  uint64_t state_;
};

}  // namespace frugal::device::sim
