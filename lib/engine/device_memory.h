// Memory for trainers on GPUs: host memory that is pinned for their devices, and device memory that
// circulates. The pinner and the pool are thread-safe.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "base/heap.h"
#include "base/pin.h"
#include "base/status.h"
#include "base/sync.h"
#include "device/runtime.h"

namespace frugal {

// What the device said, as a status with a message; `what` begins it.
Status device_status(const device::Result& result, const char* what);
#define FRUGAL_TRY_DEVICE(expression, what) FRUGAL_TRY(device_status((expression), (what)))

// Pins host memory while trainers on GPUs are there: through any of their devices, for all of them.
class DevicePinner : public Pinner {
 public:
  void add(std::shared_ptr<device::Runtime> runtime);      // a trainer joins
  void remove(const device::Runtime* runtime) noexcept;    // it has left, or its device has failed
  bool any() const { return count_.load() != 0; }
  Status pin(void* p, size_t bytes, bool* pinned) override { return pin(p, bytes, false, pinned); }
  // Memory that this process cannot write, for kernels that read it.
  Status pin_read_only(void* p, size_t bytes, bool* pinned) { return pin(p, bytes, true, pinned); }
  void unpin(void* p) noexcept override;

 private:
  Status pin(void* p, size_t bytes, bool read_only, bool* pinned);
  Mutex mu_;
  Vector<std::shared_ptr<device::Runtime>> live_ GUARDED_BY(mu_);  // one for each trainer
  std::shared_ptr<device::Runtime> last_ GUARDED_BY(mu_);          // to unpin with
  std::atomic<size_t> count_{0};
};

// Device memory that circulates, in the size classes of BufferPool. Who gives a buffer back knows
// that the device has done with it. What is kept is bounded by what was in use of late. The oldest
// goes first, and all of it where there is no other memory.
class DevicePool;
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& o) noexcept { *this = std::move(o); }
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept {
    std::swap(pool_, o.pool_);
    std::swap(at_, o.at_);
    std::swap(capacity_, o.capacity_);
    return *this;
  }
  ~DeviceBuffer();
  template <class T>
  device::Ptr<T> as() const {
    return {at_.address};
  }
  explicit operator bool() const { return bool{at_}; }

 private:
  friend class DevicePool;
  std::shared_ptr<DevicePool> pool_;
  device::Ptr<char> at_;
  size_t capacity_ = 0;  // 0: exactly what was asked for; does not circulate
};

class DevicePool : public HeapObject, public std::enable_shared_from_this<DevicePool> {
 public:
  explicit DevicePool(std::shared_ptr<device::Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~DevicePool();
  Status get(size_t bytes, DeviceBuffer* out);
  // For what stays: not a byte more, and freed when it ends.
  Status get_exactly(size_t bytes, DeviceBuffer* out);

 private:
  friend class DeviceBuffer;
  struct Free {
    device::Ptr<char> at;
    uint64_t since;
  };
  void put(size_t capacity, device::Ptr<char> at) noexcept;
  void keep(size_t bytes) noexcept;
  std::shared_ptr<device::Runtime> runtime_;
  Mutex mu_;
  using BySize = std::multimap<size_t, Free, std::less<size_t>,
                               HeapAllocator<std::pair<const size_t, Free>>>;
  BySize free_ GUARDED_BY(mu_);
  Circulation circulation_ GUARDED_BY(mu_){size_t{8} << 20};  // its clock: requests
};

}  // namespace frugal
