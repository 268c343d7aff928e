// Bodies of the stages, compiled once for each instruction set with BENCH_ISA naming it.
#include "stage_kernels.h"

#include <cmath>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define BENCH_INLINE inline __attribute__((always_inline))

namespace bench::BENCH_ISA {

constexpr size_t kLine = 64;

// Sixteen floats. Only the operations that the stages use; none is fused.
#if defined(__AVX512F__)
struct V16 {
  __m512 v;
  static BENCH_INLINE V16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static BENCH_INLINE V16 All(float x) { return {_mm512_set1_ps(x)}; }
  BENCH_INLINE void Store(float* p) const { _mm512_storeu_ps(p, v); }
  BENCH_INLINE void Stream(float* p) const { _mm512_stream_ps(p, v); }
  friend BENCH_INLINE V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend BENCH_INLINE V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend BENCH_INLINE V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend BENCH_INLINE V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
  BENCH_INLINE V16 Sqrt() const { return {_mm512_sqrt_ps(v)}; }
};
BENCH_INLINE void Fence() { _mm_sfence(); }
#elif defined(__AVX2__)
struct V16 {
  __m256 a, b;
  static BENCH_INLINE V16 Load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static BENCH_INLINE V16 All(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  BENCH_INLINE void Store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  BENCH_INLINE void Stream(float* p) const {
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + 8, b);
  }
  friend BENCH_INLINE V16 operator+(V16 x, V16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
  }
  friend BENCH_INLINE V16 operator-(V16 x, V16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
  }
  friend BENCH_INLINE V16 operator*(V16 x, V16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
  }
  friend BENCH_INLINE V16 operator/(V16 x, V16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
  }
  BENCH_INLINE V16 Sqrt() const { return {_mm256_sqrt_ps(a), _mm256_sqrt_ps(b)}; }
};
BENCH_INLINE void Fence() { _mm_sfence(); }
#else
struct V16 {
  float x[16];
  static BENCH_INLINE V16 Load(const float* p) {
    V16 r;
    memcpy(r.x, p, sizeof(r.x));
    return r;
  }
  static BENCH_INLINE V16 All(float f) {
    V16 r;
    for (float& e : r.x) e = f;
    return r;
  }
  BENCH_INLINE void Store(float* p) const { memcpy(p, x, sizeof(x)); }
  BENCH_INLINE void Stream(float* p) const { Store(p); }
#define BENCH_OP(op)                                        \
  friend BENCH_INLINE V16 operator op(V16 a, V16 b) {       \
    for (int i = 0; i < 16; ++i) a.x[i] = a.x[i] op b.x[i]; \
    return a;                                               \
  }
  BENCH_OP(+)
  BENCH_OP(-)
  BENCH_OP(*)
  BENCH_OP(/)
#undef BENCH_OP
  BENCH_INLINE V16 Sqrt() const {
    V16 r;
    for (int i = 0; i < 16; ++i) r.x[i] = std::sqrt(x[i]);
    return r;
  }
};
BENCH_INLINE void Fence() {}
#endif

// sum16's last part: lane l + lane l+8, then +4, +2, +1.
BENCH_INLINE float Combine(V16 lanes) {
  float x[16];
  lanes.Store(x);
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) x[l] = x[l] + x[l + half];
  }
  return x[0];
}

template <int kLevel>
BENCH_INLINE void PrefetchRow(const float* row, size_t floats) {
  const char* p = reinterpret_cast<const char*>(row);
  // GCC 12 drops a helper that holds only prefetches unless it is inlined.
  for (size_t b = 0; b < floats * sizeof(float); b += kLine) __builtin_prefetch(p + b, 0, kLevel);
}

template <int kDim>
void GatherDim(const float* values, const uint64_t* keys, size_t begin, size_t end, float* out) {
  // To L2 far ahead, bounded by the core's outstanding misses; to L1 close before use.
  constexpr size_t kFar = kDim <= 32 ? 64 : 24;
  constexpr size_t kNear = 4;
  constexpr int kVectors = kDim / 16;
  for (size_t i = begin; i < end; ++i) {
    if (i + kFar < end) PrefetchRow<2>(values + keys[i + kFar] * kDim, kDim);
    if (i + kNear < end) PrefetchRow<3>(values + keys[i + kNear] * kDim, kDim);
    const float* row = values + keys[i] * kDim;
    float* to = out + i * kDim;
    V16 v[kVectors];
    for (int k = 0; k < kVectors; ++k) v[k] = V16::Load(row + k * 16);
    for (int k = 0; k < kVectors; ++k) v[k].Stream(to + k * 16);
  }
  Fence();
}

void Gather(const float* values, uint32_t dim, const uint64_t* keys, size_t begin, size_t end,
            float* out) {
  if (dim == 32) return GatherDim<32>(values, keys, begin, end, out);
  GatherDim<128>(values, keys, begin, end, out);
}

template <int kVectors>
BENCH_INLINE void SumRun(const Pair* pairs, size_t n, const float* grads, V16* sum) {
  const float* g = grads + size_t{pairs[0].position} * (kVectors * 16);
  for (int k = 0; k < kVectors; ++k) sum[k] = V16::Load(g + k * 16);
  for (size_t i = 1; i < n; ++i) {
    g = grads + size_t{pairs[i].position} * (kVectors * 16);
    for (int k = 0; k < kVectors; ++k) sum[k] = sum[k] + V16::Load(g + k * 16);
  }
}

// fold32 of a row with more than 32 occurrences: a binary counter of partial sums. Not inlined,
// as it is rare and would cost the common path registers.
template <int kVectors>
__attribute__((noinline)) void FoldLong(const Pair* pairs, size_t n, const float* grads,
                                        float* out) {
  float levels[32][kVectors * 16];
  uint64_t count = 0;
  V16 sum[kVectors] = {};
  for (size_t i = 0; i < n; i += 32, ++count) {
    for (size_t j = i + 32; j < i + 64 && j < n; ++j) {
      PrefetchRow<3>(grads + size_t{pairs[j].position} * (kVectors * 16), kVectors * 16);
    }
    SumRun<kVectors>(pairs + i, n - i < 32 ? n - i : 32, grads, sum);
    int level = 0;
    for (uint64_t c = count; c & 1; c >>= 1, ++level) {
      for (int k = 0; k < kVectors; ++k) sum[k] = V16::Load(levels[level] + k * 16) + sum[k];
    }
    for (int k = 0; k < kVectors; ++k) sum[k].Store(levels[level] + k * 16);
  }
  bool first = true;
  for (int level = 0; count >> level != 0; ++level) {
    if ((count >> level & 1) == 0) continue;
    for (int k = 0; k < kVectors; ++k) {
      const V16 larger = V16::Load(levels[level] + k * 16);
      sum[k] = first ? larger : larger + sum[k];
    }
    first = false;
  }
  for (int k = 0; k < kVectors; ++k) sum[k].Store(out + k * 16);
}

template <int kDim, Opt kOpt>
BENCH_INLINE void Apply(const Hyper& h, const TableView& t, size_t row, const V16* g) {
  constexpr int kVectors = kDim / 16;
  float* w = t.values + row * kDim;
  const V16 lr = V16::All(h.lr), eps = V16::All(h.eps);
  if constexpr (kOpt == Opt::kSgd) {
    for (int k = 0; k < kVectors; ++k) (V16::Load(w + k * 16) - lr * g[k]).Store(w + k * 16);
  } else if constexpr (kOpt == Opt::kRowwiseAdagrad) {
    V16 lanes = g[0] * g[0];
    for (int k = 1; k < kVectors; ++k) lanes = lanes + g[k] * g[k];
    const float a = t.state0[row] + Combine(lanes) / static_cast<float>(kDim);
    t.state0[row] = a;
    const V16 q = V16::All(h.lr / (std::sqrt(a) + h.eps));
    for (int k = 0; k < kVectors; ++k) (V16::Load(w + k * 16) - q * g[k]).Store(w + k * 16);
  } else if constexpr (kOpt == Opt::kAdagrad) {
    float* a = t.state0 + row * kDim;
    for (int k = 0; k < kVectors; ++k) {
      const V16 acc = V16::Load(a + k * 16) + g[k] * g[k];
      acc.Store(a + k * 16);
      (V16::Load(w + k * 16) - (lr * g[k]) / (acc.Sqrt() + eps)).Store(w + k * 16);
    }
  } else {
    float* m = t.state0 + row * kDim;
    float* v = t.state1 + row * kDim;
    const V16 b1 = V16::All(h.beta1), b2 = V16::All(h.beta2), alpha = V16::All(h.alpha);
    const V16 c1 = V16::All(1.0f - h.beta1), c2 = V16::All(1.0f - h.beta2);
    for (int k = 0; k < kVectors; ++k) {
      const V16 mk = b1 * V16::Load(m + k * 16) + c1 * g[k];
      const V16 vk = b2 * V16::Load(v + k * 16) + (c2 * g[k]) * g[k];
      mk.Store(m + k * 16);
      vk.Store(v + k * 16);
      (V16::Load(w + k * 16) - (alpha * mk) / (vk.Sqrt() + eps)).Store(w + k * 16);
    }
  }
}

template <int kDim, Opt kOpt>
BENCH_INLINE void PrefetchPair(const TableView& t, const Pair& p, const float* grads) {
  const size_t row = p.row;
  PrefetchRow<2>(t.values + row * kDim, kDim);
  PrefetchRow<2>(grads + size_t{p.position} * kDim, kDim);
  if constexpr (kOpt == Opt::kRowwiseAdagrad) {
    __builtin_prefetch(t.state0 + row, 0, 2);
  } else if constexpr (kOpt != Opt::kSgd) {
    PrefetchRow<2>(t.state0 + row * kDim, kDim);
    if constexpr (kOpt == Opt::kAdam) PrefetchRow<2>(t.state1 + row * kDim, kDim);
  }
}

template <int kDim, Opt kOpt>
void UpdateRuns(const Hyper& h, const TableView& t, const Pair* pairs, size_t n, size_t begin,
                size_t end, const float* grads) {
  constexpr int kVectors = kDim / 16;
  constexpr size_t kAhead = kDim <= 32 ? 48 : 16;
  size_t i = begin;
  while (i > 0 && i < n && pairs[i].row == pairs[i - 1].row) ++i;  // the chunk before has this run
  for (size_t j = i; j < i + kAhead && j < n; ++j) PrefetchPair<kDim, kOpt>(t, pairs[j], grads);
  size_t ahead = i + kAhead;
  while (i < end) {
    const uint32_t row = pairs[i].row;
    size_t last = i + 1;
    while (last < n && pairs[last].row == row) ++last;
    for (const size_t to = last + kAhead < n ? last + kAhead : n; ahead < to; ++ahead) {
      PrefetchPair<kDim, kOpt>(t, pairs[ahead], grads);
    }
    V16 sum[kVectors];
    if (last - i <= 32) {
      SumRun<kVectors>(pairs + i, last - i, grads, sum);
    } else {
      alignas(64) float folded[kDim];
      FoldLong<kVectors>(pairs + i, last - i, grads, folded);
      for (int k = 0; k < kVectors; ++k) sum[k] = V16::Load(folded + k * 16);
    }
    Apply<kDim, kOpt>(h, t, row, sum);
    i = last;
  }
}

template <int kDim>
void UpdateDim(Opt opt, const Hyper& h, const TableView& t, const Pair* pairs, size_t n,
               size_t begin, size_t end, const float* grads) {
  switch (opt) {
    case Opt::kSgd:
      return UpdateRuns<kDim, Opt::kSgd>(h, t, pairs, n, begin, end, grads);
    case Opt::kRowwiseAdagrad:
      return UpdateRuns<kDim, Opt::kRowwiseAdagrad>(h, t, pairs, n, begin, end, grads);
    case Opt::kAdagrad:
      return UpdateRuns<kDim, Opt::kAdagrad>(h, t, pairs, n, begin, end, grads);
    case Opt::kAdam:
      return UpdateRuns<kDim, Opt::kAdam>(h, t, pairs, n, begin, end, grads);
  }
}

void Update(Opt opt, const Hyper& h, const TableView& t, uint32_t dim, const Pair* pairs, size_t n,
            size_t begin, size_t end, const float* grads) {
  if (dim == 32) return UpdateDim<32>(opt, h, t, pairs, n, begin, end, grads);
  UpdateDim<128>(opt, h, t, pairs, n, begin, end, grads);
}

void Copy(const float* from, float* to, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(float); i += 64) {
    __builtin_prefetch(from + i + 1024, 0, 0);
    __builtin_prefetch(from + i + 1040, 0, 0);
    __builtin_prefetch(from + i + 1056, 0, 0);
    __builtin_prefetch(from + i + 1072, 0, 0);
    const V16 a = V16::Load(from + i), b = V16::Load(from + i + 16);
    const V16 c = V16::Load(from + i + 32), d = V16::Load(from + i + 48);
    a.Stream(to + i);
    b.Stream(to + i + 16);
    c.Stream(to + i + 32);
    d.Stream(to + i + 48);
  }
  Fence();
}

#define BENCH_STRING2(x) #x
#define BENCH_STRING(x) BENCH_STRING2(x)
extern const Kernels kKernels;
const Kernels kKernels = {BENCH_STRING(BENCH_ISA), Gather, Update, Copy};

}  // namespace bench::BENCH_ISA
