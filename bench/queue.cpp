// The queue alone: sides `frugal` (two-level) and `tree_heap`, in the same harness.
//
// prepare  side entries threads
// run      one repetition; one update = enqueue at a random priority, one adjust to another
//          random priority, dequeue in order
//
// The queue's owner serializes calls. So `threads` threads share one queue and one lock, which each
// takes for a batch of operations, as the engine does. They read and change marks (flush/queue.h)
// without the lock. Entries come in random order.
#include "flush/queue.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <numeric>

#include "harness.h"

namespace bench {
namespace {

// The length of the engine's batches.
constexpr size_t kBatch = 512;
constexpr size_t kAhead = 16;
constexpr uint8_t kTaken = 255;

class SpinLock {
 public:
  void lock() {
    for (int spins = 0; flag_.test_and_set(std::memory_order_acquire); ++spins) {
      CpuRelax();
      if (spins > 20000) std::this_thread::yield();
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

class Worker {
 public:
  Metrics Handle(const std::string& command, const Params& p) {
    if (command == "prepare") return Prepare(p);
    if (command == "run") return Run();
    if (command == "free") {
      queue_.reset();
      return {};
    }
    throw std::runtime_error("unknown command " + command);
  }

 private:
  Metrics Prepare(const Params& p) {
    entries_ = p.Int("entries", 1000000);
    threads_ = static_cast<int>(p.Int("threads", 2));
    const std::string side = p.Str("side");
    queue_.reset(side == "tree_heap" ? frugal::make_tree_heap() : frugal::make_two_level_queue());
    marks_.assign(entries_, kTaken);
    queue_->reserve_ids(marks_.data(), static_cast<uint32_t>(entries_));
    Random random(11);
    ids_.resize(entries_);
    std::iota(ids_.begin(), ids_.end(), 0u);
    for (size_t i = entries_; i > 1; --i) std::swap(ids_[i - 1], ids_[random.Below(i)]);
    for (auto* prios : {&first_, &second_}) {
      prios->resize(entries_);
      for (uint8_t& prio : *prios) prio = static_cast<uint8_t>(random.Below(frugal::kRing));
    }
    return {};
  }

  // body(begin, end) over all entries by all threads, under the lock a batch at a time.
  template <typename Body>
  double Phase(const Body& body) {
    SpinBarrier barrier(threads_);
    std::atomic<int64_t> start{0}, end{0};
    Parallel(threads_, [&](int thread) {
      const size_t from = entries_ * thread / threads_, to = entries_ * (thread + 1) / threads_;
      barrier.Wait();
      if (thread == 0) start = NowNs();
      barrier.Wait();
      for (size_t i = from; i < to; i += kBatch) body(i, std::min(i + kBatch, to));
      barrier.Wait();
      if (thread == 0) end = NowNs();
    });
    return static_cast<double>(end - start);
  }

  std::atomic_ref<uint8_t> Mark(uint32_t id) { return std::atomic_ref<uint8_t>(marks_[id]); }
  // Changes the mark of an entry if it is `from`.
  bool Change(uint32_t id, uint8_t from, uint8_t to) {
    return Mark(id).compare_exchange_strong(from, to, std::memory_order_relaxed);
  }
  void Prefetch(const uint32_t* ids, size_t i, size_t n) const {
    if (i + kAhead < n) __builtin_prefetch(&marks_[ids[i + kAhead]], 1);
  }

  Metrics Run() {
    const double enqueue = Phase([&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i)
        Mark(ids_[i]).store(first_[i], std::memory_order_relaxed);
      std::lock_guard<SpinLock> guard(lock_);
      for (size_t i = begin; i < end; ++i) queue_->push(ids_[i], first_[i]);
    });
    const double adjust = Phase([&](size_t begin, size_t end) {
      std::array<bool, kBatch> moved;
      for (size_t i = begin; i < end; ++i) {
        Prefetch(ids_.data(), i, end);
        const uint8_t old = Mark(ids_[i]).load(std::memory_order_relaxed);
        moved[i - begin] = old != kTaken && old != second_[i] && Change(ids_[i], old, second_[i]);
      }
      std::lock_guard<SpinLock> guard(lock_);
      for (size_t i = begin; i < end; ++i)
        if (moved[i - begin]) queue_->move(ids_[i], second_[i]);
    });
    std::vector<uint8_t> prio_of(entries_);
    for (size_t i = 0; i < entries_; ++i) prio_of[ids_[i]] = second_[i];
    // The priorities in the order in which entries were dequeued; kTaken for stale entries.
    std::vector<uint8_t> order(2 * entries_, kTaken);
    size_t places = 0;
    std::atomic<size_t> taken{0};
    const double dequeue = Phase([&](size_t begin, size_t end) {
      std::array<uint32_t, kBatch> out;
      // One call may return fewer entries than it was asked for.
      for (size_t left = end - begin; left != 0;) {
        size_t n, at;
        uint8_t prio;
        {
          std::lock_guard<SpinLock> guard(lock_);
          n = queue_->pop(0, frugal::kRing, out.data(), left, &prio);
          at = places;
          places += n;
        }
        if (n == 0) break;
        for (size_t i = 0; i < std::min(n, kAhead); ++i) __builtin_prefetch(&marks_[out[i]], 1);
        size_t kept = 0;
        for (size_t i = 0; i < n; ++i) {
          Prefetch(out.data(), i, n);
          if (!Change(out[i], prio, kTaken)) continue;
          order[at + i] = prio_of[out[i]];
          ++kept;
        }
        taken.fetch_add(kept, std::memory_order_relaxed);
        left -= kept;
      }
    });
    if (taken != entries_) throw std::runtime_error("entries were lost");
    order.erase(std::remove(order.begin(), order.end(), kTaken), order.end());
    if (!std::is_sorted(order.begin(), order.end())) throw std::runtime_error("out of order");
    const double n = static_cast<double>(entries_) * 1e9;
    return {{"throughput", n / (enqueue + adjust + dequeue)},
            {"enqueue", n / enqueue},
            {"adjust", n / adjust},
            {"dequeue", n / dequeue}};
  }

  std::unique_ptr<frugal::Queue> queue_;
  SpinLock lock_;
  size_t entries_ = 0;
  int threads_ = 1;
  std::vector<uint32_t> ids_;
  std::vector<uint8_t> first_, second_, marks_;
};

}  // namespace
}  // namespace bench

int main() {
  bench::Worker worker;
  return bench::Serve([&](const std::string& command, const bench::Params& params) {
    return worker.Handle(command, params);
  });
}
