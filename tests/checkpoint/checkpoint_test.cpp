// Engines that go on from checkpoints have, at the end, bit for bit the tables of an engine that
// was never interrupted.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "format/folder_check.h"
#include "support/checkpoints.h"
#include "support/engine.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace frugal {
namespace {

using OneEngine = frugal_test::Engine;
using frugal_test::await_checkpoint, frugal_test::CheckpointInfo, frugal_test::open_folder,
    frugal_test::restore;

// The inside of an engine.
Engine& in(const OneEngine& e) { return *static_cast<Engine*>(object_of<Session>(e.handle).get()); }

// --- What a job does, by its seed: the same in each engine ---------------------------------------

struct TableSpec {
  std::string name;
  int32_t key_space = FRUGAL_DENSE;
  uint64_t rows = 0, universe = 0;
  uint32_t dim = 1;
  bool lazy = false;
  int32_t optimizer = FRUGAL_SGD;
  size_t state = 0;  // floats
};

struct Job {
  explicit Job(uint64_t seed_in) : seed(seed_in) {
    Random random(seed);
    world_size = 1 + static_cast<uint32_t>(random.below(3));
    steps = 20 + random.below(30);
    const size_t n = 1 + random.below(3);
    for (size_t i = 0; i < n; ++i) {
      TableSpec t;
      t.name = "table" + std::to_string(i);
      t.key_space = random.one_in(2) ? FRUGAL_HASHED : FRUGAL_DENSE;
      t.universe = random.one_in(3) ? 4000 : 20 + random.below(300);
      t.rows = t.universe;
      t.lazy = t.key_space == FRUGAL_DENSE && random.one_in(2);
      constexpr uint32_t dims[] = {1, 3, 8, 17, 64};
      t.dim = dims[random.below(5)];
      constexpr int32_t kinds[] = {FRUGAL_SGD, FRUGAL_ADAGRAD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_ADAM};
      t.optimizer = kinds[random.below(4)];
      tables.push_back(t);
    }
  }
  uint64_t seed, steps = 0;
  uint32_t world_size = 1;
  std::vector<TableSpec> tables;
};

uint64_t key_of(const TableSpec& t, uint64_t i) {
  return t.key_space == FRUGAL_DENSE ? i : i * 0x9e3779b97f4a7c15u + 1;
}

struct Work {  // of a rank in a step, for a table
  std::vector<uint64_t> keys;
  std::vector<float> grads;
  bool push = true;
};

Work work_of(const Job& job, uint64_t step, uint32_t rank, size_t table) {
  const TableSpec& t = job.tables[table];
  Random random(job.seed * 1000003 + step * 1009 + rank * 31 + table);
  Work w;
  const size_t n = t.universe > 1000 ? 200 + random.below(1500) : random.below(60);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hot = 1 + random.below(t.universe);
    w.keys.push_back(key_of(t, random.below(hot)));
  }
  w.push = !random.one_in(6);
  for (size_t i = 0; i < n * t.dim; ++i)
    w.grads.push_back(static_cast<float>(static_cast<int64_t>(random.below(2001)) - 1000) / 777.0f);
  return w;
}

// Of another engine of the same job.
struct Setting {
  explicit Setting(Random& random) {
    flush_threads = static_cast<uint32_t>(random.below(4));
    flush_mode = static_cast<int32_t>(random.below(5));
    lookahead = static_cast<uint32_t>(random.below(6));
    backing = random.one_in(3) ? FRUGAL_BACKING_SHM : FRUGAL_BACKING_PRIVATE;
    cache = random.one_in(3) ? 0.3 : 0;
    pending_bytes = random.one_in(3) ? 20000 : uint64_t{1} << 30;
    declares = !random.one_in(4);
    // Gradients do not depend on lookups, so the tables at the end do not depend on it.
    constexpr uint64_t bounds[] = {0, 0, 2, FRUGAL_STALENESS_ASYNC};
    staleness = bounds[random.below(4)];
  }
  uint32_t flush_threads, lookahead;
  int32_t flush_mode, backing;
  double cache;
  uint64_t pending_bytes, staleness;
  bool declares;
};

struct Life {  // of a job in an engine
  Life(const Job& job_in, const Setting& setting_in)
      : job(job_in), setting(setting_in), engine(job.world_size, [&](frugal_config* c) {
          c->seed = job.seed;
          c->flush_threads = setting.flush_threads;
          c->flush_mode = setting.flush_mode;
          c->lookahead = setting.lookahead;
          c->backing = setting.backing;
          c->pending_bytes = setting.pending_bytes;
          c->staleness = setting.staleness;
        }) {}

  void make_tables() {
    for (const TableSpec& t : job.tables)
      tables.push_back(
          engine.Table(t.name.c_str(), t.key_space, t.rows, t.dim, [&](frugal_table_config* c) {
            c->optimizer.kind = t.optimizer;
            c->optimizer.lr = 0.05f;
            c->init = FRUGAL_INIT_UNIFORM;
            c->init_a = -1;
            c->init_b = 1;
            if (t.lazy) c->flags = FRUGAL_TABLE_LAZY;
          }));
    for (TableSpec& t : job.tables) {
      frugal_table_info info{};
      info.struct_size = sizeof info;
      EXPECT_OK(frugal_table_describe(tables[&t - job.tables.data()], &info));
      t.state = info.state_floats;
    }
  }
  void join() {
    for (uint32_t r = 0; r < job.world_size; ++r)
      trainers.push_back(engine.Trainer(r, setting.cache));
  }
  // What happens before a step, between steps. Done twice it gives the same.
  void between(uint64_t step) {
    Random random(job.seed * 77 + step);
    for (size_t i = 0; i < tables.size(); ++i) {
      const TableSpec& t = job.tables[i];
      if (random.one_in(4)) {
        std::vector<uint64_t> keys;
        for (size_t k = 0; k < 1 + random.below(9); ++k)
          keys.push_back(key_of(t, random.below(t.universe)));
        EXPECT_OK(frugal_delete(tables[i], keys.data(), keys.size(), nullptr));
      }
      if (random.one_in(4)) {
        const bool state = random.one_in(2);
        std::vector<uint64_t> keys;
        std::vector<float> rows;
        for (size_t k = 0; k < 1 + random.below(9); ++k) {
          keys.push_back(key_of(t, random.below(t.universe)));
          for (size_t c = 0; c < t.dim + (state ? t.state : 0); ++c)
            rows.push_back(static_cast<float>(random.below(1000)) / 100);
        }
        EXPECT_OK(frugal_put(tables[i], keys.data(), keys.size(), state ? FRUGAL_WITH_STATE : 0,
                             rows.data(), 0));
      }
      if (random.one_in(5)) {
        frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
        o.kind = t.optimizer;
        o.lr = static_cast<float>(1 + random.below(9)) / 100;
        EXPECT_OK(frugal_table_set_optimizer(tables[i], step + random.below(4), &o));
      }
    }
  }
  void rank(uint32_t r, uint64_t from, uint64_t to, std::barrier<>& meet) {
    frugal_trainer* trainer = trainers[r];
    uint64_t declared = from;
    for (uint64_t s = from; s < to; ++s) {
      // In between ranks run apart, if staleness lets them.
      if (s == from || s % 4 == 0) {
        meet.arrive_and_wait();
        if (r == 0 && s % 4 == 0) between(s);
        meet.arrive_and_wait();
      }
      for (; setting.declares && declared < to && declared <= s + setting.lookahead; ++declared)
        for (size_t i = 0; i < tables.size(); ++i) {
          const Work w = work_of(job, declared, r, i);
          if (w.keys.empty()) continue;
          frugal_op op = op_of(i, w);
          EXPECT_OK(frugal_prefetch(trainer, declared, &op, 1, nullptr));
        }
      EXPECT_OK(frugal_step_begin(trainer, s, kNeverMs));
      for (size_t i = 0; i < tables.size(); ++i) {
        const Work w = work_of(job, s, r, i);
        std::vector<float> out(w.keys.size() * job.tables[i].dim);
        frugal_op op = op_of(i, w);
        op.rows_out = out.data();
        if (w.keys.empty()) continue;
        EXPECT_OK(frugal_lookup(trainer, &op, 1));
        op.grads = w.grads.data();
        if (w.push) {
          EXPECT_OK(frugal_push_grad(trainer, &op, 1));
        }
      }
      EXPECT_OK(frugal_step_end(trainer, s, 0));
      at.store(s);
    }
  }
  void train(uint64_t from, uint64_t to) {
    std::barrier<> meet(job.world_size);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < job.world_size; ++r)
      threads.emplace_back([this, r, from, to, &meet] { rank(r, from, to, meet); });
    for (std::thread& t : threads) t.join();
  }
  frugal_op op_of(size_t table, const Work& w) const {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = tables[table];
    op.keys = w.keys.data();
    op.count = w.keys.size();
    return op;
  }
  // All rows, with state, by key.
  std::map<uint64_t, std::vector<uint32_t>> rows(size_t table) const {
    const TableSpec& t = job.tables[table];
    std::vector<uint64_t> keys(t.universe + 1);
    uint64_t cursor = 0;
    size_t n = 0;
    EXPECT_OK(frugal_table_keys(tables[table], &cursor, keys.data(), keys.size(), &n));
    keys.resize(n);
    const size_t floats = t.dim + t.state;
    std::vector<float> values(n * floats);
    EXPECT_OK(
        frugal_get(tables[table], keys.data(), n, FRUGAL_WITH_STATE, values.data(), 0, nullptr));
    std::map<uint64_t, std::vector<uint32_t>> all;
    for (size_t i = 0; i < n; ++i) {
      std::vector<uint32_t>& row = all[keys[i]];
      row.resize(floats);
      std::memcpy(row.data(), &values[i * floats], floats * sizeof(float));
    }
    return all;
  }

  Job job;
  Setting setting;
  OneEngine engine;
  std::vector<frugal_table*> tables;
  std::vector<frugal_trainer*> trainers;
  std::atomic<uint64_t> at{0};
};

struct Totals {
  uint64_t before_write = 0, in_order = 0, before_delete = 0, late = 0, awaited = 0,
           checkpoints = 0, restores = 0;
  void add(Engine& engine, size_t tables) {
    for (size_t i = 0; i < tables; ++i) {
      const TableRef t = engine.find_table(("table" + std::to_string(i)).c_str());
      const RowTracker::Counts& c = t->tracked->tracker.counts();
      before_write += c.before_write;
      in_order += c.in_order;
      before_delete += c.before_delete;
      late += c.late;
      awaited += c.awaited;
    }
  }
};

void compare(const Life& a, const Life& b) {
  for (size_t i = 0; i < a.tables.size(); ++i) {
    const auto x = a.rows(i), y = b.rows(i);
    ASSERT_EQ(x.size(), y.size()) << "table " << i;
    for (const auto& [key, row] : x) {
      const auto at = y.find(key);
      ASSERT_NE(at, y.end()) << "table " << i << ", key " << key;
      ASSERT_EQ(row, at->second) << "table " << i << ", key " << key;
    }
  }
}

// What the engine has written is sound. The engine is still open.
void check_files(const std::string& path) {
  struct : FolderReport {
    void found(const FolderFinding& f) override {
      if (f.kind != FolderFinding::Kind::kNote) lines += (f.line() + "\n").c_str();
    }
    std::string lines;
  } report;
  FolderCounts counts;
  EXPECT_OK(check_folder(path.c_str(), FolderRead::kAll, &report, &counts));
  EXPECT_EQ(report.lines, "");
}

void one_seed(uint64_t seed, Totals* totals) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  checkpoint_test_pause(seed % 3 * 100000);
  const Job job(seed);
  Random random(seed + 1000000);
  Life whole(job, Setting(random));
  whole.make_tables();
  whole.join();
  whole.train(3, 3 + job.steps);

  TemporaryFolder folder;
  uint64_t from = 3, sequence = 0;
  bool named = false;  // the step of that checkpoint was: nothing after it is in it
  const bool same_folder = !random.one_in(4);
  for (int lives = 0;; ++lives) {
    Life part(job, Setting(random));
    const std::string path = same_folder ? folder.path() : folder / std::to_string(lives);
    ASSERT_OK(open_folder(part.engine, path, 2));
    if (sequence) {
      CheckpointInfo info;
      const std::string former = folder / std::to_string(lives - 1);
      ASSERT_OK(restore(part.engine, same_folder ? nullptr : former.c_str(), sequence, &info));
      ASSERT_EQ(info.number, sequence);
      from = info.step == kNoStep ? 3 : info.step + 1;
      ++totals->restores;
    }
    part.make_tables();
    if (sequence && named) {
      Life until(job, Setting(random));
      until.make_tables();
      until.join();
      until.train(3, from);
      compare(until, part);
    }
    part.join();
    const bool last = lives == 3 || from + 4 >= 3 + job.steps;
    const uint64_t to = last ? 3 + job.steps : from + 2 + random.below(3 + job.steps - from - 2);
    // Checkpoints one after the other, of the last step or of a later one, while it trains.
    std::atomic<bool> done{false};
    const uint64_t draw = random();
    CheckpointInfo newest;
    bool newest_named = false;
    std::thread asks([&] {
      Random mine(draw);
      while (!done.load()) {
        frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
        if (mine.one_in(2)) config.step = part.at.load() + 1 + mine.below(3);
        uint64_t ticket = 0;
        const Status s = frugal_checkpoint(part.engine, &config, &ticket);
        if (s == FRUGAL_ERR_STEP_RANGE) continue;
        ASSERT_OK(s);
        CheckpointInfo info;
        Status waited;
        do waited = frugal_checkpoint_wait(part.engine, ticket, 1, &info);
        while (waited == FRUGAL_ERR_TIMEOUT && !done.load());
        if (waited == FRUGAL_ERR_TIMEOUT) {
          // The step may never come.
          (void)frugal_checkpoint_cancel(part.engine, ticket);
          waited = await_checkpoint(part.engine, ticket, &info);
        }
        // It was cancelled, or named a step before the first one.
        if (waited == FRUGAL_ERR_CLOSED || waited == FRUGAL_ERR_STEP_RANGE) continue;
        ASSERT_OK(waited);
        ASSERT_TRUE(config.step == kNoStep || info.step == config.step);
        newest = info;
        newest_named = config.step != kNoStep;
        ++totals->checkpoints;
      }
    });
    part.train(from, to);
    done.store(true);
    asks.join();
    totals->add(in(part.engine), job.tables.size());
    check_files(path);
    if (last) {
      compare(whole, part);
      break;
    }
    if (newest.number) {
      sequence = newest.number;
      named = newest_named;
    } else if (!same_folder) {
      // Nothing is in the new folder: one more, of the last step.
      uint64_t ticket = 0;
      ASSERT_OK(frugal_checkpoint(part.engine, nullptr, &ticket));
      ASSERT_OK(await_checkpoint(part.engine, ticket, &newest));
      sequence = newest.number;
      named = false;
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Checkpoint, GoesOnAsIfNeverInterrupted) {
  Totals totals;
  const uint64_t rounds = test_rounds(12), first = test_seed();
  for (uint64_t i = 0; i < rounds && !HasFailure(); ++i) one_seed(first + i, &totals);
  std::printf(
      "%llu checkpoints, %llu restores; rows saved before a write %llu, in order %llu, "
      "before a deletion %llu; written late %llu; awaited %llu\n",
      static_cast<unsigned long long>(totals.checkpoints),
      static_cast<unsigned long long>(totals.restores),
      static_cast<unsigned long long>(totals.before_write),
      static_cast<unsigned long long>(totals.in_order),
      static_cast<unsigned long long>(totals.before_delete),
      static_cast<unsigned long long>(totals.late),
      static_cast<unsigned long long>(totals.awaited));
}

// Each table has a buffer that is not full, and all of them are more than the budget of copies.
TEST(Checkpoint, OfManyTables) {
  TemporaryFolder folder;
  constexpr int kTables = 700;
  OneEngine engine;
  ASSERT_OK(open_folder(engine, folder.path(), 1));
  std::vector<frugal_table*> tables;
  for (int i = 0; i < kTables; ++i)
    tables.push_back(engine.Table(("t" + std::to_string(i)).c_str(), FRUGAL_DENSE, 64, 4));
  const std::vector<float> row(4, 2.5f);
  for (uint64_t i = 0; i < kTables; ++i) {
    const uint64_t key = i % 64;
    ASSERT_OK(frugal_put(tables[i], &key, 1, 0, row.data(), 0));
  }
  uint64_t ticket = 0;
  ASSERT_OK(frugal_checkpoint(engine, nullptr, &ticket));
  ASSERT_OK(await_checkpoint(engine, ticket, nullptr));
  OneEngine again;
  ASSERT_OK(restore(again, folder.path().c_str(), 0, nullptr));
  frugal_table* last = nullptr;
  ASSERT_OK(frugal_table_find(again, "t699", &last));
  const uint64_t key = 699 % 64;
  std::vector<float> got(4);
  ASSERT_OK(frugal_get(last, &key, 1, 0, got.data(), 0, nullptr));
  EXPECT_EQ(got, row);
}

// Files that threads read in many pieces: later records and deletions win, and rows that have no
// record are new ones.
TEST(Checkpoint, OfLargeTables) {
  constexpr uint64_t kRows = 70000;
  constexpr uint32_t kDim = 21;
  constexpr size_t kFloats = 2 * kDim;  // with Adagrad's state
  const auto make = [](OneEngine& e, frugal_table** tables) {
    for (int t = 0; t < 2; ++t)
      tables[t] = e.Table(t ? "hashed" : "dense", t ? FRUGAL_HASHED : FRUGAL_DENSE, kRows, kDim,
                          [](frugal_table_config* c) {
                            c->optimizer.kind = FRUGAL_ADAGRAD;
                            c->init = FRUGAL_INIT_UNIFORM;
                            c->init_a = -1;
                            c->init_b = 1;
                          });
  };
  const auto rows_of = [](frugal_table* table) {
    std::map<uint64_t, std::vector<uint32_t>> rows;
    std::vector<uint64_t> keys(kRows);
    uint64_t cursor = 0;
    size_t n = 0;
    EXPECT_OK(frugal_table_keys(table, &cursor, keys.data(), kRows, &n));
    std::vector<float> values(n * kFloats);
    EXPECT_OK(frugal_get(table, keys.data(), n, FRUGAL_WITH_STATE, values.data(), 0, nullptr));
    for (size_t i = 0; i < n; ++i) {
      std::vector<uint32_t>& row = rows[keys[i]];
      row.resize(kFloats);
      std::memcpy(row.data(), &values[i * kFloats], kFloats * sizeof(float));
    }
    return rows;
  };
  TemporaryFolder folder;
  OneEngine engine;
  ASSERT_OK(open_folder(engine, folder.path(), 1));
  frugal_table* tables[2];
  make(engine, tables);
  for (uint64_t round = 1; round <= 3; ++round) {
    for (uint64_t t = 0; t < 2; ++t) {
      std::vector<uint64_t> keys, gone;
      for (uint64_t i = round; i < kRows; i += round) {
        if (i % 7 == 0) continue;  // has no record
        keys.push_back(t ? i * 0x9e3779b97f4a7c15u : i);
        if (t && i % 10 == round) gone.push_back(keys.back());
      }
      std::vector<float> rows(keys.size() * kFloats);
      for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = static_cast<float>((i * 31 + round * 1000003 + t) % 1048573) / 1024;
      ASSERT_OK(frugal_put(tables[t], keys.data(), keys.size(), FRUGAL_WITH_STATE, rows.data(), 0));
      if (t) {
        ASSERT_OK(frugal_delete(tables[t], gone.data(), gone.size(), nullptr));
      }
    }
    uint64_t ticket = 0;
    ASSERT_OK(frugal_checkpoint(engine, nullptr, &ticket));
    ASSERT_OK(await_checkpoint(engine, ticket, nullptr));
  }
  for (const bool own : {false, true}) {
    if (own) {
      ASSERT_OK(frugal_folder_close(engine));
    }
    OneEngine again;
    if (own) {
      ASSERT_OK(open_folder(again, folder.path(), 1));
    }
    ASSERT_OK(restore(again, own ? nullptr : folder.path().c_str(), 0, nullptr));
    frugal_table* restored[2];
    make(again, restored);
    for (int t = 0; t < 2; ++t) {
      EXPECT_TRUE(rows_of(restored[t]) == rows_of(tables[t])) << t;
    }
  }
}

TEST(Checkpoint, OfAStepThatNeverComes) {
  TemporaryFolder folder;
  OneEngine engine;
  ASSERT_OK(open_folder(engine, folder.path(), 1));
  frugal_trainer* trainer = engine.Trainer(0);
  uint64_t ticket = 0;
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  config.step = 5;
  ASSERT_OK(frugal_checkpoint(engine, &config, &ticket));
  EXPECT_EQ(frugal_checkpoint(engine, &config, &ticket), FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_step_begin(trainer, 10, kNeverMs));
  ASSERT_OK(frugal_step_end(trainer, 10, 0));
  EXPECT_EQ(await_checkpoint(engine, ticket, nullptr), FRUGAL_ERR_STEP_RANGE);
  EXPECT_EQ(frugal_checkpoint(engine, &config, &ticket), FRUGAL_ERR_STEP_RANGE);
  ASSERT_OK(frugal_checkpoint(engine, nullptr, &ticket));
  ASSERT_OK(await_checkpoint(engine, ticket, nullptr));
}

}  // namespace
}  // namespace frugal
