// Optimizers: docs/arithmetic.md, "From the gradient to the update", once for host and device.
//
// What: StepScalars holds every number of a step that the equations need. The bodies below are the
// equations, elementwise, for T = float or a vector of floats.
// Invariants: the order of operations is the documented one; values are returned as they are
// stored, that is with NaNs canonical.
// Callers: the engine makes StepScalars once for a table and step; the kernels call the bodies.
#ifndef FRUGAL_ARITH_OPTIMIZER_H_
#define FRUGAL_ARITH_OPTIMIZER_H_

#include "arith/hd.h"
#include "arith/nan.h"
#include "base/assert.h"
#include "frugal.h"

namespace frugal::arith {

// The steps of that section that are in force, as bits of StepScalars::flags.
enum StepFlags : uint32_t {
  kMeanRanks = 1u << 0,
  kGradScale = 1u << 1,
  kNanSkip = 1u << 2,
  kClipValue = 1u << 3,
  kClipNorm = 1u << 4,
  kL2 = 1u << 5,
  kDecay = 1u << 6,
  kBound = 1u << 7,
  kNesterov = 1u << 8,  // the only one that is part of an optimizer's own equations
};
// Everything but the optimizer itself. With none of these the kernels take their short path.
inline constexpr uint32_t kAroundOptimizer =
    kMeanRanks | kGradScale | kNanSkip | kClipValue | kClipNorm | kL2 | kDecay | kBound;

// A plain struct: it is passed to device kernels by value.
struct StepScalars {
  int32_t kind;  // frugal_optimizer_kind
  uint32_t dim;
  uint32_t flags;  // StepFlags
  float dim_float;
  float world;  // (float)world_size
  float grad_scale;
  float clip_value;
  float clip_norm;
  float l2;
  float decay;  // lr * weight_decay
  float bound;
  float lr;
  float eps;
  float momentum;
  float one_minus_dampening;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float alpha;  // Adam's rate with both bias corrections of this step, or lr
  float rho;
  float one_minus_rho;
  float lambda1;
  float lambda2;
  float ftrl_beta;
};

// --- What an optimizer is -----------------------------------------------------------------------
// All that the library needs to know of a kind: its traits, and its equations (update_element).
// Code that depends on the kind has a switch over frugal_optimizer_kind without a default, and is
// compiled with -Werror=switch. docs/changing.md, "An optimizer", lists that code.

// Hyper-parameters that only some kinds use, as bits of Optimizer::hypers.
enum Hyper : uint32_t {
  kEps = 1u << 0,
  kMomentum = 1u << 1,
  kDampening = 1u << 2,
  kBeta1 = 1u << 3,
  kBeta2 = 1u << 4,
  kRho = 1u << 5,
  kFtrlLambda1 = 1u << 6,
  kFtrlLambda2 = 1u << 7,
  kFtrlBeta = 1u << 8,
  kInitialAccumulator = 1u << 9,
};

struct Optimizer {
  const char* name;
  uint32_t columns;       // of state: 0, 1 or 2
  bool of_row;            // a column is one float a row, not one an element; there is one column
  uint32_t accumulators;  // bit c: column c begins with initial_accumulator, not with 0
  uint32_t hypers;        // that its equations or its initial state use
  uint32_t flags;         // FRUGAL_OPT_*, likewise
  bool divides_by_lr;
  // State columns that update_element() gets.
  FRUGAL_HD constexpr bool first() const { return columns >= 1 && !of_row; }
  FRUGAL_HD constexpr bool second() const { return columns >= 2 && !of_row; }
};

FRUGAL_HD constexpr Optimizer optimizer_of(int32_t kind) {
  switch (static_cast<frugal_optimizer_kind>(kind)) {
    case FRUGAL_SGD:
      return {"SGD", 0, false, 0, 0, 0, false};
    case FRUGAL_MOMENTUM:
      return {"momentum", 1, false, 0, kMomentum | kDampening, FRUGAL_OPT_NESTEROV, false};
    case FRUGAL_ADAGRAD:
      return {"Adagrad", 1, false, 1, kEps | kInitialAccumulator, 0, false};
    case FRUGAL_ROWWISE_ADAGRAD:
      return {"row-wise Adagrad", 1, true, 1, kEps | kInitialAccumulator, 0, false};
    case FRUGAL_ADAM:
      return {"Adam", 2, false, 0, kEps | kBeta1 | kBeta2, FRUGAL_OPT_NO_BIAS_CORRECTION, false};
    case FRUGAL_RMSPROP:
      return {"RMSProp", 1, false, 0, kEps | kRho, 0, false};
    case FRUGAL_FTRL:
      return {"FTRL", 2,   false, 2, kFtrlLambda1 | kFtrlLambda2 | kFtrlBeta | kInitialAccumulator,
              0,      true};
  }
  return {};  // configurations are checked
}
inline constexpr int32_t kLastOptimizer = FRUGAL_FTRL;  // kinds are numbered from 0

// A kind as a type. for_kind() calls f(Kind<...>()) for a kind that is known at run time only.
template <int32_t kKindIn>
struct Kind {
  static constexpr int32_t kKind = kKindIn;
};
template <class F>
FRUGAL_HD auto for_kind(int32_t kind, F f) {
  switch (static_cast<frugal_optimizer_kind>(kind)) {
    case FRUGAL_SGD:
      return f(Kind<FRUGAL_SGD>());
    case FRUGAL_MOMENTUM:
      return f(Kind<FRUGAL_MOMENTUM>());
    case FRUGAL_ADAGRAD:
      return f(Kind<FRUGAL_ADAGRAD>());
    case FRUGAL_ROWWISE_ADAGRAD:
      return f(Kind<FRUGAL_ROWWISE_ADAGRAD>());
    case FRUGAL_ADAM:
      return f(Kind<FRUGAL_ADAM>());
    case FRUGAL_RMSPROP:
      return f(Kind<FRUGAL_RMSPROP>());
    case FRUGAL_FTRL:
      return f(Kind<FRUGAL_FTRL>());
  }
  __builtin_unreachable();  // configurations are checked
}

// State columns of a row: 0, 1 or 2.
FRUGAL_HD constexpr uint32_t state_columns(int32_t kind) { return optimizer_of(kind).columns; }

// Floats of one state column.
FRUGAL_HD constexpr uint32_t column_floats(int32_t kind, uint32_t dim) {
  return optimizer_of(kind).of_row ? 1 : dim;
}

// Floats of state of a row as it travels with FRUGAL_WITH_STATE.
FRUGAL_HD uint32_t state_floats(int32_t kind, uint32_t dim) {
  return state_columns(kind) * column_floats(kind, dim);
}

// The value that state column `column` of a new row is filled with.
FRUGAL_HD float initial_state(int32_t kind, uint32_t column, float initial_accumulator) {
  return optimizer_of(kind).accumulators >> column & 1 ? canonical(initial_accumulator) : 0.0f;
}

// b^t in double by squaring from the low bit.
FRUGAL_HD double power(double x, uint64_t t) {
  double r = 1.0;
  while (t) {
    if (t & 1) r = r * x;
    x = x * x;
    t >>= 1;
  }
  return r;
}

// The scalars of step `step`. `nan_policy` is a frugal_nan_policy.
inline StepScalars step_scalars(const frugal_optimizer& o, uint64_t step, uint32_t world_size,
                                int32_t nan_policy, uint32_t dim) {
  FRUGAL_ASSERT(o.kind >= 0 && o.kind <= kLastOptimizer && world_size != 0);
  StepScalars s = {};
  s.kind = o.kind;
  s.dim = dim;
  s.dim_float = static_cast<float>(dim);
  s.world = static_cast<float>(world_size);
  s.grad_scale = o.grad_scale;
  s.clip_value = o.clip_value;
  s.clip_norm = o.clip_norm;
  s.l2 = o.weight_decay_l2;
  s.decay = o.lr * o.weight_decay;
  s.bound = o.weight_bound;
  s.lr = o.lr;
  s.eps = o.eps;
  s.momentum = o.momentum;
  s.one_minus_dampening = 1.0f - o.dampening;
  s.beta1 = o.beta1;
  s.one_minus_beta1 = 1.0f - o.beta1;
  s.beta2 = o.beta2;
  s.one_minus_beta2 = 1.0f - o.beta2;
  s.alpha = o.lr;
  if (~o.flags & optimizer_of(o.kind).flags & FRUGAL_OPT_NO_BIAS_CORRECTION) {
    const uint64_t t = step + 1;
    const double correction2 = root_double(1.0 - power(static_cast<double>(o.beta2), t));
    const double correction1 = 1.0 - power(static_cast<double>(o.beta1), t);
    s.alpha = static_cast<float>((static_cast<double>(o.lr) * correction2) / correction1);
  }
  s.rho = o.rho;
  s.one_minus_rho = 1.0f - o.rho;
  s.lambda1 = o.ftrl_lambda1;
  s.lambda2 = o.ftrl_lambda2;
  s.ftrl_beta = o.ftrl_beta;

  // Dividing or multiplying by one changes nothing, so those steps are left out.
  if ((o.flags & FRUGAL_OPT_MEAN_RANKS) && world_size != 1) s.flags |= kMeanRanks;
  if (o.grad_scale != 1.0f) s.flags |= kGradScale;
  if (nan_policy == FRUGAL_NAN_SKIP) s.flags |= kNanSkip;
  if (o.clip_value > 0.0f) s.flags |= kClipValue;
  if (o.clip_norm > 0.0f) s.flags |= kClipNorm;
  if (o.weight_decay_l2 != 0.0f) s.flags |= kL2;
  if (o.weight_decay != 0.0f) s.flags |= kDecay;
  if (o.weight_bound > 0.0f) s.flags |= kBound;
  if (o.flags & FRUGAL_OPT_NESTEROV) s.flags |= kNesterov;
  return s;
}

// x limited to [-c, c]; a NaN stays.
template <class T>
FRUGAL_HD T clamp(T x, float c) {
  const T high = Lane<T>::splat(c);
  const T low = Lane<T>::splat(-c);
  return x > high ? high : (x < low ? low : x);
}

// Steps 1, 2 and 4 of that section, which need nothing but the element. Step 3 (a NaN skips the
// row) may check the result instead, since step 4 keeps NaNs.
template <class T>
FRUGAL_HD T scale_gradient(const StepScalars& s, T g) {
  if (s.flags & kMeanRanks) g = g / s.world;
  if (s.flags & kGradScale) g = g * s.grad_scale;
  if (s.flags & kClipValue) g = clamp(g, s.clip_value);
  return g;
}

// Step 5: the factor of the whole row from sum16(G*G), or 1 if the norm is within its limit. The
// product with 1 is exact, so it may be done for every row.
FRUGAL_HD float norm_factor(const StepScalars& s, float sum_of_squares) {
  const float norm = Lane<float>::root(sum_of_squares);
  return norm > s.clip_norm ? s.clip_norm / norm : 1.0f;
}

// Step 6.
template <class T>
FRUGAL_HD T add_l2(const StepScalars& s, T g, T w) {
  return g + s.l2 * w;
}

// The rate q of a row of row-wise Adagrad, from its accumulator `a`, which this updates.
FRUGAL_HD float update_row(const StepScalars& s, float sum_of_squares, float& a) {
  const float sum = a + sum_of_squares / s.dim_float;
  const float rate = s.lr / (Lane<float>::root(sum) + s.eps);
  a = canonical(sum);
  return rate;
}

// Step 7 for one element (or one vector): the optimizer `kKind`. s0 and s1 are the element's state
// columns; unused ones are left alone. `rate` is update_row's result (row-wise Adagrad only). The
// new weight is not canonical yet: finish_weight() comes next.
template <int kKind, class T>
FRUGAL_HD void update_element(const StepScalars& s, T& w, T g, T& s0, T& s1, float rate) {
  using L = Lane<T>;
  if constexpr (kKind == FRUGAL_SGD) {
    w = w - s.lr * g;
  } else if constexpr (kKind == FRUGAL_MOMENTUM) {
    const T b = s.momentum * s0 + s.one_minus_dampening * g;
    const T d = (s.flags & kNesterov) ? g + s.momentum * b : b;
    w = w - s.lr * d;
    s0 = canonical(b);
  } else if constexpr (kKind == FRUGAL_ADAGRAD) {
    const T a = s0 + g * g;
    w = w - (s.lr * g) / (L::root(a) + s.eps);
    s0 = canonical(a);
  } else if constexpr (kKind == FRUGAL_ROWWISE_ADAGRAD) {
    w = w - rate * g;
  } else if constexpr (kKind == FRUGAL_ADAM) {
    const T m = s.beta1 * s0 + s.one_minus_beta1 * g;
    const T v = s.beta2 * s1 + (s.one_minus_beta2 * g) * g;
    w = w - (s.alpha * m) / (L::root(v) + s.eps);
    s0 = canonical(m);
    s1 = canonical(v);
  } else if constexpr (kKind == FRUGAL_RMSPROP) {
    const T v = s.rho * s0 + (s.one_minus_rho * g) * g;
    w = w - (s.lr * g) / (L::root(v) + s.eps);
    s0 = canonical(v);
  } else {
    static_assert(kKind == FRUGAL_FTRL, "an optimizer without equations");
    const T n = s1 + g * g;
    const T root_n = L::root(n);
    const T z = (s0 + g) - ((root_n - L::root(s1)) / s.lr) * w;
    const T l1 = L::splat(s.lambda1);
    const T zero = L::splat(0.0f);
    // A NaN z is not within l1, takes -l1 as its signed l1, and gives a NaN weight.
    const T signed_l1 = z > zero ? l1 : zero - l1;
    const T moved = (signed_l1 - z) / ((s.ftrl_beta + root_n) / s.lr + s.lambda2);
    const T magnitude = z < zero ? zero - z : z;
    w = magnitude <= l1 ? zero : moved;
    s0 = canonical(z);
    s1 = canonical(n);
  }
}

// Steps 8 and 9, and the canonical NaN.
template <class T>
FRUGAL_HD T finish_weight(const StepScalars& s, T w) {
  if (s.flags & kDecay) w = w - s.decay * w;
  if (s.flags & kBound) w = clamp(w, s.bound);
  return canonical(w);
}

}  // namespace frugal::arith

#endif  // FRUGAL_ARITH_OPTIMIZER_H_
