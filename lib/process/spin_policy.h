// How the two sides of a trainer's channel wait for each other.
//
// A sleep and a wake-up on another processor cost some 50 us, twice in each exchange. With small
// batches that is most of a step. If there are processors for trainers and request loops, a waiting
// thread polls as long as that pays, provided that the last wait of the kind was so short. Flush
// threads of its processor run meanwhile. Otherwise it sleeps soon: a thread that is woken up runs
// before flush threads, a thread that polls does not.
//
// If a rank has no more than a processor for itself and one for flush threads, its request loop
// moves to the trainer's processor. One of the two waits for the other at any time, and a context
// switch on one processor costs some 4 us. The other processor is left to the threads that work
// concurrently with both. Then neither side polls.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/os.h"
#include "process/channel.h"
#include "process/protocol.h"

namespace frugal {

class SpinPolicy {
 public:
  SpinPolicy(uint32_t ranks, Channel* channel)
      : channel_(channel), each_(cpu_count() / std::max(1u, ranks)) {}
  // Sets how long the wait after a message of this kind polls. `least`: the time if long polling
  // does not pay.
  void set(Call call, uint64_t least) const {
    const bool together = channel_->together();
    const bool pays = !together && each_ > 1 && last_[at(call)] < kWorthNs;
    channel_->look_for(together ? 0 : pays ? kWorthNs : least, pays);
  }
  // Notes how long that wait was.
  void waited(Call call) { last_[at(call)] = channel_->waited_ns(); }

  // What each request of a trainer carries: its processor + 1.
  static uint32_t processor() { return static_cast<uint32_t>(os_processor() + 1); }
  // Moves the request loop to that processor, if it may run there. A request may carry any number.
  void follow(uint32_t processor) {
    if (each_ > 2 || processor == followed_) return;
    followed_ = processor;
    const int on = static_cast<int>(processor - 1);
    const bool there = processors_.has(on) && Processors::only(on).bind();
    if (!there && channel_->together()) processors_.bind();
    channel_->set_together(there);  // each reply carries this to the trainer's side
  }

 private:
  static constexpr uint64_t kWorthNs = 150000;
  static size_t at(Call call) { return static_cast<size_t>(call) % kKinds; }
  static constexpr size_t kKinds = 16;
  Channel* const channel_;
  const uint32_t each_;  // processors for a rank
  const Processors processors_ = Processors::mine();
  uint32_t followed_ = 0;
  uint64_t last_[kKinds] = {};
};

}  // namespace frugal
