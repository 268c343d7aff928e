// The parameter files of a table in a folder: which record is each row's newest, how many records
// of a file are old, and the files that a checkpoint is writing.
//
// Threads: save() and deleted() are called by any thread, which waits for no disk. The other
// functions are called by the thread that writes checkpoints, if not stated otherwise.
#pragma once
#include <atomic>
#include <memory>

#include "checkpoint/row_tracker.h"
#include "format/manifest.h"
#include "format/parameter_file.h"

namespace frugal {

// A packed file and record for each slot.
class Directory {
 public:
  static constexpr uint32_t kNone = 0;
  struct Place {
    uint32_t file = kNone;  // counted from 1
    uint32_t record = 0;
  };
  Status reserve(uint64_t rows, MemoryBudget* budget) {
    return packed_.reserve(rows, kBytes, false, budget);
  }
  Status expect(uint64_t first, uint64_t n) { return packed_.ensure(first, n); }
  bool committed(uint64_t slot) const { return packed_.committed(slot); }
  Place at(uint64_t slot) const;
  void set(uint64_t slot, Place place);
  void prefetch(uint64_t slot) const { __builtin_prefetch(packed_.base() + slot * kBytes, 1, 2); }
  // Bits of those of `n` slots, at most 64, whose file has a flag. `flags`: of each file.
  uint64_t flagged(uint64_t first, uint64_t n, const char* flags) const;

 private:
  static constexpr size_t kBytes = 5;  // 20 bits each
  SlabArray packed_;
};

// What the checkpoints of a folder share.
struct FolderWriter {
  std::shared_ptr<Folder> folder;
  IoQueue* queue = nullptr;
  RecordBuffers* buffers = nullptr;
  bool direct = false;
  std::atomic<uint64_t> next_file{1};
};

class TableFiles final : public HeapObject, public RowTracker::Sink {
 public:
  // `number`: the table's in the folder. `optimizer`: the kind.
  Status open(Rows& rows, RowTracker& tracker, uint64_t number, int32_t optimizer, FolderWriter* to,
              MemoryBudget* budget);
  uint64_t number() const { return number_; }
  // The rows get another kind of state: before new_state(). No checkpoint is being written.
  void change_kind(int32_t optimizer) { optimizer_ = optimizer; }

  // A checkpoint of this sequence number begins: rows are saved for it from now on.
  void begin(uint64_t sequence) noexcept;
  // Gives back memory that has been written. Returns the first failure of any save.
  Status collect();
  // Ends files that are full.
  Status finish_full();
  // All rows are saved. Ends all files, syncs them, and lists what the checkpoint consists of.
  Status finish(ManifestTable* out);
  // The checkpoint counts; or it failed, and its files go.
  void end(bool kept) noexcept;
  // Marks the rows of files that are half old as changed, so that the next checkpoint needs none of
  // these files.
  void clean() noexcept;

  // --- Restoring, before any thread uses the table
  // Adds a file; returns its number for set().
  Status add_file(const ParameterFileInfo& info, uint32_t* file);
  // The newest records of these rows are `first` and those after it. Any threads, of distinct rows.
  void set(const uint32_t* slots, size_t n, Directory::Place first);

  RowFormat format() const;  // of the rows as they are now

  // --- RowTracker::Sink
  void save(const uint32_t* slots, size_t n) noexcept override;
  void deleted(uint32_t slot) noexcept override;
  Status expect(uint64_t first, uint64_t n) override { return directory_.expect(first, n); }
  Status expect_deletions(size_t n) override;
  void new_state() noexcept override;

 private:
  struct FileState {
    ParameterFileInfo info;
    uint64_t old = 0;      // records that are no row's newest
    bool listed = false;   // by the newest checkpoint, or written for the next
    bool needed = false;   // by the checkpoint
    bool cleaned = false;  // its rows were marked once
  };
  // A file that the checkpoint writes.
  struct Writing : HeapObject {
    ParameterFileWriter writer;
    uint32_t file = 0;
    std::atomic<uint32_t> unsealed{0};
    bool finished = false;
  };
  struct Deletion {
    uint64_t key;
    uint32_t file;  // where its newest record was
  };
  Status open_writer(std::unique_ptr<Writing>* out);
  void prepare() noexcept;
  Status next_writer() REQUIRES(mu_);
  Status new_file(uint32_t* file) REQUIRES(mu_);
  void now_old(uint32_t file) REQUIRES(mu_);
  void failed() noexcept REQUIRES(mu_);
  Status add_deletions();
  Status finish_one(Writing& w);

  Rows* rows_ = nullptr;
  RowTracker* tracker_ = nullptr;
  int32_t optimizer_ = 0;
  uint64_t number_ = 0;
  FolderWriter* to_ = nullptr;
  uint64_t sequence_ = 0;
  mutable Mutex mu_;
  Directory directory_;  // a row's place is changed by the thread that has taken it, with mu_ held
  Vector<FileState> files_ GUARDED_BY(mu_);                   // [0] is none
  Vector<char> cleaning_ GUARDED_BY(mu_);                     // flags of clean(), of each file
  Vector<std::unique_ptr<Writing>> writing_ GUARDED_BY(mu_);  // the last one takes records
  std::unique_ptr<Writing> next_ GUARDED_BY(mu_);             // the next one; or null
  List<Deletion> deleted_ GUARDED_BY(mu_);                    // since the last snapshot
  List<Deletion> deletions_ GUARDED_BY(mu_);                  // of the checkpoint
  List<Deletion> spare_ GUARDED_BY(mu_);
  // A checkpoint failed that had saved rows anew: they have no place, and an older file may have
  // a record of them.
  bool lost_places_ GUARDED_BY(mu_) = false;
  CallError error_ GUARDED_BY(mu_);  // of the first save that failed
};

}  // namespace frugal
