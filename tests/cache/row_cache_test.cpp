// A trainer's cache of a table admits and evicts the rows that a model chooses, and cached rows
// have the host rows' bits.
//
// Random cache refreshes run against a model that knows all declared reads and finds the best row
// to evict. The test also checks which cached rows an update touches.
#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "base/fpenv.h"
#include "cache/cached_rows.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"
#include "window/apply.h"

namespace frugal::row_cache_test {

constexpr uint64_t kNever = UINT64_MAX;
constexpr uint32_t kNone = RowCache::kNone;
constexpr uint32_t kRows = 90;

const float* cached_values(const CachedRows& cached_rows, const Rows& host, uint32_t cache_slot) {
  return device::behind(cached_rows.at().host, cache_slot * host.layout().value_pitch);
}

struct RowCacheTest : testing::Test {
  void open(uint64_t cache_slots, int32_t optimizer = FRUGAL_ADAM) {
    ASSERT_OK(host.open(rows_config(kRows, 6, optimizer), nullptr));
    ASSERT_OK(host.initialize_range(0, kRows));
    cache.open(cache_slots);
    ASSERT_OK(HostCachedRows::open(host, cache_slots, pool, &of_cache));
  }
  // A refresh. Rows come with their next reads.
  void refresh(uint64_t step, const std::vector<std::pair<uint32_t, uint64_t>>& reads,
               bool more = false) {
    Slots slots;
    std::vector<uint64_t> next;
    for (auto& [slot, n] : reads) {
      slots.push_back(slot);
      next.push_back(n);
      known[slot] = n;
    }
    for (Vector<uint32_t>* v : {&admitted, &cache_slots, &evicted}) v->clear();
    cache.plan_refresh(
        more, step, slots.data(), next.data(), slots.size(),
        [&](const uint32_t* of, size_t n, uint64_t* reads) {
          for (size_t i = 0; i < n; ++i) reads[i] = known[of[i]];
        },
        &admitted, &cache_slots, &evicted);
  }
  Slots cached() const {
    Slots all;
    for (uint32_t s = 0; s < kRows; ++s)
      if (cache.find(s) != kNone) all.push_back(s);
    return all;
  }
  bool same_bits(uint32_t slot, uint32_t cache_slot) const {
    const RowLayout& l = host.layout();
    return std::memcmp(cached_values(*of_cache, host, cache_slot), host.values(slot),
                       l.dim * sizeof(float)) == 0;
  }
  BufferPool pool;
  Rows host;
  RowCache cache;
  std::unique_ptr<CachedRows> of_cache;
  std::map<uint32_t, uint64_t> known;  // next reads, as a window would report them
  Vector<uint32_t> admitted, cache_slots, evicted;
};

TEST_F(RowCacheTest, RowsComeWhileLinesAreFree) {
  open(3);
  EXPECT_EQ(cache.cache_slots(), 3u);
  refresh(1, {{5, kNever}, {7, 4}});
  EXPECT_EQ(admitted, (Vector<uint32_t>{5, 7}));
  EXPECT_TRUE(evicted.empty());
  EXPECT_EQ(cache.size(), 2u);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(cache.find(admitted[i]), cache_slots[i]);
  const uint32_t asked[] = {7, 6, 5};
  uint32_t found[3];
  cache.find(asked, 3, found);
  EXPECT_EQ(found[0], cache_slots[1]);
  EXPECT_EQ(found[1], kNone);
  EXPECT_EQ(found[2], cache_slots[0]);
  refresh(2, {{5, kNever}});
  EXPECT_TRUE(admitted.empty()) << "it is there";
  refresh(3, {});
  EXPECT_EQ(cached(), (Slots{5, 7}));
}

// The row that is read last is evicted. Rows without a known read come first, of these the one that
// has been so for longest.
TEST_F(RowCacheTest, WhoGoes) {
  open(3);
  refresh(1, {{1, 20}});
  refresh(2, {{2, kNever}});
  refresh(3, {{3, kNever}});
  refresh(4, {{4, 6}});
  EXPECT_EQ(evicted, Vector<uint32_t>{2});
  refresh(5, {{5, 30}});
  EXPECT_EQ(evicted, Vector<uint32_t>{3});
  refresh(6, {{4, 10}, {6, 19}});
  EXPECT_EQ(evicted, Vector<uint32_t>{5}) << "30 is farther than 20";
  EXPECT_EQ(cached(), (Slots{1, 4, 6}));
}

TEST_F(RowCacheTest, WhoStaysOut) {
  open(2);
  refresh(1, {{1, 10}, {2, 12}});
  refresh(2, {{3, 12}, {4, 13}, {5, kNever}});
  EXPECT_TRUE(admitted.empty()) << "they are read no sooner than those that would go";
  refresh(3, {{3, 11}});
  EXPECT_EQ(evicted, Vector<uint32_t>{2});
}

// No row goes that the step reads, whatever comes: updates of its host row count on it.
TEST_F(RowCacheTest, RowsThatTheStepReadsStay) {
  open(2);
  refresh(1, {{1, kNever}, {2, kNever}});
  refresh(2, {{1, kNever}, {2, kNever}, {3, 3}});
  EXPECT_TRUE(evicted.empty());
  refresh(3, {{1, kNever}, {3, 4}});
  EXPECT_EQ(evicted, Vector<uint32_t>{2});
  // Nor at what is added to the refresh. A row that is read already is not read again.
  refresh(3, {{1, kNever}, {4, 4}}, true);
  EXPECT_TRUE(evicted.empty());
  EXPECT_TRUE(admitted.empty());
  refresh(4, {{3, kNever}});
  refresh(4, {{5, 5}}, true);
  EXPECT_EQ(evicted, Vector<uint32_t>{1});
}

// The search for a cache slot skips the rows that the step reads. They may be evicted later all the
// same.
TEST_F(RowCacheTest, LinesThatAreAddedToGoLater) {
  open(2);
  refresh(1, {{1, 9}});
  refresh(2, {{2, kNever}});
  refresh(2, {{4, 3}}, true);
  EXPECT_EQ(evicted, Vector<uint32_t>{1});
  refresh(3, {{4, kNever}, {5, 4}});
  EXPECT_EQ(evicted, Vector<uint32_t>{2});
}

// Declarations come and go: the next read of a cached row is checked again before its eviction.
TEST_F(RowCacheTest, WhatIsKnownMayBeOld) {
  open(2);
  refresh(1, {{1, kNever}, {2, 9}});
  known[1] = 5;  // declared meanwhile
  refresh(2, {{3, 6}});
  EXPECT_EQ(evicted, Vector<uint32_t>{2});
  known[1] = kNever;  // and cancelled
  refresh(5, {});     // the step for which it was listed: no step reads it
  refresh(6, {{4, 8}});
  EXPECT_EQ(evicted, Vector<uint32_t>{1});
}

TEST_F(RowCacheTest, DroppedRows) {
  open(4);
  refresh(1, {{1, 5}, {2, 5}, {3, 5}, {4, 5}});
  cache.drop(2);
  cache.drop(2);
  cache.drop(77);
  EXPECT_EQ(cached(), (Slots{1, 3, 4}));
  refresh(2, {{5, kNever}});
  EXPECT_EQ(admitted, Vector<uint32_t>{5}) << "its cache slot is free";
  uint32_t cache_slot = 0, slots[3];
  Slots gone;
  while (const size_t n = cache.drop_some(&cache_slot, slots, 3))
    gone.insert(gone.end(), slots, slots + n);
  std::sort(gone.begin(), gone.end());
  EXPECT_EQ(gone, (Slots{1, 3, 4, 5}));
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_TRUE(cached().empty());
  refresh(3, {{9, 4}, {1, 4}, {2, 4}, {3, kNever}, {4, 6}});
  EXPECT_EQ(cache.size(), 4u);
}

TEST_F(RowCacheTest, Bytes) {
  for (const int32_t optimizer : {FRUGAL_SGD, FRUGAL_ADAM}) {
    const RowLayout layout = RowLayout::of(6, optimizer);
    EXPECT_EQ(RowCache::bytes_for(layout, 0), 0u);
    for (uint64_t n = 1; n < 3000; n += 1 + n / 3) {
      const uint64_t values = n * layout.value_pitch, state = n * layout.state_pitch;
      const uint64_t rounding =
          BufferPool::capacity_for(values) - values + BufferPool::capacity_for(state) - state;
      EXPECT_LE(RowCache::bytes_for(layout, n), n * RowCache::row_bytes(layout) + rounding) << n;
      EXPECT_GT(RowCache::bytes_for(layout, n), values + state);
    }
  }
}

// A table without state has none to copy.
TEST_F(RowCacheTest, LinesWithoutState) {
  open(2, FRUGAL_SGD);
  EXPECT_TRUE(of_cache->at().host);
  EXPECT_FALSE(of_cache->at().device.values);
  refresh(1, {{8, 2}});
  CachePlan plan;
  plan.admitted = admitted;
  plan.to = cache_slots;
  ASSERT_OK(of_cache->refresh(plan, {}));
  EXPECT_TRUE(same_bits(8, cache_slots[0]));
}

TEST_F(RowCacheTest, WithoutMemoryForLines) {
  open(2);
  for (int64_t n = 1; n < 40; ++n) {
    BufferPool own;
    RowCache other;
    std::unique_ptr<CachedRows> its;
    Status s;
    {
      HeapFails fails(n);
      try {
        other.open(50);
        s = HostCachedRows::open(host, 50, own, &its);
      } catch (const std::bad_alloc&) {
        s = FRUGAL_ERR_OUT_OF_MEMORY;
      }
    }
    if (s == FRUGAL_OK) {
      EXPECT_GT(n, 4);
      return;
    }
    ASSERT_EQ(s, FRUGAL_ERR_OUT_OF_MEMORY);
  }
  FAIL();
}

// --- Walks ---------------------------------------------------------------------------------------

// Cache refreshes of many steps. Reads are known some steps ahead; some are declared late; rows are
// put and deleted; memory fails. Ranks push what they like.
class Walk {
 public:
  explicit Walk(uint64_t seed) : random_(seed) {
    const uint64_t choices[] = {1, 2, 5, 12, 40, kRows};
    cache_slots_ = choices[random_.below(6)];
    optimizer_ = random_.one_in(2) ? FRUGAL_ADAM : FRUGAL_ROWWISE_ADAGRAD;
    hot_ = random_.one_in(2);
    // Where refreshes are added to, or memory fails, cached rows may be in no list, and the choice
    // may be another one.
    added_to_ = random_.one_in(2);
    memory_fails_ = random_.one_in(4);
    EXPECT_EQ(host_.open(rows_config(kRows, 6, optimizer_), nullptr), FRUGAL_OK);
    EXPECT_EQ(host_.initialize_range(0, kRows), FRUGAL_OK);
    cache_.open(cache_slots_);
    EXPECT_EQ(HostCachedRows::open(host_, cache_slots_, pool_, &of_cache_), FRUGAL_OK);
  }

  void run() {
    for (step_ = 1; step_ < 120 && !testing::Test::HasFailure(); ++step_) {
      SCOPED_TRACE(testing::Message()
                   << "step " << step_ << ", " << cache_slots_ << " cache slots");
      while (declared_ < step_ + kAhead) {
        ++declared_;
        for (uint64_t n = random_.below(12); n > 0; --n) reads_[declared_].insert(some_row());
      }
      if (random_.one_in(3)) reads_[step_ + 1 + random_.below(kAhead - 1)].insert(some_row());
      refresh();
    }
  }

 private:
  static constexpr uint64_t kAhead = 6;
  static constexpr uint32_t kOwner = 1;

  uint32_t some_row() {
    return static_cast<uint32_t>(hot_ && !random_.one_in(3) ? random_.below(9)
                                                            : random_.below(kRows));
  }
  uint64_t next_read(uint32_t slot) const {
    for (auto at = reads_.upper_bound(step_); at != reads_.end(); ++at)
      if (at->second.count(slot)) return at->first;
    return kNever;
  }

  void refresh() {
    // The step before has pushed.
    std::vector<PartRef> pushed;
    const uint64_t ranks = 1 + random_.below(3);
    for (uint32_t r = 0; r < ranks; ++r) {
      if (r == kOwner && own_ && !random_.one_in(4)) {
        pushed.push_back(own_);  // as declared
        continue;
      }
      Slots slots(random_.below(25));
      for (uint32_t& s : slots) s = some_row();
      pushed.push_back(resolved_part(pool_, step_ - 1, r, slots));
    }
    const UpdateRef update = make_update(pool_, step_ - 1, pushed, host_.layout().sums_stride);
    for (RankGradients& h : update->ranks)
      for (size_t i = 0; i < h.rows() * h.stride; ++i)
        h.sums.as<float>()[i] = static_cast<float>(random_.below(1000)) * 1e-3f;
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = optimizer_;
    update->scalars = arith::step_scalars(o, step_ - 1, static_cast<uint32_t>(ranks), 0, 6);

    fresh_.clear();
    Slots slots(reads_[step_].begin(), reads_[step_].end());
    const bool late = added_to_ && random_.one_in(3) &&
                      slots.size() > 2;  // some of it is declared when the refresh is planned
    Slots rest;
    if (late)
      for (size_t n = 1 + random_.below(slots.size() - 1); n > 0; --n) {
        rest.push_back(slots.back());
        slots.pop_back();
      }
    std::sort(rest.begin(), rest.end());
    read_.clear();
    Slots declared = slots;
    if (late && random_.one_in(2)) declared.insert(declared.end(), rest.begin(), rest.end());
    refresh(false, slots);
    own_ = placed_part(declared);
    if (late) refresh(true, rest);
    if (testing::Test::HasFailure()) return;
    Vector<PartRef> parts(pushed.begin(), pushed.end());
    CachePlan plan;
    plan.admitted = admitted_;
    plan.to = to_;
    Vector<DueUpdate> due(1);
    due[0].update = update;
    due[0].planned = random_.one_in(2);
    CachedRowUpdate& touched = due[0].planned ? plan.update : due[0].other;
    cache_.touched(parts, kOwner, &touched);
    check_touched(*update, touched);
    // The host rows, and the rows that were cached.
    update->make_list();
    ApplyScratch scratch(ranks, 0);
    std::vector<uint32_t> all(update->n);
    std::iota(all.begin(), all.end(), 0);
    if (!all.empty())
      apply(ApplyTo(host_), *update, UpdateEntries{all.data(), all.size()}, &scratch);
    ASSERT_OK(of_cache_->refresh(plan, due));
    const RowLayout& l = host_.layout();
    // (State is not to be seen. It shows in what the next update makes of the row.)
    for (auto& [slot, cache_slot] : model_) {
      ASSERT_EQ(
          std::memcmp(cached_values(*of_cache_, host_, cache_slot), host_.values(slot), l.dim * 4),
          0)
          << "row " << slot;
    }
    if (random_.one_in(4) && !model_.empty()) {
      const uint32_t slot =
          std::next(model_.begin(), static_cast<ptrdiff_t>(random_.below(model_.size())))->first;
      cache_.drop(slot);
      model_.erase(slot);
    }
    if (random_.one_in(40)) {
      uint32_t cache_slot = 0, some[5];
      while (const size_t n = cache_.drop_some(&cache_slot, some, 5))
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(model_.erase(some[i]), 1u);
      ASSERT_TRUE(model_.empty());
    }
    check_places();
  }

  // A part of the owner, with the sources of its rows once the refresh has been planned.
  PartRef placed_part(const Slots& slots) {
    PartRef part = resolved_part(pool_, step_, kOwner, slots);
    EXPECT_EQ(pool_.get((part->distinct + 1) * sizeof(device::Source), &part->sources), FRUGAL_OK);
    cache_.sources(part->row_slots(), part->distinct, part->sources.as<device::Source>());
    return part;
  }

  void refresh(bool more, const Slots& slots) {
    std::vector<uint64_t> next;
    for (uint32_t s : slots) {
      next.push_back(next_read(s));
      read_.insert(s);
    }
    const auto before = model_;
    Vector<uint32_t> admitted, cache_slots, evicted;
    const auto call = [&] {
      cache_.plan_refresh(
          more, step_, slots.data(), next.data(), slots.size(),
          [&](const uint32_t* of, size_t n, uint64_t* reads) {
            for (size_t i = 0; i < n; ++i) reads[i] = next_read(of[i]);
          },
          &admitted, &cache_slots, &evicted);
    };
    bool again = true;
    if (memory_fails_ && random_.one_in(4)) {
      again = false;
      {
        HeapFails fails(1 + static_cast<int64_t>(random_.below(8)));
        try {
          call();
        } catch (const std::bad_alloc&) {
          again = true;
        }
      }
      if (again) {
        check_places();
        ASSERT_TRUE(admitted.empty() && evicted.empty());
      }
    }
    if (again) call();
    ASSERT_EQ(admitted.size(), cache_slots.size());
    for (size_t i = 0; i < slots.size(); ++i)
      ASSERT_EQ(cache_.refreshed()[i], cache_.find(slots[i]));
    for (uint32_t s : evicted) {
      ASSERT_EQ(model_.erase(s), 1u) << "row " << s << " was not there";
      ASSERT_FALSE(read_.count(s)) << "row " << s << " is read by the step";
    }
    std::set<uint32_t> used;
    for (auto& [slot, cache_slot] : model_) used.insert(cache_slot);
    for (size_t i = 0; i < admitted.size(); ++i) {
      ASSERT_TRUE(std::binary_search(slots.begin(), slots.end(), admitted[i]));
      ASSERT_LT(cache_slots[i], cache_slots_);
      ASSERT_TRUE(used.insert(cache_slots[i]).second)
          << "cache slot " << cache_slots[i] << " has another row";
      ASSERT_TRUE(model_.emplace(admitted[i], cache_slots[i]).second);
      fresh_.insert(admitted[i]);
    }
    check_places();
    if (!memory_fails_ && !added_to_) check_choice(before, slots, next, admitted, evicted);
    if (!more) admitted_.clear(), to_.clear();
    admitted_.insert(admitted_.end(), admitted.begin(), admitted.end());
    to_.insert(to_.end(), cache_slots.begin(), cache_slots.end());
  }

  // Of what was there and is not read by the step, the farthest goes for each that comes, if it is
  // farther. Which of several with the same next read is left open.
  void check_choice(const std::map<uint32_t, uint32_t>& before, const Slots& slots,
                    const std::vector<uint64_t>& next, const Vector<uint32_t>& admitted,
                    const Vector<uint32_t>& evicted) {
    std::multiset<uint64_t> may_go, gone, wanted_gone;
    for (auto& [slot, cache_slot] : before)
      if (!read_.count(slot)) may_go.insert(next_read(slot));
    size_t free = cache_slots_ - before.size();
    Vector<uint32_t> wanted;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (before.count(slots[i])) continue;
      if (free > 0) {
        --free;
      } else if (!may_go.empty() && *may_go.rbegin() > next[i]) {
        wanted_gone.insert(*may_go.rbegin());
        may_go.erase(std::prev(may_go.end()));
      } else {
        continue;
      }
      wanted.push_back(slots[i]);
    }
    for (uint32_t s : evicted) gone.insert(next_read(s));
    ASSERT_EQ(admitted, wanted);
    ASSERT_EQ(gone, wanted_gone);
  }

  void check_places() {
    ASSERT_EQ(cache_.size(), model_.size());
    for (uint32_t s = 0; s < kRows; ++s) {
      auto at = model_.find(s);
      ASSERT_EQ(cache_.find(s), at == model_.end() ? kNone : at->second) << "row " << s;
    }
  }

  // Cached rows that existed and are updated: first those that the step reads, each with its terms
  // by rank.
  void check_touched(const StepUpdate& update, const CachedRowUpdate& touched) {
    std::vector<uint32_t> wanted;
    size_t urgent = 0;
    for (const bool reads : {true, false}) {
      for (auto& [slot, cache_slot] : model_) {
        bool updated = false;
        for (const RankGradients& h : update.ranks) updated |= h.part->contains(slot);
        if (updated && !fresh_.count(slot) && (read_.count(slot) != 0) == reads)
          wanted.push_back(cache_slot);
      }
      if (reads) urgent = wanted.size();
    }
    ASSERT_EQ(std::vector<uint32_t>(touched.cache_slots.begin(), touched.cache_slots.end()),
              wanted);
    ASSERT_EQ(touched.urgent, urgent);
    ASSERT_EQ(touched.start.size(), wanted.size() + 1);
    ASSERT_EQ(touched.start.back(), touched.terms.size());
    std::map<uint32_t, uint32_t> row_of;
    for (auto& [slot, cache_slot] : model_) row_of[cache_slot] = slot;
    for (size_t i = 0; i < wanted.size(); ++i) {
      uint32_t at = touched.start[i];
      for (uint32_t r = 0; r < update.ranks.size(); ++r) {
        const RankGradients& h = update.ranks[r];
        if (!h.part->contains(row_of[wanted[i]])) continue;
        ASSERT_LT(at, touched.start[i + 1]);
        ASSERT_EQ(touched.terms[at].rank, r);
        ASSERT_EQ(h.slots()[touched.terms[at++].row], row_of[wanted[i]]);
      }
      ASSERT_EQ(at, touched.start[i + 1]);
    }
  }

  Random random_;
  BufferPool pool_;
  Rows host_;
  RowCache cache_;
  std::unique_ptr<CachedRows> of_cache_;
  uint64_t cache_slots_, step_ = 0, declared_ = 0;
  int32_t optimizer_;
  bool hot_, added_to_, memory_fails_;
  std::map<uint64_t, std::set<uint32_t>> reads_;  // by step
  std::map<uint32_t, uint32_t> model_;            // row to cache slot
  PartRef own_;                                   // of the step before
  std::set<uint32_t> read_, fresh_;               // by the step; came in at its refresh
  Vector<uint32_t> admitted_, to_;
};

TEST(RowCacheWalks, AsTheModelSays) {
  FpEnvironment environment;
  const uint64_t rounds = test_rounds(24);
  for (uint64_t i = 0; i < rounds && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "FRUGAL_TEST_SEED=" << test_seed() + i);
    Walk(test_seed() + i).run();
  }
}

}  // namespace frugal::row_cache_test
