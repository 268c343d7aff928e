// The kernels of the cpu device: everything that moves or computes rows in bulk.
//
// What: a table of function pointers, filled for the widest instruction set that the machine has.
// Invariants: all instruction sets give the same bits, those of docs/arithmetic.md. Kernels are
// re-entrant, allocate nothing, take no locks and report no errors: their arguments are checked
// before. They compute in the default floating-point environment (base/fpenv.h), which the caller
// sets. Pointers need the alignment of their type only; rows, state and sums should be aligned to
// 64 bytes for speed.
// Callers: the engine, with chunks of some hundred to some ten thousand rows; initializers; caches.
#ifndef FRUGAL_DEVICE_KERNELS_H_
#define FRUGAL_DEVICE_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "arith/hd.h"
#include "arith/init.h"
#include "arith/optimizer.h"
#include "device/element.h"

namespace frugal::device {

// Slots that are no rows; a table has fewer than 2^32 - 2.
inline constexpr uint32_t kPaddingSlot = 0xffffffffu;  // reads as zeros, is no term of a bag
inline constexpr uint32_t kMissingSlot = 0xfffffffeu;  // reads as zeros, counts as a term of zeros

// The address `bytes` after p.
template <class T>
FRUGAL_HD T* behind(T* p, size_t bytes) {
  return (T*)((const char*)p + bytes);  // const or not, as T is
}

// The rows of a table, or of a cache. A pitch is the bytes from one row to the next.
template <class E>
struct RowsAt {
  E* values;
  size_t value_pitch;
  E* state;  // NULL for optimizers without state
  size_t state_pitch;
  size_t state_second;  // bytes from the first state column to the second
  uint32_t dim;

  FRUGAL_HD E* row(size_t slot) const { return behind(values, slot * value_pitch); }
  FRUGAL_HD E* state_row(size_t slot) const { return behind(state, slot * state_pitch); }
  FRUGAL_HD E* second_column(E* state_row) const { return behind(state_row, state_second); }
};
// RowsView is for readers, RowsRef for writers: of a table's rows that is RowWrite alone
// (storage/row_write.h).
using RowsView = RowsAt<const Element>;
struct RowsRef : RowsAt<Element> {
  operator RowsView() const { return {values, value_pitch, state, state_pitch, state_second, dim}; }
};

// Where the gradient of a position comes from.
struct GradSource {
  const float* grads;    // gradient rows, of positions or of bags
  size_t stride;         // bytes from row to row
  const uint32_t* bag;   // position -> gradient row; NULL: the position itself
  const float* factor;   // per position: multiplies the gradient; or NULL
  const float* divisor;  // per gradient row: divides the gradient (mean pooling); or NULL
};

struct Undo;  // what the update kernels record of each row that they write (undo.h)

struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512"

  // --- Reading rows ---------------------------------------------------------------------------

  // out row i = row slots[i]; zeros for kPaddingSlot and kMissingSlot. `out_stride` is in bytes, a
  // multiple of 4 and at least dim * 4. With `streaming` the stores go past the caches where
  // alignment allows it. That is right for outputs larger than the caches (about 1 MiB and more).
  void (*gather)(const RowsView& rows, const uint32_t* slots, size_t n, float* out,
                 size_t out_stride, bool streaming);
  // The same from pointers to rows; NULL is zeros.
  void (*gather_pointers)(const Element* const* rows, size_t n, uint32_t dim, float* out,
                          size_t out_stride, bool streaming);

  // Pooled lookup of bags first .. last - 1. Bag b has keys offsets[b] .. offsets[b + 1] - 1 and
  // goes to out + b * out_stride bytes. `weights` (one a key) or NULL; `mean` divides by the number
  // of terms. kPaddingSlot is no term.
  void (*pool)(const RowsView& rows, const uint32_t* slots, const uint64_t* offsets, size_t first,
               size_t last, const float* weights, bool mean, float* out, size_t out_stride);
  // The same from pointers, one a key. NULL is padding, that is no term; a missing row is given as
  // a pointer to zeros.
  void (*pool_pointers)(const Element* const* rows, uint32_t dim, const uint64_t* offsets,
                        size_t first, size_t last, const float* weights, bool mean, float* out,
                        size_t out_stride);

  // out[i] = sum16(row slots[i] * gradient of position i), canonical; 0 for padding. Of `source`
  // only grads, stride and bag count.
  void (*weight_grads)(const RowsView& rows, const uint32_t* slots, size_t n,
                       const GradSource& source, float* out);
  void (*weight_grads_pointers)(const Element* const* rows, size_t n, uint32_t dim,
                                const GradSource& source, float* out);

  // --- Summing the gradients of one rank ------------------------------------------------------

  // Distinct rows first .. last - 1 of a sorted list: out + i * out_stride (floats) = fold32 over
  // the pairs start[i] .. start[i + 1] - 1. Returns true if one of the terms is a NaN. `streaming`
  // as for gather: right for sums that are not read soon.
  bool (*reduce)(const uint64_t* pairs, const uint32_t* start, size_t first, size_t last,
                 uint32_t dim, const GradSource& source, float* out, size_t out_stride,
                 bool streaming);
  // True if a gradient row has a NaN, for positions (rows of grads) 0 .. n - 1; `stride` in bytes.
  bool (*has_nan)(const float* grads, size_t n, uint32_t dim, size_t stride);

  // --- Updating rows --------------------------------------------------------------------------
  // All of docs/arithmetic.md, "From the gradient to the update", for rows that no other thread
  // touches meanwhile. Slots of a call are distinct; ascending order is fastest. Each returns the
  // number of touched rows, which is n unless the NaN policy skips some. `undo` may be NULL.

  // Row slots[i] with the gradient sums + i * sums_stride (floats).
  size_t (*apply)(const RowsRef& rows, const arith::StepScalars& step, const uint32_t* slots,
                  size_t n, const float* sums, size_t sums_stride, const Undo* undo);
  // Row slots[index[i]] with the gradient sums + index[i] * sums_stride.
  size_t (*apply_indexed)(const RowsRef& rows, const arith::StepScalars& step,
                          const uint32_t* slots, const uint32_t* index, size_t n, const float* sums,
                          size_t sums_stride, const Undo* undo);
  // Row slots[i] with the serial sum of terms[term_start[i]] .. terms[term_start[i + 1] - 1], the
  // rank sums in ascending rank order, at least one a row.
  size_t (*apply_terms)(const RowsRef& rows, const arith::StepScalars& step, const uint32_t* slots,
                        size_t n, const float* const* terms, const uint32_t* term_start,
                        const Undo* undo);
  // Reduce and apply in one pass: row slots[i] for i in first .. last - 1 of a sorted list, slots
  // and start as sort.h makes them.
  size_t (*apply_fused)(const RowsRef& rows, const arith::StepScalars& step, const uint64_t* pairs,
                        const uint32_t* slots, const uint32_t* start, size_t first, size_t last,
                        const GradSource& source, const Undo* undo);
  // apply_fused for the distinct rows index[0 .. n - 1] of the sorted list.
  size_t (*apply_fused_indexed)(const RowsRef& rows, const arith::StepScalars& step,
                                const uint64_t* pairs, const uint32_t* slots, const uint32_t* start,
                                const uint32_t* index, size_t n, const GradSource& source,
                                const Undo* undo);

  // --- Making rows ----------------------------------------------------------------------------

  // Fills row i (i in 0 .. n - 1) with the initial values and state of its key. The row is
  // slots[i], or first_slot + i if slots is NULL; the key keys[i], or first_key + i if NULL.
  void (*initialize)(const RowsRef& rows, const arith::InitSpec& spec, const uint64_t* keys,
                     uint64_t first_key, const uint32_t* slots, uint32_t first_slot, size_t n);
  // Replaces each NaN by the canonical one.
  void (*canonicalize)(float* values, size_t n);
};

// The kernels for this machine.
const Kernels& kernels();

// The kernels of one instruction set; NULL if this build or machine does not have it.
const Kernels* kernels_isa(const char* name);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_KERNELS_H_
