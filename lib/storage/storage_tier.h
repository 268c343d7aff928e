// Where rows of a hashed table are that have no place in memory: the seam for what lies behind it.
//
// A record is a row with its state, as its bytes lie in memory. A key has one from when its row
// leaves memory for the first time until the row is deleted. While the row has a place in memory
// its record is an old one, which nobody reads.
//
// Threads: StoredRows calls has(), forget() and keys() with a lock held, one at a time, so they
// answer at once; load() and store() without, but for a store() outside steps, by several threads
// at a time, so these may be slow. While a key's record is being written no other call writes it,
// but each of the others may name the key: has() tells what was before or what is after, load()
// gives one of the two, whole, and of a record that is forgotten meanwhile one may be left, which
// is forgotten again when store() has ended. Any may throw std::bad_alloc, but forget().
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
  virtual void keys(Vector<uint64_t>* out) = 0;
  // The record of keys[i] to row slots[i].
  virtual Status load(const uint64_t* keys, const uint32_t* slots, size_t n,
                      const device::RowsRef& to) = 0;
  // Row i becomes the record of keys[i]. After a failure a key may have its former one.
  virtual Status store(const uint64_t* keys, size_t n, const device::RowsView& from) = 0;

  // Rows that have come in, and gone out; and how often there was no place for rows.
  std::atomic<uint64_t> loaded{0}, left{0}, refused{0};
};

// What a table's rows have behind the memory.
struct Tier {
  std::unique_ptr<StorageTier> store;  // null: nothing
  uint64_t slots = 0;              // in memory
  // Rows wanted places in vain, and now there may be some. With the places' lock held.
  std::function<void()> room;
};

// Makes what a table that is created has behind its memory, all but `room`. No product does: tests
// set it.
extern std::atomic<Tier (*)(const frugal_table_config&)> g_make_tier;

}  // namespace frugal
