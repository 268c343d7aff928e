// Checks a folder: its manifests, blobs, and the names of its files.
#include "format/folder_check.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "base/assert.h"
#include "format/folder_checker.h"

namespace frugal {

// The rest of 64 MiB is for a manifest, names of files, code and stacks.
static_assert(ReadAhead::kPieces * ReadAhead::kPieceBytes + kFolderKeyBytes <= size_t{32} << 20);

String shown_bytes(const char* what, uint64_t is, uint64_t wanted, uint64_t sequence) {
  return text("%s %" PRIu64 ", and checkpoint %" PRIu64 " lists %" PRIu64, what, is, sequence,
              wanted);
}

FolderFinding FolderChecker::finding(Found kind, const String& file, const ManifestTable* t) const {
  FolderFinding f;
  f.kind = kind;
  f.file = file;
  if (t) {
    f.table = t->number;
    f.table_name = t->name;
  }
  return f;
}

void FolderChecker::tell(FolderFinding f, std::optional<uint64_t> offset, String what) {
  f.offset = offset;
  f.what = std::move(what);
  ++(f.kind == Found::kFault    ? counts_->faults
     : f.kind == Found::kUnread ? counts_->unread
                                : counts_->notes);
  report_->found(f);
}

Status FolderChecker::failed(Status status, FolderFinding f) {
  if (status == FRUGAL_ERR_OUT_OF_MEMORY) return status;
  const CallError error = recorded_error();
  String what = error.message;
  std::optional<uint64_t> offset;
  // The line has the file and the offset already. A message of another file stays whole.
  const String end = f.file + "' ";
  if (const size_t at = what.find(end); at != String::npos) {
    what.erase(0, at + end.size());
    if (what.starts_with("is damaged")) what.erase(0, what.find(": ") + 2);
    if (error.offset != CallError::kNoOffset) offset = error.offset;
  }
  const bool fault =
      status == FRUGAL_ERR_DAMAGED || status == FRUGAL_ERR_IO || status == FRUGAL_ERR_NOT_FOUND;
  f.kind = fault ? Found::kFault : Found::kUnread;
  tell(std::move(f), offset, std::move(what));
  return FRUGAL_OK;
}

Status FolderChecker::run() {
  FRUGAL_TRY(ahead_.open());
  Vector<String> names;
  FRUGAL_TRY(folder_.list(&names));
  std::sort(names.begin(), names.end());
  for (const String& name : names)
    if (uint64_t n; parse_name(name.c_str(), &n) == FileKind::kManifest) manifests_.push_back(n);
  std::sort(manifests_.begin(), manifests_.end());
  for (const uint64_t sequence : manifests_) FRUGAL_TRY(check_manifest(sequence, false));
  return check_names(names);
}

// --- Manifests -----------------------------------------------------------------------------------

// `names_only`: nothing is reported, and the files are known afterwards.
Status FolderChecker::check_manifest(uint64_t sequence, bool names_only) {
  const String name = manifest_name(sequence);
  Manifest m;
  File held;  // until the checkpoint is checked, its writer keeps it
  const Status status = read_manifest(folder_, sequence, &m, &held);
  if (names_only && status != FRUGAL_OK && status != FRUGAL_ERR_OUT_OF_MEMORY) return FRUGAL_OK;
  if (status == FRUGAL_ERR_NOT_FOUND || status == FRUGAL_ERR_BUSY) {
    tell(finding(Found::kNote, name), {}, "its writer is deleting or has deleted it: not checked");
    return FRUGAL_OK;
  }
  if (status != FRUGAL_OK) {
    all_read_ = false;
    return failed(status, finding(Found::kFault, name));
  }
  if (m.blob_bytes > 0) blobs_.push_back(sequence);
  const bool reads = read_ == FolderRead::kAll && !names_only;
  if (!names_only) {
    uint64_t bytes = 0;
    FRUGAL_TRY(held.size(&bytes));
    ++counts_->checkpoints;
    counts_->bytes += bytes;
    report_->checkpoint(m);
  }
  for (const ManifestTable& t : m.tables) {
    const Of of{m, t};
    for (const ManifestFile& f : t.files)
      if (reads)
        FRUGAL_TRY(check_file(of, f));
      else if (files_.try_emplace(f.info.number, Known{f.info}).second && !names_only) {
        ++counts_->files;
        counts_->bytes += f.info.length;
      }
    if (reads) FRUGAL_TRY(check_live(of));
  }
  if (reads) return check_blobs(m);
  if (!names_only && m.blob_bytes > 0) {
    ++counts_->files;
    counts_->bytes += m.blob_bytes;
  }
  return FRUGAL_OK;
}

// --- Blobs, and files of no checkpoint -----------------------------------------------------------

Status FolderChecker::check_blobs(const Manifest& m) {
  if (m.blob_bytes == 0) return FRUGAL_OK;
  const String name = blob_name(m.sequence);
  const FolderFinding fault = finding(Found::kFault, name);
  File file;
  uint64_t bytes = 0;
  // Its length is no number of blocks, so not all of it can be read without the system's cache.
  Status status = folder_.open_file(name.c_str(), false, &file);
  if (status == FRUGAL_ERR_NOT_FOUND) {
    tell(fault, {}, text("there is no such file, and checkpoint %" PRIu64 " lists it", m.sequence));
    return FRUGAL_OK;
  }
  if (status == FRUGAL_OK) status = file.size(&bytes);
  if (status != FRUGAL_OK) return failed(status, fault);
  ++counts_->files;
  counts_->bytes += bytes;
  if (bytes != m.blob_bytes)
    tell(fault, std::min(bytes, m.blob_bytes),
         shown_bytes("its length is", bytes, m.blob_bytes, m.sequence));
  for (const ManifestBlob& b : m.blobs) {
    if (b.at + b.bytes > bytes) continue;  // told already
    RunningChecksum sum(blob_seed(m.sequence, b.rank));
    bool all = true;
    ahead_.each((b.bytes + ReadAhead::kPieceBytes - 1) / ReadAhead::kPieceBytes,
                [&](uint64_t i, char* to) {
                  const uint64_t at = i * ReadAhead::kPieceBytes;
                  return IoRequest{IoRequest::Kind::kRead, &file, b.at + at, to,
                                   std::min<uint64_t>(ReadAhead::kPieceBytes, b.bytes - at)};
                },
                [&](uint64_t i, const char* at, Status read) {
                  const uint64_t from = i * ReadAhead::kPieceBytes;
                  if (read == FRUGAL_OK) {
                    sum.add(at, std::min<uint64_t>(ReadAhead::kPieceBytes, b.bytes - from));
                    return;
                  }
                  all = false;
                  tell(fault, b.at + from, text("the blob of rank %u cannot be read", b.rank));
                });
    if (all && sum.value() != b.checksum)
      tell(fault, b.at, text("the blob of rank %u has a wrong checksum", b.rank));
  }
  return FRUGAL_OK;
}

// Files that were there at the beginning and at the end, and that no manifest lists.
Status FolderChecker::check_names(const Vector<String>& before) {
  Vector<String> names;
  FRUGAL_TRY(folder_.list(&names));
  // The writer may have ended a checkpoint with them.
  for (const String& name : names)
    if (uint64_t n; parse_name(name.c_str(), &n) == FileKind::kManifest &&
                    !std::binary_search(manifests_.begin(), manifests_.end(), n))
      FRUGAL_TRY(check_manifest(n, true));
  std::sort(names.begin(), names.end());
  std::sort(blobs_.begin(), blobs_.end());
  const char* const none =
      all_read_ ? "it is not part of any checkpoint" : "no checkpoint that can be read has it";
  for (const String& name : names) {
    if (!std::binary_search(before.begin(), before.end(), name)) continue;
    uint64_t n = 0;
    String what = none;
    switch (parse_name(name.c_str(), &n)) {  // it has no other values: GCOVR_EXCL_BR_LINE
      case FileKind::kManifest:
      case FileKind::kDeleted:
        continue;
      case FileKind::kRows:
        if (files_.count(n)) continue;
        break;
      case FileKind::kBlob:
        if (std::binary_search(blobs_.begin(), blobs_.end(), n)) continue;
        break;
      case FileKind::kNew:
        what = "it is not complete, and not part of any checkpoint";
        break;
      case FileKind::kForeign:
        if (name == "lock") continue;
        what = "no engine gives a file this name: it is not part of any checkpoint";
    }
    tell(finding(Found::kNote, name), {}, what);
  }
  return FRUGAL_OK;
}

Status check_folder(const char* path, FolderRead read, FolderReport* report, FolderCounts* counts,
                    size_t key_bytes) try {
  FRUGAL_ASSERT(key_bytes >= 512);
  *counts = {};
  // Other builds: GCOVR_EXCL_START
  if (!checksums_are_built())
    return fail(FRUGAL_ERR_UNSUPPORTED, "this build has no xxHash: no checkpoints");
  // GCOVR_EXCL_STOP
  std::shared_ptr<Folder> folder;
  FRUGAL_TRY(Folder::open(path, Folder::Use::kRead, &folder));
  Vector<uint64_t> none;
  FRUGAL_TRY(list_manifests(*folder, &none));  // a build without Cap'n Proto fails here
  const auto checker = std::make_unique<FolderChecker>(*folder, read, report, counts, key_bytes);
  return checker->run();
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to check the folder");
}

}  // namespace frugal
