// What all C++ benchmark workers share: the line protocol, clocks, memory, key files, threads.
//
// A worker is a process that bench/run.py starts. It reads one command a line from stdin, as in
//     prepare side=frugal dim=32 rows=10000000 keys_file=/…/keys.bin
// and replies to each with one line of JSON. Only one worker runs at a time, so the sides of a
// comparison take turns within one run, and none disturbs another.
//
// Nothing here includes lib/: the sides `loop` and `stages` must stay independent of the engine.
#ifndef FRUGAL_BENCH_HARNESS_H_
#define FRUGAL_BENCH_HARNESS_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bench {

inline int64_t NowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline int64_t CpuNs() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Simulates device time. The thread stays awake, as one that polls its device: a core that sleeps
// is slow for a while after it wakes up, which would be measured as the engine's time.
inline void WaitUntilNs(int64_t deadline) {
  while (NowNs() < deadline) CpuRelax();
}

// The arguments of a command.
class Params {
 public:
  explicit Params(std::istream& in) {
    std::string token;
    while (in >> token) {
      const size_t eq = token.find('=');
      if (eq == std::string::npos) throw std::runtime_error("not name=value: " + token);
      values_[token.substr(0, eq)] = token.substr(eq + 1);
    }
  }
  std::string Str(const std::string& name, const std::string& fallback = "") const {
    const auto it = values_.find(name);
    return it == values_.end() ? fallback : it->second;
  }
  int64_t Int(const std::string& name, int64_t fallback) const {
    const auto it = values_.find(name);
    return it == values_.end() ? fallback : std::stoll(it->second);
  }
  double Num(const std::string& name, double fallback) const {
    const auto it = values_.find(name);
    return it == values_.end() ? fallback : std::stod(it->second);
  }

 private:
  std::map<std::string, std::string> values_;
};

using Metrics = std::vector<std::pair<std::string, double>>;

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? 0 : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

inline std::string ToJson(const Metrics& metrics) {
  std::ostringstream out;
  out.precision(12);
  out << "{";
  for (size_t i = 0; i < metrics.size(); ++i) {
    out << (i ? ", " : "") << '"' << metrics[i].first << "\": " << metrics[i].second;
  }
  out << "}";
  return out.str();
}

// Reads commands until `quit` or the end of the input. `handle` returns figures. An exception
// becomes {"error": …}, and the worker continues.
inline int Serve(const std::function<Metrics(const std::string&, const Params&)>& handle) {
  prctl(PR_SET_TIMERSLACK, 1);  // the default of 50 us would be part of every emulated wait
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command.empty()) continue;
    if (command == "quit") break;
    try {
      const Params params(in);
      std::cout << ToJson(handle(command, params)) << std::endl;
    } catch (const std::exception& e) {
      std::string text = e.what();
      for (char& c : text) {
        if (c == '"' || c == '\\' || c == '\n') c = '\'';
      }
      std::cout << "{\"error\": \"" << text << "\"}" << std::endl;
    }
  }
  return 0;
}

// Anonymous memory on transparent huge pages, the backing that the engine's rows have too.
template <typename T>
class HugeArray {
 public:
  HugeArray() = default;
  explicit HugeArray(size_t count) : count_(count) {
    constexpr size_t kHuge = size_t{2} << 20;
    bytes_ = (count * sizeof(T) + kHuge - 1) / kHuge * kHuge + kHuge;
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::runtime_error("out of memory");
    madvise(base_, bytes_, MADV_HUGEPAGE);
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge;
    data_ = reinterpret_cast<T*>(aligned);
  }
  HugeArray(HugeArray&& other) noexcept { Swap(other); }
  HugeArray& operator=(HugeArray&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~HugeArray() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  T* data() const { return data_; }
  size_t size() const { return count_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  void Swap(HugeArray& other) {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }
  void* base_ = nullptr;
  size_t bytes_ = 0;
  T* data_ = nullptr;
  size_t count_ = 0;
};

inline uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() { return Mix(state_ += 0x9e3779b97f4a7c15); }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }  // [0, 1)
  uint64_t Below(uint64_t n) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * n) >> 64);
  }

 private:
  uint64_t state_;
};

template <typename T>
inline HugeArray<T> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  if (fd < 0) throw std::runtime_error("cannot open " + path);
  struct stat s;
  if (fstat(fd, &s) != 0) throw std::runtime_error("cannot stat " + path);
  HugeArray<T> out(static_cast<size_t>(s.st_size) / sizeof(T));
  size_t done = 0;
  while (done < static_cast<size_t>(s.st_size)) {
    const ssize_t n = read(fd, reinterpret_cast<char*>(out.data()) + done, s.st_size - done);
    if (n <= 0) throw std::runtime_error("cannot read " + path);
    done += static_cast<size_t>(n);
  }
  close(fd);
  return out;
}

inline void WriteFile(const std::string& path, const void* data, size_t bytes) {
  FILE* f = fopen(path.c_str(), "wb");
  if (f == nullptr || fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0) {
    throw std::runtime_error("cannot write " + path);
  }
}

// Batches of keys, the same for every side of a case.
class Batches {
 public:
  Batches() = default;
  // `batch` keys each; with `hashed` an id becomes a random-looking 64-bit key (a bijection, so
  // the number of live keys stays).
  Batches(const std::string& path, size_t batch, bool hashed)
      : keys_(ReadFile<uint64_t>(path)), batch_(batch) {
    if (hashed) {
      for (size_t i = 0; i < keys_.size(); ++i) keys_[i] = HashedKey(keys_[i]);
    }
    if (keys_.size() < batch) throw std::runtime_error("too few keys in " + path);
  }
  static uint64_t HashedKey(uint64_t id) { return Mix(id + 1); }
  size_t count() const { return keys_.size() / batch_; }
  const uint64_t* Get(uint64_t index) const { return &keys_[index % count() * batch_]; }

 private:
  HugeArray<uint64_t> keys_;
  size_t batch_ = 1;
};

// A spinning barrier: the parts between two of them take tens of microseconds.
class SpinBarrier {
 public:
  explicit SpinBarrier(int threads) : threads_(threads) {}
  void Wait() {
    const uint64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      CpuRelax();
      if (spins > 20000) std::this_thread::yield();  // another process may hold the core
    }
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<uint64_t> round_{0};
};

// Runs body(thread) on `threads` threads, this one included, and waits for all.
inline void Parallel(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
  body(0);
  for (std::thread& t : others) t.join();
}

// New gradients for each step, cheap to make: rows of a pattern that stays in the L2 cache, at a
// place that moves with every step. This is the caller's backward pass, the same for all sides.
class Gradients {
 public:
  explicit Gradients(size_t dim) : dim_(dim), pattern_(kRows * dim) {
    Random random(7);
    for (size_t i = 0; i < kRows * dim; ++i) {
      pattern_[i] = static_cast<float>((random.Uniform() - 0.5) * 2e-3);
    }
  }
  void Fill(uint64_t step, size_t begin, size_t end, float* out) const {
    size_t from = (begin + step * 197) % kRows;
    for (size_t i = begin; i < end;) {
      const size_t n = std::min(end - i, kRows - from);
      memcpy(out + i * dim_, &pattern_[from * dim_], n * dim_ * sizeof(float));
      i += n;
      from = 0;
    }
  }

 private:
  static constexpr size_t kRows = 1024;
  size_t dim_;
  HugeArray<float> pattern_;
};

}  // namespace bench

#endif  // FRUGAL_BENCH_HARNESS_H_
