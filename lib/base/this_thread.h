// What the library keeps of each thread.
//
// None of it is thread_local. Where a program loads the library late, as Python does, the system's
// loader takes memory for a thread's thread_local objects when the thread first uses one, and ends
// the process where there is none. So this is found by a pthread key, and a thread without memory
// for it has its first call answered with FRUGAL_ERR_OUT_OF_MEMORY.
#pragma once
#include <cstdint>

namespace frugal {

struct CallError {
  int32_t status = 0;
  int32_t system_code = 0;
  int32_t device_code = 0;
  char message[512] = "";
};

struct ThisThread {
  // What a call under way has met. It may end well all the same (a full table makes room, a cache
  // is done without), and then the last call that failed is still another.
  CallError met;
  CallError last;
  // The thread's number in a trace, which a child made by fork() does not inherit.
  uint32_t trace_generation = 0;
  uint32_t trace_number = 0;
  uint16_t trace_worker = 0;
  uint32_t ledger_image = 0;  // that it had last
};

// Of the calling thread; it is made by the first call, and goes with the thread. Null: there is no
// pthread key or no memory for it, or none for what the C++ run-time library keeps of a thread that
// throws. From an answer on the thread can throw.
ThisThread* this_thread() noexcept;
// The same, but it is not made. Null, with *tried: this_thread() has answered null, or would.
const ThisThread* this_thread_if_any(bool* tried) noexcept;
// What to say of a call whose thread has none.
const char* no_thread() noexcept;

// Makes the calling thread's part of another library's thread_local objects by `touch`, which uses
// them, and answers false if it could not. False: it did, or there is no memory to call it.
bool touch_thread_locals(bool (*touch)() noexcept) noexcept;

}  // namespace frugal
