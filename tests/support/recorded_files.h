// Records what is done to a folder, and rebuilds it as a disk could have it after a power cut at
// any moment.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/file_calls.h"
#include "support/random.h"

namespace frugal_test {

// It is the library's table while it lives. The folder is not there at the beginning; its parent
// is, with a name that is on disk. Nothing is opened with O_DIRECT.
class RecordedFiles : public frugal::FileCalls {
 public:
  struct Event {
    enum Kind {
      kMakeFolder,
      kSyncParent,
      kSyncFolder,
      kName,    // `name` is file `file`: created or linked
      kRename,  // from `name` to `to`
      kUnlink,
      kWrite,   // `data` at `at`
      kResize,  // to `at` bytes
      kSync,
      kMark,  // the test's: `at`
    } kind;
    size_t file = 0;
    uint64_t at = 0;
    std::string name{}, to{}, data{};
  };
  // What becomes of all that was not synced.
  enum class Unsynced { kLost, kKept, kRandom };

  explicit RecordedFiles(const std::string& path)
      : path_(path), parent_(std::filesystem::path(path).parent_path()) {
    frugal::test_file_calls(this);
  }
  ~RecordedFiles() override { frugal::test_file_calls(nullptr); }

  const std::vector<Event>& events() const { return events_; }
  void mark(uint64_t at) {
    const std::lock_guard lock(mu_);
    events_.push_back({Event::kMark, 0, at});
  }

  // Makes the folder `to`, as it could be after the first `n` events.
  void rebuild(size_t n, Unsynced unsynced, frugal::Random& random, const std::string& to) const {
    const auto happens = [&] {
      return unsynced == Unsynced::kKept || (unsynced == Unsynced::kRandom && random.one_in(2));
    };
    std::filesystem::remove_all(to);
    bool made = false, made_synced = false;
    std::map<std::string, size_t> names;  // on disk
    std::vector<const Event*> naming;     // since the folder's last sync
    std::map<size_t, Content> files;
    for (size_t i = 0; i < n; ++i) {
      const Event& e = events_[i];
      switch (e.kind) {
        case Event::kMakeFolder:
          made = true;
          break;
        case Event::kSyncParent:
          made_synced = made;
          break;
        case Event::kSyncFolder:
          for (const Event* named : naming) apply(*named, &names);
          naming.clear();
          break;
        case Event::kName:
        case Event::kRename:
        case Event::kUnlink:
          naming.push_back(&e);
          break;
        case Event::kWrite:
        case Event::kResize:
          files[e.file].since.push_back(&e);
          break;
        case Event::kSync:
          files[e.file].persist([] { return true; });
          break;
        case Event::kMark:
          break;
      }
    }
    if (!made || (!made_synced && !happens())) return;
    for (const Event* named : naming)
      if (happens()) apply(*named, &names);
    std::filesystem::create_directory(to);
    std::map<size_t, bool> persisted;
    for (const auto& [name, file] : names) {
      Content& content = files[file];
      if (!persisted[file]) content.persist(happens);
      persisted[file] = true;
      std::ofstream(to + "/" + name, std::ios::binary) << content.bytes;
    }
  }

  int open(int folder, const char* name, int flags, mode_t mode) const override {
    if (flags & O_DIRECT) {
      errno = EINVAL;
      return -1;
    }
    const std::lock_guard lock(mu_);
    struct ::stat before {};
    const bool is_new =
        (flags & O_CREAT) && FileCalls::stat_at(folder, name, &before) != 0 && errno == ENOENT;
    const int fd = FileCalls::open(folder, name, flags, mode);
    if (fd < 0) return fd;
    fds_.erase(fd);
    const std::string place = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    if (place == path_) {
      fds_[fd] = kFolder;
    } else if (place == parent_) {
      fds_[fd] = kParent;
    } else if (std::filesystem::path(place).parent_path() == path_) {
      struct ::stat found {};
      FileCalls::stat(fd, &found);
      if (is_new) {
        numbers_[found.st_ino] = ++last_file_;
        events_.push_back({Event::kName, last_file_, 0, name});
      }
      fds_[fd] = numbers_.at(found.st_ino);
    }
    return fd;
  }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    const std::lock_guard lock(mu_);
    const ssize_t put = FileCalls::write(fd, from, bytes, at);
    if (put > 0 && fds_.count(fd))
      events_.push_back({Event::kWrite,
                         fds_[fd],
                         at,
                         {},
                         {},
                         std::string(static_cast<const char*>(from), static_cast<size_t>(put))});
    return put;
  }
  int sync(int fd) const override {
    const std::lock_guard lock(mu_);
    const auto found = fds_.find(fd);
    if (found != fds_.end())
      events_.push_back({found->second == kFolder   ? Event::kSyncFolder
                         : found->second == kParent ? Event::kSyncParent
                                                    : Event::kSync,
                         found->second});
    return 0;
  }
  int allocate(int, uint64_t, uint64_t) const override {
    errno = EOPNOTSUPP;
    return -1;
  }
  int resize(int fd, uint64_t bytes) const override {
    const std::lock_guard lock(mu_);
    const int done = FileCalls::resize(fd, bytes);
    if (done == 0 && fds_.count(fd)) events_.push_back({Event::kResize, fds_[fd], bytes});
    return done;
  }
  int rename(int folder, const char* from, const char* to) const override {
    const std::lock_guard lock(mu_);
    struct ::stat found {};
    FileCalls::stat_at(folder, from, &found);
    const int done = FileCalls::rename(folder, from, to);
    if (done == 0 && ours(folder))
      events_.push_back({Event::kRename, numbers_.at(found.st_ino), 0, from, to});
    return done;
  }
  int unlink(int folder, const char* name) const override {
    const std::lock_guard lock(mu_);
    const int done = FileCalls::unlink(folder, name);
    if (done == 0 && ours(folder)) events_.push_back({Event::kUnlink, 0, 0, name});
    return done;
  }
  int make_folder(int folder, const char* name, mode_t mode) const override {
    const std::lock_guard lock(mu_);
    const int done = FileCalls::make_folder(folder, name, mode);
    if (done == 0 && name == path_) events_.push_back({Event::kMakeFolder});
    return done;
  }

 private:
  static constexpr size_t kFolder = SIZE_MAX, kParent = SIZE_MAX - 1, kSector = 512;

  struct Content {
    std::string bytes;                // on disk
    std::vector<const Event*> since;  // the file's last sync
    template <class Happens>
    void persist(Happens happens) {
      for (const Event* e : since) {
        if (e->kind == Event::kResize) {
          if (happens()) bytes.resize(e->at);
          continue;
        }
        // Each sector by itself; the file may be as long as if all were there.
        const uint64_t end = e->at + e->data.size();
        if (bytes.size() < end && happens()) bytes.resize(end);
        for (uint64_t at = e->at; at < end;) {
          const uint64_t next = std::min(end, (at / kSector + 1) * kSector);
          if (happens()) {
            if (bytes.size() < next) bytes.resize(next);
            bytes.replace(at, next - at, e->data, at - e->at, next - at);
          }
          at = next;
        }
      }
      since.clear();
    }
  };
  static void apply(const Event& e, std::map<std::string, size_t>* names) {
    if (e.kind != Event::kName) names->erase(e.name);
    if (e.kind == Event::kName) (*names)[e.name] = e.file;
    if (e.kind == Event::kRename) (*names)[e.to] = e.file;
  }
  bool ours(int folder) const {
    const auto found = fds_.find(folder);
    return found != fds_.end() && found->second == kFolder;
  }

  const std::string path_, parent_;
  mutable std::mutex mu_;
  mutable std::vector<Event> events_;
  mutable std::map<int, size_t> fds_;  // the file's number, kFolder or kParent
  mutable std::map<ino_t, size_t> numbers_;
  mutable size_t last_file_ = 0;
};

}  // namespace frugal_test
