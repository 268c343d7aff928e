// Keys that ranks have declared for steps to come: what of them is to be resolved, linked or warmed
// next, what a gate waits for, and which parts there are of a step, a rank, a table.
//
// Each step counts its parts by what is missing, so a gate looks at steps, and not at parts.
// Cursors stand before the first part of which something may be missing: the next one is at hand.
// The batches of a rank for a step are a chain: a call for one rank looks at no others.
//
// The lock is taken below the engine's mutex, and above those of windows and rows. Who resolves or
// links a part has taken it by next_to_..., and tells when it is done: nobody takes a batch out
// meanwhile.
#pragma once
#include "base/assert.h"
#include "base/sync.h"
#include "engine/gpu.h"
#include "engine/table.h"

namespace frugal {

constexpr uint32_t kMostBatches = 4096;  // of a rank for a step: calls look through all of them

class Declarations {
 public:
  // A part of a declaration.
  struct Item {
    BatchRef batch;
    uint32_t index = 0;
    PartRef now;  // a part that is revoked is another one afterwards
    const PartRef& part() const { return now; }
    const TableRef& table() const { return batch->tables[index]; }
  };
  // Steps in [first, last]; of one rank, or all; of one table, or all.
  struct Which {
    uint64_t first = 0, last = kNoStep;
    uint32_t rank = kNoRank;
    const Table* table = nullptr;
  };
  // What a rank has declared for a step: one batch, or (null) all.
  struct Share {
    uint64_t step = 0;
    uint32_t rank = 0;
    const Batch* one = nullptr;
  };

  Mutex& mutex() RETURN_CAPABILITY(mu_) { return mu_; }
  // visit(batch, index of a part), in the order of steps, and in each of declarations.
  template <class Visit>
  void each(const Which& which, Visit visit) REQUIRES(mu_) {
    const auto end = steps_.upper_bound(which.last);
    for (auto at = steps_.lower_bound(which.first); at != end; ++at)
      at->second.each(which.rank, [&](Batch& b) { b.each(which.table, visit); });
  }

  // --- Coming and going
  // `download`: of the keys that are on their way, or null. `alone`: nothing waited to be resolved.
  // What fails has entered nothing.
  Status add(const BatchRef& batch, bool want_handle, std::shared_ptr<KeyDownload> download,
             bool* alone);
  // Who joins as a rank declares steps from `from` on anew. What its predecessor has declared for
  // these stays, but does not count as its own. Ranks that come and go without an end are bounded,
  // too.
  void joined(uint32_t rank, uint64_t from);
  // The first and the last step that something is declared for. False: nothing is.
  bool range(uint64_t* first, uint64_t* last);
  // Of a rank, for steps from `from` on. Or null.
  BatchRef any_of(uint32_t rank, uint64_t from);
  // Nobody begins to resolve parts of these. False: none is there.
  bool close(const Share& share);
  // Takes these out, and their parts out of their windows, and lets go of their places. False: not
  // now. Somebody works on them, or links others of their step, which would lose what they have in
  // common.
  bool take_out(const Share& share);
  // Those for steps up to `step` have served, and nobody declares for these any more. In turn:
  // their parts that hold places, which the caller lets go of;
  struct Held {
    TableRef table;
    PartRef part;
  };
  Vector<Held> begin_retiring(uint64_t step);
  // takes out the batches of the first step, if that is one up to `step`, without any memory;
  bool retire_one(uint64_t step, Vector<BatchRef>* out);
  // and that was all.
  void end_retiring();
  // The last two, with the handles of all of these.
  void retire(uint64_t step);
  // A table goes: nobody begins to resolve parts of it.
  void close_table(const Table& table);
  // Its parts are none any more; not while anybody resolves or links. Returns whether they are.
  bool drop_table(const Table& table);

  // --- Work
  // The next part to be resolved of steps up to `up_to`; it is the caller's until resolved() or
  // put_back(). (Its step may be committed meanwhile. Then it is none any more, and those two let
  // go of what it has got.) False, and `out` names one: it waits for places, and those behind it
  // wait, too.
  // `stale`: there were some of tables whose reserving is paused; the calls of their step resolve
  // them.
  bool next_to_resolve(uint64_t up_to, Item* out, bool* stale);
  void resolved(const Item& item, bool done);
  // It has found no places now (Rows::tier()), and is the next again.
  void put_back(const Item& item);
  // The next to be linked of steps in [base, end).
  bool next_to_link(uint64_t base, uint64_t end, Item* out);
  void linked(const Item& item, bool done);
  // The next `rows` rows of a step, in the order of declarations, that are to be brought into the
  // caches, of all that fit into `most` bytes. They have been when `take` is set.
  bool next_to_warm(uint64_t step, size_t most, size_t rows, bool take, Item* out, size_t* from,
                    size_t* end);
  // The first step up to `step` whose parts are not all resolved or, from step `links` on, linked.
  // kNoStep: there is none.
  uint64_t unready(uint64_t step, uint64_t links);

  // --- Keys that devices send
  bool downloading() const { return downloading_.load() != 0; }
  Vector<std::shared_ptr<KeyDownload>> downloads();
  // Takes in those that have arrived, without any memory.
  void downloaded();
  void forget_downloads();

  // --- What is to be done with the lock held
  // A part that nobody has begun to resolve: nobody will.
  void never_resolve(Batch& batch, size_t index, Part::State instead) REQUIRES(mu_);
  // It lets go of its places. The calls of its step resolve it again.
  void give_up(Batch& batch, size_t index) REQUIRES(mu_);
  // Parts of the last step behind `step` that has any give up their places (Rows::tier()), for the
  // step's sake, and are to be resolved again: those of batches that may() names, if nobody is
  // linking others of their step. Returns whether there were any.
  template <class May>
  bool revoke(const Table& table, uint64_t step, BufferPool& pool, May may) REQUIRES(mu_);
  // Nobody is in the middle of finding rows of the table, or of letting go of some: all who hold
  // places are resolved parts.
  bool quiet(const Table& table) REQUIRES(mu_);
  // Some rows of the table are none any more: finds out who holds their places. If the table is not
  // quiet, or memory is short, that is left to the next who calls this.
  void recount(Table& table) REQUIRES(mu_);
  // The same if it has to be, without the lock held.
  void recount_unknown(Table& table);

 private:
  struct Step {
    // In the order of declarations. Null: taken out, which is the case of less than half.
    Vector<BatchRef> batches;
    size_t gone = 0;  // of these null
    struct OfRank {
      uint32_t own = 0, former = 0;  // of its trainer; of those that had the rank before
      Batch *first = nullptr, *last = nullptr;
    };
    Vector<OfRank> of_rank;
    // Parts: declared; not resolved; resolved, but not linked; of these, those that nobody links;
    // and those that somebody does.
    uint32_t declared = 0, unresolved = 0, unlinked = 0, linkable = 0, linking = 0;
    // Batches before these have nothing to be resolved, or linked; rows before these are warm.
    size_t resolve_at = 0, link_at = 0;
    size_t warm_at = 0, warm_part = 0, warm_bytes = 0;

    Batch* from(size_t at) const {
      while (at < batches.size() && !batches[at]) ++at;
      return at < batches.size() ? batches[at].get() : nullptr;
    }
    // Of a rank, or of all.
    Batch* first(uint32_t rank) const {
      if (rank == kNoRank) return from(0);
      return rank < of_rank.size() ? of_rank[rank].first : nullptr;
    }
    // visit(batch): of a rank, or of all. A rank's that is visited may be removed.
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
  // Nobody lets go of what a part of this batch holds from now on.
  bool served(const Batch& b) const REQUIRES(mu_) {
    return !b.entered || (retiring_ && b.step <= retiring_to_);
  }
  bool make_anew(Step& step, Batch& batch, size_t index, BufferPool& pool) REQUIRES(mu_);

  Mutex mu_;
  Steps steps_ GUARDED_BY(mu_);  // none is there that nothing is declared for
  // Parts.
  uint32_t declared_ GUARDED_BY(mu_) = 0;
  uint32_t resolving_ GUARDED_BY(mu_) = 0, linking_ GUARDED_BY(mu_) = 0;
  // Parts of steps that retire have let go of places, and are there as yet: of steps up to this.
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
