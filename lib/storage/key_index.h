// Hash index of a hashed table: 64-bit key -> slot.
//
// A bucket is one cache line and holds five keys with their slots. A key is in its home bucket or,
// where that is full, in a later one. A bucket's `overflow` counts the keys that passed it, so a
// search ends at the first bucket that no key passed. Every 64-bit value is a key: an empty entry
// is marked by slot 0, and slots are stored + 1.
//
// The index grows by doubling, at last to the table's capacity. During the copy both copies exist
// and both count against the budget. It takes 64 / (5 * fill) bytes a key: 16 .. 32 between two
// doublings. peak_bytes() is its maximum.
//
// Callers serialize all calls (SlotMap::mu).
#pragma once
#include <cstdint>

#include "base/os.h"
#include "storage/slab.h"

namespace frugal {

class KeyIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  KeyIndex() = default;
  ~KeyIndex();
  KeyIndex(const KeyIndex&) = delete;
  Status open(uint64_t capacity, MemoryBudget* budget);
  // Finds the slots of `n` keys: kNone for a missing key. Prefetches ahead.
  void find(const uint64_t* keys, size_t n, uint32_t* slots) const;
  uint32_t find(uint64_t key) const;
  // Makes room for `n` more keys. A later insert of these cannot fail.
  Status make_room(uint64_t n);
  void insert(uint64_t key, uint32_t slot);  // the key must be missing
  void erase(uint64_t key);                  // the key must be there
  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const { return buckets_ * sizeof(Bucket); }
  // The maximum of an index of so many keys at any time. Usually it is reached during growth.
  static uint64_t peak_bytes(uint64_t capacity);

 private:
  static uint64_t bytes_for(uint64_t keys);
  static constexpr int kWays = 5;
  struct Bucket {
    uint64_t key[kWays];
    uint32_t slot[kWays];  // slot + 1; 0: empty
    uint32_t overflow;
  };
  static_assert(sizeof(Bucket) == 64);
  static uint64_t hash(uint64_t key);
  uint64_t home(uint64_t key) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(hash(key)) * buckets_) >> 64);
  }
  static uint64_t buckets_for(uint64_t keys);
  static uint32_t match(const Bucket& bucket, uint64_t key);
  Bucket* table() const { return reinterpret_cast<Bucket*>(mapping_.base); }
  Mapping mapping_;
  uint64_t capacity_ = 0;
  uint64_t buckets_ = 0;
  uint64_t limit_ = 0;  // keys before the next doubling
  uint64_t size_ = 0;
  MemoryBudget* budget_ = nullptr;
};

}  // namespace frugal
