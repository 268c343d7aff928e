// A table's host rows: which key has which slot, what a new row contains, and what a failure
// leaves.
//
// Rows are reserved, created, deleted and released. Each slot of a new row begins clean. Without
// memory, noting which rows are deleted returns a status, too.
#include "storage/rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "support/inside.h"
#include "support/rows.h"

namespace frugal::rows_test {

using Missing = Rows::Missing;
using Keys = std::vector<uint64_t>;
using Slots = std::vector<uint32_t>;

constexpr uint64_t kPadding = 999;

Rows::Config config(uint64_t capacity, bool hashed, bool lazy = false,
                    int32_t optimizer = FRUGAL_ADAM, uint32_t dim = 5) {
  Rows::Config c = rows_config(capacity, dim, optimizer, hashed);
  c.lazy = lazy;
  return c;
}

struct RowsTest : testing::Test {
  Status resolve(const Keys& keys, Missing missing, Slots* slots,
                 Vector<uint32_t>* created = nullptr) {
    slots->assign(keys.size(), 12345);
    return rows.resolve(keys.data(), keys.size(), &kPadding, missing, slots->data(), created);
  }
  Slots slots_of(const Keys& keys, Missing missing) {
    Slots slots;
    Vector<uint32_t> created;
    EXPECT_OK(resolve(keys, missing, &slots, &created));
    return slots;
  }
  // Is it as a row of the key is before anybody has trained it?
  static bool is_new(const Rows& of, uint32_t slot, uint64_t key) {
    const arith::InitSpec& spec = of.init();
    bool right = true;
    for (uint32_t c = 0; c < spec.dim; ++c)
      right &= of.values(slot)[c] ==
               arith::initial_value(spec, arith::column_bits(arith::row_hash(spec.table, key), c));
    std::vector<float> state(of.layout().state_floats + 1);
    of.export_state(slot, state.data());
    for (uint32_t c = 0; c < spec.state_columns; ++c)
      for (uint32_t i = 0; i < spec.column_floats; ++i)
        right &= state[c * spec.column_floats + i] == spec.state[c];
    return right;
  }
  static void spoil(Rows& of, uint32_t slot) {
    const RowWrite write(of, &slot, 1, {RowWrite::What::kOutside});
    const device::RowsRef& rows = write.in_place();
    std::fill_n(rows.row(slot), rows.value_pitch / 4, 77.0f);
    std::fill_n(rows.state_row(slot), rows.state_pitch / 4, 78.0f);
  }
  // Recounts the holders of rows that have ceased to exist: each of `held` once.
  void recount(Slots held = {}) {
    std::sort(held.begin(), held.end());
    Slots start(held.size() + 1);
    for (uint32_t i = 0; i < start.size(); ++i) start[i] = i;
    rows.recount([] { return true; },
                 [&](auto visit) { visit(held.data(), held.size(), start.data()); });
  }
  Keys all_keys() {
    Keys keys(100000);
    uint64_t cursor = 0;
    keys.resize(rows.enumerate(&cursor, keys.data(), keys.size()));
    return keys;
  }
  MemoryBudget budget;
  Rows rows;
};

TEST(RowLayouts, Strides) {
  struct {
    uint32_t dim;
    size_t value_bytes;
  } const sizes[] = {{1, 16},   {4, 16},   {5, 32},   {8, 32},   {9, 64},
                     {17, 128}, {32, 128}, {33, 192}, {48, 192}, {49, 256}};
  for (auto [dim, bytes] : sizes) {
    const RowLayout none = RowLayout::of(dim, FRUGAL_SGD),
                    one = RowLayout::of(dim, FRUGAL_MOMENTUM),
                    two = RowLayout::of(dim, FRUGAL_FTRL),
                    row = RowLayout::of(dim, FRUGAL_ROWWISE_ADAGRAD);
    EXPECT_EQ(none.value_pitch, bytes) << dim;
    EXPECT_EQ(none.sums_bytes(), bytes);
    EXPECT_EQ(none.state_pitch, 0u);
    EXPECT_EQ(none.state_floats, 0u);
    EXPECT_EQ(one.state_pitch, one.value_pitch);
    EXPECT_EQ(one.state_floats, dim);
    EXPECT_EQ(two.state_pitch, 2 * two.value_pitch);
    EXPECT_EQ(two.bytes(), 3 * bytes);
    EXPECT_EQ(two.exported_bytes(true), 12 * dim);
    EXPECT_EQ(two.exported_bytes(false), two.value_bytes());
    EXPECT_EQ(two.state_floats, 2 * dim);
    EXPECT_EQ(row.state_pitch, 4u);
    EXPECT_EQ(row.state_floats, 1u);
    float memory[4];
    const device::RowsRef ref = two.at(memory, memory + 1);
    EXPECT_EQ(ref.values, memory);
    EXPECT_EQ(ref.state, memory + 1);
    EXPECT_EQ(ref.state_second, two.value_pitch);
    EXPECT_EQ(one.at(nullptr, nullptr).state_second, 0u);
    EXPECT_EQ(ref.dim, dim);
  }
}

// State goes out and in as columns of dim floats, whatever lies between them.
TEST_F(RowsTest, ExportedState) {
  for (const int32_t optimizer :
       {FRUGAL_SGD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_ADAGRAD, FRUGAL_ADAM}) {
    Rows some;
    ASSERT_OK(some.open(config(3, false, false, optimizer), &budget));
    ASSERT_OK(some.initialize_range(0, 3));
    const uint32_t n = some.state_floats();
    std::vector<float> in(n + 1), out(n + 1, -1), before(n + 1, -1);
    for (uint32_t i = 0; i < n; ++i) in[i] = static_cast<float>(i + 1);
    in[n] = -1;
    some.export_state(0, before.data());
    {
      const uint32_t slot = 1;
      const RowWrite write(some, &slot, 1, {RowWrite::What::kOutside});
      some.layout().import_state(in.data(), write.in_place().state_row(slot));
    }
    some.export_state(1, out.data());
    EXPECT_EQ(out, in);
    some.export_state(0, out.data());
    EXPECT_EQ(out, before) << "of the row before";
    {
      const uint32_t slot = 1;
      const RowWrite write(some, &slot, 1, {RowWrite::What::kOutside});
      some.layout().new_state(some.init(), write.in_place().state_row(slot));
    }
    EXPECT_TRUE(is_new(some, 1, 1));
  }
}

TEST_F(RowsTest, DenseRows) {
  ASSERT_OK(rows.open(config(1000, false), &budget));
  ASSERT_OK(rows.initialize_range(0, 400));
  ASSERT_OK(rows.initialize_range(400, 600));
  EXPECT_EQ(slots_of({5, 999, 0, 5}, Missing::kCreate), (Slots{5, kNoSlot, 0, 5}));
  Slots slots;
  EXPECT_EQ(resolve({5, 1000}, Missing::kLeave, &slots), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  EXPECT_EQ(rows.check_ids(Keys{1000}.data(), 1, nullptr), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  for (uint32_t s : {0u, 399u, 400u, 998u}) EXPECT_TRUE(is_new(rows, s, s));
  EXPECT_EQ(rows.count(), 1000u);
  EXPECT_TRUE(rows.exists(7));
  EXPECT_EQ(rows.key_of(7), 7u);
  EXPECT_FALSE(rows.lazy());
  // What is of hashed tables alone does nothing.
  Vector<uint32_t> list;
  const uint32_t seven = 7;
  rows.create_reserved(&seven, 1, &list);
  rows.use(&seven, 1, 5, 5, &list, &list);
  rows.commit(&seven, 1, 5);
  rows.undo(&seven, 1);
  rows.collect_new(&seven, 1, &list, &list);
  rows.release_hold(&seven, 1);
  EXPECT_TRUE(list.empty());
  EXPECT_FALSE(rows.any_reserved(&seven, 1));
  // Deleting makes a row new.
  spoil(rows, 7);
  EXPECT_EQ(rows.uncreate(&seven, 1, false), 1u);
  EXPECT_FALSE(is_new(rows, 7, 7));
  EXPECT_EQ(rows.uncreate(&seven, 1, true), 1u);
  EXPECT_TRUE(is_new(rows, 7, 7));
  Keys some(3);
  uint64_t cursor = 0;
  EXPECT_EQ(rows.enumerate(&cursor, some.data(), 3), 3u);
  EXPECT_EQ(some, (Keys{0, 1, 2}));
  cursor = 998;
  EXPECT_EQ(rows.enumerate(&cursor, some.data(), 3), 2u);
}

TEST_F(RowsTest, LazyRowsBeginWhenTheyAreUsed) {
  const uint64_t capacity = uint64_t{3} << 20;
  ASSERT_OK(rows.open(config(capacity, false, true), &budget));
  EXPECT_EQ(rows.memory_bytes(), 0u);
  EXPECT_EQ(slots_of({5, kPadding, capacity - 1}, Missing::kReserve),
            (Slots{5, kNoSlot, static_cast<uint32_t>(capacity - 1)}));
  EXPECT_TRUE(is_new(rows, 5, 5));
  EXPECT_TRUE(is_new(rows, static_cast<uint32_t>(capacity - 1), capacity - 1));
  spoil(rows, 5);
  EXPECT_EQ(slots_of({5, 6}, Missing::kCreate), (Slots{5, 6}));
  EXPECT_FALSE(is_new(rows, 5, 5)) << "it has begun before";
  EXPECT_TRUE(is_new(rows, 6, 6));
  // Values of 32 bytes and state of 64: two slabs, and four; the flags are one smaller slab.
  EXPECT_EQ(rows.memory_bytes(), 4 * SlabArray::kSlab + SlabArray::slab_bytes(capacity, 1));
  // Memory that fails: the row has not begun.
  SystemFails fails(-1);
  const uint32_t tier = 1u << 20;
  EXPECT_EQ(rows.begin_rows(&tier, 1), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  ASSERT_OK(rows.begin_rows(&tier, 1));
  EXPECT_TRUE(is_new(rows, tier, tier));
}

TEST_F(RowsTest, KeysThatAreMissing) {
  ASSERT_OK(rows.open(config(100, true), &budget));
  const Keys keys = {7, kPadding, UINT64_MAX, 7};
  EXPECT_EQ(slots_of(keys, Missing::kLeave),
            (Slots{kMissingSlot, kNoSlot, kMissingSlot, kMissingSlot}));
  EXPECT_FALSE(rows.has_reserved());
  const Slots slots = slots_of(keys, Missing::kReserve);
  EXPECT_EQ(slots[0], slots[3]) << "a key has one row";
  EXPECT_NE(slots[0], slots[2]);
  EXPECT_EQ(slots[1], kNoSlot);
  EXPECT_TRUE(is_new(rows, slots[0], 7));
  EXPECT_TRUE(rows.has_reserved());
  // Reserved rows do not exist.
  EXPECT_EQ(slots_of(keys, Missing::kLeave),
            (Slots{kMissingSlot, kNoSlot, kMissingSlot, kMissingSlot}));
  EXPECT_EQ(rows.count(), 0u);
  EXPECT_FALSE(rows.exists(slots[0]));
  EXPECT_TRUE(all_keys().empty());
  Vector<uint32_t> list;
  const uint32_t asked[] = {slots[0], kNoSlot, kMissingSlot, slots[2]};
  Vector<uint32_t> uncommitted;
  rows.collect_new(asked, 4, &list, &uncommitted);
  EXPECT_EQ(list, (Vector<uint32_t>{slots[0], slots[2]}));
  EXPECT_TRUE(uncommitted.empty());
  EXPECT_TRUE(rows.any_reserved(asked, 2));
  EXPECT_FALSE(rows.any_reserved(asked + 1, 2));
  Slots again;
  Vector<uint32_t> created;
  ASSERT_OK(resolve({kPadding, UINT64_MAX, UINT64_MAX}, Missing::kCreate, &again, &created));
  EXPECT_EQ(again, (Slots{kNoSlot, slots[2], slots[2]}));
  EXPECT_EQ(created, Vector<uint32_t>{slots[2]}) << "once";
  EXPECT_EQ(rows.count(), 1u);
  EXPECT_EQ(all_keys(), Keys{UINT64_MAX});
  EXPECT_EQ(slots_of(keys, Missing::kLeave),
            (Slots{kMissingSlot, kNoSlot, slots[2], kMissingSlot}));
  created.clear();
  ASSERT_OK(resolve(keys, Missing::kCreate, &again, &created));
  EXPECT_EQ(created, Vector<uint32_t>{slots[0]});
  EXPECT_FALSE(rows.has_reserved());
}

// A place that becomes another row's begins clean.
TEST_F(RowsTest, APlaceBecomesAnotherRows) {
  ASSERT_OK(rows.open(config(2, true), &budget));
  const Slots slots = slots_of({10, 11}, Missing::kReserve);
  Vector<uint32_t> made, earlier;
  rows.use(slots.data(), 1, 5, 5, &made, &earlier);
  spoil(rows, slots[0]);
  rows.release_hold(slots.data(), 1);
  EXPECT_TRUE(rows.exists(slots[0])) << "a row that exists needs no holder";
  EXPECT_EQ(rows.uncreate(slots.data(), 1, false), 1u);
  EXPECT_EQ(rows.uncreate(slots.data(), 1, false), 0u) << "it does not exist any more";
  EXPECT_EQ(slots_of({10}, Missing::kLeave), Slots{kMissingSlot});
  recount();
  EXPECT_EQ(slots_of({12}, Missing::kReserve), Slots{slots[0]});
  EXPECT_EQ(rows.key_of(slots[0]), 12u);
  EXPECT_TRUE(is_new(rows, slots[0], 12));
  for (size_t i = 5; i < rows.layout().value_pitch / sizeof(float); ++i) {
    EXPECT_EQ(rows.values(slots[0])[i], 0) << "the padding after the values";
    EXPECT_EQ(rows.state(slots[0])[i], 0);
    EXPECT_EQ(rows.state(slots[0])[rows.layout().value_pitch / sizeof(float) + i], 0);
  }
  EXPECT_FALSE(rows.exists(slots[0]));
  Slots none;
  EXPECT_EQ(resolve({13}, Missing::kReserve, &none), FRUGAL_ERR_TABLE_FULL) << "both are held";
  rows.create_reserved(slots.data(), 1, nullptr);
  EXPECT_EQ(all_keys(), Keys{12});
  EXPECT_EQ(resolve({13}, Missing::kReserve, &none), FRUGAL_ERR_TABLE_FULL);
  rows.release_hold(slots.data() + 1, 1);
  EXPECT_EQ(slots_of({13}, Missing::kReserve), Slots{slots[1]});
  EXPECT_EQ(slots_of({10}, Missing::kLeave), Slots{kMissingSlot});
}

// A deleted row that a declaration names is reserved, and new. The other row has no holder: its
// slot is free.
TEST_F(RowsTest, DeletedRows) {
  ASSERT_OK(rows.open(config(2, true), &budget));
  const Slots slots = slots_of({10, 11}, Missing::kCreate);
  EXPECT_EQ(slots_of({10}, Missing::kReserve), Slots{slots[0]});
  for (uint32_t s : slots) spoil(rows, s);
  EXPECT_EQ(rows.uncreate(slots.data(), 2, true), 2u);
  EXPECT_TRUE(is_new(rows, slots[0], 10));
  EXPECT_EQ(rows.count(), 0u);
  EXPECT_TRUE(rows.holders_unknown());
  // No slot is free while it may have a holder.
  Slots full;
  rows.recount([] { return false; }, [](auto) { FAIL() << "while a thread is finding rows"; });
  EXPECT_EQ(resolve({12}, Missing::kReserve, &full), FRUGAL_ERR_TABLE_FULL);
  recount({slots[0]});
  EXPECT_FALSE(rows.holders_unknown());
  EXPECT_EQ(slots_of({12, 10}, Missing::kCreate), (Slots{slots[1], slots[0]}));
  EXPECT_TRUE(is_new(rows, slots[1], 12));
}

// Rows of which it could not be noted that they exist no longer are found all the same, and so are
// those whose holders there was no memory to count.
TEST_F(RowsTest, DeletedWithoutMemory) {
  ASSERT_OK(rows.open(config(3, true), &budget));
  const Slots slots = slots_of({10, 11, 12}, Missing::kCreate);
  {
    HeapFails heap(1);
    EXPECT_EQ(rows.uncreate(slots.data(), 2, true), 2u);
  }
  EXPECT_EQ(rows.uncreate(&slots[2], 1, true), 1u);
  EXPECT_TRUE(rows.holders_unknown());
  const uint32_t start[] = {0, 40000};
  auto count = [&] {
    rows.recount([] { return true; }, [&](auto visit) { visit(&slots[1], 1, start); });
  };
  for (int64_t n = 1; rows.holders_unknown(); ++n) {
    ASSERT_LT(n, 20);
    HeapFails heap(n);
    try {
      count();
    } catch (const std::bad_alloc&) {
    }
    ASSERT_TRUE(rows.has_reserved());
  }
  // The other two are free, and this one is when it is held no longer.
  EXPECT_EQ(slots_of({20, 21}, Missing::kReserve).size(), 2u);
  Slots full;
  EXPECT_EQ(resolve({22}, Missing::kReserve, &full), FRUGAL_ERR_TABLE_FULL);
  rows.release_hold(&slots[1], 1, start);
  EXPECT_EQ(slots_of({22}, Missing::kReserve), Slots{slots[1]});
}

// For readers of the flags in shared memory: existing rows, and those that an uncommitted step has
// created.
TEST_F(RowsTest, MarkedRows) {
  Rows::Config c = config(100, true);
  c.shared = true;
  ASSERT_OK(rows.open(c, &budget));
  const Slots slots = slots_of({1, 2, 3}, Missing::kReserve);
  Vector<int> descriptors;
  EXPECT_EQ(rows.mappings(&descriptors), 15u);
  ASSERT_EQ(descriptors.size(), 4u);
  Mapping mapping;
  ASSERT_OK(os_map_shared(dup(descriptors[Rows::kFlags]), false, &mapping));
  const auto* flags = reinterpret_cast<const uint8_t*>(mapping.base);
  Vector<uint32_t> made, earlier;
  for (const uint64_t step : {uint64_t{63}, uint64_t{125}}) {
    const uint32_t mark = step == 63 ? 1 : SlotMap::kMarks;
    rows.use(slots.data(), 2, step, step, &made, &earlier);
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(SlotMap::flag_exists(flags[slots[i]]));
      EXPECT_EQ(SlotMap::flag_mark(flags[slots[i]]), mark);
    }
    EXPECT_FALSE(SlotMap::flag_exists(flags[slots[2]]));
    rows.commit(slots.data(), 3, step + 1);
    EXPECT_EQ(SlotMap::flag_mark(flags[slots[0]]), mark) << "of another step";
    rows.commit(slots.data(), 3, step);
    EXPECT_EQ(SlotMap::flag_mark(flags[slots[0]]), 0u);
    EXPECT_TRUE(SlotMap::flag_exists(flags[slots[0]]));
    EXPECT_FALSE(SlotMap::flag_exists(flags[slots[2]]))
        << "a step that is committed creates no row";
    rows.undo(slots.data(), 2);
    EXPECT_TRUE(SlotMap::flag_exists(flags[slots[0]])) << "what is there for good is not undone";
    EXPECT_EQ(rows.uncreate(slots.data(), 2, false), 2u);
    rows.use(slots.data(), 2, step, step, &made, &earlier);
    rows.undo(slots.data(), 2);
    EXPECT_FALSE(SlotMap::flag_exists(flags[slots[0]]));
    EXPECT_EQ(SlotMap::flag_mark(flags[slots[0]]), 0u) << "the mark of the step that was undone";
  }
  os_release(&mapping);
  std::atomic<uint64_t> told{0};
  rows.tell_slots(&told);
  EXPECT_EQ(told.load(), 3u);
  slots_of({4, 5}, Missing::kReserve);
  EXPECT_EQ(told.load(), 5u);
  rows.tell_slots(nullptr);
  slots_of({6}, Missing::kReserve);
  EXPECT_EQ(told.load(), 5u);
  // Of a table in private memory there is none; without state there are three.
  Rows own, sgd;
  ASSERT_OK(own.open(config(10, true), &budget));
  EXPECT_EQ(own.mappings(&descriptors), 0u);
  c = config(100, true, false, FRUGAL_SGD);
  c.shared = true;
  ASSERT_OK(sgd.open(c, &budget));
  EXPECT_EQ(sgd.mappings(&descriptors), 13u);
}

// A row is uncommitted until the earliest step that has used it is committed, or undone; whichever
// steps there are.
TEST_F(RowsTest, YoungRows) {
  ASSERT_OK(rows.open(config(100, true), &budget));
  for (uint64_t base = 1; base < 200; base += 7) {
    const Slots slots = slots_of({base, base + 1, base + 2}, Missing::kReserve);
    Vector<uint32_t> created, earlier, none, reserved, uncommitted;
    rows.use(slots.data(), 2, base + 61, base, &created, &earlier);
    EXPECT_EQ(created, (Vector<uint32_t>{slots[0], slots[1]}));
    rows.use(slots.data(), 1, base + 61, base, &none, &none);
    EXPECT_TRUE(earlier.empty() && none.empty());
    rows.use(slots.data() + 1, 2, base + 3, base, &none, &earlier);
    EXPECT_EQ(none, Vector<uint32_t>{slots[2]});
    EXPECT_EQ(earlier, Vector<uint32_t>{slots[1]});
    // By a later step that is not the earliest any more.
    earlier.clear();
    rows.use(slots.data(), 3, base + 61, base, &created, &earlier);
    EXPECT_TRUE(earlier.empty());
    rows.collect_new(slots.data(), 3, &reserved, &uncommitted);
    EXPECT_TRUE(reserved.empty());
    EXPECT_EQ(uncommitted, (Vector<uint32_t>(slots.begin(), slots.end())));
    rows.commit(slots.data() + 1, 2, base + 3);
    uncommitted.clear();
    rows.collect_new(slots.data(), 3, &reserved, &uncommitted);
    EXPECT_EQ(uncommitted, Vector<uint32_t>{slots[0]});
    // The later step is undone: it has made one row of these.
    rows.undo(slots.data(), 2);
    uncommitted.clear();
    rows.collect_new(slots.data(), 3, &reserved, &uncommitted);
    EXPECT_TRUE(uncommitted.empty());
    EXPECT_EQ(reserved, Vector<uint32_t>{slots[0]});
    EXPECT_TRUE(rows.exists(slots[1]) && rows.exists(slots[2]));
    EXPECT_EQ(rows.uncreate(slots.data() + 1, 2, true), 2u);
    recount(slots);
    rows.release_hold(slots.data(), 3);
  }
  EXPECT_FALSE(rows.has_reserved());
}

// Without memory for a list nothing changes.
TEST_F(RowsTest, UsedWithoutMemory) {
  ASSERT_OK(rows.open(config(100, true), &budget));
  const Slots slots = slots_of({1, 2}, Missing::kReserve);
  Vector<uint32_t> created, earlier;
  rows.use(slots.data(), 1, 9, 5, &created, &earlier);
  created.clear();
  created.shrink_to_fit();
  for (int64_t n = 1; n < 3; ++n) {
    HeapFails fails(n);
    EXPECT_THROW(rows.use(slots.data(), 2, 6, 5, &created, &earlier), std::bad_alloc);
    EXPECT_TRUE(created.empty() && earlier.empty());
    EXPECT_FALSE(rows.exists(slots[1]));
    rows.commit(slots.data(), 1, 6);
    created.shrink_to_fit();
  }
  rows.use(slots.data(), 2, 6, 5, &created, &earlier);
  EXPECT_EQ(created, Vector<uint32_t>{slots[1]});
  EXPECT_EQ(earlier, Vector<uint32_t>{slots[0]});
}

// A table that is full fails the whole call, of which nothing is left; what others hold stays
// theirs.
TEST_F(RowsTest, AFullTable) {
  ASSERT_OK(rows.open(config(50, true), &budget));
  slots_of({0, 1}, Missing::kCreate);
  const Slots held = slots_of({2}, Missing::kReserve);
  Keys many;
  for (uint64_t k = 0; k < 51; ++k) many.push_back(k);
  Slots slots;
  Vector<uint32_t> created;
  for (const Missing missing : {Missing::kCreate, Missing::kReserve}) {
    EXPECT_EQ(resolve(many, missing, &slots, &created), FRUGAL_ERR_TABLE_FULL);
    EXPECT_NE(LastMessage().find("key 50"), std::string::npos) << LastMessage();
    EXPECT_TRUE(created.empty());
    EXPECT_EQ(rows.count(), 2u);
  }
  rows.release_hold(held.data(), 1);
  EXPECT_FALSE(rows.has_reserved());
  EXPECT_EQ(resolve({UINT64_MAX - 4}, Missing::kReserve, &slots), FRUGAL_OK);
  for (uint64_t k = 2; k < 49; ++k) slots_of({k}, Missing::kReserve);
  EXPECT_EQ(resolve({UINT64_MAX - 5}, Missing::kReserve, &slots), FRUGAL_ERR_TABLE_FULL);
  EXPECT_NE(LastMessage().find("-6 (unsigned 18446744073709551610)"), std::string::npos)
      << LastMessage();
}

// Whatever fails, no row exists that did not, and nothing is reserved.
TEST_F(RowsTest, WithoutMemoryNothingExists) {
  int64_t failures = 0;
  for (const bool system : {false, true})
    for (int64_t n = 1;; ++n) {
      ASSERT_LT(n, 500);
      MemoryBudget own;
      Rows some;
      ASSERT_OK(some.open(config(uint64_t{1} << 20, true), &own));
      Slots slots(9000);
      Keys keys(9000);
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 2;
      Vector<uint32_t> created;
      Status s;
      {
        SystemFails os(system ? n : 0);
        HeapFails heap(system ? 0 : n);
        try {
          s = some.resolve(keys.data(), keys.size(), nullptr, Missing::kCreate, slots.data(),
                           &created);
        } catch (const std::bad_alloc&) {
          s = FRUGAL_ERR_OUT_OF_MEMORY;
        }
      }
      if (s == FRUGAL_OK) {
        EXPECT_EQ(created.size(), 4500u);
        break;
      }
      ++failures;
      ASSERT_EQ(s, FRUGAL_ERR_OUT_OF_MEMORY);
      ASSERT_EQ(some.count(), 0u);
      ASSERT_FALSE(some.has_reserved());
      ASSERT_TRUE(created.empty());
      ASSERT_OK(some.resolve(keys.data(), keys.size(), nullptr, Missing::kCreate, slots.data(),
                             &created));
      ASSERT_EQ(some.count(), 4500u);
      for (size_t i = 0; i < keys.size(); i += 500) {
        ASSERT_EQ(some.key_of(slots[i]), keys[i]);
        ASSERT_TRUE(is_new(some, slots[i], keys[i]));
      }
    }
  EXPECT_GT(failures, 5);
}

// Another optimizer: state that is new, of whatever kind the table is, and values as they were.
TEST_F(RowsTest, AnotherOptimizersState) {
  enum { kEager, kLazy, kHashed };
  for (const int kind : {kEager, kLazy, kHashed})
    for (const int32_t optimizer :
         {FRUGAL_SGD, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_ADAGRAD, FRUGAL_ADAM}) {
      SCOPED_TRACE(testing::Message() << "kind " << kind << ", optimizer " << optimizer);
      MemoryBudget own;
      Rows some;
      const uint64_t capacity =
          kind == kLazy ? uint64_t{20} << 20 : 1000;  // flags of several slabs
      ASSERT_OK(some.open(config(capacity, kind == kHashed, kind == kLazy, FRUGAL_MOMENTUM), &own));
      if (kind == kEager) {
        ASSERT_OK(some.initialize_range(0, capacity));
      }
      Keys keys = {0, 3, 999};
      if (kind == kLazy) keys.push_back(capacity - 1);
      Slots slots(keys.size());
      ASSERT_OK(
          some.resolve(keys.data(), keys.size(), nullptr, Missing::kCreate, slots.data(), nullptr));
      for (uint32_t s : slots) spoil(some, s);
      Rows::State state;
      state.layout = RowLayout::of(5, optimizer);
      state.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, capacity, 5, 42, optimizer, 0.25f);
      ASSERT_OK(some.open_state(&state));
      if (kind == kEager) {
        ASSERT_OK(some.fill_state(&state, 0, 500));
        ASSERT_OK(some.fill_state(&state, 500, 500));
      }
      ASSERT_OK(some.take_state(&state));
      EXPECT_EQ(some.state_floats(), state.layout.state_floats);
      EXPECT_EQ(some.ref_now().state_pitch, state.layout.state_pitch);
      EXPECT_EQ(some.ref_now().state_second,
                state.layout.state_columns == 2 ? state.layout.value_pitch : 0);
      for (uint32_t s : slots) {
        EXPECT_EQ(some.values(s)[0], 77.0f);
        std::vector<float> out(state.layout.state_floats + 1);
        some.export_state(s, out.data());
        for (uint32_t c = 0; c < state.init.state_columns; ++c)
          for (uint32_t i = 0; i < state.init.column_floats; ++i)
            ASSERT_EQ(out[c * state.init.column_floats + i], state.init.state[c]) << "row " << s;
      }
      // Rows that come later have it, too.
      const uint64_t later = 500;
      uint32_t slot;
      ASSERT_OK(some.resolve(&later, 1, nullptr, Missing::kCreate, &slot, nullptr));
      EXPECT_TRUE(is_new(some, slot, later));
    }
}

// Without memory for the new state the old one stays.
TEST_F(RowsTest, AnotherOptimizerWithoutMemory) {
  ASSERT_OK(rows.open(config(1000, true, false, FRUGAL_MOMENTUM), &budget));
  const Slots slots = slots_of({1, 2}, Missing::kCreate);
  Rows::State state;
  state.layout = RowLayout::of(5, FRUGAL_ADAM);
  state.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, 1000, 5, 42, FRUGAL_ADAM, 0);
  {
    SystemFails fails(1);
    EXPECT_EQ(rows.open_state(&state), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  ASSERT_OK(rows.open_state(&state));
  {
    SystemFails fails(1);
    EXPECT_EQ(rows.take_state(&state), FRUGAL_ERR_OUT_OF_MEMORY);
  }
  EXPECT_EQ(rows.state_floats(), 5u);
  EXPECT_TRUE(is_new(rows, slots[0], 1));
  ASSERT_OK(rows.take_state(&state));
  EXPECT_EQ(rows.state_floats(), 10u);
}

struct CountingPinner : Pinner {
  Status pin(void*, size_t, bool* pinned) override {
    *pinned = there;
    now += there;
    return FRUGAL_OK;
  }
  void unpin(void*) noexcept override { --now; }
  bool there = false;
  int now = 0;
};

// Values and state are pinned, which devices read; keys and flags are not.
TEST_F(RowsTest, PinnedRows) {
  auto pinner = std::make_shared<CountingPinner>();
  Rows::Config c = config(100, true);
  c.pinner = pinner;
  ASSERT_OK(rows.open(c, &budget));
  slots_of({1}, Missing::kCreate);
  EXPECT_EQ(pinner->now, 0);
  pinner->there = true;
  bool any = false;
  for (const int wanted : {1, 2, 2}) {
    const int before = pinner->now;
    ASSERT_OK(rows.pin_next(&any));
    EXPECT_EQ(pinner->now, wanted);
    EXPECT_EQ(any, wanted != before);
  }
  // The state of another optimizer is pinned before anybody finds it.
  Rows::State state;
  state.layout = RowLayout::of(5, FRUGAL_ADAGRAD);
  state.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, 100, 5, 42, FRUGAL_ADAGRAD, 0);
  pinner->there = false;
  ASSERT_OK(rows.open_state(&state));
  ASSERT_OK(rows.fill_state(&state, 0, 1));
  pinner->there = true;
  ASSERT_OK(rows.take_state(&state));
  EXPECT_EQ(pinner->now, 3);  // the old one is the caller's now
  rows.unpin();
  EXPECT_EQ(pinner->now, 1);
}

TEST_F(RowsTest, MoreThanTheBudget) {
  // A page for the index, and one for each of values, state, keys, flags and holders.
  for (const uint64_t limit : {0, 4095, 4096, 2 * 4096, 4 * 4096, 5 * 4096}) {
    MemoryBudget own;
    own.limit = limit;
    Rows some;
    const Status s = some.open(config(50, true), &own);
    ASSERT_EQ(s == FRUGAL_OK, limit >= 4096) << limit;
    if (s != FRUGAL_OK) continue;
    const uint64_t key = 1;
    uint32_t slot;
    EXPECT_EQ(some.resolve(&key, 1, nullptr, Missing::kReserve, &slot, nullptr),
              FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_FALSE(some.has_reserved());
    own.limit = UINT64_MAX;
    EXPECT_OK(some.resolve(&key, 1, nullptr, Missing::kReserve, &slot, nullptr));
  }
}

// Who begins to watch a table while rows are made hears of each of them whole, or not at all.
TEST(RowWatchers, OneComesWhileRowsAreMade) {
  struct Watcher final : RowWatcher {
    uint32_t before(const RowWrite&, device::Undo*) noexcept override { return 7; }
    void after(const RowWrite&, uint32_t token) noexcept override {
      ++heard;
      wrong += token != 7;
    }
    void new_state() noexcept override { ++wrong; }
    size_t most_outside() const override { return 1000; }
    uint64_t heard = 0, wrong = 0;
  };
  constexpr uint64_t kRows = 2000;
  Keys keys(kRows);
  for (uint64_t i = 0; i < kRows; ++i) keys[i] = i;
  for (int round = 0; round < 100; ++round) {
    MemoryBudget budget;
    Rows rows;
    ASSERT_OK(rows.open(config(kRows, true, false, FRUGAL_ADAM, 64), &budget));
    Watcher watcher;
    std::atomic<bool> begun{false}, watched{false};
    std::thread makes([&] {
      Slots slots(kRows);
      for (uint64_t i = 0; i < kRows; ++i) {
        // The last of them are made with the watcher there, however the threads are given
        // processors.
        while (i == kRows - 100 && !watched.load()) std::this_thread::yield();
        EXPECT_OK(rows.resolve(&keys[i], 1, nullptr, Missing::kReserve, &slots[i], nullptr));
        begun.store(true);
      }
      rows.release_hold(slots.data(), kRows);
    });
    while (!begun.load()) std::this_thread::yield();
    rows.watch(&watcher);
    watched.store(true);
    makes.join();
    EXPECT_GE(watcher.heard, 100u) << "round " << round;
    ASSERT_EQ(watcher.wrong, 0u) << "round " << round;
  }
}

}  // namespace frugal::rows_test
