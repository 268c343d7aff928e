// A table of an engine in another process, and what a trainer has declared of such tables.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>

#include "base/sync.h"
#include "engine/session.h"
#include "process/controller.h"
#include "process/pinned_slabs.h"
#include "process/readout.h"
#include "storage/rows.h"

namespace frugal {

struct RemoteTable : AnyTable {
  explicit RemoteTable(const std::shared_ptr<Pins>& pins) : pinned(pins) {}
  ~RemoteTable();
  // What the controller has left of the table. The first call works it out. `kinds_seen`:
  // LedgerRoot::kinds as this process last compared it.
  Status open_readout(const ControllerMemory& of, uint64_t kinds_seen, BufferPool& pool,
                      TableReadout** out);

  uint64_t id = 0;  // its handle in the controller
  // What depends on the kind of optimizer changes outside of steps, with kind_mu: `ledger`,
  // `kinds`, and what `info`, `layout` and `arrays` hold for state. Trainers take a change in when
  // they begin a step, other threads with the lock.
  frugal_table_info info{};
  RowLayout layout;
  device::RowsView rows{};  // values
  Mapping arrays[Rows::kArrays];
  PinnedSlabs pinned;                         // values, as far as devices see them
  std::unique_ptr<PinnedSlabs> pinned_state;  // or null: no state
  uint64_t ledger = kNoShmAddress;            // its record in the controller's ledger
  uint64_t kinds = 0;                         // how often it got another kind of optimizer
  bool lazy = false;
  Mutex kind_mu;
  // Takes what depends on the kind from a later description of the table.
  void take_kind(RemoteTable& later);
  device::RowsView with_state();
  size_t exported_bytes(bool state) {
    Lock lock(kind_mu);
    return layout.exported_bytes(state);
  }

 private:
  // State that it had: kernels of an earlier step may be reading it.
  struct Former {
    Mapping mapping;
    std::unique_ptr<PinnedSlabs> pinned;
  };
  Vector<Former> former_ GUARDED_BY(kind_mu);
  Mutex readout_mu_;
  // Set when the controller is dead and a call has read the table.
  std::unique_ptr<TableReadout> readout_ GUARDED_BY(readout_mu_);
};
using RemoteTableRef = std::shared_ptr<RemoteTable>;

// Its `id` is the number by which the controller knows it.
struct RemoteBatch final : AnyBatch {
  Vector<RemoteTableRef> tables;
  size_t size() const override { return tables.size(); }
  const AnyTable& table(size_t part) const override { return *tables[part]; }
};
using RemoteBatchRef = std::shared_ptr<RemoteBatch>;

}  // namespace frugal
