// Memory of trainers on a simulated GPU: which device pins host memory, and how device memory is
// reused, returned and exhausted.
#include "engine/device_memory.h"

#include <sys/mman.h>

#include "sim/sim.h"
#include "support/inside.h"

namespace frugal::device_memory_test {

using device::ErrorKind;
using device::sim::Sim;

std::shared_ptr<Sim> opened(uint32_t index) {
  std::shared_ptr<device::Runtime> made;
  EXPECT_TRUE(device::sim::open_sim(index, &made).ok());
  return std::static_pointer_cast<Sim>(made);
}

class DeviceMemory : public testing::Test {
 protected:
  const std::shared_ptr<Sim> sim = opened(0);
  std::shared_ptr<DevicePool> pool = std::make_shared<DevicePool>(sim);
  DeviceBuffer get(size_t bytes) {
    DeviceBuffer b;
    EXPECT_OK(pool->get(bytes, &b));
    return b;
  }
};

TEST_F(DeviceMemory, WhatIsGivenBackCirculates) {
  DeviceBuffer none = get(0);
  EXPECT_FALSE(none);
  DeviceBuffer one = get(5000), two = get(5000);
  const uint64_t first = one.as<char>().address;
  EXPECT_NE(first, two.as<char>().address);
  one = {};
  EXPECT_EQ(sim->live().allocations, 2u) << "kept";
  one = get(5000);
  EXPECT_EQ(one.as<char>().address, first);
  EXPECT_EQ(sim->live().allocations_ever, 2u);
  one = {};
  two = {};
  pool = nullptr;
  EXPECT_EQ(sim->live().allocations, 0u);
}

// The device can still take back a buffer that outlives its pool.
TEST_F(DeviceMemory, ABufferOutlivesWhoHadThePool) {
  DeviceBuffer b = get(5000);
  pool = nullptr;
  EXPECT_EQ(sim->live().allocations, 1u);
  b = {};
  EXPECT_EQ(sim->live().allocations, 0u);
}

TEST_F(DeviceMemory, WhatStaysDoesNotCirculate) {
  DeviceBuffer b;
  ASSERT_OK(pool->get_exactly(1000, &b));
  EXPECT_EQ(sim->live().bytes, 1000u);
  b = {};
  EXPECT_EQ(sim->live().allocations, 0u);
}

// Where the device has no more memory, kept buffers go before a request is refused.
TEST_F(DeviceMemory, WhatIsKeptGoesFirst) {
  sim->set_memory_bytes(size_t{1} << 20);
  DeviceBuffer small = get(size_t{256} << 10);
  small = {};
  ASSERT_EQ(sim->live().allocations, 1u);
  DeviceBuffer all = get(size_t{1} << 20);
  EXPECT_TRUE(all);
  EXPECT_EQ(sim->live().allocations, 1u);
  DeviceBuffer more;
  EXPECT_EQ(pool->get(4096, &more), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_FALSE(more);
  EXPECT_NE(LastMessage().find("device memory"), std::string::npos);
  all = {};
  EXPECT_OK(pool->get(4096, &more));
  more = {};
  sim->set_memory_bytes(UINT64_MAX);
}

// A pool does not keep much unused memory for long.
TEST_F(DeviceMemory, WhatNobodyWantsGoesBack) {
  std::vector<DeviceBuffer> many;
  for (int i = 0; i < 24; ++i) many.push_back(get(size_t{1} << 20));
  many.clear();
  EXPECT_GE(sim->live().bytes, size_t{24} << 20) << "they may be wanted again at once";
  for (int i = 0; i < 2000; ++i) get(4096);
  EXPECT_LE(sim->live().bytes, size_t{9} << 20);
}

class Pinned : public testing::Test {
 protected:
  void* const page =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ~Pinned() override { munmap(page, 4096); }
  DevicePinner pinner;
  bool pinned = true;
};

TEST_F(Pinned, ThroughADeviceIfThereIsAny) {
  ASSERT_OK(pinner.pin(page, 4096, &pinned));
  EXPECT_FALSE(pinned || pinner.any());
  const auto sim = opened(0);
  pinner.add(sim);
  EXPECT_TRUE(pinner.any());
  ASSERT_OK(pinner.pin(page, 4096, &pinned));
  EXPECT_TRUE(pinned);
  EXPECT_EQ(sim->live().pinned, 1u);
  pinner.remove(sim.get());
  EXPECT_FALSE(pinner.any());
  pinner.unpin(page);  // by the one that was there last
  EXPECT_EQ(sim->live().pinned, 0u);
}

// A device that has failed is passed over; one that has no room for it is not.
TEST_F(Pinned, ThroughAnotherDevice) {
  const auto bad = opened(0), good = opened(1);
  pinner.add(bad);
  pinner.add(good);
  bad->fail_after(1, ErrorKind::kOutOfMemory, false);
  EXPECT_EQ(pinner.pin(page, 4096, &pinned), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_FALSE(pinned);
  bad->fail_after(1, ErrorKind::kFault, true);
  ASSERT_OK(pinner.pin(page, 4096, &pinned));
  EXPECT_TRUE(pinned);
  pinner.remove(bad.get());
  pinner.unpin(page);
  EXPECT_EQ(good->live().pinned, 0u);
  pinner.remove(good.get());
}

TEST_F(Pinned, EachTrainerOfADeviceCounts) {
  const auto sim = opened(0);
  pinner.add(sim);
  pinner.add(sim);
  pinner.remove(sim.get());
  EXPECT_TRUE(pinner.any());
  pinner.remove(sim.get());
  EXPECT_FALSE(pinner.any());
}

}  // namespace frugal::device_memory_test
