// Trainers on GPUs in a process that attaches (docs/cuda.md, section 9): the device is this process's own, and the
// controller sees a rank that reads rows and hands over sums, as on the cpu.
#include <algorithm>

#include "base/handles.h"
#include "process/exchange.h"

namespace frugal {

Status Client::open_gpu(const frugal_trainer_config& config, std::shared_ptr<Gpu>* out) {
  if (config.cache_bytes || config.cache_ratio > 0)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "rank %u: a trainer on a GPU that attaches to a controller has no cache as yet: give cache_bytes and "
                "cache_ratio 0, or run it as a thread of the controller's process",
                config.rank);
  std::shared_ptr<device::Runtime> runtime;
  FRUGAL_TRY(device_status(device::open_runtime(config.device, &runtime), config.device));
  if (!runtime->info().pins_read_only)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "%s cannot pin memory that its process must not write, as rows are where a trainer attaches: run rank %u "
                "as a thread of the controller's process",
                config.device, config.rank);
  FRUGAL_TRY(Gpu::open(runtime, pinned_, out));
  std::lock_guard<std::mutex> lock(gpus_mu_);
  pinner_->add(std::move(runtime));
  return FRUGAL_OK;
}

// The last lets go of what was pinned for all.
void Client::leave_gpu(const Gpu& gpu) noexcept {
  std::lock_guard<std::mutex> lock(gpus_mu_);
  pinner_->remove(&gpu.runtime());
  if (pinner_->any()) return;
  std::lock_guard<std::mutex> tables(mu_);
  for (auto& weak : tables_)
    if (auto table = weak.lock()) table->pinned.unpin(*pinner_);
}

// Keys on the device beside a batch.
Status Client::match_batch(RemoteTrainer& t, frugal_op* op) {
  if (op->struct_size != sizeof(frugal_op) || !op->batch || !op->keys || !op->count) return FRUGAL_OK;
  bool on_device = false;
  FRUGAL_TRY(t.gpu->on_device(op->keys, sizeof(uint64_t), "frugal_op.keys", &on_device));
  auto batch = std::static_pointer_cast<RemoteBatch>(
      handle_get(HandleKind::kRemoteBatch, reinterpret_cast<uint64_t>(op->batch)));
  if (!on_device || !batch || batch->trainer != &t || batch->step != t.step || op->part >= batch->tables.size())
    return FRUGAL_OK;  // what is wrong is told where ops are checked
  for (const StepPart& p : t.parts)
    if (p.batch == batch->id && p.index == op->part)
      return t.gpu->match_keys(t.gpu->flight(t.rank, t.step), p.part,
                               batch->tables[op->part]->info.key_space == FRUGAL_HASHED, op);
  return FRUGAL_OK;
}

// Before a step begins: tables whose rows are all there. Slabs of others are pinned when rows in them are used.
Status Client::pin_tables() {
  Vector<RemoteTableRef> tables;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (auto& weak : tables_)
      if (auto table = weak.lock(); table && !table->lazy && !table->dropped.load()) tables.push_back(std::move(table));
  }
  for (const RemoteTableRef& table : tables) FRUGAL_TRY(table->pinned.pin_all(*pinner_));
  return FRUGAL_OK;
}

// The step's flight, for kernels that read an access's rows: they stay mapped until it has landed.
Status Client::flight_over(RemoteTrainer& t, const Access& a, Flight** out) {
  const Part& part = *t.parts[a.part].part;
  FRUGAL_TRY(a.table->pinned.pin(*pinner_, part.row_slots(), part.distinct));
  Flight& f = t.gpu->flight(t.rank, t.step);
  if (std::find(f.kept.begin(), f.kept.end(), a.table) == f.kept.end()) f.kept.push_back(a.table);
  *out = &f;
  return FRUGAL_OK;
}

Status Client::gather_on_device(RemoteTrainer& t, const Access& a, const GpuOp& op) {
  const StepPart& p = t.parts[a.part];
  if (config_.staleness)  // rows are written meanwhile: they are read here
    return t.gpu->send_rows(t.gpu->flight(t.rank, t.step), op, p.part->n, a.table->info.dim, a.table->layout.value_stride,
                            [&](const frugal_op& host) { return gather_here(*a.table, p, host); });
  Flight* flight;
  FRUGAL_TRY(flight_over(t, a, &flight));
  return t.gpu->gather(*flight, p.part, a.table->rows, nullptr, op);
}

Status Client::push_on_device(RemoteTrainer& t, const Access& a, const GpuOp& op, RemotePushSums* sums) {
  const PartRef& part = t.parts[a.part].part;
  Flight* flight = &t.gpu->flight(t.rank, t.step);
  device::GradPtr source;
  FRUGAL_TRY(t.gpu->gradients(*flight, part, op, a.table->info.dim, &source));
  if (op.device_weight_grads && config_.staleness) {
    const size_t stride = a.table->layout.value_stride;
    Buffer rows;
    FRUGAL_TRY(pinned_.get(part->n * stride * sizeof(float), &rows));
    frugal_op plain = FRUGAL_OP_INIT;
    plain.rows_out = rows.as<float>();
    plain.row_stride = stride * sizeof(float);
    FRUGAL_TRY(gather_here(*a.table, t.parts[a.part], plain));
    FRUGAL_TRY(t.gpu->weight_grads_of(*flight, std::move(rows), stride, part->slots.as<uint32_t>(), part->n,
                                      a.table->info.dim, op, source));
  } else if (op.device_weight_grads) {
    FRUGAL_TRY(flight_over(t, a, &flight));
    FRUGAL_TRY(t.gpu->weight_grads(*flight, part, a.table->rows, nullptr, op, source));
    FRUGAL_TRY(t.gpu->wait_stream());  // as a lookup
  }
  const bool first = !sums->table;
  if (first) begin_handover(t, a, sums);
  FRUGAL_TRY(t.gpu->push(*flight, part, source, a.table->info.dim, first, a.table->nan_policy == FRUGAL_NAN_REJECT, t.sums,
                         sums));
  sums->table = a.table;
  return FRUGAL_OK;
}

// What a step has given to the device has landed when its end is sent: the controller reads the sums at once, and
// others may write the rows that were read. May be repeated.
Status Client::end_flight(RemoteTrainer& t, Flight::Found* found) {
  Flight* f = t.gpu->current_flight();
  if (!f) return FRUGAL_OK;
  FRUGAL_TRY(f->end());
  const Deadline until = deadline(FRUGAL_TIMEOUT_DEFAULT);
  FRUGAL_TRY(f->land([&]() -> Status {
    if (until.passed())
      return fail(FRUGAL_ERR_TIMEOUT, "step_end waited for the device to end the step's work; call again");
    FRUGAL_TRY(check());
    return t.closing.load() ? fail(FRUGAL_ERR_CLOSED, "the trainer is being closed") : FRUGAL_OK;
  }));
  FRUGAL_TRY(t.gpu->sticky() ? t.gpu->ready() : FRUGAL_OK);
  *found = f->found();
  return FRUGAL_OK;
}

// Evaluation: what is on the device comes to the host before, and rows go there behind. Complete when it returns.
Status Client::read_with_gpu(RemoteTrainer& t, const frugal_op* ops, size_t n, Deadline deadline) {
  FRUGAL_TRY(t.gpu->ready());
  Vector<GpuOp> taken;
  FRUGAL_TRY(t.gpu->take_ops(ops, n, Gpu::Use::kRead, false, &taken));
  Vector<frugal_op> host(n);
  Vector<Buffer> rows(n), weights(n);
  Vector<size_t> counts(n), strides(n), dims(n);
  for (size_t i = 0; i < n; ++i) {
    frugal_op& op = host[i] = taken[i].op;
    if (!taken[i].rows_on_device) continue;
    RemoteTableRef table;
    FRUGAL_TRY(op_table(op, &table));
    FRUGAL_TRY(check_op(op, table->name.c_str(), table->info.dim, op.count, Use::kRead));
    if (taken[i].device_weights) {
      FRUGAL_TRY(t.gpu->bring(op.weights, op.count * sizeof(float), &weights[i]));
      op.weights = weights[i].as<float>();
    }
    counts[i] = op.pooling != FRUGAL_POOL_NONE ? op.bags : op.count;
    strides[i] = table->layout.value_stride;
    dims[i] = table->info.dim;
    FRUGAL_TRY(pinned_.get(counts[i] * strides[i] * sizeof(float), &rows[i]));
    op.rows_out = rows[i].as<float>();
    op.row_stride = strides[i] * sizeof(float);
  }
  FRUGAL_TRY(read_rows(&t, host.data(), n, deadline));
  Flight flight;
  flight.gpu = t.gpu;
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = taken[i].op;
    if (taken[i].rows_on_device)
      FRUGAL_TRY(t.gpu->put_rows(flight, std::move(rows[i]), strides[i], counts[i], static_cast<uint32_t>(dims[i]),
                                 op.rows_out, op.row_stride));
  }
  return t.gpu->wait_stream();
}

// The device does not work any more: the step is undone on all ranks, of which the controller is told once. With
// call_mu held.
Status Client::device_failed(RemoteTrainer& t) {
  if (!t.failed) {
    t.failed = true;
    Exchange e{Call::kAbort, {1}, {}};
    (void)ask(t, e);
    leave_step(t);
  }
  return t.gpu->ready();
}

Status Client::told(RemoteTrainer& t, Status status) {
  if (status != FRUGAL_ERR_DEVICE || !t.gpu) return status;
  std::lock_guard<std::mutex> call(t.call_mu);
  t.gpu->look();
  return t.gpu->sticky() ? device_failed(t) : status;
}

}  // namespace frugal
