// Rows that may be far, in an engine without flush threads, where all is done in turn: whose places
// a gate, or a call, may have, and what operations outside steps find.
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "frugal.h"
#include "support/inside.h"
#include "support/slow_store.h"

namespace frugal {
namespace {

uint64_t g_places = 0;
std::function<void()> g_load;  // once, in the middle of a load

class Hooked final : public FarStore {
 public:
  bool has(uint64_t key) override { return store_.has(key); }
  void forget(uint64_t key) noexcept override { store_.forget(key); }
  void keys(Vector<uint64_t>* out) override { store_.keys(out); }
  Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
              const device::RowsRef& to) override {
    if (g_load) std::exchange(g_load, nullptr)();
    return store_.load(keys, slots, n, to);
  }
  Status store(const uint64_t* keys, size_t n, const device::RowsView& from) override {
    return store_.store(keys, n, from);
  }

 private:
  SlowStore store_{1, 0};
};

using Keys = std::vector<uint64_t>;

struct FarTest : testing::Test {
  frugal_engine* engine = nullptr;
  frugal_table* handle = nullptr;
  frugal_trainer* trainer = nullptr;
  frugal_trainer* other = nullptr;  // a second rank
  std::shared_ptr<Table> table;
  int64_t timeout_ms = 5000;  // where something goes wrong

  void open(uint64_t rows, uint64_t places, double cache_ratio = 0, uint64_t staleness = 0) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.flush_threads = 0;
    config.flush_mode = FRUGAL_FLUSH_DEFERRED;
    config.staleness = staleness;
    config.world_size = staleness ? 2 : 1;
    config.timeout_ms = timeout_ms;
    ASSERT_OK(frugal_open(&config, &engine));
    frugal_table_config t = FRUGAL_TABLE_CONFIG_INIT;
    t.name = "t";
    t.key_space = FRUGAL_HASHED;
    t.rows = rows;
    t.dim = 1;
    t.optimizer.lr = 1;
    g_places = places;
    g_make_far_rows.store([](const frugal_table_config&) {
      FarRows far;
      far.places = g_places;
      far.store = std::make_unique<Hooked>();
      return far;
    });
    ASSERT_OK(frugal_table_create(engine, &t, &handle));
    g_make_far_rows.store(nullptr);
    table = std::static_pointer_cast<Table>(object_of<AnyTable>(handle));
    frugal_trainer_config r = FRUGAL_TRAINER_CONFIG_INIT;
    r.cache_ratio = cache_ratio;
    ASSERT_OK(frugal_trainer_create(engine, &r, &trainer));
    r.rank = 1;
    if (staleness) ASSERT_OK(frugal_trainer_create(engine, &r, &other));
  }
  void TearDown() override {
    g_load = nullptr;
    table.reset();
    EXPECT_OK(frugal_close(engine));
  }
  frugal_op op(const Keys& keys) {
    frugal_op o = FRUGAL_OP_INIT;
    o.table = handle;
    o.keys = keys.data();
    o.count = keys.size();
    return o;
  }
  void declare(uint64_t step, const Keys& keys) {
    const frugal_op o = op(keys);
    EXPECT_OK(frugal_prefetch(trainer, step, &o, 1, nullptr));
  }
  int32_t begin(uint64_t step, int64_t timeout_ms = 0) {
    return frugal_step_begin(trainer, step, timeout_ms);
  }
  int32_t lookup(const Keys& keys, float expected) {
    std::vector<float> out(keys.size(), -1);
    frugal_op o = op(keys);
    o.rows_out = out.data();
    const int32_t s = frugal_lookup(trainer, &o, 1);
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
    table->rows.unhold(&slot, 1);
    return slot != kMissingSlot;
  }
  uint64_t left() { return table->rows.far()->left; }
};

TEST_F(FarTest, UpdatesThatAreNotWrittenHoldTheirRowsUntilAGateWantsThePlaces) {
  open(100, 4);
  const Keys first = {1, 2, 3, 4}, other = {5, 6, 7, 8};
  declare(0, first);
  step(0, first, 0);
  EXPECT_TRUE(table->window.any_pending());
  declare(1, other);
  EXPECT_TRUE(table->rows.lacking());
  EXPECT_TRUE(table->window.any_pending());
  EXPECT_EQ(left(), 0u);
  step(1, other, 0);
  EXPECT_EQ(left(), 4u);
  declare(2, first);
  step(2, first, 1);
}

TEST_F(FarTest, LaterStepsGiveWayToAGateAndToNobodyElse) {
  open(100, 4);
  step(0, {9}, 0);
  ASSERT_OK(frugal_flush(engine, FRUGAL_TIMEOUT_DEFAULT));
  const Keys soon = {4, 5}, later = {1, 2, 3}, last = {6};
  declare(2, later);
  declare(3, last);
  EXPECT_FALSE(table->rows.lacking());
  declare(1, soon);  // it finds none: the two steps stay
  EXPECT_TRUE(table->rows.lacking());
  step(1, soon, 0);
  step(2, later, 0);
  step(3, last, 0);
  for (const uint64_t key : {1, 2, 3, 4, 5, 6, 9}) EXPECT_EQ(get(key), 1);
}

TEST_F(FarTest, LaterStepsAndCachesGiveWayToACall) {
  open(100, 4, 0.5);
  step(0, {9}, 0);
  const Keys cached = {1, 2}, called = {3, 4, 5, 6}, later = {1, 7};
  declare(1, cached);
  declare(2, cached);
  step(1, cached, 0);
  step(2, cached, 1);
  declare(4, later);
  ASSERT_OK(begin(3));
  EXPECT_EQ(lookup({1, 2, 3, 4, 5}, 0), FRUGAL_ERR_TABLE_FULL);
  ASSERT_OK(lookup(called, 0));
  end(3, called);
  ASSERT_OK(begin(4, FRUGAL_TIMEOUT_DEFAULT));
  ASSERT_OK(lookup({1}, 2));
  ASSERT_OK(lookup({7}, 0));
  end(4, later);
}

// Not even to a call of an earlier step.
TEST_F(FarTest, AStepThatHasBegunGivesNothingUp) {
  timeout_ms = 50;  // which it will take: nobody lets go of a place
  open(100, 4, 0, 1);
  const Keys first = {1, 2, 3}, more = {4, 5};
  ASSERT_OK(begin(0));
  ASSERT_OK(frugal_step_end(trainer, 0, 0));
  declare(1, first);
  ASSERT_OK(begin(1));
  ASSERT_OK(frugal_step_begin(other, 0, 0));
  std::vector<float> out(2);
  frugal_op o = op(more);
  o.rows_out = out.data();
  ASSERT_EQ(frugal_lookup(other, &o, 1), FRUGAL_ERR_TIMEOUT);
  ASSERT_OK(lookup(first, 0));
  for (const uint64_t key : first) EXPECT_TRUE(here(key));
}

// Outside steps rows and caches are the operation's.
TEST_F(FarTest, NoCacheIsGivenUpBesideAnOperationOutsideSteps) {
  open(100, 4, 0.5);
  const Keys first = {6, 7, 8, 9}, cached = {1, 2}, wanted = {100, 101, 102};
  declare(0, first);
  step(0, first, 0);
  declare(1, cached);
  declare(2, cached);
  step(1, cached, 0);
  step(2, cached, 1);
  const auto rank = std::static_pointer_cast<Trainer>(object_of<AnyTrainer>(trainer));
  const TableCache& cache = rank->caches.at(table.get());
  ASSERT_TRUE(cache.any());
  std::optional<uint64_t> far;
  for (const uint64_t key : first)
    if (!here(key)) far = key;
  ASSERT_TRUE(far);
  declare(4, {*far});
  ASSERT_TRUE(table->rows.loading());
  declare(3, wanted);
  ASSERT_TRUE(table->rows.lacking());
  bool looked = false;
  g_load = [&] {
    std::thread gate([&] {
      EXPECT_EQ(begin(3, 20), FRUGAL_ERR_TIMEOUT);
      EXPECT_TRUE(cache.any());
      looked = true;
    });
    gate.join();
  };
  ASSERT_OK(put({*far}, 5));
  EXPECT_TRUE(looked);
  step(3, wanted, 0);
  EXPECT_FALSE(here(1) && here(2));
  ASSERT_OK(begin(4));
  ASSERT_OK(lookup({*far}, 5));
  end(4, {*far});
  EXPECT_EQ(get(1), 2);
}

TEST_F(FarTest, APutIntoAFullTableChangesNothing) {
  open(4, 2);
  ASSERT_OK(put({1, 2, 3}, 1));
  EXPECT_EQ(put({1, 4, 5}, 2), FRUGAL_ERR_TABLE_FULL);
  EXPECT_EQ(get(1), 1);
  EXPECT_EQ(get(4), -1);
  // What is only declared gives way.
  declare(0, {6});
  ASSERT_OK(put({1, 4, 4}, 2));
  EXPECT_EQ(get(1), 2);
  EXPECT_EQ(get(4), 2);
  uint64_t count = 0, deleted = 0;
  ASSERT_OK(frugal_table_count(handle, &count));
  EXPECT_EQ(count, 4u);
  const uint64_t key = 2;
  ASSERT_OK(frugal_delete(handle, &key, 1, &deleted));
  EXPECT_EQ(deleted, 1u);
  step(0, {6}, 0);
  EXPECT_EQ(put({7}, 1), FRUGAL_ERR_TABLE_FULL);
}

TEST_F(FarTest, TheKindOfTheOptimizerStaysWhileRowsAreAway) {
  open(8, 2);
  frugal_optimizer adam = FRUGAL_OPTIMIZER_INIT;
  adam.kind = FRUGAL_ADAM;
  ASSERT_OK(put({1}, 1));
  EXPECT_EQ(frugal_table_set_optimizer(handle, 0, &adam), FRUGAL_ERR_UNSUPPORTED);
  declare(0, {1});
  step(0, {1}, 1);
  adam.flags = FRUGAL_OPT_NEW_STATE;
  ASSERT_OK(frugal_table_set_optimizer(handle, 1, &adam));
}

}  // namespace
}  // namespace frugal
