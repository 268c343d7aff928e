// What the tests of lib/process share.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/os.h"
#include "base/status.h"
#include "../support/ok.h"

namespace frugal {

constexpr uint64_t kNever = UINT64_MAX;
inline uint64_t After(uint64_t ms) { return now_ns() + ms * 1000000; }

// What the last failure in this thread has said.
inline std::string LastMessage() { return met_message(); }
// The message of a status that was just answered.
inline std::string Message(Status status) {
  frugal_error error;
  end_call(status);
  last_error(&error);
  return error.message;
}

inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Random {
  uint64_t state;
  uint64_t operator()() { return Mix(state++); }
  uint64_t below(uint64_t n) { return (*this)() % n; }
};

// A child that runs `body`, whose result is its exit status.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(fork()) {
    if (pid_ == 0) _exit(body());
  }
  ~Child() {
    if (pid_ > 0) Kill(SIGKILL);
  }
  pid_t pid() const { return pid_; }
  int Wait() {
    int status = 0;
    if (waitpid(pid_, &status, 0) != pid_) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  int Kill(int signal) {
    kill(pid_, signal);
    return Wait();
  }

 private:
  pid_t pid_;
};

}  // namespace frugal
