// Priority queues of pending updates (FRUGAL, section 3.4): which one is written first.
//
// A priority is a position of the ring of 64 future steps (step mod 64) or kInfinity. The mark of
// an entry is its priority, in a byte that the queue's owner keeps. The queue holds items: an entry
// gets one with each priority. An item is stale if its entry has another mark by now. A pop returns
// items, stale ones too. It reads no entry, so that calls, which are serialized, take little time.
// The owner checks the marks and takes an entry by changing its mark; the entry's other items are
// stale then. Marks of a two-level queue may be changed by compare-and-swap, outside of the lock of
// its calls.
//
// Two implementations: the two-level queue is a ring of buckets, everything O(1) amortized,
// batched. The paper's baseline is a binary heap with a lock for each node.
//
// Threads: the owner of a queue serializes calls (window/window.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/heap.h"

namespace frugal {

constexpr uint64_t kNoStep = UINT64_MAX;
constexpr uint32_t kRing = 64;     // priorities of steps
constexpr uint8_t kInfinity = 64;  // no declared read

// The distance of a priority from the step `next_commit`: ring positions in step order, infinity
// last.
inline uint32_t prio_distance(uint8_t prio, uint64_t next_commit) {
  return prio == kInfinity ? kRing : static_cast<uint32_t>((prio - next_commit) & (kRing - 1));
}

class Queue : public HeapObject {
 public:
  virtual ~Queue() = default;
  // From now on entry ids are below `capacity`, which never shrinks, and `marks` has their marks.
  // The mark of a queued or prepared entry is its priority; others are above kInfinity.
  virtual void reserve_ids(const uint8_t* marks, uint32_t capacity) = 0;
  // The next commit has moved on: ring positions mean steps from it on.
  virtual void set_next_commit(uint64_t next_commit) { (void)next_commit; }
  // Adds an item for `id`: push() if the entry was not queued, move() if it was, at another
  // priority. The owner sets the mark to `prio` before or after the call. Without memory nothing
  // has changed.
  virtual void push(uint32_t id, uint8_t prio) = 0;
  virtual void move(uint32_t id, uint8_t prio) = 0;
  // Takes up to `max` items of the lowest priority, counted from step `next_commit`, and returns it
  // in *prio. 0: there are none, or its distance is above `limit_distance` (kRing: none is).
  virtual size_t pop(uint64_t next_commit, uint32_t limit_distance, uint32_t* ids, size_t max,
                     uint8_t* prio) = 0;
  // Prepared items: those of a step that is not committed yet, which pops do not return.
  // commit_prepared() makes them ordinary items, all at once; in the two-level queue in O(kRing).
  // An older item of a prepared entry may match its mark: the owner, which knows, skips that item.
  virtual void prepare(const uint32_t* ids, size_t n, uint8_t prio) = 0;
  virtual void commit_prepared() = 0;
  virtual void drop_prepared() = 0;
};

Queue* make_two_level_queue();
Queue* make_tree_heap();

}  // namespace frugal
