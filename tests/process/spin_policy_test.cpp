// Which processor a request loop runs on: its trainer's where a rank has few, and only one that it
// may use.
#include "process/spin_policy.h"

#include <thread>

#include "support/inside.h"

namespace frugal::spin_policy_test {

class PatienceTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(Channel::create(4096, nullptr, &channel));
    before = Processors::mine();
  }
  void TearDown() override { before.bind(); }
  bool only_on(int processor) {
    const Processors now = Processors::mine();
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (now.has(i) != (i == processor)) return false;
    return true;
  }
  bool anywhere() {
    const Processors now = Processors::mine();
    return CPU_EQUAL(&now.set, &before.set);
  }
  std::unique_ptr<Channel> channel;
  Processors before;
};

// So many ranks that there is less than a processor for each.
TEST_F(PatienceTest, ALaneFollowsItsTrainer) {
  SpinPolicy spin_policy(4096, channel.get());
  const int here = os_processor();
  ASSERT_TRUE(before.has(here));
  spin_policy.follow(static_cast<uint32_t>(here + 1));
  EXPECT_TRUE(channel->together());
  EXPECT_TRUE(only_on(here));
  spin_policy.follow(0);  // it is not known where that one runs
  EXPECT_FALSE(channel->together());
  EXPECT_TRUE(anywhere()) << "as before";
}

// A request may name any processor.
TEST_F(PatienceTest, NoProcessorOfTheLane) {
  SpinPolicy spin_policy(4096, channel.get());
  for (const uint32_t told : {0u, 1u << 20, UINT32_MAX, 0x80000000u}) {
    spin_policy.follow(told);
    EXPECT_FALSE(channel->together()) << told;
    EXPECT_TRUE(anywhere()) << told;
  }
}

TEST_F(PatienceTest, TheProcessorOfTheCaller) {
  std::thread([] {
    const int one = os_processor();
    ASSERT_TRUE(Processors::only(one).bind());
    EXPECT_EQ(SpinPolicy::processor(), static_cast<uint32_t>(one + 1));
  }).join();
}

}  // namespace frugal::spin_policy_test
