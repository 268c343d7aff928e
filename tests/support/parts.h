// Parts, rank gradients and updates as the engine makes them, of rows that a test names.
#pragma once
#include <algorithm>
#include <set>
#include <vector>

#include "window/step_update.h"

namespace frugal {

using Slots = std::vector<uint32_t>;

// A resolved part whose keys are `keys`, slots, in any order and any number of times. Its rows are
// indexed, and it has room for the results of a link.
inline PartRef resolved_part(BufferPool& pool, uint64_t step, uint32_t rank, const Slots& keys) {
  PartRef part = make_part();
  part->step = step;
  part->rank = rank;
  const std::set<uint32_t> distinct(keys.begin(), keys.end());
  part->n = part->occurrences = keys.size();
  part->distinct = distinct.size();
  // (Buffers of more than they hold, so that a part without rows has them, too.)
  bool memory = pool.get((keys.size() + 1) * sizeof(uint32_t), &part->slots) == FRUGAL_OK &&
                pool.get((distinct.size() + RowFinder::kPadding) * sizeof(uint32_t), &part->rows) ==
                    FRUGAL_OK &&
                pool.get(distinct.size() + 1, &part->next) == FRUGAL_OK;
  if (!memory) throw std::bad_alloc();
  std::copy(keys.begin(), keys.end(), part->slots.as<uint32_t>());
  std::copy(distinct.begin(), distinct.end(), part->rows.as<uint32_t>());
  std::fill_n(part->rows.as<uint32_t>() + distinct.size(), RowFinder::kPadding, UINT32_MAX);
  std::fill_n(part->next.as<uint8_t>(), distinct.size() + 1, uint8_t{0xee});
  if (part->finder.build(pool, part->row_slots(), part->distinct) != FRUGAL_OK)
    throw std::bad_alloc();
  part->state.store(Part::kResolved);
  return part;
}

// The rank gradients of the parts' ranks. With a stride they have sums of that many floats a row,
// which the caller fills.
inline UpdateRef make_update(BufferPool& pool, uint64_t step, const std::vector<PartRef>& parts,
                             size_t stride = 0) {
  UpdateRef update = std::allocate_shared<StepUpdate>(HeapAllocator<StepUpdate>());
  update->step = step;
  for (const PartRef& part : parts) {
    RankGradients& h = update->ranks.emplace_back();
    h.rank = part->rank;
    h.part = part;
    h.stride = stride;
    if (pool.get(part->distinct * stride * sizeof(float), &h.sums) != FRUGAL_OK)
      throw std::bad_alloc();
  }
  return update;
}

}  // namespace frugal
