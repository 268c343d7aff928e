// Which activities of an engine exclude each other; a waiting activity is notified when it may run,
// and when the engine closes.
#include "engine/phase.h"

#include <atomic>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "support/inside.h"

namespace frugal::phase_test {

using P = Phase;

struct PhaseTest : testing::Test {
  Trace trace;
  Workers workers{0, {[] { return false; }, [] { return false; }, [] {}}, &trace};
  ControlMutex mu;
  Phase phase{mu, workers};

  void end(P::Act act) {
    ControlLock lock(mu);
    phase.end(act);
  }
  // Waits for the act until what follows is done. Whether it may begin then.
  template <class Do>
  bool awaited(P::Act act, Do what_follows) {
    std::atomic<bool> begun{false};
    bool follows = false, waited = false, may = false;
    std::thread waiter([&] {
      ControlLock lock(mu);
      begun = true;
      may = phase.await(lock, act);
      waited = follows;
    });
    while (!begun) std::this_thread::yield();
    {
      ControlLock lock(mu);  // the waiting thread has released it
      follows = true;
    }
    what_follows();
    waiter.join();
    EXPECT_TRUE(waited);
    return may;
  }
};

TEST_F(PhaseTest, EachActWaitsForThoseThatItIsNotToRunBeside) {
  // {begins, not concurrently with}
  const std::set<std::pair<P::Act, P::Act>> apart = {
      {P::kStep, P::kOutside},  {P::kStep, P::kAbort},     {P::kPrepare, P::kCommit},
      {P::kPrepare, P::kAbort}, {P::kCommit, P::kCommit},  {P::kCommit, P::kAbort},
      {P::kAbort, P::kCommit},  {P::kOutside, P::kCommit}, {P::kOutside, P::kAbort},
      {P::kAlone, P::kRead},    {P::kAlone, P::kPlan},     {P::kRead, P::kOutside},
      {P::kRead, P::kAbort},    {P::kPlan, P::kOutside},   {P::kPlan, P::kAbort},
      {P::kJoin, P::kCommit},   {P::kJoin, P::kAbort},     {P::kLeave, P::kOutside},
      {P::kRevoke, P::kPlan},   {P::kWhole, P::kCommit},   {P::kEnd, P::kCommit},
      {P::kEnd, P::kAbort},     {P::kEnd, P::kOutside},    {P::kStep, P::kClosed},
      {P::kCommit, P::kClosed}, {P::kOutside, P::kClosed}, {P::kPlan, P::kClosed},
      {P::kJoin, P::kClosed},   {P::kGet, P::kCommit},     {P::kGet, P::kAbort},
      {P::kGet, P::kOutside},   {P::kGet, P::kClosed},     {P::kCommit, P::kGet},
      {P::kAbort, P::kGet},     {P::kAlone, P::kGet},      {P::kEnd, P::kGet},
  };
  for (uint32_t other = 0; other < P::kActs; ++other) {
    Phase phase(mu, workers);
    const P::Act under_way = static_cast<P::Act>(other);
    if (under_way == P::kClosed)
      phase.close();
    else
      phase.begin(under_way);
    EXPECT_TRUE(phase.is(under_way));
    for (uint32_t act = 0; act < P::kActs; ++act)
      EXPECT_EQ(phase.may(static_cast<P::Act>(act)),
                !apart.count({static_cast<P::Act>(act), under_way}))
          << act << other;
    if (under_way == P::kClosed) continue;
    // As often as it has begun.
    const bool again = phase.may(under_way);
    if (again) phase.begin(under_way);
    if (again) phase.end(under_way);
    EXPECT_TRUE(phase.is(under_way));
    phase.end(under_way);
    for (uint32_t act = 0; act < P::kActs; ++act) EXPECT_TRUE(phase.may(static_cast<P::Act>(act)));
  }
}

TEST_F(PhaseTest, WhoAwaitsAnActIsToldWhenItMayBegin) {
  phase.begin(P::kCommit);
  EXPECT_TRUE(awaited(P::kOutside, [&] { end(P::kCommit); }));
  std::optional<P::During> reads;
  reads.emplace(phase, P::kRead);
  EXPECT_TRUE(awaited(P::kAlone, [&] { reads.reset(); }));
  EXPECT_FALSE(phase.is(P::kRead));
}

// What is not to run once the engine is closed is not waited for; the rest is.
TEST_F(PhaseTest, WhoAwaitsAnActIsToldThatTheEngineIsClosed) {
  phase.begin(P::kAbort);
  EXPECT_FALSE(phase.closed());
  EXPECT_FALSE(awaited(P::kOutside, [&] {
    ControlLock lock(mu);
    EXPECT_FALSE(phase.close());
  }));
  EXPECT_TRUE(phase.closed() && phase.is(P::kClosed));
  ControlLock lock(mu);
  EXPECT_FALSE(phase.await(lock, P::kJoin));
  lock.unlock();
  EXPECT_TRUE(awaited(P::kEnd, [&] { end(P::kAbort); }));
  EXPECT_TRUE(phase.close()) << "it was before";
}

}  // namespace frugal::phase_test
