// Hash index of a hashed table: 64-bit key -> slot.
//
// Buckets of one cache line hold five keys with their slots. A key lies in its home bucket or,
// where that is full, in one after it; `overflow` of a bucket counts the keys that had to pass it,
// so a search ends at the first bucket that nobody passed. Every 64-bit value is a key (a slot of
// 0 marks an empty place; slots are stored + 1). Grows by doubling, at last to the table's
// capacity; while it is copied both copies are there, and both count against the budget. Bytes a
// key: 64 / (5 * fill), 16 .. 32 between two doublings; the most it ever holds is peak_bytes().
//
// Callers serialize all calls (the table's index mutex).
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
  // Slots of `n` keys; kNone where missing. Prefetches ahead.
  void find(const uint64_t* keys, size_t n, uint32_t* slots) const;
  uint32_t find(uint64_t key) const;
  // Room for `n` keys more; insert cannot fail after it.
  Status make_room(uint64_t n);
  void insert(uint64_t key, uint32_t slot);  // the key must be missing
  void erase(uint64_t key);                  // the key must be there
  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const { return buckets_ * sizeof(Bucket); }
  // The most that an index of so many keys takes at any time: as a rule while it grows.
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
