// What /proc says of a process, for tests.
#pragma once
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

// Without those that begin with a dot.
inline std::vector<std::string> entries_of(const std::string& folder) {
  std::vector<std::string> all;
  if (DIR* d = opendir(folder.c_str())) {
    while (dirent* e = readdir(d))
      if (e->d_name[0] != '.') all.push_back(e->d_name);
    closedir(d);
  }
  return all;
}

// What a process has open, each with its number, but pipes: nothing here has any, and a sanitizer's
// check of a pointer has one for a moment, in any thread.
inline std::vector<std::string> open_files_of(pid_t pid) {
  std::vector<std::string> files;
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd/";
  for (const std::string& number : entries_of(folder)) {
    char what[256];
    const ssize_t n = readlink((folder + number).c_str(), what, sizeof what);
    if (n < 0) continue;  // it was closed meanwhile, as the folder's own was
    const std::string file(what, static_cast<size_t>(n));
    if (file.rfind("pipe:", 0) != 0) files.push_back(number + " " + file);
  }
  return files;
}

// Numbers: -1 where there is no such process.
inline long number_of(const std::vector<std::string>& entries) {
  return entries.empty() ? -1 : static_cast<long>(entries.size());
}
inline long descriptors_of(pid_t pid) { return number_of(open_files_of(pid)); }
inline long threads_of(pid_t pid) {
  return number_of(entries_of("/proc/" + std::to_string(pid) + "/task"));
}
// Of its status: "VmRSS: %ld" and others. -1: there is none.
inline long status_kib(pid_t pid, const char* line_of) {
  std::FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/status").c_str(), "r");
  if (!f) return -1;
  char line[256];
  long kib = -1;
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, line_of, &kib) == 1) break;
  std::fclose(f);
  return kib;
}
inline long resident_kib(pid_t pid) { return status_kib(pid, "VmRSS: %ld"); }
// Shared memory of this process alone. A memfd without a mapping does not count.
inline long shared_kib() { return status_kib(getpid(), "RssShmem: %ld"); }

// Processor time of the machine that neither this process nor `pid` has had, in clock ticks.
inline long ticks_of_others(pid_t pid) {
  long ticks = 0, n[8] = {};
  if (std::FILE* f = std::fopen("/proc/stat", "r")) {
    if (std::fscanf(f, "cpu %ld %ld %ld %ld %ld %ld %ld %ld", n, n + 1, n + 2, n + 3, n + 4, n + 5,
                    n + 6, n + 7) == 8)
      ticks = n[0] + n[1] + n[2] + n[5] + n[6] + n[7];  // all but idle
    std::fclose(f);
  }
  for (const pid_t own : {getpid(), pid}) {
    long user = 0, system = 0;
    if (std::FILE* f = std::fopen(("/proc/" + std::to_string(own) + "/stat").c_str(), "r")) {
      if (std::fscanf(f, "%*d (%*[^)]) %*s %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld", &user,
                      &system) == 2)
        ticks -= user + system;
      std::fclose(f);
    }
  }
  return ticks;
}

// Where this process has a file mapped so that it can write it; or null.
inline char* writable_mapping_of(int fd) {
  struct stat info {};
  std::FILE* f = fstat(fd, &info) == 0 ? std::fopen("/proc/self/maps", "r") : nullptr;
  if (!f) return nullptr;
  char line[512], mode[5];
  unsigned long from, inode;
  char* base = nullptr;
  while (!base && std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "%lx-%*x %4s %*x %*x:%*x %lu", &from, mode, &inode) == 3 &&
        inode == info.st_ino && std::strcmp(mode, "rw-s") == 0)
      base = reinterpret_cast<char*>(from);
  std::fclose(f);
  return base;
}

// Mappings of files with that in their names.
inline long mapped_of(pid_t pid, const char* name) {
  std::FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/maps").c_str(), "r");
  if (!f) return -1;
  char line[512];
  long n = 0;
  while (std::fgets(line, sizeof line, f)) n += std::strstr(line, name) != nullptr;
  std::fclose(f);
  return n;
}
