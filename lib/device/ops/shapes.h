// How many blocks and threads a kernel gets, and how much shared memory.
//
// What: one function a kernel; gather_shape also fills in how its blocks are divided.
//
// Invariants: any shape gives the same result, with a multiple of 32 threads up to kBlockThreads
// and the shared memory that is computed here. Other shapes are only slower.
//
// Callers: the code that launches kernels.
#ifndef FRUGAL_DEVICE_OPS_SHAPES_H_
#define FRUGAL_DEVICE_OPS_SHAPES_H_

#include "device/ops/kernels.h"
#include "device/runtime.h"

namespace frugal::device {

inline constexpr uint32_t kBlockThreads = 256;  // at most; what kernels are compiled for

// What a device has.
struct Extent {
  uint32_t processors = 132;
  uint32_t link_blocks = 0;          // blocks that read over the PCIe bus; 0: one a processor
  uint32_t threads = kBlockThreads;  // of a block
};

// Enough blocks for `lanes` lanes, but no more than run at once: kernels loop over the rest.
inline Shape shape_of(uint64_t lanes, uint64_t most_blocks, const Extent& e) {
  const uint64_t blocks = (lanes + e.threads - 1) / e.threads;
  const uint64_t most = most_blocks < 1 ? 1 : most_blocks;
  return {static_cast<uint32_t>(blocks < 1 ? 1 : blocks < most ? blocks : most), e.threads, 0};
}
// An H100 reads rows of 512 bytes at the speed of its PCIe bus with 16 blocks. Rows of 128 bytes at
// scattered addresses take one block a processor, which leaves most of the processor to others.
inline uint64_t link_blocks(const Extent& e) {
  return e.link_blocks ? e.link_blocks : e.processors;
}
// 1,024 threads a processor: what all architectures hold with the registers that kernels may have.
inline uint64_t all_blocks(const Extent& e) { return uint64_t{e.processors} * 1024 / e.threads; }

// The lanes for `items` items that are cut in this way, if each lane handles `each` vectors.
inline uint64_t lanes_of(uint64_t items, const Cut& cut, uint32_t each) {
  return (items * cut.tiles + each - 1) / each * cut.lanes;
}
// With vectors of four floats where dim allows them. Outputs that do not are rare, and then each
// lane has four times as much to do.
inline uint64_t row_lanes(uint64_t items, uint32_t dim, uint32_t each = 1) {
  return lanes_of(items, dim % 4 == 0 ? cut_rows<Float4>(dim) : cut_rows<float>(dim), each);
}

inline Shape gather_shape(GatherArgs* a, const Extent& e = {}) {
  const uint64_t hbm_items = uint64_t{a->hbm_items} + a->part.zeros;
  const Cut cut = cut_rows<Float4>(a->dim);
  const Shape host = shape_of(lanes_of(a->host_items, cut, kInFlight), link_blocks(e), e);
  a->host_blocks = a->host_items == 0 ? 0 : host.blocks;
  // The host's blocks leave most of their processors' time to the others.
  const Shape hbm = shape_of(lanes_of(hbm_items, cut, kInFlight), all_blocks(e), e);
  return {a->host_blocks + (hbm_items == 0 && a->host_blocks != 0 ? 0 : hbm.blocks), e.threads, 0};
}

inline Shape stage_shape(const StageArgs& a, const Extent& e = {}) {
  return shape_of(lanes_of(a.count, cut_rows<Float4>(a.dim), kInFlight), link_blocks(e), e);
}

inline Shape fill_shape(const FillArgs& a, const Extent& e = {}) {
  const Cut cut = cut_vectors(a.vectors());
  return shape_of(lanes_of(a.count, cut, kInFlight), link_blocks(e), e);
}

inline Shape place_shape(const PlaceArgs& a, const Extent& e = {}) {
  const uint64_t lanes = uint64_t{a.part.distinct} * kWarp;
  return shape_of(lanes > a.part.zeros ? lanes : a.part.zeros, all_blocks(e), e);
}

inline Shape bags_of_keys_shape(const BagsOfKeysArgs& a, const Extent& e = {}) {
  return shape_of(uint64_t{a.bags.bags} * kWarp, all_blocks(e), e);
}

// `longest_bag`: keys of the longest bag, at most.
inline Shape pool_shape(const PoolArgs& a, uint64_t longest_bag, const Extent& e = {}) {
  const uint32_t levels = fold_levels((longest_bag + kRun - 1) / kRun);
  Extent shared = e;
  // A thread needs shared memory for `levels` vectors: short bags need none, long ones smaller
  // blocks.
  if (levels > 4 && shared.threads > 64) shared.threads = 64;
  Shape s = shape_of(lanes_of(a.bags.bags, cut_rows<Float4>(a.dim), 1), all_blocks(shared), shared);
  s.shared_bytes = levels * s.threads * static_cast<uint32_t>(sizeof(Float4));
  return s;
}

inline Shape weight_grads_shape(const WeightGradArgs& a, const Extent& e = {}) {
  return shape_of(uint64_t{a.keys} * kSumGroup, all_blocks(e), e);
}

inline Shape same_keys_shape(const SameKeysArgs& a, const Extent& e = {}) {
  return shape_of(a.count, all_blocks(e), e);
}

inline Shape reduce_shape(const ReduceArgs& a, const Extent& e = {}) {
  return shape_of(row_lanes(uint64_t{a.part.distinct} + a.frequent_runs, a.dim), all_blocks(e), e);
}

inline Shape combine_shape(const CombineArgs& a, const Extent& e = {}) {
  const Cut cut = a.dim % 4 == 0 ? cut_rows<Float4>(a.dim) : cut_rows<float>(a.dim);
  // No row has more runs than all of them.
  auto levels = [&](uint32_t threads) {
    return fold_levels((runs_of_piece(a.frequent_runs, threads / cut.lanes) + 3) / 4);
  };
  uint32_t threads = e.threads, most = levels(threads);
  if (most > 8 && threads > 64) most = levels(threads = 64);  // 28 KiB, whatever there is
  const uint64_t units = uint64_t{a.frequent_count} * cut.tiles;
  Extent shared = e;
  shared.threads = threads;
  Shape s = shape_of(units * threads, all_blocks(shared), shared);
  // At least the sums of pieces.
  s.shared_bytes = (most < 1 ? 1 : most) * threads * static_cast<uint32_t>(sizeof(Float4));
  return s;
}

// `keys`: of the push.
inline Shape expand_shape(const ExpandArgs& a, uint64_t keys, const Extent& e = {}) {
  return shape_of(row_lanes(keys, a.dim), all_blocks(e), e);
}

inline Shape sum_terms_shape(const SumTermsArgs& a, const Extent& e = {}) {
  return shape_of(lanes_of(a.count, cut_rows<Float4>(a.dim), kInFlight), link_blocks(e), e);
}

inline Shape apply_shape(const ApplyArgs& a, const Extent& e = {}) {
  const uint32_t lanes = cut_rows<Float4>(a.dim).lanes;
  return shape_of(uint64_t{a.count} * lanes, all_blocks(e), e);
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_SHAPES_H_
