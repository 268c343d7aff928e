// The pending updates of a window's rows, which are not in the host rows yet: the W sets.
//
// An update of a row is an entry (6 bytes, with the queue's). A row's oldest unwritten entry is in
// the queue. The window gives its priority, because it knows the row's next read. Later entries of
// the row are blocked after it, in a chain, and enter the queue one after the other.
//
// Counts per priority include rows that were claimed but not yet finished. So pending(rank) == 0
// means that all rows are written, not only taken (the condition of the gate).
//
// Without memory for a queue entry, a row that must become more urgent is *unqueued*. Until all
// updates that were pending then are written, every gate waits for all of them, and claims search
// the entries.
//
// Threads: `mu`, by a Section. Some members take no lock; their comments say so.
#pragma once
#include <atomic>
#include <memory>

#include "flush/queue.h"
#include "window/read_sets.h"
#include "window/step_update.h"
#include "window/urgent_lock.h"

namespace frugal {

// Rows taken out of the queue by one claim: their oldest unwritten updates.
struct Claim {
  struct Run {
    StepUpdate* update;
    uint32_t begin, end;  // of ids and rows
    UpdateRef finished;   // set by finish(): the update, if it is completely written
  };
  void reserve(size_t most) {
    ids.reserve(most);
    rows.reserve(most);
    runs.reserve(most);
  }
  Vector<uint32_t> ids;   // entries
  Vector<uint32_t> rows;  // row of the update
  Vector<Run> runs;       // adjacent rows of one update
};

struct WindowStats {
  uint64_t rises = 0, falls = 0, enqueued = 0, dequeued = 0;
  uint64_t pending = 0, active = 0;
};

class PendingUpdates {
 public:
  // Entries are allocated in pages: row i of an update is in the update's page i / kPage.
  static constexpr uint32_t kPage = 1024;
  struct Entry {
    StepUpdate* update = nullptr;
    uint32_t row = 0, id = 0;
  };

  UrgentMutex mu;
  class SCOPED_CAPABILITY Section {
   public:
    Section(PendingUpdates& of, UrgentMutex::Urgency urgency) ACQUIRE(of.mu)
        : pending_(of), lock_(of.mu, urgency) {}
    ~Section() RELEASE() NO_THREAD_SAFETY_ANALYSIS { pending_.note_soonest(); }

   private:
    PendingUpdates& pending_;
    UrgentLock lock_;
  };

  // `pending_rows`: the common count of several windows, or null.
  void open(bool tree_heap, uint64_t next_commit, std::atomic<uint64_t>* pending_rows) REQUIRES(mu);
  void set_next_commit(uint64_t next_commit) REQUIRES(mu);
  uint64_t next_commit() const REQUIRES(mu) { return next_commit_; }

  // Gives an update its number and entries. Throws when memory is lacking, and changes nothing
  // then.
  void add(const UpdateRef& update) REQUIRES(mu);
  // Prepares the next n rows of the update, a page, with these priorities or kBlocked.
  static constexpr uint8_t kBlocked = 0x7e;  // an older update of the row is unwritten
  void prepare(StepUpdate& u, size_t n, const uint8_t* prio) REQUIRES(mu);
  // Finds the prepared rows in a page that have this priority.
  void prepared_for(uint8_t prio, const StepUpdate& u, size_t page, Vector<uint32_t>* slots)
      REQUIRES(mu);
  void withdraw(StepUpdate& u) REQUIRES(mu);
  void make_room() REQUIRES(mu);
  // Puts the prepared rows of the update into the queue, and returns their number.
  uint64_t commit(StepUpdate& u) REQUIRES(mu);
  // Chains a row of a committed update that was blocked when it was prepared. `before`: the row's
  // oldest unwritten entry.
  void chain(StepUpdate& u, uint32_t row, const Entry& before) REQUIRES(mu);
  void enqueue(uint32_t id, uint8_t prio) noexcept REQUIRES(mu);
  void now_pending(uint64_t rows) REQUIRES(mu);

  // The bits of a read set's reads that belong to unwritten updates. `ancient`: older steps have
  // some too.
  uint64_t unwritten_reads(bool* ancient) const REQUIRES(mu);
  // Returns the row's oldest unwritten update.
  Entry oldest(ReadSet current, uint32_t slot) REQUIRES(mu);
  void reprioritize(const Entry& entry, uint8_t prio) noexcept REQUIRES(mu);
  // Calls of(entry) for all entries of committed updates with this priority.
  template <class F>
  void each_of(uint8_t prio, F of) REQUIRES(mu) {
    if (count_[prio] == 0) return;
    for (const UpdateRef& u : updates_) {
      if (!u->committed) continue;
      for (uint32_t row = 0; row < u->n; ++row)
        if (const uint32_t id = id_of(*u, row); (state_[id] & ~kClaimed) == prio)
          of(Entry{u.get(), row, id});
    }
  }

  // Claims up to `max` rows with priorities up to `step` (UINT64_MAX: all, infinity last).
  void pop(uint64_t step, size_t max, Claim* c) REQUIRES(mu);
  // The rows of the claim are written. Returns false, and does nothing, if other entries are
  // blocked after them.
  bool finish(Claim& c) REQUIRES(mu);
  // The same where there are such entries: prio(update, row) is the priority of an entry that is
  // now the oldest.
  template <class Priority>
  void finish_chained(Claim& c, Priority prio) REQUIRES(mu) {
    uint64_t done = 0;
    for (Claim::Run& run : c.runs) {
      StepUpdate* u = run.update;
      written(c, run);
      for (uint32_t i = run.begin; i < run.end; ++i) {
        uint64_t link = u->next.empty() ? 0 : u->next[c.rows[i]];
        if (!link) {
          ++done;
          continue;
        }
        StepUpdate* after = find_update(static_cast<uint32_t>((link - 1) >> 32));
        uint32_t row = static_cast<uint32_t>(link - 1);
        enqueue(id_of(*after, row), prio(*after, row));
      }
      release_if_done(run);
    }
    wrote(done);
  }

  uint32_t id_of(const StepUpdate& u, uint32_t row) const {
    return u.pages[row / kPage] * kPage + row % kPage;
  }
  // Rows that are claimed but unwritten, of priorities up to `step`.
  bool in_flight_until(uint64_t step) const REQUIRES(mu);
  bool unwritten_before(uint64_t step) const REQUIRES(mu) {
    return !updates_.empty() && updates_.front()->committed && updates_.front()->step < step;
  }
  WindowStats stats() const REQUIRES(mu);

  // These take no lock.
  bool pending_until(uint64_t step) const {
    return pending_rows() != 0 && soonest_.load(std::memory_order_acquire) <= step;
  }
  uint64_t pending_rows() const {
    schedule_point();
    return pending_total_.load(std::memory_order_acquire);
  }
  uint32_t updates() const { return live_.load(std::memory_order_relaxed); }

 private:
  // The state of an entry, one byte: a priority, with kClaimed while a thread is writing it; or
  // kBlocked; or kDone.
  static constexpr uint8_t kClaimed = 0x80;
  static constexpr uint8_t kDone = 0x7f;  // nothing is pending
  struct Page {
    StepUpdate* update = nullptr;
    uint32_t first_row = 0;
  };

  StepUpdate* find_update(uint32_t seq) const REQUIRES(mu);
  Entry find_pending(StepUpdate& u, uint32_t slot) REQUIRES(mu);
  void release(StepUpdate& u) REQUIRES(mu);
  uint32_t limit_distance(uint64_t step) const REQUIRES(mu);
  size_t search(uint32_t* ids, size_t max) REQUIRES(mu);
  void written(const Claim& c, const Claim::Run& run) REQUIRES(mu);
  void release_if_done(Claim::Run& run) REQUIRES(mu);
  void wrote(uint64_t rows) REQUIRES(mu);
  void note_soonest() REQUIRES(mu);

  std::atomic<uint64_t> pending_total_{0};
  std::atomic<uint64_t>* pending_of_all_ = nullptr;  // never below pending_total_
  // The step that waits for the most urgent pending row. 0 if that is the next commit or unknown;
  // UINT64_MAX if no step waits. Set at the end of each section.
  std::atomic<uint64_t> soonest_{UINT64_MAX};
  std::atomic<uint32_t> live_{0};            // updates_.size()
  uint64_t next_commit_ GUARDED_BY(mu) = 0;  // the window's
  Vector<uint8_t> state_ GUARDED_BY(mu);     // by entry
  Vector<Page> pages_ GUARDED_BY(mu);
  Vector<uint32_t> free_pages_ GUARDED_BY(mu);
  std::unique_ptr<Queue> queue_ GUARDED_BY(mu);
  uint64_t count_[kRing + 1] GUARDED_BY(
      mu) = {};  // pending rows by priority, claimed ones included
  uint64_t queued_[kRing + 1] GUARDED_BY(mu) = {};  // of these, unclaimed
  // unwritten ones, and the prepared one; ascending steps
  Vector<UpdateRef> updates_ GUARDED_BY(mu);
  uint32_t next_seq_ GUARDED_BY(mu) = 0;
  bool unqueued_ GUARDED_BY(mu) = false;  // a queue entry is missing, or wrong
  WindowStats stats_ GUARDED_BY(mu);
};

}  // namespace frugal
