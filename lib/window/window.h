// The window of a table: the next declared read of each row, and the updates that are not in the
// host rows yet (FRUGAL section 3.3: g-entries).
//
// A row's g-entry has two parts. The R set is the row's read set in the flat index (read_sets.h):
// the declared steps that read the row, and the latest steps that read it. The W set is the row's
// unwritten updates, an entry each (pending_updates.h). It is found through the read set. The
// priority of a row is that of its oldest entry: the first declared step > the entry's step +
// staleness, else infinity. The window combines the two parts.
//
// A read set costs a cache line from memory, so it is accessed once for each declared row, when the
// row is linked. The row's previous part then learns the row's next read (Part::next), so the
// priorities are known when the update is prepared. (With staleness, caches, or undeclared
// gradients, preparing accesses the read sets.)
//
// Life of an update: link() sets the bits of a declared step. prepare() prepares a step's rows
// before the commit, while the device computes. commit() makes all of them pending in O(ring).
// claim() takes the most urgent ones, the caller writes the rows, and finish() publishes that. Rows
// of a part and of an update are sorted by slot, so every pass runs through memory in one
// direction.
//
// Threads: `links_mu_` guards the read sets and what parts learn. Entries have their own lock,
// which is taken second. So linking, the longest pass, does not delay threads that write rows. All
// work is done in bulk, a chunk of rows at a time. Background passes yield to a thread on a
// critical path (Urgency).
#pragma once
#include <atomic>

#include "window/pending_updates.h"
#include "window/placement.h"
#include "window/read_sets.h"
#include "window/urgent_lock.h"

namespace frugal {

class Window : public HeapObject {
 public:
  using Urgency = UrgentMutex::Urgency;
  static constexpr uint32_t kHorizon = ReadSets::kHorizon, kPast = ReadSets::kPast;
  // A background thread links or prepares so many rows at a time. In between it checks for urgent
  // work, which a thread that looks rows up needs at once.
  static constexpr size_t kPiece = 1024;

  struct Config {
    uint64_t rows = 0;
    uint64_t staleness = 0;
    Placement placement = {};
    bool tree_heap = false;
    std::atomic<uint64_t>* pending_rows = nullptr;  // the common count of several windows, or null
  };
  Status open(const Config& config, uint64_t next_commit);
  const Placement& placement() const { return config_.placement; }
  bool opened() const { return opened_.load(std::memory_order_acquire); }

  // The first step that is not committed.
  void set_next_commit(uint64_t next_commit);
  uint64_t next_commit();

  // Links rows [from, from + n) of a resolved part: their read sets get the bit of its step. Calls
  // ascend from 0, and part.next must have room. `owned` says that the part's rank has a cache:
  // reads of rows that it owns are kept apart. Returns false if the step was committed meanwhile.
  bool link(const PartRef& part, size_t from, size_t n, bool owned, Urgency urgency);
  // Clears the bits of a linked part.
  void unlink(const PartRef& part);

  // Gives an update, whose list is made, its number and entries, before it is prepared. Throws when
  // memory is lacking, and changes nothing then.
  void add(const UpdateRef& update);
  // Whether there are so many unwritten updates that all should be written.
  bool backlogged() const { return pending_.updates() > kPast; }
  // Prepares the next `most` rows of the update's list, and returns whether that was all.
  // `declared`: the rows are those of the ranks' linked parts.
  bool prepare(StepUpdate& update, bool declared, size_t most, Urgency urgency);
  // The prepared rows, all of them, that the very next step reads.
  void prepared_for_next(const StepUpdate& update, Vector<uint32_t>* slots);
  // Withdraws the update of a step that was aborted or changed.
  void withdraw(const UpdateRef& update);
  // Allocates all memory that the commit of a prepared update may need.
  void make_room(const StepUpdate& update);
  // Step `step` is committed: its prepared rows are pending, next_commit = step + 1. `update` may
  // be null.
  void commit(StepUpdate* update, uint64_t step);

  // Rows of `slots` with updates of committed steps < `before` get the most urgent priority.
  // Returns whether there are any. Later updates of a row do not: call again when the earlier ones
  // are written.
  bool force(const uint32_t* slots, size_t n, uint64_t before);
  // Returns whether an update that counts for the gate of `step` is unwritten: one of a step <=
  // `step` - staleness that a declared step <= `step` reads, or a forced one.
  bool pending_until(uint64_t step) const { return pending_.pending_until(step); }
  // Whether an update of a committed step before `step` is not wholly written.
  bool unwritten_before(uint64_t step);
  bool any_pending() const { return pending_rows() != 0; }
  uint64_t pending_rows() const { return pending_.pending_rows(); }
  // Rows that are claimed but unwritten, of priorities up to `step`.
  bool in_flight_until(uint64_t step);

  // Claims up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last). Only
  // room for the claim may need memory, before anything changes.
  bool claim(uint64_t step, size_t max, Claim* claim);
  // The rows of the claim are written.
  void finish(Claim& claim);

  // The owner's cache admitted (or evicted) these rows: its own reads stop counting (or count
  // again).
  void set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty, Urgency urgency);
  // The owner's next declared read > `after` of the row; UINT64_MAX if there is none. For cache
  // policy.
  void next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next,
                        Urgency urgency);

  // The rows of `slots` with pending updates, in their order (null: their number alone).
  size_t collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out);
  WindowStats stats();

 private:
  using Entry = PendingUpdates::Entry;
  // A row of a part that is being linked.
  struct Found {
    uint32_t slot;
    int step;       // counted from the next commit: an earlier one that reads it, or has updated it
    uint32_t from;  // near its row in that part
  };

  class Both;
  uint8_t deadline(ReadSet current, uint64_t step) const REQUIRES(links_mu_);
  void learn_next(uint64_t step, uint32_t slot, uint8_t prio) REQUIRES(links_mu_);
  size_t next_of(const StepUpdate& u, size_t at, uint8_t* prio) const REQUIRES(links_mu_);
  size_t next_from_read_sets(StepUpdate& u, size_t at, uint8_t* prio)
      REQUIRES(links_mu_, pending_.mu);

  Config config_;
  std::atomic<bool> opened_{false};
  UrgentMutex links_mu_ ACQUIRED_BEFORE(pending_.mu);
  PendingUpdates pending_;
  // set with both locks held: the entries have it, too
  uint64_t next_commit_ GUARDED_BY(links_mu_) = 0;
  ReadSets read_sets_ GUARDED_BY(links_mu_);
  Vector<PartRef> parts_[kRing] GUARDED_BY(links_mu_);  // linked, by step mod kRing
  bool read_sets_only_ GUARDED_BY(links_mu_) =
      false;  // staleness or a cache: Part::next does not suffice
  Found found_[2048] GUARDED_BY(
      links_mu_);  // of the rows that are being linked: too much for a caller's stack
};

}  // namespace frugal
