#include "base/arena.h"

#include <algorithm>

#include "base/buffer.h"

namespace frugal {

Arena::~Arena() {
  if (own_) os_release(&mapping_);
}

Status Arena::open(size_t bytes) {
  FRUGAL_TRY(os_reserve(bytes, true, &mapping_));
  own_ = true;
  end_ = mapping_.bytes;
  return FRUGAL_OK;
}

void Arena::over(const Mapping& mapping, size_t first, size_t bytes) {
  mapping_ = mapping;
  first_ = used_ = committed_ = first;
  end_ = first + bytes;
}

Status Arena::take(size_t bytes, char** out) try {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Lock lock(mu_);
  // Room for what putting back may want.
  if (free_.capacity() < taken_ + 2) free_.reserve(2 * taken_ + 2);
  auto best = free_.end();
  for (auto r = free_.begin(); r != free_.end(); ++r)
    if (r->end - r->first >= bytes && (best == free_.end() || r->end - r->first < best->end - best->first)) best = r;
  const size_t at = best == free_.end() ? used_ : best->first;
  if (at == used_ && bytes > end_ - used_)
    return fail(FRUGAL_ERR_OUT_OF_MEMORY, "%zu bytes more than the %zu bytes of shared memory for buffers",
                bytes - (end_ - used_), end_ - first_);
  const size_t fresh = at + bytes - std::min(at + bytes, std::max(at, committed_));
  if (fresh) {
    FRUGAL_TRY(os_commit(mapping_, at + bytes - fresh, fresh));
    committed_ = at + bytes;
  }
  if (budget_) budget_->let_go(bytes - fresh);
  if (at == used_)
    used_ += bytes;
  else if ((best->first += bytes) == best->end)
    free_.erase(best);
  ++taken_;
  *out = mapping_.base + at;
  return FRUGAL_OK;
} catch (const std::bad_alloc&) {
  return fail(FRUGAL_ERR_OUT_OF_MEMORY,
              "no memory to list %zu bytes of buffers; free some and call again", bytes);
}

void Arena::put_back(char* taken, size_t bytes) noexcept {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  const size_t first = offset(taken);
  Lock lock(mu_);
  // Whoever takes it next has its memory, which does not go back to the system: others have it
  // mapped and sealed.
  if (budget_) budget_->hold(bytes);
  --taken_;
  auto next = std::find_if(free_.begin(), free_.end(), [&](const Range& r) { return r.first > first; });
  next = free_.insert(next, {first, first + bytes});
  if (next + 1 != free_.end() && next->end == (next + 1)->first) {
    next->end = (next + 1)->end;
    free_.erase(next + 1);
  }
  if (next != free_.begin() && (next - 1)->end == next->first) {
    (next - 1)->end = next->end;
    next = free_.erase(next) - 1;
  }
  if (next->end != used_) return;
  used_ = next->first;
  free_.erase(next);
}

}  // namespace frugal
