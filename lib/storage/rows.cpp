#include "storage/rows.h"

#include <algorithm>

#include "base/assert.h"

namespace frugal {

Status Rows::open(const Config& c, MemoryBudget* budget, Tier tier) {
  FRUGAL_ASSERT(!tier.store || c.hashed);
  hashed_ = c.hashed;
  lazy_ = c.lazy || c.hashed;
  FRUGAL_TRY(RowMemory::open(c, budget));
  const uint64_t slots = tier.store ? std::min(c.capacity, tier.slots) : c.capacity;
  FRUGAL_TRY(slots_.open(c, slots, budget));
  if (!tier.store) return FRUGAL_OK;
  tier_ = std::make_unique<StoredRows>(slots_, *this, std::move(tier));
  return tier_->open(budget);
}

Status Rows::pin_next(bool* any) {
  Lock lock(slots_.mu);
  return RowMemory::pin_next(any);
}

void Rows::unpin() {
  Lock lock(slots_.mu);
  RowMemory::unpin();
}

Status Rows::take_state(State* s) {
  Lock lock(slots_.mu);  // no row is begun meanwhile
  if (tier_ && tier_->stored(slots_) + tier_->being_written(slots_) != 0)
    return fail(FRUGAL_ERR_UNSUPPORTED,
                "rows of the table that are not in memory have state of its kind");
  if (hashed_) {
    FRUGAL_TRY(fill_state(s, 0, slots_.handed_out()));  // free slots have memory, too
  } else if (lazy_) {
    for (uint64_t i = 0; i < capacity(); ++i)
      if (!slots_.flag_slabs().committed(i))
        i |= SlabArray::kSlab - 1;  // a flag is a byte: the next slab
      else if (slots_.flag(static_cast<uint32_t>(i)))
        FRUGAL_TRY(fill_state(s, i, 1));
  }
  return RowMemory::take_state(s);
}

void Rows::watch(RowWatcher* watcher, RowWatcher* former) {
  Lock lock(slots_.mu);  // rows may be begun just now: the same hear of them before and after
  RowMemory::watch(watcher, former);
}

void Rows::unwatch(RowWatcher* watcher) {
  Lock lock(slots_.mu);
  RowMemory::unwatch(watcher);
}

Status Rows::check_ids(const uint64_t* keys, size_t n, const uint64_t* padding) const {
  return hashed_ ? FRUGAL_OK : check_dense_ids(keys, n, padding, capacity());
}

namespace {

// Calls put(i, slot) for each id.
template <class Put>
Status each_slot(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                 Put put) {
  // The highest bit is set if the id is not below the capacity, which is less than 2^63:
  // subtracting is vector code everywhere, comparing 64 bits is not.
  auto beyond = [=](uint64_t id) { return (capacity - 1 - id) | id; };
  uint64_t bad = 0;
  if (!padding) {
    for (size_t i = 0; i < n; ++i) {
      put(i, static_cast<uint32_t>(keys[i]));
      bad |= beyond(keys[i]);
    }
  } else {
    const uint64_t none = *padding;
    for (size_t i = 0; i < n; ++i) {
      put(i, keys[i] == none ? kNoSlot : static_cast<uint32_t>(keys[i]));
      bad |= keys[i] == none ? 0 : beyond(keys[i]);
    }
  }
  if (!(bad >> 63)) return FRUGAL_OK;
  for (size_t i = 0; i < n; ++i)
    if (keys[i] >= capacity && !(padding && keys[i] == *padding))
      return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE,
                  "id %s at position %zu: the table has ids 0..%llu; nothing was taken",
                  number_text(keys[i]).c_str(), i, static_cast<unsigned long long>(capacity - 1));
  return fail(FRUGAL_ERR_KEY_OUT_OF_RANGE,
              "ids changed while the call checked them; nothing was taken");
}

}  // namespace

Status check_dense_ids(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity) {
  return each_slot(keys, n, padding, capacity, [](size_t, uint32_t) {});
}

Status dense_slots(const uint64_t* keys, size_t n, const uint64_t* padding, uint64_t capacity,
                   uint32_t* slots) {
  return each_slot(keys, n, padding, capacity, [=](size_t i, uint32_t slot) { slots[i] = slot; });
}

Status Rows::begin_rows(const uint32_t* slots, size_t n) {
  if (hashed_ || !lazy_) return FRUGAL_OK;
  Lock lock(slots_.mu);
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (s != kNoSlot) FRUGAL_TRY(slots_.begin_dense(s));
  }
  return FRUGAL_OK;
}

Status Rows::resolve(const uint64_t* keys, size_t n, const uint64_t* padding, Missing missing,
                     uint32_t* slots, Vector<uint32_t>* created) {
  if (!hashed_) {
    FRUGAL_TRY(dense_slots(keys, n, padding, capacity(), slots));
    return begin_rows(slots, n);
  }
  if (tier_) {
    FRUGAL_ASSERT(missing == Missing::kLeave || missing == Missing::kReserve);
    return tier_->resolve(keys, n, padding, missing == Missing::kLeave, slots);
  }
  const bool blank = missing == Missing::kCreateBlank;
  size_t i = 0;  // slots[0, i) are held
  Status status = FRUGAL_OK;
  for (size_t at = 0; at < n && status == FRUGAL_OK; at += SlotMap::kAtOnce) try {
      const size_t end = std::min(n, at + SlotMap::kAtOnce);
      Lock lock(slots_.mu);
      slots_.index().find(keys + at, end - at, slots + at);
      for (; i < end; ++i) {
        uint32_t& s = slots[i];
        if (padding && keys[i] == *padding) {
          s = kNoSlot;
        } else if (missing == Missing::kLeave) {
          if (s == KeyIndex::kNone || !slots_.exists(s)) s = kMissingSlot;
        } else {
          // A duplicate within the chunk may have added it.
          if (s == KeyIndex::kNone) s = slots_.index().find(keys[i]);
          if (s == KeyIndex::kNone && (status = slots_.add(keys[i], &s, blank)) != FRUGAL_OK) break;
          // Few tables have reserved slots; the others skip this check.
          if (has_reserved() && slots_.flag(s) == SlotMap::kReserved) slots_.holders.hold(s);
        }
      }
    } catch (const std::bad_alloc&) {
      status = fail(FRUGAL_ERR_OUT_OF_MEMORY,
                    "no memory to count who holds rows: free memory of the machine and "
                    "call again");
    }
  if (missing == Missing::kLeave) return status;
  if (status != FRUGAL_OK) {
    release_hold(slots, i);
    return status;
  }
  if (missing == Missing::kReserve) return FRUGAL_OK;
  struct Held {
    Rows& rows;
    const uint32_t* slots;
    size_t n;
    ~Held() { rows.release_hold(slots, n); }
  } held{*this, slots, n};
  create_reserved(slots, n, created);
  return FRUGAL_OK;
}

Status Rows::expect_keys(uint64_t n) {
  Lock lock(slots_.mu);
  return hashed_ ? slots_.expect(n) : FRUGAL_OK;
}

void Rows::release_hold(const uint32_t* slots, size_t n, const uint32_t* start) {
  if (tier_) return tier_->release_hold(slots, n, start);
  for (size_t at = 0; at < n && has_reserved(); at += SlotMap::kAtOnce) {
    Lock lock(slots_.mu);
    for (size_t i = at; i < std::min(n, at + SlotMap::kAtOnce); ++i) {
      const uint32_t s = slots[i];
      if (s >= kMissingSlot || slots_.flag(s) != SlotMap::kReserved) continue;
      if (!slots_.holders.release_hold(s, start ? start[i + 1] - start[i] : 1)) slots_.free(s);
    }
  }
}

void Rows::create(uint32_t s, uint8_t mark) {
  FRUGAL_ASSERT(slots_.flag(s) == SlotMap::kReserved && slots_.holders.held(s));
  if (!tier_) slots_.holders.clear(s);
  if (tier_) tier_->created(slots_);
  slots_.create(s, mark);
  if (!mark) tell_created(s);
}

void Rows::create_reserved(const uint32_t* slots, size_t n, Vector<uint32_t>* created) {
  if (!hashed_) return;
  Lock lock(slots_.mu);
  if (created) {
    // Reserves the list first: each row that exists is in it.
    size_t most = 0;
    for (size_t i = 0; i < n; ++i) most += slots[i] < kMissingSlot && !slots_.exists(slots[i]);
    created->reserve(created->size() + most);
  }
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (s >= kMissingSlot || slots_.exists(s)) continue;
    create(s, 0);
    if (created) created->push_back(s);
  }
}

void Rows::use(const uint32_t* slots, size_t n, uint64_t step, uint64_t next_commit,
               Vector<uint32_t>* created, Vector<uint32_t>* earlier) {
  if (!hashed_) return;
  Lock lock(slots_.mu);
  if (!has_reserved() && slots_.uncommitted() == 0) return;
  const uint8_t mark = SlotMap::mark_of(step);
  // Marks in the order of their steps: the distance from the first uncommitted step.
  auto age = [first = SlotMap::mark_of(next_commit)](uint8_t m) {
    return (m + SlotMap::kMarks - first) % SlotMap::kMarks;
  };
  auto is_later = [&](uint8_t flag) {
    return SlotMap::flag_mark(flag) != 0 && age(SlotMap::flag_mark(flag)) > age(mark);
  };
  // Reserves the lists first: each row that changes is in one.
  size_t most_created = 0, most_earlier = 0;
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] >= kMissingSlot) continue;
    const uint8_t flag = slots_.flag(slots[i]);
    most_created += !SlotMap::flag_exists(flag);
    most_earlier += is_later(flag);
  }
  created->reserve(created->size() + most_created);
  earlier->reserve(earlier->size() + most_earlier);
  for (size_t i = 0; i < n && most_created + most_earlier != 0; ++i) {
    const uint32_t s = slots[i];
    if (s >= kMissingSlot) continue;
    if (!slots_.exists(s)) {
      create(s, mark);
      created->push_back(s);
    } else if (is_later(slots_.flag(s))) {
      slots_.mark(s, mark);
      earlier->push_back(s);
    }
  }
}

void Rows::commit(const uint32_t* slots, size_t n, uint64_t step) {
  if (!hashed_) return;
  Lock lock(slots_.mu);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t s = slots[i];
    if (!slots_.exists(s) || SlotMap::flag_mark(slots_.flag(s)) != SlotMap::mark_of(step)) continue;
    slots_.mark(s, 0);
    tell_created(s);
    if (tier_) tier_->committed(slots_, s);
  }
}

void Rows::undo(const uint32_t* slots, size_t n) {
  if (!hashed_) return;
  Lock lock(slots_.mu);
  for (size_t i = 0; i < n; ++i)
    if (slots_.exists(slots[i]) && SlotMap::flag_mark(slots_.flag(slots[i])) != 0) remove(slots[i]);
}

void Rows::tell_slots(std::atomic<uint64_t>* count) {
  Lock lock(slots_.mu);
  slots_.tell_slots(count);
}

// An existing row ceases to exist.
void Rows::remove(uint32_t s) {
  slots_.remove(s);
  if (tier_) return tier_->removed(slots_, s);
  slots_.holders.forget(s);
  try {
    holders_unknown_.push_back(s);
  } catch (const std::bad_alloc&) {
    ++unlisted_;
  }
  any_unknown_.store(true);
}

// Makes the list ascending and complete, without duplicates. Throws when memory is lacking; a later
// call does it then.
void Rows::list_unknown() {
  if (unlisted_ == 0) {
    std::sort(holders_unknown_.begin(), holders_unknown_.end());
    holders_unknown_.erase(std::unique(holders_unknown_.begin(), holders_unknown_.end()),
                           holders_unknown_.end());
    return;
  }
  // Searches all slots, only if the list has room for what it finds.
  holders_unknown_.reserve(holders_unknown_.size() + unlisted_);
  holders_unknown_.clear();
  for (uint32_t s = 0; s < slots_.handed_out(); ++s)
    if (slots_.flag(s) == SlotMap::kReserved && slots_.holders.unknown(s))
      holders_unknown_.push_back(s);
  unlisted_ = 0;
}

namespace {

// Returns the first position of an ascending list, from `at` on, whose slot is not below `slot`; n
// if there is none. Strides grow, because one list may be much longer than the other.
size_t gallop(const uint32_t* list, size_t at, size_t n, uint32_t slot) {
  size_t stride = 1;
  for (; at + stride < n && list[at + stride] < slot; stride *= 2) at += stride;
  const uint32_t* end = list + std::min(n, at + stride);
  return static_cast<size_t>(std::lower_bound(list + at, end, slot) - list);
}

}  // namespace

// Adds, for each slot of an ascending list, the holds of a holder of `slots`, which ascend too. The
// work is proportional to the shorter list.
void Rows::count_holds(const Vector<uint32_t>& of, const uint32_t* slots, size_t n,
                       const uint32_t* start, Vector<uint64_t>* counts) {
  for (size_t i = 0, at = 0; i < of.size();) {
    at = gallop(slots, at, n, of[i]);
    if (at == n) return;
    if (slots[at] == of[i]) {
      (*counts)[i] += start[at + 1] - start[at];
      ++i;
    } else {
      i = gallop(of.data(), i, of.size(), slots[at]);
    }
  }
}

void Rows::free_unheld(const Vector<uint64_t>& counts) {
  size_t left = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const uint32_t s = holders_unknown_[i];
    // The other slots' rows exist again, or the slots have been free since.
    if (slots_.flag(s) != SlotMap::kReserved || !slots_.holders.unknown(s)) continue;
    slots_.holders.clear(s);
    if (counts[i] == 0) {
      slots_.free(s);
      continue;
    }
    try {
      slots_.holders.hold(s, counts[i]);
    } catch (const std::bad_alloc&) {
      slots_.holders.forget(s);
      holders_unknown_[left++] = s;
    }
  }
  holders_unknown_.resize(left);
  any_unknown_.store(left != 0);
}

uint64_t Rows::uncreate(const uint32_t* slots, size_t n, bool reinitialize) {
  Lock lock(slots_.mu);
  uint64_t were = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t s = slots[i];
    if (hashed_ && !slots_.exists(s)) continue;
    ++were;
    const uint64_t key = key_of(s);
    if (hashed_) {
      if (!SlotMap::flag_mark(slots_.flag(s))) tell_deleting(s);
      remove(s);
    }
    if (hashed_ && reinitialize) initialize(s, key);
  }
  // Rows of a dense table always exist.
  if (reinitialize && !hashed_)
    write_outside(slots, n, [&](RowWrite& write, size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        const uint64_t key = slots[i];
        device::kernels().initialize(write.in_place(), init(), &key, 0, &slots[i], 0, 1);
      }
    });
  return were;
}

bool Rows::exists(uint32_t slot) {
  if (!hashed_) return true;
  Lock lock(slots_.mu);
  return slots_.exists(slot);
}

void Rows::collect_new(const uint32_t* slots, size_t n, Vector<uint32_t>* reserved,
                       Vector<uint32_t>* uncommitted) {
  if (!hashed_) return;
  for (size_t at = 0; at < n; at += SlotMap::kAtOnce) {
    Lock lock(slots_.mu);
    if (!has_reserved() && slots_.uncommitted() == 0) continue;
    for (size_t i = at; i < std::min(n, at + SlotMap::kAtOnce); ++i) {
      if (slots[i] >= kMissingSlot) continue;
      const uint8_t flag = slots_.flag(slots[i]);
      if (flag & SlotMap::kReserved) reserved->push_back(slots[i]);
      if (SlotMap::flag_mark(flag) != 0) uncommitted->push_back(slots[i]);
    }
  }
}

bool Rows::any_reserved(const uint32_t* slots, size_t n) {
  if (!hashed_ || !has_reserved()) return false;
  Lock lock(slots_.mu);
  return std::any_of(slots, slots + n, [this](uint32_t s) {
    return s < kMissingSlot && (slots_.flag(s) & SlotMap::kReserved);
  });
}

uint64_t Rows::count() {
  if (!hashed_) return capacity();
  Lock lock(slots_.mu);
  return slots_.existing() + (tier_ ? tier_->stored(slots_) : 0);
}

size_t Rows::enumerate(uint64_t* cursor, uint64_t* keys, size_t capacity) {
  if (tier_) return tier_->enumerate(cursor, keys, capacity);
  size_t n = 0;
  Lock lock(slots_.mu);
  uint64_t end = hashed_ ? slots_.handed_out() : slots_.capacity();
  while (n < capacity && *cursor < end) {
    uint32_t s = static_cast<uint32_t>((*cursor)++);
    if (!hashed_ || slots_.exists(s)) keys[n++] = key_of(s);
  }
  return n;
}

uint32_t Rows::mappings(Vector<int>* descriptors) const {
  const SlabArray* arrays[kArrays] = {&value_slabs(), &state_slabs(), &slots_.key_slabs(),
                                      &slots_.flag_slabs()};
  uint32_t there = 0;
  for (uint32_t i = 0; i < kArrays; ++i) {
    if (arrays[i]->fd() < 0) continue;
    descriptors->push_back(arrays[i]->fd());
    there |= 1u << i;
  }
  return there;
}

uint64_t Rows::memory_bytes() {
  Lock lock(slots_.mu);
  return value_slabs().committed_bytes() + state_slabs().committed_bytes() + slots_.memory_bytes() +
         (tier_ ? tier_->memory_bytes(slots_) : 0);
}

}  // namespace frugal
