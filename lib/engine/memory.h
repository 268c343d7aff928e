// The memory of an engine: its budget, and the pools that its buffers come from.
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
  // `shared`: other processes read the memory of `pool` in place. `versions`: rows have versions.
  Status open(bool shared, bool versions) {
    if (shared) {
      // Reserves addresses only, and more of them than the machine has memory.
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

  // For data that no other process reads in place.
  BufferPool& unread() { return arena.opened() ? own : pool; }
  // For sums of gradients: memory that devices see, if there are any.
  BufferPool& sums() { return pinner->any() ? pinned : pool; }
  // Null if staleness is 0. Else rows are read, also by other processes, while threads write them.
  VersionWord* versions() const { return words.as<VersionWord>(); }
  // The shared address of `p`; kNoShmAddress if other processes do not see that memory.
  uint64_t shm_address(const void* p) const {
    return p && arena.holds(p) ? arena.shm_address(p) : kNoShmAddress;
  }
  // This may give much memory back, so the caller holds no lock that calls need.
  void end_step() {
    for (BufferPool* of : {&pool, &own, &pinned}) of->end_step();
  }

  MemoryBudget budget;
  Arena arena;  // with shared memory: `pool` is cut from it
  BufferPool pool;
  BufferPool own;     // with shared memory: for data that no other process reads
  BufferPool pinned;  // memory that devices see; used once a trainer on a GPU has joined
  // Pins tables' memory and `pinned`. While it has a device, sums are pinned.
  const std::shared_ptr<DevicePinner> pinner = std::make_shared<DevicePinner>();
  Buffer words;
};

}  // namespace frugal
