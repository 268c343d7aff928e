// Parameter files: immutable files of records of one table, with a column of keys at the end
// (docs/format.md). A writer makes one; a reader opens one and believes nothing in it unchecked.
//
// Threads: the calls of a writer are made by one thread at a time, but any threads fill and seal
// records meanwhile. A reader is immutable once it is open: any threads read.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "base/heap.h"
#include "base/status.h"
#include "base/sync.h"
#include "files/io_queue.h"
#include "format/checksum.h"

namespace frugal {

static_assert(std::endian::native == std::endian::little, "files have little-endian numbers");

// --- What is on disk -----------------------------------------------------------------------------

inline constexpr size_t kFileBlock = 4096;  // each part of a file is a whole number of these
inline constexpr uint64_t kMostRecords = 1u << 20;  // of a file; entries likewise
inline constexpr uint32_t kParameterFileVersion = 1;
inline constexpr uint64_t kParameterFileFeatures = 0;  // bits that this library knows
inline constexpr char kParameterFileMagic[8] = {'F', 'R', 'U', 'G', 'A', 'L', 'R', 'W'};
inline constexpr uint32_t kByteOrderMark = 0x01020304;

enum class ElementType : uint32_t { kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3 };
uint32_t element_bytes(ElementType type);  // 0: no such type

// What a record has, in bytes. State columns follow the values without gaps.
struct RowFormat {
  uint32_t dim;
  ElementType element;
  int32_t optimizer;  // frugal_optimizer_kind
  uint32_t state_columns;
  uint32_t value_bytes;
  uint32_t state_column_bytes;  // of each

  static RowFormat of(uint32_t dim, ElementType element, int32_t optimizer);
  static constexpr uint32_t kMostColumns = 8, kMostColumnBytes = 1u << 24;
  size_t state_bytes() const { return size_t{state_columns} * state_column_bytes; }
  size_t state_at(uint32_t column) const {
    return value_bytes + size_t{column} * state_column_bytes;
  }
  size_t row_bytes() const { return value_bytes + state_bytes(); }
  // The row, zeros up to a multiple of 8, and the checksum.
  size_t record_bytes() const { return (row_bytes() + 7) / 8 * 8 + 8; }
  bool is_valid() const;
  bool operator==(const RowFormat&) const = default;
};
static_assert(sizeof(RowFormat) == 24);

struct ParameterFileHeader {
  char magic[8];
  uint32_t byte_order;
  uint32_t version;
  uint64_t features;  // a reader that does not know one of them refuses the file
  uint64_t number;    // of the file
  uint64_t table;     // the table's number, which is never used again
  uint64_t sequence;  // of the checkpoint that the file was made for
  RowFormat format;
  uint64_t record_bytes;
  uint64_t records;
  uint64_t entries;  // of the column: those of records, then deletions
  uint64_t column_at;
  uint64_t length;
  char zeros[3976];
  uint64_t checksum;  // of all bytes before it
};
static_assert(sizeof(ParameterFileHeader) == kFileBlock);
static_assert(offsetof(ParameterFileHeader, byte_order) == 8);
static_assert(offsetof(ParameterFileHeader, version) == 12);
static_assert(offsetof(ParameterFileHeader, features) == 16);
static_assert(offsetof(ParameterFileHeader, number) == 24);
static_assert(offsetof(ParameterFileHeader, table) == 32);
static_assert(offsetof(ParameterFileHeader, sequence) == 40);
static_assert(offsetof(ParameterFileHeader, format) == 48);
static_assert(offsetof(ParameterFileHeader, record_bytes) == 72);
static_assert(offsetof(ParameterFileHeader, records) == 80);
static_assert(offsetof(ParameterFileHeader, entries) == 88);
static_assert(offsetof(ParameterFileHeader, column_at) == 96);
static_assert(offsetof(ParameterFileHeader, length) == 104);
static_assert(offsetof(ParameterFileHeader, checksum) == 4088);

struct ColumnEntry {
  uint64_t key;
  uint64_t sequence;
};

struct ColumnBlock {
  static constexpr size_t kEntries = 255;
  ColumnEntry entries[kEntries];
  uint32_t count;
  uint32_t zero;
  uint64_t checksum;  // of all bytes before it
};
static_assert(sizeof(ColumnBlock) == kFileBlock);
static_assert(offsetof(ColumnBlock, count) == 4080 && offsetof(ColumnBlock, checksum) == 4088);

uint64_t header_checksum(const ParameterFileHeader& header);
// Of the blocks of so many entries.
inline uint64_t column_bytes(uint64_t entries) {
  return (entries + ColumnBlock::kEntries - 1) / ColumnBlock::kEntries * kFileBlock;
}

// What a manifest says of a file. `checksum` is the header's. It suffices: the header says how
// many records and blocks there are, and each has a checksum of its own, which names table, file
// and place.
struct ParameterFileInfo {
  uint64_t number = 0, table = 0, sequence = 0;
  uint64_t records = 0, entries = 0;
  uint64_t length = 0, checksum = 0;
  bool operator==(const ParameterFileInfo&) const = default;
};

// --- Writing -------------------------------------------------------------------------------------

// Memory of records that are not on disk yet, for all writers of a checkpoint. Keeps a few free
// buffers. Thread-safe; it outlives its writers.
class RecordBuffers {
 public:
  // `kept`: the most bytes of free buffers. `most`: the size of a buffer for rows that fit into it.
  explicit RecordBuffers(size_t kept, size_t most = size_t{1} << 20);
  ~RecordBuffers();
  RecordBuffers(const RecordBuffers&) = delete;

  uint64_t used() const { return used_.load(std::memory_order_relaxed); }  // bytes, not free ones
  // Of these, the bytes of complete buffers. The disk alone keeps them from being given back.
  uint64_t complete() const { return complete_.load(); }
  void count_complete(int64_t bytes) noexcept;
  // Whether complete buffers have at most `most` bytes. If not, `when_within` is called once they
  // have, by the thread that gives back a buffer.
  bool within(uint64_t most) noexcept;
  void on_within(std::function<void()> when_within) { when_within_ = std::move(when_within); }
  size_t most() const { return most_; }
  char* take(size_t bytes) noexcept;  // aligned to kFileBlock; null: no memory
  void give(char* memory, size_t bytes) noexcept;

 private:
  const size_t most_, most_kept_;
  std::atomic<uint64_t> used_{0}, complete_{0};
  std::atomic<uint64_t> awaited_{0};  // a thread waits for fewer complete bytes; 0: none does
  std::function<void()> when_within_;
  Mutex mu_;
  char* free_ GUARDED_BY(mu_) =
      nullptr;  // of `most_` bytes each; begins with the next one's address
  size_t kept_ GUARDED_BY(mu_) = 0;
};

// Makes a parameter file. A row's bytes are copied once: by the caller, into add()'s memory, from
// which they are written. (Less than a block of each buffer is copied on into the next.) No call
// but finish(), sync(), abandon() and wait_written() waits for the disk. The memory of records is
// counted in RecordBuffers; besides, a file takes 16.1 bytes for each entry, and 128 KiB.
class ParameterFileWriter : public HeapObject {
 public:
  struct Buffer;
  struct Record {
    char* bytes;  // room for RowFormat::record_bytes()
    uint32_t index;
    Buffer* buffer;
  };

  ParameterFileWriter() = default;
  ~ParameterFileWriter();  // abandon(), unless finish() has succeeded
  ParameterFileWriter(const ParameterFileWriter&) = delete;

  // Creates the file; EXISTS if there is one. `direct`: without the system's cache, if possible.
  Status open(Folder* folder, uint64_t number, uint64_t table, uint64_t sequence,
              const RowFormat& format, bool direct, IoQueue* queue, RecordBuffers* buffers);

  uint64_t number() const { return info_.number; }
  const RowFormat& format() const { return format_; }
  uint64_t records() const { return info_.records; }
  bool is_full() const { return info_.entries == kMostRecords; }  // records and deletions
  File* file() { return &file_; }                                 // to sync it by a queue

  // Gives a new record its place; the file must not be full. The caller copies values and state to
  // record->bytes, and calls seal(). Without memory (OUT_OF_MEMORY) nothing has changed.
  Status add(uint64_t key, uint64_t sequence, Record* record);
  // Any thread, once for each record. Pads it and adds its checksum. The last one of a buffer that
  // is full submits it to the queue.
  void seal(const Record& record) noexcept;
  Status add_deletion(uint64_t key, uint64_t sequence);

  // Gives back the buffers that have been written. Returns the first failure of a write; each later
  // call returns it again. OUT_OF_MEMORY: a full buffer is not submitted, and the next call tries.
  Status collect();
  // The same, and first waits for the oldest buffer that was submitted, if there is one.
  Status wait_written();

  // All records are sealed. Writes the rest, the column, and last of all the header. After a
  // failure the file can only be abandoned.
  Status finish(ParameterFileInfo* info);
  Status sync() { return file_.sync(); }  // after finish()
  // Ends all writing, and removes the file. No thread seals a record any more.
  void abandon() noexcept;

 private:
  struct Piece;
  // Entries, as they are written.
  class Entries {
   public:
    Entries() = default;
    ~Entries() { clear(); }
    Entries(const Entries&) = delete;
    Status make_room();  // for one more
    void add(uint64_t key, uint64_t sequence);
    Status take(Entries* from);  // those of `from` follow
    void seal(const ChecksumSeeds& seeds);
    void clear() noexcept;
    uint64_t count() const { return count_; }
    void write(File* file, uint64_t at, IoBatch* batch) const;  // adds the requests

   private:
    ColumnBlock& block(uint64_t i);
    ColumnEntry& entry(uint64_t i);
    Vector<Piece*> pieces_;
    uint64_t count_ = 0;
  };

  Status create(Folder* folder, const char* name, bool direct);
  Status next_buffer();
  void release(Buffer* buffer) noexcept;
  void submit(Buffer* buffer) noexcept;
  void free_buffer(Buffer** link) noexcept;
  Status write_header(uint64_t column_at);

  File file_;
  IoQueue* queue_ = nullptr;
  RecordBuffers* buffers_ = nullptr;
  RowFormat format_{};
  size_t record_bytes_ = 0;
  ParameterFileInfo info_;
  ChecksumSeeds seeds_;                           // of records
  Buffer *oldest_ = nullptr, *newest_ = nullptr;  // records that are not on disk
  size_t next_bytes_ = 0;                         // of the next buffer
  Entries entries_, deletions_;
  IoBatch column_;
  CallError error_;  // of the first write that failed
  bool finished_ = false;
};

// --- Reading -------------------------------------------------------------------------------------

// A parameter file that is open for reading. Every size in it is compared with the file's length
// before anything is read by it, and this takes no memory but one block while it is opened.
//
// Statuses: DAMAGED: bytes are not what was written, with file and offset. TOO_NEW: the version or
// a feature is unknown. UNSUPPORTED: a machine of another byte order wrote the file. Else those of
// the file layer.
class ParameterFile : public HeapObject {
 public:
  ParameterFile() = default;
  ParameterFile(ParameterFile&&) = default;
  ParameterFile& operator=(ParameterFile&&) = default;

  static Status open(const Folder& folder, uint64_t number, bool direct, ParameterFile* out);
  // DAMAGED if this is not the file that a manifest means.
  Status expect(const ParameterFileInfo& info) const;

  const ParameterFileInfo& info() const { return info_; }
  const RowFormat& format() const { return format_; }
  uint32_t alignment() const { return file_.alignment(); }
  File* file() { return &file_; }

  // The column: block b has the entries from b * ColumnBlock::kEntries on. `to` is aligned to
  // kFileBlock. A caller may also read with the request, and verify each block.
  uint32_t column_blocks() const;
  Status read_column(uint32_t first, uint32_t count, ColumnBlock* to);
  IoRequest column_request(uint32_t first, uint32_t count, ColumnBlock* to);
  Status verify_block(uint32_t index, const ColumnBlock& block) const;
  // Verifies `count` blocks from `first` on, which were read to `blocks`, and all of which have
  // some of the entries from .. to - 1. Calls of(at, entries, n) for these entries, a block's at a
  // time; `at` is the first one's number. Returns what `of` returns if that is a failure.
  template <class Of>
  Status each_entry(const ColumnBlock* blocks, uint32_t first, uint32_t count, uint64_t from,
                    uint64_t to, Of of) const;
  uint64_t entry_at(uint64_t index) const {
    return column_at_ + index / ColumnBlock::kEntries * kFileBlock +
           index % ColumnBlock::kEntries * sizeof(ColumnEntry);
  }

  // Records [first, first + count): whole blocks of the file are read to `to`, which is aligned to
  // kFileBlock and has room for records_room() bytes. Record i is then at record_in(to, first, i).
  // read_records() also verifies all of them.
  size_t records_room(uint32_t first, uint32_t count) const;
  IoRequest records_request(uint32_t first, uint32_t count, char* to);
  const char* record_in(const char* to, uint32_t first, uint32_t i) const;
  Status read_records(uint32_t first, uint32_t count, char* to);
  Status read_unverified(uint32_t first, uint32_t count, char* to);
  // The message has the key, if it is given.
  Status verify_record(uint32_t index, const char* record, const uint64_t* key) const;
  uint64_t record_at(uint32_t index) const { return kFileBlock + index * format_.record_bytes(); }

  // DAMAGED, with a message that names the file and the offset.
  Status damaged(uint64_t at, const String& what) const;

 private:
  Status read_header(uint64_t number);
  Status check_header(const ParameterFileHeader& header, uint64_t number, uint64_t size);
  File file_;
  ParameterFileInfo info_;
  RowFormat format_{};
  uint64_t column_at_ = 0;
  ChecksumSeeds record_seeds_, column_seeds_;
};

template <class Of>
Status ParameterFile::each_entry(const ColumnBlock* blocks, uint32_t first, uint32_t count,
                                 uint64_t from, uint64_t to, Of of) const {
  for (uint32_t b = 0; b < count; ++b) {
    FRUGAL_TRY(verify_block(first + b, blocks[b]));
    const uint64_t begin = (first + uint64_t{b}) * ColumnBlock::kEntries;
    const uint64_t at = std::max(from, begin), end = std::min(to, begin + ColumnBlock::kEntries);
    FRUGAL_TRY(of(at, blocks[b].entries + (at - begin), end - at));
  }
  return FRUGAL_OK;
}

}  // namespace frugal
