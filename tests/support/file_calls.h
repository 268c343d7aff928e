// A table of the system calls on files that a test controls: it counts the calls, and makes chosen
// ones fail, be interrupted, or do less than they were asked for.
#pragma once
#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/file_calls.h"

namespace frugal {

// It is the library's table while it lives. Calls are counted from 1.
class TestFileCalls : public FileCalls {
 public:
  TestFileCalls() { test_file_calls(this); }
  ~TestFileCalls() override { test_file_calls(nullptr); }

  // The n-th call from now on fails with `code`, or each from the n-th on. 0: none does.
  void fail(int64_t n, int code, bool forever = false) {
    code_ = code;
    forever_ = forever;
    fail_at_ = n ? calls_ + n : INT64_MAX;
    failed_ = 0;
  }
  // The next `n` calls fail with EINTR, then one succeeds, and so on.
  void interrupt(int64_t n) { interrupts_ = n; }
  // Reads and writes have at most so many bytes. 0: as many as asked for.
  void shorten(size_t bytes) { most_bytes_ = bytes; }
  // Opening with O_DIRECT, or transfers, are refused.
  void refuse_direct(bool refuse) { no_direct_ = refuse; }
  int64_t calls() const { return calls_; }
  int64_t failed() const { return failed_; }
  int64_t syncs() const { return syncs_; }

  int open(int folder, const char* name, int flags, mode_t mode) const override;
  int close(int fd) const override { return FileCalls::close(fd); }  // what fails there is nothing
  ssize_t read(int fd, void* to, size_t bytes, uint64_t at) const override {
    return passes() ? FileCalls::read(fd, to, cut(bytes), at) : -1;
  }
  ssize_t write(int fd, const void* from, size_t bytes, uint64_t at) const override {
    return passes() ? FileCalls::write(fd, from, cut(bytes), at) : -1;
  }
  int sync(int fd) const override {
    ++syncs_;
    return passes() ? FileCalls::sync(fd) : -1;
  }
  int allocate(int fd, uint64_t at, uint64_t bytes) const override {
    return passes() ? FileCalls::allocate(fd, at, bytes) : -1;
  }
  int resize(int fd, uint64_t bytes) const override {
    return passes() ? FileCalls::resize(fd, bytes) : -1;
  }
  int rename(int folder, const char* from, const char* to) const override {
    return passes() ? FileCalls::rename(folder, from, to) : -1;
  }
  int link(int folder, const char* name, int to_folder, const char* to) const override {
    return passes() ? FileCalls::link(folder, name, to_folder, to) : -1;
  }
  int unlink(int folder, const char* name) const override {
    return passes() ? FileCalls::unlink(folder, name) : -1;
  }
  int make_folder(int folder, const char* name, mode_t mode) const override {
    return passes() ? FileCalls::make_folder(folder, name, mode) : -1;
  }
  int stat(int fd, struct ::stat* out) const override {
    return passes(false) ? FileCalls::stat(fd, out) : -1;
  }
  int stat_at(int folder, const char* name, struct ::stat* out) const override {
    return passes(false) ? FileCalls::stat_at(folder, name, out) : -1;
  }
  int lock(int fd, int operation) const override {
    return passes() ? FileCalls::lock(fd, operation) : -1;
  }
  ssize_t list(int fd, void* to, size_t bytes) const override {
    return passes() ? FileCalls::list(fd, to, bytes) : -1;
  }
  int direct_alignment(int fd, uint32_t* memory, uint32_t* offset) const override {
    return passes(false) ? FileCalls::direct_alignment(fd, memory, offset) : -1;
  }
  int end_direct(int fd) const override { return passes(false) ? FileCalls::end_direct(fd) : -1; }

 private:
  bool passes(bool may_interrupt = true) const {
    if (may_interrupt && interrupts_ && ++interrupted_ <= interrupts_) {
      errno = EINTR;
      return false;
    }
    interrupted_ = 0;
    const int64_t n = ++calls_;
    if (n < fail_at_ || (n > fail_at_ && !forever_)) return true;
    ++failed_;
    errno = code_;
    return false;
  }
  size_t cut(size_t bytes) const {
    const size_t most = most_bytes_;
    return most && bytes > most ? most : bytes;
  }

  mutable std::atomic<int64_t> calls_{0}, failed_{0}, syncs_{0}, interrupted_{0};
  std::atomic<int64_t> fail_at_{INT64_MAX}, interrupts_{0};
  std::atomic<int> code_{0};
  std::atomic<bool> forever_{false}, no_direct_{false};
  std::atomic<size_t> most_bytes_{0};
};

inline int TestFileCalls::open(int folder, const char* name, int flags, mode_t mode) const {
  if (!passes()) return -1;
  if (no_direct_ && (flags & O_DIRECT)) {
    // As some file systems do: the file is created all the same.
    const int fd = FileCalls::open(folder, name, flags & ~O_DIRECT, mode);
    if (fd >= 0) FileCalls::close(fd);
    errno = EINVAL;
    return -1;
  }
  return FileCalls::open(folder, name, flags, mode);
}

}  // namespace frugal
