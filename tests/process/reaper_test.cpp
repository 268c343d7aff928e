// The reaper removes each lost trainer once, in a thread that holds none of its locks; until then
// its rank counts as lost.
#include "process/reaper.h"

#include <future>

#include "support/inside.h"
#include "support/trainers.h"

namespace frugal::reaper_test {

struct Owner final : Reaper::Owner {
  void reap(const TrainerRef& trainer) override {
    {
      UniqueLock lock(mu);
      reaping.push_back(trainer->rank);
      changed.notify_all();
      changed.wait(lock, [&] { return open; });
    }
    // A thread that finds a trainer unresponsive meanwhile calls this, too.
    EXPECT_TRUE(reaper.has(trainer->rank));
    reaper.lose_async(trainer);
  }
  void reaped() override {
    UniqueLock lock(mu);
    EXPECT_FALSE(reaper.has(reaping.back()));
    ++told;
    changed.notify_all();
  }
  void await(size_t n) {
    UniqueLock lock(mu);
    changed.wait(lock, [&] { return told >= n; });
  }
  Mutex mu;
  Condition changed;
  std::vector<uint32_t> reaping;
  size_t told = 0;
  bool open = true;
  Reaper reaper{*this};
};

TEST(Reaper, EachIsTakenOutOnce) {
  Owner owner;
  owner.reaper.reserve(3);
  const TrainerRef two = trainer_of(2), zero = trainer_of(0);
  owner.reaper.lose_async(two);
  owner.reaper.lose_async(zero);
  owner.reaper.lose_async(two);
  EXPECT_TRUE(owner.reaper.has(2));
  EXPECT_TRUE(owner.reaper.has(0));
  EXPECT_FALSE(owner.reaper.has(1));
  ASSERT_OK(owner.reaper.start());
  owner.await(2);
  owner.reaper.stop();
  EXPECT_EQ(owner.reaping, (std::vector<uint32_t>{2, 0}));
}

TEST(Reaper, OneIsAskedForWhileAnotherIsTakenOut) {
  Owner owner;
  owner.open = false;
  owner.reaper.reserve(2);
  ASSERT_OK(owner.reaper.start());
  owner.reaper.lose_async(trainer_of(1));
  {
    UniqueLock lock(owner.mu);
    owner.changed.wait(lock, [&] { return !owner.reaping.empty(); });
  }
  owner.reaper.lose_async(trainer_of(0));
  {
    Lock lock(owner.mu);
    owner.open = true;
    owner.changed.notify_all();
  }
  owner.await(2);
  owner.reaper.stop();
  EXPECT_EQ(owner.reaping, (std::vector<uint32_t>{1, 0}));
}

TEST(Reaper, ThoseThatAreLeftAreLostByNobody) {
  Owner owner;
  owner.reaper.reserve(1);
  owner.reaper.stop();  // it was not started
  owner.reaper.lose_async(trainer_of(0));
  owner.reaper.stop();
  EXPECT_TRUE(owner.reaping.empty());
}

}  // namespace frugal::reaper_test
