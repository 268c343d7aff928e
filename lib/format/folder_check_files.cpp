// Checks parameter files: what a manifest lists of them, their records, and their columns.
#include <algorithm>
#include <cinttypes>
#include <utility>

#include "base/assert.h"
#include "format/folder_checker.h"

namespace frugal {

Status FolderChecker::check_file(const Of& of, const ManifestFile& f) {
  const auto [at, is_new] = files_.try_emplace(f.info.number, Known{f.info});
  Known& known = at->second;
  if (!is_new && known.info == f.info) return FRUGAL_OK;
  const String name = rows_name(f.info.number);
  FolderFinding fault = finding(Found::kFault, name, &of.t);
  if (f.info.sequence > of.m.sequence)
    tell(fault, offsetof(ParameterFileHeader, sequence),
         text("checkpoint %" PRIu64 " lists it, and it is of checkpoint %" PRIu64, of.m.sequence,
              f.info.sequence));
  ParameterFile file;
  const Status status = ParameterFile::open(folder_, f.info.number, true, &file);
  if (status == FRUGAL_ERR_NOT_FOUND) {
    tell(fault, {},
         text("there is no such file, and checkpoint %" PRIu64 " lists it", of.m.sequence));
    return FRUGAL_OK;
  }
  if (status != FRUGAL_OK) {
    if (is_new) return failed(status, fault);
    return FRUGAL_OK;
  }
  if (!as_listed(of, file, f)) {
    known.sound = false;
    return FRUGAL_OK;
  }
  known.info = f.info;
  ++counts_->files;
  counts_->bytes += f.info.length;
  check_entries(of, file, &known.sound);
  return FRUGAL_OK;
}

bool FolderChecker::as_listed(const Of& of, const ParameterFile& file, const ManifestFile& f) {
  const ParameterFileInfo &is = file.info(), &wanted = f.info;
  const struct {
    const char* what;
    uint64_t is, wanted;
    size_t at;
  } fields[] = {
      {"it is of table", is.table, wanted.table, offsetof(ParameterFileHeader, table)},
      {"it is of checkpoint", is.sequence, wanted.sequence,
       offsetof(ParameterFileHeader, sequence)},
      {"its records are", is.records, wanted.records, offsetof(ParameterFileHeader, records)},
      {"its entries are", is.entries, wanted.entries, offsetof(ParameterFileHeader, entries)},
      {"its length is", is.length, wanted.length, offsetof(ParameterFileHeader, length)},
      {"its header's checksum is", is.checksum, wanted.checksum,
       offsetof(ParameterFileHeader, checksum)},
  };
  const FolderFinding fault = finding(Found::kFault, rows_name(file.info().number), &of.t);
  for (const auto& field : fields)
    if (field.is != field.wanted) {
      tell(fault, field.at, shown_bytes(field.what, field.is, field.wanted, of.m.sequence));
      return false;
    }
  if (file.format() == of.t.format) return true;
  tell(fault, offsetof(ParameterFileHeader, format),
       text("its rows have another format than checkpoint %" PRIu64 " has for the table",
            of.m.sequence));
  return false;
}

// Reports `what` of a record, with its key if the column's block can be read.
void FolderChecker::wrong_record(const Of& of, ParameterFile& file, uint64_t index, String what) {
  FolderFinding fault = finding(Found::kFault, rows_name(file.info().number), &of.t);
  auto* const block = reinterpret_cast<ColumnBlock*>(block_.at);
  const auto in = static_cast<uint32_t>(index / ColumnBlock::kEntries);
  if (file.read_column(in, 1, block) == FRUGAL_OK)
    fault.key = block->entries[index % ColumnBlock::kEntries].key;
  else
    what += ", and so has the block of the column with its key";
  tell(std::move(fault), file.record_at(static_cast<uint32_t>(index)),
       text("record %" PRIu64 " %s", index, what.c_str()));
}

// The records and then the column, without a pause of the disk in between.
void FolderChecker::check_entries(const Of& of, ParameterFile& file, bool* sound) {
  const uint64_t records = file.info().records, bytes = file.format().record_bytes();
  // A manifest's tables have rows of at most 65,536 elements, and a few columns of state.
  FRUGAL_ASSERT(bytes + 2 * kFileBlock <= ReadAhead::kPieceBytes);
  const uint64_t per_piece = (ReadAhead::kPieceBytes - 2 * kFileBlock) / bytes;
  const uint64_t pieces = (records + per_piece - 1) / per_piece;
  const uint64_t blocks = file.column_blocks(), blocks_per_piece = ReadAhead::kBlocks;
  struct Part {
    bool record;
    uint32_t first, count;
  };
  const auto part_of = [&](uint64_t i) -> Part {
    const bool record = i < pieces;
    if (!record) i -= pieces;
    const uint64_t all = record ? records : blocks, each = record ? per_piece : blocks_per_piece;
    return {record, static_cast<uint32_t>(i * each),
            static_cast<uint32_t>(std::min(each, all - i * each))};
  };
  counts_->records += records;
  *sound = true;
  ahead_.each(
      pieces + (blocks + blocks_per_piece - 1) / blocks_per_piece,
      [&](uint64_t i, char* to) {
        const Part p = part_of(i);
        return p.record ? file.records_request(p.first, p.count, to)
                        : file.column_request(p.first, p.count, reinterpret_cast<ColumnBlock*>(to));
      },
      [&](uint64_t i, char* at, Status piece) {
        const Part p = part_of(i);
        if (p.record)
          check_records(of, file, p.first, p.count, at, piece);
        else
          check_column(of, file, p.first, p.count, at, piece, sound);
      });
}

void FolderChecker::check_records(const Of& of, ParameterFile& file, uint32_t first, uint32_t count,
                                  char* at, Status piece) {
  for (uint32_t r = first; r < first + count; ++r) {
    // After a failure each record is read alone: the others may be sound.
    if (piece != FRUGAL_OK && file.read_unverified(r, 1, at) != FRUGAL_OK)
      wrong_record(of, file, r, "cannot be read");
    else if (file.verify_record(r, file.record_in(at, piece ? r : first, r), nullptr) != FRUGAL_OK)
      wrong_record(of, file, r, "has a wrong checksum");
  }
}

void FolderChecker::check_column(const Of& of, ParameterFile& file, uint32_t first, uint32_t count,
                                 const char* at, Status piece, bool* sound) {
  for (uint32_t b = first; b < first + count; ++b) {
    const char* block = at + size_t{b - first} * kFileBlock;
    const char* wrong = nullptr;
    if (piece != FRUGAL_OK) {
      block = block_.at;
      const IoRequest r = file.column_request(b, 1, reinterpret_cast<ColumnBlock*>(block_.at));
      if (file.file()->read(r.at, r.bytes, r.size) != FRUGAL_OK) wrong = "cannot be read";
    }
    const auto& read = *reinterpret_cast<const ColumnBlock*>(block);
    if (!wrong && file.verify_block(b, read) != FRUGAL_OK)
      wrong = "has a wrong checksum or a wrong count";
    if (wrong)
      tell(finding(Found::kFault, rows_name(file.info().number), &of.t),
           file.entry_at(uint64_t{b} * ColumnBlock::kEntries),
           text("block %u of the column %s", b, wrong));
    if (wrong || !check_block(of, file, b, read)) *sound = false;
  }
}

// Whether its entries are of the file's checkpoint, and of rows that the table can have.
bool FolderChecker::check_block(const Of& of, const ParameterFile& file, uint32_t index,
                                const ColumnBlock& block) {
  const ParameterFileInfo& info = file.info();
  const bool dense = of.t.config.key_space == FRUGAL_DENSE;
  bool sound = true;
  for (uint32_t i = 0; i < block.count; ++i) {
    const ColumnEntry& e = block.entries[i];
    const uint64_t entry = uint64_t{index} * ColumnBlock::kEntries + i;
    String what;
    if (e.sequence != info.sequence)
      what = text("entry %" PRIu64 " is of checkpoint %" PRIu64 ", and the file of %" PRIu64, entry,
                  e.sequence, info.sequence);
    else if (dense && e.key >= of.t.config.rows)
      what =
          text("entry %" PRIu64 " has an id that is not below %" PRIu64, entry, of.t.config.rows);
    else if (dense && entry >= info.records)
      what =
          text("entry %" PRIu64 " is a deletion, and rows of dense tables are not deleted", entry);
    else
      continue;
    sound = false;
    FolderFinding fault = finding(Found::kFault, rows_name(info.number), &of.t);
    fault.key = e.key;
    tell(std::move(fault), file.entry_at(entry), what);
  }
  return sound;
}

}  // namespace frugal
