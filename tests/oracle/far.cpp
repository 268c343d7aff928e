#include "oracle/far.h"

#include <atomic>
#include <memory>

#include "support/slow_store.h"

namespace frugal_oracle {
namespace {

std::atomic<uint64_t> loaded_rows{0}, left_rows{0}, refused_rows{0};

thread_local uint64_t next_places = 0, next_seed = 0;

// Counts when its table ends.
class Counted final : public frugal::StorageTier {
 public:
  explicit Counted(uint64_t seed) : store_(seed, 20'000) {}
  ~Counted() override {
    loaded_rows += loaded;
    left_rows += left;
    refused_rows += refused;
  }
  bool has(uint64_t key) override { return store_.has(key); }
  void forget(uint64_t key) noexcept override { store_.forget(key); }
  void keys(frugal::Vector<uint64_t>* out) override { store_.keys(out); }
  frugal::Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
                      const frugal::device::RowsRef& to) override {
    return store_.load(keys, slots, n, to);
  }
  frugal::Status store(const uint64_t* keys, size_t n,
                       const frugal::device::RowsView& from) override {
    return store_.store(keys, n, from);
  }

 private:
  frugal::SlowStore store_;
};

frugal::Tier Make(const frugal_table_config&) {
  frugal::Tier tier;
  if (next_places == 0) return tier;
  tier.slots = next_places;
  tier.store = std::make_unique<Counted>(next_seed);
  return tier;
}

}  // namespace

const bool kFarStores = true;

void PlacesOfNextTable(uint64_t places, uint64_t seed) {
  frugal::g_make_tier.store(Make);
  next_places = places;
  next_seed = seed;
}

FarCounts CountFar() { return {loaded_rows, left_rows, refused_rows}; }

}  // namespace frugal_oracle
