// The check of a folder (format/folder_check.h): what its parts share.
#pragma once
#include <optional>

#include "format/folder_check.h"
#include "format/read_ahead.h"
#include "format/seen_keys.h"

namespace frugal {

class FolderChecker : public HeapObject {
 public:
  FolderChecker(const Folder& folder, FolderRead read, FolderReport* report, FolderCounts* counts,
                size_t key_bytes)
      : folder_(folder), read_(read), report_(report), counts_(counts), seen_(key_bytes) {}
  Status run();

 private:
  struct Known {  // of a parameter file that some manifest lists
    ParameterFileInfo info;
    bool sound = false;  // its header and its column
  };
  // What is being checked.
  struct Of {
    const Manifest& m;
    const ManifestTable& t;
  };

  using Found = FolderFinding::Kind;

  FolderFinding finding(Found kind, const String& file, const ManifestTable* t = nullptr) const;
  void tell(FolderFinding f, std::optional<uint64_t> offset, String what);
  // The call of the library for the file has failed, and has left a message.
  Status failed(Status status, FolderFinding f);

  Status check_manifest(uint64_t sequence, bool names_only);
  Status check_file(const Of& of, const ManifestFile& f);
  bool as_listed(const Of& of, const ParameterFile& file, const ManifestFile& f);
  void check_entries(const Of& of, ParameterFile& file, bool* sound);
  void check_records(const Of& of, ParameterFile& file, uint32_t first, uint32_t count, char* at,
                     Status piece);
  void check_column(const Of& of, ParameterFile& file, uint32_t first, uint32_t count,
                    const char* at, Status piece, bool* sound);
  bool check_block(const Of& of, const ParameterFile& file, uint32_t index,
                   const ColumnBlock& block);
  void wrong_record(const Of& of, ParameterFile& file, uint64_t index, String what);
  Status check_live(const Of& of);
  Status count_live(const Of& of, SeenKeys* seen, Vector<uint64_t>* live);
  template <class Look>
  Status each_key(ParameterFile& file, uint64_t from, uint64_t to, Look look);
  Status check_blobs(const Manifest& m);
  Status check_names(const Vector<String>& before);

  const Folder& folder_;
  const FolderRead read_;
  FolderReport* const report_;
  FolderCounts* const counts_;
  ReadAhead ahead_;
  SeenKeys seen_;
  Blocks block_{kFileBlock};
  Map<uint64_t, Known> files_;
  Map<uint64_t, uint64_t> counted_;     // by table: the lists of files whose counts were compared
  Vector<uint64_t> manifests_, blobs_;  // sequence numbers, ascending
  bool all_read_ = true;                // all manifests
};

// "`what` is, and checkpoint n lists `wanted`".
String shown_bytes(const char* what, uint64_t is, uint64_t wanted, uint64_t sequence);

}  // namespace frugal
