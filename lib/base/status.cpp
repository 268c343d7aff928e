#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace frugal {
namespace {

struct LastError {
  Status status = FRUGAL_OK;
  int system_code = 0;
  int device_code = 0;
  char message[512] = "";
};
// What a call under way has met. It may end well all the same (a full table makes room, a cache is
// done without), and then the last call that failed is still another.
thread_local LastError t_met;
thread_local LastError t_last;

Status record(Status status, int code, const char* format, va_list args) {
  t_met.status = status;
  t_met.system_code = code;
  t_met.device_code = 0;
  int n = std::vsnprintf(t_met.message, sizeof t_met.message, format, args);
  if (code != 0 && n >= 0 && static_cast<size_t>(n) < sizeof t_met.message) {
    char text[96] = "";
    // The GNU strerror_r may return a string of its own.
    const char* s = strerror_r(code, text, sizeof text);
    std::snprintf(t_met.message + n, sizeof t_met.message - static_cast<size_t>(n), " (%s)", s);
  }
  return status;
}

}  // namespace

Status fail(Status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, 0, format, args);
  va_end(args);
  return status;
}

Status fail_errno(Status status, int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, code, format, args);
  va_end(args);
  return status;
}

Status fail_device(Status status, int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, 0, format, args);
  va_end(args);
  t_met.device_code = code;
  return status;
}

Status fail_in(Status status, const char* where, ...) {
  if (status == FRUGAL_OK || t_met.status != status) return status;
  char message[sizeof t_met.message], at[384];
  va_list args;
  va_start(args, where);
  std::vsnprintf(at, sizeof at, where, args);
  va_end(args);
  std::memcpy(message, t_met.message, sizeof message);
  std::snprintf(t_met.message, sizeof t_met.message, "%s: %.*s", at,
                static_cast<int>(sizeof message - 3 - std::strlen(at)), message);
  return status;
}

Status fail_as(const frugal_error& error) {
  t_met.status = error.status;
  t_met.system_code = error.system_code;
  t_met.device_code = error.device_code;
  std::snprintf(t_met.message, sizeof t_met.message, "%s", error.message ? error.message : "");
  return error.status;
}

String text(const char* format, ...) {
  char out[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(out, sizeof out, format, args);
  va_end(args);
  return out;
}

const char* status_name(Status status) {
  switch (status) {
#define CASE(name) \
  case name:       \
    return #name
    CASE(FRUGAL_OK);
    CASE(FRUGAL_ERR_INVALID_ARGUMENT);
    CASE(FRUGAL_ERR_BAD_HANDLE);
    CASE(FRUGAL_ERR_STRUCT_SIZE);
    CASE(FRUGAL_ERR_OUT_OF_MEMORY);
    CASE(FRUGAL_ERR_KEY_OUT_OF_RANGE);
    CASE(FRUGAL_ERR_TABLE_FULL);
    CASE(FRUGAL_ERR_EXISTS);
    CASE(FRUGAL_ERR_STEP_ORDER);
    CASE(FRUGAL_ERR_STEP_RANGE);
    CASE(FRUGAL_ERR_NOT_IN_STEP);
    CASE(FRUGAL_ERR_STEP_ABORTED);
    CASE(FRUGAL_ERR_BUSY);
    CASE(FRUGAL_ERR_TIMEOUT);
    CASE(FRUGAL_ERR_NAN);
    CASE(FRUGAL_ERR_FORKED);
    CASE(FRUGAL_ERR_UNSUPPORTED);
    CASE(FRUGAL_ERR_NOT_FOUND);
    CASE(FRUGAL_ERR_UNHEALTHY);
    CASE(FRUGAL_ERR_CLOSED);
    CASE(FRUGAL_ERR_OVERFLOW);
    CASE(FRUGAL_ERR_INTERNAL);
    CASE(FRUGAL_ERR_DEVICE);
    CASE(FRUGAL_ERR_PEER_LOST);
#undef CASE
    default:
      return "FRUGAL_UNKNOWN";
  }
}

const char* met_message() { return t_met.message; }

void begin_call() { t_met.status = FRUGAL_OK; }

Status end_call(Status status) {
  if (status == FRUGAL_OK) return status;
  // Background failures come without a message of this thread.
  if (t_met.status != status) fail(status, "%s: it happened in the background; close the engine and restore the tables", status_name(status));
  t_last = t_met;
  return status;
}

void last_error(frugal_error* out) {
  if (!out) return;
  *out = {t_last.status, t_last.system_code, t_last.device_code, 0, t_last.message};
}

}  // namespace frugal
