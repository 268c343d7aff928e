// Which checkpoints a folder has, and which files they need: removes what is needed no more.
#pragma once
#include "format/manifest.h"

namespace frugal {

// The error of a call that needs a folder, where none is open.
Status no_folder();

// All functions may be called by any thread, if not stated otherwise.
class KeptCheckpoints {
 public:
  // The first numbers that the folder has not had.
  struct Next {
    uint64_t sequence = 1, file = 1, table = 1;
  };
  // Reads all manifests of the folder. Removes what a writer has left that is no checkpoint, and
  // checkpoints beyond `keep`. No checkpoint is being written.
  Status open(std::shared_ptr<Folder> folder, uint32_t keep, Next* next);
  void close();

  // --- By the thread that writes checkpoints
  // Takes all memory that add() needs.
  Status expect(const Manifest& m);
  // The expected checkpoint is on disk. Removes files that are needed no more.
  void add() noexcept;
  // It has failed.
  void drop() noexcept;
  // The engine's tables are those of this checkpoint, so its files are needed as long as the engine
  // has no newer one.
  Status based_on(const Manifest& m);

  // NOT_FOUND, or BUSY if it is being written, or a reader has it open.
  Status remove(uint64_t sequence);

 private:
  struct Kept {
    String name;
    Vector<uint64_t> files;  // ascending
    bool has_blobs = false;
  };
  static Kept kept_of(const Manifest& m);
  bool needed(uint64_t file) const REQUIRES(mu_);
  void remove_old() REQUIRES(mu_);

  Mutex mu_;
  bool all_read_ GUARDED_BY(mu_) = false;  // open() has seen all manifests: files may be removed
  std::shared_ptr<Folder> folder_ GUARDED_BY(mu_);
  uint32_t keep_ GUARDED_BY(mu_) = 1;
  Map<uint64_t, Kept> kept_ GUARDED_BY(mu_);
  Map<uint64_t, Kept> expected_ GUARDED_BY(mu_);  // the one that is being written
  Vector<uint64_t> used_ GUARDED_BY(mu_);  // files of the engine's last checkpoint, ascending
  // Manifests that cannot be read. While there is one, no file is removed that it may need.
  Vector<uint64_t> unknown_ GUARDED_BY(mu_);
};

}  // namespace frugal
