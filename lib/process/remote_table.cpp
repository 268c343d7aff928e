#include "process/remote_table.h"

namespace frugal {

RemoteTable::~RemoteTable() {
  pinned.unpin();
  pinned_state.unpin();
  for (Mapping& m : arrays) os_release(&m);
}

Status RemoteTable::remains(const Remains& of, BufferPool& pool, TableReadout** out) {
  Lock lock(readout_mu_);
  if (!readout_) {
    TableReadout::Source s;
    s.record = ledger;
    s.handle = id;
    s.name = name.c_str();
    s.layout = layout;
    s.optimizer = info.optimizer;
    std::copy(std::begin(arrays), std::end(arrays), s.arrays);
    s.capacity = info.capacity;
    s.hashed = info.key_space == FRUGAL_HASHED;
    s.lazy = lazy;
    FRUGAL_TRY(TableReadout::open(of, s, pool, &readout_));
  }
  *out = readout_.get();
  return FRUGAL_OK;
}

}  // namespace frugal
