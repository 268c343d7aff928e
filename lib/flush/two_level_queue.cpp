// The two-level queue: a ring of priorities, each with its own bucket of items.
//
// A change of priority appends an item to the new bucket and leaves the old item stale: its owner
// skips it. (An entry that leaves a bucket and comes back is in it twice: the first item serves it,
// the second is stale.) A bucket is a list of fixed blocks from a pool. An append is a store, a pop
// copies pieces of blocks, a prepared bucket joins the queue by linking its list. A 64-bit mask of
// buckets in use finds the lowest priority in O(1). After as many moves as half of the items, these
// are rewritten without the stale ones. So memory stays proportional to the entries that are
// queued.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/assert.h"
#include "flush/queue.h"

namespace frugal {
namespace {

constexpr uint32_t kBlock = 509;

struct Block {
  Block* next;
  uint32_t begin, end, pad;  // end: of a bucket's last block, see Bucket
  uint32_t ids[kBlock];
};
static_assert(sizeof(Block) <= 2056);

// A bucket. `at` is where the next item goes and `stop` where its block ends. So an append touches
// the bucket and the item, not the block's head. Both are null if the bucket is empty.
struct Bucket {
  uint32_t* at = nullptr;
  uint32_t* stop = nullptr;
  Block* first = nullptr;
  Block* last = nullptr;
  uint32_t end_of(const Block* b) const {
    return b == last ? static_cast<uint32_t>(at - b->ids) : b->end;
  }
};

class TwoLevelQueue final : public Queue {
 public:
  ~TwoLevelQueue() override {
    for (Bucket& b : buckets_) free_blocks(b.first);
    for (Bucket& b : prepared_) free_blocks(b.first);
    free_blocks(pool_);
  }

  void reserve_ids(const uint8_t* marks, uint32_t capacity) override {
    marks_ = marks;
    if (capacity / 64 >= seen_.size()) seen_.resize(capacity / 64 + 1, 0);
  }

  void push(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity);
    Bucket& bucket = buckets_[prio];
    if (bucket.at == bucket.stop) {
      begin_block(bucket);  // throws before anything has changed
      mark(prio);
    }
    *bucket.at++ = id;
    ++items_;
  }

  void move(uint32_t id, uint8_t prio) override {
    // Before the new item is added, since the mark may not have its priority yet. n/2 moves pay for
    // a rewrite of n items.
    if (moves_ > 4096 && moves_ > items_ / 2) compact();
    push(id, prio);
    ++moves_;
  }

  void prepare(const uint32_t* ids, size_t n, uint8_t prio) override {
    for (size_t done = 0; done < n;) {
      Bucket& bucket = prepared_[prio];
      if (bucket.at == bucket.stop) begin_block(bucket);
      const size_t m = std::min<size_t>(static_cast<size_t>(bucket.stop - bucket.at), n - done);
      std::memcpy(bucket.at, ids + done, m * sizeof(uint32_t));
      bucket.at += m;
      done += m;
      prepared_items_ += m;
    }
  }

  void commit_prepared() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bucket& from = prepared_[p];
      if (!from.first) continue;
      Bucket& to = buckets_[p];
      if (to.last) {
        to.last->end = to.end_of(to.last);
        to.last->next = from.first;
        from.first = to.first;
      }
      to = from;
      from = {};
      mark(p);
    }
    items_ += prepared_items_;
    prepared_items_ = 0;
  }

  void drop_prepared() override {
    for (Bucket& bucket : prepared_) recycle(bucket);
    prepared_items_ = 0;
  }

  size_t pop(uint64_t next_commit, uint32_t limit_distance, uint32_t* ids, size_t max,
             uint8_t* prio) override {
    if (live_) {
      int shift = static_cast<int>(next_commit & (kRing - 1));
      *prio =
          static_cast<uint8_t>((std::countr_zero(std::rotr(live_, shift)) + shift) & (kRing - 1));
    } else {
      *prio = kInfinity;
    }
    if (prio_distance(*prio, next_commit) > limit_distance) return 0;
    Bucket& bucket = buckets_[*prio];
    size_t n = 0;
    for (Block* b; n < max && (b = bucket.first);) {
      const size_t m = std::min<size_t>(bucket.end_of(b) - b->begin, max - n);
      std::memcpy(ids + n, b->ids + b->begin, m * sizeof(uint32_t));
      n += m;
      b->begin += static_cast<uint32_t>(m);
      if (b->begin < bucket.end_of(b)) break;
      if (b == bucket.last)
        bucket = {};
      else
        bucket.first = b->next;
      b->next = pool_;
      pool_ = b;
    }
    items_ -= n;
    if (!bucket.first && *prio != kInfinity) live_ &= ~(uint64_t{1} << *prio);
    return n;
  }

 private:
  void mark(uint32_t prio) {
    if (prio != kInfinity) live_ |= uint64_t{1} << prio;
  }

  // Drops stale items. Of an entry that is in a bucket more than once, one item is kept.
  void compact() {
    // Blocks for the largest bucket first: halfway there is no way back. Without memory: another
    // time.
    uint64_t most = 0, free = 0;
    for (const Bucket& b : buckets_) {
      uint64_t items = 0;
      for (const Block* at = b.first; at; at = at->next) items += b.end_of(at) - at->begin;
      most = std::max(most, items / kBlock + 1);
    }
    for (Block* b = pool_; b && free < most; b = b->next) ++free;
    try {
      for (; free < most; ++free) {
        Block* b = static_cast<Block*>(heap_alloc(sizeof(Block)));
        b->next = pool_;
        pool_ = b;
      }
    } catch (const std::bad_alloc&) {
      return;
    }
    items_ = moves_ = 0;
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bucket old = buckets_[p], kept;
      for (Block* b = old.first; b; b = b->next)
        for (uint32_t i = b->begin, end = old.end_of(b); i < end; ++i) {
          const uint32_t id = b->ids[i];
          const uint64_t bit = uint64_t{1} << id % 64;
          if (__atomic_load_n(marks_ + id, __ATOMIC_RELAXED) != p || seen_[id / 64] & bit) continue;
          seen_[id / 64] |= bit;
          if (kept.at == kept.stop) begin_block(kept);
          *kept.at++ = id;
          ++items_;
        }
      recycle(old);
      buckets_[p] = kept;
      for (Block* b = kept.first; b; b = b->next)
        for (uint32_t i = 0, end = kept.end_of(b); i < end; ++i) seen_[b->ids[i] / 64] = 0;
      if (p < kRing && !kept.first) live_ &= ~(uint64_t{1} << p);
    }
  }

  // Adds a block to a bucket whose last one is full.
  void begin_block(Bucket& bucket) {
    Block* b = pool_;
    if (b)
      pool_ = b->next;
    else
      b = static_cast<Block*>(heap_alloc(sizeof(Block)));
    b->next = nullptr;
    b->begin = 0;
    if (bucket.last) {
      bucket.last->end = kBlock;
      bucket.last->next = b;
    } else {
      bucket.first = b;
    }
    bucket.last = b;
    bucket.at = b->ids;
    bucket.stop = b->ids + kBlock;
  }

  void recycle(Bucket& bucket) {
    while (Block* b = bucket.first) {
      bucket.first = b->next;
      b->next = pool_;
      pool_ = b;
    }
    bucket = {};
  }

  static void free_blocks(Block* b) {
    while (b) {
      Block* n = b->next;
      heap_free(b);
      b = n;
    }
  }

  Bucket buckets_[kRing + 1], prepared_[kRing + 1];
  uint64_t live_ = 0;
  uint64_t items_ = 0, prepared_items_ = 0;
  uint64_t moves_ = 0;  // since items were rewritten: at most so many are stale
  const uint8_t* marks_ = nullptr;
  Vector<uint64_t> seen_;  // a bit for each entry, while a bucket is rewritten
  Block* pool_ = nullptr;
};

}  // namespace

Queue* make_two_level_queue() { return new TwoLevelQueue; }

}  // namespace frugal
