// Lookup and push of a trainer whose engine is in another process.
#include <algorithm>

#include "engine/op_check.h"
#include "process/client.h"

namespace frugal {

namespace {

// Whether a term of the sums that an op's gradients make is a NaN. `declared`: the part that the op
// names without keys.
bool has_nan_term(const frugal_op& op, uint32_t dim, const Part* declared) {
  const size_t stride = stride_of(op.row_stride, dim);
  const bool pooled = op.pooling != FRUGAL_POOL_NONE;
  const uint64_t* keys = op.keys;
  size_t n = op.count;
  bool padded = op.flags & FRUGAL_OP_PADDING;
  uint64_t padding = op.padding_key;
  const uint32_t* slots = nullptr;
  if (!keys && declared) {
    n = declared->n;
    padded = declared->has_padding;
    padding = declared->padding;
    if (declared->resolved())
      slots = declared->slots.as<uint32_t>();
    else
      keys = declared->keys.as<uint64_t>();
  }
  if (!keys && !slots) return false;  // the request goes to the controller, which refuses it
  auto is_term = [&](size_t k) {
    return !padded || (slots ? slots[k] != kNoSlot : keys[k] != padding);
  };
  for (size_t row = 0; row < (pooled ? op.bags : n); ++row) {
    const float* g =
        reinterpret_cast<const float*>(reinterpret_cast<const char*>(op.grads) + row * stride);
    // Of a bag without weights the terms are the same, or all divided by their number.
    const size_t first = pooled ? op.offsets[row] : row,
                 end = pooled ? op.offsets[row + 1] : row + 1;
    for (size_t k = first; k < end; ++k) {
      if (!is_term(k)) continue;
      for (uint32_t d = 0; d < dim; ++d) {
        const float term = pooled && op.weights ? op.weights[k] * g[d] : g[d];
        if (term != term) return true;
      }
      if (!op.weights) break;
    }
  }
  return false;
}

}  // namespace

// A step of a trainer of this process, whose engine is in another process.
class Client::AttachedStep final : public StepView {
 public:
  AttachedStep(Client& c, RemoteTrainer& t)
      : StepView(c, t, c, c.pool_, c.pinned_, false), client_(c), t_(t) {}

  Status begin(Use use) override {
    t_.call_mu.assert_held();
    FRUGAL_TRY(client_.begin_call(t_));
    FRUGAL_TRY(t_.inside());
    if (use == Use::kPush && t_.end.begun)
      return fail(FRUGAL_ERR_STEP_ORDER, "rank %u: step_end has failed: call it again first",
                  t_.rank);
    return FRUGAL_OK;
  }
  // The controller makes the rows that a request names, and a refused push must make none: so it is
  // refused before the request. (What a device finds undoes the step, with its rows.)
  Status resolve(const frugal_op* ops, const GpuOp* gpu, Use use) override {
    const size_t n = accesses.size();
    if (std::all_of(accesses.begin(), accesses.end(),
                    [](const Access& a) { return a.part != nullptr; }))
      return FRUGAL_OK;
    for (size_t i = 0; i < n && use == Use::kPush; ++i) {
      const Access& a = accesses[i];
      if (a.table->nan_policy != FRUGAL_NAN_REJECT || (gpu && gpu[i].rows_on_device)) continue;
      if (has_nan_term(ops[i], a.table->dim, (a.declared ? a.declared : a.part).get()))
        return in_op(nan_refused(ops[i], a.table->dim, t_.step), i, n, a.table);
    }
    return ask_for(ops);
  }
  Status create() override {
    t_.call_mu.assert_held();
    return t_.use(accesses);
  }
  Status rows_of(const Access& a, RowSource* out) override {
    t_.call_mu.assert_held();
    const StepPart& p = t_.parts[a.number];
    out->rows = own(*a.table).rows;
    out->versions = client_.controller_.versions();
    out->id = own(*a.table).id;
    out->cached = p.cached;
    out->stale_keys = p.stale_keys;
    if (p.part->sources) out->cached_rows = {p.cached_values, t_.device_cached_rows(*a.table)};
    return FRUGAL_OK;
  }
  Status show_device(const Access& a, DeviceWork& device_work) override {
    return client_.show_device(a, device_work);
  }
  Status row_awaited() override {
    if (!until_) until_ = answer_until(client_.deadline(FRUGAL_TIMEOUT_DEFAULT).at);
    const bool cut = t_.channel().is_cut();  // closing marks the trainer before it cuts
    FRUGAL_TRY(client_.controller_.check());
    if (t_.closing.load())
      return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
    return cut || now_ns() > until_ ? t_.rpc.not_answered(FRUGAL_ERR_TIMEOUT) : FRUGAL_OK;
  }
  // The controller does not wait for this device when it undoes a step.
  Status end(bool on_device) override {
    t_.call_mu.assert_held();
    if (on_device) FRUGAL_TRY(client_.await_stream(t_));
    return client_.begin_call(t_);
  }
  BufferPool& sums(bool) override { return t_.sums; }
  bool keeps_gradients() const override { return false; }
  bool streams_sums() const override { return false; }
  void count(Use use, const Counts& c) override {
    const bool push = use == Use::kPush;
    (push ? t_.counts.keys_pushed : t_.counts.keys_looked_up) += c.keys;
    (push ? t_.counts.push_ns : t_.counts.lookup_ns) += now_ns() - began_;
    t_.counts.cache_hits += c.hits;
    t_.counts.cache_misses += c.misses;
    t_.counts.stale_reads += c.stale;
    t_.trace(push ? SpanKind::kPush : SpanKind::kLookup, began_, c.keys);
  }

 private:
  Status ask_for(const frugal_op* ops);

  Client& client_;
  RemoteTrainer& t_;
  const uint64_t began_ = now_ns();
  uint64_t until_ = 0;  // of waiting for rows that are being written
};

// Requests parts for keys that were not declared as they are used.
Status Client::AttachedStep::ask_for(const frugal_op* ops) {
  t_.call_mu.assert_held();
  Vector<OpHead> heads;
  Vector<Access*> which;
  for (Access& a : accesses)
    if (!a.part) which.push_back(&a);
  if (which.empty()) return FRUGAL_OK;
  heads.reserve(which.size());
  const size_t from = t_.parts.size();
  Exchange e{Call::kAccess, {which.size(), from, accesses.size()}, {}};
  e.add(heads.data(), which.size() * sizeof(OpHead));
  for (const Access* a : which) {
    const size_t number = static_cast<size_t>(a - accesses.data());
    const frugal_op& op = ops[number];
    uint64_t batch = 0;
    if (op.batch)
      if (const RemoteBatchRef b = client_.batch_of(op.batch))
        batch = b->failed == FRUGAL_OK ? b->id : 0;
    heads.push_back({own(*a->table).id, batch, op.keys ? op.count : 0, op.padding_key, op.part,
                     op.flags, op.keys != nullptr, static_cast<uint32_t>(number), kNoShmAddress});
    if (op.keys) e.add(op.keys, op.count * sizeof(uint64_t));
  }
  // After a failure there are as many parts as before. The next request carries that number.
  struct Taken {
    Vector<StepPart>& parts;
    size_t keep;
    ~Taken() {
      if (parts.size() > keep)
        parts.erase(parts.begin() + static_cast<ptrdiff_t>(keep), parts.end());
    }
  } taken{t_.parts, from};
  FRUGAL_TRY(t_.ask(e, [&](Channel& c, uint64_t bytes, uint64_t until) {
    t_.call_mu.assert_held();
    return t_.take_parts(c, bytes, until, &which);
  }));
  if (t_.parts.size() != from + which.size() || e.args[0] != from)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent %zu parts of %zu", t_.parts.size() - from,
                which.size());
  for (size_t k = 0; k < which.size(); ++k) {
    StepPart& p = t_.parts[from + k];
    which[k]->part = p.part;
    which[k]->number = from + k;
    which[k]->whole = p.whole;
    p.used = true;  // the controller has made its rows
    if (!p.part->resolved())
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent a part outside of its memory");
  }
  taken.keep = t_.parts.size();
  return FRUGAL_OK;
}

Status Client::lookup(AnyTrainer& t, const frugal_op* ops, size_t n) {
  Lock call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).lookup(ops, n);
}

Status Client::push(AnyTrainer& t, const frugal_op* ops, size_t n) {
  Lock call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).push(ops, n);
}

Status Client::borrow(AnyTrainer& t, size_t bytes, void** out) {
  Lock call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).borrow(bytes, out);
}

}  // namespace frugal
