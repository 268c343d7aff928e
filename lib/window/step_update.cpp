#include "window/step_update.h"

#include <algorithm>

namespace frugal {
namespace {

// Walks the union of several ascending lists; `visit(slot, first)` for each distinct slot, then
// `term(rank index, row)` for each list that has it, in rank order.
template <class Visit, class Term>
void merge(const Vector<Handover>& ranks, uint64_t low, uint64_t high, Visit visit, Term term) {
  struct Cursor {
    const uint32_t *at, *end, *base;
  };
  Vector<Cursor> cursors(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const uint32_t* s = ranks[r].slots();
    const uint32_t* e = s + ranks[r].rows();
    const uint32_t* from = low == 0 ? s : std::lower_bound(s, e, low);
    const uint32_t* to = high > UINT32_MAX ? e : std::lower_bound(from, e, high);
    cursors[r] = {from, to, s};
  }
  for (;;) {
    uint32_t least = UINT32_MAX;
    for (const Cursor& c : cursors)
      if (c.at != c.end && *c.at < least) least = *c.at;
    if (least == UINT32_MAX) return;
    visit(least);
    for (size_t r = 0; r < cursors.size(); ++r) {
      Cursor& c = cursors[r];
      if (c.at == c.end || *c.at != least) continue;
      term(r, static_cast<uint32_t>(c.at - c.base));
      ++c.at;
    }
  }
}

}  // namespace

void StepUpdate::make_list() {
  if (ranks.size() == 1) {
    slots = ranks[0].slots();
    n = ranks[0].rows();
    return;
  }
  merged_slots.clear();
  term_start.clear();
  term_rank.clear();
  term_index.clear();
  merge(
      ranks, 0, UINT64_MAX,
      [&](uint32_t slot) {
        merged_slots.push_back(slot);
        term_start.push_back(static_cast<uint32_t>(term_rank.size()));
      },
      [&](size_t r, uint32_t row) {
        term_rank.push_back(static_cast<uint32_t>(r));
        term_index.push_back(row);
      });
  term_start.push_back(static_cast<uint32_t>(term_rank.size()));
  slots = merged_slots.data();
  n = merged_slots.size();
}

void StepUpdate::add_terms(size_t row, TermList* out) const {
  out->begin_row(slots[row]);
  if (ranks.size() == 1) {
    out->terms.push_back(ranks[0].sums.as<float>() + row * ranks[0].stride);
    return;
  }
  for (uint32_t t = term_start[row]; t < term_start[row + 1]; ++t) {
    const Handover& h = ranks[term_rank[t]];
    out->terms.push_back(h.sums.as<float>() + size_t{term_index[t]} * h.stride);
  }
}

void StepUpdate::merge_range(uint64_t low, uint64_t high, TermList* out) const {
  merge(
      ranks, low, high, [&](uint32_t slot) { out->begin_row(slot); },
      [&](size_t r, uint32_t row) {
        out->terms.push_back(ranks[r].sums.as<float>() + size_t{row} * ranks[r].stride);
      });
}

void StepUpdate::cut(size_t rows, Vector<uint64_t>* bounds) const {
  bounds->clear();
  bounds->push_back(0);
  const Handover* most = nullptr;
  for (const Handover& h : ranks)
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
