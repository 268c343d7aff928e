// The system calls on files that outlive the process. All code of the library makes them through
// file_calls(), so a test can fail the n-th call, cut counts short, or record every call.
//
// Each function is the system call of its name: -1 and errno report a failure. One that returns a
// count may do less than it was asked for. Callers go on after EINTR (retry_interrupted).
#pragma once
#include <sys/stat.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace frugal {

class FileCalls {
 public:
  virtual ~FileCalls() = default;
  // `name` is relative to the descriptor `folder`, or to the working directory (AT_FDCWD).
  virtual int open(int folder, const char* name, int flags, mode_t mode) const;
  virtual int close(int fd) const;
  virtual ssize_t read(int fd, void* to, size_t bytes, uint64_t at) const;
  virtual ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const;
  virtual int sync(int fd) const;  // data and all of its metadata
  // Makes room on the disk, and the file that long. EOPNOTSUPP: the file system cannot do that.
  virtual int allocate(int fd, uint64_t at, uint64_t bytes) const;
  virtual int resize(int fd, uint64_t bytes) const;
  virtual int rename(int folder, const char* from, const char* to) const;
  virtual int link(int folder, const char* name, int to_folder, const char* to) const;
  virtual int unlink(int folder, const char* name) const;
  virtual int make_folder(int folder, const char* name, mode_t mode) const;
  virtual int stat(int fd, struct ::stat* out) const;
  virtual int stat_at(int folder, const char* name, struct ::stat* out) const;  // follows no link
  virtual int lock(int fd, int operation) const;                                // flock
  // Entries of a directory, as getdents64 returns them.
  virtual ssize_t list(int fd, void* to, size_t bytes) const;
  // What O_DIRECT demands of addresses and of offsets. EOPNOTSUPP: the system does not say.
  virtual int direct_alignment(int fd, uint32_t* memory, uint32_t* offset) const;
  virtual int end_direct(int fd) const;  // from now on without O_DIRECT
};

const FileCalls& file_calls();
// Test hook: from now on file_calls() is *calls; null: the system's again.
void test_file_calls(const FileCalls* calls);

// The most bytes that a file of this process may have (ulimit -f). A write beyond them fails, and
// also sends a deadly signal.
uint64_t most_file_bytes();

// The status of a call that failed with `code`: NO_SPACE, OUT_OF_MEMORY, NOT_FOUND, EXISTS,
// INVALID_ARGUMENT (the program may not do that there), else IO.
int32_t file_status(int code);

// A descriptor of the folder that `path` is in; -1 and errno. A name in it is on disk once it is
// synced.
int open_parent(const char* path);

// Writes all `bytes` from offset `at`, and returns how many it has written: fewer, and errno, after
// a failure.
size_t write_whole(int fd, const void* from, size_t bytes, uint64_t at);

// Makes a call until no signal interrupts it.
template <class Call>
auto retry_interrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace frugal
