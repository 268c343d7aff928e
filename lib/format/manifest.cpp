#include "format/manifest.h"

#include <capnp/message.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/config_fields.h"
#include "base/this_thread.h"
#include "manifest.capnp.h"

namespace frugal {
namespace {

// The fields of other structs, as C and as Cap'n Proto call them.
// clang-format off
#define MANIFEST_FORMAT(X)                                                                         \
  X(state_columns, StateColumns) X(value_bytes, ValueBytes) X(state_column_bytes, StateColumnBytes)
#define MANIFEST_FILE(X)                                                                           \
  X(number, Number) X(sequence, Sequence) X(records, Records) X(entries, Entries)                  \
  X(length, Length) X(checksum, Checksum)
#define MANIFEST_BLOB(X) X(rank, Rank) X(at, At) X(bytes, Bytes) X(checksum, Checksum)
#define MANIFEST_ITSELF(X)                                                                         \
  X(step, Step) X(seed, Seed) X(world_size, WorldSize) X(created, Created)                         \
  X(next_table, NextTable) X(next_file, NextFile) X(blob_bytes, BlobBytes)
// clang-format on

// A new field must be added above, to manifest.capnp, and to manifest_check.cpp.
static_assert(sizeof(ParameterFileInfo) == 7 * 8 && sizeof(RowFormat) == 6 * 4);

#define MANIFEST_PUT(field, Field) to.set##Field(from.field);
#define MANIFEST_TAKE(field, Field) to->field = from.get##Field();

constexpr size_t kEnvelopeWords = sizeof(ManifestEnvelope) / sizeof(uint64_t);
static_assert(sizeof(capnp::word) == sizeof(uint64_t));

uint64_t sum_of(const ManifestEnvelope& e) {
  return checksum(&e, offsetof(ManifestEnvelope, envelope_sum), 0);
}

// --- Encoding ------------------------------------------------------------------------------------

uint64_t words_of(const String& s) { return s.empty() ? 0 : s.size() / sizeof(uint64_t) + 1; }

template <class Element>
uint64_t words_of_list(size_t n) {
  return n ? 1 + n * capnp::sizeInWords<Element>() : 0;
}

uint64_t words_of(const ManifestTable& t) {
  constexpr uint64_t kOptimizer = capnp::sizeInWords<disk::Optimizer>();
  return words_of(t.name) + (2 + t.later.size()) * kOptimizer +
         words_of_list<disk::Later>(t.later.size()) + words_of_list<disk::File>(t.files.size());
}

// Of the message's one segment. It is exactly that long, so encoding takes no memory.
uint64_t words_of(const Manifest& m) {
  uint64_t words = 1 + capnp::sizeInWords<disk::Manifest>() + words_of(m.name) +
                   words_of_list<disk::Table>(m.tables.size()) +
                   words_of_list<disk::Blob>(m.blobs.size());
  for (const ManifestTable& t : m.tables) words += words_of(t);
  return words;
}

void put_optimizer(const frugal_optimizer& from,
                   disk::Optimizer::Builder to){FRUGAL_OPTIMIZER_FIELDS(MANIFEST_PUT)}

capnp::Text::Reader text_of(const String& s) {
  return {s.c_str(), s.size()};
}

void put_config(const frugal_table_config& from, disk::Table::Builder to) {
  FRUGAL_TABLE_CONFIG_FIELDS(MANIFEST_PUT)
  put_optimizer(from.optimizer, to.initCreated());
}

void put_format(const RowFormat& from, disk::Table::Builder to) {
  to.setElement(static_cast<uint32_t>(from.element));
  MANIFEST_FORMAT(MANIFEST_PUT)
}

void put_file(const ManifestFile& file, disk::File::Builder to) {
  const ParameterFileInfo& from = file.info;
  MANIFEST_FILE(MANIFEST_PUT)
  to.setLive(file.live);
}

void put_blob(const ManifestBlob& from, disk::Blob::Builder to) { MANIFEST_BLOB(MANIFEST_PUT) }

// A list that is empty is left out.
void put_table(const ManifestTable& from, disk::Table::Builder to) {
  to.setNumber(from.number);
  if (!from.name.empty()) to.setName(text_of(from.name));
  put_config(from.config, to);
  put_optimizer(from.optimizer, to.initOptimizer());
  if (const auto n = static_cast<unsigned>(from.later.size())) {
    auto later = to.initLater(n);
    for (unsigned i = 0; i < n; ++i) {
      later[i].setFirstStep(from.later[i].first_step);
      put_optimizer(from.later[i].optimizer, later[i].initOptimizer());
    }
  }
  to.setHasState(from.has_state);
  put_format(from.format, to);
  to.setLiveRows(from.live_rows);
  if (const auto n = static_cast<unsigned>(from.files.size())) {
    auto files = to.initFiles(n);
    for (unsigned i = 0; i < n; ++i) put_file(from.files[i], files[i]);
  }
}

void put_manifest(const Manifest& from, disk::Manifest::Builder to) {
  MANIFEST_ITSELF(MANIFEST_PUT)
  if (!from.name.empty()) to.setName(text_of(from.name));
  if (const auto n = static_cast<unsigned>(from.tables.size())) {
    auto tables = to.initTables(n);
    for (unsigned i = 0; i < n; ++i) put_table(from.tables[i], tables[i]);
  }
  if (const auto n = static_cast<unsigned>(from.blobs.size())) {
    auto blobs = to.initBlobs(n);
    for (unsigned i = 0; i < n; ++i) put_blob(from.blobs[i], blobs[i]);
  }
}

// --- Decoding ------------------------------------------------------------------------------------

// `at`: the offset of the byte that is wrong.
[[gnu::format(printf, 3, 4)]] Status damaged_manifest(const char* where, uint64_t at,
                                                      const char* format, ...) {
  char what[300];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return fail_at(
      fail(FRUGAL_ERR_DAMAGED, "%.150s is damaged: %s; restore another checkpoint", where, what),
      at);
}

unsigned long long printed(uint64_t n) { return n; }

// Each is read once. libkj counts what is read, and the whole message may be read once. So a list
// that several pointers name does not make much of little.
class ManifestDecoder {
 public:
  explicit ManifestDecoder(uint64_t words) : left_(words) {}

  // False: some list would take more memory than the message's length covers.
  bool take(disk::Manifest::Reader from, Manifest* to) {
    MANIFEST_ITSELF(MANIFEST_TAKE)
    take_text(from.getName(), &to->name);
    return take_list<disk::Table>(from.getTables(), &to->tables) &&
           take_list<disk::Blob>(from.getBlobs(), &to->blobs);
  }

 private:
  static void take_text(capnp::Text::Reader from, String* to) {
    to->assign(from.begin(), from.size());
  }

  // Elements of a list may be smaller than the schema's, as small as nothing.
  template <class Element, class List, class To>
  bool take_list(List from, Vector<To>* to) {
    const uint64_t words = uint64_t{from.size()} * capnp::sizeInWords<Element>();
    if (words > left_) return false;
    left_ -= words;
    to->resize(from.size());
    for (unsigned i = 0; i < from.size(); ++i)
      if (!take_one(from[i], &(*to)[i])) return false;
    return true;
  }

  static void take_optimizer(disk::Optimizer::Reader from, frugal_optimizer* to) {
    FRUGAL_OPTIMIZER_FIELDS(MANIFEST_TAKE)
  }

  static void take_config(disk::Table::Reader from, frugal_table_config* to) {
    FRUGAL_TABLE_CONFIG_FIELDS(MANIFEST_TAKE)
    take_optimizer(from.getCreated(), &to->optimizer);
  }

  static void take_format(disk::Table::Reader from, RowFormat* to) {
    to->element = static_cast<ElementType>(from.getElement());
    MANIFEST_FORMAT(MANIFEST_TAKE)
  }

  bool take_one(disk::Table::Reader from, ManifestTable* to) {
    to->number = from.getNumber();
    take_text(from.getName(), &to->name);
    take_config(from, &to->config);
    take_optimizer(from.getOptimizer(), &to->optimizer);
    to->has_state = from.getHasState();
    take_format(from, &to->format);
    to->format.dim = to->config.dim;
    to->format.optimizer = to->optimizer.kind;
    to->live_rows = from.getLiveRows();
    if (!take_list<disk::Later>(from.getLater(), &to->later) ||
        !take_list<disk::File>(from.getFiles(), &to->files))
      return false;
    for (ManifestFile& f : to->files) f.info.table = to->number;
    return true;
  }

  bool take_one(disk::Later::Reader from, LaterOptimizer* to) {
    to->first_step = from.getFirstStep();
    take_optimizer(from.getOptimizer(), &to->optimizer);
    return true;
  }

  bool take_one(disk::File::Reader from, ManifestFile* file) {
    ParameterFileInfo* to = &file->info;
    MANIFEST_FILE(MANIFEST_TAKE)
    file->live = from.getLive();
    return true;
  }

  bool take_one(disk::Blob::Reader from, ManifestBlob* to) {
    MANIFEST_BLOB(MANIFEST_TAKE)
    return true;
  }

  uint64_t left_;  // words of the message that no list has claimed
};

// Only the system's malloc can fail here: GCOVR_EXCL_START
bool manifest_may_throw() noexcept {
  try {
    (void)kj::getExceptionCallback();  // the first one of a thread takes memory
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}
// GCOVR_EXCL_STOP

// `file_bytes`: the length of the whole file, which nothing that is allocated later exceeds.
Status check_envelope(const char* where, uint64_t sequence, uint64_t file_bytes,
                      const ManifestEnvelope& e) {
  if (std::memcmp(e.magic, kManifestMagic, sizeof e.magic) != 0)
    return damaged_manifest(where, 0, "it does not begin as a manifest does");
  if (e.byte_order == __builtin_bswap32(kByteOrderMark))
    return fail_at(
        fail(FRUGAL_ERR_UNSUPPORTED,
             "%.150s was written by a machine of the other byte order: read it on such a one",
             where),
        offsetof(ManifestEnvelope, byte_order));
  if (sum_of(e) != e.envelope_sum)
    return damaged_manifest(where, 0, "the checksum of its first 64 bytes is wrong");
  if (e.byte_order != kByteOrderMark)
    return damaged_manifest(where, offsetof(ManifestEnvelope, byte_order),
                            "its byte order is 0x%08x", e.byte_order);
  if (e.version > kManifestVersion || (e.features & ~kManifestFeatures))
    return fail_at(
        fail(FRUGAL_ERR_TOO_NEW,
             "%.150s has version %u and features 0x%llx, and this library (%s) knows version %u "
             "and features 0x%llx: use a later one",
             where, e.version, printed(e.features), frugal_version(), kManifestVersion,
             printed(kManifestFeatures)),
        offsetof(ManifestEnvelope, version));
  if (e.version == 0 || e.reserved != 0)
    return damaged_manifest(where, offsetof(ManifestEnvelope, version),
                            "no library writes version %u with %llu at byte 48", e.version,
                            printed(e.reserved));
  if (e.sequence != sequence)
    return damaged_manifest(where, offsetof(ManifestEnvelope, sequence),
                            "it is the manifest of checkpoint %llu", printed(e.sequence));
  if (e.message_bytes > kMostMessageBytes || e.message_bytes % sizeof(capnp::word) != 0 ||
      e.message_bytes < 2 * sizeof(capnp::word))
    return damaged_manifest(where, offsetof(ManifestEnvelope, message_bytes),
                            "its message has %llu bytes", printed(e.message_bytes));
  if (e.message_bytes != file_bytes - sizeof e)
    return damaged_manifest(where, std::min(file_bytes, e.message_bytes + sizeof e),
                            "it has %llu bytes, and its message %llu after the first 64",
                            printed(file_bytes), printed(e.message_bytes));
  return FRUGAL_OK;
}

Status decode_message(const char* where, const ManifestEnvelope& e, const uint64_t* message,
                      Manifest* out) {
  if (checksum(message, e.message_bytes, e.sequence) != e.message_sum)
    return damaged_manifest(where, sizeof e,
                            "the checksum of its message, from byte 64 on, is wrong");
  // The head of a message: segments less one, and the first one's words.
  const uint64_t words = e.message_bytes / sizeof(capnp::word) - 1;
  uint32_t head[2];
  std::memcpy(head, message, sizeof head);
  if (head[0] != 0 || head[1] != words)
    return damaged_manifest(where, sizeof e,
                            "its message has %u more segments, and %u words in the first", head[0],
                            head[1]);
  // The same: GCOVR_EXCL_START
  if (!touch_thread_locals(manifest_may_throw))
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "%s", no_thread());
  // GCOVR_EXCL_STOP
  Manifest made;
  made.sequence = e.sequence;
  try {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = words + 8;  // it counts the root more than once
    options.nestingLimit = 8;
    const kj::ArrayPtr<const capnp::word> segment(reinterpret_cast<const capnp::word*>(message + 1),
                                                  words);
    capnp::SegmentArrayMessageReader reader(kj::arrayPtr(&segment, 1), options);
    if (!ManifestDecoder(words).take(reader.getRoot<disk::Manifest>(), &made))
      return damaged_manifest(where, sizeof(ManifestEnvelope),
                              "a list of its message is longer than the message");
  } catch (const kj::Exception& e) {
    return damaged_manifest(where, sizeof(ManifestEnvelope),
                            "its message cannot be decoded: %.200s", e.getDescription().cStr());
  }
  if (const String fault = manifest_fault(made); !fault.empty())
    return damaged_manifest(where, sizeof e, "%s", fault.c_str());
  *out = std::move(made);
  return FRUGAL_OK;
}

String full_name(const Folder& folder, const String& name) {
  return text("'%.300s/%.100s'", folder.path(), name.c_str());
}

}  // namespace

Status encode_manifest(const Manifest& manifest, Vector<uint64_t>* words) {
  const uint64_t segment = words_of(manifest);
  const uint64_t bytes = (1 + segment) * sizeof(capnp::word);
  if (bytes > kMostMessageBytes)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "the manifest of checkpoint %llu would have %llu bytes, and may have %llu: it has "
                "too many parameter files, tables or changes of optimizers",
                printed(manifest.sequence), printed(bytes), printed(kMostMessageBytes));
  words->assign(kEnvelopeWords + 1 + segment, 0);
  uint64_t* const message = words->data() + kEnvelopeWords;
  const uint32_t head[] = {0, static_cast<uint32_t>(segment)};
  std::memcpy(message, head, sizeof head);
  {
    capnp::FlatMessageBuilder builder(
        kj::arrayPtr(reinterpret_cast<capnp::word*>(message + 1), segment));
    put_manifest(manifest, builder.initRoot<disk::Manifest>());
    FRUGAL_ASSERT(builder.getSegmentsForOutput()[0].size() == segment);
  }
  ManifestEnvelope e{};
  std::memcpy(e.magic, kManifestMagic, sizeof e.magic);
  e.byte_order = kByteOrderMark;
  e.version = kManifestVersion;
  e.sequence = manifest.sequence;
  e.message_bytes = bytes;
  e.message_sum = checksum(message, bytes, e.sequence);
  e.envelope_sum = sum_of(e);
  std::memcpy(words->data(), &e, sizeof e);
  return FRUGAL_OK;
}

Status decode_manifest(const char* where, uint64_t sequence, const uint64_t* words, size_t bytes,
                       Manifest* out) {
  ManifestEnvelope e;
  if (bytes < sizeof e)
    return damaged_manifest(where, bytes, "it has %zu bytes, and a manifest begins with 64", bytes);
  std::memcpy(&e, words, sizeof e);
  FRUGAL_TRY(check_envelope(where, sequence, bytes, e));
  return decode_message(where, e, words + kEnvelopeWords, out);
}

Status write_manifest(Folder& folder, const Manifest& manifest) {
  if (const String fault = manifest_fault(manifest); !fault.empty())
    return fail(FRUGAL_ERR_INVALID_ARGUMENT, "the manifest of checkpoint %llu: %s",
                printed(manifest.sequence), fault.c_str());
  Vector<uint64_t> words;
  FRUGAL_TRY(encode_manifest(manifest, &words));
  const String name = manifest_name(manifest.sequence), unfinished = new_name(name);
  // A writer that died may have left one.
  FRUGAL_TRY(folder.remove(unfinished.c_str()));
  struct Removed {
    Folder& folder;
    const char* name;  // null: nothing is to be removed
    ~Removed() {
      if (!name) return;
      const KeepError why;
      (void)folder.remove(name);
    }
  } removed{folder, unfinished.c_str()};
  {
    File file;
    FRUGAL_TRY(folder.create(unfinished.c_str(), false, &file));
    FRUGAL_TRY(file.write(0, words.data(), words.size() * sizeof(uint64_t)));
    FRUGAL_TRY(file.sync());
  }
  // Before the manifest has its name, those of the files that it lists are on disk.
  FRUGAL_TRY(folder.sync());
  FRUGAL_TRY(folder.rename(unfinished.c_str(), name.c_str()));
  removed.name = nullptr;
  return folder.sync();
}

namespace {

Status read_message(const File& file, const char* where, uint64_t sequence, Manifest* out) {
  uint64_t bytes;
  ManifestEnvelope e;
  FRUGAL_TRY(file.size(&bytes));
  if (bytes < sizeof e)
    return damaged_manifest(where, bytes, "it has %llu bytes, and a manifest begins with 64",
                            printed(bytes));
  FRUGAL_TRY(file.read(0, &e, sizeof e));
  FRUGAL_TRY(check_envelope(where, sequence, bytes, e));
  Vector<uint64_t> message(e.message_bytes / sizeof(uint64_t));
  FRUGAL_TRY(file.read(sizeof e, message.data(), e.message_bytes));
  return decode_message(where, e, message.data(), out);
}

}  // namespace

Status read_deleted(const Folder& folder, uint64_t sequence, Manifest* out) {
  const String name = deleted_name(sequence);
  File file;
  FRUGAL_TRY(folder.open_file(name.c_str(), false, &file));
  return read_message(file, full_name(folder, name).c_str(), sequence, out);
}

Status read_manifest(const Folder& folder, uint64_t sequence, Manifest* out, File* keep) {
  const String name = manifest_name(sequence), place = full_name(folder, name);
  const char* const where = place.c_str();
  File file;
  FRUGAL_TRY(folder.open_file(name.c_str(), false, &file));
  bool locked, named;
  FRUGAL_TRY(file.lock_shared(&locked));
  if (!locked)
    return fail(FRUGAL_ERR_BUSY, "%.300s is being deleted: choose another checkpoint", where);
  // It may have been deleted between the two calls.
  FRUGAL_TRY(file.has_name(&named));
  if (!named)
    return fail(FRUGAL_ERR_NOT_FOUND, "%.300s was deleted: choose another checkpoint", where);
  FRUGAL_TRY(read_message(file, where, sequence, out));
  *keep = std::move(file);
  return FRUGAL_OK;
}

Status list_manifests(const Folder& folder, Vector<uint64_t>* sequences) {
  Vector<String> names;
  FRUGAL_TRY(folder.list(&names));
  Vector<uint64_t> found;
  for (const String& name : names)
    if (uint64_t n; parse_name(name.c_str(), &n) == FileKind::kManifest) found.push_back(n);
  std::sort(found.begin(), found.end());
  *sequences = std::move(found);
  return FRUGAL_OK;
}

Status delete_manifest(Folder& folder, uint64_t sequence, bool* in_use, bool newest) {
  FRUGAL_TRY(folder.may_write());
  const String name = manifest_name(sequence);
  File file;
  FRUGAL_TRY(folder.open_file(name.c_str(), false, &file));
  bool alone;
  FRUGAL_TRY(file.lock_alone(&alone));
  *in_use = !alone;
  if (!alone) return FRUGAL_OK;
  // A reader that opened it before finds, once it has the lock, that the name is gone.
  bool renamed = false;
  if (newest) {
    const String deleted = deleted_name(sequence);
    Status status = folder.rename(name.c_str(), deleted.c_str());
    if (status == FRUGAL_ERR_EXISTS) {  // of a copy of the same checkpoint
      FRUGAL_TRY(folder.remove(deleted.c_str()));
      status = folder.rename(name.c_str(), deleted.c_str());
    }
    // A full disk may have no room for a name, but a file can go.
    if (status != FRUGAL_ERR_NO_SPACE) FRUGAL_TRY(status);
    renamed = status == FRUGAL_OK;
  }
  if (!renamed) FRUGAL_TRY(folder.remove(name.c_str()));
  return folder.sync();
}

#undef MANIFEST_FORMAT
#undef MANIFEST_FILE
#undef MANIFEST_BLOB
#undef MANIFEST_ITSELF
#undef MANIFEST_PUT
#undef MANIFEST_TAKE

}  // namespace frugal
