// Reads the rows of a checkpoint into its tables. Several threads each read a piece of a file,
// check it, and put its rows, so the disk always has reads to do.
//
// A later record of a key replaces an earlier one, so a table is loaded in *passes*: for each
// checkpoint that wrote some of its files, the deletions in them, and then the records. A pass
// begins when the table's former one has ended. The entries of a pass have distinct keys, so its
// pieces are read in any order, and so are different tables. At last the rows of a dense table that
// have no record become new rows.
#pragma once
#include <atomic>

#include "base/condition.h"
#include "engine/declarations.h"
#include "engine/table.h"
#include "format/blocks.h"

namespace frugal {

class CheckpointLoader {
 public:
  // `own`: the engine writes this folder, so that its next checkpoint can do without these records.
  CheckpointLoader(const Folder& folder, Declarations& declarations, bool own)
      : folder_(folder), declarations_(declarations), own_(own) {}
  CheckpointLoader(const CheckpointLoader&) = delete;

  // A table that was created `blank`, and what the checkpoint has of it. No other thread uses the
  // table until load() has returned.
  Status add(Table& table, const ManifestTable& manifest);
  // Loads all of these tables. After a failure their rows are any.
  Status load();

 private:
  // A file, which is open while threads read pieces of it.
  struct Source : HeapObject {
    const ManifestFile* listed = nullptr;
    uint32_t number = 0;  // in the directory of records
    Mutex mu;
    ParameterFile file GUARDED_BY(mu);
    uint32_t users GUARDED_BY(mu) = 0;
  };
  enum class Pass { kDeletions, kRecords, kNewRows };
  struct Loaded : HeapObject {
    Loaded(Table& t, const ManifestTable& m) : table(t), manifest(m) {}
    bool blank() const { return !has_record.empty(); }
    Table& table;
    const ManifestTable& manifest;
    // Of an eager dense table: whether kMemoryRows rows each have memory, and a bit for each row
    // that has a record. The threads take memory as they need it, since clearing it takes as long
    // as reading.
    Vector<std::atomic<bool>> has_memory;
    Vector<std::atomic<uint64_t>> has_record;
    Mutex committing;
    Vector<std::unique_ptr<Source>> sources;  // in the order of their checkpoints
    Mutex erasing;
    // Guarded by the loader's mutex: the pass, and where its next piece begins.
    Pass pass = Pass::kRecords;
    size_t from = 0, to = 0;  // its files
    size_t at = 0;
    uint64_t next = 0;
    uint32_t running = 0;  // pieces that threads read
  };
  struct Piece {
    Loaded* of;
    Pass pass;
    Source* source;         // null: new rows
    uint32_t first, count;  // entries of the file, or rows
  };
  class Use;

  static constexpr size_t kPieceBytes = size_t{4} << 20;  // of records
  static constexpr uint32_t kColumnBlocks = 128;          // of a piece
  static constexpr uint32_t kNewRows = 1u << 16;          // of a piece
  static constexpr uint64_t kMemoryRows = 4096;
  static constexpr uint32_t kMostThreads = 8;
  static_assert(kMostThreads * in_huge_pages(kPieceBytes + (kColumnBlocks + 2) * kFileBlock) <=
                size_t{64} << 20);

  static uint32_t piece_entries(const ManifestTable& table);
  bool next_pass(Loaded& l) REQUIRES(mu_);
  bool take(Loaded& l, Piece* piece) REQUIRES(mu_);
  bool take(Piece* piece);
  void ended(const Piece& piece, Status status) noexcept;
  void work(char* memory) noexcept;
  Status read(const Piece& piece, char* memory);
  static Status commit(Loaded& l, uint64_t first, uint64_t n);
  static Status add_new_rows(const Piece& piece);
  Status erase(const Piece& piece, const ParameterFile& file, uint64_t at,
               const ColumnEntry* entries, size_t n);
  Status put(const Piece& piece, const ParameterFile& file, const char* records, uint64_t at,
             const ColumnEntry* entries, size_t n);

  const Folder& folder_;
  Declarations& declarations_;
  const bool own_;
  Vector<std::unique_ptr<Loaded>> tables_;
  uint64_t pieces_ = 0;                 // of all tables
  size_t record_memory_ = kPieceBytes;  // for the records of a piece, but for two blocks
  Mutex mu_;
  Condition changed_;                   // ended_
  uint64_t ended_ GUARDED_BY(mu_) = 0;  // passes, and pieces that failed
  size_t first_ GUARDED_BY(mu_) = 0;    // tables before it have nothing left to take
  CallError error_ GUARDED_BY(mu_);     // the first failure
};

}  // namespace frugal
