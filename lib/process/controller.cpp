#include "process/controller.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/forked.h"
#include "process/rpc_client.h"

namespace frugal {
namespace {

// How long to wait for the end of a connection whose channel has ended.
constexpr uint64_t kLostNs = 50'000'000;
constexpr uint64_t kEndNs = 2'000'000'000;  // between a controller's last connection and its end
constexpr int kLookMs = 5;  // pause between checks: there is no event if its process lives

}  // namespace

Status Controller::connect(const frugal_config& config, int64_t timeout_ms) {
  if (Status s = ControlClient::connect(config.service, timeout_ms, &control_)) {
    if (s != FRUGAL_ERR_TIMEOUT && s != FRUGAL_ERR_CLOSED) return s;
    frugal_error error;  // no controller serves the address
    end_call(s);
    last_error(&error);
    error.status = FRUGAL_ERR_PEER_LOST;
    return fail_as(error);
  }
  return watch_ ? FRUGAL_OK : Watch::open(&watch_);
}

Status Controller::open(const frugal_config& config, OpenReply* reply) {
  frugal_config asked = config;
  asked.service = nullptr;
  asked.log = nullptr;
  asked.log_context = nullptr;
  const Deadline until = deadline();
  int64_t left_ms = config.timeout_ms;
  for (int again = 2;; --again) {
    const uint64_t began = now_ns();
    FRUGAL_TRY(connect(config, left_ms));
    const Status s = answered(control_->open(asked, left_ms, reply));
    if (s == FRUGAL_OK) return s;
    // The controller waits for so long. A process that was suspended meanwhile attaches again.
    const bool late = s == FRUGAL_ERR_PEER_LOST && now_ns() - began >= ControlLimits().open_ns;
    if (!late || again == 0 || until.passed()) return s;
    left_ms = static_cast<int64_t>(left_until(until) / 1'000'000);
  }
}

Status Controller::take(const OpenReply& reply, Descriptors& d) {
  if (reply.numbers.size() != 3)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent other numbers than expected");
  if (d.all.empty()) return fail(FRUGAL_ERR_INTERNAL, "the controller sent too few descriptors");
  regions_.open(ForkedDescriptors::open([&] { return d.take(0); }));
  if (const uint64_t versions = reply.numbers[1]; versions != kNoShmAddress)
    FRUGAL_TRY(in_arena(versions, &kept_, &versions_, kVersionWords));
  FRUGAL_TRY(in_arena(reply.numbers[2], &kept_, &controller_memory_.root));
  controller_memory_.regions = &regions_;
  return FRUGAL_OK;
}

Status Controller::watch() {
  if (control_->controller_pidfd() >= 0) {
    const int fd = fcntl(control_->controller_pidfd(), F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return os_no_descriptor(errno, "the watch of the controller's process");
    uint64_t id;
    Status s = watch_->add(
        fd, [this] { peer_ended(); }, &id);
    if (s != FRUGAL_OK) {
      ::close(fd);
      return s;
    }
  }
  // Memory that the controller gives back is released here, too, even if no call polls. If the news
  // cannot be taken in, the watch tries again, for as long as that takes.
  const int fd = ForkedDescriptors::open(
      [&] { return fcntl(regions_.socket(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1); });
  if (fd < 0) return os_no_descriptor(errno, "the watch of the controller's memory");
  uint64_t id;
  auto look = [this] {
    if (regions_.look() != FRUGAL_OK) sleep_ns(10'000'000);
  };
  if (Status s = watch_->follow(fd, look, &id)) {
    ForkedDescriptors::close(fd);
    return s;
  }
  control_->on_end([this] { connection_ended(); });
  return connected();
}

// The end of the connection may have been handled by now.
Status Controller::connected() const {
  if (!control_->lost()) return FRUGAL_OK;
  return fail(FRUGAL_ERR_PEER_LOST,
              "the connection to the controller has ended: close the engine and open it again");
}

// The controller is gone: cuts the channels, so that no thread waits for it any longer.
void Controller::peer_ended() noexcept {
  lost_.store(true);
  owner_.cut_channels();
}

// If the end of the controller is seen, calls report that. Otherwise nothing will report its end
// any more, so only the channels are cut.
void Controller::connection_ended() noexcept {
  if (!see_end(FRUGAL_ERR_PEER_LOST)) owner_.cut_channels();
}

Status Controller::lost() const {
  return fail(FRUGAL_ERR_PEER_LOST,
              "the controller is gone: open the engine again when there is another");
}

Status Controller::check() const {
  if (closed_.load()) return engine_closed();
  return lost_.load() ? lost() : FRUGAL_OK;
}

Status Controller::answered(Status s) const {
  if (s != FRUGAL_ERR_CLOSED || closed_.load()) return s;
  return fail(
      FRUGAL_ERR_PEER_LOST,
      "the controller is stopping: the tables can be read out when it has ended; open the engine "
      "again when there is another");
}

bool Controller::see_end(Status s) {
  if (s != FRUGAL_ERR_PEER_LOST) return false;
  pollfd p{control_->controller_pidfd(), POLLIN, 0};  // a negative descriptor is never ready
  const uint64_t began = now_ns();
  do {
    if (closed_.load()) return false;
    if (Remaining(*this) || poll(&p, 1, kLookMs) == 1) {
      peer_ended();
      return true;
    }
  } while (now_ns() - began < (control_->lost() ? kEndNs : kLostNs));
  return false;
}

void Controller::disconnect() {
  watch_.reset();
  // It stays: calls of other threads may be on their way to it.
  if (control_) control_->disconnect();
}

void Controller::close(Mutex& calls, Mutex& trainers) {
  FRUGAL_ASSERT(closed());
  std::scoped_lock all(calls, trainers, controller_memory_mu_);
  controller_memory_ = {};
  kept_.clear();
  regions_.close();
}

}  // namespace frugal
