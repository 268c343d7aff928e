// Memory that several processes look at: its pieces, when it goes back to the system, and what who
// reads it elsewhere is told.
#include "base/arena.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <vector>

#include "base/buffer.h"
#include "process/fence.h"
#include "process/proc.h"
#include "support/inside.h"

namespace frugal {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kRange = size_t{16} << 30;

// Shared memory of this process, and of nobody else: a memfd without a mapping has gone.
long SharedKib() {
  long kib = 0;
  std::FILE* f = std::fopen("/proc/self/status", "r");
  char line[256];
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "RssShmem: %ld", &kib) == 1) break;
  std::fclose(f);
  return kib;
}

// An arena, and a view of it in the same process.
struct Told {
  explicit Told(Arena& arena) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    arena.count_changes(&changes);
    EXPECT_EQ(arena.tell(ends[0], &id), FRUGAL_OK);
    view.open(ends[1]);
    view.changes_at(&changes);
  }
  Status find(uint64_t place, uint64_t bytes, const char** out) {
    ArenaView::Range near;
    return view.find(place, bytes, out, &near);
  }
  ArenaView view;
  static inline std::atomic<uint64_t> changes;
  uint64_t id = 0;
};

TEST(Arenas, WhatNobodyHasGoesBack) {
  const long before = SharedKib(), files = descriptors_of(getpid());
  MemoryBudget budget;
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  arena.count_in(&budget);
  const std::vector<size_t> sizes = {2, 80, 160, 5, 80, 3, 20};
  for (int round = 0; round < 2; ++round) {
    std::vector<char*> taken;
    size_t all = 0;
    for (size_t mib : sizes) {
      char* data = nullptr;
      ASSERT_OK(arena.take(mib * kMiB, &data));
      EXPECT_EQ(data[mib * kMiB - 1], 0) << "it is new memory";
      std::memset(data, 1, mib * kMiB);
      taken.push_back(data);
      all += (mib + 1) / 2 * 2;
    }
    EXPECT_EQ(arena.bytes_held(), all * kMiB);
    EXPECT_EQ(budget.idle.load(), 0u);
    EXPECT_GE(SharedKib(), before + static_cast<long>(all << 10));
    // The large ones, while the small ones stay.
    for (size_t i : {size_t{1}, size_t{2}, size_t{4}, size_t{6}})
      arena.put_back(taken[i], sizes[i] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
    EXPECT_LE(SharedKib(), before + (14 << 10));
    // Of what is small there is as much until nobody has any: it is counted meanwhile.
    arena.put_back(taken[3], sizes[3] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
    EXPECT_EQ(budget.idle.load(), 6 * kMiB);
    for (size_t i : {size_t{0}, size_t{5}}) arena.put_back(taken[i], sizes[i] * kMiB);
    EXPECT_EQ(arena.bytes_held(), 0u);
    EXPECT_EQ(budget.idle.load(), 0u);
    EXPECT_LE(SharedKib(), before + (2 << 10));
    EXPECT_EQ(descriptors_of(getpid()), files);
  }
}

TEST(Arenas, ManyPiecesAreInFewSegments) {
  const long files = descriptors_of(getpid());
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  std::vector<std::pair<char*, size_t>> taken;
  for (int i = 0; i < 160; ++i) {
    taken.emplace_back(nullptr, (i % 2 ? 2 : 8) * kMiB);
    ASSERT_OK(arena.take(taken.back().second, &taken.back().first));
  }
  EXPECT_LE(descriptors_of(getpid()), files + 24);
  for (auto [data, bytes] : taken) arena.put_back(data, bytes);
  EXPECT_EQ(arena.bytes_held(), 0u);
  EXPECT_EQ(descriptors_of(getpid()), files);
}

// Who still has an address of what is gone sees nothing of what comes after it.
TEST(Arenas, AddressesAreNotUsedAgainSoon) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  std::map<const char*, int> seen;
  for (int i = 0; i < 50; ++i) {
    char* data = nullptr;
    ASSERT_OK(arena.take(16 * kMiB, &data));
    EXPECT_EQ(seen[data]++, 0);
    arena.put_back(data, 16 * kMiB);
  }
  // But where there are no others.
  Arena small;
  ASSERT_OK(small.open(40 * kMiB));
  for (int i = 0; i < 5; ++i) {
    char* data = nullptr;
    ASSERT_OK(small.take(24 * kMiB, &data));
    small.put_back(data, 24 * kMiB);
  }
  char* data = nullptr;
  EXPECT_EQ(small.take(48 * kMiB, &data), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("50331648 bytes more"), std::string::npos) << LastMessage();
}

// Nor is looked again whether the machine has as much to spare.
TEST(Arenas, WhatHasMemoryWantsNoMore) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr, *c = nullptr;
  ASSERT_OK(arena.take(6 * kMiB, &a));
  ASSERT_OK(arena.take(6 * kMiB, &b));
  arena.put_back(a, 6 * kMiB);
  os_test_fail_after(-1);  // no more can be had
  EXPECT_EQ(arena.take(4 * kMiB, &a), FRUGAL_OK);
  EXPECT_EQ(arena.take(2 * kMiB, &c), FRUGAL_OK);
  std::memset(a, 1, 4 * kMiB);
  arena.put_back(b, 6 * kMiB);
  EXPECT_EQ(arena.take(6 * kMiB, &b), FRUGAL_OK);
  arena.put_back(b, 6 * kMiB);
  EXPECT_EQ(arena.take(7 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_EQ(arena.take(18 * kMiB, &b), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  EXPECT_EQ(arena.bytes_held(), 12 * kMiB);
  EXPECT_EQ(arena.take(7 * kMiB, &b), FRUGAL_OK);
  std::memset(b, 1, 7 * kMiB);
}

// A part of another's mapping: its memory stays, and is used again by pieces of any size.
TEST(Arenas, OverAMapping) {
  Mapping m;
  ASSERT_OK(os_reserve(64 * kMiB, true, &m, true));
  Arena arena;
  arena.over(m, 8 * kMiB, 48 * kMiB);
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(32 * kMiB, &a));
  EXPECT_EQ(arena.offset(a), 8 * kMiB);
  std::memset(a, 1, 32 * kMiB);
  arena.put_back(a, 32 * kMiB);
  EXPECT_EQ(arena.bytes_held(), 32 * kMiB);
  ASSERT_OK(arena.take(2 * kMiB, &a));
  ASSERT_OK(arena.take(30 * kMiB, &b));
  EXPECT_EQ(b[0], 1);
  EXPECT_EQ(arena.bytes_held(), 32 * kMiB);
  EXPECT_EQ(arena.take(18 * kMiB, &a), FRUGAL_ERR_OUT_OF_MEMORY);
  ASSERT_OK(arena.take(16 * kMiB, &a));
  EXPECT_EQ(arena.offset(a), 40 * kMiB);
  os_release(&m);
}

TEST(ArenaViews, SeeWhatThereIs) {
  const long before = SharedKib();
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(4 * kMiB, &a));
  std::strcpy(a, "before");
  Told first(arena), second(arena);
  ASSERT_OK(arena.take(64 * kMiB, &b));
  std::strcpy(b + 64 * kMiB - 10, "after");
  for (Told* t : {&first, &second}) {
    const char* at = nullptr;
    ASSERT_OK(t->find(arena.offset(a), 10, &at));
    EXPECT_STREQ(at, "before");
    ArenaView::Range near;
    ASSERT_OK(t->view.find(arena.offset(b), 64 * kMiB, &at, &near));
    EXPECT_STREQ(at + 64 * kMiB - 10, "after");
    for (size_t page = 0; page < 64 * kMiB; page += 4096) ASSERT_EQ(at[page], 0);
    ASSERT_OK(t->view.find(arena.offset(b) + 64 * kMiB - 10, 10, &at, &near));
    EXPECT_STREQ(at, "after");
    // No more than there is, and nowhere else.
    EXPECT_EQ(t->view.find(arena.offset(b) + 1, 64 * kMiB, &at, &near), FRUGAL_ERR_INTERNAL);
    for (uint64_t place : {arena.offset(b) + 64 * kMiB, kRange - 1, kRange, UINT64_MAX - 4})
      EXPECT_EQ(t->find(place, 4, &at), FRUGAL_ERR_INTERNAL) << place;
    EXPECT_EQ(t->find(arena.offset(a), UINT64_MAX, &at), FRUGAL_ERR_INTERNAL);
  }
  // Nobody writes it through that.
  EXPECT_NE(0, mprotect(first.view.mapping().base + arena.offset(b), 4096, PROT_READ | PROT_WRITE));
  const char* at = first.view.mapping().base + arena.offset(b);
  std::pair<uint64_t, uint64_t> told;
  first.view.before_gone([&](uint64_t from, uint64_t bytes) {
    told = {from, bytes};
    EXPECT_STREQ(at + 64 * kMiB - 10, "after") << "it is there as yet";
  });
  arena.put_back(b, 64 * kMiB);
  EXPECT_GE(SharedKib(), before + (64 << 10)) << "they have it as yet";
  ASSERT_OK(first.view.look());
  ASSERT_OK(second.view.look());
  EXPECT_LE(SharedKib(), before + (16 << 10));
  EXPECT_EQ(told, std::make_pair(arena.offset(b), uint64_t{64 * kMiB}));
  EXPECT_EQ(at[64 * kMiB - 10], 0) << "who has the address sees nothing, and is not ended";
  EXPECT_EQ(first.find(arena.offset(b), 1, &at), FRUGAL_ERR_INTERNAL);
  // Who is forgotten is told nothing more.
  arena.forget(second.id);
  ASSERT_OK(arena.take(16 * kMiB, &b));
  EXPECT_EQ(first.find(arena.offset(b), 1, &at), FRUGAL_OK);
  EXPECT_EQ(second.find(arena.offset(b), 1, &at), FRUGAL_ERR_PEER_LOST);
}

// What is handed on can be opened anew, and is not written by that.
TEST(ArenaViews, NobodyElseWrites) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* data = nullptr;
  ASSERT_OK(arena.take(16 * kMiB, &data));
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  uint64_t id, told[5];
  ASSERT_OK(arena.tell(ends[0], &id));
  int fd = -1;
  ASSERT_TRUE(os_peek(ends[1], told, sizeof told, &fd));
  ASSERT_GE(fd, 0);
  EXPECT_EQ(Attack(fd), "");
  close(fd);
  close(ends[1]);
}

// What the owner has told before it was killed is there for who looks afterwards.
TEST(ArenaViews, SeeWhatADeadProcessHasLeft) {
  int ends[2], pipe_ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  ASSERT_EQ(pipe(pipe_ends), 0);
  auto own = [&] {
    close(ends[1]);
    Arena arena;
    uint64_t id, places[20];
    char* data = nullptr;
    if (arena.open(kRange) != FRUGAL_OK || arena.take(kMiB, &data) != FRUGAL_OK) return 1;
    auto* changes = reinterpret_cast<std::atomic<uint64_t>*>(data);
    arena.count_changes(changes);
    if (arena.tell(ends[0], &id) != FRUGAL_OK) return 2;
    for (size_t i = 0; i < 20; ++i) {
      if (arena.take(8 * kMiB + i * kMiB, &data) != FRUGAL_OK) return 3;
      std::memset(data, static_cast<int>(i + 1), 8 * kMiB);
      if (i % 3 == 0) arena.put_back(data, 8 * kMiB + i * kMiB);
      places[i] = arena.offset(data);
    }
    if (write(pipe_ends[1], places, sizeof places) != sizeof places) return 4;
    kill(getpid(), SIGKILL);
    return 5;
  };
  const pid_t owner = fork();
  if (owner == 0) _exit(own());
  close(ends[0]);
  int ended = 0;
  ASSERT_EQ(waitpid(owner, &ended, 0), owner);
  ASSERT_TRUE(WIFSIGNALED(ended)) << WEXITSTATUS(ended);
  uint64_t places[20];
  ASSERT_EQ(read(pipe_ends[0], places, sizeof places), static_cast<ssize_t>(sizeof places));
  ArenaView view;
  view.open(ends[1]);
  const char* at = nullptr;
  ArenaView::Range near;
  ASSERT_OK(view.find(0, 8, &at, &near));
  view.changes_at(reinterpret_cast<const std::atomic<uint64_t>*>(at));
  ASSERT_OK(view.current());
  for (size_t i = 0; i < 20; ++i) {
    if (i % 3 == 0) continue;  // others may lie there by now
    ASSERT_OK(view.find(places[i], 8 * kMiB, &at, &near)) << i;
    EXPECT_EQ(at[8 * kMiB - 1], static_cast<char>(i + 1));
  }
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

// A process that is stopped holds up nobody, and is told nothing more from a while on: it sees that.
TEST(ArenaViews, WhoDoesNotLookIsGivenUp) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char* first = nullptr;
  ASSERT_OK(arena.take(kMiB, &first));
  Told stopped(arena), other(arena);
  ASSERT_OK(stopped.view.current());
  char* data = nullptr;
  for (int i = 0; i < 300; ++i) {
    ASSERT_OK(arena.take(8 * kMiB, &data));
    if (i % 50 == 0) {
      ASSERT_OK(other.view.look());
    }
    arena.put_back(data, 8 * kMiB);
  }
  ASSERT_OK(arena.take(8 * kMiB, &data));
  const char* at = nullptr;
  EXPECT_EQ(stopped.find(arena.offset(data), 1, &at), FRUGAL_ERR_PEER_LOST);
  EXPECT_NE(LastMessage().find("close the engine"), std::string::npos) << LastMessage();
  EXPECT_EQ(stopped.view.current(), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(stopped.find(arena.offset(first), 1, &at), FRUGAL_ERR_PEER_LOST);
  ASSERT_OK(other.find(arena.offset(data), 8 * kMiB, &at));
}

// Without a descriptor or memory a look is made again.
TEST(ArenaViews, LookAgainWhereTheyCouldNot) {
  Arena arena;
  ASSERT_OK(arena.open(kRange));
  char *a = nullptr, *b = nullptr;
  ASSERT_OK(arena.take(4 * kMiB, &a));
  Told t(arena);
  ASSERT_OK(t.view.look());
  ASSERT_OK(arena.take(16 * kMiB, &b));
  std::strcpy(b, "there");
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const char* at = nullptr;
  EXPECT_EQ(t.find(arena.offset(b), 16 * kMiB, &at), FRUGAL_ERR_OUT_OF_MEMORY);
  EXPECT_NE(LastMessage().find("descriptor"), std::string::npos) << LastMessage();
  char* more = nullptr;
  EXPECT_EQ(arena.take(32 * kMiB, &more), FRUGAL_ERR_OUT_OF_MEMORY);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  os_test_fail_after(1);
  EXPECT_EQ(t.find(arena.offset(b), 16 * kMiB, &at), FRUGAL_ERR_OUT_OF_MEMORY);
  os_test_fail_after(0);
  ASSERT_OK(t.find(arena.offset(b), 16 * kMiB, &at));
  EXPECT_STREQ(at, "there");
  ASSERT_OK(arena.take(32 * kMiB, &more));
  ASSERT_OK(t.find(arena.offset(more), 32 * kMiB, &at));
}

// Pieces of all sizes come and go; they do not overlap, and each is seen as it is.
TEST(ArenaViews, PiecesNeitherOverlapNorGetLost) {
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
      ASSERT_OK(t.find(arena.offset(gone.data), gone.pages * kHugePage, &at));
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
  ASSERT_OK(t.view.look());
}

// Whatever fails while a piece is taken, or somebody is told, all is as before.
TEST(ArenaViews, WithoutMemory) {
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
    while (looking.next()) looking([&] { return t.find(arena.offset(data), bytes, &at); });
    EXPECT_GT(looking.rounds(), 1);
    arena.put_back(data, bytes);
    ASSERT_OK(t.view.look());
  }
}

}  // namespace
}  // namespace frugal
