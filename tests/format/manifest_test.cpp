// Manifests: what is written is read, or nothing is there; whatever fails, and whatever is in the
// file, a status says it.
#include "format/manifest.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "support/file_calls.h"
#include "support/inside.h"
#include "support/manifests.h"
#include "support/temporary_folder.h"

namespace frugal::manifest_test {

using Use = Folder::Use;
using FolderRef = std::shared_ptr<Folder>;

FolderRef opened(const std::string& path, Use use = Use::kCreate) {
  FolderRef folder;
  EXPECT_EQ(Folder::open(path.c_str(), use, &folder), FRUGAL_OK) << LastMessage();
  return folder;
}

bool says(const std::string& what) { return LastMessage().find(what) != std::string::npos; }

Vector<uint64_t> encoded(const Manifest& m) {
  Vector<uint64_t> words;
  EXPECT_EQ(encode_manifest(m, &words), FRUGAL_OK) << LastMessage();
  return words;
}

Status decoded(const Vector<uint64_t>& words, Manifest* out, uint64_t sequence = 1) {
  return decode_manifest("'here'", sequence, words.data(), words.size() * 8, out);
}

// Two tables with files and changes, and blobs.
Manifest example(uint64_t sequence = 1) {
  static std::atomic<uint64_t> known{1};
  for (uint64_t seed = known.load();; ++seed) {
    Manifest m = RandomManifest(seed, 2)(1);
    m.sequence = sequence;
    known = seed;
    if (m.tables.size() == 2 && m.tables[0].files.size() == 2 && m.tables[1].files.size() == 2 &&
        m.tables[1].later.size() == 2 && m.blobs.size() == 2 && m.name.size() > 2 &&
        m.step < 1'000'000 && m.blob_bytes > 0 && m.tables[0].files[1].info.records > 0)
      return m;
  }
}

// The manifest, or what went wrong.
std::string found(const Folder& folder, uint64_t sequence) {
  Manifest m;
  File keep;
  const Status status = read_manifest(folder, sequence, &m, &keep);
  return status == FRUGAL_OK ? ManifestText::of(m) : LastMessage();
}

TEST(Manifests, AreReadAsTheyWereWritten) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path()), reader = opened(place.path(), Use::kRead);
  Vector<uint64_t> written;
  for (uint64_t seed = test_seed(), n = test_rounds(150); n > 0; --n, ++seed) {
    const uint64_t sequence = 1 + written.size() * 7;
    const Manifest m = RandomManifest(seed, 1 + n % 6)(sequence);
    ASSERT_OK(write_manifest(*folder, m)) << seed;
    written.push_back(sequence);
    Manifest back;
    File keep;
    ASSERT_OK(read_manifest(*reader, sequence, &back, &keep)) << seed;
    ASSERT_EQ(ManifestText::of(back), ManifestText::of(m)) << seed;
    ASSERT_EQ(encoded(back), encoded(m)) << seed;
    EXPECT_STREQ(keep.name(), manifest_name(sequence).c_str());
    for (const ManifestTable& t : back.tables) EXPECT_EQ(t.config.name, nullptr);
  }
  place.Write("12.rows", "");
  place.Write("12.checkpoint.new", "");
  place.Write("012.checkpoint", "");
  Vector<uint64_t> listed;
  ASSERT_OK(list_manifests(*reader, &listed));
  EXPECT_EQ(listed, written);
}

TEST(Manifests, TheSameOnesHaveTheSameBytes) {
  for (uint64_t seed = test_seed(), n = test_rounds(100); n > 0; --n, ++seed) {
    const Vector<uint64_t> once = encoded(RandomManifest(seed)(3));
    EXPECT_EQ(once, encoded(RandomManifest(seed)(3))) << seed;
  }
  // These bytes are what libraries of the first version write: they may never change.
  Manifest m;
  m.sequence = 5;
  m.step = 41;
  m.seed = 9;
  m.created = 1'000'000'000;
  m.next_table = 3;
  m.next_file = 8;
  ManifestTable t;
  t.number = 2;
  t.name = "users";
  t.config.rows = 100;
  t.config.dim = 4;
  t.config.optimizer.kind = t.optimizer.kind = FRUGAL_ADAGRAD;
  t.format = RowFormat::of(4, ElementType::kFloat32, FRUGAL_ADAGRAD);
  t.live_rows = 10;
  t.files.push_back({{7, 2, 5, 10, 10, 12288, 77}, 10});
  m.tables.push_back(t);
  const Vector<uint64_t> words = encoded(m);
  EXPECT_EQ(std::memcmp(words.data(), "FRUGALCP\4\3\2\1\1\0\0\0", 16), 0);
  EXPECT_EQ(words.size(), 65u);
  EXPECT_EQ(words[6], 0u);
  EXPECT_EQ(words[7], 0x857dc60d4f265cabu);
}

TEST(Manifests, AnotherOneOfThatNameStays) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  const Manifest m = example();
  ASSERT_OK(write_manifest(*folder, m));
  Manifest other = m;
  other.seed ^= 1;
  EXPECT_EQ(write_manifest(*folder, other), FRUGAL_ERR_EXISTS);
  EXPECT_EQ(found(*folder, 1), ManifestText::of(m));
  EXPECT_EQ(place.Files(), (std::set<std::string>{"lock", "1.checkpoint"}));
  // What a writer that died has left is no obstacle.
  place.Write("2.checkpoint.new", std::string(100'000, 'x'));
  other.sequence = 2;
  ASSERT_OK(write_manifest(*folder, other));
  EXPECT_EQ(found(*folder, 2), ManifestText::of(other));
  EXPECT_EQ(place.Files(), (std::set<std::string>{"lock", "1.checkpoint", "2.checkpoint"}));
}

TEST(Manifests, AreWrittenByAWriterOnly) {
  TemporaryFolder place;
  FolderRef folder = opened(place.path());
  ASSERT_OK(write_manifest(*folder, example()));
  folder.reset();
  folder = opened(place.path(), Use::kRead);
  bool in_use = false;
  EXPECT_EQ(write_manifest(*folder, example(2)), FRUGAL_ERR_UNSUPPORTED);
  EXPECT_EQ(delete_manifest(*folder, 1, &in_use), FRUGAL_ERR_UNSUPPORTED);
  EXPECT_EQ(place.Files(), (std::set<std::string>{"lock", "1.checkpoint"}));
}

// --- The order of calls --------------------------------------------------------------------------

// The calls that change a folder or a file's lock, in their order.
class RecordingCalls : public FileCalls {
 public:
  RecordingCalls() { test_file_calls(this); }
  ~RecordingCalls() override { test_file_calls(nullptr); }
  std::vector<std::string> take() { return std::exchange(calls_, {}); }

  int open(int folder, const char* name, int flags, mode_t mode) const override {
    if (flags & O_CREAT) note("create ", name);
    return FileCalls::open(folder, name, flags, mode);
  }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    note("write", "");
    return FileCalls::write(fd, from, bytes, at);
  }
  int sync(int fd) const override {
    struct ::stat found {};
    EXPECT_EQ(FileCalls::stat(fd, &found), 0);
    note("sync ", S_ISDIR(found.st_mode) ? "folder" : "file");
    return FileCalls::sync(fd);
  }
  int rename(int folder, const char* from, const char* to) const override {
    note("rename ", (std::string(from) + " " + to).c_str());
    return FileCalls::rename(folder, from, to);
  }
  int unlink(int folder, const char* name) const override {
    note("unlink ", name);
    return FileCalls::unlink(folder, name);
  }
  int lock(int fd, int operation) const override {
    note("lock ", operation & LOCK_EX ? "alone" : operation & LOCK_SH ? "shared" : "no more");
    return FileCalls::lock(fd, operation);
  }

 private:
  void note(const char* what, const char* of) const { calls_.push_back(std::string(what) + of); }
  mutable std::vector<std::string> calls_;
};

TEST(Manifests, EachSyncComesBeforeWhatNeedsIt) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  RecordingCalls calls;
  using Calls = std::vector<std::string>;
  ASSERT_OK(write_manifest(*folder, example(3)));
  EXPECT_EQ(calls.take(),
            (Calls{"unlink 3.checkpoint.new", "create 3.checkpoint.new", "write", "sync file",
                   "sync folder", "rename 3.checkpoint.new 3.checkpoint", "sync folder"}));
  {
    Manifest m;
    File keep;
    ASSERT_OK(read_manifest(*folder, 3, &m, &keep));
    EXPECT_EQ(calls.take(), (Calls{"lock shared"}));
  }
  EXPECT_EQ(calls.take(), (Calls{"lock no more"}));
  bool in_use = true;
  ASSERT_OK(delete_manifest(*folder, 3, &in_use));
  EXPECT_FALSE(in_use);
  EXPECT_EQ(calls.take(),
            (Calls{"lock alone", "unlink 3.checkpoint", "sync folder", "lock no more"}));
}

// --- Readers and deletion ------------------------------------------------------------------------

TEST(Manifests, StayWhileAReaderHasThem) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path()), reader = opened(place.path(), Use::kRead);
  const Manifest m = example();
  ASSERT_OK(write_manifest(*folder, m));
  File first, second;
  Manifest back;
  bool in_use = false;
  ASSERT_OK(read_manifest(*reader, 1, &back, &first));
  ASSERT_OK(read_manifest(*reader, 1, &back, &second));
  for (File* keep : {&first, &second}) {
    ASSERT_OK(delete_manifest(*folder, 1, &in_use));
    EXPECT_TRUE(in_use);
    EXPECT_EQ(found(*reader, 1), ManifestText::of(m));
    keep->close();
  }
  ASSERT_OK(delete_manifest(*folder, 1, &in_use));
  EXPECT_FALSE(in_use);
  EXPECT_EQ(read_manifest(*reader, 1, &back, &first), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(delete_manifest(*folder, 1, &in_use), FRUGAL_ERR_NOT_FOUND);
  EXPECT_FALSE(first);
}

// Something happens just before the first lock is taken.
class BeforeTheLock : public FileCalls {
 public:
  explicit BeforeTheLock(std::function<void()> what) : what_(std::move(what)) {
    test_file_calls(this);
  }
  ~BeforeTheLock() override { test_file_calls(nullptr); }
  int lock(int fd, int operation) const override {
    if (const auto what = std::exchange(what_, nullptr)) what();
    return FileCalls::lock(fd, operation);
  }

 private:
  mutable std::function<void()> what_;
};

TEST(Manifests, AReaderThatIsTooLateFindsNone) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path()), reader = opened(place.path(), Use::kRead);
  ASSERT_OK(write_manifest(*folder, example()));
  Manifest back;
  File keep;
  {
    const BeforeTheLock calls([&] {
      bool in_use = true;
      EXPECT_OK(delete_manifest(*folder, 1, &in_use));
      EXPECT_FALSE(in_use);
    });
    EXPECT_EQ(read_manifest(*reader, 1, &back, &keep), FRUGAL_ERR_NOT_FOUND);
    EXPECT_TRUE(says("was deleted")) << LastMessage();
  }
  // Another file of that name is not the one that was opened.
  ASSERT_OK(write_manifest(*folder, example()));
  {
    const BeforeTheLock calls([&] {
      bool in_use = true;
      EXPECT_OK(delete_manifest(*folder, 1, &in_use));
      EXPECT_OK(write_manifest(*folder, example()));
    });
    EXPECT_EQ(read_manifest(*reader, 1, &back, &keep), FRUGAL_ERR_NOT_FOUND);
  }
  // The deleter has the lock, and the name is still there.
  File deleter;
  bool alone = false;
  ASSERT_OK(folder->open_file("1.checkpoint", false, &deleter));
  ASSERT_OK(deleter.lock_alone(&alone));
  EXPECT_EQ(read_manifest(*reader, 1, &back, &keep), FRUGAL_ERR_BUSY);
  EXPECT_TRUE(says("is being deleted")) << LastMessage();
  EXPECT_FALSE(keep);
  EXPECT_EQ(back.sequence, 0u);
}

TEST(Manifests, ReadersAndAWriterThatDeletes) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  constexpr uint64_t kLast = 60;
  std::atomic<bool> done{false};
  std::atomic<uint64_t> read{0};
  std::vector<std::string> texts(kLast + 1);
  for (uint64_t s = 1; s <= kLast; ++s) texts[s] = ManifestText::of(example(s));
  std::vector<std::thread> readers;
  for (uint64_t id = 0; id < 2; ++id)
    readers.emplace_back([&, id] {
      const FolderRef own = opened(place.path(), Use::kRead);
      for (uint64_t n = id; !done.load(); ++n) {
        Vector<uint64_t> all;
        EXPECT_OK(list_manifests(*own, &all));
        if (all.empty()) continue;
        const uint64_t sequence = all[n % all.size()];
        Manifest m;
        File keep;
        const Status status = read_manifest(*own, sequence, &m, &keep);
        if (status == FRUGAL_OK) {
          EXPECT_EQ(ManifestText::of(m), texts[sequence]);
          bool named = false;
          EXPECT_OK(keep.has_name(&named));
          EXPECT_TRUE(named);  // as long as it is kept
          ++read;
        } else {
          EXPECT_TRUE(status == FRUGAL_ERR_NOT_FOUND || status == FRUGAL_ERR_BUSY) << LastMessage();
        }
      }
    });
  for (uint64_t s = 1; s <= kLast || read.load() < 20; s = s < kLast ? s + 1 : 1) {
    bool in_use = false;
    const Status gone = delete_manifest(*folder, s, &in_use);
    EXPECT_TRUE(gone == FRUGAL_OK || gone == FRUGAL_ERR_NOT_FOUND) << LastMessage();
    if (!in_use) {
      EXPECT_OK(write_manifest(*folder, example(s)));
    }
    if (s == kLast && read.load() >= 20) break;
  }
  done = true;
  for (std::thread& t : readers) t.join();
}

// --- Calls that fail -----------------------------------------------------------------------------

struct Failure {
  int code;
  Status status;
  bool forever;
};
constexpr Failure kFailures[] = {{EIO, FRUGAL_ERR_IO, false},
                                 {EIO, FRUGAL_ERR_IO, true},
                                 {ENOSPC, FRUGAL_ERR_NO_SPACE, false},
                                 {ENOSPC, FRUGAL_ERR_NO_SPACE, true}};

// Calls job() with the n-th call of the system failing, for each n, until none fails. Before each
// there is a new folder with the manifest of checkpoint 1; after it check(failed status or OK).
template <class Job, class Check>
int64_t with_each_failure(const Failure& f, size_t most_bytes, Job job, Check check) {
  int64_t failures = 0;
  for (int64_t n = 1;; ++n) {
    EXPECT_LT(n, 100);
    TemporaryFolder place;
    const FolderRef folder = opened(place.path());
    EXPECT_OK(write_manifest(*folder, example(1)));
    TestFileCalls calls;
    calls.shorten(most_bytes);
    calls.interrupt(most_bytes ? 2 : 0);
    calls.fail(n, f.code, f.forever);
    const Status status = job(*folder);
    const bool failed = calls.failed() > 0;
    calls.fail(0, 0);
    if (status != FRUGAL_OK) {
      ++failures;
      EXPECT_TRUE(failed);
      // A sync that fails is a failed write, whatever the disk says.
      EXPECT_TRUE(status == f.status || status == FRUGAL_ERR_IO) << LastMessage();
      EXPECT_TRUE(says(place.path())) << LastMessage();
    }
    EXPECT_EQ(found(*folder, 1), ManifestText::of(example(1)));
    check(*folder, place, status, n);
    if (!failed || testing::Test::HasFailure()) return failures;
  }
}

TEST(Manifests, EachCallOfAWriteFails) {
  for (const Failure& f : kFailures)
    for (const size_t most_bytes : {0, 100}) {
      const auto write = [](Folder& folder) { return write_manifest(folder, example(2)); };
      const auto check = [&](Folder& folder, const TemporaryFolder& place, Status status,
                             int64_t n) {
        const std::set<std::string> names = place.Files();
        const bool poisoned = folder.may_write() != FRUGAL_OK;
        const bool there = names.count("2.checkpoint");
        if (there) {  // whole
          EXPECT_EQ(found(folder, 2), ManifestText::of(example(2))) << n;
          EXPECT_TRUE(status == FRUGAL_OK || poisoned) << n;
        }
        // Else the writer has removed it. For ever: it could not.
        if (!poisoned && !f.forever) {
          EXPECT_EQ(names.count("2.checkpoint.new"), 0u) << n;
        }
        EXPECT_TRUE(there || status != FRUGAL_OK) << n;
        if (status != FRUGAL_OK && !poisoned) {
          EXPECT_OK(write_manifest(folder, example(2))) << n;
          EXPECT_EQ(found(folder, 2), ManifestText::of(example(2))) << n;
        }
        if (poisoned) {
          EXPECT_EQ(write_manifest(folder, example(3)), FRUGAL_ERR_IO) << n;
        }
      };
      EXPECT_GE(with_each_failure(f, most_bytes, write, check), 7);
    }
}

TEST(Manifests, EachCallOfAReadAListAndADeletionFails) {
  for (const Failure& f : kFailures)
    for (const size_t most_bytes : {0, 100}) {
      const auto nothing = [](Folder&, const TemporaryFolder&, Status, int64_t) {};
      const auto read = [](Folder& folder) {
        Manifest m;
        File keep;
        const Status status = read_manifest(folder, 1, &m, &keep);
        EXPECT_EQ(m.sequence, status == FRUGAL_OK ? 1u : 0u);
        EXPECT_EQ(static_cast<bool>(keep), status == FRUGAL_OK);
        return status;
      };
      EXPECT_GE(with_each_failure(f, most_bytes, read, nothing), 8);
      const auto list = [](Folder& folder) {
        Vector<uint64_t> all{77};
        const Status status = list_manifests(folder, &all);
        EXPECT_EQ(all, (Vector<uint64_t>{status == FRUGAL_OK ? 1u : 77u}));
        return status;
      };
      EXPECT_GE(with_each_failure(f, most_bytes, list, nothing), 2);
      // Of a second one: the first is examined after each failure.
      bool in_use = false;
      const auto remove = [&](Folder& folder) {
        folder.may_write();
        return delete_manifest(folder, 2, &in_use);
      };
      const auto prepared = [&](Folder& folder) {
        test_file_calls(nullptr);
        EXPECT_OK(write_manifest(folder, example(2)));
        return FRUGAL_OK;
      };
      for (int64_t n = 1;; ++n) {
        TemporaryFolder place;
        const FolderRef folder = opened(place.path());
        prepared(*folder);
        TestFileCalls calls;
        calls.interrupt(most_bytes ? 2 : 0);
        calls.fail(n, f.code, f.forever);
        const Status status = remove(*folder);
        const bool failed = calls.failed() > 0;
        calls.fail(0, 0);
        const bool there = place.Files().count("2.checkpoint");
        if (status == FRUGAL_OK) {
          EXPECT_FALSE(there) << n;
        }
        if (there) {
          EXPECT_EQ(found(*folder, 2), ManifestText::of(example(2))) << n;
        }
        if (!failed) break;
        ASSERT_LT(n, 100);
      }
    }
}

TEST(Manifests, WithoutMemory) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  const Manifest first = example(1), second = example(2);
  ASSERT_OK(write_manifest(*folder, first));
  int64_t rounds = 0;
  for (WithoutMemory without; without.next();) {
    const Status status = without([&] { return write_manifest(*folder, second); });
    const bool there = place.Files().count("2.checkpoint");
    EXPECT_EQ(there, status == FRUGAL_OK);
    EXPECT_EQ(place.Files().count("2.checkpoint.new"), 0u);
    rounds = without.rounds();
  }
  EXPECT_GT(rounds, 5);
  EXPECT_EQ(found(*folder, 1), ManifestText::of(first));
  EXPECT_EQ(found(*folder, 2), ManifestText::of(second));
  for (WithoutMemory without; without.next();) {
    Manifest m;
    File keep;
    const Status status = without([&] { return read_manifest(*folder, 2, &m, &keep); });
    EXPECT_EQ(static_cast<bool>(keep), status == FRUGAL_OK);
    EXPECT_EQ(m.sequence, status == FRUGAL_OK ? 2u : 0u);
  }
  for (WithoutMemory without; without.next();) {
    Vector<uint64_t> all;
    const Status status = without([&] { return list_manifests(*folder, &all); });
    EXPECT_EQ(all.size(), status == FRUGAL_OK ? 2u : 0u);
  }
  for (WithoutMemory without; without.next();) {
    bool in_use = false;
    const Status status = without([&] { return delete_manifest(*folder, 2, &in_use); });
    EXPECT_EQ(place.Files().count("2.checkpoint"), status == FRUGAL_OK ? 0u : 1u);
  }
}

// The newest manifest gets another name. Calls on files fail in turn, by an error or for want of
// space: it has one of its two names, or, on a full disk, none.
TEST(Manifests, TheNewestIsRenamed) {
  for (const bool again : {false, true})
    for (const int code : {EIO, ENOSPC})
      for (int64_t n = 1;; ++n) {
        SCOPED_TRACE("call " + std::to_string(n) + " fails with " + std::to_string(code));
        TemporaryFolder place;
        const FolderRef folder = opened(place.path());
        ASSERT_OK(write_manifest(*folder, example(2)));
        if (again) place.Write("2.deleted", "of another folder");
        Manifest back;
        EXPECT_EQ(read_deleted(*folder, 2, &back),
                  again ? FRUGAL_ERR_DAMAGED : FRUGAL_ERR_NOT_FOUND);
        bool in_use = true, failed;
        Status status;
        {
          TestFileCalls calls;
          calls.fail(n, code);
          status = delete_manifest(*folder, 2, &in_use, true);
          failed = calls.failed() > 0;
        }
        const size_t old = place.Files().count("2.checkpoint");
        const size_t renamed = place.Files().count("2.deleted");
        if (status == FRUGAL_OK) {
          EXPECT_EQ(old, 0u);
          if (!failed) {
            ASSERT_OK(read_deleted(*folder, 2, &back));
            EXPECT_EQ(back.sequence, 2u);
          }
        } else {
          EXPECT_TRUE(old || renamed);
        }
        if (!failed) {
          EXPECT_GE(n, 4);
          break;
        }
      }
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  place.Write("3.deleted", std::string(100, 'x'));
  Manifest back;
  EXPECT_EQ(read_deleted(*folder, 3, &back), FRUGAL_ERR_DAMAGED);
}

// --- Damage --------------------------------------------------------------------------------------

bool is_of_damage(Status s) {
  return s == FRUGAL_ERR_DAMAGED || s == FRUGAL_ERR_TOO_NEW || s == FRUGAL_ERR_UNSUPPORTED;
}

TEST(DamagedManifests, EachByte) {
  const Manifest m = example();
  const std::string text = ManifestText::of(m);
  const Vector<uint64_t> right = encoded(m);
  const size_t bytes = right.size() * 8;
  std::printf("a manifest of %zu bytes\n", bytes);
  uint64_t damaged = 0, taken = 0;
  for (const bool sealed : {false, true})
    for (size_t at = sealed ? sizeof(ManifestEnvelope) : 0; at < bytes; ++at)
      for (const int how : {0x00, 0xff, 1 << (at % 8) | 0x100}) {
        Vector<uint64_t> words = right;
        auto* byte = reinterpret_cast<uint8_t*>(words.data()) + at;
        const uint8_t was = *byte;
        *byte = static_cast<uint8_t>(how & 0x100 ? was ^ how : how);
        if (sealed) seal_manifest(&words);
        Manifest back;
        const Status status = decoded(words, &back);
        if (*byte == was) {
          ASSERT_EQ(status, FRUGAL_OK) << at;
          ASSERT_EQ(ManifestText::of(back), text);
        } else if (!sealed) {
          ASSERT_TRUE(is_of_damage(status)) << at << " " << status << " " << LastMessage();
          ASSERT_TRUE(says("'here'")) << LastMessage();
          ++damaged;
        } else if (status == FRUGAL_OK) {
          // A number that may have this value, too.
          Manifest again;
          ASSERT_EQ(decoded(encoded(back), &again), FRUGAL_OK) << at << " " << LastMessage();
          ASSERT_EQ(ManifestText::of(again), ManifestText::of(back));
          ++taken;
        } else {
          ASSERT_EQ(status, FRUGAL_ERR_DAMAGED) << at << " " << LastMessage();
          ++damaged;
        }
        if (status != FRUGAL_OK) {
          ASSERT_EQ(back.sequence, 0u);
        }
      }
  std::printf("%llu faults found, %llu other manifests\n", static_cast<unsigned long long>(damaged),
              static_cast<unsigned long long>(taken));
  EXPECT_GT(damaged, 2 * bytes);
  EXPECT_GT(taken, 100u);
}

TEST(DamagedManifests, EachLength) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  const Vector<uint64_t> right = encoded(example());
  const std::string bytes(reinterpret_cast<const char*>(right.data()), right.size() * 8);
  for (size_t length = 0; length <= bytes.size() + 20; ++length) {
    std::string cut = bytes.substr(0, length);
    cut.resize(length);
    Vector<uint64_t> words((length + 7) / 8);
    if (length > 0) std::memcpy(words.data(), cut.data(), length);
    Manifest m;
    const Status status = decode_manifest("'here'", 1, words.data(), length, &m);
    ASSERT_EQ(status, length == bytes.size() ? FRUGAL_OK : FRUGAL_ERR_DAMAGED) << length;
    if (length > 80 && length % 16 != 0) continue;
    place.Write("1.checkpoint", cut);
    File keep;
    ASSERT_EQ(read_manifest(*folder, 1, &m, &keep), status) << length;
    ASSERT_EQ(static_cast<bool>(keep), status == FRUGAL_OK);
    if (status != FRUGAL_OK) {
      ASSERT_TRUE(says(place / "1.checkpoint' is damaged")) << LastMessage();
    }
  }
}

// With an envelope that says so rightly.
Status decoded_after(const std::function<void(ManifestEnvelope*)>& change) {
  Vector<uint64_t> words = encoded(example());
  ManifestEnvelope e;
  std::memcpy(&e, words.data(), sizeof e);
  change(&e);
  e.envelope_sum = checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0);
  std::memcpy(words.data(), &e, sizeof e);
  Manifest m;
  return decoded(words, &m);
}

TEST(DamagedManifests, TheEnvelope) {
  EXPECT_EQ(decoded_after([](ManifestEnvelope*) {}), FRUGAL_OK);
  EXPECT_EQ(decoded_after([](ManifestEnvelope* e) { e->version = kManifestVersion + 1; }),
            FRUGAL_ERR_TOO_NEW);
  EXPECT_TRUE(says("'here' has version 2")) << LastMessage();
  EXPECT_EQ(decoded_after([](ManifestEnvelope* e) { e->features = uint64_t{1} << 63; }),
            FRUGAL_ERR_TOO_NEW);
  EXPECT_TRUE(says("features 0x8000000000000000")) << LastMessage();
  EXPECT_EQ(decoded_after([](ManifestEnvelope* e) { e->byte_order = 0x04030201; }),
            FRUGAL_ERR_UNSUPPORTED);
  EXPECT_TRUE(says("other byte order")) << LastMessage();
  const struct {
    std::function<void(ManifestEnvelope*)> change;
    const char* message;
  } all[] = {
      {[](ManifestEnvelope* e) { e->magic[7] = 'X'; }, "does not begin as a manifest does"},
      {[](ManifestEnvelope* e) { e->byte_order = 0x01020305; }, "its byte order is 0x01020305"},
      {[](ManifestEnvelope* e) { e->version = 0; }, "no library writes version 0"},
      {[](ManifestEnvelope* e) { e->reserved = 6; }, "with 6 at byte 48"},
      {[](ManifestEnvelope* e) { e->sequence = 2; }, "it is the manifest of checkpoint 2"},
      {[](ManifestEnvelope* e) { e->message_bytes = uint64_t{1} << 60; },
       "its message has 1152921"},
      {[](ManifestEnvelope* e) { e->message_bytes -= 1; }, "its message has"},
      {[](ManifestEnvelope* e) { e->message_bytes = 8; }, "its message has 8"},
      {[](ManifestEnvelope* e) { e->message_bytes -= 8; }, "after the first 64"},
      {[](ManifestEnvelope* e) { e->message_bytes += 8; }, "after the first 64"},
      {[](ManifestEnvelope* e) { e->message_sum ^= 1; }, "from byte 64 on, is wrong"},
  };
  for (const auto& one : all) {
    EXPECT_EQ(decoded_after(one.change), FRUGAL_ERR_DAMAGED) << one.message;
    EXPECT_TRUE(says(one.message)) << LastMessage();
  }
}

TEST(DamagedManifests, ALongFileTakesNoMemory) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  ASSERT_OK(write_manifest(*folder, example()));
  std::string bytes = place.Read("1.checkpoint");
  ManifestEnvelope e;
  std::memcpy(&e, bytes.data(), sizeof e);
  e.message_bytes = kMostMessageBytes + 8;
  e.envelope_sum = checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0);
  std::memcpy(bytes.data(), &e, sizeof e);
  place.Write("1.checkpoint", bytes);
  ASSERT_EQ(truncate((place / "1.checkpoint").c_str(), sizeof e + kMostMessageBytes + 8), 0);
  Manifest m;
  File keep;
  EXPECT_EQ(read_manifest(*folder, 1, &m, &keep), FRUGAL_ERR_DAMAGED);
  EXPECT_TRUE(says("its message has 67108872 bytes")) << LastMessage();
}

TEST(DamagedManifests, StrangeFilesInTheirPlaces) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  ASSERT_OK(write_manifest(*folder, example()));
  ASSERT_EQ(rename((place / "1.checkpoint").c_str(), (place / "2.checkpoint").c_str()), 0);
  ASSERT_EQ(symlink("2.checkpoint", (place / "3.checkpoint").c_str()), 0);
  ASSERT_EQ(mkdir((place / "4.checkpoint").c_str(), 0700), 0);
  Manifest m;
  File keep;
  EXPECT_EQ(read_manifest(*folder, 2, &m, &keep), FRUGAL_ERR_DAMAGED);
  EXPECT_TRUE(says("it is the manifest of checkpoint 1")) << LastMessage();
  std::string bytes = place.Read("2.checkpoint");
  bytes.back() ^= 1;
  place.Write("1.checkpoint", bytes);
  EXPECT_EQ(read_manifest(*folder, 1, &m, &keep), FRUGAL_ERR_DAMAGED);
  EXPECT_TRUE(says(place / "1.checkpoint' is damaged: the checksum of its message"))
      << LastMessage();
  EXPECT_EQ(read_manifest(*folder, 3, &m, &keep), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(read_manifest(*folder, 4, &m, &keep), FRUGAL_ERR_NOT_FOUND);
}

// --- Hostile manifests, with right checksums -----------------------------------------------------

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(HostileManifests, EachIsNamed) {
  const struct {
    const char* message;
    std::function<void(Manifest*)> change;
  } all[] = {
      {"sequence is 4611686018427387904", [](Manifest* m) { m->sequence = kNumbersEnd; }},
      {"sequence is 0", [](Manifest* m) { m->sequence = 0; }},
      {"step is 18446744073709551551", [](Manifest* m) { m->step = UINT64_MAX - 64; }},
      {"world_size is 0", [](Manifest* m) { m->world_size = 0; }},
      {"world_size is 4097", [](Manifest* m) { m->world_size = 4097; }},
      {"the checkpoint's name has", [](Manifest* m) { m->name = "../x"; }},
      {"the checkpoint's name has", [](Manifest* m) { m->name = String("a\0b", 3); }},
      {"the checkpoint's name has", [](Manifest* m) { m->name = String(256, 'x'); }},
      {"next_table is 18446744073709551615", [](Manifest* m) { m->next_table = UINT64_MAX; }},
      {"next_file is 4611686018427387905", [](Manifest* m) { m->next_file = kNumbersEnd + 1; }},
      {"is not below next_table", [](Manifest* m) { m->next_table = m->tables[1].number; }},
      {"is not below next_file",
       [](Manifest* m) { m->next_file = m->tables[1].files[1].info.number; }},
      {"follows table", [](Manifest* m) { m->tables[1].number = m->tables[0].number; }},
      {"follows table", [](Manifest* m) { std::swap(m->tables[0], m->tables[1]); }},
      {"two tables have the name", [](Manifest* m) { m->tables[1].name = m->tables[0].name; }},
      {"has no name", [](Manifest* m) { m->tables[0].name.clear(); }},
      {"has no name", [](Manifest* m) { m->tables[0].name = String(256, 'x'); }},
      {"has no name", [](Manifest* m) { m->tables[0].name += '\0'; }},
      {"key_space is 2", [](Manifest* m) { m->tables[0].config.key_space = 2; }},
      {"key_space is -1", [](Manifest* m) { m->tables[0].config.key_space = -1; }},
      {"dtype is 1", [](Manifest* m) { m->tables[0].config.dtype = 1; }},
      {"rows is 0", [](Manifest* m) { m->tables[0].config.rows = 0; }},
      {"rows is 1152921504606846976",
       [](Manifest* m) { m->tables[0].config.rows = uint64_t{1} << 60; }},
      {"dim is 0", [](Manifest* m) { m->tables[0].config.dim = 0; }},
      {"dim is 65537", [](Manifest* m) { m->tables[0].config.dim = 65537; }},
      {"init is 5", [](Manifest* m) { m->tables[0].config.init = 5; }},
      {"init_a is not finite", [](Manifest* m) { m->tables[0].config.init_a = kInfinity; }},
      {"init_b is not finite", [](Manifest* m) { m->tables[0].config.init_b = -kInfinity; }},
      {"nan_policy is 3", [](Manifest* m) { m->tables[0].config.nan_policy = 3; }},
      {"flags has the unknown flags 0x2",
       [](Manifest* m) {
         m->tables[0].config.key_space = FRUGAL_DENSE;
         m->tables[0].config.flags = 3;
       }},
      {"flags has the unknown flags 0x1",
       [](Manifest* m) {
         m->tables[0].config.key_space = FRUGAL_HASHED;
         m->tables[0].config.flags = FRUGAL_TABLE_LAZY;
       }},
      {"optimizer.kind is 7", [](Manifest* m) { m->tables[0].config.optimizer.kind = 7; }},
      {"optimizer.kind is -1", [](Manifest* m) { m->tables[0].optimizer.kind = -1; }},
      {"optimizer.flags has the unknown flags 0x80000000",
       [](Manifest* m) { m->tables[0].optimizer.flags = 0x80000000u; }},
      {"optimizer.rho is not finite",
       [](Manifest* m) { m->tables[0].optimizer.rho = std::numeric_limits<float>::quiet_NaN(); }},
      {"optimizer.grad_scale is not finite",
       [](Manifest* m) { m->tables[1].later[1].optimizer.grad_scale = kInfinity; }},
      {"the step of a change is", [](Manifest* m) { m->tables[1].later[0].first_step = m->step; }},
      {"the step of a change is",
       [](Manifest* m) { m->tables[1].later[0].first_step = m->step + 1; }},
      {"the step of a change is",
       [](Manifest* m) { m->tables[1].later[1].first_step = m->tables[1].later[0].first_step; }},
      {"the step of a change is",
       [](Manifest* m) { m->tables[1].later[1].first_step = UINT64_MAX; }},
      {"has another kind",
       [](Manifest* m) {
         int32_t& kind = m->tables[1].later[1].optimizer.kind;
         kind = kind ? kind - 1 : 1;
       }},
      {"has another kind of optimizer or initial_accumulator",
       [](Manifest* m) {
         ManifestTable& t = m->tables[1];
         t.optimizer.kind = t.later[0].optimizer.kind = t.later[1].optimizer.kind = FRUGAL_FTRL;
         t.optimizer.initial_accumulator = 1;
         t.later[0].optimizer.initial_accumulator = 2;
       }},
      {"the number of changes is 4097",
       [](Manifest* m) {
         ManifestTable& t = m->tables[1];
         t.later.resize(4097, t.later[0]);
       }},
      {"the format of its rows", [](Manifest* m) { m->tables[0].format.value_bytes += 4; }},
      {"the format of its rows", [](Manifest* m) { m->tables[0].format.state_columns += 1; }},
      {"the format of its rows", [](Manifest* m) { m->tables[0].format.state_column_bytes ^= 4; }},
      {"the format of its rows",
       [](Manifest* m) { m->tables[0].format.element = ElementType::kFloat16; }},
      {"the format of its rows",
       [](Manifest* m) { m->tables[0].format.element = static_cast<ElementType>(77); }},
      {"two tables have file",
       [](Manifest* m) { m->tables[1].files[0].info.number = m->tables[0].files[0].info.number; }},
      {"it follows file",
       [](Manifest* m) { m->tables[1].files[1].info.number = m->tables[1].files[0].info.number; }},
      {"its sequence is 0", [](Manifest* m) { m->tables[0].files[1].info.sequence = 0; }},
      {"its sequence is 18446744073709551615",
       [](Manifest* m) { m->tables[0].files[1].info.sequence = UINT64_MAX; }},
      {"the number of entries is 1048577",
       [](Manifest* m) { m->tables[0].files[1].info.entries = kMostRecords + 1; }},
      {"the number of records is",
       [](Manifest* m) {
         m->tables[0].files[1].info.records = m->tables[0].files[1].info.entries + 1;
       }},
      {"the number of live records is",
       [](Manifest* m) { m->tables[0].files[1].live = UINT64_MAX; }},
      {"its length is", [](Manifest* m) { m->tables[0].files[1].info.length = 0; }},
      {"its length is", [](Manifest* m) { m->tables[0].files[1].info.length -= 2 * kFileBlock; }},
      {"its length is", [](Manifest* m) { m->tables[0].files[1].info.length = UINT64_MAX; }},
      {"is no number of blocks", [](Manifest* m) { m->tables[0].files[1].info.length += 8; }},
      {"the number of live rows is", [](Manifest* m) { m->tables[0].live_rows = UINT32_MAX; }},
      {"the number of live rows is",
       [](Manifest* m) { m->tables[0].live_rows = m->tables[0].config.rows + 1; }},
      {"the blob file's length is 18446744073709551615",
       [](Manifest* m) { m->blob_bytes = UINT64_MAX; }},
      {"and no blob", [](Manifest* m) { m->blobs.clear(); }},
      {"there is a blob of rank", [](Manifest* m) { m->blobs[1].rank = m->world_size; }},
      {"follows that of rank", [](Manifest* m) { std::swap(m->blobs[0], m->blobs[1]); }},
      {"is not inside of a blob file", [](Manifest* m) { m->blobs[0].at = m->blob_bytes + 1; }},
      {"is not inside of a blob file", [](Manifest* m) { m->blobs[1].bytes = UINT64_MAX; }},
      {"is not inside of a blob file",
       [](Manifest* m) {
         m->blobs[1].at = 1;
         m->blobs[1].bytes = m->blob_bytes;
       }},
  };
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  for (const auto& one : all) {
    Manifest m = example();
    one.change(&m);
    Manifest back;
    EXPECT_EQ(decoded(encoded(m), &back, m.sequence), FRUGAL_ERR_DAMAGED) << one.message;
    EXPECT_TRUE(says(one.message)) << one.message << ": " << LastMessage();
    EXPECT_TRUE(says("'here' is damaged")) << LastMessage();
    EXPECT_EQ(write_manifest(*folder, m), FRUGAL_ERR_INVALID_ARGUMENT) << one.message;
    EXPECT_TRUE(says(one.message)) << one.message << ": " << LastMessage();
  }
  // What cannot be encoded.
  Manifest m = example();
  m.tables[0].files[0].info.table += 1;
  EXPECT_EQ(write_manifest(*folder, m), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_TRUE(says("it is of table")) << LastMessage();
  EXPECT_EQ(place.Files(), std::set<std::string>{"lock"});
}

TEST(HostileManifests, TooManyFilesForAMessage) {
  TemporaryFolder place;
  const FolderRef folder = opened(place.path());
  Manifest m = example();
  uint64_t number = 0;
  for (ManifestTable& t : m.tables) {
    ManifestFile f = t.files[0];
    f.info.records = f.info.entries = f.live = 0;
    f.info.length = kFileBlock;
    t.live_rows = 0;
    t.files.assign(700'000, f);
    for (ManifestFile& each : t.files) each.info.number = number++;
  }
  m.next_file = number;
  EXPECT_EQ(write_manifest(*folder, m), FRUGAL_ERR_UNSUPPORTED);
  EXPECT_TRUE(says("may have 67108864")) << LastMessage();
  EXPECT_EQ(place.Files(), std::set<std::string>{"lock"});
  m.tables.pop_back();
  m.tables[0].files.resize(kMostFiles, m.tables[0].files[0]);
  for (size_t i = 0; i < kMostFiles; ++i) m.tables[0].files[i].info.number = i;
  m.next_file = kMostFiles;
  ASSERT_OK(write_manifest(*folder, m));
  Manifest back;
  File keep;
  ASSERT_OK(read_manifest(*folder, 1, &back, &keep));
  ASSERT_EQ(back.tables[0].files.size(), kMostFiles);
  EXPECT_EQ(back.tables[0].files.back().info, m.tables[0].files.back().info);
  m.tables[0].files.push_back(m.tables[0].files.back());
  EXPECT_EQ(write_manifest(*folder, m), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_TRUE(says("the number of files is 1048577")) << LastMessage();
}

// Pointers of a message, as Cap'n Proto encodes them: word by word.
class Message {
 public:
  // Without tables, or with one, all that it has.
  explicit Message(bool table = false) {
    Manifest m = example();
    m.tables.resize(table ? 1 : 0);
    m.name = "a name of three words..";  // 24 bytes with its end
    words = encoded(m);
    data_words_ = root() >> 32 & 0xffff;
  }
  static constexpr size_t kFirst = sizeof(ManifestEnvelope) / 8 + 1;  // word of the segment
  uint64_t& root() { return words[kFirst]; }
  uint64_t& pointer(size_t i) { return words[kFirst + 1 + data_words_ + i]; }
  // Of the first table. A word before it has the sizes of its elements.
  uint64_t& pointer_of_table(size_t i) {
    const auto at = static_cast<size_t>(&pointer(kTables) - words.data());
    const size_t tag = at + 1 + (static_cast<uint32_t>(words[at]) >> 2);
    return words[tag + 1 + (words[tag] >> 32 & 0xffff) + i];
  }
  // 0 to 6: elements of 0 bits to a pointer; 7: `count` words of structs.
  static uint64_t list(int64_t offset, uint64_t size, uint64_t count) {
    return 1 | (static_cast<uint64_t>(offset) << 2 & 0xfffffffcu) | size << 32 | count << 35;
  }
  Status decode() {
    seal_manifest(&words);
    Manifest back;
    return decoded(words, &back);
  }
  enum { kName, kTables, kBlobs };
  enum { kTableName, kCreated, kOptimizer, kLater, kFiles };  // of a table
  Vector<uint64_t> words;

 private:
  size_t data_words_;
};

TEST(HostileManifests, PointersOfTheMessage) {
  ASSERT_OK(Message().decode());
  constexpr uint64_t kMany = (1u << 29) - 1;
  const struct {
    const char* what;
    std::function<void(Message*)> change;
  } all[] = {
      {"elements without size",
       [](Message* m) { m->pointer(Message::kTables) = Message::list(1, 0, kMany); }},
      {"elements of a byte",
       [](Message* m) { m->pointer(Message::kTables) = Message::list(1, 2, 24); }},
      {"elements of a bit",
       [](Message* m) { m->pointer(Message::kTables) = Message::list(1, 1, 64); }},
      {"far outside",
       [](Message* m) { m->pointer(Message::kTables) = Message::list(1, 7, kMany); }},
      {"before the message",
       [](Message* m) { m->pointer(Message::kTables) = Message::list(-1000, 7, 1); }},
      {"elements of a byte, of a second list",
       [](Message* m) { m->pointer(Message::kBlobs) = Message::list(0, 2, 40); }},
      {"twice the same list",
       [](Message* m) { m->pointer(Message::kTables) = m->pointer(Message::kBlobs) + (1u << 2); }},
      {"a text without an end",
       [](Message* m) {
         auto* text = reinterpret_cast<char*>(&m->pointer(Message::kName) + 3);
         for (int i = 0; i < 24; ++i) text[i] = 'x';
       }},
      {"a struct where a list is to be",
       [](Message* m) { m->pointer(Message::kTables) = uint64_t{1} << 32; }},
      {"a pointer into another segment",
       [](Message* m) { m->pointer(Message::kTables) = 2 | uint64_t{5} << 32; }},
      {"a capability", [](Message* m) { m->pointer(Message::kTables) = 3; }},
      {"a root that is a list", [](Message* m) { m->root() = Message::list(0, 2, 8); }},
      {"no root", [](Message* m) { m->root() = 0; }},
      {"two segments", [](Message* m) { m->words[Message::kFirst - 1] |= 1; }},
      {"a short segment", [](Message* m) { m->words[Message::kFirst - 1] -= uint64_t{1} << 32; }},
  };
  for (const auto& one : all) {
    Message m;
    one.change(&m);
    EXPECT_EQ(m.decode(), FRUGAL_ERR_DAMAGED) << one.what;
  }
  ASSERT_OK(Message(true).decode());
  for (const auto of : {Message::kLater, Message::kFiles}) {
    Message m(true);
    m.pointer_of_table(of) = Message::list(0, 2, 200);
    EXPECT_EQ(m.decode(), FRUGAL_ERR_DAMAGED) << of;
    EXPECT_TRUE(says("a list of its message is longer than the message")) << LastMessage();
  }
}

}  // namespace frugal::manifest_test
