// Counts the records that count, and compares the numbers with a manifest's.
#include <algorithm>
#include <cinttypes>
#include <utility>

#include "format/folder_checker.h"

namespace frugal {

// The keys of entries from .. to - 1. A failure of `look` is returned.
template <class Look>
Status FolderChecker::each_key(ParameterFile& file, uint64_t from, uint64_t to, Look look) {
  constexpr uint64_t kEntries = ColumnBlock::kEntries, kBlocks = ReadAhead::kBlocks;
  const uint64_t first = from / kEntries, end = (to + kEntries - 1) / kEntries;
  const auto block_of = [&](uint64_t i) { return static_cast<uint32_t>(first + i * kBlocks); };
  const auto count_of = [&](uint64_t i) {
    return static_cast<uint32_t>(std::min(kBlocks, end - block_of(i)));
  };
  Status result = FRUGAL_OK;
  ahead_.each((end - first + kBlocks - 1) / kBlocks,
              [&](uint64_t i, char* at) {
                return file.column_request(block_of(i), count_of(i),
                                           reinterpret_cast<ColumnBlock*>(at));
              },
              [&](uint64_t i, const char* at, Status status) {
                if (result == FRUGAL_OK) result = status;
                if (result != FRUGAL_OK) return;
                result = file.each_entry(
                    reinterpret_cast<const ColumnBlock*>(at), block_of(i), count_of(i), from, to,
                    [&](uint64_t, const ColumnEntry* e, size_t n) { return look(e, n); });
              });
  return result;
}

// The numbers of live records, compared with the columns: of each key the newest entry counts.
Status FolderChecker::check_live(const Of& of) {
  const ManifestTable& t = of.t;
  const FolderFinding fault = finding(Found::kFault, manifest_name(of.m.sequence), &t);
  uint64_t sum = 0, list = arith::mix(t.live_rows);
  bool sound = true;
  for (const ManifestFile& f : t.files) {
    sum += f.live;
    list = arith::mix(arith::mix(arith::mix(list ^ f.info.number) ^ f.info.checksum) ^ f.live);
    sound &= files_[f.info.number].sound;
  }
  if (sum != t.live_rows)
    tell(fault, sizeof(ManifestEnvelope),
         text("%" PRIu64 " rows are live, and %" PRIu64 " records of its files", t.live_rows, sum));
  if (!sound) return FRUGAL_OK;
  const auto [at, is_new] = counted_.try_emplace(t.number, list);
  if (!is_new && std::exchange(at->second, list) == list) return FRUGAL_OK;
  Vector<uint64_t> live(t.files.size());
  const Status status = count_live(of, &seen_, &live);
  if (status == FRUGAL_ERR_UNSUPPORTED) {
    tell(finding(Found::kNote, fault.file, &t), {},
         "its counts of live records are not checked: it has too many keys");
    return FRUGAL_OK;
  }
  if (status != FRUGAL_OK) return failed(status, fault);
  for (size_t i = 0; i < live.size(); ++i)
    if (live[i] != t.files[i].live)
      tell(fault, sizeof(ManifestEnvelope),
           text("%" PRIu64 " records of %s are live, and it says %" PRIu64, live[i],
                rows_name(t.files[i].info.number).c_str(), t.files[i].live));
  return FRUGAL_OK;
}

// From the newest file to the oldest a record counts if no newer file has its key. Of one
// checkpoint, records count before deletions. UNSUPPORTED: there are too many keys.
Status FolderChecker::count_live(const Of& of, SeenKeys* seen, Vector<uint64_t>* live) {
  const Vector<ManifestFile>& files = of.t.files;
  Vector<size_t> order(files.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto sequence = [&](size_t at) { return files[order[at]].info.sequence; };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(files[b].info.sequence, files[a].info.number) <
           std::pair(files[a].info.sequence, files[b].info.number);
  });
  // The oldest files are only looked up, so a table whose files are all of one checkpoint has none
  // to add.
  uint64_t to_add = 0;
  for (size_t i = 0; i < order.size(); ++i)
    if (sequence(i) != sequence(order.size() - 1)) to_add += files[order[i]].info.entries;
  const bool dense = of.t.config.key_space == FRUGAL_DENSE;
  if (to_add == 0) {
    for (size_t i = 0; i < files.size(); ++i) (*live)[i] = files[i].info.records;
    return FRUGAL_OK;
  }
  if (!seen->open(dense, of.t.config.rows, to_add)) return FRUGAL_ERR_UNSUPPORTED;
  for (uint64_t part = 0; part < seen->parts(); ++part) {
    seen->begin(part);
    for (size_t from = 0, to; from < order.size(); from = to) {
      for (to = from; to < order.size() && sequence(to) == sequence(from);) ++to;
      const bool oldest = to == order.size();
      for (const bool deletions : {false, true})
        for (size_t i = from; i < to; ++i) {
          const ParameterFileInfo& info = files[order[i]].info;
          const uint64_t begin = deletions ? info.records : 0;
          const uint64_t end = deletions ? info.entries : info.records;
          if (begin == end || (oldest && deletions)) continue;
          ParameterFile file;
          FRUGAL_TRY(ParameterFile::open(folder_, info.number, true, &file));
          FRUGAL_TRY(file.expect(info));
          FRUGAL_TRY(
              each_key(file, begin, end, [&](const ColumnEntry* entries, size_t n) -> Status {
                for (size_t k = 0; k < n; ++k) {
                  const uint64_t key = entries[k].key;
                  if (!seen->in_part(key)) continue;
                  if (!deletions && !seen->has(key)) ++(*live)[order[i]];
                  if (!oldest) seen->add(key);
                }
                return seen->full() ? FRUGAL_ERR_UNSUPPORTED : FRUGAL_OK;
              }));
        }
    }
  }
  return FRUGAL_OK;
}

}  // namespace frugal
