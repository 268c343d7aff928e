#include "cache/cached_rows.h"

#include <cstring>

namespace frugal {

Status HostCachedRows::open(const Rows& rows, uint64_t cache_slots, BufferPool& pool,
                            std::unique_ptr<CachedRows>* out) {
  auto made = std::make_unique<HostCachedRows>();
  const RowLayout& layout = rows.layout();
  FRUGAL_TRY(pool.get(cache_slots * layout.value_pitch, &made->values_));
  FRUGAL_TRY(pool.get(cache_slots * layout.state_pitch, &made->state_));
  made->rows_ = rows.ref();
  made->cached_rows_ = layout.at(made->values_.data(), made->state_.data());
  made->at_.host = made->cached_rows_.values;
  *out = std::move(made);
  return FRUGAL_OK;
}

Status HostCachedRows::refresh(const CachePlan& plan, const Vector<DueUpdate>& due) {
  for (const DueUpdate& d : due) apply(d.touched(plan), *d.update);
  fill(plan.admitted, plan.to);
  return FRUGAL_OK;
}

void HostCachedRows::apply(const CachedRowUpdate& touched, const StepUpdate& update) {
  TermList t;
  for (size_t i = 0; i < touched.cache_slots.size(); ++i) {
    t.begin_row(touched.cache_slots[i]);
    for (uint32_t k = touched.start[i]; k < touched.start[i + 1]; ++k) {
      const RankGradients& h = update.ranks[touched.terms[k].rank];
      t.add(h.sums.as<float>() + touched.terms[k].row * h.stride);
    }
  }
  t.close();
  device::kernels().apply_terms(cached_rows_, update.scalars, t.slots.data(), t.slots.size(),
                                t.terms.data(), t.start.data(), nullptr);
}

void HostCachedRows::fill(const Vector<uint32_t>& slots, const Vector<uint32_t>& cache_slots) {
  FRUGAL_ASSERT(slots.size() == cache_slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(cached_rows_.row(cache_slots[i]), rows_.row(slots[i]), cached_rows_.value_pitch);
    if (cached_rows_.state_pitch)
      std::memcpy(cached_rows_.state_row(cache_slots[i]), rows_.state_row(slots[i]),
                  cached_rows_.state_pitch);
  }
}

}  // namespace frugal
