// Kernels that a step's calls launch on a GPU (docs/cuda.md, "Lookup" and "Push").
#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/gpu.h"
#include "engine/op_check.h"

namespace frugal {

using device::Kernel;
using device::Ptr;
using device::Source;

namespace {

template <class T>
Ptr<T> seen(const Buffer& pinned) {
  return {device::Runtime::visible(pinned.data()).address};
}

// Kernels count in elements.
size_t elements(size_t bytes) { return bytes / sizeof(device::Element); }

device::RowsPtr host_rows(const device::RowsView& rows) {
  return {{reinterpret_cast<uint64_t>(rows.values)}, elements(rows.value_pitch)};
}

template <class T>
Ptr<T> seen_at(const T* pinned) {
  return {reinterpret_cast<uint64_t>(pinned)};
}

}  // namespace

template <class Arguments>
Status Gpu::launch(Kernel kernel, const device::Shape& shape, const Arguments& arguments,
                   device::Stream stream) {
  return noted(
      runtime_->launch(static_cast<uint32_t>(kernel), shape, &arguments, sizeof arguments, stream),
      "launching a kernel");
}

template <class T>
Status Gpu::keep(DeviceWork& f, const T* from, size_t n, Ptr<T>* out) {
  Buffer copy;
  FRUGAL_TRY(pinned_.get(n * sizeof(T), &copy));
  std::memcpy(copy.data(), from, n * sizeof(T));
  *out = seen<T>(copy);
  f.pinned.push_back(std::move(copy));
  return FRUGAL_OK;
}

Status Gpu::begin(DeviceWork& f, const PartRef& part, PartOnDevice** out) {
  FRUGAL_TRY(f.use(stream_));
  f.parts.push_back(part);
  FRUGAL_TRY(upload(*part, out));
  device::Result r;
  if ((*out)->sent.handle) r = runtime_->wait(stream_, (*out)->sent);
  if (r.ok() && f.after_refresh) r = runtime_->wait(stream_, refresh_done_);
  return noted(r, "waiting for a batch's slots, or for the cache refresh");
}

Status Gpu::identity(size_t n, Ptr<uint32_t>* out) {
  if (identity_.capacity() < n * sizeof(uint32_t)) {
    Buffer larger;
    FRUGAL_TRY(pinned_.get(std::max<size_t>(n, 4096) * sizeof(uint32_t), &larger));
    std::iota(larger.as<uint32_t>(), larger.as<uint32_t>() + larger.capacity() / sizeof(uint32_t),
              0u);
    // Kernels may still read the old one.
    if (identity_) outgrown_.push_back(std::move(identity_));
    identity_ = std::move(larger);
  }
  *out = seen<uint32_t>(identity_);
  return FRUGAL_OK;
}

Status Gpu::put_rows(DeviceWork& f, Buffer pinned, size_t stride, size_t n, uint32_t dim,
                     float* out, size_t out_stride) {
  if (n == 0) return FRUGAL_OK;
  FRUGAL_TRY(f.use(stream_));
  device::GatherArgs a{};
  FRUGAL_TRY(identity(n + 1, &a.part.slots));
  a.part.start = a.part.positions = a.part.slots;
  a.part.distinct = static_cast<uint32_t>(n);
  device::stored_in_place(pinned.as<float>(), n * stride);  // pooled sums would be rounded
  a.host = {seen<device::Element>(pinned), stride};
  a.host_items = a.part.distinct;
  a.dim = dim;
  a.out = {reinterpret_cast<uint64_t>(out)};
  a.out_stride = stride_of(out_stride, dim);
  f.pinned.push_back(std::move(pinned));
  return launch(Kernel::gather_rows, device::gather_shape(&a, extent_), a);
}

// Copies host rows into device memory: `count` of the part's distinct rows (`which`; null: all), to
// staged rows `to` (null: one after the other).
Status Gpu::stage(DeviceWork& f, const PartOnDevice& d, const device::RowsView& rows,
                  Ptr<uint32_t> which, Ptr<uint32_t> to, size_t count, device::RowsPtr* out) {
  DeviceBuffer memory;
  out->stride = elements(rows.value_pitch);
  const size_t capacity = to ? d.part.distinct : count;
  FRUGAL_TRY(memory_->get(capacity * rows.value_pitch, &memory));
  out->values = memory.as<device::Element>();
  f.memory.push_back(std::move(memory));
  if (count == 0) return FRUGAL_OK;
  device::StageArgs s{};
  s.part = d.part;
  s.host = host_rows(rows);
  s.staged = *out;
  s.rows = which;
  s.to = to;
  s.count = static_cast<uint32_t>(count);
  s.dim = rows.dim;
  return launch(Kernel::stage_rows, device::stage_shape(s, extent_), s);
}

namespace {

bool placed_before(const DeviceWork& f, const Part& part, device::Stream stream, bool pooled,
                   Placed* out) {
  for (const Placed& p : f.placed)
    if (p.part == &part && p.stream == stream.handle && p.pooled == pooled) {
      *out = p;
      return true;
    }
  *out = {};
  out->part = &part;
  out->stream = stream.handle;
  out->pooled = pooled;
  return false;
}

}  // namespace

// Where plain lookups read the rows of a part: sources and items, with frequent host rows staged.
// Without cached rows, sources and items are the same for all steps, and were uploaded with the
// part.
Status Gpu::sources(DeviceWork& f, Part& part, const device::RowsView& rows, PartOnDevice& d,
                    const device::RowsPtr& cached_rows, Placed* out) {
  if (placed_before(f, part, stream_, false, out)) return FRUGAL_OK;
  f.placed.reserve(f.placed.size() + 1);
  Ptr<uint32_t> staged_rows;
  size_t staged_count = 0;
  if (cached_rows.values) {
    FRUGAL_TRY(cached_sources(part, d));
    const SourcesOnDevice& c = *d.cached;
    FRUGAL_TRY(behind(c));
    out->host_items = c.host_items;
    out->hbm_items = c.hbm_items;
    out->items = c.items;
    out->source = c.source;
    out->cached_rows = cached_rows;
    staged_rows = c.host_rows + c.host_items;
    staged_count = c.staged;
  } else {
    out->host_items = d.part.distinct;
    if (!d.item_count) return FRUGAL_OK;
    out->source = d.source;
    out->items = d.items;
    out->hbm_items = d.runs;
    out->host_items = d.item_count - d.runs;
    staged_rows = d.staged;
    staged_count = d.frequent.size();
  }
  // Frequent rows cross the PCIe bus once, into device memory, and are copied from there.
  if (staged_count) FRUGAL_TRY(stage(f, d, rows, staged_rows, {}, staged_count, &out->staged));
  f.placed.push_back(*out);
  return FRUGAL_OK;
}

// The caller's stream comes after the copy.
Status Gpu::behind(const OnDevice& sent) {
  if (!sent.sent.handle) return FRUGAL_OK;
  return noted(runtime_->wait(stream_, sent.sent), "waiting for lists of the cache");
}

// Where pooled lookups read the row of each key. All host rows are staged, so each crosses the PCIe
// bus once, however many bags it is in.
Status Gpu::key_sources(DeviceWork& f, Part& part, const device::RowsView& rows, PartOnDevice& d,
                        const device::RowsPtr& cached_rows, Placed* out) {
  if (placed_before(f, part, stream_, true, out)) return FRUGAL_OK;
  f.placed.reserve(f.placed.size() + 1);
  Ptr<uint32_t> host;
  Ptr<Source> source;
  size_t host_count = part.distinct;
  if (cached_rows.values) {
    FRUGAL_TRY(cached_sources(part, d));
    const SourcesOnDevice& c = *d.cached;
    FRUGAL_TRY(behind(c));
    out->cached_rows = cached_rows;
    source = c.source;
    host = c.host_rows;
    host_count = c.host_items + c.staged;
  }
  FRUGAL_TRY(stage(f, d, rows, host, host, host_count, &out->staged));
  DeviceBuffer memory;
  FRUGAL_TRY(memory_->get(part.n * sizeof(Source), &memory));
  out->key_sources = memory.as<Source>();
  f.memory.push_back(std::move(memory));
  if (part.n == 0) return FRUGAL_OK;
  device::PlaceArgs p{};
  p.part = d.part;
  p.source = source;
  p.all_staged = 1;
  p.out = out->key_sources;
  FRUGAL_TRY(launch(Kernel::place_keys, device::place_shape(p, extent_), p));
  f.placed.push_back(*out);
  return FRUGAL_OK;
}

Status Gpu::weights_of(DeviceWork& f, const GpuOp& op, size_t keys, Ptr<float>* out) {
  *out = op.device_weights;
  if (*out || !op.op.weights || keys == 0) return FRUGAL_OK;
  return keep(f, op.op.weights, keys, out);
}

Status Gpu::gather(DeviceWork& f, const PartRef& part, const device::RowsView& rows,
                   const device::RowsPtr& cached_rows, const GpuOp& op) {
  const uint32_t dim = rows.dim;
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  const Ptr<float> out{reinterpret_cast<uint64_t>(op.op.rows_out)};
  if (op.op.pooling != FRUGAL_POOL_NONE) {
    if (op.op.bags == 0) return FRUGAL_OK;
    device::PoolArgs a{};
    a.host = host_rows(rows);
    Placed at;
    FRUGAL_TRY(key_sources(f, *part, rows, *d, cached_rows, &at));
    a.key_sources = at.key_sources;
    a.cached_rows = at.cached_rows;
    a.staged = at.staged;
    FRUGAL_TRY(bags_of(f, op, part->n, &a.bags));
    FRUGAL_TRY(weights_of(f, op, part->n, &a.weights));
    a.mean = op.op.pooling == FRUGAL_POOL_MEAN;
    a.dim = dim;
    a.out = out;
    a.out_stride = stride_of(op.op.row_stride, dim);
    uint64_t longest = op.op.offsets ? 0 : part->n;
    if (op.op.offsets)
      for (size_t b = 0; b < op.op.bags; ++b)
        longest = std::max(longest, op.op.offsets[b + 1] - op.op.offsets[b]);
    return launch(Kernel::pool_rows, device::pool_shape(a, longest, extent_), a);
  }
  if (part->n == 0) return FRUGAL_OK;
  Placed from;
  FRUGAL_TRY(sources(f, *part, rows, *d, cached_rows, &from));
  device::GatherArgs a{};
  a.part = d->part;
  a.host = host_rows(rows);
  a.cached_rows = from.cached_rows;
  a.staged = from.staged;
  a.source = from.source;
  a.items = from.items;
  a.host_items = from.host_items;
  a.hbm_items = from.hbm_items;
  a.dim = dim;
  a.out = out;
  a.out_stride = stride_of(op.op.row_stride, dim);
  return launch(Kernel::gather_rows, device::gather_shape(&a, extent_), a);
}

// Offsets at addresses for kernels.
Status Gpu::bags_of(DeviceWork& f, const GpuOp& op, size_t keys, device::BagsPtr* out) {
  *out = {};
  out->bags = static_cast<uint32_t>(op.op.bags);
  out->keys = static_cast<uint32_t>(keys);
  out->offsets = op.device_offsets;
  if (!out->offsets) return keep(f, op.op.offsets, op.op.bags + 1, &out->offsets);
  if (op.op.offsets) return FRUGAL_OK;  // they are on the host, too, and checked
  const uint32_t* word;
  FRUGAL_TRY(f.look_at(&f.wrong_offsets, &word));
  out->wrong = seen_at(word);
  return FRUGAL_OK;
}

Status Gpu::gradients(DeviceWork& f, const PartRef& part, const GpuOp& op, uint32_t dim,
                      device::GradPtr* g) {
  *g = {};
  g->grads = {reinterpret_cast<uint64_t>(op.op.grads)};
  g->stride = stride_of(op.op.row_stride, dim);
  const bool unseen = op.device_offsets && !op.op.offsets;
  if (op.op.pooling == FRUGAL_POOL_NONE || (part->n == 0 && !unseen)) return FRUGAL_OK;
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  device::BagsOfKeysArgs a{};
  FRUGAL_TRY(bags_of(f, op, part->n, &a.bags));
  DeviceBuffer bag, terms, key_sources;
  FRUGAL_TRY(memory_->get(part->n * sizeof(uint32_t), &bag));
  a.bag = g->bag = bag.as<uint32_t>();
  f.memory.push_back(std::move(bag));
  // With wrong offsets a key may be in no bag: its entry must not lead anywhere.
  if (a.bags.wrong && part->n)
    FRUGAL_TRY(noted(runtime_->fill({a.bag.address}, 0, part->n * sizeof(uint32_t), stream_),
                     "the bags of keys"));
  if (op.op.pooling == FRUGAL_POOL_MEAN) {
    FRUGAL_TRY(memory_->get(op.op.bags * sizeof(float), &terms));
    a.terms = g->divisor = terms.as<float>();
    f.memory.push_back(std::move(terms));
    if (d->part.zeros) {
      FRUGAL_TRY(memory_->get(part->n * sizeof(Source), &key_sources));
      device::PlaceArgs p{};
      p.part = d->part;
      p.out = a.key_sources = key_sources.as<Source>();
      f.memory.push_back(std::move(key_sources));
      FRUGAL_TRY(launch(Kernel::place_keys, device::place_shape(p, extent_), p));
    }
  }
  FRUGAL_TRY(launch(Kernel::bags_of_keys, device::bags_of_keys_shape(a, extent_), a));
  return weights_of(f, op, part->n, &g->factor);
}

Status Gpu::reduce(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
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
    a.frequent_runs = d->runs;
    a.runs = seen<float>(runs);
  }
  if (nan) a.nan = seen_at(nan);
  FRUGAL_TRY(launch(Kernel::reduce_runs, device::reduce_shape(a, extent_), a));
  if (!d->item_count) return FRUGAL_OK;
  device::CombineArgs c{};
  c.frequent_list = d->frequent_list;
  c.frequent_count = static_cast<uint32_t>(d->frequent.size());
  c.frequent_runs = d->runs;
  c.dim = dim;
  c.runs = a.runs;
  c.sums = a.sums;
  c.sums_stride = stride;
  return launch(Kernel::combine_runs, device::combine_shape(c, extent_), c);
}

Status Gpu::expand(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                   const Buffer& out, const uint32_t* nan) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  if (part->n == 0) return FRUGAL_OK;
  device::ExpandArgs a{};
  a.part = d->part;
  a.source = source;
  a.dim = dim;
  a.out = seen<float>(out);
  if (nan) a.nan = seen_at(nan);
  return launch(Kernel::expand_terms, device::expand_shape(a, part->n, extent_), a);
}

Status Gpu::push(DeviceWork& f, const PartRef& part, const device::GradPtr& source, uint32_t dim,
                 bool first, bool reject, BufferPool& sums, PushSums* push) {
  const uint32_t* nan = nullptr;
  if (reject && part->n) FRUGAL_TRY(f.look_at(&f.nans, &nan));
  if (!first) {
    PushSums::Tail tail;
    tail.part = part;
    FRUGAL_TRY(pinned_.get(part->n * dim * sizeof(float), &tail.grads));
    push->tail.reserve(push->tail.size() + 1);
    FRUGAL_TRY(expand(f, part, source, dim, tail.grads, nan));
    f.must_complete = true;
    push->tail.push_back(std::move(tail));
    return FRUGAL_OK;
  }
  const RankGradients& h = push->first;
  Status status = room_for_sums(push, dim, sums);
  if (status == FRUGAL_OK) status = reduce(f, part, source, dim, h.sums, h.stride, push->runs, nan);
  if (status != FRUGAL_OK) drain();  // a kernel may be writing the sums
  return status;
}

Status Gpu::match_keys(DeviceWork& f, const PartRef& part, bool by_key, frugal_op* op) {
  const bool padded = op->flags & FRUGAL_OP_PADDING;
  if (!part->resolved() || part->n != op->count || part->has_padding != padded ||
      (padded && part->padding != op->padding_key))
    return FRUGAL_OK;
  bool same = false;
  FRUGAL_TRY(same_keys(f, part, by_key, op->keys, &same));
  if (same) op->keys = nullptr;
  return FRUGAL_OK;
}

Status Gpu::same_keys(DeviceWork& f, const PartRef& part, bool by_key, const uint64_t* keys,
                      bool* same) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  Buffer memory;
  FRUGAL_TRY(pinned_.get(part->n * sizeof(uint64_t) + sizeof(uint64_t), &memory));
  auto* differ = memory.as<uint32_t>();
  *differ = 0;
  device::SameKeysArgs a{};
  a.keys = seen_at(keys);
  a.count = part->n;
  a.padding = part->padding;
  a.differ = seen_at(differ);
  if (by_key) {
    auto* declared = memory.as<uint64_t>() + 1;
    std::memcpy(declared, part->keys.data(), part->n * sizeof(uint64_t));
    a.declared = seen_at(declared);
  } else {
    // Ids are their slots.
    DeviceBuffer slots;
    FRUGAL_TRY(memory_->get(part->n * sizeof(uint32_t), &slots));
    device::PlaceArgs p{};
    p.part = d->part;
    p.out = slots.as<Source>();  // host rows: their slots
    a.slots = slots.as<uint32_t>();
    f.memory.push_back(std::move(slots));
    FRUGAL_TRY(launch(Kernel::place_keys, device::place_shape(p, extent_), p));
  }
  f.pinned.push_back(std::move(memory));
  FRUGAL_TRY(launch(Kernel::same_keys, device::same_keys_shape(a, extent_), a));
  FRUGAL_TRY(wait_stream());
  *same = *differ == 0;
  return FRUGAL_OK;
}

Status Gpu::weight_grads(DeviceWork& f, const PartRef& part, const device::RowsView& rows,
                         const device::RowsPtr& cached_rows, const GpuOp& op,
                         const device::GradPtr& source) {
  PartOnDevice* d;
  FRUGAL_TRY(begin(f, part, &d));
  if (part->n == 0) return FRUGAL_OK;
  device::WeightGradArgs a{};
  a.host = host_rows(rows);
  Placed at;
  FRUGAL_TRY(key_sources(f, *part, rows, *d, cached_rows, &at));
  a.key_sources = at.key_sources;
  a.cached_rows = at.cached_rows;
  a.staged = at.staged;
  a.grads = source.grads;
  a.grads_stride = source.stride;
  a.bag = source.bag;
  a.keys = static_cast<uint32_t>(part->n);
  a.dim = rows.dim;
  a.out = op.device_weight_grads;
  return launch(Kernel::weight_grads, device::weight_grads_shape(a, extent_), a);
}

Status Gpu::weight_grads_of(DeviceWork& f, Buffer pinned, size_t stride, const uint32_t* slots,
                            size_t n, uint32_t dim, const GpuOp& op,
                            const device::GradPtr& source) {
  if (n == 0) return FRUGAL_OK;
  FRUGAL_TRY(f.use(stream_));
  Buffer key_sources;
  FRUGAL_TRY(pinned_.get(n * sizeof(Source), &key_sources));
  for (size_t i = 0; i < n; ++i)
    key_sources.as<Source>()[i] =
        Source::host(slots[i] == kNoSlot ? kNoSlot : static_cast<uint32_t>(i));
  device::WeightGradArgs a{};
  device::stored_in_place(pinned.as<float>(), n * stride);
  a.host = {seen<device::Element>(pinned), stride};
  a.key_sources = seen<Source>(key_sources);
  a.grads = source.grads;
  a.grads_stride = source.stride;
  a.bag = source.bag;
  a.keys = static_cast<uint32_t>(n);
  a.dim = dim;
  a.out = op.device_weight_grads;
  f.pinned.push_back(std::move(pinned));
  f.pinned.push_back(std::move(key_sources));
  return launch(Kernel::weight_grads, device::weight_grads_shape(a, extent_), a);
}

// --- Cached rows ---------------------------------------------------------------------------------

Status DeviceCachedRows::open(Gpu& gpu, const device::RowsView& rows, uint64_t cache_slots,
                              std::unique_ptr<CachedRows>* out) {
  auto made = std::make_unique<DeviceCachedRows>(gpu, rows);
  FRUGAL_TRY(gpu.memory_->get_exactly(cache_slots * rows.value_pitch, &made->values_));
  FRUGAL_TRY(gpu.memory_->get_exactly(cache_slots * rows.state_pitch, &made->state_));
  made->at_.device = {made->values_.as<device::Element>(), elements(rows.value_pitch)};
  *out = std::move(made);
  return FRUGAL_OK;
}

void DeviceCachedRows::send(const CachePlan& plan) {
  if (gpu_.sticky()) return;
  for (const PartRef& p : plan.parts) (void)gpu_.upload_sources(*p);
  (void)send_plan(plan);
}

void DeviceCachedRows::forget_plan() noexcept {
  plan_.reset();
  later_.clear();
}

Status DeviceCachedRows::refresh(const CachePlan& plan, const Vector<DueUpdate>& due) {
  FRUGAL_TRY(send_plan(plan));
  for (const DueUpdate& d : due) {
    std::shared_ptr<CachedUpdateOnDevice> lists = plan_->update;
    if (!d.planned) FRUGAL_TRY(send_lists(d.other, &lists));
    FRUGAL_TRY(apply(d.update, lists, 0, d.now));
    later_.push_back({d.update, std::move(lists), d.now});
  }
  return fill();
}

Status DeviceCachedRows::finish() {
  for (const Later& l : later_) FRUGAL_TRY(apply(l.update, l.lists, l.from, l.lists->count));
  return FRUGAL_OK;
}

// The cached rows that a committed step touches: rank sums in order, then the optimizer.
Status DeviceCachedRows::apply(const UpdateRef& update,
                               const std::shared_ptr<CachedUpdateOnDevice>& lists, size_t from,
                               size_t to) {
  const size_t n = to - from;
  if (n == 0) return FRUGAL_OK;
  DeviceWork& f = *gpu_.current_device_work();
  FRUGAL_TRY(f.use(gpu_.refresh_stream_));
  f.updates.push_back(update);
  f.sent.push_back(lists);
  DeviceBuffer sums, ranks;
  const size_t stride = update->ranks[0].stride;  // of the table: the same for all ranks
  FRUGAL_TRY(gpu_.memory_->get(n * stride * sizeof(float), &sums));
  const size_t ranks_bytes = update->ranks.size() * sizeof(Ptr<float>);
  FRUGAL_TRY(gpu_.memory_->get(ranks_bytes, &ranks));
  Buffer rank_sums;
  FRUGAL_TRY(gpu_.pinned_.get(ranks_bytes, &rank_sums));
  for (size_t r = 0; r < update->ranks.size(); ++r)
    rank_sums.as<Ptr<float>>()[r] = seen<float>(update->ranks[r].sums);
  const Ptr<Ptr<float>> to_ranks = ranks.as<Ptr<float>>(), from_ranks = seen<Ptr<float>>(rank_sums);
  const Ptr<float> to_sums = sums.as<float>();
  f.pinned.push_back(std::move(rank_sums));
  f.memory.push_back(std::move(sums));
  f.memory.push_back(std::move(ranks));
  device::Result r = gpu_.runtime_->wait(gpu_.refresh_stream_, lists->sent);
  if (r.ok())
    r = gpu_.runtime_->copy({to_ranks.address}, {from_ranks.address}, ranks_bytes,
                            gpu_.refresh_stream_);
  FRUGAL_TRY(gpu_.noted(r, "the update of a cache"));
  const uint32_t dim = update->scalars.dim;
  device::SumTermsArgs s{};
  s.ranks = to_ranks;
  s.ranks_stride = stride;
  s.terms = lists->terms;
  s.start = lists->start + from;
  s.count = static_cast<uint32_t>(n);
  s.dim = dim;
  s.sums = to_sums;
  s.sums_stride = stride;
  FRUGAL_TRY(gpu_.launch(Kernel::sum_terms, device::sum_terms_shape(s, gpu_.extent_), s,
                         gpu_.refresh_stream_));
  device::ApplyArgs a{};
  a.step = update->scalars;
  a.cached_rows = at_.device;
  a.state = state_.as<device::Element>();
  a.state_stride = elements(rows_.state_pitch);
  a.state_second = elements(rows_.state_second);
  a.to = lists->cache_slots + from;
  a.count = s.count;
  a.dim = dim;
  a.sums = s.sums;
  a.sums_stride = s.sums_stride;
  return gpu_.launch(device::apply_kernel(update->scalars.kind),
                     device::apply_shape(a, gpu_.extent_), a, gpu_.refresh_stream_);
}

// Copies values and state of the admitted rows from the host rows, which are up to date.
Status DeviceCachedRows::fill() {
  const PlanOnDevice& plan = *plan_;
  if (plan.count == 0) return FRUGAL_OK;
  DeviceWork& f = *gpu_.current_device_work();
  FRUGAL_TRY(f.use(gpu_.refresh_stream_));
  f.sent.push_back(plan_);
  FRUGAL_TRY(gpu_.noted(gpu_.runtime_->wait(gpu_.refresh_stream_, plan.sent),
                        "rows that come into a cache"));
  device::FillArgs a{};
  a.host = host_rows(rows_);
  a.cached_rows = at_.device;
  a.host_state = {seen_at(rows_.state), elements(rows_.state_pitch)};
  a.cached_state = {state_.as<device::Element>(), elements(rows_.state_pitch)};
  a.slots = plan.slots;
  a.to = plan.to;
  a.count = static_cast<uint32_t>(plan.count);
  a.dim = rows_.dim;
  a.state_elements = static_cast<uint32_t>(a.cached_state.stride);
  return gpu_.launch(Kernel::fill_lines, device::fill_shape(a, gpu_.extent_), a,
                     gpu_.refresh_stream_);
}

// Later launches in the caller's stream come after the refresh.
Status Gpu::end_refresh(DeviceWork& f) {
  bool used = false;
  for (device::Stream s : f.streams) used |= s.handle == refresh_stream_.handle;
  f.after_refresh = used;
  if (!used) return FRUGAL_OK;
  FRUGAL_TRY(noted(runtime_->record(refresh_done_, refresh_stream_), "the cache's refresh"));
  return f.mark();
}

}  // namespace frugal
