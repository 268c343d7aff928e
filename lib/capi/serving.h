// Engines of this process that others can attach to.
#pragma once
#include <memory>

#include "base/status.h"

namespace frugal {

class Engine;
class Session;

Status serve(const std::shared_ptr<Engine>& engine, const char* address);
// Before a session is closed. Nothing is to be done if nobody serves it.
void stop_serving(const Session& session);

}  // namespace frugal
