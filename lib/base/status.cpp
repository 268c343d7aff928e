#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace frugal {
namespace {

void record(Status status, int code, int device_code, const char* format, va_list args) {
  ThisThread* t = this_thread();
  if (!t) return;
  CallError& met = t->met;
  met.status = status;
  met.system_code = code;
  met.device_code = device_code;
  met.offset = CallError::kNoOffset;
  int n = std::vsnprintf(met.message, sizeof met.message, format, args);
  if (code != 0 && n >= 0 && static_cast<size_t>(n) < sizeof met.message) {
    char text[96] = "";
    // The GNU strerror_r may return a string of its own.
    const char* s = strerror_r(code, text, sizeof text);
    std::snprintf(met.message + n, sizeof met.message - static_cast<size_t>(n), " (%s)", s);
  }
}

}  // namespace

Status fail(Status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, 0, 0, format, args);
  va_end(args);
  return status;
}

Status fail_errno(Status status, int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, code, 0, format, args);
  va_end(args);
  return status;
}

Status fail_device(Status status, int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  record(status, 0, code, format, args);
  va_end(args);
  return status;
}

Status fail_at(Status status, uint64_t offset) {
  if (ThisThread* t = this_thread()) t->met.offset = offset;
  return status;
}

Status fail_in(Status status, const char* where, ...) {
  ThisThread* t = status == FRUGAL_OK ? nullptr : this_thread();
  if (!t || t->met.status != status) return status;
  char message[sizeof t->met.message], at[384];
  va_list args;
  va_start(args, where);
  std::vsnprintf(at, sizeof at, where, args);
  va_end(args);
  std::memcpy(message, t->met.message, sizeof message);
  std::snprintf(t->met.message, sizeof t->met.message, "%s: %.*s", at,
                static_cast<int>(sizeof message - 3 - std::strlen(at)), message);
  return status;
}

CallError recorded_error() {
  const ThisThread* t = this_thread();
  if (t) return t->met;
  CallError none;
  none.status = FRUGAL_ERR_OUT_OF_MEMORY;
  return none;
}

Status fail_as(const CallError& error) {
  if (ThisThread* t = this_thread()) t->met = error;
  return error.status;
}

Status fail_as(const frugal_error& error) {
  ThisThread* t = this_thread();
  if (!t) return error.status;
  t->met.status = error.status;
  t->met.system_code = error.system_code;
  t->met.device_code = error.device_code;
  t->met.offset = CallError::kNoOffset;
  std::snprintf(t->met.message, sizeof t->met.message, "%s", error.message ? error.message : "");
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

String number_text(uint64_t value) {
  const auto number = static_cast<unsigned long long>(value);
  return value >> 63 ? text("%lld (unsigned %llu)", static_cast<long long>(value), number)
                     : text("%llu", number);
}

String number_text(uint32_t value) {
  return value >> 31 ? text("%d (unsigned %u)", static_cast<int>(value), value) : text("%u", value);
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
    CASE(FRUGAL_ERR_NO_SPACE);
    CASE(FRUGAL_ERR_IO);
    CASE(FRUGAL_ERR_DAMAGED);
    CASE(FRUGAL_ERR_TOO_NEW);
#undef CASE
    default:
      return "FRUGAL_UNKNOWN";
  }
}

const char* recorded_message() {
  const ThisThread* t = this_thread();
  return t ? t->met.message : no_thread();
}

bool begin_call() {
  ThisThread* t = this_thread();
  if (t) t->met.status = FRUGAL_OK;
  return t != nullptr;
}

Status end_call(Status status) {
  if (status == FRUGAL_OK) return status;
  // Background failures come without a message of this thread.
  ThisThread* t = this_thread();
  if (!t) return status;
  if (t->met.status != status)
    fail(status, "%s: it happened in the background; close the engine and restore the tables",
         status_name(status));
  t->last = t->met;
  return status;
}

void last_error(frugal_error* out) {
  if (!out) return;
  bool tried = false;
  if (const ThisThread* t = this_thread_if_any(&tried))
    *out = {t->last.status, t->last.system_code, t->last.device_code, 0, t->last.message};
  else
    *out = {tried ? FRUGAL_ERR_OUT_OF_MEMORY : FRUGAL_OK, 0, 0, 0, tried ? no_thread() : ""};
}

}  // namespace frugal
