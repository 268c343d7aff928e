#include "sim/memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "sim/order.h"

namespace frugal::device::sim {
namespace {

struct Table {  // sorted by address
  Range* ranges = nullptr;
  size_t capacity = 0, count = 0;
};

// Device memory that was freed, for the texts of faults.
struct Freed {
  uint64_t begin = 0, end = 0;
};

// Addresses of a device that no program can access, given out in order and once.
struct Reserve {
  int32_t device;
  uint64_t base, bytes, used;
};

constexpr uint64_t kReserve = uint64_t{1} << 30;
constexpr size_t kFreedKept = 256;

// Of the process, since pinned memory is. Never destroyed: threads may outlive static objects.
struct Registry {
  // Held by a thread that changes ranges until no section sees the old ones; taken before `state`.
  std::mutex update;
  // Of what follows, held for moments: a section takes it to say why it may not.
  std::mutex state;
  Table tables[2];
  Table* current = &tables[0];
  Table* spare = &tables[1];  // has room for what `current` holds but one
  uint64_t pinned_ranges = 0, pinned_bytes = 0, pinned_ever = 0, pinnable_bytes = UINT64_MAX;
  Freed freed[kFreedKept];
  size_t freed_next = 0;
  std::vector<Reserve> reserves;
  SectionSlot* slots = nullptr;  // never freed, but used again
};

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

// What sections read without a lock. A thread that reads the new epoch sees the new table.
uint64_t g_epoch = 1;
const Table* g_table = nullptr;

uint64_t page() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t page_up(uint64_t bytes) { return (bytes + page() - 1) / page() * page(); }

// Makes `spare` what sections see from now on, and waits until none sees the other. `update` is
// held.
void publish(Registry& r) {
  {
    std::lock_guard<std::mutex> lock(r.state);
    std::swap(r.current, r.spare);
  }
  __atomic_store_n(&g_table, r.current, __ATOMIC_SEQ_CST);
  const uint64_t epoch = __atomic_add_fetch(&g_epoch, 1, __ATOMIC_SEQ_CST);
  SectionSlot* slot = __atomic_load_n(&r.slots, __ATOMIC_ACQUIRE);
  for (; slot; slot = slot->next) {
    for (;;) {
      const uint64_t began = __atomic_load_n(&slot->epoch, __ATOMIC_SEQ_CST);
      if (began == 0 || began >= epoch) break;
      const timespec moment = {0, 20'000};
      nanosleep(&moment, nullptr);
    }
  }
}

// `update` is held. `spare` gets what `current` holds and `range`, or throws std::bad_alloc.
void insert(Registry& r, const Range& range) {
  Table& now = *r.current;
  Table& next = *r.spare;
  if (next.capacity < now.count + 1) {
    const size_t capacity = 2 * (now.count + 1);
    Range* ranges = new Range[capacity];
    delete[] next.ranges;
    next.ranges = ranges;
    next.capacity = capacity;
  }
  const Range* end = now.ranges + now.count;
  const Range* at =
      std::upper_bound(static_cast<const Range*>(now.ranges), end, range,
                       [](const Range& a, const Range& b) { return a.begin < b.begin; });
  Range* out = std::copy(static_cast<const Range*>(now.ranges), at, next.ranges);
  *out++ = range;
  std::copy(at, end, out);
  next.count = now.count + 1;
  publish(r);
}

// `update` is held. False: none matches.
template <class Match>
bool remove_if(Registry& r, Match match, Range* removed) {
  const Table& now = *r.current;
  Table& next = *r.spare;
  const Range* end = now.ranges + now.count;
  const Range* at = std::find_if(static_cast<const Range*>(now.ranges), end, match);
  if (at == end) return false;
  *removed = *at;
  Range* out = std::copy(static_cast<const Range*>(now.ranges), at, next.ranges);
  std::copy(at + 1, end, out);
  next.count = now.count - 1;
  publish(r);
  return true;
}

// The range that holds the address, or null.
const Range* locate(const Table& table, uint64_t address) {
  size_t low = 0, high = table.count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (table.ranges[middle].begin <= address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0) return nullptr;
  const Range* range = &table.ranges[low - 1];
  return address < range->end ? range : nullptr;
}

void* map(uint64_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

// 0: none left. A page after each allocation stays unused. `update` is held.
uint64_t reserve(Registry& r, int32_t device, uint64_t bytes) {
  const uint64_t all = page_up(bytes) + page();
  for (auto last = r.reserves.rbegin(); last != r.reserves.rend(); ++last) {
    if (last->device != device) continue;
    if (last->bytes - last->used < all) break;
    const uint64_t address = last->base + last->used;
    last->used += all;
    return address;
  }
  r.reserves.reserve(r.reserves.size() + 1);
  const uint64_t size = std::max(kReserve, all);
  void* base = map(size, PROT_NONE);
  if (!base) return 0;
  r.reserves.push_back({device, reinterpret_cast<uint64_t>(base), size, all});
  return reinterpret_cast<uint64_t>(base);
}

bool mapped(uint64_t address, size_t bytes) {
  unsigned char resident[4096];
  const uint64_t piece = sizeof resident * page();
  for (uint64_t done = 0; done < bytes; done += piece) {
    if (mincore(reinterpret_cast<void*>(address + done), std::min<uint64_t>(piece, bytes - done),
                resident) != 0)
      return false;
  }
  return true;
}

void unmap(const Range& range) {
  char* bytes = reinterpret_cast<char*>(range.begin + range.offset);
#if defined(FRUGAL_TSAN)
  // Counts as a write, so that a kernel that no thread waited for is a race.
  memset(bytes, 0, range.end - range.begin);
#endif
  munmap(bytes, page_up(range.end - range.begin));
}

}  // namespace

Section::Section() {
  Unseen unseen;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.state);
  for (slot_ = r.slots; slot_ && slot_->used; slot_ = slot_->next) {
  }
  if (!slot_) {
    slot_ = new SectionSlot;
    slot_->next = r.slots;
    __atomic_store_n(&r.slots, slot_, __ATOMIC_RELEASE);
  }
  slot_->used = true;
}

Section::~Section() {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(registry().state);
  slot_->used = false;
}

FRUGAL_UNSEEN void Section::begin() {
  const uint64_t epoch = __atomic_load_n(&g_epoch, __ATOMIC_SEQ_CST);
  __atomic_store_n(&slot_->epoch, epoch, __ATOMIC_SEQ_CST);
  const Table* table = __atomic_load_n(&g_table, __ATOMIC_SEQ_CST);
  ranges_ = table ? table->ranges : nullptr;
  count_ = table ? table->count : 0;
  for (uint32_t i = 0; i < kCached; ++i) cached_[i] = nullptr;
}

FRUGAL_UNSEEN void Section::end() { __atomic_store_n(&slot_->epoch, 0, __ATOMIC_SEQ_CST); }

FRUGAL_UNSEEN const Range* Section::find(uint64_t address, size_t bytes) {
  for (uint32_t i = 0; i < kCached; ++i) {
    const Range* range = cached_[i];
    if (range && address >= range->begin && address < range->end)
      return bytes <= range->end - address ? range : nullptr;
  }
  size_t low = 0, high = count_;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (ranges_[middle].begin <= address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0) return nullptr;
  const Range* range = &ranges_[low - 1];
  if (address >= range->end || bytes > range->end - address) return nullptr;
  cached_[next_] = range;
  next_ = (next_ + 1) % kCached;
  return range;
}

namespace {

std::atomic<bool>& any_device_memory() {
  static std::atomic<bool> any{false};
  return any;
}

}  // namespace

MemoryError add_device_memory(int32_t device, size_t bytes, uint8_t garbage, uint64_t* address) {
  any_device_memory().store(true, std::memory_order_release);
  void* memory = map(page_up(bytes), PROT_READ | PROT_WRITE);
  if (!memory) return MemoryError::kNoMemory;
  memset(memory, garbage, bytes);
  Unseen unseen;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.update);
  try {
    const uint64_t begin = reserve(r, device, bytes);
    if (begin != 0) {
      insert(r, {begin, begin + bytes, reinterpret_cast<uint64_t>(memory) - begin, device});
      *address = begin;
      return MemoryError::kNone;
    }
  } catch (const std::bad_alloc&) {
  }
  munmap(memory, page_up(bytes));
  return MemoryError::kNoMemory;
}

bool free_device_memory(int32_t device, uint64_t address, size_t* bytes) {
  Range range = {};
  {
    Unseen unseen;
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.update);
    const Range* found = locate(*r.current, address);
    if (!found || found->device != device || found->begin != address) return false;
    {
      // Before a section can miss it.
      std::lock_guard<std::mutex> state(r.state);
      r.freed[r.freed_next++ % kFreedKept] = {found->begin, found->end};
    }
    remove_if(
        r, [&](const Range& a) { return a.begin == address; }, &range);
  }
  unmap(range);
  *bytes = range.end - range.begin;
  return true;
}

void free_all_device_memory(int32_t device) {
  Registry& r = registry();
  for (;;) {
    Range range = {};
    {
      Unseen unseen;
      std::lock_guard<std::mutex> lock(r.update);
      if (!remove_if(
              r, [&](const Range& a) { return a.device == device; }, &range))
        break;
    }
    unmap(range);
  }
  Unseen unseen;
  std::lock_guard<std::mutex> lock(r.update);
  for (const Reserve& reserve : r.reserves) {
    if (reserve.device != device) continue;
    std::lock_guard<std::mutex> state(r.state);
    for (Freed& freed : r.freed)
      if (freed.begin - reserve.base < reserve.bytes) freed = Freed();
    munmap(reinterpret_cast<void*>(reserve.base), reserve.bytes);
  }
  r.reserves.erase(std::remove_if(r.reserves.begin(), r.reserves.end(),
                                  [&](const Reserve& a) { return a.device == device; }),
                   r.reserves.end());
}

MemoryError pin_memory(uint64_t address, size_t bytes, bool read_only) {
  Unseen unseen;
  if (address % page() != 0) return MemoryError::kUnaligned;
  if (address + bytes < address || !mapped(address, bytes)) return MemoryError::kUnmapped;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.update);
  const Table& now = *r.current;
  for (size_t i = 0; i < now.count; ++i) {
    const Range& range = now.ranges[i];
    if (range.begin < address + bytes && address < range.end) return MemoryError::kTwice;
  }
  {
    std::lock_guard<std::mutex> state(r.state);
    if (r.pinnable_bytes - std::min(r.pinnable_bytes, r.pinned_bytes) < bytes)
      return MemoryError::kLimit;
  }
  try {
    insert(r, {address, address + bytes, 0, kHostMemory, read_only});
  } catch (const std::bad_alloc&) {
    return MemoryError::kNoMemory;
  }
  std::lock_guard<std::mutex> state(r.state);
  r.pinned_ranges += 1;
  r.pinned_ever += 1;
  r.pinned_bytes += bytes;
  return MemoryError::kNone;
}

bool unpin_memory(uint64_t address) {
  Unseen unseen;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.update);
  Range range = {};
  if (!remove_if(
          r, [&](const Range& a) { return a.device == kHostMemory && a.begin == address; }, &range))
    return false;
  std::lock_guard<std::mutex> state(r.state);
  r.pinned_ranges -= 1;
  r.pinned_bytes -= range.end - range.begin;
  return mapped(range.begin, range.end - range.begin);
}

void set_pinnable_bytes(uint64_t bytes) {
  Unseen unseen;
  std::lock_guard<std::mutex> state(registry().state);
  registry().pinnable_bytes = bytes;
}

Pinned pinned_memory() {
  Unseen unseen;
  std::lock_guard<std::mutex> state(registry().state);
  return {registry().pinned_ranges, registry().pinned_bytes, registry().pinned_ever};
}

bool range_of(uint64_t address, Range* out) {
  Unseen unseen;
  std::lock_guard<std::mutex> state(registry().state);
  const Range* range = locate(*registry().current, address);
  if (range) *out = *range;
  return range != nullptr;
}

bool any_on_devices() { return any_device_memory().load(std::memory_order_acquire); }

bool on_a_device(uint64_t address) {
  Range range;
  return any_on_devices() && range_of(address, &range) && range.device != kHostMemory;
}

std::string why_not(int32_t device, uint64_t address, size_t bytes, Access access) {
  Unseen unseen;
  Registry& r = registry();
  std::lock_guard<std::mutex> state(r.state);
  char text[200];
  const Range* range = locate(*r.current, address);
  if (range && range->device != kHostMemory && range->device != device) {
    return "memory of another device";
  }
  if (range && bytes > range->end - address) {
    snprintf(text, sizeof text, "out of bounds: %llu bytes before the end of %s of %llu bytes",
             static_cast<unsigned long long>(range->end - address),
             range->device == kHostMemory ? "pinned host memory" : "device memory",
             static_cast<unsigned long long>(range->end - range->begin));
    return text;
  }
  if (range && range->device == kHostMemory && access == Access::kAdd)
    return "host memory, which nothing on a device may read, modify and write";
  if (range && range->read_only && access == Access::kWrite)
    return "host memory that was pinned to be read";
  for (const Freed& freed : r.freed) {
    if (address < freed.begin || address >= freed.end) continue;
    snprintf(text, sizeof text, "freed device memory, once of %llu bytes",
             static_cast<unsigned long long>(freed.end - freed.begin));
    return text;
  }
  for (const Reserve& reserve : r.reserves) {
    if (address - reserve.base >= reserve.bytes) continue;
    const Table& table = *r.current;
    const Range* before = nullptr;
    for (size_t i = 0; i < table.count; ++i)
      if (table.ranges[i].begin < address && table.ranges[i].begin >= reserve.base)
        before = &table.ranges[i];
    if (!before) return "out of bounds: device memory that was never allocated";
    snprintf(text, sizeof text,
             "out of bounds: %llu bytes after the end of device memory of %llu bytes",
             static_cast<unsigned long long>(address - before->end),
             static_cast<unsigned long long>(before->end - before->begin));
    return text;
  }
  if (address < page()) return "a null pointer";
  return "host memory that is not pinned, or no memory at all";
}

}  // namespace frugal::device::sim
