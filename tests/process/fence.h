// Tries to write shared memory that is only to be read.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

// All that a process may try on a file whose descriptor it has received. Returns what succeeded;
// empty: nothing.
inline std::string Attack(int fd) {
  std::string done;
  auto hit = [&](const char* what, bool success) {
    if (success) done += std::string(done.empty() ? "" : ", ") + what;
  };
  struct stat info {};
  fstat(fd, &info);
  const size_t bytes = static_cast<size_t>(info.st_size);
  (void)fchmod(fd, 0777);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
  for (int with : {fd, again}) {
    if (with < 0) continue;
    char byte = 1;
    hit("pwrite", pwrite(with, &byte, 1, 0) == 1);
    hit("punch a hole", fallocate(with, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0);
    hit("ftruncate", ftruncate(with, 0) == 0);
    hit("add a seal", fcntl(with, F_ADD_SEALS, F_SEAL_WRITE) == 0);
    for (int protection : {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE}) {
      void* p = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, with, 0);
      if (p == MAP_FAILED) continue;
      if (protection & PROT_WRITE || mprotect(p, bytes, PROT_READ | PROT_WRITE) == 0) {
        hit("map", true);
        *static_cast<volatile char*>(p) = 1;
      }
      hit("MADV_REMOVE", madvise(p, 4096, MADV_REMOVE) == 0);
      munmap(p, bytes);
    }
  }
  if (again >= 0) close(again);
  const int truncated = open(path.c_str(), O_RDWR | O_TRUNC | O_CLOEXEC);
  hit("open O_TRUNC", truncated >= 0);
  if (truncated >= 0) close(truncated);
  return done;
}
