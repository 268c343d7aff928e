// Regions of another process's memory: each shared address shows its own bytes, no address is used
// twice, and readers keep memory alive.
//
// A process that does not read its notices is cut off. A process that gets no notices learns of no
// region. After an owner is killed, the memory that it announced is readable. Also: forked
// children, and missing memory or descriptors.
#include "process/regions.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/forked.h"
#include "process/fence.h"
#include "process/proc.h"
#include "support/inside.h"

namespace frugal::regions_test {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kRange = size_t{16} << 30;

// A reader that an arena notifies of its regions, in the same process.
struct Told {
  explicit Told(Arena& arena) {
    int ends[2], control[2];
    EXPECT_TRUE(ForkedDescriptors::open(ends, [](int(&fds)[2]) {
      return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0;
    }));
    // As it is where the system has its usual limits; it is twice that.
    constexpr int kBytes = 106496;
    EXPECT_EQ(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &kBytes, sizeof kBytes), 0);
    EXPECT_TRUE(ForkedDescriptors::open(control, [](int(&fds)[2]) {
      return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0;
    }));
    // Whom the connection belongs to has it, too.
    const int known = ForkedDescriptors::open([&] { return dup(control[0]); });
    EXPECT_EQ(arena.region_publisher()->add(ends[0], known, &id), FRUGAL_OK);
    owner = control[0];
    regions.open(ends[1]);
    connection = control[1];
  }
  ~Told() {
    ForkedDescriptors::close(connection);
    ForkedDescriptors::close(owner);
  }
  Status find(uint64_t shm_address, uint64_t bytes, const char** out) {
    RegionRefs reads;
    return regions.find(shm_address, bytes, &reads, out);
  }
  bool cut_off() const {
    char byte;
    return recv(connection, &byte, 1, MSG_DONTWAIT) == 0;
  }
  Regions regions;
  uint64_t id = 0;
  int connection = -1, owner = -1;
};

TEST(Regions, SeeWhatThereIs) {
  const long before = shared_kib();
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(4 * kMiB, &a));
  std::strcpy(a, "before");
  Told first(arena), second(arena);
  ASSERT_OK(arena.take(64 * kMiB, &b));
  std::strcpy(b + 64 * kMiB - 10, "after");
  const uint64_t shm_address = arena.shm_address(b);
  RegionRefs reads;
  const char* at = nullptr;
  for (Told* t : {&first, &second}) {
    ASSERT_OK(t->find(arena.shm_address(a), 10, &at));
    EXPECT_STREQ(at, "before");
    reads.clear();
    ASSERT_OK(t->regions.find(shm_address, 64 * kMiB, &reads, &at));
    EXPECT_STREQ(at + 64 * kMiB - 10, "after");
    for (size_t page = 0; page < 64 * kMiB; page += 4096) ASSERT_EQ(at[page], 0);
    ASSERT_OK(t->regions.find(shm_address + 64 * kMiB - 10, 10, &reads, &at));
    EXPECT_STREQ(at, "after");
    EXPECT_EQ(reads.size(), 1u);
    // No more than there is, and nowhere else.
    EXPECT_EQ(t->find(shm_address + 1, 64 * kMiB, &at), FRUGAL_ERR_INTERNAL);
    for (uint64_t nowhere : {shm_address + 64 * kMiB, uint64_t{kRange}, UINT64_MAX - 4})
      EXPECT_EQ(t->find(nowhere, 4, &at), FRUGAL_ERR_INTERNAL) << nowhere;
    EXPECT_EQ(t->find(arena.shm_address(a), UINT64_MAX, &at), FRUGAL_ERR_INTERNAL);
  }
  reads.clear();
  ASSERT_OK(first.regions.find(shm_address, 64 * kMiB, &reads, &at));
  // A reader cannot write through that mapping.
  EXPECT_NE(0, mprotect(const_cast<char*>(at), 4096, PROT_READ | PROT_WRITE));
  arena.put_back(b, 64 * kMiB);
  ASSERT_OK(second.regions.look());
  ASSERT_OK(first.regions.look());
  EXPECT_GE(shared_kib(), before + (64 << 10)) << "a thread reads it";
  EXPECT_STREQ(at + 64 * kMiB - 10, "after");
  EXPECT_EQ(first.find(shm_address, 1, &at), FRUGAL_ERR_INTERNAL) << "no other process finds it";
  reads.clear();
  EXPECT_LE(shared_kib(), before + (16 << 10));
  // A reader that the publisher has forgotten receives nothing more.
  arena.region_publisher()->forget(second.id);
  ASSERT_OK(arena.take(16 * kMiB, &b));
  EXPECT_EQ(first.find(arena.shm_address(b), 1, &at), FRUGAL_OK);
  EXPECT_EQ(second.find(arena.shm_address(b), 1, &at), FRUGAL_ERR_PEER_LOST);
}

// A reader that has not polled, or receives nothing any more, finds no other memory at an old
// address.
TEST(Regions, PlacesAreNeverAnothers) {
  Arena arena;
  ASSERT_OK(arena.open(40 * kMiB));  // one after the other has the same addresses
  char* data = nullptr;
  Told looks(arena), late(arena);
  std::vector<uint64_t> shm_addresses;
  RegionRefs reads;
  const char* at = nullptr;
  for (char i = 1; i <= 20; ++i) {
    ASSERT_OK(arena.take(24 * kMiB, &data));
    std::memset(data, i, 24 * kMiB);
    for (uint64_t before : shm_addresses) EXPECT_GE(arena.shm_address(data), before + 24 * kMiB);
    shm_addresses.push_back(arena.shm_address(data));
    ASSERT_OK(looks.regions.find(shm_addresses.back(), 24 * kMiB, &reads, &at));
    EXPECT_EQ(at[24 * kMiB - 1], i);
    if (i == 10) arena.region_publisher()->forget(late.id);
    if (i < 20) arena.put_back(data, 24 * kMiB);
  }
  ASSERT_OK(looks.regions.look());
  for (char i = 1; i <= 20; ++i) {
    const uint64_t shm_address = shm_addresses[static_cast<size_t>(i - 1)];
    ASSERT_OK(looks.regions.find(shm_address, 24 * kMiB, &reads, &at));
    EXPECT_EQ(at[0], i) << "it is read";
    const Status s = late.find(shm_address, 1, &at);
    EXPECT_EQ(s, i < 10 ? FRUGAL_ERR_INTERNAL : i == 10 ? FRUGAL_OK : FRUGAL_ERR_PEER_LOST) << +i;
    if (i == 10) {
      EXPECT_EQ(at[0], i);
    }
  }
}

// A descriptor that a reader receives can be opened anew, but not for writing.
TEST(Regions, NobodyElseWrites) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* data = nullptr;
  ASSERT_OK(arena.take(16 * kMiB, &data));
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  uint64_t id;
  ASSERT_OK(arena.region_publisher()->add(ends[0], -1, &id));
  RegionNews news;
  int fd = -1;
  bool ended = true;
  ASSERT_EQ(os_peek(ends[1], &news, sizeof news, &fd, &ended), static_cast<ssize_t>(sizeof news));
  ASSERT_GE(fd, 0);
  EXPECT_FALSE(ended);
  EXPECT_EQ(Attack(fd), "");
  close(fd);
  close(ends[1]);
}

// What the owner published before it was killed is there for a reader that polls afterwards.
TEST(Regions, SeeWhatADeadProcessHasLeft) {
  int ends[2], pipe_ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  ASSERT_EQ(pipe(pipe_ends), 0);
  auto own = [&] {
    close(ends[1]);
    Arena arena;
    uint64_t id, shm_addresses[20];
    char* data = nullptr;
    if (arena.open(kRange) != FRUGAL_OK) return 1;
    if (arena.region_publisher()->add(ends[0], -1, &id) != FRUGAL_OK) return 2;
    for (size_t i = 0; i < 20; ++i) {
      if (arena.take(8 * kMiB + i * kMiB, &data) != FRUGAL_OK) return 3;
      std::memset(data, static_cast<int>(i + 1), 8 * kMiB);
      shm_addresses[i] = arena.shm_address(data);
      if (i % 3 == 0) arena.put_back(data, 8 * kMiB + i * kMiB);
    }
    if (write(pipe_ends[1], shm_addresses, sizeof shm_addresses) != sizeof shm_addresses) return 4;
    kill(getpid(), SIGKILL);
    return 5;
  };
  const pid_t owner = fork();
  if (owner == 0) _exit(own());
  close(ends[0]);
  int ended = 0;
  ASSERT_EQ(waitpid(owner, &ended, 0), owner);
  ASSERT_TRUE(WIFSIGNALED(ended)) << WEXITSTATUS(ended);
  uint64_t shm_addresses[20];
  ASSERT_EQ(read(pipe_ends[0], shm_addresses, sizeof shm_addresses),
            static_cast<ssize_t>(sizeof shm_addresses));
  Regions regions;
  regions.open(ends[1]);
  for (size_t i = 0; i < 20; ++i) {
    if (i % 3 == 0) continue;  // what was put back may be there as yet
    RegionRefs reads;
    const char* at = nullptr;
    ASSERT_OK(regions.find(shm_addresses[i], 8 * kMiB, &reads, &at)) << i;
    EXPECT_EQ(at[8 * kMiB - 1], static_cast<char>(i + 1));
  }
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

// A call during which the engine closes reports that, and no lack of memory.
TEST(Regions, ClosedIsSaid) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* data = nullptr;
  ASSERT_OK(arena.take(kMiB, &data));
  Told told(arena);
  ASSERT_OK(told.regions.look());
  told.regions.close();
  EXPECT_EQ(told.regions.look(), FRUGAL_ERR_CLOSED);
  const char* at = nullptr;
  EXPECT_EQ(told.find(arena.shm_address(data), 1, &at), FRUGAL_ERR_CLOSED);
}

// A process that is stopped delays no other. After a while it receives nothing more, and its
// connection ends.
TEST(Regions, WhoDoesNotLookIsCutOff) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* first = nullptr;
  ASSERT_OK(arena.take(kMiB, &first));
  std::strcpy(first, "first");
  Told stopped(arena), other(arena);
  ASSERT_OK(stopped.regions.look());
  char* data = nullptr;
  for (int i = 0; i < 300; ++i) {
    ASSERT_OK(arena.take(8 * kMiB, &data));
    if (i % 50 == 0) {
      ASSERT_OK(other.regions.look());
    }
    arena.put_back(data, 8 * kMiB);
  }
  ASSERT_OK(arena.take(8 * kMiB, &data));
  EXPECT_TRUE(stopped.cut_off());
  EXPECT_FALSE(other.cut_off());
  const char* at = nullptr;
  EXPECT_EQ(stopped.find(arena.shm_address(data), 1, &at), FRUGAL_ERR_PEER_LOST);
  EXPECT_NE(LastMessage().find("close the engine"), std::string::npos) << LastMessage();
  ASSERT_OK(stopped.find(arena.shm_address(first), 6, &at));
  EXPECT_STREQ(at, "first");
  ASSERT_OK(other.find(arena.shm_address(data), 8 * kMiB, &at));
}

// Where the system lacks a resource, the arena does not get the memory, and no reader is cut off.
TEST(Regions, WhatCannotBeToldIsNoReadersFault) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  Told a(arena), b(arena);
  char* data = nullptr;
  for (const int nth : {1, 2, 3, 4}) {  // addresses, memory, and a message to either
    SCOPED_TRACE(testing::Message() << "call " << nth);
    os_test_fail_after(nth);
    EXPECT_EQ(arena.take(8 * kMiB, &data), FRUGAL_ERR_OUT_OF_MEMORY);
    EXPECT_EQ(os_test_fail_after(0), 0);
    EXPECT_EQ(arena.bytes_held(), 0u);
    ASSERT_OK(arena.take(8 * kMiB, &data));
    for (Told* t : {&a, &b}) {
      const char* at = nullptr;
      ASSERT_OK(t->find(arena.shm_address(data), 8 * kMiB, &at));
      EXPECT_FALSE(t->cut_off());
    }
    arena.put_back(data, 8 * kMiB);
  }
}

// A reader that comes late receives all regions at once, for which its socket has room.
TEST(Regions, SoManyAreTold) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  Mapping memory;
  ASSERT_OK(os_reserve(2 * kMiB, true, &memory));
  uint64_t shm_address = 0;
  for (size_t i = 0; i < RegionPublisher::kMostRegions; ++i) {
    ASSERT_OK(arena.region_publisher()->come(memory, &shm_address, true));
    ASSERT_NE(shm_address, kNoShmAddress);
  }
  uint64_t none = 0;
  ASSERT_OK(arena.region_publisher()->come(memory, &none, true));
  EXPECT_EQ(none, kNoShmAddress);
  std::vector<char*> segments;
  for (int i = 0; i < 16; ++i) {
    segments.push_back(nullptr);
    ASSERT_OK(arena.take(8 * kMiB, &segments.back()));
  }
  Told late(arena);
  const char* at = nullptr;
  EXPECT_OK(late.find(shm_address, 1, &at));
  EXPECT_OK(late.find(arena.shm_address(segments.back()), 1, &at));
  for (char* segment : segments) arena.put_back(segment, 8 * kMiB);
  arena.region_publisher()->go(shm_address);
  EXPECT_OK(arena.region_publisher()->come(memory, &shm_address, true));
  EXPECT_NE(shm_address, kNoShmAddress);
  os_release(&memory);
}

// No other process keeps memory that goes back: not even a child that was forked meanwhile.
TEST(Regions, ForkedChildrenKeepNothing) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* data = nullptr;
  ASSERT_OK(arena.take(16 * kMiB, &data));
  Told t(arena);
  ASSERT_OK(t.regions.look());
  ASSERT_OK(arena.take(16 * kMiB, &data));  // published, and not polled for
  const pid_t child = fork();
  if (child == 0) {
    bool any = mapped_of(getpid(), "memfd") > 0;
    for (const std::string& file : open_files_of(getpid()))
      any |= file.find("memfd") != std::string::npos || file.find("socket") != std::string::npos;
    _exit(any);
  }
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
}

// Without a descriptor or memory a look is made again.
TEST(Regions, LookAgainWhereTheyCouldNot) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(4 * kMiB, &a));
  Told t(arena);
  ASSERT_OK(t.regions.look());
  ASSERT_OK(arena.take(16 * kMiB, &b));
  std::strcpy(b, "there");
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const char* at = nullptr;
  EXPECT_EQ(t.find(arena.shm_address(b), 16 * kMiB, &at), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("descriptor"), std::string::npos) << LastMessage();
  char* more = nullptr;
  EXPECT_EQ(arena.take(32 * kMiB, &more), FRUGAL_ERR_OUT_OF_MEMORY);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  os_test_fail_after(1);
  EXPECT_EQ(t.find(arena.shm_address(b), 16 * kMiB, &at), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  ASSERT_OK(t.find(arena.shm_address(b), 16 * kMiB, &at));
  EXPECT_STREQ(at, "there");
  ASSERT_OK(arena.take(32 * kMiB, &more));
  ASSERT_OK(t.find(arena.shm_address(more), 32 * kMiB, &at));
}

// Pieces of all sizes come and go; they do not overlap, and each is seen as it is.
TEST(Regions, PiecesNeitherOverlapNorGetLost) {
  Random random(test_seed());
  constexpr size_t kPages = 96;
  Arena arena;
  ASSERT_OK(arena.open(kPages * kHugePage));
  Told t(arena);
  struct Piece {
    char* data;
    size_t pages;
    uint64_t mark;
  };
  std::vector<Piece> pieces;
  bool used[kPages] = {};
  int made = 0;
  for (uint64_t i = 1; i <= 3000; ++i) {
    if (random.one_in(2) || pieces.empty()) {
      const size_t pages = random.below(8) + 1;
      char* data = nullptr;
      if (arena.take(pages * kHugePage - random.below(1000), &data) != FRUGAL_OK) continue;
      ++made;
      const size_t first = arena.offset(data) / kHugePage;
      ASSERT_LE(first + pages, kPages);
      for (size_t p = first; p < first + pages; ++p) {
        ASSERT_FALSE(used[p]);
        used[p] = true;
        std::memcpy(arena.mapping().base + p * kHugePage, &i, sizeof i);
      }
      pieces.push_back({data, pages, i});
    } else {
      std::swap(pieces[random.below(pieces.size())], pieces.back());
      const Piece gone = pieces.back();
      pieces.pop_back();
      const char* at = nullptr;
      ASSERT_OK(t.find(arena.shm_address(gone.data), gone.pages * kHugePage, &at));
      for (size_t p = 0; p < gone.pages; ++p) {
        EXPECT_EQ(std::memcmp(at + p * kHugePage, &gone.mark, sizeof gone.mark), 0);
        used[arena.offset(gone.data) / kHugePage + p] = false;
      }
      arena.put_back(gone.data, gone.pages * kHugePage);
    }
  }
  EXPECT_GT(made, 500);
  for (const Piece& p : pieces) arena.put_back(p.data, p.pages * kHugePage);
  EXPECT_EQ(arena.bytes_held(), 0u);
  char* all = nullptr;
  EXPECT_EQ(arena.take(kPages * kHugePage, &all), FRUGAL_OK);
  ASSERT_OK(t.regions.look());
}

// Whatever fails while a piece is taken or published, all is as before.
TEST(Regions, WithoutMemory) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  Told t(arena);
  const long files = descriptors_of(getpid());
  for (const size_t bytes : {kMiB, 40 * kMiB}) {
    WithoutMemory without;
    char* data = nullptr;
    const char* at = nullptr;
    while (without.next())
      if (without([&] { return arena.take(bytes, &data); }) != FRUGAL_OK) {
        EXPECT_EQ(arena.bytes_held(), 0u);
        EXPECT_EQ(descriptors_of(getpid()), files);
      }
    EXPECT_GT(without.rounds(), 2);
    WithoutMemory looking;
    while (looking.next()) looking([&] { return t.find(arena.shm_address(data), bytes, &at); });
    EXPECT_GT(looking.rounds(), 1);
    arena.put_back(data, bytes);
    ASSERT_OK(t.regions.look());
  }
}

}  // namespace frugal::regions_test
