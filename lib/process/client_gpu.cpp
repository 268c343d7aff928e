// Trainers on GPUs in an attached process (docs/processes.md, "Attached trainers on GPUs"). The
// device belongs to this process. The controller sees a rank that reads rows and submits sums, as
// on the cpu, and sends it the refreshes of its caches.
#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "process/client.h"

namespace frugal {

Status Client::open_gpu(const frugal_trainer_config& config, std::shared_ptr<Gpu>* out) {
  std::shared_ptr<device::Runtime> runtime;
  FRUGAL_TRY(device_status(device::open_runtime(config.device, &runtime), config.device));
  if (!runtime->info().pins_read_only)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "%s cannot pin memory that its process must not write, as rows are where a trainer "
                "attaches: run rank %u "
                "as a thread of the controller's process",
                config.device, config.rank);
  FRUGAL_TRY(Gpu::open(runtime, pinned_, out));
  pins_->add(std::move(runtime));
  return FRUGAL_OK;
}

// Before a step begins: pins tables whose rows all exist. Slabs of other tables are pinned when
// rows in them are used.
Status Client::pin_tables() {
  for (const RemoteTableRef& table : tables())
    if (!table->lazy) FRUGAL_TRY(table->pinned.pin_all());
  return FRUGAL_OK;
}

// Before kernels read an access's rows. They stay mapped until the device work has completed.
Status Client::show_device(const Access& a, DeviceWork& f) {
  const RemoteTableRef table = std::static_pointer_cast<RemoteTable>(a.table);
  FRUGAL_TRY(table->pinned.pin(a.part->row_slots(), a.part->distinct));
  if (std::find(f.kept.begin(), f.kept.end(), table) == f.kept.end()) f.kept.push_back(table);
  return FRUGAL_OK;
}

// --- Caches --------------------------------------------------------------------------------------

// Pins shared memory that kernels of the device work read from now on: staging memory, or the
// arena.
Status Client::pin_shared(const SumsAddress& s, DeviceWork& device_work, const char** out) {
  RegionRefs reads;
  FRUGAL_TRY(controller_.regions().find(s.shm_address, s.bytes, &reads, out));
  if (s.shm_address % 64)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent an address that is not a multiple of 64");
  FRUGAL_TRY(reads[0]->pin(s.shm_address, s.bytes));
  device_work.kept.push_back(reads[0]);  // it stays mapped until the device work has completed
  return FRUGAL_OK;
}

// Reads what the controller has sent of a step's refresh, item after item.
class Client::Told {
 public:
  Told(Controller& controller, const Vector<char>& bytes)
      : controller_(controller), bytes_(bytes) {}
  template <class T>
  Status take(T* item) {
    if (sizeof *item > bytes_.size() - at_)
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent half a refresh of a cache");
    std::memcpy(item, bytes_.data() + at_, sizeof *item);
    at_ += sizeof *item;
    return FRUGAL_OK;
  }
  // Copies what is at `shm_address` of the arena.
  template <class T>
  Status list(uint64_t shm_address, uint64_t n, Vector<T>* out) {
    const T* from = nullptr;
    if (n) FRUGAL_TRY(controller_.in_arena(shm_address, &reads_, &from, n));
    out->assign(from, from + n);
    return FRUGAL_OK;
  }

 private:
  Controller& controller_;
  const Vector<char>& bytes_;
  size_t at_ = 0;
  RegionRefs reads_;
};

Status Client::cached_rows_of(RemoteTrainer& t, const CachedRowsAddress& of,
                              RemoteTrainer::Caches::OfTable** out, uint64_t* without) {
  auto known = t.caches.tables.find(of.table);
  if (known != t.caches.tables.end() && known->second.kinds != known->second.table->kinds) {
    t.caches.tables.erase(known);  // of rows with other state
    known = t.caches.tables.end();
  }
  if (known == t.caches.tables.end()) {
    RemoteTrainer::Caches::OfTable made;
    {
      Lock lock(mu_);
      for (auto& weak : tables_)
        if (auto table = weak.lock(); table && table->id == of.table) made.table = std::move(table);
    }
    if (!made.table)
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent cached rows of an unknown table");
    if (DeviceCachedRows::open(*t.gpu, made.table->with_state(), of.cache_slots,
                               &made.cached_rows) != FRUGAL_OK) {
      *without = of.table;
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory of %s for cached rows",
                  t.gpu->runtime().name());
    }
    made.kinds = made.table->kinds;
    known = t.caches.tables.emplace(of.table, std::move(made)).first;
  }
  *out = &known->second;
  return FRUGAL_OK;
}

Status Client::take_due(Told& told, DeviceWork& device_work, DueUpdate* due) {
  UpdateAddress shm_address;
  FRUGAL_TRY(told.take(&shm_address));
  FRUGAL_TRY(told.list(shm_address.cache_slots, shm_address.count, &due->other.cache_slots));
  FRUGAL_TRY(told.list(shm_address.start, shm_address.count + 1, &due->other.start));
  FRUGAL_TRY(told.list(shm_address.terms, shm_address.term_count, &due->other.terms));
  due->now = shm_address.now;
  due->update = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
  due->update->scalars = shm_address.scalars;
  for (uint64_t r = 0; r < shm_address.ranks; ++r) {
    SumsAddress from;
    FRUGAL_TRY(told.take(&from));
    RankGradients h;
    h.stride = shm_address.stride;
    const char* sums = nullptr;
    if (from.bytes) FRUGAL_TRY(pin_shared(from, device_work, &sums));
    h.sums = Buffer::view(sums, from.bytes);
    due->update->ranks.push_back(std::move(h));
  }
  if (shm_address.now > shm_address.count || shm_address.ranks == 0)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent a refresh of a cache that cannot be");
  return FRUGAL_OK;
}

// Carries out a step's refresh: updates of cached rows that the step reads, then admitted rows,
// then the event for which lookups wait, then the other updates. `without`: a table for whose
// cached rows there is no memory. A failure leaves the cached rows in any state.
Status Client::refresh_cached_rows(RemoteTrainer& t, const Vector<char>& bytes, uint64_t tables,
                                   uint64_t* without) {
  Told told(controller_, bytes);
  Gpu& gpu = *t.gpu;
  DeviceWork& device_work = gpu.device_work(t.rank, t.step);
  Vector<CachedRows*> refreshed;
  for (uint64_t i = 0; i < tables; ++i) {
    CachedRowsAddress of;
    FRUGAL_TRY(told.take(&of));
    RemoteTrainer::Caches::OfTable* known;
    FRUGAL_TRY(cached_rows_of(t, of, &known, without));
    RemoteTable& table = *known->table;
    CachedRows& cached_rows = *known->cached_rows;
    CachePlan plan;
    Vector<DueUpdate> due;
    FRUGAL_TRY(told.list(of.admitted, of.count, &plan.admitted));
    FRUGAL_TRY(told.list(of.to, of.count, &plan.to));
    Vector<uint32_t> ascending = plan.admitted;
    std::sort(ascending.begin(), ascending.end());
    FRUGAL_TRY(table.pinned.pin(ascending.data(), ascending.size()));
    if (table.pinned_state) FRUGAL_TRY(table.pinned_state->pin(ascending.data(), ascending.size()));
    for (uint64_t u = 0; u < of.updates; ++u)
      FRUGAL_TRY(take_due(told, device_work, &due.emplace_back()));
    device_work.kept.push_back(known->table);
    cached_rows.forget_plan();
    FRUGAL_TRY(cached_rows.refresh(plan, due));
    refreshed.push_back(&cached_rows);
  }
  // Tables that the controller does not name have been dropped.
  std::erase_if(t.caches.tables, [&](auto& item) {
    return std::find(refreshed.begin(), refreshed.end(), item.second.cached_rows.get()) ==
           refreshed.end();
  });
  FRUGAL_TRY(gpu.end_refresh(device_work));
  for (CachedRows* cached_rows : refreshed) {
    FRUGAL_TRY(cached_rows->finish());
    cached_rows->forget_plan();
  }
  return device_work.mark();
}

// --- A step's calls ------------------------------------------------------------------------------

// Calls wait(go_on), which waits until the device has done something, at most until the call's
// time-out or the trainer's closing. From time to time a request shows the controller that this
// process lives. Its reply reports whether the step was undone.
template <class Wait>
Status Client::await_device(RemoteTrainer& t, const char* what, Wait wait) {
  const Deadline until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  t.device.said = now_ns();
  return wait([&]() -> Status {
    FRUGAL_TRY(controller_.check());
    if (t.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
    if (until.passed()) return fail(FRUGAL_ERR_TIMEOUT, "%s; call again", what);
    if (now_ns() - t.device.said < heartbeat_ns()) return FRUGAL_OK;
    t.device.said = now_ns();
    Exchange e{Call::kInside, {}, {}};
    t.call_mu.assert_held();
    return t.ask(e);
  });
}

// How long the controller needs no sign of life of a process.
uint64_t Client::heartbeat_ns() const { return ns_of_ms(config_.timeout_ms) / 4; }

// For waits that last until the device has done its work, since the memory is the device's until
// then.
void Client::say_here(RemoteTrainer& t) noexcept {
  const uint64_t now = now_ns();
  if (now - t.device.said < heartbeat_ns()) return;
  t.device.said = now;
  const KeepError why;
  try {
    (void)t.say_here();
  } catch (const std::bad_alloc&) {  // the next time
  }
}

// Waits until the caller's stream has read the rows that a call has given it to read.
Status Client::await_stream(RemoteTrainer& t) {
  return await_device(t, "a call waited for the device to read rows",
                      [&](auto go_on) { return t.gpu->wait_stream(go_on); });
}

// Waits for what a step has given to the device, before the step's end is sent: the controller
// reads the sums at once, and other threads may write the rows that were read. May be repeated.
Status Client::end_device_work(RemoteTrainer& t, DeviceWork::Found* found) {
  const DeviceWorkRef f = t.gpu->share_device_work();  // it stays if the step is undone meanwhile
  if (!f) return FRUGAL_OK;
  FRUGAL_TRY(f->end());
  FRUGAL_TRY(await_device(t, "step_end waited for the device to end the step's work",
                          [&](auto go_on) { return f->poll(go_on); }));
  FRUGAL_TRY(t.gpu->sticky() ? t.gpu->ready() : FRUGAL_OK);
  *found = f->found();
  return FRUGAL_OK;
}

// Evaluation: operands on the device are copied to the host before, and rows are copied back after.
// Complete when it returns.
Status Client::read_with_gpu(RemoteTrainer& t, const frugal_op* ops, size_t n, Deadline deadline) {
  FRUGAL_TRY(t.gpu->ready());
  Vector<GpuOp> taken;
  FRUGAL_TRY(t.gpu->take_ops(ops, n, Use::kRead, false, &taken));
  Vector<frugal_op> host(n);
  Vector<Buffer> rows(n), weights(n);
  Vector<size_t> counts(n), strides(n), dims(n);
  for (size_t i = 0; i < n; ++i) {
    frugal_op& op = host[i] = taken[i].op;
    if (!taken[i].rows_on_device) continue;
    RemoteTableRef table;
    FRUGAL_TRY(in_op(op_table(op, &table), i, n, table));
    FRUGAL_TRY(in_op(check_op(op, table->info.dim, op.count, Use::kRead), i, n, table));
    if (taken[i].device_weights) {
      FRUGAL_TRY(t.gpu->bring(op.weights, op.count * sizeof(float), &weights[i]));
      op.weights = weights[i].as<float>();
    }
    counts[i] = op.pooling != FRUGAL_POOL_NONE ? op.bags : op.count;
    strides[i] = table->layout.sums_stride;
    dims[i] = table->info.dim;
    FRUGAL_TRY(pinned_.get(counts[i] * strides[i] * sizeof(float), &rows[i]));
    op.rows_out = rows[i].as<float>();
    op.row_stride = strides[i] * sizeof(float);
  }
  if (Controller::Remaining remaining{controller_})
    FRUGAL_TRY(read_out(&t, host.data(), n));
  else
    FRUGAL_TRY(read_rows(&t, host.data(), n, deadline));
  DeviceWork device_work;
  device_work.gpu = t.gpu;
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = taken[i].op;
    if (taken[i].rows_on_device)
      FRUGAL_TRY(t.gpu->put_rows(device_work, std::move(rows[i]), strides[i], counts[i],
                                 static_cast<uint32_t>(dims[i]), op.rows_out, op.row_stride));
  }
  return t.gpu->wait_stream();
}

// The device does not work any more: the step is undone on all ranks. The controller is notified
// once. With call_mu held.
Status Client::device_failed(RemoteTrainer& t) {
  if (!t.device.failed) {
    pins_->failed(&t.gpu->runtime());
    Exchange e{Call::kAbort, {1}, {}};
    t.device.failed = t.ask(e) != FRUGAL_ERR_OUT_OF_MEMORY;  // else the next call reports it
    if (t.device.failed && !controller_.is_lost()) t.begun.store(kNoStep);
    t.leave_step();
  }
  return t.gpu->ready();
}

Status Client::told(AnyTrainer& any, Status status) {
  if (status != FRUGAL_ERR_DEVICE || !any.gpu) return status;
  RemoteTrainer& t = own(any);
  Lock call(t.call_mu);
  t.gpu->look();
  return t.gpu->sticky() ? device_failed(t) : status;
}

}  // namespace frugal
