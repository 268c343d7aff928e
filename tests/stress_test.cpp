// Random calls of several threads while ranks, tables and the engine close: only documented
// statuses, no hang, no torn or foreign row.
//
// Ranks join, leave and are closed by other threads. Steps are aborted, and tables are dropped and
// created again. At a random moment the engine is closed concurrently with all of it. The test
// checks what holds in any order of events:
//
// - A call returns only a status that frugal.h names for it, and only where that status is
//   possible. For instance, CLOSED and BAD_HANDLE need an earlier close or drop.
// - No call hangs.
// - No row is torn or another key's. Most tables hold whole numbers: the elements of a row are n,
//   and the first is n x a factor of the key. Puts write such rows, gradients are such rows, and
//   SGD with a rate of 1 keeps them so. In the other tables all elements of a row are equal.
// - Without staleness a row is the same each time that a step reads it.
// - At the end nothing is pending, and a table has room for as many rows as it reports.
//
//    stress_test [--seeds N] [--first SEED] [--verbose] [gtest's arguments]
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "frugal.h"
#include "oracle/random.h"
#include "support/never.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FRUGAL_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define FRUGAL_TEST_SANITIZED 1
#endif
#endif

namespace {

using frugal_oracle::Random;

#ifdef FRUGAL_TEST_SANITIZED
uint64_t seeds = 12;
#else
uint64_t seeds = 40;
#endif
uint64_t first_seed = 1;
bool verbose = false;

// How often a call returned a status: what never happened was not tested.
using Tally = std::map<std::pair<std::string, int32_t>, uint64_t>;
Tally all_answers;

constexpr uint64_t kFirstStep = 7;
const float kNan = std::numeric_limits<float>::quiet_NaN();

void Pause(uint64_t microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// --- Hangs ---------------------------------------------------------------------------------------

// A thread's current call. The watchdog counts its own ticks: a machine that stops for a while
// stops them, too.
struct Beat {
  std::atomic<uint64_t> calls{0};
  std::atomic<const char*> doing{nullptr};  // null: no call
};

class Watchdog {
 public:
  Watchdog(uint64_t seed, const std::vector<std::unique_ptr<Beat>>& beats)
      : seed_(seed), beats_(beats), thread_([this] { Watch(); }) {}
  ~Watchdog() {
    done_ = true;
    thread_.join();
  }

 private:
  static constexpr int kTicks = 9000;  // of 10 ms

  void Watch() {
    std::vector<std::pair<uint64_t, int>> last(beats_.size());
    while (!done_) {
      Pause(10000);
      for (size_t i = 0; i < beats_.size(); ++i) {
        const uint64_t calls = beats_[i]->calls;
        if (calls != last[i].first || beats_[i]->doing.load() == nullptr) {
          last[i] = {calls, 0};
        } else if (++last[i].second >= kTicks) {
          Report(i);
        }
      }
    }
  }
  [[noreturn]] void Report(size_t hung) {
    std::printf("HANGS seed %" PRIu64
                ": thread %zu does not come back\n  repeat: stress_test --seeds 1 "
                "--first %" PRIu64 "\n",
                seed_, hung, seed_);
    for (size_t i = 0; i < beats_.size(); ++i) {
      const char* doing = beats_[i]->doing;
      std::printf("  thread %zu: %s, call %" PRIu64 "\n", i, doing ? doing : "between calls",
                  beats_[i]->calls.load());
    }
    std::fflush(stdout);
    _exit(3);
  }

  const uint64_t seed_;
  const std::vector<std::unique_ptr<Beat>>& beats_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// --- A run ---------------------------------------------------------------------------------------

struct TableSpec {
  std::string name;
  bool hashed = false, lazy = false;
  bool numbers = true;  // whole numbers with a factor, else equal elements
  int32_t optimizer = FRUGAL_SGD;
  uint32_t dim = 2;
  uint64_t capacity = 0, universe = 0;
  uint64_t salt = 0;
  // A thread that drops it takes the handle away first, and counts. Only a thread that has the
  // handle from before may find that it is bad.
  std::atomic<frugal_table*> handle{nullptr};
  std::atomic<uint64_t> drops{0};

  uint32_t StateFloats() const {
    switch (optimizer) {
      case FRUGAL_ADAGRAD:
        return dim;
      case FRUGAL_ROWWISE_ADAGRAD:
        return 1;
      case FRUGAL_ADAM:
        return 2 * dim;
      default:
        return 0;
    }
  }
  uint64_t Key(uint64_t i) const {
    if (!hashed) return i;
    if (i == 0) return 0;
    if (i == 1) return UINT64_MAX;
    return (i + salt) * 0x9e3779b97f4a7c15u;
  }
};

// A table as a thread has found it.
struct TableUse {
  TableSpec* spec = nullptr;
  uint64_t drops = 0;
  frugal_table* handle = nullptr;
  bool Dropped() const { return spec->drops.load() != drops; }
};

// One life of a rank, which other threads may end.
struct Session {
  frugal_trainer* handle = nullptr;
  uint32_t rank = 0;
  std::atomic<bool> closed{false};  // set before it is closed
  std::mutex lent_mu;  // lent memory is gone when the trainer is closed: a thread that writes there
                       // holds this, and one that closes
};

// Rows of one table in one call.
struct RowOp {
  TableUse table;
  std::vector<uint64_t> ids, keys;
  std::vector<float> rows, grads;
  std::vector<uint8_t> found;
  std::vector<uint64_t> offsets;  // with factors
  std::vector<float> weights, weight_grads;
  frugal_op op = FRUGAL_OP_INIT;
};

struct Declared {
  frugal_batch* batch = nullptr;
  uint64_t step = 0;
  std::vector<std::unique_ptr<RowOp>> ops;
};

class Scene {
 public:
  explicit Scene(uint64_t seed);
  void Execute();

 private:
  // One thread's calls.
  class Caller {
   public:
    Caller(Scene& run, uint64_t seed, Beat* beat) : run_(run), random_(seed), beat_(beat) {}
    void TrainerLoop(uint32_t rank);
    void OutsideLoop();

   private:
    friend class Scene;
    struct Life {  // of a trainer
      Session* session;
      uint64_t next = 0;
      bool over = false;  // it is closed, by whomever
      std::vector<Declared> declared;
      std::map<std::pair<const TableSpec*, uint64_t>, std::array<float, 2>> seen;  // in this step
    };
    enum class In { kGoesOn, kAborted, kOver };

    int32_t Answer(const char* call, int32_t status, std::initializer_list<int32_t> own);
    void Doing(const char* call);
    void Fault(const char* call, int32_t status, const char* why);
    bool Use(TableUse* use);
    std::unique_ptr<RowOp> MakeOp(const TableUse& use, size_t keys);
    void Gradients(RowOp* op, size_t rows);
    void CheckRow(const TableSpec& spec, uint64_t id, const float* row, const char* call);
    void CheckRows(const RowOp& op, const char* call);
    In Told(Life* life, const char* call, int32_t status, std::initializer_list<int32_t> own,
            const std::vector<std::unique_ptr<RowOp>>* ops = nullptr);
    void Live(std::shared_ptr<Session> session);
    In Declare(Life* life, uint64_t step);
    In CancelOne(Life* life);
    In ReadRows(Life* life, bool inside);
    const Declared* DeclaredFor(const Life& life, uint64_t step);
    In Lookup(Life* life, uint64_t step);
    In Push(Life* life, uint64_t step);
    In Inside(Life* life, uint64_t step);
    void ReadStep(Life* life);
    void Leave(Session* session);
    void OutsideCall();
    void EngineCall(const char* call, int32_t status, std::initializer_list<int32_t> own);
    void TableCall(const TableUse& use, const char* call, int32_t status,
                   std::initializer_list<int32_t> own);
    void CreateTable(TableSpec* spec);
    void DropTable(TableSpec* spec);
    void CloseSomebody();

    Scene& run_;
    Random random_;
    Beat* beat_;
    Tally answers_;
  };

  void FinalChecks(Caller* caller);

  const uint64_t seed_;
  Random random_;
  frugal_config config_ = FRUGAL_CONFIG_INIT;
  bool orderly_ = false;   // the engine is closed when all others have ended
  size_t most_keys_ = 24;  // of an op
  double cached_ = 0;      // share of trainers with a cache
  frugal_engine* engine_ = nullptr;
  std::array<TableSpec, 4> tables_;
  std::mutex sessions_mu_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<std::unique_ptr<std::atomic<bool>>> joined_;
  std::atomic<uint64_t> begun_{0};               // latest step that some rank has begun
  std::atomic<uint64_t> hold_from_{UINT64_MAX};  // trainers begin no step from this one on
  std::atomic<bool> stop_{false};
  std::atomic<bool> closing_{false};  // set before frugal_close
  std::atomic<uint64_t> calls_{0};
  std::mutex fault_mu_;
  std::string fault_;
};

Scene::Scene(uint64_t seed) : seed_(seed), random_(seed) {
  config_.world_size = static_cast<uint32_t>(random_.Between(1, 3));
  config_.lookahead = static_cast<uint32_t>(random_.OneOf({0, 1, 4, 10}));
  config_.flush_threads = static_cast<uint32_t>(random_.Below(4));
  config_.flush_mode = static_cast<int32_t>(random_.Below(5));
  config_.staleness = random_.OneOf<uint64_t>({0, 0, 3, FRUGAL_STALENESS_ASYNC});
  config_.pending_bytes = random_.OneOf<uint64_t>({0, 4096, uint64_t{1} << 30});
  config_.backing = random_.Chance(0.2) ? FRUGAL_BACKING_SHM : FRUGAL_BACKING_PRIVATE;
  config_.timeout_ms = kNeverMs;
  config_.seed = seed;
  cached_ = random_.OneOf({0.0, 0.5, 1.0});
  // In a few runs work is shared out in chunks, too.
  const bool large = random_.Chance(0.15);
  if (large) most_keys_ = 4000;
  for (size_t i = 0; i < tables_.size(); ++i) {
    TableSpec& t = tables_[i];
    t.name = std::string("table") + static_cast<char>('0' + i);
    t.hashed = i >= 2;
    t.lazy = i == 1;
    t.numbers = i == 0 || i == 2 || random_.Chance(0.5);
    if (!t.numbers)
      t.optimizer = random_.OneOf({FRUGAL_ADAGRAD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_ADAM});
    t.dim = static_cast<uint32_t>(random_.OneOf({2, 5, 16, 32, 70}));
    t.universe = large ? random_.Between(1000, 6000) : random_.Between(8, 48);
    // A hashed table may be too small for all.
    t.capacity =
        t.hashed ? std::max<uint64_t>(4, t.universe * random_.Between(7, 15) / 10) : t.universe;
    t.salt = random_.Next() >> 32;
  }
  for (uint32_t r = 0; r < config_.world_size; ++r)
    joined_.push_back(std::make_unique<std::atomic<bool>>(false));
}

// --- Results -------------------------------------------------------------------------------------

void Scene::Caller::Doing(const char* call) {
  beat_->doing = call;
  ++beat_->calls;
}

void Scene::Caller::Fault(const char* call, int32_t status, const char* why) {
  frugal_error error;
  frugal_last_error(&error);
  const std::lock_guard<std::mutex> lock(run_.fault_mu_);
  if (run_.fault_.empty()) {
    run_.fault_ = std::string(call) + " returned " + frugal_status_name(status) + ": " + why;
    if (status != FRUGAL_OK) run_.fault_ += std::string(" (") + error.message + ")";
  }
  run_.stop_ = true;
}

// BAD_HANDLE and CLOSED are for the callers to judge: they know who may have closed what.
int32_t Scene::Caller::Answer(const char* call, int32_t status,
                              std::initializer_list<int32_t> own) {
  beat_->doing = nullptr;
  ++run_.calls_;
  ++answers_[{call, status}];
  if (status == FRUGAL_OK || status == FRUGAL_ERR_BAD_HANDLE || status == FRUGAL_ERR_CLOSED)
    return status;
  for (int32_t s : own)
    if (s == status) return status;
  Fault(call, status, "not a status that it may return here");
  return status;
}

void Scene::Caller::EngineCall(const char* call, int32_t status,
                               std::initializer_list<int32_t> own) {
  Answer(call, status, own);
  if ((status == FRUGAL_ERR_BAD_HANDLE || status == FRUGAL_ERR_CLOSED) && !run_.closing_)
    Fault(call, status, "the engine is not closed");
}

void Scene::Caller::TableCall(const TableUse& use, const char* call, int32_t status,
                              std::initializer_list<int32_t> own) {
  Answer(call, status, own);
  if (status == FRUGAL_ERR_BAD_HANDLE && (use.Dropped() || run_.closing_)) return;
  if (status == FRUGAL_ERR_CLOSED && run_.closing_) return;
  if (status == FRUGAL_ERR_BAD_HANDLE || status == FRUGAL_ERR_CLOSED)
    Fault(call, status, "the table is not dropped, nor the engine closed");
}

// What a trainer's call has returned. `ops`: their tables may have been dropped.
Scene::Caller::In Scene::Caller::Told(Life* life, const char* call, int32_t status,
                                      std::initializer_list<int32_t> own,
                                      const std::vector<std::unique_ptr<RowOp>>* ops) {
  Answer(call, status, own);
  if (status == FRUGAL_ERR_STEP_ABORTED) return In::kAborted;
  if (status != FRUGAL_ERR_BAD_HANDLE && status != FRUGAL_ERR_CLOSED) return In::kGoesOn;
  if (life->session->closed || run_.closing_) {
    life->over = true;
    return In::kOver;
  }
  if (status == FRUGAL_ERR_BAD_HANDLE && ops)
    for (const auto& op : *ops)
      if (op->table.Dropped()) return In::kGoesOn;
  Fault(call, status, "trainer and engine are not closed, and no table is dropped");
  return In::kOver;
}

// --- Rows ----------------------------------------------------------------------------------------

bool Scene::Caller::Use(TableUse* use) {
  use->spec = &run_.tables_[random_.Below(run_.tables_.size())];
  use->drops = use->spec->drops;
  use->handle = use->spec->handle;
  return use->handle != nullptr;
}

std::unique_ptr<RowOp> Scene::Caller::MakeOp(const TableUse& use, size_t keys) {
  auto op = std::make_unique<RowOp>();
  const TableSpec& spec = *use.spec;
  op->table = use;
  for (size_t i = 0; i < keys; ++i) {
    op->ids.push_back(random_.Below(spec.universe));
    op->keys.push_back(spec.Key(op->ids.back()));
  }
  op->rows.assign(keys * spec.dim, kNan);
  op->found.assign(keys, 2);
  op->op.table = use.handle;
  op->op.keys = op->keys.data();
  op->op.count = keys;
  op->op.rows_out = op->rows.data();
  return op;
}

float Factor(uint64_t id) { return static_cast<float>(id % 61 + 1); }

// A row that holds `n` for a key.
void Fill(const TableSpec& spec, uint64_t id, float n, float* row) {
  for (uint32_t d = 0; d < spec.dim; ++d) row[d] = n;
  if (spec.numbers) row[0] = n * Factor(id);
}

void Scene::Caller::Gradients(RowOp* op, size_t rows) {
  const TableSpec& spec = *op->table.spec;
  op->grads.resize(rows * spec.dim);
  for (size_t i = 0; i < rows; ++i)
    Fill(spec, op->ids[i], static_cast<float>(random_.Between(0, 6)) - 3, &op->grads[i * spec.dim]);
  op->op.grads = op->grads.data();
}

void Scene::Caller::CheckRow(const TableSpec& spec, uint64_t id, const float* row,
                             const char* call) {
  bool right = spec.numbers ? row[0] == row[1] * Factor(id) : row[0] == row[1];
  for (uint32_t d = 2; d < spec.dim; ++d) right = right && row[d] == row[1];
  if (right) return;
  std::ostringstream text;
  text << "row of id " << id << " of " << spec.name
       << (spec.numbers ? " (numbers)" : " (equal elements)") << " is";
  for (uint32_t d = 0; d < spec.dim; ++d) text << " " << row[d];
  Fault(call, FRUGAL_OK, text.str().c_str());
}

void Scene::Caller::CheckRows(const RowOp& op, const char* call) {
  const TableSpec& spec = *op.table.spec;
  for (size_t i = 0; i < op.ids.size(); ++i)
    CheckRow(spec, op.ids[i], &op.rows[i * spec.dim], call);
}

// --- A trainer -----------------------------------------------------------------------------------

void Scene::Caller::TrainerLoop(uint32_t rank) {
  while (!run_.stop_) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = rank;
    if (random_.Chance(run_.cached_)) config.cache_ratio = random_.OneOf({0.1, 0.5, 1.0});
    frugal_trainer* trainer = nullptr;
    Doing("frugal_trainer_create");
    const int32_t status = frugal_trainer_create(run_.engine_, &config, &trainer);
    EngineCall("frugal_trainer_create", status, {FRUGAL_ERR_EXISTS, FRUGAL_ERR_BUSY});
    if (status == FRUGAL_ERR_BAD_HANDLE || status == FRUGAL_ERR_CLOSED) return;
    if (status != FRUGAL_OK) {
      Pause(random_.Below(300));
      if (random_.Chance(0.2)) OutsideCall();
      continue;
    }
    *run_.joined_[rank] = true;
    auto session = std::make_shared<Session>();
    session->handle = trainer;
    session->rank = rank;
    {
      const std::lock_guard<std::mutex> lock(run_.sessions_mu_);
      run_.sessions_.push_back(session);
    }
    Live(session);
    Leave(session.get());
    const std::lock_guard<std::mutex> lock(run_.sessions_mu_);
    std::erase(run_.sessions_, session);
  }
}

void Scene::Caller::Leave(Session* session) {
  if (session->closed.exchange(true)) return;
  const std::lock_guard<std::mutex> lock(session->lent_mu);
  Doing("frugal_trainer_close");
  EngineCall("frugal_trainer_close", frugal_trainer_close(session->handle), {});
}

// The step after the last committed one: this rank has not ended it, so no thread commits it.
void Scene::Caller::ReadStep(Life* life) {
  uint64_t committed = FRUGAL_NO_STEP;
  Doing("frugal_committed_step");
  const int32_t status = frugal_committed_step(run_.engine_, &committed);
  EngineCall("frugal_committed_step", status, {});
  if (status != FRUGAL_OK) life->over = true;
  life->next = committed == FRUGAL_NO_STEP ? kFirstStep : committed + 1;
  life->seen.clear();
}

void Scene::Caller::Live(std::shared_ptr<Session> session) {
  Life life;
  life.session = session.get();
  ReadStep(&life);
  for (uint64_t steps = random_.Between(0, 12); steps > 0 && !life.over && !run_.stop_; --steps) {
    for (uint64_t i = random_.Below(4); i > 0 && !life.over; --i) {
      In in = In::kGoesOn;
      switch (random_.Weighted({6, 1, 1})) {
        case 0:
          in = Declare(&life, life.next + random_.Below(run_.config_.lookahead + 1));
          break;
        case 1:
          in = CancelOne(&life);
          break;
        default:
          in = ReadRows(&life, false);
      }
      if (in == In::kAborted) ReadStep(&life);
    }
    // Another thread wants a moment between steps.
    for (int i = 0; i < 50 && life.next >= run_.hold_from_ && !run_.stop_ && !life.over; ++i) {
      if (random_.Chance(0.1) && ReadRows(&life, false) == In::kAborted) ReadStep(&life);
      Pause(50);
    }
    bool inside = false;
    for (uint64_t tries = random_.Between(1, 40); tries > 0 && !life.over && !inside && !run_.stop_;
         --tries) {
      const int64_t wait = random_.OneOf<int64_t>({0, 1, 3, 10});
      Doing("frugal_step_begin");
      const int32_t status = frugal_step_begin(session->handle, life.next, wait);
      const In in =
          Told(&life, "frugal_step_begin", status, {FRUGAL_ERR_TIMEOUT, FRUGAL_ERR_STEP_ABORTED});
      if (in == In::kAborted) ReadStep(&life);
      inside = status == FRUGAL_OK;
    }
    if (!inside) continue;
    for (uint64_t most = run_.begun_;
         most < life.next && !run_.begun_.compare_exchange_weak(most, life.next);) {
    }
    const uint64_t step = life.next;
    life.next = step + 1;
    life.seen.clear();
    const In in = Inside(&life, step);
    if (in == In::kAborted) ReadStep(&life);
    std::erase_if(life.declared, [&](const Declared& d) { return d.step + 40 < life.next; });
    if (random_.Chance(0.1)) Pause(random_.Below(500));
  }
}

Scene::Caller::In Scene::Caller::Declare(Life* life, uint64_t step) {
  Declared d;
  d.step = step;
  std::vector<frugal_op> ops;
  for (uint64_t i = random_.Between(1, 3); i > 0; --i) {
    TableUse use;
    if (!Use(&use)) continue;
    d.ops.push_back(MakeOp(use, random_.Below(run_.most_keys_ + 1)));
    ops.push_back(d.ops.back()->op);
  }
  Doing("frugal_prefetch");
  const int32_t status =
      frugal_prefetch(life->session->handle, step, ops.data(), ops.size(), &d.batch);
  const In in = Told(life, "frugal_prefetch", status, {FRUGAL_ERR_STEP_ABORTED}, &d.ops);
  if (status == FRUGAL_OK) life->declared.push_back(std::move(d));
  return in;
}

Scene::Caller::In Scene::Caller::CancelOne(Life* life) {
  if (life->declared.empty()) return In::kGoesOn;
  const size_t i = random_.Below(life->declared.size());
  if (life->declared[i].step < life->next) return In::kGoesOn;
  Doing("frugal_prefetch_cancel");
  const int32_t status = frugal_prefetch_cancel(life->session->handle, life->declared[i].batch);
  const In in = Told(life, "frugal_prefetch_cancel", status, {FRUGAL_ERR_STEP_ABORTED});
  if (status == FRUGAL_OK) life->declared.erase(life->declared.begin() + static_cast<long>(i));
  return in;
}

Scene::Caller::In Scene::Caller::ReadRows(Life* life, bool inside) {
  TableUse use;
  if (!Use(&use)) return In::kGoesOn;
  std::vector<std::unique_ptr<RowOp>> ops;
  ops.push_back(MakeOp(use, random_.Between(1, run_.most_keys_)));
  RowOp& op = *ops[0];
  op.op.found_out = op.found.data();
  Doing("frugal_read");
  const int32_t status =
      frugal_read(run_.engine_, life->session->handle, &op.op, 1,
                  inside ? FRUGAL_TIMEOUT_DEFAULT : random_.OneOf<int64_t>({0, 1, 5}));
  In in;
  if (inside)
    in = Told(life, "frugal_read", status, {FRUGAL_ERR_STEP_ABORTED}, &ops);
  else
    in = Told(life, "frugal_read", status, {FRUGAL_ERR_STEP_ABORTED, FRUGAL_ERR_TIMEOUT}, &ops);
  if (status == FRUGAL_OK) CheckRows(op, "frugal_read");
  return in;
}

// One of the declarations of the step, or none.
const Declared* Scene::Caller::DeclaredFor(const Life& life, uint64_t step) {
  const Declared* of = nullptr;
  for (const Declared& d : life.declared)
    if (d.step == step && !d.ops.empty() && random_.Chance(0.5)) of = &d;
  return of;
}

Scene::Caller::In Scene::Caller::Lookup(Life* life, uint64_t step) {
  std::vector<std::unique_ptr<RowOp>> rows;
  std::vector<frugal_op> ops;
  for (size_t i = random_.Between(1, 3); i > 0; --i) {
    const Declared* of = DeclaredFor(*life, step);
    TableUse use;
    if (of) {
      const uint32_t part = static_cast<uint32_t>(random_.Below(of->ops.size()));
      const RowOp& declared = *of->ops[part];
      rows.push_back(MakeOp(declared.table, 0));
      RowOp& op = *rows.back();
      op.ids = declared.ids;
      op.keys = declared.keys;
      op.rows.assign(op.ids.size() * declared.table.spec->dim, kNan);
      op.op.rows_out = op.rows.data();
      op.op.keys = op.keys.data();
      op.op.count = op.keys.size();
      if (random_.Chance(0.7)) {
        op.op.batch = of->batch;
        op.op.part = part;
        if (random_.Chance(0.7)) op.op.keys = nullptr;
      }
      if (op.keys.empty()) op.op.keys = &op.op.padding_key;  // none, but given
    } else {
      if (!Use(&use)) continue;
      rows.push_back(MakeOp(use, random_.Below(run_.most_keys_ + 1)));
      if (rows.back()->keys.empty()) rows.back()->op.keys = nullptr;
    }
    RowOp& op = *rows.back();
    if (op.table.spec->numbers && !of && random_.Chance(0.2) && !op.keys.empty()) {
      // The sum of several times the same row.
      std::fill(op.ids.begin(), op.ids.end(), op.ids[0]);
      std::fill(op.keys.begin(), op.keys.end(), op.keys[0]);
      op.ids.resize(1);
      op.offsets = {0, op.keys.size()};
      op.op.pooling = FRUGAL_POOL_SUM;
      op.op.offsets = op.offsets.data();
      op.op.bags = 1;
    }
    ops.push_back(op.op);
  }
  Doing("frugal_lookup");
  const int32_t status = frugal_lookup(life->session->handle, ops.data(), ops.size());
  const In in =
      Told(life, "frugal_lookup", status, {FRUGAL_ERR_STEP_ABORTED, FRUGAL_ERR_TABLE_FULL}, &rows);
  if (status != FRUGAL_OK) return in;
  for (const auto& op : rows) {
    CheckRows(*op, "frugal_lookup");
    if (run_.config_.staleness != 0 || op->op.pooling != FRUGAL_POOL_NONE) continue;
    const TableSpec& spec = *op->table.spec;
    for (size_t i = 0; i < op->ids.size(); ++i) {
      const std::array<float, 2> row = {op->rows[i * spec.dim], op->rows[i * spec.dim + 1]};
      const auto [at, added] = life->seen.emplace(std::make_pair(&spec, op->ids[i]), row);
      if (added || at->second == row) continue;
      std::ostringstream text;
      text << "row of id " << op->ids[i] << " of " << spec.name << " was " << at->second[1]
           << " in step " << step << ", and is " << row[1];
      Fault("frugal_lookup", status, text.str().c_str());
    }
  }
  return in;
}

Scene::Caller::In Scene::Caller::Push(Life* life, uint64_t step) {
  std::vector<std::unique_ptr<RowOp>> rows;
  std::vector<frugal_op> ops;
  for (size_t i = random_.Between(1, 3); i > 0; --i) {
    const Declared* of = DeclaredFor(*life, step);
    if (of) {
      const uint32_t part = static_cast<uint32_t>(random_.Below(of->ops.size()));
      const RowOp& declared = *of->ops[part];
      rows.push_back(MakeOp(declared.table, 0));
      rows.back()->ids = declared.ids;
      rows.back()->op.batch = of->batch;
      rows.back()->op.part = part;
      rows.back()->op.keys = nullptr;
    } else {
      TableUse use;
      if (!Use(&use)) continue;
      rows.push_back(MakeOp(use, random_.Between(1, run_.most_keys_)));
    }
    RowOp& op = *rows.back();
    const size_t keys = op.ids.size();
    Gradients(&op, keys);
    if (random_.Chance(0.2)) {
      // A bag for each key: the rows are read, too.
      op.offsets.resize(keys + 1);
      for (size_t k = 0; k <= keys; ++k) op.offsets[k] = k;
      op.weights.assign(keys, 1.0f);
      op.weight_grads.assign(keys, kNan);
      op.op.pooling = FRUGAL_POOL_SUM;
      op.op.offsets = op.offsets.data();
      op.op.bags = keys;
      op.op.weights = op.weights.data();
      op.op.weight_grads_out = op.weight_grads.data();
    } else if (run_.orderly_ && random_.Chance(0.2)) {
      const std::lock_guard<std::mutex> lock(life->session->lent_mu);
      void* lent = nullptr;
      Doing("frugal_borrow");
      const int32_t status =
          frugal_borrow(life->session->handle, op.grads.size() * sizeof(float), &lent);
      const In in = Told(life, "frugal_borrow", status, {FRUGAL_ERR_STEP_ABORTED});
      if (in != In::kGoesOn || status != FRUGAL_OK) return in;
      std::copy(op.grads.begin(), op.grads.end(), static_cast<float*>(lent));
      op.op.grads = static_cast<float*>(lent);
    }
    ops.push_back(op.op);
  }
  Doing("frugal_push_grad");
  const int32_t status = frugal_push_grad(life->session->handle, ops.data(), ops.size());
  const In in = Told(life, "frugal_push_grad", status,
                     {FRUGAL_ERR_STEP_ABORTED, FRUGAL_ERR_TABLE_FULL}, &rows);
  if (status != FRUGAL_OK) return in;
  for (const auto& op : rows) {
    const TableSpec& spec = *op->table.spec;
    for (size_t k = 0; k < op->weight_grads.size(); ++k) {
      // Row and gradient are multiples of the same numbers: so is their product.
      const float f = Factor(op->ids[k]), unit = f * f + static_cast<float>(spec.dim - 1);
      const float product = op->weight_grads[k];
      if (std::isnan(product) ||
          (spec.numbers && std::fabs(product) < 0x1p24f && std::fmod(product, unit) != 0))
        Fault("frugal_push_grad", status, "the gradient of a factor is of no whole row of the key");
    }
  }
  return in;
}

Scene::Caller::In Scene::Caller::Inside(Life* life, uint64_t step) {
  for (uint64_t i = random_.Below(7); i > 0; --i) {
    In in = In::kGoesOn;
    switch (random_.Weighted({8, 8, 2, 2, 1, 1, 1})) {
      case 0:
        in = Lookup(life, step);
        break;
      case 1:
        in = Push(life, step);
        break;
      case 2:
        in = ReadRows(life, true);
        break;
      case 3:
        if (run_.config_.lookahead)
          in = Declare(life, step + random_.Between(1, run_.config_.lookahead));
        break;
      case 4:
        Pause(random_.Below(300));
        break;
      case 5: {
        if (!random_.Chance(0.3)) break;
        Doing("frugal_step_abort");
        const int32_t status = frugal_step_abort(life->session->handle);
        in = Told(life, "frugal_step_abort", status, {FRUGAL_ERR_STEP_ABORTED});
        return in == In::kGoesOn ? In::kAborted : in;
      }
      default:
        if (!random_.Chance(0.3)) break;
        Leave(life->session);
        life->over = true;
        return In::kOver;
    }
    if (in != In::kGoesOn) return in;
  }
  Doing("frugal_step_end");
  return Told(
      life, "frugal_step_end",
      frugal_step_end(life->session->handle, step, random_.Chance(0.05) ? FRUGAL_STEP_SKIP : 0),
      {FRUGAL_ERR_STEP_ABORTED});
}

// --- Concurrently with the steps -----------------------------------------------------------------

void Scene::Caller::CreateTable(TableSpec* spec) {
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = spec->name.c_str();
  config.key_space = spec->hashed ? FRUGAL_HASHED : FRUGAL_DENSE;
  config.flags = spec->lazy ? FRUGAL_TABLE_LAZY : 0;
  config.rows = spec->capacity;
  config.dim = spec->dim;
  config.optimizer.kind = spec->optimizer;
  config.optimizer.lr = spec->numbers ? 1.0f : 0.01f;
  frugal_table* table = nullptr;
  Doing("frugal_table_create");
  const int32_t status = frugal_table_create(run_.engine_, &config, &table);
  EngineCall("frugal_table_create", status, {FRUGAL_ERR_EXISTS, FRUGAL_ERR_BUSY});
  if (status == FRUGAL_OK) spec->handle = table;
}

void Scene::Caller::DropTable(TableSpec* spec) {
  frugal_table* table = spec->handle.exchange(nullptr);
  if (!table) return;
  TableUse use{spec, spec->drops, table};
  ++spec->drops;
  Doing("frugal_table_drop");
  const int32_t status = frugal_table_drop(table);
  if (status == FRUGAL_ERR_BUSY) spec->handle = table;
  TableCall(use, "frugal_table_drop", status, {FRUGAL_ERR_BUSY});
  if (status == FRUGAL_ERR_BAD_HANDLE && !run_.closing_)
    Fault("frugal_table_drop", status, "no other thread drops it");
}

void Scene::Caller::CloseSomebody() {
  std::shared_ptr<Session> session;
  {
    const std::lock_guard<std::mutex> lock(run_.sessions_mu_);
    if (run_.sessions_.empty()) return;
    session = run_.sessions_[random_.Below(run_.sessions_.size())];
  }
  Leave(session.get());
}

void Scene::Caller::OutsideCall() {
  frugal_engine* engine = run_.engine_;
  TableUse use;
  const bool table = Use(&use);
  if (!table && use.spec && random_.Chance(0.7)) {
    CreateTable(use.spec);
    return;
  }
  const size_t what = random_.Weighted({6, 6, 3, 1, 1, 2, 4, 1, 1, 1, 1, 1, 1});
  if (what < 5 && !table) return;
  switch (what) {
    case 0: {
      auto op = MakeOp(use, random_.Between(1, run_.most_keys_));
      const bool state = random_.Chance(0.3);
      const size_t floats = use.spec->dim + (state ? use.spec->StateFloats() : 0);
      op->rows.assign(op->keys.size() * floats, kNan);
      Doing("frugal_get");
      const int32_t status =
          frugal_get(use.handle, op->keys.data(), op->keys.size(), state ? FRUGAL_WITH_STATE : 0,
                     op->rows.data(), 0, op->found.data());
      TableCall(use, "frugal_get", status, {FRUGAL_ERR_BUSY});
      if (status != FRUGAL_OK) break;
      for (size_t i = 0; i < op->ids.size(); ++i) {
        const float* row = &op->rows[i * floats];
        if (op->found[i] == 1) {
          CheckRow(*use.spec, op->ids[i], row, "frugal_get");
          for (size_t k = use.spec->dim; k < floats; ++k)
            if (row[k] != row[use.spec->dim + (k / use.spec->dim - 1) * use.spec->dim])
              Fault("frugal_get", status, "a row's state is torn");
        } else if (op->found[i] != 0 || !use.spec->hashed || !std::isnan(row[0]))
          Fault("frugal_get", status, "a row that is missing, or nearly");
      }
      break;
    }
    case 1: {
      auto op = MakeOp(use, random_.Between(1, run_.most_keys_));
      const bool state = random_.Chance(0.3);
      const size_t floats = use.spec->dim + (state ? use.spec->StateFloats() : 0);
      op->rows.assign(op->keys.size() * floats, 0.25f);
      for (size_t i = 0; i < op->ids.size(); ++i)
        Fill(*use.spec, op->ids[i], static_cast<float>(random_.Below(200)) - 100,
             &op->rows[i * floats]);
      Doing("frugal_put");
      TableCall(use, "frugal_put",
                frugal_put(use.handle, op->keys.data(), op->keys.size(),
                           state ? FRUGAL_WITH_STATE : 0, op->rows.data(), 0),
                {FRUGAL_ERR_BUSY, FRUGAL_ERR_TABLE_FULL});
      break;
    }
    case 2: {
      auto op = MakeOp(use, random_.Between(1, run_.most_keys_));
      uint64_t deleted = 0;
      Doing("frugal_delete");
      TableCall(use, "frugal_delete",
                frugal_delete(use.handle, op->keys.data(), op->keys.size(), &deleted),
                {FRUGAL_ERR_BUSY});
      break;
    }
    case 3: {
      uint64_t count = 0;
      Doing("frugal_table_count");
      const int32_t status = frugal_table_count(use.handle, &count);
      TableCall(use, "frugal_table_count", status, {FRUGAL_ERR_BUSY});
      if (status == FRUGAL_OK && count > use.spec->capacity)
        Fault("frugal_table_count", status, "more rows than there is room for");
      break;
    }
    case 4: {
      uint64_t cursor = 0, keys[64];
      size_t n = 0;
      Doing("frugal_table_keys");
      const int32_t status = frugal_table_keys(use.handle, &cursor, keys, 64, &n);
      TableCall(use, "frugal_table_keys", status, {FRUGAL_ERR_BUSY});
      if (status == FRUGAL_OK && std::set<uint64_t>(keys, keys + n).size() != n)
        Fault("frugal_table_keys", status, "a key twice");
      break;
    }
    case 5:
      Doing("frugal_flush");
      EngineCall("frugal_flush", frugal_flush(engine, random_.OneOf<int64_t>({0, 1, 20})),
                 {FRUGAL_ERR_TIMEOUT});
      break;
    case 6: {
      if (!table) break;
      auto op = MakeOp(use, random_.Between(1, run_.most_keys_));
      op->op.found_out = op->found.data();
      Doing("frugal_read");
      const int32_t status = frugal_read(engine, nullptr, &op->op, 1, 50);
      TableCall(use, "frugal_read", status, {FRUGAL_ERR_BUSY, FRUGAL_ERR_TIMEOUT});
      if (status == FRUGAL_OK) CheckRows(*op, "frugal_read");
      break;
    }
    case 7: {
      frugal_stats stats;
      std::memset(&stats, 0, sizeof stats);
      stats.struct_size = sizeof stats;
      Doing("frugal_get_stats");
      const int32_t status = frugal_get_stats(engine, &stats);
      EngineCall("frugal_get_stats", status, {});
      if (status == FRUGAL_OK && stats.pending_bytes >> 40)
        Fault("frugal_get_stats", status, "more pending than there can be");
      std::vector<char> text(100'000);
      size_t size = 0;
      Doing("frugal_metrics");
      const int32_t told = frugal_metrics(engine, text.data(), text.size(), &size);
      EngineCall("frugal_metrics", told, {});
      if (told == FRUGAL_OK && std::strlen(text.data()) + 1 != size)
        Fault("frugal_metrics", told, "the size is not that of the text");
      break;
    }
    case 8:
      Doing("frugal_health");
      EngineCall("frugal_health", frugal_health(engine), {});
      // Traces come and go concurrently with all else.
      if (random_.Chance(0.5)) {
        Doing("frugal_trace_start");
        EngineCall("frugal_trace_start", frugal_trace_start(engine, random_.Between(1, 2000)),
                   {FRUGAL_ERR_EXISTS});
      } else {
        Doing("frugal_trace_stop");
        EngineCall("frugal_trace_stop",
                   frugal_trace_stop(engine, random_.Chance(0.5) ? "/dev/null/t" : nullptr),
                   {FRUGAL_ERR_NOT_FOUND, FRUGAL_ERR_INVALID_ARGUMENT});
      }
      break;
    case 9: {
      frugal_table* found = nullptr;
      Doing("frugal_table_find");
      EngineCall("frugal_table_find", frugal_table_find(engine, use.spec->name.c_str(), &found),
                 {FRUGAL_ERR_NOT_FOUND});
      uint64_t cursor = 0;
      char name[256];
      for (size_t size = 1; size > 0;) {
        Doing("frugal_table_next");
        const int32_t status = frugal_table_next(engine, &cursor, name, sizeof name, &size);
        EngineCall("frugal_table_next", status, {});
        if (status != FRUGAL_OK) break;
        if (size > 0 && std::strlen(name) + 1 != size)
          Fault("frugal_table_next", status, "the size is not that of the name");
      }
      frugal_table_info info;
      std::memset(&info, 0, sizeof info);
      info.struct_size = sizeof info;
      if (!found) break;
      // It may have been dropped meanwhile; the test does not know.
      Doing("frugal_table_describe");
      Answer("frugal_table_describe", frugal_table_describe(found, &info), {});
      break;
    }
    case 10: {
      if (!table) break;
      frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
      optimizer.kind = use.spec->optimizer;
      optimizer.lr = use.spec->numbers ? 1.0f : 0.02f;
      Doing("frugal_table_set_optimizer");
      TableCall(use, "frugal_table_set_optimizer",
                frugal_table_set_optimizer(use.handle, run_.begun_ + random_.Below(3), &optimizer),
                {FRUGAL_ERR_STEP_RANGE});
      break;
    }
    case 11:
      DropTable(use.spec);
      break;
    default:
      CloseSomebody();
  }
}

void Scene::Caller::OutsideLoop() {
  while (!run_.stop_) {
    if (random_.Chance(0.15)) {
      // Trainers come to a stop at the same step, so that what needs that is let in.
      run_.hold_from_ = run_.begun_ + 1;
      Pause(random_.Below(1000));
      for (uint64_t i = random_.Between(1, 12); i > 0 && !run_.stop_; --i) OutsideCall();
      run_.hold_from_ = UINT64_MAX;
    } else {
      OutsideCall();
    }
    Pause(random_.Below(200));
  }
}

// --- The end -------------------------------------------------------------------------------------

// No other thread is left.
void Scene::FinalChecks(Caller* caller) {
  auto expect = [&](const char* call, int32_t status) {
    caller->Answer(call, status, {});
    if (status != FRUGAL_OK && fault_.empty())
      caller->Fault(call, status, "no other thread calls any more");
    return status == FRUGAL_OK && fault_.empty();
  };
#define EXPECT_ANSWER(function, ...) \
  (caller->Doing(#function), expect(#function, function(__VA_ARGS__)))
  // One thread drives all ranks in turn, so far that whatever was declared has passed.
  std::vector<frugal_trainer*> ranks(config_.world_size);
  for (bool again : {false, true}) {
    for (uint32_t r = 0; r < ranks.size(); ++r) {
      // A rank that was never there joins at any time, and only then do the steps of the others
      // commit.
      if (!again && *joined_[r]) continue;
      frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
      config.rank = r;
      if (!EXPECT_ANSWER(frugal_trainer_create, engine_, &config, &ranks[r])) return;
    }
    uint64_t committed = 0;
    if (!EXPECT_ANSWER(frugal_committed_step, engine_, &committed)) return;
    const uint64_t next = committed == FRUGAL_NO_STEP ? kFirstStep : committed + 1;
    for (uint64_t s = next; again && s < next + 64; ++s) {
      for (frugal_trainer* t : ranks)
        if (!EXPECT_ANSWER(frugal_step_begin, t, s, FRUGAL_TIMEOUT_DEFAULT)) return;
      for (frugal_trainer* t : ranks)
        if (!EXPECT_ANSWER(frugal_step_end, t, s, 0)) return;
    }
    for (frugal_trainer*& t : ranks) {
      if (t && !EXPECT_ANSWER(frugal_trainer_close, t)) return;
      t = nullptr;
    }
  }
  if (!EXPECT_ANSWER(frugal_flush, engine_, FRUGAL_TIMEOUT_DEFAULT)) return;
  frugal_stats stats;
  std::memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  uint64_t committed = 0;
  if (!EXPECT_ANSWER(frugal_get_stats, engine_, &stats)) return;
  if (!EXPECT_ANSWER(frugal_committed_step, engine_, &committed)) return;
  if (stats.pending_rows != 0 || stats.pending_bytes != 0)
    caller->Fault("frugal_get_stats", FRUGAL_OK, "rows or bytes are pending after a flush");
  if (stats.steps_committed != committed - kFirstStep + 1)
    caller->Fault("frugal_get_stats", FRUGAL_OK,
                  "steps_committed is not the number of committed steps");
  for (TableSpec& spec : tables_) {
    frugal_table* table = spec.handle;
    if (!table) continue;
    std::vector<uint64_t> keys;
    for (uint64_t i = 0; i < spec.universe; ++i) keys.push_back(spec.Key(i));
    std::vector<float> rows(keys.size() * spec.dim, kNan);
    std::vector<uint8_t> found(keys.size(), 2);
    if (!EXPECT_ANSWER(frugal_get, table, keys.data(), keys.size(), 0, rows.data(), 0,
                       found.data()))
      return;
    uint64_t there = 0, count = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      there += found[i];
      if (found[i]) caller->CheckRow(spec, i, &rows[i * spec.dim], "frugal_get");
    }
    if (!EXPECT_ANSWER(frugal_table_count, table, &count)) return;
    if (count != there)
      caller->Fault("frugal_table_count", FRUGAL_OK, "not the number of rows that get finds");
    // No slot is lost to an aborted step, or to a declaration.
    if (!EXPECT_ANSWER(frugal_delete, table, keys.data(), keys.size(), nullptr)) return;
    keys.clear();
    for (uint64_t i = 0; i < spec.capacity; ++i) keys.push_back(spec.hashed ? i + 1000 : i);
    rows.assign(keys.size() * spec.dim, 1.0f);
    if (!EXPECT_ANSWER(frugal_put, table, keys.data(), keys.size(), 0, rows.data(), 0)) return;
    if (!EXPECT_ANSWER(frugal_table_count, table, &count)) return;
    if (count != spec.capacity)
      caller->Fault("frugal_table_count", FRUGAL_OK, "not all rows that were put");
  }
#undef EXPECT_ANSWER
}

void Scene::Execute() {
  ASSERT_EQ(FRUGAL_OK, frugal_open(&config_, &engine_));
  std::vector<std::unique_ptr<Beat>> beats;
  std::vector<std::unique_ptr<Caller>> callers;
  const uint64_t rivals = random_.Between(1, 2), outside = random_.Between(1, 2);
  const size_t trainers = static_cast<size_t>(config_.world_size * rivals);
  const size_t threads = trainers + static_cast<size_t>(outside);
  for (size_t i = 0; i <= threads; ++i) {
    beats.push_back(std::make_unique<Beat>());
    callers.push_back(std::make_unique<Caller>(*this, seed_ * 1000 + i, beats.back().get()));
  }
  const Watchdog watchdog(seed_, beats);
  Caller* mine = callers.back().get();
  for (TableSpec& spec : tables_)
    if (random_.Chance(0.8)) mine->CreateTable(&spec);
  orderly_ = random_.Chance(0.4);
  const uint64_t calls = random_.Between(100, 3000);
  const uint64_t closers = random_.Between(1, 2);
  std::vector<std::thread> running;
  for (size_t i = 0; i < threads; ++i)
    running.emplace_back([this, i, trainers, &callers] {
      if (i < trainers)
        callers[i]->TrainerLoop(static_cast<uint32_t>(i % config_.world_size));
      else
        callers[i]->OutsideLoop();
    });
  while (calls_ < calls && !stop_) Pause(200);
  if (orderly_) {
    stop_ = true;
    for (std::thread& t : running) t.join();
    if (fault_.empty()) FinalChecks(mine);
    closing_ = true;
    mine->Doing("frugal_close");
    EXPECT_EQ(FRUGAL_OK, frugal_close(engine_));
  } else {
    closing_ = true;
    std::atomic<int> closed{0};
    std::vector<std::thread> close;
    mine->Doing("frugal_close");
    for (uint64_t i = 0; i < closers; ++i)
      close.emplace_back([&] {
        const int32_t status = frugal_close(engine_);
        if (status == FRUGAL_OK)
          ++closed;
        else
          EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, status);
      });
    for (std::thread& t : close) t.join();
    EXPECT_EQ(1, closed.load());
    stop_ = true;
    for (std::thread& t : running) t.join();
  }
  beats.back()->doing = nullptr;
  for (const auto& caller : callers)
    for (const auto& [answer, n] : caller->answers_) all_answers[answer] += n;
  EXPECT_EQ(FRUGAL_ERR_BAD_HANDLE, frugal_health(engine_));
  EXPECT_TRUE(fault_.empty()) << fault_ << "\n  ranks " << config_.world_size << ", lookahead "
                              << config_.lookahead << ", flush threads " << config_.flush_threads
                              << ", mode " << config_.flush_mode << ", staleness "
                              << config_.staleness << ", trainers " << trainers << ", cached "
                              << cached_;
}

TEST(Stress, RandomCallsFromManyThreads) {
  for (uint64_t i = 0; i < seeds; ++i) {
    const uint64_t seed = first_seed + i;
    Scene(seed).Execute();
    ASSERT_FALSE(HasFailure()) << "seed " << seed << "\n  repeat: stress_test --seeds 1 --first "
                               << seed;
  }
  if (verbose)
    for (const auto& [answer, n] : all_answers)
      std::printf("%8" PRIu64 "  %s %s\n", n, answer.first.c_str(),
                  frugal_status_name(answer.second));
  if (seeds < 10) return;
  for (const char* call :
       {"frugal_step_end", "frugal_lookup", "frugal_push_grad", "frugal_prefetch",
        "frugal_prefetch_cancel", "frugal_step_abort", "frugal_get", "frugal_put", "frugal_delete",
        "frugal_read", "frugal_table_drop", "frugal_trainer_close"})
    EXPECT_GE((all_answers[{call, FRUGAL_OK}]), 10u) << call;
  // The rank's next call, whatever it is, reports that a step was undone.
  uint64_t told = 0;
  for (const auto& [answer, n] : all_answers)
    told += answer.second == FRUGAL_ERR_STEP_ABORTED ? n : 0;
  EXPECT_GE(told, seeds / 4);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (i + 1 < argc && name == "--seeds") {
      seeds = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && name == "--first") {
      first_seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (name == "--verbose") {
      verbose = true;
    } else {
      std::fprintf(stderr, "usage: stress_test [--seeds N] [--first SEED] [--verbose]\n");
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
