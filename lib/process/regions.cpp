#include "process/regions.h"

#include <algorithm>
#include <cerrno>

#include "base/forked.h"

namespace frugal {
namespace {

// No controller publishes an address from here on.
constexpr uint64_t kNoShmAddressFrom = uint64_t{1} << 62;

Status cannot_be() {
  return fail(FRUGAL_ERR_INTERNAL, "the controller published memory that cannot exist");
}

}  // namespace

// The caller releases `gone` without the lock, since that may take time.
Status Regions::take_in(RegionRefs* gone) {
  if (closed_) return fail(FRUGAL_ERR_CLOSED, "the engine has been closed");
  for (RegionNews news;; os_drop(socket_)) {
    // A forked child that kept it would keep the memory.
    struct Descriptor {
      int fd = -1;
      ~Descriptor() { ForkedDescriptors::close(fd); }
    } descriptor;
    ssize_t got = 0;
    int code = 0;
    bool ended = false;
    descriptor.fd = ForkedDescriptors::open([&] {
      int fd;
      got = os_peek(socket_, &news, sizeof news, &fd, &ended);
      code = errno;
      return fd;
    });
    ended_ |= ended;
    if (got == 0) return FRUGAL_OK;
    if (got < 0)
      return fail_errno(
          FRUGAL_ERR_OUT_OF_MEMORY, code,
          "no memory to receive a region of the controller: free memory of the machine and "
          "call again");
    if (got != sizeof news) return cannot_be();
    if (!news.there) {
      const auto of = std::find_if(there_.begin(), there_.end(), [&](const RegionRef& r) {
        return r->shm_address() == news.shm_address;
      });
      if (of == there_.end()) continue;
      gone->push_back(std::move(*of));
      there_.erase(of);
      continue;
    }
    if (descriptor.fd < 0) return os_no_descriptor(EMFILE, "memory of the controller");
    there_.reserve(there_.size() + 1);
    Mapping memory;
    FRUGAL_TRY(os_map_shared(descriptor.fd, false, &memory));
    memory.fd = -1;  // the mapping is enough
    struct Unmap {
      Mapping* memory;
      ~Unmap() {
        if (memory) os_release(memory);
      }
    } unmap{&memory};
    if (memory.bytes != news.bytes || news.shm_address < told_) return cannot_be();
    there_.push_back(
        std::allocate_shared<Region>(HeapAllocator<Region>(), news.shm_address, memory, pins_));
    unmap.memory = nullptr;
    told_ = news.shm_address + news.bytes;
  }
}

Status Regions::look() try {
  RegionRefs gone;
  Lock lock(mu_);
  return take_in(&gone);
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list the memory of the controller; call again");
}

RegionRef Regions::of(uint64_t shm_address, uint64_t bytes) const {
  for (const RegionRef& r : there_)
    if (r->has(shm_address, bytes)) return r;
  return nullptr;
}

Status Regions::find(uint64_t shm_address, uint64_t bytes, RegionRefs* reads,
                     const char** out) try {
  // Mostly it is in the region of the last one.
  for (auto r = reads->rbegin(); r != reads->rend(); ++r)
    if ((*r)->has(shm_address, bytes)) {
      *out = (*r)->at(shm_address);
      return FRUGAL_OK;
    }
  RegionRefs gone;
  Lock lock(mu_);
  RegionRef found = of(shm_address, bytes);
  if (!found) {
    FRUGAL_TRY(take_in(&gone));
    found = of(shm_address, bytes);
  }
  if (!found && ended_ && shm_address >= told_ && shm_address < kNoShmAddressFrom)
    return fail(
        FRUGAL_ERR_PEER_LOST,
        "the controller has memory that it has not published to this process: close the engine "
        "and open it again");
  if (!found)
    return fail(FRUGAL_ERR_INTERNAL, "the controller sent an address outside of its memory");
  reads->push_back(found);
  *out = found->at(shm_address);
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list the memory of the controller; call again");
}

void Regions::close() noexcept {
  RegionRefs gone;
  Lock lock(mu_);
  ForkedDescriptors::close(std::exchange(socket_, -1));
  closed_ = true;
  gone.swap(there_);
}

}  // namespace frugal
