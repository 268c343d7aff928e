// The stages of an exact step by the algorithms of the field notes, written for the benchmarks
// and independent of lib/: what the hardware allows, without engine, window and interface.
//
// Compiled once for each instruction set (stage_kernels.cpp); GetKernels picks at run time.
#ifndef FRUGAL_BENCH_STAGE_KERNELS_H_
#define FRUGAL_BENCH_STAGE_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace bench {

enum class Opt { kSgd, kRowwiseAdagrad, kAdagrad, kAdam };

// Hyper-parameters of one step; the equations are those of docs/arithmetic.md.
struct Hyper {
  float lr = 0.01f;
  float eps = 1e-8f;
  float beta1 = 0.9f, beta2 = 0.999f;
  float alpha = 0;  // Adam: lr with the bias correction of the step
};

// A key and its position in the batch.
struct Pair {
  uint32_t row;
  uint32_t position;
};

struct TableView {
  float* values;  // rows of `dim` floats
  float* state0;  // Adagrad, row-wise Adagrad: accumulator; Adam: m
  float* state1;  // Adam: v
};

struct Kernels {
  const char* isa;
  // out[i] = row keys[i], for i in [begin, end): two-level prefetch and streaming stores.
  void (*gather)(const float* values, uint32_t dim, const uint64_t* keys, size_t begin, size_t end,
                 float* out);
  // Sums each row's gradients (fold32) and applies the optimizer, for the runs of equal rows that
  // start in [begin, end) of the n sorted pairs.
  void (*update)(Opt opt, const Hyper& hyper, const TableView& table, uint32_t dim,
                 const Pair* pairs, size_t n, size_t begin, size_t end, const float* grads);
  // Copies with streaming stores; bytes is a multiple of 64.
  void (*copy)(const float* from, float* to, size_t bytes);
};

Kernels GetKernels();

// Stable two-pass radix sort by row: 12 bits a pass, so rows are below 2^24.
void SortPairs(const uint64_t* keys, size_t n, Pair* scratch, Pair* out);

}  // namespace bench

#endif  // FRUGAL_BENCH_STAGE_KERNELS_H_
