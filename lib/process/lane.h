// The controller's side of a channel: a thread that makes the calls which its requests ask for.
#pragma once
#include <atomic>
#include <memory>

#include "base/thread.h"
#include "engine/engine.h"
#include "process/channel.h"
#include "process/protocol.h"

namespace frugal {

// Staging memory of a trainer process that waits to be read. Lives until the lane and all buffers are gone.
class Staging final : public Buffer::Owner, public HeapObject {
 public:
  explicit Staging(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  // Null data: it is not within the staging memory, or more is lent than there is: no place is to be lent twice.
  Buffer lend(uint64_t offset, uint64_t bytes);
  void give_back(char* data, size_t bytes) noexcept override;
  void let_go() noexcept {
    if (users_.fetch_sub(1) == 1) delete this;
  }

 private:
  ~Staging() = default;
  const std::shared_ptr<Channel> channel_;
  std::atomic<uint32_t> users_{1};
  std::atomic<uint64_t> lent_{0};  // bytes
};

// Whom a lane tells that it has ended by itself, from its thread: its peer has broken the protocol. `trainer`: or null,
// of the lane of a process. The lane ends, for whoever waits for that, when this has come back.
class LaneOwner {
 public:
  virtual void broken(uint64_t peer, const TrainerRef& trainer) noexcept = 0;

 protected:
  ~LaneOwner() = default;
};

class Lane final : public HeapObject, private UsedElsewhere {
 public:
  // Of a trainer, or (null) of a process. `owner`: or null.
  Lane(std::shared_ptr<Engine> engine, TrainerRef trainer, std::shared_ptr<Channel> channel, bool observes,
       LaneOwner* owner = nullptr, uint64_t peer = 0);
  // Cuts the channel and waits for the thread. Not to be called by that.
  ~Lane();
  Status start();
  void cut() noexcept {
    cut_.store(true);
    channel_->cut();
  }
  // Its trainer has lost its place: it is to ask before it reads anything more.
  void tell_lost() noexcept { reinterpret_cast<std::atomic<uint32_t>*>(notices_.data())->fetch_add(1); }
  Channel& channel() { return *channel_; }
  const TrainerRef& trainer() const { return trainer_; }
  uint64_t request = 0;  // that has asked for it
  // What its trainer is known by, of all that had the rank, and where its aborts are counted.
  uint64_t joined() const { return number_; }
  uint64_t notices_place() const { return engine_->place(notices_.data()); }

 private:
  void loop();
  void serve();
  Status receive(Header* request);
  Status handle(const Header& request);
  Status broken(const char* what);
  Status no_part(const char* what);
  Status take(void* out, uint64_t bytes);
  Status take_buffer(BufferPool& pool, uint64_t count, size_t element, Buffer* out);
  template <class T>
  Status take_list(uint64_t count, Vector<T>* out);
  Status take_used(uint64_t count);
  void tell() override;
  struct Ops {
    Vector<frugal_op> ops;
    Vector<Buffer> keys;
    OpNumbers numbers;
  };
  // `of`: ops of the call. `declared`: of dense tables come slots, in place of keys.
  Status take_ops(uint64_t count, uint64_t of, bool declared, Ops* out);
  Status prefetch(const Header& request);
  Status step_begin(const Header& request);
  Status access(const Header& request);
  Status step_end(const Header& request);
  static bool may_push(const RemotePart& p, const TableRef& table);
  Status joined_part(const PushPlace& push, const TableRef& table, PartRef* out);
  Status read(const Header& request);
  Status rows_call(Call call, const Header& request);
  Status answer_parts(size_t from);
  Status answer_boundary();
  // What the answer has beside its header.
  void add(const void* data, size_t bytes) { pieces_.push_back({data, bytes}); }

  const std::shared_ptr<Engine> engine_;
  const TrainerRef trainer_;
  const std::shared_ptr<Channel> channel_;
  const bool observes_;          // changes nothing
  LaneOwner* const owner_;
  const uint64_t peer_;
  static inline std::atomic<uint64_t> lanes_{0};
  const uint64_t number_ = lanes_++;
  std::atomic<bool> cut_{false};  // by this side
  bool broken_ = false;          // its peer has broken the protocol
  Staging* staging_ = nullptr;
  bool shown_ = false;  // it is sealed
  Buffer notices_;
  Map<uint64_t, uint64_t> batches_;  // numbers that the trainer has given -> handles
  Vector<RemotePart> parts_;    // of the step, then those that were asked for; changed with elsewhere_mu
  RemoteCounts here_;           // time inside the engine's calls since the last end of a step
  RemoteBoundary boundary_;     // of the last step: what it reads stays until the next one's is there
  uint64_t trace_ = 0;          // that its process has begun; 0: none
  uint64_t handed_over_ = kNoStep;  // the step whose sums the engine has, while its end may be repeated
  // Of the answer under way.
  uint64_t args_[5] = {};
  Vector<Piece> pieces_;
  Vector<Buffer> kept_;
  Vector<PartPlace> places_;
  Vector<char> lines_;
  String text_;
  Thread thread_;
};

}  // namespace frugal
