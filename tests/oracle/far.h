// Storage tiers of tables, for the oracle: rows leave memory and come back.
#ifndef FRUGAL_TESTS_ORACLE_FAR_H_
#define FRUGAL_TESTS_ORACLE_FAR_H_

#include <cstdint>

namespace frugal_oracle {

// Whether there are any: the C ABI alone has none.
extern const bool kFarStores;

// The next table that this thread creates has this many slots in memory, and a slow storage tier.
// 0: all.
void PlacesOfNextTable(uint64_t places, uint64_t seed);

// Of all tables that are gone.
struct FarCounts {
  uint64_t loaded = 0, left = 0, refused = 0;
};
FarCounts CountFar();

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_FAR_H_
