// The rows of a snapshot: each is copied once, before it changes, whichever thread comes first.
#include "checkpoint/row_tracker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "support/inside.h"
#include "support/rows.h"

namespace frugal {
namespace {

struct Copies : RowTracker::Sink {
  std::vector<uint32_t> saved, gone;
  std::function<void()> at_save;
  void save(const uint32_t* slots, size_t n) noexcept override {
    if (at_save) at_save();
    saved.insert(saved.end(), slots, slots + n);
  }
  void deleted(uint32_t slot) noexcept override { gone.push_back(slot); }
  Status expect_deletions(size_t) override { return FRUGAL_OK; }
  Status expect(uint64_t, uint64_t) override { return FRUGAL_OK; }
  void new_state() noexcept override {}
};

constexpr uint64_t kRows = 1000;

struct Tracked {
  explicit Tracked(bool unchanged = true) {
    EXPECT_OK(rows.open(rows_config(kRows, 4, FRUGAL_SGD), &budget));
    EXPECT_OK(rows.initialize_range(0, kRows));
    EXPECT_OK(tracker.open(rows, &copies, &budget, unchanged));
  }
  void write(std::vector<uint32_t> slots, uint64_t step) {
    const RowWrite write(rows, slots.data(), slots.size(),
                         {RowWrite::What::kUpdate, nullptr, nullptr, 0, step});
  }
  std::multiset<uint32_t> saved() const { return {copies.saved.begin(), copies.saved.end()}; }
  void save_all() {
    while (tracker.save_some()) {
    }
    tracker.stop_saving();
  }

  MemoryBudget budget;
  Rows rows;
  Copies copies;
  RowTracker tracker;
};

TEST(RowTracker, CopiesChangedRowsOnce) {
  Tracked t;
  t.write({1, 2, 700}, 5);
  t.tracker.begin(6);
  t.write({2, 3}, 6);  // 2 is copied before; 3 has not changed until then
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{2}));
  t.write({2}, 7);
  t.save_all();
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{1, 2, 700}));
  t.tracker.end(true);
  t.copies.saved.clear();
  t.tracker.begin(8);
  t.save_all();
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{2, 3}));
  t.tracker.end(true);
}

TEST(RowTracker, LateUpdatesAreOfTheSnapshot) {
  Tracked t;
  t.tracker.begin(6);
  t.write({9}, 5);
  EXPECT_TRUE(t.copies.saved.empty());
  t.write({9}, 6);
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{9}));
  t.save_all();
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{9}));
  t.tracker.end(true);
}

TEST(RowTracker, RowsOfASnapshotThatFailedAreOfTheNext) {
  Tracked t;
  t.write({1, 64}, 5);
  t.tracker.begin(6);
  t.write({1, 2}, 6);
  t.tracker.end(false);
  t.write({3}, 5);  // an update from before that snapshot, written after it
  t.copies.saved.clear();
  t.tracker.begin(7);
  t.save_all();
  EXPECT_EQ(t.saved(), (std::multiset<uint32_t>{1, 2, 3, 64}));
  t.tracker.end(true);
}

TEST(RowTracker, AllRowsOfATableThatWasUsed) {
  Tracked t(false);
  t.tracker.begin(1);
  t.save_all();
  EXPECT_EQ(t.copies.saved.size(), kRows);
  t.tracker.end(true);
}

// A writer has taken its row, and is about to copy it. The snapshot does not end before.
TEST(RowTracker, TheEndAwaitsRowsThatAreTaken) {
  Tracked t;
  t.write({5}, 1);
  t.tracker.begin(2);
  std::atomic<bool> taken{false}, ends{false};
  t.copies.at_save = [&] {
    taken.store(true);
    while (!ends.load()) yield_thread();
    for (int i = 0; i < 1000; ++i) yield_thread();
  };
  std::thread writer([&] { t.write({5}, 2); });
  while (!taken.load()) yield_thread();
  while (t.tracker.save_some()) {
  }
  ends.store(true);
  t.tracker.stop_saving();
  EXPECT_EQ(t.copies.saved.size(), 1u);
  writer.join();
  t.tracker.end(true);
}

// The thread that saves rows in order has taken a row. A writer waits until it is copied.
TEST(RowTracker, AWriterAwaitsRowsThatAreTaken) {
  Tracked t;
  t.write({5, 6}, 1);
  t.tracker.begin(2);
  std::atomic<bool> taken{false}, writes{false};
  t.copies.at_save = [&] {
    taken.store(true);
    while (!writes.load()) yield_thread();
    for (int i = 0; i < 1000; ++i) yield_thread();
  };
  std::thread saves([&] { t.save_all(); });
  while (!taken.load()) yield_thread();
  writes.store(true);
  t.write({5}, 2);
  EXPECT_EQ(t.copies.saved.size(), 2u);
  saves.join();
  t.tracker.end(true);
}

}  // namespace
}  // namespace frugal
