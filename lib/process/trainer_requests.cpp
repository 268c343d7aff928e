#include "process/trainer_requests.h"

#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "process/spin_policy.h"

namespace frugal {
namespace {

// Whether a request with this status shows life: a program that does its part makes such requests.
// A wait whose time is up may be one of many short ones, for another rank or for the engine. No
// other failure shows life, however often it comes: others wait for a rank for which nothing
// succeeds. (A call that reports an undone step does so once; Engine::aborted takes that for a sign
// of life.)
bool heard_of(Status s) { return s == FRUGAL_OK || s == FRUGAL_ERR_TIMEOUT; }

}  // namespace

Status TrainerRequestLoop::start() {
  staging_ = new Staging(channel_);
  FRUGAL_TRY(engine_->pool().get(sizeof(std::atomic<uint32_t>), &notices_));
  auto* notices = new (notices_.data()) std::atomic<uint32_t>(0);
  {
    Lock lock(trainer_->process.mu);
    trainer_->process.used = this;
  }
  trainer_->process.notices.store(notices);
  trainer_->process.heard.store(now_ns());
  return RequestLoop::start();
}

TrainerRequestLoop::~TrainerRequestLoop() {
  end();
  trainer_->process.notices.store(nullptr);
  {
    Lock lock(trainer_->process.mu);
    if (trainer_->process.used == this) trainer_->process.used = nullptr;
  }
  if (staging_) staging_->drop_reference();
  parts_.clear();
  refresh_ = {};
  engine_->pool().rest();
}

void TrainerRequestLoop::begins(const Header& request, SpinPolicy& spin_policy) {
  spin_policy.follow(request.status);
  part_addresses_.clear();
}

void TrainerRequestLoop::answered(const Header& request, Status status, uint64_t began,
                                  uint64_t now) {
  if (heard_of(status)) trainer_->process.heard.store(now);
  const Call call = static_cast<Call>(request.type);
  if (call == Call::kPrefetch && !request.args[3]) here_.prefetch_ns += now - began;
  if (call == Call::kStepBegin) here_.step_begin_ns += now - began;
  if (call == Call::kStepEnd) here_.step_end_ns += now - began;
}

// The request names what is no part of the step. So may an honest trainer, if the step was undone
// and it has not been notified: it is now.
Status TrainerRequestLoop::no_part(const char* what) {
  if (!trainer_->closing.load() && trainer_->abort_notice.load() == 0) return broken(what);
  return engine_->inside_step(*trainer_);
}

Status TrainerRequestLoop::handle(const Header& request) {
  const Call call = static_cast<Call>(request.type);
  FRUGAL_TRY(take_used(request.args[4]));
  switch (call) {
    case Call::kPrefetch:
      return prefetch(request);
    case Call::kCancel: {
      auto at = batches_.find(request.args[0]);
      AnyBatchRef batch;
      if (at != batches_.end())
        batch = object_of<AnyBatch>(reinterpret_cast<const void*>(at->second));
      if (!batch)
        return fail(FRUGAL_ERR_BAD_HANDLE, "the batch handle is closed: declare the rows again");
      FRUGAL_TRY(engine_->cancel(*trainer_, batch));
      batches_.erase(at);
      return FRUGAL_OK;
    }
    case Call::kStepBegin:
      return step_begin(request);
    case Call::kAccess:
      return access(request);
    case Call::kStepEnd:
      return step_end(request);
    case Call::kAbort:
      return request.args[0] ? engine_->remote_failed(*trainer_) : engine_->abort_call(*trainer_);
    case Call::kHere:
      return trainer_->remote_cached_rows.exist
                 ? FRUGAL_OK
                 : broken("a rank on the cpu has no device to wait for");
    case Call::kInside:
      return engine_->inside_step(*trainer_);
    case Call::kMapped:
      FRUGAL_TRY(channel_->show_staging());
      shown_ = true;
      return FRUGAL_OK;
    case Call::kRead:
      return read(request, trainer_.get());
    default:
      return broken("a trainer has no such call");
  }
}

// Takes parts that the trainer has looked up or pushed by itself: their rows exist from now on.
Status TrainerRequestLoop::take_used(uint64_t count) {
  if (count == 0) return FRUGAL_OK;
  if (count > parts_.size()) return no_part("there are not so many parts");
  Vector<uint32_t> numbers(count);
  FRUGAL_TRY(take(numbers.data(), count * sizeof(uint32_t)));
  Vector<RemotePart> used;
  used.reserve(count);
  for (uint32_t at : numbers) {
    if (at >= parts_.size()) return no_part("there is no such part");
    if (parts_[at].whole) used.push_back(parts_[at]);
  }
  const Status s = engine_->use_parts(*trainer_, used);
  // The call itself reports what has become of the step. If it is undone, nothing is taken.
  if (s != FRUGAL_OK) return s == FRUGAL_ERR_NOT_IN_STEP ? FRUGAL_OK : s;
  Lock lock(trainer_->process.mu);
  for (uint32_t at : numbers) parts_[at].used |= parts_[at].whole;
  return FRUGAL_OK;
}

// Takes used parts before the process reports them, which it does with its next request.
void TrainerRequestLoop::tell() {
  static_assert(kMarkedParts == 64 * Channel::kCounters);
  Vector<RemotePart> used;
  const size_t n = std::min(parts_.size(), kMarkedParts);
  for (size_t i = 0; i < n; i += 64) {
    const uint64_t marks = channel_->counter_value(i / 64);
    for (size_t k = i; marks && k < std::min(n, i + 64); ++k)
      if (marks >> (k - i) & 1 && parts_[k].whole) used.push_back(parts_[k]);
  }
  if (!used.empty()) engine_->use_marked(*trainer_, used);
}

Status TrainerRequestLoop::take_ops(uint64_t count, uint64_t of, bool declared, Ops* out) {
  Vector<OpHead> heads;
  FRUGAL_TRY(take_list(count, &heads));
  for (const OpHead& head : heads) out->numbers.at.push_back(head.number);
  out->numbers.of = of;
  static constinit float nowhere = 0;  // only that there is an output is checked
  out->ops.resize(count);
  out->keys.resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    const OpHead& head = heads[i];
    frugal_op& op = out->ops[i];
    op = FRUGAL_OP_INIT;
    op.table = reinterpret_cast<frugal_table*>(head.table);
    if (head.batch) {
      auto at = batches_.find(head.batch);
      if (at == batches_.end())
        return in_op(fail(FRUGAL_ERR_BAD_HANDLE, "the batch could not be declared, or is closed"),
                     head.number, of, TableRef());
      op.batch = reinterpret_cast<const frugal_batch*>(at->second);
    }
    op.part = head.part;
    op.flags = head.flags;
    op.padding_key = head.padding_key;
    op.rows_out = &nowhere;
    if (!head.given) continue;
    TableRef table;
    if (declared) FRUGAL_TRY(in_op(engine_->table_of(head.table, &table), head.number, of, table));
    const size_t element =
        table && table->rows.keys_are_slots() ? sizeof(uint32_t) : sizeof(uint64_t);
    if (declared && head.shm_address != kNoShmAddress) {
      if (head.keys <= UINT32_MAX)
        out->keys[i] = staging_->lend(head.shm_address, head.keys * element);
      if (!out->keys[i]) return broken("keys lie outside of its memory");
    } else {
      FRUGAL_TRY(take_buffer(engine_->pool(), head.keys, element, &out->keys[i]));
    }
    op.count = head.keys;
    static constexpr uint64_t none = 0;
    op.keys = head.keys ? out->keys[i].as<uint64_t>() : &none;
  }
  return FRUGAL_OK;
}

Status TrainerRequestLoop::prefetch(const Header& request) {
  const uint64_t number = request.args[2];
  if (number == 0 || batches_.count(number)) return broken("a batch's number is in use");
  Ops ops;
  FRUGAL_TRY(take_ops(request.args[1], request.args[1], true, &ops));
  // Nothing may fail once it is declared: the trainer would reuse its memory while others read it.
  decltype(batches_) made;
  uint64_t& handle = made[number];
  // Always with a handle: that is how the trainer finds the parts in its step.
  FRUGAL_TRY(engine_->prefetch(*trainer_, request.args[0], ops.ops.data(), ops.ops.size(), true,
                               &handle, ops.keys.data(), request.args[3] != 0));
  batches_.merge(made);
  return FRUGAL_OK;
}

Status TrainerRequestLoop::step_begin(const Header& request) {
  {
    // Not while other threads read those of the step before.
    Lock lock(trainer_->process.mu);
    parts_.clear();
  }
  const uint64_t step = request.args[0];
  FRUGAL_TRY(engine_->carried_out(*trainer_, request.args[2], request.args[3]));
  // A trainer that begins again the step that it is inside has not taken the reply: for lack of
  // memory, here or there.
  if (!engine_->is_inside(*trainer_, step))
    FRUGAL_TRY(engine_->step_begin(*trainer_, step, {after_ns(request.args[1])}));
  submitted_ = kNoStep;
  // Batches of steps that are committed are closed.
  std::erase_if(batches_, [](auto& item) { return !handle_get(HandleKind::kBatch, item.second); });
  Vector<RemotePart> parts;
  FRUGAL_TRY(engine_->declared_parts(*trainer_, &parts));
  Map<uint64_t, uint64_t> numbers;
  for (auto& [number, handle] : batches_) numbers[handle] = number;
  for (RemotePart& p : parts) p.batch = p.batch ? numbers[p.batch] : 0;
  {
    Lock lock(trainer_->process.mu);
    parts_.swap(parts);
  }
  args_[0] = engine_->tracing();
  args_[1] = parts_.size();
  FRUGAL_TRY(answer_parts(0));
  return answer_refresh();
}

// Adds to the reply what the trainer is to do to its own cached rows.
Status TrainerRequestLoop::answer_refresh() {
  RemoteRefresh made;
  engine_->take_refresh(*trainer_, &made);
  if (made.number == 0) return FRUGAL_OK;
  // The trainer has left the steps before, and its device reads nothing any more that those steps
  // were given.
  refresh_ = std::move(made);
  cached_rows_.clear();
  auto put = [&](const auto& item) {
    const char* bytes = reinterpret_cast<const char*>(&item);
    cached_rows_.insert(cached_rows_.end(), bytes, bytes + sizeof item);
  };
  auto shm_address = [&](const Buffer& b) { return engine_->shm_address(b.data()); };
  for (const RemoteRefresh::OfTable& of : refresh_.tables) {
    put(CachedRowsAddress{of.table->handle, of.cache_slots, shm_address(of.admitted),
                          shm_address(of.to), of.count, of.updates.size()});
    for (const RemoteRefresh::Update& u : of.updates) {
      put(UpdateAddress{u.update->scalars, shm_address(u.cache_slots), shm_address(u.start),
                        shm_address(u.terms), u.count, u.term_count, u.now,
                        u.update->ranks[0].stride, u.sums.size()});
      for (const RemoteRefresh::Sums& s : u.sums) put(SumsAddress{s.shm_address, s.bytes});
    }
  }
  args_[2] = refresh_.number;
  args_[3] = refresh_.tables.size();
  add(cached_rows_.data(), cached_rows_.size());
  return FRUGAL_OK;
}

Status TrainerRequestLoop::access(const Header& request) {
  if (request.args[1] > parts_.size()) return no_part("there are not so many parts");
  {
    // Drops parts whose reply the trainer could not take, for lack of memory.
    Lock lock(trainer_->process.mu);
    parts_.erase(parts_.begin() + static_cast<ptrdiff_t>(request.args[1]), parts_.end());
  }
  Ops ops;
  FRUGAL_TRY(take_ops(request.args[0], request.args[2], false, &ops));
  Vector<RemotePart> found;
  FRUGAL_TRY(engine_->access_rows(*trainer_, ops.ops.data(), ops.numbers, &found));
  const size_t from = parts_.size();
  {
    Lock lock(trainer_->process.mu);
    for (RemotePart& p : found) parts_.push_back(std::move(p));
  }
  args_[0] = from;
  return answer_parts(from);
}

Status TrainerRequestLoop::answer_parts(size_t from) {
  for (size_t i = from; i < parts_.size(); ++i) {
    const RemotePart& r = parts_[i];
    Part& p = *r.part;
    // It was not resolved ahead, and no other thread will do that. What is wrong with it is
    // reported where it is used.
    if (!p.resolved() && p.take_lent(engine_->pool(), r.table->rows) == FRUGAL_ERR_OUT_OF_MEMORY)
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for declared keys; call again");
    PartAddress shm_address{};
    shm_address.batch = r.batch;
    shm_address.index = r.index;
    shm_address.table = r.table->handle;
    shm_address.n = p.n;
    shm_address.padding = p.padding;
    shm_address.stale = r.stale;
    shm_address.flags = (p.has_padding ? kPartPadding : 0) | (r.whole ? kPartWhole : 0) |
                        (r.up_to_date ? kPartUpToDate : 0) | (r.cached ? kPartCached : 0);
    shm_address.slots = shm_address.pairs = shm_address.rows = shm_address.start =
        shm_address.keys = shm_address.sources = shm_address.cached_values = kNoShmAddress;
    // Keys that are slots are released when they are resolved, whenever that is.
    if (p.resolved() || !r.table->rows.keys_are_slots())
      shm_address.keys = engine_->shm_address(p.keys.data());
    if (p.resolved()) {
      shm_address.distinct = p.distinct;
      shm_address.occurrences = p.occurrences;
      shm_address.slots = engine_->shm_address(p.slots.data());
      shm_address.pairs = engine_->shm_address(p.pairs.data());
      shm_address.rows = engine_->shm_address(p.rows.data());
      shm_address.start = engine_->shm_address(p.start.data());
      if (r.in_cached_rows) {
        shm_address.sources = engine_->shm_address(p.sources.data());
        shm_address.cached_values = engine_->shm_address(r.cached_values);
        shm_address.cached = p.cached;
      }
    }
    part_addresses_.push_back(shm_address);
  }
  add(part_addresses_.data(), part_addresses_.size() * sizeof(PartAddress));
  return FRUGAL_OK;
}

// Rows of a part that was declared and not used may only be reserved: no push may write to them.
bool TrainerRequestLoop::may_push(const RemotePart& p, const TableRef& table) {
  return p.table == table && p.used && p.part->resolved();
}

// Takes a list of rows that the trainer has joined from several pushes. Each of them must be in a
// part of its step.
Status TrainerRequestLoop::joined_part(const PushAddress& push, const TableRef& table,
                                       PartRef* out) {
  uint64_t most = 0;  // checked before memory is taken: the request's number is no proof
  for (const RemotePart& p : parts_)
    if (may_push(p, table)) most += p.part->distinct;
  if (push.distinct > most) return no_part("more rows than the step has used");
  const uint64_t bytes = push.distinct * sizeof(uint32_t);
  const char* rows = push.rows % 4 == 0 ? channel_->staging_at(push.rows, bytes) : nullptr;
  if (!rows) return broken("a list of rows lies outside of its memory");
  PartRef part = make_part();
  part->rank = trainer_->rank;
  part->step = trainer_->step;
  part->distinct = push.distinct;
  FRUGAL_TRY(engine_->pool().get(bytes, &part->rows));
  if (bytes) std::memcpy(part->rows.data(), rows, bytes);
  const uint32_t* slots = part->row_slots();
  for (size_t i = 0; i < part->distinct; ++i) {
    if (i && slots[i] <= slots[i - 1]) return broken("rows do not ascend");
    bool named = false;
    for (const RemotePart& p : parts_)
      named = named || (may_push(p, table) && p.part->contains(slots[i]));
    if (!named) return no_part("a row that is in no part which the step has used");
  }
  *out = std::move(part);
  return FRUGAL_OK;
}

Status TrainerRequestLoop::step_end(const Header& request) {
  const uint64_t step = request.args[0], pushes = request.args[2];
  RemoteCounts counts;
  FRUGAL_TRY(take(&counts, sizeof counts));
  Vector<PushAddress> shm_addresses;
  FRUGAL_TRY(take_list(pushes, &shm_addresses));
  // The engine has counted the time inside its own calls; the way to it and back is what is left.
  for (auto of :
       {&RemoteCounts::prefetch_ns, &RemoteCounts::step_begin_ns, &RemoteCounts::step_end_ns})
    counts.*of -= std::min(counts.*of, here_.*of);
  here_ = {};
  engine_->count_remote(*trainer_, counts);
  // A trace includes what the trainer has done by itself.
  if (request.args[3] > kMostEvents) return broken("too many events");
  TraceEvent events[kMostEvents];
  FRUGAL_TRY(take(events, request.args[3] * sizeof(TraceEvent)));
  for (uint64_t i = 0; i < request.args[3]; ++i) {
    TraceEvent& e = events[i];
    if ((e.span != SpanKind::kLookup && e.span != SpanKind::kPush) || e.begin > e.end)
      return broken("an event that cannot be");
    if (e.end > now_ns()) continue;  // a container may have a clock of its own
    e.rank = trainer_->rank;
    e.table = kNoTraceTable;
    e.worker = 0;
    e.waited = 0;
    engine_->trace_remote(e);
  }
  // A trainer that tries again has sent its sums before; the engine has them.
  if (submitted_ != step) {
    Vector<RemotePush> sums;
    sums.reserve(pushes);
    for (const PushAddress& shm_address : shm_addresses) {
      RemotePush p;
      FRUGAL_TRY(engine_->table_of(shm_address.table, &p.table));
      for (const RemotePush& other : sums)
        if (other.table == p.table) return broken("two sums for a table");
      if (shm_address.part == kJoined) {
        FRUGAL_TRY(joined_part(shm_address, p.table, &p.part));
      } else {
        if (shm_address.part >= parts_.size() || !may_push(parts_[shm_address.part], p.table))
          return no_part("there is no such part of the table, or the step has not used it");
        p.part = parts_[shm_address.part].part;
        p.whole = shm_address.whole && parts_[shm_address.part].whole;
      }
      const uint64_t bytes = p.part->distinct * p.table->rows.layout().sums_bytes();
      if (bytes) {
        if (!shown_) return broken("sums in staging memory that is not sealed");
        p.sums = staging_->lend(shm_address.sums, bytes);
        if (!p.sums) return broken("sums lie outside of its memory");
      }
      sums.push_back(std::move(p));
    }
    FRUGAL_TRY(engine_->submit_gradients(*trainer_, &sums));
    submitted_ = step;
  }
  refresh_ = {};  // the trainer's device has done with it
  return engine_->step_end(*trainer_, step, static_cast<uint32_t>(request.args[1]));
}

}  // namespace frugal
