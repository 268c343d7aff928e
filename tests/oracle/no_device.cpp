// The oracle that sees nothing of the library but its C ABI has no memory on devices.
#include "oracle/device.h"

namespace frugal_oracle {

const bool kDeviceMemory = false;

std::unique_ptr<RankDevice> OpenDevice(const std::string&, uint64_t) { return nullptr; }
void TakeStepsAsSmall(bool) {}

}  // namespace frugal_oracle
