// The one way to write rows: observers receive each list before and after its change, and stored
// rows get a new version.
//
// An observer sees new and deleted rows, too, and can follow each row. The test also names the
// types that cannot be written to.
#include "storage/row_write.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "storage/rows.h"
#include "support/inside.h"
#include "support/rows.h"

namespace frugal::row_write_test {

using What = RowWrite::What;
using Slots = std::vector<uint32_t>;
constexpr uint32_t kDim = 5, kRows = 40;

// Types say who may write.
static_assert(std::is_same_v<decltype(std::declval<Rows&>().values(0)), const float*>);
static_assert(std::is_same_v<decltype(std::declval<Rows&>().state(0)), const float*>);
static_assert(std::is_same_v<decltype(std::declval<Rows&>().ref()), device::RowsView>);
static_assert(std::is_same_v<decltype(std::declval<Rows&>().ref_now()), device::RowsView>);
static_assert(!std::is_convertible_v<device::RowsView, device::RowsRef>);

struct Row {
  std::vector<float> values, state;
  bool operator==(const Row&) const = default;
};

Row row_of(const Rows& rows, uint32_t slot) {
  const RowLayout& l = rows.layout();
  Row row{std::vector<float>(l.dim), std::vector<float>(l.state_floats)};
  std::copy_n(rows.values(slot), l.dim, row.values.begin());
  rows.export_state(slot, row.state.data());
  return row;
}

// Keeps what it hears.
struct Watcher final : RowWatcher {
  struct Heard {
    What what;
    Slots slots;
    bool begun, chunk_done;
    std::vector<Row> rows;  // as they are at that moment
  };
  explicit Watcher(Rows& rows_in, size_t most_in = SIZE_MAX) : rows(rows_in), most(most_in) {
    rows.watch(this);
  }
  uint32_t before(const RowWrite& write, device::Undo* undo) noexcept override {
    hear(write, true);
    if (follow) follow(undo);
    return next_token++;
  }
  void after(const RowWrite& write, uint32_t token) noexcept override {
    hear(write, false);
    tokens.push_back(token);
  }
  void new_state() noexcept override { ++new_states; }
  size_t most_outside() const override { return most; }
  void hear(const RowWrite& write, bool begun) {
    Heard h{write.purpose().what, {}, begun, write.is_chunk_done(), {}};
    for (size_t i = 0; i < write.size(); ++i) {
      h.slots.push_back(write.slot(i));
      h.rows.push_back(row_of(rows, write.slot(i)));
    }
    heard.push_back(h);
  }
  Rows& rows;
  size_t most;
  std::function<void(device::Undo*)> follow;
  uint32_t next_token = 0;
  int new_states = 0;
  std::vector<uint32_t> tokens;
  std::vector<Heard> heard;
};

struct RowWriteTest : testing::Test {
  void open(bool hashed, bool lazy, int32_t optimizer = FRUGAL_ADAM) {
    Rows::Config c = rows_config(kRows, kDim, optimizer, hashed);
    c.lazy = lazy;
    ASSERT_OK(rows.open(c, &budget));
    if (!hashed && !lazy) {
      ASSERT_OK(rows.initialize_range(0, kRows));
    }
  }
  // A row that was made elsewhere, of which each element differs.
  struct Made {
    explicit Made(const RowLayout& l, float first)
        : memory(l.bytes() / sizeof(float)),
          rows(l.at(memory.data(), device::behind(memory.data(), l.value_pitch))) {
      for (float& f : memory) f = first++;
    }
    std::vector<float> memory;
    device::RowsRef rows;
  };
  void store(RowWrite& write, size_t i, float first) {
    const Made made(rows.layout(), first);
    write.store(i, made.rows.values, made.rows.state);
  }
  void expect_stored(uint32_t slot, float first) {
    const Made made(rows.layout(), first);
    EXPECT_EQ(std::memcmp(rows.values(slot), made.rows.values, kDim * sizeof(float)), 0) << slot;
    EXPECT_EQ(std::memcmp(rows.state(slot), made.rows.state, rows.layout().state_pitch), 0) << slot;
  }
  MemoryBudget budget;
  Rows rows;
};

TEST_F(RowWriteTest, AWatcherHearsBeforeAndBehind) {
  open(false, false);
  Watcher one(rows), two(rows);
  two.next_token = 100;
  const Slots slots{3, 9, 20, 30};
  const uint32_t index[] = {3, 1};
  const Row was9 = row_of(rows, 9), was30 = row_of(rows, 30);
  {
    RowWrite write(rows, slots.data(), 2, {What::kUpdate}, index);
    ASSERT_EQ(one.heard.size(), 1u);
    store(write, 0, 1);
    store(write, 1, 100);
    write.chunk_done();
    ASSERT_EQ(one.heard.size(), 1u);
  }
  for (Watcher* w : {&one, &two}) {
    ASSERT_EQ(w->heard.size(), 2u);
    const Watcher::Heard &before = w->heard[0], &after = w->heard[1];
    EXPECT_TRUE(before.begun);
    EXPECT_FALSE(after.begun);
    for (const Watcher::Heard& h : w->heard) {
      EXPECT_EQ(h.what, What::kUpdate);
      EXPECT_EQ(h.slots, (Slots{30, 9}));
    }
    EXPECT_EQ(before.rows, (std::vector<Row>{was30, was9}));
    EXPECT_EQ(after.rows, (std::vector<Row>{row_of(rows, 30), row_of(rows, 9)}));
    EXPECT_FALSE(before.chunk_done);
    EXPECT_TRUE(after.chunk_done);
  }
  EXPECT_EQ(one.tokens, std::vector<uint32_t>{0});
  EXPECT_EQ(two.tokens, std::vector<uint32_t>{100});
  expect_stored(30, 1);
  expect_stored(9, 100);
}

// Every way in which rows become new, in all tables: rows that are reserved, begun, undone,
// deleted.
TEST_F(RowWriteTest, RowsThatBegin) {
  open(true, false);
  Watcher w(rows);
  const uint64_t keys[] = {500, 600, 500};
  uint32_t slots[3];
  Vector<uint32_t> created;
  ASSERT_OK(rows.resolve(keys, 3, nullptr, Rows::Missing::kReserve, slots, nullptr));
  rows.create_reserved(slots, 3, &created);
  ASSERT_EQ(w.heard.size(), 4u) << "two rows, before and after";
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(w.heard[i].what, What::kNew);
    EXPECT_EQ(w.heard[i].slots, Slots{slots[i / 2]});
  }
  EXPECT_EQ(w.heard[1].rows[0], row_of(rows, slots[0]));
  rows.uncreate(slots, 1, true);
  ASSERT_EQ(w.heard.size(), 6u) << "its slot has a holder";
  EXPECT_EQ(w.heard[4].what, What::kNew);
  rows.uncreate(slots + 1, 1, false);
  EXPECT_EQ(w.heard.size(), 6u) << "an aborted step has written nothing";
  rows.release_hold(slots, 3);
}

TEST_F(RowWriteTest, RowsThatBeginInALazyTable) {
  open(false, true);
  Watcher w(rows);
  const uint32_t slots[] = {4, 4, 7};
  ASSERT_OK(rows.begin_rows(slots, 3));
  ASSERT_OK(rows.begin_rows(slots, 3));
  ASSERT_EQ(w.heard.size(), 4u);
  EXPECT_EQ(w.heard[0].slots, Slots{4});
  EXPECT_EQ(w.heard[2].slots, Slots{7});
  for (const Watcher::Heard& h : w.heard) EXPECT_EQ(h.what, What::kNew);
}

// A row of a dense table exists before and after its deletion.
TEST_F(RowWriteTest, DeletedRowsOfADenseTable) {
  open(false, false);
  const Slots slots{1, 2, 3, 8, 30};
  std::vector<Row> fresh;
  for (uint32_t s : slots) fresh.push_back(row_of(rows, s));
  rows.write_outside(slots.data(), slots.size(), [&](RowWrite& write, size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) store(write, i - from, static_cast<float>(i));
  });
  Watcher w(rows, 2);
  EXPECT_EQ(rows.uncreate(slots.data(), slots.size(), true), slots.size());
  ASSERT_EQ(w.heard.size(), 6u) << "two rows at a time";
  EXPECT_EQ(w.heard[0].slots, (Slots{1, 2}));
  EXPECT_EQ(w.heard[2].slots, (Slots{3, 8}));
  EXPECT_EQ(w.heard[4].slots, Slots{30});
  for (const Watcher::Heard& h : w.heard) EXPECT_EQ(h.what, What::kOutside);
  EXPECT_NE(w.heard[0].rows[0], fresh[0]);
  EXPECT_EQ(w.heard[1].rows[0], fresh[0]);
  for (size_t i = 0; i < slots.size(); ++i) EXPECT_EQ(row_of(rows, slots[i]), fresh[i]);
}

TEST_F(RowWriteTest, RowsOutsideOfStepsInPieces) {
  open(false, false);
  Slots slots(17);
  for (uint32_t i = 0; i < slots.size(); ++i) slots[i] = kRows - 1 - i;
  for (const size_t most : {size_t{SIZE_MAX}, size_t{7}, size_t{3}}) {
    Rows some;
    Rows::Config c;
    c.capacity = kRows;
    c.layout = rows.layout();
    c.init = rows.init();
    ASSERT_OK(some.open(c, &budget));
    ASSERT_OK(some.initialize_range(0, kRows));
    Watcher least(some, most), more(some, 9);
    size_t next = 0;
    some.write_outside(slots.data(), slots.size(), [&](RowWrite& write, size_t from, size_t to) {
      EXPECT_EQ(from, next);
      EXPECT_EQ(to, std::min(slots.size(), from + std::min<size_t>(most, 9)));
      EXPECT_EQ(write.size(), to - from);
      EXPECT_EQ(least.heard.back().slots, Slots(slots.begin() + static_cast<ptrdiff_t>(from),
                                                slots.begin() + static_cast<ptrdiff_t>(to)));
      EXPECT_TRUE(least.heard.back().begun);
      next = to;
    });
    EXPECT_EQ(next, slots.size());
    EXPECT_FALSE(least.heard.back().begun);
    some.write_outside(slots.data(), 0, [&](RowWrite&, size_t, size_t) { ADD_FAILURE(); });
  }
}

// Each row's former content is saved before the row changes. The row is then reported as written,
// by its position in the list.
TEST_F(RowWriteTest, AWatcherFollowsEachRow) {
  for (const int32_t optimizer :
       {FRUGAL_SGD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_ADAGRAD, FRUGAL_ADAM}) {
    for (const bool marked : {false, true}) {
      Rows some;
      ASSERT_OK(some.open(rows_config(kRows, kDim, optimizer), &budget));
      ASSERT_OK(some.initialize_range(0, kRows));
      Watcher w(some);
      Made kept(some.layout(), 0);
      uint32_t slot = 12345;
      uint64_t progress = 0;
      uint8_t marks[10] = {};
      const uint32_t entries[] = {8, 2};
      w.follow = [&](device::Undo* undo) {
        undo->values = kept.rows.values;
        undo->state = some.layout().state_pitch ? kept.rows.state : nullptr;
        undo->slot = &slot;
        undo->rows = entries;
        if (marked)
          undo->marks = marks;
        else
          undo->progress = &progress;
      };
      const Slots slots{6, 11};
      const Row was = row_of(some, 11);
      RowWrite write(some, slots.data(), 2, {What::kUpdate, nullptr, entries});
      ASSERT_NE(write.undo(), nullptr);
      EXPECT_EQ(slot, 12345u);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(marks[entries[i]], 0);
        const Made made(some.layout(), static_cast<float>(i + 50));
        write.store(i, made.rows.values, made.rows.state);
        EXPECT_EQ(slot, slots[i]);
        EXPECT_EQ(progress, marked ? 0 : slots[i] + 1);
        EXPECT_EQ(marks[entries[i]], marked);
      }
      EXPECT_EQ(std::vector<float>(kept.rows.values, kept.rows.values + kDim), was.values);
      std::vector<float> state(some.layout().state_floats);
      some.layout().export_state(kept.rows.state, state.data());
      EXPECT_EQ(state, was.state);
      EXPECT_NE(row_of(some, 11).values, was.values);
    }
  }
}

TEST_F(RowWriteTest, NobodyFollowsWhereNobodyWants) {
  open(false, false);
  const uint32_t slot = 3;
  EXPECT_EQ(RowWrite(rows, &slot, 1, {What::kUpdate}).undo(), nullptr);
  Watcher w(rows);
  EXPECT_EQ(RowWrite(rows, &slot, 1, {What::kUpdate}).undo(), nullptr);
}

// A row that may be read concurrently has an odd version during its write and a new one after it.
// Other rows keep theirs.
TEST_F(RowWriteTest, VersionsOfRowsThatAreStored) {
  open(false, false);
  std::vector<VersionWord> words(kVersionWords);
  for (VersionWord& v : words) v.store(10);
  EXPECT_FALSE(rows.versioned());
  EXPECT_EQ(rows.version(3), nullptr);
  rows.read_beside(words.data(), 77);
  EXPECT_TRUE(rows.versioned());
  for (uint32_t slot = 0; slot < kRows; ++slot)
    EXPECT_EQ(rows.version(slot), &words[version_of(77, slot)]);
  const Slots slots{5, 6, 39};
  RowWrite write(rows, slots.data(), slots.size(), {What::kUpdate});
  for (size_t i = 0; i < slots.size(); ++i) {
    const Row was = row_of(rows, slots[i]);
    const uint32_t version = rows.version(slots[i])->load();
    float copy[kDim + 1];
    store(write, i, static_cast<float>(i * 100));
    EXPECT_EQ(rows.version(slots[i])->load(), version + 2);
    expect_stored(slots[i], static_cast<float>(i * 100));
    ASSERT_OK(read_row(*rows.version(slots[i]), rows.values(slots[i]), kDim, copy,
                       [] { return FRUGAL_OK; }));
    EXPECT_EQ(std::vector<float>(copy, copy + kDim), row_of(rows, slots[i]).values);
  }
  uint32_t changed = 0;
  for (VersionWord& v : words) changed += v.load() != 10;
  EXPECT_EQ(changed, 3u);
}

// Copies of rows have no watchers, and no versions. The state of all rows is replaced at once,
// without a list of rows. The watchers are notified when it is there.
TEST_F(RowWriteTest, NewStateOfAllRows) {
  open(true, false);
  Watcher watcher(rows);
  Rows::State state;
  state.layout = RowLayout::of(kDim, FRUGAL_SGD);
  state.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, kRows, kDim, 42, FRUGAL_SGD, 0);
  ASSERT_OK(rows.open_state(&state));
  EXPECT_EQ(watcher.new_states, 0);
  ASSERT_OK(rows.take_state(&state));
  EXPECT_EQ(watcher.new_states, 1);
  EXPECT_TRUE(watcher.heard.empty());
}

TEST_F(RowWriteTest, Copies) {
  open(false, false);
  Made copies(rows.layout(), 5);
  const RowWrite write(copies.rows);
  EXPECT_EQ(write.in_place().values, copies.rows.values);
  EXPECT_EQ(write.undo(), nullptr);
}

}  // namespace frugal::row_write_test
