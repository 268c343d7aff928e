// In chosen interleavings, a held slot of a hashed table belongs to its row, and at the end every
// slot without row is free.
//
// Declarations and calls find rows, create them and release them; other threads undo or delete rows
// (support/schedule.h). A held slot has the row's key, and the row's initial values or what was
// written to that row since.
#include <vector>

#include "storage/rows.h"
#include "support/rows.h"
#include "support/schedule.h"
#include "window/part.h"

namespace frugal::rows_schedules_test {

constexpr uint64_t kKeys = 12, kPadding = 999;

class World {
 public:
  explicit World(Schedule& schedule)
      : s_(schedule), r_(schedule.random()), capacity_(2 + r_.below(6)) {
    if (rows_.open(rows_config(capacity_, 1, FRUGAL_SGD, true), nullptr) != FRUGAL_OK)
      throw std::bad_alloc();
  }

  void run() {
    constexpr const char* kNames[] = {"holder 0", "holder 1", "holder 2"};
    const uint64_t holders = 2 + r_.below(2);
    for (uint64_t i = 0; i < holders; ++i) {
      std::vector<Turn> turns(1 + r_.below(5));
      for (Turn& turn : turns) turn = draw();
      s_.thread(kNames[i], [this, turns] {
        for (const Turn& turn : turns) take(turn);
      });
    }
    if (r_.one_in(2)) {
      std::vector<uint64_t> keys(1 + r_.below(4));
      for (uint64_t& key : keys) key = r_.below(kKeys);
      s_.thread("undoer", [this, keys] {
        for (uint64_t key : keys) remove(key);
      });
    }
    s_.run();
    HOLDS(s_, !rows_.has_reserved());
    for (uint64_t key = 0; key < kKeys; ++key) remove(key);
    HOLDS(s_, rows_.count() == 0 && !rows_.has_reserved());
    std::vector<uint64_t> others(capacity_);
    for (uint64_t i = 0; i < capacity_; ++i) others[i] = 1000 + i;
    std::vector<uint32_t> slots(capacity_);
    HOLDS(s_, rows_.resolve(others.data(), capacity_, nullptr, Rows::Missing::kReserve,
                            slots.data(), nullptr) == FRUGAL_OK);
    for (uint64_t i = 0; i < capacity_; ++i) look(slots[i], others[i]);
  }

 private:
  // What a declaration or a call does.
  struct Turn {
    std::vector<uint64_t> keys;
    bool sorted = false, creates = false, writes = false;
  };
  Turn draw() {
    Turn turn;
    turn.keys.resize(1 + r_.below(5));
    for (uint64_t& key : turn.keys) key = r_.one_in(8) ? kPadding : r_.below(kKeys);
    turn.sorted = r_.one_in(2);
    turn.creates = r_.one_in(2);
    turn.writes = r_.one_in(2);
    return turn;
  }

  void take(const Turn& turn) {
    PartRef part = make_part();
    finding_.fetch_add(1);
    Status s = part->take_keys(pool_, rows_, turn.keys.data(), turn.keys.size(), true, kPadding);
    if (s == FRUGAL_OK)
      s = turn.sorted ? part->resolve(pool_, rows_, Rows::Missing::kReserve, nullptr)
                      : part->find_slots(pool_, rows_, Rows::Missing::kReserve, nullptr);
    if (s != FRUGAL_OK) {
      HOLDS(s_, s == FRUGAL_ERR_TABLE_FULL);
      return found();
    }
    // A declaration is known to others from here on; of a call it is known that it is under way.
    if (turn.sorted) {
      {
        Lock lock(control_);
        declared_.push_back(part);
      }
      found();
    }
    const uint32_t* slots = part->slots.as<uint32_t>();
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < part->n; ++i)
        if (turn.keys[i] != kPadding) look(slots[i], turn.keys[i]);
      if (round == 0 && turn.creates) rows_.create_reserved(slots, part->n, nullptr);
      if (round == 1 && turn.writes)
        for (size_t i = 0; i < part->n; ++i)
          if (turn.keys[i] != kPadding)
            *RowWrite(rows_, &slots[i], 1, {RowWrite::What::kNew}).in_place().row(slots[i]) =
                written(turn.keys[i]);
      schedule_point();
    }
    if (!turn.sorted) {
      part->release_hold(rows_);
      return found();
    }
    Lock lock(control_);
    part->release_hold(rows_);
    std::erase(declared_, part);
    recount();
  }
  void found() {
    finding_.fetch_sub(1);
    Lock lock(control_);
    recount();
  }
  // As the engine does.
  void recount() REQUIRES(control_) {
    rows_.recount([this] { return finding_.load() == 0; },
                  [this](auto visit) {
                    control_.assert_held();
                    for (const PartRef& p : declared_)
                      visit(p->row_slots(), p->distinct, p->row_start());
                  });
  }

  void remove(uint64_t key) {
    uint32_t slot;
    if (rows_.resolve(&key, 1, nullptr, Rows::Missing::kLeave, &slot, nullptr) != FRUGAL_OK ||
        slot == kMissingSlot)
      return;
    // No thread creates or undoes a row meanwhile.
    rows_.uncreate(&slot, 1, r_.one_in(2));
    Lock lock(control_);
    recount();
  }

  static float written(uint64_t key) { return 100 + static_cast<float>(key); }
  void look(uint32_t slot, uint64_t key) {
    HOLDS(s_, rows_.key_of(slot) == key);
    const float first = arith::initial_value(
        rows_.init(), arith::column_bits(arith::row_hash(rows_.init().table, key), 0));
    HOLDS(s_, *rows_.values(slot) == first || *rows_.values(slot) == written(key));
  }

  Schedule& s_;
  Random& r_;
  const uint64_t capacity_;
  BufferPool pool_;
  Rows rows_;
  std::atomic<uint32_t> finding_{0};  // and calls that hold places
  Mutex control_;
  Vector<PartRef> declared_ GUARDED_BY(control_);
};

TEST(RowsSchedules, WhoHoldsPlaces) {
  explore("rows.places", 10000, [](Schedule& schedule) { World(schedule).run(); });
}

}  // namespace frugal::rows_schedules_test
