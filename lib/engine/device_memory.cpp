#include "engine/device_memory.h"

#include <algorithm>

#include "base/assert.h"

namespace frugal {

using device::ErrorKind;
using device::Ptr;
using device::Result;

constexpr uint64_t kRequestSpan = 256;  // requests for device memory: some dozen steps

Status device_status(const Result& r, const char* what) {
  if (r.ok()) return FRUGAL_OK;
  Status status = r.kind == ErrorKind::kOutOfMemory ? FRUGAL_ERR_OUT_OF_MEMORY
                  : r.kind == ErrorKind::kMisuse    ? FRUGAL_ERR_INVALID_ARGUMENT
                                                    : FRUGAL_ERR_DEVICE;
  // Code 0: the error does not come from the device.
  if (r.code == 0) return fail(status, "%s: %s: %s", what, r.call, r.text);
  return fail_device(status, r.code, "%s: %s: %s (error %d)", what, r.call, r.text, r.code);
}

void DevicePinner::add(std::shared_ptr<device::Runtime> runtime) {
  Lock lock(mu_);
  live_.push_back(runtime);
  last_ = std::move(runtime);
  count_.store(live_.size());
}

void DevicePinner::remove(const device::Runtime* runtime) noexcept {
  Lock lock(mu_);
  for (size_t i = 0; i < live_.size(); ++i)
    if (live_[i].get() == runtime) {
      live_.erase(live_.begin() + static_cast<ptrdiff_t>(i));
      break;
    }
  if (!live_.empty()) last_ = live_.back();
  count_.store(live_.size());
}

Status DevicePinner::pin(void* p, size_t bytes, bool read_only, bool* pinned) {
  *pinned = false;
  if (!any()) return FRUGAL_OK;
  Vector<std::shared_ptr<device::Runtime>> live;
  try {
    Lock lock(mu_);
    live = live_;
  } catch (const std::bad_alloc&) {
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "no memory to pin host memory: free memory of the machine and call again");
  }
  for (const auto& runtime : live) {
    Result r = runtime->pin(p, bytes, read_only);
    // Each trainer handles the failure of its own device.
    if (r.kind == ErrorKind::kFault || r.kind == ErrorKind::kNoDevice) continue;
    *pinned = r.ok();
    return device_status(r, "pinning host memory (its limit is that of the system, ulimit -l)");
  }
  return FRUGAL_OK;
}

void DevicePinner::unpin(void* p) noexcept {
  std::shared_ptr<device::Runtime> runtime;
  {
    Lock lock(mu_);
    runtime = last_;
  }
  if (runtime) runtime->unpin(p);
}

// --- Device memory -------------------------------------------------------------------------------

DeviceBuffer::~DeviceBuffer() {
  if (!pool_) return;
  if (capacity_ == 0) {
    pool_->runtime_->free(at_);
    return;
  }
  pool_->put(capacity_, at_);
}

DevicePool::~DevicePool() { keep(0); }

Status DevicePool::get(size_t bytes, DeviceBuffer* out) {
  *out = {};
  if (bytes == 0) return FRUGAL_OK;
  const size_t capacity = BufferPool::capacity_for(bytes);
  Ptr<char> at;
  {
    Lock lock(mu_);
    auto found = free_.find(capacity);
    if (found != free_.end()) {
      at = found->second.at;
      free_.erase(found);
      circulation_.kept -= capacity;
      circulation_.take(capacity, 1, kRequestSpan);
    }
  }
  if (!at) {
    Result r = runtime_->alloc(capacity, &at);
    if (r.kind == ErrorKind::kOutOfMemory) {
      keep(0);
      r = runtime_->alloc(capacity, &at);
    }
    FRUGAL_TRY_DEVICE(r, "device memory");
    Lock lock(mu_);
    circulation_.take(capacity, 1, kRequestSpan);
  }
  out->pool_ = shared_from_this();
  out->at_ = at;
  out->capacity_ = capacity;
  return FRUGAL_OK;
}

void DevicePool::put(size_t capacity, Ptr<char> at) noexcept {
  bool kept = false;
  size_t most = 0;
  {
    Lock lock(mu_);
    circulation_.put(capacity);
    try {
      free_.emplace(capacity, Free{at, circulation_.clock()});
      circulation_.kept += capacity;
      kept = true;
    } catch (const std::bad_alloc&) {
    }
    most = circulation_.most();
  }
  if (!kept) runtime_->free(at);
  keep(most);
}

void DevicePool::keep(size_t bytes) noexcept {
  for (;;) {
    Ptr<char> oldest;
    {
      Lock lock(mu_);
      FRUGAL_ASSERT(!free_.empty() || circulation_.kept == 0);
      if (circulation_.kept <= bytes) return;
      const auto of = std::min_element(free_.begin(), free_.end(), [](auto& a, auto& b) {
        return a.second.since < b.second.since;
      });
      oldest = of->second.at;
      circulation_.kept -= of->first;
      free_.erase(of);
    }
    runtime_->free(oldest);
  }
}

Status DevicePool::get_exactly(size_t bytes, DeviceBuffer* out) {
  *out = {};
  if (bytes == 0) return FRUGAL_OK;
  FRUGAL_TRY_DEVICE(runtime_->alloc(bytes, &out->at_), "device memory");
  out->pool_ = shared_from_this();
  return FRUGAL_OK;
}

}  // namespace frugal
