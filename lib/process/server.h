// The controller: an engine whose trainers are other processes.
//
// Requests over the socket (control.h) and through channels (protocol.h) become the calls that
// threads of this process would make. Each channel has a request loop: a thread that waits for
// requests, makes the calls, and replies. Everything in a request may have been written by an
// enemy.
#pragma once
#include <memory>

#include "process/control.h"

namespace frugal {

class Engine;

class Server {
 public:
  // Makes `engine`, which must have shared memory, reachable at `address`. If `engine` is null, the
  // first process to attach decides its configuration, and it uses `log`.
  static Status start(const char* address, std::shared_ptr<Engine> engine,
                      std::unique_ptr<Server>* out, frugal_log_fn log = nullptr);
  // Attached processes lose the controller. Pending updates are written. An engine that was passed
  // to start() goes on.
  void stop();
  ~Server();

  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace frugal
