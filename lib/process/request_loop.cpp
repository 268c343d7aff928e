#include "process/request_loop.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "process/spin_policy.h"

namespace frugal {
namespace {

constexpr uint64_t kSoonNs = 50000, kLookNs = 5000;  // to poll for a request before sleeping

// So much memory for requests and replies is kept when a request loop has been idle for so long.
constexpr size_t kIdleBytes = size_t{32} << 20;
constexpr uint64_t kIdleNs = 20'000'000;

// Pieces of a reply that reports a failure.
constexpr size_t kFailurePieces = 2;

}  // namespace

RequestLoop::RequestLoop(std::shared_ptr<Engine> engine, std::shared_ptr<Channel> channel,
                         RequestLoopOwner* owner, uint64_t peer)
    : engine_(std::move(engine)), channel_(std::move(channel)), owner_(owner), peer_(peer) {}

RequestLoop::~RequestLoop() = default;

Status RequestLoop::start() {
  pieces_.reserve(kFailurePieces);  // to report that there is no memory takes none
  try {
    thread_ = quiet_thread([this] { loop(); });
  } catch (...) {
    return no_thread("a thread for another channel");
  }
  return FRUGAL_OK;
}

void RequestLoop::end() noexcept {
  cut();
  if (thread_.joinable()) thread_.join();
}

void RequestLoop::begins(const Header&, SpinPolicy&) {}
void RequestLoop::answered(const Header&, Status, uint64_t, uint64_t) {}

void RequestLoop::loop() {
  // A peer that was only suspended notices this when it goes on.
  struct Closing {
    Channel& channel;
    ~Closing() { channel.close(); }
  } closing{*channel_};
  serve();
  kept_.clear();
  engine_->own_pool().keep(kIdleBytes);
  // Without this its rank would stay taken until its process ends.
  if (owner_ && !cut_.load()) owner_->broken(peer_, of_trainer());
}

Status RequestLoop::receive(Header* request) {
  BufferPool& own = engine_->own_pool();
  if (own.bytes_kept() > kIdleBytes) {
    // The rest of a request that has failed may come slowly: that is not idleness.
    FRUGAL_TRY(channel_->skip(channel_->payload_left(), UINT64_MAX));
    const Status s = channel_->receive(request, now_ns() + kIdleNs);
    if (s != FRUGAL_ERR_TIMEOUT) return s;
    own.keep(kIdleBytes);
  }
  return channel_->receive(request, UINT64_MAX);
}

void RequestLoop::serve() {
  Header request;
  SpinPolicy spin_policy(engine_->config().world_size, channel_.get());
  // Between two steps more follows at once; inside of one the trainer computes.
  bool between = false;
  Call last = Call::kInside;
  spin_policy.set(last, kLookNs);
  while (receive(&request) == FRUGAL_OK) {
    spin_policy.waited(last);
    FRUGAL_ASSERT(pieces_.empty() && kept_.empty());  // of the reply before
    begins(request, spin_policy);
    std::fill(std::begin(args_), std::end(args_), 0);
    const uint64_t began = now_ns();
    begin_call();
    Status status;
    try {
      status = handle(request);
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "the controller has no memory for the call");
    } catch (...) {
      status =
          fail(FRUGAL_ERR_INTERNAL, "unexpected failure in the controller; please report this");
    }
    end_call(status);
    answered(request, status, began, now_ns());
    const Call call = static_cast<Call>(request.type);
    if (call != Call::kPrefetch) between = call == Call::kStepEnd;
    last = call;
    spin_policy.set(call, between ? kSoonNs : kLookNs);
    if (answer(request, status) != FRUGAL_OK || broken_) return;
    pieces_.clear();
    kept_.clear();
  }
}

Status RequestLoop::answer(const Header& request, Status status) {
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
  // A peer that has broken the protocol gets the reason, if there is room for it.
  return channel_->send(answer, pieces_.data(), pieces_.size(), broken_ ? 0 : UINT64_MAX);
}

// The library cannot have sent such a request: the channel ends.
Status RequestLoop::broken(const char* what) {
  broken_ = true;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "the controller refuses a request: %s", what);
}

Status RequestLoop::take(void* out, uint64_t bytes) {
  if (bytes > channel_->payload_left()) return broken("it is shorter than it says");
  return channel_->read(out, bytes, UINT64_MAX);
}

Status RequestLoop::take_buffer(BufferPool& pool, uint64_t count, size_t element, Buffer* out) {
  // The pool checks what is available before it takes more of it.
  if (count > UINT32_MAX) return broken("more than 2^32 - 1 keys, rows or bags");
  if (count > channel_->payload_left() / element) return broken("it is shorter than it says");
  const uint64_t bytes = count * element;
  // The buffer grows as its bytes come: a peer that only announces them takes no memory from
  // others.
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

// The reply's pieces are in buffers of `kept_`.
Status RequestLoop::read(const Header& request, Trainer* trainer) {
  const uint64_t count = request.args[0];
  Vector<ReadHead> heads;
  FRUGAL_TRY(take_list(count, &heads));
  Vector<frugal_op> ops(count);
  Vector<Buffer> found(count), rows(count);
  kept_.reserve(5 * count);
  auto array = [&](uint64_t n, size_t element, auto** out) -> Status {
    static constexpr uint64_t none[2] = {};
    Buffer b;
    FRUGAL_TRY(take_buffer(engine_->own_pool(), n, element, &b));
    *out = reinterpret_cast<std::remove_reference_t<decltype(*out)>>(
        n ? b.data() : reinterpret_cast<const char*>(none));
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
    FRUGAL_TRY(
        engine_->own_pool().get(outputs * table->rows.layout().dim * sizeof(float) + 64, &rows[i]));
    op.rows_out = rows[i].as<float>();
    add(op.rows_out, outputs * table->rows.layout().dim * sizeof(float));
    if (head.has & kHasFound) {
      FRUGAL_TRY(engine_->own_pool().get(head.op.keys + 1, &found[i]));
      op.found_out = found[i].as<uint8_t>();
      add(op.found_out, head.op.keys);
    }
  }
  Status s = engine_->read(trainer, ops.data(), ops.size(), {after_ns(request.args[1])});
  for (Buffer& b : rows) kept_.push_back(std::move(b));
  for (Buffer& b : found) kept_.push_back(std::move(b));
  return s;
}

}  // namespace frugal
