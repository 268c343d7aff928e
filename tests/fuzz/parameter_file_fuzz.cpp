// A parameter file, from bytes: the file itself, or a good one with changed fields whose checksums
// are right again. The reader never crashes, returns a documented status, and takes no memory that
// the file's length does not cover.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "format/parameter_file.h"
#include "fuzz/bytes.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace {

using namespace frugal;

// A folder whose file 7 is the input, and the bytes of a good one.
struct World {
  TemporaryFolder place;
  std::shared_ptr<Folder> folder;
  std::string good;
  World() {
    Check(Folder::open((place / "f").c_str(), Folder::Use::kCreate, &folder) == FRUGAL_OK);
    IoQueue queue;
    RecordBuffers buffers(0);
    Check(queue.open(1) == FRUGAL_OK);
    ParameterFileWriter writer;
    Check(writer.open(folder.get(), 7, 3, 11, RowFormat::of(4, ElementType::kFloat32, FRUGAL_ADAM),
                      false, &queue, &buffers) == FRUGAL_OK);
    for (uint64_t i = 0; i < 300; ++i) {
      ParameterFileWriter::Record record;
      Check(writer.add(mix(i), 11, &record) == FRUGAL_OK);
      std::memset(record.bytes, static_cast<int>(i), writer.format().row_bytes());
      writer.seal(record);
    }
    for (uint64_t i = 300; i < 310; ++i) Check(writer.add_deletion(mix(i), 11) == FRUGAL_OK);
    ParameterFileInfo info;
    Check(writer.finish(&info) == FRUGAL_OK);
    good = place.Read("f/7.rows");
  }
};

// Changes some numbers of the header, the column and records, as the input says, and then makes
// most checksums right.
std::string Forged(const std::string& good, Bytes in) {
  std::string bytes = good;
  ParameterFileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  const uint64_t column_at = header.column_at;
  const uint64_t right = in.Number(1);
  for (uint64_t n = in.Number(1) % 6; n > 0; --n) {
    const uint64_t where = in.Number(1) % 4, width = uint64_t{1} << in.Number(1) % 4;
    const uint64_t value = in.Number(1) % 2 ? in.Number(8) : in.Number(2);
    const uint64_t area = where < 2 ? 0 : where == 2 ? column_at : kFileBlock;
    const uint64_t span = where < 2 ? 112 : bytes.size() - area;
    const uint64_t at = area + in.Number(3) % (span - 8) / width * width;
    if (at + width <= bytes.size()) std::memcpy(&bytes[at], &value, width);
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (right & 1) {
    header.checksum = header_checksum(header);
    std::memcpy(bytes.data(), &header, sizeof header);
  }
  const ChecksumSeeds seeds(ChecksumKind::kColumn, header.table, header.number);
  for (uint64_t b = 0; right & 2 && b < 2; ++b) {
    char* const block = &bytes[column_at + b * kFileBlock];
    const uint64_t sum = checksum(block, offsetof(ColumnBlock, checksum), seeds.at(b));
    std::memcpy(block + offsetof(ColumnBlock, checksum), &sum, sizeof sum);
  }
  if (right & 4) bytes.resize(in.Number(3) % (bytes.size() + 4096));
  return bytes;
}

bool Documented(Status s) {
  return s == FRUGAL_OK || s == FRUGAL_ERR_DAMAGED || s == FRUGAL_ERR_TOO_NEW ||
         s == FRUGAL_ERR_UNSUPPORTED;
}

// Whether the file can be opened.
bool Read(const Folder& folder, uint64_t size) {
  ParameterFile file;
  const HeapCount count;
  const Status opened = ParameterFile::open(folder, 7, false, &file);
  Check(Documented(opened) && count.so_far() < 20);
  if (opened) return false;
  // All that a reader takes by the file's numbers is within the file.
  const ParameterFileInfo& info = file.info();
  Check(info.length == size && info.records <= info.entries && info.entries <= kMostRecords);
  Check(file.column_blocks() * uint64_t{kFileBlock} < size);
  Check(info.records * file.format().record_bytes() < size);
  std::vector<ColumnBlock> block(1);
  uint64_t entries = 0;
  for (uint32_t b = 0; b < file.column_blocks(); ++b) {
    const Status s = file.read_column(b, 1, block.data());
    Check(Documented(s));
    if (s == FRUGAL_OK) {
      Check(block[0].count <= ColumnBlock::kEntries);
      entries += block[0].count;
    }
  }
  Check(entries <= info.entries);
  for (uint32_t i = 0; i < info.records; i += 100) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(100, info.records - i));
    std::vector<char> memory(file.records_room(i, n));
    Check(memory.size() < size);
    Check(Documented(file.read_records(i, n, memory.data())));
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World world;
  Bytes in{data, size};
  std::string bytes;
  if (in.Number(1) % 8 == 0)
    bytes.assign(reinterpret_cast<const char*>(in.at), in.left);
  else
    bytes = Forged(world.good, in);
  world.place.Write("f/7.rows", bytes);
  return Read(*world.folder, bytes.size()) ? 0 : -1;  // -1: of no use for the corpus
}
