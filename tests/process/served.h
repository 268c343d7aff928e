// A controller whose replies a test gives, and what has attached to it: for tests of the parts of
// an attached process. It has no real engine.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "controller.h"
#include "process/controller.h"
#include "process/pinned_slabs.h"
#include "support/inside.h"
#include "support/never.h"

namespace frugal {

// Only the requests that attached processes make in the tests have a reply of their own.
struct ToldHandler : ControlHandler {
  // `call`: as "join 1", "leave 1 any" or "lose 1 42".
  std::function<Status(Peer&, const std::string& call, JoinReply*)> answer;

  Status open(Peer&, const frugal_config& config, OpenReply* reply) override {
    reply->config = config;
    return FRUGAL_OK;
  }
  Status join(Peer& peer, uint64_t, const frugal_trainer_config& config,
              JoinReply* reply) override {
    return answer(peer, "join " + std::to_string(config.rank), reply);
  }
  Status leave(Peer& peer, uint64_t, uint32_t rank, bool lost, uint64_t joined) override {
    return answer(peer,
                  (lost ? "lose " : "leave ") + std::to_string(rank) + " " +
                      (joined == kAnyJoin ? "any" : std::to_string(joined)),
                  nullptr);
  }
  Status create_table(Peer&, const frugal_table_config&, TableReply*) override { return none(); }
  Status find_table(Peer&, const char*, TableReply*) override { return none(); }
  Status drop_table(Peer&, uint64_t) override { return none(); }
  Status stats(Peer&, frugal_stats*) override { return none(); }
  Status health(Peer&, int32_t*) override { return none(); }
  Status committed(Peer&, uint64_t*) override { return none(); }
  void gone(Peer&) override {}

 private:
  static Status none() { return fail(FRUGAL_ERR_UNSUPPORTED, "the test has no such call"); }
};

// A session that a Controller is of, with this time-out of its calls; and it.
class Asker : private Controller::Owner {
 public:
  explicit Asker(int64_t timeout_ms = kNeverMs) {
    frugal_config c = FRUGAL_CONFIG_INIT;
    c.timeout_ms = timeout_ms;
    EXPECT_OK(frugal_open(&c, &engine_));
    session_ = object_of<Session>(engine_);
    controller_.reset(new Controller(*session_, *this, std::make_shared<Pins>()));
  }
  ~Asker() {
    controller_->disconnect();
    EXPECT_OK(frugal_close(engine_));
  }
  void attach(const std::string& address) {
    frugal_config c = session_->config();
    c.service = address.c_str();
    OpenReply reply;
    EXPECT_OK(controller_->open(c, &reply));
  }
  Controller& controller() { return *controller_; }
  int cuts() const { return cuts_; }

 private:
  void cut_channels() noexcept override { ++cuts_; }

  frugal_engine* engine_ = nullptr;
  SessionRef session_;
  std::unique_ptr<Controller> controller_;
  int cuts_ = 0;
};

}  // namespace frugal
