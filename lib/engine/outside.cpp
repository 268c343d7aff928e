// Rows outside steps: get, put, delete, enumerate, count, flush, and evaluation reads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "arith/nan.h"
#include "base/assert.h"
#include "device/pointers.h"
#include "engine/wait.h"

namespace frugal {

namespace {

Status busy(const String& why) {
  return fail(FRUGAL_ERR_BUSY, "not between steps: %s; call when all ranks have ended the same",
              why.c_str());
}

}  // namespace

// Keeps steps from beginning. Allowed when no rank is inside a step and all have ended the same
// one.
OutsideScope::OutsideScope(Engine& engine, Deadline deadline)
    : order_(engine.outside_mu_, std::try_to_lock) {
  // One operation after the other. The wait is in slices, for the engine may be closed meanwhile.
  while (!order_.owns_lock()) {
    if (engine.closed()) {
      status_ = engine_closed();
      return;
    }
    if (deadline.passed()) {
      // The other operation may itself be about to fail because ranks are inside a step.
      String why;
      ControlLock lock(engine.mu_);
      status_ =
          engine.ranks_.inside(&why)
              ? busy(why)
              : fail(FRUGAL_ERR_TIMEOUT, "waited for another operation outside steps; call again");
      return;
    }
    if (engine.outside_mu_.try_lock_until(std::min(deadline.at, now_ns() + 1000000000u)))
      order_ = std::unique_lock<TimedMutex>(engine.outside_mu_, std::adopt_lock);
  }
  ControlLock lock(engine.mu_);
  Phase& phase = engine.phase_;
  String why;
  if (phase.await(lock, Phase::kOutside) &&
      (engine.records_.has_device_work() || engine.committer_.stalled()) &&
      !engine.ranks_.inside(&why)) {
    // The step that all ranks have ended is about to be committed.
    lock.unlock();
    status_ = engine.await_device_work(deadline);
    if (status_ != FRUGAL_OK) return;
    lock.lock();
    phase.await(lock, Phase::kOutside);
  }
  if (engine.closed()) {
    status_ = engine_closed();
  } else if (!engine.records_.between(&why)) {
    status_ = busy(why);
  } else {
    outside_.emplace(phase, Phase::kOutside);
    phase.await(lock, Phase::kAlone);  // what kOutside excludes ends, and begins no more
  }
}

CommittedScope::CommittedScope(Engine& engine) : engine_(engine) {
  ControlLock lock(engine.mu_);
  if (engine.phase_.await(lock, Phase::kGet))
    reads_.emplace(engine.phase_, Phase::kGet);
  else
    status_ = engine_closed();
}

CommittedScope::~CommittedScope() {
  if (!reads_) return;
  reads_.reset();
  // A rank that has completed a step meanwhile could not commit it. If memory is short, that commit
  // is stalled now.
  [[maybe_unused]] const Status s = engine_.committer_.ready();
}

Status Engine::flush(Deadline deadline) {
  FRUGAL_TRY(check());
  FRUGAL_TRY(await_device_work(deadline));
  auto written = [&] {
    if (workers_.applying()) return false;
    ControlLock lock(mu_);
    return phase_.may(Phase::kWhole) && !tables_.any_pending();
  };
  Status s = wait(deadline, nullptr, written,
                  [&] { return workers_.help(true) || flusher_.write(UINT64_MAX); });
  if (s != FRUGAL_ERR_TIMEOUT) return s;
  return fail(s, "flush waited for updates to be written, of %llu rows now; call again",
              static_cast<unsigned long long>(tables_.pending_rows()));
}

Status Engine::count(AnyTable& table, uint64_t* out) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  *out = own(table).rows.count();
  return FRUGAL_OK;
}

Status Engine::keys(AnyTable& table, uint64_t* cursor, uint64_t* out, size_t capacity, size_t* n) {
  FRUGAL_TRY(check());
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  *n = own(table).rows.enumerate(cursor, out, capacity);
  return FRUGAL_OK;
}

namespace {

constexpr size_t kBytesAtOnce = size_t{4} << 20;  // of rows

// Calls of(first, end) for pieces of `n` rows that are about to be written. A checkpoint that is
// being written copies them before, so a piece waits until there is room for copies.
template <class Of>
void each_piece(Checkpoints& checkpoints, Table& t, size_t n, Of of) {
  const size_t rows = std::max(RowTracker::kMostRows, kBytesAtOnce / t.rows.layout().bytes());
  for (size_t first = 0; first < n; first += rows) {
    if (t.tracked) checkpoints.await_room();
    of(first, std::min(n, first + rows));
  }
}

// Releases the slots that resolve() has found, where rows may be stored.
struct Unhold {
  Rows& rows;
  const uint32_t* slots;
  size_t n;
  ~Unhold() { rows.unhold_backed(slots, n); }
};

// Checks the stride of exported rows; 0 becomes their size. Their size with state is known only
// inside a scope.
Status fit_stride(const Table& t, bool state, size_t n, size_t* stride) {
  const RowLayout& l = t.rows.layout();
  const size_t bytes = l.exported_bytes(state);
  FRUGAL_TRY(check_stride(*stride, bytes, n));
  if (*stride == 0) *stride = bytes;
  return FRUGAL_OK;
}

}  // namespace

Status Engine::get(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, float* out,
                   size_t stride, uint8_t* found) {
  Table& t = own(table);
  FRUGAL_TRY(check());
  bool state = flags & FRUGAL_WITH_STATE;
  size_t least = stride;
  FRUGAL_TRY(fit_stride(t, false, n, &least));
  FRUGAL_TRY(t.rows.check_ids(keys, n, nullptr));
  std::optional<OutsideScope> between;
  std::optional<CommittedScope> committed;
  if (flags & FRUGAL_COMMITTED)
    FRUGAL_TRY(committed.emplace(*this).status());
  else
    FRUGAL_TRY(between.emplace(*this, deadline(FRUGAL_TIMEOUT_DEFAULT)).status());
  FRUGAL_TRY(fit_stride(t, state, n, &stride));
  Buffer slots;
  FRUGAL_TRY(memory_.unread().get(n * sizeof(uint32_t), &slots));
  uint32_t* s = slots.as<uint32_t>();
  FRUGAL_TRY(t.rows.resolve(keys, n, nullptr, Rows::Missing::kLeave, s, nullptr));
  const Unhold unhold_backed{t.rows, s, n};
  FRUGAL_TRY(wait_written(nullptr, t, s, n, UINT64_MAX, deadline(FRUGAL_TIMEOUT_DEFAULT)));
  StoredCopies stored;
  FRUGAL_TRY(read_stored(t, keys, n, s, &stored));
  const RowLayout& l = t.rows.layout();
  const device::RowsView rows = t.rows.ref();
  for (size_t i = 0; i < n; ++i) {
    const bool here = s[i] < kMissingSlot, there = here || stored.has(i);
    if (found) found[i] = there;
    if (!there) continue;
    const device::RowsView& of = here ? rows : stored.ref;
    const uint32_t at = here ? s[i] : stored.at[i];
    l.export_row(of.row(at), state ? of.state_row(at) : nullptr, device::behind(out, i * stride));
  }
  return FRUGAL_OK;
}

// Long for its order: all that can fail comes before the first row is written.
Status Engine::put(AnyTable& table, const uint64_t* keys, size_t n, uint32_t flags, const float* in,
                   size_t stride) {
  Table& t = own(table);
  FRUGAL_TRY(check());
  bool state = flags & FRUGAL_WITH_STATE;
  size_t least = stride;
  FRUGAL_TRY(fit_stride(t, false, n, &least));
  FRUGAL_TRY(t.rows.check_ids(keys, n, nullptr));
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(fit_stride(t, state, n, &stride));
  const RowLayout& l = t.rows.layout();
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  Buffer slots, row, given;
  FRUGAL_TRY(memory_.unread().get(n * sizeof(uint32_t), &slots));
  FRUGAL_TRY(memory_.unread().get(l.exported_bytes(true), &given));
  FRUGAL_TRY(memory_.unread().get(l.bytes(), &row));
  uint32_t* s = slots.as<uint32_t>();
  Vector<uint32_t> created;
  // Holds the slots of the rows until all rows exist.
  struct Hold {
    Engine& engine;
    Table& table;
    const uint32_t* slots;
    size_t n = 0;
    ~Hold() {
      table.rows.release_hold(slots, n);
      engine.end_holding(table);
    }
  };
  const device::RowsRef made = l.at(row.data(), row.data() + l.value_pitch);
  auto give = [&](size_t i, const device::RowsRef& to) {
    float* r = given.as<float>();
    std::memcpy(r, reinterpret_cast<const char*>(in) + i * stride, l.exported_bytes(state));
    device::kernels().canonicalize(r, l.dim + (state ? l.state_floats : 0));
    device::store_elements(r, to.values, l.dim);
    if (state)
      l.import_state(r + l.dim, to.state);
    else
      l.new_state(t.rows.init(), to.state);
  };
  if (t.rows.tier()) {
    if (state && l.state_floats) t.has_state.store(true);
    uint64_t made_rows = 0;
    const Status s_stored = put_stored(t, keys, n, give, &made_rows);
    meters_.counters.rows_created.fetch_add(made_rows, std::memory_order_relaxed);
    return s_stored;
  }
  auto make = [&](RowWrite& write, size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) {
      // Copies the whole row, for the bytes between its columns.
      std::memcpy(made.values, t.rows.values(s[i]), made.value_pitch);
      if (made.state_pitch) std::memcpy(made.state, t.rows.state(s[i]), made.state_pitch);
      give(i, made);
      write.store(i - first, made.values, made.state);
    }
  };
  frugal_op op = FRUGAL_OP_INIT;
  op.table = reinterpret_cast<frugal_table*>(t.handle);
  FRUGAL_TRY(with_room(&op, 1, [&] {
    ++t.calls;
    Hold hold{*this, t, s};
    FRUGAL_TRY(t.rows.resolve(keys, n, nullptr, Rows::Missing::kReserve, s, nullptr));
    hold.n = n;
    // Before a row is written, since this may need memory. A cache can always do without its copy.
    drop_cached(t, s, n);
    created.reserve(t.rows.any_key() ? n : 0);
    if (state && l.state_floats) t.has_state.store(true);
    each_piece(checkpoints_, t, n, [&](size_t first, size_t end) {
      t.rows.write_outside(s + first, end - first, [&](RowWrite& write, size_t from, size_t to) {
        make(write, first + from, first + to);
      });
    });
    // New rows exist from here on, with the given values.
    t.rows.create_reserved(s, n, &created);
    return Status{FRUGAL_OK};
  }));
  meters_.counters.rows_created.fetch_add(created.size(), std::memory_order_relaxed);
  return FRUGAL_OK;
}

Status Engine::remove(AnyTable& table, const uint64_t* keys, size_t n, uint64_t* deleted) {
  Table& t = own(table);
  FRUGAL_TRY(check());
  FRUGAL_TRY(t.rows.check_ids(keys, n, nullptr));
  OutsideScope scope(*this, deadline(FRUGAL_TIMEOUT_DEFAULT));
  FRUGAL_TRY(scope.status());
  FRUGAL_TRY(flush(deadline(FRUGAL_TIMEOUT_DEFAULT)));
  if (t.rows.tier()) {
    uint64_t were_stored = 0;
    FRUGAL_TRY(remove_stored(t, Vector<uint64_t>(keys, keys + n), &were_stored));
    if (deleted) *deleted = were_stored;
    return FRUGAL_OK;
  }
  Vector<uint32_t> slots(n);
  FRUGAL_TRY(t.rows.resolve(keys, n, nullptr, Rows::Missing::kLeave, slots.data(), nullptr));
  std::erase_if(slots, [](uint32_t s) { return s >= kMissingSlot; });
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  FRUGAL_TRY(t.rows.expect_deletions(slots.size()));
  drop_cached(t, slots.data(), slots.size());
  uint64_t were = 0;
  each_piece(checkpoints_, t, slots.size(), [&](size_t first, size_t end) {
    were += t.rows.uncreate(slots.data() + first, end - first, true);
  });
  declarations_.recount_unknown(t);
  if (deleted) *deleted = were;
  return FRUGAL_OK;
}

// Inside a step the call sees what the step's lookups see. Between steps it sees what the lookups
// of the next step would see. The step before that must be committed, and no step is committed
// while this rank has not begun the next.
Status Engine::await_readable(Trainer& t, Deadline deadline, uint64_t* step,
                              std::optional<Phase::During>* reading) {
  uint64_t next;
  bool inside;
  {
    ControlLock lock(mu_);
    inside = t.in_step;
    next = inside ? t.step : t.next_step;
    if (next != kNoStep) *step = next;
  }
  bool busy = false;
  auto ended = [&] {
    if (workers_.applying()) return false;
    ControlLock lock(mu_);
    // This rank may have received an abort that is still taking back rows of other ranks.
    busy = !phase_.may(Phase::kRead);
    const bool others = next != kNoStep && config_.staleness < next &&
                        ranks_.next_commit() < next - config_.staleness;
    if (others) ranks_.note_awaited(ranks_.next_commit());
    if (busy || others) return false;
    FRUGAL_ASSERT(!*reading);
    // Between steps only this keeps operations outside steps from changing the rows.
    if (!inside) reading->emplace(phase_, Phase::kRead);
    return true;
  };
  const Status s = wait_for_ranks(deadline, &t, ended, [&] { return workers_.help(true); });
  if (s == FRUGAL_ERR_STEP_ABORTED) return aborter_.tell(t);
  if (s == FRUGAL_ERR_TIMEOUT && busy)
    return fail(s, "read waited for an operation outside steps, or an abort; call again");
  if (s == FRUGAL_ERR_TIMEOUT)
    return fail(s, "read waited for other ranks to end step %llu; call again",
                static_cast<unsigned long long>(next - 1));
  return s;
}

Status Engine::read_op(Trainer* trainer, Table& table, const frugal_op& op, const GpuOp* gpu,
                       uint64_t step, Deadline deadline) {
  const uint64_t* padding = op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr;
  Buffer slots;
  FRUGAL_TRY(memory_.unread().get(op.count * sizeof(uint32_t), &slots));
  uint32_t* s = slots.as<uint32_t>();
  FRUGAL_TRY(table.rows.resolve(op.keys, op.count, padding, Rows::Missing::kLeave, s, nullptr));
  const Unhold unhold_backed{table.rows, s, op.count};
  FRUGAL_TRY(wait_written(trainer, table, s, op.count, step, deadline));
  StoredCopies stored;
  FRUGAL_TRY(read_stored(table, op.keys, op.count, s, &stored));
  if (op.found_out)
    for (size_t k = 0; k < op.count; ++k) op.found_out[k] = s[k] < kMissingSlot || stored.has(k);
  if (gpu) return read_to_device(*trainer, table, s, op.count, *gpu, stored);
  return read_rows(table, s, op.count, op, stored);
}

// An evaluation read sees every committed step and changes nothing.
Status Engine::read(AnyTrainer* any, const frugal_op* ops, size_t n, Deadline deadline) {
  Trainer* const trainer = any ? &own(*any) : nullptr;
  FRUGAL_TRY(check());
  FRUGAL_TRY(check_ops(*this, ops, n, Use::kRead));
  std::optional<UniqueLock> call;
  std::optional<OutsideScope> scope;
  uint64_t step = UINT64_MAX;
  std::optional<Phase::During> reading;
  if (trainer) {
    tell_used(*trainer);
    call.emplace(trainer->call_mu);
    trainer->call_mu.assert_held();
    FRUGAL_TRY(begin_call(*trainer));
    FRUGAL_TRY(await_readable(*trainer, deadline, &step, &reading));
  } else {
    scope.emplace(*this, deadline);
    FRUGAL_TRY(scope->status());
  }
  Vector<GpuOp> gpu;
  Vector<frugal_op> host;
  if (trainer && trainer->gpu) {
    FRUGAL_TRY(trainer->gpu->ready());
    FRUGAL_TRY(trainer->gpu->take_ops(ops, n, Use::kRead, false, &gpu));
    for (const GpuOp& o : gpu) host.push_back(o.op);
    ops = host.data();
  } else {
    device::look_for_devices();
    FRUGAL_TRY(host_memory(ops, n));
  }
  for (size_t i = 0; i < n; ++i) {
    const frugal_op& op = ops[i];
    TableRef table;
    FRUGAL_TRY(in_op(op_table(op, &table), i, n, table));
    FRUGAL_TRY(in_op(check_op(op, table->rows.layout().dim, op.count, Use::kRead), i, n, table));
    const uint64_t* padding = op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr;
    FRUGAL_TRY(in_op(table->rows.check_ids(op.keys, op.count, padding), i, n, table));
  }
  for (size_t i = 0; i < n; ++i) {
    TableRef table;
    FRUGAL_TRY(op_table(ops[i], &table));
    const bool to_device = trainer && trainer->gpu && gpu[i].rows_on_device;
    FRUGAL_TRY(
        in_op(read_op(trainer, *table, ops[i], to_device ? &gpu[i] : nullptr, step, deadline), i, n,
              table));
  }
  // An abort may have taken rows back during the read, and other rows may have their slots now.
  if (trainer && trainer->abort_notice.load()) {
    trainer->call_mu.assert_held();
    return aborter_.tell(*trainer);
  }
  return FRUGAL_OK;
}

}  // namespace frugal
