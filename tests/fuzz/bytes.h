// What fuzz targets read their inputs with.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

inline void Check(bool good) {
  if (!good) std::abort();
}

struct Bytes {
  const uint8_t* at;
  size_t left;
  // The next bytes of the input; zeros after its end.
  uint64_t Number(size_t bytes) {
    uint64_t v = 0;
    const size_t n = std::min(bytes, left);
    if (n > 0) std::memcpy(&v, at, n);
    at += n;
    left -= n;
    return v;
  }
};
