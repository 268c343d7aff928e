// The control plane of docs/processes.md, section 3: a controller's server and a trainer process's
// client, over a Unix-domain socket. Cap'n Proto is behind this header and not in it. Keys, rows
// and gradients never come this way.
//
// Neither side prints, touches the dispositions of signals, or throws. Both have a thread of their
// own, in which all signals are blocked.
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

// What a server takes.
struct ControlLimits {
  size_t connections = 1024;
  size_t of_process =
      32;  // of them that have attached: each has threads, and a ring in either direction
  // Since it was taken a connection has to have attached, and to have opened the engine. Or it is
  // ended.
  uint64_t attach_ns = 3'000'000'000, open_ns = 5'000'000'000;
};

// What an answer may carry.
constexpr size_t kMostDescriptors = 16;
constexpr size_t kMostNumbers = 2048;

// A connection to the controller, as the controller sees it.
struct Peer {
  pid_t pid = 0;
  int pidfd = -1;   // from when it attaches; -1 where the kernel has none
  uint64_t id = 0;  // of no other connection of this server
  int socket = -1;  // while the connection lives; who shuts it down ends that
};

// Answers. Descriptors: a handler's stay its own, they are duplicated when it has answered, and
// live as long as `keep`; those that a client is given belong to its caller, who closes them. Of a
// handler's `read_only` ones nothing can be written through what the client gets; that it opens it
// anew, a seal is against (base/os.h).
struct OpenReply {
  frugal_config config;  // the engine's, without a log
  Vector<int> descriptors;
  Vector<int> read_only;  // of them
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};
struct TableReply {
  uint64_t id = 0;
  frugal_table_info info;
  Vector<int> descriptors;
  Vector<int> read_only;  // of them
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};
struct JoinReply {
  Vector<int> descriptors;
  Vector<int> read_only;  // of them
  Vector<uint64_t> numbers;
  std::shared_ptr<void> keep;
};

// What the controller does. Each connection has some threads of its own that make these calls, so
// one that takes its time holds nobody else up; a peer's calls of several threads come at once,
// too. A status other than FRUGAL_OK goes to the peer with its message (fail()), and nothing else
// of the reply.
class ControlHandler {
 public:
  virtual ~ControlHandler() = default;
  virtual Status open(Peer& peer, const frugal_config& config, OpenReply* reply) = 0;
  virtual Status create_table(Peer& peer, const frugal_table_config& config, TableReply* reply) = 0;
  virtual Status find_table(Peer& peer, const char* name, TableReply* reply) = 0;
  virtual Status drop_table(Peer& peer, uint64_t id) = 0;
  // `request`: its number, which is above those of the requests that the peer has made before.
  virtual Status join(Peer& peer, uint64_t request, const frugal_trainer_config& config,
                      JoinReply* reply) = 0;
  // `lost`: as if the peer had ended. `joined`: the first number of the join's reply; or kAnyJoin:
  // any that was asked for before this request.
  virtual Status leave(Peer& peer, uint64_t request, uint32_t rank, bool lost, uint64_t joined) = 0;
  virtual Status stats(Peer& peer, frugal_stats* stats) = 0;
  virtual Status health(Peer& peer, int32_t* health) = 0;
  virtual Status committed(Peer& peer, uint64_t* step) = 0;
  // The connection of a peer that has attached has ended, its process maybe, too. Called once,
  // after the peer's last call has come back; `peer` is no more afterwards.
  virtual void gone(Peer& peer) = 0;
};

class ControlServer : public HeapObject {
 public:
  // Listens at the path `address`. FRUGAL_ERR_EXISTS: a living controller does so already, or a
  // file that is no socket is there; INVALID_ARGUMENT: the path is too long, or its folder is not
  // there. `handler` must outlive the server. Without an address there are only adopted
  // connections.
  static Status start(const char* address, ControlHandler* handler,
                      std::unique_ptr<ControlServer>* out,
                      const ControlLimits& limits = {});
  // Takes nobody more, answers calls that have not begun with FRUGAL_ERR_CLOSED, waits for those
  // under way, tells the handler of each peer that it is gone, and closes all. Not to be called by
  // a handler.
  void stop();
  ~ControlServer();  // stops

  // A connection that comes another way than through the address; it is closed in the end.
  void adopt(int socket);
  size_t connections() const;  // open now

  struct Impl;
  explicit ControlServer(Impl* impl) : impl_(impl) {}

 private:
  Impl* impl_;
};

// Calls may be made by any threads at once. Each waits for its answer for `timeout_ms` at most, a
// negative one for ever; what has answered FRUGAL_ERR_TIMEOUT may be done by the controller all the
// same. FRUGAL_ERR_PEER_LOST: the connection has ended, and is never made again. In a child made by
// fork() all answer FRUGAL_ERR_FORKED, and the parent's connection is not touched.
class ControlClient : public HeapObject {
 public:
  // Tries again until a controller is there or time is up. FRUGAL_ERR_UNSUPPORTED: it is of another
  // version; INVALID_ARGUMENT: it is another user's, or the path is too long.
  static Status connect(const char* address, int64_t timeout_ms,
                        std::unique_ptr<ControlClient>* out, uint32_t version = kControlVersion);
  ~ControlClient();  // closes; no call may be under way
  // `ended` is called once when the connection has ended, on the client's thread; here if it has by
  // now. It throws nothing. disconnect() waits for it.
  void on_end(std::function<void()> ended);
  // Ends the connection. Calls under way, and those that come later, answer FRUGAL_ERR_CLOSED.
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
  int controller_pidfd() const;  // the client's; -1 where the kernel has none
  bool lost() const;             // the connection has ended

  struct Impl;
  explicit ControlClient(Impl* impl) : impl_(impl) {}

 private:
  Impl* impl_;
};

}  // namespace frugal
