// Status values inside the library, and the thread's last error.
//
// Inside the library a failure is returned as a `Status` (0 or a negative frugal_status). The code
// that finds it records the message at once with fail(). Only the standard library throws
// (allocation); the C interface turns exceptions into a status. Nothing here prints.
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
// The same, with the errno and its text after the message.
[[gnu::format(printf, 3, 4)]] Status fail_errno(Status status, int code, const char* format, ...);
// The same, with the device's error code.
[[gnu::format(printf, 3, 4)]] Status fail_device(Status status, int code, const char* format, ...);
// Adds the offset in a file to the failure that fail() has just recorded.
Status fail_at(Status status, uint64_t offset);
// Puts "where: " before the message of a failure that fail() has recorded.
[[gnu::format(printf, 2, 3)]] Status fail_in(Status status, const char* where, ...);
// Records a failure of another thread or process; its message has the texts of its codes already.
Status fail_as(const frugal_error& error);

// A text for a message.
[[gnu::format(printf, 1, 2)]] String text(const char* format, ...);
// A number as its caller may have written it: most callers have signed ones.
String number_text(uint64_t value);
String number_text(uint32_t value);

const char* status_name(Status status);
// Called around each call of the C interface; end_call returns its status. False: there is no
// memory for the thread (base/this_thread.h). Then the call does nothing that can throw.
bool begin_call();
Status end_call(Status status);
void last_error(frugal_error* out);
// What the last fail() of this thread has recorded, before any end_call.
const char* recorded_message();
// The same with its status and codes, for another thread; fail_as() records it there.
CallError recorded_error();
Status fail_as(const CallError& error);

// Restores this thread's recorded failure at its end: clean-up after a failure may record others.
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

#define FRUGAL_TRY(expression)                                           \
  do {                                                                   \
    if (::frugal::Status try_status_ = (expression)) return try_status_; \
  } while (0)

}  // namespace frugal
