// Duplicate removal: a stable radix sort of (slot, position) pairs, and its list of distinct slots.
//
// What: the sorted pairs are all that the update of a step needs. They have runs of equal slots,
// positions ascending within a run, and rows in the order in which they lie in memory.
// Invariants: stable; padding (0xffffffff) is left out; nothing is allocated and the stack stays
// small: the caller provides the memory that the passes need.
// Callers: the engine when keys of a step have been resolved; one thread a list.
#ifndef FRUGAL_DEVICE_CPU_SORT_H_
#define FRUGAL_DEVICE_CPU_SORT_H_

#include <stddef.h>
#include <stdint.h>

namespace frugal::device {

// The bytes that sort_pairs needs: counts of digits, and the pairs once more if there are several
// passes.
size_t sort_scratch(size_t n, uint64_t rows);

// Sorts slot << 32 | (first_position + i) for i in 0 .. n - 1 by slot, stable, without padding.
// Slots that are not padding are < `rows`. n + first_position <= 2^32. `pairs` has room for n
// pairs, `scratch` for sort_scratch(n, rows) bytes at a multiple of 8. Returns the number of pairs.
size_t sort_pairs(const uint32_t* slots, size_t n, uint32_t first_position, uint64_t rows,
                  uint64_t* pairs, void* scratch);

// The distinct slots of sorted pairs: slots_out[i], and the index of its first pair in
// start_out[i]. Both have room for `count` (start_out: count + 1); start_out[result] = count.
// Returns their number.
size_t distinct_slots(const uint64_t* pairs, size_t count, uint32_t* slots_out,
                      uint32_t* start_out);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_CPU_SORT_H_
