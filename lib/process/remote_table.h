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
  explicit RemoteTable(const std::shared_ptr<Pins>& pins) : pinned(pins), pinned_state(pins) {}
  ~RemoteTable();
  // What the controller has left of it. The first who asks works it out.
  Status remains(const Remains& of, BufferPool& pool, TableReadout** out);

  uint64_t id = 0;             // its handle in the controller
  frugal_table_info info{};
  RowLayout layout;
  device::RowsView rows{};
  Mapping arrays[Rows::kArrays];
  PinnedSlabs pinned, pinned_state;  // `rows`, as far as devices see them
  uint64_t ledger = kNoPlace;  // its record in the controller's ledger
  bool lazy = false;

 private:
  Mutex readout_mu_;
  std::unique_ptr<TableReadout> readout_;  // when the controller is dead and somebody has asked
};
using RemoteTableRef = std::shared_ptr<RemoteTable>;

// Its id is its number, for the controller.
struct RemoteBatch final : AnyBatch {
  Vector<RemoteTableRef> tables;
  size_t size() const override { return tables.size(); }
  const AnyTable& table(size_t part) const override { return *tables[part]; }
};
using RemoteBatchRef = std::shared_ptr<RemoteBatch>;

}  // namespace frugal
