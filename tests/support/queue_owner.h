// The owner of a queue, as the window is one: the marks of its entries, and which are prepared.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "flush/queue.h"

namespace frugal {

class QueueOwner {
 public:
  QueueOwner(bool tree_heap, uint32_t ids)
      : queue_(tree_heap ? make_tree_heap() : make_two_level_queue()) {
    reserve_ids(ids);
  }
  void reserve_ids(uint32_t ids) {
    marks_.resize(std::max<size_t>(marks_.size(), ids), kAbsent);
    queue_->reserve_ids(marks_.data(), static_cast<uint32_t>(marks_.size()));
  }
  void set_next_commit(uint64_t base) { queue_->set_next_commit(base); }
  void push(uint32_t id, uint8_t prio) {
    queue_->push(id, prio);
    marks_[id] = prio;
  }
  void adjust(uint32_t id, uint8_t prio) {
    if (marks_[id] == prio) return;
    queue_->move(id, prio);
    marks_[id] = prio;
  }
  void prepare(const uint32_t* ids, size_t n, uint8_t prio) {
    queue_->prepare(ids, n, prio);
    for (size_t i = 0; i < n; ++i) marks_[ids[i]] = prio;
    prepared_.insert(prepared_.end(), ids, ids + n);
  }
  void adjust_prepared(uint32_t id, uint8_t prio) {
    if (marks_[id] != prio) prepare(&id, 1, prio);
  }
  void commit_prepared() {
    queue_->commit_prepared();
    prepared_.clear();
  }
  void drop_prepared() {
    queue_->drop_prepared();
    for (uint32_t id : prepared_) marks_[id] = kAbsent;
    prepared_.clear();
  }
  // Taken without a pop.
  void forget(uint32_t id) { marks_[id] = kAbsent; }
  // Up to `max` entries with the lowest priorities.
  size_t pop(uint64_t base, uint32_t limit_distance, uint32_t* ids, size_t max) {
    size_t n = 0, items;
    uint8_t prio;
    while (n < max && (items = queue_->pop(base, limit_distance, ids + n, max - n, &prio)) != 0)
      for (uint32_t *at = ids + n, *end = at + items; at < end; ++at) {
        if (marks_[*at] != prio || std::count(prepared_.begin(), prepared_.end(), *at)) continue;
        marks_[*at] = kAbsent;
        ids[n++] = *at;
      }
    return n;
  }

 private:
  static constexpr uint8_t kAbsent = 255;
  std::unique_ptr<Queue> queue_;
  std::vector<uint8_t> marks_;
  std::vector<uint32_t> prepared_;
};

}  // namespace frugal
