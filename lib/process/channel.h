// What a trainer process and the controller say to each other: regions of shared memory, each
// written by one of them.
//
//   up, written by the trainer process:      ring of requests, counters
//   staging, written by the trainer process: memory for sums and declared keys; a process that only
//   asks has none down, written by the controller:         ring of answers, ring of releases of
//   staging memory
//
// The controller makes all and maps what it does not write read-only; so does the trainer process.
// A read of staging memory that was not committed takes memory and reads zeros.
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

// Begins a message; `payload` bytes follow.
// In an answer's type: its sender runs on the asker's processor.
constexpr uint32_t kTogether = 1u << 31;

struct Header {
  uint32_t type;
  uint32_t status;  // of an answer; of a request, SpinPolicy::processor()
  uint64_t sequence;
  uint64_t payload;
  uint64_t args[5];
};
static_assert(sizeof(Header) == 64);

struct Piece {
  const void* data;
  size_t bytes;
};

// Staging memory, as the controller has it: read-only. Whoever gets it first maps it to write.
class StagingMemory : public HeapObject {
 public:
  // `bytes` is rounded up to 2 MiB; at most 64 TiB. `region_publisher`: of show(); or null.
  static Status make(size_t bytes, std::shared_ptr<RegionPublisher> region_publisher,
                     std::shared_ptr<StagingMemory>* out);
  ~StagingMemory();
  const Mapping& mapping() const { return mapping_; }
  // It has been mapped: nobody maps it to write any more, and all are told of it, if there are not
  // too many. May be repeated.
  Status show();

 private:
  Mapping mapping_;
  std::shared_ptr<RegionPublisher> region_publisher_;
  bool sealed_ = false;
  uint64_t shm_address_ = kNoShmAddress;
};

// The times of calls are values of now_ns(), UINT64_MAX is never. Threads: one sends and one
// receives at a time (it may be the same), one takes releases; release(), cut() and what only
// looks: any.
//
// FRUGAL_ERR_PEER_LOST is final: the peer was cut off, broke the protocol, or a call timed out in
// the middle of a message (the two sides do not agree any more where one begins). A read() may give
// bytes that had arrived before. A time-out before a message leaves the channel as it was.
class Channel : public HeapObject {
 public:
  static constexpr size_t kCounters = 128;
  // So many releases the trainer process may have coming: it gives out no more places of staging
  // memory at a time.
  static constexpr size_t kReleases = size_t{1} << 16;

  // The controller's side. `ring_bytes`: of each ring of messages, a power of two of 4 KiB to 1
  // GiB. `staging`: or null. The counts begin at `start`, for tests.
  static Status create(size_t ring_bytes, std::shared_ptr<StagingMemory> staging,
                       std::unique_ptr<Channel>* out, uint64_t start = 0);
  // What the peer attaches to; they remain the channel's. -1: there is no staging memory.
  int up_fd() const { return up_.fd; }
  int down_fd() const { return down_.fd; }
  int staging_fd() const { return lent_ ? lent_->mapping().fd : -1; }
  // The trainer process's side. The descriptors are the channel's on success, else the caller's.
  static Status attach(int up_fd, int down_fd, int staging_fd, std::unique_ptr<Channel>* out);
  // No call may be under way.
  ~Channel();

  // `header.payload` is set here. A message of at most a quarter of the ring is sent as a whole or
  // not at all.
  Status send(const Header& header, const Piece* pieces, size_t count, uint64_t until);
  // How long calls of this side look before they sleep: processors may be wanted. Not beside a
  // call.
  void look_for(uint64_t ns, bool polite) { link_.look_for(ns, polite); }
  // The other side runs on this one's processor: the controller knows, and its answers tell.
  void set_together(bool together) { link_.set_together(together); }
  bool together() const { return link_.together(); }
  // The next message; what is left of the payload of the last one is let go.
  Status receive(Header* out, uint64_t until);
  // How long the last receive() has waited for its message.
  uint64_t waited_ns() const { return waited_ns_; }
  // The payload, in parts. More than there is left of it is the peer's fault.
  Status read(void* out, uint64_t bytes, uint64_t until);
  Status skip(uint64_t bytes, uint64_t until) { return read(nullptr, bytes, until); }
  uint64_t payload_left() const { return left_; }

  // The peer is gone: every call of this side answers FRUGAL_ERR_PEER_LOST, those that wait, too.
  // The peer's calls learn of it by their own means.
  void cut() noexcept {
    link_.end("is gone, or its channel was cut: close the trainer or the engine");
  }
  // Tells the peer that nothing is sent or received any more. The last call of the thread that does
  // both.
  void close() {
    sender_.close();
    receiver_.close();
  }
  bool is_cut() const { return link_.ended(); }
  // Whether the peer is there, as far as its end of the ring tells. By the thread that receives.
  Status look() {
    bool there;
    return receiver_.has(0, &there);
  }

  size_t staging_bytes() const { return staging_bytes_; }
  // Trainer process.
  char* staging() { return staging_; }
  Status commit_staging(uint64_t offset, uint64_t bytes);
  // Buffers can be cut from it.
  void staging_arena(Arena* out) const {
    out->over(own_, 0, staging_bytes_);
  }
  // Whether a place was released, and which; its number is what the controller wrote.
  bool next_release(uint64_t* offset);
  Status wait_release(uint64_t until);
  std::atomic<uint64_t>& counter(size_t i);
  // Controller. Null: not within the staging memory. Nothing is said of alignment.
  const char* staging_at(uint64_t offset, uint64_t bytes) const;
  Status show_staging() { return lent_ ? lent_->show() : FRUGAL_OK; }
  // A place is not read any more. Never waits.
  void release(uint64_t offset);
  uint64_t counter_value(size_t i) const;

 private:
  explicit Channel(bool controller);
  void connect(size_t ring_bytes);

  const bool controller_;
  RingPeer link_;
  Mapping up_, down_, own_;  // own_: the trainer process's staging memory
  std::shared_ptr<StagingMemory> lent_;  // the controller's
  char* staging_ = nullptr;
  size_t staging_bytes_ = 0;
  RingWriter sender_;
  RingReader receiver_;
  uint64_t left_ = 0;  // of the payload that is received
  uint64_t waited_ns_ = 0;
  Mutex release_mutex_;
  RingWriter releaser_ GUARDED_BY(release_mutex_);  // controller
  RingReader released_;  // trainer process
};

}  // namespace frugal
