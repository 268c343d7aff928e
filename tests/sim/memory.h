// Which memory a kernel may use: device memory of its device, and host memory while it is pinned.
//
// What: device memory lies twice in the address space of the process. What Ptr holds is reserved
// and never readable; kernels are let through to a second mapping. So a host access of device
// memory is a segmentation fault, as it would be on a GPU. Addresses of freed memory are not used
// again while the device is open. Fresh memory is filled with garbage. Invariants: a section (one
// block of a kernel, a copy) sees the ranges that existed when it began, and what it may see stays
// mapped until it has ended: free and unpin wait for that. They wait for no kernel that has not
// begun, unlike CUDA's: memory that a later kernel uses is a fault of the caller. Threads: any.
// Sections take no lock. Callers: block.cpp, stream.cpp, sim.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

#include "sim/order.h"

namespace frugal::device::sim {

inline constexpr int32_t kHostMemory = -1;

enum class Access : int32_t { kRead, kWrite, kAdd };

// [begin, end) as kernels name it; a byte of it lies at address + offset.
struct Range {
  uint64_t begin, end;
  uint64_t offset;
  int32_t device;          // or kHostMemory
  bool read_only = false;  // of host memory
  FRUGAL_UNSEEN bool allows(int32_t on, Access access) const {
    return device == on || (device == kHostMemory && access != Access::kAdd &&
                            !(read_only && access == Access::kWrite));
  }
};

struct SectionSlot {
  uint64_t epoch = 0;  // in which a section began; 0: none
  bool used = false;
  SectionSlot* next = nullptr;
};

// The ranges at the start of a section. One section at a time for each object; the object belongs
// to one thread.
class Section {
 public:
  Section();
  ~Section();
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  void begin();
  void end();
  // The range that holds [address, address + bytes), or null. Valid until end().
  const Range* find(uint64_t address, size_t bytes);

 private:
  static constexpr uint32_t kCached = 4;
  SectionSlot* slot_;
  const Range* ranges_ = nullptr;
  size_t count_ = 0;
  const Range* cached_[kCached];
  uint32_t next_ = 0;
};

enum class MemoryError : int32_t {
  kNone,
  kLimit,      // the limit that was set
  kNoMemory,   // of this machine
  kUnaligned,  // no page boundary
  kUnmapped,   // no memory of this process
  kTwice,      // overlaps what is pinned already
};

// For one device, which `device` numbers. garbage: the byte that fills it.
MemoryError add_device_memory(int32_t device, size_t bytes, uint8_t garbage, uint64_t* address);
// False: no allocation begins there.
bool free_device_memory(int32_t device, uint64_t address, size_t* bytes);
// All of a device's, at its end.
void free_all_device_memory(int32_t device);

MemoryError pin_memory(uint64_t address, size_t bytes, bool read_only);
// False: none begins there, or it is mapped no more.
bool unpin_memory(uint64_t address);
void set_pinnable_bytes(uint64_t bytes);
struct Pinned {
  uint64_t ranges, bytes;
  uint64_t ever;  // ranges, with those that are pinned no more
};
Pinned pinned_memory();

// What lies at an address: the range, copied, if any.
bool range_of(uint64_t address, Range* out);
// Has there been memory of any device?
bool any_on_devices();
// Is this memory of any device? Cheap as long as there was none.
bool on_a_device(uint64_t address);
// Why `device` may not access the address: an English sentence's end.
std::string why_not(int32_t device, uint64_t address, size_t bytes, Access access);

}  // namespace frugal::device::sim
