// For tests that make the same calls to an engine of this process and to one that a controller has.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "frugal.h"
#include "support/never.h"
#ifdef FRUGAL_CONTROLLER
#include "controller.h"
#endif

inline std::string Error() {
  frugal_error e;
  frugal_last_error(&e);
  return e.message;
}
#define OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << Error()

// A part of a test's fixture.
struct Opened {
  // The controller is started when it is first wanted.
  frugal_config Config(uint32_t world, bool attached) {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.world_size = world;
    c.timeout_ms = kNeverMs;
#ifdef FRUGAL_CONTROLLER
    address_ = folder_.address();
    if (attached && !controller_) {
      controller_ = std::make_unique<ControllerProgram>(address_);
      EXPECT_TRUE(controller_->serves());
    }
    if (attached) c.service = address_.c_str();
#else
    EXPECT_FALSE(attached);
#endif
    return c;
  }
  static frugal_table_config TableConfig(const char* name, int32_t key_space = FRUGAL_DENSE,
                                         uint64_t rows = 100) {
    frugal_table_config c = FRUGAL_TABLE_CONFIG_INIT;
    c.name = name;
    c.key_space = key_space;
    c.rows = rows;
    c.dim = kDim;
    return c;
  }
  static frugal_op Op(frugal_table* table, const uint64_t* keys, size_t count, float* rows) {
    frugal_op op = FRUGAL_OP_INIT;
    op.table = table;
    op.keys = keys;
    op.count = count;
    op.rows_out = rows;
    op.grads = rows;
    return op;
  }

  static constexpr uint32_t kDim = 4;
#ifdef FRUGAL_CONTROLLER
  const Folder folder_;
  std::unique_ptr<ControllerProgram> controller_;
#endif
  std::string address_;
};
