// Checks a folder of checkpoints while its writer may go on. A check takes no lock of the folder,
// and writes nothing (docs/checkpoints.md, "Checking a folder").
//
// A check takes at most 64 MiB of memory. Beyond 70,000 files each takes 200 bytes more, and a
// manifest of more than 4 MiB takes three times what it has more.
#pragma once
#include <cstdint>
#include <optional>

#include "format/manifest.h"

namespace frugal {

struct FolderFinding {
  enum class Kind {
    kFault,   // a reader of the checkpoint fails, or reads something else than was written
    kUnread,  // this library or this user cannot read the file, which may be sound
    kNote,    // no fault
  };
  Kind kind = Kind::kFault;
  String file;  // its name in the folder
  std::optional<uint64_t> offset;
  std::optional<uint64_t> table;  // its number
  String table_name;
  std::optional<uint64_t> key;
  String what;

  // The finding in a line: `fault file=7.rows offset=4096 table=3 name="users" key=42: what`. What
  // is unknown is left out.
  String line() const;
};

// A name as it is in a line, between quotes: quotes, backslashes and bytes that do not print are
// escaped.
String quoted(const String& name);

class FolderReport {
 public:
  virtual ~FolderReport() = default;
  virtual void found(const FolderFinding& finding) = 0;
  // A manifest that can be read, before anything is checked that it lists.
  virtual void checkpoint(const Manifest& manifest) { (void)manifest; }
};

struct FolderCounts {
  uint64_t checkpoints = 0;                    // whose manifests were read
  uint64_t files = 0;                          // parameter files and blob files of these
  uint64_t records = 0;                        // that were checked
  uint64_t bytes = 0;                          // that these files and the manifests have
  uint64_t faults = 0, unread = 0, notes = 0;  // findings
};

enum class FolderRead {
  kAll,        // everything that a checkpoint consists of
  kManifests,  // manifests, and the names of the other files
};

// Reports the checkpoints by their sequence numbers, and each finding. A checkpoint that its writer
// deletes meanwhile is a note. One that comes into being meanwhile is not checked.
//
// Fails if the folder cannot be opened or listed, if there is no memory, and in a build without
// Cap'n Proto or xxHash (UNSUPPORTED). What the report throws is passed on, but for bad_alloc.
//
// `key_bytes`: the memory for keys while live records are counted. A hashed table with more keys is
// counted in up to 16 parts, and if they do not suffice, a note says so.
constexpr size_t kFolderKeyBytes = size_t{16} << 20;
Status check_folder(const char* path, FolderRead read, FolderReport* report, FolderCounts* counts,
                    size_t key_bytes = kFolderKeyBytes);

}  // namespace frugal
