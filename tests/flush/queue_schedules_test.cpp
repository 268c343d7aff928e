// In chosen interleavings, both queues agree with a map while threads prepare, commit, drop, change
// priorities, and take and hold entries.
//
// Calls are serialized as by the queue's owner (flush/queue.h, support/schedule.h). Marks of the
// two-level queue change outside of its lock.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "flush/queue.h"
#include "support/queue_owner.h"
#include "support/schedule.h"

namespace frugal::queue_schedules_test {

class World {
 public:
  World(Schedule& schedule, bool tree_heap)
      : s_(schedule),
        r_(schedule.random()),
        tree_heap_(tree_heap),
        queue_(std::make_unique<QueueOwner>(tree_heap, kIds)) {
    queue_->set_next_commit(next_commit_);
    for (uint32_t id = 0; id < kIds; ++id) free_.push_back(id);
  }

  void run() {
    s_.thread("stager", [this] { prepare(); });
    s_.thread("pusher", [this] { push(); });
    s_.thread("adjuster", [this] { adjust(); });
    s_.thread("taker 0", [this] { take(); });
    s_.thread("taker 1", [this] { take(); });
    s_.run();
    while (pop(kRing, 5)) {
    }
    HOLDS(s_, entries_.empty());
  }

 private:
  static constexpr uint32_t kIds = 12;
  struct Entry {
    uint8_t prio;
    bool prepared;
  };

  uint8_t some_prio() {
    return r_.one_in(4) ? kInfinity
                        : static_cast<uint8_t>((next_commit_ + r_.below(4)) & (kRing - 1));
  }
  std::vector<uint32_t> some_free(uint64_t most) REQUIRES(mu_) {
    std::vector<uint32_t> ids;
    for (uint64_t n = r_.below(most + 1); n > 0 && !free_.empty(); --n) {
      std::swap(free_[r_.below(free_.size())], free_.back());
      ids.push_back(free_.back());
      free_.pop_back();
    }
    return ids;
  }
  std::vector<uint32_t> those(bool prepared) REQUIRES(mu_) {
    std::vector<uint32_t> ids;
    for (const auto& [id, entry] : entries_)
      if (entry.prepared == prepared) ids.push_back(id);
    return ids;
  }

  void push() {
    for (uint64_t n = 1 + r_.below(4); n > 0; --n) {
      Lock lock(mu_);
      const std::vector<uint32_t> ids = some_free(3);
      const uint8_t prio = some_prio();
      for (uint32_t id : ids) {
        queue_->push(id, prio);
        entries_[id] = {prio, false};
      }
    }
  }

  void prepare() {
    for (uint64_t steps = 1 + r_.below(3); steps > 0; --steps) {
      for (uint64_t n = r_.below(3); n > 0; --n) {
        Lock lock(mu_);
        const std::vector<uint32_t> ids = some_free(3);
        const uint8_t prio = some_prio();
        queue_->prepare(ids.data(), ids.size(), prio);
        for (uint32_t id : ids) entries_[id] = {prio, true};
      }
      Lock lock(mu_);
      for (uint32_t id : those(true))
        if (r_.one_in(2)) queue_->adjust_prepared(id, entries_[id].prio = some_prio());
      if (r_.one_in(3)) {
        s_.note("drops the stage");
        queue_->drop_prepared();
        for (uint32_t id : those(true)) {
          entries_.erase(id);
          free_.push_back(id);
        }
        continue;
      }
      s_.note("commits the stage");
      queue_->commit_prepared();
      for (uint32_t id : those(true)) entries_[id].prepared = false;
      // The next commit moves on. No entry is left at the priority of the step that has passed.
      const uint8_t passed = static_cast<uint8_t>(next_commit_ & (kRing - 1));
      queue_->set_next_commit(++next_commit_);
      for (uint32_t id : those(false))
        if (entries_[id].prio == passed) queue_->adjust(id, entries_[id].prio = some_prio());
    }
  }

  void adjust() {
    for (uint64_t n = 1 + r_.below(6); n > 0; --n) {
      Lock lock(mu_);
      const std::vector<uint32_t> ids = those(false);
      if (ids.empty()) continue;
      const uint32_t id = ids[r_.below(ids.size())];
      if (!tree_heap_ && r_.one_in(6)) {
        queue_->forget(id);
        entries_.erase(id);
        free_.push_back(id);
      } else {
        queue_->adjust(id, entries_[id].prio = some_prio());
      }
    }
  }

  // Returns whether there was anything.
  bool pop(uint32_t limit, size_t most) {
    uint32_t ids[8];
    std::vector<uint32_t> held;
    size_t n;
    {
      Lock lock(mu_);
      n = queue_->pop(next_commit_, limit, ids, most);
      for (size_t i = 0; i < n; ++i) {
        const auto at = entries_.find(ids[i]);
        HOLDS(s_, at != entries_.end());
        HOLDS(s_, !at->second.prepared);
        const uint32_t rank = prio_distance(at->second.prio, next_commit_);
        HOLDS(s_, rank <= limit);
        for (const auto& [id, entry] : entries_)
          HOLDS(s_, entry.prepared || prio_distance(entry.prio, next_commit_) >= rank);
        entries_.erase(at);
        held.push_back(ids[i]);
      }
      if (n < most)
        for (const auto& [id, entry] : entries_)
          HOLDS(s_, entry.prepared || prio_distance(entry.prio, next_commit_) > limit);
    }
    s_.note("has taken %llu", held.size());
    schedule_point();
    Lock lock(mu_);
    free_.insert(free_.end(), held.begin(), held.end());
    return n != 0;
  }

  void take() {
    for (uint64_t n = 1 + r_.below(5); n > 0; --n)
      pop(r_.one_in(3) ? kRing : static_cast<uint32_t>(r_.below(4)), 1 + r_.below(4));
  }

  Schedule& s_;
  Random& r_;
  const bool tree_heap_;
  Mutex mu_;
  std::unique_ptr<QueueOwner> queue_ PT_GUARDED_BY(mu_);
  uint64_t next_commit_ = 61;  // the ring wraps around
  std::map<uint32_t, Entry> entries_;
  std::vector<uint32_t> free_;
};

// The two-level queue: its calls have a lock, and its marks are read and changed without it.
class Unlocked {
 public:
  explicit Unlocked(Schedule& schedule)
      : s_(schedule), r_(schedule.random()), queue_(make_two_level_queue()) {
    queue_->reserve_ids(marks_, kIds);
    std::fill_n(marks_, kIds, kAbsent);
  }
  void run() {
    for (uint32_t t = 0; t < 2; ++t) {
      s_.thread("pusher", [this, t] { push(t); });
      s_.thread("mover", [this] { move(); });
      s_.thread("taker", [this] { take(3); });
    }
    s_.run();
    while (take(1)) {
    }
    HOLDS(s_, pushed_ == taken_);
    for (uint8_t mark : marks_) HOLDS(s_, mark == kAbsent);
  }

 private:
  static constexpr uint32_t kIds = 6;
  static constexpr uint8_t kAbsent = 255;
  bool change(uint32_t id, uint8_t from, uint8_t to) {
    schedule_point();
    return std::atomic_ref(marks_[id]).compare_exchange_strong(from, to);
  }
  uint8_t mark(uint32_t id) {
    schedule_point();
    return std::atomic_ref(marks_[id]).load();
  }
  uint8_t some_prio() { return static_cast<uint8_t>(r_.below(3)); }

  // Each thread has entries of its own, since a pushing thread knows that they are not queued.
  void push(uint32_t t) {
    for (uint32_t id = t; id < kIds; id += 2) {
      const uint8_t prio = some_prio();
      if (!change(id, kAbsent, prio)) continue;
      Lock lock(mu_);
      queue_->push(id, prio);
      ++pushed_;
    }
  }
  void move() {
    for (uint64_t n = 1 + r_.below(4); n > 0; --n) {
      const uint32_t id = static_cast<uint32_t>(r_.below(kIds));
      const uint8_t from = mark(id), prio = some_prio();
      if (from == kAbsent || from == prio || !change(id, from, prio)) continue;
      Lock lock(mu_);
      queue_->move(id, prio);
    }
  }
  // Returns whether there were any queue items.
  bool take(uint64_t most) {
    bool any = false;
    for (uint64_t n = most; n > 0; --n) {
      uint32_t ids[4];
      uint8_t prio;
      size_t items;
      {
        Lock lock(mu_);
        items = queue_->pop(0, kRing, ids, 4, &prio);
      }
      any |= items != 0;
      for (size_t i = 0; i < items; ++i)
        if (change(ids[i], prio, kAbsent)) ++taken_;
    }
    return any;
  }

  Schedule& s_;
  Random& r_;
  Mutex mu_;
  std::unique_ptr<Queue> queue_ PT_GUARDED_BY(mu_);
  uint8_t marks_[kIds];
  std::atomic<uint32_t> pushed_{0}, taken_{0};
};

TEST(QueueSchedules, TwoLevel) {
  explore("queue.two_level", 10000, [](Schedule& s) { World(s, false).run(); });
}
TEST(QueueSchedules, Unlocked) {
  explore("queue.unlocked", 10000, [](Schedule& s) { Unlocked(s).run(); });
}
TEST(QueueSchedules, TreeHeap) {
  explore("queue.tree_heap", 10000, [](Schedule& s) { World(s, true).run(); });
}

}  // namespace frugal::queue_schedules_test
