// lib/device/cuda/runtime.cpp on a stand-in for CUDA with two devices: arguments of each call,
// preloaded kernels, refusals, the kind of each error.
//
// The caller's context, capture mode and last error stay unchanged, whichever call fails. What CUDA
// itself does is not tested here.
#include "device/runtime.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

#include "base/heap.h"
#include "device/cuda/kernels.h"
#include "fake_cudart.h"

using namespace frugal::device;
using fake::find_call;

namespace {

const CUcontext kForeign = reinterpret_cast<CUcontext>(uintptr_t{0xabc});

class CudaRuntime : public testing::Test {
 protected:
  void SetUp() override {
    fake::reset();
    fake::state().expected_device = 1;
    fake::set_context(kForeign);
    ASSERT_TRUE(open_runtime("cuda:1", &runtime).ok());
    at_open = fake::state();
    fake::state().calls.clear();
    pinned = pointer(0x10000, cudaMemoryTypeHost, 0);
    device = pointer(0x20000, cudaMemoryTypeDevice, 1);
  }
  void TearDown() override {
    EXPECT_EQ(fake::context(), kForeign);
    EXPECT_EQ(fake::capture_mode(), cudaStreamCaptureModeGlobal);
    EXPECT_EQ(fake::last_error(), cudaSuccess);
    EXPECT_EQ(fake::state().misplaced, std::vector<std::string>());
  }

  static Ptr<char> pointer(uint64_t address, cudaMemoryType type, int device) {
    cudaPointerAttributes a{};
    a.type = type;
    a.device = device;
    a.devicePointer = a.hostPointer = reinterpret_cast<void*>(address);
    fake::state().pointers[a.devicePointer] = a;
    return {address};
  }
  Memory kind(uint64_t address) {
    Memory out = Memory::kManaged;
    EXPECT_TRUE(runtime->kind_of(reinterpret_cast<void*>(address), &out).ok());
    return out;
  }

  std::shared_ptr<Runtime> runtime;
  fake::State at_open;
  Ptr<char> pinned, device;
  const Stream stream{reinterpret_cast<void*>(0x51)};
  const Event event{reinterpret_cast<void*>(0xe1)};
};

TEST_F(CudaRuntime, OpenLoadsAllKernels) {
  EXPECT_EQ(at_open.loaded.size(), cuda_kernels().count);
  EXPECT_STREQ(runtime->name(), "cuda:1");
  const DeviceInfo info = runtime->info();
  EXPECT_EQ(std::string(info.name), std::string(127, 'x'));
  EXPECT_EQ(info.memory_bytes, uint64_t{80} << 30);
  EXPECT_EQ(info.processors, 132u);
  EXPECT_EQ(info.compute, 90u);
}

TEST_F(CudaRuntime, IsOneWhileItLives) {
  std::shared_ptr<Runtime> again;
  ASSERT_TRUE(open_runtime("cuda:1", &again).ok());
  EXPECT_EQ(again, runtime);
  EXPECT_EQ(find_call("cudaFuncGetAttributes"), nullptr);
  again.reset();
  runtime.reset();
  ASSERT_TRUE(open_runtime("cuda:1", &again).ok());
  EXPECT_NE(find_call("cudaFuncGetAttributes"), nullptr);
}

// Every call of the device interface that asks CUDA for something, and the CUDA call that it makes.
struct Use {
  const char* call;
  std::function<Result(Runtime&)> use;
};
std::vector<Use> uses(Ptr<char> pinned, Ptr<char> device, Stream s, Event e) {
  return {
      {"cudaMalloc",
       [](Runtime& r) {
         Ptr<char> p;
         return r.alloc(100, &p);
       }},
      {"cudaHostRegister",
       [](Runtime& r) { return r.pin(reinterpret_cast<void*>(0x30000), 4096); }},
      {"cudaPointerGetAttributes",
       [](Runtime& r) {
         Memory m;
         return r.kind_of(nullptr, &m);
       }},
      {"cudaStreamCreateWithPriority",
       [](Runtime& r) {
         Stream s;
         return r.create_stream(Priority::kLow, &s);
       }},
      {"cudaEventCreateWithFlags",
       [](Runtime& r) {
         Event e;
         return r.create_event(&e);
       }},
      {"cudaEventRecord", [=](Runtime& r) { return r.record(e, s); }},
      {"cudaStreamWaitEvent", [=](Runtime& r) { return r.wait(s, e); }},
      {"cudaEventQuery",
       [=](Runtime& r) {
         bool b;
         return r.query(e, &b);
       }},
      {"cudaEventQuery",
       [=](Runtime& r) {
         bool b;
         return r.synchronize(e, 1'000'000, &b);
       }},
      {"cudaStreamIsCapturing",
       [=](Runtime& r) {
         bool b;
         return r.capturing(s, &b);
       }},
      {"cudaMemcpyAsync", [=](Runtime& r) { return r.copy(device, pinned, 64, s); }},
      {"cudaPointerGetAttributes", [=](Runtime& r) { return r.copy(device, pinned, 64, s); }},
      {"cudaMemsetAsync", [=](Runtime& r) { return r.fill(device, 0, 64, s); }},
      {"cudaLaunchKernel",
       [=](Runtime& r) {
         uint64_t a = 0;
         return r.launch(0, Shape(), &a, sizeof(a), s);
       }},
  };
}

// TearDown checks the caller's context and mode.
TEST_F(CudaRuntime, LeavesTheCallersContextAndModeAlone) {
  for (const Use& use : uses(pinned, device, stream, event)) {
    for (const CUcontext context : {CUcontext(nullptr), kForeign, fake::primary(0)}) {
      for (const char* fails : {"", use.call, "cudaSetDevice"}) {
        SCOPED_TRACE(std::string(use.call) + " while this fails: " + fails);
        if (*fails != '\0') fake::state().fails[fails] = cudaErrorIllegalAddress;
        fake::set_context(context);
        const Result result = use.use(*runtime);
        EXPECT_EQ(result.ok(), *fails == '\0');
        EXPECT_EQ(std::string(result.call), fails);
        EXPECT_EQ(fake::context(), context);
        EXPECT_EQ(fake::capture_mode(), cudaStreamCaptureModeGlobal);
        EXPECT_EQ(fake::last_error(), cudaSuccess);
        fake::state().fails.clear();
      }
    }
  }
  fake::set_context(kForeign);
  fake::state().fails = {{"cudaFree", cudaErrorIllegalAddress},
                         {"cudaHostUnregister", cudaErrorHostMemoryNotRegistered},
                         {"cudaStreamDestroy", cudaErrorInvalidResourceHandle},
                         {"cudaEventDestroy", cudaErrorInvalidResourceHandle}};
  runtime->free(device);
  runtime->unpin(reinterpret_cast<void*>(0x30000));
  runtime->destroy_stream(stream);
  runtime->destroy_event(event);
  for (const auto& fails : fake::state().fails) EXPECT_NE(find_call(fails.first), nullptr);
}

TEST_F(CudaRuntime, TellsWhatFailed) {
  const std::pair<cudaError_t, ErrorKind> kinds[] = {
      {cudaErrorMemoryAllocation, ErrorKind::kOutOfMemory},
      {cudaErrorInsufficientDriver, ErrorKind::kNoDevice},
      {cudaErrorNoDevice, ErrorKind::kNoDevice},
      {cudaErrorInvalidValue, ErrorKind::kMisuse},
      {cudaErrorInvalidResourceHandle, ErrorKind::kMisuse},
      {cudaErrorStreamCaptureUnsupported, ErrorKind::kMisuse},
      {cudaErrorLaunchOutOfResources, ErrorKind::kMisuse},
      {cudaErrorIllegalAddress, ErrorKind::kFault},
      {cudaErrorMisalignedAddress, ErrorKind::kFault},
      {cudaErrorLaunchFailure, ErrorKind::kFault},
      {cudaErrorECCUncorrectable, ErrorKind::kFault},
      {cudaErrorContextIsDestroyed, ErrorKind::kFault},
      {cudaErrorUnknown, ErrorKind::kFault},
  };
  for (const auto& [code, kind] : kinds) {
    for (const Use& use : uses(pinned, device, stream, event)) {
      fake::state().fails = {{use.call, code}};
      const Result result = use.use(*runtime);
      EXPECT_EQ(result.kind, kind) << use.call << " " << code;
      EXPECT_EQ(result.code, code);
      EXPECT_STREQ(result.call, use.call);
      EXPECT_EQ(result.text, "error " + std::to_string(code));
    }
  }
}

// What the driver refuses one call is no end of the device.
TEST_F(CudaRuntime, RefusalsAreNotForEver) {
  for (const cudaError_t code :
       {cudaErrorNotSupported, cudaErrorNotPermitted, cudaErrorSymbolNotFound}) {
    for (const Use& use : uses(pinned, device, stream, event)) {
      const bool pins =
          std::string(use.call) == "cudaHostRegister" && code != cudaErrorSymbolNotFound;
      for (const char* call : {use.call, "cudaSetDevice"}) {
        fake::state().fails = {{call, code}};
        EXPECT_EQ(use.use(*runtime).kind,
                  pins && call == use.call ? ErrorKind::kOutOfMemory : ErrorKind::kMisuse)
            << use.call << " " << code;
      }
    }
  }
}

TEST_F(CudaRuntime, PinsMappedAndPortable) {
  void* page = reinterpret_cast<void*>(0x30000);
  ASSERT_TRUE(runtime->pin(page, 8192).ok());
  EXPECT_EQ(
      find_call("cudaHostRegister")->arguments,
      (std::vector<uint64_t>{0x30000, 8192, cudaHostRegisterMapped | cudaHostRegisterPortable}));
  fake::state().calls.clear();
  ASSERT_TRUE(runtime->pin(page, 8192, true).ok());
  EXPECT_EQ(find_call("cudaHostRegister")->arguments,
            (std::vector<uint64_t>{
                0x30000, 8192,
                cudaHostRegisterMapped | cudaHostRegisterPortable | cudaHostRegisterReadOnly}));
  for (const cudaError_t code : {cudaErrorMemoryAllocation, cudaErrorOperatingSystem,
                                 cudaErrorNotSupported, cudaErrorNotPermitted}) {
    fake::state().fails["cudaHostRegister"] = code;
    EXPECT_EQ(runtime->pin(page, 8192).kind, ErrorKind::kOutOfMemory);
  }
  fake::state().fails["cudaHostRegister"] = cudaErrorHostMemoryAlreadyRegistered;
  EXPECT_EQ(runtime->pin(page, 8192).kind, ErrorKind::kMisuse);
  fake::state().calls.clear();
  EXPECT_EQ(runtime->pin(reinterpret_cast<void*>(0x30010), 8192).kind, ErrorKind::kMisuse);
  EXPECT_EQ(runtime->pin(page, 0).kind, ErrorKind::kMisuse);
  EXPECT_EQ(find_call("cudaHostRegister"), nullptr);
}

TEST_F(CudaRuntime, StreamsDoNotWaitForTheDefaultStreamAndDifferInPriority) {
  std::vector<uint64_t> levels;
  for (const Priority priority : {Priority::kLow, Priority::kNormal, Priority::kHigh}) {
    Stream s;
    ASSERT_TRUE(runtime->create_stream(priority, &s).ok());
    EXPECT_NE(s.handle, nullptr);
    EXPECT_EQ(find_call("cudaStreamCreateWithPriority")->arguments[0], cudaStreamNonBlocking);
    levels.push_back(find_call("cudaStreamCreateWithPriority")->arguments[1]);
  }
  EXPECT_EQ(levels,
            (std::vector<uint64_t>{0, static_cast<uint64_t>(-2), static_cast<uint64_t>(-5)}));
  Event e;
  ASSERT_TRUE(runtime->create_event(&e).ok());
  EXPECT_EQ(find_call("cudaEventCreateWithFlags")->arguments[0], cudaEventDisableTiming);
  runtime->destroy_stream(Stream());
  EXPECT_EQ(find_call("cudaStreamDestroy"), nullptr);
}

TEST_F(CudaRuntime, KnowsKindsOfMemory) {
  EXPECT_EQ(kind(pinned.address), Memory::kPinned);
  EXPECT_EQ(kind(device.address), Memory::kDevice);
  EXPECT_EQ(kind(pointer(0x40000, cudaMemoryTypeDevice, 0).address), Memory::kOther);
  EXPECT_EQ(kind(pointer(0x50000, cudaMemoryTypeManaged, 0).address), Memory::kManaged);
  EXPECT_EQ(kind(0x60000), Memory::kPageable);
  // Pinned, but at another address for kernels, or at none.
  pointer(0x70000, cudaMemoryTypeHost, 0);
  for (void* seen : {static_cast<void*>(nullptr), reinterpret_cast<void*>(0x90000)}) {
    fake::state().pointers[reinterpret_cast<void*>(0x70000)].devicePointer = seen;
    EXPECT_EQ(kind(0x70000), Memory::kPageable);
  }
}

TEST_F(CudaRuntime, CopiesRefusePageableMemoryAndThatOfOtherDevices) {
  const Ptr<char> pageable{0x60000}, other = pointer(0x40000, cudaMemoryTypeDevice, 0);
  for (const auto& [to, from] : std::initializer_list<std::pair<Ptr<char>, Ptr<char>>>{
           {device, pageable}, {pageable, device}, {device, other}, {other, pinned}})
    EXPECT_EQ(runtime->copy(to, from, 64, stream).kind, ErrorKind::kMisuse);
  EXPECT_EQ(runtime->fill(pageable, 0, 64, stream).kind, ErrorKind::kMisuse);
  EXPECT_EQ(find_call("cudaMemcpyAsync"), nullptr);
  EXPECT_EQ(find_call("cudaMemsetAsync"), nullptr);

  ASSERT_TRUE(runtime->copy(pageable, pageable, 0, stream).ok());
  ASSERT_TRUE(runtime->copy(device, pinned, uint64_t{5} << 32, stream).ok());
  EXPECT_EQ(find_call("cudaMemcpyAsync")->arguments,
            (std::vector<uint64_t>{device.address, pinned.address, uint64_t{5} << 32,
                                   cudaMemcpyDefault, 0x51}));
  ASSERT_TRUE(runtime->fill(pinned, 7, 64, stream).ok());
  EXPECT_EQ(find_call("cudaMemsetAsync")->arguments,
            (std::vector<uint64_t>{pinned.address, 7, 64, 0x51}));
}

TEST_F(CudaRuntime, WaitsUntilAnEventHasPassed) {
  bool passed = true;
  fake::state().queries_until_passed = 1;
  ASSERT_TRUE(runtime->query(event, &passed).ok());
  EXPECT_FALSE(passed);
  ASSERT_TRUE(runtime->query(event, &passed).ok());
  EXPECT_TRUE(passed);

  // Beyond what is spun: the last ones are after sleeps.
  passed = false;
  fake::state().queries = 0;
  fake::state().queries_until_passed = 100'000'000;
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(runtime->synchronize(event, 20'000'000, &passed).ok());
  EXPECT_FALSE(passed);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
  const int queries = fake::state().queries;
  EXPECT_GE(queries, 2);
  // A thread that only spun would ask hundreds of thousands of times.
  EXPECT_LT(queries, 20'000);

  fake::state().queries_until_passed = queries + 3;
  ASSERT_TRUE(runtime->synchronize(event, uint64_t{60'000'000'000}, &passed).ok());
  EXPECT_TRUE(passed);
  EXPECT_EQ(fake::state().queries, queries + 4);
}

TEST_F(CudaRuntime, KnowsCaptures) {
  bool out = true;
  ASSERT_TRUE(runtime->capturing(stream, &out).ok());
  EXPECT_FALSE(out);
  for (const auto status : {cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated}) {
    fake::state().capture = status;
    out = false;
    ASSERT_TRUE(runtime->capturing(stream, &out).ok());
    EXPECT_TRUE(out);
  }
  fake::state().capture = cudaStreamCaptureStatusNone;
  fake::state().fails["cudaStreamIsCapturing"] = cudaErrorStreamCaptureImplicit;
  out = false;
  ASSERT_TRUE(runtime->capturing(Stream(), &out).ok());
  EXPECT_TRUE(out);
}

TEST_F(CudaRuntime, Launches) {
  const uint64_t arguments[3] = {11, 22, 33};
  ASSERT_TRUE(runtime->launch(2, {7, 128, 512}, arguments, 24, stream).ok());
  EXPECT_EQ(find_call("cudaLaunchKernel")->arguments,
            (std::vector<uint64_t>{reinterpret_cast<uint64_t>(cuda_kernels().at[2].function), 7,
                                   128, 11, 512, 0x51}));
  fake::state().calls.clear();
  EXPECT_EQ(runtime->launch(3, Shape(), arguments, 24, stream).kind, ErrorKind::kMisuse);
  EXPECT_EQ(runtime->launch(1, Shape(), arguments, 24, stream).kind, ErrorKind::kMisuse);
  EXPECT_EQ(find_call("cudaLaunchKernel"), nullptr);
}

class CudaOpen : public testing::Test {
 protected:
  void SetUp() override {
    fake::reset();
    fake::set_context(kForeign);
  }
  void TearDown() override {
    EXPECT_EQ(out, nullptr);
    EXPECT_EQ(fake::context(), kForeign);
    EXPECT_EQ(fake::capture_mode(), cudaStreamCaptureModeGlobal);
    EXPECT_EQ(fake::last_error(), cudaSuccess);
  }
  std::shared_ptr<Runtime> out;
};

TEST_F(CudaOpen, TellsWhyNot) {
  EXPECT_EQ(open_runtime("cuda:2", &out).code, cudaErrorInvalidDevice);
  EXPECT_EQ(open_runtime("cuda:2", &out).kind, ErrorKind::kNoDevice);
  for (const char* call : {"cudaGetDeviceCount", "cudaGetDriverEntryPointByVersion",
                           "cudaSetDevice", "cudaDeviceGetAttribute", "cudaGetDeviceProperties",
                           "cudaDeviceGetStreamPriorityRange", "cudaFuncGetAttributes"}) {
    for (const cudaError_t code :
         {cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice, cudaErrorNotSupported,
          cudaErrorNotPermitted, cudaErrorSymbolNotFound, cudaErrorInvalidDeviceFunction}) {
      fake::state().fails = {{call, code}};
      const Result result = open_runtime("cuda:0", &out);
      EXPECT_EQ(result.kind, ErrorKind::kNoDevice) << call;
      EXPECT_EQ(result.code, code);
      EXPECT_STREQ(result.call, call);
    }
  }
  fake::state().fails = {{"cudaGetDeviceCount", cudaErrorUnknown}};
  EXPECT_EQ(open_runtime("cuda:0", &out).kind, ErrorKind::kNoDevice);
  fake::state().fails = {{"cudaSetDevice", cudaErrorMemoryAllocation}};
  EXPECT_EQ(open_runtime("cuda:0", &out).kind, ErrorKind::kOutOfMemory);
  fake::state().fails = {{"cudaSetDevice", cudaErrorIllegalAddress}};
  EXPECT_EQ(open_runtime("cuda:0", &out).kind, ErrorKind::kFault);
}

TEST_F(CudaOpen, RefusesDevicesThatSeeHostMemoryOtherwise) {
  for (const cudaDeviceAttr attribute :
       {cudaDevAttrUnifiedAddressing, cudaDevAttrHostRegisterSupported, cudaDevAttrCanMapHostMemory,
        cudaDevAttrCanUseHostPointerForRegisteredMem}) {
    fake::state().attributes = {{attribute, 0}};
    const Result result = open_runtime("cuda:0", &out);
    EXPECT_EQ(result.kind, ErrorKind::kNoDevice);
    EXPECT_EQ(result.code, cudaErrorNotSupported);
    EXPECT_NE(std::string(result.text), "");
  }
}

TEST_F(CudaOpen, WithoutMemory) {
  int64_t n = 1;
  for (;; ++n) {
    frugal::heap_test_fail_after(n);
    const Result result = open_runtime("cuda:0", &out);
    if (frugal::heap_test_fail_after(0) > 0) {
      EXPECT_TRUE(result.ok());
      break;
    }
    ASSERT_EQ(result.kind, ErrorKind::kOutOfMemory);
    ASSERT_EQ(out, nullptr);
  }
  EXPECT_GT(n, 2);  // there was something to fail
  out.reset();
}

TEST_F(CudaOpen, TellsWhetherMemoryThatCannotBeWrittenIsPinned) {
  ASSERT_TRUE(open_runtime("cuda:0", &out).ok());
  EXPECT_TRUE(out->info().pins_read_only);
  out.reset();
  fake::state().attributes = {{cudaDevAttrHostRegisterReadOnlySupported, 0}};
  ASSERT_TRUE(open_runtime("cuda:0", &out).ok());
  EXPECT_FALSE(out->info().pins_read_only);
  out.reset();
}

}  // namespace
