#include "process/ring.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/assert.h"
#include "base/futex.h"
#include "base/os.h"
#include "base/sync.h"

namespace frugal {
namespace {

constexpr uint64_t kRingSpinNs = 50000;      // about what a sleep and a wake-up cost
constexpr size_t kPiece = size_t{64} << 10;  // the other side begins before all is copied

const char kOver[] =
    "has cut the channel: it is stopping, or took this process for dead, or another trainer has "
    "its rank; close the trainer, and join again";

// The half of the count that changes.
const uint32_t* low_half(const std::atomic<uint64_t>& count) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<const uint32_t*>(&count);
}

bool reached(uint64_t count, uint64_t wanted) { return static_cast<int64_t>(count - wanted) >= 0; }

}  // namespace

RingPeer::RingPeer(const char* peer)
    : peer_(peer), alone_(cpu_count() == 1), spin_ns_(alone_ ? 0 : kRingSpinNs) {}

void RingPeer::end(const char* why) noexcept {
  const char* none = nullptr;
  ended_.compare_exchange_strong(none, why);
  schedule_point();
  // The counts that threads sleep on are in the peer's memory and cannot be changed here, so a
  // thread that is about to sleep still does. It is counted, and is asleep in a moment.
  while (sleepers_.load() != 0) {
    for (size_t i = 0; i < peers_used_; ++i) futex_wake(low_half(peers_[i]->count));
    if (sleepers_.load() != 0) sleep_ns(50'000);
  }
}

Status RingPeer::check() const {
  const char* why = ended_.load();
  return why ? fail(FRUGAL_ERR_PEER_LOST, "%s %s", peer_, why) : FRUGAL_OK;
}

Status RingPeer::refuse(const char* why) {
  end(why);
  return check();
}

Status RingPeer::wait(RingEnd* mine, const RingEnd* peer, uint64_t known, uint64_t wanted,
                      uint64_t until) {
  // A count that goes backwards ends the wait, too: the caller checks it.
  auto over = [=](uint64_t count) { return count - known >= wanted - known; };
  const uint64_t begun = now_ns();
  for (uint64_t now = begun,
                spin = std::min(begun + spin_ns_.load(std::memory_order_relaxed), until);
       now < spin; now = now_ns())
    for (int i = 0; i < 16; ++i) {
      if (i == 0 && polite_.load(std::memory_order_relaxed)) yield_thread();
      cpu_relax();
      if (over(peer->count.load(std::memory_order_relaxed)) ||
          ended_.load(std::memory_order_relaxed))
        return check();
    }
  Status status = FRUGAL_OK;
  mine->wanted.store(wanted, std::memory_order_relaxed);  // published with `asleep`
  sleepers_.fetch_add(1);  // before the check of ended_; end() does it the other way round
  schedule_point();
  mine->asleep.store(1);  // before the check of the count; publish() does it the other way round
  for (WaitTime time = WaitTime::until(until);;) {
    schedule_point();
    const uint64_t count = peer->count.load();
    if (over(count) || ended_.load()) break;
    if (time.over()) {
      status = FRUGAL_ERR_TIMEOUT;
      break;
    }
    futex_wait(low_half(peer->count), static_cast<uint32_t>(count), &time);
  }
  mine->asleep.store(0);
  sleepers_.fetch_sub(1);
  FRUGAL_TRY(check());
  return status;
}

void RingPeer::publish(RingEnd* mine, const RingEnd* peer, uint64_t count) {
  mine->count.store(count);
  schedule_point();
  if (peer->asleep.load() != 0 && reached(count, peer->wanted.load(std::memory_order_relaxed)))
    futex_wake(low_half(mine->count));
}

RingWriter::RingWriter(RingPeer* link, RingEnd* mine, const RingEnd* peer, char* data,
                       size_t capacity)
    : link_(link),
      mine_(mine),
      peer_(peer),
      data_(data),
      capacity_(capacity),
      written_(mine->count.load()),
      published_(written_),
      known_(written_) {
  FRUGAL_ASSERT(std::has_single_bit(capacity) && capacity <= kMaxRing);
  link->sleeps_on(peer);
}

Status RingWriter::look() {
  FRUGAL_TRY(link_->check());
  const uint64_t count = peer_->count.load(std::memory_order_acquire);
  // The reader never reads what was not published, and its count never goes back.
  if (count - known_ > published_ - known_) {
    if (count - known_ - kRingOver <= kMaxRing) return link_->refuse(kOver);
    return link_->refuse("broke the protocol: it has read what was not written");
  }
  known_ = count;
  return FRUGAL_OK;
}

Status RingWriter::wait(size_t bytes, uint64_t until) {
  FRUGAL_ASSERT(bytes <= capacity_);
  FRUGAL_TRY(look());
  while (room() < bytes) {
    publish();
    FRUGAL_TRY(link_->wait(mine_, peer_, known_, written_ + bytes - capacity_, until));
    FRUGAL_TRY(look());
  }
  return FRUGAL_OK;
}

Status RingWriter::write(const void* from, size_t bytes, uint64_t until) {
  const char* source = static_cast<const char*>(from);
  while (bytes > 0) {
    // As much as is worth a wake-up.
    if (room() == 0) FRUGAL_TRY(wait(std::min(bytes, capacity_ / 4), until));
    const size_t n = std::min({bytes, room(), kPiece, capacity_ / 8});
    const size_t at = static_cast<size_t>(written_) & (capacity_ - 1);
    const size_t first = std::min(n, capacity_ - at);
    std::memcpy(data_ + at, source, first);
    if (n > first) std::memcpy(data_, source + first, n - first);
    written_ += n;
    source += n;
    bytes -= n;
    if (!link_->together() && written_ - published_ >= std::min(kPiece, capacity_ / 8)) publish();
  }
  return FRUGAL_OK;
}

void RingWriter::publish() {
  FRUGAL_ASSERT(written_ - known_ <= capacity_);
  if (published_ == written_) return;
  published_ = written_;
  RingPeer::publish(mine_, peer_, written_);
}

RingReader::RingReader(RingPeer* link, RingEnd* mine, const RingEnd* peer, const char* data,
                       size_t capacity)
    : link_(link),
      mine_(mine),
      peer_(peer),
      data_(data),
      capacity_(capacity),
      read_(mine->count.load()),
      published_(read_),
      known_(read_) {
  link->sleeps_on(peer);
}

Status RingReader::look() {
  FRUGAL_TRY(link_->check());
  const uint64_t count = peer_->count.load(std::memory_order_acquire);
  // The writer never writes more than there is room for, and its count never goes back.
  if (count - known_ > capacity_ - available()) {
    if (count - known_ - kRingOver <= kMaxRing) return link_->refuse(kOver);
    return link_->refuse("broke the protocol: it has written more than there is room for");
  }
  known_ = count;
  return FRUGAL_OK;
}

Status RingReader::has(size_t bytes, bool* there) {
  FRUGAL_TRY(look());
  *there = available() >= bytes;
  return FRUGAL_OK;
}

Status RingReader::wait(size_t bytes, uint64_t until) {
  FRUGAL_ASSERT(bytes <= capacity_);
  FRUGAL_TRY(look());
  while (available() < bytes) {
    publish();
    FRUGAL_TRY(link_->wait(mine_, peer_, known_, read_ + bytes, until));
    FRUGAL_TRY(look());
  }
  return FRUGAL_OK;
}

void RingReader::publish() {
  FRUGAL_ASSERT(known_ - read_ <= capacity_);
  if (published_ == read_) return;
  published_ = read_;
  RingPeer::publish(mine_, peer_, read_);
}

Status RingReader::read(void* to, uint64_t bytes, uint64_t until) {
  char* target = static_cast<char*>(to);
  while (bytes > 0) {
    // As much as is worth a wake-up. The writer goes on while there is less: three quarters of the
    // ring are free for it.
    if (available() == 0)
      FRUGAL_TRY(wait(static_cast<size_t>(std::min<uint64_t>(bytes, capacity_ / 4)), until));
    const size_t n = static_cast<size_t>(std::min<uint64_t>(
        bytes, target ? std::min({available(), kPiece, capacity_ / 8}) : available()));
    if (target) {
      const size_t at = static_cast<size_t>(read_) & (capacity_ - 1);
      const size_t first = std::min(n, capacity_ - at);
      std::memcpy(target, data_ + at, first);
      if (n > first) std::memcpy(target + first, data_, n - first);
      target += n;
    }
    read_ += n;
    bytes -= n;
    if (read_ - published_ >= std::min(kPiece, capacity_ / 8)) publish();
  }
  return FRUGAL_OK;
}

}  // namespace frugal
