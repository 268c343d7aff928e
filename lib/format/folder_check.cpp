#include "format/folder_check.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "arith/init.h"
#include "base/assert.h"
#include "format/blocks.h"

namespace frugal {
namespace {

using Found = FolderFinding::Kind;

// The memory of a check. The rest of 64 MiB is for a manifest, names of files, code and stacks.
constexpr size_t kCheckedBytes = size_t{4} << 20;  // of each of the two pieces that are being read
constexpr size_t kRequestBytes = size_t{1} << 20;  // a piece is read by several threads
constexpr uint32_t kCheckThreads = 4;
static_assert(2 * kCheckedBytes + kFolderKeyBytes <= size_t{24} << 20);
// Keys of a hashed table are counted in so many parts, each of which reads the columns anew.
constexpr uint64_t kMostParts = 16;

// --- Reading ahead -------------------------------------------------------------------------------

// Two pieces of memory: one is read into while the bytes of the other one are checked.
class Ahead {
 public:
  Status open() { return queue_.open(kCheckThreads); }

  // For i below n: the request of piece i is request(i, memory), and look(i, memory, status) gets
  // what was read.
  template <class Request, class Look>
  void each(uint64_t n, Request request, Look look) {
    struct Ended {  // no thread uses the memory afterwards, also if look() throws
      Ahead& ahead;
      ~Ended() {
        for (Half& h : ahead.halves_) {
          ahead.queue_.cancel(&h.batch);
          (void)ahead.queue_.wait(&h.batch);
        }
      }
    } const ended{*this};
    const auto submit = [&](uint64_t i) {
      Half& h = halves_[i % 2];
      const IoRequest whole = request(i, h.memory.at);
      h.batch.requests.clear();
      for (size_t done = 0; done < whole.size; done += kRequestBytes) {
        IoRequest part = whole;
        part.at += done;
        part.bytes += done;
        part.size = std::min(kRequestBytes, whole.size - done);
        h.batch.requests.push_back(part);
      }
      queue_.submit(&h.batch);
    };
    if (n > 0) submit(0);
    for (uint64_t i = 0; i < n; ++i) {
      if (i + 1 < n) submit(i + 1);
      Half& h = halves_[i % 2];
      const Status status = queue_.wait(&h.batch);
      look(i, h.memory.at, status);
    }
  }

 private:
  struct Half {
    IoBatch batch;
    Blocks memory{kCheckedBytes};
  };
  Half halves_[2];
  IoQueue queue_;  // ends before the memory
};

// --- Keys that newer files have ------------------------------------------------------------------

// A part of the keys of a table: for each, whether it was added. In memory of a fixed size.
class SeenKeys {
 public:
  explicit SeenKeys(size_t bytes) : most_words_(std::bit_floor(bytes / sizeof(uint64_t))) {}
  // `entries`: that add() may be called for. False: that is too many.
  bool open(bool dense, uint64_t rows, uint64_t entries) {
    dense_ = dense;
    bits_ = most_words_ * 64;
    const uint64_t most = dense ? bits_ : most_words_ / 8 * 5;  // a hash table is never full
    parts_ = std::max<uint64_t>(((dense ? rows : entries) + most - 1) / most, 1);
    if (!dense && parts_ > kMostParts) return false;
    uint64_t words = 1;
    if (dense)
      words = (std::min(rows, bits_) + 63) / 64;
    else
      while (words < most_words_ && words < entries * 2) words *= 2;
    if (words > words_.size()) {
      Vector<uint64_t>().swap(words_);  // before there is a larger one
      words_.resize(words);
    }
    used_ = words;
    return true;
  }
  uint64_t parts() const { return parts_; }

  void begin(uint64_t part) {
    part_ = part;
    std::fill(words_.begin(), words_.begin() + static_cast<ptrdiff_t>(used_), 0);
    zero_ = false;
    added_ = 0;
  }
  bool in_part(uint64_t key) const {
    if (dense_) return key / bits_ == part_;
    return parts_ == 1 ||
           static_cast<uint64_t>(static_cast<unsigned __int128>(arith::mix(key)) * parts_ >> 64) ==
               part_;
  }
  // Of a key of the part.
  bool has(uint64_t key) const {
    if (dense_) return words_[key % bits_ / 64] >> key % 64 & 1;
    return key == 0 ? zero_ : words_[word_of(key)] == key;
  }
  void add(uint64_t key) {
    if (dense_) {
      words_[key % bits_ / 64] |= uint64_t{1} << key % 64;
      return;
    }
    if (key == 0) {
      zero_ = true;
      return;
    }
    uint64_t& word = words_[word_of(key)];
    if (word == key) return;
    if (added_ + 1 == used_) {  // keys that a writer did not draw by chance
      full_ = true;
      return;
    }
    word = key;
    ++added_;
  }
  bool full() const { return full_; }

 private:
  size_t word_of(uint64_t key) const {
    size_t at = arith::mix(key) & (used_ - 1);
    while (words_[at] != 0 && words_[at] != key) at = (at + 1) & (used_ - 1);
    return at;
  }
  const uint64_t most_words_;  // a power of 2, at least 64
  bool dense_ = false, zero_ = false, full_ = false;
  uint64_t bits_ = 0, parts_ = 1, part_ = 0, used_ = 0, added_ = 0;
  Vector<uint64_t> words_;
};

// --- The check -----------------------------------------------------------------------------------

class FolderChecker : public HeapObject {
 public:
  FolderChecker(const Folder& folder, FolderRead read, FolderReport* report, FolderCounts* counts,
                size_t key_bytes)
      : folder_(folder), read_(read), report_(report), counts_(counts), seen_(key_bytes) {}
  Status run();

 private:
  struct Known {  // of a parameter file that some manifest lists
    ParameterFileInfo info;
    bool checked = false;
    bool sound = false;  // its header and its column
  };
  // What is being checked.
  struct Of {
    const Manifest& m;
    const ManifestTable& t;
  };

  FolderFinding finding(Found kind, const String& file, const ManifestTable* t = nullptr) const;
  void tell(FolderFinding f, std::optional<uint64_t> offset, String what);
  // The call of the library for the file has failed, and has left a message.
  Status failed(Status status, FolderFinding f);

  Status check_manifest(uint64_t sequence, bool names_only);
  uint64_t manifest_fault_at(const String& name);
  Status check_file(const Of& of, const ManifestFile& f);
  bool as_listed(const Of& of, const ParameterFile& file, const ManifestFile& f);
  Status check_records(const Of& of, ParameterFile& file);
  Status check_column(const Of& of, ParameterFile& file, bool* sound);
  void wrong_record(const Of& of, ParameterFile& file, uint64_t index, String what);
  Status check_live(const Of& of);
  Status count_live(const Of& of, SeenKeys* seen, Vector<uint64_t>* live);
  template <class Look>
  Status each_entry(ParameterFile& file, uint64_t from, uint64_t to, Look look);
  Status check_blobs(const Manifest& m);
  Status check_names(const Vector<String>& before);

  const Folder& folder_;
  const FolderRead read_;
  FolderReport* const report_;
  FolderCounts* const counts_;
  Ahead ahead_;
  SeenKeys seen_;
  Blocks block_{kFileBlock};
  Map<uint64_t, Known> files_;
  Map<uint64_t, uint64_t> counted_;     // by table: the lists of files whose counts were compared
  Vector<uint64_t> manifests_, blobs_;  // sequence numbers, ascending
  bool all_read_ = true;                // all manifests
};

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
  String what = recorded_message();
  std::optional<uint64_t> offset;
  // A message is of "'folder/name' is damaged at byte 5: why", or "'folder/name' cannot be ...".
  const String end = f.file + "' ";
  if (const size_t at = what.find(end); at != String::npos) {
    what.erase(0, at + end.size());
    constexpr char kByte[] = " at byte ";
    if (const size_t byte = what.find(kByte); byte != String::npos)
      offset = std::strtoull(what.c_str() + byte + sizeof kByte - 1, nullptr, 10);
    if (what.starts_with("is damaged"))
      if (const size_t why = what.find(": "); why != String::npos) what.erase(0, why + 2);
  }
  switch (status) {
    case FRUGAL_ERR_DAMAGED:
    case FRUGAL_ERR_IO:
    case FRUGAL_ERR_NOT_FOUND:
      f.kind = Found::kFault;
      break;
    case FRUGAL_ERR_TOO_NEW:  // manifests and parameter files have both fields at the same places
      offset = offsetof(ParameterFileHeader, version);
      f.kind = Found::kUnread;
      break;
    case FRUGAL_ERR_UNSUPPORTED:
      offset = offsetof(ParameterFileHeader, byte_order);
      f.kind = Found::kUnread;
      break;
    default:
      f.kind = Found::kUnread;
  }
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
    FolderFinding f = finding(Found::kFault, name);
    if (status != FRUGAL_ERR_DAMAGED) return failed(status, f);
    String what = recorded_message();
    const String begin = name + "' is damaged: ";
    if (const size_t at = what.find(begin); at != String::npos) what.erase(0, at + begin.size());
    tell(f, manifest_fault_at(name), what);
    return FRUGAL_OK;
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

// Where a manifest that cannot be read is damaged: the envelope's field, or the message.
uint64_t FolderChecker::manifest_fault_at(const String& name) {
  const KeepError keep;
  File file;
  uint64_t bytes = 0;
  ManifestEnvelope e;
  if (folder_.open_file(name.c_str(), false, &file) != FRUGAL_OK || file.size(&bytes) != FRUGAL_OK)
    return 0;
  if (bytes < sizeof e) return bytes;
  if (file.read(0, &e, sizeof e) != FRUGAL_OK ||
      checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0) != e.envelope_sum ||
      std::memcmp(e.magic, kManifestMagic, sizeof e.magic) != 0)
    return 0;
  uint64_t named = 0;
  parse_name(name.c_str(), &named);
  if (e.sequence != named) return offsetof(ManifestEnvelope, sequence);
  if (e.message_bytes != bytes - sizeof e)
    return std::min(bytes, std::max(e.message_bytes, e.message_bytes + sizeof e));
  return sizeof e;
}

// --- Parameter files -----------------------------------------------------------------------------

Status FolderChecker::check_file(const Of& of, const ManifestFile& f) {
  const auto [at, is_new] = files_.try_emplace(f.info.number, Known{f.info});
  Known& known = at->second;
  if (!is_new && known.checked && known.info == f.info) return FRUGAL_OK;
  const String name = rows_name(f.info.number);
  FolderFinding fault = finding(Found::kFault, name, &of.t);
  if (f.info.sequence > of.m.sequence)
    tell(fault, offsetof(ParameterFileHeader, sequence),
         text("checkpoint %" PRIu64 " lists it, and it is of checkpoint %" PRIu64, of.m.sequence,
              f.info.sequence));
  ParameterFile file;
  const Status status = ParameterFile::open(folder_, f.info.number, true, &file);
  const bool first = !std::exchange(known.checked, true);
  if (status == FRUGAL_ERR_NOT_FOUND) {
    tell(fault, {},
         text("there is no such file, and checkpoint %" PRIu64 " lists it", of.m.sequence));
    return FRUGAL_OK;
  }
  if (status != FRUGAL_OK) return first ? failed(status, fault) : FRUGAL_OK;
  if (!as_listed(of, file, f)) {
    known.sound = false;
    return FRUGAL_OK;
  }
  known.info = f.info;
  ++counts_->files;
  counts_->bytes += f.info.length;
  FRUGAL_TRY(check_records(of, file));
  return check_column(of, file, &known.sound);
}

bool FolderChecker::as_listed(const Of& of, const ParameterFile& file, const ManifestFile& f) {
  const ParameterFileInfo &is = file.info(), &wanted = f.info;
  const struct {
    const char* what;
    uint64_t is, wanted;
    size_t at;
  } fields[] = {
      {"it is of table", is.table, wanted.table, offsetof(ParameterFileHeader, table)},
      {"it is of checkpoint", is.sequence, wanted.sequence,
       offsetof(ParameterFileHeader, sequence)},
      {"its records are", is.records, wanted.records, offsetof(ParameterFileHeader, records)},
      {"its entries are", is.entries, wanted.entries, offsetof(ParameterFileHeader, entries)},
      {"its length is", is.length, wanted.length, offsetof(ParameterFileHeader, length)},
      {"its header's checksum is", is.checksum, wanted.checksum,
       offsetof(ParameterFileHeader, checksum)},
  };
  const FolderFinding fault = finding(Found::kFault, rows_name(file.info().number), &of.t);
  for (const auto& field : fields)
    if (field.is != field.wanted) {
      tell(fault, field.at, shown_bytes(field.what, field.is, field.wanted, of.m.sequence));
      return false;
    }
  if (file.format() == of.t.format) return true;
  tell(fault, offsetof(ParameterFileHeader, format),
       text("its rows have another format than checkpoint %" PRIu64 " has for the table",
            of.m.sequence));
  return false;
}

// Reports `what` of a record, with its key if the column's block can be read.
void FolderChecker::wrong_record(const Of& of, ParameterFile& file, uint64_t index, String what) {
  FolderFinding fault = finding(Found::kFault, rows_name(file.info().number), &of.t);
  auto* const block = reinterpret_cast<ColumnBlock*>(block_.at);
  const auto in = static_cast<uint32_t>(index / ColumnBlock::kEntries);
  if (file.read_column(in, 1, block) == FRUGAL_OK)
    fault.key = block->entries[index % ColumnBlock::kEntries].key;
  else
    what += ", and so has the block of the column with its key";
  tell(std::move(fault), file.record_at(static_cast<uint32_t>(index)),
       text("record %" PRIu64 " %s", index, what.c_str()));
}

Status FolderChecker::check_records(const Of& of, ParameterFile& file) {
  const uint64_t records = file.info().records, bytes = file.format().record_bytes();
  // A manifest's tables have rows of at most 65,536 elements, and a few columns of state.
  FRUGAL_ASSERT(bytes + 2 * kFileBlock <= kCheckedBytes);
  const uint64_t per_piece = (kCheckedBytes - 2 * kFileBlock) / bytes;
  const auto first_of = [&](uint64_t i) { return static_cast<uint32_t>(i * per_piece); };
  const auto count_of = [&](uint64_t i) {
    return static_cast<uint32_t>(std::min(per_piece, records - i * per_piece));
  };
  counts_->records += records;
  ahead_.each(
      (records + per_piece - 1) / per_piece,
      [&](uint64_t i, char* to) { return file.records_request(first_of(i), count_of(i), to); },
      [&](uint64_t i, char* at, Status piece) {
        const uint32_t first = first_of(i), end = first + count_of(i);
        for (uint32_t r = first; r < end; ++r) {
          // After a failure each record is read alone: the others may be sound.
          if (piece != FRUGAL_OK && file.read_unverified(r, 1, at) != FRUGAL_OK)
            wrong_record(of, file, r, "cannot be read");
          else if (file.verify_record(r, file.record_in(at, piece ? r : first, r), nullptr) !=
                   FRUGAL_OK)
            wrong_record(of, file, r, "has a wrong checksum");
        }
      });
  return FRUGAL_OK;
}

Status FolderChecker::check_column(const Of& of, ParameterFile& file, bool* sound) {
  const ParameterFileInfo& info = file.info();
  const uint64_t blocks = file.column_blocks(), per_piece = kCheckedBytes / kFileBlock;
  const uint64_t column_at = info.length - blocks * kFileBlock;
  const bool dense = of.t.config.key_space == FRUGAL_DENSE;
  *sound = true;
  const auto wrong = [&](uint64_t block, const char* what) {
    *sound = false;
    tell(finding(Found::kFault, rows_name(file.info().number), &of.t),
         column_at + block * kFileBlock, text("block %" PRIu64 " of the column %s", block, what));
  };
  const auto look_at = [&](uint64_t b, const ColumnBlock& block) {
    if (file.verify_block(static_cast<uint32_t>(b), block) != FRUGAL_OK)
      return wrong(b, "has a wrong checksum or a wrong count");
    for (uint32_t i = 0; i < block.count; ++i) {
      const ColumnEntry& e = block.entries[i];
      const uint64_t index = b * ColumnBlock::kEntries + i;
      String what;
      if (e.sequence != info.sequence)
        what = text("entry %" PRIu64 " is of checkpoint %" PRIu64 ", and the file of %" PRIu64,
                    index, e.sequence, info.sequence);
      else if (dense && e.key >= of.t.config.rows)
        what =
            text("entry %" PRIu64 " has an id that is not below %" PRIu64, index, of.t.config.rows);
      else if (dense && index >= info.records)
        what = text("entry %" PRIu64 " is a deletion, and rows of dense tables are not deleted",
                    index);
      else
        continue;
      *sound = false;
      FolderFinding fault = finding(Found::kFault, rows_name(file.info().number), &of.t);
      fault.key = e.key;
      tell(std::move(fault), column_at + b * kFileBlock + i * sizeof(ColumnEntry), what);
    }
  };
  ahead_.each((blocks + per_piece - 1) / per_piece,
              [&](uint64_t i, char* to) {
                const uint64_t n = std::min(per_piece, blocks - i * per_piece);
                return file.column_request(static_cast<uint32_t>(i * per_piece),
                                           static_cast<uint32_t>(n),
                                           reinterpret_cast<ColumnBlock*>(to));
              },
              [&](uint64_t i, char* at, Status piece) {
                const uint64_t first = i * per_piece, end = std::min(first + per_piece, blocks);
                for (uint64_t b = first; b < end; ++b) {
                  const char* block = at + (b - first) * kFileBlock;
                  if (piece != FRUGAL_OK) {
                    const IoRequest r = file.column_request(
                        static_cast<uint32_t>(b), 1, reinterpret_cast<ColumnBlock*>(block_.at));
                    block = block_.at;
                    if (file.file()->read(r.at, r.bytes, r.size) != FRUGAL_OK) {
                      wrong(b, "cannot be read");
                      continue;
                    }
                  }
                  look_at(b, *reinterpret_cast<const ColumnBlock*>(block));
                }
              });
  return FRUGAL_OK;
}

// --- How many records count ----------------------------------------------------------------------

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
          FRUGAL_TRY(each_entry(file, begin, end, [&](uint64_t key) {
            if (!seen->in_part(key)) return;
            if (!deletions && !seen->has(key)) ++(*live)[order[i]];
            if (!oldest) seen->add(key);
          }));
        }
    }
    if (seen->full()) return FRUGAL_ERR_UNSUPPORTED;
  }
  return FRUGAL_OK;
}

// The keys of entries from .. to - 1.
template <class Look>
Status FolderChecker::each_entry(ParameterFile& file, uint64_t from, uint64_t to, Look look) {
  constexpr uint64_t kEntries = ColumnBlock::kEntries, kBlocks = kCheckedBytes / kFileBlock;
  const uint64_t first = from / kEntries, end = (to + kEntries - 1) / kEntries;
  Status result = FRUGAL_OK;
  ahead_.each((end - first + kBlocks - 1) / kBlocks,
              [&](uint64_t i, char* at) {
                const uint64_t b = first + i * kBlocks;
                return file.column_request(static_cast<uint32_t>(b),
                                           static_cast<uint32_t>(std::min(kBlocks, end - b)),
                                           reinterpret_cast<ColumnBlock*>(at));
              },
              [&](uint64_t i, const char* at, Status status) {
                if (result != FRUGAL_OK) return;
                const auto* blocks = reinterpret_cast<const ColumnBlock*>(at);
                result = status;
                const uint64_t b = first + i * kBlocks;
                for (uint64_t k = 0; result == FRUGAL_OK && k < std::min(kBlocks, end - b); ++k) {
                  result = file.verify_block(static_cast<uint32_t>(b + k), blocks[k]);
                  const uint64_t entry = (b + k) * kEntries;
                  const uint64_t begin = std::max(from, entry),
                                 stop = std::min(to, entry + kEntries);
                  for (uint64_t e = begin; result == FRUGAL_OK && e < stop; ++e)
                    look(blocks[k].entries[e - entry].key);
                }
              });
  return result;
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
    ahead_.each((b.bytes + kCheckedBytes - 1) / kCheckedBytes,
                [&](uint64_t i, char* to) {
                  const uint64_t at = i * kCheckedBytes;
                  return IoRequest{IoRequest::Kind::kRead, &file, b.at + at, to,
                                   std::min<uint64_t>(kCheckedBytes, b.bytes - at)};
                },
                [&](uint64_t i, const char* at, Status read) {
                  const uint64_t from = i * kCheckedBytes;
                  if (read == FRUGAL_OK) {
                    sum.add(at, std::min<uint64_t>(kCheckedBytes, b.bytes - from));
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
    switch (parse_name(name.c_str(), &n)) {
      case FileKind::kManifest:
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

}  // namespace

String quoted(const String& name) {
  String line = "\"";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') line += '\\';
    if (byte < 0x20 || byte == 0x7f)
      line += text("\\x%02x", byte);
    else
      line += c;
  }
  return line + "\"";
}

String FolderFinding::line() const {
  String line = kind == Found::kFault ? "fault" : kind == Found::kUnread ? "unread" : "note";
  line += " file=";
  line += quoted(file).substr(1, quoted(file).size() - 2);
  if (offset) line += text(" offset=%" PRIu64, *offset);
  if (table) line += text(" table=%" PRIu64, *table) + " name=" + quoted(table_name);
  if (key) line += text(" key=%" PRIu64, *key);
  return line + ": " + quoted(what).substr(1, quoted(what).size() - 2);
}

Status check_folder(const char* path, FolderRead read, FolderReport* report, FolderCounts* counts,
                    size_t key_bytes) try {
  FRUGAL_ASSERT(key_bytes >= 512);
  *counts = {};
  if (!checksums_are_built())
    return fail(FRUGAL_ERR_UNSUPPORTED, "this build has no xxHash: no checkpoints");
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
