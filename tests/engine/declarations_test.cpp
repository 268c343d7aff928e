// Declarations agree with a model that searches every part: what is resolved, linked and warmed
// next, and what a gate waits for.
//
// Also: parts by step, rank and table; batches that are removed while a thread works on them, alone
// or with their rank. Limits on a rank's declarations for a step; parts that hold slots of deleted
// rows.
#include "engine/declarations.h"

#include <map>
#include <set>
#include <vector>

#include "support/inside.h"
#include "support/parts.h"

namespace frugal::declarations_test {

constexpr uint32_t kRanks = 3;
constexpr uint64_t kHorizon = 4;

struct DeclarationsTest : testing::Test {
  MemoryBudget budget;
  BufferPool pool;
  Declarations all;
  Vector<TableRef> tables;
  std::vector<BatchRef> entered;

  TableRef table(uint32_t number) {
    TableRef t = std::allocate_shared<Table>(HeapAllocator<Table>());
    t->number = number;
    Rows::Config c;
    c.capacity = 1000;
    c.layout = RowLayout::of(4, FRUGAL_SGD);
    c.init = arith::init_spec(FRUGAL_INIT_CONSTANT, 0, 0, 1000, 4, number, FRUGAL_SGD, 0);
    EXPECT_OK(t->rows.open(c, &budget));
    EXPECT_OK(
        t->window.open({.rows = 1000, .staleness = 0, .placement = kRanks, .tree_heap = false}, 0));
    return t;
  }
  void SetUp() override {
    for (uint32_t i = 0; i < 4; ++i) tables.push_back(table(i));
  }
  BatchRef batch(uint64_t step, uint32_t rank, const std::vector<uint32_t>& of,
                 Part::State state = Part::kDeclared) {
    auto b = std::allocate_shared<Batch>(HeapAllocator<Batch>());
    b->step = step;
    b->rank = rank;
    for (uint32_t i : of) {
      PartRef p = resolved_part(pool, step, rank, {1, 2, 3});
      p->state.store(state);
      b->parts.push_back(p);
      b->tables.push_back(tables[i]);
    }
    b->index();
    return b;
  }
  BatchRef enter(uint64_t step, uint32_t rank, const std::vector<uint32_t>& of) {
    BatchRef b = batch(step, rank, of);
    bool alone;
    EXPECT_OK(all.add(b, false, nullptr, &alone));
    entered.push_back(b);
    return b;
  }
  static Declarations::Share only(const BatchRef& b) { return {b->step, b->rank, b.get()}; }
  void link(const Declarations::Item& item) {
    Window& window = item.table()->window;
    EXPECT_TRUE(window.link(item.part(), 0, SIZE_MAX, false, Window::Urgency::kUrgent));
    all.linked(item, true);
  }
  bool next(uint64_t up_to, Declarations::Item* item) {
    bool stale;
    return all.next_to_resolve(up_to, item, &stale);
  }
  using Found = std::vector<std::pair<const Batch*, size_t>>;
  Found each(const Declarations::Which& which) {
    Found found;
    Lock lock(all.mutex());
    all.each(which, [&](const Batch& b, size_t i) { found.emplace_back(&b, i); });
    return found;
  }
};

TEST_F(DeclarationsTest, AreResolvedAndLinkedInTheOrderOfSteps) {
  bool alone;
  const BatchRef late = batch(7, 0, {0}), soon = batch(5, 1, {2, 1});
  ASSERT_OK(all.add(late, false, nullptr, &alone));
  EXPECT_TRUE(alone);
  ASSERT_OK(all.add(soon, false, nullptr, &alone));
  EXPECT_FALSE(alone);
  uint64_t first, last;
  ASSERT_TRUE(all.range(&first, &last));
  EXPECT_TRUE(first == 5 && last == 7);

  Declarations::Item a, b, c, none;
  ASSERT_TRUE(next(UINT64_MAX, &a) && next(6, &b));
  EXPECT_TRUE(a.batch == soon && a.index == 0 && b.batch == soon && b.index == 1);
  EXPECT_FALSE(next(6, &none));
  EXPECT_EQ(all.unready(6, kNoStep), 5u);
  all.resolved(b, true);
  EXPECT_EQ(all.unready(6, kNoStep), 5u);
  all.resolved(a, true);
  EXPECT_EQ(all.unready(6, kNoStep), kNoStep);
  EXPECT_EQ(all.unready(6, 5), 5u);  // not linked
  EXPECT_EQ(all.unready(6, 6), kNoStep);
  EXPECT_EQ(all.unready(7, 6), 7u);

  EXPECT_FALSE(all.next_to_link(6, 9, &none));
  ASSERT_TRUE(all.next_to_link(5, 9, &a) && all.next_to_link(5, 9, &b));
  EXPECT_TRUE(a.index == 0 && b.index == 1);
  EXPECT_FALSE(all.next_to_link(5, 9, &none));
  all.linked(a, false);  // there was no memory: again
  ASSERT_TRUE(all.next_to_link(5, 9, &c));
  EXPECT_EQ(c.index, 0u);
  link(c);
  EXPECT_EQ(all.unready(6, 5), 5u);
  link(b);
  EXPECT_EQ(all.unready(6, 5), kNoStep);
}

TEST_F(DeclarationsTest, NobodyTakesABatchOutThatIsBeingWorkedOn) {
  const BatchRef one = enter(3, 0, {0}), other = enter(3, 1, {0});
  Declarations::Item item, link;
  ASSERT_TRUE(next(3, &item));
  ASSERT_TRUE(all.close(only(one)));
  EXPECT_FALSE(all.take_out(only(one)));
  all.resolved(item, true);
  ASSERT_TRUE(all.next_to_link(3, 4, &link));
  // The other one, too: it would lose what they have in common.
  ASSERT_TRUE(all.close(only(other)));
  EXPECT_FALSE(next(3, &item));
  EXPECT_FALSE(all.take_out(only(other)));
  all.linked(link, false);
  EXPECT_TRUE(all.take_out(only(other)));
  EXPECT_FALSE(other->entered);
  EXPECT_TRUE(one->entered);
  EXPECT_FALSE(all.close(only(other)));
  EXPECT_TRUE(all.take_out(only(other)));  // it is out
  EXPECT_TRUE(all.take_out(only(one)));
  EXPECT_FALSE(all.close(only(one)));
  uint64_t first, last;
  EXPECT_FALSE(all.range(&first, &last));
}

TEST_F(DeclarationsTest, ARankLeavesWithAllThatItHasDeclaredForAStep) {
  enter(3, 0, {0});
  const BatchRef other = enter(3, 1, {0}), empty = enter(3, 0, {}), last = enter(3, 0, {1, 0});
  const BatchRef later = enter(4, 0, {0});
  Declarations::Item item, more;
  ASSERT_TRUE(next(3, &item) && next(3, &more));
  ASSERT_TRUE(item.batch->rank == 0 && more.batch == other);
  ASSERT_TRUE(all.close({3, 0}));
  EXPECT_FALSE(next(3, &more));
  EXPECT_FALSE(all.take_out({3, 0}));
  all.resolved(item, true);
  EXPECT_TRUE(all.take_out({3, 0}));  // what is done for others does not matter
  EXPECT_FALSE(all.close({3, 0}));
  EXPECT_EQ(each({}), (Found{{other.get(), 0}, {later.get(), 0}}));
  EXPECT_FALSE(item.batch->entered || empty->entered || last->entered);
  EXPECT_TRUE(other->entered && later->entered);
}

TEST_F(DeclarationsTest, ARankHasSoManyBatchesOfAStep) {
  bool alone;
  std::vector<BatchRef> mine;
  for (uint32_t i = 0; i < kMostBatches; ++i) mine.push_back(enter(1, 1, {}));
  const BatchRef more = batch(1, 1, {0});
  EXPECT_EQ(all.add(more, true, nullptr, &alone), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("rank 1 has declared 4096 batches for step 1: at most 4096"),
            std::string::npos)
      << LastMessage();
  EXPECT_FALSE(more->entered || more->handle);
  // Of another rank or step, or taken back: that does not count.
  enter(1, 0, {});
  enter(2, 1, {});
  ASSERT_TRUE(all.take_out(only(mine[7])));
  EXPECT_OK(all.add(more, false, nullptr, &alone));
  EXPECT_EQ(all.add(batch(1, 1, {}), false, nullptr, &alone), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_TRUE(all.take_out({1, 1}));
  for (uint32_t i = 0; i < kMostBatches; ++i) enter(1, 1, {});
  EXPECT_EQ(all.add(batch(1, 1, {}), false, nullptr, &alone), FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST_F(DeclarationsTest, WhoJoinsAsARankDoesNotPayForItsPredecessor) {
  bool alone;
  std::vector<BatchRef> former;
  for (uint32_t i = 0; i < kMostBatches; ++i) former.push_back(enter(2, 1, {}));
  for (uint32_t i = 0; i < kMostBatches; ++i) enter(1, 1, {});
  enter(2, 0, {});
  all.joined(1, 2);
  EXPECT_EQ(all.add(batch(1, 1, {}), false, nullptr, &alone), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_TRUE(all.close(only(former[0])));  // it stays, for a caller that names it
  for (uint32_t i = 0; i < kMostBatches; ++i) enter(2, 1, {});
  auto full = [&] {
    return all.add(batch(2, 1, {}), false, nullptr, &alone) == FRUGAL_ERR_INVALID_ARGUMENT;
  };
  EXPECT_TRUE(full());
  ASSERT_TRUE(all.take_out(only(former[0])));  // makes no room
  EXPECT_TRUE(full());
  ASSERT_TRUE(all.take_out({2, 1}));
  EXPECT_FALSE(all.close({2, 1}));
  for (uint32_t i = 0; i < kMostBatches; ++i) enter(2, 1, {});
  EXPECT_TRUE(full());
  // Nor do trainers that come and go leave more and more.
  all.joined(1, 2);
  for (uint32_t i = 0; i < kMostBatches; ++i) enter(2, 1, {});
  all.joined(1, 2);
  EXPECT_TRUE(full());
  EXPECT_NE(
      LastMessage().find("rank 1, its former trainers included, has declared 8192 batches for "
                         "step 2: at most 8192"),
      std::string::npos)
      << LastMessage();
  ASSERT_TRUE(all.take_out({2, 1}));
  EXPECT_FALSE(full());
}

// What a rank has, and in which order, while batches of other ranks come and go before and after
// it.
TEST_F(DeclarationsTest, ARankFindsItsOwnAmongManyRanks) {
  constexpr uint32_t kMany = 200;
  Random r(test_seed());
  std::vector<BatchRef> of[kMany];
  size_t left = 0;
  auto check = [&](uint32_t rank) {
    Found expected;
    for (const BatchRef& b : of[rank]) expected.emplace_back(b.get(), 0);
    ASSERT_EQ(each({1, 1, rank}), expected);
    const BatchRef first = all.any_of(rank, 0);
    ASSERT_EQ(first, of[rank].empty() ? nullptr : of[rank].front());
  };
  for (size_t i = 0; i < 6000; ++i) {
    const uint32_t rank = static_cast<uint32_t>(r.below(kMany));
    std::vector<BatchRef>& mine = of[rank];
    if (r.below(6000) > i) {  // ever fewer
      mine.push_back(enter(1, rank, {static_cast<uint32_t>(r.below(4))}));
      ++left;
    } else if (r.one_in(8)) {
      ASSERT_TRUE(all.take_out({1, rank}));
      left -= mine.size();
      mine.clear();
    } else if (!mine.empty()) {
      const size_t at = r.below(mine.size());
      ASSERT_TRUE(all.take_out(only(mine[at])));
      mine.erase(mine.begin() + static_cast<long>(at));
      --left;
    }
    check(rank);
    check(static_cast<uint32_t>(r.below(kMany)));
    if (HasFatalFailure()) return;
    // Some are worked on: whatever is left is found in the end.
    Declarations::Item item;
    if (r.one_in(4) && next(1, &item)) r.one_in(2) ? all.put_back(item) : all.resolved(item, true);
    if (r.one_in(4) && all.next_to_link(1, 2, &item)) all.linked(item, false);
    ASSERT_EQ(each({}).size(), left);
  }
  ASSERT_GT(left, 0u);
  Declarations::Item item;
  while (next(1, &item)) all.resolved(item, true);
  size_t linked = 0;
  for (; all.next_to_link(1, 2, &item); ++linked) all.linked(item, true);
  EXPECT_EQ(linked, left);
  EXPECT_EQ(all.unready(1, 0), kNoStep);
}

TEST_F(DeclarationsTest, TablesThatAreTightAreNotResolvedAhead) {
  enter(1, 0, {0, 1});
  ++tables[0]->reserving_paused;
  Declarations::Item item;
  bool stale;
  ASSERT_TRUE(all.next_to_resolve(1, &item, &stale));
  EXPECT_TRUE(stale && item.index == 1);
  EXPECT_EQ(item.batch->parts[0]->state.load(), Part::kStale);
  all.resolved(item, false);
  EXPECT_EQ(all.unready(1, 1), kNoStep);  // the calls of the step resolve both
}

TEST_F(DeclarationsTest, WhatATableThatGoesHadIsNoneAnyMore) {
  enter(1, 0, {0, 1, 0});
  Declarations::Item item;
  ASSERT_TRUE(next(1, &item));
  all.close_table(*tables[0]);
  EXPECT_FALSE(all.drop_table(*tables[0]));
  all.resolved(item, true);
  EXPECT_TRUE(all.drop_table(*tables[0]));
  const Found left = each({.table = tables[0].get()});
  ASSERT_EQ(left.size(), 2u);
  for (const auto& [b, i] : left) EXPECT_EQ(b->parts[i]->state.load(), Part::kDropped);
  ASSERT_TRUE(next(1, &item));
  EXPECT_EQ(item.index, 1u);
  all.resolved(item, true);
  EXPECT_EQ(all.unready(1, kNoStep), kNoStep);
  EXPECT_EQ(all.unready(1, 0), 1u);
}

TEST_F(DeclarationsTest, RowsAreWarmedInOrderUpToALimit) {
  enter(2, 0, {0, 1, 2});
  Declarations::Item item;
  while (next(2, &item)) all.resolved(item, true);
  const size_t row = tables[0]->rows.layout().value_pitch;
  size_t from, end;
  // Of three rows each, seven fit.
  using Rows = std::vector<std::pair<uint32_t, size_t>>;
  Rows warmed;
  auto warm = [&](bool take) { return all.next_to_warm(2, 7 * row, 2, take, &item, &from, &end); };
  ASSERT_TRUE(warm(false) && warm(false));
  EXPECT_TRUE(from == 0 && end == 2 && item.index == 0);
  while (warm(true))
    for (size_t i = from; i < end; ++i) warmed.emplace_back(item.index, i);
  EXPECT_EQ(warmed, (Rows{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}, {2, 0}}));
  EXPECT_FALSE(all.next_to_warm(1, 7 * row, 2, true, &item, &from, &end));
}

// For a hashed table, which has two slots.
struct DeclaredHoldersTest : DeclarationsTest {
  TableRef of = std::allocate_shared<Table>(HeapAllocator<Table>());
  void SetUp() override {
    of->number = 9;
    of->keys_are_slots = false;
    Rows::Config c;
    c.capacity = 2;
    c.hashed = true;
    c.layout = RowLayout::of(4, FRUGAL_SGD);
    c.init = arith::init_spec(FRUGAL_INIT_CONSTANT, 0, 0, 2, 4, 9, FRUGAL_SGD, 0);
    ASSERT_OK(of->rows.open(c, &budget));
  }
  BatchRef declare(uint64_t step, uint64_t key) {
    auto b = std::allocate_shared<Batch>(HeapAllocator<Batch>());
    b->step = step;
    b->parts.push_back(make_part());
    b->tables.push_back(of);
    EXPECT_OK(b->parts[0]->take_keys(pool, of->rows, &key, 1, false, 0));
    b->index();
    bool alone;
    EXPECT_OK(all.add(b, false, nullptr, &alone));
    return b;
  }
  void resolve() {
    Declarations::Item item;
    ASSERT_TRUE(next(UINT64_MAX, &item));
    ASSERT_OK(item.part()->resolve(pool, of->rows, Rows::Missing::kReserve, nullptr));
    ASSERT_EQ(item.part()->state.load(), Part::kResolving);  // until resolved() is called
    all.resolved(item, true);
  }
  // The rows of these keys exist, and then they do no longer.
  void undo(const std::vector<uint64_t>& keys) {
    Slots slots(keys.size());
    Vector<uint32_t> created;
    ASSERT_OK(of->rows.resolve(keys.data(), keys.size(), nullptr, Rows::Missing::kCreate,
                               slots.data(), &created));
    ASSERT_EQ(of->rows.uncreate(slots.data(), slots.size(), false), keys.size());
    ASSERT_TRUE(of->rows.holders_unknown());
  }
  bool sure() {
    Lock lock(all.mutex());
    all.recount(*of);
    return !of->rows.holders_unknown();
  }
  size_t free_slots() {
    size_t free = 0;
    for (uint64_t key = 100; free < 2; ++free, ++key) {
      uint32_t slot;
      if (of->rows.resolve(&key, 1, nullptr, Rows::Missing::kReserve, &slot, nullptr) != FRUGAL_OK)
        break;
      taken.push_back(slot);
    }
    of->rows.release_hold(taken.data(), taken.size());
    taken.clear();
    return free;
  }
  Slots taken;
};

TEST_F(DeclaredHoldersTest, AreFoundAmongPartsWhileNobodyFindsRows) {
  const BatchRef first = declare(1, 10);
  resolve();
  undo({10, 11});
  EXPECT_EQ(free_slots(), 0u);
  ++of->calls;
  EXPECT_FALSE(sure());
  --of->calls;
  declare(2, 12);
  Declarations::Item item;
  ASSERT_TRUE(next(2, &item));
  EXPECT_FALSE(sure());
  // The thread that has found its rows checks again: no part names 11.
  all.resolved(item, false);
  EXPECT_FALSE(of->rows.holders_unknown());
  EXPECT_EQ(free_slots(), 1u);
  EXPECT_TRUE(all.take_out(only(first)));
  EXPECT_EQ(free_slots(), 2u);
}

TEST_F(DeclaredHoldersTest, ABatchThatIsTakenOutLetsGoOfRowsThatWereUndone) {
  const BatchRef one = declare(1, 10), other = declare(2, 10);
  resolve();
  resolve();
  undo({10});
  ASSERT_TRUE(all.close(only(one)) && all.close(only(other)));
  EXPECT_TRUE(sure());  // both hold the slot until they are out
  EXPECT_TRUE(all.take_out(only(one)));
  EXPECT_EQ(free_slots(), 1u);
  EXPECT_TRUE(all.take_out(only(other)));
  EXPECT_EQ(free_slots(), 2u);
}

TEST_F(DeclaredHoldersTest, NobodyKnowsThemWhileAStepRetires) {
  declare(1, 10);
  declare(2, 10);
  resolve();
  resolve();
  undo({10, 11});
  const Vector<Declarations::Held> served = all.begin_retiring(1);
  ASSERT_EQ(served.size(), 1u);
  EXPECT_FALSE(sure());
  for (const Declarations::Held& h : served) h.part->release_hold(h.table->rows);
  EXPECT_FALSE(sure());
  Vector<BatchRef> gone;
  ASSERT_TRUE(all.retire_one(1, &gone));
  EXPECT_FALSE(all.retire_one(1, &gone));
  EXPECT_FALSE(sure());
  all.end_retiring();
  EXPECT_TRUE(sure());
  EXPECT_EQ(free_slots(), 1u);
}

TEST_F(DeclarationsTest, NothingIsEnteredWithoutMemory) {
  bool alone;
  for (int64_t n = 1;; ++n) {
    const BatchRef b = batch(9, 0, {0, 1});
    bool failed = false;
    {
      HeapFails fails(n);
      try {
        failed = all.add(b, false, nullptr, &alone) != FRUGAL_OK;
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    uint64_t first, last;
    EXPECT_EQ(all.range(&first, &last), !failed);
    EXPECT_EQ(b->entered, !failed);
    if (!failed) break;
    ASSERT_LT(n, 100);
  }
}

// Anything in any order. At each moment every query returns what a scan of all parts returns.
class Model : public DeclarationsTest {
 protected:
  struct Held {
    Declarations::Item item;
    bool linking;
  };
  std::vector<Held> held;
  std::vector<std::shared_ptr<KeyDownload>> coming;
  uint64_t base = 0;

  void check(Random& r) {
    uint64_t unready[2] = {kNoStep, kNoStep};
    const uint64_t up_to = base + r.below(12), links = base + r.below(3);
    std::set<uint64_t> to_resolve, to_link;
    size_t parts = 0;
    for (const BatchRef& b : entered)
      for (size_t i = 0; i < b->parts.size(); ++i, ++parts) {
        const Part& p = *b->parts[i];
        const uint32_t state = p.state.load();
        const bool resolved = state == Part::kResolved, waits = state < Part::kResolved;
        if (waits) unready[0] = std::min(unready[0], b->step);
        if (waits || (resolved && !p.linked && b->step >= links))
          unready[1] = std::min(unready[1], b->step);
        if (state == Part::kDeclared) to_resolve.insert(b->step);
        const bool near = b->step >= base && b->step < base + kHorizon;
        if (resolved && !p.linked && !p.linking && near) to_link.insert(b->step);
      }
    auto within = [&](uint64_t step) { return step <= up_to ? step : kNoStep; };
    ASSERT_EQ(all.unready(up_to, kNoStep), within(unready[0]));
    ASSERT_EQ(all.unready(up_to, links), within(unready[1]));
    ASSERT_EQ(each({}).size(), parts);
    const Declarations::Which which{base + r.below(4), base + 2 + r.below(9),
                                    r.one_in(2) ? kNoRank : static_cast<uint32_t>(r.below(kRanks)),
                                    r.one_in(2) ? nullptr : tables[r.below(tables.size())].get()};
    Found expected;
    for (const BatchRef& b : entered)
      for (size_t i = 0; i < b->parts.size(); ++i)
        if (b->step >= which.first && b->step <= which.last &&
            (which.rank == kNoRank || which.rank == b->rank) &&
            (!which.table || which.table == b->tables[i].get()))
          expected.emplace_back(b.get(), i);
    std::stable_sort(expected.begin(), expected.end(),
                     [](const auto& a, const auto& b) { return a.first->step < b.first->step; });
    ASSERT_EQ(each(which), expected);
    // What is next is of the first step that has any.
    Declarations::Item item;
    if (r.one_in(2)) {
      const bool found = next(up_to, &item);
      ASSERT_EQ(found, !to_resolve.empty() && *to_resolve.begin() <= up_to);
      if (!found) return;
      ASSERT_EQ(item.batch->step, *to_resolve.begin());
      ASSERT_EQ(item.part()->state.load(), Part::kResolving);
      held.push_back({item, false});
    } else {
      const bool found = all.next_to_link(base, base + kHorizon, &item);
      ASSERT_EQ(found, !to_link.empty());
      if (!found) return;
      ASSERT_EQ(item.batch->step, *to_link.begin());
      ASSERT_TRUE(item.part()->resolved() && !item.part()->linked && item.part()->linking);
      held.push_back({item, true});
    }
  }
  void end(const Held& h, bool done, bool back = false) {
    if (!h.linking) return back ? all.put_back(h.item) : all.resolved(h.item, done);
    done&& h.item.batch->step >= base ? link(h.item) : all.linked(h.item, false);
  }
  bool busy(const Batch& b) {
    bool any = false;
    for (const Held& h : held)
      any |= h.item.batch.get() == &b || (h.linking && h.item.batch->step == b.step);
    return any;
  }
  void one(Random& r) {
    switch (r.below(11)) {
      case 0:
      case 1:
      case 2: {
        std::vector<uint32_t> of(r.below(6));
        for (uint32_t& t : of) t = static_cast<uint32_t>(r.below(tables.size()));
        const uint64_t step = base + r.below(10);
        const uint32_t rank = static_cast<uint32_t>(r.below(kRanks));
        if (r.below(4)) {
          enter(step, rank, of);
          break;
        }
        // Keys that a device sends.
        const BatchRef b = batch(step, rank, of, Part::kDownloading);
        bool alone;
        coming.push_back(std::allocate_shared<KeyDownload>(HeapAllocator<KeyDownload>()));
        ASSERT_OK(all.add(b, false, coming.back(), &alone));
        entered.push_back(b);
        break;
      }
      case 3:
      case 4:
      case 5:
        if (!held.empty()) {
          const size_t at = r.below(held.size());
          const Held h = held[at];
          held.erase(held.begin() + static_cast<long>(at));
          end(h, !r.one_in(4), r.one_in(4));
        }
        break;
      case 6:
        if (!entered.empty()) {
          const BatchRef b = entered[r.below(entered.size())];
          Declarations::Share share = only(b);
          if (r.one_in(4)) share.one = nullptr;
          auto mine = [&](const BatchRef& o) {
            return share.one ? o == b : o->step == share.step && o->rank == share.rank;
          };
          ASSERT_TRUE(all.close(share));
          bool waits = false;
          for (const BatchRef& o : entered) waits |= mine(o) && busy(*o);
          ASSERT_EQ(all.take_out(share), !waits);
          if (!waits) std::erase_if(entered, mine);
        }
        break;
      case 7: {
        Lock lock(all.mutex());
        all.each({.table = tables[r.below(tables.size())].get()}, [&](Batch& b, size_t i) {
          all.mutex().assert_held();
          const Part& p = *b.parts[i];
          if (!r.one_in(4) || p.state.load() == Part::kResolving || p.linking) return;
          all.never_resolve(b, i, Part::kStale);
          if (b.parts[i]->resolved()) all.give_up(b, i);
        });
        break;
      }
      case 8: {
        // A step that is retired has nothing that is being resolved; links may be under way.
        for (const Held& h : held)
          if (!h.linking && h.item.batch->step <= base) return;
        size_t gone = 0;
        for (Vector<BatchRef> out; all.retire_one(base, &out);) gone += out.size();
        ASSERT_EQ(gone, std::erase_if(entered, [&](const BatchRef& b) { return b->step <= base; }));
        for (const TableRef& t : tables) t->window.commit(nullptr, base);
        ++base;
        break;
      }
      case 9:
        for (size_t i = coming.size(); i-- > 0;) {
          if (r.one_in(2)) continue;
          coming[i]->failed.store(r.one_in(4));
          coming[i]->downloaded.store(true);
          coming.erase(coming.begin() + static_cast<long>(i));
        }
        {
          HeapFails fails(1);  // it wants no memory
          all.downloaded();
        }
        ASSERT_EQ(all.downloads().size(), coming.size());
        ASSERT_EQ(all.downloading(), !coming.empty());
        break;
      default: {
        const uint32_t rank = static_cast<uint32_t>(r.below(kRanks));
        const uint64_t from = base + r.below(6);
        const bool any = std::any_of(entered.begin(), entered.end(), [&](const BatchRef& b) {
          return b->rank == rank && b->step >= from;
        });
        if (r.one_in(4)) all.joined(rank, from);
        const BatchRef found = all.any_of(rank, from);
        ASSERT_EQ(found != nullptr, any);
        if (found) {
          ASSERT_TRUE(found->rank == rank && found->step >= from);
        }
      }
    }
  }
};

TEST_F(Model, AnswersAsByLookingAtAllParts) {
  const uint64_t seed = test_seed();
  for (uint64_t round = 0; round < test_rounds(60); ++round) {
    SCOPED_TRACE(round);
    Random r(seed + round);
    for (int i = 0; i < 300; ++i) {
      one(r);
      if (HasFatalFailure()) return;
      check(r);
      if (HasFatalFailure()) return;
    }
    while (!held.empty()) {
      const Held h = held.back();
      held.pop_back();
      end(h, true);
    }
    for (Vector<BatchRef> out; all.retire_one(kNoStep, &out);) {
    }
    for (const auto& a : coming) a->downloaded.store(true);
    all.downloaded();
    coming.clear();
    entered.clear();
    for (const uint64_t next = base + 12; base < next; ++base)
      for (const TableRef& t : tables) t->window.commit(nullptr, base);
  }
}

}  // namespace frugal::declarations_test
