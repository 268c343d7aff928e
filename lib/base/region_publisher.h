// Publishes memory to other processes, which read it.
//
// The unit is a region: shared memory with a descriptor to map it by. Each byte of a region has a
// shared address, and no other region ever has the same one. A reader may not know yet that a
// region came or went. Then it finds a shared address in no region, but never in wrong memory. Each
// reader has a socket of its own. It receives a region there before any process can know a shared
// address in it, and a message when the region is gone (process/regions.h). Thread-safe.
#pragma once
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

// A message on such a socket.
struct RegionNews {
  uint64_t shm_address, bytes;
  uint64_t there;  // 1: the region has come, and its descriptor with it; 0: the region is gone
};

constexpr uint64_t kNoShmAddress = UINT64_MAX;

class RegionPublisher {
 public:
  // A new reader receives all regions at once: so many, and segments, fit into its socket.
  static constexpr size_t kMostRegions = 128;
  RegionPublisher() = default;
  ~RegionPublisher();
  RegionPublisher(const RegionPublisher&) = delete;
  // Publishes a region, as this process has it mapped. All readers have been sent it on return. Its
  // descriptor stays the caller's, and is open until go(). With `can_do_without`, and kMostRegions
  // regions, nothing is published: the result is kNoShmAddress.
  Status come(const Mapping& memory, uint64_t* shm_address, bool can_do_without = false);
  void go(uint64_t shm_address) noexcept;
  // kNoShmAddress: it is in no region.
  uint64_t shm_address_of(const void* p) const;
  // Adds a reader, at the other end of the socket. It receives all present regions, and news from
  // now on. If it leaves too many messages unread, its connection is shut down and it receives
  // nothing more. So it cannot take memory that it does not know for memory that it knows. Both
  // descriptors (ForkedDescriptors) are the publisher's on success; a connection of -1 is none.
  Status add(int socket, int connection, uint64_t* id);
  void forget(uint64_t id) noexcept;

 private:
  struct Region {
    uint64_t shm_address;
    Mapping memory;
  };
  struct Reader {
    uint64_t id;
    int socket, connection;
    void close() const noexcept;
  };
  bool tell(const RegionNews& news, int fd) noexcept REQUIRES(mu_);
  void unlist(uint64_t shm_address) noexcept REQUIRES(mu_);

  mutable Mutex mu_;
  Vector<Region> regions_ GUARDED_BY(mu_);
  Vector<Reader> readers_ GUARDED_BY(mu_);
  uint64_t next_ GUARDED_BY(mu_) = 0;  // shared address of the next region
  uint64_t readers_so_far_ GUARDED_BY(mu_) = 0;
};

}  // namespace frugal
