// The window of a table: who reads a row next, and which of its updates are not in the host row yet
// (FRUGAL section 3.3: g-entries).
//
// A row's g-entry has two parts. Its word in the flat index (8 bytes a table row) is the R set:
// the declared steps that read the row, and which of the latest steps did. While updates of it are
// unwritten, each of them is a node (6 bytes, with
// the queue's): the W set, found through the word. The priority of
// a row is that of its oldest node: the first declared step > the node's step + staleness, else
// infinity. Younger nodes of the row are blocked behind it, in a chain, and enter the queue one
// after the other.
//
// Bits of a word count from the step in its stamp, so it is brought up to date when it is next
// touched and no pass is needed to take back what has passed. Stamps wrap around: a row that nobody
// touched for some 500 steps may seem to be read soon. That makes an update too urgent, never too
// late.
//
// A word costs a cache line from memory, so it is touched once for each declared row, when that is
// linked. Then the row's declaration before learns its next read (Part::next), and when its update
// is staged the priorities are there. (With staleness, caches, or gradients that were not declared,
// staging reads the words.)
//
// Life of an update: link() sets the bits of a declared step; stage() takes a step's rows in before
// the step is committed, while the device computes; commit() makes all of them pending in O(ring);
// claim() takes the most urgent ones, the caller writes the rows, finish() publishes that. Rows of
// a part and of an update are sorted by slot, so every pass runs through memory in one direction.
//
// Counts per priority include rows that were claimed but not yet finished: pending(rank) == 0
// therefore means written, not merely taken (contract, gate condition c).
//
// Without memory for a place in the queue a row that has to become more urgent has gone astray: until all that was
// pending then is written, every gate waits for all of it, and claims search the nodes.
//
// Threads: words and what parts learn are guarded by links_mu_, nodes, queue and counts by mu_, which
// is taken second. So linking, the longest pass, does not stand in the way of who writes rows. All
// is done in bulk, a chunk of rows at a time; background passes give way to a thread that is on
// somebody's critical path (Urgency).
#pragma once
#include <atomic>
#include <memory>

#include "base/sync.h"
#include "flush/queue.h"
#include "window/placement.h"
#include "window/step_update.h"

namespace frugal {

// Rows taken out of the queue by one claim: their oldest unwritten updates.
struct Claim {
  struct Run {
    StepUpdate* update;
    uint32_t begin, end;   // of ids and rows
    UpdateRef finished;    // finish(): the update, if it is wholly written by now
  };
  void reserve(size_t most) {
    ids.reserve(most);
    rows.reserve(most);
    runs.reserve(most);
  }
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
  // Words remember this many steps. Unwritten updates of older ones are searched for every row that
  // is looked at.
  static constexpr uint32_t kPast = 12;
  // A background thread takes in so many rows at a time, of a declaration or an update, and looks in between
  // whether it is wanted: whoever looks rows up wants it at once.
  static constexpr size_t kPiece = 1024;

  struct Config {
    uint64_t rows = 0;
    uint64_t staleness = 0;
    Placement placement;
    bool tree_heap = false;
  };
  Window() = default;
  ~Window();
  Status open(const Config& config, uint64_t base);
  const Placement& placement() const { return config_.placement; }
  bool opened() const { return opened_.load(std::memory_order_acquire); }

  // The first step that is not committed.
  void set_base(uint64_t base);
  uint64_t base();

  // Rows [from, from + n) of a resolved part get the bit of its step, in ascending calls from 0 on;
  // part.next must have room. `owned` says that the part's rank has a cache: reads of rows that it
  // owns are kept apart. False if the step was committed meanwhile.
  bool link(const PartRef& part, size_t from, size_t n, bool owned, Urgency urgency);
  // Takes back the bits of a linked part.
  void unlink(const PartRef& part);

  // Gives an update, whose list is made, its number and nodes, before it is staged. Without memory: nothing.
  void add(const UpdateRef& update);
  // So many unwritten updates that all should be written.
  bool crowded() const { return live_.load(std::memory_order_relaxed) > kPast; }
  // Takes the next `most` rows of the update's list in, and tells whether that was all. `declared`: they are
  // the linked parts of its ranks.
  bool stage(StepUpdate& update, bool declared, size_t most, Urgency urgency);
  // The rows that `stage` has taken in, all of them, and that the very next step reads.
  void staged_for_next(const StepUpdate& update, Vector<uint32_t>* slots);
  // The update is of a step that will not be, or not so: forget it.
  void unstage(const UpdateRef& update);
  // All memory that the commit of a staged update may want.
  void make_room(const StepUpdate& update);
  // Step `step` is committed: its staged rows are pending, base = step + 1. `update` may be null.
  void commit(StepUpdate* update, uint64_t step);

  // Rows of `slots` with updates of committed steps < `before` become as urgent as can be. Returns
  // whether there are any. Younger updates of a row are not: ask again when the older are written.
  bool force(const uint32_t* slots, size_t n, uint64_t before);
  // For the priority's sake: is an update of a step <= `step` - staleness that a declared step <=
  // `step` reads (or a forced one) not written yet?
  bool pending_until(uint64_t step) const;
  bool any_pending() const { return pending_rows() != 0; }
  uint64_t pending_rows() const {
    schedule_point();
    return pending_total_.load(std::memory_order_acquire);
  }
  // Rows that are claimed but unwritten, of priorities up to `step`.
  bool in_flight_until(uint64_t step);

  // All that can want memory, before anything changes, is room for the claim. Takes up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last).
  bool claim(uint64_t step, size_t max, Claim* claim);
  // The rows of the claim are written.
  void finish(Claim& claim);

  // The owner's cache took (or gave up) these rows: its own reads no longer (again) count.
  void set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty, Urgency urgency);
  // Next declared read > `after` by the owner of the row; UINT64_MAX if none. For cache policy.
  void next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next, Urgency urgency);

  // Those of `slots` that have updates pending, in their order (null: their number alone).
  size_t collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out);
  WindowStats stats();

 private:
  // A row in the flat index, from the lowest bit (bit fields are slower here than shifts):
  // - reads, kPast + kHorizon bits: bit i says that step stamp - kPast + i reads the row by a
  //   declaration, or updates it;
  // - owner, kHorizon bits: bit i says that the row's owner, which may have it cached, reads it in
  //   step stamp + i;
  // - cached: it has, so its own reads do not count;
  // - stamp, 9 bits of a step.
  using Word = uint64_t;
  static constexpr int kOwnerAt = kPast + kHorizon, kCachedAt = kOwnerAt + kHorizon, kStampAt = 55;
  static constexpr Word kReads = (Word{1} << kOwnerAt) - 1, kOwner = (Word{1} << kHorizon) - 1;
  static constexpr Word kPassed = (Word{1} << kPast) - 1, kCached = Word{1} << kCachedAt;
  static constexpr Word kStamp = 511;
  static_assert(kCachedAt < kStampAt && kStampAt + 9 == 64);
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
  // A row of a part that is being linked.
  struct Found {
    uint32_t slot;
    int step;       // counted from the base: an earlier one that reads it, or has updated it
    uint32_t from;  // near its row there
  };

  class Lock;
  class BothLocks;
  static Word aged(Word w, uint64_t base);
  static uint64_t effective_reads(Word aged);
  uint8_t deadline(Word aged, uint64_t step) const;
  uint64_t written_mask(bool* ancient) const REQUIRES(mu_);
  StepUpdate* find_update(uint32_t seq) const REQUIRES(mu_);
  Node find_node(StepUpdate& u, uint32_t slot) REQUIRES(mu_);
  Node pending(Word aged, uint32_t slot) REQUIRES(mu_);
  void learn_next(uint64_t step, uint32_t slot, uint8_t prio) REQUIRES(links_mu_);
  void reprioritize(const Node& node, uint8_t prio) noexcept REQUIRES(mu_);
  void enqueue(uint32_t id, uint8_t prio) noexcept REQUIRES(mu_);
  void release(StepUpdate& u) REQUIRES(mu_);
  void pop(uint64_t step, size_t max, Claim* c) REQUIRES(mu_);
  size_t search(uint32_t* ids, size_t max) REQUIRES(mu_);
  void written(const Claim& c, const Claim::Run& run) REQUIRES(mu_);
  void settle(Claim::Run& run) REQUIRES(mu_);
  void wrote(uint64_t rows) REQUIRES(mu_);
  void note_soonest() REQUIRES(mu_);
  uint32_t node_id(const StepUpdate& u, uint32_t row) const {
    return u.pages[row / kPage] * kPage + row % kPage;
  }
  uint32_t limit_rank(uint64_t step) const REQUIRES(mu_);

  Config config_;
  Mutex links_mu_ ACQUIRED_BEFORE(mu_), mu_;
  std::atomic<int> links_urgent_{0}, urgent_{0};
  std::atomic<bool> opened_{false};
  std::atomic<uint64_t> pending_total_{0};
  // The step that the most urgent pending row waits for; 0 if that is the base, or not known;
  // UINT64_MAX if none waits for any. Set at the end of each section under mu_.
  std::atomic<uint64_t> soonest_{UINT64_MAX};
  std::atomic<uint32_t> live_{0};   // updates_.size()
  uint64_t base_ = 0;               // set with both locks held, and read with either
  Mapping word_map_;
  Word* words_ PT_GUARDED_BY(links_mu_) = nullptr;  // by slot
  Vector<uint8_t> state_ GUARDED_BY(mu_);           // by node
  Vector<Page> pages_ GUARDED_BY(mu_);
  Vector<uint32_t> free_pages_ GUARDED_BY(mu_);
  std::unique_ptr<Queue> queue_ GUARDED_BY(mu_);
  uint64_t count_[kRing + 1] GUARDED_BY(mu_) = {};  // pending rows by priority, claimed ones included
  uint64_t queued_[kRing + 1] GUARDED_BY(mu_) = {}; // of these, not claimed
  Vector<UpdateRef> updates_ GUARDED_BY(mu_);       // unwritten ones, and the staged one; ascending steps
  uint32_t next_seq_ GUARDED_BY(mu_) = 0;
  Vector<PartRef> parts_[kRing] GUARDED_BY(links_mu_);  // linked, by step mod kRing
  bool astray_ GUARDED_BY(mu_) = false;             // a place in the queue is missing, or wrong
  bool words_only_ GUARDED_BY(links_mu_) = false;   // staleness or a cache: Part::next does not tell everything
  WindowStats stats_ GUARDED_BY(mu_);
  Found found_[2048] GUARDED_BY(links_mu_);  // of the piece that is being linked: too much for a caller's stack
};

}  // namespace frugal
