// A stand-in for the CUDA run-time library and driver, with two devices that do nothing. It records
// the calls of lib/device/cuda/runtime.cpp, and can make each of them fail.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake {

constexpr int kDevices = 2;

// One call: its name, and those of its arguments that matter, by call.
struct Call {
  std::string name;
  std::vector<uint64_t> arguments;
};

struct State {
  std::vector<Call> calls;                                // since the last clear()
  std::map<std::string, cudaError_t> fails;               // call -> what it returns
  std::map<cudaDeviceAttr, int> attributes;               // 1 if not named
  std::map<const void*, cudaPointerAttributes> pointers;  // pageable if not named
  int queries_until_passed = 0;                           // of an event
  int queries = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  std::set<const void*> loaded;  // kernels, by cudaFuncGetAttributes
  // Calls without the device, or in a mode other than relaxed, that could end a capture.
  std::vector<std::string> misplaced;
  int expected_device = 0;
};

State& state();
void reset();

// Of the calling thread.
CUcontext context();
void set_context(CUcontext c);
cudaStreamCaptureMode capture_mode();
void set_capture_mode(cudaStreamCaptureMode mode);
cudaError_t last_error();
CUcontext primary(int device);  // what cudaSetDevice makes current

const Call* find_call(const std::string& name);  // the last one; null: none

}  // namespace fake
