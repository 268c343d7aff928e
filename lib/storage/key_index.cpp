#include "storage/key_index.h"

#include <algorithm>

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
  uint64_t bytes = buckets_for(keys) * sizeof(Bucket);
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
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
  if (budget_ && mapping_.base) budget_->give(mapping_.bytes);
  os_release(&mapping_);
}

Status KeyIndex::open(uint64_t capacity, MemoryBudget* budget) {
  capacity_ = capacity;
  budget_ = budget;
  return make_room(std::min(capacity, kFirst));
}

uint32_t KeyIndex::find(uint64_t key) const {
  const Bucket* t = table();
  for (uint64_t b = home(key);;) {
    const Bucket& bucket = t[b];
    for (int w = 0; w < kWays; ++w)
      if (bucket.key[w] == key && bucket.slot[w]) return bucket.slot[w] - 1;
    if (!bucket.overflow) return kNone;
    if (++b == buckets_) b = 0;
  }
}

void KeyIndex::find(const uint64_t* keys, size_t n, uint32_t* slots) const {
  constexpr size_t kAhead = 24;
  const Bucket* t = table();
  uint64_t homes[kAhead];
  size_t warm = std::min(n, kAhead);
  for (size_t i = 0; i < warm; ++i) {
    homes[i] = home(keys[i]);
    __builtin_prefetch(&t[homes[i]]);
  }
  for (size_t i = 0, ring = 0; i < n; ++i) {
    uint64_t b = homes[ring], key = keys[i];
    if (i + kAhead < n) {
      homes[ring] = home(keys[i + kAhead]);
      __builtin_prefetch(&t[homes[ring]]);
    }
    if (++ring == kAhead) ring = 0;
    uint32_t found = kNone;
    for (;;) {
      const Bucket& bucket = t[b];
      for (int w = 0; w < kWays; ++w)
        if (bucket.key[w] == key && bucket.slot[w]) found = bucket.slot[w] - 1;
      if (found != kNone || !bucket.overflow) break;
      if (++b == buckets_) b = 0;
    }
    slots[i] = found;
  }
}

Status KeyIndex::make_room(uint64_t n) {
  if (mapping_.base && size_ + n <= limit_) return FRUGAL_OK;
  uint64_t want = std::max<uint64_t>(size_ + n, std::min(limit_ * 2, capacity_));
  uint64_t buckets = buckets_for(want);
  Mapping bigger;
  FRUGAL_TRY(os_reserve(buckets * sizeof(Bucket), false, &bigger));
  if (budget_ && !budget_->take(bigger.bytes)) {
    size_t bytes = bigger.bytes;
    os_release(&bigger);
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "the key index has to grow from %zu to %zu bytes, both at once for a moment, and the "
                "engine's host_bytes (%llu) do not allow it; raise the limit",
                mapping_.bytes, bytes, static_cast<unsigned long long>(budget_->limit));
  }
  if (Status s = os_commit(bigger, 0, bigger.bytes)) {
    if (budget_) budget_->give(bigger.bytes);
    os_release(&bigger);
    return s;
  }
  Mapping old = mapping_;
  uint64_t old_buckets = buckets_;
  mapping_ = bigger;
  buckets_ = bigger.bytes / sizeof(Bucket);
  limit_ = buckets_ * 4;
  size_ = 0;
  const Bucket* from = reinterpret_cast<const Bucket*>(old.base);
  for (uint64_t b = 0; b < old_buckets; ++b)
    for (int w = 0; w < kWays; ++w)
      if (from[b].slot[w]) insert(from[b].key[w], from[b].slot[w] - 1);
  if (old.base) {
    if (budget_) budget_->give(old.bytes);
    os_release(&old);
  }
  return FRUGAL_OK;
}

void KeyIndex::insert(uint64_t key, uint32_t slot) {
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
  Bucket* t = table();
  for (uint64_t b = home(key);;) {
    Bucket& bucket = t[b];
    for (int w = 0; w < kWays; ++w)
      if (bucket.key[w] == key && bucket.slot[w]) {
        bucket.slot[w] = 0;
        --size_;
        return;
      }
    --bucket.overflow;  // the key passed this bucket when it was inserted
    if (++b == buckets_) b = 0;
  }
}

}  // namespace frugal
