// Which rows of a table differ from their newest records, and the table's part of a snapshot: each
// of these rows is copied once, as it was after the snapshot step.
//
// It watches the writers of rows. Three bits a row say what a checkpoint has to do with it
// (docs/checkpoints.md, "The snapshot"). While a snapshot is being saved, a thread that is about to
// write a row of it copies the row before. The checkpoint's thread saves the rest in the order of
// slots. A thread that sets a row's saved bit copies the row, and others wait for the copy of a row
// that the checkpoint's thread has taken.
//
// Both bits are set only for rows that exist: a deletion clears them. A row that a later step
// creates gets the changed bit alone. So what is to be saved was there after the snapshot step.
#pragma once
#include <atomic>
#include <cstdint>

#include "base/sync.h"
#include "storage/rows.h"

namespace frugal {

class RowTracker final : public HeapObject, public RowWatcher {
 public:
  // What receives the copies. No call waits.
  class Sink {
   public:
    // Copies these distinct rows, which no thread writes meanwhile. At most kMostRows.
    virtual void save(const uint32_t* slots, size_t n) noexcept = 0;
    // The row is saved, if it must be, and is about to be deleted.
    virtual void deleted(uint32_t slot) noexcept = 0;
    virtual Status expect_deletions(size_t n) = 0;
    // Room for rows [first, first + n).
    virtual Status expect(uint64_t first, uint64_t n) = 0;
    // All rows have new state.
    virtual void new_state() noexcept = 0;

   protected:
    ~Sink() = default;
  };
  static constexpr size_t kMostRows = 256;

  // Tracks from now on. Rows that exist count as changed, unless `unchanged`. Between steps only:
  // there is no uncommitted row, and no thread writes.
  Status open(Rows& rows, Sink* sink, MemoryBudget* budget, bool unchanged);
  // No longer. Between steps only.
  void close();

  // The snapshot of all steps before `next_step`, which is taken when these are committed and no
  // later one is. Changed rows are to be saved from now on.
  void begin(uint64_t next_step) noexcept;
  // Saves some rows. Requires that all updates of steps before `next_step` are written. False:
  // all rows are taken. One thread calls it.
  bool save_some() noexcept;
  // All rows are taken. Returns when all are saved; writers need not look any more.
  void stop_saving() noexcept;
  // Ends a snapshot. `kept`: all rows are saved, in a checkpoint that counts. Otherwise they are
  // changed again.
  void end(bool kept) noexcept;

  // Marks slots from `first` on, a bit each. All are in one word. Requires the rows' lock.
  void mark_changed(uint64_t first, uint64_t rows = 1) noexcept;

  struct Counts {  // of rows, since it tracks
    std::atomic<uint64_t> before_write{0}, in_order{0}, before_delete{0}, late{0}, awaited{0};
  };
  const Counts& counts() const { return counts_; }

  uint32_t before(const RowWrite& write, device::Undo* undo) noexcept override;
  void after(const RowWrite&, uint32_t) noexcept override {}
  void new_state() noexcept override { sink_->new_state(); }
  Status expect(uint64_t first, uint64_t n) override;
  void created(uint32_t slot) noexcept override;
  void deleting(uint32_t slot) noexcept override;
  Status expect_deletions(size_t n) override { return sink_->expect_deletions(n); }

 private:
  using Word = std::atomic<uint64_t>;
  // A bit a row. Memory begins as zeros.
  class Bits {
   public:
    Status reserve(uint64_t rows, MemoryBudget* budget) {
      return words_.reserve((rows + 63) / 64, sizeof(Word), false, budget);
    }
    Status expect(uint64_t first, uint64_t n) {
      return words_.ensure(first / 64, (first + n - 1) / 64 - first / 64 + 1);
    }
    Word& word(uint64_t slot) const { return reinterpret_cast<Word*>(words_.base())[slot / 64]; }
    bool has(uint64_t slot) const {
      return word(slot).load(std::memory_order_relaxed) >> slot % 64 & 1;
    }
    // Whether the memory of the slot's bit is there.
    bool committed(uint64_t slot) const { return words_.committed(slot / 64); }

   private:
    SlabArray words_;
  };
  // What a thread must know of the snapshot. A thread uses one epoch for a list of rows.
  struct Epoch {
    uint64_t next_step = 0;  // updates of steps before it belong to the snapshot; 0: none does
    uint32_t changed = 0;    // index of the bits that later changes set
    bool saving = false;     // rows to be saved are copied before they change
    std::atomic<uint32_t> users{0};
  };
  class UseEpoch;
  // Slots that the checkpoint's thread has taken, and copies.
  struct Taken {
    std::atomic<uint64_t> first{UINT64_MAX}, last{0};
  };

  void publish(uint64_t next_step, uint32_t changed, bool saving) noexcept;
  void await_users(const Epoch* except) noexcept;
  template <class Slot>
  void mark(const Bits& bits, size_t n, Slot slot) noexcept;
  template <class Slot>
  void save(const Bits& bits, size_t n, Slot slot, std::atomic<uint64_t>& count) noexcept;
  bool is_taken(uint32_t slot) const;

  Rows* rows_ = nullptr;
  Sink* sink_ = nullptr;
  Bits bits_[2];  // changed rows, and those to be saved: they change places at a snapshot
  Bits saved_;
  std::atomic<uint64_t> end_{0};  // slots that have bits are below it
  Epoch epochs_[4];
  std::atomic<Epoch*> epoch_{&epochs_[0]};
  Taken taken_;
  uint64_t at_ = 0;  // save_some() goes on from this slot
  Counts counts_;
};

}  // namespace frugal
