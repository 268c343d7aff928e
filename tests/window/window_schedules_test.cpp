// Ranks, flush threads and who declares, cancels and looks rows up, beside each other on one window in chosen interleavings
// (support/schedule.h).
//
// The model is a host row's list of the steps whose updates it has. A rank that has passed the gate of a step finds all
// that the contract promises in the rows that it reads, nobody writes them meanwhile, updates of a row are written in
// step order, one at a time, and in the end each is written once. The ranks follow the engine's rules: a step is staged when
// all ranks have passed its gate and committed when all have ended it; declarations are linked in pieces, by one thread at a
// time; a rank that would wait helps.
#include "window/window.h"

#include <algorithm>
#include <set>
#include <vector>

#include "support/parts.h"
#include "support/schedule.h"

namespace frugal {
namespace {

constexpr auto kUrgent = Window::Urgency::kUrgent;
constexpr auto kBackground = Window::Urgency::kBackground;
constexpr uint64_t kFirst = 100;  // step

struct Kind {
  bool tree_heap = false;
  bool stale = false;     // ranks run apart
  bool declares = true;   // else nothing is known of reads but by force()
  bool caches = false;    // rank 0 keeps rows
};

class World {
 public:
  World(Schedule& schedule, BufferPool& pool, const Kind& kind) : s_(schedule), r_(schedule.random()), kind_(kind) {
    ranks_ = 1 + static_cast<uint32_t>(r_.below(2));
    tau_ = kind.stale ? 1 + r_.below(2) : 0;
    rows_.resize(3 + r_.below(5));
    steps_.resize(2 + r_.below(3));
    for (size_t i = 0; i < steps_.size(); ++i) draw(pool, i);
    if (window_.open({.rows = rows_.size(), .staleness = tau_, .world_size = ranks_, .tree_heap = kind.tree_heap}, kFirst) !=
        FRUGAL_OK)
      throw std::bad_alloc();
  }

  void run() {
    constexpr const char* kRanks[] = {"rank 0", "rank 1"};
    for (uint32_t rank = 0; rank < ranks_; ++rank) s_.thread(kRanks[rank], [this, rank] { train(rank); });
    s_.thread("flush 0", [this] { flush(); });
    if (r_.one_in(2)) s_.thread("flush 1", [this] { flush(); });
    if (kind_.declares) s_.thread("linker", [this] { link_all(); });
    if (r_.one_in(2)) s_.thread("asker", [this] { ask(); });
    if (kind_.declares && r_.one_in(3)) s_.thread("canceller", [this] { cancel(); });
    s_.run();
    HOLDS(s_, !window_.any_pending() && window_.pending_rows() == 0);
    HOLDS(s_, !window_.pending_until(UINT64_MAX) && !window_.in_flight_until(UINT64_MAX));
    for (const Row& row : rows_) HOLDS(s_, row.applied == row.updates.size() && !row.writing);
    const WindowStats stats = window_.stats();
    HOLDS(s_, stats.pending == 0 && stats.enqueued == stats.dequeued);
  }

 private:
  enum Linking { kNot, kNow, kDone };
  struct Row {
    std::vector<uint64_t> updates;  // all steps of the run that update it, ascending
    size_t applied = 0;             // the first of them are in the row
    bool writing = false;
    bool cached = false;            // by rank 0
  };
  struct OfRank {
    PartRef declared, pushed;
    Linking linking = kNot;
    bool cancelled = false;
  };
  struct Step {
    OfRank of[2];
    UpdateRef update;
    uint32_t passed = 0, ended = 0;  // ranks
    bool staging = false, staged = false;
  };

  Slots some_rows(uint64_t one_in) {
    Slots slots;
    for (uint32_t slot = 0; slot < rows_.size(); ++slot)
      if (r_.one_in(one_in)) slots.push_back(slot);
    return slots;
  }

  void draw(BufferPool& pool, size_t i) {
    const uint64_t step = kFirst + i;
    std::vector<PartRef> pushed;
    std::set<uint32_t> all;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      OfRank& of = steps_[i].of[rank];
      of.declared = resolved_part(pool, step, rank, kind_.declares ? some_rows(2) : Slots());
      // Mostly what was declared is pushed.
      of.pushed = kind_.declares && !r_.one_in(4) ? of.declared : resolved_part(pool, step, rank, some_rows(2));
      if (of.pushed->distinct == 0) continue;
      pushed.push_back(of.pushed);
      all.insert(of.pushed->row_slots(), of.pushed->row_slots() + of.pushed->distinct);
    }
    if (all.empty()) return;
    steps_[i].update = make_update(pool, step, pushed);
    steps_[i].update->make_list();
    for (uint32_t slot : all) rows_[slot].updates.push_back(step);
  }

  // --- Host rows ---

  void write(Claim& c) {
    for (const Claim::Run& run : c.runs)
      for (uint32_t i = run.begin; i < run.end; ++i) {
        Row& row = rows_[run.update->slots[c.rows[i]]];
        HOLDS(s_, run.update->committed && !row.writing);
        row.writing = true;
        s_.point();
        HOLDS(s_, row.applied < row.updates.size() && row.updates[row.applied] == run.update->step);
        s_.note("writes row %llu of step %llu", run.update->slots[c.rows[i]], run.update->step);
        ++row.applied;
        row.writing = false;
      }
    s_.point();
    window_.finish(c);
  }

  bool help(uint64_t step, size_t most) {
    Claim c;
    if (!window_.claim(step, most, &c)) return false;
    write(c);
    return true;
  }

  // All updates of steps below `before` are in the row.
  void look(uint32_t slot, uint64_t before) {
    const Row& row = rows_[slot];
    const auto wanted = std::lower_bound(row.updates.begin(), row.updates.end(), before) - row.updates.begin();
    s_.note("reads row %llu before step %llu", slot, before);
    HOLDS(s_, row.applied >= static_cast<size_t>(wanted));
  }

  // --- Ranks ---

  bool link(OfRank& of) {  // false: somebody else does
    {
      Lock lock(control_);
      if (of.linking == kDone || of.cancelled) return true;
      if (of.linking == kNow) return false;
      of.linking = kNow;
    }
    const bool owned = kind_.caches && of.declared->rank == 0;
    const size_t n = of.declared->distinct, piece = 1 + r_.below(n + 1);
    for (size_t at = 0; at < std::max<size_t>(n, 1); at += piece)
      HOLDS(s_, window_.link(of.declared, at, piece, owned, kBackground));
    Lock lock(control_);
    of.linking = kDone;
    return true;
  }

  bool gate_open(uint32_t rank, size_t i) {
    Step& step = steps_[i];
    {
      Lock lock(control_);
      if (committed_ + tau_ < i) return false;
      if (kind_.declares && step.of[rank].linking != kDone && !step.of[rank].cancelled) return false;
    }
    return !window_.pending_until(kFirst + i);
  }

  bool cached(uint32_t slot) const { return kind_.caches && rows_[slot].cached; }
  bool owned(uint32_t slot) const { return kind_.caches && Window::owner(slot, ranks_) == 0; }

  void train(uint32_t rank) {
    for (size_t i = 0; i < steps_.size(); ++i) {
      OfRank& of = steps_[i].of[rank];
      while (!gate_open(rank, i)) {
        if (kind_.declares && r_.one_in(2) && !link(of)) s_.pause();
        if (!help(kFirst + i, 1 + r_.below(3))) s_.pause();
      }
      s_.note("passes the gate of %llu", kFirst + i);
      bool cancelled;
      {
        Lock lock(control_);
        begun_[rank] = i + 1;
        ++steps_[i].passed;
        cancelled = of.cancelled;
      }
      if (!cancelled) read(rank, i);
      end(i);
    }
    Lock lock(control_);
    ++done_;
  }

  void read(uint32_t rank, size_t i) {
    const Part& part = *steps_[i].of[rank].declared;
    Slots come;
    for (size_t k = 0; k < part.distinct; ++k) {
      const uint32_t slot = part.row_slots()[k];
      if (rank == 0 && cached(slot)) continue;  // its line has every committed update
      look(slot, kFirst + i - std::min<uint64_t>(i, tau_));
      HOLDS(s_, tau_ || !rows_[slot].writing);
      s_.point();
      HOLDS(s_, tau_ || !rows_[slot].writing);
      if (rank == 0 && owned(slot)) come.push_back(slot);
    }
    if (!kind_.caches || rank != 0) return;
    // Its boundary: what comes was equal to the host row at the gate, what goes is read there from the next gate on.
    Slots go;
    for (uint32_t slot = 0; slot < rows_.size(); ++slot)
      if (rows_[slot].cached && r_.one_in(3)) go.push_back(slot);
    std::erase_if(come, [&](uint32_t) { return r_.one_in(3); });
    for (uint32_t slot : come) rows_[slot].cached = true;
    for (uint32_t slot : go) rows_[slot].cached = false;
    uint64_t dirty = 0;
    Vector<uint64_t> next(rows_.size());
    window_.next_owner_reads(come.data(), come.size(), kFirst + i, next.data(), kBackground);
    for (size_t k = 0; k < come.size(); ++k) HOLDS(s_, next[k] > kFirst + i);
    window_.set_cached(come.data(), come.size(), true, nullptr, kBackground);
    window_.set_cached(go.data(), go.size(), false, &dirty, kUrgent);
  }

  // Takes the step's update in ahead of its commit, if nobody has. False: somebody else is at it.
  bool stage(size_t i) {
    Step& step = steps_[i];
    bool exact = kind_.declares;
    {
      Lock lock(control_);
      if (step.staged) return true;
      if (step.staging) return false;
      step.staging = true;
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const OfRank& of = step.of[rank];
        exact = exact && of.linking == kDone && !of.cancelled && (of.pushed == of.declared || of.pushed->distinct == 0);
      }
    }
    if (step.update) {
      window_.add(step.update);
      while (!window_.stage(*step.update, exact, Window::kPiece, kBackground)) s_.point();
      if (r_.one_in(8)) {
        s_.note("stages %llu again", kFirst + i);
        window_.unstage(step.update);
        window_.add(step.update);
        HOLDS(s_, window_.stage(*step.update, false, SIZE_MAX, kUrgent));
      }
    }
    Lock lock(control_);
    step.staged = true;
    return true;
  }

  // A flush thread stages the step that all ranks are in, if they have all passed its gate.
  bool stage_ahead() {
    size_t i;
    {
      Lock lock(control_);
      i = committed_;
      if (i == steps_.size() || steps_[i].passed < ranks_ || steps_[i].staging) return false;
    }
    return stage(i);
  }

  void end(size_t i) {
    Step& step = steps_[i];
    {
      Lock lock(control_);
      // With staleness a rank may have ended a step before the ranks have all passed the gate of an earlier one.
      if (++step.ended < ranks_) return;
    }
    while (!stage(i)) s_.pause();
    if (step.update) window_.make_room(*step.update);
    s_.note("commits %llu", kFirst + i);
    window_.commit(step.update.get(), kFirst + i);
    Lock lock(control_);
    committed_ = i + 1;
  }

  // --- Others ---

  void flush() {
    for (;;) {
      bool over;
      uint64_t base;
      {
        Lock lock(control_);
        over = done_ == ranks_;
        base = kFirst + committed_;
      }
      if (r_.one_in(3) && stage_ahead()) continue;
      if (help(r_.one_in(2) ? UINT64_MAX : base + r_.below(3), 1 + r_.below(4))) continue;
      if (over && !window_.any_pending()) return;
      s_.pause();
    }
  }

  void link_all() {
    std::vector<OfRank*> all;
    for (Step& step : steps_)
      for (uint32_t rank = 0; rank < ranks_; ++rank) all.push_back(&step.of[rank]);
    // In about the order of steps.
    for (size_t i = 1; i < all.size(); ++i)
      if (r_.one_in(3)) std::swap(all[i - 1], all[i]);
    for (OfRank* of : all) link(*of);
  }

  void ask() {
    for (uint64_t n = 1 + r_.below(3); n-- > 0;) {
      const Slots slots = some_rows(3);
      const uint64_t before = window_.base();
      while (window_.force(slots.data(), slots.size(), before))
        if (!help(before, 4)) s_.pause();
      for (uint32_t slot : slots) look(slot, before);
    }
  }

  void cancel() {
    for (uint64_t n = 1 + r_.below(2); n-- > 0; s_.pause()) {
      const uint32_t rank = static_cast<uint32_t>(r_.below(ranks_));
      const size_t i = r_.below(steps_.size());
      Lock lock(control_);
      OfRank& of = steps_[i].of[rank];
      if (begun_[rank] > i || of.linking == kNow || of.cancelled) continue;
      of.cancelled = true;
      s_.note("cancels rank %llu of step %llu", rank, kFirst + i);
      if (of.linking == kDone) window_.unlink(of.declared);
    }
  }

  Schedule& s_;
  Random& r_;
  const Kind kind_;
  uint32_t ranks_ = 1;
  uint64_t tau_ = 0;
  std::vector<Row> rows_;
  std::vector<Step> steps_;
  Window window_;
  Mutex control_;  // what follows, and Step
  size_t committed_ = 0;
  size_t begun_[2] = {};
  uint32_t done_ = 0;
};

void explore_kind(const char* name, uint64_t rounds, const Kind& kind) {
  BufferPool pool;
  explore(name, rounds, [&](Schedule& s) { World(s, pool, kind).run(); });
}

TEST(WindowSchedules, Gates) { explore_kind("window.gates", 10000, {}); }
TEST(WindowSchedules, TreeHeap) { explore_kind("window.tree_heap", 10000, {.tree_heap = true}); }
TEST(WindowSchedules, Staleness) { explore_kind("window.staleness", 10000, {.stale = true}); }
TEST(WindowSchedules, NothingDeclared) { explore_kind("window.undeclared", 10000, {.declares = false}); }
TEST(WindowSchedules, Caches) { explore_kind("window.caches", 10000, {.caches = true}); }

}  // namespace
}  // namespace frugal
