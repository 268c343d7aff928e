// The engine's own objects live in mimalloc, the host program's malloc stays its own.
//
// Rule: an object of the engine derives from HeapObject, and a container is a Vector (or takes
// HeapAllocator). Rows, keys and gradients are not here: they live in slabs and buffers
// (storage/slab.h, base/buffer.h). Under sanitizers this is plain malloc.
#pragma once
#include <cstddef>
#include <new>
#include <vector>

namespace frugal {

void* heap_alloc(size_t bytes);  // throws std::bad_alloc
void heap_free(void* memory) noexcept;

template <class T>
struct HeapAllocator {
  using value_type = T;
  HeapAllocator() = default;
  template <class U>
  HeapAllocator(const HeapAllocator<U>&) noexcept {}
  T* allocate(size_t n) { return static_cast<T*>(heap_alloc(n * sizeof(T))); }
  void deallocate(T* p, size_t) noexcept { heap_free(p); }
  template <class U>
  bool operator==(const HeapAllocator<U>&) const noexcept {
    return true;
  }
};

template <class T>
using Vector = std::vector<T, HeapAllocator<T>>;

struct HeapObject {
  static void* operator new(size_t bytes) { return heap_alloc(bytes); }
  static void operator delete(void* p) noexcept { heap_free(p); }
};

}  // namespace frugal
