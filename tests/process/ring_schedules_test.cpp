// In chosen interleavings of a ring's two ends, all bytes arrive in order, no wake-up is lost, and
// waits end with the connection.
//
// The two ends are threads here (support/schedule.h).
#include <string>
#include <vector>

#include "process/ring.h"
#include "support/schedule.h"

namespace frugal::ring_schedules_test {

constexpr size_t kCapacity = 64;

struct Ends {
  explicit Ends(uint64_t start) {
    for (RingEnd* end : {&writes, &reads}) end->count.store(start), end->asleep.store(0);
    for (RingPeer* link : {&of_writer, &of_reader}) link->look_for(0, false);
    writer = RingWriter(&of_writer, &writes, &reads, data, kCapacity);
    reader = RingReader(&of_reader, &reads, &writes, data, kCapacity);
  }
  RingEnd writes{}, reads{};
  RingPeer of_writer{"the reader"}, of_reader{"the writer"};
  char data[kCapacity];
  RingWriter writer;
  RingReader reader;
};

std::string bytes(uint64_t n) {
  std::string all(n, 0);
  for (size_t i = 0; i < n; ++i) all[i] = static_cast<char>(i * 7 + i / 64);
  return all;
}

// Counts begin where their low half wraps, or anywhere.
uint64_t a_start(Schedule& s) {
  return s.random().one_in(2) ? UINT32_MAX - s.random().below(kCapacity) : s.random().below(1000);
}

TEST(RingSchedules, AllBytesCome) {
  explore("ring.bytes", 10000, [](Schedule& s) {
    Ends ends(a_start(s));
    const std::string sent = bytes(1 + s.random().below(300));
    std::vector<size_t> pieces;
    for (size_t left = sent.size(); left != 0; left -= pieces.back())
      pieces.push_back(1 + s.random().below(std::min<size_t>(left, 100)));
    std::string come(sent.size(), 0);
    const size_t most = 1 + s.random().below(100);
    s.thread("writer", [&] {
      size_t at = 0;
      for (size_t n : pieces) {
        HOLDS(s, ends.writer.write(sent.data() + at, n, UINT64_MAX) == FRUGAL_OK);
        ends.writer.publish();
        at += n;
      }
    });
    s.thread("reader", [&] {
      for (size_t at = 0; at < come.size();) {
        const size_t n = std::min(most, come.size() - at);
        HOLDS(s, ends.reader.read(come.data() + at, n, UINT64_MAX) == FRUGAL_OK);
        ends.reader.publish();
        at += n;
      }
    });
    s.run();
    HOLDS(s, come == sent);
  });
}

// Each side writes or reads for ever, until its own link ends, or the other side closes.
TEST(RingSchedules, WhoWaitsIsLetGo) {
  explore("ring.end", 10000, [](Schedule& s) {
    Ends ends(a_start(s));
    const bool cut = s.random().one_in(2), by_reader = s.random().one_in(2);
    const size_t before = s.random().below(100);
    const std::string some = bytes(before + 1);
    RingPeer& waits = by_reader ? ends.of_reader : ends.of_writer;
    s.thread("waits", [&] {
      Status status = FRUGAL_OK;
      char to[16];
      while (status == FRUGAL_OK)
        status = by_reader ? ends.reader.read(to, 16, UINT64_MAX)
                           : ends.writer.write(some.data(), std::min<size_t>(some.size(), 16),
                                               UINT64_MAX);
      HOLDS(s, status == FRUGAL_ERR_PEER_LOST);
    });
    s.thread("other side", [&] {
      if (by_reader) {
        (void)ends.writer.write(some.data(), before, now_ns() + 1000);
        ends.writer.publish();
      }
      if (!cut) by_reader ? ends.writer.close() : ends.reader.close();
    });
    if (cut) s.thread("ends", [&] { waits.end("is gone"); });
    s.run();
    HOLDS(s, waits.ended());
  });
}

// A wait with a time ends then, and takes nothing.
TEST(RingSchedules, AWaitInVain) {
  explore("ring.time", 10, [](Schedule& s) {
    Ends ends(a_start(s));
    s.thread("reader", [&] {
      char to;
      HOLDS(s, ends.reader.read(&to, 1, now_ns() + 1000000) == FRUGAL_ERR_TIMEOUT);
      HOLDS(s, ends.writer.write("x", 1, 0) == FRUGAL_OK);
      ends.writer.publish();
      HOLDS(s, ends.reader.read(&to, 1, 0) == FRUGAL_OK && to == 'x');
    });
    s.run();
  });
}

}  // namespace frugal::ring_schedules_test
