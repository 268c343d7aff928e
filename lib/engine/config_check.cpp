#include "engine/config_check.h"

#include <cmath>
#include <cstddef>
#include <cstring>

#include "engine/engine.h"

namespace frugal {

namespace {

bool real(float x) { return std::isfinite(x); }

}  // namespace

Status check_config(const frugal_config& c) {
  auto bad = [](const char* what) { return fail(FRUGAL_ERR_INVALID_ARGUMENT, "%s", what); };
  FRUGAL_TRY(check_size(&c, "frugal_config"));
  if (c.flags & ~FRUGAL_OBSERVE) return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x", c.flags);
  if (c.flags && !c.service) return bad("FRUGAL_OBSERVE has a meaning with a service only");
  if (c.world_size < 1 || c.world_size > 4096) return bad("world_size must be 1..4096");
  if (c.lookahead > FRUGAL_MAX_LOOKAHEAD) return bad("lookahead exceeds FRUGAL_MAX_LOOKAHEAD");
  if (c.flush_threads > 256) return bad("flush_threads must be 0..256");
  if (c.flush_mode < FRUGAL_FLUSH_AUTO || c.flush_mode > FRUGAL_FLUSH_TREE_HEAP)
    return bad("unknown flush_mode");
  if (c.backing != FRUGAL_BACKING_PRIVATE && c.backing != FRUGAL_BACKING_SHM)
    return bad("unknown backing");
  if (c.timeout_ms < 0 && c.timeout_ms != FRUGAL_TIMEOUT_INFINITE)
    return bad("timeout_ms must be >= 0 or FRUGAL_TIMEOUT_INFINITE");
  return FRUGAL_OK;
}

Status check_optimizer(const frugal_optimizer& o) {
  auto bad = [](const char* what) { return fail(FRUGAL_ERR_INVALID_ARGUMENT, "optimizer: %s", what); };
  FRUGAL_TRY(check_size(&o, "frugal_optimizer"));
  if (o.kind < FRUGAL_SGD || o.kind > FRUGAL_FTRL) return bad("unknown kind");
  if (o.flags & ~(FRUGAL_OPT_NESTEROV | FRUGAL_OPT_MEAN_RANKS))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "optimizer: unknown flags 0x%x", o.flags);
  const float all[] = {o.lr,           o.eps,          o.momentum,   o.dampening,
                       o.beta1,        o.beta2,        o.rho,        o.ftrl_lambda1,
                       o.ftrl_lambda2, o.ftrl_beta,    o.initial_accumulator,
                       o.weight_decay_l2, o.weight_decay, o.clip_value, o.clip_norm,
                       o.weight_bound, o.grad_scale};
  for (float x : all)
    if (!real(x)) return bad("every hyper-parameter must be finite");
  if (o.eps < 0) return bad("eps must be >= 0");
  if (o.kind == FRUGAL_ADAM && !(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1))
    return bad("beta1 and beta2 must lie in [0, 1)");
  if (o.kind == FRUGAL_FTRL && !(o.lr > 0)) return bad("FTRL needs lr > 0");
  if (o.initial_accumulator < 0) return bad("initial_accumulator must be >= 0");
  if (o.clip_value < 0 || o.clip_norm < 0 || o.weight_bound < 0)
    return bad("clip_value, clip_norm and weight_bound must be >= 0 (0: off)");
  return FRUGAL_OK;
}

Status check_table(const frugal_table_config& c, bool need_name) {
  auto bad = [](const char* what) { return fail(FRUGAL_ERR_INVALID_ARGUMENT, "table: %s", what); };
  FRUGAL_TRY(check_size(&c, "frugal_table_config"));
  if (need_name) {
    if (!c.name) return bad("name is NULL");
    size_t n = strnlen(c.name, kMostName + 1);
    if (n == 0 || n > kMostName) return bad("name must have 1..255 bytes");
  }
  if (c.key_space != FRUGAL_DENSE && c.key_space != FRUGAL_HASHED) return bad("unknown key_space");
  if (c.dtype != FRUGAL_F32) return bad("unknown dtype");
  if (c.rows < 1 || c.rows > UINT64_C(0xfffffffe)) return bad("rows must be 1..2^32-2");
  if (c.dim < 1 || c.dim > 65536) return bad("dim must be 1..65536");
  if (c.init < FRUGAL_INIT_CONSTANT || c.init > FRUGAL_INIT_XAVIER) return bad("unknown init");
  if (!real(c.init_a) || !real(c.init_b)) return bad("init_a and init_b must be finite");
  if (c.nan_policy < FRUGAL_NAN_REJECT || c.nan_policy > FRUGAL_NAN_ACCEPT)
    return bad("unknown nan_policy");
  if (c.flags & ~FRUGAL_TABLE_LAZY)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "table: unknown flags 0x%x", c.flags);
  if ((c.flags & FRUGAL_TABLE_LAZY) && c.key_space == FRUGAL_HASHED)
    return bad("FRUGAL_TABLE_LAZY is for dense tables; hashed ones are lazy anyway");
  return check_optimizer(c.optimizer);
}

Status check_trainer(const frugal_trainer_config& c, uint32_t world_size) {
  FRUGAL_TRY(check_size(&c, "frugal_trainer_config"));
  if (c.flags & ~FRUGAL_TRAINER_REPLACE)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "unknown flags 0x%x", c.flags);
  if (c.rank >= world_size)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "rank %u: world_size is %u", c.rank, world_size);
  if (!(c.cache_ratio >= 0 && c.cache_ratio <= 1))
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "cache_ratio must lie in [0, 1]");
  if (c.device && std::strcmp(c.device, "cpu") != 0 &&
      std::strncmp(c.device, "cuda:", 5) != 0 && std::strncmp(c.device, "sim:", 4) != 0)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "device '%s' is unknown: give \"cpu\" or \"cuda:N\"",
                c.device);
  return FRUGAL_OK;
}

frugal_optimizer of_its_kind(const frugal_optimizer& o) {
  frugal_optimizer r = FRUGAL_OPTIMIZER_INIT;
  r.kind = o.kind;
  r.lr = o.lr;
  r.weight_decay_l2 = o.weight_decay_l2;
  r.weight_decay = o.weight_decay;
  r.clip_value = o.clip_value;
  r.clip_norm = o.clip_norm;
  r.weight_bound = o.weight_bound;
  r.grad_scale = o.grad_scale;
  r.flags = o.flags & FRUGAL_OPT_MEAN_RANKS;
  switch (o.kind) {
    case FRUGAL_MOMENTUM:
      r.momentum = o.momentum;
      r.dampening = o.dampening;
      r.flags |= o.flags & FRUGAL_OPT_NESTEROV;
      break;
    case FRUGAL_ADAGRAD:
    case FRUGAL_ROWWISE_ADAGRAD:
      r.eps = o.eps;
      r.initial_accumulator = o.initial_accumulator;
      break;
    case FRUGAL_ADAM:
      r.beta1 = o.beta1;
      r.beta2 = o.beta2;
      r.eps = o.eps;
      break;
    case FRUGAL_RMSPROP:
      r.rho = o.rho;
      r.eps = o.eps;
      break;
    case FRUGAL_FTRL:
      r.ftrl_lambda1 = o.ftrl_lambda1;
      r.ftrl_lambda2 = o.ftrl_lambda2;
      r.ftrl_beta = o.ftrl_beta;
      r.initial_accumulator = o.initial_accumulator;
      break;
    default:
      break;
  }
  return r;
}

bool same_table(const frugal_table_config& a, const frugal_table_config& b) {
  // The end of the struct is padding, in which anything may be.
  constexpr size_t kBytes = offsetof(frugal_optimizer, flags) + sizeof(uint32_t);
  static_assert(kBytes == sizeof(size_t) + 19 * sizeof(float));
  auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof x) == 0; };
  const frugal_optimizer oa = of_its_kind(a.optimizer), ob = of_its_kind(b.optimizer);
  return a.key_space == b.key_space && a.dtype == b.dtype && a.rows == b.rows && a.dim == b.dim && a.init == b.init &&
         same(a.init_a, b.init_a) && (a.init == FRUGAL_INIT_CONSTANT || same(a.init_b, b.init_b)) &&
         a.nan_policy == b.nan_policy && a.flags == b.flags && std::memcmp(&oa, &ob, kBytes) == 0;
}

Status meant_table(const Table& there, const frugal_table_config& config) {
  if (same_table(there.config, config)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_EXISTS,
              "a table named '%s' exists already, with another configuration: all processes must ask for the same",
              there.name.c_str());
}

void describe_table(Table& t, frugal_table_info* out) {
  frugal_table_info i;
  std::memset(&i, 0, sizeof i);
  i.struct_size = sizeof i;
  i.rows = t.rows.count();
  i.capacity = t.rows.capacity();
  i.value_bytes = t.rows.layout().dim * sizeof(float);
  i.state_floats = t.rows.layout().state_floats;
  i.memory_bytes = t.rows.memory_bytes();
  i.dim = t.rows.layout().dim;
  i.key_space = t.config.key_space;
  i.optimizer = t.config.optimizer.kind;
  i.page_bytes = static_cast<uint32_t>(kHugePage);
  *out = i;
}

}  // namespace frugal
