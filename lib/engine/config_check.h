// Whether configurations are well formed.
#pragma once
#include "base/status.h"
#include "frugal.h"

namespace frugal {

struct Table;

template <class T>
Status check_size(const T* config, const char* name) {
  if (config->struct_size == sizeof(T)) return FRUGAL_OK;
  return fail(FRUGAL_ERR_STRUCT_SIZE,
              "%s.struct_size is %zu, this library (%s) knows %zu: use the INIT macro, and a "
              "library no older than the header",
              name, config->struct_size, frugal_version(), sizeof(T));
}

Status check_config(const frugal_config& config);
Status check_optimizer(const frugal_optimizer& optimizer);
Status check_table(const frugal_table_config& config, bool need_name);
Status check_trainer(const frugal_trainer_config& config, uint32_t world_size);
// What frugal_table_describe tells.
void describe_table(Table& table, frugal_table_info* out);

}  // namespace frugal
