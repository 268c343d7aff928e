// What memory an engine's buffers are of.
#pragma once
#include <algorithm>
#include <memory>
#include <new>

#include "base/arena.h"
#include "base/buffer.h"
#include "base/os.h"
#include "engine/device_memory.h"
#include "storage/row_versions.h"

namespace frugal {

struct EngineMemory {
  explicit EngineMemory(uint64_t limit) {
    budget.limit = limit;
    pinned.pin_with(pinner);
  }
  // `shared`: other processes read what is in `pool` in place. `versions`: with version words.
  Status open(bool shared, bool versions) {
    if (shared) {
      // Addresses only; more than the machine has will not be needed.
      FRUGAL_TRY(arena.open(std::max<uint64_t>(uint64_t{64} << 30, 2 * os_memory_bytes())));
      arena.count_in(&budget);
      pool.cut_from(&arena);
      own.count_in(&budget);
    }
    pool.count_in(&budget);
    if (versions) {
      FRUGAL_TRY(pool.get(kVersionWords * sizeof(VersionWord), &words));
      new (words.data()) VersionWord[kVersionWords]();
    }
    return FRUGAL_OK;
  }

  // For what no other process reads in place.
  BufferPool& unread() { return arena.opened() ? own : pool; }
  // For sums: devices see them if there are any.
  BufferPool& sums() { return pinner->any() ? pinned : pool; }
  // Staleness > 0: rows are read while others are written, also by other processes. Or null.
  VersionWord* versions() const { return words.as<VersionWord>(); }
  // Where something is in the memory that other processes see; kNoShmAddress if it is not there.
  uint64_t shm_address(const void* p) const {
    return p && arena.holds(p) ? arena.shm_address(p) : kNoShmAddress;
  }
  // What goes back may be much: not with locks that calls want.
  void end_step() {
    for (BufferPool* of : {&pool, &own, &pinned}) of->end_step();
  }

  MemoryBudget budget;
  Arena arena;        // with shared memory: what `pool` has
  BufferPool pool;
  BufferPool own;     // with shared memory: what is nobody else's to read
  BufferPool pinned;  // that devices see; used when a trainer on a GPU has joined
  // Of tables' memory, and of `pinned`. While it has a device, sums are pinned.
  const std::shared_ptr<DevicePinner> pinner = std::make_shared<DevicePinner>();
  Buffer words;
};

}  // namespace frugal
