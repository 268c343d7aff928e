#include "window/apply.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace frugal {
namespace {

// With staleness a row may be read concurrently: it is computed elsewhere and then stored.
void store_terms(const Rows& rows, const StepUpdate& u, RowWrite& write, ApplyScratch& scratch) {
  const RowLayout& layout = rows.layout();
  const TermList& terms = scratch.terms;
  FRUGAL_ASSERT(scratch.row.size() >= layout.bytes());
  char* const row = scratch.row.data();
  const device::RowsRef made = layout.at(row, row + layout.value_pitch);
  for (size_t i = 0; i < terms.slots.size(); ++i) {
    const uint32_t slot = terms.slots[i], here = 0;
    std::memcpy(made.values, rows.values(slot), made.value_pitch);
    if (made.state_pitch) std::memcpy(made.state, rows.state(slot), made.state_pitch);
    const uint32_t start[2] = {0, terms.start[i + 1] - terms.start[i]};
    device::kernels().apply_terms(made, u.scalars, &here, 1, terms.terms.data() + terms.start[i],
                                  start, nullptr);
    write.store(i, made.values, made.state);
  }
}

// Rows whose terms are in the scratch; `last`: they end their chunk.
void apply_terms(const ApplyTo& to, const StepUpdate& u, const RowWrite::Purpose& purpose,
                 bool last, ApplyScratch& scratch) {
  TermList& terms = scratch.terms;
  FRUGAL_ASSERT(!u.ranks[0].lent);
  if (to.copied)
    for (uint32_t& slot : terms.slots) {
      const auto at = std::lower_bound(to.copied->begin(), to.copied->end(), slot);
      slot = static_cast<uint32_t>(at - to.copied->begin());
    }
  RowWrite write = to.table ? RowWrite(*to.table, terms.slots.data(), terms.slots.size(), purpose)
                            : RowWrite(to.copies);
  if (to.table && to.table->versioned())
    store_terms(*to.table, u, write, scratch);
  else
    device::kernels().apply_terms(write.in_place(), u.scalars, terms.slots.data(),
                                  terms.slots.size(), terms.terms.data(), terms.start.data(),
                                  write.undo());
  if (last) write.chunk_done();
}

}  // namespace

bool is_direct(const ApplyTo& to, const StepUpdate& u) {
  return u.ranks.size() == 1 && to.table && !to.table->versioned();
}

size_t apply(const ApplyTo& to, const StepUpdate& u, const UpdateChunk& chunk,
             ApplyScratch* scratch) {
  const device::Kernels& k = device::kernels();
  const RowWrite::Purpose purpose{RowWrite::What::kUpdate, u.record.get(), nullptr, chunk.number,
                                  u.step};
  if (!is_direct(to, u)) {
    size_t rows = 0;
    u.merge_range(chunk.low, chunk.high, &scratch->terms, [&](bool last) {
      rows += scratch->terms.slots.size();
      apply_terms(to, u, purpose, last, *scratch);
    });
    FRUGAL_ASSERT(rows);
    return rows;
  }
  const RankGradients& h = u.ranks[0];
  const size_t first = chunk.number * kChunkRows, n = std::min(kChunkRows, h.rows() - first);
  RowWrite write(*to.table, h.slots() + first, n, purpose);
  if (h.lent)
    k.apply_fused(write.in_place(), u.scalars, h.part->pairs.as<uint64_t>(), h.slots(),
                  h.part->row_start(), first, first + n, h.source, write.undo());
  else
    k.apply(write.in_place(), u.scalars, h.slots() + first, n,
            h.sums.as<float>() + first * h.stride, h.stride, write.undo());
  write.chunk_done();
  return n;
}

size_t apply(const ApplyTo& to, const StepUpdate& u, const UpdateEntries& which,
             ApplyScratch* scratch) {
  const device::Kernels& k = device::kernels();
  const auto purpose = [&](size_t first) {
    return RowWrite::Purpose{RowWrite::What::kUpdate, u.record.get(), which.entries + first, 0,
                             u.step};
  };
  if (!is_direct(to, u)) {
    for (size_t i = 0; i < which.n;) {
      const size_t first = i;
      scratch->terms.clear();
      for (; i < which.n && !scratch->terms.full(u.ranks.size()); ++i)
        u.add_terms(which.entries[i], &scratch->terms);
      scratch->terms.close();
      apply_terms(to, u, purpose(first), false, *scratch);
    }
    return which.n;
  }
  const RankGradients& h = u.ranks[0];
  const RowWrite write(*to.table, u.slots, which.n, purpose(0), which.entries);
  if (h.lent)
    k.apply_fused_indexed(write.in_place(), u.scalars, h.part->pairs.as<uint64_t>(), u.slots,
                          h.part->row_start(), which.entries, which.n, h.source, write.undo());
  else
    k.apply_indexed(write.in_place(), u.scalars, u.slots, which.entries, which.n,
                    h.sums.as<float>(), h.stride, write.undo());
  return which.n;
}

}  // namespace frugal
