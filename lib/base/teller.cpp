#include "base/teller.h"

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

}  // namespace

void Teller::Reader::close() const noexcept {
  ForkedDescriptors::close(socket);
  ForkedDescriptors::close(connection);
}

Teller::~Teller() {
  Lock lock(mu_);
  for (const Reader& r : readers_) r.close();
}

void Teller::tell(const RegionNews& news, int fd) noexcept {
  std::erase_if(readers_, [&](const Reader& r) {
    if (os_send(r.socket, &news, sizeof news, fd)) return false;
    (void)shutdown(r.connection, SHUT_RDWR);
    r.close();
    return true;
  });
}

Status Teller::come(const Mapping& memory, uint64_t* place) try {
  Lock lock(mu_);
  const ToRead to_read(memory.fd);
  if (to_read.fd < 0) return none_left();
  regions_.push_back({next_, memory});
  *place = next_;
  next_ += memory.bytes + kHugePage;  // nothing runs on from one into the other
  tell({*place, memory.bytes, 1}, to_read.fd);
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to list shared memory; free some and call again");
}

void Teller::go(uint64_t place) noexcept {
  Lock lock(mu_);
  const auto of = std::find_if(regions_.begin(), regions_.end(),
                               [&](const Region& r) { return r.place == place; });
  tell({place, of->memory.bytes, 0}, -1);
  regions_.erase(of);
}

uint64_t Teller::place_of(const void* p) const {
  const char* at = static_cast<const char*>(p);
  Lock lock(mu_);
  for (const Region& r : regions_)
    if (at >= r.memory.base && at < r.memory.base + r.memory.bytes)
      return r.place + static_cast<uint64_t>(at - r.memory.base);
  return UINT64_MAX;
}

Status Teller::add(int socket, int connection, uint64_t* id) try {
  Lock lock(mu_);
  readers_.reserve(readers_.size() + 1);
  for (const Region& r : regions_) {
    const ToRead to_read(r.memory.fd);
    if (to_read.fd < 0) return none_left();
    const RegionNews news{r.place, r.memory.bytes, 1};
    if (!os_send(socket, &news, sizeof news, to_read.fd))
      return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "another process cannot be told of %zu pieces of memory; call again",
                  regions_.size());
  }
  *id = ++readers_so_far_;
  readers_.push_back({*id, socket, connection});
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to tell another process of buffers; call again");
}

void Teller::forget(uint64_t id) noexcept {
  Lock lock(mu_);
  std::erase_if(readers_, [&](const Reader& r) {
    if (r.id != id) return false;
    r.close();
    return true;
  });
}

}  // namespace frugal
