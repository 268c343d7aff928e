// Whether configurations are well formed.
#pragma once
#include "base/status.h"
#include "frugal.h"

namespace frugal {

struct Table;

constexpr size_t kMostName = 255;  // bytes of a table's name
constexpr size_t kMostDevice = 32;  // of a device's

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
// Of the size, and the name of a table that is to be created.
Status check_name(const frugal_table_config& config);
Status check_name(const char* name, Status status);  // what it answers if no table can have that
// Of the rest, when the size is right. Who calls this names the table.
Status check_table(const frugal_table_config& config);
Status check_trainer(const frugal_trainer_config& config, uint32_t world_size);
// In the process that opens the device: a controller need not know its kind.
Status check_device(const char* name);
// An optimizer with the hyper-parameters that its kind looks at; the others have their defaults.
frugal_optimizer of_its_kind(const frugal_optimizer& optimizer);
// Whether both ask for the same table, but for its name.
bool same_table(const frugal_table_config& a, const frugal_table_config& b);
// A table is there, where one with this configuration is to be created: EXISTS if the two differ.
Status meant_table(const Table& there, const frugal_table_config& config);
// They do not, but it was created by who asks.
Status table_exists();

}  // namespace frugal
