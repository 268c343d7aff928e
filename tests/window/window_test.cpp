// The window's rules: a row's next read, unwritten updates, what a gate waits for, and which thread
// may write what when.
//
// First each rule by itself. Then random walks compare the window with a model: declared rows by
// step, unwritten updates by row. The model has no read sets, pending updates or queues. A walk
// makes the window's calls in any order that the engine may, one piece at a time. Claims stay open
// while rows are linked, prepared and committed, as between threads. Finally threads link, write
// and take steps, and each allocation fails.
#include "window/window.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "support/inside.h"
#include "support/parts.h"

namespace frugal::window_test {

constexpr auto kUrgent = Window::Urgency::kUrgent;
constexpr auto kBackground = Window::Urgency::kBackground;

struct WindowTest : testing::Test {
  void open(const Window::Config& config, uint64_t next_commit = 100) {
    ASSERT_OK(window.open(config, next_commit));
  }
  void open(uint64_t staleness = 0, bool tree_heap = false) {
    open({.rows = 10000, .staleness = staleness, .placement = 2, .tree_heap = tree_heap});
  }
  PartRef link(uint64_t step, const Slots& slots, uint32_t rank = 0, bool owned = false) {
    PartRef part = resolved_part(pool, step, rank, slots);
    EXPECT_TRUE(window.link(part, 0, part->distinct, owned, kUrgent));
    return part;
  }
  UpdateRef prepare(uint64_t step, const std::vector<PartRef>& parts, bool declared) {
    UpdateRef update = make_update(pool, step, parts);
    update->make_list();
    window.add(update);
    EXPECT_TRUE(window.prepare(*update, declared, SIZE_MAX, kUrgent));
    return update;
  }
  UpdateRef commit(uint64_t step, const std::vector<PartRef>& parts, bool declared) {
    UpdateRef update = prepare(step, parts, declared);
    window.make_room(*update);
    window.commit(update.get(), step);
    return update;
  }
  // An update of rows that were not declared.
  UpdateRef commit(uint64_t step, const Slots& slots) {
    return commit(step, {resolved_part(pool, step, 0, slots)}, false);
  }
  // Slots of a claim, in its order.
  static Slots slots_of(const Claim& claim) {
    Slots slots;
    for (const Claim::Run& run : claim.runs)
      for (uint32_t i = run.begin; i < run.end; ++i)
        slots.push_back(run.update->slots[claim.rows[i]]);
    return slots;
  }
  Slots claim(uint64_t step, size_t max, Claim* claim) {
    window.claim(step, max, claim);
    return slots_of(*claim);
  }
  // Writes what a gate of `step` waits for.
  Slots write(uint64_t step) {
    Claim c;
    Slots all;
    while (window.claim(step, 64, &c)) {
      const Slots some = slots_of(c);
      all.insert(all.end(), some.begin(), some.end());
      window.finish(c);
    }
    return all;
  }
  uint8_t next_of(const PartRef& part, size_t row = 0) { return part->next.as<uint8_t>()[row]; }
  // The first step whose gate waits; UINT64_MAX: none of the next 63.
  uint64_t first_gate() {
    const uint64_t next_commit = window.next_commit();
    for (uint64_t step = next_commit; step < next_commit + kRing; ++step)
      if (window.pending_until(step)) return step;
    return UINT64_MAX;
  }

  BufferPool pool;
  Window window;
};

TEST_F(WindowTest, Opening) {
  EXPECT_FALSE(window.opened());
  {
    SystemFails fails(1);
    EXPECT_EQ(window.open({.rows = 100}, 5), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  EXPECT_FALSE(window.opened());
  open({.rows = 100}, 5);
  EXPECT_TRUE(window.opened());
  EXPECT_EQ(window.next_commit(), 5u);
  window.set_next_commit(9);
  ASSERT_OK(window.open({.rows = 1}, 3));  // it is open
  EXPECT_EQ(window.next_commit(), 9u);
  EXPECT_FALSE(window.any_pending());
  EXPECT_FALSE(window.pending_until(UINT64_MAX));
  EXPECT_FALSE(window.in_flight_until(UINT64_MAX));
  Claim c;
  EXPECT_FALSE(window.claim(UINT64_MAX, 5, &c));
  EXPECT_FALSE(window.backlogged());
}

// Each declaration of a row learns which one reads it next, in whatever order they come.
TEST_F(WindowTest, DeclarationsLearnTheNextRead) {
  open();
  const PartRef first = link(100, {7});
  EXPECT_EQ(next_of(first), kInfinity);
  const PartRef last = link(110, {7});
  EXPECT_EQ(next_of(first), 110 % kRing);
  const PartRef between = link(105, {7});
  EXPECT_EQ(next_of(first), 105 % kRing);
  EXPECT_EQ(next_of(between), 110 % kRing);
  EXPECT_EQ(next_of(last), kInfinity);
  // Of several of a step all learn, and none is the next of another.
  const PartRef other = link(105, {3, 7}, 1);
  EXPECT_EQ(next_of(other, 0), kInfinity);
  EXPECT_EQ(next_of(other, 1), 110 % kRing);
  const PartRef late = link(107, {7});
  EXPECT_EQ(next_of(between), 107 % kRing);
  EXPECT_EQ(next_of(other, 1), 107 % kRing);
  EXPECT_EQ(next_of(first), 105 % kRing);
}

TEST_F(WindowTest, StepsThatCannotBeLinked) {
  open();
  const PartRef far = resolved_part(pool, 100 + Window::kHorizon, 0, {1});
  EXPECT_FALSE(window.link(far, 0, 1, false, kUrgent));
  const PartRef past = resolved_part(pool, 99, 0, {1});
  EXPECT_FALSE(window.link(past, 0, 1, false, kUrgent));
  window.unlink(past);
  window.commit(nullptr, 100);
  EXPECT_TRUE(window.link(far, 0, 1, false, kUrgent));
  EXPECT_EQ(next_of(link(101, {1})), far->step % kRing);
}

// A rank that declares nothing of a table has a part without rows.
TEST_F(WindowTest, AnEmptyPart) {
  open();
  const PartRef none = link(101, {});
  link(101, {5});
  window.unlink(none);
  EXPECT_EQ(next_of(link(100, {5})), 101 % kRing);
}

TEST_F(WindowTest, CancelledDeclarations) {
  open();
  const PartRef a = link(100, {7, 8}), b = link(103, {7, 8}), c = link(103, {8}, 1),
                d = link(106, {7});
  commit(100, {a}, true);
  EXPECT_EQ(first_gate(), 103u);
  const PartRef e = link(102, {7});
  EXPECT_EQ(first_gate(), 102u);
  EXPECT_EQ(next_of(e), 103 % kRing);
  window.unlink(b);
  EXPECT_EQ(next_of(e), 106 % kRing);
  window.unlink(e);
  // 8 is read by the other rank still.
  EXPECT_EQ(first_gate(), 103u);
  EXPECT_EQ(write(103), Slots{8});
  EXPECT_EQ(first_gate(), 106u);
  window.unlink(d);
  EXPECT_EQ(first_gate(), UINT64_MAX);
  EXPECT_TRUE(window.any_pending());
}

// The priority of an update is the first declared step after its own that reads the row.
TEST_F(WindowTest, GatesWaitForWhatTheyRead) {
  open();
  const PartRef a = link(100, {1, 2, 3});
  link(101, {2});
  link(104, {1, 2});
  const UpdateRef u = prepare(100, {a}, true);
  EXPECT_FALSE(window.any_pending()) << "staged rows are not pending";
  Vector<uint32_t> soon;
  window.prepared_for_next(*u, &soon);
  EXPECT_EQ(soon, Vector<uint32_t>{2});
  window.commit(u.get(), 100);
  EXPECT_EQ(window.next_commit(), 101u);
  EXPECT_EQ(window.pending_rows(), 3u);
  EXPECT_EQ(first_gate(), 101u);
  EXPECT_EQ(write(101), Slots{2});
  EXPECT_EQ(first_gate(), 104u);
  EXPECT_EQ(write(103), Slots());
  EXPECT_EQ(write(104), Slots{1});
  EXPECT_EQ(first_gate(), UINT64_MAX);
  EXPECT_TRUE(window.pending_until(UINT64_MAX));
  EXPECT_EQ(write(200), Slots()) << "rows without a next read wait for a flush of all";
  EXPECT_EQ(write(UINT64_MAX), Slots{3});
  EXPECT_FALSE(window.any_pending());
  const WindowStats stats = window.stats();
  EXPECT_EQ(stats.enqueued, 3u);
  EXPECT_EQ(stats.dequeued, 3u);
  EXPECT_EQ(stats.pending, 0u);
}

TEST_F(WindowTest, ClaimedRowsAreNotWritten) {
  open();
  const PartRef a = link(100, {1, 2});
  link(102, {1, 2});
  commit(100, {a}, true);
  EXPECT_FALSE(window.in_flight_until(UINT64_MAX));
  Claim c, other;
  EXPECT_EQ(claim(102, 1, &c), Slots{1});
  EXPECT_TRUE(window.in_flight_until(102));
  EXPECT_FALSE(window.in_flight_until(101));
  EXPECT_EQ(claim(102, 8, &other), Slots{2});
  Claim none;
  EXPECT_FALSE(window.claim(UINT64_MAX, 8, &none)) << "each row once";
  EXPECT_EQ(window.pending_rows(), 2u);
  EXPECT_TRUE(window.pending_until(102));
  window.finish(c);
  EXPECT_EQ(c.runs[0].finished, nullptr);
  EXPECT_TRUE(window.pending_until(102)) << "of the other claim";
}

// The bytes of an update are given back when its last row is written, and not before.
TEST_F(WindowTest, TheLastRowEndsAnUpdate) {
  open();
  UpdateRef u = commit(100, Slots{1, 2, 3});
  std::atomic<uint64_t> total{0}, peak{0};
  u->bytes = 7;
  u->account(&total, &peak);
  Claim c;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(total.load(), 7u);
    ASSERT_TRUE(window.claim(UINT64_MAX, 1, &c));
    window.finish(c);
    EXPECT_EQ(c.runs[0].finished, i == 2 ? u : nullptr);
  }
  EXPECT_EQ(total.load(), 0u);
}

// Rises and falls reach rows that are queued, prepared and being written.
TEST_F(WindowTest, ALateDeclaration) {
  for (const bool tree_heap : {false, true}) {
    SCOPED_TRACE(tree_heap);
    Window fresh;
    ASSERT_OK(fresh.open({.rows = 100, .tree_heap = tree_heap}, 100));
    const auto declare = [&](uint64_t step, const Slots& slots) {
      PartRef part = resolved_part(pool, step, 0, slots);
      EXPECT_TRUE(fresh.link(part, 0, part->distinct, false, kBackground));
      return part;
    };
    const PartRef a = declare(100, {1, 2, 3});
    UpdateRef u = make_update(pool, 100, {a});
    u->make_list();
    fresh.add(u);
    ASSERT_TRUE(fresh.prepare(*u, true, SIZE_MAX, kBackground));
    declare(108, {1});
    fresh.commit(u.get(), 100);
    EXPECT_FALSE(fresh.pending_until(107));
    EXPECT_TRUE(fresh.pending_until(108));
    declare(106, {2});
    EXPECT_FALSE(fresh.pending_until(105));
    EXPECT_TRUE(fresh.pending_until(106));
    Claim c;
    ASSERT_TRUE(fresh.claim(106, 8, &c));
    EXPECT_EQ(slots_of(c), Slots{2});
    const PartRef sooner = declare(103, {2});
    EXPECT_TRUE(fresh.pending_until(103));
    EXPECT_TRUE(fresh.in_flight_until(103));
    Claim second;
    EXPECT_FALSE(fresh.claim(106, 8, &second)) << "a thread is writing it";
    fresh.unlink(sooner);
    EXPECT_FALSE(fresh.pending_until(105));
    EXPECT_TRUE(fresh.pending_until(106));
    fresh.finish(c);
    EXPECT_FALSE(fresh.pending_until(107));
    const WindowStats stats = fresh.stats();
    EXPECT_EQ(stats.rises, 2u);
    EXPECT_EQ(stats.falls, 1u);
  }
}

// Updates of a row are written in the order of their steps, one after the other.
TEST_F(WindowTest, YoungerUpdatesWaitForOlder) {
  open();
  const UpdateRef a = commit(100, Slots{1, 2}), b = commit(101, Slots{1, 3}),
                  c = commit(102, Slots{1});
  link(105, {1});
  EXPECT_EQ(window.pending_rows(), 3u);
  for (const UpdateRef& wanted : {a, b, c}) {
    EXPECT_EQ(first_gate(), 105u);
    Claim claim;
    ASSERT_TRUE(window.claim(105, 8, &claim));
    ASSERT_EQ(claim.runs.size(), 1u);
    EXPECT_EQ(claim.runs[0].update, wanted.get());
    EXPECT_EQ(slots_of(claim), Slots{1});
    Claim none;
    EXPECT_FALSE(window.claim(105, 8, &none));
    window.finish(claim);
  }
  EXPECT_EQ(first_gate(), UINT64_MAX);
  EXPECT_EQ(window.pending_rows(), 2u);
}

// An older update may be written while the later one is prepared: then that one is not blocked.
TEST_F(WindowTest, AnOlderUpdateIsWrittenMeanwhile) {
  open();
  commit(100, Slots{1, 2});
  const UpdateRef u = prepare(101, {resolved_part(pool, 101, 0, {1, 2})}, false);
  EXPECT_EQ(u->blocked_at_prepare.size(), 2u);
  Claim c;
  EXPECT_EQ(claim(UINT64_MAX, 1, &c), Slots{1});
  window.finish(c);
  window.make_room(*u);
  window.commit(u.get(), 101);
  EXPECT_EQ(window.pending_rows(), 2u);
  Slots order = write(UINT64_MAX);
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, (Slots{1, 2, 2}));
}

// Read sets remember kPast steps; unwritten updates of older ones are found all the same.
TEST_F(WindowTest, AncientUpdates) {
  open();
  commit(100, Slots{1, 2, 5000});
  for (uint64_t step = 101; step < 100 + 3 * Window::kPast; ++step) window.commit(nullptr, step);
  const uint64_t now = window.next_commit();
  commit(now, Slots{1, 3});
  link(now + 4, {1, 2});
  EXPECT_EQ(first_gate(), now + 4);
  const uint32_t asked[] = {0, 1, 2, 3, 4, kNoSlot, kMissingSlot};
  Vector<uint32_t> found;
  EXPECT_EQ(window.collect_pending(asked, 7, &found), 3u);
  EXPECT_EQ(found, (Vector<uint32_t>{1, 2, 3}));
  EXPECT_EQ(write(now + 4), (Slots{1, 2, 1}));
  EXPECT_TRUE(window.force(&asked[3], 1, UINT64_MAX));
  EXPECT_EQ(write(now + 1), Slots{3});
  EXPECT_EQ(window.pending_rows(), 1u);
}

// A stamp is 9 bits. The reads of a read set that was not touched for long seem to be near: too
// urgent, never too late.
TEST_F(WindowTest, WordsThatNobodyHasTouchedForLong) {
  for (const uint64_t passed :
       {uint64_t{70}, uint64_t{500}, uint64_t{511}, uint64_t{512}, uint64_t{600}, uint64_t{1030}}) {
    SCOPED_TRACE(passed);
    Window fresh;
    ASSERT_OK(fresh.open({.rows = 100}, 100));
    const auto declare = [&](uint64_t step) {
      PartRef part = resolved_part(pool, step, 0, {1});
      EXPECT_TRUE(fresh.link(part, 0, 1, false, kUrgent));
      return part;
    };
    declare(100);
    declare(110);
    for (uint64_t step = 100; step < 100 + passed; ++step) fresh.commit(nullptr, step);
    const uint64_t now = fresh.next_commit();
    const PartRef at = declare(now), later = declare(now + 15);
    UpdateRef u = make_update(pool, now, {at});
    u->make_list();
    fresh.add(u);
    ASSERT_TRUE(fresh.prepare(*u, true, SIZE_MAX, kUrgent));
    fresh.commit(u.get(), now);
    EXPECT_TRUE(fresh.pending_until(now + 15));
    EXPECT_FALSE(fresh.pending_until(now + 1)) << "step 110 is long gone";
    Claim c;
    EXPECT_TRUE(fresh.claim(now + 15, 1, &c));
    fresh.finish(c);
    EXPECT_FALSE(fresh.any_pending());
  }
}

// An undeclared lookup forces the rows' oldest updates, and checks again.
TEST_F(WindowTest, ForcedRows) {
  open();
  commit(100, Slots{1, 2, 3});
  commit(101, Slots{1});
  const uint32_t slots[] = {kMissingSlot, 1, 4, kNoSlot, 2};
  EXPECT_FALSE(window.force(slots, 5, 100)) << "of older steps there is none";
  EXPECT_EQ(first_gate(), UINT64_MAX);
  EXPECT_TRUE(window.force(slots, 5, 102));
  EXPECT_EQ(first_gate(), window.next_commit());
  Claim c;
  EXPECT_EQ(claim(window.next_commit(), 8, &c), (Slots{1, 2}));
  EXPECT_TRUE(window.force(slots, 5, 102)) << "they are not written yet";
  window.finish(c);
  EXPECT_FALSE(window.pending_until(window.next_commit()));
  EXPECT_TRUE(window.force(slots, 5, 102)) << "the later one of row 1";
  EXPECT_EQ(claim(window.next_commit(), 8, &c), Slots{1});
  window.finish(c);
  EXPECT_FALSE(window.force(slots, 5, 102));
  EXPECT_EQ(window.pending_rows(), 1u);
}

// Of a prepared update nothing can be forced: it is of a step that is not committed.
TEST_F(WindowTest, StagedRowsAreNotForced) {
  open();
  const UpdateRef u = prepare(100, {resolved_part(pool, 100, 0, {1})}, false);
  const uint32_t slot = 1;
  EXPECT_FALSE(window.force(&slot, 1, UINT64_MAX));
  EXPECT_EQ(window.collect_pending(&slot, 1, nullptr), 0u);
}

// A thread that forced rows may give up on them. When the next commit moves on, each has the
// priority of its next read again.
TEST_F(WindowTest, ForcedRowsThatNobodyWaitsForAnyMore) {
  open();
  const PartRef a = link(100, {1, 2});
  link(105, {1});
  commit(100, {a}, true);
  const uint32_t slots[] = {1, 2};
  EXPECT_TRUE(window.force(slots, 2, 101));
  EXPECT_EQ(first_gate(), 101u);
  Claim c;
  EXPECT_EQ(claim(101, 1, &c), Slots{1});
  UpdateRef prepared = prepare(101, {resolved_part(pool, 101, 0, {9})}, false);
  window.commit(prepared.get(), 101);
  EXPECT_EQ(first_gate(), 105u);
  EXPECT_TRUE(window.in_flight_until(105));
  EXPECT_FALSE(window.in_flight_until(104));
  window.finish(c);
  EXPECT_EQ(first_gate(), UINT64_MAX);
  EXPECT_EQ(window.pending_rows(), 2u);
}

TEST_F(WindowTest, Staleness) {
  open(3);
  const PartRef a = link(100, {1, 2});
  link(103, {1});
  link(104, {1});
  link(103, {2});
  commit(100, {a}, true);
  EXPECT_EQ(first_gate(), 104u) << "103 may still read the row without it";
  EXPECT_EQ(write(104), Slots{1});
  window.commit(nullptr, 101);
  EXPECT_EQ(first_gate(), UINT64_MAX);
  Window all;
  ASSERT_OK(all.open({.rows = 10, .staleness = UINT64_MAX}, 0));
  const PartRef b = resolved_part(pool, 0, 0, {1}), c = resolved_part(pool, 20, 0, {1});
  EXPECT_TRUE(all.link(b, 0, 1, false, kUrgent));
  EXPECT_TRUE(all.link(c, 0, 1, false, kUrgent));
  UpdateRef u = make_update(pool, 0, {b});
  u->make_list();
  all.add(u);
  all.prepare(*u, true, SIZE_MAX, kUrgent);
  all.commit(u.get(), 0);
  EXPECT_FALSE(all.pending_until(60)) << "nothing is urgent";
  EXPECT_TRUE(all.pending_until(UINT64_MAX));
}

// A row has one rank that may cache it, and ranks have as many rows each as chance gives them.
TEST(Placement, OneRankHasARow) {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u, 4096u}) {
    const Placement placement(ranks);
    std::vector<uint32_t> rows(ranks, 0);
    const uint32_t n = ranks == 4096 ? 2000 : 20000;
    for (uint32_t slot = 0; slot < n; ++slot)
      for (uint32_t rank = 0; rank < ranks; ++rank) rows[rank] += placement.may_cache(rank, slot);
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0u), n);
    if (ranks > 8) continue;
    for (const uint32_t of : rows) EXPECT_NEAR(of, n / ranks, n / ranks / 10) << ranks << " ranks";
  }
}

// Reads of a rank that has the row cached do not count; those of others do.
TEST_F(WindowTest, CachedRows) {
  open();
  Slots mine, theirs;  // rows of rank 0 and of rank 1
  for (uint32_t s = 0; mine.size() < 3 || theirs.empty(); ++s)
    (window.placement().may_cache(0, s) ? mine : theirs).push_back(s);
  const PartRef a = link(100, {mine[0], mine[1], mine[2], theirs[0]}, 0, true);
  link(101, {mine[0], theirs[0]}, 0, true);
  link(103, {mine[0], mine[1]}, 1, true);
  uint64_t next[4];
  const uint32_t asked[] = {mine[0], mine[1], theirs[0], mine[2]};
  window.next_owner_reads(asked, 4, 100, next, kUrgent);
  EXPECT_EQ(next[0], 101u);
  EXPECT_EQ(next[1], UINT64_MAX);
  EXPECT_EQ(next[2], UINT64_MAX) << "rank 0 does not own it";
  EXPECT_EQ(next[3], UINT64_MAX);
  window.next_owner_reads(asked, 1, 99, next, kBackground);
  EXPECT_EQ(next[0], 100u);
  window.set_cached(mine.data(), 2, true, nullptr, kBackground);
  commit(100, {a}, true);
  EXPECT_EQ(first_gate(), 101u);
  EXPECT_EQ(write(101), Slots{theirs[0]});
  EXPECT_EQ(first_gate(), 103u) << "of rank 1";
  uint64_t dirty = 0;
  const uint32_t out[] = {mine[0]};
  window.set_cached(out, 1, false, &dirty, kUrgent);
  EXPECT_EQ(dirty, 1u);
  EXPECT_EQ(first_gate(), 101u) << "it is a host row again, and its owner reads it";
  EXPECT_EQ(write(101), Slots{mine[0]});
  dirty = 0;
  window.set_cached(out, 1, false, &dirty, kUrgent);
  EXPECT_EQ(dirty, 0u);
}

// A step that is not to be, or not as it was prepared.
TEST_F(WindowTest, Unstaging) {
  open();
  commit(100, Slots{1});
  for (const bool whole : {true, false}) {
    Slots many;
    for (uint32_t i = 0; i < 3000; ++i) many.push_back(i);
    UpdateRef u = make_update(pool, 101, {resolved_part(pool, 101, 0, many)});
    u->make_list();
    window.add(u);
    EXPECT_EQ(window.prepare(*u, false, whole ? SIZE_MAX : 1, kBackground), whole);
    window.withdraw(u);
    EXPECT_EQ(window.pending_rows(), 1u);
    const uint32_t slot = 5;
    EXPECT_EQ(window.collect_pending(&slot, 1, nullptr), 0u);
  }
  commit(101, Slots{1, 2});
  EXPECT_EQ(write(UINT64_MAX), (Slots{1, 2, 1}));
}

// Rows are counted where those of all windows are from before they are pending until they are
// written.
TEST_F(WindowTest, PendingRowsOfSeveralWindows) {
  std::atomic<uint64_t> of_all{5};
  open({.rows = 100, .placement = 1, .pending_rows = &of_all});
  const UpdateRef u = prepare(100, {resolved_part(pool, 100, 0, {1, 2})}, false);
  EXPECT_EQ(of_all, 5u);
  window.make_room(*u);
  window.commit(u.get(), 100);
  EXPECT_EQ(of_all, 7u);
  commit(101, Slots{3});
  EXPECT_EQ(of_all, 8u);
  Claim c;
  EXPECT_EQ(claim(UINT64_MAX, 2, &c).size(), 2u);
  EXPECT_EQ(of_all, 8u) << "they are claimed, and not written";
  window.finish(c);
  EXPECT_EQ(of_all, 6u);
  write(UINT64_MAX);
  EXPECT_EQ(of_all, 5u);
}

TEST_F(WindowTest, Crowded) {
  open();
  for (uint64_t i = 0; i <= Window::kPast; ++i) {
    EXPECT_FALSE(window.backlogged());
    commit(100 + i, Slots{static_cast<uint32_t>(i)});
  }
  EXPECT_TRUE(window.backlogged());
  write(UINT64_MAX);
  EXPECT_FALSE(window.backlogged());
}

// --- Memory that fails ---------------------------------------------------------------------------

// Whatever allocation fails, the row is neither lost nor late: its gate waits, and a claim gives it
// once.
TEST_F(WindowTest, ADeclarationWithoutMemory) {
  for (const bool committed : {true, false}) {
    int64_t failed = 0;
    for (int64_t n = 1; n < 4; ++n) {
      SCOPED_TRACE(testing::Message() << "committed " << committed << ", allocation " << n);
      Window fresh;
      ASSERT_OK(fresh.open({.rows = 10000}, 100));
      const PartRef a = resolved_part(pool, 100, 0, {1, 2, 5}),
                    b = resolved_part(pool, 105, 0, {1});
      ASSERT_TRUE(fresh.link(a, 0, 3, false, kUrgent));
      UpdateRef u = make_update(pool, 100, {a});
      u->make_list();
      fresh.add(u);
      ASSERT_TRUE(fresh.prepare(*u, true, SIZE_MAX, kUrgent));
      if (committed) fresh.commit(u.get(), 100);
      bool linked = true;
      {
        HeapFails fails(n);
        try {
          linked = fresh.link(b, 0, 1, false, kUrgent);
        } catch (const std::bad_alloc&) {
          linked = false;
        }
        failed += heap_test_fail_after(0) == 0;
      }
      if (!linked) {
        ASSERT_TRUE(fresh.link(b, 0, 1, false, kUrgent));
      }
      if (!committed) fresh.commit(u.get(), 100);
      EXPECT_TRUE(fresh.pending_until(105));
      Claim c, all;
      ASSERT_TRUE(fresh.claim(105, 1, &c));
      EXPECT_TRUE(fresh.in_flight_until(105));
      EXPECT_TRUE(fresh.in_flight_until(UINT64_MAX));
      Slots got = slots_of(c);
      while (fresh.pending_until(105) && fresh.claim(105, 2, &all)) {
        const Slots more = slots_of(all);
        got.insert(got.end(), more.begin(), more.end());
        fresh.finish(all);
      }
      fresh.finish(c);
      EXPECT_FALSE(fresh.pending_until(105));
      EXPECT_EQ(std::count(got.begin(), got.end(), 1u), 1);
      while (fresh.claim(UINT64_MAX, 2, &all)) {
        const Slots more = slots_of(all);
        got.insert(got.end(), more.begin(), more.end());
        fresh.finish(all);
      }
      std::sort(got.begin(), got.end());
      EXPECT_EQ(got, (Slots{1, 2, 5}));
      EXPECT_FALSE(fresh.any_pending());
      // When all is written, gates are exact again.
      const PartRef d = resolved_part(pool, 101, 0, {7}), e = resolved_part(pool, 104, 0, {7});
      ASSERT_TRUE(fresh.link(d, 0, 1, false, kUrgent));
      ASSERT_TRUE(fresh.link(e, 0, 1, false, kUrgent));
      UpdateRef v = make_update(pool, 101, {d});
      v->make_list();
      fresh.add(v);
      fresh.prepare(*v, true, SIZE_MAX, kUrgent);
      fresh.commit(v.get(), 101);
      EXPECT_FALSE(fresh.pending_until(103));
      EXPECT_TRUE(fresh.pending_until(104));
    }
    EXPECT_GE(failed, 2) << "the list of parts and the item of the queue need memory";
  }
}

// The same where a blocked update becomes the oldest of its row: when the older one has been
// written, or at the commit.
TEST_F(WindowTest, ATurnWithoutMemory) {
  for (const bool at_commit : {true, false}) {
    SCOPED_TRACE(at_commit);
    Window fresh;
    ASSERT_OK(fresh.open({.rows = 10000}, 100));
    const auto prepared = [&](uint64_t step, const Slots& slots) {
      UpdateRef u = make_update(pool, step, {resolved_part(pool, step, 0, slots)});
      u->make_list();
      fresh.add(u);
      EXPECT_TRUE(fresh.prepare(*u, false, SIZE_MAX, kUrgent));
      return u;
    };
    const auto declare = [&](uint64_t step, const Slots& slots) {
      EXPECT_TRUE(fresh.link(resolved_part(pool, step, 0, slots), 0, slots.size(), false, kUrgent));
    };
    fresh.commit(prepared(100, {1, 50, 60}).get(), 100);
    declare(103, {1});
    const UpdateRef b = prepared(101, {1});
    fresh.make_room(*b);
    Claim c;
    if (!at_commit) fresh.commit(b.get(), 101);
    EXPECT_TRUE(fresh.claim(103, 1, &c));
    EXPECT_EQ(slots_of(c), Slots{1});
    if (at_commit) fresh.finish(c);
    declare(107, {50});  // which takes the block that the queue has kept
    {
      HeapFails fails(1);
      if (at_commit)
        fresh.commit(b.get(), 101);
      else
        fresh.finish(c);
      EXPECT_EQ(heap_test_fail_after(0), 0) << "it wants memory";
    }
    EXPECT_EQ(fresh.pending_rows(), 3u);
    EXPECT_TRUE(fresh.pending_until(102)) << "a row is somewhere: gates wait for all";
    Slots got;
    while (fresh.claim(102, 2, &c)) {
      const Slots some = slots_of(c);
      got.insert(got.end(), some.begin(), some.end());
      fresh.finish(c);
    }
    std::sort(got.begin(), got.end());
    EXPECT_EQ(got, (Slots{1, 50, 60}));
    EXPECT_FALSE(fresh.any_pending());
  }
}

// An update that cannot be prepared has changed nothing.
TEST_F(WindowTest, AnUpdateWithoutMemory) {
  Slots many;
  for (uint32_t i = 0; i < 5000; ++i) many.push_back(2 * i);
  for (int64_t n = 1;; ++n) {
    ASSERT_LT(n, 100);
    Window fresh;
    ASSERT_OK(fresh.open({.rows = 10000}, 100));
    UpdateRef u = make_update(pool, 100, {resolved_part(pool, 100, 0, many)});
    u->make_list();
    bool added = false, failed = false;
    {
      HeapFails fails(n);
      try {
        fresh.add(u);
        added = true;
        fresh.prepare(*u, false, SIZE_MAX, kUrgent);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    if (!failed) {
      EXPECT_GT(n, 6);
      break;
    }
    if (added) fresh.withdraw(u);
    EXPECT_FALSE(fresh.backlogged());
    EXPECT_FALSE(fresh.any_pending());
    UpdateRef again = make_update(pool, 100, {resolved_part(pool, 100, 0, many)});
    again->make_list();
    fresh.add(again);
    ASSERT_TRUE(fresh.prepare(*again, false, SIZE_MAX, kUrgent));
    fresh.commit(again.get(), 100);
    EXPECT_EQ(fresh.pending_rows(), 5000u);
    Claim c;
    size_t got = 0;
    while (fresh.claim(UINT64_MAX, 700, &c)) {
      got += c.rows.size();
      fresh.finish(c);
    }
    EXPECT_EQ(got, 5000u);
  }
}

// --- Walks ---------------------------------------------------------------------------------------

constexpr uint64_t kNever = UINT64_MAX;

// A window and what it should know. Rows have few reads and updates; all is looked up by searching.
class Walk {
 public:
  explicit Walk(uint64_t seed) : random_(seed) {
    const uint64_t choices[] = {0, 0, 0, 0, 1, 3, kNever};
    config_.staleness = choices[random_.below(7)];
    ranks_ = 1 + static_cast<uint32_t>(random_.below(4));
    config_.placement = ranks_;
    config_.tree_heap = random_.one_in(4);
    // Most walks meet the same few rows again and again. Some have updates of several pages, and
    // few steps.
    large_ = random_.one_in(15);
    config_.rows = large_ ? 6000 : 3 + random_.below(60);
    most_ = large_ ? 2500 : 1 + random_.below(20);
    lazy_ = random_.one_in(3);  // little is written in the background: updates become old
    if (random_.one_in(3))
      for (uint32_t r = 0; r < ranks_; ++r) has_cache_[r] = random_.one_in(2);
    next_commit_ = random_.below(1000);
    EXPECT_EQ(window_.open(config_, next_commit_), FRUGAL_OK);
  }

  void run() {
    const int operations = large_ ? 50 : 300;
    for (int i = 0; i < operations && !testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE(testing::Message() << "operation " << i << ", step " << next_commit_);
      operation();
      check();
    }
    if (testing::Test::HasFailure()) return;
    while (!claims_.empty()) finish(0);
    while (window_.any_pending() && !testing::Test::HasFailure()) {
      claim(kNever, 500);
      if (testing::Test::HasFailure()) return;
      ASSERT_FALSE(claims_.empty()) << "rows are pending and no thread can write them";
      finish(0);
    }
    check();
  }

 private:
  struct Link {
    PartRef part;
    bool owned;
    size_t linked = 0;
    bool reads(uint32_t slot) const {
      const uint32_t* rows = part->row_slots();
      const uint32_t* at = std::lower_bound(rows, rows + linked, slot);
      return at != rows + linked && *at == slot;
    }
    bool whole() const { return linked == part->distinct; }
  };
  struct Unwritten {
    UpdateRef update;
    bool claimed = false;
  };
  using Bounds = std::pair<uint64_t, uint64_t>;

  void operation() {
    switch (random_.below(lazy_ ? 16 : 20)) {
      case 0:
      case 1:
      case 2:
        return declare();
      case 3:
      case 4:
        return go_on_linking();
      case 5:
        return cancel();
      case 6:
      case 7:
        return prepare();
      case 8:
      case 9:
      case 10:
        return commit();
      case 11:
        return withdraw();
      case 12:
        return random_.one_in(4) ? fresh() : finish(0);
      case 13:
        return cache();
      case 14:
        return ask();
      case 15:
      case 16:
        if (claims_.size() < 4)
          claim(random_.one_in(2) ? kNever : next_commit_ + random_.below(6),
                1 + random_.below(12));
        return;
      default:
        return finish(random_.below(4));
    }
  }

  // --- What the window is asked to do ---

  Slots some_slots() {
    Slots slots(1 + random_.below(most_));
    if (large_) {
      // Neighbours, as of a table whose rows are nearly all used.
      const uint64_t from = random_.below(config_.rows);
      for (uint32_t i = 0; i < slots.size(); ++i)
        slots[i] = static_cast<uint32_t>((from + i) % config_.rows);
    } else {
      for (uint32_t& s : slots) s = static_cast<uint32_t>(random_.below(config_.rows));
    }
    return slots;
  }

  void declare() {
    if (links_.size() > (large_ ? 5 : 14)) return;
    const uint32_t rank = static_cast<uint32_t>(random_.below(ranks_));
    const uint64_t step =
        next_commit_ + random_.below(random_.one_in(8) ? Window::kHorizon + 3 : 8);
    Link link{resolved_part(pool_, step, rank, some_slots()), has_cache_[rank]};
    if (step >= next_commit_ + Window::kHorizon) {
      EXPECT_FALSE(window_.link(link.part, 0, SIZE_MAX / 2, link.owned, urgency()));
      return;
    }
    links_.push_back(link);
    link_piece(links_.back());
  }

  void link_piece(Link& link) {
    const size_t n =
        random_.one_in(2) ? link.part->distinct : 1 + random_.below(link.part->distinct);
    EXPECT_TRUE(window_.link(link.part, link.linked, n, link.owned, urgency()));
    link.linked = std::min(link.part->distinct, link.linked + n);
    read_sets_only_ |= link.owned;
  }

  void go_on_linking() {
    for (Link& link : links_)
      if (!link.whole()) return link_piece(link);
    if (random_.one_in(10) && next_commit_ > 0) {
      const PartRef late = resolved_part(pool_, next_commit_ - 1, 0, some_slots());
      EXPECT_FALSE(window_.link(late, 0, late->distinct, false, urgency()));
    }
  }

  void cancel() {
    if (links_.empty()) return;
    const size_t at = random_.below(links_.size());
    // (Nothing cancels a declaration that is being linked, nor one of a step whose update is
    // prepared. While another declaration is half linked, the rest of it seems to be linked, too,
    // when one of its step is cancelled: this test does not distinguish that.)
    for (const Link& link : links_)
      if (!link.whole()) return;
    if (prepared_ && links_[at].part->step == next_commit_) return;
    const Link gone = links_[at];
    links_.erase(links_.begin() + static_cast<ptrdiff_t>(at));
    window_.unlink(gone.part);
  }

  // Begins to take a step's update in, or goes on with it.
  void prepare() {
    if (prepared_) {
      if (prepared_->prepared_rows < prepared_->n) prepare_piece();
      return;
    }
    std::map<uint32_t, PartRef> declared;
    bool simple = true;
    for (const Link& link : links_) {
      if (link.part->step != next_commit_) continue;
      simple &= link.whole() && declared.emplace(link.part->rank, link.part).second;
    }
    std::vector<PartRef> parts;
    as_declared_ = simple && !declared.empty() && !random_.one_in(4);
    if (as_declared_) {
      // All ranks have passed the step's gate.
      while (!claims_.empty()) finish(0);
      while (window_.pending_until(next_commit_) && !testing::Test::HasFailure()) {
        claim(next_commit_, 1 + random_.below(100));
        if (claims_.empty()) {
          ADD_FAILURE() << "a gate waits for rows that no thread can write";
          return;
        }
        finish(0);
      }
      for (auto& [rank, part] : declared) parts.push_back(part);
    } else {
      for (uint32_t r = 0; r < ranks_; ++r)
        if (parts.empty() || random_.one_in(2))
          parts.push_back(resolved_part(pool_, next_commit_, r, some_slots()));
    }
    prepared_ = make_update(pool_, next_commit_, parts);
    prepared_->make_list();
    late_.clear();
    window_.add(prepared_);
    prepare_piece();
  }

  void prepare_piece() {
    const size_t before = prepared_->prepared_rows;
    const bool all =
        window_.prepare(*prepared_, as_declared_, random_.one_in(2) ? 1 : SIZE_MAX, urgency());
    ASSERT_EQ(all, prepared_->prepared_rows == prepared_->n);
    ASSERT_GT(prepared_->prepared_rows, before);
    const bool by_read_sets = !as_declared_ || read_sets_only_ || config_.staleness != 0;
    for (size_t i = before; i < prepared_->prepared_rows; ++i) {
      const uint32_t slot = prepared_->slots[i];
      if (by_read_sets) touched_.insert(slot);
      if (pending_.count(slot)) late_.insert(slot);
    }
  }

  void withdraw() {
    if (!prepared_ || !random_.one_in(3)) return;
    window_.withdraw(prepared_);
    prepared_ = nullptr;
  }

  void commit() {
    if (prepared_)
      while (prepared_->prepared_rows < prepared_->n) prepare_piece();
    if (prepared_) {
      window_.make_room(*prepared_);
      window_.commit(prepared_.get(), next_commit_);
      for (size_t i = 0; i < prepared_->n; ++i)
        pending_[prepared_->slots[i]].push_back({prepared_});
      left_[prepared_.get()] = prepared_->n;
      enqueued_ += prepared_->n;
    } else {
      window_.commit(nullptr, next_commit_);
    }
    std::erase_if(links_, [&](const Link& link) { return link.part->step == next_commit_; });
    touched_.clear();
    prepared_ = nullptr;
    ++next_commit_;
  }

  void claim(uint64_t step, size_t max) {
    Claim c;
    const bool any = window_.claim(step, max, &c);
    ASSERT_EQ(any, !c.ids.empty());
    ASSERT_EQ(c.ids.size(), c.rows.size());
    ASSERT_LE(c.ids.size(), max);
    uint32_t at = 0;
    uint64_t latest = 0;
    for (const Claim::Run& run : c.runs) {
      ASSERT_EQ(run.begin, at);
      ASSERT_GE(run.end, at);
      for (; at < run.end; ++at) {
        const uint32_t slot = run.update->slots[c.rows[at]];
        auto of = pending_.find(slot);
        ASSERT_NE(of, pending_.end()) << "row " << slot << " is not pending";
        ASSERT_EQ(of->second.front().update.get(), run.update)
            << "row " << slot << " has an older update";
        ASSERT_FALSE(of->second.front().claimed) << "row " << slot << " is being written";
        of->second.front().claimed = true;
        const uint64_t low = bounds(slot, run.update->step).first;
        ASSERT_LE(low, std::max(step, next_commit_)) << "row " << slot;
        latest = std::max(latest, low);
      }
    }
    ASSERT_EQ(at, c.ids.size());
    for (auto& [slot, updates] : pending_) {
      if (updates.front().claimed) continue;
      const uint64_t high = bounds(slot, updates.front().update->step).second;
      ASSERT_GE(high, latest) << "row " << slot << " is more urgent and was left";
      // (A claim may have fewer rows than there are: it meets stale queue items of prepared rows.)
      if (!any) {
        ASSERT_TRUE(step != kNever && high > step) << "row " << slot << " was left";
      }
    }
    dequeued_ += at;
    if (any) claims_.push_back(std::move(c));
  }

  void finish(size_t which) {
    if (claims_.empty()) return;
    auto at = claims_.begin() + static_cast<ptrdiff_t>(which % claims_.size());
    Claim c = std::move(*at);
    claims_.erase(at);
    std::map<StepUpdate*, bool> ended;
    for (const Claim::Run& run : c.runs)
      for (uint32_t i = run.begin; i < run.end; ++i) {
        const uint32_t slot = run.update->slots[c.rows[i]];
        auto of = pending_.find(slot);
        of->second.pop_front();
        if (of->second.empty()) pending_.erase(of);
        if (--left_[run.update] == 0) ended[run.update] = true;
      }
    window_.finish(c);
    for (const Claim::Run& run : c.runs)
      if (run.finished) {
        ASSERT_EQ(run.finished.get(), run.update);
        ASSERT_TRUE(ended.count(run.update)) << "rows of it are unwritten";
        ended.erase(run.update);
      }
    ASSERT_TRUE(ended.empty()) << "an update is written without notice";
  }

  // An undeclared lookup: its rows are written, whichever step reads them next.
  void fresh() {
    while (!claims_.empty()) finish(0);
    const Slots slots = some_slots();
    const uint64_t before = random_.one_in(2)
                                ? kNever
                                : next_commit_ - std::min<uint64_t>(next_commit_, random_.below(5));
    for (int round = 0; round < 1000; ++round) {
      bool any = false;
      for (uint32_t slot : slots)
        if (auto of = pending_.find(slot); of != pending_.end())
          any |= of->second.front().update->step < before;
      ASSERT_EQ(window_.force(slots.data(), slots.size(), before), any);
      if (!any) return;
      forcing_ = true;
      ASSERT_TRUE(window_.pending_until(next_commit_));
      claim(next_commit_, 1 + random_.below(30));
      forcing_ = false;
      if (testing::Test::HasFailure()) return;
      ASSERT_FALSE(claims_.empty());
      finish(0);
    }
    ADD_FAILURE() << "forced rows are never written";
  }

  void cache() {
    Slots slots;
    for (uint32_t s : some_slots()) {
      if (has_cache_[owner(s)] && std::find(slots.begin(), slots.end(), s) == slots.end())
        slots.push_back(s);
    }
    if (slots.empty()) return;
    const bool in = random_.one_in(2);
    uint64_t dirty = 0, wanted = 0;
    window_.set_cached(slots.data(), slots.size(), in, &dirty, urgency());
    read_sets_only_ = true;
    for (uint32_t s : slots) {
      in ? (void)cached_.insert(s) : (void)cached_.erase(s);
      wanted += !in && pending_.count(s);
    }
    ASSERT_EQ(dirty, wanted);
  }

  // Questions that change nothing.
  void ask() {
    const Slots slots = some_slots();
    const uint64_t after = next_commit_ + random_.below(4) - std::min<uint64_t>(next_commit_, 1);
    std::vector<uint64_t> next(slots.size());
    window_.next_owner_reads(slots.data(), slots.size(), after, next.data(), urgency());
    for (size_t i = 0; i < slots.size(); ++i) {
      uint64_t wanted = kNever;
      for (const Link& link : links_)
        if (apart(link, slots[i]) && link.part->step > after && link.reads(slots[i]))
          wanted = std::min(wanted, link.part->step);
      ASSERT_EQ(next[i], wanted) << "row " << slots[i] << " after " << after;
    }
    if (!prepared_ || prepared_->prepared_rows < prepared_->n) return;
    Vector<uint32_t> soon, wanted;
    window_.prepared_for_next(*prepared_, &soon);
    for (size_t i = 0; i < prepared_->n; ++i) {
      const uint32_t slot = prepared_->slots[i];
      if (!late_.count(slot) && bounds(slot, next_commit_).second == next_commit_ + 1)
        wanted.push_back(slot);
    }
    ASSERT_EQ(soon, wanted);
  }

  Window::Urgency urgency() { return random_.one_in(2) ? kUrgent : kBackground; }

  // --- What it should know ---

  uint32_t owner(uint32_t slot) const {
    uint32_t rank = 0;
    while (!config_.placement.may_cache(rank, slot)) ++rank;
    return rank;
  }
  bool apart(const Link& link, uint32_t slot) const {
    return link.owned && owner(slot) == link.part->rank;
  }

  // By when an update of `step` to the row has to be written: between these. A step that was
  // prepared by read sets seems to read its rows until it is committed; a row that is forced seems
  // to be read now.
  Bounds bounds(uint32_t slot, uint64_t step) const {
    // (Without a bound on staleness a row waits for 64 steps at most.)
    const uint64_t first =
        std::max(next_commit_, step + 1 + std::min<uint64_t>(config_.staleness, kRing));
    uint64_t high = kNever;
    for (const Link& link : links_)
      if (link.part->step >= first && link.part->step < high &&
          !(apart(link, slot) && cached_.count(slot)) && link.reads(slot))
        high = link.part->step;
    uint64_t low = high;
    if (touched_.count(slot) && first <= next_commit_) low = next_commit_;
    return {forcing_ ? next_commit_ : low, high};
  }

  void check() {
    uint64_t low = kNever, high = kNever, low_claimed = kNever,
             high_claimed = kNever;  // of the most urgent row
    bool any_claimed = false;
    for (auto& [slot, updates] : pending_) {
      const Bounds b = bounds(slot, updates.front().update->step);
      low = std::min(low, b.first);
      high = std::min(high, b.second);
      if (!updates.front().claimed) continue;
      any_claimed = true;
      low_claimed = std::min(low_claimed, b.first);
      high_claimed = std::min(high_claimed, b.second);
    }
    ASSERT_EQ(window_.next_commit(), next_commit_);
    ASSERT_EQ(window_.pending_rows(), pending_.size());
    ASSERT_EQ(window_.any_pending(), !pending_.empty());
    ASSERT_EQ(window_.pending_until(kNever), !pending_.empty());
    ASSERT_EQ(window_.in_flight_until(kNever), any_claimed);
    for (uint64_t step = next_commit_; step < next_commit_ + Window::kHorizon + 2; ++step) {
      const bool waits = window_.pending_until(step), in_flight = window_.in_flight_until(step);
      ASSERT_TRUE(waits || high > step) << "the gate of step " << step << " does not wait";
      ASSERT_TRUE(!waits || low <= step) << "the gate of step " << step << " waits for nothing";
      ASSERT_TRUE(in_flight || high_claimed > step) << "step " << step;
      ASSERT_TRUE(!in_flight || low_claimed <= step) << "step " << step;
    }
    if (large_ && !random_.one_in(8)) return;
    Slots all(config_.rows);
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    Vector<uint32_t> found;
    ASSERT_EQ(window_.collect_pending(all.data(), all.size(), &found), pending_.size());
    ASSERT_TRUE(std::equal(found.begin(), found.end(), pending_.begin(), pending_.end(),
                           [](uint32_t slot, auto& of) { return slot == of.first; }));
    const WindowStats stats = window_.stats();
    ASSERT_EQ(stats.enqueued, enqueued_);
    ASSERT_EQ(stats.dequeued, dequeued_);
    if (read_sets_only_ || config_.staleness != 0) return;
    for (const Link& link : links_)
      for (size_t i = 0; i < link.linked; ++i) {
        uint64_t next = kNever;
        for (const Link& other : links_)
          if (other.part->step > link.part->step && other.part->step < next &&
              other.reads(link.part->row_slots()[i]))
            next = other.part->step;
        ASSERT_EQ(link.part->next.as<uint8_t>()[i], next == kNever ? kInfinity : next % kRing)
            << "row " << link.part->row_slots()[i] << " of step " << link.part->step;
      }
  }

  Random random_;
  BufferPool pool_;
  Window window_;
  Window::Config config_;
  uint32_t ranks_ = 1;
  bool large_, lazy_, read_sets_only_ = false;
  size_t most_;
  bool has_cache_[4] = {};
  uint64_t next_commit_;
  std::vector<Link> links_;                            // of steps that are not committed
  std::map<uint32_t, std::deque<Unwritten>> pending_;  // by row, the oldest first
  std::map<StepUpdate*, size_t> left_;                 // rows of updates that are unwritten
  std::vector<Claim> claims_;
  UpdateRef prepared_;
  bool as_declared_ = false;
  std::set<uint32_t> late_;     // rows of the prepared update that had older ones
  std::set<uint32_t> touched_;  // rows that were prepared by read sets for the step `next_commit_`
  std::set<uint32_t> cached_;
  bool forcing_ = false;
  uint64_t enqueued_ = 0, dequeued_ = 0;
};

TEST(WindowWalks, AsTheModelSays) {
  const uint64_t rounds = test_rounds(60);
  for (uint64_t i = 0; i < rounds && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "FRUGAL_TEST_SEED=" << test_seed() + i);
    Walk(test_seed() + i).run();
  }
}

// --- Threads -------------------------------------------------------------------------------------

// One thread takes steps, one links and cancels declarations ahead of it, others write. At a gate
// all rows that the step reads have all their updates; no row is written by two at once, none
// twice, none before its older update.
class Threads {
 public:
  Threads(uint64_t seed, bool tree_heap, bool owned) : seed_(seed), owned_(owned) {
    EXPECT_EQ(window_.open({.rows = kRows, .placement = kRanks, .tree_heap = tree_heap}, 0),
              FRUGAL_OK);
    for (uint64_t s = 0; s < kSteps; ++s)
      for (uint32_t r = 0; r < kRanks; ++r) {
        Random random(seed_ + s * kRanks + r);
        Slots slots(1 + random.below(60));
        for (uint32_t& slot : slots) slot = static_cast<uint32_t>(random.below(kRows));
        parts_[s][r] = resolved_part(pool_, s, r, slots);
      }
  }
  void run() {
    std::vector<std::thread> threads;
    threads.emplace_back([&] { link_all(); });
    for (int i = 0; i < 2; ++i) threads.emplace_back([&] { write_all(); });
    for (uint64_t s = 0; s < kSteps && ok_.load(); ++s) step(s);
    over_.store(true);
    for (std::thread& t : threads) t.join();
    while (write(UINT64_MAX, 64)) {
    }
    ASSERT_EQ(window_.pending_rows(), 0u);
    for (uint32_t slot = 0; slot < kRows && ok_.load(); ++slot)
      ASSERT_EQ(written_[slot], wanted_[slot]) << slot;
    ASSERT_TRUE(ok_.load()) << "a row was written by two, twice or too early";
  }

 private:
  static constexpr uint32_t kRows = 300, kRanks = 2;
  static constexpr uint64_t kSteps = 120, kAhead = 6;

  void link_all() {
    Random random(seed_ + 7);
    for (uint64_t s = 0; s < kSteps; ++s) {
      while (s > committed_.load() + kAhead && ok_.load()) std::this_thread::yield();
      for (uint32_t r = 0; r < kRanks; ++r) {
        if (!ok_.load()) return;
        const PartRef& part = parts_[s][r];
        // One that is taken back.
        Slots slots(1 + random.below(60));
        for (uint32_t& slot : slots) slot = static_cast<uint32_t>(random.below(kRows));
        const PartRef other = resolved_part(pool_, s, r, slots);
        if (window_.link(other, 0, other->distinct, owned_, kBackground)) window_.unlink(other);
        for (size_t at = 0; at < part->distinct; at += 16)
          if (!window_.link(part, at, 16, owned_, kBackground)) ok_.store(false);
      }
      linked_.store(s + 1);
    }
  }
  void write_all() {
    while (!over_.load())
      if (!write(UINT64_MAX, 16)) std::this_thread::yield();
  }
  bool write(uint64_t step, size_t max) {
    Claim c;
    if (!window_.claim(step, max, &c)) return false;
    for (const Claim::Run& run : c.runs)
      for (uint32_t i = run.begin; i < run.end; ++i) {
        const uint32_t slot = run.update->slots[c.rows[i]];
        if (writing_[slot].exchange(true)) ok_.store(false);
        // No atomics from here on: what orders these writes is the window.
        if (written_[slot] >= static_cast<int64_t>(run.update->step)) ok_.store(false);
        written_[slot] = static_cast<int64_t>(run.update->step);
        writing_[slot].store(false);
      }
    window_.finish(c);
    return true;
  }
  void step(uint64_t s) {
    while (linked_.load() <= s && ok_.load()) std::this_thread::yield();
    while (window_.pending_until(s) && ok_.load())
      if (!write(s, 32)) std::this_thread::yield();
    std::vector<PartRef> parts;
    for (const PartRef& part : parts_[s]) {
      for (size_t i = 0; i < part->distinct; ++i) {
        const uint32_t slot = part->row_slots()[i];
        if (written_[slot] != wanted_[slot]) ok_.store(false);
      }
      parts.push_back(part);
    }
    UpdateRef update = make_update(pool_, s, parts);
    update->make_list();
    window_.add(update);
    window_.prepare(*update, true, SIZE_MAX, kBackground);
    for (size_t i = 0; i < update->n; ++i) wanted_[update->slots[i]] = static_cast<int64_t>(s);
    window_.make_room(*update);
    window_.commit(update.get(), s);
    committed_.store(s);
  }

  const uint64_t seed_;
  const bool owned_;
  BufferPool pool_;
  PartRef parts_[kSteps][kRanks];
  Window window_;
  std::atomic<uint64_t> linked_{0}, committed_{0};
  std::atomic<bool> over_{false}, ok_{true};
  std::vector<int64_t> written_ = std::vector<int64_t>(kRows, -1),
                       wanted_ = written_;  // by row, its last step
  std::vector<std::atomic<bool>> writing_ = std::vector<std::atomic<bool>>(kRows);
};

TEST(WindowThreads, EachUpdateOnceAndInTime) {
  if (testing::UnitTest::GetInstance()->failed_test_count() != 0)
    GTEST_SKIP() << "threads may wait for ever where a rule is broken";
  const uint64_t rounds = test_rounds(1);
  for (uint64_t i = 0; i < rounds && !testing::Test::HasFailure(); ++i)
    for (const bool tree_heap : {false, true})
      for (const bool owned : {false, true}) {
        SCOPED_TRACE(testing::Message() << "FRUGAL_TEST_SEED=" << test_seed() + i << ", tree_heap "
                                        << tree_heap << ", owned " << owned);
        Threads(test_seed() + i, tree_heap, owned).run();
      }
}

}  // namespace frugal::window_test
