// Reads the rows of a checkpoint into its tables. Several threads each read a piece of a file,
// check it, and put its rows, so the disk always has reads to do.
//
// A later record of a key replaces an earlier one, so a table's files are read in *stages*: for
// each checkpoint that wrote some of them, its deletions, and then its records. A table's stage
// begins when the one before has ended. The entries of a stage have distinct keys, so its pieces
// are read in any order, and so are different tables.
#pragma once
#include <atomic>

#include "base/condition.h"
#include "engine/table.h"
#include "format/blocks.h"

namespace frugal {

class CheckpointLoader {
 public:
  // `own`: the engine writes this folder, so that its next checkpoint can do without these records.
  CheckpointLoader(const Folder& folder, bool own) : folder_(folder), own_(own) {}
  CheckpointLoader(const CheckpointLoader&) = delete;

  // A table without rows, and what the checkpoint has of it. No other thread uses the table until
  // load() has returned.
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
  struct Loaded : HeapObject {
    Loaded(Table& t, const ManifestTable& m) : table(t), manifest(m) {}
    Table& table;
    const ManifestTable& manifest;
    Vector<std::unique_ptr<Source>> sources;  // in the order of their checkpoints
    Mutex erasing;
    // Guarded by the loader's mutex: the stage, and where its next piece begins.
    size_t from = 0, to = 0;
    bool deletions = false;
    size_t at = 0;
    uint64_t next = 0;
    uint32_t running = 0;  // pieces that threads read
  };
  struct Piece {
    Loaded* of;
    Source* source;
    bool deletions;
    uint32_t first, count;  // entries
  };
  // What a thread reads into.
  struct Memory {
    explicit Memory(size_t bytes) : columns(kColumnBlocks * kFileBlock), records(bytes) {}
    Blocks columns, records;
  };
  class Use;

  static constexpr size_t kPieceBytes = size_t{4} << 20;  // of records
  static constexpr uint32_t kColumnBlocks = 128;          // of a piece
  static constexpr uint32_t kMostThreads = 8;
  static_assert(kMostThreads * (kPieceBytes + kColumnBlocks * kFileBlock + 2 * kFileBlock) <=
                size_t{64} << 20);

  static uint32_t piece_entries(const ManifestTable& table);
  bool next_stage(Loaded& l) REQUIRES(mu_);
  bool take(Loaded& l, Piece* piece) REQUIRES(mu_);
  bool take(Piece* piece);
  void ended(const Piece& piece, Status status) noexcept;
  void work(Memory& memory) noexcept;
  Status read(const Piece& piece, Memory& memory);
  Status erase(const Piece& piece, const ParameterFile& file, uint64_t at,
               const ColumnEntry* entries, size_t n);
  Status put(const Piece& piece, const ParameterFile& file, const char* records, uint64_t at,
             const ColumnEntry* entries, size_t n);

  const Folder& folder_;
  const bool own_;
  Vector<std::unique_ptr<Loaded>> tables_;
  uint64_t pieces_ = 0;      // of all tables
  size_t record_bytes_ = 0;  // the most
  Mutex mu_;
  Condition changed_;                   // ended_
  uint64_t ended_ GUARDED_BY(mu_) = 0;  // stages, and pieces that failed
  size_t first_ GUARDED_BY(mu_) = 0;    // tables before it have nothing left to take
  CallError error_ GUARDED_BY(mu_);     // the first failure
};

}  // namespace frugal
