// Memory for buffers in one range of addresses: another process is told where they are by offsets.
//
// Pieces are cut from segments: shared memory of its own each, which goes back to the system when
// nobody has a piece of it. (No part of it can: it is sealed against all other writers, base/os.h.)
// Large pieces have segments of their own as long as there are not too many, and those for small
// ones, which live long, have no large ones. Who reads in another process is told of each segment
// before a piece of it is given out, and when it is gone: ArenaView, below. An arena may also be a
// part of somebody else's mapping, whose memory stays. Thread-safe.
#pragma once
#include <atomic>
#include <functional>

#include "base/heap.h"
#include "base/os.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

struct MemoryBudget;

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  // Shared memory of its own, of at most `bytes`.
  Status open(size_t bytes);
  // [first, first + bytes) of a mapping that lives longer; both are multiples of 2 MiB.
  void over(const Mapping& mapping, size_t first, size_t bytes);
  bool opened() const { return mapping_.base != nullptr; }
  // Committed memory, aligned to 2 MiB; `bytes` is rounded up to that.
  Status take(size_t bytes, char** out);
  void put_back(char* taken, size_t bytes) noexcept;
  const Mapping& mapping() const { return mapping_; }
  bool holds(const void* p) const {
    return p >= mapping_.base && p < mapping_.base + mapping_.bytes;
  }
  uint64_t offset(const void* p) const {
    return static_cast<uint64_t>(static_cast<const char*>(p) - mapping_.base);
  }
  // Memory that there is. Of a mapping of somebody else's it does not become less.
  size_t bytes_held() const { return held_.load(); }
  size_t bytes_idle() const { return held_.load() - used_.load(); }
  bool gives_back() const { return own_; }
  // From now on what there is and nobody has counts, whatever the limit says: its memory is there.
  void count_in(MemoryBudget* budget);
  // Whoever has the other end of the socket, which is the arena's now, is told of all segments,
  // those that there are, too. One that does not take in what it is told is told nothing more.
  Status tell(int socket, uint64_t* id);
  void forget(uint64_t id) noexcept;
  // How much there was to tell so far: stored there from now on, when all have been told. Null:
  // nowhere any more.
  void count_changes(std::atomic<uint64_t>* at);

 private:
  struct Range {
    size_t first, end;
    bool large;
  };
  struct Segment {
    size_t first, end, committed;  // up to there is memory
    int fd;
    bool large;
  };
  struct Reader {
    uint64_t id;
    int socket;
  };
  Status add_segment(size_t bytes) REQUIRES(mu_);
  void tell_all(const Segment& s, int fd) noexcept REQUIRES(mu_);
  Segment& segment_of(size_t at) REQUIRES(mu_);
  size_t room(size_t from, size_t bytes) const REQUIRES(mu_);
  void count() noexcept REQUIRES(mu_);

  Mutex mu_;
  Mapping mapping_;
  bool own_ = false;
  Vector<Segment> segments_ GUARDED_BY(mu_);  // ascending; of an own one none next to another
  Vector<Range> free_ GUARDED_BY(mu_);        // of segments, ascending, none next to another
  size_t taken_ GUARDED_BY(mu_) = 0;          // pieces: there can be as many ranges between them
  size_t next_ GUARDED_BY(mu_) = 0;           // a segment's place: none is used again soon
  size_t counted_ GUARDED_BY(mu_) = 0;
  std::atomic<size_t> held_{0}, used_{0};     // bytes; changed with mu_
  MemoryBudget* budget_ GUARDED_BY(mu_) = nullptr;
  std::atomic<uint64_t>* changes_at_ GUARDED_BY(mu_) = nullptr;
  uint64_t changes_ GUARDED_BY(mu_) = 0, readers_so_far_ GUARDED_BY(mu_) = 0;
  Vector<Reader> readers_ GUARDED_BY(mu_);
};

// What an arena of another process has, in the same order in a range of this process.
class ArenaView {
 public:
  ~ArenaView() { close(); }
  // The other end of the socket is the arena's; it is this one's from now on.
  void open(int socket) { socket_ = socket; }
  int socket() const { return socket_; }
  // Where the arena counts its changes.
  void changes_at(const std::atomic<uint64_t>* at) { told_ = at; }
  // Is called before a range goes.
  void before_gone(std::function<void(uint64_t first, uint64_t bytes)> call) {
    before_gone_ = std::move(call);
  }
  // Takes in what the arena has told. It goes on from where it was when it could not.
  Status look();
  // All that there is is seen. PEER_LOST: the arena has given this one up, which had not looked.
  Status current();
  // Where a place is seen. `near`: where the last one was.
  struct Range {
    uint64_t first = 0, end = 0;
  };
  Status find(uint64_t place, uint64_t bytes, const char** out, Range* near);
  const Mapping& mapping() const { return mapping_; }
  void close() noexcept;

 private:
  Mutex mu_;
  int socket_ = -1;
  Mapping mapping_;
  Vector<Range> there_ GUARDED_BY(mu_);
  std::function<void(uint64_t, uint64_t)> before_gone_;
  std::atomic<uint64_t> changes_{0};
  const std::atomic<uint64_t>* told_ = nullptr;
};

}  // namespace frugal
