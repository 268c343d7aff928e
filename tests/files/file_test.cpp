// Folders and files: locks, names that cannot leave the folder, whole reads and writes, and what
// each failed call means.
#include "files/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "support/file_calls.h"
#include "support/inside.h"
#include "support/temporary_folder.h"

namespace frugal::file_test {

using Use = Folder::Use;
using FolderRef = std::shared_ptr<Folder>;

mode_t mode_of(const std::string& path) {
  struct stat found {};
  EXPECT_EQ(lstat(path.c_str(), &found), 0) << path;
  return found.st_mode & 0777;
}

std::string pattern(size_t n, uint64_t seed) {
  std::string bytes(n, 0);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<char>((i * 131 + seed * 7) % 251);
  return bytes;
}

FolderRef opened(const std::string& path, Use use = Use::kCreate) {
  FolderRef folder;
  EXPECT_EQ(Folder::open(path.c_str(), use, &folder), FRUGAL_OK) << LastMessage();
  return folder;
}

TEST(Folders, OneWritesManyRead) {
  TemporaryFolder place;
  const std::string path = place / "f";
  FolderRef none;
  EXPECT_EQ(Folder::open(path.c_str(), Use::kRead, &none), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(Folder::open(path.c_str(), Use::kWrite, &none), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(Folder::open((place / "a/b").c_str(), Use::kCreate, &none), FRUGAL_ERR_NOT_FOUND);
  FolderRef writer = opened(path);
  EXPECT_EQ(mode_of(path), 0700u);
  EXPECT_EQ(mode_of(path + "/lock"), 0600u);
  EXPECT_EQ(Folder::open(path.c_str(), Use::kWrite, &none), FRUGAL_ERR_BUSY);
  EXPECT_NE(LastMessage().find(path), std::string::npos);
  EXPECT_EQ(none, nullptr);
  const FolderRef reader = opened(path, Use::kRead);
  EXPECT_EQ(reader->may_write(), FRUGAL_ERR_UNSUPPORTED);
  EXPECT_EQ(writer->may_write(), FRUGAL_OK);
  // Another process finds it locked, too, and a child made by fork() does not keep the lock.
  const pid_t child = fork();
  if (child == 0) {
    FolderRef there;
    _exit(Folder::open(path.c_str(), Use::kWrite, &there) == FRUGAL_ERR_BUSY ? 0 : 1);
  }
  int ended = -1;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  const pid_t sleeper = fork();
  if (sleeper == 0) {
    pause();
    _exit(0);
  }
  writer.reset();
  writer = opened(path, Use::kWrite);
  kill(sleeper, SIGKILL);
  ASSERT_EQ(waitpid(sleeper, &ended, 0), sleeper);
}

// Another file takes the name before the first one is locked.
class ReplacesLock : public FileCalls {
 public:
  explicit ReplacesLock(std::string path) : path_(std::move(path)) { test_file_calls(this); }
  ~ReplacesLock() override { test_file_calls(nullptr); }
  int lock(int fd, int operation) const override {
    if (locks_++ == 0) {
      EXPECT_EQ(::unlink(path_.c_str()), 0);
      std::ofstream made(path_);
    }
    return FileCalls::lock(fd, operation);
  }
  int locks() const { return locks_; }

 private:
  const std::string path_;
  mutable int locks_ = 0;
};

TEST(Folders, ALockFileThatIsReplacedMeanwhileIsNotTrusted) {
  TemporaryFolder place;
  const ReplacesLock calls(place / "lock");
  const FolderRef folder = opened(place.path());
  EXPECT_EQ(calls.locks(), 2);
  FolderRef none;
  EXPECT_EQ(Folder::open(place.path().c_str(), Use::kWrite, &none), FRUGAL_ERR_BUSY);
}

TEST(Folders, ALockFileThatIsReplacedIsNotTrusted) {
  TemporaryFolder place;
  FolderRef first = opened(place.path());
  ASSERT_EQ(unlink((place / "lock").c_str()), 0);
  FolderRef second = opened(place.path());  // of the new file
  first.reset();
  FolderRef none;
  EXPECT_EQ(Folder::open(place.path().c_str(), Use::kWrite, &none), FRUGAL_ERR_BUSY);
}

TEST(Folders, StrangeThingsInTheirPlaces) {
  TemporaryFolder place;
  FolderRef none;
  place.Write("file", "x");
  EXPECT_EQ(Folder::open((place / "file").c_str(), Use::kCreate, &none),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(Folder::open("", Use::kCreate, &none), FRUGAL_ERR_NOT_FOUND);
  EXPECT_EQ(Folder::open(std::string(5000, 'a').c_str(), Use::kCreate, &none),
            FRUGAL_ERR_INVALID_ARGUMENT);
  // The lock is a link to a file outside, a pipe, a folder.
  const std::string lock = place / "lock";
  ASSERT_EQ(symlink((place / "file").c_str(), lock.c_str()), 0);
  EXPECT_EQ(Folder::open(place.path().c_str(), Use::kWrite, &none), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_EQ(unlink(lock.c_str()), 0);
  ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);
  EXPECT_EQ(Folder::open(place.path().c_str(), Use::kWrite, &none), FRUGAL_ERR_INVALID_ARGUMENT);
  ASSERT_EQ(unlink(lock.c_str()), 0);
  ASSERT_EQ(mkdir(lock.c_str(), 0700), 0);
  EXPECT_EQ(Folder::open(place.path().c_str(), Use::kWrite, &none), FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST(Folders, NamesStayInside) {
  TemporaryFolder place;
  place.Write("outside", "secret");
  const std::string path = place / "f";
  FolderRef folder = opened(path);
  ASSERT_EQ(symlink("../outside", (path + "/link").c_str()), 0);
  ASSERT_EQ(mkfifo((path + "/pipe").c_str(), 0600), 0);
  ASSERT_EQ(mkdir((path + "/sub").c_str(), 0700), 0);
  File file;
  for (const char* name : {"../outside", "/etc/passwd", "..", ".", "", "sub/x", "link"})
    EXPECT_EQ(folder->open_file(name, false, &file), FRUGAL_ERR_INVALID_ARGUMENT) << name;
  for (const char* name : {"pipe", "sub", "missing"})
    EXPECT_EQ(folder->open_file(name, false, &file), FRUGAL_ERR_NOT_FOUND) << name;
  EXPECT_EQ(folder->create("link", false, &file), FRUGAL_ERR_EXISTS);
  EXPECT_FALSE(file);
  ASSERT_OK(folder->create("a", false, &file));
  EXPECT_EQ(mode_of(path + "/a"), 0600u);
  EXPECT_EQ(folder->create("a", false, &file), FRUGAL_ERR_EXISTS);
  Vector<String> names;
  ASSERT_OK(folder->list(&names));
  std::sort(names.begin(), names.end());
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(names[0], "a");
  EXPECT_EQ(names[1], "lock");
}

TEST(Folders, FilesGetOtherNamesAndGo) {
  TemporaryFolder place;
  FolderRef folder = opened(place / "f"), other = opened(place / "g");
  File file;
  ASSERT_OK(folder->create("a.new", false, &file));
  ASSERT_OK(file.write(0, "abc", 3));
  ASSERT_OK(folder->create("b", false, &file));
  EXPECT_EQ(folder->rename("a.new", "b"), FRUGAL_ERR_EXISTS);
  EXPECT_EQ(folder->rename("missing", "c"), FRUGAL_ERR_NOT_FOUND);
  ASSERT_OK(folder->rename("a.new", "a"));
  ASSERT_OK(folder->link("a", *other));
  EXPECT_EQ(folder->link("a", *other), FRUGAL_ERR_EXISTS);
  EXPECT_EQ(place.Read("g/a"), "abc");
  ASSERT_OK(folder->open_file("a", false, &file));
  bool has = false, locked = false;
  ASSERT_OK(file.has_name(&has));
  EXPECT_TRUE(has);
  File again;
  ASSERT_OK(folder->open_file("a", false, &again));
  ASSERT_OK(file.lock_shared(&locked));
  EXPECT_TRUE(locked);
  ASSERT_OK(again.lock_shared(&locked));
  EXPECT_TRUE(locked);
  File third;
  ASSERT_OK(folder->open_file("a", false, &third));
  ASSERT_OK(third.lock_alone(&locked));
  EXPECT_FALSE(locked);
  again.close();
  file.close();
  ASSERT_OK(third.lock_alone(&locked));
  EXPECT_TRUE(locked);
  ASSERT_OK(folder->remove("a"));
  ASSERT_OK(folder->remove("a"));  // it is gone
  ASSERT_OK(third.has_name(&has));
  EXPECT_FALSE(has);
  ASSERT_OK(folder->create("a", false, &file));
  ASSERT_OK(third.has_name(&has));
  EXPECT_FALSE(has);  // another file of that name
  ASSERT_OK(folder->sync());
}

TEST(Files, ReadAndWriteWhole) {
  TemporaryFolder place;
  TestFileCalls calls;
  FolderRef folder = opened(place / "f");
  const std::string bytes = pattern(100'000, 3);
  for (const bool direct : {false, true})
    for (const bool refused : {false, true}) {
      calls.refuse_direct(refused);
      const std::string name = text("%d%d", direct, refused).c_str();
      File file;
      ASSERT_OK(folder->create(name.c_str(), direct, &file));
      EXPECT_TRUE(!refused || file.alignment() == 1);
      const size_t step = file.alignment() == 1 ? 777 : file.alignment();
      const size_t size = bytes.size() / step * step;
      ASSERT_OK(file.allocate(size));
      struct Aligned {
        explicit Aligned(size_t n) : at(static_cast<char*>(std::aligned_alloc(4096, n))) {}
        ~Aligned() { std::free(at); }
        char* at;
      } memory((bytes.size() + 4095) / 4096 * 4096);
      std::memcpy(memory.at, bytes.data(), bytes.size());
      // Short counts, of a size that keeps the alignment, and interruptions.
      calls.shorten(step);
      calls.interrupt(2);
      ASSERT_OK(file.write(0, memory.at, size));
      ASSERT_OK(file.sync());
      std::memset(memory.at, 0, bytes.size());
      ASSERT_OK(file.read(0, memory.at, size));
      calls.shorten(0);
      calls.interrupt(0);
      EXPECT_EQ(std::memcmp(memory.at, bytes.data(), size), 0);
      uint64_t found = 0;
      ASSERT_OK(file.size(&found));
      EXPECT_EQ(found, size);
      EXPECT_EQ(file.read(step, memory.at, size), FRUGAL_ERR_IO);
      EXPECT_NE(LastMessage().find("ends at byte"), std::string::npos) << LastMessage();
      ASSERT_OK(file.resize(10));
      ASSERT_OK(file.size(&found));
      EXPECT_EQ(found, 10u);
    }
}

TEST(Files, ALimitOfSizesIsNoSignal) {
  TemporaryFolder place;
  FolderRef folder = opened(place / "f");
  File file;
  ASSERT_OK(folder->create("a", false, &file));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit{16, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const Status within = file.write(0, "0123456789abcdef", 16);
  const Status past = file.write(16, "x", 1);
  const Status longer = file.allocate(17), resized = file.resize(17);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(within, FRUGAL_OK);
  EXPECT_EQ(past, FRUGAL_ERR_NO_SPACE);
  EXPECT_EQ(longer, FRUGAL_ERR_NO_SPACE);
  EXPECT_EQ(resized, FRUGAL_ERR_NO_SPACE);
}

TEST(Files, AFailedSyncPoisonsTheFolder) {
  for (const bool of_folder : {false, true}) {
    TemporaryFolder place;
    TestFileCalls calls;
    FolderRef folder = opened(place / "f");
    File file, other;
    ASSERT_OK(folder->create("a", false, &file));
    ASSERT_OK(folder->create("b", false, &other));
    ASSERT_OK(file.write(0, "abc", 3));
    calls.fail(1, EIO);
    EXPECT_EQ(of_folder ? folder->sync() : file.sync(), FRUGAL_ERR_IO);
    const std::string first = LastMessage();
    EXPECT_NE(first.find(of_folder ? "f'" : "f/a'"), std::string::npos) << first;
    // No call of the system is made any more that would write.
    const int64_t syncs = calls.syncs(), so_far = calls.calls();
    File third;
    const std::function<Status()> writes[] = {[&] { return file.sync(); },
                                              [&] { return other.sync(); },
                                              [&] { return other.write(0, "x", 1); },
                                              [&] { return other.allocate(10); },
                                              [&] { return other.resize(10); },
                                              [&] { return folder->sync(); },
                                              [&] { return folder->create("c", false, &third); },
                                              [&] { return folder->rename("a", "c"); },
                                              [&] { return folder->remove("a"); },
                                              [&] { return folder->link("b", *folder); },
                                              [&] { return folder->may_write(); }};
    for (const auto& write : writes) {
      EXPECT_EQ(write(), FRUGAL_ERR_IO);
      EXPECT_EQ(LastMessage(), first);
    }
    EXPECT_EQ(calls.syncs(), syncs);
    EXPECT_EQ(calls.calls(), so_far);
    // Reads go on, and so does another folder.
    char bytes[3];
    ASSERT_OK(file.read(0, bytes, 3));
    EXPECT_EQ(std::memcmp(bytes, "abc", 3), 0);
    FolderRef elsewhere = opened(place / "g");
    ASSERT_OK(elsewhere->create("a", false, &third));
    ASSERT_OK(third.sync());
    // After it is closed the folder can be opened again.
    folder.reset();
    file.close();
    other.close();
    folder = opened(place / "f", Use::kWrite);
    ASSERT_OK(folder->sync());
  }
}

// Each call fails in turn, once and from then on. A failure is the status of its errno, names the
// folder, and leaves no descriptor.
TEST(Files, EachCallFails) {
  struct Kind {
    int code;
    Status status;
  };
  int64_t failures = 0;
  for (const Kind kind : {Kind{EIO, FRUGAL_ERR_IO}, Kind{ENOSPC, FRUGAL_ERR_NO_SPACE},
                          Kind{EMFILE, FRUGAL_ERR_OUT_OF_MEMORY}})
    for (const bool forever : {false, true}) {
      bool done = false;
      for (int64_t n = 1; !done; ++n) {
        ASSERT_LT(n, 100);
        TemporaryFolder place;
        TestFileCalls calls;
        const auto job = [&]() -> Status {
          FolderRef folder;
          FRUGAL_TRY(Folder::open((place / "f").c_str(), Use::kCreate, &folder));
          File file, again;
          FRUGAL_TRY(folder->create("a.new", true, &file));
          FRUGAL_TRY(file.allocate(8192));
          alignas(4096) char bytes[8192] = {};
          FRUGAL_TRY(file.write(0, bytes, sizeof bytes));
          FRUGAL_TRY(file.sync());
          FRUGAL_TRY(folder->rename("a.new", "a"));
          FRUGAL_TRY(folder->sync());
          FRUGAL_TRY(folder->open_file("a", false, &again));
          bool has;
          FRUGAL_TRY(again.lock_alone(&has));
          FRUGAL_TRY(again.has_name(&has));
          uint64_t size;
          FRUGAL_TRY(again.size(&size));
          FRUGAL_TRY(again.read(0, bytes, 100));
          Vector<String> names;
          FRUGAL_TRY(folder->list(&names));
          FRUGAL_TRY(file.resize(100));
          return folder->remove("a");
        };
        const int before = dup(0);
        close(before);
        calls.fail(n, kind.code, forever);
        const Status status = job();
        done = calls.failed() == 0;
        calls.fail(0, 0);
        const int after = dup(0);
        close(after);
        EXPECT_EQ(before, after) << "call " << n << " leaves a descriptor";
        if (done) {
          EXPECT_EQ(status, FRUGAL_OK) << LastMessage();
        } else if (status != FRUGAL_OK) {
          ++failures;
          // A sync that fails is a failed write, whatever the disk says.
          EXPECT_TRUE(status == kind.status || status == FRUGAL_ERR_IO) << LastMessage();
          EXPECT_NE(LastMessage().find(place.path()), std::string::npos) << LastMessage();
        }
      }
    }
  EXPECT_GT(failures, 60);
}

}  // namespace frugal::file_test
