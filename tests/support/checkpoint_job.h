// A small job whose tables are known after each of its steps, for tests that interrupt its
// checkpoints.
#pragma once
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "format/manifest.h"
#include "support/checkpoints.h"
#include "support/engine.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace frugal_test::jobs {

using frugal::LastMessage;  // of the inside of an engine

// A hashed table, some of whose rows are deleted and come again, and a dense one. Steps are counted
// from 1.
class CheckpointJob {
 public:
  using State = std::array<std::map<uint64_t, std::vector<uint32_t>>, 2>;
  static constexpr uint64_t kHashed = 40, kDense = 32;

  explicit CheckpointJob(uint32_t flush_threads = 0)
      : engine_([&](frugal_config* c) {
          c->seed = 7;
          c->flush_threads = flush_threads;
        }) {}

  frugal::Engine& inside() const {
    return *static_cast<frugal::Engine*>(frugal::object_of<frugal::Session>(engine_.handle).get());
  }
  frugal_engine* engine() const { return engine_; }
  frugal::Checkpoints& checkpoints() const { return inside().checkpoints(); }

  // Creates its tables, or takes those that were restored.
  void make_tables() {
    tables_[0] = engine_.Table("hashed", FRUGAL_HASHED, kHashed, 3, [](frugal_table_config* c) {
      c->optimizer.kind = FRUGAL_ADAGRAD;
      c->optimizer.lr = 0.05f;
      c->init = FRUGAL_INIT_UNIFORM;
      c->init_a = -1;
      c->init_b = 1;
    });
    tables_[1] = engine_.Table("dense", FRUGAL_DENSE, kDense, 9, [](frugal_table_config* c) {
      c->optimizer.kind = FRUGAL_ADAM;
      c->optimizer.lr = 0.01f;
      c->init = FRUGAL_INIT_UNIFORM;
      c->init_a = -1;
      c->init_b = 1;
    });
  }
  void start() {
    make_tables();
    trainer_ = engine_.Trainer(0);
  }

  // `repeated`: calls without memory are made again, and counted.
  void step(uint64_t s, uint64_t* repeated = nullptr) {
    const auto call = [&](auto made) {
      int32_t status;
      for (int i = 0; (status = made()) == FRUGAL_ERR_OUT_OF_MEMORY && repeated && i < 3; ++i)
        ++*repeated;
      EXPECT_OK(status);
    };
    frugal::Random random(s * 1000003);
    std::vector<uint64_t> keys;
    if (random.one_in(2)) {
      for (uint64_t n = 1 + random.below(5); n; --n) keys.push_back(hashed_key(random));
      call([&] { return frugal_delete(tables_[0], keys.data(), keys.size(), nullptr); });
    }
    if (random.one_in(3)) {
      const uint64_t key = random.below(kDense);
      std::vector<float> row(9, static_cast<float>(random.below(1000)) / 7);
      call([&] { return frugal_put(tables_[1], &key, 1, 0, row.data(), 0); });
    }
    call([&] { return frugal_step_begin(trainer_, s, kNeverMs); });
    for (size_t t = 0; t < 2; ++t) {
      keys.clear();
      for (uint64_t n = 1 + random.below(12); n; --n)
        keys.push_back(t ? random.below(kDense) : hashed_key(random));
      const size_t floats = keys.size() * (t ? 9 : 3);
      std::vector<float> out(floats), grads;
      while (grads.size() < floats)
        grads.push_back((static_cast<float>(random.below(2001)) - 1000) / 777);
      frugal_op op = FRUGAL_OP_INIT;
      op.table = tables_[t];
      op.keys = keys.data();
      op.count = keys.size();
      op.rows_out = out.data();
      call([&] { return frugal_lookup(trainer_, &op, 1); });
      op.grads = grads.data();
      call([&] { return frugal_push_grad(trainer_, &op, 1); });
    }
    const std::vector<uint64_t> blob = blob_of(s);
    call([&] {
      return frugal_checkpoint_blob(trainer_, blob.data(), blob.size() * sizeof(uint64_t));
    });
    call([&] { return frugal_step_end(trainer_, s, 0); });
  }

  // What its rank gives in a step.
  static std::vector<uint64_t> blob_of(uint64_t step) {
    return std::vector<uint64_t>(1 + step % 3 * 400, step);
  }
  // The checkpoint has the blob of its step.
  static void check_blob(const std::string& path, const CheckpointInfo& info) {
    if (info.step == FRUGAL_NO_STEP) return;
    const std::vector<uint64_t> expected = blob_of(info.step);
    std::vector<uint64_t> got(expected.size());
    size_t size = 0;
    EXPECT_OK(frugal_checkpoint_read_blob(path.c_str(), info.number, 0, got.data(),
                                          got.size() * sizeof(uint64_t), &size));
    EXPECT_EQ(size, got.size() * sizeof(uint64_t));
    EXPECT_EQ(got, expected);
  }

  // All rows with their state, by key.
  State state() const {
    State all;
    for (size_t t = 0; t < 2; ++t) {
      std::vector<uint64_t> keys(kHashed + kDense);
      uint64_t cursor = 0;
      size_t n = 0;
      EXPECT_OK(frugal_table_keys(tables_[t], &cursor, keys.data(), keys.size(), &n));
      keys.resize(n);
      const size_t floats = t ? 9 * 3 : 3 * 2;
      std::vector<float> rows(n * floats);
      EXPECT_OK(frugal_get(tables_[t], keys.data(), n, FRUGAL_WITH_STATE, rows.data(), 0, nullptr));
      for (size_t i = 0; i < n; ++i) {
        std::vector<uint32_t>& row = all[t][keys[i]];
        row.resize(floats);
        std::memcpy(row.data(), &rows[i * floats], floats * sizeof(float));
      }
    }
    return all;
  }
  size_t state_floats(size_t table) const {
    frugal_table_info info{};
    info.struct_size = sizeof info;
    EXPECT_OK(frugal_table_describe(tables_[table], &info));
    return info.state_floats;
  }

  // A checkpoint of the last step, on disk.
  int32_t checkpoint(CheckpointInfo* info = nullptr) {
    uint64_t sequence = 0;
    FRUGAL_TRY(frugal_checkpoint(engine(), nullptr, &sequence));
    return await_checkpoint(engine(), sequence, info);
  }

  // The state after each step up to `last`; [0] is that before the first.
  static std::vector<State> history(uint64_t last) {
    CheckpointJob job;
    job.start();
    EXPECT_EQ(job.state_floats(0), 3u);
    EXPECT_EQ(job.state_floats(1), 18u);
    std::vector<State> all{job.state()};
    for (uint64_t s = 1; s <= last; ++s) {
      job.step(s);
      all.push_back(job.state());
    }
    return all;
  }

 private:
  static uint64_t hashed_key(frugal::Random& random) {
    return random.below(1 + random.below(kHashed)) * 0x9e3779b97f4a7c15u + 1;
  }

  Engine engine_;
  frugal_table* tables_[2] = {};
  frugal_trainer* trainer_ = nullptr;
};

inline uint64_t steps_of(const CheckpointInfo& info) {
  return info.step == frugal::kNoStep ? 0 : info.step;
}

// What a writer's folder must consist of: the lock, manifests, and the files that they list.
inline std::set<std::string> files_that_belong(const std::string& path) {
  std::set<std::string> names{"lock"};
  std::shared_ptr<frugal::Folder> folder;
  EXPECT_OK(frugal::Folder::open(path.c_str(), frugal::Folder::Use::kRead, &folder));
  frugal::Vector<uint64_t> sequences;
  EXPECT_OK(frugal::list_manifests(*folder, &sequences));
  for (const uint64_t s : sequences) {
    frugal::Manifest m;
    frugal::File held;
    EXPECT_OK(frugal::read_manifest(*folder, s, &m, &held));
    names.insert(frugal::manifest_name(s).c_str());
    for (const frugal::ManifestTable& t : m.tables)
      for (const frugal::ManifestFile& f : t.files)
        names.insert(frugal::rows_name(f.info.number).c_str());
    if (m.blob_bytes) names.insert(frugal::blob_name(s).c_str());
  }
  // Manifests of deleted checkpoints, if there is no newer one.
  frugal::Vector<frugal::String> all;
  EXPECT_OK(folder->list(&all));
  for (const frugal::String& name : all) {
    uint64_t n;
    if (frugal::parse_name(name.c_str(), &n) == frugal::FileKind::kDeleted &&
        (sequences.empty() || n > sequences.back()))
      names.insert(name.c_str());
  }
  return names;
}

inline std::set<std::string> files_in(const std::string& path) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    names.insert(entry.path().filename());
  return names;
}

inline size_t open_descriptors() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

}  // namespace frugal_test::jobs
