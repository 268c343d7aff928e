// The engine's own objects live in mimalloc; the host program's malloc stays its own.
//
// Rule: an object of the engine derives from HeapObject, and a container is a Vector, Map or String
// (or takes HeapAllocator). Rows, large keys and gradients are not here: they live in slabs and
// buffers (storage/slab.h, base/buffer.h).
//
// The library loads mimalloc at run time and hides its names. If it were linked, its malloc and
// operator new could become those of the program. Under sanitizers, and where mimalloc is not
// installed, this is plain malloc.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <new>
#include <string>
#include <vector>

namespace frugal {

void* heap_alloc(size_t bytes);                                     // throws std::bad_alloc
void* heap_alloc_aligned(size_t alignment, size_t bytes) noexcept;  // null: no memory
void heap_free(void* memory) noexcept;

// Test hook: the n-th allocation from now on fails (0: off; -1: each). Returns what was left of
// the last n.
int64_t heap_test_fail_after(int64_t n);

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
// Room for `more` elements, which at least doubles: reserve() alone would move all elements each
// time.
template <class T>
void make_room(Vector<T>& v, size_t more) {
  if (v.capacity() - v.size() < more) v.reserve(std::max(2 * v.size(), v.size() + more));
}
template <class K, class V>
using Map = std::map<K, V, std::less<K>, HeapAllocator<std::pair<const K, V>>>;
template <class T>
using List = std::list<T, HeapAllocator<T>>;
using String = std::basic_string<char, std::char_traits<char>, HeapAllocator<char>>;

struct HeapObject {
  static void* operator new(size_t bytes) { return heap_alloc(bytes); }
  static void operator delete(void* p) noexcept { heap_free(p); }
};

}  // namespace frugal
