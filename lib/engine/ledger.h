// The ledger: what a process that has mapped the tables needs to read them out, as of the last
// committed step, when the process that writes them has been killed between any two instructions.
//
// It lies in the arena, in shared addresses of it (base/region_publisher.h). The root tells the
// last committed step; the record of a table has the list of its committed updates that are not
// wholly written: hyper-parameters, lists of rows, shared addresses of sums, and which rows are
// written. Who writes a row copies it first into an image of the table, and names it there: a row
// in the middle of its write is found whole in an image. An update's rows have one image after the
// other in the same memory, which stays in the nearest cache, and the copy is made where the row is
// read anyway, by the kernels (device::Undo). So rows + images + unwritten updates are the tables
// (process/readout.h).
//
// A killed thread has done what its program says up to some instruction, and nothing behind it: the
// order of stores in the program is all that counts. An update is in its list before the step is
// told as committed, and that before the first row is written; a row's mark follows its last byte;
// an update leaves the list when all rows are written, and its memory is given back afterwards.
//
// Rows that an uncommitted step has created bear its mark in their flags (storage/slot_map.h); a
// committed step's marks are taken away before the next one commits, so mark_of(committed) tells
// nothing but a row that is there.
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

// --- As it lies in memory ------------------------------------------------------------------------

struct LedgerRoot {
  static constexpr uint64_t kMagic = 0x3267646c67757246;  // "Frugldg2"
  uint64_t magic;
  std::atomic<uint64_t> committed;  // step; kNoStep: none
  std::atomic<uint64_t> ended;      // 1: nobody writes any more, although the process may live
  std::atomic<uint64_t> kinds;      // how often a table was given another kind of optimizer
};

struct LedgerTerms {  // of one rank in an update
  uint64_t rank;
  uint64_t slots;       // shared address of uint32_t[rows], ascending
  uint64_t rows;
  // shared address, one every `stride` floats; or kNoShmAddress: nobody else can see them
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
  // Which rows are written. In chunks of slots: those of chunk c, which has [bounds[c], bounds[c +
  // 1]), that are below its progress. Or, without chunks, those that are marked; i is the row of
  // the merged list.
  uint64_t chunks;
  uint64_t bounds, progress;  // shared addresses of uint64_t[chunks + 1], uint64_t[kApart * chunks]
  uint64_t marks, rows;       // shared address of uint8_t[rows]
  uint64_t ranks;             // so many LedgerTerms follow, ranks ascending
};

struct BeforeImage {
  static constexpr uint64_t kOutside = UINT64_MAX - 1;  // rows are written outside of steps
  std::atomic<uint64_t>
      // shared address of the one that is being written; kOutside; kNoShmAddress: the image is free
      update;
  uint64_t rows;                 // 1 of an update
  // uint32_t slots[before_image_rows]; from values_at() values, one every value_pitch, and then
  // state, one every state_pitch
  static constexpr size_t values_at(size_t before_image_rows) {
    return (sizeof(BeforeImage) + before_image_rows * sizeof(uint32_t) + 63) / 64 * 64;
  }
  static constexpr uint64_t kMost = 64;  // images of a table, and rows in one
  static constexpr uint32_t kNoRow = UINT32_MAX;  // as a slot
};

struct LedgerTable {
  // 0: the table was dropped, or it was given another kind of optimizer, for which there is another
  // record.
  std::atomic<uint64_t> handle;
  std::atomic<uint64_t>
      lost;  // the first step of which a committed update was given up unwritten; kNoStep: none
  std::atomic<uint64_t> first;  // update that is not wholly written
  std::atomic<uint64_t> slots;  // handed out so far, of a hashed table
  uint64_t before_images;       // shared address of the first
  uint64_t before_image_bytes, before_image_count, before_image_rows;
  arith::InitSpec init;         // of rows that nobody has touched
};

// --- Who writes it -------------------------------------------------------------------------------

class Ledger;

// Test hook: the process is killed at the n-th point from now on where the ledger or rows change
// (0: off). Where that is the middle of a write, the rows have lost what they were.
void ledger_test_kill_at(int64_t n);
extern std::atomic<int64_t> g_ledger_points;
void ledger_pass_point(const device::RowsRef* rows, const uint32_t* slots, size_t n);
inline void ledger_point(const device::RowsRef* rows = nullptr, const uint32_t* slots = nullptr,
                         size_t n = 0) {
  if (g_ledger_points.load(std::memory_order_relaxed) != 0) ledger_pass_point(rows, slots, n);
}

// Of one table, whose writes it watches. Thread-safe but for add().
class TableLedger final : public HeapObject,
                          public RowWatcher,
                          public std::enable_shared_from_this<TableLedger> {
 public:
  uint64_t shm_address() const;
  // From now on it hears of each write of the rows; `former`, of the same rows, hears of none.
  void watch(Rows& rows, TableLedger* former = nullptr);
  // The table is about to be dropped, or is another's to watch, when all is written.
  void forget() noexcept;

  // A committed update: until the last reference to *record is gone it is in the list. If it is not
  // wholly written then, because something has failed, that is told in its place. `bounds` of its
  // chunks, or null: its rows, of which there is a list by now, are written in any order.
  Status add(const StepUpdate& update, const Vector<uint64_t>* bounds,
             std::shared_ptr<UpdateRecord>* record);

  uint32_t before(const RowWrite& write, device::Undo* undo) noexcept override;
  void after(const RowWrite& write, uint32_t before_image) noexcept override;
  // Its record is of the former state. Who gives the table another kind has another record ready.
  void new_state() noexcept override {}
  size_t most_outside() const override { return rows_; }

 private:
  friend class Ledger;
  struct Record;
  // What this process knows of an image: whether a thread has it, and, for tests, what it tells in
  // the place of the kernels.
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
  uint32_t rows_ = 0, count_ = 0;           // of an image, of images
  Vector<Taken> taken_;                     // by image
  Mutex mu_;
  Vector<Record*> records_ GUARDED_BY(mu_);  // ascending steps
};

class Ledger : public HeapObject, public std::enable_shared_from_this<Ledger> {
 public:
  // All memory is `pool`'s, which lives longer and is cut from `arena`.
  static Status open(BufferPool& pool, const Arena& arena, uint64_t committed,
                     std::shared_ptr<Ledger>* out);
  uint64_t shm_address() const { return arena_.shm_address(root_); }
  void commit(uint64_t step) {
    ledger_point();
    root_->committed.store(step, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // no row is written before
    ledger_point();
  }
  // A table has another record, of another kind of optimizer: who has mapped its state is to map it
  // anew.
  void another_kind() noexcept { root_->kinds.fetch_add(1, std::memory_order_release); }
  // The engine was shut down.
  void end() noexcept { root_->ended.store(1, std::memory_order_release); }
  // A table's record, of rows with this layout.
  Status add_table(uint64_t handle, const RowLayout& layout, const arith::InitSpec& init,
                   std::shared_ptr<TableLedger>* out);
  // Where others see it, in the arena or in staging memory; or kNoShmAddress.
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
