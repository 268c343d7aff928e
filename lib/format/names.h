// Names of the files of a folder (docs/checkpoints.md, "Files of a folder").
//
// A number is written in decimal, without zeros before it. So each file has one name.
#pragma once
#include "base/heap.h"

namespace frugal {

String rows_name(uint64_t number);        // <number>.rows: a parameter file
String blob_name(uint64_t sequence);      // <sequence>.blob
String manifest_name(uint64_t sequence);  // <sequence>.checkpoint
// <sequence>.deleted: the manifest of a checkpoint that was deleted when it was the newest. It says
// which numbers the folder has had.
String deleted_name(uint64_t sequence);
// <name>.new: what the file is called until it is complete.
String new_name(const String& name);

enum class FileKind {
  kForeign,  // none of these: the lock, or a file that no engine has made
  kRows,
  kBlob,
  kManifest,
  kDeleted,
  kNew,  // one of these with .new; its number is theirs
};
// An engine gives no number from here on, so a file with one is foreign.
constexpr uint64_t kNamesEnd = uint64_t{1} << 61;
// `*number` is written unless the file is foreign.
FileKind parse_name(const char* name, uint64_t* number);

}  // namespace frugal
