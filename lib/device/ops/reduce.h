// Sums the gradients of one rank: docs/cuda.md, "Push".
#ifndef FRUGAL_DEVICE_OPS_REDUCE_H_
#define FRUGAL_DEVICE_OPS_REDUCE_H_

#include "device/ops/fold.h"
#include "device/ops/lanes.h"
#include "device/ops/rows.h"
#include "device/simt.h"

namespace frugal::device {

// Where the gradient of a position comes from: GradSource of kernels.h.
struct GradPtr {
  Ptr<float> grads;    // gradient rows, of positions or of bags
  uint64_t stride;     // bytes from row to row, a multiple of 4
  Ptr<uint32_t> bag;   // position -> gradient row; null: the position itself
  Ptr<float> factor;   // per position: multiplies the gradient; or null
  Ptr<float> divisor;  // per gradient row: divides the gradient; or null
};

// Vector `index` of the term of a position.
template <class V>
FRUGAL_DEVICE V load_term(const GradPtr& g, uint32_t position, uint32_t index) {
  const uint32_t row = g.bag ? load(g.bag + position) : position;
  V x = load_vector<V>(forward(g.grads, row * g.stride), index);
  if (g.factor) x = load(g.factor + position) * x;
  if (g.divisor) x = x / load(g.divisor + row);
  return x;
}

// --- Sums of runs -------------------------------------------------------------------------------

// Distinct rows with at most kRun positions are summed to `sums`. The others are the frequent rows:
// the sums of their runs go to `runs`, dim floats each. All runs of the first frequent row come
// first, then those of the next.
struct ReduceArgs {
  PartPtr part;
  GradPtr source;
  Ptr<Item> items;         // the runs of frequent rows in the order of `runs`
  uint32_t frequent_runs;  // their number
  uint32_t dim;
  Ptr<float> sums;       // of distinct rows: the rank gradients, in host memory
  uint64_t sums_stride;  // floats
  Ptr<float> runs;
  Ptr<uint32_t> nan;  // a word that becomes 1 if a term is a NaN, and is not written else; or null
};

// The serial sum of a span's terms, `nan` true if one is a NaN.
template <class V>
FRUGAL_DEVICE V sum_run(const PartPtr& part, const GradPtr& source, Span span, uint32_t index,
                        bool& nan) {
  V sum = {};
  const Ptr<uint32_t> positions = part.positions + span.begin;
  const uint32_t n = span.end - span.begin;
  for (uint32_t i = 0; i < n; i += kInFlight) {
    uint32_t position[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      position[k] = i + k < n ? load(positions + (i + k)) : 0;
    }
    V x[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      x[k] = V{};
      if (i + k < n) x[k] = load_term<V>(source, position[k], index);
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (i + k >= n) continue;
      nan = nan || has_nan(x[k]);
      sum = i + k == 0 ? x[k] : sum + x[k];
    }
  }
  return sum;
}

template <class V>
FRUGAL_DEVICE void reduce_vectors(const ReduceArgs& a) {
  Walk walk(cut_rows<V>(a.dim), block(), blocks());
  const uint64_t items = uint64_t{a.part.distinct} + a.frequent_runs;
  bool nan = false;
  for (; walk.item() < items; walk.next()) {
    if (!walk.in_row()) continue;
    if (walk.item() < a.part.distinct) {
      const uint32_t row = static_cast<uint32_t>(walk.item());
      const Span span{load(a.part.start + row), load(a.part.start + (row + 1))};
      if (span.end - span.begin > kRun) continue;
      const V sum = sum_run<V>(a.part, a.source, span, walk.vector(), nan);
      store_vector<V>(a.sums + row * a.sums_stride, walk.vector(), sum);
    } else {
      const uint64_t run = walk.item() - a.part.distinct;
      const Span span = span_of(a.part, load(a.items + run));
      const V sum = sum_run<V>(a.part, a.source, span, walk.vector(), nan);
      store_vector<V>(a.runs + run * a.dim, walk.vector(), sum);
    }
  }
  if (nan && a.nan) raise(a.nan);
}

FRUGAL_DEVICE void reduce_runs_body(const ReduceArgs& a) {
  if (in_fours(a.source.grads, a.source.stride, a.dim)) {
    reduce_vectors<Float4>(a);
  } else {
    reduce_vectors<float>(a);
  }
}

// --- Sums of frequent rows ----------------------------------------------------------------------

// A row with more than kRun positions, and where its runs begin.
struct alignas(8) FrequentRow {
  uint32_t row, first_run;
};

struct CombineArgs {
  Ptr<FrequentRow> frequent_list;  // ascending
  uint32_t frequent_count;
  uint32_t frequent_runs;  // of all of them
  uint32_t dim;
  Ptr<float> runs;  // as reduce_runs leaves them; only read
  Ptr<float> sums;
  uint64_t sums_stride;  // floats
};

// The sum of a piece: runs first .. first + n - 1 of a row. Four at a time are combined in
// registers.
template <class V>
FRUGAL_DEVICE V sum_piece(Ptr<float> runs, uint32_t dim, uint64_t first, uint64_t n,
                          uint32_t index) {
  auto run = [&](uint64_t r) { return load_vector<V>(runs + (first + r) * dim, index); };
  PairwiseSum<V> fours;
  uint64_t r = 0;
  for (; n - r > 4; r += 4) {
    const V a = run(r), b = run(r + 1), c = run(r + 2), d = run(r + 3);
    fours.add((a + b) + (c + d));
  }
  V last = run(r);
  if (n - r > 1) last = last + run(r + 1);
  if (n - r > 2) {
    V high = run(r + 2);
    if (n - r > 3) high = high + run(r + 3);
    last = last + high;
  }
  return fours.finish(last);
}

// The runs of a piece, a power of two, so that `groups` pieces hold `n` runs.
FRUGAL_HD uint64_t runs_of_piece(uint64_t n, uint32_t groups) {
  uint64_t piece = 1;
  while (piece * groups < n) piece *= 2;
  return piece;
}

// A block for each tile of a frequent row. Each of its lane groups sums a piece; their sums are
// combined in shared memory.
template <class V>
FRUGAL_DEVICE void combine_vectors(const CombineArgs& a) {
  const Cut cut = cut_rows<V>(a.dim);
  const uint32_t groups = threads() / cut.lanes, group = thread() / cut.lanes;
  V* sums = reinterpret_cast<V*>(shared());  // of pieces, one a thread
  for (uint64_t unit = block(); unit < uint64_t{a.frequent_count} * cut.tiles; unit += blocks()) {
    const uint64_t h = unit / cut.tiles;
    const uint32_t vector =
        static_cast<uint32_t>(unit % cut.tiles) * cut.lanes + thread() % cut.lanes;
    const FrequentRow frequent = load(a.frequent_list + h);
    const uint64_t end =
        h + 1 < a.frequent_count ? load(a.frequent_list + (h + 1)).first_run : a.frequent_runs;
    const uint64_t n = end - frequent.first_run;
    const uint64_t piece = runs_of_piece(n, groups);
    const uint64_t pieces = (n + piece - 1) / piece;
    const bool takes_part = group < pieces && vector < cut.vectors;
    V sum = {};
    if (takes_part) {
      const uint64_t first = group * piece;
      sum = sum_piece<V>(a.runs, a.dim, frequent.first_run + first,
                         n - first < piece ? n - first : piece, vector);
    }
    for (uint32_t step = 1; step < pieces; step *= 2) {
      // Cells that other threads read in the round before are not written any more.
      if (group % step == 0) sums[thread()] = sum;
      sync();
      if (group % (2 * step) == 0 && group + step < pieces) {
        sum = sum + sums[thread() + step * cut.lanes];
      }
    }
    sync();  // before the next unit uses the memory
    if (takes_part && group == 0) {
      store_vector<V>(a.sums + frequent.row * a.sums_stride, vector, sum);
    }
  }
}

FRUGAL_DEVICE void combine_runs_body(const CombineArgs& a) {
  if (a.dim % 4 == 0) {
    combine_vectors<Float4>(a);
  } else {
    combine_vectors<float>(a);
  }
}

// --- Gradients of single keys -------------------------------------------------------------------

// For a push that is not the first of its table in the step. Row p of `out` is the term of position
// p, or zeros where p is padding.
struct ExpandArgs {
  PartPtr part;
  GradPtr source;
  uint32_t dim;
  Ptr<float> out;     // dim floats a row
  Ptr<uint32_t> nan;  // as in ReduceArgs
};

template <class V>
FRUGAL_DEVICE void expand_vectors(const ExpandArgs& a) {
  Walk walk(cut_rows<V>(a.dim), block(), blocks());
  const uint64_t occurrences = load(a.part.start + a.part.distinct);
  const uint64_t keys = occurrences + a.part.zeros;
  bool nan = false;
  for (; walk.item() < keys; walk.next()) {
    if (!walk.in_row()) continue;
    const uint32_t position = load(a.part.positions + walk.item());
    V x = {};
    if (walk.item() < occurrences) {
      x = load_term<V>(a.source, position, walk.vector());
      nan = nan || has_nan(x);
    }
    store_vector<V>(a.out + uint64_t{position} * a.dim, walk.vector(), x);
  }
  if (nan && a.nan) raise(a.nan);
}

FRUGAL_DEVICE void expand_terms_body(const ExpandArgs& a) {
  if (in_fours(a.source.grads, a.source.stride, a.dim)) {
    expand_vectors<Float4>(a);
  } else {
    expand_vectors<float>(a);
  }
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_REDUCE_H_
