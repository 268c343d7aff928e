// The manifest of a checkpoint: everything that the checkpoint consists of (docs/format.md,
// "Manifest").
//
// A checkpoint exists when its manifest has its final name. write_manifest() gives it that name,
// after all other files of the checkpoint are synced.
//
// A build without Cap'n Proto returns UNSUPPORTED from each function of this file that has a
// status.
#pragma once
#include <cstddef>

#include "files/file.h"
#include "format/names.h"
#include "format/parameter_file.h"

namespace frugal {

constexpr uint64_t kNoStepYet = FRUGAL_NO_STEP;
// Numbers of tables, files and checkpoints are below this, so one more is always a number.
constexpr uint64_t kNumbersEnd = uint64_t{1} << 62;
constexpr size_t kMostFiles = size_t{1} << 20;  // parameter files of a table
constexpr size_t kMostLaterOptimizers = 4096;   // of a table
constexpr size_t kMostCheckpointName = 255;     // bytes

// A parameter file of a table.
struct ManifestFile {
  ParameterFileInfo info;
  uint64_t live = 0;  // records that count in this checkpoint
};

// A change of hyper-parameters for a step after the next one.
struct LaterOptimizer {
  uint64_t first_step = 0;
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
};

struct ManifestTable {
  uint64_t number = 0;  // no other table of the folder ever has it
  String name;
  // As the table was created; its `name` is null. A program that creates the table again must give
  // the same.
  frugal_table_config config = FRUGAL_TABLE_CONFIG_INIT;
  // From the step on that follows the snapshot step. All are of one kind.
  frugal_optimizer optimizer = FRUGAL_OPTIMIZER_INIT;
  Vector<LaterOptimizer> later;  // ascending
  bool has_state = false;        // some row has state that is not a new row's: the kind is fixed
  RowFormat format{};            // of all of its files
  uint64_t live_rows = 0;        // rows that have a record; no more than the files have records
  Vector<ManifestFile> files;    // by number
};

// What a rank has added.
struct ManifestBlob {
  uint32_t rank = 0;
  uint64_t at = 0;  // its place in the blob file
  uint64_t bytes = 0;
  uint64_t checksum = 0;  // of the bytes, with blob_seed()
};
inline uint64_t blob_seed(uint64_t sequence, uint32_t rank) {
  return ChecksumSeeds(ChecksumKind::kBlob, 0, sequence).at(rank);
}

struct Manifest {
  uint64_t sequence = 0;  // from 1
  uint64_t step = kNoStepYet;
  uint64_t seed = 0;
  uint32_t world_size = 1;
  String name;              // the caller's, or empty: no slash, at most kMostCheckpointName bytes
  uint64_t created = 0;     // seconds since 1970, for people
  uint64_t next_table = 0;  // numbers that the folder has not had
  uint64_t next_file = 0;
  Vector<ManifestTable> tables;  // by number
  uint64_t blob_bytes = 0;       // the length of the blob file; 0: there is none
  Vector<ManifestBlob> blobs;    // by rank; a rank that has added nothing has none
};

// Writes and syncs the manifest, syncs the folder, gives the manifest its final name, and syncs the
// folder again. The files that it lists are synced before. After a failure the checkpoint does not
// exist, unless the last sync failed: then it is whole, and may be gone after a power cut. The
// unfinished file is removed, unless a sync failed: then the folder is written no more.
// INVALID_ARGUMENT: a reader would refuse the manifest; the message says why.
Status write_manifest(Folder& folder, const Manifest& manifest);

// Reads a manifest, and keeps it from being deleted until `keep` is closed. `*out` is written on
// success only.
//
// NOT_FOUND: there is none. BUSY: it is being deleted. DAMAGED: any value that no writer writes.
// TOO_NEW: a later version. UNSUPPORTED: a machine of the other byte order has written it.
Status read_manifest(const Folder& folder, uint64_t sequence, Manifest* out, File* keep);

// The sequence numbers of all manifests, ascending. Nothing is opened.
Status list_manifests(const Folder& folder, Vector<uint64_t>* sequences);

// `*in_use`: a reader has the checkpoint open, which stays. After OK and not `*in_use` the manifest
// is gone, and the disk knows it. NOT_FOUND: there is none.
// `newest`: no other manifest of the folder is newer, so this one gets its deleted_name().
Status delete_manifest(Folder& folder, uint64_t sequence, bool* in_use, bool newest = false);
// Reads a manifest that has its deleted_name().
Status read_deleted(const Folder& folder, uint64_t sequence, Manifest* out);

// What no manifest may say, or an empty text.
String manifest_fault(const Manifest& manifest);

// --- The bytes -----------------------------------------------------------------------------------

// What a file begins with. Every version has this envelope; the rest of the file may differ.
struct ManifestEnvelope {
  char magic[8];           // kManifestMagic
  uint32_t byte_order;     // kByteOrderMark, as the writer's machine stores it
  uint32_t version;        // kManifestVersion
  uint64_t features;       // a reader that does not know one of these bits refuses the file
  uint64_t sequence;       // of the checkpoint
  uint64_t message_bytes;  // the rest of the file
  uint64_t message_sum;    // checksum(message, message_bytes, sequence)
  uint64_t reserved;       // 0
  uint64_t envelope_sum;   // checksum(this, 56, 0)
};
static_assert(sizeof(ManifestEnvelope) == 64);
static_assert(offsetof(ManifestEnvelope, magic) == 0);
static_assert(offsetof(ManifestEnvelope, byte_order) == 8);
static_assert(offsetof(ManifestEnvelope, version) == 12);
static_assert(offsetof(ManifestEnvelope, features) == 16);
static_assert(offsetof(ManifestEnvelope, sequence) == 24);
static_assert(offsetof(ManifestEnvelope, message_bytes) == 32);
static_assert(offsetof(ManifestEnvelope, message_sum) == 40);
static_assert(offsetof(ManifestEnvelope, reserved) == 48);
static_assert(offsetof(ManifestEnvelope, envelope_sum) == 56);

constexpr char kManifestMagic[8] = {'F', 'R', 'U', 'G', 'A', 'L', 'C', 'P'};
constexpr uint32_t kManifestVersion = 1;
constexpr uint64_t kManifestFeatures = 0;  // that this library knows
// A reader holds all of a message in memory, and what it decodes to. 64 MiB are 1.1 million
// parameter files, which have up to 10^12 records.
constexpr uint64_t kMostMessageBytes = uint64_t{64} << 20;

// The bytes of the file, unchecked but for their number. The same manifest gives the same bytes.
Status encode_manifest(const Manifest& manifest, Vector<uint64_t>* words);
// Checks and decodes all bytes of a file; the memory has whole words. `where` names it in messages.
Status decode_manifest(const char* where, uint64_t sequence, const uint64_t* words, size_t bytes,
                       Manifest* out);

}  // namespace frugal
