// The paper's baseline (Exp #4): a binary heap with a lock for each node.
//
// Each operation locks nodes along one path of the tree, by lock coupling, as concurrent heaps do.
// A pop goes from the root down, a push or a rise from the leaf up; child and parent are always
// locked parent first. It is kept for comparison; the engine uses the two-level queue. A change of
// priority moves the entry's node, which is found through place_[id].
#include <atomic>
#include <mutex>

#include "base/assert.h"
#include "flush/queue.h"

namespace frugal {
namespace {

class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

class TreeHeap final : public Queue {
 public:
  ~TreeHeap() override { heap_free(locks_); }

  void reserve_ids(const uint8_t* marks, uint32_t capacity) override {
    marks_ = marks;
    if (capacity <= prio_.size()) return;
    order_.resize(capacity, 0);
    place_.resize(capacity, 0);
    node_.resize(size_t{capacity} + 1, 0);
    prepared_.reserve(capacity);
    // No operation is under way, so all locks are free and may be replaced.
    auto* locks = static_cast<SpinLock*>(heap_alloc(sizeof(SpinLock) * (size_t{capacity} + 1)));
    heap_free(locks_);
    locks_ = locks;
    for (size_t i = 0; i <= capacity; ++i) new (&locks_[i]) SpinLock;
    prio_.resize(capacity, 0);  // last: its size says that all is there
  }

  void set_next_commit(uint64_t next_commit) override { next_commit_ = next_commit; }

  void push(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(prio <= kInfinity);
    prio_[id] = prio;
    order_[id] = key(prio);
    size_t at;
    {
      std::lock_guard<SpinLock> guard(size_lock_);
      FRUGAL_ASSERT(size_ < order_.size());
      at = ++size_;
      locks_[at].lock();
    }
    node_[at] = id;
    place_[id] = static_cast<uint32_t>(at);
    locks_[at].unlock();
    rise(at);
  }

  void move(uint32_t id, uint8_t prio) override {
    FRUGAL_ASSERT(place_[id] >= 1 && place_[id] <= size_ && node_[place_[id]] == id);
    uint64_t before = order_[id];
    prio_[id] = prio;
    order_[id] = key(prio);
    if (order_[id] < before)
      rise(place_[id]);
    else if (order_[id] > before)
      sink(place_[id]);
  }

  // Each id once, so there is room. The commit reads their marks.
  void prepare(const uint32_t* ids, size_t n, uint8_t) override {
    for (size_t i = 0; i < n; ++i) {
      if (place_[ids[i]] == kPrepared) continue;
      place_[ids[i]] = kPrepared;
      prepared_.push_back(ids[i]);
    }
  }
  void commit_prepared() override {
    for (uint32_t id : prepared_) push(id, marks_[id]);
    prepared_.clear();
  }
  void drop_prepared() override {
    for (uint32_t id : prepared_) place_[id] = 0;
    prepared_.clear();
  }

  size_t pop(uint64_t next_commit, uint32_t limit_distance, uint32_t* ids, size_t max,
             uint8_t* prio) override {
    size_t n = 0;
    while (n < max) {
      size_t last;
      uint32_t top;
      {
        std::lock_guard<SpinLock> guard(size_lock_);
        if (size_ == 0 || prio_distance(prio_[node_[1]], next_commit) > limit_distance) break;
        if (n && prio_[node_[1]] != *prio) break;
        last = size_--;
        top = node_[1];
        *prio = prio_[top];
        place_[top] = 0;
        if (last > 1) {
          locks_[1].lock();
          locks_[last].lock();
          node_[1] = node_[last];
          place_[node_[1]] = 1;
          locks_[last].unlock();
          locks_[1].unlock();
        }
      }
      ids[n++] = top;
      if (last > 1) sink(1);
    }
    return n;
  }

 private:
  // Ring positions as numbers that keep their order while the next commit moves on.
  uint64_t key(uint8_t prio) const {
    return prio == kInfinity ? UINT64_MAX : next_commit_ + prio_distance(prio, next_commit_);
  }

  void swap_nodes(size_t a, size_t b) {
    uint32_t x = node_[a], y = node_[b];
    node_[a] = y;
    node_[b] = x;
    place_[y] = static_cast<uint32_t>(a);
    place_[x] = static_cast<uint32_t>(b);
  }

  void rise(size_t at) {
    while (at > 1) {
      size_t up = at / 2;
      std::lock_guard<SpinLock> parent(locks_[up]);
      std::lock_guard<SpinLock> child(locks_[at]);
      if (order_[node_[at]] >= order_[node_[up]]) return;
      swap_nodes(at, up);
      at = up;
    }
  }

  void sink(size_t at) {
    locks_[at].lock();
    for (;;) {
      size_t left = at * 2, right = left + 1, least = at;
      const size_t size = size_;  // at each node, for pops make it smaller meanwhile
      if (left > size) break;
      locks_[left].lock();
      if (right <= size) locks_[right].lock();
      if (order_[node_[left]] < order_[node_[least]]) least = left;
      if (right <= size && order_[node_[right]] < order_[node_[least]]) least = right;
      bool has_right = right <= size;
      if (has_right && least != right) locks_[right].unlock();
      if (least != left) locks_[left].unlock();
      if (least == at) break;
      swap_nodes(at, least);
      locks_[at].unlock();
      at = least;
    }
    locks_[at].unlock();
  }

  static constexpr uint32_t kPrepared = UINT32_MAX;

  SpinLock size_lock_;
  SpinLock* locks_ = nullptr;
  // Changed with size_lock_ held. sink() only reads it: it holds locks of nodes, which come after
  // that lock.
  std::atomic<size_t> size_{0};
  uint64_t next_commit_ = 0;
  const uint8_t* marks_ = nullptr;
  Vector<uint8_t> prio_;
  Vector<uint64_t> order_;
  Vector<uint32_t> place_, node_, prepared_;
};

}  // namespace

Queue* make_tree_heap() { return new TreeHeap; }

}  // namespace frugal
