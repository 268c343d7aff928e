// Engines of this process that others can attach to.
#pragma once
#include <memory>

#include "base/status.h"

namespace frugal {

class Engine;

Status serve(const std::shared_ptr<Engine>& engine, const char* address);
// Before it is closed.
void stop_serving(const Engine& engine);

}  // namespace frugal
