// For tests of parts of the engine that are linked without its GPUs.
#include "engine/gpu.h"

namespace frugal {

void Gpu::forget_sources(Part&) {}

}  // namespace frugal
