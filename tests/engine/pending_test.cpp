// How much is to be written, against its budget, and what that asks of gates.
#include "engine/pending.h"

#include "support/inside.h"

namespace frugal {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

UpdateRef update(uint64_t bytes) {
  UpdateRef u = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
  u->bytes = bytes;
  return u;
}

TEST(PendingBytes, UpdatesCountUntilTheyAreWritten) {
  std::atomic<uint64_t> peak{0};
  PendingBytes pending(3 * kMiB, &peak);
  UpdateRef a = update(kMiB), b = update(2 * kMiB);
  pending.add(a.get());
  pending.add(b.get());
  EXPECT_EQ(pending.now(), 3 * kMiB);
  EXPECT_FALSE(pending.over_budget());
  const UpdateRef c = update(1);
  pending.add(c.get());
  EXPECT_TRUE(pending.over_budget());
  a->written();
  EXPECT_EQ(pending.now(), 2 * kMiB + 1);
  b.reset();
  EXPECT_EQ(pending.now(), 1u);
  EXPECT_EQ(peak.load(), 3 * kMiB + 1);
}

// A backlog of more than a step and a quarter only leaves the caches; a small one is let be.
TEST(PendingBytes, TheLimitFollowsTheLastStep) {
  std::atomic<uint64_t> peak{0};
  PendingBytes pending(100 * kMiB, &peak);
  EXPECT_EQ(pending.limit(), 4 * kMiB);
  const UpdateRef a = update(10 * kMiB), b = update(30 * kMiB), c = update(kMiB);
  pending.add(a.get());
  EXPECT_EQ(pending.limit(), 4 * kMiB) << "it is not committed";
  pending.add(b.get());
  pending.committed();
  EXPECT_EQ(pending.limit(), 50 * kMiB);
  pending.add(c.get());
  pending.committed();
  EXPECT_EQ(pending.limit(), 4 * kMiB);
  const UpdateRef d = update(90 * kMiB);
  pending.add(d.get());
  pending.committed();
  EXPECT_EQ(pending.limit(), 100 * kMiB) << "never more than the budget";
  PendingBytes none(0, &peak);
  EXPECT_EQ(none.limit(), 0u);
}

TEST(PendingBytes, GatesWaitForEverythingUntilAllIsWritten) {
  std::atomic<uint64_t> peak{0};
  PendingBytes pending(kMiB, &peak);
  EXPECT_FALSE(pending.drains());
  pending.drain();
  EXPECT_TRUE(pending.drains());
  pending.drained();
  EXPECT_FALSE(pending.drains());
}

}  // namespace
}  // namespace frugal
