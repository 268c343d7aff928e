// How long a side of a trainer's channel looks for the next message before it sleeps.
//
// A sleep and a wake-up cost some 50 us, twice in each exchange; with small batches that is most of a step. Where
// there are processors for trainers and lanes, who waits looks for as long as that pays, if what it waits for came so
// soon the last time, and lets flush threads on its processor run meanwhile. Else it sleeps soon: a thread that is
// woken up comes before those, one that looks does not.
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
  // For the wait that follows a message of this kind. `least`: to look where it does not pay.
  void set(Channel* channel, Call call, uint64_t least) const {
    const bool pays = room_ && last_[at(call)] < kWorthNs;
    channel->look_for(pays ? kWorthNs : least, pays);
  }
  // How long that was.
  void waited(Call call, uint64_t ns) { last_[at(call)] = ns; }

 private:
  static constexpr uint64_t kWorthNs = 150000;
  static size_t at(Call call) { return static_cast<size_t>(call) % kKinds; }
  static constexpr size_t kKinds = 16;
  const bool room_;
  uint64_t last_[kKinds] = {};
};

}  // namespace frugal
