// What /proc says of a process, for tests.
#pragma once
#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

// -1 where there is no such process, as with the other numbers.
inline long count_entries(const std::string& folder) {
  DIR* d = opendir(folder.c_str());
  if (!d) return -1;
  long n = 0;
  while (dirent* e = readdir(d)) n += e->d_name[0] != '.';
  closedir(d);
  return n;
}
// What a process has open, each with its number, but pipes: nothing here has any, and a sanitizer's check of a pointer
// has one for a moment, in any thread. Nor what this looks with.
inline std::vector<std::string> open_files_of(pid_t pid) {
  std::vector<std::string> files;
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  DIR* d = opendir(folder.c_str());
  if (!d) return files;
  while (dirent* e = readdir(d)) {
    if (e->d_name[0] == '.') continue;
    char what[256];
    const ssize_t n = readlink((folder + "/" + e->d_name).c_str(), what, sizeof what);
    if (n < 0) continue;  // it was closed meanwhile
    const std::string file(what, static_cast<size_t>(n));
    if (file != folder && file.rfind("pipe:", 0) != 0) files.push_back(std::string(e->d_name) + " " + file);
  }
  closedir(d);
  return files;
}
inline long descriptors_of(pid_t pid) {
  const std::vector<std::string> files = open_files_of(pid);
  return files.empty() ? -1 : static_cast<long>(files.size());
}
inline long threads_of(pid_t pid) { return count_entries("/proc/" + std::to_string(pid) + "/task"); }
inline long resident_kib(pid_t pid) {
  std::FILE* f = std::fopen(("/proc/" + std::to_string(pid) + "/status").c_str(), "r");
  if (!f) return -1;
  char line[256];
  long kib = -1;
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "VmRSS: %ld", &kib) == 1) break;
  std::fclose(f);
  return kib;
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
