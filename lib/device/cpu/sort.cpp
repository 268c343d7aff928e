// Radix sort of (slot, position) pairs. See sort.h.
//
// Speed: a pass costs its elements and its buckets. Two passes of 12 bits sort 65,536 keys of a
// table of 16 M rows faster than three of 8. For few keys the buckets cost more than the keys, so
// the number of passes is chosen by what both cost. The first pass builds the pairs.
#include "device/cpu/sort.h"

#include <string.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/assert.h"

namespace frugal::device {
namespace {

constexpr uint32_t kPadding = 0xffffffffu;
constexpr uint32_t kMaxDigitBits = 12;
constexpr uint32_t kMaxPasses = 4;
constexpr uint32_t kMaxBuckets = 2u << kMaxDigitBits;  // of all passes together
constexpr size_t kInsertionLimit = 24;

uint32_t bits_below(uint64_t rows) {
  uint32_t bits = 1;
  while (bits < 32 && (rows - 1) >> bits != 0) ++bits;
  return bits;
}

struct Digits {
  uint32_t passes;
  uint32_t bits;  // of each digit
};

Digits choose_digits(uint32_t bits, size_t n) {
  Digits best = {};
  uint64_t best_cost = UINT64_MAX;
  for (uint32_t passes = 1; passes <= kMaxPasses; ++passes) {
    const uint32_t digit = (bits + passes - 1) / passes;
    if (digit > kMaxDigitBits || (passes << digit) > kMaxBuckets) continue;
    // A key is moved in about three times the time that a bucket takes to clear and to sum.
    const uint64_t cost = passes * (3 * static_cast<uint64_t>(n) + (uint64_t{1} << digit));
    if (cost < best_cost) {
      best_cost = cost;
      best = {passes, digit};
    }
  }
  return best;
}

size_t insertion_sort(const uint32_t* slots, size_t n, uint32_t first_position, uint64_t* out) {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] == kPadding) continue;
    const uint64_t pair =
        static_cast<uint64_t>(slots[i]) << 32 | (first_position + static_cast<uint32_t>(i));
    size_t at = count++;
    for (; at > 0 && out[at - 1] > pair; --at) out[at] = out[at - 1];
    out[at] = pair;
  }
  return count;
}

}  // namespace

size_t sort_scratch(size_t n, uint64_t rows) {
  if (n <= kInsertionLimit) return 0;
  const Digits digits = choose_digits(bits_below(rows), n);
  return (sizeof(uint32_t) * digits.passes << digits.bits) +
         (digits.passes > 1 ? n * sizeof(uint64_t) : 0);
}

size_t sort_pairs(const uint32_t* slots, size_t n, uint32_t first_position, uint64_t rows,
                  uint64_t* pairs, void* scratch) {
  if (n <= kInsertionLimit) return insertion_sort(slots, n, first_position, pairs);

  const Digits digits = choose_digits(bits_below(rows), n);
  const uint32_t buckets = 1u << digits.bits;
  const uint32_t mask = buckets - 1;
  uint32_t* histogram = static_cast<uint32_t*>(scratch);
  memset(histogram, 0, sizeof(uint32_t) * digits.passes * buckets);
  // The pairs go from one to the other with each pass.
  uint64_t* a = pairs;
  uint64_t* b =
      reinterpret_cast<uint64_t*>(histogram + digits.passes * buckets);  // an even number of counts
  if (digits.passes % 2 == 0) std::swap(a, b);
  size_t count = 0;
  if (digits.passes == 2) {
    for (size_t i = 0; i < n; ++i) {
      const uint32_t slot = slots[i];
      if (slot == kPadding) continue;
      ++count;
      ++histogram[slot & mask];
      ++histogram[buckets + (slot >> digits.bits)];
    }
  } else {
    for (size_t i = 0; i < n; ++i) {
      uint32_t slot = slots[i];
      if (slot == kPadding) continue;
      ++count;
      for (uint32_t p = 0; p < digits.passes; ++p, slot >>= digits.bits) {
        ++histogram[p * buckets + (slot & mask)];
      }
    }
  }
  for (uint32_t p = 0; p < digits.passes; ++p) {
    uint32_t* h = histogram + p * buckets;
    uint32_t sum = 0;
    for (uint32_t d = 0; d < buckets; ++d) {
      const uint32_t c = h[d];
      h[d] = sum;
      sum += c;
    }
  }

  for (size_t i = 0; i < n; ++i) {
    const uint32_t slot = slots[i];
    if (slot == kPadding) continue;
    a[histogram[slot & mask]++] =
        static_cast<uint64_t>(slot) << 32 | (first_position + static_cast<uint32_t>(i));
  }
  for (uint32_t p = 1; p < digits.passes; ++p) {
    uint32_t* h = histogram + p * buckets;
    const uint32_t shift = 32 + p * digits.bits;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t pair = a[i];
      b[h[(pair >> shift) & mask]++] = pair;
    }
    std::swap(a, b);
  }
  FRUGAL_ASSERT(a == pairs);
  FRUGAL_ASSERT(std::adjacent_find(pairs, pairs + count, std::greater_equal<>()) == pairs + count);
  return count;
}

size_t distinct_slots(const uint64_t* pairs, size_t count, uint32_t* slots_out,
                      uint32_t* start_out) {
  if (count == 0) {
    start_out[0] = 0;
    return 0;
  }
  // Every pair writes; only the first of a run moves on. No branch, so nothing to mispredict.
  size_t distinct = 0;
  uint32_t previous = static_cast<uint32_t>(pairs[0] >> 32);
  slots_out[0] = previous;
  start_out[0] = 0;
  for (size_t i = 1; i < count; ++i) {
    const uint32_t slot = static_cast<uint32_t>(pairs[i] >> 32);
    const size_t next = distinct + 1;
    slots_out[next] = slot;
    start_out[next] = static_cast<uint32_t>(i);
    distinct = slot != previous ? next : distinct;
    previous = slot;
  }
  ++distinct;
  start_out[distinct] = static_cast<uint32_t>(count);
  return distinct;
}

}  // namespace frugal::device
