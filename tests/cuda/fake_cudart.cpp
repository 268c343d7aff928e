#include "fake_cudart.h"

#include <cstdio>
#include <cstring>

#include "device/cuda/kernels.h"

namespace fake {
namespace {

State g_state;
thread_local CUcontext t_context = nullptr;
thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t t_last = cudaSuccess;

template <class T>
uint64_t number(T v) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<uint64_t>(v);
  else
    return static_cast<uint64_t>(v);
}

// A call that belongs onto the device, and would be unsafe during a capture.
template <class... T>
cudaError_t on_device(const char* name, T... arguments) {
  g_state.calls.push_back({name, {number(arguments)...}});
  if (t_context != primary(g_state.expected_device) || t_mode != cudaStreamCaptureModeRelaxed)
    g_state.misplaced.push_back(name);
  const auto fails = g_state.fails.find(name);
  if (fails == g_state.fails.end()) return cudaSuccess;
  return t_last = fails->second;
}

// A call that needs no device.
template <class... T>
cudaError_t anywhere(const char* name, T... arguments) {
  g_state.calls.push_back({name, {number(arguments)...}});
  const auto fails = g_state.fails.find(name);
  if (fails == g_state.fails.end()) return cudaSuccess;
  return t_last = fails->second;
}

CUresult get_current(CUcontext* out) {
  *out = t_context;
  return CUDA_SUCCESS;
}

CUresult set_current(CUcontext c) {
  t_context = c;
  return CUDA_SUCCESS;
}

}  // namespace

State& state() { return g_state; }
void reset() {
  g_state = State();
  t_context = nullptr;
  t_mode = cudaStreamCaptureModeGlobal;
  t_last = cudaSuccess;
}
CUcontext context() { return t_context; }
void set_context(CUcontext c) { t_context = c; }
cudaStreamCaptureMode capture_mode() { return t_mode; }
void set_capture_mode(cudaStreamCaptureMode mode) { t_mode = mode; }
cudaError_t last_error() { return t_last; }
CUcontext primary(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(0x1000 + device));
}
const Call* find_call(const std::string& name) {
  for (auto call = g_state.calls.rbegin(); call != g_state.calls.rend(); ++call)
    if (call->name == name) return &*call;
  return nullptr;
}

}  // namespace fake

using fake::anywhere;
using fake::on_device;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t last = fake::t_last;
  fake::t_last = cudaSuccess;
  return last;
}

const char* cudaGetErrorString(cudaError_t code) {
  static char texts[1024][16];
  snprintf(texts[code], sizeof(texts[code]), "error %d", static_cast<int>(code));
  return texts[code];
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const cudaError_t code = anywhere("cudaGetDriverEntryPointByVersion");
  if (code != cudaSuccess) return code;
  *found = cudaDriverEntryPointSuccess;
  *out = nullptr;
  if (strcmp(name, "cuCtxGetCurrent") == 0) *out = reinterpret_cast<void*>(&fake::get_current);
  if (strcmp(name, "cuCtxSetCurrent") == 0) *out = reinterpret_cast<void*>(&fake::set_current);
  if (*out == nullptr) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const cudaError_t code = anywhere("cudaGetDeviceCount");
  *count = code == cudaSuccess ? fake::kDevices : 0;
  return code;
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t code = anywhere("cudaSetDevice", device);
  if (code == cudaSuccess) fake::t_context = fake::primary(device);
  return code;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake::t_mode);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const cudaError_t code = anywhere("cudaDeviceGetAttribute", device);
  const auto& known = fake::g_state.attributes;
  *value = known.count(attribute) ? known.at(attribute) : 1;
  return code;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  *out = cudaDeviceProp();
  // As long as it can be.
  memset(out->name, 'x', sizeof(out->name) - 1);
  out->totalGlobalMem = size_t{80} << 30;
  out->multiProcessorCount = 132;
  out->major = 9;
  return anywhere("cudaGetDeviceProperties", device);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0, *highest = -5;
  return on_device("cudaDeviceGetStreamPriorityRange");
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* function) {
  const cudaError_t code = on_device("cudaFuncGetAttributes", function);
  if (code == cudaSuccess) fake::g_state.loaded.insert(function);
  return code;
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  const cudaError_t code = on_device("cudaMalloc", bytes);
  if (code == cudaSuccess) *out = reinterpret_cast<void*>(uintptr_t{0x7000'0000'0000});
  return code;
}
cudaError_t cudaFree(void* p) { return on_device("cudaFree", p); }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
  return on_device("cudaHostRegister", p, bytes, flags);
}
cudaError_t cudaHostUnregister(void* p) { return on_device("cudaHostUnregister", p); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  const auto& known = fake::g_state.pointers;
  *out = known.count(p) ? known.at(p) : cudaPointerAttributes{};
  return on_device("cudaPointerGetAttributes", p);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  *out = reinterpret_cast<cudaStream_t>(uintptr_t{0x51});
  return on_device("cudaStreamCreateWithPriority", flags, priority);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return on_device("cudaStreamDestroy", s); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* out) {
  *out = fake::g_state.capture;
  return on_device("cudaStreamIsCapturing", s);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  return on_device("cudaStreamWaitEvent", s, e, flags);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  *out = reinterpret_cast<cudaEvent_t>(uintptr_t{0xe1});
  return on_device("cudaEventCreateWithFlags", flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) { return on_device("cudaEventDestroy", e); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return on_device("cudaEventRecord", e, s);
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  const cudaError_t code = on_device("cudaEventQuery", e);
  if (code != cudaSuccess) return code;
  return fake::g_state.queries++ < fake::g_state.queries_until_passed
             ? fake::t_last = cudaErrorNotReady
             : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s) {
  return on_device("cudaMemcpyAsync", to, from, bytes, kind, s);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t s) {
  return on_device("cudaMemsetAsync", to, value, bytes, s);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments,
                             size_t shared, cudaStream_t s) {
  return on_device("cudaLaunchKernel", function, grid.x, threads.x,
                   *static_cast<const uint64_t*>(arguments[0]), shared, s);
}

}  // extern "C"

namespace frugal::device {

// Three kernels of 8, 16 and 24 bytes of arguments.
CudaKernels cuda_kernels() {
  static const char code[3] = {};
  static const CudaKernel all[] = {{"a", code, 8}, {"b", code + 1, 16}, {"c", code + 2, 24}};
  return {all, 3};
}

}  // namespace frugal::device
