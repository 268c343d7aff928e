// Pointers to a GPU that only the program uses are recognized through the driver that the program
// has loaded, and not earlier.
//
// A stand-in takes the place of the driver's library.
#include "device/pointers.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "frugal.h"

namespace {

const void* at(uint64_t address) { return reinterpret_cast<const void*>(address); }

// A check takes the loader's lock. A child whose fork came in the middle of another thread's check
// does not get that lock back. (Only before a driver is found: then no check takes it any more.)
TEST(Pointers, ForksBesideLooks) {
  std::atomic<bool> stop{false};
  std::atomic<int> looking{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      for (++looking; !stop;) frugal::device::look_for_devices();
    });
  while (looking < 3) std::this_thread::yield();
  bool failed = false;
  for (int fork_number = 0; fork_number < 200 && !failed; ++fork_number) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // ends a child that hangs, so that the test fails
      _exit(dlopen(FAKE_LIBCUDA, RTLD_NOW) ? 0 : 1);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) failed = true;
    EXPECT_EQ(status, 0) << "fork " << fork_number;
  }
  stop = true;
  for (std::thread& t : threads) t.join();
}

TEST(Pointers, OfADriverThatComesLate) {
  using frugal::device::any_only_on_device;
  using frugal::device::look_for_devices;
  using frugal::device::only_on_device;
  constexpr uint64_t kDevice = uint64_t{1} << 40, kManaged = uint64_t{2} << 40,
                     kPinned = uint64_t{3} << 40;
  look_for_devices();
  EXPECT_FALSE(only_on_device(at(kDevice)));
  ASSERT_NE(dlopen(FAKE_LIBCUDA, RTLD_NOW), nullptr) << dlerror();
  EXPECT_FALSE(only_on_device(at(kDevice)));  // no thread has checked
  EXPECT_FALSE(any_only_on_device());
  look_for_devices();
  EXPECT_TRUE(any_only_on_device());
  int host = 0;
  EXPECT_TRUE(only_on_device(at(kDevice)));
  EXPECT_FALSE(only_on_device(at(kManaged)));
  EXPECT_FALSE(only_on_device(at(kPinned)));
  EXPECT_FALSE(only_on_device(&host));
  EXPECT_FALSE(only_on_device(nullptr));

  frugal_config config = FRUGAL_CONFIG_INIT;
  frugal_engine* engine = nullptr;
  ASSERT_EQ(frugal_open(&config, &engine), FRUGAL_OK);
  frugal_table_config table_config = FRUGAL_TABLE_CONFIG_INIT;
  table_config.name = "t";
  table_config.rows = 10;
  table_config.dim = 4;
  frugal_table* table = nullptr;
  ASSERT_EQ(frugal_table_create(engine, &table_config, &table), FRUGAL_OK);
  const uint64_t key = 3;
  auto* there = reinterpret_cast<float*>(kDevice);
  EXPECT_EQ(frugal_get(table, &key, 1, 0, there, 0, nullptr), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_put(table, &key, 1, 0, there, 0), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(frugal_close(engine), FRUGAL_OK);
}

}  // namespace
