#include "capi/serving.h"

#include <mutex>

#include "engine/engine.h"
#include "process/server.h"

namespace frugal {
namespace {

std::mutex g_mutex;

// Never destroyed: engines may be closed while the program exits.
Map<const Engine*, std::unique_ptr<Server>>& servers() {
  static auto* all = new Map<const Engine*, std::unique_ptr<Server>>;
  return *all;
}

}  // namespace

Status serve(const std::shared_ptr<Engine>& engine, const char* address) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (servers().count(engine.get())) return fail(FRUGAL_ERR_EXISTS, "the engine is served already");
  std::unique_ptr<Server> server;
  FRUGAL_TRY(Server::start(address, engine, &server));
  servers()[engine.get()] = std::move(server);
  return FRUGAL_OK;
}

void stop_serving(const Engine& engine) {
  std::unique_ptr<Server> server;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto at = servers().find(&engine);
    if (at == servers().end()) return;
    server = std::move(at->second);
    servers().erase(at);
  }
  server->stop();
}

}  // namespace frugal
