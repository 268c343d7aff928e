// A table's rows as a test wants them: optimizer state, and values that differ from key to key.
#pragma once
#include "storage/rows.h"

namespace frugal {

inline Rows::Config rows_config(uint64_t capacity, uint32_t dim, int32_t optimizer,
                                bool hashed = false) {
  Rows::Config c;
  c.capacity = capacity;
  c.hashed = hashed;
  c.layout = RowLayout::of(dim, optimizer);
  c.init = arith::init_spec(FRUGAL_INIT_UNIFORM, -1, 1, capacity, dim, 42, optimizer, 0.5f);
  return c;
}

}  // namespace frugal
