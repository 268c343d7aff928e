// Files of a folder, whole reads and writes at an offset, and what a failure of one means.
//
// A Folder is a directory whose files have plain names: no slash, and no link is followed. So no
// call reaches a file outside of it. One engine at a time writes a folder, and holds its lock;
// readers need none.
//
// After a failed sync the content of the disk is unknown: the system may have dropped the data and
// reported that once. So the folder is *poisoned*: each later write, sync, rename or removal
// through this Folder fails with the first failure's message. Reads go on.
//
// Thread-safe, but one File is opened and closed by one thread.
#pragma once
#include <atomic>
#include <memory>
#include <utility>

#include "base/file_calls.h"
#include "base/heap.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

class File;

class Folder : public HeapObject, public std::enable_shared_from_this<Folder> {
 public:
  enum class Use {
    kRead,    // no lock; nothing is written
    kWrite,   // BUSY if another Folder, of any process, writes it
    kCreate,  // the same; the last component of the path is created if it is missing
  };
  static Status open(const char* path, Use use, std::shared_ptr<Folder>* out);
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const char* path() const { return path_.c_str(); }
  // A new file to be written and read; EXISTS if the name is taken. `direct`: without the system's
  // cache, if the file system can do that.
  Status create(const char* name, bool direct, File* out);
  // To be read. NOT_FOUND: there is none, or it is no regular file.
  Status open_file(const char* name, bool direct, File* out) const;
  // Gives the file another name, which may not exist.
  Status rename(const char* from, const char* to);
  // Another name of the file in another folder of the same file system, which shares its bytes.
  // UNSUPPORTED: it is another file system, or one without links.
  Status link(const char* name, Folder& to) const;
  // OK if there is no such file.
  Status remove(const char* name);
  // The names are on disk. Poisons the folder on failure.
  Status sync();
  // The names of all regular files, in no order.
  Status list(Vector<String>* out) const;

  Status may_write() const;  // OK, or why the folder is written no more

 private:
  friend class File;
  Folder() = default;
  Status take_lock();
  Status open_with(const char* name, int flags, bool direct, const char* what, File* out) const;
  Status poison(int code, const char* name);
  Status refused(int code, const char* what, const char* name) const;
  String path_;
  int fd_ = -1, lock_fd_ = -1;
  std::atomic<bool> poisoned_{false};
  mutable Mutex mu_;
  String why_ GUARDED_BY(mu_);  // the first failure
};

class File {
 public:
  File() = default;
  ~File() { close(); }
  File(File&& other) noexcept { swap(other); }
  File& operator=(File&& other) noexcept {
    File moved(std::move(other));
    swap(moved);
    return *this;
  }

  // What addresses, offsets and lengths must be multiples of; 1 without O_DIRECT.
  uint32_t alignment() const { return alignment_; }
  const char* name() const { return name_.c_str(); }
  const std::shared_ptr<Folder>& folder() const { return folder_; }
  explicit operator bool() const { return fd_ >= 0; }

  Status size(uint64_t* out) const;
  // All `bytes` from offset `at`. IO if the file ends before.
  Status read(uint64_t at, void* to, size_t bytes) const;
  Status write(uint64_t at, const void* from, size_t bytes);
  // Makes room for that many bytes, where the file system can do that.
  Status allocate(uint64_t bytes);
  Status resize(uint64_t bytes);
  // The bytes are on disk. Poisons the folder on failure.
  Status sync();
  // Keeps others from a `lock_alone`; false: another File has it alone.
  Status lock_shared(bool* locked);
  // False: another File has a lock of it.
  Status lock_alone(bool* locked);
  // Whether the file has still this name.
  Status has_name(bool* has) const;
  void close() noexcept;

 private:
  friend class Folder;
  void swap(File& other) noexcept;
  Status failed(int code, const char* what, uint64_t at) const;
  Status lock(int operation, bool* locked);
  Status end_direct();
  std::shared_ptr<Folder> folder_;  // null without a file
  String name_;
  int fd_ = -1;
  uint32_t alignment_ = 1;
  bool locked_ = false;
};

}  // namespace frugal
