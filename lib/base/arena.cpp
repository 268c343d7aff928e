#include "base/arena.h"

#include <algorithm>

#include "base/buffer.h"
#include "base/forked.h"

namespace frugal {
namespace {

constexpr size_t kLarge = 4 * kHugePage;          // pieces
constexpr size_t kSmallSegment = 16 * kHugePage;  // at least
constexpr size_t kShare = 4;  // a segment is at least 1 / kShare of all of its kind
constexpr size_t kNowhere = SIZE_MAX;

}  // namespace

Arena::~Arena() {
  Lock lock(mu_);
  for (const Segment& s : segments_) ForkedDescriptors::close(s.fd);
  if (own_) os_release(&mapping_);
}

Status Arena::open(size_t bytes) try {
  // A system without such memory is reported here, not by a later call that needs a buffer.
  Mapping first;
  FRUGAL_TRY(os_reserve(kHugePage, true, &first));
  os_release(&first);
  region_publisher_ = std::allocate_shared<RegionPublisher>(HeapAllocator<RegionPublisher>());
  shm_addresses_.resize(in_huge_pages(bytes) / kHugePage);
  FRUGAL_TRY(os_reserve_range(bytes, &mapping_));
  own_ = true;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to list shared memory for buffers");
}

void Arena::over(const Mapping& mapping, size_t first, size_t bytes) {
  Lock lock(mu_);
  segments_.push_back({first, first + bytes, first, -1, false});
  free_.push_back({first, first + bytes, false});
  mapping_ = {mapping.base, first + bytes, mapping.fd};
}

Arena::Segment& Arena::segment_of(size_t at) {
  auto next =
      std::find_if(segments_.begin(), segments_.end(), [&](auto& s) { return s.first > at; });
  return *std::prev(next);
}

// Free addresses from `from` on, with a gap after them; or kNowhere.
size_t Arena::room(size_t from, size_t bytes) const {
  for (const Segment& s : segments_) {
    if (s.end < from) continue;
    if (s.first > from && s.first - from > bytes) return from;
    from = s.end + kHugePage;
  }
  return from <= mapping_.bytes && bytes <= mapping_.bytes - from ? from : kNowhere;
}

// Adds a segment, with committed memory for a piece of `bytes`.
Status Arena::add_segment(size_t bytes) {
  const bool large = bytes >= kLarge;
  size_t all = 0;
  for (const Segment& s : segments_)
    if (s.large == large) all += s.end - s.first;
  size_t size = std::max({bytes, large ? 0 : kSmallSegment, in_huge_pages(all / kShare)}),
         at = kNowhere;
  for (const size_t wanted : {size, bytes})
    for (const size_t from : {next_, size_t{0}})
      if (at == kNowhere && own_) at = room(from, size = wanted);
  if (at == kNowhere)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "%zu bytes more than there is room for in the %zu bytes of shared memory for "
                "buffers: declare less at a time",
                bytes, mapping_.bytes);
  make_room(segments_, 1);
  Mapping made;
  Status made_so;
  // A forked child that kept the descriptor would keep the memory.
  ForkedDescriptors::open([&] {
    made_so = os_reserve(size, true, &made, false, mapping_.base + at);
    return made.fd;
  });
  if (made_so == FRUGAL_ERR_UNSUPPORTED)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "%zu bytes of shared memory cannot be had, as others could before; call again",
                size);
  FRUGAL_TRY(made_so);
  uint64_t shm_address = 0;
  made_so = os_commit(made, 0, bytes);
  if (made_so == FRUGAL_OK) made_so = region_publisher_->come(made, &shm_address);
  if (made_so != FRUGAL_OK) {
    (void)os_empty(made.base, size);
    ForkedDescriptors::close(made.fd);
    return made_so;
  }
  for (size_t i = 0; i < size; i += kHugePage)
    shm_addresses_[(at + i) / kHugePage] = shm_address + i;
  const Segment s{at, at + size, at + bytes, made.fd, large};
  auto behind = [&](const auto& other) { return other.first > at; };
  segments_.insert(std::find_if(segments_.begin(), segments_.end(), behind), s);
  free_.insert(std::find_if(free_.begin(), free_.end(), behind), {s.first, s.end, large});
  held_.fetch_add(bytes);
  next_ = s.end + kHugePage;
  return FRUGAL_OK;
}

Status Arena::take(size_t bytes, char** out) try {
  bytes = in_huge_pages(bytes);
  Lock lock(mu_);
  // Room for the range that put_back() may add, and for one more segment.
  if (const size_t most = taken_ + segments_.size() + 3; free_.capacity() < most)
    free_.reserve(2 * most);
  auto find = [&]() REQUIRES(mu_) {
    auto best = free_.end();
    for (auto r = free_.begin(); r != free_.end(); ++r)
      if (r->end - r->first >= bytes && (!own_ || r->large == (bytes >= kLarge)) &&
          (best == free_.end() || r->end - r->first < best->end - best->first))
        best = r;
    return best;
  };
  auto best = find();
  if (best == free_.end()) {
    FRUGAL_TRY(add_segment(bytes));
    best = find();
  }
  const size_t at = best->first;
  Segment& of = segment_of(at);
  if (at + bytes > of.committed) {
    const size_t from = std::max(at, of.committed);
    const size_t base = own_ ? of.first : 0;
    const Mapping segment{mapping_.base + base, of.end - base, own_ ? of.fd : mapping_.fd};
    FRUGAL_TRY(os_commit(segment, from - base, at + bytes - from));
    held_.fetch_add(at + bytes - of.committed);
    of.committed = at + bytes;
  }
  if ((best->first += bytes) == best->end) free_.erase(best);
  ++taken_;
  used_ += bytes;
  count();
  *out = mapping_.base + at;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list %zu bytes of buffers; free some and call again", bytes);
}

void Arena::put_back(char* taken, size_t bytes) noexcept {
  bytes = in_huge_pages(bytes);
  const size_t first = offset(taken);
  // Closing the last descriptor of a segment may take long, so it is done after the lock is
  // released.
  struct Closed {
    int fd = -1;
    ~Closed() { ForkedDescriptors::close(fd); }
  } closed;
  Lock lock(mu_);
  --taken_;
  used_ -= bytes;
  auto next =
      std::find_if(free_.begin(), free_.end(), [&](const Range& r) { return r.first > first; });
  next = free_.insert(next, {first, first + bytes, segment_of(first).large});
  if (next + 1 != free_.end() && next->end == (next + 1)->first) {
    next->end = (next + 1)->end;
    free_.erase(next + 1);
  }
  if (next != free_.begin() && (next - 1)->end == next->first) {
    (next - 1)->end = next->end;
    next = free_.erase(next) - 1;
  }
  Segment& of = segment_of(first);
  if (own_ && next->first == of.first && next->end == of.end &&
      os_empty(mapping_.base + of.first, of.end - of.first)) {
    region_publisher_->go(shm_addresses_[of.first / kHugePage]);
    closed.fd = of.fd;
    held_.fetch_sub(of.committed - of.first);
    segments_.erase(segments_.begin() + (&of - segments_.data()));
    free_.erase(next);
  }
  count();
}

void Arena::count() noexcept {
  if (!budget_) return;
  const size_t idle = bytes_idle();
  if (idle > counted_)
    budget_->hold(idle - counted_);
  else
    budget_->release(counted_ - idle);
  counted_ = idle;
}

void Arena::count_in(MemoryBudget* budget) {
  Lock lock(mu_);
  budget_ = budget;
  count();
}

}  // namespace frugal
