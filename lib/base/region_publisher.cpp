#include "base/region_publisher.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/forked.h"
#include "base/os.h"

namespace frugal {
namespace {

// A descriptor to send, which a forked child does not keep: it would keep the memory.
struct ToRead {
  const int fd;
  explicit ToRead(int of) : fd(ForkedDescriptors::open([&] { return os_read_only(of); })) {}
  ~ToRead() { ForkedDescriptors::close(fd); }
};

Status none_left() { return os_no_descriptor(errno, "shared memory that other processes read"); }
Status cannot_tell() {
  return fail(
      FRUGAL_ERR_OUT_OF_MEMORY,
      "shared memory cannot be published to another process: free memory of the machine, or raise "
      "the limits of open files (ulimit -n) or of sockets (net.core.wmem_max), and call again");
}

}  // namespace

void RegionPublisher::Reader::close() const noexcept {
  ForkedDescriptors::close(socket);
  ForkedDescriptors::close(connection);
}

RegionPublisher::~RegionPublisher() {
  Lock lock(mu_);
  for (const Reader& r : readers_) r.close();
}

// False: the system refused, for a reason that is no reader's fault.
bool RegionPublisher::tell(const RegionNews& news, int fd) noexcept {
  bool told = true;
  std::erase_if(readers_, [&](const Reader& r) {
    const int refused = os_send(r.socket, &news, sizeof news, fd);
    if (refused == 0) return false;
    if (refused != EAGAIN && refused != EPIPE && refused != ECONNRESET) return told = false;
    (void)shutdown(r.connection, SHUT_RDWR);
    r.close();
    return true;
  });
  return told;
}

void RegionPublisher::unlist(uint64_t shm_address) noexcept {
  const auto of = std::find_if(regions_.begin(), regions_.end(),
                               [&](const Region& r) { return r.shm_address == shm_address; });
  // A reader that cannot receive this keeps its mapping. No shared address in it is handed out
  // again.
  (void)tell({shm_address, of->memory.bytes, 0}, -1);
  regions_.erase(of);
}

Status RegionPublisher::come(const Mapping& memory, uint64_t* shm_address,
                             bool can_do_without) try {
  Lock lock(mu_);
  *shm_address = kNoShmAddress;
  if (can_do_without && regions_.size() >= kMostRegions) return FRUGAL_OK;
  const ToRead to_read(memory.fd);
  if (to_read.fd < 0) return none_left();
  const uint64_t first = next_;
  regions_.push_back({first, memory});
  next_ += memory.bytes + kHugePage;  // a gap: no range is in two regions
  if (!tell({first, memory.bytes, 1}, to_read.fd)) {
    unlist(first);
    return cannot_tell();
  }
  *shm_address = first;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list shared memory; free some and call again");
}

void RegionPublisher::go(uint64_t shm_address) noexcept {
  Lock lock(mu_);
  unlist(shm_address);
}

uint64_t RegionPublisher::shm_address_of(const void* p) const {
  const char* at = static_cast<const char*>(p);
  Lock lock(mu_);
  for (const Region& r : regions_)
    if (at >= r.memory.base && at < r.memory.base + r.memory.bytes)
      return r.shm_address + static_cast<uint64_t>(at - r.memory.base);
  return kNoShmAddress;
}

Status RegionPublisher::add(int socket, int connection, uint64_t* id) try {
  Lock lock(mu_);
  readers_.reserve(readers_.size() + 1);
  for (const Region& r : regions_) {
    const ToRead to_read(r.memory.fd);
    if (to_read.fd < 0) return none_left();
    const RegionNews news{r.shm_address, r.memory.bytes, 1};
    if (os_send(socket, &news, sizeof news, to_read.fd) != 0) return cannot_tell();
  }
  *id = ++readers_so_far_;
  readers_.push_back({*id, socket, connection});
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to publish shared memory to another process: free memory of the machine "
              "and call again");
}

void RegionPublisher::forget(uint64_t id) noexcept {
  Lock lock(mu_);
  std::erase_if(readers_, [&](const Reader& r) {
    if (r.id != id) return false;
    r.close();
    return true;
  });
}

}  // namespace frugal
