#include "process/lane.h"

#include <algorithm>
#include <cstring>

#include "base/handles.h"
#include "engine/config_check.h"
#include "process/patience.h"

namespace frugal {
namespace {

constexpr uint64_t kSoonNs = 50000, kLookNs = 5000;  // to look for a request before sleeping

// What a request takes memory for before it has come: items of a list at a time, bytes of a buffer.
constexpr size_t kListPiece = 1024, kFirstBytes = size_t{4} << 20;

// Whether a request with that answer is one that a program makes which does its part: it is heard
// of. A wait whose time is up may be one of many short ones, for another rank or for the engine. No
// other failure is heard of, however often it comes: others wait for a rank for which nothing
// succeeds. (It is told once that a step was undone; Engine::aborted takes that for a sign.)
bool heard_of(Status s) { return s == FRUGAL_OK || s == FRUGAL_ERR_TIMEOUT; }

// Of memory for requests and answers so much is kept when a lane has had nothing to do for so long.
constexpr size_t kIdleBytes = size_t{32} << 20;
constexpr uint64_t kIdleNs = 20'000'000;

// Events of a trace that who only looks may have kept here: 32 MiB.
constexpr uint64_t kMostObserved = uint64_t{1} << 19;

// Pieces of an answer that tells of a failure.
constexpr size_t kFailurePieces = 2;

}  // namespace

Buffer Staging::lend(uint64_t offset, uint64_t bytes) {
  const char* data = offset % 64 == 0 ? channel_->staging_at(offset, bytes) : nullptr;
  if (!data || bytes == 0) return {};
  if (lent_.fetch_add(bytes) + bytes > channel_->staging_bytes()) {
    lent_.fetch_sub(bytes);
    return {};
  }
  users_.fetch_add(1);
  return Buffer::lent(data, bytes, this);
}

void Staging::give_back(char* data, size_t bytes) noexcept {
  lent_.fetch_sub(bytes);  // the trainer may have it lent again as soon as it is told
  channel_->release(static_cast<uint64_t>(data - channel_->staging_at(0, 0)));
  let_go();
}

Lane::Lane(std::shared_ptr<Engine> engine, TrainerRef trainer, std::shared_ptr<Channel> channel, bool observes,
           LaneOwner* owner, uint64_t peer)
    : engine_(std::move(engine)), trainer_(std::move(trainer)), channel_(std::move(channel)), observes_(observes),
      owner_(owner), peer_(peer) {}

Status Lane::start() {
  staging_ = new Staging(channel_);
  pieces_.reserve(kFailurePieces);  // to tell that there is no memory takes none
  FRUGAL_TRY(engine_->pool().get(sizeof(std::atomic<uint32_t>), &notices_));
  auto* notices = new (notices_.data()) std::atomic<uint32_t>(0);
  if (trainer_) {
    {
      std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
      trainer_->elsewhere = this;
    }
    trainer_->told_elsewhere.store(notices);
    trainer_->heard.store(now_ns());
  }
  try {
    thread_ = quiet_thread([this] { loop(); });
  } catch (...) {
    return no_thread("a thread for another channel");
  }
  return FRUGAL_OK;
}

Lane::~Lane() {
  cut();
  if (thread_.joinable()) thread_.join();
  if (trace_) engine_->forget_trace(trace_);
  if (trainer_) {
    trainer_->told_elsewhere.store(nullptr);
    std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
    if (trainer_->elsewhere == this) trainer_->elsewhere = nullptr;
  }
  if (staging_) staging_->let_go();
  parts_.clear();
  boundary_ = {};
  if (trainer_) engine_->pool().rest();
}

void Lane::loop() {
  // Who was only stopped learns of it when it goes on.
  struct Closing {
    Channel& channel;
    ~Closing() { channel.close(); }
  } closing{*channel_};
  serve();
  kept_.clear();
  engine_->own_pool().keep(kIdleBytes);
  // Nobody else would: its rank would stay taken until its process ends.
  if (owner_ && !cut_.load()) owner_->broken(peer_, trainer_);
}

Status Lane::receive(Header* request) {
  BufferPool& own = engine_->own_pool();
  if (own.bytes_kept() > kIdleBytes) {
    // What is left of a request that has failed comes in its own time: that is not idleness.
    FRUGAL_TRY(channel_->skip(channel_->payload_left(), UINT64_MAX));
    const Status s = channel_->receive(request, now_ns() + kIdleNs);
    if (s != FRUGAL_ERR_TIMEOUT) return s;
    own.keep(kIdleBytes);
  }
  return channel_->receive(request, UINT64_MAX);
}

void Lane::serve() {
  Header request;
  Patience patience(engine_->config().world_size, channel_.get());
  // Between two steps more follows at once; inside of one the trainer computes.
  bool between = false;
  Call last = Call::kInside;
  patience.set(last, kLookNs);
  while (receive(&request) == FRUGAL_OK) {
    patience.waited(last);
    if (trainer_) patience.follow(request.status);
    std::fill(std::begin(args_), std::end(args_), 0);
    const uint64_t began = now_ns();
    begin_call();
    Status status;
    try {
      status = handle(request);
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "the controller has no memory for the call");
    } catch (...) {
      status = fail(FRUGAL_ERR_INTERNAL, "unexpected failure in the controller; please report this");
    }
    end_call(status);
    const uint64_t now = now_ns();
    if (trainer_ && heard_of(status)) trainer_->heard.store(now);
    const Call call = static_cast<Call>(request.type);
    if (call == Call::kPrefetch && !request.args[3]) here_.prefetch_ns += now - began;
    if (call == Call::kStepBegin) here_.step_begin_ns += now - began;
    if (call == Call::kStepEnd) here_.step_end_ns += now - began;
    if (call != Call::kPrefetch) between = call == Call::kStepEnd;
    last = call;
    patience.set(call, between ? kSoonNs : kLookNs);
    Header answer{};
    answer.type = request.type | (channel_->together() ? kTogether : 0);
    answer.sequence = request.sequence;
    answer.status = static_cast<uint32_t>(status);
    Failure failure{};
    if (status == FRUGAL_OK) {
      std::copy(std::begin(args_), std::end(args_), answer.args);
    } else {
      frugal_error error;
      last_error(&error);
      failure = {error.system_code, error.device_code};
      pieces_.clear();
      add(&failure, sizeof failure);
      add(error.message, std::strlen(error.message));
    }
    // Who has broken the protocol is told why, if there is room for that.
    const uint64_t until = broken_ ? 0 : UINT64_MAX;
    if (channel_->send(answer, pieces_.data(), pieces_.size(), until) != FRUGAL_OK || broken_) return;
    pieces_.clear();
    kept_.clear();
    places_.clear();
  }
}

// The library cannot have sent it: the channel ends.
Status Lane::broken(const char* what) {
  broken_ = true;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "the controller refuses a request: %s", what);
}

// It names what is no part of the step. So may an honest one, where the step was undone and its
// trainer has not been told yet: it is now.
Status Lane::no_part(const char* what) {
  if (!trainer_->closing.load() && trainer_->abort_notice.load() == 0) return broken(what);
  return engine_->inside_step(*trainer_);
}

Status Lane::take(void* out, uint64_t bytes) {
  if (bytes > channel_->payload_left()) return broken("it is shorter than it says");
  return channel_->read(out, bytes, UINT64_MAX);
}

Status Lane::take_buffer(BufferPool& pool, uint64_t count, size_t element, Buffer* out) {
  // The pool looks at what is available before it takes more of that.
  if (count > UINT32_MAX) return broken("more than 2^32 - 1 keys, rows or bags");
  if (count > channel_->payload_left() / element) return broken("it is shorter than it says");
  const uint64_t bytes = count * element;
  // The buffer grows as its bytes come: who only says that they will takes no memory from the others.
  for (uint64_t have = 0; have < bytes;) {
    Buffer more;
    const uint64_t room = std::min(bytes, std::max<uint64_t>(kFirstBytes, 4 * have));
    FRUGAL_TRY(pool.get(room, &more));
    if (have) std::memcpy(more.data(), out->data(), have);
    FRUGAL_TRY(take(more.data() + have, room - have));
    *out = std::move(more);
    have = room;
  }
  return FRUGAL_OK;
}

template <class T>
Status Lane::take_list(uint64_t count, Vector<T>* out) {
  if (count > kMostOps || count > channel_->payload_left() / sizeof(T)) return broken("a list is too long");
  for (size_t have = 0, n; have < count; have += n) {
    n = std::min<size_t>(kListPiece, count - have);
    out->resize(have + n);
    FRUGAL_TRY(take(out->data() + have, n * sizeof(T)));
  }
  return FRUGAL_OK;
}

Status Lane::handle(const Header& request) {
  const Call call = static_cast<Call>(request.type);
  if (trainer_) {
    FRUGAL_TRY(take_used(request.args[4]));
    switch (call) {
      case Call::kPrefetch:
        return prefetch(request);
      case Call::kCancel: {
        auto at = batches_.find(request.args[0]);
        AnyBatchRef batch;
        if (at != batches_.end()) batch = object_of<AnyBatch>(reinterpret_cast<const void*>(at->second));
        if (!batch) return fail(FRUGAL_ERR_BAD_HANDLE, "the batch handle is closed: declare the rows again");
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
        return trainer_->lines_elsewhere ? FRUGAL_OK : broken("a rank on the cpu has no device to wait for");
      case Call::kInside:
        return engine_->inside_step(*trainer_);
      case Call::kMapped:
        FRUGAL_TRY(channel_->show_staging());
        shown_ = true;
        return FRUGAL_OK;
      case Call::kRead:
        return read(request);
      default:
        return broken("a trainer has no such call");
    }
  }
  if (observes_ && (call == Call::kPut || call == Call::kDelete || call == Call::kSetOptimizer))
    return fail(FRUGAL_ERR_UNSUPPORTED, "this process has attached with FRUGAL_OBSERVE, which only looks: open without it to change the engine");
  if (call == Call::kRead) return read(request);
  if (call == Call::kFlush) return engine_->flush({after_ns(request.args[0])});
  if (call == Call::kMetrics) {
    FRUGAL_TRY(engine_->metrics(&text_));
    add(text_.data(), text_.size());
    return FRUGAL_OK;
  }
  if (call == Call::kTraceStart) {
    if (observes_ && request.args[0] > kMostObserved)
      return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                  "events is %llu: with FRUGAL_OBSERVE it must be 1..%llu",
                  static_cast<unsigned long long>(request.args[0]),
                  static_cast<unsigned long long>(kMostObserved));
    return engine_->start_trace(request.args[0], &trace_);
  }
  if (call == Call::kTraceStop) {
    const uint64_t bytes = channel_->payload_left();
    if (bytes > kMostPath) return broken("a path of more than 4096 bytes");
    text_.resize(bytes);
    FRUGAL_TRY(take(text_.data(), bytes));
    return engine_->stop_trace(request.args[0] ? text_.c_str() : nullptr);
  }
  if (call == Call::kNextTable) {
    text_.clear();
    args_[0] = request.args[0];
    FRUGAL_TRY(engine_->next_table(&args_[0], &text_));
    add(text_.data(), text_.size());
    return FRUGAL_OK;
  }
  if (call < Call::kCount || call > Call::kDescribe) return broken("there is no such call");
  return rows_call(call, request);
}

// Parts that the trainer has looked up or pushed by itself: their rows come into being.
Status Lane::take_used(uint64_t count) {
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
  // The call itself tells what has become of the step; where that is undone nothing is taken.
  if (s != FRUGAL_OK) return s == FRUGAL_ERR_NOT_IN_STEP ? FRUGAL_OK : s;
  std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
  for (uint32_t at : numbers) parts_[at].used |= parts_[at].whole;
  return FRUGAL_OK;
}

// Before its process tells, which it does with its next request.
void Lane::tell() {
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

Status Lane::take_ops(uint64_t count, uint64_t of, bool declared, Ops* out) {
  Vector<OpHead> heads;
  FRUGAL_TRY(take_list(count, &heads));
  for (const OpHead& head : heads) out->numbers.at.push_back(head.number);
  out->numbers.of = of;
  static float nowhere;  // that there is an output is looked at, no more
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
    const size_t element = table && table->rows.keys_are_slots() ? sizeof(uint32_t) : sizeof(uint64_t);
    if (declared && head.place != kNoPlace) {
      if (head.keys <= UINT32_MAX) out->keys[i] = staging_->lend(head.place, head.keys * element);
      if (!out->keys[i]) return broken("keys lie outside of its memory");
    } else {
      FRUGAL_TRY(take_buffer(engine_->pool(), head.keys, element, &out->keys[i]));
    }
    op.count = head.keys;
    static const uint64_t none = 0;
    op.keys = head.keys ? out->keys[i].as<uint64_t>() : &none;
  }
  return FRUGAL_OK;
}

Status Lane::prefetch(const Header& request) {
  const uint64_t number = request.args[2];
  if (number == 0 || batches_.count(number)) return broken("a batch's number is in use");
  Ops ops;
  FRUGAL_TRY(take_ops(request.args[1], request.args[1], true, &ops));
  // Nothing fails when it is declared: the trainer would have its memory back, and others read it.
  decltype(batches_) made;
  uint64_t& handle = made[number];
  // Always with a handle: that is how the trainer finds the parts in its step.
  FRUGAL_TRY(engine_->prefetch(*trainer_, request.args[0], ops.ops.data(), ops.ops.size(), true, &handle,
                               ops.keys.data(), request.args[3] != 0));
  batches_.merge(made);
  return FRUGAL_OK;
}

Status Lane::step_begin(const Header& request) {
  {
    // Not while others look at those of the step before.
    std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
    parts_.clear();
  }
  const uint64_t step = request.args[0];
  FRUGAL_TRY(engine_->carried_out(*trainer_, request.args[2], request.args[3]));
  // Who begins the step again that it is inside of has not had the answer: for lack of memory, here or there.
  if (!engine_->is_inside(*trainer_, step))
    FRUGAL_TRY(engine_->step_begin(*trainer_, step, {after_ns(request.args[1])}));
  handed_over_ = kNoStep;
  // Those of steps that are committed are closed.
  std::erase_if(batches_, [](auto& item) { return !handle_get(HandleKind::kBatch, item.second); });
  Vector<RemotePart> parts;
  FRUGAL_TRY(engine_->declared_parts(*trainer_, &parts));
  Map<uint64_t, uint64_t> numbers;
  for (auto& [number, handle] : batches_) numbers[handle] = number;
  for (RemotePart& p : parts) p.batch = p.batch ? numbers[p.batch] : 0;
  {
    std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
    parts_.swap(parts);
  }
  args_[0] = engine_->tracing();
  args_[1] = parts_.size();
  FRUGAL_TRY(answer_parts(0));
  return answer_boundary();
}

// What the trainer is to do to lines that are its own.
Status Lane::answer_boundary() {
  RemoteBoundary made;
  engine_->take_boundary(*trainer_, &made);
  if (made.number == 0) return FRUGAL_OK;
  // The trainer has left the steps before, and its device reads nothing any more that they were given.
  boundary_ = std::move(made);
  lines_.clear();
  auto put = [&](const auto& item) {
    const char* bytes = reinterpret_cast<const char*>(&item);
    lines_.insert(lines_.end(), bytes, bytes + sizeof item);
  };
  auto place = [&](const Buffer& b) { return engine_->place(b.data()); };
  for (const RemoteBoundary::OfTable& of : boundary_.tables) {
    put(LinesPlace{of.table->handle, of.lines, place(of.admitted), place(of.to), of.count, of.updates.size()});
    for (const RemoteBoundary::Update& u : of.updates) {
      put(UpdatePlace{u.update->scalars, place(u.lines), place(u.start), place(u.terms), u.count, u.term_count, u.now,
                      u.update->ranks[0].stride, u.sums.size()});
      for (const RemoteBoundary::Sums& s : u.sums) put(SumsPlace{s.place, s.bytes});
    }
  }
  args_[2] = boundary_.number;
  args_[3] = boundary_.tables.size();
  add(lines_.data(), lines_.size());
  return FRUGAL_OK;
}

Status Lane::access(const Header& request) {
  if (request.args[1] > parts_.size()) return no_part("there are not so many parts");
  {
    // Those whose answer the trainer could not take, for lack of memory.
    std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
    parts_.erase(parts_.begin() + static_cast<ptrdiff_t>(request.args[1]), parts_.end());
  }
  Ops ops;
  FRUGAL_TRY(take_ops(request.args[0], request.args[2], false, &ops));
  Vector<RemotePart> found;
  FRUGAL_TRY(engine_->access_rows(*trainer_, ops.ops.data(), ops.numbers, &found));
  const size_t from = parts_.size();
  {
    std::lock_guard<std::mutex> lock(trainer_->elsewhere_mu);
    for (RemotePart& p : found) parts_.push_back(std::move(p));
  }
  args_[0] = from;
  return answer_parts(from);
}

Status Lane::answer_parts(size_t from) {
  for (size_t i = from; i < parts_.size(); ++i) {
    const RemotePart& r = parts_[i];
    Part& p = *r.part;
    // One that was not resolved ahead: nobody else will look at it. What is wrong with it is told where it is used.
    if (!p.resolved() && p.take_lent(engine_->pool(), r.table->rows) == FRUGAL_ERR_OUT_OF_MEMORY)
      return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for declared keys; call again");
    PartPlace place{};
    place.batch = r.batch;
    place.index = r.index;
    place.table = r.table->handle;
    place.n = p.n;
    place.padding = p.padding;
    place.stale = r.stale;
    place.flags = (p.has_padding ? kPartPadding : 0) | (r.whole ? kPartWhole : 0) | (r.fresh ? kPartFresh : 0) |
                  (r.cached ? kPartCached : 0);
    place.slots = place.pairs = place.rows = place.start = place.keys = place.sources = place.line_values = kNoPlace;
    // Where they are slots they are let go of when they are resolved, whenever that is.
    if (p.resolved() || !r.table->rows.keys_are_slots()) place.keys = engine_->place(p.keys.data());
    if (p.resolved()) {
      place.distinct = p.distinct;
      place.occurrences = p.occurrences;
      place.slots = engine_->place(p.slots.data());
      place.pairs = engine_->place(p.pairs.data());
      place.rows = engine_->place(p.rows.data());
      place.start = engine_->place(p.start.data());
      if (r.in_lines) {
        place.sources = engine_->place(p.sources.data());
        place.line_values = engine_->place(r.line_values);
        place.cached = p.cached;
      }
    }
    places_.push_back(place);
  }
  add(places_.data(), places_.size() * sizeof(PartPlace));
  return FRUGAL_OK;
}

// Rows of a part that was declared and not used may be reserved only: nobody writes to those.
bool Lane::may_push(const RemotePart& p, const TableRef& table) {
  return p.table == table && p.used && p.part->resolved();
}

// A list of rows that the trainer has made of several pushes: each of them is in a part of its step.
Status Lane::joined_part(const PushPlace& push, const TableRef& table, PartRef* out) {
  uint64_t most = 0;  // before memory is taken: what it says is no proof
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

Status Lane::step_end(const Header& request) {
  const uint64_t step = request.args[0], pushes = request.args[2];
  RemoteCounts counts;
  FRUGAL_TRY(take(&counts, sizeof counts));
  Vector<PushPlace> places;
  FRUGAL_TRY(take_list(pushes, &places));
  // The engine has counted the time inside its own calls; the way to it and back is what is left.
  for (auto of : {&RemoteCounts::prefetch_ns, &RemoteCounts::step_begin_ns, &RemoteCounts::step_end_ns})
    counts.*of -= std::min(counts.*of, here_.*of);
  here_ = {};
  engine_->count_remote(*trainer_, counts);
  // What the trainer has done by itself is part of the picture.
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
  // Who tries again has sent its sums already, and they are not its own any more.
  if (handed_over_ != step) {
    Vector<RemotePush> sums;
    sums.reserve(pushes);
    for (const PushPlace& place : places) {
      RemotePush p;
      FRUGAL_TRY(engine_->table_of(place.table, &p.table));
      for (const RemotePush& other : sums)
        if (other.table == p.table) return broken("two sums for a table");
      if (place.part == kJoined) {
        FRUGAL_TRY(joined_part(place, p.table, &p.part));
      } else {
        if (place.part >= parts_.size() || !may_push(parts_[place.part], p.table))
          return no_part("there is no such part of the table, or the step has not used it");
        p.part = parts_[place.part].part;
        p.whole = place.whole && parts_[place.part].whole;
      }
      const uint64_t bytes = p.part->distinct * p.table->rows.layout().sums_bytes();
      if (bytes) {
        if (!shown_) return broken("sums in memory that nobody else sees");
        p.sums = staging_->lend(place.sums, bytes);
        if (!p.sums) return broken("sums lie outside of its memory");
      }
      sums.push_back(std::move(p));
    }
    FRUGAL_TRY(engine_->hand_over(*trainer_, &sums));
    handed_over_ = step;
  }
  boundary_ = {};  // the trainer's device has done with it
  return engine_->step_end(*trainer_, step, static_cast<uint32_t>(request.args[1]));
}

Status Lane::read(const Header& request) {
  const uint64_t count = request.args[0];
  Vector<ReadHead> heads;
  FRUGAL_TRY(take_list(count, &heads));
  Vector<frugal_op> ops(count);
  Vector<Buffer> found(count), rows(count);
  kept_.reserve(5 * count);
  auto array = [&](uint64_t n, size_t element, auto** out) -> Status {
    static const uint64_t none[2] = {};
    Buffer b;
    FRUGAL_TRY(take_buffer(engine_->own_pool(), n, element, &b));
    *out = reinterpret_cast<std::remove_reference_t<decltype(*out)>>(n ? b.data() : reinterpret_cast<const char*>(none));
    kept_.push_back(std::move(b));
    return FRUGAL_OK;
  };
  for (uint64_t i = 0; i < count; ++i) {
    const ReadHead& head = heads[i];
    frugal_op& op = ops[i];
    op = FRUGAL_OP_INIT;
    TableRef table;
    FRUGAL_TRY(in_op(engine_->table_of(head.op.table, &table), i, count, table));
    op.table = reinterpret_cast<frugal_table*>(head.op.table);
    op.flags = head.op.flags;
    op.padding_key = head.op.padding_key;
    op.pooling = head.pooling;
    op.count = head.op.keys;
    FRUGAL_TRY(array(head.op.keys, sizeof(uint64_t), &op.keys));
    uint64_t outputs = head.op.keys;
    if (head.pooling != FRUGAL_POOL_NONE) {
      if (head.bags >= UINT32_MAX) return broken("too many bags");
      op.bags = outputs = head.bags;
      FRUGAL_TRY(array(head.bags + 1, sizeof(uint64_t), &op.offsets));
      if (head.has & kHasWeights) FRUGAL_TRY(array(head.op.keys, sizeof(float), &op.weights));
    }
    FRUGAL_TRY(engine_->own_pool().get(outputs * table->rows.layout().dim * sizeof(float) + 64, &rows[i]));
    op.rows_out = rows[i].as<float>();
    add(op.rows_out, outputs * table->rows.layout().dim * sizeof(float));
    if (head.has & kHasFound) {
      FRUGAL_TRY(engine_->own_pool().get(head.op.keys + 1, &found[i]));
      op.found_out = found[i].as<uint8_t>();
      add(op.found_out, head.op.keys);
    }
  }
  Status s = engine_->read(trainer_.get(), ops.data(), ops.size(), {after_ns(request.args[1])});
  for (Buffer& b : rows) kept_.push_back(std::move(b));
  for (Buffer& b : found) kept_.push_back(std::move(b));
  return s;
}

// Rows outside steps.
Status Lane::rows_call(Call call, const Header& request) {
  TableRef table;
  FRUGAL_TRY(engine_->table_of(request.args[0], &table));
  const uint64_t n = request.args[1];
  const uint32_t flags = static_cast<uint32_t>(request.args[2]);
  const RowLayout& layout = table->rows.layout();
  const size_t row_bytes = layout.exported_bytes(flags & FRUGAL_WITH_STATE);
  kept_.reserve(3);
  auto keys = [&](const uint64_t** out) -> Status {
    Buffer b;
    FRUGAL_TRY(take_buffer(engine_->own_pool(), n, sizeof(uint64_t), &b));
    *out = b.as<uint64_t>();
    kept_.push_back(std::move(b));
    return FRUGAL_OK;
  };
  auto room = [&](size_t bytes, char** out) -> Status {
    Buffer b;
    FRUGAL_TRY(engine_->own_pool().get(bytes, &b));
    *out = b.data();
    kept_.push_back(std::move(b));
    return FRUGAL_OK;
  };
  const uint64_t* given = nullptr;
  char* out = nullptr;
  switch (call) {
    case Call::kCount:
      return engine_->count(*table, &args_[0]);
    case Call::kKeys: {
      args_[0] = request.args[1];
      // Room for the rows that exist: a request names any number. One more key than none, since a row may come now.
      const size_t capacity = std::min(request.args[2], std::max<uint64_t>(1, table->rows.count()));
      FRUGAL_TRY(room(capacity * sizeof(uint64_t), &out));
      size_t found = 0;
      FRUGAL_TRY(engine_->keys(*table, &args_[0], reinterpret_cast<uint64_t*>(out), capacity, &found));
      args_[1] = found;
      add(out, found * sizeof(uint64_t));
      return FRUGAL_OK;
    }
    case Call::kGet: {
      FRUGAL_TRY(keys(&given));
      FRUGAL_TRY(room(n * row_bytes + 64, &out));
      char* found = nullptr;
      FRUGAL_TRY(room(n + 64, &found));
      FRUGAL_TRY(engine_->get(*table, given, n, flags, reinterpret_cast<float*>(out), row_bytes,
                              reinterpret_cast<uint8_t*>(found)));
      add(found, n);
      // Only rows that are there: what lies in the others' places is none of the caller's business.
      for (uint64_t i = 0; i < n;) {
        uint64_t end = i;
        while (end < n && found[end] == found[i]) ++end;
        if (found[i]) add(out + i * row_bytes, (end - i) * row_bytes);
        i = end;
      }
      return FRUGAL_OK;
    }
    case Call::kPut: {
      FRUGAL_TRY(keys(&given));
      Buffer rows;
      FRUGAL_TRY(take_buffer(engine_->own_pool(), n, row_bytes, &rows));
      const float* from = rows.as<float>();
      kept_.push_back(std::move(rows));
      return engine_->put(*table, given, n, flags, from, row_bytes);
    }
    case Call::kDelete:
      FRUGAL_TRY(keys(&given));
      return engine_->remove(*table, given, n, &args_[0]);
    case Call::kSetOptimizer: {
      frugal_optimizer optimizer;
      FRUGAL_TRY(take(&optimizer, sizeof optimizer));
      FRUGAL_TRY(check_optimizer(optimizer));
      return engine_->set_optimizer(*table, request.args[1], optimizer);
    }
    case Call::kDescribe: {
      FRUGAL_TRY(room(sizeof(frugal_table_info), &out));
      FRUGAL_TRY(engine_->describe(*table, reinterpret_cast<frugal_table_info*>(out)));
      add(out, sizeof(frugal_table_info));
      return FRUGAL_OK;
    }
    default:
      return FRUGAL_ERR_INTERNAL;
  }
}

}  // namespace frugal
