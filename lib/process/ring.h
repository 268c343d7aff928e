// A stream of bytes from one process to another through shared memory: one writer, one reader.
//
// Each side has a RingEnd in memory that only its process writes: how many bytes it has written, or
// read, so far. Data is in the writer's memory. Each side treats what the other writes as an
// enemy's: it copies a count once, and refuses it if it goes backwards or is further ahead than the
// capacity.
//
// A waiting thread polls for a while and then sleeps on the low half of the other side's count. It
// notes in its own end that it sleeps, and for which count, before it checks the count for the last
// time. A thread that moves a count reads that note afterwards. Both are sequentially consistent,
// so one of the two sees the other. Without sleepers, and while there is not enough for them, no
// thread calls the system. A count moves by at most the capacity while the other side waits, so its
// low half suffices.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace frugal {

// On cache lines of their own, and not in pairs of lines that are fetched together.
struct RingEnd {
  alignas(128) std::atomic<uint64_t> count;
  alignas(128) std::atomic<uint32_t> asleep;
  std::atomic<uint64_t> wanted;  // the other's count, while asleep
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

constexpr size_t kMaxRing = size_t{1} << 30;
// A count so far ahead means that its side has finished with the ring: no other message is left to
// say so. Its low half differs, so no thread goes on sleeping.
constexpr uint64_t kRingOver = (uint64_t{1} << 62) + (uint64_t{1} << 31);

// What the ends of rings to one peer share in a process: whether the peer is there, and the waits.
// Times are values of now_ns(); UINT64_MAX is never. A wait takes longer by the time for which its
// process was suspended.
class RingPeer {
 public:
  // `peer` begins the messages, as in "the controller"; a static string.
  explicit RingPeer(const char* peer);

  // Adds a count that calls of this process sleep on. Called before the first wait.
  void sleeps_on(const RingEnd* peer) { peers_[peers_used_++] = peer; }

  // From now on every call returns FRUGAL_ERR_PEER_LOST, also those that wait. The first reason is
  // kept; a static string. Threads: any.
  void end(const char* why) noexcept;
  bool ended() const { return ended_.load() != nullptr; }
  Status check() const;

  // How long a wait polls before it sleeps, and whether it lets other threads of its processor run
  // meanwhile. Called by the thread that waits.
  void look_for(uint64_t ns, bool polite) {
    spin_ns_.store(alone_ ? 0 : ns, std::memory_order_relaxed);
    polite_.store(polite, std::memory_order_relaxed);
  }

  // The peer's thread runs on this thread's processor: to notify it early gains no time.
  void set_together(bool together) { together_.store(together, std::memory_order_relaxed); }
  bool together() const { return together_.load(std::memory_order_relaxed); }

  // Waits until the peer's count has moved from `known` to `wanted`, or is one that it cannot have
  // on the way. FRUGAL_ERR_TIMEOUT has no message: the caller knows what it waits for.
  Status wait(RingEnd* mine, const RingEnd* peer, uint64_t known, uint64_t wanted, uint64_t until);
  // Reports a protocol error: calls end().
  Status refuse(const char* why);
  // Makes a count known, and wakes the other side if it sleeps until that count.
  static void publish(RingEnd* mine, const RingEnd* peer, uint64_t count);

 private:
  const char* const peer_;
  const bool alone_;  // there is one processor: polling delays the peer
  // Releases are written concurrently with the thread that sets these.
  std::atomic<uint64_t> spin_ns_;
  std::atomic<bool> polite_{false};
  std::atomic<bool> together_{false};
  std::atomic<const char*> ended_{nullptr};
  std::atomic<uint32_t> sleepers_{0};
  const RingEnd* peers_[3] = {};
  size_t peers_used_ = 0;
};

// Each of the two classes is used by one thread at a time. The capacity is a power of two, at most
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
  // Notifies the reader that nothing more comes. The last call.
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
  uint64_t written_ = 0;  // private copies: those in shared memory are for the reader
  uint64_t published_ = 0;
  uint64_t known_ = 0;  // of the reader's count
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingPeer* link, RingEnd* mine, const RingEnd* peer, const char* data, size_t capacity);

  // Waits until so many bytes, at most the capacity, are there.
  Status wait(size_t bytes, uint64_t until);
  // Any size; null: the bytes are dropped. The writer may not know of the last ones until
  // publish().
  Status read(void* to, uint64_t bytes, uint64_t until);
  void publish();
  // Notifies the writer that nothing more is read. The last call.
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
