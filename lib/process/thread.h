// A thread of the library in the host program.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

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

// Makes a call that nobody else will make, again when it throws: it is memory that is short, mostly for a moment.
// False: for a second.
template <class Call>
bool insist(const Call& call) noexcept {
  for (int tries = 0; tries < 100; ++tries) {
    try {
      call();
      return true;
    } catch (...) {
      usleep(10000);
    }
  }
  return false;
}

}  // namespace frugal
