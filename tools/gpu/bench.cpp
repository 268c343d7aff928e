// The cost of lookups and steps on a GPU, compared with the limits of the hardware and with other
// libraries.
//
//     gpu_bench --device cuda:0 [--quick] [--seconds S] [--only TEXT] [--python PATH]
//         [--results FILE] [--done FILE] [--plan FILE]
//
// Sides of a comparison take turns within one run, and ratios are medians over the turns. One case
// of each kind comes first, then the cheap cases. When the seconds are over, the other cases are
// skipped, and counted so. --done: lines of results whose cases are left out. --plan: the file that
// gets the list of all cases, with those left out, before the first one begins. On the simulated
// GPU ("sim:0") sizes are tiny and figures mean nothing: that is a rehearsal.
#include <unistd.h>

#include <fstream>
#include <map>
#include <numeric>
#include <thread>

#include "batches.h"
#include "child.h"
#include "cuda_parts.h"
#include "device/kernels.h"
#include "engine.h"
#include "sim/sim.h"

namespace gpu_tools {
namespace {

using bench::NowNs;
using frugal::device::Extent;

// --- Sides --------------------------------------------------------------------------------------

struct Side {
  const char* name;
  std::function<double()> measure;  // seconds of one unit
};

// The sides of a case, each measured several times, in turn.
class Turns {
 public:
  Turns(const std::vector<Side>& sides, int turns) {
    for (int t = 0; t < turns; ++t)
      for (const Side& s : sides) seconds_[s.name].push_back(s.measure());
  }
  double Seconds(const char* side) const { return Median(seconds_.at(side)); }
  // How many times as fast as `other` a side is. A measurement of them has so many units of work.
  double Ratio(const char* side, const char* other, double units = 1,
               double other_units = 1) const {
    std::vector<double> ratios;
    const auto &a = seconds_.at(side), &b = seconds_.at(other);
    for (size_t i = 0; i < a.size(); ++i) ratios.push_back(units / a[i] / (other_units / b[i]));
    return Median(ratios);
  }

 private:
  std::map<std::string, std::vector<double>> seconds_;
};

struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Outcome {
  Json figures;
  double value = NAN;  // the figure that has an aim
  double aim = NAN;    // the least value that meets the aim
  const char* of = "";
};

struct Case {
  std::string name;
  Json params;
  std::function<Outcome()> run;
};

struct Sizes {
  uint64_t rows32, rows128;
  size_t main, copy_bytes;
  std::vector<size_t> batches;
  double target;  // seconds of a measurement
  int turns;
  size_t steps;  // of a run of training
};

// Several batches are declared and looked up in turn, so that the rows of a batch have left the
// caches before its next lookup.
constexpr size_t kBatches = 8;

constexpr size_t kLargeBatch = 32768;  // aims hold from here on: smaller ones show latency

class Bench {
 public:
  Bench(std::string device, Sizes sizes, std::string python, const std::string& script)
      : device_(std::move(device)),
        sizes_(std::move(sizes)),
        worker_command_({std::move(python), script}),
        on_gpu_(device_.rfind("cuda:", 0) == 0),
        team_(static_cast<int>(Cores())) {
    Check(frugal::device::open_runtime(device_.c_str(), &runtime_), device_.c_str());
    if (on_gpu_) {
      const std::string error = CudaUse(static_cast<uint32_t>(std::stoul(device_.substr(5))));
      if (!error.empty()) throw std::runtime_error(error);
    } else {
      static const frugal::device::sim::KernelEntry kBare[] = {
          {"bare_gather", sizeof(BareArgs), [](const void* a) { BareBody(a); }}};
      auto* sim = dynamic_cast<frugal::device::sim::Sim*>(runtime_.get());
      if (sim == nullptr) throw std::runtime_error("neither a GPU nor the host implementation");
      sim->set_test_kernels(kBare, 1);
    }
    extent_.processors = runtime_->info().processors;
    lane_ = std::make_unique<Lane>(runtime_);
    copy_host_ = Pinned<char>(runtime_, sizes_.copy_bytes);
    copy_from_ = OnDevice<char>(runtime_, sizes_.copy_bytes);
    copy_to_ = OnDevice<char>(runtime_, sizes_.copy_bytes);
    Check(runtime_->fill(copy_from_.raw(), 0, sizes_.copy_bytes, lane_->stream()), "filling");
    lane_->Wait();
  }
  ~Bench() { engines_.clear(); }

  bool on_gpu() const { return on_gpu_; }
  uint64_t sides_missing() const { return sides_missing_; }

  std::vector<Case> Cases() {
    std::vector<Case> all;
    auto add = [&](const char* name, Json params, std::function<Outcome()> run) {
      all.push_back({name, std::move(params), std::move(run)});
    };
    auto keys = [](uint32_t dim, const std::string& dist, size_t batch) {
      return Json().Count("dim", dim).Set("keys", dist).Count("batch", batch);
    };
    const size_t main = sizes_.main;
    const char* const kDists[] = {"uniform", "zipf0.9", "zipf0.99"};
    add("copy", Json().Count("bytes", sizes_.copy_bytes), [=, this] { return Copies(); });
    auto steps = [&](const char* dist, size_t batch, int32_t optimizer) {
      add("steps", keys(32, dist, batch).Set("optimizer", OptimizerName(optimizer)),
          [=, this] { return Steps(32, dist, batch, optimizer); });
    };
    auto mixed = [&](const char* dist, double hits) {
      add("mixed", keys(32, dist, main).Set("hits", hits),
          [=, this] { return Mixed(32, dist, main, hits); });
    };
    auto matrix = [&](uint32_t dim, const char* dist, size_t batch) {
      add("host_lookup", keys(dim, dist, batch),
          [=, this] { return HostLookup(dim, dist, batch); });
      add("cached_kernel", keys(dim, dist, batch),
          [=, this] { return CachedKernel(dim, dist, batch); });
      add("index_select", keys(dim, dist, batch),
          [=, this] { return IndexSelect(dim, dist, batch); });
    };
    // One case of each kind. The first ones measure what all others depend on.
    add("link_blocks", keys(32, "uniform", main), [=, this] { return LinkBlocks(32, main); });
    matrix(32, "uniform", main);
    add("index_select_torch", keys(32, "uniform", main),
        [=, this] { return IndexSelectTorch(32, "uniform", main); });
    add("cached_lookup", keys(32, "uniform", main),
        [=, this] { return CachedLookup(32, "uniform", main); });
    mixed("uniform", 0.5);
    add("push_kernel", keys(32, "uniform", main),
        [=, this] { return PushKernel(32, "uniform", main); });
    add("unified", keys(32, "uniform", main), [=, this] { return Unified(32, "uniform", main); });
    steps("zipf0.99", main, FRUGAL_ROWWISE_ADAGRAD);
    add("deferred", keys(32, "zipf0.99", main),
        [=, this] { return Deferred(32, "zipf0.99", main); });
    add("nan_reject", keys(32, "zipf0.99", main),
        [=, this] { return NanReject(32, "zipf0.99", main); });
    // The matrix: about a second for each case, with the table and the engine of its dimension.
    for (const double hits : {0.0, 0.25, 0.75, 0.9, 0.99, 1.0}) mixed("uniform", hits);
    for (const double hits : {0.5, 0.9}) mixed("zipf0.99", hits);
    for (const uint32_t dim : {32u, 128u}) {
      if (dim != 32) {
        add("link_blocks", keys(dim, "uniform", main), [=, this] { return LinkBlocks(dim, main); });
        matrix(dim, kDists[0], main);
        add("cached_lookup", keys(dim, "uniform", main),
            [=, this] { return CachedLookup(dim, "uniform", main); });
        add("push_kernel", keys(dim, "uniform", main),
            [=, this] { return PushKernel(dim, "uniform", main); });
      }
      for (const char* dist : {kDists[1], kDists[2]}) matrix(dim, dist, main);
      for (const size_t batch : sizes_.batches)
        for (const char* dist : kDists) matrix(dim, dist, batch);
    }
    // The long cases: tens of seconds each, most of them for torch on the CPU.
    steps("uniform", main, FRUGAL_ROWWISE_ADAGRAD);
    for (const int32_t optimizer : {FRUGAL_ADAM, FRUGAL_SGD})
      for (const char* dist : {"uniform", "zipf0.99"}) steps(dist, main, optimizer);
    add("deferred", keys(32, "uniform", main), [=, this] { return Deferred(32, "uniform", main); });
    for (const size_t batch : sizes_.batches) steps("zipf0.9", batch, FRUGAL_ROWWISE_ADAGRAD);
    return all;
  }

 private:
  static const char* OptimizerName(int32_t kind) {
    return kind == FRUGAL_SGD ? "sgd" : kind == FRUGAL_ADAM ? "adam" : "rowwise_adagrad";
  }

  // On the simulated GPU the largest batch is smaller than kLargeBatch, and has the aim.
  double AimFor(size_t batch, double aim) const {
    return batch >= std::min(kLargeBatch, sizes_.main) ? aim : NAN;
  }

  // --- Measuring ---

  // Seconds of go(i); the calls are submitted to the stream one after the other.
  double PerCall(const std::function<void(size_t)>& go) {
    size_t n = 1;
    for (;;) {
      const int64_t start = NowNs();
      for (size_t i = 0; i < n; ++i) go(i);
      lane_->Wait();
      const double seconds = static_cast<double>(NowNs() - start) * 1e-9;
      if (seconds >= 0.6 * sizes_.target || n >= 20000) return seconds / static_cast<double>(n);
      const double more = std::clamp(1.2 * sizes_.target / std::max(seconds, 1e-6), 2.0, 50.0);
      n = std::min<size_t>(20000, static_cast<size_t>(static_cast<double>(n) * more));
    }
  }
  // The same for calls that each wait for their work.
  double PerWaitedCall(const std::function<void(size_t)>& go) {
    go(0);
    const int64_t start = NowNs(), end = start + static_cast<int64_t>(sizes_.target * 1e9);
    size_t n = 0;
    do go(n++);
    while (NowNs() < end);
    return static_cast<double>(NowNs() - start) * 1e-9 / static_cast<double>(n);
  }

  // Unit: copy_bytes.
  Side Copy(const char* name, Ptr<char> to, Ptr<char> from) {
    return {name, [this, to, from] {
              return PerCall([&](size_t) { lane_->Copy(to, from, sizes_.copy_bytes); });
            }};
  }
  Side CopyIn() { return Copy("copy", copy_to_.at(), copy_host_.seen()); }
  Side CopyOut() { return Copy("copy_out", copy_host_.seen(), copy_to_.at()); }
  Side CopyDevice() { return Copy("copy", copy_to_.at(), copy_from_.at()); }
  double CopyBytes() const { return static_cast<double>(sizes_.copy_bytes); }

  Outcome Copies() {
    Side device = CopyDevice();
    device.name = "copy_device";
    const Turns t({CopyIn(), CopyOut(), device}, sizes_.turns);
    Outcome o;
    o.figures.Set("host_to_device_gb_s", CopyBytes() / t.Seconds("copy") * 1e-9)
        .Set("device_to_host_gb_s", CopyBytes() / t.Seconds("copy_out") * 1e-9)
        .Set("device_to_device_gb_s", CopyBytes() / t.Seconds("copy_device") * 1e-9);
    return o;
  }

  // --- Inputs ---

  Rows TableShape(uint32_t dim) const { return {dim == 32 ? sizes_.rows32 : sizes_.rows128, dim}; }

  // A table in pinned host memory, and the same on the device.
  struct Table {
    Rows shape;
    Pinned<float> host;
    OnDevice<float> device;
  };
  Table& TableOf(uint32_t dim) {
    if (!table_ || table_->shape.dim != dim) {
      table_.reset();
      auto t = std::make_unique<Table>();
      t->shape = TableShape(dim);
      t->host = Pinned<float>(runtime_, t->shape.floats());
      FillValues(team_, t->shape, t->host.data());
      t->device = OnDevice<float>(runtime_, t->shape.floats());
      lane_->Copy(t->device.at(), t->host.seen(), t->device.bytes());
      lane_->Wait();
      table_ = std::move(t);
    }
    return *table_;
  }

  // The device memory that batches are looked up into; enough for kBatches.
  Ptr<float> Out(size_t batch, uint32_t dim, size_t index) {
    if (out_.size() < kBatches * batch * dim) {
      lane_->Wait();
      out_ = {};
      out_ = OnDevice<float>(runtime_, kBatches * batch * dim);
    }
    return out_.at() + index % kBatches * batch * dim;
  }

  std::vector<uint32_t> BatchKeys(uint32_t dim, const std::string& dist, size_t batch,
                                  size_t index) {
    return Keys(dist, TableShape(dim).rows, batch, 1000 + index);
  }
  std::vector<KernelBatch> KernelBatches(uint32_t dim, const std::string& dist, size_t batch,
                                         const std::function<bool(uint32_t)>& is_line) {
    std::vector<KernelBatch> all;
    for (size_t i = 0; i < kBatches; ++i)
      all.emplace_back(runtime_, BatchKeys(dim, dist, batch, i), is_line);
    return all;
  }
  static double MeanDistinct(const std::vector<KernelBatch>& all) {
    double sum = 0;
    for (const KernelBatch& b : all) sum += static_cast<double>(b.distinct());
    return sum / static_cast<double>(all.size());
  }

  // Throws if the rows that the last lookups left in Out() are not those of the keys.
  void Verify(const std::vector<uint32_t>& keys, uint32_t dim, size_t index,
              const std::function<void(const uint32_t*, size_t, float*)>& expect) {
    const size_t n = std::min<size_t>(keys.size(), 2048), floats = n * dim;
    Pinned<float> got(runtime_, floats);
    lane_->Copy(got.seen(), Out(keys.size(), dim, index), floats * sizeof(float));
    lane_->Wait();
    std::vector<float> expected(floats);
    expect(keys.data(), n, expected.data());
    if (memcmp(expected.data(), got.data(), floats * sizeof(float)) != 0)
      throw std::runtime_error("a lookup has brought wrong rows");
  }
  void VerifyTable(const std::vector<uint32_t>& keys, uint32_t dim, size_t index) {
    Verify(keys, dim, index, [&](const uint32_t* k, size_t n, float* out) {
      for (size_t i = 0; i < n; ++i)
        for (uint32_t c = 0; c < dim; ++c) out[i * dim + c] = ValueOf(k[i], c);
    });
  }
  void VerifyEngine(Engine& engine, const std::vector<uint32_t>& keys, uint32_t dim, size_t index) {
    Verify(keys, dim, index, [&](const uint32_t* k, size_t n, float* out) {
      const std::vector<uint64_t> wide(k, k + n);
      engine.Get(wide.data(), n, out);
    });
  }

  // The engine of a shape. The last two stay open, since opening one takes seconds.
  Engine& EngineOf(const EngineShape& shape) {
    for (size_t i = 0; i < engines_.size(); ++i)
      if (engines_[i]->shape() == shape) {
        std::rotate(engines_.begin() + static_cast<ptrdiff_t>(i),
                    engines_.begin() + static_cast<ptrdiff_t>(i) + 1, engines_.end());
        return *engines_.back();
      }
    if (engines_.size() >= 2) engines_.erase(engines_.begin());
    engines_.push_back(std::make_unique<Engine>(device_, shape, lane_->stream()));
    return *engines_.back();
  }

  // Two engines to train with the same batches: both as they are, or both new.
  void InStep(const EngineShape& a, const EngineShape& b) {
    if (EngineOf(a).trained() != EngineOf(b).trained()) engines_.clear();
  }
  // Throws if the two do not have the same bits: then speed means nothing.
  void VerifySame(const EngineShape& a, const EngineShape& b, const std::vector<uint64_t>& keys) {
    const size_t n = std::min<size_t>(keys.size(), 4096);
    std::vector<float> rows[2];
    for (int i = 0; i < 2; ++i) {
      rows[i].resize(n * a.dim);
      EngineOf(i ? b : a).Get(keys.data(), n, rows[i].data());
    }
    if (memcmp(rows[0].data(), rows[1].data(), rows[0].size() * sizeof(float)) != 0)
      throw std::runtime_error("two ways to train have given different rows");
  }

  // --- Lookups ---

  // Seconds of a lookup of declared batches: the first of each in its step, and another one.
  struct LookupTimes {
    double first, again;
  };
  LookupTimes Lookups(Engine& engine, const std::vector<std::vector<uint64_t>>& keys) {
    const size_t batch = keys[0].size();
    const uint32_t dim = engine.shape().dim;
    double seconds[2] = {0, 0};
    size_t steps = 0;
    auto declare = [&](uint64_t step) {
      std::vector<frugal_batch*> declared;
      for (const auto& k : keys) declared.push_back(engine.Declare(step, k));
      // Waits until the work ahead of a step is done: about 100 ns a key, less on more cores.
      std::this_thread::sleep_for(std::chrono::nanoseconds(2'000'000 + 100 * batch * keys.size()));
      return declared;
    };
    std::vector<frugal_batch*> declared = declare(engine.step());
    // Lookups may be much shorter than the work ahead of them. Then some tens of steps are enough.
    const int64_t end = NowNs() + 1'500'000'000;
    while (seconds[0] < sizes_.target && steps < 200 && NowNs() < end) {
      engine.Begin();
      lane_->Wait();
      for (double& s : seconds) {
        const int64_t start = NowNs();
        for (size_t b = 0; b < declared.size(); ++b) engine.Lookup(declared[b], Out(batch, dim, b));
        lane_->Wait();
        s += static_cast<double>(NowNs() - start) * 1e-9;
      }
      // Within the step, as in training: with a cache, the next cache refresh is planned meanwhile.
      declared = declare(engine.step() + 1);
      engine.End();
      ++steps;
    }
    for (frugal_batch* b : declared) engine.Cancel(b);
    const double lookups = static_cast<double>(steps * keys.size());
    return {seconds[0] / lookups, seconds[1] / lookups};
  }
  static std::vector<std::vector<uint64_t>> Wide(const std::vector<KernelBatch>& batches) {
    std::vector<std::vector<uint64_t>> all;
    for (const KernelBatch& b : batches) all.emplace_back(b.keys().begin(), b.keys().end());
    return all;
  }

  // Kernels alone. Unit: a batch.
  Side Kernels(std::vector<KernelBatch>& batches, Table& t, const Extent& extent) {
    return {"kernel", [&, extent] {
              return PerCall([&](size_t i) {
                KernelBatch& b = batches[i % batches.size()];
                b.Gather(*lane_, extent, t.host.seen(), t.device.at(), t.shape.dim,
                         Out(b.keys().size(), t.shape.dim, i));
              });
            }};
  }

  Outcome LinkBlocks(uint32_t dim, size_t batch) {
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, "uniform", batch, [](uint32_t) { return false; });
    const double bytes = MeanDistinct(batches) * static_cast<double>(t.shape.row_bytes());
    std::vector<std::pair<uint32_t, std::string>> blocks;
    for (uint32_t b = 1; b < extent_.processors; b *= 2) blocks.emplace_back(b, std::to_string(b));
    blocks.emplace_back(extent_.processors, std::to_string(extent_.processors));
    blocks.emplace_back(2 * extent_.processors, std::to_string(2 * extent_.processors));
    std::vector<Side> sides = {CopyIn()};
    for (const auto& [n, name] : blocks) {
      Extent extent = extent_;
      extent.link_blocks = n;
      Side side = Kernels(batches, t, extent);
      side.name = name.c_str();
      sides.push_back(side);
    }
    const Turns turns(sides, sizes_.turns);
    Outcome o;
    o.figures.Set("copy_gb_s", CopyBytes() / turns.Seconds("copy") * 1e-9);
    for (const auto& [n, name] : blocks)
      o.figures.Set(name + "_blocks_of_copy",
                    turns.Ratio(name.c_str(), "copy", bytes, CopyBytes()));
    o.figures.Count("engine_uses", link_blocks(extent_));
    return o;
  }

  // Rows in host memory: useful bytes of distinct rows, compared with a copy of pinned memory.
  Outcome HostLookup(uint32_t dim, const std::string& dist, size_t batch) {
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return false; });
    const double bytes = MeanDistinct(batches) * static_cast<double>(t.shape.row_bytes());
    Engine& engine = EngineOf({t.shape.rows, dim});
    const auto keys = Wide(batches);
    std::vector<double> again;
    const Turns turns({CopyIn(),
                       Kernels(batches, t, extent_),
                       {"lookup",
                        [&] {
                          const LookupTimes times = Lookups(engine, keys);
                          again.push_back(times.again);
                          return times.first;
                        }}},
                      sizes_.turns);
    VerifyEngine(engine, batches[1].keys(), dim, 1);
    batches[2].Gather(*lane_, extent_, t.host.seen(), t.device.at(), dim, Out(batch, dim, 2));
    VerifyTable(batches[2].keys(), dim, 2);
    Outcome o;
    o.figures.Set("distinct", MeanDistinct(batches))
        .Set("copy_gb_s", CopyBytes() / turns.Seconds("copy") * 1e-9)
        .Set("kernel_gb_s", bytes / turns.Seconds("kernel") * 1e-9)
        .Set("lookup_gb_s", bytes / turns.Seconds("lookup") * 1e-9)
        .Set("lookup_us", turns.Seconds("lookup") * 1e6)
        .Set("lookup_again_us", Median(again) * 1e6)
        .Set("kernel_of_copy", turns.Ratio("kernel", "copy", bytes, CopyBytes()))
        .Set("lookup_of_copy", turns.Ratio("lookup", "copy", bytes, CopyBytes()));
    o.value = turns.Ratio("lookup", "copy", bytes, CopyBytes());
    o.aim = AimFor(batch, 0.9);
    o.of = "lookup_of_copy";
    return o;
  }

  // The paper's baseline: index_select on all cores into pinned memory, then a copy. And the best
  // known variant: it copies chunks while it gathers the next ones.
  Outcome IndexSelect(uint32_t dim, const std::string& dist, size_t batch) {
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return false; });
    const auto keys = Wide(batches);
    Engine& engine = EngineOf({t.shape.rows, dim});
    Pinned<float> staging(runtime_, batch * dim);
    const Turns turns(
        {{"lookup", [&] { return Lookups(engine, keys).first; }},
         {"index_select",
          [&] {
            return PerWaitedCall([&](size_t i) {
              const auto& k = batches[i % kBatches].keys();
              GatherPlain(t, k, staging.data());
              lane_->Copy(Out(batch, dim, i), staging.seen(), batch * dim * sizeof(float));
              lane_->Wait();
            });
          }},
         {"pipelined",
          [&] {
            return PerWaitedCall([&](size_t i) {
              GatherPipelined(t, batches[i % kBatches].keys(), staging, Out(batch, dim, i));
              lane_->Wait();
            });
          }}},
        sizes_.turns);
    GatherPipelined(t, batches[3].keys(), staging, Out(batch, dim, 3));
    VerifyTable(batches[3].keys(), dim, 3);
    Outcome o;
    o.figures.Count("cores", static_cast<uint64_t>(team_.size()))
        .Set("lookup_us", turns.Seconds("lookup") * 1e6)
        .Set("index_select_us", turns.Seconds("index_select") * 1e6)
        .Set("pipelined_us", turns.Seconds("pipelined") * 1e6)
        .Set("over_index_select", turns.Ratio("lookup", "index_select"))
        .Set("over_pipelined", turns.Ratio("lookup", "pipelined"));
    o.value = turns.Ratio("lookup", "index_select");
    o.aim = AimFor(batch, 3.5);
    o.of = "over_index_select";
    return o;
  }

  void GatherPlain(const Table& t, const std::vector<uint32_t>& keys, float* out) {
    const size_t bytes = t.shape.row_bytes(), dim = t.shape.dim;
    team_.Start([&](int thread) {
      const size_t n = keys.size(), k = static_cast<size_t>(team_.size());
      const auto at = static_cast<size_t>(thread);
      for (size_t i = n * at / k; i < n * (at + 1) / k; ++i)
        memcpy(out + i * dim, t.host.data() + keys[i] * dim, bytes);
    });
    team_.Wait();
  }

  void GatherPipelined(const Table& t, const std::vector<uint32_t>& keys,
                       const Pinned<float>& staging, Ptr<float> out) {
    const size_t n = keys.size(), dim = t.shape.dim;
    const size_t half_a_mib = (size_t{512} << 10) / t.shape.row_bytes();
    const size_t chunk = std::max<size_t>(256, std::min(n / 16, half_a_mib));
    const size_t chunks = (n + chunk - 1) / chunk;
    std::vector<std::atomic<bool>> done(chunks);
    std::atomic<size_t> next{0};
    const frugal::device::RowsRef rows = {t.host.data(), dim * sizeof(float), nullptr, 0, 0,
                                          t.shape.dim};
    team_.Start([&](int) {
      for (size_t c = next++; c < chunks; c = next++) {
        const size_t begin = c * chunk, count = std::min(chunk, n - begin);
        frugal::device::kernels().gather(rows, &keys[begin], count, staging.data() + begin * dim,
                                         dim * sizeof(float), true);
        done[c].store(true, std::memory_order_release);
      }
    });
    for (size_t c = 0; c < chunks; ++c) {
      while (!done[c].load(std::memory_order_acquire)) bench::CpuRelax();
      const size_t begin = c * chunk, count = std::min(chunk, n - begin);
      lane_->Copy(out + begin * dim, staging.seen() + begin * dim, count * dim * sizeof(float));
    }
    team_.Wait();
  }

  Outcome IndexSelectTorch(uint32_t dim, const std::string& dist, size_t batch) {
    Table& t = TableOf(dim);
    Worker worker(*this);
    worker.Ask("prepare side=gather " + WorkerShape(t.shape, dist, batch));
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return false; });
    const auto keys = Wide(batches);
    Engine& engine = EngineOf({t.shape.rows, dim});
    const Turns turns(
        {{"lookup", [&] { return Lookups(engine, keys).first; }},
         {"torch",
          [&] {
            return worker.Seconds("run side=gather seconds=" + std::to_string(sizes_.target));
          }}},
        sizes_.turns);
    Outcome o;
    o.figures.Set("lookup_us", turns.Seconds("lookup") * 1e6)
        .Set("torch_us", turns.Seconds("torch") * 1e6)
        .Set("over_torch", turns.Ratio("lookup", "torch"));
    o.value = turns.Ratio("lookup", "torch");
    o.aim = AimFor(batch, 3.5);
    o.of = "over_torch";
    return o;
  }

  // --- Rows in device memory ---

  // The bare gather on the simulated GPU.
  static void BareBody(const void* arguments) {
    using namespace frugal::device;
    const BareArgs& a = *static_cast<const BareArgs*>(arguments);
    const uint64_t count = uint64_t{a.rows} * a.vectors, step = uint64_t{blocks()} * threads();
    for (uint64_t i = uint64_t{block()} * threads() + thread(); i < count; i += step) {
      const uint32_t row = load(Ptr<uint32_t>{a.index} + i / a.vectors);
      store(Ptr<Float4>{a.out} + i,
            load(Ptr<Float4>{a.table} + (uint64_t{row} * a.vectors + i % a.vectors)));
    }
  }
  void BareGather(const BareArgs& a) {
    if (on_gpu_) {
      const std::string error = CudaBareGather(a, lane_->stream().handle);
      if (!error.empty()) throw std::runtime_error("the bare kernel: " + error);
      return;
    }
    Check(runtime_->launch(frugal::device::sim::Sim::kTestKernels, {4, 64, 0}, &a, sizeof a,
                           lane_->stream()),
          "the bare kernel");
  }
  Side Bare(std::vector<KernelBatch>& batches, Table& t) {
    return {
        "bare", [&] {
          return PerCall([&](size_t i) {
            KernelBatch& b = batches[i % batches.size()];
            const size_t n = b.keys().size();
            BareGather({t.device.at().address, b.index().address, Out(n, t.shape.dim, i).address,
                        static_cast<uint32_t>(n), t.shape.dim / 4});
          });
        }};
  }

  // All rows in device memory, kernels alone.
  Outcome CachedKernel(uint32_t dim, const std::string& dist, size_t batch) {
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return true; });
    const double bytes = static_cast<double>(batch * t.shape.row_bytes());
    const Turns turns({CopyDevice(), Kernels(batches, t, extent_), Bare(batches, t)}, sizes_.turns);
    for (const bool bare : {false, true}) {
      if (bare)
        BareGather({t.device.at().address, batches[4].index().address, Out(batch, dim, 4).address,
                    static_cast<uint32_t>(batch), dim / 4});
      else
        batches[4].Gather(*lane_, extent_, t.host.seen(), t.device.at(), dim, Out(batch, dim, 4));
      VerifyTable(batches[4].keys(), dim, 4);
    }
    Outcome o;
    o.figures.Set("kernel_us", turns.Seconds("kernel") * 1e6)
        .Set("bare_us", turns.Seconds("bare") * 1e6)
        .Set("kernel_gb_s", bytes / turns.Seconds("kernel") * 1e-9)
        .Set("copy_gb_s", CopyBytes() / turns.Seconds("copy") * 1e-9)
        .Set("of_bare", turns.Ratio("kernel", "bare"))
        .Set("of_device_copy", turns.Ratio("kernel", "copy", bytes, CopyBytes()));
    o.value = turns.Ratio("kernel", "bare");
    o.aim = AimFor(batch, 0.95);
    o.of = "of_bare";
    return o;
  }

  // Lookups of an engine whose cache has all rows of the batches: the whole call.
  Outcome CachedLookup(uint32_t dim, const std::string& dist, size_t batch) {
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return true; });
    const auto keys = Wide(batches);
    Engine& engine = EngineOf({t.shape.rows, dim, FRUGAL_SGD, FRUGAL_FLUSH_AUTO, 1.0});
    Lookups(engine, keys);  // rows come in
    const frugal_stats before = engine.Stats();
    std::vector<double> again;
    const Turns turns({Bare(batches, t),
                       {"lookup",
                        [&] {
                          const LookupTimes times = Lookups(engine, keys);
                          again.push_back(times.again);
                          return times.first;
                        }}},
                      sizes_.turns);
    const frugal_stats after = engine.Stats();
    VerifyEngine(engine, batches[5].keys(), dim, 5);
    const double hits = static_cast<double>(after.cache_hits - before.cache_hits);
    const double misses = static_cast<double>(after.cache_misses - before.cache_misses);
    Outcome o;
    o.figures.Set("hit_rate", hits / std::max(hits + misses, 1.0))
        .Set("lookup_us", turns.Seconds("lookup") * 1e6)
        .Set("lookup_again_us", Median(again) * 1e6)
        .Set("bare_us", turns.Seconds("bare") * 1e6)
        .Set("of_bare", turns.Ratio("lookup", "bare"));
    o.value = turns.Ratio("lookup", "bare");
    o.aim = AimFor(batch, 0.95);
    o.of = "of_bare";
    return o;
  }

  // A share of the rows in device memory, at random.
  Outcome Mixed(uint32_t dim, const std::string& dist, size_t batch, double hits) {
    Table& t = TableOf(dim);
    const auto is_line = [&](uint32_t row) {
      return static_cast<double>(bench::Mix(row + 1) >> 11) * 0x1p-53 < hits;
    };
    auto batches = KernelBatches(dim, dist, batch, is_line);
    double host = 0;
    for (const KernelBatch& b : batches) host += static_cast<double>(b.host_rows()) / kBatches;
    const double bytes = host * static_cast<double>(t.shape.row_bytes());
    const Turns turns({CopyIn(), Kernels(batches, t, extent_)}, sizes_.turns);
    batches[6].Gather(*lane_, extent_, t.host.seen(), t.device.at(), dim, Out(batch, dim, 6));
    VerifyTable(batches[6].keys(), dim, 6);
    Outcome o;
    o.figures.Set("distinct", MeanDistinct(batches))
        .Set("host_rows", host)
        .Set("kernel_us", turns.Seconds("kernel") * 1e6)
        .Set("keys_per_second", static_cast<double>(batch) / turns.Seconds("kernel"))
        .Set("link_of_copy", turns.Ratio("kernel", "copy", bytes, CopyBytes()));
    return o;
  }

  // The sums of gradients into pinned memory, compared with a copy to the host.
  Outcome PushKernel(uint32_t dim, const std::string& dist, size_t batch) {
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return true; });
    const double bytes = MeanDistinct(batches) * dim * sizeof(float);
    Pinned<float> sums(runtime_, batch * dim);
    OnDevice<float> grads(runtime_, batch * dim);
    Check(runtime_->fill(grads.raw(), 0x3c, grads.bytes(), lane_->stream()), "filling");
    size_t calls = 0;
    const Turns turns({CopyOut(),
                       {"kernel",
                        [&] {
                          return PerCall([&](size_t) {
                            const size_t i = calls++;
                            frugal::device::ReduceArgs a{};
                            a.part = batches[i % kBatches].part();
                            a.source.grads = grads.at();
                            a.source.stride = dim * sizeof(float);
                            a.dim = dim;
                            a.sums = sums.seen();
                            a.sums_stride = dim;
                            lane_->Launch(Kernel::reduce_runs,
                                          frugal::device::reduce_shape(a, extent_), a);
                          });
                        }}},
                      sizes_.turns);
    lane_->Wait();
    VerifySums(batches[(calls - 1) % kBatches].keys(), sums.data(), dim);
    Outcome o;
    o.figures.Set("kernel_us", turns.Seconds("kernel") * 1e6)
        .Set("kernel_gb_s", bytes / turns.Seconds("kernel") * 1e-9)
        .Set("of_copy", turns.Ratio("kernel", "copy_out", bytes, CopyBytes()));
    return o;
  }

  // Checks sums of equal gradients; a row has at most 32 occurrences.
  static void VerifySums(std::vector<uint32_t> keys, const float* sums, uint32_t dim) {
    std::sort(keys.begin(), keys.end());
    float term, sum = 0;
    memset(&term, 0x3c, sizeof term);
    size_t row = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      sum = i != 0 && keys[i] == keys[i - 1] ? sum + term : term;
      if (i + 1 < keys.size() && keys[i + 1] == keys[i]) continue;
      for (uint32_t c = 0; c < dim; ++c)
        if (sums[row * dim + c] != sum) throw std::runtime_error("wrong sums of gradients");
      ++row;
    }
  }

  // The same kernel reads memory that migrates in pages.
  Outcome Unified(uint32_t dim, const std::string& dist, size_t batch) {
    if (!on_gpu_) throw Skipped("unified memory is CUDA's");
    Table& t = TableOf(dim);
    auto batches = KernelBatches(dim, dist, batch, [](uint32_t) { return false; });
    void* managed = nullptr;
    const std::string error = CudaManaged(t.shape.floats() * sizeof(float), &managed);
    if (!error.empty()) throw std::runtime_error("managed memory: " + error);
    struct Free {
      void* p;
      ~Free() { CudaFreeManaged(p); }
    } free_it{managed};
    auto* rows = static_cast<float*>(managed);
    FillValues(team_, t.shape, rows);  // on the host now
    auto gather = [&](Ptr<float> from, size_t b) {
      const int64_t start = NowNs();
      batches[b].Gather(*lane_, extent_, from, {}, dim, Out(batch, dim, b));
      lane_->Wait();
      return static_cast<double>(NowNs() - start) * 1e-9;
    };
    // As in training: the host updates the rows of the batch before, the GPU reads the next one.
    auto update = [&](float* table, size_t b) {
      const auto& keys = batches[b].keys();
      team_.Start([&, table](int thread) {
        const size_t n = keys.size(), k = static_cast<size_t>(team_.size());
        const auto at = static_cast<size_t>(thread);
        for (size_t i = n * at / k; i < n * (at + 1) / k; ++i)
          table[keys[i] * dim] = ValueOf(keys[i], 0);
      });
      team_.Wait();
    };
    const Ptr<float> from{reinterpret_cast<uint64_t>(managed)};
    const double first = gather(from, 0);
    VerifyTable(batches[0].keys(), dim, 0);
    for (size_t b = 1; b < kBatches; ++b) gather(from, b);
    std::vector<double> still, after_update, pinned_still, pinned_after;
    for (size_t b = 0; b < kBatches; ++b) {
      still.push_back(gather(from, b));
      pinned_still.push_back(gather(t.host.seen(), b));
    }
    for (size_t b = 0; b < 3; ++b) {
      int64_t start = NowNs();
      update(rows, b);
      gather(from, b + 1);
      after_update.push_back(static_cast<double>(NowNs() - start) * 1e-9);
      start = NowNs();
      update(t.host.data(), b);
      gather(t.host.seen(), b + 1);
      pinned_after.push_back(static_cast<double>(NowNs() - start) * 1e-9);
    }
    Outcome o;
    o.figures.Set("first_us", first * 1e6)
        .Set("resident_us", Median(still) * 1e6)
        .Set("pinned_us", Median(pinned_still) * 1e6)
        .Set("after_host_update_us", Median(after_update) * 1e6)
        .Set("pinned_after_host_update_us", Median(pinned_after) * 1e6)
        .Set("over_unified_after_update", Median(after_update) / Median(pinned_after));
    return o;
  }

  // --- Whole steps ---

  // What a caller does in a step: the backward pass is a copy of a pattern on the device.
  struct StepInput {
    std::vector<std::vector<uint64_t>> keys;
    OnDevice<float> pattern, grads;
  };
  StepInput MakeSteps(uint32_t dim, const std::string& dist, size_t batch) {
    StepInput in;
    for (size_t i = 0; i < kStepBatches; ++i) {
      const auto keys = Keys(dist, TableShape(dim).rows, batch, 5000 + i);
      in.keys.emplace_back(keys.begin(), keys.end());
    }
    std::vector<float> pattern(batch * dim);
    bench::Random random(7);
    for (float& x : pattern) x = static_cast<float>((random.Uniform() - 0.5) * 2e-3);
    in.pattern = Uploaded(runtime_, pattern.data(), pattern.size());
    in.grads = OnDevice<float>(runtime_, batch * dim);
    return in;
  }

  // Time inside the calls of each step: [0] with pending updates, [1] with nothing pending. And the
  // time of whole steps.
  struct StepTimes {
    double seconds = 0;  // of a step, the flush at the end included
    std::vector<double> inside[2];
  };
  // `device_fills`: how much other work the device has between lookup and push. With `block` not 0,
  // every other block of so many steps flushes everything after each step, outside the times.
  StepTimes Train(Engine& engine, StepInput& in, size_t count, size_t device_fills = 0,
                  size_t block = 0) {
    const uint32_t dim = engine.shape().dim;
    const size_t batch = in.keys[0].size(), bytes = batch * dim * sizeof(float);
    const uint64_t first = engine.step(), last = first + count;
    std::vector<frugal_batch*> ring(kWindow + 1);
    auto declare = [&](uint64_t s) {
      const uint64_t batch_of = engine.trained() + (s - engine.step());
      ring[s % ring.size()] = engine.Declare(s, in.keys[batch_of % in.keys.size()]);
    };
    StepTimes times;
    lane_->Wait();
    const int64_t start = NowNs();
    for (uint64_t s = first; s < last && s < first + kWindow; ++s) declare(s);
    for (uint64_t s = first; s < last; ++s) {
      int64_t inside = 0;
      auto timed = [&](auto call) {
        const int64_t t = NowNs();
        call();
        inside += NowNs() - t;
      };
      frugal_batch* const declared = ring[s % ring.size()];
      timed([&] {
        engine.Begin();
        engine.Lookup(declared, Out(batch, dim, 0));
        if (s + kWindow < last) declare(s + kWindow);
      });
      for (size_t i = 0; i < device_fills; ++i)
        Check(runtime_->fill(copy_to_.raw(), 0, FillBytes(), lane_->stream()), "device time");
      lane_->Copy(in.grads.at(), in.pattern.at(), bytes);
      timed([&] {
        engine.Push(declared, in.grads.at());
        engine.End();
      });
      if (block == 0) continue;
      // The time of device work is no stall.
      lane_->Wait();
      const bool quiet = (s - first) / block % 2 != 0;
      if (quiet) engine.Flush();
      if ((s - first) % block >= 2 && s >= first + kWindow && s + kWindow < last)
        times.inside[quiet].push_back(static_cast<double>(inside) * 1e-9);
    }
    engine.Flush();
    lane_->Wait();
    times.seconds = static_cast<double>(NowNs() - start) * 1e-9 / static_cast<double>(count);
    return times;
  }
  // An engine's step, as a side; `engine` and `in` outlive it.
  Side Trained(const char* name, const EngineShape& engine, StepInput& in) {
    return {name, [&] {
              Engine& e = EngineOf(engine);
              Train(e, in, 4);
              return Train(e, in, sizes_.steps).seconds;
            }};
  }
  size_t FillBytes() const { return std::min<size_t>(sizes_.copy_bytes, size_t{32} << 20); }

  Outcome Steps(uint32_t dim, const std::string& dist, size_t batch, int32_t optimizer) {
    const Rows shape = TableShape(dim);
    StepInput in = MakeSteps(dim, dist, batch);
    const EngineShape plain{shape.rows, dim, optimizer, FRUGAL_FLUSH_AUTO, 0};
    EngineShape cached = plain;
    cached.cache = kCacheShare;
    InStep(plain, cached);
    std::vector<Side> sides;
    sides.push_back(Trained("frugal", plain, in));
    sides.push_back(Trained("frugal_cache", cached, in));
    std::string without;
    Worker worker(*this);
    for (const char* name : {"torch_gpu", "torch_cpu"}) try {
        worker.Ask(std::string("prepare side=") + name + " optimizer=" + OptimizerName(optimizer) +
                   " " + WorkerShape(shape, dist, batch));
        sides.push_back({name, [this, name, &worker] {
                           return worker.Seconds(std::string("run side=") + name +
                                                 " steps=" + std::to_string(sizes_.steps / 3));
                         }});
      } catch (const std::runtime_error& e) {
        // Reports and counts it; the other sides are still measured.
        without += std::string(without.empty() ? "" : "; ") + name + ": " + e.what();
        ++sides_missing_;
      }
    const Turns turns(sides, sizes_.turns);
    Outcome o;
    for (const Side& s : sides)
      o.figures.Set(std::string(s.name) + "_us", turns.Seconds(s.name) * 1e6);
    for (const Side& s : sides)
      if (std::string(s.name).rfind("torch", 0) == 0)
        for (const char* ours : {"frugal", "frugal_cache"})
          o.figures.Set(std::string(ours) + "_over_" + s.name, turns.Ratio(ours, s.name));
    VerifySame(plain, cached, in.keys[0]);
    const frugal_stats stats = EngineOf(cached).Stats();
    o.figures.Set("cache_hit_rate", static_cast<double>(stats.cache_hits) /
                                        static_cast<double>(std::max<uint64_t>(
                                            stats.cache_hits + stats.cache_misses, 1)));
    if (!without.empty()) o.figures.Set("without", without);
    return o;
  }

  // Deferred against write-through, with device time of 0, 1 and 3 steps.
  Outcome Deferred(uint32_t dim, const std::string& dist, size_t batch) {
    const Rows shape = TableShape(dim);
    StepInput in = MakeSteps(dim, dist, batch);
    const EngineShape deferred{shape.rows, dim, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_FLUSH_DEFERRED, 0};
    EngineShape written = deferred;
    written.flush = FRUGAL_FLUSH_WRITE_THROUGH;
    const EngineShape* const engines[] = {&deferred, &written};
    InStep(deferred, written);
    double step = 0;
    for (const EngineShape* e : engines) {
      Train(EngineOf(*e), in, 4);
      step = Train(EngineOf(*e), in, sizes_.steps).seconds;
    }
    const double fill = PerCall([&](size_t) {
      Check(runtime_->fill(copy_to_.raw(), 0, FillBytes(), lane_->stream()), "device time");
    });
    Outcome o;
    for (const int times : {3, 1, 0}) {
      const auto fills = static_cast<size_t>(times * step / fill + 0.5);
      const std::string suffix = "_" + std::to_string(times) + "x";
      std::vector<double> stalls[2];
      std::vector<Side> sides;
      constexpr size_t kBlock = 8;
      const size_t mixed = 2 * kWindow + 6 * kBlock;
      for (int m = 0; m < 2; ++m)
        sides.push_back({m == 0 ? "deferred" : "write_through", [&, m] {
                           Engine& e = EngineOf(*engines[m]);
                           const StepTimes t = Train(e, in, mixed, fills, kBlock);
                           stalls[m].push_back(Median(t.inside[0]) - Median(t.inside[1]));
                           return Train(e, in, sizes_.steps, fills).seconds;
                         }});
      const Turns turns(sides, sizes_.turns);
      o.figures.Set("device_us" + suffix, static_cast<double>(fills) * fill * 1e6)
          .Set("deferred_us" + suffix, turns.Seconds("deferred") * 1e6)
          .Set("write_through_us" + suffix, turns.Seconds("write_through") * 1e6)
          .Set("deferred_over_write_through" + suffix, turns.Ratio("deferred", "write_through"))
          .Set("deferred_stall_us" + suffix, Median(stalls[0]) * 1e6)
          .Set("write_through_stall_us" + suffix, Median(stalls[1]) * 1e6);
    }
    VerifySame(deferred, written, in.keys[0]);
    return o;
  }

  // The cost of the default FRUGAL_NAN_REJECT, with which each step's end waits until the device
  // has checked for NaNs. Compared with the policy of the other cases.
  Outcome NanReject(uint32_t dim, const std::string& dist, size_t batch) {
    StepInput in = MakeSteps(dim, dist, batch);
    const EngineShape accept{TableShape(dim).rows, dim, FRUGAL_ROWWISE_ADAGRAD, FRUGAL_FLUSH_AUTO,
                             kCacheShare};
    EngineShape reject = accept;
    reject.nan = FRUGAL_NAN_REJECT;
    InStep(accept, reject);
    const Turns turns({Trained("accept", accept, in), Trained("reject", reject, in)}, sizes_.turns);
    VerifySame(accept, reject, in.keys[0]);
    Outcome o;
    o.figures.Set("accept_us", turns.Seconds("accept") * 1e6)
        .Set("reject_us", turns.Seconds("reject") * 1e6)
        .Set("reject_over_accept", turns.Ratio("reject", "accept"));
    return o;
  }

  // --- torch ---

  // The worker process, which is started once; its tables live as long as this.
  class Worker {
   public:
    explicit Worker(Bench& bench) : bench_(bench) {}
    ~Worker() {
      try {
        if (bench_.child_) bench_.child_->Ask("free");
      } catch (const std::exception&) {
        bench_.child_.reset();
      }
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    void Ask(const std::string& line) { child().Ask(line); }
    double Seconds(const std::string& line) { return child().Number(line, "seconds"); }

   private:
    Child& child() {
      if (!bench_.child_) bench_.child_ = std::make_unique<Child>(bench_.worker_command_);
      return *bench_.child_;
    }
    Bench& bench_;
  };
  std::string WorkerShape(const Rows& shape, const std::string& dist, size_t batch) {
    return "rows=" + std::to_string(shape.rows) + " dim=" + std::to_string(shape.dim) +
           " batch=" + std::to_string(batch) + " keys_file=" + KeysFile(shape.dim, dist, batch) +
           " device=" + (on_gpu_ ? device_ : "cpu");
  }
  std::string KeysFile(uint32_t dim, const std::string& dist, size_t batch) {
    if (folder_.path.empty()) {
      char name[] = "/tmp/frugal-gpu-bench-XXXXXX";
      if (mkdtemp(name) == nullptr) throw std::runtime_error("no folder for keys");
      folder_.path = name;
    }
    const std::string file =
        folder_.path + "/" + std::to_string(dim) + dist + std::to_string(batch) + ".keys";
    if (access(file.c_str(), R_OK) == 0) return file;
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < kStepBatches; ++i)
      for (const uint32_t k : Keys(dist, TableShape(dim).rows, batch, 5000 + i)) keys.push_back(k);
    bench::WriteFile(file, keys.data(), keys.size() * sizeof(uint64_t));
    folder_.files.push_back(file);
    return file;
  }
  struct Folder {
    std::string path;
    std::vector<std::string> files;
    ~Folder() {
      for (const std::string& f : files) unlink(f.c_str());
      if (!path.empty()) rmdir(path.c_str());
    }
  };
  static constexpr size_t kStepBatches = 40;
  static constexpr double kCacheShare = 0.1;  // of the rows

  std::string device_;
  Sizes sizes_;
  std::vector<std::string> worker_command_;
  bool on_gpu_;
  Team team_;
  std::shared_ptr<Runtime> runtime_;
  Extent extent_;
  std::unique_ptr<Lane> lane_;
  Pinned<char> copy_host_;
  OnDevice<char> copy_from_, copy_to_;
  std::unique_ptr<Table> table_;
  OnDevice<float> out_;
  std::vector<std::unique_ptr<Engine>> engines_;
  Folder folder_;
  std::unique_ptr<Child> child_;
  uint64_t sides_missing_ = 0;
};

Sizes SizesFor(bool gpu, bool quick) {
  if (!gpu)
    return {20000, 8000, 512, size_t{1} << 20, {128}, 0.004, 2, quick ? size_t{12} : size_t{24}};
  if (quick)
    return {1'000'000, 400'000, 65536, size_t{256} << 20, {128, 8192, 131072}, 0.01, 3, 30};
  return {10'000'000, 4'000'000, 65536, size_t{256} << 20, {128, 512, 2048, 8192, 32768, 131072},
          0.03,       5,         60};
}

// Lines of results of earlier runs.
class Earlier {
 public:
  explicit Earlier(const std::string& path) {
    if (path.empty()) return;
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    for (std::string line; std::getline(file, line);) lines_.push_back(line);
  }
  // Whether one of them begins like the line of this case.
  bool Has(const Json& of) const {
    std::string begin = of.Text();
    begin.back() = ',';
    return std::any_of(lines_.begin(), lines_.end(),
                       [&](const std::string& line) { return line.rfind(begin, 0) == 0; });
  }

 private:
  std::vector<std::string> lines_;
};

int Main(int argc, char** argv) {
  const int64_t start = NowNs();
  Options options(argc, argv);
  const std::string device = options.Str("--device", "sim:0");
  const bool quick = options.Flag("--quick");
  const double seconds = options.Num("--seconds", 400);
  const std::string only = options.Str("--only", "");
  const std::string python = options.Str("--python", "python3");
  const std::string script = options.Str("--script", "tools/gpu/torch_steps.py");
  const bool list = options.Flag("--list");
  const Earlier earlier(options.Str("--done", ""));
  const std::string plan = options.Str("--plan", "");
  Results results(options.Str("--results", ""));
  options.NoOthers();

  Bench bench(device, SizesFor(device.rfind("cuda:", 0) == 0, quick), python, script);
  auto line_of = [](const Case& c) {
    return Json().Set("case", c.name).Raw("params", c.params.Text());
  };
  std::vector<Case> cases = bench.Cases();
  std::erase_if(cases,
                [&](const Case& c) { return line_of(c).Text().find(only) == std::string::npos; });
  std::string all;
  for (const Case& c : cases) all += line_of(c).Text() + "\n";
  if (!plan.empty()) bench::WriteFile(plan, all.data(), all.size());
  if (list) {
    fputs(all.c_str(), stdout);
    return 0;
  }
  uint64_t done = 0, before = 0, failed = 0, skipped = 0, aims = 0, met = 0;
  for (const Case& c : cases) {
    Json line = line_of(c);
    if (earlier.Has(line)) {
      ++before;
      continue;
    }
    const int64_t began = NowNs();
    if (static_cast<double>(began - start) * 1e-9 > seconds) {
      line.Set("skipped", "the time is over");
      ++skipped;
    } else {
      try {
        const Outcome o = c.run();
        line.Raw("figures", o.figures.Text());
        if (std::isfinite(o.aim)) {
          const bool is_met = o.value >= o.aim;
          char aim[80];
          snprintf(aim, sizeof aim, "%s >= %g", o.of, o.aim);
          line.Set("aim", aim);
          // The simulated GPU's speed has no aims.
          line.Raw("met", !bench.on_gpu() ? "null" : is_met ? "true" : "false");
          if (bench.on_gpu()) {
            ++aims;
            met += is_met;
          }
        }
        ++done;
      } catch (const Skipped& e) {
        line.Set("skipped", e.what());
        ++skipped;
      } catch (const Missing& e) {
        line.Set("skipped", e.what());
        ++skipped;
      } catch (const std::exception& e) {
        line.Set("error", e.what());
        ++failed;
      }
    }
    line.Set("seconds", static_cast<double>(NowNs() - began) * 1e-9);
    results.Line(line);
  }
  auto n = [](uint64_t x) { return static_cast<unsigned long long>(x); };
  printf(
      "bench: %llu cases, %llu done before, %llu failed, %llu skipped, %llu sides missing, "
      "%llu of %llu aims met\n",
      n(done), n(before), n(failed), n(skipped), n(bench.sides_missing()), n(met), n(aims));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gpu_tools

int main(int argc, char** argv) {
  try {
    return gpu_tools::Main(argc, argv);
  } catch (const std::exception& e) {
    fprintf(stderr, "gpu_bench: %s\n", e.what());
    return 2;
  }
}
