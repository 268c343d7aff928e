// How rows are divided among threads: vectors, lane groups, tiles.
//
// What: a row is read and written in vectors of four floats, or of one where dim or an address does
// not allow four. A *lane group* of 1 to 32 lanes of a warp handles one *tile* of a row. That is up
// to 32 vectors, one a lane: narrow rows share a warp, wide rows are several tiles. All kernels
// that work elementwise walk over (item, tile) pairs in this way, so they have no loop over
// columns.
//
// Invariants: everything that depends on dim alone is the same in all lanes of a grid.
// Callers: the kernel bodies; shapes.h.
#ifndef FRUGAL_DEVICE_OPS_LANES_H_
#define FRUGAL_DEVICE_OPS_LANES_H_

#include "arith/hd.h"
#include "arith/nan.h"
#include "device/element.h"
#include "device/simt.h"

namespace frugal::device {

// Vectors that a lane requests before it uses the first, which hides the latency of memory.
inline constexpr uint32_t kInFlight = 4;

// --- Vectors ------------------------------------------------------------------------------------

template <class V>
inline constexpr uint32_t kFloats = sizeof(V) / sizeof(float);

FRUGAL_DEVICE Float4 operator+(Float4 a, Float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
FRUGAL_DEVICE Float4 operator*(float a, Float4 b) { return {a * b.x, a * b.y, a * b.z, a * b.w}; }
FRUGAL_DEVICE Float4 operator/(Float4 a, float b) { return {a.x / b, a.y / b, a.z / b, a.w / b}; }

FRUGAL_DEVICE bool has_nan(float x) { return x != x; }
FRUGAL_DEVICE bool has_nan(Float4 v) {
  const int x = has_nan(v.x), y = has_nan(v.y), z = has_nan(v.z), w = has_nan(v.w);
  return (x | y | z | w) != 0;
}

FRUGAL_DEVICE float canonical(float x) { return arith::canonical(x); }
FRUGAL_DEVICE Float4 canonical(Float4 v) {
  return {canonical(v.x), canonical(v.y), canonical(v.z), canonical(v.w)};
}

// Calls f(x, ...) for the first `valid` elements of vectors.
template <class F, class... Vs>
FRUGAL_DEVICE void for_elements(uint32_t valid, F f, Vs&... v) {
  if (valid > 0) f(v.x...);
  if (valid > 1) f(v.y...);
  if (valid > 2) f(v.z...);
  if (valid > 3) f(v.w...);
}

// Whether rows of floats can be used four at a time: at `p`, `stride` bytes from row to row.
FRUGAL_HD bool in_fours(Ptr<float> p, uint64_t stride, uint32_t dim) {
  return dim % 4 == 0 && (p.address | stride) % sizeof(Float4) == 0;
}

// `p` plus `bytes`.
template <class T>
FRUGAL_DEVICE Ptr<T> forward(Ptr<T> p, uint64_t bytes) {
  return {p.address + bytes};
}

// A vector of four numbers that are no floats.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x, y, z, w;
};

// Vector `index` of a row of floats or elements.
template <class V, class T>
FRUGAL_DEVICE V load_vector(Ptr<T> row, uint32_t index) {
  if constexpr (kIsFloat<T>) {
    return load(as<V>(row) + index);
  } else {
    const Four<T> v = load(as<Four<T>>(row) + index);
    return {as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w)};
  }
}
template <class V, class T>
FRUGAL_DEVICE void store_vector(Ptr<T> row, uint32_t index, V v) {
  if constexpr (kIsFloat<T>) {
    store(as<V>(row) + index, v);
  } else {
    store(as<Four<T>>(row) + index,
          Four<T>{stored_as<T>(v.x), stored_as<T>(v.y), stored_as<T>(v.z), stored_as<T>(v.w)});
  }
}

// The elements of vector `index` of a row of `dim` floats. Nothing after the row is read; elements
// there are +0. `fours`: the address is that of a Float4.
FRUGAL_DEVICE Float4 load_part(Ptr<float> row, uint32_t index, uint32_t dim, bool fours) {
  const uint32_t first = index * 4;
  if (fours && dim - first >= 4) return load_vector<Float4>(row, index);
  Float4 v = {};
  uint32_t c = first;
  for_elements(
      dim - first, [&](float& x) { x = load(row + c++); }, v);
  return v;
}

// Stores vector `index` of a row of `dim` floats, and nothing after the row.
FRUGAL_DEVICE void store_part(Ptr<float> row, uint32_t index, uint32_t dim, bool fours, Float4 v) {
  const uint32_t first = index * 4;
  if (fours) return store_vector<Float4>(row, index, v);
  uint32_t c = first;
  for_elements(
      dim - first, [&](float& x) { store(row + c++, x); }, v);
}

// --- Lane groups --------------------------------------------------------------------------------

// How rows are cut: into `tiles` of `lanes` vectors; the last tile may have fewer.
struct Cut {
  uint32_t vectors, lanes, tiles;
};

FRUGAL_HD Cut cut_vectors(uint32_t vectors) {
  Cut c{vectors, 1, 1};
  while (c.lanes < vectors && c.lanes < kWarp) c.lanes *= 2;
  c.tiles = (vectors + c.lanes - 1) / c.lanes;
  return c;
}

template <class V>
FRUGAL_HD Cut cut_rows(uint32_t dim) {
  return cut_vectors((dim + kFloats<V> - 1) / kFloats<V>);
}

// The (item, tile) pairs of a lane group, all tiles of an item before the next item. They are dealt
// in turn to the lane groups of `blocks` blocks, of which this is number `block`.
class Walk {
 public:
  FRUGAL_DEVICE Walk(const Cut& cut, uint32_t block, uint32_t blocks)
      : lane_(thread() % cut.lanes), cut_(cut) {
    const uint32_t in_block = threads() / cut.lanes;
    const uint32_t group = block * in_block + thread() / cut.lanes;
    const uint32_t groups = blocks * in_block;
    item_ = group / cut.tiles;
    tile_ = group % cut.tiles;
    items_on_ = groups / cut.tiles;
    tiles_on_ = groups % cut.tiles;
  }
  FRUGAL_DEVICE uint64_t item() const { return item_; }
  FRUGAL_DEVICE uint32_t vector() const { return tile_ * cut_.lanes + lane_; }
  FRUGAL_DEVICE bool in_row() const { return vector() < cut_.vectors; }
  FRUGAL_DEVICE void next() {
    item_ += items_on_;
    tile_ += tiles_on_;
    if (tile_ >= cut_.tiles) {
      tile_ -= cut_.tiles;
      ++item_;
    }
  }

 private:
  uint64_t item_, items_on_;
  uint32_t tile_, tiles_on_, lane_;
  Cut cut_;
};

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_LANES_H_
