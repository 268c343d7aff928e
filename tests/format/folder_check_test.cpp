// Checks of folders: a sound folder has no fault, each kind of damage is found and named, and the
// folder's writer goes on meanwhile.
#include "format/folder_check.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/file_calls.h"
#include "support/inside.h"
#include "support/manifests.h"
#include "support/temporary_folder.h"

namespace frugal::folder_check_test {

using Kind = FolderFinding::Kind;
using Keys = std::vector<uint64_t>;

Keys range(uint64_t from, uint64_t to) {
  Keys keys;
  for (; from < to; ++from) keys.push_back(from);
  return keys;
}
uint64_t hashed(uint64_t i) { return i == 0 ? 0 : mix(i); }
Keys hashed(uint64_t from, uint64_t to) {
  Keys keys;
  for (; from < to; ++from) keys.push_back(hashed(from));
  return keys;
}

struct FileSpec {
  uint64_t number, table, sequence;
  RowFormat format;
  Keys keys, deletions;
  std::function<uint64_t(uint64_t)> sequence_of = nullptr;  // of an entry
};

// A folder that is made with the writers.
struct World {
  World() {
    EXPECT_OK(Folder::open(place.path().c_str(), Folder::Use::kCreate, &folder));
    EXPECT_OK(queue.open(1));
  }
  ManifestFile write(const FileSpec& spec) {
    ParameterFileWriter writer;
    ManifestFile made;
    EXPECT_OK(writer.open(folder.get(), spec.number, spec.table, spec.sequence, spec.format, false,
                          &queue, &buffers));
    const auto sequence = [&](uint64_t i) {
      return spec.sequence_of ? spec.sequence_of(i) : spec.sequence;
    };
    uint64_t i = 0;
    for (const uint64_t key : spec.keys) {
      ParameterFileWriter::Record record;
      EXPECT_OK(writer.add(key, sequence(i++), &record));
      const uint64_t word = mix(key + spec.sequence);
      std::memset(record.bytes, static_cast<int>(word & 0xff), spec.format.row_bytes());
      std::memcpy(record.bytes, &word, std::min<size_t>(8, spec.format.row_bytes()));
      writer.seal(record);
    }
    for (const uint64_t key : spec.deletions) EXPECT_OK(writer.add_deletion(key, sequence(i++)));
    EXPECT_OK(writer.finish(&made.info));
    made.live = made.info.records;
    return made;
  }
  uint64_t blobs(Manifest* m, const std::vector<std::string>& of_ranks) {
    std::string all = "a gap";
    for (uint32_t r = 0; r < of_ranks.size(); ++r) {
      m->blobs.push_back(
          {r, all.size(), of_ranks[r].size(),
           checksum(of_ranks[r].data(), of_ranks[r].size(), blob_seed(m->sequence, r))});
      all += of_ranks[r];
    }
    place.Write(blob_name(m->sequence).c_str(), all);
    return m->blob_bytes = all.size();
  }
  void remake(const Manifest& m) {
    EXPECT_OK(folder->remove(manifest_name(m.sequence).c_str()));
    EXPECT_OK(write_manifest(*folder, m));
  }
  void change(const std::string& name, const std::function<void(std::string*)>& how) const {
    std::string bytes = place.Read(name);
    how(&bytes);
    place.Write(name, bytes);
  }
  void flip(const std::string& name, size_t at) const {
    const int fd = open((place / name).c_str(), O_RDWR);
    char byte = 0;
    EXPECT_EQ(pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
    byte = static_cast<char>(byte ^ 0x10);
    EXPECT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
    close(fd);
  }
  TemporaryFolder place;
  std::shared_ptr<Folder> folder;
  RecordBuffers buffers{size_t{1} << 20, size_t{1} << 20};
  IoQueue queue;
};

ManifestTable table(uint64_t number, const char* name, int32_t key_space, uint64_t rows,
                    uint32_t dim, int32_t optimizer) {
  ManifestTable t;
  t.number = number;
  t.name = name;
  t.config.key_space = key_space;
  t.config.rows = rows;
  t.config.dim = dim;
  t.config.optimizer.kind = t.optimizer.kind = optimizer;
  t.format = RowFormat::of(dim, ElementType::kFloat32, optimizer);
  return t;
}

void add(ManifestTable* t, ManifestFile file, uint64_t live) {
  file.live = live;
  t->files.push_back(file);
  t->live_rows += live;
}

constexpr uint64_t kUsers = 3, kItems = 5;

// Two checkpoints of a hashed and of a dense table. The second one has two files more, deletions
// and blobs.
struct TwoCheckpoints : World {
  TwoCheckpoints() {
    const ManifestTable users = table(kUsers, "users", FRUGAL_HASHED, 5000, 4, FRUGAL_ADAGRAD);
    const ManifestTable items = table(kItems, "it\"e\nms", FRUGAL_DENSE, 150, 7, FRUGAL_SGD);
    const ManifestFile one = write({1, kUsers, 1, users.format, hashed(0, 600), {}});
    const ManifestFile two = write({2, kItems, 1, items.format, range(0, 100), {}});
    first.sequence = 1;
    first.step = 10;
    first.name = "first";
    first.next_table = 6;
    first.next_file = 3;
    first.tables = {users, items};
    add(&first.tables[0], one, 600);
    add(&first.tables[1], two, 100);
    EXPECT_OK(write_manifest(*folder, first));
    second = first;
    second.sequence = 2;
    second.step = 20;
    second.name = "";
    second.world_size = 2;
    second.created = 1'000'000'000;
    second.next_file = 5;
    second.tables = {users, items};
    // A row that is deleted and comes to be again has an entry of each kind.
    add(&second.tables[0], one, 495);
    add(&second.tables[0], write({3, kUsers, 2, users.format, hashed(100, 200), hashed(0, 5)}),
        100);
    second.tables[0].files[1] = rewritten(users);
    add(&second.tables[1], two, 50);
    add(&second.tables[1], write({4, kItems, 2, items.format, range(50, 150), {}}), 100);
    blobs(&second, {std::string(10'000, 'x'), "", "yz"});
    second.world_size = 3;
    EXPECT_OK(write_manifest(*folder, second));
  }
  ManifestFile rewritten(const ManifestTable& users) {
    EXPECT_OK(folder->remove("3.rows"));
    Keys deletions = hashed(0, 5);
    deletions.push_back(hashed(150));
    return write({3, kUsers, 2, users.format, hashed(100, 200), deletions});
  }
  Manifest first, second;
};

struct Found : FolderReport {
  void found(const FolderFinding& f) override {
    findings.push_back(f);
    lines += (f.line() + "\n").c_str();
  }
  void checkpoint(const Manifest& m) override { checkpoints.push_back(m.sequence); }
  std::vector<FolderFinding> of(Kind kind) const {
    std::vector<FolderFinding> some;
    for (const FolderFinding& f : findings)
      if (f.kind == kind) some.push_back(f);
    return some;
  }
  std::vector<FolderFinding> findings;
  std::vector<uint64_t> checkpoints;
  std::string lines;
  FolderCounts counts;
  Status status = FRUGAL_OK;
};

Found checked(const std::string& path, FolderRead read = FolderRead::kAll,
              size_t key_bytes = kFolderKeyBytes) {
  Found found;
  found.status = check_folder(path.c_str(), read, &found, &found.counts, key_bytes);
  EXPECT_EQ(found.counts.faults, found.of(Kind::kFault).size());
  EXPECT_EQ(found.counts.unread, found.of(Kind::kUnread).size());
  EXPECT_EQ(found.counts.notes, found.of(Kind::kNote).size());
  return found;
}
Found checked(const World& world) {
  Found found = checked(world.place.path());
  EXPECT_EQ(found.status, FRUGAL_OK) << LastMessage();
  return found;
}
// All findings, as lines.
std::string lines_of(const World& world) { return checked(world).lines; }

size_t record_bytes(const ManifestTable& t) { return t.format.record_bytes(); }

TEST(FolderCheck, ASoundFolder) {
  const TwoCheckpoints world;
  const Found found = checked(world);
  EXPECT_EQ(found.lines, "");
  EXPECT_EQ(found.checkpoints, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(found.counts.checkpoints, 2u);
  EXPECT_EQ(found.counts.files, 5u);
  EXPECT_EQ(found.counts.records, 900u);
  uint64_t bytes = 0;
  for (const std::string& name : world.place.Files()) bytes += world.place.Read(name).size();
  EXPECT_EQ(found.counts.bytes, bytes);
  const Found listed = checked(world.place.path(), FolderRead::kManifests);
  EXPECT_EQ(listed.lines, "");
  EXPECT_EQ(listed.checkpoints, found.checkpoints);
  EXPECT_EQ(listed.counts.files, 5u);
  EXPECT_EQ(listed.counts.records, 0u);
  EXPECT_EQ(listed.counts.bytes, bytes);
  const TemporaryFolder empty;
  EXPECT_EQ(checked(empty.path()).lines, "");
}

TEST(FolderCheck, FoldersThatCannotBeRead) {
  const TemporaryFolder place;
  EXPECT_EQ(checked(place / "none").status, FRUGAL_ERR_NOT_FOUND);
  place.Write("file", "");
  EXPECT_NE(checked(place / "file").status, FRUGAL_OK);
}

// --- Records and columns -------------------------------------------------------------------------

TEST(FolderCheck, EachByteOfARecordCounts) {
  TwoCheckpoints world;
  const size_t each = record_bytes(world.first.tables[0]);
  for (const size_t record : {0u, 254u, 255u, 599u})
    for (size_t at = 0; at < each; at += 3) {
      const size_t offset = 4096 + record * each;
      world.flip("1.rows", offset + at);
      EXPECT_EQ(lines_of(world),
                "fault file=1.rows offset=" + std::to_string(offset) +
                    " table=3 name=\"users\" key=" + std::to_string(hashed(record)) + ": record " +
                    std::to_string(record) + " has a wrong checksum\n");
      world.flip("1.rows", offset + at);
    }
  // Of the second piece that is read. The name has what no line may have.
  world.flip("4.rows", 4096 + 99 * record_bytes(world.first.tables[1]));
  EXPECT_EQ(lines_of(world),
            "fault file=4.rows offset=" +
                std::to_string(4096 + 99 * record_bytes(world.first.tables[1])) +
                " table=5 name=\"it\\\"e\\x0ams\" key=149: record 99 has a wrong checksum\n");
}

TEST(FolderCheck, RecordsOfSeveralPieces) {
  World world;
  Manifest m;
  m.sequence = 1;
  m.next_table = m.next_file = 2;
  m.tables = {table(1, "wide", FRUGAL_DENSE, 3000, 1500, FRUGAL_SGD)};
  add(&m.tables[0], world.write({1, 1, 1, m.tables[0].format, range(0, 3000), {}}), 3000);
  EXPECT_OK(write_manifest(*world.folder, m));
  EXPECT_EQ(lines_of(world), "");
  const size_t each = record_bytes(m.tables[0]);
  std::string expected;
  for (const size_t record : {0u, 695u, 696u, 697u, 698u, 1400u, 2999u}) {
    world.flip("1.rows", 4096 + record * each + 77);
    expected += "fault file=1.rows offset=" + std::to_string(4096 + record * each) +
                " table=1 name=\"wide\" key=" + std::to_string(record) + ": record " +
                std::to_string(record) + " has a wrong checksum\n";
  }
  EXPECT_EQ(lines_of(world), expected);
}

TEST(FolderCheck, Columns) {
  TwoCheckpoints world;
  const size_t column = world.second.tables[0].files[0].info.length - 3 * 4096;
  for (const size_t at : {0u, 8u, 4079u, 4080u, 4084u, 4095u}) {
    world.flip("1.rows", column + 4096 + at);
    EXPECT_EQ(lines_of(world), "fault file=1.rows offset=" + std::to_string(column + 4096) +
                                   " table=3 name=\"users\": block 1 of the column has a wrong "
                                   "checksum or a wrong count\n");
    world.flip("1.rows", column + 4096 + at);
  }
  // A record whose key cannot be read, and one whose can.
  const size_t each = record_bytes(world.first.tables[0]);
  world.flip("1.rows", column + 4096);
  world.flip("1.rows", 4096 + 300 * each);
  world.flip("1.rows", 4096 + 511 * each);
  EXPECT_EQ(lines_of(world),
            "fault file=1.rows offset=" + std::to_string(4096 + 300 * each) +
                " table=3 name=\"users\": record 300 has a wrong checksum, and so has the block of "
                "the column with its key\n"
                "fault file=1.rows offset=" +
                std::to_string(4096 + 511 * each) +
                " table=3 name=\"users\" key=" + std::to_string(hashed(511)) +
                ": record 511 has a wrong checksum\n"
                "fault file=1.rows offset=" +
                std::to_string(column + 4096) +
                " table=3 name=\"users\": block 1 of the column has a wrong checksum or a wrong "
                "count\n");
}

TEST(FolderCheck, EntriesThatNoWriterWrites) {
  TwoCheckpoints world;
  const auto again = [&](FileSpec spec) {
    EXPECT_OK(world.folder->remove(rows_name(spec.number).c_str()));
    ManifestTable& t = world.second.tables[spec.table == kUsers ? 0 : 1];
    t.files[1] = world.write(spec);
    world.remake(world.second);
    return t.files[1].info.length - column_bytes(t.files[1].info.entries);
  };
  const RowFormat users = world.second.tables[0].format, items = world.second.tables[1].format;
  size_t at = again({3, kUsers, 2, users, hashed(100, 200), hashed(0, 5), [](uint64_t i) {
                       return i == 7 ? 1u : i == 102 ? 3u : 2u;
                     }});
  EXPECT_EQ(lines_of(world), "fault file=3.rows offset=" + std::to_string(at + 7 * 16) +
                                 " table=3 name=\"users\" key=" + std::to_string(hashed(107)) +
                                 ": entry 7 is of checkpoint 1, and the file of 2\n"
                                 "fault file=3.rows offset=" +
                                 std::to_string(at + 102 * 16) +
                                 " table=3 name=\"users\" key=" + std::to_string(hashed(2)) +
                                 ": entry 102 is of checkpoint 3, and the file of 2\n");
  again({3, kUsers, 2, users, hashed(100, 200), hashed(0, 5)});
  EXPECT_EQ(lines_of(world), "");
  Keys ids = range(50, 150);
  ids[99] = 150;
  at = again({4, kItems, 2, items, ids, {3}});
  const std::string name = " table=5 name=\"it\\\"e\\x0ams\"";
  EXPECT_EQ(lines_of(world),
            "fault file=4.rows offset=" + std::to_string(at + 99 * 16) + name +
                " key=150: entry 99 has an id that is not below 150\n"
                "fault file=4.rows offset=" +
                std::to_string(at + 100 * 16) + name +
                " key=3: entry 100 is a deletion, and rows of dense tables are not deleted\n");
}

// --- Headers, and other files under a name -------------------------------------------------------

TEST(FolderCheck, Headers) {
  TwoCheckpoints world;
  const std::string begin = "fault file=3.rows offset=", of = " table=3 name=\"users\": ";
  for (const size_t at : {8u, 12u, 16u, 24u, 40u, 48u, 80u, 104u, 2000u, 4095u}) {
    world.flip("3.rows", at);
    EXPECT_EQ(lines_of(world), begin + "0" + of + "its header has a wrong checksum\n") << at;
    world.flip("3.rows", at);
  }
  const std::string whole = world.place.Read("3.rows");
  world.flip("3.rows", 3);
  EXPECT_EQ(lines_of(world),
            begin + "0" + of + "it is no parameter file, or one that was not completed\n");
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4095}}) {
    world.place.Write("3.rows", whole.substr(0, size));
    EXPECT_EQ(lines_of(world),
              begin + std::to_string(size) + of + "it ends within its header, of 4096 bytes\n");
  }
  for (const size_t size : {size_t{4096}, whole.size() - 4096, whole.size() - 1}) {
    world.place.Write("3.rows", whole.substr(0, size));
    EXPECT_EQ(lines_of(world), begin + std::to_string(size) + of + "it has " +
                                   std::to_string(size) + " bytes, not " +
                                   std::to_string(whole.size()) + "\n");
  }
  world.place.Write("3.rows", whole + "x");
  EXPECT_EQ(lines_of(world), begin + std::to_string(whole.size()) + of + "it has " +
                                 std::to_string(whole.size() + 1) + " bytes, not " +
                                 std::to_string(whole.size()) + "\n");
}

// Gives a header the checksum of what it says.
void seal_header(std::string* bytes, const std::function<void(ParameterFileHeader*)>& how) {
  ParameterFileHeader h;
  std::memcpy(&h, bytes->data(), sizeof h);
  how(&h);
  h.checksum = header_checksum(h);
  std::memcpy(bytes->data(), &h, sizeof h);
}

TEST(FolderCheck, OtherVersionsAndMachines) {
  TwoCheckpoints world;
  const std::string rows = world.place.Read("3.rows"), manifest = world.place.Read("2.checkpoint");
  const auto is_unread = [&](const std::string& file, const std::string& says) {
    const Found found = checked(world);
    EXPECT_EQ(found.counts.faults, 0u);
    const std::vector<FolderFinding> unread = found.of(Kind::kUnread);
    ASSERT_EQ(unread.size(), 1u) << found.lines;
    EXPECT_EQ(std::string(unread[0].file.c_str()), file);
    EXPECT_NE(unread[0].what.find(says.c_str()), String::npos) << found.lines;
  };
  world.change("3.rows", [](std::string* b) { seal_header(b, [](auto* h) { h->version = 2; }); });
  is_unread("3.rows", "has version 2");
  world.place.Write("3.rows", rows);
  world.change("3.rows", [](std::string* b) { std::reverse(b->begin() + 8, b->begin() + 12); });
  is_unread("3.rows", "was written by a machine of another byte order");
  world.place.Write("3.rows", rows);
  const auto envelope = [&](const std::function<void(ManifestEnvelope*)>& how) {
    world.change("2.checkpoint", [&](std::string* b) {
      ManifestEnvelope e;
      std::memcpy(&e, b->data(), sizeof e);
      how(&e);
      e.envelope_sum = checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0);
      std::memcpy(b->data(), &e, sizeof e);
    });
  };
  envelope([](auto* e) { e->features = 4; });
  is_unread("2.checkpoint", "features 0x4");
  world.place.Write("2.checkpoint", manifest);
  envelope([](auto* e) { e->byte_order = 0x04030201; });
  is_unread("2.checkpoint", "was written by a machine of the other byte order");
}

TEST(FolderCheck, AnotherFileUnderTheName) {
  TwoCheckpoints world;
  const std::string one = world.place.Read("1.rows"), three = world.place.Read("3.rows");
  const std::string of = " table=3 name=\"users\": ";
  world.place.Write("1.rows", three);
  world.place.Write("3.rows", one);
  EXPECT_EQ(lines_of(world),
            "fault file=1.rows offset=24" + of + "it is file 3, under a wrong name\n" +
                "fault file=3.rows offset=24" + of + "it is file 1, under a wrong name\n");
  world.place.Write("1.rows", one);
  const auto becomes = [&](FileSpec spec, const std::string& says) {
    EXPECT_OK(world.folder->remove("3.rows"));
    world.write(spec);
    const std::string lines = lines_of(world);
    EXPECT_EQ(lines.substr(0, lines.find(says) + says.size()), "fault file=3.rows " + says);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1) << lines;
  };
  const RowFormat users = world.second.tables[0].format;
  Keys deletions = hashed(0, 5);
  deletions.push_back(hashed(150));
  FileSpec spec{3, kUsers, 2, users, hashed(100, 200), deletions};
  spec.table = 4;
  becomes(spec, "offset=32" + of + "it is of table 4, and checkpoint 2 lists 3\n");
  spec.table = kUsers;
  spec.sequence = 1;
  becomes(spec, "offset=40" + of + "it is of checkpoint 1, and checkpoint 2 lists 2\n");
  spec.sequence = 2;
  spec.keys.pop_back();
  becomes(spec, "offset=80" + of + "its records are 99, and checkpoint 2 lists 100\n");
  spec.keys.push_back(7);
  spec.deletions.push_back(8);
  becomes(spec, "offset=88" + of + "its entries are 107, and checkpoint 2 lists 106\n");
  spec.deletions.pop_back();
  spec.format = RowFormat::of(8, ElementType::kFloat32, FRUGAL_ADAGRAD);
  becomes(spec, "offset=104" + of + "its length is ");
  spec.format = RowFormat::of(8, ElementType::kFloat32, FRUGAL_SGD);  // rows as long as the table's
  becomes(spec, "offset=4088" + of + "its header's checksum is ");
  spec.format = users;
  EXPECT_OK(world.folder->remove("3.rows"));
  world.write(spec);
  // The header has no checksum of the keys, of which one is another now.
  EXPECT_EQ(lines_of(world),
            "fault file=2.checkpoint offset=64 table=3 name=\"users\": 496 records of 1.rows are "
            "live, and it says 495\n");
}

TEST(FolderCheck, ARowFormatThatIsNotTheTables) {
  TwoCheckpoints world;
  EXPECT_OK(world.folder->remove("3.rows"));
  Keys deletions = hashed(0, 5);
  deletions.push_back(hashed(150));
  ManifestTable& t = world.second.tables[0];
  t.files[1] = world.write({3, kUsers, 2, RowFormat::of(8, ElementType::kFloat32, FRUGAL_SGD),
                            hashed(100, 200), deletions});
  world.remake(world.second);
  EXPECT_EQ(lines_of(world),
            "fault file=3.rows offset=48 table=3 name=\"users\": its rows have another format than "
            "checkpoint 2 has for the table\n");
}

TEST(FolderCheck, MissingFiles) {
  const TwoCheckpoints world;
  ASSERT_EQ(unlink((world.place / "1.rows").c_str()), 0);
  ASSERT_EQ(unlink((world.place / "4.rows").c_str()), 0);
  ASSERT_EQ(unlink((world.place / "2.blob").c_str()), 0);
  EXPECT_EQ(lines_of(world),
            "fault file=1.rows table=3 name=\"users\": there is no such file, and checkpoint 1 "
            "lists it\n"
            "fault file=4.rows table=5 name=\"it\\\"e\\x0ams\": there is no such file, and "
            "checkpoint 2 lists it\n"
            "fault file=2.blob: there is no such file, and checkpoint 2 lists it\n");
}

TEST(FolderCheck, FilesOfNoCheckpointAreNoFaults) {
  const TwoCheckpoints world;
  for (const char* name :
       {"9.rows", "1.blob", "3.checkpoint.new", "7.rows.new", "readme", "01.rows"})
    world.place.Write(name, "x");
  const std::string lines =
      "note file=01.rows: no engine gives a file this name: it is not part of any checkpoint\n"
      "note file=1.blob: it is not part of any checkpoint\n"
      "note file=3.checkpoint.new: it is not complete, and not part of any checkpoint\n"
      "note file=7.rows.new: it is not complete, and not part of any checkpoint\n"
      "note file=9.rows: it is not part of any checkpoint\n"
      "note file=readme: no engine gives a file this name: it is not part of any checkpoint\n";
  EXPECT_EQ(lines_of(world), lines);
  EXPECT_EQ(checked(world.place.path(), FolderRead::kManifests).lines, lines);
}

TEST(FolderCheck, BlobsAreRead) {
  TwoCheckpoints world;
  const std::string whole = world.place.Read("2.blob");
  world.flip("2.blob", 2);  // between blobs
  EXPECT_EQ(lines_of(world), "");
  world.flip("2.blob", 9'000);
  EXPECT_EQ(lines_of(world),
            "fault file=2.blob offset=5: the blob of rank 0 has a wrong checksum\n");
  world.place.Write("2.blob", whole);
  world.flip("2.blob", 10'006);
  EXPECT_EQ(lines_of(world),
            "fault file=2.blob offset=10005: the blob of rank 2 has a wrong checksum\n");
  world.place.Write("2.blob", whole.substr(0, 10'006));
  EXPECT_EQ(lines_of(world),
            "fault file=2.blob offset=10006: its length is 10006, and checkpoint 2 lists 10007\n");
  world.place.Write("2.blob", whole + "more");
  EXPECT_EQ(lines_of(world),
            "fault file=2.blob offset=10007: its length is 10011, and checkpoint 2 lists 10007\n");
  // Of several pieces, of which the last one is short.
  world.second.blobs.clear();
  std::string large(9'000'001, 'l');
  large[8'999'999] = 'm';
  world.blobs(&world.second, {"a", large});
  world.remake(world.second);
  EXPECT_EQ(lines_of(world), "");
  world.flip("2.blob", 9'000'003);
  EXPECT_EQ(lines_of(world),
            "fault file=2.blob offset=6: the blob of rank 1 has a wrong checksum\n");
}

// --- Manifests -----------------------------------------------------------------------------------

TEST(FolderCheck, Manifests) {
  TwoCheckpoints world;
  const std::string whole = world.place.Read("2.checkpoint");
  const auto is_fault = [&](uint64_t at, const std::string& says) {
    const Found found = checked(world);
    const std::vector<FolderFinding> faults = found.of(Kind::kFault);
    ASSERT_EQ(faults.size(), 1u) << found.lines;
    EXPECT_EQ(std::string(faults[0].file.c_str()), "2.checkpoint");
    EXPECT_EQ(faults[0].offset, at) << found.lines;
    EXPECT_EQ(std::string(faults[0].what.c_str()).substr(0, says.size()), says);
    // The files of that checkpoint alone may be needed.
    EXPECT_NE(found.lines.find("note file=3.rows: no checkpoint that can be read has it\n"),
              std::string::npos);
    EXPECT_EQ(found.counts.notes, 3u) << found.lines;
    EXPECT_EQ(found.counts.checkpoints, 1u);
    world.place.Write("2.checkpoint", whole);
  };
  world.flip("2.checkpoint", 0);
  is_fault(0, "it does not begin as a manifest does");
  for (const size_t at : {8u, 12u, 16u, 24u, 32u, 40u, 48u, 56u, 63u}) {
    world.flip("2.checkpoint", at);
    is_fault(0, "the checksum of its first 64 bytes is wrong");
  }
  for (const size_t at : {size_t{64}, size_t{200}, whole.size() - 1}) {
    world.flip("2.checkpoint", at);
    is_fault(64, "the checksum of its message");
  }
  for (const size_t size : {size_t{0}, size_t{63}}) {
    world.place.Write("2.checkpoint", whole.substr(0, size));
    is_fault(size, "it has " + std::to_string(size) + " bytes");
  }
  for (const size_t size : {size_t{64}, whole.size() - 8}) {
    world.place.Write("2.checkpoint", whole.substr(0, size));
    is_fault(size, "it has " + std::to_string(size) + " bytes");
  }
  world.place.Write("2.checkpoint", whole + "12345678");
  is_fault(whole.size(), "it has ");
  world.place.Write("2.checkpoint", world.place.Read("1.checkpoint"));
  is_fault(24, "it is the manifest of checkpoint 1");
}

TEST(FolderCheck, AFileThatIsNewerThanItsCheckpoint) {
  TwoCheckpoints world;
  Manifest m = world.second;
  m.sequence = 1;
  m.blob_bytes = 0;
  m.blobs.clear();
  world.remake(m);
  const std::string lines = lines_of(world);
  EXPECT_NE(lines.find("fault file=3.rows offset=40 table=3 name=\"users\": checkpoint 1 lists it, "
                       "and it is of checkpoint 2\n"),
            std::string::npos)
      << lines;
}

TEST(FolderCheck, ManifestsThatDisagreeOnAFile) {
  TwoCheckpoints world;
  const auto lists = [](uint64_t is, uint64_t sequence) {
    return "fault file=1.rows offset=4088 table=3 name=\"users\": its header's checksum is " +
           std::to_string(is) + ", and checkpoint " + std::to_string(sequence) + " lists " +
           std::to_string(is + 1) + "\n";
  };
  const uint64_t is = world.first.tables[0].files[0].info.checksum;
  // The file is checked for the other checkpoint all the same.
  world.flip("1.rows", 4096);
  const std::string record =
      "fault file=1.rows offset=4096 table=3 name=\"users\" key=0: record 0 has a wrong checksum\n";
  ++world.first.tables[0].files[0].info.checksum;
  world.remake(world.first);
  EXPECT_EQ(lines_of(world), lists(is, 1) + record);
  --world.first.tables[0].files[0].info.checksum;
  world.remake(world.first);
  ++world.second.tables[0].files[0].info.checksum;
  world.remake(world.second);
  EXPECT_EQ(lines_of(world), record + lists(is, 2));
  ++world.first.tables[0].files[0].info.checksum;
  world.remake(world.first);
  EXPECT_EQ(lines_of(world), lists(is, 1));  // once
}

TEST(FolderCheck, AnUnreadableFileThatTwoManifestsList) {
  TwoCheckpoints world;
  world.flip("1.rows", 100);
  ++world.second.tables[0].files[0].info.checksum;
  world.remake(world.second);
  const Found found = checked(world);
  EXPECT_EQ(found.counts.faults, 1u) << found.lines;
}

TEST(FolderCheck, NamesInLines) {
  EXPECT_EQ(std::string(quoted("a\"b\\c\x01\x7f\xc3").c_str()), "\"a\\\"b\\\\c\\x01\\x7f\xc3\"");
}

// --- Counts of live records ----------------------------------------------------------------------

TEST(FolderCheck, LiveRecordsAreCounted) {
  TwoCheckpoints world;
  const std::string begin = "fault file=2.checkpoint offset=64 table=3 name=\"users\": ";
  ManifestTable& t = world.second.tables[0];
  t.live_rows += 1;
  world.remake(world.second);
  EXPECT_EQ(lines_of(world), begin + "596 rows are live, and 595 records of its files\n");
  t.files[0].live += 1;
  world.remake(world.second);
  EXPECT_EQ(lines_of(world), begin + "495 records of 1.rows are live, and it says 496\n");
  t.live_rows -= 1;
  t.files[1].live -= 1;
  world.remake(world.second);
  EXPECT_EQ(lines_of(world), begin + "495 records of 1.rows are live, and it says 496\n" + begin +
                                 "100 records of 3.rows are live, and it says 99\n");
  // Of the dense table.
  t = world.second.tables[0];
  t.files[0].live -= 1;
  t.files[1].live += 1;
  world.second.tables[1].files[0].live -= 5;
  world.second.tables[1].live_rows -= 5;
  world.remake(world.second);
  EXPECT_EQ(lines_of(world),
            "fault file=2.checkpoint offset=64 table=5 name=\"it\\\"e\\x0ams\": 50 records of "
            "2.rows are live, and it says 45\n");
  // Where a column is damaged there is nothing to compare.
  world.flip("2.rows", world.second.tables[1].files[0].info.length - 1);
  EXPECT_EQ(checked(world).counts.faults, 1u);
}

TEST(FolderCheck, MoreKeysThanAllPartsHaveRoomFor) {
  World world;
  ManifestTable t = table(1, "t", FRUGAL_HASHED, 1000, 1, FRUGAL_SGD);
  add(&t, world.write({1, 1, 1, t.format, {hashed(0)}, {}}), 0);
  add(&t, world.write({2, 1, 2, t.format, hashed(0, 1000), {}}), 1000);
  Manifest m;
  m.sequence = 2;
  m.next_table = 2;
  m.next_file = 3;
  m.tables = {t};
  EXPECT_OK(write_manifest(*world.folder, m));
  EXPECT_EQ(lines_of(world), "");
  EXPECT_EQ(checked(world.place.path(), FolderRead::kAll, 512).counts.notes, 1u);
}

// Keys that all are in one of the parts in which they are counted.
TEST(FolderCheck, KeysThatOnePartHasNoRoomFor) {
  World world;
  Keys keys;
  for (uint64_t k = 1; keys.size() < 100; ++k)
    if (arith::mix(k) < UINT64_MAX / 4) keys.push_back(k);
  ManifestTable t = table(1, "t", FRUGAL_HASHED, 1000, 1, FRUGAL_SGD);
  add(&t, world.write({1, 1, 1, t.format, {keys[0]}, {}}), 0);
  add(&t, world.write({2, 1, 2, t.format, keys, {}}), 100);
  ManifestTable other = table(2, "other", FRUGAL_HASHED, 1000, 1, FRUGAL_SGD);
  add(&other, world.write({3, 2, 1, t.format, {1, 2}, {}}), 1);
  add(&other, world.write({4, 2, 2, t.format, {2}, {}}), 1);
  Manifest m;
  m.sequence = 2;
  m.next_table = 3;
  m.next_file = 5;
  m.tables = {t, other};
  EXPECT_OK(write_manifest(*world.folder, m));
  EXPECT_EQ(lines_of(world), "");
  const Found little = checked(world.place.path(), FolderRead::kAll, 512);
  EXPECT_EQ(
      little.lines,
      "note file=2.checkpoint table=1 name=\"t\": its counts of live records are not checked: "
      "it has too many keys\n");
}

// Random files of a table, against a map of its newest entries. Little memory makes many parts.
TEST(FolderCheck, LiveRecordsOfRandomFiles) {
  uint64_t parts = 0, notes = 0;
  for (uint64_t seed = test_seed(), n = test_rounds(6); n > 0; --n, ++seed) {
    SCOPED_TRACE("FRUGAL_TEST_SEED=" + std::to_string(seed));
    Random random(seed);
    World world;
    const bool dense = random.one_in(3);
    const uint64_t universe = 1 + random.below(random.one_in(2) ? 100 : 3000);
    Manifest m;
    m.sequence = 10;
    m.next_table = 2;
    m.tables = {table(1, "t", dense ? FRUGAL_DENSE : FRUGAL_HASHED, universe, 1, FRUGAL_SGD)};
    ManifestTable& t = m.tables[0];
    struct Newest {
      uint64_t sequence, file;  // a file's index, or none
      bool record;
    };
    std::map<uint64_t, Newest> newest;
    uint64_t entries = 0;
    for (uint64_t sequence = 1; sequence <= 10; ++sequence) {
      if (random.one_in(3)) continue;
      std::set<uint64_t> left;  // a key has one record of a checkpoint
      for (uint64_t k = random.below(universe + 1); k > 0; --k) left.insert(random.below(universe));
      Keys keys(left.begin(), left.end());
      for (uint64_t files = 1 + random.below(3), f = 0; f < files; ++f) {
        FileSpec spec{m.next_file++, 1, sequence, t.format, {}, {}};
        for (size_t i = f; i < keys.size(); i += files)
          spec.keys.push_back(dense ? keys[i] : hashed(keys[i]));
        if (!dense)
          for (uint64_t k = random.below(universe + 1) / 2; k > 0; --k)
            spec.deletions.push_back(hashed(random.below(universe)));
        entries += spec.keys.size() + spec.deletions.size();
        for (const uint64_t key : spec.keys) newest[key] = {sequence, t.files.size(), true};
        for (const uint64_t key : spec.deletions) {
          Newest& had = newest[key];
          if (had.sequence < sequence) had = {sequence, 0, false};
        }
        t.files.push_back(world.write(spec));
        t.files.back().live = 0;
      }
    }
    for (const auto& [key, entry] : newest)
      if (entry.record) {
        ++t.files[entry.file].live;
        ++t.live_rows;
      }
    EXPECT_OK(write_manifest(*world.folder, m));
    EXPECT_EQ(lines_of(world), "");
    const Found little = checked(world.place.path(), FolderRead::kAll, 512);
    EXPECT_EQ(little.counts.faults, 0u) << little.lines;
    notes += little.counts.notes;
    if (!dense && entries > 80 && little.counts.notes == 0) ++parts;
    if (t.live_rows == 0) continue;
    size_t other = random.below(t.files.size());
    while (t.files[other].live == 0) other = (other + 1) % t.files.size();
    --t.files[other].live;
    --t.live_rows;
    world.remake(m);
    EXPECT_EQ(checked(world).counts.faults, 1u);
  }
  std::printf("%llu tables in parts, %llu with too many keys\n",
              static_cast<unsigned long long>(parts), static_cast<unsigned long long>(notes));
}

// --- Whatever is damaged -------------------------------------------------------------------------

// The bytes of a file that no checksum covers.
bool is_padding(const TwoCheckpoints& world, const std::string& name, size_t at) {
  if (name == "2.blob") return at < 5;
  for (const ManifestTable& t : world.second.tables)
    for (const ManifestFile& f : t.files)
      if (rows_name(f.info.number).c_str() == name)
        return at >= 4096 + f.info.records * record_bytes(t) &&
               at < f.info.length - column_bytes(f.info.entries);
  return false;
}

TEST(FolderCheck, RandomDamages) {
  TwoCheckpoints world;
  std::map<std::string, std::string> whole;
  for (const std::string& name : world.place.Files())
    if (name != "lock") whole[name] = world.place.Read(name);
  uint64_t padding = 0;
  for (uint64_t seed = test_seed(), n = test_rounds(100); n > 0; --n, ++seed) {
    SCOPED_TRACE("FRUGAL_TEST_SEED=" + std::to_string(seed));
    Random random(seed);
    auto at = whole.begin();
    std::advance(at, random.below(whole.size()));
    const auto& [name, bytes] = *at;
    std::string damaged = bytes;
    bool covered = true;
    if (random.one_in(4)) {
      const size_t size = random.below(bytes.size() + 8192);
      damaged.resize(size, random.one_in(2) ? 0 : 'x');
    } else {
      covered = false;
      for (uint64_t k = 1 + random.below(3); k > 0; --k) {
        const size_t place = random.one_in(3) ? random.below(std::min<size_t>(bytes.size(), 128))
                                              : random.below(bytes.size());
        const char old = damaged[place];
        damaged[place] = static_cast<char>(random.one_in(2) ? old ^ (1 << random.below(8))
                                                            : (random.one_in(2) ? 0 : 0xff));
      }
      for (size_t i = 0; i < bytes.size(); ++i)
        covered |= damaged[i] != bytes[i] && !is_padding(world, name, i);
    }
    if (damaged == bytes) covered = false;
    world.place.Write(name, damaged);
    const Found found = checked(world);
    uint64_t others = 0;
    for (const FolderFinding& f : found.of(Kind::kFault)) others += f.file.c_str() != name;
    EXPECT_EQ(others, 0u) << name << "\n" << found.lines;
    EXPECT_EQ(found.counts.faults > 0, covered) << name << "\n" << found.lines;
    padding += !covered;
    world.place.Write(name, bytes);
  }
  std::printf("%llu changes of bytes that no checksum covers\n",
              static_cast<unsigned long long>(padding));
  EXPECT_EQ(lines_of(world), "");
}

TEST(FolderCheck, CallsThatFail) {
  const TwoCheckpoints world;
  uint64_t found_some = 0;
  for (int64_t n = 1;; n += n < 40 ? 1 : 3) {
    int64_t failed;
    for (const bool forever : {false, true}) {
      TestFileCalls calls;
      calls.fail(n, EIO, forever);
      const Found found = checked(world.place.path());
      failed = calls.failed();
      const bool seen = found.status != FRUGAL_OK || found.counts.faults + found.counts.unread > 0;
      // After one failure a piece is read again, and so nothing may be seen.
      if (!failed || forever) {
        EXPECT_EQ(seen, failed > 0) << n << found.lines;
      }
      found_some += seen;
    }
    if (!failed) break;
  }
  EXPECT_GT(found_some, 50u);
  TestFileCalls calls;
  calls.interrupt(5);
  calls.shorten(1000);
  calls.refuse_direct(true);
  EXPECT_EQ(lines_of(world), "");
}

// Reads of a range of a file fail.
class BadSector : public FileCalls {
 public:
  BadSector(uint64_t from, uint64_t to, uint64_t length) : from_(from), to_(to), length_(length) {
    test_file_calls(this);
  }
  ~BadSector() override { test_file_calls(nullptr); }
  ssize_t read(int fd, void* to, size_t bytes, uint64_t at) const override {
    struct ::stat found {};
    if (FileCalls::stat(fd, &found) == 0 && static_cast<uint64_t>(found.st_size) == length_ &&
        at < to_ && at + bytes > from_) {
      errno = EIO;
      return -1;
    }
    return FileCalls::read(fd, to, bytes, at);
  }

 private:
  const uint64_t from_, to_, length_;
};

TEST(FolderCheck, ABadSectorConcernsItsRecords) {
  const TwoCheckpoints world;
  const ParameterFileInfo& info = world.second.tables[0].files[0].info;
  const size_t each = record_bytes(world.first.tables[0]);
  {
    const BadSector bad(8192, 8193, info.length);
    const Found found = checked(world);
    const std::vector<FolderFinding> faults = found.of(Kind::kFault);
    ASSERT_FALSE(faults.empty());
    std::set<uint64_t> records;
    for (const FolderFinding& f : faults) {
      EXPECT_EQ(std::string(f.file.c_str()), "1.rows");
      const uint64_t record = (*f.offset - 4096) / each;
      EXPECT_EQ(f.key, hashed(record));
      records.insert(record);
      EXPECT_NE(f.what.find("cannot be read"), String::npos);
    }
    // Those whose blocks include it.
    EXPECT_EQ(*records.begin(), 4096 / each);
    EXPECT_EQ(*records.rbegin(), (8192 + 4096 - 4096 - 1) / each);
    EXPECT_EQ(records.size(), *records.rbegin() - *records.begin() + 1);
  }
  const BadSector bad(info.length - 4096, info.length - 4095, info.length);
  EXPECT_EQ(lines_of(world), "fault file=1.rows offset=" + std::to_string(info.length - 4096) +
                                 " table=3 name=\"users\": block 2 of the column cannot be read\n");
}

TEST(FolderCheck, WithoutMemory) {
  const TwoCheckpoints world;
  WithoutMemory without;
  while (without.next())
    without([&] {
      Found found;
      FolderCounts counts;
      const Status status =
          check_folder(world.place.path().c_str(), FolderRead::kAll, &found, &counts, 512);
      EXPECT_EQ(found.lines, "");
      return status;
    });
  EXPECT_GT(without.rounds(), 10);
}

TEST(FolderCheck, WithoutPages) {
  const TwoCheckpoints world;
  for (int64_t n = 1;; ++n) {
    Found found;
    os_test_fail_after(n);
    const Status status =
        check_folder(world.place.path().c_str(), FolderRead::kAll, &found, &found.counts);
    if (os_test_fail_after(0) > 0) {
      EXPECT_EQ(status, FRUGAL_OK);
      EXPECT_EQ(n, 3);
      break;
    }
    EXPECT_EQ(status, FRUGAL_ERR_OUT_OF_MEMORY);
  }
}

TEST(FolderCheck, WhatAReportThrowsIsPassedOn) {
  struct Thrown {};
  struct Throws : FolderReport {
    void found(const FolderFinding&) override { throw Thrown(); }
  } report;
  const TwoCheckpoints world;
  world.flip("1.rows", 5000);
  FolderCounts counts;
  EXPECT_THROW(check_folder(world.place.path().c_str(), FolderRead::kAll, &report, &counts),
               Thrown);
}

// A manifest that comes into being during the check.
struct Appears : Found {
  explicit Appears(const World& w, const std::string& b) : world(w), bytes(b) {}
  ~Appears() override { unlink((world.place / "3.checkpoint").c_str()); }
  void checkpoint(const Manifest& m) override {
    Found::checkpoint(m);
    const int fd = open((world.place / "3.checkpoint").c_str(), O_WRONLY | O_CREAT, 0600);
    EXPECT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    close(fd);
  }
  const World& world;
  const std::string& bytes;
};

TEST(FolderCheck, AManifestThatAppearsIsNotChecked) {
  TwoCheckpoints world;
  Manifest third = world.second;
  third.sequence = 3;
  EXPECT_OK(write_manifest(*world.folder, third));
  const std::string whole = world.place.Read("3.checkpoint");
  EXPECT_OK(world.folder->remove("3.checkpoint"));
  for (const std::string& bytes : {whole, whole.substr(0, 100)}) {
    Appears found(world, bytes);
    EXPECT_OK(check_folder(world.place.path().c_str(), FolderRead::kAll, &found, &found.counts));
    EXPECT_EQ(found.lines, "");
    EXPECT_EQ(found.counts.checkpoints, 2u);
  }
  {
    struct : FileCalls {
      int open(int folder, const char* name, int flags, mode_t mode) const override {
        if (std::string(name) != "3.checkpoint") return FileCalls::open(folder, name, flags, mode);
        errno = ENOMEM;
        return -1;
      }
    } const calls;
    test_file_calls(&calls);
    Appears found(world, whole);
    EXPECT_EQ(check_folder(world.place.path().c_str(), FolderRead::kAll, &found, &found.counts),
              FRUGAL_ERR_OUT_OF_MEMORY);
    test_file_calls(nullptr);
  }
  WithoutMemory without;
  while (without.next())
    without([&] {
      Appears found(world, whole);
      return check_folder(world.place.path().c_str(), FolderRead::kAll, &found, &found.counts, 512);
    });
}

// The second time that a file is opened, it is not what it was.
class ChangedFile : public FileCalls {
 public:
  enum Change { kMissing, kOther, kUnreadable };
  ChangedFile(const char* name, Change change) : name_(name), change_(change) {
    test_file_calls(this);
  }
  ~ChangedFile() override { test_file_calls(nullptr); }
  int open(int folder, const char* name, int flags, mode_t mode) const override {
    if (name != name_ || opened_ == 0) {
      const int fd = FileCalls::open(folder, name, flags, mode);
      opened_ += name == name_ && fd >= 0;
      return fd;
    }
    if (change_ == kMissing) {
      errno = ENOENT;
      return -1;
    }
    const int fd = FileCalls::open(folder, change_ == kOther ? "other" : name, flags, mode);
    if (change_ == kUnreadable) unreadable_ = fd;
    return fd;
  }
  ssize_t read(int fd, void* to, size_t bytes, uint64_t at) const override {
    if (fd == unreadable_ && at > 0) {
      errno = EIO;
      return -1;
    }
    return FileCalls::read(fd, to, bytes, at);
  }

 private:
  const std::string name_;
  const Change change_;
  mutable std::atomic<int> opened_{0}, unreadable_{-1};
};

TEST(FolderCheck, AFileThatChangesBeforeItsKeysAreCounted) {
  World world;
  constexpr uint64_t kMany = 140'000;  // whose column is read in more than one piece
  ManifestTable t = table(1, "t", FRUGAL_HASHED, kMany, 1, FRUGAL_SGD);
  add(&t, world.write({1, 1, 1, t.format, hashed(0, kMany), {}}), kMany - 10);
  add(&t, world.write({2, 1, 2, t.format, hashed(0, 10), {}}), 10);
  Manifest m;
  m.sequence = 2;
  m.next_table = 2;
  m.next_file = 3;
  m.tables = {t};
  EXPECT_OK(write_manifest(*world.folder, m));
  EXPECT_EQ(lines_of(world), "");
  {
    const ChangedFile calls("1.rows", ChangedFile::kMissing);
    EXPECT_NE(lines_of(world).find("1.rows' cannot be opened"), std::string::npos);
  }
  {
    const ChangedFile calls("1.rows", ChangedFile::kUnreadable);
    EXPECT_NE(lines_of(world).find("1.rows' cannot be read at byte"), std::string::npos);
  }
  World another;
  another.write({1, 1, 1, t.format, hashed(0, 10), {}});
  world.place.Write("other", another.place.Read("1.rows"));
  {
    const ChangedFile calls("1.rows", ChangedFile::kOther);
    EXPECT_NE(lines_of(world).find("the manifest lists table 1"), std::string::npos);
  }
  world.place.Write("other", world.place.Read("1.rows"));
  world.flip("other", t.files[0].info.length - 8192);
  const ChangedFile calls("1.rows", ChangedFile::kOther);
  EXPECT_NE(lines_of(world).find("of the column of table 1 has a wrong checksum"),
            std::string::npos);
}

// --- With a writer -------------------------------------------------------------------------------

class NothingIsWritten : public FileCalls {
 public:
  NothingIsWritten() { test_file_calls(this); }
  ~NothingIsWritten() override { test_file_calls(nullptr); }
  int open(int folder, const char* name, int flags, mode_t mode) const override {
    EXPECT_EQ(flags & (O_ACCMODE | O_CREAT | O_TRUNC), O_RDONLY) << name;
    EXPECT_STRNE(name, "lock");
    return FileCalls::open(folder, name, flags, mode);
  }
  ssize_t write(int, const void*, size_t, uint64_t) const override { return wrong(); }
  int sync(int) const override { return wrong(); }
  int allocate(int, uint64_t, uint64_t) const override { return wrong(); }
  int resize(int, uint64_t) const override { return wrong(); }
  int rename(int, const char*, const char*) const override { return wrong(); }
  int link(int, const char*, int, const char*) const override { return wrong(); }
  int unlink(int, const char*) const override { return wrong(); }
  int make_folder(int, const char*, mode_t) const override { return wrong(); }

 private:
  static int wrong() {
    ADD_FAILURE() << "a call that writes";
    errno = EROFS;
    return -1;
  }
};

TEST(FolderCheck, NothingIsWritten) {
  const TwoCheckpoints world;
  world.place.Write("9.rows.new", "");
  world.flip("1.rows", 5000);
  const NothingIsWritten calls;
  EXPECT_EQ(checked(world).counts.faults, 1u);
  checked(world.place.path(), FolderRead::kManifests);
}

TEST(FolderCheck, ACheckpointThatIsBeingDeletedIsSkipped) {
  const TwoCheckpoints world;
  File held;
  ASSERT_OK(world.folder->open_file("1.checkpoint", false, &held));
  bool alone = false;
  ASSERT_OK(held.lock_alone(&alone));
  ASSERT_TRUE(alone);
  EXPECT_EQ(lines_of(world),
            "note file=1.checkpoint: its writer is deleting or has deleted it: not checked\n");
}

// The writer makes checkpoints and deletes old ones. It may find that one is in use, and nothing
// that is checked is a fault.
TEST(FolderCheck, BesideAWriter) {
  World world;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> checks{0};
  uint64_t in_use_times = 0;
  std::thread writer([&] {
    std::map<uint64_t, std::set<uint64_t>> kept;
    ManifestTable users = table(1, "users", FRUGAL_HASHED, 5000, 4, FRUGAL_ADAGRAD);
    users.files.clear();
    const uint64_t rounds = test_rounds(40);
    for (uint64_t s = 1; s <= rounds || checks < 3; ++s) {
      Manifest m;
      m.sequence = s;
      m.next_table = 2;
      m.next_file = s + 1;
      // Of two files, one of them new.
      const ManifestFile file =
          world.write({s, 1, s, users.format, hashed(s % 2 * 1000, s % 2 * 1000 + 300), {}});
      if (users.files.size() == 2) users.files.erase(users.files.begin());
      users.files.push_back(file);
      users.live_rows = 300 * users.files.size();
      m.tables = {users};
      ASSERT_OK(write_manifest(*world.folder, m));
      for (const ManifestFile& f : users.files) kept[s].insert(f.info.number);
      for (auto at = kept.begin(); at != kept.end() && at->first + 2 < s;) {
        bool in_use = false;
        ASSERT_OK(delete_manifest(*world.folder, at->first, &in_use));
        in_use_times += in_use;
        at = in_use ? std::next(at) : kept.erase(at);
      }
      for (uint64_t f = 1; f <= s; ++f)
        if (std::none_of(kept.begin(), kept.end(), [&](auto& k) { return k.second.count(f); })) {
          ASSERT_OK(world.folder->remove(rows_name(f).c_str()));
        }
    }
    done = true;
  });
  uint64_t notes = 0, checkpoints = 0;
  while (!done) {
    const Found found = checked(world);
    EXPECT_EQ(found.counts.faults + found.counts.unread, 0u) << found.lines;
    notes += found.counts.notes;
    checkpoints += found.counts.checkpoints;
    ++checks;
  }
  writer.join();
  std::printf("%llu checks of %llu checkpoints, %llu notes; in use %llu times\n",
              static_cast<unsigned long long>(checks), static_cast<unsigned long long>(checkpoints),
              static_cast<unsigned long long>(notes),
              static_cast<unsigned long long>(in_use_times));
}

// --- The program ---------------------------------------------------------------------------------

struct Ran {
  int status = -1;
  std::string out, err;
  long most_kib = 0;
};

// With /dev/full as its standard output, or a file.
Ran run(std::vector<std::string> arguments, bool full = false) {
  Ran ran;
  const char* const program = std::getenv("FRUGAL_FSCK");
  const TemporaryFolder place;
  std::vector<char*> argv{const_cast<char*>(program)};
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  const std::string out = full ? "/dev/full" : place / "out", err = place / "err";
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(open(out.c_str(), O_WRONLY | O_CREAT, 0600), 1);
    dup2(open(err.c_str(), O_WRONLY | O_CREAT, 0600), 2);
    execv(program, argv.data());
    _exit(99);
  }
  rusage used{};
  int status = 0;
  EXPECT_EQ(wait4(pid, &status, 0, &used), pid);
  ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  ran.out = place.Read("out");
  ran.err = place.Read("err");
  ran.most_kib = used.ru_maxrss;
  return ran;
}

class FsckProgram : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::getenv("FRUGAL_FSCK")) GTEST_SKIP() << "FRUGAL_FSCK names no program";
  }
};

TEST_F(FsckProgram, ExitStatusesAndLines) {
  TwoCheckpoints world;
  const std::string path = world.place.path();
  Ran ran = run({path});
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  EXPECT_EQ(ran.out.substr(0, ran.out.find(" bytes")), "sound: checkpoints=2 files=5 records=900");
  world.flip("1.rows", 4096);
  ran = run({path});
  EXPECT_EQ(ran.status, 1);
  EXPECT_EQ(ran.out.substr(0, ran.out.find("damaged")),
            "fault file=1.rows offset=4096 table=3 name=\"users\" key=0: record 0 has a wrong "
            "checksum\n");
  EXPECT_NE(ran.out.find(" faults=1 unread=0 notes=0\n"), std::string::npos);
  EXPECT_EQ(run({path}, true).status, 2);  // its standard output cannot be written
  world.flip("1.rows", 4096);
  world.change("3.rows", [](std::string* b) { seal_header(b, [](auto* h) { h->version = 2; }); });
  ran = run({path});
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.out.substr(0, 29), "unread file=3.rows offset=12 ");
  EXPECT_NE(ran.out.find("\nunknown: "), std::string::npos);
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{}, {"--lists", path}, {path, path}, {""}, {"--list"}}) {
    ran = run(wrong);
    EXPECT_EQ(ran.status, 2);
    EXPECT_EQ(ran.out, "");
    EXPECT_NE(ran.err.find("usage: frugal-fsck"), std::string::npos);
  }
  ran = run({path + "/none"});
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.out, "");
  EXPECT_NE(ran.err.find("NOT_FOUND"), std::string::npos);
  ran = run({"--help"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.out.substr(0, 18), "usage: frugal-fsck");
}

TEST_F(FsckProgram, Lists) {
  const TwoCheckpoints world;
  const Ran ran = run({"--list", world.place.path()});
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.err, "");
  EXPECT_EQ(
      ran.out.substr(0, ran.out.rfind("listed: ")),
      "checkpoint=1 name=\"first\" step=10 created=1970-01-01T00:00:00Z world_size=1 tables=2 "
      "files=2 "
      "blobs=0 blob_bytes=0 bytes=53248 live_bytes=39200 stale_bytes=0\n"
      "table=3 checkpoint=1 name=\"users\" kind=hashed rows=5000 dim=4 optimizer=adagrad "
      "live_rows=600 files=1 bytes=40960 live_bytes=33600 stale_bytes=0\n"
      "file=1.rows checkpoint=1 table=3 of_checkpoint=1 records=600 deletions=0 live=600 "
      "bytes=40960 live_bytes=33600 stale_bytes=0\n"
      "table=5 checkpoint=1 name=\"it\\\"e\\x0ams\" kind=dense rows=150 dim=7 optimizer=sgd "
      "live_rows=100 files=1 bytes=12288 live_bytes=5600 stale_bytes=0\n"
      "file=2.rows checkpoint=1 table=5 of_checkpoint=1 records=100 deletions=0 live=100 "
      "bytes=12288 live_bytes=5600 stale_bytes=0\n"
      "checkpoint=2 name=\"\" step=20 created=2001-09-09T01:46:40Z world_size=3 tables=2 files=4 "
      "blobs=3 blob_bytes=10007 bytes=77824 live_bytes=41720 stale_bytes=8776\n"
      "table=3 checkpoint=2 name=\"users\" kind=hashed rows=5000 dim=4 optimizer=adagrad "
      "live_rows=595 files=2 bytes=53248 live_bytes=33320 stale_bytes=5976\n"
      "file=1.rows checkpoint=2 table=3 of_checkpoint=1 records=600 deletions=0 live=495 "
      "bytes=40960 live_bytes=27720 stale_bytes=5880\n"
      "file=3.rows checkpoint=2 table=3 of_checkpoint=2 records=100 deletions=6 live=100 "
      "bytes=12288 live_bytes=5600 stale_bytes=96\n"
      "table=5 checkpoint=2 name=\"it\\\"e\\x0ams\" kind=dense rows=150 dim=7 optimizer=sgd "
      "live_rows=150 files=2 bytes=24576 live_bytes=8400 stale_bytes=2800\n"
      "file=2.rows checkpoint=2 table=5 of_checkpoint=1 records=100 deletions=0 live=50 "
      "bytes=12288 live_bytes=2800 stale_bytes=2800\n"
      "file=4.rows checkpoint=2 table=5 of_checkpoint=2 records=100 deletions=0 live=100 "
      "bytes=12288 live_bytes=5600 stale_bytes=0\n");
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr long kMostKib = LONG_MAX;
#else
constexpr long kMostKib = 64 * 1024;
#endif

// A manifest of 4 MiB, none of whose files is there.
TEST_F(FsckProgram, TakesLittleMemoryForAManifest) {
  constexpr uint64_t kFiles = 70'000;
  World world;
  Manifest m;
  m.sequence = 1;
  m.next_table = 2;
  m.next_file = kFiles;
  m.tables = {table(1, "t", FRUGAL_HASHED, kFiles, 1, FRUGAL_SGD)};
  for (uint64_t i = 0; i < kFiles; ++i) {
    ManifestFile f;
    f.info = {i, 1, 1, 1, 1, 12288, i};
    add(&m.tables[0], f, 1);
  }
  EXPECT_OK(write_manifest(*world.folder, m));
  EXPECT_GT(world.place.Read("1.checkpoint").size(), size_t{7} << 19);
  const Ran ran = run({world.place.path()});
  EXPECT_EQ(ran.status, 1);
  EXPECT_NE(ran.out.find(" faults=70000 "), std::string::npos);
  std::printf("%ld KiB\n", ran.most_kib);
  EXPECT_LE(ran.most_kib, kMostKib);
}

// The largest bitmap, and pieces of records and columns.
TEST_F(FsckProgram, TakesLittleMemory) {
  World world;
  Manifest m;
  m.sequence = 2;
  m.next_table = 3;
  m.next_file = 6;
  m.tables = {table(1, "dense", FRUGAL_DENSE, UINT32_MAX - 1, 256, FRUGAL_SGD),
              table(2, "hashed", FRUGAL_HASHED, 2'000'000, 1, FRUGAL_SGD)};
  add(&m.tables[0], world.write({1, 1, 1, m.tables[0].format, range(0, 20'000), {}}), 20'000);
  add(&m.tables[0],
      world.write({2, 1, 2, m.tables[0].format, range(4'000'000'000, 4'000'001'000), {}}), 1000);
  add(&m.tables[1], world.write({3, 2, 1, m.tables[1].format, hashed(0, 10), {}}), 10);
  add(&m.tables[1], world.write({4, 2, 2, m.tables[1].format, {}, hashed(10, 200'000)}), 0);
  EXPECT_OK(write_manifest(*world.folder, m));
  const Ran ran = run({world.place.path()});
  EXPECT_EQ(ran.status, 0) << ran.out;
  std::printf("%ld KiB\n", ran.most_kib);
  EXPECT_LE(ran.most_kib, kMostKib);
}

}  // namespace frugal::folder_check_test
