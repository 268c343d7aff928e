// Requests of an attached process to its controller over a channel, and their replies.
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

// When the reply to a call with this deadline is overdue.
uint64_t answer_until(uint64_t at);

inline uint64_t left_until(Deadline d) {
  const uint64_t now = now_ns();
  return d.at == UINT64_MAX ? UINT64_MAX : d.at > now ? d.at - now : 0;
}

// A request, and the arguments of its reply.
struct Exchange {
  Call call;
  uint64_t args[5] = {};
  Vector<Piece> pieces;
  uint64_t until = 0;  // the call's own deadline; 0: the engine's time-out applies
  void add(const void* data, size_t bytes) {
    if (bytes) pieces.push_back({data, bytes});
  }
};

// For a reply without a payload.
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

  // Sends a request and waits for its reply. The callable reads the payload (channel, bytes,
  // until).
  template <class Answer>
  Status ask(Exchange& e, Answer answer) {
    FRUGAL_TRY(request(e));
    const uint64_t until = overdue(e);
    Header h;
    if (Status s = channel_->receive(&h, until)) return not_answered(s);
    bool answered;
    return take_answer(h, until, e, answer, &answered);
  }
  // The same in two calls. Between them the caller may do anything but send another request.
  Status request(const Exchange& e);
  // Takes what follows the header. `answered`: whether the status returned is the controller's.
  template <class Answer>
  Status take_answer(const Header& h, uint64_t until, Exchange& e, Answer answer, bool* answered) {
    *answered = false;
    uint64_t bytes;
    FRUGAL_TRY(begin_answer(h, &until, e, answered, &bytes));
    return not_answered(answer(*channel_, bytes, until));
  }
  uint64_t overdue(const Exchange& e) const;
  // The status that a call returns whose channel has failed with `s`.
  Status not_answered(Status s);

 private:
  Status begin_answer(const Header& h, uint64_t* until, Exchange& e, bool* answered,
                      uint64_t* bytes);

  Controller& controller_;
  std::unique_ptr<Channel> channel_;
  uint64_t sequence_ = 0;  // of the last request
};

}  // namespace frugal
