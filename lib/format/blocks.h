// Memory for whole blocks of a file.
#pragma once
#include <new>

#include "base/heap.h"
#include "base/os.h"
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

// Memory for large pieces of files, on huge pages. A read into small pages becomes many requests to
// the disk, because a request may have so many separate pages only.
class PieceMemory {
 public:
  PieceMemory() = default;
  ~PieceMemory() { os_release(&mapping_); }
  PieceMemory(const PieceMemory&) = delete;
  Status open(size_t bytes) {
    FRUGAL_TRY(os_reserve(bytes, false, &mapping_));
    return os_commit(mapping_, 0, mapping_.bytes);
  }
  char* at() const { return mapping_.base; }

 private:
  Mapping mapping_;
};

}  // namespace frugal
