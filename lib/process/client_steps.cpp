// A trainer's calls. Declared keys need no message between the gate and the step's end.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/handles.h"
#include "device/pointers.h"
#include "process/exchange.h"

namespace frugal {
namespace {

constexpr uint64_t kLookNs = 15000;  // for an answer before sleeping: the controller wants the processors
constexpr uint64_t kLateNs = 5'000'000;
constexpr auto kLateSleep = std::chrono::microseconds(50);
// Declared keys of so many bytes are written once, where the controller finds them later; fewer go with the request.
constexpr size_t kStagedBytes = size_t{2} << 10;

}  // namespace

// --- Talking -------------------------------------------------------------------------------------

template <class Answer>
Status Client::ask(RemoteTrainer& t, Exchange& e, Answer answer) {
  FRUGAL_TRY(take_settled(t));
  add_used(t, &e);
  t.patience->set(e.call, kLookNs);
  const Status s = ask(*t.channel, &t.sequence, e, answer);
  t.patience->waited(e.call);
  if (s == FRUGAL_OK) t.used.clear();
  return concluded(t, s);
}

// What was used comes first: the call may need its rows. Telling twice, after a failure, does no harm.
void Client::add_used(const RemoteTrainer& t, Exchange* e) {
  e->args[4] = t.used.size();
  if (!t.used.empty()) e->pieces.insert(e->pieces.begin(), Piece{t.used.data(), t.used.size() * sizeof(uint32_t)});
}

// What an answer says of the step.
Status Client::concluded(RemoteTrainer& t, Status s) {
  if (s == FRUGAL_ERR_STEP_ABORTED || s == FRUGAL_ERR_PEER_LOST) {
    if (const uint32_t notices = t.notices->load(); std::exchange(t.told, notices) != notices) t.begun.store(kNoStep);
    leave_step(t);
  }
  if (s == FRUGAL_ERR_PEER_LOST && t.closing.load())
    return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
  return s;
}

Status Client::ask(RemoteTrainer& t, Exchange& e) {
  return ask(t, e, [](Channel&, uint64_t, uint64_t) { return FRUGAL_OK; });
}

// Takes the answer to a declaration that was not waited for. FRUGAL_ERR_TIMEOUT: it has not come, and may be waited for
// again. late.mu is held.
Status Client::answer_late(RemoteTrainer& t, uint64_t until) {
  Header h;
  if (Status s = t.channel->receive(&h, until)) return s;
  Exchange e{Call::kPrefetch, {}, {}};
  bool answered;
  const Status s = take_answer(*t.channel, t.sequence, h, overdue(e), e,
                               [](Channel&, uint64_t, uint64_t) { return FRUGAL_OK; }, &answered);
  t.late.open = false;
  if (!answered) return s;
  if (s == FRUGAL_OK) return s;
  RemoteBatch& batch = *t.late.batch;
  batch.failed = s;
  try {
    batch.why = met_message();
  } catch (const std::bad_alloc&) {
  }
  return FRUGAL_OK;
}

Status Client::settle(RemoteTrainer& t) {
  std::lock_guard<std::mutex> one(t.late.mu);
  if (!t.late.open) return FRUGAL_OK;
  const Status s = answer_late(t, overdue(Exchange{Call::kPrefetch, {}, {}}));
  return s == FRUGAL_OK ? s : not_answered(*t.channel, s);
}

// First thing before anything else is asked.
Status Client::take_settled(RemoteTrainer& t) {
  if (!t.late.batch) return FRUGAL_OK;
  t.patience->set(Call::kPrefetch, kLookNs);
  FRUGAL_TRY(concluded(t, settle(t)));
  t.patience->waited(Call::kPrefetch);
  const RemoteBatchRef batch = std::move(t.late.batch);
  t.late.batch = nullptr;
  if (batch->failed == FRUGAL_OK) {
    t.used.erase(t.used.begin(), t.used.begin() + static_cast<ptrdiff_t>(std::min(t.late.used, t.used.size())));
    return FRUGAL_OK;
  }
  // The keys are not the controller's, but for those that it has had for a while.
  take_releases(t);
  for (uint64_t place : t.late.places) t.handed.erase(place);
  return FRUGAL_OK;
}

// Who calls outside of steps comes after its declarations, if the controller answers in time. That is for the trainer's
// own calls to judge.
void Client::settle_all(uint64_t until) {
  Vector<RemoteTrainerRef> trainers;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (auto& weak : trainers_)
      if (auto t = weak.lock()) trainers.push_back(std::move(t));
  }
  // In slices: the trainer's own call has a time-out of its own.
  for (const RemoteTrainerRef& t : trainers)
    for (Status s = FRUGAL_ERR_TIMEOUT; s == FRUGAL_ERR_TIMEOUT;) {
      const uint64_t now = now_ns();
      if (std::unique_lock<std::mutex> one(t->late.mu, std::try_to_lock); one)
        s = t->late.open ? answer_late(*t, std::min(until, now + kLateNs)) : FRUGAL_OK;
      if (s == FRUGAL_ERR_TIMEOUT && now >= until) break;
      if (s == FRUGAL_ERR_TIMEOUT) std::this_thread::sleep_for(kLateSleep);
    }
}

// First thing in every call: what the trainer is to be told of comes before all else.
Status Client::enter(RemoteTrainer& t) {
  FRUGAL_TRY(check());
  if (t.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer is being closed");
  if (t.gpu && t.gpu->sticky()) return device_failed(t);
  Status s = FRUGAL_OK;
  if (std::unique_lock<std::mutex> one(t.late.mu, std::try_to_lock); one) s = t.channel->look();
  if (s != FRUGAL_OK) {  // another has its place, or the controller has ended, or this trainer is closed meanwhile
    leave_step(t);
    return concluded(t, not_answered(*t.channel, s));
  }
  take_releases(t);
  if (t.notices->load() == t.told) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  s = ask(t, e);
  if (s == FRUGAL_ERR_NOT_IN_STEP) s = FRUGAL_OK;
  if (s == FRUGAL_OK) t.told = t.notices->load();
  return s;
}

Status Client::inside(RemoteTrainer& t) {
  if (t.in_step) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  Status s = ask(t, e);
  return s == FRUGAL_OK ? fail(FRUGAL_ERR_NOT_IN_STEP, "rank %u is not inside a step: call step_begin first", t.rank) : s;
}

// Nothing of the step is of use any more, but for sums that the controller may be reading.
void Client::leave_step(RemoteTrainer& t) {
  if (t.gpu) t.gpu->take_flight();  // waits until the device has done with it
  t.in_step = t.ending = false;
  forget_used(t);
  t.parts.clear();
  t.used.clear();
  t.pushes.clear();
  t.reads.clear();
  t.places.clear();
  t.sent.clear();
  t.lent.clear();
}

void Client::take_releases(RemoteTrainer& t) {
  for (uint64_t place; t.channel->next_release(&place);) {
    t.handed.erase(place);
    std::erase(t.late.places, place);
  }
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
  return batch && batch->session == this ? std::static_pointer_cast<RemoteBatch>(std::move(batch)) : nullptr;
}

namespace {

Status check_keys(const AnyTable& table, const frugal_op& op) {
  if (table.any_key || !op.keys) return FRUGAL_OK;
  return check_dense_ids(op.keys, op.count, op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr,
                         table.capacity);
}

}  // namespace

// Of a dense table they are slots: half the bytes, and this side looks at the ids meanwhile.
Status Client::declared_keys(RemoteTrainer& t, const RemoteTable& table, const frugal_op& op, bool stages, OpHead* head,
                             Buffer* memory, Exchange* e) {
  const bool hashed = table.info.key_space == FRUGAL_HASHED;
  const size_t bytes = op.count * (hashed ? sizeof(uint64_t) : sizeof(uint32_t));
  const bool staged = stages && bytes >= kStagedBytes && t.sums.get(bytes, memory) == FRUGAL_OK;
  if (staged) head->place = t.place(*memory);
  if (!staged && !hashed) FRUGAL_TRY(pool_.get(bytes, memory));
  if (!hashed)
    FRUGAL_TRY(dense_slots(op.keys, op.count, op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr,
                           table.info.capacity, memory->as<uint32_t>()));
  else if (staged)
    std::memcpy(memory->data(), op.keys, bytes);
  if (!staged) e->add(hashed ? static_cast<const void*>(op.keys) : memory->data(), bytes);
  return FRUGAL_OK;
}

Status Client::prefetch(AnyTrainer& any, uint64_t step, const frugal_op* ops, size_t n, bool want_handle,
                        uint64_t* batch_out) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
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
    heads[i] = {table->id, 0, ops[i].count, ops[i].padding_key, 0, ops[i].flags, 1,
                static_cast<uint32_t>(i), kNoPlace};
    FRUGAL_TRY(in_op(declared_keys(t, *table, ops[i], stages, &heads[i], &keys[i], &e), i, n, table));
    batch->tables.push_back(std::move(table));
  }
  struct Undo {  // where it is not declared after all
    RemoteTrainer* t;
    const Vector<OpHead>& heads;
    RemoteBatch& batch;
    ~Undo() {
      if (!t) return;
      const KeepError why;
      Client::take_releases(*t);  // of keys that the controller has had for a while
      for (const OpHead& head : heads) t->handed.erase(head.place);
      t->batches.erase(batch.id);
      if (batch.handle) handle_remove(HandleKind::kBatch, batch.handle);
    }
  } undo{&t, heads, *batch};
  // So that nothing fails when the controller has them.
  for (const OpHead& head : heads)
    if (head.place != kNoPlace) t.handed[head.place] = Buffer();
  if (want_handle) {
    batch->handle = handle_of<AnyBatch>(batch);
    if (!batch->handle) return FRUGAL_ERR_OUT_OF_MEMORY;
  }
  t.batches[batch->id] = batch;
  // Inside of a step nothing is left to be wrong with it but the controller's memory, or that it is one too many.
  const bool staged = n > 0 && std::all_of(heads.begin(), heads.end(), [](auto& h) { return h.place != kNoPlace; });
  const bool late = staged && t.in_step && step > t.step && step - t.step <= config_.lookahead;
  FRUGAL_TRY(late ? declare_late(t, e, heads, batch) : ask(t, e));
  undo.t = nullptr;
  for (size_t i = 0; i < n; ++i)
    if (heads[i].place != kNoPlace) t.handed[heads[i].place] = std::move(keys[i]);
  ++t.last_batch;
  if (want_handle) *batch_out = batch->handle;
  t.counts.prefetch_ns += now_ns() - began;
  return FRUGAL_OK;
}

// The trainer computes meanwhile, and its next request comes after the answer.
Status Client::declare_late(RemoteTrainer& t, Exchange& e, const Vector<OpHead>& heads, const RemoteBatchRef& batch) {
  FRUGAL_TRY(take_settled(t));
  e.args[3] = 1;
  add_used(t, &e);
  Vector<uint64_t> places;
  for (const OpHead& head : heads) places.push_back(head.place);
  std::unique_lock<std::mutex> one(t.late.mu);
  if (Status s = request(*t.channel, ++t.sequence, e)) {
    one.unlock();
    return concluded(t, s);
  }
  t.late.open = true;
  t.late.batch = batch;
  t.late.used = t.used.size();
  t.late.places.swap(places);
  return FRUGAL_OK;
}

Status Client::cancel(AnyTrainer& any, const AnyBatchRef& of) {
  RemoteTrainer& t = own(any);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  if (of->session != this)
    return fail(FRUGAL_ERR_BAD_HANDLE, "the batch belongs to another engine: cancel it there");
  const RemoteBatchRef batch = std::static_pointer_cast<RemoteBatch>(of);
  if (batch->trainer != &t)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "the batch was declared by another trainer, not by rank %u: give one of its own",
                t.rank);
  FRUGAL_TRY(take_settled(t));
  Exchange e{Call::kCancel, {batch->id}, {}};
  if (batch->failed == FRUGAL_OK) FRUGAL_TRY(ask(t, e));
  handle_remove(HandleKind::kBatch, batch->handle);
  t.batches.erase(batch->id);
  return FRUGAL_OK;
}

// --- Steps ---------------------------------------------------------------------------------------

Status Client::take_parts(RemoteTrainer& t, Channel& channel, uint64_t bytes, uint64_t until,
                          const Vector<Access*>* asked) {
  if (bytes % sizeof(PartPlace)) return fail(FRUGAL_ERR_INTERNAL, "the controller sent half a part");
  Vector<PartPlace> places(bytes / sizeof(PartPlace));
  FRUGAL_TRY(channel.read(places.data(), bytes, until));
  for (size_t i = 0; i < places.size(); ++i) {
    const PartPlace& p = places[i];
    StepPart s;
    s.batch = p.batch;
    s.index = p.index;
    if (asked)
      s.table = i < asked->size() ? (*asked)[i]->table : nullptr;
    else if (auto b = t.batches.find(p.batch); b != t.batches.end() && p.index < b->second->tables.size())
      s.table = b->second->tables[p.index];
    s.whole = p.flags & kPartWhole;
    s.fresh = p.flags & kPartFresh;
    s.cached = p.flags & kPartCached;
    s.stale_keys = p.stale;
    auto see = [&](uint64_t place, uint64_t count, size_t element, Buffer* out) -> Status {
      if (place == kNoPlace || count > UINT64_MAX / element) return FRUGAL_OK;
      const char* at;
      FRUGAL_TRY(regions_.find(place, count * element, &t.reads, &at));
      *out = Buffer::view(at, count * element);
      return FRUGAL_OK;
    };
    s.part = make_part();
    s.part->step = t.step;
    s.part->rank = t.rank;
    s.part->n = p.n;
    s.part->has_padding = p.flags & kPartPadding;
    s.part->padding = p.padding;
    s.part->distinct = p.distinct;
    s.part->occurrences = p.occurrences;
    s.part->cached = p.cached;
    FRUGAL_TRY(see(p.slots, p.n, sizeof(uint32_t), &s.part->slots));
    FRUGAL_TRY(see(p.pairs, p.occurrences, sizeof(uint64_t), &s.part->pairs));
    FRUGAL_TRY(see(p.rows, p.distinct, sizeof(uint32_t), &s.part->rows));
    FRUGAL_TRY(see(p.start, p.distinct + 1, sizeof(uint32_t), &s.part->start));
    FRUGAL_TRY(see(p.keys, p.n, sizeof(uint64_t), &s.part->keys));
    FRUGAL_TRY(see(p.sources, p.distinct, sizeof(device::Source), &s.part->sources));
    Buffer lines;
    FRUGAL_TRY(see(p.line_values, 1, sizeof(float), &lines));
    s.line_values = lines.as<float>();
    s.part->state.store(s.part->slots || p.n == 0 ? Part::kResolved : Part::kStale);
    t.parts.push_back(std::move(s));
  }
  return FRUGAL_OK;
}

Status Client::step_begin(AnyTrainer& any, uint64_t step, Deadline deadline) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
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
    Exchange e{Call::kStepBegin, {step, left_until(deadline), t.boundary, without}, {}, deadline.at};
    forget_used(t);
    t.parts.clear();
    t.reads.clear();
    t.next_part = 0;
    Vector<char> told;
    FRUGAL_TRY(ask(t, e, [&](Channel& c, uint64_t bytes, uint64_t until) -> Status {
      if (e.args[1] > bytes / sizeof(PartPlace)) return fail(FRUGAL_ERR_INTERNAL, "the controller sent half a part");
      const uint64_t parts = e.args[1] * sizeof(PartPlace);
      FRUGAL_TRY(take_parts(t, c, parts, until, nullptr));
      told.resize(bytes - parts);
      return c.read(told.data(), told.size(), until);
    }));
    traced = e.args[0] != 0;
    if (e.args[2] == 0) break;
    if (!t.gpu) return fail(FRUGAL_ERR_INTERNAL, "the controller sent lines of a cache");
    without = 0;
    Status s;
    try {
      s = turn_lines(t, told, e.args[3], &without);
    } catch (const std::bad_alloc&) {
      without = 0;
      s = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to bring the cache of rank %u up to date; call again", t.rank);
    }
    if (s == FRUGAL_OK) {
      t.boundary = e.args[2];
      break;
    }
    // The controller sees from the number that the lines are lost.
    t.parts.clear();
    t.gpu->take_flight();
    if (!without) return s;
  }
  t.in_step = true;
  t.begun.store(step);
  t.traced = traced;
  // Until it is committed a step may be undone, and is done again with the same declarations. No rank is more
  // than 62 steps ahead of the last commit.
  std::erase_if(t.batches, [&](auto& item) {
    if (item.second->step >= step || step - item.second->step <= kept_steps()) return false;
    handle_remove(HandleKind::kBatch, item.second->handle);
    return true;
  });
  t.counts.step_begin_ns += now_ns() - began;
  return FRUGAL_OK;
}

// Keys that nobody has declared as they are used.
Status Client::ask_for(RemoteTrainer& t, const frugal_op* ops, Vector<Access>& accesses) {
  Vector<OpHead> heads;
  Vector<Access*> which;
  for (Access& a : accesses)
    if (!a.part) which.push_back(&a);
  if (which.empty()) return FRUGAL_OK;
  heads.reserve(which.size());
  const size_t from = t.parts.size();
  Exchange e{Call::kAccess, {which.size(), from, accesses.size()}, {}};
  e.add(heads.data(), which.size() * sizeof(OpHead));
  for (const Access* a : which) {
    const size_t number = static_cast<size_t>(a - accesses.data());
    const frugal_op& op = ops[number];
    uint64_t batch = 0;
    if (op.batch)
      if (const RemoteBatchRef b = batch_of(op.batch))
        batch = b->failed == FRUGAL_OK ? b->id : 0;
    heads.push_back({own(*a->table).id, batch, op.keys ? op.count : 0, op.padding_key, op.part, op.flags,
                     op.keys != nullptr, static_cast<uint32_t>(number), kNoPlace});
    if (op.keys) e.add(op.keys, op.count * sizeof(uint64_t));
  }
  // After a failure there are as many as before, and the next request tells how many that is.
  struct Taken {
    Vector<StepPart>& parts;
    size_t keep;
    ~Taken() {
      if (parts.size() > keep) parts.erase(parts.begin() + static_cast<ptrdiff_t>(keep), parts.end());
    }
  } taken{t.parts, from};
  FRUGAL_TRY(ask(t, e, [&](Channel& c, uint64_t bytes, uint64_t until) { return take_parts(t, c, bytes, until, &which); }));
  if (t.parts.size() != from + which.size() || e.args[0] != from)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent %zu parts of %zu", t.parts.size() - from, which.size());
  for (size_t k = 0; k < which.size(); ++k) {
    StepPart& p = t.parts[from + k];
    which[k]->part = p.part;
    which[k]->number = from + k;
    which[k]->whole = p.whole;
    p.used = true;  // the controller has made its rows
    if (!p.part->resolved())
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent a part outside of its memory");
  }
  taken.keep = t.parts.size();
  return FRUGAL_OK;
}

namespace {

// Whether a term of the sums that an op's gradients make is a NaN. `declared`: what it names without keys.
bool has_nan_term(const frugal_op& op, uint32_t dim, const Part* declared) {
  const size_t stride = op.row_stride ? op.row_stride : dim * sizeof(float);
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
    if (declared->resolved()) slots = declared->slots.as<uint32_t>();
    else keys = declared->keys.as<uint64_t>();
  }
  if (!keys && !slots) return false;  // the controller is asked, and refuses it
  auto is_term = [&](size_t k) { return !padded || (slots ? slots[k] != kNoSlot : keys[k] != padding); };
  for (size_t row = 0; row < (pooled ? op.bags : n); ++row) {
    const float* g = reinterpret_cast<const float*>(reinterpret_cast<const char*>(op.grads) + row * stride);
    // Of a bag without weights the terms are the same, or all divided by their number.
    const size_t first = pooled ? op.offsets[row] : row, end = pooled ? op.offsets[row + 1] : row + 1;
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

// Rows of hashed tables exist once they have been used; the controller is told with the next request. It
// looks at the marks where another rank wants to know before that.
Status Client::use(RemoteTrainer& t, const Vector<Access>& accesses) {
  t.used.reserve(t.used.size() + accesses.size());
  bool unmarked = false;
  for (const Access& a : accesses) {
    StepPart& p = t.parts[a.number];
    if (p.used) continue;
    p.used = true;
    if (!a.table->any_key) continue;
    t.used.push_back(static_cast<uint32_t>(a.number));
    unmarked = unmarked || a.number >= kMarkedParts;
    if (a.number >= kMarkedParts) continue;
    std::atomic<uint64_t>& marks = t.channel->counter(a.number / 64);
    marks.store(marks.load(std::memory_order_relaxed) | uint64_t{1} << a.number % 64, std::memory_order_release);
  }
  if (!unmarked) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  return ask(t, e);
}

// Before parts get other numbers.
void Client::forget_used(RemoteTrainer& t) {
  const size_t n = std::min(t.parts.size(), kMarkedParts);
  for (size_t i = 0; i * 64 < n; ++i) t.channel->counter(i).store(0, std::memory_order_release);
}

// A call that this process has made by itself.
void Client::trace(RemoteTrainer& t, SpanKind span, uint64_t begin, uint64_t keys) noexcept {
  if (!t.traced || t.events.size() >= kMostEvents) return;
  TraceEvent e;
  e.span = span;
  e.begin = begin;
  e.end = now_ns();
  e.step = t.step;
  e.count = keys;
  e.thread = trace_thread_number();
  try {
    t.events.push_back(e);
  } catch (const std::bad_alloc&) {
  }
}

// --- Lookup and push -----------------------------------------------------------------------------

// A step of a trainer of this process, whose engine is another's.
class Client::AttachedStep final : public StepView {
 public:
  AttachedStep(Client& c, RemoteTrainer& t) : StepView(c, t, c, c.pool_, c.pinned_), client_(c), t_(t) {}

  Status begin(Use use) override {
    FRUGAL_TRY(client_.enter(t_));
    FRUGAL_TRY(client_.inside(t_));
    if (use == Use::kPush && t_.ending)
      return fail(FRUGAL_ERR_STEP_ORDER, "rank %u: step_end has failed: call it again first", t_.rank);
    return FRUGAL_OK;
  }
  // The controller makes the rows that it is asked for, and a push that is refused makes none. (What a device finds undoes
  // the step, with its rows.)
  Status resolve(const frugal_op* ops, const GpuOp* gpu, Use use) override {
    const size_t n = accesses.size();
    if (std::all_of(accesses.begin(), accesses.end(), [](const Access& a) { return a.part != nullptr; })) return FRUGAL_OK;
    for (size_t i = 0; i < n && use == Use::kPush; ++i) {
      const Access& a = accesses[i];
      if (a.table->nan_policy != FRUGAL_NAN_REJECT || (gpu && gpu[i].rows_on_device)) continue;
      if (has_nan_term(ops[i], a.table->dim, a.declared.get()))
        return in_op(nan_refused(ops[i], a.table->dim, t_.step), i, n, a.table);
    }
    return client_.ask_for(t_, ops, accesses);
  }
  Status create() override { return client_.use(t_, accesses); }
  Status rows_of(const Access& a, RowSource* out) override {
    const StepPart& p = t_.parts[a.number];
    out->rows = own(*a.table).rows;
    out->versions = client_.versions_;
    out->id = own(*a.table).id;
    out->cached = p.cached;
    out->stale_keys = p.stale_keys;
    if (p.part->sources) out->lines = {p.line_values, device_lines(t_, *a.table)};
    return FRUGAL_OK;
  }
  Status show_device(const Access& a, Flight& flight) override { return client_.show_device(a, flight); }
  Status row_awaited() override {
    if (!until_) until_ = answer_until(client_.deadline(FRUGAL_TIMEOUT_DEFAULT).at);
    const bool cut = t_.channel->is_cut();  // who closes marks that before the cut
    FRUGAL_TRY(client_.check());
    if (t_.closing.load()) return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
    return cut || now_ns() > until_ ? client_.not_answered(*t_.channel, FRUGAL_ERR_TIMEOUT) : FRUGAL_OK;
  }
  // The controller does not wait for this device when it undoes a step.
  Status end(bool on_device) override {
    if (on_device) FRUGAL_TRY(client_.await_stream(t_));
    return client_.enter(t_);
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
    trace(t_, push ? SpanKind::kPush : SpanKind::kLookup, began_, c.keys);
  }

 private:
  Client& client_;
  RemoteTrainer& t_;
  const uint64_t began_ = now_ns();
  uint64_t until_ = 0;  // of waiting for rows that are being written
};

Status Client::lookup(AnyTrainer& t, const frugal_op* ops, size_t n) {
  std::lock_guard<std::mutex> call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).lookup(ops, n);
}

Status Client::push(AnyTrainer& t, const frugal_op* ops, size_t n) {
  std::lock_guard<std::mutex> call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).push(ops, n);
}

Status Client::borrow(AnyTrainer& t, size_t bytes, void** out) {
  std::lock_guard<std::mutex> call(t.call_mu);
  AttachedStep step(*this, own(t));
  return RowPath(step).borrow(bytes, out);
}

// The sums of the step, for its end: the same however often that is tried, since the controller may have them.
Status Client::place_sums(RemoteTrainer& t) {
  Vector<PushPlace> places;
  Vector<Handover> sent;
  Vector<Handover*> alone;
  places.reserve(t.pushes.size());
  sent.reserve(t.pushes.size());
  alone.reserve(t.pushes.size());
  for (auto& [raw, push] : t.pushes) {
    if (push.table->dropped.load()) continue;
    PushPlace p{};
    p.table = own(*push.table).id;
    Handover* h = &push.first;
    if (push.tail.empty()) {
      p.part = push.number;
      p.whole = h->whole;
      alone.push_back(h);
    } else {
      sent.emplace_back();
      h = &sent.back();
      FRUGAL_TRY(join_pushes(push, push.table->dim, t.rank, t.sums, t.sums, h));
      p.part = kJoined;
      p.distinct = h->part->distinct;
      if (p.distinct) p.rows = t.place(h->part->rows);
    }
    if (h->part->distinct) p.sums = t.place(h->sums);
    places.push_back(p);
  }
  // Nothing fails from here on.
  for (Handover* h : alone) sent.push_back(std::move(*h));
  t.places.swap(places);
  t.sent.swap(sent);
  t.ending = true;
  return FRUGAL_OK;
}

Status Client::step_end(AnyTrainer& any, uint64_t step, uint32_t flags) {
  RemoteTrainer& t = own(any);
  const uint64_t began = now_ns();
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FRUGAL_TRY(inside(t));
  if (t.step != step)
    return fail(FRUGAL_ERR_STEP_ORDER, "rank %u is inside step %llu, not %llu: end that", t.rank,
                static_cast<unsigned long long>(t.step), static_cast<unsigned long long>(step));
  if (flags & ~FRUGAL_STEP_SKIP)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x in step_end: give 0 or FRUGAL_STEP_SKIP", flags);
  if (!t.ending) {
    Flight::Found found = Flight::Found::kNothing;
    if (t.gpu) FRUGAL_TRY(end_flight(t, &found));
    if (found != Flight::Found::kNothing) {
      Exchange undo{Call::kAbort, {}, {}};
      FRUGAL_TRY(ask(t, undo));
      t.begun.store(kNoStep);
      leave_step(t);
      return found_in_step(found, step);
    }
    FRUGAL_TRY(place_sums(t));
  }
  const uint64_t cpu = process_cpu_ns();
  t.counts.cpu_ns = cpu - t.cpu_ns;
  Exchange e{Call::kStepEnd, {step, flags, t.places.size(), t.events.size()}, {}};
  e.add(&t.counts, sizeof t.counts);
  e.add(t.places.data(), t.places.size() * sizeof(PushPlace));
  e.add(t.events.data(), t.events.size() * sizeof(TraceEvent));
  // So that nothing can fail when they are the controller's, which tells when it has read them. An attempt that
  // failed may have had some for a while: what it told of that is taken by now, and they are still here.
  for (const Handover& h : t.sent)
    if (h.sums) t.handed[t.place(h.sums)] = Buffer();
  Status s = ask(t, e);
  t.cpu_ns = cpu;
  t.counts = {};
  t.events.clear();
  if (!t.in_step) return s;  // undone, or closed: the pushes are gone already
  if (s != FRUGAL_OK) return s;
  for (Handover& h : t.sent) {
    if (!h.sums) continue;
    const uint64_t at = t.place(h.sums);
    t.handed[at] = std::move(h.sums);
  }
  leave_step(t);
  t.sums.end_step();
  pool_.end_step();
  t.counts.step_end_ns += now_ns() - began;
  return FRUGAL_OK;
}

Status Client::abort_call(AnyTrainer& any) {
  RemoteTrainer& t = own(any);
  std::lock_guard<std::mutex> call(t.call_mu);
  FRUGAL_TRY(enter(t));
  FRUGAL_TRY(inside(t));
  Exchange e{Call::kAbort, {}, {}};
  FRUGAL_TRY(ask(t, e));
  t.begun.store(kNoStep);
  leave_step(t);
  return FRUGAL_OK;
}

// --- Evaluation ----------------------------------------------------------------------------------

// From what a dead controller has left. A trainer is to see what it has done, which is not there if it was not
// committed.
Status Client::read_out(const RemoteTrainer* t, const frugal_op* ops, size_t n) {
  static const float zeros[65536] = {};  // the largest row
  if (t) {
    uint64_t committed;
    FRUGAL_TRY(remains_.committed(&committed));
    const uint64_t begun = t->begun.load();
    if (begun != kNoStep && (committed == kNoStep || begun > committed))
      return fail(FRUGAL_ERR_PEER_LOST,
                  "the controller is gone, and step %llu, which rank %u has begun, was not committed: read without a "
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
    FRUGAL_TRY(remains_of(*table, &from));
    Vector<uint32_t> slots(op.count);
    from->find(op.keys, op.count, op.flags & FRUGAL_OP_PADDING ? &op.padding_key : nullptr, slots.data());
    size_t made = 0;
    for (uint32_t s : slots) made += s < kMissingSlot && from->untouched(s);
    Vector<char> scratch(made * from->layout().bytes());
    char* next = scratch.data();
    Vector<const float*> rows(op.count);
    for (size_t k = 0; k < op.count; ++k) {
      const bool there = slots[k] < kMissingSlot;
      if (op.found_out) op.found_out[k] = there;
      if (!there) {
        rows[k] = slots[k] == kNoSlot ? nullptr : zeros;
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
  return outlive([&]() -> Status {
    if (Remaining remains{*this}) {
      device::look_for_devices();
      FRUGAL_TRY(host_memory(ops, n));
      return read_out(t, ops, n);
    }
    std::unique_lock<std::mutex> call;
    if (t) {
      call = std::unique_lock<std::mutex>(t->call_mu);
      FRUGAL_TRY(enter(*t));
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
    heads[i].op = {tables[i]->id, 0, op.count, op.padding_key, 0, op.flags, 1, 0, kNoPlace};
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
      const size_t bytes = tables[i]->info.dim * sizeof(float), stride = op.row_stride ? op.row_stride : bytes;
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
  return t ? ask(*t, e, take) : ask(e, take);
}

}  // namespace frugal
