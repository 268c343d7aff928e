// Memory for trainers on GPUs: host memory pinned for their devices, and reused device memory. The
// pinner and the pool are thread-safe.
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

// The device's result as a status with a message, which begins with `what`.
Status device_status(const device::Result& result, const char* what);
#define FRUGAL_TRY_DEVICE(expression, what) FRUGAL_TRY(device_status((expression), (what)))

// Pins host memory while there are trainers on GPUs: through any of their devices, for all of them.
class DevicePinner : public Pinner {
 public:
  void add(std::shared_ptr<device::Runtime> runtime);    // a trainer joins
  void remove(const device::Runtime* runtime) noexcept;  // it has left, or its device has failed
  bool any() const { return count_.load() != 0; }
  Status pin(void* p, size_t bytes, bool* pinned) override { return pin(p, bytes, false, pinned); }
  // For memory that this process cannot write and that kernels read.
  Status pin_read_only(void* p, size_t bytes, bool* pinned) { return pin(p, bytes, true, pinned); }
  void unpin(void* p) noexcept override;

 private:
  Status pin(void* p, size_t bytes, bool read_only, bool* pinned);
  Mutex mu_;
  Vector<std::shared_ptr<device::Runtime>> live_ GUARDED_BY(mu_);  // one for each trainer
  std::shared_ptr<device::Runtime> last_ GUARDED_BY(mu_);          // unpins
  std::atomic<size_t> count_{0};
};

// Reused device memory, in the size classes of BufferPool. A thread returns a buffer only when the
// device has finished with it. The pool keeps about as much as was in use lately. It frees the
// oldest first, and all of it if the device has no other memory.
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
  size_t capacity_ = 0;  // 0: of exact size, and not reused
};

class DevicePool : public HeapObject, public std::enable_shared_from_this<DevicePool> {
 public:
  explicit DevicePool(std::shared_ptr<device::Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~DevicePool();
  Status get(size_t bytes, DeviceBuffer* out);
  // For memory that stays: of exact size, and freed at its end.
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
  using BySize =
      std::multimap<size_t, Free, std::less<size_t>, HeapAllocator<std::pair<const size_t, Free>>>;
  BySize free_ GUARDED_BY(mu_);
  Circulation circulation_ GUARDED_BY(mu_){size_t{8} << 20};  // its clock counts requests
};

}  // namespace frugal
