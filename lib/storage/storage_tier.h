// The interface of a storage tier: it keeps rows of a hashed table that have no slot in memory.
//
// A record is a row with its state, as its bytes lie in memory. A key gets a record when its row
// leaves memory for the first time. The record remains until the row is deleted. While the row has
// a slot in memory its record is out of date, and no thread reads it.
//
// Threads: StoredRows calls has() and forget() with a lock held, one at a time, so they must return
// at once. It calls load(), store() and keys() without the lock, from several threads at a time, so
// they may be slow. A store() outside steps is called with the lock held.
//
// While a key's record is being written, no other call writes it, but other calls may name the key.
// has() then returns the state before or after the write. load() gives the record before or after
// it, whole. A record that is forgotten during its write may remain; it is forgotten again when
// store() has ended. All calls but forget() may throw std::bad_alloc.
#pragma once
#include <atomic>
#include <functional>
#include <memory>

#include "base/heap.h"
#include "base/status.h"
#include "device/kernels.h"
#include "frugal.h"

namespace frugal {

class StorageTier {
 public:
  virtual ~StorageTier() = default;
  virtual bool has(uint64_t key) = 0;
  virtual void forget(uint64_t key) noexcept = 0;
  // Appends each key that has a record during the whole call, once.
  virtual void keys(Vector<uint64_t>* out) = 0;
  // Copies the record of keys[i] to row slots[i].
  virtual Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
                      const device::RowsRef& to) = 0;
  // Row i becomes the record of keys[i]. After a failure a key may have its former record.
  virtual Status store(const uint64_t* keys, size_t n, const device::RowsView& from) = 0;

  // Rows loaded into memory, rows that left it, and rows that found no slot.
  std::atomic<uint64_t> loaded{0}, left{0}, refused{0};
};

// A table's storage tier and its size in memory.
struct Tier {
  std::unique_ptr<StorageTier> store;  // null: no storage tier
  uint64_t slots = 0;                  // in memory
  // Called when slots may be available after a call found none. `SlotMap::mu` is held.
  std::function<void()> room;
};

// Makes the storage tier of a new table, all of Tier but `room`. The product sets none: only tests
// set it.
extern std::atomic<Tier (*)(const frugal_table_config&)> g_make_tier;

}  // namespace frugal
