#include "process/remote_trainer.h"

#include <algorithm>
#include <utility>

namespace frugal {
namespace {

constexpr uint64_t kLateNs = 5'000'000;
constexpr uint64_t kLateSleepNs = 50'000;

}  // namespace

// --- Requests ------------------------------------------------------------------------------------

// Used parts come first: the call may need their rows. To report them twice, after a failure, does
// no harm.
void RemoteTrainer::add_used(Exchange* e) const {
  e->args[4] = used.size();
  if (!used.empty())
    e->pieces.insert(e->pieces.begin(), Piece{used.data(), used.size() * sizeof(uint32_t)});
}

// Carries out what the status of a call says of the step.
Status RemoteTrainer::concluded(Status s) {
  if (s == FRUGAL_ERR_STEP_ABORTED || s == FRUGAL_ERR_PEER_LOST) {
    const uint32_t now = notices.counted->load();
    if (std::exchange(notices.told, now) != now) begun.store(kNoStep);
    leave_step();
  }
  if (s == FRUGAL_ERR_PEER_LOST && closing.load())
    return fail(FRUGAL_ERR_CLOSED, "the trainer was closed while a call waited");
  return s;
}

Status RemoteTrainer::say_here() {
  Exchange e{Call::kHere, {}, {}};
  FRUGAL_TRY(await_late_reply());
  return rpc.ask(e, nothing_more);
}

// Takes the reply to a declaration that was not waited for. FRUGAL_ERR_TIMEOUT: it has not come,
// and may be waited for again.
Status RemoteTrainer::answer_late(uint64_t until) {
  Header h;
  if (Status s = channel().receive(&h, until)) return s;
  Exchange e{Call::kPrefetch, {}, {}};
  bool answered;
  const Status s = rpc.take_answer(h, rpc.overdue(e), e, nothing_more, &answered);
  late.open = false;
  if (!answered) return s;
  if (s == FRUGAL_OK) return s;
  RemoteBatch& batch = *late.batch;
  batch.failed = s;
  try {
    batch.why = recorded_message();
  } catch (const std::bad_alloc&) {
  }
  return FRUGAL_OK;
}

Status RemoteTrainer::await_late_reply() {
  Lock one(late.mu);
  if (!late.open) return FRUGAL_OK;
  const Status s = answer_late(rpc.overdue(Exchange{Call::kPrefetch, {}, {}}));
  return s == FRUGAL_OK ? s : rpc.not_answered(s);
}

Status RemoteTrainer::take_late_reply() {
  if (!late.batch) return FRUGAL_OK;
  spin_policy->set(Call::kPrefetch, kLookNs);
  FRUGAL_TRY(concluded(await_late_reply()));
  spin_policy->waited(Call::kPrefetch);
  const RemoteBatchRef batch = std::move(late.batch);
  late.batch = nullptr;
  if (batch->failed == FRUGAL_OK) {
    used.erase(used.begin(),
               used.begin() + static_cast<ptrdiff_t>(std::min(late.used, used.size())));
    return FRUGAL_OK;
  }
  // The controller holds none of the keys any more; it may have released some.
  take_releases();
  for (uint64_t keys : late.shm_addresses) handed.erase(keys);
  return FRUGAL_OK;
}

// In slices: the trainer's own call has a time-out of its own.
void RemoteTrainer::take_late_reply_within(uint64_t until) {
  for (Status s = FRUGAL_ERR_TIMEOUT; s == FRUGAL_ERR_TIMEOUT;) {
    const uint64_t now = now_ns();
    if (late.mu.try_lock()) {
      const UniqueLock one(late.mu, std::adopt_lock);
      s = late.open ? answer_late(std::min(until, now + kLateNs)) : FRUGAL_OK;
    }
    if (s == FRUGAL_ERR_TIMEOUT && now >= until) break;
    if (s == FRUGAL_ERR_TIMEOUT) sleep_ns(kLateSleepNs);
  }
}

void RemoteTrainer::take_releases() {
  for (uint64_t read; channel().next_release(&read);) {
    handed.erase(read);
    std::erase(late.shm_addresses, read);
  }
}

// The trainer computes meanwhile, and its next request follows the reply.
Status RemoteTrainer::declare_late(Exchange& e, const Vector<OpHead>& heads,
                                   const RemoteBatchRef& batch) {
  FRUGAL_TRY(take_late_reply());
  e.args[3] = 1;
  add_used(&e);
  Vector<uint64_t> keys;
  for (const OpHead& head : heads) keys.push_back(head.shm_address);
  UniqueLock one(late.mu);
  if (Status s = rpc.request(e)) {
    one.unlock();
    return concluded(s);
  }
  late.open = true;
  late.batch = batch;
  late.used = used.size();
  late.shm_addresses.swap(keys);
  return FRUGAL_OK;
}

// --- The step ------------------------------------------------------------------------------------

Status RemoteTrainer::inside() {
  if (in_step) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  Status s = ask(e);
  return s == FRUGAL_OK ? fail(FRUGAL_ERR_NOT_IN_STEP,
                               "rank %u is not inside a step: call step_begin first", rank)
                        : s;
}

Status RemoteTrainer::abort() {
  Exchange e{Call::kAbort, {}, {}};
  FRUGAL_TRY(ask(e));
  begun.store(kNoStep);
  leave_step();
  return FRUGAL_OK;
}

void RemoteTrainer::leave_step() {
  if (gpu) gpu->take_device_work();  // waits until the device has done with it
  in_step = end.begun = false;
  forget_used();
  parts.clear();
  used.clear();
  pushes.clear();
  reads.clear();
  end.shm_addresses.clear();
  end.sums.clear();
  lent.clear();
}

Status RemoteTrainer::take_parts(Channel& from, uint64_t bytes, uint64_t until,
                                 const Vector<Access*>* asked) {
  if (bytes % sizeof(PartAddress))
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent half a part");
  Vector<PartAddress> answered(bytes / sizeof(PartAddress));
  FRUGAL_TRY(from.read(answered.data(), bytes, until));
  for (size_t i = 0; i < answered.size(); ++i) {
    const PartAddress& p = answered[i];
    StepPart s;
    s.batch = p.batch;
    s.index = p.index;
    if (asked)
      s.table = i < asked->size() ? (*asked)[i]->table : nullptr;
    else if (auto b = batches.find(p.batch);
             b != batches.end() && p.index < b->second->tables.size())
      s.table = b->second->tables[p.index];
    s.whole = p.flags & kPartWhole;
    s.up_to_date = p.flags & kPartUpToDate;
    s.cached = p.flags & kPartCached;
    s.stale_keys = p.stale;
    auto see = [&](uint64_t at_address, uint64_t count, size_t element, Buffer* out) -> Status {
      if (at_address == kNoShmAddress || count > UINT64_MAX / element) return FRUGAL_OK;
      const char* at;
      FRUGAL_TRY(controller_.regions().find(at_address, count * element, &reads, &at));
      *out = Buffer::view(at, count * element);
      return FRUGAL_OK;
    };
    s.part = make_part();
    s.part->step = step;
    s.part->rank = rank;
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
    Buffer cached_row;
    FRUGAL_TRY(see(p.cached_values, 1, sizeof(device::Element), &cached_row));
    s.cached_values = cached_row.as<device::Element>();
    s.part->state.store(s.part->slots || p.n == 0 ? Part::kResolved : Part::kStale);
    parts.push_back(std::move(s));
  }
  return FRUGAL_OK;
}

// Rows of hashed tables exist once they have been used. The next request reports that to the
// controller. If another rank must know before, the controller reads the marks.
Status RemoteTrainer::use(const Vector<Access>& accesses) {
  used.reserve(used.size() + accesses.size());
  bool unmarked = false;
  for (const Access& a : accesses) {
    StepPart& p = parts[a.number];
    if (p.used) continue;
    p.used = true;
    if (!a.table->any_key) continue;
    used.push_back(static_cast<uint32_t>(a.number));
    unmarked = unmarked || a.number >= kMarkedParts;
    if (a.number >= kMarkedParts) continue;
    std::atomic<uint64_t>& marks = channel().counter(a.number / 64);
    marks.store(marks.load(std::memory_order_relaxed) | uint64_t{1} << a.number % 64,
                std::memory_order_release);
  }
  if (!unmarked) return FRUGAL_OK;
  Exchange e{Call::kInside, {}, {}};
  return ask(e);
}

void RemoteTrainer::forget_used() {
  const size_t n = std::min(parts.size(), kMarkedParts);
  for (size_t i = 0; i * 64 < n; ++i) channel().counter(i).store(0, std::memory_order_release);
}

void RemoteTrainer::trace(SpanKind span, uint64_t begin, uint64_t keys) noexcept {
  if (!traced.on || traced.events.size() >= kMostEvents) return;
  TraceEvent e;
  e.span = span;
  e.begin = begin;
  e.end = now_ns();
  e.step = step;
  e.count = keys;
  e.thread = trace_thread_number();
  try {
    traced.events.push_back(e);
  } catch (const std::bad_alloc&) {
  }
}

Status RemoteTrainer::share_sums() {
  Vector<PushAddress> placed;
  Vector<RankGradients> taken;
  Vector<RankGradients*> alone;
  placed.reserve(pushes.size());
  taken.reserve(pushes.size());
  alone.reserve(pushes.size());
  for (auto& [raw, push] : pushes) {
    if (push.table->dropped.load()) continue;
    PushAddress p{};
    p.table = static_cast<const RemoteTable&>(*push.table).id;
    RankGradients* h = &push.first;
    if (push.tail.empty()) {
      p.part = push.number;
      p.whole = h->whole;
      alone.push_back(h);
    } else {
      taken.emplace_back();
      h = &taken.back();
      FRUGAL_TRY(join_pushes(push, push.table->dim, rank, sums, sums, h));
      p.part = kJoined;
      p.distinct = h->part->distinct;
      if (p.distinct) p.rows = shm_address(h->part->rows);
    }
    if (h->part->distinct) p.sums = shm_address(h->sums);
    placed.push_back(p);
  }
  // Nothing fails from here on.
  for (RankGradients* h : alone) taken.push_back(std::move(*h));
  end.shm_addresses.swap(placed);
  end.sums.swap(taken);
  end.begun = true;
  return FRUGAL_OK;
}

device::RowsPtr RemoteTrainer::device_cached_rows(const AnyTable& table) const {
  const auto at = caches.tables.find(static_cast<const RemoteTable&>(table).id);
  return at == caches.tables.end() ? device::RowsPtr{} : at->second.cached_rows->at().device;
}

}  // namespace frugal
