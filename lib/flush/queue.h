// Priority queues of g-entries (FRUGAL section 3.4): which pending update is written first.
//
// A priority is a position of the ring of 64 future steps (step mod 64) or kInfinity. Which one an
// entry has is its mark, a byte of its owner's. The queue has places: an entry gets one with each
// priority. A place whose entry has another mark by now is stale. A pop gives places, stale ones
// too: it touches no entry, so that calls, which are serialized, take little time. The owner looks
// at the marks and takes an entry by changing its mark; the entry's other places are stale then.
// Marks of a two-level queue may be changed outside of the lock of its calls, by compare-and-swap.
//
// Two implementations: the two-level queue (a ring of buckets, everything O(1) amortized, batched)
// and, as the paper's baseline, a binary heap with a lock for each node.
//
// Threads: the owner of a queue serializes calls (window/window.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/heap.h"

namespace frugal {

constexpr uint64_t kNoStep = UINT64_MAX;
constexpr uint32_t kRing = 64;       // priorities of steps
constexpr uint8_t kInfinity = 64;    // no declared read

// The distance of a priority from the step `next_commit`: ring positions in step order, infinity
// last.
inline uint32_t prio_distance(uint8_t prio, uint64_t next_commit) {
  return prio == kInfinity ? kRing : static_cast<uint32_t>((prio - next_commit) & (kRing - 1));
}

class Queue : public HeapObject {
 public:
  virtual ~Queue() = default;
  // Entry ids are below `capacity` from now on, which never shrinks, and these are their marks: a
  // priority of who is queued or prepared, else a number above kInfinity.
  virtual void reserve_ids(const uint8_t* marks, uint32_t capacity) = 0;
  // The first step that is not committed has moved on: ring positions mean steps from it on.
  virtual void set_next_commit(uint64_t next_commit) { (void)next_commit; }
  // A place for `id`: push() if it was not queued, move() if it was, at another priority. The mark
  // becomes `prio` before or after the call. Without memory nothing has changed.
  virtual void push(uint32_t id, uint8_t prio) = 0;
  virtual void move(uint32_t id, uint8_t prio) = 0;
  // Takes up to `max` places of the lowest priority counted from step `next_commit`, which it
  // tells, unless its rank is above `limit_distance` (kRing: none is). 0: there are none.
  virtual size_t pop(uint64_t next_commit, uint32_t limit_distance, uint32_t* ids, size_t max,
                     uint8_t* prio) = 0;
  // Staging: places of entries of a step that is not committed yet, which pops do not give.
  // commit_prepared() makes them places like others, all at once, in O(ring) for the two-level
  // queue. A prepared entry may have the mark of an older place: its owner, who knows, skips that.
  virtual void prepare(const uint32_t* ids, size_t n, uint8_t prio) = 0;
  virtual void commit_prepared() = 0;
  virtual void drop_prepared() = 0;
};

Queue* make_two_level_queue();
Queue* make_tree_heap();

}  // namespace frugal
