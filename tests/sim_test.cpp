// The host implementation of the device seam: kernels in fibers, faults, streams, failures.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device/sim/sim.h"
#include "device/simt.h"

namespace frugal::device {
namespace {

using sim::Sim;

constexpr uint64_t kLong = 60'000'000'000;

// --- Kernels ------------------------------------------------------------------------------------

struct SumArgs {
  Ptr<float> in, out;  // out: a sum for each block
  uint32_t count;
};

// Grid-stride loop, shuffles in a warp, shared memory between warps.
void sum_body(const SumArgs& a) {
  float sum = 0;
  for (uint64_t i = uint64_t{block()} * threads() + thread(); i < a.count;
       i += uint64_t{blocks()} * threads())
    sum += load(a.in + i);
  for (uint32_t mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  float* sums = reinterpret_cast<float*>(shared());
  if (lane() == 0) sums[thread() / kWarp] = sum;
  sync();
  if (thread() == 0) {
    float all = 0;
    for (uint32_t w = 0; w < threads() / kWarp; ++w) all += sums[w];
    store(a.out + block(), all);
  }
}

struct Kernels {
  std::vector<sim::KernelEntry> entries;
};

template <class Arguments, void (*body)(const Arguments&)>
constexpr sim::KernelEntry Entry(const char* name) {
  return {name, sizeof(Arguments), [](const void* a) { body(*static_cast<const Arguments*>(a)); }};
}

enum : uint32_t { kSum };
const sim::KernelEntry kKernels[] = {
    Entry<SumArgs, sum_body>("sum"),
};

// --- A device -----------------------------------------------------------------------------------

struct PinnedMemory {
  explicit PinnedMemory(Runtime& device_in, size_t bytes_in) : device(device_in), bytes(bytes_in) {
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_TRUE(device.pin(p, bytes).ok());
  }
  ~PinnedMemory() {
    device.unpin(p);
    munmap(p, bytes);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(p);
  }
  Runtime& device;
  void* p;
  size_t bytes;
};

class SimTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(sim::open_sim(0, &runtime).ok());
    device = static_cast<Sim*>(runtime.get());
    device->set_test_kernels(kKernels, static_cast<uint32_t>(std::size(kKernels)));
  }
  Ptr<char> Alloc(size_t bytes) {
    Ptr<char> p;
    const Result result = device->alloc(bytes, &p);
    EXPECT_TRUE(result.ok()) << result.text;
    return p;
  }
  // Waits for all that the stream has to do.
  Result Finish(Stream s) {
    Event event;
    Result result = device->create_event(&event);
    if (!result.ok()) return result;
    result = device->record(event, s);
    bool passed = false;
    if (result.ok()) result = device->synchronize(event, kLong, &passed);
    device->destroy_event(event);
    EXPECT_TRUE(passed || !result.ok());
    return result;
  }
  template <class Arguments>
  Result Launch(uint32_t kernel, const Shape& shape, const Arguments& arguments, Stream s = {}) {
    return device->launch(Sim::kTestKernels + kernel, shape, &arguments, sizeof arguments, s);
  }
  std::shared_ptr<Runtime> runtime;
  Sim* device = nullptr;
};

TEST_F(SimTest, SumOfBlocks) {
  constexpr uint32_t kCount = 10'000, kBlocks = 7;
  PinnedMemory in(*device, kCount * 4), out(*device, 4096);
  for (uint32_t i = 0; i < kCount; ++i) in.as<float>()[i] = static_cast<float>(i % 17);
  const SumArgs arguments = {as<float>(Runtime::visible(in.p)), as<float>(Runtime::visible(out.p)),
                             kCount};
  ASSERT_TRUE(Launch(kSum, {kBlocks, 256, 256 / kWarp * 4}, arguments).ok());
  const Result result = Finish({});
  ASSERT_TRUE(result.ok()) << result.text;
  float sum = 0, expected = 0;
  for (uint32_t i = 0; i < kBlocks; ++i) sum += out.as<float>()[i];
  for (uint32_t i = 0; i < kCount; ++i) expected += in.as<float>()[i];
  EXPECT_EQ(sum, expected);
}

}  // namespace
}  // namespace frugal::device
