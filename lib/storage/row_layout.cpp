// The layout of a row in memory.
#include <algorithm>

#include "base/assert.h"
#include "storage/row_memory.h"

namespace frugal {

RowLayout RowLayout::of(uint32_t dim, int32_t optimizer) {
  RowLayout l;
  l.dim = dim;
  // Small rows never straddle a cache line; larger ones start on one. A stride that is a multiple
  // of 128 bytes keeps rows on the 128-byte lines of a GPU's link where dim allows it.
  const size_t bytes = l.value_bytes();
  l.value_pitch = 16;
  if (bytes <= 128)
    while (l.value_pitch < bytes) l.value_pitch *= 2;
  else
    l.value_pitch = (bytes + 63) / 64 * 64;
  FRUGAL_ASSERT(l.value_pitch >= bytes && (64 % l.value_pitch == 0 || l.value_pitch % 64 == 0));
  l.sums_stride = l.value_pitch / sizeof(device::Element);
  l.state_floats = arith::state_floats(optimizer, dim);
  if (arith::optimizer_of(optimizer).of_row) {
    l.state_pitch = l.state_floats * sizeof(device::Element);
  } else {
    l.state_columns = arith::state_columns(optimizer);
    l.state_pitch = l.state_columns * l.value_pitch;
    FRUGAL_ASSERT(l.state_floats == l.state_columns * dim);
  }
  return l;
}

device::RowsRef RowLayout::at(void* values, void* state) const {
  device::RowsRef ref{};
  ref.values = static_cast<device::Element*>(values);
  ref.value_pitch = value_pitch;
  ref.state = static_cast<device::Element*>(state);
  ref.state_pitch = state_pitch;
  ref.state_second = state_columns == 2 ? value_pitch : 0;
  ref.dim = dim;
  return ref;
}

void RowLayout::export_row(const device::Element* values, const device::Element* state,
                           float* out) const {
  device::load_elements(values, out, dim);
  if (state) export_state(state, out + dim);
}

void RowLayout::export_state(const device::Element* from, float* out) const {
  if (state_columns == 0) {
    if (state_floats) device::load_elements(from, out, 1);
    return;
  }
  for (uint32_t c = 0; c < state_columns; ++c)
    device::load_elements(device::behind(from, c * value_pitch), out + c * dim, dim);
}

void RowLayout::import_state(const float* in, device::Element* to) const {
  if (state_columns == 0) {
    if (state_floats) device::store_elements(in, to, 1);
    return;
  }
  for (uint32_t c = 0; c < state_columns; ++c)
    device::store_elements(in + c * dim, device::behind(to, c * value_pitch), dim);
}

void RowLayout::new_state(const arith::InitSpec& init, device::Element* to) const {
  for (uint32_t c = 0; c < init.state_columns; ++c)
    std::fill_n(device::behind(to, c * value_pitch), init.column_floats,
                device::stored_as<device::Element>(init.state[c]));
}

}  // namespace frugal
