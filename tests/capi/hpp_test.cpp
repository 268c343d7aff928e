// frugal.hpp: each wrapper makes the call that it names, throws the documented exception, and frees
// what it holds.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "frugal.hpp"

namespace {

template <typename T>
constexpr bool kMoveOnly =
    std::is_nothrow_move_constructible_v<T>&& std::is_nothrow_move_assignable_v<T> &&
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kMoveOnly<frugal::Engine> && kMoveOnly<frugal::Table> && kMoveOnly<frugal::Trainer> &&
              kMoveOnly<frugal::Batch>);

int32_t StatusOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const frugal::Error& e) {
    EXPECT_NE(std::string(e.what()).find(frugal_status_name(e.status())), std::string::npos);
    return e.status();
  }
  return FRUGAL_OK;
}

TEST(Hpp, TrainsWithSgd) {
  frugal::Engine engine;
  auto config = frugal::TableConfig("t", 10, 4);
  config.init_a = 1.0f;
  config.optimizer.lr = 0.5f;
  frugal::Table table = engine.CreateTable(config);
  EXPECT_EQ(table.dim(), 4u);
  frugal::Trainer trainer = engine.CreateTrainer();
  const std::vector<uint64_t> keys = {3, 7, 3};
  std::vector<float> rows(12), grads(12, 1.0f);
  EXPECT_FALSE(engine.CommittedStep().has_value());

  frugal::Batch batch = trainer.Prefetch(5, table, keys);
  EXPECT_EQ(batch.floats(), 12u);
  trainer.StepBegin(5);
  trainer.Lookup(batch, rows);
  EXPECT_EQ(rows, std::vector<float>(12, 1.0f));
  trainer.PushGrad(batch, grads);
  trainer.StepEnd(5);

  trainer.StepBegin(6);
  trainer.Lookup(table, keys, rows);
  EXPECT_EQ(rows[0], 0.0f);  // 1 - 0.5 * (1 + 1)
  EXPECT_EQ(rows[4], 0.5f);
  frugal::Span<float> lent = trainer.Borrow(12);
  for (float& g : lent) g = 0.0f;
  trainer.PushGrad(table, keys, lent);
  trainer.StepEnd(6);
  EXPECT_EQ(engine.CommittedStep(), 6u);
  engine.Flush();
  EXPECT_EQ(engine.Stats().steps_committed, 2u);
  EXPECT_EQ(engine.Health(), FRUGAL_OK);

  std::array<float, 4> row = {};
  const uint64_t seven[] = {7};
  table.Get(seven, row);
  EXPECT_EQ(row[3], 0.5f);
  trainer.Close();
  engine.Close();
}

TEST(Hpp, RowsOutsideSteps) {
  frugal::Engine engine;
  auto config = frugal::TableConfig("h", 100, 2);
  config.key_space = FRUGAL_HASHED;
  frugal::Table table = engine.CreateTable(config);
  const std::vector<uint64_t> keys = {~uint64_t{0}, 0, 42};
  table.Put(keys, std::vector<float>{1, 2, 3, 4, 5, 6});
  EXPECT_EQ(table.Count(), 3u);
  EXPECT_EQ(table.Keys().size(), 3u);
  EXPECT_EQ(table.Delete(std::vector<uint64_t>{42, 43}), 1u);
  std::vector<float> rows(6, -1.0f);
  std::vector<uint8_t> found(3);
  table.Get(keys, rows, found);
  EXPECT_EQ(rows, (std::vector<float>{1, 2, 3, 4, -1, -1}));
  EXPECT_EQ(found, (std::vector<uint8_t>{1, 1, 0}));
  EXPECT_EQ(engine.FindTable("h").get(), table.get());
  engine.CreateTable(frugal::TableConfig("other", 1, 1));
  EXPECT_EQ(engine.TableNames(), (std::vector<std::string>{"h", "other"}));
  table.Drop();
  EXPECT_EQ(engine.TableNames(), std::vector<std::string>{"other"});
  EXPECT_EQ(StatusOf([&] { engine.FindTable("h"); }), FRUGAL_ERR_NOT_FOUND);
}

TEST(Hpp, RowsTravelWithState) {
  frugal::Engine engine;
  auto config = frugal::TableConfig("t", 10, 2);
  config.optimizer = frugal::Optimizer(FRUGAL_ADAGRAD);
  config.optimizer.initial_accumulator = 0.25f;
  frugal::Table table = engine.CreateTable(config);
  EXPECT_EQ(table.RowFloats(), 2u);
  EXPECT_EQ(table.RowFloats(FRUGAL_WITH_STATE), 4u);
  const std::vector<uint64_t> keys = {5, 6};
  const std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
  table.Put(keys, values, FRUGAL_WITH_STATE);
  std::vector<float> rows(8);
  table.Get(keys, rows, {}, FRUGAL_WITH_STATE);
  EXPECT_EQ(rows, values);
  table.Put(keys, std::vector<float>{9, 9, 9, 9});
  table.Get(keys, rows, {}, FRUGAL_WITH_STATE);
  EXPECT_EQ(rows, (std::vector<float>{9, 9, 0.25f, 0.25f, 9, 9, 0.25f, 0.25f}));
  EXPECT_EQ(StatusOf([&] { table.Put(keys, std::vector<float>(7), FRUGAL_WITH_STATE); }),
            FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST(Hpp, OpsOfManyTablesAndBags) {
  frugal::Engine engine;
  auto config = frugal::TableConfig("a", 10, 2);
  config.init_a = 1.0f;
  config.optimizer.lr = 1.0f;
  frugal::Table a = engine.CreateTable(config);
  config.name = "b";
  frugal::Table b = engine.CreateTable(config);
  frugal::Trainer trainer = engine.CreateTrainer();
  const std::vector<uint64_t> keys = {1, 2, 3}, none, offsets = {0, 2, 3};
  const std::vector<float> weights = {1, 2, 4};
  std::vector<float> rows(6), bags(4), grads = {1, 1, 0, 0};
  frugal::Batch batch =
      trainer.Prefetch(0, std::vector<frugal_op>{frugal::Op(a, keys), frugal::Op(b, keys)});
  trainer.StepBegin(0);
  std::vector<frugal_op> ops = {frugal::Op(a, batch, 0), frugal::Op(b, batch, 1)};
  frugal::SetBags(&ops[0], FRUGAL_POOL_SUM, offsets, weights);
  ops[0].rows_out = bags.data();
  ops[0].grads = grads.data();
  frugal::SetPadding(&ops[1], 2);  // not as declared: the keys have to be given
  ops[1].rows_out = rows.data();
  EXPECT_EQ(StatusOf([&] { trainer.Lookup(ops); }), FRUGAL_ERR_INVALID_ARGUMENT);
  ops[1].keys = keys.data();
  ops[1].count = keys.size();
  trainer.Lookup(ops);
  EXPECT_EQ(bags, (std::vector<float>{3, 3, 4, 4}));
  EXPECT_EQ(rows, (std::vector<float>{1, 1, 0, 0, 1, 1}));
  std::vector<float> weight_grads(3);
  ops[0].weight_grads_out = weight_grads.data();
  trainer.PushGrad({&ops[0], 1});
  EXPECT_EQ(weight_grads, (std::vector<float>{2, 2, 0}));
  // No keys of a declared batch are none, not all.
  frugal_op nothing = frugal::Op(a, none);
  nothing.batch = batch.get();
  trainer.Lookup({&nothing, 1});
  trainer.StepEnd(0);
  ops = {frugal::Op(a, keys)};
  ops[0].rows_out = rows.data();
  engine.Read(nullptr, ops);
  EXPECT_EQ(rows, (std::vector<float>{0, 0, -1, -1, 1, 1}));
  EXPECT_EQ(StatusOf([&] { frugal::SetBags(&ops[0], FRUGAL_POOL_SUM, none); }),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(StatusOf([&] {
              frugal::SetBags(&ops[0], FRUGAL_POOL_SUM, offsets, {grads.data(), 2});
            }),
            FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST(Hpp, TellsWhatItDoes) {
  frugal::Engine engine;
  // More text than a first guess would hold.
  for (int i = 0; i < 100; ++i) {
    const std::string name = "a table with a long name, so that the text is long, too " +
                             std::to_string(i) + std::string(150, 'x');
    engine.CreateTable(frugal::TableConfig(name.c_str(), 1, 1));
  }
  const std::string text = engine.Metrics();
  EXPECT_NE(text.find("\nfrugal_steps_committed_total 0\n"), std::string::npos);
  EXPECT_NE(text.find("too 99"), std::string::npos);
  EXPECT_GT(text.size(), 50'000u);
  EXPECT_EQ(text.back(), '\n');

  const std::string path = testing::TempDir() + "hpp_test_trace.json";
  engine.TraceStart();
  EXPECT_EQ(StatusOf([&] { engine.TraceStart(10); }), FRUGAL_ERR_EXISTS);
  frugal::Trainer trainer = engine.CreateTrainer();
  trainer.StepBegin(0);
  trainer.StepEnd(0);
  engine.TraceStop(path.c_str());
  std::stringstream written;
  written << std::ifstream(path).rdbuf();
  EXPECT_EQ(written.str().rfind("{\"traceEvents\":[", 0), 0u);
  EXPECT_NE(written.str().find("\"step_begin\""), std::string::npos);
  std::remove(path.c_str());
  EXPECT_EQ(StatusOf([&] { engine.TraceStop(nullptr); }), FRUGAL_ERR_NOT_FOUND);

  EXPECT_EQ(StatusOf([&] { engine.Serve("/tmp/none"); }),
            FRUGAL_ERR_INVALID_ARGUMENT);  // private memory
  frugal_config config = frugal::Config();
  config.service = "/tmp/none";
  config.timeout_ms = 100;
  EXPECT_NE(StatusOf([&] { frugal::Engine attached(config); }), FRUGAL_OK);
}

TEST(Hpp, StatusesBecomeErrors) {
  frugal::Engine engine;
  frugal::Table table = engine.CreateTable(frugal::TableConfig("t", 10, 4));
  frugal::Trainer trainer = engine.CreateTrainer();
  std::vector<float> few(3);
  const std::vector<uint64_t> bad = {10};
  EXPECT_EQ(StatusOf([&] { trainer.StepEnd(0); }), FRUGAL_ERR_NOT_IN_STEP);
  EXPECT_EQ(StatusOf([&] { trainer.Prefetch(0, table, bad); }), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(StatusOf([&] { table.Get(bad, few); }), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(StatusOf([&] { engine.CreateTrainer(); }), FRUGAL_ERR_EXISTS);
}

TEST(Hpp, WhatIsRefusedStaysAsItWas) {
  frugal::Engine engine;
  frugal::Table table = engine.CreateTable(frugal::TableConfig("t", 10, 1));
  frugal::Trainer trainer = engine.CreateTrainer();
  const std::vector<uint64_t> keys = {1};
  std::vector<float> rows(1);
  frugal::Batch batch = trainer.Prefetch(0, table, keys);
  trainer.StepBegin(0);
  EXPECT_EQ(StatusOf([&] { table.Drop(); }), FRUGAL_ERR_BUSY);
  EXPECT_EQ(StatusOf([&] { trainer.Cancel(std::move(batch)); }), FRUGAL_ERR_STEP_RANGE);
  trainer.Lookup(batch, rows);
  trainer.StepEnd(0);
  EXPECT_EQ(table.Count(), 10u);
  batch = trainer.Prefetch(1, table, keys);
  trainer.Cancel(std::move(batch));
  EXPECT_EQ(batch.get(), nullptr);
  table.Drop();
  EXPECT_EQ(table.get(), nullptr);
}

TEST(Hpp, WhatIsMovedFromHoldsNothing) {
  frugal::Engine engine;
  frugal::Table small = engine.CreateTable(frugal::TableConfig("small", 10, 4));
  frugal::Table large = engine.CreateTable(frugal::TableConfig("large", 10, 64));
  const uint64_t keys[] = {1, 2};
  std::vector<float> rows(2 * 64);
  large = std::move(small);
  EXPECT_EQ(large.dim(), 4u);
  EXPECT_EQ(small.get(), nullptr);
  EXPECT_EQ(small.dim(), 0u);
  EXPECT_THROW(small.Get(keys, rows), frugal::Error);

  frugal::Trainer trainer = engine.CreateTrainer();
  frugal::Batch batch = trainer.Prefetch(0, large, keys);
  trainer.StepBegin(0);
  frugal::Batch other = std::move(batch);
  EXPECT_EQ(batch.size(), 0u);
  EXPECT_THROW(trainer.Lookup(batch, rows), frugal::Error);
  EXPECT_THROW(trainer.PushGrad(batch, rows), frugal::Error);
  EXPECT_THROW(frugal::Op(large, batch), frugal::Error);
  trainer.Lookup(other, rows);
  EXPECT_THROW(trainer.Borrow(SIZE_MAX / 4 + 2), frugal::Error);
  trainer.StepEnd(0);

  // The rank that is given up is free at once, and the engine that is given up is closed.
  trainer = frugal::Trainer();
  EXPECT_THROW(engine.Read(&trainer, {}), frugal::Error);
  trainer = engine.CreateTrainer();
  frugal_engine* old = engine.get();
  engine = frugal::Engine();
  EXPECT_EQ(frugal_health(old), FRUGAL_ERR_BAD_HANDLE);
}

TEST(Hpp, AnyOrderOfDestruction) {
  frugal::Trainer trainer;
  {
    frugal::Engine engine;
    trainer = engine.CreateTrainer();
    frugal::Engine moved = std::move(engine);
    EXPECT_EQ(engine.get(), nullptr);
    engine = std::move(moved);
  }
  EXPECT_EQ(StatusOf([&] { trainer.StepBegin(0); }), FRUGAL_ERR_BAD_HANDLE);
}

}  // namespace
