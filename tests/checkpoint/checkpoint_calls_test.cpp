// The calls of frugal.h for checkpoints: folders, tickets, blobs, and what a folder has.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/stored_checkpoints.h"
#include "support/checkpoints.h"
#include "support/engine.h"
#include "support/random.h"
#include "support/temporary_folder.h"

namespace frugal_test {
namespace {

// An engine with a dense and a hashed table. In step s each rank adds -(s + 1) to a row.
class Job {
 public:
  explicit Job(uint32_t ranks = 1, uint64_t seed = 0)
      : engine(ranks, [&](frugal_config* c) { c->seed = seed; }), ranks_(ranks) {}

  void make_tables(float lr = 1) {
    dense = engine.Table("dense", FRUGAL_DENSE, 8, 2,
                         [&](frugal_table_config* c) { c->optimizer.lr = lr; });
    hashed = engine.Table("hashed", FRUGAL_HASHED, 8, 2);
  }
  void start() {
    make_tables();
    join();
  }
  void join() {
    for (uint32_t r = 0; r < ranks_; ++r) trainers.push_back(engine.Trainer(r));
  }
  void begin(uint64_t s) {
    for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_begin(t, s, kNeverMs));
  }
  void push(uint64_t s) {
    for (uint32_t r = 0; r < ranks_; ++r) {
      const uint64_t key = (s + r) % 8;
      const std::vector<float> grads(2, static_cast<float>(s + 1));
      for (frugal_table* t : {dense, hashed}) {
        frugal_op op = FRUGAL_OP_INIT;
        op.table = t;
        op.keys = &key;
        op.count = 1;
        op.grads = grads.data();
        ASSERT_OK(frugal_push_grad(trainers[r], &op, 1));
      }
    }
  }
  void end(uint64_t s) {
    for (frugal_trainer* t : trainers) ASSERT_OK(frugal_step_end(t, s, 0));
  }
  // Gives `blob` of each rank where it is due.
  void step(uint64_t s, const std::string& blob = {}) {
    begin(s);
    push(s);
    for (frugal_trainer* t : trainers) {
      bool due = false;
      ASSERT_OK(frugal_checkpoint_due(t, &due));
      if (due && !blob.empty()) {
        ASSERT_OK(frugal_checkpoint_blob(t, blob.data(), blob.size()));
      }
    }
    end(s);
  }
  bool due(uint32_t rank) const {
    bool due = false;
    EXPECT_OK(frugal_checkpoint_due(trainers[rank], &due));
    return due;
  }
  CheckpointInfo checkpoint(const char* name = nullptr) const {
    frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
    config.name = name;
    uint64_t number = 0;
    CheckpointInfo info;
    EXPECT_OK(frugal_checkpoint(engine, &config, &number));
    EXPECT_OK(await_checkpoint(engine, number, &info));
    EXPECT_EQ(info.number, number);
    return info;
  }
  std::vector<float> rows(frugal_table* table) const {
    std::vector<uint64_t> keys = {0, 1, 2, 3, 4, 5, 6, 7};
    std::vector<float> rows(16);
    EXPECT_OK(frugal_get(table, keys.data(), 8, 0, rows.data(), 0, nullptr));
    return rows;
  }

  Engine engine;
  frugal_table *dense = nullptr, *hashed = nullptr;
  std::vector<frugal_trainer*> trainers;

 private:
  const uint32_t ranks_;
};

int32_t open_scheduled(frugal_engine* engine, const std::string& path, uint64_t every_steps,
                       uint64_t every_ms = 0) {
  frugal_folder_config config = FRUGAL_FOLDER_CONFIG_INIT;
  config.keep = 100;
  config.every_steps = every_steps;
  config.every_ms = every_ms;
  return frugal_folder_open(engine, path.c_str(), &config);
}

std::vector<uint64_t> steps_in(const std::string& path) {
  std::vector<uint64_t> steps;
  uint64_t cursor = 0;
  for (;;) {
    CheckpointInfo info;
    EXPECT_OK(frugal_checkpoint_next(path.c_str(), &cursor, &info));
    if (info.number == 0) return steps;
    EXPECT_EQ(info.number, cursor);
    steps.push_back(info.step);
  }
}

std::string blob_of(const std::string& path, uint64_t number, uint32_t rank) {
  size_t size = 0;
  int32_t status = frugal_checkpoint_read_blob(path.c_str(), number, rank, nullptr, 0, &size);
  EXPECT_TRUE(status == FRUGAL_ERR_OVERFLOW || (status == FRUGAL_OK && size == 0)) << status;
  std::string blob(size, '?');
  EXPECT_OK(frugal_checkpoint_read_blob(path.c_str(), number, rank, blob.data(), size, &size));
  return blob;
}

TEST(CheckpointCalls, AreDueByTheirSteps) {
  TemporaryFolder folder;
  Job job(2);
  ASSERT_OK(open_scheduled(job.engine, folder.path(), 3));
  job.start();
  std::vector<uint64_t> due;
  for (uint64_t s = 10; s < 20; ++s) {
    job.begin(s);
    EXPECT_EQ(job.due(0), job.due(1));
    if (job.due(0)) due.push_back(s);
    job.push(s);
    for (uint32_t r = 0; r < 2 && job.due(r); ++r) {
      const std::string blob = std::to_string(s) + " of " + std::to_string(r);
      ASSERT_OK(frugal_checkpoint_blob(job.trainers[r], "not this", 8));
      ASSERT_OK(frugal_checkpoint_blob(job.trainers[r], blob.data(), blob.size()));
    }
    job.end(s);
    const int32_t status = await_checkpoint(job.engine, 0, nullptr);
    EXPECT_EQ(status, due.empty() ? FRUGAL_ERR_NOT_FOUND : FRUGAL_OK);
  }
  EXPECT_EQ(due, (std::vector<uint64_t>{12, 15, 18}));
  EXPECT_EQ(steps_in(folder.path()), due);
  EXPECT_EQ(blob_of(folder.path(), 2, 0), "15 of 0");
  EXPECT_EQ(blob_of(folder.path(), 0, 1), "18 of 1");
  EXPECT_EQ(job.engine.Stats().checkpoints, 3);
  EXPECT_GT(job.engine.Stats().checkpoint_rows, 0);
  EXPECT_GT(job.engine.Stats().checkpoint_bytes, job.engine.Stats().checkpoint_rows * 8);
}

TEST(CheckpointCalls, AreDueByTheTime) {
  TemporaryFolder folder;
  Job job;
  ASSERT_OK(open_scheduled(job.engine, folder.path(), 0, 1));
  job.start();
  for (uint64_t s = 0; job.engine.Stats().checkpoints < 2; ++s) job.step(s);
  EXPECT_GE(steps_in(folder.path()).size(), 2);
}

// While one is written, none is due; the next one is due at the first step after it.
TEST(CheckpointCalls, OneIsDueOnceTheOneBeforeIsWritten) {
  TemporaryFolder folder;
  Job job;
  ASSERT_OK(open_scheduled(job.engine, folder.path(), 2));
  job.start();
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  config.step = 4;
  config.name = "named";
  uint64_t number = 0;
  ASSERT_OK(frugal_checkpoint(job.engine, &config, &number));
  EXPECT_EQ(frugal_checkpoint(job.engine, &config, &number), FRUGAL_ERR_BUSY);
  for (uint64_t s = 0; s < 4; ++s) {
    job.begin(s);
    EXPECT_FALSE(job.due(0)) << s;
    job.end(s);
  }
  job.begin(4);
  EXPECT_TRUE(job.due(0));
  job.end(4);
  CheckpointInfo info;
  ASSERT_OK(await_checkpoint(job.engine, number, &info));
  EXPECT_EQ(info.step, 4);
  EXPECT_STREQ(info.name, "named");
  job.step(5);
  job.begin(6);
  EXPECT_TRUE(job.due(0));
  // A rank is inside of a step that is due, and may have given its blob.
  EXPECT_EQ(frugal_checkpoint(job.engine, nullptr, &number), FRUGAL_ERR_BUSY);
  EXPECT_TRUE(job.due(0));
  job.end(6);
  ASSERT_OK(await_checkpoint(job.engine, 0, &info));
  EXPECT_EQ(info.step, 6);
  // A call takes the place of one whose step was undone.
  job.step(7);
  job.begin(8);
  EXPECT_TRUE(job.due(0));
  ASSERT_OK(frugal_step_abort(job.trainers[0]));
  ASSERT_OK(frugal_checkpoint(job.engine, nullptr, &number));
  ASSERT_OK(await_checkpoint(job.engine, number, &info));
  EXPECT_EQ(info.step, 7);
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, number - 1, 0, nullptr), FRUGAL_ERR_CLOSED);
  job.begin(8);
  EXPECT_FALSE(job.due(0));
  job.end(8);
}

TEST(CheckpointCalls, AnAbortDropsTheBlobs) {
  TemporaryFolder folder;
  Job job(2);
  ASSERT_OK(open_scheduled(job.engine, folder.path(), 1));
  job.start();
  job.begin(0);
  EXPECT_TRUE(job.due(0) && job.due(1));
  for (frugal_trainer* t : job.trainers) ASSERT_OK(frugal_checkpoint_blob(t, "x", 1));
  ASSERT_OK(frugal_step_end(job.trainers[1], 0, 0));
  ASSERT_OK(frugal_step_abort(job.trainers[0]));
  EXPECT_EQ(frugal_step_begin(job.trainers[1], 0, kNeverMs), FRUGAL_ERR_STEP_ABORTED);
  job.begin(0);
  EXPECT_TRUE(job.due(0));
  ASSERT_OK(frugal_checkpoint_blob(job.trainers[0], nullptr, 0));
  job.end(0);
  CheckpointInfo info;
  ASSERT_OK(await_checkpoint(job.engine, 0, &info));
  EXPECT_EQ(info.blobs, 1);
  EXPECT_EQ(blob_of(folder.path(), 1, 0), "");
  EXPECT_EQ(frugal_checkpoint_read_blob(folder.path().c_str(), 1, 1, nullptr, 0, nullptr),
            FRUGAL_ERR_NOT_FOUND);
}

// The blob of a step that is no checkpoint: a checkpoint of that step, asked for later, has it; one
// of a later step has not.
TEST(CheckpointCalls, ABlobIsOfItsStepAlone) {
  TemporaryFolder folder;
  Job job;
  job.start();
  job.begin(0);
  ASSERT_OK(frugal_checkpoint_blob(job.trainers[0], "lost", 4));  // there is no folder
  job.end(0);
  ASSERT_OK(open_folder(job.engine, folder.path(), 9));
  EXPECT_EQ(job.checkpoint().blobs, 0);
  EXPECT_EQ(frugal_checkpoint_blob(job.trainers[0], "x", 1), FRUGAL_ERR_NOT_IN_STEP);
  bool due;
  EXPECT_EQ(frugal_checkpoint_due(job.trainers[0], &due), FRUGAL_ERR_NOT_IN_STEP);
  job.begin(1);
  const std::string large(10'000'001, 'z');
  ASSERT_OK(frugal_checkpoint_blob(job.trainers[0], large.data(), large.size()));
  job.end(1);
  for (int i = 0; i < 2; ++i) {
    const CheckpointInfo info = job.checkpoint();
    EXPECT_EQ(blob_of(folder.path(), info.number, 0), large);
    EXPECT_GE(info.bytes, large.size());
  }
  job.step(2);
  EXPECT_EQ(job.checkpoint().blobs, 0);
}

TEST(CheckpointCalls, ADamagedBlobIsFound) {
  TemporaryFolder folder;
  Job job;
  job.start();
  ASSERT_OK(open_folder(job.engine, folder.path(), 9));
  job.begin(0);
  ASSERT_OK(frugal_checkpoint_blob(job.trainers[0], "0123456789", 10));
  job.end(0);
  job.checkpoint();
  std::string bytes = folder.Read("1.blob");
  ASSERT_EQ(bytes, "0123456789");
  char out[10];
  const auto read = [&] {
    return frugal_checkpoint_read_blob(folder.path().c_str(), 1, 0, out, sizeof out, nullptr);
  };
  ASSERT_OK(read());
  bytes[7] = 'x';
  folder.Write("1.blob", bytes);
  EXPECT_EQ(read(), FRUGAL_ERR_DAMAGED);
  folder.Write("1.blob", "012");
  EXPECT_EQ(read(), FRUGAL_ERR_IO);
}

TEST(CheckpointCalls, KeepsTheNewestAndTheNamed) {
  TemporaryFolder folder;
  Job job;
  job.start();
  ASSERT_OK(open_folder(job.engine, folder.path(), 2));
  for (uint64_t s = 0; s < 6; ++s) {
    job.step(s);
    job.checkpoint(s == 1 ? "good" : nullptr);
  }
  EXPECT_EQ(steps_in(folder.path()), (std::vector<uint64_t>{1, 4, 5}));
  // The newest is deleted: the engine's next checkpoint still builds on its files.
  ASSERT_OK(frugal_checkpoint_delete(job.engine, 6));
  EXPECT_EQ(frugal_checkpoint_delete(job.engine, 6), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(steps_in(folder.path()), (std::vector<uint64_t>{1, 4}));
  job.step(6);
  job.checkpoint();
  {
    std::shared_ptr<frugal::Folder> read;
    ASSERT_OK(frugal::Folder::open(folder.path().c_str(), frugal::Folder::Use::kRead, &read));
    frugal::Manifest manifest;
    frugal::File held;
    ASSERT_OK(frugal::open_checkpoint(*read, 0, "good", &manifest, &held));
    EXPECT_EQ(manifest.step, 1);
    EXPECT_EQ(frugal_checkpoint_delete(job.engine, manifest.sequence), FRUGAL_ERR_BUSY);
  }
  ASSERT_OK(frugal_checkpoint_delete(job.engine, 2));
  ASSERT_OK(frugal_checkpoint_delete(job.engine, 5));
  Job again;
  CheckpointInfo info;
  ASSERT_OK(restore(again.engine, folder.path().c_str(), 0, &info));
  EXPECT_EQ(info.step, 6);
  again.make_tables();
  EXPECT_EQ(again.rows(again.dense), job.rows(job.dense));
  EXPECT_EQ(again.rows(again.hashed), job.rows(job.hashed));
}

void is_copied(const std::string& to) {
  Job job, again;
  {
    TemporaryFolder folder;
    job.start();
    ASSERT_OK(open_folder(job.engine, folder.path(), 2));
    for (uint64_t s = 0; s < 5; ++s) {
      job.begin(s);
      job.push(s);
      ASSERT_OK(frugal_checkpoint_blob(job.trainers[0], "blob", 4));
      job.end(s);
      job.checkpoint();
    }
    EXPECT_EQ(frugal_checkpoint_copy(folder.path().c_str(), 1, to.c_str()), FRUGAL_ERR_NOT_FOUND);
    ASSERT_OK(frugal_checkpoint_copy(folder.path().c_str(), 0, to.c_str()));
    EXPECT_EQ(frugal_checkpoint_copy(folder.path().c_str(), 0, to.c_str()), FRUGAL_ERR_EXISTS);
    EXPECT_EQ(frugal_checkpoint_copy(folder.path().c_str(), 0, folder.path().c_str()),
              FRUGAL_ERR_BUSY);
  }
  EXPECT_EQ(blob_of(to, 5, 0), "blob");
  // An engine goes on in the copy. A checkpoint before its first step has the blobs, too.
  ASSERT_OK(open_folder(again.engine, to, 2));
  CheckpointInfo info;
  ASSERT_OK(restore(again.engine, nullptr, 0, &info));
  EXPECT_EQ(again.checkpoint().blobs, 1);
  EXPECT_EQ(blob_of(to, 6, 0), "blob");
  again.start();
  for (uint64_t s = 5; s < 7; ++s) {
    job.step(s);
    again.step(s);
  }
  EXPECT_EQ(again.rows(again.dense), job.rows(job.dense));
  const CheckpointInfo last = again.checkpoint();
  EXPECT_EQ(last.number, 7);
  EXPECT_EQ(last.blobs, 0);
}

TEST(CheckpointCalls, ACopyNeedsNothingOfTheFirstFolder) {
  TemporaryFolder beside, elsewhere("/dev/shm");
  is_copied(beside / "copy");
  is_copied(elsewhere / "copy");
}

TEST(CheckpointCalls, RestoresWhatItIsAskedFor) {
  TemporaryFolder folder;
  const char* const path = folder.path().c_str();
  {
    Job job(2, 5);
    job.start();
    ASSERT_OK(open_folder(job.engine, folder.path(), 9));
    for (uint64_t s = 7; s < 10; ++s) {
      job.step(s);
      job.checkpoint(s == 8 ? "eight" : nullptr);
    }
  }
  std::vector<const char*> tables;
  const auto with = [&](const char* name, std::vector<const char*> of) {
    tables = std::move(of);
    frugal_restore_config config = FRUGAL_RESTORE_CONFIG_INIT;
    config.folder = path;
    config.name = name;
    config.tables = tables.data();
    config.table_count = tables.size();
    return config;
  };
  CheckpointInfo info;
  {
    Job job(3, 5);
    frugal_restore_config config = with("eight", {"hashed", "none"});
    EXPECT_EQ(frugal_restore(job.engine, &config, &info), FRUGAL_ERR_NOT_FOUND);
    config = with("eight", {"hashed", "hashed"});
    EXPECT_EQ(frugal_restore(job.engine, &config, &info), FRUGAL_ERR_NOT_FOUND);
    config = with("nine", {"hashed"});
    EXPECT_EQ(frugal_restore(job.engine, &config, &info), FRUGAL_ERR_NOT_FOUND);
    config = with("eight", {"hashed"});
    ASSERT_OK(frugal_restore(job.engine, &config, &info));
    EXPECT_EQ(info.step, 8);
    EXPECT_EQ(info.world_size, 2);
    EXPECT_EQ(info.tables, 2);
    EXPECT_EQ(frugal_restore(job.engine, &config, &info), FRUGAL_ERR_BUSY);  // not twice
    frugal_table* dense = nullptr;
    EXPECT_EQ(frugal_table_find(job.engine, "dense", &dense), FRUGAL_ERR_NOT_FOUND);
    job.start();
    job.step(9);
  }
  {
    Job job(1, 6);
    EXPECT_EQ(restore(job.engine, path, 0, &info), FRUGAL_ERR_INVALID_ARGUMENT);
  }
  {
    Job job(1, 5);
    job.start();
    EXPECT_EQ(restore(job.engine, path, 0, &info), FRUGAL_ERR_BUSY);
  }
  {
    Job job(1, 5);
    job.make_tables();
    EXPECT_EQ(restore(job.engine, path, 0, &info), FRUGAL_ERR_EXISTS);
    EXPECT_EQ(restore(job.engine, nullptr, 0, &info), FRUGAL_ERR_NOT_FOUND);
  }
  {
    Job job(1, 5);
    ASSERT_OK(restore(job.engine, path, 0, &info));
    frugal_table_config other = FRUGAL_TABLE_CONFIG_INIT;
    other.name = "dense";
    other.rows = 8;
    other.dim = 3;
    frugal_table* table = nullptr;
    EXPECT_EQ(frugal_table_create(job.engine, &other, &table), FRUGAL_ERR_EXISTS);
    job.start();
    EXPECT_EQ(job.engine.Committed(), 9);
  }
}

// A table that is full: rows that were deleted make room for those that came later.
TEST(CheckpointCalls, RestoresFullTables) {
  for (uint64_t seed = 0; seed < 20 && !testing::Test::HasFailure(); ++seed) {
    frugal::Random random(seed);
    TemporaryFolder folder;
    std::set<uint64_t> keys;
    {
      Job job;
      job.make_tables();
      ASSERT_OK(open_folder(job.engine, folder.path(), 1));
      for (int checkpoints = 0; checkpoints < 5; ++checkpoints) {
        for (uint64_t key = 0; key < 30; ++key) {
          if (random.one_in(3) && keys.erase(key)) {
            ASSERT_OK(frugal_delete(job.hashed, &key, 1, nullptr));
          }
        }
        while (keys.size() < 8) {
          const uint64_t key = random.below(30);
          const float row[2] = {static_cast<float>(key), 1};
          if (keys.insert(key).second) {
            ASSERT_OK(frugal_put(job.hashed, &key, 1, 0, row, 0));
          }
        }
        job.checkpoint();
      }
    }
    Job again;
    ASSERT_OK(restore(again.engine, folder.path().c_str(), 0, nullptr));
    again.make_tables();
    for (const uint64_t key : keys) {
      float row[2];
      ASSERT_OK(frugal_get(again.hashed, &key, 1, 0, row, 0, nullptr));
      EXPECT_EQ(row[0], static_cast<float>(key));
    }
    uint64_t count = 0;
    ASSERT_OK(frugal_table_count(again.hashed, &count));
    EXPECT_EQ(count, 8);
  }
}

void put(frugal_table* table, uint64_t key, float value) {
  const float row[2] = {value, 1};
  ASSERT_OK(frugal_put(table, &key, 1, 0, row, 0));
}

bool is_there(frugal_table* table, uint64_t key) {
  float row[2];
  uint8_t found = 0;
  EXPECT_OK(frugal_get(table, &key, 1, 0, row, 0, &found));
  return found == 1;
}

// Before the first step tables may come by several restores. Each one's files stay.
TEST(CheckpointCalls, FilesOfEachRestoreStay) {
  TemporaryFolder folder;
  {
    Job job;
    job.make_tables();
    put(job.hashed, 5, 5);
    put(job.dense, 6, 6);
    ASSERT_OK(open_folder(job.engine, folder.path(), 2));
    job.checkpoint();
  }
  Job job;
  ASSERT_OK(open_folder(job.engine, folder.path(), 2));
  for (const char* const table : {"dense", "hashed"}) {
    frugal_restore_config config = FRUGAL_RESTORE_CONFIG_INIT;
    config.tables = &table;
    config.table_count = 1;
    ASSERT_OK(frugal_restore(job.engine, &config, nullptr));
  }
  ASSERT_OK(frugal_checkpoint_delete(job.engine, 1));
  EXPECT_EQ(job.checkpoint().number, 2);
  Job again;
  ASSERT_OK(restore(again.engine, folder.path().c_str(), 0, nullptr));
  again.make_tables();
  EXPECT_TRUE(is_there(again.hashed, 5));
  EXPECT_EQ(again.rows(again.dense)[12], 6);
}

// Rows come and go, and one stays: what the folder has is in proportion to the rows that there are.
TEST(CheckpointCalls, DeletedRowsTakeNoSpace) {
  constexpr uint64_t kRows = 3000;
  TemporaryFolder folder;
  Engine engine;
  frugal_table* const table = engine.Table("t", FRUGAL_HASHED, 3 * kRows, 2);
  ASSERT_OK(open_folder(engine, folder.path(), 1));
  put(table, 1, 1);
  put(table, 2, 1);
  uint64_t first = 0, last = 0;
  for (uint64_t round = 0; round < 20; ++round) {
    std::vector<uint64_t> keys(kRows), old(kRows);
    for (uint64_t i = 0; i < kRows; ++i) {
      keys[i] = 1000 + round * kRows + i;
      old[i] = keys[i] - kRows;
    }
    const std::vector<float> rows(2 * kRows, 1);
    ASSERT_OK(frugal_put(table, keys.data(), kRows, 0, rows.data(), 0));
    if (round > 0) {
      ASSERT_OK(frugal_delete(table, old.data(), kRows, nullptr));
    }
    if (round == 10) {  // the file of the row that stays has an old record, too
      const uint64_t key = 2;
      ASSERT_OK(frugal_delete(table, &key, 1, nullptr));
    }
    uint64_t number = 0;
    CheckpointInfo info;
    ASSERT_OK(frugal_checkpoint(engine, nullptr, &number));
    ASSERT_OK(await_checkpoint(engine, number, &info));
    (round == 2 ? first : last) = info.bytes;
    EXPECT_LE(info.bytes, 6 * kRows * 40) << round;
  }
  EXPECT_LE(last, 2 * first);
  Engine again;
  ASSERT_OK(restore(again, folder.path().c_str(), 0, nullptr));
  frugal_table* restored = nullptr;
  ASSERT_OK(frugal_table_find(again, "t", &restored));
  uint64_t count = 0;
  ASSERT_OK(frugal_table_count(restored, &count));
  EXPECT_EQ(count, kRows + 1);
}

// A row that no file has leaves nothing when it is deleted.
TEST(CheckpointCalls, DeletionsOfRowsThatNoFileHas) {
  TemporaryFolder folder;
  Job job;
  job.make_tables();
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  const uint64_t before = job.checkpoint().bytes;
  for (uint64_t i = 0; i < 5000; ++i) {
    const uint64_t key = i % 3;
    put(job.hashed, key, 1);
    ASSERT_OK(frugal_delete(job.hashed, &key, 1, nullptr));
  }
  EXPECT_EQ(job.checkpoint().bytes, before);
}

TEST(CheckpointCalls, ForeignFilesDoNotMatter) {
  TemporaryFolder folder;
  for (const char* name : {"4611686018427387999.rows", "18446744073709551615.checkpoint",
                           "18446744073709551615.rows", "notes.txt"})
    folder.Write(name, "");
  Job job;
  job.make_tables();
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  EXPECT_EQ(job.checkpoint().number, 1);
  EXPECT_EQ(job.checkpoint().number, 2);
  EXPECT_EQ(folder.Files().count("notes.txt"), 1);
}

// While a manifest cannot be read, no file goes that it may need. Once it is deleted, they go.
frugal::Manifest manifest_of(const std::string& path, uint64_t number) {
  std::shared_ptr<frugal::Folder> folder;
  EXPECT_OK(frugal::Folder::open(path.c_str(), frugal::Folder::Use::kRead, &folder));
  frugal::Manifest manifest;
  frugal::File held;
  EXPECT_OK(frugal::open_checkpoint(*folder, number, nullptr, &manifest, &held));
  return manifest;
}

TEST(CheckpointCalls, NoNumberIsUsedAgain) {
  TemporaryFolder folder;
  uint64_t tables = 0, files = 0;
  for (const uint64_t life : {0, 1, 2}) {
    Job job;
    job.make_tables();
    ASSERT_OK(open_folder(job.engine, folder.path(), 9));
    put(job.dense, 3, 1);
    const uint64_t first = job.checkpoint().number;
    EXPECT_EQ(first, 2 * life + 1);
    const frugal::Manifest manifest = manifest_of(folder.path(), first);
    for (const frugal::ManifestTable& t : manifest.tables) {
      EXPECT_GT(t.number, tables) << life;
      for (const frugal::ManifestFile& f : t.files) EXPECT_GT(f.info.number, files) << life;
    }
    EXPECT_EQ(folder.Files().count(std::to_string(first - 1) + ".deleted"), 0) << "it is older";
    put(job.dense, 3, 2);
    EXPECT_EQ(job.checkpoint().number, first + 1);
    const frugal::Manifest last = manifest_of(folder.path(), first + 1);
    tables = last.next_table - 1;
    files = last.next_file - 1;
    // In either order the folder keeps the numbers.
    ASSERT_OK(frugal_checkpoint_delete(job.engine, first + life % 2));
    ASSERT_OK(frugal_checkpoint_delete(job.engine, first + 1 - life % 2));
    EXPECT_EQ(steps_in(folder.path()).size(), 0);
    if (life != 1) {
      ASSERT_OK(frugal_folder_close(job.engine));
    } else {
      job.engine.Close();
    }
    for (const std::string& name : folder.Files())
      EXPECT_TRUE(name == "lock" || name.ends_with(".deleted")) << name;
  }
}

TEST(CheckpointCalls, ACopyOfADeletedCheckpointCanBeDeleted) {
  TemporaryFolder folder;
  const std::string copy = folder / "copy";
  Job job;
  job.make_tables();
  ASSERT_OK(open_folder(job.engine, folder / "first", 1));
  job.checkpoint();
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK(frugal_checkpoint_copy((folder / "first").c_str(), 0, copy.c_str()));
    Job other;
    ASSERT_OK(open_folder(other.engine, copy, 1));
    ASSERT_OK(frugal_checkpoint_delete(other.engine, 1));
    EXPECT_EQ(frugal_checkpoint_delete(other.engine, 1), FRUGAL_ERR_NOT_FOUND);
  }
}

TEST(CheckpointCalls, ADamagedCheckpointCanBeDeleted) {
  TemporaryFolder folder;
  {
    Job job;
    job.make_tables();
    ASSERT_OK(open_folder(job.engine, folder.path(), 1));
    job.checkpoint();
  }
  folder.Write("1.checkpoint", std::string(500, 'x'));
  uint64_t cursor = 0;
  CheckpointInfo info;
  EXPECT_EQ(frugal_checkpoint_next(folder.path().c_str(), &cursor, &info), FRUGAL_ERR_DAMAGED);
  EXPECT_EQ(cursor, 1);
  ASSERT_OK(frugal_checkpoint_next(folder.path().c_str(), &cursor, &info));
  EXPECT_EQ(info.number, 0);
  Job job;
  job.make_tables();
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  for (int i = 0; i < 4; ++i) {
    put(job.dense, 3, static_cast<float>(i));
    put(job.hashed, 3, static_cast<float>(i));
    job.checkpoint();
  }
  const size_t files = folder.Files().size();
  ASSERT_OK(frugal_checkpoint_delete(job.engine, 1));
  job.checkpoint();
  EXPECT_LT(folder.Files().size(), files);
}

TEST(CheckpointCalls, ACopyOfADamagedCheckpointIsRefused) {
  TemporaryFolder folder;
  Job job;
  job.make_tables();
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  put(job.dense, 3, 3);
  job.checkpoint();
  const std::string bytes = folder.Read("1.rows");
  for (const std::string& wrong :
       {bytes.substr(0, 5000), std::string(100, 'x') + bytes.substr(100)}) {
    folder.Write("1.rows", wrong);
    EXPECT_EQ(frugal_checkpoint_copy(folder.path().c_str(), 0, (folder / "copy").c_str()),
              FRUGAL_ERR_DAMAGED);
    uint64_t cursor = 0;
    CheckpointInfo info;
    ASSERT_OK(frugal_checkpoint_next((folder / "copy").c_str(), &cursor, &info));
    EXPECT_EQ(info.number, 0);
  }
}

TEST(CheckpointCalls, Tickets) {
  TemporaryFolder folder;
  Job job;
  uint64_t number = 0;
  EXPECT_EQ(frugal_checkpoint(job.engine, nullptr, &number), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, 0, 0, nullptr), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_checkpoint_cancel(job.engine, 0), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_checkpoint_delete(job.engine, 1), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_folder_close(job.engine), FRUGAL_ERR_NOT_FOUND);
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  EXPECT_EQ(open_folder(job.engine, folder.path(), 1), FRUGAL_ERR_EXISTS);
  {
    Engine other;
    EXPECT_EQ(open_folder(other, folder.path(), 1), FRUGAL_ERR_BUSY);
  }
  job.start();
  for (uint64_t i = 1; i <= 70; ++i) EXPECT_EQ(job.checkpoint().number, i);
  CheckpointInfo info;
  ASSERT_OK(frugal_checkpoint_wait(job.engine, 7, 0, &info));
  EXPECT_EQ(info.number, 7);
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, 6, 0, &info), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, 71, 0, &info), FRUGAL_ERR_NOT_FOUND);
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  config.step = 3;
  ASSERT_OK(frugal_checkpoint(job.engine, &config, &number));
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, number, 0, &info), FRUGAL_ERR_TIMEOUT);
  EXPECT_EQ(frugal_folder_close(job.engine), FRUGAL_ERR_BUSY);
  ASSERT_OK(frugal_checkpoint_cancel(job.engine, number));
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, number, 0, &info), FRUGAL_ERR_CLOSED);
  EXPECT_EQ(job.engine.Stats().checkpoints_failed, 1);
  config.name = "a/b";
  EXPECT_EQ(frugal_checkpoint(job.engine, &config, &number), FRUGAL_ERR_INVALID_ARGUMENT);
  const std::string long_name(256, 'n');
  config.name = long_name.c_str();
  EXPECT_EQ(frugal_checkpoint(job.engine, &config, &number), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_OK(frugal_folder_close(job.engine));
  EXPECT_EQ(frugal_checkpoint_wait(job.engine, number, 0, &info), FRUGAL_ERR_NOT_FOUND);
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  EXPECT_EQ(job.checkpoint().number, 71);  // no checkpoint has been given the number before
}

// A thread that waits when the engine is closed returns.
TEST(CheckpointCalls, ClosingEndsTickets) {
  TemporaryFolder folder;
  Job job;
  ASSERT_OK(open_folder(job.engine, folder.path(), 1));
  job.start();
  frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
  config.step = 3;
  uint64_t number = 0;
  ASSERT_OK(frugal_checkpoint(job.engine, &config, &number));
  std::thread waits([&, engine = job.engine.handle] {
    const int32_t status = frugal_checkpoint_wait(engine, number, kNeverMs, nullptr);
    EXPECT_TRUE(status == FRUGAL_ERR_CLOSED || status == FRUGAL_ERR_BAD_HANDLE) << status;
  });
  job.engine.Close();
  waits.join();
  EXPECT_TRUE(steps_in(folder.path()).empty());
}

// Each table gets a number of its own in the folder that it is in, whichever that is.
TEST(CheckpointCalls, TablesAreCreatedWhileFoldersOpenAndClose) {
  TemporaryFolder folders[2];
  Engine engine;
  struct Creators {
    ~Creators() {
      ends.store(true);
      for (std::thread& t : threads) t.join();
    }
    std::atomic<bool> ends{false};
    std::vector<std::thread> threads;
  } creators;
  for (int c = 0; c < 2; ++c)
    creators.threads.emplace_back([&, c] {
      const std::string name = "table" + std::to_string(c);
      frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
      config.name = name.c_str();
      config.rows = 4;
      config.dim = 2;
      config.optimizer.kind = FRUGAL_SGD;
      while (!creators.ends.load()) {
        frugal_table* table = nullptr;
        const int32_t status = frugal_table_create(engine, &config, &table);
        if (status == FRUGAL_ERR_BUSY) continue;
        ASSERT_OK(status);
        int32_t dropped;
        while ((dropped = frugal_table_drop(table)) == FRUGAL_ERR_BUSY) {
        }
        ASSERT_OK(dropped);
      }
    });
  for (int i = 0; i < 40; ++i) {
    TemporaryFolder& folder = folders[i % 2];
    ASSERT_OK(open_folder(engine, folder.path(), 1));
    frugal_checkpoint_config config = FRUGAL_CHECKPOINT_CONFIG_INIT;
    uint64_t number = 0;
    ASSERT_OK(frugal_checkpoint(engine, &config, &number));
    ASSERT_OK(await_checkpoint(engine, number, nullptr));
    ASSERT_OK(frugal_folder_close(engine));
    std::shared_ptr<frugal::Folder> read;
    ASSERT_OK(frugal::Folder::open(folder.path().c_str(), frugal::Folder::Use::kRead, &read));
    frugal::Manifest m;
    frugal::File held;
    ASSERT_OK(frugal::open_checkpoint(*read, number, nullptr, &m, &held));
    std::set<uint64_t> numbers;
    for (const frugal::ManifestTable& t : m.tables) numbers.insert(t.number);
    EXPECT_EQ(numbers.size(), m.tables.size());
  }
}

TEST(CheckpointCalls, BadArguments) {
  TemporaryFolder folder;
  Job job;
  frugal_folder_config config = FRUGAL_FOLDER_CONFIG_INIT;
  const auto open = [&](const std::string& path) {
    return frugal_folder_open(job.engine, path.c_str(), &config);
  };
  config.keep = 0;
  EXPECT_EQ(open(folder.path()), FRUGAL_ERR_INVALID_ARGUMENT);
  config.keep = 1;
  config.flags = 1;
  EXPECT_EQ(open(folder.path()), FRUGAL_ERR_INVALID_ARGUMENT);
  config.flags = 0;
  config.struct_size = 3;
  EXPECT_EQ(open(folder.path()), FRUGAL_ERR_STRUCT_SIZE);
  config.struct_size = sizeof config;
  EXPECT_EQ(open(folder / "no/such"), FRUGAL_ERR_NOT_FOUND);
  folder.Write("file", "");
  EXPECT_EQ(open(folder / "file"), FRUGAL_ERR_INVALID_ARGUMENT);
  uint64_t cursor = 0;
  CheckpointInfo info;
  EXPECT_EQ(frugal_checkpoint_next((folder / "none").c_str(), &cursor, &info),
            FRUGAL_ERR_NOT_FOUND);
  info.struct_size = 1;
  EXPECT_EQ(frugal_checkpoint_next(folder.path().c_str(), &cursor, &info), FRUGAL_ERR_STRUCT_SIZE);
}

}  // namespace
}  // namespace frugal_test
