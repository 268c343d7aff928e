#include "checkpoint/kept_checkpoints.h"

#include <algorithm>
#include <utility>

#include "format/names.h"

namespace frugal {
namespace {

bool has(const Vector<uint64_t>& ascending, uint64_t number) {
  return std::binary_search(ascending.begin(), ascending.end(), number);
}

}  // namespace

Status no_folder() {
  return fail(FRUGAL_ERR_NOT_FOUND, "the engine has no folder for checkpoints: open one first");
}

KeptCheckpoints::Kept KeptCheckpoints::kept_of(const Manifest& m) {
  Kept kept;
  kept.name = m.name;
  for (const ManifestTable& t : m.tables)
    for (const ManifestFile& f : t.files) kept.files.push_back(f.info.number);
  std::sort(kept.files.begin(), kept.files.end());
  kept.has_blobs = m.blob_bytes > 0;
  return kept;
}

Status KeptCheckpoints::open(std::shared_ptr<Folder> folder, uint32_t keep, Next* next) try {
  Lock lock(mu_);
  all_read_ = false;
  folder_ = std::move(folder);
  keep_ = keep;
  kept_.clear();
  used_.clear();
  unknown_.clear();
  Vector<String> names;
  FRUGAL_TRY(folder_->list(&names));
  Vector<uint64_t> sequences;
  FRUGAL_TRY(list_manifests(*folder_, &sequences));
  *next = {};
  const auto had = [next](const Manifest& m) {
    next->file = std::max(next->file, m.next_file);
    next->table = std::max(next->table, m.next_table);
  };
  for (const uint64_t s : sequences) {
    Manifest m;
    File held;
    const Status status = read_manifest(*folder_, s, &m, &held);
    if (status == FRUGAL_ERR_OUT_OF_MEMORY) return status;
    if (status != FRUGAL_OK) {
      unknown_.push_back(s);
      continue;
    }
    kept_[s] = kept_of(m);
    had(m);
  }
  if (!sequences.empty()) next->sequence = sequences.back() + 1;
  for (const String& name : names) {
    uint64_t number;
    const FileKind kind = parse_name(name.c_str(), &number);
    if (kind == FileKind::kRows) next->file = std::max(next->file, number + 1);
    if (kind != FileKind::kDeleted) continue;
    next->sequence = std::max(next->sequence, number + 1);
    Manifest m;
    const Status status = read_deleted(*folder_, number, &m);
    if (status == FRUGAL_ERR_OUT_OF_MEMORY) return status;
    if (status == FRUGAL_OK) had(m);
  }
  all_read_ = true;
  remove_old();
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the list of checkpoints");
}

void KeptCheckpoints::close() {
  Lock lock(mu_);
  used_.clear();
  if (all_read_) remove_old();  // files that only the engine needed
  all_read_ = false;
  folder_.reset();
  kept_.clear();
  expected_.clear();
}

Status KeptCheckpoints::expect(const Manifest& m) try {
  Lock lock(mu_);
  expected_.clear();
  expected_[m.sequence] = kept_of(m);
  used_.reserve(expected_.begin()->second.files.size());
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory for the list of files of checkpoint %llu",
              static_cast<unsigned long long>(m.sequence));
}

void KeptCheckpoints::add() noexcept {
  Lock lock(mu_);
  used_ = expected_.begin()->second.files;
  kept_.merge(expected_);
  remove_old();
}

void KeptCheckpoints::drop() noexcept {
  Lock lock(mu_);
  expected_.clear();
}

Status KeptCheckpoints::based_on(const Manifest& m) {
  Lock lock(mu_);
  // Tables may come one after the other, each by a restore.
  for (const uint64_t file : kept_of(m).files) used_.push_back(file);
  std::sort(used_.begin(), used_.end());
  return FRUGAL_OK;
}

bool KeptCheckpoints::needed(uint64_t file) const {
  if (has(used_, file)) return true;
  for (const auto& [s, k] : kept_)
    if (has(k.files, file)) return true;
  return false;
}

// Removes checkpoints beyond those that are kept, and files that no checkpoint has. What cannot be
// removed now is removed by a later call.
void KeptCheckpoints::remove_old() try {
  const KeepError keep_error;
  uint32_t unnamed = 0;
  for (auto at = kept_.end(); at != kept_.begin();) {
    --at;
    if (!at->second.name.empty() || ++unnamed <= keep_) continue;
    bool in_use = false;
    if (delete_manifest(*folder_, at->first, &in_use) == FRUGAL_OK && !in_use) at = kept_.erase(at);
  }
  if (!unknown_.empty()) return;
  Vector<String> names;
  if (folder_->list(&names) != FRUGAL_OK) return;
  for (const String& name : names) {
    uint64_t number;
    const FileKind kind = parse_name(name.c_str(), &number);
    if (kind == FileKind::kNew || (kind == FileKind::kRows && !needed(number)) ||
        (kind == FileKind::kBlob && !kept_.count(number)) ||
        (kind == FileKind::kDeleted && !kept_.empty() && number < kept_.rbegin()->first))
      folder_->remove(name.c_str());
  }
} catch (const std::bad_alloc&) {
}

// Another checkpoint may be being written: only files of the removed one may go.
Status KeptCheckpoints::remove(uint64_t sequence) {
  Lock lock(mu_);
  if (!all_read_) return no_folder();
  // Its manifest may have its name already.
  if (expected_.count(sequence))
    return fail(FRUGAL_ERR_BUSY, "checkpoint %llu is being written: wait for it, or cancel it",
                static_cast<unsigned long long>(sequence));
  const auto at = kept_.find(sequence);  // not of a manifest that cannot be read
  bool in_use = false;
  const bool newest = (kept_.empty() || sequence >= kept_.rbegin()->first) &&
                      (unknown_.empty() || sequence >= unknown_.back());
  FRUGAL_TRY(delete_manifest(*folder_, sequence, &in_use, newest));
  if (in_use)
    return fail(FRUGAL_ERR_BUSY, "checkpoint %llu is open for reading: delete it later",
                static_cast<unsigned long long>(sequence));
  if (at == kept_.end()) {
    std::erase(unknown_, sequence);
    return FRUGAL_OK;
  }
  const Kept old = std::move(at->second);
  kept_.erase(at);
  if (!unknown_.empty()) return FRUGAL_OK;
  const KeepError keep_error;  // what is left is removed after the next checkpoint
  for (const uint64_t file : old.files)
    if (!needed(file)) folder_->remove(rows_name(file).c_str());
  if (old.has_blobs) folder_->remove(blob_name(sequence).c_str());
  return FRUGAL_OK;
}

}  // namespace frugal
