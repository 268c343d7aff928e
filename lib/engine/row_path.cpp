#include "engine/row_path.h"

#include <algorithm>
#include <cstring>

namespace frugal {

// --- Finding -------------------------------------------------------------------------------------

// As a rule ops come in the order of their declaration, each for a lookup and for a push. A
// backward pass pushes in the reverse order. So the search goes outward from the part that was
// found last.
template <class Match>
const StepPart* RowPath::part_that(Match match) const {
  t_.call_mu.assert_held();
  const size_t all = t_.parts.size();
  const size_t from = t_.next_part < all ? t_.next_part : 0;
  for (size_t k = 0; k < all; ++k) {
    size_t i = k % 2 ? from + (k + 1) / 2 : from + all - k / 2;
    if (i >= all) i -= all;
    if (!match(t_.parts[i])) continue;
    t_.next_part = i;
    return &t_.parts[i];
  }
  return nullptr;
}

const StepPart* RowPath::declared_part(uint64_t batch, uint32_t index) const {
  return part_that([&](const StepPart& p) { return p.batch == batch && p.index == index; });
}

// The part that an op names without keys. A batch of the step stays as long as the step does: no
// handle has to be looked up.
const StepPart* RowPath::part_of_handle(const frugal_op& op) const {
  if (!step_.ids_are_handles || !op.batch || op.keys) return nullptr;
  return declared_part(reinterpret_cast<uint64_t>(op.batch), op.part);
}

// The table of an op. A part's table stays as long as the step does, if it was there when the step
// began: no handle has to be looked up.
Status RowPath::table_of(const frugal_op& op, AnyTableRef* out) const {
  t_.call_mu.assert_held();
  const size_t from = t_.next_part, to = std::min(from + 2, t_.parts.size());
  for (size_t i = from; i < to; ++i) {
    const AnyTableRef& table = t_.parts[i].table;
    if (!table || table->handle != reinterpret_cast<uint64_t>(op.table) || table->dropped.load())
      continue;
    *out = table;
    return FRUGAL_OK;
  }
  return step_.session.op_table(op, out);
}

namespace {

bool padded(const frugal_op& op) { return op.flags & FRUGAL_OP_PADDING; }

bool same_padding(const frugal_op& op, const Part& p) {
  return p.has_padding == padded(op) && (!padded(op) || p.padding == op.padding_key);
}

}  // namespace

// The part that an op names by its batch; none if the op has other keys.
Status RowPath::part_of_batch(const frugal_op& op, const AnyTable& table,
                              const StepPart** out) const {
  const AnyBatchRef batch = object_of<AnyBatch>(op.batch);
  // The trainer that declared the batch may have made no call since the batch's step was committed.
  // A rank that is inside a step knows that steps more than `kept` before it are committed.
  const uint64_t kept = std::min<uint64_t>(step_.session.config().staleness, 62);
  if (!batch || batch->session != &step_.session ||
      (t_.step > batch->step && t_.step - batch->step > kept))
    return fail(FRUGAL_ERR_BAD_HANDLE,
                "frugal_op.batch is no open batch: its step has ended, or it was cancelled");
  if (batch->trainer && batch->trainer != &t_)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the batch was declared by another trainer than this one of rank %u: give one of "
                "its own",
                t_.rank);
  if (batch->rank != t_.rank || batch->step != t_.step)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the batch was declared for step %llu of rank %u; this is step %llu of rank %u: "
                "give one of that",
                static_cast<unsigned long long>(batch->step), batch->rank,
                static_cast<unsigned long long>(t_.step), t_.rank);
  if (batch->failed != FRUGAL_OK && !op.keys)
    return fail(batch->failed, "the batch could not be declared, so give the keys: %s",
                batch->why.c_str());
  if (op.part >= batch->size())
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "frugal_op.part %u: the batch has %zu parts, give one from 0 on", op.part,
                batch->size());
  if (&batch->table(op.part) != &table)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "frugal_op.part %u of the batch is of table '%s': give that table, or another "
                "part",
                op.part, batch->table(op.part).name.c_str());
  const StepPart* p = declared_part(batch->id, op.part);
  if (!p) return FRUGAL_OK;
  if (!op.keys && padded(op) && !same_padding(op, *p->part))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the padding key differs from the declared one; give the keys too");
  if (!op.keys ||
      (p->part->resolved() && same_padding(op, *p->part) && p->part->same_keys(op.keys, op.count)))
    *out = p;
  return FRUGAL_OK;
}

Status RowPath::find(const frugal_op& op, Use use, const GpuOp* gpu, Access* out, bool lends) {
  t_.call_mu.assert_held();
  FRUGAL_TRY(table_of(op, &out->table));
  const AnyTable& table = *out->table;
  size_t keys = op.count;
  const StepPart* found = nullptr;
  const StepPart* named = part_of_handle(op);
  if (named && named->up_to_date && named->table == out->table &&
      (!padded(op) || same_padding(op, *named->part))) {
    keys = named->part->n;
    found = named;
  } else if (op.batch) {
    FRUGAL_TRY(part_of_batch(op, table, &found));
    if (found && !op.keys) keys = found->part->n;
  } else if (op.count) {
    found = part_that([&](const StepPart& p) {
      return p.whole && p.table == out->table && p.part->n == op.count &&
             same_padding(op, *p.part) && p.part->same_keys(op.keys, op.count);
    });
  }
  FRUGAL_TRY(check_op(op, table.dim, keys, use, gpu && gpu->device_offsets && !op.offsets));
  if (found) {
    out->number = static_cast<size_t>(found - t_.parts.data());
    if (found->whole && found->up_to_date) {
      out->part = lends ? PartRef(PartRef(), found->part.get()) : found->part;
      out->whole = true;
      return FRUGAL_OK;
    }
    if (!op.keys) out->declared = found->part;
  }
  if (!op.keys || table.any_key || (found && found->whole)) return FRUGAL_OK;
  return check_dense_ids(op.keys, op.count, padded(op) ? &op.padding_key : nullptr, table.capacity);
}

Status RowPath::accesses_of(const frugal_op* ops, size_t n, Use use, const GpuOp* gpu) {
  // On the host no part of a lookup is kept after the call.
  const bool lends = use == Use::kLookup && !t_.gpu;
  step_.accesses.clear();
  step_.accesses.resize(n);
  for (size_t i = 0; i < n; ++i) {
    Access& a = step_.accesses[i];
    FRUGAL_TRY(in_op(find(ops[i], use, gpu ? &gpu[i] : nullptr, &a, lends), i, n, a.table));
  }
  return step_.resolve(ops, gpu, use);
}

// Calls `call` with ops whose keys and offsets are on the host, and for a trainer on a GPU with
// what is on the device.
template <class Call>
Status RowPath::with_gpu_ops(const frugal_op* ops, size_t n, Use use, Call call) {
  FRUGAL_TRY(check_ops(step_.session, ops, n, use));
  if (!t_.gpu) {
    FRUGAL_TRY(host_memory(ops, n));
    return call(ops, nullptr);
  }
  return t_.gpu->with_ops(
      ops, n, use, !step_.stale(), [&](frugal_op* op) { return match_batch(op); }, call);
}

// An op that has a batch, and keys on the device: compares these with the declared ones.
Status RowPath::match_batch(frugal_op* op) {
  if (!op->batch || !op->keys || !op->count) return FRUGAL_OK;
  bool on_device = false;
  FRUGAL_TRY(t_.gpu->on_device(op->keys, sizeof(uint64_t), "frugal_op.keys", &on_device));
  const AnyBatchRef batch = object_of<AnyBatch>(op->batch);
  // The check of the ops reports what is wrong.
  if (!on_device || !batch || batch->session != &step_.session || batch->rank != t_.rank ||
      batch->step != t_.step || (batch->trainer && batch->trainer != &t_))
    return FRUGAL_OK;
  const StepPart* p = declared_part(batch->id, op->part);
  return p && p->table ? t_.gpu->match_keys(t_.gpu->device_work(t_.rank, t_.step), p->part,
                                            !p->table->keys_are_slots, op)
                       : FRUGAL_OK;
}

// --- Lookup --------------------------------------------------------------------------------------

Status RowPath::lookup(const frugal_op* ops, size_t n) {
  FRUGAL_TRY(step_.begin(Use::kLookup));
  return with_gpu_ops(ops, n, Use::kLookup, [&](const frugal_op* host, const GpuOp* gpu) {
    return lookup_rows(host, n, gpu);
  });
}

Status RowPath::lookup_rows(const frugal_op* ops, size_t n, const GpuOp* gpu) {
  FRUGAL_TRY(accesses_of(ops, n, Use::kLookup, gpu));
  FRUGAL_TRY(step_.create());
  StepView::Counts counts;
  bool reading = false;
  for (size_t i = 0; i < n; ++i) {
    const Access& a = step_.accesses[i];
    RowSource from;
    FRUGAL_TRY(in_op(step_.rows_of(a, &from), i, n, a.table));
    counts.keys += a.part->n;
    counts.stale += from.stale_keys;
    if (from.cached) {
      const uint64_t hits = from.cached_rows ? a.part->cached : 0;
      counts.hits += hits;
      counts.misses +=
          (a.part->pairs || a.part->resolved() ? a.part->occurrences : a.part->n) - hits;
    }
    if (gpu && gpu[i].rows_on_device) {
      FRUGAL_TRY(gather_on_device(a, from, gpu[i]));
      reading = !step_.stale();
    } else if (from.cached_rows.device.values) {
      FRUGAL_TRY(bring_rows(a, from, gpu[i]));
    } else {
      FRUGAL_TRY(gather(a, from, ops[i]));
    }
  }
  // An abort may have taken rows back during the read, and other rows may have their slots now.
  FRUGAL_TRY(step_.end(reading));
  step_.count(Use::kLookup, counts);
  return FRUGAL_OK;
}

Status RowPath::gather(const Access& a, const RowSource& from, const frugal_op& op) {
  const Part& part = *a.part;
  const uint32_t* slots = part.slots.as<uint32_t>();
  Buffer pointers, copies;
  FRUGAL_TRY(locate(from, &part, slots, part.n, step_.pool, &pointers, &copies,
                    [&] { return step_.row_awaited(); }));
  return step_.data.gather(from.rows, pointers.as<const device::Element*>(), slots, part.n, op);
}

// Gathers into memory of the device, in the caller's stream. With staleness rows are written
// meanwhile, so the host reads them.
Status RowPath::gather_on_device(const Access& a, const RowSource& from, const GpuOp& op) {
  DeviceWork& device_work = t_.gpu->device_work(t_.rank, t_.step);
  if (step_.stale())
    return t_.gpu->send_rows(device_work, op, a.part->n, a.table->dim, a.table->stride,
                             [&](const frugal_op& host) { return gather(a, from, host); });
  FRUGAL_TRY(step_.show_device(a, device_work));
  return t_.gpu->gather(device_work, a.part, from.rows, from.cached_rows.device, op);
}

// Gathers into host memory, where cached rows of the device may be newer than host rows.
Status RowPath::bring_rows(const Access& a, const RowSource& from, const GpuOp& op) {
  return t_.gpu->bring_rows(op, a.part->n, a.table->dim,
                            [&](const GpuOp& there) { return gather_on_device(a, from, there); });
}

// --- Push ----------------------------------------------------------------------------------------

Status RowPath::push(const frugal_op* ops, size_t n) {
  FRUGAL_TRY(step_.begin(Use::kPush));
  return with_gpu_ops(ops, n, Use::kPush, [&](const frugal_op* host, const GpuOp* gpu) {
    return push_rows(host, n, gpu);
  });
}

Status RowPath::push_rows(const frugal_op* ops, size_t n, const GpuOp* gpu) {
  t_.call_mu.assert_held();
  // What a failure takes back: new states are dropped, older ones lose the tails of this call.
  Map<const AnyTable*, PushState> added;
  Map<const AnyTable*, size_t> tails;
  Vector<Buffer> weight_grads(n);
  StepView::Counts counts;
  bool reading = false;
  Status status = FRUGAL_OK;
  try {
    status = accesses_of(ops, n, Use::kPush, gpu);
    for (size_t i = 0; i < n && status == FRUGAL_OK; ++i) {
      const Access& a = step_.accesses[i];
      counts.keys += a.part->n;
      auto old = t_.pushes.find(a.table.get());
      if (old != t_.pushes.end()) tails.emplace(a.table.get(), old->second.tail.size());
      PushState* state = old != t_.pushes.end() ? &old->second : &added[a.table.get()];
      if (gpu && gpu[i].rows_on_device) {
        status = push_on_device(a, gpu[i], state, &reading);
        continue;
      }
      // Outputs are written when nothing can fail any more.
      frugal_op op = ops[i];
      if (op.weight_grads_out) {
        status = step_.pool.get(a.part->n * sizeof(float), &weight_grads[i]);
        if (status != FRUGAL_OK) break;
        op.weight_grads_out = weight_grads[i].as<float>();
      }
      status = in_op(push_one(op, a, state), i, n, a.table);
    }
    if (status == FRUGAL_OK) status = step_.create();
    // As in a lookup: rows were read if gradients of weights are wanted.
    if (status == FRUGAL_OK) status = step_.end(reading);
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "no memory for the push; nothing of it was taken: free some and call again");
  }
  if (status != FRUGAL_OK) {
    if (gpu) t_.gpu->drain();  // kernels may be writing what is dropped here
    for (auto& [raw, size] : tails) {
      auto old = t_.pushes.find(raw);  // gone if the step was undone meanwhile
      if (old != t_.pushes.end()) old->second.tail.resize(size);
    }
    return status;
  }
  t_.pushes.merge(added);  // moves map entries: cannot fail
  for (size_t i = 0; i < n; ++i)
    if (weight_grads[i])
      std::memcpy(ops[i].weight_grads_out, weight_grads[i].data(),
                  step_.accesses[i].part->n * sizeof(float));
  step_.count(Use::kPush, counts);
  return FRUGAL_OK;
}

// Begins the rank gradients of a rank's first push to a table in a step, without the sums.
void RowPath::begin_rank_gradients(const Access& a, PushState* state) {
  state->table = a.table;
  state->number = static_cast<uint32_t>(a.number);
  RankGradients& h = state->first;
  h.rank = t_.rank;
  h.part = a.part;
  h.whole = a.whole;
  h.stride = a.table->stride;
}

Status RowPath::weight_grads(const Access& a, const device::GradSource& grads, float* out) {
  const Part& part = *a.part;
  const uint32_t* slots = part.slots.as<uint32_t>();
  RowSource from;
  FRUGAL_TRY(step_.rows_of(a, &from));
  Buffer pointers, copies;
  if (from.cached_rows.device.values) {
    const size_t stride = a.table->stride;
    GpuOp rows;
    rows.op.row_stride = stride * sizeof(float);
    FRUGAL_TRY(step_.pool.get(part.n * rows.op.row_stride, &copies));
    rows.op.rows_out = copies.as<float>();
    FRUGAL_TRY(bring_rows(a, from, rows));
    FRUGAL_TRY(step_.pool.get(part.n * sizeof(device::Element*), &pointers));
    const auto* stored = device::stored_in_place(copies.as<float>(), part.n * stride);
    for (size_t i = 0; i < part.n; ++i)
      pointers.as<const device::Element*>()[i] =
          slots[i] == kNoSlot ? nullptr : stored + i * stride;
  } else {
    FRUGAL_TRY(locate(from, &part, slots, part.n, step_.pool, &pointers, &copies,
                      [&] { return step_.row_awaited(); }));
  }
  device::GradSource plain = grads;
  plain.factor = nullptr;
  plain.divisor = nullptr;
  if (pointers)
    device::kernels().weight_grads_pointers(pointers.as<const device::Element*>(), part.n,
                                            a.table->dim, plain, out);
  else
    device::kernels().weight_grads(from.rows, slots, part.n, plain, out);
  return FRUGAL_OK;
}

Status RowPath::push_one(const frugal_op& op, const Access& a, PushState* state) {
  const Part& part = *a.part;
  const uint32_t dim = a.table->dim;
  PushSource pushed;
  FRUGAL_TRY(pushed.of(op, part, dim, step_.pool));
  const device::GradSource& source = pushed.grads;
  if (op.pooling != FRUGAL_POOL_NONE && op.weight_grads_out && part.n)
    FRUGAL_TRY(weight_grads(a, source, op.weight_grads_out));
  const bool reject = a.table->nan_policy == FRUGAL_NAN_REJECT;
  bool nan = false;
  if (state->table) {
    FRUGAL_TRY(sum_lent(state));
    FRUGAL_TRY(step_.data.add_tail(state, a.part, dim, source, step_.pool, reject, &nan));
    return nan ? nan_refused(op, dim, t_.step) : FRUGAL_OK;
  }
  begin_rank_gradients(a, state);
  RankGradients& h = state->first;
  const bool keeps = step_.keeps_gradients();
  if (std::shared_ptr<Buffer> lent = keeps ? lent_for(source, part, dim) : nullptr) {
    if (reject) FRUGAL_TRY(step_.data.find_nan(source, part.n, dim, &nan));
    h.lent = std::move(lent);
    h.source = source;
  } else {
    if (keeps && source.bag) FRUGAL_TRY(keep_bags(op.bags, reject, source, state));
    if (!h.lent) FRUGAL_TRY(sum_push(state, source, &nan));
  }
  return reject && nan ? nan_refused(op, dim, t_.step) : FRUGAL_OK;
}

// A push of gradients in memory of the device, in the caller's stream. What it finds is reported
// when the step ends. `reading`: kernels read rows for it.
Status RowPath::push_on_device(const Access& a, const GpuOp& op, PushState* state, bool* reading) {
  DeviceWork& device_work = t_.gpu->device_work(t_.rank, t_.step);
  const uint32_t dim = a.table->dim;
  device::GradPtr source;
  FRUGAL_TRY(t_.gpu->gradients(device_work, a.part, op, dim, &source));
  if (op.device_weight_grads) {
    RowSource from;
    FRUGAL_TRY(step_.rows_of(a, &from));
    if (step_.stale()) {
      // Rows are written meanwhile, so the host reads them.
      const size_t stride = a.table->stride;
      Buffer rows;
      FRUGAL_TRY(step_.pinned.get(a.part->n * stride * sizeof(float), &rows));
      frugal_op plain = FRUGAL_OP_INIT;
      plain.rows_out = rows.as<float>();
      plain.row_stride = stride * sizeof(float);
      FRUGAL_TRY(gather(a, from, plain));
      FRUGAL_TRY(t_.gpu->weight_grads_of(device_work, std::move(rows), stride,
                                         a.part->slots.as<uint32_t>(), a.part->n, dim, op, source));
    } else {
      FRUGAL_TRY(step_.show_device(a, device_work));
      *reading = true;
      FRUGAL_TRY(t_.gpu->weight_grads(device_work, a.part, from.rows, from.cached_rows.device, op,
                                      source));
    }
  }
  const bool first = !state->table;
  if (first)
    begin_rank_gradients(a, state);
  else
    FRUGAL_TRY(sum_lent(state));
  return t_.gpu->push(device_work, a.part, source, dim, first,
                      a.table->nan_policy == FRUGAL_NAN_REJECT, step_.sums(true), state);
}

// The lent memory that holds all gradients of a push, one for each key; null if there is none.
std::shared_ptr<Buffer> RowPath::lent_for(const device::GradSource& source, const Part& part,
                                          uint32_t dim) const {
  t_.call_mu.assert_held();
  if (source.bag || source.factor || part.n == 0 || part.occurrences != part.n) return nullptr;
  const char* from = reinterpret_cast<const char*>(source.grads);
  size_t bytes = (part.n - 1) * source.stride + dim * sizeof(float);
  for (const std::shared_ptr<Buffer>& b : t_.lent) {
    const char* start = b->as<char>();
    if (from >= start && from + bytes <= start + b->capacity()) return b;
  }
  return nullptr;
}

// There may be far fewer gradients of bags than rows. Then a copy of them, with the bag of each
// key, is submitted in place of the rows' sums. That is not done where a NaN may have to be
// refused: only summing finds its term.
Status RowPath::keep_bags(size_t bags, bool reject, const device::GradSource& source,
                          PushState* state) {
  RankGradients& h = state->first;
  const Part& part = *h.part;
  const uint32_t dim = state->table->dim;
  const size_t row = h.stride * sizeof(float);
  if (reject && source.factor) return FRUGAL_OK;  // the terms are products
  size_t at[4] = {};  // where the gradients, bags, factors and divisors end
  at[0] = bags * row;
  at[1] = at[0] + part.n * sizeof(uint32_t);
  at[2] = at[1] + (source.factor ? part.n * sizeof(float) : 0);
  at[3] = at[2] + (source.divisor ? bags * sizeof(float) : 0);
  if (at[3] > part.distinct * row / 2) return FRUGAL_OK;
  if (reject) {
    bool nan = false;
    FRUGAL_TRY(step_.data.find_nan(source, bags, dim, &nan));
    if (nan) return FRUGAL_OK;
  }
  Buffer kept;
  FRUGAL_TRY(step_.pool.get(at[3], &kept));
  for (size_t b = 0; b < bags; ++b)
    std::memcpy(kept.data() + b * row,
                reinterpret_cast<const char*>(source.grads) + b * source.stride,
                dim * sizeof(float));
  std::memcpy(kept.data() + at[0], source.bag, part.n * sizeof(uint32_t));
  h.source = {kept.as<float>(), row, reinterpret_cast<uint32_t*>(kept.data() + at[0]), nullptr,
              nullptr};
  if (source.factor) {
    std::memcpy(kept.data() + at[1], source.factor, part.n * sizeof(float));
    h.source.factor = reinterpret_cast<float*>(kept.data() + at[1]);
  }
  if (source.divisor) {
    std::memcpy(kept.data() + at[2], source.divisor, bags * sizeof(float));
    h.source.divisor = reinterpret_cast<float*>(kept.data() + at[2]);
  }
  h.lent = std::allocate_shared<Buffer>(HeapAllocator<Buffer>(), std::move(kept));
  return FRUGAL_OK;
}

// Another push follows one from lent memory, so its sums are needed after all.
Status RowPath::sum_lent(PushState* state) {
  if (!state->first.lent) return FRUGAL_OK;
  bool nan = false;
  FRUGAL_TRY(sum_push(state, state->first.source, &nan));
  state->first.lent.reset();
  return FRUGAL_OK;
}

Status RowPath::sum_push(PushState* state, const device::GradSource& source, bool* nan) {
  return step_.data.sum_first(state, state->table->dim, source, step_.sums(false),
                              step_.streams_sums(), nan);
}

Status RowPath::borrow(size_t bytes, void** out) {
  t_.call_mu.assert_held();
  FRUGAL_TRY(step_.begin(Use::kRead));
  Buffer b;
  FRUGAL_TRY(step_.pool.get(std::max<size_t>(bytes, 64), &b));
  *out = b.data();
  t_.lent.push_back(std::allocate_shared<Buffer>(HeapAllocator<Buffer>(), std::move(b)));
  return FRUGAL_OK;
}

}  // namespace frugal
