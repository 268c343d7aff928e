// The fields of structs of frugal.h that messages and files hold, as C and as Cap'n Proto call
// them: X(field, Field) for each, but for names and nested structs.
#pragma once
#include "frugal.h"

// clang-format off
#define FRUGAL_OPTIMIZER_FIELDS(X)                                                                 \
  X(kind, Kind) X(lr, Lr) X(eps, Eps) X(momentum, Momentum) X(dampening, Dampening)                \
  X(beta1, Beta1) X(beta2, Beta2) X(rho, Rho) X(ftrl_lambda1, FtrlLambda1)                         \
  X(ftrl_lambda2, FtrlLambda2) X(ftrl_beta, FtrlBeta) X(initial_accumulator, InitialAccumulator)   \
  X(weight_decay_l2, WeightDecayL2) X(weight_decay, WeightDecay) X(clip_value, ClipValue)          \
  X(clip_norm, ClipNorm) X(weight_bound, WeightBound) X(grad_scale, GradScale) X(flags, Flags)
#define FRUGAL_TABLE_CONFIG_FIELDS(X)                                                              \
  X(key_space, KeySpace) X(dtype, Dtype) X(rows, Rows) X(dim, Dim) X(init, Init) X(init_a, InitA)  \
  X(init_b, InitB) X(nan_policy, NanPolicy) X(flags, Flags)
// clang-format on

// A new field must be added above, to process/control.capnp, to format/manifest.capnp, and to
// format/manifest_check.cpp.
static_assert(sizeof(frugal_optimizer) == 88 && sizeof(frugal_table_config) == 144);
