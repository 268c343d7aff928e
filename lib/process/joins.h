// Calls of an attached process to join as a rank: one at a time for each rank, and what the
// controller may have done of one that has failed.
//
// Threads: any.
#pragma once
#include <atomic>

#include "base/assert.h"
#include "process/controller.h"

namespace frugal {

class RankJoins {
  struct Rank {
    std::atomic<bool> join_unknown{false};  // a call to join has failed, and may have done it
    std::atomic<bool> now{false};     // a thread is about to join as it
  };

 public:
  explicit RankJoins(Controller& controller) : controller_(controller) {}
  void open(uint32_t ranks) {
    FRUGAL_ASSERT(ranks_.empty());
    ranks_ = Vector<Rank>(ranks);
  }

  // A thread is about to join as a rank. What another has just joined as would seem to be left from
  // a call that has failed.
  class Scope {
   public:
    Scope(RankJoins& joins, uint32_t rank)
        : rank_(joins.of(rank)), alone_(!rank_.now.exchange(true)) {}
    ~Scope() {
      if (alone_) rank_.now.store(false);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    bool alone() const { return alone_; }

   private:
    Rank& rank_;
    const bool alone_;
  };
  // Asks for the rank. If it may be this process's by an earlier call it is lost before.
  // make_room() lets go of what the controller holds of trainers that are lost, and tells whether
  // there was any.
  template <class MakeRoom>
  Status join(const frugal_trainer_config& config, JoinReply* reply, MakeRoom make_room) {
    Status s = ask(config, reply);
    if (s == FRUGAL_ERR_EXISTS && of(config.rank).join_unknown.load()) {
      const Status lost = lose(config.rank, kAnyJoin);
      s = lost == FRUGAL_OK ? ask(config, reply) : lost;  // nor is it known to be another's
    }
    if (s == FRUGAL_ERR_BUSY && make_room()) s = ask(config, reply);
    if (s == FRUGAL_OK) of(config.rank).join_unknown.store(false);
    return s;
  }
  // The call to join has failed. `taken`: another trainer of this process has the rank. If not, the
  // controller may have done its part: then the connection gives the rank back when the answer
  // comes, and the next call here, if that is earlier.
  void failed(uint32_t rank, Status why, bool taken) {
    if (!taken && may_be_done(why)) of(rank).join_unknown.store(true);
  }
  // Where that fails the rank stays taken until this process ends, or calls again.
  Status lose(uint32_t rank, uint64_t joined) noexcept;

 private:
  Rank& of(uint32_t rank) {
    FRUGAL_ASSERT(rank < ranks_.size());
    return ranks_[rank];
  }
  // A call to the controller that has failed so may have been done there: it can be made again.
  static bool may_be_done(Status s) {
    return s == FRUGAL_ERR_TIMEOUT || s == FRUGAL_ERR_OUT_OF_MEMORY;
  }
  Status ask(const frugal_trainer_config& config, JoinReply* reply);

  Controller& controller_;
  Vector<Rank> ranks_;
};

}  // namespace frugal
