// Batches of keys as the engine gives them to its kernels, tables that kernels read, and threads
// that gather on the host.
#ifndef FRUGAL_TOOLS_GPU_BATCHES_H_
#define FRUGAL_TOOLS_GPU_BATCHES_H_

#include <atomic>
#include <functional>
#include <thread>

#include "../../bench/zipf.h"
#include "common.h"
#include "device/ops/shapes.h"

namespace gpu_tools {

inline std::vector<uint32_t> Keys(const std::string& dist, uint64_t rows, size_t count,
                                  uint64_t seed) {
  bench::Ids ids(dist, rows, seed);
  std::vector<uint32_t> keys(count);
  for (uint32_t& k : keys) k = static_cast<uint32_t>(ids.Next());
  return keys;
}

// --- Threads ------------------------------------------------------------------------------------

// Threads that poll for a while before they sleep: a task takes tens of microseconds.
class Team {
 public:
  explicit Team(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this, t] { Run(t); });
  }
  ~Team() {
    stop_ = true;
    Start([](int) {});
    for (std::thread& t : threads_) t.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  int size() const { return static_cast<int>(threads_.size()); }

  // Starts body(thread) on every thread, and returns.
  void Start(std::function<void(int)> body) {
    Wait();
    body_ = std::move(body);
    left_.store(size(), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  void Wait() {
    for (int spins = 0; left_.load(std::memory_order_acquire) != 0; ++spins) {
      bench::CpuRelax();
      if (spins > 2000) std::this_thread::yield();
    }
  }

 private:
  void Run(int t) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; round_.load(std::memory_order_acquire) == seen; ++spins) {
        bench::CpuRelax();
        if (spins > 20000) round_.wait(seen);
      }
      ++seen;
      if (stop_) return;
      body_(t);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::function<void(int)> body_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int> left_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// --- Tables -------------------------------------------------------------------------------------

// The value of column c of a row: any function of its place.
inline float ValueOf(uint64_t row, uint32_t c) {
  return static_cast<float>(bench::Mix(row * 65537 + c) >> 41);
}

// Contiguous rows; dim is a multiple of 4.
struct Rows {
  uint64_t rows = 0;
  uint32_t dim = 0;
  size_t floats() const { return rows * dim; }
  size_t row_bytes() const { return dim * sizeof(float); }
};

inline void FillValues(Team& team, const Rows& shape, float* out) {
  team.Start([&](int t) {
    const uint64_t n = static_cast<uint64_t>(team.size());
    for (uint64_t r = shape.rows * t / n; r < shape.rows * (t + 1) / n; ++r)
      for (uint32_t c = 0; c < shape.dim; ++c) out[r * shape.dim + c] = ValueOf(r, c);
  });
  team.Wait();
}

// --- Batches ------------------------------------------------------------------------------------

// Keys sorted by row, with runs, sources and staged rows, as lib/engine/gpu_parts.cpp makes them.
class KernelBatch {
 public:
  // Kernels read rows for which `is_line` is true from device memory, at the same index.
  KernelBatch(const std::shared_ptr<Runtime>& runtime, std::vector<uint32_t> keys,
              const std::function<bool(uint32_t)>& is_line)
      : runtime_(runtime), keys_(std::move(keys)) {
    using namespace frugal::device;
    std::vector<uint64_t> pairs(keys_.size());
    for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = uint64_t{keys_[i]} << 32 | i;
    std::sort(pairs.begin(), pairs.end());
    std::vector<uint32_t> slots, start, positions;
    for (const uint64_t p : pairs) {
      if (slots.empty() || slots.back() != p >> 32) {
        slots.push_back(static_cast<uint32_t>(p >> 32));
        start.push_back(static_cast<uint32_t>(positions.size()));
      }
      positions.push_back(static_cast<uint32_t>(p));
    }
    start.push_back(static_cast<uint32_t>(positions.size()));
    distinct_ = slots.size();
    std::vector<Item> host, hbm;
    std::vector<Source> source(distinct_);
    std::vector<uint32_t> staged;
    for (uint32_t i = 0; i < distinct_; ++i) {
      const uint32_t runs = (start[i + 1] - start[i] + kRun - 1) / kRun;
      if (is_line(slots[i])) {
        source[i] = Source::cache_slot(slots[i]);
        ++lines_;
      } else if (runs > 1) {
        source[i] = Source::staged(static_cast<uint32_t>(staged.size()));
        staged.push_back(i);
      } else {
        host.push_back({i, 0});
        continue;
      }
      for (uint32_t r = 0; r < runs; ++r) hbm.push_back({i, r});
    }
    slots_ = Uploaded(runtime, slots.data(), slots.size());
    start_ = Uploaded(runtime, start.data(), start.size());
    positions_ = Uploaded(runtime, positions.data(), positions.size());
    index_ = Uploaded(runtime, keys_.data(), keys_.size());
    host_items_ = static_cast<uint32_t>(host.size());
    hbm_items_ = static_cast<uint32_t>(hbm.size());
    if (!hbm.empty()) {
      host.insert(host.end(), hbm.begin(), hbm.end());
      items_ = Uploaded(runtime, host.data(), host.size());
      source_ = Uploaded(runtime, source.data(), source.size());
    }
    if (!staged.empty()) staged_ = Uploaded(runtime, staged.data(), staged.size());
    staged_rows_ = static_cast<uint32_t>(staged.size());
  }

  const std::vector<uint32_t>& keys() const { return keys_; }
  size_t distinct() const { return distinct_; }
  size_t host_rows() const { return distinct_ - lines_; }
  Ptr<uint32_t> index() const { return index_.at(); }

  frugal::device::PartPtr part() const {
    return {slots_.at(), start_.at(), positions_.at(), static_cast<uint32_t>(distinct_), 0};
  }

  // The kernels of a lookup.
  void Gather(Lane& lane, const frugal::device::Extent& extent, Ptr<float> host, Ptr<float> lines,
              uint32_t dim, Ptr<float> out) {
    frugal::device::GatherArgs a{};
    a.part = part();
    a.host = {host, dim};
    a.cached_rows = {lines, dim};
    if (hbm_items_ != 0) {
      a.source = source_.at();
      a.items = items_.at();
    }
    a.host_items = host_items_;
    a.hbm_items = hbm_items_;
    if (staged_rows_ != 0) {
      if (memory_.size() < size_t{staged_rows_} * dim)
        memory_ = OnDevice<float>(runtime_, size_t{staged_rows_} * dim);
      a.staged = {memory_.at(), dim};
      frugal::device::StageArgs s{};
      s.part = part();
      s.host = a.host;
      s.staged = a.staged;
      s.rows = staged_.at();
      s.count = staged_rows_;
      s.dim = dim;
      lane.Launch(Kernel::stage_rows, frugal::device::stage_shape(s, extent), s);
    }
    a.dim = dim;
    a.out = out;
    a.out_stride = dim * sizeof(float);
    const Shape shape = frugal::device::gather_shape(&a, extent);
    lane.Launch(Kernel::gather_rows, shape, a);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::vector<uint32_t> keys_;
  size_t distinct_ = 0, lines_ = 0;
  uint32_t host_items_ = 0, hbm_items_ = 0, staged_rows_ = 0;
  OnDevice<uint32_t> slots_, start_, positions_, index_, staged_;
  OnDevice<frugal::device::Source> source_;
  OnDevice<frugal::device::Item> items_;
  OnDevice<float> memory_;
};

}  // namespace gpu_tools

#endif  // FRUGAL_TOOLS_GPU_BATCHES_H_
