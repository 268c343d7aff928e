// Parameter files: what is written is read, in every layout; damaged bytes, wrong places, failed
// calls and missing memory each have a status.
#include "format/parameter_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "format/names.h"
#include "storage/row_memory.h"
#include "support/file_calls.h"
#include "support/inside.h"
#include "support/slice.h"
#include "support/temporary_folder.h"

namespace frugal::parameter_file_test {

using Use = Folder::Use;

// Memory of whole blocks.
struct Blocks {
  explicit Blocks(size_t bytes)
      : at(static_cast<char*>(std::aligned_alloc(
            kFileBlock, std::max<size_t>(1, (bytes + kFileBlock - 1) / kFileBlock) * kFileBlock))) {
  }
  ~Blocks() { std::free(at); }
  Blocks(const Blocks&) = delete;
  char* const at;
};

// A file as it has to be.
struct Spec {
  RowFormat format = RowFormat::of(4, ElementType::kFloat32, FRUGAL_ADAM);
  uint64_t number = 7, table = 3, sequence = 11;
  uint32_t records = 3, deletions = 2;
  bool direct = false;
};

uint64_t key_of(uint64_t i) { return mix(i + 1); }
uint64_t sequence_of(const Spec& spec, uint64_t i) { return spec.sequence + i % 3; }

// The row of record i. Its table and file are part of it only if `salt` says so.
void fill_row(const Spec& spec, uint64_t i, char* to, uint64_t salt = 0) {
  const size_t bytes = spec.format.row_bytes();
  for (size_t b = 0; b < bytes; b += 8) {
    const uint64_t word = mix(i * 0x10001 + b + salt);
    std::memcpy(to + b, &word, std::min<size_t>(8, bytes - b));
  }
}

struct World {
  explicit World(size_t most = size_t{1} << 20, uint32_t threads = 2) : buffers(most, most) {
    EXPECT_OK(Folder::open((place / "f").c_str(), Use::kCreate, &folder));
    EXPECT_OK(queue.open(threads));
  }
  std::string path(uint64_t number) const {
    return place / ("f/" + std::string(rows_name(number).c_str()));
  }
  bool exists(uint64_t number) const { return access(path(number).c_str(), F_OK) == 0; }
  TemporaryFolder place;
  std::shared_ptr<Folder> folder;
  RecordBuffers buffers;
  IoQueue queue;
};

Status add_all(const Spec& spec, ParameterFileWriter* writer, uint64_t salt = 0) {
  // Deletions come at any time.
  for (uint32_t i = 0; i < spec.deletions / 2; ++i)
    FRUGAL_TRY(writer->add_deletion(key_of(spec.records + i), spec.sequence));
  for (uint32_t i = 0; i < spec.records; ++i) {
    ParameterFileWriter::Record record;
    FRUGAL_TRY(writer->add(key_of(i), sequence_of(spec, i), &record));
    EXPECT_EQ(record.index, i);
    fill_row(spec, i, record.bytes, salt);
    writer->seal(record);
    if (i % 64 == 0) FRUGAL_TRY(writer->collect());
  }
  for (uint32_t i = spec.deletions / 2; i < spec.deletions; ++i)
    FRUGAL_TRY(writer->add_deletion(key_of(spec.records + i), spec.sequence));
  return FRUGAL_OK;
}

Status write_file(World& world, const Spec& spec, ParameterFileInfo* info, uint64_t salt = 0) {
  ParameterFileWriter writer;
  FRUGAL_TRY(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                         spec.direct, &world.queue, &world.buffers));
  EXPECT_EQ(writer.number(), spec.number);
  EXPECT_EQ(writer.format(), spec.format);
  FRUGAL_TRY(add_all(spec, &writer, salt));
  EXPECT_EQ(writer.records(), spec.records);
  FRUGAL_TRY(writer.finish(info));
  const Status synced = writer.sync();
  if (synced) writer.abandon();
  return synced;
}

// Reads everything, in pieces of `piece` blocks or records, and compares.
Status read_file(World& world, const Spec& spec, const ParameterFileInfo& info, uint32_t piece = 7,
                 uint64_t salt = 0) {
  ParameterFile file;
  FRUGAL_TRY(ParameterFile::open(*world.folder, spec.number, spec.direct, &file));
  FRUGAL_TRY(file.expect(info));
  EXPECT_EQ(file.format(), spec.format);
  EXPECT_EQ(file.info().records, spec.records);
  EXPECT_EQ(file.info().entries, spec.records + spec.deletions);
  const Blocks column(piece * kFileBlock);
  auto* blocks = reinterpret_cast<ColumnBlock*>(column.at);
  uint64_t entry = 0, wrong = 0;
  for (uint32_t b = 0; b < file.column_blocks(); b += piece) {
    const uint32_t n = std::min(piece, file.column_blocks() - b);
    FRUGAL_TRY(file.read_column(b, n, blocks));
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t e = 0; e < blocks[i].count; ++e, ++entry) {
        const uint64_t sequence = entry < spec.records ? sequence_of(spec, entry) : spec.sequence;
        wrong +=
            blocks[i].entries[e].key != key_of(entry) || blocks[i].entries[e].sequence != sequence;
      }
  }
  EXPECT_EQ(entry, spec.records + spec.deletions);
  EXPECT_EQ(wrong, 0u);
  std::vector<char> row(spec.format.record_bytes());
  for (uint32_t first = 0; first < spec.records; first += piece) {
    const uint32_t n = std::min(piece, spec.records - first);
    const Blocks memory(file.records_room(first, n));
    FRUGAL_TRY(file.read_records(first, n, memory.at));
    for (uint32_t i = first; i < first + n; ++i) {
      fill_row(spec, i, row.data(), salt);
      wrong += std::memcmp(file.record_in(memory.at, first, i), row.data(),
                           spec.format.row_bytes()) != 0;
    }
  }
  EXPECT_EQ(wrong, 0u);
  return FRUGAL_OK;
}

// As the file layer has them on disk; holes of a file are zeros.
std::string bytes_of(const World& world, uint64_t number) {
  return world.place.Read("f/" + std::string(rows_name(number).c_str()));
}
void put_bytes(const World& world, uint64_t number, const std::string& bytes) {
  world.place.Write("f/" + std::string(rows_name(number).c_str()), bytes);
}

TEST(RowFormats, AreThoseOfRowsInMemory) {
  for (const uint32_t dim : {1u, 3u, 32u, 100u, 65536u})
    for (int32_t optimizer = 0; optimizer <= arith::kLastOptimizer; ++optimizer) {
      const RowFormat format = RowFormat::of(dim, ElementType::kFloat32, optimizer);
      EXPECT_TRUE(format.is_valid());
      const RowLayout layout = RowLayout::of(dim, optimizer);
      EXPECT_EQ(format.value_bytes, layout.value_bytes());
      EXPECT_EQ(format.state_bytes(), layout.state_floats * sizeof(float));
      EXPECT_EQ(format.row_bytes(), layout.exported_bytes(true));
      // With its entry a row costs at most 40 bytes more on disk.
      EXPECT_LE(format.record_bytes() + sizeof(ColumnEntry), format.row_bytes() + 40);
      EXPECT_EQ(format.state_at(0), format.value_bytes);
      EXPECT_EQ(format.state_at(2), format.value_bytes + 2 * size_t{format.state_column_bytes});
    }
  const RowFormat half = RowFormat::of(3, ElementType::kFloat16, FRUGAL_ADAGRAD);
  EXPECT_EQ(half.row_bytes(), 12u);
  EXPECT_EQ(half.record_bytes(), 24u);
  EXPECT_EQ(element_bytes(ElementType::kBfloat16), 2u);
  EXPECT_EQ(element_bytes(static_cast<ElementType>(0)), 0u);
  const RowFormat good = RowFormat::of(3, ElementType::kFloat32, FRUGAL_ADAM);
  const std::function<void(RowFormat*)> breaks[] = {
      [](RowFormat* f) { f->dim = 0; },
      [](RowFormat* f) { f->dim = 0, f->value_bytes = 0; },
      [](RowFormat* f) { f->element = static_cast<ElementType>(9); },
      [](RowFormat* f) { f->value_bytes = 11; },
      [](RowFormat* f) { f->dim = 1u << 23, f->value_bytes = 4u << 23; },
      [](RowFormat* f) { f->dim = 1u << 30, f->value_bytes = 0; },
      [](RowFormat* f) { f->state_columns = 9; },
      [](RowFormat* f) { f->state_columns = 0; },
      [](RowFormat* f) { f->state_column_bytes = 0; },
      [](RowFormat* f) { f->state_column_bytes = (1u << 24) + 1; }};
  for (const auto& make : breaks) {
    RowFormat format = good;
    make(&format);
    EXPECT_FALSE(format.is_valid());
  }
}

TEST(ParameterFiles, EachLayoutComesBack) {
  std::vector<RowFormat> formats;
  for (const uint32_t dim : {1u, 2u, 3u, 33u, 128u, 1000u})
    for (int32_t optimizer = 0; optimizer <= arith::kLastOptimizer; ++optimizer)
      formats.push_back(RowFormat::of(dim, ElementType::kFloat32, optimizer));
  formats.push_back(RowFormat::of(3, ElementType::kFloat16, FRUGAL_SGD));
  formats.push_back(RowFormat::of(5, ElementType::kBfloat16, FRUGAL_MOMENTUM));
  formats.push_back({3, ElementType::kFloat16, 99, 3, 6, 5});  // rows of 21 bytes
  formats.push_back({1, ElementType::kFloat16, 0, 1, 2, 1});
  formats.push_back({1, ElementType::kFloat32, 0, 8, 4, 1});
  World world(size_t{32} << 10);
  const std::pair<uint32_t, uint32_t> counts[] = {{0, 0},   {0, 300},   {1, 0},    {254, 1},
                                                  {255, 0}, {256, 255}, {1000, 40}};
  Spec spec;
  spec.number = 1;
  size_t n = 0;
  for (const RowFormat& format : formats)
    for (const bool direct : {false, true}) {
      spec.format = format;
      spec.direct = direct;
      // Some counts with each layout, all of them with some.
      std::tie(spec.records, spec.deletions) = counts[n++ % std::size(counts)];
      ParameterFileInfo info;
      ASSERT_OK(write_file(world, spec, &info));
      EXPECT_EQ(world.buffers.used(), 0u);
      struct stat found {};
      ASSERT_EQ(stat(world.path(spec.number).c_str(), &found), 0);
      EXPECT_EQ(static_cast<uint64_t>(found.st_size), info.length);
      ASSERT_OK(read_file(world, spec, info, 1 + n % 600));
      ++spec.number;
    }
  EXPECT_GT(n, 3 * std::size(counts));
}

TEST(ParameterFiles, TheColumnHasAnyNumberOfEntries) {
  World world;
  Spec spec;
  spec.format = RowFormat::of(1, ElementType::kFloat32, FRUGAL_SGD);
  for (const auto& [records, deletions] :
       {std::pair<uint32_t, uint32_t>{255'000, 0}, {0, 255'000}, {254'999, 2}, {4080, 4080}}) {
    ++spec.number;
    spec.records = records;
    spec.deletions = deletions;
    ParameterFileInfo info;
    ASSERT_OK(write_file(world, spec, &info));
    EXPECT_EQ(info.length, kFileBlock + (records * 16 + 4095) / 4096 * 4096 +
                               (records + deletions + 254) / 255 * 4096);
    ASSERT_OK(read_file(world, spec, info, 100'000));
  }
}

TEST(ParameterFiles, AFullOne) {
  World world;
  Spec spec;
  spec.format = RowFormat::of(1, ElementType::kFloat16, FRUGAL_SGD);
  spec.records = kMostRecords - 5;
  spec.deletions = 5;
  spec.direct = true;
  ParameterFileWriter writer;
  ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                        true, &world.queue, &world.buffers));
  EXPECT_FALSE(writer.is_full());
  ASSERT_OK(add_all(spec, &writer));
  EXPECT_TRUE(writer.is_full());
  ParameterFileInfo info;
  ASSERT_OK(writer.finish(&info));
  ASSERT_OK(read_file(world, spec, info, 100'000));
}

TEST(ParameterFiles, RowsLargerThanABuffer) {
  for (const size_t most : {size_t{1}, size_t{8192}, size_t{1} << 20})
    for (const uint32_t dim : {65536u, 1023u}) {
      World world(most);
      Spec spec;
      spec.format = RowFormat::of(dim, ElementType::kFloat32, FRUGAL_ADAM);
      spec.records = 9;
      spec.direct = true;
      ParameterFileInfo info;
      ASSERT_OK(write_file(world, spec, &info));
      ASSERT_OK(read_file(world, spec, info, 2));
    }
}

// One thread gives places; others copy and seal, in any order.
TEST(ParameterFiles, ManyThreadsFillOne) {
  constexpr uint32_t kThreads = 3, kRounds = 60;
  World world(size_t{16} << 10);
  Spec spec;
  spec.format = RowFormat::of(33, ElementType::kFloat32, FRUGAL_ADAM);
  spec.deletions = 0;
  spec.records = 0;
  std::mt19937_64 random(test_seed());
  ParameterFileWriter writer;
  ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                        true, &world.queue, &world.buffers));
  Mutex mu;
  std::vector<ParameterFileWriter::Record> ready;
  std::vector<std::thread> threads;
  bool ended = false;
  uint64_t most_used = 0;
  const auto take = [&](ParameterFileWriter::Record* out, bool* end) {
    Lock lock(mu);
    *end = ended && ready.empty();
    if (ready.empty()) return false;
    const size_t i = mix(ready.size()) % ready.size();
    *out = ready[i];
    ready[i] = ready.back();
    ready.pop_back();
    return true;
  };
  for (uint32_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (bool end = false; !end;) {
        ParameterFileWriter::Record record;
        if (!take(&record, &end)) {
          std::this_thread::yield();
          continue;
        }
        fill_row(spec, record.index, record.bytes);
        writer.seal(record);
      }
    });
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint64_t n = 1 + random() % 50;
    for (uint64_t i = 0; i < n; ++i) {
      ParameterFileWriter::Record record;
      ASSERT_OK(writer.add(key_of(spec.records), sequence_of(spec, spec.records), &record));
      ++spec.records;
      Lock lock(mu);
      ready.push_back(record);
    }
    most_used = std::max(most_used, world.buffers.used());
    ASSERT_OK(round % 8 ? writer.collect() : writer.wait_written());
  }
  {
    Lock lock(mu);
    ended = true;
  }
  for (std::thread& thread : threads) thread.join();
  ParameterFileInfo info;
  ASSERT_OK(writer.finish(&info));
  EXPECT_EQ(world.buffers.used(), 0u);
  EXPECT_GE(most_used, world.buffers.most());
  ASSERT_OK(read_file(world, spec, info));
}

TEST(ParameterFiles, ShortCountsAndInterruptions) {
  World world(size_t{8} << 10);
  TestFileCalls calls;
  Spec spec;
  spec.records = 300;
  for (const bool direct : {false, true}) {
    calls.interrupt(2);
    calls.shorten(direct ? 4096 : 777);
    ++spec.number;
    spec.direct = direct;
    ParameterFileInfo info;
    ASSERT_OK(write_file(world, spec, &info));
    ASSERT_OK(read_file(world, spec, info));
  }
}

// A file system whose O_DIRECT wants more than blocks.
class Coarse : public TestFileCalls {
 public:
  int direct_alignment(int, uint32_t* memory, uint32_t* offset) const override {
    *memory = *offset = 65536;
    return 0;
  }
};

TEST(ParameterFiles, AreBufferedWhereBlocksAreNotAligned) {
  World world;
  Spec spec;
  spec.direct = true;
  ParameterFileInfo info;
  {
    const Coarse calls;
    ASSERT_OK(write_file(world, spec, &info));
    ParameterFile file;
    ASSERT_OK(ParameterFile::open(*world.folder, spec.number, true, &file));
    EXPECT_EQ(file.alignment(), 1u);
    ASSERT_OK(read_file(world, spec, info));
  }
  // The file is opened a second time; that fails.
  for (const bool reads : {false, true}) {
    Coarse failing;
    uint64_t failures = 0, left = 0;
    for (int n = 1; n < 8; ++n) {
      failing.fail(n, EIO);
      ParameterFileWriter writer;
      ParameterFile file;
      const Status status = reads ? ParameterFile::open(*world.folder, 7, true, &file)
                                  : writer.open(world.folder.get(), 8, 3, 1, spec.format, true,
                                                &world.queue, &world.buffers);
      const bool failed = failing.failed() > 0;
      failing.fail(0, 0);
      EXPECT_TRUE(status == (failed ? FRUGAL_ERR_IO : FRUGAL_OK)) << LastMessage();
      failures += failed;
      writer.abandon();
      left += world.exists(8);
      ASSERT_OK(world.folder->remove("8.rows"));
    }
    EXPECT_GE(failures, 5u);
    EXPECT_EQ(left, reads ? 0u : 1u);  // its removal has failed
  }
  TestFileCalls calls;
  calls.refuse_direct(true);
  ASSERT_OK(read_file(world, spec, info));
}

TEST(ParameterFiles, AbandonedOnesAreGone) {
  World world(8192);
  const auto opened = [&](ParameterFileWriter* writer) {
    return writer->open(world.folder.get(), 5, 1, 1, Spec().format, false, &world.queue,
                        &world.buffers);
  };
  {
    ParameterFileWriter writer, second, never;
    ASSERT_OK(opened(&writer));
    EXPECT_EQ(opened(&second), FRUGAL_ERR_EXISTS);
    EXPECT_TRUE(world.exists(5));
    Spec spec;
    spec.records = 1000;
    ASSERT_OK(add_all(spec, &writer));
    writer.abandon();
    EXPECT_FALSE(world.exists(5));
    writer.abandon();
  }
  EXPECT_EQ(world.buffers.used(), 0u);
  {
    ParameterFileWriter writer;
    ASSERT_OK(opened(&writer));
    ParameterFileWriter::Record record;
    ASSERT_OK(writer.add(1, 1, &record));  // and is never sealed
  }
  EXPECT_FALSE(world.exists(5));
  EXPECT_EQ(world.buffers.used(), 0u);
  ParameterFileWriter writer;
  ASSERT_OK(opened(&writer));
  ParameterFileInfo info;
  ASSERT_OK(writer.finish(&info));
  EXPECT_EQ(info.length, kFileBlock);
  EXPECT_TRUE(world.exists(5));
  writer.abandon();
  EXPECT_FALSE(world.exists(5));
}

TEST(ParameterFiles, EachAllocationOfTheEndFails) {
  World world;
  Status status = FRUGAL_ERR_OUT_OF_MEMORY;
  for (int64_t n = 1; status; ++n) {
    ParameterFileWriter writer;
    ASSERT_OK(writer.open(world.folder.get(), 7, 1, 1, Spec().format, true, &world.queue,
                          &world.buffers));
    ASSERT_OK(writer.add_deletion(1, 1));
    ParameterFileInfo info;
    {
      const HeapFails one(n);
      status = writer.finish(&info);
    }
    writer.abandon();
    EXPECT_FALSE(world.exists(7));
    if (status) {
      EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
    } else {
      EXPECT_GT(n, 4);  // entries, requests, the queue, the header
    }
  }
}

TEST(ParameterFiles, EachAllocationOfAReaderFails) {
  World world;
  Spec spec;
  ParameterFileInfo info;
  ASSERT_OK(write_file(world, spec, &info));
  WithoutMemory without;
  while (without.next()) without([&] { return read_file(world, spec, info); });
  EXPECT_GE(without.rounds(), 2);
}

// There is memory for its entry, and none for the first record.
TEST(ParameterFiles, NoRecordAfterAll) {
  World world;
  for (int64_t n = 1;; ++n) {
    Spec spec;
    spec.number = static_cast<uint64_t>(n);
    spec.records = spec.deletions = 0;
    ParameterFileWriter writer;
    ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                          false, &world.queue, &world.buffers));
    ParameterFileWriter::Record record;
    heap_test_fail_after(n);
    const Status status = writer.add(1, 1, &record);
    heap_test_fail_after(0);
    if (status == FRUGAL_OK) {
      EXPECT_GT(n, 3);
      break;
    }
    EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_EQ(writer.records(), 0u);
    ParameterFileInfo info;
    ASSERT_OK(writer.finish(&info));
    EXPECT_EQ(info.length, kFileBlock);
    ASSERT_OK(read_file(world, spec, info));
  }
}

TEST(ParameterFiles, BuffersAreKept) {
  RecordBuffers buffers(2 * 8192, 8000);
  EXPECT_EQ(buffers.most(), 8192u);
  char* taken[3];
  for (char*& memory : taken) ASSERT_NE(memory = buffers.take(8192), nullptr);
  char* const other = buffers.take(4096);
  EXPECT_EQ(buffers.used(), 3 * 8192u + 4096u);
  for (char* memory : taken) buffers.give(memory, 8192);
  buffers.give(other, 4096);
  EXPECT_EQ(buffers.used(), 0u);
  const HeapFails never(-1);
  char* again[2];
  for (char*& memory : again) ASSERT_NE(memory = buffers.take(8192), nullptr);
  EXPECT_EQ(buffers.take(8192), nullptr);
  EXPECT_EQ(buffers.used(), 2 * 8192u);
  for (char* memory : again) buffers.give(memory, 8192);
}

// As many tables have, each with a buffer that fills.
TEST(ParameterFiles, ManyWritersHaveSmallBuffers) {
  constexpr size_t kWriters = 100, kBytes = size_t{2} << 20;
  World world;
  Spec spec;
  spec.records = static_cast<uint32_t>(kBytes / spec.format.record_bytes());
  spec.deletions = 0;
  std::vector<std::unique_ptr<ParameterFileWriter>> writers;
  for (size_t i = 0; i < kWriters; ++i) {
    writers.push_back(std::make_unique<ParameterFileWriter>());
    ASSERT_OK(writers.back()->open(world.folder.get(), i + 1, 1, 1, spec.format, false,
                                   &world.queue, &world.buffers));
    ASSERT_OK(add_all(spec, writers.back().get()));
  }
  while (world.buffers.complete() > 0)
    for (const auto& w : writers) ASSERT_OK(w->collect());
  // 32 MiB, a large buffer that came last, and small ones.
  EXPECT_LE(world.buffers.used(), (size_t{33} << 20) + kWriters * (size_t{128} << 10));
  for (const auto& w : writers) {
    ParameterFileInfo info;
    ASSERT_OK(w->finish(&info));
  }
  EXPECT_EQ(world.buffers.used(), 0u);
}

TEST(ParameterFiles, AThreadThatFoundTooManyCompleteBuffersIsCalledOnce) {
  RecordBuffers buffers(0);
  int calls = 0;
  buffers.on_within([&] { ++calls; });
  buffers.count_complete(100);
  EXPECT_TRUE(buffers.within(100));
  buffers.count_complete(-100);
  EXPECT_EQ(calls, 0) << "no thread waits";
  buffers.count_complete(100);
  EXPECT_FALSE(buffers.within(50));
  buffers.count_complete(20);
  buffers.count_complete(-60);
  EXPECT_EQ(calls, 0) << "there are 60";
  buffers.count_complete(-10);
  EXPECT_EQ(calls, 1);
  buffers.count_complete(-50);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(buffers.within(50));
}

int open_descriptors() {
  const int fd = dup(0);
  close(fd);
  return fd;
}

// Each call fails in turn, once and from then on.
TEST(ParameterFiles, EachFileCallFails) {
  int64_t failures = 0;
  for (const auto& [code, meant] :
       {std::pair<int, Status>{EIO, FRUGAL_ERR_IO}, {ENOSPC, FRUGAL_ERR_NO_SPACE}})
    for (const bool forever : {false, true})
      for (const int kind : {0, 1, 2, 3}) {
        const bool reads = kind / 2;
        bool done = false;
        for (int64_t n = 1; !done; ++n) {
          ASSERT_LT(n, 200);
          World world(8192, 1);
          Spec spec;
          spec.records = 100;
          spec.direct = kind % 2;
          ParameterFileInfo info;
          if (reads) {
            ASSERT_OK(write_file(world, spec, &info));
          }
          const int before = open_descriptors();
          TestFileCalls calls;
          calls.fail(n, code, forever);
          const Status status =
              reads ? read_file(world, spec, info, 50) : write_file(world, spec, &info);
          const bool failed = calls.failed() > 0;
          calls.fail(0, 0);
          EXPECT_EQ(open_descriptors(), before) << "call " << n;
          EXPECT_EQ(world.buffers.used(), 0u);
          if (status) {
            ++failures;
            EXPECT_TRUE(status == meant || status == FRUGAL_ERR_IO) << LastMessage();
            EXPECT_NE(LastMessage().find(world.path(7)), std::string::npos) << LastMessage();
            // Where removal fails as well, or the folder is poisoned, the next writer does it.
            if (!reads && !forever && world.folder->may_write() == FRUGAL_OK) {
              EXPECT_FALSE(world.exists(7)) << "call " << n;
            }
          }
          done = !failed;
          if (done) {
            EXPECT_EQ(status, FRUGAL_OK) << LastMessage();
          }
        }
      }
  EXPECT_GT(failures, 40);
}

// Refuses all writes but those of the first block, which it counts.
class OnlyHeader : public TestFileCalls {
 public:
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    if (at == 0) {
      ++headers_;
      return FileCalls::write(fd, from, bytes, at);
    }
    errno = ENOSPC;
    return -1;
  }
  int64_t headers() const { return headers_; }

 private:
  mutable std::atomic<int64_t> headers_{0};
};

TEST(ParameterFiles, TheHeaderComesLast) {
  for (const bool has_records : {false, true}) {
    World world;
    const OnlyHeader calls;
    Spec spec;
    spec.records = has_records ? 5 : 0;
    ParameterFileInfo info;
    EXPECT_EQ(write_file(world, spec, &info), FRUGAL_ERR_NO_SPACE);
    EXPECT_EQ(calls.headers(), 0);
  }
}

// A write fails before the writer has given all records.
TEST(ParameterFiles, AnEarlyFailureIsReturnedByCollect) {
  World world(8192, 1);
  TestFileCalls calls;
  ParameterFileWriter writer;
  Spec spec;
  ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                        false, &world.queue, &world.buffers));
  EXPECT_EQ(writer.wait_written(), FRUGAL_OK);  // nothing is submitted
  calls.fail(1, ENOSPC, true);
  Status status = FRUGAL_OK;
  for (uint32_t i = 0; i < 1000; ++i) {
    ParameterFileWriter::Record record;
    ASSERT_OK(writer.add(i, 1, &record));
    fill_row(spec, i, record.bytes);
    writer.seal(record);
    if (i > 500) status = writer.wait_written();
    if (status) break;
  }
  EXPECT_EQ(status, FRUGAL_ERR_NO_SPACE);
  const std::string first = LastMessage();
  calls.fail(0, 0);
  EXPECT_EQ(writer.collect(), FRUGAL_ERR_NO_SPACE);
  ParameterFileInfo info;
  EXPECT_EQ(writer.finish(&info), FRUGAL_ERR_NO_SPACE);
  EXPECT_EQ(LastMessage(), first);
  writer.abandon();
  EXPECT_FALSE(world.exists(7));
}

// Each request for memory fails in turn. An add() that failed can be made again.
TEST(ParameterFiles, EachAllocationFails) {
  uint64_t failures = 0, survived = 0;
  // How many requests there are depends on when buffers come back.
  for (int64_t n = 1, last = 1; n < last + 30; ++n) {
    World rounds_world(8192, 1);
    Spec small;
    small.records = 1000;
    small.deletions = 10'000;
    ParameterFileInfo info;
    Status status;
    heap_test_fail_after(n);
    try {
      status = write_file(rounds_world, small, &info);
    } catch (const std::bad_alloc&) {
      status = FRUGAL_ERR_OUT_OF_MEMORY;
    }
    const bool failed = heap_test_fail_after(0) == 0;
    if (failed) last = n;
    EXPECT_EQ(rounds_world.buffers.used(), 0u);
    if (!failed) {
      EXPECT_EQ(status, FRUGAL_OK) << LastMessage();
    } else if (status) {
      ++failures;
      EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY) << LastMessage();
      EXPECT_FALSE(rounds_world.exists(7));
    } else {
      ++survived;  // a buffer was submitted later
      EXPECT_OK(read_file(rounds_world, small, info));
    }
  }
  EXPECT_GT(failures, 10u);
  EXPECT_GT(survived, 0u);

  World world(8192);
  Spec spec;
  spec.records = 20'000;
  spec.deletions = 0;
  ParameterFileWriter writer;
  ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                        false, &world.queue, &world.buffers));
  uint64_t failed = 0;
  for (uint32_t i = 0; i < spec.records; ++i) {
    ParameterFileWriter::Record record;
    Status status;
    {
      const HeapFails first(i % 3 + 1);
      status = writer.add(key_of(i), sequence_of(spec, i), &record);
    }
    if (status) {
      ++failed;
      ASSERT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
      ASSERT_OK(writer.add(key_of(i), sequence_of(spec, i), &record));
    }
    ASSERT_EQ(record.index, i);
    fill_row(spec, i, record.bytes);
    writer.seal(record);
    ASSERT_OK(writer.collect());
  }
  EXPECT_GT(failed, 50u);
  ParameterFileInfo info;
  ASSERT_OK(writer.finish(&info));
  ASSERT_OK(read_file(world, spec, info));
}

// There is no memory to submit full buffers until later.
TEST(ParameterFiles, BuffersThatCannotBeSubmitted) {
  World world(8192);
  Spec spec;
  spec.records = 1000;
  spec.deletions = 0;
  for (const bool ends : {false, true}) {
    ParameterFileWriter writer;
    ASSERT_OK(writer.open(world.folder.get(), spec.number, spec.table, spec.sequence, spec.format,
                          false, &world.queue, &world.buffers));
    std::vector<ParameterFileWriter::Record> records(spec.records);
    for (uint32_t i = 0; i < spec.records; ++i) {
      ASSERT_OK(writer.add(key_of(i), sequence_of(spec, i), &records[i]));
      fill_row(spec, i, records[i].bytes);
    }
    ParameterFileInfo info;
    {
      const HeapFails all(-1);
      for (const auto& record : records) writer.seal(record);
      EXPECT_EQ(writer.wait_written(), FRUGAL_ERR_OUT_OF_MEMORY);
      if (ends) {
        EXPECT_EQ(writer.finish(&info), FRUGAL_ERR_OUT_OF_MEMORY);
      }
    }
    EXPECT_TRUE(world.exists(spec.number));
    if (ends) break;
    EXPECT_OK(writer.finish(&info));
    EXPECT_OK(read_file(world, spec, info));
    writer.abandon();
  }
  EXPECT_FALSE(world.exists(spec.number));
  EXPECT_EQ(world.buffers.used(), 0u);
}

// --- Damage --------------------------------------------------------------------------------------

// What is wrong with a file that was changed: nothing is right that differs, and all faults have a
// status and a place.
struct Verdict {
  Status status;
  uint32_t bad_records = 0;  // of those that could be read
};

Verdict judge(World& world, const Spec& spec, const ParameterFileInfo& info) {
  ParameterFile file;
  const auto faulty = [&](Status status) -> Verdict {
    EXPECT_TRUE(status == FRUGAL_ERR_DAMAGED || status == FRUGAL_ERR_TOO_NEW ||
                status == FRUGAL_ERR_UNSUPPORTED)
        << LastMessage();
    EXPECT_NE(LastMessage().find(world.path(spec.number)), std::string::npos) << LastMessage();
    if (status == FRUGAL_ERR_DAMAGED) {
      EXPECT_NE(LastMessage().find("at byte"), std::string::npos) << LastMessage();
    }
    return {status};
  };
  if (Status s = ParameterFile::open(*world.folder, spec.number, false, &file)) return faulty(s);
  if (Status s = file.expect(info)) return faulty(s);
  const Blocks column(file.column_blocks() * kFileBlock);
  auto* blocks = reinterpret_cast<ColumnBlock*>(column.at);
  if (Status s = file.read_column(0, file.column_blocks(), blocks)) return faulty(s);
  for (uint64_t i = 0; i < info.entries; ++i)
    EXPECT_EQ(blocks[i / 255].entries[i % 255].key, key_of(i));
  const uint32_t n = static_cast<uint32_t>(info.records);
  const Blocks memory(file.records_room(0, n));
  std::vector<char> row(spec.format.record_bytes());
  Verdict verdict{file.read_records(0, n, memory.at)};
  if (verdict.status) faulty(verdict.status);
  EXPECT_EQ(file.read_unverified(0, n, memory.at), FRUGAL_OK);
  for (uint32_t i = 0; i < n; ++i) {
    const char* record = file.record_in(memory.at, 0, i);
    const uint64_t key = key_of(i);
    if (Status s = file.verify_record(i, record, &key)) {
      EXPECT_EQ(s, FRUGAL_ERR_DAMAGED);
      ++verdict.bad_records;
      for (const std::string& part :
           {world.path(spec.number), "at byte " + std::to_string(file.record_at(i)),
            "record " + std::to_string(i), "table " + std::to_string(spec.table),
            std::to_string(key)})
        EXPECT_NE(LastMessage().find(part), std::string::npos) << LastMessage() << part;
    } else {
      fill_row(spec, i, row.data());
      EXPECT_EQ(std::memcmp(record, row.data(), spec.format.row_bytes()), 0) << i;
    }
  }
  EXPECT_EQ(verdict.status != FRUGAL_OK, verdict.bad_records > 0);
  return verdict;
}

struct Damaged {
  explicit Damaged(const Spec& of) : spec(of) {
    EXPECT_OK(write_file(world, spec, &info));
    good = bytes_of(world, spec.number);
    EXPECT_EQ(good.size(), info.length);
    fd = open(world.path(spec.number).c_str(), O_RDWR);
    EXPECT_GE(fd, 0);
    column = kFileBlock + (spec.records * spec.format.record_bytes() + 4095) / 4096 * 4096;
  }
  ~Damaged() { close(fd); }
  void put(size_t at, const std::string& bytes) const {
    ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(bytes.size()));
  }
  void restore(size_t at, size_t bytes) const { put(at, good.substr(at, bytes)); }
  Verdict judged() { return judge(world, spec, info); }
  World world;
  const Spec spec;
  ParameterFileInfo info;
  std::string good;
  int fd = -1;
  size_t column;
};

TEST(Damage, OfEachByte) {
  Spec spec;
  spec.format = RowFormat::of(3, ElementType::kFloat32, FRUGAL_ROWWISE_ADAGRAD);
  spec.records = 5;
  Damaged file(spec);
  EXPECT_EQ(file.judged().status, FRUGAL_OK);
  const size_t records_end = kFileBlock + spec.records * spec.format.record_bytes();
  uint64_t faults = 0;
  const frugal_test::Slice slice(1);
  for (size_t at = slice.first; at < file.good.size(); at += slice.step) {
    const char was = file.good[at];
    for (const char now : {'\0', '\xff', static_cast<char>(was ^ (1 << at % 8))}) {
      if (now == was) continue;
      file.put(at, std::string(1, now));
      const Verdict verdict = file.judged();
      // The rest of the last block of records belongs to no record.
      const bool unused = at >= records_end && at < file.column;
      EXPECT_EQ(verdict.status == FRUGAL_OK, unused) << "byte " << at << " is " << int{now};
      const bool record = at >= kFileBlock && at < records_end;
      EXPECT_EQ(verdict.bad_records, record ? 1u : 0u) << "byte " << at;
      faults += verdict.status != FRUGAL_OK;
      if (HasFailure()) FAIL();
    }
    file.restore(at, 1);
  }
  EXPECT_GT(faults, 2 * 2 * kFileBlock / slice.sliced);
  EXPECT_EQ(file.judged().status, FRUGAL_OK);
}

TEST(Damage, OfTheLength) {
  Spec spec;
  spec.records = 5;
  Damaged file(spec);
  for (size_t size = file.good.size() + 2; size-- > 0;) {
    if (size == file.good.size()) continue;
    ASSERT_EQ(ftruncate(file.fd, static_cast<off_t>(size)), 0);
    EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED) << size;
    EXPECT_NE(LastMessage().find(std::to_string(size < kFileBlock ? kFileBlock : size)),
              std::string::npos)
        << LastMessage();
    if (HasFailure()) FAIL();
    // A longer file ends in zeros; a shorter one needs no more of its bytes.
    if (size > file.good.size()) {
      ASSERT_EQ(ftruncate(file.fd, 0), 0);
      file.put(0, file.good);
    }
  }
  file.put(0, file.good);
  EXPECT_EQ(file.judged().status, FRUGAL_OK);
}

TEST(Damage, BytesOfOtherPlaces) {
  Spec spec;
  spec.records = 600;
  Damaged file(spec);
  const size_t record = spec.format.record_bytes();
  const auto part = [&](size_t at, size_t bytes) { return file.good.substr(at, bytes); };
  // Two records change places.
  for (const auto& [a, b] : {std::pair<size_t, size_t>{0, 1}, {5, 599}, {300, 17}}) {
    file.put(kFileBlock + a * record, part(kFileBlock + b * record, record));
    EXPECT_EQ(file.judged().bad_records, 1u);
    file.put(kFileBlock + b * record, part(kFileBlock + a * record, record));
    EXPECT_EQ(file.judged().bad_records, 2u);
    file.restore(0, file.good.size());
  }
  // Blocks of the column, and the header in place of one.
  file.put(file.column, part(file.column + kFileBlock, kFileBlock));
  EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED);
  file.put(file.column + kFileBlock, part(file.column, kFileBlock));
  EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED);
  file.restore(0, file.good.size());
  file.put(file.column, part(0, kFileBlock));
  EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED);
  file.restore(0, file.good.size());

  // The same rows in another file, or of another table: nothing of it can take the place.
  for (const bool of_table : {false, true}) {
    World world;
    Spec other = spec;
    if (of_table)
      other.table = 4;
    else
      other.number = 6;
    ParameterFileInfo info;
    ASSERT_OK(write_file(world, other, &info));
    const std::string bytes = bytes_of(world, other.number);
    ASSERT_EQ(bytes.size(), file.good.size());
    for (const size_t i : {0, 1, 299, 599}) {
      const size_t at = kFileBlock + i * record;
      ASSERT_EQ(bytes.substr(at, record - 8), part(at, record - 8));
      file.put(at, bytes.substr(at, record));
      EXPECT_EQ(file.judged().bad_records, 1u);
      file.restore(at, record);
    }
    for (const size_t at : {file.column, file.column + 2 * kFileBlock, size_t{0}}) {
      file.put(at, bytes.substr(at, kFileBlock));
      EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED) << at;
      file.restore(at, kFileBlock);
    }
    file.put(0, bytes);  // the whole file
    EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED);
    file.restore(0, file.good.size());
  }
  EXPECT_EQ(file.judged().status, FRUGAL_OK);

  // An older file of the same number and sizes. Its header is good, so only the manifest shows it.
  World world;
  Spec older = spec;
  older.sequence = spec.sequence - 1;
  ParameterFileInfo info;
  ASSERT_OK(write_file(world, older, &info));
  file.put(0, bytes_of(world, older.number));
  EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED);
  EXPECT_NE(LastMessage().find("the manifest lists"), std::string::npos) << LastMessage();
}

TEST(Damage, OfRecordsAtRandom) {
  Spec spec;
  spec.format = RowFormat::of(7, ElementType::kFloat32, FRUGAL_ADAM);
  spec.records = 40;
  Damaged file(spec);
  std::mt19937_64 random(test_seed());
  const size_t record = spec.format.record_bytes(), end = spec.records * record;
  uint64_t faults = 0;
  const uint64_t rounds = test_rounds(500);
  for (uint64_t round = 0; round < rounds; ++round) {
    const size_t at = random() % end, n = 1 + random() % std::min<size_t>(end - at, 200);
    std::string bytes = file.good.substr(kFileBlock + at, n);
    switch (random() % 5) {
      case 0:
        bytes[0] = static_cast<char>(bytes[0] ^ 1 << random() % 8);
        break;
      case 1:
        bytes.assign(n, static_cast<char>(random() % 2 ? 0 : 255));
        break;
      case 2:
        for (char& c : bytes) c = static_cast<char>(random());
        break;
      case 3:  // from elsewhere, often a whole record
        bytes = file.good.substr(kFileBlock + random() % (end - n), n);
        break;
      default:  // a write that was torn
        std::fill(bytes.begin() + static_cast<long>(random() % n), bytes.end(), 0);
    }
    const bool same = bytes == file.good.substr(kFileBlock + at, n);
    file.put(kFileBlock + at, bytes);
    const Verdict verdict = file.judged();
    EXPECT_EQ(verdict.status == FRUGAL_OK, same);
    faults += verdict.bad_records;
    file.restore(kFileBlock + at, n);
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
  EXPECT_GT(faults, rounds / 2);
}

// Headers with a right checksum.
TEST(Damage, ForgedHeaders) {
  using Header = ParameterFileHeader;
  Spec spec;
  Damaged file(spec);
  struct Case {
    std::function<void(Header*)> make;
    Status status;
    const char* text;
  };
  const Case cases[] = {
      {[](Header*) {}, FRUGAL_OK, ""},
      {[](Header* h) { h->version = 2; }, FRUGAL_ERR_TOO_NEW, "version 2"},
      {[](Header* h) { h->features = uint64_t{1} << 63; }, FRUGAL_ERR_TOO_NEW, "features 8000"},
      {[](Header* h) { h->byte_order = 0x04030201; }, FRUGAL_ERR_UNSUPPORTED, "byte order"},
      {[](Header* h) { h->byte_order = 0x04030202; }, FRUGAL_ERR_DAMAGED, "byte 0:"},
      {[](Header* h) { h->number = 8; }, FRUGAL_ERR_DAMAGED, "it is file 8"},
      {[](Header* h) { h->format.dim = 0; }, FRUGAL_ERR_DAMAGED, "sizes that no row has"},
      {[](Header* h) { h->record_bytes += 8; }, FRUGAL_ERR_DAMAGED, "sizes that no row has"},
      {[](Header* h) { h->record_bytes = UINT64_MAX; }, FRUGAL_ERR_DAMAGED, "no row"},
      {[](Header* h) { h->records = uint64_t{1} << 60; }, FRUGAL_ERR_DAMAGED, "contradict"},
      {[](Header* h) { h->records = h->entries = uint64_t{1} << 60; }, FRUGAL_ERR_DAMAGED,
       "contradict"},
      {[](Header* h) { h->entries = 256; }, FRUGAL_ERR_DAMAGED, "contradict"},
      {[](Header* h) { h->entries = UINT64_MAX; }, FRUGAL_ERR_DAMAGED, "contradict"},
      {[](Header* h) { h->column_at = 0; }, FRUGAL_ERR_DAMAGED, "contradict"},
      {[](Header* h) { h->length += 4096; }, FRUGAL_ERR_DAMAGED, "contradict"},
      {[](Header* h) {
         // Sizes that fit each other, and not the file: 2^20 records of 16 MiB.
         h->format = {1u << 22, ElementType::kFloat32, 0, 0, 1u << 24, 0};
         h->record_bytes = h->format.record_bytes();
         h->records = h->entries = kMostRecords;
         h->column_at = kFileBlock + h->records * h->record_bytes;
         h->length = h->column_at + column_bytes(h->entries);
       },
       FRUGAL_ERR_DAMAGED, "it has 12288 bytes, not"},
      {[](Header* h) { h->sequence = 5; }, FRUGAL_ERR_DAMAGED, "the manifest lists"},
      {[](Header* h) { h->table = 5; }, FRUGAL_ERR_DAMAGED, "it is of table 5"},
  };
  for (const Case& forged : cases) {
    Header header;
    std::memcpy(&header, file.good.data(), sizeof header);
    forged.make(&header);
    header.checksum = header_checksum(header);
    file.put(0, std::string(reinterpret_cast<const char*>(&header), sizeof header));
    const HeapCount count;
    ParameterFile opened;
    Status status = ParameterFile::open(*file.world.folder, spec.number, false, &opened);
    if (status == FRUGAL_OK) status = opened.expect(file.info);
    EXPECT_LT(count.so_far(), 20);
    EXPECT_EQ(status, forged.status) << forged.text << ": " << LastMessage();
    if (status) {
      EXPECT_NE(LastMessage().find(forged.text), std::string::npos) << LastMessage();
      EXPECT_NE(LastMessage().find(file.world.path(7)), std::string::npos) << LastMessage();
    }
  }
}

// The manifest means another file in one thing.
TEST(Damage, AnotherFileThanListed) {
  Spec spec;
  Damaged file(spec);
  ParameterFile opened;
  ASSERT_OK(ParameterFile::open(*file.world.folder, spec.number, false, &opened));
  EXPECT_OK(opened.expect(file.info));
  using Info = ParameterFileInfo;
  for (uint64_t Info::*const member : {&Info::number, &Info::table, &Info::sequence, &Info::records,
                                       &Info::entries, &Info::length, &Info::checksum}) {
    Info other = file.info;
    other.*member += 1;
    EXPECT_EQ(opened.expect(other), FRUGAL_ERR_DAMAGED);
  }
}

// A block whose checksum is right, and whose count is not.
TEST(Damage, ForgedCounts) {
  Spec spec;
  Damaged file(spec);
  ColumnBlock block;
  std::memcpy(&block, &file.good[file.column], sizeof block);
  for (const uint32_t count : {0u, 4u, 6u, 255u, 256u, UINT32_MAX}) {
    block.count = count;
    block.checksum = checksum(&block, offsetof(ColumnBlock, checksum),
                              ChecksumSeeds(ChecksumKind::kColumn, spec.table, spec.number).at(0));
    file.put(file.column, std::string(reinterpret_cast<const char*>(&block), sizeof block));
    EXPECT_EQ(file.judged().status, FRUGAL_ERR_DAMAGED) << count;
  }
}

TEST(Damage, AFileThatIsNone) {
  World world;
  ParameterFile file;
  EXPECT_EQ(ParameterFile::open(*world.folder, 7, false, &file), FRUGAL_ERR_NOT_FOUND);
  for (const std::string& bytes : {std::string(), std::string("#!/bin/sh\n"), std::string(12288, 0),
                                   std::string(12288, 'x')}) {
    put_bytes(world, 7, bytes);
    EXPECT_EQ(ParameterFile::open(*world.folder, 7, true, &file), FRUGAL_ERR_DAMAGED);
    EXPECT_FALSE(file.file()->operator bool());
  }
}

// The bytes of a file of this version, which later versions have to read.
TEST(ParameterFiles, TheBytesStayTheSame) {
  World world;
  Spec spec;
  spec.records = 300;
  ParameterFileInfo info;
  ASSERT_OK(write_file(world, spec, &info));
  const std::string bytes = bytes_of(world, spec.number);
  EXPECT_EQ(info.checksum, 3982039335204874774u);
  EXPECT_EQ(checksum(bytes.data(), bytes.size(), 0), 10216691590088282669u);
}

// --- Checksums -----------------------------------------------------------------------------------

// The values of the published algorithm, which no processor may change. And seeds of neighbouring
// places are unlike each other.
TEST(Checksums, AreTheSameEverywhere) {
  EXPECT_TRUE(checksums_are_built());
  EXPECT_EQ(checksum("", 0, 0), 0x2d06800538d394c2u);
  std::vector<uint64_t> seen;
  for (const ChecksumKind kind :
       {ChecksumKind::kHeader, ChecksumKind::kRecord, ChecksumKind::kColumn})
    for (uint64_t table = 0; table < 10; ++table)
      for (uint64_t file = 0; file < 10; ++file) {
        const ChecksumSeeds seeds(kind, table, file);
        for (uint64_t place = 0; place < 100; ++place) seen.push_back(seeds.at(place));
      }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

// --- Parts of a file -----------------------------------------------------------------------------

TEST(RowFormats, DifferInAnyField) {
  const RowFormat format = RowFormat::of(4, ElementType::kFloat32, FRUGAL_ADAM);
  EXPECT_EQ(format, format);
  for (uint32_t RowFormat::*field : {&RowFormat::dim, &RowFormat::state_columns,
                                     &RowFormat::value_bytes, &RowFormat::state_column_bytes}) {
    RowFormat other = format;
    ++(other.*field);
    EXPECT_FALSE(other == format);
  }
  RowFormat other = format;
  other.element = ElementType::kBfloat16;
  EXPECT_FALSE(other == format);
  other = format;
  other.optimizer = FRUGAL_FTRL;
  EXPECT_FALSE(other == format);
}

TEST(ParameterFiles, EntriesOfSomeBlocks) {
  World world;
  Spec spec;
  spec.records = 1000;
  spec.deletions = 0;
  ParameterFileInfo info;
  ASSERT_OK(write_file(world, spec, &info));
  ParameterFile file;
  ASSERT_OK(ParameterFile::open(*world.folder, spec.number, false, &file));
  const Blocks column(4 * kFileBlock);
  auto* blocks = reinterpret_cast<ColumnBlock*>(column.at);
  ASSERT_OK(file.read_column(0, 4, blocks));
  uint64_t next = 300;
  const auto look = [&](uint64_t at, const ColumnEntry* entries, size_t n) -> Status {
    EXPECT_EQ(at, next);
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(entries[i].key, key_of(at + i));
    next += n;
    return FRUGAL_OK;
  };
  ASSERT_OK(file.each_entry(blocks + 1, 1, 3, 300, 900, look));
  EXPECT_EQ(next, 900u);
  const auto refuse = [](uint64_t, const ColumnEntry*, size_t) -> Status {
    return FRUGAL_ERR_BUSY;
  };
  EXPECT_EQ(file.each_entry(blocks + 1, 1, 3, 300, 900, refuse), FRUGAL_ERR_BUSY);
  ++blocks[2].entries[7].key;
  next = 300;
  EXPECT_EQ(file.each_entry(blocks + 1, 1, 3, 300, 900, look), FRUGAL_ERR_DAMAGED);
  EXPECT_EQ(next, 510u);
  EXPECT_EQ(recorded_error().offset, file.entry_at(510));
}

}  // namespace frugal::parameter_file_test
