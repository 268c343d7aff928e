// The list of kernels, and how each is found.
//
// What: FRUGAL_KERNELS(X) names every kernel as X(name, Arguments): the body is
// `void name##_body(const Arguments&)` in one of ops/*.h. The numbers of launches, the host's table
// and the __global__ functions `frugal_##name` come from this list.
// Invariants: argument structs are plain and at most 4 KiB; a kernel is a body and nothing else.
#ifndef FRUGAL_DEVICE_OPS_KERNELS_H_
#define FRUGAL_DEVICE_OPS_KERNELS_H_

#include "device/ops/compare.h"
#include "device/ops/pool.h"
#include "device/ops/reduce.h"
#include "device/ops/rows.h"
#include "device/ops/update.h"

// clang-format off
#define FRUGAL_KERNELS(X)             \
  X(gather_rows, GatherArgs)          \
  X(stage_rows, StageArgs)            \
  X(fill_lines, FillArgs)             \
  X(place_keys, PlaceArgs)            \
  X(bags_of_keys, BagsOfKeysArgs)     \
  X(pool_rows, PoolArgs)              \
  X(weight_grads, WeightGradArgs)     \
  X(same_keys, SameKeysArgs)          \
  X(reduce_runs, ReduceArgs)          \
  X(combine_runs, CombineArgs)        \
  X(expand_terms, ExpandArgs)         \
  X(sum_terms, SumTermsArgs)          \
  X(apply_sgd, ApplyArgs)             \
  X(apply_momentum, ApplyArgs)        \
  X(apply_adagrad, ApplyArgs)         \
  X(apply_rowwise_adagrad, ApplyArgs) \
  X(apply_adam, ApplyArgs)            \
  X(apply_rmsprop, ApplyArgs)         \
  X(apply_ftrl, ApplyArgs)
// clang-format on

namespace frugal::device {

enum class Kernel : uint32_t {
#define X(name, Arguments) name,
  FRUGAL_KERNELS(X)
#undef X
      kCount
};

// The update kernel of an optimizer.
inline Kernel apply_kernel(int32_t kind) {
  switch (static_cast<frugal_optimizer_kind>(kind)) {
    case FRUGAL_SGD:
      return Kernel::apply_sgd;
    case FRUGAL_MOMENTUM:
      return Kernel::apply_momentum;
    case FRUGAL_ADAGRAD:
      return Kernel::apply_adagrad;
    case FRUGAL_ROWWISE_ADAGRAD:
      return Kernel::apply_rowwise_adagrad;
    case FRUGAL_ADAM:
      return Kernel::apply_adam;
    case FRUGAL_RMSPROP:
      return Kernel::apply_rmsprop;
    case FRUGAL_FTRL:
      return Kernel::apply_ftrl;
  }
  return Kernel::kCount;  // configurations are checked
}

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_OPS_KERNELS_H_
