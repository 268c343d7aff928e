// For tests of the library's parts: messages, seeds, and memory that fails.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "support/ok.h"
#include "support/random.h"

namespace frugal {

// What the last failure in this thread has said. A part's is not one of the C ABI as yet.
inline std::string LastMessage() { return recorded_message(); }

// Another one in each run. FRUGAL_TEST_SEED in the environment repeats one.
inline uint64_t test_seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("FRUGAL_TEST_SEED");
    const uint64_t s = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("FRUGAL_TEST_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return seed;
}

// How often a random test runs, each time with the next seed. FRUGAL_TEST_ROUNDS in the environment
// is a factor.
inline uint64_t test_rounds(uint64_t usual) {
  const char* given = std::getenv("FRUGAL_TEST_ROUNDS");
  return usual * (given ? std::strtoull(given, nullptr, 10) : 1);
}

// While it lives, the n-th allocation of the engine's heap fails, counted from 1.
class HeapFails {
 public:
  explicit HeapFails(int64_t n) { heap_test_fail_after(n); }
  ~HeapFails() { heap_test_fail_after(0); }
};

// Allocations of the engine's heap since it was made.
class HeapCount {
 public:
  HeapCount() { heap_test_fail_after(kMany); }
  ~HeapCount() { heap_test_fail_after(0); }
  int64_t so_far() const {
    const int64_t left = heap_test_fail_after(kMany);
    heap_test_fail_after(left);
    return kMany - left;
  }

 private:
  static constexpr int64_t kMany = int64_t{1} << 60;
};

// Likewise the n-th call of the system for memory; -1: every commit.
class SystemFails {
 public:
  explicit SystemFails(int64_t n) { os_test_fail_after(n); }
  ~SystemFails() { os_test_fail_after(0); }
};

// A call whose memory fails at the first request for some, of the heap or the system, then at the
// second, and so on, until it succeeds: `while (without.next()) without([&] { return ...; });`
class WithoutMemory {
 public:
  bool next() {
    if (status_ == FRUGAL_OK) return false;
    ++rounds_;
    return true;
  }
  template <class Call>
  Status operator()(Call call) {
    SystemFails system(rounds_);
    HeapFails heap(rounds_);
    try {
      status_ = call();
    } catch (const std::bad_alloc&) {
      status_ = FRUGAL_ERR_OUT_OF_MEMORY;
    }
    // (Anything else ends the rounds, too.)
    EXPECT_TRUE(status_ == FRUGAL_OK || status_ == FRUGAL_ERR_OUT_OF_MEMORY) << status_;
    const Status answer = status_;
    if (status_ != FRUGAL_ERR_OUT_OF_MEMORY) status_ = FRUGAL_OK;
    return answer;
  }
  int64_t rounds() const { return rounds_; }

 private:
  int64_t rounds_ = 0;
  Status status_ = FRUGAL_ERR_OUT_OF_MEMORY;
};

}  // namespace frugal
