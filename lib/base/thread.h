// A thread of the library in the host program.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <new>
#include <thread>
#include <utility>

#include "base/futex.h"
#include "base/this_thread.h"

namespace frugal {

// Signals are the program's, not this thread's: all are blocked in it. Throws as std::thread does,
// and std::bad_alloc where there is no memory for what the library keeps of the thread: the body is
// not run then.
template <class Body>
std::thread quiet_thread(Body body) {
  enum : uint32_t { kStarts, kRuns, kEnds };
  std::atomic<uint32_t> state{kStarts};
  const auto* word = reinterpret_cast<const uint32_t*>(&state);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread made;
  try {
    made = std::thread([&state, word, run = std::move(body)]() mutable {
      const bool whole = this_thread() != nullptr;
      // The state may be gone as soon as it is told.
      state.store(whole ? kRuns : kEnds);
      futex_wake(word);
      if (whole) run();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  while (state.load() == kStarts) futex_wait(word, kStarts, UINT64_MAX);
  if (state.load() == kRuns) return made;
  made.join();
  throw std::bad_alloc();
}

}  // namespace frugal
