// Reusable buffers for keys, pairs and gradients: huge-page memory that circulates.
//
// A step needs the same few sizes again and again. So freed buffers are kept by size class and used
// again; in steady state nothing is allocated. Sizes are rounded up to a quarter of a power of two.
// Recent use bounds what is kept: buffers that were free longest go back to the system.
// Thread-safe. A Buffer is move-only and returns its memory to its pool. With a Pinner all of a
// pool's memory is pinned until it goes back. With an Arena all of it comes from the arena.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/arena.h"
#include "base/heap.h"
#include "base/os.h"
#include "base/pin.h"
#include "base/status.h"
#include "base/sync.h"

namespace frugal {

class BufferPool;

// The engine's limit of memory for tables (frugal_config.host_bytes). Free buffers of the pools
// count too; take() releases them when memory is short.
struct MemoryBudget {
  uint64_t limit = UINT64_MAX;
  std::atomic<uint64_t> used{0};
  std::atomic<uint64_t> idle{0};  // of `used`: shared memory that no buffer uses
  BufferPool* spares[2] = {};     // pools that release free buffers in take()
  bool add(uint64_t bytes) {
    // A refused request is never counted, not even briefly: a smaller one may fit meanwhile.
    uint64_t now = used.load(std::memory_order_relaxed);
    do {
      if (now > limit || bytes > limit - now) return false;
    } while (!used.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    return true;
  }
  bool take(uint64_t bytes);
  // Counts shared memory that no buffer uses, even beyond the limit: the memory exists.
  void hold(uint64_t bytes) {
    idle.fetch_add(bytes, std::memory_order_relaxed);
    used.fetch_add(bytes, std::memory_order_relaxed);
  }
  void release(uint64_t bytes) {
    idle.fetch_sub(bytes, std::memory_order_relaxed);
    give(bytes);
  }
  String left_text() const {
    if (limit == UINT64_MAX) return "all";
    const unsigned long long left = limit - std::min(limit, used.load()), idle_now = idle.load();
    String told = text("%llu of %llu bytes", left, static_cast<unsigned long long>(limit));
    return idle_now ? told + text(" (idle shared buffers have %llu)", idle_now) : told;
  }
  void give(uint64_t bytes) { used.fetch_sub(bytes, std::memory_order_relaxed); }
};

class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(static_cast<Buffer&&>(other));
    swap(moved);
    return *this;
  }
  ~Buffer() { reset(); }
  void reset() noexcept;
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  char* data() const { return data_; }
  size_t capacity() const { return capacity_; }
  // A view of another owner's memory, which the owner keeps while the view is in use.
  static Buffer view(const void* data, size_t bytes) {
    Buffer b;
    b.data_ = static_cast<char*>(const_cast<void*>(data));
    b.capacity_ = bytes;
    return b;
  }
  // The same; the end of the buffer calls owner->give_back().
  class Owner {
   public:
    virtual void give_back(char* data, size_t bytes) noexcept = 0;

   protected:
    ~Owner() = default;
  };
  static Buffer lent(const void* data, size_t bytes, Owner* owner) {
    Buffer b = view(data, bytes);
    b.owner_ = owner;
    return b;
  }
  bool is_lent() const { return owner_ != nullptr; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  friend class BufferPool;
  void swap(Buffer& o) noexcept {
    std::swap(pool_, o.pool_);
    std::swap(owner_, o.owner_);
    std::swap(data_, o.data_);
    std::swap(capacity_, o.capacity_);
  }
  BufferPool* pool_ = nullptr;  // gets the memory back; null: `owner_` does, or it is a view
  Owner* owner_ = nullptr;
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

// How much free memory a pool keeps: a fixed amount and twice the recent peak of use. (Twice,
// because sizes that are not in use at the same time add up.) "Recent" is two spans of a clock,
// which each buffer handed out advances. Guarded by its owner's lock.
class Circulation {
 public:
  explicit Circulation(size_t always) : always_(always) {}
  void take(size_t bytes, uint64_t ticks, uint64_t span) {
    if ((clock_ += ticks) - begin_ > span) begin_span();
    peak_ = std::max(peak_, used_ += bytes);
  }
  void put(size_t bytes) { used_ -= bytes; }
  void begin_span() {
    begin_ = clock_;
    before_ = std::exchange(peak_, used_);
  }
  uint64_t clock() const { return clock_; }
  size_t most() const { return always_ + 2 * std::max(peak_, before_); }
  size_t kept = 0;

 private:
  const size_t always_;
  uint64_t clock_ = 0, begin_ = 0;           // now; when the span began
  size_t used_ = 0, peak_ = 0, before_ = 0;  // now; at most in this span; in the one before
};

class BufferPool {
 public:
  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  // Before the first buffer is taken.
  void pin_with(std::shared_ptr<Pinner> pinner) { pinner_ = std::move(pinner); }
  // Also before the first buffer: memory comes from an arena, which lives longer.
  void cut_from(Arena* arena) { arena_ = arena; }
  // Free buffers count against the budget, which may release them to make room.
  void count_in(MemoryBudget* budget) {
    budget_ = budget;
    budget->spares[budget->spares[0] ? 1 : 0] = this;
  }
  // Releases free buffers beyond `bytes`, those that were free longest first.
  void keep(size_t bytes) noexcept;
  // A step has ended. Now and then releases buffers that only earlier steps used.
  void end_step() noexcept;
  // Releases buffers that are kept because of earlier use: their users have left.
  void rest() noexcept;
  // From now on memory from the arena stays there, for other processes that read it after the
  // pool's end.
  void leave() noexcept { left_.store(true); }
  // A buffer of at least `bytes` bytes, 64-byte aligned (2 MiB and up: huge pages). bytes 0 gives
  // an empty Buffer.
  Status get(size_t bytes, Buffer* out);
  // The capacity of a buffer of `bytes` bytes.
  static size_t capacity_for(size_t bytes);
  size_t bytes_held() const { return held_.load(std::memory_order_relaxed); }
  size_t bytes_kept() const {
    Lock lock(mu_);
    return circulation_.kept;
  }

 private:
  friend class Buffer;
  void put(char* data, size_t capacity) noexcept;
  struct Free {
    char* data;
    size_t capacity;
    uint64_t since;  // by the clock of `circulation_`
  };
  static constexpr size_t kClasses = 256;
  // Small buffers of a pool with a Pinner or an Arena are cut from pieces of this size. They are
  // kept until the pool ends, and not counted.
  static constexpr size_t kPiece = kHugePage;
  void trim(int spans) noexcept;
  Status map(size_t bytes, char** out);
  void unmap(char* data, size_t bytes) noexcept;
  void release(char* data, size_t capacity) noexcept;
  bool counts(size_t capacity) const { return capacity >= kHugePage || !cuts(); }
  void take_out(size_t capacity) REQUIRES(mu_);
  void hand_out(size_t capacity) REQUIRES(mu_);
  Status cut(size_t bytes, char** out);

  bool cuts() const { return pinner_ || arena_; }

  std::shared_ptr<Pinner> pinner_;
  Arena* arena_ = nullptr;
  mutable Mutex mu_;
  Vector<char*> pieces_ GUARDED_BY(mu_);
  size_t piece_used_ GUARDED_BY(mu_) = kPiece;  // of the last one
  Vector<Free> free_[kClasses] GUARDED_BY(mu_);
  std::atomic<size_t> held_{0};  // in use or free
  MemoryBudget* budget_ = nullptr;
  std::atomic<bool> left_{false};
  Circulation circulation_ GUARDED_BY(mu_){size_t{64} << 20};  // its clock: bytes handed out
  // Arena bytes that stayed idle with nothing kept.
  size_t idle_after_emptying_ GUARDED_BY(mu_) = 0;
  std::atomic<uint32_t> steps_{0};
};

inline bool MemoryBudget::take(uint64_t bytes) {
  if (add(bytes)) return true;
  for (BufferPool* spare : spares)
    if (spare) spare->keep(0);
  return add(bytes);
}

}  // namespace frugal
