// The window of a table: who reads a row next, and which of its updates are not in the host row yet
// (FRUGAL section 3.3: g-entries).
//
// A row's g-entry has two parts. Its word in the flat index (8 bytes a table row) is the R set:
// the declared steps that read the row, and the update that wrote it last. While updates of it are
// unwritten, each of them is a node (5 bytes): the W set. The priority of a row is that of its
// oldest node: the first declared step > the node's step + staleness, else infinity. Younger nodes
// of the row are blocked behind it, in a chain, and enter the queue one after the other.
//
// Bits of a word count from the step in its stamp, so it is brought up to date when it is next
// touched and no pass is needed to take back what has passed. Stamps wrap around: a row that nobody
// touched for 512 steps may seem to be read soon. That makes an update too urgent, never too late.
//
// Life of an update: link() sets the bits of a declared step; stage() takes a step's rows in before
// the step is committed, while the device computes; commit() makes all of them pending in O(ring);
// claim() takes the most urgent ones, the caller writes the rows, finish() publishes that. Rows of
// a part and of an update are sorted by slot, so every pass runs through memory in one direction.
//
// Counts per priority include rows that were claimed but not yet finished: pending(rank) == 0
// therefore means written, not merely taken (contract, gate condition c).
//
// Threads: everything is done under one lock, in bulk, a chunk of rows at a time. Background passes
// give way to a thread that is on somebody's critical path (Urgency).
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "flush/queue.h"
#include "window/step_update.h"

namespace frugal {

// Rows taken out of the queue by one claim: their oldest unwritten updates.
struct Claim {
  struct Run {
    StepUpdate* update;
    uint32_t begin, end;   // of ids and rows
  };
  Vector<uint32_t> ids;    // nodes
  Vector<uint32_t> rows;   // row of the update
  Vector<Run> runs;        // neighbours of one update
};

struct WindowStats {
  uint64_t rises = 0, falls = 0, enqueued = 0, dequeued = 0;
  uint64_t pending = 0, active = 0;
};

class Window : public HeapObject {
 public:
  enum class Urgency { kBackground, kUrgent };
  // Declared steps in [base, base + kHorizon) can be linked. Later ones wait for the base.
  static constexpr uint32_t kHorizon = 21;
  // Updates from the oldest unwritten one to the youngest, at most: `writer` tells them apart.
  static constexpr uint32_t kUpdates = 4096;

  struct Config {
    uint64_t rows = 0;
    uint64_t staleness = 0;
    uint32_t world_size = 1;
    bool tree_heap = false;
  };
  Window() = default;
  ~Window();
  Status open(const Config& config, uint64_t base);
  bool opened() const { return opened_.load(std::memory_order_acquire); }

  // The first step that is not committed.
  void set_base(uint64_t base);

  // The rows of a resolved part get the bit of its step. `owned` says that the part's rank has a
  // cache: reads of rows that it owns are kept apart. False if the step was committed meanwhile.
  bool link(Part& part, bool owned, Urgency urgency);
  // Takes back the bits of a linked part; `same_step` are the linked parts of its step that stay.
  void unlink(const Part& part, const Vector<PartRef>& same_step);

  // Gives an update, whose list is made, its number and nodes. False if there are kUpdates unwritten
  // ones already.
  bool add(const UpdateRef& update);
  // So many unwritten updates that all should be written.
  bool crowded() const { return span_.load(std::memory_order_relaxed) > kUpdates / 2; }
  // Takes all rows of the update's list in.
  void stage(StepUpdate& update, Urgency urgency);
  // The update is of a step that will not be, or not so: forget it.
  void unstage(StepUpdate& update);
  // Step `step` is committed: its staged rows are pending, base = step + 1. `update` may be null.
  void commit(StepUpdate* update, uint64_t step);

  // Rows of `slots` with updates of committed steps < `before` become as urgent as can be. Returns
  // whether there are any. Younger updates of a row are not: ask again when the older are written.
  bool force(const uint32_t* slots, size_t n, uint64_t before);
  // For the priority's sake: is an update of a step <= `step` - staleness that a declared step <=
  // `step` reads (or a forced one) not written yet?
  bool pending_until(uint64_t step);
  bool any_pending() const { return pending_total_.load(std::memory_order_acquire) != 0; }
  uint64_t pending_rows() const { return pending_total_.load(std::memory_order_acquire); }
  // Rows that are claimed but unwritten, of priorities up to `step`.
  bool in_flight_until(uint64_t step);

  // Takes up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last).
  bool claim(uint64_t step, size_t max, Claim* claim);
  // The rows of the claim are written. Updates that are wholly written go to `finished`.
  void finish(const Claim& claim, Vector<UpdateRef>* finished);

  // The owner's cache took (or gave up) these rows: its own reads no longer (again) count.
  void set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty);
  // Next declared read > `after` by the owner of the row; UINT64_MAX if none. For cache policy.
  void next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next);

  // Those of `slots` that have updates pending, in their order.
  void collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out);
  WindowStats stats();
  static uint32_t owner(uint32_t slot, uint32_t world_size);

 private:
  // A row in the flat index.
  struct Word {
    uint64_t reads : kHorizon;   // bit i: step stamp + i is declared to read the row,
    uint64_t owner : kHorizon;   // … by the row's owner, which may have it cached
    uint64_t cached : 1;         // it has: its own reads do not count
    uint64_t stamp : 9;
    uint64_t writer : 12;        // low bits of the oldest unwritten update's number, if any
  };
  static_assert(sizeof(Word) == 8 && kUpdates == 1u << 12);
  // What a node is, one byte: a priority; with kClaimed, somebody is writing it; or neither:
  static constexpr uint8_t kClaimed = 0x80;
  static constexpr uint8_t kBlocked = 0x7e;  // an older update of the row is unwritten
  static constexpr uint8_t kDone = 0x7f;     // nothing is pending
  // Nodes are handed out in pages, row i of an update lies in the update's page i / kPage.
  static constexpr uint32_t kPage = 1024;
  struct Node {
    StepUpdate* update = nullptr;
    uint32_t row = 0, id = 0;
  };
  struct Page {
    StepUpdate* update = nullptr;
    uint32_t first_row = 0;
  };

  class Lock;
  void age(Word& w) const;
  uint64_t effective_reads(const Word& w) const;
  uint8_t deadline(const Word& w, uint64_t step) const;
  StepUpdate* live(uint32_t writer) const;
  Node pending(const Word& w, uint32_t slot);
  void reprioritize(const Node& node, uint8_t prio);
  void close_gap();
  void release(StepUpdate& u);
  uint32_t node_id(const StepUpdate& u, uint32_t row) const {
    return u.pages[row / kPage] * kPage + row % kPage;
  }
  uint32_t limit_rank(uint64_t step) const;

  Config config_;
  std::mutex mu_;
  std::atomic<int> urgent_{0};
  std::atomic<bool> opened_{false};
  std::atomic<uint64_t> pending_total_{0};
  std::atomic<uint32_t> span_{0};
  uint64_t base_ = 0;
  Mapping word_map_;
  Word* words_ = nullptr;           // by slot
  Vector<uint8_t> state_;           // by node
  Vector<Page> pages_;
  Vector<uint32_t> free_pages_;
  std::unique_ptr<Queue> queue_;
  uint64_t count_[kRing + 1] = {};  // pending rows by priority, claimed ones included
  uint64_t queued_[kRing + 1] = {}; // of these, not claimed
  Vector<UpdateRef> updates_;       // ring by number, a power of two <= kUpdates
  uint32_t oldest_ = 0, next_ = 0;  // numbers: every unwritten update is in [oldest_, next_)
  WindowStats stats_;
};

}  // namespace frugal
