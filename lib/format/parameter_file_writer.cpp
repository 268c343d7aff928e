// The writer of parameter files.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "format/names.h"
#include "format/parameter_file.h"

namespace frugal {
namespace {

constexpr size_t kFirstBuffer = size_t{64} << 10;  // so that tables of few rows take little memory
constexpr size_t kSmallFrom = size_t{32} << 20;    // of buffers: then new ones are small, too

size_t whole_blocks(size_t bytes) { return bytes / kFileBlock * kFileBlock; }
size_t up_to_blocks(size_t bytes) { return whole_blocks(bytes + kFileBlock - 1); }

Status no_memory_to_write() {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for rows of a parameter file");
}

}  // namespace

// --- RecordBuffers -------------------------------------------------------------------------------

RecordBuffers::RecordBuffers(size_t kept, size_t most)
    : most_(up_to_blocks(most)), most_kept_(kept) {}

RecordBuffers::~RecordBuffers() {
  while (char* memory = free_) {
    std::memcpy(&free_, memory, sizeof free_);
    heap_free(memory);
  }
}

char* RecordBuffers::take(size_t bytes) noexcept {
  char* memory = nullptr;
  if (bytes == most_) {
    Lock lock(mu_);
    if ((memory = free_)) {
      std::memcpy(&free_, memory, sizeof free_);
      kept_ -= bytes;
    }
  }
  if (!memory) memory = static_cast<char*>(heap_alloc_aligned(kFileBlock, bytes));
  if (memory) used_.fetch_add(bytes, std::memory_order_relaxed);
  return memory;
}

void RecordBuffers::give(char* memory, size_t bytes) noexcept {
  used_.fetch_sub(bytes, std::memory_order_relaxed);
  if (bytes == most_) {
    Lock lock(mu_);
    if (kept_ + bytes <= most_kept_) {
      std::memcpy(memory, &free_, sizeof free_);
      free_ = memory;
      kept_ += bytes;
      return;
    }
  }
  heap_free(memory);
}

void RecordBuffers::count_complete(int64_t bytes) noexcept {
  const uint64_t now =
      complete_.fetch_add(static_cast<uint64_t>(bytes)) + static_cast<uint64_t>(bytes);
  if (bytes >= 0) return;
  // within() sets the number before it looks a last time, so one of the two threads sees the other.
  if (now < awaited_.load() && awaited_.exchange(0)) when_within_();
}

bool RecordBuffers::within(uint64_t most) noexcept {
  if (complete() <= most) return true;
  awaited_.store(most + 1);
  return complete() <= most;
}

// --- Entries -------------------------------------------------------------------------------------

struct ParameterFileWriter::Piece {
  static constexpr size_t kBlocks = 16, kEntries = kBlocks * ColumnBlock::kEntries;
  ColumnBlock blocks[kBlocks];
};

ColumnBlock& ParameterFileWriter::Entries::block(uint64_t i) {
  return pieces_[i / Piece::kBlocks]->blocks[i % Piece::kBlocks];
}

ColumnEntry& ParameterFileWriter::Entries::entry(uint64_t i) {
  return block(i / ColumnBlock::kEntries).entries[i % ColumnBlock::kEntries];
}

Status ParameterFileWriter::Entries::make_room() try {
  if (count_ < pieces_.size() * Piece::kEntries) return FRUGAL_OK;
  ::frugal::make_room(pieces_, 1);
  auto* piece = static_cast<Piece*>(heap_alloc_aligned(kFileBlock, sizeof(Piece)));
  if (!piece) return no_memory_to_write();
  std::memset(piece, 0, sizeof *piece);
  pieces_.push_back(piece);
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {  // nothing else is thrown: GCOVR_EXCL_BR_LINE
  return no_memory_to_write();
}

void ParameterFileWriter::Entries::add(uint64_t key, uint64_t sequence) {
  entry(count_) = {key, sequence};
  ++count_;
}

Status ParameterFileWriter::Entries::take(Entries* from) {
  for (uint64_t i = 0; i < from->count_; ++i) {
    FRUGAL_TRY(make_room());
    const ColumnEntry& taken = from->entry(i);
    add(taken.key, taken.sequence);
    if ((i + 1) % Piece::kEntries == 0)
      heap_free(std::exchange(from->pieces_[i / Piece::kEntries], nullptr));
  }
  from->clear();
  return FRUGAL_OK;
}

void ParameterFileWriter::Entries::seal(const ChecksumSeeds& seeds) {
  for (uint64_t i = 0, left = count_; left; ++i) {
    ColumnBlock& sealed = block(i);
    sealed.count = static_cast<uint32_t>(std::min(left, uint64_t{ColumnBlock::kEntries}));
    sealed.checksum = checksum(&sealed, offsetof(ColumnBlock, checksum), seeds.at(i));
    left -= sealed.count;
  }
}

void ParameterFileWriter::Entries::write(File* file, uint64_t at, IoBatch* batch) const {
  uint64_t left = column_bytes(count_);
  batch->requests.reserve(pieces_.size());
  for (Piece* piece : pieces_) {
    const size_t bytes = std::min(left, uint64_t{sizeof(Piece)});
    if (bytes == 0) break;  // a piece without entries
    batch->requests.push_back(
        {IoRequest::Kind::kWrite, file, at, reinterpret_cast<char*>(piece), bytes});
    at += bytes;
    left -= bytes;
  }
}

void ParameterFileWriter::Entries::clear() noexcept {
  for (Piece* piece : pieces_) heap_free(piece);
  pieces_.clear();
  count_ = 0;
}

// --- Buffers of records --------------------------------------------------------------------------

// A buffer begins at a block of the file. It is complete when all of its records are sealed, the
// writer adds no more to it, and it has the end of the buffer before it.
struct ParameterFileWriter::Buffer : public HeapObject {
  char* memory = nullptr;
  size_t bytes = 0;            // of memory
  size_t used = 0;             // by records, from the beginning
  uint64_t at = 0;             // in the file
  std::atomic<uint32_t> left;  // what it lacks to be complete
  Buffer* next = nullptr;      // in the file: gets what is left of the last block
  Buffer* newer = nullptr;     // that the writer has
  IoBatch batch;
  enum State { kFilling, kComplete, kSubmitted };
  std::atomic<State> state{kFilling};
};

// Gives the writer a buffer with room for a record. Less than a block is already in it.
Status ParameterFileWriter::next_buffer() try {
  std::unique_ptr<Buffer> made(new Buffer);
  made->batch.requests.reserve(1);
  const size_t bytes =
      buffers_->used() < kSmallFrom ? next_bytes_ : std::min(next_bytes_, kFirstBuffer);
  made->bytes = std::max(bytes, up_to_blocks(kFileBlock + record_bytes_));
  made->memory = buffers_->take(made->bytes);
  if (!made->memory) return no_memory_to_write();
  next_bytes_ = std::min(4 * next_bytes_, buffers_->most());
  Buffer* const full = newest_;
  newest_ = made.release();
  newest_->at = kFileBlock;
  newest_->left = 1;  // the writer adds records to it
  if (!full) {
    oldest_ = newest_;
    return FRUGAL_OK;
  }
  const size_t whole = whole_blocks(full->used);
  newest_->at = full->at + whole;
  newest_->used = full->used - whole;
  newest_->left = 2;  // and the end of the full one comes
  full->next = full->newer = newest_;
  release(full);
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {  // nothing else is thrown: GCOVR_EXCL_BR_LINE
  return no_memory_to_write();
}

// One thing less is missing. A buffer that is complete is submitted, and may complete the next.
void ParameterFileWriter::release(Buffer* buffer) noexcept {
  while (buffer && buffer->left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    Buffer* const next = buffer->next;
    size_t whole = buffer->used;
    if (next) {
      whole = whole_blocks(buffer->used);
      std::memcpy(next->memory, buffer->memory + whole, buffer->used - whole);
    }
    buffer->batch.requests.push_back(
        {IoRequest::Kind::kWrite, &file_, buffer->at, buffer->memory, whole});
    buffers_->count_complete(static_cast<int64_t>(buffer->bytes));
    submit(buffer);
    buffer = next;
  }
}

// From the end of this call on collect() may free the buffer.
void ParameterFileWriter::submit(Buffer* buffer) noexcept {
  Buffer::State state = Buffer::kSubmitted;
  try {
    queue_->submit(&buffer->batch);
  } catch (const std::bad_alloc&) {  // nothing else is thrown: GCOVR_EXCL_BR_LINE
    state = Buffer::kComplete;       // collect() tries again
  }
  buffer->state.store(state);
}

// Frees the buffer that a link of the list leads to.
void ParameterFileWriter::free_buffer(Buffer** link) noexcept {
  const std::unique_ptr<Buffer> buffer(*link);
  *link = buffer->newer;
  if (!buffer->batch.requests.empty())
    buffers_->count_complete(-static_cast<int64_t>(buffer->bytes));
  buffers_->give(buffer->memory, buffer->bytes);
}

Status ParameterFileWriter::collect() {
  bool without_memory = false;
  for (Buffer** link = &oldest_; Buffer* buffer = *link;) {
    if (buffer->state.load() == Buffer::kComplete) {
      submit(buffer);
      without_memory |= buffer->state.load() == Buffer::kComplete;
    }
    if (buffer->state.load() != Buffer::kSubmitted || !queue_->is_done(&buffer->batch)) {
      link = &buffer->newer;
      continue;
    }
    if (queue_->wait(&buffer->batch) && error_.status == FRUGAL_OK) error_ = recorded_error();
    free_buffer(link);
  }
  if (error_.status) return fail_as(error_);
  return without_memory ? no_memory_to_write() : FRUGAL_OK;
}

Status ParameterFileWriter::wait_written() {
  Buffer* buffer = oldest_;
  while (buffer && buffer->state.load() != Buffer::kSubmitted) buffer = buffer->newer;
  if (buffer) queue_->wait(&buffer->batch);  // collect() returns what has failed
  return collect();
}

// --- The writer ----------------------------------------------------------------------------------

ParameterFileWriter::~ParameterFileWriter() {
  if (!finished_) abandon();
}

Status ParameterFileWriter::create(Folder* folder, const char* name, bool direct) {
  const Status status = folder->create(name, direct, &file_);
  if (status == FRUGAL_OK || status == FRUGAL_ERR_EXISTS) return status;
  // It may have failed after the file was there.
  const KeepError keep;
  folder->remove(name);
  return status;
}

Status ParameterFileWriter::open(Folder* folder, uint64_t number, uint64_t table, uint64_t sequence,
                                 const RowFormat& format, bool direct, IoQueue* queue,
                                 RecordBuffers* buffers) {
  FRUGAL_ASSERT(!file_ && format.is_valid());
  queue_ = queue;
  buffers_ = buffers;
  const String name = rows_name(number);
  FRUGAL_TRY(create(folder, name.c_str(), direct));
  if (file_.alignment() > kFileBlock) {
    // A part of the file begins at any block.
    file_.close();
    FRUGAL_TRY(folder->remove(name.c_str()));
    FRUGAL_TRY(create(folder, name.c_str(), false));
  }
  format_ = format;
  record_bytes_ = format.record_bytes();
  info_.number = number;
  info_.table = table;
  info_.sequence = sequence;
  seeds_ = {ChecksumKind::kRecord, table, number};
  next_bytes_ = std::min(kFirstBuffer, buffers->most());
  return FRUGAL_OK;
}

Status ParameterFileWriter::add(uint64_t key, uint64_t sequence, Record* record) {
  FRUGAL_ASSERT(!is_full());
  FRUGAL_TRY(entries_.make_room());
  if (!newest_ || newest_->bytes - newest_->used < record_bytes_) FRUGAL_TRY(next_buffer());
  *record = {newest_->memory + newest_->used, static_cast<uint32_t>(info_.records), newest_};
  newest_->used += record_bytes_;
  newest_->left.fetch_add(1, std::memory_order_relaxed);
  entries_.add(key, sequence);
  ++info_.records;
  ++info_.entries;
  return FRUGAL_OK;
}

void ParameterFileWriter::seal(const Record& record) noexcept {
  const size_t before = record_bytes_ - sizeof(uint64_t), row = format_.row_bytes();
  std::memset(record.bytes + row, 0, before - row);
  const uint64_t sum = checksum(record.bytes, before, seeds_.at(record.index));
  std::memcpy(record.bytes + before, &sum, sizeof sum);
  release(record.buffer);
}

Status ParameterFileWriter::add_deletion(uint64_t key, uint64_t sequence) {
  FRUGAL_ASSERT(!is_full());
  FRUGAL_TRY(deletions_.make_room());
  deletions_.add(key, sequence);
  ++info_.entries;
  return FRUGAL_OK;
}

Status ParameterFileWriter::finish(ParameterFileInfo* info) try {
  FRUGAL_ASSERT(!finished_ && file_);
  FRUGAL_TRY(collect());
  if (Buffer* const last = std::exchange(newest_, nullptr)) {
    const size_t used = last->used;
    last->used = up_to_blocks(used);
    std::memset(last->memory + used, 0, last->used - used);
    release(last);
    FRUGAL_ASSERT(last->state.load() != Buffer::kFilling);  // else a record is not sealed
  }
  FRUGAL_TRY(entries_.take(&deletions_));
  entries_.seal({ChecksumKind::kColumn, info_.table, info_.number});
  const uint64_t column_at = kFileBlock + up_to_blocks(info_.records * record_bytes_);
  entries_.write(&file_, column_at, &column_);
  queue_->submit(&column_);
  while (oldest_) FRUGAL_TRY(wait_written());
  FRUGAL_TRY(queue_->wait(&column_));
  info_.length = column_at + column_bytes(info_.entries);
  FRUGAL_TRY(write_header(column_at));
  entries_.clear();
  finished_ = true;
  *info = info_;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {  // nothing else is thrown: GCOVR_EXCL_BR_LINE
  return no_memory_to_write();
}

Status ParameterFileWriter::write_header(uint64_t column_at) {
  void* memory = heap_alloc_aligned(kFileBlock, kFileBlock);
  if (!memory) return no_memory_to_write();
  auto* header = new (memory) ParameterFileHeader{};
  std::memcpy(header->magic, kParameterFileMagic, sizeof header->magic);
  header->byte_order = kByteOrderMark;
  header->version = kParameterFileVersion;
  header->features = kParameterFileFeatures;
  header->number = info_.number;
  header->table = info_.table;
  header->sequence = info_.sequence;
  header->format = format_;
  header->record_bytes = record_bytes_;
  header->records = info_.records;
  header->entries = info_.entries;
  header->column_at = column_at;
  header->length = info_.length;
  header->checksum = info_.checksum = header_checksum(*header);
  const Status status = file_.write(0, header, sizeof *header);
  heap_free(memory);
  return status;
}

void ParameterFileWriter::abandon() noexcept {
  if (!file_) return;
  const KeepError keep;
  for (Buffer* buffer = oldest_; buffer; buffer = buffer->newer)
    if (buffer->state.load() == Buffer::kSubmitted) queue_->cancel(&buffer->batch);
  while (oldest_) {
    if (oldest_->state.load() == Buffer::kSubmitted) queue_->wait(&oldest_->batch);
    free_buffer(&oldest_);
  }
  newest_ = nullptr;
  queue_->cancel(&column_);
  queue_->wait(&column_);
  entries_.clear();
  deletions_.clear();
  const std::shared_ptr<Folder> folder = file_.folder();
  file_.close();
  folder->remove(file_.name());
}

}  // namespace frugal
