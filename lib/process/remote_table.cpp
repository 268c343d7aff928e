#include "process/remote_table.h"

namespace frugal {

RemoteTable::~RemoteTable() {
  pinned.unpin();
  if (pinned_state) pinned_state->unpin();
  for (Mapping& m : arrays) os_release(&m);
  for (Former& f : former_) {
    f.pinned->unpin();
    os_release(&f.mapping);
  }
}

void RemoteTable::take_kind(RemoteTable& later) {
  Lock lock(kind_mu);
  if (kinds >= later.kinds) return;
  Mapping& state = arrays[Rows::kState];
  if (pinned_state) {
    former_.reserve(former_.size() + 1);
    former_.push_back({std::exchange(state, Mapping{}), std::move(pinned_state)});
  }
  info.optimizer = later.info.optimizer;
  info.state_floats = later.info.state_floats;
  layout.take_state(later.layout);
  state = std::exchange(later.arrays[Rows::kState], Mapping{});
  pinned_state = std::move(later.pinned_state);
  ledger = later.ledger;
  kinds = later.kinds;
}

device::RowsView RemoteTable::with_state() {
  Lock lock(kind_mu);
  return layout.at(arrays[Rows::kValues].base, arrays[Rows::kState].base);
}

Status RemoteTable::open_readout(const ControllerMemory& of, uint64_t kinds_seen, BufferPool& pool,
                                 TableReadout** out) {
  Lock lock(readout_mu_);
  Lock kind(kind_mu);
  if (!readout_) {
    TableReadout::Source s;
    s.record = ledger;
    s.handle = id;
    s.name = name.c_str();
    s.layout = layout;
    s.optimizer = info.optimizer;
    std::copy(std::begin(arrays), std::end(arrays), s.arrays);
    s.capacity = info.capacity;
    s.kinds_seen = kinds_seen;
    s.hashed = info.key_space == FRUGAL_HASHED;
    s.lazy = lazy;
    FRUGAL_TRY(TableReadout::open(of, s, pool, &readout_));
  }
  *out = readout_.get();
  return FRUGAL_OK;
}

}  // namespace frugal
