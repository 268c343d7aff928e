// The two-level queue and the tree heap agree with a map: order, changes of priority, preparing,
// many threads.
//
// Also, which a map does not show: memory, memory that fails, and stale queue items.
#include "flush/queue.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "support/inside.h"
#include "support/queue_owner.h"

namespace frugal::queue_test {

using Ids = std::vector<uint32_t>;

struct QueueTest : testing::TestWithParam<bool> {
  QueueTest() : queue(std::make_unique<QueueOwner>(GetParam(), kIds)) {}
  static constexpr uint32_t kIds = 20000;

  Ids pop(uint64_t next_commit, uint32_t limit_distance, size_t max) {
    Ids out(max + 1, UINT32_MAX);
    out.resize(queue->pop(next_commit, limit_distance, out.data(), max));
    EXPECT_LE(out.size(), max);
    return out;
  }
  void push(const uint32_t* ids, size_t n, uint8_t prio) {
    for (size_t i = 0; i < n; ++i) queue->push(ids[i], prio);
  }
  void prepare(uint32_t id, uint8_t prio) { queue->prepare(&id, 1, prio); }
  Ids sorted(Ids ids) {
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  Ids range(uint32_t from, uint32_t to) {
    Ids ids;
    for (uint32_t i = from; i < to; ++i) ids.push_back(i);
    return ids;
  }
  std::unique_ptr<QueueOwner> queue;
};

struct Names {
  template <class Info>
  std::string operator()(const Info& info) const {
    return info.param ? "TreeHeap" : "TwoLevel";
  }
};
INSTANTIATE_TEST_SUITE_P(Queues, QueueTest, testing::Bool(), Names());
// What only the two-level queue has: stale items, blocks of memory.
struct TwoLevelTest : QueueTest {};
INSTANTIATE_TEST_SUITE_P(Queues, TwoLevelTest, testing::Values(false), Names());

TEST_P(QueueTest, Empty) {
  EXPECT_EQ(pop(0, kRing, 8), Ids());
  queue->commit_prepared();
  queue->drop_prepared();
  queue->prepare(Ids().data(), 0, 5);
  queue->commit_prepared();
  EXPECT_EQ(pop(5, kRing, 8), Ids());
  queue->push(3, 7);
  EXPECT_EQ(pop(0, kRing, 0), Ids());
  EXPECT_EQ(pop(0, kRing, 8), Ids{3});
  EXPECT_EQ(pop(0, kRing, 8), Ids());
}

// The ring is read from the next commit on; what nobody reads comes last.
TEST_P(QueueTest, TheRingBeginsAtTheBase) {
  queue->set_next_commit(60);
  queue->push(0, kInfinity);
  queue->push(1, 2);  // step 66
  queue->push(2, 63);
  queue->push(3, 60);
  queue->push(4, 59);  // step 123, the last one of the ring
  EXPECT_EQ(pop(60, kRing, 8), (Ids{3, 2, 1, 4, 0}));
}

TEST_P(QueueTest, NothingAboveTheLimit) {
  queue->set_next_commit(10);
  queue->push(1, 12);
  queue->push(2, kInfinity);
  EXPECT_EQ(pop(10, 1, 8), Ids());
  EXPECT_EQ(pop(10, 2, 8), Ids{1});
  EXPECT_EQ(pop(10, kRing - 1, 8), Ids());
  EXPECT_EQ(pop(10, kRing, 8), Ids{2});
}

TEST_P(QueueTest, AnAdjustedEntryIsThereOnce) {
  queue->push(1, 20);
  queue->push(2, 30);
  for (const uint8_t prio :
       {uint8_t{40}, uint8_t{5}, uint8_t{5}, kInfinity, uint8_t{20}, uint8_t{35}})
    queue->adjust(1, prio);
  EXPECT_EQ(pop(0, kRing, 8), (Ids{2, 1}));
  // Its former items do not bring it back, nor do they count for it when it is queued again.
  queue->push(1, 50);
  EXPECT_EQ(pop(0, 49, 8), Ids());
  EXPECT_EQ(pop(0, 50, 8), Ids{1});
}

TEST_P(QueueTest, StagedEntriesWaitForTheCommit) {
  queue->push(1, 9);
  prepare(2, 3);
  const uint32_t more[] = {3, 4};
  queue->prepare(more, 2, kInfinity);
  EXPECT_EQ(pop(0, kRing, 8), Ids{1});
  queue->adjust_prepared(4, 1);
  queue->adjust_prepared(2, 3);
  queue->adjust_prepared(2, 2);
  EXPECT_EQ(pop(0, kRing, 8), Ids());
  queue->commit_prepared();
  EXPECT_EQ(pop(0, kRing, 8), (Ids{4, 2, 3}));
  // A commit joins what is queued already, behind it.
  queue->push(5, 7);
  prepare(6, 7);
  queue->commit_prepared();
  queue->push(7, 7);
  EXPECT_EQ(sorted(pop(0, 7, 8)), (Ids{5, 6, 7}));
}

TEST_P(QueueTest, DroppedEntriesAreGone) {
  queue->push(1, 9);
  prepare(2, 3);
  prepare(3, kInfinity);
  queue->adjust_prepared(3, 4);
  queue->drop_prepared();
  queue->commit_prepared();
  EXPECT_EQ(pop(0, kRing, 8), Ids{1});
  queue->push(2, 5);
  prepare(3, 5);
  queue->commit_prepared();
  EXPECT_EQ(sorted(pop(0, kRing, 8)), (Ids{2, 3}));
}

TEST_P(QueueTest, ManyOfOnePriority) {
  const Ids all = range(0, 5000);
  push(all.data(), 1000, 7);
  for (uint32_t id = 1000; id < 1100; ++id) queue->push(id, 7);
  queue->prepare(all.data() + 1100, 2900, 7);
  for (uint32_t id = 4000; id < 5000; ++id) prepare(id, 7);
  queue->commit_prepared();
  Ids got;
  for (size_t n = 1; got.size() < all.size() && !HasFatalFailure(); n = n % 700 + 13) {
    const Ids some = pop(0, kRing, n);
    ASSERT_FALSE(some.empty());
    got.insert(got.end(), some.begin(), some.end());
  }
  EXPECT_EQ(sorted(got), all);
  EXPECT_EQ(pop(0, kRing, 1), Ids());
}

TEST_P(QueueTest, IdsGrow) {
  queue->push(kIds - 1, 3);
  queue->reserve_ids(100);  // never shrinks
  queue->reserve_ids(3 * kIds);
  queue->push(3 * kIds - 1, 1);
  EXPECT_EQ(pop(0, kRing, 8), (Ids{3 * kIds - 1, kIds - 1}));
}

// Beside a map from entry to priority. The next commit moves on as it does in a window: no step is
// passed that has entries.
TEST_P(QueueTest, RandomOperations) {
  for (int round = 0; round < 6; ++round) {
    Random random(test_seed() + static_cast<uint64_t>(round));
    const uint32_t ids = round % 2 ? 40 : 3000;
    queue = std::make_unique<QueueOwner>(GetParam(), ids);
    std::map<uint32_t, uint8_t> queued, prepared;
    uint64_t next_commit = random.below(200);
    queue->set_next_commit(next_commit);
    const auto rank = [&](uint8_t prio) { return prio_distance(prio, next_commit); };
    const auto any_prio = [&] {
      return random.one_in(4) ? kInfinity
                              : static_cast<uint8_t>((next_commit + random.below(12)) % kRing);
    };
    const auto absent = [&](size_t n) {
      Ids some;
      for (size_t tries = 0; some.size() < n && tries < 4 * n; ++tries) {
        const auto id = static_cast<uint32_t>(random.below(ids));
        if (!queued.count(id) && !prepared.count(id) &&
            std::find(some.begin(), some.end(), id) == some.end())
          some.push_back(id);
      }
      return some;
    };
    const auto one_of = [&](const std::map<uint32_t, uint8_t>& of) {
      auto at = of.lower_bound(static_cast<uint32_t>(random.below(ids)));
      return at == of.end() ? of.begin()->first : at->first;
    };
    const auto take = [&](uint32_t limit, size_t max) {
      const Ids got = pop(next_commit, limit, max);
      uint32_t last = 0;
      for (uint32_t id : got) {
        auto at = queued.find(id);
        ASSERT_NE(at, queued.end()) << "entry " << id << " was not queued";
        ASSERT_GE(rank(at->second), last) << "entry " << id << " comes too late";
        ASSERT_LE(rank(at->second), limit);
        last = rank(at->second);
        queued.erase(at);
      }
      uint32_t least = kRing + 1;
      for (auto& [id, prio] : queued) least = std::min(least, rank(prio));
      ASSERT_GE(least, last) << "an entry that is more urgent was left";
      if (got.size() < max) {
        ASSERT_GT(least, limit) << "an entry was left";
      }
    };
    for (int i = 0; i < 4000; ++i) {
      SCOPED_TRACE(testing::Message() << "round " << round << ", operation " << i);
      const uint8_t prio = any_prio();
      switch (random.below(12)) {
        case 0:
        case 1:
          for (uint32_t id : absent(1)) queue->push(id, queued[id] = prio);
          break;
        case 2: {
          const Ids some = absent(random.below(20));
          push(some.data(), some.size(), prio);
          for (uint32_t id : some) queued[id] = prio;
          break;
        }
        case 3:
          for (uint32_t id : absent(1)) prepare(id, prepared[id] = prio);
          break;
        case 4: {
          const Ids some = absent(random.below(20));
          queue->prepare(some.data(), some.size(), prio);
          for (uint32_t id : some) prepared[id] = prio;
          break;
        }
        case 5:
        case 6:
        case 7:
          if (queued.empty()) break;
          if (const uint32_t id = one_of(queued); true) queue->adjust(id, queued[id] = prio);
          break;
        case 8:
          if (prepared.empty()) break;
          if (const uint32_t id = one_of(prepared); true)
            queue->adjust_prepared(id, prepared[id] = prio);
          break;
        case 9:
          if (random.one_in(4)) {
            queue->drop_prepared();
          } else {
            queue->commit_prepared();
            queued.merge(prepared);
          }
          prepared.clear();
          break;
        case 10:
          take(static_cast<uint32_t>(random.below(kRing + 1)), random.below(12));
          break;
        default: {
          // Entries of the next step to commit go, those that are prepared for it become less
          // urgent.
          const uint8_t passed = static_cast<uint8_t>(next_commit % kRing);
          const auto is_passed = [&](auto& e) { return e.second == passed; };
          while (std::any_of(queued.begin(), queued.end(), is_passed) && !HasFatalFailure())
            take(0, 64);
          for (auto& [id, p] : prepared)
            if (p == passed) queue->adjust_prepared(id, p = kInfinity);
          queue->set_next_commit(++next_commit);
        }
      }
      if (HasFatalFailure()) return;
    }
    queue->commit_prepared();
    queued.merge(prepared);
    prepared.clear();
    while (!queued.empty() && !HasFatalFailure()) take(kRing, 64);
  }
}

// Its owner serializes calls, from many threads: each entry is taken by one of them.
TEST_P(QueueTest, ManyThreads) {
  if (testing::UnitTest::GetInstance()->failed_test_count() != 0)
    GTEST_SKIP() << "threads may wait for ever where entries are lost";
  constexpr uint32_t kThreads = 4, kEach = 2000;
  std::mutex mu;
  std::vector<std::atomic<int>> taken(kThreads * kEach);
  std::atomic<int64_t> left{kThreads * kEach};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      uint32_t ids[32];
      for (uint32_t next = t * kEach, end = next + kEach; left.load() > 0;) {
        if (next < end) {
          std::lock_guard<std::mutex> lock(mu);
          queue->push(next, static_cast<uint8_t>(next % kRing));
          if (next % 3 == 0) queue->adjust(next, kInfinity);
          ++next;
        }
        if (next % 8 && next < end) continue;
        size_t n;
        {
          std::lock_guard<std::mutex> lock(mu);
          n = queue->pop(0, kRing, ids, 32);
        }
        for (size_t i = 0; i < n; ++i) taken[ids[i]].fetch_add(1);
        left.fetch_sub(static_cast<int64_t>(n));
        if (n == 0) std::this_thread::yield();
      }
    });
  for (std::thread& t : threads) t.join();
  for (auto& n : taken) ASSERT_EQ(n.load(), 1);
}

// Entries that change their priority for ever leave stale items behind, and memory stays that of
// the entries.
TEST_P(TwoLevelTest, StalePlacesAreGivenUp) {
  const Ids all = range(0, 3000);
  push(all.data(), all.size(), 1);
  Random random(test_seed());
  std::vector<uint8_t> prio(all.size(), 1);
  HeapCount count;
  for (int i = 0; i < 200000; ++i) {
    const uint32_t id = static_cast<uint32_t>(random.below(all.size()));
    queue->adjust(
        id, prio[id] = random.one_in(3) ? kInfinity : static_cast<uint8_t>(random.below(kRing)));
  }
  // 200,000 items are 393 blocks. Half of those that stay may be stale, and each of 65 buckets has
  // one begun.
  EXPECT_LE(count.so_far(), 150);
  const Ids got = pop(0, kRing, all.size() + 1);
  for (size_t i = 1; i < got.size(); ++i)
    ASSERT_LE(prio_distance(prio[got[i - 1]], 0), prio_distance(prio[got[i]], 0));
  EXPECT_EQ(sorted(got), all);
  EXPECT_EQ(pop(0, kRing, 1), Ids());
}

// An entry that was taken and prepared again for a priority of old stands at its old item; its
// owner skips that.
TEST_P(TwoLevelTest, AStaleOfAStagedEntry) {
  queue->push(1, 5);
  queue->push(2, 5);
  queue->adjust(1, 3);
  EXPECT_EQ(pop(0, 3, 8), Ids{1});
  prepare(1, 5);
  EXPECT_EQ(pop(0, kRing, 8), Ids{2});
  EXPECT_EQ(pop(0, kRing, 8), Ids());
  queue->commit_prepared();
  EXPECT_EQ(pop(0, kRing, 8), Ids{1});
}

TEST_P(QueueTest, ForgottenEntries) {
  queue->forget(5);
  EXPECT_EQ(pop(0, kRing, 8), Ids());
  queue->push(5, 3);
  EXPECT_EQ(pop(0, kRing, 8), Ids{5});
  queue->forget(5);
  queue->push(5, 3);
  EXPECT_EQ(pop(0, kRing, 8), Ids{5});
}

TEST_P(TwoLevelTest, WhatIsForgottenIsNotPopped) {
  queue->push(1, 3);
  queue->push(2, 3);
  queue->forget(1);
  EXPECT_EQ(pop(0, kRing, 8), Ids{2});
  queue->push(1, 4);
  EXPECT_EQ(pop(0, kRing, 8), Ids{1});
}

TEST_P(TwoLevelTest, WithoutMemoryNothingHasChanged) {
  queue->push(1, 3);
  {
    HeapFails fails(1);
    EXPECT_THROW(queue->push(2, 4), std::bad_alloc);
  }
  {
    HeapFails fails(1);
    EXPECT_THROW(queue->adjust(1, 4), std::bad_alloc);
  }
  {
    HeapFails fails(1);
    EXPECT_THROW(prepare(3, 4), std::bad_alloc);
  }
  queue->commit_prepared();
  EXPECT_EQ(pop(0, kRing, 8), Ids{1});
  // Of a piece that memory ran short for some are in, until the stage is dropped.
  const Ids all = range(0, 3000);
  for (int64_t n = 1; n <= 3; ++n) {
    HeapFails fails(n);
    EXPECT_THROW(queue->prepare(all.data(), all.size(), 4), std::bad_alloc);
    queue->drop_prepared();
    EXPECT_EQ(pop(0, kRing, 8), Ids());
  }
  queue->prepare(all.data(), all.size(), 4);
  queue->commit_prepared();
  EXPECT_EQ(sorted(pop(0, kRing, 4000)), all);
}

// Where there is no memory to rewrite the buckets, they stay as they are until there is.
TEST_P(TwoLevelTest, StalePlacesWithoutMemory) {
  const Ids all = range(0, 20000);
  push(all.data(), all.size(), 1);
  int64_t refused = 0;
  for (uint8_t prio = 2; prio < 8; ++prio)
    for (uint32_t id : all) {
      HeapFails fails(1);
      try {
        queue->adjust(id, prio);
        continue;
      } catch (const std::bad_alloc&) {
        ++refused;
      }
      heap_test_fail_after(0);
      queue->adjust(id, prio);
    }
  EXPECT_GT(refused, 0);
  const Ids got = pop(0, kRing, all.size() + 1);
  EXPECT_EQ(sorted(got), all);
  EXPECT_EQ(pop(0, kRing, 1), Ids());
}

}  // namespace frugal::queue_test
