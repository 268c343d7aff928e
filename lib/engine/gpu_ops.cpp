// What a step's calls launch on a GPU: docs/cuda.md, sections 5 and 6.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "device/ops/shapes.h"
#include "engine/gpu.h"

namespace frugal {

using device::Kernel;
using device::Ptr;

namespace {

template <class T>
Ptr<T> seen(const Buffer& pinned) {
  return {device::Runtime::visible(pinned.data()).address};
}

device::RowsPtr host_rows(const Rows& rows) {
  return {{reinterpret_cast<uint64_t>(rows.ref().values)}, rows.ref().value_stride};
}

uint64_t bytes_or(size_t stride, uint32_t dim) { return stride ? stride : dim * sizeof(float); }

}  // namespace

template <class Arguments>
Status Gpu::launch(Kernel kernel, const device::Shape& shape, const Arguments& arguments) {
  device::Result r = runtime_->launch(static_cast<uint32_t>(kernel), shape, &arguments,
                                      sizeof arguments, stream_);
  failed(r);
  return device_status(r, "launching a kernel");
}

Status Gpu::begin(Flight& f, const PartRef& part, PartOnDevice** out) {
  FRUGAL_TRY(f.use(stream_));
  f.parts.push_back(part);
  FRUGAL_TRY(upload(*part, out));
  if (!(*out)->uploaded.handle) return FRUGAL_OK;
  device::Result r = runtime_->wait(stream_, (*out)->uploaded);
  failed(r);
  return device_status(r, "waiting for a batch's places");
}

Status Gpu::identity(size_t n, Ptr<uint32_t>* out) {
  if (identity_.capacity() < n * sizeof(uint32_t)) {
    Buffer larger;
    FRUGAL_TRY(pinned_.get(std::max<size_t>(n, 4096) * sizeof(uint32_t), &larger));
    std::iota(larger.as<uint32_t>(), larger.as<uint32_t>() + larger.capacity() / sizeof(uint32_t), 0u);
    // Kernels may still read the old one.
    if (identity_) outgrown_.push_back(std::move(identity_));
    identity_ = std::move(larger);
  }
  *out = seen<uint32_t>(identity_);
  return FRUGAL_OK;
}

Status Gpu::put_rows(Flight& f, Buffer pinned, size_t stride, size_t n, uint32_t dim, float* out,
                     size_t out_stride) {
  if (n == 0) return FRUGAL_OK;
  FRUGAL_TRY(f.use(stream_));
  device::GatherArgs a{};
  FRUGAL_TRY(identity(n + 1, &a.part.slots));
  a.part.start = a.part.positions = a.part.slots;
  a.part.distinct = static_cast<uint32_t>(n);
  a.host = {seen<float>(pinned), stride};
  a.host_items = a.part.distinct;
  a.dim = dim;
  a.out = {reinterpret_cast<uint64_t>(out)};
  a.out_stride = bytes_or(out_stride, dim);
  f.pinned.push_back(std::move(pinned));
  return launch(Kernel::gather_rows, device::gather_shape(&a), a);
}

// Where each key's row is read by pooled forms. All host rows are staged, so that each crosses the link
// once, however many bags it is in.
Status Gpu::places(Flight& f, const PartRef& part, const Rows& rows, PartOnDevice& d,
                   Ptr<uint32_t>* out, device::RowsPtr* staged) {
  const uint32_t dim = rows.layout().dim;
  DeviceBuffer places, memory;
  FRUGAL_TRY(memory_->get(part->n * sizeof(uint32_t), &places));
  staged->stride = rows.ref().value_stride;
  FRUGAL_TRY(memory_->get(part->distinct * staged->stride * sizeof(float), &memory));
  staged->values = memory.as<float>();
  *out = places.as<uint32_t>();
  f.memory.push_back(std::move(places));
  f.memory.push_back(std::move(memory));
  if (part->distinct) {
    device::StageArgs s{};
    s.part = d.part;
    s.host = host_rows(rows);
    s.hbm = *staged;
    s.count = d.part.distinct;  // rows and to null: all, in order
    s.dim = dim;
    FRUGAL_TRY(launch(Kernel::stage_rows, device::stage_shape(s), s));
  }
  if (part->n == 0) return FRUGAL_OK;
  device::PlaceArgs p{};
  p.part = d.part;
  p.all_staged = 1;
  p.out = *out;
  return launch(Kernel::place_keys, device::place_shape(p), p);
}

Status Gpu::weights_of(Flight& f, const GpuOp& op, size_t keys, Ptr<float>* out) {
  *out = op.device_weights;
  if (*out || !op.op.weights || keys == 0) return FRUGAL_OK;
  Buffer copy;
  FRUGAL_TRY(pinned_.get(keys * sizeof(float), &copy));
  std::memcpy(copy.data(), op.op.weights, keys * sizeof(float));
  *out = seen<float>(copy);
  f.pinned.push_back(std::move(copy));
  return FRUGAL_OK;
}

Status Gpu::gather(Flight& f, const PartRef& part, const Rows& rows, const GpuOp& op) {
  const uint32_t dim = rows.layout().dim;
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  const Ptr<float> out{reinterpret_cast<uint64_t>(op.op.rows_out)};
  if (op.op.pooling != FRUGAL_POOL_NONE) {
    if (op.op.bags == 0) return FRUGAL_OK;
    device::PoolArgs a{};
    a.host = host_rows(rows);
    FRUGAL_TRY(places(f, part, rows, *d, &a.places, &a.hbm));
    a.offsets = op.device_offsets;
    if (!a.offsets) {
      Buffer copy;
      const size_t bytes = (op.op.bags + 1) * sizeof(uint64_t);
      FRUGAL_TRY(pinned_.get(bytes, &copy));
      std::memcpy(copy.data(), op.op.offsets, bytes);
      a.offsets = seen<uint64_t>(copy);
      f.pinned.push_back(std::move(copy));
    }
    FRUGAL_TRY(weights_of(f, op, part->n, &a.weights));
    a.mean = op.op.pooling == FRUGAL_POOL_MEAN;
    a.bags = static_cast<uint32_t>(op.op.bags);
    a.dim = dim;
    a.out = out;
    a.out_stride = bytes_or(op.op.row_stride, dim);
    return launch(Kernel::pool_rows, device::pool_shape(a), a);
  }
  if (part->n == 0) return FRUGAL_OK;
  device::GatherArgs a{};
  a.part = d->part;
  a.host = host_rows(rows);
  a.host_items = d->part.distinct;
  if (d->item_count) {
    // Frequent rows cross the link once, into device memory, and are spread out from there.
    DeviceBuffer staged;
    a.hbm.stride = a.host.stride;
    FRUGAL_TRY(memory_->get(d->frequent.size() * a.hbm.stride * sizeof(float), &staged));
    a.hbm.values = staged.as<float>();
    f.memory.push_back(std::move(staged));
    device::StageArgs s{};
    s.part = d->part;
    s.host = a.host;
    s.hbm = a.hbm;
    s.rows = d->staged;
    s.to = d->staged_to;
    s.count = static_cast<uint32_t>(d->frequent.size());
    s.dim = dim;
    FRUGAL_TRY(launch(Kernel::stage_rows, device::stage_shape(s), s));
    a.items = d->items;
    a.source = d->source;
    a.hbm_items = d->runs;
    a.host_items = d->item_count - d->runs;
  }
  a.dim = dim;
  a.out = out;
  a.out_stride = bytes_or(op.op.row_stride, dim);
  return launch(Kernel::gather_rows, device::gather_shape(&a), a);
}

Status Gpu::gradients(Flight& f, const Part& part, const GpuOp& op, uint32_t dim, device::GradPtr* g) {
  *g = {};
  g->grads = {reinterpret_cast<uint64_t>(op.op.grads)};
  g->stride = bytes_or(op.op.row_stride, dim);
  if (op.op.pooling == FRUGAL_POOL_NONE || part.n == 0) return FRUGAL_OK;
  Buffer bag;
  FRUGAL_TRY(pinned_.get(part.n * sizeof(uint32_t), &bag));
  uint32_t* of = bag.as<uint32_t>();
  for (size_t b = 0; b < op.op.bags; ++b)
    std::fill(of + op.op.offsets[b], of + op.op.offsets[b + 1], static_cast<uint32_t>(b));
  g->bag = seen<uint32_t>(bag);
  f.pinned.push_back(std::move(bag));
  FRUGAL_TRY(weights_of(f, op, part.n, &g->factor));
  if (op.op.pooling != FRUGAL_POOL_MEAN) return FRUGAL_OK;
  Buffer divisor;
  FRUGAL_TRY(pinned_.get(op.op.bags * sizeof(float), &divisor));
  const uint32_t* slots = part.slots.as<uint32_t>();
  for (size_t b = 0; b < op.op.bags; ++b) {
    uint64_t terms = 0;
    for (uint64_t k = op.op.offsets[b]; k < op.op.offsets[b + 1]; ++k) terms += slots[k] != kNoSlot;
    divisor.as<float>()[b] = static_cast<float>(terms);
  }
  g->divisor = seen<float>(divisor);
  f.pinned.push_back(std::move(divisor));
  return FRUGAL_OK;
}

Status Gpu::reduce(Flight& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                   const Buffer& sums, size_t stride, const Buffer& runs, const uint32_t* nan) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  if (part->distinct == 0) return FRUGAL_OK;
  device::ReduceArgs a{};
  a.part = d->part;
  a.source = source;
  a.dim = dim;
  a.sums = seen<float>(sums);
  a.sums_stride = stride;
  if (d->item_count) {
    a.items = d->items + (d->item_count - d->runs);
    a.heavy_runs = d->runs;
    a.runs = seen<float>(runs);
  }
  if (nan) a.nan = {device::Runtime::visible(const_cast<uint32_t*>(nan)).address};
  FRUGAL_TRY(launch(Kernel::reduce_runs, device::reduce_shape(a), a));
  if (!d->item_count) return FRUGAL_OK;
  device::CombineArgs c{};
  c.heavy = d->heavy;
  c.heavies = static_cast<uint32_t>(d->frequent.size());
  c.heavy_runs = d->runs;
  c.dim = dim;
  c.runs = a.runs;
  c.sums = a.sums;
  c.sums_stride = stride;
  return launch(Kernel::combine_runs, device::combine_shape(c), c);
}

Status Gpu::expand(Flight& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                   const Buffer& out, const uint32_t* nan) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  if (part->n == 0) return FRUGAL_OK;
  device::ExpandArgs a{};
  a.part = d->part;
  a.source = source;
  a.dim = dim;
  a.out = seen<float>(out);
  if (nan) a.nan = {device::Runtime::visible(const_cast<uint32_t*>(nan)).address};
  return launch(Kernel::expand_terms, device::expand_shape(a), a);
}

Status Gpu::weight_grads(Flight& f, const PartRef& part, const Rows& rows, const GpuOp& op,
                         const device::GradPtr& source) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  if (part->n == 0) return FRUGAL_OK;
  device::WeightGradArgs a{};
  a.host = host_rows(rows);
  FRUGAL_TRY(places(f, part, rows, *d, &a.places, &a.hbm));
  a.grads = source.grads;
  a.grads_stride = source.stride;
  a.bag = source.bag;
  a.keys = static_cast<uint32_t>(part->n);
  a.dim = rows.layout().dim;
  a.out = op.device_weight_grads;
  return launch(Kernel::weight_grads, device::weight_grads_shape(a), a);
}

}  // namespace frugal
