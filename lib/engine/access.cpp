// Lookup and push: the data path.
#include <algorithm>
#include <cstring>

#include "arith/fold.h"
#include "base/fpenv.h"
#include "base/handles.h"
#include "device/pointers.h"
#include "engine/access_scope.h"
#include "engine/wait.h"

namespace frugal {
// --- Checking ------------------------------------------------------------------------------------

Status Engine::op_table(const frugal_op& op, TableRef* out) const {
  AnyTableRef table;
  FRUGAL_TRY(Session::op_table(op, &table));
  *out = std::static_pointer_cast<Table>(std::move(table));
  return FRUGAL_OK;
}

Status Engine::table_of(uint64_t handle, TableRef* out) const {
  const AnyTableRef table = object_of<AnyTable>(reinterpret_cast<const void*>(handle));
  if (!table || table->session.get() != this)
    return fail(FRUGAL_ERR_BAD_HANDLE, "another process of the job has dropped the table: drop this handle of it, too");
  *out = std::static_pointer_cast<Table>(table);
  return FRUGAL_OK;
}

// Finds the declaration that an op names by its batch, or by its keys.
Status Engine::find_access(Trainer& t, const frugal_op& op, Use use, const GpuOp* gpu, Access* out) {
  FRUGAL_TRY(op_table(op, &out->table));
  bool padded = op.flags & FRUGAL_OP_PADDING;
  auto same_padding = [&](const Part& p) {
    return p.has_padding == padded && (!padded || p.padding == op.padding_key);
  };
  size_t keys = op.count;
  if (op.batch) {
    const AnyBatchRef any = object_of<AnyBatch>(op.batch);
    const auto batch = any && any->session == this ? std::static_pointer_cast<Batch>(any) : nullptr;
    if (!batch) return fail(FRUGAL_ERR_BAD_HANDLE, "frugal_op.batch is no open batch: its step has ended, or it was cancelled");
    if (batch->rank != t.rank || batch->step != t.step)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "the batch was declared for step %llu of rank %u; this is step %llu of rank %u",
                  static_cast<unsigned long long>(batch->step), batch->rank,
                  static_cast<unsigned long long>(t.step), t.rank);
    if (op.part >= batch->parts.size())
      return fail(FRUGAL_ERR_INVALID_ARGUMENT, "frugal_op.part %u: the batch has %zu parts, from 0 on", op.part,
                  batch->parts.size());
    if (batch->tables[op.part] != out->table)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT, "frugal_op.part %u of the batch is of table '%s'", op.part,
                  batch->tables[op.part]->name.c_str());
    const PartRef& p = batch->parts[op.part];
    if (!op.keys) {
      keys = p->n;
      if (padded && !same_padding(*p))
        return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                    "the padding key differs from the declared one; give the keys too");
      out->part = p;
      out->whole = p->resolved();
    } else if (p->resolved() && same_padding(*p) && p->same_keys(op.keys, op.count)) {
      out->part = p;
      out->whole = true;
    }
  } else if (op.count) {
    Vector<PartRef> candidates;
    {
      std::lock_guard<std::mutex> lock(mu_);
      auto at = batches_.find(t.step);
      if (at != batches_.end())
        for (const BatchRef& b : at->second) {
          if (b->rank != t.rank) continue;
          for (size_t i = 0; i < b->parts.size(); ++i) {
            const PartRef& p = b->parts[i];
            if (b->tables[i] == out->table && p->n == op.count && p->resolved() && same_padding(*p))
              candidates.push_back(p);
          }
        }
    }
    // A resolved part does not change, and those of a step that this rank is inside of stay: keys
    // are compared without the lock.
    for (const PartRef& p : candidates)
      if (p->same_keys(op.keys, op.count)) {
        out->part = p;
        out->whole = true;
        break;
      }
  }
  FRUGAL_TRY(check_op(op, out->table->rows.layout().dim, keys, use, gpu && gpu->device_offsets && !op.offsets));
  if (!out->whole && op.keys)
    FRUGAL_TRY(out->table->rows.check_ids(op.keys, op.count, padded ? &op.padding_key : nullptr));
  return FRUGAL_OK;
}

// Slots of keys that are not a whole declaration; missing rows are reserved, so that a call which
// fails later has created nothing. `sorted`: with duplicates removed too.
Status Engine::resolve_access(Trainer& t, const frugal_op& op, Access* a, bool sorted) {
  if (a->whole) return FRUGAL_OK;
  Rows& rows = a->table->rows;
  PartRef part = make_part();
  part->step = t.step;
  part->rank = t.rank;
  // A declaration that could not be resolved ahead.
  Part* declared = op.keys ? nullptr : a->part.get();
  const size_t n = declared ? declared->n : op.count;
  const bool padded = op.flags & FRUGAL_OP_PADDING;
  counters_.keys_undeclared.fetch_add(n, std::memory_order_relaxed);
  if (declared) {
    FRUGAL_TRY(declared->take_lent(pool_, rows));
    FRUGAL_TRY(part->take_keys(pool_, *declared));
  } else if (sorted) {
    FRUGAL_TRY(part->take_keys(pool_, rows, op.keys, n, padded, op.padding_key));
  } else {
    part->n = n;
    FRUGAL_TRY(pool_.get(n * sizeof(uint32_t), &part->slots));
    FRUGAL_TRY(rows.resolve(op.keys, n, padded ? &op.padding_key : nullptr, Rows::Missing::kReserve,
                            part->slots.as<uint32_t>(), nullptr));
  }
  if (sorted)
    FRUGAL_TRY(part->resolve(pool_, rows, Rows::Missing::kReserve, nullptr));
  else if (declared)
    FRUGAL_TRY(part->find_slots(pool_, rows, Rows::Missing::kReserve, nullptr));
  a->part = std::move(part);
  return FRUGAL_OK;
}

// Rows of the accesses that are only reserved come into being. Throws if there is no memory: what
// exists by then is young, and among the trainer's created rows, so that the step's undoing takes it back.
void Engine::create_rows(Trainer& t, const Vector<Access>& accesses) {
  t.created.reserve(t.created.size() + accesses.size());
  // Asked once: a cache may join in between, and nothing is noted without the lock.
  const bool track = track_young();
  for (const Access& a : accesses) {
    Rows& rows = a.table->rows;
    if (!rows.hashed()) continue;
    CreatedRows made;
    made.table = a.table;
    const uint32_t* slots = a.part->slots.as<uint32_t>();
    // Who finds a row existing must find it young, too.
    std::unique_lock<std::mutex> young(a.table->young_mu, std::defer_lock);
    if (track) young.lock();
    if (rows.has_reserved())
      rows.create_reserved(slots, a.part->n, &made.slots, ledger_ ? Ledger::mark_of(t.step) : 0);
    bool any = !made.slots.empty();
    if (any) t.created.push_back(std::move(made));
    if (track) try {
        note_young(*a.table, t.step, slots, a.part->n, any ? t.created.back().slots : Vector<uint32_t>());
      } catch (const std::bad_alloc&) {
        // Of what has come into being nobody would know that it is young.
        if (!any) throw;
        const Vector<uint32_t>& back = t.created.back().slots;
        for (uint32_t s : back) a.table->young.erase(s);
        rows.uncreate(back.data(), back.size(), false);
        t.created.pop_back();
        throw;
      }
  }
}

// Undeclared rows: their pending updates become urgent, and are waited for.
Status Engine::fresh(Trainer* t, Table& table, const uint32_t* slots, size_t n, uint64_t step,
                     Deadline deadline) {
  Status s = FRUGAL_OK;
  if (apply_jobs_.load())
    s = wait(deadline, t, [&] { return apply_jobs_.load() == 0; },
             [&] { return run_jobs(true); });
  // A job that has failed counts as done, too, after health has told.
  if (s == FRUGAL_OK) s = check();
  if (s == FRUGAL_OK && table.window.opened() && table.window.any_pending()) {
    uint64_t before = step;
    if (step != UINT64_MAX)
      before = config_.staleness >= step ? 0 : step - config_.staleness;
    bool waited = false;
    // One round for each unwritten update of a row.
    while (s == FRUGAL_OK && table.window.force(slots, n, before)) {
      if (!waited) counters_.lookup_waits.fetch_add(1, std::memory_order_relaxed);
      waited = true;
      uint64_t base;
      {
        std::lock_guard<std::mutex> lock(mu_);
        base = to_commit();
      }
      s = wait(deadline, t, [&] { return !table.window.pending_until(base); },
               [&] { return flush_rows(base); });
    }
  }
  if (s == FRUGAL_ERR_STEP_ABORTED && t) return aborted(*t);
  if (s == FRUGAL_ERR_TIMEOUT)
    return fail(s, "%zu keys that were not declared waited for their pending updates; call again", n);
  return s;
}

// --- Lookup --------------------------------------------------------------------------------------

// The cache of the trainer's that has rows of an access; null if there is none. Where keys were not
// declared, rows are fresh in host memory.
TrainerTable* Engine::lines_for(Trainer& t, const Access& a) {
  if (!a.whole || !a.part->lines || !t.has_cache.load()) return nullptr;
  TrainerTable* of = cache_in(t, *a.table);
  return of && of->cache() ? of : nullptr;
}

// Rows that the gate has not seen to.
Status Engine::fresh_access(Trainer& t, const Access& a) {
  if (a.whole) {
    TrainerTable* of = t.has_cache.load() ? cache_in(t, *a.table) : nullptr;
    if (!of || !of->cache() || a.part->lines || a.part->distinct == 0) return FRUGAL_OK;
  }
  return fresh(&t, *a.table, a.part->slots.as<uint32_t>(), a.part->n, t.step,
               deadline(FRUGAL_TIMEOUT_DEFAULT));
}

// Where each key's row is to be read: the trainer's cache, the host row, or (staleness) a copy. Empty
// `pointers`: all in the host rows.
Status Engine::locate(Table& table, const RowCache* cache, const Part* cached, const uint32_t* slots,
                      size_t n, Buffer* pointers, Buffer* copies) {
  if (!cached && !stale()) return FRUGAL_OK;
  static const float zeros[65536] = {};  // the largest row
  FRUGAL_TRY(pool_.get(n * sizeof(float*), pointers));
  const float** p = pointers->as<const float*>();
  std::fill(p, p + n, nullptr);
  if (cached) {
    const uint32_t *start = cached->row_start(), *line = cached->lines.as<uint32_t>();
    const uint64_t* pairs = cached->pairs.as<uint64_t>();
    for (size_t i = 0; i < cached->distinct; ++i) {
      if (line[i] == RowCache::kNone) continue;
      for (uint32_t k = start[i]; k < start[i + 1]; ++k)
        p[static_cast<uint32_t>(pairs[k])] = cache->values(line[i]);
    }
  }
  size_t row_floats = table.rows.layout().value_stride;
  if (stale()) FRUGAL_TRY(pool_.get(n * row_floats * sizeof(float), copies));
  const Deadline until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  const auto go_on = [&] {
    FRUGAL_TRY(check());
    if (!until.passed()) return Status{FRUGAL_OK};
    return fail(FRUGAL_ERR_TIMEOUT, "waited for rows to be written; nothing was taken: call again");
  };
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (p[i] || s == kNoSlot) continue;
    if (s == kMissingSlot) {
      p[i] = zeros;
      continue;
    }
    p[i] = table.rows.values(s);
    if (stale()) {
      float* copy = copies->as<float>() + i * row_floats;
      FRUGAL_TRY(read_row(versions_[version_of(table.handle, s)], p[i], table.rows.layout().dim, copy, go_on));
      p[i] = copy;
    }
  }
  return FRUGAL_OK;
}

Status Engine::gather_table(Table& table, const RowCache* cache, const Part* cached, const uint32_t* slots,
                            size_t n, const frugal_op& op) {
  Buffer pointers, copies;
  FRUGAL_TRY(locate(table, cache, cached, slots, n, &pointers, &copies));
  return gather(table.rows.ref(), pointers.as<const float*>(), slots, n, op);
}

// Calls with ops whose keys and offsets are on the host, and for a trainer on a GPU with what is not.
template <class Call>
Status Engine::with_gpu_ops(Trainer& t, const frugal_op* ops, size_t n, Use use, Call call) {
  FRUGAL_TRY(check_ops(*this, ops, n, use));
  if (!t.gpu) {
    FRUGAL_TRY(host_memory(ops, n));
    return call(ops, nullptr);
  }
  return t.gpu->with_ops(ops, n, use, !stale(), [&](frugal_op* op) { return match_batch(t, op); }, call);
}

// Keys on the device beside a batch.
Status Engine::match_batch(Trainer& t, frugal_op* op) {
  if (!op->batch || !op->keys || !op->count) return FRUGAL_OK;
  bool on_device = false;
  FRUGAL_TRY(t.gpu->on_device(op->keys, sizeof(uint64_t), "frugal_op.keys", &on_device));
  const AnyBatchRef any = object_of<AnyBatch>(op->batch);
  const auto batch = any && any->session == this ? std::static_pointer_cast<Batch>(any) : nullptr;
  if (!on_device || !batch || batch->rank != t.rank || batch->step != t.step ||
      op->part >= batch->parts.size())
    return FRUGAL_OK;  // what is wrong is told where ops are checked
  return t.gpu->match_keys(t.gpu->flight(t.rank, t.step), batch->parts[op->part],
                           batch->tables[op->part]->rows.hashed(), op);
}

Status Engine::lookup(AnyTrainer& any, const frugal_op* ops, size_t n) {
  Trainer& t = own(any);
  Timed timed(counters_.lookup_ns);
  TraceSpan span(trace_, SpanKind::kLookup);
  span.rank(t.rank);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FpEnvironment fp;
  FRUGAL_TRY(inside(t));
  span.step(t.step);
  Counted busy(calls_);
  return with_gpu_ops(t, ops, n, Use::kLookup, [&](const frugal_op* host, const GpuOp* gpu) {
    return with_room(host, n, [&] { return lookup_rows(t, host, n, gpu, span); });
  });
}

Status Engine::lookup_rows(Trainer& t, const frugal_op* ops, size_t n, const GpuOp* gpu, TraceSpan& span) {
  Vector<Access> accesses(n);
  for (size_t i = 0; i < n; ++i)
    FRUGAL_TRY(in_op(find_access(t, ops[i], Use::kLookup, gpu ? &gpu[i] : nullptr, &accesses[i]), i, n,
                     accesses[i].table));
  {
    AccessScope scope(*this, accesses);
    for (size_t i = 0; i < n; ++i)
      FRUGAL_TRY(in_op(resolve_access(t, ops[i], &accesses[i],
                                      gpu && (gpu[i].rows_on_device || t.has_cache.load()) && !stale()),
                       i, n, accesses[i].table));
    create_rows(t, accesses);
  }
  uint64_t keys = 0;
  for (size_t i = 0; i < n; ++i) {
    const Access& a = accesses[i];
    const uint32_t* slots = a.part->slots.as<uint32_t>();
    size_t count = a.part->n;
    keys += count;
    FRUGAL_TRY(in_op(fresh_access(t, a), i, n, a.table));
    const TrainerTable* lines = lines_for(t, a);
    if (cache_in(t, *a.table)) {
      const uint64_t hits = lines ? a.part->cached : 0;
      const uint64_t misses = (a.part->pairs ? a.part->occurrences : count) - hits;
      counters_.cache_hits.fetch_add(hits, std::memory_order_relaxed);
      counters_.cache_misses.fetch_add(misses, std::memory_order_relaxed);
      t.counts.cache_hits.fetch_add(hits, std::memory_order_relaxed);
      t.counts.cache_misses.fetch_add(misses, std::memory_order_relaxed);
    }
    if (stale()) counters_.stale_reads.fetch_add(stale_keys(*a.table, slots, count), std::memory_order_relaxed);
    if (gpu && gpu[i].rows_on_device)
      FRUGAL_TRY(gather_on_device(t, a, gpu[i]));
    else if (gpu && t.has_cache.load())
      FRUGAL_TRY(gather_through_device(t, a, gpu[i]));
    else
      FRUGAL_TRY(gather_table(*a.table, lines ? lines->cache() : nullptr, lines ? a.part.get() : nullptr, slots,
                        count, ops[i]));
  }
  // An abort may have taken rows back while they were read, and their places may be other rows'.
  if (t.abort_notice.load()) return aborted(t);
  counters_.keys_looked_up.fetch_add(keys, std::memory_order_relaxed);
  t.counts.keys_looked_up.fetch_add(keys, std::memory_order_relaxed);
  span.count(keys);
  return FRUGAL_OK;
}

// A lookup of a trainer on a GPU, into memory of the device, in the caller's stream.
Status Engine::gather_on_device(Trainer& t, const Access& a, const GpuOp& op) {
  Flight& flight = t.gpu->flight(t.rank, t.step);
  if (!stale()) {
    const TrainerTable* of = lines_for(t, a);
    return t.gpu->gather(flight, a.part, a.table->rows.ref(), of ? of->lines.get() : nullptr, op);
  }
  // With staleness rows are written meanwhile: they are read here, under their locks.
  return gather_and_send(flight, *a.table, a.part->slots.as<uint32_t>(), a.part->n, op);
}

// A lookup of a trainer on a GPU into host memory, where rows may be newer in lines than in host memory.
Status Engine::gather_through_device(Trainer& t, const Access& a, const GpuOp& op) {
  return t.gpu->bring_rows(op, a.part->n, a.table->rows.layout().dim,
                           [&](const GpuOp& there) { return gather_on_device(t, a, there); });
}

// Evaluation into memory of the device: complete when it returns, so nothing stays in flight.
Status Engine::read_to_device(Trainer& t, Table& table, const uint32_t* slots, size_t n,
                              const GpuOp& op) {
  Flight flight;
  flight.gpu = t.gpu;
  FRUGAL_TRY(gather_and_send(flight, table, slots, n, op));
  return t.gpu->wait_stream();
}

// Rows gathered by the host, and copied to the device.
Status Engine::gather_and_send(Flight& flight, Table& table, const uint32_t* slots, size_t n,
                               const GpuOp& op) {
  const RowLayout& layout = table.rows.layout();
  return flight.gpu->send_rows(flight, op, n, layout.dim, layout.value_stride, [&](const frugal_op& host) {
    return gather_table(table, nullptr, nullptr, slots, n, host);
  });
}

// --- Push ----------------------------------------------------------------------------------------

// The hand-over of a rank's first push to a table in a step, without its sums.
Handover& Engine::begin_handover(const Trainer& t, const Access& a, PushState* state) {
  state->table = a.table;
  Handover& h = state->first;
  h.rank = t.rank;
  h.part = a.part;
  h.whole = a.whole;
  h.stride = a.table->rows.layout().value_stride;
  return h;
}

Status Engine::push_one(Trainer& t, const frugal_op& op, const Access& a, PushState* state) {
  const Part& part = *a.part;
  const RowLayout& layout = a.table->rows.layout();
  PushSource pushed;
  FRUGAL_TRY(pushed.of(op, part, layout.dim, pool_));
  const device::GradSource& source = pushed.grads;
  const uint32_t* slots = part.slots.as<uint32_t>();
  if (op.pooling != FRUGAL_POOL_NONE) {
    if (op.weight_grads_out && part.n) {
      FRUGAL_TRY(fresh_access(t, a));
      const TrainerTable* lines = lines_for(t, a);
      Buffer pointers, copies;
      if (t.gpu && t.has_cache.load()) {
        GpuOp rows;
        rows.op.row_stride = layout.value_stride * sizeof(float);
        FRUGAL_TRY(pool_.get(part.n * rows.op.row_stride, &copies));
        rows.op.rows_out = copies.as<float>();
        FRUGAL_TRY(gather_through_device(t, a, rows));
        FRUGAL_TRY(pool_.get(part.n * sizeof(float*), &pointers));
        for (size_t i = 0; i < part.n; ++i)
          pointers.as<const float*>()[i] =
              slots[i] == kNoSlot ? nullptr : copies.as<float>() + i * layout.value_stride;
      } else {
        FRUGAL_TRY(locate(*a.table, lines ? lines->cache() : nullptr, lines ? &part : nullptr, slots, part.n,
                          &pointers, &copies));
      }
      device::GradSource plain = source;
      plain.factor = nullptr;
      plain.divisor = nullptr;
      if (pointers)
        device::kernels().weight_grads_pointers(pointers.as<const float*>(), part.n, layout.dim,
                                                plain, op.weight_grads_out);
      else
        device::kernels().weight_grads(a.table->rows.ref(), slots, part.n, plain,
                                       op.weight_grads_out);
    }
  }
  const bool reject = a.table->config.nan_policy == FRUGAL_NAN_REJECT;
  auto nan_found = [&] { return nan_refused(op, layout.dim, t.step); };
  if (state->table) {
    FRUGAL_TRY(sum_lent(state));
    bool nan = false;
    FRUGAL_TRY(add_tail(state, a.part, layout.dim, source, pool_, reject, &nan));
    return nan ? nan_found() : FRUGAL_OK;
  }
  Handover& h = begin_handover(t, a, state);
  bool nan = false;
  Status status = FRUGAL_OK;
  const bool alone = config_.world_size == 1 && !stale() && !caches_exist() && !ledger_;
  if (std::shared_ptr<Buffer> lent = lent_for(t, source, part, layout.dim); lent && alone) {
    if (reject) status = find_nan(source, part.n, layout.dim, &nan);
    h.lent = std::move(lent);
    h.source = source;
  } else {
    if (alone && source.bag) status = keep_bags(op.bags, reject, source, state);
    if (status == FRUGAL_OK && !h.lent) status = sum_push(state, source, &nan);
  }
  if (status == FRUGAL_OK && reject && nan) status = nan_found();
  if (status != FRUGAL_OK) *state = {};
  return status;
}

// A push of gradients in memory of the device, in the caller's stream. What it finds is told when the
// step ends.
Status Engine::push_on_device(Trainer& t, const Access& a, const GpuOp& op, PushState* state) {
  Flight& flight = t.gpu->flight(t.rank, t.step);
  const RowLayout& layout = a.table->rows.layout();
  device::GradPtr source;
  FRUGAL_TRY(t.gpu->gradients(flight, a.part, op, layout.dim, &source));
  if (op.device_weight_grads) {
    FRUGAL_TRY(fresh_access(t, a));
    if (stale()) {
      // Rows are written meanwhile: they are read here, under their locks.
      Buffer rows;
      const uint32_t* slots = a.part->slots.as<uint32_t>();
      FRUGAL_TRY(pinned_.get(a.part->n * layout.value_stride * sizeof(float), &rows));
      frugal_op plain = FRUGAL_OP_INIT;
      plain.rows_out = rows.as<float>();
      plain.row_stride = layout.value_stride * sizeof(float);
      FRUGAL_TRY(gather_table(*a.table, nullptr, nullptr, slots, a.part->n, plain));
      FRUGAL_TRY(t.gpu->weight_grads_of(flight, std::move(rows), layout.value_stride, slots, a.part->n, layout.dim,
                                        op, source));
    } else {
      const TrainerTable* of = lines_for(t, a);
      FRUGAL_TRY(t.gpu->weight_grads(flight, a.part, a.table->rows.ref(), of ? of->lines.get() : nullptr, op, source));
    }
  }
  const bool first = !state->table;
  if (first)
    begin_handover(t, a, state);
  else
    FRUGAL_TRY(sum_lent(state));
  const Status status = t.gpu->push(flight, a.part, source, layout.dim, first,
                                    a.table->config.nan_policy == FRUGAL_NAN_REJECT, pinned_, state);
  if (status != FRUGAL_OK && first) *state = {};
  return status;
}

// The lent memory that holds all gradients of a push, one for each key; null if there is none.
std::shared_ptr<Buffer> Engine::lent_for(const Trainer& t, const device::GradSource& source,
                                         const Part& part, uint32_t dim) {
  if (source.bag || source.factor || part.n == 0 || part.occurrences != part.n) return nullptr;
  const char* from = reinterpret_cast<const char*>(source.grads);
  size_t bytes = (part.n - 1) * source.stride + dim * sizeof(float);
  for (const std::shared_ptr<Buffer>& b : t.lent) {
    const char* start = b->as<char>();
    if (from >= start && from + bytes <= start + b->capacity()) return b;
  }
  return nullptr;
}

// Gradients of bags may be far fewer than rows: then a copy of them, with the bag of each key, is handed over
// in place of the rows' sums. Not where a NaN may be to be refused: the summing finds out of which term.
Status Engine::keep_bags(size_t bags, bool reject, const device::GradSource& source, PushState* state) {
  Handover& h = state->first;
  const Part& part = *h.part;
  const uint32_t dim = state->table->rows.layout().dim;
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
    FRUGAL_TRY(find_nan(source, bags, dim, &nan));
    if (nan) return FRUGAL_OK;
  }
  Buffer kept;
  FRUGAL_TRY(pool_.get(at[3], &kept));
  for (size_t b = 0; b < bags; ++b)
    std::memcpy(kept.data() + b * row, reinterpret_cast<const char*>(source.grads) + b * source.stride,
                dim * sizeof(float));
  std::memcpy(kept.data() + at[0], source.bag, part.n * sizeof(uint32_t));
  h.source = {kept.as<float>(), row, reinterpret_cast<uint32_t*>(kept.data() + at[0]), nullptr, nullptr};
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

// A push from lent memory is to be gone on with, so it is needed as sums after all.
Status Engine::sum_lent(PushState* state) {
  if (!state->first.lent) return FRUGAL_OK;
  bool nan = false;
  FRUGAL_TRY(sum_push(state, state->first.source, &nan));
  state->first.lent.reset();
  return FRUGAL_OK;
}

Status Engine::sum_push(PushState* state, const device::GradSource& source, bool* nan) {
  return sum_first(state, state->table->rows.layout().dim, source, sums_pool(),
                   deferred_now_.load(std::memory_order_relaxed), nan);
}

Status Engine::push(AnyTrainer& any, const frugal_op* ops, size_t n) {
  Trainer& t = own(any);
  Timed timed(counters_.push_ns);
  TraceSpan span(trace_, SpanKind::kPush);
  span.rank(t.rank);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FpEnvironment fp;
  FRUGAL_TRY(inside(t));
  span.step(t.step);
  pushed_.store(t.step + 1, std::memory_order_relaxed);
  Counted busy(calls_);
  return with_gpu_ops(t, ops, n, Use::kPush, [&](const frugal_op* host, const GpuOp* gpu) {
    return with_room(host, n, [&] { return push_rows(t, host, n, gpu, span); });
  });
}

Status Engine::push_rows(Trainer& t, const frugal_op* ops, size_t n, const GpuOp* gpu, TraceSpan& span) {
  Vector<Access> accesses(n);
  for (size_t i = 0; i < n; ++i)
    FRUGAL_TRY(in_op(find_access(t, ops[i], Use::kPush, gpu ? &gpu[i] : nullptr, &accesses[i]), i, n,
                     accesses[i].table));
  AccessScope scope(*this, accesses);
  // What a failure takes back: new states are dropped, older ones lose the tails of this call.
  Map<const Table*, PushState> fresh_states;
  Map<const Table*, size_t> tails;
  Vector<Buffer> weight_grads(n);
  Status status = FRUGAL_OK;
  uint64_t keys = 0;
  try {
    for (size_t i = 0; i < n && status == FRUGAL_OK; ++i) {
      status = in_op(resolve_access(t, ops[i], &accesses[i], true), i, n, accesses[i].table);
      if (status != FRUGAL_OK) break;
      const Table* raw = accesses[i].table.get();
      keys += accesses[i].part->n;
      auto old = t.pushes.find(raw);
      PushState* state;
      if (old != t.pushes.end()) {
        state = &old->second;
        tails.emplace(raw, state->tail.size());
      } else {
        state = &fresh_states[raw];
      }
      if (gpu && gpu[i].rows_on_device) {
        status = push_on_device(t, accesses[i], gpu[i], state);
        continue;
      }
      // Outputs are written when nothing can fail any more.
      frugal_op op = ops[i];
      if (op.weight_grads_out) {
        status = pool_.get(accesses[i].part->n * sizeof(float), &weight_grads[i]);
        if (status != FRUGAL_OK) break;
        op.weight_grads_out = weight_grads[i].as<float>();
      }
      status = in_op(push_one(t, op, accesses[i], state), i, n, accesses[i].table);
    }
    if (status == FRUGAL_OK) create_rows(t, accesses);
    // As in a lookup: rows were read if gradients of weights are wanted.
    if (status == FRUGAL_OK && t.abort_notice.load()) status = aborted(t);
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the push; nothing of it was taken: free some and call again");
  }
  if (status != FRUGAL_OK) {
    if (gpu) t.gpu->drain();  // kernels may be writing what is dropped here
    for (auto& [raw, size] : tails) {
      auto old = t.pushes.find(raw);  // gone if the step was undone meanwhile
      if (old != t.pushes.end()) old->second.tail.resize(size);
    }
    return status;
  }
  t.pushes.merge(fresh_states);  // moves nodes: cannot fail
  for (size_t i = 0; i < n; ++i)
    if (weight_grads[i])
      std::memcpy(ops[i].weight_grads_out, weight_grads[i].data(), accesses[i].part->n * sizeof(float));
  counters_.keys_pushed.fetch_add(keys, std::memory_order_relaxed);
  t.counts.keys_pushed.fetch_add(keys, std::memory_order_relaxed);
  span.count(keys);
  return FRUGAL_OK;
}

Status Engine::not_inside(const Trainer& t) const {  // with mu_ held
  if (uint32_t lost = t.lost_peer.load(); lost != kNoRank)
    return fail(FRUGAL_ERR_PEER_LOST, "the process of rank %u is gone and the step undone: begin step %llu again",
                lost, static_cast<unsigned long long>(to_commit()));
  return fail(FRUGAL_ERR_NOT_IN_STEP, "rank %u is not inside a step: call step_begin first", t.rank);
}

Status Engine::inside(Trainer& t) {
  std::lock_guard<std::mutex> lock(mu_);
  return t.in_step ? FRUGAL_OK : not_inside(t);
}

Status Engine::borrow(AnyTrainer& any, size_t bytes, void** out) {
  Trainer& t = own(any);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FRUGAL_TRY(inside(t));
  Buffer b;
  FRUGAL_TRY(pool_.get(std::max<size_t>(bytes, 64), &b));
  *out = b.data();
  t.lent.push_back(std::allocate_shared<Buffer>(HeapAllocator<Buffer>(), std::move(b)));
  return FRUGAL_OK;
}

}  // namespace frugal
