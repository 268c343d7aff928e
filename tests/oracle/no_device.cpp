// The oracle that sees nothing of the library but its C ABI has the cpu device only.
#include "oracle/device.h"

namespace frugal_oracle {

std::unique_ptr<RankDevice> OpenDevice(const std::string&, uint64_t) { return nullptr; }
void TakeStepsAsSmall(bool) {}

}  // namespace frugal_oracle
