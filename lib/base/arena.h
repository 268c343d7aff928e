// Memory for buffers in one mapping, so that another process can be told where they are by offsets.
//
// Pieces are cut one after the other; what is put back is used again, by pieces of any size. The
// mapping may be the arena's own (shared memory, of which addresses are reserved in plenty), or a
// part of somebody else's. Thread-safe.
#pragma once
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

struct MemoryBudget;

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  // Shared memory of its own, of at most `bytes`.
  Status open(size_t bytes);
  // [first, first + bytes) of a mapping that lives longer; both are multiples of 2 MiB.
  void over(const Mapping& mapping, size_t first, size_t bytes);
  // Before the first piece is taken. What is put back counts, whatever the limit says: its memory
  // is there.
  void count_in(MemoryBudget* budget) { budget_ = budget; }
  bool opened() const { return mapping_.base != nullptr; }
  // Committed memory, aligned to 2 MiB; `bytes` is rounded up to that.
  Status take(size_t bytes, char** out);
  // What was taken can be taken again, in pieces of any size. Its memory stays committed until the
  // arena ends.
  void put_back(char* taken, size_t bytes) noexcept;
  const Mapping& mapping() const { return mapping_; }
  bool holds(const void* p) const {
    const char* at = static_cast<const char*>(p);
    return at >= mapping_.base + first_ && at < mapping_.base + end_;
  }
  uint64_t offset(const void* p) const {
    return static_cast<uint64_t>(static_cast<const char*>(p) - mapping_.base);
  }

 private:
  Mutex mu_;
  Mapping mapping_;
  MemoryBudget* budget_ = nullptr;
  bool own_ = false;
  size_t first_ = 0, used_ = 0, end_ = 0;
  size_t committed_ = 0;   // up to here there is memory: what was put back keeps its own
  struct Range {
    size_t first, end;
  };
  Vector<Range> free_ GUARDED_BY(mu_);     // below used_, ascending, none next to another
  size_t taken_ GUARDED_BY(mu_) = 0;       // pieces: there can be as many ranges between them
};

}  // namespace frugal
