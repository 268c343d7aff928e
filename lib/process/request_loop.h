// The controller's side of a channel: a thread that makes the calls which its requests ask for.
// What calls those may be is the peer's kind: a trainer (trainer_requests.h), or a process outside
// of steps (process_requests.h).
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>

#include "base/thread.h"
#include "engine/engine.h"
#include "process/channel.h"
#include "process/protocol.h"

namespace frugal {

class SpinPolicy;

// Whom a lane tells that it has ended by itself, from its thread: its peer has broken the protocol.
// `trainer`: or null, of the lane of a process. The lane ends, for whoever waits for that, when
// this has come back.
class RequestLoopOwner {
 public:
  virtual void broken(uint64_t peer, const TrainerRef& trainer) noexcept = 0;

 protected:
  ~RequestLoopOwner() = default;
};

class RequestLoop : public HeapObject {
 public:
  virtual ~RequestLoop();
  virtual Status start();
  void cut() noexcept {
    cut_.store(true);
    channel_->cut();
  }
  Channel& channel() { return *channel_; }
  // What it is known by, of all lanes; and its trainer, of all that had the rank.
  uint64_t joined() const { return number_; }

 protected:
  // `owner`: or null.
  RequestLoop(std::shared_ptr<Engine> engine, std::shared_ptr<Channel> channel,
              RequestLoopOwner* owner, uint64_t peer);
  // Cuts the channel and waits for the thread, which runs what follows. Before anything of a
  // derived class ends, and not by that thread.
  void end() noexcept;
  virtual Status handle(const Header& request) = 0;
  // Before a request is handled, and behind it.
  virtual void begins(const Header& request, SpinPolicy& spin_policy);
  virtual void answered(const Header& request, Status status, uint64_t began, uint64_t now);
  virtual TrainerRef of_trainer() const { return nullptr; }

  // Of the request: what it has beside its header.
  Status broken(const char* what);
  Status take(void* out, uint64_t bytes);
  Status take_buffer(BufferPool& pool, uint64_t count, size_t element, Buffer* out);
  template <class T>
  Status take_list(uint64_t count, Vector<T>* out) {
    if (count > kMostOps || count > channel_->payload_left() / sizeof(T))
      return broken("a list is too long");
    for (size_t have = 0, n; have < count; have += n) {
      n = std::min<size_t>(kListPiece, count - have);
      out->resize(have + n);
      FRUGAL_TRY(take(out->data() + have, n * sizeof(T)));
    }
    return FRUGAL_OK;
  }
  // Of the answer, likewise.
  void add(const void* data, size_t bytes) { pieces_.push_back({data, bytes}); }
  // Evaluation, for a trainer or (null) nobody.
  Status read(const Header& request, Trainer* trainer);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Channel> channel_;
  // Of the answer under way; `kept_` is what it has pieces of.
  uint64_t args_[5] = {};
  Vector<Buffer> kept_;

 private:
  // What a request takes memory for before it has come: items of a list at a time, bytes of a
  // buffer.
  static constexpr size_t kListPiece = 1024, kFirstBytes = size_t{4} << 20;

  void loop();
  void serve();
  Status receive(Header* request);
  Status answer(const Header& request, Status status);

  RequestLoopOwner* const owner_;
  const uint64_t peer_;
  static inline std::atomic<uint64_t> request_loops_{0};
  const uint64_t number_ = request_loops_++;
  std::atomic<bool> cut_{false};  // by this side
  bool broken_ = false;           // its peer has broken the protocol
  Vector<Piece> pieces_;
  Thread thread_;
};

}  // namespace frugal
