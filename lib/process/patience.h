// How long a side of a trainer's channel looks for the next message before it sleeps.
//
// A sleep and a wake-up cost some 50 us, twice in each exchange; with small batches that is most of a step. Where
// trainer and lane have a processor each, whoever waits looks for as long as pays, if what it waits for came that
// soon the last time; else it leaves the processor at once to those that have work.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/os.h"
#include "process/channel.h"
#include "process/protocol.h"

namespace frugal {

class Patience {
 public:
  explicit Patience(uint32_t ranks) : room_(cpu_count() / std::max(1u, ranks) > 1) {}
  // After or with a message of this kind. `least`: where it does not pay.
  void set(Channel* channel, Call call, uint64_t least) const {
    const bool pays = room_ && last_[at(call)] < kWorthNs;
    channel->look_for(pays ? kWorthNs : least, pays);
  }
  void waited(Call call, uint64_t ns) { last_[at(call)] = ns; }

 private:
  static constexpr uint64_t kWorthNs = 150000;
  static size_t at(Call call) { return static_cast<size_t>(call) % kKinds; }
  static constexpr size_t kKinds = 16;
  const bool room_;
  uint64_t last_[kKinds] = {};
};

}  // namespace frugal
