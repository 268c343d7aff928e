// A storage tier for a table (storage/storage_tier.h) that is slow, and is memory itself.
#pragma once
#include <cstring>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "storage/rows.h"

namespace frugal {

class SlowStore final : public StorageTier {
 public:
  // Each call takes up to `most_ns`, which a seed draws.
  explicit SlowStore(uint64_t seed, uint64_t most_ns) : most_ns_(most_ns), random_(seed * 2 + 1) {}

  bool has(uint64_t key) override {
    Lock lock(mu_);
    return records_.count(key) != 0;
  }
  void forget(uint64_t key) noexcept override {
    Lock lock(mu_);
    records_.erase(key);
  }
  void keys(Vector<uint64_t>* out) override {
    Lock lock(mu_);
    for (const auto& [key, record] : records_) out->push_back(key);
  }
  Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
              const device::RowsRef& to) override {
    for (size_t i = 0; i < n; ++i) {
      wait();
      Lock lock(mu_);
      const auto at = records_.find(keys[i]);
      if (at == records_.end() || at->second.size() != to.value_pitch + to.state_pitch)
        return fail(FRUGAL_ERR_INTERNAL, "no such record");
      std::memcpy(to.row(slots[i]), at->second.data(), to.value_pitch);
      if (to.state_pitch)
        std::memcpy(to.state_row(slots[i]), at->second.data() + to.value_pitch, to.state_pitch);
    }
    return FRUGAL_OK;
  }
  Status store(const uint64_t* keys, size_t n, const device::RowsView& from) override {
    for (size_t i = 0; i < n; ++i) {
      wait();
      Lock lock(mu_);
      std::vector<char>& record = records_[keys[i]];
      record.resize(from.value_pitch + from.state_pitch);
      std::memcpy(record.data(), from.row(i), from.value_pitch);
      if (from.state_pitch)
        std::memcpy(record.data() + from.value_pitch, from.state_row(i), from.state_pitch);
    }
    return FRUGAL_OK;
  }

 private:
  void wait() {
    uint64_t ns = 0;
    {
      Lock lock(mu_);
      random_ = random_ * 6364136223846793005u + 1442695040888963407u;
      if (most_ns_ && random_ >> 60 == 0) ns = (random_ >> 20) % most_ns_;
    }
    schedule_point();
    if (ns) sleep_ns(ns);
  }

  const uint64_t most_ns_;
  Mutex mu_;
  uint64_t random_ GUARDED_BY(mu_);
  std::unordered_map<uint64_t, std::vector<char>> records_ GUARDED_BY(mu_);
};

}  // namespace frugal
