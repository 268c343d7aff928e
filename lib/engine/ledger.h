// The ledger: what another process that maps the tables needs to read them out, as of the last
// committed step. It suffices if the writing process was killed between any two instructions.
//
// It is in the arena, and refers to memory by shared addresses (base/region_publisher.h). The root
// has the last committed step. A table's record has the list of its committed updates that are not
// wholly written: their hyper-parameters, lists of rows, shared addresses of sums, and which rows
// are written. Before a thread writes a row, it copies it into one of the table's before-images and
// then names the row there. So a reader finds a row in the middle of its write whole in a
// before-image. The rows of an update use the same before-image one after the other, and it stays
// in the nearest cache. Kernels make the copy where they read the row anyway (device::Undo). So
// rows, before-images and unwritten updates together are the tables (process/readout.h).
//
// A killed thread has executed its program up to some instruction, and nothing after it. So only
// the order of stores in the program counts:
// - An update is in its list before the root has its step as committed.
// - The root has the step before the first row is written.
// - A row is marked as written after its last byte.
// - An update leaves the list when all rows are written, and its memory is freed afterwards.
//
// Rows that an uncommitted step has created have its mark in their flags (storage/slot_map.h). A
// committed step's marks are removed before the next step commits. So mark_of(committed) names only
// rows that exist.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "base/assert.h"
#include "base/buffer.h"
#include "base/sync.h"
#include "storage/rows.h"
#include "window/step_update.h"

namespace frugal {

// --- Layout in memory ----------------------------------------------------------------------------

struct LedgerRoot {
  static constexpr uint64_t kMagic = 0x3267646c67757246;  // "Frugldg2"
  uint64_t magic;
  std::atomic<uint64_t> committed;  // step; kNoStep: none
  std::atomic<uint64_t> ended;      // 1: no thread writes any more, although the process may live
  std::atomic<uint64_t> kinds;      // how often a table got another kind of optimizer
};

struct LedgerTerms {  // of one rank in an update
  uint64_t rank;
  uint64_t slots;  // shared address of uint32_t[rows], ascending
  uint64_t rows;
  // shared address, one every `stride` floats; kNoShmAddress: other processes cannot read them
  uint64_t sums;
  uint64_t stride;
};

struct LedgerUpdate {
  static constexpr uint64_t kApart =
      8;  // progress of chunk c is [kApart * c]: threads write them at each row
  // shared address of the table's next update, of a later step; or kNoShmAddress
  std::atomic<uint64_t> next;
  uint64_t step;
  arith::StepScalars scalars;
  // Which rows are written. With chunks of slots: chunk c has [bounds[c], bounds[c + 1]), and its
  // slots below its progress are written. Without chunks: row i of the merged list if marks[i] is
  // set.
  uint64_t chunks;
  uint64_t bounds, progress;  // shared addresses of uint64_t[chunks + 1], uint64_t[kApart * chunks]
  uint64_t marks, rows;       // shared address of uint8_t[rows]
  uint64_t ranks;             // number of LedgerTerms that follow, ranks ascending
};

struct BeforeImage {
  static constexpr uint64_t kOutside = UINT64_MAX - 1;  // rows are written outside of steps
  std::atomic<uint64_t>
      // shared address of the update being written; kOutside; kNoShmAddress: free
      update;
  uint64_t rows;  // 1 for an update
  // After it: uint32_t slots[before_image_rows]; at values_at() values, one every value_pitch; then
  // state, one every state_pitch.
  static constexpr size_t values_at(size_t before_image_rows) {
    return (sizeof(BeforeImage) + before_image_rows * sizeof(uint32_t) + 63) / 64 * 64;
  }
  static constexpr uint64_t kMost = 64;           // before-images of a table, and rows in one
  static constexpr uint32_t kNoRow = UINT32_MAX;  // as a slot
};

struct LedgerTable {
  // 0: the table was dropped, or another record is valid since it got another kind of optimizer.
  std::atomic<uint64_t> handle;
  std::atomic<uint64_t>
      lost;  // first step with a committed update that was given up unwritten; kNoStep: none
  std::atomic<uint64_t> first;  // first update that is not wholly written
  std::atomic<uint64_t> slots;  // handed out so far, of a hashed table
  uint64_t before_images;       // shared address of the first
  uint64_t before_image_bytes, before_image_count, before_image_rows;
  arith::InitSpec init;  // of rows that were never written
};

// --- The writing process -------------------------------------------------------------------------

class Ledger;

// Test hook: kills the process at the n-th later point where the ledger or rows change (0: off). In
// the middle of a write, the rows have lost their old bytes.
void ledger_test_kill_at(int64_t n);
extern std::atomic<int64_t> g_ledger_points;
void ledger_pass_point(const device::RowsRef* rows, const uint32_t* slots, size_t n);
inline void ledger_point(const device::RowsRef* rows = nullptr, const uint32_t* slots = nullptr,
                         size_t n = 0) {
  if (g_ledger_points.load(std::memory_order_relaxed) != 0) ledger_pass_point(rows, slots, n);
}

// The ledger of one table, whose writes it observes. Thread-safe except for add().
class TableLedger final : public HeapObject,
                          public RowWatcher,
                          public std::enable_shared_from_this<TableLedger> {
 public:
  uint64_t shm_address() const;
  // From now on it observes each write of the rows; `former`, of the same rows, observes none.
  void watch(Rows& rows, TableLedger* former = nullptr);
  // When all is written, before the table is dropped or gets another ledger.
  void forget() noexcept;

  // Lists a committed update until the last reference to *record is gone. If a failure has left it
  // not wholly written by then, the table's record has its step as lost. `bounds`: of its chunks.
  // Null: its rows, which have a list by now, are written in any order.
  Status add(const StepUpdate& update, const Vector<uint64_t>* bounds,
             std::shared_ptr<UpdateRecord>* record);

  uint32_t before(const RowWrite& write, device::Undo* undo) noexcept override;
  void after(const RowWrite& write, uint32_t before_image) noexcept override;
  // Its record is of the former state: a change of the kind makes another record first.
  void new_state() noexcept override {}
  size_t most_outside() const override { return rows_; }

 private:
  friend class Ledger;
  struct Record;
  // What this process knows of a before-image: whether a thread has it. For tests, also what
  // kernels would write.
  struct Taken {
    std::atomic<bool> busy{false};
    uint64_t* progress = nullptr;
    uint8_t* marks = nullptr;
  };
  static constexpr uint32_t kNoBeforeImage = UINT32_MAX;
  TableLedger() = default;
  uint32_t take();
  void begin_outside(const RowWrite& write, BeforeImage& before_image);
  void begin_update(const RowWrite& write, const Record& record, uint32_t before_image,
                    device::Undo* undo);
  static void tell(const device::Undo& undo, const device::RowsRef& of, uint32_t slot, size_t i,
                   bool written);
  BeforeImage& at(uint32_t i) const;
  static uint32_t* slots_of(BeforeImage& before_image) {
    return reinterpret_cast<uint32_t*>(&before_image + 1);
  }
  device::Element* values_of(BeforeImage& before_image) const {
    return reinterpret_cast<device::Element*>(reinterpret_cast<char*>(&before_image) +
                                              BeforeImage::values_at(rows_));
  }
  void remove(Record* record) noexcept;

  std::shared_ptr<Ledger> ledger_;
  Buffer memory_, before_images_;
  LedgerTable* table_ = nullptr;
  uint32_t rows_ = 0, count_ = 0;  // rows of a before-image; before-images
  Vector<Taken> taken_;            // by before-image
  Mutex mu_;
  Vector<Record*> records_ GUARDED_BY(mu_);  // in ascending order of steps
};

class Ledger : public HeapObject, public std::enable_shared_from_this<Ledger> {
 public:
  // All memory is from `pool`, which outlives it and is cut from `arena`.
  static Status open(BufferPool& pool, const Arena& arena, uint64_t committed,
                     std::shared_ptr<Ledger>* out);
  uint64_t shm_address() const { return arena_.shm_address(root_); }
  void commit(uint64_t step) {
    ledger_point();
    root_->committed.store(step, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // no row is written before
    ledger_point();
  }
  // A table has another record, for another kind of optimizer: other processes must map its state
  // anew.
  void another_kind() noexcept { root_->kinds.fetch_add(1, std::memory_order_release); }
  // The engine was shut down.
  void end() noexcept { root_->ended.store(1, std::memory_order_release); }
  // Adds the record of a table with this layout.
  Status add_table(uint64_t handle, const RowLayout& layout, const arith::InitSpec& init,
                   std::shared_ptr<TableLedger>* out);
  // The shared address, in the arena or in staging memory; kNoShmAddress for other memory.
  uint64_t find(const void* p) const;

 private:
  friend class TableLedger;
  Ledger(BufferPool& pool, const Arena& arena) : pool_(pool), arena_(arena) {}
  uint64_t shm_address_of(const void* p) const {
    return arena_.holds(p) ? arena_.shm_address(p) : kNoShmAddress;
  }

  BufferPool& pool_;
  const Arena& arena_;
  Buffer memory_;
  LedgerRoot* root_ = nullptr;
};

}  // namespace frugal
