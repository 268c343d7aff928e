// Every CPU kernel, in every instruction set of this machine, equals naive scalar loops written
// from docs/arithmetic.md, bit for bit.
//
// Shapes are random: dims 1..130 and some wider than the kernels' buffers, strides, duplicates by
// the thousand. Values include denormals, -0.0, infinities and NaNs with payloads. The loops share
// no code with lib/arith. Rows lie in vectors with guards between them. A failing case prints its
// seed, and FRUGAL_TEST_SEED in the environment replays it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/fpenv.h"
#include "device/cpu/sort.h"
#include "device/undo.h"
#include "support/random.h"

namespace frugal::device {
namespace {

using Row = std::vector<float>;

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float stored(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fc00000u) : x; }

// --- The reference: sums ------------------------------------------------------------------------

float reference_fold32(const std::vector<float>& x) {
  std::vector<float> level;
  for (size_t i = 0; i < x.size(); i += 32) {
    float run = x[i];
    for (size_t j = i + 1; j < std::min(i + 32, x.size()); ++j) run = run + x[j];
    level.push_back(run);
  }
  while (level.size() > 1) {
    std::vector<float> up;
    for (size_t i = 0; i < level.size(); i += 2) {
      up.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = up;
  }
  return level[0];
}

float reference_sum16(const std::vector<float>& x) {
  float lane[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lane[i % 16] = lane[i % 16] + x[i];
  for (int l = 0; l < 8; ++l) lane[l] = lane[l] + lane[l + 8];
  for (int l = 0; l < 4; ++l) lane[l] = lane[l] + lane[l + 4];
  for (int l = 0; l < 2; ++l) lane[l] = lane[l] + lane[l + 2];
  return lane[0] + lane[1];
}

Row fold_rows(const std::vector<Row>& terms, uint32_t dim) {
  Row out(dim);
  std::vector<float> column(terms.size());
  for (uint32_t c = 0; c < dim; ++c) {
    for (size_t t = 0; t < terms.size(); ++t) column[t] = terms[t][c];
    out[c] = reference_fold32(column);
  }
  return out;
}

// --- The reference: updates ---------------------------------------------------------------------

double reference_power(double x, uint64_t t) {
  double r = 1;
  while (t) {
    if (t & 1) r = r * x;
    x = x * x;
    t >>= 1;
  }
  return r;
}

// Returns false if the row is not touched.
bool reference_update(const frugal_optimizer& o, uint64_t step, uint32_t world, int32_t nan_policy,
                      Row g, Row& w, Row& s0, Row& s1) {
  const size_t dim = g.size();
  if (o.flags & FRUGAL_OPT_MEAN_RANKS) {
    for (float& x : g) x = x / static_cast<float>(world);
  }
  for (float& x : g) x = x * o.grad_scale;
  if (nan_policy == FRUGAL_NAN_SKIP) {
    for (float x : g) {
      if (std::isnan(x)) return false;
    }
  }
  if (const float c = o.clip_value; c > 0) {
    for (float& x : g) x = x > c ? c : (x < -c ? -c : x);
  }
  auto squares = [&] {
    Row q(dim);
    for (size_t i = 0; i < dim; ++i) q[i] = g[i] * g[i];
    return reference_sum16(q);
  };
  if (const float c = o.clip_norm; c > 0) {
    const float n = std::sqrt(squares());
    if (n > c) {
      const float f = c / n;
      for (float& x : g) x = x * f;
    }
  }
  if (const float d = o.weight_decay_l2; d != 0) {
    for (size_t i = 0; i < dim; ++i) {
      const float p = d * w[i];
      g[i] = g[i] + p;
    }
  }
  float q = 0;
  if (o.kind == FRUGAL_ROWWISE_ADAGRAD) {
    const float a = s0[0] + squares() / static_cast<float>(dim);
    q = o.lr / (std::sqrt(a) + o.eps);
    s0[0] = stored(a);
  }
  const uint64_t t = step + 1;
  const float alpha =
      static_cast<float>((static_cast<double>(o.lr) *
                          std::sqrt(1.0 - reference_power(static_cast<double>(o.beta2), t))) /
                         (1.0 - reference_power(static_cast<double>(o.beta1), t)));
  for (size_t i = 0; i < dim; ++i) {
    const float G = g[i];
    float& x = w[i];
    switch (o.kind) {
      case FRUGAL_SGD:
        x = x - o.lr * G;
        break;
      case FRUGAL_MOMENTUM: {
        const float b = o.momentum * s0[i] + (1.0f - o.dampening) * G;
        const float d = (o.flags & FRUGAL_OPT_NESTEROV) ? G + o.momentum * b : b;
        x = x - o.lr * d;
        s0[i] = stored(b);
        break;
      }
      case FRUGAL_ADAGRAD: {
        const float a = s0[i] + G * G;
        x = x - (o.lr * G) / (std::sqrt(a) + o.eps);
        s0[i] = stored(a);
        break;
      }
      case FRUGAL_ROWWISE_ADAGRAD:
        x = x - q * G;
        break;
      case FRUGAL_ADAM: {
        const float m = o.beta1 * s0[i] + (1.0f - o.beta1) * G;
        const float v = o.beta2 * s1[i] + ((1.0f - o.beta2) * G) * G;
        x = x - (alpha * m) / (std::sqrt(v) + o.eps);
        s0[i] = stored(m);
        s1[i] = stored(v);
        break;
      }
      case FRUGAL_RMSPROP: {
        const float v = o.rho * s0[i] + ((1.0f - o.rho) * G) * G;
        x = x - (o.lr * G) / (std::sqrt(v) + o.eps);
        s0[i] = stored(v);
        break;
      }
      default: {
        const float n = s1[i] + G * G;
        const float z = (s0[i] + G) - ((std::sqrt(n) - std::sqrt(s1[i])) / o.lr) * x;
        const float sign_l1 = z < 0 ? -o.ftrl_lambda1 : o.ftrl_lambda1;
        x = std::fabs(z) <= o.ftrl_lambda1
                ? 0.0f
                : (sign_l1 - z) / ((o.ftrl_beta + std::sqrt(n)) / o.lr + o.ftrl_lambda2);
        s0[i] = stored(z);
        s1[i] = stored(n);
      }
    }
    if (o.weight_decay != 0) x = x - (o.lr * o.weight_decay) * x;
    if (const float b = o.weight_bound; b > 0) x = x > b ? b : (x < -b ? -b : x);
    x = stored(x);
  }
  return true;
}

// --- Random inputs ------------------------------------------------------------------------------

using Random = RandomValues;

// A table of rows with state in memory of awkward strides; guards between rows must survive.
struct Table {
  static constexpr float kGuard = 12345.5f;
  Table(uint32_t dim_in, int32_t kind, size_t count_in, Random& random, double special)
      : dim(dim_in),
        columns(arith::state_columns(kind)),
        column(arith::column_floats(kind, dim_in)),
        count(count_in) {
    value_stride = dim + random.below(3) * random.below(20);
    state_second = column + random.below(5);
    state_stride = (columns == 2 ? state_second : 0) + column + random.below(4);
    values.assign(count * value_stride + 1, kGuard);
    state.assign(count * state_stride + 1, kGuard);
    for (size_t r = 0; r < count; ++r) {
      for (uint32_t c = 0; c < dim; ++c) {
        values[r * value_stride + c] = stored(random.value(special));
      }
      for (uint32_t s = 0; s < columns; ++s) {
        for (uint32_t c = 0; c < column; ++c) {
          const float x = random.value(special);
          state[r * state_stride + s * state_second + c] = stored(s == 0 ? x : std::fabs(x));
        }
      }
      if (kind == FRUGAL_ADAGRAD || kind == FRUGAL_ROWWISE_ADAGRAD || kind == FRUGAL_RMSPROP) {
        for (uint32_t c = 0; c < column; ++c) {
          float& x = state[r * state_stride + c];
          x = stored(std::fabs(x));
        }
      }
    }
  }
  RowsRef ref() {
    return {values.data(),    value_stride * 4, columns ? state.data() : nullptr,
            state_stride * 4, state_second * 4, dim};
  }
  Row row(size_t r) const {
    return Row(values.begin() + r * value_stride, values.begin() + r * value_stride + dim);
  }
  Row state_column(size_t r, uint32_t s) const {
    if (s >= columns) return Row();
    const auto begin = state.begin() + r * state_stride + s * state_second;
    return Row(begin, begin + column);
  }
  void set(size_t r, const Row& w, const Row& s0, const Row& s1) {
    std::copy(w.begin(), w.end(), values.begin() + r * value_stride);
    std::copy(s0.begin(), s0.end(), state.begin() + r * state_stride);
    std::copy(s1.begin(), s1.end(), state.begin() + r * state_stride + state_second);
  }
  uint32_t dim;
  uint32_t columns;
  uint32_t column;
  size_t count;
  size_t value_stride, state_stride, state_second;  // floats
  std::vector<float> values, state;
};

::testing::AssertionResult same_bits(const float* a, const float* b, size_t n, bool any_nan) {
  for (size_t i = 0; i < n; ++i) {
    if (any_nan && std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (bits(a[i]) != bits(b[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << ": " << std::hex << bits(a[i]) << " is not " << bits(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}
::testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b,
                                     bool any_nan = false) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "sizes differ";
  return same_bits(a.data(), b.data(), a.size(), any_nan);
}

uint32_t random_dim(Random& random) {
  static constexpr uint32_t kCommon[] = {1, 4, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128};
  if (random.chance(0.5)) return kCommon[random.below(std::size(kCommon))];
  return 1 + static_cast<uint32_t>(random.below(130));
}

// A gradient source over random memory, with the terms that it yields.
struct Gradients {
  Gradients(uint32_t dim_in, size_t n, Random& random, double special, bool general) : dim(dim_in) {
    stride = dim * sizeof(float) + random.below(3) * 4 * random.below(9);
    const bool bags = general && random.chance(0.7);
    const size_t rows = bags ? n / 3 + 1 : n;
    memory.resize(rows * stride / 4 + 1);
    // Half of the sources have infinities but no NaN: their sums can have NaNs all the same.
    const bool nans = random.chance(0.5);
    for (float& x : memory) {
      x = random.value(special);
      if (!nans && std::isnan(x)) x = std::signbit(x) ? -INFINITY : INFINITY;
    }
    source = {memory.data(), stride, nullptr, nullptr, nullptr};
    if (bags) {
      bag.resize(n);
      for (uint32_t& b : bag) b = static_cast<uint32_t>(random.below(rows));
      source.bag = bag.data();
    }
    if (general && random.chance(0.5)) {
      factor.resize(n);
      for (float& x : factor) x = nans ? random.value(special / 4) : random.value(0.0);
      source.factor = factor.data();
    }
    if (general && random.chance(0.5)) {
      divisor.resize(rows);
      for (float& x : divisor) x = static_cast<float>(1 + random.below(50));
      source.divisor = divisor.data();
    }
  }
  Gradients(const Gradients&) = delete;
  Row raw(size_t position) const {
    const size_t index = bag.empty() ? position : bag[position];
    const float* g = memory.data() + index * stride / 4;
    return Row(g, g + dim);
  }
  Row term(size_t position) const {
    Row x = raw(position);
    const size_t index = bag.empty() ? position : bag[position];
    for (float& v : x) {
      if (!factor.empty()) v = factor[position] * v;
      if (!divisor.empty()) v = v / divisor[index];
    }
    return x;
  }
  uint32_t dim;
  size_t stride;
  std::vector<float> memory, factor, divisor;
  std::vector<uint32_t> bag;
  GradSource source;
};

bool has_nan_value(const Row& r) {
  return std::any_of(r.begin(), r.end(), [](float x) { return std::isnan(x); });
}

// Slots with few, many or very many duplicates, and some padding.
std::vector<uint32_t> random_slots(Random& random, size_t n, size_t rows, double padding) {
  std::vector<uint32_t> slots(n);
  const double hot = random.chance(0.3) ? 0.7 : 0.1;
  for (uint32_t& s : slots) {
    s = random.chance(padding) ? kPaddingSlot
        : random.chance(hot)   ? static_cast<uint32_t>(random.below(2) % rows)
                               : static_cast<uint32_t>(random.below(rows));
  }
  return slots;
}

struct Sorted {
  Sorted(const std::vector<uint32_t>& keys, size_t rows) {
    pairs.resize(keys.size() + 1);
    std::vector<uint64_t> scratch(sort_scratch(keys.size(), rows) / 8);
    const size_t count =
        sort_pairs(keys.data(), keys.size(), 0, rows, pairs.data(), scratch.data());
    pairs.resize(count);
    slots.resize(count + 1);
    start.resize(count + 2);
    slots.resize(distinct_slots(pairs.data(), count, slots.data(), start.data()));
    start.resize(slots.size() + 1);
  }
  std::vector<uint64_t> pairs;
  std::vector<uint32_t> slots, start;
};

class KernelsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    k_ = kernels_isa(GetParam());
    if (k_ == nullptr) GTEST_SKIP() << GetParam() << " is not available here";
    ASSERT_STREQ(k_->name, GetParam());
  }
  // Runs `body` for `count` seeds.
  template <class Body>
  void for_seeds(uint64_t count, Body body) {
    for (uint64_t seed = first_seed(); seed < first_seed() + count; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Random random(seed);
      body(random);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
  const Kernels* k_ = nullptr;
  FpEnvironment environment_;
};

// --- Reading ------------------------------------------------------------------------------------

TEST_P(KernelsTest, Gather) {
  for_seeds(150, [&](Random& random) {
    const uint32_t dim = random.chance(0.05) ? 3000 : random_dim(random);
    Table table(dim, FRUGAL_SGD, 1 + random.below(200), random, 0.1);
    const size_t n = random.below(400);
    std::vector<uint32_t> slots = random_slots(random, n, table.count, 0.1);
    for (uint32_t& s : slots) s = random.chance(0.05) ? kMissingSlot : s;
    const size_t stride = dim + (random.chance(0.5) ? 0 : random.below(20));
    const size_t offset = random.chance(0.5) ? 0 : random.below(16);
    std::vector<float> memory(n * stride + 64, 7.0f);
    float* out = memory.data();
    while (reinterpret_cast<uintptr_t>(out) % 64 != 0) ++out;
    out += offset;
    std::vector<float> expected = memory;
    float* expect = expected.data() + (out - memory.data());
    std::vector<const float*> pointers(n);
    for (size_t i = 0; i < n; ++i) {
      const bool zero = slots[i] >= kMissingSlot;
      const Row row = zero ? Row(dim, 0.0f) : table.row(slots[i]);
      pointers[i] = zero ? nullptr : table.values.data() + slots[i] * table.value_stride;
      std::copy(row.begin(), row.end(), expect + i * stride);
    }
    const std::vector<float> blank = memory;
    for (const bool streaming : {false, true}) {
      std::copy(blank.begin(), blank.end(), memory.begin());
      k_->gather(table.ref(), slots.data(), n, out, stride * 4, streaming);
      ASSERT_TRUE(same_bits(memory, expected)) << "dim " << dim;
      std::copy(blank.begin(), blank.end(), memory.begin());
      k_->gather_pointers(pointers.data(), n, dim, out, stride * 4, streaming);
      ASSERT_TRUE(same_bits(memory, expected)) << "dim " << dim;
    }
  });
}

TEST_P(KernelsTest, Pool) {
  for_seeds(150, [&](Random& random) {
    const uint32_t dim = random_dim(random);
    const double special = random.chance(0.5) ? 0.0 : 0.05;
    Table table(dim, FRUGAL_SGD, 1 + random.below(200), random, special);
    const size_t bags = 1 + random.below(20);
    std::vector<uint64_t> offsets = {0};
    for (size_t b = 0; b < bags; ++b) {
      const uint64_t size = random.chance(0.1)   ? 1000 + random.below(1500)
                            : random.chance(0.2) ? 0
                                                 : random.below(80);
      offsets.push_back(offsets.back() + size);
    }
    const size_t n = offsets.back();
    const double padding = random.chance(0.1) ? 1.0 : 0.1;
    std::vector<uint32_t> slots = random_slots(random, n, table.count, padding);
    for (uint32_t& s : slots) s = random.chance(0.02) ? kMissingSlot : s;
    const bool weighted = random.chance(0.5);
    std::vector<float> weights(n);
    for (float& w : weights) w = random.value(special);
    const bool mean = random.chance(0.5);
    const size_t stride = dim + random.below(5);
    std::vector<float> expected(bags * stride, 7.0f);
    const std::vector<float> zeros(dim, 0.0f);
    std::vector<const float*> pointers(n);
    for (size_t i = 0; i < n; ++i) {
      pointers[i] = slots[i] == kPaddingSlot   ? nullptr
                    : slots[i] == kMissingSlot ? zeros.data()
                                               : &table.values[slots[i] * table.value_stride];
    }
    for (size_t b = 0; b < bags; ++b) {
      std::vector<Row> terms;
      for (size_t i = offsets[b]; i < offsets[b + 1]; ++i) {
        if (slots[i] == kPaddingSlot) continue;
        Row row = slots[i] == kMissingSlot ? zeros : table.row(slots[i]);
        if (weighted) {
          for (float& x : row) x = weights[i] * x;
        }
        terms.push_back(row);
      }
      Row sum = terms.empty() ? zeros : fold_rows(terms, dim);
      for (float& x : sum) {
        if (mean && !terms.empty()) x = x / static_cast<float>(terms.size());
        x = stored(x);
      }
      std::copy(sum.begin(), sum.end(), expected.begin() + b * stride);
    }
    const size_t cut = random.below(bags + 1);  // two calls, as two threads would make them
    std::vector<float> out(bags * stride, 7.0f);
    const float* w = weighted ? weights.data() : nullptr;
    k_->pool(table.ref(), slots.data(), offsets.data(), 0, cut, w, mean, out.data(), stride * 4);
    k_->pool(table.ref(), slots.data(), offsets.data(), cut, bags, w, mean, out.data(), stride * 4);
    ASSERT_TRUE(same_bits(out, expected)) << "dim " << dim;
    out.assign(out.size(), 7.0f);
    k_->pool_pointers(pointers.data(), dim, offsets.data(), 0, bags, w, mean, out.data(),
                      stride * 4);
    ASSERT_TRUE(same_bits(out, expected)) << "dim " << dim;
  });
}

TEST_P(KernelsTest, WeightGrads) {
  for_seeds(80, [&](Random& random) {
    const uint32_t dim = random_dim(random);
    const double special = random.chance(0.5) ? 0.0 : 0.03;
    Table table(dim, FRUGAL_SGD, 1 + random.below(100), random, special);
    const size_t n = random.below(300);
    std::vector<uint32_t> slots = random_slots(random, n, table.count, 0.1);
    for (uint32_t& s : slots) s = random.chance(0.02) ? kMissingSlot : s;
    Gradients gradients(dim, n + 1, random, special, true);
    const std::vector<float> zeros(dim, 0.0f);
    std::vector<const float*> pointers(n);
    std::vector<float> expected(n), out(n, 7.0f);
    for (size_t i = 0; i < n; ++i) {
      if (slots[i] == kPaddingSlot) continue;
      Row row = slots[i] == kMissingSlot ? zeros : table.row(slots[i]);
      pointers[i] =
          slots[i] == kMissingSlot ? zeros.data() : &table.values[slots[i] * table.value_stride];
      const Row g = gradients.raw(i);
      for (uint32_t c = 0; c < dim; ++c) row[c] = row[c] * g[c];
      expected[i] = stored(reference_sum16(row));
    }
    k_->weight_grads(table.ref(), slots.data(), n, gradients.source, out.data());
    ASSERT_TRUE(same_bits(out, expected)) << "dim " << dim;
    out.assign(n, 7.0f);
    k_->weight_grads_pointers(pointers.data(), n, dim, gradients.source, out.data());
    ASSERT_TRUE(same_bits(out, expected)) << "dim " << dim;
  });
}

// --- Summing ------------------------------------------------------------------------------------

TEST_P(KernelsTest, Reduce) {
  for_seeds(120, [&](Random& random) {
    const uint32_t dim = random.chance(0.03) ? 2500 : random_dim(random);
    const double special = random.chance(0.4) ? 0.0 : random.chance(0.5) ? 0.001 : 0.05;
    const size_t n = random.chance(0.2) ? 3000 : 1 + random.below(300);
    const size_t rows = 1 + random.below(n);
    const std::vector<uint32_t> keys = random_slots(random, n, rows, 0.1);
    const Sorted sorted(keys, rows);
    Gradients gradients(dim, n, random, special, random.chance(0.5));
    const size_t stride = random.chance(0.5) ? (dim + 15) / 16 * 16 : dim + random.below(5);
    std::vector<float> memory(sorted.slots.size() * stride + 64, 7.0f);
    float* out = memory.data();
    while (reinterpret_cast<uintptr_t>(out) % 64 != 0) ++out;
    std::vector<float> expected = memory;
    float* expect = expected.data() + (out - memory.data());
    bool nan = false;
    for (size_t i = 0; i < sorted.slots.size(); ++i) {
      std::vector<Row> terms;
      for (size_t p = 0; p < n; ++p) {
        if (keys[p] == sorted.slots[i]) terms.push_back(gradients.term(p));
      }
      for (const Row& t : terms) nan = nan || has_nan_value(t);
      const Row sum = fold_rows(terms, dim);
      std::copy(sum.begin(), sum.end(), expect + i * stride);
    }
    const size_t cut = random.below(sorted.slots.size() + 1);
    const bool streaming = random.chance(0.5);
    bool seen = false;
    for (const auto& [a, b] : {std::pair{size_t{0}, cut}, std::pair{cut, sorted.slots.size()}}) {
      seen |= k_->reduce(sorted.pairs.data(), sorted.start.data(), a, b, dim, gradients.source, out,
                         stride, streaming);
    }
    ASSERT_TRUE(same_bits(memory, expected, true)) << "dim " << dim;
    ASSERT_EQ(seen, nan);
  });
}

// An infinite weight makes no NaN of gradients that are not 0, whatever is next to the row in a
// vector.
TEST_P(KernelsTest, InfiniteFactors) {
  for_seeds(20, [&](Random& random) {
    const uint32_t dim = random_dim(random);
    std::vector<float> g(dim, 2.0f), out(dim + 64);
    float factor = random.chance(0.5) ? INFINITY : -INFINITY;
    const uint64_t pair = 0;
    const uint32_t start[] = {0, 1};
    const GradSource source{g.data(), dim * sizeof(float), nullptr, &factor, nullptr};
    EXPECT_FALSE(k_->reduce(&pair, start, 0, 1, dim, source, out.data(), dim + 64, false)) << dim;
    EXPECT_EQ(out[dim - 1], factor);
    g[dim - 1] = 0.0f;
    EXPECT_TRUE(k_->reduce(&pair, start, 0, 1, dim, source, out.data(), dim + 64, false)) << dim;
  });
}

TEST_P(KernelsTest, HasNan) {
  for_seeds(100, [&](Random& random) {
    const uint32_t dim = random_dim(random);
    const size_t n = random.below(50);
    const size_t stride = dim + (random.chance(0.5) ? 0 : random.below(5));
    std::vector<float> grads(n * stride + 1, std::nanf(""));
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t c = 0; c < dim; ++c) {
        grads[i * stride + c] = random.chance(0.1) ? INFINITY : -1.0f;
      }
    }
    ASSERT_FALSE(k_->has_nan(grads.data(), n, dim, stride * 4));
    if (n == 0) return;
    grads[random.below(n) * stride + random.below(dim)] = std::bit_cast<float>(0xff800001u);
    ASSERT_TRUE(k_->has_nan(grads.data(), n, dim, stride * 4));
  });
}

// --- Updating -----------------------------------------------------------------------------------

frugal_optimizer random_optimizer(Random& random, int32_t kind) {
  frugal_optimizer o;
  frugal_optimizer defaults = FRUGAL_OPTIMIZER_INIT;
  o = defaults;
  o.kind = kind;
  o.lr = 0.05f;
  if (kind == FRUGAL_MOMENTUM && random.chance(0.5)) o.flags |= FRUGAL_OPT_NESTEROV;
  if (random.chance(0.5)) o.dampening = 0.1f;
  if (kind == FRUGAL_FTRL && random.chance(0.7)) o.ftrl_lambda1 = 0.2f;
  if (random.chance(0.5)) o.ftrl_lambda2 = 0.3f;
  if (random.chance(0.4)) return o;  // nothing around the optimizer: the kernels' short path
  if (random.chance(0.3)) o.flags |= FRUGAL_OPT_MEAN_RANKS;
  if (random.chance(0.3)) o.grad_scale = 0.37f;
  if (random.chance(0.3)) o.clip_value = 0.4f;
  if (random.chance(0.4)) o.clip_norm = 0.9f;
  if (random.chance(0.3)) o.weight_decay_l2 = 0.01f;
  if (random.chance(0.3)) o.weight_decay = 0.02f;
  if (random.chance(0.3)) o.weight_bound = 0.5f;
  return o;
}

// What an Undo records of each row: a copy and its name before it is written, and afterwards that
// it is written.
struct UndoWatch {
  const RowsRef before;
  const bool by_marks, watched;  // or the kernel records it by itself
  std::vector<float> values, state;
  uint32_t slot = 0xffffffffu;
  uint64_t progress = 0;
  std::vector<uint8_t> marks;
  std::vector<uint32_t> index, written;
  std::vector<std::vector<float>>
      then;               // the values of those rows when they were recorded as written
  size_t kept, told = 0;  // floats of state; calls
  Undo undo{};

  UndoWatch(const RowsRef& rows, int32_t kind, size_t entries, bool marked, bool watch,
            Random& random)
      : before(rows),
        by_marks(marked),
        watched(watch),
        values(rows.value_pitch / 4),
        state(rows.state ? rows.state_pitch / 4 : 0),
        marks(2 * entries),
        kept(kind == FRUGAL_ROWWISE_ADAGRAD ? 1 : rows.state_pitch / 4) {
    for (uint32_t i = 0; i < 2 * entries; ++i) index.push_back(i);
    for (size_t i = index.size(); i > 1; --i) std::swap(index[i - 1], index[random.below(i)]);
  }
  // Of a call whose entry 0 is entry `first`.
  const Undo* at(size_t first) {
    undo.values = values.data();
    undo.state = state.empty() ? nullptr : state.data();
    undo.slot = &slot;
    undo.progress = by_marks || watched ? nullptr : &progress;
    undo.marks = by_marks && !watched ? marks.data() : nullptr;
    undo.rows = index.data() + first;
    undo.instead = watched ? tell : nullptr;
    undo.context = this;
    return &undo;
  }
  static void tell(const Undo& undo, const RowsRef& of, uint32_t row, size_t i, bool is_written) {
    UndoWatch& w = *static_cast<UndoWatch*>(undo.context);
    const RowsRef& was = w.before;
    auto same = [&](const float* a, const float* b, size_t n) {
      return std::memcmp(a, b, n * sizeof(float)) == 0;
    };
    EXPECT_EQ(is_written, w.told++ % 2 == 1);
    const float* old = was.row(row);
    EXPECT_TRUE(same(w.values.data(), old, was.dim));
    EXPECT_TRUE(is_written || same(of.row(row), old, was.dim));
    if (was.state) {
      old = was.state_row(row);
      EXPECT_TRUE(same(w.state.data(), old, w.kept));
      EXPECT_TRUE(is_written || same(of.state_row(row), old, w.kept));
    }
    if (is_written) {
      EXPECT_EQ(w.slot, row);
      w.progress = row + 1;
      w.marks[undo.rows[i]] = 1;
      w.written.push_back(row);
      w.then.emplace_back(of.row(row), of.row(row) + of.dim);
    } else {
      w.slot = row;
    }
  }
  // Rows `which` of the list, the last of which was written last.
  void check(const char* what, const RowsRef& now, const std::vector<uint32_t>& which,
             uint32_t last) {
    if (watched) {
      for (size_t i = 0; i < written.size(); ++i)
        EXPECT_EQ(std::memcmp(then[i].data(), now.row(written[i]), now.dim * sizeof(float)), 0)
            << what;
      std::sort(written.begin(), written.end());
      EXPECT_EQ(written, which) << what;
    }
    if (which.empty()) return;
    EXPECT_EQ(slot, last) << what;
    EXPECT_TRUE((!watched && by_marks) || progress == uint64_t{last} + 1) << what;
    for (size_t i = 0; (watched || by_marks) && i < index.size(); ++i)
      EXPECT_EQ(marks[index[i]], i < which.size()) << what;
  }
};

// All ways to apply the same sums.
TEST_P(KernelsTest, Apply) {
  for_seeds(350, [&](Random& random) {
    const int32_t kind = static_cast<int32_t>(random.below(7));
    const uint32_t dim =
        random.chance(0.03) ? 2049 + static_cast<uint32_t>(random.below(4000)) : random_dim(random);
    const double special = random.chance(0.5) ? 0.0 : random.chance(0.5) ? 0.001 : 0.05;
    const frugal_optimizer o = random_optimizer(random, kind);
    const int32_t policy = random.chance(0.5) ? FRUGAL_NAN_SKIP : FRUGAL_NAN_ACCEPT;
    const uint64_t step = random.chance(0.2) ? random.below(UINT64_MAX) : random.below(1000);
    const uint32_t world = 1 + static_cast<uint32_t>(random.below(3));
    const arith::StepScalars scalars = arith::step_scalars(o, step, world, policy, dim);
    const size_t n = dim > 2048 ? 40 : 1 + random.below(400);
    const size_t rows = 1 + random.below(n);
    const std::vector<uint32_t> keys = random_slots(random, n, rows, 0.05);
    const Sorted sorted(keys, rows);
    const size_t distinct = sorted.slots.size();
    Gradients gradients(dim, n, random, special, random.chance(0.3));
    const Table before(dim, kind, rows, random, special);

    std::vector<Row> sums(distinct);
    for (size_t i = 0; i < distinct; ++i) {
      std::vector<Row> terms;
      for (uint32_t j = sorted.start[i]; j < sorted.start[i + 1]; ++j) {
        terms.push_back(gradients.term(static_cast<uint32_t>(sorted.pairs[j])));
      }
      sums[i] = fold_rows(terms, dim);
    }
    // The reference: all rows, and then some of the rows only.
    std::vector<uint32_t> some;
    for (uint32_t i = 0; i < distinct; ++i) {
      if (random.chance(0.4)) some.push_back(i);
    }
    auto reference = [&](const std::vector<uint32_t>& which, const std::vector<Row>& g,
                         size_t* touched) {
      Table t = before;
      *touched = 0;
      for (uint32_t i : which) {
        const uint32_t slot = sorted.slots[i];
        Row w = t.row(slot), s0 = t.state_column(slot, 0), s1 = t.state_column(slot, 1);
        if (reference_update(o, step, world, policy, g[i], w, s0, s1)) {
          t.set(slot, w, s0, s1);
          ++*touched;
        }
      }
      return t;
    };
    std::vector<uint32_t> all(distinct);
    for (uint32_t i = 0; i < distinct; ++i) all[i] = i;
    size_t touched_all, touched_some;
    const Table expect_all = reference(all, sums, &touched_all);
    const Table expect_some = reference(some, sums, &touched_some);
    // The last row that is written is entry `last` of `which`. run(rows, undo_at): undo_at(first)
    // is the Undo of a call with entries first and on, or NULL.
    auto check = [&](const char* what, const Table& expected, size_t touched,
                     const std::vector<uint32_t>& which, size_t last, auto run) {
      std::vector<uint32_t> rows_of;
      for (uint32_t i : which) rows_of.push_back(sorted.slots[i]);
      enum { kWithout, kTold, kWatched, kWays };
      for (int way = kWithout; way < kWays; ++way) {
        Table was = before, t = before;
        UndoWatch watch(was.ref(), kind, distinct, random.chance(0.5), way == kWatched, random);
        const size_t got =
            run(t.ref(), [&](size_t first) { return way == kWithout ? nullptr : watch.at(first); });
        EXPECT_EQ(got, touched) << what;
        EXPECT_TRUE(same_bits(t.values, expected.values))
            << what << " values, kind " << kind << " dim " << dim;
        EXPECT_TRUE(same_bits(t.state, expected.state))
            << what << " state, kind " << kind << " dim " << dim;
        if (way != kWithout)
          watch.check(what, t.ref(), rows_of, last < which.size() ? rows_of[last] : 0);
      }
    };

    const size_t stride = dim + random.below(5);
    std::vector<float> packed(distinct * stride + 1);
    for (size_t i = 0; i < distinct; ++i) {
      std::copy(sums[i].begin(), sums[i].end(), packed.begin() + i * stride);
    }
    check("apply", expect_all, touched_all, all, distinct - 1, [&](const RowsRef& r, auto undo) {
      return k_->apply(r, scalars, sorted.slots.data(), distinct, packed.data(), stride, undo(0));
    });
    check("apply_indexed", expect_some, touched_some, some, some.size() - 1,
          [&](const RowsRef& r, auto undo) {
            return k_->apply_indexed(r, scalars, sorted.slots.data(), some.data(), some.size(),
                                     packed.data(), stride, undo(0));
          });
    const size_t cut = random.below(distinct + 1);
    check("apply_fused", expect_all, touched_all, all, (cut ? cut : distinct) - 1,
          [&](const RowsRef& r, auto undo) {
            size_t touched =
                k_->apply_fused(r, scalars, sorted.pairs.data(), sorted.slots.data(),
                                sorted.start.data(), cut, distinct, gradients.source, undo(cut));
            return touched + k_->apply_fused(r, scalars, sorted.pairs.data(), sorted.slots.data(),
                                             sorted.start.data(), 0, cut, gradients.source,
                                             undo(0));
          });
    check("apply_fused_indexed", expect_some, touched_some, some, some.size() - 1,
          [&](const RowsRef& r, auto undo) {
            return k_->apply_fused_indexed(r, scalars, sorted.pairs.data(), sorted.slots.data(),
                                           sorted.start.data(), some.data(), some.size(),
                                           gradients.source, undo(0));
          });

    // Several ranks: each row has one to four terms, added serially.
    std::vector<const float*> terms;
    std::vector<uint32_t> start = {0};
    std::vector<Row> rank_sums(distinct);
    for (size_t i = 0; i < distinct; ++i) {
      const size_t count = 1 + random.below(4);
      for (size_t t = 0; t < count; ++t) {
        const size_t other = random.below(distinct);
        terms.push_back(&packed[other * stride]);
        for (uint32_t c = 0; c < dim; ++c) {
          if (t == 0) {
            rank_sums[i] = sums[other];
            break;
          }
          rank_sums[i][c] = rank_sums[i][c] + sums[other][c];
        }
      }
      start.push_back(static_cast<uint32_t>(terms.size()));
    }
    size_t touched_terms;
    const Table expect_terms = reference(all, rank_sums, &touched_terms);
    check("apply_terms", expect_terms, touched_terms, all, distinct - 1,
          [&](const RowsRef& r, auto undo) {
            return k_->apply_terms(r, scalars, sorted.slots.data(), distinct, terms.data(),
                                   start.data(), undo(0));
          });
  });
}

// --- Making rows --------------------------------------------------------------------------------

TEST_P(KernelsTest, InitializeIsTheSameInEveryInstructionSet) {
  const Kernels* baseline = kernels_isa("baseline");
  for_seeds(60, [&](Random& random) {
    const int32_t kind = static_cast<int32_t>(random.below(7));
    const int32_t init = static_cast<int32_t>(random.below(5));
    const uint32_t dim = random_dim(random);
    const size_t rows = 1 + random.below(300);
    Table expected(dim, kind, rows, random, 0.0);
    Table t = expected;
    const arith::InitSpec spec =
        arith::init_spec(init, random.value(0), random.value(0.1), rows, dim,
                         arith::table_hash(random.below(100), "name", 4), kind, random.value(0.1));
    std::vector<uint64_t> keys(rows);
    std::vector<uint32_t> slots(rows);
    for (size_t i = 0; i < rows; ++i) {
      keys[i] = 1000 + i;
      slots[i] = static_cast<uint32_t>(i);
    }
    baseline->initialize(expected.ref(), spec, keys.data(), 0, slots.data(), 0, rows);
    k_->initialize(t.ref(), spec, nullptr, 1000, nullptr, 0, rows);
    ASSERT_TRUE(same_bits(t.values, expected.values));
    ASSERT_TRUE(same_bits(t.state, expected.state));
    for (size_t i = 0; i < rows; ++i) {  // an element by itself
      const uint32_t c = static_cast<uint32_t>(random.below(dim));
      const float x =
          arith::initial_value(spec, arith::column_bits(arith::row_hash(spec.table, keys[i]), c));
      ASSERT_EQ(bits(x), bits(t.row(i)[c]));
      for (uint32_t s = 0; s < t.columns; ++s) {
        ASSERT_EQ(bits(t.state_column(i, s)[0]), bits(spec.state[s]));
      }
    }
    for (size_t i = 0; i + 1 < rows; ++i) {  // what lies between rows stays
      for (size_t c = dim; c < t.value_stride; ++c) {
        ASSERT_EQ(t.values[i * t.value_stride + c], Table::kGuard);
      }
    }
  });
}

TEST_P(KernelsTest, Canonicalize) {
  for_seeds(50, [&](Random& random) {
    std::vector<float> x(random.below(200)), expected;
    for (float& v : x) v = random.value(0.7);
    for (float v : x) expected.push_back(stored(v));
    k_->canonicalize(x.data(), x.size());
    ASSERT_TRUE(same_bits(x, expected));
  });
}

INSTANTIATE_TEST_SUITE_P(Isa, KernelsTest, ::testing::Values("baseline", "avx2", "avx512"),
                         [](const auto& info) { return std::string(info.param); });

TEST(KernelsDispatch, ChoosesOneThatThisMachineHas) {
  EXPECT_EQ(&kernels(), kernels_isa(kernels().name));
  EXPECT_EQ(kernels_isa("nonsense"), nullptr);
  EXPECT_NE(kernels_isa("baseline"), nullptr);
}

// --- sort.h -------------------------------------------------------------------------------------

TEST(Sort, EqualsStableSort) {
  for (uint64_t seed = first_seed(); seed < first_seed() + 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    static constexpr uint64_t kRows[] = {
        1,        2,         3, 255, 256, 4096, 4097, 1000000, 10000000, 1u << 24, (1u << 24) + 1,
        1u << 30, 4294967294};
    const uint64_t rows = kRows[random.below(std::size(kRows))];
    const size_t n = random.chance(0.1) ? 70000 : random.below(random.chance(0.3) ? 40 : 3000);
    const uint32_t first = random.chance(0.5) ? 0 : static_cast<uint32_t>(random.below(1u << 31));
    std::vector<uint32_t> slots(n);
    const double padding = random.chance(0.1) ? 1.0 : random.chance(0.5) ? 0.2 : 0.0;
    const bool few = random.chance(0.3);
    for (uint32_t& s : slots) {
      s = random.chance(padding) ? kPaddingSlot
                                 : static_cast<uint32_t>(random.below(few ? 1 + rows / 7 : rows));
    }
    if (n > 0 && !few && padding == 0) slots[random.below(n)] = static_cast<uint32_t>(rows - 1);
    std::vector<uint64_t> expected;
    for (size_t i = 0; i < n; ++i) {
      if (slots[i] == kPaddingSlot) continue;
      expected.push_back(static_cast<uint64_t>(slots[i]) << 32 |
                         (first + static_cast<uint32_t>(i)));
    }
    std::stable_sort(expected.begin(), expected.end(),
                     [](uint64_t a, uint64_t b) { return a >> 32 < b >> 32; });
    // Guards on either side of what it may write.
    constexpr uint64_t kGuard = 0x5afe5afe5afe5afe;
    const size_t words = sort_scratch(n, rows) / 8;
    std::vector<uint64_t> pairs(n + 1, kGuard), scratch(words + 2, kGuard);
    const size_t found = sort_pairs(slots.data(), n, first, rows, pairs.data(), scratch.data() + 1);
    ASSERT_EQ(pairs[n], kGuard);
    ASSERT_EQ(scratch.front(), kGuard);
    ASSERT_EQ(scratch.back(), kGuard);
    pairs.resize(found);
    ASSERT_EQ(pairs, expected);

    std::vector<uint32_t> distinct(found), start(found + 1);
    const size_t count = distinct_slots(pairs.data(), found, distinct.data(), start.data());
    size_t at = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (i != 0 && expected[i] >> 32 == expected[i - 1] >> 32) continue;
      ASSERT_LT(at, count);
      ASSERT_EQ(distinct[at], expected[i] >> 32);
      ASSERT_EQ(start[at], i);
      ++at;
    }
    ASSERT_EQ(at, count);
    ASSERT_EQ(start[count], expected.size());
  }
}

}  // namespace
}  // namespace frugal::device
