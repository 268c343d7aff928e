#include "engine/checkpoint_loader.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/thread.h"

namespace frugal {
namespace {

constexpr uint64_t kEntries = ColumnBlock::kEntries;

}  // namespace

// A file that is open. The first thread that uses it opens it, and the last one closes it: a
// checkpoint may have more files than a process may open.
class CheckpointLoader::Use {
 public:
  Use(const CheckpointLoader& loader, const Piece& piece) : loader_(loader), piece_(piece) {}
  ~Use() {
    Lock lock(piece_.source->mu);
    if (opened_ && --piece_.source->users == 0) piece_.source->file = {};
  }
  Use(const Use&) = delete;
  Status open(ParameterFile** file) {
    Source& s = *piece_.source;
    Lock lock(s.mu);
    if (s.users == 0) {
      ParameterFile made;
      const ParameterFileInfo& info = s.listed->info;
      FRUGAL_TRY(ParameterFile::open(loader_.folder_, info.number, true, &made));
      FRUGAL_TRY(made.expect(info));
      if (!(made.format() == piece_.of->manifest.format))
        return made.damaged(offsetof(ParameterFileHeader, format),
                            "its rows are not those of the table");
      s.file = std::move(made);
    }
    ++s.users;
    opened_ = true;
    *file = &s.file;  // any threads read it
    return FRUGAL_OK;
  }

 private:
  const CheckpointLoader& loader_;
  const Piece& piece_;
  bool opened_ = false;
};

Status CheckpointLoader::add(Table& table, const ManifestTable& manifest) {
  tables_.reserve(tables_.size() + 1);
  auto made = std::make_unique<Loaded>(table, manifest);
  for (const ManifestFile& f : manifest.files) {
    made->sources.push_back(std::make_unique<Source>());
    Source& s = *made->sources.back();
    s.listed = &f;
    if (own_) FRUGAL_TRY(table.tracked->files.add_file(f.info, &s.number));
    pieces_ += 1 + f.info.entries / piece_entries(manifest);
  }
  std::stable_sort(made->sources.begin(), made->sources.end(), [](const auto& a, const auto& b) {
    return a->listed->info.sequence < b->listed->info.sequence;
  });
  record_memory_ = std::max(record_memory_, manifest.format.record_bytes());
  Rows& rows = table.rows;
  FRUGAL_TRY(rows.expect_keys(manifest.live_rows));
  if (!rows.any_key() && !rows.lazy()) {
    made->has_memory = Vector<std::atomic<bool>>(rows.capacity() / kMemoryRows + 1);
    made->has_record = Vector<std::atomic<uint64_t>>((rows.capacity() + 63) / 64);
    pieces_ += 1 + rows.capacity() / kNewRows;
  }
  tables_.push_back(std::move(made));
  return FRUGAL_OK;
}

Status CheckpointLoader::load() {
  // Threads wait for the disk most of the time.
  const auto n = static_cast<uint32_t>(
      std::min<uint64_t>(pieces_, std::clamp(2 * cpu_count(), 2u, kMostThreads)));
  if (n == 0) return FRUGAL_OK;
  List<PieceMemory> memory(n);
  for (PieceMemory& m : memory)
    FRUGAL_TRY(m.open(record_memory_ + (kColumnBlocks + 2) * kFileBlock));
  Vector<Thread> threads;
  threads.reserve(n - 1);
  Status status = FRUGAL_OK;
  try {
    for (auto m = std::next(memory.begin()); m != memory.end(); ++m)
      threads.push_back(quiet_thread([this, m] { work(m->at()); }));
  } catch (const std::system_error& e) {
    status = no_thread("threads that read a checkpoint", e.code().value());
  } catch (const std::bad_alloc&) {
    status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for threads that read a checkpoint");
  }
  if (status != FRUGAL_OK) {
    Lock lock(mu_);
    error_ = recorded_error();
  }
  work(memory.front().at());
  for (Thread& t : threads) t.join();
  Lock lock(mu_);
  return error_.status ? fail_as(error_) : FRUGAL_OK;
}

// --- Pieces --------------------------------------------------------------------------------------

uint32_t CheckpointLoader::piece_entries(const ManifestTable& table) {
  const uint64_t most = kPieceBytes / table.format.record_bytes(), blocks = most / kEntries;
  // Where a piece has whole blocks of the column, no block is read twice.
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(blocks ? blocks * kEntries : most, 1, kColumnBlocks * kEntries));
}

// The table's next pass begins. False: it was the last one.
bool CheckpointLoader::next_pass(Loaded& l) {
  const size_t end = l.sources.size();
  if (l.pass == Pass::kDeletions) {
    declarations_.recount_unknown(l.table);  // other keys may have the slots of deleted rows
    l.pass = Pass::kRecords;
  } else if (l.to < end) {
    const auto sequence = [&](size_t i) { return l.sources[i]->listed->info.sequence; };
    for (l.from = l.to; l.to < end && sequence(l.to) == sequence(l.from);) ++l.to;
    l.pass = Pass::kDeletions;
  } else if (l.pass == Pass::kRecords && l.blank()) {
    l.pass = Pass::kNewRows;
  } else {
    return false;
  }
  l.at = l.from;
  l.next = 0;
  return true;
}

// The next piece of the table's pass, if any is left.
bool CheckpointLoader::take(Loaded& l, Piece* piece) {
  if (l.pass == Pass::kNewRows) {
    const uint64_t rows = l.table.rows.capacity();
    if (l.next >= rows) return false;
    *piece = {&l, l.pass, nullptr, static_cast<uint32_t>(l.next),
              static_cast<uint32_t>(std::min<uint64_t>(kNewRows, rows - l.next))};
    l.next += kNewRows;
    ++l.running;
    return true;
  }
  const bool deletions = l.pass == Pass::kDeletions;
  for (; l.at < l.to; ++l.at, l.next = 0) {
    Source& s = *l.sources[l.at];
    const ParameterFileInfo& info = s.listed->info;
    const uint64_t at = l.next + (deletions ? info.records : 0);
    const uint64_t end = deletions ? info.entries : info.records;
    // A file without entries has a piece of none: its header is checked.
    if (at >= end && (l.next > 0 || deletions || info.entries > 0)) continue;
    uint64_t most = deletions ? kColumnBlocks * kEntries : piece_entries(l.manifest);
    if (most > kEntries) most -= at % kEntries;
    const uint64_t count = std::min(most, end - at);
    *piece = {&l, l.pass, &s, static_cast<uint32_t>(at), static_cast<uint32_t>(count)};
    l.next += std::max<uint64_t>(count, 1);
    ++l.running;
    return true;
  }
  return false;
}

// Waits for the end of passes. False: no piece will be left for this thread.
bool CheckpointLoader::take(Piece* piece) {
  UniqueLock lock(mu_);
  for (;;) {
    bool any = false;
    for (size_t i = first_; i < tables_.size() && error_.status == FRUGAL_OK; ++i) {
      Loaded& l = *tables_[i];
      do {
        if (take(l, piece)) return true;
      } while (l.running == 0 && next_pass(l));
      if (l.running > 0)
        any = true;
      else if (i == first_)
        ++first_;
    }
    if (!any) return false;
    changed_.wait(lock, [&, ended = ended_]() REQUIRES(mu_) { return ended_ != ended; });
  }
}

void CheckpointLoader::ended(const Piece& piece, Status status) noexcept {
  Lock lock(mu_);
  if (status != FRUGAL_OK && error_.status == FRUGAL_OK) error_ = recorded_error();
  if (--piece.of->running > 0 && status == FRUGAL_OK) return;
  ++ended_;
  changed_.notify_all();
}

void CheckpointLoader::work(char* memory) noexcept {
  for (Piece piece; take(&piece);) {
    Status status;
    try {
      status = read(piece, memory);
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the rows of a checkpoint");
    }
    ended(piece, status);
  }
}

// --- Rows ----------------------------------------------------------------------------------------

Status CheckpointLoader::read(const Piece& piece, char* memory) {
  if (piece.pass == Pass::kNewRows) return add_new_rows(piece);
  Use use(*this, piece);
  ParameterFile* file;
  FRUGAL_TRY(use.open(&file));
  if (piece.count == 0) return FRUGAL_OK;
  const uint32_t from = piece.first, to = piece.first + piece.count;
  const auto first = static_cast<uint32_t>(from / kEntries);
  const auto blocks = static_cast<uint32_t>((to - 1) / kEntries + 1 - first);
  char* const records = memory;
  auto* const column = reinterpret_cast<ColumnBlock*>(memory + record_memory_ + 2 * kFileBlock);
  const IoRequest entries = file->column_request(first, blocks, column);
  FRUGAL_TRY(file->file()->read(entries.at, entries.bytes, entries.size));
  const bool deletions = piece.pass == Pass::kDeletions;
  if (!deletions) FRUGAL_TRY(file->read_unverified(from, piece.count, records));
  return file->each_entry(
      column, first, blocks, from, to, [&](uint64_t at, const ColumnEntry* e, size_t n) -> Status {
        for (size_t i = 0; i < n; ++i)
          if (e[i].sequence != file->info().sequence)
            return file->damaged(file->entry_at(at + i),
                                 "an entry is of another checkpoint than the file");
        return deletions ? erase(piece, *file, at, e, n) : put(piece, *file, records, at, e, n);
      });
}

Status CheckpointLoader::erase(const Piece& piece, const ParameterFile& file, uint64_t at,
                               const ColumnEntry* entries, size_t n) {
  Rows& rows = piece.of->table.rows;
  if (!rows.any_key()) return file.damaged(file.entry_at(at), "a deletion of a dense row");
  uint64_t keys[kEntries];
  uint32_t slots[kEntries];
  for (size_t i = 0; i < n; ++i) keys[i] = entries[i].key;
  Lock lock(piece.of->erasing);  // what is expected is for the rows below alone
  FRUGAL_TRY(rows.resolve(keys, n, nullptr, Rows::Missing::kLeave, slots, nullptr));
  FRUGAL_TRY(rows.expect_deletions(n));
  size_t there = 0;
  for (size_t i = 0; i < n; ++i)
    if (slots[i] < kMissingSlot) slots[there++] = slots[i];
  rows.uncreate(slots, there, true);
  return FRUGAL_OK;
}

Status CheckpointLoader::put(const Piece& piece, const ParameterFile& file, const char* records,
                             uint64_t at, const ColumnEntry* entries, size_t n) {
  Table& table = piece.of->table;
  Rows& rows = table.rows;
  const RowLayout& layout = rows.layout();
  const auto first = static_cast<uint32_t>(at);
  uint64_t keys[kEntries];
  uint32_t slots[kEntries];
  for (size_t i = 0; i < n; ++i) keys[i] = entries[i].key;
  if (rows.check_ids(keys, n, nullptr) != FRUGAL_OK)
    return file.damaged(file.entry_at(at), "a key is no id of the table");
  FRUGAL_TRY(rows.resolve(keys, n, nullptr, Rows::Missing::kCreateBlank, slots, nullptr));
  if (piece.of->blank())
    for (size_t i = 0; i < n; ++i) FRUGAL_TRY(commit(*piece.of, slots[i], 1));
  {
    const RowWrite write(rows, slots, n, {RowWrite::What::kNew});
    const device::RowsRef& to = write.in_place();
    for (uint32_t i = 0; i < n; ++i) {
      const char* record = file.record_in(records, piece.first, first + i);
      FRUGAL_TRY(file.verify_record(first + i, record, &keys[i]));
      const auto* values = reinterpret_cast<const float*>(record);
      device::store_elements(values, to.row(slots[i]), layout.dim);
      if (layout.state_floats) layout.import_state(values + layout.dim, to.state_row(slots[i]));
    }
  }
  if (piece.of->blank())
    for (size_t i = 0; i < n;) {
      const uint32_t word = slots[i] / 64;
      uint64_t mask = 0;
      for (; i < n && slots[i] / 64 == word; ++i) mask |= uint64_t{1} << slots[i] % 64;
      piece.of->has_record[word].fetch_or(mask, std::memory_order_relaxed);
    }
  if (own_)
    table.tracked->files.set(slots, n, {piece.source->number, first});
  else if (table.tracked)
    for (size_t i = 0; i < n; ++i) table.tracked->tracker.mark_changed(slots[i]);
  return FRUGAL_OK;
}

// Memory for rows of a dense table.
Status CheckpointLoader::commit(Loaded& l, uint64_t first, uint64_t n) {
  for (uint64_t at = first / kMemoryRows; at <= (first + n - 1) / kMemoryRows; ++at) {
    if (l.has_memory[at].load(std::memory_order_acquire)) continue;
    Lock lock(l.committing);
    const uint64_t from = at * kMemoryRows, rows = l.table.rows.capacity();
    FRUGAL_TRY(l.table.rows.commit_range(from, std::min(kMemoryRows, rows - from)));
    l.has_memory[at].store(true, std::memory_order_release);
  }
  return FRUGAL_OK;
}

// Those of the piece that have no record.
Status CheckpointLoader::add_new_rows(const Piece& piece) {
  FRUGAL_TRY(commit(*piece.of, piece.first, piece.count));
  const auto has_record = [&](uint64_t row) {
    return piece.of->has_record[row / 64].load(std::memory_order_relaxed) >> row % 64 & 1;
  };
  const uint64_t end = uint64_t{piece.first} + piece.count;
  for (uint64_t at = piece.first, next; at < end; at = next) {
    const bool there = has_record(at);
    for (next = at + 1; next < end && has_record(next) == there;) ++next;
    if (!there) piece.of->table.rows.initialize_rows(at, next - at);
  }
  return FRUGAL_OK;
}

}  // namespace frugal
