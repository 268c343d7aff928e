// A device that cannot be opened gives a result with CUDA's code and text: no driver, no visible
// GPU, an unknown name, no CUDA.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>

#include <thread>
#include <vector>

#include "device/runtime.h"

using frugal::device::ErrorKind;
using frugal::device::open_runtime;
using frugal::device::Result;
using frugal::device::Runtime;

namespace {

TEST(DeviceOpen, NamesOfNoDevice) {
  for (const char* name :
       {"", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:00", "cuda:01",
        "cuda:1 ", "cuda:65536", "cuda:18446744073709551616", "CUDA:0", "cudax:0", "cpu:0", "sim",
        "sim:", "sim:x"}) {
    std::shared_ptr<Runtime> out;
    const Result result = open_runtime(name, &out);
    EXPECT_EQ(result.kind, ErrorKind::kNoDevice) << name;
    EXPECT_STREQ(result.text, "the name of a device is cuda:N") << name;
    EXPECT_EQ(out, nullptr);
  }
}

// Several threads at once, and again after it has failed.
TEST(DeviceOpen, NoGpu) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 3; ++i) {
        std::shared_ptr<Runtime> out;
        const Result result = open_runtime(t % 2 == 0 ? "cuda:0" : "cuda:7", &out);
        EXPECT_EQ(result.kind, ErrorKind::kNoDevice);
        EXPECT_EQ(out, nullptr);
#if FRUGAL_WITH_CUDA
        // 35: no driver, or one that is too old; 100: a driver that sees no GPU.
        EXPECT_TRUE(result.code == 35 || result.code == 100) << result.code;
        EXPECT_STREQ(result.call, "cudaGetDeviceCount");
        EXPECT_GT(strlen(result.text), 10u);
#else
        EXPECT_EQ(result.code, 0);
        EXPECT_STREQ(result.text, "this build has no CUDA");
#endif
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);  // the driver reads it when it is first asked
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
