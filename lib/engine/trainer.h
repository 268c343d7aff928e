// A trainer of the engine: its steps, its caches, and what other threads notify it of.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "base/heap.h"
#include "base/sync.h"
#include "checkpoint/blobs.h"
#include "engine/cache_refresh.h"
#include "engine/control.h"
#include "engine/counters.h"
#include "engine/gpu.h"
#include "engine/session.h"
#include "engine/table_cache.h"
#include "window/step_update.h"

namespace frugal {

// A refresh of the caches of a trainer whose cached rows are in device memory of another process.
// It lists what is to be done there (process/client_gpu.cpp does it). Lists are in the arena.
struct RemoteRefresh {
  struct Sums {
    uint64_t shm_address, bytes;
  };
  struct Update {
    UpdateRef update;                  // the process reads its sums
    Vector<Sums> sums;                 // of its ranks
    Vector<Buffer> copies;             // of those that other processes do not see
    Buffer cache_slots, start, terms;  // CachedRowUpdate
    uint64_t count = 0, term_count = 0, now = 0;
  };
  struct OfTable {
    TableRef table;
    uint64_t cache_slots = 0;  // the number of cache slots
    Buffer admitted, to;
    uint64_t count = 0;
    Vector<Update> updates;
  };
  uint64_t number = 0;
  Vector<OfTable> tables;
};

// Cached rows in the device memory of another process. `pool` is in the arena.
class AttachedCachedRows final : public CachedRows {
 public:
  AttachedCachedRows(TableRef table, uint64_t cache_slots, BufferPool& pool, const Ledger& ledger,
                     RemoteRefresh* out)
      : table_(std::move(table)),
        cache_slots_(cache_slots),
        pool_(pool),
        ledger_(ledger),
        out_(out) {}
  Status refresh(const CachePlan& plan, const Vector<DueUpdate>& due) override;

 private:
  const TableRef table_;
  const uint64_t cache_slots_;
  BufferPool& pool_;
  const Ledger& ledger_;
  RemoteRefresh* const out_;
};

// What a trainer in another process has used of its step, and the engine does not know yet.
class UsedByAttached {
 public:
  virtual void tell() = 0;

 protected:
  ~UsedByAttached() = default;
};

// Rows that a step has created, or of which it is the earliest step that has used them. With
// staleness ranks are in different steps, and undoing that step takes the row back. The rows bear
// its mark, and are not cached before its commit.
//
// Where rows may be stored, rows that a call has found for undeclared keys stay here as long, too:
// the part holds their slots.
struct CreatedRows {
  TableRef table;
  Vector<uint32_t> slots, earlier;
  PartRef held;  // or null
  // The step is committed: the rows exist for good.
  void commit(uint64_t step) const {
    for (const Vector<uint32_t>* of : {&slots, &earlier})
      table->rows.commit(of->data(), of->size(), step);
    if (held) held->release_hold(table->rows);
  }
  // The rows no longer exist. Their slots stay theirs while they have holders.
  void undo() const {
    for (const Vector<uint32_t>* of : {&slots, &earlier}) table->rows.undo(of->data(), of->size());
    if (held) held->release_hold(table->rows);
  }
};

// Cached rows of a trainer in device memory of another process. With each step that it begins, that
// process reports which refreshes it has carried out. Guarded by the trainer's call_mu.
struct RemoteCachedRows {
  bool exist = false;
  uint64_t refreshes = 0, done = 0;  // numbers of the last
  Vector<uint64_t> refused;          // tables for whose cached rows that device has no memory
  bool has_refused(uint64_t table) const {
    return std::find(refused.begin(), refused.end(), table) != refused.end();
  }
  RemoteRefresh refresh;  // to be sent next
};

// The process of a trainer, where that is another one.
struct TrainerProcess {
  // When it was last heard of (now_ns()); 0: the trainer is a thread of this process.
  std::atomic<uint64_t> heard{0};
  // Counts the aborts for it, in memory that the process sees as well. Or null.
  std::atomic<std::atomic<uint32_t>*> notices{nullptr};
  Mutex mu;  // before call_mu
  UsedByAttached* used GUARDED_BY(mu) = nullptr;
};

// Its share of the engine's counters, and the memory of its caches.
struct TrainerCounts {
  std::atomic<uint64_t> keys_looked_up{0}, keys_pushed{0}, cache_hits{0}, cache_misses{0},
      gate_wait_ns{0};
  std::atomic<uint64_t> host_cache_bytes{0}, hbm_cache_bytes{0};
};

struct Trainer : AnyTrainer {
  uint64_t cache_bytes = 0;
  double cache_ratio = 0;
  RemoteCachedRows remote_cached_rows;
  TrainerProcess process;
  TrainerCounts counts;
  LookupTimes lookups GUARDED_BY(call_mu);
  std::atomic<bool> reaped{false};   // its GPU, or its process's, has failed; its steps are undone
  std::atomic<bool> pinning{false};  // counts among the pinner's
  // The trainer has a GPU, and the tables' memory is being pinned for it. No step begins before all
  // is.
  enum Pins : uint32_t { kPinned, kToPin, kPinFailed };
  std::atomic<uint32_t> pins{kPinned};
  // Changed with the engine's mutex held. The trainer's own calls may read it without.
  std::atomic<bool> in_step{false};
  uint64_t next_step GUARDED_BY(control) = kNoStep;  // to begin next; kNoStep: any (the first step)
  CacheRefresh refresh GUARDED_BY(control);
  std::atomic<uint32_t> abort_notice{0};  // aborts to report to this rank, one in each call
  // The rank whose loss caused the last abort; until this rank begins a step.
  std::atomic<uint32_t> lost_peer{kNoRank};
  std::atomic<bool> undo_pending{false};  // what call_mu guards is still of an aborted step
  struct Late {
    UpdateRef update;
    TableRef table;
  };
  Vector<Late> backlog GUARDED_BY(control);  // committed updates that the caches have not applied
  // Guarded by call_mu (`caches` also by `refresh`, and outside steps):
  Vector<CreatedRows> created;
  std::unique_ptr<Blob> blob;  // of the step; or null
  Map<const Table*, TableCache> caches;
  std::atomic<bool> has_cache{false};
};
using TrainerRef = std::shared_ptr<Trainer>;

}  // namespace frugal
