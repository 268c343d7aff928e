#include "capi/serving.h"

#include "base/sync.h"
#include "engine/engine.h"
#include "process/server.h"

namespace frugal {
namespace {

Mutex g_mutex;

// Null while a server starts. Never destroyed: engines may be closed while the program exits. It is
// made without heap memory, which closing an engine must not need.
using Servers = Map<const Session*, std::unique_ptr<Server>>;
Servers& servers() REQUIRES(g_mutex) {
  alignas(Servers) static char memory[sizeof(Servers)];
  static auto* all = new (memory) Servers;
  return *all;
}

}  // namespace

Status serve(const std::shared_ptr<Engine>& engine, const char* address) {
  {
    Lock lock(g_mutex);
    if (!servers().try_emplace(engine.get()).second)
      return fail(FRUGAL_ERR_EXISTS,
                  "the engine is served already: close it to serve another address");
  }
  struct Place {
    const Engine* engine;
    ~Place() {
      if (!engine) return;
      Lock lock(g_mutex);
      servers().erase(engine);
    }
  } place{engine.get()};
  std::unique_ptr<Server> server;
  FRUGAL_TRY(Server::start(address, engine, &server));
  {
    // frugal_close() stops the server before and after it closes the engine. So either that call
    // finds the server, or this one finds the engine closed.
    Lock lock(g_mutex);
    if (!engine->closed()) {
      servers()[engine.get()] = std::move(server);
      place.engine = nullptr;
      return FRUGAL_OK;
    }
  }
  server->stop();
  return engine_closed();
}

void stop_serving(const Session& session) {
  std::unique_ptr<Server> server;
  {
    Lock lock(g_mutex);
    auto at = servers().find(&session);
    if (at == servers().end() || !at->second) return;
    server = std::move(at->second);
    servers().erase(at);
  }
  server->stop();
}

}  // namespace frugal
