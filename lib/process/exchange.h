// How the client asks the controller. Included by the client's sources only.
#pragma once
#include "process/client.h"

namespace frugal {

// When an answer to a call with this deadline is overdue.
uint64_t answer_until(uint64_t at);

inline uint64_t left_until(Deadline d) {
  const uint64_t now = now_ns();
  return d.at == UINT64_MAX ? UINT64_MAX : d.at > now ? d.at - now : 0;
}

// `answer` takes the payload, of so many bytes, until so late.
template <class Answer>
Status Client::ask(Channel& channel, uint64_t* sequence, Exchange& e, Answer answer) {
  FRUGAL_TRY(request(channel, ++*sequence, e));
  const uint64_t until = overdue(e);
  Header h;
  if (Status s = channel.receive(&h, until)) return not_answered(channel, s);
  bool answered;
  return take_answer(channel, *sequence, h, until, e, answer, &answered);
}

// What follows the header. `answered`: what it returns is what the controller has answered.
template <class Answer>
Status Client::take_answer(Channel& channel, uint64_t sequence, const Header& h, uint64_t until, Exchange& e,
                           Answer answer, bool* answered) {
  *answered = false;
  auto told = [&](Status s) { return not_answered(channel, s); };
  channel.set_together(h.type & kTogether);
  if ((h.type & ~kTogether) != static_cast<uint32_t>(e.call) || h.sequence != sequence) {
    channel.cut();
    return fail(FRUGAL_ERR_PEER_LOST, "the controller broke the protocol: an answer to no question");
  }
  // It has begun to answer: the rest comes as soon.
  until = std::max(until, answer_until(deadline(FRUGAL_TIMEOUT_DEFAULT).at));
  const Status status = static_cast<Status>(h.status);
  if (status != FRUGAL_OK) {
    Failure failure{};
    char text[512] = "";
    uint64_t left = channel.payload_left();
    if (left >= sizeof failure) {
      if (Status s = channel.read(&failure, sizeof failure, until)) return told(s);
      left = std::min<uint64_t>(left - sizeof failure, sizeof text - 1);
      if (Status s = channel.read(text, left, until)) return told(s);
      text[left] = 0;
    }
    *answered = true;
    frugal_error error{status, failure.system_code, failure.device_code, 0, text};
    return of_controller(fail_as(error));
  }
  *answered = true;
  std::copy(std::begin(h.args), std::end(h.args), e.args);
  return told(answer(channel, channel.payload_left(), until));
}

template <class Answer>
Status Client::ask(Exchange& e, Answer answer) {
  settle_all(e.until ? e.until : deadline(FRUGAL_TIMEOUT_DEFAULT).at);
  std::lock_guard<std::mutex> one(channel_mu_);
  return ask(*channel_, &sequence_, e, answer);
}

}  // namespace frugal
