// A channel between a trainer process and the controller: regions of shared memory, each written by
// one of the two.
//
//   up, written by the trainer process:      ring of requests, counters
//   staging, written by the trainer process: memory for sums and declared keys (none in the channel
//                                            of a process, for calls outside steps)
//   down, written by the controller:         ring of replies, ring of releases of staging memory
//
// The controller makes them all. Each side maps what it does not write read-only. A read of staging
// memory that was not committed takes memory and reads zeros.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/arena.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/region_publisher.h"
#include "base/sync.h"
#include "process/ring.h"

namespace frugal {

// Set in a reply's type: its sender runs on the processor of the process that asked.
constexpr uint32_t kTogether = 1u << 31;

// Begins a message; `payload` bytes follow.
struct Header {
  uint32_t type;
  uint32_t status;  // of a reply; of a request, SpinPolicy::processor()
  uint64_t sequence;
  uint64_t payload;
  uint64_t args[5];
};
static_assert(sizeof(Header) == 64);

struct Piece {
  const void* data;
  size_t bytes;
};

// Staging memory, as the controller has it: read-only. The process that gets it first maps it to
// write.
class StagingMemory : public HeapObject {
 public:
  // `bytes` is rounded up to 2 MiB; at most 64 TiB. `region_publisher`: for show(), or null.
  static Status make(size_t bytes, std::shared_ptr<RegionPublisher> region_publisher,
                     std::shared_ptr<StagingMemory>* out);
  ~StagingMemory();
  const Mapping& mapping() const { return mapping_; }
  // Called once its process has mapped it: seals it, so that no process maps it to write any more,
  // and publishes it to all processes, unless there are too many regions. May be repeated.
  Status show();

 private:
  Mapping mapping_;
  std::shared_ptr<RegionPublisher> region_publisher_;
  bool sealed_ = false;
  uint64_t shm_address_ = kNoShmAddress;
};

// Times in calls are values of now_ns(); UINT64_MAX is never. Threads: one sends and one receives
// at a time (possibly the same), one takes releases. Any thread may call release(), cut() and
// functions that only read.
//
// FRUGAL_ERR_PEER_LOST is final: the peer was cut off, broke the protocol, or a call timed out in
// the middle of a message. (Then the two sides no longer agree on where a message begins.) A read()
// may still give bytes that had arrived before. A time-out before a message leaves the channel as
// it was.
class Channel : public HeapObject {
 public:
  static constexpr size_t kCounters = 128;
  // A trainer process has at most so many ranges of staging memory in use, so there is always room
  // for their releases.
  static constexpr size_t kReleases = size_t{1} << 16;

  // The controller's side. `ring_bytes`: of each ring of messages, a power of two from 4 KiB to 1
  // GiB. `staging`: or null. The counts begin at `start`, for tests.
  static Status create(size_t ring_bytes, std::shared_ptr<StagingMemory> staging,
                       std::unique_ptr<Channel>* out, uint64_t start = 0);
  // What the peer attaches to. The channel still owns them. -1: there is no staging memory.
  int up_fd() const { return up_.fd; }
  int down_fd() const { return down_.fd; }
  int staging_fd() const { return lent_ ? lent_->mapping().fd : -1; }
  // The trainer process's side. The channel owns the descriptors on success, else the caller does.
  static Status attach(int up_fd, int down_fd, int staging_fd, std::unique_ptr<Channel>* out);
  // No call may be under way.
  ~Channel();

  // Sets `header.payload`. A message of at most a quarter of the ring is sent as a whole or not at
  // all.
  Status send(const Header& header, const Piece* pieces, size_t count, uint64_t until);
  // How long calls of this side poll before they sleep: other threads may need the processors. Not
  // concurrently with a call.
  void look_for(uint64_t ns, bool polite) { link_.look_for(ns, polite); }
  // The other side runs on this one's processor. The controller knows, and its replies carry it.
  void set_together(bool together) { link_.set_together(together); }
  bool together() const { return link_.together(); }
  // Receives the next message. What is left of the last one's payload is dropped.
  Status receive(Header* out, uint64_t until);
  // How long the last receive() has waited for its message.
  uint64_t waited_ns() const { return waited_ns_; }
  // The payload, in pieces. To read more than is left of it is the peer's fault.
  Status read(void* out, uint64_t bytes, uint64_t until);
  Status skip(uint64_t bytes, uint64_t until) { return read(nullptr, bytes, until); }
  uint64_t payload_left() const { return left_; }

  // The peer is gone: every call of this side returns FRUGAL_ERR_PEER_LOST, also those that wait.
  // The peer's calls notice it by their own means.
  void cut() noexcept {
    link_.end("is gone, or its channel was cut: close the trainer or the engine");
  }
  // Notifies the peer that this side sends and receives nothing more. The last call of the thread
  // that does both.
  void close() {
    sender_.close();
    receiver_.close();
  }
  bool is_cut() const { return link_.ended(); }
  // Whether the peer is there, by its end of the ring. Called by the thread that receives.
  Status look() {
    bool there;
    return receiver_.has(0, &there);
  }

  size_t staging_bytes() const { return staging_bytes_; }
  // Trainer process.
  char* staging() { return staging_; }
  Status commit_staging(uint64_t offset, uint64_t bytes);
  // Buffers can be cut from it.
  void staging_arena(Arena* out) const { out->over(own_, 0, staging_bytes_); }
  // Whether a range was released, and its offset, exactly as the controller wrote it.
  bool next_release(uint64_t* offset);
  Status wait_release(uint64_t until);
  std::atomic<uint64_t>& counter(size_t i);
  // Controller. Null: not within the staging memory. The alignment is not checked.
  const char* staging_at(uint64_t offset, uint64_t bytes) const;
  Status show_staging() { return lent_ ? lent_->show() : FRUGAL_OK; }
  // The range at `offset` is not read any more. Never waits.
  void release(uint64_t offset);
  uint64_t counter_value(size_t i) const;

 private:
  explicit Channel(bool controller);
  void connect(size_t ring_bytes);

  const bool controller_;
  RingPeer link_;
  Mapping up_, down_, own_;              // own_: the trainer process's staging memory
  std::shared_ptr<StagingMemory> lent_;  // the controller's
  char* staging_ = nullptr;
  size_t staging_bytes_ = 0;
  RingWriter sender_;
  RingReader receiver_;
  uint64_t left_ = 0;  // of the payload that is received
  uint64_t waited_ns_ = 0;
  Mutex release_mutex_;
  RingWriter releaser_ GUARDED_BY(release_mutex_);  // controller
  RingReader released_;                             // trainer process
};

}  // namespace frugal
