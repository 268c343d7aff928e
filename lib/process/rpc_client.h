// What an attached process asks its controller over a channel: requests, and their answers.
//
// Threads: one at a time.
#pragma once
#include <algorithm>
#include <memory>

#include "base/assert.h"
#include "process/channel.h"
#include "process/controller.h"
#include "process/protocol.h"

namespace frugal {

// When an answer to a call with this deadline is overdue.
uint64_t answer_until(uint64_t at);

inline uint64_t left_until(Deadline d) {
  const uint64_t now = now_ns();
  return d.at == UINT64_MAX ? UINT64_MAX : d.at > now ? d.at - now : 0;
}

// A request, and what its answer has.
struct Exchange {
  Call call;
  uint64_t args[5] = {};
  Vector<Piece> pieces;
  uint64_t until = 0;        // when the call's own time is up; 0: as the engine's time-out says
  void add(const void* data, size_t bytes) {
    if (bytes) pieces.push_back({data, bytes});
  }
};

// For an answer without a payload.
inline Status nothing_more(Channel&, uint64_t, uint64_t) { return FRUGAL_OK; }

class RpcClient {
 public:
  explicit RpcClient(Controller& controller) : controller_(controller) {}
  void open(std::unique_ptr<Channel> channel) {
    FRUGAL_ASSERT(!channel_);
    channel_ = std::move(channel);
  }
  bool opened() const { return channel_ != nullptr; }
  Channel& channel() const {
    FRUGAL_ASSERT(channel_);
    return *channel_;
  }

  // answer(channel, bytes, until) takes the payload, of so many bytes, until so late.
  template <class Answer>
  Status ask(Exchange& e, Answer answer) {
    FRUGAL_TRY(request(e));
    const uint64_t until = overdue(e);
    Header h;
    if (Status s = channel_->receive(&h, until)) return not_answered(s);
    bool answered;
    return take_answer(h, until, e, answer, &answered);
  }
  // The same in two: more may be done between them, but for other requests.
  Status request(const Exchange& e);
  // What follows the header. `answered`: what it returns is what the controller has answered.
  template <class Answer>
  Status take_answer(const Header& h, uint64_t until, Exchange& e, Answer answer, bool* answered) {
    *answered = false;
    uint64_t bytes;
    FRUGAL_TRY(begin_answer(h, &until, e, answered, &bytes));
    return not_answered(answer(*channel_, bytes, until));
  }
  uint64_t overdue(const Exchange& e) const;
  // What a call tells whose channel has failed so.
  Status not_answered(Status s);

 private:
  Status begin_answer(const Header& h, uint64_t* until, Exchange& e, bool* answered,
                      uint64_t* bytes);

  Controller& controller_;
  std::unique_ptr<Channel> channel_;
  uint64_t sequence_ = 0;  // of the last request
};

}  // namespace frugal
