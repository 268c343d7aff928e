#include "process/control_structs.h"

#include "base/config_fields.h"

namespace frugal {
namespace {

// The fields, as C and as Cap'n Proto call them.
// clang-format off
#define CONFIG_FIELDS(X)                                                                           \
  X(world_size, WorldSize) X(lookahead, Lookahead) X(flush_threads, FlushThreads)                  \
  X(flush_mode, FlushMode) X(staleness, Staleness) X(pending_bytes, PendingBytes)                  \
  X(host_bytes, HostBytes) X(timeout_ms, TimeoutMs) X(backing, Backing) X(flags, Flags)            \
  X(seed, Seed)
#define TABLE_INFO_FIELDS(X)                                                                       \
  X(rows, Rows) X(capacity, Capacity) X(value_bytes, ValueBytes) X(state_floats, StateFloats)      \
  X(memory_bytes, MemoryBytes) X(dim, Dim) X(key_space, KeySpace) X(optimizer, Optimizer)          \
  X(page_bytes, PageBytes)
#define TRAINER_CONFIG_FIELDS(X)                                                                   \
  X(rank, Rank) X(flags, Flags) X(cache_bytes, CacheBytes) X(cache_ratio, CacheRatio)
// clang-format on

// A new field must be added above and to control.capnp, too.
static_assert(sizeof(frugal_config) == 96 && sizeof(frugal_table_info) == 64);
static_assert(sizeof(frugal_trainer_config) == 40);

#define PUT(field, Field) to.set##Field(from.field);
#define TAKE(field, Field) to->field = from.get##Field();

const char* text_or_null(capnp::Text::Reader text) { return text.size() ? text.cStr() : nullptr; }

}  // namespace

void put(const frugal_config& from, wire::Config::Builder to) { CONFIG_FIELDS(PUT) }

void put(const frugal_table_config& from, wire::TableConfig::Builder to) {
  FRUGAL_TABLE_CONFIG_FIELDS(PUT)
  if (from.name) to.setName(from.name);
  const auto put_optimizer = [](const frugal_optimizer& from, wire::Optimizer::Builder to) {
    FRUGAL_OPTIMIZER_FIELDS(PUT)
  };
  put_optimizer(from.optimizer, to.initOptimizer());
}

void put(const frugal_table_info& from, wire::TableInfo::Builder to) { TABLE_INFO_FIELDS(PUT) }

void put(const frugal_trainer_config& from, wire::TrainerConfig::Builder to) {
  TRAINER_CONFIG_FIELDS(PUT)
  if (from.device) to.setDevice(from.device);
}

void take(wire::Config::Reader from, frugal_config* to) {
  frugal_config_init(to);
  CONFIG_FIELDS(TAKE)
}

void take(wire::TableConfig::Reader from, frugal_table_config* to) {
  frugal_table_config_init(to);
  FRUGAL_TABLE_CONFIG_FIELDS(TAKE)
  to->name = text_or_null(from.getName());
  const auto take_optimizer = [](wire::Optimizer::Reader from, frugal_optimizer* to) {
    FRUGAL_OPTIMIZER_FIELDS(TAKE)
  };
  take_optimizer(from.getOptimizer(), &to->optimizer);
}

void take(wire::TableInfo::Reader from, frugal_table_info* to) {
  *to = {};
  to->struct_size = sizeof *to;
  TABLE_INFO_FIELDS(TAKE)
}

void take(wire::TrainerConfig::Reader from, frugal_trainer_config* to) {
  frugal_trainer_config_init(to);
  TRAINER_CONFIG_FIELDS(TAKE)
  to->device = text_or_null(from.getDevice());
}

}  // namespace frugal
