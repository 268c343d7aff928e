// Every device kernel, run on the simulated GPU, gives the bits of the CPU kernels, with all
// optimizers and options.
//
// Cases are random rows, rows with up to 5,000 occurrences, padding, strides, misaligned outputs,
// special values, and shapes that make kernels loop. A kernel reads a row of host memory once,
// however often the batch has it. Each buffer has its exact size, so any access beyond it is a
// fault. Bytes that a kernel must not write are compared as well. A failing case prints its seed,
// and FRUGAL_TEST_SEED in the environment replays it.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/fpenv.h"
#include "device/cpu/sort.h"
#include "device/kernels.h"
#include "device/ops/shapes.h"
#include "sim/sim.h"
#include "storage/rows.h"
#include "support/random.h"

namespace frugal::device {
namespace {

constexpr uint64_t kLong = 600'000'000'000;
constexpr uint32_t kDims[] = {1, 3, 4, 5, 16, 31, 32, 33, 64, 100, 128, 512, 1000};

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

// --- Random values ------------------------------------------------------------------------------

using Random = RandomValues;

template <class T>
std::vector<T> filled(size_t n, Random& random, double special, bool nans = true) {
  std::vector<T> v(n);
  for (T& x : v) x = random.value(special, nans);
  return v;
}

::testing::AssertionResult same(const std::vector<float>& a, const std::vector<float>& b,
                                bool any_nan = false) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < a.size(); ++i) {
    if (any_nan && std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (bits(a[i]) != bits(b[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << ": " << std::hex << bits(a[i]) << " is not " << bits(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

// --- A device and its memory --------------------------------------------------------------------

struct Pinned {
  Pinned(Runtime& device_in, size_t n) : device(device_in), bytes((n + 4095) / 4096 * 4096) {
    bytes = std::max<size_t>(bytes, 4096);
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_TRUE(device.pin(p, bytes).ok());
  }
  ~Pinned() {
    device.unpin(p);
    munmap(p, bytes);
  }
  Runtime& device;
  size_t bytes;
  void* p;
};

enum class Where { kHost, kDevice };

// Values in memory that kernels see: in device memory of exactly that size, or in pinned memory, at
// its end if that is aligned.
template <class T>
class Array {
 public:
  // `offset`: bytes from an aligned address.
  Array(Runtime& device, Where where, std::vector<T> values, size_t offset = 0)
      : device_(device), where_(where), values_(std::move(values)) {
    const size_t bytes = values_.size() * sizeof(T) + offset;
    pinned_ = std::make_unique<Pinned>(device, bytes + 256);
    if (where_ == Where::kDevice) {
      EXPECT_TRUE(device.alloc(std::max<size_t>(bytes, 1), &memory_).ok());
      at_ = {memory_.address + offset};
      copy(
          memory_, Runtime::visible(pinned_->p),
          [&] { put(static_cast<char*>(pinned_->p) + offset); }, bytes);
    } else {
      char* p = static_cast<char*>(pinned_->p) + (pinned_->bytes - bytes) / 256 * 256 + offset;
      put(p);
      at_ = {Runtime::visible(p).address};
    }
  }
  ~Array() {
    if (where_ == Where::kDevice) device_.free(memory_);
  }
  Array(const Array&) = delete;
  Ptr<T> ptr() const { return at_; }
  size_t size() const { return values_.size(); }
  // As it was made.
  const std::vector<T>& made() const { return values_; }
  // As it is now.
  std::vector<T> now() {
    std::vector<T> v(values_.size());
    const size_t offset = where_ == Where::kDevice ? at_.address - memory_.address : 0;
    if (where_ == Where::kDevice) {
      copy(
          Runtime::visible(pinned_->p), memory_, [] {}, v.size() * sizeof(T) + offset);
    }
    const char* p = where_ == Where::kDevice ? static_cast<char*>(pinned_->p) + offset
                                             : reinterpret_cast<const char*>(at_.address);
    if (!v.empty()) std::memcpy(v.data(), p, v.size() * sizeof(T));
    return v;
  }

 private:
  void put(char* p) const {
    if (!values_.empty()) std::memcpy(p, values_.data(), values_.size() * sizeof(T));
  }
  template <class First>
  void copy(Ptr<char> to, Ptr<char> from, First first, size_t bytes) {
    first();
    if (bytes == 0) return;
    Event e;
    bool passed = false;
    EXPECT_TRUE(device_.create_event(&e).ok());
    EXPECT_TRUE(device_.copy(to, from, bytes, {}).ok());
    EXPECT_TRUE(device_.record(e, {}).ok());
    const Result r = device_.synchronize(e, kLong, &passed);
    EXPECT_TRUE(r.ok() && passed) << r.text;
    device_.destroy_event(e);
  }
  Runtime& device_;
  Where where_;
  std::vector<T> values_;
  std::unique_ptr<Pinned> pinned_;
  Ptr<char> memory_;
  Ptr<T> at_;
};

template <class T>
std::unique_ptr<Array<T>> make(Runtime& d, Where where, std::vector<T> values, size_t offset = 0) {
  return std::make_unique<Array<T>>(d, where, std::move(values), offset);
}

class OpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(sim::open_sim(0, &runtime_).ok());
    static_cast<sim::Sim*>(runtime_.get())->set_delays({0, 0, 0, 0, 0});
  }
  // Runs `body` for `count` seeds.
  template <class Body>
  void for_seeds(uint64_t count, Body body) {
    for (uint64_t seed = first_seed(); seed < first_seed() + count; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Random random(seed);
      body(random);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
  template <class Arguments>
  void launch(Kernel kernel, const Shape& shape, const Arguments& a) {
    Event e;
    bool passed = false;
    ASSERT_TRUE(runtime_->create_event(&e).ok());
    Result r = runtime_->launch(static_cast<uint32_t>(kernel), shape, &a, sizeof a, {});
    ASSERT_TRUE(r.ok()) << r.text;
    ASSERT_TRUE(runtime_->record(e, {}).ok());
    r = runtime_->synchronize(e, kLong, &passed);
    ASSERT_TRUE(r.ok() && passed) << r.text;
    runtime_->destroy_event(e);
  }
  // Few blocks, so that kernels have to loop.
  Extent extent(Random& random) {
    Extent e;
    e.threads = random.one_of({32u, 64u, 256u});
    e.processors = 1;
    e.link_blocks = static_cast<uint32_t>(random.from(1, 3));
    if (random.chance(0.7)) e.processors = 0;  // one block
    return e;
  }
  Where anywhere(Random& random) { return random.chance(0.5) ? Where::kHost : Where::kDevice; }

  std::shared_ptr<Runtime> runtime_;
  const Kernels& cpu_ = kernels();
  FpEnvironment environment_;
};

// --- Batches ------------------------------------------------------------------------------------

// Keys of a batch, sorted, in memory that kernels see.
struct Batch {
  // `counts`: of the occurrences of some rows.
  Batch(Runtime& d, Random& random, uint32_t rows, std::vector<uint32_t> counts, size_t others,
        size_t padding) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const uint32_t slot = static_cast<uint32_t>(random.below(rows));
      slots.insert(slots.end(), counts[i], slot);
    }
    for (size_t i = 0; i < others; ++i) {
      // Few rows are frequent, many are rare.
      const double u = static_cast<double>(random.from(1, 1000)) / 1000;
      slots.push_back(static_cast<uint32_t>(u * u * u * (rows - 1)));
    }
    slots.insert(slots.end(), padding, kPaddingSlot);
    random.shuffle(slots);
    pairs.resize(slots.size() + 1);
    std::vector<uint64_t> scratch(sort_scratch(slots.size(), rows) / 8);
    const size_t count =
        sort_pairs(slots.data(), slots.size(), 0, rows, pairs.data(), scratch.data());
    pairs.resize(count);
    distinct.resize(count + 1);
    start.resize(count + 2);
    distinct.resize(distinct_slots(pairs.data(), count, distinct.data(), start.data()));
    start.resize(distinct.size() + 1);
    for (const uint64_t p : pairs) positions.push_back(static_cast<uint32_t>(p));
    for (uint32_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == kPaddingSlot) positions.push_back(i);
    }
    for (uint32_t i = 0; i < distinct.size(); ++i) {
      const uint32_t n = runs_of(i);
      if (n == 1) continue;
      frequent_list.push_back({i, static_cast<uint32_t>(items.size())});
      for (uint32_t run = 0; run < n; ++run) items.push_back({i, run});
    }
    memory[0] = make(d, random.chance(0.5) ? Where::kHost : Where::kDevice, distinct);
    memory[1] = make(d, random.chance(0.5) ? Where::kHost : Where::kDevice, start);
    memory[2] = make(d, random.chance(0.5) ? Where::kHost : Where::kDevice, positions);
    part = {memory[0]->ptr(), memory[1]->ptr(), memory[2]->ptr(),
            static_cast<uint32_t>(distinct.size()),
            static_cast<uint32_t>(positions.size() - pairs.size())};
  }
  uint32_t occurrences(uint32_t row) const { return start[row + 1] - start[row]; }
  uint32_t runs_of(uint32_t row) const { return (occurrences(row) + kRun - 1) / kRun; }

  std::vector<uint32_t> slots;  // of keys
  std::vector<uint64_t> pairs;
  std::vector<uint32_t> distinct, start, positions;
  std::vector<FrequentRow> frequent_list;
  std::vector<Item> items;  // runs of frequent rows
  std::unique_ptr<Array<uint32_t>> memory[3];
  PartPtr part;
};

// A source has four bytes, and no two kinds of rows share one.
TEST(Source, Kinds) {
  static_assert(sizeof(Source) == 4);
  EXPECT_FALSE(Source().is_own());
  for (const uint32_t i : {0u, 1u, 77u, Source::kMost - 1}) {
    const Source place = Source::host(i), cache_slot = Source::cache_slot(i),
                 staged = Source::staged(i);
    EXPECT_FALSE(place.is_own());
    EXPECT_EQ(place.word, i);
    EXPECT_TRUE(cache_slot.is_own() && !cache_slot.is_staged());
    EXPECT_TRUE(staged.is_own() && staged.is_staged());
    EXPECT_EQ(cache_slot.index(), i);
    EXPECT_EQ(staged.index(), i);
    for (const Source s : {place, cache_slot, staged})
      EXPECT_FALSE(s.is_padding() || s.is_missing());
  }
  EXPECT_TRUE(Source::host(kPaddingSlot).is_padding());
  EXPECT_TRUE(Source::host(kMissingSlot).is_missing());
}

// Occurrences that are at the edges of runs, and large ones where rows are narrow.
std::vector<uint32_t> frequent(Random& random, uint32_t dim) {
  std::vector<uint32_t> counts;
  for (const uint32_t n : {1u, 31u, 32u, 33u, 64u, 65u}) {
    if (random.chance(0.5)) counts.push_back(n);
  }
  if (dim <= 128 && random.chance(0.3)) counts.push_back(1000);
  if (dim <= 33 && random.chance(0.2)) counts.push_back(5000);
  return counts;
}

Batch random_batch(Runtime& d, Random& random, uint32_t rows, uint32_t dim) {
  const bool empty = random.chance(0.03);
  const size_t others = empty ? 0 : random.below(dim <= 128 ? 300 : 40);
  return Batch(d, random, rows, empty ? std::vector<uint32_t>() : frequent(random, dim), others,
               random.chance(0.6) ? random.below(20) : 0);
}

size_t row_stride(uint32_t dim) { return RowLayout::of(dim, FRUGAL_SGD).sums_stride; }

// Where rows are read: in host rows, cached rows, or staged rows. Cached rows hold other values
// than the host row of their slot, so that it shows which was read.
struct RowSources {
  RowSources(Runtime& d, Random& random, uint32_t rows, uint32_t dim, const Batch& batch, bool hbm,
             bool all_staged)
      : stride(row_stride(dim)) {
    host = make(d, Where::kHost, filled<float>(rows * stride, random, 0.05));
    cached_rows =
        make(d, Where::kDevice, filled<float>(batch.distinct.size() * stride, random, 0.05));
    staged = make(d, Where::kDevice, filled<float>(batch.distinct.size() * stride, random, 0.0));
    std::vector<uint32_t> cache_slot(batch.distinct.size());
    std::iota(cache_slot.begin(), cache_slot.end(), 0u);
    random.shuffle(cache_slot);
    for (uint32_t i = 0; i < batch.distinct.size(); ++i) {
      const float* from = host->made().data() + batch.distinct[i] * stride;
      source.push_back({});
      if (hbm && random.chance(0.4)) {
        source[i] = Source::cache_slot(cache_slot[i]);
        from = cached_rows->made().data() + cache_slot[i] * stride;
      } else if (!all_staged && (batch.runs_of(i) > 1 || (hbm && random.chance(0.1)))) {
        source[i] = Source::staged(static_cast<uint32_t>(to_stage.size()));
        to_stage.push_back(i);
      }
      row.push_back(from);
    }
    if (all_staged) {  // row i goes to i
      for (uint32_t i = 0; i < source.size(); ++i) {
        if (!source[i].is_own()) to_stage.push_back(i);
      }
    }
    sources = make(d, Where::kHost, source);
  }
  RowsPtr host_rows() const { return {host->ptr(), stride}; }
  RowsPtr cached_row_pointer() const { return {cached_rows->ptr(), stride}; }
  RowsPtr staged_rows() const { return {staged->ptr(), stride}; }
  // The runs of positions of rows that are read in host rows, and those of the others.
  void split(const Batch& batch, std::vector<Item>* host_items,
             std::vector<Item>* hbm_items) const {
    for (uint32_t i = 0; i < batch.distinct.size(); ++i)
      for (uint32_t run = 0; run < batch.runs_of(i); ++run)
        (source[i].is_own() ? hbm_items : host_items)->push_back({i, run});
  }
  // For each key the row that it reads; NULL for padding.
  std::vector<const float*> of_keys(const Batch& batch) const {
    std::vector<const float*> rows(batch.slots.size(), nullptr);
    for (uint32_t i = 0; i < batch.distinct.size(); ++i) {
      for (uint32_t p = batch.start[i]; p < batch.start[i + 1]; ++p) {
        rows[batch.positions[p]] = row[i];
      }
    }
    return rows;
  }
  size_t stride;
  std::unique_ptr<Array<float>> host, cached_rows, staged;
  std::unique_ptr<Array<Source>> sources;
  std::vector<Source> source;
  std::vector<uint32_t> to_stage;
  std::vector<const float*> row;
};

// --- Reading ------------------------------------------------------------------------------------

class ReadTest : public OpsTest {
 protected:
  void stage(Random& random, const Batch& batch, const RowSources& row_sources, uint32_t dim,
             bool in_order) {
    if (row_sources.to_stage.empty()) return;
    auto rows = make(*runtime_, anywhere(random), row_sources.to_stage);
    StageArgs a{};
    a.part = batch.part;
    a.host = row_sources.host_rows();
    a.staged = row_sources.staged_rows();
    const bool all = row_sources.to_stage.size() == batch.distinct.size();
    if (!all || random.chance(0.5)) a.rows = rows->ptr();
    if (!in_order) a.to = rows->ptr();
    a.count = static_cast<uint32_t>(row_sources.to_stage.size());
    a.dim = dim;
    launch(Kernel::stage_rows, stage_shape(a, extent(random)), a);
  }
};

TEST_F(ReadTest, GatherRows) {
  for_seeds(120, [&](Random& random) {
    const uint32_t dim = random.chance(0.02) ? 65536 : random.one_of(kDims);
    const uint32_t rows = dim > 1000 ? 4 : static_cast<uint32_t>(random.from(1, 200));
    const Batch batch = dim > 1000 ? Batch(*runtime_, random, rows, {33}, 4, 2)
                                   : random_batch(*runtime_, random, rows, dim);
    const bool simple = batch.frequent_list.empty() && random.chance(0.5);  // no sources, no items
    const bool hbm = !simple && random.chance(0.8);
    RowSources row_sources(*runtime_, random, rows, dim, batch, hbm, false);
    stage(random, batch, row_sources, dim, true);

    std::vector<Item> items, later;
    uint32_t host_items = 0;
    row_sources.split(batch, &items, &later);
    random.shuffle(items);
    random.shuffle(later);
    host_items = static_cast<uint32_t>(items.size());
    items.insert(items.end(), later.begin(), later.end());
    auto item_memory = make(*runtime_, anywhere(random), items);

    const size_t stride = dim * sizeof(float) + (random.chance(0.5) ? 0 : 4 * random.below(9));
    const size_t n = batch.slots.size();
    const size_t floats = n == 0 ? 0 : ((n - 1) * stride + dim * sizeof(float)) / sizeof(float);
    auto out = make(*runtime_, anywhere(random), filled<float>(floats, random, 0.1),
                    random.chance(0.5) ? 0 : 4 * random.below(4));
    GatherArgs a{};
    a.part = batch.part;
    a.host = row_sources.host_rows();
    a.cached_rows = row_sources.cached_row_pointer();
    a.staged = row_sources.staged_rows();
    if (!simple) {
      a.source = row_sources.sources->ptr();
      a.items = item_memory->ptr();
    }
    a.host_items = host_items;
    a.hbm_items = static_cast<uint32_t>(items.size()) - host_items;
    a.dim = dim;
    a.out = out->ptr();
    a.out_stride = stride;
    const Shape shape = gather_shape(&a, extent(random));
    launch(Kernel::gather_rows, shape, a);

    std::vector<float> expected = out->made();
    if (n != 0) {
      cpu_.gather_pointers(row_sources.of_keys(batch).data(), n, dim, expected.data(), stride,
                           false);
    }
    EXPECT_TRUE(same(out->now(), expected)) << "dim " << dim << ", n " << n;
  });
}

// A row of host memory crosses the PCIe bus once, however often it is in the batch: gathered, or
// prepared if it has more than a run of positions.
TEST_F(ReadTest, HostRowsAreReadOnce) {
  for_seeds(20, [&](Random& random) {
    const uint32_t dim = random.one_of({32u, 64u, 128u}), rows = 200;
    const Batch batch(*runtime_, random, rows, {2, 31, 32, 33, 100}, 200, 5);
    RowSources row_sources(*runtime_, random, rows, dim, batch, random.chance(0.5), false);
    ASSERT_EQ(row_sources.stride, dim);
    const sim::ReadCounts reads(reinterpret_cast<const void*>(row_sources.host->ptr().address),
                                dim * sizeof(float), rows);
    stage(random, batch, row_sources, dim, true);
    std::vector<Item> items, later;
    row_sources.split(batch, &items, &later);
    GatherArgs a{};
    a.host_items = static_cast<uint32_t>(items.size());
    a.hbm_items = static_cast<uint32_t>(later.size());
    items.insert(items.end(), later.begin(), later.end());
    auto item_memory = make(*runtime_, anywhere(random), items);
    auto out = make(*runtime_, Where::kDevice, std::vector<float>(batch.slots.size() * dim));
    a.part = batch.part;
    a.host = row_sources.host_rows();
    a.cached_rows = row_sources.cached_row_pointer();
    a.staged = row_sources.staged_rows();
    a.source = row_sources.sources->ptr();
    a.items = item_memory->ptr();
    a.dim = dim;
    a.out = out->ptr();
    a.out_stride = dim * sizeof(float);
    const Extent e = extent(random);
    const Shape shape = gather_shape(&a, e);
    // Rows in HBM have further blocks.
    ASSERT_GT(a.host_items, 0u);
    ASSERT_GT(a.hbm_items, 0u);
    EXPECT_LE(a.host_blocks, e.link_blocks);
    EXPECT_GT(shape.blocks, a.host_blocks);
    launch(Kernel::gather_rows, shape, a);
    std::vector<uint64_t> expected(rows);
    for (uint32_t i = 0; i < batch.distinct.size(); ++i)
      if (!row_sources.source[i].is_own() || row_sources.source[i].is_staged())
        expected[batch.distinct[i]] = dim * sizeof(float);
    EXPECT_EQ(reads.now(), expected) << "dim " << dim;
  });
}

// Rows beyond 2^32 bytes and 2^32 elements of a table, of which few pages exist; and the same of an
// output, by its stride.
TEST_F(ReadTest, Tier) {
  constexpr size_t kRows = (size_t{1} << 27) + 64, kStride = 32,
                   kBytes = kRows * kStride * sizeof(float);
  constexpr size_t kOutStride = (size_t{5} << 30) + 16;
  constexpr uint32_t kDim = 32, kKeys = 4;
  const size_t out_bytes = (kKeys * kOutStride + 4095) / 4096 * 4096;
  auto map = [](size_t bytes) {
    return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  char* table = map(kBytes);
  char* far_out = map(out_bytes);
  ASSERT_NE(static_cast<void*>(table), MAP_FAILED);
  ASSERT_NE(static_cast<void*>(far_out), MAP_FAILED);
  ASSERT_TRUE(runtime_->pin(table, kBytes).ok());
  ASSERT_TRUE(runtime_->pin(far_out, out_bytes).ok());
  const std::vector<uint32_t> slots = {3, (1u << 25) + 1, (1u << 26) + 5, (1u << 27) + 63};
  Random random(1);
  const std::vector<float> values = filled<float>(kKeys * kDim, random, 0);
  for (size_t i = 0; i < kKeys; ++i) {
    std::memcpy(table + slots[i] * kStride * sizeof(float), values.data() + i * kDim,
                kDim * sizeof(float));
  }
  auto slot_memory = make(*runtime_, Where::kDevice, slots);
  auto count = make(*runtime_, Where::kDevice, std::vector<uint32_t>{0, 1, 2, 3, 4});
  GatherArgs a{};
  a.part = {slot_memory->ptr(), count->ptr(), count->ptr(), kKeys, 0};
  a.host = {{Runtime::visible(table).address}, kStride};
  a.host_items = kKeys;
  a.dim = kDim;
  a.out = {Runtime::visible(far_out).address};
  a.out_stride = kOutStride;
  const Shape shape = gather_shape(&a);
  launch(Kernel::gather_rows, shape, a);
  std::vector<float> out(values.size());
  for (size_t i = 0; i < kKeys; ++i) {
    std::memcpy(out.data() + i * kDim, far_out + i * kOutStride, kDim * sizeof(float));
  }
  EXPECT_TRUE(same(out, values));

  // Staged.
  auto staged = make(*runtime_, Where::kDevice, std::vector<float>(values.size(), -1));
  StageArgs st{};
  st.part = a.part;
  st.host = a.host;
  st.staged = {staged->ptr(), kDim};
  st.count = kKeys;
  st.dim = kDim;
  launch(Kernel::stage_rows, stage_shape(st), st);
  EXPECT_TRUE(same(staged->now(), values));

  // As keys of a bag each, and with the gradients of their weights.
  auto one = make(*runtime_, Where::kDevice, std::vector<float>(kDim, 1));
  auto zero = make(*runtime_, Where::kDevice, std::vector<uint32_t>(kKeys, 0));
  auto offsets = make(*runtime_, Where::kDevice, std::vector<uint64_t>{0, 1, 2, 3, 4});
  std::memset(far_out, 0, kDim * sizeof(float));
  PoolArgs pool{};
  pool.host = a.host;
  pool.key_sources = as<Source>(slot_memory->ptr());
  pool.bags = {offsets->ptr(), kKeys, kKeys, {}};
  pool.dim = kDim;
  pool.out = a.out;
  pool.out_stride = kOutStride;
  launch(Kernel::pool_rows, pool_shape(pool, 1), pool);
  for (size_t i = 0; i < kKeys; ++i)
    std::memcpy(out.data() + i * kDim, far_out + i * kOutStride, kDim * sizeof(float));
  EXPECT_TRUE(same(out, values));
  auto dots = make(*runtime_, Where::kDevice, std::vector<float>(kKeys, -1));
  WeightGradArgs w{};
  w.host = a.host;
  w.key_sources = as<Source>(slot_memory->ptr());
  w.grads = one->ptr();
  w.bag = zero->ptr();
  w.keys = kKeys;
  w.dim = kDim;
  w.out = dots->ptr();
  launch(Kernel::weight_grads, weight_grads_shape(w), w);
  auto near_dots = make(*runtime_, Where::kDevice, std::vector<float>(kKeys, -1));
  w.host = st.staged;
  w.key_sources = as<Source>(count->ptr());
  w.out = near_dots->ptr();
  launch(Kernel::weight_grads, weight_grads_shape(w), w);
  EXPECT_TRUE(same(dots->now(), near_dots->now()));

  // Gradients that are far apart, to sums.
  auto sums = make(*runtime_, Where::kHost, std::vector<float>(values.size(), -1));
  ReduceArgs r{};
  r.part = a.part;
  r.source.grads = a.out;
  r.source.stride = kOutStride;
  r.dim = kDim;
  r.sums = sums->ptr();
  r.sums_stride = kDim;
  launch(Kernel::reduce_runs, reduce_shape(r), r);
  EXPECT_TRUE(same(sums->now(), values));

  // Cached rows with such numbers: filled, and updated with rank gradients whose rows have them.
  const uint64_t row_bytes = kStride * sizeof(float);
  FillArgs f{};
  f.host = a.host;
  f.cached_rows = {a.out, kStride};
  f.slots = slot_memory->ptr();
  f.to = slot_memory->ptr();
  f.count = kKeys;
  f.dim = kDim;
  launch(Kernel::fill_lines, fill_shape(f), f);
  for (size_t i = 0; i < kKeys; ++i)
    std::memcpy(out.data() + i * kDim, far_out + slots[i] * row_bytes, kDim * sizeof(float));
  EXPECT_TRUE(same(out, values));
  std::vector<Term> terms;
  for (uint32_t slot : slots) terms.push_back({0, slot});
  auto term_memory = make(*runtime_, Where::kDevice, terms);
  auto ranks = make(*runtime_, Where::kDevice, std::vector<Ptr<float>>{a.host.values});
  auto cached_sums = make(*runtime_, Where::kDevice, std::vector<float>(values.size(), -1));
  SumTermsArgs t{};
  t.ranks = ranks->ptr();
  t.ranks_stride = kStride;
  t.terms = term_memory->ptr();
  t.count = kKeys;
  t.dim = kDim;
  t.sums = cached_sums->ptr();
  t.sums_stride = kDim;
  launch(Kernel::sum_terms, sum_terms_shape(t), t);
  EXPECT_TRUE(same(cached_sums->now(), values));
  frugal_optimizer sgd = FRUGAL_OPTIMIZER_INIT;
  sgd.kind = FRUGAL_SGD;
  sgd.lr = 1;
  ApplyArgs u{};
  u.step = arith::step_scalars(sgd, 0, 1, FRUGAL_NAN_ACCEPT, kDim);
  u.cached_rows = f.cached_rows;
  u.to = slot_memory->ptr();
  u.count = kKeys;
  u.dim = kDim;
  u.sums = t.sums;
  u.sums_stride = kDim;
  launch(Kernel::apply_sgd, apply_shape(u), u);
  for (size_t i = 0; i < kKeys * kDim; ++i) {
    float now;
    std::memcpy(&now, far_out + slots[i / kDim] * row_bytes + i % kDim * sizeof(float), sizeof now);
    EXPECT_EQ(now, 0.0f) << i;
  }
  runtime_->unpin(table);
  runtime_->unpin(far_out);
  munmap(table, kBytes);
  munmap(far_out, out_bytes);
}

TEST_F(ReadTest, PlacesPoolsAndWeightGrads) {
  for_seeds(120, [&](Random& random) {
    const uint32_t dim = random.one_of(kDims);
    const uint32_t rows = static_cast<uint32_t>(random.from(1, 200));
    const Batch batch = random_batch(*runtime_, random, rows, dim);
    const bool all_staged = random.chance(0.5);
    RowSources row_sources(*runtime_, random, rows, dim, batch, random.chance(0.7), all_staged);
    stage(random, batch, row_sources, dim, !all_staged);
    const size_t n = batch.slots.size();
    auto memory = make(*runtime_, anywhere(random), std::vector<Source>(n, Source{0x12345678u}));
    PlaceArgs p{};
    p.part = batch.part;
    p.source = row_sources.sources->ptr();
    p.all_staged = all_staged;
    p.out = memory->ptr();
    launch(Kernel::place_keys, place_shape(p, extent(random)), p);
    std::vector<Source> place = memory->now();
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(place[i].is_padding(), batch.slots[i] == kPaddingSlot);
      if (!place[i].is_padding() && all_staged) {
        ASSERT_TRUE(place[i].is_own());
      }
    }
    // Rows that are missing read as zeros and are terms.
    std::vector<const float*> row = row_sources.of_keys(batch);
    const std::vector<float> zeros(dim, 0.0f);
    const double missing = random.chance(0.3) ? 0.1 : 0.0;
    for (size_t i = 0; i < n; ++i) {
      if (!random.chance(missing)) continue;
      place[i] = Source::host(kMissingSlot);
      row[i] = zeros.data();
    }
    auto key_sources = make(*runtime_, anywhere(random), place);

    std::vector<uint64_t> offsets{0};
    uint64_t longest = 0;
    while (offsets.back() < n) {
      const uint64_t keys = random.chance(0.05)  ? n
                            : random.chance(0.1) ? 0
                                                 : random.from(1, random.chance(0.2) ? 150 : 8);
      offsets.push_back(std::min<uint64_t>(n, offsets.back() + keys));
      longest = std::max(longest, offsets.back() - offsets[offsets.size() - 2]);
    }
    const size_t bags = offsets.size() - 1;
    const bool weighted = random.chance(0.5), mean = !weighted && random.chance(0.5);
    const std::vector<float> weight = filled<float>(n, random, 0.02);
    auto offset_memory = make(*runtime_, anywhere(random), offsets);
    auto weight_memory = make(*runtime_, anywhere(random), weight);
    const size_t stride = dim * sizeof(float) + (random.chance(0.5) ? 0 : 4 * random.below(9));
    auto out = make(*runtime_, anywhere(random), filled<float>(bags * stride / 4, random, 0.1),
                    random.chance(0.5) ? 0 : 4 * random.below(4));
    PoolArgs a{};
    a.host = row_sources.host_rows();
    a.cached_rows = row_sources.cached_row_pointer();
    a.staged = row_sources.staged_rows();
    a.key_sources = key_sources->ptr();
    auto wrong = make(*runtime_, anywhere(random), std::vector<uint32_t>{0});
    a.bags.offsets = offset_memory->ptr();
    a.bags.bags = static_cast<uint32_t>(bags);
    a.bags.keys = static_cast<uint32_t>(n);
    if (random.chance(0.5)) a.bags.wrong = wrong->ptr();
    if (weighted) a.weights = weight_memory->ptr();
    a.mean = mean;
    a.dim = dim;
    a.out = out->ptr();
    a.out_stride = stride;
    launch(Kernel::pool_rows, pool_shape(a, longest, extent(random)), a);
    std::vector<float> expected = out->made();
    cpu_.pool_pointers(row.data(), dim, offsets.data(), 0, bags, weighted ? weight.data() : nullptr,
                       mean, expected.data(), stride);
    EXPECT_TRUE(same(out->now(), expected))
        << "dim " << dim << ", bags " << bags << ", longest " << longest;
    EXPECT_EQ(wrong->now()[0], 0u);

    BagsOfKeysArgs of{};
    of.bags = a.bags;
    if (random.chance(0.5)) of.key_sources = key_sources->ptr();
    auto of_keys = make(*runtime_, Where::kDevice, std::vector<uint32_t>(n, UINT32_MAX));
    auto terms = make(*runtime_, Where::kDevice, std::vector<float>(bags, -1.0f));
    of.bag = of_keys->ptr();
    if (random.chance(0.7)) of.terms = terms->ptr();
    launch(Kernel::bags_of_keys, bags_of_keys_shape(of, extent(random)), of);
    std::vector<float> expected_terms(bags, -1.0f);
    for (size_t b = 0; of.terms && b < bags; ++b) {
      expected_terms[b] = 0;
      for (uint64_t k = offsets[b]; k < offsets[b + 1]; ++k)
        expected_terms[b] += !of.key_sources || !place[k].is_padding();
    }
    EXPECT_TRUE(same(terms->now(), expected_terms));
    EXPECT_EQ(wrong->now()[0], 0u);
    {
      std::vector<uint32_t> expected_bags;
      for (size_t b = 0; b < bags; ++b)
        expected_bags.insert(expected_bags.end(), offsets[b + 1] - offsets[b],
                             static_cast<uint32_t>(b));
      EXPECT_EQ(of_keys->now(), expected_bags);
    }

    // Invalid offsets: nothing after the last key is touched (a fault would show it), and they are
    // reported.
    if (n != 0) {
      std::vector<uint64_t> none = offsets;
      switch (random.below(4)) {
        case 0:
          none.front() = 1;
          break;
        case 1:
          none.back() = n + random.from(1, 5000);
          break;
        case 2:
          none.back() = random.below(n);
          break;
        default:
          none[random.below(bags + 1)] = ~uint64_t{0} - random.below(3);
      }
      auto none_memory = make(*runtime_, anywhere(random), none);
      PoolArgs b = a;
      b.bags.offsets = none_memory->ptr();
      b.bags.wrong = wrong->ptr();
      launch(Kernel::pool_rows, pool_shape(b, n, extent(random)), b);
      EXPECT_EQ(wrong->now()[0], 1u);
      auto again = make(*runtime_, anywhere(random), std::vector<uint32_t>{0});
      of.bags = b.bags;
      of.bags.wrong = again->ptr();
      launch(Kernel::bags_of_keys, bags_of_keys_shape(of, extent(random)), of);
      EXPECT_EQ(again->now()[0], 1u);
    }

    std::vector<uint32_t> bag(n);
    for (size_t b = 0; b < bags; ++b) {
      std::fill(bag.begin() + offsets[b], bag.begin() + offsets[b + 1], static_cast<uint32_t>(b));
    }
    auto bag_memory = make(*runtime_, anywhere(random), bag);
    auto grads = make(*runtime_, Where::kDevice, filled<float>(bags * stride / 4, random, 0.02),
                      random.chance(0.5) ? 0 : 4 * random.below(4));
    auto sums = make(*runtime_, anywhere(random), filled<float>(n, random, 0.0));
    WeightGradArgs w{};
    w.host = a.host;
    w.cached_rows = a.cached_rows;
    w.staged = a.staged;
    w.key_sources = a.key_sources;
    w.grads = grads->ptr();
    w.grads_stride = stride;
    w.bag = bag_memory->ptr();
    w.keys = static_cast<uint32_t>(n);
    w.dim = dim;
    w.out = sums->ptr();
    launch(Kernel::weight_grads, weight_grads_shape(w, extent(random)), w);
    std::vector<float> expected_sums(n);
    cpu_.weight_grads_pointers(row.data(), n, dim,
                               {grads->made().data(), stride, bag.data(), nullptr, nullptr},
                               expected_sums.data());
    EXPECT_TRUE(same(sums->now(), expected_sums)) << "dim " << dim;
  });
}

TEST_F(ReadTest, SameKeys) {
  for_seeds(60, [&](Random& random) {
    const size_t n = random.from(1, 2000);
    const bool hashed = random.chance(0.5), device_order = random.chance(0.5);
    const uint64_t padding = random.chance(0.5) ? ~uint64_t{0} : (uint64_t{1} << 40) + 3;
    std::vector<uint32_t> slots(n);
    std::vector<uint64_t> keys(n);
    for (size_t i = 0; i < n; ++i) {
      slots[i] =
          random.chance(0.1) ? kPaddingSlot : static_cast<uint32_t>(random.below(1u << 31) * 2);
      keys[i] = hashed ? random.below(~uint64_t{0}) : slots[i] == kPaddingSlot ? padding : slots[i];
    }
    auto declared = make(*runtime_, anywhere(random), keys);
    auto slot_memory = make(*runtime_, anywhere(random), slots);
    const bool differs = random.chance(0.5);
    // Any one bit.
    if (differs) keys[random.below(n)] ^= uint64_t{1} << random.below(64);
    auto key_memory = make(*runtime_, Where::kDevice, keys);
    auto flag =
        make(*runtime_, device_order ? Where::kDevice : Where::kHost, std::vector<uint32_t>{0u});
    SameKeysArgs a{};
    a.keys = key_memory->ptr();
    if (hashed) {
      a.declared = declared->ptr();
    } else {
      a.slots = slot_memory->ptr();
      a.padding = padding;
    }
    a.count = n;
    a.differ = flag->ptr();
    launch(Kernel::same_keys, same_keys_shape(a, extent(random)), a);
    EXPECT_EQ(flag->now()[0], differs ? 1u : 0u) << "n " << n;
  });
}

// --- Sums of gradients --------------------------------------------------------------------------

// A gradient source over memory that kernels see, and the same over its copy on the host.
struct Gradients {
  Gradients(Runtime& d, Random& random, uint32_t dim, size_t n) {
    stride = dim * sizeof(float) + (random.chance(0.6) ? 0 : 4 * random.below(9));
    const bool bags = random.chance(0.4);
    const size_t rows = bags ? n / 3 + 1 : n;
    const double special = random.chance(0.5) ? 0.0 : 0.01;
    // Infinities without NaNs: then sums can have a NaN that no term has.
    const bool nans = random.chance(0.5);
    auto place = [&] { return random.chance(0.5) ? Where::kHost : Where::kDevice; };
    grads = make(d, Where::kDevice, filled<float>(rows * stride / 4, random, special, nans),
                 random.chance(0.7) ? 0 : 4 * random.below(4));
    std::vector<uint32_t> of(bags ? n : 0);
    for (uint32_t& b : of) b = static_cast<uint32_t>(random.below(rows));
    bag = make(d, place(), of);
    factor = make(d, place(), filled<float>(random.chance(0.3) ? n : 0, random, special, nans));
    std::vector<float> by(random.chance(0.3) ? rows : 0);
    for (float& x : by) x = static_cast<float>(random.from(1, 50));
    divisor = make(d, place(), by);
    source = {grads->made().data(), stride, bags ? bag->made().data() : nullptr,
              factor->size() ? factor->made().data() : nullptr,
              divisor->size() ? divisor->made().data() : nullptr};
    device = {grads->ptr(), stride, bags ? bag->ptr() : Ptr<uint32_t>{},
              factor->size() ? factor->ptr() : Ptr<float>{},
              divisor->size() ? divisor->ptr() : Ptr<float>{}};
  }
  size_t stride;
  std::unique_ptr<Array<float>> grads, factor, divisor;
  std::unique_ptr<Array<uint32_t>> bag;
  GradSource source;
  GradPtr device;
};

TEST_F(OpsTest, ReduceAndCombine) {
  for_seeds(150, [&](Random& random) {
    const uint32_t dim = random.chance(0.02) ? 65536 : random.one_of(kDims);
    const uint32_t rows = static_cast<uint32_t>(random.from(1, 200));
    const Batch batch = dim > 1000 ? Batch(*runtime_, random, rows, {33, 2}, 0, 2)
                                   : random_batch(*runtime_, random, rows, dim);
    const Gradients grads(*runtime_, random, dim, batch.slots.size());
    const size_t stride = row_stride(dim), distinct = batch.distinct.size();
    auto sums = make(*runtime_, Where::kHost, filled<float>(distinct * stride, random, 0.1));
    auto runs =
        make(*runtime_, anywhere(random), filled<float>(batch.items.size() * dim, random, 0.1));
    auto items = make(*runtime_, anywhere(random), batch.items);
    auto frequent_list = make(*runtime_, anywhere(random), batch.frequent_list);
    auto nan = make(*runtime_, anywhere(random), std::vector<uint32_t>{0u});
    const bool wants_nan = random.chance(0.8);
    ReduceArgs a{};
    a.part = batch.part;
    a.source = grads.device;
    a.items = items->ptr();
    a.frequent_runs = static_cast<uint32_t>(batch.items.size());
    a.dim = dim;
    a.sums = sums->ptr();
    a.sums_stride = stride;
    a.runs = runs->ptr();
    if (wants_nan) a.nan = nan->ptr();
    launch(Kernel::reduce_runs, reduce_shape(a, extent(random)), a);

    std::vector<float> expected = sums->made(), expected_runs = runs->made();
    // Light rows only, so far.
    std::vector<float> all(distinct * stride);
    const bool expected_nan = cpu_.reduce(batch.pairs.data(), batch.start.data(), 0, distinct, dim,
                                          grads.source, all.data(), stride, false);
    auto take = [&](bool is_frequent) {
      for (uint32_t i = 0; i < distinct; ++i) {
        if ((batch.runs_of(i) > 1) == is_frequent) {
          std::copy_n(all.begin() + i * stride, dim, expected.begin() + i * stride);
        }
      }
    };
    take(false);
    std::vector<float> now = sums->now();
    ASSERT_TRUE(same(now, expected, true)) << "sums of dim " << dim;
    for (size_t r = 0; r < batch.items.size(); ++r) {
      const Item item = batch.items[r];
      const uint32_t begin = batch.start[item.row] + item.run * kRun;
      const uint32_t cut[2] = {begin, std::min(begin + kRun, batch.start[item.row + 1])};
      cpu_.reduce(batch.pairs.data(), cut, 0, 1, dim, grads.source, expected_runs.data() + r * dim,
                  dim, false);
    }
    ASSERT_TRUE(same(runs->now(), expected_runs, true)) << "runs of dim " << dim;
    EXPECT_EQ(nan->now()[0], wants_nan && expected_nan ? 1u : 0u);

    CombineArgs c{};
    c.frequent_list = frequent_list->ptr();
    c.frequent_count = static_cast<uint32_t>(batch.frequent_list.size());
    c.frequent_runs = a.frequent_runs;
    c.dim = dim;
    c.runs = runs->ptr();
    c.sums = sums->ptr();
    c.sums_stride = stride;
    launch(Kernel::combine_runs, combine_shape(c, extent(random)), c);
    take(true);
    EXPECT_TRUE(same(sums->now(), expected, true)) << "frequent rows of dim " << dim;
    EXPECT_TRUE(same(runs->now(), expected_runs, true)) << "runs are only read";
  });
}

// Rows with any number of runs, against the definition: pairwise, level by level.
TEST_F(OpsTest, CombineManyRuns) {
  for_seeds(60, [&](Random& random) {
    const uint32_t dim = random.one_of({1u, 4u, 5u, 32u, 128u, 132u});
    std::vector<FrequentRow> frequent_list;
    uint32_t runs = 0;
    const uint32_t rows = static_cast<uint32_t>(random.from(1, 12));
    for (uint32_t i = 0; i < rows; ++i) {
      frequent_list.push_back({2 * i + 1, runs});
      runs += static_cast<uint32_t>(random.chance(0.1)   ? random.from(500, 5000 / dim + 600)
                                    : random.chance(0.5) ? random.from(2, 10)
                                                         : random.from(2, 200));
    }
    const size_t stride = row_stride(dim);
    auto values = make(*runtime_, Where::kDevice, filled<float>(size_t{runs} * dim, random, 0.001));
    auto list = make(*runtime_, anywhere(random), frequent_list);
    auto sums = make(*runtime_, Where::kHost, filled<float>((2 * rows + 1) * stride, random, 0.0));
    CombineArgs c{list->ptr(), rows, runs, dim, values->ptr(), sums->ptr(), stride};
    launch(Kernel::combine_runs, combine_shape(c, extent(random)), c);
    std::vector<float> expected = sums->made();
    for (uint32_t i = 0; i < rows; ++i) {
      const uint32_t end = i + 1 < rows ? frequent_list[i + 1].first_run : runs;
      for (uint32_t column = 0; column < dim; ++column) {
        std::vector<float> level;
        for (uint32_t r = frequent_list[i].first_run; r < end; ++r) {
          level.push_back(values->made()[size_t{r} * dim + column]);
        }
        while (level.size() > 1) {
          std::vector<float> up;
          for (size_t k = 0; k < level.size(); k += 2) {
            up.push_back(k + 1 < level.size() ? level[k] + level[k + 1] : level[k]);
          }
          level = up;
        }
        expected[frequent_list[i].row * stride + column] = level[0];
      }
    }
    EXPECT_TRUE(same(sums->now(), expected, true)) << "dim " << dim << ", runs " << runs;
  });
}

TEST_F(OpsTest, ExpandTerms) {
  for_seeds(80, [&](Random& random) {
    const uint32_t dim = random.one_of(kDims);
    const uint32_t rows = static_cast<uint32_t>(random.from(1, 200));
    const Batch batch(*runtime_, random, rows, {static_cast<uint32_t>(random.from(1, 70))},
                      random.below(60), random.below(10));
    const size_t n = batch.slots.size();
    const Gradients grads(*runtime_, random, dim, n);
    auto out = make(*runtime_, Where::kHost, filled<float>(n * dim, random, 0.1));
    auto nan = make(*runtime_, anywhere(random), std::vector<uint32_t>{0u});
    ExpandArgs a{};
    a.part = batch.part;
    a.source = grads.device;
    a.dim = dim;
    a.out = out->ptr();
    a.nan = nan->ptr();
    launch(Kernel::expand_terms, expand_shape(a, n, extent(random)), a);
    const GradSource& s = grads.source;
    std::vector<float> expected(n * dim, 0.0f);
    bool expected_nan = false;
    for (size_t i = 0; i < n; ++i) {
      if (batch.slots[i] == kPaddingSlot) continue;
      const size_t row = s.bag ? s.bag[i] : i;
      for (uint32_t c = 0; c < dim; ++c) {
        float x = s.grads[row * s.stride / 4 + c];
        if (s.factor) x = s.factor[i] * x;
        if (s.divisor) x = x / s.divisor[row];
        expected[i * dim + c] = x;
        expected_nan = expected_nan || std::isnan(x);
      }
    }
    EXPECT_TRUE(same(out->now(), expected, true)) << "dim " << dim;
    EXPECT_EQ(nan->now()[0], expected_nan ? 1u : 0u);
  });
}

// --- Lines --------------------------------------------------------------------------------------

frugal_optimizer random_optimizer(Random& random, int32_t kind) {
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  o.kind = kind;
  o.lr = 0.05f;
  o.eps = random.chance(0.5) ? 1e-8f : 1e-3f;
  o.momentum = 0.8f;
  o.dampening = random.chance(0.5) ? 0.0f : 0.3f;
  o.rho = 0.9f;
  o.ftrl_lambda1 = random.chance(0.5) ? 0.0f : 0.2f;
  o.ftrl_lambda2 = random.chance(0.5) ? 0.0f : 0.1f;
  if (random.chance(0.3)) o.flags |= FRUGAL_OPT_NESTEROV;
  if (random.chance(0.3)) o.flags |= FRUGAL_OPT_MEAN_RANKS;
  if (random.chance(0.3)) o.grad_scale = 0.125f;
  if (random.chance(0.3)) o.clip_value = 0.25f;
  if (random.chance(0.3)) o.clip_norm = 0.5f;
  if (random.chance(0.3)) o.weight_decay_l2 = 0.01f;
  if (random.chance(0.3)) o.weight_decay = 0.1f;
  if (random.chance(0.3)) o.weight_bound = 0.4f;
  return o;
}

// Host rows become cached rows, the terms of several ranks are added up, cached rows are updated:
// the same bits as in the host rows.
TEST_F(OpsTest, LinesFollowHostRows) {
  constexpr int32_t kKinds[] = {
      FRUGAL_SGD,  FRUGAL_MOMENTUM, FRUGAL_ADAGRAD, FRUGAL_ROWWISE_ADAGRAD,
      FRUGAL_ADAM, FRUGAL_RMSPROP,  FRUGAL_FTRL};
  for_seeds(350, [&](Random& random) {
    const int32_t kind = random.one_of(kKinds);
    const uint32_t dim = random.chance(0.01) ? 65536 : random.one_of(kDims);
    const double special = random.chance(0.5) ? 0.0 : 0.02;
    const RowLayout layout = RowLayout::of(dim, kind);
    const size_t stride = layout.value_pitch / 4, state_stride = layout.state_pitch / 4;
    const uint32_t rows =
        dim > 1000 ? 3 : static_cast<uint32_t>(random.from(1, dim > 128 ? 20 : 150));
    const uint32_t cache_slots = rows + static_cast<uint32_t>(random.below(5));

    std::vector<float> values = filled<float>(rows * stride, random, special);
    std::vector<float> state = filled<float>(rows * state_stride, random, special);
    for (float& x : values) x = arith::canonical(x);
    for (float& x : state) x = arith::canonical(kind == FRUGAL_MOMENTUM ? x : std::fabs(x));
    auto host = make(*runtime_, Where::kHost, values);
    auto host_state = make(*runtime_, Where::kHost, state);
    auto cached_values =
        make(*runtime_, Where::kDevice, filled<float>(cache_slots * stride, random, 0.0));
    auto cached_state =
        make(*runtime_, Where::kDevice, filled<float>(cache_slots * state_stride, random, 0.0));
    // Which rows come in, and where to.
    std::vector<uint32_t> slots(rows), to(cache_slots);
    std::iota(slots.begin(), slots.end(), 0u);
    std::iota(to.begin(), to.end(), 0u);
    random.shuffle(slots);
    random.shuffle(to);
    slots.resize(random.from(1, rows));
    to.resize(slots.size());
    const uint32_t n = static_cast<uint32_t>(slots.size());
    auto slot_memory = make(*runtime_, anywhere(random), slots);
    auto to_memory = make(*runtime_, anywhere(random), to);
    FillArgs f{};
    f.host = {host->ptr(), stride};
    f.cached_rows = {cached_values->ptr(), stride};
    f.host_state = {host_state->ptr(), state_stride};
    f.cached_state = {cached_state->ptr(), state_stride};
    f.slots = slot_memory->ptr();
    f.to = to_memory->ptr();
    f.count = n;
    f.dim = dim;
    f.state_elements = static_cast<uint32_t>(state_stride);
    launch(Kernel::fill_lines, fill_shape(f, extent(random)), f);
    std::vector<float> expected_values = cached_values->made(),
                       expected_state = cached_state->made();
    const size_t copied = (dim + 3) / 4 * 4;
    for (uint32_t i = 0; i < n; ++i) {
      std::copy_n(values.begin() + slots[i] * stride, copied,
                  expected_values.begin() + to[i] * stride);
      std::copy_n(state.begin() + slots[i] * state_stride, state_stride,
                  expected_state.begin() + to[i] * state_stride);
    }
    ASSERT_TRUE(same(cached_values->now(), expected_values)) << "filled, dim " << dim;
    ASSERT_TRUE(same(cached_state->now(), expected_state)) << "filled state, dim " << dim;

    // Two steps, so that state has been used.
    const uint32_t world = static_cast<uint32_t>(random.from(1, 4));
    const int32_t policy = random.chance(0.4) ? FRUGAL_NAN_SKIP : FRUGAL_NAN_ACCEPT;
    const frugal_optimizer o = random_optimizer(random, kind);
    for (uint64_t step = random.below(50), last = step + 1; step <= last; ++step) {
      std::vector<uint32_t> start{0};
      for (uint32_t i = 0; i < n; ++i) {
        start.push_back(start.back() + static_cast<uint32_t>(random.from(1, world)));
      }
      const bool one_each = start.back() == n;
      auto terms =
          make(*runtime_, Where::kHost, filled<float>(start.back() * stride, random, special / 4));
      // Rank r has submitted every world-th row of them, from the r-th on.
      std::vector<Term> term;
      std::vector<const float*> cpu_term;
      std::vector<Ptr<float>> ranks;
      for (uint32_t r = 0; r < world; ++r) ranks.push_back(terms->ptr() + r * stride);
      for (uint32_t t = 0; t < start.back(); ++t) {
        term.push_back({t % world, t / world});
        cpu_term.push_back(terms->made().data() + t * stride);
      }
      auto rank_memory = make(*runtime_, anywhere(random), ranks);
      auto term_memory = make(*runtime_, anywhere(random), term);
      auto start_memory = make(*runtime_, anywhere(random), start);
      auto sums = make(*runtime_, Where::kDevice, std::vector<float>(n * stride, NAN));
      SumTermsArgs t{};
      t.ranks = rank_memory->ptr();
      t.ranks_stride = world * stride;
      t.terms = term_memory->ptr();
      if (!one_each || random.chance(0.5)) t.start = start_memory->ptr();
      t.count = n;
      t.dim = dim;
      t.sums = sums->ptr();
      t.sums_stride = stride;
      launch(Kernel::sum_terms, sum_terms_shape(t, extent(random)), t);

      const arith::StepScalars scalars = arith::step_scalars(o, step, world, policy, dim);
      ApplyArgs a{};
      a.step = scalars;
      a.cached_rows = f.cached_rows;
      a.state = cached_state->ptr();
      a.state_stride = state_stride;
      a.state_second = stride;
      a.to = to_memory->ptr();
      a.count = n;
      a.dim = dim;
      a.sums = sums->ptr();
      a.sums_stride = stride;
      launch(apply_kernel(kind), apply_shape(a, extent(random)), a);

      const RowsRef ref{expected_values.data(),
                        layout.value_pitch,
                        kind == FRUGAL_SGD ? nullptr : expected_state.data(),
                        layout.state_pitch,
                        layout.value_pitch,
                        dim};
      cpu_.apply_terms(ref, scalars, to.data(), n, cpu_term.data(), start.data(), nullptr);
      ASSERT_TRUE(same(cached_values->now(), expected_values))
          << "optimizer " << kind << ", dim " << dim << ", flags " << scalars.flags;
      ASSERT_TRUE(same(cached_state->now(), expected_state))
          << "state of optimizer " << kind << ", dim " << dim << ", flags " << scalars.flags;
    }
  });
}

}  // namespace
}  // namespace frugal::device
