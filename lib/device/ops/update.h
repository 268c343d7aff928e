// Updates cached rows: docs/cuda.md, "Cache"; docs/arithmetic.md, "From the gradient to the
// update".
//
// What: sum_terms adds up the rank gradients of a row into device memory: it reads each once, over
// the PCIe bus. Then apply_<optimizer> updates the row with that sum. It works in device memory
// alone, where reading a sum in several passes is cheap.
//
// Callers: cache refreshes.
#ifndef FRUGAL_DEVICE_OPS_UPDATE_H_
#define FRUGAL_DEVICE_OPS_UPDATE_H_

#include "arith/optimizer.h"
#include "device/ops/lanes.h"
#include "device/ops/pool.h"
#include "device/ops/rows.h"
#include "device/simt.h"

namespace frugal::device {

// --- Ranks --------------------------------------------------------------------------------------

// One rank's sum of a row: row `row` of the rank gradients of rank number `rank`.
struct alignas(8) Term {
  uint32_t rank, row;
};

// Row i of `sums` = the serial sum of terms[start[i]] .. terms[start[i + 1] - 1], in ascending rank
// order, at least one a row. Rank gradients are aligned to 16 bytes.
struct SumTermsArgs {
  Ptr<Ptr<float>> ranks;  // rank gradients
  uint64_t ranks_stride;  // floats, a multiple of 4
  Ptr<Term> terms;
  Ptr<uint32_t> start;  // null: one term a row
  uint32_t count;
  uint32_t dim;
  Ptr<float> sums;       // device memory, aligned to 16 bytes
  uint64_t sums_stride;  // floats, a multiple of 4
};

FRUGAL_DEVICE void sum_terms_body(const SumTermsArgs& a) {
  Walk walk(cut_rows<Float4>(a.dim), block(), blocks());
  while (walk.item() < a.count) {
    Span span[kInFlight];  // of terms
    uint32_t row[kInFlight], vector[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      span[k] = {0, 0};
      row[k] = static_cast<uint32_t>(walk.item());
      vector[k] = walk.vector();
      if (walk.item() < a.count && walk.in_row()) {
        span[k] = {row[k], row[k] + 1};
        if (a.start) span[k] = {load(a.start + row[k]), load(a.start + (row[k] + 1))};
      }
      walk.next();
    }
    // A rank at a time for all rows in flight.
    Float4 sum[kInFlight] = {};
    bool more = true;
    for (uint32_t t = 0; more; ++t) {
      Term term[kInFlight];
      bool in_span[kInFlight];
      more = false;
      for (uint32_t k = 0; k < kInFlight; ++k) {
        in_span[k] = t < span[k].end - span[k].begin;
        term[k] = in_span[k] ? load(a.terms + (span[k].begin + t)) : Term{0, 0};
        more = more || in_span[k];
      }
      Float4 x[kInFlight];
      for (uint32_t k = 0; k < kInFlight; ++k) {
        x[k] = Float4{};
        if (!in_span[k]) continue;
        x[k] = load_vector<Float4>(load(a.ranks + term[k].rank) + term[k].row * a.ranks_stride,
                                   vector[k]);
      }
      for (uint32_t k = 0; k < kInFlight; ++k) {
        if (in_span[k]) sum[k] = t == 0 ? x[k] : sum[k] + x[k];
      }
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (span[k].begin == span[k].end) continue;
      store_vector<Float4>(a.sums + row[k] * a.sums_stride, vector[k], sum[k]);
    }
  }
}

// --- The update ---------------------------------------------------------------------------------

// Updates cache slot to[i] with the gradient sums + i * sums_stride. Nothing else touches these
// rows meanwhile. State columns of cache slot r start at state + r * state_stride and state_second
// elements further.
struct ApplyArgs {
  arith::StepScalars step;
  RowsPtr cached_rows;
  Ptr<Element> state;     // aligned to 16 bytes
  uint64_t state_stride;  // elements; row-wise Adagrad: any; else a multiple of 16 bytes
  uint64_t state_second;  // elements, a multiple of 16 bytes
  Ptr<uint32_t> to;
  uint32_t count;
  uint32_t dim;
  Ptr<float> sums;
  uint64_t sums_stride;  // floats, a multiple of 4
};

// Steps 1 to 6 for one element.
FRUGAL_DEVICE float prepare(const arith::StepScalars& s, float norm_factor, float g, float w) {
  g = arith::scale_gradient(s, g);
  if (s.flags & arith::kClipNorm) g = g * norm_factor;
  if (s.flags & arith::kL2) g = arith::add_l2(s, g, w);
  return g;
}

// One kernel, and therefore one function: what a row's passes share stays in registers. A lane
// group updates a row. It has kSumGroup lanes if there are sums over the row, else as many as the
// row has vectors.
template <int kKind>
FRUGAL_DEVICE void apply(const ApplyArgs& a) {
  constexpr arith::Optimizer kIs = arith::optimizer_of(kKind);
  constexpr bool kRowwise = kIs.of_row, kFirst = kIs.first(), kSecond = kIs.second();
  const arith::StepScalars& s = a.step;
  const uint32_t vectors = (a.dim + 3) / 4;
  const bool measures = (s.flags & (arith::kClipNorm | arith::kNanSkip)) != 0;
  const uint32_t lanes = kRowwise || measures ? kSumGroup : cut_vectors(vectors).lanes;
  const uint64_t groups = uint64_t{blocks()} * (threads() / lanes);
  const uint64_t group = uint64_t{block()} * (threads() / lanes) + thread() / lanes;
  const uint32_t in_group = thread() % lanes, in_warp = lane() / lanes;
  // A warp goes on until the first of its groups has no more rows.
  for (uint64_t i = group; i - in_warp < a.count; i += groups) {
    bool touched = i < a.count;
    const uint64_t cache_slot = touched ? load(a.to + i) : 0;
    const Ptr<Element> row = a.cached_rows.values + cache_slot * a.cached_rows.stride;
    const Ptr<float> sums = a.sums + i * a.sums_stride;
    const Ptr<Element> state = a.state + cache_slot * a.state_stride;
    float factor = 1.0f, rate = 0.0f;
    if (measures) {
      Float4 acc = {};
      bool nan = false;
      if (touched) {
        for (uint32_t v = in_group; v < vectors; v += lanes) {
          const Float4 g = load_vector<Float4>(sums, v);
          for_elements(
              a.dim - v * 4,
              [&](float& sum, const float& x) {
                const float y = arith::scale_gradient(s, x);
                nan = nan || has_nan(y);
                sum = sum + y * y;
              },
              acc, g);
        }
      }
      const float squares = finish_sum16(acc);
      const uint32_t with_nan = ballot(nan) >> (lane() - in_group) & ((1u << kSumGroup) - 1);
      if (s.flags & arith::kClipNorm) factor = arith::norm_factor(s, squares);
      if ((s.flags & arith::kNanSkip) && with_nan != 0) touched = false;
    }
    if constexpr (kRowwise) {
      Float4 acc = {};
      if (touched) {
        for (uint32_t v = in_group; v < vectors; v += lanes) {
          const Float4 g = load_vector<Float4>(sums, v), w = load_vector<Float4>(row, v);
          for_elements(
              a.dim - v * 4,
              [&](float& sum, const float& x, const float& weight) {
                const float y = prepare(s, factor, x, weight);
                sum = sum + y * y;
              },
              acc, g, w);
        }
      }
      const float squares = finish_sum16(acc);
      if (touched && in_group == 0) {
        float accumulator = as_float(load(state));
        rate = arith::update_row(s, squares, accumulator);
        store(state, stored_as<Element>(accumulator));
      }
      rate = shuffle(rate, 0, kSumGroup);
    }
    if (!touched) continue;
    for (uint32_t v = in_group; v < vectors; v += lanes) {
      const Float4 g = load_vector<Float4>(sums, v);
      Float4 w = load_vector<Float4>(row, v);
      Float4 first = {}, second = {};
      if constexpr (kFirst) first = load_vector<Float4>(state, v);
      if constexpr (kSecond) second = load_vector<Float4>(state + a.state_second, v);
      for_elements(
          a.dim - v * 4,
          [&](const float& x, float& weight, float& s0, float& s1) {
            const float y = prepare(s, factor, x, weight);
            arith::update_element<kKind>(s, weight, y, s0, s1, rate);
            weight = arith::finish_weight(s, weight);
          },
          g, w, first, second);
      store_vector<Float4>(row, v, w);
      if constexpr (kFirst) store_vector<Float4>(state, v, first);
      if constexpr (kSecond) store_vector<Float4>(state + a.state_second, v, second);
    }
  }
}

FRUGAL_DEVICE void apply_sgd_body(const ApplyArgs& a) { apply<FRUGAL_SGD>(a); }
FRUGAL_DEVICE void apply_momentum_body(const ApplyArgs& a) { apply<FRUGAL_MOMENTUM>(a); }
FRUGAL_DEVICE void apply_adagrad_body(const ApplyArgs& a) { apply<FRUGAL_ADAGRAD>(a); }
FRUGAL_DEVICE void apply_rowwise_adagrad_body(const ApplyArgs& a) {
  apply<FRUGAL_ROWWISE_ADAGRAD>(a);
}
FRUGAL_DEVICE void apply_adam_body(const ApplyArgs& a) { apply<FRUGAL_ADAM>(a); }
FRUGAL_DEVICE void apply_rmsprop_body(const ApplyArgs& a) { apply<FRUGAL_RMSPROP>(a); }
FRUGAL_DEVICE void apply_ftrl_body(const ApplyArgs& a) { apply<FRUGAL_FTRL>(a); }

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_UPDATE_H_
