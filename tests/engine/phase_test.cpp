// What runs beside what.
#include "engine/phase.h"

#include <set>
#include <utility>

#include "support/inside.h"

namespace frugal {
namespace {

TEST(Phase, EachActWaitsForThoseThatItIsNotToRunBeside) {
  using P = Phase;
  // {begins, not beside}
  const std::set<std::pair<P::Act, P::Act>> apart = {
      {P::kStep, P::kOutside}, {P::kStep, P::kAbort},     {P::kStage, P::kCommit},
      {P::kStage, P::kAbort},  {P::kCommit, P::kCommit},  {P::kCommit, P::kAbort},
      {P::kAbort, P::kCommit}, {P::kOutside, P::kCommit}, {P::kOutside, P::kAbort},
      {P::kAlone, P::kRead},   {P::kAlone, P::kPlan},     {P::kRead, P::kOutside},
      {P::kRead, P::kAbort},   {P::kPlan, P::kOutside},   {P::kPlan, P::kAbort},
      {P::kJoin, P::kCommit},  {P::kJoin, P::kAbort},     {P::kLeave, P::kOutside},
      {P::kRevoke, P::kPlan},  {P::kWhole, P::kCommit},   {P::kEnd, P::kCommit},
      {P::kEnd, P::kAbort},    {P::kEnd, P::kOutside},
  };
  for (uint32_t other = 0; other < P::kActs; ++other) {
    Phase phase;
    const P::Act under_way = static_cast<P::Act>(other);
    phase.begin(under_way);
    EXPECT_TRUE(phase.is(under_way));
    for (uint32_t act = 0; act < P::kActs; ++act)
      EXPECT_EQ(phase.may(static_cast<P::Act>(act)),
                !apart.count({static_cast<P::Act>(act), under_way}))
          << act << other;
    // As often as it has begun.
    const bool again = phase.may(under_way);
    if (again) phase.begin(under_way);
    if (again) phase.end(under_way);
    EXPECT_TRUE(phase.is(under_way));
    phase.end(under_way);
    for (uint32_t act = 0; act < P::kActs; ++act) EXPECT_TRUE(phase.may(static_cast<P::Act>(act)));
  }
}

}  // namespace
}  // namespace frugal
