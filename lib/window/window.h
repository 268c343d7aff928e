// The window of a table: who reads a row next, and which of its updates are not in the host row yet
// (FRUGAL section 3.3: g-entries).
//
// A row's g-entry has two parts. Its read set in the flat index (read_sets.h) is the R set: the
// declared steps that read the row, and which of the latest steps did. While updates of it are
// unwritten, each of them is an entry (pending_updates.h): the W set, found through the read set.
// The priority of a row is that of its oldest entry: the first declared step > the entry's step +
// staleness, else infinity. The window is what joins the two.
//
// A read set costs a cache line from memory, so it is touched once for each declared row, when that
// is linked. Then the row's declaration before learns its next read (Part::next), and when its
// update is prepared the priorities are there. (With staleness, caches, or gradients that were not
// declared, preparing reads the read sets.)
//
// Life of an update: link() sets the bits of a declared step; prepare() takes a step's rows in
// before the step is committed, while the device computes; commit() makes all of them pending in
// O(ring); claim() takes the most urgent ones, the caller writes the rows, finish() publishes that.
// Rows of a part and of an update are sorted by slot, so every pass runs through memory in one
// direction.
//
// Threads: read sets and what parts learn are guarded by links_mu_, entries by their own lock,
// which is taken second. So linking, the longest pass, does not stand in the way of who writes
// rows. All is done in bulk, a chunk of rows at a time; background passes give way to a thread that
// is on somebody's critical path (Urgency).
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
  // A background thread takes in so many rows at a time, of a declaration or an update, and looks
  // in between whether it is wanted: whoever looks rows up wants it at once.
  static constexpr size_t kPiece = 1024;

  struct Config {
    uint64_t rows = 0;
    uint64_t staleness = 0;
    Placement placement = {};
    bool tree_heap = false;
    std::atomic<uint64_t>* pending_rows =
        nullptr;  // where those of several windows are counted, or null
  };
  Status open(const Config& config, uint64_t next_commit);
  const Placement& placement() const { return config_.placement; }
  bool opened() const { return opened_.load(std::memory_order_acquire); }

  // The first step that is not committed.
  void set_next_commit(uint64_t next_commit);
  uint64_t next_commit();

  // Rows [from, from + n) of a resolved part get the bit of its step, in ascending calls from 0 on;
  // part.next must have room. `owned` says that the part's rank has a cache: reads of rows that it
  // owns are kept apart. False if the step was committed meanwhile.
  bool link(const PartRef& part, size_t from, size_t n, bool owned, Urgency urgency);
  // Takes back the bits of a linked part.
  void unlink(const PartRef& part);

  // Gives an update, whose list is made, its number and entries, before it is prepared. Without
  // memory: nothing.
  void add(const UpdateRef& update);
  // So many unwritten updates that all should be written.
  bool backlogged() const { return pending_.updates() > kPast; }
  // Takes the next `most` rows of the update's list in, and tells whether that was all. `declared`:
  // they are the linked parts of its ranks.
  bool prepare(StepUpdate& update, bool declared, size_t most, Urgency urgency);
  // The rows that `prepare` has taken in, all of them, and that the very next step reads.
  void prepared_for_next(const StepUpdate& update, Vector<uint32_t>* slots);
  // The update is of a step that will not be, or not so: forget it.
  void withdraw(const UpdateRef& update);
  // All memory that the commit of a prepared update may want.
  void make_room(const StepUpdate& update);
  // Step `step` is committed: its prepared rows are pending, next_commit = step + 1. `update` may
  // be null.
  void commit(StepUpdate* update, uint64_t step);

  // Rows of `slots` with updates of committed steps < `before` become as urgent as can be. Returns
  // whether there are any. Younger updates of a row are not: ask again when the older are written.
  bool force(const uint32_t* slots, size_t n, uint64_t before);
  // For the priority's sake: is an update of a step <= `step` - staleness that a declared step <=
  // `step` reads (or a forced one) not written yet?
  bool pending_until(uint64_t step) const { return pending_.pending_until(step); }
  bool any_pending() const { return pending_rows() != 0; }
  uint64_t pending_rows() const { return pending_.pending_rows(); }
  // Rows that are claimed but unwritten, of priorities up to `step`.
  bool in_flight_until(uint64_t step);

  // Takes up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last). All that
  // can want memory, before anything changes, is room for the claim.
  bool claim(uint64_t step, size_t max, Claim* claim);
  // The rows of the claim are written.
  void finish(Claim& claim);

  // The owner's cache took (or gave up) these rows: its own reads no longer (again) count.
  void set_cached(const uint32_t* slots, size_t n, bool cached, uint64_t* dirty, Urgency urgency);
  // Next declared read > `after` by the owner of the row; UINT64_MAX if none. For cache policy.
  void next_owner_reads(const uint32_t* slots, size_t n, uint64_t after, uint64_t* next,
                        Urgency urgency);

  // Those of `slots` that have updates pending, in their order (null: their number alone).
  size_t collect_pending(const uint32_t* slots, size_t n, Vector<uint32_t>* out);
  WindowStats stats();

 private:
  using Entry = PendingUpdates::Entry;
  // A row of a part that is being linked.
  struct Found {
    uint32_t slot;
    int step;       // counted from the next commit: an earlier one that reads it, or has updated it
    uint32_t from;  // near its row there
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
      false;  // staleness or a cache: Part::next does not tell everything
  Found found_[2048] GUARDED_BY(
      links_mu_);  // of the piece that is being linked: too much for a caller's stack
};

}  // namespace frugal
