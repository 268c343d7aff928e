// A stream of bytes from one process to another through shared memory: one writer, one reader.
//
// Each side has a RingEnd in memory that only its process writes: how many bytes it has written, or
// read, so far. Data lies in the writer's memory. What the other side writes is taken for an
// enemy's: a count is copied once, and refused if it goes backwards or is further away than the
// capacity.
//
// Who waits looks for a while and then sleeps on the low half of the other's count. It says so in
// its own end, and for which count, before it looks for the last time; who moves a count looks
// there afterwards. Both in the order that all threads agree on, so one of the two sees the other;
// without sleepers, and while there is not enough for them, nobody calls the system. A count moves
// by at most the capacity while the other side waits: its low half tells.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace frugal {

// On lines of their own, and not in pairs that are fetched together.
struct RingEnd {
  alignas(128) std::atomic<uint64_t> count;
  alignas(128) std::atomic<uint32_t> asleep;
  std::atomic<uint64_t> wanted;  // the other's count, while asleep
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

constexpr size_t kMaxRing = size_t{1} << 30;
// A count that is so far ahead says that its side has done with the ring: no other message is left
// to say it with. Its low half is another, so nobody goes on sleeping.
constexpr uint64_t kRingOver = (uint64_t{1} << 62) + (uint64_t{1} << 31);

// What the ends of rings to one peer share in a process: whether the peer is there, and the waits.
// The times are values of now_ns(), UINT64_MAX is never; for how long a wait's process has stood
// still, the wait takes longer.
class RingPeer {
 public:
  // `peer` begins the messages, as in "the controller"; a string for ever.
  explicit RingPeer(const char* peer);

  // The counts that calls of this process sleep on. Before the first wait.
  void sleeps_on(const RingEnd* peer) { peers_[peers_used_++] = peer; }

  // From now on every call answers FRUGAL_ERR_PEER_LOST, those that wait, too. The first reason
  // holds; a string for ever. Threads: any.
  void end(const char* why) noexcept;
  bool ended() const { return ended_.load() != nullptr; }
  Status check() const;

  // How long a wait looks before it sleeps, and whether it lets others on its processor run
  // meanwhile. By the thread that waits.
  void look_for(uint64_t ns, bool polite) {
    spin_ns_.store(alone_ ? 0 : ns, std::memory_order_relaxed);
    polite_.store(polite, std::memory_order_relaxed);
  }

  // The peer's thread runs on this thread's processor: there is no time to gain by telling it
  // early.
  void set_together(bool together) { together_.store(together, std::memory_order_relaxed); }
  bool together() const { return together_.load(std::memory_order_relaxed); }

  // Waits until the peer's count has come from `known` to `wanted`, or is none that it can be on
  // the way there. FRUGAL_ERR_TIMEOUT has no message: the caller knows what it waits for.
  Status wait(RingEnd* mine, const RingEnd* peer, uint64_t known, uint64_t wanted, uint64_t until);
  // A protocol error: ends.
  Status refuse(const char* why);
  // Makes a count known.
  static void publish(RingEnd* mine, const RingEnd* peer, uint64_t count);

 private:
  const char* const peer_;
  const bool alone_;  // on the only processor: looking holds up the peer
  // Releases are written beside the thread that sets these.
  std::atomic<uint64_t> spin_ns_;
  std::atomic<bool> polite_{false};
  std::atomic<bool> together_{false};
  std::atomic<const char*> ended_{nullptr};
  std::atomic<uint32_t> sleepers_{0};
  const RingEnd* peers_[3] = {};
  size_t peers_used_ = 0;
};

// One thread at a time for each of the two classes. The capacity is a power of two, at most
// kMaxRing. Both begin at the count that their ends have, which is the same.
class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(RingPeer* link, RingEnd* mine, const RingEnd* peer, char* data, size_t capacity);

  // Waits until so many bytes, at most the capacity, can be written without a wait.
  Status wait(size_t bytes, uint64_t until);
  // Any size. The last bytes may be unknown to the reader until publish().
  Status write(const void* from, size_t bytes, uint64_t until);
  void publish();
  // Tells the reader that nothing comes any more. The last call.
  void close() { RingPeer::publish(mine_, peer_, written_ + kRingOver); }
  size_t capacity() const { return capacity_; }

 private:
  size_t room() const { return capacity_ - static_cast<size_t>(written_ - known_); }
  Status look();

  RingPeer* link_ = nullptr;
  RingEnd* mine_ = nullptr;
  const RingEnd* peer_ = nullptr;
  char* data_ = nullptr;
  size_t capacity_ = 0;
  uint64_t written_ = 0;    // private copies: what lies in shared memory is for the reader
  uint64_t published_ = 0;
  uint64_t known_ = 0;      // of the reader's count
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingPeer* link, RingEnd* mine, const RingEnd* peer, const char* data, size_t capacity);

  // Waits until so many bytes, at most the capacity, are there.
  Status wait(size_t bytes, uint64_t until);
  // Any size; null: the bytes are let go. The writer may not know of the last ones until publish().
  Status read(void* to, uint64_t bytes, uint64_t until);
  void publish();
  // Tells the writer that nobody reads any more. The last call.
  void close() { RingPeer::publish(mine_, peer_, read_ + kRingOver); }
  // Whether so many bytes are there now.
  Status has(size_t bytes, bool* there);

 private:
  size_t available() const { return static_cast<size_t>(known_ - read_); }
  Status look();

  RingPeer* link_ = nullptr;
  RingEnd* mine_ = nullptr;
  const RingEnd* peer_ = nullptr;
  const char* data_ = nullptr;
  size_t capacity_ = 0;
  uint64_t read_ = 0;
  uint64_t published_ = 0;
  uint64_t known_ = 0;  // of the writer's count
};

}  // namespace frugal
