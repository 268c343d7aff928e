#include "base/buffer.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FRUGAL_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define FRUGAL_ASAN 1
#endif
#ifdef FRUGAL_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace frugal {
namespace {

// AddressSanitizer takes all of a pool's memory for used, so free buffers are poisoned. The buffer
// that was free longest is reused first then, so that late reads of it are found.
#ifdef FRUGAL_ASAN
constexpr bool kOldestFirst = true;
void mark_free(char* data, size_t bytes) { __asan_poison_memory_region(data, bytes); }
void mark_used(char* data, size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
constexpr bool kOldestFirst = false;
void mark_free(char*, size_t) {}
void mark_used(char*, size_t) {}
#endif

constexpr size_t kSmallest = 256;
constexpr uint64_t kSpan = 16;   // the clock's span, in multiples of `held_`
constexpr uint32_t kSteps = 16;  // steps of a span at most

// Size classes: 256, 320, 384, 448, 512, 640, ... a quarter of a power of two apart.
size_t class_of(size_t bytes, size_t* rounded) {
  if (bytes <= kSmallest) {
    *rounded = kSmallest;
    return 0;
  }
  unsigned log =
      static_cast<unsigned>(std::bit_width(bytes - 1)) - 1;  // 2^log < bytes <= 2^(log+1)
  size_t quarter = (size_t{1} << log) / 4;
  size_t q = (bytes - (size_t{1} << log) + quarter - 1) / quarter;  // 1..4
  *rounded = (size_t{1} << log) + q * quarter;
  // Large buffers have whole huge pages, and count with all of them.
  if (*rounded > kHugePage && *rounded % kHugePage != 0)
    return class_of((*rounded / kHugePage + 1) * kHugePage, rounded);
  return (log - 8) * 4 + q;
}

Status no_memory(size_t bytes) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory for a buffer of %zu bytes; free some and call again", bytes);
}

}  // namespace

void Buffer::reset() noexcept {
  if (pool_) pool_->put(data_, capacity_);
  if (owner_) owner_->give_back(data_, capacity_);
  pool_ = nullptr;
  owner_ = nullptr;
  data_ = nullptr;
  capacity_ = 0;
}

BufferPool::~BufferPool() {
  leave();
  for (auto& list : free_)
    for (Free& f : list) {
      if (budget_ && counts(f.capacity)) budget_->give(f.capacity);
      release(f.data, f.capacity);
    }
  if (budget_)
    std::replace(budget_->spares, budget_->spares + 2, this, static_cast<BufferPool*>(nullptr));
  for (char* piece : pieces_) unmap(piece, kPiece);
}

// Committed memory of its own, pinned if this pool's is.
Status BufferPool::map(size_t bytes, char** out) {
  Mapping m;
  Status s = FRUGAL_OK;
  if (arena_) {
    FRUGAL_TRY(arena_->take(bytes, &m.base));
    m.bytes = bytes;
  } else {
    FRUGAL_TRY(os_reserve(bytes, false, &m));
    s = os_commit(m, 0, m.bytes);
  }
  bool pinned = true;
  if (s == FRUGAL_OK && pinner_) s = pinner_->pin(m.base, m.bytes, &pinned);
  if (s == FRUGAL_OK && !pinned)
    s = fail(FRUGAL_ERR_DEVICE, "no device is left that memory could be pinned for");
  if (s != FRUGAL_OK) {
    if (arena_)
      arena_->put_back(m.base, m.bytes);
    else
      os_release(&m);
    return s;
  }
  *out = m.base;
  return FRUGAL_OK;
}

void BufferPool::unmap(char* data, size_t bytes) noexcept {
  if (pinner_) pinner_->unpin(data);
  if (arena_) {
    if (!left_.load()) arena_->put_back(data, bytes);
    return;
  }
  Mapping m{data, bytes, -1};
  os_release(&m);
}

// For a buffer that is not in use, and in no list. (A buffer cut from a piece stays until the
// pool's end.)
void BufferPool::release(char* data, size_t capacity) noexcept {
  mark_used(data, capacity);
  held_.fetch_sub(capacity, std::memory_order_relaxed);
  if (capacity >= kHugePage)
    unmap(data, capacity);
  else if (!cuts())
    heap_free(data);
}

// Cuts a small buffer from a piece.
Status BufferPool::cut(size_t bytes, char** out) try {
  Lock lock(mu_);
  if (piece_used_ + bytes > kPiece) {
    pieces_.reserve(pieces_.size() + 1);
    char* piece;
    FRUGAL_TRY(map(kPiece, &piece));
    pieces_.push_back(piece);
    piece_used_ = 0;
  }
  *out = pieces_.back() + piece_used_;
  piece_used_ += bytes;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return no_memory(bytes);
}

size_t BufferPool::capacity_for(size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX / 4) return bytes;
  size_t capacity;
  class_of(bytes, &capacity);
  return capacity;
}

Status BufferPool::get(size_t bytes, Buffer* out) {
  out->reset();
  if (bytes == 0) return FRUGAL_OK;
  if (bytes > SIZE_MAX / 4)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "a buffer of %zu bytes exceeds the address space", bytes);
  size_t capacity;
  size_t c = class_of(bytes, &capacity);
  if (c >= kClasses) return no_memory(bytes);
  char* data = nullptr;
  {
    Lock lock(mu_);
    if (!free_[c].empty()) {
      const auto taken = kOldestFirst ? free_[c].begin() : free_[c].end() - 1;
      data = taken->data;
      mark_used(data, taken->capacity);
      take_out(taken->capacity);
      free_[c].erase(taken);
      hand_out(capacity);
    }
  }
  if (!data) {
    if (capacity >= kHugePage) {
      FRUGAL_TRY(map(capacity, &data));
    } else if (cuts()) {
      FRUGAL_TRY(cut(capacity, &data));
    } else {
      data = static_cast<char*>(heap_alloc_aligned(64, capacity));
      if (!data) return no_memory(bytes);
    }
    held_.fetch_add(capacity, std::memory_order_relaxed);
    Lock lock(mu_);
    hand_out(capacity);
  }
  out->pool_ = this;
  out->data_ = data;
  out->capacity_ = capacity;
  return FRUGAL_OK;
}

void BufferPool::hand_out(size_t capacity) {
  circulation_.take(capacity, capacity, kSpan * held_.load(std::memory_order_relaxed));
}

void BufferPool::take_out(size_t capacity) {
  if (!counts(capacity)) return;
  circulation_.kept -= capacity;
  if (budget_) budget_->give(capacity);
}

void BufferPool::end_step() noexcept {
  if (steps_.fetch_add(1, std::memory_order_relaxed) % kSteps != kSteps - 1) return;
  trim(1);
}

void BufferPool::rest() noexcept { trim(2); }

void BufferPool::trim(int spans) noexcept {
  size_t most, tried;
  {
    Lock lock(mu_);
    for (; spans > 0; --spans) circulation_.begin_span();
    most = circulation_.most();
    tried = idle_after_emptying_;
  }
  keep(most);
  if (!arena_ || !arena_->gives_back()) return;
  // Free buffers may be spread over segments, and a segment stays whole while any buffer is in it.
  // So if much is idle, all free buffers are released once. What stays idle then is held by buffers
  // in use, and as much is not tried again.
  size_t idle = arena_->bytes_idle();
  if (idle <= most / 2) {
    idle = 0;
  } else if (idle > tried) {
    keep(0);
    idle = arena_->bytes_idle();
  } else {
    idle = tried - tried / 8;  // those buffers may be free by now
  }
  Lock lock(mu_);
  idle_after_emptying_ = idle;
}

void BufferPool::put(char* data, size_t capacity) noexcept {
  size_t rounded, most;
  size_t c = class_of(capacity, &rounded);
  bool kept = true, over;
  {
    Lock lock(mu_);
    circulation_.put(capacity);
    try {
      free_[c].reserve(free_[c].size() + 1 > free_[c].capacity() ? 2 * free_[c].size() + 4 : 0);
      kept = !counts(capacity) || !budget_ || budget_->add(capacity);
      if (kept) free_[c].push_back({data, capacity, circulation_.clock()});
    } catch (const std::bad_alloc&) {
      kept = false;
    }
    if (kept) {
      mark_free(data, capacity);
      if (counts(capacity)) circulation_.kept += capacity;
    }
    most = circulation_.most();
    over = circulation_.kept > most;
  }
  if (!kept) return release(data, capacity);
  if (over) keep(most);
}

void BufferPool::keep(size_t bytes) noexcept {
  for (;;) {
    Free oldest{nullptr, 0, UINT64_MAX};
    {
      Lock lock(mu_);
      if (circulation_.kept <= bytes) return;
      // Each list is ordered by `since`.
      Vector<Free>* of = nullptr;
      for (Vector<Free>& list : free_)
        if (!list.empty() && counts(list.front().capacity) && list.front().since <= oldest.since) {
          oldest = list.front();
          of = &list;
        }
      if (!of) return;
      of->erase(of->begin());
      take_out(oldest.capacity);
    }
    release(oldest.data, oldest.capacity);
  }
}

}  // namespace frugal
