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
  uint32_t begin, end, pad;
  uint32_t ids[kBlock];
};
static_assert(sizeof(Block) <= 2056);

struct Bag {
  Block* first = nullptr;
  Block* last = nullptr;
  uint64_t places = 0;
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

  void push(const uint32_t* ids, size_t n, uint8_t prio) override {
    append(bags_[prio], ids, n, prio);
    if (n) mark(prio);
  }

  void adjust(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity && prio_[id] != kAbsent);
    if (prio_[id] == prio) return;
    put(id, prio);
    // Amortized: a rewrite of n places is paid for by the n/2 adjustments that made it worth it.
    ++stale_;
    if (stale_ > 4096 && stale_ > places() / 2) compact();
  }

  void stage(uint32_t id, uint8_t prio) override {
    append(staged_[prio], id);
    prio_[id] = prio;
  }

  void stage(const uint32_t* ids, size_t n, uint8_t prio) override {
    append(staged_[prio], ids, n, prio);
  }

  void adjust_staged(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio_[id] != kAbsent);
    if (prio_[id] != prio) stage(id, prio);
  }

  void commit_stage() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag& from = staged_[p];
      if (!from.first) continue;
      Bag& to = bags_[p];
      if (to.last)
        to.last->next = from.first;
      else
        to.first = from.first;
      to.last = from.last;
      to.places += from.places;
      from = {};
      mark(static_cast<uint8_t>(p));
    }
  }

  void drop_stage() override {
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag& bag = staged_[p];
      for (Block* b = bag.first; b; b = b->next)
        for (uint32_t i = b->begin; i < b->end; ++i)
          if (prio_[b->ids[i]] == p) prio_[b->ids[i]] = kAbsent;
      recycle(bag);
    }
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
    append(bags_[prio], id);  // or nothing has changed
    prio_[id] = prio;
    mark(prio);
  }

  void mark(uint8_t prio) {
    if (prio != kInfinity) live_ |= uint64_t{1} << prio;
  }

  uint64_t places() const {
    uint64_t n = 0;
    for (const Bag& b : bags_) n += b.places;
    return n;
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
      uint32_t at = b->begin, end = b->end;
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
      bag.places -= taken;
      stale_ -= std::min<uint64_t>(stale_, taken - (n - before));
      b->begin = at;
      if (at < end) break;
      bag.first = b->next;
      if (!bag.first) bag.last = nullptr;
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
    for (const Bag& b : bags_) most = std::max(most, b.places / kBlock + 1);
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
    for (uint32_t p = 0; p <= kRing; ++p) {
      Bag old = bags_[p];
      bags_[p] = {};
      for (Block* b = old.first; b; b = b->next)
        for (uint32_t i = b->begin; i < b->end; ++i) {
          uint32_t id = b->ids[i];
          if (prio_[id] != p) continue;
          append(bags_[p], id);
          prio_[id] = kAbsent;
        }
      recycle(old);
      for (Block* b = bags_[p].first; b; b = b->next)
        for (uint32_t i = b->begin; i < b->end; ++i)
          prio_[b->ids[i]] = static_cast<uint8_t>(p);
      if (p < kRing && !bags_[p].first) live_ &= ~(uint64_t{1} << p);
    }
    stale_ = 0;
  }

  Block* room(Bag& bag) {
    if (bag.last && bag.last->end < kBlock) return bag.last;
    Block* b = pool_;
    if (b)
      pool_ = b->next;
    else
      b = static_cast<Block*>(heap_alloc(sizeof(Block)));
    b->next = nullptr;
    b->begin = b->end = 0;
    if (bag.last)
      bag.last->next = b;
    else
      bag.first = b;
    bag.last = b;
    return b;
  }

  void append(Bag& bag, uint32_t id) {
    Block* b = room(bag);
    b->ids[b->end++] = id;
    ++bag.places;
  }

  void append(Bag& bag, const uint32_t* ids, size_t n, uint8_t prio) {
    for (size_t done = 0; done < n;) {
      Block* b = room(bag);
      size_t m = std::min<size_t>(kBlock - b->end, n - done);
      std::memcpy(b->ids + b->end, ids + done, m * sizeof(uint32_t));
      b->end += static_cast<uint32_t>(m);
      for (size_t i = done; i < done + m; ++i) prio_[ids[i]] = prio;
      done += m;
    }
    bag.places += n;
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
  uint64_t stale_ = 0;  // about: places whose entry went elsewhere
  Vector<uint8_t> prio_;
  Block* pool_ = nullptr;
};

}  // namespace

Queue* make_two_level_queue() { return new TwoLevelQueue; }

}  // namespace frugal
