#include "base/file_calls.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "base/heap.h"
#include "frugal.h"

namespace frugal {
namespace {

constinit const FileCalls g_system;
constinit std::atomic<const FileCalls*> g_calls{&g_system};

}  // namespace

const FileCalls& file_calls() { return *g_calls.load(std::memory_order_acquire); }
void test_file_calls(const FileCalls* calls) { g_calls.store(calls ? calls : &g_system); }

int FileCalls::open(int folder, const char* name, int flags, mode_t mode) const {
  return ::openat(folder, name, flags, mode);
}
int FileCalls::close(int fd) const { return ::close(fd); }
ssize_t FileCalls::read(int fd, void* to, size_t bytes, uint64_t at) const {
  return ::pread(fd, to, bytes, static_cast<off_t>(at));
}
ssize_t FileCalls::write(int fd, const void* from, size_t bytes, uint64_t at) const {
  return ::pwrite(fd, from, bytes, static_cast<off_t>(at));
}
int FileCalls::sync(int fd) const { return ::fsync(fd); }
int FileCalls::allocate(int fd, uint64_t at, uint64_t bytes) const {
  return ::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(bytes));
}
int FileCalls::resize(int fd, uint64_t bytes) const {
  return ::ftruncate(fd, static_cast<off_t>(bytes));
}
int FileCalls::rename(int folder, const char* from, const char* to) const {
  return ::renameat(folder, from, folder, to);
}
int FileCalls::link(int folder, const char* name, int to_folder, const char* to) const {
  return ::linkat(folder, name, to_folder, to, 0);
}
int FileCalls::unlink(int folder, const char* name) const { return ::unlinkat(folder, name, 0); }
int FileCalls::make_folder(int folder, const char* name, mode_t mode) const {
  return ::mkdirat(folder, name, mode);
}
int FileCalls::stat(int fd, struct ::stat* out) const { return ::fstat(fd, out); }
int FileCalls::stat_at(int folder, const char* name, struct ::stat* out) const {
  return ::fstatat(folder, name, out, AT_SYMLINK_NOFOLLOW);
}
int FileCalls::lock(int fd, int operation) const { return ::flock(fd, operation); }
ssize_t FileCalls::list(int fd, void* to, size_t bytes) const {
  return ::syscall(SYS_getdents64, fd, to, bytes);
}

int FileCalls::direct_alignment(int fd, uint32_t* memory, uint32_t* offset) const {
#ifdef STATX_DIOALIGN
  struct statx found {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) != 0) return -1;
  if (found.stx_mask & STATX_DIOALIGN) {
    *memory = found.stx_dio_mem_align;
    *offset = found.stx_dio_offset_align;
    return 0;
  }
#else
  (void)fd, (void)memory, (void)offset;
#endif
  errno = EOPNOTSUPP;
  return -1;
}

int FileCalls::end_direct(int fd) const {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags < 0 ? -1 : ::fcntl(fd, F_SETFL, flags & ~O_DIRECT);
}

int32_t file_status(int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return FRUGAL_ERR_NO_SPACE;
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ENOLCK:
      return FRUGAL_ERR_OUT_OF_MEMORY;
    case ENOENT:
      return FRUGAL_ERR_NOT_FOUND;
    case EEXIST:
      return FRUGAL_ERR_EXISTS;
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
    case ENXIO:
      return FRUGAL_ERR_INVALID_ARGUMENT;
    default:
      return FRUGAL_ERR_IO;
  }
}

int open_parent(const char* path) {
  const String name = path;
  const size_t end = name.find_last_not_of('/');
  const size_t slash = end == String::npos ? end : name.find_last_of('/', end);
  String parent = slash == String::npos ? "." : name.substr(0, slash + 1);
  if (end == String::npos) parent = "/";
  return retry_interrupted([&] {
    return file_calls().open(AT_FDCWD, parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  });
}

size_t write_whole(int fd, const void* from, size_t bytes, uint64_t at) {
  const uint64_t most = most_file_bytes();
  if (at > most || bytes > most - at) {
    errno = EFBIG;
    return 0;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = retry_interrupted([&] {
      return file_calls().write(fd, static_cast<const char*>(from) + done, bytes - done, at + done);
    });
    if (put == 0) errno = EIO;
    if (put <= 0) return done;
    done += static_cast<size_t>(put);
  }
  return bytes;
}

uint64_t most_file_bytes() {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur
                                                                                 : UINT64_MAX;
}

}  // namespace frugal
