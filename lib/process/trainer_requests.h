// The request loop of a trainer in another process: its step protocol.
#pragma once
#include <atomic>
#include <memory>

#include "process/request_loop.h"
#include "process/staging.h"

namespace frugal {

class TrainerRequestLoop final : public RequestLoop, private UsedByAttached {
 public:
  TrainerRequestLoop(std::shared_ptr<Engine> engine, TrainerRef trainer,
                     std::shared_ptr<Channel> channel, RequestLoopOwner* owner = nullptr,
                     uint64_t peer = 0)
      : RequestLoop(std::move(engine), std::move(channel), owner, peer),
        trainer_(std::move(trainer)) {}
  ~TrainerRequestLoop();
  Status start() override;
  // The trainer has lost its rank: it must ask before it reads anything more.
  void tell_lost() noexcept {
    reinterpret_cast<std::atomic<uint32_t>*>(notices_.data())->fetch_add(1);
  }
  const TrainerRef& trainer() const { return trainer_; }
  uint64_t request = 0;  // number of the join that asked for it
  // Where its trainer's aborts are counted.
  uint64_t notices_address() const { return engine_->shm_address(notices_.data()); }

 private:
  Status handle(const Header& request) override;
  void begins(const Header& request, SpinPolicy& spin_policy) override;
  void answered(const Header& request, Status status, uint64_t began, uint64_t now) override;
  TrainerRef of_trainer() const override { return trainer_; }
  Status no_part(const char* what);
  Status take_used(uint64_t count);
  void tell() override;
  struct Ops {
    Vector<frugal_op> ops;
    Vector<Buffer> keys;
    OpNumbers numbers;
  };
  // `of`: number of ops in the trainer's call. `declared`: ops of dense tables have slots in place
  // of keys.
  Status take_ops(uint64_t count, uint64_t of, bool declared, Ops* out);
  Status prefetch(const Header& request);
  Status step_begin(const Header& request);
  Status access(const Header& request);
  Status step_end(const Header& request);
  static bool may_push(const RemotePart& p, const TableRef& table);
  Status joined_part(const PushAddress& push, const TableRef& table, PartRef* out);
  Status answer_parts(size_t from);
  Status answer_refresh();

  const TrainerRef trainer_;
  Staging* staging_ = nullptr;
  bool shown_ = false;  // the staging memory was sealed
  Buffer notices_;
  Map<uint64_t, uint64_t> batches_;  // numbers that the trainer has given -> handles
  // Of the step, then those that were asked for. Changed with process.mu.
  Vector<RemotePart> parts_;
  RemoteCounts here_;      // time inside the engine's calls since the last step_end
  RemoteRefresh refresh_;  // the last step's; what it reads stays until the next one is there
  // The step whose sums the engine has, while its end may be repeated.
  uint64_t submitted_ = kNoStep;
  // Of the reply under way.
  Vector<PartAddress> part_addresses_;
  Vector<char> cached_rows_;
};

}  // namespace frugal
