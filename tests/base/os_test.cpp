// Shared memory: its seals, mappings, reading descriptors and limits, memory of another origin that
// is refused, and futex waits on words in it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "base/futex.h"
#include "base/thread.h"
#include "process/peers.h"

#ifndef MFD_ALLOW_SEALING
#define MFD_ALLOW_SEALING 2u
#endif

namespace frugal {
namespace {

int Memfd(size_t bytes, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      (seals && fcntl(fd, F_ADD_SEALS, seals) != 0))
    return -1;
  return fd;
}

TEST(Shared, IsSealedAndHasNoName) {
  Mapping m;
  ASSERT_OK(os_reserve(1000, true, &m));
  EXPECT_EQ(m.bytes, kHugePage);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(m.base) % kHugePage, 0u);
  EXPECT_NE(0, ftruncate(m.fd, 4096));
  EXPECT_NE(0, ftruncate(m.fd, 1 << 30));
  EXPECT_NE(0, fcntl(m.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE));  // no process adds any
  EXPECT_EQ(fcntl(m.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  os_release(&m);
}

TEST(Shared, TwoMappingsOfTheSame) {
  Mapping mine, theirs, reader;
  ASSERT_OK(os_reserve(5 << 20, true, &mine, true));
  ASSERT_OK(os_commit(mine, 0, mine.bytes));
  ASSERT_OK(os_map_shared(dup(mine.fd), true, &theirs));
  ASSERT_OK(os_map_shared(dup(mine.fd), false, &reader));
  EXPECT_EQ(theirs.bytes, mine.bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(theirs.base) % kHugePage, 0u);
  std::strcpy(mine.base + 4711, "from one side");
  EXPECT_STREQ(theirs.base + 4711, "from one side");
  std::strcpy(theirs.base + 4711, "from the other");
  EXPECT_STREQ(reader.base + 4711, "from the other");
  // Neither a reader can write, nor a writer that has made its mapping read-only.
  EXPECT_EQ(1000 + SIGSEGV, Child([&] {
                              // Mappings are not inherited: this child makes its own.
                              signal(SIGSEGV, SIG_DFL);
                              Mapping m;
                              if (os_map_shared(mine.fd, false, &m) != FRUGAL_OK) return 1;
                              *static_cast<volatile char*>(m.base) = 1;
                              return 0;
                            }).Wait());
  EXPECT_EQ(1000 + SIGSEGV, Child([&] {
                              signal(SIGSEGV, SIG_DFL);
                              Mapping m;
                              if (os_map_shared(mine.fd, true, &m) != FRUGAL_OK) return 1;
                              *static_cast<volatile char*>(m.base) = 1;
                              if (os_make_read_only(m) != FRUGAL_OK) return 2;
                              *static_cast<volatile char*>(m.base) = 1;
                              return 0;
                            }).Wait());
  os_release(&mine);
  os_release(&theirs);
  EXPECT_STREQ(reader.base + 4711, "from the other");
  os_release(&reader);
}

// Of this process's memory from `base` on, what lies in huge pages.
size_t HugeBytes(const char* base) {
  char line[256];
  std::snprintf(line, sizeof line, "%zx-", reinterpret_cast<size_t>(base));
  std::ifstream maps("/proc/self/smaps");
  std::string text;
  while (std::getline(maps, text) && text.rfind(line, 0) != 0) {
  }
  size_t kb = 0;
  while (std::getline(maps, text) && std::sscanf(text.c_str(), "ShmemPmdMapped: %zu", &kb) != 1) {
  }
  return kb << 10;
}

// What is large lies in huge pages where the kernel makes them when asked. What is small is not
// worth asking.
TEST(Shared, HugePagesOfWhatIsLarge) {
  constexpr size_t kLarge = size_t{8} << 20;
  Mapping asked, large, small;
  ASSERT_OK(os_reserve(kLarge, true, &asked));
  std::memset(asked.base, 1, 1);
  if (madvise(asked.base, kHugePage, 25 /* MADV_COLLAPSE */) != 0 || HugeBytes(asked.base) == 0)
    GTEST_SKIP() << "this machine makes no huge pages of shared memory";
  ASSERT_OK(os_reserve(kLarge, true, &large));
  ASSERT_OK(os_commit(large, 0, kLarge));
  EXPECT_GT(HugeBytes(large.base), 0u);
  ASSERT_OK(os_reserve(kLarge, true, &small));
  ASSERT_OK(os_commit(small, 0, kHugePage));
  std::ifstream by_itself("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string modes;
  std::getline(by_itself, modes);
  if (modes.find("[never]") != std::string::npos) {
    EXPECT_EQ(0u, HugeBytes(small.base));
  }
  for (Mapping* m : {&asked, &large, &small}) os_release(m);
}

// Only the mapping that was made first can write, however another process opens the memory. That
// mapping can still grow; parts of it do not go back.
TEST(Shared, WrittenByOneMapping) {
  Mapping mine;
  ASSERT_OK(os_reserve(3 * kHugePage, true, &mine));
  EXPECT_TRUE(fcntl(mine.fd, F_GET_SEALS) & 0x10) << "F_SEAL_FUTURE_WRITE";
  ASSERT_OK(os_commit(mine, 0, kHugePage));
  const int again = open(("/proc/self/fd/" + std::to_string(mine.fd)).c_str(), O_RDWR | O_CLOEXEC);
  Mapping theirs;
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, os_map_shared(again, true, &theirs));
  EXPECT_EQ(-1, pwrite(again, "x", 1, 0));
  ASSERT_OK(os_map_shared(again, false, &theirs));
  EXPECT_NE(0, mprotect(theirs.base, theirs.bytes, PROT_READ | PROT_WRITE));
  ASSERT_OK(os_commit(mine, kHugePage, 2 * kHugePage));
  std::strcpy(mine.base + 2 * kHugePage, "grown");
  EXPECT_STREQ(theirs.base + 2 * kHugePage, "grown");
  os_release(&mine);
  os_release(&theirs);
}

// What another writes is sealed when it has its mapping, which goes on to write.
TEST(Shared, WrittenByWhoMappedItBefore) {
  Mapping mine, theirs, none;
  ASSERT_OK(os_reserve_to_read(kHugePage, &mine));
  ASSERT_OK(os_map_shared(dup(mine.fd), true, &theirs));
  ASSERT_OK(os_seal(mine));
  EXPECT_EQ(-1, pwrite(mine.fd, "x", 1, 0));
  EXPECT_EQ(FRUGAL_ERR_INVALID_ARGUMENT, os_map_shared(mine.fd, true, &none));
  ASSERT_OK(os_commit(theirs, 0, kHugePage));
  std::strcpy(theirs.base, "written");
  EXPECT_STREQ(mine.base, "written");
  os_release(&mine);
  os_release(&theirs);
}

// The flags of the mapping that begins at `base`, as /proc/self/smaps has them.
std::string FlagsOf(const char* base) {
  std::ifstream maps("/proc/self/smaps");
  char begin[32];
  std::snprintf(begin, sizeof begin, "%lx-", reinterpret_cast<unsigned long>(base));
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    here |= line.rfind(begin, 0) == 0;
    if (here && line.rfind("VmFlags:", 0) == 0) return line + " ";
  }
  return "";
}

// What a dying process dumps is its own memory; of a mapping of 64 GiB the holes would be filled,
// too.
TEST(Shared, IsInNoCoreDump) {
  Mapping mine, theirs;
  ASSERT_OK(os_reserve(kHugePage, true, &mine));
  ASSERT_OK(os_map_shared(dup(mine.fd), false, &theirs));
  for (const Mapping* m : {&mine, &theirs})
    EXPECT_NE(FlagsOf(m->base).find(" dd "), std::string::npos);
  ASSERT_OK(os_make_read_only(mine));
  EXPECT_NE(FlagsOf(mine.base).find(" dd "), std::string::npos);
  os_release(&mine);
  os_release(&theirs);
}

// A reader needs no more than a descriptor that cannot write.
TEST(Shared, DescriptorForReading) {
  Mapping mine, reader, none;
  ASSERT_OK(os_reserve(kHugePage, true, &mine));
  ASSERT_OK(os_commit(mine, 0, mine.bytes));
  std::strcpy(mine.base, "read this");
  const int fd = open(("/proc/self/fd/" + std::to_string(mine.fd)).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  EXPECT_NE(FRUGAL_OK, os_map_shared(fd, true, &none));
  ASSERT_OK(os_map_shared(fd, false, &reader));
  EXPECT_STREQ(reader.base, "read this");
  EXPECT_NE(0, mprotect(reader.base, reader.bytes, PROT_READ | PROT_WRITE));
  os_release(&mine);
  os_release(&reader);
}

TEST(Shared, RefusesWhatItDidNotMake) {
  int pipes[2], sockets[2];
  ASSERT_EQ(0, pipe(pipes));
  ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
  char name[] = "/tmp/frugal_test_XXXXXX";
  const int file = mkstemp(name);
  ASSERT_GE(file, 0);
  unlink(name);
  ASSERT_EQ(0, ftruncate(file, kHugePage));
  const int both = F_SEAL_SHRINK | F_SEAL_GROW;
  struct {
    const char* what;
    int fd;
  } cases[] = {{"none", -1},
               {"closed", 1 << 20},
               {"a pipe", pipes[0]},
               {"a socket", sockets[0]},
               {"a device", open("/dev/zero", O_RDWR)},
               {"a folder", open("/tmp", O_RDONLY)},
               {"a file", file},
               {"unsealed", Memfd(kHugePage, 0)},
               {"may shrink", Memfd(kHugePage, F_SEAL_GROW)},
               {"may grow", Memfd(kHugePage, F_SEAL_SHRINK)},
               {"empty", Memfd(0, both)},
               {"a page", Memfd(4096, both)},
               {"not whole", Memfd(kHugePage + 4096, both)},
               {"not to be written", Memfd(kHugePage, both | F_SEAL_WRITE)}};
  for (const auto& c : cases) {
    Mapping m;
    const Status s = os_map_shared(c.fd, true, &m);
    EXPECT_NE(s, FRUGAL_OK) << c.what;
    EXPECT_EQ(m.base, nullptr) << c.what;
    if (c.fd >= 0 && c.fd != 1 << 20) {
      EXPECT_EQ(0, close(c.fd)) << c.what << ": it remains the caller's";
    }
  }
  close(pipes[1]);
  close(sockets[1]);
  const int good = Memfd(kHugePage, both);
  Mapping m;
  os_test_fail_after(1);
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, os_map_shared(good, true, &m));
  EXPECT_OK(os_map_shared(good, true, &m));
  os_release(&m);
}

TEST(Shared, LimitsAreAStatus) {
  // A limit of file sizes would send a signal.
  EXPECT_EQ(0, Child([] {
                 rlimit limit{1 << 20, 1 << 20};
                 setrlimit(RLIMIT_FSIZE, &limit);
                 Mapping m;
                 if (os_reserve(size_t{8} << 20, true, &m) != FRUGAL_ERR_OUT_OF_MEMORY) return 1;
                 return m.base == nullptr ? 0 : 2;
               }).Wait());
  EXPECT_EQ(0, Child([] {
                 rlimit limit{0, 0};
                 setrlimit(RLIMIT_NOFILE, &limit);
                 Mapping m;
                 if (os_reserve(size_t{8} << 20, true, &m) != FRUGAL_ERR_OUT_OF_MEMORY) return 1;
                 const std::string said = LastMessage();
                 const bool whole =
                     said.find("may have 0;") != said.npos && said.find("ulimit -n") != said.npos;
                 return whole ? 0 : 2;
               }).Wait());
  // More than the machine has.
  Mapping m;
  ASSERT_OK(os_reserve(available_bytes() + (size_t{1} << 30), true, &m));
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, os_commit(m, 0, m.bytes));
  os_test_fail_after(1);
  EXPECT_EQ(FRUGAL_ERR_OUT_OF_MEMORY, os_commit(m, 0, 4096));
  EXPECT_OK(os_commit(m, 0, 4096));
  os_release(&m);
}

TEST(Os, TimeOutsThatNeverRunOut) {
  EXPECT_EQ(0u, ns_of_ms(0));
  EXPECT_EQ(5'000'000u, ns_of_ms(5));
  const int64_t most = INT64_MAX / 2'000'000;
  EXPECT_EQ(static_cast<uint64_t>(most) * 1'000'000, ns_of_ms(most));
  for (int64_t ms : {most + 1, INT64_MAX, int64_t{-1}, INT64_MIN}) EXPECT_EQ(kNever, ns_of_ms(ms));
  const uint64_t now = now_ns();
  EXPECT_GE(after_ns(5), now + 5);
  // Clocks of the standard library count in half of the numbers.
  EXPECT_LT(after_ns(ns_of_ms(most)), static_cast<uint64_t>(INT64_MAX));
  for (uint64_t ns : {UINT64_MAX - 1, kNever}) EXPECT_EQ(kNever, after_ns(ns));
}

TEST(Futex, WordThatIsMappedReadOnly) {
  Mapping mine, theirs;
  ASSERT_OK(os_reserve(kHugePage, true, &mine));
  ASSERT_OK(os_commit(mine, 0, mine.bytes));
  ASSERT_OK(os_map_shared(dup(mine.fd), false, &theirs));
  auto* written = reinterpret_cast<std::atomic<uint32_t>*>(mine.base);
  const auto* read = reinterpret_cast<const std::atomic<uint32_t>*>(theirs.base);
  const auto* word = reinterpret_cast<const uint32_t*>(theirs.base);
  futex_wait(word, 1, kNever);  // not what it is: returns at once
  futex_wait(word, 0, 1000);    // no thread wakes it
  std::atomic<bool> done{false};
  std::thread waiter([&] {
    while (read->load() == 0) futex_wait(word, 0, kNever);
    // Its waker cannot write the word either.
    while (!done.load()) futex_wait(word, 1, kNever);
  });
  written->store(1);
  futex_wake(reinterpret_cast<const uint32_t*>(mine.base));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  done.store(true);
  std::atomic<bool> gone{false};
  std::thread waker([&] {
    while (!gone.load()) {
      futex_wake(word);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  waiter.join();
  gone.store(true);
  waker.join();
  os_release(&mine);
  os_release(&theirs);
}

// A sleep that takes longer than it was to take has stood still meanwhile, and counts for no more.
TEST(Futex, WhoStoodStillHasNotWaited) {
  constexpr uint64_t kMs = 1'000'000, kHour = 3'600'000 * kMs;
  WaitTime time(800 * kMs);
  EXPECT_EQ(100 * kMs, time.slice());
  time.slept(kHour);
  EXPECT_EQ(700 * kMs / 8, time.slice());
  time.slept(kMs);  // it was woken early
  EXPECT_EQ(699 * kMs / 8, time.slice());
  int sleeps = 0;
  for (; !time.over(); ++sleeps) time.slept(kHour);
  EXPECT_EQ(13, sleeps) << "the last ones are of 50 ms, and of what is left";
  EXPECT_EQ(0u, time.slice());

  EXPECT_TRUE(WaitTime::until(now_ns()).over());
  EXPECT_TRUE(WaitTime(0).over());
  WaitTime never = WaitTime::until(kNever);
  for (int i = 0; i < 1000; ++i) never.slept(kHour);
  EXPECT_GT(never.slice(), 100'000 * kHour);
  const uint32_t word = 0;
  WaitTime some(5 * kMs);
  while (!some.over()) futex_wait(&word, 0, &some);  // no thread wakes it
  futex_wait(&word, 1, &never);                      // not what it is: returns at once
}

// No thread goes on as if another had ended that has not.
TEST(ThreadDeathTest, AJoinThatCannotBe) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto joins_itself = [] {
    std::atomic<bool> made{false};
    Thread t;
    t = quiet_thread([&] {
      made.wait(false);
      t.join();
      _exit(0);
    });
    made = true;
    made.notify_all();
    for (;;) pause();
  };
  EXPECT_DEATH(joins_itself(), "");
}

}  // namespace
}  // namespace frugal
