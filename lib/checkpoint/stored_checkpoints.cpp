#include "checkpoint/stored_checkpoints.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/blobs.h"
#include "format/blocks.h"
#include "format/names.h"

namespace frugal {
namespace {

constexpr size_t kCopyBytes = size_t{4} << 20;

Status no_checkpoint(const Folder& folder) {
  return fail(FRUGAL_ERR_NOT_FOUND, "folder '%s' has no checkpoint: choose another one",
              folder.path());
}

// A file of a checkpoint is never changed. So where the file system can do that, the copy is
// another name of the same file.
Status copy_file(const Folder& from, const String& name, uint64_t bytes, Folder& to) {
  const Status linked = from.link(name.c_str(), to);
  if (linked != FRUGAL_ERR_UNSUPPORTED) return linked;
  File in, out;
  FRUGAL_TRY(from.open_file(name.c_str(), false, &in));
  FRUGAL_TRY(to.create(name.c_str(), false, &out));
  Blocks piece(std::min<uint64_t>(kCopyBytes, (bytes + kFileBlock - 1) / kFileBlock * kFileBlock));
  for (uint64_t at = 0; at < bytes; at += kCopyBytes) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kCopyBytes, bytes - at));
    FRUGAL_TRY(in.read(at, piece.at, n));
    FRUGAL_TRY(out.write(at, piece.at, n));
  }
  return out.sync();
}

// Names and lengths of the files of a checkpoint, but for its manifest.
struct CopiedFile {
  String name;
  uint64_t bytes;
};

Vector<CopiedFile> files_of(const Manifest& m) {
  Vector<CopiedFile> files;
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files)
      files.push_back({rows_name(f.info.number), f.info.length});
  if (m.blob_bytes > 0) files.push_back({blob_name(m.sequence), m.blob_bytes});
  return files;
}

// The files are those that the manifest means, and whole. Their records are not read.
Status check_files(const Folder& folder, const Manifest& m) {
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files) {
      ParameterFile file;
      FRUGAL_TRY(ParameterFile::open(folder, f.info.number, false, &file));
      FRUGAL_TRY(file.expect(f.info));
    }
  if (m.blob_bytes == 0) return FRUGAL_OK;
  File blobs;
  uint64_t bytes = 0;
  FRUGAL_TRY(folder.open_file(blob_name(m.sequence).c_str(), false, &blobs));
  FRUGAL_TRY(blobs.size(&bytes));
  if (bytes == m.blob_bytes) return FRUGAL_OK;
  return fail(FRUGAL_ERR_DAMAGED, "%s/%s has %llu bytes, and %llu were written", folder.path(),
              blobs.name(), static_cast<unsigned long long>(bytes),
              static_cast<unsigned long long>(m.blob_bytes));
}

}  // namespace

frugal_checkpoint_info info_of(const Manifest& m) {
  frugal_checkpoint_info info;
  std::memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  info.number = m.sequence;
  info.step = m.step;
  info.created = m.created;
  info.bytes = m.blob_bytes;
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files) info.bytes += f.info.length;
  info.tables = m.tables.size();
  info.world_size = m.world_size;
  info.blobs = static_cast<uint32_t>(m.blobs.size());
  std::memcpy(info.name, m.name.c_str(), m.name.size() + 1);
  return info;
}

Status open_checkpoint(const Folder& folder, uint64_t number, const char* name, Manifest* out,
                       File* keep) {
  if (number != 0) {
    FRUGAL_TRY(read_manifest(folder, number, out, keep));
    if (!name || out->name == name) return FRUGAL_OK;
    return fail(FRUGAL_ERR_NOT_FOUND,
                "checkpoint %llu of '%s' has the name '%s', not '%.300s': give one of both",
                static_cast<unsigned long long>(number), folder.path(), out->name.c_str(), name);
  }
  Vector<uint64_t> all;
  FRUGAL_TRY(list_manifests(folder, &all));
  for (auto at = all.rbegin(); at != all.rend(); ++at) {
    const Status status = read_manifest(folder, *at, out, keep);
    // Its writer may be deleting it.
    if (status == FRUGAL_ERR_NOT_FOUND || status == FRUGAL_ERR_BUSY) continue;
    FRUGAL_TRY(status);
    if (!name || out->name == name) return FRUGAL_OK;
  }
  if (!name) return no_checkpoint(folder);
  return fail(FRUGAL_ERR_NOT_FOUND,
              "folder '%s' has no checkpoint with the name '%.300s': choose another one",
              folder.path(), name);
}

Status next_checkpoint(const char* path, uint64_t* cursor, frugal_checkpoint_info* info) {
  std::shared_ptr<Folder> folder;
  FRUGAL_TRY(Folder::open(path, Folder::Use::kRead, &folder));
  Vector<uint64_t> all;
  FRUGAL_TRY(list_manifests(*folder, &all));
  for (auto at = std::upper_bound(all.begin(), all.end(), *cursor); at != all.end(); ++at) {
    Manifest m;
    File keep;
    const Status status = read_manifest(*folder, *at, &m, &keep);
    if (status == FRUGAL_ERR_NOT_FOUND || status == FRUGAL_ERR_BUSY) continue;
    // A caller passes over one that it cannot read.
    if (status != FRUGAL_ERR_IO && status != FRUGAL_ERR_OUT_OF_MEMORY) *cursor = *at;
    FRUGAL_TRY(status);
    *info = info_of(m);
    return FRUGAL_OK;
  }
  *info = info_of({});
  info->number = 0;
  return FRUGAL_OK;
}

Status read_stored_blob(const char* path, uint64_t number, uint32_t rank, void* out,
                        size_t capacity, size_t* size) {
  std::shared_ptr<Folder> folder;
  FRUGAL_TRY(Folder::open(path, Folder::Use::kRead, &folder));
  Manifest m;
  File keep;
  FRUGAL_TRY(open_checkpoint(*folder, number, nullptr, &m, &keep));
  return read_blob(*folder, m, rank, out, capacity, size);
}

Status copy_checkpoint(const char* path, uint64_t number, const char* to_path) {
  std::shared_ptr<Folder> folder, to;
  FRUGAL_TRY(Folder::open(path, Folder::Use::kRead, &folder));
  Manifest m;
  File keep;
  FRUGAL_TRY(open_checkpoint(*folder, number, nullptr, &m, &keep));
  const Vector<CopiedFile> files = files_of(m);
  FRUGAL_TRY(Folder::open(to_path, Folder::Use::kCreate, &to));
  Vector<String> names;
  FRUGAL_TRY(to->list(&names));
  const auto kind = [](const String& name) {
    uint64_t n;
    return parse_name(name.c_str(), &n);
  };
  for (const String& name : names)
    if (kind(name) == FileKind::kManifest)
      return fail(FRUGAL_ERR_EXISTS, "folder '%s' has a checkpoint: name a new or an empty one",
                  to->path());
  // What a writer that has died left.
  for (const String& name : names)
    if (kind(name) != FileKind::kForeign && kind(name) != FileKind::kDeleted)
      FRUGAL_TRY(to->remove(name.c_str()));
  FRUGAL_TRY(check_files(*folder, m));
  Status status = FRUGAL_OK;
  for (size_t i = 0; i < files.size() && status == FRUGAL_OK; ++i)
    status = copy_file(*folder, files[i].name, files[i].bytes, *to);
  if (status == FRUGAL_OK) status = write_manifest(*to, m);
  if (status == FRUGAL_OK) return status;
  const KeepError keep_error;
  to->remove(manifest_name(m.sequence).c_str());  // first: no checkpoint is without its files
  for (const CopiedFile& f : files) to->remove(f.name.c_str());
  return status;
}

}  // namespace frugal
