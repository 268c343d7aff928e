// Calls of checkpoints with the arguments that tests give.
#pragma once
#include <string>

#include "frugal.h"

namespace frugal_test {

struct CheckpointInfo : frugal_checkpoint_info {
  CheckpointInfo() : frugal_checkpoint_info{} {
    struct_size = sizeof(frugal_checkpoint_info);
    step = FRUGAL_NO_STEP;
  }
};

inline int32_t open_folder(frugal_engine* engine, const std::string& path, uint32_t keep) {
  frugal_folder_config config = FRUGAL_FOLDER_CONFIG_INIT;
  config.keep = keep;
  return frugal_folder_open(engine, path.c_str(), &config);
}

// `path` null: the folder that the engine writes. `number` 0: the newest one.
inline int32_t restore(frugal_engine* engine, const char* path, uint64_t number,
                       CheckpointInfo* info) {
  frugal_restore_config config = FRUGAL_RESTORE_CONFIG_INIT;
  config.folder = path;
  config.number = number;
  return frugal_restore(engine, &config, info);
}

inline int32_t await_checkpoint(frugal_engine* engine, uint64_t number, CheckpointInfo* info) {
  return frugal_checkpoint_wait(engine, number, FRUGAL_TIMEOUT_INFINITE, info);
}

}  // namespace frugal_test
