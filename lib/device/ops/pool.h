// Pooled lookups, and the gradients of their weights.
#ifndef FRUGAL_DEVICE_OPS_POOL_H_
#define FRUGAL_DEVICE_OPS_POOL_H_

#include "arith/fold.h"
#include "device/ops/fold.h"
#include "device/ops/lanes.h"
#include "device/ops/reduce.h"
#include "device/ops/rows.h"
#include "device/simt.h"

namespace frugal::device {

// Bag b has keys offsets[b] .. offsets[b + 1] - 1. Offsets in the caller's device memory were not
// checked by the host. Whatever they are, no key after the last is read, and `wrong` is set.
struct BagsPtr {
  Ptr<uint64_t> offsets;
  uint32_t bags;
  uint32_t keys;
  // A word that becomes 1 if offsets do not ascend from 0 to `keys`; null: they do.
  Ptr<uint32_t> wrong;
};

struct Bag {
  uint64_t begin, end;
};

FRUGAL_DEVICE Bag bag_of(const BagsPtr& b, uint64_t bag) {
  Bag at{load(b.offsets + bag), load(b.offsets + (bag + 1))};
  if (b.wrong) {
    const bool first = bag == 0 && at.begin != 0, last = bag + 1 == b.bags && at.end != b.keys;
    const bool none = at.begin > at.end || at.end > b.keys;
    if (first || last || none) raise(b.wrong);
    if (none) at = {0, 0};
  }
  return at;
}

// The bag of each key, and the number of each bag's terms.
struct BagsOfKeysArgs {
  BagsPtr bags;
  Ptr<Source> key_sources;  // one a key: padding is no term; null: all keys are terms
  Ptr<uint32_t> bag;
  Ptr<float> terms;  // or null
};

FRUGAL_DEVICE void bags_of_keys_body(const BagsOfKeysArgs& a) {
  // A warp for each bag.
  Walk walk(Cut{kWarp, kWarp, 1}, block(), blocks());
  for (; walk.item() < a.bags.bags; walk.next()) {
    const Bag bag = bag_of(a.bags, walk.item());
    uint32_t terms = 0;
    for (uint64_t key = bag.begin + walk.vector(); key < bag.end; key += kWarp) {
      store(a.bag + key, static_cast<uint32_t>(walk.item()));
      terms += !a.key_sources || !load(a.key_sources + key).is_padding();
    }
    if (!a.terms) continue;
    for (uint32_t mask = kWarp / 2; mask != 0; mask /= 2) terms += shuffle_xor(terms, mask);
    if (walk.vector() == 0) store(a.terms + walk.item(), static_cast<float>(terms));
  }
}

// Writes bag b to out + b * out_stride bytes.
struct PoolArgs {
  RowsPtr host, cached_rows, staged;
  Ptr<Source> key_sources;  // one a key, as place_keys makes them; padding is no term
  BagsPtr bags;
  Ptr<float> weights;  // one a key; or null
  uint32_t mean;       // 1: divides by the number of terms
  uint32_t dim;
  Ptr<float> out;
  uint64_t out_stride;  // bytes, a multiple of 4
};

// A lane group for each tile of a bag. It adds the terms one after the other, a run at a time.
FRUGAL_DEVICE void pool_rows_body(const PoolArgs& a) {
  const bool fours = in_fours(a.out, a.out_stride, a.dim);
  Walk walk(cut_rows<Float4>(a.dim), block(), blocks());
  for (; walk.item() < a.bags.bags; walk.next()) {
    if (!walk.in_row()) continue;
    const Bag bag = bag_of(a.bags, walk.item());
    const uint64_t end = bag.end;
    uint64_t terms = 0;
    Float4 run = {};
    PairwiseSum<Float4> runs;
    for (uint64_t key = bag.begin; key < end; key += kInFlight) {
      Source place[kInFlight];
      float weight[kInFlight];
      for (uint32_t k = 0; k < kInFlight; ++k) {
        place[k] = key + k < end ? load(a.key_sources + (key + k)) : Source{kPaddingSlot};
        weight[k] = a.weights && key + k < end ? load(a.weights + (key + k)) : 1.0f;
      }
      Float4 x[kInFlight];
      for (uint32_t k = 0; k < kInFlight; ++k) {
        x[k] = {};
        if (place[k].is_padding()) continue;
        x[k] = load_place(a.host, a.cached_rows, a.staged, place[k], walk.vector());
      }
      for (uint32_t k = 0; k < kInFlight; ++k) {
        if (place[k].is_padding()) continue;
        if (a.weights) x[k] = weight[k] * x[k];
        if (terms % kRun == 0) {
          if (terms != 0) runs.add(run);
          run = x[k];
        } else {
          run = run + x[k];
        }
        ++terms;
      }
    }
    Float4 sum = {};
    if (terms != 0) {
      sum = runs.finish(run);
      if (a.mean) sum = sum / static_cast<float>(terms);
      sum = canonical(sum);
    }
    store_part(forward(a.out, walk.item() * a.out_stride), walk.vector(), a.dim, fours, sum);
  }
}

// --- sum16 --------------------------------------------------------------------------------------

// Lanes of a group that makes a sum16: each holds four of the sixteen.
inline constexpr uint32_t kSumGroup = arith::kSumLanes / 4;

// The sum over the caller's group of kSumGroup lanes, in all of them. It adds lanes l and l + 8,
// then l and l + 4, and so on with 2 and 1. The order of two operands changes no bit (of a sum that
// is no NaN). All lanes of the warp take part.
FRUGAL_DEVICE float finish_sum16(Float4 acc) {
  auto add_of = [](Float4 v, uint32_t mask) {
    return v + Float4{shuffle_xor(v.x, mask), shuffle_xor(v.y, mask), shuffle_xor(v.z, mask),
                      shuffle_xor(v.w, mask)};
  };
  const Float4 four = add_of(add_of(acc, 2), 1);
  return (four.x + four.z) + (four.y + four.w);
}

struct WeightGradArgs {
  RowsPtr host, cached_rows, staged;
  Ptr<Source> key_sources;  // one a key, as in PoolArgs
  Ptr<float> grads;         // of bags
  uint64_t grads_stride;    // bytes, a multiple of 4
  Ptr<uint32_t> bag;        // of keys
  uint32_t keys;
  uint32_t dim;
  Ptr<float> out;  // one a key
};

FRUGAL_DEVICE void weight_grads_body(const WeightGradArgs& a) {
  const uint32_t vectors = (a.dim + 3) / 4;
  const bool fours = in_fours(a.grads, a.grads_stride, a.dim);
  const uint64_t groups = uint64_t{blocks()} * (threads() / kSumGroup);
  const uint64_t group = uint64_t{block()} * (threads() / kSumGroup) + thread() / kSumGroup;
  const uint32_t in_group = thread() % kSumGroup, in_warp = lane() / kSumGroup;
  // A warp goes on until the first of its groups has no more keys.
  for (uint64_t key = group; key - in_warp < a.keys; key += groups) {
    Float4 acc = {};
    const Source place = key < a.keys ? load(a.key_sources + key) : Source{kPaddingSlot};
    if (!place.is_padding()) {
      const Ptr<float> grad = forward(a.grads, load(a.bag + key) * a.grads_stride);
      for (uint32_t v = in_group; v < vectors; v += kSumGroup) {
        const Float4 row = load_place(a.host, a.cached_rows, a.staged, place, v);
        const Float4 g = load_part(grad, v, a.dim, fours);
        for_elements(
            a.dim - v * 4, [](float& sum, const float& w, const float& x) { sum = sum + w * x; },
            acc, row, g);
      }
    }
    const float sum = finish_sum16(acc);
    if (key < a.keys && in_group == 0) store(a.out + key, canonical(sum));
  }
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_POOL_H_
