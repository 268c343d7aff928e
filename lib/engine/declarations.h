// Keys that ranks have declared for later steps: which of them to resolve, link or warm next, what
// a gate waits for, and which parts belong to a step, a rank or a table.
//
// Each step counts its parts by what they lack, so a gate checks steps and not parts. Cursors are
// at the first part that may lack something, so the next one is found at once. The batches of a
// rank for a step are a list, so a call for one rank visits no others.
//
// The lock is taken below the engine's mutex, and above those of windows and rows. A thread takes a
// part to resolve or link by next_to_...(), and reports when it is done. No thread takes the batch
// out meanwhile.
#pragma once
#include "base/assert.h"
#include "base/sync.h"
#include "engine/gpu.h"
#include "engine/table.h"

namespace frugal {

constexpr uint32_t kMostBatches = 4096;  // of a rank for a step: calls go through all of them

class Declarations {
 public:
  // One part of a batch.
  struct Item {
    BatchRef batch;
    uint32_t index = 0;
    PartRef now;  // the part as it was taken: a revoked one is replaced
    const PartRef& part() const { return now; }
    const TableRef& table() const { return batch->tables[index]; }
  };
  // Steps in [first, last]; of one rank or all; of one table or all.
  struct Which {
    uint64_t first = 0, last = kNoStep;
    uint32_t rank = kNoRank;
    const Table* table = nullptr;
  };
  // Batches of a rank for a step: one, or (null) all.
  struct Share {
    uint64_t step = 0;
    uint32_t rank = 0;
    const Batch* one = nullptr;
  };

  Mutex& mutex() RETURN_CAPABILITY(mu_) { return mu_; }
  // Calls visit(batch, index of a part) in the order of steps, and within a step of declarations.
  template <class Visit>
  void each(const Which& which, Visit visit) REQUIRES(mu_) {
    const auto end = steps_.upper_bound(which.last);
    for (auto at = steps_.lower_bound(which.first); at != end; ++at)
      at->second.each(which.rank, [&](Batch& b) { b.each(which.table, visit); });
  }

  // --- Adding and removing
  // `download`: of keys that a device is still sending, or null. `alone`: set to whether nothing
  // waited to be resolved. A failure has added nothing.
  Status add(const BatchRef& batch, bool want_handle, std::shared_ptr<KeyDownload> download,
             bool* alone);
  // A trainer that joins as `rank` declares steps from `from` on anew. Batches of its predecessor
  // for these steps stay, but do not count as its own. Also bounds ranks that come and go forever.
  void joined(uint32_t rank, uint64_t from);
  // The first and the last step with a declaration. False: there is none.
  bool range(uint64_t* first, uint64_t* last);
  // Any batch of the rank for steps from `from` on, or null.
  BatchRef any_of(uint32_t rank, uint64_t from);
  // No thread begins to resolve parts of these batches from now on. False: there are none.
  bool close(const Share& share);
  // Takes these batches out, takes their parts out of the windows, and releases their slots. False:
  // not now. A thread works on them, or links other parts of their step, which would lose what they
  // share.
  bool take_out(const Share& share);
  // Retires the batches for steps up to `step`: they have served, and no rank declares for these
  // steps any more. In three calls, in this order. The first returns the parts that hold slots,
  // which the caller releases.
  struct Held {
    TableRef table;
    PartRef part;
  };
  Vector<Held> begin_retiring(uint64_t step);
  // Takes out the batches of the first step, if that is at most `step`. Needs no memory.
  bool retire_one(uint64_t step, Vector<BatchRef>* out);
  // Ends it.
  void end_retiring();
  // The last two, and the handles of all these batches go.
  void retire(uint64_t step);
  // The table is about to be dropped: no thread begins to resolve parts of it.
  void close_table(const Table& table);
  // Drops the table's parts, unless a thread resolves or links one. Returns whether it did.
  bool drop_table(const Table& table);

  // --- Work
  // Takes the next part to resolve of steps up to `up_to`; the caller has it until resolved() or
  // put_back(). If its step commits meanwhile, those two release what the part has got. False with
  // `out` set: that part waits for slots, and those after it wait too. `stale`: set if parts of
  // tables whose reserving is paused were passed over; the calls of their step resolve them.
  bool next_to_resolve(uint64_t up_to, Item* out, bool* stale);
  void resolved(const Item& item, bool done);
  // The part found no slots now (Rows::tier()); it is the next one again.
  void put_back(const Item& item);
  // Takes the next part to link of steps in [base, end).
  bool next_to_link(uint64_t base, uint64_t end, Item* out);
  void linked(const Item& item, bool done);
  // The next `rows` rows of a step, in the order of declarations, to load into the processor's
  // caches; all rows together fit into `most` bytes. `take`: marks them as loaded.
  bool next_to_warm(uint64_t step, size_t most, size_t rows, bool take, Item* out, size_t* from,
                    size_t* end);
  // The first step up to `step` with parts that are not resolved or, from step `links` on, not
  // linked. kNoStep: there is none.
  uint64_t unready(uint64_t step, uint64_t links);

  // --- Keys that devices send
  bool downloading() const { return downloading_.load() != 0; }
  Vector<std::shared_ptr<KeyDownload>> downloads();
  // Takes in the keys that have been received. Needs no memory.
  void downloaded();
  void forget_downloads();

  // --- Calls with the lock held
  // The part has not begun to be resolved, and never will: it gets the state `instead`.
  void never_resolve(Batch& batch, size_t index, Part::State instead) REQUIRES(mu_);
  // The part releases its slots. The calls of its step resolve it again.
  void give_up(Batch& batch, size_t index) REQUIRES(mu_);
  // Takes slots back for the sake of `step` (Rows::tier()). Of the last step after it that has
  // resolved parts, these release their slots, and wait to be resolved again. Only batches that
  // may() accepts, and only if no thread links other parts of their step. Returns whether there
  // were any.
  template <class May>
  bool revoke(const Table& table, uint64_t step, BufferPool& pool, May may) REQUIRES(mu_);
  // No thread is finding rows of the table, or releasing some: only resolved parts hold slots.
  bool quiet(const Table& table) REQUIRES(mu_);
  // Some rows of the table were deleted: counts anew which holders their slots have. If the table
  // is not quiet, or memory is short, the next caller does it.
  void recount(Table& table) REQUIRES(mu_);
  // The same if it is due; called without the lock.
  void recount_unknown(Table& table);

 private:
  struct Step {
    // In the order of declarations. Null: taken out. Less than half are.
    Vector<BatchRef> batches;
    size_t gone = 0;  // null batches
    struct OfRank {
      uint32_t own = 0, former = 0;  // of its present trainer; of former trainers of the rank
      Batch *first = nullptr, *last = nullptr;
    };
    Vector<OfRank> of_rank;
    // Numbers of parts: declared; not resolved; resolved and not linked; of the latter, those that
    // no thread links, and those that a thread links.
    uint32_t declared = 0, unresolved = 0, unlinked = 0, linkable = 0, linking = 0;
    // No batch before these needs to be resolved, or linked. Rows before warm_at are warm.
    size_t resolve_at = 0, link_at = 0;
    size_t warm_at = 0, warm_part = 0, warm_bytes = 0;

    Batch* from(size_t at) const {
      while (at < batches.size() && !batches[at]) ++at;
      return at < batches.size() ? batches[at].get() : nullptr;
    }
    // The first batch of a rank, or of all.
    Batch* first(uint32_t rank) const {
      if (rank == kNoRank) return from(0);
      return rank < of_rank.size() ? of_rank[rank].first : nullptr;
    }
    // Calls visit(batch) for a rank, or for all. With a rank, visit may remove the batch.
    template <class Visit>
    void each(uint32_t rank, Visit visit) const {
      for (Batch *b = first(rank), *next; b; b = next) {
        next = rank == kNoRank ? from(b->at + 1) : b->after;
        FRUGAL_ASSERT(batches[b->at].get() == b && (rank == kNoRank || rank == b->rank));
        FRUGAL_ASSERT((b->after ? b->after->before : of_rank[b->rank].last) == b);
        visit(*b);
      }
    }
    template <class Visit>
    void each(const Share& share, Visit visit) const {
      if (!share.one) return each(share.rank, visit);
      if (share.one->entered) visit(*batches[share.one->at]);
    }
    void add(const BatchRef& batch);
    void remove(Batch& batch);
  };
  using Steps = Map<uint64_t, Step>;
  void count(Step& step, Batch& batch, size_t index, uint32_t by) REQUIRES(mu_);
  template <class Change>
  void change(Batch& batch, size_t index, Change change) REQUIRES(mu_);
  void set_state(Batch& batch, size_t index, Part::State state) REQUIRES(mu_);
  static void unlink(Batch& batch, size_t index);
  // The batch is taken out or retires: no other thread releases what a part of it gets from now on.
  bool served(const Batch& b) const REQUIRES(mu_) {
    return !b.entered || (retiring_ && b.step <= retiring_to_);
  }
  bool make_anew(Step& step, Batch& batch, size_t index, BufferPool& pool) REQUIRES(mu_);

  Mutex mu_;
  Steps steps_ GUARDED_BY(mu_);  // only steps with declarations
  // Numbers of parts.
  uint32_t declared_ GUARDED_BY(mu_) = 0;
  uint32_t resolving_ GUARDED_BY(mu_) = 0, linking_ GUARDED_BY(mu_) = 0;
  // Parts of steps up to retiring_to_ have released their slots, but are still here.
  bool retiring_ GUARDED_BY(mu_) = false;
  uint64_t retiring_to_ GUARDED_BY(mu_) = 0;
  struct Coming {
    std::shared_ptr<KeyDownload> download;
    BatchRef batch;
  };
  Vector<Coming> coming_ GUARDED_BY(mu_);
  std::atomic<uint32_t> downloading_{0};
};

template <class May>
bool Declarations::revoke(const Table& table, uint64_t step, BufferPool& pool, May may) {
  bool any = false;
  for (auto at = steps_.end(); !any && at != steps_.begin();) {
    if ((--at)->first <= step) break;
    Step& s = at->second;
    if (s.linking || (retiring_ && at->first <= retiring_to_)) continue;
    s.each(kNoRank, [&](Batch& b) {
      if (!may(b)) return;
      b.each(&table, [&](Batch& of, size_t i) {
        mu_.assert_held();
        if (of.parts[i]->resolved() && make_anew(s, of, i, pool)) any = true;
      });
    });
  }
  return any;
}

}  // namespace frugal
