#include "files/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "base/forked.h"
#include "base/os.h"

namespace frugal {
namespace {

constexpr char kLockName[] = "lock";
constexpr int kAlways = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
constexpr uint32_t kUsualAlignment = 4096;  // where the system reports none
constexpr uint32_t kMostAlignment = 1u << 20;

// Opens relative to a folder, or to the working directory; a child made by fork() has it closed.
int open_at(int folder, const char* name, int flags, mode_t mode = 0) {
  return ForkedDescriptors::open([&] {
    return retry_interrupted(
        [&] { return file_calls().open(folder, name, flags | O_CLOEXEC, mode); });
  });
}

void close_quietly(int fd) noexcept {
  const int code = errno;
  ForkedDescriptors::close(fd);
  errno = code;
}

// A child that was forked just now may have the descriptor for a moment longer than this process.
// So closing it does not suffice.
void unlock(int fd) noexcept {
  if (fd >= 0) file_calls().lock(fd, LOCK_UN);
}

bool plain(const char* name) {
  return *name && !std::strchr(name, '/') && std::strcmp(name, ".") && std::strcmp(name, "..");
}

const char* remedy(Status status) {
  switch (status) {
    case FRUGAL_ERR_NO_SPACE:
      return ": make room there, raise the quota, or choose another folder";
    case FRUGAL_ERR_OUT_OF_MEMORY:
      return ": free memory or raise the limit of open files (ulimit -n), and call again";
    case FRUGAL_ERR_INVALID_ARGUMENT:
      return ": choose another folder, or allow this user to use it";
    case FRUGAL_ERR_IO:
      return ": look in the system's log for faults of the disk";
    default:
      return "";
  }
}

}  // namespace

// --- Folder --------------------------------------------------------------------------------------

Folder::~Folder() {
  unlock(lock_fd_);
  close_quietly(lock_fd_);
  close_quietly(fd_);
}

Status Folder::refused(int code, const char* what, const char* name) const {
  const Status status = file_status(code);
  return fail_errno(status, code, "'%.300s%s%.100s' cannot be %s%s", path_.c_str(),
                    *name ? "/" : "", name, what, remedy(status));
}

Status Folder::open(const char* path, Use use, std::shared_ptr<Folder>* out) {
  std::shared_ptr<Folder> made(new Folder);
  made->path_ = path;
  constexpr int kFlags = O_RDONLY | O_DIRECTORY;
  made->fd_ = open_at(AT_FDCWD, path, kFlags);
  const bool missing = made->fd_ < 0 && errno == ENOENT && use == Use::kCreate;
  if (missing &&
      retry_interrupted([&] { return file_calls().make_folder(AT_FDCWD, path, 0700); }) < 0 &&
      errno != EEXIST)
    return made->refused(errno, "created", "");
  if (missing || (made->fd_ >= 0 && use == Use::kCreate)) {
    // Who has created it may have died, or failed, before it was synced.
    const int parent = open_parent(path);
    if (parent < 0 && missing) return made->refused(errno, "synced in its parent", "");
    const int synced =
        parent < 0 ? 0 : retry_interrupted([&] { return file_calls().sync(parent); });
    close_quietly(parent);
    if (synced < 0) return made->refused(errno, "synced in its parent", "");
  }
  if (missing) made->fd_ = open_at(AT_FDCWD, path, kFlags);
  if (made->fd_ < 0) return made->refused(errno, "opened", "");
  if (use != Use::kRead) FRUGAL_TRY(made->take_lock());
  *out = std::move(made);
  return FRUGAL_OK;
}

Status Folder::take_lock() {
  // Another writer may remove the file between the two calls.
  for (;;) {
    lock_fd_ = open_at(fd_, kLockName, O_RDWR | O_CREAT | kAlways, 0600);
    if (lock_fd_ < 0) return refused(errno, "opened", kLockName);
    if (retry_interrupted([&] { return file_calls().lock(lock_fd_, LOCK_EX | LOCK_NB); }) < 0) {
      if (errno != EWOULDBLOCK) return refused(errno, "locked", kLockName);
      return fail(FRUGAL_ERR_BUSY,
                  "'%.300s' is written by another engine: close that one, choose another folder, "
                  "or open this one for reading",
                  path());
    }
    struct stat locked {
    }, named{};
    if (file_calls().stat(lock_fd_, &locked) < 0) return refused(errno, "examined", kLockName);
    if (!S_ISREG(locked.st_mode)) return refused(EINVAL, "a lock", kLockName);
    if (file_calls().stat_at(fd_, kLockName, &named) == 0 && named.st_ino == locked.st_ino &&
        named.st_dev == locked.st_dev)
      return FRUGAL_OK;
    close_quietly(std::exchange(lock_fd_, -1));
  }
}

Status Folder::may_write() const {
  if (lock_fd_ < 0)
    return fail(FRUGAL_ERR_UNSUPPORTED, "'%.300s' is open for reading only", path());
  if (!poisoned_.load()) return FRUGAL_OK;
  Lock lock(mu_);
  return fail(FRUGAL_ERR_IO, "%s", why_.c_str());
}

Status Folder::poison(int code, const char* name) {
  Lock lock(mu_);
  if (!poisoned_.load()) {
    why_ = text(
        "'%.300s%s%.100s' could not be synced (%s), so what the disk has is unknown. This "
        "engine writes that folder no more: use another folder",
        path(), *name ? "/" : "", name, std::strerror(code));
    poisoned_.store(true);
  }
  return fail(FRUGAL_ERR_IO, "%s", why_.c_str());
}

Status Folder::create(const char* name, bool direct, File* out) {
  FRUGAL_ASSERT(plain(name));
  FRUGAL_TRY(may_write());
  return open_with(name, O_RDWR | O_CREAT | O_EXCL, direct, "created", out);
}

Status Folder::open_file(const char* name, bool direct, File* out) const {
  if (!plain(name)) return refused(EINVAL, "a file's name", name);
  return open_with(name, O_RDONLY, direct, "opened", out);
}

Status Folder::open_with(const char* name, int flags, bool direct, const char* what,
                         File* out) const {
  File made;
  made.folder_ = std::const_pointer_cast<Folder>(shared_from_this());
  made.name_ = name;
  flags |= kAlways;
  if (direct) made.fd_ = open_at(fd_, name, flags | O_DIRECT, 0600);
  if (made.fd_ < 0 && (!direct || errno == EINVAL || errno == EOPNOTSUPP)) {
    // The file system has no O_DIRECT. It may have created the file all the same.
    if (direct && (flags & O_EXCL))
      retry_interrupted([&] { return file_calls().unlink(fd_, name); });
    direct = false;
    made.fd_ = open_at(fd_, name, flags, 0600);
  }
  if (made.fd_ < 0) return refused(errno, what, name);
  struct stat found {};
  if (file_calls().stat(made.fd_, &found) < 0) return refused(errno, "examined", name);
  if (!S_ISREG(found.st_mode))
    return fail(FRUGAL_ERR_NOT_FOUND, "'%.300s/%.100s' is no regular file", path(), name);
  if (direct) {
    uint32_t memory = kUsualAlignment, offset = kUsualAlignment;
    if (file_calls().direct_alignment(made.fd_, &memory, &offset) < 0)
      memory = offset = kUsualAlignment;
    made.alignment_ = std::max(memory, offset);
    const bool usable = memory && offset && made.alignment_ <= kMostAlignment &&
                        (made.alignment_ & (made.alignment_ - 1)) == 0;
    if (!usable) FRUGAL_TRY(made.end_direct());
  }
  *out = std::move(made);
  return FRUGAL_OK;
}

Status Folder::rename(const char* from, const char* to) {
  FRUGAL_ASSERT(plain(from) && plain(to));
  FRUGAL_TRY(may_write());
  struct stat found {};
  if (file_calls().stat_at(fd_, to, &found) == 0) return refused(EEXIST, "the new name", to);
  if (retry_interrupted([&] { return file_calls().rename(fd_, from, to); }) < 0)
    return refused(errno, "renamed", from);
  return FRUGAL_OK;
}

Status Folder::link(const char* name, Folder& to) const {
  FRUGAL_ASSERT(plain(name));
  FRUGAL_TRY(to.may_write());
  if (retry_interrupted([&] { return file_calls().link(fd_, name, to.fd_, name); }) == 0)
    return FRUGAL_OK;
  if (errno == EXDEV || errno == EPERM || errno == EOPNOTSUPP || errno == EMLINK)
    return fail_errno(FRUGAL_ERR_UNSUPPORTED, errno,
                      "'%.300s/%.100s' cannot be linked into '%.300s'", path(), name, to.path());
  return to.refused(errno, "linked", name);
}

Status Folder::remove(const char* name) {
  FRUGAL_ASSERT(plain(name));
  FRUGAL_TRY(may_write());
  if (retry_interrupted([&] { return file_calls().unlink(fd_, name); }) < 0 && errno != ENOENT)
    return refused(errno, "removed", name);
  return FRUGAL_OK;
}

Status Folder::sync() {
  FRUGAL_TRY(may_write());
  if (retry_interrupted([&] { return file_calls().sync(fd_); }) < 0) return poison(errno, "");
  return FRUGAL_OK;
}

Status Folder::list(Vector<String>* out) const {
  // A descriptor of its own: each has one position.
  const int fd = open_at(fd_, ".", O_RDONLY | O_DIRECTORY);
  if (fd < 0) return refused(errno, "listed", "");
  struct Close {
    const int fd;
    ~Close() { close_quietly(fd); }
  } close{fd};
  Vector<String> names;
  alignas(dirent64) char entries[8192];
  Status status = FRUGAL_OK;
  for (;;) {
    const ssize_t got =
        retry_interrupted([&] { return file_calls().list(fd, entries, sizeof entries); });
    if (got < 0) status = refused(errno, "listed", "");
    if (got <= 0) break;
    for (ssize_t at = 0; at < got;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries + at);
      at += entry->d_reclen;
      struct stat found {};
      const bool is_file =
          entry->d_type == DT_REG ||
          (entry->d_type == DT_UNKNOWN && file_calls().stat_at(fd_, entry->d_name, &found) == 0 &&
           S_ISREG(found.st_mode));
      if (is_file) names.emplace_back(entry->d_name);
    }
  }
  if (status == FRUGAL_OK) *out = std::move(names);
  return status;
}

// --- File ----------------------------------------------------------------------------------------

void File::close() noexcept {
  if (std::exchange(locked_, false)) unlock(fd_);
  close_quietly(std::exchange(fd_, -1));
  folder_.reset();
}

void File::swap(File& o) noexcept {
  folder_.swap(o.folder_);
  name_.swap(o.name_);
  std::swap(fd_, o.fd_);
  std::swap(alignment_, o.alignment_);
  std::swap(locked_, o.locked_);
}

Status File::failed(int code, const char* what, uint64_t at) const {
  const Status status = file_status(code);
  return fail_at(fail_errno(status == FRUGAL_ERR_INVALID_ARGUMENT ? FRUGAL_ERR_IO : status, code,
                            "'%.300s/%.100s' cannot be %s at byte %llu%s", folder_->path(), name(),
                            what, static_cast<unsigned long long>(at), remedy(status)),
                 at);
}

Status File::end_direct() {
  if (file_calls().end_direct(fd_) < 0) return failed(errno, "opened without O_DIRECT", 0);
  alignment_ = 1;
  return FRUGAL_OK;
}

Status File::size(uint64_t* out) const {
  struct stat found {};
  if (file_calls().stat(fd_, &found) < 0) return failed(errno, "examined", 0);
  *out = static_cast<uint64_t>(found.st_size);
  return FRUGAL_OK;
}

Status File::read(uint64_t at, void* to, size_t bytes) const {
  auto* next = static_cast<char*>(to);
  while (bytes) {
    const ssize_t got = retry_interrupted([&] { return file_calls().read(fd_, next, bytes, at); });
    if (got < 0) return failed(errno, "read", at);
    if (got == 0)
      return fail_at(fail(FRUGAL_ERR_IO, "'%.300s/%.100s' ends at byte %llu, %llu bytes too early",
                          folder_->path(), name(), static_cast<unsigned long long>(at),
                          static_cast<unsigned long long>(bytes)),
                     at);
    next += got;
    at += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return FRUGAL_OK;
}

Status File::write(uint64_t at, const void* from, size_t bytes) {
  FRUGAL_TRY(folder_->may_write());
  const size_t done = write_whole(fd_, from, bytes, at);
  return done == bytes ? FRUGAL_OK : failed(errno, "written", at + done);
}

Status File::allocate(uint64_t bytes) {
  FRUGAL_TRY(folder_->may_write());
  if (bytes > most_file_bytes()) return failed(EFBIG, "made longer", bytes);
  if (bytes == 0) return FRUGAL_OK;
  if (retry_interrupted([&] { return file_calls().allocate(fd_, 0, bytes); }) < 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS)
    return failed(errno, "made longer", bytes);
  return FRUGAL_OK;
}

Status File::resize(uint64_t bytes) {
  FRUGAL_TRY(folder_->may_write());
  if (bytes > most_file_bytes()) return failed(EFBIG, "resized", bytes);
  if (retry_interrupted([&] { return file_calls().resize(fd_, bytes); }) < 0)
    return failed(errno, "resized", bytes);
  return FRUGAL_OK;
}

Status File::sync() {
  FRUGAL_TRY(folder_->may_write());
  if (retry_interrupted([&] { return file_calls().sync(fd_); }) < 0)
    return folder_->poison(errno, name());
  return FRUGAL_OK;
}

Status File::lock(int operation, bool* locked) {
  *locked = retry_interrupted([&] { return file_calls().lock(fd_, operation | LOCK_NB); }) == 0;
  if (!*locked && errno != EWOULDBLOCK) return failed(errno, "locked", 0);
  locked_ = *locked;
  return FRUGAL_OK;
}
Status File::lock_shared(bool* locked) { return lock(LOCK_SH, locked); }
Status File::lock_alone(bool* locked) { return lock(LOCK_EX, locked); }

Status File::has_name(bool* has) const {
  struct stat mine {
  }, named{};
  if (file_calls().stat(fd_, &mine) < 0) return failed(errno, "examined", 0);
  *has = file_calls().stat_at(folder_->fd_, name(), &named) == 0;
  if (!*has && errno != ENOENT) return failed(errno, "examined", 0);
  *has = *has && mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
  return FRUGAL_OK;
}

}  // namespace frugal
