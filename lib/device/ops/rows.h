// Reads rows on a device: docs/cuda.md, "Lookup".
#ifndef FRUGAL_DEVICE_OPS_ROWS_H_
#define FRUGAL_DEVICE_OPS_ROWS_H_

#include "device/kernels.h"
#include "device/ops/lanes.h"
#include "device/simt.h"
#include "device/source.h"

namespace frugal::device {

// Rows of a table: in host memory (by slot), or in device memory (cached or staged rows; by index).
struct RowsPtr {
  Ptr<Element> values;  // aligned to 16 bytes
  uint64_t stride;      // elements, a multiple of 16 bytes
};

// The keys of a part, sorted by row. Distinct row i has slot slots[i] and is at positions[start[i]]
// .. positions[start[i + 1] - 1] of the batch. After these come `zeros` positions that read as
// zeros (padding, rows that are missing).
struct PartPtr {
  Ptr<uint32_t> slots;
  Ptr<uint32_t> start;
  Ptr<uint32_t> positions;
  uint32_t distinct, zeros;
};

inline constexpr uint32_t kRun = 32;  // positions of an item; the run of fold32

// A run of positions of a row: its row, and which run of the row.
struct alignas(8) Item {
  uint32_t row, run;
};

FRUGAL_DEVICE Ptr<Element> row_of(const RowsPtr& rows, uint32_t index) {
  return rows.values + index * rows.stride;
}

// The row in device memory that a source names.
FRUGAL_DEVICE Ptr<Element> hbm_row(const RowsPtr& cached_rows, const RowsPtr& staged,
                                   Source source) {
  return row_of(source.is_staged() ? staged : cached_rows, source.index());
}

// The positions of an item: positions[begin] .. positions[end - 1].
struct Span {
  uint32_t begin, end;
};

// One run of all the positions of a row.
FRUGAL_DEVICE Span run_of(Span row, uint32_t run) {
  row.begin += run * kRun;
  if (row.end - row.begin > kRun) row.end = row.begin + kRun;
  return row;
}
FRUGAL_DEVICE Span span_of(const PartPtr& part, Item item) {
  return run_of({load(part.start + item.row), load(part.start + (item.row + 1))}, item.run);
}

// --- Rows to the positions of a batch -----------------------------------------------------------

struct GatherArgs {
  PartPtr part;
  RowsPtr host, cached_rows, staged;
  Ptr<Source> source;  // of distinct rows; null: all are host rows
  Ptr<Item> items;     // host rows' first; null: item i is row i, each with one run
  uint32_t host_items, hbm_items;
  uint32_t host_blocks;  // blocks of the first group; the others take HBM rows, and the zeros
  uint32_t dim;
  Ptr<float> out;
  uint64_t out_stride;  // bytes, a multiple of 4
};

// The items of one group of blocks: a row's vector is read once and written to all positions. Rows
// are read in fours whatever dim is, for rows are padded; outputs may not be.
template <bool kFromHbm>
FRUGAL_DEVICE void gather_items(const GatherArgs& a, Walk walk) {
  const bool fours = in_fours(a.out, a.out_stride, a.dim);
  const uint64_t first_item = kFromHbm ? a.host_items : 0;
  const uint64_t read = kFromHbm ? a.hbm_items : a.host_items;
  const uint64_t items = kFromHbm ? read + a.part.zeros : read;
  while (walk.item() < items) {
    // Independent loads come first, next to each other; their uses follow.
    Item item[kInFlight];
    uint32_t vector[kInFlight];
    bool reads[kInFlight], zeros[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      vector[k] = walk.vector();
      reads[k] = walk.item() < read && walk.in_row();
      zeros[k] = kFromHbm && walk.item() >= read && walk.item() < items && walk.in_row();
      const uint64_t at = first_item + walk.item();
      item[k] = {static_cast<uint32_t>(zeros[k] ? walk.item() - read : at), 0};
      if (a.items && reads[k]) item[k] = load(a.items + at);
      walk.next();
    }
    uint32_t at[kInFlight];  // a source, or a slot
    Span span[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      at[k] = reads[k] ? load((kFromHbm ? as<uint32_t>(a.source) : a.part.slots) + item[k].row) : 0;
      span[k].begin = reads[k] ? load(a.part.start + item[k].row) : 0;
      span[k].end = reads[k] ? load(a.part.start + (item[k].row + 1)) : 0;
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (reads[k]) span[k] = run_of(span[k], item[k].run);
      if (zeros[k]) {
        span[k].begin = load(a.part.start + a.part.distinct) + item[k].row;
        span[k].end = span[k].begin + 1;
      }
    }
    Float4 value[kInFlight];
    uint32_t position[kInFlight];  // the first: mostly the only one
    for (uint32_t k = 0; k < kInFlight; ++k) {
      value[k] = {};
      if (reads[k]) {
        const Ptr<Element> row =
            kFromHbm ? hbm_row(a.cached_rows, a.staged, Source{at[k]}) : row_of(a.host, at[k]);
        value[k] = load_vector<Float4>(row, vector[k]);
      }
      position[k] = 0;
      if (span[k].begin != span[k].end) position[k] = load(a.part.positions + span[k].begin);
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (span[k].begin == span[k].end) continue;
      store_part(forward(a.out, position[k] * a.out_stride), vector[k], a.dim, fours, value[k]);
      for (uint32_t p = span[k].begin + 1; p < span[k].end; ++p) {
        const uint32_t next = load(a.part.positions + p);
        store_part(forward(a.out, next * a.out_stride), vector[k], a.dim, fours, value[k]);
      }
    }
  }
}

FRUGAL_DEVICE void gather_rows_body(const GatherArgs& a) {
  const Cut cut = cut_rows<Float4>(a.dim);
  if (block() < a.host_blocks) {
    gather_items<false>(a, Walk(cut, block(), a.host_blocks));
  } else {
    gather_items<true>(a, Walk(cut, block() - a.host_blocks, blocks() - a.host_blocks));
  }
}

// --- Host rows into device memory ---------------------------------------------------------------

struct StageArgs {
  PartPtr part;
  RowsPtr host, staged;
  Ptr<uint32_t> rows;  // distinct rows to copy into HBM; null: the first `count`
  Ptr<uint32_t> to;    // their indexes there; null: in order
  uint32_t count;
  uint32_t dim;
};

// Values and state of cached rows. State columns are laid out as in a host row.
struct FillArgs {
  RowsPtr host, cached_rows;
  // Their strides: a multiple of 16 bytes or, if state_elements is 1, any.
  RowsPtr host_state, cached_state;
  Ptr<uint32_t> slots;
  Ptr<uint32_t> to;  // cache slots
  uint32_t count;
  uint32_t dim;
  uint32_t state_elements;  // of a row, columns with what is between them: 0, 1 or whole vectors

  // Vectors of 16 bytes, whatever they hold.
  FRUGAL_HD uint32_t value_vectors() const { return vectors_of(dim + kOfVector - 1); }
  FRUGAL_HD uint32_t vectors() const { return value_vectors() + vectors_of(state_elements); }

 private:
  static constexpr uint32_t kOfVector = sizeof(Float4) / sizeof(Element);
  static FRUGAL_HD uint32_t vectors_of(uint32_t elements) { return elements / kOfVector; }
};

// Values and state of a row are copied as one sequence of vectors, with what is between rows: all
// strides are multiples of a vector.
template <class SlotOf>
FRUGAL_DEVICE void copy_rows(const FillArgs& a, SlotOf slot_of) {
  const uint32_t value_vectors = a.value_vectors();
  const Cut cut = cut_vectors(a.vectors());
  auto vector_of = [&](const RowsPtr& rows, const RowsPtr& state, uint32_t index, uint32_t vector) {
    if (vector < value_vectors) return as<Float4>(row_of(rows, index)) + vector;
    return as<Float4>(row_of(state, index)) + (vector - value_vectors);
  };
  Walk walk(cut, block(), blocks());
  while (walk.item() < a.count) {
    uint32_t slot[kInFlight], cache_slot[kInFlight], vector[kInFlight];
    bool copies[kInFlight];
    for (uint32_t k = 0; k < kInFlight; ++k) {
      vector[k] = walk.vector();
      copies[k] = walk.item() < a.count && walk.in_row();
      slot[k] = cache_slot[k] = 0;
      if (copies[k]) {
        slot[k] = slot_of(walk.item());
        cache_slot[k] = a.to ? load(a.to + walk.item()) : static_cast<uint32_t>(walk.item());
      }
      walk.next();
    }
    Float4 value[kInFlight];
    Element accumulator[kInFlight];  // the one element of state
    for (uint32_t k = 0; k < kInFlight; ++k) {
      value[k] = {};
      accumulator[k] = 0;
      if (!copies[k]) continue;
      value[k] = load(vector_of(a.host, a.host_state, slot[k], vector[k]));
      if (a.state_elements == 1 && vector[k] == 0)
        accumulator[k] = load(row_of(a.host_state, slot[k]));
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (!copies[k]) continue;
      store(vector_of(a.cached_rows, a.cached_state, cache_slot[k], vector[k]), value[k]);
      if (a.state_elements == 1 && vector[k] == 0)
        store(row_of(a.cached_state, cache_slot[k]), accumulator[k]);
    }
  }
}

FRUGAL_DEVICE void stage_rows_body(const StageArgs& a) {
  copy_rows(FillArgs{a.host, a.staged, {}, {}, {}, a.to, a.count, a.dim, 0},
            [&](uint64_t i) { return load(a.part.slots + (a.rows ? load(a.rows + i) : i)); });
}

FRUGAL_DEVICE void fill_lines_body(const FillArgs& a) {
  copy_rows(a, [&](uint64_t i) { return load(a.slots + i); });
}

// --- Sources of keys ----------------------------------------------------------------------------

// The sources of keys, from those of distinct rows.
struct PlaceArgs {
  PartPtr part;
  Ptr<Source> source;   // of distinct rows, as in GatherArgs; null: all are host rows
  uint32_t all_staged;  // 1: host row i is staged, at i
  Ptr<Source> out;      // one a key
};

// Writes what pool_rows and weight_grads read: the source of each row, at all its positions. The
// zeros are padding; in a step no row is missing.
FRUGAL_DEVICE void place_keys_body(const PlaceArgs& a) {
  // A lane group of a warp for each row, so that frequent rows do not hold up the others for long.
  Walk walk(Cut{kWarp, kWarp, 1}, block(), blocks());
  for (; walk.item() < a.part.distinct; walk.next()) {
    const uint32_t row = static_cast<uint32_t>(walk.item());
    Source place = a.source ? load(a.source + row) : Source{};
    if (a.all_staged && place.is_staged())
      place = {};  // a host row, staged among the frequent ones only
    if (!place.is_own())
      place = a.all_staged ? Source::staged(row) : Source::host(load(a.part.slots + row));
    const uint32_t end = load(a.part.start + (row + 1));
    for (uint64_t p = load(a.part.start + row) + walk.vector(); p < end; p += kWarp) {
      store(a.out + load(a.part.positions + p), place);
    }
  }
  const uint32_t first_zero = load(a.part.start + a.part.distinct);
  for (uint64_t z = uint64_t{block()} * threads() + thread(); z < a.part.zeros;
       z += uint64_t{blocks()} * threads()) {
    store(a.out + load(a.part.positions + (first_zero + z)), Source{kPaddingSlot});
  }
}

// Vector `index` of the row of a source that is not padding.
FRUGAL_DEVICE Float4 load_place(const RowsPtr& host, const RowsPtr& cached_rows,
                                const RowsPtr& staged, Source place, uint32_t index) {
  if (place.is_missing()) return {};
  return load_vector<Float4>(
      place.is_own() ? hbm_row(cached_rows, staged, place) : row_of(host, place.word), index);
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_ROWS_H_
