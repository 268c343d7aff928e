// In chosen interleavings with a storage tier, a held slot keeps its row, and a stored row returns
// with its last written values.
//
// Calls and declarations find slots, loaders load, steps commit and abort, and holders release
// their slots (support/schedule.h). An update holds its rows until they are written. Only the
// writer changes a row with a held slot. At the end every row has the result of its committed
// updates.
#include <vector>

#include "storage/rows.h"
#include "support/rows.h"
#include "support/schedule.h"
#include "support/slow_store.h"

namespace frugal::stored_rows_schedules_test {

constexpr uint64_t kKeys = 6;

class World {
 public:
  explicit World(Schedule& schedule) : s_(schedule), r_(schedule.random()) {
    Tier tier;
    tier.store = std::make_unique<SlowStore>(1, 0);
    tier.slots = 3 + r_.below(2);
    tier.room = [] {};
    const Rows::Config config = rows_config(kKeys, 1, FRUGAL_SGD, true);
    if (rows_.open(config, nullptr, std::move(tier)) != FRUGAL_OK) throw std::bad_alloc();
  }

  void run() {
    constexpr const char* kNames[] = {"rank 0", "rank 1", "rank 2"};
    const uint64_t ranks = 2 + r_.below(2);
    running_.store(static_cast<uint32_t>(ranks));
    for (uint64_t i = 0; i < ranks; ++i) {
      std::vector<Turn> turns(2 + r_.below(4));
      for (Turn& turn : turns) turn = draw(i);
      s_.thread(kNames[i], [this, turns, i] {
        for (size_t t = 0; t < turns.size(); ++t) take(turns[t], 1 + i * 8 + t);
        running_.fetch_sub(1);
      });
    }
    s_.thread("loader", [this] {
      while (running_.load() != 0) {
        bool any;
        HOLDS(s_, rows_.tier()->load_some(&any) == FRUGAL_OK);
        if (!any) yield_thread();
      }
    });
    s_.run();
    HOLDS(s_, !rows_.has_reserved() && !rows_.tier()->loading());
    uint64_t there = 0;
    for (uint64_t key = 0; key < kKeys; ++key) {
      there += exists_[key];
      if (!exists_[key]) continue;
      uint32_t slot;
      HOLDS(s_, find(&key, 1, &slot) == FRUGAL_OK);
      for (bool any = true; any;) HOLDS(s_, rows_.tier()->load_some(&any) == FRUGAL_OK);
      HOLDS(s_, *rows_.values(slot) == now_[key]);
      rows_.release_hold(&slot, 1);
    }
    HOLDS(s_, rows_.count() == there);
  }

 private:
  enum class End { kLetGo, kCommit, kAbort };
  struct Turn {
    std::vector<uint64_t> keys;
    End end;
  };
  // Rows of a rank are its own, so that one writes a row at a time, and all ranks read a last one.
  Turn draw(uint64_t rank) {
    Turn turn;
    turn.keys.resize(1 + r_.below(2));
    for (uint64_t& key : turn.keys) key = rank * 2 + r_.below(2);
    turn.end = static_cast<End>(r_.below(3));
    return turn;
  }

  Status find(const uint64_t* keys, size_t n, uint32_t* slots) {
    return rows_.resolve(keys, n, nullptr, Rows::Missing::kReserve, slots, nullptr);
  }

  void take(const Turn& turn, uint64_t step) {
    const size_t n = turn.keys.size();
    uint32_t slots[2];
    Status s;
    while ((s = find(turn.keys.data(), n, slots)) == FRUGAL_ERR_BUSY) yield_thread();
    HOLDS(s_, s == FRUGAL_OK);
    while (rows_.tier()->first_loading(slots, 0, n) != n) {
      bool any = false;
      if (r_.one_in(2)) HOLDS(s_, rows_.tier()->load_some(&any) == FRUGAL_OK);
      if (!any) yield_thread();
    }
    look(turn, slots);
    if (turn.end == End::kLetGo) return rows_.release_hold(slots, n);
    Vector<uint32_t> created, earlier;
    rows_.use(slots, n, step, step, &created, &earlier);
    look(turn, slots);
    if (turn.end == End::kAbort) {
      rows_.undo(created.data(), created.size());
      return rows_.release_hold(slots, n);
    }
    // The commit: the update holds its rows, the declaration releases them, and a thread writes.
    rows_.hold(slots, n);
    rows_.commit(created.data(), created.size(), step);
    rows_.release_hold(slots, n);
    look(turn, slots);
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = turn.keys[i];
      exists_[key] = true;
      now_[key] = static_cast<float>(step * 10 + i);
      schedule_point();
      const RowWrite write(rows_, &slots[i], 1, {RowWrite::What::kOutside});
      *write.in_place().row(slots[i]) = now_[key];
    }
    look(turn, slots);
    rows_.unhold_backed(slots, n);
  }

  void look(const Turn& turn, const uint32_t* slots) {
    for (size_t i = 0; i < turn.keys.size(); ++i) {
      HOLDS(s_, rows_.key_of(slots[i]) == turn.keys[i]);
      if (exists_[turn.keys[i]]) HOLDS(s_, *rows_.values(slots[i]) == now_[turn.keys[i]]);
    }
    schedule_point();
  }

  Schedule& s_;
  Random& r_;
  Rows rows_;
  std::atomic<uint32_t> running_{0};
  bool exists_[kKeys] = {};  // of the thread that writes the row
  float now_[kKeys] = {};
};

TEST(RowsFarSchedules, LoadsBesideCommitsAbortsAndLettingGo) {
  explore("far_side.life", 10000, [](Schedule& schedule) { World(schedule).run(); });
}

}  // namespace frugal::stored_rows_schedules_test
