// Serves engines of this process, so that other processes can attach to them.
#pragma once
#include <memory>

#include "base/status.h"

namespace frugal {

class Engine;
class Session;

Status serve(const std::shared_ptr<Engine>& engine, const char* address);
// Called before and after a session is closed. Does nothing if the session is not served.
void stop_serving(const Session& session);

}  // namespace frugal
