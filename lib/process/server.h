// The controller: an engine whose trainers are other processes.
//
// What they ask for over the socket (control.h) and through channels (protocol.h) becomes the calls
// that threads of this process would make. Each channel has a lane: a thread that waits for
// requests, makes the calls, and answers. Everything in a request may have been written by an
// enemy.
#pragma once
#include <memory>

#include "process/control.h"

namespace frugal {

class Engine;

class Server {
 public:
  // Makes `engine`, which must have shared memory, reachable at `address`; null: the first process
  // that comes says what engine it is to be, and `log` is that one's.
  static Status start(const char* address, std::shared_ptr<Engine> engine,
                      std::unique_ptr<Server>* out, frugal_log_fn log = nullptr);
  // Processes that are attached lose the controller. Rows are written; the engine goes on if it is
  // not its own.
  void stop();
  ~Server();

  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace frugal
