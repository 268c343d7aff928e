// A step's update of a table: the ranks' lists merged in any pieces, terms in ascending rank order,
// and the bytes it counts.
#include "window/step_update.h"

#include <map>
#include <vector>

#include "support/inside.h"
#include "support/parts.h"

namespace frugal::step_update_test {

struct StepUpdateTest : testing::Test {
  // Ranks that touch random rows below `rows`; some none.
  UpdateRef random_update(size_t ranks, uint64_t rows, size_t most) {
    std::vector<PartRef> parts;
    for (uint32_t r = 0; r < ranks; ++r) {
      Slots slots(random.below(most + 1));
      for (uint32_t& s : slots) s = static_cast<uint32_t>(random.below(rows));
      parts.push_back(resolved_part(pool, 5, 2 * r, slots));
    }
    return make_update(pool, 5, parts, 4);
  }
  // By row: the sums in the order in which they are to be added.
  static std::map<uint32_t, std::vector<const float*>> expected(const StepUpdate& u,
                                                                uint64_t low = 0,
                                                                uint64_t high = UINT64_MAX) {
    std::map<uint32_t, std::vector<const float*>> rows;
    for (const RankGradients& h : u.ranks)
      for (size_t i = 0; i < h.rows(); ++i)
        if (h.slots()[i] >= low && h.slots()[i] < high)
          rows[h.slots()[i]].push_back(h.sums.as<float>() + i * h.stride);
    return rows;
  }
  // The rows of a closed list are the next ones of `rows`, from *at on.
  static void check(const TermList& list, const std::map<uint32_t, std::vector<const float*>>& rows,
                    std::map<uint32_t, std::vector<const float*>>::const_iterator* at) {
    ASSERT_EQ(list.start.size(), list.slots.size() + 1);
    ASSERT_EQ(list.start.back(), list.count);
    for (size_t i = 0; i < list.slots.size(); ++i, ++*at) {
      ASSERT_NE(*at, rows.end());
      ASSERT_EQ(list.slots[i], (*at)->first);
      const std::vector<const float*> terms(list.terms.begin() + list.start[i],
                                            list.terms.begin() + list.start[i + 1]);
      ASSERT_EQ(terms, (*at)->second) << "row " << list.slots[i];
    }
  }
  BufferPool pool;
  Random random{test_seed()};
};

TEST_F(StepUpdateTest, OneList) {
  for (int round = 0; round < 60; ++round) {
    const UpdateRef u = random_update(1 + random.below(5), 1 + random.below(500), 60);
    u->make_list();
    const auto rows = expected(*u);
    ASSERT_EQ(u->n, rows.size());
    TermList list;
    list.reserve(u->n, u->ranks.size());
    auto at = rows.begin();
    for (size_t i = 0; i < u->n; ++i) {
      ASSERT_EQ(u->slots[i], std::next(rows.begin(), static_cast<ptrdiff_t>(i))->first);
      u->add_terms(i, &list);
    }
    list.close();
    check(list, rows, &at);
    // Making the list again gives the same.
    u->make_list();
    ASSERT_EQ(u->n, rows.size());
  }
}

// In pieces of any size, by lists of any room, which do not grow.
TEST_F(StepUpdateTest, Ranges) {
  for (int round = 0; round < 60; ++round) {
    const size_t ranks = 1 + random.below(6);
    const UpdateRef u = random_update(ranks, 1 + random.below(400), 80);
    Vector<uint64_t> bounds;
    u->cut(1 + random.below(30), &bounds);
    ASSERT_EQ(bounds.front(), 0u);
    ASSERT_EQ(bounds.back(), UINT64_MAX);
    TermList list;
    list.reserve(1 + random.below(8), ranks);
    const size_t slots = list.slots.capacity(), terms = list.terms.capacity();
    size_t all = 0;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      ASSERT_LT(bounds[i], bounds[i + 1]);
      const auto rows = expected(*u, bounds[i], bounds[i + 1]);
      auto at = rows.begin();
      HeapFails fails(1);  // it wants no memory
      bool ended = false;
      u->merge_range(bounds[i], bounds[i + 1], &list, [&](bool last) {
        EXPECT_FALSE(ended);
        ended = last;
        ASSERT_FALSE(list.slots.empty());
        check(list, rows, &at);
      });
      ASSERT_TRUE(at == rows.end());
      EXPECT_EQ(ended, !rows.empty());
      all += rows.size();
    }
    ASSERT_EQ(all, expected(*u).size());
    ASSERT_EQ(list.slots.capacity(), slots);
    ASSERT_EQ(list.terms.capacity(), terms);
  }
}

// The ends of what slots there are.
TEST_F(StepUpdateTest, TheLastSlots) {
  const uint32_t last = UINT32_MAX - 2;
  const UpdateRef u =
      make_update(pool, 0,
                  {resolved_part(pool, 0, 0, {0, 7, last}), resolved_part(pool, 0, 1, {}),
                   resolved_part(pool, 0, 2, {last})});
  TermList list;
  list.reserve(8, 3);
  Slots got;
  for (const uint64_t high : {uint64_t{last} + 1, uint64_t{UINT32_MAX} + 1, UINT64_MAX}) {
    got.clear();
    u->merge_range(7, high, &list, [&](bool) { got.assign(list.slots.begin(), list.slots.end()); });
    EXPECT_EQ(got, (Slots{7, last}));
  }
  got.clear();
  u->merge_range(8, last, &list, [&](bool) { got.assign(1, 0); });
  EXPECT_TRUE(got.empty());
}

// Chunks of about as many rows as the longest list has in them.
TEST_F(StepUpdateTest, Cuts) {
  Slots slots;
  for (uint32_t i = 0; i < 100; ++i) slots.push_back(10 * i);
  const UpdateRef u =
      make_update(pool, 0, {resolved_part(pool, 0, 0, {5}), resolved_part(pool, 0, 1, slots)});
  Vector<uint64_t> bounds;
  u->cut(40, &bounds);
  EXPECT_EQ(bounds, (Vector<uint64_t>{0, 400, 800, UINT64_MAX}));
  u->cut(100, &bounds);
  EXPECT_EQ(bounds, (Vector<uint64_t>{0, UINT64_MAX}));
  StepUpdate none;
  none.cut(1, &bounds);
  EXPECT_EQ(bounds, (Vector<uint64_t>{0, UINT64_MAX}));
}

// Run sums pairwise: ((a + b) + (c + d)) + e. The numbers are such that no other order gives the
// same.
TEST_F(StepUpdateTest, RunsArePairs) {
  const auto tree = [](auto self, const std::vector<float>& level) -> float {
    if (level.size() == 1) return level[0];
    std::vector<float> up;
    for (size_t i = 0; i < level.size(); i += 2)
      up.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    return self(self, up);
  };
  for (size_t n = 1; n < 40; ++n)
    for (const uint32_t dim : {1u, 3u, 8u}) {
      std::vector<float> runs(n * dim);
      for (float& x : runs)
        x = static_cast<float>(static_cast<double>(random.below(1u << 24)) * 1e-3 - 7e3);
      std::vector<float> wanted;
      for (uint32_t d = 0; d < dim; ++d) {
        std::vector<float> column;
        for (size_t i = 0; i < n; ++i) column.push_back(runs[i * dim + d]);
        wanted.push_back(tree(tree, column));
      }
      combine_runs(runs.data(), n, dim);
      ASSERT_EQ(std::vector<float>(runs.begin(), runs.begin() + dim), wanted)
          << n << " runs of " << dim;
    }
}

TEST_F(StepUpdateTest, BytesCountUntilAllIsWritten) {
  struct Record : UpdateRecord {
    explicit Record(bool* gone_in) : gone(gone_in) {}
    ~Record() override { *gone = true; }
    bool* gone;
  };
  std::atomic<uint64_t> total{100}, peak{120};
  bool gone = false;
  UpdateRef u = make_update(pool, 0, {resolved_part(pool, 0, 0, {1, 2})}, 8);
  ASSERT_GE(u->ranks[0].bytes(), 2 * 8 * sizeof(float));
  u->bytes = 50;
  u->record = std::make_shared<Record>(&gone);
  std::fill_n(u->ranks[0].sums.as<float>(), 2 * 8, 3.0f);
  u->account(&total, &peak);
  EXPECT_EQ(total.load(), 150u);
  EXPECT_EQ(peak.load(), 150u);
  u->release_bytes();
  EXPECT_TRUE(gone);
  // A cache may still have to apply it.
  for (int i = 0; i < 2 * 8; ++i) EXPECT_EQ(u->ranks[0].sums.as<float>()[i], 3.0f);
  EXPECT_EQ(total.load(), 100u);
  u->release_bytes();
  EXPECT_EQ(total.load(), 100u);
  u->bytes = 10;
  u->account(&total, &peak);
  EXPECT_EQ(peak.load(), 150u);
  u.reset();  // one that is never written gives them back, too
  EXPECT_EQ(total.load(), 100u);
}

// What is lent counts as the memory that it keeps.
TEST_F(StepUpdateTest, BytesOfLentGradients) {
  UpdateRef u = make_update(pool, 0, {resolved_part(pool, 0, 0, {1, 2})}, 8);
  RankGradients& h = u->ranks[0];
  EXPECT_EQ(h.bytes(), 2 * 8 * sizeof(float));
  h.lent = std::make_shared<Buffer>();
  ASSERT_OK(pool.get(5000, h.lent.get()));
  EXPECT_EQ(h.bytes(), h.lent->capacity());
}

}  // namespace frugal::step_update_test
