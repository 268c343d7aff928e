// frugal-fsck FOLDER: reads all checkpoints of a folder, and names each fault
// (docs/checkpoints.md, "Checking a folder").
//
// It writes nothing and takes no lock of the folder, so the folder's writer goes on meanwhile.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>

#include "format/folder_check.h"

namespace {

using frugal::FolderCounts;
using frugal::FolderFinding;
using frugal::FolderRead;
using frugal::Manifest;
using frugal::ManifestFile;
using frugal::ManifestTable;

constexpr int kSound = 0, kFaults = 1, kUnknown = 2;

void usage(FILE* to) {
  std::fputs(
      "usage: frugal-fsck [--list] FOLDER\n"
      "Reads all checkpoints of the folder, and prints a line for each fault.\n"
      "  --list   prints checkpoints, tables and files, and reads no rows\n"
      "Nothing is written, and an engine may write the folder meanwhile.\n"
      "The exit status is 0 if the folder is sound, 1 if there are faults, and 2 if something\n"
      "cannot be read.\n",
      to);
}

const char* optimizer_name(int32_t kind) {
  switch (kind) {
    case FRUGAL_SGD:
      return "sgd";
    case FRUGAL_MOMENTUM:
      return "momentum";
    case FRUGAL_ADAGRAD:
      return "adagrad";
    case FRUGAL_ROWWISE_ADAGRAD:
      return "rowwise_adagrad";
    case FRUGAL_ADAM:
      return "adam";
    case FRUGAL_RMSPROP:
      return "rmsprop";
    case FRUGAL_FTRL:
      return "ftrl";
    default:
      return "unknown";
  }
}

// Bytes of the records and their entries: of those that count in the checkpoint, and of the others.
struct Bytes {
  uint64_t length = 0, live = 0, stale = 0;
  void add(const ManifestTable& t, const ManifestFile& f) {
    const uint64_t each = t.format.record_bytes() + sizeof(frugal::ColumnEntry);
    length += f.info.length;
    live += f.live * each;
    stale += (f.info.entries - f.live) * sizeof(frugal::ColumnEntry) +
             (f.info.records - f.live) * t.format.record_bytes();
  }
  void print() const {
    std::printf(" bytes=%" PRIu64 " live_bytes=%" PRIu64 " stale_bytes=%" PRIu64 "\n", length, live,
                stale);
  }
};

class Lines : public frugal::FolderReport {
 public:
  explicit Lines(bool list) : list_(list) {}
  void found(const FolderFinding& finding) override { std::printf("%s\n", finding.line().c_str()); }
  void checkpoint(const Manifest& m) override {
    if (!list_) return;
    Bytes all;
    size_t files = 0;
    for (const ManifestTable& t : m.tables)
      for (const ManifestFile& f : t.files) {
        all.add(t, f);
        ++files;
      }
    std::printf("checkpoint=%" PRIu64 " name=%s step=", m.sequence, frugal::quoted(m.name).c_str());
    if (m.step == frugal::kNoStepYet)
      std::printf("none");
    else
      std::printf("%" PRIu64, m.step);
    std::printf(" created=%s world_size=%u tables=%zu files=%zu blobs=%zu blob_bytes=%" PRIu64,
                time_of(m.created).c_str(), m.world_size, m.tables.size(), files, m.blobs.size(),
                m.blob_bytes);
    all.print();
    for (const ManifestTable& t : m.tables) table(m, t);
  }

 private:
  static frugal::String time_of(uint64_t seconds) {
    const auto at = static_cast<time_t>(seconds);
    struct tm parts {};
    char text[40];
    if (seconds <= uint64_t{1} << 40 && gmtime_r(&at, &parts) &&
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts))
      return text;
    return frugal::text("%" PRIu64, seconds);
  }

  void table(const Manifest& m, const ManifestTable& t) {
    Bytes all;
    for (const ManifestFile& f : t.files) all.add(t, f);
    std::printf("table=%" PRIu64 " checkpoint=%" PRIu64 " name=%s kind=%s rows=%" PRIu64
                " dim=%u optimizer=%s live_rows=%" PRIu64 " files=%zu",
                t.number, m.sequence, frugal::quoted(t.name).c_str(),
                t.config.key_space == FRUGAL_DENSE ? "dense" : "hashed", t.config.rows,
                t.config.dim, optimizer_name(t.optimizer.kind), t.live_rows, t.files.size());
    all.print();
    for (const ManifestFile& f : t.files) {
      Bytes one;
      one.add(t, f);
      std::printf("file=%s checkpoint=%" PRIu64 " table=%" PRIu64 " of_checkpoint=%" PRIu64
                  " records=%" PRIu64 " deletions=%" PRIu64 " live=%" PRIu64,
                  frugal::rows_name(f.info.number).c_str(), m.sequence, t.number, f.info.sequence,
                  f.info.records, f.info.entries - f.info.records, f.live);
      one.print();
    }
  }
  const bool list_;
};

int check(const char* path, bool list) {
  Lines lines(list);
  FolderCounts counts;
  frugal::begin_call();
  frugal::Status status;
  try {
    status = frugal::check_folder(path, list ? FolderRead::kManifests : FolderRead::kAll, &lines,
                                  &counts);
  } catch (const std::exception&) {
    status = frugal::fail(FRUGAL_ERR_OUT_OF_MEMORY, "there is no memory to check the folder");
  }
  if (frugal::end_call(status) != FRUGAL_OK) {
    frugal_error error;
    frugal::last_error(&error);
    std::fflush(stdout);
    std::fprintf(stderr, "frugal-fsck: %s (%s)\n", error.message, frugal_status_name(status));
    return counts.faults ? kFaults : kUnknown;
  }
  const bool sound = counts.faults == 0 && counts.unread == 0;
  std::printf("%s: checkpoints=%" PRIu64 " files=%" PRIu64 " records=%" PRIu64 " bytes=%" PRIu64
              " faults=%" PRIu64 " unread=%" PRIu64 " notes=%" PRIu64 "\n",
              !sound ? counts.faults ? "damaged" : "unknown"
              : list ? "listed"
                     : "sound",
              counts.checkpoints, counts.files, counts.records, counts.bytes, counts.faults,
              counts.unread, counts.notes);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    std::fputs("frugal-fsck: the standard output cannot be written\n", stderr);
    return kUnknown;
  }
  return sound ? kSound : counts.faults ? kFaults : kUnknown;
}

}  // namespace

int main(int argc, char** argv) {
  bool list = false;
  const char* path = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--help") || !std::strcmp(argv[i], "-h")) {
      usage(stdout);
      return kSound;
    }
    if (!std::strcmp(argv[i], "--list") && !list) {
      list = true;
    } else if (*argv[i] != '-' && !path) {
      path = argv[i];
    } else {
      usage(stderr);
      return kUnknown;
    }
  }
  if (!path || !*path) {
    usage(stderr);
    return kUnknown;
  }
  return check(path, list);
}
