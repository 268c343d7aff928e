// Checks of configurations.
#pragma once
#include "base/status.h"
#include "frugal.h"

namespace frugal {

struct Table;

constexpr size_t kMostName = 255;   // bytes of a table's name
constexpr size_t kMostDevice = 32;  // bytes of a device's name

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
// Checks the struct's size, and the name of a new table.
Status check_name(const frugal_table_config& config);
// `status`: returned if no table can have the name
Status check_name(const char* name, Status status);
// Checks the rest, once the size is right. The caller adds the table's name to the message.
Status check_table(const frugal_table_config& config);
Status check_trainer(const frugal_trainer_config& config, uint32_t world_size);
Status check_folder_config(const frugal_folder_config& config);
Status check_checkpoint_config(const frugal_checkpoint_config& config, uint32_t world_size);
// For the process that opens the device: a controller need not know the kind of the device.
Status check_device(const char* name);
// The optimizer with the hyper-parameters that its kind uses; the others have their defaults.
frugal_optimizer of_its_kind(const frugal_optimizer& optimizer);
// Do both ask for the same table, apart from its name?
bool same_table(const frugal_table_config& a, const frugal_table_config& b);
// A table of this name exists where one with `config` is to be created. EXISTS: they differ.
Status meant_table(const Table& there, const frugal_table_config& config);
// They are the same, but the caller itself has created the table.
Status table_exists();

}  // namespace frugal
