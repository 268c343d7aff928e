// An engine without flush threads, in which all is done in turn, and a table whose rows may be in a
// storage tier.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "frugal.h"
#include "support/inside.h"
#include "support/slow_store.h"

namespace frugal {

// Once, in the middle of a load of this thread.
inline thread_local std::function<void()> at_load;

class Hooked final : public StorageTier {
 public:
  bool has(uint64_t key) override { return store_.has(key); }
  void forget(uint64_t key) noexcept override { store_.forget(key); }
  void keys(Vector<uint64_t>* out) override { store_.keys(out); }
  Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
              const device::RowsRef& to) override {
    if (at_load) std::exchange(at_load, nullptr)();
    return store_.load(keys, slots, n, to);
  }
  Status store(const uint64_t* keys, size_t n, const device::RowsView& from) override {
    return store_.store(keys, n, from);
  }

 private:
  SlowStore store_{1, 0};
};

using Keys = std::vector<uint64_t>;

struct TierEngine : testing::Test {
  frugal_engine* engine = nullptr;
  frugal_table* handle = nullptr;
  frugal_trainer* trainer = nullptr;
  frugal_trainer* other = nullptr;  // a second rank
  std::shared_ptr<Table> table;
  int64_t timeout_ms = 5000;  // where something goes wrong

  void open(uint64_t rows, uint64_t places, double cache_ratio = 0, uint64_t staleness = 0,
            uint32_t ranks = 1) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.flush_threads = 0;
    config.flush_mode = FRUGAL_FLUSH_DEFERRED;
    config.staleness = staleness;
    config.world_size = ranks;
    config.timeout_ms = timeout_ms;
    ASSERT_OK(frugal_open(&config, &engine));
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "t";
    t.key_space = FRUGAL_HASHED;
    t.rows = rows;
    t.dim = 1;
    t.optimizer.lr = 1;
    static uint64_t of_memory;
    of_memory = places;
    g_make_tier.store([](const frugal_table_config&) {
      Tier tier;
      tier.slots = of_memory;
      tier.store = std::make_unique<Hooked>();
      return tier;
    });
    ASSERT_OK(frugal_table_create(engine, &t, &handle));
    g_make_tier.store(nullptr);
    table = std::static_pointer_cast<Table>(object_of<AnyTable>(handle));
    frugal_trainer_config r = FRUGAL_TRAINER_CONFIG_INIT;
    r.cache_ratio = cache_ratio;
    ASSERT_OK(frugal_trainer_create(engine, &r, &trainer));
    r.rank = 1;
    if (ranks > 1) {
      ASSERT_OK(frugal_trainer_create(engine, &r, &other));
    }
  }
  void close() {
    at_load = nullptr;
    table.reset();
    EXPECT_OK(frugal_close(std::exchange(engine, nullptr)));
  }
  void TearDown() override { close(); }
  frugal_op op(const Keys& keys) {
    frugal_op o = FRUGAL_OP_INIT;
    o.table = handle;
    o.keys = keys.data();
    o.count = keys.size();
    return o;
  }
  void declare(uint64_t step, const Keys& keys) { declare(trainer, step, keys); }
  void declare(frugal_trainer* of, uint64_t step, const Keys& keys) {
    const frugal_op o = op(keys);
    EXPECT_OK(frugal_prefetch(of, step, &o, 1, nullptr));
  }
  int32_t begin(uint64_t step, int64_t timeout_ms = 0) {
    return frugal_step_begin(trainer, step, timeout_ms);
  }
  int32_t lookup(const Keys& keys, float expected) { return lookup(trainer, keys, expected); }
  int32_t lookup(frugal_trainer* of, const Keys& keys, float expected) {
    std::vector<float> out(keys.size(), -1);
    frugal_op o = op(keys);
    o.rows_out = out.data();
    const int32_t s = frugal_lookup(of, &o, 1);
    if (s != FRUGAL_OK) return s;
    for (const float x : out) EXPECT_EQ(x, expected);
    return s;
  }
  // The rows become 1 more.
  void end(uint64_t step, const Keys& keys) {
    const std::vector<float> grads(keys.size(), -1);
    frugal_op o = op(keys);
    o.grads = grads.data();
    EXPECT_OK(frugal_push_grad(trainer, &o, 1));
    EXPECT_OK(frugal_step_end(trainer, step, 0));
  }
  void step(uint64_t s, const Keys& keys, float expected) {
    ASSERT_OK(begin(s, FRUGAL_TIMEOUT_DEFAULT));
    ASSERT_OK(lookup(keys, expected));
    end(s, keys);
  }
  int32_t put(const Keys& keys, float value) {
    const std::vector<float> in(keys.size(), value);
    return frugal_put(handle, keys.data(), keys.size(), 0, in.data(), 0);
  }
  // -1: there is no row.
  float get(uint64_t key) {
    float out = 0;
    uint8_t found = 0;
    EXPECT_OK(frugal_get(handle, &key, 1, 0, &out, 0, &found));
    return found ? out : -1;
  }
  bool here(uint64_t key) {
    uint32_t slot;
    EXPECT_OK(table->rows.resolve(&key, 1, nullptr, Rows::Missing::kLeave, &slot, nullptr));
    table->rows.unhold_backed(&slot, 1);
    return slot != kMissingSlot;
  }
  uint64_t left() { return table->rows.tier()->store().left; }
  // The cache of a rank.
  const TableCache& cache_of(frugal_trainer* rank) {
    return std::static_pointer_cast<Trainer>(object_of<AnyTrainer>(rank))->caches.at(table.get());
  }
};

}  // namespace frugal
