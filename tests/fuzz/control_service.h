// The service whose input is fuzzed: a control server without an address, and a handler that
// returns at once.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>

#include "process/control.h"

namespace frugal {

struct FuzzedHandler : ControlHandler {
  std::atomic<uint64_t> calls{0};
  Status count() {
    ++calls;
    return FRUGAL_OK;
  }
  Status open(Peer&, const frugal_config& config, OpenReply* reply) override {
    reply->config = config;
    reply->descriptors = {0};
    return count();
  }
  Status create_table(Peer&, const frugal_table_config& config, TableReply* reply) override {
    reply->numbers = {config.rows, config.name ? 1u : 0u};
    return count();
  }
  Status find_table(Peer&, const char* name, TableReply* reply) override {
    reply->id = static_cast<uint64_t>(name[0]);
    return count();
  }
  Status drop_table(Peer&, uint64_t) override { return count(); }
  Status join(Peer&, uint64_t, const frugal_trainer_config&, JoinReply* reply) override {
    reply->descriptors = {0, 0};
    return count();
  }
  Status leave(Peer&, uint64_t, uint32_t, bool, uint64_t) override {
    return fail(FRUGAL_ERR_NOT_FOUND, "no such rank");
  }
  Status stats(Peer&, frugal_stats*) override { return count(); }
  Status health(Peer&, int32_t*) override { return count(); }
  Status committed(Peer&, uint64_t*) override { return count(); }
  void gone(Peer&) override {}
};

inline FuzzedHandler& fuzzed_handler() {
  static FuzzedHandler handler;
  return handler;
}

inline ControlServer& fuzzed_service() {
  static std::unique_ptr<ControlServer> server = [] {
    std::unique_ptr<ControlServer> made;
    fuzzed_handler();
    if (ControlServer::start(nullptr, &fuzzed_handler(), &made) != FRUGAL_OK) std::abort();
    return made;
  }();
  return *server;
}

}  // namespace frugal
