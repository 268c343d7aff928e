// The ledger's content at each moment of a write: chunks, rows, an interrupted row, before-images,
// rows outside steps, updates in order.
//
// Also: where the rank gradients lie.
#include "engine/ledger.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "support/ledger.h"
#include "window/apply.h"

namespace frugal::ledger_test {

constexpr uint32_t kDim = 5;
constexpr uint64_t kRows = 300;

struct LedgerTest : TableWithLedger {
  void SetUp() override {
    // Of two ranks, whose rows overlap.
    Slots one, two;
    for (uint32_t slot = 0; slot < kRows; ++slot) {
      if (random.below(3)) one.push_back(slot);
      if (random.below(3)) two.push_back(slot);
    }
    make(kRows, kDim, {one, two});
    rows.watch(table.get());
    update->cut(40, &bounds);
    ASSERT_GT(bounds.size(), 4u);
  }
  // As another process sees it.
  const LedgerTable& seen() const {
    return *reinterpret_cast<const LedgerTable*>(arena.mapping().base + table->shm_address());
  }
  const LedgerUpdate* first() const {
    const uint64_t shm_address = seen().first.load();
    if (shm_address == kNoShmAddress) return nullptr;
    return reinterpret_cast<const LedgerUpdate*>(arena.mapping().base + shm_address);
  }
  uint64_t progress(size_t chunk) const {
    const char* at = arena.mapping().base + first()->progress;
    return reinterpret_cast<const uint64_t*>(at)[LedgerUpdate::kApart * chunk];
  }
  uint8_t mark(size_t row) const {
    return static_cast<uint8_t>(arena.mapping().base[first()->marks + row]);
  }
  // Images that name an update, or a write outside of steps.
  std::vector<const BeforeImage*> before_images() const {
    std::vector<const BeforeImage*> all;
    for (uint64_t i = 0; i < seen().before_image_count; ++i) {
      const char* at = arena.mapping().base + seen().before_images + i * seen().before_image_bytes;
      const auto* before_image = reinterpret_cast<const BeforeImage*>(at);
      if (before_image->update.load() != kNoShmAddress) all.push_back(before_image);
    }
    return all;
  }
  static std::vector<uint32_t> slots_of(const BeforeImage& before_image) {
    const auto* slots = reinterpret_cast<const uint32_t*>(&before_image + 1);
    return {slots, slots + before_image.rows};
  }
  std::vector<float> values_of(const BeforeImage& before_image, size_t i) const {
    const char* at = reinterpret_cast<const char*>(&before_image) +
                     BeforeImage::values_at(seen().before_image_rows);
    const float* v = reinterpret_cast<const float*>(at + i * rows.ref().value_pitch);
    return {v, v + kDim};
  }
  std::vector<float> row(uint32_t slot) const {
    return {rows.values(slot), rows.values(slot) + kDim};
  }
  void add(bool in_chunks) {
    if (!in_chunks) update->make_list();
    ASSERT_OK(table->add(*update, in_chunks ? &bounds : nullptr, &update->record));
    ledger->commit(kStep);
  }
  RowWrite::Purpose of_chunk(size_t chunk) const {
    return {RowWrite::What::kUpdate, update->record.get(), nullptr, chunk};
  }
  // The first rows of a chunk, at most n and not all, where it is left; returns how far that is.
  // look() sees them before they are released.
  template <class Look>
  uint64_t write_some(size_t chunk, size_t n, Look look) {
    TermList terms;
    terms.reserve(kRows, 2);
    uint64_t progress = bounds[chunk];
    update->merge_range(bounds[chunk], bounds[chunk + 1], &terms, [&](bool) {
      n = std::min(n, terms.slots.size() - 1);  // the last chunk may have few
      const RowWrite write(rows, terms.slots.data(), n, of_chunk(chunk));
      if (n)
        device::kernels().apply_terms(write.in_place(), update->scalars, terms.slots.data(), n,
                                      terms.terms.data(), terms.start.data(), write.undo());
      if (n) progress = terms.slots[n - 1] + 1;
      look(terms.slots[n ? n - 1 : 0]);
    });
    return progress;
  }
  void write_chunk(size_t chunk) {
    apply(ApplyTo(rows), *update, UpdateChunk{chunk, bounds[chunk], bounds[chunk + 1]}, &scratch);
  }

  Vector<uint64_t> bounds;
  ApplyScratch scratch{2, 0};
  Random random{test_seed()};
};

TEST_F(LedgerTest, AnUpdateInChunks) {
  add(true);
  ASSERT_NE(first(), nullptr);
  EXPECT_EQ(first()->step, kStep);
  ASSERT_EQ(first()->chunks, bounds.size() - 1);
  EXPECT_EQ(first()->ranks, 2u);
  for (size_t c = 0; c < first()->chunks; ++c) EXPECT_EQ(progress(c), bounds[c]);
  for (size_t c = bounds.size() - 1; c-- > 0;) {
    write_chunk(c);
    EXPECT_EQ(progress(c), bounds[c + 1]);
    if (c > 0) {
      EXPECT_EQ(progress(c - 1), bounds[c - 1]);
    }
  }
  update->record.reset();
  EXPECT_EQ(first(), nullptr);
  EXPECT_EQ(seen().lost.load(), kNoStep);
}

// The ledger records its rows one by one, and never the chunk as whole.
TEST_F(LedgerTest, AChunkThatIsLeftInTheMiddle) {
  add(true);
  const size_t left = random.below(bounds.size() - 1), rows_written = random.below(5);
  for (size_t c = 0; c + 1 < bounds.size(); ++c) {
    if (c != left) {
      write_chunk(c);
      continue;
    }
    const uint64_t until = write_some(c, rows_written, [](uint32_t) {});
    EXPECT_EQ(progress(c), until);
    EXPECT_LT(progress(c), bounds[c + 1]);
  }
  EXPECT_TRUE(before_images().empty());
  update->record.reset();
  EXPECT_EQ(first(), nullptr);
  EXPECT_EQ(seen().lost.load(), kStep);
}

// Likewise for a step that was never committed: it is not reported as lost.
TEST_F(LedgerTest, AnUpdateThatWasNotCommitted) {
  ASSERT_OK(table->add(*update, &bounds, &update->record));
  update->record.reset();
  EXPECT_EQ(first(), nullptr);
  EXPECT_EQ(seen().lost.load(), kNoStep);
}

TEST_F(LedgerTest, AnUpdateRowByRow) {
  add(false);
  ASSERT_EQ(first()->rows, update->n);
  std::vector<uint32_t> order(update->n);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random.engine);
  const bool all = random.one_in(2);
  if (!all) order.pop_back();
  for (const uint32_t i : order) {
    EXPECT_EQ(mark(i), 0);
    apply(ApplyTo(rows), *update, UpdateEntries{&i, 1}, &scratch);
    EXPECT_EQ(mark(i), 1);
  }
  update->record.reset();
  EXPECT_EQ(first(), nullptr);
  EXPECT_EQ(seen().lost.load(), all ? kNoStep : kStep);
}

// The row that is being written is found as it was.
TEST_F(LedgerTest, TheImageOfARow) {
  add(true);
  const uint64_t shm_address = seen().first.load();
  const uint32_t any = 0;
  {
    const RowWrite write(rows, &any, 1, of_chunk(0));
    ASSERT_EQ(before_images().size(), 1u);
    EXPECT_EQ(before_images()[0]->update.load(), shm_address);
    EXPECT_EQ(slots_of(*before_images()[0]), Slots{BeforeImage::kNoRow});
    // Of rows that do not exist the ledger keeps nothing.
    const RowWrite of_new_row(rows, &any, 1, {RowWrite::What::kNew});
    EXPECT_EQ(before_images().size(), 1u);
  }
  EXPECT_TRUE(before_images().empty());
  std::vector<std::vector<float>> before(kRows);
  for (uint32_t slot = 0; slot < kRows; ++slot) before[slot] = row(slot);
  write_some(0, 3, [&](uint32_t last) {
    ASSERT_EQ(before_images().size(), 1u);
    const BeforeImage& before_image = *before_images()[0];
    EXPECT_EQ(slots_of(before_image), Slots{last});
    EXPECT_EQ(values_of(before_image, 0), before[last]);
    EXPECT_NE(row(last), before[last]);
    // A thread that writes concurrently has a before-image of its own.
    {
      const RowWrite other(rows, &any, 1, of_chunk(1));
      EXPECT_EQ(before_images().size(), 2u);
    }
    EXPECT_EQ(before_images().size(), 1u);
  });
  EXPECT_TRUE(before_images().empty());
}

TEST_F(LedgerTest, RowsOutsideOfSteps) {
  const uint32_t most = static_cast<uint32_t>(seen().before_image_rows);
  Slots slots(2 * most + 1);
  for (uint32_t i = 0; i < slots.size(); ++i) slots[i] = (i * 2) % kRows;
  size_t written = 0;
  rows.write_outside(slots.data(), slots.size(), [&](RowWrite&, size_t from, size_t to) {
    EXPECT_EQ(from, written);
    ASSERT_EQ(before_images().size(), 1u);
    const BeforeImage& before_image = *before_images()[0];
    EXPECT_EQ(before_image.update.load(), BeforeImage::kOutside);
    EXPECT_EQ(slots_of(before_image), Slots(slots.begin() + static_cast<ptrdiff_t>(from),
                                            slots.begin() + static_cast<ptrdiff_t>(to)));
    for (size_t i = from; i < to; ++i) EXPECT_EQ(values_of(before_image, i - from), row(slots[i]));
    written = to;
  });
  EXPECT_EQ(written, slots.size());
  EXPECT_TRUE(before_images().empty());
}

TEST_F(LedgerTest, UpdatesInTheOrderOfTheirSteps) {
  add(true);
  UpdateRef next = make_update(pool, kStep + 1, parts, kDim);
  next->scalars = update->scalars;
  ASSERT_OK(table->add(*next, &bounds, &next->record));
  const uint64_t shm_address = first()->next.load();
  ASSERT_NE(shm_address, kNoShmAddress);
  EXPECT_EQ(reinterpret_cast<const LedgerUpdate*>(arena.mapping().base + shm_address)->step,
            kStep + 1);
  for (size_t c = 0; c + 1 < bounds.size(); ++c) write_chunk(c);
  update->record.reset();
  ASSERT_NE(first(), nullptr);
  EXPECT_EQ(first()->step, kStep + 1);
  next->record.reset();  // it was not committed
  EXPECT_EQ(first(), nullptr);
  EXPECT_EQ(seen().lost.load(), kNoStep);
}

// What lies in the engine's own memory, or in none that others see.
TEST_F(LedgerTest, WhereSumsLie) {
  Mapping staging;
  ASSERT_OK(os_reserve_to_read(size_t{2} << 20, &staging));
  EXPECT_EQ(ledger->find(staging.base + 40), kNoShmAddress);
  uint64_t shm_address;
  ASSERT_OK(arena.region_publisher()->come(staging, &shm_address));
  EXPECT_EQ(ledger->find(staging.base + 40), shm_address + 40);
  EXPECT_EQ(ledger->find(staging.base + staging.bytes), kNoShmAddress);
  EXPECT_EQ(ledger->find(nullptr), kNoShmAddress);
  const char* sums = update->ranks[0].sums.data();
  EXPECT_EQ(arena.mapping().base + ledger->find(sums), sums);
  arena.region_publisher()->go(shm_address);
  EXPECT_EQ(ledger->find(staging.base), kNoShmAddress);
  os_release(&staging);
}

}  // namespace frugal::ledger_test
