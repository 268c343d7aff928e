// In chosen interleavings, with and without staleness, each row that a step reads has the bits of
// one thread, cached or not.
//
// Threads plan, extend and cancel refreshes of a trainer's cache of a table, or give the cache up.
// Concurrently ranks declare, cancel, repeat steps and commit, threads write host rows, and rows
// are put between steps (support/schedule.h).
//
// The model is a table in one thread that keeps each row's versions. No cached row is one that
// another rank owns.
#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/table_cache.h"
#include "support/parts.h"
#include "support/rows.h"
#include "support/schedule.h"
#include "window/apply.h"

namespace frugal::table_cache_schedules_test {

constexpr auto kUrgent = Window::Urgency::kUrgent;
constexpr uint64_t kFirst = 100;  // step
constexpr uint32_t kRows = 8, kDim = 3;
constexpr size_t kNone = SIZE_MAX;

struct Totals {
  uint64_t planned = 0, in_cached_rows = 0, in_host = 0;
};

// Cached rows whose refresh may fail. `later` lists those that a step may not read yet: a device
// brings their updates later.
class WornCachedRows final : public CachedRows {
 public:
  struct Last {
    bool fails = false;
    std::vector<uint32_t> later;
  };
  WornCachedRows(std::unique_ptr<CachedRows> cached_rows, Last& last)
      : cached_rows_(std::move(cached_rows)), last_(last) {
    at_ = cached_rows_->at();
  }
  Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) override {
    if (last_.fails) return FRUGAL_ERR_DEVICE;
    last_.later.clear();
    for (const DueUpdate& d : due) {
      const Vector<uint32_t>& touched = d.touched(plan).cache_slots;
      last_.later.insert(last_.later.end(), touched.begin() + static_cast<ptrdiff_t>(d.now),
                         touched.end());
    }
    return cached_rows_->refresh(plan, due);
  }

 private:
  std::unique_ptr<CachedRows> cached_rows_;
  Last& last_;
};

class World {
 public:
  World(Schedule& schedule, bool stale, Totals* totals)
      : s_(schedule),
        r_(schedule.random()),
        totals_(totals),
        ranks_(1 + static_cast<uint32_t>(r_.below(2))),
        tau_(stale ? 1 + r_.below(2) : 0) {
    rows_.resize(3 + r_.below(kRows - 2));
    steps_.resize(3 + r_.below(3));
    for (Rows* rows : {&table_->rows, &reference_})
      check(rows->open(rows_config(kRows, kDim, FRUGAL_ADAM), nullptr) == FRUGAL_OK &&
            rows->initialize_range(0, kRows) == FRUGAL_OK);
    check(window_.open({.rows = kRows, .staleness = tau_, .placement = ranks_, .tree_heap = false},
                       kFirst) == FRUGAL_OK);
    for (uint32_t slot = 0; slot < rows_.size(); ++slot) keep(slot, 0);
    const uint64_t cache_slots = 1 + r_.below(4);
    std::unique_ptr<CachedRows> made;
    check(HostCachedRows::open(host_, cache_slots, pool_, &made) == FRUGAL_OK);
    cache_.open(cache_slots, std::make_unique<WornCachedRows>(std::move(made), last_), 0);
    for (size_t i = 0; i < steps_.size(); ++i)
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        OfRank& of = steps_[i].of[rank];
        for (Declared& d : of.declared)
          d.part = part(i, rank, i + 1 < steps_.size() ? 2 : 1);  // the last reads all rows
        if (r_.one_in(2)) of.declared[1].state = kGone;
      }
  }

  void run() {
    s_.thread("rank 0", [this] { train(0); });
    if (ranks_ == 2) s_.thread("rank 1", [this] { train(1); });
    s_.thread("flush thread", [this] { flush(); });
    s_.thread("planner", [this] {
      while (done_ < ranks_)
        if (!link_one(steps_.size()) && !plan_one()) s_.pause();
    });
    if (r_.one_in(2)) s_.thread("outsider", [this] { put_some(); });
    s_.run();
    HOLDS(s_, !window_.any_pending());
    for (uint32_t slot = 0; slot < rows_.size(); ++slot) {
      HOLDS(s_, rows_[slot].applied + 1 == rows_[slot].versions.size());
      look(slot, UINT64_MAX);
    }
    totals_->planned += counters_.cache_planned.load();
  }

 private:
  enum Declaring { kNot, kEntered, kLinking, kLinked, kGone };
  struct Declared {
    PartRef part;
    Declaring state = kNot;
  };
  struct OfRank {
    Declared declared[2];
    PartRef pushed;
  };
  struct Step {
    OfRank of[2];
    uint32_t ended = 0;  // ranks
  };
  struct Version {
    uint64_t step;  // 0: of none
    float values[kDim];
  };
  struct Row {
    std::vector<Version> versions;
    size_t applied = 0;  // the one that is in the host row
    size_t in_line = 0;  // the one that a cached row has to have since the last refresh
    bool writing = false;
  };

  static void check(bool done) {
    if (!done) throw std::bad_alloc();
  }
  PartRef part(size_t i, uint32_t rank, uint64_t one_in) {
    Slots slots;
    for (uint32_t slot = 0; slot < rows_.size(); ++slot)
      if (r_.one_in(one_in)) slots.push_back(slot);
    const PartRef p = resolved_part(pool_, kFirst + i, rank, slots);
    check(pool_.get((p->distinct + 1) * sizeof(uint32_t), &p->start) == FRUGAL_OK);
    for (uint32_t k = 0; k <= p->distinct; ++k) p->start.as<uint32_t>()[k] = k;
    return p;
  }

  // --- The model ---

  void keep(uint32_t slot, uint64_t step) {
    Version& v = rows_[slot].versions.emplace_back();
    v.step = step;
    std::memcpy(v.values, reference_.values(slot), sizeof v.values);
  }
  static void apply(Rows& rows, const StepUpdate& update, uint32_t entry) {
    thread_local ApplyScratch scratch(2, 0);
    frugal::apply(ApplyTo(rows), update, UpdateEntries{&entry, 1}, &scratch);
  }
  bool equal(const float* values, const Version& v) const {
    return std::memcmp(values, v.values, sizeof v.values) == 0;
  }
  // The host row has all updates of steps below `step`.
  void look(uint32_t slot, uint64_t step) {
    const Row& row = rows_[slot];
    s_.note("reads row %llu before step %llu", slot, step);
    size_t least = row.versions.size() - 1;
    while (row.versions[least].step >= step) --least;
    HOLDS(s_, row.applied >= least);
    HOLDS(s_, row.writing || equal(host_.values(slot), row.versions[row.applied]));
  }

  // --- Host rows ---

  bool help(uint64_t step) {
    Claim c;
    if (!window_.claim(step, 1 + r_.below(3), &c)) return false;
    for (const Claim::Run& run : c.runs)
      for (uint32_t i = run.begin; i < run.end; ++i) {
        Row& row = rows_[run.update->slots[c.rows[i]]];
        HOLDS(s_, !row.writing);
        row.writing = true;
        s_.point();
        HOLDS(s_, row.applied + 1 < row.versions.size());
        HOLDS(s_, row.versions[row.applied + 1].step == run.update->step);
        apply(host_, *run.update, c.rows[i]);
        ++row.applied;
        row.writing = false;
      }
    s_.point();
    window_.finish(c);
    return true;
  }
  void flush() {
    for (;;) {
      const bool over = done_ == ranks_;
      if (help(r_.one_in(2) ? UINT64_MAX : window_.next_commit() + r_.below(3))) continue;
      if (over && !window_.any_pending()) return;
      s_.pause();
    }
  }

  // --- Declarations, which a rank makes and takes back itself ---

  void declare(uint32_t rank, size_t i, bool all) {
    for (Declared& d : steps_[i].of[rank].declared) {
      if (!all && r_.one_in(2)) continue;
      Lock lock(control_);
      if (d.state == kNot) {
        d.state = kEntered;
        if (rank == 0 && (i == planned_ || (planning_ && i == begun_[0]))) plan_more_ = true;
      } else if (!all && d.state == kLinked && r_.one_in(4)) {
        s_.note("cancels a part of rank %llu for %llu", rank, kFirst + i);
        d.state = kGone;
        d.part->linked.store(false);
        window_.unlink(d.part);
      }
    }
  }
  void declare_some(uint32_t rank, size_t from) {
    for (size_t i = from; i < std::min(from + 4, steps_.size()); ++i)
      if (r_.one_in(2)) declare(rank, i, false);
  }
  // One that is declared for a step up to this, or any.
  bool link_one(size_t up_to) {
    Declared* d = nullptr;
    {
      Lock lock(control_);
      for (size_t i = 0; i <= up_to && i < steps_.size() && !d; ++i)
        for (OfRank& of : steps_[i].of)
          for (Declared& one : of.declared)
            if (!d && one.state == kEntered) d = &one;
      if (!d) return false;
      d->state = kLinking;
    }
    const size_t n = d->part->distinct, piece = 1 + r_.below(n + 1);
    for (size_t at = 0; at < std::max<size_t>(n, 1); at += piece)
      HOLDS(s_, window_.link(d->part, at, piece, d->part->rank == 0, Window::Urgency::kBackground));
    Lock lock(control_);
    d->part->linked.store(true);
    d->state = kLinked;
    return true;
  }
  bool all_linked(size_t up_to) REQUIRES(control_) {
    for (size_t i = 0; i <= up_to; ++i)
      for (const OfRank& of : steps_[i].of)
        for (const Declared& d : of.declared)
          if (d.state == kEntered || d.state == kLinking) return false;
    return true;
  }
  Vector<PartRef> linked(uint32_t rank, size_t i) REQUIRES(control_) {
    Vector<PartRef> parts;
    for (const Declared& d : steps_[i].of[rank].declared)
      if (d.state == kLinked) parts.push_back(d.part);
    return parts;
  }

  // --- Steps ---

  void train(uint32_t rank) {
    for (size_t i = 0; i < steps_.size();) {
      declare_some(rank, i);
      if (i + 1 == steps_.size()) declare(rank, i, true);
      begin(rank, i);
      declare_some(rank, i + 1);
      read(rank, i);
      declare_some(rank, i + 1);
      if (rank == 0 && r_.one_in(8)) {
        s_.note("begins %llu again", kFirst + i);
        Lock lock(control_);
        begun_[0] = i;
        --inside_;
        continue;
      }
      end(rank, i++);
    }
    Lock lock(control_);
    ++done_;
  }
  bool gate_open(uint32_t rank, size_t i) {
    Lock lock(control_);
    if (outside_ || committed_ + tau_ < i || !all_linked(i) || window_.pending_until(kFirst + i))
      return false;
    begun_[rank] = i + 1;
    ++inside_;
    return true;
  }
  void begin(uint32_t rank, size_t i) {
    if (rank == 0) end_planning();
    while (!gate_open(rank, i))
      if (!link_one(i) && !help(kFirst + i)) s_.pause();
    s_.note("rank %llu passes the gate of %llu", rank, kFirst + i);
    if (rank == 0) refresh(i);
  }
  void read(uint32_t rank, size_t i) {
    Vector<PartRef> parts;
    {
      Lock lock(control_);
      parts = linked(rank, i);
    }
    for (const PartRef& p : parts) {
      size_t in_cached_rows = 0;
      for (size_t k = 0; k < p->distinct; ++k) {
        const uint32_t slot = p->row_slots()[k];
        const Row& row = rows_[slot];
        s_.point();
        if (rank == 0 && p->sources && p->sources.as<device::Source>()[k].is_own()) {
          const uint64_t cache_slot = p->sources.as<device::Source>()[k].index();
          s_.note("reads row %llu in cache slot %llu", slot, cache_slot);
          HOLDS(s_, window_.placement().may_cache(0, slot));
          HOLDS(s_, std::count(last_.later.begin(), last_.later.end(), cache_slot) == 0);
          HOLDS(s_, tau_ || row.in_line + 1 == row.versions.size());
          HOLDS(s_, equal(device::behind(cache_.at().host, cache_slot * host_.layout().value_pitch),
                          row.versions[row.in_line]));
          ++in_cached_rows;
          continue;
        }
        // The gate does not wait for a row whose cached row has gone.
        if (rank == 0 && !p->sources)
          while (window_.force(&slot, 1, window_.next_commit()))
            if (!help(kFirst + i)) s_.pause();
        look(slot, kFirst + i - std::min<uint64_t>(i, tau_));
        HOLDS(s_, tau_ || !row.writing);
      }
      HOLDS(s_, rank != 0 || p->cached == in_cached_rows);
      totals_->in_cached_rows += in_cached_rows;
      totals_->in_host += p->distinct - in_cached_rows;
    }
  }
  void end(uint32_t rank, size_t i) {
    Step& step = steps_[i];
    OfRank& of = step.of[rank];
    const bool other = r_.one_in(4);  // than what was declared
    {
      Lock lock(control_);
      if (!other && of.declared[0].state == kLinked) of.pushed = of.declared[0].part;
    }
    if (!of.pushed) of.pushed = part(i, rank, 2);
    bool last;
    {
      Lock lock(control_);
      last = ++step.ended == ranks_;
    }
    if (last) commit(i);
    Lock lock(control_);
    --inside_;
  }
  void commit(size_t i) {
    std::vector<PartRef> pushed;
    for (uint32_t rank = 0; rank < ranks_; ++rank)
      if (steps_[i].of[rank].pushed->distinct) pushed.push_back(steps_[i].of[rank].pushed);
    UpdateRef u;
    if (!pushed.empty()) {
      u = make_update(pool_, kFirst + i, pushed, host_.layout().sums_stride);
      u->make_list();
      frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
      o.kind = FRUGAL_ADAM;
      u->scalars = arith::step_scalars(o, kFirst + i, ranks_, 0, kDim);
      for (RankGradients& h : u->ranks)
        for (size_t k = 0; k < h.rows() * h.stride; ++k)
          h.sums.as<float>()[k] = static_cast<float>(r_.below(1000)) * 1e-3f;
      window_.add(u);
      HOLDS(s_, window_.prepare(*u, false, SIZE_MAX, kUrgent));
      window_.make_room(*u);
    }
    Lock lock_refresh(refresh_mu_);
    for (uint32_t entry = 0; u && entry < u->n; ++entry) {
      apply(reference_, *u, entry);
      keep(u->slots[entry], kFirst + i);
    }
    {
      Lock lock(control_);
      if (u) backlog_.push_back(u);
    }
    s_.note("commits %llu", kFirst + i);
    window_.commit(u.get(), kFirst + i);
    Lock lock(control_);
    committed_ = i + 1;
  }

  // --- The cache: the planner's while planning_, else rank 0's, or the thread's outside steps ---

  void end_planning() {
    for (;; s_.pause()) {
      Lock lock(control_);
      passed_ = kNone;
      if (!planning_) return;
    }
  }
  void refresh(size_t i) {
    {
      Lock lock_refresh(refresh_mu_);
      Vector<UpdateRef> backlog;
      Vector<PartRef> declared;
      {
        Lock lock(control_);
        backlog.swap(backlog_);
        declared = linked(0, i);
        cache_.check_plan(kFirst + i, declared);
      }
      last_.fails = r_.one_in(16);
      if (cache_.refresh(kFirst + i, declared, backlog) == FRUGAL_OK) {
        HOLDS(s_, cache_.finish() == FRUGAL_OK);
      } else {
        cache_.forget();
        for (const PartRef& p : declared) {
          p->sources = {};
          p->cached = 0;
        }
      }
      for (Row& row : rows_) row.in_line = row.versions.size() - 1;
      if (tau_ || r_.one_in(4)) cache_.flag(kUrgent);
    }
    Lock lock(control_);
    passed_ = i;
    planned_ = kNone;
    plan_more_ = false;
  }
  bool plan_one() {
    size_t i;
    Vector<PartRef> declared, pushed;
    {
      Lock lock(control_);
      i = begun_[0];
      if (tau_ || passed_ == kNone || passed_ + 1 != i || i == steps_.size() || outside_)
        return false;
      if (planned_ == i && !plan_more_) return false;
      declared = linked(0, i);
      if (declared.empty() || !all_linked(i)) return false;
      for (uint32_t rank = 0; rank < ranks_; ++rank)
        for (const PartRef& p : linked(rank, i - 1))
          if (p->distinct) pushed.push_back(p);
      plan_more_ = false;
      planning_ = true;
    }
    const bool gives_up = r_.one_in(16);
    s_.note(gives_up ? "gives the cache up" : "plans %llu", kFirst + i);
    if (gives_up)
      cache_.forget();
    else if (cache_.plan_ahead(kFirst + i, declared))
      cache_.expect(pushed);
    Lock lock(control_);
    planning_ = false;
    planned_ = gives_up ? kNone : i;
    return true;
  }

  // --- Outside steps ---

  void put_some() {
    for (uint64_t n = 1 + r_.below(2); n-- > 0;) {
      for (;; s_.pause()) {
        Lock lock(control_);
        if (done_ == ranks_) return;
        if (inside_ || planning_) continue;
        outside_ = true;
        break;
      }
      while (window_.any_pending())
        if (!help(UINT64_MAX)) s_.pause();
      Slots slots;
      for (uint32_t slot = 0; slot < rows_.size(); ++slot)
        if (r_.one_in(3)) slots.push_back(slot);
      Vector<uint32_t> dropped;
      dropped.reserve(slots.size());
      cache_.drop(slots.data(), slots.size(), &dropped);
      window_.set_cached(dropped.data(), dropped.size(), false, nullptr, kUrgent);
      for (uint32_t slot : slots) {
        s_.note("puts row %llu", slot);
        const float value = static_cast<float>(r_.below(1000));
        for (Rows* rows : {&host_, &reference_})
          *RowWrite(*rows, &slot, 1, {RowWrite::What::kNew}).in_place().row(slot) = value;
        keep(slot, 0);
        ++rows_[slot].applied;
      }
      Lock lock(control_);
      outside_ = false;
      planned_ = kNone;
    }
  }

  Schedule& s_;
  Random& r_;
  Totals* const totals_;
  const uint32_t ranks_;
  const uint64_t tau_;
  BufferPool pool_;
  std::vector<Row> rows_;
  std::vector<Step> steps_;
  const TableRef table_ = std::allocate_shared<Table>(HeapAllocator<Table>());
  Rows reference_;
  Rows& host_ = table_->rows;
  Window& window_ = table_->window;
  Counters counters_;
  AnyTrainer owner_;
  WornCachedRows::Last last_;
  TableCache cache_{owner_, table_, pool_, counters_, tau_ != 0};
  Mutex refresh_mu_;  // before the other: no commit during a refresh
  Mutex control_;     // what follows, and Step
  size_t committed_ GUARDED_BY(control_) = 0;
  size_t begun_[2] GUARDED_BY(control_) = {};
  uint32_t inside_ GUARDED_BY(control_) = 0;  // ranks
  std::atomic<uint32_t> done_{0};
  bool outside_ GUARDED_BY(control_) = false;
  // The refresh after which the next may be planned, the one that is planned, and whether a thread
  // plans.
  size_t passed_ GUARDED_BY(control_) = kNone, planned_ GUARDED_BY(control_) = kNone;
  bool planning_ GUARDED_BY(control_) = false;
  bool plan_more_ GUARDED_BY(control_) = false;
  Vector<UpdateRef> backlog_ GUARDED_BY(control_);
};

void explore_kind(const char* name, bool stale) {
  Totals totals;
  explore(name, 10000, [&](Schedule& s) { World(s, stale, &totals).run(); });
  std::printf("%llu refreshes as planned, %llu rows read in caches, %llu in host memory\n",
              static_cast<unsigned long long>(totals.planned),
              static_cast<unsigned long long>(totals.in_cached_rows),
              static_cast<unsigned long long>(totals.in_host));
}

TEST(TableCacheSchedules, Boundaries) { explore_kind("table_cache.boundaries", false); }
TEST(TableCacheSchedules, Staleness) { explore_kind("table_cache.staleness", true); }

}  // namespace frugal::table_cache_schedules_test
