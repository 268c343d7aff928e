// Memory for whole blocks of a file.
#pragma once
#include <new>

#include "base/heap.h"
#include "format/parameter_file.h"

namespace frugal {

// Aligned to kFileBlock. Throws if there is no memory.
struct Blocks {
  explicit Blocks(size_t bytes) : at(static_cast<char*>(heap_alloc_aligned(kFileBlock, bytes))) {
    if (!at) throw std::bad_alloc();
  }
  ~Blocks() { heap_free(at); }
  Blocks(const Blocks&) = delete;
  char* const at;
};

}  // namespace frugal
