// Calls that have to succeed. What the library says of one that does not is LastMessage(): of the C
// ABI, here, or of a part of the library (inside.h).
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "frugal.h"

#define ASSERT_OK(call) ASSERT_EQ(FRUGAL_OK, (call)) << #call << ": " << LastMessage()
#define EXPECT_OK(call) EXPECT_EQ(FRUGAL_OK, (call)) << #call << ": " << LastMessage()

inline std::string LastMessage() {
  frugal_error error;
  frugal_last_error(&error);
  return error.message == nullptr ? std::string() : error.message;
}
