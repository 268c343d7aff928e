// A time-out that is not to run out. The machine of a test may stop for a while, or have other
// things to do. ctest ends a test that hangs. Before that, calls report what they have waited for.
#pragma once
#include <cstdint>

constexpr int64_t kNeverMs = 600'000;
