// Joins of an attached process: one at a time for each rank. Also: what the controller may have
// done for a join that failed.
//
// Threads: any.
#pragma once
#include <atomic>

#include "base/assert.h"
#include "process/controller.h"

namespace frugal {

class RankJoins {
  struct Rank {
    std::atomic<bool> join_unknown{false};  // a join failed, and the controller may have done it
    std::atomic<bool> now{false};           // a thread is joining with this rank
  };

 public:
  explicit RankJoins(Controller& controller) : controller_(controller) {}
  void open(uint32_t ranks) {
    FRUGAL_ASSERT(ranks_.empty());
    ranks_ = Vector<Rank>(ranks);
  }

  // Held by a thread while it joins with a rank. Without it, a rank that another thread has just
  // joined would look like the result of a join that failed.
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
  // Requests the rank. If it may be this process's by an earlier join, it is lost first.
  // make_room() releases what the controller holds of lost trainers, and returns whether there was
  // any.
  template <class MakeRoom>
  Status join(const frugal_trainer_config& config, JoinReply* reply, MakeRoom make_room) {
    Status s = ask(config, reply);
    if (s == FRUGAL_ERR_EXISTS && of(config.rank).join_unknown.load()) {
      const Status lost = lose(config.rank, kAnyJoin);
      // Not EXISTS: the rank may be this process's.
      s = lost == FRUGAL_OK ? ask(config, reply) : lost;
    }
    if (s == FRUGAL_ERR_BUSY && make_room()) s = ask(config, reply);
    if (s == FRUGAL_OK) of(config.rank).join_unknown.store(false);
    return s;
  }
  // The join has failed. `taken`: another trainer of this process has the rank. Otherwise the
  // controller may have done its part. Then the rank is given back by the connection when the late
  // reply comes, or by the next join here if that is earlier.
  void failed(uint32_t rank, Status why, bool taken) {
    if (!taken && may_be_done(why)) of(rank).join_unknown.store(true);
  }
  // If it fails, the rank stays taken until this process ends or joins again.
  Status lose(uint32_t rank, uint64_t joined) noexcept;

 private:
  Rank& of(uint32_t rank) {
    FRUGAL_ASSERT(rank < ranks_.size());
    return ranks_[rank];
  }
  // Whether the controller may have done a call that failed with `s`. Such a call can be repeated.
  static bool may_be_done(Status s) {
    return s == FRUGAL_ERR_TIMEOUT || s == FRUGAL_ERR_OUT_OF_MEMORY;
  }
  Status ask(const frugal_trainer_config& config, JoinReply* reply);

  Controller& controller_;
  Vector<Rank> ranks_;
};

}  // namespace frugal
