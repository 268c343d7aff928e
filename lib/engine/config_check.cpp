#include "engine/config_check.h"

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "arith/init.h"
#include "device/runtime.h"
#include "engine/engine.h"
#include "engine/op_check.h"

namespace frugal {

namespace {

// The value of an option is not an allowed one.
Status refused(const char* option, double value, const char* bounds) {
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s is %.10g: it must be %s", option, value, bounds);
}
Status refused(const char* option, uint64_t value, const char* bounds) {
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s is %s: it must be %s", option,
              number_text(value).c_str(), bounds);
}
Status one_of(const char* option, int32_t value, int32_t last, const char* which) {
  if (value >= 0 && value <= last) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s is %d, which is unknown: it must be %s", option,
              value, which);
}
Status known_flags(const char* option, uint32_t flags, uint32_t known) {
  if (!(flags & ~known)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x in %s: this library knows 0x%x",
              flags & ~known, option, known);
}

Status unknown_device(const char* name) {
  return fail(FRUGAL_ERR_INVALID_ARGUMENT, "device '%.64s' is unknown: give \"cpu\" or \"cuda:N\"",
              name);
}

// The hyper-parameters, in the order in which they are checked.
constexpr float kAny = -1, kMore = FLT_MAX, kUnit = 1, kBelowOne = 1 - FLT_EPSILON / 2;
constexpr struct HyperParameter {
  const char* name;
  float frugal_optimizer::*at;
  float bound;           // the largest allowed value (0 is the least); or kAny
  uint32_t of;           // its bit of arith::Hyper; 0: all kinds use it
  bool bounded_for_all;  // also for kinds that do not use it
} kHyperParameters[] = {
    {"lr", &frugal_optimizer::lr, kMore, 0, true},
    {"eps", &frugal_optimizer::eps, kMore, arith::kEps, true},
    {"grad_scale", &frugal_optimizer::grad_scale, kAny, 0, true},
    {"momentum", &frugal_optimizer::momentum, kMore, arith::kMomentum, false},
    {"dampening", &frugal_optimizer::dampening, kUnit, arith::kDampening, false},
    {"beta1", &frugal_optimizer::beta1, kBelowOne, arith::kBeta1, false},
    {"beta2", &frugal_optimizer::beta2, kBelowOne, arith::kBeta2, false},
    {"rho", &frugal_optimizer::rho, kUnit, arith::kRho, false},
    {"ftrl_lambda1", &frugal_optimizer::ftrl_lambda1, kMore, arith::kFtrlLambda1, false},
    {"ftrl_lambda2", &frugal_optimizer::ftrl_lambda2, kMore, arith::kFtrlLambda2, false},
    {"ftrl_beta", &frugal_optimizer::ftrl_beta, kMore, arith::kFtrlBeta, false},
    {"initial_accumulator", &frugal_optimizer::initial_accumulator, kMore,
     arith::kInitialAccumulator, true},
    {"weight_decay_l2", &frugal_optimizer::weight_decay_l2, kMore, 0, true},
    {"weight_decay", &frugal_optimizer::weight_decay, kMore, 0, true},
    {"clip_value", &frugal_optimizer::clip_value, kMore, 0, true},
    {"clip_norm", &frugal_optimizer::clip_norm, kMore, 0, true},
    {"weight_bound", &frugal_optimizer::weight_bound, kMore, 0, true},
};

}  // namespace

Status check_config(const frugal_config& c) {
  FRUGAL_TRY(check_size(&c, "frugal_config"));
  FRUGAL_TRY(known_flags("frugal_config.flags", c.flags, FRUGAL_OBSERVE));
  if (c.flags && !c.service)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "FRUGAL_OBSERVE has a meaning with a service only, and service is NULL: give one");
  if (c.world_size < 1 || c.world_size > 4096)
    return refused("world_size", uint64_t{c.world_size}, "1..4096");
  if (c.lookahead > FRUGAL_MAX_LOOKAHEAD)
    return refused("lookahead", uint64_t{c.lookahead}, "0..40 (FRUGAL_MAX_LOOKAHEAD)");
  if (c.flush_threads > 256) return refused("flush_threads", uint64_t{c.flush_threads}, "0..256");
  FRUGAL_TRY(one_of("flush_mode", c.flush_mode, FRUGAL_FLUSH_TREE_HEAP, "one of FRUGAL_FLUSH_*"));
  FRUGAL_TRY(one_of("backing", c.backing, FRUGAL_BACKING_SHM, "one of FRUGAL_BACKING_*"));
  if (c.timeout_ms < 0 && c.timeout_ms != FRUGAL_TIMEOUT_INFINITE)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "timeout_ms is %lld: it must be 0 or more, or FRUGAL_TIMEOUT_INFINITE",
                static_cast<long long>(c.timeout_ms));
  return FRUGAL_OK;
}

Status check_optimizer(const frugal_optimizer& o) {
  FRUGAL_TRY(check_size(&o, "frugal_optimizer"));
  FRUGAL_TRY(
      one_of("optimizer.kind", o.kind, arith::kLastOptimizer, "one of FRUGAL_SGD .. FRUGAL_FTRL"));
  const arith::Optimizer is = arith::optimizer_of(o.kind);
  FRUGAL_TRY(known_flags("optimizer.flags", o.flags,
                         FRUGAL_OPT_NESTEROV | FRUGAL_OPT_MEAN_RANKS |
                             FRUGAL_OPT_NO_BIAS_CORRECTION | FRUGAL_OPT_NEW_STATE));
  for (const HyperParameter& h : kHyperParameters) {
    // The bounds hold for the hyper-parameters that the kind uses. They keep its rows from becoming
    // NaNs, and its steps from going against the gradients.
    const float value = o.*h.at;
    const char* bounds = h.bound == kMore   ? "0 or more"
                         : h.bound == kUnit ? "0..1"
                                            : "0 or more and less than 1";
    if (!std::isfinite(value))
      bounds = "finite";
    else if (h.bound == kAny || !(h.bounded_for_all || (is.hypers & h.of)) ||
             (value >= 0 && value <= h.bound))
      continue;
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "optimizer.%s is %.10g: it must be %s", h.name,
                double{value}, bounds);
  }
  const bool state_of_0 = !(is.hypers & arith::kInitialAccumulator) || !(o.initial_accumulator > 0);
  if ((is.hypers & arith::kEps) && o.eps == 0 && state_of_0)
    return refused(
        "optimizer.eps", 0.0,
        text("above 0 for %s: a gradient of 0 makes NaNs where a row's state is 0", is.name)
            .c_str());
  if (is.divides_by_lr && o.lr == 0)
    return refused("optimizer.lr", 0.0, text("above 0 for %s", is.name).c_str());
  return FRUGAL_OK;
}

Status check_name(const char* name, Status status) {
  const size_t n = strnlen(name, kMostName + 1);
  if (n > 0 && n <= kMostName) return FRUGAL_OK;
  return fail(status, "name is '%.64s', of %s bytes: a table's name has 1..255", name,
              n == 0 ? "0" : "more than 255");
}

Status check_name(const frugal_table_config& c) {
  FRUGAL_TRY(check_size(&c, "frugal_table_config"));
  if (!c.name)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "name is NULL: a table's name must have 1..255 bytes");
  return check_name(c.name, FRUGAL_ERR_INVALID_ARGUMENT);
}

Status check_table(const frugal_table_config& c) {
  FRUGAL_TRY(one_of("key_space", c.key_space, FRUGAL_HASHED, "FRUGAL_DENSE or FRUGAL_HASHED"));
  FRUGAL_TRY(one_of("dtype", c.dtype, FRUGAL_F32, "FRUGAL_F32"));
  if (c.rows < 1 || c.rows > UINT64_C(0xfffffffe)) return refused("rows", c.rows, "1..2^32-2");
  if (c.dim < 1 || c.dim > 65536) return refused("dim", uint64_t{c.dim}, "1..65536");
  FRUGAL_TRY(one_of("init", c.init, FRUGAL_INIT_XAVIER, "one of FRUGAL_INIT_*"));
  if (!std::isfinite(c.init_a)) return refused("init_a", c.init_a, "finite");
  if (!std::isfinite(c.init_b)) return refused("init_b", c.init_b, "finite");
  if (c.init == FRUGAL_INIT_UNIFORM && c.init_a > c.init_b)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "init_a is %.9g and init_b %.9g: of FRUGAL_INIT_UNIFORM init_a is "
                "the lower bound, and must be at most init_b",
                double{c.init_a}, double{c.init_b});
  if (c.init == FRUGAL_INIT_XAVIER && c.init_a < 0)
    return refused("init_a", c.init_a, "0 or more for FRUGAL_INIT_XAVIER, whose gain it is");
  if (c.init > FRUGAL_INIT_UNIFORM && c.init_b < 0)
    return refused("init_b", double{c.init_b},
                   c.init == FRUGAL_INIT_XAVIER
                       ? "0 (rows) or more for FRUGAL_INIT_XAVIER, whose fan_in it is"
                       : "0 or more: it is a standard deviation");
  const double most = arith::initial_bound(
      arith::init_spec(c.init, c.init_a, c.init_b, c.rows, c.dim, 0, FRUGAL_SGD, 0));
  if (!(most <= FLT_MAX))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "init_a is %.9g and init_b is %.9g: initial values would reach %.9g, and must be "
                "at most %.9g",
                double{c.init_a}, double{c.init_b}, most, double{FLT_MAX});
  FRUGAL_TRY(one_of("nan_policy", c.nan_policy, FRUGAL_NAN_ACCEPT, "one of FRUGAL_NAN_*"));
  FRUGAL_TRY(known_flags("frugal_table_config.flags", c.flags, FRUGAL_TABLE_LAZY));
  if ((c.flags & FRUGAL_TABLE_LAZY) && c.key_space == FRUGAL_HASHED)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "FRUGAL_TABLE_LAZY is for dense tables; hashed ones need no flag");
  return check_optimizer(c.optimizer);
}

Status check_folder_config(const frugal_folder_config& c) {
  FRUGAL_TRY(check_size(&c, "frugal_folder_config"));
  FRUGAL_TRY(known_flags("frugal_folder_config.flags", c.flags, 0));
  if (c.keep < 1) return refused("keep", uint64_t{c.keep}, "1 or more");
  return FRUGAL_OK;
}

Status check_checkpoint_config(const frugal_checkpoint_config& c, uint32_t world_size) {
  FRUGAL_TRY(check_size(&c, "frugal_checkpoint_config"));
  FRUGAL_TRY(known_flags("frugal_checkpoint_config.flags", c.flags, 0));
  const char* const name = c.name ? c.name : "";
  if (strnlen(name, kMostCheckpointName + 1) > kMostCheckpointName || strchr(name, '/'))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "a checkpoint's name has at most %zu bytes, and no slash: '%.64s'",
                kMostCheckpointName, name);
  if (c.name && !*name)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "a checkpoint's name is '': give a name, or NULL for none");
  if (c.step != FRUGAL_NO_STEP) FRUGAL_TRY(check_step(c.step));
  if (!c.blob && c.blob_size)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "blob_size is %zu, and blob is NULL: give the bytes",
                c.blob_size);
  if (!c.blob) return FRUGAL_OK;
  if (c.step != FRUGAL_NO_STEP)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "step %llu is to come, and a blob is given: give it in the step, by "
                "frugal_checkpoint_blob",
                static_cast<unsigned long long>(c.step));
  if (c.blob_rank >= world_size)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "blob_rank is %u, and world_size %u: give a rank below that", c.blob_rank,
                world_size);
  return FRUGAL_OK;
}

Status check_trainer(const frugal_trainer_config& c, uint32_t world_size) {
  FRUGAL_TRY(check_size(&c, "frugal_trainer_config"));
  FRUGAL_TRY(known_flags("frugal_trainer_config.flags", c.flags, FRUGAL_TRAINER_REPLACE));
  if (c.rank >= world_size)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "rank %s: the ranks are 0..%u (world_size %u)",
                number_text(c.rank).c_str(), world_size - 1, world_size);
  if (!(c.cache_ratio >= 0 && c.cache_ratio <= 1))
    return refused("cache_ratio", c.cache_ratio, "0..1");
  if (c.device && strnlen(c.device, kMostDevice + 1) > kMostDevice) return unknown_device(c.device);
  return FRUGAL_OK;
}

Status check_device(const char* name) {
  if (!name || std::strcmp(name, "cpu") == 0 || device::names_device(name)) return FRUGAL_OK;
  return unknown_device(name);
}

frugal_optimizer of_its_kind(const frugal_optimizer& o) {
  const arith::Optimizer is = arith::optimizer_of(o.kind);
  frugal_optimizer r = FRUGAL_OPTIMIZER_INIT;
  r.kind = o.kind;
  r.flags = o.flags & (FRUGAL_OPT_MEAN_RANKS | is.flags);
  for (const HyperParameter& h : kHyperParameters)
    if (h.of == 0 || (is.hypers & h.of)) r.*h.at = o.*h.at;
  return r;
}

bool same_table(const frugal_table_config& a, const frugal_table_config& b) {
  // The end of the struct is padding with arbitrary bytes.
  constexpr size_t kBytes = offsetof(frugal_optimizer, flags) + sizeof(uint32_t);
  static_assert(kBytes == sizeof(size_t) + 19 * sizeof(float));
  auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof x) == 0; };
  const frugal_optimizer oa = of_its_kind(a.optimizer), ob = of_its_kind(b.optimizer);
  return a.key_space == b.key_space && a.dtype == b.dtype && a.rows == b.rows && a.dim == b.dim &&
         a.init == b.init && same(a.init_a, b.init_a) &&
         (a.init == FRUGAL_INIT_CONSTANT || same(a.init_b, b.init_b)) &&
         a.nan_policy == b.nan_policy && a.flags == b.flags && std::memcmp(&oa, &ob, kBytes) == 0;
}

Status meant_table(const Table& there, const frugal_table_config& config) {
  if (same_table(there.config, config)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_EXISTS,
              "a table of this name exists already, with another configuration: ask for the same, "
              "or choose another name");
}

Status table_exists() {
  return fail(FRUGAL_ERR_EXISTS,
              "a table of this name exists already: find it, or choose another name");
}

}  // namespace frugal
