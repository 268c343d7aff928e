// Memory that other processes read, and who is told of it.
//
// It is told in regions, each with a descriptor to map it by. A region has shared addresses, as
// many as bytes, and no shared address is ever another region's. So who has not heard yet of what
// came or went may find a shared address nowhere, but never in memory that is meant otherwise. Who
// reads has a socket of its own, on which it is told of each region before anybody can know a
// shared address in it, and when it is gone (process/regions.h). Thread-safe.
#pragma once
#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

// A message on such a socket.
struct RegionNews {
  uint64_t shm_address, bytes;
  uint64_t there;  // 1: it has come, and its descriptor with it; 0: it is gone
};

constexpr uint64_t kNoShmAddress = UINT64_MAX;

class RegionPublisher {
 public:
  // All regions are told of at once to who is added: so many fit into its socket, and segments.
  static constexpr size_t kMostBeside = 128;
  RegionPublisher() = default;
  ~RegionPublisher();
  RegionPublisher(const RegionPublisher&) = delete;
  // A region, as this process has it mapped. All have been told when this returns. Its descriptor
  // stays the caller's, and is open until it goes. Where the caller can do without, and there are
  // kMostBeside regions, nobody is told: *shm_address is kNoShmAddress.
  Status come(const Mapping& memory, uint64_t* shm_address, bool can_do_without = false);
  void go(uint64_t shm_address) noexcept;
  // kNoShmAddress: it is in no region.
  uint64_t shm_address_of(const void* p) const;
  // Whoever has the other end of the socket is told from now on, and of all that there is. Where it
  // leaves too many messages, its connection is shut down, and it is told nothing more: it will not
  // take what it does not know for what it knows. Both descriptors (ForkedDescriptors) are the
  // publisher's on success; a connection of -1 is none.
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
  uint64_t next_ GUARDED_BY(mu_) = 0;  // shared address
  uint64_t readers_so_far_ GUARDED_BY(mu_) = 0;
};

}  // namespace frugal
