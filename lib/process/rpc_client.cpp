#include "process/rpc_client.h"

#include "process/spin_policy.h"

namespace frugal {
namespace {

constexpr uint64_t kGraceNs = 5'000'000'000;  // how late a reply may be

}  // namespace

uint64_t answer_until(uint64_t at) {
  return at >= UINT64_MAX - kGraceNs ? UINT64_MAX : at + kGraceNs;
}

Status RpcClient::request(const Exchange& e) {
  ++sequence_;
  FRUGAL_TRY(controller_.check());
  Header h{};
  h.type = static_cast<uint32_t>(e.call);
  h.sequence = sequence_;
  h.status = SpinPolicy::processor();
  std::copy(std::begin(e.args), std::end(e.args), h.args);
  return not_answered(channel_->send(h, e.pieces.data(), e.pieces.size(), overdue(e)));
}

// The controller keeps to the call's time-out, which may be a short slice of a long wait. A
// controller that has not replied within the engine's time-out is treated as gone: a later reply
// would belong to no request.
uint64_t RpcClient::overdue(const Exchange& e) const {
  return answer_until(std::max(e.until, controller_.deadline().at));
}

// If the engine is closing or the controller has ended, that is why the channel was cut: a thread
// that cuts for such a reason marks it first.
Status RpcClient::not_answered(Status s) {
  if (s != FRUGAL_ERR_TIMEOUT && s != FRUGAL_ERR_PEER_LOST) return s;
  if (s == FRUGAL_ERR_TIMEOUT) channel_->cut();
  FRUGAL_TRY(controller_.check());
  if (s == FRUGAL_ERR_PEER_LOST) return s;
  return fail(FRUGAL_ERR_PEER_LOST,
              "the controller's process does not respond: close the engine, or the trainer");
}

Status RpcClient::begin_answer(const Header& h, uint64_t* until, Exchange& e, bool* answered,
                               uint64_t* bytes) {
  channel_->set_together(h.type & kTogether);
  if ((h.type & ~kTogether) != static_cast<uint32_t>(e.call) || h.sequence != sequence_) {
    channel_->cut();
    return fail(FRUGAL_ERR_PEER_LOST, "the controller broke the protocol: a reply to no request");
  }
  // The reply has begun: its rest comes as soon.
  *until = std::max(*until, answer_until(controller_.deadline().at));
  const Status status = static_cast<Status>(h.status);
  if (status != FRUGAL_OK) {
    Failure failure{};
    char text[512] = "";
    uint64_t left = channel_->payload_left();
    if (left >= sizeof failure) {
      if (Status s = channel_->read(&failure, sizeof failure, *until)) return not_answered(s);
      left = std::min<uint64_t>(left - sizeof failure, sizeof text - 1);
      if (Status s = channel_->read(text, left, *until)) return not_answered(s);
      text[left] = 0;
    }
    *answered = true;
    frugal_error error{status, failure.system_code, failure.device_code, 0, text};
    return controller_.answered(fail_as(error));
  }
  *answered = true;
  std::copy(std::begin(h.args), std::end(h.args), e.args);
  *bytes = channel_->payload_left();
  return FRUGAL_OK;
}

}  // namespace frugal
