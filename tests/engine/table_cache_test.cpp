// Refreshes of a trainer's cache of a table: carried out as planned, extended or dropped, and what
// the window and lookups know.
//
// Pushes may differ from the declarations. Each failure, and missing memory, is covered.
#include "engine/table_cache.h"

#include <optional>
#include <vector>

#include "support/engine_parts.h"

namespace frugal::table_cache_test {

constexpr uint64_t kFirst = 10;

// Records what a refresh passes to the cached rows, and carries it out.
class ToldCachedRows final : public CachedRows {
 public:
  explicit ToldCachedRows(std::unique_ptr<CachedRows> cached_rows)
      : cached_rows_(std::move(cached_rows)) {
    at_ = cached_rows_->at();
  }
  void send(const CachePlan& plan) override { sent.push_back(plan.admitted.size()); }
  void forget_plan() noexcept override { ++forgotten; }
  Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) override {
    told.clear();
    for (const DueUpdate& d : due)
      told.push_back({d.planned, d.touched(plan).cache_slots.size(), d.now});
    return fails ? FRUGAL_ERR_DEVICE : cached_rows_->refresh(plan, due);
  }
  struct OfUpdate {
    bool planned;
    size_t cache_slots, now;
    bool operator==(const OfUpdate&) const = default;
  };
  using Told = std::vector<OfUpdate>;
  Told told;  // at the last refresh
  std::vector<size_t> sent;
  size_t forgotten = 0;
  bool fails = false;

 private:
  std::unique_ptr<CachedRows> cached_rows_;
};

using Told = ToldCachedRows::Told;

// Rank 0 of two. The rows begin as zeros, and each push of one makes it 1 more.
struct TableCacheTest : testing::Test {
  void open(uint64_t cache_slots, bool stale = false) {
    parts.ranks.start(kFirst);
    table = parts.add_table(200);
    ASSERT_OK(parts.tables.open_window(*table));
    const Placement& placement = table->window.placement();
    for (uint32_t s = 0; s < 200; ++s) (placement.may_cache(0, s) ? mine : theirs).push_back(s);
    owner = parts.join(0, true);
    cache.emplace(*owner, table, parts.pool, parts.counters, stale);
    EXPECT_FALSE(cache->there());
    std::unique_ptr<CachedRows> made;
    ASSERT_OK(HostCachedRows::open(table->rows, cache_slots, parts.pool, &made));
    auto kept = std::make_unique<ToldCachedRows>(std::move(made));
    told = kept.get();
    cache->open(cache_slots, std::move(kept), 77);
    EXPECT_TRUE(cache->there());
    EXPECT_EQ(cache->bytes(), 77u);
  }
  // Declared by a rank for a step, and linked.
  PartRef declare(uint64_t step, const Slots& slots, uint32_t rank = 0) {
    const PartRef p = make_part();
    p->step = step;
    p->rank = rank;
    const std::vector<uint64_t> keys(slots.begin(), slots.end());
    EXPECT_OK(p->take_keys(parts.pool, table->rows, keys.data(), keys.size(), false, 0));
    Vector<uint32_t> created;
    EXPECT_OK(p->resolve(parts.pool, table->rows, Rows::Missing::kCreate, &created));
    EXPECT_OK(parts.pool.get(p->distinct + 1, &p->next));
    EXPECT_TRUE(table->window.link(p, 0, p->distinct, rank == 0, Window::Urgency::kUrgent));
    p->linked = true;
    return p;
  }
  // What was declared is pushed, and the step committed. It is not in the host rows.
  UpdateRef commit(uint64_t step, const std::vector<PartRef>& pushed) {
    UpdateRef u = parts.update(table, step, {});
    for (const PartRef& p : pushed) u->ranks.push_back(parts.gradients(table, p));
    u->make_list();
    table->window.add(u);
    EXPECT_TRUE(table->window.prepare(*u, false, SIZE_MAX, Window::Urgency::kUrgent));
    table->window.make_room(*u);
    table->window.commit(u.get(), step);
    return u;
  }
  void write_all() {
    while (parts.flusher.write(UINT64_MAX)) {
    }
  }
  void refresh(uint64_t step, const Vector<PartRef>& declared,
               const Vector<UpdateRef>& committed = {}) {
    ASSERT_OK(cache->refresh(step, declared, committed));
    ASSERT_OK(cache->finish());
  }
  // After the refresh of step 10 that of step 11 is planned, by what is declared so far.
  void plan_the_next() {
    open(4);
    a = declare(10, {mine[0], mine[1]});
    b = declare(11, {mine[0]});
    refresh(10, {a});
    EXPECT_TRUE(cache->plan_ahead(11, {b}));
    cache->expect({a});
  }
  // How many updates a lookup of the part's row finds; of a host row not, if it is to be one.
  int read(const PartRef& part, uint32_t slot) {
    for (size_t i = 0; i < part->distinct; ++i) {
      if (part->row_slots()[i] != slot) continue;
      const device::Source source = part->sources.as<device::Source>()[i];
      if (!source.is_own()) return kHost;
      const size_t pitch = table->rows.layout().value_pitch;
      return static_cast<int>(*device::behind(cache->at().host, source.index() * pitch));
    }
    ADD_FAILURE() << "no row " << slot;
    return 0;
  }
  static constexpr int kHost = -1;

  EngineParts parts{2};
  Slots mine, theirs;  // rows that rank 0 may cache, or not
  TableRef table;
  TrainerRef owner;
  std::optional<TableCache> cache;
  PartRef a, b;  // of plan_the_next()
  ToldCachedRows* told = nullptr;
};

TEST_F(TableCacheTest, ABoundaryIsDoneAsPlanned) {
  open(4);
  const PartRef a = declare(10, {mine[0], mine[1], theirs[0], mine[0]});
  const PartRef b = declare(11, {mine[0], mine[2]});
  refresh(10, {a});
  EXPECT_EQ(read(a, mine[0]), 0);
  EXPECT_EQ(read(a, mine[1]), 0);
  EXPECT_EQ(read(a, theirs[0]), kHost) << "another rank may have it in its cache";
  EXPECT_EQ(a->cached, 3u) << "keys";
  EXPECT_TRUE(cache->plan_ahead(11, {b}));
  cache->expect({a});
  EXPECT_EQ(told->sent, std::vector<size_t>{1}) << "the row that comes in";
  EXPECT_FALSE(cache->plan_ahead(11, {b})) << "it is planned";
  cache->check_plan(11, {b});
  EXPECT_EQ(read(b, mine[0]), 0) << "not before the refresh";
  const UpdateRef u = commit(10, {a});
  refresh(11, {b}, {u});
  EXPECT_EQ(told->told, (Told{{true, 2, 1}})) << "one of two cached rows is read";
  EXPECT_EQ(read(b, mine[0]), 1);
  EXPECT_EQ(read(a, mine[1]), 1);
  EXPECT_EQ(read(b, mine[2]), 0);
  EXPECT_EQ(parts.times(table, mine[0]), 0) << "the host row comes later";
  EXPECT_EQ(parts.counters.cache_refreshes.load(), 2u);
  EXPECT_EQ(parts.counters.cache_planned.load(), 1u);
  EXPECT_EQ(parts.counters.cache_admitted.load(), 3u);
}

// The owner's own reads make no update of a cached row urgent, from the refresh on that follows
// the one at which it came.
TEST_F(TableCacheTest, TheWindowKnowsWhichRowsItHas) {
  open(1);
  const PartRef a = declare(10, {mine[0]}), b = declare(11, {mine[0]}), c = declare(12, {mine[1]});
  declare(13, {mine[0], mine[1]});
  declare(14, {mine[1]});
  refresh(10, {a});
  commit(10, {a});
  EXPECT_TRUE(table->window.pending_until(11));
  EXPECT_TRUE(cache->plan_ahead(11, {b}));
  EXPECT_FALSE(table->window.pending_until(13));
  cache->expect({});
  refresh(11, {b});
  EXPECT_TRUE(cache->plan_ahead(12, {c}));
  EXPECT_FALSE(table->window.pending_until(13)) << "its read is as near as the other's";
  refresh(12, {c});
  EXPECT_EQ(read(c, mine[1]), kHost);
  cache->forget();
  EXPECT_TRUE(table->window.pending_until(13)) << "the next read is of the host row";
}

// A row that a plan evicts counts as a host row at once.
TEST_F(TableCacheTest, WhoGoesIsReadInItsHostRow) {
  open(1);
  const PartRef a = declare(10, {mine[0]}), b = declare(11, {mine[1]});
  declare(12, {mine[1]});
  declare(13, {mine[0]});
  refresh(10, {a});
  cache->flag(Window::Urgency::kUrgent);
  commit(10, {a});
  EXPECT_FALSE(table->window.pending_until(13));
  EXPECT_TRUE(cache->plan_ahead(11, {b}));
  EXPECT_TRUE(table->window.pending_until(13));
  EXPECT_EQ(parts.counters.cache_evicted.load(), 1u);
  EXPECT_EQ(parts.counters.cache_evicted_dirty.load(), 1u);
}

// An admitted row is filled from a host row for which the step's gate has waited.
TEST_F(TableCacheTest, WhoComesCountsAsAHostRowUntilThen) {
  open(1);
  const PartRef a = declare(11, {mine[0]});
  commit(10, {resolved_part(parts.pool, 10, 1, {mine[0]})});
  EXPECT_TRUE(cache->plan_ahead(11, {a}));
  EXPECT_TRUE(table->window.pending_until(11));
  write_all();
  refresh(11, {a});
  EXPECT_EQ(read(a, mine[0]), 1);
}

TEST_F(TableCacheTest, APlanThatDoesNotStandIsCancelled) {
  open(2);
  const PartRef a = declare(10, {mine[0]}), b = declare(11, {mine[1]}), c = declare(11, {mine[0]});
  refresh(10, {a});
  for (const int how : {0, 1, 2}) {
    EXPECT_TRUE(cache->plan_ahead(11, {b, c}));
    EXPECT_NE(read(b, mine[1]), kHost);
    // It is taken back; it may be at any time; another step begins.
    b->linked = how != 1;
    cache->check_plan(how == 2 ? 12 : 11, how == 0 ? Vector<PartRef>{c} : Vector<PartRef>{b, c});
    b->linked = true;
  }
  refresh(11, {c});
  EXPECT_EQ(parts.counters.cache_planned.load(), 0u);
  EXPECT_EQ(parts.counters.cache_admitted.load(), 1u) << "the first alone";
  const PartRef d = declare(12, {mine[1]});
  refresh(12, {d});
  EXPECT_EQ(parts.counters.cache_admitted.load(), 2u) << "it was not there";
}

// It reads cached rows that the plan leaves for later, so all of them are brought up to date at
// once.
TEST_F(TableCacheTest, ADeclarationThatComesAfterThePlan) {
  plan_the_next();
  const PartRef late = declare(11, {mine[1], mine[3]});
  const UpdateRef u = commit(10, {a});
  refresh(11, {b, late}, {u});
  EXPECT_EQ(told->told, (Told{{true, 2, 2}}));
  EXPECT_EQ(read(late, mine[1]), 1);
  EXPECT_EQ(read(late, mine[3]), 0);
  EXPECT_EQ(parts.counters.cache_planned.load(), 0u);
}

// A plan that is added to ahead: what the update touches is found out again.
TEST_F(TableCacheTest, APlanThatIsAddedTo) {
  plan_the_next();
  const PartRef late = declare(11, {mine[1], mine[3]});
  const size_t before = told->forgotten;
  EXPECT_TRUE(cache->plan_ahead(11, {b, late}));
  EXPECT_EQ(told->forgotten, before + 1) << "what was sent is of no use";
  cache->expect({a});
  const UpdateRef u = commit(10, {a});
  refresh(11, {b, late}, {u});
  EXPECT_EQ(told->told, (Told{{true, 2, 2}})) << "the step reads both";
  EXPECT_EQ(parts.counters.cache_planned.load(), 1u);
}

TEST_F(TableCacheTest, APushThatIsNotAsDeclared) {
  plan_the_next();
  const PartRef other = resolved_part(parts.pool, 10, 1, {mine[1], theirs[0]});
  const UpdateRef u = commit(10, {other});
  refresh(11, {b}, {u});
  EXPECT_EQ(told->told, (Told{{false, 1, 0}})) << "no part reads the row in the step";
  EXPECT_EQ(read(b, mine[0]), 0);
  EXPECT_EQ(read(a, mine[1]), 1);
}

// A rank has left out steps: several updates are due, in their order.
TEST_F(TableCacheTest, SeveralUpdatesAreDue) {
  open(4);
  const PartRef a = declare(10, {mine[0], mine[1]}), b = declare(12, {mine[0]});
  refresh(10, {a});
  const UpdateRef u = commit(10, {a});
  const UpdateRef v = commit(11, {resolved_part(parts.pool, 11, 1, {mine[1]})});
  refresh(12, {b}, {u, v});
  EXPECT_EQ(told->told, (Told{{false, 2, 2}, {false, 1, 1}}));
  EXPECT_EQ(read(a, mine[1]), 2);
}

// With staleness rows are not waited for: a row with pending updates differs from what a cached row
// would have to be.
TEST_F(TableCacheTest, PendingRowsStayOut) {
  open(4, true);
  const PartRef a = declare(11, {mine[0], mine[1]});
  commit(10, {resolved_part(parts.pool, 10, 1, {mine[0]})});
  refresh(11, {a});
  EXPECT_EQ(read(a, mine[0]), kHost);
  EXPECT_EQ(read(a, mine[1]), 0);
  write_all();
  const PartRef b = declare(12, {mine[0]});
  refresh(12, {b});
  EXPECT_EQ(read(b, mine[0]), 1);
}

TEST_F(TableCacheTest, RowsAreDropped) {
  open(4);
  const PartRef a = declare(10, {mine[0], mine[1]}), b = declare(11, {mine[0], mine[1], mine[2]});
  refresh(10, {a});
  EXPECT_TRUE(cache->plan_ahead(11, {b}));
  Vector<uint32_t> dropped;
  const uint32_t rows[] = {mine[1], mine[2], theirs[0], kMissingSlot, kNoSlot};
  cache->drop(rows, 5, &dropped);
  EXPECT_EQ(dropped, Vector<uint32_t>{mine[1]}) << "the other has not come in";
  refresh(11, {b});
  EXPECT_EQ(parts.counters.cache_admitted.load(), 4u);
}

// A refresh that has failed: nothing is cached, and the next begins anew.
TEST_F(TableCacheTest, NothingIsLeftOfWhatHasFailed) {
  open(4);
  const PartRef a = declare(10, {mine[0]}), b = declare(11, {mine[0], mine[1]});
  refresh(10, {a});
  cache->flag(Window::Urgency::kUrgent);
  const UpdateRef u = commit(10, {a});
  EXPECT_FALSE(table->window.pending_until(11));
  told->fails = true;
  EXPECT_EQ(cache->refresh(11, {b}, {u}), FRUGAL_ERR_DEVICE);
  cache->forget();
  EXPECT_TRUE(table->window.pending_until(11)) << "its host row is read";
  write_all();
  told->fails = false;
  refresh(11, {b});
  EXPECT_EQ(read(b, mine[0]), 1);
  cache->forget();
  cache->close();
  EXPECT_FALSE(cache->there());
  cache->forget();
}

// Whatever lacks memory, the refresh is worked out again, and is as it would have been.
TEST_F(TableCacheTest, WithoutMemory) {
  open(4);
  const PartRef a = declare(10, {mine[0], mine[1]}), b = declare(11, {mine[0], mine[2]});
  refresh(10, {a});
  WithoutMemory without;
  bool planned = false;
  while (without.next()) {
    without([&] {
      planned = cache->plan_ahead(11, {b}) || planned;
      cache->expect({a});
      return planned ? FRUGAL_OK : FRUGAL_ERR_OUT_OF_MEMORY;
    });
  }
  EXPECT_TRUE(planned);
  const UpdateRef u = commit(10, {a});
  refresh(11, {b}, {u});
  EXPECT_EQ(told->told, (Told{{true, 2, 1}}));
  EXPECT_EQ(read(b, mine[0]), 1);
  EXPECT_EQ(read(b, mine[2]), 0);
}

}  // namespace frugal::table_cache_test
