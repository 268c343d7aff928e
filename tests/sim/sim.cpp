#include "sim/sim.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "sim/memory.h"
#include "sim/order.h"
#include "sim/streams.h"

namespace frugal::device::sim {
namespace {

Result no_memory(const char* call, const char* text) {
  return {ErrorKind::kOutOfMemory, kMemoryAllocation, call, text};
}

constexpr const char* kAskedFor = "a failure that was asked for";
constexpr const char* kNoHostMemory = "out of host memory";

class SimRuntime final : public Sim {
 public:
  SimRuntime(uint32_t index, int32_t device)
      : device_(device), health_(std::make_shared<Health>(device)), streams_(health_) {
    snprintf(name_, sizeof name_, "sim:%u", index);
  }
  ~SimRuntime() override;

  const char* name() const override { return name_; }
  DeviceInfo info() const override;
  Result alloc(size_t bytes, Ptr<char>* out) override;
  void free(Ptr<char> p) override;
  Result pin(void* p, size_t bytes, bool read_only) override;
  void unpin(void* p) override;
  Result kind_of(const void* p, Memory* out) override;
  Result create_stream(Priority priority, Stream* out) override;
  void destroy_stream(Stream s) override;
  Result create_event(Event* out) override;
  void destroy_event(Event e) override;
  Result record(Event e, Stream s) override;
  Result wait(Stream s, Event e) override;
  Result query(Event e, bool* passed) override;
  Result synchronize(Event e, uint64_t timeout_ns, bool* passed) override;
  Result capturing(Stream s, bool* out) override;
  Result copy(Ptr<char> to, Ptr<char> from, size_t bytes, Stream s) override;
  Result fill(Ptr<char> to, int value, size_t bytes, Stream s) override;
  Result launch(uint32_t kernel, const Shape& shape, const void* arguments, size_t bytes,
                Stream s) override;

  void set_seed(uint64_t seed) override;
  void set_delays(const Delays& delays) override;
  void fail_after(uint64_t n, ErrorKind kind, bool forever) override;
  void reset_after(uint64_t n) override;
  void exhaust_after(uint64_t n) override;
  uint64_t calls() const override;
  void set_memory_bytes(uint64_t bytes) override;
  void set_capturing(Stream s, bool capturing) override;
  uint64_t capture_violations() const override;
  Live live() const override;
  std::vector<std::string> launched() const override;
  std::vector<Priority> priorities(const char* of) const override;
  void set_test_kernels(const KernelEntry* kernels, uint32_t count) override;

 private:
  enum class Wants { kNothing, kMemory };  // of the device

  // What every call with a Result begins with: sticky faults, failures on request.
  void fail(uint64_t n, ErrorKind kind, bool forever, bool resets);
  Result begin(const char* call, Wants wants);
  Result faulted(const char* call) const;
  // A call without a Result that makes no sense: a fault, so that it does not go unnoticed.
  void fault(const char* call, const void* what);
  Result passed(const char* call, Event e, uint64_t timeout_ns, bool* passed);
  bool usable(uint64_t address) const;
  template <class F>
  Result guarded(const char* call, F f, Wants wants = Wants::kNothing);

  // Identifies its memory; another number each time that the device is opened.
  const int32_t device_;
  const std::shared_ptr<Health> health_;
  Streams streams_;
  char name_[16];

  // Of all that follows. Threads that call are ordered by it only where ThreadSanitizer does not
  // see.
  mutable std::mutex mutex_;
  uint64_t calls_ = 0;
  uint64_t fail_in_ = 0;
  ErrorKind fail_kind_ = ErrorKind::kNone;
  bool fail_forever_ = false;
  bool fail_resets_ = false;
  uint64_t exhausted_in_ = 0;  // 1: it is
  std::atomic<bool> reset_{false};
  uint64_t memory_limit_ = uint64_t{1} << 30, allocations_ = 0, allocated_ = 0;
  uint64_t allocations_ever_ = 0;
  Random random_{1};
  const KernelEntry* test_kernels_ = nullptr;
  uint32_t test_kernel_count_ = 0;
};

SimRuntime::~SimRuntime() {
  streams_.end();
  free_all_device_memory(device_);
}

Result SimRuntime::faulted(const char* call) const {
  const char* text = health_->await_idle();
  return reset_.load() ? misuse(call, kInvalidHandle, text)
                       : Result{ErrorKind::kFault, kLaunchFailure, call, text};
}

Result SimRuntime::begin(const char* call, Wants wants) {
  ErrorKind kind = ErrorKind::kNone;
  if (!health_->failed()) {
    Unseen unseen;
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    if (fail_in_ > 0 && --fail_in_ == 0) {
      kind = fail_kind_;
      if (fail_forever_) fail_in_ = 1;
    }
    if (exhausted_in_ > 1)
      --exhausted_in_;
    else if (exhausted_in_ == 1 && wants == Wants::kMemory && kind == ErrorKind::kNone)
      kind = ErrorKind::kOutOfMemory;
    if (kind == ErrorKind::kFault) {
      reset_.store(fail_resets_);
      health_->fail(kAskedFor);
    }
  }
  if (health_->failed()) return faulted(call);
  if (kind == ErrorKind::kNone) return {};
  return {kind, kind == ErrorKind::kOutOfMemory ? kMemoryAllocation : kInvalidValue, call,
          kAskedFor};
}

void SimRuntime::fault(const char* call, const void* what) {
  Unseen unseen;
  char text[kFaultText];
  snprintf(text, sizeof text, "%s of 0x%llx, which does not exist", call,
           static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(what)));
  health_->fail(text);
}

// No exception leaves the Runtime.
template <class F>
Result SimRuntime::guarded(const char* call, F f, Wants wants) {
  Result result = begin(call, wants);
  if (!result.ok()) return result;
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return no_memory(call, kNoHostMemory);
  } catch (const std::system_error&) {
    return no_memory(call, "no thread for a stream");
  }
}

DeviceInfo SimRuntime::info() const {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  DeviceInfo info = {};
  snprintf(info.name, sizeof info.name, "simulated GPU on the host (slow, for tests)");
  info.memory_bytes = memory_limit_;
  info.processors = 4;
  // Each is a fiber of each stream that runs kernels, and to ThreadSanitizer a thread, of which it
  // knows some 8,000.
  info.block_threads = 64;
  return info;
}

// --- Memory -------------------------------------------------------------------------------------

Result SimRuntime::alloc(size_t bytes, Ptr<char>* out) {
  return guarded(
      "alloc",
      [&]() -> Result {
        uint8_t garbage;
        {
          Unseen unseen;
          std::lock_guard<std::mutex> lock(mutex_);
          if (bytes == 0) return misuse("alloc", kInvalidValue, "no bytes");
          if (memory_limit_ - std::min(memory_limit_, allocated_) < bytes)
            return no_memory("alloc", "out of device memory");
          allocated_ += bytes;
          ++allocations_;
          ++allocations_ever_;
          constexpr uint8_t kGarbage[4] = {0xff, 0xfb, 0xcd, 0x7f};
          garbage = kGarbage[random_.below(4)];
        }
        uint64_t address = 0;
        if (add_device_memory(device_, bytes, garbage, &address) != MemoryError::kNone) {
          Unseen unseen;
          std::lock_guard<std::mutex> lock(mutex_);
          allocated_ -= bytes;
          --allocations_;
          --allocations_ever_;
          return no_memory("alloc", kNoHostMemory);
        }
        *out = {address};
        return {};
      },
      Wants::kMemory);
}

void SimRuntime::free(Ptr<char> p) {
  if (!p) return;
  if (health_->failed()) health_->await_idle();
  size_t bytes = 0;
  if (!free_device_memory(device_, p.address, &bytes))
    return fault("free", reinterpret_cast<void*>(p.address));
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  allocated_ -= bytes;
  --allocations_;
}

Result SimRuntime::pin(void* p, size_t bytes, bool read_only) {
  return guarded("pin", [&]() -> Result {
    if (!p || bytes == 0) return misuse("pin", kInvalidValue, "no bytes");
    switch (pin_memory(reinterpret_cast<uint64_t>(p), bytes, read_only)) {
      case MemoryError::kNone:
        return {};
      case MemoryError::kLimit:
        return no_memory("pin", "out of memory that can be pinned");
      case MemoryError::kNoMemory:
        return no_memory("pin", kNoHostMemory);
      case MemoryError::kUnaligned:
        return misuse("pin", kInvalidValue, "not on a page boundary");
      case MemoryError::kUnmapped:
        return misuse("pin", kInvalidValue, "not mapped");
      case MemoryError::kTwice:
        break;
    }
    return misuse("pin", kAlreadyRegistered, "part or all of it is pinned");
  });
}

void SimRuntime::unpin(void* p) {
  if (health_->failed()) health_->await_idle();
  if (!unpin_memory(reinterpret_cast<uint64_t>(p))) fault("unpin", p);
}

Result SimRuntime::kind_of(const void* p, Memory* out) {
  return guarded("kind_of", [&]() -> Result {
    Range range;
    if (!range_of(reinterpret_cast<uint64_t>(p), &range))
      *out = Memory::kPageable;
    else if (range.device == kHostMemory)
      *out = Memory::kPinned;
    else
      *out = range.device == device_ ? Memory::kDevice : Memory::kOther;
    return {};
  });
}

// --- Streams and events -------------------------------------------------------------------------

Result SimRuntime::create_stream(Priority priority, Stream* out) {
  return guarded(
      "create_stream",
      [&]() -> Result {
        streams_.create(priority, out);
        return {};
      },
      Wants::kMemory);
}

void SimRuntime::destroy_stream(Stream s) {
  if (!streams_.destroy(s)) fault("destroy_stream", s.handle);
}

Result SimRuntime::create_event(Event* out) {
  return guarded(
      "create_event",
      [&]() -> Result {
        streams_.create(out);
        return {};
      },
      Wants::kMemory);
}

void SimRuntime::destroy_event(Event e) {
  if (!streams_.destroy(e)) fault("destroy_event", e.handle);
}

Result SimRuntime::capturing(Stream s, bool* out) {
  return guarded("capturing", [&] { return streams_.capturing(s, out); });
}

Result SimRuntime::record(Event e, Stream s) {
  return guarded("record", [&] {
    auto operation = std::make_unique<Operation>();
    operation->kind = Operation::Kind::kRecord;
    operation->mark = std::make_shared<Mark>();
    return streams_.enqueue("record", s, std::move(operation), &e);
  });
}

Result SimRuntime::wait(Stream s, Event e) {
  return guarded("wait", [&] {
    auto operation = std::make_unique<Operation>();
    operation->kind = Operation::Kind::kWait;
    {
      Unseen unseen;
      // What was recorded last before this call; nothing: nothing to wait for.
      const Result result = streams_.mark_of("wait", e, &operation->mark);
      if (!result.ok() || !operation->mark) return result;
    }
    return streams_.enqueue("wait", s, std::move(operation), nullptr);
  });
}

Result SimRuntime::passed(const char* call, Event e, uint64_t timeout_ns, bool* passed) {
  return guarded(call, [&]() -> Result {
    Streams::MarkRef mark;
    {
      Unseen unseen;
      const Result result = streams_.mark_of(call, e, &mark);
      if (!result.ok()) return result;
    }
    *passed = !mark || StreamThread::wait(mark, timeout_ns);
    {
      Unseen unseen;
      mark.reset();
    }
    // Operations that were skipped did not do what the event marks.
    return health_->failed() ? faulted(call) : Result();
  });
}

Result SimRuntime::query(Event e, bool* out) { return passed("query", e, 0, out); }

Result SimRuntime::synchronize(Event e, uint64_t timeout_ns, bool* out) {
  return passed("synchronize", e, std::max<uint64_t>(timeout_ns, 1), out);
}

// --- Work ---------------------------------------------------------------------------------------

// Whether a copy is allowed at all; whether it fits is seen when it runs.
bool SimRuntime::usable(uint64_t address) const {
  Range range;
  return range_of(address, &range) && (range.device == device_ || range.device == kHostMemory);
}

Result SimRuntime::copy(Ptr<char> to, Ptr<char> from, size_t bytes, Stream s) {
  return guarded(
      "copy",
      [&] {
        if (bytes == 0) return Result();
        if (!usable(to.address) || !usable(from.address))
          return misuse("copy", kInvalidValue, "neither memory of the device nor pinned");
        auto operation = std::make_unique<Operation>();
        operation->kind = Operation::Kind::kCopy;
        operation->to = to.address;
        operation->from = from.address;
        operation->bytes = bytes;
        return streams_.enqueue(Streams::kCopy, s, std::move(operation), nullptr);
      },
      Wants::kMemory);
}

Result SimRuntime::fill(Ptr<char> to, int value, size_t bytes, Stream s) {
  return guarded(
      "fill",
      [&] {
        if (bytes == 0) return Result();
        if (!usable(to.address))
          return misuse("fill", kInvalidValue, "neither memory of the device nor pinned");
        auto operation = std::make_unique<Operation>();
        operation->kind = Operation::Kind::kFill;
        operation->to = to.address;
        operation->value = value;
        operation->bytes = bytes;
        return streams_.enqueue(Streams::kFill, s, std::move(operation), nullptr);
      },
      Wants::kMemory);
}

Result SimRuntime::launch(uint32_t kernel, const Shape& shape, const void* arguments, size_t bytes,
                          Stream s) {
  return guarded(
      "launch",
      [&]() -> Result {
        const KernelEntry* entry = nullptr;
        {
          Unseen unseen;
          std::lock_guard<std::mutex> lock(mutex_);
          if (kernel < kTestKernels)
            entry = kernel_entry(kernel);
          else if (kernel - kTestKernels < test_kernel_count_)
            entry = &test_kernels_[kernel - kTestKernels];
        }
        if (!entry || !entry->run)
          return misuse("launch", kInvalidDeviceFunction, "no such kernel");
        if (bytes != entry->bytes || bytes > kMaxArguments)
          return misuse("launch", kInvalidValue, "arguments of another size");
        if (shape.blocks == 0 || shape.blocks > INT32_MAX || shape.threads == 0 ||
            shape.threads > kMaxThreads || shape.threads % kWarp != 0 ||
            shape.shared_bytes > kMaxShared)
          return misuse("launch", kInvalidConfiguration, "no such shape");
        auto operation = std::make_unique<Operation>();
        operation->kind = Operation::Kind::kKernel;
        operation->kernel = entry;
        operation->shape = shape;
        const char* from = static_cast<const char*>(arguments);
        operation->arguments.assign(from, from + bytes);
        return streams_.enqueue("launch", s, std::move(operation), nullptr);
      },
      Wants::kMemory);
}

// --- For tests ----------------------------------------------------------------------------------

void SimRuntime::set_seed(uint64_t seed) {
  streams_.set_seed(seed);
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  random_ = Random(seed);
}

void SimRuntime::set_delays(const Delays& delays) { streams_.set_delays(delays); }

void SimRuntime::fail_after(uint64_t n, ErrorKind kind, bool forever) {
  fail(n, kind, forever, false);
}

void SimRuntime::reset_after(uint64_t n) { fail(n, ErrorKind::kFault, false, true); }

void SimRuntime::exhaust_after(uint64_t n) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  exhausted_in_ = n;
}

void SimRuntime::fail(uint64_t n, ErrorKind kind, bool forever, bool resets) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  fail_in_ = n;
  fail_kind_ = kind;
  fail_forever_ = forever;
  fail_resets_ = resets;
}

uint64_t SimRuntime::calls() const {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

void SimRuntime::set_memory_bytes(uint64_t bytes) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  memory_limit_ = bytes;
}

void SimRuntime::set_capturing(Stream s, bool capturing) { streams_.set_capturing(s, capturing); }

uint64_t SimRuntime::capture_violations() const { return streams_.capture_violations(); }

Live SimRuntime::live() const {
  Live live = {};
  streams_.count(&live);
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  const Pinned pinned = pinned_memory();
  live.allocations = allocations_;
  live.bytes = allocated_;
  live.allocations_ever = allocations_ever_;
  live.pinned = pinned.ranges;
  live.pinned_bytes = pinned.bytes;
  live.pinned_ever = pinned.ever;
  return live;
}

std::vector<std::string> SimRuntime::launched() const { return streams_.launched(); }

std::vector<Priority> SimRuntime::priorities(const char* of) const {
  return streams_.priorities(of);
}

void SimRuntime::set_test_kernels(const KernelEntry* kernels, uint32_t count) {
  Unseen unseen;
  std::lock_guard<std::mutex> lock(mutex_);
  test_kernels_ = kernels;
  test_kernel_count_ = count;
}

}  // namespace

Result open_sim(uint32_t index, std::shared_ptr<Runtime>* out) {
  static std::mutex mutex;
  static int32_t opened = 0;
  static std::weak_ptr<SimRuntime>* const open = new std::weak_ptr<SimRuntime>[kDevices];
  if (index >= kDevices)
    return {ErrorKind::kNoDevice, kNoSuchDevice, "open", "sim has devices 0 to 7"};
  try {
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<SimRuntime> runtime = open[index].lock();
    if (!runtime) {
      runtime = std::make_shared<SimRuntime>(index, ++opened);
      open[index] = runtime;
    }
    *out = std::move(runtime);
    return {};
  } catch (const std::bad_alloc&) {
    return no_memory("open", kNoHostMemory);
  }
}

}  // namespace frugal::device::sim
