// The oracle that sees nothing of the library but its C ABI has no memory on devices.
#include "oracle/device.h"
#include "oracle/far.h"

namespace frugal_oracle {

const bool kDeviceMemory = false;

std::unique_ptr<RankDevice> OpenDevice(const std::string&, uint64_t) { return nullptr; }
void TakeStepsAsSmall(bool) {}
void WaitForCopies(bool) {}

const bool kFarStores = false;

void PlacesOfNextTable(uint64_t, uint64_t) {}
FarCounts CountFar() { return {}; }

}  // namespace frugal_oracle
