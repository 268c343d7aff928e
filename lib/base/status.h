// Status values inside the library, and the thread's last error.
//
// Inside the library a failure travels as `Status` (0 or a negative frugal_status); whoever finds
// it records the message at once with fail(). Exceptions are used by the standard library only
// (allocation); the C boundary turns them into a status. Nothing here prints.
#pragma once
#include <cstdint>

#include "base/heap.h"
#include "base/this_thread.h"
#include "frugal.h"

namespace frugal {

using Status = int32_t;

// Records `status` and the message, which end_call makes this thread's last error; returns
// `status`.
[[gnu::format(printf, 2, 3)]] Status fail(Status status, const char* format, ...);
// The same with the errno behind it.
[[gnu::format(printf, 3, 4)]] Status fail_errno(Status status, int code, const char* format, ...);
// The same with the device's error behind it.
[[gnu::format(printf, 3, 4)]] Status fail_device(Status status, int code, const char* format, ...);
// A failure that fail() has recorded, with "where: " before its message.
[[gnu::format(printf, 2, 3)]] Status fail_in(Status status, const char* where, ...);
// The same as another thread or process met it: its codes are in the message already.
Status fail_as(const frugal_error& error);

// A text for a message.
[[gnu::format(printf, 1, 2)]] String text(const char* format, ...);
// A number as its caller may have written it: most have signed ones.
String number_text(uint64_t value);
String number_text(uint32_t value);

const char* status_name(Status status);
// Around each call through the C boundary; end_call returns its status. False: there is no memory
// for the thread (base/this_thread.h), in which nothing may be done that can throw.
bool begin_call();
Status end_call(Status status);
void last_error(frugal_error* out);
// What the last fail() of this thread has recorded, before any end_call.
const char* recorded_message();

// What this thread has recorded is so again at the end: for clean-up after a failure, which may
// meet others.
class KeepError {
 public:
  KeepError() noexcept : thread_(this_thread()) {
    if (thread_) met_ = thread_->met;
  }
  ~KeepError() {
    if (thread_) thread_->met = met_;
  }
  KeepError(const KeepError&) = delete;
  KeepError& operator=(const KeepError&) = delete;

 private:
  ThisThread* const thread_;
  CallError met_;
};

#define FRUGAL_TRY(expression)                                       \
  do {                                                               \
    if (::frugal::Status try_status_ = (expression)) return try_status_; \
  } while (0)

}  // namespace frugal
