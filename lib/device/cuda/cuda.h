// Devices "cuda:N".
#ifndef FRUGAL_DEVICE_CUDA_CUDA_H_
#define FRUGAL_DEVICE_CUDA_CUDA_H_

#include <stdint.h>

#include <memory>

#include "device/runtime.h"

namespace frugal::device {

// Opens GPU number `index` and loads all kernels on it. Throws std::bad_alloc.
Result open_cuda(uint32_t index, std::shared_ptr<Runtime>* out);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_CUDA_CUDA_H_
