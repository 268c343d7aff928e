#pragma once
#include <algorithm>
#include "device/ops/kernels.h"
namespace frugal::device {
inline Shape fake_shape(uint64_t work) { return {(uint32_t)std::clamp<uint64_t>((work + 127) / 128, 1, 64), 128, 0}; }
inline Shape gather_shape(GatherArgs* a) { a->host_blocks = a->host_items ? 2 : 0; Shape s = fake_shape((a->hbm_items + a->part.zeros) * 8ull); s.blocks = (a->hbm_items + a->part.zeros ? s.blocks : 0) + a->host_blocks; if (!s.blocks) s.blocks = 1; return s; }
inline Shape stage_shape(const StageArgs& a) { return fake_shape(a.count * 8ull); }
inline Shape place_shape(const PlaceArgs& a) { return fake_shape(a.part.distinct * 32ull + a.part.zeros); }
inline Shape pool_shape(const PoolArgs& a) { Shape s = fake_shape(a.bags * 8ull); s.threads = 64; s.shared_bytes = 20 * 64 * 16; return s; }
inline Shape reduce_shape(const ReduceArgs& a) { return fake_shape(a.part.distinct * 8ull); }
inline Shape combine_shape(const CombineArgs& a) { Shape s = fake_shape(a.heavies * 128ull); s.threads = 64; s.shared_bytes = 20 * 64 * 16; return s; }
inline Shape expand_shape(const ExpandArgs& a) { return fake_shape(a.part.distinct * 8ull); }
inline Shape weight_grads_shape(const WeightGradArgs& a) { return fake_shape(a.keys * 4ull); }
inline Shape sum_terms_shape(const SumTermsArgs& a) { return fake_shape(a.count * 8ull); }
inline Shape apply_shape(const ApplyArgs& a) { return fake_shape(a.count * 8ull); }
inline Shape fill_shape(const FillArgs& a) { return fake_shape(a.count * 8ull); }
}
