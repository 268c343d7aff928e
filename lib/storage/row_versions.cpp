#include "storage/row_versions.h"

#include "base/assert.h"
#include "base/sync.h"

namespace frugal {
namespace {

constexpr uint32_t kSpins = 1000;  // longer than most rows are written
constexpr uint64_t kSleepNs = 50'000;

using Shared = uint64_t __attribute__((may_alias));

size_t words_of(size_t n) {
  return (n * sizeof(device::Element) + sizeof(Shared) - 1) / sizeof(Shared);
}

}  // namespace

void pause_for_version(uint32_t looks) {
  if (looks < kSpins)
    cpu_relax();
  else
    sleep_ns(kSleepNs);
}

void begin_write(VersionWord& word) {
  for (uint32_t looks = 0;; ++looks) {
    uint32_t version = word.load(std::memory_order_relaxed);
    schedule_point();
    if (!(version & 1) &&
        word.compare_exchange_weak(version, version + 1, std::memory_order_acquire,
                                   std::memory_order_relaxed))
      break;
    pause_for_version(looks);
  }
  std::atomic_thread_fence(std::memory_order_release);  // the word is odd before the row changes
}

void end_write(VersionWord& word) {
  FRUGAL_ASSERT(word.load(std::memory_order_relaxed) & 1);
  schedule_point();
  word.fetch_add(1, std::memory_order_release);
}

void store_shared(device::Element* row, const device::Element* from, size_t n) {
  auto* to = reinterpret_cast<Shared*>(row);
  const auto* words = reinterpret_cast<const Shared*>(from);
  for (size_t i = 0; i < words_of(n); ++i) {
    schedule_point();
    __atomic_store_n(to + i, words[i], __ATOMIC_RELAXED);
  }
}

void load_shared(const device::Element* row, device::Element* to, size_t n) {
  const auto* words = reinterpret_cast<const Shared*>(row);
  auto* copy = reinterpret_cast<Shared*>(to);
  for (size_t i = 0; i < words_of(n); ++i) {
    schedule_point();
    copy[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
  }
}

}  // namespace frugal
