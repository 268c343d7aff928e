// An update gives each row the same bits in chunks, as claims and in a read-out, and reports each
// row once.
//
// The bits are those of the sum in rank order and the optimizer's step. Cases: one rank, several
// ranks, borrowed gradients, staleness 0 and above, no memory.
#include "window/apply.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "base/fpenv.h"
#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"

namespace frugal::apply_test {

constexpr uint32_t kRows = 4000;

// What it hears of an update: which rows, and which chunks have ended.
struct Watcher final : RowWatcher {
  uint32_t before(const RowWrite& write, device::Undo*) noexcept override {
    EXPECT_EQ(write.purpose().what, RowWrite::What::kUpdate);
    EXPECT_EQ(write.purpose().record, update->record.get());
    EXPECT_LE(write.size(), kChunkRows);
    for (size_t i = 0; i < write.size(); ++i) {
      const uint32_t slot = write.slot(i);
      EXPECT_TRUE(slots.insert(slot).second) << slot << " is written twice";
      if (const uint32_t* entries = write.purpose().entries)
        EXPECT_EQ(update->slots[entries[i]], slot);
      else
        EXPECT_FALSE(chunks[write.purpose().chunk]) << "the chunk had ended";
    }
    ++lists;
    return 0;
  }
  void after(const RowWrite& write, uint32_t) noexcept override {
    if (write.is_chunk_done()) chunks[write.purpose().chunk] = true;
    EXPECT_FALSE(write.purpose().entries && write.is_chunk_done());
  }
  void new_state() noexcept override { ADD_FAILURE(); }
  size_t most_outside() const override { return SIZE_MAX; }
  const StepUpdate* update = nullptr;
  std::set<uint32_t> slots;
  std::map<size_t, bool> chunks;
  size_t lists = 0;
};

struct Record : UpdateRecord {};

struct ApplyTest : testing::Test {
  void open(Rows* rows) {
    ASSERT_OK(rows->open(rows_config(kRows, dim, optimizer.kind), &budget));
    ASSERT_OK(rows->initialize_range(0, kRows));
  }
  float any() { return static_cast<float>(random.below(2001)) * 1e-3f - 1.0f; }

  // An update of `ranks` ranks, which may have lent their gradients.
  void draw(size_t ranks, bool lent) {
    optimizer = FRUGAL_OPTIMIZER_INIT;
    optimizer.kind = static_cast<int32_t>(random.below(FRUGAL_FTRL + 1));
    if (random.one_in(2)) {
      optimizer.clip_norm = 0.7f;
      optimizer.weight_decay_l2 = 0.01f;
    }
    dim = random.one_in(2) ? 16 : 1 + static_cast<uint32_t>(random.below(20));
    Rows dense;
    open(&dense);
    std::vector<PartRef> parts;
    gradients.clear();
    update = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
    update->step = 7;
    update->record = std::make_shared<Record>();
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      // Some ranks have few rows; together they have most.
      std::vector<uint64_t> keys(random.one_in(4) ? 10 : 5000);
      for (uint64_t& key : keys) key = random.below(kRows);
      RankGradients h;
      h.rank = rank;
      h.part = make_part();
      ASSERT_OK(h.part->take_keys(pool, dense, keys.data(), keys.size(), false, 0));
      ASSERT_OK(h.part->resolve(pool, dense, Rows::Missing::kReserve, nullptr));
      h.stride = dense.layout().sums_stride;
      gradients.emplace_back(keys.size() * dim);
      for (float& g : gradients.back()) g = any();
      const device::GradSource source{gradients.back().data(), dim * sizeof(float), nullptr,
                                      nullptr, nullptr};
      ASSERT_OK(pool.get(h.rows() * dense.layout().sums_bytes(), &h.sums));
      device::kernels().reduce(h.part->pairs.as<uint64_t>(), h.part->row_start(), 0, h.rows(), dim,
                               source, h.sums.as<float>(), h.stride, false);
      update->ranks.push_back(std::move(h));
    }
    update->scalars =
        arith::step_scalars(optimizer, 7, static_cast<uint32_t>(ranks), FRUGAL_NAN_ACCEPT, dim);
    // As it should be, a row at a time.
    expected = std::make_unique<Rows>();
    open(expected.get());
    update->make_list();
    std::vector<float> sum(update->ranks[0].stride);
    for (size_t row = 0; row < update->n; ++row) {
      const uint32_t slot = update->slots[row];
      bool first = true;
      for (const RankGradients& h : update->ranks) {
        const uint32_t* at = std::lower_bound(h.slots(), h.slots() + h.rows(), slot);
        if (at == h.slots() + h.rows() || *at != slot) continue;
        const float* of = h.sums.as<float>() + static_cast<size_t>(at - h.slots()) * h.stride;
        for (uint32_t d = 0; d < dim; ++d) sum[d] = first ? of[d] : sum[d] + of[d];
        first = false;
      }
      const RowWrite write(*expected, &slot, 1, {RowWrite::What::kUpdate});
      device::kernels().apply(write.in_place(), update->scalars, &slot, 1, sum.data(), sum.size(),
                              nullptr);
    }
    if (lent) {
      RankGradients& h = update->ranks[0];
      h.lent = std::make_shared<Buffer>();
      h.source = {gradients[0].data(), dim * sizeof(float), nullptr, nullptr, nullptr};
      h.sums.reset();
    }
  }
  void expect_row(const float* values, const float* state, uint32_t slot, const char* way) {
    const RowLayout& l = expected->layout();
    std::vector<float> is(l.state_floats), should(l.state_floats);
    l.export_state(state, is.data());
    expected->export_state(slot, should.data());
    ASSERT_EQ(std::memcmp(values, expected->values(slot), l.value_bytes()), 0)
        << way << ", row " << slot;
    for (size_t i = 0; i < is.size(); ++i)
      ASSERT_EQ(std::memcmp(&is[i], &should[i], sizeof(float)), 0) << way << ", state " << slot;
  }
  void expect_rows(const Rows& rows, const char* way) {
    for (uint32_t slot = 0; slot < kRows; ++slot) {
      expect_row(rows.values(slot), rows.state(slot), slot, way);
      if (HasFatalFailure()) return;
    }
  }
  // Of all rows of the update in an order of their own, in lists of any length.
  void as_claims(const ApplyTo& to, ApplyScratch* scratch) {
    std::vector<uint32_t> entries(update->n);
    std::iota(entries.begin(), entries.end(), 0);
    if (random.one_in(2)) std::shuffle(entries.begin(), entries.end(), random.engine);
    for (size_t i = 0; i < entries.size();) {
      const size_t n = std::min<size_t>(entries.size() - i, 1 + random.below(kChunkRows));
      EXPECT_EQ(apply(to, *update, UpdateEntries{&entries[i], n}, scratch), n);
      i += n;
    }
  }
  void all_ways() {
    const size_t row = RowLayout::of(dim, optimizer.kind).bytes();
    ApplyScratch scratch(update->ranks.size(), row);
    Vector<uint64_t> bounds;
    update->cut(kChunkRows, &bounds);
    const std::set<uint32_t> all(update->slots, update->slots + update->n);
    // With lent gradients no row is read while it is written.
    for (const bool versions : {false, true}) {
      if (versions && update->ranks[0].lent) continue;
      for (const bool chunks : {false, true}) {
        const std::string way =
            std::string(chunks ? "chunks" : "claims") + (versions ? ", read concurrently" : "");
        Rows rows;
        open(&rows);
        std::vector<VersionWord> words(kVersionWords);
        if (versions) rows.read_beside(words.data(), 3);
        Watcher watcher;
        watcher.update = update.get();
        rows.watch(&watcher);
        const ApplyTo to(rows);
        EXPECT_EQ(is_direct(to, *update), update->ranks.size() == 1 && !versions);
        if (chunks) {
          size_t n = 0;
          for (size_t c = bounds.size() - 1; c-- > 0;) {
            n += apply(to, *update, UpdateChunk{c, bounds[c], bounds[c + 1]},
                       is_direct(to, *update) ? nullptr : &scratch);
            EXPECT_TRUE(watcher.chunks[c]);
          }
          EXPECT_EQ(n, update->n);
        } else {
          as_claims(to, &scratch);
        }
        EXPECT_EQ(watcher.slots, all) << way;
        expect_rows(rows, way.c_str());
        if (HasFatalFailure()) return;
        // Each write of a row is a version, and row versions are even again.
        uint32_t versions_now = 0;
        for (VersionWord& v : words) {
          EXPECT_EQ(v.load() % 2, 0u);
          versions_now += v.load() / 2;
        }
        EXPECT_EQ(versions_now, versions ? update->n : 0) << way;
      }
    }
    if (update->ranks[0].lent) return;
    // A read-out has copies of some rows, and works out the rest of an update of them.
    Rows rows;
    open(&rows);
    Vector<uint32_t> slots, entries;
    const auto wanted = [&](uint32_t slot) { return slot % 3 != 0; };
    for (uint32_t slot = 0; slot < kRows; ++slot)
      if (wanted(slot)) slots.push_back(slot);
    for (uint32_t i = 0; i < update->n; ++i)
      if (wanted(update->slots[i])) entries.push_back(i);
    const RowLayout& l = rows.layout();
    std::vector<float> memory(slots.size() * l.bytes() / sizeof(float));
    const device::RowsRef copies =
        l.at(memory.data(), device::behind(memory.data(), slots.size() * l.value_pitch));
    for (size_t i = 0; i < slots.size(); ++i) {
      std::memcpy(copies.row(i), rows.values(slots[i]), l.value_pitch);
      if (l.state_pitch) std::memcpy(copies.state_row(i), rows.state(slots[i]), l.state_pitch);
    }
    EXPECT_EQ(apply(ApplyTo(copies, slots), *update, UpdateEntries{entries.data(), entries.size()},
                    &scratch),
              entries.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      expect_row(copies.row(i), copies.state_row(i), slots[i], "read-out");
      if (HasFatalFailure()) return;
    }
  }

  FpEnvironment fp;
  MemoryBudget budget;
  BufferPool pool;
  frugal_optimizer optimizer;
  uint32_t dim = 0;
  std::vector<std::vector<float>> gradients;
  UpdateRef update;
  std::unique_ptr<Rows> expected;
  Random random{test_seed()};
};

TEST_F(ApplyTest, EachWayOneRank) {
  for (uint64_t round = 0; round < test_rounds(8); ++round) {
    draw(1, false);
    all_ways();
    if (HasFatalFailure()) return;
  }
}

TEST_F(ApplyTest, EachWayLent) {
  for (uint64_t round = 0; round < test_rounds(8); ++round) {
    draw(1, true);
    all_ways();
    if (HasFatalFailure()) return;
  }
}

TEST_F(ApplyTest, EachWaySeveralRanks) {
  for (const size_t ranks : {2, 3, 7}) {
    for (uint64_t round = 0; round < test_rounds(4); ++round) {
      draw(ranks, false);
      all_ways();
      if (HasFatalFailure()) return;
    }
  }
}

// Rows of many ranks come in lists as long as the scratch has room for; it takes no memory.
TEST_F(ApplyTest, WithoutMemory) {
  draw(7, false);
  Rows rows;
  open(&rows);
  Watcher watcher;
  watcher.update = update.get();
  ApplyScratch scratch(7, 0);
  Vector<uint64_t> bounds;
  update->cut(kChunkRows, &bounds);
  {
    HeapFails fails(1);
    for (size_t c = 0; c + 1 < bounds.size(); ++c)
      apply(ApplyTo(rows), *update, UpdateChunk{c, bounds[c], bounds[c + 1]}, &scratch);
  }
  expect_rows(rows, "without memory");
}

}  // namespace frugal::apply_test
