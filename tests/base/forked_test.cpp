// Functions are called around each fork once they are registered, and where memory was lacking for
// that, the next call registers them.
#include "base/forked.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>

namespace frugal::forked_test {
namespace {

struct Calls {
  int before = 0, in_parent = 0, in_child = 0;
};
constinit Calls g_once, g_late;

constinit AtFork g_at_fork_once{[] { ++g_once.before; }, [] { ++g_once.in_parent; },
                                [] { ++g_once.in_child; }};
constinit AtFork g_at_fork_late{[] { ++g_late.before; }, [] { ++g_late.in_parent; },
                                [] { ++g_late.in_child; }};

// Forks; in the child, these are the calls.
bool child_sees(const Calls& calls, int before, int in_parent, int in_child) {
  const pid_t child = fork();
  if (child == 0)
    _exit(calls.before == before && calls.in_parent == in_parent && calls.in_child == in_child ? 0
                                                                                               : 1);
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace

TEST(AtFork, FunctionsAreCalledOnceAFork) {
  g_at_fork_once.at_load();
  g_at_fork_once.ensure();
  g_at_fork_once.at_load();
  EXPECT_TRUE(child_sees(g_once, 1, 0, 1));
  EXPECT_TRUE(child_sees(g_once, 2, 1, 1));
  EXPECT_EQ(g_once.in_parent, 2);
  EXPECT_EQ(g_once.in_child, 0);
}

TEST(AtFork, WhatFailedAtLoadIsTriedAgain) {
  os_test_fail_after(1);
  g_at_fork_late.at_load();
  EXPECT_TRUE(child_sees(g_late, 0, 0, 0));
  os_test_fail_after(1);
  EXPECT_THROW(g_at_fork_late.ensure(), std::bad_alloc);
  os_test_fail_after(0);
  g_at_fork_late.ensure();
  g_at_fork_late.ensure();
  EXPECT_TRUE(child_sees(g_late, 1, 0, 1));
  EXPECT_EQ(g_late.before, 1);
}

TEST(ForkedDescriptors, AreClosedInAChild) {
  int ends[2];
  ASSERT_TRUE(ForkedDescriptors::open(ends, [](int(&fds)[2]) { return pipe(fds) == 0; }));
  const pid_t child = fork();
  if (child == 0) _exit(close(ends[0]) != 0 && close(ends[1]) != 0 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(write(ends[1], "x", 1), 1);
  for (int fd : ends) ForkedDescriptors::close(fd);
}

}  // namespace frugal::forked_test
