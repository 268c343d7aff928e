// Stands in for the driver's library: which pointers are memory of a GPU.
#include <stdint.h>

extern "C" __attribute__((visibility("default"))) int cuPointerGetAttribute(
    void* data, int attribute, unsigned long long pointer) {
  constexpr int kInvalidValue = 1, kMemoryType = 2, kIsManaged = 8;
  const unsigned long long kind = pointer >> 40;  // 1: of the device; 2: managed; 3: pinned
  if (kind < 1 || kind > 3) return kInvalidValue;
  auto* out = static_cast<uint32_t*>(data);
  if (attribute == kMemoryType)
    *out = kind == 3 ? 1 : 2;
  else if (attribute == kIsManaged)
    *out = kind == 2;
  else
    return kInvalidValue;
  return 0;
}
