// A trainer's calls. Declared keys need no message between the gate and the step's end.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/handles.h"
#include "device/pointers.h"
#include "engine/op_check.h"
#include "process/client.h"

namespace frugal {
namespace {

// Declared keys of at least so many bytes are written once, to staging memory, where the controller
// finds them later. Fewer go with the request.
constexpr size_t kStagedBytes = size_t{2} << 10;

}  // namespace

// A call outside of steps follows the process's declarations, if the controller replies in time.
void Client::take_late_replies(uint64_t until) {
  Vector<RemoteTrainerRef> trainers;
  {
    Lock lock(mu_);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) trainers.push_back(std::move(t));
  }
  for (const RemoteTrainerRef& t : trainers) t->take_late_reply_within(until);
}

// Begins every call: what the trainer must learn comes before all else.
Status Client::begin_call(RemoteTrainer& t) {
  FRUGAL_TRY(controller_.check());
  if (t.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (t.gpu && t.gpu->sticky()) return device_failed(t);
  Status s = FRUGAL_OK;
  if (UniqueLock one(t.late.mu, std::try_to_lock); one) s = t.channel().look();
  if (s != FRUGAL_OK) {
    // Another trainer has its rank, the controller has ended, or this trainer was closed meanwhile.
    t.leave_step();
    return t.concluded(t.rpc.not_answered(s));
  }
  t.take_releases();
  if (t.notices.counted->load() == t.notices.told) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  s = t.ask(e);
  if (s == FRUGAL_ERR_NOT_IN_STEP) s = FRUGAL_OK;
  if (s == FRUGAL_OK) t.notices.told = t.notices.counted->load();
  return s;
}

// --- Declaring -----------------------------------------------------------------------------------

Status Client::op_table(const frugal_op& op, RemoteTableRef* out) const {
  AnyTableRef table;
  FRUGAL_TRY(Session::op_table(op, &table));
  *out = std::static_pointer_cast<RemoteTable>(std::move(table));
  return FRUGAL_OK;
}

RemoteBatchRef Client::batch_of(const void* handle) const {
  AnyBatchRef batch = object_of<AnyBatch>(handle);
  return batch && batch->session == this ? std::static_pointer_cast<RemoteBatch>(std::move(batch))
                                         : nullptr;
}

namespace {

Status check_keys(const AnyTable& table, const frugal_op& op) {
  if (table.any_key || !op.keys) return FRUGAL_OK;
  return check_dense_ids(op.keys, op.count,
                         op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr, table.capacity);
}

}  // namespace

// Keys of a dense table become slots: half the bytes, and this process checks the ids meanwhile.
Status Client::declared_keys(RemoteTrainer& t, const RemoteTable& table, const frugal_op& op,
                             bool stages, OpHead* head, Buffer* memory, Exchange* e) {
  const bool hashed = table.info.key_space == FRUGAL_HASHED;
  const size_t bytes = op.count * (hashed ? sizeof(uint64_t) : sizeof(uint32_t));
  const bool staged = stages && bytes >= kStagedBytes && t.sums.get(bytes, memory) == FRUGAL_OK;
  if (staged) head->shm_address = t.shm_address(*memory);
  if (!staged && !hashed) FRUGAL_TRY(pool_.get(bytes, memory));
  if (!hashed)
    FRUGAL_TRY(dense_slots(op.keys, op.count,
                           op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr,
                           table.info.capacity, memory->as<uint32_t>()));
  else if (staged)
    std::memcpy(memory->data(), op.keys, bytes);
  if (!staged) e->add(hashed ? static_cast<const void*>(op.keys) : memory->data(), bytes);
  return FRUGAL_OK;
}

// Long, to keep an order: all that can fail comes before the controller receives the declaration,
// and one guard takes it back.
Status Client::prefetch(AnyTrainer& any, uint64_t step, const frugal_op* ops, size_t n,
                        bool want_handle, uint64_t* batch_out) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(check_ops(*this, ops, n, Use::kDeclare));
  Vector<GpuOp> taken;
  Vector<frugal_op> host;
  if (t.gpu) {
    FRUGAL_TRY(t.gpu->ready());
    FRUGAL_TRY(t.gpu->take_ops(ops, n, Use::kDeclare, false, &taken));
    for (const GpuOp& o : taken) host.push_back(o.op);
    ops = host.data();
  } else {
    device::look_for_devices();
    FRUGAL_TRY(host_memory(ops, n));
  }
  auto batch = std::allocate_shared<RemoteBatch>(HeapAllocator<RemoteBatch>());
  Vector<OpHead> heads(n);
  Vector<Buffer> keys(n);
  const bool stages = t.handed.size() + n <= Channel::kReleases / 4;  // the others are for sums
  batch->session = this;
  batch->rank = t.rank;
  batch->trainer = &t;
  batch->id = t.last_batch + 1;
  batch->step = step;
  Exchange e{Call::kPrefetch, {step, n, batch->id}, {}};
  e.add(heads.data(), n * sizeof(OpHead));
  for (size_t i = 0; i < n; ++i) {
    RemoteTableRef table;
    FRUGAL_TRY(in_op(op_table(ops[i], &table), i, n, table));
    heads[i] = {table->id,
                0,
                ops[i].count,
                ops[i].padding_key,
                0,
                ops[i].flags,
                1,
                static_cast<uint32_t>(i),
                kNoShmAddress};
    FRUGAL_TRY(
        in_op(declared_keys(t, *table, ops[i], stages, &heads[i], &keys[i], &e), i, n, table));
    batch->tables.push_back(std::move(table));
  }
  struct Undo {  // runs if the batch is not declared after all
    RemoteTrainer* t;
    const Vector<OpHead>& heads;
    RemoteBatch& batch;
    ~Undo() {
      if (!t) return;
      const KeepError why;
      t->take_releases();  // of keys that the controller has had and released
      for (const OpHead& head : heads) t->handed.erase(head.shm_address);
      t->batches.erase(batch.id);
      if (batch.handle) handle_remove(HandleKind::kBatch, batch.handle);
    }
  } undo{&t, heads, *batch};
  // Makes the entries now, so that nothing fails once the controller has the keys.
  for (const OpHead& head : heads)
    if (head.shm_address != kNoShmAddress) t.handed[head.shm_address] = Buffer();
  if (want_handle) {
    batch->handle = handle_of<AnyBatch>(batch);
    if (!batch->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  }
  t.batches[batch->id] = batch;
  // Inside a step nothing can fail any more, except that the controller lacks memory or has too
  // many declarations.
  const bool staged = n > 0 && std::all_of(heads.begin(), heads.end(),
                                           [](auto& h) { return h.shm_address != kNoShmAddress; });
  const bool late = staged && t.in_step && step > t.step && step - t.step <= config_.lookahead;
  FRUGAL_TRY(late ? t.declare_late(e, heads, batch) : t.ask(e));
  undo.t = nullptr;
  for (size_t i = 0; i < n; ++i)
    if (heads[i].shm_address != kNoShmAddress) t.handed[heads[i].shm_address] = std::move(keys[i]);
  ++t.last_batch;
  if (want_handle) *batch_out = batch->handle;
  t.counts.prefetch_ns += now_ns() - began;
  return FRUGAL_OK;
}

Status Client::cancel(AnyTrainer& any, const AnyBatchRef& of) {
  RemoteTrainer& t = own(any);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  if (of->session != this)
    return fail(FRUGAL_ERR_BAD_HANDLE, "the batch belongs to another engine: cancel it there");
  const RemoteBatchRef batch = std::static_pointer_cast<RemoteBatch>(of);
  if (batch->trainer != &t)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the batch was declared by another trainer, not by rank %u: give one of its own",
                t.rank);
  FRUGAL_TRY(t.take_late_reply());
  Exchange e{Call::kCancel, {batch->id}, {}};
  if (batch->failed == FRUGAL_OK) FRUGAL_TRY(t.ask(e));
  handle_remove(HandleKind::kBatch, batch->handle);
  t.batches.erase(batch->id);
  return FRUGAL_OK;
}

// --- Steps ---------------------------------------------------------------------------------------

// Requests a step; its parts are there afterwards. `told`: what its refresh does to cached rows.
Status Client::ask_step(RemoteTrainer& t, Exchange& e, Vector<char>* told) {
  t.forget_used();
  t.parts.clear();
  t.reads.clear();
  t.next_part = 0;
  FRUGAL_TRY(t.ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
    t.call_mu.assert_held();
    if (e.args[1] > bytes / sizeof(PartAddress))
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent half a part");
    const uint64_t parts = e.args[1] * sizeof(PartAddress);
    FRUGAL_TRY(t.take_parts(c, parts, until, nullptr));
    told->resize(bytes - parts);
    return c.read(told->data(), told->size(), until);
  }));
  const Status s = see_kinds();
  if (s != FRUGAL_OK) t.parts.clear();
  return s;
}

Status Client::step_begin(AnyTrainer& any, uint64_t step, Deadline deadline) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  if (t.in_step)
    return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu: end or abort it first", t.rank,
                static_cast<unsigned long long>(t.step));
  if (t.gpu) {
    FRUGAL_TRY(t.gpu->ready());
    FRUGAL_TRY(pin_tables());
  } else {
    device::look_for_devices();
  }
  t.step = step;
  bool traced = false;
  for (uint64_t without = 0;;) {
    Exchange e{
        Call::kStepBegin, {step, left_until(deadline), t.caches.refresh, without}, {}, deadline.at};
    Vector<char> told;
    FRUGAL_TRY(ask_step(t, e, &told));
    traced = e.args[0] != 0;
    if (e.args[2] == 0) break;
    if (!t.gpu)
      return fail(FRUGAL_ERR_INTERNAL,
                  "the controller sent a cache refresh to a trainer without a cache");
    without = 0;
    Status s;
    try {
      s = refresh_cached_rows(t, told, e.args[3], &without);
    } catch (const std::bad_alloc&) {
      without = 0;
      s = fail(FRUGAL_ERR_OUT_OF_MEMORY,
               "no memory to bring the cache of rank %u up to date; call again", t.rank);
    }
    if (s == FRUGAL_OK) {
      t.caches.refresh = e.args[2];
      break;
    }
    // The controller sees from the number that the cached rows are lost.
    t.parts.clear();
    t.gpu->take_device_work();
    if (!without) return s;
  }
  t.in_step = true;
  t.begun.store(step);
  t.traced.on = traced;
  // Until it is committed a step may be undone, and is done again with the same declarations. No
  // rank is more than 62 steps ahead of the last commit.
  std::erase_if(t.batches, [&](auto& item) {
    if (item.second->step >= step || step - item.second->step <= kept_steps()) return false;
    handle_remove(HandleKind::kBatch, item.second->handle);
    return true;
  });
  t.counts.step_begin_ns += now_ns() - began;
  return FRUGAL_OK;
}

Status Client::step_end(AnyTrainer& any, uint64_t step, uint32_t flags) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(t.inside());
  if (t.step != step)
    return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu, not %llu: end that", t.rank,
                static_cast<unsigned long long>(t.step), static_cast<unsigned long long>(step));
  if (flags & ~FRUGAL_STEP_SKIP)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "unknown flags 0x%x in step_end: give 0 or FRUGAL_STEP_SKIP", flags);
  if (!t.end.begun) {
    DeviceWork::Found found = DeviceWork::Found::kNothing;
    if (t.gpu) FRUGAL_TRY(end_device_work(t, &found));
    if (found != DeviceWork::Found::kNothing) {
      FRUGAL_TRY(t.abort());
      return found_in_step(found, step);
    }
    FRUGAL_TRY(t.share_sums());
  }
  const uint64_t cpu = process_cpu_ns();
  t.counts.cpu_ns = cpu - t.cpu_ns;
  Exchange e{Call::kStepEnd, {step, flags, t.end.shm_addresses.size(), t.traced.events.size()}, {}};
  e.add(&t.counts, sizeof t.counts);
  e.add(t.end.shm_addresses.data(), t.end.shm_addresses.size() * sizeof(PushAddress));
  e.add(t.traced.events.data(), t.traced.events.size() * sizeof(TraceEvent));
  // Makes the entries now, so that nothing can fail once the controller has the sums. It releases
  // them when it has read them. An attempt that failed may have lent it some: their releases were
  // taken by now, and the sums are still here.
  for (const RankGradients& h : t.end.sums)
    if (h.sums) t.handed[t.shm_address(h.sums)] = Buffer();
  Status s = t.ask(e);
  t.cpu_ns = cpu;
  t.counts = {};
  t.traced.events.clear();
  if (!t.in_step) return s;  // undone, or closed: the pushes are gone already
  if (s != FRUGAL_OK) return s;
  for (RankGradients& h : t.end.sums) {
    if (!h.sums) continue;
    const uint64_t at = t.shm_address(h.sums);
    t.handed[at] = std::move(h.sums);
  }
  t.leave_step();
  t.sums.end_step();
  pool_.end_step();
  t.counts.step_end_ns += now_ns() - began;
  return FRUGAL_OK;
}

Status Client::abort_call(AnyTrainer& any) {
  RemoteTrainer& t = own(any);
  Lock call(t.call_mu);
  FRUGAL_TRY(begin_call(t));
  FRUGAL_TRY(t.inside());
  return t.abort();
}

// --- Evaluation ----------------------------------------------------------------------------------

// Evaluation from what a dead controller has left. A trainer must see what it has done, and that
// does not exist if it was not committed.
Status Client::read_out(const RemoteTrainer* t, const frugal_op* ops, size_t n) {
  if (t) {
    uint64_t committed;
    FRUGAL_TRY(controller_.controller_memory().committed(&committed));
    const uint64_t begun = t->begun.load();
    if (begun != kNoStep && (committed == kNoStep || begun > committed))
      return fail(FRUGAL_ERR_PEER_LOST,
                  "the controller is gone, and step %llu, which rank %u has begun, was not "
                  "committed: read without a "
                  "trainer, for the rows as of the last step that was",
                  static_cast<unsigned long long>(begun), t->rank);
  }
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = ops[i];
    RemoteTableRef table;
    FRUGAL_TRY(in_op(op_table(op, &table), i, n, table));
    FRUGAL_TRY(in_op(check_op(op, table->info.dim, op.count, Use::kRead), i, n, table));
    FRUGAL_TRY(in_op(check_keys(*table, op), i, n, table));
    TableReadout* from;
    FRUGAL_TRY(left_of(*table, &from));
    Vector<uint32_t> slots(op.count);
    from->find(op.keys, op.count, op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr,
               slots.data());
    size_t made = 0;
    for (uint32_t s : slots) made += s < kMissingSlot && from->untouched(s);
    Vector<char> scratch(made * from->layout().bytes());
    char* next = scratch.data();
    Vector<const device::Element*> rows(op.count);
    for (size_t k = 0; k < op.count; ++k) {
      const bool there = slots[k] < kMissingSlot;
      if (op.found_out) op.found_out[k] = there;
      if (!there) {
        rows[k] = slots[k] == kNoSlot ? nullptr : row_of_zeros();
        continue;
      }
      rows[k] = from->row(slots[k], next).values;
      if (from->untouched(slots[k])) next += from->layout().bytes();
    }
    FRUGAL_TRY(gather(table->rows, rows.data(), slots.data(), op.count, op));
  }
  return FRUGAL_OK;
}

Status Client::read(AnyTrainer* any, const frugal_op* ops, size_t n, Deadline deadline) {
  RemoteTrainer* const t = any ? &own(*any) : nullptr;
  FRUGAL_TRY(check_ops(*this, ops, n, Use::kRead));
  return controller_.outlive([&]() -> Status {
    if (Controller::Remaining remaining{controller_}) {
      device::look_for_devices();
      FRUGAL_TRY(host_memory(ops, n));
      return read_out(t, ops, n);
    }
    std::optional<UniqueLock> call;
    if (t) {
      call.emplace(t->call_mu);
      t->call_mu.assert_held();
      FRUGAL_TRY(begin_call(*t));
    }
    if (t && t->gpu) return read_with_gpu(*t, ops, n, deadline);
    device::look_for_devices();
    FRUGAL_TRY(host_memory(ops, n));
    return read_rows(t, ops, n, deadline);
  });
}

Status Client::read_rows(RemoteTrainer* t, const frugal_op* ops, size_t n, Deadline deadline) {
  Vector<ReadHead> heads(n);
  Vector<RemoteTableRef> tables(n);
  Exchange e{Call::kRead, {n, left_until(deadline)}, {}, deadline.at};
  e.add(heads.data(), n * sizeof(ReadHead));
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = ops[i];
    FRUGAL_TRY(in_op(op_table(op, &tables[i]), i, n, tables[i]));
    FRUGAL_TRY(in_op(check_op(op, tables[i]->info.dim, op.count, Use::kRead), i, n, tables[i]));
    FRUGAL_TRY(in_op(check_keys(*tables[i], op), i, n, tables[i]));
    const bool pooled = op.pooling != FRUGAL_POOL_NONE;
    heads[i].op = {tables[i]->id, 0, op.count, op.padding_key, 0, op.flags, 1, 0, kNoShmAddress};
    heads[i].bags = pooled ? op.bags : 0;
    heads[i].pooling = op.pooling;
    heads[i].has = (pooled && op.weights ? kHasWeights : 0) | (op.found_out ? kHasFound : 0);
    e.add(op.keys, op.count * sizeof(uint64_t));
    if (pooled) e.add(op.offsets, (op.bags + 1) * sizeof(uint64_t));
    if (pooled && op.weights) e.add(op.weights, op.count * sizeof(float));
  }
  auto take = [&](Channel& c, uint64_t, uint64_t until) -> Status {
    for (size_t i = 0; i < n; ++i) {
      const frugal_op& op = ops[i];
      const size_t rows = op.pooling != FRUGAL_POOL_NONE ? op.bags : op.count;
      const size_t bytes = tables[i]->info.dim * sizeof(float),
                   stride = stride_of(op.row_stride, tables[i]->info.dim);
      if (stride == bytes) {
        FRUGAL_TRY(c.read(op.rows_out, rows * bytes, until));
      } else {
        for (size_t r = 0; r < rows; ++r)
          FRUGAL_TRY(c.read(reinterpret_cast<char*>(op.rows_out) + r * stride, bytes, until));
      }
      if (op.found_out) FRUGAL_TRY(c.read(op.found_out, op.count, until));
    }
    return FRUGAL_OK;
  };
  if (!t) return ask(e, take);
  t->call_mu.assert_held();
  return t->ask(e, take);
}

}  // namespace frugal
