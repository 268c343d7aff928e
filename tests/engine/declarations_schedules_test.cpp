// In chosen interleavings, a rank past its gate finds its declarations resolved, their slots
// correct, and their rows' committed updates written.
//
// Ranks declare ahead, late and repeatedly, cancel, leave, join, pass gates, abort, commit, and
// need slots of a full table. Other threads resolve, link and write (support/schedule.h).
//
// The model is which batches are declared, which keys have rows, and which updates are written.
// Rows that an aborted step created are gone. At the end no row is lost, no slot has a holder, and
// the window has no reads.
#include <map>
#include <set>
#include <vector>

#include "engine/declarations.h"
#include "support/parts.h"
#include "support/rows.h"
#include "support/schedule.h"

namespace frugal::declarations_schedules_test {

constexpr auto kUrgent = Window::Urgency::kUrgent;
constexpr auto kBackground = Window::Urgency::kBackground;
constexpr uint32_t kMostRanks = 3;
constexpr uint64_t kKeys = 8, kAhead = 3;

struct Totals {
  uint64_t declared = 0, full = 0, aborts = 0, taken_out = 0;
};

class World {
 public:
  World(Schedule& schedule, Totals* totals)
      : s_(schedule),
        r_(schedule.random()),
        totals_(totals),
        ranks_(2 + static_cast<uint32_t>(r_.below(kMostRanks - 1))),
        steps_(2 + r_.below(2)),
        capacity_(4 + r_.below(kKeys - 2)) {
    table_->keys_are_slots = false;
    check(rows_.open(rows_config(capacity_, 1, FRUGAL_SGD, true), nullptr) == FRUGAL_OK);
    check(window_.open({.rows = capacity_, .staleness = 0, .placement = ranks_, .tree_heap = false},
                       0) == FRUGAL_OK);
  }

  void run() {
    constexpr const char* kNames[] = {"rank 0", "rank 1", "rank 2"};
    for (uint32_t rank = 0; rank < ranks_; ++rank)
      s_.thread(kNames[rank], [this, rank] { train(rank); });
    s_.thread("flush thread", [this] {
      while (!over())
        if (!work(UINT64_MAX)) s_.pause();
    });
    s_.run();
    // What is declared for steps that have not come is taken back.
    uint64_t first, last;
    while (all_.range(&first, &last))
      for (uint32_t rank = 0; rank < ranks_; ++rank) HOLDS(s_, all_.take_out({last, rank}));
    all_.recount_unknown(*table_);
    HOLDS(s_, !rows_.has_reserved() && table_->calls.load() == 0);
    HOLDS(s_, rows_.count() == known_.size());
    Slots slots;
    for (uint64_t key : known_) {
      uint32_t slot;
      HOLDS(s_,
            rows_.resolve(&key, 1, nullptr, Rows::Missing::kLeave, &slot, nullptr) == FRUGAL_OK &&
                slot < kMissingSlot);
      slots.push_back(slot);
    }
    while (write(UINT64_MAX)) {
    }
    for (const auto& [key, row] : updates_) HOLDS(s_, row.applied == row.steps.size());
    // No step reads any row any more.
    if (slots.empty()) return;
    commit_update(steps_, {resolved_part(pool_, steps_, 0, slots)});
    HOLDS(s_, window_.any_pending() && !window_.pending_until(steps_ + Window::kHorizon - 2));
  }

 private:
  struct RowUpdates {
    std::vector<uint64_t> steps;
    size_t applied = 0;
    bool writing = false;
  };
  struct Rank {
    Mutex call_mu;  // before control_
    uint64_t next_step = 0;
    bool inside = false;
    std::vector<BatchRef> declared;
    std::set<uint32_t> pushed;
    Vector<uint32_t> created;
  };

  static void check(bool done) {
    if (!done) throw std::bad_alloc();
  }
  bool over() const { return committed_.load() == steps_; }
  Vector<uint64_t> some_keys() {
    Vector<uint64_t> keys(1 + r_.below(3));
    for (uint64_t& key : keys) key = r_.below(kKeys);
    return keys;
  }

  // --- Work of any thread ---

  bool resolve(uint64_t up_to) {
    Declarations::Item item;
    bool gave_up;
    if (!all_.next_to_resolve(up_to, &item, &gave_up)) return gave_up;
    const Status s = item.part()->resolve(pool_, rows_, Rows::Missing::kReserve, nullptr);
    HOLDS(s_, s == FRUGAL_OK || s == FRUGAL_ERR_TABLE_FULL);
    all_.resolved(item, s == FRUGAL_OK);
    return true;
  }
  bool link(uint64_t up_to) {
    const uint64_t base = committed_.load();
    const uint64_t end = std::min(base + Window::kHorizon, up_to == UINT64_MAX ? up_to : up_to + 1);
    Declarations::Item item;
    if (!all_.next_to_link(base, end, &item)) return false;
    const PartRef& p = item.part();
    check(pool_.get(p->distinct, &p->next) == FRUGAL_OK &&
          p->finder.build(pool_, p->row_slots(), p->distinct) == FRUGAL_OK);
    bool done = true;
    const size_t piece = 1 + r_.below(p->distinct);
    for (size_t at = 0; done && at < p->distinct; at += piece)
      done = window_.link(p, at, piece, false, kBackground);
    all_.linked(item, done);
    return true;
  }
  bool write(uint64_t step) {
    Claim c;
    if (!window_.claim(step, 1 + r_.below(3), &c)) return false;
    for (const Claim::Run& run : c.runs)
      for (uint32_t i = run.begin; i < run.end; ++i) {
        RowUpdates& row = updates_[rows_.key_of(run.update->slots[c.rows[i]])];
        HOLDS(s_, !row.writing);
        row.writing = true;
        schedule_point();
        HOLDS(s_, row.applied < row.steps.size() && row.steps[row.applied] == run.update->step);
        ++row.applied;
        row.writing = false;
      }
    window_.finish(c);
    return true;
  }
  bool work(uint64_t up_to) { return resolve(up_to) || link(up_to) || write(up_to); }

  // --- Declaring, with call_mu held ---

  void declare(uint32_t rank, uint64_t step) {
    auto b = std::allocate_shared<Batch>(HeapAllocator<Batch>());
    b->step = step;
    b->rank = rank;
    for (uint64_t parts = 1 + r_.below(2); parts-- > 0;) {
      if (!r_.one_in(4)) last_keys_ = some_keys();  // else the same again
      const Vector<uint64_t> keys = last_keys_;
      PartRef p = make_part();
      p->step = step;
      p->rank = rank;
      check(p->take_keys(pool_, rows_, keys.data(), keys.size(), false, 0) == FRUGAL_OK);
      b->parts.push_back(std::move(p));
      b->tables.push_back(table_);
    }
    b->index();
    bool alone;
    Lock lock(control_);
    HOLDS(s_, all_.add(b, false, nullptr, &alone) == FRUGAL_OK);
    of_[rank].declared.push_back(b);
    ++totals_->declared;
  }
  void declare_some(uint32_t rank) {
    Rank& of = of_[rank];
    for (uint64_t step = of.next_step; step < of.next_step + kAhead; ++step)
      if (r_.one_in(2)) declare(rank, step);
  }
  // As Engine::drop_batches.
  void take_out(const Declarations::Share& share) {
    const bool any = all_.close(share);
    std::erase_if(of_[share.rank].declared, [&](const BatchRef& b) {
      return b->step == share.step && (!share.one || b.get() == share.one);
    });
    if (!any) return;
    s_.note("takes out what rank %llu has declared for %llu", share.rank, share.step);
    for (;; s_.pause()) {
      Lock lock(control_);
      if (all_.take_out(share)) break;
    }
    ++totals_->taken_out;
    Lock declared(all_.mutex());
    all_.recount(*table_);
  }
  void take_back_some(uint32_t rank) {
    Rank& of = of_[rank];
    if (r_.one_in(3) && !of.declared.empty()) {
      const BatchRef b = of.declared[r_.below(of.declared.size())];
      if (b->step >= of.next_step) take_out({b->step, rank, b.get()});
    }
    if (!r_.one_in(16)) return;
    s_.note("rank %llu leaves, and another joins", rank);
    while (const BatchRef b = all_.any_of(rank, of.next_step)) take_out({b->step, rank});
    all_.joined(rank, of.next_step);
  }

  // --- Steps ---

  void train(uint32_t rank) {
    while (!over()) {
      if (!begin(rank) || !use(rank)) {
        s_.pause();
        continue;
      }
      if (r_.one_in(8) && aborts_ > 0) {
        --aborts_;
        abort(rank);
      } else {
        end(rank);
      }
    }
  }

  bool begin(uint32_t rank) {
    Rank& of = of_[rank];
    Lock call(of.call_mu);
    if (of.next_step == steps_) return false;
    declare_some(rank);
    take_back_some(rank);
    for (const uint64_t step = of.next_step;;) {
      {
        Lock lock(control_);
        if (aborting_) return false;
        if (committed_ == step && all_.unready(step, step) == kNoStep &&
            !window_.pending_until(step)) {
          of.inside = true;
          of.next_step = step + 1;
          break;
        }
      }
      if (!work(step)) s_.pause();
    }
    s_.note("rank %llu passes the gate of %llu", rank, of.next_step - 1);
    return true;
  }

  // Takes the declared parts of the step, and makes their rows exist.
  bool use(uint32_t rank) {
    Rank& of = of_[rank];
    Lock call(of.call_mu);
    if (undone(of)) return false;
    const uint64_t step = of.next_step - 1;
    std::vector<PartRef> parts;
    {
      Lock declared(all_.mutex());
      all_.each({step, step, rank}, [&](const Batch& b, size_t i) { parts.push_back(b.parts[i]); });
    }
    size_t expected = 0;
    for (const BatchRef& b : of.declared)
      if (b->step == step) expected += b->parts.size();
    HOLDS(s_, parts.size() == expected);
    for (const PartRef& p : parts) {
      HOLDS(s_, p->state.load() == Part::kStale || (p->resolved() && p->linked.load()));
      if (r_.one_in(4)) continue;  // not everything that is declared is used
      if (!p->resolved()) {
        use_undeclared(of, Vector<uint64_t>(p->keys.as<uint64_t>(), p->keys.as<uint64_t>() + p->n));
        continue;
      }
      for (size_t k = 0; k < p->distinct; ++k) {
        const RowUpdates& row = updates_[rows_.key_of(p->row_slots()[k])];
        HOLDS(s_, row.applied == row.steps.size() && !row.writing);
      }
      let_exist(of, *p);
    }
    if (r_.one_in(3)) use_undeclared(of, some_keys());
    return true;
  }
  bool undone(const Rank& of) {
    Lock lock(control_);
    return !of.inside;
  }
  void let_exist(Rank& of, const Part& p) {
    for (size_t i = 0; i < p.n; ++i)
      HOLDS(s_, rows_.key_of(p.slots.as<uint32_t>()[i]) == p.keys.as<uint64_t>()[i]);
    s_.point();
    const uint64_t step = of.next_step - 1;
    Vector<uint32_t> earlier;
    rows_.use(p.row_slots(), p.distinct, step, step, &of.created, &earlier);
    of.pushed.insert(p.row_slots(), p.row_slots() + p.distinct);
    s_.point();
    for (size_t i = 0; i < p.n; ++i)
      HOLDS(s_, rows_.key_of(p.slots.as<uint32_t>()[i]) == p.keys.as<uint64_t>()[i]);
  }
  // A call; as Engine::with_room and its hold.
  void use_undeclared(Rank& of, const Vector<uint64_t>& keys) {
    bool reserving_paused = false;
    for (;;) {
      const PartRef p = make_part();
      check(p->take_keys(pool_, rows_, keys.data(), keys.size(), false, 0) == FRUGAL_OK);
      ++table_->calls;
      const Status s = p->resolve(pool_, rows_, Rows::Missing::kReserve, nullptr);
      if (s == FRUGAL_OK) let_exist(of, *p);
      if (s == FRUGAL_OK) p->release_hold(rows_);
      --table_->calls;
      all_.recount_unknown(*table_);
      if (s == FRUGAL_OK || reserving_paused) break;
      HOLDS(s_, s == FRUGAL_ERR_TABLE_FULL);
      reserving_paused = true;
      ++table_->reserving_paused;
      give_up_reserved();
    }
    if (reserving_paused) --table_->reserving_paused;
  }
  // As Engine::give_up_reserved.
  void give_up_reserved() {
    ++totals_->full;
    for (;; s_.pause()) {
      Lock lock(control_);
      Lock declared(all_.mutex());
      bool idle = all_.quiet(*table_);
      all_.each({.table = table_.get()},
                [&](const Batch& b, size_t i) { idle = idle && !b.parts[i]->linking; });
      if (!idle) continue;
      all_.each({.table = table_.get()}, [&](Batch& b, size_t i) {
        all_.mutex().assert_held();
        if (b.step < of_[b.rank].next_step) return;
        all_.never_resolve(b, i, Part::kStale);
        const Part& p = *b.parts[i];
        if (p.resolved() && rows_.any_reserved(p.row_slots(), p.distinct)) all_.give_up(b, i);
      });
      all_.recount(*table_);
      return;
    }
  }

  void abort(uint32_t rank) {
    {
      Lock lock(control_);
      if (aborting_ || committing_ || !of_[rank].inside) return;
      aborting_ = true;
    }
    s_.note("rank %llu aborts step %llu", rank, committed_);
    ++totals_->aborts;
    for (uint32_t r = 0; r < ranks_; ++r) {
      Lock call(of_[r].call_mu);
      Lock lock(control_);
      of_[r].inside = false;
      of_[r].next_step = committed_;
      of_[r].pushed.clear();
    }
    for (Rank& of : of_) rows_.undo(of.created.data(), of.created.size());
    for (Rank& of : of_) of.created.clear();
    all_.recount_unknown(*table_);
    Lock lock(control_);
    ended_ = 0;
    aborting_ = false;
  }

  void end(uint32_t rank) {
    Rank& of = of_[rank];
    Lock call(of.call_mu);
    {
      Lock lock(control_);
      if (!of.inside || aborting_) return;
      of.inside = false;
      if (++ended_ < ranks_) return;
      ended_ = 0;
      committing_ = true;
    }
    commit(committed_);
  }
  void commit_update(uint64_t step, const std::vector<PartRef>& pushed) {
    UpdateRef u;
    if (!pushed.empty()) {
      u = make_update(pool_, step, pushed);
      u->make_list();
      window_.add(u);
      HOLDS(s_, window_.prepare(*u, false, SIZE_MAX, kUrgent));
      window_.make_room(*u);
      for (size_t i = 0; i < u->n; ++i) updates_[rows_.key_of(u->slots[i])].steps.push_back(step);
    }
    window_.commit(u.get(), step);
  }
  // As Committer::commit.
  void commit(uint64_t step) {
    s_.note("commits %llu", step);
    std::vector<PartRef> pushed;
    for (uint32_t rank = 0; rank < ranks_; ++rank)
      if (Slots slots(of_[rank].pushed.begin(), of_[rank].pushed.end()); !slots.empty())
        pushed.push_back(resolved_part(pool_, step, rank, slots));
    const Vector<Declarations::Held> served = all_.begin_retiring(step);
    commit_update(step, pushed);
    for (Rank& of : of_) {
      for (uint32_t slot : of.pushed) known_.insert(rows_.key_of(slot));
      rows_.commit(of.created.data(), of.created.size(), step);
      of.created.clear();
      of.pushed.clear();
    }
    for (const Declarations::Held& h : served) h.part->release_hold(rows_);
    Lock lock(control_);
    committed_ = step + 1;
    all_.retire(step);
    all_.recount_unknown(*table_);
    committing_ = false;
  }

  Schedule& s_;
  Random& r_;
  Totals* const totals_;
  const uint32_t ranks_;
  const uint64_t steps_, capacity_;
  BufferPool pool_;
  const TableRef table_ = std::allocate_shared<Table>(HeapAllocator<Table>());
  Rows& rows_ = table_->rows;
  Window& window_ = table_->window;
  Declarations all_;
  Rank of_[kMostRanks];
  Vector<uint64_t> last_keys_{0};
  std::map<uint64_t, RowUpdates> updates_;  // by key
  std::set<uint64_t> known_;                // keys that committed steps have used
  uint32_t aborts_ = 2;
  Mutex control_;  // what follows, and ranks' steps
  std::atomic<uint64_t> committed_{0};
  uint32_t ended_ GUARDED_BY(control_) = 0;  // ranks
  bool aborting_ GUARDED_BY(control_) = false, committing_ GUARDED_BY(control_) = false;
};

TEST(DeclarationsSchedules, Declarations) {
  Totals totals;
  explore("declarations", 10000, [&](Schedule& s) { World(s, &totals).run(); });
  std::printf(
      "%llu batches declared, %llu times taken out, %llu aborts, %llu calls to a full table\n",
      static_cast<unsigned long long>(totals.declared),
      static_cast<unsigned long long>(totals.taken_out),
      static_cast<unsigned long long>(totals.aborts), static_cast<unsigned long long>(totals.full));
}

}  // namespace frugal::declarations_schedules_test
