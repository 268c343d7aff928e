#include "engine/data_path.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "arith/fold.h"
#include "engine/op_check.h"

namespace frugal {
namespace {

constexpr size_t kGatherRows = 4096;  // rows of a chunk
constexpr size_t kReduceRows = 2048;
// Outputs of this size do not stay in the processor's caches: write them past the caches.
constexpr size_t kStreamBytes = size_t{24} << 20;

// The bag of each key.
void bags_of_keys(const frugal_op& op, uint32_t* out) {
  for (size_t b = 0; b < op.bags; ++b)
    std::fill(out + op.offsets[b], out + op.offsets[b + 1], static_cast<uint32_t>(b));
}

// Has every bag exactly one key? Then a bag is its key's row, and its gradient is the key's.
// Division by 1, or a sum of one term, changes nothing. Padding reads as zeros, and does not occur
// in pushes.
bool bags_are_keys(const frugal_op& op, size_t keys) {
  if (op.bags != keys || op.weights) return false;
  for (size_t b = 0; b < keys; ++b)
    if (op.offsets[b] != b) return false;
  return true;
}

// The number of each bag's terms: its keys that are not padding.
void terms_of_bags(const frugal_op& op, const uint32_t* slots, float* out) {
  for (size_t b = 0; b < op.bags; ++b) {
    uint64_t terms = 0;
    for (uint64_t k = op.offsets[b]; k < op.offsets[b + 1]; ++k) terms += slots[k] != kNoSlot;
    out[b] = static_cast<float>(terms);
  }
}

// Never written. As a constant it would add a quarter of a MiB to the library's file.
device::Element g_zeros[65536];

struct GatherContext {
  const device::RowsView* rows;
  const uint32_t* slots;
  const device::Element* const* pointers;
  const frugal_op* op;
  size_t n, stride, chunk;
  bool streaming;
};

void gather_chunk(void* context, size_t i) {
  const auto& c = *static_cast<GatherContext*>(context);
  const device::Kernels& k = device::kernels();
  size_t from = i * c.chunk, n = std::min(c.chunk, c.n - from);
  float* out = reinterpret_cast<float*>(reinterpret_cast<char*>(c.op->rows_out) + from * c.stride);
  if (c.pointers)
    k.gather_pointers(c.pointers + from, n, c.rows->dim, out, c.stride, c.streaming);
  else
    k.gather(*c.rows, c.slots + from, n, out, c.stride, c.streaming);
}

void pool_chunk(void* context, size_t i) {
  const auto& c = *static_cast<GatherContext*>(context);
  const device::Kernels& k = device::kernels();
  size_t from = i * c.chunk, to = std::min(from + c.chunk, c.op->bags);
  bool mean = c.op->pooling == FRUGAL_POOL_MEAN;
  if (c.pointers)
    k.pool_pointers(c.pointers, c.rows->dim, c.op->offsets, from, to, c.op->weights, mean,
                    c.op->rows_out, c.stride);
  else
    k.pool(*c.rows, c.slots, c.op->offsets, from, to, c.op->weights, mean, c.op->rows_out,
           c.stride);
}

struct ReduceContext {
  const Part* part;
  uint32_t dim;
  device::GradSource source;
  float* sums;
  size_t stride;
  size_t chunk;
  const device::FrequentRow* frequent_list;  // rows with several runs, ascending
  size_t frequent_count;
  float* runs;
  size_t all_runs;
  bool streaming;
  std::atomic<bool> nan{false};
};

// Sums the gradients of a chunk of distinct rows. For rows with several runs it keeps the run sums,
// so a later push of the step can continue the fold.
void reduce_chunk(void* context, size_t i) {
  auto& c = *static_cast<ReduceContext*>(context);
  const device::Kernels& k = device::kernels();
  const uint64_t* pairs = c.part->pairs.as<uint64_t>();
  const uint32_t* start = c.part->row_start();
  size_t at = i * c.chunk, end = std::min(at + c.chunk, c.part->distinct);
  const device::FrequentRow* h =
      std::lower_bound(c.frequent_list, c.frequent_list + c.frequent_count, at,
                       [](const device::FrequentRow& x, size_t row) { return x.row < row; });
  const device::FrequentRow* last = c.frequent_list + c.frequent_count;
  bool nan = false;
  while (at < end) {
    size_t stop = h != last && h->row < end ? h->row : end;
    if (at < stop)
      nan |= k.reduce(pairs, start, at, stop, c.dim, c.source, c.sums, c.stride, c.streaming);
    at = stop;
    if (at == end) break;
    // First each run, as if it were a row of its own; then the runs pairwise.
    uint32_t first = start[at], n = start[at + 1] - first;
    uint32_t runs = (n + arith::kFoldRun - 1) / arith::kFoldRun;
    float* to = c.runs + size_t{h->first_run} * c.dim;
    uint32_t cuts[65];
    for (uint32_t r = 0; r < runs; r += 64) {
      uint32_t m = std::min<uint32_t>(64, runs - r);
      for (uint32_t q = 0; q <= m; ++q) cuts[q] = first + std::min(n, (r + q) * arith::kFoldRun);
      nan |= k.reduce(pairs, cuts, 0, m, c.dim, c.source, to + size_t{r} * c.dim, c.dim, false);
    }
    // Combine them in the space after all run sums, where no other thread works.
    float* scratch = to + c.all_runs * c.dim;
    std::copy_n(to, size_t{runs} * c.dim, scratch);
    combine_runs(scratch, runs, c.dim);
    std::copy_n(scratch, c.dim, c.sums + at * c.stride);
    ++h;
    ++at;
  }
  if (nan) c.nan.store(true, std::memory_order_relaxed);
}

// Gradients of single keys, for a push that is not the first of its table in the step.
void expand(const device::GradSource& s, size_t n, uint32_t dim, float* out) {
  for (size_t i = 0; i < n; ++i) {
    size_t row = s.bag ? s.bag[i] : i;
    const float* g =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(s.grads) + row * s.stride);
    float* to = out + i * dim;
    for (uint32_t d = 0; d < dim; ++d) {
      float x = g[d];
      if (s.factor) x = s.factor[i] * x;
      if (s.divisor) x = x / s.divisor[row];
      to[d] = x;
    }
  }
}

}  // namespace

const device::Element* row_of_zeros() { return g_zeros; }

uint32_t frequent_rows(const Part& part, Vector<device::FrequentRow>* out) {
  out->clear();
  if (part.occurrences < part.distinct + device::kRun) return 0;
  uint32_t runs = 0;
  const uint32_t* start = part.row_start();
  for (uint32_t i = 0; i < part.distinct; ++i) {
    const uint32_t n = start[i + 1] - start[i];
    if (n <= device::kRun) continue;
    out->push_back({i, runs});
    runs += (n + device::kRun - 1) / device::kRun;
  }
  return runs;
}

Status PushSource::of(const frugal_op& op, const Part& part, uint32_t dim, BufferPool& pool) {
  grads.grads = op.grads;
  grads.stride = stride_of(op.row_stride, dim);
  if (op.pooling == FRUGAL_POOL_NONE || bags_are_keys(op, part.n)) return FRUGAL_OK;
  FRUGAL_TRY(pool.get(part.n * sizeof(uint32_t), &bag));
  bags_of_keys(op, bag.as<uint32_t>());
  grads.bag = bag.as<uint32_t>();
  grads.factor = op.weights;
  if (op.pooling == FRUGAL_POOL_MEAN) {
    FRUGAL_TRY(pool.get(op.bags * sizeof(float), &divisor));
    terms_of_bags(op, part.slots.as<uint32_t>(), divisor.as<float>());
    grads.divisor = divisor.as<float>();
  }
  return FRUGAL_OK;
}

Status DataPath::gather(const device::RowsView& rows, const device::Element* const* pointers,
                        const uint32_t* slots, size_t n, const frugal_op& op) {
  GatherContext c{};
  c.rows = &rows;
  c.slots = slots;
  c.pointers = pointers;
  c.op = &op;
  c.n = n;
  size_t row_bytes = size_t{rows.dim} * sizeof(float);
  c.stride = stride_of(op.row_stride, rows.dim);
  c.streaming = n * row_bytes >= kStreamBytes;
  const bool pooled = op.pooling != FRUGAL_POOL_NONE && !bags_are_keys(op, n);
  size_t items = pooled ? op.bags : n;
  c.chunk = items;
  size_t chunks = items ? 1 : 0;
  if (n * row_bytes >= kParallelBytes) {
    // Larger rows in smaller chunks: a chunk is about half a megabyte.
    c.chunk = std::max<size_t>(256, kGatherRows * 128 / std::max<size_t>(128, row_bytes));
    if (pooled) c.chunk = std::max<size_t>(1, c.chunk * std::max<size_t>(1, op.bags) / n);
    chunks = (items + c.chunk - 1) / c.chunk;
  }
  return parallel(chunks, pooled ? pool_chunk : gather_chunk, &c);
}

Status DataPath::find_nan(const device::GradSource& source, size_t n, uint32_t dim, bool* nan) {
  struct Context {
    const device::GradSource& source;
    size_t n, chunk;
    uint32_t dim;
    std::atomic<bool> nan{false};
  } c{source, n, std::max<size_t>(64, size_t{kParallelBytes} / (dim * sizeof(float))), dim};
  FRUGAL_TRY(parallel((n + c.chunk - 1) / c.chunk,
                      [](void* context, size_t i) {
                        auto& at = *static_cast<Context*>(context);
                        const char* from = reinterpret_cast<const char*>(at.source.grads) +
                                           i * at.chunk * at.source.stride;
                        size_t rows = std::min(at.chunk, at.n - i * at.chunk);
                        if (device::kernels().has_nan(reinterpret_cast<const float*>(from), rows,
                                                      at.dim, at.source.stride))
                          at.nan.store(true, std::memory_order_relaxed);
                      },
                      &c));
  *nan = c.nan.load();
  return FRUGAL_OK;
}

Status room_for_sums(PushSums* state, uint32_t dim, BufferPool& pool) {
  RankGradients& h = state->first;
  const Part& part = *h.part;
  FRUGAL_TRY(pool.get(part.distinct * h.stride * sizeof(float), &h.sums));
  state->all_runs = frequent_rows(part, &state->frequent_list);
  return pool.get(2 * size_t{state->all_runs} * dim * sizeof(float), &state->runs);
}

Status DataPath::sum_first(PushSums* state, uint32_t dim, const device::GradSource& source,
                           BufferPool& pool, bool streaming, bool* nan) {
  RankGradients& h = state->first;
  const Part& part = *h.part;
  FRUGAL_TRY(room_for_sums(state, dim, pool));
  ReduceContext c{};
  c.part = &part;
  c.dim = dim;
  c.source = source;
  c.sums = h.sums.as<float>();
  c.stride = h.stride;
  c.frequent_list = state->frequent_list.data();
  c.frequent_count = state->frequent_list.size();
  c.runs = state->runs.as<float>();
  c.all_runs = state->all_runs;
  c.streaming = streaming;
  size_t bytes = part.occurrences * dim * sizeof(float);
  c.chunk = bytes < kParallelBytes
                ? std::max<size_t>(part.distinct, 1)
                : std::max<size_t>(64, kReduceRows * 32 / std::max<uint32_t>(32, dim));
  FRUGAL_TRY(parallel((part.distinct + c.chunk - 1) / c.chunk, reduce_chunk, &c));
  *nan = c.nan.load();
  return FRUGAL_OK;
}

Status DataPath::add_tail(PushSums* push, const PartRef& part, uint32_t dim,
                          const device::GradSource& source, BufferPool& pool, bool reject,
                          bool* nan) {
  PushSums::Tail tail;
  FRUGAL_TRY(pool.get(part->n * dim * sizeof(float), &tail.grads));
  expand(source, part->n, dim, tail.grads.as<float>());
  const uint32_t* slots = part->slots.as<uint32_t>();
  for (size_t i = 0; reject && i < part->n; ++i)
    if (slots[i] != kNoSlot &&
        device::kernels().has_nan(tail.grads.as<float>() + i * dim, 1, dim, dim * sizeof(float))) {
      *nan = true;
      return FRUGAL_OK;
    }
  tail.part = part;
  push->tail.push_back(std::move(tail));
  return FRUGAL_OK;
}

Status join_pushes(const PushSums& p, uint32_t dim, uint32_t rank, BufferPool& rows,
                   BufferPool& sums_pool, RankGradients* out) {
  const size_t stride = p.first.stride;
  // The union of the rows of all pushes.
  Vector<uint32_t> slots(p.first.slots(), p.first.slots() + p.first.rows());
  for (const PushSums::Tail& t : p.tail)
    slots.insert(slots.end(), t.part->row_slots(), t.part->row_slots() + t.part->distinct);
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  PartRef part = make_part();
  part->rank = rank;
  part->distinct = slots.size();
  FRUGAL_TRY(rows.get(slots.size() * sizeof(uint32_t), &part->rows));
  std::copy(slots.begin(), slots.end(), part->rows.as<uint32_t>());
  Buffer sums;
  FRUGAL_TRY(sums_pool.get(slots.size() * stride * sizeof(float), &sums));
  Vector<size_t> cursor(p.tail.size(), 0);
  Vector<float> runs;
  size_t at_first = 0, at_frequent = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    // The run sums so far; the last one has `open` terms.
    runs.clear();
    size_t open = arith::kFoldRun;
    if (at_first < p.first.rows() && p.first.slots()[at_first] == slots[i]) {
      const Part& f = *p.first.part;
      size_t n = f.row_start()[at_first + 1] - f.row_start()[at_first];
      if (n > arith::kFoldRun) {
        while (p.frequent_list[at_frequent].row != at_first) ++at_frequent;
        size_t m = (n + arith::kFoldRun - 1) / arith::kFoldRun;
        const float* from =
            p.runs.as<float>() + size_t{p.frequent_list[at_frequent].first_run} * dim;
        runs.assign(from, from + m * dim);
      } else {
        const float* from = p.first.sums.as<float>() + at_first * stride;
        runs.assign(from, from + dim);
      }
      open = n % arith::kFoldRun ? n % arith::kFoldRun : arith::kFoldRun;
      ++at_first;
    }
    for (size_t k = 0; k < p.tail.size(); ++k) {
      const Part& q = *p.tail[k].part;
      if (cursor[k] == q.distinct || q.row_slots()[cursor[k]] != slots[i]) continue;
      for (uint32_t o = q.row_start()[cursor[k]]; o < q.row_start()[cursor[k] + 1]; ++o) {
        const float* g = p.tail[k].grads.as<float>() +
                         size_t{static_cast<uint32_t>(q.pairs.as<uint64_t>()[o])} * dim;
        if (open == arith::kFoldRun) {
          runs.insert(runs.end(), g, g + dim);
          open = 1;
        } else {
          float* run = runs.data() + runs.size() - dim;
          for (uint32_t d = 0; d < dim; ++d) run[d] = run[d] + g[d];
          ++open;
        }
      }
      ++cursor[k];
    }
    combine_runs(runs.data(), runs.size() / dim, dim);
    std::copy_n(runs.data(), dim, sums.as<float>() + i * stride);
  }
  out->rank = rank;
  out->part = part;
  out->whole = false;
  out->sums = std::move(sums);
  out->stride = stride;
  return FRUGAL_OK;
}

}  // namespace frugal
