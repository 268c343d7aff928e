// Watches on processes and sockets report each end once, and work without descriptors.
#include "process/watch.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "peers.h"

namespace frugal::watch_test {

struct Count {
  std::mutex mutex;
  std::condition_variable cv;
  int n = 0;
  void Add() {
    std::lock_guard<std::mutex> lock(mutex);
    ++n;
    cv.notify_all();
  }
  void Await(int wanted) {
    std::unique_lock<std::mutex> lock(mutex);
    cv.wait(lock, [&] { return n >= wanted; });
  }
  int Now() {
    std::lock_guard<std::mutex> lock(mutex);
    return n;
  }
};

Status OpenProcess(pid_t pid, int* fd) {
  *fd = static_cast<int>(syscall(434 /* pidfd_open */, pid, 0));
  return *fd >= 0 ? FRUGAL_OK : fail_errno(FRUGAL_ERR_UNSUPPORTED, errno, "pidfd_open");
}

int Pause() {
  for (;;) pause();
}

TEST(Watch, TellsOfEachEndOnce) {
  std::vector<std::unique_ptr<Child>> children;
  for (int i = 0; i < 20; ++i)
    children.push_back(std::make_unique<Child>([i] { return i % 2 ? 0 : Pause(); }));
  std::unique_ptr<Watch> watch;
  ASSERT_OK(Watch::open(&watch));
  Count all;
  std::vector<Count> each(20);
  for (int i = 0; i < 20; ++i) {
    int fd = -1;
    uint64_t id = 0;
    ASSERT_OK(OpenProcess(children[i]->pid(), &fd));
    ASSERT_OK(watch->add(
        fd,
        [&, i] {
          each[i].Add();
          all.Add();
        },
        &id));
  }
  all.Await(10);  // those that end by themselves; as zombies
  for (int i = 0; i < 20; i += 2) {
    EXPECT_EQ(each[i].Now(), 0);
    kill(children[i]->pid(), SIGKILL);
    each[i].Await(1);
  }
  watch.reset();
  EXPECT_EQ(all.Now(), 20);
  for (auto& count : each) EXPECT_EQ(count.Now(), 1);
}

TEST(Watch, RemoveWaitsForTheCallback) {
  std::unique_ptr<Watch> watch;
  Child child(Pause), other(Pause);
  ASSERT_OK(Watch::open(&watch));
  int fd = -1, other_fd = -1;
  uint64_t id = 0, other_id = 0;
  Count entered;
  std::atomic<bool> left{false}, removed{false};
  ASSERT_OK(OpenProcess(child.pid(), &fd));
  ASSERT_OK(OpenProcess(other.pid(), &other_fd));
  ASSERT_OK(watch->add(
      fd,
      [&] {
        entered.Add();
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        EXPECT_FALSE(removed.load());
        watch->remove(id);  // of itself: does not wait
        left.store(true);
      },
      &id));
  ASSERT_OK(watch->add(
      other_fd, [] { ADD_FAILURE() << "it was removed"; }, &other_id));
  child.Kill(SIGKILL);
  entered.Await(1);
  watch->remove(other_id);
  watch->remove(id);
  removed.store(true);
  EXPECT_TRUE(left.load());
  other.Kill(SIGKILL);
  watch->remove(id);  // is gone: nothing
  watch->remove(4711);
  watch.reset();
}

TEST(Watch, CallbacksMayAddAndRemove) {
  std::unique_ptr<Watch> watch;
  Child first(Pause), second(Pause);
  ASSERT_OK(Watch::open(&watch));
  Count done;
  int fd = -1;
  uint64_t id = 0;
  ASSERT_OK(OpenProcess(first.pid(), &fd));
  ASSERT_OK(watch->add(
      fd,
      [&] {
        int next = -1;
        uint64_t next_id = 0;
        EXPECT_OK(OpenProcess(second.pid(), &next));
        EXPECT_OK(watch->add(
            next, [&] { done.Add(); }, &next_id));
        kill(second.pid(), SIGKILL);
      },
      &id));
  first.Kill(SIGKILL);
  done.Await(1);
}

// As long as a callback leaves something it is called again, and it sees the end of the other side.
TEST(Watch, FollowsASocket) {
  std::unique_ptr<Watch> watch;
  ASSERT_OK(Watch::open(&watch));
  int ends[2];
  ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  const int reads = fcntl(ends[0], F_DUPFD_CLOEXEC, 3);
  Count called, taken, closed;
  std::atomic<bool> takes{false};
  uint64_t id = 0;
  ASSERT_OK(watch->follow(
      ends[0],
      [&] {
        called.Add();
        char byte;
        ssize_t n = -1;
        while (takes.load() && (n = recv(reads, &byte, 1, MSG_DONTWAIT)) > 0) taken.Add();
        if (n == 0) closed.Add();
      },
      &id));
  EXPECT_EQ(0, called.Now());
  ASSERT_EQ(1, send(ends[1], "a", 1, 0));
  called.Await(3);
  EXPECT_EQ(0, taken.Now());
  takes.store(true);
  taken.Await(1);
  ASSERT_EQ(1, send(ends[1], "b", 1, 0));
  ASSERT_EQ(1, send(ends[1], "c", 1, 0));
  taken.Await(3);
  close(ends[1]);
  closed.Await(1);
  watch->remove(id);
  close(reads);
}

TEST(Watch, NoProcess) {
  std::unique_ptr<Watch> watch;
  ASSERT_OK(Watch::open(&watch));
  uint64_t id = 0;
  EXPECT_EQ(watch->add(
                -1, [] {}, &id),
            FRUGAL_ERR_INVALID_ARGUMENT);
}

// Where no descriptor is left, the message names the limit and the remedy.
TEST(Watch, WithoutDescriptors) {
  EXPECT_EQ(0, Child([] {
                 const rlimit limit{0, 0};
                 setrlimit(RLIMIT_NOFILE, &limit);
                 std::unique_ptr<Watch> watch;
                 if (Watch::open(&watch) != FRUGAL_ERR_OUT_OF_MEMORY) return 1;
                 const std::string said = LastMessage();
                 const bool whole =
                     said.find("may have 0;") != said.npos && said.find("ulimit -n") != said.npos;
                 return whole ? 0 : 2;
               }).Wait());
}

}  // namespace frugal::watch_test
