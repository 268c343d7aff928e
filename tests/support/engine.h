// An engine that closes itself, with short names for what most tests of the C ABI do. A test that
// wants other tables or trainers derives from it.
#pragma once
#include <cstdint>
#include <functional>

#include "frugal.h"
#include "support/never.h"
#include "support/ok.h"

namespace frugal_test {

struct Engine {
  using Change = std::function<void(frugal_config*)>;

  explicit Engine(uint32_t world_size = 1, const Change& change = nullptr) {
    frugal_config config = FRUGAL_CONFIG_INIT;
    config.world_size = world_size;
    config.timeout_ms = kNeverMs;
    if (change) change(&config);
    EXPECT_OK(frugal_open(&config, &handle));
  }
  explicit Engine(const Change& change) : Engine(1, change) {}
  ~Engine() { Close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void Close() {
    if (handle != nullptr) {
      EXPECT_OK(frugal_close(handle));
    }
    handle = nullptr;
  }
  operator frugal_engine*() const { return handle; }

  frugal_table* Table(const char* name, int32_t key_space, uint64_t rows, uint32_t dim,
                      const std::function<void(frugal_table_config*)>& change = nullptr) {
    frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
    config.name = name;
    config.key_space = key_space;
    config.rows = rows;
    config.dim = dim;
    config.optimizer.lr = 1;
    if (change) change(&config);
    frugal_table* table = nullptr;
    EXPECT_OK(frugal_table_create(handle, &config, &table));
    return table;
  }
  frugal_trainer* Trainer(uint32_t rank, double cache_ratio = 0, const char* device = nullptr) {
    frugal_trainer_config config = FRUGAL_TRAINER_CONFIG_INIT;
    config.rank = rank;
    config.cache_ratio = cache_ratio;
    config.device = device;
    frugal_trainer* trainer = nullptr;
    EXPECT_OK(frugal_trainer_create(handle, &config, &trainer));
    return trainer;
  }
  uint64_t Committed() const {
    uint64_t step = 0;
    EXPECT_OK(frugal_committed_step(handle, &step));
    return step;
  }
  frugal_stats Stats() const {
    frugal_stats stats{};
    stats.struct_size = sizeof stats;
    EXPECT_OK(frugal_get_stats(handle, &stats));
    return stats;
  }

  frugal_engine* handle = nullptr;  // null: a test has closed it
};

}  // namespace frugal_test
