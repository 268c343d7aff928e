#include "capi/serving.h"

#include <algorithm>
#include <memory>

#include "base/forked.h"
#include "base/immortal.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "process/server.h"

namespace frugal {
namespace {

struct Served {
  const Session* engine;
  std::unique_ptr<Server> server;  // null while it starts
};

Mutex g_mutex;

// Engines may be closed while the program exits. Closing one must not need heap memory.
Immortal<Vector<Served>> g_served GUARDED_BY(g_mutex);

Vector<Served>::iterator served(const Session& engine) REQUIRES(g_mutex) {
  return std::find_if(g_served->begin(), g_served->end(),
                      [&](const Served& each) { return each.engine == &engine; });
}

constinit AtFork g_served_at_fork{[]() NO_THREAD_SAFETY_ANALYSIS { g_mutex.lock(); },
                                  []() NO_THREAD_SAFETY_ANALYSIS { g_mutex.unlock(); },
                                  []() NO_THREAD_SAFETY_ANALYSIS { g_mutex.unlock(); }};
[[gnu::constructor]] void register_served() { g_served_at_fork.at_load(); }

}  // namespace

Status serve(const std::shared_ptr<Engine>& engine, const char* address) {
  {
    g_served_at_fork.ensure();
    Lock lock(g_mutex);
    if (served(*engine) != g_served->end())
      return fail(FRUGAL_ERR_EXISTS,
                  "the engine is served already: close it to serve another address");
    g_served->push_back({engine.get(), nullptr});
  }
  struct Place {
    const Engine* engine;
    ~Place() {
      if (!engine) return;
      Lock lock(g_mutex);
      g_served->erase(served(*engine));
    }
  } place{engine.get()};
  std::unique_ptr<Server> server;
  FRUGAL_TRY(Server::start(address, engine, &server));
  {
    // frugal_close() stops the server before and after it closes the engine. So either that call
    // finds the server, or this one finds the engine closed.
    Lock lock(g_mutex);
    if (!engine->closed()) {
      served(*engine)->server = std::move(server);
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
    const auto at = served(session);
    if (at == g_served->end() || !at->server) return;
    server = std::move(at->server);
    g_served->erase(at);
  }
  server->stop();
}

}  // namespace frugal
