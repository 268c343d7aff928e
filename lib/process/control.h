// The control plane (docs/processes.md, "The control socket"): a controller's server and a trainer
// process's client, over a Unix-domain socket. This header hides Cap'n Proto. Keys, rows and
// gradients never pass here.
//
// Neither side prints, changes the disposition of a signal, or throws. Each has threads of its own,
// in which all signals are blocked.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "base/heap.h"
#include "base/status.h"

namespace frugal {

constexpr uint64_t kAnyJoin = UINT64_MAX;
constexpr uint32_t kControlVersion = 10;  // of the protocol; both sides must have the same

// The bounds of a server.
struct ControlLimits {
  size_t connections = 1024;
  // Attached connections of one process. Each has threads, and a ring in either direction.
  size_t of_process = 32;
  // A connection ends if it has not attached, or not opened the engine, so long after it was
  // accepted.
  uint64_t attach_ns = 3'000'000'000, open_ns = 5'000'000'000;
};

// What a reply may carry at most.
constexpr size_t kMostDescriptors = 16;
constexpr size_t kMostNumbers = 2048;

// A connection to the controller, as the controller sees it.
struct Peer {
  pid_t pid = 0;
  int pidfd = -1;   // set when it attaches; -1 if the kernel has no pidfds
  uint64_t id = 0;  // unique among the connections of this server
  int socket = -1;  // while the connection lives; shutting it down ends the connection
};

// Replies. A handler keeps its descriptors: they are duplicated after it has returned, and live as
// long as `keep`. A client's caller owns the descriptors that it receives, and closes them. The
// client cannot write through a descriptor that the handler lists in `read_only`. A seal keeps the
// client from opening the memory anew to write (base/os.h).
struct OpenReply {
  frugal_config config;  // the engine's, without a log
  Vector<int> descriptors;
  Vector<int> read_only;  // those of them that the client may only read
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};
struct TableReply {
  uint64_t id = 0;
  frugal_table_info info;
  Vector<int> descriptors;
  Vector<int> read_only;  // those of them that the client may only read
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};
struct JoinReply {
  Vector<int> descriptors;
  Vector<int> read_only;  // those of them that the client may only read
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};

// What the controller does. Each connection has threads of its own that make these calls, so a slow
// call delays no other connection. Calls of one peer may run concurrently. If a call fails, the
// peer receives only its status and message (fail()).
class ControlHandler {
 public:
  virtual ~ControlHandler() = default;
  virtual Status open(Peer& peer, const frugal_config& config, OpenReply* reply) = 0;
  virtual Status create_table(Peer& peer, const frugal_table_config& config, TableReply* reply) = 0;
  virtual Status find_table(Peer& peer, const char* name, TableReply* reply) = 0;
  virtual Status drop_table(Peer& peer, uint64_t id) = 0;
  // `request`: the request's number, greater than those of the peer's earlier requests.
  virtual Status join(Peer& peer, uint64_t request, const frugal_trainer_config& config,
                      JoinReply* reply) = 0;
  // `lost`: as if the peer's process had ended. `joined`: the first number of the join's reply, or
  // kAnyJoin: any join that was requested before this request.
  virtual Status leave(Peer& peer, uint64_t request, uint32_t rank, bool lost, uint64_t joined) = 0;
  virtual Status stats(Peer& peer, frugal_stats* stats) = 0;
  virtual Status health(Peer& peer, int32_t* health) = 0;
  virtual Status committed(Peer& peer, uint64_t* step) = 0;
  // The connection of an attached peer has ended, perhaps its process too. Called once, after the
  // peer's last call has returned. `peer` is invalid afterwards.
  virtual void gone(Peer& peer) = 0;
};

class ControlServer : public HeapObject {
 public:
  // Listens at the path `address`. FRUGAL_ERR_EXISTS: a living controller listens there, or the
  // file there is no socket. INVALID_ARGUMENT: the path is too long, or its folder does not exist.
  // `handler` must outlive the server. Without an address the server has only adopted connections.
  static Status start(const char* address, ControlHandler* handler,
                      std::unique_ptr<ControlServer>* out, const ControlLimits& limits = {});
  // Accepts no more connections, and replies FRUGAL_ERR_CLOSED to calls that have not begun. Waits
  // for calls under way, calls the handler's gone() for each peer, and closes all connections. Must
  // not be called by a handler.
  void stop();
  ~ControlServer();  // stops

  // Adds a connection that was not made through the address. The server closes it in the end.
  void adopt(int socket);
  size_t connections() const;  // open now

  struct Impl;
  explicit ControlServer(Impl* impl) : impl_(impl) {}

 private:
  Impl* impl_;
};

// Any threads may make calls concurrently. Each waits for its reply for at most `timeout_ms`; a
// negative value means without limit. After FRUGAL_ERR_TIMEOUT the controller may still do what was
// asked. FRUGAL_ERR_PEER_LOST: the connection has ended, and is never made again. In a child made
// by fork() all calls return FRUGAL_ERR_FORKED, and do not touch the parent's connection.
class ControlClient : public HeapObject {
 public:
  // Retries until a controller is there or the time is up. FRUGAL_ERR_UNSUPPORTED: the controller
  // has another version. INVALID_ARGUMENT: it belongs to another user, or the path is too long.
  static Status connect(const char* address, int64_t timeout_ms,
                        std::unique_ptr<ControlClient>* out, uint32_t version = kControlVersion);
  ~ControlClient();  // closes; no call may be under way
  // `ended` runs once when the connection has ended: on the client's thread, or here if it has
  // ended already. It must not throw. disconnect() waits for it.
  void on_end(std::function<void()> ended);
  // Ends the connection. Calls under way and later ones return FRUGAL_ERR_CLOSED.
  void disconnect();

  Status ping(int64_t timeout_ms);
  Status open(const frugal_config& config, int64_t timeout_ms, OpenReply* reply);
  Status create_table(const frugal_table_config& config, int64_t timeout_ms, TableReply* reply);
  Status find_table(const char* name, int64_t timeout_ms, TableReply* reply);
  Status drop_table(uint64_t id, int64_t timeout_ms);
  Status join(const frugal_trainer_config& config, int64_t timeout_ms, JoinReply* reply);
  Status leave(uint32_t rank, bool lost, int64_t timeout_ms, uint64_t joined = kAnyJoin);
  Status stats(int64_t timeout_ms, frugal_stats* stats);
  Status health(int64_t timeout_ms, int32_t* health);
  Status committed(int64_t timeout_ms, uint64_t* step);

  pid_t controller_pid() const;
  int controller_pidfd() const;  // the client's; -1 if the kernel has no pidfds
  bool lost() const;             // the connection has ended

  struct Impl;
  explicit ControlClient(Impl* impl) : impl_(impl) {}

 private:
  Impl* impl_;
};

}  // namespace frugal
