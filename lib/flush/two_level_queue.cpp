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
  uint32_t begin, end, pad;  // end: of a bucket's last block, see Bag
  uint32_t ids[kBlock];
};
static_assert(sizeof(Block) <= 2056);

// A bucket. `at` is where the next item goes and `stop` where its block ends. So an append touches
// the bucket and the item, not the block's head. Both are null if the bucket is empty.
struct Bag {
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
    for (Bag& b : bags_) free_blocks(b.first);
    for (Bag& b : prepared_) free_blocks(b.first);
    free_blocks(pool_);
  }

  void reserve_ids(const uint8_t* marks, uint32_t capacity) override {
    marks_ = marks;
    if (capacity / 64 >= seen_.size()) seen_.resize(capacity / 64 + 1, 0);
  }

  void push(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity);
    Bag& bag = bags_[prio];
    if (bag.at == bag.stop) {
      begin_block(bag);  // throws before anything has changed
      mark(prio);
    }
    *bag.at++ = id;
    ++places_;
  }

  void move(uint32_t id, uint8_t prio) override {
    // Before the new item is added, since the mark may not have its priority yet. n/2 moves pay for
    // a rewrite of n items.
    if (moves_ > 4096 && moves_ > places_ / 2) compact();
    push(id, prio);
    ++moves_;
  }

  void prepare(const uint32_t* ids, size_t n, uint8_t prio) override {
    for (size_t done = 0; done < n;) {
      Bag& bag = prepared_[prio];
      if (bag.at == bag.stop) begin_block(bag);
      const size_t m = std::min<size_t>(static_cast<size_t>(bag.stop - bag.at), n - done);
      std::memcpy(bag.at, ids + done, m * sizeof(uint32_t));
      bag.at += m;
      done += m;
      prepared_places_ += m;
    }
  }

  void commit_prepared() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag& from = prepared_[p];
      if (!from.first) continue;
      Bag& to = bags_[p];
      if (to.last) {
        to.last->end = to.end_of(to.last);
        to.last->next = from.first;
        from.first = to.first;
      }
      to = from;
      from = {};
      mark(p);
    }
    places_ += prepared_places_;
    prepared_places_ = 0;
  }

  void drop_prepared() override {
    for (Bag& bag : prepared_) recycle(bag);
    prepared_places_ = 0;
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
    Bag& bag = bags_[*prio];
    size_t n = 0;
    for (Block* b; n < max && (b = bag.first);) {
      const size_t m = std::min<size_t>(bag.end_of(b) - b->begin, max - n);
      std::memcpy(ids + n, b->ids + b->begin, m * sizeof(uint32_t));
      n += m;
      b->begin += static_cast<uint32_t>(m);
      if (b->begin < bag.end_of(b)) break;
      if (b == bag.last)
        bag = {};
      else
        bag.first = b->next;
      b->next = pool_;
      pool_ = b;
    }
    places_ -= n;
    if (!bag.first && *prio != kInfinity) live_ &= ~(uint64_t{1} << *prio);
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
    for (const Bag& b : bags_) {
      uint64_t places = 0;
      for (const Block* at = b.first; at; at = at->next) places += b.end_of(at) - at->begin;
      most = std::max(most, places / kBlock + 1);
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
    places_ = moves_ = 0;
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag old = bags_[p], kept;
      for (Block* b = old.first; b; b = b->next)
        for (uint32_t i = b->begin, end = old.end_of(b); i < end; ++i) {
          const uint32_t id = b->ids[i];
          const uint64_t bit = uint64_t{1} << id % 64;
          if (__atomic_load_n(marks_ + id, __ATOMIC_RELAXED) != p || seen_[id / 64] & bit) continue;
          seen_[id / 64] |= bit;
          if (kept.at == kept.stop) begin_block(kept);
          *kept.at++ = id;
          ++places_;
        }
      recycle(old);
      bags_[p] = kept;
      for (Block* b = kept.first; b; b = b->next)
        for (uint32_t i = 0, end = kept.end_of(b); i < end; ++i) seen_[b->ids[i] / 64] = 0;
      if (p < kRing && !kept.first) live_ &= ~(uint64_t{1} << p);
    }
  }

  // Adds a block to a bucket whose last one is full.
  void begin_block(Bag& bag) {
    Block* b = pool_;
    if (b)
      pool_ = b->next;
    else
      b = static_cast<Block*>(heap_alloc(sizeof(Block)));
    b->next = nullptr;
    b->begin = 0;
    if (bag.last) {
      bag.last->end = kBlock;
      bag.last->next = b;
    } else {
      bag.first = b;
    }
    bag.last = b;
    bag.at = b->ids;
    bag.stop = b->ids + kBlock;
  }

  void recycle(Bag& bag) {
    while (Block* b = bag.first) {
      bag.first = b->next;
      b->next = pool_;
      pool_ = b;
    }
    bag = {};
  }

  static void free_blocks(Block* b) {
    while (b) {
      Block* n = b->next;
      heap_free(b);
      b = n;
    }
  }

  Bag bags_[kRing + 1], prepared_[kRing + 1];
  uint64_t live_ = 0;
  uint64_t places_ = 0, prepared_places_ = 0;
  uint64_t moves_ = 0;  // since items were rewritten: at most so many are stale
  const uint8_t* marks_ = nullptr;
  Vector<uint64_t> seen_;  // a bit for each entry, while a bucket is rewritten
  Block* pool_ = nullptr;
};

}  // namespace

Queue* make_two_level_queue() { return new TwoLevelQueue; }

}  // namespace frugal
