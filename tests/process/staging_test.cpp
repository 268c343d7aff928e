// Staging memory: an address outside of it, or borrowed twice, is refused; returned memory is
// reported; the channel lives until the last return.
//
// The trainer receives each address when it is given back.
#include "process/staging.h"

#include "support/inside.h"

namespace frugal::staging_test {

constexpr size_t kBytes = size_t{2} << 20;

class StagingTest : public testing::Test {
 protected:
  void SetUp() override {
    std::shared_ptr<StagingMemory> memory;
    ASSERT_OK(StagingMemory::make(kBytes, nullptr, &memory));
    std::unique_ptr<Channel> made;
    ASSERT_OK(Channel::create(4096, std::move(memory), &made));
    ASSERT_OK(Channel::attach(dup(made->up_fd()), dup(made->down_fd()), dup(made->staging_fd()),
                              &trainer));
    controller = std::move(made);
    staging = new Staging(controller);
  }
  void TearDown() override {
    if (staging) staging->drop_reference();
  }
  uint64_t released() {
    uint64_t shm_address = UINT64_MAX;
    return trainer->next_release(&shm_address) ? shm_address : UINT64_MAX;
  }
  std::shared_ptr<Channel> controller;
  std::unique_ptr<Channel> trainer;
  Staging* staging = nullptr;
};

TEST_F(StagingTest, PlacesThatAreNone) {
  EXPECT_FALSE(staging->lend(0, 0));
  EXPECT_FALSE(staging->lend(8, 64)) << "rows begin at multiples of 64 bytes";
  EXPECT_FALSE(staging->lend(kBytes - 64, 128));
  EXPECT_FALSE(staging->lend(kBytes, 64));
  EXPECT_FALSE(staging->lend(UINT64_MAX & ~uint64_t{63}, 128)) << "the sum wraps";
  EXPECT_TRUE(staging->lend(kBytes - 64, 64));
}

TEST_F(StagingTest, WhatIsGivenBackIsTold) {
  ASSERT_OK(trainer->commit_staging(0, kBytes));
  trainer->staging()[128] = 'a';
  Buffer one = staging->lend(128, 64), two = staging->lend(0, 128);
  EXPECT_EQ(one.data()[0], 'a');
  EXPECT_EQ(released(), UINT64_MAX);
  one = {};
  EXPECT_EQ(released(), 128u);
  two = {};
  EXPECT_EQ(released(), 0u);
  EXPECT_EQ(released(), UINT64_MAX);
}

TEST_F(StagingTest, NoMoreThanThereIs) {
  Buffer most = staging->lend(0, kBytes - 64);
  ASSERT_TRUE(most);
  EXPECT_FALSE(staging->lend(0, 128)) << "a part of it is lent";
  EXPECT_TRUE(staging->lend(kBytes - 64, 64)) << "what was refused is not counted";
  most = {};
  EXPECT_TRUE(staging->lend(0, kBytes));
}

TEST_F(StagingTest, TheChannelLivesUntilAllIsGivenBack) {
  const std::weak_ptr<Channel> channel = controller;
  Buffer lent = staging->lend(0, 64);
  std::exchange(staging, nullptr)->drop_reference();
  controller.reset();
  EXPECT_FALSE(channel.expired());
  lent = {};
  EXPECT_TRUE(channel.expired());
  EXPECT_EQ(released(), 0u);
}

}  // namespace frugal::staging_test
