// The bodies of the kernels, compiled once for each instruction set by kernels_*.cpp, which define
// KGE_LANES, the floats of a vector register; KGE_ROWS, the rows of a register block; KGE_NAME.
// Nothing with external linkage may be used here but memcpy and memset: the linker could keep the
// copy of an inline function that a machine without these instructions cannot run.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace kge {
namespace {

typedef float V __attribute__((vector_size(4 * KGE_LANES)));
typedef int32_t I __attribute__((vector_size(4 * KGE_LANES)));

#define KGE_INLINE inline __attribute__((always_inline))

constexpr size_t kWidth = KGE_LANES;
constexpr size_t kMostVectors = 3;

KGE_INLINE V Load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

KGE_INLINE void Store(float* p, V v) { memcpy(p, &v, sizeof v); }

KGE_INLINE V Set(float x) { return x - V{}; }

KGE_INLINE V Abs(V v) { return (V)((I)v & 0x7fffffff); }

KGE_INLINE V Choose(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }

KGE_INLINE V Max(V a, V b) { return Choose(a > b, a, b); }

// ---- matrix product and L1 distance ----------------------------------------------------------

template <bool kDistance, int kRows, int kVectors>
KGE_INLINE void Block(size_t k, const float* a, size_t a_row, size_t a_column, const float* panel,
                      float* c, size_t c_step, size_t columns, bool add) {
  V sum[kRows][kVectors] = {};
  for (size_t p = 0; p < k; ++p) {
    V b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = Load(panel + (p * kVectors + v) * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const V x = Set(a[r * a_row + p * a_column]);
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] += kDistance ? Abs(b[v] - x) : b[v] * x;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = c + r * c_step;
    for (size_t v = 0; v < kVectors; ++v) {
      if ((v + 1) * kWidth <= columns) {
        Store(out + v * kWidth, add ? Load(out + v * kWidth) + sum[r][v] : sum[r][v]);
      } else {
        float rest[kWidth];
        Store(rest, sum[r][v]);
        for (size_t i = v * kWidth; i < columns; ++i) {
          out[i] = add ? out[i] + rest[i - v * kWidth] : rest[i - v * kWidth];
        }
      }
    }
  }
}

template <bool kDistance, int kVectors>
void Panel(size_t m, size_t k, Matrix a, const float* panel, float* c, size_t c_step,
           size_t columns, bool add) {
  size_t i = 0;
  for (; i + KGE_ROWS <= m; i += KGE_ROWS) {
    Block<kDistance, KGE_ROWS, kVectors>(k, a.data + i * a.row_step, a.row_step, a.column_step,
                                         panel, c + i * c_step, c_step, columns, add);
  }
  for (; i < m; ++i) {
    Block<kDistance, 1, kVectors>(k, a.data + i * a.row_step, a.row_step, a.column_step, panel,
                                  c + i * c_step, c_step, columns, add);
  }
}

template <bool kDistance>
void Product(size_t m, size_t n, size_t k, Matrix a, Matrix b, float* c, size_t c_step, bool add,
             float* scratch) {
  const size_t vectors = (n + kWidth - 1) / kWidth;
  const size_t panels = (vectors + kMostVectors - 1) / kMostVectors;
  size_t first = 0;
  for (size_t panel = 0; panel < panels; ++panel) {
    const size_t last = vectors * (panel + 1) / panels;
    const size_t width = (last - first) * kWidth;
    const size_t j0 = first * kWidth;
    const size_t columns = n - j0 < width ? n - j0 : width;
    if (b.column_step == 1) {
      for (size_t p = 0; p < k; ++p) {
        float* out = scratch + p * width;
        memcpy(out, b.data + p * b.row_step + j0, columns * sizeof(float));
        for (size_t j = columns; j < width; ++j) out[j] = 0;
      }
    } else {
      for (size_t j = 0; j < width; ++j) {
        const float* in = b.data + (j0 + j) * b.column_step;
        for (size_t p = 0; p < k; ++p) {
          scratch[p * width + j] = j < columns ? in[p * b.row_step] : 0;
        }
      }
    }
    float* out = c + j0;
    switch (last - first) {
      case 1: Panel<kDistance, 1>(m, k, a, scratch, out, c_step, columns, add); break;
      case 2: Panel<kDistance, 2>(m, k, a, scratch, out, c_step, columns, add); break;
      case 3: Panel<kDistance, 3>(m, k, a, scratch, out, c_step, columns, add); break;
    }
    first = last;
  }
}

void Multiply(size_t m, size_t n, size_t k, Matrix a, Matrix b, float* c, size_t c_step, bool add,
              float* scratch) {
  Product<false>(m, n, k, a, b, c, c_step, add, scratch);
}

void DistanceL1(size_t m, size_t n, size_t k, Matrix a, Matrix b, float* c, size_t c_step,
                float* scratch) {
  Product<true>(m, n, k, a, b, c, c_step, false, scratch);
}

// d(-|q - e|)/dq = -sign(q - e), d/de = sign(q - e); the sign of zero counts as plus.
// kTile floats of every candidate and of its gradient are copied side by side: rows a power of
// two apart would fight for the same few sets of the cache.
template <int kRows, int kVectors>
KGE_INLINE void SignBlock(size_t candidates, const float* w, size_t w_step, const float* const* q,
                          float* const* gq, const float* tile, float* tile_grads) {
  V row[kRows][kVectors], grad[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      row[r][v] = Load(q[r] + v * kWidth);
      grad[r][v] = Load(gq[r] + v * kWidth);
    }
  }
  for (size_t j = 0; j < candidates; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      const size_t at = (j * kVectors + v) * kWidth;
      const V e = Load(tile + at);
      V sum = Load(tile_grads + at);
      for (int r = 0; r < kRows; ++r) {
        const I sign = (I)(row[r][v] - e) & (int32_t)0x80000000;
        const V signed_weight = (V)((I)Set(w[j * w_step + r]) ^ sign);
        grad[r][v] -= signed_weight;
        sum += signed_weight;
      }
      Store(tile_grads + at, sum);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) Store(gq[r] + v * kWidth, grad[r][v]);
  }
}

void GradientL1(size_t candidates, size_t queries, size_t dim, const float* w, size_t w_step,
                const float* query_rows, const float* candidate_rows, float* query_grads,
                float* candidate_grads, float* scratch) {
  constexpr int kVectors = KGE_LANES == 16 ? 2 : 1;
  constexpr int kRows = KGE_LANES == 16 ? 6 : 4;
  constexpr size_t kTile = kVectors * kWidth;
  float* tile = scratch;
  float* tile_grads = scratch + candidates * kTile;
  for (size_t d0 = 0; d0 < dim; d0 += kTile) {
    const size_t columns = dim - d0 < kTile ? dim - d0 : kTile;
    const size_t bytes = columns * sizeof(float);
    for (size_t j = 0; j < candidates; ++j) {
      memcpy(tile + j * kTile, candidate_rows + j * dim + d0, bytes);
      memcpy(tile_grads + j * kTile, candidate_grads + j * dim + d0, bytes);
      for (size_t i = columns; i < kTile; ++i) tile[j * kTile + i] = tile_grads[j * kTile + i] = 0;
    }
    float rows[kRows][kTile], grads[kRows][kTile];
    const float* q[kRows];
    float* gq[kRows];
    for (int r = 0; r < kRows; ++r) {
      q[r] = rows[r];
      gq[r] = grads[r];
    }
    for (size_t i = 0; i < queries; i += kRows) {
      const size_t count = queries - i < kRows ? queries - i : kRows;
      memset(rows, 0, sizeof rows);
      memset(grads, 0, sizeof grads);
      for (size_t r = 0; r < count; ++r) {
        memcpy(rows[r], query_rows + (i + r) * dim + d0, bytes);
        memcpy(grads[r], query_grads + (i + r) * dim + d0, bytes);
      }
      if (count == kRows) {
        SignBlock<kRows, kVectors>(candidates, w + i, w_step, q, gq, tile, tile_grads);
      } else {
        for (size_t r = 0; r < count; ++r) {
          SignBlock<1, kVectors>(candidates, w + i + r, w_step, q + r, gq + r, tile, tile_grads);
        }
      }
      for (size_t r = 0; r < count; ++r) {
        memcpy(query_grads + (i + r) * dim + d0, grads[r], bytes);
      }
    }
    for (size_t j = 0; j < candidates; ++j) {
      memcpy(candidate_grads + j * dim + d0, tile_grads + j * kTile, bytes);
    }
  }
}

void Scale(size_t count, float factor, float* scores) {
  for (size_t i = 0; i < count; ++i) scores[i] *= factor;
}

void DistanceL2(size_t candidates, size_t queries, const float* query_norms,
                const float* candidate_norms, float* scores) {
  for (size_t j = 0; j < candidates; ++j) {
    float* row = scores + j * queries;
    for (size_t i = 0; i < queries; ++i) {
      const float square = query_norms[i] + candidate_norms[j] - 2 * row[i];
      row[i] = -__builtin_sqrtf(square > 1e-8f ? square : 1e-8f);
    }
  }
}

// ---- losses ----------------------------------------------------------------------------------

// e^x by Cephes' expf: a power of two and a polynomial on +-ln(2)/2. Results below e^-60 are 0, so
// that no product of them can become denormal and slow.
KGE_INLINE V Exp(V x) {
  const I tiny = x < -60.0f;
  x = Choose(x > 88.0f, Set(88.0f), Choose(tiny, Set(-60.0f), x));
  // Adding and subtracting 1.5 * 2^23 rounds to an integer.
  const V shifted = x * 1.44269504f + 12582912.0f;
  const V n = shifted - 12582912.0f;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V y = Set(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const V power = (V)(((I)shifted - 0x4b400000 + 127) << 23);
  return Choose(tiny, V{}, y * power);
}

// ln(x) for normal x > 0 by Cephes' logf.
KGE_INLINE V Log(V x) {
  I exponent = (((I)x >> 23) & 0xff) - 126;
  V m = (V)(((I)x & 0x007fffff) | 0x3f000000);
  const I small = m < 0.707106781f;
  exponent += small;
  m = m + Choose(small, m, V{}) - 1.0f;
  const V z = m * m;
  V y = Set(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  const V e = __builtin_convertvector(exponent, V);
  y = y * m * z - e * 2.12194440e-4f - z * 0.5f;
  return m + y + e * 0.693359375f;
}

// ln(1 + e^x), and the logistic function of x, from one exponential.
KGE_INLINE V Softplus(V x, V* sigmoid) {
  const V e = Exp(-Abs(x));
  const V inverse = 1.0f / (1.0f + e);
  *sigmoid = Choose(x < 0.0f, e * inverse, inverse);
  return Max(x, V{}) + Log(1.0f + e);
}

KGE_INLINE V ColumnMax(size_t candidates, size_t step, const float* scores, V most) {
  for (size_t j = 0; j < candidates; ++j) most = Max(most, Load(scores + j * step));
  return most;
}

// Cross-entropy of the positive among itself and the candidates.
void Softmax(const LossArguments& a) {
  for (size_t i = 0; i < a.queries; i += kWidth) {
    float* scores = a.scores + i;
    const V positive = Load(a.positive + i);
    const V most = ColumnMax(a.candidates, a.queries, scores, positive);
    const V own = Exp(positive - most);
    V sum = own;
    for (size_t j = 0; j < a.candidates; ++j) {
      const V e = Exp(Load(scores + j * a.queries) - most);
      Store(scores + j * a.queries, e);
      sum += e;
    }
    const V inverse = 1.0f / sum;
    for (size_t j = 0; j < a.candidates; ++j) {
      Store(scores + j * a.queries, Load(scores + j * a.queries) * inverse);
    }
    Store(a.positive_out + i, own * inverse - 1.0f);
    Store(a.loss_out + i, Log(sum) - (positive - most));
  }
}

// -ln s(positive + margin) - mean ln s(-(negative + margin)), s the logistic function.
void LogSigmoid(const LossArguments& a) {
  const float share = 1.0f / static_cast<float>(a.candidates > 0 ? a.candidates : 1);
  for (size_t i = 0; i < a.queries; i += kWidth) {
    const V positive = Load(a.positive + i) + a.margin;
    V loss = V{};
    for (size_t j = 0; j < a.candidates; ++j) {
      float* place = a.scores + j * a.queries + i;
      V sigmoid;
      loss += Softplus(Load(place) + a.margin, &sigmoid);
      Store(place, sigmoid * share);
    }
    V sigmoid;
    Store(a.loss_out + i, Softplus(-positive, &sigmoid) + loss * share);
    Store(a.positive_out + i, -sigmoid);
  }
}

// The same with weights softmax(temperature * negative) for the mean, taken as constants
// (RotatE, equation 5), and half of each part as in the authors' program.
void SelfAdversarial(const LossArguments& a) {
  for (size_t i = 0; i < a.queries; i += kWidth) {
    float* scores = a.scores + i;
    const V positive = Load(a.positive + i) + a.margin;
    const V most = ColumnMax(a.candidates, a.queries, scores, Set(-1e30f)) * a.temperature;
    V sum = V{};
    V loss = V{};
    for (size_t j = 0; j < a.candidates; ++j) {
      const V score = Load(scores + j * a.queries);
      const V weight = Exp(score * a.temperature - most);
      sum += weight;
      V sigmoid;
      loss += weight * Softplus(score + a.margin, &sigmoid);
      Store(scores + j * a.queries, weight * sigmoid);
    }
    const V half = 0.5f / Max(sum, Set(1e-30f));
    for (size_t j = 0; j < a.candidates; ++j) {
      Store(scores + j * a.queries, Load(scores + j * a.queries) * half);
    }
    V sigmoid;
    Store(a.loss_out + i, 0.5f * Softplus(-positive, &sigmoid) + loss * half);
    Store(a.positive_out + i, -0.5f * sigmoid);
  }
}

// ---- evaluation and sampling -----------------------------------------------------------------

void Count(size_t candidates, size_t queries, const float* scores, const float* target,
           int32_t* below, int32_t* equal) {
  for (size_t i = 0; i < queries; i += kWidth) {
    const V own = Load(target + i);
    I less, same;
    memcpy(&less, below + i, sizeof less);
    memcpy(&same, equal + i, sizeof same);
    for (size_t j = 0; j < candidates; ++j) {
      const V score = Load(scores + j * queries + i);
      less -= score < own;
      same -= score == own;
    }
    memcpy(below + i, &less, sizeof less);
    memcpy(equal + i, &same, sizeof same);
  }
}

size_t Find(const uint64_t* ids, size_t count, uint64_t value, uint32_t* places_out) {
  size_t found = 0;
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    uint64_t any = 0;
    for (size_t j = 0; j < 64; ++j) any |= ids[i + j] == value;
    if (any == 0) continue;
    for (size_t j = 0; j < 64; ++j) {
      if (ids[i + j] == value) places_out[found++] = static_cast<uint32_t>(i + j);
    }
  }
  for (; i < count; ++i) {
    if (ids[i] == value) places_out[found++] = static_cast<uint32_t>(i);
  }
  return found;
}

}  // namespace

extern const Kernels KGE_NAME;
const Kernels KGE_NAME = {KGE_TEXT,    Multiply, DistanceL1, GradientL1,      Scale, DistanceL2,
                          Softmax,     LogSigmoid, SelfAdversarial, Count, Find};

}  // namespace kge
