// A controller as a program of its own, for tests.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "proc.h"
#include "support/child.h"

// Of the build's programs (cmake/tests.cmake).
extern "C" const char frugal_controller_path[], frugal_top_path[];

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/frugal-test-XXXXXX";
    path_ = mkdtemp(name) ? name : "";
  }
  ~Folder() {
    for (const std::string& n : entries()) unlink((path_ + "/" + n).c_str());
    rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }
  std::string address() const { return path_ + "/service"; }
  std::vector<std::string> entries() const { return entries_of(path_); }

 private:
  std::string path_;
};

class ControllerProgram {
 public:
  // Comes back when it serves the address, or has ended. `before` is called in its process; false:
  // it ends with 77.
  explicit ControllerProgram(const std::string& address,
                             const std::function<bool()>& before = nullptr) {
    int out[2];
    if (pipe2(out, O_CLOEXEC) != 0) std::abort();
    pid_ = fork_child();
    if (pid_ == 0) {
      if (before && !before()) _exit(77);
      dup2(out[1], 1);
      execl(FRUGAL_CONTROLLER, FRUGAL_CONTROLLER, address.c_str(), nullptr);
      _exit(127);
    }
    close(out[1]);
    char said[256];
    serves_ = read(out[0], said, sizeof said) > 0;
    close(out[0]);
  }
  ~ControllerProgram() {
    if (pid_ > 0) end(SIGKILL);
  }
  ControllerProgram(const ControllerProgram&) = delete;
  pid_t pid() const { return pid_; }
  bool serves() const { return serves_; }
  // Its exit status, 1000 + the signal, or -1.
  int end(int signal) {
    kill(pid_, signal);
    return wait_for();
  }
  // Comes back when all of its threads have stopped.
  void stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    while (waitpid(pid_, &status, WUNTRACED) == pid_ && !WIFSTOPPED(status)) {
    }
  }
  int wait_for() {
    int status = 0;
    if (waitpid(pid_, &status, 0) != pid_) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  bool serves_ = false;
};
