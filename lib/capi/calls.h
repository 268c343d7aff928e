// How every call of the C interface begins and ends. A handle becomes an object, and an exception
// becomes a status. The caller's rounding mode does not reach the engine.
#pragma once
#include <pthread.h>

#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

#include "base/fpenv.h"
#include "capi/serving.h"
#include "device/pointers.h"
#include "engine/op_check.h"
#include "engine/session.h"
#include "frugal.h"

namespace frugal {

template <class F>
Status guarded(F&& body) noexcept {
  if (!begin_call()) return FRUGAL_ERR_OUT_OF_MEMORY;
  try {
    return end_call(body());
  } catch (const std::bad_alloc&) {
    return end_call(
        fail(FRUGAL_ERR_OUT_OF_MEMORY,
             "memory for the engine's own objects is exhausted; free some and call again"));
  } catch (const std::exception& e) {
    return end_call(fail(FRUGAL_ERR_INTERNAL, "unexpected: %s; please report this", e.what()));
  } catch (...) {
    return end_call(fail(FRUGAL_ERR_INTERNAL, "unexpected failure; please report this"));
  }
}

// What is computed in a call or by a thread of the library (base/thread.h) does not depend on the
// caller's rounding. And no thread is cancelled in the middle of a call, which would leave locks
// held and steps open. Cancellation waits for the next cancellation point after the call.
template <class F>
Status guard(F&& body) {
  const FpEnvironment fp;
  int before = PTHREAD_CANCEL_ENABLE;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  const Status s = guarded(body);
  pthread_setcancelstate(before, &before);
  return s;
}

inline uint32_t generation_of(const Session& session) { return session.generation(); }
template <class T>
uint32_t generation_of(const T& t) {
  return t.session->generation();
}

// Calls the body with the object of a handle.
template <class T, class F>
Status having(const void* handle, F&& body) {
  const std::shared_ptr<T> object = object_of<T>(handle);
  if (!object && !handle)
    return fail(FRUGAL_ERR_BAD_HANDLE, "the %s handle is NULL: give an open one", T::kNoun);
  if (!object)
    return fail(FRUGAL_ERR_BAD_HANDLE,
                "the %s handle %p is closed, or never was one: give an open one", T::kNoun, handle);
  if (generation_of(*object) != process_generation())
    return fail(FRUGAL_ERR_FORKED,
                "the engine belongs to the process that opened it; open one after fork()");
  return body(object);
}

template <class T, class F>
Status with(const void* handle, F&& body) {
  return guard([&] { return having<T>(handle, body); });
}

inline Status in_table(Status status, const char* name) {
  return name ? fail_in(status, "table '%s'", name) : status;
}

// Messages of calls on a table begin with its name.
template <class F>
Status with_table(const void* handle, F&& body) {
  return with<AnyTable>(
      handle, [&](const AnyTableRef& t) -> Status { return in_table(body(t), t->name.c_str()); });
}

// Checks pointers of calls outside steps, which must be host memory.
inline Status on_host(std::initializer_list<std::pair<const void*, const char*>> all) {
  device::look_for_devices();
  for (const auto& [p, what] : all) FRUGAL_TRY(host_memory(p, what));
  return FRUGAL_OK;
}

inline Status null(const char* what) {
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s is NULL: it must be given", what);
}

inline Status check_timeout(int64_t ms) {
  if (ms >= FRUGAL_TIMEOUT_INFINITE) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT,
              "timeout_ms %lld: give milliseconds (0 or more) or FRUGAL_TIMEOUT_*",
              static_cast<long long>(ms));
}

// More are no array, or their slots and positions would not fit into 32 bits.
inline Status check_count(size_t n, const char* what) {
  if (n < UINT32_MAX) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu %s in one call: at most 2^32 - 2", n, what);
}

inline Status check_ops(const frugal_op* ops, size_t n) {
  if (!ops && n) return null("ops");
  if (n <= kMostOps) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%zu ops in one call: at most 2^20; make several calls",
              n);
}

}  // namespace frugal
