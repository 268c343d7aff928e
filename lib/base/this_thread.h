// What the library keeps for each thread.
//
// None of it is thread_local. Where a program loads the library late, as Python does, the system's
// loader allocates a thread's thread_local objects at their first use. It ends the process if there
// is no memory. So this is found by a pthread key. The first call of a thread without memory for it
// returns FRUGAL_ERR_OUT_OF_MEMORY.
#pragma once
#include <cstdint>

namespace frugal {

struct CallError {
  static constexpr uint64_t kNoOffset = UINT64_MAX;
  int32_t status = 0;
  int32_t system_code = 0;
  int32_t device_code = 0;
  uint64_t offset = kNoOffset;  // of the byte of a file that it is about
  char message[512] = "";
};

struct ThisThread {
  // The last failure inside the current call. The call may succeed all the same (a full table makes
  // room, a cache is done without); then `last` stays that of an earlier call.
  CallError met;
  CallError last;
  // The thread's number in a trace, which a child made by fork() does not inherit.
  uint32_t trace_generation = 0;
  uint32_t trace_number = 0;
  uint16_t trace_worker = 0;
  uint32_t ledger_image = 0;  // the one that the thread used last
};

// The calling thread's; its first call makes it, and it ends with the thread. Null: there is no
// pthread key, or no memory: for it, or for what the C++ run-time library keeps of a thread that
// throws. Once it is not null, the thread can throw.
ThisThread* this_thread() noexcept;
// The same, but makes none. Null, with *tried: this_thread() has returned null, or would.
const ThisThread* this_thread_if_any(bool* tried) noexcept;
// The message for a call whose thread has none.
const char* no_thread() noexcept;

// Allocates the calling thread's copy of another library's thread_local objects by `touch`. That
// uses them, and returns false if it could not. False: it did, or there is no memory to call it.
bool touch_thread_locals(bool (*touch)() noexcept) noexcept;

}  // namespace frugal
