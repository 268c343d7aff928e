// After a served table changes its optimizer's kind, attached processes train and read out the rows
// and state of an engine of threads.
//
// Processes have caches and simulated GPUs. The same holds after the controller's death.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "controller.h"
#include "frugal.h"
#include "support/engine.h"
#include "support/never.h"
#include "support/ok.h"

namespace {

using frugal_test::Engine;
constexpr uint32_t kDim = 8;
constexpr uint64_t kRows = 400;
constexpr size_t kKeys = 60;

frugal_optimizer OfKind(int32_t kind, uint32_t flags = 0) {
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  o.kind = kind;
  o.lr = 0.25f;
  o.flags = flags;
  return o;
}

struct Way {
  const char* name;
  const char* device;
  double cache;
  int32_t key_space;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

// Two ranks, of one engine or of one each.
struct Ranks {
  Ranks(const Way& way, const char* service) {
    const Engine::Change attach = [&](frugal_config* c) {
      c->service = service;
      c->host_bytes = 1ull << 30;
    };
    engines.push_back(std::make_unique<Engine>(2, attach));
    if (service) engines.push_back(std::make_unique<Engine>(2, attach));
    for (auto& e : engines)
      tables.push_back(e->Table("t", way.key_space, kRows, kDim, [](frugal_table_config* c) {
        c->init = FRUGAL_INIT_UNIFORM;
        c->init_a = -1;
        c->init_b = 1;
        c->optimizer = OfKind(FRUGAL_SGD);
      }));
    for (uint32_t rank = 0; rank < 2; ++rank)
      trainers.push_back(engines[rank % engines.size()]->Trainer(rank, way.cache, way.device));
  }
  frugal_table* table(size_t rank) const { return tables[rank % tables.size()]; }
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<frugal_table*> tables;
  std::vector<frugal_trainer*> trainers;
};

class Kind : public testing::TestWithParam<Way> {
 protected:
  static std::vector<uint64_t> KeysOf(uint64_t step, uint32_t rank) {
    std::mt19937 random(static_cast<uint32_t>(2 * step + rank));
    std::vector<uint64_t> keys(kKeys);
    for (uint64_t& k : keys) k = random() % kRows * (random() % kRows) % kRows;
    return keys;
  }
  // A step of both, with the same random keys and gradients; the rows that are looked up are the
  // same. Keys are declared two steps ahead, so that there is something to cache.
  void Step() {
    std::vector<std::vector<float>> seen;
    for (Ranks* ranks : {&threads_, &processes_}) {
      for (uint64_t s = step_ == 0 ? 0 : step_ + 2; s <= step_ + 2; ++s)
        for (uint32_t rank = 0; rank < 2; ++rank) {
          const std::vector<uint64_t> keys = KeysOf(s, rank);
          frugal_op op = FRUGAL_OP_INIT;
          op.table = ranks->table(rank);
          op.keys = keys.data();
          op.count = kKeys;
          ASSERT_OK(frugal_prefetch(ranks->trainers[rank], s, &op, 1, nullptr));
        }
      std::mt19937 random(static_cast<uint32_t>(step_) + 1);
      for (uint32_t rank = 0; rank < 2; ++rank)
        ASSERT_OK(frugal_step_begin(ranks->trainers[rank], step_, kNeverMs));
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const std::vector<uint64_t> keys = KeysOf(step_, rank);
        std::vector<float> rows(kKeys * kDim), grads(kKeys * kDim);
        for (float& g : grads) g = static_cast<float>(random() % 2001) / 1000 - 1;
        frugal_op op = FRUGAL_OP_INIT;
        op.table = ranks->table(rank);
        op.keys = keys.data();
        op.count = kKeys;
        op.rows_out = rows.data();
        ASSERT_OK(frugal_lookup(ranks->trainers[rank], &op, 1));
        op.rows_out = nullptr;
        op.grads = grads.data();
        ASSERT_OK(frugal_push_grad(ranks->trainers[rank], &op, 1));
        seen.push_back(std::move(rows));
      }
      for (uint32_t rank = 0; rank < 2; ++rank)
        ASSERT_OK(frugal_step_end(ranks->trainers[rank], step_, 0));
    }
    EXPECT_EQ(seen[0], seen[2]);
    EXPECT_EQ(seen[1], seen[3]);
    ++step_;
  }
  static std::vector<float> All(frugal_table* table, uint32_t columns) {
    std::vector<uint64_t> keys(kRows);
    for (uint64_t k = 0; k < kRows; ++k) keys[k] = k;
    std::vector<float> rows(kRows * kDim * (1 + columns), -7);
    std::vector<uint8_t> found(kRows);
    EXPECT_OK(
        frugal_get(table, keys.data(), kRows, FRUGAL_WITH_STATE, rows.data(), 0, found.data()));
    rows.insert(rows.end(), found.begin(), found.end());
    return rows;
  }
  // Rows and state are the same from all engines.
  void Same(uint32_t columns) {
    const std::vector<float> want = All(threads_.tables[0], columns);
    for (frugal_table* table : processes_.tables) EXPECT_EQ(want, All(table, columns));
  }
  void Give(const frugal_optimizer& o) {
    ASSERT_OK(frugal_table_set_optimizer(threads_.tables[0], step_, &o));
    ASSERT_OK(frugal_table_set_optimizer(processes_.tables[0], step_, &o));
  }

  Folder folder_;
  const std::string address_ = folder_.address();
  ControllerProgram controller_{address_};
  Ranks threads_{GetParam(), nullptr}, processes_{GetParam(), address_.c_str()};
  uint64_t step_ = 0;
};

TEST_P(Kind, IsAnotherForAll) {
  for (int i = 0; i < 4; ++i) Step();
  Same(0);
  const frugal_optimizer adam = OfKind(FRUGAL_ADAM);
  ASSERT_NO_FATAL_FAILURE(Give(OfKind(FRUGAL_ADAM, FRUGAL_OPT_NEW_STATE)));
  // The other process says it, too; or it finds it out.
  ASSERT_OK(frugal_table_set_optimizer(processes_.tables[1], step_, &adam));
  Same(2);
  for (int i = 0; i < 4; ++i) Step();
  Same(2);
  Give(OfKind(FRUGAL_ADAGRAD, FRUGAL_OPT_NEW_STATE));
  for (int i = 0; i < 4; ++i) Step();
  Same(1);
  Give(OfKind(FRUGAL_MOMENTUM, FRUGAL_OPT_NEW_STATE));
  Step();
  EXPECT_EQ(1000 + SIGKILL, controller_.end(SIGKILL));
  Same(1);
}

// State is given up and begun anew, of the same kind.
TEST_P(Kind, BeginsAnew) {
  Give(OfKind(FRUGAL_ADAM));
  for (int i = 0; i < 3; ++i) Step();
  Give(OfKind(FRUGAL_ADAM, FRUGAL_OPT_NEW_STATE));
  Same(2);
  for (int i = 0; i < 3; ++i) Step();
  Same(2);
}

// A process that has not heard of it before the controller died has mapped other state.
TEST_P(Kind, IsNotHeardOf) {
  Step();
  Give(OfKind(FRUGAL_ADAM, FRUGAL_OPT_NEW_STATE));
  EXPECT_EQ(1000 + SIGKILL, controller_.end(SIGKILL));
  EXPECT_EQ(All(threads_.tables[0], 2), All(processes_.tables[0], 2));
  const uint64_t key = 1;
  float row[kDim];
  EXPECT_EQ(FRUGAL_ERR_PEER_LOST, frugal_get(processes_.tables[1], &key, 1, 0, row, 0, nullptr));
  frugal_error e;
  frugal_last_error(&e);
  EXPECT_NE(nullptr, std::strstr(e.message, "another kind of optimizer")) << e.message;
}

INSTANTIATE_TEST_SUITE_P(Ways, Kind,
                         testing::Values(Way{"Dense", nullptr, 0, FRUGAL_DENSE},
                                         Way{"Hashed", nullptr, 0, FRUGAL_HASHED},
                                         Way{"Cache", nullptr, 0.5, FRUGAL_DENSE},
                                         Way{"Sim", "sim:0", 0, FRUGAL_DENSE},
                                         Way{"SimCache", "sim:0", 0.5, FRUGAL_DENSE},
                                         Way{"SimCacheHashed", "sim:0", 0.5, FRUGAL_HASHED}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
