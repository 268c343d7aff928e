// The one-thread reference agrees with independent statements of its rules: serial folds, float64
// equations, moments, and quantiles from printed tables.
//
// Everything else is compared with this reference.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace frugal_reference {
namespace {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

frugal_table_config TableConfig(const char* name, uint64_t rows, uint32_t dim, int32_t kind) {
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  config.name = name;
  config.rows = rows;
  config.dim = dim;
  config.optimizer.kind = kind;
  return config;
}

// fold32 (docs/arithmetic.md, "Shapes of sums") in its serial form: a binary counter of partial
// sums.
float Fold32ByCounter(const std::vector<float>& x) {
  std::vector<std::pair<int, float>> stack;  // (level, partial sum)
  auto carry = [&](float run) {
    stack.emplace_back(0, run);
    while (stack.size() > 1 && stack[stack.size() - 2].first == stack.back().first) {
      const float right = stack.back().second;
      stack.pop_back();
      stack.back() = {stack.back().first + 1, stack.back().second + right};
    }
  };
  for (size_t i = 0; i < x.size(); i += 32) {
    float run = x[i];
    for (size_t j = i + 1; j < std::min(i + 32, x.size()); ++j) run += x[j];
    carry(run);
  }
  float sum = stack.back().second;
  for (size_t i = stack.size() - 1; i > 0; --i) sum = stack[i - 1].second + sum;
  return sum;
}

TEST(Reference, Fold32IsTheBinaryCounter) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> value(-1, 1);
  for (size_t n = 1; n < 1300; n = n < 140 ? n + 1 : n * 3 / 2) {
    std::vector<float> x(n);
    std::vector<std::vector<float>> terms;
    for (float& v : x) {
      v = value(random);
      terms.push_back({v});
    }
    EXPECT_EQ(Bits(Fold32(terms)[0]), Bits(Fold32ByCounter(x))) << n;
  }
}

TEST(Reference, Fold32CopiesASingleTerm) {
  // -0 copied stays -0; added to +0 it would not.
  EXPECT_EQ(Bits(Fold32({{-0.0f}})[0]), 0x80000000u);
}

TEST(Reference, Sum16AddsInLanes) {
  std::vector<float> x(33, 0.0f);
  x[0] = 1e8f;   // lane 0
  x[16] = 1;     // lane 0 too: lost there
  x[8] = -1e8f;  // lane 8, added to lane 0 afterwards
  x[1] = 2;
  EXPECT_EQ(Sum16(x), 2.0f);
  EXPECT_EQ(Bits(Sum16({-0.0f})), 0u);
}

TEST(Reference, NormalQuantileMatchesTables) {
  EXPECT_EQ(NormalQuantile(0.5), 0.0);
  EXPECT_NEAR(NormalQuantile(0.975), 1.9599639845400545, 1e-14);
  EXPECT_NEAR(NormalQuantile(0.25), -0.6744897501960817, 1e-14);
  EXPECT_NEAR(NormalQuantile(0.001), -3.090232306167814, 1e-13);
  EXPECT_NEAR(NormalQuantile(1e-20), -9.262340089798408, 1e-12);
  EXPECT_NEAR(NormalQuantile(0.022750131948179195), -2.0, 1e-12);
}

TEST(Reference, LnAndPowMatchTheLibrary) {
  for (double x : {1e-300, 1e-16, 0.01, 0.3, 0.7071, 0.70711, 0.99999, 1.0, 2.5, 1e10}) {
    EXPECT_NEAR(Ln(x), std::log(x), 1e-14 * std::max(1.0, std::fabs(std::log(x)))) << x;
  }
  EXPECT_NEAR(PowBySquaring(0.999, 1000), std::pow(0.999, 1000), 1e-13);
  EXPECT_EQ(PowBySquaring(0.5, 0), 1.0);
}

TEST(Reference, InitialValuesHaveTheirDistribution) {
  frugal_table_config config = TableConfig("d", 1000, 16, FRUGAL_SGD);
  struct Case {
    int32_t init;
    float a, b;
    double mean, deviation, low, high;
  };
  const double xavier = 0.5 * std::sqrt(6.0 / (1000 + 16));
  const Case cases[] = {
      {FRUGAL_INIT_CONSTANT, 0.25f, 9, 0.25, 0, 0.25, 0.25},
      {FRUGAL_INIT_UNIFORM, -1, 3, 1, 4 / std::sqrt(12), -1, 3},
      {FRUGAL_INIT_NORMAL, 1, 2, 1, 2, -1e9, 1e9},
      {FRUGAL_INIT_TRUNCATED_NORMAL, 1, 2, 1, 2 * 0.87962566, -3, 5},
      {FRUGAL_INIT_XAVIER, 0.5f, 0, 0, xavier / std::sqrt(3), -xavier, xavier},
  };
  for (const Case& c : cases) {
    config.init = c.init;
    config.init_a = c.a;
    config.init_b = c.b;
    double sum = 0, squares = 0;
    const int rows = 2000;
    for (uint64_t key = 0; key < rows; ++key) {
      for (uint64_t column = 0; column < 16; ++column) {
        const double x = InitialValue(config, 7, key, column);
        EXPECT_GE(x, c.low - 1e-6);
        EXPECT_LE(x, c.high + 1e-6);
        sum += x;
        squares += (x - c.mean) * (x - c.mean);
      }
    }
    const double n = rows * 16.0;
    EXPECT_NEAR(sum / n, c.mean, 0.02 * c.deviation + 1e-9) << c.init;
    EXPECT_NEAR(std::sqrt(squares / n), c.deviation, 0.02 * c.deviation + 1e-9) << c.init;
  }
}

TEST(Reference, InitialValuesDependOnSeedNameKeyAndColumn) {
  frugal_table_config config = TableConfig("one", 1000, 16, FRUGAL_SGD);
  config.init = FRUGAL_INIT_UNIFORM;
  config.init_b = 1;
  const float x = InitialValue(config, 1, 2, 3);
  EXPECT_NE(x, InitialValue(config, 2, 2, 3));
  EXPECT_NE(x, InitialValue(config, 1, 3, 3));
  EXPECT_NE(x, InitialValue(config, 1, 2, 4));
  frugal_table_config other = config;
  other.name = "two";
  EXPECT_NE(x, InitialValue(other, 1, 2, 3));
}

// Three updates of each optimizer against the same equations in double.
TEST(Reference, OptimizersMatchFloat64) {
  for (int32_t kind = FRUGAL_SGD; kind <= FRUGAL_FTRL; ++kind) {
    frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
    o.kind = kind;
    o.lr = 0.05f;
    o.dampening = 0.1f;
    o.ftrl_lambda1 = 0.01f;
    o.ftrl_lambda2 = 0.02f;
    o.eps = 1e-6f;
    const size_t dim = 5;
    std::vector<float> row(dim + StateFloats(kind, dim), 0.0f);
    std::vector<double> w(dim), s1(dim), s2(dim);
    for (size_t i = 0; i < dim; ++i) w[i] = row[i] = 0.1f * static_cast<float>(i) - 0.2f;
    for (uint64_t step = 0; step < 3; ++step) {
      std::vector<float> g(dim);
      for (size_t i = 0; i < dim; ++i) {
        g[i] = 0.3f - 0.17f * static_cast<float>(i) + 0.05f * static_cast<float>(step);
      }
      ASSERT_TRUE(ApplyUpdate(o, FRUGAL_NAN_REJECT, 1, step, g, dim, row.data()));
      double mean_square = 0;
      for (size_t i = 0; i < dim; ++i) mean_square += double(g[i]) * g[i] / dim;
      if (kind == FRUGAL_ROWWISE_ADAGRAD) s1[0] += mean_square;
      for (size_t i = 0; i < dim; ++i) {
        const double x = g[i];
        const double t = static_cast<double>(step) + 1;
        switch (kind) {
          case FRUGAL_SGD:
            w[i] -= o.lr * x;
            break;
          case FRUGAL_MOMENTUM:
            s1[i] = o.momentum * s1[i] + (1 - o.dampening) * x;
            w[i] -= o.lr * s1[i];
            break;
          case FRUGAL_ADAGRAD:
            s1[i] += x * x;
            w[i] -= o.lr * x / (std::sqrt(s1[i]) + o.eps);
            break;
          case FRUGAL_ROWWISE_ADAGRAD:
            w[i] -= o.lr * x / (std::sqrt(s1[0]) + o.eps);
            break;
          case FRUGAL_ADAM:
            s1[i] = o.beta1 * s1[i] + (1 - o.beta1) * x;
            s2[i] = o.beta2 * s2[i] + (1 - o.beta2) * x * x;
            w[i] -= o.lr * std::sqrt(1 - std::pow(o.beta2, t)) / (1 - std::pow(o.beta1, t)) *
                    s1[i] / (std::sqrt(s2[i]) + o.eps);
            break;
          case FRUGAL_RMSPROP:
            s1[i] = o.rho * s1[i] + (1 - o.rho) * x * x;
            w[i] -= o.lr * x / (std::sqrt(s1[i]) + o.eps);
            break;
          case FRUGAL_FTRL: {
            const double n = s2[i] + x * x;
            s1[i] += x - (std::sqrt(n) - std::sqrt(s2[i])) / o.lr * w[i];
            s2[i] = n;
            const double l1 = o.ftrl_lambda1;
            const double z = s1[i];
            w[i] = std::fabs(z) <= l1 ? 0
                                      : ((z < 0 ? -l1 : l1) - z) /
                                            ((o.ftrl_beta + std::sqrt(n)) / o.lr + o.ftrl_lambda2);
            break;
          }
        }
        EXPECT_NEAR(row[i], w[i], 2e-5) << "optimizer " << kind << " step " << step;
      }
    }
  }
}

TEST(Reference, ShapesAndSignsOfTheRest) {
  frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  o.lr = 1;
  o.clip_value = 0.5f;
  o.weight_bound = 0.4f;
  o.grad_scale = 2;
  o.flags = FRUGAL_OPT_MEAN_RANKS;
  float row[2] = {0, 0};
  ASSERT_TRUE(ApplyUpdate(o, FRUGAL_NAN_REJECT, 4, 0, {0.2f, -8.0f}, 2, row));
  EXPECT_EQ(row[0], -0.1f);  // 0.2 / 4 * 2
  EXPECT_EQ(row[1], 0.4f);   // clipped to -0.5, then bound
  frugal_optimizer norm = FRUGAL_OPTIMIZER_INIT;
  norm.lr = 1;
  norm.clip_norm = 1;
  norm.weight_decay = 0.5f;
  float other[2] = {1, 0};
  ASSERT_TRUE(ApplyUpdate(norm, FRUGAL_NAN_REJECT, 1, 0, {3.0f, 4.0f}, 2, other));
  EXPECT_NEAR(other[0], (1 - 0.6) * 0.5, 1e-6);
  EXPECT_NEAR(other[1], -0.8 * 0.5, 1e-6);
}

TEST(Reference, NanPolicies) {
  const float nan = -std::numeric_limits<float>::quiet_NaN();
  const frugal_optimizer o = FRUGAL_OPTIMIZER_INIT;
  float row[2] = {1, 1};
  EXPECT_FALSE(ApplyUpdate(o, FRUGAL_NAN_SKIP, 1, 0, {1.0f, nan}, 2, row));
  EXPECT_EQ(row[0], 1.0f);
  EXPECT_TRUE(ApplyUpdate(o, FRUGAL_NAN_ACCEPT, 1, 0, {1.0f, nan}, 2, row));
  EXPECT_EQ(Bits(row[1]), 0x7fc00000u);
}

TEST(Reference, StepsCommitAbortAndHistory) {
  Reference reference(3, 2);
  frugal_table_config config = TableConfig("t", 10, 1, FRUGAL_SGD);
  config.key_space = FRUGAL_HASHED;
  config.optimizer.lr = 1;
  const size_t t = reference.AddTable(config);
  const uint64_t keys[] = {5, 9, 5};
  const float grads[] = {1, 2, 4};
  Op op;
  op.table = t;
  op.keys = keys;
  op.count = 3;
  op.grads = grads;

  reference.Create(0, op);
  EXPECT_EQ(reference.Push(0, 0, {op}), FRUGAL_OK);
  reference.Abort();
  EXPECT_TRUE(reference.Keys(t).empty());

  EXPECT_EQ(reference.Push(1, 0, {op}), FRUGAL_OK);
  reference.Commit(0, /*skip=*/false);
  EXPECT_EQ(reference.Keys(t), (std::vector<uint64_t>{5, 9}));
  EXPECT_EQ(reference.RowAt(t, 5, 0)[0], 0.0f);
  EXPECT_EQ(reference.RowAt(t, 5, 1)[0], -5.0f);
  EXPECT_EQ(reference.Push(0, 1, {op}), FRUGAL_OK);
  reference.Commit(1, /*skip=*/true);
  EXPECT_EQ(reference.RowAt(t, 5, 2)[0], -5.0f);
  EXPECT_EQ(reference.Push(0, 2, {op}), FRUGAL_OK);
  reference.Commit(2, /*skip=*/false);
  EXPECT_EQ(reference.VersionsAt(t, 5, 3, 0).size(), 1u);
  EXPECT_EQ(reference.VersionsAt(t, 5, 3, 1).size(), 2u);  // -10, and -5 of t = 2
  EXPECT_EQ(reference.VersionsAt(t, 5, 3, 2).size(), 2u);
  EXPECT_EQ(reference.VersionsAt(t, 5, 3, 3).size(), 3u);  // the initial row too

  const float value = 7;
  reference.Put(t, 3, 5, /*with_state=*/false, &value);
  EXPECT_EQ(reference.VersionsAt(t, 5, 3, 3).size(), 1u);
  EXPECT_EQ(reference.RowAt(t, 5, 3)[0], 7.0f);
  EXPECT_TRUE(reference.Delete(t, 3, 5));
  EXPECT_FALSE(reference.Delete(t, 3, 5));
  std::vector<float> row;
  EXPECT_FALSE(reference.Get(t, 5, &row));
  EXPECT_EQ(reference.ExistsAt(t, 5, 2, 0), Reference::Existence::kYes);
  EXPECT_EQ(reference.ExistsAt(t, 5, 0, 0), Reference::Existence::kMaybe);
  EXPECT_EQ(reference.ExistsAt(t, 6, 2, 0), Reference::Existence::kNo);
}

TEST(Reference, PooledLookupAndBackward) {
  Reference reference(3, 1);
  frugal_table_config config = TableConfig("t", 4, 1, FRUGAL_SGD);
  config.optimizer.lr = 1;
  const size_t t = reference.AddTable(config);
  for (uint64_t key = 0; key < 4; ++key) {
    const float value = static_cast<float>(key + 1);
    reference.Put(t, 0, key, /*with_state=*/false, &value);
  }
  const uint64_t keys[] = {0, 3, 1, 3, 2};
  const uint64_t offsets[] = {0, 3, 3, 4, 5};
  const float weights[] = {2, 5, 3, 5, 4};
  const float grads[] = {1, 10, 100, 1000};
  Op op;
  op.table = t;
  op.keys = keys;
  op.count = 5;
  op.pooling = FRUGAL_POOL_SUM;
  op.offsets = offsets;
  op.bags = 4;
  op.weights = weights;
  op.grads = grads;
  op.padded = true;
  op.padding_key = 3;
  float rows[4];
  reference.Lookup(0, op, rows);
  EXPECT_EQ(rows[0], 8.0f);  // 2 * 1 + 3 * 2
  EXPECT_EQ(rows[1], 0.0f);
  EXPECT_EQ(rows[2], 0.0f);  // padding only
  EXPECT_EQ(rows[3], 12.0f);
  float weight_grads[5];
  reference.WeightGrads(0, op, weight_grads);
  EXPECT_EQ(weight_grads[0], 1.0f);
  EXPECT_EQ(weight_grads[1], 0.0f);
  EXPECT_EQ(weight_grads[2], 2.0f);
  EXPECT_EQ(weight_grads[4], 3000.0f);

  op.pooling = FRUGAL_POOL_MEAN;
  op.weights = nullptr;
  reference.Lookup(0, op, rows);
  EXPECT_EQ(rows[0], 1.5f);
  EXPECT_EQ(reference.Push(0, 0, {op}), FRUGAL_OK);
  reference.Commit(0, /*skip=*/false);
  EXPECT_EQ(reference.RowAt(t, 0, 1)[0], 0.5f);
  EXPECT_EQ(reference.RowAt(t, 3, 1)[0], 4.0f);
  EXPECT_EQ(reference.RowAt(t, 2, 1)[0], -997.0f);
}

}  // namespace
}  // namespace frugal_reference
