#include "storage/key_index.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace frugal {

namespace {
constexpr uint64_t kFirst = 1 << 16;  // keys that an index has room for from the start
}

uint64_t KeyIndex::hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

uint64_t KeyIndex::buckets_for(uint64_t keys) { return keys / 4 + 8; }  // filled to 4 of 5 at most

uint64_t KeyIndex::bytes_for(uint64_t keys) {
  const uint64_t bytes = buckets_for(keys) * sizeof(Bucket),
                 page = bytes < kHugePage ? 4096 : kHugePage;
  return (bytes + page - 1) / page * page;
}

uint64_t KeyIndex::peak_bytes(uint64_t capacity) {
  uint64_t now = bytes_for(std::min(capacity, kFirst)), most = now;
  for (uint64_t limit; (limit = now / sizeof(Bucket) * 4) < capacity;) {
    uint64_t next = bytes_for(std::min(limit * 2, capacity));
    most = std::max(most, now + next);
    now = next;
  }
  return most;
}

KeyIndex::~KeyIndex() {
  if (budget_ && mapping_.base) budget_->give(memory_bytes());
  os_release(&mapping_);
}

Status KeyIndex::open(uint64_t capacity, MemoryBudget* budget) {
  capacity_ = capacity;
  budget_ = budget;
  return make_room(std::min(capacity, kFirst));
}

// Returns the key's slot in a bucket plus 1, or 0. Without branches, because they would be
// mispredicted.
inline uint32_t KeyIndex::match(const Bucket& bucket, uint64_t key) {
  uint32_t hit = 0;
  for (int w = 0; w < kWays; ++w)
    hit |= bucket.slot[w] & -static_cast<uint32_t>(bucket.key[w] == key);
  return hit;  // an erased key is still there, with slot 0
}

uint32_t KeyIndex::find(uint64_t key) const {
  for (uint64_t b = home(key);;) {
    const Bucket& bucket = table()[b];
    uint32_t hit = match(bucket, key);
    if (hit || !bucket.overflow) return hit - 1;
    if (++b == buckets_) b = 0;
  }
}

void KeyIndex::find(const uint64_t* keys, size_t n, uint32_t* slots) const {
  constexpr size_t kAhead = 64, kBlock = 256;  // kAhead: a power of two
  const Bucket* t = table();
  uint64_t homes[kAhead];
  for (size_t i = 0; i < std::min(n, kAhead); ++i) {
    homes[i] = home(keys[i]);
    __builtin_prefetch(&t[homes[i]]);
  }
  // One key in ten is not in its home bucket. It waits until the next bucket is in the processor's
  // cache. An immediate access would cost a full memory latency, because the branch cannot be
  // predicted.
  struct {
    uint32_t at;
    uint64_t bucket;
  } moved[kBlock];
  for (size_t from = 0; from < n; from += kBlock) {
    size_t left = 0;
    auto look = [&](size_t i, uint64_t b) {
      uint32_t hit = match(t[b], keys[i]);
      slots[i] = hit - 1;
      bool on = hit == 0 && t[b].overflow != 0;
      uint64_t next = b + 1 == buckets_ ? 0 : b + 1;
      moved[left] = {static_cast<uint32_t>(i), next};
      left += on;
      __builtin_prefetch(&t[on ? next : b]);
    };
    for (size_t i = from; i < std::min(n, from + kBlock); ++i) {
      uint64_t b = homes[i % kAhead];
      if (i + kAhead < n) {
        uint64_t ahead = home(keys[i + kAhead]);
        homes[i % kAhead] = ahead;
        __builtin_prefetch(&t[ahead]);
      }
      look(i, b);
    }
    while (size_t all = std::exchange(left, 0))
      for (size_t k = 0; k < all; ++k) look(moved[k].at, moved[k].bucket);
  }
}

Status KeyIndex::make_room(uint64_t n) {
  if (mapping_.base && size_ + n <= limit_) return FRUGAL_OK;
  uint64_t want = std::max<uint64_t>(size_ + n, std::min(limit_ * 2, capacity_));
  const uint64_t bytes = bytes_for(want), old_bytes = memory_bytes();
  Mapping bigger;
  FRUGAL_TRY(os_reserve(bytes, false, &bigger));
  if (budget_ && !budget_->take(bytes)) {
    os_release(&bigger);
    return fail(
        FRUGAL_ERR_OUT_OF_MEMORY,
        "the key index has to grow from %llu to %llu bytes, both at once for a moment, and the "
        "engine's host_bytes, of which %s are left, do not allow it; raise the limit",
        static_cast<unsigned long long>(old_bytes), static_cast<unsigned long long>(bytes),
        budget_->left_text().c_str());
  }
  if (Status s = os_commit(bigger, 0, bytes)) {
    if (budget_) budget_->give(bytes);
    os_release(&bigger);
    return s;
  }
  Mapping old = mapping_;
  uint64_t old_buckets = buckets_;
  mapping_ = bigger;
  buckets_ = bytes / sizeof(Bucket);
  limit_ = buckets_ * 4;
  size_ = 0;
  const Bucket* from = reinterpret_cast<const Bucket*>(old.base);
  for (uint64_t b = 0; b < old_buckets; ++b)
    for (int w = 0; w < kWays; ++w)
      if (from[b].slot[w]) insert(from[b].key[w], from[b].slot[w] - 1);
  if (old.base) {
    if (budget_) budget_->give(old_bytes);
    os_release(&old);
  }
  return FRUGAL_OK;
}

void KeyIndex::insert(uint64_t key, uint32_t slot) {
  FRUGAL_ASSERT(find(key) == kNone && size_ < limit_);
  Bucket* t = table();
  for (uint64_t b = home(key);;) {
    Bucket& bucket = t[b];
    for (int w = 0; w < kWays; ++w)
      if (!bucket.slot[w]) {
        bucket.key[w] = key;
        bucket.slot[w] = slot + 1;
        ++size_;
        return;
      }
    ++bucket.overflow;
    if (++b == buckets_) b = 0;
  }
}

void KeyIndex::erase(uint64_t key) {
  FRUGAL_ASSERT(find(key) != kNone);
  Bucket* t = table();
  for (uint64_t b = home(key);;) {
    Bucket& bucket = t[b];
    for (int w = 0; w < kWays; ++w)
      if (bucket.key[w] == key && bucket.slot[w]) {
        bucket.slot[w] = 0;
        --size_;
        return;
      }
    FRUGAL_ASSERT(bucket.overflow != 0);
    --bucket.overflow;  // the key passed this bucket when it was inserted
    if (++b == buckets_) b = 0;
  }
}

}  // namespace frugal
