// Assertions about the library's own state. A false one is a bug of the library, never a caller's
// mistake.
//
// FRUGAL_ASSERT(condition): in builds for tests a false condition ends the process and prints its
// text and source line. (Their option FRUGAL_ASSERTS is on with a sanitizer.) In other builds it is
// not evaluated: a library does not end its program.
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
