// A device that cannot be opened gives a result with CUDA's code and text: no driver, no visible
// GPU, an unknown name, no CUDA.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "device/runtime.h"

using frugal::device::DeviceKind;
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

std::atomic<bool> g_opening{false}, g_may_open{false};

// Device 0 of this kind takes its time.
Result open_slowly(uint32_t index, std::shared_ptr<Runtime>*) {
  if (index == 0) {
    g_opening.store(true);
    while (!g_may_open.load()) std::this_thread::yield();
  }
  return {ErrorKind::kNoDevice, static_cast<int>(index), "open", "a test's device"};
}

// A child that is forked meanwhile opens a device of its own.
TEST(DeviceOpen, InAChildOfAProcessThatOpensOne) {
  static const DeviceKind kind{"slow", open_slowly, [] { return false; },
                               [](uint64_t) { return false; }};
  register_devices(&kind);
  std::thread opens([] {
    std::shared_ptr<Runtime> out;
    EXPECT_STREQ(open_runtime("slow:0", &out).text, "a test's device");
  });
  while (!g_opening.load()) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    std::shared_ptr<Runtime> out;
    _exit(open_runtime("slow:7", &out).code);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  g_may_open.store(true);
  opens.join();
  frugal::device::register_devices(nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);  // the driver reads it when it is first asked
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
