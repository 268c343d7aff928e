// The equations of lib/arith: sums, optimizers against an evaluation in double, and the
// distributions of initial values.
//
// kernels_test compares bits. This test checks that the equations themselves are right. It also
// covers base/fpenv.h.
#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "arith/fold.h"
#include "arith/init.h"
#include "arith/nan.h"
#include "arith/optimizer.h"
#include "base/fpenv.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace frugal::arith {
namespace {

// --- Shapes of sums -----------------------------------------------------------------------------

// A sum that remembers its brackets.
struct Formula {
  std::string text;
  Formula operator+(const Formula& b) const { return {"(" + text + "+" + b.text + ")"}; }
};

std::string pairwise(std::vector<std::string> level) {
  while (level.size() > 1) {
    std::vector<std::string> up;
    for (size_t i = 0; i + 1 < level.size(); i += 2) {
      up.push_back("(" + level[i] + "+" + level[i + 1] + ")");
    }
    if (level.size() % 2) up.push_back(level.back());
    level = up;
  }
  return level[0];
}

TEST(Fold32, HasTheDocumentedShape) {
  for (size_t n : {1,   2,   3,   31,  32,  33,  63,  64,  65,  95,   96,   97,   128,
                   129, 160, 161, 200, 223, 224, 225, 256, 257, 1000, 1024, 1025, 3333}) {
    std::vector<std::string> runs;
    for (size_t i = 0; i < n; i += 32) {
      std::string run = std::to_string(i);
      for (size_t j = i + 1; j < n && j < i + 32; ++j) {
        run = "(" + run + "+" + std::to_string(j) + ")";
      }
      runs.push_back(run);
    }
    size_t next = 0;
    const Formula sum = fold32<Formula>(n, [&] { return Formula{std::to_string(next++)}; });
    EXPECT_EQ(sum.text, pairwise(runs)) << n;
    EXPECT_EQ(next, n);
  }
}

TEST(Fold32, CopiesTheFirstTerm) {
  const float x = fold32<float>(1, [] { return -0.0f; });
  EXPECT_TRUE(std::signbit(x));
}

TEST(Sum16, HasTheDocumentedShape) {
  // Powers of two far apart: any other order loses other bits.
  std::mt19937 engine(7);
  for (uint32_t n = 0; n < 100; ++n) {
    std::vector<float> x(n);
    for (float& v : x) {
      const float mantissa = 1.0f + static_cast<float>(engine() % 1000) / 999;
      v = std::ldexp(mantissa, static_cast<int>(engine() % 40));
    }
    float lane[16] = {};
    for (uint32_t i = 0; i < n; ++i) lane[i % 16] += x[i];
    for (int half : {8, 4, 2, 1}) {
      for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    EXPECT_EQ(sum16(n, [&](uint32_t i) { return x[i]; }), lane[0]);
  }
  EXPECT_FALSE(std::signbit(sum16(1, [](uint32_t) { return -0.0f; })));
}

TEST(Nan, IsStoredAsOnePattern) {
  for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u}) {
    const float x = canonical(std::bit_cast<float>(bits));
    EXPECT_EQ(std::bit_cast<uint32_t>(x), 0x7fc00000u);
  }
  for (float x : {0.0f, -0.0f, 1e-45f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(std::bit_cast<uint32_t>(canonical(x)), std::bit_cast<uint32_t>(x));
  }
}

// --- Optimizers ---------------------------------------------------------------------------------

struct Element {
  double w, s0, s1;
};

// The textbook equations in double.
Element exact(const frugal_optimizer& o, uint64_t step, Element e, double g, double mean_square) {
  const double lr = o.lr, eps = o.eps;
  switch (o.kind) {
    case FRUGAL_SGD:
      e.w -= lr * g;
      break;
    case FRUGAL_MOMENTUM:
      e.s0 = o.momentum * e.s0 + (1.0 - o.dampening) * g;
      e.w -= lr * ((o.flags & FRUGAL_OPT_NESTEROV) ? g + o.momentum * e.s0 : e.s0);
      break;
    case FRUGAL_ADAGRAD:
      e.s0 += g * g;
      e.w -= lr * g / (std::sqrt(e.s0) + eps);
      break;
    case FRUGAL_ROWWISE_ADAGRAD:
      e.s0 += mean_square;
      e.w -= lr * g / (std::sqrt(e.s0) + eps);
      break;
    case FRUGAL_ADAM: {
      const double t = static_cast<double>(step + 1);
      const double b1 = o.beta1, b2 = o.beta2;
      e.s0 = b1 * e.s0 + (1 - b1) * g;
      e.s1 = b2 * e.s1 + (1 - b2) * g * g;
      e.w -= lr * std::sqrt(1 - std::pow(b2, t)) / (1 - std::pow(b1, t)) * e.s0 /
             (std::sqrt(e.s1) + eps);
      break;
    }
    case FRUGAL_RMSPROP:
      e.s0 = o.rho * e.s0 + (1.0 - o.rho) * g * g;
      e.w -= lr * g / (std::sqrt(e.s0) + eps);
      break;
    default: {
      const double n = e.s1 + g * g;
      e.s0 += g - (std::sqrt(n) - std::sqrt(e.s1)) / lr * e.w;
      e.s1 = n;
      const double l1 = o.ftrl_lambda1;
      e.w = std::fabs(e.s0) <= l1 ? 0.0
                                  : -(e.s0 - (e.s0 > 0 ? l1 : -l1)) /
                                        ((o.ftrl_beta + std::sqrt(n)) / lr + o.ftrl_lambda2);
    }
  }
  return e;
}

template <int kKind>
void update(const StepScalars& s, float& w, float g, float& s0, float& s1, float rate) {
  update_element<kKind>(s, w, g, s0, s1, rate);
}

using Update = void (*)(const StepScalars&, float&, float, float&, float&, float);
constexpr Update kUpdates[] = {update<0>, update<1>, update<2>, update<3>,
                               update<4>, update<5>, update<6>};

TEST(Optimizer, FollowsTheEquationsInDouble) {
  std::mt19937_64 engine(11);
  std::normal_distribution<double> normal;
  for (int kind = 0; kind <= FRUGAL_FTRL; ++kind) {
    for (int variant = 0; variant < 4; ++variant) {
      const frugal_optimizer defaults = FRUGAL_OPTIMIZER_INIT;
      frugal_optimizer o = defaults;
      o.kind = kind;
      o.lr = 0.05f;
      if (variant & 1) o.flags = FRUGAL_OPT_NESTEROV;
      if (variant & 2) {
        o.dampening = 0.2f;
        o.ftrl_lambda1 = 0.3f;
        o.ftrl_lambda2 = 0.1f;
      }
      float w = 0.4f, s0 = 0.0f, s1 = 0.0f;
      if (kind == FRUGAL_ADAGRAD || kind == FRUGAL_ROWWISE_ADAGRAD) s0 = 0.1f;
      if (kind == FRUGAL_FTRL) s1 = 0.1f;
      Element e = {w, s0, s1};
      for (uint64_t step = 0; step < 300; ++step) {
        const float g = static_cast<float>(normal(engine));
        const StepScalars s = step_scalars(o, step, 1, FRUGAL_NAN_REJECT, 1);
        float rate = 0;
        if (kind == FRUGAL_ROWWISE_ADAGRAD) rate = update_row(s, g * g, s0);
        kUpdates[kind](s, w, g, s0, s1, rate);
        e = exact(o, step, e, g, static_cast<double>(g) * g);
        ASSERT_NEAR(w, e.w, 2e-4 * (std::fabs(e.w) + 0.1)) << "kind " << kind << " step " << step;
        ASSERT_NEAR(s0, e.s0, 2e-4 * (std::fabs(e.s0) + 0.1)) << "kind " << kind;
        ASSERT_NEAR(s1, e.s1, 2e-4 * (std::fabs(e.s1) + 0.1)) << "kind " << kind;
      }
    }
  }
}

TEST(Optimizer, StepScalars) {
  const frugal_optimizer defaults = FRUGAL_OPTIMIZER_INIT;
  frugal_optimizer o = defaults;
  o.kind = FRUGAL_ADAM;
  for (uint64_t step : {uint64_t{0}, uint64_t{1}, uint64_t{9}, uint64_t{100000}, UINT64_MAX - 1}) {
    const StepScalars s = step_scalars(o, step, 4, FRUGAL_NAN_REJECT, 8);
    const double t = static_cast<double>(step) + 1;
    const double alpha = static_cast<double>(o.lr) *
                         std::sqrt(1 - std::pow(static_cast<double>(o.beta2), t)) /
                         (1 - std::pow(static_cast<double>(o.beta1), t));
    EXPECT_NEAR(s.alpha, alpha, 1e-6 * alpha) << step;
    EXPECT_EQ(s.flags & kAroundOptimizer, 0u);
    frugal_optimizer uncorrected = o;
    uncorrected.flags = FRUGAL_OPT_NO_BIAS_CORRECTION;
    EXPECT_EQ(step_scalars(uncorrected, step, 4, FRUGAL_NAN_REJECT, 8).alpha, o.lr);
  }
  o.flags = FRUGAL_OPT_MEAN_RANKS | FRUGAL_OPT_NESTEROV;
  o.grad_scale = 0.5f;
  o.clip_value = 1;
  o.clip_norm = 2;
  o.weight_decay_l2 = 3;
  o.weight_decay = 4;
  o.weight_bound = 5;
  const StepScalars s = step_scalars(o, 0, 4, FRUGAL_NAN_SKIP, 8);
  EXPECT_EQ(s.flags, kAroundOptimizer | kNesterov);
  EXPECT_EQ(s.decay, o.lr * 4.0f);
  EXPECT_EQ(step_scalars(o, 0, 1, FRUGAL_NAN_REJECT, 8).flags & kMeanRanks, 0u);
}

TEST(Optimizer, StateLayout) {
  EXPECT_EQ(state_floats(FRUGAL_SGD, 7), 0u);
  EXPECT_EQ(state_floats(FRUGAL_MOMENTUM, 7), 7u);
  EXPECT_EQ(state_floats(FRUGAL_ADAGRAD, 7), 7u);
  EXPECT_EQ(state_floats(FRUGAL_ROWWISE_ADAGRAD, 7), 1u);
  EXPECT_EQ(state_floats(FRUGAL_ADAM, 7), 14u);
  EXPECT_EQ(state_floats(FRUGAL_RMSPROP, 7), 7u);
  EXPECT_EQ(state_floats(FRUGAL_FTRL, 7), 14u);
  EXPECT_EQ(initial_state(FRUGAL_ADAGRAD, 0, 0.5f), 0.5f);
  EXPECT_EQ(initial_state(FRUGAL_FTRL, 0, 0.5f), 0.0f);
  EXPECT_EQ(initial_state(FRUGAL_FTRL, 1, 0.5f), 0.5f);
  EXPECT_EQ(initial_state(FRUGAL_RMSPROP, 0, 0.5f), 0.0f);
}

// Kinds are numbered from 0; each is something, and the dispatch by number meets it.
TEST(Optimizer, Kinds) {
  for (int32_t kind = 0; kind <= kLastOptimizer; ++kind) {
    const frugal::arith::Optimizer is = optimizer_of(kind);
    ASSERT_NE(is.name, nullptr) << kind;
    EXPECT_EQ(for_kind(kind, [](auto k) { return decltype(k)::kKind; }), kind);
    EXPECT_LE(is.columns, 2u);
    EXPECT_EQ(is.accumulators >> is.columns, 0u) << is.name;
    EXPECT_EQ(is.accumulators != 0, (is.hypers & kInitialAccumulator) != 0) << is.name;
    EXPECT_EQ(is.first(), is.columns > 0 && kind != FRUGAL_ROWWISE_ADAGRAD);
    EXPECT_EQ(is.second(), is.columns > 1);
    EXPECT_FALSE(is.of_row && is.columns != 1) << is.name;
  }
  EXPECT_STREQ(optimizer_of(kLastOptimizer).name, "FTRL");
}

TEST(Optimizer, ClampKeepsNansAndZeros) {
  EXPECT_TRUE(std::isnan(clamp(std::nanf(""), 1.0f)));
  EXPECT_TRUE(std::signbit(clamp(-0.0f, 1.0f)));
  EXPECT_EQ(clamp(-3.0f, 1.0f), -1.0f);
  EXPECT_EQ(clamp(std::numeric_limits<float>::infinity(), 1.0f), 1.0f);
}

// --- Initial values -----------------------------------------------------------------------------

TEST(Init, HashIsSplitmix64) {
  // The first outputs of splitmix64 seeded with 0.
  EXPECT_EQ(mix(kGolden), 0xe220a8397b1dcdafu);
  EXPECT_EQ(mix(2 * kGolden), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(column_bits(0, 0), 0xe220a8397b1dcdafu);
  // FNV-1a of "a" is 0xaf63dc4c8601ec8c.
  EXPECT_EQ(table_hash(0, "a", 1), mix(0xaf63dc4c8601ec8cu));
  EXPECT_EQ(table_hash(5, "", 0), mix(5 + 0xcbf29ce484222325u));
}

TEST(Init, NaturalLogIsStdLog) {
  std::mt19937_64 engine(3);
  for (int i = 0; i < 200000; ++i) {
    const double x = std::ldexp(0.5 + std::generate_canonical<double, 53>(engine) / 2,
                                -static_cast<int>(engine() % 54));
    const double expected = std::log(x);
    EXPECT_NEAR(natural_log(x), expected, 4e-16 * std::fabs(expected) + 1e-18) << x;
  }
  EXPECT_EQ(natural_log(1.0), 0.0);
}

TEST(Init, NormalQuantileInvertsTheDistribution) {
  std::mt19937_64 engine(4);
  auto probability = [](double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); };
  for (int i = 0; i < 200000; ++i) {
    double p = open_unit_value(engine());
    if (i % 4 == 0) p = std::ldexp(p, -static_cast<int>(engine() % 48));
    if (p < 0x1p-53) p = 0x1p-53;
    const double z = normal_quantile(p);
    // Of the nearer tail, in which a relative error of z counts z^2 times.
    const double tail = p < 0.5 ? p : 1 - p;
    const double got = probability(p < 0.5 ? z : -z);
    EXPECT_NEAR(got, tail, 2e-15 * (2 + z * z) * tail) << p;
  }
  EXPECT_EQ(normal_quantile(0.5), 0.0);
  EXPECT_NEAR(normal_quantile(0.975), 1.959963984540054, 1e-15);
  EXPECT_NEAR(normal_quantile(0x1p-53), -8.209536151601387, 1e-14);
  EXPECT_NEAR(probability(-2.0), kTailOfTwo, 5e-17);
}

struct Moments {
  double mean = 0, deviation = 0, low = INFINITY, high = -INFINITY;
};

Moments sample(int32_t kind, float a, float b) {
  const uint32_t dim = 50;
  const InitSpec spec = init_spec(kind, a, b, 1000, dim, table_hash(1, "t", 1), FRUGAL_SGD, 0);
  std::vector<double> x;
  for (uint64_t key = 0; key < 8000; ++key) {
    const uint64_t row = row_hash(spec.table, key * 0x100000001u);
    for (uint32_t c = 0; c < dim; ++c) x.push_back(initial_value(spec, column_bits(row, c)));
  }
  Moments m;
  for (double v : x) {
    m.mean += v / static_cast<double>(x.size());
    m.low = std::min(m.low, v);
    m.high = std::max(m.high, v);
  }
  for (double v : x) m.deviation += (v - m.mean) * (v - m.mean) / static_cast<double>(x.size());
  m.deviation = std::sqrt(m.deviation);
  return m;
}

TEST(Init, Distributions) {
  const Moments constant = sample(FRUGAL_INIT_CONSTANT, 0.25f, 9.0f);
  EXPECT_EQ(constant.low, 0.25);
  EXPECT_EQ(constant.high, 0.25);

  const Moments uniform = sample(FRUGAL_INIT_UNIFORM, -1.0f, 3.0f);
  EXPECT_NEAR(uniform.mean, 1.0, 0.01);
  EXPECT_NEAR(uniform.deviation, 4 / std::sqrt(12.0), 0.01);
  EXPECT_GE(uniform.low, -1.0);
  EXPECT_LT(uniform.low, -0.999);
  EXPECT_LE(uniform.high, 3.0);
  EXPECT_GT(uniform.high, 2.999);

  const Moments normal = sample(FRUGAL_INIT_NORMAL, 0.5f, 2.0f);
  EXPECT_NEAR(normal.mean, 0.5, 0.02);
  EXPECT_NEAR(normal.deviation, 2.0, 0.02);
  EXPECT_GT(normal.high, 0.5 + 2 * 4);
  EXPECT_LT(normal.low, 0.5 - 2 * 4);

  const Moments truncated = sample(FRUGAL_INIT_TRUNCATED_NORMAL, 0.5f, 2.0f);
  EXPECT_NEAR(truncated.mean, 0.5, 0.02);
  EXPECT_NEAR(truncated.deviation, 2.0 * 0.8796, 0.02);  // of a normal cut at 2 deviations
  EXPECT_LE(truncated.high, 4.5);
  EXPECT_GE(truncated.low, -3.5);
  EXPECT_GT(truncated.high, 4.49);

  const double x = 0.5 * std::sqrt(6.0 / (1000 + 50));  // fan_in = rows
  const Moments xavier = sample(FRUGAL_INIT_XAVIER, 0.5f, 0.0f);
  EXPECT_NEAR(xavier.mean, 0.0, x * 0.01);
  EXPECT_NEAR(xavier.deviation, x / std::sqrt(3.0), x * 0.01);
  EXPECT_LE(xavier.high, x * 1.0000001);
  const double given = 0.5 * std::sqrt(6.0 / (100 + 50));  // fan_in = b
  EXPECT_NEAR(sample(FRUGAL_INIT_XAVIER, 0.5f, 100.0f).high, given, given * 0.001);
}

TEST(Init, DependsOnEverythingItShould) {
  const uint64_t t = table_hash(1, "t", 1);
  EXPECT_NE(t, table_hash(2, "t", 1));
  EXPECT_NE(t, table_hash(1, "u", 1));
  EXPECT_NE(row_hash(t, 0), row_hash(t, 1));
  EXPECT_NE(row_hash(t, 0), row_hash(t, UINT64_MAX));
  EXPECT_NE(column_bits(row_hash(t, 0), 0), column_bits(row_hash(t, 0), 1));
}

// --- The floating-point environment -------------------------------------------------------------

// Opaque to the optimizer, which knows nothing of rounding modes.
float divide(float a, float b) {
  volatile float x = a, y = b;
  return x / y;
}

TEST(FpEnvironment, SetsTheDefaultAndRestores) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  const float up = divide(1.0f, 3.0f);
  {
    FpEnvironment environment;
    EXPECT_EQ(std::bit_cast<uint32_t>(divide(1.0f, 3.0f)), 0x3eaaaaabu);
    EXPECT_EQ(std::bit_cast<uint32_t>(divide(-1.0f, 3.0f)), 0xbeaaaaabu);
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  EXPECT_EQ(divide(1.0f, 3.0f), up);
  std::fesetround(FE_TONEAREST);
}

#if defined(__SSE2__)
TEST(FpEnvironment, KeepsDenormals) {
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
  EXPECT_EQ(divide(1e-40f, 2.0f), 0.0f);
  {
    FpEnvironment environment;
    EXPECT_NE(divide(1e-40f, 2.0f), 0.0f);
  }
  EXPECT_EQ(divide(1e-40f, 2.0f), 0.0f);
  _mm_setcsr(before);
}

TEST(FpEnvironment, LeavesNoExceptionFlags) {
  const uint32_t before = _mm_getcsr() & ~0x3fu;
  _mm_setcsr(before);
  {
    FpEnvironment environment;
    EXPECT_TRUE(std::isinf(divide(1.0f, 0.0f)));
  }
  EXPECT_EQ(_mm_getcsr(), before);
}
#endif

}  // namespace
}  // namespace frugal::arith
