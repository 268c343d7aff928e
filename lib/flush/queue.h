// Priority queues of g-entries (FRUGAL section 3.4): which pending update is written first.
//
// A priority is a position of the ring of 64 future steps (step mod 64) or kInfinity. An entry is
// in the queue at most once; its current priority is prio[id]. Two implementations: the two-level
// queue (a ring of buckets, everything O(1) amortized, batched) and, as the paper's baseline, a
// binary heap with a lock for each node.
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
constexpr uint8_t kAbsent = 255;     // not queued

// The distance of a priority from the step `base`: ring positions in step order, infinity last.
inline uint32_t prio_rank(uint8_t prio, uint64_t base) {
  return prio == kInfinity ? kRing : static_cast<uint32_t>((prio - base) & (kRing - 1));
}

class Queue : public HeapObject {
 public:
  virtual ~Queue() = default;
  // Entry ids are below `capacity` from now on; never shrinks.
  virtual void reserve_ids(uint32_t capacity) = 0;
  // The first step that is not committed has moved on: ring positions mean steps from it on.
  virtual void set_base(uint64_t base) { (void)base; }
  // `id` becomes queued at `prio`; it must not be queued. Here and in adjust(): without memory nothing has changed.
  virtual void push(uint32_t id, uint8_t prio) = 0;
  // `id` is queued and gets another priority.
  virtual void adjust(uint32_t id, uint8_t prio) = 0;
  // Takes up to `max` entries with the lowest priorities counted from step `base`, none of a rank
  // above `limit_rank` (kRing: all). They are no longer queued.
  virtual size_t pop(uint64_t base, uint32_t limit_rank, uint32_t* ids, size_t max) = 0;
  // Staging: entries of a step that is not committed yet. They have a priority but cannot be
  // popped; commit_stage() makes all of them queued at once, in O(ring) for the two-level queue.
  virtual void stage(const uint32_t* ids, size_t n, uint8_t prio) = 0;
  virtual void adjust_staged(uint32_t id, uint8_t prio) = 0;
  virtual void commit_stage() = 0;
  virtual void drop_stage() = 0;
  // `id` is not queued any more, if it was: its owner has taken it without a pop.
  virtual void forget(uint32_t id) = 0;
  // A pop may give a staged entry that has a stale place in the queue; the caller, who knows, puts
  // it back by this.
  virtual void restore_staged(uint32_t id, uint8_t prio) = 0;
};

Queue* make_two_level_queue();
Queue* make_tree_heap();

}  // namespace frugal
