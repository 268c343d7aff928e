// Descriptors from a controller: a taken one belongs to its taker, the rest are closed, and missing
// ones are reported.
#include "process/descriptors.h"

#include <fcntl.h>
#include <unistd.h>

#include "support/inside.h"

namespace frugal::descriptors_test {

bool open_(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(Descriptors, WhatNobodyTakesIsClosed) {
  Vector<int> all;
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  all.assign(fds, fds + 2);
  {
    Descriptors d(all);
    EXPECT_EQ(d.take(1), fds[1]);
    EXPECT_EQ(d.take(1), -1) << "once";
  }
  EXPECT_TRUE(all.empty());
  EXPECT_FALSE(open_(fds[0]));
  EXPECT_TRUE(open_(fds[1]));
  close(fds[1]);
}

TEST(Descriptors, Maps) {
  Mapping made;
  ASSERT_OK(os_reserve(size_t{2} << 20, true, &made));
  ASSERT_OK(os_commit(made, 0, 4096));
  made.base[5] = 'x';
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  Vector<int> all;
  all.assign({dup(made.fd), fds[0], fds[1]});
  Mapping seen;
  {
    Descriptors d(all);
    ASSERT_OK(d.map(0, &seen));
    EXPECT_EQ(all[0], -1);
    Mapping none;
    EXPECT_NE(d.map(1, &none), FRUGAL_OK) << "a pipe";
    EXPECT_EQ(all[1], fds[0]) << "not taken: closed with the rest";
    EXPECT_EQ(d.map(3, &none), FRUGAL_ERR_INTERNAL);
    EXPECT_NE(LastMessage().find("too few"), std::string::npos);
  }
  EXPECT_FALSE(open_(fds[0]));
  EXPECT_EQ(seen.base[5], 'x');
  EXPECT_TRUE(open_(seen.fd)) << "the mapping's from then on";
  close(std::exchange(seen.fd, -1));
  os_release(&seen);
  os_release(&made);
}

TEST(Descriptors, AChannel) {
  std::shared_ptr<StagingMemory> staging;
  ASSERT_OK(StagingMemory::make(size_t{2} << 20, nullptr, &staging));
  std::unique_ptr<Channel> controller, peer;
  ASSERT_OK(Channel::create(4096, staging, &controller));
  const auto sent = [&] {
    Vector<int> all;
    all.assign(
        {dup(controller->up_fd()), dup(controller->down_fd()), dup(controller->staging_fd())});
    return all;
  };
  {
    Vector<int> all = sent();
    const int kept = all[2];
    Descriptors d(all);
    EXPECT_EQ(d.channel(2, true, &peer), FRUGAL_ERR_INTERNAL) << "one after the last";
    EXPECT_NE(d.channel(0, false, &peer), FRUGAL_OK) << "it has staging memory";
    EXPECT_EQ(all[2], kept);
    EXPECT_TRUE(all[0] >= 0 && all[1] >= 0) << "a channel that is none takes nothing";
    ASSERT_OK(d.channel(0, true, &peer));
    EXPECT_EQ(all, (Vector<int>{-1, -1, -1}));
  }
  EXPECT_EQ(peer->staging_bytes(), size_t{2} << 20);
  const uint64_t seven = 7;
  const Piece piece{&seven, sizeof seven};
  ASSERT_OK(peer->send(Header{}, &piece, 1, UINT64_MAX));
  Header h;
  ASSERT_OK(controller->receive(&h, UINT64_MAX));
  EXPECT_EQ(h.payload, sizeof seven);
}

}  // namespace frugal::descriptors_test
