// A thread of the library in the host program.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>

namespace frugal {

// Signals are the program's, not this thread's: all are blocked in it. Throws as std::thread does.
template <class Body>
std::thread quiet_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread made(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return made;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace frugal
