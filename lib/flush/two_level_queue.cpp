// The two-level queue: a ring of priorities, each with its own bag of entries.
//
// A change of priority appends the entry to the new bag and leaves the old place stale: it is
// skipped when its bag is drained, because prio[id] no longer names that bag. (An entry that
// leaves a bag and comes back stands there twice; the first place serves it, the second is stale.)
// A bag is a list of fixed blocks from a pool: appending is a store, draining reads whole blocks,
// a staged bag joins the queue by linking its list. A 64-bit mask of bags in use finds the lowest
// priority in O(1). A bag whose places are mostly stale is rewritten, so memory stays
// proportional to the entries that are queued.
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
  uint32_t begin, end, pad;  // end: of a bag's last block, see Bag
  uint32_t ids[kBlock];
};
static_assert(sizeof(Block) <= 2056);

// `at` is where the next place goes and `stop` where its block ends, so that an append touches the
// bag and the place, not the block's head. Null, both, if the bag is empty.
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
    for (Bag& b : staged_) free_blocks(b.first);
    free_blocks(pool_);
  }

  void reserve_ids(uint32_t capacity) override {
    if (capacity > prio_.size()) prio_.resize(capacity, kAbsent);
  }

  void push(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity && prio_[id] == kAbsent);
    put(id, prio);
  }

  void adjust(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity && prio_[id] != kAbsent);
    if (prio_[id] == prio) return;
    put(id, prio);
    // Amortized: a rewrite of n places is paid for by the n/2 adjustments that made it worth it.
    ++stale_;
    if (stale_ > 4096 && stale_ > places_ / 2) compact();
  }

  void stage(const uint32_t* ids, size_t n, uint8_t prio) override {
    for (size_t done = 0; done < n;) {
      Bag& bag = staged_[prio];
      if (bag.at == bag.stop) begin_block(bag);
      const size_t m = std::min<size_t>(static_cast<size_t>(bag.stop - bag.at), n - done);
      std::memcpy(bag.at, ids + done, m * sizeof(uint32_t));
      bag.at += m;
      staged_places_ += m;
      for (const size_t end = done + m; done < end; ++done) prio_[ids[done]] = prio;
    }
  }

  void adjust_staged(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio_[id] != kAbsent);
    if (prio_[id] != prio) stage(&id, 1, prio);
  }

  void commit_stage() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag& from = staged_[p];
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
    places_ += staged_places_;
    staged_places_ = 0;
  }

  void drop_stage() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag& bag = staged_[p];
      for (Block* b = bag.first; b; b = b->next)
        for (uint32_t i = 0, end = bag.end_of(b); i < end; ++i)
          if (prio_[b->ids[i]] == p) prio_[b->ids[i]] = kAbsent;
      recycle(bag);
    }
    staged_places_ = 0;
  }

  void restore_staged(uint32_t id, uint8_t prio) override { prio_[id] = prio; }

  void forget(uint32_t id) override {
    if (prio_[id] != kAbsent) ++stale_;
    prio_[id] = kAbsent;
  }

  size_t pop(uint64_t base, uint32_t limit_rank, uint32_t* ids, size_t max) override {
    size_t n = 0;
    while (n < max) {
      uint8_t prio = lowest(base);
      if (prio == kAbsent || prio_rank(prio, base) > limit_rank) break;
      n += drain(prio, ids + n, max - n);
    }
    return n;
  }

 private:
  void put(uint32_t id, uint8_t prio) {
    Bag& bag = bags_[prio];
    if (bag.at == bag.stop) {
      begin_block(bag);  // or nothing has changed
      mark(prio);
    }
    *bag.at++ = id;
    ++places_;
    prio_[id] = prio;
  }

  void mark(uint32_t prio) {
    if (prio != kInfinity) live_ |= uint64_t{1} << prio;
  }

  uint8_t lowest(uint64_t base) const {
    if (live_) {
      int turn = static_cast<int>(base & (kRing - 1));
      return static_cast<uint8_t>((std::countr_zero(std::rotr(live_, turn)) + turn) & (kRing - 1));
    }
    return bags_[kInfinity].first ? kInfinity : kAbsent;
  }

  size_t drain(uint8_t prio, uint32_t* out, size_t max) {
    Bag& bag = bags_[prio];
    uint8_t* const prios = prio_.data();
    size_t n = 0;
    while (Block* b = bag.first) {
      const uint32_t end = bag.end_of(b);
      uint32_t at = b->begin;
      const size_t before = n;
      for (; at < end && n < max; ++at) {
        if (at + 16 < end) __builtin_prefetch(&prios[b->ids[at + 16]], 1);
        uint32_t id = b->ids[at];
        out[n] = id;
        bool valid = prios[id] == prio;
        prios[id] = valid ? kAbsent : prios[id];
        n += valid;
      }
      uint64_t taken = at - b->begin;
      places_ -= taken;
      stale_ -= std::min<uint64_t>(stale_, taken - (n - before));
      b->begin = at;
      if (at < end) break;
      if (b == bag.last)
        bag = {};
      else
        bag.first = b->next;
      b->next = pool_;
      pool_ = b;
    }
    if (!bag.first && prio != kInfinity) live_ &= ~(uint64_t{1} << prio);
    return n;
  }

  // Drops stale places. A kept entry is marked absent until all its places are seen, so that it
  // keeps one place only.
  void compact() {
    // Blocks for the largest bag first: halfway there is no way back. Without memory: another time.
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
    places_ = 0;
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag old = bags_[p], kept;
      for (Block* b = old.first; b; b = b->next)
        for (uint32_t i = b->begin, end = old.end_of(b); i < end; ++i) {
          uint32_t id = b->ids[i];
          if (prio_[id] != p) continue;
          if (kept.at == kept.stop) begin_block(kept);
          *kept.at++ = id;
          prio_[id] = kAbsent;
        }
      recycle(old);
      bags_[p] = kept;
      for (Block* b = kept.first; b; b = b->next)
        for (uint32_t i = 0, end = kept.end_of(b); i < end; ++i, ++places_)
          prio_[b->ids[i]] = static_cast<uint8_t>(p);
      if (p < kRing && !kept.first) live_ &= ~(uint64_t{1} << p);
    }
    stale_ = 0;
  }

  // Another block for a bag whose last one is full.
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

  Bag bags_[kRing + 1], staged_[kRing + 1];
  uint64_t live_ = 0;
  uint64_t places_ = 0, staged_places_ = 0;
  uint64_t stale_ = 0;  // about: places whose entry went elsewhere
  Vector<uint8_t> prio_;
  Block* pool_ = nullptr;
};

}  // namespace

Queue* make_two_level_queue() { return new TwoLevelQueue; }

}  // namespace frugal
