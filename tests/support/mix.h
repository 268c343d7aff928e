// splitmix64: neighbouring numbers become unlike ones.
#pragma once
#include <cstdint>

constexpr uint64_t kMixStep = 0x9e3779b97f4a7c15;  // of a sequence mix(x), mix(x + kMixStep), ...

inline uint64_t mix(uint64_t x) {
  x += kMixStep;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
