// A worker process that replies to each line with one line of JSON (the protocol of
// bench/harness.h).
#ifndef FRUGAL_TOOLS_GPU_CHILD_H_
#define FRUGAL_TOOLS_GPU_CHILD_H_

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

extern char** environ;

namespace gpu_tools {

// Thrown for what the worker cannot do on this machine.
struct Missing : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Child {
 public:
  explicit Child(std::vector<std::string> command) {
    signal(SIGPIPE, SIG_IGN);  // write() fails if the child has died
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0)
      throw std::runtime_error("no pipe for a worker");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int error = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
    if (error != 0) {
      pid_ = 0;
      throw std::runtime_error("cannot start " + command[0]);
    }
  }
  ~Child() {
    close(to_);  // the worker ends with its input
    close(from_);
    if (pid_ == 0) return;
    for (int i = 0; i < 100 && pid_ != 0; ++i) {
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) return;
      usleep(20000);
    }
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  std::string Ask(const std::string& line, int timeout_ms = 120000) {
    const std::string text = line + "\n";
    if (write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw std::runtime_error("the worker has died");
    std::string answer;
    for (;;) {
      pollfd p{from_, POLLIN, 0};
      if (poll(&p, 1, timeout_ms) <= 0) throw std::runtime_error("the worker does not reply");
      char c;
      if (read(from_, &c, 1) != 1) throw std::runtime_error("the worker has died");
      if (c == '\n') break;
      answer += c;
    }
    const std::string missing = Text(answer, "missing"), error = Text(answer, "error");
    if (!missing.empty()) throw Missing(missing);
    if (!error.empty()) throw std::runtime_error("the worker: " + error);
    return answer;
  }
  static std::string Text(const std::string& answer, const std::string& name) {
    const size_t at = answer.find("\"" + name + "\": \"");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 5;
    return answer.substr(begin, answer.find('"', begin) - begin);
  }
  double Number(const std::string& line, const std::string& name) {
    const std::string answer = Ask(line);
    const size_t at = answer.find("\"" + name + "\": ");
    if (at == std::string::npos) throw std::runtime_error("the worker does not report " + name);
    return std::atof(answer.c_str() + at + name.size() + 4);
  }

 private:
  pid_t pid_ = 0;
  int to_ = -1, from_ = -1;
};

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_CHILD_H_
