// What tests/failing/failing.cpp, which makes calls for memory and the like fail, and a program
// that it is loaded into have in common.
//
// How to have a job swept (tests/failing/sweep.py; its own process, an attached trainer, a
// controller, a server):
//
// 1. Write the job as a program that makes its calls of the library within failing::Call (below).
//    It makes those again that return a status that the header names. Where something fails for
//    ever, it calls failing::over() after some tries: then nothing fails any more, and the job has
//    to come to its end, right to the last bit. It prints one line in the end: "ok DIGEST" (exit
//    status 0), "unhealthy WHY" (3), or "wrong WHY" (1).
// 2. Run the sweep over it: sweep.py --preload libfrugal_failing.so -- PROGRAM ARGUMENTS. The job
//    may start processes of its own (a controller), and these are to meet failures: then give
//    --program NAME, with --whole. That program makes no difference between the library's calls
//    and its own.
#pragma once
#include <dlfcn.h>

#include <atomic>
#include <cstdint>

namespace failing {

enum Kind : uint32_t {
  kMemory,  // malloc, calloc, realloc, aligned_alloc, memalign, posix_memalign; so operator new,
            // too
  kMap,     // mmap, madvise, mprotect, fallocate, posix_fallocate
  kDescriptor,  // memfd_create, ftruncate, fcntl (seals, new descriptors), eventfd, epoll, sockets,
                // pidfds (SO_PEERPIDFD, pidfd_open) ...
  kThread,      // pthread_create
  kIo,          // open, fopen, read, write, rename, sendmsg, recvmsg
  kKinds
};
inline constexpr const char* kNames[kKinds] = {"memory", "map", "descriptor", "thread", "io"};

// The record of a run, in a file.
struct Report {
  std::atomic<uint64_t> points[kKinds];  // calls so far
  std::atomic<uint64_t> fired;           // that have failed
  std::atomic<uint64_t> over;            // nothing fails any more
  char stack[8192];  // of the first that has failed: a line for each frame, file and offset
};

template <class F>
F* function(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

// For the length of a call of the library: calls of this thread count, and may fail.
class Call {
 public:
  Call() {
    static auto* enter = function<void()>("failing_enter");
    if (enter) enter();
  }
  ~Call() {
    static auto* leave = function<void()>("failing_leave");
    if (leave) leave();
  }
  Call(const Call&) = delete;
};

inline void over() {
  if (auto* f = function<void()>("failing_over")) f();
}

inline uint64_t fired() {
  auto* f = function<uint64_t()>("failing_fired");
  return f ? f() : 0;
}

}  // namespace failing
