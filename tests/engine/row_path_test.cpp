// A rank's lookups and pushes without an engine: which declaration an op names, what it reads, and
// what a push leaves or withdraws.
//
// An op names its declaration by batch or by keys, or is refused. Reads include rows that are
// written meanwhile. A push keeps its borrowed gradients, or withdraws everything when its call
// fails.
#include "engine/row_path.h"

#include <cmath>

#include "support/inside.h"
#include "support/parts.h"
#include "support/rows.h"

namespace frugal::row_path_test {

constexpr uint32_t kDim = 4, kRows = 64;

// It finds the tables that ops name.
class Opened final : public Session {
 public:
  explicit Opened(const frugal_config& config) : Session(config) {}
  void shutdown() override {}
  Status health() override { return FRUGAL_OK; }
  Status flush(Deadline) override { return none(); }
  Status committed(uint64_t*) override { return none(); }
  Status stats(frugal_stats*) override { return none(); }
  Status metrics(String*) override { return none(); }
  Status start_trace(size_t) override { return none(); }
  Status stop_trace(const char*) override { return none(); }
  Status create_table(const frugal_table_config&, AnyTableRef*) override { return none(); }
  Status find_table(const char*, AnyTableRef*) override { return none(); }
  Status next_table(uint64_t*, String*) override { return none(); }
  Status drop_table(const AnyTableRef&) override { return none(); }
  Status describe(AnyTable&, frugal_table_info*) override { return none(); }
  Status set_optimizer(AnyTable&, uint64_t, const frugal_optimizer&) override { return none(); }
  Status count(AnyTable&, uint64_t*) override { return none(); }
  Status keys(AnyTable&, uint64_t*, uint64_t*, size_t, size_t*) override { return none(); }
  Status get(AnyTable&, const uint64_t*, size_t, uint32_t, float*, size_t, uint8_t*) override {
    return none();
  }
  Status put(AnyTable&, const uint64_t*, size_t, uint32_t, const float*, size_t) override {
    return none();
  }
  Status remove(AnyTable&, const uint64_t*, size_t, uint64_t*) override { return none(); }
  Status create_trainer(const frugal_trainer_config&, AnyTrainerRef*) override { return none(); }
  Status close_trainer(const AnyTrainerRef&, bool) override { return none(); }
  Status set_stream(AnyTrainer&, void*) override { return none(); }
  Status prefetch(AnyTrainer&, uint64_t, const frugal_op*, size_t, bool, uint64_t*) override {
    return none();
  }
  Status cancel(AnyTrainer&, const AnyBatchRef&) override { return none(); }
  Status step_begin(AnyTrainer&, uint64_t, Deadline) override { return none(); }
  Status lookup(AnyTrainer&, const frugal_op*, size_t) override { return none(); }
  Status push(AnyTrainer&, const frugal_op*, size_t) override { return none(); }
  Status borrow(AnyTrainer&, size_t, void**) override { return none(); }
  Status step_end(AnyTrainer&, uint64_t, uint32_t) override { return none(); }
  Status abort_call(AnyTrainer&) override { return none(); }
  Status read(AnyTrainer*, const frugal_op*, size_t, Deadline) override { return none(); }
  Status told(AnyTrainer&, Status status) override { return status; }

 private:
  static Status none() { return FRUGAL_ERR_UNSUPPORTED; }
};

struct OneTable final : AnyTable {
  Rows rows;
};
OneTable& own(AnyTable& table) { return static_cast<OneTable&>(table); }

struct OneBatch final : AnyBatch {
  std::vector<AnyTableRef> tables;
  size_t size() const override { return tables.size(); }
  const AnyTable& table(size_t part) const override { return *tables[part]; }
};

struct Data final : DataPath {
  Status parallel(size_t chunks, void (*run)(void*, size_t), void* context) override {
    for (size_t i = 0; i < chunks; ++i) run(context, i);
    return FRUGAL_OK;
  }
};

struct View final : StepView {
  using StepView::StepView;
  Status begin(Use) override { return FRUGAL_OK; }
  Status resolve(const frugal_op* ops, const GpuOp*, Use) override {
    for (size_t i = 0; i < accesses.size(); ++i) {
      Access& a = accesses[i];
      if (a.part) continue;
      ++resolved;
      Rows& rows = own(*a.table).rows;
      a.part = make_part();
      const bool padded = ops[i].flags & FRUGAL_OP_PADDING;
      FRUGAL_TRY(
          a.part->take_keys(pool, rows, ops[i].keys, ops[i].count, padded, ops[i].padding_key));
      FRUGAL_TRY(a.part->resolve(pool, rows, Rows::Missing::kReserve, nullptr));
    }
    return FRUGAL_OK;
  }
  Status create() override { return FRUGAL_OK; }
  Status rows_of(const Access& a, RowSource* out) override {
    out->rows = own(*a.table).rows.ref();
    out->versions = versions;
    return FRUGAL_OK;
  }
  Status show_device(const Access&, DeviceWork&) override { return FRUGAL_OK; }
  Status row_awaited() override {
    return fail(FRUGAL_ERR_PEER_LOST, "the thread that writes the row is gone");
  }
  Status end(bool) override { return ends; }
  BufferPool& sums(bool) override { return pool; }
  bool keeps_gradients() const override { return keeps; }
  bool streams_sums() const override { return false; }
  void count(Use, const Counts& c) override { keys += c.keys; }

  int resolved = 0;
  Status ends = FRUGAL_OK;
  bool keeps = false;
  const VersionWord* versions = nullptr;
  uint64_t keys = 0;
};

class RowPathTest : public testing::Test {
 protected:
  RowPathTest() {
    trainer.session = session;
    trainer.step = 5;
    trainer.rank = 1;
    trainer.call_mu.lock();
    table = make_table("t");
    other = make_table("o");
  }
  ~RowPathTest() override {
    for (const AnyTableRef& t : {table, other}) handle_remove(HandleKind::kTable, t->handle);
    for (uint64_t handle : batches) handle_remove(HandleKind::kBatch, handle);
    trainer.call_mu.unlock();
  }
  AnyTableRef make_table(const char* name) {
    auto t = std::make_shared<OneTable>();
    EXPECT_OK(t->rows.open(rows_config(kRows, kDim, FRUGAL_SGD), nullptr));
    EXPECT_OK(t->rows.initialize_range(0, kRows));
    t->session = session;
    t->name = name;
    t->dim = kDim;
    t->stride = t->rows.layout().sums_stride;
    t->capacity = kRows;
    t->handle = handle_of<AnyTable>(t);
    return t;
  }
  frugal_op op(const AnyTableRef& of, const std::vector<uint64_t>& keys) {
    frugal_op o = FRUGAL_OP_INIT;
    o.table = reinterpret_cast<frugal_table*>(of->handle);
    o.keys = keys.data();
    o.count = keys.size();
    return o;
  }
  // An op that names a part of a batch, without keys.
  frugal_op op(const AnyTableRef& of, const std::shared_ptr<OneBatch>& batch, uint32_t part = 0) {
    frugal_op o = FRUGAL_OP_INIT;
    o.table = reinterpret_cast<frugal_table*>(of->handle);
    o.batch = reinterpret_cast<frugal_batch*>(batch->handle);
    o.part = part;
    return o;
  }
  // A batch of the step, whose parts the rank has.
  std::shared_ptr<OneBatch> declare(
      const std::vector<std::pair<AnyTableRef, std::vector<uint64_t>>>& parts,
      const uint64_t* padding = nullptr) {
    auto batch = std::make_shared<OneBatch>();
    batch->session = session.get();
    batch->step = trainer.step;
    batch->rank = trainer.rank;
    batch->handle = handle_of<AnyBatch>(batch);
    batch->id = batch->handle;
    batches.push_back(batch->handle);
    trainer.call_mu.assert_held();
    for (const auto& [of, keys] : parts) {
      StepPart p;
      p.batch = batch->id;
      p.index = static_cast<uint32_t>(batch->tables.size());
      p.table = of;
      p.part = make_part();
      EXPECT_OK(p.part->take_keys(pool, own(*of).rows, keys.data(), keys.size(), padding != nullptr,
                                  padding ? *padding : 0));
      EXPECT_OK(p.part->resolve(pool, own(*of).rows, Rows::Missing::kReserve, nullptr));
      p.whole = p.up_to_date = true;
      trainer.parts.push_back(p);
      batch->tables.push_back(of);
    }
    return batch;
  }
  Status find(const frugal_op& o) {
    trainer.call_mu.assert_held();
    found = {};
    frugal_op reads = o;
    reads.rows_out = out.data();  // which nothing writes here
    return RowPath(view).find(reads, Use::kLookup, nullptr, &found);
  }
  // What a row reads as.
  std::vector<float> row(const AnyTableRef& of, uint32_t slot) {
    const float* at = own(*of).rows.values(slot);
    return {at, at + kDim};
  }
  Status look(const frugal_op& of, size_t keys) {
    frugal_op o = of;
    out.assign(keys * kDim, -7);
    o.rows_out = out.data();
    return RowPath(view).lookup(&o, 1);
  }
  std::vector<float> out_row(size_t i) {
    return {out.begin() + i * kDim, out.begin() + (i + 1) * kDim};
  }
  Status push(const frugal_op& of, const std::vector<float>& grads) {
    frugal_op o = of;
    o.grads = grads.data();
    return RowPath(view).push(&o, 1);
  }
  PushState* pushed(const AnyTableRef& of) {
    trainer.call_mu.assert_held();
    const auto at = trainer.pushes.find(of.get());
    return at == trainer.pushes.end() ? nullptr : &at->second;
  }

  frugal_config config = FRUGAL_CONFIG_INIT;
  std::shared_ptr<Opened> session = std::make_shared<Opened>(config);
  BufferPool pool;
  AnyTrainer trainer;
  Data data;
  AnyTableRef table, other;
  std::vector<uint64_t> batches;
  View view{*session, trainer, data, pool, pool, true};
  Access found;
  std::vector<float> out = std::vector<float>(kDim);
};

// --- Finding -------------------------------------------------------------------------------------

TEST_F(RowPathTest, ADeclarationByItsBatch) {
  const auto batch = declare({{table, {3, 1, 3}}, {other, {7}}, {table, {9}}});
  trainer.call_mu.assert_held();
  for (const uint32_t part : {0u, 2u, 1u, 1u, 0u}) {
    ASSERT_OK(find(op(part == 1 ? other : table, batch, part)));
    EXPECT_EQ(found.part, trainer.parts[part].part);
    EXPECT_EQ(found.number, part);
    EXPECT_TRUE(found.whole);
  }
}

TEST_F(RowPathTest, ADeclarationByItsKeys) {
  const std::vector<uint64_t> one{3, 1, 3}, two{1, 3, 3}, three{3, 1};
  const auto batch = declare({{other, one}, {table, one}, {table, three}});
  trainer.call_mu.assert_held();
  ASSERT_OK(find(op(table, one)));
  EXPECT_EQ(found.part, trainer.parts[1].part);
  ASSERT_OK(find(op(table, three)));
  EXPECT_EQ(found.part, trainer.parts[2].part);
  ASSERT_OK(find(op(table, two)));
  EXPECT_FALSE(found.part || found.declared) << "the same rows, in another order";
  frugal_op with = op(table, one);
  with.batch = reinterpret_cast<frugal_batch*>(batch->handle);
  with.part = 1;
  ASSERT_OK(find(with));
  EXPECT_EQ(found.part, trainer.parts[1].part);
  with.keys = two.data();
  ASSERT_OK(find(with));
  EXPECT_FALSE(found.part || found.declared);
}

// With another padding key a declaration has other rows.
TEST_F(RowPathTest, ThePaddingKey) {
  const uint64_t padding = 1;
  const std::vector<uint64_t> keys{3, 1, 3};
  const auto batch = declare({{table, keys}}, &padding);
  ASSERT_OK(find(op(table, keys)));
  EXPECT_FALSE(found.part);
  frugal_op padded = op(table, keys);
  padded.flags = FRUGAL_OP_PADDING;
  padded.padding_key = 1;
  ASSERT_OK(find(padded));
  EXPECT_TRUE(found.part && found.whole);
  padded.padding_key = 3;
  ASSERT_OK(find(padded));
  EXPECT_FALSE(found.part);
  padded.batch = reinterpret_cast<frugal_batch*>(batch->handle);
  ASSERT_OK(find(padded));
  EXPECT_FALSE(found.part) << "the batch has other rows";
  padded.padding_key = 1;
  ASSERT_OK(find(padded));
  EXPECT_TRUE(found.part);
  frugal_op named = op(table, batch);
  ASSERT_OK(find(named)) << "as it was declared";
  EXPECT_TRUE(found.whole);
  named.flags = FRUGAL_OP_PADDING;
  named.padding_key = 3;
  EXPECT_EQ(find(named), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_NE(LastMessage().find("padding key differs"), std::string::npos);
}

TEST_F(RowPathTest, BatchesThatAreNotTheOpsOwn) {
  const std::vector<uint64_t> keys{3};
  const auto batch = declare({{table, keys}});
  trainer.call_mu.assert_held();
  trainer.parts[0].up_to_date = false;  // else only the handle is checked
  const frugal_op good = op(table, batch);
  ASSERT_OK(find(good));
  EXPECT_EQ(found.declared, trainer.parts[0].part) << "the batch must be checked before it is read";
  EXPECT_FALSE(found.part);
  const auto refused = [&](Status status, const char* text, const frugal_op& o) {
    EXPECT_EQ(find(o), status) << text;
    EXPECT_NE(LastMessage().find(text), std::string::npos) << LastMessage();
  };
  refused(FRUGAL_ERR_INVALID_ARGUMENT, "has 1 parts", op(table, batch, 1));
  refused(FRUGAL_ERR_INVALID_ARGUMENT, "is of table 't'", op(other, batch));
  AnyTrainer somebody;
  batch->trainer = &somebody;
  refused(FRUGAL_ERR_INVALID_ARGUMENT, "another trainer", good);
  batch->trainer = &trainer;
  ASSERT_OK(find(good));
  batch->rank = 0;
  refused(FRUGAL_ERR_INVALID_ARGUMENT, "of rank 0", good);
  batch->rank = 1;
  batch->step = 6;
  refused(FRUGAL_ERR_INVALID_ARGUMENT, "for step 6", good);
  batch->step = 4;
  refused(FRUGAL_ERR_BAD_HANDLE, "no open batch", good);
  batch->step = 5;
  batch->session = nullptr;
  refused(FRUGAL_ERR_BAD_HANDLE, "no open batch", good);
  batch->session = session.get();
  batch->failed = FRUGAL_ERR_OUT_OF_MEMORY;
  batch->why = "too few bytes";
  refused(FRUGAL_ERR_OUT_OF_MEMORY, "give the keys: too few bytes", good);
  frugal_op with = good;
  with.keys = keys.data();
  with.count = 1;
  ASSERT_OK(find(with));
}

TEST_F(RowPathTest, IdsThatATableHasNot) {
  const std::vector<uint64_t> keys{3, kRows};
  EXPECT_EQ(find(op(table, keys)), FRUGAL_ERR_KEY_OUT_OF_RANGE);
  frugal_op padded = op(table, keys);
  padded.flags = FRUGAL_OP_PADDING;
  padded.padding_key = kRows;
  EXPECT_OK(find(padded));
  frugal_op gone = op(table, keys);
  gone.table = nullptr;
  EXPECT_EQ(find(gone), FRUGAL_ERR_BAD_HANDLE);
}

// --- Lookups -------------------------------------------------------------------------------------

TEST_F(RowPathTest, RowsComeInTheOpsOrder) {
  const std::vector<uint64_t> keys{9, 2, 9, 40};
  declare({{table, keys}});
  ASSERT_OK(look(op(table, keys), keys.size()));
  for (size_t i = 0; i < keys.size(); ++i)
    EXPECT_EQ(out_row(i), row(table, static_cast<uint32_t>(keys[i]))) << i;
  EXPECT_EQ(view.resolved, 0);
  const std::vector<uint64_t> others{2, 9};
  frugal_op padded = op(table, others);
  padded.flags = FRUGAL_OP_PADDING;
  padded.padding_key = 9;
  ASSERT_OK(look(padded, 2));
  EXPECT_EQ(view.resolved, 1);
  EXPECT_EQ(out_row(0), row(table, 2));
  EXPECT_EQ(out_row(1), std::vector<float>(kDim, 0));
  EXPECT_EQ(view.keys, 6u);
}

TEST_F(RowPathTest, ALookupThatIsUndone) {
  const std::vector<uint64_t> keys{9};
  view.ends = FRUGAL_ERR_STEP_ABORTED;
  EXPECT_EQ(look(op(table, keys), 1), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(view.keys, 0u);
}

// Rows that are written meanwhile: the reader waits for the writing thread, as long as that pays.
TEST_F(RowPathTest, RowsThatAreBeingWritten) {
  std::vector<VersionWord> versions(kVersionWords);
  view.versions = versions.data();
  const std::vector<uint64_t> keys{9};
  ASSERT_OK(look(op(table, keys), 1));
  EXPECT_EQ(out_row(0), row(table, 9));
  begin_write(versions[version_of(0, 9)]);
  EXPECT_EQ(look(op(table, keys), 1), FRUGAL_ERR_PEER_LOST);
}

// --- Pushes --------------------------------------------------------------------------------------

std::vector<float> gradients(std::initializer_list<float> of) {
  std::vector<float> all;
  for (float x : of) all.insert(all.end(), kDim, x);
  return all;
}

TEST_F(RowPathTest, APushIsSummedByRow) {
  const std::vector<uint64_t> keys{9, 2, 9};
  declare({{table, keys}});
  ASSERT_OK(push(op(table, keys), gradients({1, 10, 100})));
  const PushState* state = pushed(table);
  ASSERT_TRUE(state);
  const RankGradients& h = state->first;
  EXPECT_EQ(h.rank, 1u);
  EXPECT_TRUE(h.whole);
  ASSERT_EQ(h.rows(), 2u);
  EXPECT_EQ(h.slots()[0], 2u);
  EXPECT_EQ(h.sums.as<float>()[0], 10);
  EXPECT_EQ(h.sums.as<float>()[h.stride], 101);
  EXPECT_EQ(pushed(other), nullptr);
  EXPECT_EQ(view.keys, 3u);
}

// A later push of the table is kept apart, and goes when its call fails; so does a first one.
TEST_F(RowPathTest, APushThatFailsLeavesWhatWasBefore) {
  const std::vector<uint64_t> keys{9}, later{2};
  ASSERT_OK(push(op(table, keys), gradients({1})));
  ASSERT_OK(push(op(table, later), gradients({2})));
  ASSERT_EQ(pushed(table)->tail.size(), 1u);
  view.ends = FRUGAL_ERR_STEP_ABORTED;
  EXPECT_EQ(push(op(table, keys), gradients({3})), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(pushed(table)->tail.size(), 1u);
  EXPECT_EQ(pushed(table)->first.sums.as<float>()[0], 1);
  EXPECT_EQ(push(op(other, keys), gradients({3})), FRUGAL_ERR_STEP_ABORTED);
  EXPECT_EQ(pushed(other), nullptr);
  EXPECT_EQ(view.keys, 2u);
}

// Of two ops in a call one is refused: nothing of the other stays.
TEST_F(RowPathTest, ACallIsTakenAsAWhole) {
  const std::vector<uint64_t> keys{9};
  other->nan_policy = FRUGAL_NAN_REJECT;
  const std::vector<float> good = gradients({1}), bad = gradients({std::nanf("")});
  frugal_op ops[2] = {op(table, keys), op(other, keys)};
  ops[0].grads = good.data();
  ops[1].grads = bad.data();
  EXPECT_EQ(RowPath(view).push(ops, 2), FRUGAL_ERR_NAN);
  EXPECT_NE(LastMessage().find("op 1 of 2 (table 'o')"), std::string::npos) << LastMessage();
  EXPECT_EQ(pushed(table), nullptr);
  EXPECT_EQ(pushed(other), nullptr);
  ops[1].grads = good.data();
  ASSERT_OK(RowPath(view).push(ops, 2));
  EXPECT_TRUE(pushed(table) && pushed(other));
}

// Lent memory that has a gradient for each row is submitted as it is, until another push of the
// table needs its sums.
TEST_F(RowPathTest, LentGradientsAreKept) {
  view.keeps = true;
  void* lent = nullptr;
  ASSERT_OK(RowPath(view).borrow(2 * kDim * sizeof(float), &lent));
  const std::vector<float> from = gradients({1, 2});
  std::copy(from.begin(), from.end(), static_cast<float*>(lent));
  const std::vector<uint64_t> keys{9, 2};
  frugal_op o = op(table, keys);
  o.grads = static_cast<float*>(lent);
  ASSERT_OK(RowPath(view).push(&o, 1));
  const RankGradients& h = pushed(table)->first;
  EXPECT_TRUE(h.lent);
  EXPECT_EQ(h.source.grads, lent);
  EXPECT_FALSE(h.sums);
  ASSERT_OK(push(op(table, keys), gradients({5, 5})));
  EXPECT_FALSE(h.lent);
  EXPECT_EQ(h.sums.as<float>()[0], 2) << "of row 2";
  EXPECT_EQ(pushed(table)->tail.size(), 1u);
  frugal_op padded = op(other, keys);
  padded.flags = FRUGAL_OP_PADDING;
  padded.padding_key = 9;
  padded.grads = static_cast<float*>(lent);
  ASSERT_OK(RowPath(view).push(&padded, 1));
  ASSERT_FALSE(pushed(other)->first.lent) << "not all of them count";
  EXPECT_EQ(pushed(other)->first.sums.as<float>()[0], 2);
}

}  // namespace frugal::row_path_test
