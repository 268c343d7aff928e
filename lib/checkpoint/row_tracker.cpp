#include "checkpoint/row_tracker.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"

namespace frugal {
namespace {

constexpr uint64_t kSlotsOfAHold = uint64_t{1} << 18;  // slots per hold of the rows' lock

}  // namespace

// The present epoch, which end() awaits the end of. A thread that comes too late takes the next.
class RowTracker::UseEpoch {
 public:
  explicit UseEpoch(RowTracker& of) {
    for (;;) {
      epoch_ = of.epoch_.load();
      epoch_->users.fetch_add(1);
      if (of.epoch_.load() == epoch_) return;
      epoch_->users.fetch_sub(1);
    }
  }
  ~UseEpoch() { epoch_->users.fetch_sub(1, std::memory_order_release); }
  UseEpoch(const UseEpoch&) = delete;
  const Epoch* operator->() const { return epoch_; }

 private:
  Epoch* epoch_;
};

Status RowTracker::open(Rows& rows, Sink* sink, MemoryBudget* budget, bool unchanged) {
  FRUGAL_ASSERT(!rows.tier());
  rows_ = &rows;
  sink_ = sink;
  for (Bits* b : {&bits_[0], &bits_[1], &saved_}) FRUGAL_TRY(b->reserve(rows.capacity(), budget));
  Status status = FRUGAL_OK;
  rows.watch_all(this, [&](uint32_t first, uint32_t n, bool exist) {
    status = expect(first, n);
    if (status == FRUGAL_OK && exist && !unchanged)
      mark(bits_[epoch_.load()->changed], n, [&](size_t i) { return first + i; });
    return status == FRUGAL_OK;
  });
  return status;
}

void RowTracker::close() {
  rows_->unwatch(this);
  await_users(nullptr);
}

Status RowTracker::expect(uint64_t first, uint64_t n) {
  for (Bits* b : {&bits_[0], &bits_[1], &saved_}) FRUGAL_TRY(b->expect(first, n));
  FRUGAL_TRY(sink_->expect(first, n));
  if (end_.load(std::memory_order_relaxed) < first + n)
    end_.store(first + n, std::memory_order_release);
  return FRUGAL_OK;
}

// --- Bits ----------------------------------------------------------------------------------------

// Most lists ascend, so a word is accessed once for all of its rows.
template <class Slot>
void RowTracker::mark(const Bits& bits, size_t n, Slot slot) noexcept {
  for (size_t i = 0; i < n;) {
    const uint64_t first = slot(i), at = first / 64;
    uint64_t mask = 0;
    for (; i < n && slot(i) / 64 == at; ++i) mask |= uint64_t{1} << slot(i) % 64;
    Word& word = bits.word(first);
    if ((word.load(std::memory_order_relaxed) & mask) != mask)
      word.fetch_or(mask, std::memory_order_release);
  }
}

void RowTracker::mark_changed(uint64_t first, uint64_t rows) noexcept {
  const UseEpoch epoch(*this);
  bits_[epoch->changed].word(first).fetch_or(rows << first % 64, std::memory_order_release);
}

// --- Copies --------------------------------------------------------------------------------------

bool RowTracker::is_taken(uint32_t slot) const {
  // The range is announced by its last slot, and withdrawn by its first.
  const uint64_t first = taken_.first.load(std::memory_order_acquire);
  return slot >= first && slot <= taken_.last.load(std::memory_order_acquire);
}

// Copies those of the rows that the snapshot lacks. Then none is being copied by another thread.
template <class Slot>
void RowTracker::save(const Bits& bits, size_t n, Slot slot,
                      std::atomic<uint64_t>& count) noexcept {
  uint32_t mine[kMostRows];
  size_t taken = 0, all = 0;
  bool others = false;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t s = slot(i), bit = uint64_t{1} << s % 64;
    if (!bits.has(s)) continue;
    if (saved_.word(s).fetch_or(bit, std::memory_order_acq_rel) & bit) {
      others = true;
      continue;
    }
    mine[taken++] = static_cast<uint32_t>(s);
    if (taken == kMostRows) {
      sink_->save(mine, taken);
      all += taken;
      taken = 0;
    }
  }
  if (taken) sink_->save(mine, taken);
  if (all += taken) count.fetch_add(all, std::memory_order_relaxed);
  if (!others) return;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t s = static_cast<uint32_t>(slot(i));
    if (!bits.has(s) || !is_taken(s)) continue;
    counts_.awaited.fetch_add(1, std::memory_order_relaxed);
    for (int spun = 0; is_taken(s); ++spun)
      if (spun < 1000)
        cpu_relax();
      else
        yield_thread();
  }
}

uint32_t RowTracker::before(const RowWrite& write, device::Undo*) noexcept {
  const RowWrite::Purpose& purpose = write.purpose();
  if (purpose.what == RowWrite::What::kNew) return 0;
  const UseEpoch epoch(*this);
  const auto slot = [&](size_t i) { return uint64_t{write.slot(i)}; };
  const bool in_snapshot =
      purpose.what == RowWrite::What::kUpdate && purpose.step < epoch->next_step;
  const Bits& changed = bits_[epoch->changed];
  const Bits& to_save = bits_[1 - epoch->changed];
  if (in_snapshot) {
    mark(to_save, write.size(), slot);
    counts_.late.fetch_add(write.size(), std::memory_order_relaxed);
    return 0;
  }
  mark(changed, write.size(), slot);
  if (epoch->saving) save(to_save, write.size(), slot, counts_.before_write);
  return 0;
}

void RowTracker::created(uint32_t slot) noexcept { mark_changed(slot); }

void RowTracker::deleting(uint32_t slot) noexcept {
  const UseEpoch epoch(*this);
  const Bits& to_save = bits_[1 - epoch->changed];
  if (epoch->saving)
    save(
        to_save, 1, [=](size_t) { return uint64_t{slot}; }, counts_.before_delete);
  // Its slot's next row is not the one that is saved.
  const uint64_t others = ~(uint64_t{1} << slot % 64);
  to_save.word(slot).fetch_and(others, std::memory_order_relaxed);
  bits_[epoch->changed].word(slot).fetch_and(others, std::memory_order_relaxed);
  sink_->deleted(slot);
}

// --- The snapshot --------------------------------------------------------------------------------

void RowTracker::publish(uint64_t next_step, uint32_t changed, bool saving) noexcept {
  Epoch* const now = epoch_.load();
  Epoch* const next = &epochs_[(now - epochs_ + 1) % 4];
  while (next->users.load() != 0) yield_thread();
  next->next_step = next_step;
  next->changed = changed;
  next->saving = saving;
  epoch_.store(next);
}

void RowTracker::await_users(const Epoch* except) noexcept {
  for (const Epoch& e : epochs_)
    while (&e != except && e.users.load() != 0) yield_thread();
}

void RowTracker::begin(uint64_t next_step) noexcept {
  FRUGAL_ASSERT(!epoch_.load()->saving);
  at_ = 0;
  // A thread that still uses the former epoch writes an update of the snapshot. It sets the bits
  // that are those to be saved now.
  publish(next_step, 1 - epoch_.load()->changed, true);
}

bool RowTracker::save_some() noexcept {
  const Bits& to_save = bits_[1 - epoch_.load()->changed];
  // Rows that have come since are not in the snapshot, but the end only grows.
  const uint64_t end = end_.load(std::memory_order_acquire);
  for (; at_ < end; at_ += 64) {
    if (!to_save.committed(at_)) continue;
    uint64_t left = to_save.word(at_).load(std::memory_order_acquire) &
                    ~saved_.word(at_).load(std::memory_order_relaxed);
    if (left == 0) continue;
    // All words up to kMostRows rows, from this one on.
    taken_.last.store(at_ + kMostRows - 1, std::memory_order_relaxed);
    taken_.first.store(at_, std::memory_order_seq_cst);
    uint32_t mine[kMostRows];
    size_t n = 0;
    for (const uint64_t stop = std::min(end, at_ + kMostRows); at_ < stop; at_ += 64) {
      if (!to_save.committed(at_)) continue;
      left = to_save.word(at_).load(std::memory_order_acquire);
      if (left == 0) continue;
      left &= ~saved_.word(at_).fetch_or(left, std::memory_order_acq_rel);
      for (; left; left &= left - 1)
        mine[n++] = static_cast<uint32_t>(at_ + static_cast<uint64_t>(std::countr_zero(left)));
    }
    if (n) sink_->save(mine, n);
    counts_.in_order.fetch_add(n, std::memory_order_relaxed);
    taken_.first.store(UINT64_MAX, std::memory_order_release);
    return true;
  }
  return false;
}

// A thread may have taken rows that it has not copied yet: such threads are awaited.
void RowTracker::stop_saving() noexcept {
  publish(0, epoch_.load()->changed, false);
  await_users(epoch_.load());
}

void RowTracker::end(bool kept) noexcept {
  const uint32_t now = epoch_.load()->changed;
  const Bits &changed = bits_[now], &to_save = bits_[1 - now];
  // From now on all changes set the changed bit, and no row is copied. Threads that have begun
  // before are awaited.
  publish(0, now, false);
  await_users(epoch_.load());
  const uint64_t end = end_.load(std::memory_order_acquire);
  for (uint64_t from = 0; from < end; from += kSlotsOfAHold)
    // No row is deleted between the two steps: its changed bit would stay.
    rows_->locked([&] {
      for (uint64_t at = from; at < std::min(end, from + kSlotsOfAHold); at += 64) {
        if (!to_save.committed(at)) continue;
        const uint64_t rows = to_save.word(at).load(std::memory_order_relaxed);
        if (rows && !kept) changed.word(at).fetch_or(rows, std::memory_order_relaxed);
        if (rows) to_save.word(at).store(0, std::memory_order_relaxed);
        if (saved_.word(at).load(std::memory_order_relaxed))
          saved_.word(at).store(0, std::memory_order_relaxed);
      }
    });
}

}  // namespace frugal
