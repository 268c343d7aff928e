// The Runtime on the CUDA run-time library, which is linked statically. Its state, also its last
// error, is not that of the library that the host program uses. Both share the driver, which has
// the calling thread's current context and capture mode; Scope restores these.
//
// The driver does not work in a child of fork() once the parent has used it. Such a child gets
// errors from every call here, and must not use the engine of its parent.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/heap.h"
#include "base/os.h"
#include "device/cuda/cuda.h"
#include "device/cuda/kernels.h"

namespace frugal::device {
namespace {

// Shorter waits poll: a sleep takes some 60 us more than was asked for.
constexpr uint64_t kSpinNs = 200'000;
constexpr uint64_t kFirstSleepNs = 5'000;
constexpr uint64_t kLongestSleepNs = 50'000;

ErrorKind kind_of_error(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return ErrorKind::kNone;
    case cudaErrorMemoryAllocation:
      return ErrorKind::kOutOfMemory;
    case cudaErrorInitializationError:
    case cudaErrorStubLibrary:
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorDeviceNotLicensed:
    case cudaErrorStartupFailure:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorDeviceAlreadyInUse:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsServerNotReady:
    case cudaErrorMpsMaxClientsReached:
    case cudaErrorMpsMaxConnectionsReached:
      return ErrorKind::kNoDevice;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidHostPointer:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread:
    // Errors of one call; the device still works.
    case cudaErrorSymbolNotFound:
    case cudaErrorNotPermitted:
    case cudaErrorNotSupported:
      return ErrorKind::kMisuse;
    default:
      // Kernels that went wrong, memory that failed, contexts that are gone, and errors that are
      // not known to be harmless.
      return ErrorKind::kFault;
  }
}

// The result of a call. After a failed one the last error is cleared.
Result told(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  return {kind_of_error(code), static_cast<int32_t>(code), call, cudaGetErrorString(code)};
}

Result misuse(const char* call, const char* text) {
  return {ErrorKind::kMisuse, static_cast<int32_t>(cudaErrorInvalidValue), call, text};
}

#define FRUGAL_CUDA_TRY(name, ...)                         \
  do {                                                     \
    const Result result_ = told(name(__VA_ARGS__), #name); \
    if (!result_.ok()) return result_;                     \
  } while (0)

// The part of the driver's interface that the run-time library does not have.
struct Driver {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;

  Result load() {
    const Result result = find("cuCtxGetCurrent", &get_current);
    return result.ok() ? find("cuCtxSetCurrent", &set_current) : result;
  }

 private:
  template <class F>
  static Result find(const char* name, F* out) {
    void* at = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    FRUGAL_CUDA_TRY(cudaGetDriverEntryPointByVersion, name, &at, CUDART_VERSION, cudaEnableDefault,
                    &found);
    if (found != cudaDriverEntryPointSuccess || at == nullptr)
      return told(cudaErrorSymbolNotFound, "cudaGetDriverEntryPointByVersion");
    *out = reinterpret_cast<F>(at);
    return {};
  }
};

// While it lives, the device is current, and calls that CUDA considers unsafe during a capture are
// allowed. (None of them is on a stream that is being captured.) Afterwards the thread's context
// and mode are as before, even if it had no context or one that the run-time library does not know.
class Scope {
 public:
  Scope(const Driver& driver, int device) : driver_(driver) {
    if (driver_.get_current(&before_) != CUDA_SUCCESS) before_ = nullptr;
    result_ = told(cudaSetDevice(device), "cudaSetDevice");
    exchanged_ = result_.ok() && told(cudaThreadExchangeStreamCaptureMode(&mode_), "").ok();
  }
  ~Scope() {
    if (exchanged_) told(cudaThreadExchangeStreamCaptureMode(&mode_), "");
    driver_.set_current(before_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  const Result& result() const { return result_; }

 private:
  const Driver& driver_;
  CUcontext before_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool exchanged_ = false;
  Result result_;
};

#define FRUGAL_SCOPE                   \
  const Scope scope(driver_, device_); \
  if (!scope.result().ok()) return scope.result()

cudaStream_t stream_of(Stream s) { return static_cast<cudaStream_t>(s.handle); }
cudaEvent_t event_of(Event e) { return static_cast<cudaEvent_t>(e.handle); }
void* pointer_of(Ptr<char> p) { return reinterpret_cast<void*>(p.address); }

class CudaRuntime final : public Runtime {
 public:
  Result open(uint32_t index);

  const char* name() const override { return name_; }
  DeviceInfo info() const override { return info_; }

  Result alloc(size_t bytes, Ptr<char>* out) override {
    FRUGAL_SCOPE;
    void* p = nullptr;
    FRUGAL_CUDA_TRY(cudaMalloc, &p, bytes);
    *out = {reinterpret_cast<uint64_t>(p)};
    return {};
  }

  void free(Ptr<char> p) override {
    const Scope scope(driver_, device_);
    if (scope.result().ok()) told(cudaFree(pointer_of(p)), "cudaFree");
  }

  Result pin(void* p, size_t bytes, bool read_only) override {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (bytes == 0 || reinterpret_cast<uintptr_t>(p) % page != 0)
      return misuse("cudaHostRegister", "memory to pin does not start at a page, or is empty");
    FRUGAL_SCOPE;
    const cudaError_t code = cudaHostRegister(p, bytes,
                                              cudaHostRegisterPortable | cudaHostRegisterMapped |
                                                  (read_only ? cudaHostRegisterReadOnly : 0));
    Result result = told(code, "cudaHostRegister");
    // Codes by which the system refuses to lock memory.
    if (code == cudaErrorOperatingSystem || code == cudaErrorNotSupported ||
        code == cudaErrorNotPermitted)
      result.kind = ErrorKind::kOutOfMemory;
    return result;
  }

  void unpin(void* p) override {
    const Scope scope(driver_, device_);
    if (scope.result().ok()) told(cudaHostUnregister(p), "cudaHostUnregister");
  }

  Result kind_of(const void* p, Memory* out) override {
    FRUGAL_SCOPE;
    return kind_in_scope(p, out);
  }

  Result create_stream(Priority priority, Stream* out) override {
    FRUGAL_SCOPE;
    const int level = priority == Priority::kLow    ? lowest_priority_
                      : priority == Priority::kHigh ? highest_priority_
                                                    : (lowest_priority_ + highest_priority_) / 2;
    cudaStream_t stream = nullptr;
    FRUGAL_CUDA_TRY(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking, level);
    out->handle = stream;
    return {};
  }

  void destroy_stream(Stream s) override {
    if (s.handle == nullptr) return;  // the legacy default stream, which is not ours
    const Scope scope(driver_, device_);
    if (scope.result().ok()) told(cudaStreamDestroy(stream_of(s)), "cudaStreamDestroy");
  }

  Result create_event(Event* out) override {
    FRUGAL_SCOPE;
    cudaEvent_t event = nullptr;
    FRUGAL_CUDA_TRY(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
    out->handle = event;
    return {};
  }

  void destroy_event(Event e) override {
    if (e.handle == nullptr) return;
    const Scope scope(driver_, device_);
    if (scope.result().ok()) told(cudaEventDestroy(event_of(e)), "cudaEventDestroy");
  }

  Result record(Event e, Stream s) override {
    FRUGAL_SCOPE;
    FRUGAL_CUDA_TRY(cudaEventRecord, event_of(e), stream_of(s));
    return {};
  }

  Result wait(Stream s, Event e) override {
    FRUGAL_SCOPE;
    FRUGAL_CUDA_TRY(cudaStreamWaitEvent, stream_of(s), event_of(e), cudaEventWaitDefault);
    return {};
  }

  Result query(Event e, bool* passed) override {
    FRUGAL_SCOPE;
    return query_in_scope(e, passed);
  }

  Result synchronize(Event e, uint64_t timeout_ns, bool* passed) override {
    FRUGAL_SCOPE;
    const uint64_t start = now_ns();
    uint64_t sleep = kFirstSleepNs;
    for (;;) {
      // The time is taken first: a thread that was delayed polls once more before it gives up.
      const uint64_t over = now_ns() - start;
      const Result result = query_in_scope(e, passed);
      if (!result.ok() || *passed || over >= timeout_ns) return result;
      if (over < kSpinNs) {
        cpu_relax();
      } else {
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(sleep, timeout_ns - over)));
        sleep = std::min(2 * sleep, kLongestSleepNs);
      }
    }
  }

  Result capturing(Stream s, bool* out) override {
    FRUGAL_SCOPE;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(stream_of(s), &status);
    const Result result = told(code, "cudaStreamIsCapturing");
    // The legacy default stream during a capture: work in it would end that capture.
    *out = code == cudaErrorStreamCaptureImplicit ||
           (result.ok() && status != cudaStreamCaptureStatusNone);
    return code == cudaErrorStreamCaptureImplicit ? Result() : result;
  }

  Result copy(Ptr<char> to, Ptr<char> from, size_t bytes, Stream s) override {
    if (bytes == 0) return {};
    FRUGAL_SCOPE;
    Result result = check_usable(to, "cudaMemcpyAsync");
    if (result.ok()) result = check_usable(from, "cudaMemcpyAsync");
    if (!result.ok()) return result;
    FRUGAL_CUDA_TRY(cudaMemcpyAsync, pointer_of(to), pointer_of(from), bytes, cudaMemcpyDefault,
                    stream_of(s));
    return {};
  }

  Result fill(Ptr<char> to, int value, size_t bytes, Stream s) override {
    if (bytes == 0) return {};
    FRUGAL_SCOPE;
    const Result result = check_usable(to, "cudaMemsetAsync");
    if (!result.ok()) return result;
    FRUGAL_CUDA_TRY(cudaMemsetAsync, pointer_of(to), value, bytes, stream_of(s));
    return {};
  }

  Result launch(uint32_t kernel, const Shape& shape, const void* arguments, size_t bytes,
                Stream s) override {
    const CudaKernels kernels = cuda_kernels();
    if (kernel >= kernels.count || bytes != kernels.at[kernel].argument_bytes)
      return misuse("cudaLaunchKernel", "no such kernel, or arguments of another one");
    FRUGAL_SCOPE;
    void* parameters[] = {const_cast<void*>(arguments)};
    FRUGAL_CUDA_TRY(cudaLaunchKernel, kernels.at[kernel].function, dim3(shape.blocks),
                    dim3(shape.threads), parameters, shape.shared_bytes, stream_of(s));
    return {};
  }

 private:
  Result kind_in_scope(const void* p, Memory* out) {
    cudaPointerAttributes attributes{};
    FRUGAL_CUDA_TRY(cudaPointerGetAttributes, &attributes, p);
    switch (attributes.type) {
      case cudaMemoryTypeHost:
        // Pageable: pinned by the program without being mapped, or mapped to another address.
        *out = attributes.devicePointer == p ? Memory::kPinned : Memory::kPageable;
        return {};
      case cudaMemoryTypeDevice:
        *out = attributes.device == device_ ? Memory::kDevice : Memory::kOther;
        return {};
      case cudaMemoryTypeManaged:
        *out = Memory::kManaged;
        return {};
      default:
        *out = Memory::kPageable;
        return {};
    }
  }

  // CUDA would copy pageable memory while the host waits, without an error.
  Result check_usable(Ptr<char> p, const char* call) {
    Memory kind = Memory::kPageable;
    const Result result = kind_in_scope(pointer_of(p), &kind);
    if (!result.ok()) return result;
    if (kind == Memory::kPageable) return misuse(call, "host memory that is not pinned and mapped");
    if (kind == Memory::kOther) return misuse(call, "memory of another device");
    return {};
  }

  static Result query_in_scope(Event e, bool* passed) {
    const cudaError_t code = cudaEventQuery(event_of(e));
    const Result result = told(code, "cudaEventQuery");
    *passed = code == cudaSuccess;
    return code == cudaErrorNotReady ? Result() : result;
  }

  Result check_attribute(cudaDeviceAttr attribute, const char* missing);

  Driver driver_;
  int device_ = 0;
  int lowest_priority_ = 0, highest_priority_ = 0;
  char name_[16] = "";
  DeviceInfo info_{};
};

Result CudaRuntime::check_attribute(cudaDeviceAttr attribute, const char* missing) {
  int value = 0;
  FRUGAL_CUDA_TRY(cudaDeviceGetAttribute, &value, attribute, device_);
  if (value == 0)
    return {ErrorKind::kNoDevice, static_cast<int32_t>(cudaErrorNotSupported),
            "cudaDeviceGetAttribute", missing};
  return {};
}

Result CudaRuntime::open(uint32_t index) {
  int count = 0;
  Result result = told(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  // The driver cannot count devices, for whatever reason: there is none that could be used.
  if (!result.ok()) result.kind = ErrorKind::kNoDevice;
  if (result.ok() && index >= static_cast<uint32_t>(count))
    result = told(cudaErrorInvalidDevice, "cudaGetDeviceCount");
  if (result.ok()) result = driver_.load();
  if (!result.ok()) return result;
  device_ = static_cast<int>(index);
  snprintf(name_, sizeof(name_), "cuda:%u", index);

  FRUGAL_SCOPE;
  const struct {
    cudaDeviceAttr attribute;
    const char* missing;
  } needs[] = {
      {cudaDevAttrUnifiedAddressing, "the device has no unified address space"},
      {cudaDevAttrHostRegisterSupported, "the device cannot pin host memory"},
      {cudaDevAttrCanMapHostMemory, "the device cannot map host memory"},
      {cudaDevAttrCanUseHostPointerForRegisteredMem,
       "the device sees pinned host memory at another address than the host"},
  };
  for (const auto& need : needs) {
    result = check_attribute(need.attribute, need.missing);
    if (!result.ok()) return result;
  }
  cudaDeviceProp properties{};
  FRUGAL_CUDA_TRY(cudaGetDeviceProperties, &properties, device_);
  snprintf(info_.name, sizeof(info_.name), "%.127s", properties.name);
  info_.memory_bytes = properties.totalGlobalMem;
  info_.processors = static_cast<uint32_t>(properties.multiProcessorCount);
  info_.compute = static_cast<uint32_t>(properties.major * 10 + properties.minor);
  int pins_read_only = 0;
  FRUGAL_CUDA_TRY(cudaDeviceGetAttribute, &pins_read_only, cudaDevAttrHostRegisterReadOnlySupported,
                  device_);
  info_.pins_read_only = pins_read_only != 0;
  FRUGAL_CUDA_TRY(cudaDeviceGetStreamPriorityRange, &lowest_priority_, &highest_priority_);

  // Code is loaded at its first use, which takes long and may wait for the device. So all of it is
  // loaded now, and not in a step.
  const CudaKernels kernels = cuda_kernels();
  for (uint32_t i = 0; i < kernels.count; ++i) {
    cudaFuncAttributes attributes{};
    FRUGAL_CUDA_TRY(cudaFuncGetAttributes, &attributes, kernels.at[i].function);
  }
  return {};
}

}  // namespace

Result open_cuda(uint32_t index, std::shared_ptr<Runtime>* out) {
  const auto runtime = std::allocate_shared<CudaRuntime>(HeapAllocator<CudaRuntime>());
  Result result = runtime->open(index);
  // No argument of the caller could be wrong here, so the device is unusable.
  if (result.kind == ErrorKind::kMisuse) result.kind = ErrorKind::kNoDevice;
  if (result.ok()) *out = runtime;
  return result;
}

}  // namespace frugal::device
