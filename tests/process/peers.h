// What the tests of lib/process share.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/os.h"
#include "base/status.h"
#include "support/inside.h"

namespace frugal {

constexpr uint64_t kNever = UINT64_MAX;
inline uint64_t After(uint64_t ms) { return now_ns() + ms * 1000000; }

// What the call has said that has just failed.
inline std::string Message(Status) { return LastMessage(); }

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
