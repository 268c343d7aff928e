// Rings and channels: between threads, between processes, and with peers that die or send false
// counts.
#include "process/channel.h"

#include <sys/resource.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "peers.h"
#include "proc.h"

namespace frugal::channel_test {

using Peer = std::unique_ptr<Channel>;

Status Create(size_t ring_bytes, size_t staging_bytes, Peer* out, uint64_t start = 0) {
  std::shared_ptr<StagingMemory> staging;
  if (staging_bytes) FRUGAL_TRY(StagingMemory::make(staging_bytes, nullptr, &staging));
  return Channel::create(ring_bytes, std::move(staging), out, start);
}

int Copy(int fd) { return fd < 0 ? -1 : dup(fd); }

Status Attach(const Channel& of, Peer* out) {
  return Channel::attach(dup(of.up_fd()), dup(of.down_fd()), Copy(of.staging_fd()), out);
}

// Words of the regions, as a hostile peer sees them: docs/processes.md, "Channels".
struct Region {
  // What the controller alone writes cannot be mapped so again: then through its mapping.
  explicit Region(int fd) : base(writable_mapping_of(fd)) {
    if (base) return;
    EXPECT_OK(os_map_shared(dup(fd), true, &mapping));
    base = mapping.base;
  }
  ~Region() { os_release(&mapping); }
  std::atomic<uint64_t>& word(size_t offset) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(base + offset);
  }
  char* base;
  Mapping mapping;
};
constexpr size_t kUpRequests = 0, kUpAnswers = 256, kUpReleases = 512;

// Payloads whose bytes identify them.
void Fill(std::vector<uint64_t>* to, size_t bytes, uint64_t seed) {
  to->resize((bytes + 7) / 8);
  for (size_t i = 0; i < to->size(); ++i) (*to)[i] = seed + i * 0x9e3779b97f4a7c15;
}

size_t Size(Random& random, size_t large) {
  switch (random.below(8)) {
    case 0:
      return 0;
    case 1:
      return random.below(large);
    case 2:
      return 64 * random.below(100);
    case 3:
      return large;
    default:
      return random.below(200);
  }
}

// Both sides know the seed, and so every message.
int SendAll(Channel& c, uint64_t seed, uint64_t total, size_t large) {
  Random random{seed};
  std::vector<uint64_t> data;
  for (uint64_t sent = 0, n = 0; sent < total; ++n) {
    const size_t bytes = Size(random, large);
    Fill(&data, bytes, seed + n);
    Header h{};
    h.type = static_cast<uint32_t>(n);
    h.sequence = n;
    h.args[4] = ~n;
    const size_t cut = bytes ? random.below(bytes) : 0;
    const char* p = reinterpret_cast<const char*>(data.data());
    const Piece pieces[] = {{p, cut}, {nullptr, 0}, {p + cut, bytes - cut}};
    if (c.send(h, pieces, 3, kNever) != FRUGAL_OK) return 1;
    sent += bytes + sizeof h;
  }
  return 0;
}

int ReceiveAll(Channel& c, uint64_t seed, uint64_t total, size_t large) {
  Random random{seed}, own{~seed};
  std::vector<uint64_t> data, got;
  for (uint64_t received = 0, n = 0; received < total; ++n) {
    const size_t bytes = Size(random, large);
    if (bytes) random.below(bytes);
    Header h;
    if (c.receive(&h, kNever) != FRUGAL_OK) return 2;
    if (h.type != static_cast<uint32_t>(n) || h.sequence != n || h.args[4] != ~n ||
        h.payload != bytes)
      return 3;
    received += bytes + sizeof h;
    // Leaves the payload unread: the next receive() releases it. After the last payload there is no
    // receive().
    if (own.below(10) == 0 && received < total) continue;
    got.assign((bytes + 7) / 8, 0);
    const size_t cut = bytes ? own.below(bytes) : 0;
    char* p = reinterpret_cast<char*>(got.data());
    if (c.read(p, cut, kNever) || c.read(p + cut, bytes - cut, kNever)) return 4;
    if (c.payload_left() != 0) return 5;
    Fill(&data, bytes, seed + n);
    if (std::memcmp(data.data(), got.data(), bytes) != 0) return 6;
  }
  return 0;
}

TEST(Channel, StreamsBetweenThreads) {
  for (size_t ring : {size_t{4096}, size_t{1} << 16, size_t{1} << 20})
    // Counts that pass 2^64, and 2^32.
    for (uint64_t start : {uint64_t{0}, UINT64_MAX - 70001, (uint64_t{1} << 32) - 12345}) {
      Peer controller, trainer;
      ASSERT_OK(Create(ring, 0, &controller, start));
      ASSERT_OK(Attach(*controller, &trainer));
      std::vector<std::thread> threads;
      std::atomic<int> wrong{0};
      const uint64_t total = 4 << 20;
      threads.emplace_back([&] { wrong += SendAll(*trainer, 1, total, 3 * ring); });
      threads.emplace_back([&] { wrong += ReceiveAll(*controller, 1, total, 3 * ring); });
      threads.emplace_back([&] { wrong += SendAll(*controller, 2, total, 3 * ring); });
      threads.emplace_back([&] { wrong += ReceiveAll(*trainer, 2, total, 3 * ring); });
      for (auto& t : threads) t.join();
      EXPECT_EQ(wrong, 0) << ring << " from " << start;
    }
}

TEST(Channel, StreamsAGigabyteBetweenProcesses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kTotal = 100'000'000;
#else
  constexpr uint64_t kTotal = 1'100'000'000;
#endif
  Peer controller;
  ASSERT_OK(Create(1 << 20, 0, &controller, UINT64_MAX - 500'000'000));
  Child child([&] {
    Peer trainer;
    if (Attach(*controller, &trainer) != FRUGAL_OK) return 10;
    if (int wrong = SendAll(*trainer, 7, kTotal, 5 << 20)) return wrong;
    return ReceiveAll(*trainer, 8, kTotal / 10, 1 << 16);
  });
  EXPECT_EQ(ReceiveAll(*controller, 7, kTotal, 5 << 20), 0);
  EXPECT_EQ(SendAll(*controller, 8, kTotal / 10, 1 << 16), 0);
  EXPECT_EQ(child.Wait(), 0);
}

// Each side waits for the other's message, so every wake-up counts; now and then longer than any
// thread polls.
TEST(Channel, RoundTripsWithSleepers) {
  Peer controller;
  ASSERT_OK(Create(4096, 0, &controller));
  constexpr uint64_t kTrips = 5000;
  const auto nap = [](uint64_t n) {
    if (n % 5 == 0) usleep(static_cast<useconds_t>(mix(n) % 150));
  };
  Child child([&] {
    Peer trainer;
    if (Attach(*controller, &trainer) != FRUGAL_OK) return 10;
    for (uint64_t n = 0; n < kTrips; ++n) {
      Header h{};
      h.sequence = n;
      nap(n);
      if (trainer->send(h, nullptr, 0, kNever) || trainer->receive(&h, kNever)) return 1;
      if (h.sequence != ~n) return 2;
    }
    return 0;
  });
  for (uint64_t n = 0; n < kTrips; ++n) {
    Header h;
    ASSERT_OK(controller->receive(&h, kNever));
    ASSERT_EQ(h.sequence, n);
    h.sequence = ~n;
    nap(n * 3 + 1);
    ASSERT_OK(controller->send(h, nullptr, 0, kNever));
  }
  EXPECT_EQ(child.Wait(), 0);
}

TEST(Channel, EdgesOfTheCapacity) {
  constexpr size_t kRing = 4096;
  Peer controller, trainer;
  ASSERT_OK(Create(kRing, 0, &controller));
  ASSERT_OK(Attach(*controller, &trainer));
  std::vector<char> data(kRing, 'x'), got(kRing);
  Header h{}, r;
  // Exactly full, then nothing more.
  for (int round = 0; round < 3; ++round) {
    const Piece piece{data.data(), kRing - 64};
    ASSERT_OK(trainer->send(h, &piece, 1, After(0)));
    EXPECT_EQ(trainer->send(h, nullptr, 0, After(1)), FRUGAL_ERR_TIMEOUT);
    ASSERT_OK(controller->receive(&r, 0));
    EXPECT_EQ(r.payload, kRing - 64);
    EXPECT_EQ(controller->payload_left(), kRing - 64);
    ASSERT_OK(controller->read(got.data(), kRing - 64, 0));
    EXPECT_EQ(got[kRing - 65], 'x');
    EXPECT_EQ(controller->receive(&r, After(1)), FRUGAL_ERR_TIMEOUT);
  }
  // Headers only: 64 of them.
  for (size_t i = 0; i < kRing / 64; ++i) ASSERT_OK(trainer->send(h, nullptr, 0, 0));
  EXPECT_EQ(trainer->send(h, nullptr, 0, 0), FRUGAL_ERR_TIMEOUT);
  for (size_t i = 0; i < kRing / 64; ++i) ASSERT_OK(controller->receive(&r, 0));
  // A time-out before a message changes nothing: a quarter of the ring goes as a whole or not at
  // all.
  const Piece most{data.data(), kRing - 64 - 512}, quarter{data.data(), kRing / 4 - 64};
  ASSERT_OK(trainer->send(h, &most, 1, 0));
  EXPECT_EQ(trainer->send(h, &quarter, 1, 0), FRUGAL_ERR_TIMEOUT);
  EXPECT_FALSE(trainer->is_cut());
  ASSERT_OK(controller->receive(&r, 0));
  ASSERT_OK(controller->skip(r.payload, 0));
  ASSERT_OK(trainer->send(h, &quarter, 1, 0));
  ASSERT_OK(controller->receive(&r, 0));
  EXPECT_EQ(r.payload, kRing / 4 - 64);
}

TEST(Channel, TimeOutInAMessageIsFinal) {
  Peer controller, trainer;
  ASSERT_OK(Create(4096, 0, &controller));
  ASSERT_OK(Attach(*controller, &trainer));
  std::vector<char> data(10'000);
  const Piece piece{data.data(), data.size()};
  Header h{};
  EXPECT_EQ(trainer->send(h, &piece, 1, After(2)), FRUGAL_ERR_TIMEOUT);
  EXPECT_EQ(trainer->send(h, nullptr, 0, After(2)), FRUGAL_ERR_PEER_LOST);
  EXPECT_EQ(trainer->receive(&h, After(2)), FRUGAL_ERR_PEER_LOST);
  EXPECT_NE(Message(trainer->receive(&h, 0)).find("the controller cannot be talked to"),
            std::string::npos);
  ASSERT_OK(controller->receive(&h, After(1000)));
  EXPECT_EQ(controller->read(data.data(), data.size(), After(2)), FRUGAL_ERR_TIMEOUT);
  EXPECT_EQ(controller->receive(&h, After(2)), FRUGAL_ERR_PEER_LOST);
}

TEST(Channel, CutWakesEveryWait) {
  for (int round = 0; round < 40; ++round) {
    Peer controller, trainer;
    ASSERT_OK(Create(4096, 0, &controller));
    ASSERT_OK(Attach(*controller, &trainer));
    std::vector<char> data(100'000);
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      const Piece piece{data.data(), data.size()};
      EXPECT_EQ(trainer->send(Header{}, &piece, 1, kNever), FRUGAL_ERR_PEER_LOST);
    });
    threads.emplace_back([&] {
      Header h;
      EXPECT_EQ(trainer->receive(&h, kNever), FRUGAL_ERR_PEER_LOST);
    });
    threads.emplace_back([&] { EXPECT_EQ(trainer->wait_release(kNever), FRUGAL_ERR_PEER_LOST); });
    // While they come, spin, and sleep.
    usleep(static_cast<useconds_t>(mix(round) % 200));
    std::thread other([&] { trainer->cut(); });
    trainer->cut();
    other.join();
    for (auto& t : threads) t.join();
    EXPECT_FALSE(controller->is_cut());
    uint64_t offset;
    EXPECT_FALSE(trainer->next_release(&offset));
    EXPECT_EQ(trainer->send(Header{}, nullptr, 0, kNever), FRUGAL_ERR_PEER_LOST);
  }
}

TEST(Channel, PeerIsKilledInAMessage) {
  for (int round = 0; round < 20; ++round) {
    Peer controller;
    ASSERT_OK(Create(1 << 16, 0, &controller));
    Child child([&] {
      Peer trainer;
      if (Attach(*controller, &trainer) != FRUGAL_OK) return 10;
      return SendAll(*trainer, 7, UINT64_MAX / 2, 1 << 20);
    });
    Status status = FRUGAL_OK;
    uint64_t bytes = 0;
    std::thread reader([&] {
      Header h;
      std::vector<char> data(1 << 20);
      while ((status = controller->receive(&h, kNever)) == FRUGAL_OK) {
        if ((status = controller->read(data.data(), h.payload, kNever)) != FRUGAL_OK) return;
        bytes += h.payload;
      }
    });
    usleep(static_cast<useconds_t>(1000 + mix(round) % 5000));
    EXPECT_EQ(child.Kill(SIGKILL), 1000 + SIGKILL);
    controller->cut();  // as the watch does
    reader.join();
    EXPECT_EQ(status, FRUGAL_ERR_PEER_LOST);
    EXPECT_NE(
        Message(controller->send(Header{}, nullptr, 0, 0)).find("the trainer process is gone"),
        std::string::npos);
  }
}

TEST(Channel, StagingAndReleases) {
  Peer controller, trainer;
  ASSERT_OK(Create(4096, 5 << 20, &controller, UINT64_MAX - 100));
  ASSERT_OK(Attach(*controller, &trainer));
  EXPECT_EQ(trainer->staging_bytes(), size_t{6} << 20);  // whole huge pages
  ASSERT_OK(trainer->commit_staging(0, 6 << 20));
  EXPECT_EQ(trainer->commit_staging(1, 6 << 20), FRUGAL_ERR_INTERNAL);
  EXPECT_EQ(trainer->commit_staging(UINT64_MAX, 2), FRUGAL_ERR_INTERNAL);
  std::memset(trainer->staging(), 's', 6 << 20);
  const char* at = controller->staging_at(4711, 100);
  ASSERT_NE(at, nullptr);
  EXPECT_EQ(at[99], 's');
  EXPECT_NE(controller->staging_at((6 << 20) - 1, 1), nullptr);
  EXPECT_EQ(controller->staging_at((6 << 20) - 1, 2), nullptr);
  EXPECT_EQ(controller->staging_at((6 << 20) + 1, 0), nullptr);
  EXPECT_EQ(controller->staging_at(UINT64_MAX, 2), nullptr);
  EXPECT_EQ(controller->staging_at(2, UINT64_MAX), nullptr);
  trainer->counter(5).store(55);
  EXPECT_EQ(controller->counter_value(5), 55u);

  uint64_t offset = 0;
  EXPECT_FALSE(trainer->next_release(&offset));
  EXPECT_EQ(trainer->wait_release(After(1)), FRUGAL_ERR_TIMEOUT);
  // Several threads release, each its own offsets; the trainer takes them in turn.
  constexpr uint64_t kEach = 20'000, kThreads = 3;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach; ++i) controller->release(t << 32 | i);
    });
  std::vector<uint64_t> next(kThreads);
  for (uint64_t n = 0; n < kEach * kThreads; ++n) {
    ASSERT_OK(trainer->wait_release(kNever));
    ASSERT_TRUE(trainer->next_release(&offset));
    ASSERT_LT(offset >> 32, kThreads);
    ASSERT_EQ(offset & UINT32_MAX, next[offset >> 32]++);
  }
  for (auto& t : threads) t.join();
  EXPECT_FALSE(trainer->next_release(&offset));
  // One more than a trainer process may have coming is its fault.
  for (size_t i = 0; i < Channel::kReleases; ++i) controller->release(i);
  EXPECT_FALSE(controller->is_cut());
  controller->release(0);
  EXPECT_TRUE(controller->is_cut());
}

TEST(Channel, MemoryThatCannotBeHad) {
  int failed = 0;
  for (int64_t n = 1;; ++n) {
    Peer controller, trainer;
    os_test_fail_after(n);
    Status s = Create(4096, 1 << 20, &controller);
    int up = -1, down = -1, staging = -1;
    if (s == FRUGAL_OK) {
      up = dup(controller->up_fd());
      down = dup(controller->down_fd());
      staging = dup(controller->staging_fd());
      s = Channel::attach(up, down, staging, &trainer);
    }
    if (s == FRUGAL_OK) s = trainer->commit_staging(0, 1 << 20);
    const bool passed = os_test_fail_after(0) > 0;
    if (controller && !trainer) {
      EXPECT_EQ(0, close(up));  // still the caller's
      EXPECT_EQ(0, close(down));
      EXPECT_EQ(0, close(staging));
    }
    if (passed) {
      EXPECT_OK(s);
      break;
    }
    EXPECT_EQ(s, FRUGAL_ERR_OUT_OF_MEMORY);
    ++failed;
  }
  EXPECT_EQ(failed, 9);  // three regions made, two committed, three mapped, staging memory
  Peer c;
  for (size_t ring : {size_t{0}, size_t{2048}, size_t{5000}, size_t{1} << 31})
    EXPECT_EQ(Create(ring, 0, &c), FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(Create(4096, SIZE_MAX, &c), FRUGAL_ERR_INVALID_ARGUMENT);
}

TEST(Channel, AttachRefusesWhatIsNoChannel) {
  Peer controller, trainer;
  ASSERT_OK(Create(4096, 0, &controller));
  // The regions exchanged, the same one twice, none.
  EXPECT_EQ(Channel::attach(controller->down_fd(), controller->up_fd(), -1, &trainer),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(Channel::attach(controller->up_fd(), controller->up_fd(), -1, &trainer),
            FRUGAL_ERR_INVALID_ARGUMENT);
  EXPECT_EQ(Channel::attach(0, controller->down_fd(), -1, &trainer), FRUGAL_ERR_INVALID_ARGUMENT);
  // Geometry that does not fit the regions.
  Region down(controller->down_fd());
  for (size_t word : {0, 8, 16}) {
    const uint64_t before = down.word(word).load();
    for (uint64_t value :
         {uint64_t{0}, before + 1, before << 20 | 1 << 25, uint64_t{1} << 63, UINT64_MAX}) {
      down.word(word).store(value);
      if (value == before) continue;
      if (word == 16 && value == 0) continue;  // it is
      EXPECT_EQ(Attach(*controller, &trainer), FRUGAL_ERR_INVALID_ARGUMENT) << word << " " << value;
    }
    down.word(word).store(before);
  }
  EXPECT_OK(Attach(*controller, &trainer));
}

TEST(Channel, CountsThatCannotBe) {
  struct {
    size_t word;
    uint64_t add;
    bool fine;
  } cases[] = {{kUpRequests, 4096, true},
               {kUpRequests, 4097, false},
               {kUpRequests, UINT64_MAX, false},
               {kUpRequests, uint64_t{1} << 32, false},
               {kUpAnswers, 0, true},
               {kUpAnswers, 1, false},
               {kUpAnswers, UINT64_MAX, false},
               {kUpReleases, 8, false},
               {kUpReleases, UINT64_MAX, false}};
  for (const auto& c : cases) {
    Peer controller;
    ASSERT_OK(Create(4096, 0, &controller, 1 << 20));
    Region up(controller->up_fd());
    up.word(c.word).store(up.word(c.word).load() + c.add);
    Header h{};
    const Status received = controller->receive(&h, 0);
    const Status sent = controller->send(h, nullptr, 0, 0);
    controller->release(0);
    EXPECT_EQ(controller->is_cut(), !c.fine) << c.word << " " << c.add;
    if (c.fine && c.word == kUpRequests) {
      EXPECT_OK(received);  // zeros
      EXPECT_OK(sent);
    }
    if (!c.fine && c.word != kUpReleases) {
      EXPECT_TRUE(received == FRUGAL_ERR_PEER_LOST || sent == FRUGAL_ERR_PEER_LOST);
    }
    if (!c.fine) {
      EXPECT_NE(Message(controller->receive(&h, 0)).find("broke the protocol"), std::string::npos);
    }
  }
  // While there is data: one byte more than there is room for, and back over what was seen.
  for (uint64_t add : {uint64_t{4096 - 64}, uint64_t{4096 - 64 + 1}, uint64_t{0} - 32}) {
    Peer controller, trainer;
    ASSERT_OK(Create(4096, 0, &controller));
    ASSERT_OK(Attach(*controller, &trainer));
    Region up(controller->up_fd());
    Header h{};
    ASSERT_OK(trainer->send(h, nullptr, 0, 0));
    ASSERT_OK(trainer->send(h, nullptr, 0, 0));
    ASSERT_OK(controller->receive(&h, 0));
    up.word(kUpRequests).fetch_add(add);
    EXPECT_EQ(controller->receive(&h, 0), add == 4096 - 64 ? FRUGAL_OK : FRUGAL_ERR_PEER_LOST)
        << add;
  }
  // A payload that the message has not.
  Peer controller, trainer;
  ASSERT_OK(Create(4096, 0, &controller));
  ASSERT_OK(Attach(*controller, &trainer));
  char data[16] = {};
  const Piece piece{data, 8};
  Header h{};
  ASSERT_OK(trainer->send(h, &piece, 1, 0));
  ASSERT_OK(controller->receive(&h, 0));
  EXPECT_EQ(controller->read(data, 9, 0), FRUGAL_ERR_PEER_LOST);
}

// A peer that writes anything anywhere, all the time: calls end at their time-outs or at once.
TEST(Channel, HostileWriter) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Peer controller;
    ASSERT_OK(Create(4096, 1 << 20, &controller, mix(seed)));
    Region up(controller->up_fd());
    std::atomic<bool> done{false};
    std::thread enemy([&] {
      Random random{seed};
      while (!done.load()) {
        std::atomic<uint64_t>& word =
            up.word(random.below(4) ? random.below(6) * 128 : random.below(1024) * 8);
        switch (random.below(4)) {
          case 0:
            word.store(random());
            break;
          case 1:
            word.store(0);
            break;
          default:
            word.fetch_add(random.below(200));
            break;
        }
      }
    });
    std::vector<char> data(10'000);
    Random random{~seed};
    for (int i = 0; i < 100 && !controller->is_cut(); ++i) {
      Header h{};
      const Piece piece{data.data(), random.below(data.size())};
      switch (random.below(4)) {
        case 0:
          controller->send(h, &piece, 1, now_ns() + 20000);
          break;
        case 1:
          if (controller->receive(&h, now_ns() + 20000) == FRUGAL_OK)
            controller->read(data.data(), std::min<uint64_t>(h.payload, random.below(data.size())),
                             now_ns() + 20000);
          break;
        case 2:
          controller->release(random());
          break;
        default:
          if (const char* p = controller->staging_at(random.below(2 << 20), random.below(2 << 20)))
            data[0] = *p;
      }
    }
    done.store(true);
    enemy.join();
  }
}

}  // namespace frugal::channel_test
