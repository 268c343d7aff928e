// The window of a table: g-entries, their priorities, and the pending updates (FRUGAL section 3.3).
//
// A row has a g-entry while it has a declared read in the window (its R set, a mask of steps) or an
// update that is not in the host row yet (its W set, a chain of (StepUpdate, row) pairs, oldest
// first). The priority of an entry with a W set is the first declared step > oldest update +
// staleness, else infinity. Bytes: 32 per active row, 4 per table row for the flat index row ->
// entry (a place in it that is out of date is recognized: the entry it names is another row's).
//
// Life of a row: link() sets the bit of a declared step; stage() takes a step's rows in before the
// step is committed, while the device computes; commit() makes all of them pending in O(ring);
// claim() takes the most urgent ones, the caller writes the rows, finish() publishes that. Bits of
// steps that have passed vanish when an entry is next touched, so no pass over rows is needed to
// take them back; sweep() is for rows that were declared and never updated.
//
// Counts per priority include entries that were claimed but not yet finished: pending(rank) == 0
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

struct Entry {
  uint32_t slot;
  uint32_t touch;  // low bits of the base step when `reads` was last brought up to date
  uint64_t reads;  // declared steps in [base, base + 63], bit step mod 64
  uint32_t seq;    // oldest pending update, or kNone
  uint32_t row;    // its row there
  uint8_t prio;    // while pending; kAbsent otherwise
  uint8_t flags;
  uint16_t unused;
  uint32_t unused2;
};
static_assert(sizeof(Entry) == 32);

// Rows taken out of the queue by one claim.
struct Claim {
  Vector<uint32_t> ids;
  Vector<uint32_t> nodes;       // pending updates taken for each id
  struct Node {
    StepUpdate* update;
    uint32_t row;
  };
  Vector<Node> flat;            // all nodes of all ids, oldest first for each id
  bool chained = false;         // some id has more than one node
  bool empty() const { return ids.empty(); }
};

struct WindowStats {
  uint64_t rises = 0, falls = 0, enqueued = 0, dequeued = 0;
  uint64_t pending = 0, active = 0;
};

class Window : public HeapObject {
 public:
  enum class Urgency { kBackground, kUrgent };

  // `cached_ranks[r]`: rank r has a device cache. `owner(slot)` decides whose cache may hold a row.
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

  // The first step that is not committed; declared steps lie in [base, base + 62].
  void set_base(uint64_t base);

  // Declared rows [from, from + n) of a resolved part get the bit of its step. `owned` says that
  // the part's rank has a cache: reads of rows that it owns are kept apart. part.ids must have room.
  // Returns the rows done: fewer than n if the step was committed meanwhile.
  size_t link(Part& part, size_t from, size_t n, bool owned, Urgency urgency);
  // Takes back the bits of a linked part; `same_step` are the linked parts of its step that stay.
  void unlink(Part& part, bool owned, const Vector<PartRef>& same_step,
              const Vector<bool>& same_owned);
  // Drops g-entries of a linked part whose step has passed and that nobody needs.
  void sweep(const Part& part, size_t from, size_t n);

  // Takes rows [from, from + n) of the list of `update` in. ids: entries, where known.
  void stage(StepUpdate& update, size_t from, size_t n, const uint32_t* known_ids, uint32_t* ids,
             Urgency urgency);
  // The staged update is of a step that will not be: forget it.
  void unstage(StepUpdate& update);
  // Registers an update (gives it its number) before staging.
  void add(const UpdateRef& update);
  // Forgets an update that was added and unstaged.
  void forget(StepUpdate& update);
  // Step `step` is committed: its staged rows are pending, base = step + 1. `update` may be null.
  void commit(StepUpdate* update, uint64_t step);

  // Rows of `slots` with updates of committed steps < `before` become as urgent as can be. Returns
  // whether there are any.
  bool force(const uint32_t* slots, size_t n, uint64_t before);
  // For the priority's sake: is an update of a step <= `step` - staleness that a declared step <=
  // `step` reads (or a forced one) not written yet?
  bool pending_until(uint64_t step);
  bool any_pending() const { return pending_total_.load(std::memory_order_acquire) != 0; }
  uint64_t pending_rows() const { return pending_total_.load(std::memory_order_acquire); }
  // Pending updates that are claimed but unwritten, of steps up to `step`.
  bool in_flight_until(uint64_t step);

  // Takes up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last).
  bool claim(uint64_t step, size_t max, Claim* claim);
  // The rows of the claim are written. Updates that are wholly written go to `finished`.
  void finish(Claim* claim, Vector<UpdateRef>* finished);
  // Rank of the most urgent queued entry, counted from base; kRing + 1: none.
  bool queued_until(uint64_t step);

  // The owner's cache took (or gave up) these rows: its own reads no longer (again) count.
  void set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty);
  // Next declared read > `after` by the owner of the row; UINT64_MAX if none. For cache policy.
  void next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next);

  // Those of `slots` that have updates pending, in their order.
  void collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out);
  WindowStats stats();
  static uint32_t owner(uint32_t slot, uint32_t world_size);

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint8_t kLive = 1, kClaimed = 2, kForced = 4, kCached = 8;

  class Lock;
  uint32_t find(uint32_t slot) const;       // entry id or kNone
  uint32_t find_or_add(uint32_t slot);
  void age(Entry& e, uint32_t id);
  uint64_t effective_reads(const Entry& e, uint32_t id) const;
  uint8_t deadline(const Entry& e, uint64_t oldest, uint32_t id) const;
  void use_caches();
  void reprioritize(Entry& e, uint32_t id);
  void maybe_free(Entry& e, uint32_t id);
  bool owned_by(uint32_t slot, uint32_t rank) const { return owner(slot, config_.world_size) == rank; }
  StepUpdate* update(uint32_t seq) const { return updates_[seq & (updates_.size() - 1)].get(); }
  void set_bit(Entry& e, uint32_t id, uint64_t bit, bool owned);
  uint32_t limit_rank(uint64_t step) const;

  Config config_;
  std::mutex mu_;
  std::atomic<int> urgent_{0};
  std::atomic<bool> opened_{false};
  std::atomic<uint64_t> pending_total_{0};
  uint64_t base_ = 0;
  Mapping index_map_, entry_map_, owner_map_;
  uint32_t* index_ = nullptr;      // slot -> entry id + 1, perhaps out of date
  Entry* entries_ = nullptr;
  uint64_t* owner_reads_ = nullptr;  // by entry id: declared reads by the row's owner, if it caches
  bool caches_ = false;              // some rank caches: owner_reads_ counts
  uint32_t entry_count_ = 0;       // ids handed out so far
  uint32_t queue_ids_ = 0;
  Vector<uint32_t> free_;
  std::unique_ptr<Queue> queue_;
  uint64_t count_[kRing + 1] = {};  // pending entries by priority, claimed ones included
  uint64_t queued_[kRing + 1] = {}; // of these, not claimed
  Vector<UpdateRef> updates_;       // ring by seq, a power of two
  uint32_t next_seq_ = 0;
  uint64_t live_updates_ = 0;
  WindowStats stats_;
};

}  // namespace frugal
