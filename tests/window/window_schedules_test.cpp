// In chosen interleavings of one window, a rank past its gate reads every promised update, and each
// update is written once.
//
// Ranks and flush threads run concurrently with threads that declare, cancel and look rows up
// (support/schedule.h). Variants: the tree heap, staleness, nothing declared, caches.
//
// The model is a host row's list of the steps whose updates it has. A rank past its gate finds what
// the contract promises, and no thread writes its rows meanwhile. Updates of a row are written in
// step order, one at a time. The ranks follow the engine's rules. A step is prepared when all ranks
// have passed its gate, and committed when all have ended it. One thread at a time links
// declarations, in pieces. A rank that would wait helps.
//
// With caches rank 0 has one, and a thread plans its refreshes ahead, as the engine does. Then rows
// have values. Each row that is read, cached or in host memory, has the bits of one thread.
#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "cache/cached_rows.h"
#include "support/parts.h"
#include "support/rows.h"
#include "support/schedule.h"
#include "window/apply.h"
#include "window/window.h"

namespace frugal::window_schedules_test {

constexpr auto kUrgent = Window::Urgency::kUrgent;
constexpr auto kBackground = Window::Urgency::kBackground;
constexpr uint64_t kFirst = 100;  // step

struct Kind {
  bool tree_heap = false;
  bool stale = false;    // ranks run apart
  bool declares = true;  // else nothing is known of reads but by force()
  bool caches = false;   // rank 0 keeps rows
};

constexpr uint32_t kRows = 8, kDim = 3;
constexpr size_t kNone = SIZE_MAX;

// Rows that each run begins anew: the host's, and those of a loop in one thread.
struct Tables {
  Tables() {
    for (Rows* rows : {&host, &reference})
      if (rows->open(rows_config(kRows, kDim, FRUGAL_ADAM), nullptr) != FRUGAL_OK)
        throw std::bad_alloc();
  }
  void begin() {
    for (Rows* rows : {&host, &reference})
      if (rows->initialize_range(0, kRows) != FRUGAL_OK) throw std::bad_alloc();
  }
  BufferPool pool;
  Rows host, reference;
};

class World {
 public:
  World(Schedule& schedule, Tables& tables, const Kind& kind)
      : s_(schedule), r_(schedule.random()), kind_(kind), tables_(tables), host_(tables.host) {
    ranks_ = 1 + static_cast<uint32_t>(r_.below(2));
    tau_ = kind.stale ? 1 + r_.below(2) : 0;
    rows_.resize(3 + r_.below(kRows - 3));
    steps_.resize(2 + r_.below(3) + (kind.caches ? 2 : 0));
    if (kind.caches) {
      tables_.begin();
      for (uint32_t slot = 0; slot < rows_.size(); ++slot) keep_values(slot);
      const uint64_t cache_slots = 1 + r_.below(3);
      cache_.open(cache_slots);
      if (HostCachedRows::open(host_, cache_slots, tables_.pool, &cached_rows_) != FRUGAL_OK)
        throw std::bad_alloc();
    }
    for (size_t i = 0; i < steps_.size(); ++i) draw(i);
    if (window_.open({.rows = rows_.size(),
                      .staleness = tau_,
                      .placement = ranks_,
                      .tree_heap = kind.tree_heap},
                     kFirst) != FRUGAL_OK)
      throw std::bad_alloc();
  }

  void run() {
    constexpr const char* kRanks[] = {"rank 0", "rank 1"};
    for (uint32_t rank = 0; rank < ranks_; ++rank)
      s_.thread(kRanks[rank], [this, rank] { train(rank); });
    s_.thread("flush 0", [this] { flush(); });
    if (r_.one_in(2)) s_.thread("flush 1", [this] { flush(); });
    if (kind_.declares) s_.thread("linker", [this] { link_all(); });
    if (r_.one_in(2)) s_.thread("asker", [this] { ask(); });
    if (kind_.declares && r_.one_in(3)) s_.thread("canceller", [this] { cancel(); });
    if (kind_.caches) s_.thread("planner", [this] { plan_all(); });
    s_.run();
    HOLDS(s_, !window_.any_pending() && window_.pending_rows() == 0);
    HOLDS(s_, !window_.pending_until(UINT64_MAX) && !window_.in_flight_until(UINT64_MAX));
    for (const Row& row : rows_) HOLDS(s_, row.applied == row.updates.size() && !row.writing);
    for (uint32_t slot = 0; slot < rows_.size(); ++slot) look(slot, UINT64_MAX);
    const WindowStats stats = window_.stats();
    HOLDS(s_, stats.pending == 0 && stats.enqueued == stats.dequeued);
  }

 private:
  enum Linking { kNot, kNow, kDone };
  struct Row {
    std::vector<uint64_t> updates;  // all steps of the run that update it, ascending
    size_t applied = 0;             // the first of them are in the row
    bool writing = false;
    std::vector<std::vector<float>> values;  // after so many updates, if there are values
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
    bool staging = false, prepared = false;
  };

  Slots some_rows(uint64_t one_in) {
    Slots slots;
    for (uint32_t slot = 0; slot < rows_.size(); ++slot)
      if (r_.one_in(one_in)) slots.push_back(slot);
    return slots;
  }

  void draw(size_t i) {
    BufferPool& pool = tables_.pool;
    const uint64_t step = kFirst + i;
    std::vector<PartRef> pushed;
    std::set<uint32_t> all;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      OfRank& of = steps_[i].of[rank];
      of.declared = resolved_part(pool, step, rank, kind_.declares ? some_rows(2) : Slots());
      // Mostly what was declared is pushed.
      of.pushed = kind_.declares && !r_.one_in(4) ? of.declared
                                                  : resolved_part(pool, step, rank, some_rows(2));
      if (of.pushed->distinct == 0) continue;
      pushed.push_back(of.pushed);
      all.insert(of.pushed->row_slots(), of.pushed->row_slots() + of.pushed->distinct);
    }
    if (all.empty()) return;
    const UpdateRef& update = steps_[i].update =
        make_update(pool, step, pushed, kind_.caches ? host_.layout().sums_stride : 0);
    update->make_list();
    for (uint32_t slot : all) rows_[slot].updates.push_back(step);
    if (!kind_.caches) return;
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = FRUGAL_ADAM;
    update->scalars = arith::step_scalars(o, step, ranks_, 0, kDim);
    for (RankGradients& h : update->ranks)
      for (size_t k = 0; k < h.rows() * h.stride; ++k)
        h.sums.as<float>()[k] = static_cast<float>(r_.below(1000)) * 1e-3f;
    for (size_t row = 0; row < update->n; ++row) {
      apply(tables_.reference, *update, row);
      keep_values(update->slots[row]);
    }
  }

  void keep_values(uint32_t slot) {
    const float* values = tables_.reference.values(slot);
    rows_[slot].values.emplace_back(values, values + kDim);
  }
  static void apply(Rows& rows, const StepUpdate& update, size_t row) {
    thread_local ApplyScratch scratch(2, 0);  // for a thousand rows: not made anew for one
    const uint32_t entry = static_cast<uint32_t>(row);
    frugal::apply(ApplyTo(rows), update, UpdateEntries{&entry, 1}, &scratch);
  }
  static size_t before(const Row& row, uint64_t step) {  // updates of earlier steps
    return static_cast<size_t>(std::lower_bound(row.updates.begin(), row.updates.end(), step) -
                               row.updates.begin());
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
        if (kind_.caches) apply(host_, *run.update, c.rows[i]);
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
  void look(uint32_t slot, uint64_t step) {
    const Row& row = rows_[slot];
    s_.note("reads row %llu before step %llu", slot, step);
    HOLDS(s_, row.applied >= before(row, step));
    HOLDS(s_, !kind_.caches || row.writing ||
                  std::memcmp(host_.values(slot), row.values[row.applied].data(),
                              kDim * sizeof(float)) == 0);
  }

  // --- Ranks ---

  bool link(OfRank& of) {  // false: another thread links it
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
      if (kind_.declares && step.of[rank].linking != kDone && !step.of[rank].cancelled)
        return false;
    }
    return !window_.pending_until(kFirst + i);
  }

  void train(uint32_t rank) {
    for (size_t i = 0; i < steps_.size(); ++i) {
      OfRank& of = steps_[i].of[rank];
      if (kind_.caches && rank == 0) end_planning();
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
      if (kind_.caches && rank == 0) refresh(i, cancelled ? nullptr : of.declared);
      if (!cancelled) read(rank, i);
      end(i);
    }
    Lock lock(control_);
    ++done_;
  }

  void read(uint32_t rank, size_t i) {
    const Part& part = *steps_[i].of[rank].declared;
    for (size_t k = 0; k < part.distinct; ++k) {
      const uint32_t slot = part.row_slots()[k];
      const Row& row = rows_[slot];
      const auto* source = part.sources.as<device::Source>();
      if (rank == 0 && kind_.caches && source[k].is_own()) {
        s_.note("reads row %llu in cache slot %llu", slot, source[k].index());
        const float* cached_row =
            device::behind(cached_rows_->at().host, source[k].index() * host_.layout().value_pitch);
        HOLDS(s_, std::memcmp(cached_row, row.values[before(row, kFirst + i)].data(),
                              kDim * sizeof(float)) == 0);
        s_.point();
        continue;
      }
      look(slot, kFirst + i - std::min<uint64_t>(i, tau_));
      HOLDS(s_, tau_ || !row.writing);
      s_.point();
      HOLDS(s_, tau_ || !row.writing);
    }
  }

  // --- The cache of rank 0: the planner's while planning_, else the rank's ---

  void plan_table(size_t i, const PartRef& part, Window::Urgency urgency) {
    const bool more = plan_of_ == i;
    flag_lines(urgency);
    if (!more) plan_ = {};
    Vector<uint32_t> slots, evicted;
    for (size_t k = 0; part && k < part->distinct; ++k)
      if (window_.placement().may_cache(0, part->row_slots()[k]))
        slots.push_back(part->row_slots()[k]);
    Vector<uint64_t> next(slots.size());
    window_.next_owner_reads(slots.data(), slots.size(), kFirst + i, next.data(), urgency);
    for (uint64_t read : next) HOLDS(s_, read > kFirst + i);
    cache_.plan_refresh(
        more, kFirst + i, slots.data(), next.data(), slots.size(),
        [&](const uint32_t* of_slots, size_t n, uint64_t* reads) {
          window_.next_owner_reads(of_slots, n, kFirst + i, reads, urgency);
        },
        &plan_.admitted, &plan_.to, &evicted);
    plan_of_ = i;
    uint64_t dirty = 0;
    window_.set_cached(evicted.data(), evicted.size(), false, &dirty, urgency);
    if (!part) return;
    HOLDS(s_, tables_.pool.get((part->distinct + 1) * sizeof(device::Source), &part->sources) ==
                  FRUGAL_OK);
    cache_.sources(part->row_slots(), part->distinct, part->sources.as<device::Source>());
    plan_.parts.push_back(part);
  }

  void flag_lines(Window::Urgency urgency) {
    window_.set_cached(unflagged_.data(), unflagged_.size(), true, nullptr, urgency);
    unflagged_.clear();
  }

  void end_planning() {
    for (;; s_.pause()) {
      Lock lock(control_);
      refreshed_ = kNone;
      if (!planning_) return;
    }
  }

  void refresh(size_t i, const PartRef& part) {
    Vector<UpdateRef> backlog;
    {
      Lock lock(control_);
      backlog.swap(backlog_);
    }
    if (plan_of_ != kNone && (plan_of_ != i || (!plan_.parts.empty() && plan_.parts[0] != part))) {
      s_.note("does not do as planned for %llu", kFirst + plan_of_);
      for (uint32_t slot : plan_.admitted) cache_.drop(slot);
      plan_of_ = kNone;
    }
    if (plan_of_ != i || (part && plan_.parts.empty())) plan_table(i, part, kUrgent);
    Vector<DueUpdate> due;
    for (const UpdateRef& update : backlog) {
      Vector<PartRef> pushed;
      for (const RankGradients& h : update->ranks) pushed.push_back(h.part);
      DueUpdate& d = due.emplace_back();
      d.update = update;
      d.planned = pushed == plan_.pushed;
      if (!d.planned) cache_.touched(pushed, 0, &d.other);
    }
    HOLDS(s_, cached_rows_->refresh(plan_, due) == FRUGAL_OK);
    unflagged_.insert(unflagged_.end(), plan_.admitted.begin(), plan_.admitted.end());
    if (r_.one_in(4)) flag_lines(kUrgent);
    plan_of_ = kNone;
    plan_ = {};
    Lock lock(control_);
    refreshed_ = i;
  }

  void plan_all() {
    for (;; s_.pause()) {
      size_t i;
      PartRef part;
      Vector<PartRef> pushed;
      {
        Lock lock(control_);
        if (done_ == ranks_) return;
        if (refreshed_ == kNone || refreshed_ + 1 == steps_.size()) continue;
        i = refreshed_ + 1;
        OfRank& of = steps_[i].of[0];
        // (A declaration that comes later is added at the refresh.)
        if (of.linking == kDone && !of.cancelled) part = of.declared;
        if (!part && !r_.one_in(4)) continue;
        for (uint32_t rank = 0; rank < ranks_; ++rank)
          if (steps_[i - 1].of[rank].declared->distinct)
            pushed.push_back(steps_[i - 1].of[rank].declared);
        planning_ = true;
        refreshed_ = kNone;
      }
      plan_table(i, part, kBackground);
      cache_.touched(pushed, 0, &plan_.update);
      plan_.pushed = std::move(pushed);
      Lock lock(control_);
      planning_ = false;
    }
  }

  // Prepares the step's update ahead of its commit, if no thread has. False: another thread is at
  // it.
  bool prepare(size_t i) {
    Step& step = steps_[i];
    bool exact = kind_.declares;
    {
      Lock lock(control_);
      if (step.prepared) return true;
      if (step.staging) return false;
      step.staging = true;
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const OfRank& of = step.of[rank];
        exact = exact && of.linking == kDone && !of.cancelled &&
                (of.pushed == of.declared || of.pushed->distinct == 0);
      }
    }
    if (step.update) {
      window_.add(step.update);
      while (!window_.prepare(*step.update, exact, Window::kPiece, kBackground)) s_.point();
      if (r_.one_in(8)) {
        s_.note("stages %llu again", kFirst + i);
        window_.withdraw(step.update);
        window_.add(step.update);
        HOLDS(s_, window_.prepare(*step.update, false, SIZE_MAX, kUrgent));
      }
    }
    Lock lock(control_);
    step.prepared = true;
    return true;
  }

  // A flush thread prepares the step that all ranks are in, if they have all passed its gate.
  bool prepare_ahead() {
    size_t i;
    {
      Lock lock(control_);
      i = committed_;
      if (i == steps_.size() || steps_[i].passed < ranks_ || steps_[i].staging) return false;
    }
    return prepare(i);
  }

  void end(size_t i) {
    Step& step = steps_[i];
    {
      Lock lock(control_);
      // With staleness a rank may have ended a step before the ranks have all passed the gate of an
      // earlier one.
      if (++step.ended < ranks_) return;
    }
    while (!prepare(i)) s_.pause();
    if (step.update) window_.make_room(*step.update);
    s_.note("commits %llu", kFirst + i);
    window_.commit(step.update.get(), kFirst + i);
    Lock lock(control_);
    if (kind_.caches && step.update) backlog_.push_back(step.update);
    committed_ = i + 1;
  }

  // --- Others ---

  void flush() {
    for (;;) {
      bool over;
      uint64_t next_commit;
      {
        Lock lock(control_);
        over = done_ == ranks_;
        next_commit = kFirst + committed_;
      }
      if (r_.one_in(3) && prepare_ahead()) continue;
      if (help(r_.one_in(2) ? UINT64_MAX : next_commit + r_.below(3), 1 + r_.below(4))) continue;
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
      const uint64_t before = window_.next_commit();
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
  Tables& tables_;
  Rows& host_;
  uint32_t ranks_ = 1;
  uint64_t tau_ = 0;
  std::vector<Row> rows_;
  std::vector<Step> steps_;
  Window window_;
  RowCache cache_;
  std::unique_ptr<CachedRows> cached_rows_;
  CachePlan plan_;
  size_t plan_of_ = kNone;
  Vector<uint32_t> unflagged_;
  Mutex control_;  // what follows, and Step
  size_t committed_ GUARDED_BY(control_) = 0;
  size_t begun_[2] GUARDED_BY(control_) = {};
  uint32_t done_ GUARDED_BY(control_) = 0;
  // the refresh after which the next may be planned
  size_t refreshed_ GUARDED_BY(control_) = kNone;
  bool planning_ GUARDED_BY(control_) = false;
  Vector<UpdateRef> backlog_ GUARDED_BY(control_);
};

void explore_kind(const char* name, uint64_t rounds, const Kind& kind) {
  Tables tables;
  explore(name, rounds, [&](Schedule& s) { World(s, tables, kind).run(); });
}

TEST(WindowSchedules, Gates) { explore_kind("window.gates", 10000, {}); }
TEST(WindowSchedules, TreeHeap) { explore_kind("window.tree_heap", 10000, {.tree_heap = true}); }
TEST(WindowSchedules, Staleness) { explore_kind("window.staleness", 10000, {.stale = true}); }
TEST(WindowSchedules, NothingDeclared) {
  explore_kind("window.undeclared", 10000, {.declares = false});
}
TEST(WindowSchedules, Caches) { explore_kind("window.caches", 10000, {.caches = true}); }

}  // namespace frugal::window_schedules_test
