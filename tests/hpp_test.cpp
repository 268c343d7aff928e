// frugal.hpp: the wrapper calls what it says, throws what it says, and frees what it holds.
#include "frugal.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace {

template <typename T>
constexpr bool kMoveOnly = std::is_nothrow_move_constructible_v<T> &&
                           std::is_nothrow_move_assignable_v<T> &&
                           !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(kMoveOnly<frugal::Engine> && kMoveOnly<frugal::Table> &&
              kMoveOnly<frugal::Trainer> && kMoveOnly<frugal::Batch>);

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
  table.Drop();
  EXPECT_EQ(StatusOf([&] { engine.FindTable("h"); }), FRUGAL_ERR_NOT_FOUND);
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
