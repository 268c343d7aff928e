#include "base/heap.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

namespace frugal {
namespace {

std::atomic<int64_t> g_fail_after{0};

bool injected_failure() {
  int64_t left = g_fail_after.load(std::memory_order_relaxed);
  while (left > 0 &&
         !g_fail_after.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
  return left == 1 || left < 0;
}

struct Functions {
  void* (*alloc)(size_t bytes) = std::malloc;
  void* (*alloc_aligned)(size_t bytes, size_t alignment) = [](size_t bytes, size_t alignment) {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  };
  void (*free)(void* memory) = std::free;
};

constinit Functions g_functions;

// Runs when the library is loaded, before any object of it can be made. A later moment would not
// do: a child forked in the middle of another thread's dlopen cannot call dlopen any more.
[[gnu::constructor(102)]] void load() {
#ifdef FRUGAL_MIMALLOC
  // RTLD_LOCAL: no other library's malloc or operator new resolves to it.
  if (void* library = dlopen(FRUGAL_MIMALLOC, RTLD_NOW | RTLD_LOCAL)) {
    void* a = dlsym(library, "mi_malloc");
    void* b = dlsym(library, "mi_malloc_aligned");
    void* c = dlsym(library, "mi_free");
    if (a && b && c)
      g_functions = {reinterpret_cast<void* (*)(size_t)>(a),
                     reinterpret_cast<void* (*)(size_t, size_t)>(b),
                     reinterpret_cast<void (*)(void*)>(c)};
  }
#endif
}

}  // namespace

void* heap_alloc(size_t bytes) {
  void* p = injected_failure() ? nullptr : g_functions.alloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}

void* heap_alloc_aligned(size_t alignment, size_t bytes) noexcept {
  return injected_failure() ? nullptr : g_functions.alloc_aligned(bytes ? bytes : 1, alignment);
}

void heap_free(void* memory) noexcept { g_functions.free(memory); }

int64_t heap_test_fail_after(int64_t n) { return g_fail_after.exchange(n); }

}  // namespace frugal
