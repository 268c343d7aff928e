// Reading tables out after the controller's death: as of the last committed step, from what this
// process has mapped. engine/ledger.h describes what that is and why it is enough.
//
// No thread writes any more. Addresses and counts are checked all the same: a controller that died
// by its own fault may have left anything.
#pragma once
#include <atomic>
#include <memory>

#include "base/buffer.h"
#include "engine/ledger.h"
#include "process/regions.h"
#include "storage/key_index.h"

namespace frugal {

// The memory of a controller that is dead, or will be.
struct ControllerMemory {
  Regions* regions = nullptr;
  const LedgerRoot* root = nullptr;

  Status committed(uint64_t* step) const;
  // No thread writes any more, although the controller's process may live: it has closed the
  // engine.
  bool ended() const { return root && root->ended.load(std::memory_order_acquire) != 0; }
};

// The read-out of one table. All rows that wait to be written are worked out when it is opened;
// other rows stay where they are.
class TableReadout : public HeapObject {
 public:
  struct Source {
    uint64_t record = kNoShmAddress, handle = 0;  // in the ledger
    const char* name = "";
    RowLayout layout;
    int32_t optimizer = FRUGAL_SGD;  // the kind that `layout` is for
    Mapping arrays[Rows::kArrays];
    uint64_t capacity = 0;
    uint64_t kinds_seen = 0;  // LedgerRoot::kinds when this process took this in
    bool hashed = false, lazy = false;
  };
  static Status open(const ControllerMemory& controller_memory, const Source& source,
                     BufferPool& pool, std::unique_ptr<TableReadout>* out);

  uint64_t count() const { return count_; }
  // As Rows::enumerate.
  size_t keys(uint64_t* cursor, uint64_t* out, size_t capacity) const;
  // Slots of keys: kNoSlot for *padding (if not null), kMissingSlot where there is no row. Ids were
  // checked.
  void find(const uint64_t* keys, size_t n, const uint64_t* padding, uint32_t* slots) const;
  struct Row {
    const device::Element *values, *state;
  };
  // A row that exists. If no call has used it, it is made in `scratch`, of layout().bytes().
  Row row(uint32_t slot, char* scratch) const;
  bool untouched(uint32_t slot) const { return lazy_ && flags_[slot] == 0; }
  const RowLayout& layout() const { return layout_; }

 private:
  TableReadout() = default;
  class Reach;
  struct Unwritten;  // an update that is committed and not wholly written
  struct Torn {      // a row in the middle of its write, and what it was before
    uint32_t slot;
    const char *values, *state;
  };
  using Updates = Vector<std::unique_ptr<Unwritten>>;
  Status work_out(Reach& reach, const LedgerTable& record, BufferPool& pool);
  Status take_updates(Reach& reach, const LedgerTable& record, Updates* updates);
  Status take_terms(Reach& reach, uint64_t shm_address, const LedgerUpdate& from, Unwritten* u,
                    bool* seen) const;
  Status take_rows(Reach& reach, const LedgerUpdate& from, Unwritten* u) const;
  Status take_before_images(Reach& reach, const LedgerTable& record, const Updates& updates,
                            Vector<Torn>* torn);
  Status index_keys();
  bool exists(uint32_t slot) const;
  device::RowsRef copies() const;

  String name_;
  RowLayout layout_;
  int32_t optimizer_ = FRUGAL_SGD;
  device::RowsView rows_{};
  const uint64_t* keys_ = nullptr;
  const uint8_t* flags_ = nullptr;
  uint64_t slots_ = 0, count_ = 0, committed_ = 0;
  bool hashed_ = false, lazy_ = false;
  arith::InitSpec init_{};
  MemoryBudget budget_;
  KeyIndex index_;
  // Rows that differ from those in the table: ascending slots, and copies.
  Vector<uint32_t> changed_;
  Buffer changed_values_, changed_state_;
};

}  // namespace frugal
