// What must hold and is nobody's mistake but ours.
//
// FRUGAL_ASSERT(condition): in builds for tests (the option FRUGAL_ASSERTS, which is on with a
// sanitizer) a condition that does not hold ends the process, with its text and place. In others it
// is not evaluated: a library does not end its program.
#pragma once
#ifdef FRUGAL_ASSERTS
#include <cstdio>
#include <cstdlib>

namespace frugal {

[[noreturn]] inline void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: FRUGAL_ASSERT(%s) does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace frugal

#define FRUGAL_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::frugal::assertion_failed(#condition, __FILE__, __LINE__))
#else
#define FRUGAL_ASSERT(condition) static_cast<void>(sizeof(!(condition)))
#endif
