#include "window/step_update.h"

#include <algorithm>

namespace frugal {

void StepUpdate::make_list() {
  if (ranks.size() == 1) {
    slots = ranks[0].slots();
    n = ranks[0].rows();
    return;
  }
  size_t all = 0, terms = 0;
  for (const RankGradients& h : ranks) all += h.rows();
  merged_slots.clear();
  term_start.clear();
  term_rank.resize(all);
  term_index.resize(all);
  Vector<TermList::Cursor> cursors;
  merge(
      ranks, 0, UINT64_MAX, &cursors,
      [&](uint32_t slot) {
        merged_slots.push_back(slot);
        term_start.push_back(static_cast<uint32_t>(terms));
      },
      [&](bool has, size_t r, uint32_t row) {
        term_rank[terms] = static_cast<uint32_t>(r);
        term_index[terms] = row;
        terms += has;
      });
  term_start.push_back(static_cast<uint32_t>(terms));
  slots = merged_slots.data();
  n = merged_slots.size();
}

void StepUpdate::add_terms(size_t row, TermList* out) const {
  out->begin_row(slots[row]);
  if (ranks.size() == 1) {
    out->add(ranks[0].sums.as<float>() + row * ranks[0].stride);
    return;
  }
  for (uint32_t t = term_start[row]; t < term_start[row + 1]; ++t) {
    const RankGradients& h = ranks[term_rank[t]];
    out->add(h.sums.as<float>() + size_t{term_index[t]} * h.stride);
  }
}

void StepUpdate::cut(size_t rows, Vector<uint64_t>* bounds) const {
  bounds->clear();
  bounds->push_back(0);
  const RankGradients* most = nullptr;
  for (const RankGradients& h : ranks)
    if (!most || h.rows() > most->rows()) most = &h;
  if (most)
    for (size_t i = rows; i < most->rows(); i += rows) bounds->push_back(most->slots()[i]);
  bounds->push_back(UINT64_MAX);
}

void combine_runs(float* runs, size_t n, uint32_t dim) {
  while (n > 1) {
    size_t pairs = n / 2;
    for (size_t i = 0; i < pairs; ++i) {
      const float* left = runs + 2 * i * dim;
      const float* right = left + dim;
      float* to = runs + i * dim;
      for (uint32_t d = 0; d < dim; ++d) to[d] = left[d] + right[d];
    }
    if (n % 2) {
      std::copy_n(runs + (n - 1) * dim, dim, runs + pairs * dim);
      ++pairs;
    }
    n = pairs;
  }
}

}  // namespace frugal
