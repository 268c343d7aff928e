// The controller's side of a channel: a thread that makes the calls which its requests ask for. The
// kind of peer decides which calls those may be: a trainer's (trainer_requests.h), or those of a
// process outside steps (process_requests.h).
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

// A request loop notifies its owner, from its thread, when it ends by itself because its peer has
// broken the protocol. `trainer` is null for the request loop of a process. A thread that waits for
// the end of the loop also waits until broken() has returned.
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
  // A number that identifies this loop among all, and its trainer among all that had the rank.
  uint64_t joined() const { return number_; }

 protected:
  // `owner`: or null.
  RequestLoop(std::shared_ptr<Engine> engine, std::shared_ptr<Channel> channel,
              RequestLoopOwner* owner, uint64_t peer);
  // Cuts the channel and waits for the thread, which runs the functions below. To be called before
  // any part of a derived class ends, and not by that thread.
  void end() noexcept;
  virtual Status handle(const Header& request) = 0;
  // Called before and after a request is handled.
  virtual void begins(const Header& request, SpinPolicy& spin_policy);
  virtual void answered(const Header& request, Status status, uint64_t began, uint64_t now);
  virtual TrainerRef of_trainer() const { return nullptr; }

  // These take what follows the request's header.
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
  // Adds a piece to the reply.
  void add(const void* data, size_t bytes) { pieces_.push_back({data, bytes}); }
  // Evaluation, with a trainer or (null) without.
  Status read(const Header& request, Trainer* trainer);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Channel> channel_;
  // Of the reply under way; `kept_` holds the memory of its pieces.
  uint64_t args_[5] = {};
  Vector<Buffer> kept_;

 private:
  // How much memory a request takes before its bytes have come: items of a list at a time, bytes of
  // a buffer.
  static constexpr size_t kListPiece = 1024, kFirstBytes = size_t{4} << 20;

  void loop();
  void serve();
  Status receive(Header* request);
  Status answer(const Header& request, Status status);

  RequestLoopOwner* const owner_;
  const uint64_t peer_;
  static inline constinit std::atomic<uint64_t> request_loops_{0};
  const uint64_t number_ = request_loops_++;
  std::atomic<bool> cut_{false};  // by this side
  bool broken_ = false;           // its peer has broken the protocol
  Vector<Piece> pieces_;
  Thread thread_;
};

}  // namespace frugal
