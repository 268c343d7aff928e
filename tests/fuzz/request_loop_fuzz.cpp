// Requests of a hostile trainer process, from bytes: valid ones with wrong counts, places, numbers
// of parts, lists of rows, marks of parts that were used, and payloads that end too early. The
// controller never crashes or hangs, nothing that no step has committed reaches a table, and the
// engine serves honest trainers afterwards.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/handles.h"
#include "fuzz/bytes.h"
#include "process/process_requests.h"
#include "process/trainer_requests.h"

namespace {

using namespace frugal;

constexpr size_t kRows = 300, kDim = 3;

// One engine for all inputs; rank 0 is honest, rank 1 the enemy.
struct World {
  std::shared_ptr<Engine> engine;
  TableRef tables[2];
  TrainerRef honest;
  uint64_t step = 0;
  std::vector<float> dense;  // rows of the first table as they should be

  World() {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.world_size = 2;
    c.backing = FRUGAL_BACKING_SHM;
    c.timeout_ms = 5000;
    engine = std::allocate_shared<Engine>(HeapAllocator<Engine>(), c);
    Check(engine->start() == FRUGAL_OK);
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "dense";
    t.rows = kRows;
    t.dim = kDim;
    t.optimizer.lr = 1;
    Check(engine->create_table(t, &tables[0], true) == FRUGAL_OK);
    t.name = "hashed";
    t.key_space = FRUGAL_HASHED;
    Check(engine->create_table(t, &tables[1], true) == FRUGAL_OK);
    honest = Join(0);
    dense.assign(kRows * kDim, 0);
    Step();  // the first rank that begins says which step that is
  }
  TrainerRef Join(uint32_t rank) {
    frugal_trainer_config c = FRUGAL_TRAINER_CONFIG_INIT;
    c.rank = rank;
    c.cache_ratio = rank == 1 ? 0.5 : 0;
    TrainerRef t;
    Check(engine->create_trainer(c, &t, false) == FRUGAL_OK);
    return t;
  }
  void Lose(const TrainerRef& t) {
    handle_remove(HandleKind::kTrainer, t->handle);
    Check(engine->lose_trainer(t) == FRUGAL_OK);
  }
  Status Get(std::vector<float>* rows, uint64_t* hashed) {
    std::vector<uint64_t> keys(kRows);
    for (size_t i = 0; i < kRows; ++i) keys[i] = i;
    rows->resize(kRows * kDim);
    Status s = engine->get(*tables[0], keys.data(), kRows, 0, rows->data(), 0, nullptr);
    return s == FRUGAL_OK ? engine->count(*tables[1], hashed) : s;
  }
  // What the honest rank reads depends on what the enemy says that it has used. Any result is
  // right.
  void Look() {
    const uint64_t keys[] = {0, 1, 2, 3};
    float rows[4 * kDim];
    frugal_op op = FRUGAL_OP_INIT;
    op.table = reinterpret_cast<frugal_table*>(tables[1]->handle);
    op.keys = keys;
    op.count = 4;
    op.rows_out = rows;
    (void)engine->read(honest.get(), &op, 1, {now_ns()});
  }
  // A step of two honest ranks, when the enemy is gone.
  void Step() {
    const TrainerRef other = Join(1);
    // Each loss of rank 1, and each abort that it has asked for, is reported once.
    Status s;
    do {
      s = engine->step_begin(*honest, step, engine->deadline(-1));
    } while (s == FRUGAL_ERR_PEER_LOST || s == FRUGAL_ERR_STEP_ABORTED);
    Check(s == FRUGAL_OK);
    Check(engine->step_begin(*other, step, engine->deadline(-1)) == FRUGAL_OK);
    const uint64_t key = step % kRows;
    const float grad[kDim] = {1, 2, 3};
    frugal_op op = FRUGAL_OP_INIT;
    op.table = reinterpret_cast<frugal_table*>(tables[0]->handle);
    op.keys = &key;
    op.count = 1;
    op.grads = grad;
    for (const TrainerRef& t : {honest, other}) {
      Check(engine->push(*t, &op, 1) == FRUGAL_OK);
      Check(engine->step_end(*t, step, 0) == FRUGAL_OK);
    }
    for (size_t i = 0; i < kDim; ++i) dense[key * kDim + i] -= 2 * grad[i];
    uint64_t committed = 0;
    Check(engine->committed(&committed) == FRUGAL_OK && committed == step);
    ++step;
    Lose(other);  // as if it had died: the next may take the rank at once
    std::vector<float> rows;
    uint64_t hashed = 0;
    Check(Get(&rows, &hashed) == FRUGAL_OK);
    Check(rows == dense && hashed == 0);
  }
};

class Enemy {
 public:
  Enemy(World& world, Bytes& in, Channel& channel, bool trainer)
      : world_(world), in_(in), channel_(channel), trainer_(trainer) {}

  // False: no more replies.
  bool Ask() {
    Header h{};
    parts_.clear();
    const uint64_t what = in_.Number(1);
    static const Call calls[] = {Call::kPrefetch,  Call::kStepBegin, Call::kAccess, Call::kStepEnd,
                                 Call::kAbort,     Call::kInside,    Call::kCancel, Call::kRead,
                                 Call::kStepBegin, Call::kPrefetch,  Call::kAccess, Call::kStepEnd};
    static const Call others[] = {Call::kCount,    Call::kKeys,         Call::kGet,
                                  Call::kDescribe, Call::kFlush,        Call::kMetrics,
                                  Call::kRead,     Call::kSetOptimizer, Call::kNextTable};
    const Call call = trainer_ ? calls[what % 12] : others[what % 9];
    h.type = what >= 250 ? static_cast<uint32_t>(Value()) : static_cast<uint32_t>(call);
    h.sequence = ++sequence_;
    const uint64_t used = trainer_ && in_.Number(1) % 4 == 0 ? in_.Number(1) % 4 : 0;
    for (uint64_t i = 0; i < used; ++i) Add(static_cast<uint32_t>(Near(3)));
    h.args[4] = Count(used);
    const uint64_t n = in_.Number(1) % 4;
    switch (call) {
      case Call::kPrefetch:
      case Call::kAccess:
        h.args[0] = call == Call::kAccess ? Count(n) : Near(world_.step + in_.Number(1) % 3);
        h.args[1] = Count(n);
        h.args[2] = Near(batch_ + 1);
        h.args[3] = call == Call::kPrefetch ? in_.Number(1) % 2 : 0;
        Ops(n, call == Call::kPrefetch);
        break;
      case Call::kStepBegin:
        h.args[0] = Near(step_);
        h.args[1] = in_.Number(1) % 8 == 0 ? Value() : 1000000;
        break;
      case Call::kStepEnd: {
        h.args[0] = Near(step_);
        h.args[1] = in_.Number(1) % 8 == 0 ? Value() : 0;
        h.args[2] = Count(n);
        Add(RemoteCounts{});
        for (uint64_t i = 0; i < n; ++i) {
          PushAddress p{};
          p.table = Table();
          p.sums = Place();
          p.rows = Place();
          p.distinct = Near(in_.Number(1) % 5);
          p.part =
              in_.Number(1) % 3 == 0 ? kJoined : static_cast<uint32_t>(Near(in_.Number(1) % 3));
          p.whole = static_cast<uint32_t>(in_.Number(1));
          Add(p);
        }
        const uint64_t events = in_.Number(1) % 4;
        h.args[3] = in_.Number(1) % 16 == 0 ? Value() : events;
        for (uint64_t i = 0; i < events; ++i) {
          TraceEvent e;
          e.span =
              in_.Number(1) % 8 == 0 ? static_cast<SpanKind>(in_.Number(1)) : SpanKind::kLookup;
          e.end = in_.Number(1) % 8 == 0 ? Value() : e.begin;
          Add(e);
        }
        break;
      }
      case Call::kRead:
        h.args[0] = Count(n);
        h.args[1] = 1000000;
        for (uint64_t i = 0; i < n; ++i) {
          ReadHead r{};
          r.op = Op();
          r.bags = Near(in_.Number(1) % 4);
          r.pooling = static_cast<int32_t>(in_.Number(1) % 4);
          r.has = static_cast<uint32_t>(in_.Number(1) % 4);
          Add(r);
        }
        Noise(in_.Number(1));
        break;
      default:
        h.args[0] = in_.Number(1) % 4 == 0  ? Value()
                    : call == Call::kCancel ? batch_
                    : call == Call::kFlush  ? 1000
                                            : Table();
        for (int i = 1; i < 4; ++i)
          h.args[i] = in_.Number(1) % 3 == 0 ? Value() : in_.Number(1) % 5;
        Noise(in_.Number(1));
    }
    if (in_.Number(1) % 8 == 0) parts_.resize(parts_.size() / 2);
    Noise(in_.Number(1) % 16 == 0 ? 64 : 0);
    // Marks of parts that were used, or are not there.
    if (trainer_ && in_.Number(1) % 4 == 0)
      channel_.counter(in_.Number(1) % 8 ? 0 : Channel::kCounters - 1).store(Value());
    if (trainer_ && in_.Number(1) % 4 == 0) world_.Look();
    const Piece piece{parts_.data(), parts_.size()};
    if (channel_.send(h, &piece, 1, now_ns() + 100000000) != FRUGAL_OK) return false;
    const bool ends = trainer_ && h.type == static_cast<uint32_t>(Call::kStepEnd);
    const bool declares = trainer_ && h.type == static_cast<uint32_t>(Call::kPrefetch);
    if (declares && h.args[2] == batch_ + 1) ++batch_;
    Header answer;
    if (channel_.receive(&answer, now_ns() + 50000000) != FRUGAL_OK) return false;
    if (answer.status == FRUGAL_OK) {
      if (ends) ++step_;
      ++taken_;
    }
    return true;
  }
  void At(uint64_t step) { step_ = step; }
  int taken() const { return taken_; }

 private:
  uint64_t Value() {
    const uint64_t kind = in_.Number(1);
    if (kind < 64) return kind;
    if (kind < 128) return uint64_t{1} << (kind % 64);
    if (kind < 160) return UINT64_MAX - kind % 16;
    if (kind < 200) return (uint64_t{1} << (kind % 64)) - 1;
    return in_.Number(8);
  }
  uint64_t Near(uint64_t right) { return in_.Number(1) % 8 == 0 ? Value() : right; }
  uint64_t Count(uint64_t right) { return in_.Number(1) % 16 == 0 ? Value() : right; }
  uint64_t Table() {
    const uint64_t which = in_.Number(1) % 16;
    return which == 0 ? Value() : world_.tables[which % 2]->handle;
  }
  uint64_t Place() { return in_.Number(1) % 6 == 0 ? Value() : in_.Number(1) * 64; }
  template <class T>
  void Add(const T& value) {
    const char* raw = reinterpret_cast<const char*>(&value);
    parts_.insert(parts_.end(), raw, raw + sizeof value);
  }
  void Noise(uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; ++i) parts_.push_back(static_cast<char>(in_.Number(1) % 8));
  }
  OpHead Op() {
    OpHead op{};
    op.table = Table();
    op.batch = in_.Number(1) % 3 == 0 ? Near(batch_) : 0;
    op.keys = Near(in_.Number(1) % 6);
    op.padding_key = in_.Number(1) % 4;
    op.part = static_cast<uint32_t>(Near(in_.Number(1) % 2));
    op.flags = static_cast<uint32_t>(in_.Number(1) % 3);
    op.given = in_.Number(1) % 4 != 0;
    op.shm_address = in_.Number(1) % 4 == 0 ? Place() : kNoShmAddress;
    return op;
  }
  void Ops(uint64_t n, bool declares) {
    std::vector<OpHead> heads;
    for (uint64_t i = 0; i < n; ++i) {
      heads.push_back(Op());
      Add(heads.back());
    }
    for (const OpHead& op : heads) {
      if (!op.given) continue;
      const bool slots = declares && op.table == world_.tables[0]->handle;
      char* staged = declares && op.shm_address < channel_.staging_bytes() / 2
                         ? channel_.staging() + op.shm_address
                         : nullptr;
      for (uint64_t k = 0; k < op.keys && k < 6; ++k) {
        const uint64_t key = in_.Number(1) % 64 == 0 ? Value() : in_.Number(1);
        const size_t bytes = slots ? sizeof(uint32_t) : sizeof(uint64_t);
        if (staged)
          std::memcpy(staged + k * bytes, &key, bytes);
        else if (slots)
          Add(static_cast<uint32_t>(key));
        else
          Add(key);
      }
    }
  }

  World& world_;
  Bytes& in_;
  Channel& channel_;
  const bool trainer_;
  std::vector<char> parts_;
  uint64_t sequence_ = 0, batch_ = 0, step_ = 0;
  int taken_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World* world = new World;  // lives as long as the process
  Bytes in{data, size};
  const bool as_trainer = in.Number(1) % 8 != 0;
  std::unique_ptr<Channel> made, mine;
  std::shared_ptr<StagingMemory> staging;
  Check(StagingMemory::make(size_t{2} << 20, nullptr, &staging) == FRUGAL_OK);
  Check(Channel::create(size_t{64} << 10, staging, &made) == FRUGAL_OK);
  Check(Channel::attach(dup(made->up_fd()), dup(made->down_fd()), dup(made->staging_fd()), &mine) ==
        FRUGAL_OK);
  Check(mine->commit_staging(0, 65536) == FRUGAL_OK);
  // Lists of rows among what lies there.
  for (size_t i = 0; i < 16384; ++i) {
    const uint32_t row = static_cast<uint32_t>(i % 16 * (1 + i / 16 % 3));
    std::memcpy(mine->staging() + i * 4, &row, 4);
  }
  const TrainerRef trainer = as_trainer ? world->Join(1) : nullptr;
  int taken = 0;
  {
    std::shared_ptr<Channel> channel(std::move(made));
    std::unique_ptr<RequestLoop> request_loop;
    if (trainer)
      request_loop.reset(new TrainerRequestLoop(world->engine, trainer, std::move(channel)));
    else
      request_loop.reset(new ProcessRequestLoop(world->engine, std::move(channel), false));
    Check(request_loop->start() == FRUGAL_OK);
    Enemy enemy(*world, in, *mine, as_trainer);
    if (as_trainer) {
      Header shown{}, answer;
      shown.type = static_cast<uint32_t>(Call::kMapped);
      Check(mine->send(shown, nullptr, 0, UINT64_MAX) == FRUGAL_OK);
      Check(mine->receive(&answer, UINT64_MAX) == FRUGAL_OK && answer.status == FRUGAL_OK);
    }
    enemy.At(world->step);
    while (in.left > 0 && enemy.Ask()) {
    }
    taken = enemy.taken();
    request_loop->cut();
    if (trainer) world->Lose(trainer);
    Check(world->engine->flush({UINT64_MAX}) == FRUGAL_OK);
  }
  world->Step();
  return taken > 0 ? 0 : -1;
}
