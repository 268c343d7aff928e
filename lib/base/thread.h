// A thread of the library in the host program.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <system_error>
#include <utility>

#include "base/fpenv.h"
#include "base/futex.h"
#include "base/status.h"
#include "base/this_thread.h"

namespace frugal {

// Like std::thread, but for its stack. The system's default follows the program's limit of stacks
// (ulimit -s), which may be less than a call of the library needs.
class Thread {
 public:
  static constexpr size_t kLeastStack = size_t{1} << 20;

  Thread() = default;
  template <class Body>
  explicit Thread(Body body) {
    auto run = std::make_unique<Body>(std::move(body));
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code != 0) throw std::system_error(code, std::generic_category());
    size_t stack = 0;
    pthread_attr_getstacksize(&attributes, &stack);
    pthread_attr_setstacksize(&attributes, std::max(stack, kLeastStack));
    code = pthread_create(&id_, &attributes, &main<Body>, run.get());
    pthread_attr_destroy(&attributes);
    if (code != 0) throw std::system_error(code, std::generic_category());
    run.release();
    joinable_ = true;
  }
  ~Thread() {
    if (joinable_) std::terminate();
  }
  Thread(Thread&& other) noexcept { swap(other); }
  Thread& operator=(Thread&& other) noexcept {
    Thread(std::move(other)).swap(*this);
    return *this;
  }
  bool joinable() const { return joinable_; }
  void join() {
    if (pthread_join(id_, nullptr) != 0) std::terminate();
    joinable_ = false;
  }
  void detach() {
    pthread_detach(id_);
    joinable_ = false;
  }
  pthread_t native_handle() const { return id_; }
  void swap(Thread& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(joinable_, other.joinable_);
  }

 private:
  template <class Body>
  static void* main(void* body) {
    const std::unique_ptr<Body> run(static_cast<Body*>(body));
    const FpEnvironment fp;  // not that of the thread that has started this one
    (*run)();
    return nullptr;
  }
  pthread_t id_{};
  bool joinable_ = false;
};

// A thread with all signals blocked: signals are for the program's threads. Throws as Thread does,
// and std::bad_alloc if there is no memory for what the library keeps of the thread. The body is
// not run then.
template <class Body>
Thread quiet_thread(Body body) {
  enum : uint32_t { kStarts, kRuns, kEnds };
  std::atomic<uint32_t> state{kStarts};
  const auto* word = reinterpret_cast<const uint32_t*>(&state);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  Thread made;
  try {
    made = Thread([&state, word, run = std::move(body)]() mutable {
      const bool whole = this_thread() != nullptr;
      // Only its address is used from here on: the state may be gone once its value has changed.
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

// A thread could not be started, for lack of threads or of memory. `else_` is another remedy.
inline Status no_thread(const char* what, int code = EAGAIN, const char* else_ = "") {
  return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                    "%s cannot be started: %sraise the limits of threads and of addresses "
                    "(ulimit -u, -v)",
                    what, else_);
}
inline Status no_threads(uint32_t n) {
  char what[40];
  std::snprintf(what, sizeof what, "%u threads (flush_threads)", n);
  return no_thread(what, EAGAIN, "give fewer, or ");
}

}  // namespace frugal
