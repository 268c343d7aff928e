#include "base/heap.h"

#include <cstdlib>
#ifdef FRUGAL_MIMALLOC
#include <mimalloc.h>
#endif

namespace frugal {

void* heap_alloc(size_t bytes) {
#ifdef FRUGAL_MIMALLOC
  void* p = mi_malloc(bytes ? bytes : 1);
#else
  void* p = std::malloc(bytes ? bytes : 1);
#endif
  if (!p) throw std::bad_alloc();
  return p;
}

void heap_free(void* memory) noexcept {
#ifdef FRUGAL_MIMALLOC
  mi_free(memory);
#else
  std::free(memory);
#endif
}

}  // namespace frugal
