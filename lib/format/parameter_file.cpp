// What is in a parameter file, and the reader.
#include "format/parameter_file.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "arith/optimizer.h"
#include "base/assert.h"
#include "format/names.h"

namespace frugal {
namespace {

uint64_t down_to_block(uint64_t at) { return at / kFileBlock * kFileBlock; }
uint64_t up_to_block(uint64_t at) { return down_to_block(at + kFileBlock - 1); }

}  // namespace

// --- What is on disk -----------------------------------------------------------------------------

uint32_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat16:
    case ElementType::kBfloat16:
      return 2;
  }
  return 0;
}

RowFormat RowFormat::of(uint32_t dim, ElementType element, int32_t optimizer) {
  const uint32_t bytes = element_bytes(element), columns = arith::state_columns(optimizer);
  return {dim,     element,     optimizer,
          columns, dim * bytes, columns ? arith::column_floats(optimizer, dim) * bytes : 0};
}

bool RowFormat::is_valid() const {
  return dim > 0 && value_bytes == uint64_t{dim} * element_bytes(element) &&
         value_bytes <= kMostColumnBytes && state_columns <= kMostColumns &&
         state_column_bytes <= kMostColumnBytes && !state_columns == !state_column_bytes;
}

uint64_t header_checksum(const ParameterFileHeader& header) {
  return checksum(&header, offsetof(ParameterFileHeader, checksum),
                  ChecksumSeeds(ChecksumKind::kHeader, header.table, header.number).at(0));
}

// --- The reader ----------------------------------------------------------------------------------

Status ParameterFile::damaged(uint64_t at, const String& what) const {
  return fail_at(fail(FRUGAL_ERR_DAMAGED, "'%.300s/%.100s' is damaged at byte %" PRIu64 ": %s",
                      file_.folder()->path(), file_.name(), at, what.c_str()),
                 at);
}

Status ParameterFile::open(const Folder& folder, uint64_t number, bool direct, ParameterFile* out) {
  ParameterFile made;
  const String name = rows_name(number);
  FRUGAL_TRY(folder.open_file(name.c_str(), direct, &made.file_));
  if (made.file_.alignment() > kFileBlock)  // a part of the file begins at any block
    FRUGAL_TRY(folder.open_file(name.c_str(), false, &made.file_));
  FRUGAL_TRY(made.read_header(number));
  *out = std::move(made);
  return FRUGAL_OK;
}

Status ParameterFile::read_header(uint64_t number) {
  uint64_t size = 0;
  FRUGAL_TRY(file_.size(&size));
  if (size < kFileBlock)
    return damaged(size, text("it ends within its header, of %zu bytes", kFileBlock));
  struct Freed {
    ~Freed() { heap_free(memory); }
    void* memory;
  } const block{heap_alloc_aligned(kFileBlock, kFileBlock)};
  if (!block.memory)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the header of a parameter file");
  FRUGAL_TRY(file_.read(0, block.memory, kFileBlock));
  return check_header(*static_cast<const ParameterFileHeader*>(block.memory), number, size);
}

Status ParameterFile::check_header(const ParameterFileHeader& h, uint64_t number, uint64_t size) {
  if (std::memcmp(h.magic, kParameterFileMagic, sizeof h.magic))
    return damaged(0, "it is no parameter file, or one that was not completed");
  if (h.byte_order == __builtin_bswap32(kByteOrderMark))
    return fail_at(
        fail(FRUGAL_ERR_UNSUPPORTED,
             "'%.300s/%.100s' was written by a machine of another byte order: read it on such "
             "a machine",
             file_.folder()->path(), file_.name()),
        offsetof(ParameterFileHeader, byte_order));
  if (h.byte_order != kByteOrderMark || h.checksum != header_checksum(h))
    return damaged(0, "its header has a wrong checksum");
  // Each version has the fields up to here, and the checksum.
  if (h.version != kParameterFileVersion || (h.features & ~kParameterFileFeatures))
    return fail_at(fail(FRUGAL_ERR_TOO_NEW,
                        "'%.300s/%.100s' has version %u and features %" PRIx64
                        " of parameter files, this library knows version %u and features %" PRIx64
                        ": use the library that wrote it",
                        file_.folder()->path(), file_.name(), h.version, h.features,
                        kParameterFileVersion, kParameterFileFeatures),
                   offsetof(ParameterFileHeader, version));
  if (h.number != number)
    return damaged(offsetof(ParameterFileHeader, number),
                   text("it is file %" PRIu64 ", under a wrong name", h.number));
  if (!h.format.is_valid() || h.record_bytes != h.format.record_bytes())
    return damaged(offsetof(ParameterFileHeader, format), "its records have sizes that no row has");
  if (h.records > h.entries || h.entries > kMostRecords ||
      h.column_at != kFileBlock + up_to_block(h.records * h.record_bytes) ||
      h.length != h.column_at + column_bytes(h.entries))
    return damaged(offsetof(ParameterFileHeader, records),
                   "its header has sizes that contradict each other");
  if (size != h.length)
    return damaged(std::min(size, h.length),
                   text("it has %" PRIu64 " bytes, not %" PRIu64, size, h.length));
  format_ = h.format;
  info_ = {h.number, h.table, h.sequence, h.records, h.entries, h.length, h.checksum};
  column_at_ = h.column_at;
  record_seeds_ = {ChecksumKind::kRecord, h.table, h.number};
  column_seeds_ = {ChecksumKind::kColumn, h.table, h.number};
  return FRUGAL_OK;
}

Status ParameterFile::expect(const ParameterFileInfo& info) const {
  if (info == info_) return FRUGAL_OK;
  return damaged(
      0,
      text("it is of table %" PRIu64 ", checkpoint %" PRIu64 ", checksum %" PRIx64
           "; the manifest lists table %" PRIu64 ", checkpoint %" PRIu64 ", checksum %" PRIx64,
           info_.table, info_.sequence, info_.checksum, info.table, info.sequence, info.checksum));
}

uint32_t ParameterFile::column_blocks() const {
  return static_cast<uint32_t>((info_.length - column_at_) / kFileBlock);
}

IoRequest ParameterFile::column_request(uint32_t first, uint32_t count, ColumnBlock* to) {
  FRUGAL_ASSERT(first + uint64_t{count} <= column_blocks());
  return {IoRequest::Kind::kRead, &file_, column_at_ + uint64_t{first} * kFileBlock,
          reinterpret_cast<char*>(to), size_t{count} * kFileBlock};
}

Status ParameterFile::read_column(uint32_t first, uint32_t count, ColumnBlock* to) {
  const IoRequest r = column_request(first, count, to);
  FRUGAL_TRY(file_.read(r.at, r.bytes, r.size));
  for (uint32_t i = 0; i < count; ++i) FRUGAL_TRY(verify_block(first + i, to[i]));
  return FRUGAL_OK;
}

Status ParameterFile::verify_block(uint32_t index, const ColumnBlock& block) const {
  const uint64_t first = uint64_t{index} * ColumnBlock::kEntries;
  if (block.checksum ==
          checksum(&block, offsetof(ColumnBlock, checksum), column_seeds_.at(index)) &&
      block.count == std::min(info_.entries - first, uint64_t{ColumnBlock::kEntries}))
    return FRUGAL_OK;
  return damaged(
      column_at_ + uint64_t{index} * kFileBlock,
      text("block %u of the column of table %" PRIu64 " has a wrong checksum or a wrong count",
           index, info_.table));
}

size_t ParameterFile::records_room(uint32_t first, uint32_t count) const {
  return up_to_block(record_at(first + count)) - down_to_block(record_at(first));
}

IoRequest ParameterFile::records_request(uint32_t first, uint32_t count, char* to) {
  FRUGAL_ASSERT(first + uint64_t{count} <= info_.records);
  return {IoRequest::Kind::kRead, &file_, down_to_block(record_at(first)), to,
          records_room(first, count)};
}

const char* ParameterFile::record_in(const char* to, uint32_t first, uint32_t i) const {
  return to + (record_at(i) - down_to_block(record_at(first)));
}

Status ParameterFile::read_unverified(uint32_t first, uint32_t count, char* to) {
  const IoRequest r = records_request(first, count, to);
  return file_.read(r.at, r.bytes, r.size);
}

Status ParameterFile::read_records(uint32_t first, uint32_t count, char* to) {
  FRUGAL_TRY(read_unverified(first, count, to));
  for (uint32_t i = first; i < first + count; ++i)
    FRUGAL_TRY(verify_record(i, record_in(to, first, i), nullptr));
  return FRUGAL_OK;
}

Status ParameterFile::verify_record(uint32_t index, const char* record, const uint64_t* key) const {
  const size_t before = format_.record_bytes() - sizeof(uint64_t);
  uint64_t sum;
  std::memcpy(&sum, record + before, sizeof sum);
  if (sum == checksum(record, before, record_seeds_.at(index))) return FRUGAL_OK;
  String what = text("record %u of table %" PRIu64, index, info_.table);
  if (key) what += " (key " + number_text(*key) + ")";
  return damaged(record_at(index), what + " has a wrong checksum");
}

}  // namespace frugal
