#include "storage/slot_map.h"

namespace frugal {

// Reserves addresses for all rows (`c.capacity`, not `slots`). Other processes expect that, because
// they know nothing of the storage tier.
Status SlotMap::open(const RowMemory::Config& c, uint64_t slots, MemoryBudget* budget) {
  capacity_ = slots;
  if (c.lazy || c.hashed) FRUGAL_TRY(flags_.reserve(c.capacity, 1, c.shared, budget));
  if (!c.hashed) return FRUGAL_OK;
  FRUGAL_TRY(keys_.reserve(c.capacity, 8, c.shared, budget));
  Lock lock(mu);
  FRUGAL_TRY(holders.open(capacity_, budget));
  return index_.open(capacity_, budget);
}

Status SlotMap::begin_dense(uint32_t s) {
  FRUGAL_TRY(flags_.ensure(s, 1));
  if (flag(s)) return FRUGAL_OK;
  FRUGAL_TRY(memory_.ensure(s, 1));
  memory_.initialize(s, s);
  flags()[s] = kExists;
  return FRUGAL_OK;
}

Status SlotMap::add(uint64_t key, uint32_t* slot, bool blank) {
  uint32_t s = free_;
  if (s == kNoSlot) {
    if (next_slot_ >= capacity_)
      return fail(FRUGAL_ERR_TABLE_FULL,
                  "no room for key %s: all of its %llu rows are taken; create it with more rows, "
                  "or delete some",
                  number_text(key).c_str(), static_cast<unsigned long long>(capacity_));
    FRUGAL_TRY(memory_.ensure(next_slot_, 1));
    FRUGAL_TRY(flags_.ensure(next_slot_, 1));
    FRUGAL_TRY(keys_.ensure(next_slot_, 1));
    FRUGAL_TRY(holders.ensure(next_slot_, 1));
    s = static_cast<uint32_t>(next_slot_);
  }
  FRUGAL_TRY(index_.make_room(1));
  if (free_ != kNoSlot)
    free_ = static_cast<uint32_t>(keys()[s]);
  else
    ++next_slot_;
  begin_slot(s, key, blank);
  if (slots_told_) slots_told_->store(next_slot_, std::memory_order_release);
  reserved_.fetch_add(1, std::memory_order_relaxed);
  *slot = s;
  return FRUGAL_OK;
}

// The only function that gives a free slot to a row. The slot begins clean. A reader that still
// expects the former row takes nothing of the new one for it:
// - Values, state and the bytes between their columns: all bytes are new. The former row was
//   deleted between steps. Or it was undone when no call that had found it was under way. Or it
//   left memory (stored_rows.h) when its slot had no holder. So no thread reads it.
// - Version word (staleness): other rows share it, and it only grows. So no copy that was begun
//   before is valid.
// - Image (engine/ledger.h): an image names a slot only while its row is being written. No row is
//   deleted, undone or stored away during a write, so no image names a free slot.
// - Flag byte: 0 while the slot is free, and no mark is left. A reader in another process that
//   reads the flags alone finds no row until the new one exists. It then finds the new row's key,
//   which was written before.
// - Read set of the window: its reads are those of declarations, which hold the slot. So a free
//   slot has no reads of future steps. Updates in it are written, or withdrawn by an abort. Where
//   rows may leave memory, unwritten updates hold the slot. Its `cached` bit was cleared with the
//   cached row.
// - Caches: the cached row is dropped before the row is deleted. Uncommitted rows have none. Where
//   rows may leave memory, a cached row holds the slot.
void SlotMap::begin_slot(uint32_t slot, uint64_t key, bool blank) {
  FRUGAL_ASSERT(flag(slot) == 0 && !holders.held(slot));
  index_.insert(key, slot);
  keys()[slot] = key;
  if (!blank) memory_.initialize(slot, key);
  flags()[slot] = kReserved;
}

void SlotMap::free(uint32_t slot) {
  FRUGAL_ASSERT(flag(slot) == kReserved && !holders.held(slot));
  FRUGAL_ASSERT(index_.find(key_of(slot)) == slot);
  index_.erase(key_of(slot));
  flags()[slot] = 0;
  keys()[slot] = free_;
  free_ = slot;
  reserved_.fetch_sub(1, std::memory_order_relaxed);
}

void SlotMap::remove(uint32_t s) {
  FRUGAL_ASSERT(exists(s));
  uncommitted_ -= flag_mark(flag(s)) != 0;
  flags()[s] = kReserved;
  --existing_;
  reserved_.fetch_add(1, std::memory_order_relaxed);
}

void SlotMap::tell_slots(std::atomic<uint64_t>* count) {
  slots_told_ = count;
  if (count) count->store(next_slot_);
}

}  // namespace frugal
