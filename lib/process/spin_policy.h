// How the two sides of a trainer's channel wait for each other.
//
// A sleep and a wake-up on another processor cost some 50 us, twice in each exchange; with small
// batches that is most of a step. Where there are processors for trainers and lanes, who waits
// looks for as long as that pays, if what it waits for came so soon the last time, and lets flush
// threads on its processor run meanwhile. Else it sleeps soon: a thread that is woken up comes
// before those, one that looks does not.
//
// Where a rank has no more than a processor for itself and one for flush threads, its lane runs on
// the trainer's: one of the two waits for the other at any time, a change of turns on one processor
// costs some 4 us, and the other processor is left to those who work beside both. Nobody looks
// then.
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
  // For the wait that follows a message of this kind. `least`: to look where it does not pay.
  void set(Call call, uint64_t least) const {
    const bool together = channel_->together();
    const bool pays = !together && each_ > 1 && last_[at(call)] < kWorthNs;
    channel_->look_for(together ? 0 : pays ? kWorthNs : least, pays);
  }
  // How long that was.
  void waited(Call call) { last_[at(call)] = channel_->waited_ns(); }

  // What a trainer tells in each request: its processor + 1.
  static uint32_t processor() { return static_cast<uint32_t>(os_processor() + 1); }
  // The lane goes there, if that is where it may run. A request may tell anything.
  void follow(uint32_t processor) {
    if (each_ > 2 || processor == followed_) return;
    followed_ = processor;
    const int on = static_cast<int>(processor - 1);
    const bool there = processors_.has(on) && Processors::only(on).bind();
    if (!there && channel_->together()) processors_.bind();
    channel_->set_together(there);  // each answer tells the trainer's side
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
