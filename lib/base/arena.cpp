#include "base/arena.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/buffer.h"

namespace frugal {
namespace {

constexpr size_t kLarge = 4 * kHugePage;          // pieces
constexpr size_t kSmallSegment = 16 * kHugePage;  // at least
constexpr size_t kShare = 4;                      // a segment has this part of all, or more
constexpr size_t kNowhere = SIZE_MAX;

// What a reader is told: a segment has come, and its descriptor with it, or is gone.
struct Change {
  uint64_t range;  // bytes of addresses
  uint64_t first, bytes;
  uint64_t there, changes;  // so many so far
};

size_t round_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

Arena::~Arena() {
  Lock lock(mu_);
  for (const Segment& s : segments_)
    if (s.fd >= 0) ::close(s.fd);
  for (const Reader& r : readers_) ::close(r.socket);
  if (own_) os_release(&mapping_);
}

Status Arena::open(size_t bytes) {
  FRUGAL_TRY(os_reserve_range(bytes, &mapping_));
  own_ = true;
  return FRUGAL_OK;
}

void Arena::over(const Mapping& mapping, size_t first, size_t bytes) {
  Lock lock(mu_);
  segments_.push_back({first, first + bytes, first, -1, false});
  free_.push_back({first, first + bytes, false});
  mapping_ = {mapping.base, first + bytes, mapping.fd};
}

Arena::Segment& Arena::segment_of(size_t at) {
  auto next = std::find_if(segments_.begin(), segments_.end(), [&](auto& s) { return s.first > at; });
  return *std::prev(next);
}

// Addresses that nobody has, with a gap behind them.
size_t Arena::room(size_t from, size_t bytes) const {
  for (const Segment& s : segments_) {
    if (s.end < from) continue;
    if (s.first > from && s.first - from > bytes) return from;
    from = s.end + kHugePage;
  }
  return from <= mapping_.bytes && bytes <= mapping_.bytes - from ? from : kNowhere;
}

// With memory for a piece of so many bytes.
Status Arena::add_segment(size_t bytes) {
  const bool large = bytes >= kLarge;
  size_t all = 0;
  for (const Segment& s : segments_)
    if (s.large == large) all += s.end - s.first;
  size_t size = std::max({bytes, large ? 0 : kSmallSegment, round_up(all / kShare)}), at = kNowhere;
  for (const size_t wanted : {size, bytes})
    for (const size_t from : {next_, size_t{0}})
      if (at == kNowhere && own_) at = room(from, size = wanted);
  if (at == kNowhere)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                "%zu bytes more than there is room for in the %zu bytes of shared memory for buffers: "
                "declare less at a time",
                bytes, mapping_.bytes);
  if (segments_.capacity() == segments_.size()) segments_.reserve(2 * segments_.size() + 4);
  Mapping made;
  FRUGAL_TRY(os_reserve(size, true, &made, false, mapping_.base + at));
  Status made_so = os_commit(made, 0, bytes);
  const int to_read = made_so == FRUGAL_OK ? os_read_only(made.fd) : -1;
  if (made_so == FRUGAL_OK && to_read < 0)
    made_so = os_no_descriptor(errno, "shared memory that others read");
  if (made_so != FRUGAL_OK) {
    (void)os_empty(made.base, size);
    ::close(made.fd);
    return made_so;
  }
  const Segment s{at, at + size, at + bytes, made.fd, large};
  auto behind = [&](const auto& other) { return other.first > at; };
  segments_.insert(std::find_if(segments_.begin(), segments_.end(), behind), s);
  free_.insert(std::find_if(free_.begin(), free_.end(), behind), {s.first, s.end, large});
  held_.fetch_add(bytes);
  next_ = s.end + kHugePage;
  tell_all(s, to_read);
  ::close(to_read);
  return FRUGAL_OK;
}

Status Arena::take(size_t bytes, char** out) try {
  bytes = round_up(bytes);
  Lock lock(mu_);
  // Room for what putting back may want, and one more segment.
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
  bytes = round_up(bytes);
  const size_t first = offset(taken);
  Lock lock(mu_);
  --taken_;
  used_ -= bytes;
  auto next = std::find_if(free_.begin(), free_.end(), [&](const Range& r) { return r.first > first; });
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
    ::close(of.fd);
    held_.fetch_sub(of.committed - of.first);
    tell_all(of, -1);
    segments_.erase(segments_.begin() + (&of - segments_.data()));
    free_.erase(next);
  }
  count();
}

void Arena::count() noexcept {
  if (!budget_) return;
  const size_t idle = bytes_idle();
  if (idle > counted_) budget_->hold(idle - counted_);
  else budget_->let_go(counted_ - idle);
  counted_ = idle;
}

void Arena::count_in(MemoryBudget* budget) {
  Lock lock(mu_);
  budget_ = budget;
  count();
}

// --- Readers -------------------------------------------------------------------------------------

void Arena::tell_all(const Segment& s, int fd) noexcept {
  const Change c{mapping_.bytes, s.first, s.end - s.first, fd >= 0, ++changes_};
  std::erase_if(readers_, [&](const Reader& r) {
    return !os_send(r.socket, &c, sizeof c, fd) && ::close(r.socket) == 0;
  });
  if (changes_at_) changes_at_->store(changes_);
}

Status Arena::tell(int socket, uint64_t* id) try {
  Lock lock(mu_);
  readers_.reserve(readers_.size() + 1);
  for (const Segment& s : segments_) {
    const int fd = os_read_only(s.fd);
    if (fd < 0) return os_no_descriptor(errno, "shared memory that another process reads");
    const uint64_t so_far = &s == &segments_.back() ? changes_ : 0;
    const Change c{mapping_.bytes, s.first, s.end - s.first, 1, so_far};
    const bool told = os_send(socket, &c, sizeof c, fd);
    ::close(fd);
    if (!told)
      return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                  "another process cannot be told of %zu pieces of memory; call again",
                  segments_.size());
  }
  *id = ++readers_so_far_;
  readers_.push_back({*id, socket});
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY, "no memory to tell another process of buffers; call again");
}

void Arena::forget(uint64_t id) noexcept {
  Lock lock(mu_);
  std::erase_if(readers_, [&](const Reader& r) { return r.id == id && ::close(r.socket) == 0; });
}

void Arena::count_changes(std::atomic<uint64_t>* at) {
  Lock lock(mu_);
  changes_at_ = at;
  if (at) at->store(changes_);
}

// --- ArenaView -----------------------------------------------------------------------------------

Status ArenaView::look() try {
  Lock lock(mu_);
  Change c;
  for (int fd; os_peek(socket_, &c, sizeof c, &fd); os_drop(socket_)) {
    struct Descriptor {
      const int fd;
      ~Descriptor() {
        if (fd >= 0) ::close(fd);
      }
    } descriptor{fd};
    if (!mapping_.base) FRUGAL_TRY(os_reserve_range(c.range, &mapping_));
    if (c.range != mapping_.bytes || c.first > c.range || c.bytes > c.range - c.first ||
        c.first % kHugePage)
      return fail(FRUGAL_ERR_INTERNAL, "the controller told of memory outside of its range");
    Mapping at{mapping_.base + c.first, c.bytes, -1};
    if (c.there && fd < 0) return os_no_descriptor(EMFILE, "memory of the controller");
    if (c.there) {
      there_.reserve(there_.size() + 1);
      FRUGAL_TRY(os_map_shared(fd, false, &at, &at));
      there_.push_back({c.first, c.first + c.bytes});
    } else {
      if (before_gone_) before_gone_(c.first, c.bytes);
      if (!os_empty(at.base, at.bytes))
        return fail(FRUGAL_ERR_OUT_OF_MEMORY,
                    "%zu bytes that the controller has given back cannot be unmapped; call again",
                    at.bytes);
      std::erase_if(there_, [&](const Range& r) { return r.first == c.first; });
    }
    if (c.changes) changes_.store(c.changes);
  }
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list the memory of the controller; call again");
}

Status ArenaView::current() {
  const uint64_t told = told_ ? told_->load() : UINT64_MAX;
  if (changes_.load() >= told) return FRUGAL_OK;
  FRUGAL_TRY(look());
  if (!told_ || changes_.load() >= told) return FRUGAL_OK;
  return fail(FRUGAL_ERR_PEER_LOST,
              "the controller has memory that this process has not mapped, since it did not take in "
              "for long what it was told: close the engine and open it again");
}

Status ArenaView::find(uint64_t place, uint64_t bytes, const char** out, Range* near) {
  FRUGAL_TRY(current());
  auto within = [&](const Range& r) {
    return place >= r.first && place < r.end && bytes <= r.end - place;
  };
  if (!within(*near)) {
    Lock lock(mu_);
    const auto r = std::find_if(there_.begin(), there_.end(), within);
    if (r == there_.end())
      return fail(FRUGAL_ERR_INTERNAL, "the controller sent a place outside of its memory");
    *near = *r;
  }
  *out = mapping_.base + place;
  return FRUGAL_OK;
}

void ArenaView::close() noexcept {
  Lock lock(mu_);
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  there_.clear();
  os_release(&mapping_);
}

}  // namespace frugal
