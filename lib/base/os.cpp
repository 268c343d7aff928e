#include "base/os.h"

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/file_calls.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

namespace frugal {
namespace {

std::atomic<int64_t> g_fail_call_after{0};

bool injected_call_failure() {
  const int64_t left = g_fail_call_after.load(std::memory_order_relaxed);
  if (left <= 0) return false;
  return g_fail_call_after.fetch_sub(1, std::memory_order_relaxed) == 1;
}

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Shared memory whose size cannot change any more.
Status make_memfd(size_t bytes, int* out) {
  // Some systems demand a flag that it is no program; older ones do not know the flag.
  int fd = memfd_create("frugal", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("frugal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    const int code = errno;
    if (code == EMFILE || code == ENFILE) return os_no_descriptor(code, "shared memory");
    return fail_errno(code == ENOMEM ? FRUGAL_ERR_OUT_OF_MEMORY : FRUGAL_ERR_UNSUPPORTED, code,
                      "shared memory cannot be created: a sandbox may forbid it; without processes "
                      "FRUGAL_BACKING_PRIVATE needs none");
  }
  if (const uint64_t most = most_file_bytes(); bytes > most) {
    close(fd);
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "%zu bytes of shared memory exceed the limit of file sizes (%llu bytes); raise it "
                "(ulimit -f)",
                bytes, static_cast<unsigned long long>(most));
  }
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSizeSeals) != 0) {
    const int code = errno;
    close(fd);
    return fail_errno(
        FRUGAL_ERR_OUT_OF_MEMORY, code,
        "shared memory of %zu bytes cannot be had; free memory of the machine, or raise its limit",
        bytes);
  }
  *out = fd;
  return FRUGAL_OK;
}

// From now on no seal can be added. Without `others_write` only mappings that exist by now can
// write.
Status seal(int fd, bool others_write) {
  if (!others_write && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0)
    return FRUGAL_OK;
  if ((others_write || errno == EINVAL) && fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) == 0)
    return FRUGAL_OK;
  return fail_errno(FRUGAL_ERR_UNSUPPORTED, errno,
                    "shared memory cannot be sealed: a sandbox may forbid it; without processes "
                    "FRUGAL_BACKING_PRIVATE needs none");
}

constexpr size_t kMostAddresses = size_t{1} << 47;

// Addresses of `bytes`, a multiple of 2 MiB, that begin at a multiple of 2 MiB.
Status reserve_aligned(size_t bytes, int protection, char** out) {
  // One huge page more, so that the start can be aligned.
  const size_t span = bytes + kHugePage;
  void* raw = mmap(nullptr, span, protection, MAP_NORESERVE | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED && bytes > kMostAddresses)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, errno,
                      "reserving %zu bytes of addresses: no process has so many; ask for less",
                      bytes);
  if (raw == MAP_FAILED)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, errno,
                      "reserving %zu bytes of addresses: is the process (or the "
                      "controller's) limited (ulimit -v)?",
                      bytes);
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = in_huge_pages(start);
  if (aligned > start) munmap(raw, aligned - start);
  if (const size_t tail = start + span - (aligned + bytes))
    munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  *out = reinterpret_cast<char*>(aligned);
  return FRUGAL_OK;
}

// `used`: the bytes in use, from the first on. Small memory does without huge pages: its first
// touch would fill one.
void advise(char* base, size_t bytes, size_t used) {
  if (used >= kHugePage) madvise(base, bytes, MADV_HUGEPAGE);  // advice: failing changes speed only
  madvise(base, bytes, MADV_DONTFORK);  // a child must not copy, or write, the tables
}

// Maps at *out if that is not null: in a range of addresses, which stays reserved on failure.
Status map_fd(int fd, size_t bytes, size_t used, bool writable, char** out) {
  char* base = *out;
  if (!base) FRUGAL_TRY(reserve_aligned(bytes, PROT_NONE, &base));
  void* p = mmap(base, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) {
    const int code = errno;
    if (!*out) munmap(base, bytes);
    if (code == EPERM || code == EACCES)
      return fail_errno(FRUGAL_ERR_INVALID_ARGUMENT, code,
                        "%zu bytes of shared memory are not to be mapped so: another version of "
                        "this library sent them",
                        bytes);
    return fail_errno(
        FRUGAL_ERR_OUT_OF_MEMORY, code,
        "%zu bytes of shared memory cannot be mapped: is the process limited (ulimit -v)?", bytes);
  }
  advise(base, bytes, used);
  // Excluded from core dumps. Other processes have the memory too, and reading its holes would fill
  // them. And the process is not seen as dead until its dump is written.
  madvise(base, bytes, MADV_DONTDUMP);
  *out = base;
  return FRUGAL_OK;
}

Status no_addresses(size_t bytes) {
  return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, ENOMEM,
                    "%zu bytes of addresses cannot be had: is the process limited (ulimit -v)?",
                    bytes);
}

}  // namespace

namespace {

// The number after `name` at the beginning of a line of a file; `otherwise` if there is none.
uint64_t number_in(const char* path, const char* name, uint64_t otherwise) {
  FILE* f = std::fopen(path, "re");
  if (!f) return otherwise;
  char line[128];
  const size_t length = std::strlen(name);
  for (bool found = false; !found && std::fgets(line, sizeof line, f);) {
    unsigned long long v;
    found = std::strncmp(line, name, length) == 0 && std::sscanf(line + length, "%llu", &v) == 1;
    if (found) otherwise = v;
  }
  std::fclose(f);
  return otherwise;
}

// Memory that the process's control group (v2) and the groups above it leave, as in a container.
uint64_t group_bytes() {
  constexpr char kRoot[] = "/sys/fs/cgroup";
  char line[512], path[1024];
  char* group = nullptr;
  if (FILE* f = std::fopen("/proc/self/cgroup", "re")) {
    while (!group && std::fgets(line, sizeof line, f))
      if (std::strncmp(line, "0::/", 4) == 0) group = line + 3;
    std::fclose(f);
  }
  uint64_t least = UINT64_MAX;
  if (!group) return least;
  group[std::strcspn(group, "\n")] = 0;
  for (;;) {
    std::snprintf(path, sizeof path, "%s%s/memory.max", kRoot, group);
    uint64_t limit = number_in(path, "", UINT64_MAX);  // or "max"
    std::snprintf(path, sizeof path, "%s%s/memory.current", kRoot, group);
    uint64_t used = number_in(path, "", UINT64_MAX);
    if (limit != UINT64_MAX && used != UINT64_MAX) {
      std::snprintf(path, sizeof path, "%s%s/memory.stat", kRoot, group);
      // Pages of files, which the kernel can drop.
      used -=
          std::min(used, number_in(path, "inactive_file ", 0) + number_in(path, "active_file ", 0));
      least = std::min(least, limit > used ? limit - used : 0);
    }
    char* slash = std::strrchr(group, '/');
    if (!slash) return least;
    *slash = 0;
  }
}

}  // namespace

uint64_t os_memory_bytes() { return number_in("/proc/meminfo", "MemTotal:", 0) << 10; }

uint64_t available_bytes() {
  uint64_t kib = number_in("/proc/meminfo", "MemAvailable:", 0);
  return std::min(kib ? kib << 10 : UINT64_MAX, group_bytes());
}

Status os_reserve_range(size_t bytes, Mapping* out) {
  bytes = in_huge_pages(bytes);
  if (injected_call_failure()) return no_addresses(bytes);
  FRUGAL_TRY(reserve_aligned(bytes, PROT_READ, &out->base));
  *out = {out->base, bytes, -1};
  return FRUGAL_OK;
}

bool os_empty(char* at, size_t bytes) {
  return mmap(at, bytes, PROT_READ, MAP_FIXED | MAP_NORESERVE | MAP_PRIVATE | MAP_ANONYMOUS, -1,
              0) != MAP_FAILED;
}

Status os_reserve(size_t bytes, bool shared, Mapping* out, bool others_write, char* at) {
  if (bytes > SIZE_MAX / 2)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "%zu bytes exceed the address space: ask for less",
                bytes);
  const size_t used = bytes;
  bytes = in_huge_pages(bytes);
  if (injected_call_failure()) return no_addresses(bytes);
  if (!shared) {
    FRUGAL_TRY(reserve_aligned(bytes, PROT_READ | PROT_WRITE, &out->base));
    advise(out->base, bytes, used);
    *out = {out->base, bytes, -1};
    return FRUGAL_OK;
  }
  int fd = -1;
  FRUGAL_TRY(make_memfd(bytes, &fd));
  Mapping made{at, bytes, fd};
  Status s = map_fd(fd, bytes, used, true, &made.base);
  if (s == FRUGAL_OK) s = seal(fd, others_write);
  if (s == FRUGAL_OK) {
    *out = made;
    return s;
  }
  if (at) (void)os_empty(std::exchange(made.base, nullptr), bytes);
  os_release(&made);
  return s;
}

Status os_reserve_to_read(size_t bytes, Mapping* out) {
  bytes = in_huge_pages(bytes);
  if (injected_call_failure()) return no_addresses(bytes);
  Mapping made{nullptr, bytes, -1};
  FRUGAL_TRY(make_memfd(bytes, &made.fd));
  const Status s = map_fd(made.fd, bytes, bytes, false, &made.base);
  if (s == FRUGAL_OK)
    *out = made;
  else
    os_release(&made);
  return s;
}

Status os_seal(const Mapping& mapping) { return seal(mapping.fd, false); }

Status os_map_shared(int fd, bool writable, Mapping* out) {
  struct stat info {};
  if (fstat(fd, &info) != 0)
    return fail_errno(FRUGAL_ERR_INVALID_ARGUMENT, errno,
                      "descriptor %d is none of shared memory: another program sent it", fd);
  // Only memfds have seals (and files of a tmpfs, which cannot get these two).
  const int seals = S_ISREG(info.st_mode) ? fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals)
    return fail(
        FRUGAL_ERR_INVALID_ARGUMENT,
        "descriptor %d is not shared memory sealed at its size: another program sent it, or "
        "another version of this library",
        fd);
  const uint64_t bytes = static_cast<uint64_t>(info.st_size);
  if (bytes == 0 || bytes % kHugePage != 0 || bytes > SIZE_MAX / 2)
    return fail(FRUGAL_ERR_INVALID_ARGUMENT,
                "descriptor %d is shared memory of %llu bytes, which is "
                "no multiple of 2 MiB: another version of this library sent it",
                fd, static_cast<unsigned long long>(bytes));
  if (injected_call_failure())
    return fail_errno(
        FRUGAL_ERR_OUT_OF_MEMORY, ENOMEM,
        "%llu bytes of shared memory cannot be mapped: is the process limited (ulimit -v)?",
        static_cast<unsigned long long>(bytes));
  char* base = nullptr;
  FRUGAL_TRY(map_fd(fd, bytes, bytes, writable, &base));
  *out = {base, static_cast<size_t>(bytes), fd};
  return FRUGAL_OK;
}

Status os_make_read_only(const Mapping& m) {
  if (mprotect(m.base, m.bytes, PROT_READ) != 0)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, errno,
                      "%zu bytes of shared memory cannot be protected: free memory of the machine, "
                      "or raise the limit of mappings (vm.max_map_count)",
                      m.bytes);
  return FRUGAL_OK;
}

Status os_no_descriptor(int code, const char* what) {
  rlimit limit{};
  if (code == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                      "no file descriptor is left for %s: process %d may have %llu; close some, or "
                      "raise the limit "
                      "(ulimit -n)",
                      what, static_cast<int>(getpid()),
                      static_cast<unsigned long long>(limit.rlim_cur));
  if (code == ENFILE)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                      "no file descriptor is left for %s: the machine has no more; end programs "
                      "that have many, or "
                      "raise its limit (fs.file-max)",
                      what);
  return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                    "no file descriptor can be had for %s: free memory of the machine", what);
}

Status os_check_available(uint64_t bytes) {
  const uint64_t available = available_bytes();
  if (bytes <= available) return FRUGAL_OK;
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "%llu bytes are more than the memory available, which is %llu bytes: ask for less",
              static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(available));
}

namespace {

// Most machines give shared memory no huge pages by themselves, whatever is advised (shmem_enabled
// is `never`). They do when asked for the very pages (MADV_COLLAPSE, Linux 6.1), if each has a
// small page already. The caller waits for a thread of the kernel on every processor: for seconds,
// where other threads keep a processor busy. So one call asks for all pages. It is made only if
// touching them was not enough, and from kManyBytes on, where lookups gain by it. It is advice:
// huge pages that cannot be had are small ones.
constexpr size_t kManyBytes = size_t{8} << 20;

void take_huge_pages(char* base, size_t bytes) {
  const uintptr_t from = in_huge_pages(reinterpret_cast<uintptr_t>(base));
  const uintptr_t to = (reinterpret_cast<uintptr_t>(base) + bytes) / kHugePage * kHugePage;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bool small = false;
  for (uintptr_t at = from; at < to; at += kHugePage) {
    if (madvise(reinterpret_cast<void*>(at), 1, MADV_POPULATE_WRITE) != 0) return;
    unsigned char last = 0;  // is in memory, too, if the page is a huge one
    small |= mincore(reinterpret_cast<void*>(at + kHugePage - page), page, &last) != 0 ||
             (last & 1) == 0;
  }
  if (small) madvise(reinterpret_cast<void*>(from), to - from, MADV_COLLAPSE);
}

}  // namespace

Status os_commit(const Mapping& m, size_t offset, size_t bytes) {
  if (injected_call_failure() || g_fail_call_after.load(std::memory_order_relaxed) < 0)
    return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, ENOMEM,
                      "%zu bytes of memory cannot be had; free memory of the machine or raise the "
                      "container's limit",
                      bytes);
  // Without this check an overcommitting kernel would kill the process on a touch, now or later.
  // Tables grow by slabs, which are large enough to be checked.
  if (bytes >= kManyBytes) FRUGAL_TRY(os_check_available(bytes));
  if (m.fd >= 0 && bytes >= kManyBytes) take_huge_pages(m.base + offset, bytes);
  // Through the mapping, which is advised to have huge pages. Some machines give shared memory huge
  // pages on advice only; there fallocate would give small ones.
  const int refused = madvise(m.base + offset, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  if (refused == 0) return FRUGAL_OK;
  if (m.fd >= 0 && refused == EINVAL) {  // before Linux 5.14
    // In pieces, because a signal undoes a piece: a profiler's signals may come faster than all
    // pieces are done. Pieces that were had before a failure stay.
    for (size_t done = 0; done < bytes;) {
      const size_t piece = std::min(bytes - done, kHugePage);
      const int code =
          posix_fallocate(m.fd, static_cast<off_t>(offset + done), static_cast<off_t>(piece));
      if (code == EINTR) continue;
      if (code != 0)
        return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, code,
                          "%zu bytes of shared memory cannot be had; free memory of the machine or "
                          "raise the container's limit",
                          bytes);
      done += piece;
    }
    return FRUGAL_OK;
  }
  if (refused == EINVAL) return FRUGAL_OK;
  return fail_errno(FRUGAL_ERR_OUT_OF_MEMORY, refused,
                    "%zu bytes of memory cannot be had; free memory of the machine "
                    "or raise the container's limit",
                    bytes);
}

int os_read_only(int fd) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int opened = ::open(path, O_RDONLY | O_CLOEXEC);
  if (opened >= 0 || errno == EMFILE || errno == ENFILE || errno == ENOMEM) return opened;
  return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

namespace {

// The header of one message, with room for one descriptor.
struct Message {
  iovec bytes;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  Message(const void* data, size_t n) : bytes{const_cast<void*>(data), n} {
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
};

}  // namespace

int os_send(int socket, const void* message, size_t bytes, int fd) {
  Message m(message, bytes);
  if (fd >= 0) {
    cmsghdr* c = CMSG_FIRSTHDR(&m.header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  } else {
    m.header.msg_controllen = 0;
  }
  if (injected_call_failure()) return ENOMEM;
  ssize_t sent;
  do sent = sendmsg(socket, &m.header, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes) ? 0 : errno;
}

ssize_t os_peek(int socket, void* message, size_t bytes, int* fd, bool* ended) {
  Message m(message, bytes);
  ssize_t got;
  do got = recvmsg(socket, &m.header, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  *fd = -1;
  *ended = got == 0 || (got < 0 && errno == ECONNRESET);
  const cmsghdr* c = got > 0 ? CMSG_FIRSTHDR(&m.header) : nullptr;
  if (c && c->cmsg_type == SCM_RIGHTS) std::memcpy(fd, CMSG_DATA(c), sizeof *fd);
  return *ended || (got < 0 && errno == EAGAIN) ? 0 : got;
}

void os_drop(int socket) {
  char byte;
  while (recv(socket, &byte, 1, MSG_DONTWAIT) < 0 && errno == EINTR) {
  }
}

void os_at_fork(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  if (injected_call_failure() || pthread_atfork(before, in_parent, in_child) != 0)
    throw std::bad_alloc();
}

void os_release(Mapping* m) {
  if (m->base) munmap(m->base, m->bytes);
  if (m->fd >= 0) close(m->fd);
  *m = {};
}

NewFile::~NewFile() {
  if (fd_ >= 0) file_calls().close(fd_);
  if (folder_fd_ >= 0) file_calls().close(folder_fd_);
  if (!temporary_.empty()) file_calls().unlink(AT_FDCWD, temporary_.c_str());
}

Status NewFile::refused(int code, const char* what) const {
  const Status status = file_status(code);
  return fail_errno(
      status == FRUGAL_ERR_NO_SPACE || status == FRUGAL_ERR_IO ? status
                                                               : FRUGAL_ERR_INVALID_ARGUMENT,
      code, "'%.300s' cannot be %s: choose another path, or make room there", path_.c_str(), what);
}

Status NewFile::open(const char* path) {
  static constinit std::atomic<uint32_t> counter{0};
  path_ = path;
  if (injected_call_failure()) return refused(EACCES, "created");
  if ((folder_fd_ = open_parent(path)) < 0) return refused(errno, "created");
  for (;;) {
    String name = path_ + text(".%d.%u.new", static_cast<int>(getpid()), counter.fetch_add(1));
    fd_ = file_calls().open(AT_FDCWD, name.c_str(),
                            O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ >= 0) {
      temporary_ = std::move(name);
      return FRUGAL_OK;
    }
    // EEXIST: another process of that number has left the file.
    if (errno != EEXIST && errno != EINTR) return refused(errno, "created");
  }
}

Status NewFile::write(const char* bytes, size_t n) {
  if (injected_call_failure()) return refused(ENOSPC, "written");
  if (write_whole(fd_, bytes, n, written_) < n)
    return refused(errno, errno == EFBIG ? "written (ulimit -f)" : "written");
  written_ += n;
  return FRUGAL_OK;
}

Status NewFile::publish() {
  if (injected_call_failure()) return refused(EIO, "put in place");
  if (retry_interrupted([&] { return file_calls().sync(fd_); }) != 0)
    return refused(errno, "synced");
  const int fd = fd_;
  fd_ = -1;
  if (file_calls().close(fd) != 0 && errno != EINTR) return refused(errno, "written");
  if (file_calls().rename(AT_FDCWD, temporary_.c_str(), path_.c_str()) != 0)
    return refused(errno, "put in place");
  temporary_.clear();
  return retry_interrupted([&] { return file_calls().sync(folder_fd_); }) == 0
             ? FRUGAL_OK
             : refused(errno, "synced");
}

int64_t os_test_fail_after(int64_t n) { return g_fail_call_after.exchange(n); }

}  // namespace frugal
