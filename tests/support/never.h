// A time-out that is not to run out. The machine of a test may stand still for a while, or have
// other things to do. ctest ends a test that hangs, and calls say before that what they have waited
// for.
#pragma once
#include <cstdint>

constexpr int64_t kNeverMs = 600'000;
