// A call of the engine that fails ends a worker, with the engine's message.
#pragma once
#include <stdexcept>
#include <string>

#include "frugal.h"

namespace bench {

inline void Check(int32_t status, const char* call) {
  if (status == FRUGAL_OK) return;
  frugal_error error;
  frugal_last_error(&error);
  throw std::runtime_error(std::string(call) + ": " + frugal_status_name(status) + ": " +
                           error.message);
}
#define CHECK_OK(call) Check((call), #call)

}  // namespace bench
